"""The pipeline on a machine without a GPU: counts from the emulator, tables and figures of them, and failures as data."""

from __future__ import annotations

import csv
import json
import re

import pytest

from pipeline import ARCH, RUNGS, S0, S2, S3, SHAPES, Checkout
from rungs import schemas

TIME = re.compile(r"time|_us\b|_ms\b|mhz|second|tflops|duration|cycles|throttle|share|gain", re.IGNORECASE)
EMULATED = "results/emulator"


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """(checkout, result) of `snakemake all` without a GPU; not to be changed."""
    checkout = Checkout.create(tmp_path_factory.mktemp("emulator") / "run")
    checkout.no_gpu()
    return checkout, checkout.snakemake("--cores", "2", "all")


@pytest.fixture
def without_gpu(counted, tmp_path):
    """A copy of that run."""
    finished, result = counted
    assert result.code == 0, result.text
    checkout = finished.copy(tmp_path / "run")
    checkout.no_gpu()
    return checkout


def emulated(checkout: Checkout, variant: str):
    return schemas.read_csv("emulate", checkout.repo / EMULATED / "csv/emulate/gemm" / f"{variant}.csv")


def test_all_counts_every_rung_and_draws_and_tabulates_it(counted):
    checkout, result = counted
    assert result.code == 0, result.text
    assert result.of("emulate") == sorted(RUNGS)
    assert not result.rules & {"clock", "sweep", "floor", "profile", "aggregate"}
    live = checkout.repo / EMULATED
    frame = schemas.read_csv("counts", live / "data/gemm/counts.csv")
    assert {tuple(row) for row in frame[["variant", "m", "n", "k"]].itertuples(index=False)} == {
        (rung, *shape) for rung in RUNGS for shape in SHAPES
    }
    row = frame[(frame["variant"] == S3) & (frame["k"] == 512)].set_index("kind")
    tiles = 16 * 16  # of 128 x 128 in C, and of 32 along K
    assert dict(row["instructions"]) == {
        "ldgsts": 32 * tiles,
        "stg": 16 * 32 * 8,
        "ldsm": 96 * tiles,
        "hmma": 256 * tiles,
        "barrier": 8 * tiles,
    }
    assert row.loc["ldsm", ["wavefronts", "conflicts", "wavefronts_per_tile"]].tolist() == [384 * tiles, 0, 384]
    page = (live / "md/gemm.md").read_text()
    assert "| S3 | N x K, TMA's XOR | 0 | 24.6 k | 0 | 8.19 k | 0 | 65.5 k | 164 k | 5.00 | 0 | 640 | 144 |" in page
    assert (
        "**At 512x512x512 S1 (147 k, 576 per tile) needs the fewest shared-memory wavefronts, and S0 (573 k, 2240"
        in page
    )
    assert "no GPU, no times" in page
    index = (live / "README.md").read_text()
    assert "4 of 4 variants are right and free of races, and counted at all of 2 shapes." in index
    for ending in ("svg", "png"):
        assert (live / f"figures/gemm/counts_S.{ending}").stat().st_size > 4000
    assert json.loads((live / "data/verdict.json").read_text())["failed"] == 0


def test_the_manifest_says_how_it_was_counted(counted):
    live = counted[0].repo / EMULATED
    manifest = schemas.read_manifest(live / "csv/emulate/gemm" / f"{S3}.json")
    assert (manifest["source"], manifest["variant"], manifest["arch"]) == ("emulator", S3, ARCH)
    built = schemas.read_manifest(live / "build" / ARCH / S3 / f"{S3}.json")
    for key in ("build_id", "cubin_sha256", "ptx_sha256"):
        assert manifest["binary"][key] == built[key]
    assert manifest["checks"]["problem"] == [128, 256, 128] and manifest["checks"]["races"]
    assert {"launch", "race", "metrics", "machine"} <= set(manifest["modules"])


def test_trace_leads_from_a_count_to_the_emulator_and_the_source(without_gpu):
    for cell in (f"{EMULATED}/md/gemm.md:S3", f"{EMULATED}/README.md:S2"):
        result = without_gpu.rungs("trace", cell, "--verbose")
        assert result.code == 0 and result.text.endswith("Every link holds.\n"), result.text
        for word in (
            "the emulator's modules are this checkout's",
            "counts.csv of the ladders has the same counts",
            "nvcc",
        ):
            assert word in result.text
    without_gpu.edit(
        f"{EMULATED}/data/gemm/counts.csv", f"{S3},A3 B3 S3,512,512,256,ldsm,", f"{S3},A3 B3 S3,512,512,256,ldsm,1"
    )
    broken = without_gpu.rungs("trace", f"{EMULATED}/md/gemm.md:S3")
    assert broken.code == 1 and "has other counts" in broken.text


def test_a_second_run_plans_nothing(counted):
    assert "Nothing to be done" in counted[0].planned("all").text


def test_an_experiment_is_not_counted_again_for_another_ones_workload(without_gpu):
    module = without_gpu.repo / "workflow" / "rungs" / "workloads" / "tma_wall.py"
    module.write_text(module.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    assert "emulate" not in without_gpu.planned("all").rules


def test_a_deleted_csv_is_made_again_and_what_depends_on_it(without_gpu):
    path = without_gpu.repo / EMULATED / "csv/emulate/gemm" / f"{S2}.csv"
    before = path.read_bytes()
    path.unlink()
    result = without_gpu.snakemake("all")
    assert result.code == 0, result.text
    assert result.of("emulate") == [S2]
    assert result.rules <= {
        *("emulate", "count", "plot_counts", "judge_claims", "show_claims"),
        *("make_count_tables", "make_count_index", "verdict"),
    }
    assert path.read_bytes() == before, "the same job counts the same"


def test_no_column_of_any_emulator_file_holds_a_time(counted):
    live = counted[0].repo / EMULATED
    files = [path for path in live.rglob("*.csv") if "inspect" not in path.parts]
    assert len(files) == len(RUNGS) + 3
    for path in files:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            assert not [name for name in reader.fieldnames or () if TIME.search(name)], path
            rows = [row for row in reader if row.get("verdict") != "not measured"]
            assert not [row for row in rows if TIME.search(row.get("metric", "") + row.get("unit", ""))], path
    for kind in ("emulate", "counts", "emulated"):
        assert not [name for name in schemas.columns(kind) if TIME.search(name)]
    quoting = live / "md" / "claims.md"  # what others timed
    assert "tested on the emulator" in quoting.read_text()
    pages = {*live.rglob("*.md")} - {quoting}
    for path in pages:
        assert not re.search(r"TFLOP|µs|MHz", path.read_text()), path


def test_a_race_and_a_wrong_result_are_data_and_fail_the_run(without_gpu):
    """S0 is left as it was: only B as N x K goes wrong, and so every failure is named by its rung."""
    without_gpu.edit(
        "kernels/gemm/gemm.cu",
        "ptx::cp_async_wait_group<STAGES - 2>();\n        __syncthreads();",
        "ptx::cp_async_wait_group<STAGES - 2>();\n        if (VARIANT_B_LAYOUT == 0) __syncthreads();",
    )
    without_gpu.edit(
        "kernels/gemm/gemm.cu",
        "acc[i][j][2 * half + 1]));",
        "acc[i][j][2 * half + (VARIANT_B_LAYOUT == 1 || VARIANT_SWIZZLE == 0)]));",
    )
    result = without_gpu.snakemake("--cores", "2", "all")
    assert result.code == 1
    statuses = {rung: set(emulated(without_gpu, rung)["status"]) for rung in RUNGS}
    assert statuses[S0] == {"ok"}
    assert [next(iter(statuses[rung] - {"ok"})) for rung in RUNGS[1:]] == ["wrong", "race", "race"]
    where = "emulate at 512x512x256, 512x512x512"
    told = [line for line in result.said if where in line]
    assert [line.split(", ")[0] for line in told] == [f"rungs: {rung}" for rung in RUNGS[1:]], result.text
    assert f"{where}: wrong: At 128x256x128 the result differs from numpy's by up to " in told[0]
    assert all(f"{where}: race: At 128x256x128, race: PTX line " in line for line in told[1:])
    assert all("kernels/gemm/" in line for line in told[1:])
    page = (without_gpu.repo / EMULATED / "md/gemm.md").read_text()
    assert "| S3 | N x K, TMA's XOR | race |" in page


def test_a_shape_that_the_kernel_refuses_is_data_and_builds_nothing(without_gpu):
    without_gpu.configure(axes={"mn": [512], "k": [256, 264]})
    result = without_gpu.snakemake("--cores", "2", "all")
    assert result.code == 1
    assert "build" not in result.rules
    frame = emulated(without_gpu, S3)
    refused = frame[frame["status"] == "refused"]
    assert [(r.k, r.metric) for r in refused.itertuples()] == [(264, "all")]
    assert "K=264 is not a positive multiple of BK=32" in refused["reason"].iloc[0]
    assert set(frame[frame["k"] == 256]["status"]) == {"ok"}


def test_the_quick_preset_is_ladder_b_at_two_shapes(counted, tmp_path):
    checkout = counted[0].copy(tmp_path / "run")
    checkout.no_gpu()
    checkout.configure(ladders="all", axes=None)
    planned = checkout.planned("all", "--config", "preset=quick")
    assert len(planned.of("emulate")) == 8
    assert "[[512, 512, 1024], [4096, 4096, 1024]]" in checkout.planned("-p", "all", "--config", "preset=quick").text
    assert any("results/emulator-quick/figures/gemm/counts_B.svg" in job for job in planned.jobs)


def test_a_gpu_has_no_use_for_the_emulator(complete_run):
    checkout, result = complete_run
    assert result.code == 0, result.text
    assert not result.rules & {"emulate", "count", "plot_counts"}
    assert not (checkout.repo / EMULATED).exists()


def test_loads_that_are_no_gemm_are_counted_and_tabulated(tmp_path):
    checkout = Checkout.create(tmp_path / "run")
    checkout.no_gpu()
    checkout.configure(experiments=["tma_latency"], ladders=["TL"], axes=None, recorded=[])
    result = checkout.snakemake("--cores", "2", "all")
    assert result.code == 0, result.text
    page = (checkout.repo / EMULATED / "md/tma_latency.md").read_text()
    assert "4 of 4 variants are right and free of races, and counted at all of 4 points." in page
    assert "TL0 (0) needs the fewest shared-memory wavefronts, and TL1 (62) needs the most" in page
    assert "from TL0 to TL3 there are 31 more wavefronts and as many LSU instructions" in page
