"""The factorial: known effects come back, contexts are counted, and what is missing is named and never filled in."""

import dataclasses
import itertools
import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest

from rungs import aggregate, effects, schemas, stats, variants, verdict
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


def test_the_spread_between_jobs_is_that_of_the_floor_jobs_share_of_the_control(frames, pristine):
    for shape in (SMALL, LARGE):  # each the only one of its class
        logs = []
        for job in (1, 2, 3):
            rows = schemas.read_csv("sweep", pristine / "csv" / "floor" / "gemm" / f"{job}.csv")
            rows = rows[rows["m"] == shape[0]].pivot(index="round", columns="arm", values="time_us")
            logs.append(np.median(np.log(rows["control"] / rows[EXPERIMENT.floor_variant.name])))
        row = effect_at(frames, "swizzle", "0>1", shape)
        assert row["spread_percent"] == pytest.approx(stats.percent(np.std(logs, ddof=1)), abs=1e-3)


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


def test_the_spread_is_pooled_over_shapes():
    assert stats.spread_of([]) is None
    assert stats.spread_of([[0.1], [0.2]]) is None
    spread = stats.spread_of([[0.0, 0.2], [1.0, 1.1, 1.2]])
    assert spread.deviation == pytest.approx(math.sqrt((2 * 0.01 + 2 * 0.01) / 3))
    assert spread.freedom == 3


def test_a_shape_has_the_larger_of_its_own_spread_and_that_of_its_class():
    """As recorded: the smallest shape differs by 1.1 % from job to job, the others of its class by 0.1 %."""
    wide, narrow = [-0.011, 0.0, 0.011], [-0.001, 0.0, 0.001]
    pooled = stats.spread_of([wide, narrow, narrow, narrow]).deviation
    found = stats.spreads_of({"wide": wide, "a": narrow, "b": narrow, "c": narrow, "once": [0.0]})
    assert found["wide"].deviation == pytest.approx(0.011)
    assert [found[name].deviation for name in ("a", "b", "c", "once")] == pytest.approx([pooled] * 4)
    assert {spread.freedom for spread in found.values()} == {2}, "jobs - 1, of its own"
    assert stats.spreads_of({"a": [0.1], "b": []}) == {}


def test_95_per_cent_of_the_intervals_hold_the_truth():
    """Jobs that differ, errors that are known: both terms are needed for it."""
    rng = np.random.default_rng(1)
    between, error, contexts, held, without = 0.003, 0.002, 4, 0, 0
    tries = 2000
    for _ in range(tries):
        jobs = [rng.normal(0.0, between, 3) + rng.normal(0.0, error, 3) for _ in range(4)]
        spread = stats.spread_of([list(values) for values in jobs])
        sides = rng.normal((0.0, 0.05), math.hypot(between, error), (contexts, 2))
        pairs = [tuple(stats.Median(float(v), error, 12.0, 30) for v in side) for side in sides]
        for found, name in (
            (stats.mean_effect(pairs, spread), "held"),
            (stats.mean_effect(pairs, stats.Spread(0, 8)), "w"),
        ):
            low, high = found.interval()
            if name == "held":
                held += low < 0.05 < high
            else:
                without += low < 0.05 < high
    assert 0.945 < held / tries < 0.995
    assert without / tries < 0.85


def test_without_floor_jobs_there_is_a_mean_and_no_claim(tmp_path):
    write_set(tmp_path, dataclasses.replace(WORLD, shapes=[LARGE], floor_jobs=0))
    row = effect_at(effects.effects(tmp_path, EXPERIMENT, ARCH), "swizzle", "0>1")
    assert row["gain_percent"] == pytest.approx(100, abs=1)
    assert pd.isna(row["low_percent"]) and pd.isna(row["claim_high_percent"]) and pd.isna(row["spread_percent"])
    assert (row["verdict"], row["status"]) == ("none", "ok")
    assert row["reason"] == "The spread from job to job was not measured, so that no claim is made."


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
    assert set(aggregate.frame_of("effects", []).columns) == set(schemas.columns("effects"))
