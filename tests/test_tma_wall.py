"""tma_wall: what is refused, how it is launched, its binaries' evidence, and every variant in the emulator."""

from __future__ import annotations

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from binaries import built, inspected, manifest_of
from rungs.answers import tma_wall as answers
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused, RungsError
from rungs.files import ROOT
from rungs.inspect import rules_of
from rungs.plan import InGlobal, TensorMap, check_tensor_map
from rungs.variants import Variant, load_device, load_experiment
from rungs.workloads import tma_wall
from workload_runs import emulate

WALL, ARCH = load_experiment("tma_wall"), "sm_90a"
H200 = load_device(ARCH)
RUNGS = {rung: variant for ladder in WALL.ladders.values() for rung, variant in ladder.rungs.items()}
VARIANTS = sorted(set(RUNGS.values()), key=lambda variant: variant.name)
BASE = tuple(WALL.base.values())
ADDRESSES = {"data": 1 << 30, "sums": 1 << 20, "fill": 1 << 21}


def binary(variant: Variant) -> Path:
    """The build manifest of the variant, or of the one with the same binary that differs in what only the plan reads."""
    return built(plainest(variant).name, ARCH)


def plainest(variant: Variant) -> Variant:
    """Factors `box` and `promotion` are read by the plan alone: the binary is the same for all of their levels."""
    levels = dict(variant.levels) | {"promotion": 128}
    return WALL.assign(levels if levels["swizzle"] else levels | {"box": 0})


def point(**axes: int) -> tuple[int, ...]:
    return tuple((dict(WALL.base) | axes).values())


def plan(rung: str, at: tuple[int, ...] = BASE, sms: int | None = 132):
    return tma_wall.plan(WALL, RUNGS[rung], H200, at, ADDRESSES, sms)


def only_map(rung: str, at: tuple[int, ...] = BASE) -> TensorMap:
    (found,) = [p for p in plan(rung, at).params if isinstance(p, TensorMap | InGlobal)]
    return found.tensor_map if isinstance(found, InGlobal) else found


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "axes", "sentence"),
    [
        (
            "WM0",
            {"tile_bytes": 1000},
            "tile_bytes=1000 is not a positive multiple of the 16 bytes that the copy engine moves at once: choose a multiple"
            " of 128.",
        ),
        (
            "WM0",
            {"tile_bytes": 1040},
            "tile_bytes=1040 is not a multiple of the 128 bytes of a line, of each of which one word is checked: choose a"
            " multiple of 128.",
        ),
        ("WM0", {"passes": 0}, "passes=0 leaves nothing to do: choose 1 or more."),
        ("WM0", {"stages": 3}, "stages=3 is no size of a ring: choose one of 1, 2, 4, 8."),
        ("WM0", {"ctas_per_sm": 0}, "ctas_per_sm=0 leaves nothing to do: choose 1 or more."),
        (
            "WM0",
            {"payload_kib": 12},
            "payload_kib=12 is not a positive multiple of the tile of 8192 bytes: choose a multiple of both.",
        ),
        (
            "WM0",
            {"payload_kib": 1 << 22},
            "payload_kib=4194304 is above what 32-bit coordinates reach: choose less than 4194304.",
        ),
        (
            "WM1",
            {"tile_bytes": 1536, "payload_kib": 96},
            "tile_bytes=1536 is not a multiple of the 1024 bytes of a 1D box: choose a multiple of 1024.",
        ),
        (
            "WM2",
            {"tile_bytes": 3072, "payload_kib": 96},
            "tile_bytes=3072 is not a power of two from 1024 on, of which the boxes of 2D and 3D maps are made: choose one.",
        ),
        (
            "WM3",
            {"tile_bytes": 512},
            "tile_bytes=512 is not a power of two from 1024 on, of which the boxes of 2D and 3D maps are made: choose one.",
        ),
        (
            "WM2",
            {"payload_kib": 64},
            "payload_kib=64 is not a multiple of 32 rows of 4096 bytes, the height of a box: choose a multiple of 128.",
        ),
        (
            "WM2",
            {"tile_bytes": 32768},
            "A ring of 8 tiles of 32768 bytes takes 262208 bytes of shared memory, but 1 CTAs per SM leave 232448 each on"
            " sm_90a: choose fewer stages or a smaller tile.",
        ),
        (
            "WC4",
            {"ctas_per_sm": 4},
            "A ring of 8 tiles of 8192 bytes takes 65664 bytes of shared memory, but 4 CTAs per SM leave 57344 each on sm_90a:"
            " choose fewer stages or a smaller tile.",
        ),
        (
            "WX32",
            {"tile_bytes": 16384},
            "wall_t0_c1_m2_x32_z0_p128_d0_i0 at tile_bytes=16384: box dimension 512 is not between 1 and 256: split the box.",
        ),
    ],
)
def test_a_point_that_cannot_be_is_one_sentence(rung, axes, sentence):
    for act in (tma_wall.check, tma_wall.plan):
        with pytest.raises(Refused) as refused:
            more = () if act is tma_wall.check else (ADDRESSES, 132)
            act(WALL, RUNGS[rung], H200, point(**axes), *more)
        assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("levels", "axes", "sentence"),
    [
        (
            {"swizzle": 128},
            {"tile_bytes": 16384, "stages": 4},
            "wall_t0_c1_m2_x0_z128_p128_d0_i0 at tile_bytes=16384: the box's inner row is 256 bytes, wider than the 128 of a 128B"
            " swizzle.",
        ),
        (
            {"swizzle": 128, "box": 64},
            {},
            "tile_bytes=8192 gives a box with rows of 64 bytes, narrower than the 128 of the swizzle, which would leave gaps in"
            " shared memory: choose rows as wide as the swizzle.",
        ),
    ],
)
def test_a_box_that_does_not_fit_its_swizzle_is_one_sentence(levels, axes, sentence):
    variant = WALL.assign(dict(RUNGS["WM2"].levels) | levels)
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
        tma_wall.check(WALL, variant, H200, point(**axes))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"box": (257, 8)}, "X: box dimension 257 is not between 1 and 256: split the box."),
        ({"strides": (4100,)}, r"X: stride 4100 is not a multiple of 16 bytes below 2\^40."),
        ({"box": (3, 8)}, "X: the box's inner row is 12 bytes, not a multiple of 16."),
        ({"l2_promotion": "512B"}, "X: there is no L2 promotion 512B: choose one of NONE, 64B, 128B, 256B."),
    ],
)
def test_a_map_that_the_driver_would_not_take_is_one_sentence(change, sentence):
    good = dict(address=1 << 20, dims=(1024, 64), strides=(4096,), box=(32, 8), swizzle="none", element_bytes=4)
    check_tensor_map(TensorMap(**good), "X")
    with pytest.raises(Refused, match=f"^{sentence}$"):
        check_tensor_map(TensorMap(**good | change), "X")


def test_a_chip_without_the_copy_engine_or_without_clusters_is_refused():
    for rung, arch, sentence in (
        ("WM0", "sm_80", "wall_t0_c1_m0_x0_z0_p128_d0_i0: tma_wall needs one of sm_90a, sm_100a, sm_120, not sm_80."),
        ("WC2", "sm_120", "wall_t0_c2_m2_x0_z0_p128_d0_i0: cluster of 2 needs one of sm_90a, sm_100a, not sm_120."),
    ):
        with pytest.raises(Refused) as refused:
            tma_wall.check(WALL, RUNGS[rung], load_device(arch), BASE)
        assert (str(refused.value), refused.value.status) == (sentence, "not on this chip")


@pytest.mark.parametrize(
    ("levels", "needs"),
    [
        ({"map": 0, "descriptor": 1}, "requires descriptor in 0, not 1"),
        ({"map": 3, "box": 64}, "requires box in 0, not 64"),
        ({"map": 0, "multicast": 2}, "requires map in 2, not 0"),
        ({"direction": 1}, "requires map in 0, not 2"),
    ],
)
def test_levels_that_do_not_go_together(levels, needs):
    with pytest.raises(RungsError, match=needs):
        WALL.assign(dict(RUNGS["WM2"].levels) | levels)


# ---- launched --------------------------------------------------------------------------------------------------------


def test_every_point_of_the_sweeps_can_be_launched():
    """At a few tenths of a second each they stay far under the four minutes that an experiment may take."""
    total = 0
    for variant in VARIANTS:
        points = WALL.shapes(variant)
        total += len(points)
        assert BASE in points
        for each in points:
            found = tma_wall.plan(WALL, variant, H200, each, ADDRESSES, 132)
            tile, ctas, stages, _, _ = each
            assert found.smem_bytes >= stages * (tile + 8 * (1 + (found.cluster[0] > 1)))
            per_cta = -(-(found.smem_bytes + H200.smem_reserved_bytes) // 128) * 128
            assert H200.smem_per_sm_bytes // per_cta == ctas == tma_wall.ctas_per_sm(WALL, variant, H200, each)
            assert found.grid[0] % found.cluster[0] == 0
    assert (len(VARIANTS), total) == (21, 228)


def test_the_sweep_has_the_points_of_luo_et_al():
    """Luo et al., arXiv:2501.12084: 1D tiles of 1 to 16 KB, 2D tiles of 32 x 32 and 64 x 64 floats, 1 to 4 CTAs per SM."""
    tiles = {"WM0": (1024, 2048, 8192, 16384), "WM2": (4096, 16384)}
    for rung, sizes in tiles.items():
        wanted = {(tile, ctas, 1, 262144, 1) for tile in sizes for ctas in (1, 2, 3, 4)}
        assert wanted <= set(WALL.shapes(RUNGS[rung]))
    assert [only_map("WM2", point(tile_bytes=t, stages=1)).box for t in tiles["WM2"]] == [(32, 32), (64, 64)]


def test_the_grid_is_what_fits_at_once():
    assert [plan("WM2", point(ctas_per_sm=c, stages=1)).grid[0] for c in (1, 2, 4)] == [132, 264, 528]
    # Where no GPU says how many it holds: clusters of four come to lie in partitions of 16 or 18 SMs.
    assert [tma_wall.grid(RUNGS[rung], H200, BASE, None) for rung in ("WC1", "WC2", "WC4")] == [132, 132, 128]
    assert [tma_wall.grid(RUNGS["WC4"], H200, point(ctas_per_sm=c), 124) for c in (1, 4)] == [124, 496]
    assert [plan(rung).cluster for rung in ("WC1", "WC2", "WC4")] == [(1, 1, 1), (2, 1, 1), (4, 1, 1)]
    # A CTA with fewer tiles than bring its ring round would measure how a ring fills.
    assert plan("WM2", point(payload_kib=1024, stages=2)).grid[0] == 128 // 4


def test_the_maps_of_the_rungs():
    rows = 262144 * 1024 // 4096
    wide, high = only_map("WX1024"), only_map("WX32")
    assert (wide.dims, wide.strides, wide.box, wide.element_bytes) == ((1024, rows), (4096,), (256, 8), 4)
    assert [only_map(f"WX{x}").box for x in (0, 128, 64)] == [(64, 32), (32, 64), (16, 128)] and high.box == (8, 256)
    assert [only_map(f"WP{p}").l2_promotion for p in (0, 64, 128, 256)] == ["NONE", "64B", "128B", "256B"]
    assert [only_map(f"WZ{z}").swizzle for z in ("32p", "32", "64", "128")] == ["none", "32B", "64B", "128B"]
    deep = only_map("WM3")
    assert (deep.dims, deep.strides, deep.box) == ((1024, 8, rows // 8), (4096, 32768), (64, 8, 4))
    line = only_map("WM1")
    assert (line.dims, line.strides, line.box) == ((262144 * 256,), (), (256,))
    assert [only_map(f"WC{c}").box for c in (1, 2, 4)] == [(64, 32), (64, 16), (64, 8)]


def test_where_the_tensor_map_lies():
    assert isinstance(plan("WD0").params[0], TensorMap) and isinstance(plan("WD1").params[0], TensorMap)
    assert plan("WD2").params[0] == InGlobal(only_map("WD0"))
    assert plan("WM0").params[0] == (ADDRESSES["data"], 8)


def test_the_steps_of_one_contract_have_the_same_result():
    """Variants whose CTAs sum the same words in the same order, or that store the same, share a contract, and no others do."""
    at = point(stages=2, payload_kib=1024)
    data = np.random.default_rng(1).standard_normal(at[3] * 256)
    by_contract: dict[str, set[bytes]] = {}
    for variant in VARIANTS:
        inputs = {"data": data, "fill": data[: at[0] * at[2] // 4]}
        (found,) = tma_wall.expected(WALL, variant, H200, at, 132, inputs).values()
        by_contract.setdefault(WALL.contract(variant), set()).add(found.tobytes())
    assert all(len(results) == 1 for results in by_contract.values())
    assert len(set.union(*by_contract.values())) == len(by_contract) == 10


# ---- emulated --------------------------------------------------------------------------------------------------------


@functools.cache
def build_all() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(binary, {plainest(variant) for variant in VARIANTS}))


def ptx(variant: Variant) -> Path:
    build_all()
    return binary(variant).with_suffix(".ptx")


def counted(variant: Variant, at: tuple[int, ...]) -> dict[str, int]:
    """The closed forms. A multicast is asked for in as many parts as its cluster has CTAs, and each CTA reads what lands in it."""
    tile, _, stages, payload_kib, passes = at
    tiles, level = passes * payload_kib * 1024 // tile, dict(variant.levels)
    if level["direction"]:
        filled = tma_wall.grid(variant, H200, at, None) * stages * tile // 512
        return {"tma_store": tiles, "bytes_tma_store": tiles * tile, "sts": filled, "ldg": filled}
    parts = tile // 1024 if level["map"] == 1 else level["multicast"]
    reads = tiles * level["multicast"] * -(-tile // 4096)
    return {
        "tma_load": tiles * parts,
        "bytes_tma_load": tiles * tile * level["multicast"],
        "lds": reads,
        "wavefronts_lds": reads,
    }


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_right_and_counts_what_it_should(variant):
    points = tma_wall.emulated_points(WALL, variant, H200)
    for at, how in (
        (points[0], {"race": True}),
        (points[1], {"race": True, "schedule": "random", "delivery": "early"}),
        (points[2], {"schedule": "descending"}),
        (points[2], {"fill": "normal"}),
    ):
        result, outputs, wanted = emulate(WALL, variant, ptx(variant), at, **how)
        assert not result.findings, result.findings[0]
        for name, value in wanted.items():
            if how.get("fill") == "normal" and name == "sums":
                assert np.linalg.norm(outputs[name] - value) < 1e-5 * np.linalg.norm(value)
            else:
                np.testing.assert_array_equal(outputs[name], value.astype(np.float32))
        counts = counted(variant, at)
        assert {name: result.counts.total(name) for name in counts} == counts
        assert result.counts.total("conflicts_lds") == 0


def test_one_wrong_word_in_any_line_is_seen():
    """Each line of 128 bytes has a word that the sums hold."""
    variant = RUNGS["WM2"]
    at = tma_wall.emulated_points(WALL, variant, H200)[0]
    zeros = np.zeros(at[3] * 256)
    sums = tma_wall.expected(WALL, variant, H200, at, None, {"data": zeros + 1})["sums"]
    assert sums.sum() == at[3] * 1024 // 128
    assert tma_wall.work(WALL, variant, H200, at, None).read_bytes == at[3] * 1024


MUTATIONS = [
    # rung, pattern, replacement, how many (0: all), what is said
    (
        "WM2",
        r"mbarrier\.try_wait\.parity\.shared::cta\.b64 (p\S*), \[(\S+)\], (\S+);",
        r"setp.eq.u32 \1, 0, 0;",
        0,
        None,
    ),
    (
        "WM0",
        r"(mbarrier\.arrive\.expect_tx\S+ _, \[\S+\], )(\S+);",
        r"\g<1>1024;",
        0,
        "expected fewer bytes|for ever|lands in phase",
    ),
    ("WM3", r"fence\.mbarrier_init\S+;", "", 0, None),
    ("WZ128", r"xor\.b32", "or.b32", 0, None),
    (
        "WC2",
        r"mbarrier\.try_wait\.parity\.shared::cta\.b64 (p\S*), \[(\S+)\], (\S+);",
        r"setp.eq.u32 \1, 0, 0;",
        -1,
        None,
    ),
    ("WC2", r"barrier\.cluster\.(arrive|wait)\.aligned;", "", 2, None),
    (
        "WC2",
        r"mapa\.shared::cluster\.u32 (\S+), (\S+), (\S+);",
        r"mapa.shared::cluster.u32 \1, \2, 0;",
        0,
        "arrives .* times at",
    ),
    ("WG1", r"fence\.proxy\.async\.shared::cta;", "", 0, None),
    ("WG3", r"cp\.async\.bulk\.wait_group [^;]+;", "", 0, "may still read|never"),
    ("WG3", r"cp\.async\.bulk\.commit_group;", "", 0, None),
]


@pytest.mark.parametrize(("rung", "pattern", "replacement", "count", "said"), MUTATIONS)
def test_what_is_broken_is_caught(rung, pattern, replacement, count, said, tmp_path):
    variant = RUNGS[rung]
    text = ptx(variant).read_text()
    places = list(re.finditer(pattern, text))
    assert places, pattern
    if count < 0:  # the last one
        start = places[count].start()
        changed = text[:start] + re.sub(pattern, replacement, text[start:])
    else:
        changed = re.sub(pattern, replacement, text, count=count)
    path = tmp_path / "k.ptx"
    path.write_text(changed)
    at = tma_wall.emulated_points(WALL, variant, H200)[0]
    try:
        result, outputs, wanted = emulate(WALL, variant, path, at, race=True)
    except EmulationError as error:
        assert said is None or re.search(said, str(error)), error
        return
    wrong = any(not np.array_equal(outputs[name], value.astype(np.float32)) for name, value in wanted.items())
    assert wrong or result.findings


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cycles", "told"), [(1000, []), (2000, ["50 warps of WC4 were alive on average, of WC1 100"])]
)
def test_a_rung_whose_clusters_ran_one_after_the_other_is_named(cycles, told):
    """100 warps for 1000 cycles each, which takes 1000 where all are there at once, and 2000 where half of them wait."""
    rows = [
        {"variant": RUNGS[rung].name, "payload_kib": payload, "want": want, "value": value}
        for rung, elapsed in (("WC1", 1000), ("WC2", 1000), ("WC4", cycles))
        for payload in (262144, 16384)
        for want, value in (
            ("instructions", 20000.0),
            ("stall wait", 3.0),
            ("stall selected", 2.0),
            ("stall gmma", None),
            ("SM cycles", elapsed if payload == 262144 else 1.0),
        )
    ]
    notes = answers.waiting_notes(SimpleNamespace(experiment=WALL, rows=lambda kind: rows))
    assert len(notes) == len(told) and all(part in note for part, note in zip(told, notes, strict=True))
    assert answers.waiting_notes(SimpleNamespace(experiment=WALL, rows=lambda kind: [])) == []


# ---- evidence --------------------------------------------------------------------------------------------------------


def test_what_only_the_plan_reads_is_not_in_the_kernel():
    for name in ("tma_wall/tma_wall.cu", "tma_wall/source.cuh", "copy_engine.cuh"):
        text = (ROOT / "kernels" / name).read_text()
        assert not re.search(r"VARIANT_(BOX|PROMOTION)", text)


@pytest.mark.parametrize(
    ("arch", "rungs"),
    [
        (ARCH, [rung for rung, variant in RUNGS.items() if plainest(variant) == variant]),
        ("sm_100a", ["WC4"]),
        ("sm_120", ["WD2"]),
    ],
)
def test_the_binaries_have_their_evidence(arch, rungs):
    variants = {RUNGS[rung] for rung in rungs}
    build_all()
    for variant, frame in inspected(variants, arch).items():
        manifest = manifest_of(variant.name, arch)
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", [])
        assert manifest["ptxas"]["stack_bytes"] == manifest["ptxas"]["spill_store_bytes"] == 0
        assert manifest["ptxas"]["registers"] <= 40
        assert frame[frame["status"] != "ok"].empty, list(frame[frame["status"] != "ok"]["reason"])
        assert (frame["kind"] == "evidence").sum() == len(rules_of(variant)) >= 7
