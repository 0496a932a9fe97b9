"""What an experiment's kernel works on, where that is no GEMM: one module per experiment, under the name that its file gives.

Every module has `MEASURES`, `CONTROL`, `check`, `plan`, `ctas_per_sm`, `operands`, `expected`, `work` and `emulated_points`,
as `Workload` says. A point is a tuple of whole numbers, one for each axis of the experiment, in its order.
"""

from __future__ import annotations

import importlib
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


def of(experiment: Experiment) -> Workload:
    """The module of an experiment that is no GEMM."""
    return cast(Workload, importlib.import_module(f"rungs.workloads.{experiment.workload}"))
