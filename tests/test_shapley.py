"""Shapley values and contrasts in closed form: what the formulas promise, on worths that are made up."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.special import stdtrit

from rungs import effects, schemas, shapley, stats, variants
from rungs.errors import RungsError
from rungs.stats import Median

EXPERIMENT = variants.load_experiment("gemm")
GAME = shapley.game_of(EXPERIMENT)
PLAYERS = ("load", "read", "b_layout", "stages")


def worths(seed: int, players=PLAYERS) -> dict[frozenset, float]:
    rng = np.random.default_rng(seed)
    return {moved: float(rng.normal()) for moved in shapley.coalitions(players)}


def by_orders(worth, players, player: str) -> float:
    """The definition: what the player adds, averaged over every order in which the players can come."""
    orders = list(itertools.permutations(players))
    gains = []
    for order in orders:
        before = frozenset(order[: order.index(player)])
        gains.append(worth[before | {player}] - worth[before])
    return sum(gains) / len(orders)


def value(worth, players, player: str, weights=shapley.weights) -> float:
    return sum(weight * worth[moved] for moved, weight in weights(players, player).items())


def banzhaf(players, player: str) -> dict[frozenset, float]:
    """A mutation: every set alike, which is another index (Banzhaf's) and does not share the whole out."""
    size = 2 ** (len(players) - 1)
    return {moved: (1 if player in moved else -1) / size for moved in shapley.coalitions(players)}


# Values


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_are_the_mean_over_all_orders(seed):
    worth = worths(seed)
    for player in PLAYERS:
        assert value(worth, PLAYERS, player) == pytest.approx(by_orders(worth, PLAYERS, player), abs=1e-12)


def test_two_factors_share_their_interaction_evenly():
    worth = {frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 2.0, frozenset("ab"): 7.0}
    assert value(worth, ("a", "b"), "a") == pytest.approx((1 + 5) / 2)
    assert value(worth, ("a", "b"), "b") == pytest.approx((2 + 6) / 2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_values_add_up_to_the_whole_gain(count):
    players = tuple("abcde"[:count])
    worth = worths(5, players)
    whole = worth[frozenset(players)] - worth[frozenset()]
    assert sum(value(worth, players, p) for p in players) == pytest.approx(whole, abs=1e-12)
    if count > 2:
        assert abs(sum(value(worth, players, p, banzhaf) for p in players) - whole) > 1e-3, (
            "the test would see other weights"
        )


def test_factors_that_do_the_same_have_the_same_value_and_one_that_does_nothing_has_none():
    worth = worths(6)
    alike = {m: worth[m if "read" not in m or "load" in m else m - {"read"} | {"load"}] for m in worth}
    assert value(alike, PLAYERS, "load") == pytest.approx(value(alike, PLAYERS, "read"), abs=1e-12)
    assert value(worth, PLAYERS, "load") != pytest.approx(value(worth, PLAYERS, "read"), abs=1e-3)
    idle = {m: worth[m - {"stages"}] for m in worth}
    assert value(idle, PLAYERS, "stages") == pytest.approx(0.0, abs=1e-12)
    other = worths(7)
    both = {m: worth[m] + other[m] for m in worth}
    assert value(both, PLAYERS, "load") == pytest.approx(value(worth, PLAYERS, "load") + value(other, PLAYERS, "load"))


def test_an_order_of_a_ladder_gives_another_answer_and_the_mean_of_all_does_not_depend_on_it():
    worth = worths(8)
    first, last = (
        worth[frozenset(["load"])] - worth[frozenset()],
        worth[frozenset(PLAYERS)] - worth[frozenset(PLAYERS[1:])],
    )
    assert first != pytest.approx(last)
    turned = tuple(reversed(PLAYERS))
    assert value(worth, turned, "load") == pytest.approx(value(worth, PLAYERS, "load"), abs=1e-12)


def test_the_game_of_gemm_has_32_corners_from_the_plainest_to_b5():
    assert (GAME.start.name, EXPERIMENT.rung_names(GAME.goal)) == ("abl_L0_R0_bl0_s1_sw0", ["B5"])
    assert GAME.players == tuple(EXPERIMENT.factors) and len(GAME.corners) == 32
    assert len({variant.name for variant in GAME.corners.values()}) == 32
    assert GAME.corners[frozenset()] == GAME.start and GAME.corners[frozenset(GAME.players)] == GAME.goal
    assert GAME.corners[frozenset(["load", "swizzle"])].name == "abl_L2_R0_bl0_s1_sw1"
    assert [(name, level) for name, level, _ in GAME.on_top] == [("stages", 3), ("stages", 4), ("read", 2)]
    assert GAME.on_top[2][2].name == "abl_L2_R2_bl1_s2_sw1"


def test_levels_that_do_not_go_together_are_a_corner_without_a_variant():
    ends = {
        "source": {"load": 1, "read": 1, "b_layout": 0, "stages": 2, "swizzle": 0},
        "target": {"load": 1, "read": 2, "b_layout": 1, "stages": 2, "swizzle": 0},
    }
    game = shapley.game_of(dataclasses.replace(EXPERIMENT, factorial={"shapley": ends}))
    assert game.players == ("read", "b_layout")
    assert game.corners[frozenset(["read"])] is None and game.corners[frozenset(["b_layout"])] is not None


# The experiment's file


def declared(**change):
    raw = schemas.read_yaml(variants.CONFIG / "experiments" / "gemm.yaml", "experiment")
    shares = {**raw["factorial"]["shapley"], **change}
    return {**raw, "factorial": {**raw["factorial"], "shapley": shares}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"source": {"load": 0}},
            r"factorial\.shapley\.source is no variant: Experiment gemm: no level for factor b_layout",
        ),
        (
            {"target": {"load": 0, "read": 1, "b_layout": 1, "stages": 3, "swizzle": 1}},
            r"factorial\.shapley\.target is no variant: Level 3 of factor stages",
        ),
        (
            {"target": {"load": 0, "read": 0, "b_layout": 0, "stages": 1, "swizzle": 0}},
            r"goes from abl_L0_R0_bl0_s1_sw0 to itself: let source and target differ in a factor\.",
        ),
        (
            {"on_top": {"stages": [2]}},
            r"on_top has level 2 of stages, which source or target has already: take it out\.",
        ),
        ({"on_top": {"load": [0]}}, r"on_top has level 0 of load, which source or target has already: take it out\."),
        (
            {"on_top": {"stages": [9]}},
            r"on_top is no change of the target: Experiment gemm has no level 9 of factor stages",
        ),
        ({"on_top": {"tile": [1]}}, r"on_top is no change of the target: Experiment gemm: unknown factor tile"),
    ],
)
def test_ends_that_are_no_variants_are_one_sentence(change, words):
    with pytest.raises(RungsError, match=words) as caught:
        variants.parse_experiment(declared(**change))
    assert "\n" not in str(caught.value)


def test_a_factorial_without_ends_is_refused_by_the_schema():
    raw = declared()
    del raw["factorial"]["shapley"]
    with pytest.raises(RungsError, match="'shapley' is a required property"):
        schemas.validate(raw, "experiment", "gemm.yaml")
    raw = declared(orders=120)
    with pytest.raises(RungsError, match="there is no key 'orders'; choose of source, target, on_top"):
        schemas.validate(raw, "experiment", "gemm.yaml")


# Contrasts


MEDIANS = [Median(0.10, 0.001, 20.0, 30), Median(0.40, 0.002, 10.0, 30), Median(0.95, 0.003, 5.0, 30)]
SPREAD = stats.Spread(0.004, 9.0)


def test_the_error_of_a_contrast_is_the_weighted_sum_of_both_variances():
    weights = (-0.5, -0.5, 1.0)
    found = stats.contrast(zip(weights, MEDIANS, strict=True), SPREAD)
    parts = [(w**2 * m.error**2, m.freedom) for w, m in zip(weights, MEDIANS, strict=True)]
    parts.append((1.5 * 0.004**2, 9.0))
    variance = sum(part for part, _ in parts)
    assert found.value == pytest.approx(0.95 - 0.25)
    assert found.error == pytest.approx(math.sqrt(variance))
    assert found.freedom == pytest.approx(variance**2 / sum(part**2 / freedom for part, freedom in parts))
    low, high = found.interval(0.9)
    assert high - low == pytest.approx(2 * stdtrit(found.freedom, 0.95) * found.error)
    assert stats.contrast(zip(weights, MEDIANS, strict=True), None).interval() == (-math.inf, math.inf)


def test_a_share_has_fiellers_interval():
    """At either end the part is exactly as far from that share of the whole as its error allows."""
    part, whole = (-0.5, 0.5, 0.0), (-1.0, 0.0, 1.0)
    found = stats.share(part, whole, MEDIANS, SPREAD)
    assert found.value == pytest.approx(0.15 / 0.85)
    assert found.low < found.value < found.high

    def difference(ratio: float) -> stats.Effect:
        return stats.contrast([(p - ratio * w, m) for p, w, m in zip(part, whole, MEDIANS, strict=True)], SPREAD)

    quantile = stdtrit(difference(found.value).freedom, 0.975)
    for end, sign in ((found.low, 1), (found.high, -1)):
        assert sign * difference(end).value == pytest.approx(quantile * difference(end).error, rel=1e-9)
    wide = stats.share(part, whole, MEDIANS, SPREAD, 0.999)
    assert wide.low < found.low and wide.high > found.high


def test_a_share_of_all_is_certain_and_of_nothing_unknown():
    whole = (-1.0, 0.0, 1.0)
    assert stats.share(whole, whole, MEDIANS, SPREAD) == stats.Share(1.0, pytest.approx(1.0), pytest.approx(1.0))
    flat = [dataclasses.replace(median, value=0.1 + 0.001 * i) for i, median in enumerate(MEDIANS)]
    open_ended = stats.share((-1.0, 1.0, 0.0), whole, flat, SPREAD)
    assert (open_ended.value, open_ended.low, open_ended.high) == (pytest.approx(0.5), -math.inf, math.inf)
    assert math.isnan(stats.share((-1.0, 1.0, 0.0), (0.0, 0.0, 0.0), MEDIANS, SPREAD).value)
    assert stats.share((-1.0, 1.0, 0.0), whole, MEDIANS, None).high == math.inf


# The spread between jobs


def at(value: float, error: float = 0.0) -> Median:
    return Median(value, error, 8.0, 30)


def test_the_spread_of_one_binary_over_jobs_is_its_standard_deviation():
    found = stats.spread_between_jobs({"a": {1: at(0.10), 2: at(0.20), 3: at(0.30)}, "alone": {4: at(9.0)}})
    assert (found.deviation, found.freedom) == (pytest.approx(0.1), pytest.approx(2.0))


def test_the_error_of_the_rounds_is_taken_off():
    found = stats.spread_between_jobs({"a": {1: at(0.1, 0.05), 2: at(0.3, 0.07)}})
    assert found.deviation**2 == pytest.approx(0.02 - (0.05**2 + 0.07**2) / 2)
    parts = [(0.02, 1.0), (0.05**2 / 2, 8.0), (0.07**2 / 2, 8.0)]
    assert found.freedom == pytest.approx(found.deviation**4 / sum(p**2 / f for p, f in parts))
    assert stats.spread_between_jobs({"a": {1: at(0.1, 0.3), 2: at(0.3, 0.3)}}).deviation == 0.0


def test_binaries_that_move_together_count_once():
    """Two binaries in the same two jobs go through the same control: one degree of freedom, not two."""
    together = stats.spread_between_jobs({"a": {1: at(0.1), 2: at(0.3)}, "b": {1: at(0.5), 2: at(0.7)}})
    apart = stats.spread_between_jobs({"a": {1: at(0.1), 2: at(0.3)}, "b": {3: at(0.5), 4: at(0.7)}})
    assert (together.deviation, apart.deviation) == (pytest.approx(math.sqrt(0.02)),) * 2
    assert (together.freedom, apart.freedom) == (pytest.approx(1.0), pytest.approx(2.0))


def test_without_a_binary_in_two_jobs_there_is_no_spread():
    assert stats.spread_between_jobs({}) is None
    assert stats.spread_between_jobs({"a": {1: at(0.1)}, "b": {2: at(0.2)}}) is None
    assert stats.spread_between_jobs({"a": {1: at(0.1), 2: at(0.2, math.inf)}}) is None, "too few rounds"


# Interactions


def test_crossings_are_neighbouring_levels_of_two_factors_and_the_contexts_of_all_four():
    found = {(c.name, c.source, c.other_source): c for c in effects.crossings_of(EXPERIMENT)}
    assert len(found) == 31 and sum(bool(c.contexts) for c in found.values()) == 28
    assert len(found["load+swizzle", 1, 0].contexts) == 20
    assert found["read+b_layout", 1, 0].contexts == (), "ld.shared.v4 goes with N x K alone"
    for crossing in found.values():
        for neither, first, second, both in crossing.contexts:
            levels = [v.level(crossing.factor.name) for v in (neither, first, second, both)]
            others = [v.level(crossing.other.name) for v in (neither, first, second, both)]
            assert levels == [crossing.source, crossing.target] * 2
            assert others == [crossing.other_source] * 2 + [crossing.other_target] * 2
            rest = set(EXPERIMENT.factors) - {crossing.factor.name, crossing.other.name}
            assert all(v.level(name) == neither.level(name) for v in (first, second, both) for name in rest)
