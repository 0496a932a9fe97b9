"""Do the intervals hold the truth, and how often is a difference claimed where there is none: simulated experiments.

Every experiment is drawn in numpy (rounds that are correlated from one to the next, jobs that differ, a truth that is known), stopped
by the protocol's own stop rule and judged by the functions that the pipeline calls: `protocol.decided`, `aggregate.shares_of`,
`aggregate.spreads_of`, `effects.estimates`, `stats`. Prints a Markdown table; a minute of one core for every 1,000 experiments.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

import numpy as np
import yaml
from numpy.typing import NDArray

from rungs import aggregate, effects, protocol, shapley, stats
from rungs.aggregate import Arm, Measured, Recordings
from rungs.variants import CONFIG, Experiment, Variant, load_device, parse_experiment

KEPT = {"load": (0, 2), "read": (0, 1), "b_layout": (0, 1), "stages": (1, 2), "swizzle": (0, 1)}
"""The levels of `gemm` between which Shapley values are taken: 32 variants."""
FLOOR_JOBS = 3
RUNG = {"target_percent": 0.3, "rounds_min": 20, "rounds_max": 60}
"""The stop rule of a rung's job; config/config.yaml has more rounds at most, which would only take longer."""
ALONE = {"target_percent": 1.0, "rounds_min": 10, "rounds_max": 30}
"""That of a variant on no ladder, as in config/config.yaml."""
IDLE = protocol.Condition("", None, None)
KINDS = ("step", "main effect", "interaction", "Shapley value", "Shapley share", "whole gain")


@dataclass(frozen=True)
class World:
    """What a simulated GPU does; all are standard deviations of log-times.

    `noise` of one arm in one round, correlated by `correlation` with the round before; `between`: of the control from job to
    job; `own`: of every other arm from job to job. `apart`: whether the variants differ, False for A/A.
    """

    noise: float = 0.0035
    correlation: float = 0.3
    between: float = 0.003
    own: float = 0.0
    apart: bool = True


def toy() -> Experiment:
    """`gemm` with two levels of each factor and two ladders, which go from source to target in opposite orders."""
    raw = yaml.safe_load((CONFIG / "experiments" / "gemm.yaml").read_text(encoding="utf-8"))
    for name, levels in KEPT.items():
        raw["factors"][name]["levels"] = {level: {"title": f"{name} {level}"} for level in levels}
    first = {name: levels[0] for name, levels in KEPT.items()}
    raw["ladders"] = {}
    for ladder, order in (("P", list(KEPT)), ("Q", list(KEPT)[::-1])):
        rungs = {f"{ladder}{n}": {name: KEPT[name][1] for name in order[:n]} for n in range(len(order) + 1)}
        steps = [f"{a}>{b}" for a, b in itertools.pairwise(rungs)]
        raw["ladders"][ladder] = {"title": ladder, "base": first, "rungs": rungs, "steps": steps, "path": list(rungs)}
    ends = {end: {name: levels[i] for name, levels in KEPT.items()} for i, end in enumerate(("source", "target"))}
    raw |= {"floor_rung": "P3", "quick": {**raw["quick"], "ladders": ["P"]}}
    raw["factorial"] = {"profile_shapes": [], "shapley": ends}
    return parse_experiment(raw)


def truth(experiment: Experiment, apart: bool) -> dict[str, float]:
    """Variant -> log of its share of the control: main effects, and terms of two and of three factors."""
    rng = np.random.default_rng(7)
    sizes = {1: 0.3, 2: 0.1, 3: 0.05}
    terms = {
        names: rng.normal(0.1 * (len(names) == 1), size)
        for count, size in sizes.items()
        for names in itertools.combinations(KEPT, count)
    }
    found = {}
    for variant in experiment.estimable():
        moved = {name for name, levels in KEPT.items() if variant.level(name) == levels[1]}
        found[variant.name] = -1.0 + apart * float(sum(term for names, term in terms.items() if moved >= set(names)))
    return found


# One batch of experiments: each is a shape of one set, since nothing but the floor goes from shape to shape


def simulate(experiment: Experiment, world: World, shapes: int, rng: np.random.Generator) -> Measured:
    """A set of that many shapes, every one drawn anew, measured as the pipeline would: rungs with predecessors, floor jobs."""
    where = [(4096, 4096, 32 * (n + 1)) for n in range(shapes)]
    shares = truth(experiment, world.apart)
    arms, floors = {}, []
    for variant in experiment.estimable():
        before = [other.name for other in experiment.predecessors(variant)]
        rule = RUNG if experiment.rung_names(variant) else ALONE
        names = [variant.name, *before, "control"]
        arms[variant.name] = dict(zip(where, _job(names, shares, world, rule, shapes, rng), strict=True))
    floor = experiment.floor_variant
    names = [floor.name, "twin", *(other.name for other in experiment.predecessors(floor)), "control"]
    for _ in range(FLOOR_JOBS):
        job = _job(names, {**shares, "twin": shares[floor.name]}, world, RUNG, shapes, rng)
        floors.append(dict(zip(where, job, strict=True)))
    empty = Recordings({}, [], {}, {})
    asked = experiment.estimable()
    measured = Measured(experiment, load_device("sm_90a"), asked, empty, arms, floors, where, 132, {})
    return replace(measured, floors=dict.fromkeys(stats.CLASSES, _floor(measured, floor)))


def _job(
    names: Sequence[str],
    shares: Mapping[str, float],
    world: World,
    rule: Mapping[str, Any],
    shapes: int,
    rng: np.random.Generator,
) -> Iterator[dict[str, Arm]]:
    """The arms of one job at every shape, up to the round at which the protocol stops."""
    settings = protocol.Settings(**rule, sample_us=200, warmup_s=0, l2="hot", seed=1)
    rounds = settings.rounds_max
    noise = rng.standard_normal((shapes, len(names), rounds))
    for i in range(1, rounds):
        noise[..., i] = world.correlation * noise[..., i - 1] + math.sqrt(1 - world.correlation**2) * noise[..., i]
    job = rng.standard_normal((shapes, len(names))) * [world.between if n == "control" else world.own for n in names]
    level = np.array([-shares.get(name, 0.0) for name in names])
    time_us = 100 * np.exp(level[:, None] + job[..., None] + world.noise * noise)
    for at in time_us:
        done = _stop(names, at, settings)
        number = np.arange(1, done + 1)
        yield {
            name: Arm("ok", "", number, at[i, :done], np.full(done, 1755.0), np.full(done, 600.0))
            for i, name in enumerate(names)
        }


def _stop(names: Sequence[str], time_us: NDArray[np.float64], settings: protocol.Settings) -> int:
    """The round at which the protocol stops; `time_us` is (arms, rounds)."""
    samples: list[protocol.Sample] = []
    for first in range(0, settings.rounds_max, protocol.CHECK_EVERY):
        for n in range(first, min(first + protocol.CHECK_EVERY, settings.rounds_max)):
            for i, name in enumerate(names):
                samples.append(protocol.Sample(n + 1, name, i, 20, float(time_us[i, n]), None, IDLE, ""))
        if n + 1 >= settings.rounds_min and protocol.decided(samples, names[0], names, settings):
            return n + 1
    return settings.rounds_max


def _floor(measured: Measured, floor: Variant) -> stats.Floor | None:
    """As the pipeline makes it: the twin in each job, and the ratio to a predecessor from job to job."""
    twin: dict[tuple[int, ...], list[float]] = {}
    other: dict[Any, list[float]] = {}
    for job in measured.floor_arms:
        for shape, here in job.items():
            for name, arm in here.items():
                if name not in (floor.name, "control"):
                    median = float(np.median(aggregate.paired(arm, here[floor.name])))
                    (twin if name == "twin" else other).setdefault(
                        shape if name == "twin" else (shape, name), []
                    ).append(median)
    return stats.floor_of(twin, other, len(measured.floor_arms))


@dataclass(frozen=True)
class Judged:
    """What the pipeline makes of a set: rows of the three tables, and of every step its median and its true log-ratio."""

    rows: Mapping[str, list[dict[str, Any]]]
    steps: Sequence[tuple[tuple[int, ...], stats.Median, float]]
    floor: stats.Floor | None


def judge(measured: Measured, shares: Mapping[str, float]) -> Judged:
    corners = {(v.name, shape): {"status": "ok"} for v in measured.asked for shape in measured.shapes}
    medians, spreads = aggregate.shares_of(measured), aggregate.spreads_of(measured)
    rows = effects.estimates(measured, corners, medians, spreads)
    steps = []
    for step in measured.experiment.steps():
        source, target = step.source_variant.name, step.target_variant.name
        for shape in measured.shapes:
            here = measured.arms[target][shape]
            median = stats.median_error(aggregate.paired(here[source], here[target]))
            steps.append((shape, median, shares[target] - shares[source]))
    return Judged(rows, steps, measured.floors["many waves"])


def expected(experiment: Experiment, shares: Mapping[str, float]) -> dict[tuple[str, tuple[str, ...]], float]:
    """(table, factors) -> the true value, from the definitions: of a Shapley value by walking through all orders."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for pair in effects.pairs_of(experiment):
        gains = [shares[b.name] - shares[a.name] for a, b in pair.contexts]
        found["effects", (pair.factor.name,)] = sum(gains) / len(gains)
    for crossing in effects.crossings_of(experiment):
        gains = [shares[d.name] - shares[c.name] - shares[b.name] + shares[a.name] for a, b, c, d in crossing.contexts]
        found["interactions", (crossing.factor.name, crossing.other.name)] = sum(gains) / len(gains)
    game = shapley.game_of(experiment)
    value = dict.fromkeys(game.players, 0.0)
    orders = list(itertools.permutations(game.players))
    for order in orders:
        levels = dict(game.start.levels)
        for name in order:
            before = shares[experiment.assign(levels).name]
            levels[name] = game.goal.level(name)
            value[name] += (shares[experiment.assign(levels).name] - before) / len(orders)
    return found | {("shapley", (name,)): v for name, v in value.items()}


def held(judged: Judged, want: Mapping[tuple[str, tuple[str, ...]], float]) -> dict[str, list[bool]]:
    """Kind of interval -> of each, whether it holds the truth."""
    whole = sum(value for (table, _), value in want.items() if table == "shapley")
    found: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for _, median, true in judged.steps:
        low, high = median.interval()
        found["step"].append(low <= true <= high)
    for table, kind in (("effects", "main effect"), ("interactions", "interaction"), ("shapley", "Shapley value")):
        for row in judged.rows[table]:
            true = want[table, (row["factor"], row["other"]) if "other" in row else (row["factor"],)]
            found[kind].append(row["low_percent"] <= stats.percent(true) <= row["high_percent"])
            if table == "shapley":
                share = 100 * true / whole
                found["Shapley share"].append(row["share_low_percent"] <= share <= row["share_high_percent"])
                if row["factor"] == "load":
                    ends = (row["total_low_percent"], row["total_high_percent"])
                    found["whole gain"].append(ends[0] <= stats.percent(whole) <= ends[1])
    return found


def coverage(world: World, experiments: int, seed: int, batch: int = 50) -> dict[str, tuple[int, int]]:
    """Kind of interval -> (how many hold the truth, how many there are), over that many experiments."""
    experiment = toy()
    shares = truth(experiment, world.apart)
    want = expected(experiment, shares)
    found: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for first in range(0, experiments, batch):
        rng = np.random.default_rng([seed, first])
        measured = simulate(experiment, world, min(batch, experiments - first), rng)
        for kind, hits in held(judge(measured, shares), want).items():
            found[kind] += hits
    return {kind: (sum(hits), len(hits)) for kind, hits in found.items()}


FAMILIES = ("steps", "effects", "interactions", "shapley")


def false_claims(
    world: World, experiments: int, seed: int, shapes: int = 1, floor: bool = True
) -> dict[str, tuple[int, int]]:
    """Table -> (experiments of which it claims at least one difference, experiments), where nothing differs.

    Without `floor` the verdicts are taken against a floor of 0: then it is the correction for the number of claims alone
    that holds them back. Steps are corrected as their tables are: by ladder; a family is both ladders.
    """
    experiment, world = toy(), replace(world, apart=False)
    shares = truth(experiment, False)
    wrong = dict.fromkeys(FAMILIES, 0)
    for number in range(experiments):
        measured = simulate(experiment, world, shapes, np.random.default_rng([seed, number]))
        if not floor:
            measured = replace(measured, floors=dict.fromkeys(stats.CLASSES, stats.Floor(0.0, 0.0, shapes, FLOOR_JOBS)))
        judged = judge(measured, shares)
        limit = judged.floor.value if judged.floor else 0.0
        level = stats.claim_level(len(judged.steps))
        verdicts = {"steps": [stats.verdict(*median.interval(level), limit) for _, median, _ in judged.steps]}
        verdicts |= {table: [row["verdict"] for row in rows] for table, rows in judged.rows.items()}
        for family, words in verdicts.items():
            wrong[family] += bool({"faster", "slower", "more", "less"} & set(words))
    return {family: (count, experiments) for family, count in wrong.items()}


WORLDS = {
    "jobs differ by 0.3 %, rounds by 0.5 %": World(),
    "jobs by 0.1 %": World(between=0.001),
    "jobs by 1 %": World(between=0.01),
    "jobs not at all": World(between=0.0),
    "jobs by 0.3 %, half of its square each arm's own": World(between=0.0021, own=0.0021),
    "rounds by 1 %: at the cap": World(noise=0.007),
    "correlation 0.6 instead of 0.3": World(correlation=0.6),
}
"""A round's deviation is that of a log-ratio of two arms."""


A_A = (
    ("jobs differ by 0.3 %, with the floor", World(), True, 1),
    ("the same, with no floor: the correction alone", World(), False, 1),
    ("jobs by 1 %, no floor", World(between=0.01), False, 1),
    ("each arm by 0.1 % of its own too, with the floor; five shapes", World(own=0.001), True, 5),
)
"""What is printed of experiments in which nothing differs: their world, whether the floor counts, and shapes in one."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1000, help="of each world")
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args(arguments)
    start = time.process_time()
    print(f"Of {a.experiments} experiments, % of the 95 % intervals that hold the truth:\n")
    print(f"| experiments | {' | '.join(KINDS)} |")
    print(f"| --- | {' | '.join('---' for _ in KINDS)} |")
    for name, world in WORLDS.items():
        found = coverage(world, a.experiments, a.seed)
        print(f"| {name} | {' | '.join(f'{100 * hits / count:.1f}' for hits, count in found.values())} |", flush=True)
    print(
        f"\nOf {a.experiments} experiments (fewer of several shapes) in which nothing differs, % with at least one claim in a table:\n"
    )
    print(f"| experiments | {' | '.join(FAMILIES)} |")
    print(f"| --- | {' | '.join('---' for _ in FAMILIES)} |")
    for name, world, floor, shapes in A_A:
        wrong = false_claims(world, a.experiments // shapes, a.seed, shapes, floor)
        print(f"| {name} | {' | '.join(f'{100 * n / all_:.1f}' for n, all_ in wrong.values())} |", flush=True)
    print(f"\nSeed {a.seed}; {time.process_time() - start:.0f} s of processor time.")


if __name__ == "__main__":
    main()
