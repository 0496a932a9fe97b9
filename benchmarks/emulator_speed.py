"""Seconds that the emulator takes: a batch of 16 CTAs at three K, the race detector, and the counts of a large launch."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import build, settings
from rungs.emulator import problem
from rungs.variants import load_experiment

RUNGS = {"gemm": ("S0", "A1", "B2", "B3", "B5"), "gemm_tuned": ("T3", "T8")}
DEPTHS = (256, 1024, 8192)


def seconds(run: Callable[..., object], *arguments: object, **how: object) -> float:
    """The shorter of two runs: other work on the machine only adds."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run(*arguments, **how)
        times.append(time.perf_counter() - start)
    return min(times)


def right(*arguments: object, **how: object) -> None:
    outcome = problem.emulate_gemm(*arguments, **how)  # type: ignore[arg-type]
    assert outcome.good, outcome


def main(arch: str = settings.DEFAULT_ARCH) -> None:
    """Print a table for one architecture; a rung that the chip lacks is left out."""
    tools = build.find_toolchain("pip")
    shapes = " | ".join(f"512x512x{k} s" for k in DEPTHS)
    print(f"{arch}, {os.cpu_count()} cores\n")
    print(f"| rung | variant | {shapes} | 256x256x256, races s | counts of 4096x4096x4096 s |")
    print("| --- " * (len(DEPTHS) + 4) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name, rungs in RUNGS.items():
            experiment = load_experiment(name)
            for rung, variant in ((rung, experiment.variant(rung)) for rung in rungs):
                if not experiment.on_chip(variant, arch):
                    continue
                manifest = Path(folder) / variant.name / f"{variant.name}.json"
                build.build(variant.name, arch, manifest, tools)
                given = (experiment, variant, arch, manifest.with_suffix(".ptx"))
                times = [seconds(right, *given, (512, 512, k)) for k in DEPTHS]
                times.append(seconds(right, *given, (256, 256, 256), race=True))
                times.append(seconds(problem.affine_counts, *given, (4096, 4096, 4096)))
                print(f"| {rung} | {variant.name} | {' | '.join(f'{t:.2f}' for t in times)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
