"""wgmma: products of a warpgroup, which read shared memory through descriptors and end some time after their issue.

A descriptor (PTX ISA, "Matrix descriptor format") names where a tile starts, two strides and a swizzle. What those mean are the
canonical layouts of CUTLASS (cute/atom/mma_traits_sm90_gmma.hpp), in chunks of 16 bytes; the swizzle is that of the copy
engine, of the whole address, so that a start may be moved along K inside a swizzled row.

The accumulators of a warpgroup stay one matrix from product to product, and become registers again when another instruction
names one. Until a wait_group retires the product nothing else may: that, and the fence that has to lie between other accesses
and a product, is watched for every instruction with a register that some product has too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rungs.emulator.bulk import CHUNK
from rungs.emulator.memory import SHARED_BASE
from rungs.emulator.mma import unpack_a, values_of
from rungs.emulator.parser import Address, Group, Immediate, Instruction, Kernel, Operand, Register
from rungs.emulator.state import LANES, Array, Batch, Decoder, Finding, Mask, Step, Unit, items
from rungs.emulator.sync import GATHERING, lacks_lanes

WARPS = 4
"""Of a warpgroup, the first of which has a number that is a multiple of it."""
ROWS, DEPTH = 64, 16
PITCHES = np.array([16, 128, 64, 32])
"""Bytes of a swizzled row, by the mode in a descriptor's two top bits: none, 128B, 64B, 32B."""
XORED = np.array([0, 7, 3, 1])
"""Chunk bits that the mode changes."""
RESERVED = sum(((1 << count) - 1) << first for first, count in ((14, 2), (30, 2), (46, 3), (52, 10)))
KEPT = 256  # places of operands: four steps of A and B in each stage, for several warpgroups


# ---- descriptors -----------------------------------------------------------------------------------------------------


def addresses(descriptors: Array, size: int, transposed: bool, ins: Instruction) -> Array:
    """Where the chunks of an operand of `size` rows (A) or columns (B) and 16 values along K lie, for descriptors (n,).

    (n, size, 2) of K-major operands and (n, 16, size / 8) of `transposed` ones. Raises EmulationError for what is no descriptor.
    """
    fields = [((descriptors >> first & 0x3FFF) * CHUNK)[:, None, None] for first in (0, 16, 32)]
    start, leading, stride = fields
    mode, base = descriptors >> 62 & 3, descriptors >> 49 & 7
    if (descriptors & RESERVED).any():
        raise ins.error(
            f"has the descriptor {int(descriptors[0]) & (1 << 64) - 1:#x}, where zeros were expected in bits 14, 15, 30, 31,"
            " 46 to 48 and 52 to 61: mask the address with 0x3ffff before it is shifted"
        )
    pitch, bits = (table[mode][:, None, None] for table in (PITCHES, XORED))
    if base.any() or (start >> 7 & bits).any():
        odd = int(np.argmax((base != 0) | (start >> 7 & bits).any(axis=(1, 2))))
        raise ins.error(
            f"has a descriptor of byte {int(start[odd, 0, 0]) - SHARED_BASE} of shared memory with base offset {int(base[odd])},"
            f" where base offset 0 and an address at most a row's {int(pitch[odd, 0, 0])} bytes past a multiple of"
            f" {int(bits[odd, 0, 0] + 1) * 128} were expected: align the tile to its swizzle"
        )
    swizzled = bits > 0
    if transposed:
        k, chunk = np.arange(DEPTH)[:, None], np.arange(size // 8)
        width = pitch // CHUNK
        rows = np.where(swizzled, k % 8 * pitch + k // 8 * stride, k % 8 * CHUNK + k // 8 * leading)
        columns = np.where(swizzled, chunk % width * CHUNK + chunk // width * leading, chunk * stride)
    else:
        row, chunk = np.arange(size)[:, None], np.arange(2)
        rows = row % 8 * pitch + row // 8 * stride
        columns = np.where(swizzled, chunk * CHUNK, chunk * leading)
    found = start + rows + columns
    return found ^ (found >> 7 & bits) << 4


# ---- products --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Form:
    """What a wgmma.mma_async says. `d` and `a` are register slots; without `a` that operand has a descriptor too."""

    ins: Instruction
    pc: int
    n: int
    type: str
    d: tuple[int, ...]
    a: tuple[int, ...]
    transposed: tuple[bool, bool]
    sign: int
    held: list[np.dtype]


@dataclass(eq=False)
class Product:
    """A product under way. `which` (CTAs, warpgroups) are those that it has not been retired for, in their commit `group`.

    `a` is where A lies (CTAs, warpgroups, chunks of 16 bytes...), or its values; `b` where B lies; `keeps` where it adds to D.
    """

    form: Form
    which: Array
    group: Array
    a: Array
    b: Array
    keeps: Array
    landed: bool = False


@dataclass(eq=False)
class Accumulator:
    """The matrices (CTAs, warpgroups, 64, N) of an accumulator, where `fresh` (CTAs, warpgroups) in place of its registers."""

    matrix: Array
    fresh: Array
    held: list[np.dtype]


@dataclass(eq=False)
class Warpgroups:
    """What the warpgroups of a batch have under way. Arrays are (CTAs, warpgroups), after the register tuples where those come first.

    `touched` is the position after the instruction that last accessed registers of a tuple, since the last fence; `busy` the
    commit group, plus one, of the product that uses it and `user` that product's position.
    """

    batch: Batch
    tuples: dict[tuple[int, ...], int]
    reaches: list[bool]
    committed: Array = field(init=False)
    fenced: Array = field(init=False)
    pending: list[Product] = field(default_factory=list)
    held: dict[tuple[int, ...], Accumulator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.batch.ctas, -(-self.batch.warps // WARPS))
        self.committed, self.fenced = np.zeros(shape, np.int64), np.zeros(shape, bool)
        self.touched, self.busy, self.user = (np.zeros((len(self.tuples), *shape), np.int64) for _ in range(3))
        self.shared = {
            slots: [other for other in self.tuples if other != slots and set(other) & set(slots)]
            for slots in self.tuples
        }

    # ---- accesses of other instructions ----

    def access(self, unit: Unit, mask: Mask, rows: list[int], keys: list[tuple[int, ...]], pc: int) -> None:
        """An instruction at `pc` is about to access registers of tuples. Raises EmulationError where a product still uses them."""
        span = slice(unit.first // WARPS, -(-(unit.first + unit.warps) // WARPS))
        here: Any = True
        if mask is not None:
            of = (unit.first + np.arange(unit.warps)) // WARPS
            here = mask.any(axis=2) @ (of[:, None] == np.arange(span.start, span.stop))
        code = self.batch.kernel.code
        for row in rows:
            under_way = (self.busy[row, :, span] > 0) & here
            if under_way.any():
                other = code[int(self.user[row, :, span][under_way][0])]
                raise code[pc].error(
                    f"accesses a register that {other.where} uses until it is retired, where a wgmma.commit_group and a"
                    " wgmma.wait_group that waits for it were expected before"
                )
            self.touched[row, :, span] = np.where(here, pc + 1, self.touched[row, :, span])
        for key in keys:
            self.settle(unit, key)

    def settle(self, unit: Unit, key: tuple[int, ...]) -> None:
        """Give the unit's registers of an accumulator their values."""
        known = self.held.get(key)
        if known is None or not known.fresh.any():
            return
        first, stop, low = _groups_of(unit)
        fresh = known.fresh[:, first:stop]
        if not fresh.any():
            return
        n = known.matrix.shape[-1]
        ctas, groups = fresh.shape
        parts = known.matrix[:, first:stop].reshape(ctas, groups, WARPS, 2, 8, n // 8, 4, 2)
        parts = parts.transpose(5, 3, 7, 0, 1, 2, 4, 6).reshape(n // 2, ctas, groups * WARPS, LANES)
        mask: Mask = None
        if not fresh.all() or groups * WARPS != unit.warps:
            mask, spread = np.zeros(unit.shape, bool), np.zeros((n // 2, *unit.shape), np.float32)
            mask[:, low : low + groups * WARPS] = np.repeat(fresh, WARPS, axis=1)[..., None]
            spread[:, :, low : low + groups * WARPS] = parts
            parts = spread
        for slot, value, dtype in zip(key, parts, known.held, strict=True):
            unit.write(slot, value.view(dtype), mask)
        known.fresh[:, first:stop] = False

    def settle_all(self, unit: Unit) -> None:
        for key in self.held:
            self.settle(unit, key)

    # ---- products ----

    def issue(self, unit: Unit, product: Product) -> None:
        """Take up a product. Raises EmulationError for registers that lack a fence or are in other use."""
        form, which = product.form, product.which
        code = self.batch.kernel.code
        if not self.fenced[which].all():
            raise form.ins.error("is the first of its warpgroup, where a wgmma.fence was expected before")
        for slots in (form.d, form.a) if form.a else (form.d,):
            row = self.tuples[slots]
            touched = self.touched[row][which]
            if touched.any():
                other = code[int(touched.max()) - 1]
                raise form.ins.error(
                    f"uses registers that {other.where} accesses, where a wgmma.fence was expected between them"
                )
            for shared in (*self.shared[slots], slots):
                at = self.tuples[shared]
                users = self.user[at][which][self.busy[at][which] > 0]
                for user in np.unique(users):
                    if shared is slots and (slots is form.a or code[int(user)].modifiers == form.ins.modifiers):
                        continue  # further products of the same shape follow each other, and any may read the same A
                    raise form.ins.error(
                        f"uses registers that {code[int(user)].where} still uses in another shape or place, where a"
                        " wgmma.wait_group was expected between them"
                    )
        for slots in (form.d, form.a) if form.a else (form.d,):
            row = self.tuples[slots]
            self.busy[row][which] = product.group[which] + 1
            self.user[row][which] = form.pc
            for shared in self.shared[slots]:
                self.settle(unit, shared)
        self._take(unit, product)
        self.pending.append(product)
        if not self.batch.late:
            self._multiply(product, which)
            product.landed = True

    def _take(self, unit: Unit, product: Product) -> None:
        """Make matrices of the accumulator's registers, for the warpgroups that have none and keep what they hold."""
        form, (first, stop, low) = product.form, _groups_of(unit)
        known = self.held.get(form.d)
        if known is None:
            matrix = np.zeros((*self.committed.shape, ROWS, form.n), np.float32)
            known = self.held[form.d] = Accumulator(matrix, np.zeros(self.committed.shape, bool), form.held)
        needed = product.which & product.keeps & ~known.fresh
        known.fresh |= product.which
        if not needed.any():
            return
        warps = slice(low, low + (stop - first) * WARPS)
        values = np.empty((form.n // 2, self.batch.ctas, (stop - first) * WARPS, LANES), np.float32)
        for i, slot in enumerate(form.d):
            value = unit.registers[slot].view(np.float32)
            values[i] = value if value.shape[1] == 1 else value[:, warps]
        parts = values.reshape(form.n // 8, 2, 2, self.batch.ctas, stop - first, WARPS, 8, 4)
        parts = parts.transpose(3, 4, 5, 1, 6, 0, 7, 2).reshape(self.batch.ctas, stop - first, ROWS, form.n)
        np.copyto(known.matrix[:, first:stop], parts, where=needed[:, first:stop, None, None])

    def retire(self, which: Array, newest: int) -> Array:
        """All but the `newest` commit groups of warpgroups are done; returns how many are, (CTAs, warpgroups)."""
        landed = self.committed - newest
        for product in self.pending:
            part = product.which & which & (product.group < landed)
            if part.any():
                if not product.landed:
                    self._multiply(product, part)
                product.which = product.which & ~part
        self.pending = [product for product in self.pending if product.which.any()]
        self.busy[which & (self.busy <= landed)] = 0
        return landed

    def _multiply(self, product: Product, part: Array) -> None:
        """D = A * B (+ D) of the warpgroups in `part`. Those of a CTA that have the same B share it."""
        form, flat = product.form, self.batch.shared.flat(CHUNK)
        ctas, groups = np.nonzero(part)
        b_at = product.b[ctas, groups]
        together = len(ctas) // len(np.unique(ctas))
        first = np.arange(0, len(ctas), together)
        if len(ctas) % together or any(
            (ctas[first] != ctas[first + i]).any() or (b_at[first] != b_at[first + i]).any() for i in range(1, together)
        ):
            together, first = 1, np.arange(len(ctas))
        a = product.a[ctas, groups]
        if not form.a:
            a = self._values(np.take(flat, a, axis=0), form.type)
            a = a.swapaxes(-1, -2) if form.transposed[0] else a
        b = self._values(np.take(flat, b_at[first], axis=0), form.type)
        b = b if form.transposed[1] else b.swapaxes(-1, -2)
        # 64 rows at a time: a larger product would wake BLAS's threads, for whom it is too small.
        result = np.matmul(a.reshape(len(first), together, ROWS, DEPTH), b[:, None]).reshape(-1, ROWS, form.n)
        if form.sign < 0:
            np.negative(result, out=result)
        known, keeps = self.held[form.d], product.keeps[ctas, groups]
        known.fresh |= part
        if not keeps.all():
            known.matrix[ctas[~keeps], groups[~keeps]] = 0
        low, high = int(groups.min()), int(groups.max()) + 1
        if len(ctas) == self.batch.ctas * (high - low):
            known.matrix[:, low:high] += result.reshape(self.batch.ctas, high - low, ROWS, form.n)
        else:
            known.matrix[ctas, groups] += result

    def _values(self, chunks: Array, type: str) -> Array:
        """float32 of chunks (n, ..., chunks along the contiguous axis, 4 words)."""
        return values_of(chunks.reshape(*chunks.shape[:-2], -1), type)

    def leftovers(self) -> Iterator[Finding]:
        """Products that nobody has waited for when the kernel ends."""
        for product in self.pending[:1]:
            ins = product.form.ins
            yield Finding(
                "left behind",
                f"{ins.where} is still under way when the kernel ends, where a wgmma.wait_group was expected.",
                (ins.line,),
                (ins.source,),
            )


def _groups_of(unit: Unit) -> tuple[int, int, int]:
    """The whole warpgroups of a unit, first and after the last, and the unit's warp that the first of them starts with."""
    first = -(-unit.first // WARPS)
    return first, max(first, (unit.first + unit.warps) // WARPS), first * WARPS - unit.first


# ---- decoding --------------------------------------------------------------------------------------------------------


def prepare(decoder: Decoder) -> None:
    """Note the tuples of registers that the products of a kernel use, before its instructions are decoded."""
    for ins in decoder.kernel.code:
        if ins.opcode == "wgmma" and ins.modifiers[0] == "mma_async":
            for operand in ins.operands[:2]:
                if isinstance(operand, Group):
                    slots = tuple(decoder.source(item, "b32", ins) for item in operand.items)
                    decoder.tuples.setdefault(slots, len(decoder.tuples))


def start(batch: Batch, decoder: Decoder) -> Warpgroups | None:
    """The state of a batch's warpgroups, of a kernel that has any wgmma."""
    if not any(ins.opcode == "wgmma" for ins in decoder.kernel.code):
        return None
    return Warpgroups(batch, decoder.tuples, _reaches(decoder.kernel))


def _reaches(kernel: Kernel) -> list[bool]:
    """For each position whether a wgmma can follow: only then have the warps of a warpgroup to stay together."""
    code = kernel.code
    found = [ins.opcode == "wgmma" for ins in code] + [False]
    changed = True
    while changed:
        changed = False
        for pc in range(len(code) - 1, -1, -1):
            ins = code[pc]
            if found[pc]:
                continue
            follows = found[pc + 1] and (ins.opcode not in ("bra", "ret", "exit") or ins.guard is not None)
            if ins.opcode == "bra":
                follows = follows or found[kernel.labels.get(getattr(ins.operands[0], "name", ""), len(code))]
            changed = changed or follows
            found[pc] = follows
    return found


def watched(decoder: Decoder, ins: Instruction, step: Step) -> Step:
    """The step of an instruction that is no wgmma, which accesses none of the registers that a product still uses."""
    slots = {decoder.slots.get(name) for operand in ins.operands for name in _names(operand)}
    keys = [key for key in decoder.tuples if slots & set(key)]
    if ins.opcode == "wgmma" or not keys:
        return step
    rows, pc = [decoder.tuples[key] for key in keys], len(decoder.steps)

    def run(unit: Unit, mask: Mask) -> Any:
        unit.batch.wgmma.access(unit, mask, rows, keys, pc)  # type: ignore[union-attr]
        return step(unit, mask)

    return run


def _names(operand: Operand) -> Iterator[str]:
    """Registers in an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Group):
        for item in operand.items:
            yield from _names(item)
    elif isinstance(operand, Address):
        yield from _names(operand.base)


def _warpgroups(unit: Unit, mask: Mask, ins: Instruction) -> Any:
    """The warpgroups that execute an instruction, (CTAs, warpgroups), or what holds warps until the others have come.

    Raises EmulationError where some never will.
    """
    state = unit.batch.wgmma
    assert state is not None
    if lacks_lanes(unit, mask, WARPS):
        return GATHERING
    count = state.committed.shape[1]
    here = np.zeros((unit.batch.ctas, count * WARPS, LANES), bool)
    here[:, unit.first : unit.first + unit.warps] = True if mask is None else mask
    of = here.reshape(unit.batch.ctas, count, WARPS * LANES)
    which = np.asarray(of.any(axis=2))
    if not np.array_equal(which, of.all(axis=2)):
        raise ins.error("is executed by a part of a warpgroup, where all 32 lanes of its four warps were expected")
    return which


def _of_warpgroups(unit: Unit, value: Array, which: Array, ins: Instruction, what: str) -> Array:
    """A register's value in each warpgroup, (CTAs, warpgroups). Raises EmulationError where its threads differ."""
    found = np.zeros(which.shape, value.dtype)
    if value.size == 1:
        found[...] = value.item()
        return found
    first, stop, low = _groups_of(unit)
    every = np.broadcast_to(value, unit.shape)[:, low : low + (stop - first) * WARPS]
    every = every.reshape(unit.batch.ctas, stop - first, WARPS * LANES)
    found[:, first:stop] = every[..., 0]
    if (every != every[..., :1])[which[:, first:stop]].any():
        raise ins.error(f"has {what} that differs between the threads of a warpgroup, where one value was expected")
    return found


def _compile(decoder: Decoder, ins: Instruction) -> Step:
    form = {"fence": _fence, "commit_group": _commit, "wait_group": _wait, "mma_async": _multiply}
    if ins.modifiers[0] not in form or ins.modifiers[1:3] != ("sync", "aligned"):
        raise ins.error("is a form of wgmma that the emulator lacks")
    return form[ins.modifiers[0]](decoder, ins)


def _together(ins: Instruction, act: Callable[[Unit, Warpgroups, Array], None]) -> Step:
    """A step of whole warpgroups."""

    def step(unit: Unit, mask: Mask) -> Any:
        which = _warpgroups(unit, mask, ins)
        if which is GATHERING:
            return which
        assert unit.batch.wgmma is not None
        act(unit, unit.batch.wgmma, which)
        return None

    return step


def _fence(decoder: Decoder, ins: Instruction) -> Step:
    def act(unit: Unit, state: Warpgroups, which: Array) -> None:
        state.fenced |= which
        state.touched[:, which] = 0

    return _together(ins, act)


def _commit(decoder: Decoder, ins: Instruction) -> Step:
    def act(unit: Unit, state: Warpgroups, which: Array) -> None:
        state.committed = state.committed + which

    return _together(ins, act)


def _wait(decoder: Decoder, ins: Instruction) -> Step:
    newest = ins.operands[0].value if isinstance(ins.operands[0], Immediate) else -1
    if newest < 0:
        raise ins.error("waits for all but a number of groups that is no number")

    def act(unit: Unit, state: Warpgroups, which: Array) -> None:
        landed = state.retire(which, newest)
        if unit.batch.race:
            ctas, groups = np.nonzero(which)
            unit.batch.race.retired(ctas, groups, landed[which])

    return _together(ins, act)


def _form(decoder: Decoder, ins: Instruction) -> tuple[Form, list[Operand]]:
    """What the instruction says, and its descriptors and scale-d."""
    shape = ins.modifiers[3]
    n, type = int(shape[len("m64n") : shape.index("k")]), ins.modifiers[5]
    d, a, b, keeps, *numbers = ins.operands
    registers = isinstance(a, Group)
    given = [item.value for item in numbers if isinstance(item, Immediate)]
    if (
        shape != f"m64n{n}k16"
        or n % 8
        or not 8 <= n <= 256
        or ins.modifiers[4:] != ("f32", type, type)
        or type not in ("bf16", "f16")
        or len(items(d)) != n // 2
        or (registers and len(items(a)) != 4)
        or len(given) != len(numbers)
        or len(given) != (3 if registers else 4)
        or not all(abs(scale) == 1 for scale in given[:2])
        or not all(major in (0, 1) for major in given[2:])
    ):
        raise ins.error("is a form of wgmma that the emulator lacks")
    slots = [tuple(decoder.source(item, "b32", ins) for item in items(operand)) for operand in (d, a)]
    held = [np.dtype("f4") if getattr(item, "type", "") == "f32" else np.dtype("u4") for item in items(d)]
    form = Form(
        ins,
        len(decoder.steps),
        n,
        type,
        slots[0],
        slots[1] if registers else (),
        (bool(given[2]) and not registers, bool(given[-1])),
        given[0] * given[1],
        held,
    )
    return form, [a, b, keeps]


def _multiply(decoder: Decoder, ins: Instruction) -> Step:
    """d, a or its descriptor, b's descriptor, scale-d, imm-scale-a, imm-scale-b{, imm-trans-a}, imm-trans-b."""
    form, (a, b, keeps) = _form(decoder, ins)
    a_slot = None if form.a else decoder.source(a, "u64", ins)
    b_slot, keeps_slot = decoder.source(b, "u64", ins), decoder.source(keeps, "pred", ins)
    negated = isinstance(keeps, Register) and keeps.negated
    memo: dict[Any, Array] = {}

    def places(unit: Unit, slot: int, which: Array, size: int, transposed: bool) -> Array:
        """Chunks of all CTAs' shared memory, (CTAs, warpgroups, ...); those of warpgroups that take no part are of no meaning."""
        found = _of_warpgroups(unit, unit.registers[slot], which, ins, "a descriptor").view(np.int64)
        key = (found.tobytes(), which.tobytes(), size, transposed)
        held = memo.get(key)
        if held is None:
            shared = unit.batch.shared
            at = addresses(found[which], size, transposed, ins)
            shared.check(at, CHUNK, ins)
            if len(memo) >= KEPT:
                memo.clear()
            held = memo[key] = np.zeros((*which.shape, *at.shape[1:]), np.int64)
            held[which] = (at + np.nonzero(which)[0][:, None, None] * shared.window) // CHUNK
        return held

    def act(unit: Unit, state: Warpgroups, which: Array) -> None:
        batch = unit.batch
        b_at = places(unit, b_slot, which, form.n, form.transposed[1])
        rows = [b_at[which]]
        if a_slot is not None:
            a_at = places(unit, a_slot, which, ROWS, form.transposed[0])
            rows.append(a_at[which])
        else:
            first, stop, low = _groups_of(unit)
            a_at = np.zeros((*which.shape, ROWS, DEPTH), np.float32)
            found = unpack_a(unit, [unit.registers[slot] for slot in form.a], form.type)
            a_at[:, first:stop] = found[:, low : low + (stop - first) * WARPS].reshape(batch.ctas, -1, ROWS, DEPTH)
        adds = np.asarray(_of_warpgroups(unit, unit.registers[keeps_slot], which, ins, "a scale-d") != negated)
        group = state.committed.copy()
        if batch.race:
            chunks = np.concatenate([each.reshape(len(each), -1) for each in rows], axis=1)
            ctas, groups = np.nonzero(which)
            batch.race.multiplied(ctas, groups, chunks, form.pc, group[which])
        state.issue(unit, Product(form, which, group, a_at, b_at, adds))

    return _together(ins, act)


COMPILE: dict[str, Callable[[Decoder, Instruction], Step]] = {"wgmma": _compile}
