"""Clock, power and temperature over one rung's job, round by round and shape by shape, with the rounds that were not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rungs import aggregate, plots
from rungs.aggregate import Facts, Recording
from rungs.errors import RungsError
from rungs.plots import FAINT, STYLE
from rungs.results import ResultsSet
from rungs.variants import GEMM, Experiment, load_experiment

MOST = 90
"""Marks of a line: rounds beyond it are drawn by their middle, with the lowest and the highest as a band."""
QUANTITIES = (
    ("sm_mhz", "SM clock, MHz", "#2974c0"),
    ("power_w", "board power, W", "#b05b20"),
    ("temp_c", "GPU, °C", "#33858d"),
)
FLAG, CAP = "#c2487d", "#8a7430"


@dataclass(frozen=True)
class Bin:
    """Some rounds of one shape, in the order of the job. A quantity's (lowest, middle, highest), NaN where nothing was read."""

    x: float
    values: Mapping[str, tuple[float, float, float]]
    flagged: bool
    capped: bool


JOB = "1"
"""The job that is drawn: the first of those that a floor is made of, which every set has but a quick one."""


def draw(results: Path, experiment_name: str, stale: Mapping[str, str]) -> None:
    """Draw `figures/<experiment>/clock_power.svg` and `.png` of the first floor job.

    Raises RungsError for an experiment that counts cycles, which reads no clock.
    """
    experiment = load_experiment(experiment_name)
    variant = experiment.floor_variant
    if "sweep" not in aggregate.timed_kind(experiment):
        raise RungsError(
            f"{experiment_name} counts cycles, whatever the clock is: it has no figure of clock and power."
        )
    job = ResultsSet(results).job("floor", experiment_name, JOB)
    recording = aggregate.read_recording(aggregate.timed_kind(experiment), job, variant.name)
    facts = aggregate.facts_of(results, experiment_name, [variant.name])
    plots.save(
        plot(experiment, recording, facts, stale), results / "figures" / experiment_name / "clock_power", coarse=True
    )


def bins_of(experiment: Experiment, frame: pd.DataFrame) -> tuple[list[Bin], list[tuple[float, str]]]:
    """The bins of a job and, per shape that was timed, where it begins and what it is."""
    timed = frame[frame["status"].isin(aggregate.USED)]
    shapes = list(timed.groupby(list(experiment.axis_names), sort=False))
    each = max(1, MOST // max(len(shapes), 1))
    bins: list[Bin] = []
    begins: list[tuple[float, str]] = []
    for point, rows in shapes:
        begins.append((len(bins) - 0.5, experiment.describe([int(value) for value in point])))
        rounds = sorted(set(rows["round"].astype(int)))
        for part in np.array_split(np.array(rounds), min(each, len(rounds))):
            here = rows[rows["round"].isin(part)]
            values = {name: _spread(here[name]) for name, _, _ in QUANTITIES}
            flagged = bool((here["status"] == "flagged").any())
            bins.append(Bin(len(bins), values, flagged, bool(here["throttle"].str.contains("power cap").any())))
    return bins, begins


def _spread(values: pd.Series) -> tuple[float, float, float]:
    read = values.dropna().to_numpy(dtype=float)
    return (float(read.min()), float(np.median(read)), float(read.max())) if len(read) else (np.nan,) * 3


def plot(experiment: Experiment, recording: Recording, facts: Facts, stale: Mapping[str, str]) -> Figure:
    """Three lines over the rounds of a job: SM clock, power, temperature."""
    frame, name = recording.frame, str(recording.manifest["variant"])
    bins, begins = bins_of(experiment, frame)
    rung = next(iter(experiment.rung_names(experiment.variant(name))), name)
    width, height = 8.4, 4.9
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(3, 1, figsize=(width, height), sharex=True, height_ratios=(2, 1.5, 1))
        figure.subplots_adjust(
            left=0.7 / width,
            right=1 - 0.15 / width,
            top=1 - 0.55 / height,
            bottom=(1.25 if experiment.workload == GEMM else 0.95) / height,
            hspace=0.12,
        )
        for axes, (quantity, label, colour) in zip(grid, QUANTITIES, strict=True):
            _line(axes, bins, quantity, colour)
            axes.set_ylabel(label, fontsize=7.5)
            axes.tick_params(length=0, labelsize=7)
            between = [
                end for x, _ in begins[1:] for end in ((x, 0), (x, 1), (np.nan, 0))
            ]  # one line with gaps: an SVG of a path
            axes.plot(*_columns(between), transform=axes.get_xaxis_transform(), color="#dcdcdc", linewidth=0.6)
            for bin in bins:
                if bin.flagged:
                    axes.axvspan(bin.x - 0.5, bin.x + 0.5, color=FLAG, alpha=0.25, linewidth=0)
            axes.grid(axis="y", color="#ededed", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["right", "top"]].set_visible(False)
        capped = [bin.x for bin in bins if bin.capped]
        ends = [(end, 0.015) for x in capped for end in (x - 0.4, x + 0.4, np.nan)]
        grid[0].plot(*_columns(ends), transform=grid[0].get_xaxis_transform(), color=CAP, linewidth=2.5)
        grid[-1].set_xlim(-0.5, max(len(bins), 1) - 0.5)
        _name_shapes(experiment, grid[-1], begins, len(bins))
        title = f"{experiment.name}, {rung}: clock and power over the job on {facts.gpu}"
        figure.text(0.2 / width, 1 - 0.26 / height, title, fontsize=12, fontweight="bold", va="center")
        count = int((frame["status"] == "flagged").sum())
        handles = [Line2D([], [], color=CAP, linewidth=2.5, label="at the power cap")] if capped else []
        if count:
            handles.append(Line2D([], [], color=FLAG, alpha=0.4, linewidth=5, label="flagged: not used"))
        if handles:
            figure.legend(
                handles=handles,
                loc="lower left",
                bbox_to_anchor=(0.1 / width, 0.3 / height),
                ncols=2,
                frameon=False,
                fontsize=7.5,
            )
        cells = pd.DataFrame({"variant": [name], "sm_mhz": [np.nan], "rounds": [np.nan]})
        timed = frame[frame["status"].isin(aggregate.USED)]
        cells = cells.assign(sm_mhz=timed["sm_mhz"].median(), rounds=timed["round"].max()) if len(timed) else cells
        each = f"{len(timed)} samples, {count} of them flagged; a band is from the lowest to the highest under a mark"
        plots.footer(figure, facts, cells, stale, each)
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _line(axes: Axes, bins: Sequence[Bin], quantity: str, colour: str) -> None:
    x = [bin.x for bin in bins]
    low, middle, high = zip(*(bin.values[quantity] for bin in bins), strict=True) if bins else ((), (), ())
    if bins and np.isfinite(middle).any():
        axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(x, middle, color=colour, linewidth=1.1)
    else:
        axes.text(0.5, 0.5, "not read", transform=axes.transAxes, ha="center", va="center", fontsize=8, color=FAINT)


def _name_shapes(experiment: Experiment, axes: Axes, begins: Sequence[tuple[float, str]], count: int) -> None:
    """Shapes of a GEMM by name, many points of another experiment by their number."""
    ends = [*(x for x, _ in begins[1:]), count - 0.5]
    middles = [(x + end) / 2 for (x, _), end in zip(begins, ends, strict=True)] if begins else []
    if experiment.workload == GEMM:
        axes.set_xticks(middles, [text.replace("x", "\n") for _, text in begins], fontsize=6)
        axes.set_xlabel("rounds of each shape (M, N, K), in the order of the job", fontsize=7.5)
    else:
        shown = range(0, len(begins), max(1, len(begins) // 12))
        axes.set_xticks([middles[i] for i in shown], [str(i + 1) for i in shown], fontsize=6.5)
        axes.set_xlabel(f"rounds of each of the {len(begins)} points, in the order of the job", fontsize=7.5)
