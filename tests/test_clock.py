"""The clock step against a stand-in for NVML (tests/standin/pynvml.py): what is set, on which GPU, and that it is undone."""

from __future__ import annotations

import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rungs import clock
from rungs.errors import RungsError
from rungs.sampler import Sampler, others, throttle_words

TESTS = Path(__file__).parent
STANDIN = TESTS / "standin"
H200 = "NVIDIA H200"
RTX = "NVIDIA GeForce RTX 5090"


class Machine:
    """The machine that the stand-in describes; `calls` is every setter call so far."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "nvml.json"
        self.log = folder / "calls.jsonl"
        # The guard of a GPU lies outside the test's folder: UUIDs of this test alone.
        self.prefix = f"GPU-{os.getpid()}-{folder.name}"

    def gpus(self, *gpus: dict, **top: object) -> list[str]:
        filled = [{"uuid": f"{self.prefix}-{index}", **gpu} for index, gpu in enumerate(gpus)]
        self.file.write_text(json.dumps({"log": str(self.log), "gpus": filled, **top}))
        return [gpu["uuid"] for gpu in filled]

    def change(self, **keys: object) -> None:
        machine = json.loads(self.file.read_text())
        machine["gpus"][0] |= keys
        self.file.write_text(json.dumps(machine))

    def calls(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def sets(self) -> list[tuple]:
        return [(c["call"], c["min_mhz"], c["max_mhz"]) if c["call"] == "lock" else (c["call"],) for c in self.calls()]

    def locked(self) -> bool:
        granted = [call for call in self.calls() if call["granted"]]
        return bool(granted) and granted[-1]["call"] == "lock"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with one H200; this process and its children see it through the stand-in."""
    monkeypatch.syspath_prepend(str(STANDIN))
    sys.modules.pop("pynvml", None)
    machine = Machine(tmp_path)
    monkeypatch.setenv("RUNGS_STANDIN_NVML", str(machine.file))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine.gpus({"name": H200})
    importlib.import_module("pynvml")._reads.clear()
    yield machine
    sys.modules.pop("pynvml", None)
    for guard in Path("/tmp").glob(f"rungs-{machine.prefix}-*.lock"):
        guard.unlink()


def start(body: str, *arguments: str) -> subprocess.Popen:
    """A measuring process with `gpu` chosen, that prints `ready` when it may be disturbed."""
    head = "import os, signal, sys, time\nfrom rungs import clock\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = head + "gpu = clock.choose('auto')\n" + textwrap.dedent(body)
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent / 'workflow'}:{STANDIN}"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=pipe, stderr=pipe, text=True, env=env)


HOLD = """
record = clock.decide(gpu, "lock", 1500)
with clock.exclusive(gpu.uuid), clock.held(record, gpu):
    print("ready", flush=True)
    time.sleep(60)
"""


# ---- which GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (H200, "h200"),
        (RTX, "rtx5090"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm4_40gb"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("Tesla V100-SXM2-16GB", "v100_sxm2_16gb"),
        ("NVIDIA GeForce GTX 1660 Ti", "gtx1660_ti"),
        ("NVIDIA RTX A6000", "rtx_a6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090_laptop"),
        ("NVIDIA", "gpu"),
    ],
)
def test_slug_is_a_folder_name_that_keeps_what_tells_gpus_apart(name, wanted):
    assert clock.slug(name) == wanted
    assert re.fullmatch("[a-z0-9_]+", wanted)


def test_gpu_as_nvml_describes_it(machine):
    (uuid,) = machine.gpus({"name": H200, "power_limit_w": 650.5, "memory_bytes": 123}, driver="570.1")
    assert clock.gpus() == [clock.Gpu(0, H200, "h200", uuid, "9.0", "sm_90a", "570.1", 123, 650.5)]
    as_json = clock.gpus()[0].as_json()
    assert as_json == {
        "name": H200,
        "slug": "h200",
        "uuid": uuid,
        "driver": "570.1",
        "memory_bytes": 123,
        "power_limit_w": 650.5,
    }


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
        ((7, 5), None),
    ],
)
def test_architecture_by_capability(machine, capability, arch):
    machine.gpus({"capability": capability})
    assert clock.gpus()[0].arch == arch


def test_no_driver_is_no_gpu(machine):
    machine.file.unlink()
    assert clock.gpus() == []
    assert clock.choose("auto") is None
    with pytest.raises(RungsError, match=r"'h200' is asked for and this machine has no GPU: .*device=auto"):
        clock.choose("h200")


def test_broken_driver_is_not_taken_for_no_gpu(machine):
    machine.gpus({}, broken=True)
    with pytest.raises(RungsError, match="version mismatch"):
        clock.gpus()


def test_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RungsError, match="nvidia-ml-py is missing: run `pip install"):
        clock.gpus()


def test_lost_gpu_does_not_hide_the_others(machine):
    _, uuid = machine.gpus({"lost": True}, {"name": RTX})
    assert [(g.index, g.uuid) for g in clock.gpus()] == [(1, uuid)]


def test_emulator_needs_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clock.choose("emulator") is None
    assert clock.decide(None, "auto", "auto")["mode"] == "emulated"


def test_one_gpu_is_chosen_by_auto_slug_index_and_uuid(machine):
    (gpu,) = clock.gpus()
    assert [clock.choose(d) for d in ("auto", "h200", "0", gpu.uuid, gpu.uuid.lower())] == [gpu] * 5


def test_two_gpus_and_none_chosen(machine):
    first, second = machine.gpus({"name": H200}, {"name": RTX})
    with pytest.raises(RungsError) as error:
        clock.choose("auto")
    for part in (f"index 0, slug h200, UUID {first}", f"index 1, slug rtx5090, UUID {second}", "--config device="):
        assert part in str(error.value)
    assert clock.choose("rtx5090").uuid == second


def test_slug_of_two_gpus_is_refused_and_their_index_is_not(machine):
    _, second = machine.gpus({"name": H200}, {"name": H200})
    with pytest.raises(RungsError, match=r"slug of several GPUs: choose by index or UUID \(index 0"):
        clock.choose("h200")
    assert clock.choose("1").uuid == second


@pytest.mark.parametrize("device", ["h100", "1", "GPU-0", "-1", ""])
def test_unknown_device_names_what_is_there(machine, device):
    with pytest.raises(RungsError, match=f"no device {device!r} here: .*index 0, slug h200, UUID GPU-"):
        clock.choose(device)


def test_cuda_visible_devices_narrows_the_choice(machine, monkeypatch):
    first, second = machine.gpus({"name": H200}, {"name": H200})
    for value, left in (("1", [second]), (first, [first]), (f"1,{first}", [first, second]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert [g.uuid for g in clock.gpus()] == left
    with pytest.raises(RungsError, match="no GPU that CUDA_VISIBLE_DEVICES leaves"):
        clock.choose("0")


def test_numbers_in_cuda_visible_devices_are_ambiguous_among_unlike_gpus(machine, monkeypatch):
    _, second = machine.gpus({"name": H200}, {"name": RTX})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    with pytest.raises(RungsError, match="ambiguous"):
        clock.gpus()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [g.uuid for g in clock.gpus()] == [second]


# ---- the decision ----------------------------------------------------------------------------------------------------


def test_observe_calls_no_setter_and_records_what_it_sees(machine):
    machine.change(supported_mhz=[1980, 1500, 345], idle_mhz=360)
    (gpu,) = clock.gpus()
    record = clock.decide(gpu, "observe", "auto")
    with clock.held(record, gpu, lambda seconds: 1980.0) as held:
        assert (held.locked_mhz, held.within_lock(1.0), held.within_lock(None)) == (None, True, True)
    assert machine.calls() == []
    assert (record["mode"], record["reason"], record["gpu"]) == ("observe", "asked for", gpu.uuid)
    assert (record["supported_mhz"], record["idle_mhz"], record["requested_mhz"]) == ([345, 1500, 1980], 360, None)
    json.dumps(record, allow_nan=False)


def test_auto_locks_where_it_may_and_the_decision_leaves_the_gpu_as_it_was(machine):
    (gpu,) = clock.gpus()
    record = clock.decide(gpu, "auto", "1500")
    assert (record["mode"], record["requested_mhz"], record["restore"]) == ("lock", 1500, clock.NOT_TOLD)
    assert record["who"] in ("root", f"uid {os.geteuid()}")
    assert machine.sets() == [("lock", 345, 1980), ("reset",)]


@pytest.mark.parametrize(("lock", "why"), [("denied", "Insufficient Permissions"), ("unsupported", "Not Supported")])
def test_auto_observes_where_it_may_not_lock(machine, lock, why):
    machine.change(lock=lock)
    (gpu,) = clock.gpus()
    record = clock.decide(gpu, "auto", 1500)
    assert record["mode"] == "observe"
    assert why in record["reason"]
    with clock.held(record, gpu) as held:
        assert held.record["requested_mhz"] is None
    assert [call["granted"] for call in machine.calls()] == [False]


def test_lock_without_permission_is_refused_with_the_fix(machine):
    machine.change(lock="denied")
    with pytest.raises(
        RungsError, match=r"cannot be locked \(Insufficient Permissions\): run as root, or use .*observe"
    ):
        clock.decide(clock.choose("auto"), "lock", 1500)


def test_gpu_without_a_list_of_clocks_is_observed(machine):
    machine.change(supported_mhz=[])
    assert clock.decide(clock.choose("auto"), "auto", "auto")["mode"] == "observe"
    assert machine.calls() == []


@pytest.mark.parametrize("mode", ["lock", "auto", "observe"])
def test_unsupported_clock_names_the_nearest_ones(machine, mode):
    with pytest.raises(RungsError, match=r"1507 MHz is not an SM clock .*nearest, 1500 or 1515 MHz"):
        clock.decide(clock.choose("auto"), mode, 1507)
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("mode", "mhz", "what"), [("fast", 1500, "no clock mode 'fast'"), ("lock", "high", "'high' is no clock")]
)
def test_words_that_are_none(machine, mode, mhz, what):
    with pytest.raises(RungsError, match=what):
        clock.decide(clock.choose("auto"), mode, mhz)


# ---- holding it ------------------------------------------------------------------------------------------------------


def test_lock_is_set_read_back_and_restored(machine):
    gpu = clock.choose("auto")
    record = clock.decide(gpu, "lock", 1500)
    machine.log.unlink()
    with clock.held(record, gpu) as held:
        assert machine.sets() == [("lock", 1500, 1500)]
        assert (held.locked_mhz, held.record["read_back_mhz"]) == (1500, 1500)
    assert machine.sets() == [("lock", 1500, 1500), ("reset",)]
    assert record["read_back_mhz"] is None, "the decision is not changed by what becomes of it"
    assert not list((machine.file.parent / "state").rglob("clock-*"))


@pytest.mark.parametrize(
    ("mhz", "within"), [(1500, True), (1486, True), (1514, True), (1484, False), (1516, False), (None, False)]
)
def test_sample_that_leaves_the_lock_by_more_than_one_percent(machine, mhz, within):
    gpu = clock.choose("auto")
    with clock.held(clock.decide(gpu, "lock", 1500), gpu) as held:
        assert held.within_lock(mhz) is within


def test_dropped_lock_is_seen_in_the_clock_of_a_sample(machine):
    machine.change(drop_after=2, load_mhz=1755)
    gpu = clock.choose("auto")
    with clock.held(clock.decide(gpu, "lock", 1500), gpu) as held:
        import pynvml

        seen = [held.within_lock(pynvml.nvmlDeviceGetClockInfo(gpu.uuid, pynvml.NVML_CLOCK_SM)) for _ in range(2)]
    assert seen == [True, False]


def test_ignored_lock_is_found_by_reading_back(machine, monkeypatch):
    machine.change(lock="ignored", load_mhz=1755)
    monkeypatch.setenv("RUNGS_STANDIN_LOAD", "1")
    gpu = clock.choose("auto")
    record = clock.decide(gpu, "lock", 1500)
    lied = pytest.raises(RungsError, match=r"took the lock at 1500 MHz and the clock reads back 1755 MHz")
    with lied, clock.held(record, gpu):
        raise AssertionError("measured under a lock that is not there")
    assert not machine.locked()
    with clock.held(clock.decide(gpu, "auto", 1500), gpu) as held:
        assert not machine.locked()
        assert (held.record["mode"], held.locked_mhz) == ("observe", None)
        assert "1755 MHz" in held.record["reason"]


def test_clock_below_the_lock_tells_only_under_a_load(machine):
    machine.change(sustained_mhz=1200)
    gpu = clock.choose("auto")
    record = clock.decide(gpu, "lock", 1500)
    with clock.held(record, gpu) as held:
        assert (held.locked_mhz, held.record["read_back_mhz"]) == (1500, 1200)
    with pytest.raises(RungsError, match="reads back 1200 MHz"), clock.held(record, gpu, lambda seconds: 1200.0):
        raise AssertionError("measured at a clock that the power cap does not allow")


def test_permission_that_went_away_since_the_decision(machine):
    gpu = clock.choose("auto")
    records = {mode: clock.decide(gpu, mode, 1500) for mode in ("auto", "lock")}
    machine.change(lock="denied")
    with pytest.raises(RungsError, match="refused the lock"), clock.held(records["lock"], gpu):
        raise AssertionError("measured without the lock")


def test_exception_restores_and_passes(machine):
    gpu = clock.choose("auto")
    with pytest.raises(ZeroDivisionError), clock.held(clock.decide(gpu, "lock", 1500), gpu):
        assert machine.locked()
        1 / 0  # noqa: B018
    assert not machine.locked()


def test_only_the_chosen_gpu_is_touched(machine):
    first, second = machine.gpus({"name": H200}, {"name": RTX})
    gpu = clock.choose("rtx5090")
    with clock.held(clock.decide(gpu, "auto", 1500), gpu):
        pass
    assert {call["uuid"] for call in machine.calls()} == {second}
    with (
        pytest.raises(RungsError, match="decided for GPU"),
        clock.held(clock.decide(gpu, "auto", 1500), clock.choose("h200")),
    ):
        raise AssertionError("locked another GPU than the one decided for")
    assert first not in {call["uuid"] for call in machine.calls()}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT), (signal.SIGHUP, 129)]
)
def test_signal_restores(machine, number, code):
    process = start(HOLD)
    assert process.stdout.readline() == "ready\n"
    assert machine.locked()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert machine.sets()[-2:] == [("lock", 1500, 1500), ("reset",)]
    assert clock.release() == []


def test_second_signal_waits_for_the_restoration(machine):
    process = start(
        """
        record = clock.decide(gpu, "lock", 1500)
        import pynvml
        reset = pynvml.nvmlDeviceResetGpuLockedClocks
        def slow(handle):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            reset(handle)
        pynvml.nvmlDeviceResetGpuLockedClocks = slow
        try:
            with clock.held(record, gpu):
                pass
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    out, err = process.communicate(timeout=20)
    assert out == "interrupted\n", err
    assert not machine.locked()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal_does_not_end_what_the_first_has_begun_to_undo(machine, second):
    process = start(
        """
        with clock.ending_signals():
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(60)
            finally:
                os.kill(os.getpid(), int(sys.argv[1]))
                time.sleep(0.05)
                print("undone")
        """,
        str(int(second)),
    )
    out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("undone\n", 129), err


# ---- what a killed run leaves ----------------------------------------------------------------------------------------


@pytest.fixture
def killed(machine):
    """A machine whose GPU a killed process has left locked; the process number."""
    process = start(HOLD)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    assert machine.locked()
    return process.pid


def test_release_after_kill(machine, killed):
    (line,) = clock.release()
    assert f"released the clock lock of process {killed}" in line
    assert not machine.locked()
    assert clock.release() == []


@pytest.mark.parametrize("mode", ["lock", "auto"])
def test_next_decision_finds_a_stale_lock_first(machine, killed, capsys, mode):
    before = len(machine.calls())
    clock.decide(clock.choose("auto"), mode, 1500)
    assert machine.sets()[before:] == [("reset",), ("lock", 345, 1980), ("reset",)]
    assert f"process {killed}" in capsys.readouterr().err


def test_next_measurement_finds_a_stale_lock_first(machine, killed):
    gpu = clock.choose("auto")
    before = len(machine.calls())
    record = {
        "mode": "lock",
        "asked": "lock",
        "reason": "",
        "requested_mhz": 1200,
        "gpu": gpu.uuid,
        "supported_mhz": [],
    }
    with clock.held(record, gpu):
        assert machine.sets()[before:] == [("reset",), ("lock", 1200, 1200)]
    assert not machine.locked()


def test_observing_under_a_stale_lock_is_refused_without_a_setter(machine, killed):
    gpu = clock.choose("auto")
    before = machine.calls()
    with pytest.raises(RungsError, match=f"still locked by process {killed}, .*clock release"):
        clock.decide(gpu, "observe", "auto")
    record = {"mode": "observe", "reason": "", "gpu": gpu.uuid}
    with pytest.raises(RungsError, match="clock release"), clock.held(record, gpu):
        raise AssertionError("observed a locked clock")
    assert machine.calls() == before


def test_stale_lock_that_may_not_be_released_names_the_command(machine, killed):
    machine.change(lock="denied")
    (line,) = clock.release()
    assert re.search("as root, run `nvidia-smi -i GPU-.* --reset-gpu-clocks`", line)
    with pytest.raises(RungsError, match="as root"):
        clock.decide(clock.choose("auto"), "auto", 1500)
    machine.change(lock="permitted")
    assert "released" in clock.release()[0], "the record was kept for this"


def test_release_leaves_a_running_measurement_alone(machine):
    process = start(HOLD)
    assert process.stdout.readline() == "ready\n"
    try:
        (line,) = clock.release()
        assert f"locked by process {process.pid}, which is still running" in line
        assert machine.locked()
    finally:
        process.terminate()
        process.communicate()


def state_of(machine: Machine) -> Path:
    return machine.file.parent / "state" / "rungs" / f"clock-{clock.choose('auto').uuid}.json"


def test_process_number_that_came_round_again_is_not_the_owner(machine, killed):
    state = json.loads(state_of(machine).read_text())
    state_of(machine).write_text(json.dumps(state | {"pid": os.getpid()}))
    assert "released" in clock.release()[0]


def test_killed_process_that_nobody_has_waited_for_is_gone(machine):
    process = start(HOLD)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}").exists()
    assert "released" in clock.release()[0]
    process.communicate()


def test_lock_ended_by_a_restart_is_only_forgotten(machine, killed):
    state = json.loads(state_of(machine).read_text())
    state_of(machine).write_text(json.dumps(state | {"boot_id": "another"}))
    before = machine.calls()
    assert "restarted" in clock.release()[0]
    assert machine.calls() == before
    assert not state_of(machine).exists()


def test_record_cut_in_half_is_released(machine, killed):
    state_of(machine).write_text('{"pid": 1')
    assert "released" in clock.release()[0]
    assert not machine.locked()


def test_record_of_a_gpu_that_is_elsewhere_is_left_alone(machine, killed):
    path = state_of(machine)
    machine.gpus({"uuid": "GPU-of-another-machine"})
    assert "is not on this machine" in clock.release()[0]
    assert path.exists()


# ---- the highest clock that the control holds ------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1980, 1979, 1755, 1000, 352, 345])
def test_highest_clock_that_is_held(limit):
    supported = list(range(345, 1981, 15))
    tried: list[int] = []

    def load(seconds: float) -> float:
        assert seconds == 5.0
        return min(tried[-1], limit)

    held = [mhz for mhz in supported if min(mhz, limit) >= 0.99 * mhz]
    assert clock.highest_held(supported[::-1], tried.append, load) == held[-1]
    assert len(tried) <= 8
    assert tried[0] == 1980


def test_no_clock_is_held():
    with pytest.raises(RungsError, match="holds none"):
        clock.highest_held([300, 600], lambda mhz: None, lambda seconds: 100.0)


def test_found_clock_is_used_again_until_it_fails_or_the_power_limit_changes(machine):
    machine.change(sustained_mhz=1600)
    gpu = clock.choose("auto")
    runs: list[float] = []

    def load(seconds: float) -> float:
        import pynvml

        runs.append(seconds)
        return float(pynvml.nvmlDeviceGetClockInfo(gpu.uuid, pynvml.NVML_CLOCK_SM))

    record = clock.decide(gpu, "auto", "auto")
    assert record["requested_mhz"] is None
    with clock.held(record, gpu, load) as held:
        assert (held.locked_mhz, held.record["read_back_mhz"]) == (1605, 1600)
    assert runs.count(5.0) > 1
    runs.clear()
    record = clock.decide(gpu, "auto", "auto")
    assert record["requested_mhz"] == 1605
    with clock.held(record, gpu, load):
        assert runs == [0.4]
    with (
        pytest.raises(RungsError, match="reads back"),
        clock.held(record | {"asked": "lock"}, gpu, lambda seconds: 1500.0),
    ):
        raise AssertionError("measured at a clock that is no longer held")
    assert clock.decide(gpu, "auto", "auto")["requested_mhz"] is None, "to be found anew"
    clock._remember(gpu, 1605)
    assert clock.decide(gpu, "auto", "auto")["requested_mhz"] == 1605
    machine.change(power_limit_w=500)
    assert clock.decide(clock.choose("auto"), "auto", "auto")["requested_mhz"] is None


def test_clock_cannot_be_found_without_a_load(machine):
    gpu = clock.choose("auto")
    with pytest.raises(RungsError, match="under a load"), clock.held(clock.decide(gpu, "lock", "auto"), gpu):
        raise AssertionError("locked to nothing")
    assert not machine.locked()


def test_load_is_the_lowest_clock_after_the_ramp(machine, monkeypatch):
    (gpu,) = clock.gpus()
    began = time.monotonic()

    def work() -> None:
        time.sleep(0.01)
        elapsed = time.monotonic() - began
        machine.change(idle_mhz=345 if elapsed < 0.15 else 1400 if elapsed < 0.3 else 1700)

    assert clock.under(gpu, work)(0.5) == 1400
    assert time.monotonic() - began >= 0.5


# ---- the guard -------------------------------------------------------------------------------------------------------


def test_second_process_waits_for_the_gpu_and_says_so(machine):
    body = """
    with clock.exclusive(gpu.uuid):
        print("in", flush=True)
        time.sleep(float(sys.argv[1]))
    print("out", flush=True)
    """
    first = start(body, "60")
    assert first.stdout.readline() == "in\n"
    second = start(body, "0")
    assert second.stderr.readline().startswith("Another process is measuring on GPU")
    assert not select.select([second.stdout], [], [], 0.3)[0], "it does not go in beside the first"
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=20)
    assert (out, err) == ("in\nout\n", "")


def test_guard_is_entered_again_by_its_owner_and_kept_to_the_end(machine):
    (gpu,) = clock.gpus()
    body = """
    import fcntl
    fcntl.flock(os.open(f"/tmp/rungs-{gpu.uuid}.lock", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    """

    def free() -> bool:
        process = start(body)
        process.communicate()
        return process.returncode == 0

    with clock.exclusive(gpu.uuid):
        with clock.exclusive(gpu.uuid):
            pass
        assert not free()
    assert free()


# ---- the sampler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0x0, ""),
        (0x1, ""),
        (0x2 | 0x100, ""),
        (0x4, "power cap"),
        (0x1 | 0x4 | 0x20, "power cap+thermal"),
        (0x8 | 0x40 | 0x80, "hw slowdown+hw thermal+power brake"),
        (0x10, "sync boost"),
        (0x4 | 0x8000, "power cap+0x8000"),
    ],
)
def test_throttle_words(mask, words):
    assert throttle_words(mask) == words


@pytest.mark.parametrize("old_names", [False, True])
def test_reading(machine, old_names):
    stranger = start("time.sleep(60)")
    machine.change(
        event_reasons=0x4, power_w=655.5, temp_c=61, processes=[stranger.pid, os.getppid()], old_names=old_names
    )
    try:
        with Sampler(clock.choose("auto")) as sampler:
            reading = sampler.read()
    finally:
        stranger.kill()
        stranger.communicate()
    assert reading == ("power cap", 655.5, 61.0, (stranger.pid,))


def test_reading_is_new_and_survives_the_loss_of_nvml(machine):
    def eventually(what) -> bool:
        for _ in range(500):  # times, not a time: a machine that stands still for seconds is no fault of the sampler's
            if what(sampler.read()):
                return True
            time.sleep(0.01)
        return False

    with Sampler(clock.choose("auto")) as sampler:
        assert sampler.read().throttle == ""
        machine.change(event_reasons=0x20)
        assert eventually(lambda reading: reading.throttle == "thermal")
        machine.change(lost=True)
        assert eventually(lambda reading: reading == ("unreadable", None, None, ()))


def test_sampler_reads_the_gpu_of_its_uuid(machine):
    machine.gpus({"name": H200, "temp_c": 20}, {"name": RTX, "temp_c": 90})
    with Sampler(clock.choose("rtx5090")) as sampler:
        assert sampler.read().temp_c == 90


def test_processes_of_others():
    stranger = subprocess.Popen(["sleep", "60"])
    known, unknown = stranger.pid, 2**22 + 5  # the second above the kernel's largest
    try:
        assert others([os.getpid(), os.getppid(), known]) == (known,)
        assert others([os.getpid(), unknown]) == (unknown,)
        assert others([unknown, known]) == (known,), "in a container, the number that the host gives this process"
        assert others([unknown, unknown + 1]) == (unknown + 1,)
    finally:
        stranger.kill()
        stranger.wait()
