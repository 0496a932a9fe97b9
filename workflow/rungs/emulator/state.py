"""What an executing batch of CTAs consists of, and how instructions are turned into steps over it.

A register is an immutable numpy array that broadcasts to (CTAs, warps, 32): what is the same for all CTAs, warps or lanes
is held once. Nothing writes into a register, so the identity of the array is its version, and whatever depends only on
registers (arithmetic, fragments, bank conflicts) is remembered under it. Whole numbers of shape (1, 1, 1) are interned, so that
a stage counter that comes round brings all the addresses that depend on it back with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rungs.emulator.memory import GlobalMemory, SharedMemory
from rungs.emulator.metrics import Tally
from rungs.emulator.parser import Address, Group, Immediate, Instruction, Kernel, Operand, Register, Symbol

if TYPE_CHECKING:
    from rungs.emulator.race import Detector
    from rungs.emulator.sync import Barrier, ClusterBarrier, Mbarrier
    from rungs.emulator.wgmma import Warpgroups
    from rungs.plan import TensorMap

Array = np.ndarray
LANES = 32
Mask = Array | None
"""Threads of a unit, (CTAs, warps, 32) bool; None is all of them."""
Step = Callable[["Unit", Mask], Any]
"""What an instruction does. Returns None to go on, a position to jump to, (position, mask) for the part that jumps, or a barrier
that holds the threads here."""
EXIT = 1 << 30
"""The position of threads that have ended."""
DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(bool),
    **{f"{t}{b}": np.dtype(f"{'i' if t == 's' else 'u'}{b // 8}") for t in "bus" for b in (8, 16, 32, 64)},
    **{"f16": np.dtype("u2"), "bf16": np.dtype("u2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    **{"f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "tf32": np.dtype("u4")},
}
REMEMBERED = 12
"""Results that an instruction keeps: more than the stages of a pipeline, and few enough to stay in the cache."""
ZERO = np.zeros((1, 1, 1), np.int64)


@dataclass(frozen=True)
class Finding:
    """Something wrong that did not stop the kernel. `ptx_lines` and `sources` name the instructions that it is between."""

    kind: str
    sentence: str
    ptx_lines: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(eq=False)
class ThreadGroup:
    """Threads of a unit that stand at the same instruction. `waits` names the barrier they are held by."""

    pc: int
    mask: Mask
    waits: Any = None


@dataclass(eq=False)
class Poll:
    """What holds threads that read a place in global memory again although nothing has been written since `version`.

    `final` says that they were let go on once for nothing.
    """

    version: int
    final: bool

    def state(self, cta: int) -> str:
        return "a value in global memory that nobody writes"


@dataclass(eq=False)
class Unit:
    """Warps that run in lockstep while they agree: a CTA, the warps that left it for a loop of their own, or one warp."""

    batch: Batch
    first: int
    warps: int
    registers: list[Array]
    groups: list[ThreadGroup]
    committed: Array = field(default_factory=lambda: ZERO)
    pending: list[Any] = field(default_factory=list)
    bulk_committed: Array = field(default_factory=lambda: ZERO)
    bulk_pending: list[Any] = field(default_factory=list)
    fragments: dict[Any, Any] = field(default_factory=dict)
    accumulators: dict[Any, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.batch.ctas, self.warps, LANES)

    def everyone(self, mask: Mask) -> Array:
        return np.ones(self.shape, bool) if mask is None else mask

    def write(self, slot: int, value: Array, mask: Mask) -> None:
        registers = self.registers
        registers[slot] = value if mask is None else np.where(mask, value, registers[slot])

    def release(self, group: ThreadGroup, done: Array) -> Mask:
        """Let the held threads of the CTAs in `done` (CTAs, 1, 1) go on after their barrier; returns which those are."""
        if group.mask is None and done.all():
            part, rest = None, None
        else:
            part, rest = self.everyone(group.mask) & done, self.everyone(group.mask) & ~done
        if rest is not None and rest.any():
            self.groups.append(ThreadGroup(group.pc, rest, group.waits))
        group.mask, group.waits, group.pc = part, None, group.pc + 1
        if part is not None and not part.any():
            self.groups.remove(group)
        return part

    def active_warps(self, mask: Mask) -> Array | int:
        """How many warps of each CTA take part."""
        return self.warps if mask is None else mask.any(axis=2).sum(axis=1)


@dataclass(eq=False)
class Batch:
    """CTAs that execute together, with their memory and what synchronises them. `ids` are their (x, y, z) in the grid.

    They are whole clusters of `cluster` CTAs, one after the other. `apart`: of CTAs that wait for each other in global memory each goes
    as far as it can after it has said something there, before the next does.
    """

    kernel: Kernel
    ids: Array
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared: SharedMemory
    memory: GlobalMemory
    maps: dict[int, TensorMap]
    late: bool
    race: Detector | None
    tally: Tally
    units: list[Unit] = field(default_factory=list)
    full: dict[int, list[int]] = field(default_factory=dict)
    partial: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    barriers: dict[int, Barrier] = field(default_factory=dict)
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    in_flight: list[Any] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    cluster: int = 1
    cluster_barrier: ClusterBarrier | None = None
    ticks: int = 0
    wgmma: Warpgroups | None = None
    polls: dict[Any, tuple[int, int]] = field(default_factory=dict)
    apart: bool = False

    @property
    def ctas(self) -> int:
        return len(self.ids)

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.block[0] * self.block[1] * self.block[2] // LANES

    @property
    def ranks(self) -> Array:
        """Of each CTA in its cluster."""
        return np.arange(self.ctas) % self.cluster

    def peers(self, rank: int) -> Array:
        """For each CTA the one of that rank in its cluster."""
        return np.arange(self.ctas) - self.ranks + rank

    def check_alive(self, ctas: Array, ins: Instruction) -> None:
        """Raises EmulationError where one of these CTAs has ended, and its shared memory with it."""
        if (self.alive_warps()[ctas] == 0).any():
            raise ins.error(
                "reaches into the shared memory of a CTA that has ended, where a barrier.cluster was expected before the end"
            )

    def wake(self, *, force: bool = False) -> bool:
        """Let threads go on that wait for global memory to change, once it has; by `force` once all the same. Whether any do."""
        freed = False
        for unit in self.units:
            for group in unit.groups:
                held = group.waits
                if isinstance(held, Poll) and (held.version != self.memory.version or (force and not held.final)):
                    group.waits, freed = None, True
        return freed

    def alive_warps(self) -> Array:
        """Warps of each CTA that have not ended."""
        total = np.zeros(self.ctas, np.int64)
        for unit in self.units:
            masks = [group.mask for group in unit.groups if group.mask is not None]
            if len(masks) < len(unit.groups):
                total += unit.warps
            elif masks:
                total += np.logical_or.reduce(np.stack(masks)).any(axis=2).sum(axis=1)
        return total


def remember(memo: dict[Any, Any], key: Any, entry: Any) -> Any:
    """Keep `entry` (which holds the arrays whose identities are the key, so that they stay theirs) and return it."""
    if len(memo) >= REMEMBERED:
        memo.clear()
    memo[key] = entry
    return entry


@dataclass
class Decoder:
    """Turns operands into register slots. Immediates, special registers and addresses get slots of their own.

    `tuples` numbers the accumulators and the A operands that the kernel's wgmma have in registers.
    """

    kernel: Kernel
    symbols: dict[str, int]
    params: bytes
    steps: list[Step] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    initial: list[Array | str] = field(default_factory=list)
    constants: dict[tuple[str, bytes], int] = field(default_factory=dict)
    interned: dict[tuple[str, Any], Array] = field(default_factory=dict)
    tuples: dict[tuple[int, ...], int] = field(default_factory=dict)

    def intern(self, value: Array) -> Array:
        """The one array that stands for this value, for whole numbers that all threads share."""
        if value.size != 1 or value.dtype.kind == "f":
            return value
        if len(self.interned) > 1 << 16:
            self.interned.clear()
        return self.interned.setdefault((value.dtype.str, value.item()), value)

    def _slot(self, name: str, initial: Array | str) -> int:
        if name not in self.slots:
            self.slots[name] = len(self.initial)
            self.initial.append(initial)
        return self.slots[name]

    def constant(self, value: int, dtype: np.dtype) -> int:
        held = self.intern(
            np.full((1, 1, 1), value & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)
        )
        return self._slot(f"={dtype.str}{value}", held)

    def source(self, operand: Operand, type: str, ins: Instruction) -> int:
        """The slot to read an operand from. `type` is the instruction's, for immediates."""
        if isinstance(operand, Register):
            return self._slot(operand.name, self.intern(np.zeros((1, 1, 1), DTYPES[operand.type])))
        if isinstance(operand, Immediate):
            dtype = DTYPES[type]
            if operand.bits:  # a float by its bits; 64 of them may stand where 32 are wanted
                held = (
                    np.array(operand.value, f"u{operand.bits // 8}")
                    .view(f"f{operand.bits // 8}")
                    .astype(dtype if dtype.kind == "f" else f"f{operand.bits // 8}")
                )
                return self._slot(f"={dtype.str}f{operand.value:x}.{operand.bits}", held.view(dtype).reshape(1, 1, 1))
            if dtype.kind == "b":
                return self._slot(f"=p{operand.value}", self.intern(np.full((1, 1, 1), bool(operand.value))))
            return self.constant(operand.value, dtype)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            return self.constant(self.symbols[operand.name] + operand.offset, DTYPES[type])
        if isinstance(operand, Symbol) and operand.name.startswith("%"):
            return self._slot(operand.name, operand.name)
        raise ins.error(f"names {operand!r}, where a register, a number or an address was expected")

    def target(self, operand: Operand, ins: Instruction) -> int | None:
        """The slot to write to; None for `_`."""
        if isinstance(operand, Symbol) and operand.name == "_":
            return None
        if not isinstance(operand, Register):
            raise ins.error(f"writes to {operand!r}, where a register was expected")
        return self.source(operand, operand.type, ins)

    def address(self, operand: Operand, ins: Instruction) -> tuple[int, int]:
        """Slot and offset in bytes of `[base + offset]`."""
        if not isinstance(operand, Address):
            raise ins.error(f"names {operand!r}, where an address in brackets was expected")
        return self.source(operand.base, "u64", ins), operand.offset

    def label(self, operand: Operand, ins: Instruction) -> int:
        if not isinstance(operand, Symbol) or operand.name not in self.kernel.labels:
            raise ins.error("jumps to a label that is not there")
        return self.kernel.labels[operand.name]


def items(operand: Operand) -> tuple[Operand, ...]:
    """The members of `{a, b}`, or the operand itself."""
    return operand.items if isinstance(operand, Group) else (operand,)


def uniform(unit: Unit, slot: int, mask: Mask, ins: Instruction) -> int:
    """The value that all active threads have. Raises EmulationError where they differ."""
    value = unit.registers[slot]
    if value.size == 1:
        return int(value.item())
    found = np.broadcast_to(value, unit.shape)[unit.everyone(mask)]
    if (found != found[0]).any():
        raise ins.error("has an operand that differs between threads, where one value was expected")
    return int(found[0])
