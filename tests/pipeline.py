"""A checkout in a temporary folder with the real Snakemake, on the stand-ins for the GPU, NVML and Nsight Compute.

`Checkout.create` copies what a run needs and writes small settings into its `config/config.yaml`, so that `snakemake heatmap`
works without flags. `Checkout.copy` keeps dates and Snakemake's records: the copy is as finished as the original.
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import forked
import shared

TESTS = Path(__file__).parent
ROOT = TESTS.parent
STANDIN = TESTS / "standin"
PARTS = ("Snakefile", "README.md", ".gitignore", "pyproject.toml", "config", "envs", "kernels", "profiles", "workflow")
UUID = "GPU-11111111-2222-3333-4444-555555555555"
SLUG = "h200"
"""Of the stand-in's GPU."""
ARCH = "sm_90a"
SHAPES = [(512, 512, 256), (512, 512, 512)]
S0, S1, S2, S3 = (f"abl_L1_R1_bl{b}_s2_sw{s}" for b in (0, 1) for s in (0, 1))
"""Ladder S: S0>S1 and S2>S3. S3 is also B3, the rung of the floor."""
RUNGS = (S0, S1, S2, S3)
SETTINGS = {
    "ladders": ["S"],
    "axes": {"mn": [512], "k": [256, 512]},
    "measure": {"rounds_min": 10, "rounds_max": 40, "warmup_s": 0, "time_limit_s": 60},
    "clock": {"mode": "observe"},
}
LIMIT_S = 300
JOB = re.compile(r"^(?:local)?rule (?P<rule>\w+):\n(?P<body>(?:    .*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What a command left: exit status, all that it printed, and the jobs in it as `rule: first output`."""

    code: int
    text: str

    @property
    def jobs(self) -> list[str]:
        """Every job that Snakemake started or, in a dry run, would start; targets not among them."""
        found = []
        for job in JOB.finditer(self.text):
            if output := re.search(r"^    output: ([^,\n]+?)(?: \(.*)?(?:,.*)?$", job["body"], re.MULTILINE):
                found.append(f"{job['rule']}: {output[1]}")
        return sorted(found)

    def of(self, *rules: str) -> list[str]:
        """The file names, without ending, of what these rules made: a variant, a floor's job or a figure."""
        return sorted(Path(job.split(": ")[1]).stem for job in self.jobs if job.split(":")[0] in rules)

    @property
    def rules(self) -> set[str]:
        return {job.split(":")[0] for job in self.jobs}

    @property
    def said(self) -> list[str]:
        """The lines that rungs prints, in a log that Snakemake shows too."""
        return [line.strip() for line in self.text.splitlines() if line.strip().startswith("rungs: ")]


class Checkout:
    """A folder `repo` and beside it what the stand-ins read: `gpu.json`, `nvml.json` and `measured.log`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repo = folder, folder / "repo"
        self.live = self.repo / "results" / SLUG
        self.environment: dict[str, str] = {}

    @classmethod
    def create(cls, folder: Path) -> Checkout:
        checkout = cls(folder)
        checkout.repo.mkdir(parents=True)
        for part in PARTS:
            source = compiled() if part == "workflow" else ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, checkout.repo / part)
        checkout.configure(**SETTINGS)
        checkout.machine()
        checkout.fault()
        return checkout

    def copy(self, folder: Path) -> Checkout:
        subprocess.run(["cp", "-a", str(self.folder), str(folder)], check=True)
        other = Checkout(folder)
        other.machine()
        other.fault()
        return other

    # ---- the machine ----

    def machine(self, *gpus: Mapping[str, Any], log: str = "") -> None:
        """The GPUs that NVML shows, an H200 where none is given; every call that sets a clock becomes a line of `log`."""
        described = gpus or ({"name": "NVIDIA H200", "uuid": UUID},)
        (self.folder / "nvml.json").write_text(json.dumps({"gpus": described, "log": log}))

    def no_gpu(self) -> None:
        (self.folder / "nvml.json").unlink()

    def fault(self, **faults: Any) -> None:
        """Orders what goes wrong: variant -> `{"kind": ..., "shape": [m, n, k]}` or a list of them."""
        log = self.folder / "measured.log"
        (self.folder / "gpu.json").write_text(json.dumps({"log": str(log), "faults": faults}))

    @property
    def measured(self) -> list[str]:
        """The variants whose sweep or floor was timed, a line per job and shape."""
        log = self.folder / "measured.log"
        return log.read_text().splitlines() if log.exists() else []

    # ---- commands ----

    def env(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(STANDIN), str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(self.repo / "workflow"), str(STANDIN)]),
            "RUNGS_STANDIN_NVML": str(self.folder / "nvml.json"),
            "RUNGS_STANDIN_GPU": str(self.folder / "gpu.json"),
            "RUNGS_STANDIN_NCU": "ok",
            "RUNGS_STANDIN_VERBS": forked.listener(),
        }
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("RUNGS_", "CUDA_", "SNAKEMAKE_"))
        }
        return kept | own | self.environment | more

    def options(self, more: Mapping[str, str]) -> dict[str, Any]:
        """In the checkout, in the stand-ins' environment, all output as one text."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.repo, "env": self.env(**more), **streams}

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """Snakemake in a process group of its own, as a shell starts it."""
        argv = [sys.executable, "-m", "snakemake", *arguments]
        return subprocess.Popen(
            argv,
            **self.options(more),
            start_new_session=True,
            # A shell that runs the tests in the background has SIGINT ignored, and a child would inherit that.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def snakemake(self, *arguments: str, **more: str) -> Result:
        return Result(*forked.run(arguments, self.repo, self.env(**more), LIMIT_S))

    def planned(self, *arguments: str, **more: str) -> Result:
        done = self.snakemake("--dry-run", *arguments, **more)
        assert done.code == 0, done.text
        return done

    def rungs(self, *arguments: str, **more: str) -> Result:
        argv = [sys.executable, "-m", "rungs", *arguments]
        done = subprocess.run(argv, **self.options(more), timeout=LIMIT_S)
        return Result(done.returncode, done.stdout)

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
        argv = ["git", *identity, *arguments]
        return subprocess.run(argv, cwd=self.repo, check=True, capture_output=True, text=True).stdout

    # ---- files ----

    def configure(self, **changes: Any) -> None:
        """Changes keys of `config/config.yaml`, those inside mappings one by one; None drops a key."""
        path = self.repo / "config" / "config.yaml"
        config = yaml.safe_load(path.read_text())
        for key, value in changes.items():
            merge = isinstance(value, dict) and isinstance(config.get(key), dict)
            config[key] = {**config[key], **value} if merge else value
            if value is None:
                del config[key]
        path.write_text(yaml.safe_dump(config))

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.repo / name
        pack = path.suffix == ".gz"
        text = (gzip.decompress(path.read_bytes()) if pack else path.read_bytes()).decode()
        assert old in text, f"{name} has no {old!r}"
        edited = text.replace(old, new, 1).encode()
        path.write_bytes(gzip.compress(edited) if pack else edited)

    def csv(self, kind: str, name: object) -> Path:
        return self.live / "csv" / kind / "gemm" / f"{name}.csv"

    def verdict(self) -> dict[str, Any]:
        return json.loads((self.live / "data" / "verdict.json").read_text())


@functools.cache
def compiled() -> Path:
    """`workflow/` with its bytecode: no job of a checkout compiles it then, whatever PYTHONDONTWRITEBYTECODE says."""
    folder = shared.folder() / "workflow"
    with shared.alone("workflow"):
        if not folder.exists():
            new = folder.with_name("workflow.new")
            shutil.copytree(ROOT / "workflow", new, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            compileall.compile_dir(new, quiet=1)
            new.rename(folder)
    return folder


def no_traceback(result: Result) -> bool:
    return "Traceback" not in result.text and 'File "' not in result.text


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def processes(checkout: Checkout) -> list[int]:
    """Processes that work in the checkout: Snakemake, its jobs and what the warm server forked for them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(checkout.repo):
                found.append(int(entry.name))
    return found
