"""Results sets against each other: each step's gain and each rung's share of the control, with a verdict for every pair of sets.

A gain and a share are ratios of times that one process took in the same rounds. They are what sets are compared by, on one GPU
as on two: no time of one set is ever held against a time of another.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import shutil
import string
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rungs import aggregate, schemas, staleness, stats, workloads
from rungs.aggregate import Arm, Facts, Measured, Shape
from rungs.errors import RungsError
from rungs.files import sha256_json, write_text
from rungs.results import ResultsSet
from rungs.tables import DAGGER, digits_of, grid, signed
from rungs.variants import GEMM, Experiment, Ladder, experiment_names, load_experiment

FILES = ("compare.csv", "compare.md", "compare.png", "compare.svg")
WORDS = {"faster": "more", "slower": "less"}
"""Of a difference between sets: a share is no speed."""
ALIKE = (
    ("fill", ("fill",), "zeros run faster than random numbers"),
    ("data type", ("dtype",), "a wider type moves more bytes"),
    ("a control in data type", ("control", "dtype"), "a share compares one data type"),
    ("control", ("control", "name"), "shares of two controls are shares of two things"),
    ("L2 policy", ("l2",), "hot and cold caches are two questions"),
)
"""What sets must have in common: its name, its place in a manifest, and why."""
PIPED = 220


@dataclass(frozen=True)
class Set:
    """One results set. `label`: its letter. `name`: as it was given. `stale`: variant -> why its source is another one now."""

    label: str
    name: str
    measured: Measured
    facts: Facts
    stale: Mapping[str, str]
    shares: Mapping[tuple[str, Shape], stats.Median]
    spreads: Mapping[Shape, stats.Spread]

    def has(self, variant: str) -> bool:
        return variant in self.measured.recordings.sweeps


@dataclass(frozen=True)
class Value:
    """A gain or a share of one set as a log-ratio, or why there is none. `scale` turns a ratio of times into the share shown."""

    status: str
    reason: str
    run_id: str = ""
    median: stats.Median | None = None
    spread: stats.Spread | None = None
    floor: stats.Floor | None = None
    scale: float = 1.0
    stale: bool = False

    def percent(self, log: float) -> float:
        return 100 * self.scale * math.exp(log)


@dataclass(frozen=True)
class Line:
    """A step or a rung at one shape. `values`: label of the set -> what it has there."""

    ladder: str
    what: str
    name: str
    shape: Shape
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Verdict:
    """The second set less the first, in percent; `interval` is corrected for the claims of the table, None without one."""

    word: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    plain: tuple[float, float] | None = None
    floor: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """All that a comparison says. `verdicts`: a line's place and the two labels -> verdict."""

    experiment: Experiment
    sets: Sequence[Set]
    ladders: Sequence[Ladder]
    shapes: Sequence[Shape]
    lines: Sequence[Line]
    verdicts: Mapping[tuple[int, str, str], Verdict]
    claims: int
    left_out: Sequence[str]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(itertools.combinations([each.label for each in self.sets], 2))


# Reading


@contextlib.contextmanager
def opened(spec: str) -> Iterator[Path]:
    """The folder of a set: itself, or of `SET@COMMIT` what git has of it there, in a temporary folder.

    Raises RungsError for what is neither; of a file at a commit it names the set and the commit, not the temporary folder.
    """
    if Path(spec).is_dir():
        yield Path(spec)
        return
    folder, at, commit = spec.rpartition("@")
    if not at:
        raise RungsError(f"{spec} is no results set: give a folder such as results/recorded/h200, or SET@COMMIT.")
    path = Path(folder)
    parts = [(path / part).as_posix() for part in ("csv", "build")]
    sha = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
    if not sha:
        raise RungsError(f"{spec}: git knows no commit {commit!r} here: give one that `git log` shows, or a folder.")
    there = [part for part in parts if not path.is_absolute() and _git("ls-tree", "--name-only", sha, part)]
    if parts[0] not in there:
        raise RungsError(
            f"{spec}: commit {commit} has no results set {folder}: give a folder that it holds, relative to this one."
        )
    with tempfile.TemporaryDirectory(prefix="rungs-compare-") as temporary:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", sha, "--", *there))) as archive:
            if hasattr(tarfile, "data_filter"):  # Python 3.11 has it from its fourth release on
                archive.extractall(temporary, filter="data")
            else:
                archive.extractall(temporary)
        try:
            yield Path(temporary) / path
        except RungsError as error:
            said = str(error).replace(f"{Path(temporary) / path}", spec).removesuffix(".")
            what = next((said.partition(fix)[0] for fix in (": delete", "; delete") if fix in said), said)
            raise RungsError(
                f"{what}: so that commit has it, and this checkout cannot compare it: name a commit whose files it reads."
            ) from None


def _git(*arguments: str) -> bytes:
    """What git prints; nothing where it fails or is not there."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=False).stdout
    except OSError:
        return b""


def read_set(label: str, spec: str, results: Path, experiment: Experiment) -> Set:
    """Everything that the set measured of the experiment's ladders.

    Raises RungsError where it measured nothing of them, and as `aggregate.load` does.
    """
    found = ResultsSet(results)
    rungs = {variant.name for ladder in experiment.ladders.values() for variant in ladder.rungs.values()}
    variants = [name for name in found.jobs("sweep", experiment.name) if name in rungs]
    if not variants:
        there = [name for name in found.experiments("sweep") if name in experiment_names()]
        raise RungsError(
            f"{spec} holds no sweep of {experiment.name}: it has {', '.join(there) or 'none at all'}, so choose another"
            " --experiment or another set."
        )
    archs = {manifest["arch"] for manifest in found.all_manifests("sweep", experiment.name).values()}
    if len(archs) != 1:
        raise RungsError(f"{spec} has sweeps of {len(archs)} architectures where a set has one: measure it anew.")
    measured = aggregate.load(results, experiment, archs.pop(), variants)
    facts = aggregate.facts_of(results, experiment.name, variants)
    stale = staleness.stale(results, [experiment.name], variants, compare=True)
    shares = aggregate.shares_of(measured)
    return Set(label, spec, measured, facts, stale, shares, aggregate.spreads_of(measured))


def check_alike(sets: Sequence[Set]) -> None:
    """Raises RungsError where two sets differ in what no comparison may mix."""
    for word, keys, why in ALIKE:
        found: dict[str, Set] = {}
        for each in sets:
            manifest: Any = next(iter(each.measured.recordings.sweeps.values())).manifest
            for key in keys:
                manifest = manifest.get(key) if isinstance(manifest, Mapping) else None
            found.setdefault(str(manifest), each)
        if len(found) > 1:
            (first, here), (second, there) = list(found.items())[:2]
            raise RungsError(
                f"{here.name} was measured with {word} {first} and {there.name} with {second}: {why}, so compare sets that"
                " agree in it."
            )


def common_shapes(experiment: Experiment, sets: Sequence[Set]) -> list[Shape]:
    """The shapes that every set was asked for. Raises RungsError where there is none."""
    common = [s for s in sets[0].measured.shapes if all(s in each.measured.shapes for each in sets[1:])]
    if not common:
        ends = [
            f"{each.name} has {' to '.join(dict.fromkeys(experiment.describe(each.measured.shapes[i]) for i in (0, -1)))}"
            for each in sets
        ]
        raise RungsError(
            f"The sets have no shape in common: {', '.join(ends)}, so measure one of them at the other's shapes."
        )
    return common


# Comparing


def compare(specs: Sequence[str], experiment_name: str, ladder_name: str | None = None) -> Comparison:
    """Two sets or more, each against every one before it.

    Raises RungsError for fewer, a set that cannot be read, sets that differ in `ALIKE` or have no shape or ladder in common.
    """
    if experiment_name not in experiment_names():
        raise RungsError(f"There is no experiment {experiment_name!r}: choose of {', '.join(experiment_names())}.")
    experiment = load_experiment(experiment_name)
    if ladder_name is not None and ladder_name not in experiment.ladders:
        raise RungsError(
            f"{experiment_name} has no ladder {ladder_name!r}: choose one of {', '.join(experiment.ladders)}."
        )
    if not 2 <= len(specs) <= len(string.ascii_uppercase):
        raise RungsError("A comparison is of two results sets or more, up to 26: give each as a folder or SET@COMMIT.")
    sets = []
    for label, spec in zip(string.ascii_uppercase, specs, strict=False):
        with opened(spec) as folder:
            sets.append(read_set(label, spec, folder, experiment))
    check_alike(sets)
    shapes = common_shapes(experiment, sets)
    chosen = _ladders(experiment, sets) if ladder_name is None else [experiment.ladders[ladder_name]]
    lines, left_out = [], []
    for ladder in chosen:
        found, lost = _lines(experiment, ladder, sets, shapes)
        lines += found
        left_out += lost
    ladders = [ladder for ladder in chosen if any(line.ladder == ladder.name for line in lines)]
    if not lines:
        raise RungsError(
            f"The sets have no rung of {'ladder ' + ladder_name if ladder_name else experiment_name} in common: measure the"
            " ladder in both."
        )
    pairs = list(itertools.combinations([each.label for each in sets], 2))
    places = [(i, a, b) for i in range(len(lines)) for a, b in pairs]
    claims = sum(_claimable(lines[i].values[a], lines[i].values[b]) for i, a, b in places)
    verdicts = {(i, a, b): judge(lines[i].values[a], lines[i].values[b], claims) for i, a, b in places}
    return Comparison(experiment, sets, ladders, shapes, lines, verdicts, claims, left_out)


def _ladders(experiment: Experiment, sets: Sequence[Set]) -> list[Ladder]:
    """Those that two sets measured, by the rule of a set's own tables."""
    asked = [pd.DataFrame({"variant": list(each.measured.recordings.sweeps)}) for each in sets]
    found = Counter(ladder.name for frame in asked for ladder in aggregate.measured_ladders(experiment, frame))
    return [ladder for name, ladder in experiment.ladders.items() if found[name] > 1]


def _lines(
    experiment: Experiment, ladder: Ladder, sets: Sequence[Set], shapes: Sequence[Shape]
) -> tuple[list[Line], list[str]]:
    """The ladder's steps and rungs that two sets measured, and the names of those that one set alone has."""
    lines, alone = [], []
    for step in ladder.steps:
        here = [each for each in sets if each.has(step.target_variant.name)]
        if len(here) == 1:
            alone.append(f"{step.label} ({here[0].label} alone)")
        for shape in shapes if len(here) > 1 else ():
            values = {
                each.label: _value(
                    each, shape, step.target_variant.name, *aggregate.arms_of_step(each.measured, step, shape)
                )
                for each in sets
            }
            lines.append(Line(ladder.name, "gain", step.label, shape, values))
    for rung, variant in ladder.rungs.items():
        here = [each for each in sets if each.has(variant.name)]
        if len(here) == 1:
            alone.append(f"{rung} ({here[0].label} alone)")
        for shape in shapes if len(here) > 1 and aggregate.timed_kind(experiment).startswith("sweep") else ():
            lines.append(Line(ladder.name, "share", rung, shape, {s.label: _share(s, variant, shape) for s in sets}))
    return [line for line in lines if any(v.status != "not run" for v in line.values.values())], alone


def _value(each: Set, shape: Shape, target: str, before: Arm, after: Arm) -> Value:
    """The gain of a step."""
    recording = each.measured.recordings.sweeps.get(target)
    run_id = str(recording.manifest["run_id"]) if recording else ""
    if failed := next((arm for arm in (after, before) if arm.status != "ok"), None):
        return Value(failed.status, failed.reason, run_id)
    if not len(ratios := aggregate.paired(before, after)):
        return Value("flagged", "No round has both rungs unflagged.", run_id)
    floor = each.measured.floors[each.measured.shape_class(shape)]
    return Value("ok", "", run_id, stats.median_error(ratios), None, floor, stale=target in each.stale)


def _share(each: Set, variant: Any, shape: Shape) -> Value:
    """A rung's share of the control. It goes through the control's own job-to-job spread, which no pairing takes away."""
    measured, name = each.measured, variant.name
    recording = measured.recordings.sweeps.get(name)
    run_id = str(recording.manifest["run_id"]) if recording else ""
    if (name, shape) not in each.shares:
        arms = [aggregate._arm(name, arm, shape, measured) for arm in (name, "control")]
        failed = next((arm for arm in arms if arm.status != "ok"), Arm("flagged", "No round has both unflagged."))
        return Value(failed.status, failed.reason, run_id)
    scale = 1.0
    if measured.experiment.workload != GEMM:
        work = workloads.of(measured.experiment).work(
            measured.experiment, variant, measured.device, shape, measured.sms
        )
        scale = (work.read_bytes + work.written_bytes) / aggregate.control_bytes(measured, variant, shape)
    floor = measured.floors[measured.shape_class(shape)]
    share, spread = each.shares[name, shape], each.spreads.get(shape)
    return Value("ok", "", run_id, share, spread or UNKNOWN, floor, scale, name in each.stale)


UNKNOWN = stats.Spread(math.inf, 1.0)
"""Of a share at a shape where no binary was timed in two jobs."""


def _claimable(before: Value, after: Value) -> bool:
    return bool(before.median and after.median) and (not before.run_id or before.run_id != after.run_id)


def judge(before: Value, after: Value, claims: int) -> Verdict:
    """How the second value differs from the first.

    The floor is the larger one of both sets: a floor is what two jobs of one set differ by, and two jobs of which each is of
    a set of its own differ by no more than two of the set that varies more.
    """
    for value in (before, after):
        if value.median is None:
            return Verdict("none", reason=f"{value.status}: {value.reason}" if value.reason else value.status)
    if not _claimable(before, after):
        return Verdict("same run", reason="Both sets hold the same recording.")
    assert before.median and after.median
    spreads = [value.spread for value in (before, after) if value.spread]
    effect = stats.difference(before.median, after.median, spreads)
    scale = math.log(after.scale / before.scale)
    plain, interval = (_shifted(effect.interval(each), scale) for each in (0.95, stats.claim_level(claims)))
    difference = stats.percent(effect.value + scale)
    if not all(map(math.isfinite, interval)):
        why = "spread from job to job" if UNKNOWN in spreads else "interval: too few rounds"
        return Verdict("none", difference, reason=f"There is no {why}, so that no claim is made.")
    shown, corrected = ((stats.percent(low), stats.percent(high)) for low, high in (plain, interval))
    if before.floor is None or after.floor is None:
        why = "The floor of this shape class was not measured in both sets, so that no claim is made."
        return Verdict("none", difference, corrected, shown, None, why)
    floor = max(before.floor.value, after.floor.value)
    word = stats.verdict(*interval, floor)
    return Verdict(WORDS.get(word, word), difference, corrected, shown, stats.percent(floor))


def _shifted(interval: tuple[float, float], by: float) -> tuple[float, float]:
    return interval[0] + by, interval[1] + by


def leaders(comparison: Comparison, place: int) -> tuple[list[str], bool]:
    """The sets that have most of a line, and whether they are shown to tie: one label is a winner, several are none.

    With the largest stand all that are not shown to have less. Empty without two values.
    """
    values = {label: v.percent(v.median.value) for label, v in comparison.lines[place].values.items() if v.median}
    if len(values) < 2:
        return [], False
    top = max(values, key=values.__getitem__)
    together, tied = [], True
    for label in values:
        word = "tie"
        if label != top:
            first, second = sorted((label, top))
            word = comparison.verdicts[place, first, second].word
        less = "less" if label == max(label, top) else "more"
        if word != less:
            together.append(label)
            tied &= word in ("tie", "same run")
    return together, tied


# Showing


def value_text(line: Line, value: Value) -> str:
    """`+34.4 % ±0.3` of a gain, `65.8 % ±0.2` of a share, else the word of what went wrong."""
    if value.median is None:
        return value.status
    low, high = (value.percent(bound) if math.isfinite(bound) else math.nan for bound in value.median.interval())
    percent, half = value.percent(value.median.value), (high - low) / 2
    text = signed(percent - 100, digits_of(percent - 100)) + " %" if line.what == "gain" else f"{percent:.1f} %"
    if math.isfinite(half):
        text += f" ±{half:.{2 if half < 0.05 else 1}f}"
    return text + (DAGGER if value.stale else "")


def verdict_text(verdict: Verdict) -> str:
    """`+1.2 % [-0.3, +2.7] tie`; the word alone where nothing was compared."""
    if verdict.difference is None:
        return {"none": "not compared"}.get(verdict.word, verdict.word)
    text = f"{signed(verdict.difference, digits_of(verdict.difference))} %"
    if verdict.interval:
        low, high = verdict.interval
        text += f" [{low:+.1f}, {high:+.1f}]"
    return f"{text} {'no claim' if verdict.word == 'none' else verdict.word}"


def most_text(comparison: Comparison, place: int) -> str:
    """`B`; `A = B` of a tie, `A ? B` where neither is shown to have more."""
    found, tied = leaders(comparison, place)
    return (" = " if tied else " ? ").join(found)


def headers_of(comparison: Comparison) -> list[str]:
    labels = [each.label for each in comparison.sets]
    return ["ladder", "step, rung", "shape", *labels, *(f"{b} against {a}" for a, b in comparison.pairs), "most"]


def rows_of(comparison: Comparison) -> list[list[str]]:
    return [
        [
            line.ladder,
            line.name if line.what == "gain" else f"{line.name}, share",
            comparison.experiment.describe(line.shape),
            *(value_text(line, line.values[each.label]) for each in comparison.sets),
            *(verdict_text(comparison.verdicts[i, a, b]) for a, b in comparison.pairs),
            most_text(comparison, i),
        ]
        for i, line in enumerate(comparison.lines)
    ]


def legend_of(comparison: Comparison) -> list[str]:
    """A line per set: what it is and where its numbers come from."""
    names = {variant.name for ladder in comparison.ladders for variant in ladder.rungs.values()}
    return [f"{each.label}: {each.name}: {_provenance(each, names)}" for each in comparison.sets]


def _provenance(each: Set, names: set[str]) -> str:
    facts, recordings = each.facts, each.measured.recordings
    made = {name: ids for name, ids in facts.sweeps.items() if name in names}
    floors = [f"{stats.percent(floor.value):.2f} % {word}" for word, floor in each.measured.floors.items() if floor]
    protocol = {str(r.manifest.get("protocol", {}).get("hash")) for r in recordings.sweeps.values()}
    parts = [
        f"{facts.on(facts.boards[name] for name in made if name in facts.boards)}, driver {facts.driver}",
        facts.software,
        facts.clock,
        f"floor {', '.join(floors) or 'not measured'}",
        f"fill {facts.fill}, L2 {facts.l2}, control {facts.control}",
        f"protocol {min(protocol)}",
        facts.dates,
        f"{len(made)} rungs, runs {sha256_json({n: i[0] for n, i in made.items()})[:8]}",
        f"builds {sha256_json({n: i[1] for n, i in made.items()})[:8]}",
    ]
    if old := [name for name in made if name in each.stale]:
        parts.append(f"{DAGGER} stale, the source is another one now: {', '.join(old)}")
    return "; ".join(filter(None, parts))


def head_of(comparison: Comparison) -> str:
    gpus = list(dict.fromkeys(each.facts.gpu for each in comparison.sets))
    apart = (
        f"The sets are of {len(gpus)} GPUs ({', '.join(gpus)}), whose times say nothing about each other. "
        if len(gpus) > 1
        else ""
    )
    return (
        f"{apart}Gains of steps and shares of {comparison.sets[0].facts.control} are compared, each a ratio of times within one"
        " process and never a time of one set against a time of another. A value has its 95 % interval; a difference is what the"
        " second set's ratio is above the first's, with its interval corrected for the"
        f" {comparison.claims} claims of this table; a tie lies within the larger floor of both sets."
    )


def sentences_of(comparison: Comparison) -> list[str]:
    """Per ladder and pair how many gains and shares differ, and who is first at the end of the path."""
    found = []
    for ladder in comparison.ladders:
        for a, b in comparison.pairs:
            parts = []
            for what in ("gain", "share"):
                words = Counter(
                    comparison.verdicts[i, a, b].word
                    for i, line in enumerate(comparison.lines)
                    if (line.ladder, line.what) == (ladder.name, what)
                )
                told = {"none": "without a claim", "tie": "ties", "same run": "of the same run"}
                if words:
                    counts = [
                        f"{words[w]} {told.get(w, w)}"
                        for w in ("more", "less", "tie", "undecided", "same run", "none")
                        if words[w]
                    ]
                    parts.append(f"of {words.total()} {what}s {', '.join(counts)}")
            if parts:
                found.append(f"Ladder {ladder.name}, {b} against {a}: {'; '.join(parts)}.")
        found += _winner(comparison, ladder)
    if comparison.left_out:
        found.append(f"Left out, as no other set has it: {', '.join(comparison.left_out)}.")
    return found


def _winner(comparison: Comparison, ladder: Ladder) -> list[str]:
    """Who is first with the path's last rung at the largest shape; a set of ties is named as such."""
    places = [
        i
        for i, line in enumerate(comparison.lines)
        if (line.ladder, line.what, line.name) == (ladder.name, "share", ladder.path[-1]) and leaders(comparison, i)[0]
    ]
    if not places:
        return []
    place = max(places, key=lambda i: (math.prod(comparison.lines[i].shape), i))
    line, (first, tied) = comparison.lines[place], leaders(comparison, place)
    shares = ", ".join(f"{label} {value_text(line, line.values[label])}" for label in first)
    where = f"At {comparison.experiment.describe(line.shape)} {line.name}"
    if len(first) == 1:
        return [f"{where} has its highest share of the control in {shares}."]
    names = f"{', '.join(first[:-1])} and {first[-1]}"
    how = "tie" if tied else "are not told apart"
    return [f"{where} has no winner: {names} {how} ({shares})."]


def render(comparison: Comparison) -> str:
    """The comparison in Markdown."""
    parts = [f"# {comparison.experiment.name}: {' against '.join(each.name for each in comparison.sets)}"]
    parts += [head_of(comparison), "![Difference of every gain and share with its interval](compare.svg)"]
    parts += [grid(headers_of(comparison), rows_of(comparison))]
    parts += [f"**{sentence}**" for sentence in sentences_of(comparison)]
    return "\n\n".join([*parts, *(f"<sub>{line}</sub>" for line in legend_of(comparison))]) + "\n"


def show(comparison: Comparison) -> None:
    """Print the comparison."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED)  # a line of the table stays one line, for grep
    for line in [*legend_of(comparison), head_of(comparison)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    shown = Table(expand=False)
    for column in headers_of(comparison):
        shown.add_column(column, overflow="fold")
    for row in rows_of(comparison):
        shown.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(shown, highlight=False)
    for sentence in sentences_of(comparison):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def frame_of(comparison: Comparison) -> Any:
    """The comparison as the frame of its CSV."""
    rows = []
    for i, line in enumerate(comparison.lines):
        for a, b in comparison.pairs:
            first, second, verdict = line.values[a], line.values[b], comparison.verdicts[i, a, b]
            row: dict[str, Any] = {"ladder": line.ladder, "what": line.what, "name": line.name}
            row |= {**aggregate.where(comparison.experiment, line.shape), "before": a, "after": b}
            for word, value in (("before", first), ("after", second)):
                row[f"{word}_run_id"] = value.run_id
                if value.median:
                    row[f"{word}_percent"] = value.percent(value.median.value) - 100 * (line.what == "gain")
            row |= {"difference_percent": verdict.difference, "floor_percent": verdict.floor}
            if verdict.interval and verdict.plain:
                row |= dict(zip(("low_percent", "high_percent"), verdict.plain, strict=True))
                row |= dict(zip(("claim_low_percent", "claim_high_percent"), verdict.interval, strict=True))
            rows.append({**row, "verdict": verdict.word, "reason": verdict.reason})
    return aggregate.frame_of(comparison.experiment.kind("compare"), rows)


def write(comparison: Comparison, output: Path) -> None:
    """Write `FILES` into a folder of their own, all of them or none.

    Raises RungsError for a folder that holds anything else, before anything is written.
    """
    from rungs import compareplots, plots

    output = Path(output)
    if output.exists() and (not output.is_dir() or {path.name for path in output.iterdir()} - set(FILES)):
        raise RungsError(f"{output} holds other files: give --output a new folder, or one of an earlier comparison.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise RungsError(f"{output} cannot be written ({error.strerror}): give a folder that can be.") from None
    earlier = folder.with_name(f"{folder.name}.earlier")
    try:
        schemas.write_csv(comparison.experiment.kind("compare"), frame_of(comparison), folder / "compare.csv")
        write_text(folder / "compare.md", render(comparison))
        plots.save(compareplots.plot(comparison), folder / "compare", coarse=True)
        folder.chmod(0o755)
        if output.exists():
            output.rename(earlier)
        folder.rename(output)
    finally:
        if earlier.exists() and not output.exists():
            earlier.rename(output)
        for left in (folder, earlier):
            shutil.rmtree(left, ignore_errors=True)


def experiment_of(ladder: str | None) -> str:
    """Name of the first experiment with that ladder, `gemm` where none has it or none is asked for."""
    owners = [name for name in experiment_names() if ladder in load_experiment(name).ladders]
    return owners[0] if owners else "gemm"


def run(specs: Sequence[str], experiment: str, ladder: str | None, output: Path | None) -> None:
    """Compare sets; print the comparison, or write it into a folder."""
    comparison = compare(specs, experiment, ladder)
    if output is None:
        show(comparison)
        return
    write(comparison, output)
    for sentence in sentences_of(comparison):
        print(sentence)
    print(f"Wrote {', '.join(str(output / name) for name in FILES)}.")
