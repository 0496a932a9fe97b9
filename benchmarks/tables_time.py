"""How long it takes from raw rounds to tables and figures: 100 variants at 10 shapes with 30 rounds, and ten times the rounds' rows."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import aggregate, effects, factorial, plots, shapley, shapleyplots, tables
from rungs.variants import load_experiment
from synthetic import ARCH, World, write_set

EXPERIMENT = load_experiment("gemm")
ALL = [variant.name for variant in EXPERIMENT.estimable()]
RUNGS = [name for name in ALL if EXPERIMENT.rung_names(EXPERIMENT.variant(name))]
SHAPES = [(mn, mn, k) for mn in (512, 4096) for k in (256, 512, 1024, 4096, 8192)]


def world(tenfold: str = "") -> World:
    """`tenfold`: shapes or rounds, of which there are ten times as many."""
    shapes = [(mn, mn, k) for mn in (512, 4096) for k in range(256, 256 * 51, 256)] if tenfold == "shapes" else SHAPES
    rounds = 300 if tenfold == "rounds" else 30
    return World(variants=ALL, shapes=shapes, rounds=rounds, between=0.003, profile="")


def draw(results: Path) -> None:
    """Every figure that `all` draws of the set."""
    plots.run(results, "gemm")
    for factor in EXPERIMENT.factors:
        plots.draw("effect", results, "gemm", factor, {})
    for picture in shapleyplots.PICTURES:
        shapleyplots.draw(results, "gemm", picture, {})


def shares(results: Path) -> None:
    """Shapley values with their intervals, from the raw rounds of their 32 corners."""
    game = shapley.game_of(EXPERIMENT)
    names = [variant.name for variant in game.corners.values() if variant]
    measured = aggregate.load(results, EXPERIMENT, ARCH, names)
    medians, spreads = aggregate.shares_of(measured), aggregate.spreads_of(measured)
    corners: effects.Corners = {(name, shape): {"status": "ok"} for name in names for shape in measured.shapes}
    for shape in measured.shapes:
        here = effects.Rounds(shape, corners, medians, spreads.get(shape))
        for player in game.players:
            effects.shapley_value(game, player, here)


STAGES: dict[str, Callable[[Path], None]] = {
    "data of the ladders": lambda results: aggregate.run(results, "gemm", ARCH, RUNGS),
    "data of the factorial": lambda results: effects.run(results, "gemm", ARCH),
    "pages": lambda results: (tables.run(results, ["gemm"]), factorial.write(results, "gemm"))[0],
    "figures": draw,
    "Shapley values alone": shares,
}


def measure(tenfold: str = "") -> dict[str, float]:
    """Stage -> seconds of processor time, on a synthetic set."""
    taken = {}
    with tempfile.TemporaryDirectory(prefix="rungs-tables-") as folder:
        results = Path(folder) / "h200"
        write_set(results, world(tenfold))
        for name, stage in STAGES.items():
            start = time.process_time()
            stage(results)
            taken[name] = time.process_time() - start
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenfold", nargs="*", choices=("shapes", "rounds"), default=["shapes", "rounds"])
    a = parser.parse_args(arguments)
    columns = {"10 shapes x 30 rounds": measure()}
    columns |= {f"ten times the {what}": measure(what) for what in a.tenfold}
    print(f"{len(ALL)} variants, seconds of processor time on one core:\n")
    print(f"| stage | {' | '.join(columns)} |\n| --- | {' | '.join('---' for _ in columns)} |")
    for stage in STAGES:
        print(f"| {stage} | {' | '.join(f'{taken[stage]:.1f}' for taken in columns.values())} |")
    totals = [sum(taken[stage] for stage in list(STAGES)[:-1]) for taken in columns.values()]
    print(f"| data, pages and figures together | {' | '.join(f'{total:.1f}' for total in totals)} |")


if __name__ == "__main__":
    main()
