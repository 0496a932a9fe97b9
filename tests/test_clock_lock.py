"""The clock lock through the real pynvml, on a stand-in for libnvidia-ml.so.1 (tests/standin/nvml.cpp), in processes of their own.

`clock decide`, `sweep` and `clock release` are the real verbs; the process that measures is the real one too, on the stand-in GPU,
whose clock is what NVML reads. Every machine here has two GPUs, of which the second is the chosen one.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from binaries import built
from pipeline import S0, S1
from rungs import build, clock, schemas

TESTS = Path(__file__).parent
STANDIN = TESTS / "standin"
ARCH = "sm_90a"
TRIED = [("set_sm", 345, 1980, 0), ("reset_sm", 0, 0, 0)]
"""The permission that `decide` tries for."""
HELD = [("set_sm", 1500, 1500, 0), ("set_mem", 3201, 3201, 0)]
RELEASED = [("reset_sm", 0, 0, 0), ("reset_mem", 0, 0, 0)]
SETTINGS = {
    "target_percent": 0.3,
    "rounds_min": 10,
    "rounds_max": 10,
    "sample_us": 200,
    "warmup_s": 0,
    "l2": "hot",
    "seed": 1,
}
MANY = {"rounds_min": 600, "rounds_max": 600}
"""Some 5400 readings of the clock, after a warm-up with as many as the machine makes in 20 ms."""
SMALL, LARGE = [512, 512, 256], [512, 512, 512]


class Call(NamedTuple):
    pid: int
    uuid: str
    what: str
    low: int
    high: int
    returned: int


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the stand-in library, and one for PYTHONPATH with the stand-in GPU and without the stand-in pynvml."""
    folder = tmp_path_factory.mktemp("libnvml")
    target = folder / "lib" / "libnvidia-ml.so.1"
    target.parent.mkdir()
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", target, STANDIN / "nvml.cpp"], check=True)
    (folder / "python").mkdir()
    for name in ("sitecustomize.py", "standin_gpu.py"):
        (folder / "python" / name).symlink_to(STANDIN / name)
    return folder


class Machine:
    """Two GPUs, and what processes on this machine do to them."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.file = folder / "nvml"
        self.gpu, self.other = (f"GPU-{os.getpid()}-{folder.name}-{index}" for index in (1, 0))
        self.lines: dict[tuple[str, str], object] = {("0", "uuid"): self.other, ("1", "uuid"): self.gpu}
        self.gpu_script: dict[str, object] = {"clock": "nvml"}
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("RUNGS_", "CUDA_"))} | {
            "LD_LIBRARY_PATH": str(library / "lib"),
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "workflow"), str(library / "python")]),
            "RUNGS_STANDIN_LIBNVML": str(self.file),
            "RUNGS_STANDIN_GPU": str(folder / "gpu.json"),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.describe()

    def describe(self, **keys: object) -> None:
        """Of the chosen GPU; those of the machine are in `lines` under `*`."""
        self.lines |= {("1", key): value for key, value in keys.items()}
        temporary = self.file.with_suffix(".new")
        temporary.write_text("".join(f"{whose} {key} {value}\n" for (whose, key), value in self.lines.items()))
        temporary.replace(self.file)
        (self.folder / "gpu.json").write_text(json.dumps(self.gpu_script))

    def fault(self, kind: str, shape: list[int] | None = None) -> None:
        self.gpu_script["faults"] = {S1: {"kind": kind, **({"shape": shape} if shape else {})}}
        self.describe()

    # ---- what was done ----

    def calls(self) -> list[Call]:
        log = Path(f"{self.file}.calls")
        words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [Call(int(pid), uuid, what, int(a), int(b), int(c)) for pid, uuid, what, a, b, c in words]

    def sets(self, since: int = 0) -> list[tuple]:
        return [call[2:] for call in self.calls()[since:]]

    def locked(self) -> set[str]:
        """The clocks of the chosen GPU that are locked now."""
        last = {call.what.split("_")[1]: call.what for call in self.calls() if call.returned == 0}
        return {domain for domain, what in last.items() if what.startswith("set")}

    @property
    def state(self) -> Path:
        return self.folder / "state" / "rungs" / f"clock-{self.gpu}.json"

    # ---- processes ----

    def start(self, *argv: str, **more: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(
            [sys.executable, *argv],
            env=self.env | more,
            **pipes,
            start_new_session=True,
            # A shell that runs the tests in the background has SIGINT ignored, and a child would inherit that.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def rungs(self, *argv: str) -> tuple[int, str]:
        process = self.start("-m", "rungs", *argv)
        said, _ = process.communicate(timeout=60)
        assert "Traceback" not in said, said
        return process.returncode, said

    def decide(self, mode: str = "lock", mhz: int = 1500) -> tuple[int, str]:
        arguments = ("--mode", mode, "--mhz", str(mhz), "--output", str(self.folder / "clock.json"))
        return self.rungs("clock", "decide", "--gpu", self.gpu, *arguments)

    def start_sweep(self, *shapes: list[int], output: str = "sweep", settings=(), **more: str) -> subprocess.Popen[str]:
        """`rungs sweep` of S1 as the rule runs it, with the record that `decide` left."""
        manifests = [str(built(name, ARCH)) for name in (S1, S0)]
        return self.start(
            *("-m", "rungs", "sweep", "--experiment", "gemm", "--variant", S1, "--arch", ARCH, "--gpu", self.gpu),
            *("--manifests", *manifests, "--stamp", str(built(build.STAMP, ARCH)), "--time-limit", "60"),
            *("--clock", str(self.folder / "clock.json"), "--shapes", json.dumps(shapes or [SMALL])),
            *("--settings", json.dumps(SETTINGS | dict(settings)), "--output", str(self.folder / f"{output}.csv")),
            **more,
        )

    def sweep(self, *shapes: list[int], mode: str = "lock", **settings: object):
        """`decide`, then `sweep`: (frame, manifest, all that the sweep printed)."""
        code, said = self.decide(mode)
        assert code == 0, said
        said, _ = (process := self.start_sweep(*shapes, settings=settings)).communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in said, said
        return *self.measured(), said

    def measured(self, output: str = "sweep"):
        path = self.folder / f"{output}.csv"
        return schemas.read_csv("sweep", path), schemas.read_manifest(path.with_suffix(".json"))

    def hold(self, body: str = 'print("ready", flush=True); time.sleep(60)', before: str = "") -> subprocess.Popen[str]:
        """A process that holds the lock as the measuring one does, and does `body` then; `before` starts it where given."""
        code = f"""
        import os, signal, sys, time
        from rungs import clock
        gpu = clock.choose({self.gpu!r})
        record = clock.decide(gpu, "lock", 1500)
        load = clock.under(gpu, lambda: time.sleep(0.01))
        with clock.exclusive(gpu.uuid), clock.held(record, gpu, load) as held:
            {body}
        """
        return self.start(*(["-c", before] if before else []), "-c", textwrap.dedent(code))


@pytest.fixture
def machine(tmp_path, library):
    machine = Machine(tmp_path, library)
    yield machine
    assert {call.uuid for call in machine.calls()} <= {machine.gpu}, "only the chosen GPU is ever written to"
    for uuid in (machine.gpu, machine.other):
        Path(f"/tmp/rungs-{uuid}.lock").unlink(missing_ok=True)


def wait_for(what, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout.readline() == "ready\n", process.communicate()[0]


# ---- what is locked --------------------------------------------------------------------------------------------------


def test_the_real_pynvml_reads_the_library(machine):
    machine.describe(name="NVIDIA H100 PCIe", limit_mw=350000)
    code = "import pynvml; from rungs import clock; print(pynvml.__file__); print(clock.gpus())"
    process = machine.start("-c", code)
    file, gpus = process.communicate(timeout=20)[0].splitlines()
    assert "standin" not in file and "site-packages" in file
    gpu = clock.Gpu(1, "NVIDIA H100 PCIe", "h100_pcie", machine.gpu, "9.0", ARCH, "580.82.07", 150754820096, 350.0)
    assert repr(gpu) in gpus and machine.other in gpus


def test_doctor_asks_the_real_pynvml_and_sets_nothing(machine):
    _, said = machine.rungs("doctor", "--json")
    found = {check["name"]: check["found"] for check in json.loads(said)["checks"]}
    assert any(name.startswith("GPU 1") and "345 to 1980 MHz" in what for name, what in found.items()), found
    assert machine.calls() == []


def test_both_clocks_are_locked_read_back_and_restored_and_the_manifest_says_so(machine):
    frame, manifest, said = machine.sweep(SMALL, LARGE)
    assert machine.sets() == [*TRIED, *HELD, *RELEASED]
    assert set(frame["status"]) == {"ok"} and set(frame["sm_mhz"]) == {1500}
    record = manifest["clock"]
    assert (record["mode"], record["gpu"]) == ("lock", machine.gpu)
    assert (record["requested_mhz"], record["read_back_mhz"], record["load_mhz"]) == (1500, 1500, 1500)
    assert (record["memory_mhz"], record["memory_read_back_mhz"], record["memory_reason"]) == (3201, 3201, "")
    assert (record["restore"], record["restored"]) == (clock.NOT_TOLD, True)
    assert "memory" not in said and not machine.state.exists()


@pytest.mark.parametrize(
    ("lock", "why"),
    [
        ("unsupported", "Not Supported"),
        ("refused", "Insufficient Permissions"),
        ("ignored", "the driver took the lock at 3201 MHz and the clock reads back 2619 MHz"),
    ],
)
def test_memory_clock_that_cannot_be_locked_is_said_and_no_failure(machine, lock, why):
    machine.describe(mem_lock=lock)
    frame, manifest, said = machine.sweep()
    assert set(frame["status"]) == {"ok"}
    record = manifest["clock"]
    assert (record["mode"], record["read_back_mhz"], record["memory_mhz"]) == ("lock", 1500, None)
    assert record["memory_reason"] == f"the memory clock cannot be locked: {why}"
    assert f"{record['memory_reason']}." in said
    granted = [call for call in machine.sets() if call[-1] == 0]
    memory = [HELD[1], RELEASED[1]] if lock == "ignored" else []
    assert granted == [*TRIED, HELD[0], *memory, RELEASED[0]]
    assert record["restored"] is True and not machine.state.exists()


def test_observe_calls_no_setter(machine):
    frame, manifest, _ = machine.sweep(mode="observe")
    assert machine.calls() == []
    assert set(frame["status"]) == {"ok"} and set(frame["sm_mhz"]) == {1755}
    record = manifest["clock"]
    assert (record["mode"], record["reason"], record["restored"]) == ("observe", "asked for", None)
    assert not machine.state.exists()


# ---- what is refused, ignored or dropped -----------------------------------------------------------------------------


@pytest.mark.parametrize(("lock", "why"), [("refused", "Insufficient Permissions"), ("15", "GPU is lost")])
def test_refused_lock(machine, lock, why):
    """`auto` observes and says why; `lock` is one sentence."""
    machine.describe(sm_lock=lock)
    frame, manifest, _ = machine.sweep(mode="auto")
    assert (manifest["clock"]["mode"], set(frame["status"])) == ("observe", {"ok"})
    assert manifest["clock"]["reason"] == f"the clock cannot be locked: {why}"
    code, said = machine.decide("lock")
    (sentence,) = said.splitlines()
    assert code == 1 and sentence.startswith("rungs: The clock of GPU 1 (h200, ")
    assert sentence.endswith(f") cannot be locked ({why}): run as root, or use `clock.mode: observe`.")
    assert machine.locked() == set() and {call.what for call in machine.calls()} == {"set_sm"}


def test_permission_that_ends_between_the_decision_and_the_measurement(machine):
    machine.lines["*", "permitted"] = len(TRIED)
    machine.describe()
    frame, manifest, said = machine.sweep(mode="auto")
    assert (manifest["clock"]["mode"], set(frame["status"])) == ("observe", {"ok"})
    assert manifest["clock"]["reason"].endswith("the driver refused the lock (Insufficient Permissions)")
    assert machine.sets() == [*TRIED, ("set_sm", 1500, 1500, 4)], "there was nothing to restore"
    assert "could not be released" not in said and not machine.state.exists()


def test_ignored_lock_is_found_by_reading_back(machine):
    machine.describe(sm_lock="ignored")
    frame, manifest, _ = machine.sweep(mode="auto")
    why = "the driver took the lock at 1500 MHz and the clock reads back 1755 MHz"
    assert (manifest["clock"]["mode"], set(frame["status"])) == ("observe", {"ok"})
    assert (manifest["clock"]["reason"], manifest["clock"]["memory_mhz"]) == (
        f"the clock cannot be locked: {why}",
        None,
    )
    assert machine.locked() == set()
    frame, manifest, _ = machine.sweep(mode="lock")
    (row,) = frame[["status", "reason"]].itertuples(index=False)
    assert row.status == "crashed" and f"does not hold its clock: {why}; use a lower `clock.mhz`" in row.reason
    assert machine.locked() == set() and not machine.state.exists()


def test_dropped_lock_flags_its_samples(machine):
    machine.describe(sm_drop_after=3000)
    frame, manifest, _ = machine.sweep(**MANY)
    assert manifest["clock"]["read_back_mhz"] == 1500
    flagged = frame[frame["status"] == "flagged"]
    assert set(flagged["reason"]) >= {"the clock (1755 MHz) left the lock at 1500 MHz"}
    assert flagged["reason"].str.fullmatch(r"the clock \(\d+ MHz\) left the lock at 1500 MHz").all()
    assert set(frame[frame["status"] == "ok"]["sm_mhz"]) == {1500}
    assert 0 < len(flagged) < len(frame) and machine.locked() == set()


def test_dropped_lock_of_the_memory_clock_flags_its_samples(machine):
    machine.describe(mem_drop_after=3)
    frame, manifest, _ = machine.sweep(**MANY)
    assert manifest["clock"]["memory_read_back_mhz"] == 3201
    flagged = frame[frame["status"] == "flagged"]
    assert set(flagged["reason"]) == {"the clock was throttled (memory at 2619 MHz instead of 3201)"}
    assert len(flagged) and set(flagged["sm_mhz"]) == {1500} and machine.locked() == set()


@pytest.mark.parametrize("error", [15, 1], ids=["GPU is lost", "driver unloaded"])
def test_nvml_that_is_gone_in_the_middle(machine, error):
    """What was measured stands, what came after is flagged, and the lock is released as soon as NVML answers again."""
    machine.describe(lost_after=3000, lost=error)
    frame, manifest, said = machine.sweep(**MANY)
    flagged = frame[frame["status"] == "flagged"]
    assert set(flagged["throttle"]) == {"unreadable"} and 0 < len(flagged) < len(frame)
    assert set(flagged["reason"]) == {"NVML no longer answered, so that nothing is known of the clock"}
    assert "the clock lock could not be released" in said
    assert "released the clock lock of process" in said and manifest["clock"]["restored"] is True
    assert machine.locked() == set() and not machine.state.exists()


def test_lock_that_cannot_be_restored_is_said_and_released_later(machine):
    machine.lines["*", "permitted"] = len(TRIED) + len(HELD)
    machine.describe()
    frame, manifest, said = machine.sweep()
    assert set(frame["status"]) == {"ok"} and manifest["clock"]["restored"] is False
    by_hand = (
        f"`nvidia-smi -i {machine.gpu} --reset-gpu-clocks` and `nvidia-smi -i {machine.gpu} --reset-memory-clocks`"
    )
    assert "could not be released (Insufficient Permissions)" in said and f"as root, run {by_hand}." in said
    assert machine.locked() == {"sm", "mem"}
    machine.lines["*", "permitted"] = 1000
    machine.describe()
    assert "released the clock lock" in machine.rungs("clock", "release")[1]
    assert machine.locked() == set()


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (9, "this machine has no GPU"),
        (18, "The NVIDIA driver does not answer (RM has detected an NVML/RM version mismatch"),
    ],
)
def test_driver_that_does_not_answer_is_one_sentence(machine, init, said):
    machine.lines["*", "init"] = init
    machine.describe()
    code, sentence = machine.decide()
    assert code == 1 and len(sentence.splitlines()) == 1 and said in sentence


# ---- however a measurement ends --------------------------------------------------------------------------------------


def hanging(machine, *shapes: list[int], **more: str) -> tuple[subprocess.Popen[str], int]:
    """A sweep whose process hangs in a kernel while it holds the lock, and that process."""
    machine.fault("hang", LARGE)
    assert machine.decide()[0] == 0
    process = machine.start_sweep(*(shapes or [LARGE]), **more)
    said = iter(process.stdout.readline, "")
    assert "the kernel hangs\n" in said
    assert machine.sets() == [*TRIED, *HELD]
    return process, json.loads(machine.state.read_text())["pid"]


ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


@pytest.mark.parametrize("number", ENDED, ids=lambda number: number.name)
def test_signal_to_the_job_restores(machine, number):
    process, child = hanging(machine)
    process.send_signal(number)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == ENDED[number] and "Traceback" not in said, said
    wait_for(lambda: not machine.state.exists())
    assert machine.sets()[-4:] == [*HELD, *RELEASED]
    assert {call.pid for call in machine.calls()[-4:]} == {child}, "the measuring process did it itself"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_to_a_whole_terminal_restores_where_there_is_no_warm_process(machine, number, tmp_path):
    """Then the measuring process is a child of the job, in its process group."""
    (tmp_path / f"rungs-{os.getuid()}").mkdir(mode=0o755)
    process, child = hanging(machine, TMPDIR=str(tmp_path))
    assert os.getpgid(child) == process.pid
    os.killpg(process.pid, number)
    process.communicate(timeout=20)
    assert process.returncode == ENDED[number]
    assert not machine.state.exists() and machine.sets()[-4:] == [*HELD, *RELEASED]
    assert {call.pid for call in machine.calls()[-4:]} == {child}, "the measuring process did it itself"


def test_signal_to_the_measuring_process_restores_and_the_job_goes_on(machine):
    process, child = hanging(machine, LARGE, SMALL)
    os.kill(child, signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0, said
    frame, manifest = machine.measured()
    assert {k: set(rows["status"]) for k, rows in frame.groupby("k")} == {256: {"ok"}, 512: {"crashed"}}
    assert machine.sets() == [*TRIED, *HELD, *RELEASED, *HELD, *RELEASED] and manifest["clock"]["restored"] is True


def test_measuring_process_that_is_killed_is_released_by_the_next_one_of_the_job(machine):
    process, child = hanging(machine, LARGE, SMALL)
    os.kill(child, signal.SIGKILL)
    said, _ = process.communicate(timeout=20)
    assert f"released the clock lock of process {child}, which ended without doing so." in said
    frame, _ = machine.measured()
    assert {k: set(rows["status"]) for k, rows in frame.groupby("k")} == {256: {"ok"}, 512: {"crashed"}}
    assert machine.sets() == [*TRIED, *HELD, *RELEASED, *HELD, *RELEASED]


def test_crash_at_the_last_shape_is_released_by_the_job_and_the_manifest_knows_the_clock(machine):
    machine.fault("abort", SMALL)
    frame, manifest, said = machine.sweep(LARGE, SMALL)
    assert {k: set(rows["status"]) for k, rows in frame.groupby("k")} == {256: {"crashed"}, 512: {"ok"}}
    assert "released the clock lock of process" in said
    record = manifest["clock"]
    assert (record["mode"], record["read_back_mhz"], record["memory_read_back_mhz"]) == ("lock", 1500, 3201)
    assert record["restored"] is True and machine.locked() == set() and not machine.state.exists()


def test_exception_restores(machine):
    said, _ = machine.hold('raise RuntimeError("in the middle")').communicate(timeout=20)
    assert "in the middle" in said and machine.sets() == [*TRIED, *HELD, *RELEASED]


def test_hangup_that_nohup_ignores_ends_nothing(machine):
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    body = 'os.kill(os.getpid(), signal.SIGHUP); print("ready", flush=True); time.sleep(60)'
    process = machine.hold(body, before=code)
    ready(process)
    assert machine.locked() == {"sm", "mem"}
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143 and machine.sets() == [*TRIED, *HELD, *RELEASED]


# ---- what a killed run leaves ----------------------------------------------------------------------------------------


@pytest.fixture
def killed(machine):
    """The process that was killed; its lock is still there."""
    process = machine.hold()
    ready(process)
    process.kill()
    process.communicate()
    assert machine.locked() == {"sm", "mem"} and machine.state.exists()
    return process.pid


def test_release_after_kill(machine, killed):
    code, said = machine.rungs("clock", "release")
    assert code == 0 and f"released the clock lock of process {killed}, which ended without doing so." in said
    assert machine.sets() == [*TRIED, *HELD, *RELEASED]
    assert machine.rungs("clock", "release")[1] == "No clock lock was left behind.\n"


def test_next_run_releases_it_first_and_says_so(machine, killed):
    code, said = machine.decide()
    assert code == 0 and f"released the clock lock of process {killed}" in said
    assert machine.sets() == [*TRIED, *HELD, *RELEASED, *TRIED]


def test_next_run_that_observes_says_what_to_do_and_sets_nothing(machine, killed):
    before = machine.calls()
    code, said = machine.decide("observe")
    assert (
        code == 1 and f"still locked by process {killed}, which was killed: run `python -m rungs clock release`" in said
    )
    assert machine.calls() == before


def test_lock_of_somebody_else_is_given_up_to_the_drivers_default_and_the_record_says_so(machine):
    """NVML has no function that tells of it."""
    Path(f"{machine.file}.calls").write_text(f"1 {machine.gpu} set_sm 1200 1200 0\n")
    _, manifest, _ = machine.sweep()
    assert manifest["clock"]["idle_mhz"] == 1200, "what it ran at before"
    assert manifest["clock"]["restore"] == "driver default: NVML does not tell of a lock that was there before"
    assert machine.locked() == set()


# ---- two at once -----------------------------------------------------------------------------------------------------


def test_two_jobs_at_once_take_turns(machine):
    assert machine.decide()[0] == 0
    jobs = [machine.start_sweep(output=name, settings={"warmup_s": 0.5}) for name in ("first", "second")]
    said = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert (
        sum(f"Another process is measuring on GPU {machine.gpu}: waiting for it to end." in text for text in said) == 1
    )
    calls = machine.calls()[len(TRIED) :]
    assert [call[2:] for call in calls] == [*HELD, *RELEASED] * 2
    assert len({call.pid for call in calls[:4]}) == len({call.pid for call in calls[4:]}) == 1
    for name in ("first", "second"):
        assert set(machine.measured(name)[0]["status"]) == {"ok"}


def test_lock_of_a_process_that_is_still_running_is_waited_for_and_then_refused(machine):
    """One that does not know of the guard, or whose job was killed and that is still giving the clock back."""
    first = machine.hold()
    ready(first)
    before = machine.calls()
    code = f"""
    from rungs import clock
    clock.LEAVE_S = 0.3
    clock._guarded.add({machine.gpu!r})
    clock.decide(clock.choose({machine.gpu!r}), "lock", 1500)
    """
    said, _ = machine.start("-c", textwrap.dedent(code)).communicate(timeout=20)
    assert f"is locked by process {first.pid}, which is still running: wait until it has ended, or end it." in said
    assert "left alone" in machine.rungs("clock", "release")[1]
    assert machine.calls() == before
    first.terminate()
    first.communicate()
    assert machine.locked() == set()
