"""Tables say what the data says: cells, one conclusion, one line of provenance, and nothing where nothing is known."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pandas as pd
import pytest

from rendered import grids
from rungs import aggregate, schemas, tables, variants
from rungs.errors import RungsError
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
LADDER = EXPERIMENT.ladders["B"]
SHAPES = [(512, 512, 256), (512, 512, 4096), (4096, 4096, 256), (4096, 4096, 4096)]


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


def make(results, world: World):
    write_set(results, world)
    aggregate.run(results, "gemm", ARCH, [variant.name for variant in world.all_variants()])
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    failures = {(name_of("B6"), SHAPES[0]): ("time limit", "It never ended.")}
    return make(
        tmp_path_factory.mktemp("set") / "h200", World(shapes=SHAPES, failures=failures, ctas={name_of("B4"): 1})
    )


@pytest.fixture(scope="module")
def source(results):
    return tables.read_source(results, "gemm")


def row_of(grid: list[list[str]], first: str) -> list[str]:
    return next(row for row in grid if row[0] == first)


def sentences(text: str) -> list[str]:
    return re.findall(r"^\*\*(.*)\*\*$", text, re.MULTILINE)


# Ladder


def test_a_rung_has_its_throughput_and_its_share_at_each_shape(source, results):
    large, small = grids(tables.ladder_tables(source, LADDER))
    assert large[0] == ["rung", "what it is", "K=256", "K=4096"]
    assert [row[0] for row in large[1:]] == [*LADDER.rungs, "control"]
    assert row_of(large, "B3")[1] == "cp.async 16 B, 2 stages"
    shapes = aggregate.read_data(results, "gemm")["shapes"].set_index(["variant", "m", "k"])
    for grid, m in ((large, 4096), (small, 512)):
        row = shapes.loc[(name_of("B3"), m, 4096)]
        assert row_of(grid, "B3")[3] == f"{row['tflops']:.1f} ({row['share_percent']:.1f} %)"
    assert row_of(small, "B6")[2] == "time limit"
    control = shapes.xs((4096, 4096), level=("m", "k"))["control_tflops"].median()
    assert row_of(large, "control")[3] == f"{control:.1f}"


def test_the_ladder_concludes_with_the_fastest_and_the_slowest_rung(source):
    first, second = sentences(tables.ladder_tables(source, LADDER))
    assert first.startswith("At M=N=4096, K=4096 the fastest rung is B6, TMA, 3 stages, with 55.")
    assert "the slowest rung is B1, cp.async 16 B, 1 stage, with 31." in first
    steps = {row["step"]: row["gain_percent"] for row in source.rows("steps") if (row["m"], row["k"]) == (4096, 4096)}
    together = 100 * ((1 + steps["B2>B3"] / 100) * (1 + steps["B3>B5"] / 100) * (1 + steps["B5>B6"] / 100) - 1)
    assert f"the steps of the path B2 > B3 > B5 > B6 gain {together:+.1f} % together" in first
    other_way = 100 * ((1 + steps["B2>B3"] / 100) * (1 + steps["B3>B4"] / 100) * (1 + steps["B4>B6"] / 100) - 1)
    assert together == pytest.approx(other_way, abs=1.0), "the same two rungs over another path"
    assert second.startswith("At M=N=512, K=4096")


def test_rungs_that_cannot_be_told_apart_are_not_ranked(tmp_path):
    world = World(shapes=[SHAPES[3]], noise=0.01)
    gain = world.gain_percent(name_of("B5"), name_of("B6"), SHAPES[3])
    make(tmp_path, World(**{**vars(world), "gains": {name_of("B5"): gain}}))
    (sentence,) = sentences(tables.ladder_tables(tables.read_source(tmp_path, "gemm"), LADDER))
    assert "(not told apart from B" in sentence


def shared(name: str, share: float, half: float = 0.05, spread: float | None = 0.1) -> dict:
    return {
        "variant": name,
        "share_percent": share,
        "share_low_percent": share - half,
        "share_high_percent": share + half,
        "spread_percent": spread,
    }


def test_shares_of_two_jobs_are_ranked_only_beyond_the_spread_between_jobs():
    rows = [shared("a", 50.0), shared("b", 49.9), shared("c", 45.0)]
    assert tables.standing(rows[0], rows, {}, fastest=True) == (["b"], [])
    assert tables.standing(rows[2], rows, {}, fastest=False) == ([], [])
    unknown = [shared("a", 50.0, spread=None), shared("b", 40.0, spread=None)]
    assert tables.standing(unknown[0], unknown, {}, fastest=True) == (["b"], []), "no spread, no claim"


@pytest.mark.parametrize(
    ("verdict", "alike", "against"),
    [("faster", [], []), ("tie", ["b"], []), ("undecided", ["b"], []), ("none", ["b"], []), ("slower", [], ["b"])],
)
def test_a_paired_step_counts_for_more_than_shares(verdict, alike, against):
    rows = [shared("a", 50.0), shared("b", 30.0)]
    assert tables.standing(rows[0], rows, {("b", "a"): verdict}, fastest=True) == (alike, against)
    mirrored = {"faster": "slower", "slower": "faster"}.get(verdict, verdict)
    assert tables.standing(rows[0], rows, {("a", "b"): mirrored}, fastest=True) == (alike, against)
    assert tables.standing(rows[1], rows, {("b", "a"): verdict}, fastest=False) == (
        [name.replace("b", "a") for name in alike],
        [name.replace("b", "a") for name in against],
    )


def test_no_rung_is_fastest_against_its_paired_step(results):
    source = tables.read_source(results, "gemm")
    steps = source.data["steps"].copy()
    at = (steps["step"] == "B5>B6") & (steps["m"] == 4096) & (steps["k"] == 4096)
    steps.loc[at, "verdict"] = "slower"
    first, _ = sentences(
        tables.ladder_tables(dataclasses.replace(source, data={**source.data, "steps": steps}), LADDER)
    )
    assert "no rung is named fastest: B6, TMA, 3 stages, has the largest share, 55." in first
    assert "but paired in one job B5 is faster, and the slowest rung is B1" in first


# Steps


def row(**keys) -> dict:
    base = {
        "step": "B2>B3",
        "source_variant": name_of("B2"),
        "target_variant": name_of("B3"),
        "k": 256,
        "gain_percent": 12.34,
        "low_percent": 12.14,
        "high_percent": 12.54,
        "claim_low_percent": 12.0,
        "claim_high_percent": 12.7,
        "verdict": "faster",
        "rounds_to_decide": None,
        "controlled": True,
        "status": "ok",
        "reason": "",
    }
    return {**base, **keys}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "+12.3 % ±0.2 faster"),
        (
            {"gain_percent": -3.08, "low_percent": -3.18, "high_percent": -2.98, "verdict": "slower"},
            "-3.1 % ±0.1 slower",
        ),
        ({"gain_percent": 0.04, "low_percent": -0.06, "high_percent": 0.14, "verdict": "tie"}, "+0.04 % ±0.10 tie"),
        ({"gain_percent": -0.001, "low_percent": -0.101, "high_percent": 0.099, "verdict": "tie"}, "+0.00 % ±0.10 tie"),
        ({"low_percent": 12.31, "high_percent": 12.37}, "+12.34 % ±0.03 faster"),
        ({"verdict": "undecided", "rounds_to_decide": 1234}, "+12.3 % ±0.2 undecided (+1300 rounds)"),
        ({"verdict": "undecided", "rounds_to_decide": 1}, "+12.3 % ±0.2 undecided (+1 round)"),
        ({"verdict": "undecided"}, "+12.3 % ±0.2 undecided"),
        ({"verdict": "none"}, "+12.3 % ±0.2 no floor"),
        ({"controlled": False}, "+12.3 % ±0.2 faster‡"),
        ({"gain_percent": None, "status": "not on this chip"}, "not on this chip"),
        ({"low_percent": None, "high_percent": None}, "+12.3 % (too few rounds for an interval) faster"),
    ],
)
def test_a_step_cell(source, keys, expected):
    assert tables.step_cell(source, row(**keys)) == expected


def test_a_missing_row_is_not_run(source):
    assert tables.step_cell(source, None) == "not run"


def test_steps_are_rows_and_name_what_changes(source):
    large, small = grids(tables.step_tables(source, LADDER))
    assert [r[0] for r in large[1:]] == [step.label for step in LADDER.steps]
    assert row_of(large, "B3>B5")[1] == "cp.async 16 B > TMA"
    assert row_of(small, "B5>B6")[2] == "time limit"
    assert re.fullmatch(r"\+1[12]\.\d % ±0\.\d faster", row_of(large, "B2>B3")[3])


def test_the_steps_conclude_with_most_and_least_and_the_trend_along_the_path(source):
    first, _ = sentences(tables.step_tables(source, LADDER))
    assert re.match(
        r"At M=N=4096 B7>B5 gains most, \+46\.\d % ±0\.\d at K=4096, B5>B6 loses most, -52\.\d % ±0\.\d+ at K=256,",
        first,
    )
    assert re.search(
        r"from K=256 to 4096 the gain of B2>B3 .*, of B3>B5 .*, of B5>B6 rises \(-52\.\d to \+11\.\d %\)", first
    )
    assert "verdicts: 15 faster, 5 slower" in first
    assert first.endswith("B3>B4, B4>B6 not controlled and so not ranked.")


def test_a_step_that_is_not_controlled_is_never_the_best(source):
    rows = {
        ("B2>B3", 256): row(gain_percent=50.0, controlled=False),
        ("B3>B5", 256): row(step="B3>B5", gain_percent=3.0),
    }
    sentence = tables._step_sentence(source, LADDER, rows, (512, 512))
    assert "B3>B5 gains most, +3.0 %" in sentence
    assert "+50" not in sentence


def test_an_undecided_table_says_so(source):
    rows = {("B2>B3", 256): row(verdict="undecided"), ("B3>B5", 256): row(step="B3>B5", verdict="tie")}
    sentence = tables._step_sentence(source, LADDER, rows, (512, 512))
    assert sentence == "At M=N=512 no controlled step is clear of the floor; verdicts: 1 tie, 1 undecided."


@pytest.mark.parametrize(
    ("bounds", "word"),
    [
        ([(1, 2), (3, 4)], "rises"),
        ([(3, 4), (1, 2)], "falls"),
        ([(1, 3), (2, 4)], "does not change beyond its interval"),
        ([(1, 2), (5, 6), (1, 2)], "peaks in between"),
        ([(5, 6), (1, 2), (4, 7)], "dips in between"),
        ([(1, 2), (5, 6), (5.5, 7)], "rises"),
    ],
)
def test_a_trend_is_claimed_only_where_intervals_part(bounds, word):
    assert tables.trend([{"claim_low_percent": low, "claim_high_percent": high} for low, high in bounds]) == word


def test_without_a_floor_no_step_has_a_verdict(tmp_path):
    source = tables.read_source(make(tmp_path, World(shapes=[SHAPES[0]], variants=["B2", "B3"], floor_jobs=0)), "gemm")
    text = tables.step_tables(source, LADDER)
    assert sentences(text) == ["At M=N=512 no step has a verdict, since the floor was not measured."]
    assert row_of(grids(text)[0], "B2>B3")[2].endswith("no floor")
    assert "floor not measured" in text
    assert sentences(tables.floor_table(source)) == ["The floor was not measured, so that no step has a verdict."]


# Evidence, counters, floor, gaps


def test_evidence_shows_both_sides_and_names_what_is_not_controlled(source):
    text = tables.evidence_table(source, LADDER)
    grid = grids(text)[0]
    assert row_of(grid, "B2>B3")[2:] == [
        "126 > 122",
        "2",
        "none",
        "LDG.E.128 4 > 0, LDGSTS.E.BYPASS.128 0 > 4, STS.128 4 > 0",
        "yes",
    ]
    assert row_of(grid, "B3>B4")[2:4] == ["122 > 123", "2 > 1"]
    assert row_of(grid, "B3>B4")[-1] == "**no**"
    (sentence,) = sentences(text)
    assert sentence.startswith("8 of 10 steps are controlled")
    assert "B3>B4, B4>B6 are not; registers move most in B0>B1, 126 > 122." in sentence


def test_counters_are_shown_in_readable_units_with_the_three_top_stalls(source):
    large, small = grids(tables.counter_tables(source, LADDER))
    at = {title: i for i, title in enumerate(large[0])}
    b5 = row_of(large, "B5")
    assert b5[at["instructions"]] == "113 M"  # 9.4e7 x 1.2
    assert b5[at["cp.async"]] == "0"
    assert b5[at["TMA loads"]] == "286 k"
    assert b5[at["DRAM"]] == "120 MB"
    assert b5[at["top stalls (warps per issue)"]].count(",") == 2
    assert b5[at["top stalls (warps per issue)"]].startswith("long_scoreboard 2.")
    assert "selected" not in b5[at["top stalls (warps per issue)"]]
    assert "LDS" not in at  # no rung has it
    assert row_of(small, "B5")[at["instructions"]] == "14.1 M"
    assert sentences(tables.counter_tables(source, LADDER))[0].startswith(
        "At 4096x4096x4096 the tensor pipe is busiest in B7, 66.0 %"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (999_960, "1 M"), (1234, "1.23 k"), (5.6e9, "5.6 G")]
)
def test_counts(value, text):
    assert tables.count_text(value) == text


@pytest.mark.parametrize("word", ["not permitted", "kernel not matched", "not on this chip"])
def test_each_gap_has_its_own_word_and_the_timing_tables_are_whole(tmp_path, word):
    source = tables.read_source(make(tmp_path, World(shapes=[SHAPES[3]], profile=word)), "gemm")
    text = tables.counter_tables(source, LADDER)
    grid = grids(text)[0]
    assert grid[0] == ["rung", "counters"]
    assert {r[1] for r in grid[1:]} == {word}
    assert sentences(text) == [
        f"At 4096x4096x4096 there are no counters ({word}), and the timing tables do not need them."
    ]
    assert "%)" in row_of(grids(tables.ladder_tables(source, LADDER))[0], "B3")[2]


def test_a_single_gap_keeps_its_word_beside_counted_cells(source):
    counters = {
        "smsp__inst_executed.sum": {"value": 5.0, "status": "ok"},
        "smsp__inst_executed_op_tma_ld.sum": {"value": None, "status": "not on this chip"},
    }
    shown = {column.title: column.show(counters) for column in tables.COLUMNS}
    assert shown["instructions"] == "5"
    assert shown["TMA loads"] == "not on this chip"


A = EXPERIMENT.ladders["A"]
COST = {
    "A1": (50.0e6, 0.0, 200.0e6),
    "A2": (50.0e6, 0.0, 50.0e6),
    "A2v": (12.5e6, 0.0, 50.0e6),
    "A3": (79e3, 12.5e6, 50.0e6),
    "A3t": (0.0, 12.5e6, 50.0e6),
}
"""Rung -> LDS, ldmatrix and wavefronts of reads; those of A3's LDS are none."""


@pytest.fixture(scope="module")
def reads(tmp_path_factory):
    """Ladder A at a profiled shape, with counters whose sums are known."""
    folder = tmp_path_factory.mktemp("reads") / "h200"
    make(folder, World(shapes=[SHAPES[3]], variants=list(COST), effects={"read": {0: -20.0, 2: -5.0}}))
    frame = aggregate.read_data(folder, "gemm")["counters"]
    rows = []
    for rung, (lds, ldsm, wavefronts) in COST.items():
        base = frame[frame["variant"] == name_of(rung)].iloc[0].to_dict()
        counters = {
            tables.LDS: lds,
            tables.LDSM: ldsm,
            f"{tables.WAVEFRONTS}ld.sum": 0.0 if ldsm else wavefronts,
            f"{tables.WAVEFRONTS}ldsm.sum": wavefronts if ldsm else 0.0,
            f"{tables.WAVEFRONTS}st.sum": 1.0e6,
            f"{tables.WAVEFRONTS}ldgsts.sum": 32.0e6,
        }
        rows += [{**base, "metric": metric, "want": metric, "value": value} for metric, value in counters.items()]
    schemas.write_csv("counters", pd.DataFrame(rows), folder / "data" / "gemm" / "counters.csv")
    return folder


def test_cost_puts_instructions_wavefronts_and_the_sweeps_time_side_by_side(reads):
    source = tables.read_source(reads, "gemm")
    text = tables.cost_tables(source, A)
    (grid,) = grids(text)
    assert grid[0][2:] == [
        "read instructions",
        "read wavefronts",
        "per instruction",
        "write wavefronts",
        "time, µs",
        "TFLOP/s",
        "share of torch.matmul",
    ]
    assert row_of(grid, "A1")[:6] == ["A1", "ld.shared, K x N", "50 M LDS", "200 M", "4.00", "33 M"]
    assert row_of(grid, "A2")[2:5] == ["50 M LDS", "50 M", "1.00"]
    assert row_of(grid, "A3")[2:5] == ["12.5 M ldmatrix", "50 M", "4.00"], "LDS without a wavefront read nothing"
    shapes = aggregate.read_data(reads, "gemm")["shapes"].set_index("variant")
    for rung in COST:
        row = shapes.loc[name_of(rung)]
        assert row_of(grid, rung)[6:] == [f"{row.time_us:.4g}", f"{row.tflops:.1f}", f"{row.share_percent:.1f} %"]
    assert text.count("The same in all rungs:") == 1
    page = tables.render_experiment(reads, "gemm")
    assert "### What reads cost on ladder A" in page and text in page


def test_cost_concludes_with_what_each_step_saves(reads):
    source = tables.read_source(reads, "gemm")
    (sentence,) = sentences(tables.cost_tables(source, A))
    gain = {row["step"]: row["gain_percent"] for row in source.rows("steps")}
    time = {step: 100 * (1 / (1 + percent / 100) - 1) for step, percent in gain.items()}
    assert sentence.startswith(
        "At 4096x4096x4096 A1>A2, K x N > N x K, has as many read instructions, 75.0 % fewer read wavefronts and "
    )
    assert (
        "A2>A3, ld.shared > ldmatrix, has 75.0 % fewer read instructions, as many read wavefronts and"
        f" {-time['A2>A3']:.1f} % less time" in sentence
    )
    assert sentence.index("A2>A3") < sentence.index("A2>A2v"), "the path comes first"
    assert "A1>A3t, ld.shared > ldmatrix, has 75.0 % fewer read instructions, 75.0 % fewer read wavefronts" in sentence
    assert sentence.endswith("; A3t>A3 leaves its reads as they are.")


def test_the_time_of_a_cost_table_is_never_ncus(reads):
    frame = aggregate.read_data(reads, "gemm")["counters"]
    row = frame.iloc[0].to_dict() | {"metric": "gpu__time_duration.sum", "want": "kernel time", "value": 123456.0}
    before = tables.cost_tables(tables.read_source(reads, "gemm"), A)
    source = tables.read_source(reads, "gemm")
    more = pd.concat([frame, pd.DataFrame([row])], ignore_index=True)
    assert tables.cost_tables(dataclasses.replace(source, data={**source.data, "counters": more}), A) == before


def test_a_cost_that_lacks_a_counter_or_a_time_says_so(reads):
    source = tables.read_source(reads, "gemm")
    counters, shapes = source.data["counters"], source.data["shapes"].copy()
    counters = counters[~((counters["variant"] == name_of("A2")) & (counters["metric"] == tables.LDSM))]
    shapes.loc[shapes["variant"] == name_of("A1"), ["time_us", "tflops", "share_percent"]] = None
    shapes.loc[shapes["variant"] == name_of("A1"), "status"] = "time limit"
    data = {**source.data, "counters": counters, "shapes": shapes[shapes["variant"] != name_of("A3")]}
    text = tables.cost_tables(dataclasses.replace(source, data=data), A)
    (grid,) = grids(text)
    assert row_of(grid, "A2")[2:6] == ["not counted"] * 4
    assert row_of(grid, "A1")[6:] == ["time limit"] * 3
    assert row_of(grid, "A3")[6:] == ["not timed"] * 3
    assert "A2>A3" not in text.split("**")[1]
    none = {**source.data, "counters": counters[counters["metric"] != tables.LDS]}
    assert tables.cost_tables(dataclasses.replace(source, data=none), A) == ""


def test_what_is_missing_is_listed_with_its_reason(source):
    assert grids(tables.gap_table(source))[0][1:] == [
        ["B6", name_of("B6"), "sweep", "512x512x256", "time limit", "It never ended."]
    ]


def test_a_whole_set_lists_no_gap(tmp_path):
    source = tables.read_source(make(tmp_path, World(shapes=[SHAPES[3]], variants=["B2", "B3"])), "gemm")
    assert tables.gap_table(source) == ""
    assert "Not measured" not in tables.render_experiment(tmp_path, "gemm")


# Every table


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        (
            {"B0>B1": [10.0, 21.0], "B2>B3": [0.0, 0.0]},
            "In the geometric mean over 2 shapes B0>B1 gains +15.4 % (+10.0 to +21.0 %), the most, and B2>B3 +0.0 %"
            " (+0.0 to +0.0 %), the least.",
        ),
        (
            {"B0>B1": [10.0, None], "B2>B3": [1.0, 1.0]},
            "In the geometric mean over 2 shapes B2>B3 gains +1.0 % (+1.0 to +1.0 %).",
        ),
        ({"B0>B1": [10.0, None]}, "No step has every cell of the map, so that none has an average."),
    ],
)
def test_a_map_ends_in_what_its_whole_steps_say_on_average(gains, sentence):
    rows = [
        {"step": step, "m": 512, "n": 512, "k": 256 * (i + 1), "gain_percent": gain}
        for step, values in gains.items()
        for i, gain in enumerate(values)
    ]
    assert tables._map_sentence(rows) == sentence


def test_every_table_ends_in_one_sentence_and_its_provenance(results):
    text = tables.render_experiment(results, "gemm")
    body = text.split("## Not measured")[0]
    tables_, pictures = 2 + 2 + 1 + 1 + 2 + 1, 1
    assert len(grids(body)) == tables_
    assert len(sentences(body)) == body.count("The same in all rungs:") == tables_ + pictures
    assert all(sentence.endswith(".") and not re.search(r"\.\s+[A-Z]", sentence) for sentence in sentences(body))
    for declared in EXPERIMENT.declared:
        assert body.count(declared) == tables_ + pictures


def test_provenance_names_gpu_clock_rounds_floor_fill_date_runs_and_builds(source, results):
    line = tables.ladder_tables(source, LADDER).splitlines()[-1]
    manifests = [json.loads(path.read_text()) for path in sorted((results / "csv" / "sweep" / "gemm").glob("*.json"))]
    for part in (
        "NVIDIA H200, driver 580.65.06",
        "clock observed, not locked, medians 1",
        " MHz",
        "; 30 rounds",
        "fill normal, L2 hot",
    ):
        assert part in line
    assert re.search(r"floor 0\.\d\d % short loop, 0\.\d\d % one wave, 0\.\d\d % many waves", line)
    assert "2026-11-29" in line
    runs = {manifest["variant"]: manifest["run_id"] for manifest in manifests}
    assert f"runs {tables.sha256_json(runs)[:8]} (hash over 8)" in line
    assert "builds " in line


def test_counters_have_the_runs_of_the_profile_and_no_rounds(source):
    line = tables.counter_tables(source, LADDER).splitlines()[-1]
    assert "ncu 2025.3" in line
    assert "rounds" not in line
    assert f"runs {tables.sha256_json({n: ids[0] for n, ids in source.facts.profiles.items()})[:8]}" in line


def test_one_run_is_named_by_its_id(source):
    rows = [row for row in source.rows("shapes") if row["variant"] == name_of("B3")]
    line = tables.provenance_line(source, rows, [name_of("B3")])
    assert f"runs {source.facts.sweeps[name_of('B3')][0]}; builds " in line


def test_the_floor_names_its_own_jobs_and_what_differs_between_them(source):
    text = tables.floor_table(source)
    jobs = source.facts.floors
    assert f"runs {tables.sha256_json({name: job.run_id for name, job in jobs.items()})[:8]} (hash over 3)" in text
    assert source.facts.sweeps[name_of("B3")][0] not in text
    assert "; 30 rounds; " in text and re.search(r"medians \d+( to \d+)? MHz", text)
    between = dataclasses.replace(
        source, data={**source.data, "floor": source.data["floor"].assign(floor_percent=1.4, between_percent=1.4)}
    )
    (sentence,) = sentences(tables.floor_table(between))
    assert sentence.startswith("The same step, measured in 3 jobs, differs by at most 1.40 % (")


def test_boards_of_one_model_are_counted_where_there_are_more_than_one(tmp_path):
    make(tmp_path, World(shapes=[SHAPES[3]], variants=["B2", "B3"]))
    path = tmp_path / "csv" / "sweep" / "gemm" / f"{name_of('B3')}.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"gpu": manifest["gpu"] | {"uuid": "GPU-2"}}))
    source = tables.read_source(tmp_path, "gemm")
    rows = source.rows("shapes")
    assert tables.provenance_line(source, rows, [name_of("B2"), name_of("B3")]).startswith("NVIDIA H200 (2 boards), ")
    assert tables.provenance_line(source, rows, [name_of("B3")]).startswith("NVIDIA H200, driver ")


def test_a_stale_recording_marks_each_of_its_numbers_and_no_other(results):
    source = tables.read_source(results, "gemm", {name_of("B3"): "kernels/ptx.cuh has changed."})
    ladder, steps = tables.ladder_tables(source, LADDER), tables.step_tables(source, LADDER)
    counters, evidence = tables.counter_tables(source, LADDER), tables.evidence_table(source, LADDER)
    for grid in grids(ladder) + grids(counters):
        for cells in grid[1:]:
            assert all(cell.endswith("†") for cell in cells[2:]) == (cells[0] == "B3")
    for grid in grids(steps):
        for cells in grid[1:]:
            assert all("†" in cell for cell in cells[2:]) == ("B3" in cells[0])
    assert row_of(grids(evidence)[0], "B2>B3")[2] == "126 > 122†"
    for text in (ladder, steps, counters, evidence):
        assert all(sentence.endswith(".†") for sentence in sentences(text))
        assert f"† Stale. {name_of('B3')}: kernels/ptx.cuh has changed." in text
    assert "†" not in tables.render_experiment(results, "gemm")


def test_a_stale_word_is_no_number(tmp_path):
    failures = {(name_of("B3"), SHAPES[0]): ("time limit", "It never ended.")}
    make(tmp_path, World(shapes=[SHAPES[0]], variants=["B2", "B3"], failures=failures, profile="not permitted"))
    text = tables.render_experiment(tmp_path, "gemm", {name_of("B3"): "changed."})
    assert "time limit†" not in text
    assert "not permitted†" not in text


# Files and blocks


def test_tables_are_written_whole_and_the_same_twice(results):
    tables.run(results, ["gemm"], {})
    first = [(results / name).read_bytes() for name in ("md/gemm.md", "README.md")]
    tables.run(results, ["gemm"], {})
    assert first == [(results / name).read_bytes() for name in ("md/gemm.md", "README.md")]
    readme = first[1].decode()
    assert "[gemm](md/gemm.md)" in readme
    assert "(figures/gemm/heatmap_B.svg)" in readme
    assert row_of(grids(readme)[0], "sweep") == ["sweep", "31", "1 time limit"]


def test_blocks_hold_the_tables_of_each_ladder(results, source):
    blocks = tables.readme_blocks(results, "gemm")
    kinds = ("answer", "ladder", "steps", "evidence", "takes", "ncu", "cost", "figures", "waterfall")
    assert set(blocks) == {f"gemm:{kind}:B" for kind in kinds} | {"gemm:floor"}
    assert blocks["gemm:steps:B"] == tables.step_tables(source, LADDER)
    assert blocks["gemm:figures:B"].count(".svg") == 4
    assert blocks["gemm:waterfall:B"].count(".svg") == 1
    assert tables.answer(source, LADDER) in blocks["gemm:waterfall:B"]
    assert blocks["gemm:cost:B"] == "No rung of ladder B has counters of its reads."
    assert re.fullmatch(
        r"\*\*At 4096x4096x4096 on an NVIDIA H200: cp\.async 16 B instead of ld\.global\.v4 \+ st\.shared\.v4 [+-][\d.]+ %"
        r" ±[\d.]+ \(\w+\), TMA instead of cp\.async 16 B .*, 3 stages instead of 2 stages .*; together [+-][\d.]+ %, to"
        r" [\d.]+ % of torch\.matmul\.\*\*",
        blocks["gemm:answer:B"],
    )


def test_an_answer_needs_every_step_of_the_path(tmp_path):
    make(tmp_path, World(shapes=SHAPES, variants=["B2", "B3", "B5"]))
    source = tables.read_source(tmp_path, "gemm")
    assert tables.path_steps(source, LADDER, SHAPES[0]) == []
    assert "has no shape at which every step of its path was measured" in tables.answer(source, LADDER)


README = """# Title
<!-- rungs:gemm:ladder:B begin -->
old
<!-- rungs:gemm:ladder:B end -->
Between.
<!-- rungs:gemm:steps:B begin --><!-- rungs:gemm:steps:B end -->
After.
"""


def test_blocks_fill_the_readme_between_markers_and_nothing_else():
    blocks = {"gemm:ladder:B": "| new |", "gemm:steps:B": "| steps |", "gemm:ncu:B": "unused"}
    filled = tables.apply_blocks(README, blocks)
    assert filled == (
        "# Title\n<!-- rungs:gemm:ladder:B begin -->\n| new |\n<!-- rungs:gemm:ladder:B end -->\nBetween.\n"
        "<!-- rungs:gemm:steps:B begin -->\n| steps |\n<!-- rungs:gemm:steps:B end -->\nAfter.\n"
    )
    assert tables.apply_blocks(filled, blocks) == filled
    assert tables.apply_blocks("no markers", blocks) == "no markers"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "<!-- rungs:gemm:ladder:Q begin --><!-- rungs:gemm:ladder:Q end -->",
            "names no block: the blocks are gemm:ladder:B",
        ),
        ("<!-- rungs:gemm:ladder:B begin -->", "has no end"),
        ("<!-- rungs:gemm:ladder:B end -->", "a begin is expected"),
        ("<!-- rungs:gemm:ladder:B begin --><!-- rungs:gemm:ladder:B begin -->", "the end of gemm:ladder:B"),
        ("<!-- rungs:gemm:ladder:B begin --><!-- rungs:gemm:steps:B end -->", "the end of gemm:ladder:B"),
    ],
)
def test_markers_that_do_not_pair_are_named(text, words):
    with pytest.raises(RungsError, match=re.escape(words)):
        tables.apply_blocks(text, {"gemm:ladder:B": "x"})


def test_a_set_without_any_number_has_its_tables_too(tmp_path):
    aggregate.run(tmp_path, "gemm", ARCH, [name_of("B2"), name_of("B3")])
    text = tables.render_experiment(tmp_path, "gemm")
    assert (
        sentences(text)[0]
        == "At M=N=4096 fewer than two rungs have a share of unknown, so there is nothing to compare."
    )
    assert "no step has a verdict, since none was timed" in text
    assert "At 4096x4096x4096 there are no counters (not run)" in text


def test_a_lone_ladder_of_the_swizzle_renders(tmp_path):
    make(tmp_path, World(shapes=[SHAPES[3]], variants=["S0", "S1", "S2", "S3"]))
    text = tables.render_experiment(tmp_path, "gemm")
    assert "## Ladder S" in text
    assert "## Ladder B" not in text
    assert [r[1] for r in grids(text)[0][1:3]] == ["K x N, plain", "K x N, TMA's XOR"]
    assert pd.notna(aggregate.read_data(tmp_path, "gemm")["steps"]["gain_percent"]).any()


@pytest.mark.parametrize(
    ("boards", "said"),
    [
        ({"a": "1", "b": "1"}, ""),
        ({"a": "1"}, ""),
        ({"a": "2", "b": "1", "c": "1"}, "A was timed on another GPU than the rest: its share compares"),
        (
            {"a": "2", "b": "1", "c": "3", "d": "1"},
            "A, C were timed on another GPU than the rest: their shares compare",
        ),
    ],
)
def test_a_ladders_caption_names_the_rungs_of_another_gpu(boards, said):
    """Shares of cuBLAS on two boards differ by more than many a step."""
    source = SimpleNamespace(facts=SimpleNamespace(boards=boards))
    found = tables._on_another_board(source, {name.upper(): name for name in "abcd"})
    assert said in found and bool(said) == bool(found)
