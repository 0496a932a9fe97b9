"""The factorial: known effects come back, contexts are counted, and what is missing is named and never filled in."""

import dataclasses
import itertools
import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest

from rungs import aggregate, effects, schemas, shapley, stats, variants, verdict
from rungs.errors import RungsError
from rungs.files import sha256_file
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
ALL = [variant.name for variant in EXPERIMENT.estimable()]
SMALL, LARGE = (512, 512, 1024), (4096, 4096, 4096)
EFFECTS = {"read": {0: -20.0, 2: -5.0}, "swizzle": {0: -50.0}, "b_layout": {0: -3.0}}
WORLD = World(variants=ALL, shapes=[SMALL, LARGE], effects=EFFECTS, between=0.004, job_shift=0.0, profile="")
PAIRS = {(pair.factor.name, pair.label): pair for pair in effects.pairs_of(EXPERIMENT)}
CONTEXTS = {
    ("load", "0>1"): (20, 28),
    ("load", "1>2"): (40, 8),
    ("load", "0>2"): (20, 28),
    ("read", "0>1"): (40, 8),
    ("read", "1>2"): (20, 28),
    ("read", "0>2"): (20, 28),
    ("b_layout", "0>1"): (40, 32),
    ("stages", "1>2"): (30, 6),
    ("stages", "2>3"): (20, 16),
    ("stages", "3>4"): (20, 16),
    ("swizzle", "0>1"): (50, 22),
}
"""Of the 48, 72, 36 and 72 assignments of the other factors: 0 and 3 or 4 stages do not go together, nor do read 2 and K x N."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    results = tmp_path_factory.mktemp("set") / "h200"
    write_set(results, WORLD)
    return results


@pytest.fixture(scope="module")
def frames(pristine):
    return effects.effects(pristine, EXPERIMENT, ARCH)


@pytest.fixture
def results(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "h200")
    return tmp_path / "h200"


def effect_at(frames, factor: str, label: str, shape=LARGE):
    source, target = map(int, label.split(">"))
    frame = frames["effects"]
    found = frame[
        (frame["factor"] == factor)
        & (frame["source_level"] == source)
        & (frame["target_level"] == target)
        & (frame["m"] == shape[0])
    ]
    assert len(found) == 1
    return found.iloc[0]


def truth(pair: effects.Pair, shape, world: World = WORLD) -> float:
    """The geometric mean of the true gains over the contexts, in percent."""
    gains = [math.log(world.time_us(a.name, shape) / world.time_us(b.name, shape)) for a, b in pair.contexts]
    return stats.percent(sum(gains) / len(gains))


def sweep(results, name: str):
    return results / "csv" / "sweep" / "gemm" / f"{name}.csv"


# What comes out


def test_known_effects_come_back_with_intervals_that_hold_them(frames):
    for (factor, label), pair in PAIRS.items():
        for shape in (SMALL, LARGE):
            row = effect_at(frames, factor, label, shape)
            assert row["claim_low_percent"] < truth(pair, shape) < row["claim_high_percent"], (factor, label, shape)
            assert row["claim_low_percent"] < row["low_percent"] < row["gain_percent"] < row["high_percent"]
            assert (row["status"], row["reason"], row["lost"]) == ("ok", "", 0)
    assert effect_at(frames, "swizzle", "0>1")["gain_percent"] == pytest.approx(100.0, abs=0.5)
    assert effect_at(frames, "read", "0>1")["gain_percent"] == pytest.approx(25.0, abs=0.4)
    assert effect_at(frames, "read", "1>2")["gain_percent"] == pytest.approx(-5.0, abs=0.4)
    assert effect_at(frames, "read", "1>2")["verdict"] == "slower"


def test_the_mean_is_that_of_the_shares_of_the_corners(frames):
    share = frames["corners"].set_index(["variant", "m"])["share_percent"]
    for (factor, label), pair in PAIRS.items():
        logs = [math.log(share[b.name, 4096] / share[a.name, 4096]) for a, b in pair.contexts]
        row = effect_at(frames, factor, label)
        assert row["gain_percent"] == pytest.approx(stats.percent(np.mean(logs)), abs=0.01)
        assert row["least_percent"] == pytest.approx(stats.percent(min(logs)), abs=0.02)
        assert row["most_percent"] == pytest.approx(stats.percent(max(logs)), abs=0.02)
        least, most = (pair.contexts[logs.index(pick(logs))] for pick in (min, max))
        assert (row["least_source"], row["least_target"]) == tuple(variant.name for variant in least)
        assert (row["most_source"], row["most_target"]) == tuple(variant.name for variant in most)


def test_contexts_are_the_assignments_of_the_other_factors_that_go_with_both_levels(frames):
    assert set(PAIRS) == set(CONTEXTS)
    for (factor, label), (contexts, excluded) in CONTEXTS.items():
        row = effect_at(frames, factor, label)
        assert (row["contexts"], row["not_estimable"], row["lost"]) == (contexts, excluded, 0)
        for a, b in PAIRS[factor, label].contexts:
            assert [name for name, level in a.levels if b.level(name) != level] == [factor]
            assert (a.level(factor), b.level(factor)) == tuple(map(int, label.split(">")))


def test_every_variant_is_a_corner_with_its_share(frames):
    corners = frames["corners"]
    assert corners["variant"].tolist() == list(itertools.chain.from_iterable([name] * 2 for name in ALL))
    row = corners.set_index(["variant", "m"]).loc[(EXPERIMENT.variant("B3").name, 4096)]
    expected = 100 * WORLD.time_us("control", LARGE) / WORLD.time_us(EXPERIMENT.variant("B3").name, LARGE)
    assert row["share_percent"] == pytest.approx(expected, rel=0.015)
    assert row["share_low_percent"] < row["share_percent"] < row["share_high_percent"]
    assert row["rungs"] == "A3 B3 S3"
    assert row["tflops"] == pytest.approx(2 * 4096**3 / row["time_us"] / 1e6, rel=1e-3)


def test_the_files_are_valid_and_the_same_bytes_twice(results):
    effects.run(results, "gemm", ARCH)
    paths = [results / "data" / "gemm" / f"{name}.csv" for name in effects.FRAMES]
    first = [path.read_bytes() for path in paths]
    effects.run(results, "gemm", ARCH)
    assert [path.read_bytes() for path in paths] == first
    assert {name: len(frame) for name, frame in effects.read_data(results, "gemm").items()} == {
        "corners": 200,
        "effects": 22,
        "interactions": 62,
        "shapley": 16,
        "factorial_coverage": len(EXPERIMENT.off_ladder()) * 3,
    }


def test_counters_stand_beside_the_corners_that_were_profiled(tmp_path):
    write_set(tmp_path, World(variants=["B3", "B5"], shapes=[SMALL, LARGE]))
    corners = effects.effects(tmp_path, EXPERIMENT, ARCH)["corners"].set_index(["variant", "m"])
    row = corners.loc[(EXPERIMENT.variant("B5").name, 4096)]
    assert row["instructions"] == pytest.approx(9.4e7 * 1.2)
    assert row["tensor_busy_percent"] > 50
    assert pd.isna(row["shared_wavefronts"]), "a sum with a term missing is no sum"
    assert pd.isna(corners.loc[(EXPERIMENT.variant("B5").name, 512), "instructions"])


# Intervals


def test_the_interval_holds_the_spread_between_jobs(frames, tmp_path):
    """The rounds of a job say 0.04 %; between jobs the control moves by 0.4 %."""
    row = effect_at(frames, "load", "1>2")
    half = (row["high_percent"] - row["low_percent"]) / 2 / (1 + row["gain_percent"] / 100)
    steady = tmp_path / "steady"
    write_set(steady, dataclasses.replace(WORLD, shapes=[LARGE], between=0.0))
    other = effect_at(effects.effects(steady, EXPERIMENT, ARCH), "load", "1>2")
    alone = (other["high_percent"] - other["low_percent"]) / 2 / (1 + other["gain_percent"] / 100)
    assert half > 2 * alone


def test_the_spread_between_jobs_is_that_of_every_binary_that_several_jobs_timed(frames, pristine):
    """Of floor jobs and rungs' jobs alike: the squares about each binary's own mean, without what the rounds add."""
    jobs = [*(pristine / "csv" / "sweep" / "gemm").glob("*.csv"), *(pristine / "csv" / "floor" / "gemm").glob("*.csv")]
    for shape in (SMALL, LARGE):
        found: dict[str, list[stats.Median]] = {}
        for path in jobs:
            rows = schemas.read_csv("sweep", path)
            rows = rows[rows["m"] == shape[0]].pivot(index="round", columns="arm", values="time_us")
            for name in set(rows) - {"control", "twin"}:
                found.setdefault(name, []).append(stats.median_error(np.log(rows["control"] / rows[name])))
        repeated = [medians for medians in found.values() if len(medians) > 1]
        assert len(repeated) > 8 and max(map(len, repeated)) > 4
        squares = sum(np.var([m.value for m in medians]) * len(medians) for medians in repeated)
        errors = sum((1 - 1 / len(medians)) * m.error**2 for medians in repeated for m in medians)
        expected = math.sqrt((squares - errors) / sum(len(medians) - 1 for medians in repeated))
        row = effect_at(frames, "swizzle", "0>1", shape)
        assert row["spread_percent"] == pytest.approx(stats.percent(expected), abs=1e-4)
        assert 0.2 < row["spread_percent"] < 0.6, "0.4 was put in"


def test_the_formula_of_the_mean_and_its_error():
    pairs = [
        (stats.Median(0.10, 0.001, 20.0, 30), stats.Median(0.13, 0.002, 20.0, 30)),
        (stats.Median(0.20, 0.003, 10.0, 30), stats.Median(0.25, 0.004, 10.0, 30)),
    ]
    spread = stats.Spread(0.01, 6)
    effect = stats.mean_effect(pairs, spread)
    parts = [(0.001**2 / 4, 20), (0.002**2 / 4, 20), (0.003**2 / 4, 10), (0.004**2 / 4, 10), (2 * 0.01**2 / 2, 6)]
    variance = sum(part for part, _ in parts)
    assert effect.value == pytest.approx(0.04)
    assert effect.error == pytest.approx(math.sqrt(variance))
    assert effect.freedom == pytest.approx(variance**2 / sum(part**2 / freedom for part, freedom in parts))
    low, high = effect.interval()
    assert (low + high) / 2 == pytest.approx(0.04)
    assert high - 0.04 > 1.96 * effect.error
    assert stats.mean_effect(pairs, None).interval() == (-math.inf, math.inf)
    few = [(stats.Median(0.1, math.inf, 1.0, 3), pairs[0][1])]
    assert stats.mean_effect(few, spread).interval() == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="no contexts"):
        stats.mean_effect([], spread)


def test_without_floor_jobs_there_is_an_interval_and_no_claim(tmp_path):
    write_set(tmp_path, dataclasses.replace(WORLD, shapes=[LARGE], floor_jobs=0))
    row = effect_at(effects.effects(tmp_path, EXPERIMENT, ARCH), "swizzle", "0>1")
    assert row["low_percent"] < 100 < row["high_percent"] and pd.isna(row["floor_percent"])
    assert (row["verdict"], row["status"]) == ("none", "ok")
    assert row["reason"] == "The floor of this shape class was not measured, so that no claim is made."


def test_where_no_binary_was_timed_in_two_jobs_there_is_a_mean_and_no_claim(tmp_path):
    alone = [variant.name for variant in EXPERIMENT.off_ladder()]
    write_set(tmp_path, dataclasses.replace(WORLD, shapes=[LARGE], floor_jobs=0, variants=alone))
    row = effect_at(effects.effects(tmp_path, EXPERIMENT, ARCH), "swizzle", "0>1")
    assert row["gain_percent"] == pytest.approx(100, abs=1)
    assert pd.isna(row["low_percent"]) and pd.isna(row["claim_high_percent"]) and pd.isna(row["spread_percent"])
    assert row["reason"].endswith("The spread from job to job was not measured, so that no claim is made.")


def test_nothing_is_claimed_under_the_floor(tmp_path):
    gains = {variant.name: 0.1 for variant in EXPERIMENT.estimable() if variant.level("swizzle")}
    shapes = [LARGE, (4096, 4096, 1024), (4096, 4096, 512)]
    world = World(variants=ALL, shapes=shapes, gains=gains, job_shift=0.003, profile="")
    write_set(tmp_path, world)
    frame = effects.effects(tmp_path, EXPERIMENT, ARCH)["effects"]
    rows = frame[frame["factor"] == "swizzle"]
    assert rows["gain_percent"].tolist() == pytest.approx([0.1] * 3, abs=0.2)
    assert rows["floor_percent"].min() > 0.5
    assert set(rows["verdict"]) <= {"tie", "undecided"}, "three floor jobs leave two degrees of freedom"


# Interactions and Shapley values


def interaction_at(frames, name: str, source: int, other_source: int, shape=LARGE):
    frame = frames["interactions"]
    factor, other = name.split("+")
    at = (frame["factor"] == factor) & (frame["other"] == other) & (frame["m"] == shape[0])
    return frame[at & (frame["source_level"] == source) & (frame["other_source_level"] == other_source)].iloc[0]


def shapley_at(frames, factor: str, shape=LARGE, part="share", target=None):
    frame = frames["shapley"]
    at = (frame["factor"] == factor) & (frame["part"] == part) & (frame["m"] == shape[0])
    return frame[at if target is None else at & (frame["target_level"] == target)].iloc[0]


def log_share(name: str, shape, world: World = WORLD) -> float:
    return math.log(world.time_us("control", shape) / world.time_us(name, shape))


def test_known_interactions_come_back_and_what_only_multiplies_has_none(frames, tmp_path):
    for crossing in effects.crossings_of(EXPERIMENT):
        row = interaction_at(frames, crossing.name, crossing.source, crossing.other_source)
        assert row["contexts"] == len(crossing.contexts) and row["lost"] == 0
        if not crossing.contexts:
            assert (row["status"], row["verdict"]) == ("not estimable", "none") and pd.isna(row["gain_log"])
            continue
        terms = [
            log_share(d.name, LARGE) - log_share(c.name, LARGE) - log_share(b.name, LARGE) + log_share(a.name, LARGE)
            for a, b, c, d in crossing.contexts
        ]
        true = sum(terms) / len(terms)
        assert row["claim_low_percent"] < stats.percent(true) < row["claim_high_percent"], crossing
        assert row["gain_percent"] == pytest.approx(stats.percent(row["gain_log"]), abs=1e-3)
        assert (row["verdict"] == "more") <= (true > 0.002), "only load and stages do more than multiply"
    assert interaction_at(frames, "load+stages", 0, 1)["verdict"] == "more"
    gains = {v.name: 30.0 for v in EXPERIMENT.estimable() if v.level("load") == 2 and v.level("swizzle")}
    write_set(tmp_path, dataclasses.replace(WORLD, shapes=[LARGE], gains=gains, floor_jobs=3))
    found = effects.effects(tmp_path, EXPERIMENT, ARCH)
    row = interaction_at(found, "load+swizzle", 1, 0)
    assert (row["verdict"], row["gain_percent"]) == ("more", pytest.approx(30, abs=0.5))
    assert interaction_at(found, "load+swizzle", 0, 0)["gain_percent"] == pytest.approx(0, abs=0.5)
    game = shapley.game_of(EXPERIMENT)
    both, plain = (shapley_at(found if i else frames, "swizzle")["gain_log"] for i in (1, 0))
    assert both - plain == pytest.approx(math.log(1.3) / 2, abs=0.01), (
        "each of the two has half of what they do together"
    )
    assert len(game.corners) == 32


def test_shapley_values_are_the_mean_over_all_orders_and_add_up(frames):
    game = shapley.game_of(EXPERIMENT)
    for shape in (SMALL, LARGE):
        rows = {player: shapley_at(frames, player, shape) for player in game.players}
        for player, row in rows.items():
            orders = list(itertools.permutations(game.players))
            true = 0.0
            for order in orders:
                before = frozenset(order[: order.index(player)])
                worth = [log_share(game.corners[moved].name, shape) for moved in (before, before | {player})]
                true += (worth[1] - worth[0]) / len(orders)
            assert row["claim_low_percent"] < stats.percent(true) < row["claim_high_percent"]
            assert (row["corners"], row["wanted"], row["status"], row["reason"]) == (32, 32, "ok", "")
            assert row["share_low_percent"] < row["share_percent"] < row["share_high_percent"]
            assert (row["source_level"], row["target_level"]) == (game.start.level(player), game.goal.level(player))
        assert sum(row["share_percent"] for row in rows.values()) == pytest.approx(100, abs=0.01)
        whole = sum(row["gain_log"] for row in rows.values())
        share = frames["corners"].set_index(["variant", "m"])["share_percent"]
        ends = [share[variant.name, shape[0]] for variant in (game.goal, game.start)]
        assert whole == pytest.approx(math.log(ends[0] / ends[1]), abs=1e-4)
        for row in rows.values():
            assert row["total_percent"] == pytest.approx(stats.percent(whole), abs=1e-2)
            assert row["total_low_percent"] < row["total_percent"] < row["total_high_percent"]
    assert shapley_at(frames, "swizzle")["gain_percent"] == pytest.approx(100, abs=1)
    assert shapley_at(frames, "swizzle")["verdict"] == "faster"


def test_what_is_on_top_is_one_change_of_the_goal(frames):
    share = frames["corners"].set_index(["variant", "m"])["share_percent"]
    for factor, level, top in shapley.game_of(EXPERIMENT).on_top:
        row = shapley_at(frames, factor, part="on top", target=level)
        gain = 100 * (share[top.name, 4096] / share["abl_L2_R1_bl1_s2_sw1", 4096] - 1)
        assert row["gain_percent"] == pytest.approx(gain, abs=0.01)
        assert pd.isna(row["share_percent"]) and pd.isna(row["total_percent"]) and row["wanted"] == 2
    assert shapley_at(frames, "read", part="on top", target=2)["gain_percent"] == pytest.approx(-5, abs=1.5)


CORNER = "abl_L2_R0_bl1_s2_sw0"


@pytest.mark.parametrize("word", ["crashed", "not on this chip"])
def test_a_missing_corner_leaves_no_share_and_is_named(tmp_path, word):
    write_set(tmp_path, dataclasses.replace(WORLD, failures={(CORNER, LARGE): (word, "The reason.")}))
    found = effects.effects(tmp_path, EXPERIMENT, ARCH)
    for player in EXPERIMENT.factors:
        row = shapley_at(found, player)
        assert (row["status"], row["verdict"], row["corners"], row["wanted"]) == ("not estimable", "none", 31, 32)
        assert row["reason"] == f"A corner is never filled in: {CORNER} ({word}) is missing."
        assert row[["gain_log", "gain_percent", "low_percent", "share_percent", "total_percent"]].isna().all()
        assert shapley_at(found, player, SMALL)["status"] == "ok"
    top = shapley_at(found, "stages", part="on top", target=3)
    assert (top["status"], top["corners"]) == ("ok", 2)
    row = interaction_at(found, "load+swizzle", 1, 0)
    lost = (19, 1, 12) if word == "crashed" else (19, 0, 13)
    whole = interaction_at(found, "load+swizzle", 1, 0, SMALL)
    assert (row["contexts"], row["lost"]) == lost[:2] and whole["contexts"] == 20
    assert row["not_estimable"] == whole["not_estimable"] + (word != "crashed")
    assert row["reason"] == (
        f"Fewer contexts than there are: {CORNER} (crashed) is missing." if word == "crashed" else ""
    )


@pytest.mark.parametrize("kind", ["effects", "interactions", "shapley"])
def test_a_damaged_file_of_the_factorial_is_one_sentence_with_row_and_fix(frames, tmp_path, kind):
    path = tmp_path / f"{kind}.csv"
    schemas.write_csv(kind, frames[kind], path)
    good = path.read_text()
    number = str(frames[kind]["gain_percent"].dropna().iloc[0])
    first = good.splitlines()[1]
    for text, words in (
        (good[: len(good) // 2], "ends in the middle of a line"),
        (good.splitlines()[0] + "\n", "has no rows"),
        (good + first + "\n", f"row {good.count(chr(10)) + 1}: the same "),
        (good.replace("gain_percent", "gain"), "column 'gain' does not fit"),
        (good.replace(",reason\n", ",reason,more\n"), "column 'more' does not fit"),
        (good.replace(f",{number},", ",nan,", 1), "row 2: gain_percent is 'nan', not number"),
        (good.replace(f",{number},", ",inf,", 1), "row 2: gain_percent is 'inf', not number"),
        (good.replace(first, first.replace(",ok,", ",fine,")), "row 2: status is 'fine', not one of ok"),
        (good.replace(",4096,4096,4096,", ",4096,4096,4096.5,", 1), "k is '4096.5', not integer"),
    ):
        path.write_text(text)
        with pytest.raises(RungsError) as caught:
            schemas.read_csv(kind, path)
        said = str(caught.value)
        assert words in said and str(path) in said and "\n" not in said
        assert said.endswith(": delete the file and run again to make it anew.")


# What is missing

LOST = EXPERIMENT.assign({"load": 1, "read": 1, "b_layout": 1, "stages": 2, "swizzle": 0}).name


def check_lost(frames, word: str) -> None:
    """One corner is gone: one context of each pair of levels that it stands in, and the mean over the others is theirs."""
    share = frames["corners"].set_index(["variant", "m"])["share_percent"]
    touched = {key for key, pair in PAIRS.items() if any(LOST in (a.name, b.name) for a, b in pair.contexts)}
    assert touched == {
        *(("load", label) for label in ("0>1", "1>2")),
        *(("read", label) for label in ("0>1", "1>2")),
        ("b_layout", "0>1"),
        *(("stages", label) for label in ("1>2", "2>3")),
        ("swizzle", "0>1"),
    }
    for key, pair in PAIRS.items():
        row = effect_at(frames, *key)
        kept = [(a.name, b.name) for a, b in pair.contexts if LOST not in (a.name, b.name)]
        logs = [math.log(share[b, 4096] / share[a, 4096]) for a, b in kept]
        assert row["gain_percent"] == pytest.approx(stats.percent(np.mean(logs)), abs=0.01)
        assert (row["contexts"], row["lost"]) == (len(kept), int(key in touched))
        assert row["not_estimable"] == CONTEXTS[key][1]
        assert row["reason"] == (
            f"Fewer contexts than there are: {LOST} ({word}) is missing." if key in touched else ""
        )


def test_a_missing_corner_is_named_and_takes_its_contexts_with_it(results):
    for path in (sweep(results, LOST), sweep(results, LOST).with_suffix(".json")):
        path.unlink()
    frames = effects.effects(results, EXPERIMENT, ARCH)
    check_lost(frames, "not run")
    corner = frames["corners"].set_index("variant").loc[LOST].iloc[0]
    assert (corner["status"], corner["reason"]) == ("not run", f"{LOST} has no sweep CSV.")


@pytest.mark.parametrize("word", ["crashed", "time limit", "wrong"])
def test_a_lost_corner_is_named_with_its_word(tmp_path, word):
    write_set(tmp_path, dataclasses.replace(WORLD, failures={(LOST, LARGE): (word, "The reason.")}))
    frames = effects.effects(tmp_path, EXPERIMENT, ARCH)
    check_lost(frames, word)
    assert effect_at(frames, "swizzle", "0>1", SMALL)["lost"] == 0
    assert LOST in EXPERIMENT.variant("S2").name, "a rung's failure is in the ladders' coverage"


def flag(path, rounds, arm) -> None:
    """Mark these rounds of an arm at the large shape as disturbed."""
    frame = pd.read_csv(path, keep_default_na=False)
    frame.loc[frame["round"].isin(rounds) & (frame["arm"] == arm) & (frame["m"] == 4096), ["status", "reason"]] = [
        "flagged",
        "Another process ran.",
    ]
    frame.to_csv(path, index=False, lineterminator="\n")
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"csv_sha256": sha256_file(path)}))


def test_a_corner_without_a_common_unflagged_round_is_flagged_and_no_nan(results):
    rounds = sorted(set(pd.read_csv(sweep(results, LOST))["round"]))
    flag(sweep(results, LOST), rounds[::2], LOST)
    flag(sweep(results, LOST), rounds[1::2], "control")
    frames = effects.effects(results, EXPERIMENT, ARCH)
    corner = frames["corners"].set_index(["variant", "m"]).loc[(LOST, 4096)]
    assert (corner["status"], corner["reason"]) == ("flagged", "No round has both unflagged.")
    assert frames["effects"]["gain_percent"].notna().all()
    check_lost(frames, "flagged")


def test_a_corner_of_too_few_rounds_is_left_out_and_named(results):
    rounds = sorted(set(pd.read_csv(sweep(results, LOST))["round"]))
    flag(sweep(results, LOST), rounds[4:], LOST)
    frames = effects.effects(results, EXPERIMENT, ARCH)
    corner = frames["corners"].set_index(["variant", "m"]).loc[(LOST, 4096)]
    assert corner["status"] == "flagged" and corner["share_percent"] > 0
    assert corner["reason"] == "Only 4 rounds have both unflagged, and under 5 there is no interval."
    assert frames["effects"]["high_percent"].notna().all()
    check_lost(frames, "flagged")


def test_a_level_that_the_chip_lacks_is_not_estimable(tmp_path):
    failures = {(v.name, LARGE): ("not on this chip", "TMA.") for v in EXPERIMENT.estimable() if v.level("load") == 2}
    write_set(tmp_path, dataclasses.replace(WORLD, shapes=[LARGE], failures=failures))
    frames = effects.effects(tmp_path, EXPERIMENT, ARCH)
    row = effect_at(frames, "load", "1>2")
    assert (row["status"], row["verdict"], row["contexts"], row["lost"]) == ("not estimable", "none", 0, 0)
    assert row["not_estimable"] == 48
    assert row["reason"] == "cp.async 16 B > TMA: not on this chip."
    assert pd.isna(row["gain_percent"]) and pd.isna(row["least_percent"]) and row["most_source"] == ""
    row = effect_at(frames, "swizzle", "0>1")
    assert (row["contexts"], row["not_estimable"], row["lost"], row["reason"]) == (30, 42, 0, "")


def test_where_no_context_is_left_there_is_no_mean(tmp_path):
    swizzled = [v.name for v in EXPERIMENT.estimable() if v.level("swizzle")]
    write_set(tmp_path, dataclasses.replace(WORLD, shapes=[LARGE], variants=swizzled))
    row = effect_at(effects.effects(tmp_path, EXPERIMENT, ARCH), "swizzle", "0>1")
    assert (row["contexts"], row["lost"], row["status"], row["verdict"]) == (0, 50, "not run", "none")
    assert pd.isna(row["gain_percent"])
    assert row["reason"].startswith(f"No context was timed: {ALL[0]} (not run), ")
    assert row["reason"].endswith(" and 46 more are missing.")


def test_a_result_that_differs_from_its_contract_is_wrong_among_all_variants(results):
    path = sweep(results, LOST)
    manifest = json.loads(path.with_suffix(".json").read_text())
    next(shape for shape in manifest["shapes"] if shape["m"] == 4096)["result_fingerprint"] = "f" * 64
    path.with_suffix(".json").write_text(json.dumps(manifest))
    check_lost(effects.effects(results, EXPERIMENT, ARCH), "wrong")


def test_coverage_has_the_variants_that_are_on_no_ladder(results):
    alone = ALL[0]
    sweep(results, alone).unlink()
    effects.run(results, "gemm", ARCH)
    coverage = effects.read_data(results, "gemm")["factorial_coverage"]
    names = {variant.name for variant in EXPERIMENT.off_ladder()}
    assert set(coverage["variant"]) == names and not EXPERIMENT.rung_names(EXPERIMENT.variant(alone))
    assert set(coverage["what"]) == {"inspect", "sweep"}, "no profile was asked for"
    failed = verdict.failures([results / "data" / "gemm" / "factorial_coverage.csv"])
    assert [(f["variant"], f["what"], f["status"]) for f in failed] == [
        (alone, "sweep at 512x512x1024", "not run"),
        (alone, "sweep at 4096x4096x4096", "not run"),
    ]


def test_coverage_of_counters_is_at_the_shapes_that_the_factorial_profiles(tmp_path):
    (shape,) = EXPERIMENT.factorial["profile_shapes"]
    write_set(tmp_path, World(variants=[*ALL[:2], "B3"], shapes=[tuple(shape), SMALL]))
    (tmp_path / "csv" / "profile" / "gemm" / f"{ALL[1]}.csv").unlink()
    coverage = effects.effects(tmp_path, EXPERIMENT, ARCH)["factorial_coverage"]
    rows = coverage[(coverage["what"] == "profile") & coverage["variant"].isin(ALL[:2])]
    assert rows[["variant", "m", "n", "k", "status"]].values.tolist() == [
        [ALL[0], *shape, "ok"],
        [ALL[1], *shape, "not run"],
    ]


# Refusals


@pytest.mark.parametrize(
    ("keys", "words"), [({"fill": "zeros"}, "never mixes fills"), ({"l2": "cold"}, "a table is hot or cold")]
)
def test_corners_of_another_fill_or_l2_policy_are_refused(results, keys, words):
    path = sweep(results, ALL[0]).with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(RungsError, match=words) as caught:
        effects.effects(results, EXPERIMENT, ARCH)
    assert "\n" not in str(caught.value)


def test_a_corner_changed_by_hand_is_refused(results):
    path = sweep(results, ALL[0])
    path.write_text(path.read_text().replace("power cap", "power cup", 1))
    with pytest.raises(RungsError, match=f"{ALL[0]}.csv was edited or cut"):
        effects.effects(results, EXPERIMENT, ARCH)
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"csv_sha256": sha256_file(path)}))
    assert effect_at(effects.effects(results, EXPERIMENT, ARCH), "swizzle", "0>1")["lost"] == 0


def test_an_experiment_without_a_factorial_is_one_sentence(tmp_path):
    bare = dataclasses.replace(EXPERIMENT, factorial=None)
    with pytest.raises(RungsError, match=r"^gemm declares no factorial: add `factorial:` to its file"):
        effects.effects(tmp_path, bare, ARCH)


def test_schemas_name_what_a_reader_finds():
    for name in set(effects.FRAMES.values()):
        assert all(rule.get("description") or rule.get("enum") for rule in schemas.columns(name).values())
    for name in ("effects", "interactions", "shapley"):
        assert set(aggregate.frame_of(name, []).columns) == set(schemas.columns(name))
