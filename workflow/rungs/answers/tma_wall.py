"""The copy engine's wall: bytes per second over tile, CTAs and stages until the curve is flat, and what of a copy's form costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rungs import curves, published, tables
from rungs.tables import Row, Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WALL = 95.0
"""Percent of the read ceiling at which the curve counts as flat."""
DRAM, L2 = 262144, 16384
"""Payloads in KiB that lie beyond L2 and in it."""
FORMS = {"1D": "WM0", "2D": "WM2"}
"""Kind of map -> the rung that the curves are of."""
H800_SMS = 114
FEW = 0.75
"""Share of the warps alive without clusters under which not all clusters can have run at once."""
GIB = 1 << 30


def sections(source: Source) -> list[str]:
    parts = {
        "The wall": wall_tables(source),
        "Bytes under way": under_way_table(source),
        "The form of a copy": form_table(source),
    }
    return [f"## {head}\n\n{text}" for head, text in parts.items()]


def blocks(source: Source) -> dict[str, str]:
    return {"wall": wall_tables(source), "under_way": under_way_table(source), "form": form_table(source)}


def timed(source: Source, payload: int = DRAM) -> list[Row]:
    """Loads of that payload that have a time."""
    return [
        row
        for row in source.rows("points")
        if row["gb_per_s"] is not None
        and row["payload_kib"] == payload
        and source.experiment.variant(row["variant"]).level("direction") == 0
    ]


def ceiling(source: Source) -> float:
    """The most GB/s that any load reads from memory: what the walls are held against."""
    return max((row["gb_per_s"] for row in timed(source)), default=0.0)


def under_way(row: Row) -> int:
    """Bytes that an SM has under way at a point."""
    return int(row["tile_bytes"] * row["stages"] * row["ctas_per_sm"])


def of_rung(source: Source, rung: str, rows: Iterable[Row]) -> list[Row]:
    name = source.experiment.variant(rung).name
    return [row for row in rows if row["variant"] == name]


def wall_tables(source: Source) -> str:
    """One tile under way per CTA, over tiles and CTAs, beside the H800 of Luo et al."""
    made, top = [], ceiling(source)
    theirs = published.tma_throughput()
    for kind, rung in FORMS.items():
        rows = [row for row in of_rung(source, rung, timed(source)) if row["stages"] == 1]
        tiles, ctas = (sorted({row[axis] for row in rows}) for axis in ("tile_bytes", "ctas_per_sm"))
        cells = {(row["tile_bytes"], row["ctas_per_sm"]): row for row in rows}
        body = []
        for tile in tiles:
            line = [f"{tile // 1024} KiB"]
            for count in ctas:
                row, beside = cells.get((tile, count)), luo(theirs, kind, tile, count)
                own = (
                    "not run"
                    if row is None
                    else f"{row['gb_per_s']:.4g} ({row['gb_per_s'] / top * 100:.0f} %){_mark(source, row)}"
                )
                line.append(own + (f"; H800 {beside:.0f}" if beside else ""))
            body.append(line)
        head = (
            f"{kind} ({rung}), 256 MiB, one tile under way per CTA: GB/s read, in brackets the share of the read ceiling of"
            f" {top:.4g} GB/s, the most that any load of this experiment read of such a payload, and what Luo et al. report for an H800 PCIe."
        )
        headers = ["tile", *(f"{count} per SM" for count in ctas)]
        made.append(
            tables.table(
                source, head, headers, body, wall_sentence(kind, rows, top), rows, {r["variant"] for r in rows}
            )
        )
    return "\n\n".join(made)


def luo(rows: Sequence[Mapping[str, float]], kind: str, tile: int, ctas_per_sm: int) -> float | None:
    """GB/s that Luo et al. report at that tile with as many CTAs for each of the H800's 114 SMs; None where they have no row."""
    for row in rows:
        if (row["kind"], row["tile_bytes"], row["ctas"]) == (kind, tile, ctas_per_sm * H800_SMS):
            return row["gib_per_s"] * GIB / 1e9
    return None


def wall_sentence(kind: str, rows: Sequence[Row], top: float) -> str:
    reached = [row for row in rows if row["gb_per_s"] >= WALL / 100 * top]
    if not rows:
        return f"No {kind} loads were timed."
    best = max(rows, key=lambda row: row["gb_per_s"])
    if not reached:
        return (
            f"With one tile under way per CTA {kind} loads do not reach {WALL:.0f} % of the read ceiling: the most is"
            f" {best['gb_per_s']:.4g} GB/s, {best['gb_per_s'] / top * 100:.1f} %, at {best['tile_bytes'] // 1024} KiB and"
            f" {best['ctas_per_sm']} CTAs per SM."
        )
    first = min(reached, key=under_way)
    return (
        f"{kind} loads reach {WALL:.0f} % of the read ceiling from {under_way(first) // 1024} KiB under way per SM"
        f" ({first['tile_bytes'] // 1024} KiB, {first['ctas_per_sm']} CTAs), and the most is {best['gb_per_s']:.4g} GB/s."
    )


def under_way_table(source: Source) -> str:
    """GB/s by bytes under way per SM, whatever they are made of: the spread says whether anything else matters."""
    top = ceiling(source)
    rows = [row for rung in FORMS.values() for row in of_rung(source, rung, timed(source))]
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(under_way(row), []).append(row)
    body = []
    for size in sorted(groups):
        here = sorted(groups[size], key=lambda row: row["gb_per_s"])
        low, high = here[0], here[-1]
        body.append(
            [
                f"{size // 1024} KiB",
                str(len(here)),
                f"{low['gb_per_s']:.4g} ({made_of(low)})",
                f"{high['gb_per_s']:.4g} ({made_of(high)})",
                f"{high['gb_per_s'] / top * 100:.0f} %",
            ]
        )
    head = "256 MiB from memory, 1D and 2D loads: bytes under way per SM are tile x stages x CTAs per SM."
    headers = ["under way per SM", "points", "least GB/s read", "most GB/s read", "of the read ceiling"]
    enough = [size for size in sorted(groups) if min(row["gb_per_s"] for row in groups[size]) >= WALL / 100 * top]
    if enough:
        sentence = (
            f"From {enough[0] // 1024} KiB under way per SM all of these reach {WALL:.0f} % of the read ceiling of {top:.4g} GB/s:"
            " that is the wall, and what the bytes are made of hardly matters behind it."
        )
    else:
        sentence = (
            f"No number of bytes under way brings every form to {WALL:.0f} % of the read ceiling of {top:.4g} GB/s."
        )
    return tables.table(source, head, headers, body, sentence, rows, {row["variant"] for row in rows})


def made_of(row: Row) -> str:
    return f"{row['tile_bytes'] // 1024} KiB x {row['stages']} x {row['ctas_per_sm']}"


def form_table(source: Source) -> str:
    """The step of every factor with tiles of 8 and 2 KiB, from memory and from L2, one CTA per SM with eight under way."""
    base = dict(source.experiment.base)
    points = [
        {**base, "tile_bytes": tile, "payload_kib": payload, "passes": passes}
        for payload, passes in ((DRAM, 1), (L2, 16))
        for tile in (8192, 2048)
    ]
    steps = source.rows("steps")
    rows, gains = [], []
    for ladder in source.experiment.ladders.values():
        for step in ladder.steps:
            cells = []
            for point in points:
                found = next(
                    (
                        row
                        for row in steps
                        if row["step"] == step.label
                        and row["ladder"] == ladder.name
                        and all(row[axis] == value for axis, value in point.items())
                    ),
                    None,
                )
                cells.append(tables.step_cell(source, found) if found else "")
                if found and found["verdict"] in ("faster", "slower"):
                    gains.append((abs(found["gain_percent"]), found))
            if any(cells):
                what = source.experiment.factors[step.factor].title
                rows.append([step.label, what, tables.change(source.experiment, step), *cells])
    head = (
        "Gain of each step with eight tiles under way in one CTA per SM. With multicast a byte counts once however many CTAs get it,"
        " and the rung without a cluster shares no tile."
    )
    headers = [
        "step",
        "factor",
        "from > to",
        *(f"{p['tile_bytes'] // 1024} KiB from {'memory' if p['payload_kib'] == DRAM else 'L2'}" for p in points),
    ]
    if gains:
        _, most = max(gains, key=lambda pair: pair[0])
        sentence = (
            f"Most is moved by {most['step']} ({most['factor']}), {tables.gain_text(most)} at {most['tile_bytes'] // 1024} KiB from"
            f" {'memory' if most['payload_kib'] == DRAM else 'L2'}; {len(gains)} of the cells are faster or slower, the others a"
            " tie or undecided."
        )
    else:
        sentence = "No step here is faster or slower."
    names = {variant.name for ladder in source.experiment.ladders.values() for variant in ladder.rungs.values()}
    used = [row for row in source.rows("points") if row["variant"] in names]
    return tables.table(source, head, headers, rows, sentence, used, names, waiting_notes(source))


def waiting_notes(source: Source) -> list[str]:
    """A sentence for each rung of which, by its counters, far fewer warps were alive at once than of the rung without clusters."""
    alive = warps_alive(source)
    name = {rung: source.experiment.variant(rung).name for rung in ("WC1", "WC2", "WC4")}
    base = alive.get(name["WC1"])
    return [
        f"By the counters {alive[name[rung]]:.0f} warps of {rung} were alive on average, of WC1 {base:.0f}: not all of its clusters fitted"
        " on the GPU at once, so some ran after the others, and its steps show that too."
        for rung in ("WC2", "WC4")
        if base and alive.get(name[rung], base) < FEW * base
    ]


def warps_alive(source: Source) -> dict[str, float]:
    """Variant -> warps alive on average over its profiled launch from memory: instructions x cycles of a warp for each / cycles."""
    found: dict[str, dict[str, float]] = {}
    for row in source.rows("counters"):
        if row["payload_kib"] == DRAM and row["value"] is not None:
            found.setdefault(row["variant"], {})[row["want"]] = row["value"]
    return {
        variant: counted["instructions"]
        * sum(value for want, value in counted.items() if want.startswith("stall "))
        / counted["SM cycles"]
        for variant, counted in found.items()
        if {"instructions", "SM cycles"} <= set(counted)
    }


def _mark(source: Source, row: Row) -> str:
    return tables.DAGGER if row["variant"] in source.stale else ""


# ---- figures ---------------------------------------------------------------------------------------------------------


def plot_wall(source: Source) -> Figure:
    """GB/s over tiles, a line for each number of CTAs, with Luo et al.'s H800 scaled to its own most."""
    top, theirs = ceiling(source), published.tma_throughput()
    names = [source.experiment.variant(rung).name for rung in FORMS.values()]
    note = curves.note_of(source, names) + " Dashed: Luo et al., H800 PCIe, as a share of its own most."
    figure, panels = curves.sheet("The wall: one tile under way per CTA", note, len(FORMS), 9.6, 4.6)
    for axes, (kind, rung) in zip(panels, FORMS.items(), strict=True):
        rows = [row for row in of_rung(source, rung, timed(source)) if row["stages"] == 1]
        most = max(row["gib_per_s"] for row in theirs)
        for index, count in enumerate(sorted({row["ctas_per_sm"] for row in rows})):
            look = curves.style(index)
            line = sorted(
                (row["tile_bytes"], row["gb_per_s"] / top * 100) for row in rows if row["ctas_per_sm"] == count
            )
            axes.plot(*zip(*line, strict=True), label=f"{count} CTA{'s' if count > 1 else ''} per SM", **look)
            beside = sorted(
                (r["tile_bytes"], r["gib_per_s"] / most * 100)
                for r in theirs
                if (r["kind"], r["ctas"]) == (kind, count * H800_SMS)
            )
            if beside:
                axes.plot(*zip(*beside, strict=True), color=look["color"], linestyle="--", linewidth=0.9)
        axes.axhline(WALL, color="#222222", linewidth=0.7, linestyle=":")
        axes.set_xscale("log", base=2)
        ticks = sorted({row["tile_bytes"] for row in rows})
        axes.set_xticks(ticks, [f"{tick // 1024} KiB" for tick in ticks])
        axes.set(xlabel="tile", ylabel="% of the read ceiling", title=f"{kind} loads, 256 MiB", ylim=(0, 106))
        axes.legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def plot_under_way(source: Source) -> Figure:
    """GB/s against bytes under way per SM, each form in its colour."""
    note = curves.note_of(source, [source.experiment.variant(rung).name for rung in FORMS.values()])
    figure, (axes,) = curves.sheet("Bytes under way per SM decide", note)
    ticks: set[int] = set()
    for index, (kind, rung) in enumerate(FORMS.items()):
        rows = of_rung(source, rung, timed(source))
        points = sorted((under_way(row), row["gb_per_s"]) for row in rows)
        ticks |= {size for size, _ in points}
        if points:
            axes.plot(
                *zip(*points, strict=True),
                label=f"{kind} loads",
                **{**curves.style(index), "linewidth": 0, "linestyle": ""},
            )
    axes.axhline(
        ceiling(source) * WALL / 100,
        color="#222222",
        linewidth=0.7,
        linestyle=":",
        label=f"{WALL:.0f} % of the read ceiling",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{tick // 1024}" for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set(xlabel="KiB under way per SM: tile x stages x CTAs", ylabel="GB/s", ylim=(0, None))
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")
    return figure


FIGURES = {"wall": plot_wall, "under_way": plot_under_way}
