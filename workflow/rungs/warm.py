"""Run a verb in a process that has torch already: `import torch` costs up to 5 s, and a sweep is a process per rung.

A server per user, checkout, interpreter and version of this package imports torch once, without touching CUDA, and forks a
child for each request. The child gets the client's working folder, environment, standard output and standard error, so it is
the process that the client would have started. The server ends when nobody has asked for `IDLE_SECONDS`.
Where no server can be had, the verb runs in an ordinary child process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IDLE_SECONDS = 30.0
START_SECONDS = 60.0
GRACE_SECONDS = 5.0
PRELOADED = ("torch", "cuda.bindings.driver", "scipy.special", "rungs.cli", "rungs.measure", "pynvml")
"""None of these starts CUDA, which would not survive the fork."""


PR_SET_PDEATHSIG = 1
"""Of Linux's <sys/prctl.h>: a client that is killed must not leave a child on the GPU."""


class Child:
    """A verb that is running elsewhere: `poll` gives its exit status (negative for a signal) or None, `kill` ends it."""

    def poll(self, seconds: float) -> int | None:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError


class _Process(Child):
    def __init__(self, argv: list[str]) -> None:
        die_with_parent = functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        self._process = subprocess.Popen([sys.executable, "-m", "rungs", *argv], preexec_fn=die_with_parent)

    def poll(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.terminate()
        if self.poll(GRACE_SECONDS) is None:
            self._process.kill()
            self._process.wait()


class _Forked(Child):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def poll(self, seconds: float) -> int | None:
        if not select.select([self._connection], [], [], seconds)[0]:
            return None
        answer = self._connection.recv(64)
        return int(answer) if answer else -signal.SIGKILL

    def kill(self) -> None:
        """The server ends the child when its client hangs up; wait until it has, so that the GPU is free."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self.poll(2 * GRACE_SECONDS)


def start(argv: list[str]) -> Child:
    """Run `python -m rungs *argv` in a warm process, or in a cold one where that is not possible."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        connection = _connect()
        request = {"argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ)}
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], [1, 2])
        connection.sendall(data)
        return _Forked(connection)
    except OSError as error:
        print(f"rungs: no warm process ({error}), starting a cold one.", file=sys.stderr)
        return _Process(argv)


def prestart() -> None:
    """Have the server import torch while something else is done, builds for example."""
    with contextlib.suppress(OSError):
        _connect().close()


def _address() -> Path:
    """A socket's path that changes with whatever would make an old server run other code."""
    package = Path(__file__).parent
    digest = hashlib.sha256(repr((sys.executable, sys.path, str(package))).encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"rungs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not this user's alone")
    return folder / f"{digest.hexdigest()[:16]}.sock"


def _connect() -> socket.socket:
    address = _address()
    deadline = time.monotonic() + START_SECONDS
    server: subprocess.Popen[bytes] | None = None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(address))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        if server is None:
            server = subprocess.Popen(
                [sys.executable, "-m", "rungs.warm", str(address)],
                start_new_session=True,
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if server.poll() not in (None, 0) or time.monotonic() > deadline:
            raise OSError("the server did not start")
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    """The server must find this very package, whichever folder it starts in."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def serve(address: str) -> None:
    """Import torch, then fork a child per connection until nobody has asked for a while."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = f"{address}.{os.getpid()}"
    listener.bind(temporary)
    listener.listen(8)
    inode = os.stat(temporary).st_ino
    os.rename(
        temporary, address
    )  # a client sees the socket only once it can be connected to; its connection waits for torch
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    children: dict[int, socket.socket] = {}
    quiet_since = time.monotonic()
    while children or time.monotonic() - quiet_since < IDLE_SECONDS:
        waiting = [listener, *children.values()]
        ready = select.select(waiting, [], [], 0.05)[0]
        for pid, connection in list(children.items()):
            if connection in ready:  # end of file: the client hung up or wants the child gone
                _end(pid)
        _reap(children)
        if listener in ready:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError, ValueError):
                children[_fork(connection, listener, children)] = connection
        if children:
            quiet_since = time.monotonic()
    with contextlib.suppress(OSError):
        if os.stat(address).st_ino == inode:  # not another server's, started in the same moment
            os.unlink(address)


def _fork(connection: socket.socket, listener: socket.socket, children: dict[int, socket.socket]) -> int:
    head, streams, _, _ = socket.recv_fds(connection, 4, 2)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data)) or _hang_up()
    request = json.loads(data)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here and in the child: whoever comes first, `_end` finds the group
        for stream in streams:
            os.close(stream)
        return pid
    code = 1
    try:
        for other in (listener, connection, *children.values()):
            other.close()
        os.setpgid(0, 0)
        os.dup2(streams[0], 1)
        os.dup2(streams[1], 2)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        from rungs.cli import main

        code = main(request["argv"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        print(f"rungs: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _hang_up() -> bytes:
    raise OSError("the client hung up")


def _end(pid: int) -> None:
    os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)


def _reap(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            connection = children.pop(pid)
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
