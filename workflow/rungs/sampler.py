"""What is watched of a GPU while a number is made, through NVML: the conditions that flag a sample.

Part of the protocol: `protocol.MODULES` has this module, so any change of its code makes every recorded number stale.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rungs import clock
from rungs.protocol import LOCK_TOLERANCE

POLL_S = 0.02
THROTTLES = {
    0x4: "power cap",
    0x8: "hw slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hw thermal",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
"""NVML's clock event reasons (nvml.h, nvmlClocksEventReason*) in words."""
SETTINGS = 0x1 | 0x2 | 0x100
"""Idle, applications clocks and display clocks: a state and two settings that someone chose, no throttling."""
UNREADABLE = "unreadable"


class Reading(NamedTuple):
    """The state of the GPU a moment ago. `throttle` is the reasons with `+` between them, UNREADABLE once NVML is gone."""

    throttle: str
    power_w: float | None
    temp_c: float | None
    others: tuple[int, ...]


class Sampler:
    """Reads one GPU every 20 ms in the background: `with Sampler(gpu) as sampler: ... sampler.read()`.

    A memory clock that leaves `memory_mhz` is among the throttle reasons, so that no sample under it is used.
    """

    def __init__(self, gpu: clock.Gpu, interval_s: float = POLL_S, memory_mhz: int | None = None) -> None:
        self._nvml, self._handle = clock._open(gpu)
        self._interval_s = interval_s
        self._memory_mhz = memory_mhz
        # A GPU that gives no reasons from the start is not one whose driver went away.
        self._reasons_known = self._reasons() is not None
        self._newest = self._sample()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rungs-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def read(self) -> Reading:
        """The newest reading. Once NVML does not answer, its numbers are None and its throttle is UNREADABLE."""
        return self._newest

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            self._newest = self._sample()

    def _reasons(self) -> int | None:
        """NVML's clock event reasons, which drivers before 535 call throttle reasons."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if (reasons := clock._ask(self._nvml, name, self._handle)) is not None:
                return reasons
        return None

    def _sample(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        reasons = self._reasons() if self._reasons_known else 0
        power_mw = clock._ask(nvml, "nvmlDeviceGetPowerUsage", handle)
        temp = clock._ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        processes = clock._ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
        throttle = UNREADABLE if reasons is None else throttle_words(reasons)
        if self._memory_mhz is not None:
            mhz = clock._ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM)
            if mhz is not None and abs(mhz / self._memory_mhz - 1) > LOCK_TOLERANCE:
                throttle = "+".join(filter(None, (throttle, f"memory at {mhz} MHz instead of {self._memory_mhz}")))
        return Reading(
            throttle=throttle,
            power_w=None if power_mw is None else power_mw / 1000,
            temp_c=None if temp is None else float(temp),
            others=others([process.pid for process in processes or []]),
        )


def throttle_words(reasons: int) -> str:
    """NVML's bit mask of clock event reasons as words; empty where nothing throttles."""
    words = [word for bit, word in THROTTLES.items() if reasons & bit]
    unknown = reasons & ~(SETTINGS | sum(THROTTLES))
    return "+".join([*words, *([f"0x{unknown:x}"] if unknown else [])])


def others(pids: Sequence[int]) -> tuple[int, ...]:
    """Those of the processes on a GPU that are neither this one nor its parent.

    In a container NVML may give the host's numbers. Then this process is in the list under one that /proc does not know, so
    one such number is taken for this process where its own is missing.
    """
    found = sorted(set(pids) - {os.getpid(), os.getppid()})
    foreign = [pid for pid in found if not Path(f"/proc/{pid}").exists()]
    if foreign and os.getpid() not in pids:
        found.remove(foreign[0])
    return tuple(found)
