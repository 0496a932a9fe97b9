"""The statistics hold what they promise on data whose truth is known."""

import math
import time

import numpy as np
import pytest

from rungs import bootstrap, stats
from rungs.protocol import CHECK_EVERY
from synthetic import correlated

TARGET, ROUNDS_MIN, ROUNDS_MAX = 0.003, 20, 240


def noise(seed: int, rounds: int, correlation: float = 0.3, series: int = 1) -> np.ndarray:
    return correlated(np.random.default_rng(seed), rounds, correlation, series)


# The interval of a median


def test_the_median_is_the_sample_median():
    median, low, high = bootstrap.median_interval([0.1, 0.5, 0.2, 0.4, 0.3, 0.9])
    assert median == pytest.approx(0.35)
    assert low < median < high
    assert median - low == pytest.approx(high - median)


def test_the_same_data_gives_the_same_interval_and_another_seed_another():
    data = noise(1, 40)[0]
    assert bootstrap.median_interval(data) == bootstrap.median_interval(data)
    assert bootstrap.median_interval(data)[1] != bootstrap.median_interval(data, seed=2)[1]


def test_many_rounds_are_drawn_in_parts_that_change_nothing(monkeypatch):
    data = noise(1, 41)[0]
    whole = bootstrap.median_error(data)
    monkeypatch.setattr(bootstrap, "KEPT", 0)
    for at_once in (1, 41 * 7, 10**9):
        monkeypatch.setattr(bootstrap, "AT_ONCE", at_once)
        assert bootstrap.median_error(data) == whole


def test_rounds_that_all_agree_have_an_interval_of_no_width():
    assert bootstrap.median_interval(np.full(30, 0.01)) == (0.01, 0.01, 0.01)


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_too_few_rounds_have_no_interval(rounds):
    _, low, high = bootstrap.median_interval(np.arange(rounds))
    assert (low, high) == (-math.inf, math.inf)


@pytest.mark.parametrize("data", [[0.1, math.nan] * 5, [0.1, math.inf] * 5, [[0.1] * 6]])
def test_what_is_no_vector_of_finite_numbers_is_refused(data):
    with pytest.raises(ValueError, match="finite"):
        bootstrap.median_interval(data)


def test_the_error_of_independent_rounds_is_the_known_one():
    """sqrt(pi/2)/sqrt(n) for a normal median; the jitter adds a few per cent."""
    data = np.random.default_rng(3).standard_normal((60, 200))
    errors = [bootstrap.median_error(row).error for row in data]
    assert np.median(errors) == pytest.approx(math.sqrt(math.pi / 2 / 200), rel=0.15)


def test_the_error_grows_with_the_correlation_of_neighbouring_rounds():
    """An interval that took the rounds for independent would be 1.5 times too narrow here."""
    free, tied = (np.median([bootstrap.median_error(row).error for row in noise(4, 120, c, 40)]) for c in (0.0, 0.5))
    assert tied / free > 1.35


def test_the_block_grows_with_the_cube_root():
    assert [bootstrap.block_length(n) for n in (20, 64, 240)] == [5, 6, 10]


def test_a_wider_level_gives_a_wider_interval_of_student_form():
    median = bootstrap.median_error(noise(5, 40)[0])
    narrow, wide = (median.interval(level)[1] - median.value for level in (0.95, 0.999))
    # t quantiles at 1.5 (40/6 - 1) = 8.5 degrees of freedom
    assert wide / narrow == pytest.approx(4.9009 / 2.2826, rel=1e-3)


def test_two_hundred_rounds_take_under_five_milliseconds():
    data = noise(6, 200)[0]
    bootstrap.median_interval(data)
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        bootstrap.median_interval(data)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.005


def stopped(data: np.ndarray) -> tuple[float, float, float]:
    """The interval at the check where the protocol would stop: half width at the target, looked at every CHECK_EVERY rounds."""
    for rounds in range(ROUNDS_MIN, ROUNDS_MAX + 1, CHECK_EVERY):
        median, low, high = bootstrap.median_interval(data[:rounds])
        if (high - low) / 2 <= TARGET:
            break
    return median, low, high


def test_the_interval_covers_the_truth_in_93_to_97_per_cent_of_experiments_that_stop_early():
    truth, covered, experiments = 0.01, 0, 0
    for sigma in (0.005, 0.008, 0.011, 0.015):  # stop after about 30, 60, 120 rounds and at the cap
        for row in noise(7, ROUNDS_MAX, series=250):
            _, low, high = stopped(truth + sigma * row)
            covered += low <= truth <= high
            experiments += 1
    assert experiments == 1000
    assert 0.93 <= covered / experiments <= 0.97


@pytest.mark.parametrize(("rounds", "most"), [(20, 0.99), (60, 0.97), (240, 0.97)])
def test_the_interval_covers_the_truth_at_a_fixed_number_of_rounds(rounds, most):
    """At the fewest rounds it is rather too wide: stopping there is what takes the surplus away again."""
    intervals = [bootstrap.median_interval(row) for row in noise(8, rounds, series=1000)]
    assert 0.93 <= np.mean([low <= 0 <= high for _, low, high in intervals]) <= most


# Paired rounds


def paired(effect: float, rounds: int = 60, drift: float = 0.2, sigma: float = 0.002, seed: int = 9) -> np.ndarray:
    """Log-ratios of two arms timed in the same rounds under one drifting clock."""
    a, b = noise(seed, rounds, series=2) * sigma / math.sqrt(2)
    clock = np.log(1 - drift * (0.5 + 0.5 * np.sin(np.arange(rounds) / 7)))
    return (clock + a) - (clock + b - effect)


@pytest.mark.parametrize("seed", range(5))
def test_one_per_cent_is_found_under_twenty_per_cent_of_drift(seed):
    median, low, high = bootstrap.median_interval(paired(math.log(1.01), seed=seed))
    assert abs(stats.percent(median) - 1) < 0.3
    assert stats.verdict(low, high, stats.log_ratio(0.2)) == "faster"


@pytest.mark.parametrize("seed", range(5))
def test_the_same_binary_under_two_names_is_a_tie(seed):
    _, low, high = bootstrap.median_interval(paired(0.0, seed=seed))
    assert stats.verdict(low, high, stats.log_ratio(0.2)) == "tie"


def test_a_against_a_is_claimed_to_differ_in_at_most_five_per_cent():
    """With the floor of three jobs of the same noise over five shapes, as the pipeline makes it."""
    sigma, claims = 0.003, 0
    for experiment in range(40):
        jobs = noise(100 + experiment, 30, series=15).reshape(3, 5, 30) * sigma
        twin = {shape: [float(np.median(jobs[job, shape])) for job in range(3)] for shape in range(5)}
        floor = stats.floor_of(twin, {}, 3).value
        for row in noise(500 + experiment, 30, series=25) * sigma:
            _, low, high = bootstrap.median_interval(row)
            claims += stats.verdict(low, high, floor) in ("faster", "slower")
    assert claims / 1000 <= 0.05


def test_a_against_a_without_any_floor_is_claimed_to_differ_as_often_as_the_level_says():
    intervals = [bootstrap.median_interval(row) for row in noise(10, 40, series=1000)]
    false = np.mean([stats.verdict(low, high, 0.0) in ("faster", "slower") for _, low, high in intervals])
    assert 0.02 <= false <= 0.06


def test_ab_and_ba_agree_though_each_second_arm_is_slower():
    """The order of the arms is random in each round; a tenth of the effect per place in the round cancels."""
    rng, effect = np.random.default_rng(11), math.log(1.01)
    place = rng.permuted(np.tile([0, 1], (80, 1)), axis=1) * 0.001
    a, b = noise(12, 80, series=2) * 0.001 + place.T
    forward, low, high = bootstrap.median_interval(a - (b - effect))
    backward, *_ = bootstrap.median_interval((b - effect) - a)
    assert backward == -forward
    assert low <= effect <= high


def test_a_slow_first_fifth_of_the_rounds_does_not_move_the_median():
    steady = paired(math.log(1.01), rounds=50)
    slow = steady + 0.0
    slow[:10] += 0.3 * np.array([1, -1] * 5)  # each arm in turn takes 35 % longer
    moved = bootstrap.median_interval(slow)[0] - bootstrap.median_interval(steady)[0]
    assert abs(moved) < 0.0005


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "floor", "expected"),
    [
        (0.3, 0.5, 0.2, "faster"),
        (-0.5, -0.3, 0.2, "slower"),
        (-0.1, 0.1, 0.2, "tie"),
        (-0.2, 0.2, 0.2, "tie"),
        (0.1, 0.3, 0.2, "undecided"),
        (-0.3, 0.1, 0.2, "undecided"),
        (-0.5, 0.5, 0.2, "undecided"),
        (0.2, 0.5, 0.2, "undecided"),
        (0.0, 0.0, 0.0, "tie"),
        (-math.inf, math.inf, 0.2, "undecided"),
    ],
)
def test_verdict(low, high, floor, expected):
    assert stats.verdict(low, high, floor) == expected


def test_rounds_to_decide_follow_the_root_law():
    # 0.4 from the floor with a half width of 0.8: twice too wide, so four times the rounds.
    assert stats.rounds_to_decide(0.6, -0.2, 1.4, 0.2, 30) == 90
    assert stats.rounds_to_decide(-0.6, -1.4, 0.2, 0.2, 30) == 90
    # A tie needs the interval inside the floor: 0.1 of room, half width 0.3.
    assert stats.rounds_to_decide(0.1, -0.2, 0.4, 0.2, 20) == 160


def test_that_many_more_rounds_do_decide():
    row = noise(13, 30)[0] * 0.006
    median, low, high = bootstrap.median_interval(row - np.median(row) + 0.003)
    floor = 0.002
    assert stats.verdict(low, high, floor) == "undecided"
    more = stats.rounds_to_decide(median, low, high, floor, 30)
    shrunk = (high - low) / 2 * math.sqrt(30 / (30 + more))
    assert stats.verdict(median - shrunk, median + shrunk, floor) != "undecided"


def test_a_median_on_the_floor_is_never_decided():
    assert stats.rounds_to_decide(0.2, 0.1, 0.3, 0.2, 40) is None


def test_without_an_interval_the_first_rounds_are_what_is_missing():
    assert stats.rounds_to_decide(0.2, -math.inf, math.inf, 0.1, 3) == 2


def test_a_table_of_claims_is_corrected_for_their_number():
    assert stats.claim_level(1) == pytest.approx(0.95)
    assert stats.claim_level(100) == pytest.approx(0.9995)
    assert stats.claim_level(0) == pytest.approx(0.95)


def test_percent_and_log_ratio_are_inverse():
    assert stats.percent(math.log(1.1)) == pytest.approx(10)
    assert stats.log_ratio(stats.percent(0.07)) == pytest.approx(0.07)


# Floor


@pytest.mark.parametrize(
    ("m", "k", "expected"),
    [
        (128, 512, "one wave"),
        (2 * 132 * 128, 481, "one wave"),
        (2 * 132 * 128, 480, "short loop"),
        (2 * 132 * 128 + 1, 480, "many waves"),
        (2 * 132 * 128 + 1, 512, "many waves"),
    ],
)
def test_one_wave_ends_where_the_tiles_fill_the_gpu_and_a_short_loop_is_its_own_class(m, k, expected):
    assert stats.shape_class((m, 128, k), (128, 128, 32), 2, 132) == expected


def test_the_floor_is_the_larger_of_within_and_between_jobs():
    twin = {"a": [0.001, -0.003, 0.002], "b": [0.0, 0.001, 0.001]}
    control = {"a": [0.500, 0.501, 0.502], "b": [0.4, 0.407, 0.402]}
    floor = stats.floor_of(twin, control, 3)
    assert (floor.within, floor.between, floor.shapes, floor.jobs) == (0.003, pytest.approx(0.007), 2, 3)
    assert floor.value == pytest.approx(0.007)


def test_one_job_shows_nothing_between_jobs():
    floor = stats.floor_of({"a": [0.001]}, {"a": [0.5]}, 1)
    assert (floor.between, floor.value) == (None, 0.001)
    assert stats.floor_of({}, {}, 0) is None
