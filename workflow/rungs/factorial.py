"""Tables of a factorial in Markdown: every effect of every factor, and the variants that do best and worst."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs import aggregate, decomposition, effects, schemas
from rungs.files import write_text
from rungs.tables import (
    DAGGER,
    Row,
    Size,
    Source,
    count_text,
    coverage_table,
    digits_of,
    figures_of,
    gain_text,
    not_apart,
    paired_steps,
    signed,
    size_text,
    standing,
    table,
)
from rungs.variants import Experiment, Factor, Variant, load_experiment

FEWER = decomposition.FEWER
SHOWN = 10
"""How many of the best and of the worst variants are listed."""


def write(results: Path, name: str, stale: Mapping[str, str] | None = None) -> None:
    """Write `md/<experiment>_factorial.md`."""
    write_text(results / "md" / f"{name}_factorial.md", render(results, name, stale))


def read_source(results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None) -> Source:
    """What the tables of a factorial are made of: its frames, and the floor and the steps of its experiment."""
    experiment = load_experiment(experiment) if isinstance(experiment, str) else experiment
    data = effects.read_data(results, experiment.name)
    floor = schemas.read_csv("floor", results / "data" / experiment.name / "floor.csv")
    steps = schemas.read_csv("steps", results / "data" / experiment.name / "steps.csv")
    frames = {**data, "floor": floor, "steps": steps, "coverage": data["factorial_coverage"]}
    return Source(experiment, frames, aggregate.facts_of(results, experiment.name), stale or {}, results)


def render(results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None) -> str:
    """All tables of a factorial, as `md/<experiment>_factorial.md` holds them."""
    source = read_source(results, experiment, stale)
    name = source.experiment.name
    parts = [f"# The factorial of {name} on {source.facts.gpu}", _what_it_is(source), coverage_table(source)]
    parts += [missing(source), "## Every effect", effect_tables(source)]
    parts += ["## Shapley shares", decomposition.shapley_section(source, f"../figures/{name}")]
    parts += ["## Interactions", decomposition.interaction_section(source)]
    for factor in _varied(source.experiment):
        parts += [f"## {factor.name}: {factor.title}", factor_block(source, factor.name, f"../figures/{name}")]
    return "\n\n".join([*parts, "## Best and worst", corner_table(source)]) + "\n"


def overview(results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None) -> str:
    """What the set's page says of a factorial: how much of it is there, and its effects at the largest M = N."""
    source = read_source(results, experiment, stale)
    return "\n\n".join([missing(source), effect_tables(source, largest=True)])


def blocks(results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None) -> dict[str, str]:
    """Block name -> Markdown for the README: `<experiment>:factorial`, `:shapley`, `:corners` and `:effect:<factor>`."""
    source = read_source(results, experiment, stale)
    name, figures = source.experiment.name, figures_of(source)
    found = {f"{name}:factorial": overview(results, experiment, stale), f"{name}:corners": corner_table(source)}
    found[f"{name}:shapley"] = decomposition.shapley_block(source)
    return found | {
        f"{name}:effect:{factor.name}": factor_block(source, factor.name, figures)
        for factor in _varied(source.experiment)
    }


def _varied(experiment: Experiment) -> list[Factor]:
    """The factors that have an effect to show: those of more than one level."""
    return [factor for factor in experiment.factors.values() if len(factor.levels) > 1]


def _what_it_is(source: Source) -> str:
    rules = [
        f"{level.title} only with {' or '.join(source.experiment.factors[other].levels[value].title for value in allowed)}"
        for factor in source.experiment.factors.values()
        for level in factor.levels.values()
        for other, allowed in level.requires.items()
    ]
    count = len(source.experiment.estimable())
    but = f" ({'; '.join(rules)})" if rules else ""
    return (
        f"{source.experiment.question} Every combination of levels that goes together is a variant: {count} of them{but}. The effect"
        " of a level is the geometric mean of the gain over its contexts, the combinations of the other factors with which both levels"
        f" were timed; a gain is the ratio of two shares of {source.facts.control}. Each variant has a job of its own, so that an"
        " interval holds the bootstrap error of every job and the spread from job to job at the shape, which every binary that several"
        " jobs timed shows: in the floor jobs, and as a rung and as another's predecessor."
    )


def missing(source: Source) -> str:
    """One sentence that names every variant that was asked for and is not there."""
    corners = source.rows("corners")
    lost: dict[tuple[str, str], list[str]] = {}
    lacking: dict[str, None] = {}
    for row in corners:
        if row["share_percent"] is None and row["status"] == "not on this chip":
            lacking[row["variant"]] = None
        elif row["share_high_percent"] is None:
            shape = f"{row['m']}x{row['n']}x{row['k']}"
            lost.setdefault((row["variant"], row["status"]), []).append(shape)
    variants, shapes = ({row["variant"] for row in corners}, {(row["m"], row["n"], row["k"]) for row in corners})
    chip = f"; {len(lacking)} are not on this chip" if lacking else ""
    if not lost:
        return f"**{len(variants) - len(lacking)} of {len(variants)} variants were timed at all of {len(shapes)} shapes{chip}.**"
    told = [
        f"{name} ({status})" if len(where) == len(shapes) else f"{name} ({status} at {', '.join(where)})"
        for (name, status), where in lost.items()
    ]
    return (
        f"**Missing among {len(variants)} variants: {', '.join(told)}{chip}; no effect counts a context of theirs, and {FEWER} marks"
        " each mean that has fewer for it.**"
    )


# Effects


def effect_tables(source: Source, largest: bool = False) -> str:
    """Per M = N, largest first: a row per pair of levels of every factor, its mean gain at each K."""
    pairs = list(effects.pairs_of(source.experiment))
    sizes = sorted({(row["m"], row["n"]) for row in source.rows("effects")}, reverse=True)
    return "\n\n".join(_effect_table(source, pairs, size, spans=False) for size in sizes[: 1 if largest else None])


def factor_block(source: Source, factor: str, figures: str) -> str:
    """The map of a factor, and its effects at each M = N with the smallest and largest gain of a context."""
    pairs = [pair for pair in effects.pairs_of(source.experiment) if pair.factor.name == factor]
    sizes = sorted({(row["m"], row["n"]) for row in source.rows("effects")}, reverse=True)
    picture = f"![Effect of {factor}, K against M = N]({figures}/effect_{factor}.svg)"
    return "\n\n".join([picture, *(_effect_table(source, pairs, size, spans=True) for size in sizes)])


def _effect_table(source: Source, pairs: Sequence[effects.Pair], size: Size, spans: bool) -> str:
    rows = {
        (row["factor"], f"{row['source_level']}>{row['target_level']}", row["k"]): row
        for row in source.rows("effects")
        if (row["m"], row["n"]) == size
    }
    depths = sorted({k for _, _, k in rows})
    body = []
    for pair in pairs:
        here = [rows.get((pair.factor.name, pair.label, k)) for k in depths]
        old = any({a.name, b.name} & set(source.stale) for a, b in pair.contexts)
        counts = sorted({row["contexts"] for row in here if row})
        contexts = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]])) if counts else "0"
        cells = [_cell(row, spans, old) for row in here]
        body.append([pair.factor.name, pair.title, contexts, *cells])
    shown = [row for pair in pairs for k in depths if (row := rows.get((pair.factor.name, pair.label, k)))]
    notes = []
    for mark, rows_of in (
        (f"{FEWER} ", [row for row in shown if row["lost"]]),
        ("", [r for r in shown if not r["lost"]]),
    ):
        if reasons := " ".join(dict.fromkeys(row["reason"] for row in rows_of if row["reason"])):
            notes.append(f"{mark}{reasons}")
    names = list(dict.fromkeys(variant.name for pair in pairs for both in pair.contexts for variant in both))
    used = [row for row in source.rows("corners") if (row["m"], row["n"]) == size and row["variant"] in set(names)]
    what = (
        "with its 95 % interval, and the smallest and largest gain of a context" if spans else "with its 95 % interval"
    )
    head = f"{size_text(size)}: mean gain in speed over the contexts, {what}."
    headers = ["factor", "change", "contexts", *(f"K={k}" for k in depths)]
    return table(source, head, headers, body, _sentence(source, pairs, shown, size), used, names, notes)


def _cell(row: Row | None, spans: bool, old: bool) -> str:
    if row is None:
        return "not run"
    if row["gain_percent"] is None:
        return str(row["status"])
    word = row["verdict"] if row["verdict"] != "none" else "no floor"
    marks = (DAGGER if old else "") + (FEWER if row["lost"] else "")
    return f"{gain_text(row)} {word}{marks}" + (f" ({_span(row)})" if spans else "")


def _span(row: Row) -> str:
    """`-1.0 to +30.2`: the smallest and the largest gain of a context, in percent."""
    return " to ".join(signed(row[name], digits_of(row[name])) for name in ("least_percent", "most_percent"))


def _sentence(source: Source, pairs: Sequence[effects.Pair], rows: Sequence[Row], size: Size) -> str:
    """The effects that gain and lose most of those with every context, and where the best of them gains least and most."""
    where = f"At {size_text(size)}"
    whole = [row for row in rows if row["gain_percent"] is not None and not row["lost"]]
    partial = len({(row["factor"], row["source_level"], row["target_level"]) for row in rows if row["lost"]})
    rest = f"; {partial} of {len(pairs)} pairs of levels lack contexts and are not ranked" if partial else ""
    clear = [row for row in whole if row["verdict"] in ("faster", "slower")]
    if not clear:
        return f"{where} no mean over all its contexts is clear of the floor{rest}."
    titles = {(pair.factor.name, pair.source, pair.target): pair.title for pair in pairs}

    def told(row: Row) -> str:
        change = titles[row["factor"], row["source_level"], row["target_level"]]
        return f"{change}, {gain_text(row)} at K={row['k']}"

    most, least = (pick(clear, key=lambda row: row["gain_percent"]) for pick in (max, min))
    clauses = []
    if most["verdict"] == "faster":
        lowest, highest = (signed(most[name], digits_of(most[name])) for name in ("least_percent", "most_percent"))
        clauses.append(
            f"{told(most)}, gains most, over {most['contexts']} contexts from {lowest} % ({most['least_source']} >"
            f" {most['least_target']}) to {highest} % ({most['most_source']} > {most['most_target']})"
        )
    if least["verdict"] == "slower":
        clauses.append(f"{told(least)}, loses most")
    counts = Counter(row["verdict"] for row in rows)
    tally = ", ".join(f"{counts[word]} {word}" for word in ("faster", "slower", "tie", "undecided") if counts[word])
    return f"{where} {', and '.join(clauses)}; verdicts: {tally}{rest}."


# Corners


def corner_table(source: Source) -> str:
    """The best and the worst variants at the largest shape that was timed, by their share of the control."""
    timed: dict[tuple[int, ...], list[Row]] = {}
    for row in source.rows("corners"):
        if row["share_percent"] is not None:
            timed.setdefault((row["m"], row["n"], row["k"]), []).append(row)
    if not timed:
        return "**No variant has a share of the control, so that none is best.**"
    shape = max(timed, key=math.prod)
    ranked = sorted(timed[shape], key=lambda row: -row["share_percent"])
    listed = list(enumerate(ranked, start=1))
    if len(ranked) > 2 * SHOWN:
        listed = [*listed[:SHOWN], *listed[-SHOWN:]]
    at, counters = _counters(source)
    body = [
        [
            str(place),
            row["variant"],
            ", ".join(_titles(source.experiment, source.experiment.variant(row["variant"]))),
            row["rungs"] or "none",
            *(f"{cell}{DAGGER if row['variant'] in source.stale else ''}" for cell in _corner_cells(row)),
            *(counters[row["variant"]] if counters else []),
        ]
        for place, row in listed
    ]
    headers = ["place", "variant", "what it is", "rung", "time, µs", "TFLOP/s", f"share of {source.facts.control}"]
    if counters:
        headers += [
            f"{word} at {at}"
            for word in ("instructions", "shared wavefronts", "tensor pipe busy while an SM is active")
        ]
    where = "x".join(map(str, shape))
    whole = len(listed) == len(ranked)
    what = "every variant" if whole else f"the {SHOWN} fastest and the {SHOWN} slowest of {len(ranked)} variants"
    head = f"{where}: {what}, by share of {source.facts.control}, with its 95 % interval within the job."
    names = [row["variant"] for _, row in listed]
    used = [row for _, row in listed]
    return table(source, head, headers, body, _corner_sentence(source, ranked, where), used, names)


def _titles(experiment: Experiment, variant: Variant) -> list[str]:
    return [experiment.factors[name].levels[level].title for name, level in variant.levels]


def _corner_cells(row: Row) -> list[str]:
    share = f"{row['share_percent']:.1f} %"
    if row["share_high_percent"] is not None:
        share += f" ±{(row['share_high_percent'] - row['share_low_percent']) / 2:.2f}"
    return [f"{row['time_us']:.4g}", f"{row['tflops']:.1f}", share]


def _counters(source: Source) -> tuple[str, dict[str, list[str]]]:
    """The shape at which most variants were profiled, and variant -> cells of its counters there; empty where none was."""
    counted = [row for row in source.rows("corners") if row["instructions"] is not None]
    if not counted:
        return "", {}
    shape = Counter((row["m"], row["n"], row["k"]) for row in counted).most_common(1)[0][0]
    rows = [row for row in source.rows("corners") if (row["m"], row["n"], row["k"]) == shape]

    def cell(value: Any, show: Any) -> str:
        return "not counted" if value is None else show(value)

    return "x".join(map(str, shape)), {
        row["variant"]: [
            cell(row["instructions"], count_text),
            cell(row["shared_wavefronts"], count_text),
            cell(row["tensor_busy_percent"], lambda value: f"{value:.1f} %"),
        ]
        for row in rows
    }


def _corner_sentence(source: Source, ranked: Sequence[Row], where: str) -> str:
    """The fastest and the slowest, how far they are apart, and what the fastest have in common."""
    best, worst = ranked[0], ranked[-1]
    if len(ranked) < 2:
        return f"At {where} only {best['variant']} was timed, so that there is nothing to compare."
    steps = paired_steps(source, (best["m"], best["n"], best["k"]))
    alike, against = standing(best, ranked, steps, fastest=True)
    if against:
        return (
            f"At {where} no variant is named fastest: {best['variant']} has the largest share, {best['share_percent']:.1f} % of"
            f" {source.facts.control}, but paired in one job {', '.join(against)} {'is' if len(against) == 1 else 'are'} faster."
        )
    unsure = not_apart(alike, len(ranked))
    last, slower = standing(worst, ranked, steps, fastest=False)
    doubt = not_apart([*last, *slower], len(ranked))
    top = [source.experiment.variant(row["variant"]) for row in ranked[:SHOWN]]
    shared = [
        source.experiment.factors[name].levels[top[0].level(name)].title
        for name in source.experiment.factors
        if len({variant.level(name) for variant in top}) == 1
    ]
    common = f"; the {len(top)} fastest have in common: {', '.join(shared)}" if shared and len(ranked) > SHOWN else ""
    return (
        f"At {where} the fastest of {len(ranked)} variants is {best['variant']}{unsure}, with {best['share_percent']:.1f} % of"
        f" {source.facts.control}, {best['share_percent'] / worst['share_percent']:.1f} times the share of the slowest,"
        f" {worst['variant']}{doubt}{common}."
    )
