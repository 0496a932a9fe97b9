"""The factorial through the real Snakemake: what is measured for it, what a lost corner does, and the way to a recorded set."""

from __future__ import annotations

import json

import pytest
import yaml

from pipeline import RUNGS, SHAPES
from rungs import schemas
from rungs.results import ResultsSet

NOTHING = "Nothing to be done"
ALONE = tuple(name.replace("_s2_", "_s1_") for name in RUNGS)
"""The four variants of the small factorial that are on no ladder."""
FACTORS = ("load", "read", "b_layout", "stages", "swizzle")
DATA = [f"data/gemm/{kind}.csv" for kind in ("corners", "effects", "interactions", "shapley", "factorial_coverage")]
DRAWN = [*(f"effect_{factor}" for factor in FACTORS), "shapley_bars", "shapley_map"]
FIGURES = [f"figures/gemm/{name}.{ending}" for name in DRAWN for ending in ("svg", "png")]
PAGE = "md/gemm_factorial.md"


def shrink(checkout) -> None:
    """Ladder S alone, and of the levels only those that eight variants have, of which four are rungs; the rest go with none."""
    path = checkout.repo / "config" / "experiments" / "gemm.yaml"
    raw = yaml.safe_load(path.read_text())
    levels = {name: factor["levels"] for name, factor in raw["factors"].items()}
    levels["read"][0]["requires"] = {"load": [1]}
    for name, gone, other in (("load", (0, 2), "read"), ("read", (2,), "load"), ("stages", (3, 4), "load")):
        for level in gone:
            levels[name][level]["requires"] = {other: [0]}  # load 0 goes only with read 0, and read 0 only with load 1
    levels["read"][0]["requires"] |= {"stages": [3]}
    raw["ladders"] = {"S": raw["ladders"]["S"]}
    raw |= {"floor_rung": "S3", "quick": {"ladders": ["S"], "axes": {"mn": [512], "k": [256]}}}
    ends = [
        {"load": 1, "read": 1, "b_layout": 0, "stages": 1, "swizzle": 0},
        {"load": 1, "read": 1, "b_layout": 1, "stages": 2, "swizzle": 1},
    ]
    raw["factorial"] = {
        "profile_shapes": [list(SHAPES[0])],
        "shapley": {"source": ends[0], "target": ends[1]},
    }
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    claims = checkout.repo / "config" / "claims.yaml"  # those that name nothing which is gone
    kept = [claim for claim in yaml.safe_load(claims.read_text())["claims"] if claim["id"] == "same_numbers"]
    kept.append({**kept[0], "id": "swizzle", "gain": {"steps": ["S2>S3"]}, "above": 0})
    for key in ("wrong", "equal"):
        del kept[1][key]
    claims.write_text(yaml.safe_dump({"claims": kept}, sort_keys=False))
    checkout.configure(ladders="all", experiments=["gemm"], recorded=["h200"])


@pytest.fixture(scope="module")
def whole(complete_run, tmp_path_factory):
    """(checkout, result) of `snakemake factorial` and then `all`; not to be changed."""
    checkout = complete_run[0].copy(tmp_path_factory.mktemp("factorial") / "run")
    shrink(checkout)
    result = checkout.snakemake("--cores", "2", "factorial")
    assert result.code == 0, result.text
    return checkout, result


@pytest.fixture
def measured(whole, tmp_path):
    return whole[0].copy(tmp_path / "run")


def test_factorial_measures_every_combination_and_draws_it(whole):
    checkout, result = whole
    assert set(ALONE) <= set(result.of("sweep")) and set(ALONE) == set(result.of("build"))
    leaves = [*DATA, *FIGURES, PAGE, *(f"csv/sweep/gemm/{name}.csv" for name in (*RUNGS, *ALONE))]
    assert [leaf for leaf in leaves if not (checkout.live / leaf).is_file()] == []
    corners = schemas.read_csv("corners", checkout.live / DATA[0])
    assert set(corners["variant"]) == {*RUNGS, *ALONE} and set(corners["status"]) == {"ok"}
    arms = set(schemas.read_csv("sweep", checkout.csv("sweep", ALONE[0]))["arm"])
    assert arms == {ALONE[0], "control"}, "a variant on no ladder has the control alone beside it"
    rows = schemas.read_csv("effects", checkout.live / DATA[1])
    estimable = rows[rows["contexts"] > 0]
    assert set(rows["factor"]) == set(FACTORS) and not rows["lost"].any()
    assert set(estimable["factor"]) == {"b_layout", "stages", "swizzle"} and set(estimable["contexts"]) == {4}
    assert set(rows[rows["contexts"] == 0]["status"]) == {"not estimable"}
    assert "**8 of 8 variants were timed at all of 2 shapes.**" in (checkout.live / PAGE).read_text()
    shares = schemas.read_csv("shapley", checkout.live / DATA[3])
    assert set(shares["factor"]) == {"b_layout", "stages", "swizzle"} and set(shares["corners"]) == {8}
    assert shares.groupby("k")["share_percent"].sum().tolist() == pytest.approx([100, 100], abs=0.01)


def test_a_second_run_plans_nothing_and_all_adds_only_pages(whole):
    checkout, _ = whole
    assert NOTHING in checkout.planned("factorial").text
    later = checkout.planned("all")
    assert later.rules.isdisjoint({"sweep", "floor", "build", "effects", "plot_effects_gemm", "make_factorial"})
    assert {"make_index", "verdict"} <= later.rules


def test_what_is_left_to_measure_is_listed_by_the_targets_that_need_it(whole):
    checkout, _ = whole
    for target in ("ladders", "sweeps", "profiles", "heatmap"):
        planned = checkout.planned("--forceall", target)
        assert set(planned.of("sweep", "profile")) == set(RUNGS), target
        assert planned.rules.isdisjoint({"effects", "plot_effects_gemm", "make_factorial"})
    for target in ("all", "tables", "report", "factorial"):
        planned = checkout.planned("--forceall", target)
        assert set(planned.of("sweep")) == {*RUNGS, *ALONE} == set(planned.of("profile")), target
        assert {"effects", "make_factorial"} <= planned.rules
    chosen = checkout.planned("--forceall", "all", "--config", "ladders=S")
    assert set(chosen.of("sweep")) == set(RUNGS) and "effects" not in chosen.rules
    asked = checkout.planned("--forceall", "factorial", "--config", "ladders=S")
    assert set(asked.of("sweep")) == {*RUNGS, *ALONE}
    for preset in ({"preset": "quick"}, {"measure": "{l2: cold}"}):
        options = [f"{key}={value}" for key, value in preset.items()]
        planned = checkout.planned("--forceall", "all", "--config", *options)
        assert set(planned.of("sweep")) == set(RUNGS) and "effects" not in planned.rules
        empty = checkout.planned("--forceall", "factorial", "--config", *options)
        assert set(empty.of("sweep")) <= set(RUNGS) and "effects" not in empty.rules


def test_a_deleted_corner_is_measured_again_with_what_depends_on_it_and_nothing_else(measured):
    measured.csv("sweep", ALONE[1]).unlink()
    planned = measured.planned("factorial")
    assert planned.of("sweep") == [ALONE[1]] and planned.of("floor", "build", "profile") == []
    assert planned.rules == {"clock", "sweep", "effects", "plot_effects_gemm", "make_factorial"}
    assert NOTHING in measured.planned("heatmap").text or "sweep" not in measured.planned("heatmap").rules


def test_a_corner_that_crashes_is_named_everywhere_and_fails_the_run(measured):
    lost = ALONE[1]
    for path in (measured.csv("sweep", lost), measured.csv("sweep", lost).with_suffix(".json")):
        path.unlink()
    measured.fault(**{lost: {"kind": "abort", "shape": list(SHAPES[1])}})
    result = measured.snakemake("--cores", "2", "all")
    assert result.code == 1
    assert any(line.startswith(f"rungs: {lost}, sweep at 512x512x512: crashed: ") for line in result.said)
    page = (measured.live / PAGE).read_text()
    assert f"**Missing among 8 variants: {lost} (crashed at 512x512x512); no effect counts a context of theirs" in page
    rows = schemas.read_csv("effects", measured.live / DATA[1])
    rows = rows[
        rows["factor"].isin(["b_layout", "swizzle"]) | ((rows["factor"] == "stages") & (rows["source_level"] == 1))
    ]
    assert set(rows[rows["k"] == 512]["contexts"]) == {3} and set(rows[rows["k"] == 256]["contexts"]) == {4}
    assert f"{lost} (crashed)" in (measured.live / "README.md").read_text()
    assert "§" in (measured.live / "figures" / "gemm" / "effect_swizzle.svg").read_text()


def test_recorded_factorials_are_rendered_without_a_gpu_and_traced(measured):
    """Recording carries the variants that are on no ladder; a machine without a GPU draws them, and counts its own."""
    readme = measured.repo / "README.md"
    readme.write_text(
        "".join(
            f"<!-- rungs:h200:gemm:{b} {e} -->\n"
            for b in ("factorial", "shapley", "corners", "effect:swizzle")
            for e in ("begin", "end")
        )
    )
    said = measured.rungs("record", "results/h200")
    assert (said.code, "of 8 variants in results/recorded/h200" in said.text) == (0, True), said.text
    recorded = measured.repo / "results" / "recorded" / "h200"
    assert set(ResultsSet(recorded).jobs("sweep", "gemm")) == {*RUNGS, *ALONE}
    assert set(ResultsSet(recorded).jobs("inspect", "gemm")) == {*RUNGS, *ALONE, "stamp"}
    measured.no_gpu()
    planned = measured.planned("report")
    assert planned.of("emulate") == sorted([*RUNGS, *ALONE])
    made = [job.split(": ")[1] for job in planned.jobs if "results/recorded/" in job]
    result = measured.snakemake(*made)
    assert result.code == 0, result.text
    assert {job.split(":")[0] for job in result.jobs if "results/recorded" in job} <= {
        "aggregate",
        "effects",
        "plot_heatmap",
        "plot_ladder",
        "plot_clock",
        "plot_effects_gemm",
        "judge_claims",
        "show_claims",
        "make_tables",
        "make_factorial",
        "make_index",
    }
    assert [
        leaf
        for leaf in (*DATA, *FIGURES, PAGE)
        if (recorded / leaf).read_bytes() != (measured.live / leaf).read_bytes()
    ] == []
    assert measured.rungs("readme").code == 0
    text = readme.read_text()
    assert "results/recorded/h200/figures/gemm/effect_swizzle.svg" in text and ALONE[0] in text
    assert "### [Factorial: all combinations](md/gemm_factorial.md)" in (recorded / "README.md").read_text()
    for cell in (
        f"results/recorded/h200/{PAGE}:{ALONE[0]}",
        f"results/recorded/h200/{PAGE}:swizzle",
        f"results/recorded/h200/{PAGE}:b_layout+stages:512x512x256",
        "README.md:swizzle",
        f"README.md:{ALONE[0]}:512x512x256",
        "results/recorded/h200/README.md:S3",
    ):
        traced = measured.rungs("trace", cell)
        assert traced.code == 0 and "made again from the rounds: the same figures" in traced.text, traced.text
    said = measured.rungs("trace", "README.md:swizzle").text
    assert "over 4 contexts" in said and "share, 8 corners" in said and "% of the whole" in said
    assert said.count("made again from the rounds: the same figures") == 2, "effects and Shapley values"
    path = recorded / DATA[3]
    text = path.read_text()
    path.write_text(text.replace(",8,8,", ",7,8,", 1))
    broken = measured.rungs("trace", f"results/recorded/h200/{PAGE}:b_layout:512x512x256")
    assert broken.code == 1 and "made again from the rounds: other figures" in broken.text
    path.write_text(text)
    path = recorded / DATA[1]
    rows = path.read_text().splitlines(True)
    at = next(i for i, row in enumerate(rows) if row.startswith("b_layout,0,1,512,512,256,4,"))
    path.write_text("".join([*rows[:at], rows[at].replace(",256,4,", ",256,5,", 1), *rows[at + 1 :]]))
    broken = measured.rungs("trace", f"results/recorded/h200/{PAGE}:b_layout")
    assert broken.code == 1 and "made again from the rounds: other figures" in broken.text
    measured.edit(
        "results/recorded/h200/csv/sweep/gemm.csv.gz",
        f"{ALONE[0]},512,512,256,1,control,",
        f"{ALONE[0]},512,512,256,1,controk,",
    )
    broken = measured.rungs("trace", f"results/recorded/h200/{PAGE}:{ALONE[0]}")
    assert broken.code == 1 and f"gemm.csv.gz, {ALONE[0]} was edited or cut" in broken.text


def test_recording_refuses_a_factorial_with_a_failed_or_foreign_corner(measured):
    manifest = measured.csv("sweep", ALONE[0]).with_suffix(".json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"fill": "zeros"}))
    refused = measured.rungs("record", "results/h200")
    assert refused.code == 1 and "never mixes fills" in refused.text and "Traceback" not in refused.text
    assert not (measured.repo / "results" / "recorded").exists()
