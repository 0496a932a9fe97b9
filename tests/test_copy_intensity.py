"""copy_intensity: what its plan launches and refuses, its binaries and their evidence, and its kernels in the emulator."""

from __future__ import annotations

import functools
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from binaries import built, manifest_of
from rungs import schemas
from rungs.emulator import launch
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused, RungsError
from rungs.inspect import ctas_per_sm, inspect, rules_of
from rungs.plan import TensorMap, check_tensor_map
from rungs.variants import CONFIG, Variant, architectures, load_device, load_experiment, parse_experiment
from rungs.workloads import copy_intensity as copies

COPY = load_experiment("copy_intensity")
RUNGS = {rung: variant for ladder in COPY.ladders.values() for rung, variant in ladder.rungs.items()}
VARIANTS = sorted(set(RUNGS.values()), key=lambda variant: variant.name)
H200 = load_device("sm_90a")
ADDRESSES = {"payload": 1 << 20, "result": 1 << 40}
MIB = 1024
# One variant of each way of loading, with more than one stage where there is a choice.
WAYS = ["CO9", "CP0", "CP1", "CA1", "CA4", "CA5", "CP7", "CP2", "CP3", "CA10", "CP5", "CO6", "CR3"]
BEFORE_TMA = [RUNGS[rung] for rung in ("CO9", "CP0", "CP1", "CA1", "CA4", "CA5", "CP7")]


def plan(variant: Variant, point: tuple[int, ...], arch: str = "sm_90a", experiment=COPY, **addresses: int):
    return copies.plan(experiment, variant, load_device(arch), point, ADDRESSES | addresses, None)


def values(variant: Variant) -> dict[str, int]:
    return COPY.values(variant)


# ---- the experiment and its plan -------------------------------------------------------------------------------------


def test_the_sweeps_are_around_a_base_point_and_never_a_full_product():
    assert COPY.axis_names == ("fma_iters", "payload_kib", "grid")
    assert len(VARIANTS) == 35
    points = {variant: COPY.shapes(variant) for variant in VARIANTS}
    assert sum(len(of_one) for of_one in points.values()) == 439
    for variant, of_one in points.items():
        assert {(1, 16 * MIB, 0), (1, 16 * MIB, 1), (1, 16 * MIB, 2), (1, 1024 * MIB, 2)} <= set(of_one)
        for point in of_one:
            assert plan(variant, point).grid[0] > 0  # none is refused on the chip that the goal is set for
    curve = {(fma, 16 * MIB, 2) for fma in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    assert curve <= set(points[RUNGS["CA10"]]) and not curve <= set(points[RUNGS["CT4"]])


def test_the_seeds_modes_are_measured_at_the_seeds_points():
    found = copies.seed_rungs(COPY)
    assert {mode: COPY.rung_names(variant)[0] for mode, variant in found.items()} == {
        "sync": "CP0",
        "bulk1d": "CP2",
        "tensor2d": "CP5",
        "pipe2": "CP3",
    }
    for variant in found.values():
        assert {(fma, 16 * MIB, 0) for fma in (1, 2, 4, 8, 16, 32, 64, 128, 256)} <= set(COPY.shapes(variant))
        launched = plan(variant, (1, 16 * MIB, 0))
        assert (launched.grid, launched.block) == ((64, 1, 1), (256, 1, 1))


@pytest.mark.parametrize(("grid", "ctas"), [(0, 64), (1, 132), (2, 264), (8, 1056)])
def test_the_grid(grid, ctas):
    launched = plan(RUNGS["CP0"], (8, 16 * MIB, grid))
    assert launched.grid == (ctas, 1, 1)
    assert launched.params == ((1 << 20, 8), (1 << 40, 8), (4096, 4), (8, 4), (0x3F800000, 4), (0x3F800000, 4))


def test_no_more_ctas_than_tiles_and_the_gpus_own_number_of_sms():
    assert plan(RUNGS["CP0"], (1, 8, 2)).grid == (2, 1, 1)
    assert copies.plan(COPY, RUNGS["CP0"], H200, (1, 16 * MIB, 2), ADDRESSES, 60).grid == (120, 1, 1)


@pytest.mark.parametrize("arch", architectures())
def test_the_shared_memory_admits_the_ctas_of_the_grid_and_no_more(arch):
    device = load_device(arch)
    for variant in VARIANTS:
        for point in COPY.shapes(variant):
            try:
                launched = plan(variant, point, arch)
            except Refused:
                continue
            wanted = copies.ctas_per_sm(COPY, variant, device, point)
            need = values(variant)["VARIANT_STAGES"] * values(variant)["TILE_BYTES"] + 128
            if wanted is None:
                assert (point[2], launched.smem_bytes) == (0, need if variant.level("load") else 0)
            else:
                assert ctas_per_sm(device, 24, launched.smem_bytes, launched.block[0]) == wanted == point[2]


def test_the_tensor_map():
    """The seed's tile is 32 x 32 floats; the payload has rows of 32 floats, so that the tile is contiguous, or of 2048."""
    assert plan(RUNGS["CP4"], (1, 16 * MIB, 2)).params[0] == TensorMap(
        1 << 20, (32, 131072), (128,), (32, 32), "none", "128B", 4
    )
    assert plan(RUNGS["CP5"], (1, 16 * MIB, 2)).params[0] == TensorMap(
        1 << 20, (2048, 2048), (8192,), (32, 32), "none", "128B", 4
    )
    assert plan(RUNGS["CO8"], (1, 1024 * MIB, 2)).params[0].box == (32, 128)


def test_what_a_launch_does():
    work = copies.work(COPY, RUNGS["CP0"], H200, (8, 16 * MIB, 0), None)
    assert (work.read_bytes, work.written_bytes, work.flop) == (1 << 24, 1 << 24, 2 * 8 << 22)
    work = copies.work(COPY, RUNGS["CR0"], H200, (8, 16 * MIB, 2), None)
    assert (work.read_bytes, work.written_bytes, work.flop) == (1 << 24, 264 * 256 * 16, 17 << 22)


def test_what_is_expected_is_the_same_of_a_tensor():
    import torch

    for rung, point in (("CP5", (3, 512, 0)), ("CR0", (2, 16 * 37, 1)), ("CR0", (2, 16 * 3, 1)), ("CP0", (1, 64, 2))):
        payload = np.random.default_rng(1).integers(-8, 9, point[1] * 256).astype(np.float64)
        numbers, tensor = (
            copies.expected(COPY, RUNGS[rung], H200, point, 5, {"payload": data})["result"]
            for data in (payload, torch.from_numpy(payload))
        )
        assert np.array_equal(numbers, tensor.numpy())
        assert numbers.shape == copies.operands(COPY, RUNGS[rung], H200, point, 5)["result"].shape


# ---- refused ---------------------------------------------------------------------------------------------------------


def with_levels(factor: str, *levels: int):
    """The experiment with more levels of a factor."""
    raw = schemas.read_yaml(CONFIG / "experiments" / "copy_intensity.yaml", "experiment")
    raw["factors"][factor]["levels"] |= {level: {"title": str(level)} for level in levels}
    raw["factors"]["load"]["levels"][1]["requires"].pop("tile")
    return parse_experiment(raw)


@pytest.mark.parametrize(
    ("rung", "point", "sentence"),
    [
        ("CP0", (0, 1024, 2), "fma_iters=0 is not between 1 and 1048576, up to which results are exact: choose one of those."),
        (
            "CP0",
            (1, 1026, 2),
            "payload_kib=1026 is 1050624 bytes, not a positive multiple of the tile of 4096: choose a multiple of the tile.",
        ),
        ("CP0", (1, 0, 2), "payload_kib=0 is 0 bytes, not a positive multiple of the tile of 4096: choose a multiple of the tile."),
        (
            "CP0",
            (1, 1024, 9),
            "grid=9 asks for 9 CTAs of 256 threads on an SM, but an SM of sm_90a holds 2048 threads: choose 0 (for 64 CTAs in"
            " all) or 1 to 8.",
        ),
        (
            "CO6",
            (1, 1024, 8),
            "grid=8 asks for 8 CTAs of 288 threads on an SM, but an SM of sm_90a holds 2048 threads: choose 0 (for 64 CTAs in"
            " all) or 1 to 7.",
        ),
        ("CP0", (1, 1024, -1), "grid=-1 asks for -1 CTAs of 256 threads on an SM"),
        (
            "CO5",
            (1, 1024, 4),
            "cpy_L6_s4_p0_t16384_v32_w1 needs 65664 bytes of shared memory, but 4 CTAs per SM leave 57344 each on sm_90a: choose"
            " fewer stages, a smaller tile or a smaller grid.",
        ),
        (
            "CP5",
            (1, 1028, 2),
            "The payload of 1052672 bytes is not a multiple of 262144, a row of tiles of the matrix with 2048 columns: choose a"
            " multiple of 262144.",
        ),
        ("CP0", (1, 1 << 33, 2), "payload_kib=8589934592 is more than 2147483647 tiles of 4096 bytes: choose fewer."),
        (
            "CP4",
            (1, 1 << 30, 2),
            "cpy_L7_s1_p0_t4096_v32_w1, the payload: dimension 8589934592 is not between 1 and 2^32.",
        ),
    ],
)  # fmt: skip
def test_a_point_that_is_refused(rung, point, sentence):
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}") as refusal:
        copies.check(COPY, RUNGS[rung], H200, point)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("load", "tile", "sentence"),
    [
        (
            6,
            1000,
            "A tile of 1000 bytes is not a multiple of the 16 that a thread moves at once: choose a multiple of 16.",
        ),
        (
            6,
            4112,
            "A tile of 4112 bytes does not give each of 256 threads as many chunks of 16: choose at most 4096 or a multiple of"
            " it.",
        ),
        (
            1,
            528,
            "A tile of 528 bytes does not give each of 256 threads as many words of 4: choose a multiple of 1024.",
        ),
        (7, 528, "A tile of 528 bytes is no box of 32 floats a row: choose a multiple of 128 bytes."),
        (
            7,
            65536,
            "cpy_L7_s1_p0_t65536_v32_w1, the payload: box dimension 512 is not between 1 and 256: split the box.",
        ),
    ],
)
def test_a_tile_that_is_refused(load, tile, sentence):
    experiment = with_levels("tile", tile)
    variant = experiment.assign({"load": load, "stages": 1, "producer": 0, "tile": tile, "view": 32, "write": 1})
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
        plan(variant, (1, tile, 1), experiment=experiment)


def test_rows_that_are_refused():
    experiment = with_levels("view", 33)
    variant = experiment.assign(dict(RUNGS["CP4"].levels) | {"view": 33})
    with pytest.raises(
        Refused, match=r"^Rows of 33 floats are 132 bytes, not a multiple of a box's 128: choose a multiple of 32 f"
    ):
        plan(variant, (1, 1056, 1), experiment=experiment)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"swizzle": "128B", "box": (64, 32)},
            "the box's inner row is 256 bytes, wider than the 128 of a 128B swizzle",
        ),
        ({"strides": (132,)}, "stride 132 is not a multiple of 16 bytes"),
        ({"box": (3, 32)}, "the box's inner row is 12 bytes, not a multiple of 16"),
        ({"box": (32, 257)}, "box dimension 257 is not between 1 and 256"),
    ],
)
def test_a_tensor_map_of_floats_that_the_driver_would_not_take(change, sentence):
    arguments = {"address": 0, "dims": (64, 64), "strides": (256,), "box": (32, 32), "swizzle": "none"} | change
    with pytest.raises(Refused, match=sentence):
        check_tensor_map(TensorMap(**arguments, element_bytes=4), "x")


@pytest.mark.parametrize("operand", ["payload", "result"])
def test_an_address_that_is_refused(operand):
    with pytest.raises(Refused, match=rf"operand {operand} is at 0x8, which is not a multiple of 16 bytes\."):
        plan(RUNGS["CP0"], (1, 1024, 1), **{operand: 8})


def test_tma_on_a_chip_without_it_is_refused():
    with pytest.raises(
        Refused, match=r"^cpy_L6_s2_p0_t4096_v32_w1: 1D bulk copy needs one of sm_90a, sm_100a, sm_120, not sm_80\."
    ):
        plan(RUNGS["CP3"], (1, 1024, 1), "sm_80")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"load": 3, "producer": 1}, "requires producer in 0"),
        ({"load": 6, "stages": 1, "producer": 1}, "requires stages in 2, 3, 4, 8"),
        ({"load": 2, "stages": 3}, "requires stages in 1, 2"),
        ({"load": 5, "stages": 2}, "requires stages in 1"),
        ({"load": 4, "stages": 1}, "requires stages in 2, 3, 4"),
        ({"load": 6, "view": 2048}, "requires load in 7"),
        ({"write": 0, "tile": 4096}, "requires tile in 16384"),
    ],
)
def test_levels_that_do_not_go_together(change, sentence):
    with pytest.raises(RungsError, match=sentence):
        COPY.assign(dict(RUNGS["CP3"].levels) | change)


# ---- binaries --------------------------------------------------------------------------------------------------------

# Those that are looked at; the pipeline looks at all.
INSPECTED = [(RUNGS[rung], "sm_90a") for rung in (*WAYS, "CT0", "CO7", "CO8")]
INSPECTED += [(variant, "sm_80") for variant in BEFORE_TMA]
INSPECTED += [
    (RUNGS[rung], arch)
    for rung, arch in (("CP7", "sm_100a"), ("CP7", "sm_120"), ("CO6", "sm_100a"), ("CA10", "sm_120"))
]
PAIRS = list(dict.fromkeys([*((variant, "sm_90a") for variant in VARIANTS), *INSPECTED]))


@pytest.fixture(scope="module")
def binaries():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: built(pair[0].name, pair[1]), PAIRS))


@functools.cache
def inspected(variant: Variant, arch: str) -> pd.DataFrame:
    return pd.DataFrame(inspect(variant.name, arch, built(variant.name, arch), "pip"))


def opcodes(variant: Variant, arch: str) -> pd.Series:
    frame = inspected(variant, arch)
    return frame[frame["kind"] == "opcode_total"].set_index("name")["value"]


def test_every_rung_builds_without_spills(binaries):
    for variant, arch in PAIRS:
        manifest = manifest_of(variant.name, arch)
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", []), (variant.name, arch)
        ptxas = manifest["ptxas"]
        assert [ptxas[key] for key in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")] == [0, 0, 0]


def test_every_level_has_its_evidence(binaries):
    for variant, arch in INSPECTED:
        frame = inspected(variant, arch)
        assert frame[frame["status"] != "ok"].empty, frame[frame["status"] != "ok"]["reason"].tolist()
        assert (frame["kind"] == "evidence").sum() == len(rules_of(variant, arch)) >= 10


def test_arithmetic_reads_of_the_stage_and_stores_are_the_same_in_every_variant_of_a_tile(binaries):
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for variant in [variant for variant, arch in INSPECTED if arch == "sm_90a"]:
        totals = opcodes(variant, "sm_90a")
        reads = totals.get("LDS.128", 0) if variant.level("load") else totals["LDG.E.LTC128B.128"]
        key = (variant.level("tile"), variant.level("write"))
        found.setdefault(key, set()).add(tuple(int(n) for n in (totals["FFMA"], reads, totals["STG.E.128"])))
    assert all(len(each) == 1 for each in found.values()), found
    assert found[4096, 1] == {(28, 1, 1)}  # four chains: a loop unrolled by four, and its rest of up to three


@pytest.mark.parametrize(
    ("arch", "became"),
    [("sm_80", "LDGSTS.E.BYPASS.128"), ("sm_90a", "UBLKCP.S.G"), ("sm_100a", "UBLKCP.S.G"), ("sm_120", "UBLKCP.S.G")],
)
def test_what_memcpy_async_becomes_on_each_architecture(arch, became, binaries):
    totals = opcodes(RUNGS["CP7"], arch)
    assert {"LDGSTS.E.BYPASS.128", "UBLKCP.S.G"} & set(totals.index) == {became}


# ---- emulated --------------------------------------------------------------------------------------------------------


def emulate(
    variant: Variant,
    point: tuple[int, ...],
    arch: str = "sm_90a",
    *,
    sms: int | None = 2,
    fill="integer",
    text="",
    **how,
):
    """Counts, findings and the largest relative error of a launch; `text` is other PTX than the binary's."""
    device, generator, memory = load_device(arch), np.random.default_rng(1), GlobalMemory()
    buffers = copies.operands(COPY, variant, device, point, sms)
    shape = buffers["payload"].shape
    payload = generator.integers(-8, 9, shape) if fill == "integer" else generator.standard_normal(shape)
    addresses = {
        "payload": memory.put("payload", payload.astype(np.float32)),
        "result": memory.reserve("result", buffers["result"].shape, np.float32),
    }
    launched = copies.plan(COPY, variant, device, point, addresses, sms)
    result = launch.run(Path(text) if text else built(variant.name, arch).with_suffix(".ptx"), launched, memory, **how)
    inputs = {"payload": memory["payload"].astype(np.float64)}
    wanted = copies.expected(COPY, variant, device, point, sms, inputs)["result"]
    assert wanted.shape == buffers["result"].shape
    error = np.linalg.norm(memory["result"].astype(np.float64) - wanted) / np.linalg.norm(wanted)
    return result, float(error)


def kib(variant: Variant, tiles: int) -> int:
    """A payload of so many tiles, or of the next whole rows of them."""
    across = variant.level("view") // 32
    return -(-tiles // across) * across * variant.level("tile") // 1024


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_rung_is_right_and_free_of_races(variant, binaries):
    """Two CTAs with six tiles and five: every ring of stages comes round, and one CTA goes on without the other."""
    for tiles, sms in ((11, 2), (1, 1), (3, 1)):
        result, error = emulate(variant, (3, kib(variant, tiles), 1), sms=sms, race=tiles == 11)
        assert error == 0 and not result.findings, (tiles, error, result.findings)


@pytest.mark.parametrize("variant", BEFORE_TMA, ids=lambda variant: variant.name)
def test_what_older_chips_run_is_right_too(variant, binaries):
    result, error = emulate(variant, (3, kib(variant, 11), 1), "sm_80", race=True)
    assert error == 0 and not result.findings


@pytest.mark.parametrize("schedule", ["ascending", "descending", "random"])
@pytest.mark.parametrize("rung", ["CA1", "CA4", "CA5", "CP7", "CP3", "CO6"])
def test_no_schedule_makes_a_rung_wrong(rung, schedule, binaries):
    for delivery in ("early", "late"):
        how = {"schedule": schedule, "delivery": delivery, "seed": 3}
        result, error = emulate(RUNGS[rung], (2, kib(RUNGS[rung], 5), 1), sms=1, race=True, **how)
        assert error == 0 and not result.findings


def test_random_data_differ_by_roundings_only(binaries):
    for rung in ("CP0", "CR3"):
        _, error = emulate(RUNGS[rung], (256, 176, 1), fill="normal")
        assert 0 < error < 1e-5


def test_the_points_to_emulate_bring_every_ring_round():
    for variant in VARIANTS:
        points = copies.emulated_points(COPY, variant, H200)
        assert len(set(points)) == 3
        for point in points:
            plan(variant, point)
        tiles = points[0][1] * 1024 // variant.level("tile")
        assert tiles // 2 > variant.level("stages")


def test_a_point_to_emulate_as_it_is(binaries):
    for rung in ("CP5", "CR0"):
        for point in copies.emulated_points(COPY, RUNGS[rung], H200):
            assert emulate(RUNGS[rung], point, sms=2)[1] == 0


TILES = 11


@pytest.mark.parametrize(
    ("rung", "arch"),
    [(rung, "sm_90a") for rung in (*WAYS, "CT0", "CT1", "CT9", "CT4", "CO8")] + [("CA5", "sm_80"), ("CP7", "sm_80")],
)
def test_counts_are_those_of_the_geometry(rung, arch, binaries):
    variant = RUNGS[rung]
    tiles = kib(variant, TILES) * 1024 // variant.level("tile")
    counts = Counter(emulate(variant, (3, kib(variant, TILES), 1), arch)[0].counts.totals)
    tile, load, writes = (variant.level(factor) for factor in ("tile", "load", "write"))
    chunks = tile // 16
    accesses = tiles * -(-chunks // 32)  # of 16 bytes by a warp, over all tiles
    engine = load in (6, 7) or (load == 5 and arch == "sm_90a")
    assert counts["lds"] == (accesses if load else 0)
    assert counts["wavefronts_lds"] == (tiles * chunks // 8 if load else 0)  # eight lanes of 16 bytes in each
    assert counts["conflicts_lds"] == counts["conflicts_sts"] == 0
    assert counts["ldg"] == {0: accesses, 1: 4 * accesses if chunks >= 256 else tiles * tile // 128, 2: accesses}.get(
        load, 0
    )
    assert counts["sts"] == (counts["ldg"] if load else 0)
    assert counts["ldgsts"] == (accesses if load in (3, 4) or (load == 5 and not engine) else 0)
    assert counts["sectors_ldg"] + counts["sectors_ldgsts"] == (0 if engine else tiles * tile // 32)
    assert (counts["tma_load"], counts["bytes_tma_load"]) == ((tiles, tiles * tile) if engine else (0, 0))
    ctas = min(2, tiles)
    # cuda::pipeline counts its users in shared memory, by a generic store of each CTA.
    assert counts["stg"] == (accesses if writes else ctas * 8) + (ctas if load == 4 else 0)
    assert counts["sectors_stg"] >= (tiles * tile // 32 if writes else ctas * 256 * 16 // 32)


# ---- mutations -------------------------------------------------------------------------------------------------------

BAR = (r"^\s*bar\.sync\s+0;", "")
WAIT = r"^\s*mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64 p, \[(%r\d+)\], (%r\d+);"
EXPECT = r"(mbarrier\.arrive\.expect_tx[^,]*, \[%r\d+\]), %r\d+;"
FENCE = (r"^\s*fence\.mbarrier_init[^;]*;", "")
INVERTED = r".reg .b32 q;\nxor.b32 q, \2, 1;\nmbarrier.try_wait.parity.shared.b64 p, [\1], q;"
MUTATIONS = [
    ("a barrier dropped", BAR, ["CP0", "CP1", "CA1", "CA2", "CA4", "CP7", "CP2", "CP3", "CA10", "CO6"]),
    ("a wait for groups dropped", (r"^\s*cp\.async\.wait_group \d+;", ""), ["CA2", "CA4"]),
    ("a wait for groups weakened", (r"cp\.async\.wait_group 1;", "cp.async.wait_group 2;"), ["CA4"]),
    ("an arrival of copies dropped", (r"^\s*cp\.async\.mbarrier\.arrive[^;]*;", ""), ["CA5", "CP7@sm_80"]),
    ("an arrival dropped", (r"^\s*mbarrier\.arrive\.shared[^;]*;", ""), ["CA5", "CP7", "CO6"]),
    ("the parity of a wait inverted", (WAIT, INVERTED), ["CA5", "CP2", "CP3", "CA10", "CO6"]),
    ("a wait dropped", (WAIT, "setp.eq.u32 p, 0, 0;"), ["CP2", "CP3", "CA10", "CO6"]),
    ("expect_tx too large", (EXPECT, r"\1, 99328;"), ["CP2", "CP3", "CA10", "CO6"]),
    ("expect_tx too small", (EXPECT, r"\1, 1024;"), ["CP2", "CP3", "CA10", "CO6"]),
    ("expect_tx dropped", (r"^\s*mbarrier\.expect_tx[^;]*;", ""), ["CP7"]),
    ("the fence after mbarrier.init dropped", FENCE, ["CP7", "CP2", "CP3", "CO6"]),
    ("shared memory moved by 8 B", (r"(mov\.u32 \s*%r\d+, bytes);", r"\1+8;"), ["CP1", "CA4", "CA5", "CP7", "CP3"]),
]
MUTANTS = [
    pytest.param(each, pattern, replacement, id=f"{name}-{each}")
    for name, (pattern, replacement), rungs in MUTATIONS
    for each in rungs
]


@pytest.mark.parametrize(("each", "pattern", "replacement"), MUTANTS)
def test_a_mutation_is_reported(each, pattern, replacement, tmp_path, binaries):
    """At each place alone, watched by the race detector; the shared memory moves at all places at once."""
    rung, _, arch = each.partition("@")
    arch = arch or "sm_90a"
    variant, path = RUNGS[rung], tmp_path / "mutant.ptx"
    text = built(variant.name, arch).with_suffix(".ptx").read_text(encoding="utf-8")
    matches = list(re.finditer(pattern, text, re.M))
    assert matches
    mutants = [text[: m.start()] + m.expand(replacement) + text[m.end() :] for m in matches]
    if "bytes" in pattern:
        mutants = [re.sub(pattern, replacement, text)]
    for number, mutant in enumerate(mutants):
        path.write_text(mutant, encoding="utf-8")
        try:
            result, error = emulate(variant, (1, kib(variant, TILES), 1), arch, text=str(path), race=True)
        except EmulationError:
            continue
        assert result.findings or error != 0, f"place {number} of {variant.name} goes unseen"


# ---- the seed's table ------------------------------------------------------------------------------------------------


def test_the_seeds_columns_are_those_of_its_csv():
    """The seed's program on an H200: ../shared/reference/b08_intensity_h200.csv, rows of fma_iters 1 and 256, and its speed-ups."""
    times = {
        "sync": {1: 33.984, 256: 927.776, 2: 1.0},
        "bulk1d": {1: 41.376, 256: 969.248},
        "tensor2d": {1: 46.496, 256: 973.152},
        "pipe2": {1: 34.432, 256: 961.600},
    }
    rows = copies.seed_columns(times)
    names = "fma_iters,sync_ms,bulk1d_ms,tensor2d_ms,pipe2_ms,speedup_bulk1d,speedup_tensor2d,speedup_pipe2"
    assert list(rows[0]) == names.split(",")
    assert [row["fma_iters"] for row in rows] == [1, 256]
    speedups = [[round(value, 4) for name, value in row.items() if name.startswith("speedup")] for row in rows]
    assert speedups == [[0.8213, 0.7309, 0.9870], [0.9572, 0.9534, 0.9648]]
    assert rows[0]["sync_ms"] == pytest.approx(0.033984)
