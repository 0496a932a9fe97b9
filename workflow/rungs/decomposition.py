"""Tables in Markdown of what a factorial's effects are made of: Shapley shares and two-factor interactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rungs import effects, shapley
from rungs.tables import DAGGER, Row, Size, Source, digits_of, figures_of, gain_text, signed, size_text, table

FEWER = "§"
"""Marks a mean over fewer contexts than there are."""


def sizes_of(source: Source) -> list[Size]:
    return sorted({(row["m"], row["n"]) for row in source.rows("shapley")}, reverse=True)


def _ends(source: Source, factor: str, levels: tuple[int, int]) -> str:
    return " > ".join(source.experiment.factors[factor].levels[level].title for level in levels)


# Shapley shares


def shapley_section(source: Source, figures: str) -> str:
    """What is shared, both figures, and per M = N, largest first, a table."""
    tables = [_shapley_table(source, size) for size in sizes_of(source)]
    return "\n\n".join([_what_is_shared(source), *_pictures(figures), *tables])


def shapley_block(source: Source) -> str:
    """For the README: the bars, and the table at the largest M = N."""
    bars, _ = _pictures(figures_of(source))
    return "\n\n".join([bars, *(_shapley_table(source, size) for size in sizes_of(source)[:1])])


def _pictures(figures: str) -> tuple[str, str]:
    return (
        f"![Shapley value of each factor at every shape]({figures}/shapley_bars.svg)",
        f"![Shapley value of each factor, K against M = N]({figures}/shapley_map.svg)",
    )


def _what_is_shared(source: Source) -> str:
    game = shapley.game_of(source.experiment)
    top = (
        f" A row on top is one change of {game.goal.name}, between two jobs: where a ladder has that step, its paired figure is the sharper one."
        if game.on_top
        else ""
    )
    return (
        f"The gain from {game.start.name} to {game.goal.name}, shared among the {len(game.players)} factors that differ. What a factor"
        " adds depends on which were changed before it, so that its Shapley value is the mean, of the logarithms, over all orders:"
        f" a weighted sum over all {len(game.corners)} combinations of both ends' levels, with the error that follows from each of"
        " them. The values add up to the whole gain, and the shares of it, with 95 % intervals by Fieller, to 100 %. Where a"
        f" combination is missing, nothing is.{top}"
    )


def _shapley_table(source: Source, size: Size) -> str:
    here = [row for row in source.rows("shapley") if (row["m"], row["n"]) == size]
    game = shapley.game_of(source.experiment)
    corners = [variant.name for variant in game.corners.values() if variant]
    depths = sorted({row["k"] for row in here})
    body = []
    lines = dict.fromkeys((row["part"], row["factor"], row["source_level"], row["target_level"]) for row in here)
    for part, factor, *levels in lines:
        rows = {
            row["k"]: row
            for row in here
            if (row["part"], row["factor"], row["target_level"]) == (part, factor, levels[1])
        }
        tops = [top.name for name, level, top in game.on_top if (name, level) == (factor, levels[1])]
        old = bool(set(corners if part == "share" else [game.goal.name, *tops]) & set(source.stale))
        cells = [_share_cell(rows.get(k), old) for k in depths]
        body.append([factor, _ends(source, factor, (levels[0], levels[1])), part, *cells])
    whole = {row["k"]: row for row in here if row["part"] == "share"}
    old = bool({game.start.name, game.goal.name} & set(source.stale))
    cells = [_whole_cell(whole.get(k), old) for k in depths]
    body.insert(len(game.players), ["together", f"{game.start.name} > {game.goal.name}", "whole", *cells])
    names = list(dict.fromkeys([*corners, *(top.name for _, _, top in game.on_top)]))
    used = [row for row in source.rows("corners") if (row["m"], row["n"]) == size and row["variant"] in set(names)]
    notes = list(dict.fromkeys(row["reason"] for row in here if row["reason"]))
    head = f"{size_text(size)}: share of the whole gain with its 95 % interval, and the gain that it is as a factor of speed."
    headers = ["factor", "change", "part", *(f"K={k}" for k in depths)]
    return table(source, head, headers, body, _shapley_sentence(source, here, size), used, names, notes)


def _share_cell(row: Row | None, old: bool) -> str:
    if row is None:
        return "not run"
    if row["gain_percent"] is None:
        return str(row["status"])
    word = row["verdict"] if row["verdict"] != "none" else "no floor"
    return f"{_share(row)}{gain_text(row)} {word}{DAGGER if old else ''}"


def _share(row: Row) -> str:
    """`58.0 % (57.1 to 58.9): `; without an interval where there is none, empty where there is no share."""
    if row["share_percent"] is None:
        return ""
    if row["share_low_percent"] is None:
        return f"{row['share_percent']:.1f} % (no interval): "
    return f"{row['share_percent']:.1f} % ({row['share_low_percent']:.1f} to {row['share_high_percent']:.1f}): "


def _whole_cell(row: Row | None, old: bool) -> str:
    if row is None:
        return "not run"
    if row["total_percent"] is None:
        return str(row["status"])
    whole = {f"{end}_percent": row[f"total_{end}_percent"] for end in ("low", "high")}
    return gain_text({"gain_percent": row["total_percent"], **whole}) + (DAGGER if old else "")


def _shapley_sentence(source: Source, rows: Sequence[Row], size: Size) -> str:
    """The factors with the largest and the smallest share at the largest K that has shares, and how they change with K."""
    where = f"At {size_text(size)}"
    shares = [row for row in rows if row["share_percent"] is not None]
    if not shares:
        return f"{where} no share is estimable, since corners are missing."
    k = max(row["k"] for row in shares)
    here = sorted((row for row in shares if row["k"] == k), key=lambda row: -row["share_percent"])
    most, least = here[0], here[-1]

    def told(row: Row) -> str:
        line = [other["share_percent"] for other in shares if other["factor"] == row["factor"]]
        over = f", {min(line):.1f} to {max(line):.1f} % over K" if len(line) > 1 else ""
        levels = (row["source_level"], row["target_level"])
        return f"{row['factor']} ({_ends(source, row['factor'], levels)}) {row['share_percent']:.1f} %{over}"

    counts = Counter(row["verdict"] for row in rows if row["gain_percent"] is not None)
    tally = ", ".join(f"{counts[word]} {word}" for word in ("faster", "slower", "tie", "undecided") if counts[word])
    gone = len({row["k"] for row in rows if row["part"] == "share"}) - len({row["k"] for row in shares})
    rest = f"; at {gone} K no share is estimable" if gone else ""
    second = f", and {told(least)}, the least" if least is not most else ""
    verdicts = f"; verdicts: {tally}" if tally else ""
    return f"{where}, K={k} the whole gain is {_whole_cell(most, False)}, of which {told(most)}, is the most{second}{verdicts}{rest}."


# Interactions


def interaction_section(source: Source) -> str:
    """What an interaction is, and per M = N, largest first, a row per two pairs of neighbouring levels that go together."""
    crossings = [crossing for crossing in effects.crossings_of(source.experiment) if crossing.contexts]
    what = (
        "By how much the gain of one change is larger (as a factor of speed) after a second change than before it, the mean over the"
        " combinations of the remaining factors: `more` and `less` say that both together gain more or less than the product of what"
        " each gains alone, beyond the floor. Pairs of levels further apart are sums of these."
    )
    tables = [_interaction_table(source, crossings, size) for size in sizes_of(source)]
    return "\n\n".join([what, *tables])


def _interaction_table(source: Source, crossings: Sequence[effects.Crossing], size: Size) -> str:
    rows = {_key(row): row for row in source.rows("interactions") if (row["m"], row["n"]) == size}
    depths = sorted({key[-1] for key in rows})
    body, shown = [], []
    names: dict[str, None] = {}
    for crossing in crossings:
        levels = (crossing.source, crossing.target, crossing.other_source, crossing.other_target)
        here = [rows.get((crossing.factor.name, crossing.other.name, *levels, k)) for k in depths]
        variants = [variant.name for four in crossing.contexts for variant in four]
        old = bool(set(variants) & set(source.stale))
        counts = sorted({row["contexts"] for row in here if row}) or [0]
        contexts = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
        body.append([crossing.name, crossing.title, contexts, *(_interaction_cell(row, old) for row in here)])
        shown += [row for row in here if row]
        names |= dict.fromkeys(variants)
    notes = []
    for mark, group in (
        (f"{FEWER} ", [row for row in shown if row["lost"]]),
        ("", [r for r in shown if not r["lost"]]),
    ):
        if reasons := " ".join(dict.fromkeys(row["reason"] for row in group if row["reason"])):
            notes.append(f"{mark}{reasons}")
    used = [row for row in source.rows("corners") if (row["m"], row["n"]) == size and row["variant"] in names]
    head = f"{size_text(size)}: by how much the second change makes the first gain more, with its 95 % interval."
    headers = ["factors", "changes", "contexts", *(f"K={k}" for k in depths)]
    sentence = _interaction_sentence(source, crossings, shown, size)
    return table(source, head, headers, body, sentence, used, list(names), notes)


def _key(row: Row) -> tuple[str | int, ...]:
    names = ("factor", "other", "source_level", "target_level", "other_source_level", "other_target_level", "k")
    return tuple(row[name] for name in names)


def _interaction_cell(row: Row | None, old: bool) -> str:
    if row is None:
        return "not run"
    if row["gain_percent"] is None:
        return str(row["status"])
    word = row["verdict"] if row["verdict"] != "none" else "no floor"
    return f"{gain_text(row)} {word}{DAGGER if old else ''}{FEWER if row['lost'] else ''}"


def _interaction_sentence(
    source: Source, crossings: Sequence[effects.Crossing], rows: Sequence[Row], size: Size
) -> str:
    """The strongest interaction of either sign among those with every context, and how many there are."""
    where = f"At {size_text(size)}"
    clear = [row for row in rows if row["verdict"] in ("more", "less") and not row["lost"]]
    if not clear:
        return f"{where} no interaction over all its contexts is clear of the floor."
    clauses = []
    for word, pick, what in (("more", max, "help each other"), ("less", min, "stand in for each other")):
        of_word = [row for row in clear if row["verdict"] == word]
        if of_word:
            row = pick(of_word, key=lambda row: row["gain_percent"])
            first = _ends(source, row["factor"], (row["source_level"], row["target_level"]))
            second = _ends(source, row["other"], (row["other_source_level"], row["other_target_level"]))
            gain = f"{signed(row['gain_percent'], digits_of(row['gain_percent']))} %"
            clauses.append(f"{first} and {second} {what} most, {gain} at K={row['k']}")
    counts = Counter(row["verdict"] for row in rows)
    tally = ", ".join(f"{counts[word]} {word}" for word in ("more", "less", "tie", "undecided") if counts[word])
    partial = len({_key(row)[:-1] for row in rows if row["lost"]})
    rest = f"; {partial} of {len(crossings)} lack contexts and are not ranked" if partial else ""
    return f"{where} {', and '.join(clauses)}; verdicts: {tally}{rest}."
