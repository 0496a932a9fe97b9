"""A real GPU: loads cubins with the driver API, launches plans on torch's stream, and is the protocol's Session."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from rungs import launcher, workloads
from rungs import plan as plans
from rungs.errors import Refused, RungsError
from rungs.inputs import Buffers, Operand, buffer_sets, largest, shared
from rungs.session import CONTROL, Timing
from rungs.variants import GEMM, Device, Experiment, Variant

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


def open_session(experiment: Experiment, uuid: str) -> Session:
    """The session in which an experiment's binaries are checked and timed."""
    return Session(uuid) if experiment.workload == GEMM else WorkSession(uuid)


class Session(Timing):
    """One GPU in this process, for GEMMs. Not to be shared between threads."""

    def __init__(self, uuid: str) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        import torch

        if not torch.cuda.is_available():
            raise RungsError(f"CUDA does not start on GPU {uuid}: check the driver with nvidia-smi.")
        torch.cuda.init()
        torch.backends.cuda.matmul.allow_tf32 = False
        properties = torch.cuda.get_device_properties(0)
        super().__init__(torch, properties.multi_processor_count)
        self.l2_bytes: int = properties.L2_cache_size
        self.refused: dict[str, str] = {}  # arms that do not support the problem, and why
        attribute = driver.CUdevice_attribute
        clock_khz, bus_bits = (
            int(launcher.check(driver.cuDeviceGetAttribute(name, 0), "Reading the memory's clock and width"))
            for name in (
                attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
                attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            )
        )
        self.dram_bytes_per_us: float = 2 * clock_khz / 1e3 * bus_bits / 8  # two transfers a cycle

    # ---- binaries ----------------------------------------------------------------------------------------------------

    def load(self, arm: str, experiment: Experiment, variant: Variant, device: Device, cubin: Path) -> None:
        """Load a variant's binary under an arm's name.

        Raises Refused where its shared memory does not fit and RungsError where the occupancy is not the pinned one.
        """
        function = self._function(cubin, experiment.entry)
        launcher.allow_shared_memory(
            function, experiment, variant, device, *plans.resources(experiment, variant, device)
        )
        self.arms[arm] = Arm(experiment, variant, device, function)

    # ---- problem -----------------------------------------------------------------------------------------------------

    def set_problem(self, problem: tuple[int, int, int], fill: str, seed: int, l2: str = "hot") -> int:
        """Allocate and fill the operands, compute the reference and prepare every arm's launches.

        `fill` is `normal` or `integer` (-2..2: every fp32 partial sum is exact). `l2` hot has one set of buffers; cold
        rotates over as many as make at least 2 x L2 pass between two uses of one, and at least two.
        Returns the bytes touched between two uses of a buffer.
        """
        torch = self.torch
        self.graphs.clear()
        self.sets.clear()
        self.sets = buffer_sets(torch, problem, fill, seed, l2, self.l2_bytes)
        first = self.sets[0]
        # fp64 for random data; fp32 is exact for the integers, and rounds to bf16 once, as the kernels do.
        exact = torch.float32 if fill == "integer" else torch.float64
        self.fill, self.reference = fill, first.a.to(exact) @ first.b_nk.to(exact).t()
        self.rounded = self.reference.to(torch.bfloat16)
        for arm in self.arms.values():
            arm.launches = [self._prepare(arm, problem, buffers) for buffers in self.sets]
        self.torch.cuda.synchronize()
        return (len(self.sets) - 1) * first.read_bytes()

    def _prepare(self, arm: Arm, problem: tuple[int, int, int], buffers: Buffers) -> Callable[[], None]:
        """What launches the arm on these buffers."""
        b = buffers.b_nk if plans.b_is_n_by_k(arm.experiment, arm.variant) else buffers.b_kn
        addresses = {"a": buffers.a.data_ptr(), "b": b.data_ptr(), "c": buffers.c.data_ptr()}
        plan = launcher.plan_on(arm.function, arm.experiment, arm.variant, arm.device, problem, addresses, self.sms)
        launch = launcher.prepare(arm.function, plan, arm.variant.name)
        return lambda: launch(self.stream.cuda_stream)

    # ---- launching and checking --------------------------------------------------------------------------------------

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
        bits = [self.fingerprint(c) for c in results]
        if any(other != bits[0] for other in bits):
            bits = [f"{len(set(bits))} different results"]
        if replay:
            return Outcome(unwritten, False, math.nan, bits[0])
        equal = self.fill == "integer" and bool(self.torch.equal(results[0], self.rounded))
        difference = float((results[0].to(self.reference.dtype) - self.reference).norm() / self.reference.norm())
        return Outcome(unwritten, equal, difference, bits[0])

    def fingerprint(self, c: Any) -> str:
        """128 bits over the bits of C, four elements to a word: two sums of the words, weighted by their place.

        The integers wrap, and every weight is odd, so that a change of one word changes both sums. SHA-256 would take the
        32 MB of a 4096 x 4096 result to the host for each arm, three times a shape.
        """
        words = c.view(self.torch.int64).reshape(-1)
        place = self.torch.arange(words.numel(), dtype=self.torch.int64, device=words.device)
        sums = [int((words * (place * odd | 1)).sum()) & (1 << 64) - 1 for odd in _ODD]
        return "".join(f"{value:016x}" for value in sums)

    def describe(self) -> Mapping[str, Any]:
        """Versions and sizes for the manifest."""
        torch = self.torch
        found = {"torch": torch.__version__, "cuda": torch.version.cuda, "sms": self.sms, "l2_bytes": self.l2_bytes}
        return {**found, "dram_gb_per_s": self.dram_bytes_per_us / 1e3}


@dataclass
class WorkArm(Arm):
    """`operands` are the arm's own of the current point, `tensors` where they lie; one launch, without rotation.

    `sms` are those that the launch counts on: where clusters cannot fill the GPU, what they can fill.
    """

    operands: dict[str, Operand] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    sms: int = 0


class WorkSession(Session):
    """A session for experiments whose points are not M, N and K. The control copies the largest input."""

    mapped: plans.TensorMap | None = None  # of the last launch prepared that has one

    def describe(self) -> Mapping[str, Any]:
        """As of a GEMM's session; and where a launch has a tensor map, what a new one for each launch costs the host, in us."""
        described = super().describe()
        if self.mapped is None:
            return described
        costs = launcher.descriptor_costs(self.mapped, "the last point", self.stream.cuda_stream)
        return {**described, "descriptor_us": costs}

    def load(self, arm: str, experiment: Experiment, variant: Variant, device: Device, cubin: Path) -> None:
        """Load a variant's binary under an arm's name; what a point needs of an SM is looked at with the point."""
        self.arms[arm] = WorkArm(experiment, variant, device, self._function(cubin, experiment.entry))

    def set_problem(self, problem: tuple[int, ...], fill: str, seed: int, l2: str = "hot") -> int:
        """Draw the operands of every arm at the point, and prepare its launch. Equal operands of two arms are one buffer.

        `fill` is `normal`, or `integer` (whole numbers of -8..8). An arm that does not support the point stands in `refused`
        with the reason. Raises Refused for cold caches.
        """
        if l2 != "hot":
            raise Refused("Buffers rotate for GEMMs alone: take l2 hot, and payloads larger than L2.")
        self.graphs.clear()
        self.fill, self.point, self.seed = fill, problem, seed
        self._drawn: dict[Any, Any] = {}
        for arm in self.arms.values():
            arm.launches, arm.operands, arm.tensors = [], {}, {}
        self.refused = {}
        for name, arm in self.arms.items():
            workload, of = workloads.of(arm.experiment), (arm.experiment, arm.variant, arm.device)
            try:
                workload.check(*of, problem)
                launched = self._planned(arm, problem, self.sms)
                x, y, z = launched.block
                pinned = workload.ctas_per_sm(*of, problem)
                launcher.allow_shared_memory(arm.function, *of, launched.smem_bytes, x * y * z, pinned)
                few = launcher.sms_at_once(arm.function, launched, self.sms, arm.variant.name, pinned or 1)
                if few != self.sms:
                    launched = self._planned(arm, problem, few)
                launch = launcher.prepare(arm.function, launched, arm.variant.name)
            except Refused as refusal:
                self.refused[name], arm.operands, arm.tensors = str(refusal), {}, {}
                continue
            maps = [getattr(each, "tensor_map", each) for each in launched.params]
            self.mapped = next((each for each in maps if isinstance(each, plans.TensorMap)), self.mapped)
            arm.launches = [functools.partial(self._on_stream, launch)]
        if len(self.refused) == len(self.arms):
            raise Refused(next(iter(self.refused.values())))
        inputs = [arm.tensors[n] for arm in self.arms.values() for n, o in arm.operands.items() if o.role == "input"]
        self.source = largest(inputs)
        self.copied = self.torch.empty_like(self.source)
        self.torch.cuda.synchronize()
        return 0

    def _planned(self, arm: WorkArm, problem: tuple[int, ...], sms: int) -> plans.Plan:
        """The launch at the point on so many SMs; the arm gets its operands and tensors."""
        workload, of = workloads.of(arm.experiment), (arm.experiment, arm.variant, arm.device, problem)
        arm.sms, arm.operands = sms, workload.operands(*of, sms)
        arm.tensors = {
            key: shared(self._drawn, self.torch, key, operand, arm.variant.name, self.fill, self.seed)
            for key, operand in arm.operands.items()
        }
        return workload.plan(*of, {key: tensor.data_ptr() for key, tensor in arm.tensors.items()}, sms)

    def _on_stream(self, launch: Callable[[int], None]) -> None:
        launch(self.stream.cuda_stream)

    def poison(self) -> None:
        self.copied.fill_(-1)
        for arm in self.arms.values():
            for name, operand in arm.operands.items():
                if operand.role != "input":
                    arm.tensors[name].fill_(float("nan") if arm.tensors[name].is_floating_point() else -1)

    def outcome(self, arm: str, replay: bool = False) -> Outcome:
        """Poison every result, launch, and compare with what is expected; or replay the timed graph and only fingerprint."""
        self.poison()
        if replay:
            self.replay(arm)
        else:
            self.launch(arm)
        self.torch.cuda.synchronize()
        if arm == CONTROL:
            same = bool(self.torch.equal(self.copied, self.source))
            return Outcome(0, same, 0.0 if same else math.inf, self.fingerprint(self.copied))
        found = self.arms[arm]
        results = {n: found.tensors[n] for n, operand in found.operands.items() if operand.role == "output"}
        bits = "".join(self.fingerprint(result) for result in results.values())
        if replay:
            unwritten = sum(int(self.torch.isnan(r).sum()) for r in results.values() if r.is_floating_point())
            return Outcome(unwritten, False, math.nan, bits)
        return self._compared(found, results, bits)

    def _compared(self, arm: WorkArm, results: Mapping[str, Any], bits: str) -> Outcome:
        torch = self.torch
        inputs = {n: self._wide(arm, n) for n, operand in arm.operands.items() if operand.role == "input"}
        of = (arm.experiment, arm.variant, arm.device, self.point, arm.sms, inputs)
        expected = workloads.of(arm.experiment).expected(*of)
        unwritten, equal, error = 0, True, 0.0
        for name, result in results.items():
            right = expected[name].reshape(result.shape)
            if result.is_floating_point():
                unwritten += int(torch.isnan(result).sum())
                equal &= bool(torch.equal(result.double(), right.double()))
                norm = float(right.double().norm())
                error = max(error, float((result.double() - right.double()).norm()) / (norm or 1.0))
            else:
                mask = (1 << 8 * result.element_size()) - 1 if result.element_size() < 8 else -1
                differs = (self._wide(arm, name) & mask) != (right.to(torch.int64) & mask)
                unwritten += int((differs & (result == -1)).sum())
                equal &= not bool(differs.any())
                error = max(error, math.inf if bool(differs.any()) else 0.0)
        return Outcome(unwritten, equal, error, bits)

    def _wide(self, arm: WorkArm, name: str) -> Any:
        """A tensor as `expected` takes it: float64, or int64 without the sign that an unsigned integer of 32 bits got."""
        tensor = arm.tensors[name]
        if tensor.is_floating_point():
            return tensor.double()
        wide = tensor.to(self.torch.int64)
        unsigned = np.dtype(arm.operands[name].dtype).kind == "u" and tensor.element_size() < 8
        return wide & (1 << 8 * tensor.element_size()) - 1 if unsigned else wide

    def fingerprint(self, c: Any) -> str:
        """As of a GEMM's result; what ends within a word of 8 bytes is filled up with zeros."""
        flat = c.reshape(-1).view(self.torch.uint8)
        if left := flat.numel() % 8:
            flat = self.torch.cat([flat, flat.new_zeros(8 - left)])
        return super().fingerprint(flat)
