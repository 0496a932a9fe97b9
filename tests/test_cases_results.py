"""Situations that broke tools like this one, each as a test of its whole kind: what tables, figures and comparisons must survive."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from rungs import aggregate, compare, plots, record, schemas, staleness, tables, variants
from rungs.errors import RungsError
from rungs.files import sha256_file
from rungs.results import RECORDED
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
SHAPES = [(512, 512, 1024), (4096, 4096, 4096)]
RUNGS = ("B2", "B3", "B5")


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


def write(results: Path, **changes) -> Path:
    write_set(results, World(**{"variants": RUNGS, "shapes": SHAPES, "profile": "", **changes}))
    return results


def frames(results: Path, rungs=RUNGS) -> dict[str, pd.DataFrame]:
    return aggregate.aggregate(results, EXPERIMENT, ARCH, [name_of(rung) for rung in rungs])


def edit(path: Path, change) -> None:
    """Change the text of a CSV, and let its manifest know."""
    path.write_text(change(path.read_text()))
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "csv_sha256": sha256_file(path)}))


def csv_of(results: Path, rung: str) -> Path:
    return results / "csv" / "sweep" / "gemm" / f"{name_of(rung)}.csv"


@pytest.fixture(autouse=True)
def current(monkeypatch):
    for reader in (staleness, record):
        monkeypatch.setattr(reader, "stale", lambda *_, **__: {})
    yield
    plt.close("all")


# ---- row 1: one binary under two names ----


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_binary_measured_as_two_variants_is_a_tie_and_the_floor_is_reported(tmp_path, seed):
    """Row 1. Kind: a difference that is none. B5 takes exactly the time of B3 here."""
    same = World().gain_percent(name_of("B3"), name_of("B5"), SHAPES[1])
    results = write(
        tmp_path, gains={name_of("B5"): 100 / (1 + same / 100) - 100}, seed=seed, rounds=60, job_shift=0.004
    )
    found = frames(results)
    steps = found["steps"][found["steps"]["step"] == "B3>B5"]
    assert set(steps["verdict"]) <= {"tie", "undecided"} and "tie" in set(steps["verdict"])
    assert steps["floor_percent"].notna().all() and (steps["gain_percent"].abs() < 0.5).all()
    assert (found["floor"]["floor_percent"].dropna() > 0).all()
    aggregate.run(results, "gemm", ARCH, [name_of(rung) for rung in RUNGS])
    page = tables.render_experiment(results, "gemm")
    floors = [f"{value:.2f} %" for value in found["floor"]["floor_percent"].dropna()]
    assert all(text in page for text in floors), "the page says what one binary shows against itself"
    assert re.search(r"\| B3>B5 \|.* tie", page)


# ---- row 5: a number that the device cannot do ----


@pytest.mark.parametrize("arm", ["B3", "control"])
def test_a_time_above_the_peak_is_named_and_stands_in_no_table_figure_or_comparison(tmp_path, arm):
    """Row 5. Kind: one absurd sample, of the rung or of what it is held against."""
    results, path = write(tmp_path / "a"), csv_of(tmp_path / "a", "B3")
    rows = schemas.read_csv("sweep", path)
    name = "control" if arm == "control" else name_of(arm)
    rows.loc[rows.index[(rows["m"] == 4096) & (rows["arm"] == name)][4], "time_us"] = 100.0
    edit(path, lambda text: rows.to_csv(index=False, lineterminator="\n"))
    aggregate.run(results, "gemm", ARCH, [name_of(rung) for rung in RUNGS])
    shapes = frames(results)["shapes"]
    row = shapes[(shapes["variant"] == name_of("B3")) & (shapes["m"] == 4096)].iloc[0]
    assert row["status"] == "implausible" and pd.isna(row["share_percent"])
    assert re.search(rf"Round 5 of {name} reads 1374 TFLOP/s, above the peak of \d+ at \d+ MHz\.", row["reason"])
    page = tables.render_experiment(results, "gemm")
    assert "implausible" in page
    for cell in re.findall(r"(\d+\.\d) TFLOP/s|\| (\d+\.\d) \(", page):
        assert float(cell[0] or cell[1]) < 1100
    plots.draw("ladder", results, "gemm", "B", {})
    drawn = (results / "figures" / "gemm" / "ladder_B.svg").read_text()
    assert "implausible" in drawn
    comparison = compare.compare([str(results), str(write(tmp_path / "b", seed=4))], "gemm", "B")
    verdict = next(
        comparison.verdicts[i, "A", "B"]
        for i, line in enumerate(comparison.lines)
        if (line.name, line.what, line.shape[0]) == ("B3", "share", 4096)
    )
    assert verdict.word == "none" and verdict.reason.startswith("implausible: ")


# ---- row 10: a step that is two ----


def test_a_step_whose_rungs_differ_in_more_than_a_factor_is_refused_with_every_factor_named():
    """Row 10. Kind: whatever two rungs of any ladder are put together."""
    refused = 0
    for name in variants.experiment_names():
        experiment = variants.load_experiment(name)
        rungs = {rung: variant for ladder in experiment.ladders.values() for rung, variant in ladder.rungs.items()}
        for (a, source), (b, target) in itertools.islice(itertools.combinations(rungs.items(), 2), 300):
            factors = [factor for factor, level in source.levels if target.level(factor) != level]
            if len(factors) == 1:
                variants.make_step(source, target, "", f"{a}>{b}", a, b)
                continue
            with pytest.raises(RungsError) as error:
                variants.make_step(source, target, "", f"{a}>{b}", a, b)
            assert all(factor in str(error.value) for factor in factors) and str(error.value).count("\n") == 0
            refused += 1
    assert refused > 100


# ---- row 15: what a profiler calls time ----


def test_times_that_ncu_prints_never_move_a_time(tmp_path, monkeypatch):
    """Row 15. Kind: any metric of a profile, one that is a time among them, leaves every timing frame as it is."""
    import synthetic

    without = frames(write(tmp_path / "without"))
    slow = {"gpu__time_duration.sum": ("nsecond", 9.9e8), "sm__cycles_elapsed.max": ("cycle", 9.9e8)}
    monkeypatch.setattr(synthetic, "PROFILE_METRICS", {**synthetic.PROFILE_METRICS, **slow})
    profiled = frames(write(tmp_path / "with", profile="ok"))
    for kind in ("shapes", "steps", "floor"):
        pd.testing.assert_frame_equal(without[kind], profiled[kind])
    timed = schemas.columns("shapes") | schemas.columns("steps")
    assert not any("ncu" in str(rule) for rule in timed.values())
    aggregate.run(tmp_path / "with", "gemm", ARCH, [name_of(rung) for rung in RUNGS])
    page = tables.render_experiment(tmp_path / "with", "gemm")
    assert "990000" not in page and "9.9e+08" not in page


# ---- row 16, and every other number that is none ----


@pytest.mark.parametrize("value", ["0", "0.0", "-0.0", "-3.1", "nan", "NaN", "inf", "", "1e999"])
def test_a_time_that_is_no_time_is_refused_and_no_mean_is_made_of_it(tmp_path, value):
    """Row 16. Kind: whatever makes a mean of logarithms collapse; in a comparison as in a set of its own."""
    results, path = write(tmp_path / "a", shapes=SHAPES[:1]), csv_of(tmp_path / "a", "B3")
    place = list(schemas.columns("sweep")).index("time_us")

    def spoil(text: str) -> str:
        lines = text.splitlines(keepends=True)
        cells = lines[5].split(",")
        lines[5] = ",".join([*cells[:place], value, *cells[place + 1 :]])
        return "".join(lines)

    edit(path, spoil)
    for read in (lambda: frames(results), lambda: compare.compare([str(results)] * 2, "gemm", "B")):
        with pytest.raises(RungsError) as error:
            read()
        said = str(error.value)
        assert f"{path}, row 6: " in said and "time_us" in said and said.count("\n") == 0
        assert re.search("delete .*(file|it) and run again", said), "the fix"


def test_a_time_too_small_to_be_one_is_implausible(tmp_path):
    results, path = write(tmp_path, shapes=SHAPES[:1]), csv_of(tmp_path, "B3")
    rows = schemas.read_csv("sweep", path)
    rows.loc[rows.index[rows["arm"] == name_of("B3")][3], "time_us"] = 1e-290
    edit(path, lambda text: rows.to_csv(index=False, lineterminator="\n"))
    shapes = frames(results)["shapes"].set_index("variant")
    assert shapes.loc[name_of("B3"), "status"] == "implausible"
    assert shapes.loc[name_of("B5"), "status"] == "ok"


# ---- files that are not what they were ----

DAMAGE = {
    "cut": (lambda text: text[:-20], r"row \d+: ends in the middle of a line"),
    "older schema": (lambda text: text.replace("run_id,m,", "run_id,experiment,m,", 1), r"row 1: column 'experiment' does not fit a sweep CSV, whose columns are run_id, m, n"),
    "unknown column": (lambda text: text.replace(",reason\n", ",reason,ncu_time\n", 1), "row 1: column 'ncu_time' does not fit a sweep CSV"),
    "longer rows": (lambda text: text[:-1] + ",9\n", r"is not a sweep CSV \(.*in line \d+"),
    "a row twice": (lambda text: text + text.splitlines()[-1] + "\n", r"row \d+: the same m, n, k, round, arm stands in an earlier row"),
    "a word for a number": (lambda text: text.replace(",20,", ",twenty,", 1), "row 2: launches is 'twenty', not integer"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("reader", ["aggregate", "compare"])
def test_a_damaged_file_is_one_sentence_with_file_row_and_fix(tmp_path, damage, reader):
    """Kind: mixed versions of the schema, a copy that broke off, two runs pasted together."""
    change, words = damage
    results, path = write(tmp_path / "a", shapes=SHAPES[:1], rounds=8), csv_of(tmp_path / "a", "B3")
    edit(path, change)
    with pytest.raises(RungsError) as error:
        if reader == "aggregate":
            frames(results)
        else:
            compare.compare([str(results)] * 2, "gemm", "B")
    said = str(error.value)
    assert re.search(rf"{re.escape(str(path))},? {words}", said), said
    assert said.count("\n") == 0 and "delete the file and run again" in said


def test_manifests_of_another_version_are_one_sentence(tmp_path):
    results = write(tmp_path, shapes=SHAPES[:1], rounds=8)
    path = csv_of(results, "B3").with_suffix(".json")
    made = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in made.items() if key != "l2"}))
    with pytest.raises(RungsError, match=rf"{path.name} \(delete it and run again\): 'l2' is a required property"):
        frames(results)


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("profile", "l2", None, ""),
        ("profile", "l2", "warm", "key l2: 'warm' is not one of ['hot', 'cold']"),
        ("sweep", "l2", "", "key l2: '' is not one of ['hot', 'cold']"),
        ("sweep", "slug", "h200\n", "key gpu.slug: 'h200\\n' does not match"),
        ("sweep", "slug", "../../../evil", "key gpu.slug: '../../../evil' does not match"),
    ],
)
def test_record_writes_under_the_sets_name_alone_and_never_one_policy_as_another(
    tmp_path, monkeypatch, capsys, kind, key, value, words
):
    """Kind: a manifest that was edited, or is of an older version."""
    monkeypatch.chdir(tmp_path)
    results = write(tmp_path / "results" / "h200", shapes=SHAPES[:1], rounds=8, profile="ok")
    stamp = next((results / "build" / ARCH).glob("abl*/*.json"))
    (results / "build" / ARCH / "stamp").mkdir()
    (results / "build" / ARCH / "stamp" / "stamp.json").write_text(stamp.read_text())
    for path in (results / "csv" / kind / "gemm").glob("*.json"):
        made = json.loads(path.read_text())
        (made["gpu"] if key == "slug" else made)[key] = value
        path.write_text(json.dumps({name: what for name, what in made.items() if what is not None}))
    before = {path for path in tmp_path.parent.rglob("*") if "results/recorded/h200" not in path.as_posix()}
    if words:
        with pytest.raises(RungsError, match=re.escape(words)):
            record.record(results.relative_to(tmp_path), "gemm")
        assert not (tmp_path / RECORDED).exists()
    else:
        record.record(results.relative_to(tmp_path), "gemm")
        assert "Recorded 9 CSVs of 3 variants in results/recorded/h200" in capsys.readouterr().out
    after = {path for path in tmp_path.parent.rglob("*") if "results/recorded/h200" not in path.as_posix()}
    assert after - before <= {tmp_path / RECORDED}
