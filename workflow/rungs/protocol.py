"""What a round is. The code of `MODULES` is hashed as the protocol: change it, and every recorded number is stale.

Order of one sample, all on one stream: stamp, event, graph of n launches, event, stamp. Order of one round: every arm
once, shuffled. NVIDIA's own guidelines for measuring GEMMs are the anchor (CUTLASS, media/docs/cpp/
gemm_performance_measurement_methodology_guidelines.md): random data, warm-up, many launches, an even clock.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from rungs.bootstrap import median_interval
from rungs.files import module_hash

MODULES = ("protocol", "bootstrap", "session", "inputs", "sampler")
"""Modules of this package that decide a sample, or whether it is used. Nothing else stands in them."""
CHECK_EVERY = 10  # rounds between two looks at the stop rule
PROBE = 5  # launches from which the first guess at their number is made
SETTLE_S = 0.02  # load of each shape before its first round: the clock of the shape before must not reach into it
LOCK_TOLERANCE = 0.01
ALLOWED_THROTTLE = frozenset({"power cap"})  # pairing cancels a clock that it moves; any other makes a round unusable


@dataclass(frozen=True)
class Settings:
    """`target_percent`: half-width of every 95 % interval at which a shape stops. `sample_us`: shortest sample."""

    target_percent: float
    rounds_min: int
    rounds_max: int
    sample_us: float
    warmup_s: float
    l2: str
    seed: int

    def as_json(self) -> dict[str, Any]:
        return {"hash": protocol_hash(), **asdict(self)}


@functools.cache
def protocol_hash() -> str:
    return module_hash(*MODULES)


def timed_inputs(settings: Settings) -> tuple[str, int, str]:
    """Fill, seed and L2 policy of what is timed: random normal, since zeros run faster than data does."""
    return "normal", settings.seed + 1, settings.l2


def counted_inputs(settings: Settings) -> tuple[str, int]:
    """Fill and seed of kernels that read their own clock, whose results are whole numbers."""
    return "integer", settings.seed


def largest_first(shapes: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Shapes with their places, in the order in which a job times them.

    The largest come right after the warm-up: what reaches the power limit is timed once the clock has found it.
    """
    return sorted(enumerate(map(tuple, shapes)), key=lambda item: -math.prod(item[1]))


def warm_up_seconds(settings: Settings, under_load: bool) -> float:
    """The warm-up before a shape: none where the job has just timed another one."""
    return 0.0 if under_load else settings.warmup_s


class Session(Protocol):
    """What the protocol needs of a device. Stamps and events are recorded in stream order and read after `wait`."""

    def capture(self, arm: str, launches: int) -> None: ...
    def replay(self, arm: str) -> None: ...
    def stamp(self) -> Any: ...
    def event(self) -> Any: ...
    def wait(self, event: Any) -> None: ...
    def elapsed_us(self, start: Any, end: Any) -> float: ...
    def clock_mhz(self, before: Any, after: Any) -> float | None: ...
    def cycles(self, arm: str) -> float: ...


@dataclass(frozen=True)
class Condition:
    """The GPU's state around a round. `others` are processes of other owners on the GPU."""

    throttle: str
    power_w: float | None
    temp_c: float | None
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One timed sample: `launches` launches of `arm` took `time_us` each."""

    round: int
    arm: str
    order: int
    launches: int
    time_us: float
    sm_mhz: float | None
    condition: Condition
    flag: str


def flag(sm_mhz: float | None, condition: Condition, locked_mhz: int | None) -> str:
    """Why a sample is not used, or an empty string."""
    if condition.others:
        return f"another process ({', '.join(map(str, condition.others))}) was on the GPU"
    reasons = set(filter(None, condition.throttle.split("+"))) - ALLOWED_THROTTLE
    if reasons:
        return f"the clock was throttled ({', '.join(sorted(reasons))})"
    if locked_mhz and (sm_mhz is None or abs(sm_mhz / locked_mhz - 1) > LOCK_TOLERANCE):
        return f"the clock ({'unknown' if sm_mhz is None else f'{sm_mhz:.0f} MHz'}) left the lock at {locked_mhz} MHz"
    return ""


def count_flag(condition: Condition) -> str:
    """Why a count is not used: cycles of a kernel are its own, unless another process shares the SMs."""
    return flag(None, Condition("", None, None, condition.others), None)


def warm_up(session: Session, arms: Sequence[str], seconds: float) -> None:
    """Keep the GPU busy with the arms' graphs: the first round then finds the clock and the caches of the later ones."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for arm in arms:
            session.replay(arm)
        session.wait(session.event())


def prepare(session: Session, arms: Sequence[str], sample_us: float, seconds: float, rotation: int = 1) -> int:
    """Capture every arm with the same number of launches, a multiple of `rotation`, and warm up for that many seconds.

    They are as many as make the fastest arm's sample last `sample_us`, which is looked at again under load: before the
    warm-up the clock may still be an idle one, and a few launches take longer each than many.
    """

    launches, wanted = 0, float(PROBE)
    for look in range(7):
        launches = max(1, math.ceil(wanted / rotation)) * rotation
        for arm in arms:
            session.capture(arm, launches)
        if look == 1:
            warm_up(session, arms, max(seconds, SETTLE_S))
        shortest = _shortest_us(session, arms)
        if look and shortest >= sample_us * 1.02:
            break
        wanted = launches * max(1.05 if look else 0.0, sample_us * 1.06 / shortest)
    return launches


def _shortest_us(session: Session, arms: Sequence[str]) -> float:
    """The shortest of three samples of each arm; the first replay pays for loading the graph."""
    lasted = []
    for arm in [arm for arm in arms for _ in range(3)]:
        start = session.event()
        session.replay(arm)
        end = session.event()
        session.wait(end)
        lasted.append(session.elapsed_us(start, end))
    return min(lasted)


def run_rounds(
    session: Session,
    rung: str,
    arms: Sequence[str],
    launches: int,
    settings: Settings,
    problem: tuple[int, ...],
    condition: Callable[[], Condition],
    locked_mhz: int | None = None,
) -> tuple[list[Sample], str]:
    """Time every arm once per round until the stop rule or the cap; returns all samples and `interval` or `cap`.

    The next round is already queued while one is read, so the GPU never idles between two rounds.
    """
    rng = np.random.default_rng([settings.seed, *problem])
    samples: list[Sample] = []
    queued: list[tuple[int, list[Any], Any]] = []
    for number in range(1, settings.rounds_max + 1):
        queued.append((number, *_enqueue(session, rng.permutation(arms).tolist())))
        while len(queued) > (number < settings.rounds_max):
            done, marks, end = queued.pop(0)
            session.wait(end)
            samples += _read(session, marks, done, launches, condition(), locked_mhz)
            if done >= settings.rounds_min and done % CHECK_EVERY == 0 and decided(samples, rung, arms, settings):
                for _, _, end in queued:
                    session.wait(end)
                return samples, "interval"
    return samples, "cap"


def _enqueue(session: Session, order: Sequence[str]) -> tuple[list[tuple[str, Any, Any, Any, Any]], Any]:
    """Queue one round; returns its marks and the event behind its last stamp."""
    marks = []
    for arm in order:
        before, start = session.stamp(), session.event()
        session.replay(arm)
        marks.append((arm, before, start, session.event(), session.stamp()))
    return marks, session.event()


def _read(
    session: Session, marks: list[Any], number: int, launches: int, condition: Condition, locked_mhz: int | None
) -> list[Sample]:
    samples = []
    for order, (arm, before, start, end, after) in enumerate(marks):
        mhz, time_us = session.clock_mhz(before, after), session.elapsed_us(start, end) / launches
        samples.append(Sample(number, arm, order, launches, time_us, mhz, condition, flag(mhz, condition, locked_mhz)))
    return samples


def count_rounds(
    session: Session,
    rung: str,
    arms: Sequence[str],
    settings: Settings,
    problem: tuple[int, ...],
    condition: Callable[[], Condition],
) -> tuple[list[Sample], str]:
    """`run_rounds` for kernels that read their own clock: the cycles stand where the time does, and nothing is queued ahead.

    A round launches every arm once, in random order; nothing else is on the GPU, and cycles know of no clock, so that
    neither graphs nor a warm-up are needed.
    """
    rng = np.random.default_rng([settings.seed, *problem])
    samples: list[Sample] = []
    for number in range(1, settings.rounds_max + 1):
        now = condition()
        for order, arm in enumerate(rng.permutation(arms).tolist()):
            samples.append(Sample(number, arm, order, 1, session.cycles(arm), None, now, count_flag(now)))
        looked = number >= settings.rounds_min and number % CHECK_EVERY == 0
        if looked and decided(samples, rung, arms, settings):
            return samples, "interval"
    return samples, "cap"


def decided(samples: Sequence[Sample], rung: str, arms: Sequence[str], settings: Settings) -> bool:
    """True once the 95 % interval of the median log-ratio of the rung to every other arm is narrow enough."""
    used: dict[int, dict[str, float]] = {}
    for sample in samples:
        if not sample.flag:
            used.setdefault(sample.round, {})[sample.arm] = sample.time_us
    times = np.array([[row[arm] for arm in arms] for _, row in sorted(used.items()) if len(row) == len(arms)])
    if len(times) < settings.rounds_min:
        return False
    ratios = np.log(times / times[:, [arms.index(rung)]])
    intervals = [median_interval(ratios[:, at])[1:] for at, arm in enumerate(arms) if arm != rung]
    return all((high - low) / 2 <= settings.target_percent / 100 for low, high in intervals)
