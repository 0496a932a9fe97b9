"""The seeds' sentences: what a claim may say, what its verdict is, and that the published pages say what the data give."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from rendered import check_that_no_text_leaves, grids
from rungs import bootstrap, claimpages, claimplots, claims, schemas, staleness, stats, trace
from rungs.claims import FAILS, HOLDS, NOT_MEASURED, UNDECIDED, Bound, Claim, Data
from rungs.errors import RungsError
from rungs.files import ROOT, write_json, write_text
from rungs.results import ResultsSet
from rungs.variants import load_experiment

ARCH = "sm_90a"
GEMM = load_experiment("gemm")
H200 = Path("results/recorded/h200")
RECORDED = (H200, Path("results/recorded/h200-cold"))
BASE = {"id": "it", "seed": "000", "section": "1", "says": "It is faster by far.", "experiment": "gemm"}


def parse(tmp_path: Path, **keys: Any) -> Claim:
    """The claim of these keys beside `BASE`, as from a file; None drops a key."""
    raw = {key: value for key, value in {**BASE, **keys}.items() if value is not None}
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [raw]}, sort_keys=False))
    claims.load_claims.cache_clear()
    (claim,) = claims.load_claims(path)
    claims.check(claim)
    return claim


# ---- a pretend set ---------------------------------------------------------------------------------------------------


def write(results: Path, kind: str, rows: Sequence[Mapping[str, Any]], experiment: str = "gemm") -> None:
    """`data/<experiment>/<kind>.csv`, cells that no row gives empty, or what the column's type has for nothing."""
    schema = kind if kind in ("changes", "floor") else load_experiment(experiment).kind(kind.removeprefix("factorial_"))
    nothing = {"string": "", "boolean": True}
    full = [
        {
            n: row.get(n, None if rule.get("nullable") else nothing.get(rule["type"], 0))
            for n, rule in schemas.columns(schema).items()
        }
        for row in rows
    ]
    schemas.write_rows(schema, full, results / "data" / experiment / f"{kind}.csv")


def step(label: str, gain: float | None, half: float = 0.1, k: int = 256, m: int = 4096, **more: Any) -> dict[str, Any]:
    """A row of steps whose 95 % interval is about `gain` by `half` percent; of 20 rounds and without a floor's width."""
    found = next(s for s in GEMM.steps() if s.label == label)
    row = {"ladder": found.ladder, "step": label, "factor": found.factor, "m": m, "n": m, "k": k, "controlled": True}
    row |= {"source_variant": found.source_variant.name, "target_variant": found.target_variant.name}
    row |= {"run_id": "r", "status": "ok", "verdict": "none", "rounds": 20, "floor_percent": 0.0}
    if gain is not None:
        middle, width = stats.log_ratio(gain), stats.log_ratio(half)
        ends = [stats.percent(middle - width), stats.percent(middle + width)]
        row |= {"gain_percent": gain, "low_percent": ends[0], "high_percent": ends[1]}
        row |= {"claim_low_percent": ends[0], "claim_high_percent": ends[1]}
    return row | more


def judge(results: Path, *found: Claim, experiments: Sequence[str] = ("gemm",)) -> list[dict[str, Any]]:
    return claims.judge(found, Data(results, ARCH, experiments))


def verdict(results: Path, claim: Claim, **more: Any) -> tuple[str, str]:
    (row,) = judge(results, claim, **more)
    return row["verdict"], row["reason"]


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "low", "high", "word"),
    [
        (Bound(-math.inf, 3), 1, 3, HOLDS),
        (Bound(-math.inf, 3), 2.9, 3.1, UNDECIDED),
        (Bound(-math.inf, 3), 3.1, 4, FAILS),
        (Bound(0, math.inf), 0, 0, HOLDS),
        (Bound(0, math.inf, strict=True), 0, 0, FAILS),
        (Bound(0, math.inf, strict=True), 0, 1, UNDECIDED),
        (Bound(0, math.inf, strict=True), -1, 0, FAILS),
        (Bound(1, 1), 1, 1, HOLDS),
        (Bound(1, 1), 0.9, 1.1, UNDECIDED),
        (Bound(1, 1), 1.01, 1.1, FAILS),
        (Bound(-3, 3, outside=True), 4, 5, HOLDS),
        (Bound(-3, 3, outside=True), -1, 1, FAILS),
        (Bound(-3, 3, outside=True), 2, 4, UNDECIDED),
        (Bound(-3, 3, outside=True), -4, 4, UNDECIDED),
        (Bound(0, 1), math.nan, math.nan, UNDECIDED),
        (Bound(0, 1), -math.inf, math.inf, UNDECIDED),
    ],
)
def test_a_bound_is_decided_by_whole_intervals_alone(bound, low, high, word):
    assert bound.verdict(low, high) == word


@pytest.mark.parametrize(
    ("keys", "low", "high", "outside"),
    [
        ({"at_least": 1.5, "tolerance": 0.1}, 1.4, math.inf, False),
        ({"at_most": 3, "tolerance": 1}, -math.inf, 4, False),
        ({"equal": 170, "tolerance": 17}, 153, 187, False),
        ({"within": [-3, 3], "tolerance": 1}, -4, 4, False),
        ({"outside": [-3, 3], "tolerance": 1}, -2, 2, True),
    ],
)
def test_a_tolerance_makes_a_bound_easier_to_meet(tmp_path, keys, low, high, outside):
    bound = parse(tmp_path, gain={"steps": ["B2>B3"]}, **keys).bound
    assert (bound.low, bound.high, bound.outside) == (low, high, outside)


# ---- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [20, 57, 200])
def test_the_error_behind_a_published_interval_is_found_again(rounds):
    median = bootstrap.median_error(np.random.default_rng(rounds).normal(0.1, 0.01, rounds))
    value, error, freedom = claims.part_of(median.value, *median.interval(), rounds)
    assert (value, freedom) == (median.value, pytest.approx(median.freedom))
    assert error == pytest.approx(median.error, rel=1e-9)


def test_a_gain_has_the_interval_of_its_step_at_the_level_of_the_table(tmp_path):
    ratios = np.random.default_rng(3).normal(math.log(1.2), 0.01, 40)
    median = bootstrap.median_error(ratios)
    low, high = map(stats.percent, median.interval())
    write(
        tmp_path, "steps", [step("B2>B3", stats.percent(median.value), low_percent=low, high_percent=high, rounds=40)]
    )
    one = parse(tmp_path, gain={"steps": ["B2>B3"]}, above=0)
    (row,) = judge(tmp_path, one)
    assert row["level_percent"] == 95 and (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-4)
    rows = judge(tmp_path, *(replace(one, id=f"it{i}") for i in range(10)))
    expected = [stats.percent(end) for end in median.interval(0.995)]
    assert rows[0]["level_percent"] == 99.5 and [rows[0]["low"], rows[0]["high"]] == pytest.approx(expected, abs=1e-4)


def test_the_floor_widens_an_interval_on_both_sides(tmp_path):
    claim = parse(tmp_path, gain={"steps": ["B2>B3"]}, above=0)
    write(tmp_path, "steps", [step("B2>B3", 1.0, half=0.1)])
    assert verdict(tmp_path, claim) == (HOLDS, "")
    write(tmp_path, "steps", [step("B2>B3", 1.0, half=0.1, floor_percent=2.0)])
    (row,) = judge(tmp_path, claim)
    assert row["verdict"] == UNDECIDED and (row["low"], row["high"]) == pytest.approx((-1.08, 3.13), abs=0.02)


def test_without_a_floor_or_with_too_few_rounds_nothing_is_decided(tmp_path):
    claim = parse(tmp_path, gain={"steps": ["B2>B3"]}, above=0)
    write(tmp_path, "steps", [step("B2>B3", 50.0, floor_percent=None)])
    assert verdict(tmp_path, claim) == (UNDECIDED, "The floor was not measured.")
    write(tmp_path, "steps", [step("B2>B3", 50.0, rounds=4, low_percent=None, high_percent=None)])
    assert verdict(tmp_path, claim) == (UNDECIDED, "There were too few rounds for an interval.")


def test_a_step_that_is_not_controlled_decides_nothing(tmp_path):
    reason = "Not controlled: B2 has 2 CTAs per SM and B3 3."
    write(tmp_path, "steps", [step("B2>B3", 50.0, controlled=False, reason=reason)])
    assert verdict(tmp_path, parse(tmp_path, gain={"steps": ["B2>B3"]}, above=0)) == (UNDECIDED, reason)


# ---- gains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "figure"),
    [
        ({"steps": ["B2>B3", "B3>B5"]}, 32.0),
        ({"steps": ["B2>B3", "B3>B5"], "unit": "times"}, 1.32),
        ({"steps": ["B3>B5"], "against": ["B2>B3"]}, -8.3333),
        ({"steps": ["B2>B3"], "work": 4}, 380.0),
    ],
)
def test_steps_multiply_what_stands_against_them_divides_and_work_counts(tmp_path, of, figure):
    write(tmp_path, "steps", [step("B2>B3", 20.0), step("B3>B5", 10.0)])
    (row,) = judge(tmp_path, parse(tmp_path, gain=of, above=-1000))
    assert row["figure"] == pytest.approx(figure, abs=1e-4)


def test_errors_of_steps_add_in_squares_and_their_floors_in_full(tmp_path):
    rows = [step("B2>B3", 0.0, half=0.3, floor_percent=1.0), step("B3>B5", 0.0, half=0.4, floor_percent=1.0)]
    write(tmp_path, "steps", rows)
    (row,) = judge(tmp_path, parse(tmp_path, gain={"steps": ["B2>B3", "B3>B5"]}, above=0))
    assert row["high"] == pytest.approx(0.5 + 2.0, abs=0.06) and row["low"] == pytest.approx(-row["high"], abs=0.1)


@pytest.mark.parametrize(("gains", "word"), [((30, 20, 10), HOLDS), ((10, 20, 30), FAILS), ((20, 50, 20.1), UNDECIDED)])
def test_what_falls_along_an_axis_falls_from_its_smallest_to_its_largest_value(tmp_path, gains, word):
    write(tmp_path, "steps", [step("B2>B3", g, k=k) for k, g in zip((256, 1024, 8192), gains, strict=True)][::-1])
    (row,) = judge(tmp_path, parse(tmp_path, gain={"steps": ["B2>B3"], "along": "k"}, below=0))
    assert row["verdict"] == word and row["where"] == "from K=256 to 8192 at M=4096, N=4096"


def test_one_point_that_fails_makes_a_claim_fail_and_is_the_one_shown(tmp_path):
    write(
        tmp_path,
        "steps",
        [step("B2>B3", gain, k=k) for k, gain in ((256, 9.0), (512, -2.0), (1024, 0.0), (4096, -7.0))],
    )
    (row,) = judge(tmp_path, parse(tmp_path, gain={"steps": ["B2>B3"]}, at_least=0))
    assert (row["verdict"], row["figure"], row["where"]) == (FAILS, -7.0, "4096x4096x4096")
    assert (row["points"], row["held"], row["failed"]) == (4, 1, 2)
    (row,) = judge(tmp_path, parse(tmp_path, gain={"steps": ["B2>B3"]}, at_least=-9))
    assert (row["verdict"], row["figure"]) == (HOLDS, -7.0), "the point nearest to the bound"


def test_swapping_the_ends_of_a_step_swaps_the_verdict(tmp_path):
    claim = parse(tmp_path, gain={"steps": ["B2>B3"]}, above=0)
    for gain, word in ((5.0, HOLDS), (-5.0, FAILS)):
        write(tmp_path, "steps", [step("B2>B3", gain)])
        assert verdict(tmp_path, claim)[0] == word


# ---- what is not there -----------------------------------------------------------------------------------------------


def test_what_the_set_lacks_is_not_measured_and_says_why(tmp_path):
    claim = parse(tmp_path, gain={"steps": ["B2>B3"]}, where={"m": [4096], "k": [256, 512]}, above=0)
    assert verdict(tmp_path, claim, experiments=()) == (NOT_MEASURED, "gemm was not measured in this set.")
    assert verdict(tmp_path, claim) == (NOT_MEASURED, "This set has no steps of gemm.")
    write(tmp_path, "steps", [step("B3>B5", 5.0)])
    assert verdict(tmp_path, claim) == (NOT_MEASURED, "This set has no step B2>B3.")
    write(tmp_path, "steps", [step("B2>B3", 5.0)])
    assert verdict(tmp_path, claim) == (NOT_MEASURED, "No row of gemm is at m 4096, k 512.")
    failed = step("B2>B3", None, k=512, status="wrong", reason="Element 3 is 7.")
    write(tmp_path, "steps", [step("B2>B3", 5.0), failed])
    assert verdict(tmp_path, claim) == (NOT_MEASURED, "B2>B3 at 4096x4096x512 is wrong: Element 3 is 7.")


def swept(results: Path, variant: str, says: dict) -> None:
    """Write a sweep whose manifest says this."""
    gpu = {"name": "a", "slug": "a", "uuid": "u", "driver": "d"}
    manifest = {"kind": "sweep", "run_id": "r", "experiment": "gemm", "variant": variant, "arch": ARCH, "arms": {}}
    manifest |= {"control": {"name": "c", "dtype": "bfloat16"}, "dtype": "bfloat16", "fill": "normal", "l2": "hot"}
    manifest |= {
        "clock": {"mode": "observe"},
        "protocol": {"hash": "p"},
        "software": {},
        "shapes": [],
        "csv_sha256": "",
    }
    path = ResultsSet(results).csv("sweep", "gemm", variant)
    write_text(path, "")
    write_json(path.with_suffix(".json"), {**manifest, "gpu": gpu, **says})


def test_recordings_of_two_fills_are_not_compared(tmp_path):
    write(tmp_path, "steps", [step("B2>B3", 5.0)])
    claim = parse(tmp_path, gain={"steps": ["B2>B3"]}, above=0)
    for rung, fill in (("B2", "normal"), ("B3", "zeros")):
        manifest = {"fill": fill}
        swept(tmp_path, GEMM.variant(rung).name, manifest)
    reason = "Its recordings mix fill normal and zeros, which are not comparable."
    assert verdict(tmp_path, claim) == (NOT_MEASURED, reason)


# ---- the other quantities --------------------------------------------------------------------------------------------


def floor_rows(**more: Any) -> list[dict[str, Any]]:
    return [{"shape_class": "many waves", "shapes": 1, "jobs": 3, "floor_percent": 1.0, **more}]


def shares(rung: str, share: float, spread: float | None = 0.1, **more: Any) -> dict[str, Any]:
    row = {
        "variant": GEMM.variant(rung).name,
        "m": 4096,
        "n": 4096,
        "k": 4096,
        "run_id": "r",
        "status": "ok",
        "rounds": 20,
    }
    row |= {"share_percent": share, "share_low_percent": share * 0.999, "share_high_percent": share * 1.001}
    return row | {"spread_percent": spread, "spread_freedom": None if spread is None else 9.0} | more


def test_a_share_has_what_jobs_differ_by_in_its_interval(tmp_path):
    claim = parse(tmp_path, share={"rung": "B3"}, at_least=100)
    write(tmp_path, "floor", floor_rows())
    for share, spread, word in ((104, 0.1, HOLDS), (96, 0.1, FAILS), (104, 5.0, UNDECIDED), (104, None, UNDECIDED)):
        write(tmp_path, "shapes", [shares("B3", share, spread)])
        assert verdict(tmp_path, claim)[0] == word


def test_variants_of_two_jobs_are_compared_by_their_shares(tmp_path):
    write(tmp_path, "floor", floor_rows())
    write(tmp_path, "corners", [shares("S2", 20), shares("S3", 50)])
    (row,) = judge(tmp_path, parse(tmp_path, apart={"from": "S2", "to": "S3"}, above=0))
    assert (row["verdict"], row["figure"]) == (HOLDS, 150.0)


def test_noise_is_the_floor_over_the_gain_where_the_clock_was_left_alone(tmp_path):
    write(tmp_path, "steps", [step("B3>B5", 10.0, floor_percent=1.0)])
    claim = parse(tmp_path, noise={"steps": ["B3>B5"]}, above=1)
    for mode in ("lock", "observe"):
        swept(tmp_path, GEMM.variant("B5").name, {"clock": {"mode": mode}})
        (row,) = judge(tmp_path, claim)
        assert row["verdict"] == (FAILS if mode == "observe" else NOT_MEASURED)
    assert row["figure"] == pytest.approx(math.log(1.01) / math.log(1.1), abs=1e-4)


def test_cycles_are_a_difference_whose_floor_counts_twice(tmp_path):
    experiment = load_experiment("tma_latency")
    rows = [
        {"variant": experiment.variant(rung).name, "bytes": 16, "footprint_kib": 8192, "cold": 0, "cycles": cycles}
        | {"low": cycles - 1, "high": cycles + 1, "rounds": 20, "run_id": "r", "status": "ok"}
        for rung, cycles in (("TL0", 300.0), ("TL3", 450.0))
    ]
    write(tmp_path, "points", rows, "tma_latency")
    write(tmp_path, "floor", floor_rows(shape_class="all points"), "tma_latency")
    claim = parse(tmp_path, experiment="tma_latency", cycles={"rung": "TL3", "over": "TL0"}, equal=150, tolerance=10)
    (row,) = judge(tmp_path, claim, experiments=["tma_latency"])
    assert (row["verdict"], row["figure"]) == (HOLDS, 150.0)
    assert row["high"] - 150 == pytest.approx(7.5 + math.sqrt(2), rel=0.05), "1 % of 750, and the errors in squares"


def counted(rung: str, metric: str, value: float | None, **more: Any) -> dict[str, Any]:
    row = {
        "variant": GEMM.variant(rung).name,
        "m": 512,
        "n": 512,
        "k": 512,
        "want": metric,
        "metric": claims.METRICS[metric],
    }
    return row | {"value": value, "run_id": "r", "status": "ok"} | more


def test_counts_are_a_ratio_without_an_interval(tmp_path):
    rows = [counted("A3", "ldsm.instructions", 10), counted("A3", "lds.instructions", 0)]
    rows += [counted("A2", "ldsm.instructions", 0), counted("A2", "lds.instructions", 40)]
    write(tmp_path, "counters", rows)
    of = {"rung": "A3", "over": "A2", "counts": ["lds.instructions", "ldsm.instructions"]}
    (row,) = judge(tmp_path, parse(tmp_path, executed=of, equal=0.25))
    assert (row["verdict"], row["figure"], row["level_percent"]) == (HOLDS, 0.25, None)
    rows[0] |= {"status": "not permitted", "value": None, "reason": "Ask for it."}
    write(tmp_path, "counters", rows)
    reason = f"{claims.METRICS['ldsm.instructions']} of {GEMM.variant('A3').name} is not permitted: Ask for it."
    assert verdict(tmp_path, parse(tmp_path, executed=of, equal=0.25)) == (NOT_MEASURED, reason)


def test_a_set_of_the_emulator_is_judged_by_its_own_counts(tmp_path):
    (tmp_path / "csv" / "emulate").mkdir(parents=True)
    rows = [
        {
            "variant": GEMM.variant(rung).name,
            "m": 512,
            "n": 512,
            "k": 512,
            "kind": kind,
            "instructions": count,
            "wavefronts": 80,
        }
        | {"run_id": "r", "status": "ok"}
        for rung, kind, count in (("A3", "ldsm", 10), ("A3", "hmma", 5), ("A2", "lds", 40))
    ]
    write(tmp_path, "counts", rows)
    of = {"rung": "A3", "over": "A2", "counts": ["lds.wavefronts", "ldsm.wavefronts"]}
    assert verdict(tmp_path, parse(tmp_path, executed=of, equal=1)) == (HOLDS, "")
    of = {"rung": "A3", "over": "A2", "counts": ["all.instructions"]}
    assert verdict(tmp_path, parse(tmp_path, executed=of, below=1))[0] == NOT_MEASURED


def test_a_binary_is_asked_for_an_opcode_that_it_may_lack(tmp_path):
    rows = [
        {
            "variant": GEMM.variant("B5").name,
            "arch": ARCH,
            "kind": kind,
            "name": name,
            "value": value,
            "status": "ok",
            "reason": "",
        }
        for kind, name, value in (("opcode_total", "UTMALDG.2D", 3), ("resource", "registers", 120))
    ]
    schemas.write_rows("inspect", rows, tmp_path / "csv" / "inspect" / ARCH / f"{GEMM.variant('B5').name}.csv")
    for opcode, word in (("UTMALDG.2D", HOLDS), ("UBLKCP", FAILS)):
        assert verdict(tmp_path, parse(tmp_path, binary={"rung": "B5", "opcode": opcode}, at_least=1))[0] == word
    missing = parse(tmp_path, binary={"rung": "B5", "over": "B3", "resource": "registers"}, below=0)
    assert verdict(tmp_path, missing) == (NOT_MEASURED, f"{GEMM.variant('B3').name} has no inspect CSV.")


def test_wrong_results_uncontrolled_steps_and_counters_are_counted(tmp_path):
    place = {"what": "sweep", "m": 512, "n": 512, "k": 512}
    rows = [
        {"variant": GEMM.variant(r).name, **place, "status": s}
        for r, s in (("B2", "ok"), ("B3", "wrong"), ("B5", "refused"))
    ]
    write(tmp_path, "coverage", rows)
    write(tmp_path, "steps", [step("B2>B3", 5.0), step("B2>B3", 5.0, k=512, controlled=False, reason="It is not.")])
    write(tmp_path, "counters", [counted("A3", "ldsm.instructions", 10), counted("A3", "lds.instructions", None)])
    names = [claims.METRICS[name] for name in ("ldsm.instructions", "lds.instructions")]
    for keys, figure, where in (
        ({"wrong": {"of": "everything"}}, 1, "of 2 results"),
        ({"uncontrolled": {"steps": ["B2>B3"]}}, 1, "of 1 steps"),
        ({"counters": {"metrics": names}}, 1, "of 2 metrics"),
    ):
        (row,) = judge(tmp_path, parse(tmp_path, **keys, equal=0))
        assert (row["verdict"], row["figure"], row["where"]) == (FAILS, figure, where)


# ---- bad files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gain": {"steps": ["B2>B9"]}, "above": 0}, "claim it: gemm has no step 'B2>B9'"),
        ({"gain": {"steps": ["B2>B3", "B4>B6"]}, "above": 0}, "B4>B6 does not begin where B2>B3 ends"),
        (
            {"gain": {"steps": ["B2>B3"]}, "above": 0, "where": {"grid": [0]}},
            "gemm has no axis 'grid'; choose of m, n, k",
        ),
        (
            {"gain": {"steps": ["B2>B3"], "along": "k"}, "below": 0, "where": {"k": [256]}},
            "along k needs two of its values",
        ),
        ({"gain": {"steps": ["B2>B3"]}}, "it has none where it needs one comparison: give one of at_least"),
        ({"above": 0}, "it has none where it needs one quantity: give one of gain"),
        (
            {"gain": {"steps": ["B2>B3"]}, "share": {"rung": "B3"}, "above": 0},
            "it has gain and share where it needs one",
        ),
        ({"gain": {"steps": ["B2>B3"]}, "within": [3, -3]}, "key within: 3 is above -3: give the lower end first"),
        (
            {"gain": {"steps": ["B2>B3"]}, "above": 0, "experiment": "gem"},
            "claim it: there is no experiment 'gem'; choose",
        ),
        ({"share": {"rung": "B99"}, "above": 0}, "claim it, key rung:"),
        (
            {"executed": {"rung": "B3", "over": "B2", "counts": ["x.instructions"]}, "below": 1},
            "nothing counts 'x.instr",
        ),
        ({"binary": {"rung": "B3"}, "below": 1}, "give one of the two"),
        ({"gain": {"steps": ["B2>B3"], "code": "1+1"}, "above": 0}, "there is no key 'code'; choose of steps, against"),
        ({"gain": {"steps": ["B2>B3"]}, "above": "0"}, "key claims.0.above: '0' is not of type 'number'"),
        ({"gain": {"steps": ["B2>B3"]}, "above": math.inf}, "key claims.0.above"),
        ({"id": "It is", "gain": {"steps": ["B2>B3"]}, "above": 0}, "key claims.0.id"),
        ({"says": None, "gain": {"steps": ["B2>B3"]}, "above": 0}, "'says' is a required property"),
    ],
)
def test_a_bad_claim_is_refused_in_one_sentence_that_names_it(tmp_path, keys, words):
    with pytest.raises(RungsError) as refusal:
        parse(tmp_path, **keys)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_two_claims_of_one_name_are_refused(tmp_path):
    raw = {**BASE, "gain": {"steps": ["B2>B3"]}, "above": 0}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"claims": [raw, raw]}))
    with pytest.raises(RungsError, match="two claims have the id it: rename one"):
        claims.load_claims(tmp_path / "two.yaml")


# ---- the file of this repository -------------------------------------------------------------------------------------


def test_every_claim_names_what_its_experiment_has():
    known = claims.load_claims()
    for claim in known:
        claims.check(claim)
    assert len(known) >= 20 and {claim.seed for claim in known} == {"000", "004"}
    assert {name[8:] for name in (claim.id for claim in known) if name.startswith("mistake_")} >= {"wait", "swizzle"}


def test_the_seeds_own_figures_are_those_of_its_published_table():
    table = pd.read_csv(ROOT / "config" / "published" / "intensity_rtx5090.csv").set_index("fma_iters")
    known = {claim.id: claim for claim in claims.load_claims()}
    for name, fma, column in (
        ("pipe2_pays", 1, "pipe2"),
        ("pipe2_at_8", 8, "pipe2"),
        ("pipe2_at_128", 128, "pipe2"),
        ("pipe2_at_256", 256, "pipe2"),
        ("stop_rule", 1, "pipe2"),
        ("bulk1d_waits", 1, "bulk1d"),
        ("tensor2d_waits", 1, "tensor2d"),
        ("bulk1d_even_at_8", 8, "bulk1d"),
        ("tensor2d_slow_at_8", 8, "tensor2d"),
        ("bulk1d_converges", 256, "bulk1d"),
        ("tensor2d_converges", 256, "tensor2d"),
    ):
        assert known[name].theirs == table.loc[fma, f"speedup_{column}"], name
    speedups = table["speedup_pipe2"]
    assert known["pipe2_falls"].theirs == pytest.approx(100 * (speedups[256] / speedups[1] - 1), abs=0.05)
    modes = table.loc[8]
    slower = 100 * (modes["speedup_tensor2d"] / modes["speedup_bulk1d"] - 1)
    assert known["tensor2d_slower_than_bulk1d"].theirs == pytest.approx(slower, abs=0.05)
    for name, tflops in (("cp_async_beats_cublas", 34.00), ("tma_beats_cublas", 34.31)):
        assert known[name].theirs == pytest.approx(100 * tflops / 32.27, abs=0.05)
        assert f"{tflops:.2f} TFLOP/s and cuBLAS at 32.27" in known[name].says


# ---- the recorded sets -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    claims.load_claims.cache_clear()


@pytest.mark.parametrize("results", RECORDED, ids=lambda path: path.name)
def test_the_recorded_claims_and_their_page_are_what_the_data_give(results):
    rows = claims.read(results)
    again = claims.judge_again(results, ARCH)
    assert again == rows
    page = (results / "md" / "claims.md").read_text(encoding="utf-8")
    assert claimpages.render(results, staleness.stale_claims(results)) == page


def test_the_recorded_verdicts_follow_from_the_raw_rounds():
    """By other means than the package's: medians of ratios of the raw CSVs, and the sign that they must have."""
    rows = {row["claim"]: row for row in claims.read(H200)}

    def ratio(experiment: str, before: str, after: str, **point: int) -> float:
        e = load_experiment(experiment)
        frame = pd.read_csv(io.BytesIO(ResultsSet(H200).job("sweep", experiment, e.variant(after).name).csv))
        for axis, value in point.items():
            frame = frame[frame[axis] == value]
        unit = "cycles" if "cycles" in frame else "time_us"
        wide = frame[frame["status"] == "ok"].pivot(index="round", columns="arm", values=unit)
        return float((wide[e.variant(before).name] / wide[e.variant(after).name]).median())

    seed = {"fma_iters": 1, "payload_kib": 16384, "grid": 0}
    pipe2 = ratio("copy_intensity", "CP0", "CP2", **seed) * ratio("copy_intensity", "CP2", "CP3", **seed)
    assert rows["pipe2_pays"]["figure"] == pytest.approx(pipe2, rel=1e-3) and pipe2 < 1.5
    small, large = (ratio("gemm", "B2", "B3", m=4096, k=k) for k in (256, 8192))
    assert rows["trap3_cp_async_falls"]["figure"] == pytest.approx(100 * (large / small - 1), abs=0.1)
    assert rows["trap3_cp_async_falls"]["verdict"] == FAILS and large > small
    alone = ratio("smem_read", "X4", "X7", warps=32) * 8
    assert rows["trap2_alone_b"]["figure"] == pytest.approx(100 * (alone - 1), abs=0.1)


def test_the_page_has_a_row_and_a_sentence_for_each_claim_and_counts_them():
    page = (H200 / "md" / "claims.md").read_text(encoding="utf-8")
    known = claims.load_claims()
    cells = [row[0].strip("`") for table in grids(page) for row in table[1:]]
    assert cells == [claim.id for claim in known]
    for claim in known:
        assert re.search(
            rf"^- `{claim.id}` \*\*(holds|fails|is undecided)\*\*.*: “{re.escape(claim.says)}” .*$", page, re.M
        )
    words = [row["verdict"] for row in claims.read(H200)]
    hold, fail, rest = (words.count(word) for word in (HOLDS, FAILS, UNDECIDED))
    assert f"{hold} hold, {fail} fail and {rest} are undecided (" in page and hold + fail + rest == len(known)


def test_the_figure_is_the_same_bytes_again_and_holds_its_text(tmp_path):
    copy = tmp_path / "h200"
    shutil.copytree(H200 / "data", copy / "data")
    (copy / "csv").symlink_to((ROOT / H200 / "csv").resolve())
    claimplots.draw(copy, {})
    for ending in ("svg", "png"):
        name = f"figures/claims.{ending}"
        assert (copy / name).read_bytes() == (H200 / name).read_bytes(), name
    check_that_no_text_leaves(claimplots.plot(H200, {}))


def test_a_claim_over_a_stale_recording_bears_the_mark():
    name = GEMM.variant("B1").name
    page = claimpages.render(H200, {name: "the source of it has changed since"})
    row = next(line for line in page.splitlines() if line.startswith("| `trap1_single_buffer`"))
    other = next(line for line in page.splitlines() if line.startswith("| `trap2_drowned`"))
    whole = next(line for line in page.splitlines() if line.startswith("| `same_numbers`"))
    assert "†" in row and "†" not in other and "†" in whole
    assert f"<sub>† Stale. {name}: the source of it has changed since.</sub>" in page
    assert "`trap1_single_buffer` **fails**†" in page


@pytest.mark.parametrize(
    ("old", "new"), [("trap2_drowned", "trap2_floats"), (",within,-3.0,3.0,", ",within,-3.0,4.0,")]
)
def test_a_page_of_other_claims_than_the_file_has_is_refused(tmp_path, old, new):
    (tmp_path / claims.CSV).parent.mkdir(parents=True)
    text = (H200 / claims.CSV).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / claims.CSV).write_text(text.replace(old, new, 1))
    with pytest.raises(RungsError, match=r"other claims than config/claims\.yaml has: run `snakemake claims`"):
        claimpages.judged(tmp_path)


def test_trace_follows_a_claim_to_its_binaries(capsys):
    assert trace.trace(f"{H200}/md/claims.md:trap2_alone_a") == 0
    said = capsys.readouterr().out
    for words in (
        "claims.md is what its data give",
        "judged again from the data: the same verdict and figures",
        "smem_read/steps.csv: 1 rows of W1>W4",
        "made again from the rounds: the same figures",
        f"arm {load_experiment('smem_read').variant('W4').name}: binary",
    ):
        assert words in said, said
    with pytest.raises(RungsError, match="has no claim 'nothing'"):
        trace.trace(f"{H200}/md/claims.md:nothing")
