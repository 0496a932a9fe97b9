"""Races in shared memory, and between CTAs in global memory, by vector clocks.

Each warp has a clock for every agent of its cluster: how far it has seen that agent's work. Agents are the warps, the cp.async of
each warp (its clock counts commit groups), the bulk stores of each warp (bulk groups), the wgmma of each warpgroup (commit groups)
and the copies that complete on each mbarrier (phases). Barriers and mbarriers hand clocks on from those who arrive to those who wait. An access is a race where
the last write to its bytes, or for a write any earlier read, lies beyond what the warp has seen. That does not depend on the
schedule: a race is found even where lockstep gives the right result.

In global memory warps are ordered by what they leave there: a release hands the warp's clock on to whoever acquires at the same
address, and a relaxed access what the last fence before it has published, or what the next one after it will have learnt. A plain
access of what a warp of another CTA wrote, or a write of what it read, is a race where that lies beyond what the warp has seen. Of
several readers of a place the last is kept. A kernel without atomics and ordered accesses of global memory is not watched there, nor is
what cp.async and the copy engine read and write there.

Beside what a warp has seen it is kept how much of that went through fence.proxy.async: the copy engine may only touch what
ordinary instructions wrote where a fence lies between. Inside a warp, lanes are taken to be ordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rungs.emulator.memory import SHARED_BASE
from rungs.emulator.metrics import Array
from rungs.emulator.parser import EmulationError, Instruction, Kernel
from rungs.emulator.state import DTYPES, Batch, Finding, Mask, Unit

MBARRIERS = 64
ORDERED = {"acquire", "release", "acq_rel", "relaxed", "volatile"}
SCOPES = ("cta", "cluster", "gpu")
Domain = tuple[str, int]
"""A scope and which of its kind."""
WARPGROUP = 4  # warps
SEEN, FENCED = 0, 1


def granule(kernel: Kernel) -> int:
    """Bytes of shared memory that are watched together: the smallest access of the kernel, so that neighbours never mix."""
    smallest = 16
    for ins in kernel.code:
        if ins.opcode in ("ld", "st") and not {"param", "global"} & set(ins.modifiers):
            smallest = min(smallest, _bytes(ins))
        elif ins.opcode == "cp" and ins.modifiers[1] == "ca":
            smallest = min(smallest, getattr(ins.operands[2], "value", 4))
    return smallest


def in_global(ins: Instruction) -> bool:
    """Whether a load, a store or an atomic is of global memory, as far as the instruction says."""
    return not {"param", "shared", "local", "const"} & {modifier.split("::")[0] for modifier in ins.modifiers}


def synchronises(ins: Instruction) -> bool:
    """Whether it is an access of global memory by which threads of several CTAs may be ordered."""
    ordered = ins.opcode in ("atom", "red") or (ins.opcode in ("ld", "st") and ORDERED & set(ins.modifiers))
    return bool(ordered) and "async" not in ins.modifiers and in_global(ins)


class Detector:
    """Watches the shared memory of a batch, and its global memory where CTAs talk there. Clocks are (CTAs, warps, seen or fenced,
    agents): the agents of the cluster, and where CTAs talk every warp of the batch.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.code = batch, batch.kernel.code
        self.ctas, self.warps = batch.ctas, batch.warps
        self.granule = granule(batch.kernel)
        self.cells = batch.shared.window // self.granule
        self.groups = -(-self.warps // WARPGROUP)
        self.agents = 3 * self.warps + self.groups + MBARRIERS  # of a CTA
        self.base = batch.ranks * self.agents  # the first agent of each CTA
        self.talks = any(synchronises(ins) for ins in self.code)
        self.wide = batch.cluster * self.agents  # the first of the warps of the batch
        width = self.wide + self.talks * self.ctas * self.warps
        self.clock = np.zeros((self.ctas, self.warps, 2, width), np.int32)
        self._tick(*np.divmod(np.arange(self.ctas * self.warps), self.warps))
        if self.talks:
            self.spoken = Spoken(self)
        cells = self.ctas * self.cells
        self.writer = np.full(cells, -1, np.int16)
        self.written = np.zeros(cells, np.int32)
        self.write_pc = np.zeros(cells, np.int32)
        self.mbarrier = np.full(cells, -1, np.int32)  # the mbarrier.init of the mbarrier that lies there
        readers = 2 * self.warps + self.groups  # warps, then their bulk stores, then the products of warpgroups
        self.remote = any(ins.opcode == "ld" and "shared::cluster" in ins.modifiers for ins in batch.kernel.code)
        readers += (
            batch.cluster * self.warps if self.remote else 0
        )  # then the warps of the cluster, where they read here
        self.read, self.read_pc = np.zeros((cells, readers), np.int32), np.zeros((cells, readers), np.int32)
        self.published = np.zeros_like(self.clock)
        of_cluster = (self.ctas, batch.cluster * self.agents)
        self.reached, self.reach_pc, self.arrived = (np.zeros(of_cluster, np.int32) for _ in range(3))
        self.sent: dict[
            int, Array
        ] = {}  # mbarrier -> phase in which the last copy of another CTA completes, and its pc, by CTA
        self.numbers: dict[int, int] = {}
        self.inits: dict[int, dict[str, Any]] = {}
        self.memo: dict[Any, Any] = {}
        self.found: dict[tuple[str, int, int], Finding] = {}

    # ---- reports ----

    def report(self, kind: str, pc: int, other: int, sentence: str) -> None:
        """Keep the first finding of each kind between two instructions."""
        ins, earlier = self.code[pc], self.code[other] if other >= 0 else None
        lines = (ins.line,) if earlier is None else (ins.line, earlier.line)
        sources = (ins.source,) if earlier is None else (ins.source, earlier.source)
        self.found.setdefault((kind, pc, other), Finding(kind, f"{ins.where} {sentence}.", lines, sources))

    def _races(self, bad: Array, cells: Array, pcs: Array, pc: int, sentence: str, kind: str = "race") -> None:
        """Report the accesses in `bad`; `pcs` are the instructions that they race with, `sentence` has a place for one."""
        if not bad.any():
            return
        for other in np.unique(pcs[bad]):
            cell = int(cells[bad & (pcs == other)].flat[0])
            byte = cell % self.cells * self.granule - SHARED_BASE
            cta = tuple(int(i) for i in self.batch.ids[cell // self.cells])
            where = self.code[int(other)].where
            self.report(kind, pc, int(other), sentence.format(byte=byte, cta=cta, other=where))

    # ---- accesses of threads ----

    def _cells(self, unit: Unit, addresses: Array, size: int) -> Array:
        """Cells that each warp touches, (CTAs, warps, cells); remembered by the identity of the addresses."""
        key = (id(addresses), unit.first, unit.warps)
        held = self.memo.get(key)
        if held is None:
            many = max(1, size // self.granule)
            cells = (addresses // self.granule)[..., None] + np.arange(many)
            cells = cells.reshape(*cells.shape[:2], -1) + np.arange(self.ctas)[:, None, None] * self.cells
            if len(self.memo) > 512:
                self.memo.clear()
            held = self.memo[key] = (addresses, cells)
        return held[1]

    def _active(self, mask: Mask, cells: Array, lanes: int) -> Array | bool:
        return True if mask is None else np.repeat(mask[..., :lanes], cells.shape[2] // lanes, axis=2)

    def _clocks(self, unit: Unit) -> Array:
        return self.clock[:, unit.first : unit.first + unit.warps]

    def _own(self, unit: Unit) -> Array:
        """Each warp's own clock, (CTAs, warps, 1)."""
        every = unit.first + np.arange(unit.warps)
        return self.clock[np.arange(self.ctas)[:, None], every, SEEN, self.base[:, None] + every][..., None]

    def read_by(self, unit: Unit, mask: Mask, addresses: Array, size: int, pc: int) -> None:
        """Threads read `size` bytes at `addresses` (CTAs or 1, warps, lanes)."""
        cells = self._cells(unit, addresses, size)
        active = self._active(mask, cells, addresses.shape[2])
        writer = self.writer[cells]
        self._unwritten((writer < 0) & active, cells, pc)
        seen = np.take_along_axis(self._clocks(unit)[:, :, SEEN], np.maximum(writer, 0).astype(np.intp), axis=2)
        bad = (seen < self.written[cells]) & active
        if bad.any():
            self._races(bad, cells, self.write_pc[cells], pc, _READ)
        warp = (unit.first + np.arange(unit.warps))[None, :, None]
        own = self._own(unit)
        if mask is None:
            self.read[cells, warp] = own
            self.read_pc[cells, warp] = pc
        else:
            where = (cells[active], np.broadcast_to(warp, cells.shape)[active])
            self.read[where] = np.broadcast_to(own, cells.shape)[active]
            self.read_pc[where] = pc

    def read_in_cluster(self, unit: Unit, everyone: Array, owners: Array, addresses: Array, size: int, pc: int) -> None:
        """Threads (`everyone` that is active) read `size` bytes at `addresses` of the CTAs `owners`, all (CTAs, warps, 32)."""
        ctas, warps, _ = np.nonzero(everyone)
        warps = warps + unit.first
        cells = (addresses[everyone] // self.granule)[:, None] + np.arange(max(1, size // self.granule))
        cells += owners[everyone][:, None] * self.cells
        writer, clocks = self.writer[cells], self.clock[ctas, warps, SEEN]
        self._unwritten(writer < 0, cells, pc)
        seen = np.take_along_axis(clocks, np.maximum(writer, 0).astype(np.intp), axis=1)
        self._races(seen < self.written[cells], cells, self.write_pc[cells], pc, _READ)
        column = 2 * self.warps + self.groups + self.batch.ranks[ctas] * self.warps + warps
        self.read[cells, column[:, None]] = clocks[np.arange(len(ctas)), self.base[ctas] + warps][:, None]
        self.read_pc[cells, column[:, None]] = pc
        of = np.zeros(self.ctas, np.int64)
        for owner in np.unique(owners[everyone] - ctas):  # how far from its own each reaches
            there = owners[everyone] - ctas == owner
            of[ctas[there]] = ctas[there] + owner
            self.reaches(ctas[there], warps[there], of, pc)

    def _unwritten(self, bad: Array, cells: Array, pc: int) -> None:
        if bad.any():
            byte = int(cells[bad].flat[0]) % self.cells * self.granule - SHARED_BASE
            self.report("unwritten", pc, -1, f"reads byte {byte} of shared memory, where a written value was expected")

    def write_by(
        self, unit: Unit, mask: Mask, addresses: Array, size: int, pc: int, groups: Array | None = None
    ) -> None:
        """Threads write; with `groups` (each thread's commit group) it is their cp.async that does, some time later."""
        cells = self._cells(unit, addresses, size)
        lanes = addresses.shape[2]
        active = self._active(mask, cells, lanes)
        clocks = self._clocks(unit)
        self._check_write(clocks[:, :, SEEN], cells, active, pc, self.base[:, None])
        agent = self.base[:, None, None] + unit.first + np.arange(unit.warps)[None, :, None]
        stamp = self._own(unit)
        if groups is not None:
            agent = agent + self.warps
            stamp = np.repeat(np.broadcast_to(groups, unit.shape)[..., :lanes] + 1, cells.shape[2] // lanes, axis=2)
        agents = np.broadcast_to(agent, cells.shape)
        part = slice(None) if active is True else active
        self.writer[cells[part]] = agents[part]
        self.written[cells[part]] = np.broadcast_to(stamp, cells.shape)[part]
        self.write_pc[cells[part]] = pc
        self._races((self.writer[cells] != agents) & active, cells, np.full(cells.shape, pc), pc, _TWICE)

    def _check_write(self, seen: Array, cells: Array, active: Array | bool, pc: int, base: Array) -> None:
        """`seen` (..., agents) of whoever writes `cells` (..., cells) of the CTA whose first agent is `base` (...)."""
        mbarrier = self.mbarrier[cells]
        self._races((mbarrier >= 0) & active, cells, mbarrier, pc, _MBARRIER)
        writer = self.writer[cells]
        known = np.take_along_axis(seen, np.maximum(writer, 0).astype(np.intp), axis=-1)
        bad = (known < self.written[cells]) & (writer >= 0) & active
        if bad.any():
            self._races(bad, cells, self.write_pc[cells], pc, _WRITE)
        every = seen
        if self.batch.cluster > 1:
            own = base[..., None] + np.arange(self.agents)
            seen = np.take_along_axis(seen, np.broadcast_to(own, (*seen.shape[:-1], self.agents)), axis=-1)
        readers = np.concatenate(
            [seen[..., : self.warps], seen[..., 2 * self.warps : 3 * self.warps + self.groups]], axis=-1
        )
        if self.remote:
            warps = (np.arange(self.batch.cluster)[:, None] * self.agents + np.arange(self.warps)).reshape(-1)
            readers = np.concatenate([readers, every[..., warps]], axis=-1)
        late = self.read[cells] > readers[..., None, :]
        if late.any():
            late &= np.asarray(active)[..., None]
            spread = np.broadcast_to(cells[..., None], late.shape)
            self._races(late, spread, self.read_pc[cells], pc, _OVERWRITE)

    # ---- accesses of the copy engine ----

    def _bulk_cells(self, rows: Array, size: int = 16) -> Array:
        """Cells of rows of `size` bytes, (copies, cells)."""
        many = size // self.granule
        return (rows.reshape(len(rows), -1, 1) * many + np.arange(many)).reshape(len(rows), -1)

    def bulk_write(
        self,
        issue: Any,
        rows: Array,
        barrier: Any,
        pc: int,
        targets: Array,
        *,
        size: int = 16,
        generic: bool = False,
    ) -> None:
        """Copies into `rows` of `size` bytes of shared memory of the CTAs `targets` that complete on their `barrier`; `generic`:
        what ordinary instructions wrote there before needs no fence."""
        cells = self._bulk_cells(rows, size)
        clocks = self.clock[issue.ctas, issue.unit.first + issue.warps]
        self._check_write(clocks[:, SEEN], cells, True, pc, self.base[targets])
        if not generic:
            self._check_fence(clocks, cells, pc, _FENCE_WRITE)
        number, stamps = self.number(barrier), barrier.phase[targets] + 1
        order = np.arange(len(cells), dtype=np.int32)[:, None]
        self.written[cells] = order  # of copies into one place the last stands there
        self._races(self.written[cells] != order, cells, np.full(cells.shape, pc), pc, _AT_ONCE)
        self.writer[cells] = number + self.base[targets][:, None]
        self.written[cells] = stamps[:, None]
        self.write_pc[cells] = pc
        sent = targets != issue.ctas
        if sent.any():
            last = self.sent.setdefault(number, np.zeros((2, self.ctas), np.int64))
            np.maximum.at(last[0], targets[sent], stamps[sent])
            last[1, targets[sent]] = pc

    def bulk_read(self, issue: Any, rows: Array, pc: int, groups: Array) -> None:
        """Copies out of shared memory; `groups` is the bulk group of each thread."""
        warps = issue.unit.first + issue.warps
        self._async_read(self.clock[issue.ctas, warps], rows, pc, self.warps + warps, groups + 1)

    def multiplied(self, ctas: Array, groups: Array, rows: Array, pc: int, stamps: Array) -> None:
        """The wgmma of warpgroups read `rows` of 16 bytes (warpgroups, ...), in the commit groups `stamps`."""
        warps = groups[:, None] * WARPGROUP + np.arange(WARPGROUP)
        clocks = self.clock[ctas[:, None], warps].min(axis=1)  # what every warp has seen
        self._async_read(clocks, rows, pc, 2 * self.warps + groups, stamps + 1)

    def _async_read(self, clocks: Array, rows: Array, pc: int, readers: Array, stamps: Array) -> None:
        cells = self._bulk_cells(rows)
        writer = self.writer[cells]
        self._unwritten(writer < 0, cells, pc)
        seen = np.take_along_axis(clocks[:, SEEN], np.maximum(writer, 0).astype(np.intp), axis=1)
        self._races(seen < self.written[cells], cells, self.write_pc[cells], pc, _READ)
        self._check_fence(clocks, cells, pc, _FENCE_READ)
        self.read[cells, readers[:, None]] = stamps[:, None]
        self.read_pc[cells, readers[:, None]] = pc

    def _check_fence(self, clocks: Array, cells: Array, pc: int, sentence: str) -> None:
        writer = self.writer[cells]
        ordinary = (writer >= 0) & (writer % self.agents < 2 * self.warps)
        if not ordinary.any():
            return
        at = np.maximum(writer, 0).astype(np.intp)
        written = self.written[cells]
        seen, fenced = (np.take_along_axis(clocks[:, which], at, axis=1) for which in (SEEN, FENCED))
        bad = ordinary & (seen >= written) & (fenced < written)
        self._races(bad, cells, self.write_pc[cells], pc, sentence, "missing fence")

    # ---- what orders ----

    def each(self, unit: Unit, mask: Mask) -> tuple[Array, Array]:
        """CTAs and warps that take part."""
        if mask is None:
            ctas, warps = np.divmod(np.arange(self.ctas * unit.warps), unit.warps)
        else:
            ctas, warps = np.nonzero(mask.any(axis=2))
        return ctas, unit.first + warps

    def release(
        self, unit: Unit, mask: Mask, clock: Array | None, owners: Array | None = None, *, relaxed: bool = False
    ) -> Array:
        """The clock (CTAs, 2, agents) of a barrier with that of the arriving warps in it.

        `owners`: for each CTA the one at whose barrier its warps arrive, where that is not its own. A `relaxed` arrival has
        only the clock of the warp's last fence.
        """
        ctas, warps = self.each(unit, mask)
        held = np.zeros((self.ctas, *self.clock.shape[2:]), np.int32) if clock is None else clock.copy()
        given = (self.published if relaxed else self.clock)[ctas, warps]
        np.maximum.at(held, ctas if owners is None else owners[ctas], given)
        self._tick(ctas, warps)
        return held

    def _tick(self, ctas: Array, warps: Array) -> None:
        """What these warps do from here on, nobody has seen who has seen what they did up to here."""
        self.clock[ctas, warps, SEEN, self.base[ctas] + warps] += 1
        if self.talks:
            self.clock[ctas, warps, SEEN, self.wide + ctas * self.warps + warps] += 1

    def publish(self, unit: Unit, mask: Mask, scope: str) -> None:
        """Warps execute a fence, after which a relaxed arrival hands on what they have seen so far."""
        ctas, warps = self.each(unit, mask)
        if self.talks:
            self.spoken.fence(ctas, warps, scope)
        self.published[ctas, warps] = self.clock[ctas, warps]
        self._tick(ctas, warps)

    def reaches(self, ctas: Array, warps: Array, owners: Array, pc: int) -> None:
        """Warps reach into the shared memory of the CTA in `owners` of their own, which has to be there still."""
        own = self.base[ctas] + warps
        self.reached[owners[ctas], own] = self.clock[ctas, warps, SEEN, own]
        self.reach_pc[owners[ctas], own] = pc

    def meets(self, unit: Unit, mask: Mask) -> None:
        """Warps arrive at the cluster's barrier, `met` once all have: what they reached into before is then over, also where the
        arrival is relaxed and hands on nothing that was written."""
        ctas, warps = self.each(unit, mask)
        self.arrived[ctas, self.base[ctas] + warps] = self.clock[ctas, warps, SEEN, self.base[ctas] + warps]

    def met(self, unit: Unit, mask: Mask) -> None:
        ctas = np.unique(self.each(unit, mask)[0])
        of_cluster = self.arrived.reshape(-1, self.batch.cluster, self.arrived.shape[1]).max(axis=1)
        over = self.reached[ctas] <= of_cluster[ctas // self.batch.cluster]
        self.reached[ctas] = np.where(over, 0, self.reached[ctas])

    def end(self) -> None:
        """Report where a CTA may have ended before another that reached into it: no warp of it knew of that, nor met it later."""
        late = self.reached > self.clock[:, :, SEEN, : self.wide].max(axis=1)
        for cta, agent in np.argwhere(late):
            which = tuple(int(i) for i in self.batch.ids[cta])
            sentence = f"reaches into the shared memory of CTA {which}, which may have ended by then"
            where = ", where a barrier.cluster was expected before its end"
            self.report("left behind", int(self.reach_pc[cta, agent]), -1, sentence + where)
        for number, (stamps, pcs) in self.sent.items():
            seen = self.clock[np.arange(self.ctas), :, SEEN, self.base + number].max(axis=1)
            for cta in np.flatnonzero(seen < stamps):
                which = tuple(int(i) for i in self.batch.ids[cta])
                sentence = f"writes into the shared memory of CTA {which}, which may have ended by then"
                where = ", where that CTA was expected to wait for the mbarrier on which it completes"
                self.report("left behind", int(pcs[cta]), -1, sentence + where)

    def acquire(self, unit: Unit, mask: Mask, clock: Array | None, barrier: Any = None) -> None:
        """Waiting warps learn a barrier's clock; of an mbarrier also that the copies of its completed phases have landed."""
        ctas, warps = self.each(unit, mask)
        if clock is not None:
            self.clock[ctas, warps] = np.maximum(self.clock[ctas, warps], clock[ctas])
        if barrier is not None:
            number = self.number(barrier) + self.base[ctas]
            seen = self.clock[ctas, warps, SEEN, number]
            self.clock[ctas, warps, SEEN, number] = np.maximum(seen, barrier.phase[ctas])

    def complete(self, barrier: Any, done: Array) -> tuple[Array | None, Array | None]:
        """The clocks of an mbarrier after its phase: what waiters learn, and what the next phase has gathered."""
        if barrier.clock is None:
            return barrier.done_clock, None
        before = np.zeros_like(barrier.clock) if barrier.done_clock is None else barrier.done_clock
        at = done[:, None, None]
        return np.where(at, np.maximum(before, barrier.clock), before), np.where(at, 0, barrier.clock)

    def complete_cluster(self, barrier: Any, done: Array) -> tuple[Array, Array]:
        """As complete, where every CTA of a cluster learns what all of it have gathered."""
        gathered = barrier.clock.reshape(-1, self.batch.cluster, *barrier.clock.shape[1:]).max(axis=1)
        gathered = np.repeat(gathered, self.batch.cluster, axis=0)
        before = np.zeros_like(gathered) if barrier.done_clock is None else barrier.done_clock
        at = done[:, None, None]
        return np.where(at, np.maximum(before, gathered), before), np.where(at, 0, barrier.clock)

    def waited(self, unit: Unit, mask: Mask, landed: Array, *, bulk: bool = False) -> None:
        """Threads know that their commit groups, or bulk groups, before `landed` are done."""
        ctas, warps = self.each(unit, mask)
        most = np.broadcast_to(landed, unit.shape).max(axis=2)[ctas, warps - unit.first]
        agents = self.base[ctas] + warps + (2 if bulk else 1) * self.warps
        self.clock[ctas, warps, SEEN, agents] = np.maximum(self.clock[ctas, warps, SEEN, agents], most)

    def retired(self, ctas: Array, groups: Array, landed: Array) -> None:
        """Warpgroups know that their wgmma before the commit groups `landed` are done."""
        agents = self.base[ctas] + 3 * self.warps + groups
        for warp in range(WARPGROUP):
            at = (ctas, groups * WARPGROUP + warp, SEEN, agents)
            self.clock[at] = np.maximum(self.clock[at], landed)

    def copied(self, clock: Array | None, first: int, mask: Array, landed: Array) -> Array:
        """The clock of an mbarrier at which cp.async arrive: of the warps from `first` on, the groups before `landed`."""
        held = np.zeros((self.ctas, *self.clock.shape[2:]), np.int32) if clock is None else clock.copy()
        ctas, warps = np.nonzero(mask.any(axis=2))
        most = np.where(mask, landed, 0).max(axis=2)[ctas, warps]
        agents = self.warps + first + warps
        held[ctas, SEEN, agents] = np.maximum(held[ctas, SEEN, agents], most)  # each warp is named once
        return held

    def fence(self, unit: Unit, mask: Mask, *, barriers_only: bool) -> None:
        ctas, warps = self.each(unit, mask)
        for init in self.inits.values():
            init["fenced"][ctas] |= init["warp"][ctas] == warps
        if not barriers_only:
            self.clock[ctas, warps, FENCED] = np.maximum(*self.clock[ctas, warps].swapaxes(0, 1))
            self._tick(ctas, warps)

    # ---- mbarriers ----

    def number(self, barrier: Any) -> int:
        """The agent of the copies that complete on an mbarrier."""
        if barrier.address not in self.numbers:
            if len(self.numbers) == MBARRIERS:
                raise EmulationError(f"The kernel has more than {MBARRIERS} mbarriers, which the race detector lacks.")
            self.numbers[barrier.address] = 3 * self.warps + self.groups + len(self.numbers)
        return self.numbers[barrier.address]

    def initialised(self, unit: Unit, mask: Mask, barrier: Any, pc: int) -> None:
        ctas, warps = self.each(unit, mask)
        init = self.inits.setdefault(
            barrier.address,
            {"warp": np.zeros(self.ctas, int), "clock": np.zeros(self.ctas, int), "fenced": np.zeros(self.ctas, bool)},
        )
        init["warp"][ctas], init["clock"][ctas] = warps, self.clock[ctas, warps, SEEN, self.base[ctas] + warps]
        init["fenced"][ctas], init["pc"] = False, pc
        self.mbarrier[self._of_mbarrier(ctas, barrier)] = pc

    def invalidated(self, unit: Unit, mask: Mask, barrier: Any) -> None:
        self.mbarrier[self._of_mbarrier(self.each(unit, mask)[0], barrier)] = -1

    def _of_mbarrier(self, ctas: Array, barrier: Any) -> Array:
        """Cells of the mbarrier, (CTAs, cells)."""
        return ctas[:, None] * self.cells + barrier.address // self.granule + np.arange(max(1, 8 // self.granule))

    def uses(self, unit: Unit, mask: Mask, barrier: Any, pc: int, *, owners: Array | None = None) -> None:
        """Threads arrive at an mbarrier or wait for it. `owners`: for each CTA whose it is, where it is not its own."""
        ctas, warps = self.each(unit, mask)
        self._uses(ctas, warps, barrier, pc, ctas if owners is None else owners[ctas], bulk=False)

    def bulk_uses(self, issue: Any, barrier: Any, pc: int, owners: Array) -> None:
        """Threads hand an mbarrier to the copy engine, for each copy that of the CTA in `owners`."""
        self._uses(issue.ctas, issue.unit.first + issue.warps, barrier, pc, owners, bulk=True)

    def _uses(self, ctas: Array, warps: Array, barrier: Any, pc: int, owners: Array, *, bulk: bool) -> None:
        init = self.inits[barrier.address]
        other = self.code[init["pc"]].where
        of = self.base[owners] + init["warp"][owners]
        if (self.clock[ctas, warps, SEEN, of] < init["clock"][owners]).any():
            self.report(
                "race",
                pc,
                init["pc"],
                f"uses an mbarrier that {other} initialises, with nothing that orders the two, where a barrier was expected"
                " between them",
            )
        if bulk and not init["fenced"][owners].all():
            self.report(
                "missing fence",
                pc,
                init["pc"],
                f"completes on an mbarrier that {other} initialises, where a fence.mbarrier_init or fence.proxy.async was"
                " expected after the initialisation",
            )


class Spoken:
    """What the CTAs of a batch write to each other in global memory. Agents are its warps.

    What is handed on, and to whom, is kept by domain: the whole batch (gpu), a cluster, a CTA. A release of a scope reaches the domains
    of its CTA up to that scope, an acquire learns from those of its own.
    """

    def __init__(self, detector: Detector) -> None:
        self.detector, self.memory = detector, detector.batch.memory
        sizes = [_bytes(ins) for ins in detector.code if ins.opcode in ("ld", "st", "atom", "red") and in_global(ins)]
        self.granule = min(16, *sizes) if sizes else 16
        cells = len(self.memory.arena) // self.granule
        self.writer, self.reader = (np.full(cells, -1, np.int32) for _ in range(2))
        self.written, self.read, self.write_pc, self.read_pc = (np.zeros(cells, np.int32) for _ in range(4))
        self.write_ordered, self.read_ordered = (np.zeros(cells, bool) for _ in range(2))
        self.handed: dict[int, dict[Domain, Array]] = {}  # offset -> the clocks that releases have left there
        # What each warp's relaxed loads saw since its last fence.
        self.pending: dict[tuple[int, int], dict[Domain, Array]] = {}
        self.published: dict[tuple[int, int], dict[str, Array]] = {}  # what each warp's last fence of a scope published

    def access(
        self, unit: Unit, mask: Mask, offsets: Array, size: int, pc: int, *, writes: bool, ordered: bool
    ) -> None:
        """Threads read or write `size` bytes at `offsets` of global memory, (CTAs, warps, 32). Ordered accesses, atomics among them,
        do not race with each other.
        """
        detector, everyone = self.detector, unit.everyone(mask)
        ctas, warps, _ = np.nonzero(everyone)
        warps = warps + unit.first
        cells = offsets[everyone][:, None] // self.granule + np.arange(max(1, size // self.granule))
        clocks = detector.clock[ctas, warps, SEEN, detector.wide :]
        agents = ctas * detector.warps + warps
        stamps = clocks[np.arange(len(agents)), agents]
        as_writer = (self.writer, self.written, self.write_pc, self.write_ordered)
        as_reader = (self.reader, self.read, self.read_pc, self.read_ordered)
        earlier = [(as_writer, _GLOBAL_WRITE if writes else _GLOBAL_READ)]
        earlier += [(as_reader, _GLOBAL_OVERWRITE)] if writes else []
        for (who, when, pcs, strong), sentence in earlier:
            other = who[cells]
            seen = np.take_along_axis(clocks, np.maximum(other, 0).astype(np.intp), axis=1)
            bad = (other >= 0) & (other // detector.warps != ctas[:, None]) & (seen < when[cells])
            bad &= ~(strong[cells] & ordered)
            self._races(bad, cells, other, pcs[cells], pc, sentence)
        who, when, pcs, strong = as_writer if writes else as_reader
        who[cells], when[cells], pcs[cells], strong[cells] = agents[:, None], stamps[:, None], pc, ordered
        if writes and not ordered:
            other = self.writer[cells]  # of those that write one place in this step the last stands there
            self._races(other // detector.warps != ctas[:, None], cells, other, pcs[cells], pc, _GLOBAL_WRITE)
            left = np.fromiter(self.handed, np.int64)
            for at in left[np.isin(left // self.granule, cells)].tolist():
                del self.handed[at]  # a plain store hands nothing on

    def _races(self, bad: Array, cells: Array, others: Array, pcs: Array, pc: int, sentence: str) -> None:
        """Report the accesses in `bad`, which race with what `others` did at `pcs`."""
        for earlier in np.unique(pcs[bad]):
            cell, other = (each[bad & (pcs == earlier)][0] for each in (cells, others))
            offset = int(cell) * self.granule
            region = self.memory.owner(offset)
            assert region is not None  # the access itself was in bounds
            words = {
                "byte": f"{offset - region.start} of {region.name}",
                "cta": tuple(int(i) for i in self.detector.batch.ids[int(other) // self.detector.warps]),
                "other": self.detector.code[int(earlier)].where,
            }
            self.detector.report("race", pc, int(earlier), sentence.format(**words))

    def domains(self, cta: int, scope: str) -> list[Domain]:
        """Those of a CTA up to a scope."""
        every = [("cta", cta), ("cluster", cta // self.detector.batch.cluster), ("gpu", 0)]
        return every[: SCOPES.index(scope) + 1]

    def synchronise(self, unit: Unit, mask: Mask, offsets: Array, ins: Instruction) -> None:
        """Threads access `offsets` of global memory in an order: first what they acquire, then what they release."""
        detector, words, scope = self.detector, set(ins.modifiers), scope_of(ins)
        reads, writes = ins.opcode in ("ld", "atom"), ins.opcode != "ld"
        acquires, releases = bool({"acquire", "acq_rel"} & words), bool({"release", "acq_rel"} & words)
        for cta, warp, lane in np.argwhere(unit.everyone(mask)):
            who, at = (int(cta), int(warp) + unit.first), int(offsets[cta, warp, lane])
            held, mine = self.handed.get(at, {}), self.domains(int(cta), scope)
            for domain in (domain for domain in mine if reads and domain in held):
                if acquires:
                    detector.clock[who] = np.maximum(detector.clock[who], held[domain])
                else:
                    pending = self.pending.setdefault(who, {})
                    pending[domain] = np.maximum(pending.get(domain, 0), held[domain])
            if writes:
                # An atomic goes on with what it found there; a store begins anew.
                left = self.handed[at] = {} if ins.opcode == "st" else dict(held)
                for domain in mine:
                    given = detector.clock[who] if releases else self.published.get(who, {}).get(domain[0])
                    if given is not None:
                        left[domain] = np.maximum(left.get(domain, 0), given)
        if writes and releases:
            detector._tick(*detector.each(unit, mask))

    def fence(self, ctas: Array, warps: Array, scope: str) -> None:
        """Warps execute a fence of a scope: what their relaxed loads have seen is behind them, and what they did before is published."""
        within = SCOPES[: SCOPES.index(scope) + 1]
        for who in zip(ctas.tolist(), warps.tolist(), strict=True):
            pending = self.pending.get(who, {})
            for domain in [domain for domain in pending if domain[0] in within]:
                self.detector.clock[who] = np.maximum(self.detector.clock[who], pending.pop(domain))
            self.published.setdefault(who, {}).update(dict.fromkeys(within, self.detector.clock[who].copy()))


def scope_of(ins: Instruction) -> str:
    """Of an ordered access or a fence, the whole GPU where none is said."""
    return next((scope for scope in ("cta", "cluster") if scope in ins.modifiers), "gpu")


def _bytes(ins: Instruction) -> int:
    """Of one thread's access."""
    item = next((DTYPES[m].itemsize for m in reversed(ins.modifiers) if m in DTYPES), 1)
    return item * next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)


_BETWEEN = ", with nothing that orders the two, where a wait or a barrier was expected between them"
_READ = "reads byte {byte} of shared memory of CTA {cta}, which {other} writes" + _BETWEEN
_WRITE = "writes byte {byte} of shared memory of CTA {cta}, which {other} writes too" + _BETWEEN
_OVERWRITE = "writes byte {byte} of shared memory of CTA {cta}, which {other} reads" + _BETWEEN
_GLOBAL = (
    ", with nothing that orders the two, where a release after the one and an acquire before the other were expected"
)
_GLOBAL_READ = "reads byte {byte}, which {other} writes in CTA {cta}" + _GLOBAL
_GLOBAL_WRITE = "writes byte {byte}, which {other} writes too in CTA {cta}" + _GLOBAL
_GLOBAL_OVERWRITE = "writes byte {byte}, which {other} reads in CTA {cta}" + _GLOBAL
_TWICE = "writes byte {byte} of shared memory of CTA {cta} from two warps at once, where one was expected"
_MBARRIER = "writes byte {byte} of shared memory of CTA {cta}, where {other} has initialised an mbarrier"
_AT_ONCE = "writes byte {byte} of shared memory of CTA {cta} several times at once, where one was expected"
_FENCE_READ = (
    "reads byte {byte} of shared memory of CTA {cta} through the asynchronous proxy, which {other} writes, where a"
    " fence.proxy.async was expected between them"
)
_FENCE_WRITE = _FENCE_READ.replace("reads", "writes", 1)
