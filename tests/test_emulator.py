"""The emulator's parts on small kernels written here in PTX, each held against numpy or a rule with its source."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from binaries import toolchain
from rungs.emulator import bulk, launch, metrics, parser, problem
from rungs.emulator.alu import round_to_bf16, widen_bf16
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused, RungsError
from rungs.plan import Plan, TensorMap

LANE = np.arange(32)
MAP = ".param .align 64 .b8 {}[128]"


def kernel(body: str, params: str = ".param .u64 out", version: str = "9.0", target: str = "sm_90a") -> str:
    """A kernel around a body; %r0 is the thread, %rd0 its place (of 4 bytes) in `out`, %r1 the shared memory."""
    return f"""
.version {version}
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 bytes[];
.visible .entry k({params})
{{
.reg .pred %p<16>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .f32 %f<32>;
.reg .b64 %rd<32>;
mov.u32 %r0, %tid.x;
mov.u32 %r1, bytes;
ld.param.u64 %rd1, [out];
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd0, %rd1, %rd2;
{body}
ret;
}}
"""


def execute(
    folder: Path,
    body: str,
    *,
    threads: int = 32,
    out: int = 32,
    inputs: dict[str, np.ndarray] | None = None,
    maps: tuple[TensorMap, ...] = (),
    smem: int = 32 * 1024,
    assemble: bool = True,
    **how: object,
) -> tuple[np.ndarray, launch.Result]:
    """Run the body in one CTA; returns `out` (as u32, 0xffffffff where nothing was written) and the result.

    `inputs` become buffers whose addresses are further parameters, `maps` tensor maps (an address 0 is that of the first input).
    """
    memory = GlobalMemory()
    address = memory.reserve("out", (out,), np.uint32)
    given: list[tuple[int, int] | TensorMap] = [(address, 8)]
    params = [".param .u64 out"]
    for name, data in (inputs or {}).items():
        given.append((memory.put(name, data), 8))
        params.append(f".param .u64 {name}")
    for number, each in enumerate(maps):
        first = given[1] if len(given) > 1 else (address, 8)
        assert isinstance(first, tuple)
        given.append(
            TensorMap(
                each.address or first[0],
                each.dims,
                each.strides,
                each.box,
                each.swizzle,
                element_bytes=each.element_bytes,
            )
        )
        params.append(MAP.format(f"map{number}"))
    path = folder / "k.ptx"
    path.write_text(kernel(body, ", ".join(params)), encoding="utf-8")
    if assemble:
        assert_assembles(path)
    plan = Plan("k", (1, 1, 1), (threads, 1, 1), (1, 1, 1), smem, tuple(given))
    result = launch.run(path, plan, memory, **how)  # type: ignore[arg-type]
    return memory["out"], result


def assert_assembles(path: Path) -> None:
    """The PTX of a test is real PTX."""
    command = [toolchain().ptxas, "-arch=sm_90a", str(path), "-o", "/dev/null"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- the parser ------------------------------------------------------------------------------------------------------


def test_the_source_line_is_the_caller_of_a_wrapper_and_where_that_is_inlined():
    text = kernel(
        ".loc 1 29 7\n.loc 1 90 9, function_name $L, inlined_at 1 29 7\n.loc 2 121 3, function_name $L, inlined_at 1 90 9\n"
        "add.u32 %r2, %r0, 1;"
    )
    text += '.file 1 "kernels/gemm/gemm.cu"\n.file 2 "kernels/gemm/../ptx.cuh"\n'
    found = parser.parse(text, "k").code[-2]
    assert found.frames == ("kernels/ptx.cuh:121", "kernels/gemm/gemm.cu:90", "kernels/gemm/gemm.cu:29")
    assert found.source == "kernels/gemm/gemm.cu:90 in kernels/gemm/gemm.cu:29"
    assert text.splitlines()[found.line - 1] == "add.u32 %r2, %r0, 1;"


def test_scoped_names_of_inline_asm_are_different_registers(tmp_path):
    body = "".join(f"{{\n.reg .pred p;\nsetp.eq.u32 p, %r0, {i};\nselp.u32 %r{2 + i}, 1, 0, p;\n}}\n" for i in range(2))
    got, _ = execute(tmp_path, body + "shl.b32 %r4, %r3, 1;\nor.b32 %r5, %r4, %r2;\nst.global.u32 [%rd0], %r5;")
    assert got[:3].tolist() == [1, 2, 0]


def test_operands_of_every_form():
    text = kernel(
        "@!%p1 ld.shared.v2.u32 {%r2, %r3}, [%r1+-16];\nsetp.lt.and.s32 %p1|%p2, %r0, -0x10, !%p3;\n"
        "mov.f32 %f0, 0f3F800000;\nmov.u32 %r4, bytes+128;"
    )
    load, compare, number, address = parser.parse(text, "k").code[-5:-1]
    assert load.guard == parser.Register("%p1", "pred", True)
    assert load.operands[1] == parser.Address(parser.Register("%r1", "b32"), -16)
    assert compare.operands[2] == parser.Immediate(-16)
    assert compare.operands[3] == parser.Register("%p3", "pred", True)
    assert number.operands[1] == parser.Immediate(0x3F800000, 32)
    assert address.operands[1] == parser.Symbol("bytes", 128)


def test_a_pointer_parameter_of_newer_compilers():
    """For sm_100 on, nvcc says what a parameter points to."""
    found = parser.parse(
        kernel("", ".param .u64 .ptr .align 1 out, .param .align 64 .b8 map[128], .param .u32 n"), "k"
    ).params
    assert [(param.size, param.offset) for param in found] == [(8, 0), (128, 64), (4, 192)]


BODY = kernel("@here;")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BODY.replace("@here", "add.u32 " + "!" * 3000), "is not what the emulator can read"),
        (BODY.replace("@here", "add.u32 " + "{" * 100_000), "is no instruction"),
        (BODY.replace("%r<64>", "%r<900000000000>"), "declares 900000000000 registers"),
        (BODY.replace("@here", "add.u32 " + "a, " * 20_000), "cannot read: ''"),
        (BODY.replace("bytes[]", f"b{' ' * 20_000}[]"), "is no variable"),
        (BODY.replace("@here", "add.u32 08"), "is not what the emulator can read"),
    ],
    ids=range(6),
)
def test_damaged_ptx_is_one_short_sentence(text, words):
    with pytest.raises(EmulationError) as error:
        parser.parse(text, "k")
    assert words in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("gap", ["\n", "\n \n\t", "add.u32 %r2\n", "a b "], ids=["lines", "blanks", "cut", "words"])
def test_long_gaps_are_passed_over_at_once(gap):
    """Each once took a time that grew with the square of its length: minutes for a file of megabytes."""
    began = time.process_time()
    for text in (gap * 30_000 + BODY, BODY.replace("@here;", gap * 30_000)):
        with contextlib.suppress(EmulationError):
            parser.parse(text, "k")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("version", ["6.5", "9.7"])
def test_another_isa_version_is_refused(version):
    with pytest.raises(EmulationError, match=rf"of ISA version {version}, where 7.0 to 9.0 was expected"):
        parser.parse(kernel("", version=version), "k")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("frobnicate.u32 %r2, %r0;", r"PTX line \d+ \(frobnicate.u32; no source line.*does not know"),
        ("tcgen05.fence;", r"tcgen05.*does not know"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f0}, {%r0}, {%r1}, {%f0};", "form of mma"),
        ("ld.local.u32 %r2, [%r1];", "local memory"),
        ("atom.global.cas.b32 %r2, [%rd0], %r0, %r0;", "is an atomic that the emulator lacks"),
        ("mov.u32 %r2, %smid;", "reads %smid, which the emulator does not have"),
        ("add.u32 %r2, %r0;", "could not be executed"),
        ("add.bogus.s32 %r2, %r0, %r0;", "has the modifier .bogus, which the emulator does not know"),
        ("ldmatrix.bogus.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];", "has the modifier .bogus"),
    ],
)
def test_what_is_not_known_is_named(body, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence) as error:
        execute(tmp_path, body, assemble=False)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


BODY = "add.u32 %r2, %r0, %r0;\nst.global.u32 [%rd0], %r2;"


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (
            lambda text: text[: text.index("add.u32")],
            "ends in line .* before the kernel's closing brace: the file is cut",
        ),
        (lambda text: text[: text.index("(") + 3], "ends before the body of 'k'"),
        (lambda text: text.replace("ret;", ""), "runs past its last instruction, where a ret or an exit"),
        (lambda text: text.replace("%r0, %r0", "0x%"), "cannot read|could not|form"),
        (lambda text: text.replace("add.u32", "}\n}\nadd.u32"), "."),
    ],
)
def test_ptx_that_was_cut_is_one_sentence(cut, sentence, tmp_path):
    path = tmp_path / "k.ptx"
    path.write_text(cut(kernel(BODY)))
    with pytest.raises(EmulationError, match=sentence) as error:
        memory = GlobalMemory()
        plan = Plan("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ((memory.reserve("out", (32,), np.uint32), 8),))
        launch.run(path, plan, memory)
    assert "\n" not in str(error.value)


def test_a_problem_that_does_not_fit_memory_is_refused_before_it_is_drawn():
    with pytest.raises(
        RungsError, match=r"1048576x1048576x1048576 takes \d+ bytes to emulate, above half of this machine's"
    ):
        problem.inputs((1 << 20,) * 3, "integer", 1)


# ---- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"smem": 240 * 1024}, "245760 bytes of shared memory, where at most 232448 was expected on sm_90a"),
        ({"threads": 48}, "48 threads, where a multiple of 32 up to 1024"),
        ({"threads": 2048}, "2048 threads"),
        ({"schedule": "sideways"}, "no schedule 'sideways'"),
        ({"ctas": [1]}, "CTAs 0 to 0, not 1"),
    ],
)
def test_a_launch_that_the_driver_would_not_take(change, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence):
        execute(tmp_path, "", **change)


def test_parameters_of_another_number_or_size(tmp_path):
    path = tmp_path / "k.ptx"
    path.write_text(kernel(""))
    for params, sentence in [((), "0 parameters, where 1"), (((1, 4),), "passed as 4 bytes, where 8")]:
        with pytest.raises(EmulationError, match=sentence):
            launch.run(path, Plan("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, params), GlobalMemory())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "st.global.u32 [%rd0+4], %r0;",
            "accesses 4 bytes at global address 0x7f0000000080, byte 128 of out, where 0 to 124",
        ),
        ("st.global.u32 [%rd0+2], %r0;", "accesses global address 0x7f0000000002, where a multiple of 4 bytes"),
        ("ld.global.u32 %r2, [%rd0];", "reads out where nothing has written it"),
        (
            "st.global.v4.u32 [%rd0], {%r0, %r0, %r0, %r0};",
            "accesses global address 0x7f0000000004, where a multiple of 16",
        ),
        ("st.shared.u32 [%r1+32768], %r0;", "accesses 4 bytes at byte 32768 of shared memory, where 0 to 32764"),
        ("st.shared.u32 [%r1+-4], %r0;", "accesses 4 bytes at byte -4 of shared memory"),
        ("ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1+8];", "accesses byte 8 of shared memory, where a multiple of 16"),
        ("mbarrier.init.shared::cta.b64 [%r1+4], 1;", "accesses byte 4 of shared memory, where a multiple of 8"),
    ],
)
def test_an_access_that_may_not_be(body, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence):
        execute(tmp_path, body)


def test_a_thread_that_is_masked_out_accesses_nothing(tmp_path):
    got, _ = execute(
        tmp_path, "setp.lt.u32 %p1, %r0, 3;\nmul.wide.u32 %rd3, %r0, 4;\n@%p1 st.global.u32 [%rd0], 7;", out=3
    )
    assert got.tolist() == [7, 7, 7]


def test_shared_memory_that_nobody_wrote_reads_as_nan_and_is_found(tmp_path):
    got, result = execute(tmp_path, "ld.shared.u32 %r2, [%r1];\nst.global.u32 [%rd0], %r2;", race=True)
    assert np.isnan(got.view(np.float32)).all()
    assert [finding.kind for finding in result.findings] == ["unwritten"]


def test_vectors_bytes_and_generic_addresses(tmp_path):
    body = """
    shl.b32 %r2, %r0, 4;
    add.u32 %r3, %r1, %r2;
    add.u32 %r4, %r0, 100;
    st.shared.v4.u32 [%r3], {%r0, %r4, %r0, %r4};
    cvt.u64.u32 %rd3, %r3;
    cvta.shared.u64 %rd4, %rd3;
    ld.u16 %h0, [%rd4+4];
    ld.shared.u8 %h1, [%r3+12];
    cvt.u32.u16 %r5, %h0;
    cvt.u32.u16 %r6, %h1;
    shl.b32 %r7, %r6, 16;
    or.b32 %r8, %r5, %r7;
    st.global.u32 [%rd0], %r8;"""
    got, result = execute(tmp_path, body)
    assert got.tolist() == [(lane + 100) | (lane + 100) << 16 for lane in range(32)]
    assert result.counts.total("wavefronts_sts") == 4


# ---- shared-memory wavefronts ----------------------------------------------------------------------------------------

# Rows of the study's shared_wavefronts.csv (see the project's design notes): wavefronts of the whole read of a tile's
# fragment under the rule of metrics.py, checked against ncu's counters for ldmatrix, LDS and LDGSTS on an H200.
PITCH = {"plain32": 64, "xor64": 64, "pad": 80, "plain64": 128, "xor128": 128, "plain128": 256}


def place(layout: str, row: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Byte of a 16-byte chunk of a row."""
    if layout == "xor64":
        chunk = chunk ^ (row >> 1) & 3
    if layout == "xor128":
        return (chunk // 8) * 4096 + row * 128 + ((chunk % 8) ^ (row & 7)) * 16
    return row * PITCH[layout] + chunk * 16


def total(layout: str, access: str) -> int:
    g, c = LANE // 4, LANE % 4
    if access in ("ldmatrix.x4", "ldmatrix.x4.trans"):
        return int(metrics.wavefronts(place(layout, LANE % 16, LANE // 16), 16))
    if access in ("ldmatrix.x2", "ldmatrix.x2.trans"):
        half = np.arange(16)
        rows, chunks = (half, 0 * half) if access.endswith("trans") else (half % 8, half // 8)
        return int(metrics.wavefronts(place(layout, rows, chunks), 16))
    if access == "LDS.32 of A":
        return sum(int(metrics.wavefronts(place(layout, g + i % 2 * 8, 0 * g + i // 2) + c * 4, 4)) for i in range(4))
    if access == "LDS.32 of B":
        return sum(int(metrics.wavefronts(place(layout, g, 0 * g + i) + c * 4, 4)) for i in range(2))
    if access == "LDS.128":
        return sum(int(metrics.wavefronts(place(layout, g + 8 * i, c), 16)) for i in range(2))
    if access == "LDS.U16":
        return sum(
            int(metrics.wavefronts(place(layout, 2 * c + i % 2 + i // 2 * 8, 0 * c) + g * 2, 2)) for i in range(4)
        )
    assert access == "STS.128"
    return int(metrics.wavefronts(LANE * 16, 16))


@pytest.mark.parametrize(
    ("layout", "access", "wavefronts"),
    [
        ("plain32", "ldmatrix.x4", 16),
        ("plain32", "LDS.32 of A", 16),
        ("plain32", "LDS.128", 8),
        ("xor64", "ldmatrix.x4", 4),
        ("xor64", "LDS.32 of A", 4),
        ("xor64", "LDS.128", 8),
        ("plain64", "ldmatrix.x4", 32),
        ("plain64", "LDS.32 of A", 32),
        ("plain64", "LDS.128", 16),
        ("xor128", "ldmatrix.x4", 4),
        ("xor128", "LDS.32 of A", 4),
        ("xor128", "LDS.128", 16),
        ("pad", "ldmatrix.x4", 4),
        ("pad", "LDS.32 of A", 4),
        ("pad", "LDS.128", 16),
        ("plain128", "ldmatrix.x2.trans", 16),
        ("plain128", "ldmatrix.x4.trans", 32),
        ("plain128", "LDS.U16", 16),
        ("xor128", "ldmatrix.x2.trans", 2),
        ("xor128", "ldmatrix.x4.trans", 4),
        ("xor128", "LDS.U16", 4),
        ("plain32", "ldmatrix.x2", 8),
        ("xor64", "ldmatrix.x2", 2),
        ("plain32", "LDS.32 of B", 8),
        ("xor64", "LDS.32 of B", 2),
        ("plain32", "STS.128", 4),
    ],
)
def test_wavefronts_of_the_study(layout, access, wavefronts):
    assert total(layout, access) == wavefronts


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("add.s32 %r2, %r0, -7;", lambda t: t - 7),
        ("mul.hi.u32 %r3, %r0, 0x80000001;\nmov.u32 %r2, %r3;", lambda t: t * 0x80000001 >> 32),
        ("sub.s32 %r3, %r0, 16;\nmul.hi.s32 %r2, %r3, 0x40000000;", lambda t: (t - 16) * 0x40000000 >> 32),
        ("sub.s32 %r3, %r0, 16;\ndiv.s32 %r2, %r3, 3;", lambda t: np.trunc((t - 16) / 3).astype(int)),
        ("sub.s32 %r3, %r0, 16;\nrem.s32 %r2, %r3, 3;", lambda t: np.fmod(t - 16, 3).astype(int)),
        ("mad.lo.s32 %r2, %r0, 5, 9;", lambda t: t * 5 + 9),
        ("shl.b32 %r2, %r0, 29;", lambda t: t << 29),
        ("shl.b32 %r3, 1, %r0;\nshl.b32 %r4, %r3, 1;\nshr.u32 %r2, %r4, 1;", lambda t: (1 << t) & 0x7FFFFFFF),
        ("shl.b32 %r2, 1, 40;", lambda t: 0 * t),
        ("not.b32 %r3, %r0;\nshr.s32 %r2, %r3, 40;", lambda t: 0 * t - 1),
        ("bfi.b32 %r2, %r0, 0xffffffff, 4, 8;", lambda t: 0xFFFFF00F | t << 4),
        ("bfe.u32 %r2, 0x12345678, %r0, 8;", lambda t: np.array([0x12345678 >> int(i) & 255 for i in t])),
        ("bfe.s32 %r2, 0x80, 4, 4;", lambda t: 0 * t - 8),
        ("lop3.b32 %r2, %r0, 0xc, 0xa, 0x96;", lambda t: t ^ 0xC ^ 0xA),
        ("prmt.b32 %r2, 0x33221100, %r0, 0x4560;", lambda t: t << 24 | 0x00000000),
        ("shf.l.wrap.b32 %r2, 0x80000000, %r0, 1;", lambda t: t << 1 | 1),
        ("popc.b32 %r2, %r0;", lambda t: np.bitwise_count(t)),
        ("clz.b32 %r2, %r0;", lambda t: np.array([32 - int(i).bit_length() for i in t])),
        ("brev.b32 %r2, %r0;", lambda t: np.array([int(f"{i:032b}"[::-1], 2) for i in t])),
        ("setp.lt.s32 %p1, %r0, 5;\nselp.u32 %r2, 1, 2, %p1;", lambda t: np.where(t < 5, 1, 2)),
        (
            "setp.ge.s32 %p2, %r0, 2;\nsetp.lt.and.s32 %p1, %r0, 5, %p2;\nselp.u32 %r2, 1, 2, %p1;",
            lambda t: np.where((t < 5) & (t >= 2), 1, 2),
        ),
        ("cvt.rn.f32.u32 %f0, %r0;\nmul.f32 %f1, %f0, 0f3F000000;\ncvt.rzi.s32.f32 %r2, %f1;", lambda t: t // 2),
        ("mov.b64 %rd3, {%r0, 5};\nmov.b64 {%r3, %r4}, %rd3;\nadd.u32 %r2, %r3, %r4;", lambda t: t + 5),
        ("mul.wide.s32 %rd3, %r0, -3;\ncvt.u32.u64 %r2, %rd3;", lambda t: t * -3),
        ("min.s32 %r2, %r0, -1;", lambda t: 0 * t - 1),
        ("max.u32 %r2, %r0, 9;", lambda t: np.maximum(t, 9)),
    ],
)
def test_arithmetic(code, expected, tmp_path):
    got, _ = execute(tmp_path, f"{code}\nst.global.u32 [%rd0], %r2;")
    assert got.tolist() == [int(value) & 0xFFFFFFFF for value in np.broadcast_to(expected(LANE), 32)]


def test_floats_are_rounded_to_bf16_to_nearest_even(tmp_path):
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.3e38, 3.4e38, np.inf, np.nan], np.float32)
    code = "add.s64 %rd4, %rd3, %rd2;\nld.global.f32 %f0, [%rd4];\ncvt.rn.bf16x2.f32 %r2, 0f3F800000, %f0;\nst.global.u32 [%rd0], %r2;"
    got, _ = execute(tmp_path, "ld.param.u64 %rd3, [data];\n" + code, inputs={"data": np.resize(values, 32)})
    assert (got >> 16 == 0x3F80).all()
    low = widen_bf16((got[:8] & 0xFFFF).astype(np.uint16))
    np.testing.assert_array_equal(low[:4], [1.0, 1.0, 1.015625, -2.5])
    assert low[5] == np.inf and low[6] == np.inf and np.isnan(low[7])


@pytest.mark.parametrize(("clock", "type", "register"), [("%clock64", "u64", "%rd3"), ("%clock", "u32", "%r2")])
def test_the_clock_only_grows(clock, type, register, tmp_path):
    """There is no time in here: what a kernel makes of two looks at the clock is a positive number, and no more."""
    other = register[:-1] + "9"
    body = f"mov.{type} {register}, {clock};\nbar.sync 0;\nmov.{type} {other}, {clock};\n"
    body += f"sub.{type} {register}, {other}, {register};\n"
    body += "cvt.u32.u64 %r2, %rd3;\n" * (type == "u64") + "st.global.u32 [%rd0], %r2;"
    got, _ = execute(tmp_path, body, threads=64, out=64, schedule="descending")
    assert ((got > 0) & (got < 8)).all()


# ---- ldmatrix, stmatrix, mma -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix(count, transposed, tmp_path):
    """Register i of lane l holds row l / 4 of matrix i, words l % 4; transposed, column l / 4."""
    registers = ", ".join(f"%r{8 + i}" for i in range(count))
    fill = "".join(f"st.shared.u32 [%r5+{128 * i}], %r{10 + 10 * i};\n" for i in range(count))
    values = "".join(f"mad.lo.u32 %r{10 + 10 * i}, %r0, 0x20002, {0x10000 + 0x400040 * i};\n" for i in range(count))
    stores = "".join(f"st.global.u32 [%rd0+{128 * i}], %r{8 + i};\n" for i in range(count))
    body = f"""{values}
    shl.b32 %r4, %r0, 2;
    add.u32 %r5, %r1, %r4;
    {fill}
    bar.sync 0;
    and.b32 %r6, %r0, {8 * count - 1};
    shl.b32 %r6, %r6, 4;
    add.u32 %r7, %r1, %r6;
    ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [%r7];
    {stores}"""
    got, result = execute(tmp_path, body, out=32 * count, race=True)
    matrices = np.arange(64 * count, dtype=np.uint16).reshape(count, 8, 8)
    wanted = matrices.swapaxes(1, 2) if transposed else matrices
    np.testing.assert_array_equal(got, np.ascontiguousarray(wanted).reshape(-1).view(np.uint32))
    assert not result.findings
    assert (result.counts.total("ldsm"), result.counts.total("wavefronts_ldsm")) == (1, count)


def test_stmatrix_is_the_inverse_of_ldmatrix(tmp_path):
    body = """
    shl.b32 %r6, %r0, 4;
    add.u32 %r7, %r1, %r6;
    add.u32 %r8, %r0, 100;
    add.u32 %r9, %r0, 200;
    add.u32 %r10, %r0, 300;
    stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r7], {%r0, %r8, %r9, %r10};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r11, %r12, %r13, %r14}, [%r7];
    st.global.u32 [%rd0], %r11;
    st.global.u32 [%rd0+128], %r14;"""
    got, result = execute(tmp_path, body, out=64, race=True)
    assert got.tolist() == [*range(32), *range(300, 332)]
    assert not result.findings and result.counts.total("wavefronts_stsm") == 4


MMA = {
    "m16n8k16.row.col.f32.bf16.bf16.f32": (16, "bf16"),
    "m16n8k8.row.col.f32.bf16.bf16.f32": (8, "bf16"),
    "m16n8k16.row.col.f32.f16.f16.f32": (16, "f16"),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (8, "tf32"),
    "m16n8k4.row.col.f32.tf32.tf32.f32": (4, "tf32"),
}


@pytest.mark.parametrize("shape", MMA)
def test_mma_against_numpy(shape, tmp_path):
    k, type = MMA[shape]
    generator = np.random.default_rng(k)
    a, b, c = (generator.integers(-8, 9, size).astype(np.float32) for size in ((16, k), (k, 8), (16, 8)))

    def words(matrix: np.ndarray) -> np.ndarray:
        """Rows of 32-bit words along K."""
        if type == "tf32":
            return matrix.view(np.uint32)
        half = round_to_bf16(matrix) if type == "bf16" else matrix.astype(np.float16).view(np.uint16)
        return np.ascontiguousarray(half).view(np.uint32)

    g, w = LANE // 4, LANE % 4
    rows_a, rows_b = words(a), words(np.ascontiguousarray(b.T))
    number_a, number_b = rows_a.shape[1] // 2, rows_b.shape[1] // 4
    registers = [rows_a[g + 8 * (i % 2), w + 4 * (i // 2)] for i in range(number_a)]
    registers += [rows_b[g, w + 4 * i] for i in range(number_b)]
    registers += [np.ascontiguousarray(c[g + 8 * (i // 2), 2 * w + i % 2]).view(np.uint32) for i in range(4)]
    data = np.concatenate(registers)
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd4+{128 * i}];\n" for i in range(number_a + number_b))
    loads += "".join(f"ld.global.f32 %f{i}, [%rd4+{128 * (number_a + number_b + i)}];\n" for i in range(4))
    operands = [
        ", ".join(f"%r{10 + i}" for i in span) for span in (range(number_a), range(number_a, number_a + number_b))
    ]
    body = f"""ld.param.u64 %rd3, [data];
    add.s64 %rd4, %rd3, %rd2;
    {loads}
    mma.sync.aligned.{shape} {{%f4, %f5, %f6, %f7}}, {{{operands[0]}}}, {{{operands[1]}}}, {{%f0, %f1, %f2, %f3}};
    mma.sync.aligned.{shape} {{%f4, %f5, %f6, %f7}}, {{{operands[0]}}}, {{{operands[1]}}}, {{%f4, %f5, %f6, %f7}};
    """ + "".join(f"st.global.f32 [%rd0+{128 * i}], %f{4 + i};\n" for i in range(4))
    got, result = execute(tmp_path, body, out=128, inputs={"data": data})
    wanted = 2 * (a @ b) + c
    for i in range(4):
        np.testing.assert_array_equal(
            got.view(np.float32)[32 * i : 32 * i + 32], wanted[g + 8 * (i // 2), 2 * w + i % 2]
        )
    assert result.counts.total("hmma") == 2


# ---- lanes of a warp -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("shfl.sync.idx.b32 %r2|%p1, %r0, 5, 31, -1;", lambda t: 0 * t + 5),
        ("shfl.sync.up.b32 %r2|%p1, %r0, 3, 0, -1;", lambda t: np.where(t >= 3, t - 3, t)),
        ("shfl.sync.down.b32 %r2|%p1, %r0, 3, 31, -1;", lambda t: np.where(t < 29, t + 3, t)),
        ("shfl.sync.bfly.b32 %r2|%p1, %r0, 9, 31, -1;", lambda t: t ^ 9),
        ("shfl.sync.down.b32 %r2|%p1, %r0, 3, 0x1807, -1;", lambda t: np.where(t % 8 < 5, t + 3, t)),
        ("setp.lt.u32 %p1, %r0, 5;\nvote.sync.ballot.b32 %r2, %p1, -1;", lambda t: 0 * t + 31),
        ("setp.lt.u32 %p1, %r0, 5;\nvote.sync.any.pred %p2, %p1, -1;\nselp.u32 %r2, 1, 0, %p2;", lambda t: 0 * t + 1),
        ("setp.lt.u32 %p1, %r0, 5;\nvote.sync.all.pred %p2, !%p1, -1;\nselp.u32 %r2, 1, 0, %p2;", lambda t: 0 * t),
        ("redux.sync.add.s32 %r2, %r0, -1;", lambda t: 0 * t + 496),
        ("redux.sync.max.u32 %r2, %r0, -1;", lambda t: 0 * t + 31),
        ("elect.sync %r3|%p1, -1;\nselp.u32 %r2, 1, %r3, %p1;", lambda t: (t == 0).astype(int)),
        ("activemask.b32 %r2;", lambda t: 0 * t - 1),
    ],
)
def test_lanes(code, expected, tmp_path):
    got, _ = execute(tmp_path, f"{code}\nst.global.u32 [%rd0], %r2;")
    assert got.tolist() == [int(value) & 0xFFFFFFFF for value in expected(LANE)]


def test_threads_that_part_join_again(tmp_path):
    body = """
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
    $LOOP:
    setp.ge.u32 %p1, %r3, %r0;
    @%p1 bra $DONE;
    add.u32 %r2, %r2, %r3;
    add.u32 %r3, %r3, 1;
    bra $LOOP;
    $DONE:
    activemask.b32 %r4;
    popc.b32 %r5, %r4;
    shl.b32 %r6, %r5, 16;
    or.b32 %r7, %r6, %r2;
    st.global.u32 [%rd0], %r7;"""
    got, _ = execute(tmp_path, body)
    assert got.tolist() == [t * (t - 1) // 2 | 32 << 16 for t in range(32)]


# ---- barriers --------------------------------------------------------------------------------------------------------

EXCHANGE = """
shl.b32 %r2, %r0, 2;
add.u32 %r3, %r1, %r2;
st.shared.u32 [%r3], %r0;
{barrier}
xor.b32 %r4, %r2, 128;
add.u32 %r5, %r1, %r4;
ld.shared.u32 %r6, [%r5];
st.global.u32 [%rd0], %r6;"""


@pytest.mark.parametrize("schedule", ["cta", "ascending", "descending", "random"])
@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.sync 3, 64;", "barrier.sync.aligned 1;"])
def test_a_barrier_orders_two_warps(schedule, barrier, tmp_path):
    got, result = execute(tmp_path, EXCHANGE.format(barrier=barrier), threads=64, out=64, schedule=schedule, race=True)
    assert got.tolist() == [t ^ 32 for t in range(64)]
    assert not result.findings and result.counts.total("barrier") == 2


def test_a_barrier_does_not_wait_for_warps_that_have_ended(tmp_path):
    body = "setp.ge.u32 %p1, %r0, 64;\n@%p1 bra $END;\n" + EXCHANGE.format(barrier="bar.sync 0;") + "\n$END:"
    for schedule in ("ascending", "descending"):
        got, _ = execute(tmp_path, body, threads=96, out=64, schedule=schedule)
        assert got.tolist() == [t ^ 32 for t in range(64)]


def test_without_a_barrier_the_two_race(tmp_path):
    _, result = execute(tmp_path, EXCHANGE.format(barrier=""), threads=64, out=64, race=True)
    assert [(f.kind, len(f.ptx_lines)) for f in result.findings] == [("race", 2)]


def test_a_producer_arrives_and_goes_on(tmp_path):
    body = """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra $CONSUMER;
    st.shared.u32 [%r1], 9;
    bar.arrive 2, 64;
    ret;
    $CONSUMER:
    bar.sync 2, 64;
    ld.shared.u32 %r2, [%r1];
    st.global.u32 [%rd0], %r2;"""
    for schedule in ("cta", "descending"):
        got, result = execute(tmp_path, body, threads=64, out=64, schedule=schedule, race=True)
        assert got[32:].tolist() == [9] * 32 and not result.findings


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L;\nbar.sync 1, 64;\n$L:",
            "holds warp 1 of CTA .0, 0, 0. for ever at barrier 1, where 32 of 64 threads",
        ),
        (
            "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L;\nbar.sync 1, 64;\nret;\n$L:\nbar.sync 1, 96;",
            "names 96 threads at barrier 1, where 64 was expected",
        ),
        ("bar.sync 1, 32;", "lets 64 threads arrive at barrier 1, where 32 was expected"),
        ("bar.sync 1, 40;", "names 40 threads, where a positive multiple of 32"),
    ],
)
def test_a_barrier_that_is_used_wrongly(body, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence):
        execute(tmp_path, body, threads=64, assemble=False)


MBARRIER = """
setp.ne.u32 %p1, %r0, 0;
@%p1 bra $READY;
mbarrier.init.shared::cta.b64 [%r1], {count};
fence.mbarrier_init.release.cluster;
$READY:
bar.sync 0;
{body}
$END:
st.global.u32 [%rd0], 1;"""
WAIT = "$W{n}:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], {parity};\n@!%p2 bra $W{n};\n"


def test_phases_of_an_mbarrier(tmp_path):
    """Two rounds of 64 arrivals, each waited for with its parity."""
    arrive = "mbarrier.arrive.shared::cta.b64 %rd3, [%r1];\n"
    body = arrive + WAIT.format(n=1, parity=0) + arrive + WAIT.format(n=2, parity=1)
    for schedule in ("cta", "random"):
        _, result = execute(
            tmp_path, MBARRIER.format(count=64, body=body), threads=64, out=64, schedule=schedule, race=True
        )
        assert not result.findings


def test_a_phase_is_waited_for_by_its_state_too(tmp_path):
    body = "mbarrier.arrive.shared::cta.b64 %rd3, [%r1];\n$W:\nmbarrier.test_wait.shared::cta.b64 %p2, [%r1], %rd3;\n@!%p2 bra $W;"
    execute(tmp_path, MBARRIER.format(count=64, body=body), threads=64, out=64, schedule="ascending")


def test_try_wait_says_no_once_and_then_holds_the_threads(tmp_path):
    """A kernel that counts its polls sees one; a kernel that does not look at the answer goes on too early."""
    body = """
    mov.u32 %r2, 0;
    setp.ge.u32 %p3, %r0, 32;
    @%p3 bra $W;
    mbarrier.arrive.shared::cta.b64 _, [%r1];
    bra $OUT;
    $W:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
    @!%p2 add.u32 %r2, %r2, 1;
    @!%p2 bra $W;
    $OUT:
    st.global.u32 [%rd0], %r2;"""
    got, _ = execute(
        tmp_path, MBARRIER.format(count=32, body=body + "\nret;"), threads=64, out=64, schedule="descending"
    )
    assert got[32:].tolist() == [1] * 32


@pytest.mark.parametrize(
    ("count", "body", "sentence"),
    [
        (
            65,
            "mbarrier.arrive.shared::cta.b64 _, [%r1];\n" + WAIT.format(n=1, parity=0),
            "for ever at phase 0 of the mbarrier at byte 0 of shared memory, which lacks 1 of 65 arrivals",
        ),
        (
            64,
            "mbarrier.arrive.shared::cta.b64 _, [%r1], 2;",
            "arrives 128 times at the mbarrier at byte 0 of shared memory, where at most 64",
        ),
        (
            64,
            "mbarrier.arrive.shared::cta.b64 _, [%r1+8];",
            "uses byte 8 of shared memory, where an initialised mbarrier",
        ),
        (
            64,
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;\n" + WAIT.format(n=1, parity=0),
            "which lacks 1024 bytes",
        ),
        (0, "", "initialises an mbarrier for 0 arrivals"),
    ],
)
def test_an_mbarrier_that_is_used_wrongly(count, body, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence):
        execute(tmp_path, MBARRIER.format(count=count, body=body), threads=64, out=64, assemble=False)


# ---- the copy engine -------------------------------------------------------------------------------------------------

ONE_THREAD = """
setp.ne.u32 %p1, %r0, 0;
@%p1 bra $REST;
mbarrier.init.shared::cta.b64 [%r1+16384], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+16384], {bytes};
{copy}
$REST:
bar.sync 0;
$W:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+16384], 0;
@!%p2 bra $W;
"""


def dump(count: int) -> str:
    """Write `count` words of shared memory to `out`."""
    return f"""
shl.b32 %r40, %r0, 2;
add.u32 %r41, %r1, %r40;
mov.u32 %r42, 0;
$DUMP:
ld.shared.u32 %r43, [%r41];
st.global.u32 [%rd0], %r43;
add.u32 %r41, %r41, 128;
add.s64 %rd0, %rd0, 128;
add.u32 %r42, %r42, 32;
setp.lt.u32 %p9, %r42, {count};
@%p9 bra $DUMP;"""


def zero(count: int) -> str:
    """So that a dump of more than was copied reads zeros."""
    return f"""
shl.b32 %r44, %r0, 2;
add.u32 %r45, %r1, %r44;
mov.u32 %r46, 0;
$ZERO:
st.shared.u32 [%r45], 0;
add.u32 %r45, %r45, 128;
add.u32 %r46, %r46, 32;
setp.lt.u32 %p10, %r46, {count};
@%p10 bra $ZERO;
fence.proxy.async.shared::cta;
bar.sync 0;"""


BOXES = [
    ((64,), (32,), (8,), "none"),
    ((32, 16), (32, 8), (0, 4), "64B"),
    ((64, 16), (64, 8), (0, 3), "128B"),
    ((16, 16), (16, 8), (0, 0), "32B"),
    ((32, 16), (32, 8), (8, 12), "none"),  # over the edge on both axes
    ((32, 16), (16, 8), (-8, -3), "none"),
    ((32, 6, 4), (32, 4, 2), (0, 1, 3), "64B"),
    ((16, 4, 3, 3), (16, 2, 2, 2), (0, 1, 1, 2), "none"),
    ((8, 3, 3, 2, 3), (8, 2, 2, 2, 2), (0, 1, 2, 0, 1), "none"),
]


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize(("dims", "box", "start", "swizzle"), BOXES)
def test_a_tensor_load(dims, box, start, swizzle, delivery, tmp_path):
    """Zeros outside of the tensor; the 16-byte chunk at address a lies at a with its bits 4.. XOR-ed with those from 7 up."""
    data = np.arange(1, np.prod(dims) + 1, dtype=np.uint16).reshape(dims[::-1])
    strides = tuple(int(np.prod(dims[:i])) * 2 for i in range(1, len(dims)))
    map = TensorMap(0, dims, strides, box, swizzle)
    coordinates = ", ".join(map_ for map_ in (f"%r{20 + i}" for i in range(len(dims))))
    copy = "".join(f"mov.b32 %r{20 + i}, {x};\n" for i, x in enumerate(start))
    copy += "mov.b64 %rd5, map0;\ncvta.param.u64 %rd6, %rd5;\n"
    copy += f"cp.async.bulk.tensor.{len(dims)}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd6, {{{coordinates}}}], [%r1+16384];"
    size = int(np.prod(box)) * 2
    body = zero(1024) + ONE_THREAD.format(bytes=size, copy=copy) + dump(1024)
    got, result = execute(tmp_path, body, out=1024, inputs={"data": data}, maps=(map,), delivery=delivery, race=True)
    want = np.zeros(2048, np.uint16)
    order = itertools.product(*(range(extent) for extent in box[::-1]))
    for position, index in enumerate(order):
        at = tuple(i + s for i, s in zip(index, start[::-1], strict=True))
        inside = all(0 <= i < d for i, d in zip(at, dims[::-1], strict=True))
        byte = position * 2
        byte ^= (byte >> 7 & {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]) << 4
        want[byte // 2] = data[at] if inside else 0
    np.testing.assert_array_equal(got.view(np.uint16), want)
    assert not result.findings
    assert (result.counts.total("tma_load"), result.counts.total("bytes_tma_load")) == (1, size)


def test_a_tensor_store_leaves_what_lies_outside(tmp_path):
    """Rows 6 and 7 of a box of 4 exist; the swizzle is undone on the way."""
    data = np.zeros((8, 64), np.uint16)
    map = TensorMap(0, (64, 8), (128,), (64, 4), "128B")
    body = """
    shl.b32 %r2, %r0, 4;
    add.u32 %r3, %r1, %r2;
    st.shared.v4.u32 [%r3], {%r0, %r0, %r0, %r0};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra $END;
    mov.b64 %rd5, map0;
    cvta.param.u64 %rd6, %rd5;
    mov.b32 %r20, 0;
    mov.b32 %r21, 6;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {%r20, %r21}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ld.param.u64 %rd7, [data];
    $END:"""
    memory = GlobalMemory()
    out = memory.reserve("out", (32,), np.uint32)
    at = memory.put("data", data)
    path = tmp_path / "k.ptx"
    path.write_text(kernel(body, f".param .u64 out, .param .u64 data, {MAP.format('map0')}"))
    assert_assembles(path)
    given = ((out, 8), (at, 8), TensorMap(at, map.dims, map.strides, map.box, map.swizzle))
    plan = Plan("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 4096, given)
    result = launch.run(path, plan, memory, race=True)
    chunks = memory["data"].view(np.uint32).reshape(8, 8, 4)[..., 0]
    assert (chunks[:6] == 0).all()
    assert chunks[6].tolist() == list(range(8))
    assert chunks[7].tolist() == [8 + (i ^ 1) for i in range(8)]
    assert not result.findings and result.counts.total("tma_store") == 1


BULK = """
shl.b32 %r2, %r0, 4;
add.u32 %r3, %r1, %r2;
st.shared.v4.u32 [%r3], {{%r0, %r0, %r0, %r0}};
{fence}
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra $END;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 512;
cp.async.bulk.commit_group;
{wait}
{after}
$END:"""
FENCE, BULK_WAIT = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"


def test_a_bulk_store(tmp_path):
    got, result = execute(
        tmp_path, BULK.format(fence=FENCE, wait=BULK_WAIT, after="st.shared.u32 [%r1], 5;"), out=128, race=True
    )
    assert got.tolist() == [t for t in range(32) for _ in range(4)] and not result.findings


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (
            {"fence": ""},
            "missing fence",
            "through the asynchronous proxy, which PTX line .*st.shared.v4.u32.* writes, where a fence.proxy.async",
        ),
        ({"wait": ""}, "left behind", "may still read shared memory when the kernel ends"),
        (
            {"wait": "", "after": "st.shared.u32 [%r1], 5;"},
            "race",
            "writes byte 0 .* which PTX line .*cp.async.bulk.* reads, with nothing",
        ),
    ],
)
def test_a_bulk_store_that_is_not_ordered(change, kind, sentence, tmp_path):
    body = BULK.format(**{"fence": FENCE, "wait": BULK_WAIT, "after": ""} | change)
    _, result = execute(tmp_path, body, out=128, race=True)
    assert any(finding.kind == kind and re.search(sentence, finding.sentence) for finding in result.findings)


@pytest.mark.parametrize("delivery", ["early", "late"])
def test_a_bulk_load(delivery, tmp_path):
    copy = "ld.param.u64 %rd3, [data];\ncp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd3], 512, [%r1+16384];"
    data = np.arange(128, dtype=np.uint32)
    got, result = execute(
        tmp_path,
        ONE_THREAD.format(bytes=512, copy=copy) + dump(128),
        out=128,
        inputs={"data": data},
        delivery=delivery,
        race=True,
    )
    assert got.tolist() == data.tolist() and not result.findings


@pytest.mark.parametrize(
    ("copy", "sentence"),
    [
        (
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+8], [%rd3], 512, [%r1+16384];",
            "accesses byte 8 of shared memory, where a multiple of 16",
        ),
        (
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd3], 500, [%r1+16384];",
            "copies 500 bytes, where a positive multiple of 16",
        ),
        (
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd3+8], 512, [%r1+16384];",
            "copies from global address .*8, where a multiple of 16",
        ),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd3], 512, [%r1+16384], %h0;",
            "is multicast to CTAs 0x0 of the cluster, where some of its 1 were expected",
        ),
        (
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r1], [%r1+512], 512, [%r1+16384];",
            "is a bulk copy that the emulator lacks",
        ),
    ],
)
def test_a_bulk_load_that_may_not_be(copy, sentence, tmp_path):
    body = ONE_THREAD.format(bytes=512, copy=f"ld.param.u64 %rd3, [data];\n{copy}")
    with pytest.raises(EmulationError, match=sentence):
        execute(tmp_path, body, inputs={"data": np.zeros(1024, np.uint32)}, assemble=False)


def test_a_tensor_load_to_a_place_that_is_not_aligned(tmp_path):
    copy = "mov.b64 %rd5, map0;\ncvta.param.u64 %rd6, %rd5;\nmov.b32 %r20, 0;\n"
    copy += "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+64], [%rd6, {%r20, %r20}], [%r1+16384];"
    map = TensorMap(0, (32, 16), (64,), (32, 8), "none")
    with pytest.raises(EmulationError, match="accesses byte 64 of shared memory, where a multiple of 128 was expected"):
        execute(
            tmp_path,
            ONE_THREAD.format(bytes=512, copy=copy),
            inputs={"data": np.zeros((16, 32), np.uint16)},
            maps=(map,),
        )


def test_a_tensor_map_that_the_driver_would_not_take(tmp_path):
    map = TensorMap(0, (32, 16), (64,), (257, 8), "none")
    with pytest.raises(Refused, match="Parameter 2 of k: box dimension 257 is not between 1 and 256"):
        execute(tmp_path, "", inputs={"data": np.zeros((16, 32), np.uint16)}, maps=(map,))


def test_the_hardware_swizzle_is_its_own_inverse_and_keeps_rows():
    addresses = np.arange(0, 8192, 16)
    for mode, span in (("32B", 32), ("64B", 64), ("128B", 128)):
        moved = bulk.swizzle(addresses, mode)
        np.testing.assert_array_equal(bulk.swizzle(moved, mode), addresses)
        np.testing.assert_array_equal(moved // span, addresses // span)


# ---- cp.async --------------------------------------------------------------------------------------------------------

CP_ASYNC = """
ld.param.u64 %rd3, [data];
add.s64 %rd4, %rd3, %rd2;
shl.b32 %r2, %r0, 2;
add.u32 %r3, %r1, %r2;
cp.async.ca.shared.global [%r3], [%rd4], 4{reads};
cp.async.commit_group;
cp.async.ca.shared.global [%r3+128], [%rd4+128], 4;
cp.async.commit_group;
cp.async.wait_group {newest};
bar.warp.sync -1;
ld.shared.u32 %r4, [%r3];
ld.shared.u32 %r5, [%r3+128];
st.global.u32 [%rd0], %r4;
st.global.u32 [%rd0+128], %r5;"""


@pytest.mark.parametrize(("newest", "landed"), [(0, 64), (1, 32), (2, 0)])
def test_a_wait_lets_all_but_the_newest_groups_land(newest, landed, tmp_path):
    data = np.arange(64, dtype=np.uint32)
    got, result = execute(tmp_path, CP_ASYNC.format(newest=newest, reads=""), out=64, inputs={"data": data}, race=True)
    assert got[:landed].tolist() == list(range(landed))
    assert (got[landed:] == 0xFFFFFFFF).all()
    assert len([f for f in result.findings if f.kind == "race"]) == (64 - landed) // 32


def test_wait_all_commits(tmp_path):
    body = CP_ASYNC.format(newest=0, reads="").replace("cp.async.commit_group;", "").replace("wait_group 0", "wait_all")
    got, result = execute(tmp_path, body, out=64, inputs={"data": np.arange(64, dtype=np.uint32)}, race=True)
    assert got.tolist() == list(range(64)) and not result.findings


def test_what_a_copy_does_not_read_is_zero(tmp_path):
    data = np.arange(1, 65, dtype=np.uint32)
    got, _ = execute(tmp_path, CP_ASYNC.format(newest=0, reads=", 0"), out=64, inputs={"data": data})
    assert got.tolist() == [0] * 32 + list(range(33, 65))


def test_sectors_and_lines_of_a_copy(tmp_path):
    """Thirty-two lanes of 16 bytes in rows of 64: eight lines, two sectors of each."""
    body = """ld.param.u64 %rd3, [data];
    shr.u32 %r2, %r0, 2;
    and.b32 %r3, %r0, 3;
    shl.b32 %r4, %r2, 12;
    shl.b32 %r5, %r3, 4;
    add.u32 %r6, %r4, %r5;
    cvt.u64.u32 %rd5, %r6;
    add.s64 %rd6, %rd3, %rd5;
    shl.b32 %r7, %r0, 4;
    add.u32 %r8, %r1, %r7;
    cp.async.cg.shared.global [%r8], [%rd6], 16;
    cp.async.wait_all;"""
    _, result = execute(tmp_path, body, inputs={"data": np.zeros(8192, np.uint32)})
    found = result.counts.totals
    assert (found["ldgsts"], found["wavefronts_ldgsts"], found["sectors_ldgsts"], found["bytes_ldgsts"]) == (
        1,
        8,
        16,
        512,
    )
