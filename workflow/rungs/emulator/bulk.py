"""The copy engine: cp.async.bulk in one dimension and of tensors in one to five, with their groups; and st.async.

A tensor copy moves a box of the tensor. Where it lies in shared memory is the hardware's swizzle of plain row-major
order: the address bits from 7 up are XOR-ed onto the 16-byte chunk bits from 4 up, one, two or three of them for 32, 64
and 128 bytes (PTX ISA, "Swizzling modes"). What lies outside of the tensor is read as zeros and not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rungs.emulator.alu import _view
from rungs.emulator.loads import addresses_of, combination
from rungs.emulator.memory import GLOBAL_BASE, from_mapa, words
from rungs.emulator.parser import Address, Instruction
from rungs.emulator.state import DTYPES, Array, Batch, Decoder, Mask, Step, Unit, items, remember, uniform
from rungs.emulator.sync import Mbarrier, each_mbarrier, each_mbarrier_of_cluster, expect
from rungs.plan import SWIZZLE_SPAN_BYTES, TensorMap

CHUNK = 16
SWIZZLE_BITS = {"none": 0, "32B": 1, "64B": 3, "128B": 7}


@dataclass(eq=False)
class Load:
    """Copies into shared memory of some CTAs, of which `bytes` each complete on `barrier` in `phase`. `rows` count `size` bytes."""

    ins: Instruction
    rows: Array
    values: Array
    ctas: Array
    bytes: int
    barrier: Mbarrier
    phase: Array
    size: int = CHUNK

    def land(self, batch: Batch) -> None:
        late = self.barrier.phase[self.ctas] != self.phase
        if late.any():
            raise self.ins.error(
                f"lands in phase {int(self.barrier.phase[self.ctas][late][0])} of the mbarrier at byte"
                f" {self.barrier.address - 1024} of shared memory, where phase {int(self.phase[late][0])} was expected: it"
                " expected fewer bytes than were copied"
            )
        batch.shared.flat(self.size)[self.rows] = self.values
        arrived = np.bincount(self.ctas, minlength=batch.ctas) * self.bytes
        expect(self.barrier, -arrived, self.ins)
        self.barrier.settle(batch)


@dataclass(eq=False)
class Store:
    """A copy out of shared memory. `group` is the bulk group of the thread of `warp` that issued it."""

    ins: Instruction
    rows: Array
    offsets: Array
    keep: Array
    size: int
    warp: int
    group: int
    combine: Callable[[Array, Array], Array] | None = None
    item: Any = None
    landed: bool = False

    def land(self, batch: Batch) -> None:
        if self.landed:
            return
        self.landed = True
        if not self.keep.any():
            return  # a box that lies wholly outside of the tensor
        found = np.take(batch.shared.flat(CHUNK), self.rows, axis=0)
        items = np.ascontiguousarray(found).view(np.uint8).reshape(*self.rows.shape[:-1], -1, self.size)
        values = items.view(f"u{min(self.size, 4)}")
        if self.combine is None:
            batch.memory.store(self.offsets[self.keep], values[self.keep], self.size, self.ins)
            return
        for offsets, keep, new in zip(self.offsets, self.keep, values, strict=True):  # copies may go to the same place
            old = batch.memory.load(offsets[keep], self.size, self.ins)
            result = self.combine(old.view(self.item), np.ascontiguousarray(new[keep]).view(self.item))
            batch.memory.store(offsets[keep], result.view(old.dtype), self.size, self.ins)


def compile(decoder: Decoder, ins: Instruction) -> Step:
    """The step of an instruction that starts with cp.async.bulk."""
    modifiers = ins.modifiers[3 if ins.modifiers[0] == "reduce" else 2 :]
    if modifiers[0] == "commit_group":
        return _commit
    if modifiers[0] == "wait_group":
        return _wait(decoder, ins)
    if modifiers[0] == "prefetch":
        return lambda unit, mask: None
    if any(m.startswith(("im2col", "gather4", "scatter4")) for m in modifiers):
        raise ins.error("is a bulk copy that the emulator lacks")
    tensor = modifiers[0] == "tensor"
    spaces = [m for m in modifiers if m in ("shared::cta", "shared::cluster", "global")]
    if len(spaces) != 2 or spaces.count("global") != 1 or (ins.modifiers[0] == "reduce" and spaces[0] != "global"):
        raise ins.error("is a bulk copy that the emulator lacks")
    if spaces[0] != "global":
        return _load(decoder, ins, tensor)
    return _store(decoder, ins, tensor)


# ---- where a copy's chunks lie ---------------------------------------------------------------------------------------


@dataclass
class Box:
    """Chunks of 16 bytes of a copy: `shared` offsets from the destination are (rows, chunks), before the swizzle."""

    map: TensorMap
    shared: Array
    bytes: int


def box_of(map: TensorMap) -> Box:
    """Row-major order of the box. A row is as long as the swizzle's span where it is swizzled, and only its own bytes count."""
    inner = map.box[0] * map.element_bytes
    pitch = inner if map.swizzle == "none" else SWIZZLE_SPAN_BYTES[map.swizzle]
    rows = int(np.prod(map.box[1:], dtype=np.int64))
    shared = np.arange(rows)[:, None] * pitch + np.arange(0, inner, CHUNK)
    return Box(map, shared, rows * inner)


def swizzle(addresses: Array, mode: str) -> Array:
    return addresses ^ (((addresses >> 7) & SWIZZLE_BITS[mode]) << 4)


def tensor_offsets(map: TensorMap, starts: Array) -> tuple[Array, Array]:
    """Offsets in the arena of each row of the boxes that start at `starts` (n, dimensions), as (n, rows), and which rows exist."""
    counts = map.box[1:]
    offsets = np.full((len(starts), 1), map.address - GLOBAL_BASE, np.int64)
    inside = np.ones((len(starts), 1), bool)
    for axis in range(len(counts), 0, -1):  # outermost first, so that dimension 1 runs fastest
        at = starts[:, axis : axis + 1] + np.arange(map.box[axis])
        offsets = (offsets[:, :, None] + (at * map.strides[axis - 1])[:, None, :]).reshape(len(starts), -1)
        inside = (inside[:, :, None] & ((at >= 0) & (at < map.dims[axis]))[:, None, :]).reshape(len(starts), -1)
    return offsets, inside


def _elements(map: TensorMap, starts: Array) -> tuple[Array, Array, int]:
    """Offsets of the box's items, (n, rows, items of `size` bytes), which of them exist, and `size`: 16 where all can be."""
    rows, inside = tensor_offsets(map, starts)
    item = map.element_bytes
    x, width = starts[:, 0], map.box[0]
    whole = bool(inside.all()) and bool(((x >= 0) & (x + width <= map.dims[0]) & (x * item % CHUNK == 0)).all())
    size = CHUNK if whole else item
    at = x[:, None] * item + np.arange(0, width * item, size)
    offsets = rows[:, :, None] + at[:, None, :]
    exist = inside[:, :, None] & ((at >= 0) & (at < map.dims[0] * item))[:, None, :]
    return offsets, exist, size


def _gather(batch: Batch, map: TensorMap, starts: Array, ins: Instruction) -> Array:
    """The boxes as chunks, (n, rows, chunks, 4 words)."""
    offsets, exist, size = _elements(map, starts)
    if size == CHUNK:
        return batch.memory.load(offsets, CHUNK, ins)
    values = np.zeros((*offsets.shape, 1), f"u{size}")
    if exist.any():
        values[exist] = batch.memory.load(offsets[exist], size, ins)
    return values.reshape(*offsets.shape[:2], -1).view(np.uint32).reshape(*offsets.shape[:2], -1, 4)


# ---- operands --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Issue:
    """The threads that issue a copy: their CTA and warp, and per thread what `read` finds."""

    unit: Unit
    mask: Array
    ctas: Array
    warps: Array

    def read(self, value: Array) -> Array:
        return np.broadcast_to(value, self.unit.shape)[self.mask]

    def take(self, which: Array) -> Issue:
        """The issue with threads left out or repeated; nothing is read of it any more."""
        return Issue(self.unit, self.mask, self.ctas[which], self.warps[which])


def _targets(issue: Issue, batch: Batch, members: Array, ins: Instruction) -> tuple[Array, Array]:
    """For each copy of a multicast the thread that issues it and the CTA that it goes to. `members`: of each thread that issues
    one, a bit for each rank.
    """
    wrong = (members == 0) | (members >> batch.cluster != 0)
    if wrong.any():
        raise ins.error(
            f"is multicast to CTAs {int(members[wrong][0]):#x} of the cluster, where some of its {batch.cluster} were expected"
        )
    copies, ranks = np.nonzero(members[:, None] >> np.arange(batch.cluster) & 1)
    peers = np.stack([batch.peers(rank) for rank in range(batch.cluster)], axis=1)
    targets = peers[issue.ctas[copies], ranks]
    batch.check_alive(targets, ins)
    return copies, targets


def _issue(unit: Unit, mask: Mask) -> Issue:
    everyone = unit.everyone(mask)
    ctas, warps, _ = np.nonzero(everyone)
    return Issue(unit, everyone, ctas, warps)


class Source:
    """The tensor map and the coordinates of `[map, {x, y}]`, or the address and the size of a copy in one dimension."""

    def __init__(self, decoder: Decoder, operand: Any, ins: Instruction, tensor: bool) -> None:
        self.ins, self.tensor = ins, tensor
        self.slot, self.offset = decoder.address(operand, ins)
        self.coordinates: list[int] = []
        if tensor:
            if not isinstance(operand, Address) or operand.coordinates is None:
                raise ins.error("has no coordinates")
            self.coordinates = [decoder.source(item, "s32", ins) for item in operand.coordinates.items]

    def map(self, unit: Unit, mask: Mask) -> TensorMap:
        address = uniform(unit, self.slot, mask, self.ins) + self.offset
        found = unit.batch.maps.get(address)
        if found is None:
            raise self.ins.error(f"names address {address:#x}, where a tensor map parameter was expected")
        if len(found.dims) != len(self.coordinates):
            raise self.ins.error(f"has {len(self.coordinates)} coordinates, where {len(found.dims)} were expected")
        return found

    def starts(self, issue: Issue) -> Array:
        columns = [issue.read(issue.unit.registers[slot].view(np.int32)) for slot in self.coordinates]
        return np.stack(columns, axis=1).astype(np.int64)


def _check_bulk(size: int, address: Array, ins: Instruction, what: str) -> None:
    if size <= 0 or size % CHUNK:
        raise ins.error(f"copies {size} bytes, where a positive multiple of 16 was expected")
    odd = address % CHUNK != 0
    if odd.any():
        raise ins.error(f"copies {what} {int(address[odd][0]):#x}, where a multiple of 16 was expected")


# ---- instructions ----------------------------------------------------------------------------------------------------


def _load(decoder: Decoder, ins: Instruction, tensor: bool) -> Step:
    """[shared], [source]{, size}, [mbarrier]{, CTAs of the cluster}: to the same place of each of them, and its own mbarrier."""
    target, offset = decoder.address(ins.operands[0], ins)
    source = Source(decoder, ins.operands[1], ins, tensor)
    size_slot = None if tensor else decoder.source(ins.operands[2], "u32", ins)
    barrier_slot, barrier_offset = decoder.address(ins.operands[2 if tensor else 3], ins)
    many = any(m.startswith("multicast") for m in ins.modifiers)
    ctas_slot = decoder.source(ins.operands[3 if tensor else 4], "u16", ins) if many else None
    if many and "shared::cluster" not in ins.modifiers:
        raise ins.error("is multicast to .shared::cta, where .shared::cluster was expected")
    pc = len(decoder.steps)
    memo: dict[Any, Any] = {}

    def step(unit: Unit, mask: Mask) -> None:
        batch = unit.batch
        for barrier, part in each_mbarrier(unit, barrier_slot, barrier_offset, mask, ins):
            issue = _issue(unit, part)
            to = issue.read(addresses_of(unit, unit.registers[target], offset, part))
            if size_slot is None:
                map = source.map(unit, part)
                box = box_of(map)
                values = _gather(batch, map, source.starts(issue), ins)
                mode, align, chunks, bytes = map.swizzle, 128, box.shared, box.bytes
            else:
                bytes = uniform(unit, size_slot, part, ins)
                from_ = issue.read(addresses_of(unit, unit.registers[source.slot], source.offset, part))
                _check_bulk(bytes, from_, ins, "from global address")
                chunks = np.arange(0, bytes, CHUNK)[None]
                values = batch.memory.load(from_[:, None, None] - GLOBAL_BASE + chunks, CHUNK, ins)
                mode, align = "none", CHUNK
            targets = issue.ctas
            if ctas_slot is not None:
                copies, targets = _targets(issue, batch, issue.read(unit.registers[ctas_slot]).astype(np.int64), ins)
                issue, to, values = issue.take(copies), to[copies], values[copies]
                if not barrier.valid[targets].all():
                    raise ins.error("completes on an mbarrier of another CTA, where it was expected to be initialised")
            key = (to.tobytes(), targets.tobytes(), mode, bytes)
            held = memo.get(key)
            if held is None:
                batch.shared.check(to, align, ins)
                places = swizzle(to[:, None, None] + chunks, mode)
                batch.shared.check(places, CHUNK, ins)
                held = remember(memo, key, (places + targets[:, None, None] * batch.shared.window) // CHUNK)
            batch.tally.add(pc, "bytes", np.bincount(targets, minlength=batch.ctas) * bytes)  # where they land
            if batch.race:
                batch.race.bulk_uses(issue, barrier, pc, targets)
                batch.race.bulk_write(issue, held, barrier, pc, targets)
            _send(batch, Load(ins, held, values, targets, bytes, barrier, barrier.phase[targets]))

    return step


def _send(batch: Batch, copy: Load) -> None:
    if batch.late:
        batch.in_flight.append(copy)
    else:
        copy.land(batch)


def store_async(decoder: Decoder, ins: Instruction) -> Step:
    """st.async [address], value, [mbarrier]: a thread's value into the shared memory of a CTA of the cluster, on whose mbarrier it
    completes. It is no matter of the copy engine: the generic proxy writes (PTX ISA, "st.async").
    """
    type = next((m for m in reversed(ins.modifiers) if m in DTYPES), "")
    count = next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4")), 1)
    size = count * DTYPES[type].itemsize if type else 0
    form = {"shared::cluster", "mbarrier::complete_tx::bytes"}
    if not form <= set(ins.modifiers) or size not in (4, 8, 16) or len(ins.operands) != 3:
        raise ins.error("is a store that the emulator lacks")
    slot, offset = decoder.address(ins.operands[0], ins)
    sources = [decoder.source(item, type, ins) for item in items(ins.operands[1])]
    if len(sources) != count:
        raise ins.error(f"has {len(sources)} values, where {count} were expected")
    barrier_slot, barrier_offset = decoder.address(ins.operands[2], ins)
    pc = len(decoder.steps)

    def step(unit: Unit, mask: Mask) -> None:
        batch = unit.batch
        for barrier, part, owners in each_mbarrier_of_cluster(unit, barrier_slot, barrier_offset, mask, ins, True):
            issue = _issue(unit, part)
            found = issue.read(addresses_of(unit, unit.registers[slot], offset, part))
            rank, addresses = from_mapa(found)
            own, targets = batch.ranks[issue.ctas], (np.arange(batch.ctas) if owners is None else owners)[issue.ctas]
            elsewhere = np.where(rank < 0, own, rank) != batch.ranks[targets]
            if elsewhere.any():
                raise ins.error(
                    f"writes to CTA {int(np.where(rank < 0, own, rank)[elsewhere][0])} of the cluster and completes on an mbarrier"
                    f" of CTA {int(batch.ranks[targets][elsewhere][0])}, where one CTA was expected"
                )
            batch.shared.check(addresses, size, ins)
            values = np.stack([issue.read(_view(unit.registers[source], DTYPES[type])) for source in sources], axis=-1)
            rows = (addresses + targets * batch.shared.window) // size
            if batch.race:
                batch.race.bulk_uses(issue, barrier, pc, targets)
                batch.race.bulk_write(issue, rows, barrier, pc, targets, size=size, generic=True)
            phase = barrier.phase[targets]
            _send(batch, Load(ins, rows, values.view(words(size)), targets, size, barrier, phase, size))

    return step


def _store(decoder: Decoder, ins: Instruction, tensor: bool) -> Step:
    """[target], [shared]{, size}; cp.reduce combines with what is there. A tensor map's 2 bytes are bf16, its 4 bytes float32."""
    reduces = ins.modifiers[0] == "reduce"
    type = next((m for m in reversed(ins.modifiers) if m in DTYPES), "")
    if "bulk_group" not in ins.modifiers or (reduces and not tensor and not type):
        raise ins.error("is a bulk store that the emulator lacks")
    target = Source(decoder, ins.operands[0], ins, tensor)
    slot, offset = decoder.address(ins.operands[1], ins)
    size_slot = None if tensor else decoder.source(ins.operands[2], "u32", ins)
    pc = len(decoder.steps)

    def step(unit: Unit, mask: Mask) -> None:
        batch, issue = unit.batch, _issue(unit, mask)
        from_ = issue.read(addresses_of(unit, unit.registers[slot], offset, mask))
        if size_slot is None:
            map = target.map(unit, mask)
            offsets, keep, size = _elements(map, target.starts(issue))
            box = box_of(map)
            mode, align, chunks, bytes = map.swizzle, 128, box.shared, box.bytes
        else:
            bytes = uniform(unit, size_slot, mask, ins)
            to = issue.read(addresses_of(unit, unit.registers[target.slot], target.offset, mask))
            _check_bulk(bytes, to, ins, "to global address")
            chunks = np.arange(0, bytes, CHUNK)[None]
            offsets = to[:, None, None] - GLOBAL_BASE + chunks
            keep, size, mode, align = np.ones(offsets.shape, bool), CHUNK, "none", CHUNK
        batch.shared.check(from_, align, ins)
        places = swizzle(from_[:, None, None] + chunks, mode)
        batch.shared.check(places, CHUNK, ins)
        rows = (places + issue.ctas[:, None, None] * batch.shared.window) // CHUNK
        batch.tally.add(pc, "bytes", np.bincount(issue.ctas, minlength=batch.ctas) * bytes)
        groups = issue.read(unit.bulk_committed)
        if batch.race:
            batch.race.bulk_read(issue, rows, pc, groups)
        combine, item = None, None
        if reduces:
            held = type or {2: "bf16", 4: "f32"}[map.element_bytes]
            combine, item = combination(ins, held), DTYPES[held]
            if combine is None:
                raise ins.error("is a reduction that the emulator lacks")
        for group, warp in sorted(set(zip(groups.tolist(), issue.warps.tolist(), strict=True))):
            of = (groups == group) & (issue.warps == warp)
            copy = Store(ins, rows[of], offsets[of], keep[of], size, unit.first + warp, group, combine, item)
            unit.bulk_pending.append(copy)
            if not batch.late:
                copy.land(batch)

    return step


def _commit(unit: Unit, mask: Mask) -> None:
    held = unit.bulk_committed
    unit.bulk_committed = held + 1 if mask is None else np.where(mask, held + 1, held)


def _wait(decoder: Decoder, ins: Instruction) -> Step:
    """wait_group{.read} N: all but the thread's N newest groups have been read, and without .read have been written too.

    Both land the copy here; what a kernel may do after .read alone is told apart by the race detector, not by time.
    """
    newest = getattr(ins.operands[0], "value", 0)

    def step(unit: Unit, mask: Mask) -> None:
        landed = unit.bulk_committed - newest
        if unit.batch.race:
            unit.batch.race.waited(unit, mask, landed, bulk=True)
        limit = int(np.broadcast_to(landed, unit.shape)[unit.everyone(mask)].max())
        for copy in [copy for copy in unit.bulk_pending if copy.group < limit]:
            copy.land(unit.batch)
            unit.bulk_pending.remove(copy)

    return step
