"""`benchmarks/measuring.py`: its statistics on rows whose answer is known, its run on the stand-ins, and what it asks of the tools."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from rungs.results import ResultsSet
from scripts import benchmark

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "measuring.py"

measuring = benchmark("measuring")


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_the_error_of_a_median_is_the_bootstrap_s():
    data = np.random.default_rng(1).exponential(size=41)
    resampled = np.median(np.random.default_rng(2).choice(data, (20_000, data.size)), axis=1)
    _, error = measuring.quantile_with_error(data, 0.5)
    assert error == pytest.approx(resampled.std(), rel=0.03)


def test_the_resolution_is_the_95th_percentile():
    values = np.abs(np.random.default_rng(1).normal(size=20_000))
    assert measuring.quantile_with_error(values, 0.95)[0] == pytest.approx(1.96, rel=0.03)
    assert measuring.quantile_with_error([0.3] * 7, 0.95) == pytest.approx((0.3, 0.0), abs=1e-9)


@pytest.mark.parametrize("reading", ["mean", "median"])
def test_unpaired_readings_hold_the_truth(reading):
    """Of 400 pairs of runs with a step of 2 %, about 380 intervals hold it."""
    generator, held = np.random.default_rng(3), 0
    for _ in range(400):
        before, after = 102 + generator.normal(size=60), 100 + generator.normal(size=60)
        found = next(each for each in measuring.unpaired(before, after) if each.name == reading)
        held += found.low <= np.log(1.02) <= found.high
    assert 365 <= held <= 395


def test_nvbench_compare_calls_alike_what_differs_by_less_than_the_noise():
    noisy, still = [90.0, 110.0] * 5, [101.0, 99.0] * 5
    alike, apart = measuring.by_noise(noisy, still), measuring.by_noise([103.0, 105.0] * 5, still)
    assert alike.low < 0 < alike.high
    assert apart.low > 0


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(1.0, 0.4), (4.0, 0.2)], ("=", 4.0)),
        ([(0.25, 0.8), (1.0, 0.4), (4.0, 0.1)], ("=", 2.0)),
        ([(1.0, 0.1), (4.0, 0.05)], ("<", 1.0)),
        ([(4.0, 0.3), (1.0, 0.6)], (">", 4.0)),
        ([(1.0, 0.5), (2.0, 0.0)], ("=", pytest.approx(1.05, abs=0.01))),  # a clock with steps shows none at all
    ],
)
def test_seconds_for_a_resolution(curve, expected):
    relation, seconds = measuring.seconds_for(0.2, curve)
    assert (relation, seconds) == (expected[0], pytest.approx(expected[1]))


def rows(method, reading, budget, estimates, half, before="B6", l2="hot"):
    return [
        {
            "method": method,
            "reading": reading,
            "l2": l2,
            "shape": "512x512x512",
            "before": before,
            "after": "B6",
            "budget_s": budget,
            "spent_s": budget,
            "samples": 10,
            "estimate_percent": estimate,
            "low_percent": None if half is None else estimate - half,
            "high_percent": None if half is None else estimate + half,
            "claims": None if half is None else int(abs(estimate) > half),
            "at_s": 0.0,
        }
        for estimate in estimates
    ]


def constructed():
    """rungs resolves 0.1 % in 0.1 s, do_bench 0.4 % in 0.1 s and 0.1 % in 0.4 s, NVBench 1 % at best and without intervals."""
    return pd.DataFrame(
        [
            *rows("rungs", "paired median", 0.1, [0.1, -0.1] * 10, 0.2),
            *rows("do_bench", "mean", 0.1, [0.4, -0.4] * 10, 0.3),
            *rows("do_bench", "mean", 0.4, [0.1, -0.1] * 10, 0.05),
            *rows("do_bench", "median", 0.4, [0.5, -0.5] * 10, 0.6),
            *rows("nvbench", "mean", 0.15, [1.0, -1.0] * 10, None),
            *rows("rungs", "paired median", 0.1, [3.0, 3.2, 3.1], 0.2, before="B5"),
        ],
        columns=measuring.COLUMNS,
    )


def test_claims_of_a_binary_against_itself():
    frame = constructed()
    all_of = measuring.in_all(measuring.cells(frame)).set_index(["method", "reading"])
    assert "nvbench" not in all_of.index.get_level_values("method")
    assert all_of.loc[("rungs", "paired median"), "claims"] == 0
    assert tuple(all_of.loc[("do_bench", "mean"), ["comparisons", "claims"]]) == (40, 40)
    # Its estimates are as large as the floor, which no interval about them clears.
    assert tuple(all_of.loc[("do_bench", "mean"), ["with_floor", "claims_beyond_floor"]]) == (34, 0)
    low, high = measuring.share_interval(0, 20)
    assert (low, high) == (0, pytest.approx(16.84, abs=0.01))


def test_a_claim_that_clears_the_floor_counts():
    frame = pd.DataFrame(rows("do_bench", "mean", 0.1, [0.1, -0.1, 0.1, 0.5, 0.1], 0.05))
    assert measuring.beyond_floor(frame) == (1, 2)


def test_seconds_against_ours():
    goal = measuring.against_ours(measuring.cells(constructed())).set_index("method")
    bench, other = goal.loc["do_bench"], goal.loc["nvbench"]
    assert (bench["reading"], bench["relation"], bench["goal"]) == ("mean", "=", "met")
    assert bench["ratio"] == pytest.approx(4.0)
    assert (other["relation"], other["goal"]) == (">", "open")
    assert other["ratio"] == pytest.approx(1.5)


def test_the_step_is_summed_up_beside_it():
    (step,) = measuring.steps(constructed()).to_dict("records")
    assert (step["before"], step["comparisons"], step["median_percent"], step["claims"]) == ("B5", 3, 3.1, 3)


def test_the_summary_is_printed_from_a_csv_without_a_gpu(tmp_path, capsys, monkeypatch):
    constructed().to_csv(tmp_path / "raw.csv", index=False)
    monkeypatch.setattr(
        sys, "argv", ["measuring", "summary", str(tmp_path / "raw.csv"), "--output", str(tmp_path / "s.csv")]
    )
    measuring.main()
    text = capsys.readouterr().out
    assert "| hot | 512x512x512 | 0.100 | 0.10 | do_bench | mean | 0.40 | 4.0 | met |" in text
    assert "| more than 0.15 | more than 1.5 | open |" in text
    assert "Goal met in 1 of 2 places." in text
    assert len(pd.read_csv(tmp_path / "s.csv")) == 5


def test_a_reader_that_has_enough_ends_the_summary_quietly(tmp_path):
    constructed().to_csv(tmp_path / "raw.csv.gz", index=False)
    command = [sys.executable, str(SCRIPT), "summary", str(tmp_path / "raw.csv.gz")]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        ran = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_claims_beyond_a_recorded_floor(tmp_path):
    """The interval of 0.5 is beyond a floor of 0.2, those of 0.1 are not, and a shape that the set lacks has no row."""
    (tmp_path / "steps.csv").write_text("m,n,k,floor_percent\n512,512,512,0.2\n")
    frame = pd.DataFrame(rows("rungs", "paired median", 0.1, [0.1, -0.1, 0.5, -0.5], 0.05))
    beyond = measuring.at_recorded_floors(
        pd.concat([frame, frame.assign(shape="1x1x1")]), {"hot": tmp_path / "steps.csv"}
    )
    (row,) = beyond.to_dict("records")
    assert (row["floor_percent"], row["comparisons"], row["claims"], row["claims_beyond_floor"]) == (0.2, 4, 4, 2)


# ---- the run that is committed ---------------------------------------------------------------------------------------

RAW = ROOT / "benchmarks" / "results" / "measuring_h200.csv.gz"
SETS = {"hot": ROOT / "results" / "recorded" / "h200", "cold": ROOT / "results" / "recorded" / "h200-cold"}
STEPS = {l2: path / "data" / "gemm" / "steps.csv" for l2, path in SETS.items()}


@pytest.fixture(scope="module")
def raw():
    return measuring.read(RAW)


def test_the_committed_tables_are_the_summary_of_the_committed_run(raw, capsys):
    measuring.print_summary(raw, None, STEPS)
    page = (ROOT / "benchmarks" / "README.md").read_text()
    shown = page.split("<!-- measuring:h200 begin -->\n")[1].split("<!-- measuring:h200 end -->")[0]
    assert shown.strip() == capsys.readouterr().out.strip()


def test_the_readme_s_table_is_of_the_committed_run(raw):
    table = measuring.cells(raw)
    goal = measuring.against_ours(table)
    lines = (ROOT / "README.md").read_text().splitlines()
    for l2, shape in itertools.product(("hot", "cold"), ("512x512x512", "4096x4096x4096")):
        here = table[(table["l2"] == l2) & (table["shape"] == shape)]
        finest = here[here["budget_s"] == 0.1].groupby("method")["resolution_percent"].min()
        met = (goal[(goal["l2"] == l2) & (goal["shape"] == shape)]["goal"] == "met").all()
        figures = [f"{finest[method]:.2f} %" for method in measuring.METHODS]
        assert f"| {' | '.join([l2, shape, *figures, 'met' if met else 'missed'])} |" in lines
    beyond = measuring.at_recorded_floors(raw, STEPS).query("method == 'rungs'").set_index(["l2", "shape"])
    assert tuple(beyond.loc[("hot", "512x512x512"), ["claims", "comparisons"]]) == (56, 77)
    assert tuple(beyond[["claims", "comparisons", "claims_beyond_floor"]].sum()) == (7 + 56, 236 + 77, 0)


def test_what_benchmarks_says_beside_its_tables(raw):
    """The figures of its sentences that stand in no table."""
    assert len(pd.read_csv(RAW)) == 2084
    hot = raw[(raw["l2"] == "hot") & (raw["shape"] == "512x512x512")].sort_values("at_s")
    own = hot[(hot["method"] == "rungs") & (hot["before"] == "B6")]["estimate_percent"]
    assert ((own > 0).sum(), len(own), 1 + (np.sign(own).diff().iloc[1:] != 0).sum()) == (40, 77, 44)
    assert (round(own.mean(), 3), round(own.sem(), 3)) == (-0.001, 0.031)
    assert (round(own.std(), 2), round(own.abs().max(), 2)) == (0.27, 0.69)
    other = hot[(hot["method"] == "do_bench") & (hot["reading"] == "median")]
    assert (other[other["before"] == "B6"]["estimate_percent"].abs() > 1).sum() == 2

    def ends(frame):
        return tuple(frame["estimate_percent"].agg(["min", "max"]).round(1))

    ours = raw[(raw["method"] == "rungs") & (raw["before"] == "B5")]
    assert ends(ours[(ours["l2"] == "hot") & (ours["shape"] == "512x512x512")]) == (1.9, 3.6)
    assert ends(ours[(ours["l2"] == "hot") & (ours["shape"] == "4096x4096x4096")]) == (2.5, 7.6)
    assert ends(other[other["before"] == "B5"]) == (1.3, 3.8)
    half = ((ours["high_percent"] - ours["low_percent"]) / 2).groupby([ours["l2"], ours["shape"]]).median()
    assert (round(half.min(), 2), round(half.max(), 1)) == (0.07, 0.4)


def test_a_fixed_cost_of_a_launch_makes_the_cold_step_that_the_tools_see(raw):
    recorded = ResultsSet(SETS["cold"]).job("sweep", "gemm", "abl_L2_R1_bl1_s3_sw1").frame("sweep")
    at = recorded[(recorded["m"] == 512) & (recorded["k"] == 512) & (recorded["status"] == "ok")]
    us = at.groupby("arm")["time_us"].median()
    before, after = us["abl_L2_R1_bl1_s2_sw1"], us["abl_L2_R1_bl1_s3_sw1"]
    assert (round(before, 2), round(after, 2)) == (13.15, 10.17)
    theirs = measuring.steps(raw[(raw["l2"] == "cold") & (raw["shape"] == "512x512x512") & (raw["method"] != "rungs")])
    costs = [(before - (1 + gain / 100) * after) / (gain / 100) for gain in theirs["median_percent"]]
    assert (round(min(costs), 1), round(max(costs), 1)) == (3.4, 4.0)


def test_no_recorded_floor_job_claims_by_its_interval():
    variant, found = "abl_L1_R1_bl1_s2_sw1", []
    for job in "123":
        samples = ResultsSet(SETS["hot"]).job("floor", "gemm", job).frame("sweep").query("status == 'ok'")
        for _, here in samples.groupby(["m", "n", "k"]):
            us = here.pivot(index="round", columns="arm", values="time_us")[[variant, "twin"]].dropna()
            found.append(measuring.stats.median_interval(np.log(us[variant] / us["twin"]).tolist()))
    assert len(found) == 30 and all(low <= 0 <= high for _, low, high in found)


def test_another_csv_is_refused(tmp_path, monkeypatch):
    (tmp_path / "raw.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["measuring", "summary", str(tmp_path / "raw.csv")])
    with pytest.raises(SystemExit, match="is no CSV of"):
        measuring.main()


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_a_run_on_the_stand_ins(tmp_path):
    """Ours is timed under both policies; the tools that are not there are a sentence each."""
    gpus = {"gpus": [{"name": "NVIDIA H200", "uuid": "GPU-11111111-2222-3333-4444-555555555555"}], "log": ""}
    (tmp_path / "nvml.json").write_text(json.dumps(gpus))
    (tmp_path / "gpu.json").write_text(json.dumps({"log": ""}))
    named = {"RUNGS_STANDIN_NVML": tmp_path / "nvml.json", "RUNGS_STANDIN_GPU": tmp_path / "gpu.json"}
    for name in ("triton.py", "cuda/bench.py"):  # where they are installed they are not to be found
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise ImportError('there is no {name} here')\n")
    found = [tmp_path, ROOT / "tests" / "standin", ROOT / "workflow"]
    environment = {**os.environ, **{k: str(v) for k, v in named.items()}, "PYTHONPATH": ":".join(map(str, found))}
    command = [sys.executable, str(SCRIPT), "run", str(tmp_path / "out" / "raw.csv"), "--shapes", "512x512x512"]
    # Most of it is for the start and the builds where other tests run beside it; the stand-in's time costs none.
    command += ["--seconds", "10", "--budgets", "0.04", "0.08"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "do_bench is left out: there is no triton.py here. `pip install triton`" in ran.stdout
    assert "nvbench is left out: there is no cuda/bench.py here. `pip install cuda-bench`" in ran.stdout
    frame = measuring.read(tmp_path / "out" / "raw.csv")
    assert set(frame["l2"]) == {"hot", "cold"} and set(frame["method"]) == {"rungs"}
    assert (frame["samples"] >= measuring.PILOT_ROUNDS).all()
    step = frame[frame["before"] == "B5"]
    assert (step["claims"] == 1).all() and (step["estimate_percent"] > 0).all()
    assert (frame[frame["before"] == "B6"]["estimate_percent"].abs() < 0.5).all()
    described = json.loads((tmp_path / "out" / "raw.json").read_text())
    assert described["gpu"]["name"] == "NVIDIA H200" and described["versions"] == {}
    assert len(described["builds"]) == 3 and "output" not in described["options"]


class Torch:
    """As much of torch as the methods touch: streams, of which one is current."""

    def __init__(self):
        self.current = SimpleNamespace(cuda_stream=1)
        self.cuda = SimpleNamespace(
            synchronize=lambda: None, current_stream=lambda: self.current, stream=lambda stream: self
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Launched:
    """A session that notes what is launched on which stream."""

    def __init__(self):
        self.torch, self.stream, self.log = Torch(), SimpleNamespace(cuda_stream=1), []

    def launch(self, arm):
        self.log.append((arm, self.stream.cuda_stream))


def run_of(tmp_path, session, method):
    run = measuring.Run(session, None, 200.0, tmp_path / "raw.csv", [method], tmp_path, 6)
    assert run.methods == [method]
    return run


def compared(l2):
    return measuring.Comparison("twin", "B6", l2, (512, 512, 512), 0.1, 1)


def test_do_bench_launches_on_its_own_stream_and_shares_the_seconds(tmp_path, monkeypatch):
    session, asked = Launched(), []

    def cold(launch, warmup, rep, return_mode):
        asked.append((warmup, rep))
        launch()
        return [1.0, 1.1, 1.0, 1.1, 1.0]

    def hot(launch, rep, return_mode):
        asked.append(rep)
        session.torch.current = SimpleNamespace(cuda_stream=7)
        launch()
        return [1.0] * 10

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3"))
    monkeypatch.setitem(sys.modules, "triton.testing", SimpleNamespace(do_bench=cold, do_bench_cudagraph=hot))
    run = run_of(tmp_path, session, "do_bench")
    run.compare("do_bench", compared("cold"), 0.1)
    assert asked == [(10.0, 40.0)] * 2
    run.overhead_s.clear()
    run.compare("do_bench", compared("hot"), 0.1)
    assert asked[2:] == [5.0, 5.0]
    assert session.log == [("twin", 1), ("B6", 1), ("twin", 7), ("B6", 7)] and session.stream.cuda_stream == 1
    frame = measuring.read(tmp_path / "raw.csv")
    assert list(frame["reading"]) == ["mean", "median"] * 2 and list(frame["before"]) == ["B6"] * 4
    assert not frame["estimate_percent"].any() and not frame["claims"].any()


class Bench:
    """As much of cuda.bench 0.3 as is used. A cold launch takes 2 us, the mean of a batch 4 us for every odd state."""

    __version__ = "0.3.0"

    def register(self, function):
        self.function, self.asked = function, []
        named = ("set_name", "set_stopping_criterion", "set_criterion_param_int64")
        return SimpleNamespace(add_int64_axis=self._axis, **{name: lambda *_: None for name in named})

    def _axis(self, name, values):
        self.name, self.values = name, values

    def run_all_benchmarks(self, argv):
        path, states = Path(argv[argv.index("--jsonbin") + 1]), []
        for value in self.values:
            state = State(self, value, path.with_name(f"{path.name}-bin"))
            self.function(state)
            axes = [{"name": self.name, "type": "int64", "value": str(value)}]
            states.append({"axis_values": axes, "summaries": state.summaries})
        path.write_text(json.dumps({"benchmarks": [{"name": "arms", "states": states}]}))


class State:
    def __init__(self, bench, value, folder):
        self.bench, self.value, self.folder, self.summaries, self.set = bench, value, folder, None, {}

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: self.set.update({name: value})

    def get_int64(self, name):
        return self.value

    def skip(self, reason):
        assert reason

    def exec(self, launch, /, *, batched):
        assert self.set.pop("set_stream").__cuda_stream__() == (0, 1)
        self.bench.asked.append(self.set)
        launch(None)
        self.folder.mkdir(exist_ok=True)
        np.full(1 if batched else 8, 2e-6, dtype="<f4").tofile(self.folder / f"{self.value}.bin")
        if batched:
            data = [{"name": "value", "type": "float64", "value": str((4 + self.value % 2) * 1e-6)}]
            self.summaries = [{"tag": "nv/batch/time/gpu/mean", "data": data}]


def test_nvbench_measures_arm_after_arm_and_tells_of_its_batches_at_the_end(tmp_path, monkeypatch):
    session, bench = Launched(), Bench()
    monkeypatch.setitem(sys.modules, "cuda.bench", bench)
    run = run_of(tmp_path, session, "nvbench")
    run.compare("nvbench", compared("cold"), 0.1)
    run.overhead_s.clear()
    run.compare("nvbench", compared("hot"), 0.1)
    assert list(measuring.read(tmp_path / "raw.csv")["reading"]) == ["mean", "median", "nvbench-compare"]
    run.finish()
    assert bench.asked[0] == {"set_min_samples": 1_000_000, "set_timeout": 0.05}
    assert bench.asked[2] == {"set_min_samples": 1, "set_batch_target_time": 0.05}
    assert [arm for arm, _ in session.log] == ["twin", "B6"] * 2
    batch = measuring.read(tmp_path / "raw.csv").iloc[-1]
    assert (batch["l2"], batch["estimate_percent"]) == ("hot", -20.0) and pd.isna(batch["claims"])


def test_nvbench_that_fails_is_left_out_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    session, bench = Launched(), Bench()
    monkeypatch.setattr(session, "launch", lambda arm: 1 / 0)
    monkeypatch.setitem(sys.modules, "cuda.bench", bench)
    run = run_of(tmp_path, session, "nvbench")
    run.compare("nvbench", compared("cold"), 0.1)
    assert run.methods == []
    assert "nvbench is left out from here on: RungsError: NVBench: ZeroDivisionError" in capsys.readouterr().out
    run.finish()
