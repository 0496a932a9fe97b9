"""The factorial: what each level of a factor buys, averaged over every combination of the other factors.

From `results/<set>/csv` to `corners.csv` (every variant), `effects.csv` (every pair of levels) and `factorial_coverage.csv`
(the variants that are on no ladder) under `results/<set>/data/<experiment>/`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rungs import aggregate, schemas, stats
from rungs.aggregate import TENSOR, WAVEFRONTS, Measured, Shape
from rungs.errors import RungsError
from rungs.variants import Experiment, Factor, Variant, load_experiment

FRAMES = {"corners": "corners", "effects": "effects", "factorial_coverage": "coverage"}
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
    shares = aggregate.shares_of(measured)
    few = {key: share for key, share in shares.items() if not math.isfinite(share.error)}
    shares = {key: share for key, share in shares.items() if key not in few}
    counted = _counters(measured)
    rows = [
        row | counted.get((row["variant"], (row["m"], row["n"], row["k"])), {})
        for row in aggregate.shape_rows(measured, shares | few)
    ]
    for row in rows:
        if share := few.get((row["variant"], (row["m"], row["n"], row["k"]))):
            why = f"Only {share.rounds} rounds have both unflagged, and under {stats.FEWEST} there is no interval."
            row |= {"status": "flagged", "reason": why}
    corners: Corners = {(row["variant"], (row["m"], row["n"], row["k"])): row for row in rows}
    return {
        "corners": aggregate.frame_of("corners", rows),
        "effects": aggregate.frame_of("effects", _effect_rows(measured, corners, shares)),
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


def _effect_rows(
    measured: Measured, corners: Corners, shares: Mapping[tuple[str, Shape], stats.Median]
) -> list[dict[str, Any]]:
    spreads, rows, found = aggregate.spreads_of(measured), [], []
    for pair in pairs_of(measured.experiment):
        for shape in measured.shapes:
            row, effect = _effect(pair, shape, corners, shares, spreads.get(shape))
            rows.append(row)
            found.append(effect)
    claims = sum(effect is not None for effect in found)
    for row, effect in zip(rows, found, strict=True):
        if effect:
            row |= _judge(effect, measured.floors[measured.shape_class((row["m"], row["n"], row["k"]))], claims, row)
    return rows


def _effect(
    pair: Pair,
    shape: Shape,
    corners: Corners,
    shares: Mapping[tuple[str, Shape], stats.Median],
    spread: stats.Spread | None,
) -> tuple[dict[str, Any], stats.Effect | None]:
    """The row of two levels at one shape, without its verdict, and the mean over the contexts that were timed.

    A context that was not timed, or in too few rounds, is left out whole, so that a lost corner never shifts the mean by
    what else its levels are worth; it is counted and its corner is named.
    """
    timed, absent, lost = [], 0, 0
    gone: dict[str, str] = {}
    for context in pair.contexts:
        states = {variant.name: corners[variant.name, shape]["status"] for variant in context}
        bad = {name: state for name, state in states.items() if (name, shape) not in shares}
        if not bad:
            timed.append((context[0].name, context[1].name))
        elif "not on this chip" in bad.values():
            absent += 1
        else:
            lost += 1
            gone |= bad
    row: dict[str, Any] = {
        "factor": pair.factor.name,
        "source_level": pair.source,
        "target_level": pair.target,
        **dict(zip(("m", "n", "k"), shape, strict=True)),
        "spread_percent": stats.percent(spread.deviation) if spread else None,
        "contexts": len(timed),
        "not_estimable": pair.excluded + absent,
        "lost": lost,
        "least_source": "",
        "least_target": "",
        "most_source": "",
        "most_target": "",
        "verdict": "none",
        "status": "ok",
        "reason": f"Fewer contexts than there are: {_lost(gone)}." if lost else "",
    }
    if not timed:
        why = f"No context was timed: {_lost(gone)}." if lost else f"{pair.title}: {_excluded(absent)}."
        return row | {"status": next(iter(gone.values()), "not estimable"), "reason": why}, None
    gains = {both: shares[both[1], shape].value - shares[both[0], shape].value for both in timed}
    for word, (source, target) in (
        ("least", min(gains, key=gains.__getitem__)),
        ("most", max(gains, key=gains.__getitem__)),
    ):
        row |= {f"{word}_percent": stats.percent(gains[source, target])}
        row |= {f"{word}_source": source, f"{word}_target": target}
    return row, stats.mean_effect([(shares[a, shape], shares[b, shape]) for a, b in timed], spread)


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
    judged: dict[str, Any] = {"gain_percent": stats.percent(effect.value)}
    if not math.isfinite(high) or floor is None:
        why = "The spread from job to job was not measured, so that no claim is made."
        return judged | {"reason": f"{row['reason']} {why}".strip()}
    judged |= {"low_percent": stats.percent(low), "high_percent": stats.percent(high)}
    judged |= {"claim_low_percent": stats.percent(claim_low), "claim_high_percent": stats.percent(claim_high)}
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
