"""The factorial's page and maps say every effect, name every corner that is missing, and rank nothing that lacks contexts."""

import dataclasses
import math
import re
import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from rendered import check_that_no_text_leaves, grids
from rungs import aggregate, decomposition, effects, factorial, plots, shapleyplots, tables, variants
from rungs.errors import RungsError
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
ALL = [variant.name for variant in EXPERIMENT.estimable()]
RUNGS = [name for name in ALL if EXPERIMENT.rung_names(EXPERIMENT.variant(name))]
SHAPES = [(512, 512, 1024), (4096, 4096, 1024), (4096, 4096, 4096)]
LOST = "abl_L1_R0_bl0_s1_sw0"


def make(results, world: World):
    write_set(results, world)
    aggregate.run(results, "gemm", ARCH, RUNGS)
    effects.run(results, "gemm", ARCH)
    return results


def world(**changes) -> World:
    known = {"read": {0: -20.0, 2: -5.0}, "swizzle": {0: -50.0}}
    return World(**{"variants": ALL, "shapes": SHAPES, "effects": known, "rounds": 12, "profile": "", **changes})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return make(tmp_path_factory.mktemp("set") / "h200", world())


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """One corner crashed at one shape and no TMA at all: B5 to B7 are not on this chip."""
    failures = {
        (v.name, shape): ("not on this chip", "TMA.")
        for v in EXPERIMENT.estimable()
        if v.level("load") == 2
        for shape in SHAPES
    }
    failures[LOST, SHAPES[2]] = ("crashed", "It crashed.")
    return make(tmp_path_factory.mktemp("broken") / "h200", world(failures=failures))


@pytest.fixture(scope="module")
def source(results):
    return factorial.read_source(results, "gemm")


def row_of(grid, *cells: str) -> list[str]:
    return next(row for row in grid if tuple(row[: len(cells)]) == cells)


def sentences(text: str) -> list[str]:
    return re.findall(r"^\*\*(.*)\*\*$", text, re.MULTILINE)


# Tables


def test_every_effect_has_its_mean_interval_verdict_and_contexts_at_each_k(source, results):
    large, small = grids(factorial.effect_tables(source))
    assert large[0] == ["factor", "change", "contexts", "K=1024", "K=4096"]
    assert [row[0] for row in large[1:]] == [*["load"] * 3, *["read"] * 3, "b_layout", *["stages"] * 3, "swizzle"]
    assert small[0][-1] == "K=1024"
    frame = effects.read_data(results, "gemm")["effects"].set_index(
        ["factor", "source_level", "target_level", "m", "k"]
    )
    row = frame.loc[("swizzle", 0, 1, 4096, 4096)]
    half = (row["high_percent"] - row["low_percent"]) / 2
    assert row_of(large, "swizzle", "plain > TMA's XOR")[2:] == [
        "50",
        row_of(large, "swizzle")[3],
        f"{row['gain_percent']:+.1f} % ±{half:.1f} faster",
    ]
    assert row_of(large, "read", "ldmatrix > ld.shared.v4 with K permuted")[4].endswith(" slower")


def test_a_factors_table_has_the_smallest_and_largest_gain_of_a_context(source, results):
    text = factorial.factor_block(source, "stages", "figures/gemm")
    assert text.startswith("![Effect of stages, K against M = N](figures/gemm/effect_stages.svg)")
    large, _ = grids(text)
    frame = effects.read_data(results, "gemm")["effects"]
    row = frame[
        (frame["factor"] == "stages") & (frame["source_level"] == 1) & (frame["m"] == 4096) & (frame["k"] == 4096)
    ]
    row = row.iloc[0]
    assert row_of(large, "stages", "1 stage > 2 stages")[4].endswith(
        f"faster ({row['least_percent']:+.1f} to {row['most_percent']:+.1f})"
    )
    sentence = sentences(text)[0]
    assert row["least_source"] in sentence and row["most_target"] in sentence
    assert "1 stage > 2 stages" in sentence and "over 30 contexts from" in sentence


def test_a_table_concludes_with_most_and_least(source):
    first, _ = sentences(factorial.effect_tables(source))
    assert re.match(
        r"At M=N=4096 plain > TMA's XOR, \+(99|100)\.\d % ±\d\.\d at K=\d+, gains most, over 50 contexts from ", first
    )
    assert re.search(
        r", and 3 stages > 4 stages, -\d+\.\d % ±\d\.\d at K=1024, loses most; verdicts: \d+ faster, \d+ slower", first
    )


def test_the_best_and_the_worst_are_ranked_at_the_largest_shape(source, results):
    text = factorial.corner_table(source)
    (grid,) = grids(text)
    shares = effects.read_data(results, "gemm")["corners"]
    shares = (
        shares[shares["k"] == 4096].set_index("variant")["share_percent"].sort_values(ascending=False, kind="stable")
    )
    assert [row[0] for row in grid[1:]] == [str(i) for i in [*range(1, 11), *range(91, 101)]]
    assert [row[1] for row in grid[1:]] == [*shares.index[:10], *shares.index[-10:]]
    assert row_of(grid, "1", "abl_L2_R1_bl1_s3_sw1")[2:4] == ["TMA, ldmatrix, N x K, 3 stages, TMA's XOR", "B6"]
    assert grid[1][6].startswith(f"{shares.iloc[0]:.1f} % ±")
    (sentence,) = sentences(text)
    assert sentence.startswith(
        f"At 4096x4096x4096 the fastest of 100 variants is {shares.index[0]} (not told apart from "
    )
    assert (
        f", with {shares.iloc[0]:.1f} % of torch.matmul, {shares.iloc[0] / shares.iloc[-1]:.1f} times the share of the"
        f" slowest, {shares.index[-1]}" in sentence
    )
    assert "the 10 fastest have in common: " in sentence and "TMA's XOR" in sentence.split("in common: ")[1]


@pytest.mark.parametrize(
    ("share", "half", "spread", "apart"),
    [
        (49.0, 0.1, 0.1, True),  # 2.04 % apart, 2 x 0.24 % of error
        (49.0, 0.1, 1.0, False),  # the spread from job to job alone is 2 x 1.41 %
        (49.0, 2.0, 0.1, False),  # the rounds alone leave 2 x 2.9 %
        (50.0, 0.0, 0.0, False),
        (49.0, None, 0.0, False),
        (25.0, 0.0, None, False),  # no spread was measured, so that nothing is told apart
    ],
)
def test_two_variants_are_ranked_only_where_rounds_and_jobs_part_them(share, half, spread, apart):
    def row(value, half):
        low, high = (None, None) if half is None else (value - half, value + half)
        return {"share_percent": value, "share_low_percent": low, "share_high_percent": high, "spread_percent": spread}

    assert tables.apart(row(50.0, 0.1), row(share, half)) is apart


def test_a_paired_step_contradicts_the_ranking_of_shares(source):
    """B6 has the largest share."""
    steps = source.data["steps"].copy()
    steps.loc[steps["step"] == "B5>B6", "verdict"] = "slower"
    (sentence,) = sentences(factorial.corner_table(dataclasses.replace(source, data={**source.data, "steps": steps})))
    assert "no variant is named fastest: abl_L2_R1_bl1_s3_sw1 has the largest share" in sentence
    assert sentence.endswith("but paired in one job abl_L2_R1_bl1_s2_sw1 is faster.")


def test_counters_stand_in_the_ranking_with_the_shape_that_they_were_read_at(source):
    corners = source.data["corners"].copy()
    at = (corners["m"] == 512) & (corners["variant"] == "abl_L2_R1_bl1_s3_sw1")
    corners.loc[at, ["instructions", "shared_wavefronts", "tensor_busy_percent"]] = [88.2e6, 50.3e6, 68.5]
    counted = dataclasses.replace(source, data={**source.data, "corners": corners})
    (grid,) = grids(factorial.corner_table(counted))
    words = ("instructions", "shared wavefronts", "tensor pipe busy while an SM is active")
    assert grid[0][-3:] == [f"{word} at 512x512x1024" for word in words]
    assert grid[1][-3:] == ["88.2 M", "50.3 M", "68.5 %"]
    assert grid[2][-3:] == ["not counted"] * 3


def test_the_page_has_every_table_with_its_sentence_and_provenance(results):
    text = factorial.render(results, "gemm")
    count = 2 + 2 + 2 + 5 * 2 + 1
    assert len(grids(text)) == count + 1, "and what was asked for"
    assert text.count("The same in all rungs:") == count
    assert len(sentences(text)) == count + 1
    assert sentences(text)[0] == "100 of 100 variants were timed at all of 3 shapes."
    assert (
        "a variant: 100 of them (ld.shared.v4 with K permuted only with N x K; 3 stages only with cp.async 16 B or TMA;"
        in text
    )
    for name in EXPERIMENT.factors:
        assert f"(../figures/gemm/effect_{name}.svg)" in text
    assert "floor 0." in text and "(hash over 100)" in text
    assert all(not re.search(r"\.\s+[A-Z]", sentence) for sentence in sentences(text))


def test_files_are_the_same_bytes_twice_and_the_index_leads_there(results, tmp_path):
    shutil.copytree(results, tmp_path / "h200")
    folder = tmp_path / "h200"
    pages = [folder / "md" / "gemm_factorial.md", folder / "README.md"]
    written = []
    for _ in range(2):
        factorial.write(folder, "gemm")
        tables.write_index(folder, ["gemm"], {}, ["gemm"])
        written.append([page.read_bytes() for page in pages])
    assert written[0] == written[1]
    index = written[0][1].decode()
    assert "### [Factorial: all combinations](md/gemm_factorial.md)" in index
    assert factorial.overview(results, "gemm") in index
    tables.write_index(folder, ["gemm"], {})
    assert "factorial" not in pages[1].read_text()


def test_blocks_are_the_overview_the_corners_and_each_factor(results, source):
    blocks = factorial.blocks(results, "gemm")
    named = {f"gemm:{name}" for name in ("factorial", "shapley", "corners")}
    assert set(blocks) == named | {f"gemm:effect:{name}" for name in EXPERIMENT.factors}
    assert len(grids(blocks["gemm:shapley"])) == 1 and "/figures/gemm/shapley_bars.svg)" in blocks["gemm:shapley"]
    assert len(grids(blocks["gemm:factorial"])) == 1, "the largest M = N alone"
    assert blocks["gemm:corners"] == factorial.corner_table(source)


def test_a_stale_corner_marks_every_mean_that_it_is_in(results):
    stale = factorial.read_source(results, "gemm", {ALL[0]: "kernels/ptx.cuh has changed"})  # L0 R0 bl0 s1 sw0
    large = grids(factorial.effect_tables(stale))[0]
    marked = {(row[0], row[1]) for row in large[1:] if all("†" in cell for cell in row[3:])}
    clean = {(row[0], row[1]) for row in large[1:] if not any("†" in cell for cell in row[3:])}
    assert ("load", "ld.global.v4 + st.shared.v4 > cp.async 16 B") in marked and (
        "load",
        "cp.async 16 B > TMA",
    ) in clean
    assert len(marked) + len(clean) == 11 and len(marked) == 6
    assert "† Stale." in factorial.effect_tables(stale)
    assert grids(factorial.corner_table(stale))[0][-1][4].endswith("†") == (
        ALL[0] == grids(factorial.corner_table(stale))[0][-1][1]
    )


# Shapley shares and interactions


def test_a_table_of_shares_has_value_share_and_interval_and_adds_up(source, results):
    large, small = grids(decomposition.shapley_section(source, "figures"))
    assert large[0] == ["factor", "change", "part", "K=1024", "K=4096"] and small[0][-1] == "K=1024"
    assert [row[0] for row in large[1:]] == [*EXPERIMENT.factors, "together", "stages", "stages", "read"]
    assert [row[2] for row in large[1:]] == [*["share"] * 5, "whole", *["on top"] * 3]
    frame = effects.read_data(results, "gemm")["shapley"]
    frame = frame[(frame["m"] == 4096) & (frame["k"] == 4096) & (frame["part"] == "share")].set_index("factor")
    row = frame.loc["swizzle"]
    half = (row["high_percent"] - row["low_percent"]) / 2
    assert row_of(large, "swizzle", "plain > TMA's XOR")[4] == (
        f"{row['share_percent']:.1f} % ({row['share_low_percent']:.1f} to {row['share_high_percent']:.1f}):"
        f" {row['gain_percent']:+.1f} % ±{half:.1f} faster"
    )
    assert frame["share_percent"].sum() == pytest.approx(100, abs=0.01)
    half = (row["total_high_percent"] - row["total_low_percent"]) / 2
    assert row_of(large, "together")[4] == f"{row['total_percent']:+.1f} % ±{half:.1f}"
    assert re.match(r"-\d+\.\d % ±\d\.\d slower", row_of(large, "read", "ldmatrix > ld.shared.v4 with K permuted")[4])


def test_a_table_of_shares_concludes_with_the_largest_and_the_smallest(source, results):
    first, second = sentences(decomposition.shapley_section(source, "figures"))
    frame = effects.read_data(results, "gemm")["shapley"]
    share = frame[(frame["m"] == 4096) & (frame["k"] == 4096)].set_index("factor")["share_percent"].dropna()
    assert share.idxmax() == "swizzle"
    assert first.startswith("At M=N=4096, K=4096 the whole gain is +")
    assert (
        f", of which swizzle (plain > TMA's XOR) {share.max():.1f} %, " in first
        and "% over K, is the most, and " in first
    )
    assert f" and {share.idxmin()} (" in first and "the least; verdicts: " in first
    assert second.startswith("At M=N=512, K=1024 ") and "over K" not in second


def test_a_table_of_interactions_has_every_two_pairs_that_go_together(source, results):
    large, _ = grids(decomposition.interaction_section(source))
    assert large[0] == ["factors", "changes", "contexts", "K=1024", "K=4096"] and len(large) == 1 + 28
    row = row_of(large, "load+stages", "ld.global.v4 + st.shared.v4 > cp.async 16 B with 1 stage > 2 stages")
    assert row[2] == "10" and row[4].endswith(" more")
    assert row_of(large, "read+swizzle", "ld.shared > ldmatrix with plain > TMA's XOR")[4].split()[-1] in (
        "tie",
        "undecided",
    )
    first, _ = sentences(decomposition.interaction_section(source))
    assert re.search(r"and (1 stage|2 stages|3 stages) > \d stages help each other most, \+\d+\.\d % at K=", first)


def test_missing_corners_leave_shares_not_estimable_and_say_which(broken):
    source = factorial.read_source(broken, "gemm")
    text = decomposition.shapley_section(source, "figures")
    large, small = grids(text)
    assert {cell for row in large[1:7] for cell in row[3:]} == {"not estimable"}
    assert "<sub>A corner is never filled in: abl_L2_R" in text and "(not on this chip)" in text
    assert sentences(text)[0] == "At M=N=4096 no share is estimable, since corners are missing."
    assert {cell for row in small[1:] for cell in row[3:]} == {"not estimable"}, "the goal is a TMA variant"
    text = decomposition.interaction_section(source)
    assert row_of(grids(text)[0], "load+read", "cp.async 16 B > TMA with ld.shared > ldmatrix")[2:] == [
        "0",
        "not estimable",
        "not estimable",
    ]
    assert "§ Fewer contexts than there are: abl_L1_R0_bl0_s1_sw0 (crashed) is missing." in text
    assert re.search(r"; \d+ of 28 lack contexts and are not ranked\.\*\*", text)


def test_a_stale_corner_marks_the_shares_and_the_interactions_that_it_is_in(results):
    stale = factorial.read_source(results, "gemm", {"abl_L2_R1_bl1_s3_sw1": "changed"})
    large = grids(decomposition.shapley_section(stale, "figures"))[0]
    assert [("†" in row[4]) for row in large[1:]] == [*[False] * 6, True, False, False], "on top, three stages"
    stale = factorial.read_source(results, "gemm", {ALL[0]: "changed"})
    large = grids(decomposition.shapley_section(stale, "figures"))[0]
    assert [("†" in row[4]) for row in large[1:]] == [*[True] * 6, False, False, False]
    rows = grids(decomposition.interaction_section(stale))[0]
    assert "†" in row_of(rows, "load+read", "ld.global.v4 + st.shared.v4 > cp.async 16 B with ld.shared > ldmatrix")[4]
    assert "†" not in row_of(rows, "load+read", "cp.async 16 B > TMA with ld.shared > ldmatrix")[4]


# What is missing


def test_missing_corners_are_one_sentence_and_their_means_are_marked(broken):
    source = factorial.read_source(broken, "gemm")
    tma = sum(variant.level("load") == 2 for variant in EXPERIMENT.estimable())
    assert factorial.missing(source) == (
        f"**Missing among 100 variants: {LOST} (crashed at 4096x4096x4096); {tma} are not on this chip; no effect counts a context"
        " of theirs, and § marks each mean that has fewer for it.**"
    )
    text = factorial.effect_tables(source)
    large = grids(text)[0]
    assert row_of(large, "load", "cp.async 16 B > TMA")[2:] == ["0", "not estimable", "not estimable"]
    swizzle = row_of(large, "swizzle")
    assert swizzle[2] == "29 to 30"
    assert not swizzle[3].endswith("§") and swizzle[4].endswith("§")
    assert (
        "<sub>cp.async 16 B > TMA: not on this chip. ld.global.v4 + st.shared.v4 > TMA: not on this chip.</sub>" in text
    )
    assert f"<sub>§ Fewer contexts than there are: {LOST} (crashed) is missing." in text


def test_a_mean_that_lacks_contexts_is_not_ranked(broken):
    source = factorial.read_source(broken, "gemm")
    text = factorial.factor_block(source, "swizzle", "figures")
    large, small = sentences(text)
    assert "at K=1024, gains most" in large
    assert large.endswith("; 1 of 1 pairs of levels lack contexts and are not ranked.")
    assert "not ranked" not in small


def test_a_set_with_nothing_measured_says_so(tmp_path):
    aggregate.run(tmp_path, "gemm", ARCH, RUNGS)
    effects.run(tmp_path, "gemm", ARCH)
    text = factorial.render(tmp_path, "gemm")
    assert "**No variant has a share of the control, so that none is best.**" in text
    assert "no mean over all its contexts is clear of the floor" in text
    assert sentences(text)[0].startswith(f"Missing among 100 variants: {ALL[0]} (not run), ")


# Maps


def draw(results, factor: str, change=lambda frame: frame, stale=None):
    data = effects.read_data(results, "gemm")
    data = {**data, "effects": change(data["effects"].copy())}
    return plots.plot_effect(EXPERIMENT, factor, data, aggregate.facts_of(results, "gemm"), stale or {})


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_map_has_a_panel_per_pair_of_levels_with_mean_and_span(results):
    figure = draw(results, "load")
    panels = [axes for axes in figure.axes if axes.get_title().startswith("load")]
    assert [axes.get_title() for axes in panels] == [
        "load 0 → 1, 20 contexts",
        "load 1 → 2, 40 contexts",
        "load 0 → 2, 20 contexts",
    ]
    frame = effects.read_data(results, "gemm")["effects"]
    row = frame[
        (frame["factor"] == "load") & (frame["source_level"] == 1) & (frame["m"] == 4096) & (frame["k"] == 4096)
    ].iloc[0]
    assert plots.signed(row["gain_percent"]) in words(panels[1])
    assert plots.span(row["least_percent"], row["most_percent"]) in words(panels[1])
    assert "cp.async 16 B → TMA" in words(panels[1])
    everything = "\n".join(text.get_text() for text in figure.findobj(plt.Text))
    assert "effect of load (global to shared memory) on NVIDIA H200" in everything
    assert "12 paired rounds" in everything and "smallest and largest gain" in everything


@pytest.mark.parametrize(
    ("verdict", "colour", "mark"), [("tie", plots.TIE, ""), ("undecided", "#fafafa", " ?"), ("none", "#fafafa", " ?")]
)
def test_what_is_not_clear_is_grey(results, verdict, colour, mark):
    figure = draw(results, "swizzle", lambda frame: frame.assign(verdict=verdict))
    axes = next(axes for axes in figure.axes if axes.get_title().startswith("swizzle"))
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    hollow = [to_hex(patch.get_facecolor()) for patch in patches if patch.get_hatch() != plots.GAP]
    assert hollow == [colour] * 3 and len(patches) == 4, "one shape of the 2 x 2 was not asked for"
    assert sum(word.endswith(f"%{mark}") for word in words(axes)) == 3
    assert not axes.collections[0].get_array().count()


def test_missing_cells_are_hatched_with_their_word_and_lost_ones_marked(broken):
    figure = draw(broken, "load")
    axes = next(axes for axes in figure.axes if axes.get_title().startswith("load 1 → 2"))
    assert axes.get_title() == "load 1 → 2, 0 contexts"
    assert words(axes).count("not\nestimable") == 3
    assert {patch.get_hatch() for patch in axes.patches} == {plots.GAP}
    marked = draw(broken, "swizzle")
    axes = next(axes for axes in marked.axes if axes.get_title().startswith("swizzle"))
    assert sum("§" in word for word in words(axes)) == 1
    assert axes.get_title() == "swizzle 0 → 1, 29 to 30 contexts"
    everything = " ".join(text.get_text() for text in marked.findobj(plt.Text))
    assert "§ variants are missing: fewer contexts" in everything.replace("\n", " ")


def test_stale_means_carry_a_dagger(results):
    figure = draw(results, "load", stale={ALL[0]: "changed"})
    for title, count in (("load 0 → 1", 3), ("load 1 → 2", 0), ("load 0 → 2", 3)):
        axes = next(axes for axes in figure.axes if axes.get_title().startswith(title))
        assert sum("†" in word for word in words(axes)) == count
    assert "† its source has changed since" in "\n".join(text.get_text() for text in figure.findobj(plt.Text))


def test_maps_are_the_same_bytes_twice_small_and_their_text_is_text(results, tmp_path):
    shutil.copytree(results, tmp_path / "h200")
    paths = [tmp_path / "h200" / "figures" / "gemm" / f"effect_stages.{ending}" for ending in ("svg", "png")]
    drawn = []
    for _ in range(2):
        plots.draw("effect", tmp_path / "h200", "gemm", "stages", {})
        drawn.append([path.read_bytes() for path in paths])
    assert drawn[0] == drawn[1]
    svg, png = drawn[0]
    assert b">stages 1 \xe2\x86\x92 2, 30 contexts</text>" in svg
    assert len(svg) < 60_000 and len(png) < 60_000


def test_no_text_of_a_map_leaves_it(results):
    for factor in EXPERIMENT.factors:
        figure = draw(results, factor)
        check_that_no_text_leaves(figure)


def shapley_figure(results, name: str, change=lambda frame: frame, stale=None):
    data = effects.read_data(results, "gemm")
    plot = {"bars": shapleyplots.plot_bars, "map": shapleyplots.plot_map}[name]
    data = {**data, "shapley": change(data["shapley"].copy())}
    return plot(EXPERIMENT, data, aggregate.facts_of(results, "gemm"), stale or {})


def everything(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(plt.Text))


def test_bars_are_as_long_as_the_values_and_say_their_shares(results):
    figure = shapley_figure(results, "bars")
    large, small = figure.axes
    frame = effects.read_data(results, "gemm")["shapley"]
    frame = frame[(frame["part"] == "share") & (frame["m"] == 4096)].set_index(["k", "factor"]).loc
    expected = [(k, factor) for k in (1024, 4096) for factor in EXPERIMENT.factors]
    bars = [patch for patch in large.patches if isinstance(patch, Rectangle)]
    assert [bar.get_height() for bar in bars] == pytest.approx([frame[at]["gain_log"] for at in expected])
    shares = [text.get_text() for text in large.texts if text.get_text().endswith("%")]
    assert shares == [f"{round(frame[at]['share_percent'])} %".replace("-", "\N{MINUS SIGN}") for at in expected]
    lines = [line for line in large.lines if len(set(line.get_xdata())) == 1]
    ends = [math.log1p(frame[at][f"{end}_percent"] / 100) for at in expected for end in ("low", "high")]
    assert [y for line in lines for y in line.get_ydata()] == pytest.approx(ends)
    assert len([p for p in small.patches if isinstance(p, Rectangle)]) == 5 and "not run" in words(small)
    assert "what each factor adds, over all orders, on NVIDIA H200" in everything(figure)
    assert "swizzle: plain → TMA's XOR" in everything(figure) and "12 paired rounds" in everything(figure)


def test_bars_that_are_not_clear_are_hatched_and_missing_ones_named(results, broken):
    figure = shapley_figure(results, "bars", lambda frame: frame.assign(verdict="undecided"))
    assert {patch.get_hatch() for patch in figure.axes[0].patches} == {plots.DOUBT}
    assert not {patch.get_hatch() for patch in shapley_figure(results, "bars").axes[0].patches[-1:]} - {None}
    figure = shapley_figure(broken, "bars")
    assert words(figure.axes[0]).count("not\nestimable") == 2 and not figure.axes[0].patches
    assert "† its source has changed since" in everything(shapley_figure(results, "bars", stale={ALL[0]: "changed"}))


def test_the_map_of_shares_has_a_panel_per_factor(results, broken):
    figure = shapley_figure(results, "map", stale={ALL[0]: "changed"})
    assert [axes.get_title() for axes in figure.axes[:5]] == list(EXPERIMENT.factors)
    frame = effects.read_data(results, "gemm")["shapley"].set_index(["part", "factor", "m", "k"])
    row = frame.loc[("share", "load", 4096, 4096)]
    assert f"{plots.signed(row['gain_percent'])}†" in words(figure.axes[0])
    assert f"{row['share_percent']:.1f} % of all" in words(figure.axes[0])
    assert words(shapley_figure(broken, "map").axes[0]).count("not\nestimable") == 3


def test_figures_of_shares_are_the_same_bytes_twice_and_small_and_hold_their_text(results, broken, tmp_path):
    shutil.copytree(results, tmp_path / "h200")
    for name in shapleyplots.PICTURES:
        paths = [tmp_path / "h200" / "figures" / "gemm" / f"shapley_{name}.{ending}" for ending in ("svg", "png")]
        drawn = []
        for _ in range(2):
            shapleyplots.draw(tmp_path / "h200", "gemm", name, {})
            drawn.append([path.read_bytes() for path in paths])
        assert drawn[0] == drawn[1] and max(map(len, drawn[0])) < 60_000
        for folder in (results, broken):
            check_that_no_text_leaves(shapley_figure(folder, name))
    with pytest.raises(RungsError, match=r"^There is no picture 'pie' of Shapley values: choose one of bars, map\.$"):
        shapleyplots.draw(results, "gemm", "pie", {})


def test_a_factor_that_is_not_there_is_one_sentence(results):
    with pytest.raises(
        RungsError, match=r"^gemm has no factor 'tile': choose one of load, read, b_layout, stages, swizzle\.$"
    ):
        plots.draw("effect", results, "gemm", "tile", {})


def test_a_pair_that_the_data_lack_is_hatched(results):
    figure = draw(
        results,
        "read",
        lambda frame: frame[~((frame["factor"] == "read") & (frame["source_level"] == 1) & (frame["k"] == 4096))],
    )
    axes = next(axes for axes in figure.axes if axes.get_title().startswith("read 1 → 2"))
    assert words(axes).count("not run") == 2
    assert pd.notna(effects.read_data(results, "gemm")["effects"]["gain_percent"]).all()
