"""The wgmma GEMM: the plan of its launches, its binaries and their evidence, its results in the emulator, the order of its tiles."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from binaries import built, inspected, manifest_of, toolchain
from rungs import launcher, wgmma
from rungs.build import NVCC_FLAGS
from rungs.emulator import device, launch, problem
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused, RungsError
from rungs.files import ROOT
from rungs.plan import Plan, TensorMap, Workspace, check_problem, plan, smem_need
from rungs.variants import Variant, load_device, load_experiment

HOPPER = load_experiment("hopper_gemm")
ARCH = "sm_90a"
DEVICE = load_device(ARCH)
ADDRESSES = {"a": 1 << 20, "b": 2 << 20, "c": 3 << 20}
RUNGS = {rung: variant for ladder in HOPPER.ladders.values() for rung, variant in ladder.rungs.items()}
BEYOND = [
    "hop_t128256_s4_pw1_ps1_cl22_c2_pp0_o2_k1_dl1_bl1",
    "hop_t128256_s4_pw1_ps1_cl41_c2_pp0_o1_k1_dl0_bl0",
    "hop_t128128_s4_pw1_ps1_cl12_c1_pp1_o2_k1_dl1_bl1",
    "hop_t64256_s3_pw1_ps1_cl21_c4_pp1_o2_k1_dl0_bl0",
    "hop_t256128_s3_pw1_ps1_cl12_c2_pp0_o2_k1_dl1_bl1",
    "hop_t128192_s4_pw1_ps1_cl11_c2_pp0_o1_k1_dl0_bl1",
    "hop_t64128_s6_pw1_ps0_cl11_c0_pp0_o0_k4_dl0_bl1",
    "hop_t128128_s1_pw1_ps1_cl21_c2_pp0_o1_k1_dl0_bl1",
    "hop_t128256_s3_pw1_ps1_cl11_c4_pp0_o2_k1_dl1_bl1",
    "hop_t128192_s4_pw1_ps1_cl11_c4_pp1_o2_k1_dl1_bl1",
    "hop_t64064_s5_pw1_ps0_cl11_c0_pp0_o0_k3_dl1_bl1",
    "hop_t64128_s8_pw1_ps0_cl21_c0_pp0_o0_k3_dl1_bl1",
    "hop_t64128_s4_pw1_ps0_cl21_c0_pp0_o0_k4_dl1_bl1",
    "hop_t128128_s2_pw1_ps0_cl22_c0_pp0_o1_k2_dl0_bl0",
    "hop_t128128_s3_pw1_ps0_cl12_c0_pp0_o0_k3_dl1_bl1",
    "hop_t128256_s2_pw1_ps0_cl41_c0_pp0_o2_k2_dl0_bl1",
    "hop_t128256_s2_pw1_ps0_cl22_c0_pp0_o0_k2_x1_dl0_bl0",
    "hop_t64064_s1_pw0_ps0_cl11_c0_pp0_o0_k8_x1_dl0_bl1",
]
"""Levels that are on no ladder, among them every cluster and every tile, and one stage with a producer."""
VARIANTS = list(dict.fromkeys([*RUNGS.values(), *map(HOPPER.variant, BEYOND)]))
STAGE = (128 + 256) * 64 * 2


def ptx(variant: Variant) -> Path:
    return built(variant.name, ARCH).with_suffix(".ptx")


# ---- binaries --------------------------------------------------------------------------------------------------------


def test_every_rung_builds_and_has_its_evidence():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda variant: built(variant.name, ARCH), VARIANTS))
    for variant, frame in inspected(VARIANTS, ARCH).items():
        manifest = manifest_of(variant.name, ARCH)
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", []), variant.name
        assert frame[frame["status"] != "ok"].empty, variant.name
        resources = frame[frame["kind"] == "resource"].set_index("name")["value"]
        assert resources[["stack_bytes", "spill_store_bytes", "spill_load_bytes"]].sum() == 0
        assert (resources["ctas_per_sm"], resources["threads"]) == (1, wgmma.threads(HOPPER.values(variant)))


def test_every_tile_and_cluster_is_built():
    for factor in (
        "tile",
        "cluster",
        "c_slots",
        "pingpong",
        "order",
        "split_k",
        "sums",
        "b_layout",
        "producer",
        "persistent",
    ):
        assert {variant.level(factor) for variant in VARIANTS} == set(HOPPER.factors[factor].levels), factor


def test_a_chip_without_wgmma_is_said_to_be_without():
    manifest = manifest_of(RUNGS["H0"].name, "sm_100a")
    assert manifest["status"] == "not on this chip"
    assert manifest["reason"].endswith("hopper_gemm needs one of sm_90a, not sm_100a.")


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "need"),
    [
        ("H0", 17408),  # 16,384 bytes of the stage and 16 of its barriers, in whole patterns of 1,024
        ("H3", 4 * STAGE + 1024),
        ("H7", 4 * STAGE + 2 * 2 * 64 * 64 * 2 + 1024),
    ],
)
def test_shared_memory_is_stages_slots_and_barriers(rung, need):
    assert smem_need(HOPPER, RUNGS[rung]) == need


@pytest.mark.parametrize(
    ("rung", "shape", "sms", "grid"),
    [
        ("H4", (4096, 4096, 256), 132, 512),
        ("H5", (4096, 4096, 256), 132, 132),
        ("H6", (4096, 4096, 256), 131, 130),  # whole clusters
        ("H6", (129, 8, 8), 132, 2),
        ("H6", (1, 8, 8), 132, 2),  # the second CTA of the only cluster has nothing but zeros
        ("K8", (512, 512, 4096), 132, 128),
        ("G2", (512, 512, 4096), 132, 128),
        ("G2", (129, 8, 8), 132, 16),  # two tiles below each other, eight CTAs each
        ("H0", (65, 64, 8), 132, 2),
    ],
)
def test_the_grid_is_tiles_or_sms_in_whole_clusters(rung, shape, sms, grid):
    launched = plan(HOPPER, RUNGS[rung], DEVICE, shape, ADDRESSES, sms)
    assert launched.grid == (grid, 1, 1) and grid % launched.cluster[0] == 0


def test_each_cta_of_a_cluster_loads_a_slice_of_what_they_share():
    def boxes(name: str) -> list[tuple[int, ...]]:
        launched = plan(HOPPER, HOPPER.variant(name), DEVICE, (512, 512, 512), ADDRESSES)
        maps = [parameter for parameter in launched.params if isinstance(parameter, TensorMap)]
        assert {m.swizzle for m in maps} == {"128B"}
        return [m.box for m in maps]

    assert boxes("H5") == [(64, 128), (64, 256), (64, 64)]
    assert boxes("H6") == [(64, 128), (64, 128), (64, 64)]
    assert boxes(BEYOND[0]) == [(64, 64), (64, 128), (64, 64)]
    assert boxes(BEYOND[1])[:2] == [(64, 128), (64, 64)]  # B as K x N: 64 columns are a row


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (
            (128, 132, 64),
            "N=132 is not a multiple of 8, which the copy engine's 16-byte rows need: choose a multiple of 8.",
        ),
        (
            (128, 128, 68),
            "K=68 is not a multiple of 8, which the copy engine's 16-byte rows need: choose a multiple of 8.",
        ),
        ((0, 128, 64), "M=0 is not positive: choose 1 or more."),
        ((128, 1 << 21, 64), "N=2097152 is above the 1048576 that 32-bit strides allow: choose a smaller N."),
    ],
)
def test_other_shapes_are_refused_in_one_sentence(shape, sentence):
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
        check_problem(HOPPER, RUNGS["H7"], shape)


def test_a_split_tile_receives_what_others_send_of_its_columns():
    """D9: 64 x 128 over three CTAs, of 16 chunks of 8 columns at most 6 are added up in one; the two others send it theirs."""
    d8, d9 = (smem_need(HOPPER, RUNGS[rung]) for rung in ("D8", "D9"))
    assert d9 - d8 == 2 * 64 * 6 * 8 * 4
    k6, k8 = (smem_need(HOPPER, RUNGS[rung]) - smem_need(HOPPER, RUNGS["K1"]) for rung in ("K6", "K8"))
    assert (k6, k8) == (5 * 128 * 3 * 8 * 4, 7 * 128 * 2 * 8 * 4)


def test_sums_through_l2_take_global_memory_and_none_that_is_shared():
    """Of each tile of 128 x 128 in float32 seven of eight CTAs send all but their share, 7 times the tile; and 128 bytes of counters."""
    launched = plan(HOPPER, RUNGS["G2"], DEVICE, (512, 512, 4096), ADDRESSES)
    assert launched.params[-1] == Workspace(16 * (128 + 7 * 128 * 128 * 4), 16 * 128)
    assert (launched.cluster, launched.sharers, launched.together) == ((2, 1, 1), 8, 16)
    assert smem_need(HOPPER, RUNGS["G1"]) == smem_need(HOPPER, RUNGS["K1"])
    k8 = plan(HOPPER, RUNGS["K8"], DEVICE, (512, 512, 4096), ADDRESSES)
    assert (len(k8.params), k8.sharers, k8.together) == (len(launched.params) - 1, 1, 8)


def test_a_workspace_that_this_machine_cannot_hold_is_refused(monkeypatch):
    """Beside operands of 14 bytes an element: 2 bytes of each of its own, and 8 where races are watched."""
    monkeypatch.setattr(problem.os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 400_000_000)
    launched = plan(HOPPER, RUNGS["G2"], DEVICE, (1024, 1024, 64), ADDRESSES)
    problem.check_memory((1024, 1024, 64), launched)
    with pytest.raises(
        Refused, match=r"1024x1024x64 takes 2.* bytes to emulate, above half of this machine's 400000000"
    ):
        problem.check_memory((1024, 1024, 64), launched, race=True)


def test_part_of_a_tiles_ctas_is_refused_by_the_emulator():
    with pytest.raises(EmulationError, match="CTAs that wait for each other run together: ask for whole groups of 16"):
        memory, launched = problem.prepare(HOPPER, RUNGS["G2"], ARCH, (256, 128, 64), "integer", 1, 4)
        launch.run(ptx(RUNGS["G2"]), launched, memory, ctas=range(8))


def test_stages_that_leave_no_room_for_the_sums_of_others_are_refused():
    large = HOPPER.variant("hop_t128128_s6_pw1_ps0_cl11_c0_pp0_o0_k6_dl1_bl1")
    with pytest.raises(Refused, match="needs 259072 bytes of shared memory, but 1 CTAs per SM leave 232448"):
        plan(HOPPER, large, DEVICE, (512, 512, 512), ADDRESSES)


@pytest.mark.parametrize(
    ("levels", "sentence"),
    [
        ({"split_k": 4}, "requires persistent in 0, not 1"),
        ({"sums": 1}, "requires split_k in 2, 4, 8, not 1"),
        ({"pingpong": 1, "tile": 128256}, "requires pingpong in 0, not 1"),
        ({"producer": 0}, "requires producer in 1, not 0"),
    ],
)
def test_levels_that_exclude_each_other_are_named(levels, sentence):
    with pytest.raises(RungsError, match=sentence):
        HOPPER.assign(dict(RUNGS["H11"].levels) | levels)


def test_a_grid_for_the_whole_gpu_has_no_more_clusters_than_run_at_once(monkeypatch):
    """An SM of a GPC may be left over: a cluster too many would run alone, after all others."""

    def grid(rung: str, clusters: int) -> int:
        driver = SimpleNamespace(
            CUresult=launcher.driver.CUresult,
            cuOccupancyMaxActiveClusters=lambda *_: (launcher.driver.CUresult.CUDA_SUCCESS, clusters),
        )
        monkeypatch.setattr(launcher, "launch_config", lambda _: None)
        monkeypatch.setattr(launcher, "driver", driver)
        of = (HOPPER, HOPPER.variant(rung), DEVICE, (4096, 4096, 4096), ADDRESSES, 132)
        return launcher.plan_on(None, *of).grid[0]

    assert [grid("H6", clusters) for clusters in (66, 64)] == [132, 128]
    assert grid(BEYOND[0], 31) == 124
    assert grid("H5", 0) == 132, "without clusters nothing is asked"
    with pytest.raises(Refused, match=r"k8_x1.* has 16 CTAs that wait for each other, and this GPU runs 14 at once"):
        grid("G2", 7)
    assert grid("G2", 8) == 8192


def test_a_dependent_launch_has_the_streams_attribute():
    for rung, dependent in (("H9", False), ("H10", True)):
        launched = plan(HOPPER, RUNGS[rung], DEVICE, (512, 512, 512), ADDRESSES)
        assert launched.dependent == dependent
        config = launcher.launch_config(launched)
        names = [attribute.id.name for attribute in config.attrs]
        wanted = ["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"]
        assert names == wanted[: 1 + dependent] and config.numAttrs == len(names)


@pytest.mark.parametrize(
    ("cluster", "split", "along_m", "along_n", "ctas"),
    [(21, 6, 2, 1, 12), (21, 8, 2, 1, 16), (12, 6, 1, 2, 12), (22, 3, 2, 2, 12), (41, 3, 4, 1, 12), (41, 4, 4, 1, 16)],
)
def test_a_cluster_of_more_than_eight_ctas_is_refused(cluster, split, along_m, along_n, ctas):
    """Through L2 the CTAs along K are of several clusters, and only the tiles of one count."""
    levels = {**dict(RUNGS["G7"].levels), "cluster": cluster, "split_k": split, "sums": 0}
    with pytest.raises(RungsError) as error:
        HOPPER.assign(levels)
    assert str(error.value) == (
        f"hop_t64128_s8_pw1_ps0_cl{cluster}_c0_pp0_o0_k{split}_dl1_bl1 would have clusters of {ctas} CTAs, {along_m} x {along_n} tiles"
        f" times {split} along K, and a cluster has at most 8: choose a smaller cluster, fewer CTAs along K or sums through L2."
    )
    if split in (4, 8):
        assert plan(HOPPER, HOPPER.assign({**levels, "sums": 1}), DEVICE, (512, 512, 512), ADDRESSES).cluster[0] < 8


def test_the_combinations_that_may_split_k_are_those_of_a_cluster_or_of_l2():
    base = {**dict(RUNGS["K1"].levels), "stages": 1}
    found = set()
    for cluster, split, sums in itertools.product((11, 21, 12, 22, 41), (1, 2, 3, 4, 6, 8), (0, 1)):
        with contextlib.suppress(RungsError):
            variant = HOPPER.assign({**base, "cluster": cluster, "split_k": split, "sums": sums})
            assert plan(HOPPER, variant, DEVICE, (512, 512, 512), ADDRESSES).cluster[0] <= 8
            found.add((cluster, split, sums))
    clusters = {11: (1, 2, 3, 4, 6, 8), 21: (1, 2, 3, 4), 12: (1, 2, 3, 4), 22: (1, 2), 41: (1, 2)}
    through_l2 = {(cluster, split, 1) for cluster in clusters for split in (2, 4, 8)}
    assert found == {(cluster, split, 0) for cluster, splits in clusters.items() for split in splits} | through_l2


# ---- results ---------------------------------------------------------------------------------------------------------


NEXT_TO = ["H2", "H4", "H5", "H8", "H11", "D0", "D4", "D8", "K2", "K4", "K6", "G3", "G4", "G8", "G9"]
"""Rungs that differ by a constant from one that is emulated; on a GPU all are held against the same answers."""
EMULATED = [variant for variant in VARIANTS if variant not in [RUNGS[rung] for rung in NEXT_TO]]


@pytest.mark.parametrize("variant", EMULATED, ids=lambda variant: variant.name)
def test_every_rung_is_right_and_free_of_races(variant):
    small, sms = device.small_problem(HOPPER, variant, ARCH)
    rows, failure = device.check(HOPPER, variant, ARCH, ptx(variant), small, sms)
    assert failure is None and len(rows) == len(device.SCHEDULES)


RAGGED = ["H0", "H3", "H6", "H7", "H12", "K2", "G5", "N0", BEYOND[0], BEYOND[4], BEYOND[-2]]


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("shape", [(1, 8, 8), (197, 328, 72), (300, 264, 448)])
def test_shapes_that_hang_over_every_edge(name, shape):
    variant = HOPPER.variant(name)
    found = problem.emulate_gemm(HOPPER, variant, ARCH, ptx(variant), shape, sms=4, race=True)
    assert found.good and found.error == 0, (found.failure, found.findings)


@pytest.mark.parametrize(
    ("rung", "k_tiles", "seeds"),
    [("D9", 4, (2, 5)), ("D9", 1, (2,)), ("K3", 4, (1,)), ("K8", 1, (1,)), ("G2", 5, (1,))],
)
def test_ctas_whose_share_of_k_is_empty_add_nothing_and_end(rung, k_tiles, seeds):
    """4 tiles of K over 3 CTAs are 2, 2 and none. D9 once hung there on an H200, where the producer came last: a CTA gave back a
    stage that it never had. It takes an order of the warps to see it, which seeds 2 and 5 have.
    """
    for seed in seeds:
        found = problem.emulate_gemm(
            HOPPER,
            RUNGS[rung],
            ARCH,
            ptx(RUNGS[rung]),
            (64, 136, 64 * k_tiles),
            sms=24,
            race=True,
            schedule="random",
            seed=seed,
        )
        assert found.good and found.error == 0, (found.failure, found.findings)


@pytest.mark.parametrize("rung", ["H7", "H12", "K4", "G7"])
def test_the_bits_do_not_depend_on_who_is_first(rung):
    variant, seen = RUNGS[rung], set()
    for schedule, delivery in (("cta", "early"), ("random", "late"), ("descending", "late")):
        memory, launched = problem.prepare(HOPPER, variant, ARCH, (256, 512, 448), "normal", 7, 4)
        launch.run(ptx(variant), launched, memory, schedule=schedule, delivery=delivery, seed=3)
        seen.add(memory["c"].tobytes())
    assert len(seen) == 1


def test_sums_are_the_same_whichever_way_they_take():
    """K8 and G1 send by st.async and through L2 what they add up in the same order; G1 is launched twice on one workspace."""
    seen = set()
    for rung, times in (("K8", 1), ("G1", 1), ("G1", 2)):
        variant = RUNGS[rung]
        memory, launched = problem.prepare(HOPPER, variant, ARCH, (128, 256, 1024), "normal", 7, 4)
        if times > 1:
            space = launched.params[-1]
            at = memory.put("kept", np.zeros(space.bytes, np.uint8))
            launched = dataclasses.replace(launched, params=(*launched.params[:-1], (at, 8)))
        for _ in range(times):
            launch.run(ptx(variant), launched, memory)
        seen.add(memory["c"].tobytes())
    assert len(seen) == 1


def test_counts_of_a_large_problem_follow_from_small_ones():
    variant = RUNGS["H7"]
    counts = problem.affine_counts(HOPPER, variant, ARCH, ptx(variant), (1024, 1024, 4096), sms=16)
    tiles, k_tiles = 1024 // 128 * (1024 // 256), 4096 // 64
    assert counts["hgmma"] == tiles * k_tiles * 4 * 2 * 4  # 4 steps of 16, 2 warpgroups, 4 warps each
    assert counts["tma_load"] == tiles * k_tiles * 2
    assert counts["tma_store"] == tiles * 2 * 4  # 64 x 64 at a time
    assert counts["stsm"] == tiles * 2 * 4 * 4 * 4


# ---- order of the tiles ----------------------------------------------------------------------------------------------

ORDERS = """
#include "hopper_gemm/tile_order.cuh"
extern "C" __global__ void orders(unsigned* out, unsigned rows, unsigned columns) {
  const unsigned tile = blockIdx.x * 32 + threadIdx.x;
  if (tile < rows * columns) {
    const TilePlace place = place_tile<Order(LEVEL)>(tile, rows, columns);
    out[2 * tile] = place.row, out[2 * tile + 1] = place.column;
  }
}
"""


def places(folder: Path, order: int, rows: int, columns: int) -> list[tuple[int, int]]:
    source, compiled = folder / "orders.cu", folder / f"orders{order}.ptx"
    source.write_text(ORDERS)
    command = [toolchain().nvcc, "-ccbin", toolchain().host, *NVCC_FLAGS, f"-DLEVEL={order}", "-arch=compute_90a"]
    subprocess.run([*command, str(source), "-o", str(compiled)], cwd=ROOT, check=True, capture_output=True)
    memory = GlobalMemory()
    at = memory.reserve("out", (rows * columns, 2), np.uint32)
    blocks = math.ceil(rows * columns / 32)
    params = ((at, 8), (rows, 4), (columns, 4))
    launch.run(compiled, Plan("orders", (blocks, 1, 1), (32, 1, 1), (1, 1, 1), 0, params), memory)
    return [(int(row), int(column)) for row, column in memory["out"]]


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (19, 21), (3, 40)])
def test_every_tile_is_walked_once(tmp_path, order, rows, columns):
    walked = places(tmp_path, order, rows, columns)
    assert sorted(walked) == [(row, column) for row in range(rows) for column in range(columns)]


def test_the_hilbert_curve_goes_from_neighbour_to_neighbour(tmp_path):
    walked = places(tmp_path, 2, 16, 32)
    for band in (walked[:256], walked[256:]):
        assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in itertools.pairwise(band))
    grouped = places(tmp_path, 1, 16, 32)
    assert grouped[:9] == [(row, 0) for row in range(8)] + [(0, 1)]
    assert places(tmp_path, 0, 2, 3) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
