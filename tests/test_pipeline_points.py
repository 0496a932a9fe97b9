"""The pipeline with experiments that are no GEMM: the real Snakemake on the stand-ins, from binaries to pages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline import Checkout, no_traceback
from rungs import advise, schemas, tables
from rungs.errors import RungsError
from rungs.results import ResultsSet
from rungs.variants import CONFIG, load_experiment

EXPERIMENTS = ("copy_intensity", "tma_latency")
"""One that times and one that counts cycles; the others go the same way."""
SWEEPS = {
    "copy_intensity": [
        {"fma_iters": [1, 2, 256], "grid": [0, 2]},
        {"fma_iters": [1], "payload_kib": [1048576], "grid": [2]},
    ],
    "tma_latency": [{"cold": [0, 1]}],
}
"""Few points of each, so that a run takes seconds."""
LADDERS = ["CP", "TL"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    checkout = Checkout.create(tmp_path_factory.mktemp("points") / "run")
    for name, sweeps in SWEEPS.items():
        path = checkout.repo / "config" / "experiments" / f"{name}.yaml"
        raw = yaml.safe_load(path.read_text())
        raw |= {"sweeps": sweeps, "profile_points": [{}]}
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
    checkout.configure(experiments=list(EXPERIMENTS), ladders=LADDERS, axes=None, recorded=[])
    return checkout, checkout.snakemake("--cores", "2", "all")


def data(checkout: Checkout, name: str, kind: str):
    experiment = load_experiment(name)
    schema = kind if kind in ("changes", "floor") else experiment.kind(kind)
    return schemas.read_csv(schema, checkout.live / "data" / name / f"{kind}.csv")


def test_every_experiment_is_measured_profiled_drawn_and_tabulated(finished):
    checkout, result = finished
    assert result.code == 0, result.text
    assert checkout.verdict()["failures"] == []
    for name in EXPERIMENTS:
        points, coverage = data(checkout, name, "points"), data(checkout, name, "coverage")
        assert set(coverage["what"]) == {"inspect", "sweep", "floor", "profile"} and set(coverage["status"]) == {"ok"}
        cycles = name == "tma_latency"
        assert points["cycles"].notna().all() == cycles and points["gb_per_s"].notna().all() != cycles
        assert (points["share_percent"].notna().all()) != cycles
        steps = data(checkout, name, "steps")
        assert set(steps["status"]) == {"ok"} and steps["floor_percent"].notna().all()
        page = (checkout.live / "md" / f"{name}.md").read_text()
        assert "not run" not in page and page.count("**") >= 8
        figures = {path.name for path in (checkout.live / "figures" / name).iterdir()}
        assert len(figures) == (4 if cycles else 6) and all(
            f"({'../figures/' + name}/{f})" in page for f in figures if f.endswith(".svg")
        )
    readme = (checkout.live / "README.md").read_text()
    assert all(f"[{name}](md/{name}.md)" in readme for name in EXPERIMENTS)


def test_a_point_that_only_some_levels_have_is_asked_of_them_alone():
    declared = load_experiment("smem_read")
    assert [declared.shapes(declared.variant(rung)) for rung in ("Y1", "Y7")] == [[(1, 256), (16, 256)]] * 2
    assert len(declared.shapes(declared.variant("W1"))) == 6


def test_the_seeds_columns_are_those_of_the_points(finished):
    checkout, _ = finished
    text = (checkout.live / "md" / "copy_intensity.md").read_text()
    head = "| fma_iters | sync_ms | bulk1d_ms | tensor2d_ms | pipe2_ms | speedup_bulk1d | speedup_tensor2d | speedup_pipe2 |"
    assert text.count(head) == 2
    points = data(checkout, "copy_intensity", "points")
    sync, pipe2 = (
        points[(points["variant"] == name) & (points["fma_iters"] == 256) & (points["grid"] == 0)]["time_us"].item()
        for name in ("cpy_L1_s1_p0_t4096_v32_w1", "cpy_L6_s2_p0_t4096_v32_w1")
    )
    lines = text.split(head)[1].split("\n\n")[0].splitlines()
    (line,) = (line for line in lines if line.startswith("| 256 |"))
    assert line.startswith(f"| 256 | {sync / 1000:.4f} |") and line.endswith(f"| {sync / pipe2:.3f} |")


def test_a_deleted_csv_is_measured_again_and_what_depends_on_it(finished, tmp_path):
    checkout = finished[0].copy(tmp_path / "run")
    rung = "cpy_L6_s2_p0_t4096_v32_w1"
    (checkout.live / "csv" / "sweep" / "copy_intensity" / f"{rung}.csv").unlink()
    planned = checkout.planned("all")
    assert planned.of("sweep") == [rung] and not planned.of("build", "inspect", "floor", "profile")
    assert planned.of("aggregate_points") and {"make_tables", "plot_points_copy_intensity"} <= planned.rules
    assert not any("tma_latency" in job for job in planned.jobs)


def test_what_is_recorded_is_traced_and_advised_from(finished, tmp_path):
    checkout = finished[0].copy(tmp_path / "run")
    for name in EXPERIMENTS:
        done = checkout.rungs("record", "results/h200", "--experiment", name)
        assert done.code == 0, done.text
    checkout.configure(recorded=["h200"])
    checkout.no_gpu()
    made = checkout.snakemake("--cores", "2", "tables", "--config", "ladders=[TL]", "experiments=[tma_latency]")
    assert made.code == 0, made.text
    for cell in ("copy_intensity.md:CP2>CP3", "tma_latency.md:TL3:16x8192x0"):
        traced = checkout.rungs("trace", f"results/recorded/h200/md/{cell}")
        assert traced.code == 0 and no_traceback(traced), traced.text
    odd = checkout.rungs("trace", "results/recorded/h200/md/tma_latency.md:TL3:16x8192")
    assert odd.said == ["rungs: 16x8192 is no point of tma_latency: give bytesxfootprint_kibxcold."]
    said = checkout.rungs("advise")
    assert said.code == 0 and "NVIDIA H200" in said.text and "fma_iters 1" in said.text and "tile of 4 KiB" in said.text
    sources = advise.sources_of(checkout.repo / "results" / "recorded" / "h200", {})
    assert all(lines for lines in advise.advice(sources).values())


def test_profiles_alone_join_the_recorded_sweeps_of_the_same_binaries(finished, tmp_path):
    checkout = finished[0].copy(tmp_path / "run")
    counted = Path("csv") / "profile" / "tma_latency"
    alone = checkout.repo / "results" / "apart"
    shutil.copytree(checkout.live / counted, alone / counted)
    of = ("--experiment", "tma_latency")
    early = checkout.rungs("record", "results/apart", *of)
    assert early.code == 1 and no_traceback(early)
    assert "is not of a binary that results/recorded/h200 holds: record the sweeps of tma_latency" in early.text
    shutil.rmtree(checkout.live / counted)
    assert checkout.rungs("record", "results/h200", *of).code == 0
    target = checkout.repo / "results" / "recorded" / "h200"
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert not ResultsSet(target).jobs("profile", "tma_latency")
    later = checkout.rungs("record", "results/apart", *of)
    count = len(list((alone / counted).glob("*.csv")))
    assert later.code == 0, later.text
    assert f"Recorded {count} CSVs of Nsight Compute in results/recorded/h200:" in later.text
    assert {path: path.read_bytes() for path in before} == before
    assert len(ResultsSet(target).jobs("profile", "tma_latency")) == count

    # Another build of a variant, and counters made with cold caches, are of no recorded sweep.
    name = next(iter((alone / counted).glob("*.json")))
    manifest = json.loads(name.read_text())
    for change, words in (
        ({"binary": manifest["binary"] | {"code_hash": "0" * 64}}, "is stale (it compiles to other machine code now)"),
        ({"l2": "cold"}, "mixes hot and cold caches"),
    ):
        name.write_text(json.dumps(manifest | change))
        refused = checkout.rungs("record", "results/apart", *of)
        assert refused.code == 1 and no_traceback(refused) and words in refused.text


def test_without_a_set_there_is_nothing_to_advise_from(tmp_path):
    checkout = Checkout.create(tmp_path / "run")
    said = checkout.rungs("advise")
    assert said.code == 1 and no_traceback(said)
    assert said.said == [
        "rungs: No results set has points of copy_intensity: run `snakemake --config experiments=copy_intensity` on a GPU."
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workload": "nope"}, "there is no workload 'nope' under workflow/rungs/workloads/"),
        ({"base": {"warps": 16}}, "base must give one value for each axis, warps, passes"),
        ({"sweeps": [{"lanes": [1]}]}, "a sweep names 'lanes', which is no axis of it: its axes are warps, passes"),
        (
            {"sweeps": [{"warps": [1], "only": {"speed": [1]}}]},
            "a sweep is only for levels of 'speed', which is no factor",
        ),
        ({"sweeps": [{"warps": [1], "only": {"read": [77]}}]}, "requires level 77 of read"),
        ({"profile_points": [{"warp": 1}]}, "a profiled point names 'warp'"),
        ({"factorial": {"profile_shapes": []}}, "key 'factorial' has no meaning beside the others"),
        ({"axes": {"round": {"title": "x"}, "passes": {"title": "y"}}}, "an axis may not be called round"),
    ],
)
def test_an_experiment_file_that_does_not_fit_is_one_sentence(tmp_path, change, sentence):
    raw = yaml.safe_load((CONFIG / "experiments" / "smem_read.yaml").read_text())
    (tmp_path / "smem_read.yaml").write_text(yaml.safe_dump(raw | change, sort_keys=False))
    with pytest.raises(RungsError, match=re.escape(sentence)):
        load_experiment("smem_read", tmp_path)


def test_a_cold_set_has_none_of_them_and_says_so(tmp_path):
    checkout = Checkout.create(tmp_path / "run")
    checkout.configure(experiments=["gemm", "tma_wall"], ladders="all")
    planned = checkout.planned("all", "--config", "measure={l2: cold}")
    assert not any("tma_wall" in job for job in planned.jobs)
    assert "tma_wall chooses by its payload what caches hold, so a cold set leaves it out" in planned.text


def test_pages_name_what_is_missing(finished, tmp_path):
    """A rung that is wrong: its cells say so, the page lists it, and the run fails in the end."""
    checkout = finished[0].copy(tmp_path / "run")
    wrong = load_experiment("tma_latency").variant("TL2").name
    checkout.fault(**{wrong: {"kind": "nan"}})
    (checkout.live / "csv" / "sweep" / "tma_latency" / f"{wrong}.csv").unlink()
    again = checkout.snakemake("--cores", "2", "all")
    assert again.code == 1 and no_traceback(again)
    assert f"{wrong}, sweep" in again.text
    source = tables.read_source(checkout.live, "tma_latency")
    assert set(source.data["points"].set_index("variant").loc[wrong, "status"]) == {"wrong"}
    page = (checkout.live / "md" / "tma_latency.md").read_text()
    assert "## Not measured" in page and "reads something else than it should" in page
