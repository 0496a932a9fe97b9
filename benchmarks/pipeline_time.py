"""Seconds of whole runs: a no-op `all`; with a GPU also `preset=quick` from nothing and ladder B with builds done.

Works in a copy of the checkout, so that no result is touched. Further arguments go to snakemake, for example
`--config toolchain=system 'clock={mode: observe}'`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import clock
from rungs.files import ROOT

LEFT_OUT = shutil.ignore_patterns(".git", ".snakemake", ".venv*", "h200", "emulator", "logs", ".*_cache")


def seconds(folder: Path, *arguments: str) -> float:
    """Wall time of one snakemake run. Raises SystemExit with the end of its output where it fails."""
    command = [sys.executable, "-m", "snakemake", "--cores", str(os.cpu_count()), *arguments]
    start = time.perf_counter()
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    return time.perf_counter() - start


def main(extra: list[str]) -> None:
    config = extra[extra.index("--config") + 1 :] if "--config" in extra else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "rungs"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        gpus = clock.gpus()
        print(f"{gpus[0].name if gpus else 'no GPU'}, {os.cpu_count()} cores\n\n| run | s |\n| --- | --- |", flush=True)
        if gpus:
            quick = seconds(folder, "all", "--config", "preset=quick", *config)
            print(f"| preset=quick from nothing | {quick:.1f} |", flush=True)
            seconds(folder, "--until", "build", "inspect", *(["--config", *config] if config else []))
            ladder = seconds(folder, "ladders", "--config", "ladders=B", *config)
            print(f"| ladder B over ten shapes with its floor, builds done | {ladder:.1f} |", flush=True)
        else:
            first = seconds(folder, "all", *extra)
            print(f"| all from nothing | {first:.1f} |", flush=True)
            again = seconds(folder, "all", *extra)
            print(f"| all with nothing to do | {again:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
