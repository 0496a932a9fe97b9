"""The page of an experiment that is no GEMM: its ladders at the points of its sweeps, its own answers, evidence, counters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rungs import answers, tables
from rungs.aggregate import measured_ladders
from rungs.tables import Row, Source, count_text, gain_text, grid
from rungs.variants import Ladder

MOST_COLUMNS = 12
"""Points side by side in one table."""


def render(source: Source) -> str:
    """All tables of the experiment, as `md/<experiment>.md` holds them."""
    parts = [f"# {source.experiment.name} on {source.facts.gpu}", source.experiment.question]
    parts += answers.of(source.experiment).sections(source)
    figures = f"../figures/{source.experiment.name}"
    if curves := figure_links(source, figures):
        parts += ["## Curves", *curves]
    for ladder in ladders_of(source):
        parts += [f"## Ladder {ladder.name}: {ladder.title}", ladder_tables(source, ladder)]
        parts += [f"### Steps of ladder {ladder.name}", step_tables(source, ladder)]
        parts += [f"### What changed in the binaries of ladder {ladder.name}", tables.evidence_table(source, ladder)]
        if counted := counter_table(source, ladder):
            parts += [f"### Counters of ladder {ladder.name}", counted]
    parts += ["## Floor", tables.floor_table(source), *tables.clock_link(source, figures)]
    if gaps := gap_table(source):
        parts += ["## Not measured", gaps]
    return "\n\n".join(parts) + "\n"


def overview(source: Source) -> list[str]:
    """What the set's page says of the experiment."""
    name = source.experiment.name
    return [
        tables.coverage_table(source),
        *answers.of(source.experiment).sections(source)[:1],
        *figure_links(source, f"figures/{name}"),
    ]


def blocks(source: Source) -> dict[str, str]:
    """Block name -> Markdown, for the README: `<experiment>:<name>` of its own answers, `:ladder:<ladder>`, `:steps:<ladder>`,
    `:evidence:<ladder>`, `:ncu:<ladder>`, `:figures` and `:floor`.
    """
    name = source.experiment.name
    made = {f"{name}:{block}": text for block, text in answers.of(source.experiment).blocks(source).items()}
    made |= {f"{name}:floor": tables.floor_table(source)}
    if curves := figure_links(source, tables.figures_of(source)):
        made |= {f"{name}:figures": "\n\n".join(curves)}
    for ladder in ladders_of(source):
        made |= {
            f"{name}:ladder:{ladder.name}": ladder_tables(source, ladder),
            f"{name}:steps:{ladder.name}": step_tables(source, ladder),
            f"{name}:evidence:{ladder.name}": tables.evidence_table(source, ladder),
            f"{name}:ncu:{ladder.name}": counter_table(source, ladder) or "Nothing was counted.",
        }
    return made


def ladders_of(source: Source) -> list[Ladder]:
    return measured_ladders(source.experiment, source.data["points"])


def figure_links(source: Source, folder: str) -> list[str]:
    figures = answers.of(source.experiment).FIGURES
    return [f"![{name.replace('_', ' ')} of {source.experiment.name}]({folder}/{name}.svg)" for name in figures]


# ---- points ----------------------------------------------------------------------------------------------------------


def point_of(source: Source, row: Row) -> tuple[int, ...]:
    return tuple(row[axis] for axis in source.experiment.axis_names)


def lines_of(source: Source, names: Sequence[str]) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Each line of points along one axis on which these variants were measured: (axis, points), at most `MOST_COLUMNS` of them.

    A sweep over one axis is a line; one over several is a line along its longest axis for each combination of the others. Points
    of no sweep (of one that the file once had, or of the quick preset) are lines along the first axis.
    """
    there = {point_of(source, row) for row in source.rows("points") if row["variant"] in names}
    experiment, lines = source.experiment, []
    for sweep in experiment.sweeps:
        *others, axis = sorted(sweep.axes, key=lambda name: len(sweep.axes[name]))
        for fixed in itertools.product(*(sweep.axes[other] for other in others)):
            at = {**experiment.base, **dict(zip(others, fixed, strict=True))}
            points = [tuple({**at, axis: value}[name] for name in experiment.axis_names) for value in sweep.axes[axis]]
            if points := [point for point in points if point in there]:
                lines.append((axis, points))
    rest: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for point in sorted(there.difference(*(points for _, points in lines))):
        rest.setdefault(point[1:], []).append(point)
    lines += [(experiment.axis_names[0], points) for points in rest.values()]
    sets = [set(points) for _, points in lines]
    # A line that is part of another, or of an equal one before it, would say nothing new.
    whole = [
        line
        for i, line in enumerate(lines)
        if not any(sets[i] < other or (sets[i] == other and j < i) for j, other in enumerate(sets))
    ]
    return [(axis, points[i : i + MOST_COLUMNS]) for axis, points in whole for i in range(0, len(points), MOST_COLUMNS)]


def fixed_text(source: Source, axis: str, point: Sequence[int]) -> str:
    """What all points of a line along `axis` have in common."""
    at = dict(zip(source.experiment.axis_names, point, strict=True))
    others = (a for name, a in source.experiment.point_axes.items() if name != axis)
    return ", ".join(f"{a.title} {a.label(at[a.name])}" for a in others)


def value_cell(source: Source, row: Row | None) -> str:
    """`812 GB/s (97.1 %)`, `31.2 cycles`, or the word of what went wrong."""
    if row is None:
        return "not run"
    mark = tables.DAGGER if row["variant"] in source.stale else ""
    if row["cycles"] is not None:
        return f"{row['cycles']:.4g}{mark}"
    if row["gb_per_s"] is None:
        return str(row["status"])
    share = "" if row["share_percent"] is None else f" ({row['share_percent']:.1f} %)"
    return f"{row['gb_per_s']:.4g}{share}{mark}"


def what_is_shown(source: Source) -> str:
    counted = any(row["cycles"] is not None for row in source.rows("points"))
    if counted:
        return "SM cycles for one unit of work, by the kernel's own clock"
    return f"GB/s that the launch must read and write, and in brackets the share of {source.facts.control}"


def ladder_tables(source: Source, ladder: Ladder) -> str:
    """Per line of points: a row per rung."""
    names = {rung: variant.name for rung, variant in ladder.rungs.items()}
    cells = {(row["variant"], point_of(source, row)): row for row in source.rows("points")}
    made = []
    for axis, points in lines_of(source, list(names.values())):
        variants = set(names.values())
        shown = [p for p in points if sum((name, p) in cells for name in variants) > 1]
        if not any(speed_of(cells[name, p]) for p in shown for name in variants if (name, p) in cells):
            continue  # a curve of one rung, which its own section shows, or nothing but gaps, which are listed below
        along = source.experiment.point_axes[axis]
        at = source.experiment.axis_names.index(axis)
        rungs = {rung: name for rung, name in names.items() if any((name, point) in cells for point in shown)}
        rows = [
            [rung, tables.describe(source, ladder, rung), *(value_cell(source, cells.get((name, p))) for p in shown)]
            for rung, name in rungs.items()
        ]
        head = f"{fixed_text(source, axis, shown[0])}: {what_is_shown(source)}, by {along.title}."
        headers = ["rung", "what it is", *(along.label(point[at]) for point in shown)]
        used = [row for (name, point), row in cells.items() if name in rungs.values() and point in shown]
        sentence = _span_sentence(source, ladder, rungs, cells, axis, shown)
        made.append(tables.table(source, head, headers, rows, sentence, used, rungs.values()))
    return "\n\n".join(made)


def _span_sentence(
    source: Source,
    ladder: Ladder,
    rungs: Mapping[str, str],
    cells: Mapping[tuple[str, tuple[int, ...]], Row],
    axis: str,
    points: Sequence[tuple[int, ...]],
) -> str:
    """From where to where the rungs go at the two ends of a line. Each comes from a job of its own, and jobs differ: which rung is
    ahead is for the steps to say.
    """
    along, at = source.experiment.point_axes[axis], source.experiment.axis_names.index(axis)
    said = []
    for point in dict.fromkeys([points[0], points[-1]]):
        here = {rung: cells[name, point] for rung, name in rungs.items() if (name, point) in cells}
        speed = {rung: speed_of(row) for rung, row in here.items() if speed_of(row) is not None}
        if not speed:
            said.append(f"at {along.title} {along.label(point[at])} nothing was measured")
            continue
        least, most = (pick(speed, key=lambda rung: speed[rung] or 0.0) for pick in (min, max))
        ends = f"from {value_text(here[least])} ({least}) to {value_text(here[most])} ({most})"
        said.append(f"at {along.title} {along.label(point[at])} the rungs go {ends}")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}. What of it is more than chance the steps say, whose rungs share a process."


def speed_of(row: Row) -> float | None:
    """What a larger value of is faster."""
    if row["cycles"] is not None:
        return 1 / float(row["cycles"])
    return None if row["gb_per_s"] is None else float(row["gb_per_s"])


def value_text(row: Row) -> str:
    """`812 GB/s` or `31.2 cycles`."""
    return f"{row['cycles']:.4g} cycles" if row["cycles"] is not None else f"{row['gb_per_s']:.4g} GB/s"


# ---- steps -----------------------------------------------------------------------------------------------------------


def step_tables(source: Source, ladder: Ladder) -> str:
    """Per line of points: a row per step, gain with its 95 % interval and the verdict."""
    cells = {(row["step"], point_of(source, row)): row for row in source.rows("steps") if row["ladder"] == ladder.name}
    made = []
    names = [variant.name for variant in ladder.rungs.values()]
    for axis, points in lines_of(source, names):
        shown = [p for p in points if any((step.label, p) in cells for step in ladder.steps)]
        along, at = source.experiment.point_axes[axis], source.experiment.axis_names.index(axis)
        steps = [step for step in ladder.steps if any((step.label, point) in cells for point in shown)]
        known = [cells[step.label, p] for step in steps for p in shown if (step.label, p) in cells]
        if all(row["gain_percent"] is None for row in known):
            continue
        rows = [
            [
                step.label,
                tables.change(source.experiment, step),
                *(tables.step_cell(source, cells.get((step.label, p))) for p in shown),
            ]
            for step in steps
        ]
        head = f"{fixed_text(source, axis, shown[0])}: gain of each step with its 95 % interval, by {along.title}."
        headers = ["step", "from > to", *(along.label(point[at]) for point in shown)]
        used = [r for r in source.rows("points") if r["variant"] in names and point_of(source, r) in shown]
        made.append(tables.table(source, head, headers, rows, step_sentence(known), used, names))
    return "\n\n".join(made) or "No step was measured."


def step_sentence(rows: Sequence[Row]) -> str:
    """The largest gain and the largest loss among the cells, and how many there are of each verdict."""
    known = [row for row in rows if row["gain_percent"] is not None]
    if not known:
        return "No step was measured here."
    verdicts = [sum(row["verdict"] == word for row in known) for word in ("faster", "slower", "tie")]
    best, worst = max(known, key=lambda r: r["gain_percent"]), min(known, key=lambda r: r["gain_percent"])
    text = f"Of {len(known)} cells {verdicts[0]} are faster, {verdicts[1]} slower and {verdicts[2]} a tie"
    if best["verdict"] == "faster":
        text += f"; the most is gained by {best['step']}, {gain_text(best)}"
    if worst["verdict"] == "slower":
        text += f"; the most is lost by {worst['step']}, {gain_text(worst)}"
    return f"{text}."


# ---- counters and gaps -----------------------------------------------------------------------------------------------


def counter_table(source: Source, ladder: Ladder) -> str:
    """Per profiled point: a row per rung with ncu's counters; empty where nothing was profiled."""
    names = {rung: variant.name for rung, variant in ladder.rungs.items()}
    counted: dict[tuple[int, ...], dict[str, dict[str, Row]]] = {}
    for row in source.rows("counters"):
        if row["variant"] in names.values():
            counted.setdefault(point_of(source, row), {}).setdefault(row["variant"], {})[row["metric"]] = row
    made = []
    for point, here in counted.items():
        columns = [c for c in tables.COLUMNS if any(c.value(here.get(name, {})) for name in names.values())]
        rows = [[rung, *(column.show(here.get(name, {})) for column in columns)] for rung, name in names.items()]
        words = sorted({str(r["status"]) for rungs in here.values() for r in rungs.values() if r["status"] != "ok"})
        if not columns:
            made.append(f"{source.experiment.describe(point)}: nothing was counted ({', '.join(words)}).")
            continue
        head = f"{source.experiment.describe(point)}: Nsight Compute, one launch; k, M, G are powers of 1000."
        sentence = _instruction_sentence(names, here)
        headers = ["rung", *(column.title for column in columns)]
        made.append(tables.table(source, head, headers, rows, sentence, None, names.values()))
    return "\n\n".join(made)


def _instruction_sentence(names: Mapping[str, str], here: Mapping[str, Mapping[str, Row]]) -> str:
    executed = {
        rung: float(row["value"])
        for rung, name in names.items()
        if (row := here.get(name, {}).get("smsp__inst_executed.sum")) and row["value"] is not None
    }
    if not executed:
        return "No rung's instructions were counted."
    most, least = max(executed, key=lambda rung: executed[rung]), min(executed, key=lambda rung: executed[rung])
    return (
        f"{most} executes the most warp instructions, {count_text(executed[most])}, and {least} the fewest,"
        f" {count_text(executed[least])}."
    )


def gap_table(source: Source) -> str:
    """Everything asked for that is not there, with the reason of its first point; empty where nothing is missing."""
    grouped: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    axes = source.experiment.axis_names
    for row in source.rows("coverage"):
        if row["status"] != "ok":
            known = all(row[axis] is not None for axis in axes)
            where = source.experiment.describe(point_of(source, row)) if known else ""
            grouped.setdefault((row["variant"], row["what"], row["status"]), []).append((where, row["reason"]))
    rows = []
    for (variant, what, status), points in grouped.items():
        rung = " ".join(source.experiment.rung_names(source.experiment.variant(variant))) or variant
        where = points[0][0] if len(points) == 1 else f"{len(points)} points"
        rows.append([rung, variant, what, where, status, points[0][1]])
    return grid(["rung", "variant", "what", "where", "status", "reason"], rows) if rows else ""
