"""Executes a launch plan on a kernel's PTX, a batch of CTAs at a time, and says what was counted and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rungs.emulator import loads, machine, parser
from rungs.emulator.memory import PARAM_WINDOW, SHARED_BASE, GlobalMemory, SharedMemory
from rungs.emulator.metrics import Tally
from rungs.emulator.parser import EmulationError, Instruction, Kernel
from rungs.emulator.race import Detector, synchronises
from rungs.emulator.state import LANES, Batch, Finding
from rungs.plan import InGlobal, Plan, TensorMap, Workspace, check_tensor_map
from rungs.variants import load_device

Array = np.ndarray
BATCH = 16
"""CTAs that execute together: seven times faster than one by one, and their accumulators still fit a core's cache."""
RACE_BATCH = 4
WATCHED_THREADS = 1 << 15
"""Of a grid whose CTAs all run together where their atomics are watched: clocks grow with the square of its warps."""
MAX_INSTRUCTIONS = 20_000_000
LARGEST_CLUSTER = 8
"""What every GPU with clusters can launch."""


@dataclass
class Counts:
    """Numbers by name for each CTA that ran: `per_cta[name][i]` is that of CTA `ctas[i]`."""

    ctas: list[int]
    per_cta: dict[str, Array] = field(default_factory=dict)

    def total(self, name: str) -> int:
        return int(self.per_cta[name].sum()) if name in self.per_cta else 0

    @property
    def totals(self) -> dict[str, int]:
        return {name: self.total(name) for name in self.per_cta}


@dataclass(frozen=True)
class Site:
    """What one instruction did, over all CTAs."""

    ptx_line: int
    source: str
    opcode: str
    counts: dict[str, int]


@dataclass
class Result:
    counts: Counts
    findings: list[Finding] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)


def run(
    ptx: Path,
    plan: Plan,
    memory: GlobalMemory,
    *,
    ctas: Sequence[int] | None = None,
    schedule: str = "cta",
    delivery: str = "late",
    race: bool = False,
    seed: int = 0,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> Result:
    """Execute `plan` on the kernel in `ptx`; results are in `memory`.

    `ctas` are positions in the grid, x first; all by default. `schedule` is one of machine.SCHEDULES: whole CTAs in lockstep, or
    warp by warp in an order (by warpgroups where there is a wgmma). `delivery` says when an asynchronous copy lands, and a wgmma
    reads: `early` at its issue, `late` only when a wait needs it. `race` looks for races in shared memory. `max_instructions`
    bounds the instructions of a batch.

    Raises EmulationError (one sentence with the PTX line and the source line) for what a kernel may not do, and Refused for a
    tensor map that the driver would not take.
    """
    if schedule not in machine.SCHEDULES or delivery not in ("early", "late"):
        raise EmulationError(
            f"There is no schedule {schedule!r} with delivery {delivery!r}: choose one of {', '.join(machine.SCHEDULES)} and"
            " early or late."
        )
    kernel = parser.load(ptx, plan.entry)
    plan, located = _locate(plan, memory)
    params, maps = check_launch(kernel, plan)
    maps |= located
    symbols = _symbols(kernel)
    grid = int(np.prod(plan.grid))
    wanted = list(range(grid)) if ctas is None else sorted(set(ctas))
    if not wanted or not 0 <= wanted[0] <= wanted[-1] < grid:
        raise EmulationError(f"The launch has CTAs 0 to {grid - 1}, not {wanted[-1] if wanted else 'none'}.")
    cluster, together = plan.cluster[0], plan.together
    if wanted != [
        cta
        for first in sorted({cta // together * together for cta in wanted})
        for cta in range(first, first + together)
    ]:
        who, what = ("of a cluster", "clusters") if together == cluster else ("that wait for each other", "groups")
        raise EmulationError(f"CTAs {who} run together: ask for whole {what} of {together}.")
    result = Result(Counts(wanted))
    parts = []
    size = max(RACE_BATCH if race else BATCH, together) // together * together
    polls = any(loads.polls(ins) for ins in kernel.code)
    talk = race and any(synchronises(ins) for ins in kernel.code)
    if plan.sharers == 1 and (polls or (talk and len(wanted) * int(np.prod(plan.block)) <= WATCHED_THREADS)):
        size = len(wanted)  # who waits for whom is not said
    for first in range(0, len(wanted), size):
        ids = np.array(wanted[first : first + size])
        x, y, _ = plan.grid
        decoder = machine.decode(kernel, symbols, params)
        batch = Batch(
            kernel=kernel,
            ids=np.stack([ids % x, ids // x % y, ids // (x * y)], axis=1),
            block=plan.block,
            grid=plan.grid,
            shared=SharedMemory(len(ids), _shared_size(kernel, plan)),
            memory=memory,
            maps=maps,
            late=delivery == "late",
            race=None,
            tally=Tally(len(ids)),
            cluster=cluster,
            apart=polls and (race or schedule != "cta"),
        )
        if race:
            batch.race = Detector(batch)
        try:
            machine.run(batch, decoder, schedule, seed, max_instructions)
        except EmulationError as error:
            error.findings = tuple(batch.race.found.values()) if batch.race else ()
            raise
        parts.append(batch)
        result.findings += batch.findings
    _collect(result, kernel, parts)
    return result


def _locate(plan: Plan, memory: GlobalMemory) -> tuple[Plan, dict[int, TensorMap]]:
    """The plan with an address for each tensor map in global memory and each workspace, and the maps by theirs, which nobody but the copy
    engine reads. What is not zeros of a workspace is poisoned.
    """
    params, maps = list(plan.params), {}
    for position, given in enumerate(params):
        if isinstance(given, InGlobal):
            check_tensor_map(given.tensor_map, f"Parameter {position} of {plan.entry}")
            address = memory.reserve(f"tensor map of parameter {position}", (128,), np.uint8)
            maps[address], params[position] = given.tensor_map, (address, 8)
        elif isinstance(given, Workspace):
            name = f"workspace of parameter {position}"
            address = memory.reserve(name, (given.bytes,), np.uint8)
            memory[name][: given.zeros] = 0
            memory.region(name).written[: given.zeros] = True  # type: ignore[index]
            params[position] = address, 8
    return replace(plan, params=tuple(params)), maps


def check_launch(kernel: Kernel, plan: Plan) -> tuple[bytes, dict[int, TensorMap]]:
    """The parameters as bytes, and the tensor maps by the address of their parameter.

    Raises EmulationError for a launch that the driver would not take.
    """
    threads = int(np.prod(plan.block))
    device = load_device(kernel.target)
    size = _shared_size(kernel, plan)
    if threads % LANES or not 0 < threads <= (kernel.max_threads or 1024):
        raise EmulationError(
            f"{kernel.name} is launched with {threads} threads, where a multiple of 32 up to {kernel.max_threads or 1024} was"
            " expected."
        )
    if size > device.smem_per_block_bytes:
        raise EmulationError(
            f"{kernel.name} is launched with {size} bytes of shared memory, where at most {device.smem_per_block_bytes} was"
            f" expected on {device.arch}."
        )
    x, y, z = plan.cluster
    if (y, z) != (1, 1) or not 1 <= x <= LARGEST_CLUSTER or plan.grid[0] % x:
        raise EmulationError(
            f"{kernel.name} is launched in clusters of {plan.cluster}, where up to {LARGEST_CLUSTER} CTAs along x were expected,"
            f" a divisor of the grid's {plan.grid[0]}."
        )
    if len(plan.params) != len(kernel.params):
        raise EmulationError(
            f"{kernel.name} is launched with {len(plan.params)} parameters, where {len(kernel.params)} were expected."
        )
    raw = bytearray(kernel.params[-1].offset + kernel.params[-1].size if kernel.params else 0)
    maps = {}
    for position, (given, declared) in enumerate(zip(plan.params, kernel.params, strict=True)):
        assert not isinstance(given, InGlobal | Workspace)  # they have their addresses by now
        given_size = 128 if isinstance(given, TensorMap) else given[1]
        if given_size != declared.size:
            raise EmulationError(
                f"Parameter {position} of {kernel.name} is passed as {given_size} bytes, where {declared.size} were expected."
            )
        if isinstance(given, TensorMap):
            check_tensor_map(given, f"Parameter {position} of {kernel.name}")
            maps[PARAM_WINDOW + declared.offset] = given
        else:
            value, bits = given[0], 8 * given_size
            if not -(1 << bits - 1) <= value < 1 << bits:
                raise EmulationError(
                    f"Parameter {position} of {kernel.name} is {value}, where a number of {given_size} bytes was expected."
                )
            raw[declared.offset : declared.offset + given_size] = value.to_bytes(given_size, "little", signed=value < 0)
    return bytes(raw), maps


def _shared_layout(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Addresses of the shared variables, static ones first, and where dynamic shared memory starts."""
    addresses, at = {}, SHARED_BASE
    for variable in sorted(kernel.shared, key=lambda v: v.size == 0):
        at = -(-at // variable.align) * variable.align
        addresses[variable.name] = at
        at += variable.size
    return addresses, at


def _shared_size(kernel: Kernel, plan: Plan) -> int:
    return _shared_layout(kernel)[1] - SHARED_BASE + plan.smem_bytes


def _symbols(kernel: Kernel) -> dict[str, int]:
    """Addresses of the parameters and of the shared variables, each in its window."""
    params = {param.name: param.offset for param in kernel.params}
    return params | _shared_layout(kernel)[0]


# ---- counts ----------------------------------------------------------------------------------------------------------


def kind_of(ins: Instruction) -> str:
    """What the hardware executes for an instruction, as ncu names it; `alu` for the rest, whose SASS is another matter."""
    modifiers = {m.split("::")[0] for m in ins.modifiers}
    match ins.opcode:
        case "ld":
            if "shared::cluster" in ins.modifiers:
                return "ld_cluster"
            return "lds" if "shared" in modifiers else "ldg" if "param" not in modifiers else "alu"
        case "st" if "async" in modifiers:
            return "st_async"
        case "st":
            return "sts" if "shared" in modifiers else "stg"
        case "ldmatrix":
            return "ldsm"
        case "stmatrix":
            return "stsm"
        case "mma":
            return "hmma"
        case "wgmma" if ins.modifiers[0] == "mma_async":
            return "hgmma"
        case "bar" | "barrier" if "warp" not in modifiers:
            return "barrier"
        case "mbarrier":
            return "mbarrier"
        case "cp" if ins.modifiers[1] in ("ca", "cg"):
            return "ldgsts"
        case "cp" if ins.modifiers[0] == "reduce":
            return "tma_reduce"
        case "cp" if ins.modifiers[:3] == ("async", "bulk", "commit_group"):
            return "tma_commit"
        case "prefetch" if "tensormap" in modifiers:
            return "tma_prefetch"
        case "cp" if ins.modifiers[1] == "bulk" and not {"commit_group", "wait_group", "prefetch"} & modifiers:
            return "tma_store" if "bulk_group" in modifiers else "tma_load"
    return "alu"


def _collect(result: Result, kernel: Kernel, batches: list[Batch]) -> None:
    """Sum the batches' tallies by kind, and by instruction."""
    per_cta: dict[str, list[Array]] = {}
    for number, ins in enumerate(kernel.code):
        kind = kind_of(ins)
        executed = [
            batch.partial[number] + sum(warps * full[number] for warps, full in batch.full.items()) for batch in batches
        ]
        numbers = {kind: np.concatenate(executed), "ptx": np.concatenate(executed)}
        for what in ("wavefronts", "ideal", "sectors", "bytes"):
            if any((number, what) in batch.tally.sums for batch in batches):
                each = [np.broadcast_to(batch.tally.sums.get((number, what), 0), batch.ctas) for batch in batches]
                numbers[f"{what}_{kind}"] = np.concatenate(each)
        if f"ideal_{kind}" in numbers:
            numbers[f"conflicts_{kind}"] = numbers[f"wavefronts_{kind}"] - numbers.pop(f"ideal_{kind}")
        for name, value in numbers.items():
            per_cta.setdefault(name, []).append(value)
        if kind != "alu":
            totals = {
                name.removesuffix(f"_{kind}"): int(value.sum()) for name, value in numbers.items() if name != "ptx"
            }
            result.sites.append(Site(ins.line, ins.source, ins.name, totals))
    result.counts.per_cta = {name: np.sum(values, axis=0) for name, values in per_cta.items()}
