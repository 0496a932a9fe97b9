"""Runs a batch of CTAs: units of warps in lockstep, groups of threads inside them, the smallest position first.

Where threads of a unit part, each side is a group with a mask, and the group that stands earliest in the code runs until it
reaches another's position, where they join. Warps that loop on their own get registers of their own: a producer warp and
its consumers then both run without masks. A schedule says which unit runs next and for how long. The warps of a warpgroup
stay in one unit as long as they may come to a wgmma, which they execute together.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from rungs.emulator import alu, loads, mma, sync, wgmma, words
from rungs.emulator.parser import EmulationError, Instruction, Kernel
from rungs.emulator.state import EXIT, LANES, Array, Batch, Decoder, Finding, Mask, Poll, Step, ThreadGroup, Unit

COMPILE = alu.COMPILE | loads.COMPILE | mma.COMPILE | sync.COMPILE | wgmma.COMPILE
SCHEDULES = ("cta", "ascending", "descending", "random")
SLICE = 40  # instructions that the random schedule runs a warp for, on average


def decode(kernel: Kernel, symbols: dict[str, int], params: bytes) -> Decoder:
    """Every instruction as a step. Raises EmulationError naming the first that the emulator does not know."""
    decoder = Decoder(kernel, symbols, params)
    wgmma.prepare(decoder)
    for ins in kernel.code:
        if ins.opcode not in COMPILE:
            raise ins.error(
                f"is an instruction that the emulator does not know, where one of {len(COMPILE)} was expected"
            )
        if odd := words.unknown(ins):
            raise ins.error(f"has the modifier .{odd}, which the emulator does not know")
        try:
            step = COMPILE[ins.opcode](decoder, ins)
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise ins.error(f"has operands or modifiers of a form that the emulator lacks ({error!r})") from error
        step = wgmma.watched(decoder, ins, step)
        if ins.guard is not None and ins.opcode != "bra":
            step = _guarded(decoder, ins, step)
        decoder.steps.append(step)
    return decoder


def _guarded(decoder: Decoder, ins: Instruction, step: Step) -> Step:
    """The step for the threads whose predicate holds."""
    assert ins.guard is not None
    slot, negated = decoder.source(ins.guard, "pred", ins), ins.guard.negated

    def run(unit: Unit, mask: Mask) -> Any:
        holds = unit.registers[slot]
        if holds.size == 1:
            return step(unit, mask) if bool(holds.item()) != negated else None
        part = np.broadcast_to(~holds if negated else holds, unit.shape)
        if mask is not None:
            part = part & mask
        if not part.any():
            return None
        if part.all() if mask is None else np.array_equal(part, mask):
            return step(unit, mask)
        result = step(unit, part)
        if isinstance(result, sync.Apart):
            return result
        if result is not None and not isinstance(result, int):
            raise ins.error("holds a part of its threads by a guard, where a branch was expected")
        return result if result is None else (result, part)

    return run


def start(batch: Batch, decoder: Decoder, schedule: str) -> None:
    """Give the batch its units, with the special registers of every thread."""
    threads = np.arange(batch.warps * LANES, dtype=np.uint32).reshape(1, batch.warps, LANES)
    (bx, by, _), ids = batch.block, batch.ids.astype(np.uint32)[:, None, None, :]
    special: dict[str, Array] = {
        "%tid.x": threads % np.uint32(bx),
        "%tid.y": threads // np.uint32(bx) % np.uint32(by),
        "%tid.z": threads // np.uint32(bx * by),
        "%laneid": threads[:, :1] % np.uint32(LANES),
        "%warpid": threads[..., :1] // np.uint32(LANES),
        "%globaltimer": np.zeros((1, 1, 1), np.uint64),  # stands still: a kernel that polls never runs out of patience
    }
    for i, axis in enumerate("xyz"):
        special[f"%ctaid.{axis}"] = ids[..., i] if batch.grid[i] > 1 else np.zeros((1, 1, 1), np.uint32)
        special[f"%ntid.{axis}"] = np.full((1, 1, 1), batch.block[i], np.uint32)
        special[f"%nctaid.{axis}"] = np.full((1, 1, 1), batch.grid[i], np.uint32)
        across = np.uint32(batch.cluster if axis == "x" else 1)
        special[f"%clusterid.{axis}"] = special[f"%ctaid.{axis}"] // across
        special[f"%nclusterid.{axis}"] = special[f"%nctaid.{axis}"] // across
        special[f"%cluster_ctaid.{axis}"] = special[f"%ctaid.{axis}"] % across
        special[f"%cluster_nctaid.{axis}"] = np.full((1, 1, 1), across, np.uint32)
    special["%cluster_ctarank"] = special["%cluster_ctaid.x"]
    special["%cluster_nctarank"] = special["%cluster_nctaid.x"]
    registers: list[Array] = []
    for value in decoder.initial:
        if isinstance(value, str):
            if value not in special:
                raise EmulationError(
                    f"The kernel reads {value}, which the emulator does not have: only a GPU knows where and when it runs."
                )
            value = decoder.intern(special[value])
        registers.append(value)
    size = batch.warps if schedule == "cta" else wgmma.WARPS if batch.wgmma else 1
    for first in range(0, batch.warps, size):
        stop = min(first + size, batch.warps)
        own = [_warps(value, first, stop) for value in registers]
        batch.units.append(Unit(batch, first, stop - first, own, [ThreadGroup(0, None)]))


def _warps(value: Array, first: int, stop: int) -> Array:
    return value if value.shape[1] == 1 else value[:, first:stop]


def run(batch: Batch, decoder: Decoder, schedule: str, seed: int, max_instructions: int) -> None:
    """Run every CTA of the batch to its end.

    Raises EmulationError for what an instruction may not do, a deadlock and more than `max_instructions` of a unit.
    """
    batch.wgmma = wgmma.start(batch, decoder)
    start(batch, decoder, schedule)
    dice = random.Random(seed)
    batch.full = {}
    batch.partial = np.zeros((len(decoder.steps), batch.ctas), np.int64)
    left = max_instructions
    with np.errstate(all="ignore"):
        while alive := [unit for unit in batch.units if unit.groups]:
            batch.wake()
            able = [unit for unit in alive if any(group.waits is None for group in unit.groups)]
            if not able:
                waiting: list[Any] = [*batch.barriers.values()]
                waiting += [batch.cluster_barrier] if batch.cluster_barrier else []
                if (
                    not any([sync.converge(unit) for unit in alive])
                    and not _deliver(batch)
                    and not any(each.forget_ended(batch) for each in waiting)
                    and not batch.wake(force=True)
                ):
                    raise _deadlock(batch, decoder.kernel)
                continue
            unit = able[-1] if schedule == "descending" else dice.choice(able) if schedule == "random" else able[0]
            budget = dice.randint(1, 2 * SLICE) if schedule == "random" else max(left, 1)
            left -= _run_unit(unit, decoder, budget)
            if left <= 0 and unit.groups:
                at = decoder.kernel.code[min(group.pc for group in unit.groups)]
                raise at.error(
                    f"is reached after {max_instructions} instructions, where the kernel was expected to have ended"
                )
    _leftovers(batch)


def _leftovers(batch: Batch) -> None:
    """What a kernel may not leave behind when it ends: copies of the copy engine, and bytes that an mbarrier still expects."""

    def report(ins: Instruction, sentence: str) -> None:
        batch.findings.append(Finding("left behind", f"{ins.where} {sentence}.", (ins.line,), (ins.source,)))

    for copy in batch.in_flight[:1]:
        report(copy.ins, "is still under way when the kernel ends, where a wait on its mbarrier was expected")
    for store in [store for unit in batch.units for store in unit.bulk_pending][:1]:
        report(
            store.ins,
            "may still read shared memory when the kernel ends, where a cp.async.bulk.wait_group was expected",
        )
    if batch.wgmma:
        batch.findings += batch.wgmma.leftovers()
    for barrier in batch.mbarriers.values():
        if (barrier.valid & (barrier.tx != 0)).any() and barrier.initialised is not None and not batch.in_flight:
            cta = int(np.argmax(barrier.valid & (barrier.tx != 0)))
            report(
                barrier.initialised,
                f"initialises an mbarrier that ends with {int(barrier.tx[cta])} bytes expected, where 0 was expected: the"
                " expect_tx of its phases are not what their copies bring",
            )
    if batch.race:
        batch.race.end()
        batch.findings += batch.race.found.values()


def _run_unit(unit: Unit, decoder: Decoder, budget: int) -> int:
    """Run the unit until its threads are held or have ended, or `budget` instructions; returns how many ran."""
    count = 0
    while count < budget:
        group = _join(unit)
        if group is None:
            break
        try:
            ran, settled = _run_group(unit, group, decoder, budget - count)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            if group.pc >= len(decoder.kernel.code):
                raise EmulationError(
                    f"{decoder.kernel.name} runs past its last instruction, where a ret or an exit was expected."
                ) from error
            ins = decoder.kernel.code[group.pc]
            raise ins.error(
                f"could not be executed ({error!r}), where a form that the emulator knows was expected"
            ) from error
        count += ran
        unit.groups = [each for each in unit.groups if each.pc < EXIT]
        if settled:
            break  # others may go on now: the schedule says who
    return count


def _run_group(unit: Unit, group: ThreadGroup, decoder: Decoder, budget: int) -> tuple[int, bool]:
    """Run a group until it meets another, parts, is held or ends; returns how many instructions, and whether at a barrier."""
    batch, steps, count = unit.batch, decoder.steps, 0
    full = batch.full.setdefault(unit.warps, [0] * len(steps))
    limit = min((g.pc for g in unit.groups if g.pc > group.pc and g.waits is None), default=EXIT)
    pc, mask = group.pc, group.mask
    active = None if mask is None else unit.active_warps(mask)
    while pc < limit and count < budget:
        group.pc = pc
        result = steps[pc](unit, mask)
        count += 1
        if isinstance(result, sync.Converging | Poll):  # to be executed and counted when it goes on
            group.waits = result
            sync.converge(unit)
            return count, True
        if isinstance(result, sync.Apart):
            mask = group.mask = _hold_back(unit, group, pc, result)
            active, result = unit.active_warps(mask), None
        if isinstance(result, sync.Part):
            others = unit.everyone(mask) & ~result.mask
            if others.any():
                unit.groups.append(ThreadGroup(pc, others))
            group.mask, active, result = result.mask, unit.active_warps(result.mask), result.barrier
        if active is None:
            full[pc] += 1
        else:
            batch.partial[pc] += active
        if result is None:
            pc += 1
        elif isinstance(result, int):
            backward, pc = result <= pc, result
            if backward and active is not None and _carve(unit, group, pc):
                return count, False
        elif isinstance(result, tuple):
            target, part = result
            group.mask, group.pc = unit.everyone(mask) & ~part, pc + 1
            unit.groups.append(ThreadGroup(target, part))
            return count, False
        else:
            group.waits = result
            if isinstance(result, sync.Barrier):
                result.settle(batch)
            return count, True
    group.pc = pc
    return count, False


def _hold_back(unit: Unit, group: ThreadGroup, pc: int, apart: sync.Apart) -> Array:
    """Hold what is of the CTAs that come later, of this group and of those that stand elsewhere; returns the threads that go on."""
    later = apart.held[:, None, None]
    for other in [each for each in unit.groups if each is not group and each.waits is None]:
        theirs, rest = (unit.everyone(other.mask) & which for which in (later, ~later))
        if theirs.any() and rest.any():
            other.mask = rest
            unit.groups.append(ThreadGroup(other.pc, theirs, apart.until))
        elif theirs.any():
            other.waits = apart.until
    everyone = unit.everyone(group.mask)
    unit.groups.append(ThreadGroup(pc, everyone & later, apart.until))
    return everyone & ~later


def _join(unit: Unit) -> ThreadGroup | None:
    """The group to run: of those that are free, the one that stands earliest, joined by all that stand there too."""
    ready = [group for group in unit.groups if group.waits is None]
    if not ready:
        return None
    group = min(ready, key=lambda g: g.pc)
    for other in ready:
        if other is not group and other.pc == group.pc:
            both = unit.everyone(group.mask) | unit.everyone(other.mask)
            group.mask = None if both.all() else both
            unit.groups = [g for g in unit.groups if g is not other]
    return group


def _carve(unit: Unit, group: ThreadGroup, pc: int) -> bool:
    """Give whole warps at the unit's start or end, which begin a loop without the others, a unit of their own."""
    mask = unit.everyone(group.mask)
    mine = np.asarray(mask.any(axis=(0, 2)))
    if not np.array_equal(mine, mask.all(axis=(0, 2))) or mine.all() or len(unit.groups) < 2:
        return False
    count = int(mine.sum())
    if mine[:count].all():
        cut, rest = (0, count), (count, unit.warps)
    elif mine[-count:].all():
        cut, rest = (unit.warps - count, unit.warps), (0, unit.warps - count)
    else:
        return False
    state = unit.batch.wgmma
    if state:
        if state.reaches[pc] and (unit.first + (cut[1] if cut[0] == 0 else cut[0])) % wgmma.WARPS:
            return False  # a warpgroup that is to execute a wgmma stays together
        state.settle_all(unit)
    unit.groups.remove(group)
    new = _part_of(unit, *cut)
    new.groups = [ThreadGroup(pc, None)]
    old = _part_of(unit, *rest)
    for other in unit.groups:
        part = unit.everyone(other.mask)[:, rest[0] : rest[1]]
        other.mask = None if part.all() else part
    vars(unit).update({**vars(old), "groups": unit.groups})
    unit.batch.units.append(new)
    unit.batch.units.sort(key=lambda each: each.first)
    return True


def _part_of(unit: Unit, first: int, stop: int) -> Unit:
    """The unit's warps `first` to `stop`, with what they have under way."""

    def cut(value: Array | None) -> Array | None:
        return None if value is None else _warps(value, first, stop)

    pending = [
        loads.Copy(cut(c.rows), cut(c.values), c.size, cut(c.mask), cut(c.group))  # type: ignore[arg-type]
        for c in unit.pending
    ]
    return Unit(
        unit.batch,
        unit.first + first,
        stop - first,
        [_warps(value, first, stop) for value in unit.registers],
        [],
        _warps(unit.committed, first, stop),
        pending,
        _warps(unit.bulk_committed, first, stop),
        [store for store in unit.bulk_pending if first <= store.warp - unit.first < stop],
    )


def _deliver(batch: Batch) -> bool:
    """Let the oldest copy land that somebody waits for; false where there is none."""
    waited = [group.waits for unit in batch.units for group in unit.groups]
    for copy in batch.in_flight:
        if any(copy.barrier is barrier for barrier in waited):
            batch.in_flight.remove(copy)
            copy.land(batch)
            return True
    return False


def _deadlock(batch: Batch, kernel: Kernel) -> EmulationError:
    """What the first of the held threads wait for, and where others are held."""
    held = []
    for unit in batch.units:
        for group in unit.groups:
            cta, warp = (int(i[0]) for i in np.nonzero(unit.everyone(group.mask).any(axis=2)))
            held.append((kernel.code[group.pc], unit.first + warp, cta, group.waits.state(cta)))
    ins, warp, cta, state = held[0]
    others = {
        other.line: f"warp {w} at PTX line {other.line} by {what}" for other, w, _, what in held[1:] if other is not ins
    }
    return ins.error(
        f"holds warp {warp} of CTA {tuple(map(int, batch.ids[cta]))} for ever at {state}, where everything waited for was"
        f" expected to come{''.join(f'; held too is {each}' for each in list(others.values())[:3])}"
    )
