"""The interval of the median of correlated rounds. Pure; imported by the protocol's stop rule and by the statistics."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 1000
SEED = 20260101
FEWEST = 5
"""Rounds below which there is no interval: a block would be most of the data."""
AT_ONCE = 1_000_000
"""Numbers that are drawn and sorted at a time: what a process needs does not grow with its rounds."""
KEPT = AT_ONCE // RESAMPLES
"""Rounds up to which what was drawn is kept for the next vector of as many."""


@dataclass(frozen=True)
class Median:
    """A median with its standard error and that error's degrees of freedom. In the unit of the data."""

    value: float
    error: float
    freedom: float
    rounds: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Symmetric Student interval. Infinite where there are too few rounds for an error."""
        from scipy.special import stdtrit  # 0.1 s that a process without intervals need not spend

        if self.rounds < FEWEST:
            return -math.inf, math.inf
        half = float(stdtrit(self.freedom, 0.5 + level / 2)) * self.error
        return self.value - half, self.value + half


def block_length(rounds: int) -> int:
    """Rounds in a block: 1.5 n^(1/3), rounded up.

    n^(1/3) is the rate of least error for a bootstrap variance (Hall, Horowitz and Jing, Biometrika 82, 1995); the
    factor is ours, from the simulations in `tests/test_stats.py`.
    """
    return math.ceil(1.5 * rounds ** (1 / 3))


def median_error(log_ratios: ArrayLike, seed: int = SEED) -> Median:
    """Median and standard error of `log_ratios`, shape (rounds,) in the order they were measured.

    Circular block bootstrap (Politis and Romano 1992), with four refinements without which the interval of a median
    of 20 to 240 correlated rounds covers 85 to 92 % instead of 95 %:

    * Gaussian jitter with Silverman's bandwidth, since the plain bootstrap of a median jumps from one order statistic
      to the next (Hall, DiCiccio and Romano, Annals of Statistics 17, 1989).
    * The correlation that blocks cut off is put back as an AR(1) tail. It is read from the signs of the deviations,
      which are the influence function of the median, and corrected for its bias (Marriott and Pope, Biometrika 41,
      1954).
    * 1 - l/n for what the sample median takes out of a block of l.
    * 1.5 (n/l - 1) degrees of freedom, those of overlapping batches (Meketon and Schmeiser, Winter Simulation Conf.
      1984).
    """
    data = np.asarray(log_ratios, dtype=np.float64)
    if data.ndim != 1 or not np.isfinite(data).all():
        raise ValueError(f"log-ratios must be a vector of finite numbers, not shape {data.shape}")
    rounds = data.size
    value = float(_middle(np.sort(data))) if rounds else math.nan
    if rounds < FEWEST:
        return Median(value, math.inf, 1.0, rounds)
    block = block_length(rounds)
    # Deviations fit in 32 bits, where a sort is a tenth of numpy's 64-bit partition.
    deviation = (data - value).astype(np.float32)
    bandwidth = 0.9 * min(float(deviation.std()), _quartiles_apart(np.sort(deviation)) / 1.349) * rounds**-0.2
    parts = []
    for index, noise in _kept_draws(rounds, block, seed) if rounds <= KEPT else _draws(rounds, block, seed):
        resampled = np.sort(deviation[index] + np.float32(bandwidth) * noise, axis=1)
        parts.append(resampled[:, (rounds - 1) // 2] + resampled[:, rounds // 2])
    medians = np.concatenate(parts)
    error = float(medians.std(ddof=1, dtype=np.float64)) / 2
    error *= math.sqrt(_tail(np.sign(deviation), block) / (1 - block / rounds))
    return Median(value, error, max(1.0, 1.5 * (rounds / block - 1)), rounds)


def median_interval(log_ratios: ArrayLike, level: float = 0.95, seed: int = SEED) -> tuple[float, float, float]:
    """(median, low, high) of `log_ratios`, shape (rounds,), at that level. Infinite ends under `FEWEST` rounds."""
    median = median_error(log_ratios, seed)
    return median.value, *median.interval(level)


def _middle(ordered: NDArray[np.float64]) -> np.float64:
    """What numpy's median gives of sorted numbers, without the tenth of a millisecond that it takes to."""
    return (ordered[(ordered.size - 1) // 2] + ordered[ordered.size // 2]) / 2


def _quartiles_apart(ordered: NDArray[np.float32]) -> float:
    """The 75th less the 25th percentile of sorted numbers as numpy gives them, in as little time."""

    def quantile(share: float) -> float:
        place = (ordered.size - 1) * share
        below, above = ordered[int(place)], ordered[min(int(place) + 1, ordered.size - 1)]
        rest, step = place - int(place), float(above - below)
        return float(above) - step * (1 - rest) if rest >= 0.5 else float(below) + step * rest

    return quantile(0.75) - quantile(0.25)


Draws = tuple[NDArray[np.intp], NDArray[np.float32]]
"""Indices of the resampled rounds and standard normal jitter, both (resamples, rounds)."""


def _draws(rounds: int, block: int, seed: int) -> Iterator[Draws]:
    """All `RESAMPLES` in parts of `AT_ONCE` numbers, the same however they are cut."""
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, rounds, (RESAMPLES, math.ceil(rounds / block), 1))
    several = max(AT_ONCE // rounds, 1)
    for first in range(0, RESAMPLES, several):
        some = starts[first : first + several]
        index = (some + np.arange(block)).reshape(len(some), -1)[:, :rounds] % rounds
        yield index.astype(np.intp), generator.standard_normal((len(some), rounds), dtype=np.float32)


@functools.lru_cache(maxsize=32)
def _kept_draws(rounds: int, block: int, seed: int) -> tuple[Draws, ...]:
    """Most jobs of a set have one of a few numbers of rounds."""
    return tuple(_draws(rounds, block, seed))


def _tail(signs: NDArray[np.float32], block: int) -> float:
    """Long-run variance of AR(1) signs over the part of it that blocks of that length see; at least 1."""
    rounds = signs.size
    power = float(signs @ signs)
    if not power or rounds <= 3:
        return 1.0
    measured = float(signs[1:] @ signs[:-1]) / power
    correlation = min(max((rounds * measured + 1) / (rounds - 3), 0.0), 0.7)
    lags = np.arange(1, block)
    seen = 1 + 2 * float(((1 - lags / block) * correlation**lags).sum())
    return (1 + correlation) / (1 - correlation) / seen
