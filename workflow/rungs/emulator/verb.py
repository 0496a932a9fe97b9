"""`python -m rungs emulate`: run a variant without a GPU and print what it computed, counted and did wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rungs import build, workloads
from rungs.emulator import device
from rungs.emulator import problem as problems
from rungs.emulator.problem import SMS, Outcome
from rungs.errors import Refused, RungsError
from rungs.plan import plan
from rungs.variants import GEMM, Experiment, Variant, ctas_along_k, load_device

FULL = 64
"""CTAs of the largest grid that runs in full: of a larger one three are run, and its counts follow from small K."""
KINDS = {
    "ldgsts": "LDGSTS (cp.async)",
    "tma_load": "TMA loads",
    "tma_store": "TMA stores",
    "tma_reduce": "TMA reductions",
    "tma_commit": "TMA stores closed to a group",
    "tma_prefetch": "tensor maps prefetched",
    "ldg": "LDG (ld.global)",
    "stg": "STG (st.global)",
    "sts": "STS (st.shared)",
    "stsm": "STSM (stmatrix)",
    "lds": "LDS (ld.shared)",
    "ldsm": "LDSM (ldmatrix)",
    "ld_cluster": "LD (ld.shared::cluster)",
    "st_async": "STAS (st.async)",
    "hmma": "HMMA (mma.sync)",
    "hgmma": "HGMMA (wgmma)",
    "barrier": "BAR (bar.sync)",
    "mbarrier": "mbarrier, polls as emulated",
    "alu": "all else, in PTX not SASS",
}
WIDENED = 4
"""Copies of a workload's operands that a run holds at once: as they are, as float64, and what is expected."""
COLUMNS = ("wavefronts", "conflicts", "sectors", "bytes")
SCHEDULES = {
    "cta": "whole CTAs in lockstep",
    "ascending": "warp by warp, the first that can run",
    "descending": "warp by warp, the last that can run",
    "random": "warp by warp at random",
}


def usual_problem(experiment: Experiment, variant: Variant, arch: str) -> dict[str, int]:
    """M, N and K of a GEMM where they are not given: where CTAs share a tile's K, so much of it that each goes round its ring."""
    k = 1024
    if ctas_along_k(experiment.values(variant)) > 1:
        k = max(k, device.small_problem(experiment, variant, arch)[0][2])
    return {"m": 512, "n": 512, "k": k}


def at_point(experiment: Experiment, variant: Variant, arch: str, at: Mapping[str, int]) -> tuple[int, ...]:
    """The first of the points that a workload's variant is checked at, with the values of `at` in place of its own.

    Raises RungsError for an axis that the experiment has not, Refused for a point that the variant does not support.
    """
    workload, device = workloads.of(experiment), load_device(arch)
    workloads.rehearse(experiment, device)
    if odd := next((axis for axis in at if axis not in experiment.axis_names), None):
        raise RungsError(
            f"{experiment.name} has no axis {odd!r}: give --at with one of {', '.join(experiment.axis_names)}."
        )
    experiment.check_chip(variant, arch)
    first = workload.emulated_points(experiment, variant, device)[0]
    point = tuple({**dict(zip(experiment.axis_names, first, strict=True)), **at}.values())
    workload.check(experiment, variant, device, point)
    need = WIDENED * workloads.footprint(workload.operands(experiment, variant, device, point, SMS))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > there // 2:
        raise Refused(
            f"{variant.name} with {experiment.describe(point)} takes {need} bytes to emulate, above half of this machine's"
            f" {there}: choose a smaller point."
        )
    return point


def run(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    problem: tuple[int, ...],
    ptx: Path | None,
    *,
    schedule: str,
    delivery: str,
    race: bool,
    fill: str,
    toolchain: str,
) -> int:
    """Emulate and print; returns 1 where the result is wrong or something was found, else 0. `problem` is M, N, K or a point.

    Builds the variant where no `ptx` is given. Raises RungsError for a variant that does not build and a problem that is refused.
    """
    gemm, some, grid = experiment.workload == GEMM, None, 0
    m, n, k = problem if gemm else (0, 0, 0)
    if gemm:
        addresses = dict.fromkeys("abc", 1 << 20)
        # Refuses before anything is built.
        launched = plan(experiment, variant, load_device(arch), (m, n, k), addresses)
        grid = launched.grid[0]
        problems.check_memory((m, n, k), launched, race)
        some = None if grid <= FULL else problems.whole({0, grid // 2, grid - 1}, launched.together)
    with tempfile.TemporaryDirectory(prefix="rungs-emulate-") as folder:
        if ptx is None:
            manifest = Path(folder) / f"{variant.name}.json"
            built = build.build(variant.name, arch, manifest, build.find_toolchain(toolchain))
            if built["status"] != "ok":
                raise RungsError(built["reason"])
            ptx = manifest.with_suffix(".ptx")
        if gemm:
            outcome = problems.emulate_gemm(
                experiment,
                variant,
                arch,
                ptx,
                (m, n, k),
                schedule=schedule,
                delivery=delivery,
                race=race,
                ctas=some,
                fill=fill,
            )
        else:
            outcome = problems.emulate_work(
                experiment, variant, arch, ptx, problem, schedule=schedule, delivery=delivery, race=race, fill=fill
            )
        counts = outcome.counts
        if some is not None and outcome.good:
            counts = problems.affine_counts(experiment, variant, arch, ptx, (m, n, k))
    names = ", ".join(experiment.rung_names(variant))
    print(
        f"{variant.name}{f' ({names})' if names else ''}, {experiment.describe(problem)}, {load_device(arch).title}, emulated:"
        f" {len(outcome.ctas)} of {grid or len(outcome.ctas)} CTAs, {SCHEDULES[schedule]}, copies land {delivery}"
        f"{', races watched' if race else ''}"
    )
    print("\n".join(_lines(outcome, counts, fill)))
    if race and not outcome.failure and not outcome.findings:
        print("no race found")
    return 0 if outcome.good else 1


def _findings(outcome: Outcome) -> list[str]:
    """A line for each two lines of the source between which something was found: its first finding, and how many more it has."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for finding in outcome.findings:
        alike.setdefault((finding.kind, *finding.sources), []).append(finding.sentence)
    return [
        f"{kind}: {first}" + (f" {len(more)} more between the same lines of the source." if more else "")
        for (kind, *_), (first, *more) in alike.items()
    ]


def _lines(outcome: Outcome, counts: dict[str, int], fill: str) -> list[str]:
    found = _findings(outcome)
    if outcome.failure:
        return [f"failed: {outcome.failure}", *found]
    exact = "equal to numpy" if fill == "integer" else f"largest error {outcome.error:.1e} against numpy"
    lines = [f"right: {exact}" if outcome.right else f"WRONG: largest error {outcome.error:g} against numpy"]
    rows: list[tuple[str, ...]] = [("warp instructions of the launch", "", *COLUMNS)]
    for kind, label in KINDS.items():
        if counts.get(kind):
            cells = (counts.get(f"{column}_{kind}") for column in COLUMNS)
            rows.append((label, f"{counts[kind]:,}", *("" if cell is None else f"{cell:,}" for cell in cells)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    if outcome.result:
        conflicts = sorted(outcome.result.sites, key=lambda site: -site.counts.get("conflicts", 0))
        for site in conflicts[:5]:
            if site.counts.get("conflicts"):
                ways = site.counts["wavefronts"] / (site.counts["wavefronts"] - site.counts["conflicts"])
                lines.append(
                    f"bank conflicts: PTX line {site.ptx_line} ({site.opcode}; {site.source}), {ways:g} times the wavefronts"
                )
    lines += found
    return lines
