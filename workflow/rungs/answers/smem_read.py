"""What reads of shared memory cost: ldmatrix beside ld.shared in every layout, the limit of 128 bytes a cycle, the latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rungs import curves, tables
from rungs.aggregate import WAVEFRONTS
from rungs.tables import Row, Source
from rungs.variants import Variant
from rungs.workloads import smem_read
from rungs.workloads.smem_read import Read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAGMENT_BYTES = 512
"""16x16 bf16: what a warp needs for one operand of an mma.m16n8k16, twice over for B."""
LIMIT = 128
"""Bytes that 32 banks of 4 bytes give an SM in a cycle (CUDA C++ Programming Guide 13.0, "Shared Memory")."""
LATENCY = 29.0
"""Cycles of a dependent shared-memory load on Hopper (Luo et al., arXiv 2402.13499 and 2501.12084)."""
LDS_WAVEFRONTS, LDSM_WAVEFRONTS = f"{WAVEFRONTS}ld.sum", f"{WAVEFRONTS}ldsm.sum"
LDS_COUNT, LDSM_COUNT = tables.LDS, tables.LDSM


@dataclass(frozen=True)
class Cost:
    """One variant at so many warps per SM. `cycles`: of the SM, for one warp access of `bytes`."""

    variant: Variant
    warps: int
    cycles: float
    bytes: int
    wavefronts: int

    @property
    def rate(self) -> float:
        """Bytes per cycle and SM."""
        return self.bytes / self.cycles

    @property
    def fragment(self) -> float:
        """SM cycles for a fragment."""
        return FRAGMENT_BYTES / self.rate

    @property
    def accesses(self) -> int:
        """Warp accesses for a fragment."""
        return FRAGMENT_BYTES // self.bytes


def costs_of(source: Source, dependent: bool = False) -> dict[tuple[str, int], Cost]:
    """(variant, warps) -> its cost, of what was counted."""
    found = {}
    for row in source.rows("points"):
        variant = source.experiment.variant(row["variant"])
        if row["cycles"] is None or smem_read.is_dependent(variant) != dependent:
            continue
        of = (source.experiment, variant)
        cycles = row["cycles"] if dependent else row["cycles"] / row["warps"]
        found[variant.name, row["warps"]] = Cost(
            variant, row["warps"], cycles, smem_read.bytes_per_access(*of), smem_read.predicted_wavefronts(*of)
        )
    return found


def title(source: Source, variant: Variant, *factors: str) -> str:
    levels = (source.experiment.factors[factor].levels[variant.level(factor)].title for factor in factors)
    return ", ".join(levels)


def sections(source: Source) -> list[str]:
    made = [saving_table(source), limit_table(source), latency_table(source)]
    heads = ("What ldmatrix saves", "The limit of 128 bytes a cycle", "Latency")
    return [f"## {head}\n\n{text}" for head, text in zip(heads, made, strict=True)]


def blocks(source: Source) -> dict[str, str]:
    return {"saving": saving_table(source), "limit": limit_table(source), "latency": latency_table(source)}


def counted_wavefronts(source: Source) -> dict[str, float]:
    """Variant -> wavefronts of one access as Nsight Compute counts them, where it was profiled."""
    counters: dict[str, dict[str, float]] = {}
    for row in source.rows("counters"):
        if row["value"] is not None:
            counters.setdefault(row["variant"], {})[row["metric"]] = float(row["value"])
    found = {}
    for name, values in counters.items():
        ldmatrix = Read(source.experiment.variant(name).level("read")).ldmatrix
        waves, count = (LDSM_WAVEFRONTS, LDSM_COUNT) if ldmatrix else (LDS_WAVEFRONTS, LDS_COUNT)
        if values.get(count) and waves in values:
            found[name] = values[waves] / values[count]
    return found


def pairs_of(source: Source, warps: int) -> list[tuple[Cost, Cost]]:
    """(ld.shared, ldmatrix.x4) of every tile and layout that has both, reading the same fragments."""
    costs = {cost.variant: cost for (_, at), cost in costs_of(source).items() if at == warps}
    plain, matrix = (Read.LDS_U16, Read.LDS_32), (Read.X4, Read.X4_TRANS)
    found = []
    for variant, cost in costs.items():
        if variant.level("read") in plain and variant.level("order") == 0:
            others = (
                other
                for other in costs.values()
                if other.variant.level("read") in matrix
                and all(other.variant.level(f) == variant.level(f) for f in ("tile", "layout", "order"))
            )
            found += [(cost, other) for other in others]
    return sorted(found, key=lambda pair: (pair[0].variant.level("tile"), pair[0].variant.level("layout")))


def saving_table(source: Source) -> str:
    """Seed 000's trap 2: what ldmatrix saves in instructions, in wavefronts and in time, per layout."""
    most = max((row["warps"] for row in source.rows("points")), default=32)
    pairs, counted = pairs_of(source, most), counted_wavefronts(source)
    rows, used = [], []
    for plain, matrix in pairs:
        for cost in (plain, matrix):
            name = cost.variant.name
            waves = cost.wavefronts * cost.accesses
            seen = f"{counted[name] * cost.accesses:.4g}" if name in counted else "not counted"
            used.append(name)
            rows.append(
                [
                    title(source, cost.variant, "tile", "layout"),
                    title(source, cost.variant, "read"),
                    str(cost.accesses),
                    str(waves),
                    seen,
                    _cell(source, name, f"{cost.fragment:.3g}"),
                    f"{cost.rate:.4g}",
                    "" if cost is plain else f"{tables.signed((1 - matrix.fragment / plain.fragment) * 100, 1)} %",
                ]
            )
    head = f"Reads of the same 16x16 fragments of 512 bytes, {most} warps per SM and nothing beside them."
    headers = ["tile, layout", "instruction", "instructions", "wavefronts by the bank rule", "wavefronts, ncu"]
    headers += ["SM cycles", "bytes per cycle", "time saved against the row above"]
    return tables.table(source, head, headers, rows, saving_sentence(source, pairs), _rows(source, used), used)


def saving_sentence(source: Source, pairs: list[tuple[Cost, Cost]]) -> str:
    if not pairs:
        return "No layout has both ld.shared and ldmatrix measured."
    same = [pair for pair in pairs if pair[0].wavefronts * pair[0].accesses == pair[1].wavefronts * pair[1].accesses]
    gain = {id(p): (1 - p[1].fragment / p[0].fragment) * 100 for p in pairs}
    low, high = (pick(pairs, key=lambda p: gain[id(p)]) for pick in (min, max))
    text = (
        f"ldmatrix.x4 needs {pairs[0][0].accesses // pairs[0][1].accesses} times fewer instructions than LDS.32 and 8 times"
        f" fewer than LDS.U16 everywhere, as many wavefronts in {len(same)} of {len(pairs)} layouts, and from"
        f" {abs(gain[id(low)]) if abs(gain[id(low)]) < 0.05 else gain[id(low)]:.1f} % ({title(source, low[0].variant, 'tile', 'layout')}) to {gain[id(high)]:.1f} %"
        f" ({title(source, high[0].variant, 'tile', 'layout')}) less time"
    )
    if same:
        worst = max(abs(gain[id(pair)]) for pair in same)
        text += f"; where the wavefronts are the same its time differs by at most {worst:.1f} %"
    return f"{text}."


def limit_table(source: Source) -> str:
    """Every variant without dependence by its best bytes per cycle."""
    best: dict[str, Cost] = {}
    for (name, _), cost in costs_of(source).items():
        if name not in best or cost.rate > best[name].rate:
            best[name] = cost
    order = sorted(best, key=lambda name: -best[name].rate)
    rows = []
    for name in order:
        cost = best[name]
        rows.append(
            [
                " ".join(source.experiment.rung_names(cost.variant)) or name,
                title(source, cost.variant, "tile", "layout", "read", "order"),
                str(cost.wavefronts),
                str(cost.warps),
                _cell(source, name, f"{cost.rate:.4g}"),
                f"{cost.rate / LIMIT * 100:.1f} %",
                f"{cost.rate * cost.wavefronts / cost.bytes * 100:.1f} %",
            ]
        )
    head = (
        f"Most bytes per cycle and SM over the numbers of warps; the limit is {LIMIT}. The last column is the share of what"
        " the wavefronts of the bank rule leave of it: one wavefront a cycle."
    )
    headers = ["rung", "what it is", "wavefronts per access", "warps", "bytes per cycle", "of 128", "of its wavefronts"]
    if not order:
        sentence = "Nothing was counted."
    else:
        top = best[order[0]]
        sentence = (
            f"The best rung, {rows[0][0]} ({rows[0][1]}), reads {top.rate:.4g} bytes per cycle and SM,"
            f" {top.rate / LIMIT * 100:.1f} % of the limit"
        )
        near = sum(cost.rate * cost.wavefronts / cost.bytes > 0.95 for cost in best.values())
        sentence += f"; {near} of {len(best)} variants reach 95 % of one wavefront a cycle."
    return tables.table(source, head, headers, rows, sentence, _rows(source, order), order)


def latency_table(source: Source) -> str:
    """Dependent reads by one warp, beside the published figure."""
    costs = costs_of(source, dependent=True)
    alone = {name: cost for (name, warps), cost in costs.items() if warps == 1}
    rows = [
        [
            " ".join(source.experiment.rung_names(cost.variant)) or name,
            title(source, cost.variant, "layout", "read", "order"),
            str(cost.wavefronts),
            _cell(source, name, f"{cost.cycles:.2f}"),
            f"{cost.cycles - LATENCY:+.2f}",
        ]
        for name, cost in alone.items()
    ]
    head = "One warp, each address from the access before."
    headers = ["rung", "what it is", "wavefronts", "cycles", f"beside the {LATENCY:g} of Luo et al. (H800)"]
    if not alone:
        sentence = "No latency was counted."
    else:
        low, high = (pick(alone.values(), key=lambda c: c.cycles) for pick in (min, max))
        sentence = (
            f"A dependent read takes from {low.cycles:.1f} cycles ({title(source, low.variant, 'layout', 'read')}) to"
            f" {high.cycles:.1f} ({title(source, high.variant, 'layout', 'read')}), where Luo et al. give {LATENCY:g}."
        )
    return tables.table(source, head, headers, rows, sentence, _rows(source, list(alone)), list(alone))


def _cell(source: Source, name: str, text: str) -> str:
    return text + (tables.DAGGER if name in source.stale else "")


def _rows(source: Source, names: list[str]) -> list[Row]:
    return [row for row in source.rows("points") if row["variant"] in names]


# ---- figures ---------------------------------------------------------------------------------------------------------

CONFLICT_FREE = ("W1", "W2", "W3", "W4", "W5", "W6", "X4", "X7", "V3")
"""Rungs of the figure `bandwidth`: one layout without conflicts for every instruction."""


def plot_bandwidth(source: Source) -> Figure:
    """Bytes per cycle and SM over warps, of instructions in layouts without conflicts."""
    costs = costs_of(source)
    names = {rung: source.experiment.variant(rung).name for rung in CONFLICT_FREE}
    shown = {rung: name for rung, name in names.items() if any(key[0] == name for key in costs)}
    note = curves.note_of(source, list(shown.values()))
    figure, (axes,) = curves.sheet("Bytes read from shared memory per cycle and SM", note)
    for index, (rung, name) in enumerate(shown.items()):
        line = sorted((cost.warps, cost.rate) for (key, _), cost in costs.items() if key == name)
        label = f"{rung}: {title(source, source.experiment.variant(name), 'layout', 'read')}"
        axes.plot(*zip(*line, strict=True), label=label, **curves.style(index))
    axes.axhline(LIMIT, color="#222222", linewidth=0.8, linestyle="--")
    axes.text(1, LIMIT * 1.01, "128 bytes: 32 banks of 4", fontsize=7.5, va="bottom")
    axes.set_xscale("log", base=2)
    warps = sorted({cost.warps for cost in costs.values()})
    axes.set_xticks(warps, [str(value) for value in warps])
    axes.set(xlabel="warps per SM", ylabel="bytes per cycle and SM", ylim=(0, LIMIT * 1.12))
    axes.legend(fontsize=7, frameon=False, loc="lower right", ncols=2)
    return figure


def plot_wavefronts(source: Source) -> Figure:
    """SM cycles of an access against the wavefronts that the bank rule gives it, at the most warps."""
    costs = costs_of(source)
    most = max((warps for _, warps in costs), default=0)
    here = [cost for (_, warps), cost in costs.items() if warps == most]
    note = curves.note_of(source, [cost.variant.name for cost in here])
    figure, (axes,) = curves.sheet(f"An access costs its wavefronts: {most} warps per SM", note)
    groups: Mapping[str, Callable[[Cost], bool]] = {
        "ld.shared": partial(_is, ldmatrix=False),
        "ldmatrix": partial(_is, ldmatrix=True),
    }
    for index, (label, wanted) in enumerate(groups.items()):
        points = sorted((cost.wavefronts, cost.cycles) for cost in here if wanted(cost))
        if points:
            ring = {"markerfacecolor": "none", "markersize": 9} if index else {}  # they lie on each other
            look: dict[str, Any] = {**curves.style(index), "linewidth": 0, "linestyle": "", **ring}
            axes.plot(*zip(*points, strict=True), label=label, **look)
    ends = [1, max((cost.wavefronts for cost in here), default=1)]
    axes.plot(ends, ends, color="#222222", linewidth=0.8, linestyle="--", label="one wavefront a cycle")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="wavefronts of a warp access by the bank rule", ylabel="SM cycles of a warp access")
    axes.legend(fontsize=7.5, frameon=False)
    return figure


def _is(cost: Cost, ldmatrix: bool) -> bool:
    return Read(cost.variant.level("read")).ldmatrix == ldmatrix


FIGURES = {"bandwidth": plot_bandwidth, "wavefronts": plot_wavefronts}
