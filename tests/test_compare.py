"""Results sets against each other: ratios alone, corrected and above both floors; no winner where there is a tie."""

import dataclasses
import os
import re
import subprocess

import matplotlib.pyplot as plt
import pytest

from rendered import check_that_no_text_leaves, grids
from rungs import cli, compare, compareplots, schemas, staleness, stats, variants
from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.results import ResultsSet, write_recorded
from synthetic import GPU, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
COPIES = variants.load_experiment("copy_intensity")
SHAPES = [(512, 512, 1024), (4096, 4096, 4096)]
PATH = ("B2", "B3", "B5", "B6")


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


@pytest.fixture(autouse=True)
def current(monkeypatch):
    """The synthetic binaries are of no source that this checkout has."""
    monkeypatch.setattr(staleness, "stale", lambda *_, **__: {})
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """a; b, where B3 is 6 % faster; c, a again on another day; d, another GPU on which all times double."""
    folder = tmp_path_factory.mktemp("sets")
    common = {"variants": PATH, "shapes": SHAPES, "profile": "", "rounds": 40}
    h100 = {"gpu": GPU | {"name": "NVIDIA H100", "slug": "h100"}}
    worlds = {
        "a": World(**common, job_shift=0.002),
        "b": World(**common, job_shift=0.002, seed=5, gains={name_of("B3"): 6.0}),
        "c": World(**common, job_shift=0.002, seed=9),
        "d": World(**common, job_shift=0.002, seed=13, gains={"control": 0.0}, manifest=h100),
    }
    for name, world in worlds.items():
        write_set(folder / name, world)
    return {name: str(folder / name) for name in worlds}


COMPARED: dict = {}


def made(sets, *names, ladder="B"):
    if names not in COMPARED:
        COMPARED[names] = compare.compare([sets[name] for name in names], "gemm", ladder)
    return COMPARED[names]


def verdicts(comparison, a="A", b="B"):
    return {
        (line.name, line.what, line.shape[2]): comparison.verdicts[i, a, b] for i, line in enumerate(comparison.lines)
    }


def test_a_step_that_gained_is_told_with_the_true_difference_and_the_rest_is_not(sets):
    found = verdicts(made(sets, "a", "b"))
    for k in (1024, 4096):
        assert found["B2>B3", "gain", k].word == "more"
        assert found["B2>B3", "gain", k].difference == pytest.approx(6.0, abs=0.4)
        assert found["B3>B5", "gain", k].word == "less"
        assert found["B3>B5", "gain", k].difference == pytest.approx(100 / 1.06 - 100, abs=0.4)
        assert found["B3", "share", k].word == "more"
        assert found["B5>B6", "gain", k].word in ("tie", "undecided")
        assert found["B6", "share", k].word in ("tie", "undecided")


def test_a_against_itself_on_another_day_claims_nothing(sets):
    words = {verdict.word for verdict in verdicts(made(sets, "a", "c")).values()}
    assert words <= {"tie", "undecided"} and "tie" in words


def test_the_interval_is_corrected_for_every_claim_and_the_larger_floor_decides(sets):
    comparison = made(sets, "a", "b")
    assert comparison.claims == len(comparison.lines) == (7 + 4) * 2
    line = next(line for line in comparison.lines if line.name == "B2>B3")
    first, second = (line.values[label] for label in "AB")
    effect = stats.difference(first.median, second.median)
    verdict = comparison.verdicts[comparison.lines.index(line), "A", "B"]
    for level, interval in ((0.95, verdict.plain), (stats.claim_level(22), verdict.interval)):
        assert interval == pytest.approx(tuple(map(stats.percent, effect.interval(level))))
    assert verdict.floor == pytest.approx(stats.percent(max(first.floor.value, second.floor.value)))
    high = dataclasses.replace(second, floor=stats.Floor(0.1, None, 1, 3))
    assert compare.judge(first, high, 22).word == compare.judge(high, first, 22).word == "tie"
    none = dataclasses.replace(second, floor=None)
    assert compare.judge(first, none, 22).word == "none" and "floor" in compare.judge(first, none, 22).reason


def test_a_share_has_the_spread_from_job_to_job_in_its_interval(sets):
    comparison = made(sets, "a", "c")
    line = next(line for line in comparison.lines if line.what == "share")
    first, second = (line.values[label] for label in "AB")
    rounds = stats.difference(first.median, second.median)
    jobs = stats.difference(first.median, second.median, [first.spread, second.spread])
    assert jobs.error > 2 * rounds.error
    lonely = dataclasses.replace(first, spread=compare.UNKNOWN)
    verdict = compare.judge(lonely, second, 22)
    assert (verdict.word, verdict.interval) == ("none", None) and "job to job" in verdict.reason


def test_the_error_of_a_difference_covers_the_truth(sets):
    """Independent errors add by their squares, with the degrees of freedom of the sum."""
    a, b = stats.Median(0.1, 0.003, 20.0, 40), stats.Median(0.2, 0.004, 20.0, 40)
    effect = stats.difference(a, b)
    assert (effect.value, effect.error) == (pytest.approx(0.1), pytest.approx(0.005))
    assert 20 < effect.freedom <= 40
    assert stats.difference(a, stats.Median(0.2, float("inf"), 1.0, 3)).interval() == (-float("inf"), float("inf"))


def test_of_sets_that_tie_none_wins(sets):
    comparison = made(sets, "a", "b", "c")
    most = {(line.name, line.shape[2]): compare.most_text(comparison, i) for i, line in enumerate(comparison.lines)}
    assert most["B2>B3", 4096] == most["B3", 4096] == "B"
    assert re.fullmatch(r"A [=?] C", most["B3>B5", 4096])
    assert re.fullmatch(r"[ABC]( [=?] [ABC]){2}", most["B6", 4096])
    (sentence,) = [text for text in compare.sentences_of(comparison) if text.startswith("At 4096x4096x4096 B6")]
    assert re.match(r"At 4096x4096x4096 B6 has no winner: A, B and C (tie|are not told apart) \(A \d", sentence)


def test_a_single_winner_is_named(sets, monkeypatch):
    comparison = made(sets, "a", "b")
    place = next(i for i, line in enumerate(comparison.lines) if (line.name, line.what) == ("B3", "share"))
    assert compare.leaders(comparison, place) == (["B"], True)
    swapped = made(sets, "b", "a")
    assert compare.leaders(swapped, place) == (["A"], True)


def test_what_is_the_same_recording_in_both_is_no_claim(sets):
    comparison = made(sets, "a", "a")
    assert comparison.claims == 0
    assert {verdict.word for verdict in verdicts(comparison).values()} == {"same run"}


def test_two_gpus_are_compared_by_ratios_and_it_is_said(sets):
    comparison = made(sets, "a", "d")
    text = compare.render(comparison)
    assert "The sets are of 2 GPUs (NVIDIA H200, NVIDIA H100), whose times say nothing about each other." in text
    assert "time_us" not in compare.frame_of(comparison) and " us" not in text and "TFLOP" not in text
    assert "of 2 GPUs" not in compare.render(made(sets, "a", "c"))


def test_each_set_keeps_its_provenance_and_its_staleness(sets, monkeypatch):
    monkeypatch.setattr(
        staleness, "stale", lambda results, *_, **__: {name_of("B3"): "old"} if results.name == "b" else {}
    )
    comparison = compare.compare([sets["a"], sets["b"]], "gemm", "B")
    first, second = compare.legend_of(comparison)
    assert first.startswith(f"A: {sets['a']}: NVIDIA H200, driver 580.65.06; ") and "stale" not in first
    assert second.endswith(f"† stale, the source is another one now: {name_of('B3')}")
    (grid,) = grids(compare.render(comparison))
    row = next(row for row in grid if row[1] == "B2>B3")
    assert "†" not in row[3] and row[4].endswith("†")


def test_a_failure_has_its_word_and_no_verdict(sets, tmp_path):
    failures = {(name_of("B6"), SHAPES[1]): ("time limit", "It never ended.")}
    write_set(tmp_path / "f", World(variants=PATH, shapes=SHAPES, profile="", failures=failures))
    comparison = made({**sets, "f": str(tmp_path / "f")}, "a", "f")
    verdict = verdicts(comparison)["B6", "share", 4096]
    assert (verdict.word, verdict.difference, verdict.reason) == ("none", None, "time limit: It never ended.")
    (grid,) = grids(compare.render(comparison))
    row = next(row for row in grid if row[1:3] == ["B6, share", "4096x4096x4096"])
    assert row[4:] == ["time limit", "not compared", ""]
    assert any("1 without a claim" in sentence for sentence in compare.sentences_of(comparison))


def test_only_common_shapes_and_rungs_are_compared_and_what_is_left_out_is_named(sets, tmp_path):
    write_set(tmp_path / "s", World(variants=("B2", "B3"), shapes=[SHAPES[1], (512, 512, 256)], profile=""))
    comparison = made({**sets, "s": str(tmp_path / "s")}, "a", "s")
    assert {line.shape for line in comparison.lines} == {SHAPES[1]}
    assert [line.name for line in comparison.lines] == ["B0>B2", "B1>B3", "B2>B3", "B2", "B3"]
    assert "B5 (A alone)" in compare.sentences_of(comparison)[-1]


MIXED = {
    "fill": ({"fill": "zeros"}, "with fill normal and .* with zeros"),
    "type": ({"dtype": "float16", "control": {"name": "torch.matmul", "dtype": "float16"}}, "with data type bfloat16 and .* with float16"),
    "control": ({"control": {"name": "torch.mm", "dtype": "bfloat16"}}, "with control torch.matmul and .* with torch.mm"),
    "cold": ({"l2": "cold"}, "with L2 policy hot and .* with cold"),
}  # fmt: skip


@pytest.mark.parametrize("changed", MIXED.values(), ids=MIXED)
def test_what_no_comparison_may_mix_is_refused(sets, tmp_path, changed):
    """Rows 8 and 9. Kind: a difference between sets that is none of the rungs."""
    manifest, words = changed
    write_set(tmp_path / "x", World(variants=PATH[:2], shapes=SHAPES[1:], profile="", manifest=manifest))
    with pytest.raises(RungsError, match=f"{words}: .*, so compare sets that agree in it\\.$"):
        compare.compare([sets["a"], str(tmp_path / "x")], "gemm")


def test_sets_without_a_common_shape_or_rung_are_refused(sets, tmp_path):
    write_set(tmp_path / "shape", World(variants=PATH[:2], shapes=[(512, 512, 256)], profile=""))
    write_set(tmp_path / "rung", World(variants=("B0", "B1"), shapes=SHAPES, profile=""))
    with pytest.raises(
        RungsError, match=r"no shape in common: .*a has 512x512x1024 to 4096x4096x4096, .* has 512x512x256"
    ):
        compare.compare([sets["a"], str(tmp_path / "shape")], "gemm")
    with pytest.raises(RungsError, match="no rung of ladder B in common"):
        compare.compare([sets["a"], str(tmp_path / "rung")], "gemm", "B")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{a}"], "is of two results sets or more"),
        (["{a}", "nowhere"], "nowhere is no results set: give a folder such as"),
        (["{a}", "{b}", "--experiment", "gem"], "There is no experiment 'gem': choose of"),
        (["{a}", "{b}", "--ladder", "Z"], "gemm has no ladder 'Z': choose one of A, B, S"),
        (["{a}", "{b}", "--experiment", "gemm_tuned"], "holds no sweep of gemm_tuned: it has gemm, so"),
        (["{a}", "{a}@nothing"], "git knows no commit 'nothing'"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(sets, capsys, arguments, words):
    assert cli.main(["compare", *(argument.format(**sets) for argument in arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and words in said.err


def test_the_terminal_has_every_row_once_in_a_line(sets, capsys):
    assert cli.main(["compare", sets["a"], sets["b"], "--ladder", "B"]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^│ B +│", text, re.MULTILINE)) == 22
    assert "6.0 % [" in text or "+6." in text
    assert "Ladder B, B against A: of 14 gains 4 more, 2 less" in text


def test_files_are_written_whole_or_not_at_all_and_the_same_twice(sets, tmp_path, monkeypatch):
    output = tmp_path / "out"
    run = ["compare", sets["a"], sets["b"], "--ladder", "B", "--output", str(output)]
    assert cli.main(run) == 0
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    assert tuple(sorted(first)) == compare.FILES
    assert len(schemas.read_csv("compare", output / "compare.csv")) == 22
    assert cli.main(run) == 0
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first

    def full(*arguments, **options):
        raise RungsError("no space left")

    monkeypatch.setattr("rungs.plots.save", full)
    assert cli.main(run) == 1
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first
    assert cli.main([*run[:-1], str(tmp_path / "new")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_somebody_else_is_left_alone(sets, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["compare", sets["a"], sets["b"], "--output", str(tmp_path)]) == 1
    assert "holds other files: give --output a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_figure_has_a_mark_for_each_verdict_and_no_text_leaves_it(sets):
    figure = compareplots.plot(made(sets, "a", "b", "c"))
    assert len(figure.axes) == 3 * 2
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [
        "B0>B2",
        "B1>B3",
        "B2>B3",
        "B3>B5",
        "B7>B5",
        "B4>B6",
        "B5>B6",
        *(f"{rung}, share" for rung in PATH),
    ]
    marks = [line for line in figure.axes[0].lines if line.get_marker() not in ("None", None)]
    assert len(marks) == 11 and {line.get_marker() for line in marks} >= {">", "<"}
    check_that_no_text_leaves(figure)


def git(folder, *arguments):
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, env=os.environ | identity)


def test_a_set_is_read_as_a_commit_has_it(sets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = World(variants=("B2", "B3"), shapes=SHAPES, profile="", rounds=40)
    write_set(tmp_path / "set", world)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    write_set(tmp_path / "set", dataclasses.replace(world, seed=3, gains={name_of("B3"): 6.0}))
    comparison = compare.compare(["set@HEAD", "set"], "gemm", "B")
    assert verdicts(comparison)["B2>B3", "gain", 4096].word == "more"
    assert comparison.sets[0].name == "set@HEAD"
    damaged = tmp_path / "set" / "csv" / "sweep" / "gemm" / f"{name_of('B3')}.csv"
    damaged.write_text(damaged.read_text()[:-9])
    git(tmp_path, "commit", "-q", "-a", "-m", "second")
    with pytest.raises(RungsError, match=r"^set@HEAD/csv/sweep/gemm/\S+ was edited or cut .* name a commit"):
        compare.compare(["set@HEAD", "set@HEAD~1"], "gemm", "B")
    with pytest.raises(RungsError, match="commit HEAD has no results set other"):
        compare.compare(["other@HEAD", "set@HEAD~1"], "gemm", "B")


def test_an_experiment_of_points_is_compared_too(tmp_path):
    """Two rungs of a recorded set against themselves: their shares go through the bytes that the control moves."""
    recorded, names = ResultsSet(ROOT / "results/recorded/h200"), [COPIES.variant(rung).name for rung in ("CP1", "CP2")]
    for kind, chosen in (("sweep", names), ("floor", ["1", "2", "3"])):
        jobs = [recorded.job(kind, "copy_intensity", name) for name in chosen]
        write_recorded(tmp_path / "set", kind, "copy_intensity", {job.name: (job.csv, job.manifest) for job in jobs})
    comparison = compare.compare([str(tmp_path / "set")] * 2, "copy_intensity", None)
    shares = [line.values["A"] for line in comparison.lines if line.what == "share" and line.values["A"].median]
    assert shares and all(0 < value.percent(value.median.value) < 200 for value in shares)
    check_that_no_text_leaves(compareplots.plot(comparison))
