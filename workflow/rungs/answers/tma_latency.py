"""What one load costs one thread: latency by who carries it, cost of issuing it, and the first touch of a tensor map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rungs import curves, published, tables
from rungs.results import ResultsSet
from rungs.tables import Row, Source
from rungs.workloads import tma_latency
from rungs.workloads.tma_latency import FIRST_TOUCH, ISSUE, LATENCY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BESIDE_L2 = ("L2 latency near", "L2 latency far")
BESIDE_DRAM = "global-memory latency"
TMA_OVER_LDG = ("TMA latency over LDG at an L2 hit (from raw logs)", "TMA latency over LDG at DRAM (from raw logs)")


def sections(source: Source) -> list[str]:
    parts = {
        "Latency": latency_table(source),
        "Issue": issue_table(source),
        "A tensor map's first use": first_table(source),
    }
    return [f"## {head}\n\n{text}" for head, text in parts.items()]


def blocks(source: Source) -> dict[str, str]:
    return {"latency": latency_table(source), "issue": issue_table(source), "first": first_table(source)}


def counted(source: Source, what: int) -> list[Row]:
    """Rows that have cycles, of the variants that time this."""
    return [
        row
        for row in source.rows("points")
        if row["cycles"] is not None and source.experiment.variant(row["variant"]).level("what") == what
    ]


def where_of(row: Row) -> tuple[int, int]:
    return row["cold"], row["footprint_kib"]


def where_text(cold: int, footprint_kib: int) -> str:
    size = f"{footprint_kib} KiB" if footprint_kib < 1024 else f"{footprint_kib // 1024} MiB"
    return f"{'DRAM' if cold else 'L2'}, {size}"


def title(source: Source, name: str, *factors: str) -> str:
    variant = source.experiment.variant(name)
    own = variant.level("load") in (tma_latency.LDG, tma_latency.CP_ASYNC)  # which nobody is elected for
    named = (f for f in factors if not (own and f == "issue"))
    return ", ".join(source.experiment.factors[f].levels[variant.level(f)].title for f in named)


def rung_of(source: Source, name: str) -> str:
    return " ".join(source.experiment.rung_names(source.experiment.variant(name))) or name


def latency_table(source: Source) -> str:
    """Cycles of a dependent load of 16 bytes by where the data lie, and how much over LDG."""
    rows = [row for row in counted(source, LATENCY) if row["bytes"] == 16]
    places = sorted({where_of(row) for row in rows})
    cells = {(row["variant"], where_of(row)): row for row in rows}
    names = list(dict.fromkeys(row["variant"] for row in rows))
    ldg = next((n for n in names if source.experiment.variant(n).level("load") == tma_latency.LDG), None)
    body = []
    for name in names:
        line = [rung_of(source, name), title(source, name, "load", "issue")]
        for place in places:
            row, base = cells.get((name, place)), cells.get((ldg, place)) if ldg else None
            over = f" ({row['cycles'] - base['cycles']:+.0f})" if row and base and name != ldg else ""
            line.append("not run" if row is None else f"{row['cycles']:.0f}{over}{_mark(source, row)}")
        body.append(line)
    theirs = published.hopper_latencies()
    head = (
        "Cycles from one load to the next that depends on it, 16 bytes, in brackets over LDG. Luo et al. give"
        f" {theirs[BESIDE_L2[0]]:.0f} to {theirs[BESIDE_L2[1]]:.0f} for LDG from L2 and {theirs[BESIDE_DRAM]:.0f} from memory, and"
        f" {theirs[TMA_OVER_LDG[0]]:+.0f} and {theirs[TMA_OVER_LDG[1]]:+.0f} for TMA over it (H800)."
    )
    headers = ["rung", "what it is", *(where_text(*place) for place in places)]
    return tables.table(source, head, headers, body, latency_sentence(source, cells, names, ldg), rows, names)


def latency_sentence(
    source: Source, cells: dict[tuple[str, tuple[int, int]], Row], names: Sequence[str], ldg: str | None
) -> str:
    said = []
    for place, word in (((0, 8192), "an L2 hit (8 MiB)"), ((1, 8192), "DRAM (8 MiB)")):
        base = cells.get((ldg, place)) if ldg else None
        others = {
            n: cells[n, place]
            for n in names
            if (n, place) in cells and n != ldg and source.experiment.variant(n).level("issue") == 0
        }
        if base and others:
            text = ", ".join(
                f"{title(source, n, 'load')} {row['cycles'] - base['cycles']:+.0f}" for n, row in others.items()
            )
            said.append(f"at {word} LDG takes {base['cycles']:.0f} cycles and over it {text}")
    joined = "; ".join(said)
    return f"{joined[0].upper()}{joined[1:]}." if said else "No latency was counted."


def issue_table(source: Source) -> str:
    """Cycles of the issuing thread for each of 16 loads, by elect.sync and by threadIdx.x == 0."""
    rows = [row for row in counted(source, ISSUE) if row["cold"] == 0]
    sizes = sorted({row["bytes"] for row in rows})
    cells = {(row["variant"], row["bytes"]): row for row in rows}
    names = list(dict.fromkeys(row["variant"] for row in rows))
    body = [
        [
            rung_of(source, name),
            title(source, name, "load", "issue"),
            *(
                f"{cells[name, size]['cycles']:.1f}{_mark(source, cells[name, size])}" if (name, size) in cells else ""
                for size in sizes
            ),
        ]
        for name in names
    ]
    head = "Cycles of the issuing thread for one load, of 16 in a row, data in L2, by bytes of a load."
    headers = ["rung", "what it is", *(f"{size} B" for size in sizes)]
    least = min(rows, key=lambda row: row["cycles"], default=None)
    most = max(rows, key=lambda row: row["cycles"], default=None)
    if least and most:
        sentence = (
            f"A load costs its issuer from {least['cycles']:.1f} cycles ({title(source, least['variant'], 'load', 'issue')}) to"
            f" {most['cycles']:.1f} ({title(source, most['variant'], 'load', 'issue')}, {most['bytes']} B)"
        )
        pairs = [
            pair for load in (tma_latency.BULK, tma_latency.TENSOR) if len(pair := issuers(source, cells, load)) == 2
        ]
        said = [
            f"{pair[1]['cycles'] - pair[0]['cycles']:+.1f} for {title(source, pair[0]['variant'], 'load')}"
            for pair in pairs
        ]
        sentence += f"; threadIdx.x == 0 in place of elect.sync is {' and '.join(said)} cycles." if said else "."
    else:
        sentence = "No issue cost was counted."
    return tables.table(source, head, headers, body, sentence, rows, names)


def issuers(source: Source, cells: dict[tuple[str, int], Row], load: int) -> list[Row]:
    """A load of 16 bytes issued by elect.sync, and by threadIdx.x == 0."""
    found = {}
    for (name, size), row in cells.items():
        variant = source.experiment.variant(name)
        if size == 16 and variant.level("load") == load and variant.level("descriptor") == 0:
            found[variant.level("issue")] = row
    return [found[level] for level in sorted(found)]


def first_table(source: Source) -> str:
    """Cycles of the first load through a tensor map, by where the map lies and whether it was prefetched."""
    rows = counted(source, FIRST_TOUCH)
    names = list(dict.fromkeys(row["variant"] for row in rows))
    cells = {(row["variant"], where_of(row)): row for row in rows}
    places = sorted({where_of(row) for row in rows})
    body = [
        [
            rung_of(source, name),
            title(source, name, "descriptor"),
            *(
                f"{cells[name, place]['cycles']:.0f}{_mark(source, cells[name, place])}"
                if (name, place) in cells
                else ""
                for place in places
            ),
        ]
        for name in names
    ]
    head = (
        "Cycles of a kernel's first load through a tensor map, 16 bytes that lie in L2; and the same after 256 MiB have gone"
        " through L2, but for those bytes, which are read again before it."
    )
    headers = ["rung", "tensor map", *("L2 flushed before" if cold else "as launched" for cold, _ in places)]
    if costs := host_costs(source):
        head += (
            f" On the host a map that is encoded anew for each launch takes {costs['encode']:.2f} us, and"
            f" {costs['encode_and_send']:.2f} us where it is sent to global memory too."
        )
    plain, ahead = (cells.get((source.experiment.variant(rung).name, (0, 8192))) for rung in ("TF0", "TF1"))
    if plain and ahead:
        sentence = (
            f"A map passed by value costs its first load {plain['cycles']:.0f} cycles, and {ahead['cycles']:.0f} where"
            " prefetch.tensormap came before."
        )
    else:
        sentence = "The first load was not counted both ways."
    return tables.table(source, head, headers, body, sentence, rows, names)


def host_costs(source: Source) -> dict[str, float]:
    """Microseconds of the host per launch, `encode` and `encode_and_send`, from the manifest of TF0, whose map is by value, or else of
    another of its ladder; empty where none has them.
    """
    for variant in source.experiment.ladders["TF"].rungs.values():
        found, at = ResultsSet(source.results), ("sweep", source.experiment.name, variant.name)
        if found.has(*at) and (costs := found.manifest(*at).get("descriptor_us")):
            return dict(costs)
    return {}


def _mark(source: Source, row: Row) -> str:
    return tables.DAGGER if row["variant"] in source.stale else ""


# ---- figures ---------------------------------------------------------------------------------------------------------


def plot_latency(source: Source) -> Figure:
    """Bars of the latency of each load at an L2 hit and from memory, with Luo et al.'s figures as lines."""
    rows = [row for row in counted(source, LATENCY) if row["bytes"] == 16 and row["footprint_kib"] == 8192]
    rows = [row for row in rows if source.experiment.variant(row["variant"]).level("issue") == 0]
    names = list(dict.fromkeys(row["variant"] for row in rows))
    note = curves.note_of(source, names) + " Dashed: LDG of Luo et al., to L2 near and far, and to memory."
    figure, (axes,) = curves.sheet("Cycles from a load to the next that depends on it", note)
    theirs = published.hopper_latencies()
    for index, cold in enumerate((0, 1)):
        values = [next((r["cycles"] for r in rows if r["variant"] == n and r["cold"] == cold), 0.0) for n in names]
        places = [at + (index - 0.5) * 0.38 for at in range(len(names))]
        axes.bar(places, values, width=0.36, color=curves.COLOURS[index], label="DRAM" if cold else "L2")
        for at, value in zip(places, values, strict=True):
            axes.text(at, value, f"{value:.0f}", ha="center", va="bottom", fontsize=7.5)
    for quantity, colour in ((BESIDE_L2[0], 0), (BESIDE_L2[1], 0), (BESIDE_DRAM, 1)):
        axes.axhline(theirs[quantity], color=curves.COLOURS[colour], linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), [f"{rung_of(source, n)}\n{title(source, n, 'load')}" for n in names])
    axes.set(ylabel="cycles")
    axes.grid(False, axis="x")
    axes.legend(fontsize=7.5, frameon=False, loc="lower left", ncols=2, bbox_to_anchor=(0.0, 1.0))
    return figure


def plot_bytes(source: Source) -> Figure:
    """Latency and issue cost of the copy engine's loads over their bytes."""
    loads = (tma_latency.BULK, tma_latency.TENSOR)
    kinds = {"latency": LATENCY, "issue cost of one of 16": ISSUE}
    shown = [row for what in kinds.values() for row in counted(source, what)]
    shown = [row for row in shown if source.experiment.variant(row["variant"]).level("load") in loads]
    note = curves.note_of(source, list(dict.fromkeys(row["variant"] for row in shown)))
    figure, panels = curves.sheet("The copy engine's loads over their bytes", note, 2, 9.6, 4.4)
    for axes, (label, what) in zip(panels, kinds.items(), strict=True):
        here = [row for row in shown if source.experiment.variant(row["variant"]).level("what") == what]
        here = [
            row
            for row in here
            if row["footprint_kib"] == 8192 and source.experiment.variant(row["variant"]).level("issue") == 0
        ]
        for index, name in enumerate(dict.fromkeys(row["variant"] for row in here)):
            for cold in (0, 1):
                line = sorted(
                    (row["bytes"], row["cycles"]) for row in here if (row["variant"], row["cold"]) == (name, cold)
                )
                if line:
                    text = f"{title(source, name, 'load')}, {'DRAM' if cold else 'L2'}"
                    look = {"linestyle": "--", "markerfacecolor": "none", "markersize": 8} if cold else {}
                    axes.plot(*zip(*line, strict=True), label=text, **{**curves.style(index), **look})
        axes.set_xscale("log", base=2)
        ticks = sorted({row["bytes"] for row in here})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        top = max((row["cycles"] for row in here), default=1)
        axes.set(xlabel="bytes of a load", ylabel="cycles", title=label, ylim=(0, 1.08 * top))
        axes.legend(fontsize=7, frameon=False)
    return figure


FIGURES = {"latency": plot_latency, "bytes": plot_bytes}
