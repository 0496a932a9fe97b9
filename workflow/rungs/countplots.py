"""Heat maps of the emulator's counts: what a rung costs per K tile of a CTA, over K and M = N."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rungs import plots
from rungs.countpages import made_from, tile_sizes
from rungs.counts import Cell, Shape, read_cells
from rungs.errors import RungsError
from rungs.variants import Ladder, in_words, load_experiment

ROWS: Mapping[str, tuple[Callable[[Cell], float], LogNorm]] = {
    "shared-memory wavefronts": (lambda cell: cell.wavefronts_per_tile, LogNorm(250, 6000)),
    "LSU instructions": (lambda cell: cell.lsu_per_tile, LogNorm(50, 1500)),
}
"""What a row of maps shows of a cell, per tile, and its scale of colour, the same in every figure."""


def draw(results: Path, experiment_name: str, name: str) -> None:
    """Draw `figures/<experiment>/counts_<ladder>.svg` and `.png`. Raises RungsError for a ladder that the experiment has not."""
    experiment = load_experiment(experiment_name)
    if name not in experiment.ladders:
        raise RungsError(f"{experiment_name} has no ladder {name!r}: choose one of {', '.join(experiment.ladders)}.")
    ladder = experiment.ladders[name]
    cells = read_cells(results, experiment_name)
    title = f"{experiment_name}, ladder {name}: counts per K tile of a CTA, from the emulator"
    labels = {rung: in_words(experiment, ladder, rung) for rung in ladder.rungs}
    note = made_from(results, experiment, [variant.name for variant in ladder.rungs.values()])
    if sizes := tile_sizes(experiment, ladder):
        note = f"{sizes[0].upper()}{sizes[1:]}. {note}"
    plots.save(plot(ladder, cells, labels, title, note), results / "figures" / experiment_name / f"counts_{name}")


def plot(
    ladder: Ladder, cells: Mapping[tuple[str, Shape], Cell], labels: Mapping[str, str], title: str, note: str
) -> Figure:
    """A column per rung and a row per count; `labels` says what a rung is."""
    shapes = {shape for name, shape in cells if name in {variant.name for variant in ladder.rungs.values()}}
    sizes, depths = sorted({(shape[0], shape[1]) for shape in shapes}), sorted({shape[2] for shape in shapes})
    across = len(ladder.rungs)
    panel_width, panel_height = 0.45 + 0.62 * len(sizes), 0.95 + 0.3 * len(depths)
    heads = {rung: textwrap.wrap(label, max(14, int(panel_width * 13))) for rung, label in labels.items()}
    top = 0.7 + 0.13 * max(len(lines) + 1 for lines in heads.values())  # inches
    width, height = max(7.0, across * panel_width + 0.9, 0.1 * len(title)), 2 * panel_height + 0.1 + top
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(2, across, figsize=(width, height), squeeze=False)
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.15 / width,
            top=1 - top / height,
            bottom=0.85 / height,
            wspace=0.25,
            hspace=0.75 / (panel_height - 0.75),
        )
        for i, (what, (value, norm)) in enumerate(ROWS.items()):
            for axes, (rung, variant) in zip(grid[i], ladder.rungs.items(), strict=True):
                here = {shape: cells.get((variant.name, shape)) for shape in shapes}
                _panel(axes, here, sizes, depths, value, norm)
                axes.set_title("\n".join([rung, *heads[rung]]) if i == 0 else rung, fontsize=7.5, pad=4)
                if axes is grid[i][0]:
                    axes.set_ylabel(f"{what}\nK", fontsize=8)
                else:
                    axes.set_yticklabels([])
                if i == len(ROWS) - 1:
                    axes.set_xlabel("M = N" if all(m == n for m, n in sizes) else "M x N", fontsize=8)
        figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", va="center")
        lines = textwrap.wrap(note, int(width * 17))
        figure.text(0.2 / width, 0.2 / height, "\n".join(lines), fontsize=7, color="#555555", va="center")
    return figure


def _panel(
    axes: Axes,
    cells: Mapping[Shape, Cell | None],
    sizes: list[plots.Size],
    depths: list[int],
    value: Callable[[Cell], float],
    norm: LogNorm,
) -> None:
    """One map; a cell without counts is hatched and says why."""
    shown = np.full((len(depths), len(sizes)), np.nan)
    for i, k in enumerate(depths):
        for j, size in enumerate(sizes):
            cell = cells.get((*size, k))
            if cell is None or cell.status != "ok":
                place = ((j + 0.02, i + 0.02), 0.96, 0.96)
                axes.add_patch(Rectangle(*place, facecolor="white", edgecolor="#b5b5b5", hatch=plots.GAP, linewidth=0))
                text, colour = "\n".join(textwrap.wrap(cell.status if cell else "not run", 11)), plots.FAINT
            else:
                shown[i, j] = value(cell)
                text = f"{shown[i, j]:.4g}"
                colour = "white" if norm(np.clip(shown[i, j], norm.vmin, norm.vmax)) > 0.45 else plots.INK
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=7, color=colour)
    axes.pcolormesh(np.ma.masked_invalid(shown), cmap=plots.DEPTHS, norm=norm, linewidth=1.5, edgecolor="white")
    axes.set(xlim=(0, len(sizes)), ylim=(len(depths), 0))
    axes.set_xticks(np.arange(len(sizes)) + 0.5, [plots.label_of(size) for size in sizes])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [str(k) for k in depths])
    axes.tick_params(length=0, labelsize=7.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
