"""Launch plans as plain numbers, and the shapes and tensor maps that are refused before anything is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rungs.errors import Refused, RungsError
from rungs.plan import LARGEST_EXTENT, TensorMap, check_problem, check_tensor_map, plan, smem_bytes, smem_need
from rungs.variants import architectures, load_device, load_experiment

GEMM = load_experiment("gemm")
ADDRESSES = {"a": 0x7F0000000000, "b": 0x7F1000000000, "c": 0x7F2000000000}
LOADS = ["abl_L0_R1_bl1_s2_sw1", "abl_L1_R1_bl1_s2_sw1", "abl_L2_R1_bl1_s2_sw1"]
LOADS_BY_K = ["abl_L0_R1_bl0_s2_sw1", "abl_L1_R1_bl0_s2_sw1", "abl_L2_R1_bl0_s2_sw1"]
STAGES = {load: [1, 2] if load == 0 else [1, 2, 3, 4] for load in (0, 1, 2)}


def planned(name: str, problem: tuple[int, int, int] = (512, 384, 256), arch: str = "sm_90a", **addresses: int):
    return plan(GEMM, GEMM.variant(name), load_device(arch), problem, ADDRESSES | addresses)


# ---- what is launched ----


@pytest.mark.parametrize("name", LOADS + LOADS_BY_K)
@pytest.mark.parametrize(
    ("problem", "blocks"), [((128, 128, 32), 1), ((512, 384, 256), 12), ((4096, 4096, 8192), 1024)]
)
def test_one_block_of_256_threads_per_tile(name, problem, blocks):
    found = planned(name, problem)
    assert (found.grid, found.block, found.cluster) == ((blocks, 1, 1), (256, 1, 1), (1, 1, 1))
    assert found.entry == "gemm"
    m, n, k = problem
    assert found.params[-4:] == ((ADDRESSES["c"], 8), (m, 4), (n, 4), (k, 4))
    assert len(found.params) == 6


def test_load_modes_without_tma_take_two_pointers():
    assert planned(LOADS[1]).params[:2] == ((ADDRESSES["a"], 8), (ADDRESSES["b"], 8))


def test_tensor_maps_of_b_as_n_by_k():
    a, b = planned("abl_L2_R1_bl1_s2_sw1").params[:2]
    assert a == TensorMap(ADDRESSES["a"], (256, 512), (512,), (32, 128), "64B", "128B", 2)
    assert b == TensorMap(ADDRESSES["b"], (256, 384), (512,), (32, 128), "64B", "128B", 2)


def test_tensor_maps_of_b_as_k_by_n():
    a, b = planned("abl_L2_R1_bl0_s2_sw1").params[:2]
    assert a == TensorMap(ADDRESSES["a"], (256, 512), (512,), (32, 128), "64B", "128B", 2)
    assert b == TensorMap(ADDRESSES["b"], (384, 256), (768,), (64, 32), "128B", "128B", 2)


@pytest.mark.parametrize("layout", [0, 1])
def test_a_plain_image_takes_maps_without_swizzle(layout):
    a, b = planned(f"abl_L2_R1_bl{layout}_s2_sw0").params[:2]
    assert (a.swizzle, b.swizzle) == ("none", "none")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_tma_needs_its_chip(arch):
    with pytest.raises(Refused, match=f"TMA needs one of sm_90a, sm_100a, sm_120, not {arch}") as refusal:
        planned("abl_L2_R1_bl1_s2_sw1", arch=arch)
    assert refusal.value.status == "not on this chip"


# ---- shared memory and the CTAs that it pins ----


@pytest.mark.parametrize(
    ("name", "need"),
    [("abl_L1_R1_bl1_s1_sw1", 16_384), ("abl_L1_R1_bl1_s3_sw1", 49_152), ("abl_L2_R1_bl1_s3_sw1", 49_176)],
)
def test_a_stage_is_16_kib_and_an_mbarrier_8_bytes(name, need):
    assert smem_need(GEMM, GEMM.variant(name)) == need


@pytest.mark.parametrize("arch", architectures())
def test_shared_memory_admits_two_ctas_and_no_third(arch):
    device = load_device(arch)
    seen = set()
    for load, stages in STAGES.items():
        for count in stages:
            variant = GEMM.assign({"load": load, "read": 1, "b_layout": 1, "stages": count, "swizzle": 1})
            try:
                dynamic = smem_bytes(GEMM, variant, device)
            except Refused:
                continue
            seen.add((load, count))
            # The hardware's own arithmetic: 128-byte granules, the system's KiB on top of each CTA.
            per_cta = -(-(dynamic + device.smem_reserved_bytes) // 128) * 128
            assert device.smem_per_sm_bytes // per_cta == 2
            assert smem_need(GEMM, variant) <= dynamic <= device.smem_per_block_bytes
    assert {(0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)} <= seen


@pytest.mark.parametrize(
    ("arch", "padded"), [("sm_80", 55_296), ("sm_86", 33_792), ("sm_90a", 77_824), ("sm_120", 33_792)]
)
def test_padding_by_hand(arch, padded):
    assert smem_bytes(GEMM, GEMM.variant("B1"), load_device(arch)) == padded


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_120"])
@pytest.mark.parametrize(("load", "need"), [(1, 65_536), (2, 65_568)])
def test_four_stages_do_not_fit_twice_on_a_small_sm(arch, load, need):
    variant = GEMM.variant(f"abl_L{load}_R1_bl1_s4_sw1")
    with pytest.raises(
        Refused, match=rf"needs {need} bytes .* 2 CTAs per SM leave 50176 each on {arch}: choose fewer stages"
    ):
        smem_bytes(GEMM, variant, load_device(arch))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_four_stages_fit_on_a_large_sm(arch):
    assert smem_bytes(GEMM, GEMM.variant("abl_L1_R1_bl1_s4_sw1"), load_device(arch)) >= 65_536


@pytest.mark.parametrize("ctas", [1, 2, 3, 4])
def test_any_pinned_number_holds(ctas):
    device = replace(load_device("sm_90a"), ctas_per_sm={"gemm": ctas})
    dynamic = smem_bytes(GEMM, GEMM.variant("B1"), device)
    assert device.smem_per_sm_bytes // (-(-(dynamic + 1024) // 128) * 128) == ctas


@pytest.mark.parametrize("name", LOADS)
def test_a_kernel_may_ask_for_more_shared_memory_than_its_tiles(name):
    variant, more = GEMM.variant(name), replace(GEMM, constants=GEMM.constants | {"SMEM_EXTRA_BYTES": 2048})
    assert smem_need(more, variant) == smem_need(GEMM, variant) + 2048


# ---- shapes ----


@pytest.mark.parametrize("name", LOADS + LOADS_BY_K)
def test_k_4100_is_refused_by_the_alignment_rule(name):
    with pytest.raises(
        Refused, match=r"^K=4100 gives rows of 8200 bytes, which is not a multiple of the 16 bytes .* multiple of 8\.$"
    ):
        planned(name, (512, 512, 4100))


@pytest.mark.parametrize("name", LOADS_BY_K)
def test_b_as_k_by_n_asks_the_same_of_n(name):
    with pytest.raises(Refused, match=r"^N=4100 gives rows of 8200 bytes"):
        planned(name, (512, 4100, 512))


@pytest.mark.parametrize("name", LOADS + LOADS_BY_K)
@pytest.mark.parametrize(
    ("problem", "rule"),
    [
        ((512, 512, 8200), "K=8200 is not a positive multiple of BK=32"),
        ((520, 512, 256), "M=520 is not a positive multiple of BM=128"),
        ((513, 512, 256), "M=513 is not a positive multiple of BM=128"),
        ((512, 1032, 256), "N=1032 is not a positive multiple of BN=128"),
        ((512, 512, 16), "K=16 is not a positive multiple of BK=32"),
        ((0, 512, 256), "M=0 is not a positive multiple of BM=128"),
        ((512, -128, 256), "N=-128 is not a positive multiple of BN=128"),
        ((512, 512, 0), "K=0 is not a positive multiple of BK=32"),
        ((2 * LARGEST_EXTENT, 128, 32), "M=2097152 is above the 1048576"),
        ((128, 128, 2 * LARGEST_EXTENT), "K=2097152 is above the 1048576"),
    ],
)
def test_other_shapes_are_refused_by_name(name, problem, rule):
    with pytest.raises(Refused, match=f"^{rule}") as refusal:
        planned(name, problem)
    assert refusal.value.status == "refused"
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(("load", "stages"), [(load, s) for load, counts in STAGES.items() for s in counts])
def test_fewer_tiles_than_stages_are_a_plan_like_any_other(tiles, load, stages):
    variant = GEMM.variant(f"abl_L{load}_R1_bl1_s{stages}_sw1")
    check_problem(GEMM, variant, (128, 128, 32 * tiles))
    assert plan(GEMM, variant, load_device("sm_90a"), (128, 128, 32 * tiles), ADDRESSES).params[-1] == (32 * tiles, 4)


@pytest.mark.parametrize("operand", ["a", "b", "c"])
@pytest.mark.parametrize("name", LOADS)
def test_an_unaligned_operand_is_refused(name, operand):
    with pytest.raises(Refused, match=f"operand {operand} is at 0x7f0000000008, which is not a multiple of 16 bytes"):
        planned(name, **{operand: 0x7F0000000008})


# ---- tensor maps that the driver would call CUDA_ERROR_INVALID_VALUE ----

GOOD = TensorMap(0x1000, (4096, 4096), (8192,), (32, 128), "64B")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"box": (64, 128)}, "inner row is 128 bytes, wider than the 64 of a 64B swizzle"),
        ({"box": (128, 32), "swizzle": "128B"}, "inner row is 256 bytes, wider than the 128 of a 128B swizzle"),
        ({"box": (32, 64), "swizzle": "32B"}, "inner row is 64 bytes, wider than the 32 of a 32B swizzle"),
        ({"box": (32, 257)}, "box dimension 257 is not between 1 and 256: split the box"),
        ({"box": (32, 0)}, "box dimension 0 is not between 1 and 256"),
        ({"box": (20, 128)}, "inner row is 40 bytes, not a multiple of 16"),
        ({"strides": (8200,)}, "stride 8200 is not a multiple of 16"),
        ({"strides": (0,)}, "stride 0 is not a multiple of 16 bytes below"),
        ({"strides": (1 << 40,)}, "stride 1099511627776 is not"),
        ({"strides": ()}, "2 dimensions take 1 strides"),
        ({"address": 0x1008}, "address 0x1008 is not a multiple of 16"),
        ({"dims": (4096, (1 << 32) + 1)}, r"dimension 4294967297 is not between 1 and 2\^32"),
        ({"box": (32,)}, "a box of as many"),
    ],
)
def test_a_tensor_map_that_breaks_a_rule_is_named(change, rule):
    with pytest.raises(Refused, match=f"^operand A: .*{rule}"):
        check_tensor_map(replace(GOOD, **change), "operand A")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"box": (32, 256)},
        {"box": (64, 32), "swizzle": "128B"},
        {"box": (128, 64), "swizzle": "none"},
        {"box": (16, 8), "swizzle": "32B"},
    ],
)
def test_a_tensor_map_at_the_limits_passes(change):
    check_tensor_map(replace(GOOD, **change), "operand A")


def test_a_refusal_is_an_error_that_the_command_line_prints():
    assert issubclass(Refused, RungsError)
