"""A stand-in for `rungs.gpu`: no GPU, the same Session. Times follow a model with a drifting clock, and faults are ordered.

RUNGS_STANDIN_GPU names a JSON file: {"log": path, "speed": {variant: share of the control}, "rotation_bytes": {"MxNxK": bytes
between two uses of a buffer with cold caches}, "faults": {variant or `control`: {"kind": ..., "shape": [m, n, k]} or a list of
these}} with the kinds nan, wrong, nothing, first_only, zero_time, some_zero (every seventh), abort, hang, slow (three seconds
a launch, one with slow:1), tenth (from the variant's tenth launch at a shape on, every arm's result is another), at every shape
where none is given. With `"clock": "nvml"` the clock is the one that NVML reads, a lock included. Each measured shape is a line
`variant m n k` in the log. The results are made up: they test the pipeline and are no measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rungs import plan as plans
from rungs import workloads
from rungs.errors import Refused

CONTROL = "control"
PEAK_TFLOPS = 600.0


@dataclass(frozen=True)
class Outcome:
    unwritten: int
    equal: bool
    error: float
    bits: str


def open_session(experiment, uuid):
    return Session(uuid)


class Session:
    sms = 132
    dram_bytes_per_us = 4.9e6
    l2_bytes = 60 << 20

    def __init__(self, uuid: str) -> None:
        self.uuid, self.arms, self.launches, self.refused = uuid, {}, {}, {}
        path = os.environ.get("RUNGS_STANDIN_GPU")
        self.script = json.loads(Path(path).read_text()) if path else {}
        self.now_us, self.random = 0.0, np.random.default_rng(7)
        self.torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))

    def load_stamp(self, cubin: Path) -> None:
        assert cubin.stat().st_size > 0

    def load(self, arm, experiment, variant, device, cubin) -> None:
        assert cubin.stat().st_size > 0
        plans.resources(experiment, variant, device)
        self.arms[arm] = SimpleNamespace(experiment=experiment, variant=variant, device=device)

    def set_problem(self, problem, fill, seed, l2="hot") -> int:
        self.problem, self.fill, self.replays, self.timed, self.l2 = tuple(problem), fill, 0, False, l2
        self.refused, self.done, self.corrupt = {}, 0, False
        for name, arm in self.arms.items():
            of = (arm.experiment, arm.variant, arm.device, self.problem)
            names = "abc" if _is_gemm(arm) else workloads.of(arm.experiment).operands(*of, self.sms)
            try:
                plans.launch_of(*of, dict.fromkeys(names, 1 << 20), self.sms)
            except Refused as refusal:
                self.refused[name] = str(refusal)
        ordered = self.script.get("rotation_bytes", {}).get("x".join(map(str, problem)), 3 * self.l2_bytes)
        return 0 if l2 == "hot" else ordered

    def _fault(self, arm: str) -> str:
        name = CONTROL if arm == CONTROL else self.arms[arm].variant.name
        faults = self.script.get("faults", {}).get(name, [])
        for fault in [faults] if isinstance(faults, dict) else faults:
            if fault.get("shape", list(self.problem)) == list(self.problem):
                return fault["kind"]
        return ""

    def launch(self, arm, buffer_set=0) -> None:
        fault = self._fault(arm)
        if fault == "abort":
            os.abort()
        if fault == "hang":
            print("the kernel hangs", flush=True)
            while True:  # in short sleeps: a signal just before a long one would wait for its end
                time.sleep(0.05)
        if fault.startswith("slow"):
            time.sleep(float(fault.partition(":")[2] or 3))
        if fault == "tenth":
            self.count(1)

    def count(self, launches) -> None:
        self.done += launches
        self.corrupt |= self.done >= 10

    def busy(self) -> None:
        time.sleep(0.01)

    def outcome(self, arm, replay=False) -> Outcome:
        self.launch(arm)
        fault, cells = self._fault(arm), max(1, int(np.prod(self.problem[:2])))
        if fault in ("nan", "nothing") or (fault == "first_only" and replay):
            return Outcome(cells, False, float("nan"), "0" * 64)
        if fault == "wrong" or self.corrupt:
            return Outcome(0, False, 0.5, "1" * 64)
        contract = "control" if arm == CONTROL else self.arms[arm].experiment.contract(self.arms[arm].variant)
        error = 1.6e-3 if _is_gemm(next(iter(self.arms.values()))) else 1e-7
        return Outcome(0, True, error, hashlib.sha256(repr((contract, self.problem, self.fill)).encode()).hexdigest())

    @property
    def rotation(self) -> int:
        return 1 if self.l2 == "hot" else 4

    # the protocol's Session: a clock that drifts by a fifth, with noise of 0.2 %

    def mhz(self) -> float:
        if self.script.get("clock") == "nvml":
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):  # once it is gone, the last clock
                handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
                self.read_mhz = float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            return self.read_mhz
        return 1750.0 + 180.0 * np.sin(self.now_us / 30000.0)

    def capture(self, arm, launches) -> None:
        self.launches[arm] = launches

    def replay(self, arm) -> None:
        if arm != CONTROL and not self.timed and self.script.get("log"):
            self.timed = True
            with open(self.script["log"], "a", encoding="utf-8") as log:
                log.write(f"{self.arms[arm].variant.name} {' '.join(map(str, self.problem))}\n")
        name = CONTROL if arm == CONTROL else self.arms[arm].variant.name
        share = 1.0 if arm == CONTROL else self.script.get("speed", {}).get(name, _share(self.arms[arm].variant))
        time_us = self._work_us(arm) / share * 1980.0 / self.mhz()
        time_us = 2.0 + time_us * float(np.exp(self.random.normal(0.0, 0.002)))
        self.replays += arm != CONTROL
        fault = self._fault(arm)
        if fault == "tenth":
            self.count(self.launches[arm])
        if fault == "zero_time" or (fault == "some_zero" and self.replays % 7 == 0):
            time_us = 0.0
        self.now_us += time_us * self.launches[arm]

    def _work_us(self, arm) -> float:
        """Of a GEMM at the control's speed; of any other work at 4 TB/s, and of the copy beside it."""
        first = self.arms[arm] if arm != CONTROL else next(iter(self.arms.values()))
        if _is_gemm(first):
            return 2.0 * float(np.prod(self.problem)) / (PEAK_TFLOPS * 1e6)
        of = (first.experiment, first.variant, first.device, self.problem, self.sms)
        if arm == CONTROL:
            return workloads.copied_bytes(workloads.of(first.experiment).operands(*of)) / 4e6
        work = workloads.of(first.experiment).work(*of)
        return (work.read_bytes + work.written_bytes) / 4e6

    def cycles(self, arm) -> float:
        """Of one unit of work, by the variant's name."""
        self.launch(arm)
        name = self.arms[arm].variant.name
        if self.script.get("log") and not self.timed:
            self.timed = True
            with open(self.script["log"], "a", encoding="utf-8") as log:
                log.write(f"{name} {' '.join(map(str, self.problem))}\n")
        if self._fault(arm) == "zero_time":
            return 0.0
        return (20 + sum(map(ord, name)) % 40) * float(np.exp(self.random.normal(0.0, 0.002)))

    def event(self) -> float:
        return self.now_us

    def stamp(self) -> float:
        return self.mhz()

    def wait(self, event) -> None:
        pass

    def elapsed_us(self, start, end) -> float:
        return end - start

    def clock_mhz(self, before, after) -> float:
        return (before + after) / 2

    def describe(self):
        return {"torch": "stand-in", "cuda": "stand-in", "sms": self.sms, "l2_bytes": self.l2_bytes}


def _is_gemm(arm) -> bool:
    return arm.experiment.workload == "gemm"


def _share(variant) -> float:
    """Each level that optimises gives a fixed gain, so that every step has a sign."""
    if variant.experiment not in ("gemm", "gemm_tuned"):
        return 0.5 + sum(map(ord, variant.name)) % 40 / 100
    gains = {"load": 0.06, "stages": 0.05, "swizzle": 0.08, "read": 0.04, "b_layout": 0.02}
    return 0.25 + sum(gain * variant.level(name) for name, gain in gains.items())
