"""Seconds to plan `all`: of experiment gemm, and of the same with one more factor, so that it has 2,000 and 5,000 variants.

Works in a copy of the checkout without results, for an H200 that only the stand-in for NVML has: nothing is run. With
`--profile` it prints where the time of the last goes. Numbers as arguments are other counts of the factor's levels.
"""

from __future__ import annotations

import json
import os
import pstats
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("Snakefile", "config", "envs", "kernels", "profiles", "workflow")
LEVELS = (1, 20, 50)
"""Of the factor that is added; with 1 there is none."""


def widen(experiment: Path, count: int) -> None:
    """Give the experiment a factor that nothing depends on, of so many levels; its rungs stand at the first."""
    raw = yaml.safe_load(experiment.read_text(encoding="utf-8"))
    raw["variant_name"] += "_x{extra}"
    levels = {level: {"title": f"level {level}"} for level in range(count)}
    raw["factors"]["extra"] = {"macro": "VARIANT_EXTRA", "title": "extra", "levels": levels}
    for ladder in raw["ladders"].values():
        ladder["base"]["extra"] = 0
    raw["factorial"].pop("profile_more", None)  # it names variants
    for end in ("source", "target"):
        raw["factorial"]["shapley"][end]["extra"] = 0
    experiment.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")


def plan(folder: Path, *profiler: str, quiet: bool = False) -> tuple[float, float, int]:
    """Seconds and processor seconds of a dry run, and the jobs that it plans, of which a quiet one says nothing.

    Raises SystemExit where it fails.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "workflow"), str(ROOT / "tests" / "standin")]),
        "RUNGS_STANDIN_NVML": str(folder / "nvml.json"),
    }
    argv = [
        sys.executable,
        *profiler,
        "-m",
        "snakemake",
        "--dry-run",
        "all",
        *(["--quiet"] if quiet else []),
        "--config",
        "experiments=gemm",
        "recorded=[]",
    ]
    start, busy = time.perf_counter(), _busy()
    run = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    took, busy = time.perf_counter() - start, _busy() - busy
    total = re.search(r"^total\s+(\d+)$", run.stdout + run.stderr, re.MULTILINE)
    if run.returncode or not (total or quiet):
        raise SystemExit(f"snakemake ended with {run.returncode}:\n{(run.stdout + run.stderr)[-2000:]}")
    return took, busy, int(total[1]) if total else 0


def _busy() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(arguments: list[str]) -> None:
    print(
        f"one core of {os.cpu_count()}\n\n| variants | jobs planned | s | processor s | of which to print the jobs |"
        "\n| --- | --- | --- | --- | --- |",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "rungs"
        folder.mkdir()
        for part in PARTS:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        (folder / "nvml.json").write_text(json.dumps({"gpus": [{"name": "NVIDIA H200", "uuid": "GPU-1"}]}))
        experiment = folder / "config" / "experiments" / "gemm.yaml"
        plain = experiment.read_text(encoding="utf-8")
        for levels in [int(argument) for argument in arguments if argument.isdigit()] or LEVELS:
            experiment.write_text(plain, encoding="utf-8")
            if levels > 1:
                widen(experiment, levels)
            code = "from rungs.variants import load_experiment; print(len(load_experiment('gemm').estimable()))"
            environment = os.environ | {"PYTHONPATH": str(folder / "workflow")}
            counted = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            took, busy, jobs = min(plan(folder) for _ in range(2))
            printing = busy - plan(folder, quiet=True)[1]
            print(f"| {counted.stdout.strip()} | {jobs} | {took:.1f} | {busy:.1f} | {printing:.1f} |", flush=True)
        if "--profile" in arguments:
            plan(folder, "-m", "cProfile", "-o", str(folder / "profile"))
            found = pstats.Stats(str(folder / "profile"))
            found.sort_stats("tottime").print_stats(40)
            found.sort_stats("cumtime").print_stats(r"/rungs/workflow/|\.smk|/rungs/Snakefile", 40)


if __name__ == "__main__":
    main(sys.argv[1:])
