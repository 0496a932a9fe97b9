"""The page of the claims, and their block of the README: what each sentence of the seeds is worth on this device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rungs import claims, tables
from rungs.aggregate import facts_of, read_data, span_text
from rungs.claims import FAILS, HOLDS, NOT_MEASURED, UNDECIDED, Claim
from rungs.errors import RungsError
from rungs.files import ROOT, write_text
from rungs.results import ResultsSet, each_job
from rungs.tables import DAGGER, Row, Source
from rungs.variants import GEMM, Experiment, load_experiment

PAGE = "claims"
SEEDS = {
    "000": "the plan of the cp.async and ldmatrix ablation",
    "004": "the micro-benchmark of Hopper's TMA",
}
COUNTED = {
    "all.instructions": "warp instructions",
    "lds.instructions": "ld.shared",
    "ldsm.instructions": "ldmatrix",
    "sts.instructions": "st.shared",
    "ldgsts.instructions": "cp.async",
    "tma_load.instructions": "TMA loads",
    "lds.wavefronts": "wavefronts of ld.shared",
    "ldsm.wavefronts": "wavefronts of ldmatrix",
    "sts.wavefronts": "wavefronts of st.shared",
}
VERB = {HOLDS: "holds", FAILS: "fails", UNDECIDED: "is undecided"}


def write(results: Path, stale: Mapping[str, str]) -> None:
    """Write `md/claims.md`."""
    write_text(results / "md" / f"{PAGE}.md", render(results, stale))


def judged(results: Path) -> list[tuple[Claim, Row]]:
    """Each claim with its row. Raises RungsError where the CSV is of other claims than the file has now."""
    rows = {row["claim"]: row for row in claims.read(results)}
    known = claims.load_claims()
    if list(rows) != [claim.id for claim in known] or any(not claims.is_of(claim, rows[claim.id]) for claim in known):
        raise RungsError(
            f"{results / claims.CSV} is of other claims than config/claims.yaml has: run `snakemake claims` to judge them anew."
        )
    return [(claim, rows[claim.id]) for claim in known]


def render(results: Path, stale: Mapping[str, str]) -> str:
    """All of the page."""
    pairs = judged(results)
    file = Path(os.path.relpath(claims.FILE, (results / "md").resolve())).as_posix()
    parts = [f"# What the seeds say, tested on {device_text(results)}", INTRODUCTION.format(file=file)]
    parts += [f"**{conclusion(results, pairs)}**{_mark_any(pairs, stale)}"]
    parts += [figure_link("../figures")]
    for seed in SEEDS:
        here = [(claim, row) for claim, row in pairs if claim.seed == seed and row["verdict"] != NOT_MEASURED]
        if here:
            parts += [f"## Seed {seed}: {SEEDS[seed]}", table(here, stale, with_bound=True)]
            parts += [f"### Seed {seed}, claim by claim", "\n".join(f"- {sentence(*pair, stale)}" for pair in here)]
    if gaps := [(claim, row) for claim, row in pairs if row["verdict"] == NOT_MEASURED]:
        parts += ["## Not measured", gap_table(gaps)]
    parts += notes(results, pairs, stale)
    return "\n\n".join(parts) + "\n"


INTRODUCTION = (
    "Each sentence is a claim of [config/claims.yaml]({file}), which says what would bear it out. It holds"
    " where at every point the whole interval does, fails where at one point the whole interval does not, and is undecided"
    " otherwise. The figure is that of the point which decides: the farthest on the wrong side, or the nearest to it. The seeds'"
    " own figures were measured on other GPUs, which stand beside them."
)


def block(results: Path, stale: Mapping[str, str]) -> str:
    """The claims in the README: conclusion, figure and a line for each."""
    pairs = [(claim, row) for claim, row in judged(results) if row["verdict"] != NOT_MEASURED]
    folder = Path(os.path.relpath(results.resolve(), ROOT)).as_posix()
    parts = [f"**{conclusion(results, judged(results))}**{_mark_any(pairs, stale)}", figure_link(f"{folder}/figures")]
    parts += [table(pairs, stale, with_bound=False)]
    parts += [f"A sentence on each, with its bound and its points, is in [md/claims.md]({folder}/md/claims.md)."]
    return "\n\n".join([*parts, *notes(results, pairs, stale)])


def figure_link(folder: str) -> str:
    return f"![Each claim's figure and interval against its bound and the seed's own figure]({folder}/claims.svg)"


# ---- sentences -------------------------------------------------------------------------------------------------------


def conclusion(results: Path, pairs: Sequence[tuple[Claim, Row]]) -> str:
    """How many hold, by seed, and which fail."""
    known = [(claim, row) for claim, row in pairs if row["verdict"] != NOT_MEASURED]
    if not known:
        return f"None of the {len(pairs)} claims could be tested on {device_text(results)}."
    sentences = "sentence of the seeds that was" if len(known) == 1 else "sentences of the seeds that were"
    text = f"Of {len(known)} {sentences} tested on {device_text(results)}, {tally(known)}"
    by_seed = [
        f"of seed {seed} {tally(here)}" for seed in SEEDS if (here := [pair for pair in known if pair[0].seed == seed])
    ]
    text += f" ({'; '.join(by_seed)})" if len(by_seed) > 1 else ""
    if failed := [f"`{claim.id}`" for claim, row in known if row["verdict"] == FAILS]:
        text += f". What fails: {', '.join(failed)}"
    return f"{text}."


def tally(pairs: Sequence[tuple[Claim, Row]]) -> str:
    """`28 hold, 17 fail and 5 are undecided`."""
    count = Counter(row["verdict"] for _, row in pairs)
    hold, fail, open_ = (count[word] for word in (HOLDS, FAILS, UNDECIDED))
    words = [
        f"{hold} {'holds' if hold == 1 else 'hold'}",
        f"{fail} {'fails' if fail == 1 else 'fail'}",
        f"{open_} {'is' if open_ == 1 else 'are'} undecided",
    ]
    return f"{', '.join(words[:2])} and {words[2]}"


def sentence(claim: Claim, row: Row, stale: Mapping[str, str]) -> str:
    """What the seed says, what was found, and whether that bears it out."""
    text = f"`{claim.id}` **{VERB[row['verdict']]}**{_mark(row, stale)}. Seed {claim.seed} ({claim.section}): “{claim.says}”"
    needs = bound_text(claim).replace("outside", "a figure outside")
    text += f" {found_text(claim, row)}; to hold it takes {needs}."
    if row["points"] > 1:
        parts = [f"it holds at {row['held']}", f"fails at {row['failed']}"]
        if rest := row["points"] - row["held"] - row["failed"]:
            parts.append(f"is undecided at {rest}")
        text += f" Of {row['points']} {'lines' if 'along' in claim.of else 'points'} {_list(parts)}."
    if row["reason"]:
        text += f" {row['reason']}"
    if claim.because:
        text += f" The test: {claim.because}"
    return text


def found_text(claim: Claim, row: Row) -> str:
    """`B0>B1 gains +27.0 % (+25.7 to +28.4) at 4096x4096x1024`."""
    of, figure = claim.of, figure_text(row)
    at = f" at {row['where']}"
    if claim.what == "gain":
        path = claims.quantity_text(claim).partition(" over ")[0].partition(",")[0]
        against = f" more than {claims.path_text(of['against'])}" if "against" in of else ""
        work = f" for {of['work']:g} times the work" if "work" in of else ""
        if "along" in of:
            return f"The speed-up of {path} changes by {figure} {row['where']}"
        if claim.unit == "times":
            return f"{path} is {figure} times as fast{work}{at}"
        return f"{path} gains {figure}{against}{work}{at}"
    if claim.what == "share":
        return f"{of['rung']} runs at {figure} of the control{at}"
    if claim.what == "apart":
        return f"{of['to']} gains {figure} over {of['from']}{at}"
    if claim.what == "noise":
        return f"The floor is {figure} times the gain of {claims.path_text(of['steps'])}{at}"
    if claim.what == "cycles":
        return f"{of['rung']} takes {figure} over {of['over']}{at}"
    if claim.what == "executed":
        counts = " + ".join(COUNTED[name] for name in of["counts"])
        less = f" less {' and '.join(COUNTED[name] for name in of['less'])}" if "less" in of else ""
        return f"{of['rung']} has {figure} times the {counts}{less} of {of['over']}{at}"
    if claim.what == "binary":
        what = f"lines of {of['opcode']}" if "opcode" in of else of["resource"]
        less = f" less those of {of['over']}" if "over" in of else ""
        return f"The {what} of {of['rung']}{less} are {figure} {row['where']}"
    words = {"uncontrolled": "are not controlled", "wrong": "are wrong", "counters": "were counted"}
    return f"{figure} {row['where']} {words[claim.what]}"


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) < 2 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def number(unit: str, value: float) -> str:
    """With the digits that it deserves, and the sign where it is a change."""
    if unit == "percent":
        return tables.signed(value, 2 if abs(value) < 1 else 1)
    if unit == "percent of the control":
        return f"{value:.1f}"
    if unit == "cycles":
        return f"{value:+.1f}"
    if unit == "count":
        return f"{value:.0f}"
    return f"{value:.3f}" if unit == "ratio" or abs(value) < 0.1 else f"{value:.2f}"


SUFFIX = {"percent": " %", "percent of the control": " %", "cycles": " cycles"}


def figure_text(row: Row) -> str:
    """`+27.0 % (+25.7 to +28.4)`; a count alone."""
    unit = row["unit"]
    text = number(unit, row["figure"]) + SUFFIX.get(unit, "")
    if row["level_percent"] is None or row["low"] is None:
        return text
    return f"{text} ({number(unit, row['low'])} to {number(unit, row['high'])})"


def bound_text(claim: Claim) -> str:
    """What bears the claim out: `3 % or less`."""
    unit, suffix = claim.unit, SUFFIX.get(claim.unit, "")
    low, high = claim.bound.low, claim.bound.high

    def plain(value: float) -> str:
        return f"{value:g}"

    if claim.comparison == "equal":
        around = f" ±{claim.tolerance:g}" if claim.tolerance else ""
        return f"{plain((low + high) / 2)}{around}{suffix}"
    if claim.comparison in ("within", "outside"):
        return f"{'outside ' if claim.comparison == 'outside' else ''}{plain(low)} to {plain(high)}{suffix}"
    if claim.comparison in ("at_least", "above"):
        word = "or more" if claim.comparison == "at_least" else ""
        return f"{plain(low)}{suffix} {word}" if word else f"more than {plain(low)}{suffix}"
    word = f"{plain(high)}{suffix}" if unit != "count" else plain(high)
    return f"{word} or less" if claim.comparison == "at_most" else f"less than {word}"


def theirs_text(claim: Claim) -> str:
    """The seed's own figure with its GPU; empty for none."""
    if claim.theirs is None:
        return ""
    return f"{number(claim.unit, claim.theirs)}{SUFFIX.get(claim.unit, '')}, {claim.theirs_gpu}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(pairs: Sequence[tuple[Claim, Row]], stale: Mapping[str, str], with_bound: bool) -> str:
    """A row per claim."""
    headers = ["claim", "the seed says", "its figure", "to hold", "figure here", "verdict"]
    rows = [
        [
            f"`{claim.id}`",
            claim.says,
            theirs_text(claim),
            bound_text(claim),
            figure_text(row) + _mark(row, stale),
            f"**{row['verdict']}**" if row["verdict"] == FAILS else str(row["verdict"]),
        ]
        for claim, row in pairs
    ]
    shown = range(len(headers)) if with_bound else (0, 1, 2, 4, 5)
    return tables.grid([headers[i] for i in shown], [[cells[i] for i in shown] for cells in rows])


def gap_table(pairs: Sequence[tuple[Claim, Row]]) -> str:
    rows = [[f"`{claim.id}`", f"{claim.seed}, {claim.section}", claim.says, str(row["reason"])] for claim, row in pairs]
    return tables.grid(["claim", "seed", "the seed says", "why there is no verdict"], rows)


def notes(results: Path, pairs: Sequence[tuple[Claim, Row]], stale: Mapping[str, str]) -> list[str]:
    """Level, floor and stale marks, then a line of provenance for each experiment whose data decide."""
    known = [(claim, row) for claim, row in pairs if row["verdict"] != NOT_MEASURED]
    parts = []
    level = next((row["level_percent"] for _, row in known if row["level_percent"] is not None), None)
    if level is not None:
        parts.append(
            f"<sub>In brackets intervals at {level:.2f} % each, so that all of them hold together with 95 %, and wider by the floor"
            " of each step on both sides. Counts have none.</sub>"
        )
    used = {name for _, row in known for name in behind(row, stale)}
    if old := [f"{name}: {reason}" for name, reason in stale.items() if name in used]:
        parts.append(f"<sub>{DAGGER} Stale. {'. '.join(old)}.</sub>")
    for experiment in dict.fromkeys(claim.experiment for claim, _ in known):
        names = [n for c, row in known if c.experiment == experiment for n in str(row["variants"]).split()]
        parts += [f"<sub>{experiment}: {line}</sub>" for line in _provenance(results, experiment, names, stale)]
    return parts


def _provenance(results: Path, experiment: str, names: Sequence[str], stale: Mapping[str, str]) -> list[str]:
    """Of the variants that claims of the experiment use; nothing in a set without times."""
    return [tables.provenance_line(*used, list(names)) for used in _used(results, experiment, names, stale)]


def measured_text(results: Path, known: Sequence[tuple[Claim, Row]], stale: Mapping[str, str]) -> list[str]:
    """How the claims' times were measured, in a sentence for the figure; nothing in a set without times."""
    names: dict[str, list[str]] = {}
    for claim, row in known:
        names.setdefault(claim.experiment, []).extend(str(row["variants"]).split())
    found = [used for experiment, own in names.items() for used in _used(results, experiment, own, stale)]
    if not found:
        return []
    facts = [source.facts for source, _ in found]
    rounds = [float(row["rounds"]) for _, rows in found for row in rows if row["rounds"] is not None]
    models, clocks, dates = (
        ", ".join(dict.fromkeys(getattr(fact, key) for fact in facts)) for key in ("gpu", "clock", "dates")
    )
    return [f"{models}, {clocks}, {span_text(rounds)} rounds, {dates}."]


def _used(
    results: Path, experiment: str, names: Sequence[str], stale: Mapping[str, str]
) -> list[tuple[Source, list[Row]]]:
    """The experiment with the rows of these variants, where the set has times of it."""
    kind = "shapes" if load_experiment(experiment).workload == GEMM else "points"
    if not (results / "data" / experiment / f"{kind}.csv").is_file():
        return []
    source = Source(
        load_experiment(experiment),
        read_data(results, experiment),
        facts_of(results, experiment, names),
        stale,
        results,
    )
    return [(source, [row for row in source.rows(kind) if row["variant"] in names])]


def behind(row: Row, stale: Mapping[str, str]) -> set[str]:
    """Those of the stale recordings that the row is made from: where it names no variants, any of its experiment."""
    if named := str(row["variants"]).split():
        return set(named) & set(stale)
    return {name for name in stale if _is_of(load_experiment(row["experiment"]), name)}


def _is_of(experiment: Experiment, name: str) -> bool:
    try:
        return bool(experiment.variant(name))
    except RungsError:
        return False


def _mark(row: Row, stale: Mapping[str, str]) -> str:
    return DAGGER if behind(row, stale) else ""


def _mark_any(pairs: Sequence[tuple[Claim, Row]], stale: Mapping[str, str]) -> str:
    return DAGGER if any(_mark(row, stale) for _, row in pairs if row["verdict"] != NOT_MEASURED) else ""


def device_text(results: Path) -> str:
    """`an NVIDIA H200`, with its caches where the set is cold; `the emulator`."""
    from rungs.settings import EMULATOR

    for kind, experiment, job in each_job(ResultsSet(results), ["sweep"]):
        manifest = ResultsSet(results).manifest(kind, experiment, job)
        return f"an {manifest['gpu']['name']}" + (" with cold caches" if manifest["l2"] == "cold" else "")
    return f"the {EMULATOR}"
