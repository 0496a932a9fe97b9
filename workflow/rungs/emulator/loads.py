"""Loads and stores of parameters, global and shared memory, ldmatrix, stmatrix and cp.async."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rungs.emulator import metrics
from rungs.emulator.alu import _fit, _view, round_to_bf16, widen_bf16
from rungs.emulator.memory import GLOBAL_BASE, PARAM_WINDOW, SHARED_WINDOW, from_mapa, words
from rungs.emulator.parser import Instruction
from rungs.emulator.race import synchronises
from rungs.emulator.state import DTYPES, LANES, Array, Decoder, Mask, Poll, Step, Unit, items, remember, uniform


@dataclass(eq=False)
class Place:
    """Where an access of a whole unit goes. `addresses` is (CTAs or 1, warps, lanes), `rows` indexes the memory's items.

    `waves` and `ideal` are the wavefronts of each CTA (or of all alike) with and without bank conflicts.
    """

    addresses: Array
    rows: Array
    waves: Array | int
    ideal: Array | int


def per_cta(counts: Array) -> Array | int:
    """Counts of (CTAs or 1, warps) as one number for each CTA, or one for all alike."""
    return int(counts.sum()) if counts.shape[0] == 1 else counts.sum(axis=1)


def addresses_of(unit: Unit, base: Array, offset: int, mask: Mask, lanes: int = LANES) -> Array:
    """Addresses of the unit's threads, (CTAs or 1, warps, lanes); a thread that is masked out repeats an active one's."""
    found = base.astype(np.int64) + offset
    found = np.broadcast_to(found, (found.shape[0], unit.warps, LANES))
    if mask is not None:
        found = np.where(mask, found, np.broadcast_to(found, mask.shape)[mask][0])
    if SHARED_WINDOW <= found.flat[0] < SHARED_WINDOW + (1 << 32):
        found = found - SHARED_WINDOW  # a generic address
    return found[..., :lanes]


class SharedAccess:
    """Finds the place of an instruction's shared accesses, once for each version of its address register."""

    def __init__(
        self, ins: Instruction, slot: int, offset: int, size: int, pc: int, lanes: int = LANES, counted: bool = True
    ) -> None:
        self.counted = counted
        self.ins, self.slot, self.offset, self.size, self.pc, self.lanes = ins, slot, offset, size, pc, lanes
        self.memo: dict[Any, Any] = {}

    def __call__(self, unit: Unit, mask: Mask) -> Place:
        base = unit.registers[self.slot]
        key = (id(base), unit.first, unit.warps)
        held = self.memo.get(key) if mask is None else None
        if held is None:
            held = (base, self._find(unit, base, mask))
            if mask is None:
                remember(self.memo, key, held)
        place: Place = held[1]
        if self.counted:
            unit.batch.tally.add(self.pc, "wavefronts", place.waves)
            unit.batch.tally.add(self.pc, "ideal", place.ideal)
        return place

    def _find(self, unit: Unit, base: Array, mask: Mask) -> Place:
        addresses = addresses_of(unit, base, self.offset, mask, self.lanes)
        shared = unit.batch.shared
        shared.check(addresses, self.size, self.ins)
        active = None if mask is None else mask[..., : self.lanes]
        rule = metrics.load_wavefronts if self.ins.opcode == "ld" else metrics.wavefronts
        waves = per_cta(rule(addresses, self.size, active))
        ideal: Array | int = metrics.phases(self.lanes, self.size) * unit.warps
        if active is not None:
            ideal = metrics.phases(self.lanes, self.size) * active.any(axis=2).sum(axis=1)
        return Place(addresses, shared.index(addresses, self.size), waves, ideal)


def offsets_of(unit: Unit, base: Array, offset: int, mask: Mask) -> Array:
    """Offsets of global addresses in the arena, for every thread of the unit."""
    return np.broadcast_to(addresses_of(unit, base, offset, mask) - GLOBAL_BASE, unit.shape)


@dataclass(eq=False)
class Pattern:
    """Global accesses of a unit up to whole lines: `offsets` of one of them, and the sectors that each CTA asks for."""

    offsets: Array
    sectors: Array


def pattern_of(offsets: Array, mask: Mask, memo: dict[int, Pattern]) -> Pattern:
    """The pattern of these accesses, known where the same accesses came before, moved by whole lines."""
    first = int(offsets.flat[0])
    known = memo.get(first % metrics.LINE)
    if mask is None and known is not None and known.offsets.shape == offsets.shape:
        moved = known.offsets + (first - int(known.offsets.flat[0]))
        if np.array_equal(offsets, moved):
            return known
    found = Pattern(offsets, metrics.distinct(offsets, metrics.SECTOR, mask).sum(axis=1))
    if mask is None:
        memo[first % metrics.LINE] = found
    return found


# ---- ld and st -------------------------------------------------------------------------------------------------------


def _shape_of(ins: Instruction) -> tuple[str, int, int]:
    """Item type, items and bytes of a load or store."""
    type = next((m for m in reversed(ins.modifiers) if m in DTYPES), None)
    if type is None:
        raise ins.error("has no type that the emulator knows")
    count = next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
    return type, count, count * DTYPES[type].itemsize


def _space(ins: Instruction) -> str:
    spaces = [m.split("::")[0] for m in ins.modifiers]
    return next((space for space in ("param", "shared", "global", "local", "const") if space in spaces), "generic")


def _load(decoder: Decoder, ins: Instruction) -> Step:
    space = _space(ins)
    if space == "param":
        return _load_param(decoder, ins)
    if space in ("local", "const"):
        raise ins.error(f"loads from {space} memory, which the emulator lacks")
    type, count, size = _shape_of(ins)
    targets = [(decoder.target(item, ins), getattr(item, "type", "b32")) for item in items(ins.operands[0])]
    if len(targets) != count:
        raise ins.error(f"has {len(targets)} targets, where {count} were expected")
    slot, offset = decoder.address(ins.operands[1], ins)
    pc = len(decoder.steps)
    item = DTYPES[type]

    def finish(unit: Unit, mask: Mask, found: Array) -> None:
        values = found.view(item)
        for i, (target, held) in enumerate(targets):
            if target is not None:
                unit.write(target, _fit(values[..., i], item, DTYPES[held]), mask)

    access = SharedAccess(ins, slot, offset, size, pc)
    patterns: dict[int, Pattern] = {}
    polling = polls(ins)

    def from_shared(unit: Unit, mask: Mask) -> None:
        place = access(unit, mask)
        if unit.batch.race:
            unit.batch.race.read_by(unit, mask, place.addresses, size, pc)
        finish(unit, mask, np.take(unit.batch.shared.flat(size), place.rows, axis=0))

    def from_global(unit: Unit, mask: Mask) -> Any:
        offsets = offsets_of(unit, unit.registers[slot], offset, mask)
        if polling and (held := _poll(unit, offsets, mask, pc)):
            return held
        unit.batch.tally.add(pc, "sectors", pattern_of(offsets, mask, patterns).sectors)
        found = unit.batch.memory.load(offsets, size, ins)
        _watch(unit, mask, offsets, size, pc, ins)
        return finish(unit, mask, found)

    def from_cluster(unit: Unit, mask: Mask) -> None:
        batch, everyone = unit.batch, unit.everyone(mask)
        found = np.broadcast_to(addresses_of(unit, unit.registers[slot], offset, mask), unit.shape)
        rank, addresses = from_mapa(found)
        if (rank >= batch.cluster).any():
            raise ins.error(f"names CTA {rank.max()} of a cluster, where 0 to {batch.cluster - 1} was expected")
        batch.shared.check(addresses, size, ins)
        own = np.arange(batch.ctas)[:, None, None]
        owners = np.where(rank < 0, own, own - batch.ranks[:, None, None] + rank)
        batch.check_alive(owners[everyone], ins)
        # What lies in another SM is read there, and no counter of this one has it.
        waves = per_cta(metrics.wavefronts(addresses, size, everyone & (owners == own)))
        batch.tally.add(pc, "wavefronts", waves)
        batch.tally.add(pc, "ideal", waves)
        if batch.race:
            batch.race.read_in_cluster(unit, everyone, owners, addresses, size, pc)
        finish(unit, mask, np.take(batch.shared.flat(size), (owners * batch.shared.window + addresses) // size, axis=0))

    if "shared::cluster" in ins.modifiers:
        return from_cluster

    def generic(unit: Unit, mask: Mask) -> Any:
        return (from_shared if _is_shared(unit, slot, mask) else from_global)(unit, mask)

    return {"shared": from_shared, "global": from_global, "generic": generic}[space]


def polls(ins: Instruction) -> bool:
    """Whether it is a load by which a thread may wait for what another CTA writes to global memory."""
    return ins.opcode == "ld" and synchronises(ins)


def _poll(unit: Unit, offsets: Array, mask: Mask, pc: int) -> Poll | None:
    """Holds threads that read the same again with nothing written in between; a second time for good."""
    batch = unit.batch
    at = offsets if mask is None else offsets[mask]
    key, now = (pc, unit.first, at.tobytes(), None if mask is None else mask.tobytes()), batch.memory.version
    version, times = batch.polls.get(key, (-1, 0))
    times = times + 1 if version == now else 0
    if times in (1, 3):
        batch.polls[key] = now, times if times == 1 else 2
        return Poll(now, times == 3)
    batch.polls[key] = now, times
    return None


def _watch(unit: Unit, mask: Mask, offsets: Array, size: int, pc: int, ins: Instruction) -> None:
    """Tell the race detector of an access of global memory, where CTAs talk there."""
    if not (unit.batch.race and unit.batch.race.talks):
        return
    spoken, ordered = unit.batch.race.spoken, synchronises(ins)
    spoken.access(unit, mask, offsets, size, pc, writes=ins.opcode != "ld", ordered=ordered)
    if ordered:
        spoken.synchronise(unit, mask, offsets, ins)


def _is_shared(unit: Unit, slot: int, mask: Mask) -> bool:
    base = np.broadcast_to(unit.registers[slot], unit.shape)
    first = base.flat[0] if mask is None else base[mask][0]
    return bool(SHARED_WINDOW <= first < SHARED_WINDOW + (1 << 32))


def _load_param(decoder: Decoder, ins: Instruction) -> Step:
    """Parameters do not change and are the same for all threads: the step moves constants."""
    type, _, size = _shape_of(ins)
    slot, offset = decoder.address(ins.operands[1], ins)
    targets = [(decoder.target(item, ins), getattr(item, "type", "b32")) for item in items(ins.operands[0])]
    memo: dict[int, list[Array]] = {}

    def values_at(address: int) -> list[Array]:
        at = address - PARAM_WINDOW if address >= PARAM_WINDOW else address
        raw = decoder.params[at : at + size]
        if len(raw) < size:
            raise ins.error(
                f"reads {size} bytes at {at} of the parameters, where {len(decoder.params)} bytes were passed"
            )
        found = np.frombuffer(raw, DTYPES[type]).reshape(-1, 1, 1, 1)
        return [
            decoder.intern(_fit(value, DTYPES[type], DTYPES[held]))
            for value, (_, held) in zip(found, targets, strict=True)
        ]

    def step(unit: Unit, mask: Mask) -> None:
        address = uniform(unit, slot, mask, ins) + offset
        held = memo.get(address) or remember(memo, address, values_at(address))
        for (target, _), value in zip(targets, held, strict=True):
            if target is not None:
                unit.write(target, value, mask)

    return step


def _store(decoder: Decoder, ins: Instruction) -> Step:
    from rungs.emulator import bulk

    space = _space(ins)
    if ins.modifiers[0] == "async":
        return bulk.store_async(decoder, ins)
    if space not in ("shared", "global", "generic") or "shared::cluster" in ins.modifiers:
        raise ins.error("is a store that the emulator lacks")
    type, count, size = _shape_of(ins)
    slot, offset = decoder.address(ins.operands[0], ins)
    sources = [decoder.source(item, type, ins) for item in items(ins.operands[1])]
    if len(sources) != count:
        raise ins.error(f"has {len(sources)} values, where {count} were expected")
    pc = len(decoder.steps)
    item = DTYPES[type]
    access = SharedAccess(ins, slot, offset, size, pc)
    patterns: dict[int, Pattern] = {}

    def gathered(unit: Unit) -> Array:
        values = np.empty((*unit.shape, count), item)
        for i, source in enumerate(sources):
            value = unit.registers[source]
            values[..., i] = _view(value, item) if value.dtype.itemsize <= item.itemsize else value.astype(item)
        return values.view(words(size))

    def to_shared(unit: Unit, mask: Mask) -> None:
        place, values = access(unit, mask), gathered(unit)
        if unit.batch.race:
            unit.batch.race.write_by(unit, mask, place.addresses, size, pc)
        flat = unit.batch.shared.flat(size)
        if mask is None:
            flat[place.rows] = values
        else:
            flat[np.broadcast_to(place.rows, unit.shape)[mask]] = values[mask]

    def to_global(unit: Unit, mask: Mask) -> None:
        offsets, values = offsets_of(unit, unit.registers[slot], offset, mask), gathered(unit)
        unit.batch.tally.add(pc, "sectors", pattern_of(offsets, mask, patterns).sectors)
        if mask is None:
            unit.batch.memory.store(offsets, values, size, ins)
        else:
            unit.batch.memory.store(offsets[mask], values[mask], size, ins)
        _watch(unit, mask, offsets, size, pc, ins)

    def generic(unit: Unit, mask: Mask) -> None:
        return (to_shared if _is_shared(unit, slot, mask) else to_global)(unit, mask)

    return {"shared": to_shared, "global": to_global, "generic": generic}[space]


COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
}


def combination(ins: Instruction, type: str) -> Callable[[Array, Array], Array] | None:
    """The function of two arrays of a type that an atomic or a reduction names; halves are computed in float32 and rounded."""
    function = next((COMBINE[m] for m in ins.modifiers if m in COMBINE), None)
    if function is None or type not in ("f16", "bf16", "f16x2", "bf16x2"):
        return function

    def of_halves(old: Array, new: Array) -> Array:
        halves = [np.ascontiguousarray(each).view(np.uint16) for each in (old, new)]
        if type.startswith("bf16"):
            result = round_to_bf16(function(*map(widen_bf16, halves)))
        else:
            result = function(*(each.view(np.float16) for each in halves)).view(np.uint16)
        return result.view(old.dtype)

    return of_halves


def _atomic(decoder: Decoder, ins: Instruction) -> Step:
    """atom and red: thread after thread, in the order of the CTAs. Atomics do not race with each other."""
    from rungs.emulator.sync import Apart

    type, count, size = _shape_of(ins)
    space, item, function = _space(ins), DTYPES[type], combination(ins, type)
    if function is None or space not in ("shared", "global", "generic") or size not in (4, 8, 16):
        raise ins.error("is an atomic that the emulator lacks")
    operands = list(ins.operands)
    targets = [decoder.target(each, ins) for each in items(operands.pop(0))] if ins.opcode == "atom" else []
    declared = [getattr(each, "type", "b32") for each in items(ins.operands[0])]
    slot, offset = decoder.address(operands[0], ins)
    sources, pc = [decoder.source(each, type, ins) for each in items(operands[1])], len(decoder.steps)
    if len(sources) != count:
        raise ins.error(f"has {len(sources)} values, where {count} were expected")

    def step(unit: Unit, mask: Mask) -> Any:
        batch = unit.batch
        shared = space == "shared" or (space == "generic" and _is_shared(unit, slot, mask))
        if shared or not batch.apart:
            return together(unit, mask, shared)
        ctas, until = np.flatnonzero(unit.everyone(mask).any(axis=(1, 2))), Poll(batch.memory.version, False)
        held = np.zeros(batch.ctas, bool)
        held[ctas[1:]] = True
        together(unit, unit.everyone(mask) & ~held[:, None, None], shared)
        return Apart(held, until) if held.any() else None

    def together(unit: Unit, mask: Mask, shared: bool) -> None:
        batch, everyone = unit.batch, unit.everyone(mask)
        if shared:
            addresses = addresses_of(unit, unit.registers[slot], offset, mask)
            batch.shared.check(addresses, size, ins)
            if batch.race:
                batch.race.read_by(unit, mask, addresses, size, pc)
            places = np.broadcast_to(batch.shared.index(addresses, size), unit.shape)[everyone]
        else:
            offsets = offsets_of(unit, unit.registers[slot], offset, mask)
            places = offsets[everyone]
        values = np.stack(
            [_view(np.broadcast_to(unit.registers[each], unit.shape)[everyone], item) for each in sources], axis=1
        )
        found = np.zeros(values.shape, item)
        for turn in _turns(places):
            at = places[turn]
            old = batch.shared.flat(size)[at] if shared else batch.memory.load(at, size, ins)
            found[turn] = old.view(item)
            new = np.ascontiguousarray(function(found[turn], values[turn])).view(old.dtype)
            if shared:
                batch.shared.flat(size)[at] = new
            else:
                batch.memory.store(at, new, size, ins)
        if not shared:
            _watch(unit, mask, offsets, size, pc, ins)
        for i, target in enumerate(targets):
            if target is not None:
                result = np.zeros(unit.shape, item)
                result[everyone] = found[:, i]
                unit.write(target, _fit(result, item, DTYPES[declared[i]]), mask)

    return step


def _turns(places: Array) -> Iterator[Array]:
    """Which of these accesses are executed together: those of a place one after the other, in their order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    turn = np.empty(len(places), np.int64)
    turn[order] = np.arange(len(places)) - np.repeat(starts, np.diff(np.append(starts, len(places))))
    for number in range(int(turn.max()) + 1):
        yield turn == number


# ---- ldmatrix and stmatrix -------------------------------------------------------------------------------------------


def whole_warps(unit: Unit, mask: Mask, ins: Instruction) -> None:
    """Raises EmulationError where a part of a warp executes what the whole warp must."""
    if mask is not None and not np.array_equal(mask.any(axis=2), mask.all(axis=2)):
        raise ins.error("is executed by a part of a warp, where all 32 lanes were expected")


def _matrix(decoder: Decoder, ins: Instruction) -> Step:
    """m8n8.x1/x2/x4{.trans}.b16: lane 8i + r gives the address of row r of matrix i, lane l gets word l % 4 of row l / 4."""
    count = next((int(m[1:]) for m in ins.modifiers if m in ("x1", "x2", "x4")), None)
    if count is None or "m8n8" not in ins.modifiers or "b16" not in ins.modifiers:
        raise ins.error("is a form that the emulator lacks")
    transposed, stores = "trans" in ins.modifiers, ins.opcode == "stmatrix"
    registers, address = ins.operands[::-1] if stores else ins.operands
    slot, offset = decoder.address(address, ins)
    lanes, pc = 8 * count, len(decoder.steps)
    access = SharedAccess(ins, slot, offset, 16, pc, lanes)
    slots = [decoder.source(item, "b32", ins) for item in items(registers)]
    if len(slots) != count:
        raise ins.error(f"has {len(slots)} registers, where {count} were expected")

    def load(unit: Unit, mask: Mask) -> None:
        whole_warps(unit, mask, ins)
        place, batch = access(unit, mask), unit.batch
        if batch.race:
            batch.race.read_by(unit, mask, place.addresses, 16, pc)
        found = np.take(batch.shared.flat(16), place.rows, axis=0).reshape(batch.ctas, unit.warps, count, 8, 4)
        if transposed:
            elements = found.view("u2").swapaxes(-1, -2)  # [matrix][column][row]
            found = np.ascontiguousarray(elements).view("u4")
        for i, target in enumerate(slots):
            unit.write(target, found[:, :, i].reshape(unit.shape), mask)

    def store(unit: Unit, mask: Mask) -> None:
        whole_warps(unit, mask, ins)
        place, batch = access(unit, mask), unit.batch
        if batch.race:
            batch.race.write_by(unit, mask, place.addresses, 16, pc)
        rows = np.empty((batch.ctas, unit.warps, count, 8, 4), "u4")
        for i, source in enumerate(slots):
            rows[:, :, i] = np.broadcast_to(unit.registers[source], unit.shape).reshape(batch.ctas, unit.warps, 8, 4)
        if transposed:
            rows = np.ascontiguousarray(rows.view("u2").swapaxes(-1, -2)).view("u4")
        values = rows.reshape(batch.ctas, unit.warps, lanes, 4)
        if mask is None:
            batch.shared.flat(16)[place.rows] = values
        else:
            part = mask[..., :lanes]
            batch.shared.flat(16)[np.broadcast_to(place.rows, part.shape)[part]] = values[part]

    return store if stores else load


# ---- cp.async --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Copy:
    """A cp.async of a unit's threads that has been issued and has not landed. `group` is each thread's commit group."""

    rows: Array
    values: Array
    size: int
    mask: Mask
    group: Array

    def land(self, unit: Unit, part: Mask) -> None:
        flat = unit.batch.shared.flat(self.size)
        if part is None:
            flat[self.rows] = self.values
        else:
            flat[np.broadcast_to(self.rows, unit.shape)[part]] = self.values[part]


def _cp_async(decoder: Decoder, ins: Instruction) -> Step:
    """cp.async.ca/.cg [shared], [global], size{, bytes to read}: what is not read is filled with zeros."""
    target, offset = decoder.address(ins.operands[0], ins)
    source, source_offset = decoder.address(ins.operands[1], ins)
    size = getattr(ins.operands[2], "value", 0)
    if size not in (4, 8, 16):
        raise ins.error(f"copies {size} bytes, where 4, 8 or 16 was expected")
    reads = None
    if len(ins.operands) > 3 and not any(m.startswith("L2::cache_hint") for m in ins.modifiers):
        reads = decoder.source(ins.operands[3], "u32", ins)
    pc, bypass = len(decoder.steps), "cg" in ins.modifiers
    access = SharedAccess(ins, target, offset, size, pc, counted=False)
    patterns: dict[int, Pattern] = {}
    memo: dict[Any, Any] = {}

    def copy_waves(pattern: Pattern, place: Place, mask: Mask) -> Array:
        """Once for each pattern of sources and place of targets."""
        key = (id(pattern), id(place))
        held = memo.get(key)
        if held is None:
            waves = metrics.copy_wavefronts(pattern.offsets, place.addresses, size, bypass, mask).sum(axis=1)
            held = remember(memo, key, (pattern, place, waves))
        return held[2]

    def step(unit: Unit, mask: Mask) -> None:
        batch, place = unit.batch, access(unit, mask)
        offsets = offsets_of(unit, unit.registers[source], source_offset, mask)
        pattern = pattern_of(offsets, mask, patterns)
        batch.tally.add(pc, "sectors", pattern.sectors)
        batch.tally.add(pc, "wavefronts", copy_waves(pattern, place, mask))
        moved = size * LANES * unit.warps if mask is None else size * mask.sum(axis=(1, 2))
        batch.tally.add(pc, "bytes", moved)
        if reads is None:
            values = batch.memory.load(offsets, size, ins)
        else:
            values = _load_part(unit, offsets, size, unit.registers[reads], mask, ins)
        if batch.race:
            batch.race.write_by(unit, mask, place.addresses, size, pc, unit.committed)
        copy = Copy(place.rows, values, size, mask, unit.committed)
        if batch.late:
            unit.pending.append(copy)
        else:
            copy.land(unit, mask)

    return step


def _load_part(unit: Unit, offsets: Array, size: int, reads: Array, mask: Mask, ins: Instruction) -> Array:
    """The first `reads` bytes of each thread's source, then zeros; a source of which nothing is read may lie anywhere."""
    wanted = np.broadcast_to(reads, unit.shape)
    some = (wanted > 0) & unit.everyone(mask)
    values = np.zeros((*unit.shape, size), np.uint8)
    if some.any():
        values[some] = unit.batch.memory.load(offsets[some], size, ins).view(np.uint8)
    values[np.arange(size) >= wanted[..., None]] = 0
    return values.view(words(size))


def _commit(decoder: Decoder, ins: Instruction) -> Step:
    def step(unit: Unit, mask: Mask) -> None:
        unit.committed = unit.committed + 1 if mask is None else np.where(mask, unit.committed + 1, unit.committed)

    return step


def _wait_group(decoder: Decoder, ins: Instruction) -> Step:
    """cp.async.wait_group N: all but the thread's N newest groups have landed; wait_all commits and waits for all."""
    newest = getattr(ins.operands[0], "value", 0) if ins.operands else 0
    commit = _commit(decoder, ins) if "wait_all" in ins.modifiers else None

    def step(unit: Unit, mask: Mask) -> None:
        if commit:
            commit(unit, mask)
        landed = unit.committed - newest
        if unit.batch.race:
            unit.batch.race.waited(unit, mask, landed)
        if unit.pending:
            unit.pending = [copy for copy in unit.pending if not land_part(unit, copy, mask, landed)]

    return step


def land_part(unit: Unit, copy: Copy, mask: Mask, landed: Array) -> bool:
    """Let the threads' share of a copy land where its group is older than `landed`; returns whether all of it has."""
    done = copy.group < landed
    if done.size == 1 and mask is None:
        if done.item():
            copy.land(unit, copy.mask)
        return bool(done.item())
    part = unit.everyone(copy.mask) & unit.everyone(mask) & done
    copy.land(unit, part)
    copy.mask = unit.everyone(copy.mask) & ~part
    return not copy.mask.any()


def _copy(decoder: Decoder, ins: Instruction) -> Step:
    from rungs.emulator import bulk, sync

    if ins.modifiers[:2] == ("async", "bulk") or ins.modifiers[:3] == ("reduce", "async", "bulk"):
        return bulk.compile(decoder, ins)
    if ins.modifiers[:3] == ("async", "mbarrier", "arrive"):
        return sync.copies_arrive(decoder, ins)
    form = {
        "commit_group": _commit,
        "wait_group": _wait_group,
        "wait_all": _wait_group,
        "ca": _cp_async,
        "cg": _cp_async,
    }
    if ins.modifiers[0] != "async" or ins.modifiers[1] not in form:
        raise ins.error("is a copy that the emulator lacks")
    return form[ins.modifiers[1]](decoder, ins)


def nothing(decoder: Decoder, ins: Instruction) -> Step:
    """A hint, or what lockstep and registers without a limit have no use for."""
    return lambda unit, mask: None


def _policy(decoder: Decoder, ins: Instruction) -> Step:
    """createpolicy: what a cache should keep is a hint, so that any number stands for it."""
    target = decoder.target(ins.operands[0], ins)
    hint = decoder.intern(np.zeros((1, 1, 1), np.uint64))
    return lambda unit, mask: None if target is None else unit.write(target, hint, mask)


COMPILE: dict[str, Callable[[Decoder, Instruction], Step]] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "cp": _copy,
    "prefetchu": nothing,
    "createpolicy": _policy,
}
