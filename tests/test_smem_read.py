"""The experiment smem_read: its levels in the binaries, its sums, chains and wavefronts in the emulator, and what it refuses."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from binaries import built
from rungs.emulator import launch
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused, RungsError
from rungs.inspect import Instruction, disassemble, inspect, main_loop, parse_sass
from rungs.variants import architectures, load_device, load_experiment
from rungs.workloads import smem_read

EXPERIMENT = load_experiment("smem_read")
RUNGS = {variant.name: variant for ladder in EXPERIMENT.ladders.values() for variant in ladder.rungs.values()}
SMS = 2

# Every level, every tile with each layout, every instruction with and without conflicts; chains through words of all widths.
BUILT = [
    "smr_t0_l0_r6_o0_d0",
    "smr_t0_l1_r1_o0_d0",
    "smr_t0_l1_r2_o0_d0",
    "smr_t0_l1_r4_o0_d0",
    "smr_t0_l1_r5_o0_d0",
    "smr_t0_l3_r3_o0_d0",
    "smr_t1_l2_r6_o0_d0",
    "smr_t1_l0_r3_o1_d0",
    "smr_t2_l1_r6_o0_d0",
    "smr_t3_l0_r9_o0_d0",
    "smr_t3_l2_r0_o0_d0",
    "smr_t3_l2_r7_o0_d0",
    "smr_t3_l3_r8_o0_d0",
    "smr_t0_l0_r3_o1_d1",
    "smr_t3_l2_r9_o0_d1",
]
BINARIES = [(name, "sm_90a") for name in BUILT]
BINARIES += [("smr_t0_l1_r6_o0_d0", "sm_80"), ("smr_t0_l1_r1_o0_d0", "sm_120")]


@functools.cache
def build_all() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: built(*pair), BINARIES))


def manifest(name: str, arch: str = "sm_90a") -> Path:
    build_all()
    return built(name, arch)


def emulate(
    name: str, point: tuple[int, int], arch: str = "sm_90a", ptx: Path | None = None, **how: object
) -> tuple[launch.Result, bool, np.ndarray]:
    """The result, whether every sum is right, and the cycles."""
    variant, device = EXPERIMENT.variant(name), load_device(arch)
    memory, generator = GlobalMemory(), np.random.default_rng(1)
    addresses = {}
    for operand, made in smem_read.operands(EXPERIMENT, variant, device, point, SMS).items():
        if made.make:
            addresses[operand] = memory.put(operand, made.make(generator))
        else:
            addresses[operand] = memory.reserve(operand, made.shape, np.dtype(made.dtype))
    plan = smem_read.plan(EXPERIMENT, variant, device, point, addresses, SMS)
    result = launch.run(ptx or manifest(name, arch).with_suffix(".ptx"), plan, memory, **how)  # type: ignore[arg-type]
    right = smem_read.expected(EXPERIMENT, variant, device, point, SMS, {"tile": memory["tile"]})["sum"]
    assert right.shape == memory["sum"].shape
    return result, np.array_equal(memory["sum"], right), memory["cycles"]


# ---- wavefronts by the bank rule -------------------------------------------------------------------------------------

# Source: shared_wavefronts.csv of the project's design notes, all rows of tiles: tile, layout, access, its wavefronts, those
# without conflicts (bytes / 128); here with the variant and how many of its accesses the row's access is.
REFERENCE = [
    ("As[128][32]", "plain", "ldmatrix.x4 16x16", 16, 4, "smr_t0_l0_r6_o0_d0", 1),
    ("As[128][32]", "plain", "4 x LDS.32 16x16", 16, 4, "smr_t0_l0_r1_o0_d0", 4),
    ("As[128][32]", "plain", "LDS.128 k-permuted 16x32", 8, 8, "smr_t0_l0_r3_o0_d0", 2),
    ("As[128][32]", "XOR 64B", "ldmatrix.x4 16x16", 4, 4, "smr_t0_l1_r6_o0_d0", 1),
    ("As[128][32]", "XOR 64B", "4 x LDS.32 16x16", 4, 4, "smr_t0_l1_r1_o0_d0", 4),
    ("As[128][32]", "XOR 64B", "LDS.128 k-permuted 16x32", 8, 8, "smr_t0_l1_r3_o0_d0", 2),
    ("As[128][64]", "plain", "ldmatrix.x4 16x16", 32, 4, "smr_t1_l0_r6_o0_d0", 1),
    ("As[128][64]", "plain", "4 x LDS.32 16x16", 32, 4, "smr_t1_l0_r1_o0_d0", 4),
    ("As[128][64]", "plain", "LDS.128 k-permuted 16x32", 16, 8, "smr_t1_l0_r3_o0_d0", 2),
    ("As[128][64]", "XOR 128B", "ldmatrix.x4 16x16", 4, 4, "smr_t1_l2_r6_o0_d0", 1),
    ("As[128][64]", "XOR 128B", "4 x LDS.32 16x16", 4, 4, "smr_t1_l2_r1_o0_d0", 4),
    ("As[128][64]", "XOR 128B", "LDS.128 k-permuted 16x32", 16, 8, "smr_t1_l2_r3_o0_d0", 2),
    ("As[128][32]", "pad 8", "ldmatrix.x4 16x16", 4, 4, "smr_t0_l3_r6_o0_d0", 1),
    ("As[128][32]", "pad 8", "4 x LDS.32 16x16", 4, 4, "smr_t0_l3_r1_o0_d0", 4),
    ("As[128][32]", "pad 8", "LDS.128 k-permuted 16x32", 16, 8, "smr_t0_l3_r3_o0_d0", 2),
    ("Bs[32][128]", "plain", "ldmatrix.x2.trans 16x8", 16, 2, "smr_t3_l0_r8_o0_d0", 1),
    ("Bs[32][128]", "plain", "ldmatrix.x4.trans 16x16", 32, 4, "smr_t3_l0_r9_o0_d0", 1),
    ("Bs[32][128]", "plain", "4 x LDS.U16 16x8", 16, 2, "smr_t3_l0_r0_o0_d0", 4),
    ("Bs[2][32][64]", "XOR 128B", "ldmatrix.x2.trans 16x8", 2, 2, "smr_t3_l2_r8_o0_d0", 1),
    ("Bs[2][32][64]", "XOR 128B", "ldmatrix.x4.trans 16x16", 4, 4, "smr_t3_l2_r9_o0_d0", 1),
    ("Bs[2][32][64]", "XOR 128B", "4 x LDS.U16 16x8", 4, 2, "smr_t3_l2_r0_o0_d0", 4),
    ("Bs[128][32]", "plain", "ldmatrix.x2 16x8", 8, 2, "smr_t2_l0_r5_o0_d0", 1),
    ("Bs[128][32]", "XOR 64B", "ldmatrix.x2 16x8", 2, 2, "smr_t2_l1_r5_o0_d0", 1),
    ("Bs[128][32]", "plain", "ldmatrix.x4 16x16", 16, 4, "smr_t2_l0_r6_o0_d0", 1),
    ("Bs[128][32]", "XOR 64B", "ldmatrix.x4 16x16", 4, 4, "smr_t2_l1_r6_o0_d0", 1),
    ("Bs[128][32]", "plain", "2 x LDS.32 16x8", 8, 2, "smr_t2_l0_r1_o0_d0", 2),
    ("Bs[128][32]", "XOR 64B", "2 x LDS.32 16x8", 2, 2, "smr_t2_l1_r1_o0_d0", 2),
]


@pytest.mark.parametrize(
    ("tile", "layout", "access", "wavefronts", "ideal", "name", "accesses"), REFERENCE, ids=lambda value: str(value)
)
def test_the_bank_rule_gives_the_references_wavefronts(tile, layout, access, wavefronts, ideal, name, accesses):
    variant = RUNGS[name]
    assert smem_read.predicted_wavefronts(EXPERIMENT, variant) * accesses == wavefronts
    assert smem_read.bytes_per_access(EXPERIMENT, variant) * accesses == 128 * ideal
    factors = EXPERIMENT.factors
    assert layout == factors["layout"].levels[variant.level("layout")].title
    where = factors["tile"].levels[variant.level("tile")].title
    assert where.startswith("Bs[32][128]" if tile == "Bs[2][32][64]" else tile)
    assert factors["read"].levels[variant.level("read")].title in access


def test_ldmatrix_has_a_partner_of_equal_bytes_in_every_layout():
    """What it saves is a step: LDS.32 or LDS.U16 against ldmatrix of the same tile, layout and order of lanes."""
    found = {
        (s.target_variant.level("tile"), s.target_variant.level("layout"))
        for s in EXPERIMENT.steps()
        if s.factor == "read" and s.source_variant.level("read") <= 1 and s.target_variant.level("read") in (6, 9)
    }
    assert found == {(0, 0), (0, 1), (0, 3), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 2), (3, 3)}
    contracts = [{EXPERIMENT.contract(v) for v in (s.source_variant, s.target_variant)} for s in EXPERIMENT.steps()]
    assert sum(len(contract) == 1 for contract in contracts) >= 40, "the same words to the same lanes"


def test_one_contract_is_one_set_of_sums():
    """Whatever instruction and layout: who reads the same words in the same lanes writes the same bits."""
    device, sums = load_device("sm_90a"), {}
    for variant in EXPERIMENT.estimable():
        if smem_read.is_dependent(variant):
            continue
        tile = smem_read.operands(EXPERIMENT, variant, device, (1, 3), 1)["tile"].make(np.random.default_rng(1))
        right = smem_read.expected(EXPERIMENT, variant, device, (1, 3), 1, {"tile": tile})["sum"]
        sums.setdefault(EXPERIMENT.contract(variant), set()).add(right.tobytes())
    assert {len(each) for each in sums.values()} == {1} and len(set().union(*sums.values())) == len(sums)


def test_every_combination_has_one_number_of_wavefronts():
    for variant in EXPERIMENT.estimable():
        access = smem_read.access_of(EXPERIMENT, variant)
        assert smem_read.predicted_wavefronts(EXPERIMENT, variant) * 128 >= access.bytes
        if access.order == smem_read.Order.ROWS:
            assert smem_read.predicted_wavefronts(EXPERIMENT, variant) * 128 == access.bytes


def test_every_byte_of_the_tile_is_read_once_in_a_pass():
    for variant in EXPERIMENT.estimable():
        access = smem_read.access_of(EXPERIMENT, variant)
        width = 16 if access.read.ldmatrix else access.bytes // 32
        lanes = 8 * access.read.registers if access.read.ldmatrix else 32
        starts = [address for each in access.addresses for address in each[:lanes]]
        padding = 16 * (access.layout == smem_read.Layout.PAD_8)
        stride = access.row_bytes + padding
        image = range(0, access.rows * stride, width)
        assert sorted(starts) == [at for at in image if at % stride < access.row_bytes], variant.name


# ---- emulated --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arch"), BINARIES)
def test_sums_chains_and_wavefronts(name, arch):
    """Right, without races, and with the accesses and wavefronts of closed forms."""
    variant, device = EXPERIMENT.variant(name), load_device(arch)
    access = smem_read.access_of(EXPERIMENT, variant)
    kind = "ldsm" if access.read.ldmatrix else "lds"
    first, *others = smem_read.emulated_points(EXPERIMENT, variant, device)
    runs = [(first, {"schedule": schedule, "race": True}) for schedule in ("cta", "descending")]
    for point, how in [*runs, *((point, {}) for point in others)]:
        result, right, cycles = emulate(name, point, arch, **how)
        assert right and not result.findings, (point, how, result.findings)
        accesses = SMS * point[0] * smem_read.work(EXPERIMENT, variant, device, point, SMS).units
        counts = result.counts.totals
        assert counts[kind] == accesses
        assert counts[f"wavefronts_{kind}"] == accesses * smem_read.predicted_wavefronts(EXPERIMENT, variant)
        assert not counts.get("lds" if kind == "ldsm" else "ldsm")
        # The tile is stored once, 512 bytes a warp instruction; rows of 64 bytes and 16 put every second store on banks twice.
        conflict = 1 + (access.layout == smem_read.Layout.PAD_8 and access.row_bytes == 64)
        assert counts["wavefronts_sts"] == SMS * access.rows * access.row_bytes // 128 * conflict
        if how.get("schedule", "cta") == "cta":  # else a warp may end before warp 0 starts
            assert ((cycles > 0) & (cycles < 1 << 20)).all(), "the emulator's clock counts the looks at it"


def test_a_full_block_of_warps():
    result, right, cycles = emulate("smr_t0_l1_r5_o0_d0", (32, 1))
    assert right and cycles.shape == (SMS, 32)
    assert result.counts.total("ldsm") == SMS * 32 * 32


@pytest.mark.parametrize("name", ["smr_t0_l0_r3_o1_d1", "smr_t3_l2_r9_o0_d1"])
def test_a_chain_ends_elsewhere_after_every_number_of_passes(name):
    """Its length is one less than a multiple of what a pass takes of it: a step too many or too few is a wrong end."""
    access = smem_read.access_of(EXPERIMENT, EXPERIMENT.variant(name))
    assert access.chain == 15 and smem_read.STEPS == 16
    ends = set()
    for passes in (1, 2, 16, 17):
        memory = smem_read.expected(
            EXPERIMENT,
            EXPERIMENT.variant(name),
            load_device("sm_90a"),
            (1, passes),
            1,
            {"tile": smem_read._make(access, True, np.random.default_rng(1))},
        )
        assert memory["sum"][0].tolist() == access.addresses[passes % 15]
        ends.add(tuple(memory["sum"][0]))
        assert emulate(name, (1, passes))[1]
    assert len(ends) == 2


Change = str | Callable[[re.Match[str]], str]


def at_each(pattern: str, change: Change) -> Callable[[str], list[str]]:
    """Mutants of a text, each changed at one match."""
    return lambda text: [
        text[: match.start()] + (change(match) if callable(change) else match.expand(change)) + text[match.end() :]
        for match in re.finditer(pattern, text, re.M)
    ]


READ = r"^\s*(?:ldmatrix\.sync|ld\.(?:volatile\.)?shared)[^;]*;"
BROKEN = ["smr_t0_l1_r5_o0_d0", "smr_t1_l2_r6_o0_d0", "smr_t0_l0_r3_o1_d1"]
MUTATIONS = {
    "a read left out": at_each(READ, ""),
    "a barrier dropped": at_each(r"^\s*bar\.sync\s+0;", ""),
    "an XOR left out": at_each(r"xor\.b32\s+(%r\d+), (%r\d+), (%r\d+|\d+);", r"mov.b32 \1, \2;"),
    "a pass too many": at_each(r"setp\.ne\.s32\s+(%p\d+), (%r\d+), 0;", r"setp.ne.s32 \1, \2, -1;"),
    "a row further": at_each(
        r"(add\.s32\s+%r\d+, %r\d+), (512|1024|2048|4096);", lambda match: f"{match[1]}, {int(match[2]) + 128};"
    ),
    "another instruction": at_each(r"m8n8\.x(\d)\.shared", r"m8n8.x\1.trans.shared"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_kernel_that_was_broken_is_caught(name, mutation, tmp_path):
    text = manifest(name).with_suffix(".ptx").read_text()
    mutants = MUTATIONS[mutation](text)
    path = tmp_path / "k.ptx"
    for mutant in mutants[:: max(1, len(mutants) // 2)]:
        path.write_text(mutant)
        try:
            result, right, _ = emulate(name, (2, 1), ptx=path, race=True, schedule="ascending", max_instructions=20_000)
            assert not right or result.findings, mutation
        except EmulationError:
            pass


def test_the_mutations_are_of_these_kernels():
    texts = [manifest(name).with_suffix(".ptx").read_text() for name in BROKEN]
    assert all(any(mutate(text) for text in texts) for mutate in MUTATIONS.values())


# ---- the binaries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arch"), BINARIES)
def test_the_binary_shows_its_levels(name, arch):
    rows = inspect(name, arch, manifest(name, arch), "pip")
    assert {row["reason"] for row in rows} == {""}
    assert {row["value"] for row in rows if row["name"] == "ctas_per_sm"} == {1}


@functools.cache
def listing_of(name: str, arch: str) -> list[Instruction]:
    return parse_sass(disassemble(manifest(name, arch).with_suffix(".cubin"), "pip"))


def loop_of(listing: list[Instruction]) -> list[Instruction]:
    """The span of the back edge around most reads."""
    spans = [listing[head : index + 1] for index, line in enumerate(listing) for head in line.targets if head <= index]
    return max(spans, key=lambda span: sum(line.opcode.startswith("LDS") and not line.filler for line in span))


@pytest.mark.parametrize(("name", "arch"), BINARIES)
def test_the_loop_reads_and_adds_and_does_little_else(name, arch):
    """No read was dropped or taken out of the loop; a warp issues fewer other instructions than would cost a cycle of reads."""
    variant = EXPERIMENT.variant(name)
    access = smem_read.access_of(EXPERIMENT, variant)
    listing = listing_of(name, arch)
    assert not main_loop(listing), "there is no mma"
    counts = Counter(line.opcode.split(".")[0] for line in loop_of(listing) if not line.filler)
    reads = counts["LDSM" if access.read.ldmatrix else "LDS"]
    if smem_read.is_dependent(variant):
        assert reads == smem_read.STEPS and sum(counts.values()) <= reads + 4, counts
    else:
        assert reads == access.accesses
        others = sum(counts.values()) - reads - counts["NOP"]
        adds = -(-access.accesses * access.read.registers // 2)  # two words each
        assert others <= adds + 20, counts
        # A scheduler issues one a cycle, and the SM delivers 128 bytes in one: four schedulers have 4 * bytes / 128 to spare.
        assert sum(counts.values()) <= 0.8 * 4 * access.accesses * max(1, access.bytes // 128)


@pytest.mark.parametrize(("name", "arch"), BINARIES)
def test_the_clock_is_read_around_all_reads(name, arch):
    """Before the first and after the store of the sum, which waits for the last."""
    listing = listing_of(name, arch)
    lines = [line for line in listing if not line.filler]
    clocks = [i for i, line in enumerate(lines) if "SR_CLOCK" in line.operands]
    reads = [i for i, line in enumerate(lines) if line.opcode.startswith("LDS")]
    barriers = [i for i, line in enumerate(lines) if line.opcode.startswith("BAR")]
    stores = [i for i, line in enumerate(lines) if line.opcode.startswith("STG")]
    assert len(clocks) == 2 and len(barriers) == 2
    assert barriers[0] < clocks[0] < reads[0] < reads[-1] < stores[0] < clocks[1] < stores[1]


# ---- the launch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", architectures())
def test_one_cta_has_the_sm(arch):
    variant, device = EXPERIMENT.variant("W4"), load_device(arch)
    addresses = {"tile": 0, "sum": 0, "cycles": 0}
    plan = smem_read.plan(EXPERIMENT, variant, device, (8, 3), addresses)
    assert (plan.grid, plan.block) == ((device.sms, 1, 1), (256, 1, 1))
    assert smem_read.plan(EXPERIMENT, variant, device, (8, 3), addresses, 7).grid == (7, 1, 1)
    assert 18 * 1024 + 2 * 1024 < plan.smem_bytes <= device.smem_per_block_bytes
    assert 2 * (plan.smem_bytes + device.smem_reserved_bytes) > device.smem_per_sm_bytes
    assert plan.params[-1] == (3, 4)
    assert smem_read.ctas_per_sm(EXPERIMENT, variant, device, (8, 3)) == 1


def test_work_counts_the_accesses_of_a_warp():
    device = load_device("sm_90a")
    throughput, latency = EXPERIMENT.variant("W4"), EXPERIMENT.variant("Y7")
    work = smem_read.work(EXPERIMENT, throughput, device, (16, 256), 132)
    assert work.units == 256 * 16
    assert work.read_bytes == 132 * 128 * 64
    assert work.written_bytes == 132 * 16 * (32 * 4 + 8)
    assert smem_read.work(EXPERIMENT, latency, device, (1, 256), 132).units == 256 * 16


def test_points_are_those_of_the_sweeps():
    assert EXPERIMENT.axis_names == ("warps", "passes")
    assert EXPERIMENT.shapes(EXPERIMENT.variant("W4")) == [(warps, 256) for warps in (1, 2, 4, 8, 16, 32)]
    assert EXPERIMENT.shapes(EXPERIMENT.variant("Y7")) == [(1, 256), (16, 256)]


@pytest.mark.parametrize(
    ("point", "sentence"),
    [
        ((0, 1), "warps=0 do not fit into one block, the only one on its SM: choose 1 to 32."),
        ((33, 1), "warps=33 do not fit into one block, the only one on its SM: choose 1 to 32."),
        ((1, 0), "passes=0 are not 1 to 65536: choose as many passes over the tile."),
        ((1, 65537), "passes=65537 are not 1 to 65536: choose as many passes over the tile."),
    ],
)
def test_a_point_that_no_launch_can_have(point, sentence):
    variant = EXPERIMENT.variant("W4")
    with pytest.raises(Refused) as refused:
        smem_read.check(EXPERIMENT, variant, load_device("sm_90a"), point)
    assert str(refused.value) == f"smr_t0_l1_r6_o0_d0: {sentence}"


def test_a_tile_that_is_not_aligned():
    addresses = {"tile": 0x1008, "sum": 0, "cycles": 0}
    with pytest.raises(Refused) as refused:
        smem_read.plan(EXPERIMENT, EXPERIMENT.variant("W4"), load_device("sm_80"), (1, 1), addresses)
    assert str(refused.value) == "smr_t0_l1_r6_o0_d0: operand tile is at 0x1008, which is not a multiple of 16 bytes."


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "smr_t0_l2_r6_o0_d0",
            r"Level 2 of factor layout \(XOR 128B\) requires tile in 1, 3, not 0: change one of the two\.",
        ),
        ("smr_t1_l0_r9_o0_d0", r"Level 9 of factor read \(ldmatrix.x4.trans\) requires tile in 3, not 1"),
        (
            "smr_t0_l1_r3_o1_d0",
            r"Level 1 of factor order \(lane after lane along the rows\) requires layout in 0, not 1",
        ),
        ("smr_t3_l0_r0_o0_d1", r"Level 0 of factor read \(LDS.U16\) requires dependent in 0, not 1"),
    ],
)
def test_levels_that_do_not_go_together(name, sentence):
    with pytest.raises(RungsError, match=sentence):
        EXPERIMENT.variant(name)
