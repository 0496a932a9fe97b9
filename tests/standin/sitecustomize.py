"""With this folder on PYTHONPATH, `rungs.gpu` is the stand-in in `standin_gpu.py`: the pipeline runs without a GPU.

`pynvml` beside it stands in for NVML, and `ncu` for Nsight Compute. Nothing in the package knows of them. With
RUNGS_STANDIN_GPU set there is no torch either, whose import would cost each checkout of a test seconds.

RUNGS_STANDIN_VERBS is the socket of `tests/forked.py`, which does the verbs that only compute and draw.

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


VERBS = {
    *("build", "inspect", "emulate-rung", "aggregate", "effects", "plot", "tables", "claims", "factorial", "verdict"),
    *("counts", "count-tables", "sanitizer-tables", "counter-tables"),
    *("advise", "compare", "trace", "status", "reaffirm", "record", "readme"),
}


def _hand_over(path):
    """Let the process at the socket do this one's verb, and end as it ends."""
    import json
    import socket

    order = {"argv": sys.orig_argv[3:], "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        data = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(door, [data], [0, 1, 2])
        door.sendall(data[sent:])
        ended = door.recv(1)
    os._exit(ended[0] if ended else 1)


VERB = next(iter(sys.orig_argv[3:]), "") if sys.orig_argv[1:3] == ["-m", "rungs"] else ""
if "RUNGS_STANDIN_KILL" in os.environ and VERB:
    _kill_once(*os.environ["RUNGS_STANDIN_KILL"].split(":"), VERB)
elif "RUNGS_STANDIN_VERBS" in os.environ and VERB in VERBS:
    _hand_over(os.environ["RUNGS_STANDIN_VERBS"])
