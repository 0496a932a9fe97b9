"""Seconds to build and to inspect each variant of the ladders, one after another on one core."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import build, inspect, settings
from rungs.variants import load_experiment


def main(arch: str = settings.DEFAULT_ARCH) -> None:
    """Print a table for one architecture; a variant that the chip lacks is left out."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tools = build.find_toolchain("pip")
    experiment = load_experiment("gemm")
    variants = dict.fromkeys(v for ladder in experiment.ladders.values() for v in ladder.rungs.values())
    print(
        f"{arch}, nvcc {tools.versions()['nvcc']}, one core of {os.cpu_count()}\n\n| variant | build s | inspect s |\n| --- | --- | --- |"
    )
    builds = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            if not experiment.on_chip(variant, arch):
                continue
            manifest = Path(folder) / variant.name / f"{variant.name}.json"
            start = time.perf_counter()
            build.build(variant.name, arch, manifest, tools)
            built = time.perf_counter()
            inspect.run(variant.name, arch, manifest, manifest.with_suffix(".csv"), "pip")
            builds.append(built - start)
            print(f"| {variant.name} | {built - start:.2f} | {time.perf_counter() - built:.2f} |")
    print(f"\nbuild: median {statistics.median(builds):.2f} s, slowest {max(builds):.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
