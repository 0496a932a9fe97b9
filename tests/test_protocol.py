"""What a round is: order, pairing, flags, launches and the stop rule, on a simulated device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rungs import protocol
from rungs.protocol import Condition, Sample, Settings

SETTINGS = Settings(0.3, 20, 400, 200.0, 1.0, "hot", 7)
CALM = Condition("", 500.0, 60.0)


class Device:
    """Times come from `model(arm, now_us)`; everything that is queued is written down in `queue`."""

    def __init__(self, model: Callable[[str, float], float]) -> None:
        self.model, self.now, self.queue, self.launches, self.waits = model, 0.0, [], {}, 0

    def capture(self, arm: str, launches: int) -> None:
        self.launches[arm] = launches

    def replay(self, arm: str) -> None:
        self.queue.append(arm)
        self.now += self.model(arm, self.now) * self.launches.get(arm, 1)

    def stamp(self) -> float:
        self.queue.append("stamp")
        return self.now

    def event(self) -> float:
        self.queue.append("event")
        return self.now

    def wait(self, event: float) -> None:
        self.waits += 1

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def clock_mhz(self, before: float, after: float) -> float | None:
        return 1700.0


def noisy(times: dict[str, float], sigma: float, drift: float = 0.0, seed: int = 1) -> Callable[[str, float], float]:
    """Log-normal noise of `sigma`; `drift` is a clock that swings by that share over 20 ms."""
    rng = np.random.default_rng(seed)
    return lambda arm, now: times[arm] * float(np.exp(rng.normal(0, sigma))) * (1 + drift * np.sin(now / 20000))


def run(device: Device, arms: tuple[str, ...] = ("rung", "before", "control"), settings: Settings = SETTINGS):
    for arm in arms:
        device.capture(arm, 10)
    return protocol.run_rounds(device, arms[0], arms, 10, settings, (512, 512, 256), lambda: CALM)


def ratios(samples: list[Sample], a: str, b: str) -> np.ndarray:
    by_round: dict[int, dict[str, float]] = {}
    for sample in samples:
        by_round.setdefault(sample.round, {})[sample.arm] = sample.time_us
    return np.log([times[a] / times[b] for times in by_round.values()])


def test_every_round_times_every_arm_once_in_a_random_order_that_the_seed_fixes():
    samples, _ = run(Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.003)))
    orders = {}
    for sample in samples:
        orders.setdefault(sample.round, {})[sample.arm] = sample.order
    assert all(sorted(order.values()) == [0, 1, 2] for order in orders.values())
    assert len({tuple(sorted(order.items())) for order in orders.values()}) > 3
    again, _ = run(Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.003, seed=2)))
    assert [(s.arm, s.order) for s in again[:60]] == [(s.arm, s.order) for s in samples[:60]]


def test_a_sample_is_stamp_event_graph_event_stamp():
    device = Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.003))
    run(device)
    assert device.queue[:2] == ["stamp", "event"]
    assert device.queue[3:5] == ["event", "stamp"]
    assert device.queue[5:7] == ["stamp", "event"]


def test_a_step_of_one_percent_is_found_under_a_clock_that_drifts_by_a_fifth():
    samples, _ = run(Device(noisy({"rung": 100.0, "before": 101.0, "control": 60.0}, 0.002, drift=0.2)))
    assert np.median(ratios(samples, "before", "rung")) == pytest.approx(np.log(1.01), abs=0.003)
    unpaired = [
        np.median([s.time_us for s in samples if s.arm == "rung" and lo <= s.round < lo + 5]) for lo in (1, 6, 11, 16)
    ]
    assert max(unpaired) / min(unpaired) > 1.02, "the drift of this test must be larger than the step"


def test_it_stops_once_every_interval_is_narrow_and_not_before_the_fewest_rounds():
    samples, stop = run(Device(noisy({"rung": 10, "before": 11, "control": 5}, 1e-5)))
    assert (max(s.round for s in samples), stop) == (20, "interval")


def test_it_goes_on_to_the_cap_where_one_arm_stays_loose_and_keeps_every_round():
    samples, stop = run(
        Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.2)), settings=Settings(0.3, 20, 60, 200.0, 0, "hot", 7)
    )
    assert (len(samples), max(s.round for s in samples), stop) == (180, 60, "cap")


def test_one_round_is_always_queued_behind_the_one_that_is_read():
    device, seen = Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.2)), []
    original = device.wait
    device.wait = lambda event: (seen.append(device.queue.count("rung")), original(event))
    run(device, settings=Settings(0.3, 20, 30, 200.0, 0, "hot", 7))
    assert seen[:3] == [2, 3, 4]
    assert seen[-1] == 30


def prepared(model: Callable[[str, float], float], seconds: float = 0, rotation: int = 1) -> tuple[Device, int]:
    device = Device(model)
    return device, protocol.prepare(device, ("rung", "before", "control"), 200.0, seconds, rotation)


def test_launches_make_the_fastest_arm_last_the_sample_and_are_the_same_for_all():
    device, launches = prepared(noisy({"rung": 10.0, "before": 11.0, "control": 5.0}, 0))
    assert 200.0 <= launches * 5.0 < 220.0
    assert set(device.launches.values()) == {launches}


def test_launches_are_enough_once_the_clock_is_that_of_a_load():
    """While the GPU is idle its clock is a quarter: as many launches as fill a sample then are too few later."""
    device, launches = prepared(lambda arm, now: 5.0 * (4 if now < 2000 else 1), seconds=0.001)
    assert launches * 5.0 >= 200.0
    assert set(device.launches.values()) == {launches}


def test_launches_are_enough_where_few_take_longer_each_than_many():
    """A launch costs 4 us and the first of a sample 40 more, so five of them suggest less than half of what is needed."""

    class Slow(Device):
        def replay(self, arm: str) -> None:
            super().replay(arm)
            self.now += 40.0

    device = Slow(noisy({"rung": 4.0, "before": 4.0, "control": 4.0}, 0))
    launches = protocol.prepare(device, ("rung", "before", "control"), 200.0, 0)
    assert launches * 4.0 + 40 >= 200.0


def test_launches_of_a_rotation_are_whole_rotations():
    _, launches = prepared(noisy({"rung": 10.0, "before": 11.0, "control": 5.0}, 0), rotation=7)
    assert launches % 7 == 0
    assert launches * 5.0 >= 200.0


@pytest.mark.parametrize(
    ("mhz", "condition", "locked", "reason"),
    [
        (1700.0, CALM, None, ""),
        (1700.0, Condition("power cap", 700.0, 60.0), None, ""),
        (1700.0, Condition("power cap+thermal", 700.0, 90.0), None, "thermal"),
        (1700.0, Condition("unreadable", None, None), None, "unreadable"),
        (1700.0, Condition("", 500.0, 60.0, (4242,)), None, "another process"),
        (1700.0, CALM, 1700, ""),
        (1684.0, CALM, 1700, ""),
        (1680.0, CALM, 1700, "left the lock"),
        (None, CALM, 1700, "left the lock"),
    ],
)
def test_flags(mhz, condition, locked, reason):
    flag = protocol.flag(mhz, condition, locked)
    assert (reason in flag) if reason else flag == ""


def test_flagged_rounds_are_kept_and_do_not_decide():
    device = Device(noisy({"rung": 10, "before": 11, "control": 5}, 1e-5))
    for arm in ("rung", "before", "control"):
        device.capture(arm, 10)
    thermal = Condition("thermal", 700.0, 90.0)
    settings = Settings(0.3, 20, 60, 200.0, 0, "hot", 7)
    arms = ("rung", "before", "control")
    samples, stop = protocol.run_rounds(device, "rung", arms, 10, settings, (1, 2, 3), lambda: thermal)
    assert (stop, len(samples)) == ("cap", 180)
    assert all("thermal" in sample.flag for sample in samples)


def test_the_first_slow_rounds_do_not_move_the_median():
    def model(arm: str, now: float) -> float:
        return {"rung": 10.0, "before": 11.0, "control": 5.0}[arm] * (1.3 if now < 1000 else 1.0)

    samples, _ = run(Device(model))
    assert np.median(ratios(samples, "before", "rung")) == pytest.approx(np.log(1.1), abs=1e-9)


def test_warm_up_keeps_all_arms_busy_for_its_time(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(protocol.time, "monotonic", lambda: next(clock))
    device = Device(noisy({"rung": 10, "control": 5}, 0))
    protocol.warm_up(device, ("rung", "control"), 10)
    assert device.queue == ["rung", "control", "event"] * 9
    assert device.waits == 9


def test_the_protocol_is_short_enough_to_be_read_whole_and_its_hash_is_of_its_file_alone():
    from pathlib import Path

    from rungs.files import sha256_file

    path = Path(protocol.__file__)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200
    assert protocol.protocol_hash() == sha256_file(path)[:16]
