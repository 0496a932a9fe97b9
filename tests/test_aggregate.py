"""From a results set whose truth is known to its data, and what is refused on the way."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rungs import aggregate, schemas, stats, variants
from rungs.errors import RungsError
from rungs.files import sha256_file
from scripts import benchmark
from synthetic import ARCH, World, write_set, write_sweep

EXPERIMENT = variants.load_experiment("gemm")
SMALL, LARGE = (512, 512, 1024), (4096, 4096, 4096)
SHAPES = [SMALL, LARGE]


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


def frames_of(results: Path, rungs=("B0", "B1", "B2", "B3", "B4", "B5", "B6", "B7"), arch: str = ARCH):
    return aggregate.aggregate(results, EXPERIMENT, arch, [name_of(rung) for rung in rungs])


def step_at(frames, label: str, shape=SMALL):
    steps = frames["steps"]
    found = steps[(steps["step"] == label) & (steps["m"] == shape[0]) & (steps["k"] == shape[2])]
    assert len(found) == 1
    return found.iloc[0]


def shape_at(frames, rung: str, shape=SMALL):
    rows = frames["shapes"]
    found = rows[(rows["variant"] == name_of(rung)) & (rows["m"] == shape[0]) & (rows["k"] == shape[2])]
    assert len(found) == 1
    return found.iloc[0]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    results = tmp_path_factory.mktemp("set") / "h200"
    write_set(results, World(shapes=SHAPES, profile=""))
    return results


@pytest.fixture
def profiled(tmp_path):
    write_set(tmp_path / "h200", World(shapes=SHAPES, variants=["B3", "B5"]))
    return tmp_path / "h200"


@pytest.fixture
def results(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "h200")
    return tmp_path / "h200"


def sweep(results: Path, rung: str) -> Path:
    return results / "csv" / "sweep" / "gemm" / f"{name_of(rung)}.csv"


def edit_csv(path: Path, change, honest: bool = True) -> None:
    """Change the text of a CSV; `honest` gives its manifest the new hash."""
    path.write_text(change(path.read_text()))
    if honest:
        edit_manifest(path, csv_sha256=sha256_file(path))


def edit_manifest(path: Path, **keys) -> None:
    manifest = json.loads(path.with_suffix(".json").read_text())
    for key, value in keys.items():
        manifest[key] = {**manifest[key], **value} if isinstance(value, dict) else value
    path.with_suffix(".json").write_text(json.dumps(manifest))


# What comes out


def test_every_gain_is_the_true_one_within_a_third_of_a_per_cent(pristine):
    world = World(shapes=SHAPES)
    steps = frames_of(pristine)["steps"]
    assert len(steps[steps["ladder"] == "B"]) == 10 * len(SHAPES)
    for row in steps[steps["ladder"] == "B"].itertuples():
        truth = world.gain_percent(row.source_variant, row.target_variant, (row.m, row.n, row.k))
        assert abs(row.gain_percent - truth) < 0.3
        assert row.low_percent <= row.gain_percent <= row.high_percent
        assert row.claim_low_percent < row.low_percent
        assert row.claim_high_percent > row.high_percent


def test_one_per_cent_is_claimed_under_twenty_per_cent_of_clock_drift_and_none_is_a_tie(tmp_path):
    world = World(shapes=[SMALL], variants=["B2", "B3"], rounds=60, noise=0.0015, job_shift=0.002)
    base = world.gain_percent(name_of("B2"), name_of("B3"), SMALL)
    for gain, word in ((1.0, "faster"), (0.0, "tie"), (-1.0, "slower")):
        gains = {name_of("B3"): 100 * ((1 + gain / 100) / (1 + base / 100) - 1)}
        write_set(tmp_path / word, World(**{**vars(world), "gains": gains}))
        row = step_at(frames_of(tmp_path / word, ["B2", "B3"]), "B2>B3")
        assert row["gain_percent"] == pytest.approx(gain, abs=0.3)
        assert row["verdict"] == word


def test_share_time_and_throughput_of_a_rung(pristine):
    row = shape_at(frames_of(pristine), "B3", LARGE)
    world = World()
    truth = 100 * world.time_us("control", LARGE) / world.time_us(name_of("B3"), LARGE)
    assert row["share_percent"] == pytest.approx(truth, abs=0.3)
    assert row["share_low_percent"] < truth < row["share_high_percent"]
    assert row["tflops"] == pytest.approx(2 * 4096**3 / row["time_us"] / 1e6, rel=1e-3)
    assert row["tflops"] / row["control_tflops"] == pytest.approx(truth / 100, rel=0.01)
    assert (row["rungs"], row["rounds"], row["flagged"], row["status"]) == ("A3 B3 S3", 30, 0, "ok")


def test_run_writes_six_valid_csvs_and_the_same_bytes_twice(results):
    names = [name_of(f"B{i}") for i in range(8)]
    aggregate.run(results, "gemm", ARCH, names)
    first = {kind: (results / "data" / "gemm" / f"{kind}.csv").read_bytes() for kind in aggregate.FRAMES}
    aggregate.run(results, "gemm", ARCH, names)
    assert first == {kind: (results / "data" / "gemm" / f"{kind}.csv").read_bytes() for kind in aggregate.FRAMES}
    data = aggregate.read_data(results, "gemm")
    assert set(data) == set(aggregate.FRAMES)
    assert data["steps"]["rounds_to_decide"].dtype == "Int64"


def test_a_step_comes_from_the_rounds_of_its_target_alone(results):
    before = step_at(frames_of(results), "B2>B3")
    sweep(results, "B2").unlink()
    after = step_at(frames_of(results, ["B3"]), "B2>B3")
    assert after["gain_percent"] == before["gain_percent"]
    assert after["run_id"] == shape_at(frames_of(results, ["B3"]), "B3")["run_id"]


def test_rounds_are_paired_by_their_number_not_by_their_place():
    before = aggregate.Arm("ok", "", np.array([1, 2, 4]), np.array([2.0, 4.0, 16.0]))
    after = aggregate.Arm("ok", "", np.array([2, 3, 4]), np.array([2.0, 1.0, 4.0]))
    assert np.exp(aggregate.paired(before, after)).tolist() == pytest.approx([2, 4])


def test_flagged_rounds_are_counted_and_not_used(tmp_path):
    """Tripled times of both arms would cancel in a ratio, so the medians of the times are looked at too."""
    rounds = [3, 4, 5, *range(20, 29)]
    write_set(tmp_path, World(shapes=[SMALL], variants=["B2", "B3"], flagged=rounds, drift=0.0))
    row = shape_at(frames_of(tmp_path, ["B2", "B3"]), "B3")
    assert (row["flagged"], row["rounds"]) == (12, 18)
    assert row["time_us"] == pytest.approx(World().time_us(name_of("B3"), SMALL), rel=0.005)
    assert step_at(frames_of(tmp_path, ["B2", "B3"]), "B2>B3")["rounds"] == 18


def test_a_round_flagged_in_one_arm_leaves_the_pair(results):
    def flag_third_round_of_source(text: str) -> str:
        lines = text.splitlines()
        at = next(i for i, line in enumerate(lines) if f",512,512,1024,3,{name_of('B2')}," in line)
        lines[at] = lines[at].removesuffix(",ok,") + ",flagged,another process (1) was on the GPU"
        return "\n".join(lines) + "\n"

    edit_csv(sweep(results, "B3"), flag_third_round_of_source)
    frames = frames_of(results)
    assert step_at(frames, "B2>B3")["rounds"] == 29
    assert step_at(frames, "B1>B3")["rounds"] == 30


def test_a_shape_with_only_flagged_rounds_is_no_number(tmp_path):
    write_set(tmp_path, World(shapes=[SMALL], variants=["B2", "B3"], flagged=range(1, 31)))
    row = shape_at(frames_of(tmp_path, ["B2", "B3"]), "B3")
    assert row["status"] == "flagged"
    assert row["reason"] == "All 30 rounds are flagged: another process (4711) was on the GPU"
    assert pd.isna(row["time_us"])
    assert step_at(frames_of(tmp_path, ["B2", "B3"]), "B2>B3")["verdict"] == "none"


@pytest.mark.parametrize("status", ["wrong", "refused", "not on this chip", "time limit", "crashed", "build failed"])
def test_a_failed_shape_is_a_row_with_its_word_and_takes_its_steps_with_it(tmp_path, status):
    failures = {(name_of("B3"), SMALL): (status, "The reason.")}
    write_set(tmp_path, World(shapes=SHAPES, variants=["B2", "B3"], failures=failures))
    frames = frames_of(tmp_path, ["B2", "B3"])
    for row in (shape_at(frames, "B3"), step_at(frames, "B2>B3")):
        assert (row["status"], row["reason"]) == (status, "The reason.")
    assert step_at(frames, "B2>B3")["verdict"] == "none"
    assert shape_at(frames, "B3", LARGE)["status"] == "ok"
    covered = frames["coverage"]
    assert covered[(covered["what"] == "sweep") & (covered["status"] == status)]["variant"].tolist() == [name_of("B3")]


def test_a_predecessor_that_was_wrong_in_the_job_fails_the_step_only(results):
    """The job leaves its rows out and says why in the manifest."""
    path = sweep(results, "B3")
    edit_csv(
        path, lambda text: "".join(x for x in text.splitlines(True) if f",512,512,1024,1,{name_of('B2')}," not in x)
    )
    rows = schemas.read_csv("sweep", path)
    gone = rows[~((rows["arm"] == name_of("B2")) & (rows["m"] == 512))]
    schemas.write_csv("sweep", gone, path)
    shapes = json.loads(path.with_suffix(".json").read_text())["shapes"]
    shapes[0]["excluded"] = {name_of("B2"): "B2 is wrong on integers."}
    edit_manifest(path, csv_sha256=sha256_file(path), shapes=shapes)
    frames = frames_of(results)
    row = step_at(frames, "B2>B3")
    assert (row["status"], row["reason"], row["verdict"]) == ("wrong", "B2 is wrong on integers.", "none")
    assert shape_at(frames, "B3")["status"] == "ok"
    assert step_at(frames, "B1>B3")["status"] == "ok"


def test_what_was_not_measured_is_not_run(results):
    sweep(results, "B3").unlink()
    frames = frames_of(results)
    assert shape_at(frames, "B3")["status"] == "not run"
    assert step_at(frames, "B2>B3")["reason"] == f"{name_of('B3')} has no sweep CSV."
    coverage = frames["coverage"]
    assert (
        coverage[(coverage["variant"] == name_of("B3")) & (coverage["what"] == "sweep")]["status"] == "not run"
    ).all()
    assert step_at(frames, "B3>B4")["status"] == "ok"


def test_a_quick_set_asks_only_for_what_its_jobs_were_given(tmp_path):
    write_set(tmp_path, World(shapes=SHAPES, floor_jobs=0, profile=""))
    coverage = frames_of(tmp_path)["coverage"]
    assert set(coverage["what"]) == {"inspect", "sweep"}
    assert (coverage["status"] == "ok").all()
    assert len(coverage[coverage["what"] == "sweep"]) == 8 * len(SHAPES)


def test_an_empty_set_is_all_not_run(tmp_path):
    aggregate.run(tmp_path, "gemm", ARCH, [name_of("B2"), name_of("B3")])
    data = aggregate.read_data(tmp_path, "gemm")
    for kind in ("shapes", "steps", "counters", "coverage"):
        assert set(data[kind]["status"]) == {"not run"}
    assert len(data["shapes"]) == 2 * 10
    assert set(data["steps"]["verdict"]) == {"none"}
    assert data["floor"]["floor_percent"].isna().all()


# Evidence


def test_steps_whose_ctas_per_sm_differ_are_not_controlled(tmp_path):
    write_set(tmp_path, World(shapes=[SMALL], ctas={name_of("B4"): 1}))
    frames = frames_of(tmp_path)
    steps = frames["steps"]
    assert set(steps[~steps["controlled"]]["step"]) == {"B3>B4", "B4>B6"}
    row = step_at(frames, "B3>B4")
    assert row["reason"] == "Not controlled: B3 has 2 CTAs per SM and B4 1."
    assert row["status"] == "ok"


def test_missing_evidence_and_a_missing_inspection_are_not_controlled(results):
    folder = results / "csv" / "inspect" / ARCH
    path = folder / f"{name_of('B5')}.csv"
    path.write_text(path.read_text().replace("mma.sync,32,ok,", "mma.sync,0,evidence missing,No HMMA in the loop."))
    (folder / f"{name_of('B0')}.csv").unlink()
    frames = frames_of(results)
    assert step_at(frames, "B3>B5")["reason"] == "Not controlled: B5, evidence missing: No HMMA in the loop."
    assert "B0" in step_at(frames, "B0>B1")["reason"]
    assert not step_at(frames, "B3>B5")["controlled"]
    assert not step_at(frames, "B0>B1")["controlled"]
    assert step_at(frames, "B2>B3")["controlled"]
    coverage = frames["coverage"].set_index(["what", "variant"])["status"]
    assert coverage["inspect", name_of("B5")] == "evidence missing"


def test_changes_hold_what_moved_and_registers_and_ctas_always(pristine):
    changes = frames_of(pristine)["changes"]
    rows = changes[(changes["step"] == "B2>B3") & (changes["kind"] != "opcode_total")]
    assert rows[["kind", "name", "before", "after"]].values.tolist() == [
        ["resource", "registers", 126, 122],
        ["resource", "ctas_per_sm", 2, 2],
        ["opcode", "LDG.E.128", 4, 0],
        ["opcode", "LDGSTS.E.BYPASS.128", 0, 4],
        ["opcode", "STS.128", 4, 0],
    ]


# Floor


def test_the_floor_of_each_class_sees_what_separates_the_jobs(tmp_path):
    write_set(tmp_path, World(shapes=SHAPES, variants=["B2", "B3"], noise=0.0005, job_shift=0.005))
    floor = frames_of(tmp_path, ["B2", "B3"])["floor"].set_index("shape_class")
    for name in ("one wave", "many waves"):
        assert floor.loc[name, "between_percent"] == pytest.approx(1.0, abs=0.05)  # jobs 1 and 3 are 2 x 0.5 % apart
        assert floor.loc[name, "within_percent"] < 0.05
        assert floor.loc[name, "floor_percent"] == floor.loc[name, "between_percent"]
        assert (floor.loc[name, "shapes"], floor.loc[name, "jobs"]) == (1, 3)


def test_each_shape_is_judged_by_the_floor_of_its_class(tmp_path):
    write_set(tmp_path, World(shapes=SHAPES, variants=["B2", "B3"]))
    frames = frames_of(tmp_path, ["B2", "B3"])
    floor = frames["floor"].set_index("shape_class")["floor_percent"]
    assert step_at(frames, "B2>B3", SMALL)["floor_percent"] == floor["one wave"]
    assert step_at(frames, "B2>B3", LARGE)["floor_percent"] == floor["many waves"]
    assert floor["one wave"] != floor["many waves"]


def test_without_a_floor_there_is_a_gain_and_no_verdict(tmp_path):
    write_set(tmp_path, World(shapes=[SMALL], variants=["B2", "B3"], floor_jobs=0))
    row = step_at(frames_of(tmp_path, ["B2", "B3"]), "B2>B3")
    assert row["gain_percent"] > 5
    assert (row["verdict"], row["status"]) == ("none", "ok")
    assert "floor" in row["reason"]


def test_an_undecided_step_says_how_many_rounds_it_lacks(tmp_path):
    world = World(shapes=[SMALL], variants=["B2", "B3"], noise=0.02, job_shift=0.0)
    write_set(tmp_path, World(**{**vars(world), "gains": {name_of("B3"): -10.0}}))
    row = step_at(frames_of(tmp_path, ["B2", "B3"]), "B2>B3")
    assert row["verdict"] == "undecided"
    assert row["rounds_to_decide"] >= 1


def test_the_verdict_uses_the_interval_corrected_for_the_claims_of_the_ladder():
    """t is 2.23 at one claim and 5.05 at a hundred: only the first interval is clear of the floor."""
    median, floor = stats.Median(0.01, 0.003, 10.0, 30), stats.Floor(0.002, None, 1, 1)
    alone, among = (aggregate._judge(median, floor, claims, "") for claims in (1, 100))
    assert (alone["verdict"], among["verdict"]) == ("faster", "undecided")
    assert alone["low_percent"] == among["low_percent"] == alone["claim_low_percent"] > among["claim_low_percent"]


# Numeric contracts


def test_the_one_that_differs_from_its_contract_is_wrong_with_its_steps(tmp_path):
    write_set(tmp_path, World(shapes=SHAPES, results={(name_of("B5"), SMALL): "f" * 64}))
    frames = frames_of(tmp_path)
    row = shape_at(frames, "B5")
    assert row["status"] == "wrong"
    assert name_of("B5") in row["reason"]
    assert name_of("B0") in row["reason"]
    steps = frames["steps"]
    assert set(steps[steps["status"] == "wrong"]["step"]) == {"B3>B5", "B7>B5", "B5>B6"}
    assert (frames["shapes"]["status"] == "wrong").sum() == 1


def test_two_that_differ_are_both_wrong_since_nothing_says_which(tmp_path):
    write_set(tmp_path, World(shapes=[SMALL], variants=["B2", "B3"], results={(name_of("B3"), SMALL): "f" * 64}))
    frames = frames_of(tmp_path, ["B2", "B3"])
    assert shape_at(frames, "B2")["status"] == shape_at(frames, "B3")["status"] == "wrong"


def test_results_of_another_torch_are_not_compared(tmp_path):
    other = {name_of("B3"): {"software": {"torch": "2.14.0"}}}
    write_set(
        tmp_path,
        World(shapes=[SMALL], variants=["B2", "B3"], results={(name_of("B3"), SMALL): "f" * 64}, manifests=other),
    )
    assert set(frames_of(tmp_path, ["B2", "B3"])["shapes"]["status"]) == {"ok"}


# Refusals


def test_a_row_above_the_peak_is_refused_and_named(results):
    """4096^3 in 100 us would be 1374 TFLOP/s; the peak at 1980 MHz is 1070."""
    path = sweep(results, "B3")
    rows = schemas.read_csv("sweep", path)
    at = rows.index[(rows["m"] == 4096) & (rows["arm"] == name_of("B3"))][4]
    rows.loc[at, "time_us"] = 100.0
    schemas.write_csv("sweep", rows, path)
    edit_manifest(path, csv_sha256=sha256_file(path))
    frames = frames_of(results)
    row = shape_at(frames, "B3", LARGE)
    assert row["status"] == "implausible"
    assert row["reason"].startswith(f"Round 5 of {name_of('B3')} reads 1374 TFLOP/s, above the peak of")
    assert pd.isna(row["tflops"])
    assert step_at(frames, "B2>B3", LARGE)["status"] == "implausible"
    assert step_at(frames, "B3>B5", LARGE)["status"] == "ok"
    assert shape_at(frames, "B3", SMALL)["status"] == "ok"


def test_without_a_clock_reading_the_peak_is_that_of_the_highest_clock(results):
    path = sweep(results, "B3")
    rows = schemas.read_csv("sweep", path).assign(sm_mhz=None)
    rows.loc[rows["m"] == 4096, "time_us"] = 129.5  # 1061 TFLOP/s: under the peak at 1980 MHz
    rows.loc[(rows["m"] == 4096) & (rows["arm"] == name_of("B2")), "time_us"] = 120.0  # 1145: above
    schemas.write_csv("sweep", rows, path)
    edit_manifest(path, csv_sha256=sha256_file(path))
    frames = frames_of(results)
    assert shape_at(frames, "B3", LARGE)["status"] == "ok"
    assert step_at(frames, "B2>B3", LARGE)["status"] == "implausible"


def refusal(results: Path) -> str:
    with pytest.raises(RungsError) as caught:
        frames_of(results, ["B2", "B3", "B5"])
    message = str(caught.value)
    assert message.endswith(".")
    assert "run" in message
    return message


def test_a_csv_changed_by_hand_is_refused(results):
    edit_csv(sweep(results, "B3"), lambda text: text.replace(",1980", ",1981", 1), honest=False)
    edit_csv(sweep(results, "B3"), lambda text: text.replace("power cap", "power cup", 1), honest=False)
    assert f"{name_of('B3')}.csv was edited or cut" in refusal(results)


@pytest.mark.parametrize("honest", [True, False])
def test_a_csv_cut_in_half_is_refused(results, honest):
    edit_csv(sweep(results, "B3"), lambda text: text[: len(text) // 2], honest)
    assert f"{name_of('B3')}.csv" in refusal(results)


def test_a_time_of_zero_is_refused(results):
    rows = sweep(results, "B3").read_text().splitlines(True)
    cells = rows[5].split(",")
    edit_csv(sweep(results, "B3"), lambda text: text.replace(rows[5], ",".join([*cells[:8], "0.0", *cells[9:]])))
    assert "row 6: time_us is '0.0'" in refusal(results)


def test_a_row_that_is_ok_without_a_time_is_refused(results):
    rows = sweep(results, "B3").read_text().splitlines(True)
    cells = rows[5].split(",")
    edit_csv(sweep(results, "B3"), lambda text: text.replace(rows[5], ",".join([*cells[:8], "", *cells[9:]])))
    assert "row 6: status is ok without a time_us" in refusal(results)


def test_a_csv_without_its_manifest_is_refused(results):
    sweep(results, "B3").with_suffix(".json").unlink()
    assert "has no manifest" in refusal(results)


def test_rows_of_another_run_are_refused(results):
    edit_manifest(sweep(results, "B3"), run_id="deadbeef")
    message = refusal(results)
    assert "run_id is" in message
    assert "deadbeef" in message


def test_a_csv_under_another_variants_name_is_refused(results):
    for suffix in (".csv", ".json"):
        shutil.copy(sweep(results, "B2").with_suffix(suffix), sweep(results, "B3").with_suffix(suffix))
    assert f"was measured with {name_of('B2')}, not {name_of('B3')}" in refusal(results)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"fill": "zeros"}, "never mixes fills"),
        ({"l2": "cold"}, "L2 policy cold"),
        ({"gpu": {"name": "NVIDIA H100"}}, "GPU NVIDIA H100"),
        ({"protocol": {"hash": "feedfacefeedface"}}, "protocol feedfacefeedface"),
        ({"dtype": "float16", "control": {"dtype": "float16"}}, "data type float16"),
        ({"control": {"dtype": "float32"}}, "the control ran in float32 and the variant in bfloat16"),
        ({"arch": "sm_100a"}, "binary for sm_100a, not sm_90a"),
    ],
)
@pytest.mark.parametrize("which", ["sweep", "floor"])
def test_what_one_table_must_not_mix_is_refused_by_name(results, keys, words, which):
    """Rows 8 and 9 of the cases. Kind: two results side by side that differ in more than what the table says they do."""
    path = sweep(results, "B5") if which == "sweep" else results / "csv" / "floor" / "gemm" / "2.csv"
    edit_manifest(path, **keys)
    message = refusal(results)
    assert words in message
    assert path.name in message


def test_a_profile_of_another_gpu_is_refused(profiled):
    edit_manifest(profiled / "csv" / "profile" / "gemm" / f"{name_of('B5')}.csv", gpu={"name": "NVIDIA H100"})
    assert "GPU NVIDIA H100" in refusal(profiled)


def test_two_gpus_of_one_model_make_one_set(results):
    edit_manifest(sweep(results, "B5"), gpu={"uuid": "GPU-11111111-1111-1111-1111-111111111111"})
    assert set(frames_of(results)["shapes"]["status"]) == {"ok"}


# Counters


def test_counters_are_named_by_what_they_mean(profiled):
    counters = frames_of(profiled, ["B3", "B5"])["counters"]
    rows = counters[(counters["variant"] == name_of("B3")) & (counters["m"] == 4096)].set_index("metric")
    assert rows.loc["smsp__inst_executed_op_ldgsts.sum", "want"] == "cp.async executed"
    assert rows.loc["dram__bytes.sum", "want"] == "DRAM bytes"
    assert rows.loc["smsp__inst_executed_op_tma_ld.sum", "value"] == 0


def test_a_metric_that_nothing_wants_keeps_its_name(profiled):
    path = profiled / "csv" / "profile" / "gemm" / f"{name_of('B3')}.csv"
    edit_csv(path, lambda text: text.replace("dram__bytes.sum", "dram__bytes_write.sum"))
    counters = frames_of(profiled, ["B3", "B5"])["counters"]
    assert "dram__bytes_write.sum" in set(counters["want"])


@pytest.mark.parametrize("word", ["not permitted", "kernel not matched", "not on this chip"])
def test_the_word_of_a_gap_is_kept(tmp_path, word):
    write_set(tmp_path, World(shapes=[LARGE], variants=["B2", "B3"], profile=word))
    frames = frames_of(tmp_path, ["B2", "B3"])
    assert set(frames["counters"]["status"]) == {word}
    coverage = frames["coverage"]
    assert set(coverage[coverage["what"] == "profile"]["status"]) == {word}
    assert set(frames["shapes"]["status"]) == {"ok"}


def test_facts_are_those_of_the_manifests(profiled):
    edit_manifest(sweep(profiled, "B5"), measured_at="2026-11-30T08:00:00Z")
    facts = aggregate.facts_of(profiled, "gemm")
    assert (facts.gpu, facts.driver, facts.fill, facts.l2) == ("NVIDIA H200", "580.65.06", "normal", "hot")
    assert facts.clock == "clock observed, not locked"
    assert facts.dates == "2026-11-29 to 2026-11-30"
    assert len(facts.sweeps) == len(facts.profiles) == 2


def test_a_floor_job_alone_has_a_floor(tmp_path):
    world = World(shapes=[SMALL], variants=["B3"])
    write_sweep(tmp_path, world, EXPERIMENT.floor_variant, 1)
    floor = frames_of(tmp_path, ["B3"])["floor"].set_index("shape_class")
    assert floor.loc["one wave", "jobs"] == 1
    assert pd.isna(floor.loc["one wave", "between_percent"])
    assert floor.loc["one wave", "floor_percent"] == floor.loc["one wave", "within_percent"]


def test_between_jobs_the_floor_compares_steps_and_falls_back_to_the_control(tmp_path):
    rounds = np.arange(1, 21)

    def arm(time_us: float) -> aggregate.Arm:
        return aggregate.Arm("ok", "", rounds, np.full(20, time_us), np.full(20, 1700.0), np.full(20, 300.0))

    name = EXPERIMENT.floor_variant.name
    jobs = [aggregate.Recording(tmp_path / f"{job}.csv", {"variant": name}, pd.DataFrame()) for job in (1, 2)]
    device = variants.load_device("sm_90a")

    def floor(*arms: dict) -> stats.Floor:
        found = aggregate._floors(EXPERIMENT, device, jobs, [{SMALL: each} for each in arms], 132)
        return found["one wave"]

    with_predecessor = floor(
        {name: arm(10.0), "twin": arm(10.01), "before": arm(11.0), "control": arm(5.0)},
        {name: arm(10.0), "twin": arm(10.01), "before": arm(11.022), "control": arm(5.5)},
    )
    assert with_predecessor.within == pytest.approx(np.log(1.001))
    assert with_predecessor.between == pytest.approx(np.log(1.002))
    without = floor(
        {name: arm(10.0), "twin": arm(10.01), "control": arm(5.0)},
        {name: arm(10.0), "twin": arm(10.01), "control": arm(5.5)},
    )
    assert without.between == pytest.approx(np.log(1.1))


# Scale


def test_fifty_thousand_rounds_take_seconds_and_little_memory(tmp_path):
    """benchmarks/aggregate_time.py has the figures of a million; bounds are three times what a loaded machine needs."""
    names = [name_of(f"B{rung}") for rung in range(8)]
    rounds, jobs = 2275, len(names) + 3
    write_set(tmp_path / "h200", World(variants=names, shapes=SHAPES, rounds=rounds, profile=""))
    assert rounds * jobs * len(SHAPES) > 50_000
    _, busy, peak = benchmark("aggregate_time").aggregated(tmp_path / "h200", names)
    assert busy < 20 and peak < 500 * 2**20
    frame = schemas.read_csv("shapes", tmp_path / "h200" / "data" / "gemm" / "shapes.csv")
    assert len(frame) == len(names) * len(SHAPES) and (frame["rounds"] == rounds).all()
