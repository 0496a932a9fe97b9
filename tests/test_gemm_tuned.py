"""Ladder T: the plan of its launches, its binaries and their evidence; and every two levels of `gemm`, compiled for one chip."""

from __future__ import annotations

import itertools
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from binaries import GEMM, built, manifest_of, toolchain
from rungs import schemas
from rungs.build import PTXAS_FLAGS
from rungs.errors import Refused, RungsError
from rungs.files import sha256_file, write_json
from rungs.inspect import inspect, rules_of
from rungs.plan import TensorMap, check_problem, plan, smem_need, threads
from rungs.variants import CONFIG, architectures, load_device, load_experiment, parse_experiment

TUNED = load_experiment("gemm_tuned")
RUNGS = TUNED.ladders["T"].rungs
DEVICE = load_device("sm_90a")
ADDRESSES = {"a": 1 << 20, "b": 2 << 20, "c": 3 << 20}
STAGE = (128 + 256) * 64 * 2


@pytest.mark.parametrize(
    ("rung", "need"),
    [
        ("T0", 3 * ((128 + 128) * 32 * 2 + 8)),
        ("T2", 3 * (STAGE + 8)),
        ("T3", 4 * (STAGE + 8)),
        ("T4", 4 * (STAGE + 2 * 8)),
        ("T7", 4 * (STAGE + 2 * 8) + 8 * 16 * 64 * 2),
    ],
)
def test_shared_memory_is_stages_barriers_and_the_part_for_c(rung, need):
    assert smem_need(TUNED, RUNGS[rung]) == need


@pytest.mark.parametrize(
    ("problem", "sms", "grid"),
    [
        ((4096, 4096, 256), 132, 132),
        ((4096, 4096, 256), 600, 512),
        ((512, 512, 256), 132, 8),
        ((4096, 4096, 256), None, 132),
    ],
)
def test_a_persistent_grid_is_as_many_ctas_as_fit_at_once_and_no_more_than_tiles(problem, sms, grid):
    assert plan(TUNED, RUNGS["T6"], DEVICE, problem, ADDRESSES, sms).grid == (grid, 1, 1)
    tiles = problem[0] // 128 * problem[1] // 256
    assert plan(TUNED, RUNGS["T5"], DEVICE, problem, ADDRESSES, sms).grid == (tiles, 1, 1)


def test_a_tile_of_64_along_k_has_rows_of_128_bytes_and_their_swizzle():
    for rung, row in (("T0", 32), ("T2", 64)):
        launch = plan(TUNED, RUNGS[rung], DEVICE, (4096, 4096, 4096), ADDRESSES)
        maps = [parameter for parameter in launch.params if isinstance(parameter, TensorMap)]
        assert [m.swizzle for m in maps] == [f"{2 * row}B"] * 2
        assert [m.box for m in maps] == [(row, 128), (row, 128 if rung == "T0" else 256)]


def test_the_producers_warpgroup_is_part_of_the_block():
    assert [threads(TUNED, RUNGS[rung]) for rung in ("T3", "T4")] == [256, 384]


def test_shapes_off_the_larger_tile_are_refused():
    check_problem(TUNED, RUNGS["T0"], (128, 128, 32))
    with pytest.raises(Refused, match=r"^N=128 is not a positive multiple of BN=256: choose a multiple of 256\.$"):
        check_problem(TUNED, RUNGS["T2"], (128, 128, 64))
    with pytest.raises(Refused, match=r"^K=32 is not a positive multiple of BK=64"):
        check_problem(TUNED, RUNGS["T1"], (128, 128, 32))


@pytest.mark.parametrize("factor", ["double_buffer", "persistent", "skew"])
def test_what_needs_a_producer_warp_is_refused_without_one(factor):
    with pytest.raises(RungsError, match=rf"Level 1 of factor {factor} \(.*\) requires producer_warp in 1, not 0"):
        TUNED.assign(dict(RUNGS["T3"].levels) | {factor: 1})


@pytest.mark.parametrize("arch", architectures())
def test_every_rung_builds_has_its_evidence_and_is_alone_on_its_sm(arch):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda variant: built(variant.name, arch), RUNGS.values()))
    for variant in RUNGS.values():
        manifest = manifest_of(variant.name, arch)
        if arch not in TUNED.architectures:
            assert manifest["status"] == "not on this chip"
            assert manifest["reason"].endswith(f"gemm_tuned needs one of sm_90a, sm_100a, not {arch}.")
            continue
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", [])
        ptxas = manifest["ptxas"]
        assert [ptxas[key] for key in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")] == [0, 0, 0]
        frame = pd.DataFrame(inspect(variant.name, arch, built(variant.name, arch), "pip"))
        assert frame[frame["status"] != "ok"].empty
        assert (frame["kind"] == "evidence").sum() == len(rules_of(variant)) >= 12
        resources = frame[frame["kind"] == "resource"].set_index("name")["value"]
        assert (resources["ctas_per_sm"], resources["threads"]) == (1, threads(TUNED, variant))


def test_an_arrive_that_does_not_wait_for_the_reads_is_no_evidence(tmp_path):
    """The stage would be overwritten while ldmatrix still reads it, as was seen on an H200: a count of 1 waits for nothing."""
    name = RUNGS["T6"].name
    text = built(name, "sm_90a").with_suffix(".ptx").read_text()
    lines = text.splitlines(True)
    arrives = [i for i, line in enumerate(lines) if line.strip().startswith("mbarrier.arrive.shared::cta.b64 _,")]
    assert arrives
    for i in arrives:
        head, _, _ = lines[i].rpartition(",")
        lines[i] = f"{head}, 1;\n"
    (tmp_path / f"{name}.ptx").write_text("".join(lines))
    cubin = tmp_path / f"{name}.cubin"
    command = [toolchain().ptxas, *PTXAS_FLAGS, "-arch=sm_90a", str(tmp_path / f"{name}.ptx"), "-o", str(cubin)]
    subprocess.run(command, check=True, capture_output=True)
    write_json(tmp_path / f"{name}.json", manifest_of(name, "sm_90a") | {"cubin_sha256": sha256_file(cubin)})
    frame = pd.DataFrame(inspect(name, "sm_90a", tmp_path / f"{name}.json", "pip"))
    missing = set(frame[frame["status"] != "ok"]["name"])
    assert missing == {
        "producer warp: SYNCS.ARRIVE.TRANS64.ART0 in the main loop",
        "producer warp: no SYNCS.ARRIVE.TRANS64.A1T0 in the kernel",
    }


def test_a_level_that_implies_what_another_does_not_is_refused():
    raw = schemas.read_yaml(CONFIG / "experiments" / "gemm_tuned.yaml", "experiment")
    del raw["factors"]["warp_tile"]["levels"][64]["macros"]
    with pytest.raises(RungsError, match="level 64 of warp_tile gives no TILE_N, which another of its levels gives"):
        parse_experiment(raw)


def pairs_of(variant):
    """Every two levels of the variant."""
    return set(itertools.combinations(variant.levels, 2))


def test_every_two_levels_of_the_factorial_build_together_without_stack_or_spills():
    """The factors act in different places of the kernel; `snakemake factorial` builds all hundred combinations."""
    estimable = GEMM.estimable()
    assert len(estimable) == 100
    missing, variants = set().union(*map(pairs_of, estimable)), []
    while missing:
        variants.append(max(estimable, key=lambda variant: len(pairs_of(variant) & missing)))
        missing -= pairs_of(variants[-1])
    assert 12 <= len(variants) <= 30
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda variant: built(variant.name, "sm_90a"), variants))
    for variant in variants:
        manifest = manifest_of(variant.name, "sm_90a")
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", []), variant.name
        ptxas = manifest["ptxas"]
        assert [ptxas[key] for key in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")] == [0, 0, 0]
        assert ptxas["registers"] <= 128
