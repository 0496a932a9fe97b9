"""What a rung takes and what it makes of clock and power; the bridge from another experiment."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rungs import budget, tables
from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.published import ladders
from rungs.schemas import read_yaml
from rungs.variants import CONFIG, load_device, load_experiment, parse_experiment

H200 = ROOT / "results" / "recorded" / "h200"


@pytest.fixture(scope="module")
def source():
    return tables.read_source(H200, "gemm_tuned")


def cells(text: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def test_the_peak_is_every_sms_tensor_cores_at_that_clock():
    assert load_device("sm_90a").peak_tflops(1830) == pytest.approx(989.4, abs=0.1)  # NVIDIA's figure for the H100 SXM


def test_each_rung_has_what_it_takes_and_what_it_gives(source):
    found = cells(budget.budget_table(source, source.experiment.ladders["T"]))
    assert [found[rung][0] for rung in ("T0", "T2", "T4")] == ["133", "194", "168"]
    assert (found["T3"][1:4], found["T7"][1:4]) == (["192 KiB", "1", "256"], ["208.1 KiB", "1", "384"])
    rows = {(row["rungs"], row["m"], row["k"]): row for row in source.rows("shapes")}
    row = rows["T7", 4096, 8192]
    speed, mhz, share, watts, per_watt = found["T7"][9:14]
    assert float(speed) == pytest.approx(row["tflops"], abs=0.05) and int(mhz) == round(row["sm_mhz"])
    assert share == f"{100 * row['tflops'] / (132 * 4096 * row['sm_mhz'] / 1e6):.1f} %"
    assert (int(watts), int(per_watt)) == (round(row["power_w"]), round(1000 * row["tflops"] / row["power_w"]))


def test_what_was_not_built_not_run_or_is_stale_is_said(source, tmp_path):
    ladder = source.experiment.ladders["T"]
    bare = dataclasses.replace(source, results=tmp_path, stale={ladder.rungs["T1"].name: "changed"})
    found = cells(budget.budget_table(bare, ladder))
    assert found["T0"][0] == "not built" and found["T1"][4].endswith("†")
    data = {**source.data, "shapes": source.data["shapes"].query("rungs != 'T5' or m == 512")}
    assert cells(budget.budget_table(dataclasses.replace(source, data=data), ladder))["T5"][4:6] == ["not run", ""]


def test_a_bridge_is_a_change_of_shares_and_not_controlled():
    """B6 and T7 are both recorded: the change is that of their shares of the control, shape by shape."""
    bridge = {"experiment": "gemm_tuned", "from": "T7", "to": "B6"}
    source = tables.read_source(H200, dataclasses.replace(load_experiment("gemm"), bridge=bridge))
    text = budget.bridge_table(source)
    found = cells(text)
    shares = {
        name: {(row["m"], row["k"]): row["share_percent"] for row in of.rows("shapes") if rung in row["rungs"].split()}
        for name, rung, of in (("from", "T7", tables.read_source(H200, "gemm_tuned")), ("to", "B6", source))
    }
    ratio = shares["to"][4096, 4096] / shares["from"][4096, 4096]
    line = found["4096x4096x4096"]
    assert line[2:] == [f"{100 * (ratio - 1):+.1f} %", "**not controlled**"]
    logs = [math.log(share / shares["from"][shape]) for shape, share in shares["to"].items()]
    mean = 100 * math.expm1(sum(logs) / len(logs))
    assert f"changes by {mean:+.1f} % on average over {len(logs)} shapes, not controlled" in text


def test_without_both_sides_there_is_no_bridge(source, tmp_path):
    assert budget.bridge_table(source) == ""
    bridged = dataclasses.replace(
        load_experiment("gemm_tuned"), bridge={"experiment": "gemm", "from": "B6", "to": "T0"}
    )
    assert budget.bridge_table(dataclasses.replace(source, experiment=bridged, results=tmp_path)) == ""


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"to": "X9"}, "Experiment hopper_gemm: its bridge leads to 'X9', which is none of its rungs: name one of H0,"),
        (
            {"experiment": "smem"},
            "Experiment hopper_gemm: its bridge comes from 'smem', which is no experiment: choose",
        ),
    ],
)
def test_a_bridge_that_leads_nowhere_is_one_sentence(changed, sentence):
    raw = read_yaml(CONFIG / "experiments" / "hopper_gemm.yaml", "experiment")
    with pytest.raises(RungsError) as raised:
        parse_experiment(raw | {"bridge": raw["bridge"] | changed})
    assert str(raised.value).startswith(sentence)


def test_published_shares_are_the_authors_own():
    (fast,) = ladders(["fast.cu H100"])
    assert fast.size == 4096 and fast.rungs["Hilbert tile order"] == 106.6 and "best" not in fast.rungs
    with pytest.raises(RungsError, match=r"has no published ladder 'fast.cu H300' .*, fast.cu H100\."):
        ladders(["fast.cu H300"])
