"""A roofline stands under ceilings that say where they are from; clock and power show what a job's rounds had to put up with."""

import dataclasses
import gzip
import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rendered import check_that_no_text_leaves
from rungs import aggregate, cli, conditions, plots, roofline, variants
from rungs.files import ROOT
from rungs.results import ResultsSet
from rungs.variants import load_device
from synthetic import ARCH, SMS, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
LADDER = EXPERIMENT.ladders["B"]
RUNGS = ("B2", "B3", "B5", "B6")
SHAPES = [(512, 512, 256), (4096, 4096, 512), (4096, 4096, 4096)]
RECORDED = ROOT / "results" / "recorded"


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set") / "h200"
    failures = {(name_of(rung), SHAPES[1]): ("time limit", "It never ended.") for rung in RUNGS}
    write_set(folder, World(variants=RUNGS, shapes=SHAPES, failures=failures, flagged=(4, 5), profile=""))
    aggregate.run(folder, "gemm", ARCH, [name_of(rung) for rung in LADDER.rungs])
    return folder


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def words(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(plt.Text))


def test_compulsory_traffic_is_each_operand_read_once_and_the_result_written_once():
    assert roofline.intensity((4096, 4096, 4096)) == pytest.approx(4096 / 3)
    m, n, k = 512, 256, 1024
    assert roofline.intensity((m, n, k)) == pytest.approx(2 * m * n * k / (2 * (m * k + n * k + m * n)))


def test_each_rung_has_its_own_speed_at_each_k_and_the_control_beside_it(results):
    figure = roofline.draw(results, EXPERIMENT, LADDER, {})
    shapes = aggregate.read_data(results, "gemm")["shapes"]
    axes = next(axes for axes in figure.axes if axes.get_title() == "M = N = 4096")
    at = roofline.intensity(SHAPES[2])
    drawn = sorted(
        float(y)
        for line in axes.lines
        if line.get_marker() == "o"
        for x, y in line.get_xydata()
        if x == pytest.approx(at)
    )
    rows = shapes[(shapes["k"] == 4096) & shapes["tflops"].notna()]
    assert drawn == pytest.approx(sorted(rows["tflops"]))
    (control,) = [line for line in axes.lines if line.get_marker() == "_"]
    assert control.get_ydata()[0] == pytest.approx(rows["control_tflops"].median())


def test_the_peak_is_that_of_the_clocks_that_were_measured(results):
    figure = roofline.draw(results, EXPERIMENT, LADDER, {})
    shapes = aggregate.read_data(results, "gemm")["shapes"]
    clocks = shapes[(shapes["m"] == 512) & shapes["tflops"].notna()]["sm_mhz"]
    assert load_device(ARCH).peak_tflops(1755.0, SMS) == pytest.approx(load_device(ARCH).peak_tflops(1755.0))
    peaks = [f"{load_device(ARCH).peak_tflops(mhz, SMS):.0f}" for mhz in (clocks.min(), clocks.max())]
    assert f"{aggregate.mhz_range(shapes[shapes['m'] == 512])}: {' to '.join(dict.fromkeys(peaks))}" in words(figure)


def test_a_shape_without_a_time_says_so_and_no_text_leaves(results):
    figure = roofline.draw(results, EXPERIMENT, LADDER, {name_of("B3"): "old"})
    assert words(figure).count("no time") == 1
    assert "B3†" in words(figure) and "† its source has changed since" in " ".join(words(figure).split())
    check_that_no_text_leaves(figure)


def test_without_a_ceiling_there_is_none_and_with_the_drivers_it_is_named(results, tmp_path):
    assert roofline.ceiling_of(results, "gemm") is None
    assert "no memory ceiling is known" in " ".join(words(roofline.draw(results, EXPERIMENT, LADDER, {})).split())
    folder = tmp_path / "csv" / "sweep" / "gemm"
    write_set(tmp_path, World(variants=["B2"], shapes=SHAPES[:1], profile="", floor_jobs=0))
    path = folder / f"{name_of('B2')}.json"
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, "gpu": {**made["gpu"], "dram_gb_per_s": 4915.2}}))
    ceiling = roofline.ceiling_of(tmp_path, "gemm")
    assert ceiling == roofline.Ceiling(4915.2, "memory clock and width as the driver says, not measured")


def test_a_measured_ceiling_is_the_most_that_the_set_read_and_a_cold_set_has_its_hot_ones():
    hot, cold = (roofline.ceiling_of(RECORDED / name, "gemm") for name in ("h200", "h200-cold"))
    assert hot and cold and hot.gb_per_s == cold.gb_per_s
    assert 3000 < hot.gb_per_s < 4900, "under what the driver says, above what a poor copy reaches"
    assert hot.source.startswith("the most that copy_intensity read") or hot.source.startswith(
        "the most that tma_wall read"
    )
    assert "of the hot set" in cold.source


def test_every_round_of_the_job_is_under_a_mark_and_the_flagged_are_marked(results):
    job = ResultsSet(results).job("floor", "gemm", conditions.JOB)
    frame = aggregate.read_recording("sweep", job, EXPERIMENT.floor_variant.name).frame
    bins, begins = conditions.bins_of(EXPERIMENT, frame)
    assert [text for _, text in begins] == ["512x512x256", "4096x4096x512", "4096x4096x4096"]
    assert len(bins) <= conditions.MOST
    assert sum(bin.flagged for bin in bins) == 2 * 3, "two rounds of each of three shapes"
    low = min(bin.values["sm_mhz"][0] for bin in bins)
    assert (low, max(bin.values["sm_mhz"][2] for bin in bins)) == (frame["sm_mhz"].min(), frame["sm_mhz"].max())
    recording = aggregate.read_recording("sweep", job, EXPERIMENT.floor_variant.name)
    facts = aggregate.facts_of(results, "gemm", [EXPERIMENT.floor_variant.name])
    figure = conditions.plot(EXPERIMENT, recording, facts, {})
    assert "flagged: not used" in words(figure) and "at the power cap" in words(figure)
    assert f"{(frame['status'] == 'flagged').sum()} of them flagged" in " ".join(words(figure).split())
    check_that_no_text_leaves(figure)


def test_what_was_not_read_is_said(results):
    recording = aggregate.read_recording(
        "sweep", ResultsSet(results).job("floor", "gemm", conditions.JOB), EXPERIMENT.floor_variant.name
    )
    blind = dataclasses.replace(recording, frame=recording.frame.assign(power_w=np.nan, temp_c=np.nan))
    facts = aggregate.facts_of(results, "gemm")
    assert words(conditions.plot(EXPERIMENT, blind, facts, {})).count("not read") == 2
    nothing = dataclasses.replace(recording, frame=recording.frame.assign(status="crashed"))
    assert words(conditions.plot(EXPERIMENT, nothing, facts, {})).count("not read\n") >= 3


def test_files_are_the_same_bytes_twice_and_small(results):
    drawn = []
    for _ in range(2):
        plots.draw("roofline", results, "gemm", "B", {})
        conditions.draw(results, "gemm", {})
        paths = sorted((results / "figures" / "gemm").iterdir())
        drawn.append([path.read_bytes() for path in paths])
    assert [path.name for path in paths] == ["clock_power.png", "clock_power.svg", "roofline_B.png", "roofline_B.svg"]
    assert drawn[0] == drawn[1]
    assert all(len(data) < 60_000 for data in drawn[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["clock", "--experiment", "smem_read"], "smem_read counts cycles, whatever the clock is: it has no figure of clock and power."),
        (["roofline", "--experiment", "gemm", "--of", "Z"], "gemm has no ladder 'Z': choose one of A, B, S."),
        (["roofline", "--experiment", "tma_wall", "--of", "WM"], "tma_wall has no roofline, which is over M, N and K: draw its `points`."),
        (["heatmap", "--experiment", "gemm"], "`plot heatmap` needs --of: name what to draw, for example a ladder."),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_sentence(results, capsys, arguments, sentence):
    assert cli.main(["plot", *arguments, "--results", str(results)]) == 1
    assert capsys.readouterr().err == f"rungs: {sentence}\n"


def test_every_recorded_set_has_its_figures():
    for folder in (RECORDED / "h200", RECORDED / "h200-cold"):
        for experiment, ladders in {"gemm": "ABS", "gemm_tuned": "T"}.items():
            for name in ("clock_power", *(f"roofline_{ladder}" for ladder in ladders)):
                for ending in ("svg", "png"):
                    assert (folder / "figures" / experiment / f"{name}.{ending}").stat().st_size < 90_000


def test_the_recorded_clocks_are_those_of_the_raw_rounds():
    """One figure's band against the raw file itself."""
    path = RECORDED / "h200" / "csv" / "floor" / "gemm_tuned.csv.gz"
    header, *lines = [line.split(",") for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    clocks = [float(row[header.index("sm_mhz")]) for row in lines if row[0] == "1" and row[header.index("sm_mhz")]]
    experiment = variants.load_experiment("gemm_tuned")
    job = ResultsSet(RECORDED / "h200").job("floor", "gemm_tuned", "1")
    frame = aggregate.read_recording("sweep", job, experiment.floor_variant.name).frame
    bins, _ = conditions.bins_of(experiment, frame)
    assert min(bin.values["sm_mhz"][0] for bin in bins) == min(clocks)
    assert math.isclose(max(bin.values["sm_mhz"][2] for bin in bins), max(clocks))
