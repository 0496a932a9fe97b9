"""The sentences of the two seeds, held against a results set: `config/claims.yaml` to `data/verdicts/claims.csv`.

A claim names a quantity, the points at which it must be true and a bound. It holds where at every point the whole interval of
the quantity satisfies the bound, fails where at one point the whole interval violates it, and is undecided otherwise. The level
of the intervals is such that all of a table hold together with 95 %, and each is wider by the floor on both sides, as a step's
verdict is. What a claim needs and the set has not is `not measured`, with the reason.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rungs import schemas, stats
from rungs.bootstrap import block_length
from rungs.errors import RungsError
from rungs.results import ResultsSet
from rungs.variants import CONFIG, GEMM, Experiment, Variant, experiment_names, load_experiment

FILE = CONFIG / "claims.yaml"
CSV = Path("data") / "verdicts" / "claims.csv"
"""A clone writes files in the order of their names: behind the data of every experiment, which it is made from."""
QUANTITIES = (
    "gain",
    "share",
    "apart",
    "noise",
    "cycles",
    "executed",
    "binary",
    "uncontrolled",
    "wrong",
    "counters",
)
COMPARISONS = ("at_least", "at_most", "above", "below", "equal", "within", "outside")
HOLDS, FAILS, UNDECIDED, NOT_MEASURED = "holds", "fails", "undecided", "not measured"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_MEASURED)
LEVEL = 0.95
"""At which all intervals of a table hold together."""
DIGITS = 4
"""After the point, of every number in the CSV."""
Row = Mapping[str, Any]
Point = tuple[tuple[str, int], ...]
"""(axis, value) of each axis."""


# ---- the file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Where a figure must lie, in the unit of its quantity, tolerance included. `strict`: the ends do not satisfy it."""

    low: float
    high: float
    outside: bool = False
    strict: bool = False

    def verdict(self, low: float, high: float) -> str:
        """Of a figure whose interval is that; an interval with an end that is no number decides nothing."""
        if math.isnan(low) or math.isnan(high):
            return UNDECIDED
        if self.strict:
            inside, apart = self.low < low and high < self.high, high <= self.low or self.high <= low
        else:
            inside, apart = self.low <= low and high <= self.high, high < self.low or self.high < low
        if self.outside:
            inside, apart = apart, inside
        return HOLDS if inside else FAILS if apart else UNDECIDED

    def room(self, figure: float) -> float:
        """How far the figure is on the right side of the bound; negative on the wrong one."""
        room = min(figure - self.low, self.high - figure)
        return -room if self.outside else room


@dataclass(frozen=True)
class Claim:
    """One sentence and its test. `what` is the quantity's kind and `of` its keys; `where`: axis -> values."""

    id: str
    seed: str
    section: str
    says: str
    experiment: str
    what: str
    of: Mapping[str, Any]
    where: Mapping[str, Sequence[int]]
    comparison: str
    bound: Bound
    tolerance: float
    theirs: float | None = None
    theirs_gpu: str = ""
    because: str = ""

    @property
    def unit(self) -> str:
        """Of the figure, its interval, its bounds and the document's own."""
        own = {"share": "percent of the control", "noise": "times", "cycles": "cycles", "executed": "ratio"}
        if self.what == "gain":
            return str(self.of.get("unit", "percent"))
        return "percent" if self.what == "apart" else own.get(self.what, "count")


@functools.cache
def load_claims(path: Path = FILE) -> tuple[Claim, ...]:
    """The claims of a file. Raises RungsError, naming the claim, what is wrong with it and the fix.

    What a claim says of its experiment is for `check`: another experiment's file may be damaged and is then nobody's concern.
    """
    raw = schemas.read_yaml(path, "claims")["claims"]
    claims = tuple(_claim(path, item) for item in raw)
    ids = [claim.id for claim in claims]
    if twice := next((name for name in ids if ids.count(name) > 1), None):
        raise RungsError(f"{path}: two claims have the id {twice}: rename one.")
    return claims


def _claim(path: Path, raw: Mapping[str, Any]) -> Claim:
    where = f"{path}, claim {raw['id']}"
    what = _only(where, raw, QUANTITIES, "quantity")
    comparison = _only(where, raw, COMPARISONS, "comparison")
    if raw["experiment"] not in experiment_names():
        raise RungsError(
            f"{where}: there is no experiment {raw['experiment']!r}; choose of {', '.join(experiment_names())}."
        )
    theirs = raw.get("theirs", {})
    return Claim(
        raw["id"],
        raw["seed"],
        raw["section"],
        raw["says"],
        raw["experiment"],
        what,
        raw[what],
        raw.get("where", {}),
        comparison,
        _bound(where, comparison, raw[comparison], raw.get("tolerance", 0)),
        raw.get("tolerance", 0),
        theirs.get("value"),
        theirs.get("gpu", ""),
        raw.get("because", ""),
    )


def _only(where: str, raw: Mapping[str, Any], names: Sequence[str], word: str) -> str:
    found = [name for name in names if name in raw]
    if len(found) != 1:
        have = " and ".join(found) or "none"
        raise RungsError(f"{where}: it has {have} where it needs one {word}: give one of {', '.join(names)}.")
    return found[0]


def _bound(where: str, comparison: str, value: Any, tolerance: float) -> Bound:
    if comparison in ("within", "outside"):
        low, high = value
        if low > high:
            raise RungsError(f"{where}, key {comparison}: {low} is above {high}: give the lower end first.")
        slack = -tolerance if comparison == "outside" else tolerance
        return Bound(low - slack, high + slack, outside=comparison == "outside")
    if comparison == "equal":
        return Bound(value - tolerance, value + tolerance)
    if comparison in ("at_least", "above"):
        return Bound(value - tolerance, math.inf, strict=comparison == "above")
    return Bound(-math.inf, value + tolerance, strict=comparison == "below")


def check(claim: Claim) -> None:
    """Raises RungsError, naming claim, name and fix, for a name that the claim's experiment has not."""
    where, experiment = f"config/claims.yaml, claim {claim.id}", load_experiment(claim.experiment)
    axes = experiment.axis_names
    along = claim.of.get("along")
    for axis in (*claim.where, *([along] if along else [])):
        if axis not in axes:
            raise RungsError(f"{where}: {experiment.name} has no axis {axis!r}; choose of {', '.join(axes)}.")
    if along and len(claim.where.get(along, (0, 0))) < 2:
        raise RungsError(f"{where}: along {along} needs two of its values: give them under `where`, or none of it.")
    steps = {step.label for step in experiment.steps()}
    for key in ("steps", "against"):
        labels = claim.of.get(key, [])
        for label in labels:
            if label not in steps:
                raise RungsError(f"{where}: {experiment.name} has no step {label!r}; its ladders list what there is.")
        for a, b in itertools.pairwise(labels):
            if claim.what != "uncontrolled" and _variant(experiment, a, -1) != _variant(experiment, b, 0):
                raise RungsError(f"{where}, key {key}: {b} does not begin where {a} ends: name steps that follow.")
    for key in ("rung", "over", "from", "to"):
        if key in claim.of:
            try:
                experiment.variant(claim.of[key])
            except RungsError as error:
                raise RungsError(f"{where}, key {key}: {error}") from None
    if claim.what == "binary" and ("opcode" in claim.of) == ("resource" in claim.of):
        raise RungsError(f"{where}: a binary is asked for an opcode or for a resource: give one of the two.")
    for count in (*claim.of.get("counts", ()), *claim.of.get("less", ())):
        if count not in METRICS:
            raise RungsError(f"{where}: nothing counts {count!r}; choose of {', '.join(METRICS)}.")


def _variant(experiment: Experiment, label: str, end: int) -> Variant:
    return experiment.variant(label.split(">")[end])


METRICS = {
    "all.instructions": "smsp__inst_executed.sum",
    "lds.instructions": "smsp__inst_executed_op_shared_ld_pred_on_any.sum",
    "ldsm.instructions": "smsp__inst_executed_op_ldsm.sum",
    "sts.instructions": "smsp__inst_executed_op_shared_st.sum",
    "ldgsts.instructions": "smsp__inst_executed_op_ldgsts.sum",
    "tma_load.instructions": "smsp__inst_executed_op_tma_ld.sum",
    "lds.wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "ldsm.wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum",
    "sts.wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
"""Kind and what of it, as the emulator names them, -> the counter of ncu. Predicated-off fillers do not count as LDS."""


# ---- what a set holds ------------------------------------------------------------------------------------------------


class Missing(Exception):
    """What a claim needs is not in the set; the message is the reason."""


@dataclass
class Data:
    """A results set as claims read it; each file once. `experiments` are those that are tabulated."""

    results: Path
    arch: str
    experiments: Sequence[str]
    _frames: dict[tuple[str, str], Sequence[Row]] = field(default_factory=dict)
    _manifests: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        """Whether the emulator made the set."""
        return (self.results / "csv" / "emulate").is_dir()

    def has(self, experiment: str, name: str) -> bool:
        return (self.results / "data" / experiment / f"{name}.csv").is_file()

    def rows(self, experiment: str, name: str) -> Sequence[Row]:
        """Rows of `data/<experiment>/<name>.csv`, empty cells as None. Raises Missing where there is no such file."""
        if experiment not in self.experiments:
            raise Missing(_absent(experiment))
        if (experiment, name) not in self._frames:
            path = self.results / "data" / experiment / f"{name}.csv"
            if not path.is_file() and self.emulated:
                raise Missing(f"The emulator, which knows no times, has no {name}.")
            if not path.is_file():
                raise Missing(f"This set has no {name} of {experiment}.")
            plain = name.removeprefix("factorial_")
            kind = plain if plain in ("changes", "floor") else load_experiment(experiment).kind(plain)
            frame = schemas.read_csv(kind, path)
            self._frames[experiment, name] = _plain(frame)
        return self._frames[experiment, name]

    def inspected(self, experiment: str, variant: str) -> Sequence[Row]:
        """What the disassembly says of a binary. Raises Missing where it was not inspected."""
        if ("", variant) not in self._frames:
            frame = ResultsSet(self.results).inspection(experiment, self.arch, variant)
            if frame is None:
                raise Missing(f"{variant} has no inspect CSV.")
            self._frames["", variant] = _plain(frame)
        return self._frames["", variant]

    def manifest(self, experiment: str, variant: str) -> Mapping[str, Any]:
        """The manifest of a variant's sweep; empty where it has none."""
        if (experiment, variant) not in self._manifests:
            found = ResultsSet(self.results)
            there = found.has("sweep", experiment, variant)
            self._manifests[experiment, variant] = found.manifest("sweep", experiment, variant) if there else {}
        return self._manifests[experiment, variant]


def check_alike(data: Data, experiment: str, variants: Iterable[str]) -> None:
    """Raises Missing where the sweeps of these variants do not belong in one comparison."""
    rules = (("fill", ("fill",)), ("L2 policy", ("l2",)), ("GPU", ("gpu", "name")), ("protocol", ("protocol", "hash")))
    made = [manifest for name in variants if (manifest := data.manifest(experiment, name))]
    for word, keys in rules:
        found = {str(_at(manifest, keys)) for manifest in made}
        if len(found) > 1:
            raise Missing(f"Its recordings mix {word} {' and '.join(sorted(found))}, which are not comparable.")


def _at(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# ---- quantities ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A quantity at one point with its standard error, on the scale on which that is symmetric.

    `show` turns a value of that scale into the unit of the claim. `slack` is what the floor adds on both sides, on the same
    scale; None where it was not measured. A count has no error and is `exact`.
    """

    value: float
    show: Callable[[float], float]
    where: str = ""
    error: float = 0.0
    freedom: float = math.inf
    slack: float | None = 0.0
    exact: bool = False
    doubt: str = ""

    @property
    def figure(self) -> float:
        return self.show(self.value)

    def interval(self, level: float) -> tuple[float, float]:
        """In the unit of the claim; not a number where nothing can be said."""
        if self.exact:
            return self.figure, self.figure
        if self.slack is None or self.doubt or not math.isfinite(self.error):
            return math.nan, math.nan
        low, high = (
            stats.Effect(self.value, self.error, self.freedom).interval(level) if self.error else (self.value,) * 2
        )
        ends = self.show(low - self.slack), self.show(high + self.slack)
        return min(ends), max(ends)


Part = tuple[float, float, float]
"""Value, standard error and degrees of freedom."""


def part_of(value: float, low: float | None, high: float | None, rounds: int) -> Part:
    """The median's error from its 95 % interval, which is a Student interval with the degrees of freedom of its rounds.

    `bootstrap.median_error` made it so: 1.5 (n/l - 1) of n rounds in blocks of l. Infinite where there is no interval.
    """
    from scipy.special import stdtrit

    if low is None or high is None or rounds < stats.FEWEST:
        return value, math.inf, 1.0
    freedom = max(1.0, 1.5 * (rounds / block_length(rounds) - 1))
    return value, (high - low) / 2 / float(stdtrit(freedom, 0.975)), freedom


def together(parts: Sequence[tuple[int, Part]]) -> Part:
    """The sum of independent values, each with its sign."""
    value = sum(sign * part[0] for sign, part in parts)
    effect = stats.independent(value, [(error**2, freedom) for _, (_, error, freedom) in parts])
    return effect.value, effect.error, effect.freedom


def _log(percent: float | None) -> float | None:
    return None if percent is None else stats.log_ratio(percent)


def _step_part(row: Row) -> Part:
    gain, low, high = (_log(row[f"{name}percent"]) for name in ("gain_", "low_", "high_"))
    assert gain is not None
    return part_of(gain, low, high, int(row["rounds"]))


def points_of(claim: Claim, experiment: Experiment, rows: Iterable[Row]) -> dict[Point, Row]:
    """The rows at the points of the claim. Raises Missing where one that it lists has none."""
    found = {tuple((axis, row[axis]) for axis in experiment.axis_names): row for row in rows}
    kept = {p: row for p, row in found.items() if all(value in claim.where.get(axis, [value]) for axis, value in p)}
    for values in itertools.product(*claim.where.values()) if claim.where else ():
        asked = dict(zip(claim.where, values, strict=True))
        if not any(asked.items() <= dict(point).items() for point in kept):
            text = ", ".join(f"{axis} {value}" for axis, value in asked.items())
            raise Missing(f"No row of {experiment.name} is at {text}.")
    if not kept:
        raise Missing(f"{experiment.name} was measured at no such point.")
    return kept


def _steps_at(claim: Claim, data: Data, labels: Sequence[str]) -> dict[Point, list[Row]]:
    """Point -> the rows of these steps, of points that all of them have."""
    experiment = load_experiment(claim.experiment)
    rows = data.rows(claim.experiment, "steps")
    found: list[dict[Point, Row]] = []
    for label in labels:
        here = [row for row in rows if row["step"] == label]
        if not here:
            raise Missing(f"This set has no step {label}.")
        found.append(points_of(claim, experiment, here))
    shared = [point for point in found[0] if all(point in rows_at for rows_at in found)]
    if not shared:
        raise Missing(f"No point has all of {', '.join(labels)}.")
    for (label, rows_at), point in itertools.product(zip(labels, found, strict=True), shared):
        row = rows_at[point]
        if row["gain_percent"] is None:
            reason = f": {row['reason']}" if row["reason"] else "."
            raise Missing(f"{label} at {place(experiment, point)} is {row['status']}{reason}")
    return {point: [rows_at[point] for rows_at in found] for point in shared}


def place(experiment: Experiment, point: Point) -> str:
    """The point in the words of the tables."""
    return experiment.describe([value for _, value in point])


def gain(claim: Claim, data: Data) -> list[Estimate]:
    """Log of how many times as fast the last rung is as the first: the sum over the steps, each paired in its own job."""
    experiment, of = load_experiment(claim.experiment), claim.of
    plus, minus = _steps_at(claim, data, of["steps"]), {}
    if "against" in of:
        minus = _steps_at(claim, data, of["against"])
    signed = {
        point: [*((1, row) for row in rows), *((-1, row) for row in minus.get(point, []))]
        for point, rows in plus.items()
        if "against" not in of or point in minus
    }
    if not signed:
        raise Missing(f"No point has both {', '.join(of['steps'])} and {', '.join(of['against'])}.")
    if along := of.get("along"):
        signed = _ends(signed, along)
    show = math.exp if claim.unit == "times" else stats.percent
    found = []
    for point, terms in signed.items():
        value, error, freedom = together([(sign, _step_part(row)) for sign, row in terms])
        if not along:
            value += math.log(of.get("work", 1))
        floors = [_log(row["floor_percent"]) for _, row in terms]
        slack = None if None in floors else sum(floor for floor in floors if floor)
        loose = next((row["reason"] for _, row in terms if not row["controlled"]), "")
        where = _ends_text(experiment, plus, point, along) if along else place(experiment, point)
        found.append(Estimate(value, show, where, error, freedom, slack, doubt=loose))
    return found


def _ends(signed: Mapping[Point, list[tuple[int, Row]]], along: str) -> dict[Point, list[tuple[int, Row]]]:
    """Per point of the other axes the terms at the largest value of the axis, less those at its smallest."""
    lines: dict[Point, dict[int, list[tuple[int, Row]]]] = {}
    for point, terms in signed.items():
        rest = tuple(item for item in point if item[0] != along)
        lines.setdefault(rest, {})[dict(point)[along]] = terms
    changes = {
        rest: [*line[max(line)], *((-sign, row) for sign, row in line[min(line)])]
        for rest, line in lines.items()
        if len(line) > 1
    }
    if not changes:
        raise Missing(f"It was measured at one value of {along} only.")
    return changes


def _ends_text(experiment: Experiment, points: Iterable[Point], rest: Point, along: str) -> str:
    """`from K=256 to 8192 at M=4096, N=4096`."""
    values = sorted({dict(point)[along] for point in points if set(rest) <= set(point)})
    if experiment.workload == GEMM:
        others = ", ".join(f"{axis.upper()}={value}" for axis, value in rest)
        return f"from {along.upper()}={values[0]} to {values[-1]} at {others}"
    axes = experiment.point_axes
    others = ", ".join(f"{axes[axis].title} {axes[axis].label(value)}" for axis, value in rest)
    ends = " to ".join(axes[along].label(value) for value in (values[0], values[-1]))
    return f"from {axes[along].title} {ends} at {others}"


def _shares(claim: Claim, data: Data, name: str, frame: str) -> dict[Point, Row]:
    experiment = load_experiment(claim.experiment)
    variant = experiment.variant(name).name
    rows = [row for row in data.rows(claim.experiment, frame) if row["variant"] == variant]
    if not rows:
        raise Missing(f"This set has no {frame} of {variant}.")
    found = points_of(claim, experiment, rows)
    for point, row in found.items():
        if row["share_percent"] is None:
            reason = row["reason"] or "it has no share of the control."
            raise Missing(f"{variant} at {place(experiment, point)}: {row['status']}, {reason}")
    return found


def _share_part(row: Row) -> tuple[Part, Part]:
    """The error of the job's rounds, and that from job to job."""
    value, low, high = (
        None if row[key] is None else math.log(row[key] / 100)
        for key in ("share_percent", "share_low_percent", "share_high_percent")
    )
    assert value is not None
    spread, freedom = _log(row.get("spread_percent")), row.get("spread_freedom")
    between = (0.0, math.inf, 1.0) if spread is None or not freedom else (0.0, spread, float(freedom))
    return part_of(value, low, high, int(row["rounds"])), between


def share(claim: Claim, data: Data) -> list[Estimate]:
    """Log of the share of the control, with what jobs differ by."""
    experiment = load_experiment(claim.experiment)
    frame = "shapes" if experiment.workload == GEMM else "points"
    found = []
    for point, row in _shares(claim, data, claim.of["rung"], frame).items():
        value, error, freedom = together([(1, part) for part in _share_part(row)])
        found.append(Estimate(value, lambda x: 100 * math.exp(x), place(experiment, point), error, freedom))
    return found


def apart(claim: Claim, data: Data) -> list[Estimate]:
    """Log of the share of the control of one variant over that of another, each with what jobs differ by."""
    experiment = load_experiment(claim.experiment)
    before, after = (_shares(claim, data, claim.of[key], "corners") for key in ("from", "to"))
    found = []
    for point in (point for point in before if point in after):
        terms = [(1, part) for part in _share_part(after[point])]
        terms += [(-1, part) for part in _share_part(before[point])]
        value, error, freedom = together(terms)
        found.append(Estimate(value, stats.percent, place(experiment, point), error, freedom))
    return found


def noise(claim: Claim, data: Data) -> list[Estimate]:
    """Log of the floor over the gain. Only where the clock was left alone: a locked one says nothing of it."""
    experiment = load_experiment(claim.experiment)
    found = []
    for point, rows in _steps_at(claim, data, claim.of["steps"]).items():
        for row in rows:
            mode = (data.manifest(claim.experiment, row["target_variant"]).get("clock") or {}).get("mode")
            if mode != "observe":
                raise Missing(f"The clock of {row['target_variant']} was not left alone (mode {mode}).")
        value, error, freedom = together([(1, _step_part(row)) for row in rows])
        floors = [_log(row["floor_percent"]) for row in rows]
        if None in floors:
            raise Missing("The floor was not measured.")
        total = sum(floor for floor in floors if floor)
        size = abs(value)
        where = place(experiment, point)
        if not total or not size:
            raise Missing(f"The floor or the gain is 0 at {where}.")
        found.append(Estimate(math.log(total / size), math.exp, where, error / size, freedom))
    return found


def cycles(claim: Claim, data: Data) -> list[Estimate]:
    """Cycles of a rung less those of another. The floor counts for each of the two."""
    experiment = load_experiment(claim.experiment)
    tables = []
    for key in ("rung", "over"):
        variant = experiment.variant(claim.of[key]).name
        here = [row for row in data.rows(claim.experiment, "points") if row["variant"] == variant]
        if not here:
            raise Missing(f"This set has no points of {variant}.")
        tables.append(points_of(claim, experiment, here))
    floors = [row["floor_percent"] for row in data.rows(claim.experiment, "floor")]
    found = []
    for point in (point for point in tables[0] if point in tables[1]):
        terms: list[tuple[int, Part]] = []
        both = 0.0
        for sign, rows in zip((1, -1), tables, strict=True):
            row = rows[point]
            if row["cycles"] is None:
                raise Missing(f"{row['variant']} at {place(experiment, point)} is {row['status']}: {row['reason']}")
            terms.append((sign, part_of(row["cycles"], row["low"], row["high"], int(row["rounds"]))))
            both += float(row["cycles"])
        value, error, freedom = together(terms)
        slack = None if None in floors or not floors else both * max(floors) / 100
        found.append(Estimate(value, float, place(experiment, point), error, freedom, slack))
    if not found:
        raise Missing(f"No point has both {claim.of['rung']} and {claim.of['over']}.")
    return found


def executed(claim: Claim, data: Data) -> list[Estimate]:
    """Counts of one launch over those of another: by ncu, or by the emulator where it made the set."""
    experiment = load_experiment(claim.experiment)
    sums: list[dict[Point, float]] = []
    for key in ("rung", "over"):
        variant = experiment.variant(claim.of[key]).name
        terms = [(1, name) for name in claim.of["counts"]] + [(-1, name) for name in claim.of.get("less", ())]
        total: dict[Point, float] = {}
        for sign, name in terms:
            for point, value in _count(claim, data, experiment, variant, name).items():
                total[point] = total.get(point, 0.0) + sign * value
        sums.append(total)
    found = [
        Estimate(value / sums[1][point], float, place(experiment, point), exact=True)
        for point, value in sums[0].items()
        if sums[1].get(point)
    ]
    if not found:
        raise Missing(f"{claim.of['over']} executes none of what is counted.")
    return found


def _count(claim: Claim, data: Data, experiment: Experiment, variant: str, name: str) -> dict[Point, float]:
    """Point -> one count of a variant."""
    if data.emulated:
        kind, _, what = name.partition(".")
        rows = [row for row in data.rows(experiment.name, "counts") if row["variant"] == variant]
        if not rows:
            raise Missing(f"The emulator did not count {variant}.")
        if bad := next((row for row in rows if row["status"] != "ok"), None):
            raise Missing(f"{variant} is {bad['status']} in the emulator: {bad['reason']}")
        if kind == "all":
            raise Missing("The emulator does not count all instructions that the GPU would execute.")
        every = points_of(claim, experiment, [{**row, "kind": ""} for row in rows])
        own = {tuple((axis, row[axis]) for axis in experiment.axis_names): row for row in rows if row["kind"] == kind}
        return {point: float(own[point][what] or 0.0) if point in own else 0.0 for point in every}
    rows = [row for row in data.rows(experiment.name, "counters") if row["variant"] == variant]
    if not rows:
        raise Missing(f"This set has no counters of {variant}.")
    own_rows = [row for row in rows if row["metric"] == METRICS[name]]
    if not own_rows:
        raise Missing(f"{variant} is {rows[0]['status']} by Nsight Compute: {rows[0]['reason'] or METRICS[name]}")
    found = points_of(claim, experiment, own_rows)
    if bad := next((row for row in found.values() if row["value"] is None), None):
        raise Missing(f"{METRICS[name]} of {variant} is {bad['status']}: {bad['reason']}")
    return {point: float(row["value"]) for point, row in found.items()}


def binary(claim: Claim, data: Data) -> list[Estimate]:
    """Lines of an opcode in the kernel, or a resource; what is not listed of an inspected binary is 0."""
    experiment = load_experiment(claim.experiment)
    kind, name = ("opcode_total", claim.of["opcode"]) if "opcode" in claim.of else ("resource", claim.of["resource"])
    values = []
    for key in ("rung", "over"):
        if key not in claim.of:
            continue
        variant = experiment.variant(claim.of[key]).name
        rows = data.inspected(experiment.name, variant)
        bad = next((row for row in rows if row["status"] in ("build failed", "not on this chip")), None)
        if bad or not any(row["kind"] == kind for row in rows):
            why = f": {bad['reason']}" if bad else " in its inspect CSV."
            raise Missing(f"{variant} has no {kind.removesuffix('_total')}{why}")
        values.append(sum(float(row["value"] or 0) for row in rows if (row["kind"], row["name"]) == (kind, name)))
    value = values[0] - (values[1] if len(values) > 1 else 0.0)
    return [Estimate(value, float, f"for {data.arch}", exact=True)]


def uncontrolled(claim: Claim, data: Data) -> list[Estimate]:
    """Steps that change more than their factor."""
    rows = data.rows(claim.experiment, "steps")
    loose = set()
    for label in claim.of["steps"]:
        here = [row for row in rows if row["step"] == label]
        if not here:
            raise Missing(f"This set has no step {label}.")
        loose |= {label for row in here if not row["controlled"]}
    return [Estimate(len(loose), float, f"of {len(claim.of['steps'])} steps", exact=True)]


def wrong(claim: Claim, data: Data) -> list[Estimate]:
    """Results that were wrong, at every point that was checked."""
    frames = ["coverage"]
    if claim.of["of"] == "everything" and data.has(claim.experiment, "factorial_coverage"):
        frames.append("factorial_coverage")
    checked, bad = set(), set()
    for frame in frames:
        for row in data.rows(claim.experiment, frame):
            if row["what"] in ("sweep", "emulate", "floor"):
                key = (row["variant"], *(row[axis] for axis in load_experiment(claim.experiment).axis_names))
                if row["status"] in ("ok", "flagged", "wrong"):
                    checked.add(key)
                if row["status"] == "wrong":
                    bad.add(key)
    if not checked:
        raise Missing(f"No result of {claim.experiment} was checked.")
    return [Estimate(len(bad), float, f"of {len(checked)} results", exact=True)]


def counters(claim: Claim, data: Data) -> list[Estimate]:
    """How many of the metrics have a value in at least one profile."""
    rows = data.rows(claim.experiment, "counters")
    if not any(row["status"] == "ok" for row in rows):
        raise Missing(f"Nothing of {claim.experiment} was profiled: {rows[0]['status']}.")
    there = {row["metric"] for row in rows if row["status"] == "ok" and row["value"] is not None}
    named = [name for name in claim.of["metrics"] if name in there]
    return [Estimate(len(named), float, f"of {len(claim.of['metrics'])} metrics", exact=True)]


MEASURES: Mapping[str, Callable[[Claim, Data], list[Estimate]]] = {
    "gain": gain,
    "share": share,
    "apart": apart,
    "noise": noise,
    "cycles": cycles,
    "executed": executed,
    "binary": binary,
    "uncontrolled": uncontrolled,
    "wrong": wrong,
    "counters": counters,
}
TIMED = ("gain", "share", "apart", "noise", "cycles")


def variants_of(claim: Claim) -> list[str]:
    """The variants whose recordings decide. Empty for what is of a whole experiment."""
    experiment = load_experiment(claim.experiment)
    names = [end for key in ("steps", "against") for label in claim.of.get(key, ()) for end in label.split(">")]
    names += [claim.of[key] for key in ("rung", "over", "from", "to") if key in claim.of]
    return list(dict.fromkeys(experiment.variant(name).name for name in names))


def quantity_text(claim: Claim) -> str:
    """What the figure is of, in a few words."""
    of = claim.of
    if claim.what in ("gain", "noise"):
        text = path_text(of["steps"])
        if "against" in of:
            text += f" over {path_text(of['against'])}"
        if work := of.get("work"):
            text += f", {work:g} times the work"
        if along := of.get("along"):
            text += f", by {along}"
        return f"floor over {text}" if claim.what == "noise" else text
    if claim.what == "share":
        return f"{of['rung']} of the control"
    if claim.what == "apart":
        return f"{of['from']} > {of['to']}"
    if claim.what == "cycles":
        return f"{of['rung']} less {of['over']}"
    if claim.what == "executed":
        less = f" less {' and '.join(of['less'])}" if "less" in of else ""
        return f"{' + '.join(of['counts'])}{less}, {of['rung']} over {of['over']}"
    if claim.what == "binary":
        less = f" less {of['over']}" if "over" in of else ""
        return f"{of.get('opcode') or of['resource']}, {of['rung']}{less}"
    if claim.what == "uncontrolled":
        return f"uncontrolled of {', '.join(of['steps'])}"
    return "wrong results" if claim.what == "wrong" else "metrics that ncu counted"


def path_text(labels: Sequence[str]) -> str:
    return ">".join([labels[0].split(">")[0], *(label.split(">")[1] for label in labels)])


# ---- verdicts --------------------------------------------------------------------------------------------------------


def run(results: Path, arch: str, experiments: Sequence[str], path: Path = FILE) -> None:
    """Write `data/verdicts/claims.csv` of a results set."""
    from rungs.aggregate import frame_of

    rows = judge(load_claims(path), Data(results, arch, experiments))
    schemas.write_csv("claims", frame_of("claims", rows), results / CSV)


def judge_again(results: Path, arch: str) -> list[dict[str, Any]]:
    """The rows anew, of the experiments that those of the CSV were made from, in its types."""
    from rungs.aggregate import frame_of

    there = [row["experiment"] for row in read(results) if row["reason"] != _absent(row["experiment"])]
    frame = frame_of("claims", judge(load_claims(), Data(results, arch, list(dict.fromkeys(there)))))
    again = schemas.parse_csv("claims", frame.to_csv(index=False, lineterminator="\n"), "the claims judged again")
    return _plain(again)


def _absent(experiment: str) -> str:
    return f"{experiment} was not measured in this set."


def _plain(frame: Any) -> list[dict[str, Any]]:
    return list(frame.astype(object).where(frame.notna(), None).to_dict("records"))


def judge(claims: Sequence[Claim], data: Data) -> list[dict[str, Any]]:
    """A row per claim. The level follows from the number of intervals that all of them need."""
    found: dict[str, list[Estimate]] = {}
    reasons: dict[str, str] = {}
    for claim in claims:
        try:
            if claim.experiment not in data.experiments:
                raise Missing(_absent(claim.experiment))
            check(claim)
            if claim.what in TIMED:
                check_alike(data, claim.experiment, variants_of(claim))
            found[claim.id] = MEASURES[claim.what](claim, data)
        except Missing as error:
            reasons[claim.id] = " ".join(str(error).split())
    level = stats.claim_level(sum(not e.exact for estimates in found.values() for e in estimates), LEVEL)
    rows = [_row(claim, found.get(claim.id, []), reasons.get(claim.id, ""), level) for claim in claims]
    for claim, row in zip(claims, rows, strict=True):
        row["variants"] = " ".join(variants_of(claim)) if claim.experiment in data.experiments else ""
    return rows


def _said(claim: Claim) -> dict[str, Any]:
    """The cells of a claim's row that come from the claim alone."""
    return {
        "claim": claim.id,
        "seed": f"seed {claim.seed}",
        "experiment": claim.experiment,
        "quantity": quantity_text(claim),
        "unit": claim.unit,
        "rule": "outside" if claim.bound.outside else "within",
        "bound_low": _known(claim.bound.low),
        "bound_high": _known(claim.bound.high),
        "theirs": claim.theirs,
        "theirs_gpu": claim.theirs_gpu,
    }


def is_of(claim: Claim, row: Row) -> bool:
    """Whether the row was judged by the claim as it is now; by other points it may still have been."""
    return all(row[key] == value for key, value in _said(claim).items())


def _row(claim: Claim, estimates: Sequence[Estimate], reason: str, level: float) -> dict[str, Any]:
    row = _said(claim) | {"where": "", "points": len(estimates), "held": 0, "failed": 0}
    row |= {"verdict": NOT_MEASURED, "reason": reason}
    if not estimates:
        return row
    intervals = [estimate.interval(level) for estimate in estimates]
    verdicts = [claim.bound.verdict(*interval) for interval in intervals]
    word = FAILS if FAILS in verdicts else UNDECIDED if UNDECIDED in verdicts else HOLDS
    decides = min(
        (i for i, verdict in enumerate(verdicts) if verdict == word),
        key=lambda i: (not math.isnan(intervals[i][0]), claim.bound.room(estimates[i].figure)),
    )
    shown, (low, high) = estimates[decides], intervals[decides]
    row |= {"figure": round(shown.figure, DIGITS), "low": _known(low), "high": _known(high), "where": shown.where}
    row |= {"held": verdicts.count(HOLDS), "failed": verdicts.count(FAILS), "verdict": word}
    row["level_percent"] = None if shown.exact else round(100 * level, DIGITS)
    if word == UNDECIDED and math.isnan(low):
        why = "The floor was not measured." if shown.slack is None else "There were too few rounds for an interval."
        row["reason"] = shown.doubt or why
    return row


def _known(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None


def read(results: Path) -> list[dict[str, Any]]:
    """The rows that `run` wrote, empty cells as None."""
    return _plain(schemas.read_csv("claims", results / CSV))
