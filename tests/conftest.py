"""One complete run of the pipeline on the stand-ins, which each test of a behaviour starts from."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import shared
from pipeline import STANDIN, Checkout, Result
from rungs import clock


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist, which inherits the variable
        os.environ[shared.NAME] = tempfile.mkdtemp(prefix="rungs-tests-")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(shared.NAME), ignore_errors=True)


@pytest.fixture(scope="session")
def complete_run():
    """(checkout, result) of `snakemake --cores 2 all`; not to be changed."""
    folder = shared.folder() / "complete"
    with shared.alone("complete"):
        done = folder / "result.json"
        if not done.exists():
            result = Checkout.create(folder / "run").snakemake("--cores", "2", "all")
            done.write_text(json.dumps({"code": result.code, "text": result.text}))
    return Checkout(folder / "run"), Result(**json.loads(done.read_text()))


@pytest.fixture
def checkout(complete_run, tmp_path):
    """A copy of the complete run."""
    finished, result = complete_run
    assert result.code == 0, result.text
    return finished.copy(tmp_path / "run")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """An H200 of the stand-in for NVML; the calls of the tools that watch a launch go to `calls.jsonl`."""
    monkeypatch.syspath_prepend(str(STANDIN))
    sys.modules.pop("pynvml", None)
    uuid = f"GPU-{os.getpid()}-{tmp_path.name}"
    machine = {"log": str(tmp_path / "nvml.jsonl"), "gpus": [{"uuid": uuid}]}
    (tmp_path / "nvml.json").write_text(json.dumps(machine))
    monkeypatch.setenv("RUNGS_STANDIN_NVML", str(tmp_path / "nvml.json"))
    for tool in ("NCU", "SANITIZER"):
        monkeypatch.setenv(f"RUNGS_STANDIN_{tool}_CALLS", str(tmp_path / "calls.jsonl"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield clock.gpus()[0]
    sys.modules.pop("pynvml", None)
    Path(f"/tmp/rungs-{uuid}.lock").unlink(missing_ok=True)
