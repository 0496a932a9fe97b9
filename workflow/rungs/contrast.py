"""Hot against cold: the gains of a path measured with warm and with cold caches, side by side and never mixed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from rungs.errors import RungsError
from rungs.tables import DAGGER, Row, Shape, Size, Source, gain_text, grid, provenance_line, size_text
from rungs.variants import Ladder


def table(hot: Source, cold: Source, ladder: Ladder) -> str:
    """Per M = N that both sets have, largest first: a row per step of the path, its gain hot and cold at each K.

    Each cell is of its own set, with its own rounds, interval and floor. Raises RungsError unless the one set is hot and
    the other cold.
    """
    for source, policy in ((hot, "hot"), (cold, "cold")):
        if source.facts.l2 != policy:
            raise RungsError(
                f"{source.results} was measured with L2 {source.facts.l2}, not {policy}: the table shows a {policy} set there."
            )
    cells = {"hot": _cells(hot, ladder), "cold": _cells(cold, ladder)}
    shapes = {shape for _, shape in cells["hot"]} & {shape for _, shape in cells["cold"]}
    if not shapes:
        return f"Ladder {ladder.name} has no shape that was measured both hot and cold."
    sizes = sorted({shape[:2] for shape in shapes}, reverse=True)
    parts = [_size_table(hot, cold, ladder, cells, size, sorted(s for s in shapes if s[:2] == size)) for size in sizes]
    names = [ladder.rungs[rung].name for rung in ladder.path]
    for word, source in (("Hot", hot), ("Cold", cold)):
        used = [
            row for row in source.rows("shapes") if row["variant"] in names and (row["m"], row["n"], row["k"]) in shapes
        ]
        parts.append(f"<sub>{word}: {provenance_line(source, used, names)}</sub>")
        if old := [f"{name}: {source.stale[name]}" for name in names if name in source.stale]:
            parts.append(f"<sub>{DAGGER} {word}, stale. {'. '.join(old)}.</sub>")
    return "\n\n".join(parts)


Cells = Mapping[tuple[str, Shape], Row]


def _cells(source: Source, ladder: Ladder) -> dict[tuple[str, Shape], Row]:
    path = {f"{a}>{b}" for a, b in itertools.pairwise(ladder.path)}
    rows = (row for row in source.rows("steps") if row["ladder"] == ladder.name and row["step"] in path)
    return {(row["step"], (row["m"], row["n"], row["k"])): row for row in rows}


def _size_table(
    hot: Source, cold: Source, ladder: Ladder, cells: Mapping[str, Cells], size: Size, shapes: list[Shape]
) -> str:
    body = []
    for a, b in itertools.pairwise(ladder.path):
        row = [f"{a}>{b}"]
        for shape in shapes:
            for policy, source in (("hot", hot), ("cold", cold)):
                row.append(_cell(source, cells[policy].get((f"{a}>{b}", shape))))
        body.append(row)
    headers = ["step", *(f"K={shape[2]} {policy}" for shape in shapes for policy in ("hot", "cold"))]
    head = (
        f"{size_text(size)}: gain in speed with its 95 % interval, with the same buffers in every launch (hot) and with buffers that"
        " rotate so that none is in L2 when it is read (cold). Two sets, each with rounds and a floor of its own."
    )
    sentence = _sentence(ladder, cells, size, shapes)
    return "\n\n".join([head, grid(headers, body), f"**{sentence}**"])


def _cell(source: Source, row: Row | None) -> str:
    if row is None:
        return "not run"
    if row["gain_percent"] is None:
        return str(row["status"])
    mark = DAGGER if {row["source_variant"], row["target_variant"]} & set(source.stale) else ""
    return f"{gain_text(row)} {row['verdict'] if row['verdict'] != 'none' else 'no floor'}{mark}"


def _clear(hot: Row, cold: Row) -> bool:
    """Whether two gains differ by more than the larger floor of the two sets; never where one has no floor."""
    floors = hot["floor_percent"], cold["floor_percent"]
    return None not in floors and abs(cold["gain_percent"] - hot["gain_percent"]) > max(floors)


def _sentence(ladder: Ladder, cells: Mapping[str, Cells], size: Size, shapes: list[Shape]) -> str:
    """Where cold caches change a gain most, of the gains whose intervals part by more than the larger floor of both sets; how many do not."""
    pairs = []
    for key in itertools.product((f"{a}>{b}" for a, b in itertools.pairwise(ladder.path)), shapes):
        hot, cold = (cells[policy].get(key) for policy in ("hot", "cold"))
        if hot and cold and hot["claim_high_percent"] is not None and cold["claim_high_percent"] is not None:
            pairs.append((key, hot, cold))
    where = f"At {size_text(size)}"
    if not pairs:
        return f"{where} no step was measured both hot and cold with an interval."
    apart = [
        (key, hot, cold)
        for key, hot, cold in pairs
        if (
            hot["claim_high_percent"] < cold["claim_low_percent"]
            or cold["claim_high_percent"] < hot["claim_low_percent"]
        )
        and _clear(hot, cold)
    ]
    same = (
        f"{len(pairs) - len(apart)} of {len(pairs)} gains are the same hot and cold as far as intervals and floors tell"
    )
    if not apart:
        return f"{where} {same}."
    (step, shape), hot, cold = max(apart, key=lambda pair: abs(pair[2]["gain_percent"] - pair[1]["gain_percent"]))
    word = "raise" if cold["gain_percent"] > hot["gain_percent"] else "lower"
    return (
        f"{where} cold caches change the gain of {step} most: they {word} it from {gain_text(hot)} to {gain_text(cold)} at"
        f" K={shape[2]}; {same}."
    )
