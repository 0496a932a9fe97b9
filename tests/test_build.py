"""One cubin per variant: what it is made from, that it is the same anywhere, and the builds that are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from binaries import ARCHITECTURES, GEMM, build_ladders, built, ladder_variants, manifest_of, toolchain
from rungs import build as rungs_build
from rungs.build import STAMP, Toolchain, build, find_toolchain, identity, objection, parse_ptxas, sources, unit_of
from rungs.errors import RungsError
from rungs.files import ROOT, read_json, sha256_file

B3, B5 = "abl_L1_R1_bl1_s2_sw1", "abl_L2_R1_bl1_s2_sw1"
HEADERS = ["kernels/mma.cuh", "kernels/ptx.cuh", "kernels/swizzle.cuh"]
GEMM_SOURCES = sorted([*(f"kernels/gemm/{file}" for file in ("gemm.cu", "load.cuh", "read.cuh", "tile.cuh")), *HEADERS])


def checkout(folder: Path) -> Path:
    """A copy of what a build needs."""
    for name in ("kernels", "config", "workflow"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def python(root: Path, code: str, *arguments: object, cwd: Path | None = None) -> str:
    """Run code with the package of that checkout; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": str(root / "workflow")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd or root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


BUILD = """
import sys
from pathlib import Path
from rungs.build import build, find_toolchain
name, arch, manifest = sys.argv[1:]
print(build(name, arch, Path(manifest), find_toolchain("pip"))["build_id"])
"""
IDENTITIES = """
import json
from rungs.build import STAMP, identity, unit_of
names = ["abl_L1_R1_bl1_s2_sw1", "abl_L2_R1_bl1_s2_sw1", STAMP]
print(json.dumps({name: identity(unit_of(name, "sm_90a"), "sm_90a", {"nvcc": "1", "ptxas": "1"})["build_id"] for name in names}))
"""


# ---- what a binary is made from ----


def test_the_closure_is_what_the_compiler_read():
    assert list(sources("gemm/gemm.cu")) == GEMM_SOURCES
    for name, kernel in ((B3, "gemm/gemm.cu"), (STAMP, "stamp.cu")):
        depfile = built(name, "sm_90a").with_suffix(".ptx.d").read_text()
        read = {os.path.normpath(path) for path in re.findall(r"\bkernels/\S+", depfile)}
        assert read == set(sources(kernel))
        assert set(manifest_of(name, "sm_90a")["sources"]) == read


def test_the_manifest_says_what_was_made_and_from_what():
    manifest = manifest_of(B5, "sm_90a")
    assert {key: manifest[key] for key in ("kind", "variant", "experiment", "arch", "status", "reason")} == {
        "kind": "build", "variant": B5, "experiment": "gemm", "arch": "sm_90a", "status": "ok", "reason": "",
    }  # fmt: skip
    assert manifest["macros"] == GEMM.constants | {
        "CTAS_PER_SM": 2, "VARIANT_LOAD": 2, "VARIANT_READ": 1, "VARIANT_B_LAYOUT": 1, "VARIANT_STAGES": 2, "VARIANT_SWIZZLE": 1,
    }  # fmt: skip
    assert manifest["compiler"] == {"nvcc": "13.0.88", "ptxas": "13.0.88"}
    assert manifest["flags"].count("-lineinfo") == 2
    assert {"-arch=compute_90a", "-arch=sm_90a"} <= set(manifest["flags"])
    for kind in ("ptx", "cubin"):
        assert manifest[f"{kind}_sha256"] == sha256_file(built(B5, "sm_90a").with_suffix(f".{kind}"))
    assert manifest["sources"] == {name: sha256_file(ROOT / name) for name in GEMM_SOURCES}
    assert (manifest["smem_dynamic_bytes"], manifest["threads"], manifest["warnings"]) == (77_824, 256, [])


def test_the_ptx_names_its_sources_as_the_repo_does():
    files = re.findall(r'^\t\.file\t\d+ "(.*)"$', built(B5, "sm_90a").with_suffix(".ptx").read_text(), re.MULTILINE)
    assert "kernels/gemm/gemm.cu" in files
    assert not [file for file in files if file.startswith("/")]


def test_one_character_of_a_header_changes_exactly_the_binaries_that_include_it(tmp_path):
    root = checkout(tmp_path)
    before = json.loads(python(root, IDENTITIES))

    def changed_by(file: str, text: str) -> set[str]:
        original = (root / file).read_text()
        (root / file).write_text(original + text)
        after = json.loads(python(root, IDENTITIES))
        (root / file).write_text(original)
        return {name for name in before if before[name] != after[name]}

    assert changed_by("kernels/swizzle.cuh", " ") == {B3, B5}
    assert changed_by("kernels/ptx.cuh", "\n") == {B3, B5, STAMP}
    assert changed_by("kernels/stamp.cu", "/") == {STAMP}
    (root / "kernels/gemm/notes.cuh").write_text("// included by nobody\n")
    assert changed_by("kernels/gemm/notes.cuh", "x") == set()
    assert changed_by("config/config.yaml", "# a remark\n") == set()
    assert json.loads(python(root, IDENTITIES)) == before


def test_the_identity_holds_macros_flags_and_compiler(monkeypatch):
    unit, versions = unit_of(B3, "sm_90a"), {"nvcc": "13.0.88", "ptxas": "13.0.88"}

    def build_id(unit=unit, arch="sm_90a", versions=versions):
        return identity(unit, arch, versions)["build_id"]

    first = build_id()
    assert build_id() == first
    assert build_id(versions=versions | {"ptxas": "13.0.99"}) != first
    assert build_id(unit=replace(unit, macros=dict(unit.macros) | {"CTAS_PER_SM": 1})) != first
    assert build_id(arch="sm_80") != first
    monkeypatch.setattr(rungs_build, "NVCC_FLAGS", (*rungs_build.NVCC_FLAGS, "-G"))
    assert build_id() != first


# ---- the same bytes anywhere ----


@pytest.mark.parametrize("name", [B5, STAMP])
def test_two_checkouts_give_the_same_bytes(tmp_path, name):
    hashes = set()
    for place in ("one", "another place/with spaces & [brackets].*"):
        root = checkout(tmp_path / place)
        for file in (root / "kernels").rglob("*.*"):
            os.utime(file, (len(place), len(place)))  # dates must not reach the line table
        manifest = root / "results" / "some set" / f"{name}.json"
        assert python(root, BUILD, name, "sm_90a", manifest).strip() == manifest_of(name, "sm_90a")["build_id"]
        hashes.add(tuple(sha256_file(manifest.with_suffix(f".{kind}")) for kind in ("ptx", "cubin")))
    assert hashes == {tuple(manifest_of(name, "sm_90a")[f"{kind}_sha256"] for kind in ("ptx", "cubin"))}


def test_a_build_leaves_nothing_outside_its_folder(tmp_path):
    root = checkout(tmp_path / "checkout")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    before = set(root.rglob("*"))
    python(root, BUILD, B3, "sm_90a", f"out/{B3}.json", cwd=elsewhere)  # relative to where the caller stands
    assert {path for path in set(root.rglob("*")) - before if "__pycache__" not in path.parts} == set()
    assert {path.name for path in (elsewhere / "out").iterdir()} >= {
        f"{B3}.{kind}" for kind in ("ptx", "cubin", "json")
    }


def test_building_again_compiles_nothing(tmp_path):
    manifest = tmp_path / f"{B3}.json"
    first = build(B3, "sm_90a", manifest, toolchain())
    stamps = {kind: (tmp_path / f"{B3}.{kind}").stat().st_mtime_ns for kind in ("ptx", "cubin")}
    start = time.perf_counter()
    assert build(B3, "sm_90a", manifest, toolchain()) == first
    assert time.perf_counter() - start < 1.0
    assert {kind: (tmp_path / f"{B3}.{kind}").stat().st_mtime_ns for kind in ("ptx", "cubin")} == stamps


# ---- builds that are results, but not binaries ----


def failed(manifest: Path) -> str:
    """Asserts that a build failed as data and returns its one sentence."""
    written = read_json(manifest)
    assert written["status"] == "build failed"
    assert "cubin_sha256" not in written
    assert [manifest.with_name(f"{written['variant']}.{kind}").read_bytes() for kind in ("ptx", "cubin")] == [b"", b""]
    assert written["reason"].endswith(".")
    assert "\n" not in written["reason"]
    return written["reason"]


def test_a_spill_fails_the_build(tmp_path, monkeypatch):
    unit = unit_of(B3, "sm_90a")
    monkeypatch.setattr(
        rungs_build, "unit_of", lambda name, arch: replace(unit, macros=dict(unit.macros) | {"CTAS_PER_SM": 4})
    )
    build(B3, "sm_90a", tmp_path / f"{B3}.json", toolchain())
    reason = failed(tmp_path / f"{B3}.json")
    assert re.search(
        rf"^{B3} spills [1-9]\d* \+ [1-9]\d* bytes and has a stack of [1-9]\d* bytes at 64 registers", reason
    )


def test_a_c75xx_warning_fails_the_build(tmp_path):
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    real = toolchain()
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(
        f'#!/bin/sh\n"{real.ptxas}" "$@" || exit\ncase "$1" in --version) ;; *) echo "{warning}" ;; esac\n'
    )
    ptxas.chmod(0o755)
    build(B3, "sm_90a", tmp_path / f"{B3}.json", Toolchain(real.nvcc, str(ptxas), real.host))
    assert "C7510" in failed(tmp_path / f"{B3}.json")


def test_other_warnings_are_kept_and_do_not_fail_a_build():
    report = parse_ptxas(
        "ptxas warning : Value of threads per SM for entry gemm is out of range.\nptxas info : Used 40 registers"
    )
    assert report["warnings"] == ["ptxas warning : Value of threads per SM for entry gemm is out of range."]
    assert objection(report, "x") == ""


def test_a_kernel_that_does_not_compile_names_its_first_error(tmp_path, monkeypatch):
    unit = unit_of(B3, "sm_90a")
    macros = dict(unit.macros) | {"TILE_K": 48}
    monkeypatch.setattr(rungs_build, "unit_of", lambda name, arch: replace(unit, macros=macros))
    build(B3, "sm_90a", tmp_path / f"{B3}.json", toolchain())
    assert re.search(
        rf"^{B3} does not compile for sm_90a: kernels/gemm/\S+: error: static assertion failed",
        failed(tmp_path / f"{B3}.json"),
    )


def test_a_failed_build_succeeds_once_its_cause_is_gone(tmp_path, monkeypatch):
    unit = unit_of(B3, "sm_90a")
    for ctas, status in ((4, "build failed"), (2, "ok"), (4, "build failed"), (2, "ok")):
        macros = dict(unit.macros) | {"CTAS_PER_SM": ctas}
        monkeypatch.setattr(rungs_build, "unit_of", lambda name, arch, macros=macros: replace(unit, macros=macros))
        assert build(B3, "sm_90a", tmp_path / f"{B3}.json", toolchain())["status"] == status
    assert sha256_file(tmp_path / f"{B3}.cubin") == manifest_of(B3, "sm_90a")["cubin_sha256"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_tma_is_not_on_older_chips(arch):
    manifest = manifest_of(B5, arch)
    assert manifest["status"] == "not on this chip"
    assert manifest["reason"] == f"{B5}: TMA needs one of sm_90a, sm_100a, sm_120, not {arch}."
    assert built(B5, arch).with_suffix(".cubin").read_bytes() == b""


def test_an_unknown_variant_is_one_sentence(tmp_path):
    with pytest.raises(RungsError, match=r"^'H77' is no variant of hopper_gemm: .* one of the rungs H0, "):
        rungs_build.find_variant("H77")
    with pytest.raises(RungsError, match=r"^'abl_L9' is no variant of gemm: a variant is named abl_L\{load\}_"):
        build("abl_L9", "sm_90a", tmp_path / "x.json", toolchain())


# ---- tools that are missing ----


def test_without_a_host_compiler_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(rungs_build.shutil, "which", lambda name, path=None: None)
    with pytest.raises(
        RungsError, match=r"^g\+\+ is not on PATH, and nvcc needs a host compiler even for -ptx: install it .*\.$"
    ):
        find_toolchain("pip")


def test_without_pips_nvcc_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(rungs_build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RungsError, match=r"^nvcc of CUDA 13\.0 is not among this Python's packages: run `pip install .*\.$"
    ):
        find_toolchain("pip")


def test_without_the_machines_nvcc_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(rungs_build.shutil, "which", lambda name, path=None: None)
    with pytest.raises(RungsError, match=r"^nvcc is neither on PATH nor under CUDA_HOME: .*\.$"):
        find_toolchain("system")


def test_without_ninja_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(rungs_build.shutil, "which", lambda name, path=None: None)
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(RungsError, match=r"^ninja is not installed: run `pip install -r envs/requirements\.txt`\.$"):
        build(B3, "sm_90a", tmp_path / f"{B3}.json", toolchain())


def test_the_machines_tools_are_found_on_path_and_under_cuda_home(tmp_path, monkeypatch):
    for tool in ("nvcc", "ptxas"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    host = toolchain().host
    monkeypatch.setenv("PATH", str(Path(host).parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_toolchain("system") == Toolchain(str(tmp_path / "bin/nvcc"), str(tmp_path / "bin/ptxas"), host)


# ---- all of them ----


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_rung_builds_without_stack_or_spills(arch):
    build_ladders()
    for variant in ladder_variants():
        manifest = manifest_of(variant.name, arch)
        if variant.level("load") == 2 and arch in ("sm_80", "sm_86", "sm_89"):
            assert manifest["status"] == "not on this chip"
            continue
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", [])
        ptxas = manifest["ptxas"]
        assert (
            ptxas["stack_bytes"],
            ptxas["spill_store_bytes"],
            ptxas["spill_load_bytes"],
            ptxas["smem_static_bytes"],
        ) == (0, 0, 0, 0)
        assert 100 <= ptxas["registers"] <= 128
        assert ptxas["barriers"] == 1


def test_a_variant_builds_in_about_a_second_on_one_core(tmp_path):
    times = []
    for name in (B3, B5):
        start = time.perf_counter()
        build(name, "sm_90a", tmp_path / name / f"{name}.json", toolchain())
        times.append(time.perf_counter() - start)
    assert min(times) < 2.0, times


def test_flags_in_the_environment_have_no_influence(tmp_path, monkeypatch):
    """They would stand in no manifest, and what a variant compiles to is remembered under its build id."""
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DVARIANT_SWIZZLE=0")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-O0")
    found = build(B3, "sm_90a", tmp_path / B3 / f"{B3}.json", toolchain())
    assert found["code_hash"] == manifest_of(B3, "sm_90a")["code_hash"] and found["status"] == "ok"
