"""A waterfall shows the path's own figures, and beside it what others published, as theirs."""

import dataclasses
import itertools
import shutil

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from rendered import check_that_no_text_leaves
from rungs import aggregate, plots, published, variants, waterfall
from rungs.errors import RungsError
from rungs.files import ROOT
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
LADDER = dataclasses.replace(EXPERIMENT.ladders["B"], published=("learn-cuda A100-40GB",))
SHAPES = [(512, 512, 256), (4096, 4096, 512), (4096, 4096, 4096)]
LARGE = SHAPES[2]


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set") / "h200"
    failures = {(name_of("B6"), SHAPES[1]): ("time limit", "It never ended.")}
    write_set(folder, World(shapes=SHAPES, failures=failures, profile=""))
    aggregate.run(folder, "gemm", ARCH, [name_of(rung) for rung in LADDER.rungs])
    return folder


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def draw(results, ladder=LADDER, stale=None):
    data, facts = aggregate.read_data(results, "gemm"), aggregate.facts_of(results, "gemm")
    return waterfall.plot_waterfall(EXPERIMENT, ladder, data, facts, stale or {})


def bars(results, shape=LARGE, stale=None):
    data = aggregate.read_data(results, "gemm")
    return waterfall.bars_of(
        EXPERIMENT, LADDER, data["shapes"], data["steps"][data["steps"]["ladder"] == "B"], shape, stale or {}
    )


def panel(figure, title: str):
    return next(axes for axes in figure.axes if axes.get_title() == title)


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_bar_per_rung_of_the_path_with_its_share_and_the_gain_of_its_step(results):
    data = aggregate.read_data(results, "gemm")
    shapes = data["shapes"][data["shapes"]["k"] == 4096].set_index("variant")["share_percent"]
    steps = data["steps"][(data["steps"]["k"] == 4096) & (data["steps"]["ladder"] == "B")].set_index("step")
    found = bars(results)
    assert [bar.name for bar in found] == ["B2", "B3", "B5", "B6"]
    assert [bar.what for bar in found] == ["start", "cp.async 16 B", "TMA", "3 stages"]
    assert [bar.share for bar in found] == [shapes[name_of(bar.name)] for bar in found]
    assert found[0].gain == ""
    for before, bar in itertools.pairwise(found):
        step = steps.loc[f"{before.name}>{bar.name}"]
        half = (step["high_percent"] - step["low_percent"]) / 2
        assert bar.gain == f"{plots.signed(step['gain_percent'])}\n±{half:.1f}"
    texts = words(panel(draw(results), "M = N = 4096, K = 4096"))
    for bar in found:
        assert f"{bar.share:.1f} %" in texts and (not bar.gain or bar.gain in texts)
    assert "torch.matmul" in texts


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([(512, 512), (8192, 8192), (4096, 4096)], (4096, 4096)),
        ([(512, 512), (1024, 1024), (4096, 512)], (1024, 1024)),
        ([(4096, 512), (128, 256)], (4096, 512)),
        ([], (0, 0)),
    ],
)
def test_the_size_is_that_of_most_published_figures_else_the_largest(sizes, chosen):
    assert published.size_beside(sizes) == chosen


def test_one_m_n_has_panels_one_per_k(results):
    titles = [axes.get_title() for axes in draw(results).figure.axes]
    assert titles == [
        "M = N = 4096, K = 512",
        "M = N = 4096, K = 4096",
        "published: learn-cuda A100-40GB, M = N = K = 4096",
    ]


def test_a_step_that_loses_is_drawn_as_what_it_takes_away(results, tmp_path):
    gain = World().gain_percent(name_of("B3"), name_of("B5"), LARGE)
    worse = World(shapes=[LARGE], gains={name_of("B5"): -2 * gain}, profile="")
    write_set(tmp_path, worse)
    aggregate.run(tmp_path, "gemm", ARCH, [name_of(rung) for rung in LADDER.rungs])
    found = bars(tmp_path)
    axes = panel(draw(tmp_path), "M = N = 4096, K = 4096")
    heights = [(patch.get_y(), patch.get_height(), to_hex(patch.get_facecolor())) for patch in axes.patches]
    up, down = to_hex(waterfall.UP), to_hex(waterfall.DOWN)
    assert [colour for _, _, colour in heights if colour in (up, down)] == [up, down, up]
    bodies = [height for _, height, colour in heights if colour == waterfall.BODY]
    assert bodies == pytest.approx([found[0].share, found[0].share, found[2].share, found[2].share])
    low, height, _ = next(patch for patch in heights if patch[2] == down)
    assert low == pytest.approx(found[2].share) and low + height == pytest.approx(found[1].share)
    assert found[2].gain.startswith("\N{MINUS SIGN}")


def test_a_rung_that_failed_has_its_word_and_no_bar(results):
    last = bars(results, SHAPES[1])[-1]
    assert (last.share, last.gap, last.gain) == (None, "time limit", "")
    axes = panel(draw(results), "M = N = 4096, K = 512")
    assert "time limit" in words(axes)
    assert len({round(patch.get_x(), 3) for patch in axes.patches}) == 3


def test_a_stale_rung_carries_its_dagger(results):
    figure = draw(results, stale={name_of("B3"): "changed"})
    labels = [label.get_text() for label in panel(figure, "M = N = 4096, K = 4096").get_xticklabels()]
    assert [label.split("\n")[0] for label in labels] == ["B2", "B3†", "B5", "B6"]


def test_peers_are_marked_only_at_their_own_shape_and_gpu(results, tmp_path):
    figure = draw(results)
    texts = words(panel(figure, "M = N = 4096, K = 4096"))
    assert "learn-cuda 54 %" in texts or "learn-cuda 55 %" in texts
    assert "vitamin-cuda 54 %" in texts
    assert not any("fast.cu" in text for text in texts), "wgmma is another ladder"
    assert not any("-cuda" in text for text in words(panel(figure, "M = N = 4096, K = 512"))), "nobody ran there"
    assert published.best_peers("NVIDIA H200", LARGE, "mma.sync") == pytest.approx(
        {"learn-cuda": 54.5, "vitamin-cuda": 54.0}
    )
    assert published.best_peers("NVIDIA H200", LARGE, "wgmma") == {"fast.cu": 99.4}
    assert published.best_peers("NVIDIA H200", (4096, 4096, 512), "mma.sync") == {}
    assert published.best_peers("NVIDIA H100", LARGE, "mma.sync") == {}


def test_published_ladders_are_shares_of_their_authors_own_library(results):
    (ladder,) = published.ladders(["learn-cuda A100-40GB"])
    assert ladder.size == 4096 and "cuBLAS" not in ladder.rungs
    assert ladder.rungs["swizzle"] == pytest.approx(100 * 190.94 / 244.4)
    found = waterfall.published_bars(ladder)
    assert [bar.what for bar in found][:3] == ["vectorised LDG/STS", "cp.async", "padding"]
    assert found[1].gain == plots.signed(100 * (64.94 / 59.92 - 1)) == "+8.4 %"
    assert found[4].gain.startswith("\N{MINUS SIGN}")
    axes = panel(draw(results), "published: learn-cuda A100-40GB, M = N = K = 4096")
    assert "cuBLAS" in words(axes) and "torch.matmul" not in words(axes)
    assert {patch.get_hatch() for patch in axes.patches} == {waterfall.PUBLISHED}
    everything = "\n".join(text.get_text() for text in axes.figure.findobj(plt.Text))
    assert "published, on another GPU" in everything


@pytest.mark.parametrize("name", ["learn-cuda RTX 5090 400 W", "nobody GPU"])
def test_a_published_ladder_without_a_library_or_unknown_is_one_sentence(name):
    with pytest.raises(RungsError) as caught:
        published.ladders([name])
    message = str(caught.value)
    assert (
        f"no published ladder {name!r} with a row cuBLAS: name one of blackwell-tensorcore-kernels RTX PRO 6000,"
        in message
    )
    assert message.endswith("learn-cuda A100-40GB, fast.cu H100.")


def test_every_experiment_names_ladders_that_are_there_and_every_file_its_source():
    for name in variants.experiment_names():
        for ladder in variants.load_experiment(name).ladders.values():
            assert len(published.ladders(ladder.published)) == len(ladder.published)
    readme = (ROOT / "config" / "published" / "README.md").read_text()
    for path in (ROOT / "config" / "published").glob("*.csv"):
        assert f"`{path.name}`" in readme
    for project in ("learn-cuda", "blackwell-tensorcore-kernels", "fast.cu", "vitamin-cuda"):
        assert f"| {project} | <https://github.com/" in readme


def test_an_edited_peer_file_is_refused(tmp_path):
    shutil.copytree(published.FOLDER, tmp_path / "published")
    path = tmp_path / "published" / "h200_peers.csv"
    path.write_text(path.read_text().replace(",0.545,", ",-1,", 1))
    with pytest.raises(
        RungsError, match="ratio_to_control is '-1', not number above 0: restore it from version control"
    ):
        published.best_peers("NVIDIA H200", LARGE, "mma.sync", tmp_path / "published")


def test_the_file_is_the_same_bytes_twice_and_small(results):
    paths = [results / "figures" / "gemm" / f"waterfall_B.{ending}" for ending in ("svg", "png")]
    drawn = []
    for _ in range(2):
        plots.draw("waterfall", results, "gemm", "B", {})
        drawn.append([path.read_bytes() for path in paths])
    assert drawn[0] == drawn[1]
    assert all(len(data) < 100_000 for data in drawn[0])


def test_no_text_leaves_the_figure(results):
    for ladder in (LADDER, EXPERIMENT.ladders["B"]):
        figure = draw(results, ladder)
        check_that_no_text_leaves(figure)


def test_a_set_without_a_number_draws_its_reasons(tmp_path):
    aggregate.run(tmp_path, "gemm", ARCH, [name_of(rung) for rung in LADDER.rungs])
    axes = draw(tmp_path, EXPERIMENT.ladders["B"]).axes[0]
    assert words(axes).count("not run") == 4


def test_the_line_of_the_control_does_not_strike_a_gain_through():
    figure, axes = plt.subplots()
    waterfall._draw_bars(axes, [waterfall.Bar("T6", "", 60.0), waterfall.Bar("T7", "", 97.0, gain="+60 %")], "cuBLAS")
    (gain,) = [text for text in axes.texts if text.get_text() == "+60 %"]
    assert gain.get_bbox_patch().get_facecolor()[:3] == (1.0, 1.0, 1.0)
    assert gain.get_zorder() > max(line.get_zorder() for line in axes.lines)
    plt.close(figure)
