"""The figure of a comparison: every difference between two sets with its interval, a mark per shape and a colour per K."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from rungs.compare import Comparison, Shape, Verdict
from rungs.curves import COLOURS
from rungs.plots import DEPTHS, FAINT, INK, STYLE
from rungs.variants import GEMM

WIDEST = 60.0
"""Percent at which an axis ends: what lies beyond stands at its edge."""
FACES = {"more": None, "less": None, "tie": "white", "same run": "white"}
MARKS = {"more": ">", "less": "<", "tie": "o", "undecided": "x", "same run": "s", "none": "_"}


def plot(comparison: Comparison) -> Figure:
    """A panel per pair of sets and M = N (of an experiment that is no GEMM, per pair): a row per step and rung."""
    gemm = comparison.experiment.workload == GEMM
    sizes: list[Any] = sorted({shape[:2] for shape in comparison.shapes}, reverse=True) if gemm else [None]
    panels = [(pair, size) for pair in comparison.pairs for size in sizes]
    names = list(dict.fromkeys((line.ladder, line.what, line.name) for line in comparison.lines))
    labels = [name if what == "gain" else f"{name}, share" for _, what, name in names]
    depths = sorted({shape[2] if gemm else shape for shape in comparison.shapes}, key=str if not gemm else None)
    height = 1.75 + max(0.34, 0.062 * (len(depths) if gemm else 1)) * len(names)
    width = 1.2 + 3.1 * max(len(panels), 2)
    limit = min(WIDEST, 1.15 * max([2.0, *(_reach(verdict) for verdict in comparison.verdicts.values())]))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(width, height), sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=1.05 / width, right=1 - 0.15 / width, top=1 - 0.85 / height, bottom=0.85 / height, wspace=0.06
        )
        for axes, ((a, b), size) in zip(grid[0], panels, strict=True):
            for i, line in enumerate(comparison.lines):
                if size is not None and line.shape[:2] != size:
                    continue
                order = depths.index(line.shape[2] if gemm else line.shape)
                row = names.index((line.ladder, line.what, line.name))
                y = row + 0.66 * ((order + 0.5) / len(depths) - 0.5)
                _mark(axes, comparison.verdicts[i, a, b], y, _colour(order, len(depths), gemm), limit)
            where = (
                ""
                if size is None
                else f"\nM = N = {size[0]}"
                if size[0] == size[1]
                else f"\nM x N = {size[0]}x{size[1]}"
            )
            axes.set_title(f"{b} against {a}{where}", fontsize=9.5)
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.set_xlim(-limit, limit)
            axes.set_xticks([tick for tick in MaxNLocator(6).tick_values(-limit, limit) if abs(tick) <= limit])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_yticks(range(len(names)), labels, fontsize=7.5)
            axes.tick_params(length=0)
            axes.grid(axis="x", color="#ededed", linewidth=0.7)
            for row in range(1, len(names)):
                heavy = names[row][:2] != names[row - 1][:2]
                axes.axhline(row - 0.5, color=FAINT if heavy else "#ededed", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["left", "right", "top"]].set_visible(False)
            axes.set_xlabel("difference, %", fontsize=8)
        sets = "  ·  ".join(
            f"{each.label} {each.name}, {each.facts.gpu}, {each.facts.dates}" for each in comparison.sets
        )
        figure.text(
            0.15 / width,
            1 - 0.24 / height,
            f"{comparison.experiment.name}: gains and shares of the control",
            fontsize=12,
            fontweight="bold",
            va="center",
        )
        lines = "\n".join(textwrap.wrap(sets, int(width * 17)))
        figure.text(0.15 / width, 0.14 / height, lines, fontsize=6.5, color="#555555", va="center")
        handles = [
            Line2D([], [], color=_colour(i, len(depths), True), linewidth=2, label=f"K = {depth}")
            for i, depth in enumerate(depths if gemm else ())
        ]
        for word, mark in MARKS.items():
            if any(verdict.word == word and verdict.difference is not None for verdict in comparison.verdicts.values()):
                label = {"none": "no claim"}.get(word, word)
                handles.append(
                    Line2D(
                        [],
                        [],
                        color=INK,
                        marker=mark,
                        markersize=4.5,
                        linestyle="none",
                        markerfacecolor=FACES.get(word, INK) or INK,
                        label=label,
                    )
                )
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.1 / width, 0.22 / height),
            ncols=max(len(handles), 1),
            frameon=False,
            fontsize=7.5,
            handlelength=1.2,
            columnspacing=1.1,
        )
    return figure


def _reach(verdict: Verdict) -> float:
    """How far from 0 the mark reaches, in percent."""
    return max(map(abs, verdict.interval or (verdict.difference or 0.0,)))


def _colour(order: int, count: int, gemm: bool) -> Any:
    return DEPTHS((order + 1) / (count + 1)) if gemm else COLOURS[0]


def _mark(axes: Axes, verdict: Verdict, y: float, colour: Any, limit: float) -> None:
    """The difference with the interval that its verdict uses; at the edge where it lies beyond."""
    if verdict.difference is None:
        return
    if verdict.interval:
        low, high = (min(max(bound, -limit), limit) for bound in verdict.interval)
        axes.plot([low, high], [y, y], color=colour, linewidth=1.0)
    face = FACES.get(verdict.word, colour)
    x = min(max(verdict.difference, -limit), limit)
    axes.plot([x], [y], marker=MARKS[verdict.word], markersize=4, color=colour, markerfacecolor=face or colour)


__all__ = ["Shape", "plot"]
