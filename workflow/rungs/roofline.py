"""The roofline of a ladder: each rung's TFLOP/s over the FLOP per byte of a shape's compulsory traffic, under the GPU's two ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rungs import answers, plots, tables
from rungs.aggregate import Facts, mhz_range
from rungs.curves import style
from rungs.plots import FAINT, INK, STYLE, Shape
from rungs.results import COLD, ResultsSet
from rungs.variants import Experiment, Ladder, load_device, load_experiment

ELEMENT_BYTES = 2
"""Of A, B and C, which are bf16 in every GEMM experiment."""
CEILINGS = ("tma_wall", "copy_intensity")
"""Experiments that read memory as fast as it goes."""
THIN = 0.8
"""Width of a line that only joins the marks of a rung."""


@dataclass(frozen=True)
class Ceiling:
    """Bytes that memory gives, in GB/s, and in words where the figure is from."""

    gb_per_s: float
    source: str


def intensity(shape: Shape) -> float:
    """FLOP per byte where A and B are read once and C is written once: no kernel moves less, most move more."""
    m, n, k = shape
    return 2 * m * n * k / (ELEMENT_BYTES * (m * k + n * k + m * n))


def sets_with_ceiling(results: Path) -> list[Path]:
    """Where a set's memory ceiling may lie: in itself, and of a cold set in the hot one of the same GPU."""
    hot = results.with_name(results.name.removesuffix(COLD))
    return list(dict.fromkeys([results, hot]))


def ceiling_of(results: Path, experiment: str) -> Ceiling | None:
    """The fastest read of memory that the set measured, else what the driver says of the memory, else None."""
    found = []
    for folder in sets_with_ceiling(results):
        for name in CEILINGS:
            if (folder / "data" / name / "points.csv").is_file():
                source = tables.read_source(folder, name)
                top = answers.of(load_experiment(name)).ceiling(source)
                speed = (top or {}).get("gb_per_s", 0.0) if isinstance(top, Mapping) or top is None else float(top)
                where = name if folder == results else f"{name} of the hot set"
                found += [Ceiling(speed, f"the most that {where} read, {source.facts.dates}")] if speed else []
        if found:
            return max(found, key=lambda ceiling: ceiling.gb_per_s)
    for manifest in ResultsSet(results).all_manifests("sweep", experiment).values():
        if said := manifest["gpu"].get("dram_gb_per_s"):
            return Ceiling(float(said), "memory clock and width as the driver says, not measured")
    return None


def draw(results: Path, experiment: Experiment, ladder: Ladder, stale: Mapping[str, str]) -> Figure:
    """The roofline of a ladder of a set."""
    from rungs.aggregate import facts_of, read_data

    names = [variant.name for variant in ladder.rungs.values()]
    manifests = list(ResultsSet(results).all_manifests("sweep", experiment.name, names).values())
    arch = manifests[0]["arch"] if manifests else ""
    sms = manifests[0]["gpu"].get("sms") if manifests else None
    facts = facts_of(results, experiment.name, names)
    ceiling = ceiling_of(results, experiment.name)
    return plot(experiment, ladder, read_data(results, experiment.name)["shapes"], facts, stale, ceiling, arch, sms)


def plot(
    experiment: Experiment,
    ladder: Ladder,
    shapes: pd.DataFrame,
    facts: Facts,
    stale: Mapping[str, str],
    ceiling: Ceiling | None,
    arch: str,
    sms: int | None,
) -> Figure:
    """A panel per M = N: a mark per rung and K, the control's beside them, memory's slope and the tensor cores' peak at the
    clocks that the rungs ran at.
    """
    frame = plots.rungs_of(shapes, ladder)
    timed = frame[frame["tflops"].notna()]
    sizes = sorted({(int(m), int(n)) for m, n in zip(frame["m"], frame["n"], strict=True)}, reverse=True)
    names = {variant.name: rung for rung, variant in ladder.rungs.items()}
    width, height = 0.95 + max(8.6, 3.2 * len(sizes)), 4.7
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(sizes), figsize=(width, height), sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=0.7 / width, right=1 - 0.15 / width, top=1 - 0.78 / height, bottom=1.38 / height, wspace=0.06
        )
        for axes, size in zip(grid[0], sizes, strict=True):
            here = timed[(timed["m"] == size[0]) & (timed["n"] == size[1])]
            depths = sorted(set(frame["k"][(frame["m"] == size[0]) & (frame["n"] == size[1])].astype(int)))
            _panel(axes, here, names, size, depths, ceiling, arch, sms, axes is grid[0][0])
        speeds = [*timed["tflops"], *timed["control_tflops"].dropna()]
        top = (
            load_device(arch).peak_tflops(float(timed["sm_mhz"].max()), sms)
            if arch and timed["sm_mhz"].notna().any()
            else 1.0
        )
        grid[0][0].set_ylim(0.55 * min(speeds, default=0.1), 1.6 * max([top, *speeds]))
        low, high = grid[0][0].get_ylim()
        ticks = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
        grid[0][0].set_yticks(shown := [tick for tick in ticks if low <= tick <= high], [f"{tick:g}" for tick in shown])
        grid[0][0].set_yticks([], minor=True)
        grid[0][0].set_ylabel("TFLOP/s")
        title = f"{experiment.name}, ladder {ladder.name}: roofline on {facts.gpu}"
        figure.text(0.2 / width, 1 - 0.28 / height, title, fontsize=12, fontweight="bold", va="center")
        handles = [
            Line2D([], [], label=f"{rung}†" if name in stale else rung, **{**style(i), "linewidth": THIN})
            for i, (name, rung) in enumerate(names.items())
        ]
        handles.append(Line2D([], [], color=INK, marker="_", linestyle="none", markersize=8, label=facts.control))
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.1 / width, 0.34 / height),
            ncols=max(1, min(len(handles), int(width / 0.85))),
            frameon=False,
            fontsize=7.5,
            handletextpad=0.2,
            columnspacing=1.0,
        )
        memory = f"memory: {ceiling.source}" if ceiling else "no memory ceiling is known to this set"
        plots.footer(figure, facts, frame, stale, f"{memory}  ·  peak: at the clocks of each panel's rungs")
    return figure


def _panel(
    axes: Axes,
    rows: pd.DataFrame,
    names: Mapping[str, str],
    size: tuple[int, int],
    depths: list[int],
    ceiling: Ceiling | None,
    arch: str,
    sms: int | None,
    first: bool,
) -> None:
    at = {k: intensity((*size, k)) for k in depths}
    low, high = 0.75 * min(at.values(), default=1.0), 1.35 * max(at.values(), default=10.0)
    clocks = rows["sm_mhz"].dropna().astype(float)
    peaks = (
        [load_device(arch).peak_tflops(mhz, sms) for mhz in (clocks.min(), clocks.max())]
        if arch and len(clocks)
        else []
    )
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    if peaks:
        axes.axhspan(*peaks, color="#d9dfe6", linewidth=0)
        axes.axhline(peaks[1], color=INK, linewidth=0.9)
        text = f"tensor cores at {mhz_range(rows)}: {' to '.join(dict.fromkeys(f'{peak:.0f}' for peak in peaks))}"
        axes.text(high * 0.97, peaks[1] * 1.05, text, ha="right", va="bottom", fontsize=6.5)
    if ceiling:
        ends = [low, min(high, peaks[1] * 1e3 / ceiling.gb_per_s) if peaks else high]
        if ends[1] > ends[0]:
            axes.plot(ends, [end * ceiling.gb_per_s / 1e3 for end in ends], color=INK, linewidth=0.9)
        if first or ends[1] > ends[0]:
            note = f"memory {ceiling.gb_per_s:.0f} GB/s" + ("" if ends[1] > ends[0] else ", left of here")
            axes.text(low * 1.03, 0.02, note, fontsize=6.5, va="bottom", transform=axes.get_xaxis_transform())
    for place, name in enumerate(names):
        group = rows[rows["variant"] == name].sort_values("k")
        axes.plot(
            [at[int(k)] for k in group["k"]], group["tflops"].astype(float), **{**style(place), "linewidth": THIN}
        )
    for k, group in rows.groupby("k"):
        if group["control_tflops"].notna().any():
            speed = float(group["control_tflops"].median())
            axes.plot([at[int(k)]], [speed], color=INK, marker="_", linestyle="none", markersize=9)
    for k in depths:
        if not (rows["k"] == k).any():
            axes.text(
                at[k],
                0.1,
                "no time",
                rotation=90,
                ha="center",
                fontsize=6,
                color=FAINT,
                transform=axes.get_xaxis_transform(),
            )
    axes.set_xticks(
        list(at.values()), [chr(10) * (i % 3) + f"{k}: {x:.0f}" for i, (k, x) in enumerate(at.items())], fontsize=6.5
    )
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", length=2)
    axes.grid(axis="y", color="#ededed", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)
    axes.set_title(f"M = N = {size[0]}" if size[0] == size[1] else f"M x N = {plots.label_of(size)}", fontsize=9.5)
    axes.set_xlabel("K: FLOP per byte of compulsory traffic", fontsize=7.5)
