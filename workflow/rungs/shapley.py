"""Shapley values: what each factor adds on the way from one variant to another, over all orders. Pure.

L. S. Shapley, A value for n-person games, Contributions to the Theory of Games II, 1953. The players are the factors whose
levels differ, and the worth of a set of them is the speed with those at the goal's level and the others at the start's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rungs.variants import Experiment, Variant

Coalition = frozenset[str]


@dataclass(frozen=True)
class Game:
    """The corners between two variants of a factorial.

    `players`: the factors whose levels differ. `corners`: the set of factors at the goal's level -> the variant, None where
    its levels do not go together; 2^players of them. `on_top`: (factor, level, variant) that the goal is compared with one by
    one.
    """

    start: Variant
    goal: Variant
    players: tuple[str, ...]
    corners: Mapping[Coalition, Variant | None]
    on_top: tuple[tuple[str, int, Variant], ...]


def game_of(experiment: Experiment) -> Game:
    """What `factorial.shapley` of an experiment declares, which was checked when its file was read."""
    declared = (experiment.factorial or {})["shapley"]
    start, goal = (experiment.assign(declared[end]) for end in ("source", "target"))
    players = tuple(name for name in experiment.factors if start.level(name) != goal.level(name))
    estimable = {variant.levels: variant for variant in experiment.estimable()}
    corners = {
        moved: estimable.get(
            tuple((name, goal.level(name) if name in moved else level) for name, level in start.levels)
        )
        for moved in coalitions(players)
    }
    on_top = tuple(
        (name, level, experiment.assign({**dict(goal.levels), name: level}))
        for name, levels in declared.get("on_top", {}).items()
        for level in levels
    )
    return Game(start, goal, players, corners, on_top)


def coalitions(players: Sequence[str]) -> list[Coalition]:
    """Every set of players, the empty one first and that of all last."""
    return [frozenset(chosen) for size in range(len(players) + 1) for chosen in itertools.combinations(players, size)]


def weights(players: Sequence[str], player: str) -> dict[Coalition, float]:
    """Set of players -> its weight in the player's value, which is linear in the worths.

    A set S without the player, and S with it, are apart by the player in |S|! (n - |S| - 1)! of the n! orders, so that the
    larger one weighs +|S|! (n - |S| - 1)! / n! and the smaller one minus that. Over the players the weights add up to +1 for
    the set of all, -1 for the empty one and 0 for every other: the values sum to the whole gain.
    """
    orders = math.factorial(len(players))
    found = {}
    for moved in coalitions(players):
        before = len(moved - {player})
        share = math.factorial(before) * math.factorial(len(players) - before - 1) / orders
        found[moved] = share if player in moved else -share
    return found
