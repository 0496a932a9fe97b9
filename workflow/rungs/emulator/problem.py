"""A variant on random inputs, emulated and held against numpy: a GEMM's, or another workload's at one of its points."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rungs import plan as plans
from rungs import workloads
from rungs.emulator import launch
from rungs.emulator.alu import round_to_bf16, widen_bf16
from rungs.emulator.launch import Counts, Result
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError
from rungs.emulator.state import Finding
from rungs.errors import Refused
from rungs.variants import Experiment, Variant, ctas_along_k, load_device

Array = np.ndarray
TOLERANCE = 2.0**-7
"""Largest error of random data against the root mean square of the result: bf16 keeps 8 bits, and one rounding is half a unit."""
FLOAT_TOLERANCE = 1e-5
"""Largest error of fp32 results against the norm of what is right, on random data."""
SMS = 2
"""Of the GPU that other workloads are emulated on, so that a grid of one CTA for each is small."""
POLLED = ("mbarrier", "alu", "ptx")
"""Counts that hold how often a wait is asked again, which is a matter of time and so only of this machine."""
WORKING_BYTES = 14
"""Of each element of A, B and C at most: a drawn int64, the float32 and the bf16."""
HELD_BYTES, WATCHED_BYTES = 2, 8
"""Of each byte of a workspace: whether it was written, and where races are watched who has written and read it."""
ALIGNED_K = 64  # bf16 values of a 128-byte line: K values this far apart touch lines and sectors alike


@dataclass
class Outcome:
    """`error` is the largest error (of integers the largest difference, which must be 0); `failure` what stopped the kernel."""

    problem: tuple[int, ...]
    ctas: list[int]
    right: bool
    error: float
    failure: str = ""
    result: Result | None = None
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.right and not self.findings


def check_memory(problem: tuple[int, int, int], launched: plans.Plan | None = None, race: bool = False) -> None:
    """Raises Refused for what this machine could not draw and hold, which would take half of its memory: the operands, and the
    workspaces of a launch.
    """
    m, n, k = problem
    need, there = WORKING_BYTES * (m * k + n * k + m * n), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for given in launched.params if launched else ():
        if isinstance(given, plans.Workspace):
            need += (WATCHED_BYTES if race else HELD_BYTES) * given.bytes
    if need > there // 2:
        raise Refused(
            f"{m}x{n}x{k} takes {need} bytes to emulate, above half of this machine's {there}: choose a smaller problem."
        )


def inputs(problem: tuple[int, int, int], fill: str, seed: int) -> tuple[Array, Array]:
    """A (M x K) and B (N x K) as bf16 bits. `integer` draws -2..2, so that every partial sum is exact; `normal` random data."""
    check_memory(problem)
    m, n, k = problem
    generator = np.random.default_rng(seed)
    if fill not in ("integer", "normal"):
        raise EmulationError(f"There is no fill {fill!r}: choose integer or normal.")

    def draw(shape: tuple[int, int]) -> Array:
        if fill == "integer":
            return generator.integers(-2, 3, shape).astype(np.float32)
        return generator.standard_normal(shape, dtype=np.float32)

    return round_to_bf16(draw((m, k))), round_to_bf16(draw((n, k)))


def prepare(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    problem: tuple[int, int, int],
    fill: str,
    seed: int,
    sms: int | None = None,
) -> tuple[GlobalMemory, plans.Plan]:
    """The operands a, b and c in memory, and the launch. B lies as the variant wants it, C is poisoned."""
    a, b = inputs(problem, fill, seed)
    memory = GlobalMemory()
    n_by_k = plans.b_is_n_by_k(experiment, variant)
    addresses = {
        "a": memory.put("a", a),
        "b": memory.put("b", b if n_by_k else np.ascontiguousarray(b.T)),
        "c": memory.reserve("c", problem[:2], np.uint16),
    }
    launched = plans.plan(experiment, variant, load_device(arch), problem, addresses, sms)
    check_memory(problem, launched)
    return memory, launched


def reference(memory: GlobalMemory, n_by_k: bool) -> Array:
    """A times B in float32, which is exact for integer inputs; `n_by_k` says how B lies."""
    a, b = widen_bf16(memory["a"]), widen_bf16(memory["b"])
    return a @ (b.T if n_by_k else b)


def emulate_gemm(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    ptx: Path,
    problem: tuple[int, int, int],
    *,
    sms: int | None = None,
    schedule: str = "cta",
    delivery: str = "late",
    race: bool = False,
    ctas: Sequence[int] | None = None,
    fill: str = "integer",
    seed: int = 1,
) -> Outcome:
    """Run a variant's PTX on the problem (M, N, K) and compare with numpy.

    `sms` is how many the GPU has, for kernels with a CTA for each. With `ctas` only those run, and only what they write is compared. What stops the kernel becomes the outcome's `failure`. Raises
    Refused for a launch that the plan or the driver refuses.
    """
    memory, launched = prepare(experiment, variant, arch, problem, fill, seed, sms)
    ran = list(range(launched.grid[0])) if ctas is None else sorted(set(ctas))
    try:
        result = launch.run(
            ptx, launched, memory, ctas=ctas, schedule=schedule, delivery=delivery, race=race, seed=seed
        )
    except EmulationError as error:
        return Outcome(problem, ran, False, float("nan"), str(error), findings=list(error.findings))
    expected = reference(memory, plans.b_is_n_by_k(experiment, variant))
    written = memory.region("c").written
    assert written is not None
    complete = written.reshape(*problem[:2], 2).all(axis=2)
    found = widen_bf16(memory["c"])
    if fill == "integer":
        difference, limit = np.abs(found - widen_bf16(round_to_bf16(expected))), 0.0
    else:
        scale = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
        difference, limit = np.abs(found - expected) / np.maximum(scale, np.abs(expected)), TOLERANCE
    compared = difference[complete] if ctas is not None else difference
    largest = float(np.max(compared)) if compared.size else float("nan")  # NaN, where nothing was written, stays NaN
    return Outcome(problem, ran, bool(largest <= limit), largest, "", result, result.findings, result.counts.totals)


def emulate_work(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    ptx: Path,
    point: tuple[int, ...],
    *,
    schedule: str = "cta",
    delivery: str = "late",
    race: bool = False,
    fill: str = "integer",
    seed: int = 1,
) -> Outcome:
    """Run the PTX of a variant that is no GEMM at a point of its experiment, all CTAs, and compare with what is expected.

    As `emulate_gemm`: what stops the kernel becomes the outcome's `failure`. The GPU has as few SMs as make the grid small.
    """
    workload, device = workloads.of(experiment), load_device(arch)
    of = (experiment, variant, device, point)
    workload.check(*of)
    generator, memory, addresses = np.random.default_rng(seed), GlobalMemory(), {}
    declared = workload.operands(*of, SMS)
    for name, operand in declared.items():
        if operand.role == "input":
            addresses[name] = memory.put(name, workloads.host_values(operand, fill, generator))
        else:
            addresses[name] = memory.reserve(name, operand.shape, np.dtype(operand.dtype))
    launched = workload.plan(*of, addresses, SMS)
    ran = list(range(int(np.prod(launched.grid))))
    inputs = {name: workloads.wide(memory[name]) for name, operand in declared.items() if operand.role == "input"}
    try:
        result = launch.run(ptx, launched, memory, schedule=schedule, delivery=delivery, race=race, seed=seed)
    except EmulationError as error:
        return Outcome(point, ran, False, float("nan"), str(error), findings=list(error.findings))
    expected = workload.expected(*of, SMS, inputs)
    largest = 0.0
    for name, operand in declared.items():
        if operand.role != "output":
            continue
        written = memory.region(name).written
        right = np.asarray(expected[name]).reshape(operand.shape)
        if np.dtype(operand.dtype).kind == "f":
            scale = float(np.linalg.norm(right)) if fill == "normal" else 1.0
            difference = np.abs(memory[name] - right) / (scale or 1.0)
        else:
            difference = workloads.differs(memory[name], right).astype(np.float64)
        worst = float(np.max(difference, initial=0.0))
        complete = written is not None and bool(written.all())
        # NaN, where something was not written, stays: max() would leave it out
        largest = float(np.maximum(largest, worst if complete else float("nan")))
        if not largest <= (FLOAT_TOLERANCE if fill == "normal" else 0.0):
            return Outcome(point, ran, False, largest, "", result, result.findings, result.counts.totals)
    return Outcome(point, ran, True, largest, "", result, result.findings, result.counts.totals)


def affine_counts(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    ptx: Path,
    problem: tuple[int, int, int],
    sms: int | None = None,
    ran: dict[tuple, Counts] | None = None,
) -> dict[str, int]:
    """The counts of a launch too large to run in full, from a few of its CTAs at two small K.

    Every pass of a kernel's loop along K does the same, so its counts are affine in K; the two K have the remainder of the
    real one modulo a line, so that the same lines and sectors are touched. The first, an interior and the last CTA stand for
    all where they are alike; where they are not, as in a kernel whose CTAs take several tiles each, all CTAs run once at a
    very small K to see which are. CTAs of a cluster may differ, by their rank: then whole clusters are alike or not. `ran` keeps the small runs for other K of the same binary. Raises EmulationError where a
    count turns out not to be affine.
    """
    m, n, k = problem
    values = experiment.values(variant)
    # Where CTAs share the K of a tile, each gets as much of a step.
    step = 2 * max(ALIGNED_K, values["TILE_K"] * ctas_along_k(values))
    ran = {} if ran is None else ran

    def counts(size: int, ctas: Sequence[int] | None) -> Counts:
        key = (ptx, sms, m, n, size, ctas and tuple(ctas))
        if key not in ran:
            memory, launched = prepare(experiment, variant, arch, (m, n, size), "integer", 1, sms)
            ran[key] = launch.run(ptx, launched, memory, ctas=ctas, delivery="early").counts
        return ran[key]

    addresses = dict.fromkeys("abc", 1 << 20)
    launched = plans.plan(experiment, variant, load_device(arch), problem, addresses, sms)
    grid, together = launched.grid[0], launched.together

    deep = 4 * step + k % step
    shallow = min(k, step + k % step)
    kinds = _alike(counts(shallow, whole({0, grid // 2, grid - 1}, together)), together)
    kinds = {0: grid // together} if len(kinds) == 1 else _alike(counts(shallow, None), together)

    def total(size: int) -> dict[str, int]:
        found = counts(size, whole(kinds, together))
        weights = np.array([kinds[cta // together * together] for cta in found.ctas])
        return {name: int((values * weights).sum()) for name, values in found.per_cta.items()}

    if k <= deep + step:
        return total(k)
    low, high = total(deep), total(deep + step)
    result = {}
    for name in low:
        rise, rest = divmod((high[name] - low[name]) * (k - deep), step)
        if rest and name not in POLLED:
            raise EmulationError(
                f"{variant.name}: {name} is not affine in K, as was expected: run the problem in full."
            )
        result[name] = low[name] + rise
    return result


def whole(ctas: Iterable[int], together: int) -> list[int]:
    """CTAs with the others of their groups, which run together."""
    firsts = sorted({cta // together * together for cta in ctas})
    return [cta for first in firsts for cta in range(first, first + together)]


def _alike(counts: Counts, together: int) -> dict[int, int]:
    """The first CTA of the first group of each kind, and how many groups there are of it; a CTA alone is a group of one. How
    often a wait is asked again makes no kind.
    """
    names = [name for name in counts.per_cta if name not in POLLED]
    rows = np.stack([counts.per_cta[name] for name in names], axis=1).reshape(len(counts.ctas) // together, -1)
    _, first, many = np.unique(rows, axis=0, return_index=True, return_counts=True)
    return {counts.ctas[i * together]: int(number) for i, number in zip(first, many, strict=True)}
