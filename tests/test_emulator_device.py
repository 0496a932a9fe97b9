"""The emulator as a device: checks, statuses, the recorded counters beside the emulator's, and the rules by which they agree."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from binaries import built
from rungs import cli, countpages, counts, equality, schemas
from rungs.emulator import device
from rungs.emulator.problem import Outcome
from rungs.emulator.state import Finding
from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.inspect import Instruction
from rungs.results import ResultsSet, write_recorded
from rungs.variants import WITH_AXES, load_experiment

ARCH = "sm_90a"
GEMM, TUNED = load_experiment("gemm"), load_experiment("gemm_tuned")
H200 = ROOT / "results/recorded/h200"
RUNGS = {v.name for ladder in GEMM.ladders.values() for v in ladder.rungs.values()}
B3, T = "abl_L1_R1_bl1_s2_sw1", TUNED.ladders["T"]


# ---- a job -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "name", "small"),
    [
        (GEMM, B3, ((128, 256, 128), None)),
        (GEMM, "abl_L2_R1_bl1_s4_sw1", ((128, 256, 192), None)),
        (TUNED, "tun_bk64_wt64_s4_pw1_db1_ps1_ep1_sk1", ((256, 512, 384), 2)),
    ],
)
def test_the_small_problem_has_two_ctas_and_goes_round_the_ring(experiment, name, small):
    assert device.small_problem(experiment, experiment.variant(name), ARCH) == small


def test_a_persistent_variant_is_right_and_counted(tmp_path):
    name = "tun_bk64_wt64_s4_pw1_db1_ps1_ep1_sk1"
    output = tmp_path / "t.csv"
    device.emulate(TUNED, TUNED.variant(name), ARCH, built(name, ARCH), [(512, 512, 256)], output)
    frame = schemas.read_csv("emulate", output)
    assert set(frame["status"]) == {"ok"}
    value = dict(zip(frame["metric"], frame["value"], strict=True))
    assert value["check in lockstep"] == value["check warp by warp"] == 0
    assert value["hmma"] == 512 * 512 * 256 // (16 * 8 * 16)
    assert value["bytes_tma_load"] == 2 * 256 * (128 + 256) * 4 * 2
    manifest = schemas.read_manifest(output.with_suffix(".json"))
    assert set(frame["run_id"]) == {manifest["run_id"]} and manifest["checks"]["sms"] == 2


def test_the_same_job_writes_the_same_bytes(tmp_path):
    for folder in "ab":
        device.emulate(GEMM, GEMM.variant(B3), ARCH, built(B3, ARCH), [(512, 512, 256)], tmp_path / folder / "x.csv")
    assert (tmp_path / "a/x.csv").read_bytes() == (tmp_path / "b/x.csv").read_bytes()


def test_a_variant_that_the_chip_lacks_or_that_did_not_build_has_a_row_for_each_shape(tmp_path):
    name = "abl_L2_R1_bl1_s2_sw1"
    output = tmp_path / "x.csv"
    shapes = [(512, 512, 256), (512, 512, 512)]
    device.emulate(GEMM, GEMM.variant(name), "sm_80", built(name, "sm_80"), shapes, output)
    frame = schemas.read_csv("emulate", output)
    assert [tuple(row) for row in frame[["m", "n", "k"]].itertuples(index=False)] == shapes
    assert set(frame["status"]) == {"not on this chip"} and set(frame["metric"]) == {"all"}
    assert frame["reason"].iloc[0] == f"{name}: TMA needs one of sm_90a, sm_100a, sm_120, not sm_80."


def test_ptx_that_is_not_that_of_its_manifest_is_refused(tmp_path, capsys):
    manifest = built(B3, ARCH)
    copy = tmp_path / manifest.name
    copy.write_bytes(manifest.read_bytes())
    copy.with_suffix(".ptx").write_text(manifest.with_suffix(".ptx").read_text() + "\n")
    arguments = ["emulate-rung", "--experiment", "gemm", "--variant", B3, "--arch", ARCH, "--manifest", str(copy)]
    assert cli.main([*arguments, "--shapes", "[[512, 512, 256]]", "--output", str(tmp_path / "x.csv")]) == 1
    assert capsys.readouterr().err.endswith("delete its folder and build it again.\n")
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (Outcome((1, 2, 3), [0], True, 0.0), "ok", ""),
        (
            Outcome((1, 2, 3), [0], False, 2.0),
            "wrong",
            "At 1x2x3 the result differs from numpy's by up to 2, where integers must be equal.",
        ),
        (Outcome((1, 2, 3), [0], False, float("nan"), "It stands."), "stopped", "At 1x2x3: It stands."),
        (
            Outcome((1, 2, 3), [0], False, 2.0, "It stands.", findings=[Finding("race", "Line 1.", (1,), ("a",))]),
            "race",
            "At 1x2x3, race: Line 1.",
        ),
    ],
)
def test_a_race_is_named_before_what_it_leads_to(outcome, status, reason):
    assert device.judge(load_experiment("gemm"), outcome) == (status, reason)


# ---- tables ----------------------------------------------------------------------------------------------------------


def cell(kinds: dict[str, tuple[float, float | None]], status: str = "ok") -> counts.Cell:
    """`kinds`: instructions and wavefronts, of one tile."""
    rows = [
        {
            "kind": kind,
            "instructions": n,
            "wavefronts": w,
            "conflicts": 0.0,
            "instructions_per_tile": n,
            "wavefronts_per_tile": w,
        }
        for kind, (n, w) in kinds.items()
    ]
    frame = pd.DataFrame(rows or [{"kind": "all"}]).assign(status=status, reason="")
    return counts.Cell(frame)


def test_wavefronts_are_those_of_shared_memory_and_tma_is_no_lsu_instruction():
    found = cell({"ldsm": (96, 384), "ldgsts": (32, 256), "tma_load": (2, None), "stg": (1, None), "hmma": (256, None)})
    assert (found.wavefronts_per_tile, found.lsu_per_tile) == (640, 129)
    assert countpages.row(found)[:6] == ["0", "96", "0", "32", "2", "256"]
    assert countpages.row(found)[6:8] == ["640", "5.00"]


def test_a_conclusion_names_rungs_and_a_gap_says_its_status():
    ladder, shape = GEMM.ladders["S"], (512, 512, 256)
    waves = dict(zip(ladder.rungs.values(), (10, 5, 8, 5), strict=True))
    cells = {(v.name, shape): cell({"ldsm": (5, n)}) for v, n in waves.items()}
    assert countpages.conclusion(load_experiment("gemm"), ladder, cells, shape) == (
        "At 512x512x256 S1, S3 (5, 5 per tile) need the fewest shared-memory wavefronts, and S0 (10, 10 per tile) needs the most;"
        " from S2 to S3 there are 37.5 % fewer wavefronts and as many LSU instructions."
    )
    assert countpages.row(cell({}, "race"))[:2] == ["race", ""]
    assert countpages.row(None)[0] == "not run"
    assert countpages.tile_sizes(GEMM, ladder) == ""
    assert countpages.tile_sizes(TUNED, T).startswith("tiles differ in size")
    only = {key: value for key, value in list(cells.items())[:1]}
    assert countpages.conclusion(load_experiment("gemm"), ladder, only, shape).endswith(
        "so there is nothing to compare."
    )


# ---- equal to ncu ----------------------------------------------------------------------------------------------------

EMULATED = {
    name: schemas.read_csv("emulated", H200 / f"data/{name}/emulated.csv")
    for name in ("gemm", "gemm_tuned", "hopper_gemm")
}


def test_every_recorded_counter_is_equal_or_differs_by_a_known_cause():
    for frame in EMULATED.values():
        assert set(frame["agreement"]) <= {"equal", *equality.CAUSES}
        same = frame[frame["agreement"] == "equal"]
        assert (same["ncu"] == same["emulator"]).all()
        assert (frame[frame["agreement"] != "equal"]["ncu"] != frame[frame["agreement"] != "equal"]["emulator"]).all()


def test_what_must_be_equal_is_for_every_rung_at_two_shapes_and_for_the_other_variants():
    frame = EMULATED["gemm"]
    launches = frame[["variant", "m", "n", "k"]].drop_duplicates().groupby("variant").size()
    assert set(launches.index) == {v.name for v in GEMM.estimable()}
    assert all(launches[name] == 2 for name in RUNGS)
    assert set(EMULATED["gemm_tuned"]["variant"]) == {v.name for v in T.rungs.values()}
    exact = set(equality.MUST) - {equality.LDS, *equality.PATCHED}
    for each in EMULATED.values():
        assert set(each[each["metric"].isin(exact)]["agreement"]) == {"equal"}


def test_the_known_causes_are_where_they_are_said_to_be():
    frame = EMULATED["gemm"]
    patched = frame[frame["agreement"] == "first tile left out"]
    assert set(patched["metric"]) == set(equality.PATCHED) and patched["variant"].nunique() == 13
    assert all(name.startswith("abl_L1_") for name in patched["variant"])
    fillers = frame[frame["agreement"] == "fillers"]
    assert set(fillers["metric"]) == {equality.LDS} and all(name.startswith("abl_L1_") for name in fillers["variant"])
    conflicts = frame[frame["agreement"] == "other warps"]
    assert (conflicts["ncu"] > conflicts["emulator"]).all()


def test_the_recorded_columns_are_the_recorded_profiles():
    for name, frame in EMULATED.items():
        for variant, rows in list(frame.groupby("variant"))[::10]:
            recorded = ResultsSet(H200).job("profile", name, variant).frame("profile")
            assert set(rows["run_id"]) == set(recorded["run_id"])
            value = recorded.set_index(["m", "n", "k", "metric"])["value"]
            assert all(value[r.m, r.n, r.k, r.metric] == r.ncu for r in rows.itertuples())


@pytest.mark.parametrize("name", [B3, "abl_L0_R2_bl1_s2_sw0", "abl_L1_R1_bl1_s3_sw1", "abl_L2_R0_bl0_s4_sw1"])
def test_the_emulators_column_is_what_it_counts_now(name):
    rows = equality.compare(ResultsSet(H200), GEMM, GEMM.variant(name), "pip")
    now = pd.DataFrame(rows).sort_values(["m", "metric"]).reset_index(drop=True)
    then = EMULATED["gemm"][EMULATED["gemm"]["variant"] == name]
    then = then.sort_values(["m", "metric"]).reset_index(drop=True)
    assert now[list(then.columns)].values.tolist() == then.values.tolist()


def test_a_pair_of_counts_that_lacks_one_is_one_sentence(tmp_path):
    path = tmp_path / "data" / "gemm" / "emulated.csv"
    path.parent.mkdir(parents=True)
    row = f"r,{B3},512,512,256,smsp__inst_executed_op_ldsm.sum,"
    path.write_text(f"{','.join(schemas.columns('emulated'))}\n{row}1,1,equal\n{row.replace('512', '256')},1,equal\n")
    with pytest.raises(RungsError, match=rf"^{path}, row 3: agreement is 'equal' and a count is missing: run .*\.$"):
        equality.render(tmp_path, "gemm")


def test_the_page_and_the_readme_count_what_is_equal():
    page = (H200 / "md/gemm_counters.md").read_text()
    assert page == equality.render(H200, "gemm")
    told = re.search(r"\*\*(\d+) of (\d+) counters, of (\d+) launches of 100 binaries, are equal", page)
    assert told and int(told[1]) == (EMULATED["gemm"]["agreement"] == "equal").sum()
    assert "; 0 differ without a known cause.**" in page
    assert told[0] in (ROOT / "README.md").read_text()
    assert page.count("\n| abl_") == int(told[3])


LAUNCH = equality.Launch(warps=8, depth=128, stages=3, m=512)


def sass(predicate: str, opcode: str) -> list[Instruction]:
    return [Instruction(0, predicate, opcode, "")]


@pytest.mark.parametrize(
    ("metric", "ncu", "emulator", "code", "word"),
    [
        ("any", 7, 7, [], "equal"),
        ("any", 7, 8, [], "differs"),
        (equality.PATCHED[0], 127, 128, sass("@P0", "LDGSTS.E.128"), "first tile left out"),
        (equality.PATCHED[0], 127, 128, sass("", "LDGSTS.E.128"), "differs"),
        (equality.PATCHED[0], 126, 128, sass("@P0", "LDGSTS.E.128"), "differs"),
        (equality.LDS, 100 + 3 * 8 * 128, 100, sass("@!PT", "LDS"), "fillers"),
        (equality.LDS, 100 + 3 * 8 * 126, 100, sass("@!PT", "LDS"), "fillers"),
        (equality.LDS, 100 + 3 * 8 * 125, 100, sass("@!PT", "LDS"), "differs"),
        (equality.LDS, 101 + 3 * 8 * 128, 100, sass("@!PT", "LDS"), "differs"),
        (equality.LDS, 100 + 3 * 8 * 128, 100, sass("", "LDS"), "differs"),
        (equality.CONFLICTS[0], 20, 10, [], "other warps"),
        (equality.CONFLICTS[0], 9, 10, [], "differs"),
        (equality.CONFLICTS[0], 41, 10, [], "differs"),
        (equality.FETCHED, 9990, 10000, [], "found in L1"),
        (equality.FETCHED, 10096, 10000, sass("", "LDG.E.STRONG.GPU"), "polls"),
        (equality.FETCHED, 10095, 10000, sass("", "LDG.E.STRONG.GPU"), "differs"),
        (equality.FETCHED, 10096, 10000, sass("", "LDG.E.128"), "differs"),
        (equality.FETCHED, 9979, 10000, [], "differs"),
        (equality.FETCHED, 10001, 10000, [], "differs"),
    ],
)
def test_a_difference_has_a_cause_only_to_the_last_count(metric, ncu, emulator, code, word):
    assert equality.agreement(metric, ncu, emulator, {"wavefronts_lds": 100}, code, LAUNCH) == word


def test_what_wgmma_holds_up_is_a_cause_of_its_own():
    """On the chip the banks are shared with wgmma's reads and the copy engine's: more conflicts, never fewer."""
    counts = {"wavefronts_stsm": 100, "hgmma": 1}
    for ncu, word in ((190, "other engines"), (211, "differs"), (9, "differs")):
        assert equality.agreement(equality.CONFLICTS[0], ncu, 10, counts, [], LAUNCH) == word


def test_the_wgmma_kernels_counters_are_equal_to_the_last_count():
    """HGMMA, what the copy engine executes, where multicast lands, and reads of another CTA's shared memory, which no SM counts."""
    frame = EMULATED["hopper_gemm"]
    conflicts, fetched = (frame["metric"].isin(metrics) for metrics in (equality.CONFLICTS, [equality.FETCHED]))
    assert set(frame[~conflicts & ~fetched]["agreement"]) == {"equal"}
    assert set(frame[conflicts]["agreement"]) <= {"equal", "other engines"}
    meet = frame["variant"].str.contains("_x1_")  # who waits in global memory asks again
    assert set(frame[fetched & meet]["agreement"]) <= {"equal", "polls"}
    assert set(frame[fetched & ~meet]["agreement"]) <= {"equal"}
    shown = set(frame["metric"])
    assert {"sm__inst_executed_pipe_tensor_op_gmma.sum", "smsp__inst_executed_pipe_tma.sum"} <= shown


def test_another_binary_is_not_compared(tmp_path):
    job = ResultsSet(H200).job("profile", "gemm", B3)
    other = {**job.manifest, "binary": {**job.manifest["binary"], "code_hash": "0"}}
    write_recorded(tmp_path, "profile", "gemm", {B3: (job.csv, other)})
    rows = equality.compare(ResultsSet(tmp_path), GEMM, GEMM.variant(B3), "pip")
    assert [(row["metric"], row["agreement"]) for row in rows] == [("all", "other binary")] * 2
    frame = pd.DataFrame(rows)
    assert "1 binaries are other ones now" in equality.sentence(frame)


def test_a_folder_without_profiles_is_refused(tmp_path, capsys):
    assert cli.main(["emulate-recorded", str(tmp_path)]) == 1
    assert "has no profiles: name a set that has" in capsys.readouterr().err


def test_affine_counts_of_several_shapes_share_their_runs():
    from rungs.emulator.problem import affine_counts

    ran: dict = {}
    path, variant = built(B3, ARCH).with_suffix(".ptx"), GEMM.variant(B3)
    shapes = [(512, 512, k) for k in (256, 1024, 4096)]
    shared = [affine_counts(GEMM, variant, ARCH, path, shape, ran=ran) for shape in shapes]
    assert shared == [affine_counts(GEMM, variant, ARCH, path, shape) for shape in shapes]
    assert len(ran) == 4 and np.diff([c["ldgsts"] for c in shared]).tolist() == [12288, 49152]


def test_counts_keep_an_axis_called_like_a_quantity_apart(tmp_path):
    experiment, name = load_experiment("tma_latency"), "lat_w0_l3_d0_i0"
    csv = tmp_path / "csv/emulate/tma_latency" / f"{name}.csv"
    device.emulate(experiment, experiment.variant(name), ARCH, built(name, ARCH), [], csv)
    counts.run(tmp_path, "tma_latency", [name], "ladders")
    frame = schemas.read_csv(experiment.kind("counts"), tmp_path / "data/tma_latency/counts.csv")
    assert set(frame["status"]) == {"ok"} and set(frame["bytes"]) == {16, 64, 1024}


@pytest.mark.parametrize("name", ["smem_read", "copy_intensity", "tma_wall", "tma_latency"])
def test_no_axis_is_a_column_of_a_csv_with_axes(name):
    experiment = load_experiment(name)
    for kind in WITH_AXES:
        assert set(experiment.axis_names).isdisjoint(schemas.load_schema(f"csv/{kind}")["columns"])


def test_a_change_from_none_is_a_count():
    assert [countpages._change(*pair) for pair in ((0, 1024), (0, 0), (4, 1))] == [
        "1.02 k more",
        "as many",
        "75.0 % fewer",
    ]


@pytest.mark.parametrize("page", ["gemm_counters", "mutations"])
def test_trace_says_which_pages_it_follows(monkeypatch, capsys, page):
    monkeypatch.chdir(ROOT)
    assert cli.main(["trace", f"results/recorded/h200/md/{page}.md:B3"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"rungs: results/recorded/h200/md/{page}.md is no page that `trace` follows: give that of an"
    )
