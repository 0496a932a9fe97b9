"""What a second of a GPU buys: rungs' protocol, triton's do_bench and NVBench, with the same seconds on the same launches.

    python benchmarks/measuring.py run measuring.csv --seconds 200
    python benchmarks/measuring.py summary measuring.csv --output summary.csv  # or a .csv.gz

`run` compares a rung's binary with itself (A/A) and with another rung's (a step), again and again, each time by a method that
has so many seconds of the GPU for the comparison, warm-up and host included. A row of the CSV is a comparison and a reading of
it; it is written at once, but for NVBench's hot ones, whose numbers NVBench gives when it ends. `summary` needs no GPU: how often
each method claims a difference between a binary and itself, the smallest step that it resolves, and how many seconds it needs to
resolve what rungs does with the fewest. The clock is left as it is. A method whose package is missing is left out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import importlib
import itertools
import json
import math
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import betainc, betaincinv, stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import bootstrap, build, clock, plan, protocol, schemas, settings, stats
from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.sampler import Sampler
from rungs.variants import load_device, load_experiment

TWIN = "twin"
"""The arm that is the second rung's binary once more."""
OURS, DO_BENCH, NVBENCH = METHODS = ("rungs", "do_bench", "nvbench")
POLICIES = ("hot", "cold")
KEY = ["method", "reading", "l2", "shape", "before", "after", "budget_s"]
COLUMNS = [*KEY, "spent_s", "samples", "estimate_percent", "low_percent", "high_percent", "claims", "at_s"]
"""`estimate_percent`: gain in speed from `before` to `after`. `claims`: whether the interval excludes 0, empty where there is
none. `spent_s`: seconds of the GPU that the comparison took, `at_s`: seconds of the run before it."""
PILOT_ROUNDS = 10
"""Rounds by which ours learns how long one lasts; they count."""
WARM_S = 0.5
"""Load before the first comparison of a shape, charged to none."""
FLOOR_OF = 3
"""A/A comparisons that make a floor, as many as the pipeline has floor jobs."""
GOAL = 2.0
"""Times the seconds of ours that a method should need for the same resolution."""


@dataclass(frozen=True)
class Reading:
    """What a method's samples say, and how: log-ratio of the time before to the time after, with its 95 % interval.

    `low` and `high` are None where the method gives no way to an interval.
    """

    name: str
    estimate: float
    low: float | None
    high: float | None
    samples: int


# ---- statistics ------------------------------------------------------------------------------------------------------


def bootstrap_weights(count: int, quantile: float) -> np.ndarray:
    """The probability, for each of `count` sorted numbers, that it is that quantile of a bootstrap sample.

    Exact for the median of an odd count (Maritz and Jarrett, JASA 73, 1978); their mean of the numbers is the estimator of
    Harrell and Davis (Biometrika 69, 1982).
    """
    ends = np.arange(count + 1) / count
    return np.diff(betainc((count + 1) * quantile, (count + 1) * (1 - quantile), ends))


def quantile_with_error(values: Sequence[float] | np.ndarray, quantile: float) -> tuple[float, float]:
    """Harrell and Davis's estimate of a quantile, and its bootstrap standard error without resampling."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    weights = bootstrap_weights(len(ordered), quantile)
    mean = float(weights @ ordered)
    return mean, math.sqrt(max(float(weights @ (ordered - mean) ** 2), 0.0))


def unpaired(before_us: Sequence[float], after_us: Sequence[float]) -> list[Reading]:
    """The usual readings of two runs of samples that know nothing of each other: means, by Welch, and medians."""
    before, after = (np.asarray(times, dtype=np.float64) for times in (before_us, after_us))
    count = len(before) + len(after)
    if min(len(before), len(after)) < bootstrap.FEWEST:
        return [Reading("mean", math.log(before.mean() / after.mean()), -math.inf, math.inf, count)]
    squares = [float(times.var(ddof=1)) / len(times) / float(times.mean()) ** 2 for times in (before, after)]
    spread = sum(square**2 / (len(times) - 1) for square, times in zip(squares, (before, after), strict=True))
    freedom = sum(squares) ** 2 / spread if spread else math.inf
    medians = [float(np.median(times)) for times in (before, after)]
    errors = [quantile_with_error(times, 0.5)[1] / m for times, m in zip((before, after), medians, strict=True)]
    found = []
    for name, estimate, error, dof in (
        ("mean", math.log(before.mean() / after.mean()), math.sqrt(sum(squares)), freedom),
        ("median", math.log(medians[0] / medians[1]), math.hypot(*errors), math.inf),
    ):
        half = float(stdtrit(min(dof, 1e9), 0.975)) * error
        found.append(Reading(name, estimate, estimate - half, estimate + half, count))
    return found


def by_noise(before_us: Sequence[float], after_us: Sequence[float]) -> Reading:
    """As NVBench's own `nvbench-compare` reads two runs: they differ where their means do by more than the lesser noise, the
    relative standard deviation of the samples.
    """
    before, after = (np.asarray(times, dtype=np.float64) for times in (before_us, after_us))
    noise = min(
        float(times.std(ddof=1)) / float(times.mean()) if len(times) > 1 else math.inf for times in (before, after)
    )
    estimate = math.log(before.mean() / after.mean())
    return Reading("nvbench-compare", estimate, estimate - noise, estimate + noise, len(before) + len(after))


# ---- the three methods -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two arms of the session, where, and the seconds of the GPU that a method has for them."""

    before: str
    after: str
    l2: str
    problem: tuple[int, int, int]
    seconds: float
    seed: int


def by_rounds(session: Any, board: clock.Gpu, sample_us: float, compared: Comparison) -> list[float]:
    """The product's way, but that it ends when the seconds are over: graphs, paired rounds in random order, flagged ones left out.

    Returns the log-ratio of each round, in order.
    """
    begin = time.perf_counter()
    arms = [compared.before, compared.after]
    samples: list[protocol.Sample] = []
    with Sampler(board) as sampler:
        launches = protocol.prepare(session, arms, sample_us, 0.0, session.rotation)
        done, rounds = 0, PILOT_ROUNDS
        while rounds > 0:
            started = time.perf_counter()
            rule = protocol.Settings(0.0, rounds, rounds, sample_us, 0.0, compared.l2, compared.seed + done)
            at = (compared.after, arms, launches, rule, compared.problem)
            found, _ = protocol.run_rounds(session, *at, lambda: protocol.Condition(*sampler.read()))
            samples += [replace(sample, round=done + sample.round) for sample in found]
            now = time.perf_counter()
            left = compared.seconds - (now - begin)
            done, rounds = done + rounds, int(left / ((now - started) / rounds))
            if rounds < PILOT_ROUNDS and done > PILOT_ROUNDS:
                break  # the few that are left are not worth the pause between two parts
    times: dict[int, dict[str, float]] = {}
    for sample in samples:
        if not sample.flag:
            times.setdefault(sample.round, {})[sample.arm] = sample.time_us
    return [math.log(pair[arms[0]] / pair[arms[1]]) for pair in times.values() if len(pair) == 2]


def launcher(session: Any, arm: str) -> Callable[[], None]:
    """What launches an arm on torch's current stream, which is do_bench's own while it captures."""

    def launch() -> None:
        session.stream = session.torch.cuda.current_stream()
        session.launch(arm)

    return launch


def by_do_bench(testing: Any, session: Any, compared: Comparison) -> list[list[float]]:
    """triton's way: cold by `do_bench`, which overwrites L2 before every launch, hot by `do_bench_cudagraph`.

    Warm-up and repetitions share the seconds as by default, 1 to 4; the graph is replayed ten times. Returns ms, arm by arm.
    """
    stream, milliseconds = session.stream, 1000 * compared.seconds / 2
    times: list[list[float]] = []
    try:
        for arm in (compared.before, compared.after):
            launch = launcher(session, arm)
            if compared.l2 == "cold":
                timing = {"warmup": milliseconds / 5, "rep": milliseconds * 4 / 5}
                times.append(testing.do_bench(launch, return_mode="all", **timing))
            else:
                times.append(testing.do_bench_cudagraph(launch, rep=milliseconds / 10, return_mode="all"))
    finally:
        session.stream = stream
    return times


class NvBench:
    """NVBench's one run of a process, in a thread that measures one arm after another as they are asked for.

    NVBench registers functions, and then runs each once for every value of its axes: here an axis of numbers, of which every
    arm that is measured takes the next. With cold caches NVBench gives the time of each launch, which it brackets by a flush of
    L2 and a synchronisation; it would go on until a criterion is met, but here until its time-out. With hot ones it gives the
    mean of one batch, and that in the file that it writes at its end.
    """

    def __init__(self, bench: Any, session: Any, folder: Path, arms: int) -> None:
        self._session, self._json = session, folder / "nvbench.json"
        self._tasks: queue.Queue[Any] = queue.Queue()
        self._results: queue.Queue[Any] = queue.Queue()
        self._bench = bench
        registered = bench.register(lambda state: self._state(state))
        registered.set_name("arms")
        registered.add_int64_axis("arm", list(range(arms)))
        # One isolated launch is enough for a hot measurement; a cold one asks for more samples than it has time for.
        registered.set_stopping_criterion("sample-count")
        registered.set_criterion_param_int64("target-samples", 1)
        self._thread = threading.Thread(target=self._run, name="nvbench", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._session.torch.cuda.stream(self._session.stream):
                self._bench.run_all_benchmarks(["measuring", "--devices", "0", "--quiet", "--jsonbin", str(self._json)])
            self._results.put(RungsError("NVBench has run all the arms that it was to run."))
        except BaseException as error:
            self._results.put(error)

    def _state(self, state: Any) -> None:
        task = self._tasks.get()
        if task is None:
            state.skip("there are no more arms")
            self._tasks.put(None)  # for the next
            return
        arm, l2, seconds = task
        try:
            state.set_stream(_Stream(int(self._session.stream.cuda_stream)))
            if l2 == "cold":
                state.set_min_samples(1_000_000)
                state.set_timeout(seconds)
            else:
                state.set_min_samples(1)
                state.set_batch_target_time(seconds)
            state.exec(lambda _launch: self._session.launch(arm), batched=l2 == "hot")
            self._results.put((state.get_int64("arm"), self._samples_us()))
        except Exception as error:
            self._results.put(error)

    def _samples_us(self) -> np.ndarray:
        """The isolated launches of the state that was just measured, from the one file that NVBench wrote for it."""
        times = np.array([], dtype=np.float32)
        for path in self._json.with_name(f"{self._json.name}-bin").glob("*.bin"):
            times = np.fromfile(path, dtype="<f4")
            path.unlink()
        return times.astype(np.float64) * 1e6

    def measure(self, arm: str, l2: str, seconds: float) -> tuple[int, np.ndarray]:
        """(number of the state, us of every isolated launch) of one arm. Raises what NVBench raised."""
        self._tasks.put((arm, l2, seconds))
        found = self._results.get(timeout=120)
        if isinstance(found, BaseException):
            raise RungsError(f"NVBench: {type(found).__name__}: {found}") from found
        return found

    def finish(self) -> dict[int, float]:
        """End the run. Number of a state -> us of a launch, the mean of its batch."""
        self._tasks.put(None)
        self._thread.join(timeout=120)
        try:
            return batch_means(json.loads(self._json.read_text()))
        except (OSError, ValueError):  # not written, or not to its end
            return {}


@dataclass(frozen=True)
class _Stream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def batch_means(result: Mapping[str, Any]) -> dict[int, float]:
    """Value of the axis `arm` -> us of a launch in the batch of that state, from NVBench's JSON."""
    found = {}
    for state in result["benchmarks"][0]["states"]:
        at = int(next(axis["value"] for axis in state["axis_values"] if axis["name"] == "arm"))
        for summary in state.get("summaries") or []:
            if summary["tag"] == "nv/batch/time/gpu/mean":
                found[at] = 1e6 * float(next(entry["value"] for entry in summary["data"] if entry["name"] == "value"))
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


def row(
    compared: Comparison, method: str, reading: Reading, budget_s: float, spent_s: float, at_s: float
) -> dict[str, Any]:
    """A line of the CSV; what is a log-ratio becomes percent."""
    ends = [None if end is None else stats.percent(end) for end in (reading.low, reading.high)]
    claims = "" if reading.low is None or reading.high is None else int(reading.low > 0 or reading.high < 0)
    return {
        "method": method,
        "reading": reading.name,
        "l2": compared.l2,
        "shape": "x".join(map(str, compared.problem)),
        "before": compared.after if compared.before == TWIN else compared.before,
        "after": compared.after,
        "budget_s": budget_s,
        "spent_s": round(spent_s, 4),
        "samples": reading.samples,
        "estimate_percent": round(stats.percent(reading.estimate), 5),
        **{f"{end}_percent": value for end, value in zip(("low", "high"), ends, strict=True)},
        "claims": claims,
        "at_s": round(at_s, 2),
    }


class Run:
    """The methods that are there, on one session, and the CSV that they append to."""

    def __init__(
        self,
        session: Any,
        board: clock.Gpu,
        sample_us: float,
        output: Path,
        methods: Sequence[str],
        folder: Path,
        arms: int,
    ) -> None:
        self.session, self.board, self.output = session, board, output
        self.begin = time.monotonic()
        self.versions: dict[str, str] = {}
        self.overhead_s: dict[tuple[str, float], float] = {}
        self.sample_us = sample_us
        self._testing: Any = None
        self._nvbench: Any = None
        self._waiting: list[tuple[dict[str, Any], int, int]] = []
        self.methods = [method for method in methods if self._there(method, folder, arms)]
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)

    def _there(self, method: str, folder: Path, arms: int) -> bool:
        """Import what a method needs; where it is not there, say so."""
        try:
            if method == DO_BENCH:
                self._testing = importlib.import_module("triton.testing")
                self.versions["triton"] = getattr(importlib.import_module("triton"), "__version__", "")
            if method == NVBENCH:
                bench = importlib.import_module("cuda.bench")
                self._nvbench = NvBench(bench, self.session, folder, arms)
                self.versions["cuda-bench"] = getattr(bench, "__version__", "")
        except Exception as error:  # of an import anything may come: a library that the driver lacks, a wrong version
            package = {DO_BENCH: "triton", NVBENCH: "cuda-bench"}[method]
            print(f"{method} is left out: {error}. `pip install {package}` installs what it needs.", flush=True)
            return False
        return True

    def compare(self, method: str, compared: Comparison, budget_s: float, keep: bool = True) -> None:
        """Let a method have the budget for a comparison, and append what it says.

        What it spends beyond the seconds that it is asked to measure is taken off the next time.
        """
        if method not in self.methods:
            return
        overhead = self.overhead_s.get((method, budget_s), 0.0)
        asked = replace(compared, seconds=max(budget_s - overhead, budget_s / 20))
        at_s = time.monotonic() - self.begin
        self.session.torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            if method == OURS:
                ratios = by_rounds(self.session, self.board, self.sample_us, compared)
            elif method == DO_BENCH:
                times = by_do_bench(self._testing, self.session, asked)
            else:
                measured = [
                    self._nvbench.measure(arm, asked.l2, asked.seconds / 2) for arm in (asked.before, asked.after)
                ]
                times = [us for _, us in measured]
            self.session.torch.cuda.synchronize()
            spent = time.perf_counter() - started
            if method == OURS:
                readings = [Reading("paired median", *stats.median_interval(ratios), len(ratios))]
            elif method == DO_BENCH:
                readings = unpaired(*times)
            elif asked.l2 == "cold" and min(map(len, times)):
                readings = [*unpaired(*times), by_noise(*times)]
            else:  # hot: NVBench says it at its end. Cold without a sample: it discarded all as throttled
                readings = []
        except Exception as error:
            self.methods.remove(method)
            print(f"{method} is left out from here on: {type(error).__name__}: {error}", flush=True)
            return
        if method != OURS:
            new = spent - asked.seconds
            self.overhead_s[method, budget_s] = (overhead + new) / 2 if keep else new
        if not keep:
            return
        if method == NVBENCH and asked.l2 == "hot":
            waits = Reading("mean", math.nan, None, None, 2)
            line = row(compared, method, waits, budget_s, spent, at_s)
            self._waiting.append((line, measured[0][0], measured[1][0]))
        self._append([row(compared, method, reading, budget_s, spent, at_s) for reading in readings])

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self.output.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerows(rows)

    def finish(self) -> None:
        """End NVBench, and append what it then tells of its batches."""
        if self._nvbench is None:
            return
        us = self._nvbench.finish()
        done = [(line, us[before] / us[after]) for line, before, after in self._waiting if {before, after} <= set(us)]
        if len(done) < len(self._waiting):
            print(
                f"nvbench: {len(self._waiting) - len(done)} hot comparisons are lost, since it did not end as it should."
            )
        self._append([{**line, "estimate_percent": round(100 * (ratio - 1), 5)} for line, ratio in done])


def tasks(methods: Sequence[str], step: tuple[str, str], budgets: Sequence[float]) -> list[tuple[str, str, float]]:
    """(method, arm before, budget in s) of one repetition: A/A with every budget, the shorter more often since they cost less,
    and the step with the shortest.
    """
    shortest, longest = min(budgets), max(budgets)
    wanted = [(TWIN, budget) for budget in budgets for _ in range(round(math.sqrt(longest / budget)))]
    wanted.append((step[0], shortest))
    return [(method, before, budget) for method in methods for before, budget in wanted]


def measure(
    run: Run,
    step: tuple[str, str],
    shapes: Sequence[tuple[int, int, int]],
    policies: Sequence[str],
    budgets: Sequence[float],
    end: float,
    seed: int,
) -> None:
    """Every shape under every policy, for an equal share of the seconds until `end`, a time of the monotonic clock."""
    generator, session = random.Random(seed), run.session
    cells = [(l2, shape) for l2 in policies for shape in shapes]
    for number, (l2, shape) in enumerate(cells):
        now = time.monotonic()
        until = now + (end - now) / (len(cells) - number)
        session.set_problem(shape, "integer", seed)
        for arm in session.arms:
            outcome = session.outcome(arm)
            if outcome.unwritten or not outcome.equal:
                raise RungsError(f"{arm} is wrong at {shape} on integers whose sums are exact: nothing of it is timed.")
        between = session.set_problem(shape, "normal", seed + 1, l2)
        if l2 == "cold" and between < 2 * session.l2_bytes:
            raise RungsError(f"{between} bytes between two uses of a buffer are not 2 x L2, which cold promises.")
        warm_until = time.monotonic() + WARM_S
        while time.monotonic() < warm_until:
            session.busy()
        run.overhead_s.clear()
        for method in list(run.methods):
            for _ in range(2):  # the first loads and allocates
                run.compare(method, Comparison(TWIN, step[1], l2, shape, min(budgets), seed), min(budgets), keep=False)
            run.overhead_s |= {(method, budget): run.overhead_s.get((method, min(budgets)), 0.0) for budget in budgets}
        repetitions = 0
        while time.monotonic() < until and run.methods:
            wanted = tasks(run.methods, step, budgets)
            generator.shuffle(wanted)
            for method, before, budget in wanted:
                if time.monotonic() + budget > until:
                    continue
                run.compare(
                    method, Comparison(before, step[1], l2, shape, budget, generator.randrange(1 << 30)), budget
                )
            repetitions += 1
            if time.monotonic() + min(budgets) > until:
                break
        print(
            f"{l2} {'x'.join(map(str, shape))}: {repetitions} repetitions, {time.monotonic() - run.begin:.0f} s",
            flush=True,
        )


def run_verb(a: argparse.Namespace) -> None:
    begin = time.monotonic()
    board = clock.choose(a.device)
    if board is None or board.arch is None:
        sys.exit("measuring: there is no GPU here that rungs knows: run it on one that config/devices/ describes.")
    from rungs import gpu

    experiment, device = load_experiment(a.experiment), load_device(board.arch)
    shapes = [(int(m), int(n), int(k)) for m, n, k in (shape.split("x") for shape in a.shapes)]
    step = (a.step[0], a.step[1])
    states = 2 * int(a.seconds / min(a.budgets) + 100)
    with tempfile.TemporaryDirectory(prefix="rungs-measuring-") as name, clock.exclusive(board.uuid):
        folder = Path(name)
        toolchain = build.find_toolchain(a.toolchain)
        session = gpu.open_session(experiment, board.uuid)
        made: dict[str, Path] = {}
        ids: dict[str, str] = {}
        rungs = [rung for rung in dict.fromkeys(step) if rung != gpu.CONTROL]
        for binary in (build.STAMP, *(experiment.variant(rung).name for rung in rungs)):
            manifest = folder / binary / f"{binary}.json"
            built = build.build(binary, board.arch, manifest, toolchain)
            if built["status"] != "ok":
                sys.exit(f"measuring: {binary}: {built['status']}: {built['reason']}")
            made[binary], ids[binary] = manifest.with_suffix(".cubin"), built["build_id"]
        session.load_stamp(made[build.STAMP])
        for arm, rung in [*zip(rungs, rungs, strict=True), (TWIN, step[1])]:
            variant = experiment.variant(rung)
            for shape in shapes:
                plan.check_problem(experiment, variant, shape)
            session.load(arm, experiment, variant, device, made[variant.name])
        gc.collect()
        gc.freeze()  # torch collects before it captures a graph: not all that was imported, over and over
        measured = settings.check_measure(schemas.read_yaml(ROOT / "config" / "config.yaml", "config")["measure"])
        run = Run(session, board, float(measured["sample_us"]), a.output, a.methods, folder, states)
        print(f"{', '.join(run.methods)} on {board.name} after {time.monotonic() - begin:.0f} s", flush=True)
        described = {
            "gpu": board.as_json(),
            "session": {key: str(value) for key, value in session.describe().items()},
            "versions": run.versions,
            "builds": ids,
            "options": {key: str(value) for key, value in vars(a).items() if key not in ("act", "output")},
            "measured_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        a.output.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n")
        with clock.ending_signals():  # as an exception, so that NVBench still says what it has
            try:
                measure(run, step, shapes, a.l2, a.budgets, begin + a.seconds, a.seed)
            finally:
                run.finish()
    print(f"{time.monotonic() - begin:.0f} s in all\n", flush=True)
    print_summary(read(a.output), None)


# ---- the summary -----------------------------------------------------------------------------------------------------


def read(path: Path) -> pd.DataFrame:
    """A CSV of `run`."""
    frame = pd.read_csv(path)
    if list(frame.columns) != COLUMNS:
        raise RungsError(f"{path} is no CSV of `measuring.py run`, which has the columns {', '.join(COLUMNS)}.")
    return frame.dropna(subset=["estimate_percent"])  # a comparison of which no round could be used


def beyond_floor(rows: pd.DataFrame) -> tuple[int, int]:
    """(claims, comparisons) of A/A comparisons of one kind, in order, where a claim must clear the floor too.

    The floor of one is the largest estimate of the `FLOOR_OF` before it, as the pipeline's is that of its floor jobs.
    """
    estimates = rows["estimate_percent"].abs().to_numpy()
    found = [
        stats.verdict(low, high, float(estimates[at - FLOOR_OF : at].max())) in ("faster", "slower")
        for at, (low, high) in enumerate(zip(rows["low_percent"], rows["high_percent"], strict=True))
        if at >= FLOOR_OF and not math.isnan(low)
    ]
    return sum(found), len(found)


def share_interval(found: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count`, in percent (Clopper and Pearson, Biometrika 26, 1934)."""
    low = betaincinv(found, count - found + 1, 0.025) if found else 0.0
    high = betaincinv(found + 1, count - found, 0.975) if found < count else 1.0
    return 100 * float(low), 100 * float(high)


def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """Per method, reading, policy, shape and budget what its A/A comparisons say.

    `resolution_percent` is the 95th percentile of the differences that are reported between a binary and itself, with its
    standard error, `middle_percent` their median; `mean_percent` the mean of them with their signs, which is what the one arm
    has over the other every time, with its standard error; `half_percent` the median half width of the intervals.
    """
    found = []
    for key, rows in frame[frame["before"] == frame["after"]].groupby(KEY, sort=False):
        resolution, error = quantile_with_error(rows["estimate_percent"].abs().tolist(), 0.95)
        claimed = rows["claims"].dropna()
        beyond, of = beyond_floor(rows)
        found.append(
            {
                **dict(zip(KEY, key, strict=True)),
                "comparisons": len(rows),
                "spent_s": rows["spent_s"].median(),
                "claims": int(claimed.sum()) if len(claimed) else None,
                "claims_beyond_floor": beyond if of else None,
                "with_floor": of,
                "resolution_percent": resolution,
                "resolution_error": error,
                "middle_percent": rows["estimate_percent"].abs().median(),
                "mean_percent": rows["estimate_percent"].mean(),
                "mean_error": rows["estimate_percent"].sem(),
                "half_percent": ((rows["high_percent"] - rows["low_percent"]) / 2).median(),
            }
        )
    return pd.DataFrame(found)


def seconds_for(resolution: float, curve: Sequence[tuple[float, float]]) -> tuple[str, float]:
    """Seconds at which a curve of (seconds, resolution) comes down to a resolution, by interpolation of the logarithms.

    `<` where it is there with its fewest seconds, `>` where it is not with its most.
    """
    least = 1e-6  # a clock with steps may show no difference at all
    resolution, points = max(resolution, least), sorted((seconds, max(fine, least)) for seconds, fine in curve)
    if points[0][1] <= resolution:
        return "<", points[0][0]
    for (begin, coarse), (end, fine) in itertools.pairwise(points):
        if fine <= resolution:
            share = math.log(coarse / resolution) / math.log(coarse / fine)
            return "=", begin * (end / begin) ** share
    return ">", points[-1][0]


def against_ours(table: pd.DataFrame) -> pd.DataFrame:
    """Per policy, shape and other method: the seconds it needs for the resolution that ours has with the fewest, by whichever
    reading is better for it, and what that is to ours' seconds.
    """
    found = []
    for (l2, shape), here in table.groupby(["l2", "shape"], sort=False):
        ours = here[here["method"] == OURS].sort_values("budget_s").head(1)
        if ours.empty:
            continue
        seconds, resolution = float(ours["spent_s"].iloc[0]), float(ours["resolution_percent"].iloc[0])
        for method, rows in here[here["method"] != OURS].groupby("method", sort=False):
            curves = {
                reading: of[["spent_s", "resolution_percent"]] for reading, of in rows.groupby("reading", sort=False)
            }
            needs = {reading: seconds_for(resolution, curve.to_numpy().tolist()) for reading, curve in curves.items()}
            # One that comes down to it before one that does not, then the one with fewer seconds, then the finer one.
            reading = min(
                needs, key=lambda of: (needs[of][0] == ">", needs[of][1], curves[of]["resolution_percent"].min())
            )
            relation, needed = needs[reading]
            ratio = needed / seconds
            goal = {"=": ("missed", "met"), "<": ("missed", "open"), ">": ("open", "met")}[relation][ratio >= GOAL]
            found.append(
                {
                    "l2": l2,
                    "shape": shape,
                    "method": method,
                    "reading": reading,
                    "resolution_percent": resolution,
                    "ours_s": seconds,
                    "relation": relation,
                    "needs_s": needed,
                    "ratio": ratio,
                    "goal": goal,
                }
            )
    return pd.DataFrame(found)


def at_recorded_floors(frame: pd.DataFrame, floors: Mapping[str, Path]) -> pd.DataFrame:
    """Per policy, shape, method and reading: A/A comparisons that the pipeline would claim, with the floor of its recorded set.

    `floors`: the recorded `steps.csv` of a policy, each of whose shapes has one floor.
    """
    found = []
    own = frame[(frame["before"] == frame["after"]) & frame["low_percent"].notna()]
    for (l2, shape, method, reading), rows in own.groupby(["l2", "shape", "method", "reading"]):
        if l2 not in floors:
            continue
        steps = pd.read_csv(floors[l2])
        at = steps[["m", "n", "k"]].astype(str).agg("x".join, axis=1) == shape
        if not at.any():
            continue
        floor = float(steps.loc[at, "floor_percent"].max())
        verdicts = [stats.verdict(*ends, floor) for ends in zip(rows["low_percent"], rows["high_percent"], strict=True)]
        found.append(
            {
                "l2": l2,
                "shape": shape,
                "floor_percent": floor,
                "method": method,
                "reading": reading,
                "comparisons": len(rows),
                "claims": int(rows["claims"].sum()),
                "claims_beyond_floor": sum(verdict in ("faster", "slower") for verdict in verdicts),
            }
        )
    return pd.DataFrame(found)


def in_all(table: pd.DataFrame) -> pd.DataFrame:
    """Per policy, method and reading: the claims of all its A/A comparisons."""
    sums = {name: (name, "sum") for name in ("comparisons", "claims", "claims_beyond_floor", "with_floor")}
    claiming = table.dropna(subset=["claims"])
    return claiming.groupby(["l2", "method", "reading"], sort=False).agg(**sums).reset_index()


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Per method, reading, policy and shape what its comparisons say of the step."""
    found = []
    for key, rows in frame[frame["before"] != frame["after"]].groupby(KEY, sort=False):
        middle = rows["estimate_percent"].median()
        found.append(
            {
                **dict(zip(KEY, key, strict=True)),
                "comparisons": len(rows),
                "median_percent": middle,
                "spread_percent": quantile_with_error((rows["estimate_percent"] - middle).abs().tolist(), 0.95)[0],
                "claims": rows["claims"].dropna().sum() if rows["claims"].notna().any() else None,
            }
        )
    return pd.DataFrame(found)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(line)} |")
    print()


def of_share(found: Any, count: int) -> str:
    if found is None or pd.isna(found) or not count:
        return "no interval"
    low, high = share_interval(int(found), count)
    return f"{100 * found / count:.1f} % ({low:.1f} to {high:.1f})"


def print_summary(frame: pd.DataFrame, output: Path | None, floors: Mapping[str, Path] | None = None) -> None:
    """The tables in Markdown; the second, which has every figure that the others are made of, into a CSV too."""
    table = cells(frame)
    if table.empty:
        print("There is no A/A comparison yet.")
        return
    if output:
        table.round(5).to_csv(output, index=False)
    print("A binary against itself: comparisons that claim a difference, with the 95 % interval of that share.\n")
    print_table(
        ["L2", "method", "reading", "comparisons", "claim a difference", "the same beyond a floor"],
        [
            [
                row["l2"],
                row["method"],
                row["reading"],
                str(row["comparisons"]),
                of_share(row["claims"], row["comparisons"]),
                of_share(row["claims_beyond_floor"], row["with_floor"]),
            ]
            for row in in_all(table).to_dict("records")
        ],
    )
    print("Resolution: the 95th percentile of the differences reported between a binary and itself.\n")
    heads = ["L2", "M, N, K", "method", "reading", "seconds", "comparisons", "resolves, %", "half within, ±%"]
    heads += ["interval, ±%", "mean, %"]
    ordered = table.sort_values(["l2", "shape", "method", "reading", "budget_s"], kind="stable")
    print_table(
        heads,
        [
            [
                row["l2"],
                row["shape"],
                row["method"],
                row["reading"],
                f"{row['spent_s']:.2f}",
                str(row["comparisons"]),
                f"{row['resolution_percent']:.3f} ±{row['resolution_error']:.3f}",
                f"{row['middle_percent']:.3f}",
                "none" if pd.isna(row["half_percent"]) else f"{row['half_percent']:.3f}",
                f"{row['mean_percent']:+.3f} ±{row['mean_error']:.3f}",
            ]
            for row in ordered.to_dict("records")
        ],
    )
    beyond = at_recorded_floors(frame, floors or {})
    if not beyond.empty:
        print("A binary against itself, as the pipeline judges: beyond the floor of its recorded set at that shape.\n")
        print_table(
            [
                "L2",
                "M, N, K",
                "floor, %",
                "method",
                "reading",
                "comparisons",
                "claim by the interval",
                "beyond the floor",
            ],
            [
                [
                    row["l2"],
                    row["shape"],
                    f"{row['floor_percent']:.2f}",
                    row["method"],
                    row["reading"],
                    *(str(row[name]) for name in ("comparisons", "claims", "claims_beyond_floor")),
                ]
                for row in beyond.to_dict("records")
            ],
        )
    goal = against_ours(table)
    if not goal.empty:
        print(f"Seconds for the resolution of rungs with its fewest. The goal: {GOAL:g} times as many or more.\n")
        sign = {"<": "at most ", "=": "", ">": "more than "}
        print_table(
            ["L2", "M, N, K", "resolution, %", "rungs, s", "method", "reading", "needs, s", "times", "goal"],
            [
                [
                    row["l2"],
                    row["shape"],
                    f"{row['resolution_percent']:.3f}",
                    f"{row['ours_s']:.2f}",
                    row["method"],
                    row["reading"],
                    f"{sign[row['relation']]}{row['needs_s']:.2f}",
                    f"{sign[row['relation']]}{row['ratio']:.1f}",
                    row["goal"],
                ]
                for row in goal.to_dict("records")
            ],
        )
        print(f"Goal met in {(goal['goal'] == 'met').sum()} of {len(goal)} places.\n")
    known = steps(frame)
    if not known.empty:
        print("A step: the median of what is reported, and within how much of it 95 % of the comparisons lie.\n")
        print_table(
            [
                "L2",
                "M, N, K",
                "step",
                "method",
                "reading",
                "comparisons",
                "gain, %",
                "within, ±%",
                "claim a difference",
            ],
            [
                [
                    row["l2"],
                    row["shape"],
                    f"{row['before']}>{row['after']}",
                    row["method"],
                    row["reading"],
                    str(row["comparisons"]),
                    f"{row['median_percent']:+.2f}",
                    f"{row['spread_percent']:.2f}",
                    of_share(row["claims"], row["comparisons"]),
                ]
                for row in known.to_dict("records")
            ],
        )


def floors_of(text: str) -> tuple[str, Path]:
    policy, _, path = text.partition("=")
    if policy not in POLICIES or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not hot=FILE or cold=FILE with a recorded steps.csv")
    return policy, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measuring = verbs.add_parser("run", help="compare on a GPU")
    measuring.add_argument("output", type=Path, help="the CSV; beside it what it was measured on, as JSON")
    measuring.add_argument("--seconds", type=float, default=200.0, help="in all, Python's start aside")
    measuring.add_argument("--budgets", nargs="+", type=float, default=[0.1, 0.3], help="seconds of a comparison")
    measuring.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    measuring.add_argument("--l2", nargs="+", choices=POLICIES, default=list(POLICIES))
    measuring.add_argument(
        "--shapes", nargs="+", default=["512x512x512", "4096x4096x1024", "4096x4096x4096"], metavar="MxNxK"
    )
    measuring.add_argument("--experiment", default="gemm")
    measuring.add_argument(
        "--step", nargs=2, default=["B5", "B6"], metavar="RUNG", help="the second is compared with itself too"
    )
    measuring.add_argument("--device", default="auto")
    measuring.add_argument("--toolchain", choices=("pip", "system"), default="pip")
    measuring.add_argument("--seed", type=int, default=1)
    measuring.set_defaults(act=run_verb)
    summary = verbs.add_parser("summary", help="print the tables of a CSV")
    summary.add_argument("input", type=Path)
    summary.add_argument("--output", type=Path, help="a CSV for the figures of every method, shape and budget")
    summary.add_argument(
        "--floors", nargs="+", type=floors_of, default=[], metavar="POLICY=STEPS_CSV", help="of a recorded set"
    )
    summary.set_defaults(act=lambda a: print_summary(read(a.input), a.output, dict(a.floors)))
    a = parser.parse_args()
    try:
        a.act(a)
        sys.stdout.flush()
    except RungsError as error:
        sys.exit(f"measuring: {error}")
    except (
        BrokenPipeError
    ):  # `| head` has read enough: what is still to be written goes nowhere, for Python flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
