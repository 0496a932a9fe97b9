"""With this folder on PYTHONPATH, `rungs.gpu` is the stand-in in `standin_gpu.py`: the pipeline runs without a GPU.

`pynvml` beside it stands in for NVML, and `ncu` for Nsight Compute. Nothing in the package knows of them. With
RUNGS_STANDIN_GPU set there is no torch either, whose import would cost each checkout of a test seconds.
"""

import importlib.util
import os
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
