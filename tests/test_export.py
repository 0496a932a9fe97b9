"""A rung outside of rungs: what is exported compiles, links, launches as the plan says and is the code that is measured."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from binaries import GEMM, built, toolchain, tools
from rungs import build, clock, export, staleness
from rungs.cli import main
from rungs.errors import Refused, RungsError
from rungs.files import ROOT, sha256_json
from rungs.inspect import disassemble, parse_sass, resource_usage, tool
from rungs.plan import TensorMap, Workspace, plan
from rungs.results import RECORDED
from rungs.variants import Variant, load_device, load_experiment, sums_through_l2

HOPPER = load_experiment("hopper_gemm")
DEVICE = load_device("sm_90a")
STAGED, SPLIT, L2 = (HOPPER.variant(rung) for rung in ("H10", "K4", "G2"))
KINDS = pytest.mark.parametrize("variant", [STAGED, SPLIT, L2], ids=["staged C", "split K", "sums through L2"])
WORKSPACE = 4 << 40
RUNGS = list(dict.fromkeys(v for ladder in HOPPER.ladders.values() for v in ladder.rungs.values()))
BESIDE = [
    *("hop_t128192_s4_pw1_ps1_cl12_c1_pp0_o1_k1_dl0_bl0", "hop_t256128_s3_pw1_ps0_cl21_c4_pp0_o0_k1_dl0_bl0"),
    *("hop_t64064_s8_pw1_ps0_cl11_c0_pp0_o0_k8_dl0_bl0", "hop_t64256_s3_pw1_ps1_cl12_c2_pp1_o2_k1_dl1_bl1"),
    "hop_t256128_s3_pw1_ps0_cl22_c0_pp0_o0_k4_x1_dl0_bl0",
]
"""Variants on no ladder, for the clusters, tiles and layouts that the ladders lack together."""
SHAPES = [
    *((4096, 4096, 4096), (8192, 8192, 256), (512, 512, 8192), (128, 256, 64), (256, 128, 64)),
    *((1, 8, 8), (1, 4096, 8), (127, 120, 56), (129, 136, 72), (257, 264, 4104), (65, 64, 64), (4097, 4104, 1000)),
    *((1 << 20, 8, 8), (8, 1 << 20, 8), (8, 8, 1 << 20), (1000, 2000, 3000), (3000, 2000, 1000)),
]
REFUSED = [
    *((0, 8, 8), (8, 0, 8), (8, 8, 0), (-1, 8, 8), (8, -8, 8), (8, 8, -8), (8, 12, 8), (8, 8, 4), (3, 7, 9)),
    *(((1 << 20) + 1, 8, 8), (8, (1 << 20) + 8, 8), (8, 8, (1 << 20) + 8), (0, 7, 7), (1 << 40, 8, 8)),
]
SMS = (132, 114, 2)
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
PROMOTIONS = {"NONE": 0, "64B": 1, "128B": 2, "256B": 3}
FOREIGN = "int main() {}\n"


def include() -> str:
    """The folder of CUDA's headers, beside the compiler."""
    return str(Path(toolchain().nvcc).parents[1] / "include")


def ran(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints, which must end well and warn of nothing."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def planned(variant: Variant, shape: tuple[int, int, int], sms: int):
    return plan(HOPPER, variant, DEVICE, shape, export.ADDRESSES, sms)


# ---- the launch ------------------------------------------------------------------------------------------------------


def test_the_header_plans_every_rung_as_python_does(tmp_path):
    """Compiled by the host's compiler alone: grid, block, cluster, shared memory, tensor maps and refusals."""
    variants = [*RUNGS, *map(HOPPER.variant, BESIDE)]
    body = []
    for variant in variants:
        (tmp_path / f"{variant.name}.h").write_text(export.files(HOPPER, variant)[f"{variant.name}.h"])
        fields = ("bytes", "zeros") if sums_through_l2(HOPPER.values(variant)) else ()
        launch = f"rungs::{variant.name}_plan::plan(m, n, k, sms)"
        body.append(f"show({launch}{''.join(f', {launch}.workspace_{field}' for field in fields)});")
    includes = "".join(f'#include "{variant.name}.h"\n' for variant in variants)
    (tmp_path / "plans.cpp").write_text(
        f"""{includes}
#include <cstdio>
template <class M> void map(const M& m) {{
  std::printf(" %llu %llu %llu %u %u %u %u", m.dims[0], m.dims[1], m.stride_bytes, m.box[0], m.box[1], m.swizzle_bytes, m.l2_promotion_bytes);
}}
template <class P> void show(const P& p, unsigned long long bytes = 0, unsigned long long zeros = 0) {{
  std::printf("%u %u %u %u %d %llu %llu", p.grid, p.block, p.cluster, p.smem_bytes, p.dependent, bytes, zeros);
  map(p.a), map(p.b), map(p.c);
  std::printf(" %s\\n", p.refusal ? p.refusal : "");
}}
int main() {{
  long long m, n, k;
  unsigned sms;
  while (std::scanf("%lld %lld %lld %u", &m, &n, &k, &sms) == 4) {{ {" ".join(body)} }}
}}
"""
    )
    ran("g++", "-std=c++17", "-Wall", "-Wextra", "-isystem", include(), "plans.cpp", "-o", "plans", cwd=tmp_path)
    cases = [(shape, sms) for shape in [*SHAPES, *REFUSED] for sms in SMS]
    asked = "".join(f"{m} {n} {k} {sms}\n" for (m, n, k), sms in cases)
    said = subprocess.run([tmp_path / "plans"], input=asked, capture_output=True, text=True, check=True).stdout
    lines = iter(said.splitlines())
    for shape, sms in cases:
        for variant in variants:
            where, found = (variant.name, shape, sms), next(lines)
            try:
                wanted = planned(variant, shape, sms)
            except Refused as refusal:
                sentence = found.split(" ", 28)[28]
                assert re.sub(r"^(\w)=-?\d+", r"\1", str(refusal)) == sentence, where
                continue
            numbers = [wanted.grid[0], wanted.block[0], wanted.cluster[0], wanted.smem_bytes, int(wanted.dependent)]
            workspace = next((p for p in wanted.params if isinstance(p, Workspace)), Workspace(0, 0))
            numbers += [workspace.bytes, workspace.zeros]
            for address in export.ADDRESSES.values():
                [of] = [p for p in wanted.params if isinstance(p, TensorMap) and p.address == address]
                widths = (int(word.removesuffix("B")) for word in (of.swizzle, of.l2_promotion))
                numbers += [*of.dims, *of.strides, *of.box, *widths]
            assert found.split() == [str(number) for number in numbers], where
    assert next(lines, None) is None


@dataclass(frozen=True)
class Exported:
    """An exported variant, compiled by its own compile line but for the last step, the link."""

    variant: Variant
    folder: Path
    object: Path

    @property
    def compile_line(self) -> list[str]:
        text = (self.folder / "example.cu").read_text()
        return shlex.split(re.search(r"^// Compile: (.*)$", text, re.MULTILINE)[1])

    def nvcc(self, *words: str | Path) -> str:
        """nvcc with the flags of the compile line; pip's does not find its own libraries."""
        flags = self.compile_line[1 : self.compile_line.index("example.cu")]
        libraries = f"-L{Path(toolchain().nvcc).parents[1] / 'lib'}"
        return ran(toolchain().nvcc, libraries, *flags, *words, cwd=self.folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[Variant, Exported]:
    def compiled(variant: Variant) -> Exported:
        folder = tmp_path_factory.mktemp("export") / "new"
        export.run(variant.name, folder)
        one = Exported(variant, folder, folder / f"{variant.name}.o")
        one.nvcc("-c", f"{variant.name}.cu", "-o", one.object)
        return one

    with ThreadPoolExecutor(2) as pool:
        kinds = (STAGED, SPLIT, L2)
        return dict(zip(kinds, pool.map(compiled, kinds), strict=True))


@KINDS
def test_the_launcher_launches_the_plan(exported, tmp_path, variant):
    """Linked with a runtime that only tells: each parameter, tensor map and attribute, on devices of several sizes."""
    one = exported[variant]
    program = tmp_path / "program"
    names = [f"-DEXPORTED_HEADER=<{variant.name}.h>", f"-DEXPORTED={variant.name}", "-I", one.folder]
    names += [f"-DEXPORTED_WORKSPACE=at<void>({WORKSPACE}ull),"] if variant == L2 else []
    source = ROOT / "tests" / "standin" / "cudart.cpp"
    ran("g++", "-std=c++17", "-w", *names, "-isystem", include(), source, one.object, "-o", program)
    params = planned(variant, SHAPES[0], 132).params
    kinds = "".join("T" if isinstance(p, TensorMap) else "8" if isinstance(p, Workspace) else str(p[1]) for p in params)
    shapes = [str(extent) for shape in [*SHAPES, *REFUSED] for extent in shape]
    lines = ran(program, kinds, ",".join(map(str, SMS)), *shapes).splitlines()

    # Once for each device: cudaFuncAttributeMaxDynamicSharedMemorySize and ...PreferredSharedMemoryCarveout.
    attributes = [line for line in lines if line.startswith("attribute")]
    assert attributes == [f"attribute 8 {planned(variant, SHAPES[0], 132).smem_bytes}", "attribute 9 100"] * len(SMS)
    found = [line.split() for line in lines if not line.startswith("attribute")]
    expected = []
    for stream, (shape, sms) in enumerate(((shape, sms) for shape in SHAPES for sms in SMS), start=1):
        wanted = planned(variant, shape, sms)
        if wanted.sharers > 1 and sms < wanted.together:  # its CTAs would wait for each other for ever
            expected.append(["error", "720"])  # cudaErrorCooperativeLaunchTooLarge
            continue
        words = [stream, *wanted.grid, *wanted.block, *wanted.cluster, wanted.smem_bytes, int(wanted.dependent)]
        for parameter in wanted.params:
            if isinstance(parameter, TensorMap):
                codes = SWIZZLES[parameter.swizzle], PROMOTIONS[parameter.l2_promotion]
                words += [parameter.address, *parameter.dims, *parameter.strides, *parameter.box, *codes, 1]
            else:
                words.append(WORKSPACE if isinstance(parameter, Workspace) else parameter[0])
        expected.append(["launch", *map(str, words)])
    assert found == expected + [["error", "1"]] * (len(REFUSED) * len(SMS))  # cudaErrorInvalidValue


# ---- compiled --------------------------------------------------------------------------------------------------------


@KINDS
def test_what_is_exported_is_what_is_measured(exported, tmp_path, variant):
    """Instruction by instruction, operands and branch targets included; and the same registers."""
    ran(tool("cuobjdump", tools()), "-xelf", "all", exported[variant].object, cwd=tmp_path)
    [outside] = tmp_path.glob("*.cubin")
    inside = built(variant.name, "sm_90a").with_suffix(".cubin")
    mine, theirs = (
        [
            (
                line.address,
                line.predicate,
                line.opcode,
                re.sub(r"`\(.*?\)|\.L\w+", "label", line.operands),
                line.targets,
            )
            for line in parse_sass(disassemble(cubin, tools()))
        ]
        for cubin in (outside, inside)
    )
    assert len(mine) > 300
    assert mine == theirs
    assert resource_usage(outside, tools()) == resource_usage(inside, tools())


@KINDS
def test_the_example_compiles_and_links_by_the_line_in_it(exported, variant):
    one = exported[variant]
    line = one.compile_line
    assert " ".join(line) == export.compile_line(variant.name)
    # The variant's object stands for its source, which is compiled already.
    words = [one.object.name if word == "hop_*.cu" else word for word in line[line.index("example.cu") :]]
    one.nvcc(*words)
    done = subprocess.run([one.folder / "example", "8", "12", "8"], capture_output=True, text=True)
    sentence = "N is not a multiple of 8, which the copy engine's 16-byte rows need: choose a multiple of 8.\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.skipif(not [gpu for gpu in clock.gpus() if gpu.arch == "sm_90a"], reason="there is no sm_90a GPU here")
@pytest.mark.parametrize("shape", [(), (4096, 4096, 4096), (1, 8, 8), (257, 264, 4104), (1000, 2000, 3000)], ids=str)
@KINDS
def test_the_example_is_right_on_a_gpu(exported, variant, shape):
    one = exported[variant]
    if not (one.folder / "example").exists():
        one.nvcc("example.cu", one.object, "-o", "example")
    said = ran(one.folder / "example", *map(str, shape))
    assert re.fullmatch(r"\d+x\d+x\d+: \d+\.\d TFLOP/s, 0 of \d+ wrong\n", said)


def test_two_variants_are_one_program_and_refuse_without_a_gpu(exported, tmp_path):
    one, other, _ = exported.values()
    names = [each.variant.name for each in (one, other)]
    calls = "".join(
        f"""  wrong += rungs::{name}(at, at, at, 8, 12, 8) != cudaErrorInvalidValue;
  wrong += rungs::{name}(nullptr, at, at, 8, 8, 8) != cudaErrorInvalidValue;
  wrong += rungs::{name}(at, at + 4, at, 8, 8, 8) != cudaErrorInvalidValue;
"""
        for name in names
    )
    includes = "".join(f'#include "{name}.h"\n' for name in [*names, names[0]])
    (tmp_path / "two.cu").write_text(
        f"{includes}int main() {{\n  __nv_bfloat16* at = nullptr;\n  at += 8;\n  int wrong = 0;\n{calls}  return wrong;\n}}\n"
    )
    objects = ran(
        *("g++", "-std=c++17", "-c", "-x", "c++", "two.cu", "-o", "two.o", "-isystem", include()),
        *(word for each in (one, other) for word in ("-I", each.folder)),
        cwd=tmp_path,
    )
    assert objects == ""
    one.nvcc(tmp_path / "two.o", one.object, other.object, "-o", tmp_path / "two")
    ran(tmp_path / "two")


# ---- the text --------------------------------------------------------------------------------------------------------


@KINDS
def test_the_source_stands_alone(variant):
    texts = export.files(HOPPER, variant)
    source = texts[f"{variant.name}.cu"]
    assert re.findall(r"#include (.*)", source) == [f'"{variant.name}.h"', "<cuda.h>", "<cuda_runtime.h>"]
    assert re.findall(r"#include (.*)", texts[f"{variant.name}.h"]) == ["<cuda_bf16.h>", "<cuda_runtime_api.h>"]
    assert "#pragma once" not in source
    pieces = re.findall(r"^// ==== (kernels/\S+) ====$", source, re.MULTILINE)
    assert sorted(pieces) == list(build.sources(HOPPER.kernel))
    for macro, value in HOPPER.macros(variant, DEVICE).items():
        assert re.search(rf"^#define {macro} {value}\b", source, re.MULTILINE)
        assert f"#undef {macro}\n" in source
    assert 'extern "C"' not in source
    for file, text in texts.items():
        assert text.startswith(export.MARKER), file
        assert f"// Compile: {export.compile_line(variant.name)}\n" in text


def test_a_source_with_another_kernel_is_refused(monkeypatch):
    """A kernel may have a signature for each level; a second kernel would need a launcher of its own."""
    monkeypatch.setattr(export, "inlined", lambda kernel: ([], 'extern "C" __global__ void other(int n) {}'))
    with pytest.raises(RungsError, match="that is not hopper_gemm, or none: export takes one kernel"):
        export.files(HOPPER, STAGED)


def test_the_top_of_each_file_says_where_it_comes_from():
    source_hash = sha256_json(build.source_hashes(HOPPER.kernel))
    license_ = (ROOT / "LICENSE").read_text().splitlines()
    for text in export.files(HOPPER, STAGED).values():
        top = " ".join(line.removeprefix("//").strip() for line in text.split("\n#include", 1)[0].splitlines())
        for words in (
            f"rungs, variant {STAGED.name} of experiment hopper_gemm, rung H10",
            "128x256; 4 stages; a producer's warpgroup loads; a CTA per SM; cluster 2x1 that shares B; C by TMA through 2 slots;",
            source_hash,
            f"License: {license_[0]}, {next(line for line in license_ if line.startswith('Copyright'))}",
        ):
            assert words in top


def test_what_is_not_recorded_has_no_share():
    nobody = HOPPER.variant("hop_t64128_s3_pw0_ps0_cl11_c0_pp0_o1_k1_dl0_bl0")
    [sentence] = export.measurements(HOPPER, nobody, ROOT / RECORDED)
    assert sentence == "Not measured in a recorded set; rungs builds it by nvcc 13.0.88, ptxas 13.0.88."


def test_an_export_for_a_shape_is_of_that_shape(tmp_path):
    export.run(export.variant_for((8192, 8192, 8192)), tmp_path, (8192, 8192, 8192))
    text = (tmp_path / "example.cu").read_text(encoding="utf-8")
    assert "long long m = 8192, n = 8192, k = 8192," in text
    assert re.search(r"\d % of cuBLAS at\s+(// +)?8192x8192x8192 \(recorded", text)


def test_a_workspace_is_asked_for_where_there_is_one():
    with_, without = (export.files(HOPPER, variant) for variant in (L2, SPLIT))
    assert "workspace" not in "".join(
        text.partition("\n#include")[2] for file, text in without.items() if file[-2:] == ".h"
    )
    assert "long long k,\n    void* workspace, cudaStream_t stream" in with_[f"{L2.name}.h"]
    assert "launches in several streams, or of several of these kernels, may not" in with_[f"{L2.name}.h"]
    assert "cudaMalloc(&workspace, plan.workspace_bytes)" in with_["example.cu"]
    assert "workspace" not in without["example.cu"].partition("\n#include")[2]


def test_the_share_is_that_of_the_recorded_set(monkeypatch):
    recorded, variant = ROOT / RECORDED, GEMM.variant("B6")
    with open(recorded / "h200" / "data" / "gemm" / "shapes.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == variant.name]
    measured = {tuple(int(row[axis]) for axis in "mnk"): row for row in rows}
    shares = {shape: float(row["share_percent"]) for shape, row in measured.items()}
    best, usual = max(shares, key=shares.__getitem__), (4096, 4096, 4096)
    monkeypatch.setattr(staleness, "stale", lambda *_, **__: {})
    [sentence] = export.measurements(GEMM, variant, recorded)  # the cold set is left out
    assert sentence == (
        f"Measured on NVIDIA H200, compiled by nvcc 13.0.88, ptxas 13.0.88: {shares[usual]:.1f} % of cuBLAS at 4096x4096x4096, at"
        f" most {shares[best]:.1f} % at {GEMM.describe(best)} (recorded set h200, run {measured[usual]['run_id']})."
    )
    [sentence] = export.measurements(GEMM, variant, recorded, (512, 512, 1024))
    assert f": {shares[512, 512, 1024]:.1f} % of cuBLAS at 512x512x1024 (recorded" in sentence
    monkeypatch.setattr(staleness, "stale", lambda *_, **__: {variant.name: "it compiles to other machine code now"})
    [sentence] = export.measurements(GEMM, variant, recorded)
    assert sentence == (
        "Recorded on NVIDIA H200, but it compiles to other machine code now: what it took there is not of this source."
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("#include <vector>", r"^kernels/\S+\.cu includes <vector>, which is none of CUDA's headers: .*\.$"),
        ('#include "nowhere.cuh"', r'^kernels/\S+\.cu includes "nowhere\.cuh", which is not in this repo: .*\.$'),
    ],
)
def test_a_kernel_that_needs_more_than_cuda_is_not_exported(monkeypatch, tmp_path, line, sentence):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "odd.cu").write_text(f"{line}\n")
    monkeypatch.setattr(export, "ROOT", tmp_path)
    monkeypatch.setattr(build, "KERNELS", tmp_path / "kernels")
    with pytest.raises(RungsError, match=sentence):
        export.inlined("odd.cu")


# ---- the files -------------------------------------------------------------------------------------------------------


def test_the_verb_writes_three_files_and_says_how_to_compile_them(tmp_path, capsys):
    folder = tmp_path / "some" / "folder"
    assert main(["export", "--variant", "H10", "--to", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["example.cu", f"{STAGED.name}.cu", f"{STAGED.name}.h"]
    assert export.compile_line(STAGED.name) in capsys.readouterr().out


def test_an_export_takes_the_place_of_an_export_and_of_nothing_else(tmp_path):
    export.run("H10", tmp_path)
    first = (tmp_path / "example.cu").read_text()
    export.run("K4", tmp_path)
    assert SPLIT.name in (tmp_path / "example.cu").read_text()
    assert (tmp_path / f"{STAGED.name}.cu").is_file()
    export.run("H10", tmp_path)
    assert (tmp_path / "example.cu").read_text() == first
    (tmp_path / f"{STAGED.name}.h").write_text(FOREIGN)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        RungsError, match=rf"^\S+/{STAGED.name}\.h is there and does not begin with .*, so it is not .*\.$"
    ):
        export.run("H10", tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["folder", "dangling link", "bytes"])
def test_whatever_stands_in_the_place_of_a_file_stays(tmp_path, kind):
    place = tmp_path / "example.cu"
    if kind == "folder":
        place.mkdir()
    elif kind == "bytes":
        place.write_bytes(b"\xff\xfe\x00")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(RungsError, match=r"example\.cu is there and does not begin with "):
        export.run("H10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["example.cu"]


def test_all_three_files_or_none(tmp_path, monkeypatch):
    texts = export.files(HOPPER, STAGED)
    unwritable = {**texts, "example.cu": "\udc80"}  # UTF-8 has no such letter
    monkeypatch.setattr(export, "files", lambda *_, **__: unwritable)
    with pytest.raises(UnicodeEncodeError):
        export.run("H10", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variant", "to", "sentence"),
    [
        ("H99", "new", r"'H99' is no variant of \w+: a variant is named .*\."),
        ("hop_t128128_s9_pw1_ps0_cl11_c0_pp0_o0_k1_dl1_bl1", "new", r"Experiment hopper_gemm has no level 9 of factor stages: .*\."),
        ("hop_t128256_s8_pw1_ps1_cl21_c2_pp0_o2_k1_dl1_bl1", "new", r"\w+ needs \d+ bytes of shared memory, but .*\."),
        ("B6", "new", rf"{GEMM.variant('B6').name} is of experiment gemm, .*: choose a variant of hopper_gemm\."),
        ("W4", "new", r"\S+ is of experiment smem_read, .*: choose a variant of hopper_gemm\."),
        ("H10", "file", r"\S+/file is a file, and an export is three files in a folder: name a folder\."),
        ("H10", "file/folder", r"\S+ cannot be written \(Not a directory\): make its folder writable or free some space\."),
        ("H10", "/proc/rungs", r"\S+ cannot be written \(.*\): make its folder writable or free some space\."),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_sentence(tmp_path, capsys, variant, to, sentence):
    (tmp_path / "file").write_text(FOREIGN)
    assert main(["export", "--variant", variant, "--to", str(tmp_path / to)]) == 1
    assert re.fullmatch(f"rungs: {sentence}\n", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
