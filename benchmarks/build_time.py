"""Seconds to build and to inspect each variant of the ladders, one after another on one core; and every variant by Snakemake.

The second part starts from nothing in a copy of the checkout, with one core and with all of them; `--ladders` leaves it out.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import build, inspect, settings
from rungs.files import ROOT
from rungs.variants import load_experiment

PARTS = ("Snakefile", "config", "envs", "kernels", "profiles", "workflow")


def ladders(arch: str) -> None:
    """A table for one architecture; a variant that the chip lacks is left out."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    tools = build.find_toolchain("pip")
    experiment = load_experiment("gemm")
    variants = dict.fromkeys(v for ladder in experiment.ladders.values() for v in ladder.rungs.values())
    print(f"{arch}, nvcc {tools.versions()['nvcc']}, one core of {os.cpu_count()}\n")
    print("| variant | build s | inspect s |\n| --- | --- | --- |")
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
    print(f"\nbuild: median {statistics.median(builds):.2f} s, slowest {max(builds):.2f} s\n", flush=True)
    os.sched_setaffinity(0, cores)


def factorial(cores: int) -> None:
    """A line with the seconds of `snakemake factorial` from nothing, which without a GPU builds and inspects all variants."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "rungs"
        folder.mkdir()
        for part in PARTS:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        config = ["--config", "device=emulator", "experiments=gemm", "recorded=[]"]
        command = [sys.executable, "-m", "snakemake", "--cores", str(cores), "factorial", *config]
        start = time.perf_counter()
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        took = time.perf_counter() - start
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-2000:]}")
        built = len(re.findall(r"^(?:local)?rule build:", run.stderr + run.stdout, re.MULTILINE))
        print(f"| {built} | {cores} | {took:.0f} |", flush=True)


def main(arguments: list[str]) -> None:
    ladders(next((argument for argument in arguments if not argument.startswith("-")), settings.DEFAULT_ARCH))
    if "--ladders" not in arguments:
        print("| binaries built and inspected | --cores | s |\n| --- | --- | --- |", flush=True)
        for cores in sorted({1, os.cpu_count() or 1}):
            factorial(cores)


if __name__ == "__main__":
    main(sys.argv[1:])
