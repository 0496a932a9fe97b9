"""Barriers, mbarriers, fences, what the lanes of a warp do together, and control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rungs.emulator.alu import pure
from rungs.emulator.loads import addresses_of, land_part, nothing, whole_warps
from rungs.emulator.memory import LAST_RANK, REMOTE_BITS, from_mapa
from rungs.emulator.parser import Address, Immediate, Instruction, Operand
from rungs.emulator.race import scope_of
from rungs.emulator.state import DTYPES, EXIT, LANES, Array, Batch, Decoder, Mask, Poll, Step, Unit, items, uniform

TX_LIMIT = (1 << 20) - 1
"""The most bytes that an mbarrier can be expecting (PTX ISA, "tx-count")."""


# ---- lanes that come together ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Converging:
    """What holds lanes until the other lanes of their `warps` (a warp or a warpgroup) have come there too, or have ended."""

    warps: int
    what: str

    def state(self, cta: int) -> str:
        return self.what


CONVERGING = Converging(1, "a barrier that other lanes of its warp have not come to")
GATHERING = Converging(4, "a wgmma that other warps of its warpgroup have not come to")


def lacks_lanes(unit: Unit, mask: Mask, warps: int = 1) -> bool:
    """Whether lanes of the warps (or warpgroups) that take part are elsewhere: a warp comes to a barrier as a whole."""
    if mask is None:
        return False
    alive = np.logical_or.reduce([unit.everyone(group.mask) for group in unit.groups if group.pc < EXIT])
    of = (unit.first + np.arange(unit.warps)) // warps
    taking = mask.any(axis=2) @ (of[:, None] == of)
    return bool((taking[..., None] & alive & ~mask).any())


def converge(unit: Unit) -> bool:
    """Let lanes go on that are held at a barrier which all of their warps' lanes have come to; whether there are any."""
    held = [group for group in unit.groups if isinstance(group.waits, Converging)]
    freed = False
    for pc in {group.pc for group in held}:
        there = [group for group in held if group.pc == pc]
        came = np.logical_or.reduce([unit.everyone(group.mask) for group in there])
        if not lacks_lanes(unit, came, there[0].waits.warps):
            freed = True
            for group in there:
                group.waits = None
    return freed


# ---- bar.sync and bar.arrive -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Barrier:
    """A named barrier of each CTA: `arrived` and `needed` threads. It counts whole warps, as the hardware does."""

    number: int
    arrived: Array
    needed: Array
    whole: bool = False
    clock: Any = None
    last: Instruction | None = None

    def forget_ended(self, batch: Batch) -> bool:
        """Whether threads go on once those that have ended are no longer waited for (`whole`: all of the CTA were)."""
        before, alive = self.arrived.sum(), batch.alive_warps() * LANES
        if self.whole:
            self.needed = np.minimum(self.needed, alive)
            self.settle(batch)
        return bool(self.arrived.sum() < before)

    def settle(self, batch: Batch) -> None:
        """Let the threads of every CTA go on where all have come."""
        done = (self.arrived >= self.needed) & (self.arrived > 0)
        if not done.any():
            return
        for unit in batch.units:
            for group in list(unit.groups):
                if group.waits is self:
                    released = unit.release(group, done[:, None, None])
                    if batch.race:
                        batch.race.acquire(unit, released, self.clock)
        self.arrived[done] = 0
        if batch.race and self.clock is not None:
            self.clock[done] = 0

    def state(self, cta: int) -> str:
        return f"barrier {self.number}, where {self.arrived[cta]} of {self.needed[cta]} threads have arrived"


@dataclass(frozen=True, eq=False)
class Part:
    """Holds the threads in `mask` at a barrier, where the others of their group are yet to execute the instruction."""

    barrier: Barrier
    mask: Array


@dataclass(eq=False)
class Apart:
    """Has executed for some CTAs and not for those in `held`, (CTAs) bool, which come later: whatever of a unit is theirs is held."""

    held: Array
    until: Poll


@dataclass(eq=False)
class ClusterBarrier:
    """The barrier of each cluster: how often each warp (CTAs, warps) has arrived and waited, and phases done of its cluster."""

    arrivals: Array
    waits: Array
    phase: Array
    clock: Any = None
    done_clock: Any = None

    def settle(self, batch: Batch) -> bool:
        """Complete the phase of every cluster all of whose warps have arrived or ended; whether there is one."""
        arrived = self.arrivals > self.phase[:, None]
        alive = np.zeros(arrived.shape, bool)
        for unit in batch.units:
            for group in unit.groups:
                if group.pc < EXIT:
                    alive[:, unit.first : unit.first + unit.warps] |= unit.everyone(group.mask).any(axis=2)
        complete = (arrived | ~alive).reshape(-1, batch.cluster * batch.warps).all(axis=1)
        complete &= arrived.reshape(complete.size, -1).any(axis=1)
        if not complete.any():
            return False
        done = np.repeat(complete, batch.cluster)
        self.phase = self.phase + done
        if batch.race and self.clock is not None:
            self.done_clock, self.clock = batch.race.complete_cluster(self, done)
        for unit in batch.units:
            for group in unit.groups:
                if group.waits is self:
                    group.waits = None
        return True

    def forget_ended(self, batch: Batch) -> bool:
        return self.settle(batch)

    def state(self, cta: int) -> str:
        missing = int((self.arrivals[cta] <= self.phase[cta]).sum())
        return f"the cluster's barrier, where {missing} warps of this CTA and maybe more of others have not arrived"


def _cluster_barrier(decoder: Decoder, ins: Instruction, kind: str) -> Step:
    """barrier.cluster.arrive and .wait: an arrival is counted, a wait holds the warps until all of the cluster have arrived.

    A relaxed arrival hands on only what the warp's last fence did.
    """
    relaxed = "relaxed" in ins.modifiers

    def step(unit: Unit, mask: Mask) -> Any:
        batch = unit.batch
        if lacks_lanes(unit, mask):
            return CONVERGING
        if batch.cluster_barrier is None:
            zeros = np.zeros((batch.ctas, batch.warps), np.int64)
            batch.cluster_barrier = ClusterBarrier(zeros, zeros, zeros[:, 0])
        barrier = batch.cluster_barrier
        here = np.zeros((batch.ctas, batch.warps), bool)
        here[:, unit.first : unit.first + unit.warps] = unit.everyone(mask).any(axis=2)
        if kind == "arrive":
            if (barrier.arrivals > barrier.waits)[here].any():
                raise ins.error(
                    "arrives at the cluster's barrier a second time, where a barrier.cluster.wait was expected before"
                )
            barrier.arrivals = barrier.arrivals + here
            if batch.race:
                batch.race.meets(unit, mask)
                barrier.clock = batch.race.release(unit, mask, barrier.clock, relaxed=relaxed)
            barrier.settle(batch)
            return None
        if (barrier.arrivals == barrier.waits)[here].any():
            raise ins.error("waits at the cluster's barrier, where a barrier.cluster.arrive was expected before")
        if (barrier.arrivals > barrier.phase[:, None])[here].any():
            return barrier
        barrier.waits = np.where(here, barrier.arrivals, barrier.waits)
        if batch.race:
            batch.race.acquire(unit, mask, barrier.done_clock)
            batch.race.met(unit, mask)
        return None

    return step


def _bar(decoder: Decoder, ins: Instruction) -> Step:
    kinds = [m for m in ins.modifiers if m not in ("cta", "aligned")]
    if kinds[0] == "cluster" and kinds[1] in ("arrive", "wait"):
        if set(kinds[2:]) - {"release", "acquire", "relaxed"}:
            raise ins.error("is a barrier that the emulator lacks")
        return _cluster_barrier(decoder, ins, kinds[1])
    if kinds == ["warp", "sync"]:
        _members(decoder, ins.operands[0], ins)
        if not isinstance(ins.operands[0], Immediate):
            return nothing(decoder, ins)
        return lambda unit, mask: CONVERGING if lacks_lanes(unit, mask) else None
    if kinds not in (["sync"], ["arrive"]):
        raise ins.error("is a barrier that the emulator lacks")
    waits = kinds == ["sync"]
    number = decoder.source(ins.operands[0], "u32", ins)
    count = decoder.source(ins.operands[1], "u32", ins) if len(ins.operands) > 1 else None

    def step(unit: Unit, mask: Mask) -> Any:
        if lacks_lanes(unit, mask):
            return CONVERGING
        for which, part in _by_value(unit, unit.registers[number], mask):
            barrier = come(unit, part, which)
            if waits:  # warps that name another barrier execute the instruction after these
                return barrier if part is mask else Part(barrier, unit.everyone(part))
            barrier.settle(unit.batch)
        return None

    def come(unit: Unit, mask: Mask, which: int) -> Barrier:
        batch = unit.batch
        if not 0 <= which < 16:
            raise ins.error(f"names barrier {which}, where 0 to 15 was expected")
        barrier = batch.barriers.get(which)
        if barrier is None:
            zeros = np.zeros(batch.ctas, np.int64)
            barrier = batch.barriers[which] = Barrier(which, zeros, zeros.copy())
        alive = batch.alive_warps() * LANES
        needed = alive if count is None else np.full(batch.ctas, uniform(unit, count, mask, ins))
        came = unit.active_warps(mask) * LANES + np.zeros(batch.ctas, np.int64)
        here = came > 0
        if (needed[here] % LANES).any() or not needed[here].all():
            raise ins.error(f"names {int(needed[here].min())} threads, where a positive multiple of 32 was expected")
        if ((barrier.arrived > 0) & here & (barrier.needed != needed)).any():
            raise ins.error(
                f"names {int(needed[here][0])} threads at barrier {which}, where {int(barrier.needed[here][0])} was expected,"
                f" as in {barrier.last.where if barrier.last else 'an earlier arrival'}"
            )
        barrier.needed = np.where(here, needed, barrier.needed)
        barrier.arrived = barrier.arrived + came
        barrier.last, barrier.whole = ins, count is None
        over = barrier.arrived > barrier.needed
        if over.any():
            raise ins.error(
                f"lets {int(barrier.arrived[over][0])} threads arrive at barrier {which}, where {int(barrier.needed[over][0])}"
                " was expected"
            )
        if batch.race:
            barrier.clock = batch.race.release(unit, mask, barrier.clock)
        return barrier

    return step


# ---- mbarrier --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Mbarrier:
    """An mbarrier of each CTA, by its address: arrivals expected a phase and still missing, bytes expected, phases done.

    `told` are the threads that try_wait has already answered with false in this phase.
    """

    address: int
    valid: Array
    expected: Array
    pending: Array
    tx: Array
    phase: Array
    told: dict[tuple[int, int], Array] = field(default_factory=dict)
    clock: Any = None
    done_clock: Any = None
    initialised: Instruction | None = None

    def settle(self, batch: Batch) -> None:
        """Complete the phase of every CTA where nothing is missing, and wake those who wait."""
        done = self.valid & (self.pending == 0) & (self.tx == 0)
        if not done.any():
            return
        self.phase = self.phase + done
        self.pending = np.where(done, self.expected, self.pending)
        self.told = {key: mask & ~done[:, None, None] for key, mask in self.told.items()}
        if batch.race:
            self.done_clock, self.clock = batch.race.complete(self, done)
        for unit in batch.units:
            for group in unit.groups:
                if group.waits is self:
                    group.waits = None

    def state(self, cta: int) -> str:
        missing = []
        if self.pending[cta]:
            missing.append(f"{self.pending[cta]} of {self.expected[cta]} arrivals")
        if self.tx[cta]:
            missing.append(f"{self.tx[cta]} bytes")
        return f"phase {self.phase[cta]} of the mbarrier at byte {self.address - 1024} of shared memory, which lacks {' and '.join(missing)}"


def each_mbarrier(unit: Unit, slot: int, offset: int, mask: Mask, ins: Instruction) -> Iterator[tuple[Mbarrier, Mask]]:
    """The mbarriers that the active threads name, with the threads that name each. Raises EmulationError for what is none."""
    batch = unit.batch
    for address, part in _by_value(unit, addresses_of(unit, unit.registers[slot], offset, mask), mask):
        barrier = batch.mbarriers.get(address)
        users = np.ones(batch.ctas, bool) if part is None else part.any(axis=(1, 2))
        if barrier is None or not barrier.valid[users].all():
            raise ins.error(f"uses byte {address - 1024} of shared memory, where an initialised mbarrier was expected")
        yield barrier, part


def each_mbarrier_of_cluster(
    unit: Unit, slot: int, offset: int, mask: Mask, ins: Instruction, remote: bool
) -> Iterator[tuple[Mbarrier, Mask, Array | None]]:
    """As each_mbarrier, for addresses of mapa where `remote`: with the CTA whose mbarrier it is, for each CTA that names it."""
    if not remote:
        for barrier, part in each_mbarrier(unit, slot, offset, mask, ins):
            yield barrier, part, None
        return
    batch = unit.batch
    for value, part in _by_value(unit, addresses_of(unit, unit.registers[slot], offset, mask), mask):
        rank, address = from_mapa(value)
        if rank >= batch.cluster:
            raise ins.error(f"names CTA {rank} of a cluster, where 0 to {batch.cluster - 1} was expected")
        owners = np.arange(batch.ctas) if rank < 0 else batch.peers(rank)
        there = batch.mbarriers.get(address)
        users = np.ones(batch.ctas, bool) if part is None else part.any(axis=(1, 2))
        if there is None or not there.valid[owners[users]].all():
            raise ins.error(
                f"uses byte {address - 1024} of shared memory of another CTA, where an initialised mbarrier was expected"
            )
        batch.check_alive(owners[users], ins)
        yield there, part, owners


def _map_address(decoder: Decoder, ins: Instruction) -> Step:
    """mapa.shared::cluster.u32 d, a, rank."""
    if ins.modifiers != ("shared::cluster", "u32"):
        raise ins.error("is a form of mapa that the emulator lacks")
    target, *sources = ins.operands
    slots = [decoder.source(operand, "u32", ins) for operand in sources]

    def there(address: Array, rank: Array) -> Array:
        named = np.minimum(rank, np.uint32(LAST_RANK)) + np.uint32(1)  # so that a rank of -1 is not this CTA's
        return (address & np.uint32((1 << REMOTE_BITS) - 1)) | named << np.uint32(REMOTE_BITS)

    return pure(decoder, ins, slots, [decoder.target(target, ins)], there)


def _by_value(unit: Unit, values: Array, mask: Mask) -> Iterator[tuple[int, Mask]]:
    first = int(values.flat[0])
    if (values == first).all():
        yield first, mask
        return
    spread = np.broadcast_to(values, unit.shape)
    everyone = unit.everyone(mask)
    for value in np.unique(spread[everyone]):
        yield int(value), everyone & (spread == value)


def _threads(unit: Unit, part: Mask) -> Array:
    """Active threads of each CTA."""
    if part is None:
        return np.full(unit.batch.ctas, unit.warps * LANES)
    return part.sum(axis=(1, 2))


def arrive(barrier: Mbarrier, batch: Batch, arrivals: Array, ins: Instruction) -> None:
    """Count arrivals of each CTA. Raises EmulationError where more come than the phase has left."""
    over = arrivals > barrier.pending
    if over.any():
        cta = int(np.argmax(over))
        raise ins.error(
            f"arrives {int(arrivals[cta])} times at the mbarrier at byte {barrier.address - 1024} of shared memory, where at"
            f" most {int(barrier.pending[cta])} of the phase's {int(barrier.expected[cta])} arrivals were expected"
        )
    barrier.pending = barrier.pending - arrivals
    barrier.settle(batch)


def expect(barrier: Mbarrier, bytes: Array, ins: Instruction) -> None:
    barrier.tx = barrier.tx + bytes
    if (np.abs(barrier.tx) > TX_LIMIT).any():
        raise ins.error(
            f"makes an mbarrier expect {int(np.abs(barrier.tx).max())} bytes, where at most {TX_LIMIT} was expected"
        )


def _mbarrier(decoder: Decoder, ins: Instruction) -> Step:
    kind = ins.modifiers[0]
    form = {
        "init": _init,
        "inval": _invalidate,
        "arrive": _arrive,
        "expect_tx": _arrive,
        "complete_tx": _arrive,
        "try_wait": _wait,
        "test_wait": _wait,
    }
    remote = "shared::cluster" in ins.modifiers
    hands_on_nothing = kind in ("try_wait", "test_wait") and "relaxed" in ins.modifiers
    if kind not in form or (remote and kind != "arrive") or "noComplete" in ins.modifiers or hands_on_nothing:
        raise ins.error("is a form of mbarrier that the emulator lacks")
    return form[kind](decoder, ins)


def _init(decoder: Decoder, ins: Instruction) -> Step:
    slot, offset = decoder.address(ins.operands[0], ins)
    count, pc = decoder.source(ins.operands[1], "u32", ins), len(decoder.steps)

    def step(unit: Unit, mask: Mask) -> None:
        batch = unit.batch
        addresses = addresses_of(unit, unit.registers[slot], offset, mask)
        batch.shared.check(addresses, 8, ins)
        arrivals = uniform(unit, count, mask, ins)
        if not 1 <= arrivals < 1 << 20:
            raise ins.error(f"initialises an mbarrier for {arrivals} arrivals, where 1 to {(1 << 20) - 1} was expected")
        if (_threads(unit, mask) > 1).any():
            raise ins.error("initialises an mbarrier from several threads, where one was expected")
        for address, part in _by_value(unit, addresses, mask):
            zeros = np.zeros(batch.ctas, np.int64)
            barrier = batch.mbarriers.get(address)
            if barrier is None:
                barrier = Mbarrier(address, zeros > 0, zeros, zeros, zeros, zeros)
                batch.mbarriers[address] = barrier
            here = np.ones(batch.ctas, bool) if part is None else part.any(axis=(1, 2))
            barrier.valid = barrier.valid | here
            barrier.expected = np.where(here, arrivals, barrier.expected)
            barrier.pending = np.where(here, arrivals, barrier.pending)
            barrier.tx = np.where(here, 0, barrier.tx)
            barrier.phase = np.where(here, 0, barrier.phase)
            barrier.initialised = ins
            if batch.race:
                batch.race.initialised(unit, part, barrier, pc)

    return step


def _invalidate(decoder: Decoder, ins: Instruction) -> Step:
    slot, offset = decoder.address(ins.operands[0], ins)

    def step(unit: Unit, mask: Mask) -> None:
        for barrier, part in each_mbarrier(unit, slot, offset, mask, ins):
            barrier.valid = barrier.valid & (_threads(unit, part) == 0)
            if unit.batch.race:
                unit.batch.race.invalidated(unit, part, barrier)

    return step


def _arrive(decoder: Decoder, ins: Instruction) -> Step:
    """arrive{.expect_tx}, expect_tx and complete_tx. The state that arrive returns is the number of the phase."""
    operands = list(ins.operands)
    arrives = ins.modifiers[0] == "arrive"
    state = decoder.target(operands.pop(0), ins) if arrives and not isinstance(operands[0], Address) else None
    slot, offset = decoder.address(operands[0], ins)
    value = decoder.source(operands[1], "u32", ins) if len(operands) > 1 else decoder.constant(1, DTYPES["u32"])
    expects, pc = "expect_tx" in ins.modifiers, len(decoder.steps)
    remote, relaxed = "shared::cluster" in ins.modifiers, "relaxed" in ins.modifiers
    if remote and state is not None:
        raise ins.error("returns the state of an mbarrier of another CTA, where _ was expected")
    sign = -1 if ins.modifiers[0] == "complete_tx" else 1

    def step(unit: Unit, mask: Mask) -> None:
        batch = unit.batch
        for barrier, part, owners in each_mbarrier_of_cluster(unit, slot, offset, mask, ins, remote):
            if batch.race:
                batch.race.uses(unit, part, barrier, pc, owners=owners)
            if state is not None:
                unit.write(state, barrier.phase.astype(np.uint64)[:, None, None], part)
            spread = np.broadcast_to(unit.registers[value], unit.shape)
            amount = np.where(unit.everyone(part), spread, 0).astype(np.int64).sum(axis=(1, 2))
            threads = _threads(unit, part)
            if owners is not None:
                amount, threads = (np.bincount(owners, each, batch.ctas).astype(np.int64) for each in (amount, threads))
            if expects or not arrives:
                expect(barrier, sign * amount, ins)
            if arrives:
                if batch.race:
                    if owners is not None:
                        batch.race.reaches(*batch.race.each(unit, part), owners, pc)
                    barrier.clock = batch.race.release(unit, part, barrier.clock, owners, relaxed=relaxed)
                arrive(barrier, batch, threads if expects else amount, ins)
            else:
                barrier.settle(batch)

    return step


def _wait(decoder: Decoder, ins: Instruction) -> Step:
    """try_wait and test_wait: false once where the phase has not completed, then the threads are held until it has.

    So a kernel that ignores the answer goes on too early, and one that asks in a loop costs two steps.
    """
    target, address, which, *_ = ins.operands
    answer = decoder.target(target, ins)
    slot, offset = decoder.address(address, ins)
    parity = "parity" in ins.modifiers
    wanted = decoder.source(which, "u32" if parity else "u64", ins)
    pc = len(decoder.steps)
    yes = decoder.intern(np.ones((1, 1, 1), bool))

    def step(unit: Unit, mask: Mask) -> Any:
        batch, result = unit.batch, None
        for barrier, part in each_mbarrier(unit, slot, offset, mask, ins):
            if batch.race:
                batch.race.uses(unit, part, barrier, pc)
            phase, asked = barrier.phase[:, None, None], unit.registers[wanted].astype(np.int64)
            done = (phase & 1) != (asked & 1) if parity else phase > asked
            if done.all():
                done = yes
            else:
                waiting = unit.everyone(part) & ~done
                told = barrier.told.get((unit.first, unit.warps), False)
                if waiting.any() and not (waiting & ~told).any():
                    return barrier
                barrier.told[unit.first, unit.warps] = told | waiting
            if batch.race:
                batch.race.acquire(unit, unit.everyone(part) & done, barrier.done_clock, barrier)
            result = done if result is None else np.where(unit.everyone(part), done, result)
        if answer is not None and result is not None:
            unit.write(answer, result, mask)
        return None

    return step


@dataclass(eq=False)
class CopyArrival:
    """Threads that arrive at an mbarrier once their cp.async so far have landed.

    `mask` is that of the warps from `first` on; each thread's commit groups before `landed` are those of its copies.
    """

    ins: Instruction
    barrier: Mbarrier
    first: int
    mask: Array
    landed: Array

    def _parts(self, batch: Batch) -> Iterator[tuple[Unit, Array, Array]]:
        """The units that the threads are in by now, with which of theirs they are and the groups of each."""
        for unit in batch.units:
            low, high = max(self.first, unit.first), min(self.first + self.mask.shape[1], unit.first + unit.warps)
            if low < high:
                mask, landed = np.zeros(unit.shape, bool), np.zeros(unit.shape, np.int64)
                mask[:, low - unit.first : high - unit.first] = self.mask[:, low - self.first : high - self.first]
                landed[:, low - unit.first : high - unit.first] = self.landed[:, low - self.first : high - self.first]
                yield unit, mask, landed

    def waits(self, batch: Batch) -> bool:
        """Whether copies of the threads are still under way."""
        return any(
            (unit.everyone(copy.mask) & mask & (copy.group < landed)).any()
            for unit, mask, landed in self._parts(batch)
            for copy in unit.pending
        )

    def land(self, batch: Batch) -> None:
        """Let the copies land and the threads arrive, and then all those whose copies have thereby landed."""
        for unit, mask, landed in self._parts(batch):
            unit.pending = [copy for copy in unit.pending if not land_part(unit, copy, mask, landed)]
        if batch.race:
            self.barrier.clock = batch.race.copied(self.barrier.clock, self.first, self.mask, self.landed)
        arrive(self.barrier, batch, self.mask.sum(axis=(1, 2)), self.ins)
        for other in [each for each in batch.in_flight if isinstance(each, CopyArrival)]:
            if other in batch.in_flight and not other.waits(batch):
                batch.in_flight.remove(other)
                other.land(batch)


def copies_arrive(decoder: Decoder, ins: Instruction) -> Step:
    """cp.async.mbarrier.arrive{.noinc}: without .noinc the phase lacks one arrival more, until this one comes.

    A thread's copies up to here are kept as a commit group, so a kernel that counts groups as well is one that the emulator
    lacks.
    """
    groups = ("commit_group", "wait_group", "wait_all")
    if any(each.opcode == "cp" and each.modifiers[1] in groups for each in decoder.kernel.code):
        raise ins.error("stands beside cp.async groups in one kernel, which the emulator lacks")
    slot, offset = decoder.address(ins.operands[0], ins)
    increments, pc = "noinc" not in ins.modifiers, len(decoder.steps)

    def step(unit: Unit, mask: Mask) -> None:
        batch = unit.batch
        unit.committed = unit.committed + 1 if mask is None else np.where(mask, unit.committed + 1, unit.committed)
        for barrier, part in each_mbarrier(unit, slot, offset, mask, ins):
            if batch.race:
                batch.race.uses(unit, part, barrier, pc)
            if increments:
                barrier.pending = barrier.pending + _threads(unit, part)
            landed = np.broadcast_to(unit.committed, unit.shape)
            arrival = CopyArrival(ins, barrier, unit.first, unit.everyone(part), landed)
            if arrival.waits(batch):
                batch.in_flight.append(arrival)
            else:
                arrival.land(batch)

    return step


# ---- fences ----------------------------------------------------------------------------------------------------------


def _fence(decoder: Decoder, ins: Instruction) -> Step:
    """Lockstep orders memory already; what a fence does is told to the race detector, which watches shared memory."""
    proxy = ins.modifiers[:2] == ("proxy", "async")
    reaches = not proxy or "global" not in ins.modifiers
    initialises = ins.modifiers[0] == "mbarrier_init"
    tensormap = ins.modifiers[0] == "proxy" and ins.modifiers[1].split("::")[0] == "tensormap"
    scope = scope_of(ins)
    known = ("proxy", "mbarrier_init", "acq_rel", "sc", "cta", "gl", "sys", "acquire", "release")
    if ins.modifiers[0] not in known or (ins.modifiers[0] == "proxy" and not proxy and not tensormap):
        raise ins.error("is a fence that the emulator lacks")
    if tensormap and ins.operands:
        return tensor_map_only(decoder, ins)

    def step(unit: Unit, mask: Mask) -> None:
        race = unit.batch.race
        if race and proxy and reaches:
            race.fence(unit, mask, barriers_only=False)
        elif race and not proxy and not tensormap:
            if initialises:
                race.fence(unit, mask, barriers_only=True)
            race.publish(unit, mask, scope)

    return step


def tensor_map_only(decoder: Decoder, ins: Instruction) -> Step:
    """What an instruction does to a tensor map is a matter of caches; it is only seen to that one lies there."""
    slot, offset = decoder.address(ins.operands[0], ins)

    def step(unit: Unit, mask: Mask) -> None:
        address = uniform(unit, slot, mask, ins) + offset
        if address not in unit.batch.maps:
            raise ins.error(f"names address {address:#x}, where a tensor map was expected")

    return step


def _prefetch(decoder: Decoder, ins: Instruction) -> Step:
    return (tensor_map_only if "tensormap" in ins.modifiers else nothing)(decoder, ins)


# ---- warp ------------------------------------------------------------------------------------------------------------


def _members(decoder: Decoder, operand: Operand, ins: Instruction) -> None:
    """Only the full mask, or a register whose value is not looked at: the emulator runs a warp's lanes together."""
    if isinstance(operand, Immediate) and operand.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise ins.error(f"names member lanes {operand.value:#x}, where all 32 were expected")


def _elect(decoder: Decoder, ins: Instruction) -> Step:
    """elect.sync d|p, members: p is true in the lowest active lane, d its number."""
    lane_target, chosen = (decoder.target(item, ins) for item in items(ins.operands[0]))
    _members(decoder, ins.operands[1], ins)
    first = np.arange(LANES).reshape(1, 1, LANES) == 0
    zero = np.zeros((1, 1, 1), np.uint32)

    def step(unit: Unit, mask: Mask) -> None:
        leader, lane = first, zero
        if mask is not None:
            lane = mask.argmax(axis=2)[..., None].astype(np.uint32)
            leader = mask & (np.arange(LANES) == lane)
        if chosen is not None:
            unit.write(chosen, leader, mask)
        if lane_target is not None:
            unit.write(lane_target, lane, mask)

    return step


def _shuffle(decoder: Decoder, ins: Instruction) -> Step:
    """shfl.sync: d|p, a, b, clamp and segment, members."""
    mode = ins.modifiers[1]
    if ins.modifiers[0] != "sync" or mode not in ("idx", "up", "down", "bfly"):
        raise ins.error("is a shuffle that the emulator lacks")
    targets = [decoder.target(item, ins) for item in items(ins.operands[0])]
    slots = [decoder.source(operand, "b32", ins) for operand in ins.operands[1:4]]
    _members(decoder, ins.operands[4], ins)
    lane = np.arange(LANES, dtype=np.int64).reshape(1, 1, LANES)

    def apply(value: Array, other: Array, control: Array) -> Any:
        b, c = other.astype(np.int64) & 31, control.astype(np.int64)
        clamp, segment = c & 31, c >> 8 & 31
        low, high = lane & segment, (lane & segment) | (clamp & ~segment & 31)
        source = {"idx": low | (b & ~segment & 31), "up": lane - b, "down": lane + b, "bfly": lane ^ b}[mode]
        valid = source >= high if mode == "up" else source <= high
        source = np.where(valid, source, lane)
        if value.shape[2] == 1:
            taken = value
        else:
            shape = np.broadcast_shapes(value.shape, source.shape)
            taken = np.take_along_axis(np.broadcast_to(value, shape), np.broadcast_to(source, shape), axis=2)
        return (taken, valid) if len(targets) > 1 else taken

    compute = pure(decoder, ins, slots, targets, apply)

    def step(unit: Unit, mask: Mask) -> None:
        whole_warps(unit, mask, ins)
        compute(unit, mask)

    return step


def _vote(decoder: Decoder, ins: Instruction) -> Step:
    mode = ins.modifiers[1]
    if ins.modifiers[0] != "sync" or mode not in ("all", "any", "uni", "ballot"):
        raise ins.error("is a vote that the emulator lacks")
    target = decoder.target(ins.operands[0], ins)
    slot = decoder.source(ins.operands[1], "pred", ins)
    negated = getattr(ins.operands[1], "negated", False)
    _members(decoder, ins.operands[2], ins)
    weights = (1 << np.arange(LANES, dtype=np.uint64)).astype(np.uint64)

    def step(unit: Unit, mask: Mask) -> None:
        votes = np.broadcast_to(unit.registers[slot] ^ negated, (*unit.registers[slot].shape[:2], LANES))
        active = True if mask is None else mask
        every = (votes | ~np.asarray(active)).all(axis=2, keepdims=True)
        some = (votes & active).any(axis=2, keepdims=True)
        if mode == "ballot":
            result = ((votes & active) * weights).sum(axis=2, keepdims=True).astype(np.uint32)
        else:
            result = {"all": every, "any": some, "uni": every | ~some}[mode]
        if target is not None:
            unit.write(target, result, mask)

    return step


def _match(decoder: Decoder, ins: Instruction) -> Step:
    """match.any.sync: the active lanes that have this lane's value, as a mask."""
    if ins.modifiers[:2] != ("any", "sync"):
        raise ins.error("is a match that the emulator lacks")
    target, slot = decoder.target(ins.operands[0], ins), decoder.source(ins.operands[1], ins.modifiers[-1], ins)
    _members(decoder, ins.operands[2], ins)
    weights = (1 << np.arange(LANES, dtype=np.uint64)).astype(np.uint64)

    def step(unit: Unit, mask: Mask) -> None:
        value = np.broadcast_to(unit.registers[slot], (*unit.registers[slot].shape[:2], LANES))
        same = value[..., :, None] == value[..., None, :]
        if mask is not None:
            same = same & mask[..., None, :]
        if target is not None:
            unit.write(target, (same * weights).sum(axis=3).astype(np.uint32), mask)

    return step


def _reduce(decoder: Decoder, ins: Instruction) -> Step:
    """redux.sync over the lanes of a warp."""
    operation, type = ins.modifiers[-2:]
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }.get(operation)
    if ins.modifiers[0] != "sync" or function is None or type not in ("u32", "s32", "b32"):
        raise ins.error("is a reduction that the emulator lacks")
    target, slot = decoder.target(ins.operands[0], ins), decoder.source(ins.operands[1], type, ins)
    _members(decoder, ins.operands[2], ins)

    def step(unit: Unit, mask: Mask) -> None:
        whole_warps(unit, mask, ins)
        value = np.broadcast_to(unit.registers[slot], (*unit.registers[slot].shape[:2], LANES)).view(DTYPES[type])
        reduced = function.reduce(value, axis=2, keepdims=True, dtype=DTYPES[type])
        if target is not None:
            unit.write(target, reduced.view(np.uint32), mask)

    return step


def _active_mask(decoder: Decoder, ins: Instruction) -> Step:
    target = decoder.target(ins.operands[0], ins)
    weights = (1 << np.arange(LANES, dtype=np.uint64)).astype(np.uint64)

    def step(unit: Unit, mask: Mask) -> None:
        value = (unit.everyone(mask) * weights).sum(axis=2, keepdims=True).astype(np.uint32)
        if target is not None:
            unit.write(target, value, mask)

    return step


# ---- control flow ----------------------------------------------------------------------------------------------------


def _branch(decoder: Decoder, ins: Instruction) -> Step:
    """The guard is handled here: a branch is the one instruction whose guard splits the threads."""
    target = decoder.label(ins.operands[0], ins)
    if ins.guard is None:
        return lambda unit, mask: target
    slot, negated = decoder.source(ins.guard, "pred", ins), ins.guard.negated

    def step(unit: Unit, mask: Mask) -> Any:
        taken = unit.registers[slot]
        if taken.size == 1:
            return target if bool(taken.item()) != negated else None
        if negated:
            taken = ~taken
        if mask is None:
            if taken.all():
                return target
            return (target, np.broadcast_to(taken, unit.shape)) if taken.any() else None
        part = taken & mask
        if not part.any():
            return None
        return target if np.array_equal(part, mask) else (target, part)

    return step


def _exit(decoder: Decoder, ins: Instruction) -> Step:
    return lambda unit, mask: EXIT


def _trap(decoder: Decoder, ins: Instruction) -> Step:
    def step(unit: Unit, mask: Mask) -> None:
        raise ins.error("stops the kernel with an error")

    return step


COMPILE: dict[str, Callable[[Decoder, Instruction], Step]] = {
    "bar": _bar,
    "barrier": _bar,
    "mbarrier": _mbarrier,
    "fence": _fence,
    "membar": _fence,
    "mapa": _map_address,
    "prefetch": _prefetch,
    "elect": _elect,
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _reduce,
    "activemask": _active_mask,
    "bra": _branch,
    "ret": _exit,
    "exit": _exit,
    "trap": _trap,
    "setmaxnreg": nothing,
    "griddepcontrol": nothing,
    "nanosleep": nothing,
}
