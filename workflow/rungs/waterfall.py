"""The waterfall of a ladder: its path from the first rung to the last against the control, beside what others published."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rungs import plots, published
from rungs.aggregate import Facts
from rungs.plots import FAINT, INK, PALETTE, STYLE, Shape
from rungs.variants import Experiment, Ladder

UP, DOWN, BODY, PEER = PALETTE(0.9), PALETTE(0.1), "#d9dfe6", "#8a3d8f"
PUBLISHED = "////"
"""Hatch of bars that were not measured here."""
WIDEST = 15.0
"""Inches: as many panels stand side by side as fit, at most three."""


@dataclass(frozen=True)
class Bar:
    """One rung: its share of the control in percent with its 95 % interval, or why there is none, and what the step to it gained."""

    name: str
    what: str
    share: float | None
    gap: str = ""
    gain: str = ""
    interval: tuple[float, float] | None = None


def plot_waterfall(
    experiment: Experiment, ladder: Ladder, data: Mapping[str, pd.DataFrame], facts: Facts, stale: Mapping[str, str]
) -> Figure:
    """A panel per K at one M = N (`published.size_beside`): the rungs of the path, each step labelled with its gain, and the best peers.

    Then a panel per published ladder, as shares of its author's own cuBLAS.
    """
    shapes = plots.rungs_of(data["shapes"], ladder, ladder.path)
    size = published.size_beside(zip(shapes["m"].astype(int), shapes["n"].astype(int), strict=True))
    shapes = shapes[(shapes["m"] == size[0]) & (shapes["n"] == size[1])]
    steps = data["steps"][data["steps"]["ladder"] == ladder.name]
    depths = sorted(set(shapes["k"].astype(int)))
    others = published.ladders(ladder.published)
    count = len(depths) + len(others)
    bars = max([len(ladder.path) + 1.65, *(len(other.rungs) for other in others)])
    across = max(1, min(3, count, int((WIDEST - 0.9) / (0.62 * bars + 0.2))))
    width, panel = max(9.0, 0.9 + across * (0.62 * bars + 0.2)), 3.3
    height = 1.1 + -(-count // across) * panel
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height))
        grid = figure.add_gridspec(
            -(-count // across),
            across,
            left=0.62 / width,
            right=1 - 0.12 / width,
            top=1 - 0.85 / height,
            bottom=1.1 / height,
            wspace=0.05,
            hspace=0.95 / (panel - 0.95),
        )
        tallest = float(shapes["share_percent"].max()) if shapes["share_percent"].notna().any() else 0.0
        top = 1.12 * max(100.0, tallest, *(share for other in others for share in other.rungs.values()), 0.0)
        for i, k in enumerate(depths):
            axes = figure.add_subplot(grid[i // across, i % across])
            here = bars_of(experiment, ladder, shapes, steps, (*size, k), stale)
            _draw_bars(axes, here, facts.control)
            _draw_peers(axes, published.best_peers(facts.gpu, (*size, k), experiment.multiplies), len(here))
            _finish(axes, f"M = N = {plots.label_of(size)}, K = {k}", len(here) + 1.2, top, i % across == 0)
        for i, other in enumerate(others, start=len(depths)):
            axes = figure.add_subplot(grid[i // across, i % across])
            _draw_bars(axes, published_bars(other), published.LIBRARY, hatch=PUBLISHED)
            _finish(
                axes,
                f"published: {other.name}, M = N = K = {other.size}",
                len(other.rungs) - 0.45,
                top,
                i % across == 0,
            )
        title = f"{experiment.name}, ladder {ladder.name}: from {ladder.path[0]} to {ladder.path[-1]} on {facts.gpu}"
        figure.text(0.2 / width, 1 - 0.28 / height, title, fontsize=12, fontweight="bold", va="center")
        _legend(figure, experiment.multiplies, bool(others))
        note = "gains are paired in the job of each step's target, shares in the job of each rung"
        plots.footer(figure, facts, shapes, stale, note)
    return figure


def bars_of(
    experiment: Experiment,
    ladder: Ladder,
    shapes: pd.DataFrame,
    steps: pd.DataFrame,
    shape: Shape,
    stale: Mapping[str, str],
) -> list[Bar]:
    """The rungs of the path at one shape, each with the gain of the step that leads to it."""
    rows = {row["variant"]: row for row in shapes[shapes["k"] == shape[2]].to_dict("records")}
    gains = {
        row["step"]: row
        for row in steps.to_dict("records")
        if (row["m"], row["n"], row["k"]) == shape and pd.notna(row["gain_percent"])
    }
    bars = []
    for before, rung in itertools.pairwise([None, *ladder.path]):
        name = ladder.rungs[str(rung)].name
        row, step = rows.get(name), gains.get(f"{before}>{rung}")
        share = None if row is None or pd.isna(row["share_percent"]) else float(row["share_percent"])
        gap = "" if share is not None else "not run" if row is None else str(row["status"])
        interval = None
        if row is not None and share is not None and pd.notna(row["share_high_percent"]):
            interval = float(row["share_low_percent"]), float(row["share_high_percent"])
        label = f"{rung}†" if name in stale else str(rung)
        bars.append(Bar(label, plots.changed(experiment, ladder, before, str(rung)), share, gap, _gain(step), interval))
    return bars


def _gain(step: Mapping[str, Any] | None) -> str:
    """`+34.4 %` and beneath it the half width of its 95 % interval."""
    if step is None:
        return ""
    text = plots.signed(step["gain_percent"])
    if pd.isna(step["high_percent"]):
        return text
    half = (step["high_percent"] - step["low_percent"]) / 2
    return f"{text}\n±{half:.{2 if half < 0.05 else 1}f}"


def published_bars(ladder: published.PublishedLadder) -> list[Bar]:
    """Gains are ratios of the published figures, which have no interval."""
    bars, before = [], None
    for i, (rung, share) in enumerate(ladder.rungs.items()):
        gain = "" if before is None else plots.signed(100 * (share / before - 1))
        bars.append(Bar(f"{i + 1}", rung, share, gain=gain))
        before = share
    return bars


def _draw_bars(axes: Axes, bars: Sequence[Bar], control: str, hatch: str | None = None) -> None:
    """Each bar up to the lower of two neighbours is body; what the step adds is blue, what it takes away orange."""
    for x, (before, bar) in enumerate(zip([None, *bars], bars, strict=False)):
        last = before.share if before else None
        if bar.share is None:
            axes.text(
                x, 2, "\n".join(textwrap.wrap(bar.gap, 11)), ha="center", va="bottom", fontsize=6.5, color="#666666"
            )
            continue
        body = bar.share if last is None else min(last, bar.share)
        style: dict[str, Any] = {"width": 0.72, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
        axes.bar(x, body, color=BODY, **style)
        if bar.interval:
            axes.plot([x, x], bar.interval, color=INK, linewidth=1.2)
        if last is not None:
            axes.bar(x, abs(bar.share - last), bottom=body, color=UP if bar.share >= last else DOWN, **style)
            axes.plot([x - 0.64, x - 0.36], [last, last], color=FAINT, linewidth=0.9)
            axes.text(
                x,
                max(bar.share, last) + 1.5,
                bar.gain,
                ha="center",
                va="bottom",
                fontsize=6.6,
                linespacing=0.95,
                # over the line at 100 %, which else strikes it through
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8} if bar.gain else None,
            )
        axes.text(x, 2, f"{bar.share:.1f} %", ha="center", va="bottom", fontsize=6.8)
    axes.axhline(100, color=INK, linewidth=0.9)
    axes.text(-0.5, 100.8, control, ha="left", va="bottom", fontsize=7)
    labels = ["\n".join([bar.name, *textwrap.wrap(bar.what, 12, max_lines=4, placeholder=" …")]) for bar in bars]
    axes.set_xticks(range(len(bars)), labels, fontsize=6.2)


def _draw_peers(axes: Axes, peers: Mapping[str, float], bars: int) -> None:
    """A mark at the share of each project's best kernel; labels keep apart."""
    low = 0.0
    for project, share in sorted(peers.items(), key=lambda peer: peer[1]):
        low = max(share, low)
        axes.plot([bars - 0.45, bars - 0.2], [share, share], color=PEER, linewidth=1.8)
        axes.text(bars - 0.15, low, f"{project} {share:.0f} %", fontsize=5.8, va="center", color=PEER)
        low += 4.5


def _finish(axes: Axes, title: str, right: float, top: float, first: bool) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlim(-0.55, right)
    axes.set_ylim(0, top)
    axes.tick_params(length=0, labelleft=first)
    axes.grid(axis="y", color="#ededed", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    if first:
        axes.set_ylabel("share of the control, %")


def _legend(figure: Figure, instruction: str, others: bool) -> None:
    handles = [
        Patch(facecolor=UP, label="what the step adds"),
        Patch(facecolor=DOWN, label="what it takes away"),
        Patch(facecolor=PEER, label=f"best {instruction} kernel of a public project at this shape"),
    ]
    if others:
        handles.append(
            Patch(facecolor=BODY, hatch=PUBLISHED, edgecolor="white", linewidth=0, label="published, on another GPU")
        )
    plots.legend(figure, handles, 4, 0.26)
