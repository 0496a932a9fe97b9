"""Seconds of whole runs: with a GPU `preset=quick` from nothing and ladder B with builds done; without one `all` from nothing
with one core and with every core, `preset=quick` from nothing, and `all` with nothing to do.

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

CORES = os.cpu_count() or 1


def copy(folder: Path) -> Path:
    """The checkout with its recorded results and without live ones."""
    hidden = shutil.ignore_patterns(".git", ".snakemake", ".venv*", "logs", ".*_cache", "__pycache__")

    def left_out(path: str, names: list[str]) -> set[str]:
        live = set(names) - {"recorded"} if Path(path) == ROOT / "results" else set()
        return hidden(path, names) | live

    return Path(shutil.copytree(ROOT, folder, ignore=left_out))


def seconds(folder: Path, *arguments: str, cores: int = CORES) -> float:
    """Wall time of one snakemake run. Raises SystemExit with the end of its output where it fails."""
    command = [sys.executable, "-m", "snakemake", "--cores", str(cores), *arguments]
    start = time.perf_counter()
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    return time.perf_counter() - start


def main(extra: list[str]) -> None:
    config = extra[extra.index("--config") + 1 :] if "--config" in extra else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy(Path(temporary) / "rungs")
        gpus = clock.gpus()
        print(
            f"{gpus[0].name if gpus else 'no GPU'}, {CORES} cores, load {os.getloadavg()[0]:.1f}\n\n| run | s |\n| --- | --- |",
            flush=True,
        )
        if gpus:
            quick = seconds(folder, "all", "--config", "preset=quick", *config)
            print(f"| preset=quick from nothing | {quick:.1f} |", flush=True)
            seconds(folder, "--until", "build", "inspect", *(["--config", *config] if config else []))
            ladder = seconds(folder, "ladders", "--config", "ladders=B", *config)
            print(f"| ladder B over ten shapes with its floor, builds done | {ladder:.1f} |", flush=True)
        else:
            quick = seconds(folder, "all", "--config", "preset=quick", *config)
            print(f"| preset=quick from nothing, {CORES} cores | {quick:.1f} |", flush=True)
            for cores in sorted({1, CORES}):
                folder = copy(Path(temporary) / f"cores-{cores}")
                first = seconds(folder, "all", *extra, cores=cores)
                print(f"| all from nothing, --cores {cores} | {first:.1f} |", flush=True)
            again = seconds(folder, "all", *extra)
            print(f"| all with nothing to do | {again:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
