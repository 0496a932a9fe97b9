"""Cold caches are a set of their own: ladders alone, never in one table with hot ones, refused where a rotation is too short."""

from __future__ import annotations

import json

import pytest

from pipeline import RUNGS, S0, Checkout
from rungs import schemas

COLD = ("--config", "measure={l2: cold}")


def manifest(checkout: Checkout, results_set: str, rung: str = S0) -> dict:
    return json.loads((checkout.repo / "results" / results_set / "csv" / "sweep" / "gemm" / f"{rung}.json").read_text())


@pytest.fixture(scope="module")
def both(complete_run, tmp_path_factory):
    """(checkout, result) of `snakemake ladders` with cold caches, after a complete run with hot ones; not to be changed."""
    checkout = complete_run[0].copy(tmp_path_factory.mktemp("cold") / "run")
    return checkout, checkout.snakemake("--cores", "2", "ladders", *COLD)


def test_cold_ladders_are_a_set_of_their_own_and_leave_the_hot_one_alone(both):
    checkout, result = both
    assert result.code == 0, result.text
    assert {job.split("/")[1] for job in result.jobs} == {"h200-cold"}
    assert result.of("sweep") == sorted(RUNGS)
    assert "profile" not in result.rules
    assert "Nothing to be done" in checkout.planned("all").text
    assert "Nothing to be done" in checkout.planned("ladders", *COLD).text
    assert manifest(checkout, "h200")["l2"] == "hot"


def test_setting_one_key_of_measure_keeps_the_others(both):
    checkout, _ = both
    hot, cold = (manifest(checkout, name)["protocol"] for name in ("h200", "h200-cold"))
    assert {**hot, "l2": "cold"} == cold
    assert (cold["rounds_min"], cold["rounds_max"], cold["warmup_s"]) == (10, 40, 0)


def test_what_lies_between_two_uses_is_in_every_shape_of_the_manifest(both):
    described = manifest(both[0], "h200-cold")
    assert len(described["shapes"]) == 2
    assert all(shape["bytes_between_uses"] >= 2 * described["gpu"]["l2_bytes"] for shape in described["shapes"])
    assert all(shape["bytes_between_uses"] == 0 for shape in manifest(both[0], "h200")["shapes"])


def test_all_of_a_cold_run_has_tables_and_figures_and_neither_profiles_nor_a_factorial(both):
    planned = both[0].planned("all", *COLD)
    drawn = {"plot_heatmap", "plot_ladder", "plot_clock", "judge_claims", "show_claims", "make_tables", "make_index"}
    assert planned.rules == {"aggregate", *drawn, "verdict"}
    assert {job.split("/")[1] for job in planned.jobs if "/recorded/" not in job} == {"h200-cold"}


def test_a_quick_look_at_cold_caches_is_neither_the_quick_nor_the_cold_set(both):
    planned = both[0].planned("ladders", "--config", "measure={l2: cold}", "preset=quick")
    assert {job.split("/")[1] for job in planned.jobs} == {"h200-quick-cold"}


def test_both_sets_are_recorded_and_rendered_side_by_side(both, tmp_path):
    checkout = both[0].copy(tmp_path / "recorded")
    for name in ("h200", "h200-cold"):
        done = checkout.rungs("record", f"results/{name}")
        assert done.code == 0, done.text
        assert f"in results/recorded/{name}:" in done.text
    checkout.configure(recorded=["h200", "h200-cold"])
    checkout.no_gpu()
    drawn = checkout.snakemake("--cores", "2", "tables")
    assert drawn.code == 0, drawn.text
    pages = [
        (checkout.repo / "results" / "recorded" / name / "md" / "gemm.md").read_text() for name in ("h200", "h200-cold")
    ]
    assert [("L2 hot" in page, "L2 cold" in page) for page in pages] == [(True, False), (False, True)]


def test_a_set_that_mixes_hot_and_cold_is_not_recorded(both, tmp_path):
    checkout = both[0].copy(tmp_path / "mixed")
    live = checkout.repo / "results"
    for ending in ("csv", "json"):
        path = f"csv/sweep/gemm/{S0}.{ending}"
        (live / "h200" / path).write_bytes((live / "h200-cold" / path).read_bytes())
    done = checkout.rungs("record", "results/h200")
    assert (done.code, "mixes hot and cold caches" in done.text) == (1, True), done.text


def test_a_rotation_shorter_than_twice_the_l2_is_refused_at_that_shape_as_cold(complete_run, tmp_path):
    """Row 4 of the cases. Kind: the cache state that a result claims is not the one that it was measured in."""
    checkout = complete_run[0].copy(tmp_path / "short")
    orders = json.loads((checkout.folder / "gpu.json").read_text())
    l2_bytes = manifest(checkout, "h200")["gpu"]["l2_bytes"]
    orders["rotation_bytes"] = {"512x512x256": 2 * l2_bytes - 1}
    (checkout.folder / "gpu.json").write_text(json.dumps(orders))
    sweep = f"results/h200-cold/csv/sweep/gemm/{S0}.csv"
    done = checkout.snakemake("--cores", "2", sweep, *COLD)
    assert done.code == 0, done.text
    frame = schemas.read_csv("sweep", checkout.repo / sweep)
    refused = frame[frame["k"] == 256]
    assert list(refused["status"]) == ["refused"]
    assert refused["reason"].iloc[0] == (
        f"{2 * l2_bytes - 1} bytes between two uses of a buffer are not the {2 * l2_bytes} of 2 x L2 that cold promises."
    )
    assert set(frame[frame["k"] == 512]["status"]) == {"ok"}
