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
from rungs.inspect import inspect, parse_sass, rules_of, waits_for_reads
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
        "two sets of fragments: SYNCS.ARRIVE.TRANS64.ART0 waits for LDSM",
    }


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x20000], R6 ;
        /*0020*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0030*/                   LDSM.16.M88.4 R{first}, [R4+0x800] ;
        /*0040*/                   LDSM.16.M88.4 R{second}, [R4+0x1000] ;
        /*0050*/                   LOP3.LUT R5, R{read}, R2, RZ, 0xc0, !PT ;
        /*0060*/              @!P1 MOV R5, RZ ;
        /*0070*/                   VIADD R4, R5, 0x1 ;
        /*0080*/                   HMMA.16816.F32.BF16 R20, R8, R28, R20 ;
        /*0090*/               @P0 SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR10+0x20020], R4 ;
        /*00a0*/              @!P2 BRA `(.L_1) ;
        /*00b0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "second", "read", "waits"),
    [
        (12, 16, 16, True),
        (12, 16, 19, True),  # any of its four registers
        (12, 16, 12, False),  # the last but one: the last may still be under way
        (16, 12, 16, False),  # the same in the source, in an order that ptxas has changed
        (12, 16, 2, False),
    ],
)
def test_an_arrive_waits_for_the_read_that_was_issued_last(first, second, read, waits):
    assert waiting(LISTING.format(first=first, second=second, read=read)) == [waits]


def waiting(text, reads="LDSM", *, ahead=False):
    """Of each arrive whether it waits."""
    listing = parse_sass(text)
    arrives = [at for at, i in enumerate(listing) if "ARRIVE" in i.opcode]
    return [waits_for_reads(listing, at, reads, ahead) for at in arrives]


def test_reads_of_the_next_stage_are_not_waited_for():
    """Two sets of fragments: the first of the next stage are read before this stage is freed."""
    again = "        /*0045*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x20008], R6 ;\n"
    again += "        /*0046*/                   LDSM.16.M88.4 R24, [R4] ;\n"
    text = LISTING.format(first=12, second=16, read=17)
    text = text.replace("        /*0050*/", again + "        /*0050*/")
    assert waiting(text) == [False]  # but by a rule that says so
    assert waiting(text, ahead=True) == [True]
    assert waiting(text.replace("R5, R17", "R5, R2"), ahead=True) == [False]


WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10], R6"
ARRIVE = "SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR10+0x20], {}"
USED, UNUSED = ARRIVE.format("R5"), ARRIVE.format("R4")


def in_loop(*lines):
    """A listing of a loop over these; one that ends with a colon is a label."""
    lines = ["MOV R1, c[0x0][0x28]", ".L_1:", *lines, "@!P2 BRA `(.L_1)", "EXIT"]
    return "\n".join(line if line.endswith(":") else f"  /*{i:04x}*/  {line} ;" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        # Any instruction that needs the last read, of whatever width, is enough: a warp issues in order.
        (["LDS.U.128 R8, [R3]", "IMAD.WIDE R16, R11, R2, R6", UNUSED], [True]),
        (["LDS.64 R8, [R3]", "FADD R5, R9, R2", UNUSED], [True]),
        (["LDS.64 R8, [R3]", "FADD R5, R10, R2", USED], [False]),
        (["LDS R8, [R3]", "FADD R5, R9, R2", USED], [False]),
        (["LDSM.16.MT88.4 R8, [R3]", "R2UR UR4, R11", UNUSED], [True]),
        (["LDS R8, [R3]", "SHFL.BFLY PT, R4, R8, 0x1, 0x1f", UNUSED], [True]),
        (["LDS R8, [R3]", "MOV R8, R2", UNUSED], [True]),  # what overwrites a read waits for it too
        (["LDS R5, [R3]", USED], [True]),
        (["LDS R5, [R3]", "@!PT LDS RZ, [RZ]", USED], [True]),  # a filler
        (["LDS R8, [R3]", "@!PT MOV R4, R8", UNUSED], [False]),
        (["LDS R8, [R3]", "@P3 MOV R5, R8", UNUSED], [False]),
        (["LDS R8, [R3]", "@P3 MOV R5, R8", "@P3 " + USED], [True]),
        # A way round what waits.
        (["LDS R8, [R3]", "@P3 BRA `(.L_2)", "MOV R5, R8", ".L_2:", USED], [False]),
        (["LDS R8, [R3]", "@P3 BRA `(.L_2)", "MOV R5, R8", USED, ".L_2:"], [True]),
        (["LDS R8, [R3]", "BSSY B0, `(.L_2)", "MOV R5, R8", "BSYNC B0", ".L_2:", USED], [True]),
        (["@P3 BRA `(.L_2)", "LDS R8, [R3]", "MOV R5, R8", "BRA `(.L_3)", ".L_2:", "LDS R5, [R3]", ".L_3:", USED], [True]),
        (["LDS R5, [R3]", "MOV R4, R5", "@P3 LDS R8, [R3]", USED], [False]),
        # A loop in the loop, and reads that stand behind the arrive.
        ([".L_2:", "LDS R8, [R3]", "@P3 BRA `(.L_2)", "MOV R5, R8", USED], [True]),
        ([".L_2:", "LDS R8, [R3]", "@P3 BRA `(.L_2)", USED], [False]),
        ([USED, WAIT, "LDS R5, [R3]"], [True]),
        ([USED, WAIT, "LDS R8, [R3]"], [False]),
        # Two stages in a turn of the loop, and one arrive for each CTA of a cluster.
        ([WAIT, "LDS R8, [R3]", "MOV R5, R8", USED, WAIT, "LDS R9, [R3]", USED], [True, False]),
        ([WAIT, "LDS R8, [R3]", "MOV R5, R8", USED, WAIT, "LDS R9, [R3]", "MOV R4, R9", USED], [True, True]),
        ([WAIT, "LDS R8, [R3]", "MOV R5, R8", USED, USED], [True, True]),
        # A and B behind mbarriers of their own, or a table that is read before the wait.
        ([WAIT, "LDS R8, [R3]", WAIT, "LDS R9, [R3]", "MOV R5, R8", USED], [False]),
        (["LDS R8, [R7]", WAIT, "LDS R9, [R3]", "MOV R5, R8", USED], [False]),
        ([WAIT, "LDSM.16.M88.4 R8, [R3]", "MOV R5, R8", USED], [False]),  # no such read at all
    ],
)  # fmt: skip
def test_an_arrive_waits_for_its_reads_on_every_way(lines, waits):
    reads = "LDSM" if lines[0].startswith("LDSM") else "LDS"
    assert waiting(in_loop(*lines), reads) == waits


def test_no_variant_with_a_producer_frees_a_stage_before_its_reads_have_returned():
    """Beside the rungs, whose evidence is looked at above: without a second set of fragments ptxas changes the order of reads.

    The first of these was wrong on an H200 while its arrive depended on the read that is last in the source.
    """
    for name in ("tun_bk64_wt32_s4_pw1_db0_ps1_ep0_sk0", "tun_bk32_wt64_s4_pw1_db0_ps1_ep0_sk0"):
        frame = pd.DataFrame(inspect(name, "sm_90a", built(name, "sm_90a"), "pip"))
        assert frame[frame["status"] != "ok"].empty, name


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
