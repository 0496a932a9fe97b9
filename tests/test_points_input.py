"""Experiments that are no GEMM, attacked: odd files, odd points, odd manifests and odd sets are one sentence, and lose nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

import binaries
from rungs import (
    advise,
    aggregate,
    answers,
    cli,
    measure,
    pages,
    protocol,
    schemas,
    settings,
    variants,
    workloads,
)
from rungs.emulator import verb
from rungs.errors import Refused, RungsError
from rungs.files import ROOT
from rungs.plan import Plan
from rungs.results import ResultsSet
from rungs.tables import Source
from rungs.variants import CONFIG, load_device, load_experiment, parse_experiment
from rungs.workloads import Operand, Work

SMEM = load_experiment("smem_read")
NAMES = [SMEM.variant(rung).name for rung in ("W4", "W3")]


def raw(name: str = "smem_read") -> dict:
    return yaml.safe_load((CONFIG / "experiments" / f"{name}.yaml").read_text())


def parsed(declared: dict):
    schemas.validate(declared, "experiment", "x.yaml")
    return parse_experiment(declared)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sweeps": []}, "rung W1 takes part in none of sweeps"),
        ({"sweeps": [{"warps": [1], "only": {"dependent": [0]}}]}, "rung Y1 takes part in none of sweeps"),
        ({"sweeps": [{"only": {"read": [6]}}]}, "a sweep is over no axis"),
        (
            {"sweeps": [{"warps": [1]}, {"warps": [2], "only": {"read": [0], "tile": [0]}}]},
            "no rung takes part in sweep 2 of sweeps",
        ),
        ({"quick": {"ladders": ["W"], "sweeps": []}}, "rung W1 takes part in none of quick.sweeps"),
        (
            {"quick": {"ladders": ["W"], "sweeps": [{"warps": [1], "only": {"dependent": [1]}}]}},
            "rung W1 takes part in none of quick.sweeps",
        ),
        ({"profile_points": [{"only": 5}]}, "a profiled point names 'only', which is no axis"),
        ({"workload": "nope"}, "there is no workload 'nope'"),
    ],
)
def test_a_file_whose_points_mean_nothing_is_one_sentence(change, words):
    with pytest.raises(RungsError) as error:
        parsed(raw() | change)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cycles", "time_us", "low", "verdict", "tool", "gb_per_s", "what", "rung", "m"])
def test_an_axis_is_not_called_as_a_column(name):
    declared = raw()
    for key in ("axes", "base"):
        declared[key][name] = declared[key].pop("passes")
    with pytest.raises(RungsError, match=f"an axis may not be called {name}"):
        parsed(declared)


def test_figures_without_a_module_that_draws_them_are_one_sentence(monkeypatch):
    monkeypatch.setattr(answers, "there", lambda _: False)
    words = r"FIGURES names bandwidth, and workflow/rungs/answers/ has no smem_read\.py that draws it: write that module, or"
    with pytest.raises(RungsError, match=words):
        settings._check_workload(SMEM)


ODD = {
    "MEASURES: it is 'seconds', neither time nor cycles": {"MEASURES": "seconds"},
    "CONTROL: it is no text": {"CONTROL": None},
    "FIGURES: it is no tuple of names": {"FIGURES": "bandwidth"},
    "emulated_points: it gives [], not points of warps, passes": {"emulated_points": lambda *_: []},
    "check: NameError: name 'nothing' is not defined": {"check": lambda *_: nothing},  # noqa: F821
    "operands: KeyError: 'tile'": {"operands": lambda *_: {}["tile"]},
    "operands: a role is none of input, output, cycles": {"operands": lambda *_: {"a": Operand((1,), "int32", "in")}},
    "operands: a dtype is neither of floats nor of whole numbers": {
        "operands": lambda *_: {"a": Operand((1,), "object", "input")}
    },
    "operands: none has the role cycles": {"operands": lambda *_: {"a": Operand((1,), "int32", "input")}},
    "operands: none has the role input": {
        "MEASURES": "time",
        "operands": lambda *_: {"a": Operand((1,), "int32", "output")},
    },
    "operands: TypeError: data type 'int33' not understood": {
        "operands": lambda *_: {"a": Operand((1,), "int33", "cycles")}
    },
    "plan: grid (0, 1, 1), block (32, 1, 1), cluster (1, 1, 1) are no launch": {
        "plan": lambda *_: Plan("k", (0, 1, 1), (32, 1, 1), (1, 1, 1), 0, ())
    },
    "plan: grid (1.5, 1, 1), block (32, 1, 1), cluster (1, 1, 1) are no launch": {
        "plan": lambda *_: Plan("k", (1.5, 1, 1), (32, 1, 1), (1, 1, 1), 0, ())
    },
    "plan: smem_bytes None is no number of bytes": {
        "plan": lambda *_: Plan("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), None, ())
    },
    "plan: each of params is a pair (value, bytes)": {
        "plan": lambda *_: Plan("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (7,))
    },
    "ctas_per_sm: 0 is neither None nor a number of CTAs": {"ctas_per_sm": lambda *_: 0},
    "work: it gives no Work": {"work": lambda *_: None},
    "work: units is not given": {"work": lambda *_: Work(1, 1)},
    "expected: it gives nothing and the outputs are sum": {"expected": lambda *_: {}},
    "expected: sum has (3,) and the operand": {"expected": lambda *_: {"sum": np.zeros(3)}},
}


@pytest.mark.parametrize("words", ODD)
def test_a_module_that_gives_what_nothing_can_use_is_one_sentence(monkeypatch, words):
    whole = {name: getattr(workloads.of(SMEM), name) for name in workloads.NAMES}
    monkeypatch.setattr(workloads, "of", lambda _: SimpleNamespace(**whole | ODD[words]))
    with pytest.raises(RungsError) as error:
        workloads.rehearse(SMEM, load_device("sm_90a"))
    assert f"workload smem_read cannot work on it ({words}" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("that workflow/rungs/workloads/smem_read.py reads, or correct that module.")


@pytest.mark.parametrize("error", [SyntaxError("no"), SystemExit(3), ImportError("no")])
def test_a_module_that_cannot_be_imported_or_lacks_a_name_is_one_sentence(monkeypatch, error):
    def fails(_):
        raise error

    monkeypatch.setattr(workloads, "importlib", SimpleNamespace(import_module=fails))
    with pytest.raises(RungsError, match=rf"mine\.py cannot be imported \({type(error).__name__}: .*\): correct it"):
        workloads._module.__wrapped__("mine")
    lacking = SimpleNamespace(MEASURES="time", plan=None)
    monkeypatch.setattr(workloads, "importlib", SimpleNamespace(import_module=lambda _: lacking))
    with pytest.raises(RungsError, match=r"mine\.py has no CONTROL, FIGURES, check, ctas_per_sm, .*: add it, as docs"):
        workloads._module.__wrapped__("mine")


def test_a_workload_that_reads_other_axes_is_one_sentence():
    settings.check_experiments(["smem_read", "gemm"])
    with pytest.raises(RungsError, match="workload tma_wall cannot work on it"):
        settings._check_workload(parsed(raw() | {"workload": "tma_wall"}))


# ---- the config ------------------------------------------------------------------------------------------------------


def config(**changes) -> dict:
    declared = yaml.safe_load((CONFIG / "config.yaml").read_text())
    return copy.deepcopy(declared) | {"device": "emulator", "recorded": []} | changes


def test_a_chip_without_the_copy_engine_leaves_out_what_needs_it():
    run = settings.resolve(config(arch="sm_80", experiments=["copy_intensity", "tma_wall"]))
    assert list(run.experiments) == ["copy_intensity"]
    assert any(note.startswith("rungs: tma_wall needs one of sm_90a") for note in run.notes)
    arch, declared = run.arch, run.experiments["copy_intensity"]
    on_chip = [v for v in run.variants("copy_intensity") if declared.on_chip(v, arch)]
    assert on_chip and all(declared.on_chip(p, arch) for v in on_chip for p in run.predecessors("copy_intensity", v))


def test_axes_of_a_gemm_are_noted_where_points_have_others():
    run = settings.resolve(config(experiments=["smem_read"], axes={"mn": [512], "k": [512]}))
    assert any("M, N and K are no axes of smem_read" in note for note in run.notes)


def test_a_cold_set_of_points_alone_says_what_to_change():
    cold = config()["measure"] | {"l2": "cold"}
    with pytest.raises(RungsError, match=r"may be measured with cold caches .* or measure\.l2 hot"):
        settings.resolve(config(experiments=["smem_read"], measure=cold))


# ---- verbs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("emulate --variant W4 --at nope=1", "smem_read has no axis 'nope'"),
        ("emulate --variant W4 --at warps=64", "choose 1 to 32"),
        ("emulate --variant W4 --m 512", "--m is of a GEMM"),
        ("emulate --variant B3 --at warps=1", "gemm is a GEMM"),
        ("emulate --variant CP3 --at payload_kib=1073741824", "choose a smaller point"),
        ("emulate --variant WM2 --arch sm_80", "needs one of sm_90a"),
        ("step W1 W4 --experiment smem_read", "experiments=smem_read preset=quick"),
        ("plot points --results {} --experiment gemm --of wall", "gemm is a GEMM and has no points"),
        ("plot heatmap --results {} --experiment smem_read --of W", "draw its `points`"),
        ("sanitizer-tables --results {} --experiment smem_read", "has no CSVs of Compute Sanitizer"),
        ("verdict x.csv --output {}/verdict.json", "x.csv does not exist"),
    ],
)
def test_a_verb_that_cannot_is_one_sentence(arguments, words, tmp_path, capsys):
    assert cli.main(arguments.format(tmp_path).split()) == 1
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("rungs: ")


@pytest.mark.parametrize("text", ["warps", "warps=", "warps=-1", "warps=1.5", "warps=1,warps=2", "=", "warps=1,"])
def test_a_point_that_is_none_is_a_word_of_usage(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["emulate", "--variant", "W4", "--at", text])
    assert "give each axis once" in capsys.readouterr().err


def test_a_point_takes_from_the_first_that_is_checked_what_is_not_given():
    declared = load_experiment("copy_intensity")
    variant = declared.variant("CP3")
    assert verb.at_point(declared, variant, "sm_90a", {"grid": 0, "fma_iters": 4})[::2] == (4, 0)
    assert verb.at_point(SMEM, SMEM.variant("W4"), "sm_90a", {}) == (2, 1)
    with pytest.raises(Refused):
        verb.at_point(declared, variant, "sm_90a", {"payload_kib": 1})


def test_the_emulator_runs_a_variant_of_points(capsys):
    ptx = str(binaries.built(NAMES[0], "sm_90a").with_suffix(".ptx"))
    assert cli.main(["emulate", "--variant", "W4", "--at", "warps=1", "--ptx", ptx, "--race"]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith(f"{NAMES[0]} (W4, L5), warps per SM 1, passes over the tile 1, ") and ": 2 of 2 CTAs, " in said
    )
    assert "LDSM (ldmatrix)" in said and "right: equal to numpy" in said and "no race found" in said


# ---- what is measured ------------------------------------------------------------------------------------------------


class Counting:
    """A session of arms that count 100 cycles; `spoiled` give another result the second time that they are looked at."""

    def __init__(self, arms: list[str], spoiled: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> None:
        self.arms = {arm: SimpleNamespace(variant=SMEM.variant(arm)) for arm in arms}
        self.spoiled, self.refused, self.looks = (
            spoiled,
            {arm: "It does not fit." for arm in refused},
            dict.fromkeys(arms, 0),
        )

    def set_problem(self, *_) -> None: ...

    def outcome(self, arm: str):
        self.looks[arm] += 1
        bits = "other" if arm in self.spoiled and self.looks[arm] > 1 else "same"
        return SimpleNamespace(unwritten=0, equal=True, bits=bits)

    def cycles(self, arm: str) -> float:
        return 100.0


def counted(session: Counting) -> dict:
    rule = protocol.Settings(**settings.protocol_settings(config()["measure"]))
    rung = SMEM.variant("W4")
    at = measure.At(SMEM, rung, load_device("sm_90a"), (1, 256))
    sampler = SimpleNamespace(read=lambda: ("", None, None))
    seconds = SimpleNamespace(end=lambda _: None)
    return measure._count_cycles(session, at, rule, sampler, None, 0.0, {}, lambda _: None, seconds)


def test_a_predecessor_that_changes_its_result_does_not_lose_the_rung():
    part = counted(Counting(NAMES, spoiled=(NAMES[1],)))
    assert part["status"] == "ok" and {sample["arm"] for sample in part["samples"]} == {NAMES[0]}
    assert "gives another result after counting" in part["shape"]["excluded"][NAMES[1]]
    assert counted(Counting(NAMES, spoiled=(NAMES[0],)))["status"] == "wrong"


def test_a_predecessor_that_has_not_the_point_is_refused_and_not_wrong():
    part = counted(Counting(NAMES, refused=(NAMES[1],)))
    assert part["status"] == "ok" and not part["shape"]["excluded"]
    assert part["shape"]["lost"] == {NAMES[1]: {"status": "refused", "reason": "It does not fit."}}


def test_a_rung_that_has_not_the_point_is_refused():
    with pytest.raises(Refused, match="It does not fit"):
        counted(Counting(NAMES, refused=(NAMES[0],)))


def test_a_rung_without_any_supported_point_puts_no_load_on_a_clock():
    device, rung = load_device("sm_90a"), SMEM.variant("W4")
    assert measure._load_problem(SMEM, rung, device, [(64, 1), (0, 1)]) is None
    assert measure._load_problem(SMEM, rung, device, [(64, 1), (2, 1)]) == (2, 1)


# ---- recordings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "x", 1.5, True])
def test_a_manifest_whose_points_lack_an_axis_is_one_sentence(value):
    recorded = ResultsSet(ROOT / "results/recorded/h200")
    if not recorded.has("sweep", "smem_read", NAMES[0]):
        pytest.skip("nothing is recorded here")
    job = recorded.job("sweep", "smem_read", NAMES[0])
    aggregate.read_recording("cycles@warps,passes", job, NAMES[0])
    first, *others = job.manifest["shapes"]
    odd = replace(job, manifest={**job.manifest, "shapes": [{**first, "warps": value}, *others]})
    with pytest.raises(RungsError, match="key shapes: warps is "):
        aggregate.read_recording("cycles@warps,passes", odd, NAMES[0])


# ---- pages and advice ------------------------------------------------------------------------------------------------


def source_of(name: str, points: list[dict], steps: list[dict] = ()) -> Source:
    frames = {"points": pd.DataFrame(points), "steps": pd.DataFrame(list(steps))}
    return Source(load_experiment(name), frames, SimpleNamespace(sweeps={}), {}, ROOT)


def test_no_point_is_left_out_of_the_tables():
    """Neither beyond the columns that fit, nor of no sweep of the file."""
    wide = replace(SMEM, sweeps=(variants.Sweep({"warps": tuple(range(1, 31))}),))
    points = [(warps, 256) for warps in range(1, 33)] + [(3, 7), (5, 7)]
    source = replace(
        source_of("smem_read", [{"variant": NAMES[0], "warps": w, "passes": p} for w, p in points]), experiment=wide
    )
    lines = pages.lines_of(source, NAMES)
    assert sorted(point for _, shown in lines for point in shown) == sorted(points)
    assert max(len(shown) for _, shown in lines) <= pages.MOST_COLUMNS
    assert {axis for axis, _ in lines} == {"warps"}


@pytest.mark.parametrize(
    ("verdict", "words"),
    [("tie", "no difference"), ("undecided", "not decided"), ("none", "not decided"), ("slower", "a loss")],
)
def test_a_step_without_a_verdict_is_no_tie(verdict, words):
    wall = load_experiment("tma_wall")
    row = {"step": "WC1>WC2", "gain_percent": 0.8, "low_percent": 0.4, "high_percent": 1.2, "verdict": verdict}
    source = source_of("tma_wall", [], [row | wall.base])
    (line,) = advise._steps(source, {"WC1>WC2": "several CTAs"})
    assert line.advice.startswith(words)


@pytest.mark.parametrize(
    ("speedups", "words"), [((1.0, 1.2, 1.01), "stop at fma_iters 4"), ((1.0, 1.2, 1.2), "pays up to")]
)
def test_loading_ahead_stops_to_pay_where_it_never_does_again(speedups, words):
    declared = load_experiment("copy_intensity")
    rows = []
    for fma, speedup in zip((1, 2, 4), speedups, strict=True):
        for mode, variant in advise.seed_rungs(declared).items():
            time = 100.0 / speedup if mode == "pipe2" else 100.0
            rows.append(
                {"variant": variant.name, **declared.base, "fma_iters": fma, "time_us": time, "gb_per_s": 1.0 / time}
            )
    lines = advise.seed_table(source_of("copy_intensity", rows), None, None)
    (line,) = [line for line in lines if line.situation == "is the kernel bound by arithmetic?"]
    assert words in line.advice


def test_a_missing_point_of_a_verdict_is_named_without_one(tmp_path):
    from rungs import verdict

    folder = tmp_path / "data" / "smem_read"
    rows = [
        {
            "variant": NAMES[0],
            "what": "inspect",
            "warps": None,
            "passes": None,
            "status": "build failed",
            "reason": "No.",
        },
        {"variant": NAMES[0], "what": "sweep", "warps": 2, "passes": 256, "status": "crashed", "reason": "Lost."},
    ]
    schemas.write_rows("coverage@warps,passes", rows, folder / "coverage.csv")
    found = verdict.failures([folder / "coverage.csv"])
    assert [failure["what"] for failure in found] == ["inspect", "sweep at warps per SM 2, passes over the tile 256"]


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (aggregate.Arm("flagged", "All 9 rounds are flagged: hot", flagged=9), "No share of the control: All 9 rounds"),
        (aggregate.Arm("ok", "", np.array([9]), np.ones(1), np.ones(1), np.ones(1)), "no round has both unflagged"),
    ],
)
def test_a_point_without_a_share_says_why_and_keeps_its_time(control, words):
    declared = load_experiment("copy_intensity")
    variant, device = declared.variant("CP3"), load_device("sm_90a")
    name, point = variant.name, declared.base_point
    rung = aggregate.Arm("ok", "", np.arange(1, 9), np.full(8, 10.0), np.full(8, 1980.0), np.full(8, 300.0))
    manifest = {"run_id": "ab12", "shapes": [dict(zip(declared.axis_names, point, strict=True))]}
    frame = pd.DataFrame([manifest["shapes"][0]])
    recordings = aggregate.Recordings({name: aggregate.Recording("x.csv", manifest, frame)}, [], {}, {})
    arms = {name: {point: {name: rung, "control": control}}}
    measured = aggregate.Measured(declared, device, [variant], recordings, arms, [], [point], 132, {})
    (row,) = aggregate._point_rows(measured, aggregate.shares_of(measured))
    assert row["status"] == "ok" and row["time_us"] == 10.0 and words in row["reason"]
    assert row["gb_per_s"] == pytest.approx(2 * 16384 * 1024 / 10 / 1e3) and "share_percent" not in row
