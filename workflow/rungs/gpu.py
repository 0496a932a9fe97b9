"""A real GPU: loads cubins with the driver API, launches plans on torch's stream, and is the protocol's Session."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from rungs import launcher
from rungs import plan as plans
from rungs.errors import RungsError
from rungs.variants import Device, Experiment, Variant

CONTROL = "control"
STAMP_SLOTS = 1024
_ODD = (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D)  # any odd numbers would do: each makes every place count differently


@dataclass(frozen=True)
class Outcome:
    """What one launch on a poisoned result left behind. `error` is the relative Frobenius norm; it is NaN where C is.

    `bits` is the same exactly for results that are the same bit for bit.
    """

    unwritten: int
    equal: bool
    error: float
    bits: str


@dataclass
class Arm:
    """A loaded binary. `launches` of the current problem, one per buffer set, are prepared by `set_problem`."""

    experiment: Experiment
    variant: Variant
    device: Device
    function: Any
    launches: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Buffers:
    """One set of operands: A M x K, B as N x K and as K x N, C M x N; all bf16, row-major, on the GPU."""

    a: Any
    b_nk: Any
    b_kn: Any
    c: Any

    def read_bytes(self) -> int:
        """Bytes that one launch touches: A, one layout of B and C."""
        return int(2 * (self.a.numel() + self.b_nk.numel() + self.c.numel()))


def draw(torch: Any, fill: str, shape: tuple[int, int], generator: Any) -> Any:
    """A bf16 operand on the generator's device: `normal`, or `integer` in -2..2. Every element is its own draw, so that a tile
    of K that is multiplied twice, or not at all, changes the sum.
    """
    options = {"generator": generator, "device": generator.device}
    drawn = torch.randint(-2, 3, shape, **options) if fill == "integer" else torch.randn(shape, **options)
    return drawn.to(torch.bfloat16)


class Session:
    """One GPU in this process. Not to be shared between threads."""

    def __init__(self, uuid: str) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        import torch

        self.torch = torch
        if not torch.cuda.is_available():
            raise RungsError(f"CUDA does not start on GPU {uuid}: check the driver with nvidia-smi.")
        torch.cuda.init()
        torch.backends.cuda.matmul.allow_tf32 = False
        properties = torch.cuda.get_device_properties(0)
        self.sms: int = properties.multi_processor_count
        self.l2_bytes: int = properties.L2_cache_size
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.arms: dict[str, Arm] = {}
        self.graphs: dict[str, Any] = {}
        self.sets: list[Buffers] = []
        self.captured = 0  # launches in each graph
        self._keep: list[Any] = []  # libraries stay loaded while their kernels may run

    # ---- binaries ----------------------------------------------------------------------------------------------------

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

    def load(self, arm: str, experiment: Experiment, variant: Variant, device: Device, cubin: Path) -> None:
        """Load a variant's binary under an arm's name.

        Raises Refused where its shared memory does not fit and RungsError where the occupancy is not the pinned one.
        """
        function = self._function(cubin, experiment.entry)
        launcher.allow_shared_memory(function, experiment, variant, device)
        self.arms[arm] = Arm(experiment, variant, device, function)

    # ---- problem -----------------------------------------------------------------------------------------------------

    def set_problem(self, problem: tuple[int, int, int], fill: str, seed: int, l2: str = "hot") -> int:
        """Allocate and fill the operands, compute the reference and prepare every arm's launches.

        `fill` is `normal` or `integer` (-2..2: every fp32 partial sum is exact). `l2` hot has one set of buffers; cold
        rotates over as many as make at least 2 x L2 pass between two uses of one, and at least two.
        Returns the bytes touched between two uses of a buffer.
        """
        torch, (m, n, k) = self.torch, problem
        self.graphs.clear()
        self.sets.clear()
        generator = torch.Generator(device="cuda").manual_seed(seed)

        a, b = (draw(torch, fill, (rows, k), generator) for rows in (m, n))
        first = Buffers(a, b, b.t().contiguous(), torch.empty((m, n), dtype=torch.bfloat16, device="cuda"))
        count = 1 if l2 == "hot" else max(2, 1 + math.ceil(2 * self.l2_bytes / first.read_bytes()))
        copies = [Buffers(*(t.clone() for t in vars(first).values())) for _ in range(count - 1)]
        self.sets = [first, *copies]
        # fp64 for random data; fp32 is exact for the integers, and rounds to bf16 once, as the kernels do.
        exact = torch.float32 if fill == "integer" else torch.float64
        self.fill, self.reference = fill, a.to(exact) @ b.to(exact).t()
        self.rounded = self.reference.to(torch.bfloat16)
        for arm in self.arms.values():
            arm.launches = [self._prepare(arm, problem, buffers) for buffers in self.sets]
        self.torch.cuda.synchronize()
        return (count - 1) * first.read_bytes()

    @property
    def rotation(self) -> int:
        """Buffer sets: a graph of a multiple of these ends with the last one, and the next starts with the first."""
        return len(self.sets)

    def _prepare(self, arm: Arm, problem: tuple[int, int, int], buffers: Buffers) -> Callable[[], None]:
        """What launches the arm on these buffers."""
        b = buffers.b_nk if plans.b_is_n_by_k(arm.experiment, arm.variant) else buffers.b_kn
        addresses = {"a": buffers.a.data_ptr(), "b": b.data_ptr(), "c": buffers.c.data_ptr()}
        plan = plans.plan(arm.experiment, arm.variant, arm.device, problem, addresses, self.sms)
        launch = launcher.prepare(arm.function, plan, arm.variant.name)
        return lambda: launch(self.stream.cuda_stream)

    # ---- launching and checking --------------------------------------------------------------------------------------

    def launch(self, arm: str, buffer_set: int = 0) -> None:
        if arm == CONTROL:
            buffers = self.sets[buffer_set]
            self.torch.matmul(buffers.a, buffers.b_nk.t(), out=buffers.c)
        else:
            self.arms[arm].launches[buffer_set]()

    def busy(self) -> None:
        """Run the control for some milliseconds, and wait for it."""
        for _ in range(20):
            self.launch(CONTROL)
        self.torch.cuda.synchronize()

    def poison(self) -> None:
        for buffers in self.sets:
            buffers.c.fill_(float("nan"))

    def outcome(self, arm: str, replay: bool = False) -> Outcome:
        """Poison C, launch, and compare C with the reference; or replay the timed graph and only fingerprint every set."""
        self.poison()
        if replay:
            self.replay(arm)
        else:
            self.launch(arm)
        self.torch.cuda.synchronize()
        results = [buffers.c for buffers in (self.sets[: self.captured] if replay else self.sets[:1])]
        unwritten = sum(int(self.torch.isnan(c).sum()) for c in results)
        bits = [self._fingerprint(c) for c in results]
        if any(other != bits[0] for other in bits):
            bits = [f"{len(set(bits))} different results"]
        if replay:
            return Outcome(unwritten, False, math.nan, bits[0])
        equal = self.fill == "integer" and bool(self.torch.equal(results[0], self.rounded))
        difference = float((results[0].to(self.reference.dtype) - self.reference).norm() / self.reference.norm())
        return Outcome(unwritten, equal, difference, bits[0])

    def _fingerprint(self, c: Any) -> str:
        """128 bits over the bits of C, four elements to a word: two sums of the words, weighted by their place.

        The integers wrap, and every weight is odd, so that a change of one word changes both sums. SHA-256 would take the
        32 MB of a 4096 x 4096 result to the host for each arm, three times a shape.
        """
        words = c.view(self.torch.int64).reshape(-1)
        place = self.torch.arange(words.numel(), dtype=self.torch.int64, device=words.device)
        sums = [int((words * (place * odd | 1)).sum()) & (1 << 64) - 1 for odd in _ODD]
        return "".join(f"{value:016x}" for value in sums)

    # ---- the protocol's Session --------------------------------------------------------------------------------------

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
                self.launch(arm, index % len(self.sets))
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

    def describe(self) -> Mapping[str, Any]:
        """Versions and sizes for the manifest."""
        torch = self.torch
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "sms": self.sms, "l2_bytes": self.l2_bytes}
