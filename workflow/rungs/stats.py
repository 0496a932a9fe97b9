"""Floors, verdicts and what a table's number of claims does to them. Pure; log-ratios unless a name says percent."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rungs.bootstrap import FEWEST, Median, block_length, median_error, median_interval

__all__ = [
    "FEWEST",
    "Effect",
    "Floor",
    "Median",
    "Spread",
    "block_length",
    "claim_level",
    "floor_of",
    "log_ratio",
    "mean_effect",
    "median_error",
    "median_interval",
    "percent",
    "rounds_to_decide",
    "shape_class",
    "spread_of",
    "spreads_of",
    "verdict",
]

T = TypeVar("T", bound=Hashable)
SHORT_LOOP = 16
CLASSES = ("short loop", "one wave", "many waves")
MOST_ROUNDS = 100_000
"""A number of rounds beyond which the answer to "how many more" is "none that anyone would wait for"."""


@dataclass(frozen=True)
class Floor:
    """What the same binary shows against itself over one class of shapes. Log-ratios, not negative.

    `within`: largest |median| of the binary against its twin in one job. `between`: largest difference of two jobs in
    the paired log-ratio to the same other binary; None under two jobs. `value` is the larger of both.
    """

    within: float
    between: float | None
    shapes: int
    jobs: int

    @property
    def value(self) -> float:
        return max(self.within, self.between or 0.0)


def percent(ratio: float) -> float:
    """A log-ratio as a change in percent: log(1.1) is 10."""
    return 100 * math.expm1(ratio)


def log_ratio(change: float) -> float:
    """The inverse of `percent`."""
    return math.log1p(change / 100)


def claim_level(claims: int, level: float = 0.95) -> float:
    """Level of each interval so that all `claims` of a table hold together at `level`.

    Bonferroni: it needs no independence, and steps that share a rung have none (Dunn, JASA 56, 1961).
    """
    return 1 - (1 - level) / max(claims, 1)


def verdict(low: float, high: float, floor: float) -> str:
    """`faster` or `slower`: the interval lies outside the floor. `tie`: inside it. `undecided`: neither.

    All three in one unit, log-ratio or percent; above 0 is faster.
    """
    if low > floor:
        return "faster"
    if high < -floor:
        return "slower"
    return "tie" if -floor <= low and high <= floor else "undecided"


def rounds_to_decide(median: float, low: float, high: float, floor: float, rounds: int) -> int | None:
    """How many more rounds would bring an undecided interval clear of the floor, if the median stays where it is.

    The half width falls with the root of the rounds. None where the median sits on the floor, or so near that it
    would take more than `MOST_ROUNDS`.
    """
    room = abs(abs(median) - floor)
    half = (high - low) / 2
    if not math.isfinite(half):
        return max(FEWEST - rounds, 1)
    if room * math.sqrt(MOST_ROUNDS) <= half * math.sqrt(rounds):
        return None
    return max(math.ceil(rounds * (half / room) ** 2 - 1e-9) - rounds, 1)


def shape_class(shape: tuple[int, int, int], tile: tuple[int, int, int], ctas_per_sm: int, sms: int) -> str:
    """`many waves` where the tiles of C are not all resident at once; else `short loop` under `SHORT_LOOP` tiles of K, where
    launch, prologue and epilogue weigh as much as the loop and vary from process to process; else `one wave`.
    """
    (m, n, k), (tile_m, tile_n, tile_k) = shape, tile
    tiles = -(-m // tile_m) * -(-n // tile_n)
    if tiles > ctas_per_sm * sms:
        return "many waves"
    return "short loop" if -(-k // tile_k) < SHORT_LOOP else "one wave"


def floor_of(twin: Mapping[T, Sequence[float]], other: Mapping[Hashable, Sequence[float]], jobs: int) -> Floor | None:
    """The floor of a class: per shape, one median per job of binary against twin; per shape and other binary, the same.

    None where nothing was measured.
    """
    within = [abs(median) for medians in twin.values() for median in medians]
    between = [max(medians) - min(medians) for medians in other.values() if len(medians) > 1]
    if not within:
        return None
    return Floor(max(within), max(between) if between else None, len(twin), jobs)


@dataclass(frozen=True)
class Spread:
    """By how much one quantity differs from job to job: a standard deviation and its degrees of freedom."""

    deviation: float
    freedom: int


def spread_of(medians: Iterable[Sequence[float]]) -> Spread | None:
    """The spread over jobs, pooled over shapes: `medians` has per shape one value per job. None under two jobs.

    Each shape has a mean of its own and brings (jobs - 1) degrees of freedom; the deviations are taken as independent from
    shape to shape. What the bootstrap error of a job adds to it stays in, so that the spread is rather too large.
    """
    squares, freedom = 0.0, 0
    for values in medians:
        mean = sum(values) / len(values) if values else 0.0
        squares += sum((value - mean) ** 2 for value in values)
        freedom += max(len(values) - 1, 0)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else None


def spreads_of(medians: Mapping[T, Sequence[float]]) -> dict[T, Spread]:
    """The spread over jobs of each shape of one class: `medians` has per shape one value per job. Empty under two jobs.

    Shapes of a class differ in it (the smallest problems most), and a deviation of few jobs may be small by chance: each
    shape has the larger of its own and that of `spread_of` over all, with (jobs - 1) degrees of freedom in either case.
    """
    pooled = spread_of(medians.values())
    if pooled is None:
        return {}
    freedom = max(len(values) for values in medians.values()) - 1
    found = {}
    for shape, values in medians.items():
        own = spread_of([values]) or Spread(0.0, freedom)
        found[shape] = Spread(max(own.deviation, pooled.deviation), own.freedom)
    return found


@dataclass(frozen=True)
class Effect:
    """A mean over contexts with its standard error and that error's degrees of freedom. A log-ratio."""

    value: float
    error: float
    freedom: float

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Symmetric Student interval; infinite where the error is not known."""
        from scipy.special import stdtrit  # as in `bootstrap`: a process that only draws needs none

        if not math.isfinite(self.error):
            return -math.inf, math.inf
        half = float(stdtrit(self.freedom, 0.5 + level / 2)) * self.error
        return self.value - half, self.value + half


def mean_effect(pairs: Sequence[tuple[Median, Median]], spread: Spread | None) -> Effect:
    """Mean over contexts of target minus source: each pair is (source, target), log-ratios to the control of two jobs.

    With n pairs, each job's own error e (bootstrap) and the deviation t from job to job, the variance of the mean is

        sum over pairs of (e_source^2 + e_target^2 + 2 t^2) / n^2

    since every variant has a job of its own and stands in one context, so that all terms are independent. The contexts are
    those that there are, not a sample of more: how the gain differs between them is no error. Degrees of freedom by
    Satterthwaite (Biometrics Bulletin 2, 1946). Without a spread there is no error. Raises ValueError without a pair.
    """
    n = len(pairs)
    if not n:
        raise ValueError("there is no mean over no contexts")
    value = sum(target.value - source.value for source, target in pairs) / n
    if spread is None:
        return Effect(value, math.inf, 1.0)
    parts = [((median.error / n) ** 2, median.freedom) for pair in pairs for median in pair]
    parts.append((2 * spread.deviation**2 / n, spread.freedom))
    variance = sum(part for part, _ in parts)
    if not math.isfinite(variance):
        return Effect(value, math.inf, 1.0)
    weight = sum(part**2 / freedom for part, freedom in parts)
    return Effect(value, math.sqrt(variance), variance**2 / weight if weight else 1.0)
