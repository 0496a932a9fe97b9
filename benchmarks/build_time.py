"""Seconds to build and to inspect each variant of the ladders, one after another on one core; and every variant by Snakemake.

The second part starts from nothing in a copy of the checkout, with one core and with all of them, and the third builds in two
copies that share Snakemake's cache; `--ladders` leaves both out, `--cache` does the third alone.
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


def copied(folder: Path) -> Path:
    """The checkout without results."""
    folder.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        copy(ROOT / part, folder / part)
    return folder


def snakemake(folder: Path, *arguments: str, **environment: str) -> tuple[float, int]:
    """Seconds of a run for the emulator, and how many build jobs it had. Raises SystemExit where it fails."""
    config = ["--config", "device=emulator", "experiments=gemm", "recorded=[]"]
    command = [sys.executable, "-m", "snakemake", *config, *arguments]
    start = time.perf_counter()
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)
    took = time.perf_counter() - start
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    return took, len(re.findall(r"^(?:local)?rule build:", run.stderr + run.stdout, re.MULTILINE))


def factorial(cores: int) -> None:
    """A line with the seconds of `snakemake factorial` from nothing, which without a GPU builds and inspects all variants."""
    with tempfile.TemporaryDirectory() as temporary:
        took, built = snakemake(copied(Path(temporary) / "rungs"), "--cores", str(cores), "factorial")
        print(f"| {built} | {cores} | {took:.0f} |", flush=True)


def cached(count: int) -> None:
    """A line with the seconds of builds in a checkout that fills Snakemake's cache, and in a second that finds them there."""
    names = [variant.name for variant in load_experiment("gemm").estimable()][:count]
    manifests = [f"results/emulator/build/{settings.DEFAULT_ARCH}/{name}/{name}.json" for name in names]
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary) / "cache"
        cache.mkdir()
        arguments = ["--cores", "1", "--cache", "build", "--", *manifests]
        first, second = (copied(Path(temporary) / name) for name in ("first", "second"))
        (compiling, built), (finding, found), (idle, none) = (
            snakemake(folder, *arguments, SNAKEMAKE_OUTPUT_CACHE=str(cache)) for folder in (first, second, second)
        )
        assert (built, found, none) == (count, count, 0), (built, found, none)
        times, alone = compiling / finding, (compiling - idle) / (finding - idle)
        print(f"| {count} | {compiling:.1f} | {finding:.1f} | {idle:.1f} | {times:.1f} | {alone:.0f} |", flush=True)


def main(arguments: list[str]) -> None:
    if "--cache" not in arguments:
        ladders(next((argument for argument in arguments if not argument.startswith("-")), settings.DEFAULT_ARCH))
    if not {"--cache", "--ladders"} & set(arguments):
        print("| binaries built and inspected | --cores | s |\n| --- | --- | --- |", flush=True)
        for cores in sorted({1, os.cpu_count() or 1}):
            factorial(cores)
    if "--ladders" not in arguments:
        print(
            "\n| builds, --cores 1 | compiled, s | in a second checkout, s | nothing to do, s | times | without that |"
        )
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for count in (20, 100):
            cached(count)


if __name__ == "__main__":
    main(sys.argv[1:])
