"""The figure of the claims: each figure with its interval, against the bound and against the seed's own figure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from rungs import claimpages, plots
from rungs.claims import FAILS, HOLDS, NOT_MEASURED, UNDECIDED, Claim
from rungs.tables import DAGGER, Row

COLOUR = {HOLDS: "#2974c0", FAILS: "#b05b20", UNDECIDED: "#6a6a6a"}
MARKER = {HOLDS: "o", FAILS: "X", UNDECIDED: "s"}
BAND = "#dfe6ee"
ROW, WIDTH, LEFT, RIGHT = 0.235, 11.0, 2.05, 3.2
"""Inches."""
LINEAR = 4.0
"""Percent, or cycles, within which the axis is near linear; beyond it is near logarithmic."""
RATIO_TICKS = (-90, -50, -20, -10, -5, 0, 5, 10, 20, 50, 100)
COUNT_TICKS = (-5, 0, 5, 10, 20, 50, 100, 200)
RATIO_ENDS, COUNT_ENDS = (-115.0, 190.0), (-6.0, 330.0)
AS_CHANGE = {"percent": (1.0, 0.0), "times": (100.0, -100.0), "ratio": (100.0, -100.0)}
AS_CHANGE["percent of the control"] = (1.0, -100.0)
"""Unit -> factor and term that make it a change in percent: 1.44 times is +44 %, 42 % of the control -58 %."""


def draw(results: Path, stale: Mapping[str, str]) -> None:
    """Draw `figures/claims.svg` and `.png`."""
    plots.save(plot(results, stale), results / "figures" / claimpages.PAGE)


def plot(results: Path, stale: Mapping[str, str]) -> Figure:
    """A panel of what is a change or a ratio, one of cycles and counts; a line per claim that was measured, by seed."""
    pairs = claimpages.judged(results)
    known = [(claim, row) for claim, row in pairs if row["verdict"] != NOT_MEASURED]
    ratios = [pair for pair in known if pair[0].unit in AS_CHANGE]
    others = [pair for pair in known if pair[0].unit not in AS_CHANGE]
    panels = [lines for lines in (_lines(ratios), _lines(others)) if lines]
    said = [claimpages.conclusion(results, pairs), *claimpages.measured_text(results, known, stale)]
    note = textwrap.wrap(" ".join(said).replace("`", ""), int(WIDTH * 16))
    top, bottom, gap = 0.95, 0.65 + 0.13 * len(note), 0.75
    height = top + bottom + gap * max(len(panels) - 1, 0) + ROW * sum(len(lines) for lines in panels)
    with plt.rc_context(plots.STYLE):
        figure = plt.figure(figsize=(WIDTH, height))
        title = f"What the seeds say, tested on {claimpages.device_text(results)}"
        figure.text(0.2 / WIDTH, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", va="center")
        figure.text(0.2 / WIDTH, 0.08 / height, "\n".join(note), fontsize=7, color="#555555", va="bottom")
        _legend(figure, height)
        edge = height - top
        for lines in panels:
            tall = ROW * len(lines)
            box = (LEFT / WIDTH, (edge - tall) / height, 1 - (LEFT + RIGHT) / WIDTH, tall / height)
            ratio = any(pair and pair[0].unit in AS_CHANGE for _, pair in lines)
            _panel(figure.add_axes(box), lines, stale, ratio)
            edge -= tall + gap
    return figure


Line = tuple[str, tuple[Claim, Row] | None]
"""A claim, or the heading of a seed."""


def _lines(pairs: Sequence[tuple[Claim, Row]]) -> list[Line]:
    lines: list[Line] = []
    for seed in claimpages.SEEDS:
        here = [(claim.id, (claim, row)) for claim, row in pairs if claim.seed == seed]
        lines += [(f"seed {seed}", None), *here] if here else []
    return lines


def _panel(axes: Axes, lines: Sequence[Line], stale: Mapping[str, str], ratio: bool) -> None:
    ends, ticks = (RATIO_ENDS, RATIO_TICKS) if ratio else (COUNT_ENDS, COUNT_TICKS)
    axes.set_xscale("asinh", linear_width=LINEAR)
    axes.set_xlim(*ends)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(ticks, [f"{tick:+d} %" if ratio and tick else f"{tick}" for tick in ticks], fontsize=7.5)
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    label = "change in percent: of speed, or of what is counted" if ratio else "cycles, or a count"
    axes.set_xlabel(label, fontsize=8)
    axes.grid(True, axis="x", color="#ececec", linewidth=0.6)
    axes.axvline(0, color=plots.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for y, (name, pair) in enumerate(lines):
        if pair is None:
            axes.text(-0.015, y, name, transform=axes.get_yaxis_transform(), ha="right", va="center", fontweight="bold")
            continue
        _line(axes, y, *pair, stale=stale, ends=ends)


def _line(axes: Axes, y: int, claim: Claim, row: Row, stale: Mapping[str, str], ends: tuple[float, float]) -> None:
    factor, term = AS_CHANGE.get(claim.unit, (1.0, 0.0))

    def at(value: float) -> float:
        return min(max(factor * value + term, ends[0]), ends[1])

    low, high = (at(bound) for bound in (claim.bound.low, claim.bound.high))
    spans = [(ends[0], low), (high, ends[1])] if claim.bound.outside else [(low, high)]
    for start, end in spans:
        axes.add_patch(Rectangle((start, y - 0.36), end - start, 0.72, facecolor=BAND, edgecolor="none", zorder=1))
        for edge in {start, end} - set(ends):
            axes.plot([edge, edge], [y - 0.36, y + 0.36], color="#8fa3b8", linewidth=1.1, zorder=2)
    if claim.theirs is not None:
        axes.plot(
            at(claim.theirs),
            y,
            marker="D",
            markersize=5.5,
            color="white",
            markeredgecolor=plots.INK,
            zorder=3,
            linewidth=0,
        )
    colour = COLOUR[row["verdict"]]
    if row["low"] is not None and row["high"] is not None:
        axes.plot([at(row["low"]), at(row["high"])], [y, y], color=colour, linewidth=2.2, zorder=4)
    axes.plot(at(row["figure"]), y, marker=MARKER[row["verdict"]], markersize=5, color=colour, zorder=5, linewidth=0)
    beside = axes.get_yaxis_transform()
    axes.text(-0.015, y, claim.id, transform=beside, ha="right", va="center", fontsize=8)
    mark = DAGGER if claimpages.behind(row, stale) else ""
    axes.text(1.015, y, claimpages.figure_text(row) + mark, transform=beside, ha="left", va="center", fontsize=8)
    axes.text(1.375, y, row["verdict"], transform=beside, ha="left", va="center", fontsize=8, color=colour)


def _legend(figure: Figure, height: float) -> None:
    handles: list[Line2D | Patch] = [
        Line2D([], [], marker=MARKER[word], color=COLOUR[word], linewidth=2.2, markersize=5, label=word)
        for word in (HOLDS, FAILS, UNDECIDED)
    ]
    theirs = Line2D([], [], marker="D", color="white", markeredgecolor=plots.INK, markersize=5.5, linewidth=0)
    theirs.set_label("the seed's own figure, on its GPU")
    handles.append(theirs)
    handles.append(Patch(facecolor=BAND, edgecolor="#8fa3b8", label="where it has to lie"))
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.15 / WIDTH, 1 - 0.68 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        borderaxespad=0,
        columnspacing=1.6,
    )
