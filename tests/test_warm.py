"""A verb in a warm process is the process that the client would have started, and it ends with its client."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rungs import warm


@pytest.fixture
def serving():
    """A server whose verbs are those of a little stand-in package; it ends soon after the test.

    Its folder has a short name, since a socket's path may have 107 bytes and pytest's own folders for two workers have more.
    """
    folder = Path(tempfile.mkdtemp(prefix="rungs-"))
    package = folder / "rungs"
    package.mkdir()
    source = Path(warm.__file__).read_text(encoding="utf-8")
    (package / "__init__.py").write_text("")
    (package / "warm.py").write_text(
        source.replace("IDLE_SECONDS = 30.0", "IDLE_SECONDS = 1.0").replace('("torch", ', "(")
    )
    (package / "cli.py").write_text(
        "import os, sys, time\n"
        "def main(argv):\n"
        "    if argv[0] == 'say':\n"
        "        print(os.getcwd(), os.environ['PROBE'], 'preloaded', len(sys.modules) > 0)\n"
        "        print('trouble', file=sys.stderr)\n"
        "        return 7\n"
        "    if argv[0] == 'sleep':\n"
        "        open(argv[1], 'w').write(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    if argv[0] == 'abort':\n"
        "        os.abort()\n"
        "    if argv[0] == 'raise':\n"
        "        raise ValueError('odd')\n"
    )
    (package / "measure.py").write_text("")
    (package / "__main__.py").write_text("import sys\nfrom rungs.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def client(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder), "PROBE": "yes", "TMPDIR": str(folder), **environment}
    return subprocess.run(
        [sys.executable, "-c", f"from rungs import warm\n{code}"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_child_has_the_clients_folder_environment_and_streams_and_its_exit_status_comes_back(serving):
    run = client(serving, "child = warm.start(['say'])\nprint('status', child.poll(30), flush=True)")
    assert f"{serving} yes preloaded True" in run.stdout
    assert "status 7" in run.stdout
    assert run.stderr == "trouble\n"


@pytest.mark.parametrize(("verb", "status"), [("abort", -signal.SIGABRT), ("raise", 1)])
def test_a_child_that_dies_says_how(serving, verb, status):
    run = client(serving, f"print('status', warm.start(['{verb}']).poll(30))")
    assert f"status {int(status)}" in run.stdout
    assert ("odd" in run.stderr) == (verb == "raise")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


WAIT_FOR_PID = "import pathlib, time\nwhile not (pathlib.Path('pid').exists() and pathlib.Path('pid').read_text()): time.sleep(0.02)\n"


def test_kill_ends_the_child(serving):
    code = f"child = warm.start(['sleep', 'pid'])\n{WAIT_FOR_PID}assert child.poll(0.1) is None\nchild.kill()"
    assert client(serving, code).returncode == 0
    assert gone(int((serving / "pid").read_text()), 1.0)


def test_a_client_that_is_killed_takes_its_child_along(serving):
    code = (
        f"import os, signal\nchild = warm.start(['sleep', 'pid'])\n{WAIT_FOR_PID}os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert client(serving, code).returncode == -signal.SIGKILL
    assert gone(int((serving / "pid").read_text()))


def test_two_children_share_a_server_and_it_ends_when_idle(serving):
    code = "print([warm.start(['say']).poll(30) for _ in range(2)])"
    assert "[7, 7]" in client(serving, code).stdout
    sockets = list((serving / f"rungs-{os.getuid()}").glob("*.sock"))
    assert len(sockets) == 1
    end = time.monotonic() + 10
    while sockets[0].exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not sockets[0].exists()


def test_without_a_server_the_verb_runs_cold_and_says_so(serving):
    (serving / f"rungs-{os.getuid()}").write_text("a file where the folder should be")
    run = client(serving, "print('status', warm.start(['say']).poll(30))")
    assert "no warm process" in run.stderr
    assert "status 7" in run.stdout
    run = client(serving, f"child = warm.start(['sleep', 'pid'])\n{WAIT_FOR_PID}child.kill()")
    assert gone(int((serving / "pid").read_text()), 1.0)


def test_a_folder_that_others_can_enter_is_not_trusted(serving):
    folder = serving / f"rungs-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert "not this user's alone" in client(serving, "print(warm.start(['say']).poll(30))").stderr


def test_editing_the_package_makes_a_new_server(serving):
    code = "print(warm._address())"
    before = client(serving, code).stdout
    with (serving / "rungs" / "cli.py").open("a") as file:
        file.write("# another line\n")
    assert client(serving, code).stdout != before
