"""Figures of an experiment that is no GEMM: lines over one axis of its points, for its own figures to build on."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rungs import answers, tables
from rungs.errors import RungsError
from rungs.tables import Source
from rungs.variants import GEMM, load_experiment

if TYPE_CHECKING:  # matplotlib is imported by what draws: the pages of the same answers need none
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2974c0", "#b05b20", "#33858d", "#7a5195", "#5c8a3a", "#c2487d", "#8a7430", "#4a4a4a")
"""Of lines, in their order; told apart by every kind of colour vision together with the markers."""
MARKERS = "osD^vP*X"


def draw(results: Path, experiment_name: str, name: str, stale: Mapping[str, str]) -> None:
    """Draw `figures/<experiment>/<name>.svg` and `.png`. Raises RungsError for a figure that the experiment has not."""
    from rungs import plots

    if load_experiment(experiment_name).workload == GEMM:
        raise RungsError(f"{experiment_name} is a GEMM and has no points: draw its heatmap, ladder or waterfall.")
    source = tables.read_source(results, experiment_name, stale)
    figures = answers.of(source.experiment).FIGURES
    if name not in figures:
        raise RungsError(f"{experiment_name} has no figure {name!r}: choose one of {', '.join(figures)}.")
    plots.save(figures[name](source), results / "figures" / experiment_name / name)


def style(index: int) -> dict[str, Any]:
    """Colour and marker of the line of that number."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index // len(COLOURS) % len(MARKERS)] if index >= len(COLOURS) else "o",
        "markersize": 3.5,
        "linewidth": 1.3,
    }


def sheet(
    title: str, note: str, panels: int = 1, width: float = 8.4, height: float = 4.6
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels side by side, its title above and the note on how it was measured below."""
    from matplotlib import pyplot as plt

    from rungs import plots

    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(1, panels, figsize=(width, height), squeeze=False)
        lines = textwrap.wrap(note, int(width * 17))
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.2 / width,
            top=1 - 0.75 / height,
            bottom=(0.62 + 0.13 * len(lines)) / height,
            wspace=0.28,
        )
        figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", va="center")
        figure.text(0.2 / width, 0.08 / height, "\n".join(lines), fontsize=7, color="#555555", va="bottom")
        for axes in grid[0]:
            axes.grid(True, color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
    return figure, list(grid[0])


def note_of(source: Source, variants: Sequence[str]) -> str:
    """On what, when and how the variants were measured."""
    used = [row for row in source.rows("points") if row["variant"] in variants]
    text = tables.provenance_line(source, used, list(variants))
    old = [name for name in variants if name in source.stale]
    return text + (f" Stale: {', '.join(old)}." if old else "")
