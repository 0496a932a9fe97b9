"""Many variants of a GEMM experiment side by side in one process: which of them are worth a rung, and where.

    python benchmarks/gemm_search.py hopper_gemm out.csv --where tile=128256,128128 cluster=11,21,22 --base H10
        --where tile=64256 pingpong=1 --shapes 4096x4096x4096 512x512x256 --toolchain system

Every variant that has one of the levels of a `--where` and else the base's is built (in parallel), held against exact integers
and timed at every shape, in rounds that go through all of them in random order, the control after every few. A
row of the CSV is a variant at a shape: the median over the rounds of its speed against the control beside it, with quartiles.
This is a search, not a recording: no floor, no intervals, no evidence. What it finds becomes a rung and is measured as one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import build, clock, gpu, launcher, plan
from rungs.errors import Refused, RungsError
from rungs.variants import Experiment, Variant, load_device, load_experiment

EVERY = 5
"""Variants between two timings of the control."""
SAMPLE_US = 300.0


def chosen_variants(experiment: Experiment, base: str, where: list[list[str]], more: list[str]) -> list[Variant]:
    """The base, every combination of the levels of each `where` that goes together, and those named."""
    first = experiment.variant(base)
    found = [first]
    for product in where:
        asked = {
            name: [int(level) for level in levels.split(",")] for name, levels in (each.split("=") for each in product)
        }
        for levels in itertools.product(*asked.values()):
            try:
                found.append(experiment.assign({**dict(first.levels), **dict(zip(asked, levels, strict=True))}))
            except RungsError as reason:
                if "no level" in str(reason) or "unknown factor" in str(reason):
                    sys.exit(f"gemm_search: {reason}")
    return list(dict.fromkeys([*found, *map(experiment.variant, more)]))


def built(variants: list[Variant], arch: str, folder: Path, toolchain: build.Toolchain) -> list[tuple[Variant, Path]]:
    """Those that could be built, with their cubins; the others are said."""

    def one(variant: Variant) -> tuple[Variant, dict, Path]:
        manifest = folder / variant.name / f"{variant.name}.json"
        return variant, build.build(variant.name, arch, manifest, toolchain), manifest.with_suffix(".cubin")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(one, variants))
    for variant, manifest, _ in made:
        if manifest["status"] != "ok":
            print(f"{variant.name}: {manifest['status']}: {manifest['reason']}")
    return [(variant, cubin) for variant, manifest, cubin in made if manifest["status"] == "ok"]


def timed(session: gpu.Session, arm: str) -> tuple[float, float | None]:
    """(us of a launch, SM clock in MHz) of one replay of the arm's graph."""
    before = session.stamp()
    start = session.event()
    session.replay(arm)
    end = session.event()
    after = session.stamp()
    session.wait(end)
    session.torch.cuda.synchronize()
    return session.elapsed_us(start, end) / session.launches_of[arm], session.clock_mhz(before, after)


def search(
    session: gpu.Session, names: list[str], rounds: int, seed: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Arm -> (speed against the control, us, MHz) per round."""
    session.launches_of = {}
    for arm in [gpu.CONTROL, *names]:
        session.capture(arm, 1)
        session.launches_of[arm] = 1
        us = statistics.median(timed(session, arm)[0] for _ in range(3))
        session.launches_of[arm] = max(1, round(SAMPLE_US / us))
        session.capture(arm, session.launches_of[arm])
    order, generator, found = list(names), random.Random(seed), {name: [] for name in names}
    for number in range(rounds + 1):
        generator.shuffle(order)
        control = timed(session, gpu.CONTROL)[0]
        for at in range(0, len(order), EVERY):
            here = [(arm, *timed(session, arm)) for arm in order[at : at + EVERY]]
            last, control = control, timed(session, gpu.CONTROL)[0]
            for arm, us, mhz in here:
                if number:  # the first round warms up
                    found[arm].append(((last + control) / 2 / us, us, mhz or float("nan")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("output", type=Path)
    parser.add_argument("--base", required=True, help="a rung or a variant")
    parser.add_argument(
        "--where",
        nargs="+",
        action="append",
        default=[],
        metavar="FACTOR=LEVEL,...",
        help="a product; may be given again",
    )
    parser.add_argument("--also", nargs="*", default=[], metavar="VARIANT")
    parser.add_argument("--shapes", nargs="+", required=True, metavar="MxNxK")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="no further shape is begun after so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--toolchain", choices=("pip", "system"), default="pip")
    a = parser.parse_args()

    board = clock.choose(a.device)
    if board is None or board.arch is None:
        sys.exit("gemm_search: there is no GPU here that rungs knows: run it on one that config/devices/ describes.")
    experiment, device, begin = load_experiment(a.experiment), load_device(board.arch), time.monotonic()
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in a.shapes]
    variants = chosen_variants(experiment, a.base, a.where, a.also)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        toolchain = build.find_toolchain(a.toolchain)
        ready = built(variants, board.arch, Path(folder), toolchain)
        print(f"{len(ready)} of {len(variants)} variants built in {time.monotonic() - begin:.0f} s", flush=True)
        session = gpu.open_session(experiment, board.uuid)
        stamp = Path(folder) / "stamp" / "stamp.json"
        build.build(build.STAMP, board.arch, stamp, toolchain)
        session.load_stamp(stamp.with_suffix(".cubin"))
        names = []
        for variant, cubin in ready:
            try:
                for shape in shapes:
                    plan.check_problem(experiment, variant, shape)
                session.load(variant.name, experiment, variant, device, cubin)
                names.append(variant.name)
            except (Refused, RungsError) as reason:
                print(f"{variant.name}: {reason}")
        held = {}
        for name in names:
            arm, addresses = session.arms[name], dict.fromkeys("abc", 1 << 20)
            launch = plan.plan(experiment, arm.variant, device, shapes[0], addresses, session.sms)
            if hasattr(arm, "function"):  # the tests' stand-in has none
                held[math.prod(launch.cluster)] = launcher.sms_at_once(arm.function, launch, session.sms, name)
        print("SMs that clusters of so many CTAs hold at once:", dict(sorted(held.items())), flush=True)
        for number, shape in enumerate(shapes):
            if time.monotonic() - begin > a.seconds:
                print(f"no time left for {shape}")
                break
            session.set_problem(shape, "integer", 1)
            for name in list(names):
                outcome = session.outcome(name)
                if not outcome.equal or outcome.unwritten:
                    print(f"{name}: wrong at {shape}", flush=True)
                    names.remove(name)
            session.set_problem(shape, "normal", 1)
            for name, rounds in search(session, names, a.rounds, number).items():
                ratios, times, clocks = zip(*rounds, strict=True)
                low, middle, high = statistics.quantiles(ratios, n=4)
                us, mhz = statistics.median(times), statistics.median(clocks)
                flop = 2 * shape[0] * shape[1] * shape[2]
                numbers = {
                    "low": low,
                    "ratio": middle,
                    "high": high,
                    "time_us": us,
                    "tflops": flop / us / 1e6,
                    "sm_mhz": mhz,
                }
                rows.append({"variant": name, **dict(zip("mnk", shape, strict=True)), **numbers})
            frame = pd.DataFrame(rows)
            frame.round(4).to_csv(a.output, index=False)
            here = frame[(frame[["m", "n", "k"]] == list(shape)).all(axis=1)].sort_values("ratio", ascending=False)
            print(f"{'x'.join(map(str, shape))}, {time.monotonic() - begin:.0f} s")
            print(
                here.head(12)[["variant", "ratio", "low", "high", "tflops", "sm_mhz"]].to_string(index=False),
                flush=True,
            )


if __name__ == "__main__":
    main()
