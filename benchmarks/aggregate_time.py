"""Seconds and memory of `python -m rungs aggregate` on a million raw rounds of 100 variants at ten shapes, and of a million rows.

A round has a row for each of its arms: the rung, its predecessors and the control. The set is synthetic.

    python benchmarks/aggregate_time.py [ROWS ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs.variants import load_experiment
from synthetic import ARCH, World, write_set

EXPERIMENT = load_experiment("gemm")
VARIANTS = [variant.name for variant in EXPERIMENT.estimable()]
FLOOR_JOBS = 3


def rows_of_round() -> int:
    """Rows that a round of every job has at one shape, floor jobs included."""
    rungs = [2 + len(EXPERIMENT.predecessors(EXPERIMENT.variant(name))) for name in VARIANTS]
    return sum(rungs) + 3 * FLOOR_JOBS


def write(results: Path, rounds: int) -> None:
    """Raw rounds of every variant, so many at each of the experiment's shapes."""
    write_set(results, World(variants=VARIANTS, rounds=rounds, between=0.003, floor_jobs=FLOOR_JOBS, profile=""))


def aggregated(results: Path, variants: list[str] = VARIANTS) -> tuple[float, float, int]:
    """Seconds, processor seconds and peak resident set in bytes of the process that the rule starts."""
    argv = [sys.executable, "-m", "rungs", "aggregate", "--results", str(results), "--experiment", "gemm"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "workflow")}
    start = time.perf_counter()
    child = subprocess.Popen([*argv, "--arch", ARCH, "--variants", *variants], env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    took = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {child.returncode}")
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main(arguments: list[str]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shapes = len(EXPERIMENT.shapes())
    print(f"{len(VARIANTS)} variants at {shapes} shapes, one core of {os.cpu_count()}\n")
    print("| rounds | rows | s | processor s | peak MiB |\n| --- | --- | --- | --- | --- |", flush=True)
    jobs = (len(VARIANTS) + FLOOR_JOBS) * shapes
    wanted = [round(int(rows) / rows_of_round() / shapes) for rows in arguments]
    for rounds in wanted or (round(1e6 / rows_of_round() / shapes), round(1e6 / jobs)):
        with tempfile.TemporaryDirectory(prefix="rungs-aggregate-") as folder:
            results = Path(folder) / "h200"
            write(results, rounds)
            took, busy, peak = aggregated(results)
            rows = rounds * shapes * rows_of_round()
            print(f"| {rounds * jobs} | {rows} | {took:.1f} | {busy:.1f} | {peak / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
