"""A recorded set's hardware counters beside the emulator's counts of the same binaries, launch by launch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rungs import build, inspect, schemas
from rungs.aggregate import frame_of
from rungs.emulator.metrics import NCU, SECTOR, as_ncu
from rungs.emulator.problem import affine_counts
from rungs.errors import RungsError
from rungs.files import sha256_json, write_text
from rungs.plan import plan
from rungs.results import ResultsSet
from rungs.tables import count_text, grid
from rungs.variants import GEMM, Experiment, Variant, load_device, load_experiment

Shape = tuple[int, int, int]
LDS = "smsp__inst_executed_op_shared_ld.sum"
PATCHED = (
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    "sm__sass_l1tex_m_xbar2l1tex_read_bytes_mem_global_op_ldgsts_cache_bypass.sum",
)
"""Two of ncu's counters of LDGSTS that are summed per instruction of SASS."""
CONFLICTS = tuple(metric for metric in NCU if "bank_conflicts" in metric)
FETCHED = "l1tex__m_xbar2l1tex_read_bytes_mem_lg_op_ld.sum"
CAUSES = {
    "first tile left out": (
        "lacks exactly the first K tile, in just the binaries whose prologue ptxas predicates (`@P0 LDGSTS`) rather than"
        " branches round; smsp__inst_executed_op_ldgsts of the same launches has it"
    ),
    "fillers": (
        "has in it the three `@!PT LDS` that ptxas puts before the LDGSTS of a K tile and that no lane executes: the difference"
        " is three for each warp and K tile, or three for the whole of a predicated prologue, and the wavefronts of the same"
        " loads are equal"
    ),
    "other warps": (
        "includes what accesses of different warps did to each other, which depends on timing: on the chip there are as many or"
        " more, never fewer"
    ),
    "other engines": (
        "includes what wgmma's reads and the copy engine's of the same banks held up, which depends on timing: on the chip there"
        " are as many or more, never fewer"
    ),
    "found in L1": "lacks a few sectors, below 0.2 %, that were found in L1",
    "polls": (
        "has in it how often warps asked again whether the sums of other CTAs are there, a sector of 32 bytes each time, which"
        " depends on timing: on the chip there are more, never fewer"
    ),
}
"""Why a counter may differ from the emulator's, as `agreement` names it."""
MUST = (
    *(LDS, "smsp__inst_executed_op_ldsm.sum", "smsp__inst_executed_op_shared_st.sum"),
    *("smsp__inst_executed_op_ldgsts.sum", "smsp__inst_executed_op_tma_ld.sum"),
    *("sm__inst_executed_pipe_tensor_op_hmma.sum", "sm__inst_executed_pipe_tensor_op_gmma.sum"),
    *(metric for metric in NCU if "wavefronts_mem_shared" in metric),
    *("l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum", PATCHED[1]),
)
"""The counters whose two columns the table shows."""
TITLES = {
    LDS: "LDS",
    "smsp__inst_executed_op_ldsm.sum": "LDSM",
    "smsp__inst_executed_op_shared_st.sum": "STS",
    "smsp__inst_executed_op_ldgsts.sum": "LDGSTS",
    "smsp__inst_executed_op_tma_ld.sum": "TMA loads",
    "sm__inst_executed_pipe_tensor_op_hmma.sum": "HMMA",
    "sm__inst_executed_pipe_tensor_op_gmma.sum": "HGMMA",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "wavefronts of LDS",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum": "of LDSM",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum": "of STS",
    PATCHED[0]: "of LDGSTS",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum": "bytes of TMA loads",
    PATCHED[1]: "bytes of LDGSTS",
}


# ---- comparing -------------------------------------------------------------------------------------------------------


def run(results: Path, toolchain: str) -> None:
    """Write `data/<experiment>/emulated.csv` for every profile of GEMMs of a recorded set, and print how many counters are equal.

    The launches of other workloads are profiled whole, and are too large to emulate: their pages hold ncu's counts beside those
    of a closed form. Raises RungsError for a folder without profiles of GEMMs.
    """
    found = ResultsSet(results)
    profiled = [name for name in found.experiments("profile") if load_experiment(name).workload == GEMM]
    if not profiled:
        raise RungsError(f"{results} has no profiles: name a set that has, for example results/recorded/h200.")
    for name in profiled:
        experiment = load_experiment(name)
        rows: list[dict[str, Any]] = []
        jobs = found.jobs("profile", name)
        for number, job in enumerate(jobs, start=1):
            rows += compare(found, experiment, experiment.variant(job), toolchain)
            print(f"{name}: {job}, {number} of {len(jobs)}", flush=True)
        schemas.write_csv("emulated", frame_of("emulated", rows), results / "data" / experiment.name / "emulated.csv")
        print(sentence(pd.DataFrame(rows)))


def compare(results: ResultsSet, experiment: Experiment, variant: Variant, toolchain: str) -> list[dict[str, Any]]:
    """A row for each counter of each launch that was profiled of a variant, but for those that are 0 on both sides.

    Where the checkout's machine code is not that of the recorded binary there is nothing to compare, which is a row for each shape.
    """
    job = results.job("profile", experiment.name, variant.name)
    recorded = job.frame("profile")
    recorded = recorded[recorded["status"] == "ok"]
    manifest, arch = job.manifest, job.manifest["arch"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rungs-equality-") as folder:
        path = Path(folder) / f"{variant.name}.json"
        built = build.build(variant.name, arch, path, build.find_toolchain(toolchain))
        same = built.get("code_hash") == manifest["binary"].get("code_hash")
        sass = inspect.parse_sass(inspect.disassemble(path.with_suffix(".cubin"), toolchain)) if same else []
        ran: dict[tuple, Any] = {}
        for (m, n, k), here in recorded.groupby(["m", "n", "k"]):
            shape = (int(m), int(n), int(k))
            where = {"run_id": manifest["run_id"], "variant": variant.name} | dict(zip("mnk", shape, strict=True))
            if not same:
                rows.append(where | {"metric": "all", "ncu": None, "emulator": None, "agreement": "other binary"})
                continue
            counts = affine_counts(
                experiment, variant, arch, path.with_suffix(".ptx"), shape, manifest["gpu"].get("sms"), ran
            )
            measured = dict(zip(here["metric"], here["value"], strict=True))
            for metric, ours in ({LDS: counts.get("lds", 0)} | as_ncu(counts)).items():
                if measured.get(metric) or (metric in measured and ours):
                    word = agreement(
                        metric, measured[metric], ours, counts, sass, Launch.of(experiment, variant, arch, shape)
                    )
                    rows.append(
                        where | {"metric": metric, "ncu": int(measured[metric]), "emulator": ours, "agreement": word}
                    )
    return rows


class Launch:
    """What the rules of agreement need of a launch: its warps, and the K tiles and stages of a CTA."""

    def __init__(self, warps: int, depth: int, stages: int, m: int) -> None:
        self.warps, self.depth, self.stages, self.m = warps, depth, stages, m

    @classmethod
    def of(cls, experiment: Experiment, variant: Variant, arch: str, shape: Shape) -> Launch:
        launched = plan(experiment, variant, load_device(arch), shape, dict.fromkeys("abc", 1 << 20))
        values = experiment.values(variant)
        warps = int(np.prod(launched.grid)) * launched.block[0] // 32
        return cls(warps, shape[2] // values["TILE_K"], values["VARIANT_STAGES"], shape[0])


def agreement(
    metric: str,
    ncu: float,
    emulator: int,
    counts: Mapping[str, int],
    sass: Sequence[inspect.Instruction],
    launch: Launch,
) -> str:
    """`equal`, the cause of a difference that is one of CAUSES to the last count, or `differs`."""
    if ncu == emulator:
        return "equal"
    if metric in PATCHED:
        predicated = any(i.opcode.startswith("LDGSTS") and i.predicate for i in sass)
        return "first tile left out" if predicated and ncu == emulator - emulator // launch.depth else "differs"
    if metric == LDS:
        fillers = any(i.opcode.startswith("LDS") and i.filler for i in sass)
        passes, rest = divmod(ncu - emulator, 3 * launch.warps)
        exact = not rest and launch.depth - launch.stages < passes <= launch.depth
        return "fillers" if fillers and exact else "differs"
    if metric in CONFLICTS:
        waves = sum(counts.get(f"wavefronts_{kind}", 0) for kind in ("lds", "ldsm", "sts", "stsm"))
        if counts.get("hgmma") and emulator <= ncu <= emulator + 2 * waves:
            return "other engines"
        return "other warps" if emulator <= ncu <= emulator + 0.3 * waves else "differs"
    if metric == FETCHED and 0.998 * emulator <= ncu <= emulator:
        return "found in L1"
    if metric == FETCHED and ncu > emulator and not (ncu - emulator) % SECTOR:
        return "polls" if any(i.opcode.startswith("LDG.E.STRONG") for i in sass) else "differs"
    return "differs"


# ---- the table -------------------------------------------------------------------------------------------------------


def write(results: Path, experiment_name: str) -> None:
    """Write `md/<experiment>_counters.md` of a recorded set."""
    write_text(results / "md" / f"{experiment_name}_counters.md", render(results, experiment_name))


def render(results: Path, experiment_name: str) -> str:
    """How many counters are equal, which are not and why, and both columns of every launch."""
    experiment, frame = load_experiment(experiment_name), read(results, experiment_name)
    compared = frame[frame["agreement"] != "other binary"]
    parts = [f"# {experiment_name}: ncu's counters and the emulator's", summary(results, experiment_name)]
    parts += ["## Every launch"]
    parts.append(
        "ncu's count / the emulator's; one number where they are the same. k, M, G are powers of 1000 and exact counts are in"
        f" [emulated.csv](../data/{experiment_name}/emulated.csv)."
    )
    body = []
    for (name, m, n, k), rows in compared.groupby(["variant", "m", "n", "k"], sort=False):
        by_metric = rows.set_index("metric")
        rungs = " ".join(experiment.rung_names(experiment.variant(str(name))))
        body.append([str(name), rungs, f"{m}x{n}x{k}", *(_both(by_metric, metric) for metric in MUST)])
    parts.append(grid(["variant", "rungs", "shape", *(TITLES[metric] for metric in MUST)], body))
    return "\n\n".join(parts) + "\n"


def _both(rows: pd.DataFrame, metric: str) -> str:
    if metric not in rows.index:
        return "0"
    ncu, emulator = float(rows.loc[metric, "ncu"]), float(rows.loc[metric, "emulator"])
    return count_text(ncu) if ncu == emulator else f"{ncu:,.0f} / {emulator:,.0f}"


def summary(results: Path, experiment_name: str) -> str:
    """A row per counter: launches, equal ones and the others by cause; the sentence; where it comes from."""
    frame = read(results, experiment_name)
    compared = frame[frame["agreement"] != "other binary"]
    words = [word for word in (*CAUSES, "differs") if (compared["agreement"] == word).any()]
    body = []
    for metric in dict.fromkeys(compared["metric"]):
        tally = compared[compared["metric"] == metric]["agreement"].value_counts()
        body.append(
            [metric, *(str(int(number)) for number in (tally.sum(), *(tally.get(w, 0) for w in ("equal", *words))))]
        )
    notes = []
    for word in (word for word in words if word in CAUSES):
        here = compared[compared["agreement"] == word]
        notes.append(f"- {word} ({here['variant'].nunique()} binaries): ncu's counter {CAUSES[word]}.")
    return "\n\n".join(
        [
            grid(["counter of ncu", "launches", "equal", *words], body),
            *(["\n".join(notes)] if notes else []),
            f"**{sentence(frame)}**",
            *([f"<sub>{note}</sub>"] if (note := _behind(results, experiment_name, frame)) else []),
            f"<sub>{_made_from(results, experiment_name)}</sub>",
        ]
    )


def _behind(results: Path, experiment_name: str, frame: pd.DataFrame) -> str:
    """How many variants were profiled since the comparison was made, in a sentence; empty where there are none."""
    manifests = ResultsSet(results).all_manifests("profile", experiment_name).values()
    since = {manifest["run_id"] for manifest in manifests} - set(frame["run_id"])
    if not since:
        return ""
    return (
        f"{len(since)} variants were profiled since: run `python -m rungs emulate-recorded` on the set to compare them."
    )


def sentence(frame: pd.DataFrame) -> str:
    """How many counters are equal, and how many of the others are explained to the last count."""
    compared = frame[frame["agreement"] != "other binary"]
    launches = len(compared[["variant", "m", "n", "k"]].drop_duplicates())
    tally = compared["agreement"].value_counts()
    known = [f"{tally[word]} {word}" for word in CAUSES if word in tally]
    said = (
        f"{tally.get('equal', 0)} of {len(compared)} counters, of {launches} launches of {compared['variant'].nunique()}"
        " binaries, are equal to the last count (those that are 0 on both sides not among them)"
    )
    if known:
        said += f"; of the others {', '.join(known)}"
    said += f"; {tally.get('differs', 0)} differ without a known cause"
    other = frame[frame["agreement"] == "other binary"]["variant"].nunique()
    return f"{said}{f'; {other} binaries are other ones now and not compared' if other else ''}."


def _made_from(results: Path, experiment_name: str) -> str:
    manifests = ResultsSet(results).all_manifests("profile", experiment_name).values()
    gpus = ", ".join(sorted({m["gpu"]["name"] for m in manifests}))
    versions = ", ".join(sorted({m["ncu"].get("version", "") for m in manifests}))
    runs = sha256_json({m["variant"]: m["run_id"] for m in manifests})[:8]
    builds = sha256_json({m["variant"]: m["binary"].get("build_id", "") for m in manifests})[:8]
    return (
        f"{gpus}, ncu {versions}, runs {runs} (hash over {len(manifests)}); builds {builds} (hash over {len(manifests)});"
        " the emulator on the PTX of the same binaries, as `python -m rungs emulate-recorded` counts it."
    )


def read(results: Path, experiment_name: str) -> pd.DataFrame:
    """Raises RungsError where a row that says how two counts agree lacks one of them."""
    path = results / "data" / experiment_name / "emulated.csv"
    frame = schemas.read_csv("emulated", path)
    half = (frame["agreement"] != "other binary") & (frame["ncu"].isna() | frame["emulator"].isna())
    if half.any():
        row = int(frame.index[half][0])
        raise RungsError(
            f"{path}, row {row + 2}: agreement is {frame['agreement'][row]!r} and a count is missing: run"
            " `python -m rungs emulate-recorded` to make it anew."
        )
    return frame


def compared(results: Path, experiment_name: str) -> bool:
    """Whether the set's profiles of an experiment were counted in the emulator."""
    return (results / "data" / experiment_name / "emulated.csv").is_file()


def blocks(results: Path, experiment_name: str) -> dict[str, str]:
    """The README's block of the comparison."""
    return {f"{experiment_name}:counters": summary(results, experiment_name)}
