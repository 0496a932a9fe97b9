"""Snakemake without the second that its imports take: a process that has imported it forks one for each command.

As a script this is that process. It knows nothing of rungs, reads an order a line (argv, cwd, env, output) and answers with the
process id and, when it has ended, the exit status. A run that a test stops by a signal is started anew instead.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def serve() -> None:
    from snakemake.cli import main

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
    sys.path[:1] = [str(order["cwd"]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")  # that of the stand-ins


@functools.cache
def server(thread: int) -> subprocess.Popen[str]:
    """One for each thread that runs Snakemake: it takes one order at a time."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, bufsize=1, env=bare)
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
    serve()
