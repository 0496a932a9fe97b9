"""A failure is data: what goes wrong is named in the CSV, the tables, the map and the verdict, and the rest is finished."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline import ARCH, RUNGS, S0, S1, S2, S3, SHAPES, STANDIN, UUID
from rungs import schemas

KINDS = {
    "nan": 256,
    "wrong": 512,
    "nothing": 768,
    "first_only": 1024,
    "zero_time": 1280,
    "some_zero": 1536,
    "abort": 1792,
    "hang": 2048,
}
FINE, TILE, ALIGNED = 2304, 272, 4100
"""K of the shapes of the failing run: one for each kind of fault of S1, one without, and two that are refused."""
NOT_BUILT = f"{S0} does not compile for sm_90a: kernels/gemm/gemm.cu:3:2: error: #error this variant does not build."
CUT = "No result after 2 s, so the process was ended and the GPU freed."
DIED = "The process ended with signal 6."


@pytest.fixture(scope="module")
def failing(complete_run, tmp_path_factory):
    """(checkout, result): S0 does not build, S1 has every fault at a shape of its own, S2 dies at one shape and hangs at another."""
    checkout = complete_run[0].copy(tmp_path_factory.mktemp("failing") / "run")
    shutil.rmtree(checkout.live / "csv" / "profile")
    checkout.configure(
        axes={"mn": [512], "k": [TILE, ALIGNED, *KINDS.values(), FINE]},
        measure={"time_limit_s": 2, "rounds_max": 20},
        profile={"enabled": False},
    )
    checkout.edit(
        "kernels/gemm/gemm.cu",
        "\n",
        "\n#if VARIANT_B_LAYOUT == 0 && VARIANT_SWIZZLE == 0\n#error this variant does not build\n#endif\n",
    )
    checkout.fault(
        **{
            S1: [{"kind": kind, "shape": [512, 512, k]} for kind, k in KINDS.items()],
            S2: [{"kind": "abort", "shape": [512, 512, 256]}, {"kind": "hang", "shape": [512, 512, 512]}],
        }
    )
    return checkout, checkout.snakemake("--cores", "2", "all")


def outcomes(checkout, variant):
    """K -> (status, reason) of a variant's sweep; `ok` where it was timed."""
    frame = schemas.read_csv("sweep", checkout.csv("sweep", variant))
    return {k: (rows["status"].iloc[0], rows["reason"].iloc[0]) for k, rows in frame.groupby("k")}


def test_failing_run_finishes_the_rest_and_then_fails(failing):
    checkout, result = failing
    assert result.code == 1
    assert result.of("sweep") == sorted(RUNGS) and result.of("floor") == ["1", "2", "3"]
    assert {"aggregate", "plot_heatmap", "plot_ladder", "make_tables", "make_index", "verdict"} <= result.rules
    for leaf in ("figures/gemm/heatmap_S.svg", "figures/gemm/ladder_S.png", "md/gemm.md", "README.md"):
        assert (checkout.live / leaf).stat().st_size


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        (
            "nan",
            "wrong",
            f"{S1} is wrong on integers whose sums are exact (262144 elements are NaN or were not written).",
        ),
        ("wrong", "wrong", f"{S1} is wrong on integers whose sums are exact."),
        (
            "nothing",
            "wrong",
            f"{S1} is wrong on integers whose sums are exact (262144 elements are NaN or were not written).",
        ),
        (
            "first_only",
            "wrong",
            f"{S1} gives another result after timing than before (262144 elements are NaN or were not written).",
        ),
        ("zero_time", "implausible", f"{S1} at 512x512x1280: a sample lasted 0 us, which no launch can."),
        ("abort", "crashed", DIED),
        ("hang", "time limit", CUT),
    ],
)
def test_fault_is_a_row_with_its_status_and_reason(failing, kind, status, reason):
    assert outcomes(failing[0], S1)[KINDS[kind]] == (status, reason)


def test_single_time_of_zero_refuses_the_shape(failing):
    outcome = outcomes(failing[0], S1)[KINDS["some_zero"]]
    assert outcome == ("implausible", f"{S1} at 512x512x1536: a sample lasted 0 us, which no launch can.")
    frame = schemas.read_csv("shapes", failing[0].live / "data" / "gemm" / "shapes.csv")
    assert not frame[(frame["variant"] == S1) & frame["time_us"].notna()]["k"].isin(list(KINDS.values())).any()


@pytest.mark.parametrize("variant", [S1, S2, S3])
@pytest.mark.parametrize(
    ("k", "reason"),
    [
        (TILE, "K=272 is not a positive multiple of BK=32: choose a multiple of 32."),
        (
            ALIGNED,
            "K=4100 gives rows of 8200 bytes, which is not a multiple of the 16 bytes that every load mode moves at once:"
            " choose K as a multiple of 8.",
        ),
    ],
)
def test_refused_shape_names_the_rule(failing, variant, k, reason):
    assert outcomes(failing[0], variant)[k] == ("refused", reason)


def test_variant_that_does_not_build_is_named_at_every_shape(failing):
    checkout, _ = failing
    assert set(outcomes(checkout, S0).values()) == {("build failed", NOT_BUILT)}
    assert set(schemas.read_csv("inspect", checkout.live / "csv" / "inspect" / ARCH / f"{S0}.csv")["status"]) == {
        "build failed"
    }
    manifest = json.loads(checkout.csv("sweep", S1).with_suffix(".json").read_text())
    assert manifest["not_timed"] == {S0: NOT_BUILT} and list(manifest["arms"]) == [S1]


def test_other_shapes_and_rungs_are_measured(failing):
    checkout, _ = failing
    fine = {k for k in (*KINDS.values(), FINE)}
    assert {k for k, (status, _) in outcomes(checkout, S1).items() if status == "ok"} == {FINE}
    assert {k for k, (status, _) in outcomes(checkout, S2).items() if status == "ok"} == fine - {256, 512}
    assert {k for k, (status, _) in outcomes(checkout, S3).items() if status == "ok"} == fine
    assert outcomes(checkout, S2)[256] == ("crashed", DIED) and outcomes(checkout, S2)[512] == ("time limit", CUT)


def test_fault_of_a_predecessor_is_not_the_rungs(failing):
    """S3 is timed without S2 where S2 dies or hangs, and its manifest says why."""
    checkout, _ = failing
    frame = schemas.read_csv("sweep", checkout.csv("sweep", S3))
    arms = {k: set(rows["arm"]) for k, rows in frame[frame["status"] == "ok"].groupby("k")}
    assert arms[256] == arms[512] == {S3, "control"}
    assert arms[768] == {S2, S3, "control"}
    manifest = json.loads(checkout.csv("sweep", S3).with_suffix(".json").read_text())
    lost = {shape["k"]: shape.get("lost") for shape in manifest["shapes"]}
    assert lost[256] == {S2: {"status": "crashed", "reason": DIED}}
    assert lost[512] == {S2: {"status": "time limit", "reason": CUT}}
    assert lost[768] == {}
    steps = schemas.read_csv("steps", checkout.live / "data" / "gemm" / "steps.csv")
    status = steps[steps["step"] == "S2>S3"].set_index("k")["status"]
    assert status[768] == "ok" and "ok" not in (status[256], status[512])


def test_tables_and_map_show_the_words(failing):
    checkout, _ = failing
    page = (checkout.live / "md" / "gemm.md").read_text()
    first = page.split("### Steps")[0]
    cells_of = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:-1]]
        for line in first.splitlines()
        if line.startswith("| S")
    }
    assert set(cells_of["S0"]) == {"build failed"}
    cells = cells_of["S1"]
    words = ["wrong", "refused", "wrong", "wrong", "wrong", "implausible", "implausible", "crashed", "time limit"]
    assert cells[:9] == words and cells[-1] == "refused" and "%" in cells[9]
    for reason in (NOT_BUILT, CUT, DIED):
        assert reason in page
    drawn = (checkout.live / "figures" / "gemm" / "heatmap_S.svg").read_text()
    for word in ("wrong", "refused", "implausible", "crashed", "time limit", "failed"):  # a narrow cell breaks its line
        assert f">{word}</text>" in drawn, word


def test_verdict_names_every_variant_with_its_reason(failing):
    _, result = failing
    said = [line for line in result.said if line.startswith("rungs: abl_")]
    assert f"rungs: {S0}, inspect: build failed: {NOT_BUILT}" in said
    assert f"rungs: {S0}, sweep at 11 shapes: build failed: {NOT_BUILT}" in said
    assert f"rungs: {S1}, sweep at 512x512x1792: crashed: {DIED}" in said
    assert f"rungs: {S2}, sweep at 512x512x512: time limit: {CUT}" in said
    assert not [line for line in said if line.startswith(f"rungs: {S3}") and "refused" not in line]
    assert len(said) == len(set(said))
    assert all(line.endswith(".") for line in said)


def test_failed_run_fails_again_and_measures_nothing(failing):
    checkout, _ = failing
    assert checkout.planned("all").jobs == ["verdict: results/h200/data/verdict.json"]


# ---- what the chip lacks ----


@pytest.fixture
def with_tma(checkout):
    """Ladder S with a TMA rung at its end."""
    checkout.edit(
        "config/experiments/gemm.yaml",
        "      S3: {b_layout: 1, swizzle: 1}\n",
        "      S3: {b_layout: 1, swizzle: 1}\n      S4: {b_layout: 1, swizzle: 1, load: 2}\n",
    )
    checkout.edit("config/experiments/gemm.yaml", "steps: [S0>S1, S2>S3]", "steps: [S0>S1, S2>S3, S3>S4]")
    return checkout


TMA = "abl_L2_R1_bl1_s2_sw1"
LACKING = f"{TMA}: TMA needs one of sm_90a, sm_100a, sm_120, not sm_80."


def test_level_that_the_chip_lacks_fails_nothing(with_tma):
    result = with_tma.snakemake("--cores", "2", "all", "--config", "device=emulator", "arch=sm_80")
    assert result.code == 0, result.text
    results = with_tma.repo / "results" / "emulator"
    frame = schemas.read_csv("inspect", results / "csv" / "inspect" / "sm_80" / f"{TMA}.csv")
    assert set(frame["status"]) == {"not on this chip"} and set(frame["reason"]) == {LACKING}
    assert json.loads((results / "data" / "verdict.json").read_text()) == {"failed": 0, "failures": [], "readme": ""}
    assert len([job for job in result.of("inspect") if job != TMA]) == 4
    counted = schemas.read_csv("emulate", results / "csv" / "emulate" / "gemm" / f"{TMA}.csv")
    assert set(counted["status"]) == {"not on this chip"} and set(counted["reason"]) == {LACKING}
    assert "| S4 | TMA, N x K, TMA's XOR | not on this chip |" in (results / "md" / "gemm.md").read_text()


def test_sweep_of_a_level_that_the_chip_lacks_says_so_at_every_shape(with_tma):
    with_tma.machine({"name": "NVIDIA A100-SXM4-80GB", "uuid": "GPU-a", "capability": [8, 0]})
    path = f"results/a100_sxm4_80gb/csv/sweep/gemm/{TMA}.csv"
    result = with_tma.snakemake(path)
    assert result.code == 0, result.text
    frame = schemas.read_csv("sweep", with_tma.repo / path)
    assert [tuple(row) for row in frame[["m", "n", "k"]].itertuples(index=False)] == SHAPES
    assert set(frame["status"]) == {"not on this chip"} and set(frame["reason"]) == {LACKING}


# ---- Nsight Compute ----


def gaps(frame):
    """The statuses of a profile CSV but for the counters that this chip has not."""
    return set(frame["status"]) - {"not on this chip"}


def test_counters_that_are_not_permitted_leave_the_timing_tables_complete(checkout):
    """The gap is named with its fix; what ncu says of time has no way into the timing columns."""
    data = checkout.live / "data" / "gemm"
    timing = {kind: (data / f"{kind}.csv").read_bytes() for kind in ("shapes", "steps", "floor")}
    checkout.csv("profile", S1).unlink()
    result = checkout.snakemake("all", RUNGS_STANDIN_NCU="perm")
    assert result.code == 1
    assert result.of("profile") == [S1] and result.of("sweep", "floor", "build") == []
    frame = schemas.read_csv("profile", checkout.csv("profile", S1))
    assert gaps(frame) == {"not permitted"}
    assert {kind: (data / f"{kind}.csv").read_bytes() for kind in timing} == timing
    permit = "load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    assert any(line.startswith(f"rungs: {S1}, profile at ") and permit in line for line in result.said)
    page = (checkout.live / "md" / "gemm.md").read_text()
    assert "not permitted" in page and permit in page
    heal = checkout.planned("all")
    assert heal.jobs == ["verdict: results/h200/data/verdict.json"]


@pytest.mark.parametrize(("mode", "status"), [("held", "not run"), ("nomatch", "kernel not matched")])
def test_gap_in_the_counters_has_its_word(checkout, mode, status):
    checkout.csv("profile", S1).unlink()
    result = checkout.snakemake(f"results/h200/csv/profile/gemm/{S1}.csv", RUNGS_STANDIN_NCU=mode)
    assert result.code == 0, result.text
    frame = schemas.read_csv("profile", checkout.csv("profile", S1))
    assert gaps(frame) == {status} and frame["value"].isna().all()


def test_installing_ncu_counts_what_could_not_be_counted_and_nothing_else(checkout):
    ncu = checkout.folder / "tools" / "ncu"
    checkout.configure(profile={"ncu": str(ncu)})
    result = checkout.snakemake("profiles")
    assert result.code == 0, result.text
    frame = schemas.read_csv("profile", checkout.csv("profile", S0))
    assert gaps(frame) == {"not run"}
    assert f"ncu is not installed at {ncu}: set `profile.ncu` to its path, or to auto." in set(frame["reason"])
    ncu.parent.mkdir()
    shutil.copy(STANDIN / "ncu", ncu)
    planned = checkout.planned("all")
    assert planned.of("profile") == sorted(RUNGS)
    assert planned.of("sweep", "floor", "build", "inspect") == []


# ---- compilers ----


def without(folder: Path, *names: str) -> str:
    """A PATH with every command of this one but these."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for tool in sorted(Path(place).glob("*")):
            if tool.name not in names and not (folder / tool.name).is_symlink():
                (folder / tool.name).symlink_to(tool)
    return str(folder)


def test_missing_host_compiler_is_one_sentence_and_installing_it_builds(checkout):
    shutil.rmtree(checkout.live)
    target = f"results/h200/build/{ARCH}/{S0}/{S0}.json"
    result = checkout.snakemake(target, PATH=without(checkout.folder / "bin", "g++"))
    assert result.code == 1 and "Traceback" not in result.text
    assert result.said[-1] == (
        "rungs: g++ is not on PATH, and nvcc needs a host compiler even for -ptx: install it (Debian: apt-get install g++;"
        " conda: gxx)."
    )
    assert checkout.snakemake(target).of("build") == [S0]
    assert json.loads((checkout.repo / target).read_text())["status"] == "ok"


def test_missing_nvcc_is_one_sentence_and_installing_it_builds(checkout):
    shutil.rmtree(checkout.live)
    hidden = checkout.folder / "hidden" / "nvidia"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("")
    target = f"results/h200/build/{ARCH}/{S0}/{S0}.json"
    path = os.pathsep.join([str(hidden.parent), checkout.env()["PYTHONPATH"]])
    result = checkout.snakemake(target, PYTHONPATH=path)
    assert result.code == 1 and "Traceback" not in result.text
    assert result.said[-1] == (
        "rungs: nvcc of CUDA 13.0 is not among this Python's packages: run `pip install -r envs/requirements.txt`, or use the"
        " machine's own with `--config toolchain=system`."
    )
    assert checkout.snakemake(target).of("build") == [S0]


# ---- damaged and unwritable files ----


def test_csv_cut_in_half_is_named_and_deleting_it_heals(checkout):
    path = checkout.csv("sweep", S1)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    result = checkout.snakemake("all")
    assert result.code == 1 and "Traceback" not in result.text
    named = [line for line in result.said if f"{S1}.csv" in line]
    assert named and "delete" in named[0], result.said
    assert result.of("sweep", "floor", "profile") == []
    path.unlink()
    assert checkout.planned("heatmap").of("sweep") == [S1]


def test_edited_number_is_found(checkout):
    path = checkout.csv("sweep", S1)
    lines = path.read_text().splitlines(keepends=True)
    cells = lines[1].split(",")
    cells[10] = "1.0"
    path.write_text("".join([lines[0], ",".join(cells), *lines[2:]]))
    result = checkout.snakemake("heatmap")
    assert result.code == 1 and "Traceback" not in result.text
    assert any(f"{S1}.csv" in line and "delete" in line for line in result.said), result.said


def test_a_run_says_that_its_ladder_was_split(checkout):
    manifest = checkout.csv("sweep", S2).with_suffix(".json")
    text = manifest.read_text()
    manifest.write_text(text.replace(UUID, "GPU-of-another-node"))
    checkout.csv("sweep", S3).unlink()
    result = checkout.snakemake("ladders")
    assert result.code == 0, result.text
    (sentence,) = [line for line in result.said if "2 GPUs" in line]
    assert "gemm, ladder S was measured on 2 GPUs" in sentence and "GPU-of-another-node: S2" in sentence
