"""Figures say every number and every gap, and are the same bytes for the same data."""

import dataclasses
import itertools
import shutil
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from rendered import check_that_no_text_leaves
from rungs import aggregate, plots, variants
from rungs.errors import RungsError
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
LADDER = EXPERIMENT.ladders["B"]
SHAPES = [(512, 512, 256), (512, 512, 1024), (4096, 4096, 256), (4096, 4096, 1024)]


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set") / "h200"
    failures = {(name_of("B6"), shape): ("not on this chip", "It needs TMA.") for shape in SHAPES}
    failures[name_of("B5"), SHAPES[0]] = ("time limit", "It never ended.")
    world = World(shapes=SHAPES, failures=failures, ctas={name_of("B4"): 1}, noise=0.001)
    write_set(folder, world)
    aggregate.run(folder, "gemm", ARCH, [variant.name for variant in world.all_variants()])
    return folder


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def heat_map(results):
    data = aggregate.read_data(results, "gemm")
    return lambda change=lambda data: data, stale=None: plots.plot_heatmap(
        EXPERIMENT, LADDER, change(data), aggregate.facts_of(results, "gemm"), stale or {}
    )


@pytest.fixture(scope="module")
def drawn(results):
    """The heat map as it is."""
    return plots.plot_heatmap(
        EXPERIMENT, LADDER, aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm"), {}
    )


def panel(figure, label: str):
    return next(axes for axes in figure.axes if axes.get_title().startswith(label))


def cells(axes) -> list[str]:
    return [text.get_text() for text in axes.texts[: len(SHAPES)]]


def everything(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(plt.Text))


def test_the_same_data_gives_the_same_bytes_and_no_dates(results, tmp_path):
    plots.run(results, "gemm")
    folder = results / "figures" / "gemm"
    names = {f"{kind}_B.{end}" for kind in ("heatmap", "ladder", "waterfall") for end in ("svg", "png")}
    assert {path.name for path in folder.iterdir()} == names
    first = {name: (folder / name).read_bytes() for name in names}
    shutil.rmtree(folder)
    plots.run(results, "gemm")
    assert {name: (folder / name).read_bytes() for name in names} == first
    assert first["heatmap_B.png"].startswith(b"\x89PNG")
    for name in ("heatmap_B.svg", "ladder_B.svg"):
        assert b"<dc:date>" not in first[name]
        assert b"<dc:creator>" not in first[name]
        assert first[name].count(b"font-family") == 1 and b"<text" in first[name], "text is text, in one font"
        assert ElementTree.fromstring(first[name]).tag.endswith("svg")
    assert b"Matplotlib" not in first["heatmap_B.png"]


def test_every_step_has_a_panel_and_every_cell_a_word_or_a_number(drawn):
    for step in LADDER.steps:
        texts = cells(panel(drawn, f"{step.source} → {step.target}"))
        assert len(texts) == len(SHAPES)
        assert all(texts)


def test_a_cell_shows_the_gain_of_its_own_shape(drawn, results):
    """Rows are K, columns M = N."""
    steps = aggregate.read_data(results, "gemm")["steps"]
    row = steps[(steps["step"] == "B1>B3")].set_index(["k", "m"])["gain_percent"]
    expected = [plots.signed(row[k, m]) for k in (256, 1024) for m in (512, 4096)]
    axes = panel(drawn, "B1 → B3")
    assert cells(axes) == expected
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "4096"]
    assert [label.get_text() for label in panel(drawn, "B0 → B1").get_yticklabels()] == ["256", "1024"]


@pytest.mark.parametrize(
    ("percent", "text"),
    [
        (12.34, "+12.3 %"),
        (-3.14, "\N{MINUS SIGN}3.1 %"),
        (0.456, "+0.46 %"),
        (-0.001, "0.00 %"),
        (250.3, "+250 %"),
        (0.999, "+1.0 %"),
    ],
)
def test_a_gain_has_its_sign_and_the_digits_it_deserves(percent, text):
    assert plots.signed(percent) == text


def change_verdict(verdict: str):
    def change(data):
        steps = data["steps"].copy()
        steps.loc[steps["step"] == "B1>B3", "verdict"] = verdict
        return {**data, "steps": steps}

    return change


def patches(axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_ties_are_grey_with_their_number(heat_map):
    axes = panel(heat_map(change_verdict("tie")), "B1 → B3")
    assert [to_hex(patch.get_facecolor()) for patch in patches(axes)] == [plots.TIE] * 4
    assert all(text.startswith("+") and text.endswith("%") for text in cells(axes))


@pytest.mark.parametrize("verdict", ["undecided", "none"])
def test_undecided_is_drawn_as_such(heat_map, verdict):
    axes = panel(heat_map(change_verdict(verdict)), "B1 → B3")
    assert all(text.endswith("?") for text in cells(axes))
    assert [patch.get_hatch() for patch in patches(axes)] == [plots.DOUBT] * 4


def test_decided_cells_take_their_colour_from_one_fixed_scale(heat_map):
    def change(data):
        steps = data["steps"].copy()
        steps.loc[steps["step"] == "B1>B3", "gain_percent"] = [10.0, -10.0, 0.0, 400.0]
        steps.loc[steps["step"] == "B1>B3", "verdict"] = ["faster", "slower", "faster", "faster"]
        return {**data, "steps": steps}

    axes = panel(heat_map(change), "B1 → B3")
    assert not patches(axes)
    mesh = axes.collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-plots.SCALE_PERCENT, plots.SCALE_PERCENT)
    assert plots.NORM(0.0) == pytest.approx(0.5)
    blue, orange = plots.PALETTE(plots.NORM(10.0)), plots.PALETTE(plots.NORM(-10.0))
    assert blue[2] > blue[0]
    assert orange[0] > orange[2]


def test_a_failed_cell_is_hatched_with_its_word(drawn):
    axes = panel(drawn, "B5 → B6")
    assert cells(axes) == ["not on this\nchip"] * 4
    assert [patch.get_hatch() for patch in patches(axes)] == [plots.GAP] * 4
    assert cells(panel(drawn, "B3 → B5"))[0] == "time limit"


def test_a_row_that_is_missing_altogether_is_not_blank(heat_map):
    def drop(data):
        steps = data["steps"]
        return {**data, "steps": steps[~((steps["step"] == "B1>B3") & (steps["m"] == 512) & (steps["k"] == 256))]}

    assert cells(panel(heat_map(drop), "B1 → B3"))[0] == "not run"


def test_a_step_that_is_not_controlled_says_so(drawn):
    assert "not controlled" in panel(drawn, "B3 → B4").get_title()
    assert "not controlled" not in panel(drawn, "B2 → B3").get_title()


def test_stale_numbers_carry_a_dagger_and_a_footnote(heat_map, drawn):
    figure = heat_map(stale={name_of("B3"): "ptx.cuh changed"})
    assert all("†" in text for text in cells(panel(figure, "B1 → B3")))
    assert not any("†" in text for text in cells(panel(figure, "B1 → B7")))
    assert "† its source has changed" in everything(figure)
    assert "†" not in everything(drawn)


def test_the_caption_names_gpu_clock_and_rounds(drawn, results):
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    for figure in (drawn, plots.plot_ladder(EXPERIMENT, LADDER, data, facts, {})):
        text = everything(figure)
        assert "NVIDIA H200, driver 580.65.06" in text
        assert "clock observed, not locked" in text
        assert "30 paired rounds" in text


def test_the_caption_counts_boards_where_there_are_more_than_one(results):
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    two = dataclasses.replace(facts, boards={**facts.boards, name_of("B3"): "GPU-2"})
    assert plots.caption(two, data["shapes"]).startswith("NVIDIA H200 (2 boards), driver ")
    alone = data["shapes"][data["shapes"]["variant"] == name_of("B3")]
    assert plots.caption(two, alone).startswith("NVIDIA H200, driver ")


def test_no_text_leaves_the_figure(drawn, results):
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    one = {
        kind: frame[frame["m"] == 512] if "m" in frame and kind != "coverage" else frame for kind, frame in data.items()
    }
    heat_map, ladder = (draw(EXPERIMENT, LADDER, one, facts, {}) for draw in (plots.plot_heatmap, plots.plot_ladder))
    for figure in (drawn, heat_map, ladder):
        check_that_no_text_leaves(figure)


def test_titles_keep_clear_of_what_stands_beneath_them(drawn):
    drawn.canvas.draw()
    for step in LADDER.steps:
        axes = panel(drawn, f"{step.source} → {step.target}")
        assert axes.texts[-1].get_window_extent().y1 <= axes.title.get_window_extent().y0


def test_the_ladder_joins_its_path_and_sets_the_rest_apart(results):
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    figure = plots.plot_ladder(EXPERIMENT, LADDER, data, facts, {})
    axes = figure.axes[0]
    assert axes.get_title() == "M = N = 4096"
    shapes = data["shapes"].set_index(["variant", "m", "k"])["share_percent"]
    joined, single = axes.containers[0][0], axes.containers[1][0]
    assert joined.get_ydata().tolist() == [shapes[name_of(rung), 4096, 256] for rung in ("B2", "B3", "B5")]
    assert single.get_ydata().tolist() == [shapes[name_of(rung), 4096, 256] for rung in ("B0", "B1", "B4", "B7")]
    assert single.get_linestyle() == "None"
    assert "not on this\nchip" in [text.get_text() for text in axes.texts]
    assert "time limit\nK = 256" in [text.get_text() for text in figure.axes[1].texts]


@pytest.mark.parametrize("name", ["gemm", "gemm_tuned"])
def test_labels_of_a_ladder_keep_clear_of_each_other_and_of_the_legend(results, name):
    experiment = variants.load_experiment(name)
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    template = (
        data["shapes"]
        .iloc[: len(SHAPES)]
        .assign(status="ok", share_percent=50.0, share_low_percent=49.0, share_high_percent=51.0)
    )
    for ladder in experiment.ladders.values():
        rows = [template.assign(variant=variant.name) for variant in ladder.rungs.values()]
        figure = plots.plot_ladder(experiment, ladder, {**data, "shapes": pd.concat(rows)}, facts, {})
        figure.canvas.draw()
        legend = figure.legends[0].get_window_extent()
        for axes in figure.axes:
            boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
            assert all(box.y0 >= legend.y1 for box in boxes), ladder.name
            assert all(a.x1 <= b.x0 for a, b in itertools.pairwise(boxes)), ladder.name
        plt.close(figure)


def test_a_rung_is_labelled_by_what_its_step_changes(results):
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    figure = plots.plot_ladder(EXPERIMENT, LADDER, data, facts, {})
    labels = {label.get_text().split("\n")[0]: label.get_text() for label in figure.axes[0].get_xticklabels()}
    assert "2 stages" in labels["B2"] and labels["B3"] == "B3\ncp.async 16 B" and labels["B6"] == "B6\n3 stages"
    assert labels["B4"] == "B4\nas B3, but\n3 stages"


def test_a_set_without_any_number_draws_its_reasons(tmp_path):
    aggregate.run(tmp_path, "gemm", ARCH, [name_of("B2"), name_of("B3")])
    plots.run(tmp_path, "gemm")
    assert (tmp_path / "figures" / "gemm" / "heatmap_B.png").stat().st_size > 1000
    assert (tmp_path / "figures" / "gemm" / "ladder_B.svg").stat().st_size > 1000


def test_only_ladders_with_two_measured_rungs_are_drawn():
    asked = pd.DataFrame({"variant": [name_of("B2"), name_of("B3")]})
    assert [ladder.name for ladder in plots.measured_ladders(EXPERIMENT, asked)] == ["B"]
    asked = pd.DataFrame({"variant": [name_of("S2"), name_of("S3")]})
    assert [ladder.name for ladder in plots.measured_ladders(EXPERIMENT, asked)] == ["S"]


def test_a_ladder_that_is_only_partly_there_is_drawn(results):
    """A ladder's path may name rungs that the set has not."""
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    longer = dataclasses.replace(LADDER, path=("B0", "B2", "B3"))
    few = {**data, "shapes": data["shapes"][data["shapes"]["variant"].isin([name_of("B2"), name_of("B3")])]}
    figure = plots.plot_ladder(EXPERIMENT, longer, few, facts, {})
    assert "not run" in [text.get_text() for text in figure.axes[0].texts]


def test_a_ladder_that_is_not_there_is_one_sentence(results):
    with pytest.raises(RungsError, match="gemm has no ladder 'Z': choose one of A, B, S"):
        plots.draw("heatmap", results, "gemm", "Z", {})
