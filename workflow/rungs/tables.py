"""Tables in Markdown, each with one generated sentence of conclusion and a line of provenance; the README's blocks."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rungs import published
from rungs.aggregate import (
    TENSOR,
    WAVEFRONTS,
    Facts,
    facts_of,
    measured_ladders,
    mhz_range,
    read_data,
    rounds_range,
    span_text,
)
from rungs.errors import RungsError
from rungs.files import ROOT, sha256_json, write_text
from rungs.results import ResultsSet
from rungs.variants import GEMM, Experiment, Ladder, Step, in_words, load_experiment

DAGGER = "†"
Row = dict[str, Any]
Size = tuple[int, int]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """What the tables of one experiment are made of. `stale`: variant -> why its recording does not fit its source."""

    experiment: Experiment
    data: Mapping[str, pd.DataFrame]
    facts: Facts
    stale: Mapping[str, str]
    results: Path
    made: dict[str, list[Row]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rows(self, kind: str) -> list[Row]:
        """The frame's rows, missing numbers as None; made once, as a page asks for them hundreds of times."""
        if kind not in self.made:
            frame = self.data[kind]
            self.made[kind] = frame.astype(object).where(frame.notna(), None).to_dict("records")
        return list(self.made[kind])


def run(results: Path, experiment_names: Sequence[str], stale: Mapping[str, str] | None = None) -> None:
    """Write the tables of each experiment and the page that leads to them."""
    for name in experiment_names:
        write_experiment(results, name, stale)
    write_index(results, experiment_names, stale)


def write_experiment(results: Path, name: str, stale: Mapping[str, str] | None = None) -> None:
    """Write `md/<experiment>.md`."""
    write_text(results / "md" / f"{name}.md", render_experiment(results, name, stale))


def write_index(
    results: Path, names: Sequence[str], stale: Mapping[str, str] | None = None, factorials: Sequence[str] = ()
) -> None:
    """Write the set's `README.md`."""
    write_text(results / "README.md", render_set(results, names, stale, factorials))


def read_source(results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None) -> Source:
    """What the tables of an experiment's ladders are made of."""
    experiment = load_experiment(experiment) if isinstance(experiment, str) else experiment
    data = read_data(results, experiment.name)
    shown = data["shapes" if experiment.workload == GEMM else "points"]["variant"]
    return Source(experiment, data, facts_of(results, experiment.name, shown), stale or {}, results)


# Documents


def render_experiment(results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None) -> str:
    """All tables of an experiment, as `md/<experiment>.md` holds them."""
    source = read_source(results, experiment, stale)
    if source.experiment.workload != GEMM:
        from rungs import pages

        return pages.render(source)
    from rungs import budget, choose

    parts = [f"# {source.experiment.name} on {source.facts.gpu}", source.experiment.question]
    for ladder in measured_ladders(source.experiment, source.data["shapes"]):
        figures = f"../figures/{source.experiment.name}"
        parts += [f"## Ladder {ladder.name}: {ladder.title}", ladder_tables(source, ladder)]
        parts += [
            f"### Steps of ladder {ladder.name}",
            step_tables(source, ladder),
            figure_links(source, ladder, figures),
        ]
        parts += [f"### What changed in the binaries of ladder {ladder.name}", evidence_table(source, ladder)]
        parts += [f"### What each rung of ladder {ladder.name} takes", budget.budget_table(source, ladder)]
        parts += [f"### Counters of ladder {ladder.name}", counter_tables(source, ladder)]
        if costs := cost_tables(source, ladder):
            parts += [f"### What reads cost on ladder {ladder.name}", costs]
    if choice := choose.choice_table(source):
        parts += ["## Which rung for which shape", choice]
    if bridge := budget.bridge_table(source):
        parts += [f"## From {source.experiment.bridge['experiment']} to here", bridge]  # type: ignore[index]
    parts += ["## Floor", floor_table(source), *clock_link(source, f"../figures/{source.experiment.name}")]
    if gaps := gap_table(source):
        parts += ["## Not measured", gaps]
    return "\n\n".join(parts) + "\n"


def render_set(
    results: Path,
    experiment_names: Sequence[str],
    stale: Mapping[str, str] | None = None,
    factorials: Sequence[str] = (),
) -> str:
    """The set's `README.md`: what was measured on what, and where the tables and figures are.

    `factorials`: the experiments whose factorial is in the set.
    """
    from rungs import factorial, pages

    sources = [read_source(results, name, stale) for name in experiment_names]
    parts = [f"# {results.name}"]
    if (results / "data" / "verdicts" / "claims.csv").is_file():
        parts.append("[What the seeds say, tested](md/claims.md)")
    for source in sources:
        name, facts = source.experiment.name, source.facts
        parts += [f"## [{name}](md/{name}.md)", source.experiment.question]
        model = facts.on([*facts.boards.values(), *facts.profile_boards.values()])
        parts.append(f"{model}, driver {facts.driver}{f', {facts.software}' if facts.software else ''}.")
        if source.experiment.workload != GEMM:
            parts += pages.overview(source)
            continue
        parts.append(coverage_table(source))
        if (results / "data" / name / "emulated.csv").is_file():
            parts.append(f"[What ncu counted beside what the emulator counts](md/{name}_counters.md).")
        if ResultsSet(results).jobs("sanitize", name):
            parts.append(f"[What Compute Sanitizer found](md/{name}_sanitizer.md).")
        for ladder in measured_ladders(source.experiment, source.data["shapes"]):
            parts += [f"### Ladder {ladder.name}: {ladder.title}", ladder_tables(source, ladder)]
            parts.append(figure_links(source, ladder, f"figures/{name}"))
        if name in factorials:
            parts += [
                f"### [Factorial: all combinations](md/{name}_factorial.md)",
                factorial.overview(results, name, stale),
            ]
    if (results / "data" / "mutations" / "mutations.csv").is_file():
        parts.append("## [Mutated kernels in the emulator and under Compute Sanitizer](md/mutations.md)")
    return "\n\n".join(parts) + "\n"


def readme_blocks(
    results: Path, experiment: str | Experiment, stale: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Block name -> Markdown, for `apply_blocks`. Links are relative to the checkout.

    Per ladder `<experiment>:<kind>:<ladder>`, kind one of answer, ladder, steps, evidence, takes, ncu, cost, figures,
    waterfall; `<experiment>:floor` and, where it has one, `<experiment>:bridge` and `<experiment>:choice`.
    """
    source = read_source(results, experiment, stale)
    if source.experiment.workload != GEMM:
        from rungs import pages

        return pages.blocks(source)
    from rungs import budget, choose

    name = source.experiment.name
    figures = figures_of(source)
    blocks = {f"{name}:floor": floor_table(source)}
    if choice := choose.choice_table(source):
        blocks[f"{name}:choice"] = choice
    if bridge := budget.bridge_table(source):
        blocks[f"{name}:bridge"] = bridge
    for ladder in measured_ladders(source.experiment, source.data["shapes"]):
        blocks |= {
            f"{name}:answer:{ladder.name}": answer(source, ladder),
            f"{name}:ladder:{ladder.name}": ladder_tables(source, ladder),
            f"{name}:steps:{ladder.name}": step_tables(source, ladder),
            f"{name}:evidence:{ladder.name}": evidence_table(source, ladder),
            f"{name}:takes:{ladder.name}": budget.budget_table(source, ladder),
            f"{name}:ncu:{ladder.name}": counter_tables(source, ladder),
            f"{name}:cost:{ladder.name}": cost_tables(source, ladder)
            or f"No rung of ladder {ladder.name} has counters of its reads.",
            f"{name}:figures:{ladder.name}": figure_links(source, ladder, figures),
            f"{name}:waterfall:{ladder.name}": waterfall_link(source, ladder, figures),
        }
    return blocks


def figures_of(source: Source) -> str:
    """The folder of an experiment's figures, relative to the checkout."""
    return Path(os.path.relpath(source.results.resolve(), ROOT)).as_posix() + f"/figures/{source.experiment.name}"


MARKER = re.compile(r"<!-- rungs:(?P<name>\S+) (?P<edge>begin|end) -->")


def blocks_in(readme_text: str) -> dict[str, str]:
    """Block name -> what stands between its markers, of blocks that have both."""
    found = re.finditer(r"<!-- rungs:(\S+) begin -->(.*?)<!-- rungs:\1 end -->", readme_text, re.DOTALL)
    return {block[1]: block[2] for block in found}


def apply_blocks(readme_text: str, blocks: Mapping[str, str]) -> str:
    """The README with every `<!-- rungs:NAME begin -->` to `end` filled.

    Raises RungsError for a marker without its partner, and for a name that no block has.
    """
    filled, position, opened = [], 0, ""
    for marker in MARKER.finditer(readme_text):
        name = marker["name"]
        if (marker["edge"] == "begin") == bool(opened) or opened not in ("", name):
            raise RungsError(
                f"README marker `{marker[0]}` stands where {f'the end of {opened}' if opened else 'a begin'} is expected:"
                " give each begin its end."
            )
        if marker["edge"] == "begin":
            if name not in blocks:
                raise RungsError(
                    f"README marker `{marker[0]}` names no block: the blocks are {', '.join(sorted(blocks))}."
                )
            filled.append(f"{readme_text[position : marker.end()]}\n{blocks[name].strip()}\n")
            opened = name
        else:
            opened = ""
            position = marker.start()
    if opened:
        raise RungsError(
            f"README marker `<!-- rungs:{opened} begin -->` has no end: add `<!-- rungs:{opened} end -->`."
        )
    return "".join(filled) + readme_text[position:]


def figure_links(source: Source, ladder: Ladder, folder: str) -> str:
    """The heat map and the ladder, with what the map says on average over its cells."""
    names = [variant.name for variant in ladder.rungs.values()]
    used = [row for row in source.rows("shapes") if row["variant"] in names]
    return "\n\n".join(
        [
            f"![Gain of each step of ladder {ladder.name}, K against M = N]({folder}/heatmap_{ladder.name}.svg)",
            f"![Share of the control along ladder {ladder.name}]({folder}/ladder_{ladder.name}.svg)",
            _waterfall(ladder, folder),
            f"![Roofline of ladder {ladder.name}]({folder}/roofline_{ladder.name}.svg)",
            f"**{_map_sentence([row for row in source.rows('steps') if row['ladder'] == ladder.name])}**",
            f"<sub>{provenance_line(source, used, names)}</sub>",
        ]
    )


def _waterfall(ladder: Ladder, folder: str) -> str:
    return f"![From {ladder.path[0]} to {ladder.path[-1]}, step by step]({folder}/waterfall_{ladder.name}.svg)"


def waterfall_link(source: Source, ladder: Ladder, folder: str) -> str:
    """The waterfall of the path alone, with what it comes to at the largest K of the M = N that it shows."""
    names = [ladder.rungs[rung].name for rung in ladder.path]
    used = [row for row in source.rows("shapes") if row["variant"] in names]
    size = published.size_beside((row["m"], row["n"]) for row in used)
    used = [row for row in used if (row["m"], row["n"]) == size]
    return "\n\n".join(
        [_waterfall(ladder, folder), answer(source, ladder, size), f"<sub>{provenance_line(source, used, names)}</sub>"]
    )


def clock_link(source: Source, folder: str) -> list[str]:
    """The clock and the power over the first floor job, where there is one and it read them."""
    if not source.data["floor"]["mhz_low"].notna().any():
        return []
    return [f"![Clock, power and temperature over a job of {source.experiment.name}]({folder}/clock_power.svg)"]


def _map_sentence(rows: Sequence[Row]) -> str:
    """Which step gains most and which least on average over the map; only of steps that have every cell."""
    cells = len({(row["m"], row["n"], row["k"]) for row in rows})
    gains: dict[str, list[float]] = {}
    for row in rows:
        if row["gain_percent"] is not None:
            gains.setdefault(row["step"], []).append(row["gain_percent"])
    whole = {step: values for step, values in gains.items() if len(values) == cells}
    if not whole:
        return "No step has every cell of the map, so that none has an average."
    means = {step: 100 * (math.prod(1 + v / 100 for v in values) ** (1 / cells) - 1) for step, values in whole.items()}
    best, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)

    def told(step: str) -> str:
        low, high = min(whole[step]), max(whole[step])
        return f"{signed(means[step], 1)} % ({signed(low, 1)} to {signed(high, 1)} %)"

    start = f"In the geometric mean over {cells} shapes {best} gains {told(best)}"
    return f"{start}, the most, and {least} {told(least)}, the least." if best != least else f"{start}."


# Tables


def ladder_tables(source: Source, ladder: Ladder) -> str:
    """Per M = N, largest first: a row per rung, TFLOP/s and share of the control at each K."""
    names = {rung: variant.name for rung, variant in ladder.rungs.items()}
    cells = {
        (row["variant"], row["m"], row["n"], row["k"]): row
        for row in source.rows("shapes")
        if row["variant"] in names.values()
    }
    tables = []
    for size in _sizes(cells):
        depths = sorted({key[3] for key in cells if key[1:3] == size})
        rows = [
            [rung, describe(source, ladder, rung), *(_rung_cell(source, cells.get((name, *size, k))) for k in depths)]
            for rung, name in names.items()
        ]
        control = [
            [
                row["control_tflops"]
                for name in names.values()
                if (row := cells.get((name, *size, k))) and row["control_tflops"]
            ]
            for k in depths
        ]
        rows.append(["control", source.facts.control, *(f"{pd.Series(c).median():.1f}" if c else "" for c in control)])
        head = (
            f"{size_text(size)}: TFLOP/s and, in brackets, the share of {source.facts.control} in the same rounds. Each row is a"
            " job of its own at a clock of its own: compare two rows by the share or, better, by the step between them."
            + _on_another_board(source, names)
        )
        headers = ["rung", "what it is", *(f"K={k}" for k in depths)]
        used = [row for key, row in cells.items() if key[1:3] == size]
        tables.append(
            table(
                source, head, headers, rows, _ladder_sentence(source, ladder, names, cells, size), used, names.values()
            )
        )
    return "\n\n".join(tables)


def _on_another_board(source: Source, names: Mapping[str, str]) -> str:
    """Which rungs (rung -> variant) were timed on another GPU than most, in a sentence; empty where all were on one."""
    where = {rung: source.facts.boards[name] for rung, name in names.items() if name in source.facts.boards}
    tally = pd.Series(where).value_counts()
    if len(tally) < 2:
        return ""
    others = [rung for rung, board in where.items() if board != tally.index[0]]
    were, their = ("were", "their shares compare") if len(others) > 1 else ("was", "its share compares")
    return f" {', '.join(others)} {were} timed on another GPU than the rest: {their} with the others' by steps alone."


def step_tables(source: Source, ladder: Ladder) -> str:
    """Per M = N, largest first: a row per step, gain with its 95 % interval and the verdict at each K."""
    cells = {
        (row["step"], row["m"], row["n"], row["k"]): row for row in source.rows("steps") if row["ladder"] == ladder.name
    }
    tables = []
    for size in _sizes(cells):
        here = {(key[0], key[3]): row for key, row in cells.items() if key[1:3] == size}
        depths = sorted({k for _, k in here})
        rows = [
            [
                step.label,
                change(source.experiment, step),
                *(step_cell(source, here.get((step.label, k))) for k in depths),
            ]
            for step in ladder.steps
            if any((step.label, k) in here for k in depths)
        ]
        head = f"{size_text(size)}: gain in speed, with its 95 % interval."
        headers = ["step", "change", *(f"K={k}" for k in depths)]
        names = [variant.name for variant in ladder.rungs.values()]
        used = [row for row in source.rows("shapes") if row["variant"] in names and (row["m"], row["n"]) == size]
        notes = [
            f"The verdict's interval is wider, since ladder {ladder.name} makes {_claims(cells)} claims; none is made under the floor."
        ]
        timed = [row for row in here.values() if row["gain_percent"] is not None]
        if loose := dict.fromkeys(f"{row['step']}: {row['reason']}" for row in timed if not row["controlled"]):
            notes.append("‡ " + " ".join(loose))
        tables.append(
            table(source, head, headers, rows, _step_sentence(source, ladder, here, size), used, names, notes)
        )
    return "\n\n".join(tables)


def evidence_table(source: Source, ladder: Ladder) -> str:
    """A row per step: registers, CTAs per SM, other resources and the opcodes of the main loop, before > after."""
    changes = [row for row in source.rows("changes") if row["ladder"] == ladder.name]
    controlled = {row["step"]: row for row in source.rows("steps") if row["ladder"] == ladder.name}
    rows = []
    for step in ladder.steps:
        here = [row for row in changes if row["step"] == step.label]
        if not here:
            continue
        resource = {row["name"]: row for row in here if row["kind"] == "resource"}
        others = [_moved(row) for name, row in resource.items() if name not in ("registers", "ctas_per_sm")]
        opcodes = [_moved(row) for row in here if row["kind"] == "opcode"]
        old = bool({step.source_variant.name, step.target_variant.name} & set(source.stale))
        rows.append(
            [
                step.label,
                source.experiment.factors[step.factor].title,
                _marked(_before_after(resource.get("registers")), old),
                _marked(_before_after(resource.get("ctas_per_sm")), old),
                _marked(", ".join(others) or "none", old),
                _marked(", ".join(opcodes) or "none", old),
                "yes" if controlled.get(step.label, {}).get("controlled") else "**no**",
            ]
        )
    headers = [
        "step",
        "factor",
        "registers",
        "CTAs per SM",
        "other resources",
        "opcodes in the main loop",
        "controlled",
    ]
    names = [variant.name for variant in ladder.rungs.values()]
    head = "What differs between the two binaries of each step, before > after."
    return table(source, head, headers, rows, _evidence_sentence(changes, controlled), [], names)


def counter_tables(source: Source, ladder: Ladder) -> str:
    """Per profiled shape: a row per rung with ncu's counters. A gap says which of the three kinds it is.

    A column that no rung has is left out; where there is none at all, one column says why.
    """
    names = {rung: variant.name for rung, variant in ladder.rungs.items()}
    rows = [row for row in source.rows("counters") if row["variant"] in names.values()]
    shapes = sorted({(row["m"], row["n"], row["k"]) for row in rows}, reverse=True)
    tables = []
    for shape in shapes:
        here: dict[str, dict[str, Row]] = {}
        for row in rows:
            if (row["m"], row["n"], row["k"]) == shape:
                here.setdefault(row["variant"], {})[row["metric"]] = row
        columns = [column for column in COLUMNS if any(column.value(counters) for counters in here.values())]
        body = [
            [
                rung,
                *(_marked(column.show(here.get(name, {})), name in source.stale) for column in columns or COLUMNS[:1]),
            ]
            for rung, name in names.items()
        ]
        reasons = sorted(
            {
                f"{row['status']}: {row['reason']}"
                for counters in here.values()
                for row in counters.values()
                if row["status"] not in ("ok", "not on this chip") and row["reason"]
            }
        )
        head = f"M={shape[0]}, N={shape[1]}, K={shape[2]}: Nsight Compute, one launch; k, M, G are powers of 1000."
        headers = ["rung", *(column.title for column in columns)] if columns else ["rung", "counters"]
        sentence = _counter_sentence(names, here, shape)
        notes = [" ".join(reasons)] if reasons else []
        if any((counters.get(L2_HITS, {}).get("value") or 0) > 100 for counters in here.values()):
            notes.append(
                "An L2 hit rate above 100 % is ncu's: it counts sectors and hits in different passes of a short kernel."
            )
        tables.append(table(source, head, headers, body, sentence, None, names.values(), notes))
    return "\n\n".join(tables)


def cost_tables(source: Source, ladder: Ladder) -> str:
    """Per profiled shape: what each rung's reads from shared memory cost, in instructions, wavefronts and time side by side.

    Counters are Nsight Compute's; time, throughput and share are those of the sweep at the same shape. Empty without
    counters of reads.
    """
    names = {rung: variant.name for rung, variant in ladder.rungs.items()}
    counted: dict[Shape, dict[str, dict[str, float]]] = {}
    for row in source.rows("counters"):
        if row["variant"] in names.values() and row["value"] is not None:
            here = counted.setdefault((row["m"], row["n"], row["k"]), {})
            here.setdefault(row["variant"], {})[row["metric"]] = row["value"]
    tables = []
    for shape in sorted(counted, reverse=True):
        reads = {rung: Reads.of(counted[shape].get(name, {})) for rung, name in names.items()}
        if not any(reads.values()):
            continue
        timed = {row["variant"]: row for row in source.rows("shapes") if (row["m"], row["n"], row["k"]) == shape}
        rows = [
            [rung, describe(source, ladder, rung), *_cost_cells(source, reads[rung], timed.get(name), name)]
            for rung, name in names.items()
        ]
        head = (
            f"M={shape[0]}, N={shape[1]}, K={shape[2]}: reads of shared memory as Nsight Compute counts them in one launch, beside"
            " the time that the sweep measured; k, M, G are powers of 1000."
        )
        headers = [
            "rung",
            "what it is",
            "read instructions",
            "read wavefronts",
            "per instruction",
            "write wavefronts",
            "time, µs",
            "TFLOP/s",
            f"share of {source.facts.control}",
        ]
        tma = any(counters.get(TMA_LOADS) for counters in counted[shape].values())
        notes = ["TMA writes shared memory past the pipe whose wavefronts are counted."] if tma else []
        used = [row for row in timed.values() if row["variant"] in names.values()]
        sentence = _cost_sentence(source, ladder, shape, reads)
        tables.append(table(source, head, headers, rows, sentence, used, names.values(), notes))
    return "\n\n".join(tables)


@dataclass(frozen=True)
class Reads:
    """Warp instructions that read shared memory, and wavefronts of shared memory, of one launch."""

    lds: float
    ldsm: float
    wavefronts: float
    writes: float

    @property
    def instructions(self) -> float:
        return self.lds + self.ldsm

    @staticmethod
    def of(counters: Mapping[str, float]) -> Reads | None:
        """None unless all of them were counted: a sum with a term missing is no sum.

        LDS that took no wavefront read nothing: they are what the assembler fills a cp.async loop with.
        """
        metrics = [LDS, LDSM, *(f"{WAVEFRONTS}{op}.sum" for op in ("ld", "ldsm", "st", "ldgsts"))]
        if not set(metrics) <= set(counters):
            return None
        lds, ldsm, ld, ldm, st, ldgsts = (counters[metric] for metric in metrics)
        return Reads(lds if ld else 0.0, ldsm, ld + ldm, st + ldgsts)


def _cost_cells(source: Source, reads: Reads | None, row: Row | None, name: str) -> list[str]:
    old = name in source.stale
    if reads:
        parts = [f"{count_text(n)} {word}" for word, n in (("ldmatrix", reads.ldsm), ("LDS", reads.lds)) if n]
        each = f"{reads.wavefronts / reads.instructions:.2f}" if reads.instructions else "none read"
        counted = [" + ".join(parts) or "0", count_text(reads.wavefronts), each, count_text(reads.writes)]
    else:
        counted = ["not counted"] * 4
    if row is None or row["time_us"] is None:
        timed = [str(row["status"]) if row else "not timed"] * 3
    else:
        share = row["status"] if row["share_percent"] is None else f"{row['share_percent']:.1f} %"
        timed = [f"{row['time_us']:.4g}", f"{row['tflops']:.1f}", str(share)]
    return [_marked(cell, old) for cell in (*counted, *timed)]


def _cost_sentence(source: Source, ladder: Ladder, shape: Shape, reads: Mapping[str, Reads | None]) -> str:
    """What each step whose reads change saves in instructions, in wavefronts and in time; the path's first."""
    steps = {
        row["step"]: row
        for row in source.rows("steps")
        if row["ladder"] == ladder.name and (row["m"], row["n"], row["k"]) == shape
    }
    path = [f"{a}>{b}" for a, b in itertools.pairwise(ladder.path)]
    told, unmoved = [], []
    for step in sorted(ladder.steps, key=lambda step: step.label not in path):
        before, after = reads[step.source], reads[step.target]
        if before is None or after is None or not (before.instructions and before.wavefronts):
            continue
        instructions, wavefronts = after.instructions / before.instructions, after.wavefronts / before.wavefronts
        if max(abs(instructions - 1), abs(wavefronts - 1)) < 0.02:
            unmoved.append(step.label)
            continue
        counts = [_changed_by(instructions, "read instructions"), _changed_by(wavefronts, "read wavefronts")]
        told.append(
            f"{step.label}, {change(source.experiment, step)}, has {', '.join(counts)} and {_time(steps.get(step.label))}"
        )
    where = f"At {'x'.join(map(str, shape))}"
    if not told:
        return f"{where} no step of ladder {ladder.name} changes its read instructions or their wavefronts by 2 %."
    rest = (
        f"; {', '.join(unmoved)} {'leaves' if len(unmoved) == 1 else 'leave'} its reads as they are" if unmoved else ""
    )
    return f"{where} {'; '.join(told)}{rest}."


def _changed_by(ratio: float, what: str) -> str:
    if abs(ratio - 1) < 0.005:
        return f"as many {what}"
    if ratio >= 2:
        return f"{ratio:.1f} times the {what}"
    return f"{100 * abs(ratio - 1):.1f} % {'fewer' if ratio < 1 else 'more'} {what}"


def _time(row: Row | None) -> str:
    """Of a step: what its paired gain is in time."""
    if row is None or row["gain_percent"] is None:
        return "a time that was not measured as a step"
    change = 100 * (1 / (1 + row["gain_percent"] / 100) - 1)
    word = {"tie": " (a tie)", "undecided": " (undecided)", "none": " (no floor)"}.get(row["verdict"], "")
    return f"{abs(change):.{digits_of(change)}f} % {'less' if change < 0 else 'more'} time{word}"


def floor_table(source: Source) -> str:
    """What the same binary shows against itself."""
    rows = []
    for row in source.rows("floor"):
        values = [
            _percent_or(row[name], "not measured") for name in ("floor_percent", "within_percent", "between_percent")
        ]
        rows.append([row["shape_class"], *values, str(row["shapes"]), str(row["jobs"])])
    known = [row for row in source.rows("floor") if row["floor_percent"] is not None]
    if known:
        worst = max(known, key=lambda row: row["floor_percent"])
        most = f"{worst['floor_percent']:.2f} % ({worst['shape_class']})"
        if (worst["between_percent"] or 0) > worst["within_percent"]:
            what = f"The same step, measured in {worst['jobs']} jobs, differs by at most {most}"
        else:
            what = f"The same binary differs from its twin in one job by at most {most}"
        sentence = f"{what}, and no step is claimed under its class's floor."
    else:
        sentence = "The floor was not measured, so that no step has a verdict."
    head = f"{source.experiment.floor_variant.name} against itself: its twin in the same rounds, and the same steps in separate jobs."
    headers = ["shape class", "floor", "within a job", "between jobs", "shapes", "jobs"]
    name = source.experiment.floor_variant.name
    if not source.facts.floors:  # a quick look: the twins are those of the sweeps
        timed = "shapes" if source.experiment.workload == GEMM else "points"
        used = [row for row in source.rows(timed) if row["variant"] == name]
        return table(source, head, headers, rows, sentence, used, [name])
    return "\n\n".join([head, grid(headers, rows), f"**{sentence}**", f"<sub>{_floor_line(source)}</sub>"])


def _floor_line(source: Source) -> str:
    """Provenance of the floor: the floor jobs' own boards, clocks, rounds, dates, runs and builds."""
    facts, jobs = source.facts, source.facts.floors
    rows = [row for row in source.rows("floor") if row["rounds_low"] is not None]
    rounds = span_text([row[f"rounds_{end}"] for row in rows for end in ("low", "high")])
    clocks = span_text([row[f"mhz_{end}"] for row in rows for end in ("low", "high") if row[f"mhz_{end}"] is not None])
    parts = [f"{facts.on(job.board for job in jobs.values())}, driver {facts.driver}"]
    parts += [facts.software] if facts.software else []
    parts += [f"{facts.clock}, medians {clocks} MHz" if clocks else f"{facts.clock}, clock not read"]
    parts += [f"{rounds or 'no'} rounds", f"fill {facts.fill}, L2 {facts.l2}"]
    parts.append(
        " to ".join(dict.fromkeys([min(job.day for job in jobs.values()), max(job.day for job in jobs.values())]))
    )
    parts.append(f"floor jobs' runs {_named({name: job.run_id for name, job in jobs.items()})}")
    parts.append(f"builds {_named({job.build_id: job.build_id for job in jobs.values()})}")
    return "; ".join(parts) + f". The same in all rungs: {'; '.join(source.experiment.declared)}."


def coverage_table(source: Source) -> str:
    """How much of what was asked for is there, per kind of job."""
    frame = source.data["coverage"]
    rows = []
    for what in dict.fromkeys(frame["what"]):
        counts = Counter(frame[frame["what"] == what]["status"])
        rest = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if status != "ok")
        rows.append([what, str(counts["ok"]), rest or "none"])
    return grid(["what", "ok", "other"], rows)


def gap_table(source: Source) -> str:
    """Everything asked for that is not there, with its reason; empty where nothing is missing."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for row in source.rows("coverage"):
        if row["status"] != "ok":
            shape = "" if row["k"] is None else f"{row['m']}x{row['n']}x{row['k']}"
            grouped.setdefault((row["variant"], row["what"], row["status"], row["reason"]), []).append(shape)
    if not grouped:
        return ""
    rows = []
    for (variant, what, status, reason), shapes in grouped.items():
        rung = " ".join(source.experiment.rung_names(source.experiment.variant(variant))) or variant
        where = ", ".join(filter(None, shapes)) if len(shapes) < 4 else f"{len(shapes)} shapes"
        rows.append([rung, variant, what, where, status, reason])
    return grid(["rung", "variant", "what", "where", "status", "reason"], rows)


# Cells


def _rung_cell(source: Source, row: Row | None) -> str:
    if row is None:
        return "not run"
    if row["tflops"] is None:
        return str(row["status"])
    mark = DAGGER if row["variant"] in source.stale else ""
    share = row["status"] if row["share_percent"] is None else f"{row['share_percent']:.1f} %"
    return f"{row['tflops']:.1f} ({share}){mark}"


def step_cell(source: Source, row: Row | None) -> str:
    """`+12.3 % ±0.2 faster`, the word of what went wrong, or the gain with the word of what the verdict lacks."""
    if row is None:
        return "not run"
    if row["gain_percent"] is None:
        return str(row["status"])
    word = row["verdict"] if row["verdict"] != "none" else "no floor"
    if row["rounds_to_decide"] is not None:
        more = _about(row["rounds_to_decide"])
        word += f" (+{more} round{'' if more == 1 else 's'})"
    marks = (DAGGER if {row["source_variant"], row["target_variant"]} & set(source.stale) else "") + (
        "" if row["controlled"] else "‡"
    )
    return f"{gain_text(row)} {word}{marks}"


def gain_text(row: Row) -> str:
    """`+12.3 % ±0.2`; a digit more where gain and interval are under 1 %."""
    if row["high_percent"] is None:
        return f"{row['gain_percent']:+.1f} % (too few rounds for an interval)"
    half = (row["high_percent"] - row["low_percent"]) / 2
    digits = max(digits_of(row["gain_percent"]), 2 if half < 0.05 else 1)
    return f"{signed(row['gain_percent'], digits)} % ±{half:.{digits}f}"


def digits_of(percent: float) -> int:
    return 2 if abs(percent) < 0.995 else 1


def signed(percent: float, digits: int) -> str:
    """`+12.3`; what rounds to nothing has no minus."""
    return f"{round(percent, digits) + 0.0:+.{digits}f}"


def _about(rounds: int) -> int:
    """Rounded up to two digits: it is an estimate."""
    unit = 10 ** max(len(str(rounds)) - 2, 0)
    return -(-rounds // unit) * unit


def _percent_or(value: float | None, word: str) -> str:
    return word if value is None else f"{value:.2f} %"


def _before_after(row: Row | None) -> str:
    if row is None or (row["before"] is None and row["after"] is None):
        return "not inspected"
    before, after = ("?" if value is None else f"{value:g}" for value in (row["before"], row["after"]))
    return before if before == after else f"{before} > {after}"


def _marked(cell: str, stale: bool) -> str:
    return cell + DAGGER if stale and any(map(str.isdigit, cell)) else cell


def _moved(row: Row) -> str:
    return f"{row['name']} {_before_after(row)}"


def describe(source: Source, ladder: Ladder, rung: str) -> str:
    return in_words(source.experiment, ladder, rung)


def change(experiment: Experiment, step: Step) -> str:
    levels = experiment.factors[step.factor].levels
    return " > ".join(
        levels[variant.level(step.factor)].title for variant in (step.source_variant, step.target_variant)
    )


@dataclass(frozen=True)
class Column:
    """A column of the counter table: metrics that are added up, or with `pick` shown by their own rule."""

    title: str
    metrics: tuple[str, ...]
    show_value: Callable[[float], str]
    pick: re.Pattern[str] | None = None

    def value(self, counters: Mapping[str, Row]) -> str:
        """The cell; empty without a counter."""
        if self.pick:
            named = (
                (row["value"], match[1]) for metric, row in counters.items() if (match := self.pick.fullmatch(metric))
            )
            top = sorted(((value, name) for value, name in named if value and name not in NO_STALL), reverse=True)[:3]
            return ", ".join(f"{name} {value:.1f}" for value, name in top)
        values = [counters[metric]["value"] for metric in self.metrics if metric in counters]
        values = [value for value in values if value is not None]
        return self.show_value(sum(values)) if values else ""

    def show(self, counters: Mapping[str, Row]) -> str:
        """The cell, or the word for its gap: that of its own metrics, else that of the rung."""
        if cell := self.value(counters):
            return cell
        own = [
            row
            for metric, row in counters.items()
            if metric in self.metrics or (self.pick and self.pick.fullmatch(metric))
        ]
        words = [row["status"] for row in own or counters.values() if row["status"] != "ok"]
        return words[0] if words else "not counted" if counters else "not run"


NO_STALL = ("selected",)
"""A warp that issues is not stalled, though ncu lists it among the reasons."""


def count_text(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    return f"{count_text(value)}{'' if abs(value) >= 999.5 else ' '}B"


def _share(value: float) -> str:
    return f"{value:.1f} %"


LDS, LDSM = "smsp__inst_executed_op_shared_ld_pred_on_any.sum", "smsp__inst_executed_op_ldsm.sum"
TMA_LOADS = "smsp__inst_executed_op_tma_ld.sum"
L2_HITS = "lts__t_sector_hit_rate.pct"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_"
COLUMNS = (
    Column("instructions", ("smsp__inst_executed.sum",), count_text),
    Column("ldmatrix", (LDSM,), count_text),
    Column("LDS", (LDS,), count_text),
    Column("STS", ("smsp__inst_executed_op_shared_st.sum",), count_text),
    Column("cp.async", ("smsp__inst_executed_op_ldgsts.sum",), count_text),
    Column("TMA loads", (TMA_LOADS,), count_text),
    Column("shared wavefronts", tuple(f"{WAVEFRONTS}{op}.sum" for op in ("ld", "ldsm", "st", "ldgsts")), count_text),
    Column("load conflicts", (f"{_CONFLICTS}ld.sum",), count_text),
    Column("store conflicts", (f"{_CONFLICTS}st.sum",), count_text),
    Column(
        "bytes loaded",
        (
            "l1tex__m_xbar2l1tex_read_bytes_mem_lg_op_ld.sum",
            # It has the bytes of cp.async in it (on an H200 a cp.async rung shows them under both names), not those of TMA.
            "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
        ),
        _bytes,
    ),
    Column("DRAM", ("dram__bytes.sum",), _bytes),
    Column("L2 hits", (L2_HITS,), _share),
    Column("tensor pipe busy while an SM is active", (TENSOR,), _share),
    Column("top stalls (warps per issue)", (), count_text, STALL),
)


# Sentences


def _ladder_sentence(
    source: Source, ladder: Ladder, names: Mapping[str, str], cells: Mapping[tuple, Row], size: Size
) -> str:
    """Fastest and slowest rung at the largest K that has figures, and what the path gains from end to end.

    Rungs stand in jobs of their own: `standing` says which of them can be ranked at all.
    """
    depths = sorted({key[3] for key in cells if key[1:3] == size}, reverse=True)
    for k in depths:
        rows = {rung: cells[name, *size, k] for rung, name in names.items() if (name, *size, k) in cells}
        rows = {rung: row for rung, row in rows.items() if row["share_percent"] is not None}
        if len(rows) < 2:
            continue
        steps = paired_steps(source, (*size, k))
        ends: list[str] = []
        for word, pick in (("fastest", max), ("slowest", min)):
            rung = pick(rows, key=lambda rung: rows[rung]["share_percent"])
            alike, against = standing(rows[rung], list(rows.values()), steps, word == "fastest")
            spoken = {row["variant"]: name for name, row in rows.items()}
            what = f"{rung}, {describe(source, ladder, rung)}"
            share = f"{rows[rung]['share_percent']:.1f} %" + (f" of {source.facts.control}" if not ends else "")
            if against:
                most = "largest" if word == "fastest" else "smallest"
                other = ", ".join(spoken[name] for name in against)
                ends.append(
                    f"no rung is named {word}: {what}, has the {most} share, {share}, but paired in one job {other}"
                    f" {'is' if len(against) == 1 else 'are'} {word[:4]}er"
                )
            else:
                ends.append(
                    f"the {word} rung is {what}{not_apart([spoken[n] for n in alike], len(rows))}, with {share}"
                )
        sentence = f"At {size_text(size)}, K={k} {', and '.join(ends)}"
        if path := path_steps(source, ladder, (*size, k)):
            sentence += f"; the steps of the path {' > '.join(ladder.path)} gain {_together(path):+.1f} % together"
        return sentence + "."
    return f"At {size_text(size)} fewer than two rungs have a share of {source.facts.control}, so there is nothing to compare."


def paired_steps(source: Source, shape: Shape) -> dict[tuple[str, str], str]:
    """(source variant, target variant) -> verdict of the step between them at one shape, where it was timed."""
    return {
        (row["source_variant"], row["target_variant"]): row["verdict"]
        for row in source.rows("steps")
        if (row["m"], row["n"], row["k"]) == shape and row["gain_percent"] is not None
    }


def standing(
    end: Row, rows: Sequence[Row], steps: Mapping[tuple[str, str], str], fastest: bool
) -> tuple[list[str], list[str]]:
    """The variants from which the one with the largest share is not told apart, and those that a paired step says are faster.

    With `fastest` false the same of the one with the smallest share. Where a step connects two, its verdict counts;
    elsewhere the shares, which are of two jobs, must differ by more than shares do from job to job.
    """
    alike, against = [], []
    before, after = ("slower", "faster") if fastest else ("faster", "slower")
    for row in rows:
        names = end["variant"], row["variant"]
        if names[0] == names[1]:
            continue
        if names in steps or names[::-1] in steps:
            verdict = steps.get(names) or {"faster": "slower", "slower": "faster"}.get(steps[names[::-1]], "tie")
            if verdict == after:
                against.append(row["variant"])
            elif verdict != before:
                alike.append(row["variant"])
        elif not (apart(end, row) if fastest else apart(row, end)):
            alike.append(row["variant"])
    return alike, against


def apart(more: Row, less: Row) -> bool:
    """Whether two shares of different jobs differ by more than twice the error of their difference.

    The error is that of the rounds of both jobs and the spread of such a share from job to job; without a measured
    spread nothing is told apart.
    """
    spread = more["spread_percent"]
    if spread is None:
        return False
    errors = [spread, spread]
    for row in (more, less):
        if row["share_high_percent"] is None:
            return False
        errors.append(100 * (row["share_high_percent"] - row["share_low_percent"]) / 4 / row["share_percent"])
    return 100 * (more["share_percent"] / less["share_percent"] - 1) > 2 * math.hypot(*errors)


def not_apart(alike: Sequence[str], count: int) -> str:
    """` (not told apart from B5)`, empty where one of `count` stands alone."""
    if not alike:
        return ""
    whom = "any other" if len(alike) == count - 1 and count > 2 else ", ".join(alike)
    return f" (not told apart from {whom})"


def path_steps(source: Source, ladder: Ladder, shape: tuple[int, ...]) -> list[Row]:
    """The rows of the steps along the ladder's path at one shape; empty unless each was measured."""
    rows = {
        row["step"]: row
        for row in source.rows("steps")
        if row["ladder"] == ladder.name and (row["m"], row["n"], row["k"]) == shape and row["gain_percent"] is not None
    }
    path = [rows.get(f"{a}>{b}") for a, b in itertools.pairwise(ladder.path)]
    return [row for row in path if row] if all(path) else []


def _together(steps: Sequence[Row]) -> float:
    """Gain in percent of steps one after another. Each was paired in its own job, so no clock or control enters."""
    return 100 * (math.prod(1 + row["gain_percent"] / 100 for row in steps) - 1)


def answer(source: Source, ladder: Ladder, size: Size | None = None) -> str:
    """One sentence: what each step of the path buys at the largest cube, or at the largest shape there is; of that (M, N)."""
    shapes = sorted({(r["m"], r["n"], r["k"]) for r in source.rows("steps") if r["ladder"] == ladder.name})
    shapes = [shape for shape in shapes if size in (None, shape[:2]) and path_steps(source, ladder, shape)]
    if not shapes:
        return f"Ladder {ladder.name} has no shape at which every step of its path was measured."
    shape = max([s for s in shapes if len(set(s)) == 1] or shapes)
    path = path_steps(source, ladder, shape)
    steps = {step.label: step for step in ladder.steps}
    bought = []
    for row in path:
        step = steps[row["step"]]
        old, new = (
            source.experiment.factors[step.factor].levels[variant.level(step.factor)].title
            for variant in (step.source_variant, step.target_variant)
        )
        bought.append(f"{new} instead of {old} {gain_text(row)} ({row['verdict']})")
    last = next(
        row
        for row in source.rows("shapes")
        if row["variant"] == ladder.rungs[ladder.path[-1]].name and (row["m"], row["n"], row["k"]) == shape
    )
    share = f", to {last['share_percent']:.1f} % of {source.facts.control}" if last["share_percent"] else ""
    mark = DAGGER if {v.name for v in ladder.rungs.values()} & set(source.stale) else ""
    return (
        f"**At {'x'.join(map(str, shape))} on an {source.facts.gpu}: {', '.join(bought)}; together"
        f" {_together(path):+.1f} %{share}.**{mark}"
    )


def _step_sentence(source: Source, ladder: Ladder, rows: Mapping[tuple[str, int], Row], size: Size) -> str:
    """The controlled steps that gain and lose most, how the path's gains change with K, and the count of verdicts."""
    judged = [row for row in rows.values() if row["verdict"] != "none"]
    where = f"At {size_text(size)}"
    if not judged:
        known = any(row["gain_percent"] is not None for row in rows.values())
        return f"{where} no step has a verdict, since {'the floor was not measured' if known else 'none was timed'}."
    counts = Counter(row["verdict"] for row in judged)
    tally = ", ".join(f"{counts[word]} {word}" for word in ("faster", "slower", "tie", "undecided") if counts[word])
    clauses = []
    faster, slower = (
        [row for row in judged if row["verdict"] == verdict and row["controlled"]] for verdict in ("faster", "slower")
    )
    if faster:
        most = max(faster, key=lambda row: row["gain_percent"])
        clauses.append(f"{most['step']} gains most, {gain_text(most)} at K={most['k']}")
    if slower:
        least = min(slower, key=lambda row: row["gain_percent"])
        clauses.append(f"{least['step']} loses most, {gain_text(least)} at K={least['k']}")
    if not clauses:
        clauses.append("no controlled step is clear of the floor")
    clauses += _trends(ladder, rows)
    unsure = list(dict.fromkeys(row["step"] for row in judged if not row["controlled"]))
    loose = f"; {', '.join(unsure)} not controlled and so not ranked" if unsure else ""
    return f"{where} {', '.join(clauses)}; verdicts: {tally}{loose}."


def _trends(ladder: Ladder, rows: Mapping[tuple[str, int], Row]) -> list[str]:
    """How the gain of each step of the path changes from the smallest to the largest K, as far as intervals tell."""
    found: dict[tuple[int, int], list[str]] = {}
    for label in (f"{a}>{b}" for a, b in zip(ladder.path, ladder.path[1:], strict=False)):
        depths = sorted(k for (step, k), row in rows.items() if step == label and row["claim_high_percent"] is not None)
        if len(depths) > 1:
            line = [rows[label, k] for k in depths]
            digits = max(digits_of(row["gain_percent"]) for row in (line[0], line[-1]))
            ends = " to ".join(signed(row["gain_percent"], digits) for row in (line[0], line[-1]))
            found.setdefault((depths[0], depths[-1]), []).append(f"of {label} {trend(line)} ({ends} %)")
    return [f"from K={first} to {last} the gain {', '.join(steps)}" for (first, last), steps in found.items()]


def trend(line: Sequence[Row]) -> str:
    """`rises`, `falls`, `peaks`, `dips` or `does not change beyond its interval`, along rows in the order of K."""
    first, last, inner = line[0], line[-1], line[1:-1]
    if any(row["claim_low_percent"] > max(first["claim_high_percent"], last["claim_high_percent"]) for row in inner):
        return "peaks in between"
    if any(row["claim_high_percent"] < min(first["claim_low_percent"], last["claim_low_percent"]) for row in inner):
        return "dips in between"
    if last["claim_low_percent"] > first["claim_high_percent"]:
        return "rises"
    return "falls" if last["claim_high_percent"] < first["claim_low_percent"] else "does not change beyond its interval"


def _evidence_sentence(changes: Sequence[Row], controlled: Mapping[str, Row]) -> str:
    good = [label for label, row in controlled.items() if row["controlled"]]
    bad = [label for label, row in controlled.items() if not row["controlled"]]
    moved = [
        row
        for row in changes
        if row["name"] == "registers" and row["before"] is not None and row["after"] not in (None, row["before"])
    ]
    sentence = f"{len(good)} of {len(controlled)} steps are controlled: the same CTAs per SM on both sides and all evidence there"
    if bad:
        sentence += f"; {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not"
    if moved:
        most = max(moved, key=lambda row: abs(row["after"] - row["before"]))
        sentence += f"; registers move most in {most['step']}, {_before_after(most)}"
    return sentence + "."


def _counter_sentence(names: Mapping[str, str], here: Mapping[str, Mapping[str, Row]], shape: tuple) -> str:
    busy = {
        rung: float(row["value"])
        for rung, name in names.items()
        if (row := here.get(name, {}).get(TENSOR)) and row["value"] is not None
    }
    where = f"At {shape[0]}x{shape[1]}x{shape[2]}"
    if not busy:
        words = Counter(
            row["status"] for counters in here.values() for row in counters.values() if row["status"] != "ok"
        )
        word = words.most_common(1)[0][0] if words else "not run"
        return f"{where} there are no counters ({word}), and the timing tables do not need them."
    best, worst = max(busy, key=lambda rung: busy[rung]), min(busy, key=lambda rung: busy[rung])
    stalls = COLUMNS[-1]
    sentence = (
        f"{where} the tensor pipe is busiest in {best}, {busy[best]:.1f} % of the cycles in which an SM is active"
    )
    if best != worst:
        sentence += (
            f", and least in {worst}, {busy[worst]:.1f} %, where the top stalls are {stalls.show(here[names[worst]])}"
        )
    missing = len(names) - len(busy)
    return sentence + (f"; {missing} of {len(names)} rungs have no such counter." if missing else ".")


# Layout


def table(
    source: Source,
    head: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    sentence: str,
    used: Sequence[Row] | None,
    variants: Iterable[str],
    notes: Sequence[str] = (),
) -> str:
    """Heading, grid, notes, conclusion, provenance. `used` as in `provenance_line`."""
    variants = list(variants)
    footnotes = [f"<sub>{note}</sub>" for note in notes]
    if any(DAGGER in cell for row in rows for cell in row):
        sentence += DAGGER
        old = dict.fromkeys(f"{name}: {reason}" for name, reason in source.stale.items() if name in variants)
        footnotes.append(f"<sub>{DAGGER} Stale. {'. '.join(old)}.</sub>")
    line = provenance_line(source, used, variants)
    return "\n\n".join([head, grid(headers, rows), *footnotes, f"**{sentence}**", f"<sub>{line}</sub>"])


def provenance_line(source: Source, used: Sequence[Row] | None, variants: Sequence[str]) -> str:
    """GPU, driver, clock, rounds, floor, fill, L2 policy, date, runs, builds, and the experiment's declared constants.

    `used` are the rows of `shapes` behind the table, empty where it shows no times; None for the counters, which have
    runs of their own.
    """
    facts = source.facts
    boards = facts.profile_boards if used is None else facts.boards
    parts = [
        f"{facts.on(boards[name] for name in variants if name in boards)}, driver {facts.driver}",
        *([facts.software] if facts.software else []),
    ]
    if used:
        frame = pd.DataFrame(used).astype({"sm_mhz": "float64", "rounds": "float64"})
        floors = [
            f"{row['floor_percent']:.2f} % {row['shape_class']}" for row in source.rows("floor") if row["floor_percent"]
        ]
        read = f", medians {mhz_range(frame)}" if frame["sm_mhz"].notna().any() else ""
        parts += [f"{facts.clock}{read}", f"{rounds_range(frame)} rounds"]
        parts += [f"floor {', '.join(floors) or 'not measured'}", f"fill {facts.fill}, L2 {facts.l2}"]
    if used is None:
        parts += [f"ncu {facts.ncu}", facts.profile_dates]
    else:
        parts.append(facts.dates)
    made = {name: ids for name, ids in (facts.profiles if used is None else facts.sweeps).items() if name in variants}
    parts += [
        f"{word} {_named({name: ids[i] for name, ids in made.items()})}" for i, word in enumerate(("runs", "builds"))
    ]
    return "; ".join(parts) + f". The same in all rungs: {'; '.join(source.experiment.declared)}."


def _named(ids: Mapping[str, str]) -> str:
    """One id as it is, several by a hash over them and their number."""
    values = list(ids.values())
    if len(values) < 2:
        return values[0] if values else "none"
    return f"{sha256_json(dict(ids))[:8]} (hash over {len(values)})"


def grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [headers, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"| {' | '.join('---' for _ in headers)} |", *lines[1:]])


def _sizes(cells: Mapping[tuple, Row]) -> list[Size]:
    """(M, N) of the rows, largest first."""
    return sorted({(key[1], key[2]) for key in cells}, reverse=True)


def size_text(size: Size) -> str:
    return f"M=N={size[0]}" if size[0] == size[1] else f"M={size[0]}, N={size[1]}"


def _claims(cells: Mapping[tuple, Row]) -> int:
    return sum(row["gain_percent"] is not None for row in cells.values())
