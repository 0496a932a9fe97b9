"""The factorial: what each level of a factor buys, averaged over every combination of the other factors.

From `results/<set>/csv` to `corners.csv` (every variant), `effects.csv` (every pair of levels), `interactions.csv` (every two
pairs of neighbouring levels of two factors), `shapley.csv` (every factor, over all orders) and `factorial_coverage.csv` (the
variants that are on no ladder) under `results/<set>/data/<experiment>/`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rungs import aggregate, schemas, shapley, stats
from rungs.aggregate import TENSOR, WAVEFRONTS, Measured, Shape
from rungs.errors import RungsError
from rungs.variants import Experiment, Factor, Variant, load_experiment

FRAMES = {
    "corners": "corners",
    "effects": "effects",
    "interactions": "interactions",
    "shapley": "shapley",
    "factorial_coverage": "coverage",
}
"""Name of the file -> schema of it."""
NAMED = 4
"""More lost corners than these are a number in the reason; `corners.csv` has all of them."""
Corners = Mapping[tuple[str, Shape], dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Two levels of a factor and the contexts in which both go together with the other factors' levels.

    `contexts`: (source, target) variants that differ in this factor alone. `excluded`: assignments of the other factors
    with which one of the two levels does not go.
    """

    factor: Factor
    source: int
    target: int
    contexts: tuple[tuple[Variant, Variant], ...]
    excluded: int

    @property
    def label(self) -> str:
        return f"{self.source}>{self.target}"

    @property
    def title(self) -> str:
        return " > ".join(self.factor.levels[level].title for level in (self.source, self.target))


@dataclass(frozen=True)
class Crossing:
    """Two neighbouring levels of a factor and two of another, and the contexts in which all four combinations go together.

    A context is the variants (both at the source, `factor` moved, `other` moved, both moved). `excluded`: assignments of the
    remaining factors with which one of the four does not go.
    """

    factor: Factor
    source: int
    target: int
    other: Factor
    other_source: int
    other_target: int
    contexts: tuple[tuple[Variant, ...], ...]
    excluded: int

    @property
    def name(self) -> str:
        """As a table and `trace` write it: `load+read`."""
        return f"{self.factor.name}+{self.other.name}"

    @property
    def title(self) -> str:
        first = " > ".join(self.factor.levels[level].title for level in (self.source, self.target))
        second = " > ".join(self.other.levels[level].title for level in (self.other_source, self.other_target))
        return f"{first} with {second}"


WORDS = {"faster": "more", "slower": "less"}
"""Verdict of a gain -> of an interaction: the two changes together give more, or less, than each by itself would."""


def run(results: Path, experiment_name: str, arch: str) -> None:
    """Write the factorial's CSVs of an experiment in a results set."""
    for name, frame in effects(results, load_experiment(experiment_name), arch).items():
        schemas.write_csv(FRAMES[name], frame, results / "data" / experiment_name / f"{name}.csv")


def effects(results: Path, experiment: Experiment, arch: str) -> dict[str, pd.DataFrame]:
    """The factorial's frames, by file name; a variant without a recording is `not run`.

    Raises RungsError for an experiment that declares no factorial, and as `aggregate.load` does.
    """
    if experiment.factorial is None:
        raise RungsError(
            f"{experiment.name} declares no factorial: add `factorial:` to its file, or ask for its ladders."
        )
    measured = aggregate.load(results, experiment, arch, [variant.name for variant in experiment.estimable()])
    spreads = aggregate.spreads_of(measured)
    shares = aggregate.shares_of(measured)
    few = {key: share for key, share in shares.items() if not math.isfinite(share.error)}
    shares = {key: share for key, share in shares.items() if key not in few}
    counted = _counters(measured)
    rows = [
        row | counted.get((row["variant"], (row["m"], row["n"], row["k"])), {})
        for row in aggregate.shape_rows(measured, shares | few, spreads)
    ]
    for row in rows:
        if share := few.get((row["variant"], (row["m"], row["n"], row["k"]))):
            why = f"Only {share.rounds} rounds have both unflagged, and under {stats.FEWEST} there is no interval."
            row |= {"status": "flagged", "reason": why}
    corners: Corners = {(row["variant"], (row["m"], row["n"], row["k"])): row for row in rows}
    found = estimates(measured, corners, shares, spreads)
    return {
        "corners": aggregate.frame_of("corners", rows),
        **{name: aggregate.frame_of(name, of_kind) for name, of_kind in found.items()},
        "factorial_coverage": aggregate.frame_of("coverage", _coverage(measured)),
    }


def read_data(results: Path, experiment_name: str) -> dict[str, pd.DataFrame]:
    """The frames that `run` wrote."""
    folder = results / "data" / experiment_name
    return {name: schemas.read_csv(kind, folder / f"{name}.csv") for name, kind in FRAMES.items()}


def pairs_of(experiment: Experiment) -> Iterator[Pair]:
    """Every pair of neighbouring levels of every factor, and of three levels the first and the last too."""
    estimable = {variant.levels: variant for variant in experiment.estimable()}
    for factor in experiment.factors.values():
        levels = list(factor.levels)
        pairs = list(itertools.pairwise(levels)) + ([(levels[0], levels[2])] if len(levels) == 3 else [])
        others = [[(other.name, level) for level in other.levels] for other in experiment.factors.values()]
        place = list(experiment.factors).index(factor.name)
        for source, target in pairs:
            contexts, excluded = [], 0
            for rest in itertools.product(*(others[:place] + others[place + 1 :])):
                both = [
                    estimable.get((*rest[:place], (factor.name, level), *rest[place:])) for level in (source, target)
                ]
                if both[0] and both[1]:
                    contexts.append((both[0], both[1]))
                else:
                    excluded += 1
            yield Pair(factor, source, target, tuple(contexts), excluded)


def crossings_of(experiment: Experiment) -> Iterator[Crossing]:
    """Every pair of neighbouring levels of a factor with every such pair of each factor behind it.

    Pairs that are further apart are left out: their interaction is the sum of those between.
    """
    estimable = {variant.levels: variant for variant in experiment.estimable()}
    for factor, other in itertools.combinations(experiment.factors.values(), 2):
        rest = [f for f in experiment.factors.values() if f not in (factor, other)]
        for near, far in itertools.product(itertools.pairwise(factor.levels), itertools.pairwise(other.levels)):
            contexts, excluded = [], 0
            for values in itertools.product(*(f.levels for f in rest)):
                fixed = dict(zip((f.name for f in rest), values, strict=True))
                four = []
                for b, a in itertools.product(far, near):
                    levels = {**fixed, factor.name: a, other.name: b}
                    four.append(estimable.get(tuple((name, levels[name]) for name in experiment.factors)))
                together = tuple(variant for variant in four if variant)
                if len(together) == 4:
                    contexts.append(together)
                else:
                    excluded += 1
            yield Crossing(factor, *near, other, *far, tuple(contexts), excluded)


Found = list[tuple[dict[str, Any], stats.Effect | None]]
"""Rows without their verdicts, each with its estimate; None where there is nothing to estimate it from."""


@dataclass(frozen=True)
class Rounds:
    """What the rounds of one shape say: why each variant has none, their log-shares and how these differ from job to job."""

    shape: Shape
    corners: Corners
    shares: Mapping[tuple[str, Shape], stats.Median]
    spread: stats.Spread | None

    def share(self, name: str) -> stats.Median:
        return self.shares[name, self.shape]

    def lost(self, variants: Sequence[Variant]) -> dict[str, str]:
        """Those of the variants that were not timed, or in too few rounds, each with its word."""
        return {
            variant.name: self.corners[variant.name, self.shape]["status"]
            for variant in variants
            if (variant.name, self.shape) not in self.shares
        }

    def row(self) -> dict[str, Any]:
        spread = stats.percent(self.spread.deviation) if self.spread else None
        where = dict(zip(("m", "n", "k"), self.shape, strict=True))
        return {**where, "spread_percent": spread, "verdict": "none", "status": "ok", "reason": ""}


def estimates(
    measured: Measured,
    corners: Corners,
    shares: Mapping[tuple[str, Shape], stats.Median],
    spreads: Mapping[Shape, stats.Spread],
) -> dict[str, list[dict[str, Any]]]:
    """The rows of `effects`, `interactions` and `shapley`. Each table's intervals are corrected for its own claims."""
    experiment = measured.experiment
    pairs, crossings, game = list(pairs_of(experiment)), list(crossings_of(experiment)), shapley.game_of(experiment)
    rounds = [Rounds(shape, corners, shares, spreads.get(shape)) for shape in measured.shapes]
    found: dict[str, Found] = {
        "effects": [_effect(pair, here) for pair in pairs for here in rounds],
        "interactions": [_interaction(crossing, here) for crossing in crossings for here in rounds],
        "shapley": [shapley_value(game, player, here) for player in game.players for here in rounds]
        + [_on_top(game, *top, here) for top in game.on_top for here in rounds],
    }
    return {
        name: _judged(measured, of_kind, WORDS if name == "interactions" else {}) for name, of_kind in found.items()
    }


def _judged(measured: Measured, found: Found, words: Mapping[str, str]) -> list[dict[str, Any]]:
    claims = sum(effect is not None for _, effect in found)
    rows = []
    for row, effect in found:
        if effect:
            row |= _judge(effect, measured.floors[measured.shape_class((row["m"], row["n"], row["k"]))], claims, row)
            row["verdict"] = words.get(row["verdict"], row["verdict"])
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Contexts:
    """The contexts of a pair or a crossing at one shape: those that were timed, and how many are not there and why.

    A context of which a variant was not timed, or in too few rounds, is left out whole, so that a lost corner never shifts
    the mean by what else its levels are worth; it is counted and its corner is named.
    """

    timed: list[tuple[str, ...]]
    row: dict[str, Any]

    @classmethod
    def of(cls, contexts: Sequence[tuple[Variant, ...]], excluded: int, title: str, rounds: Rounds) -> Contexts:
        timed, absent, lost = [], 0, 0
        gone: dict[str, str] = {}
        for context in contexts:
            bad = rounds.lost(context)
            if not bad:
                timed.append(tuple(variant.name for variant in context))
            elif "not on this chip" in bad.values():
                absent += 1
            else:
                lost += 1
                gone |= bad
        row = {**rounds.row(), "contexts": len(timed), "not_estimable": excluded + absent, "lost": lost}
        if timed and lost:
            row["reason"] = f"Fewer contexts than there are: {_lost(gone)}."
        elif not timed:
            row["status"] = next(iter(gone.values()), "not estimable")
            row["reason"] = f"No context was timed: {_lost(gone)}." if lost else f"{title}: {_excluded(absent)}."
        return cls(timed, row)


def _effect(pair: Pair, rounds: Rounds) -> tuple[dict[str, Any], stats.Effect | None]:
    """The row of two levels at one shape, and the mean over the contexts that were timed."""
    contexts = Contexts.of(pair.contexts, pair.excluded, pair.title, rounds)
    row = contexts.row | {
        "factor": pair.factor.name,
        "source_level": pair.source,
        "target_level": pair.target,
        "least_source": "",
        "least_target": "",
        "most_source": "",
        "most_target": "",
    }
    if not contexts.timed:
        return row, None
    gains = {(a, b): rounds.share(b).value - rounds.share(a).value for a, b in contexts.timed}
    for word, (source, target) in (
        ("least", min(gains, key=gains.__getitem__)),
        ("most", max(gains, key=gains.__getitem__)),
    ):
        row |= {f"{word}_percent": stats.percent(gains[source, target])}
        row |= {f"{word}_source": source, f"{word}_target": target}
    return row, stats.mean_effect([(rounds.share(a), rounds.share(b)) for a, b in contexts.timed], rounds.spread)


def _interaction(crossing: Crossing, rounds: Rounds) -> tuple[dict[str, Any], stats.Effect | None]:
    """By how much one change gains more after the other than before it: the mean over contexts of both - either + neither."""
    contexts = Contexts.of(crossing.contexts, crossing.excluded, crossing.title, rounds)
    row = contexts.row | {
        "factor": crossing.factor.name,
        "source_level": crossing.source,
        "target_level": crossing.target,
        "other": crossing.other.name,
        "other_source_level": crossing.other_source,
        "other_target_level": crossing.other_target,
    }
    if not contexts.timed:
        return row, None
    n = len(contexts.timed)
    terms = (
        (sign / n, rounds.share(name))
        for four in contexts.timed
        for sign, name in zip((1, -1, -1, 1), four, strict=True)
    )
    return row, stats.contrast(terms, rounds.spread)


def shapley_value(game: shapley.Game, player: str, rounds: Rounds) -> tuple[dict[str, Any], stats.Effect | None]:
    """The row of a factor at one shape, and its Shapley value: nothing unless every corner was timed."""
    row = _shapley_row("share", player, game.start.level(player), game.goal.level(player), len(game.corners), rounds)
    corners = [variant for variant in game.corners.values() if variant]
    gone = rounds.lost(corners)
    row["corners"] = len(corners) - len(gone)
    if excluded := len(game.corners) - len(corners):
        reason = f"{excluded} of {len(game.corners)} corners are levels that do not go together."
        return row | {"status": "not estimable", "reason": reason}, None
    if gone:
        return row | {"status": "not estimable", "reason": f"A corner is never filled in: {_lost(gone)}."}, None
    weights = shapley.weights(game.players, player)
    medians = [rounds.share(variant.name) for variant in corners]
    part = [weights[moved] for moved in game.corners]
    whole = [float((moved == frozenset(game.players)) - (not moved)) for moved in game.corners]
    total = stats.contrast(zip(whole, medians, strict=True), rounds.spread)
    share = stats.share(part, whole, medians, rounds.spread)
    row["total_percent"] = stats.percent(total.value)
    if math.isfinite(total.error):
        low, high = total.interval()
        row |= {"total_low_percent": stats.percent(low), "total_high_percent": stats.percent(high)}
    if math.isfinite(share.value):
        row["share_percent"] = 100 * share.value
    if math.isfinite(share.high):
        row |= {"share_low_percent": 100 * share.low, "share_high_percent": 100 * share.high}
    elif rounds.spread:
        row["reason"] = "The whole gain is not clear of 0, so that a share of it has no interval."
    return row, stats.contrast(zip(part, medians, strict=True), rounds.spread)


def _on_top(
    game: shapley.Game, factor: str, level: int, top: Variant, rounds: Rounds
) -> tuple[dict[str, Any], stats.Effect | None]:
    """The row of one change of the goal at one shape, and what it gains."""
    row = _shapley_row("on top", factor, game.goal.level(factor), level, 2, rounds)
    gone = rounds.lost([game.goal, top])
    row["corners"] = 2 - len(gone)
    if gone:
        return row | {"status": "not estimable", "reason": f"A corner is never filled in: {_lost(gone)}."}, None
    return row, stats.contrast([(-1, rounds.share(game.goal.name)), (1, rounds.share(top.name))], rounds.spread)


def _shapley_row(part: str, factor: str, source: int, target: int, wanted: int, rounds: Rounds) -> dict[str, Any]:
    levels = {"source_level": source, "target_level": target}
    return rounds.row() | {"part": part, "factor": factor, **levels, "wanted": wanted}


def _lost(gone: Mapping[str, str]) -> str:
    """The corners that were asked for and are not there, each with its word."""
    named = [f"{name} ({state})" for name, state in itertools.islice(gone.items(), NAMED)]
    more = f" and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
    return f"{', '.join(named)}{more} {'is' if len(gone) == 1 else 'are'} missing"


def _excluded(absent: int) -> str:
    return "not on this chip" if absent else "no combination of the other factors goes with both"


def _judge(effect: stats.Effect, floor: stats.Floor | None, claims: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Gain, intervals, floor and verdict, on log-ratios, told in percent. No claim is made under the floor."""
    low, high = effect.interval()
    claim_low, claim_high = effect.interval(stats.claim_level(claims))
    judged: dict[str, Any] = {"gain_log": effect.value, "gain_percent": stats.percent(effect.value)}
    if not math.isfinite(high):
        why = "The spread from job to job was not measured, so that no claim is made."
        return judged | {"reason": f"{row['reason']} {why}".strip()}
    judged |= {"low_percent": stats.percent(low), "high_percent": stats.percent(high)}
    judged |= {"claim_low_percent": stats.percent(claim_low), "claim_high_percent": stats.percent(claim_high)}
    if floor is None:
        why = "The floor of this shape class was not measured, so that no claim is made."
        return judged | {"reason": f"{row['reason']} {why}".strip()}
    return judged | {
        "floor_percent": stats.percent(floor.value),
        "verdict": stats.verdict(claim_low, claim_high, floor.value),
    }


def _counters(measured: Measured) -> dict[tuple[str, Shape], dict[str, float]]:
    """The counters that `corners.csv` shows, where a variant was profiled at a shape that was timed."""
    wavefronts = [f"{WAVEFRONTS}{op}.sum" for op in ("ld", "ldsm", "st", "ldgsts")]
    columns = {
        "instructions": ["smsp__inst_executed.sum"],
        "shared_wavefronts": wavefronts,
        "tensor_busy_percent": [TENSOR],
    }
    found: dict[tuple[str, Shape], dict[str, float]] = {}
    for name, recording in measured.recordings.profiles.items():
        frame = recording.frame[recording.frame["value"].notna()]
        for (m, n, k), group in frame.groupby(["m", "n", "k"]):
            values = dict(zip(group["metric"], group["value"].astype(float), strict=True))
            found[name, (int(m), int(n), int(k))] = {
                column: sum(values[metric] for metric in metrics)
                for column, metrics in columns.items()
                if set(metrics) <= set(values)
            }
    return found


def _coverage(measured: Measured) -> list[dict[str, Any]]:
    """What came of the variants that are on no ladder; of their profiles only where one of them has any."""
    names = {variant.name for variant in measured.experiment.off_ladder()}
    profiled = bool(names & set(measured.recordings.profiles))
    shapes = [(int(m), int(n), int(k)) for m, n, k in (measured.experiment.factorial or {})["profile_shapes"]]
    return [
        row
        for row in aggregate.coverage_rows(measured, shapes)
        if row["variant"] in names and (row["what"] in ("inspect", "sweep") or (row["what"] == "profile" and profiled))
    ]
