"""What an experiment's kernel works on, where that is no GEMM: one module per experiment, under the name that its file gives.

Every module has `MEASURES`, `CONTROL`, `check`, `plan`, `ctas_per_sm`, `operands`, `expected`, `work` and `emulated_points`,
as `Workload` says. A point is a tuple of whole numbers, one for each axis of the experiment, in its order.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from rungs.plan import Plan
from rungs.variants import Device, Experiment, Variant

Point = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """A buffer of a launch.

    `dtype` is numpy's name of it. `role`: an `input` is drawn by the device, standard normal or whole numbers from -8 to 8,
    or made by `make`; an `output` is poisoned before each launch (NaN, or all ones) and compared with what is expected;
    `cycles` is what the kernel's clock says, one entry per warp.
    """

    shape: tuple[int, ...]
    dtype: str
    role: str
    make: Callable[[np.random.Generator], np.ndarray] | None = None


@dataclass(frozen=True)
class Work:
    """What one launch does. `units`: pieces of work behind one entry of the `cycles` operand."""

    read_bytes: int
    written_bytes: int
    flop: int = 0
    units: int = 0


class Workload(Protocol):
    """The functions of a workload's module. `sms` is the GPU's own number where there is one."""

    MEASURES: str
    """`time`: paired rounds of CUDA graphs. `cycles`: what the kernel's own clock says."""
    CONTROL: str
    """What stands beside every variant; empty for none."""
    FIGURES: tuple[str, ...]
    """Names of the figures that `rungs.answers` draws of it."""

    def check(self, experiment: Experiment, variant: Variant, device: Device, point: Point) -> None:
        """Raises Refused, naming the rule and the fix, for a point that the variant does not support."""

    def plan(
        self,
        experiment: Experiment,
        variant: Variant,
        device: Device,
        point: Point,
        addresses: Mapping[str, int],
        sms: int | None,
    ) -> Plan:
        """The launch; `addresses` are those of the operands. Raises Refused as `check` does."""

    def ctas_per_sm(self, experiment: Experiment, variant: Variant, device: Device, point: Point) -> int | None:
        """How many CTAs an SM must hold at once; None where nothing depends on it."""

    def operands(
        self, experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None
    ) -> dict[str, Operand]:
        """Every buffer of the launch by the name that `plan` knows its address by."""

    def expected(
        self,
        experiment: Experiment,
        variant: Variant,
        device: Device,
        point: Point,
        sms: int | None,
        inputs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The outputs' right values, in the arithmetic of the inputs: numpy arrays or torch tensors, floats as float64."""

    def work(self, experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None) -> Work:
        """What one launch does."""

    def emulated_points(self, experiment: Experiment, variant: Variant, device: Device) -> list[Point]:
        """Small points: the first is checked for races under every schedule, and all are counted."""


def footprint(operands: Mapping[str, Operand]) -> int:
    """Bytes of all buffers of a launch."""
    return sum(math.prod(operand.shape) * np.dtype(operand.dtype).itemsize for operand in operands.values())


def copied_bytes(operands: Mapping[str, Operand]) -> int:
    """What the control moves: it reads and writes the largest input."""
    inputs = (operand for operand in operands.values() if operand.role == "input")
    return 2 * max(math.prod(operand.shape) * np.dtype(operand.dtype).itemsize for operand in inputs)


INTEGERS = (-8, 8)
"""Of the fill `integer`: so small that sums of them stay exact."""


def poison(operand: Operand) -> Any:
    """What an output holds before a launch: NaN, or the integer whose bits are all one."""
    kind = np.dtype(operand.dtype)
    return kind.type(np.nan) if kind.kind == "f" else np.iinfo(kind).max if kind.kind == "u" else kind.type(-1)


def host_values(operand: Operand, fill: str, generator: np.random.Generator) -> np.ndarray:
    """An operand's values as numpy has them: inputs drawn, or made as the operand says; all else poisoned."""
    if operand.role != "input":
        return np.full(operand.shape, poison(operand), operand.dtype)
    if operand.make is not None:
        return np.asarray(operand.make(generator), operand.dtype).reshape(operand.shape)
    if fill == "integer" or np.dtype(operand.dtype).kind != "f":
        low, high = INTEGERS if np.dtype(operand.dtype).kind != "u" else (0, 1 << 8)
        return generator.integers(low, high, operand.shape, endpoint=True).astype(operand.dtype)
    return generator.standard_normal(operand.shape, dtype=np.float32).astype(operand.dtype)


def wide(values: np.ndarray) -> np.ndarray:
    """Values as `expected` takes them: float64, or int64."""
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def differs(found: np.ndarray, right: Any) -> np.ndarray:
    """Where a result on whole numbers is not what it should be; integers are compared by the bits that they have."""
    right = np.asarray(right).reshape(found.shape)
    if found.dtype.kind == "f":
        return ~(found == right)
    bits = (1 << 8 * found.dtype.itemsize) - 1 if found.dtype.itemsize < 8 else -1
    return np.asarray((wide(found) & bits) != (right.astype(np.int64) & bits))


def cycles_per_unit(values: np.ndarray, work: Work) -> float:
    """The launch's figure of a `cycles` operand, shape (CTAs, warps): a CTA takes as long as its slowest warp, and the
    launch as its middle CTA does.
    """
    return float(np.median(values.reshape(len(values), -1).max(axis=1))) / work.units


def of(experiment: Experiment) -> Workload:
    """The module of an experiment that is no GEMM."""
    return cast(Workload, importlib.import_module(f"rungs.workloads.{experiment.workload}"))
