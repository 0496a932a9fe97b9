"""The hash of a cubin's machine code: what changes it and what does not."""

from __future__ import annotations

import contextlib
import random
import re
import struct
import subprocess
from pathlib import Path

import pytest

from binaries import built, toolchain
from rungs import build
from rungs.errors import RungsError
from rungs.machine_code import ELF_HEADER, SECTION_HEADER, code_hash

ARCH = "sm_90a"
SCALED = """
__constant__ float table[4] = {TABLE};
__device__ float scaled(const float* out, int at) { return out[at] * table[at % 4]; }
"""
MIRRORED = """
__device__ float mirrored(const float* tile, int at) { return tile[127 - at] + ADDED; }
"""
KERNEL = (
    f"""
// A comment.
{SCALED}{MIRRORED}"""
    + """
extern "C" __global__ void __launch_bounds__(128) k(float* out, int n) {
  __shared__ float tile[SHARED];
  int at = threadIdx.x;
  tile[at] = scaled(out, at);
  __syncthreads();
  if (at < n) out[at] = mirrored(tile, at);
}
"""
)
USUAL = {"TABLE": "1, 2, 3, 4", "SHARED": "128", "ADDED": "1.5f"}


def hash_of(folder: Path, text: str, arch: str = ARCH, **values: str) -> str:
    """Compile a kernel as a build does, nvcc to PTX and ptxas to a cubin, both with line numbers."""
    for name, value in (USUAL | values).items():
        text = re.sub(rf"\b{name}\b", value, text)
    source, ptx, cubin = (folder / f"k.{end}" for end in ("cu", "ptx", "cubin"))
    source.write_text(text)
    tools, virtual = toolchain(), arch.replace("sm_", "compute_")
    command = [tools.nvcc, "-ccbin", tools.host, "-ptx", "-lineinfo", f"-arch={virtual}", str(source), "-o", str(ptx)]
    subprocess.run(command, check=True, capture_output=True)
    assert build.assemble(ptx, cubin, arch, tools) == ""
    return code_hash(cubin)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return hash_of(tmp_path_factory.mktemp("usual"), KERNEL)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("// A comment.", "// Another.\n\n\n"),
        lambda text: re.sub(r"\bat\b", "thread", text).replace("tile", "parked").replace("table", "weights"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: " ".join(text.replace("// A comment.", "").split()),
        lambda text: text.replace(SCALED, "").replace(MIRRORED, MIRRORED + SCALED),
    ],
    ids=["comment", "names", "line ends", "layout", "functions in another order"],
)
def test_text_takes_no_part(usual, tmp_path, change):
    assert hash_of(tmp_path, change(KERNEL)) == usual


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120"])
def test_nor_on_other_architectures(tmp_path, arch):
    moved = KERNEL.replace("// A comment.", "// Another.\n\n\n")
    assert hash_of(tmp_path, KERNEL, arch) == hash_of(tmp_path, moved, arch)


@pytest.mark.parametrize(
    "values",
    [
        {"ADDED": "2.5f"},
        {"TABLE": "1, 2, 3, 5"},
        {"SHARED": "160"},
        {"128": "256"},
        {"n": "long long n"},
        {"arch": "sm_80"},
    ],
    ids=["an immediate", "a constant", "static shared memory", "launch bounds", "a parameter", "architecture"],
)
def test_code_constants_and_resources_do(usual, tmp_path, values):
    if "128" in values:
        text, values = KERNEL.replace("__launch_bounds__(128)", "__launch_bounds__(256)"), {}
    elif "n" in values:
        text, values = KERNEL.replace("int n", "long long n"), {}
    else:
        text = KERNEL
    assert hash_of(tmp_path, text, **values) != usual


def sections(data: bytes) -> dict[str, tuple[int, int]]:
    """Name -> offset and size of each section of a cubin."""
    header = ELF_HEADER.unpack_from(data)
    found = [SECTION_HEADER.unpack_from(data, header[6] + header[11] * at) for at in range(header[12])]
    names = data[found[header[13]][4] :]
    return {names[each[0] : names.index(b"\0", each[0])].decode(): (each[4], each[5]) for each in found}


@pytest.mark.parametrize("arch", [ARCH, "sm_120"])
def test_every_byte_of_code_and_of_resources_counts_and_none_of_the_line_table(tmp_path, arch):
    path = built("abl_L1_R1_bl1_s2_sw1", arch).with_suffix(".cubin")
    data, whole = path.read_bytes(), code_hash(path)
    for name, (offset, size) in sections(data).items():
        if not size or name.startswith(".nv.shared"):  # whose bytes are in no file
            continue
        changed = bytearray(data)
        changed[offset + size // 2] ^= 1
        (tmp_path / "k.cubin").write_bytes(changed)
        kept = any(word in name for word in ("debug", "strtab", "symtab", "tkinfo"))
        if name != ".shstrtab":  # names of sections, which say which of them is code
            assert (code_hash(tmp_path / "k.cubin") == whole) == bool(kept), name


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"no cubin at all" * 20, b"\x7fELF\x02" + struct.pack("<59x")])
def test_what_is_no_cubin_is_one_sentence(tmp_path, data):
    (tmp_path / "k.cubin").write_bytes(data)
    with pytest.raises(RungsError, match=r"k\.cubin is no cubin: delete its folder and build the variant again\.$"):
        code_hash(tmp_path / "k.cubin")


def test_a_garbled_cubin_is_one_sentence_or_another_hash(tmp_path):
    data = bytearray(built("abl_L1_R1_bl1_s2_sw1", ARCH).with_suffix(".cubin").read_bytes())
    draw = random.Random(1)
    for _ in range(300):
        garbled = bytearray(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
        for _ in range(draw.randrange(1, 6)):
            garbled[
                draw.randrange(min(len(garbled), 64))
                if draw.random() < 0.3
                else -1 - draw.randrange(2000) % len(garbled)
            ] ^= 1 << draw.randrange(8)
        (tmp_path / "k.cubin").write_bytes(garbled)
        with contextlib.suppress(RungsError):
            assert len(code_hash(tmp_path / "k.cubin")) == 64


def test_which_of_two_kernels_has_which_code_counts(tmp_path):
    two = KERNEL + KERNEL.split(MIRRORED)[1].replace(" k(", " second(").replace("+ ADDED", "").replace(
        "mirrored(tile, at)", "2 * mirrored(tile, at)"
    )
    swapped = two.replace(" k(", " other(").replace(" second(", " k(").replace(" other(", " second(")
    assert hash_of(tmp_path, two) != hash_of(tmp_path, swapped)
