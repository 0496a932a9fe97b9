"""Which way of copying to use on the GPU at hand: the decision table of the seed (004, sections 4 and 8), from measurements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rungs import tables
from rungs.answers import copy_intensity as copies
from rungs.answers import tma_latency as latencies
from rungs.answers import tma_wall as walls
from rungs.answers.copy_intensity import LARGE, PER_SM, SMALL
from rungs.errors import RungsError
from rungs.tables import Row, Source
from rungs.variants import Variant
from rungs.workloads.copy_intensity import seed_rungs

NEAR = 3.0
"""Percent: modes this close are as good as each other, and the simplest of them is advised."""
WHERE = "16 MiB, 2 CTAs per SM"
EXPERIMENTS = ("copy_intensity", "tma_wall", "tma_latency")
PIPED = 400
"""Columns of the printed tables where standard output is no terminal."""
PAYLOADS = {SMALL: "16 MiB, in L2", LARGE: "1 GiB, from memory"}


@dataclass(frozen=True)
class Advice:
    """One line of the table: what one has, what to do on this GPU, and the figures that say so."""

    situation: str
    advice: str
    figures: str


def simplicity(variant: Variant) -> tuple[int, ...]:
    """Smaller is simpler: fewer levels of machinery first, then fewer stages, then the smaller tile."""
    order = {1: 0, 2: 1, 0: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    level = variant.level
    return level("producer"), order[level("load")], level("view"), level("stages"), level("tile")


def mode_text(source: Source, variant: Variant) -> str:
    """`cp.async, 2 stages, tile of 4 KiB`."""
    named = [source.experiment.factors[f].levels[variant.level(f)].title for f in ("load", "stages", "tile")]
    if variant.level("producer"):
        named.insert(2, "a producer warp")
    return ", ".join(named)


def best_of(source: Source, fma: int, payload: int, grid: int, tile: int | None = None) -> dict[str, Row]:
    """Variant -> its row, of those that go through shared memory and write every element."""
    found: dict[str, Row] = {}
    for (name, *at), row in copies.cells_of(source).items():
        variant = source.experiment.variant(name)
        fits = at == [fma, payload, grid] and variant.level("write") and variant.level("load") != 0
        if fits and (not tile or variant.level("tile") == tile):
            found[name] = row
    return found


def choose(source: Source, rows: Mapping[str, Row]) -> tuple[Variant, Row, Row]:
    """(variant to use, its row, the fastest row): the simplest within `NEAR` percent of the fastest."""
    fastest = max(rows.values(), key=lambda row: row["gb_per_s"])
    near = [name for name, row in rows.items() if row["gb_per_s"] >= fastest["gb_per_s"] * (1 - NEAR / 100)]
    name = min(near, key=lambda name: simplicity(source.experiment.variant(name)))
    return source.experiment.variant(name), rows[name], fastest


def by_intensity(source: Source) -> list[Advice]:
    """A line for each payload and intensity at which modes were timed; equal advice of neighbours in one."""
    found: list[Advice] = []
    for (payload, where), grid in itertools.product(PAYLOADS.items(), (PER_SM, copies.FULL)):
        runs: list[tuple[list[int], str, list[str]]] = []
        fmas = sorted({fma for (_, fma, at, _) in copies.cells_of(source) if at == payload})
        for fma in fmas:
            rows = best_of(source, fma, payload, grid)
            sync = rows.get(seed_rungs(source.experiment)["sync"].name)
            if len(rows) < 2 or sync is None:
                continue
            variant, row, fastest = choose(source, rows)
            gain = row["gb_per_s"] / sync["gb_per_s"]
            text = mode_text(source, variant)
            said = f"{row['gb_per_s']:.4g} GB/s at {fma}, {gain:.2f} times sync, fastest {fastest['gb_per_s']:.4g}"
            if runs and runs[-1][1] == text:
                runs[-1][0].append(fma)
                runs[-1][2].append(said)
            else:
                runs.append(([fma], text, [said]))
        for at, text, lines in runs:
            span = f"{at[0]}" if len(at) == 1 else f"{at[0]} to {at[-1]}"
            figures = lines[0] if len(lines) == 1 else f"{lines[0]}; {lines[-1]}"
            found.append(Advice(f"{where}, {copies.grid_text(source, grid)}, fma_iters {span}", text, figures))
    return found


def by_tile(source: Source) -> list[Advice]:
    """A line for each tile at fma_iters 1, from L2 and from memory."""
    found = []
    tiles = sorted(source.experiment.factors["tile"].levels)
    for payload, where in PAYLOADS.items():
        for tile in tiles:
            rows = best_of(source, 1, payload, PER_SM, tile)
            if len(rows) > 1:
                variant, row, fastest = choose(source, rows)
                figures = f"{row['gb_per_s']:.4g} GB/s, fastest {fastest['gb_per_s']:.4g}, of the {len(rows)} modes timed with it"
                found.append(Advice(f"{where}, tile of {tile // 1024} KiB", mode_text(source, variant), figures))
    return found


def seed_table(copy: Source, wall: Source | None, latency: Source | None) -> list[Advice]:
    """The seed's own situations (section 4) and mistakes (section 8), answered by this GPU's figures."""
    found: list[Advice] = []
    cells, modes = copies.cells_of(copy), seed_rungs(copy.experiment)
    at = {mode: cells.get((variant.name, 1, SMALL, PER_SM)) for mode, variant in modes.items()}
    ratios = {m: at["sync"]["time_us"] / row["time_us"] for m, row in at.items() if row and at["sync"]}
    if len(ratios) == len(modes):
        waiting, ahead = max(ratios["bulk1d"], ratios["tensor2d"]), ratios["pipe2"]
        said = f"bulk1d {ratios['bulk1d']:.2f}, tensor2d {ratios['tensor2d']:.2f}, pipe2 {ahead:.2f} times sync at fma_iters 1, {WHERE}"
        if ahead > 1 + NEAR / 100:
            word = "keep the loads ahead; " + (
                "the engine alone gains too" if waiting > 1 + NEAR / 100 else "the engine alone gains nothing"
            )
        else:
            word = "two stages of 4 KiB gain nothing here: more bytes under way or none of it"
        found.append(Advice("copies by the engine, waited for at once or loaded ahead", word, said))
    rows = copies.seed_rows(copy, PER_SM)
    if rows:
        apart = [at for at, row in enumerate(rows) if abs(row["speedup_pipe2"] - 1) * 100 > NEAR]
        after = rows[apart[-1] + 1 :] if apart else rows  # all from here on are near
        over = after[0]["fma_iters"] if after else None
        last = rows[-1]
        word = (
            f"stop at fma_iters {over}: pipe2 is within {NEAR:g} % of sync from there"
            if over
            else "loading ahead pays up to the largest measured"
        )
        found.append(
            Advice(
                "is the kernel bound by arithmetic?",
                word,
                f"pipe2 {last['speedup_pipe2']:.3f} times sync at {last['fma_iters']}, {WHERE}",
            )
        )
    pair = [cells.get((copy.experiment.variant(rung).name, 1, SMALL, PER_SM)) for rung in ("CA3", "CA6")]
    if pair[0] and pair[1]:
        gain = (pair[0]["time_us"] / pair[1]["time_us"] - 1) * 100
        word = "stay with cp.async" if gain < NEAR else "use bulk copies"
        found.append(
            Advice(
                "cp.async is there already, two stages",
                word,
                f"bulk copies {gain:+.1f} % beside cp.async, both two stages, fma_iters 1, {WHERE}",
            )
        )
    found.append(
        Advice(
            "addresses, sizes or strides are no multiple of 16 bytes",
            "ordinary loads: every mode of the copy engine is refused here before it is launched",
            "a rule of the instruction, not a measurement",
        )
    )
    if wall is not None:
        top = walls.ceiling(wall)
        rows_of = [row for rung in walls.FORMS.values() for row in walls.of_rung(wall, rung, walls.timed(wall))]
        reached = [row for row in rows_of if row["gb_per_s"] >= walls.WALL / 100 * top]
        if reached:
            least = min(reached, key=walls.under_way)
            size = walls.under_way(least) // 1024
            found.append(
                Advice(
                    "how much must be under way?",
                    f"{size} KiB per SM",
                    f"{least['gb_per_s']:.4g} of {top:.4g} GB/s with {walls.made_of(least)}",
                )
            )
        found += _multicast(wall)
        found += _steps(wall, {"WI1>WI0": "threadIdx.x == 0 in place of elect.sync"})
    if latency is not None:
        first = [
            row for row in latency.rows("points") if (row["bytes"], row["footprint_kib"], row["cold"]) == (16, 8192, 0)
        ]
        cycles = {row["variant"]: row["cycles"] for row in first if row["cycles"] is not None}
        plain, ahead = (cycles.get(latency.experiment.variant(rung).name) for rung in ("TF0", "TF1"))
        if plain and ahead:
            word = "worth it where there is time before the first load" if ahead < plain else "no gain"
            said = f"the first load through a map takes {plain:.0f} cycles, after prefetch.tensormap {ahead:.0f}"
            found.append(Advice("a tensor map's first use", word, said))
        text = latencies.issue_table(latency)
        found.append(Advice("instructions of the copy are the limit", "one thread issues for all", _sentence(text)))
    return found


def _multicast(wall: Source) -> list[Advice]:
    """What a cluster of two delivers in tiles that both get, beside CTAs with tiles of their own, at the largest tile of both."""
    alone, pair = (
        {(row["tile_bytes"], row["stages"]): row["gb_per_s"] for row in walls.of_rung(wall, rung, walls.timed(wall))}
        for rung in ("WC1", "WC2")
    )
    both = max(set(alone) & set(pair), default=None)
    if both is None:
        return []
    tile, stages = both
    delivered = 2 * pair[both]
    word = "a pair delivers more than CTAs on their own" if delivered > alone[both] else "no gain at this tile"
    said = (
        f"tiles of {tile // 1024} KiB, {stages} under way: {delivered:.4g} GB/s delivered, each byte to both, beside"
        f" {alone[both]:.4g}; CTAs that load the same tile without multicast were not timed"
    )
    return [Advice("the same tile for two CTAs of a cluster: multicast", word, said)]


def _steps(source: Source, wanted: Mapping[str, str]) -> list[Advice]:
    """The largest verdict of a step over its points, as a line."""
    found = []
    for label, situation in wanted.items():
        rows = [row for row in source.rows("steps") if row["step"] == label and row["gain_percent"] is not None]
        if rows:
            most = max(rows, key=lambda row: abs(row["gain_percent"]))
            words = {"faster": "worth it where it gains", "slower": "a loss", "tie": "no difference"}
            if label == "WI1>WI0":
                words = {"faster": "do not: elect.sync gains", "slower": "elect.sync loses"}
                words["tie"] = "no difference in throughput"
            word = words.get(most["verdict"], "not decided by these rounds")
            point = source.experiment.describe(tuple(most[axis] for axis in source.experiment.axis_names))
            found.append(Advice(situation, word, f"{label} {tables.gain_text(most)} at most, with {point}"))
    return found


def _sentence(text: str) -> str:
    """The generated sentence of a table."""
    return next(line for line in text.splitlines() if line.startswith("**")).strip("*")


def sources_of(results: Path, stale: Mapping[str, str]) -> dict[str, Source]:
    """What the set has of the experiments that the advice is made from. Raises RungsError without `copy_intensity`."""
    found = {
        name: tables.read_source(results, name, stale)
        for name in EXPERIMENTS
        if (results / "data" / name / "points.csv").is_file()
    }
    if "copy_intensity" not in found:
        raise RungsError(
            f"{results} has no points of copy_intensity, which the advice is computed from: run `snakemake --config"
            " experiments=copy_intensity` on a GPU, or name another set."
        )
    return found


def advice(sources: Mapping[str, Source]) -> dict[str, list[Advice]]:
    """Heading -> lines."""
    copy = sources["copy_intensity"]
    return {
        "By arithmetic intensity": by_intensity(copy),
        "By tile, at fma_iters 1 with 2 CTAs per SM": by_tile(copy),
        "The seed's situations and mistakes": seed_table(copy, sources.get("tma_wall"), sources.get("tma_latency")),
    }


def block(results: Path, stale: Mapping[str, str]) -> str:
    """The decision table in Markdown, for the README."""
    sources = sources_of(results, stale)
    parts = []
    for head, lines in advice(sources).items():
        rows = [[line.situation, line.advice, line.figures] for line in lines]
        parts += [f"**{head}**", tables.grid(["situation", "on this GPU", "figures"], rows)]
    parts.append(f"<sub>Modes within {NEAR:g} % of each other are as good, and the simplest of them is named.</sub>")
    for name, source in sources.items():
        line = tables.provenance_line(source, source.rows("points"), list(source.facts.sweeps))
        parts.append(f"<sub>{name}: {line}</sub>")
    return "\n\n".join(parts)


def run(results: Path, stale: Mapping[str, str]) -> None:
    """Print the decision table of a set."""
    from rich.console import Console
    from rich.table import Table

    sources = sources_of(results, stale)
    facts = sources["copy_intensity"].facts
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED)  # a line of the table stays one line, for grep
    console.print(f"{facts.gpu}, driver {facts.driver}, from {results}, {facts.dates}", highlight=False)
    for head, lines in advice(sources).items():
        shown = Table(title=head, title_justify="left", show_lines=False, expand=False)
        for column in ("situation", "on this GPU", "figures"):
            shown.add_column(column, overflow="fold")
        for line in lines:
            shown.add_row(line.situation, line.advice, line.figures)
        console.print(shown)
    if old := [name for source in sources.values() for name in source.stale if name in source.facts.sweeps]:
        console.print(f"Stale, measured before their sources changed: {', '.join(sorted(old))}.", highlight=False)


def sets_with_copies(folders: Sequence[Path]) -> list[Path]:
    """Those of the results sets that the advice can be computed from."""
    return [folder for folder in folders if (folder / "data" / "copy_intensity" / "points.csv").is_file()]
