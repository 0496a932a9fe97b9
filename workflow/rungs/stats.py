"""Floors, verdicts and what a table's number of claims does to them. Pure; log-ratios unless a name says percent."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rungs.bootstrap import FEWEST, Median, block_length, median_error, median_interval

__all__ = [
    "FEWEST",
    "Effect",
    "Floor",
    "Median",
    "Share",
    "Spread",
    "block_length",
    "claim_level",
    "contrast",
    "difference",
    "floor_of",
    "log_ratio",
    "mean_effect",
    "median_error",
    "median_interval",
    "percent",
    "rounds_to_decide",
    "shape_class",
    "share",
    "spread_between_jobs",
    "verdict",
]

T = TypeVar("T", bound=Hashable)
U = TypeVar("U", bound=Hashable)
SHORT_LOOP = 16
CLASSES = ("short loop", "one wave", "many waves")
LARGEST = 100.0
"""The end of an interval that is as good as open: a log-ratio of few jobs at a level for thousands of claims."""
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
    """A log-ratio as a change in percent: log(1.1) is 10. Beyond `LARGEST` it stays there, a number that a CSV can hold."""
    return 100 * math.expm1(min(ratio, LARGEST))


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
    freedom: float


def spread_between_jobs(medians: Mapping[T, Mapping[U, Median]]) -> Spread | None:
    """By how much a log-ratio to the control differs from job to job: `medians` is binary -> job -> that ratio there.

    With S the sum of squares of the medians about each binary's own mean, r = sum of (jobs - 1), and the bootstrap error e
    of each median,

        t^2 = (S - sum of (1 - 1/jobs) e^2) / r, at least 0

    is without bias: within a binary all jobs differ, and what the rounds add to S is known and taken off. All log-ratios
    of a job go through one control and may move together, which leaves S fewer degrees of freedom than r: with A the matrix
    of S, and C 1 where two medians are of one job and else 0, r^2 / tr(ACAC) (Box, Annals of Mathematical Statistics 25,
    1954). That is exact where the control is all that moves, and too few otherwise. Those of t^2 are Satterthwaite's
    (Biometrics Bulletin 2, 1946). None where no binary was timed in two jobs.
    """
    known = [{job: m for job, m in jobs.items() if math.isfinite(m.error)} for jobs in medians.values()]
    repeated = [jobs for jobs in known if len(jobs) > 1]
    if not repeated:
        return None
    every = [median for jobs in repeated for median in jobs.values()]
    number = {job: place for place, job in enumerate(dict.fromkeys(job for jobs in repeated for job in jobs))}
    job = np.array([number[job] for jobs in repeated for job in jobs])
    binary = np.repeat(np.arange(len(repeated)), [len(jobs) for jobs in repeated])
    same = binary[:, None] == binary
    centre = np.eye(len(every)) - same / same.sum(axis=1)
    rank = float(np.trace(centre))
    together = centre @ (job[:, None] == job)
    value = np.array([median.value for median in every])
    parts = [(float(value @ centre @ value) / rank, rank**2 / float((together * together.T).sum()))]
    parts += [(-w * m.error**2 / rank, m.freedom) for w, m in zip(np.diag(centre).tolist(), every, strict=True)]
    square = max(sum(part for part, _ in parts), 0.0)
    return Spread(math.sqrt(square), _freedom(square, parts))


def _freedom(variance: float, parts: Iterable[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum of independent variances, each with its own; 1 where nothing varies."""
    weight = sum(part**2 / freedom for part, freedom in parts)
    return variance**2 / weight if weight and variance else 1.0


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


Terms = Iterable[tuple[float, Median]]
"""Weights of a linear contrast, each with the log-ratio to the control of a job of its own."""


def contrast(terms: Terms, spread: Spread | None) -> Effect:
    """The sum of w y over terms (w, y): a mean effect, an interaction and a Shapley value are all of this form.

    Each y is of a job of its own, so that all terms are independent, and with its bootstrap error e and the deviation t from
    job to job the variance is

        sum of w^2 (e^2 + t^2)

    in closed form. Without a spread there is no error.
    """
    terms = list(terms)
    value = sum(weight * median.value for weight, median in terms)
    if spread is None:
        return Effect(value, math.inf, 1.0)
    parts = [(weight**2 * median.error**2, median.freedom) for weight, median in terms]
    parts.append((sum(weight**2 for weight, _ in terms) * spread.deviation**2, spread.freedom))
    return independent(value, parts)


def independent(value: float, parts: Sequence[tuple[float, float]]) -> Effect:
    """A sum of independent terms, of which each part is a variance with its degrees of freedom; those of the sum by Satterthwaite
    (Biometrics Bulletin 2, 1946).
    """
    variance = sum(part for part, _ in parts)
    if not math.isfinite(variance):
        return Effect(value, math.inf, 1.0)
    return Effect(value, math.sqrt(variance), max(_freedom(variance, parts), 1.0))


def difference(before: Median, after: Median, spreads: Sequence[Spread] = ()) -> Effect:
    """`after` less `before`, of two results sets whose rounds know nothing of each other: errors add by their squares.

    `spreads` are the deviations from job to job of both sets, where the rounds do not pair that away (a share of the
    control). Degrees of freedom as in `contrast`.
    """
    parts = [(median.error**2, median.freedom) for median in (before, after)]
    parts += [(spread.deviation**2, spread.freedom) for spread in spreads]
    return independent(after.value - before.value, parts)


def mean_effect(pairs: Sequence[tuple[Median, Median]], spread: Spread | None) -> Effect:
    """Mean over contexts of target minus source: each pair is (source, target), log-ratios to the control of two jobs.

    The contexts are those that there are, not a sample of more: how the gain differs between them is no error. Raises
    ValueError without a pair.
    """
    if not pairs:
        raise ValueError("there is no mean over no contexts")
    n = len(pairs)
    return contrast(
        (term for source, target in pairs for term in ((-1 / n, source), (1 / n, target))),
        spread,
    )


@dataclass(frozen=True)
class Share:
    """A part of a whole with its interval; the interval is infinite where the whole is not clear of 0."""

    value: float
    low: float
    high: float


def share(
    part: Sequence[float], whole: Sequence[float], medians: Sequence[Median], spread: Spread | None, level: float = 0.95
) -> Share:
    """The ratio of two contrasts of the same medians, with their weights in `part` and `whole`.

    Fieller's interval (Journal of the Royal Statistical Society B 16, 1954): every r at which part - r whole is not told from
    0. The covariance of two contrasts with weights p and w is the sum of p w (e^2 + t^2); degrees of freedom are those of
    part - r whole at the r that was found. NaN where the whole is 0.
    """
    from scipy.special import stdtrit

    above, below = (contrast(zip(weights, medians, strict=True), spread) for weights in (part, whole))
    if not below.value:
        return Share(math.nan, -math.inf, math.inf)
    ratio = above.value / below.value
    difference = contrast([(p - ratio * w, m) for p, w, m in zip(part, whole, medians, strict=True)], spread)
    if spread is None or not math.isfinite(difference.error):
        return Share(ratio, -math.inf, math.inf)
    together = sum(p * w * (m.error**2 + spread.deviation**2) for p, w, m in zip(part, whole, medians, strict=True))
    quantile = float(stdtrit(difference.freedom, 0.5 + level / 2)) ** 2
    square = below.value**2 - quantile * below.error**2
    if square <= 0:
        return Share(ratio, -math.inf, math.inf)
    middle = above.value * below.value - quantile * together
    rest = above.value**2 - quantile * above.error**2
    half = math.sqrt(max(middle**2 - square * rest, 0.0))
    return Share(ratio, (middle - half) / square, (middle + half) / square)
