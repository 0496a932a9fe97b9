"""What the disassembly proves, and that it notices a binary that is not what its variant declares."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from binaries import ARCHITECTURES, GEMM, build_ladders, built, ladder_variants, manifest_of, toolchain
from rungs import inspect as rungs_inspect
from rungs import schemas
from rungs.build import NVCC_FLAGS
from rungs.errors import RungsError
from rungs.files import ROOT, sha256_file, write_json
from rungs.inspect import (
    Instruction,
    ctas_per_sm,
    disassemble,
    executed,
    load_evidence,
    main_loop,
    matches,
    parse_sass,
    rules_of,
    run,
)
from rungs.variants import load_device

BY_RUNG = {rung: variant.name for ladder in GEMM.ladders.values() for rung, variant in ladder.rungs.items()}
MOVES = ("LDG", "LDGSTS", "STS", "LDS", "LDSM", "HMMA", "UTMALDG", "LDGDEPBAR", "DEPBAR", "SYNCS", "BAR", "ELECT")


def inspect(*arguments: object) -> pd.DataFrame:
    return pd.DataFrame(rungs_inspect.inspect(*arguments)).astype({"value": "Int64"})


@functools.cache
def inspected(name: str, arch: str = "sm_90a") -> pd.DataFrame:
    return inspect(name, arch, built(name, arch), "pip")


def opcodes(frame: pd.DataFrame, kind: str = "opcode") -> dict[str, int]:
    rows = frame[(frame["kind"] == kind) & frame["name"].str.split(".").str[0].isin(MOVES)]
    return dict(zip(rows["name"], rows["value"], strict=True))


def objections(frame: pd.DataFrame) -> list[str]:
    return list(frame.loc[frame["status"] != "ok", "reason"])


# A 64 x 32 warp tile over 32 of K is 4 x 4 x 2 mma; each ks reads 4 ldmatrix.x4 of A and 2 of B.
COMPUTE = {"HMMA.16816.F32.BF16": 32, "LDSM.16.M88.4": 12}
SYNC = COMPUTE | {"LDG.E.LTC128B.128": 4, "STS.128": 4}
ASYNC = COMPUTE | {"LDGSTS.E.BYPASS.LTC128B.128": 4, "LDGDEPBAR": 1, "DEPBAR.LE": 1}
TMA = COMPUTE | {"UTMALDG.2D": 2, "SYNCS.ARRIVE.TRANS64": 1, "SYNCS.PHASECHK.TRANS64.TRYWAIT": 1, "ELECT": 1}
TRANSPOSED = ASYNC | {"LDSM.16.M88.4": 8, "LDSM.16.MT88.4": 4}


@pytest.mark.parametrize(
    ("rung", "wanted", "barriers"),
    [
        ("B0", SYNC, 2),
        ("B1", ASYNC, 2),
        ("B2", SYNC, 1),
        ("B3", ASYNC, 1),
        ("B4", ASYNC, 1),
        ("B5", TMA, 1),
        ("B6", TMA, 1),
        ("B7", TMA, 1),
        ("S0", TRANSPOSED, 1),
        ("S1", TRANSPOSED, 1),
        ("S2", ASYNC, 1),
        ("S3", ASYNC, 1),
    ],
)
def test_one_round_of_the_main_loop_moves_and_multiplies_one_tile(rung, wanted, barriers):
    assert opcodes(inspected(BY_RUNG[rung])) == wanted | {"BAR.SYNC.DEFER_BLOCKING": barriers}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # A: 4 x LDS.32 a fragment; B as N x K 2, as K x N 4 of two bytes.
        ("abl_L1_R0_bl1_s2_sw1", {"LDS": 48}),
        ("abl_L1_R0_bl0_s2_sw1", {"LDS": 32, "LDS.U16": 32}),
        ("abl_L1_R2_bl1_s2_sw1", {"LDS.128": 12}),
    ],
)
def test_other_reads_take_the_instructions_that_their_level_names(name, wanted):
    frame = inspected(name)
    loop = opcodes(frame)
    assert {opcode: count for opcode, count in loop.items() if opcode.startswith("LDS")} == wanted
    assert loop["HMMA.16816.F32.BF16"] == 32
    assert objections(frame) == []


def test_the_whole_kernel_holds_the_prologue_too():
    frame = inspected(BY_RUNG["B6"])
    total = opcodes(frame, "opcode_total")
    # 3 stages: two tiles before the loop, one inside; one mbarrier each.
    assert total["UTMALDG.2D"] == 6
    assert total["SYNCS.EXCH.64"] == 3
    assert total["HMMA.16816.F32.BF16"] == 32
    everything = frame[frame["kind"] == "opcode_total"].set_index("name")["value"]
    assert everything["EXIT"] == 1
    assert everything["STG.E"] == 32
    assert everything.get("NOP", 0) <= 5, "the padding behind the kernel is not executed"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_rung_has_its_evidence_and_its_pinned_occupancy(arch):
    build_ladders()
    for variant in ladder_variants():
        frame = inspected(variant.name, arch)
        if variant.level("load") == 2 and arch in ("sm_80", "sm_86", "sm_89"):
            assert frame[["kind", "status"]].values.tolist() == [["evidence", "not on this chip"]]
            assert "TMA needs one of sm_90a, sm_100a, sm_120" in frame["reason"][0]
            continue
        assert objections(frame) == []
        evidence = frame[frame["kind"] == "evidence"]
        assert len(evidence) == len(rules_of(variant)) >= 12
        resources = frame[frame["kind"] == "resource"].set_index("name")["value"]
        assert resources["ctas_per_sm"] == 2
        assert resources["registers"] <= 128
        assert resources["threads"] == 256
        assert list(resources[["stack_bytes", "spill_store_bytes", "spill_load_bytes", "smem_static_bytes"]]) == [
            0,
            0,
            0,
            0,
        ]


def disguised(tmp_path: Path, real: str, declared: str, arch: str = "sm_90a") -> pd.DataFrame:
    """The evidence of a binary that was built as one variant and is declared as another."""
    shutil.copy(built(real, arch).with_suffix(".cubin"), tmp_path / f"{declared}.cubin")
    manifest = manifest_of(declared, arch) | {"cubin_sha256": sha256_file(tmp_path / f"{declared}.cubin")}
    write_json(tmp_path / f"{declared}.json", manifest)
    return inspect(declared, arch, tmp_path / f"{declared}.json", "pip")


@pytest.mark.parametrize(
    ("real", "declared", "missing", "forbidden"),
    [
        ("B3", "B5", "UTMALDG.2D", "LDGSTS"),
        ("B5", "B3", "LDGSTS.E.BYPASS.LTC128B.128", "UTMALDG"),
        ("B2", "B3", "LDGSTS.E.BYPASS.LTC128B.128", "STS.128"),
        ("B3", "B2", "STS.128", "LDGSTS"),
        ("S0", "S2", None, "LDSM.16.MT88.4"),
        ("S2", "S0", "LDSM.16.MT88.4", None),
    ],
)
def test_a_binary_of_another_level_is_caught(tmp_path, real, declared, missing, forbidden):
    frame = disguised(tmp_path, BY_RUNG[real], BY_RUNG[declared])
    evidence = frame[frame["kind"] == "evidence"].set_index("name")
    caught = evidence[evidence["status"] == "evidence missing"]
    if missing:
        row = next(name for name in caught.index if f": {missing} in the main loop" in name)
        assert caught.loc[row, "value"] == 0
    if forbidden:
        row = next(name for name in caught.index if f": no {forbidden} in the " in name)
        assert caught.loc[row, "value"] > 0
    assert all(reason.startswith(BY_RUNG[declared]) and reason.endswith("declares.") for reason in caught["reason"])


@pytest.mark.parametrize(
    ("real", "declared"),
    [
        ("abl_L1_R0_bl1_s2_sw1", "abl_L1_R1_bl1_s2_sw1"),
        ("abl_L1_R1_bl1_s2_sw1", "abl_L1_R0_bl1_s2_sw1"),
        ("abl_L1_R2_bl1_s2_sw1", "abl_L1_R0_bl1_s2_sw1"),
        ("abl_L1_R0_bl1_s2_sw1", "abl_L1_R2_bl1_s2_sw1"),
        ("abl_L1_R0_bl0_s2_sw1", "abl_L1_R0_bl1_s2_sw1"),
        ("abl_L1_R0_bl1_s2_sw1", "abl_L1_R0_bl0_s2_sw1"),
    ],
)
def test_another_read_or_layout_is_caught(tmp_path, real, declared):
    assert objections(disguised(tmp_path, real, declared))


def test_a_cubin_that_the_manifest_does_not_name_is_no_evidence(tmp_path):
    name = BY_RUNG["B3"]
    shutil.copy(built(BY_RUNG["B5"], "sm_90a").with_suffix(".cubin"), tmp_path / f"{name}.cubin")
    shutil.copy(built(name, "sm_90a"), tmp_path / f"{name}.json")
    frame = inspect(name, "sm_90a", tmp_path / f"{name}.json", "pip")
    assert frame[["kind", "name", "status"]].values.tolist() == [["evidence", "build", "evidence missing"]]
    assert "not the binary that its manifest names" in frame["reason"][0]


def compiled(tmp_path: Path, edit, name: str = "abl_L2_R1_bl1_s2_sw1", arch: str = "sm_90a") -> pd.DataFrame:
    """Evidence of the variant built from edited kernels: `edit(file name, text) -> text`."""
    for source in (ROOT / "kernels").rglob("*.cu*"):
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(edit(source.name, source.read_text()))
    manifest = manifest_of(name, arch)
    defines = [f"-D{macro}={value}" for macro, value in manifest["macros"].items()]
    tools = toolchain()
    compiler = [tools.nvcc, "-ccbin", tools.host, *NVCC_FLAGS, f"-arch={arch.replace('sm_', 'compute_')}", *defines]
    subprocess.run([*compiler, "kernels/gemm/gemm.cu", "-o", "edited.ptx"], cwd=tmp_path, check=True)
    subprocess.run([tools.ptxas, f"-arch={arch}", "edited.ptx", "-o", f"{name}.cubin"], cwd=tmp_path, check=True)
    write_json(tmp_path / f"{name}.json", manifest | {"cubin_sha256": sha256_file(tmp_path / f"{name}.cubin")})
    return inspect(name, arch, tmp_path / f"{name}.json", "pip")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_a_tma_issue_in_a_loop_over_lanes_is_caught(tmp_path, arch):
    def edit(file, text):
        changed = re.sub(
            r"if \(producer && ptx::elect_sync\(\)\)(\s+)tma_load", r"if (threadIdx.x == 0)\1tma_load", text
        )
        assert file != "gemm.cu" or changed != text
        return changed

    frame = compiled(tmp_path, edit, arch=arch)
    (reason,) = objections(frame)
    assert "BRA.U.ANY in the kernel" in reason


def test_local_memory_is_caught(tmp_path):
    def edit(file, text):
        # An accumulator that is indexed at run time cannot stay in registers.
        changed = text.replace("store(acc, C,", "acc[m % 4][n % 4][k % 4] += 1.0f; store(acc, C,")
        assert file != "gemm.cu" or changed != text
        return changed

    reasons = objections(compiled(tmp_path, edit))
    assert any("stack_bytes" in reason for reason in reasons)
    assert any("STL" in reason for reason in reasons)
    assert any("LDL" in reason for reason in reasons)


def test_an_occupancy_other_than_the_pinned_one_is_caught(tmp_path):
    name = BY_RUNG["B3"]
    shutil.copy(built(name, "sm_90a").with_suffix(".cubin"), tmp_path / f"{name}.cubin")
    write_json(tmp_path / f"{name}.json", manifest_of(name, "sm_90a") | {"smem_dynamic_bytes": 120_000})
    (reason,) = objections(inspect(name, "sm_90a", tmp_path / f"{name}.json", "pip"))
    assert "fits 1 CTAs per SM where 2 are pinned" in reason


def test_a_failed_build_is_one_row_with_its_reason(tmp_path):
    manifest = {
        "kind": "build",
        "variant": "abl_L1_R1_bl1_s2_sw1",
        "arch": "sm_90a",
        "status": "build failed",
        "reason": "it spills.",
    }
    write_json(tmp_path / "abl_L1_R1_bl1_s2_sw1.json", manifest)
    run("abl_L1_R1_bl1_s2_sw1", "sm_90a", tmp_path / "abl_L1_R1_bl1_s2_sw1.json", tmp_path / "out.csv", "pip")
    rows = schemas.read_csv("inspect", tmp_path / "out.csv")
    assert rows[["kind", "name", "status", "reason"]].values.tolist() == [
        ["evidence", "build", "build failed", "it spills."]
    ]
    assert rows["value"].isna().all()


def test_the_csv_is_valid_and_counts_are_whole_numbers(tmp_path):
    name = BY_RUNG["B6"]
    run(name, "sm_90a", built(name, "sm_90a"), tmp_path / "out.csv", "pip")
    assert f"{name},sm_90a,opcode,HMMA.16816.F32.BF16,32,ok," in (tmp_path / "out.csv").read_text().splitlines()
    assert len(schemas.read_csv("inspect", tmp_path / "out.csv")) == len(inspected(name))


def test_a_manifest_of_another_variant_is_refused():
    with pytest.raises(
        RungsError, match=r"is the manifest of abl_L1_R1_bl1_s2_sw1 for sm_90a, not of abl_L2_R1_bl1_s2_sw1"
    ):
        inspect(BY_RUNG["B5"], "sm_90a", built(BY_RUNG["B3"], "sm_90a"), "pip")


def test_a_broken_cubin_is_one_sentence(tmp_path):
    (tmp_path / "x.cubin").write_bytes(b"\x7fELF" + b"0" * 100)
    with pytest.raises(RungsError, match=r"x\.cubin cannot be disassembled .*delete it and build it again\.$"):
        disassemble(tmp_path / "x.cubin", "pip")


def test_a_missing_disassembler_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("rungs.build.shutil.which", lambda name, path=None: None)
    with pytest.raises(RungsError, match=r"^nvdisasm is neither on PATH nor under CUDA_HOME: .*\.$"):
        disassemble(built(BY_RUNG["B3"], "sm_90a").with_suffix(".cubin"), "system")


# ---- the parser, on listings small enough to read ----


def listing(*lines: str) -> list[Instruction]:
    """Lines `label:` or `opcode operands` as nvdisasm prints them."""
    text, address = "", 0
    for line in lines:
        if line.endswith(":"):
            text += f"{line}\n"
        else:
            text += f"        /*{address:04x}*/                   {line} ;\n"
            address += 16
    return parse_sass(text)


def names(instructions) -> list[str]:
    return [i.opcode for i in instructions]


def test_a_line_is_address_predicate_opcode_operands_and_targets():
    found = listing(
        ".L_x_0:", "@!P2 BRA `(.L_x_0)", "@UP0 UIADD3 UR4, -UR6, UR4, URZ", "LDSM.16.M88.4 R12, [R20+0x800]", "EXIT"
    )
    assert found == [
        Instruction(0x0, "@!P2", "BRA", "`(.L_x_0)", (0,)),
        Instruction(0x10, "@UP0", "UIADD3", "UR4, -UR6, UR4, URZ"),
        Instruction(0x20, "", "LDSM.16.M88.4", "R12, [R20+0x800]"),
        Instruction(0x30, "", "EXIT", ""),
    ]


LOOPS = (
    "MOV R0, RZ",
    ".L_small:",
    "HMMA.16816.F32.BF16 R0, R0, R0, R0",
    "@P0 BRA `(.L_small)",
    ".L_main:",
    "LDSM.16.M88.4 R0, [R0]",
    "HMMA.16816.F32.BF16 R0, R0, R0, R0",
    "HMMA.16816.F32.BF16 R0, R0, R0, R0",
    ".L_spin:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0",
    "@!P1 BRA `(.L_spin)",
    "@P0 BRA `(.L_main)",
    "EXIT",
)


def test_the_main_loop_is_the_one_with_most_tensor_instructions():
    loop = main_loop(listing(*LOOPS))
    assert names(loop)[0] == "LDSM.16.M88.4"
    assert len(loop) == 6
    assert names(loop).count("HMMA.16816.F32.BF16") == 2


def test_the_main_loop_is_innermost():
    outer = (".L_outer:", "HMMA.16816.F32.BF16 R9, R9, R9, R9", *LOOPS[4:-1], "@P3 BRA `(.L_outer)", "EXIT")
    assert len(main_loop(listing(*outer))) == 6


def test_a_loop_with_two_ways_back_is_one_loop():
    found = listing(".L_head:", "HMMA R0", "@P0 BRA `(.L_head)", "HMMA R1", "@P1 BRA `(.L_head)", "EXIT")
    assert len(main_loop(found)) == 4


def test_a_slow_path_behind_the_kernel_does_not_open_a_loop():
    found = listing(
        ".L_head:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0",
        "@!P0 BRA `(.L_slow)",
        ".L_back:",
        "HMMA R0",
        "@P1 BRA `(.L_head)",
        "HMMA R1",  # a peeled last round: the span from .L_back to the end holds more HMMA than the loop
        "HMMA R2",
        "EXIT",
        ".L_slow:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0",
        "@!P0 BRA `(.L_slow)",
        "BRA `(.L_back)",
    )
    assert main_loop(found) == found[:4]


def test_a_kernel_without_tensor_loop_has_no_main_loop():
    assert main_loop(listing(".L_x:", "FFMA R0, R0, R0, R0", "@P0 BRA `(.L_x)", "HMMA R0", "EXIT")) == []


def test_fillers_and_padding_are_not_executed():
    found = listing(
        "@!PT LDS RZ, [RZ]",
        "@!UPT UIADD3 URZ, URZ, URZ, URZ",
        "@P0 LDGSTS.E.BYPASS.LTC128B.128 [R0], [R2.64]",
        "@PT EXIT",
        ".L_end:",
        "BRA `(.L_end)",
        "NOP",
    )
    assert names(executed(found)) == ["LDGSTS.E.BYPASS.LTC128B.128", "EXIT"]
    assert names(executed(listing("@P0 EXIT", "NOP", "EXIT", "NOP"))) == ["EXIT", "NOP", "EXIT"]


def test_fillers_do_not_hide_the_evidence_of_ldmatrix():
    name, arch = BY_RUNG["B3"], "sm_90a"
    loop = main_loop(parse_sass(disassemble(built(name, arch).with_suffix(".cubin"), "pip")))
    fillers = [i for i in loop if i.filler]
    assert {i.opcode for i in fillers} == {"LDS"}
    assert "LDS" not in opcodes(inspected(name))


def test_uniform_branches_with_a_condition_fall_through():
    assert names(executed(listing("BRA.U UP0, `(.L_x)", "NOP", ".L_x:", "EXIT"))) == ["BRA.U", "NOP", "EXIT"]
    assert names(executed(listing("BRA.U `(.L_x)", "NOP", ".L_x:", "EXIT"))) == ["BRA.U", "EXIT"]


def test_a_call_is_followed_and_its_return_is_no_loop():
    found = listing(
        "gemm:",
        "HMMA R0",
        "CALL.REL.NOINC `($gemm$div)",
        "EXIT",
        "$gemm$div:",
        "MUFU.RCP R0, R0",
        "RET.REL.NODEC R2 `(gemm)",
    )
    assert names(executed(found)) == ["HMMA", "CALL.REL.NOINC", "EXIT", "MUFU.RCP", "RET.REL.NODEC"]
    assert main_loop(found) == []


@pytest.mark.parametrize(
    ("opcode", "pattern", "met"),
    [
        ("LDG.E.LTC128B.128", "LDG.E.128", True),
        ("LDG.E.128", "LDG.E.LTC128B.128", False),
        ("LDGSTS.E.LTC128B.BYPASS.128", "LDGSTS.E.BYPASS.LTC128B.128", True),
        ("LDSM.16.MT88.4", "LDSM.16.M88.4", False),
        ("LDS.U16", "LDS", True),
        ("LDS.U16", "=LDS", False),
        ("LDS", "=LDS", True),
        ("LDSM.16.M88.4", "LDS", False),
        ("UTMALDG.2D.MULTICAST", "UTMALDG.2D", True),
        ("UTMALDG.3D", "UTMALDG.2D", False),
    ],
)
def test_an_opcode_is_matched_by_its_parts(opcode, pattern, met):
    assert matches(opcode, pattern) is met


@pytest.mark.parametrize(
    ("arch", "registers", "smem", "threads", "wanted"),
    [
        ("sm_90a", 128, 0, 256, 2),
        ("sm_90a", 129, 0, 256, 1),  # 136 of 16384 by 32 lanes: three warps in each of the four files, twelve in all
        ("sm_90a", 64, 0, 256, 4),
        ("sm_90a", 32, 0, 1024, 2),
        ("sm_90a", 168, 0, 128, 3),
        ("sm_90a", 32, 115_712, 256, 2),  # (115712 + 1024) * 2 = 233472: the last byte
        ("sm_90a", 32, 115_713, 256, 1),
        ("sm_86", 32, 50_176, 256, 2),
        ("sm_86", 32, 50_177, 256, 1),
        ("sm_86", 32, 0, 256, 6),
        ("sm_80", 32, 0, 256, 8),
        ("sm_120", 40, 0, 256, 6),
    ],
)
def test_occupancy_by_hand(arch, registers, smem, threads, wanted):
    assert ctas_per_sm(load_device(arch), registers, smem, threads) == wanted


# ---- the rules themselves ----


def test_every_level_that_shows_in_the_opcodes_has_a_rule():
    for factor in ("load", "read", "b_layout"):
        named = {level for rule in load_evidence()["gemm"] for level in rule.get("levels", {}).get(factor, [])}
        assert named == set(GEMM.factors[factor].levels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemm: [{name: x, levels: {lod: [1]}, loop: {must: [LDS]}}]", "gemm has no factor lod: choose one of load,"),
        (
            "gemm: [{name: x, levels: {load: [7]}, loop: {must: [LDS]}}]",
            "factor load has no level 7: choose one of 0, 1, 2",
        ),
        ("gemm: [{name: x, loop: {must: [lds]}}]", "does not match"),
        ("gemm: [{name: x}]", "is not valid under any"),
        ("gemm: [{name: x, waits: {at: SYNCS.ARRIVE}}]", "'for' is a required property"),
        ("gemm: [{name: x, waits: {at: SYNCS.ARRIVE, for: LDS, ahead: 1}}]", "1 is not of type 'boolean'"),
        ("gemm: [{name: x, waits: [LDS]}]", "is not of type 'object'"),
    ],
)
def test_a_wrong_rule_is_one_sentence(tmp_path, text, message):
    (tmp_path / "evidence.yaml").write_text(text)
    with pytest.raises(RungsError, match=message):
        load_evidence(tmp_path / "evidence.yaml")


def test_an_experiment_without_rules_is_refused(monkeypatch):
    monkeypatch.setattr(rungs_inspect, "load_evidence", lambda **_: {})
    with pytest.raises(RungsError, match="has no rules for experiment gemm"):
        rules_of(ladder_variants()[0])


def test_rules_are_rows_of_their_own():
    for variant in ladder_variants():
        rows = [rule.row for rule in rules_of(variant)]
        assert len(rows) == len(set(rows)), json.dumps(rows)
