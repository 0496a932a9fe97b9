"""One GPU as the protocol drives it: launches, graphs of them, events, clock stamps and the kernels' own clocks.

Part of the protocol: `protocol.MODULES` has this module, so any change of its code makes every recorded number stale. What a
GPU is opened with, what is loaded and how results are checked is in `gpu`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from rungs import launcher, workloads
from rungs.inputs import Buffers

CONTROL = "control"
STAMP_SLOTS = 1024


class Timing:
    """The protocol's Session on one stream of a GPU with so many SMs.

    `arms` have a list `launches` of what launches them, one per set of buffers. `sets` are those of a GEMM; without any, the
    control copies `source` to `copied`.
    """

    copied: Any
    source: Any
    point: tuple[int, ...]

    def __init__(self, torch: Any, sms: int) -> None:
        self.torch = torch
        self.sms = sms
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.arms: dict[str, Any] = {}
        self.graphs: dict[str, Any] = {}
        self.sets: list[Buffers] = []
        self.captured = 0  # launches in each graph
        self._keep: list[Any] = []  # libraries stay loaded while their kernels may run

    def _function(self, cubin: Path, entry: str) -> Any:
        library, function = launcher.load_function(cubin, entry)
        self._keep.append(library)
        return function

    def load_stamp(self, cubin: Path) -> None:
        """The clock-stamp kernel; its slots hold one row per SM: clock64, globaltimer.

        They lie in pinned host memory, so that reading one does not queue behind the round that is running.
        """
        self._stamp_function = self._function(cubin, "stamp")
        self._stamps = self.torch.zeros((STAMP_SLOTS, self.sms, 2), dtype=self.torch.int64, pin_memory=True)
        self._next_stamp = 0

    @property
    def rotation(self) -> int:
        """Buffer sets: a graph of a multiple of these ends with the last one, and the next starts with the first."""
        return len(self.sets) or 1

    def launch(self, arm: str, buffer_set: int = 0) -> None:
        if arm != CONTROL:
            self.arms[arm].launches[buffer_set]()
        elif self.sets:
            buffers = self.sets[buffer_set]
            self.torch.matmul(buffers.a, buffers.b_nk.t(), out=buffers.c)
        else:
            self.copied.copy_(self.source)

    def capture(self, arm: str, launches: int) -> None:
        """A CUDA graph of `launches` back-to-back launches, going round the buffer sets."""
        self.launch(arm)  # cuBLAS makes its handle and workspace outside the capture
        self.torch.cuda.synchronize()
        self.captured = launches
        graph = self.torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which gives all free memory back to the driver first: it is needed again at once.
        graph.capture_begin()
        try:
            for index in range(launches):
                self.launch(arm, index % self.rotation)
        finally:
            graph.capture_end()
        self.graphs[arm] = graph

    def replay(self, arm: str) -> None:
        self.graphs[arm].replay()

    def event(self) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def stamp(self) -> int:
        """Queue a stamp; returns its slot, which is overwritten STAMP_SLOTS stamps later."""
        slot = self._next_stamp
        self._next_stamp = (slot + 1) % STAMP_SLOTS
        self._stamps[slot].zero_()
        target = ctypes.c_uint64(self._stamps[slot].data_ptr())
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(target))
        stream = self.stream.cuda_stream
        result = driver.cuLaunchKernel(
            self._stamp_function, self.sms, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointer), 0
        )
        launcher.check(result, "Launching the clock stamp")
        return slot

    def wait(self, event: Any) -> None:
        event.synchronize()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1000.0

    def clock_mhz(self, before: int, after: int) -> float | None:
        """Median over the SMs that both stamps reached of cycles per microsecond."""
        pair = self._stamps[[before, after]].numpy()
        both = (pair[0, :, 1] > 0) & (pair[1, :, 1] > pair[0, :, 1])
        if not both.any():
            return None
        cycles, nanoseconds = (pair[1] - pair[0])[both].T
        ratio = sorted(cycles / nanoseconds * 1000.0)
        return float(ratio[len(ratio) // 2])

    def cycles(self, arm: str) -> float:
        """Launch once, and read the kernel's own clock: cycles for one unit of its work."""
        self.launch(arm)
        self.torch.cuda.synchronize()
        found = self.arms[arm]
        workload, of = workloads.of(found.experiment), (found.experiment, found.variant, found.device)
        name = next(n for n, operand in found.operands.items() if operand.role == "cycles")
        values = found.tensors[name].cpu().numpy().astype(np.int64)
        return cycles_per_unit(values, workload.work(*of, self.point, self.sms).units)


def cycles_per_unit(values: np.ndarray, units: int) -> float:
    """The launch's figure of a `cycles` operand, shape (CTAs, warps): a CTA takes as long as its slowest warp, and the
    launch as its middle CTA does.
    """
    return float(np.median(values.reshape(len(values), -1).max(axis=1))) / units
