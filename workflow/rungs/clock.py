"""The GPUs of this machine and the clock step: all of it through NVML.

Nothing here calls sudo, and every setter goes to one GPU, found by its UUID.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungs.errors import RungsError
from rungs.files import read_json, write_json

ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120",
}
TOLERANCE = 0.01
"""A clock further from the lock than this share of it has left the lock."""
HOLD_S = 5.0
"""How long the control must hold a clock for it to be chosen."""
RAMP_S = 0.2
"""Start of a load that is not looked at: the clock rises from idle."""
LEAVE_S = 15.0
"""How long a process whose job is gone may take to give the clock back: longer than `warm` lets it."""
NOT_TOLD = "driver default: NVML does not tell of a lock that was there before"
"""What a lock is restored to."""

Load = Callable[[float], float]
"""Runs the control for so many seconds and returns the lowest SM clock seen, in MHz."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it. `arch` is None for one that rungs has no kernels for, the limit where NVML keeps it."""

    index: int
    name: str
    slug: str
    uuid: str
    capability: str
    arch: str | None
    driver: str
    memory_bytes: int
    power_limit_w: float | None

    def as_json(self) -> dict[str, Any]:
        """What a manifest says of the GPU: the same for every slot it may sit in."""
        return {key: getattr(self, key) for key in ("name", "slug", "uuid", "driver", "memory_bytes", "power_limit_w")}

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.slug}, {self.uuid})"


def _nvml() -> Any:
    """The module pynvml, initialised; None where the machine has no NVIDIA driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise RungsError(
            "The Python package nvidia-ml-py is missing: run `pip install -r envs/requirements.txt`."
        ) from None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return None
    except nvml.NVMLError as error:
        raise RungsError(
            f"The NVIDIA driver does not answer ({error}): see what `nvidia-smi` says and mend the driver."
        ) from None
    return nvml


def _open(gpu: Gpu) -> tuple[Any, Any]:
    """NVML and the handle of that GPU, by its UUID. Raises RungsError where it is gone."""
    nvml = _nvml()
    try:
        if nvml is not None:
            return nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        why = "no driver"
    except nvml.NVMLError as error:
        why = str(error)
    raise RungsError(f"{gpu} does not answer ({why}): see what `nvidia-smi` says.")


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers, or None where this driver or GPU does not answer that question."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def slug(name: str) -> str:
    """NVML's name as a folder name: `NVIDIA GeForce RTX 5090` -> `rtx5090`, `NVIDIA A100-SXM4-40GB` -> `a100_sxm4_40gb`.

    Brand words go. Board and memory size stay: they are different GPUs with different clocks.
    """
    words = [
        w for w in re.split(r"[^a-z0-9]+", name.lower()) if w not in ("", "nvidia", "geforce", "tesla", "quadro", "gpu")
    ]
    return re.sub(r"\b([rg]tx)_(?=\d)", r"\1", "_".join(words)) or "gpu"


def gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in nvidia-smi's order; none where there is no driver.

    Raises RungsError where the driver is there and broken, or CUDA_VISIBLE_DEVICES is ambiguous.
    """
    nvml = _nvml()
    if nvml is None:
        return []
    driver = nvml.nvmlSystemGetDriverVersion()
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        # One that fell off the bus or belongs to another container does not keep the others from being used.
        with contextlib.suppress(nvml.NVMLError):
            found.append(_gpu(nvml, index, driver))
    return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _gpu(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    limit_mw = _ask(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    return Gpu(
        index=index,
        name=name,
        slug=slug(name),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        capability=f"{major}.{minor}",
        arch=ARCHITECTURES.get((major, minor)),
        driver=driver,
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        power_limit_w=limit_mw / 1000 if limit_mw is not None else None,
    )


def _visible(found: list[Gpu], visible: str | None) -> list[Gpu]:
    if visible is None:
        return found
    names = [entry.strip() for entry in visible.split(",") if entry.strip()]
    unlike = len({gpu.name for gpu in found}) > 1
    if unlike and any(name.isdigit() for name in names) and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise RungsError(
            f"CUDA_VISIBLE_DEVICES={visible} is ambiguous on a machine with unlike GPUs, which CUDA numbers by speed: give UUIDs"
            " or set CUDA_DEVICE_ORDER=PCI_BUS_ID."
        )
    return [g for g in found if any(name == str(g.index) or (name and g.uuid.startswith(name)) for name in names)]


def choose(device: str) -> Gpu | None:
    """The GPU that config key `device` means; None for the emulator, and for `auto` where there is no GPU.

    Raises RungsError for one that is not there, for `auto` among several and for a slug that two GPUs share.
    """
    if device == "emulator":
        return None
    there = gpus()
    listing = "; ".join(f"index {g.index}, slug {g.slug}, UUID {g.uuid}" for g in there)
    if device == "auto":
        if len(there) > 1:
            raise RungsError(
                f"This machine has several GPUs: choose one with `--config device=<index, slug or UUID>` ({listing})."
            )
        return there[0] if there else None
    if not there:
        hidden = " that CUDA_VISIBLE_DEVICES leaves" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        raise RungsError(
            f"Device {device!r} is asked for and this machine has no GPU{hidden}: use `--config device=auto` to build and render"
            " without one."
        )
    matches = [g for g in there if device in (g.slug, str(g.index)) or device.lower() == g.uuid.lower()]
    if not matches:
        raise RungsError(f"There is no device {device!r} here: choose auto, emulator or one of these GPUs ({listing}).")
    if len(matches) > 1:
        raise RungsError(f"Device {device!r} is the slug of several GPUs: choose by index or UUID ({listing}).")
    return matches[0]


def decide(gpu: Gpu | None, mode: str, mhz: str | int) -> dict[str, Any]:
    """The clock record: what the measuring process is to do, and why. The GPU is left as it was.

    `mode` is lock, observe or auto (lock where the driver permits it); `mhz` is auto or a supported SM clock. In the record,
    `requested_mhz` is None where the measuring process has yet to find the clock that the control holds; `memory_mhz` is the
    highest memory clock, to be locked where the GPU can. Permission can only be found out by trying: the whole range of SM
    clocks is set and reset, under the guard of `exclusive`.

    Raises RungsError for a clock that is not supported and where `lock` is not permitted.
    """
    if mode not in ("auto", "lock", "observe"):
        raise RungsError(f"There is no clock mode {mode!r}: choose auto, lock or observe.")
    record: dict[str, Any] = {
        "mode": "emulated",
        "asked": mode,
        "reason": "the emulator has no clock",
        "gpu": None,
        "requested_mhz": None,
        "supported_mhz": [],
        "idle_mhz": None,
        "applications_mhz": None,
        "memory_mhz": None,
        "memory_reason": "",
        "restore": None,
        "who": None,
        "read_back_mhz": None,
        "memory_read_back_mhz": None,
        "load_mhz": None,
        "restored": None,
    }
    if gpu is None:
        return record
    nvml, handle = _open(gpu)
    supported = _supported(nvml, handle)
    record |= {
        "gpu": gpu.uuid,
        "supported_mhz": supported,
        "idle_mhz": _ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "applications_mhz": _ask(nvml, "nvmlDeviceGetApplicationsClock", handle, nvml.NVML_CLOCK_SM),
    }
    wanted = _wanted(gpu, mhz, supported)
    if mode == "observe":
        _clear_stale(gpu, may_set=False)
        return record | {"mode": "observe", "reason": "asked for"}
    with exclusive(gpu.uuid):
        _wait_for_owner(gpu)
        _clear_stale(gpu, may_set=True)
        refusal = _refusal(nvml, handle, supported)
    if not refusal:
        return record | {
            "mode": "lock",
            "reason": "asked for" if mode == "lock" else "the driver permits it",
            "requested_mhz": wanted or _remembered(gpu),
            "memory_mhz": max(_memory_clocks(nvml, handle), default=None),
            "restore": NOT_TOLD,
            "who": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        }
    if mode == "lock":
        raise RungsError(f"The clock of {gpu} cannot be locked ({refusal}): run as root, or use `clock.mode: observe`.")
    return record | {"mode": "observe", "reason": f"the clock cannot be locked: {refusal}"}


def _supported(nvml: Any, handle: Any) -> list[int]:
    """The SM clocks at the highest memory clock in MHz, ascending; empty where the driver does not list them."""
    memory = _memory_clocks(nvml, handle)
    clocks = _ask(nvml, "nvmlDeviceGetSupportedGraphicsClocks", handle, max(memory)) if memory else None
    return sorted(clocks or [])


def _memory_clocks(nvml: Any, handle: Any) -> list[int]:
    return _ask(nvml, "nvmlDeviceGetSupportedMemoryClocks", handle) or []


def _wanted(gpu: Gpu, mhz: str | int, supported: Sequence[int]) -> int | None:
    if mhz == "auto":
        return None
    try:
        wanted = int(mhz)
    except ValueError:
        raise RungsError(f"{mhz!r} is no clock: `clock.mhz` is auto or a number of MHz.") from None
    if supported and wanted not in supported:
        nearest = sorted(sorted(supported, key=lambda clock: abs(clock - wanted))[:2])
        raise RungsError(
            f"{wanted} MHz is not an SM clock that {gpu} supports: use one of the nearest, {' or '.join(map(str, nearest))} MHz,"
            " or auto."
        )
    return wanted


def _refusal(nvml: Any, handle: Any, supported: Sequence[int]) -> str:
    """Why the driver does not let this process lock the clock; empty where it does."""
    if not supported:
        return "the driver lists no supported clocks"
    try:
        nvml.nvmlDeviceSetGpuLockedClocks(handle, supported[0], supported[-1])
        nvml.nvmlDeviceResetGpuLockedClocks(handle)
    except nvml.NVMLError as error:
        return str(error)
    return ""


@dataclass
class Clock:
    """The clock of a measuring process: the record of `decide` with what became of it, for the manifest.

    `load_mhz` in it is for the measuring process to set, from its warm-up.
    """

    record: dict[str, Any]
    untouched: bool = False
    """The driver refused the very first lock, so that there is none to restore."""

    @property
    def locked_mhz(self) -> int | None:
        """The clock that is held, None where none is."""
        return self.record["requested_mhz"] if self.record["mode"] == "lock" else None

    @property
    def locked_memory_mhz(self) -> int | None:
        """The memory clock that is held, None where none is."""
        return self.record.get("memory_mhz") if self.record["mode"] == "lock" else None

    def within_lock(self, sm_mhz: float | None) -> bool:
        """Whether a sample at that clock may be used: always without a lock, else within 1 % of it (and never unread)."""
        locked = self.locked_mhz
        return locked is None or (sm_mhz is not None and abs(sm_mhz / locked - 1) <= TOLERANCE)


@contextlib.contextmanager
def held(record: Mapping[str, Any], gpu: Gpu | None, load: Load | None = None) -> Iterator[Clock]:
    """Hold the clock that the record asks for while a measurement runs, and restore it however that ends.

    To be entered after the imports, within `exclusive`. `load` (see `under`) reads the clock back under the control and,
    where the record leaves it open, finds the highest clock that the control holds. Without it the clock must be given, and
    is read as it stands, where only one above the lock tells anything: the GPU may be idle. A lock that is not held is given
    up: with a reason in the clock's record under `auto`, as a RungsError where `lock` was asked for. The memory clock is held
    too where the GPU can; where it cannot, the record says why. Any other mode calls no setter. `restored` in the record says
    at the end whether the driver has both clocks back.
    """
    clock = Clock(dict(record))
    if gpu is not None and record["gpu"] != gpu.uuid:
        raise RungsError(
            f"The clock was decided for GPU {record['gpu']} and {gpu} is to be measured: delete `clock/` and run again."
        )
    if gpu is not None:
        _wait_for_owner(gpu)
        _clear_stale(gpu, may_set=record["mode"] == "lock")
    if gpu is None or record["mode"] != "lock":
        yield clock
        return
    nvml, handle = _open(gpu)
    with ending_signals():
        try:
            _write_state(gpu, clock.record)
            _lock(clock, gpu, nvml, handle, load)
            yield clock
        finally:
            with _undisturbed():
                if clock.untouched:
                    _state_file(gpu.uuid).unlink(missing_ok=True)
                else:
                    states = (clock.record, _state(gpu.uuid) or {})
                    memory = any(state.get("memory_mhz") is not None for state in states)
                    clock.record["restored"] = _reset(gpu.uuid, str(gpu), nvml, handle, memory)


def _lock(clock: Clock, gpu: Gpu, nvml: Any, handle: Any, load: Load | None) -> None:
    """Lock and read back. An SM clock that is not held turns `auto` into observe and `lock` into an error."""
    record, taken = clock.record, False

    def lock(mhz: int) -> None:
        nonlocal taken
        nvml.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz)
        taken = True

    def read(seconds: float) -> float:
        return load(seconds) if load else float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

    try:
        if record["requested_mhz"] is None:
            # Another job may have found it since this record was made: one search per GPU, and one clock for all rungs.
            record["requested_mhz"] = _remembered(gpu)
        if record["requested_mhz"] is None:
            if load is None:
                raise RungsError(f"The clock that {gpu} holds can only be found under a load: give `clock.mhz` in MHz.")
            found = highest_held(record["supported_mhz"], lock, load)
            _remember(gpu, found)
            record["requested_mhz"] = found
        lock(record["requested_mhz"])
        if record.get("memory_mhz") is not None:
            _lock_memory(record, gpu, nvml, handle)
        record["read_back_mhz"] = read(2 * RAMP_S)
        idle = load is None and record["read_back_mhz"] < record["requested_mhz"]
        if idle or clock.within_lock(record["read_back_mhz"]):
            if record.get("memory_mhz") is not None:
                _read_memory_back(record, gpu, nvml, handle, idle=load is None)
            return
        _forget(gpu)
        why = f"the driver took the lock at {record['requested_mhz']} MHz and the clock reads back {record['read_back_mhz']:g} MHz"
    except nvml.NVMLError as error:
        clock.untouched = not taken and isinstance(error, (nvml.NVMLError_NoPermission, nvml.NVMLError_NotSupported))
        why = f"the driver refused the lock ({error})"
    if record["asked"] == "lock":
        raise RungsError(f"{gpu} does not hold its clock: {why}; use a lower `clock.mhz`, or `clock.mode: observe`.")
    if not clock.untouched:
        _reset(gpu.uuid, str(gpu), nvml, handle, record.get("memory_mhz") is not None)
    record |= {"mode": "observe", "reason": f"the clock cannot be locked: {why}", "restore": None, "who": None}
    record |= {"memory_mhz": None, "memory_reason": ""}


def _lock_memory(record: dict[str, Any], gpu: Gpu, nvml: Any, handle: Any) -> None:
    try:
        nvml.nvmlDeviceSetMemoryLockedClocks(handle, record["memory_mhz"], record["memory_mhz"])
    except nvml.NVMLError as error:
        _without_memory(record, gpu, str(error))


def _read_memory_back(record: dict[str, Any], gpu: Gpu, nvml: Any, handle: Any, idle: bool) -> None:
    """Right after the load, when the clock has not fallen yet; without one only a clock above the lock tells anything."""
    wanted, read = record["memory_mhz"], nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
    record["memory_read_back_mhz"] = read
    if abs(read / wanted - 1) > TOLERANCE and not (idle and read < wanted):
        nvml.nvmlDeviceResetMemoryLockedClocks(handle)
        _without_memory(record, gpu, f"the driver took the lock at {wanted} MHz and the clock reads back {read} MHz")


def _without_memory(record: dict[str, Any], gpu: Gpu, why: str) -> None:
    """Go on with the SM clock alone, which is what times depend on, and say so."""
    record |= {"memory_mhz": None, "memory_reason": f"the memory clock cannot be locked: {why}"}
    _write_state(gpu, record)
    print(f"{gpu}: {record['memory_reason']}.", file=sys.stderr, flush=True)


def highest_held(supported: Sequence[int], lock: Callable[[int], None], load: Load, seconds: float = HOLD_S) -> int:
    """The highest clock in MHz that stays within 1 % of itself for that long under the load.

    The highest is tried first, then the rest is halved: a GPU that holds a clock holds every lower one. Raises RungsError where
    none is held.
    """

    def holds(mhz: int) -> bool:
        lock(mhz)
        return load(seconds) >= mhz * (1 - TOLERANCE)

    clocks = sorted(supported)
    if clocks and holds(clocks[-1]):
        return clocks[-1]
    low, high = 0, len(clocks) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(clocks[middle]):
            low = middle + 1
        else:
            high = middle
    if low == 0 or not clocks:
        raise RungsError("The control holds none of the supported clocks: use `clock.mode: observe`.")
    return clocks[low - 1]


def under(gpu: Gpu, work: Callable[[], None]) -> Load:
    """A load from `work`, which runs some milliseconds of the control and waits for it; the clock is NVML's SM clock."""
    nvml, handle = _open(gpu)

    def load(seconds: float) -> float:
        start = time.monotonic()
        lowest = float("inf")
        while (elapsed := time.monotonic() - start) < seconds or lowest == float("inf"):
            work()
            if elapsed >= min(RAMP_S, seconds / 2):
                lowest = min(lowest, float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
        return lowest

    return load


def release() -> list[str]:
    """Release what killed runs of this user left locked on this machine; one sentence for each lock that was found."""
    files = sorted(_state_folder().glob("clock-*.json"))
    if not files:
        return []
    there = {gpu.uuid: gpu for gpu in gpus()}
    lines = []
    for file in files:
        uuid = file.stem.removeprefix("clock-")
        if uuid not in there:
            lines.append(f"GPU {uuid} is not on this machine, or hidden: its record {file} is left alone.")
            continue
        lines.append(_release(there[uuid]))
    return lines


def _release(gpu: Gpu) -> str:
    state = _state(gpu.uuid)
    if state is None:
        return f"{gpu} is not locked."
    if _alive(state):
        return f"{gpu} is locked by process {state['pid']}, which is still running: left alone."
    if state.get("boot_id") not in (None, _boot_id()):
        _state_file(gpu.uuid).unlink(missing_ok=True)
        return f"{gpu} lost its lock when the machine restarted: nothing to release."
    nvml, handle = _open(gpu)
    # A record that cannot be read does not tell whether the memory clock was locked too.
    if not _reset(gpu.uuid, str(gpu), nvml, handle, memory=not state or state.get("memory_mhz") is not None):
        return f"{gpu} is still locked: {_by_hand(gpu, state)}."
    return f"{gpu}: released the clock lock of process {state.get('pid')}, which ended without doing so."


def release_left(gpu: Gpu) -> bool:
    """Release what a process of this job left locked, since one that crashed restores nothing; whether no lock is left."""
    try:
        _wait_for_owner(gpu)
        if _state(gpu.uuid) is not None:
            print(_release(gpu), file=sys.stderr, flush=True)
    except RungsError as error:
        print(f"rungs: {error}", file=sys.stderr, flush=True)
    return not _state_file(gpu.uuid).exists()


def _by_hand(gpu: Gpu, state: Mapping[str, Any]) -> str:
    memory = f" and `nvidia-smi -i {gpu.uuid} --reset-memory-clocks`" if state.get("memory_mhz") is not None else ""
    return f"as root, run `nvidia-smi -i {gpu.uuid} --reset-gpu-clocks`{memory}"


def _wait_for_owner(gpu: Gpu) -> None:
    """Wait until another process has given the clock back, which one whose job was killed is about to do."""
    end = time.monotonic() + LEAVE_S
    while (state := _state(gpu.uuid)) is not None and _alive(state) and state["pid"] != os.getpid():
        if time.monotonic() > end:
            raise RungsError(
                f"{gpu} is locked by process {state['pid']}, which is still running: wait until it has ended, or end it."
            )
        time.sleep(0.05)


def _clear_stale(gpu: Gpu, may_set: bool) -> None:
    """Release a lock that a killed run left behind; where no clock may be set, say so in an error instead."""
    state = _state(gpu.uuid)
    if state is None or _alive(state):
        return
    if not may_set and state.get("boot_id") in (None, _boot_id()):
        raise RungsError(
            f"{gpu} is still locked by process {state.get('pid')}, which was killed: run `python -m rungs clock release`, since"
            " observing changes no clock."
        )
    print(_release(gpu), file=sys.stderr, flush=True)
    if _state_file(gpu.uuid).exists():
        raise RungsError(f"{gpu} is still locked by a killed run: {_by_hand(gpu, state)}.")


def _reset(uuid: str, title: str, nvml: Any, handle: Any, memory: bool) -> bool:
    """Give the clocks back to the driver. Where that fails the record stays, for `release`, and a line says so."""
    released = True
    for what in ("clock", "memory clock") if memory else ("clock",):
        try:
            if what == "clock":
                nvml.nvmlDeviceResetGpuLockedClocks(handle)
            else:
                nvml.nvmlDeviceResetMemoryLockedClocks(handle)
        except nvml.NVMLError as error:
            if what == "memory clock" and isinstance(
                error, (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound)
            ):
                continue  # and so it is not locked
            print(f"{title}: the {what} lock could not be released ({error}).", file=sys.stderr, flush=True)
            released = False
    if released:
        _state_file(uuid).unlink(missing_ok=True)
    return released


def _write_state(gpu: Gpu, record: Mapping[str, Any]) -> None:
    """What `release` needs to know, written before a clock is set."""
    clocks = {"mhz": record["requested_mhz"], "memory_mhz": record.get("memory_mhz")}
    write_json(_state_file(gpu.uuid), {"gpu": str(gpu), **clocks, **_this_process()})


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rungs"


def _state_file(uuid: str) -> Path:
    return _state_folder() / f"clock-{uuid}.json"


def _state(uuid: str) -> dict[str, Any] | None:
    """Who locked that GPU; empty where the record is not readable (and so belongs to nobody alive), None without one."""
    if not _state_file(uuid).exists():
        return None
    try:
        return read_json(_state_file(uuid))
    except RungsError:
        return {}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(pid: int) -> str | None:
    """Start of a live process in clock ticks since boot (proc(5), field 22 of stat); None for a zombie or none at all.

    With the process number it names a process for good: numbers come round again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in "ZX" else None


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "started": _started(os.getpid()), "boot_id": _boot_id()}


def _alive(state: Mapping[str, Any]) -> bool:
    pid = state.get("pid")
    return (
        isinstance(pid, int)
        and state.get("boot_id") == _boot_id()
        and state.get("started") is not None
        and _started(pid) == state["started"]
    )


def _held_file(gpu: Gpu) -> Path:
    return _state_folder() / f"held-{gpu.uuid}.json"


def _remember(gpu: Gpu, mhz: int) -> None:
    """Every rung must run at one clock, so the search for it is made once per GPU, driver and power limit."""
    write_json(_held_file(gpu), {"driver": gpu.driver, "power_limit_w": gpu.power_limit_w, "mhz": mhz})


def _remembered(gpu: Gpu) -> int | None:
    try:
        found = read_json(_held_file(gpu))
    except RungsError:
        return None
    same = (found.get("driver"), found.get("power_limit_w")) == (gpu.driver, gpu.power_limit_w)
    return found.get("mhz") if same else None


def _forget(gpu: Gpu) -> None:
    _held_file(gpu).unlink(missing_ok=True)


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process like Ctrl-C does: as an exception, so that what was begun is undone.

    The first one of the three is the last that is heeded: a terminal that closes and the job above both send one, and the
    second must not end what the first has begun to undo. A signal that is ignored stays so: `nohup` ignores SIGHUP.
    """

    def end(number: int, _frame: Any) -> None:
        for other in before:
            signal.signal(other, lambda *_: None)  # not SIG_IGN, which a child would inherit
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and its kin wait until the clock is restored. A signal mask would not do: it holds for one thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: waiting.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in waiting:
            signal.raise_signal(late)


_guarded: set[str] = set()


@contextlib.contextmanager
def exclusive(gpu_uuid: str) -> Iterator[None]:
    """One measuring process per GPU, over all folders and users of the machine; waits for its turn, saying so once.

    Within it the same process may enter again. The kernel gives the guard back however the process ends.
    """
    if gpu_uuid in _guarded:
        yield
        return
    # Not the temporary folder of the environment, which differs by user and job.
    handle = _open_guard(Path("/tmp") / f"rungs-{gpu_uuid}.lock")
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"Another process is measuring on GPU {gpu_uuid}: waiting for it to end.", file=sys.stderr, flush=True
            )
            fcntl.flock(handle, fcntl.LOCK_EX)
        _guarded.add(gpu_uuid)
        yield
    finally:
        _guarded.discard(gpu_uuid)
        os.close(handle)


def _open_guard(path: Path) -> int:
    """Opened for reading alone, which flock allows: /tmp refuses O_CREAT on a file of another user."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644))
        return os.open(path, flags)
    except OSError as error:
        raise RungsError(f"{path} guards the GPU and cannot be opened ({error.strerror}): remove it.") from None
