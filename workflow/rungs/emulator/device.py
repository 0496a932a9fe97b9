"""The emulator as a device of the pipeline: one variant checked on a small problem and counted at every shape. It has no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs import measure, schemas, workloads
from rungs.binary import made_as
from rungs.emulator import problem as problems
from rungs.emulator.launch import Counts
from rungs.emulator.parser import EmulationError
from rungs.emulator.problem import Outcome
from rungs.errors import Refused, RungsError
from rungs.files import sha256_file, sha256_json, syntax_hash
from rungs.machine_code import ptx_hash
from rungs.plan import check_point, launch_hash
from rungs.results import keep
from rungs.variants import GEMM, Experiment, Variant, ctas_along_k, load_device

Shape = tuple[int, ...]
SCHEDULES = {"cta": "check in lockstep", "ascending": "check warp by warp"}
"""Schedule of a check -> its name in the CSV. Lockstep alone would never see a missing barrier."""
KINDS = (
    *(
        "ldgsts",
        "tma_load",
        "tma_store",
        "tma_reduce",
        "tma_commit",
        "tma_prefetch",
        "ldg",
        "stg",
        "sts",
        "stsm",
        "lds",
        "ldsm",
        "ld_cluster",
        "st_async",
    ),
    *("hmma", "hgmma", "barrier"),
)
UNITS = {"": "inst", "wavefronts_": "wavefront", "conflicts_": "wavefront", "sectors_": "sector", "bytes_": "byte"}
"""What is counted of a kind, as the start of the count's name -> its unit."""


APART = ("verb", "mutations")
"""Modules of the emulator that decide no count."""


def emulate(
    experiment: Experiment, variant: Variant, arch: str, manifest_path: Path, shapes: Sequence[Shape], output: Path
) -> None:
    """Check one variant, count it at each (M, N, K), and write its CSV and manifest. What is no GEMM is checked and counted at
    the small points that its workload names, whatever the `shapes`.

    What goes wrong is a row with a status: a variant that was not built or computes wrong has one for each shape. Raises
    RungsError only where nothing could be written or the PTX is not the one of its manifest.
    """
    built = schemas.read_manifest(manifest_path)
    small, sms = small_problem(experiment, variant, arch)
    if experiment.workload != GEMM:
        shapes = workloads.of(experiment).emulated_points(experiment, variant, load_device(arch))
    binary = {"variant": variant.name}
    if built["status"] == "ok":
        launches = launch_hash(experiment, variant, load_device(arch), shapes)
        binary = {
            **made_as(built),
            "ptx_sha256": built["ptx_sha256"],
            "ptx_hash": ptx_hash(manifest_path.with_suffix(".ptx")),
            "launch_hash": launches,
        }
    job = {
        "source": "emulator",
        "experiment": experiment.name,
        "variant": variant.name,
        "arch": arch,
        "binary": binary,
        "modules": modules(),
        "checks": {"problem": list(small), "sms": sms, "schedules": list(SCHEDULES), "fill": "integer", "races": True},
        "shapes": [list(shape) for shape in shapes],
    }
    kind = experiment.kind("emulate")
    run_id = sha256_json(job)[:8]  # the same job counts the same, on any machine
    manifest = {
        "kind": "emulate",
        "run_id": run_id,
        **job,
        "rungs": experiment.rung_names(variant),
        "compiler": built.get("compiler", {}),
        "software": measure.software({}),
    }
    if keep(output, manifest):
        print(f"{variant.name}: kept, since machine code and emulator are those that counted.")
        return
    failure: tuple[str, str] | None = None
    rows: list[dict[str, Any]] = []
    ptx = manifest_path.with_suffix(".ptx")
    if built["status"] != "ok":
        failure = built["status"], built["reason"]
    elif sha256_file(ptx) != built["ptx_sha256"]:
        raise RungsError(f"{ptx} is not the PTX of {manifest_path}: delete its folder and build it again.")
    else:
        rows, failure = check(experiment, variant, arch, ptx, small, sms)
    ran: dict[tuple, Counts] = {}
    for shape in shapes:
        rows += count(experiment, variant, arch, ptx, shape, failure, ran)
    measure.write_result(kind, [{"run_id": run_id} | row for row in rows], manifest, output)
    print(
        f"{variant.name}: {f'{failure[0]}: {failure[1]}' if failure else f'right, and counted at {len(shapes)} shapes'}"
    )


def modules() -> dict[str, str]:
    """The modules that decide what is counted, each with the hash of its code."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return {path.stem: syntax_hash(path)[:16] for path in paths if path.stem not in APART}


def small_problem(experiment: Experiment, variant: Variant, arch: str) -> tuple[Shape, int | None]:
    """(M, N, K) that two CTAs compute with a K two tiles longer than the ring of stages, and how many SMs to pretend.

    A CTA that takes several tiles gets two, so that its ring goes on from one to the next, and twice as many where its warpgroups
    take turns. Where CTAs share the K of a tile, each has as many K tiles. Of what is no GEMM it is the first
    of the small points that its workload names.
    """
    if experiment.workload != GEMM:
        point = workloads.of(experiment).emulated_points(experiment, variant, load_device(arch))[0]
        return point, problems.SMS
    values = experiment.values(variant)
    several, turns = bool(values.get("VARIANT_PERSISTENT")), 1 + values.get("VARIANT_PINGPONG", 0)
    shape = (
        values["TILE_M"] * (2 if several else 1),
        values["TILE_N"] * 2 * turns,
        values["TILE_K"] * (values["VARIANT_STAGES"] + 2) * ctas_along_k(values),
    )
    return shape, max(1, 2 // load_device(arch).pinned(experiment.name)) if several else None


def check(
    experiment: Experiment, variant: Variant, arch: str, ptx: Path, small: Shape, sms: int | None
) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
    """A row for each schedule, with races watched; and what is wrong first, as status and reason."""
    rows, failure = [], None
    of = (experiment, variant, arch, ptx)
    for schedule, name in SCHEDULES.items():
        if experiment.workload == GEMM:
            m, n, k = small
            found = problems.emulate_gemm(*of, (m, n, k), sms=sms, schedule=schedule, race=True, fill="integer")
        else:
            found = problems.emulate_work(*of, small, schedule=schedule, race=True)
        status, reason = judge(experiment, found)
        error = found.error if found.error == found.error else None
        rows.append(_row(experiment, small, name, error, "difference", status, reason))
        if status != "ok" and not failure:
            failure = status, reason
    return rows, failure


def judge(experiment: Experiment, found: Outcome) -> tuple[str, str]:
    """Status and reason of a check. A race comes before the wrong result or the deadlock that it leads to."""
    where = experiment.describe(found.problem)
    if found.findings:
        first = found.findings[0]
        return "race", f"At {where}, {first.kind}: {first.sentence}"
    if found.failure:
        return "stopped", f"At {where}: {found.failure}"
    if not found.right:
        return (
            "wrong",
            f"At {where} the result differs from numpy's by up to {found.error:g}, where integers must be equal.",
        )
    return "ok", ""


def count(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    ptx: Path,
    shape: Shape,
    failure: tuple[str, str] | None,
    ran: dict[tuple, Counts],
) -> list[dict[str, Any]]:
    """A row for each count that is not zero; one row for a variant that failed and a shape that is refused."""
    try:
        check_point(experiment, variant, load_device(arch), shape)
        if failure:
            return [_row(experiment, shape, "all", None, "", *failure)]
        if experiment.workload == GEMM:
            m, n, k = shape
            counts = problems.affine_counts(experiment, variant, arch, ptx, (m, n, k), ran=ran)
        else:
            found = problems.emulate_work(experiment, variant, arch, ptx, shape)
            if not found.good:
                return [_row(experiment, shape, "all", None, "", *judge(experiment, found))]
            counts = found.counts
    except Refused as refusal:
        return [_row(experiment, shape, "all", None, "", refusal.status, str(refusal))]
    except EmulationError as error:
        return [_row(experiment, shape, "all", None, "", "stopped", str(error))]
    return [_row(experiment, shape, name, value, unit, "ok", "") for name, value, unit in named(counts)]


def named(counts: Mapping[str, int]) -> list[tuple[str, int, str]]:
    """Name, value and unit of what is counted, kind by kind; neither PTX totals nor how often a wait is asked again."""
    names = [(f"{what}{kind}", unit) for kind in KINDS for what, unit in UNITS.items() if counts.get(kind)]
    return [(name, int(counts[name]), unit) for name, unit in names if name in counts]


def _row(
    experiment: Experiment, shape: Shape, metric: str, value: float | None, unit: str, status: str, reason: str
) -> dict[str, Any]:
    return dict(zip(experiment.axis_names, shape, strict=True)) | {
        "metric": metric,
        "value": value,
        "unit": unit,
        "status": status,
        "reason": reason,
    }
