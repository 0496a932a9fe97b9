"""Figures of Shapley values: bars with intervals at every shape, and a map of K against M = N per factor."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rungs import effects, plots, shapley
from rungs.aggregate import Facts, facts_of
from rungs.errors import RungsError
from rungs.variants import Experiment, load_experiment

PICTURES = ("bars", "map")
COLOURS = ("#2974c0", "#c77b30", "#33858d", "#7a5195", "#8f9a27", "#b0486a", "#6b6b6b", "#4a6b2a")
"""Of the factors, in their order; told apart by lightness too."""
TICKS = (-90, -80, -60, -40, -20, -10, 0, 10, 20, 40, 60, 100, 150, 200, 300, 500, 800, 1500, 3000)
"""Of a gain in percent on the axis of its logarithm."""
GROUP = 0.84
"""Width of the bars of a K, of the 1 that it has."""


def draw(results: Path, experiment_name: str, name: str, stale: Mapping[str, str]) -> None:
    """Draw `figures/<experiment>/shapley_<name>.svg` and `.png`. Raises RungsError for another name than `PICTURES`."""
    if name not in PICTURES:
        raise RungsError(f"There is no picture {name!r} of Shapley values: choose one of {', '.join(PICTURES)}.")
    experiment = load_experiment(experiment_name)
    plot = {"bars": plot_bars, "map": plot_map}[name]
    data = effects.read_data(results, experiment_name)
    figure = plot(experiment, data, facts_of(results, experiment_name), stale)
    plots.save(figure, results / "figures" / experiment_name / f"shapley_{name}")


def _corners(experiment: Experiment, corners: pd.DataFrame) -> pd.DataFrame:
    game = shapley.game_of(experiment)
    return corners[corners["variant"].isin([variant.name for variant in game.corners.values() if variant])]


def _rows(data: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    return data["shapley"][data["shapley"]["part"] == "share"]


def _ends(experiment: Experiment, frame: pd.DataFrame, factor: str) -> str:
    row = frame[frame["factor"] == factor].iloc[0]
    titles = experiment.factors[factor].levels
    return " → ".join(titles[int(row[end])].title for end in ("source_level", "target_level"))


def plot_map(
    experiment: Experiment, data: Mapping[str, pd.DataFrame], facts: Facts, stale: Mapping[str, str]
) -> Figure:
    """One panel per factor: its Shapley value as a gain, and beneath it its share of the whole gain."""
    frame = _rows(data)
    used = _corners(experiment, data["corners"])
    mark = "†" if set(stale) & set(used["variant"]) else ""

    def text(row: Mapping[str, Any] | None, gain: str) -> str:
        if row is None or pd.isna(row["gain_percent"]):
            return gain
        return (
            f"{gain}{mark}\n{row['share_percent']:.1f} % of all" if pd.notna(row["share_percent"]) else f"{gain}{mark}"
        )

    panels = [
        plots.Panel(factor, _ends(experiment, frame, factor), plots.by_shape(frame[frame["factor"] == factor]), text)
        for factor in dict.fromkeys(frame["factor"])
    ]
    figure = plots.maps(panels, f"{experiment.name}: Shapley value of each factor on {facts.gpu}", cell=(1.0, 0.5))
    plots.footer(
        figure, facts, used, stale, "mean over all orders of the factors, beneath it the share of the whole gain"
    )
    return figure


def plot_bars(
    experiment: Experiment, data: Mapping[str, pd.DataFrame], facts: Facts, stale: Mapping[str, str]
) -> Figure:
    """A panel per M = N, a group of bars per K and a bar per factor: its Shapley value with its 95 % interval, and its share."""
    frame = _rows(data)
    used = _corners(experiment, data["corners"])
    factors = list(dict.fromkeys(frame["factor"]))
    sizes = sorted(set(zip(frame["m"].astype(int), frame["n"].astype(int), strict=True)), reverse=True)
    depths = sorted(set(frame["k"].astype(int)))
    rows = {(row["factor"], int(row["m"]), int(row["n"]), int(row["k"])): row for row in frame.to_dict("records")}
    labels = [f"{name}: {_ends(experiment, frame, name)}" for name in factors]
    across = 2 if len(factors) > 3 else 1
    foot = 0.75 + 0.17 * -(-len(factors) // across)
    width = max(8.4, 0.9 + 0.36 * len(factors) * len(depths))
    height = 0.7 + 2.35 * len(sizes) + foot
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(len(sizes), 1, figsize=(width, height), sharex=True, sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=0.72 / width, right=1 - 0.15 / width, top=1 - 0.72 / height, bottom=foot / height, hspace=0.16
        )
        ends = []
        for axes, size in zip(grid[:, 0], sizes, strict=True):
            ends += _bars(axes, {(f, k): rows.get((f, *size, k)) for f in factors for k in depths}, factors, depths)
            word = f"M = N = {size[0]}" if size[0] == size[1] else f"M x N = {plots.label_of(size)}"
            axes.text(0.005, 0.97, word, transform=axes.transAxes, va="top", fontsize=9.5, fontweight="bold")
        _scale(grid[:, 0], ends)
        grid[-1][0].set_xticks(range(len(depths)), [f"K = {k}" for k in depths])
        title = f"{experiment.name}: what each factor adds, over all orders, on {facts.gpu}"
        figure.text(0.2 / width, 1 - 0.26 / height, title, fontsize=12, fontweight="bold", va="center")
        what = "Shapley value with its 95 % interval, and its share of the whole gain; hatched where not clear of the floor"
        figure.text(0.2 / width, 1 - 0.5 / height, what, fontsize=8, color="#555555", va="center")
        handles = [Patch(facecolor=COLOURS[i % len(COLOURS)], label=label) for i, label in enumerate(labels)]
        plots.legend(figure, handles, across, 0.3)
        plots.footer(figure, facts, used, stale)
    return figure


def _bars(axes: Axes, rows: Mapping[tuple[str, int], Any], factors: list[str], depths: list[int]) -> list[float]:
    """The bars of one M = N; returns the ends of what was drawn, as log-ratios."""
    wide = GROUP / len(factors)
    drawn = [0.0]
    for place, k in enumerate(depths):
        here = {factor: rows[factor, k] for factor in factors}
        gone = [row for row in here.values() if row is None or pd.isna(row["gain_percent"])]
        if len(gone) == len(factors):
            word = "not run" if gone[0] is None else gone[0]["status"]
            axes.text(
                place, 0.01, "\n".join(textwrap.wrap(word, 12)), ha="center", va="bottom", fontsize=7, color="#666666"
            )
            continue
        for i, (_, row) in enumerate(here.items()):
            if row is None or pd.isna(row["gain_percent"]):
                continue
            x, value = place - GROUP / 2 + (i + 0.5) * wide, float(row["gain_log"])
            clear = row["verdict"] in ("faster", "slower")
            colour = COLOURS[i % len(COLOURS)]
            fill: dict[str, Any] = (
                {"color": colour} if clear else {"facecolor": "white", "edgecolor": colour, "hatch": plots.DOUBT}
            )
            axes.bar(x, value, 0.92 * wide, linewidth=0.6, **fill)
            low, high = value, value
            if pd.notna(row["high_percent"]):
                low, high = (math.log1p(float(row[f"{end}_percent"]) / 100) for end in ("low", "high"))
                axes.plot([x, x], [low, high], color=plots.INK, linewidth=1)
            if pd.notna(row["share_percent"]):
                above = value >= 0
                axes.annotate(
                    f"{round(row['share_percent'])} %".replace("-", "\N{MINUS SIGN}"),
                    (x, high if above else low),
                    xytext=(0, 2 if above else -2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                    fontsize=6.5,
                )
            drawn += [low, high]
    axes.axhline(0, color=plots.INK, linewidth=0.8)
    axes.set_xlim(-0.5, len(depths) - 0.5)
    return drawn


def _scale(panels: Any, ends: list[float]) -> None:
    """One axis of logarithms for all panels, its ticks gains in percent, with room for the shares above the bars."""
    low, high = min(ends), max(max(ends), 0.05)
    room = 0.14 * (high - low)
    low, high = (low - room if low < 0 else low), high + 1.6 * room
    ticks = [tick for tick in TICKS if low <= math.log1p(tick / 100) <= high]
    while len(ticks) > 9:
        ticks = [tick for i, tick in enumerate(ticks) if i % 2 == ticks.index(0) % 2]
    for axes in panels:
        axes.set_ylim(low, high)
        axes.set_yticks(
            [math.log1p(tick / 100) for tick in ticks],
            [f"{tick:+d} %".replace("-", "\N{MINUS SIGN}") if tick else "0 %" for tick in ticks],
        )
        axes.tick_params(length=0, labelsize=8)
        axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["left", "right", "top", "bottom"]].set_visible(False)
        axes.set_ylabel("gain")
