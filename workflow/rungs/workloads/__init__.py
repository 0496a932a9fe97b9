"""What an experiment's kernel works on, where that is no GEMM: one module per experiment, under the name that its file gives.

Every module has the NAMES, as `Workload` says and docs/workload.md shows. A point is a tuple of whole numbers, one for each axis of the experiment, in its order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np

from rungs.errors import Refused, RungsError, shown
from rungs.files import sha256_bytes
from rungs.inputs import Operand, host_input
from rungs.plan import InGlobal, Plan, TensorMap
from rungs.variants import Device, Experiment, Variant

Point = tuple[int, ...]
NAMES = (
    "MEASURES",
    "CONTROL",
    "FIGURES",
    "check",
    "plan",
    "ctas_per_sm",
    "operands",
    "expected",
    "work",
    "emulated_points",
)
"""What every module has."""
ROLES = ("input", "output", "cycles")


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
    """Names of the figures that `rungs.answers` draws of it; `()` for none."""

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


SMALL = 1 << 20
"""Bytes up to which a made input is looked at in `decisive`; larger ones are made in the same way."""


def decisive(
    experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None
) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of a launch's buffers, and all that decides what it works on and what its figure is divided by, as JSON has it."""
    module = of(experiment)
    operands = module.operands(experiment, variant, device, point, sms)
    work = module.work(experiment, variant, device, point, sms)
    described: list[Any] = [module.MEASURES, module.CONTROL, [*vars(work).values()]]
    for name, operand in operands.items():
        made = operand.make and footprint({name: operand}) <= SMALL
        values = host_values(operand, "integer", np.random.default_rng(1)).tobytes() if made else b""
        described.append(
            [name, list(operand.shape), operand.dtype, operand.role, bool(operand.make), sha256_bytes(values)]
        )
    return tuple(operands), described


def copied_bytes(operands: Mapping[str, Operand]) -> int:
    """What the control moves: it reads and writes the largest input."""
    inputs = (operand for operand in operands.values() if operand.role == "input")
    return 2 * max(math.prod(operand.shape) * np.dtype(operand.dtype).itemsize for operand in inputs)


def poison(operand: Operand) -> Any:
    """What an output holds before a launch: NaN, or the integer whose bits are all one."""
    kind = np.dtype(operand.dtype)
    return kind.type(np.nan) if kind.kind == "f" else np.iinfo(kind).max if kind.kind == "u" else kind.type(-1)


def host_values(operand: Operand, fill: str, generator: np.random.Generator) -> np.ndarray:
    """An operand's values as numpy has them: inputs drawn, or made as the operand says; all else poisoned."""
    if operand.role != "input":
        return np.full(operand.shape, poison(operand), operand.dtype)
    return host_input(operand, fill, generator)


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


def of(experiment: Experiment) -> Workload:
    """The module of an experiment that is no GEMM. Raises RungsError where it cannot be imported or lacks a name."""
    return cast(Workload, _module(experiment.workload))


@functools.cache
def _module(workload: str) -> ModuleType:
    try:
        module = importlib.import_module(f"rungs.workloads.{workload}")
    except (Exception, SystemExit) as error:
        raise RungsError(f"{_file(workload)} cannot be imported ({_said(error)}): correct it.") from None
    if lacking := [name for name in NAMES if not hasattr(module, name)]:
        raise RungsError(f"{_file(workload)} has no {', '.join(lacking)}: add it, as docs/workload.md has it.")
    return module


def _file(workload: str) -> str:
    return f"workflow/rungs/workloads/{workload}.py"


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {shown(str(error))}".split())


# ---- a look at a module before anything depends on it ----------------------------------------------------------------


class _Odd(Exception):
    """What a module says and may not."""


FEW_SMS = 2


def rehearse(experiment: Experiment, device: Device) -> None:
    """Call every function of the module once, on the floor's variant at its first small point, and look at what it gives.

    Raises RungsError that names the function where it cannot work on the experiment or gives what nothing can use.
    """
    module, at = of(experiment), [""]
    try:
        _rehearse(module, experiment, device, at)
    except Refused:  # the chip lacks it, say: the variant has its own row for that
        return
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, _Odd) else _said(error)
        raise RungsError(
            f"config/experiments/{experiment.name}.yaml: workload {experiment.workload} cannot work on it ({at[0]}: {said}): give"
            f" it the factors, macros and axes that {_file(experiment.workload)} reads, or correct that module."
        ) from None


def _rehearse(module: Workload, experiment: Experiment, device: Device, at: list[str]) -> None:
    """`at` gets the name of what is looked at."""

    def need(true: bool, otherwise: str) -> None:
        if not true:
            raise _Odd(otherwise)

    at[0] = "MEASURES"
    need(module.MEASURES in ("time", "cycles"), f"it is {module.MEASURES!r}, neither time nor cycles")
    at[0] = "CONTROL"
    need(isinstance(module.CONTROL, str), "it is no text")
    at[0] = "FIGURES"
    need(isinstance(module.FIGURES, tuple), "it is no tuple of names")
    variant = experiment.floor_variant
    at[0] = "emulated_points"
    points = list(module.emulated_points(experiment, variant, device))
    axes = experiment.axis_names
    need(
        bool(points) and all(len(point) == len(axes) for point in points),
        f"it gives {points}, not points of {', '.join(axes)}",
    )
    of_it = (experiment, variant, device, points[0])
    at[0] = "check"
    module.check(*of_it)
    for rung in next(iter(experiment.ladders.values())).rungs.values():
        with contextlib.suppress(Refused):
            module.check(experiment, rung, device, experiment.base_point)
    at[0] = "operands"
    operands = module.operands(*of_it, FEW_SMS)
    roles = {operand.role for operand in operands.values()}
    need(roles <= set(ROLES), f"a role is none of {', '.join(ROLES)}")
    dtypes = [np.dtype(operand.dtype) for operand in operands.values()]
    need(all(dtype.kind in "fiu" for dtype in dtypes), "a dtype is neither of floats nor of whole numbers")
    if module.MEASURES == "cycles":
        need("cycles" in roles, "none has the role cycles, in which the kernel says what it measured")
    else:
        need("input" in roles, "none has the role input, of which the control copies the largest")
    inputs = {
        name: wide(host_values(operand, "integer", np.random.default_rng(1)))
        for name, operand in operands.items()
        if operand.role == "input"
    }
    need(footprint(operands) > 0, "they have no bytes")
    at[0] = "plan"
    plan = module.plan(*of_it, dict.fromkeys(operands, 1 << 20), FEW_SMS)
    sizes = (*plan.grid, *plan.block, *plan.cluster)
    need(
        len(sizes) == 9 and all(type(size) is int and size > 0 for size in sizes),
        f"grid {plan.grid}, block {plan.block}, cluster {plan.cluster} are no launch",
    )
    need(type(plan.smem_bytes) is int and plan.smem_bytes >= 0, f"smem_bytes {plan.smem_bytes} is no number of bytes")
    pairs = [param for param in plan.params if not isinstance(param, TensorMap | InGlobal)]
    need(
        all(isinstance(pair, tuple) and [type(part) for part in pair] == [int, int] for pair in pairs),
        "each of params is a pair (value, bytes) of whole numbers, or a tensor map",
    )
    at[0] = "ctas_per_sm"
    pinned = module.ctas_per_sm(*of_it)
    need(pinned is None or (isinstance(pinned, int) and pinned > 0), f"{pinned!r} is neither None nor a number of CTAs")
    at[0] = "work"
    work = module.work(*of_it, FEW_SMS)
    need(isinstance(work, Work), "it gives no Work")
    need(module.MEASURES == "time" or work.units > 0, "units is not given, over which cycles are divided")
    at[0] = "expected"
    right = module.expected(*of_it, FEW_SMS, inputs)
    outputs = {name: operand for name, operand in operands.items() if operand.role == "output"}
    need(
        set(right) == set(outputs), f"it gives {', '.join(right) or 'nothing'} and the outputs are {', '.join(outputs)}"
    )
    for name, operand in outputs.items():
        found = np.asarray(right[name])
        need(found.size == math.prod(operand.shape), f"{name} has {found.shape} and the operand {operand.shape}")
