"""Heat maps of steps and of the factorial, and figures of ladders, as SVG and PNG that are the same bytes for the same data."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import AsinhNorm, LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from rungs import effects
from rungs.aggregate import Facts, facts_of, measured_ladders, mhz_range, read_data, rounds_range
from rungs.errors import RungsError
from rungs.files import whole
from rungs.variants import GEMM, Experiment, Ladder, Step, in_words, levels_of, load_experiment

SCALE_PERCENT = 100.0
"""Ends of the colour scale, the same in every figure, so that two devices can be compared by eye."""
LINEAR_PERCENT = 8.0
"""Below this the scale is near linear, above near logarithmic: a step of 3 % and one of 60 % both show."""
TICKS = (-100, -50, -20, -10, -5, 0, 5, 10, 20, 50, 100)
NORM = AsinhNorm(LINEAR_PERCENT, -SCALE_PERCENT, SCALE_PERCENT)
PALETTE = LinearSegmentedColormap.from_list("gain", ["#b05b20", "#d2a78a", "#f1f1f2", "#8cb2d9", "#2974c0"])
"""Orange slower, blue faster; even in lightness, and told apart by every kind of colour vision."""
DEPTHS = LinearSegmentedColormap.from_list("depth", ["#a5cd90", "#61aa90", "#33858d", "#1e5d86", "#2c3172"])
"""Colours of K, small to large."""
DPI, COLOURS = 90, 256
"""Of a PNG, which is for where an SVG is not shown."""
TIE, INK, FAINT = "#c9c9c9", "#222222", "#8a8a8a"
NOTHING = re.compile(
    r' transform="rotate\(-0 [-\d.]+ [-\d.]+\)"| id="(?:text|patch|line2d|[xy]tick|matplotlib\.axis)_\d+"|font-family: [^;"]*;? ?'
)
"""What makes an SVG a third larger: turns by no angle, names that nothing refers to, the same font for every text."""
FONTS = "DejaVu Sans, Verdana, Geneva, sans-serif"
"""Alike in width, so that a text fits where a reader lacks the first."""
DOUBT, GAP = "||||", "//////"
"""Hatches of undecided cells and of those that were not measured; dots would make an SVG ten times as large."""
MOST_LINES = 5
"""Of a rung's label in the figure of a ladder."""
Size = tuple[int, int]
Shape = tuple[int, int, int]
STYLE: dict[str, Any] = {
    "svg.hashsalt": "rungs",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "hatch.linewidth": 0.6,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(kind: str, results: Path, experiment_name: str, name: str, stale: Mapping[str, str]) -> None:
    """Draw `figures/<experiment>/<kind>_<name>.svg` and `.png`: heatmap, ladder, waterfall and roofline of a ladder, effect of a factor.

    Raises RungsError for a name that the experiment has not.
    """
    from rungs import waterfall

    experiment = load_experiment(experiment_name)
    if experiment.workload != GEMM:
        raise RungsError(f"{experiment_name} has no {kind}, which is over M, N and K: draw its `points`.")
    known = list(experiment.factors) if kind == "effect" else list(experiment.ladders)
    if name not in known:
        word = "factor" if kind == "effect" else "ladder"
        raise RungsError(f"{experiment_name} has no {word} {name!r}: choose one of {', '.join(known)}.")
    if kind == "roofline":
        from rungs import roofline

        figure = roofline.draw(results, experiment, experiment.ladders[name], stale)
    elif kind == "effect":
        facts = facts_of(results, experiment_name)
        figure = plot_effect(experiment, name, effects.read_data(results, experiment_name), facts, stale)
    else:
        plot = {"heatmap": plot_heatmap, "ladder": plot_ladder, "waterfall": waterfall.plot_waterfall}[kind]
        ladder = experiment.ladders[name]
        facts = facts_of(results, experiment_name, [variant.name for variant in ladder.rungs.values()])
        figure = plot(experiment, ladder, read_data(results, experiment_name), facts, stale)
    save(figure, results / "figures" / experiment_name / f"{kind}_{name}", coarse=kind == "roofline")


def run(results: Path, experiment_name: str, stale: Mapping[str, str] | None = None) -> None:
    """Draw the figures of every ladder that the set measured."""
    for ladder in measured_ladders(load_experiment(experiment_name), read_data(results, experiment_name)["shapes"]):
        for kind in ("heatmap", "ladder", "waterfall"):
            draw(kind, results, experiment_name, ladder.name, stale or {})


def save(figure: Figure, stem: Path, coarse: bool = False) -> None:
    """Write `stem`.svg and .png, each whole, without dates or versions in them; `coarse` with coordinates to a tenth of a point.

    Text in the SVG is text, so that it can be read, searched and kept small; a PNG has a palette for the same reason.
    """
    with plt.rc_context(STYLE):
        with whole(stem.with_suffix(".svg")) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
            svg = NOTHING.sub("", temporary.read_text(encoding="utf-8"))
            if coarse:
                svg = re.sub(
                    r'(?<= d=")[^"]+|(?<= [xy]=")[-\d.]+(?=")', lambda m: re.sub(r"-?\d+\.\d+", _tenth, m[0]), svg
                )
            temporary.write_text(svg.replace("<svg ", f'<svg font-family="{FONTS}" ', 1), encoding="utf-8")
        figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        with whole(stem.with_suffix(".png")) as temporary:
            image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                temporary, format="png", optimize=True
            )
    plt.close(figure)


def _tenth(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"


# Heat map


@dataclass(frozen=True)
class Panel:
    """One map of K against M = N. `rows`: shape -> row of the data; `text`: row and its gain's text -> what the cell says."""

    title: str
    subtitle: str
    rows: Mapping[Shape, Mapping[str, Any]]
    text: Callable[[Mapping[str, Any] | None, str], str]
    colour: str = INK


def plot_heatmap(
    experiment: Experiment, ladder: Ladder, data: Mapping[str, pd.DataFrame], facts: Facts, stale: Mapping[str, str]
) -> Figure:
    """One panel per step of the ladder: K against M = N, the gain in every cell."""
    frame = data["steps"][data["steps"]["ladder"] == ladder.name]
    panels = [
        _step_panel(experiment, step, frame[frame["step"] == step.label], stale)
        for step in ladder.steps
        if step.label in set(frame["step"])
    ]
    figure = maps(
        panels, f"{experiment.name}, ladder {ladder.name}: gain of each step on {facts.gpu}", cell=(0.86, 0.36)
    )
    footer(figure, facts, rungs_of(data["shapes"], ladder), stale)
    return figure


def plot_effect(
    experiment: Experiment, factor: str, data: Mapping[str, pd.DataFrame], facts: Facts, stale: Mapping[str, str]
) -> Figure:
    """One panel per pair of levels of a factor: the mean gain over the contexts, and beneath it the smallest and the largest."""
    frame = data["effects"][data["effects"]["factor"] == factor]
    panels = []
    for pair in effects.pairs_of(experiment):
        if pair.factor.name == factor:
            here = frame[(frame["source_level"] == pair.source) & (frame["target_level"] == pair.target)]
            panels.append(_effect_panel(pair, here, stale))
    title = f"{experiment.name}: effect of {factor} ({experiment.factors[factor].title}) on {facts.gpu}"
    figure = maps(panels, title, cell=(1.08, 0.5))
    note = "mean over the contexts, beneath it their smallest and largest gain"
    if frame["lost"].sum():
        note += "  ·  § variants are missing: fewer contexts"
    footer(figure, facts, data["corners"], stale, note)
    return figure


def maps(panels: Sequence[Panel], title: str, cell: tuple[float, float]) -> Figure:
    """Panels side by side, at most five in a row, on one scale of colour. `cell`: width and height in inches."""
    shapes = {shape for panel in panels for shape in panel.rows}
    sizes, depths = sorted({shape[:2] for shape in shapes}), sorted({shape[2] for shape in shapes})
    across = max(min(5, len(panels)), 1)
    down = -(-len(panels) // across)
    panel_width, panel_height = 0.55 + cell[0] * len(sizes), 0.95 + cell[1] * len(depths)
    width, height = max(6.4, 0.4 + 0.1 * len(title), across * panel_width + 1.35), down * panel_height + 1.75
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height))
        grid = figure.add_gridspec(
            down,
            across,
            left=0.62 / width,
            right=1 - 1.2 / width,
            top=1 - 1.0 / height,
            bottom=0.98 / height,
            wspace=0.28,
            hspace=0.78 / (panel_height - 0.78),
        )
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(grid[i // across, i % across])
            _draw_panel(axes, panel, sizes, depths)
            if i % across:
                axes.set_yticklabels([])
            else:
                axes.set_ylabel("K")
            if i // across == down - 1:
                axes.set_xlabel("M = N" if all(m == n for m, n in sizes) else "M x N")
        _colour_bar(figure, width, height)
        figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", va="center")
        _legend(figure)
    return figure


def _step_panel(experiment: Experiment, step: Step, frame: pd.DataFrame, stale: Mapping[str, str]) -> Panel:
    before, after = (
        experiment.factors[step.factor].levels[variant.level(step.factor)].title
        for variant in (step.source_variant, step.target_variant)
    )
    mark = "†" if {step.source_variant.name, step.target_variant.name} & set(stale) else ""
    controlled = bool(frame["controlled"].all())
    title = f"{step.source} → {step.target}" + ("" if controlled else "  (not controlled)")
    return Panel(
        title,
        f"{before} → {after}",
        by_shape(frame),
        lambda row, gain: gain + (mark if row is not None and pd.notna(row["gain_percent"]) else ""),
        INK if controlled else "#b03000",
    )


def _effect_panel(pair: effects.Pair, frame: pd.DataFrame, stale: Mapping[str, str]) -> Panel:
    old = any({source.name, target.name} & set(stale) for source, target in pair.contexts)

    def text(row: Mapping[str, Any] | None, gain: str) -> str:
        if row is None or pd.isna(row["gain_percent"]):
            return gain
        marks = ("†" if old else "") + ("§" if row["lost"] else "")
        return f"{gain}{marks}\n{span(row['least_percent'], row['most_percent'])}"

    counts = sorted(set(frame["contexts"])) or [0]
    over = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    before, after = (pair.factor.levels[level].title for level in (pair.source, pair.target))
    title = f"{pair.factor.name} {pair.source} → {pair.target}, {over} contexts"
    return Panel(title, f"{before} → {after}", by_shape(frame), text)


def by_shape(frame: pd.DataFrame) -> dict[Shape, dict[str, Any]]:
    return {(int(row["m"]), int(row["n"]), int(row["k"])): row for row in frame.to_dict("records")}


def _draw_panel(axes: Axes, panel: Panel, sizes: Sequence[Size], depths: Sequence[int]) -> None:
    gains = np.full((len(depths), len(sizes)), np.nan)
    for i, k in enumerate(depths):
        for j, size in enumerate(sizes):
            row = panel.rows.get((*size, k))
            text, colour = draw_cell(axes, row, i, j)
            text = panel.text(row, text)
            first, _, rest = text.partition("\n")
            below = bool(rest) and colour != FAINT
            place: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
            axes.text(
                j + 0.5,
                i + (0.36 if below else 0.5),
                first if below else text,
                fontsize=8 if len(text) < 11 or below else 6.5,
                linespacing=0.95,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2} if colour == FAINT else None,
                **place,
            )
            if below:
                axes.text(j + 0.5, i + 0.73, rest, fontsize=5.8, **place)
            if row is not None and row["verdict"] in ("faster", "slower"):
                gains[i, j] = row["gain_percent"]
    axes.pcolormesh(np.ma.masked_invalid(gains), cmap=PALETTE, norm=NORM, linewidth=1.5, edgecolor="white")
    axes.set(xlim=(0, len(sizes)), ylim=(len(depths), 0))
    axes.set_xticks(np.arange(len(sizes)) + 0.5, [label_of(size) for size in sizes])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [str(k) for k in depths])
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    lines = textwrap.wrap(panel.subtitle, max(30, 16 * len(sizes)))
    axes.annotate(
        "\n".join(lines),
        (0.5, 1.0),
        xycoords="axes fraction",
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=6.8,
        color="#555555",
    )
    axes.set_title(panel.title, fontsize=9.5, fontweight="bold", pad=max(24, 8 + 8.5 * len(lines)), color=panel.colour)


def draw_cell(axes: Axes, row: Mapping[str, Any] | None, i: int, j: int) -> tuple[str, str]:
    """Background of a cell that has no verdict to colour it by; returns the cell's text and the colour of that."""
    place = ((j + 0.02, i + 0.02), 0.96, 0.96)
    if row is None or pd.isna(row["gain_percent"]):
        axes.add_patch(Rectangle(*place, facecolor="white", edgecolor="#b5b5b5", hatch=GAP, linewidth=0))
        word = row["status"] if row is not None else "not run"
        return "\n".join(textwrap.wrap(word, 11, break_long_words=False)), FAINT
    text = signed(row["gain_percent"])
    if row["verdict"] in ("faster", "slower"):
        red, green, blue = to_rgb(PALETTE(NORM(np.clip(row["gain_percent"], -SCALE_PERCENT, SCALE_PERCENT))))
        return text, "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK
    if row["verdict"] == "tie":
        axes.add_patch(Rectangle(*place, facecolor=TIE, edgecolor="none"))
        return text, INK
    axes.add_patch(Rectangle(*place, facecolor="#fafafa", edgecolor="#dcdcdc", hatch=DOUBT, linewidth=0))
    return f"{text} ?", INK


def signed(percent: float) -> str:
    """`+12.3 %`, with a digit more below 1 %."""
    digits = 2 if abs(percent) < 0.995 else 1 if abs(percent) < 99.95 else 0
    rounded = round(percent, digits) or 0.0
    return f"{rounded:+.{digits}f} %".replace("-", "\N{MINUS SIGN}") if rounded else "0.00 %"


def span(low: float, high: float) -> str:
    """`-1.0 … +30.2`, each as `signed`, without the unit."""
    return " … ".join(signed(value).removesuffix(" %") for value in (low, high))


def label_of(size: Size) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _colour_bar(figure: Figure, width: float, height: float) -> None:
    axes = figure.add_axes((1 - 0.95 / width, 0.98 / height, 0.16 / width, 1 - 1.98 / height))
    bar = figure.colorbar(ScalarMappable(NORM, PALETTE), cax=axes, extend="both")
    bar.set_ticks(
        list(TICKS),
        labels=[f"{tick:+d} %".replace("-", "\N{MINUS SIGN}") if tick else "0 %" for tick in TICKS],
        fontsize=7.5,
    )
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)
    axes.set_title("gain", fontsize=8)


def _legend(figure: Figure) -> None:
    handles = [
        Patch(facecolor=PALETTE(0.85), label="faster"),
        Patch(facecolor=PALETTE(0.15), label="slower"),
        Patch(facecolor=TIE, label="tie: within the floor"),
        Patch(facecolor="#fafafa", edgecolor="#bdbdbd", hatch=DOUBT, linewidth=0, label="? undecided or no floor"),
        Patch(facecolor="white", edgecolor="#b5b5b5", hatch=GAP, linewidth=0, label="not measured: why"),
    ]
    legend(figure, handles, 5, 0.3)


def legend(figure: Figure, handles: Sequence[Patch], columns: int, bottom: float) -> None:
    """The key at the foot of a figure, `bottom` inches above its edge."""
    width, height = figure.get_size_inches()
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.1 / width, bottom / height),
        ncols=columns,
        frameon=False,
        fontsize=7.5,
        handlelength=1.3,
        handleheight=0.9,
        columnspacing=1.4,
    )


def rungs_of(shapes: pd.DataFrame, ladder: Ladder, rungs: Iterable[str] | None = None) -> pd.DataFrame:
    """The rows of a ladder's rungs, or of these of them."""
    return shapes[shapes["variant"].isin([ladder.rungs[rung].name for rung in rungs or ladder.rungs])]


def caption(facts: Facts, shapes: pd.DataFrame) -> str:
    """GPU, clock and rounds of these rows in one line."""
    model = facts.on(facts.boards[name] for name in set(shapes["variant"]) if name in facts.boards)
    parts = [f"{model}, driver {facts.driver}", f"{facts.clock}, {mhz_range(shapes)}"]
    return "  ·  ".join(
        [*parts, f"{rounds_range(shapes)} paired rounds", f"fill {facts.fill}, L2 {facts.l2}", facts.dates]
    )


def footer(figure: Figure, facts: Facts, shapes: pd.DataFrame, stale: Mapping[str, str], note: str = "") -> None:
    width, height = figure.get_size_inches()
    text = "  ·  ".join(filter(None, [caption(facts, shapes), note]))
    if set(stale) & set(shapes["variant"]):
        text += "  ·  † its source has changed since"
    lines = textwrap.wrap(text, int(width * 17))
    figure.text(0.2 / width, 0.16 / height, "\n".join(lines), fontsize=7, color="#555555", va="center")


# Ladder


def plot_ladder(
    experiment: Experiment, ladder: Ladder, data: Mapping[str, pd.DataFrame], facts: Facts, stale: Mapping[str, str]
) -> Figure:
    """Share of the control per rung, a panel per M = N and a colour per K; the path is joined, the rest is not."""
    rungs = [*ladder.path, *(rung for rung in ladder.rungs if rung not in ladder.path)]
    place = {rung: i + (0.6 if rung not in ladder.path else 0.0) for i, rung in enumerate(rungs)}
    names = {rung: ladder.rungs[rung].name for rung in rungs}
    frame = data["shapes"][data["shapes"]["variant"].isin(names.values())]
    sizes = sorted(set(zip(frame["m"].astype(int), frame["n"].astype(int), strict=True)), reverse=True)
    depths = sorted(set(frame["k"].astype(int)))
    colours = {k: DEPTHS((i + 1) / (len(depths) + 1)) for i, k in enumerate(depths)}
    rows = {(r["variant"], int(r["m"]), int(r["n"]), int(r["k"])): r for r in frame.to_dict("records")}
    labels = [_rung_label(experiment, ladder, rung, names[rung] in stale) for rung in rungs]
    below = 0.62 + 0.117 * max(label.count("\n") + 1 for label in labels)
    width, height = max(6.4, 1.1 + len(sizes) * 0.66 * (len(rungs) + 1)), 3.35 + below
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(sizes), figsize=(width, height), sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=0.7 / width, right=1 - 0.15 / width, top=1 - 0.78 / height, bottom=below / height, wspace=0.06
        )
        for axes, size in zip(grid[0], sizes, strict=True):
            for k in depths:
                _depth(
                    axes,
                    ladder,
                    {rung: rows.get((name, *size, k)) for rung, name in names.items()},
                    place,
                    k,
                    colours[k],
                )
            _name_gaps(
                axes, [{k: rows.get((name, *size, k)) for k in depths} for name in names.values()], list(place.values())
            )
            axes.axhline(100, color=INK, linewidth=0.8)
            if len(ladder.path) < len(rungs):
                axes.axvline(len(ladder.path) - 0.2, color="#cccccc", linewidth=0.8, linestyle=(0, (3, 3)))
            axes.set_title(f"M = N = {size[0]}" if size[0] == size[1] else f"M x N = {label_of(size)}", fontsize=10)
            axes.set_xticks(list(place.values()), labels, fontsize=6.6)
            axes.set_xlim(-0.5, max(place.values()) + 0.5)
            axes.tick_params(length=0)
            axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["left", "right", "top"]].set_visible(False)
        top = max(
            110.0,
            *(float(r["share_high_percent"]) * 1.05 for r in rows.values() if pd.notna(r["share_high_percent"])),
            0.0,
        )
        grid[0][0].set_ylim(0, top)
        grid[0][0].set_ylabel(f"share of {facts.control}, %")
        grid[0][-1].text(max(place.values()) + 0.45, 101, facts.control, ha="right", va="bottom", fontsize=7.5)
        title = f"{experiment.name}, ladder {ladder.name}: share of {facts.control} on {facts.gpu}"
        figure.text(0.2 / width, 1 - 0.28 / height, title, fontsize=12, fontweight="bold", va="center")
        handles, texts = grid[0][0].get_legend_handles_labels()
        figure.legend(
            handles,
            texts,
            loc="lower left",
            bbox_to_anchor=(0.1 / width, 0.3 / height),
            ncols=len(depths),
            frameon=False,
            fontsize=8,
            handlelength=1.4,
            columnspacing=1.4,
        )
        footer(figure, facts, frame, stale)
    return figure


def _depth(
    axes: Axes, ladder: Ladder, rows: Mapping[str, Any], place: Mapping[str, float], k: int, colour: Any
) -> None:
    """One K: a joined line along the path, single marks elsewhere, intervals as bars."""

    def points(rungs: list[str]) -> tuple[list[float], list[float], list[list[float]]]:
        here = [
            (place[rung], row) for rung in rungs if (row := rows[rung]) is not None and pd.notna(row["share_percent"])
        ]
        values = [float(row["share_percent"]) for _, row in here]
        below = [v - _or(row["share_low_percent"], v) for v, (_, row) in zip(values, here, strict=True)]
        above = [_or(row["share_high_percent"], v) - v for v, (_, row) in zip(values, here, strict=True)]
        return [x for x, _ in here], values, [below, above]

    x, y, error = points(list(ladder.path))
    axes.errorbar(x, y, error, color=colour, marker="o", markersize=4.5, linewidth=1.5, elinewidth=1, label=f"K = {k}")
    x, y, error = points([rung for rung in rows if rung not in ladder.path])
    axes.errorbar(
        x, y, error, color=colour, marker="o", markersize=4.5, linestyle="none", elinewidth=1, markerfacecolor="white"
    )


def _or(value: Any, fallback: float) -> float:
    return fallback if pd.isna(value) else float(value)


def _name_gaps(axes: Axes, columns: list[dict[int, Any]], places: list[float]) -> None:
    """Under a rung, the word of each K that has no figure."""
    for x, rows in zip(places, columns, strict=True):
        gaps: dict[str, list[int]] = {}
        for k, row in rows.items():
            if row is None or pd.isna(row["share_percent"]):
                gaps.setdefault("not run" if row is None else row["status"], []).append(k)
        lines = [
            line
            for word, missing in gaps.items()
            for line in (*textwrap.wrap(word, 12), *([f"K = {k}" for k in missing] if len(missing) < len(rows) else []))
        ]
        axes.text(x, 1, "\n".join(lines), ha="center", va="bottom", fontsize=6.5, color="#666666")


def changed(experiment: Experiment, ladder: Ladder, before: str | None, rung: str) -> str:
    """What a rung of the path adds to the one before; of the first, nothing: it is where the path begins."""
    if before is None:
        return "start"
    source, target = ladder.rungs[before], ladder.rungs[rung]
    factor = next(name for name, level in target.levels if source.level(name) != level)
    return experiment.factors[factor].levels[target.level(factor)].title


def _rung_label(experiment: Experiment, ladder: Ladder, rung: str, stale: bool) -> str:
    """What a rung is: the first of the path whole, in at most `MOST_LINES`; any other by what its step changes.

    A rung off the path stands by the level that a step changes from a rung of the path, and says which.
    """
    path = ladder.path
    if rung == path[0]:
        titles = levels_of(experiment, ladder, rung)
        lines = [line for title in titles for line in textwrap.wrap(title, 14)]
        lines = (
            lines
            if len(lines) <= MOST_LINES
            else textwrap.wrap(", ".join(titles), 17, max_lines=MOST_LINES, placeholder=" …")
        )
    elif rung in path:
        lines = textwrap.wrap(changed(experiment, ladder, path[path.index(rung) - 1], rung), 14)
    else:
        ends = [(step.source, step.target) for step in ladder.steps if rung in (step.source, step.target)]
        others = [a if b == rung else b for a, b in ends]
        other = next((name for name in others if name in path), others[0] if others else None)
        what = changed(experiment, ladder, other, rung) if other else in_words(experiment, ladder, rung)
        lines = [
            *([f"as {other}, but"] if other else []),
            *textwrap.wrap(what, 14, max_lines=MOST_LINES, placeholder=" …"),
        ]
    return "\n".join([f"{rung}†" if stale else rung, *lines])
