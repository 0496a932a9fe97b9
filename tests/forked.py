"""Snakemake and `python -m rungs` without what their imports take: processes that have imported others' packages fork one for each.

As a script this is such a process. It knows nothing of rungs, whose modules each command reads from its own checkout. One for
Snakemake reads an order a line (argv, cwd, env, output) and answers with the process id and, when it has ended, the exit status; a
run that a test stops by a signal is started anew instead. One for the verbs listens at a socket, where `standin/sitecustomize.py`
hands over what it was started with.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

WITH_SNAKEMAKE = ("jsonschema", "requests", "smart_open", "snakemake.report", "yaml")
"""What a Snakemake imports once it runs."""
WITH_VERBS = (
    "jsonschema",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.pyplot",
    "pandas",
    "yaml",
)


def load(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.freeze()


def serve() -> None:
    from snakemake.cli import get_argument_parser, main

    get_argument_parser()  # looks through all packages for plugins
    load(WITH_SNAKEMAKE)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            become(order)
            main(order["argv"])
            return
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(order: Mapping[str, object]) -> None:
    """What `python -m snakemake` would be in that folder and environment, in a process group of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(str(order["cwd"]))
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[call-overload]
    output = os.open(str(order["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = ["snakemake", *order["argv"]]  # type: ignore[misc]
    look_around()


def look_around() -> None:
    """Find modules as a Python that is started in this folder and environment would."""
    sys.path[:1] = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")  # that of the stand-ins


def listen(path: str) -> None:
    """Fork a process for each verb that is handed over, until the tests' process, at the other end of standard input, has ended."""
    load(WITH_VERBS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them but the one who asked, at the socket
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{path}.new")
        door.listen(64)
        os.rename(f"{path}.new", path)
        while door in select.select([door, sys.stdin], [], [])[0]:
            asked, _ = door.accept()
            if not os.fork():
                door.close()
                perform(asked)
            asked.close()


def perform(asked: socket.socket) -> None:
    """Be `python -m rungs` for the process at the other end, whose end is this one's too."""
    code = 1
    try:
        data, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        while not data.endswith(b"\n"):
            data += asked.recv(1 << 20)
        order = json.loads(data)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, given in enumerate(streams):
            os.dup2(given, stream)
            os.close(given)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        threading.Thread(target=end_with, args=(asked,), daemon=True).start()
        sys.argv = ["rungs", *order["argv"]]
        look_around()
        runpy.run_module("rungs", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            asked.sendall(bytes([code & 255]))
        os._exit(code & 255)


def end_with(asked: socket.socket) -> None:
    asked.recv(1)
    os._exit(1)


def bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@functools.cache
def listener() -> str:
    """The socket of a process that does the verbs of this process's tests."""
    path = os.path.join(tempfile.mkdtemp(prefix="rungs-verbs-"), "door")
    started = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, env=bare())
    atexit.register(shutil.rmtree, os.path.dirname(path), ignore_errors=True)
    atexit.register(started.kill)
    while not os.path.exists(path) and started.poll() is None:
        time.sleep(0.01)
    return path


@functools.cache
def server(thread: int) -> subprocess.Popen[str]:
    """One for each thread that runs Snakemake: it takes one order at a time."""
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, bufsize=1, env=bare())
    atexit.register(started.kill)
    return started


def run(argv: Sequence[str], cwd: Path, env: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """(exit status, all that it printed) of a Snakemake. Raises TimeoutError after `limit_s` seconds, when all of it is killed."""
    held = server(threading.get_ident())
    assert held.stdin and held.stdout
    with tempfile.NamedTemporaryFile(prefix="rungs-output-", mode="r", encoding="utf-8", errors="replace") as output:
        order = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "output": output.name}
        print(json.dumps(order), file=held.stdin, flush=True)
        child = int(held.stdout.readline())
        ready, _, _ = select.select([held.stdout], [], [], limit_s)
        if not ready:
            os.killpg(child, signal.SIGKILL)
            held.stdout.readline()
            raise TimeoutError(f"snakemake {' '.join(argv)} was not done after {limit_s} s:\n{output.read()}")
        return int(held.stdout.readline()), output.read()


if __name__ == "__main__":
    listen(sys.argv[1]) if len(sys.argv) > 1 else serve()
