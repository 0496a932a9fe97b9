"""With this folder on PYTHONPATH, `rungs.gpu` is the stand-in in `standin_gpu.py`: the pipeline runs without a GPU.

`pynvml` beside it stands in for NVML, and `ncu` for Nsight Compute. Nothing in the package knows of them. With
RUNGS_STANDIN_GPU set there is no torch either, whose import would cost each checkout of a test seconds.

RUNGS_STANDIN_KILL is `job:FOLDER` or `run:FOLDER`: each verb's first process is killed when its first file is written and not
yet in its place, alone or with Snakemake and all else of the process group. A file in FOLDER for each says so.
"""

import importlib.util
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "rungs.gpu":
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name("standin_gpu.py"))
        if name == "torch" and "RUNGS_STANDIN_GPU" in os.environ:
            raise ModuleNotFoundError("the stand-in for the GPU has no torch", name=name)
        return None


sys.meta_path.insert(0, _Finder())


def _kill_once(whom, folder, verb):
    marker, replace = Path(folder) / verb, os.replace

    def killed(source, target, **options):
        if not marker.exists():
            marker.touch()
            os.killpg(0, signal.SIGKILL) if whom == "run" else os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target, **options)

    os.replace = killed


if "RUNGS_STANDIN_KILL" in os.environ and sys.orig_argv[1:3] == ["-m", "rungs"]:
    _kill_once(*os.environ["RUNGS_STANDIN_KILL"].split(":"), sys.orig_argv[3])
