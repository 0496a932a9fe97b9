"""When loading ahead pays: the seed's intensity table, what its pipe2 is made of on this GPU, and where overlap does pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rungs import curves, published, tables
from rungs.tables import Row, Source
from rungs.variants import Variant
from rungs.workloads import copy_intensity
from rungs.workloads.copy_intensity import SEED_RUNGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL, LARGE = 16384, 1048576
"""Payloads in KiB: the seed's, and one far beyond L2."""
SEED_GRID, PER_SM, FULL = 0, 2, 8
"""Values of the axis `grid`: the seed's 64 CTAs, two for each SM, and as many as an SM has threads for."""
GOAL_SHARE, GOAL_SPEEDUP = 95.0, 1.5
"""What the best pipelined mode should reach at 1 GiB: percent of the read ceiling, and times the seed's sync mode."""
FLOP_PER_BYTE = 2 / 8
"""Per multiply-add of an element: two operations, four bytes read and four written."""

Cells = Mapping[tuple[str, int, int, int], Row]


def cells_of(source: Source) -> Cells:
    """(variant, fma_iters, payload_kib, grid) -> row, of what was timed."""
    return {
        (row["variant"], row["fma_iters"], row["payload_kib"], row["grid"]): row
        for row in source.rows("points")
        if row["time_us"] is not None
    }


def sections(source: Source) -> list[str]:
    heads = {
        "Intensity": intensity_table(source, SEED_GRID) + "\n\n" + intensity_table(source, PER_SM),
        "What the seed's pipe2 is made of": factor_table(source),
        "Where loading ahead pays": ahead_table(source),
    }
    return [f"## {head}\n\n{text}" for head, text in heads.items()]


def blocks(source: Source) -> dict[str, str]:
    return {
        "seed": intensity_table(source, SEED_GRID),
        "intensity": intensity_table(source, PER_SM),
        "factors": factor_table(source),
        "ahead": ahead_table(source),
    }


# ---- the seed's table ------------------------------------------------------------------------------------------------


def seed_rows(source: Source, grid: int) -> list[dict[str, float | int]]:
    """The seed's CSV columns at its payload and that grid, from our points."""
    cells, modes = cells_of(source), copy_intensity.seed_rungs(source.experiment)
    times = {
        mode: {
            fma: row["time_us"]
            for (name, fma, payload, at), row in cells.items()
            if (name, payload, at) == (variant.name, SMALL, grid)
        }
        for mode, variant in modes.items()
    }
    return copy_intensity.seed_columns(times) if all(times.values()) else []


def grid_text(source: Source, grid: int) -> str:
    return source.experiment.point_axes["grid"].label(grid)


def intensity_table(source: Source, grid: int) -> str:
    """The seed's columns: times of its four modes and how many times as fast as sync the others are."""
    rows, names = seed_rows(source, grid), [v.name for v in copy_intensity.seed_rungs(source.experiment).values()]
    head = f"16 MiB in tiles of 4 KiB, {grid_text(source, grid)}: the columns of the seed's own table, by our kernels: sync is CP0,"
    head += " bulk1d CP2, tensor2d CP5 and pipe2 CP3."
    headers = [
        "fma_iters",
        *(f"{mode}_ms" for mode in SEED_RUNGS),
        *(f"speedup_{m}" for m in SEED_RUNGS if m != "sync"),
    ]
    body = [
        [
            str(row["fma_iters"]),
            *(f"{row[column]:.4f}" for column in headers[1:5]),
            *(f"{row[c]:.3f}" for c in headers[5:]),
        ]
        for row in rows
    ]
    used = [row for key, row in cells_of(source).items() if key[0] in names and key[2:] == (SMALL, grid)]
    return tables.table(source, head, headers, body, intensity_sentence(source, rows, grid), used, names)


def intensity_sentence(source: Source, rows: Sequence[Mapping[str, float | int]], grid: int) -> str:
    if not rows:
        return f"The seed's modes were not all timed with {grid_text(source, grid)}."
    first, last = rows[0], rows[-1]
    text = (
        f"With {grid_text(source, grid)} pipe2 is {first['speedup_pipe2']:.2f} times as fast as sync at"
        f" fma_iters {first['fma_iters']} and {last['speedup_pipe2']:.2f} times at {last['fma_iters']}"
    )
    theirs = {gpu: published.intensity(gpu) for gpu in ("rtx5090", "h200")}
    said = [
        f"{found[0]['speedup_pipe2']:.2f} on {name}"
        for gpu, name in (("rtx5090", "its author's RTX 5090"), ("h200", "an H200"))
        if (found := theirs[gpu])
    ]
    if grid == SEED_GRID and said:
        text += f", where the seed's own program gives {' and '.join(said)} at fma_iters 1"
    return f"{text}."


# ---- by factor -------------------------------------------------------------------------------------------------------


def factor_table(source: Source) -> str:
    """How many times as fast two stages of bulk copies are as sync at fma_iters 1, changing one thing at a time."""
    experiment, cells = source.experiment, cells_of(source)
    modes = copy_intensity.seed_rungs(experiment)
    wide = experiment.assign({**dict(modes["sync"].levels), "load": 2})
    deep = experiment.assign({**dict(modes["pipe2"].levels), "stages": 4})
    lines: list[tuple[str, Variant, Variant, int, int]] = [
        ("the seed's: 64 CTAs, loads of 4 bytes", modes["sync"], modes["pipe2"], SMALL, SEED_GRID),
        ("loads of 16 bytes in sync", wide, modes["pipe2"], SMALL, SEED_GRID),
        ("a CTA for each SM", modes["sync"], modes["pipe2"], SMALL, 1),
        ("two CTAs for each SM", modes["sync"], modes["pipe2"], SMALL, PER_SM),
        ("two CTAs for each SM, loads of 16 bytes", wide, modes["pipe2"], SMALL, PER_SM),
        ("two CTAs for each SM, no second buffer", modes["sync"], modes["bulk1d"], SMALL, PER_SM),
        ("two CTAs for each SM, four buffers", modes["sync"], deep, SMALL, PER_SM),
        ("1 GiB, beyond L2, two CTAs for each SM", modes["sync"], modes["pipe2"], LARGE, PER_SM),
        ("1 GiB, two CTAs for each SM, four buffers", modes["sync"], deep, LARGE, PER_SM),
        ("1 GiB, eight CTAs for each SM", modes["sync"], modes["pipe2"], LARGE, FULL),
    ]
    rows: list[list[str]] = []
    used: list[Row] = []
    ratios: dict[str, float] = {}
    for what, before, after, payload, grid in lines:
        known = (cells.get((variant.name, 1, payload, grid)) for variant in (before, after))
        pair = [row for row in known if row]
        if len(pair) == 2:
            used += pair
            ratios[what] = pair[0]["time_us"] / pair[1]["time_us"]
            shown = [f"{row['gb_per_s']:.4g}{_mark(source, row)}" for row in pair]
            rows.append([what, *shown, f"{ratios[what]:.2f}"])
    head = "fma_iters 1, tiles of 4 KiB; each line changes what it says and leaves the rest as the seed has it;"
    head += " GB/s are those read and written, sync is CP0, copies ahead CP3 unless it says otherwise."
    headers = ["what is changed", "sync, GB/s", "copies ahead, GB/s", "times as fast"]
    if ratios:
        best, least = (pick(ratios, key=lambda what: ratios[what]) for pick in (max, min))
        first = next(iter(ratios))
        sentence = (
            f"As the seed runs it the ratio is {ratios[first]:.2f}; of these it is largest with {best}, {ratios[best]:.2f}, and"
            f" smallest with {least}, {ratios[least]:.2f}."
        )
    else:
        sentence = "None of these was timed."
    return tables.table(source, head, headers, rows, sentence, used, {row["variant"] for row in used})


# ---- where it pays ---------------------------------------------------------------------------------------------------


def ceiling(source: Source, payload: int = LARGE) -> Row | None:
    """The fastest read of the payload that was measured: whatever loads it, nothing written but a sum."""
    reads = [
        row
        for (name, fma, at, _), row in cells_of(source).items()
        if (fma, at) == (1, payload) and source.experiment.variant(name).level("write") == 0
    ]
    return max(reads, key=lambda row: row["gb_per_s"], default=None)


def pipelined(variant: Variant) -> bool:
    """Whether loads run ahead of the arithmetic: more than one stage."""
    return variant.level("stages") > 1


def ahead_table(source: Source) -> str:
    """1 GiB at fma_iters 1: every way of reading and of copying at its best grid, beside the read ceiling and the seed's sync."""
    experiment, cells = source.experiment, cells_of(source)
    best: dict[str, Row] = {}
    for (name, fma, payload, _), row in cells.items():
        if (fma, payload) == (1, LARGE) and (name not in best or row["gb_per_s"] > best[name]["gb_per_s"]):
            best[name] = row
    top, sync = ceiling(source), cells.get((copy_intensity.seed_rungs(experiment)["sync"].name, 1, LARGE, PER_SM))
    rows = []
    for name in sorted(best, key=lambda name: -best[name]["gb_per_s"]):
        row, variant = best[name], experiment.variant(name)
        of_read = f"{row['gb_per_s'] / top['gb_per_s'] * 100:.1f} %" if top else ""
        written = variant.level("write") == 1
        times = f"{row['gb_per_s'] / sync['gb_per_s']:.2f}" if sync and written else ""
        share = "" if row["share_percent"] is None else f"{row['share_percent']:.1f} %"
        what = ", ".join(
            experiment.factors[f].levels[variant.level(f)].title
            for f in ("load", "stages", "producer", "tile", "write")
        )
        rung = " ".join(experiment.rung_names(variant)) or name
        cell = f"{row['gb_per_s']:.4g}{_mark(source, row)}"
        few = cells.get((name, 1, LARGE, PER_SM))
        at_two = f"{few['gb_per_s']:.4g}{_mark(source, few)}" if few else ""
        gain = f"{few['gb_per_s'] / sync['gb_per_s']:.2f}" if few and sync and written else ""
        grid = grid_text(source, row["grid"])
        rows.append([rung, what, at_two, gain, cell, grid, of_read, share if written else "", times])
    head = (
        "1 GiB, fma_iters 1: with two CTAs per SM, and at the best of the grids at which a variant was timed; bytes are those"
        " read and written, and sync is that of two CTAs per SM."
    )
    headers = ["rung", "what it is", "2 CTAs per SM, GB/s", "times sync", "most, GB/s", "with", "of the read ceiling"]
    headers += [f"of {source.facts.control}", "times sync"]
    names = list(best)
    return tables.table(
        source, head, headers, rows, ahead_sentence(source, best, top, sync), list(best.values()), names
    )


def ahead_sentence(source: Source, best: Mapping[str, Row], top: Row | None, sync: Row | None) -> str:
    """Whether the two goals are met: 95 % of the read ceiling by the best pipelined mode, and 1.5 times the seed's sync."""
    ahead = {name: row for name, row in best.items() if pipelined(source.experiment.variant(name))}
    reads = {name: row for name, row in ahead.items() if source.experiment.variant(name).level("write") == 0}
    copies = {name: row for name, row in ahead.items() if name not in reads}
    if not (reads and copies and top and sync):
        return "Not enough was timed to say where loading ahead pays."
    fastest, copy = (max(group, key=lambda name: group[name]["gb_per_s"]) for group in (reads, copies))
    share = reads[fastest]["gb_per_s"] / top["gb_per_s"] * 100
    times = copies[copy]["gb_per_s"] / sync["gb_per_s"]
    rung = {
        name: " ".join(source.experiment.rung_names(source.experiment.variant(name))) or name
        for name in (fastest, copy)
    }
    plain = max(
        (row for name, row in best.items() if name not in ahead and source.experiment.variant(name).level("write")),
        key=lambda row: row["gb_per_s"],
    )
    over = (copies[copy]["gb_per_s"] / plain["gb_per_s"] - 1) * 100
    return (
        f"The read ceiling is {top['gb_per_s']:.4g} GB/s; the best pipelined mode, {rung[fastest]}, reads at"
        f" {reads[fastest]['gb_per_s']:.4g}, {share:.1f} % of it, and {rung[copy]} copies {times:.2f} times as fast as the seed's"
        f" sync mode with two CTAs per SM, but only {over:.1f} % faster than the best mode that loads nothing ahead, which has"
        f" {grid_text(source, plain['grid'])}: there other warps hide what a second buffer would."
    )


def _mark(source: Source, row: Row) -> str:
    return tables.DAGGER if row["variant"] in source.stale else ""


# ---- figures ---------------------------------------------------------------------------------------------------------

SHOWN = ("CP2", "CP5", "CP3", "CP1", "CA1", "CA4", "CA5", "CA7", "CA10", "CP7")
"""Rungs of the figure `intensity`, beside sync."""


def plot_intensity(source: Source) -> Figure:
    """Speed-up over sync against fma_iters, at the seed's grid with the published curves, and with two CTAs for each SM."""
    experiment, cells = source.experiment, cells_of(source)
    sync = copy_intensity.seed_rungs(experiment)["sync"].name
    names = {rung: experiment.variant(rung).name for rung in SHOWN}
    note = curves.note_of(source, [sync, *names.values()])
    figure, panels = curves.sheet("Speed-up over the seed's sync mode against arithmetic intensity", note, 2, 10.4, 5.0)
    for axes, grid in zip(panels, (SEED_GRID, PER_SM), strict=True):
        base = {
            fma: row["time_us"]
            for (name, fma, payload, at), row in cells.items()
            if (name, payload, at) == (sync, SMALL, grid)
        }
        for index, (rung, name) in enumerate(names.items()):
            line = sorted(
                (fma, base[fma] / row["time_us"])
                for (other, fma, payload, at), row in cells.items()
                if (other, payload, at) == (name, SMALL, grid) and fma in base
            )
            if len(line) > 1:
                variant = experiment.variant(name)
                what = ", ".join(experiment.factors[f].levels[variant.level(f)].title for f in ("load", "stages"))
                axes.plot(*zip(*line, strict=True), label=f"{rung}: {what}", **curves.style(index))
        if grid == SEED_GRID:
            for gpu, mark in (("rtx5090", "--"), ("h200", ":")):
                rows = published.intensity(gpu)
                if rows:
                    line = [(int(row["fma_iters"]), row["speedup_pipe2"]) for row in rows]
                    label = f"seed's program, pipe2, {gpu.upper().replace('RTX', 'RTX ')}"
                    axes.plot(*zip(*line, strict=True), label=label, color="#222222", linestyle=mark, linewidth=1.2)
        axes.axhline(1.0, color="#222222", linewidth=0.7)
        axes.set_xscale("log", base=2)
        ticks = sorted(base)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="fma_iters", ylabel="times as fast as sync", title=f"16 MiB, {grid_text(source, grid)}")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + (high - low) * 0.45)  # room for the legend
        axes.legend(fontsize=6.5, frameon=False, loc="upper right", ncols=2)
        above = axes.secondary_xaxis(-0.2, functions=(_flop_per_byte, _fma_iters))
        above.set_xlabel("FLOP per byte", fontsize=8, labelpad=1)
        above.set_xscale("log", base=2)
        above.set_xticks(
            [tick * FLOP_PER_BYTE for tick in ticks], [f"{tick * FLOP_PER_BYTE:g}" for tick in ticks], fontsize=7
        )
        above.minorticks_off()
    figure.subplots_adjust(bottom=0.34)
    return figure


def _flop_per_byte(fma_iters: Any) -> Any:
    return fma_iters * FLOP_PER_BYTE


def _fma_iters(flop_per_byte: Any) -> Any:
    return flop_per_byte / FLOP_PER_BYTE


def plot_ahead(source: Source) -> Figure:
    """GB/s of 1 GiB along ladders CO and CR at their best grid, with the read ceiling."""
    experiment, cells = source.experiment, cells_of(source)
    rungs = [*experiment.ladders["CO"].rungs.items(), *experiment.ladders["CR"].rungs.items()]
    best: dict[str, Row] = {}
    few: dict[str, Row] = {}
    for rung, variant in rungs:
        if row := cells.get((variant.name, 1, LARGE, PER_SM)):
            few[rung] = row
        found = [
            row for (name, fma, payload, _), row in cells.items() if (name, fma, payload) == (variant.name, 1, LARGE)
        ]
        if found:
            best[rung] = max(found, key=lambda row: row["gb_per_s"])
    note = curves.note_of(source, [row["variant"] for row in best.values()])
    title = "1 GiB at fma_iters 1: two CTAs per SM, and as many as serve a rung best"
    figure, (axes,) = curves.sheet(title, note, 1, 10.4, 4.8)
    for index, (label, shown) in enumerate({"2 CTAs per SM": few, "best grid": best}.items()):
        places = {rung: at + (index - 0.5) * 0.42 for at, rung in enumerate(best) if rung in shown}
        values = [shown[rung]["gb_per_s"] for rung in places]
        axes.bar(list(places.values()), values, color=curves.COLOURS[index], width=0.4, label=label)
        for at, value in zip(places.values(), values, strict=True):
            axes.text(at, value, f"{value / 1000:.2f}", ha="center", va="bottom", fontsize=6.5)
    axes.legend(fontsize=7.5, frameon=False, loc="lower left", ncols=2, bbox_to_anchor=(0.0, 1.0))
    if top := ceiling(source):
        axes.axhline(top["gb_per_s"], color="#222222", linewidth=0.8, linestyle="--")
        axes.text(-0.5, top["gb_per_s"], "read ceiling", fontsize=7.5, va="bottom")
    axes.set_xticks(range(len(best)), list(best), fontsize=8)
    axes.set(
        ylabel="GB/s read and written", xlabel="CO: every element written; CR: read, and one sum per thread written"
    )
    axes.grid(False, axis="x")
    return figure


FIGURES = {"intensity": plot_intensity, "ahead": plot_ahead}
