"""wgmma in the emulator: layouts of operands and results against numpy, and the order that its products need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rungs.emulator import launch
from rungs.emulator.alu import round_to_bf16, widen_bf16
from rungs.emulator.memory import GlobalMemory
from rungs.plan import Plan
from test_emulator import assert_assembles

K = 64
PITCH = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the mode of a descriptor: none, 128B, 64B, 32B
BITS = {0: 0, 1: 3, 2: 2, 3: 1}
THREADS = 128
B_AT = 32 * 1024  # where B starts in shared memory, after A
SMEM = 64 * 1024


class Tile:
    """An operand of `rows` x K, element by element as CUTLASS's canonical layouts have it (mma_traits_sm90_gmma.hpp)."""

    def __init__(self, rows: int, mode: int, transposed: bool, start: int) -> None:
        self.mode, self.transposed, self.start, pitch = mode, transposed, start, PITCH[mode]
        width = pitch // 2
        stripe = 128 * -(-rows // 8) if mode == 0 else 0
        if transposed and mode == 0:
            self.leading, self.stride = stripe, 128
        elif transposed:
            self.leading, self.stride = K * pitch, 8 * pitch
        else:
            self.leading, self.stride = stripe or 16, 8 * pitch
        r, k = np.arange(rows)[:, None], np.arange(K)[None]
        if mode == 0 and transposed:
            offset = r % 8 * 2 + r // 8 * self.stride + k % 8 * 16 + k // 8 * self.leading
        elif mode == 0:
            offset = r % 8 * 16 + r // 8 * self.stride + k % 8 * 2 + k // 8 * self.leading
        elif transposed:
            offset = r % width * 2 + r // width * self.leading + k % 8 * pitch + k // 8 * self.stride
        else:
            offset = r % 8 * pitch + r // 8 * self.stride + k % width * 2 + k // width * rows * pitch
        self.offset = offset
        self.steps = [
            int(offset[0, 16 * step]) for step in range(K // 16)
        ]  # before the swizzle, which is of the address

    def put(self, image: np.ndarray, values: np.ndarray) -> None:
        at = self.start + self.offset
        image[(at ^ (at >> 7 & (1 << BITS[self.mode]) - 1) << 4) // 2] = values

    def descriptor(self, step: int = 0) -> int:
        """Without the address of shared memory itself, which the kernel adds."""
        at = (self.start + self.steps[step]) // 16
        return at | self.leading // 16 << 16 | self.stride // 16 << 32 | self.mode << 62


def kernel(body: str, n: int) -> str:
    """A kernel of one warpgroup: %rd3 is shared memory's address in units of 16 bytes, %f0 to %f{n/2-1} the accumulators.

    It fills shared memory from `image`, runs the body, and writes the accumulators to `out`, those of a thread together.
    """
    copies = "".join(
        f"ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd2+{at}];\nst.shared.v4.u32 [%r3+{at}], {{%r10, %r11, %r12, %r13}};\n"
        for at in range(0, SMEM, 16 * THREADS)
    )
    results = "".join(f"st.global.f32 [%rd0+{4 * i}], %f{i};\n" for i in range(n // 2))
    return f"""
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 bytes[];
.visible .entry k(.param .u64 out, .param .u64 image)
{{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .f32 %f<256>;
.reg .b64 %rd<64>;
mov.u32 %r0, %tid.x;
mov.u32 %r1, bytes;
ld.param.u64 %rd0, [out];
ld.param.u64 %rd2, [image];
mul.wide.u32 %rd4, %r0, {2 * n};
add.s64 %rd0, %rd0, %rd4;
shl.b32 %r2, %r0, 4;
add.u32 %r3, %r1, %r2;
cvt.u64.u32 %rd4, %r2;
add.s64 %rd2, %rd2, %rd4;
{copies}
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r4, %r1, 4;
cvt.u64.u32 %rd3, %r4;
setp.ne.u32 %p1, 0, 0;
setp.eq.u32 %p2, 0, 0;
{body}
{results}
ret;
}}
"""


def registers(n: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%f{first + i}" for i in range(n // 2)) + "}"


def product(
    a: Tile | str,
    b: Tile,
    n: int,
    step: int = 0,
    *,
    keeps: str = "%p2",
    scales: str = "1, 1",
    d: str = "",
    type: str = "bf16",
) -> str:
    """One wgmma.mma_async; `a` is a tile or four registers."""
    descriptors = f"add.s64 %rd11, %rd3, {b.descriptor(step):#x};\n"
    major = f", {int(b.transposed)}"
    name = a
    if isinstance(a, Tile):
        descriptors += f"add.s64 %rd10, %rd3, {a.descriptor(step):#x};\n"
        major, name = f", {int(a.transposed)}" + major, "%rd10"
    return (
        descriptors
        + f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {d or registers(n)}, {name}, %rd11, {keeps}, "
        f"{scales}{major};\n"
    )


FENCE = "wgmma.fence.sync.aligned;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned {};\n"
END = COMMIT + WAIT.format(0)


def draw(shape: tuple[int, int], fill: str, seed: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if fill == "integer":
        return generator.integers(-4, 5, shape).astype(np.float32)
    return generator.standard_normal(shape, dtype=np.float32)


def run(
    folder: Path, body: str, image: np.ndarray, n: int, *, assemble: bool = False, threads: int = THREADS, **how: object
) -> tuple[np.ndarray, launch.Result]:
    """The results as a 64 x n matrix, and what was found."""
    memory = GlobalMemory()
    out = memory.reserve("out", (THREADS, n // 2), np.float32)
    given = memory.put("image", image)
    path = folder / "k.ptx"
    path.write_text(kernel(body, n), encoding="utf-8")
    if assemble:
        assert_assembles(path)
    plan = Plan("k", (1, 1, 1), (threads, 1, 1), (1, 1, 1), SMEM, ((out, 8), (given, 8)))
    result = launch.run(path, plan, memory, **how)  # type: ignore[arg-type]
    return matrix(memory["out"], n), result


def matrix(found: np.ndarray, n: int) -> np.ndarray:
    """PTX ISA, "Register fragment layout for wgmma": thread by thread and register by register."""
    got = np.empty((64, n), np.float32)
    for thread in range(THREADS):
        warp, group, column = thread // 32, thread % 32 // 4, thread % 4
        for i in range(n // 2):
            got[16 * warp + group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * column + i % 2] = found[thread, i]
    return got


def operands(
    n: int, fill: str = "integer", a: tuple[int, bool] = (1, False), b: tuple[int, bool] = (1, False)
) -> tuple[Tile, Tile, np.ndarray, np.ndarray, np.ndarray]:
    """Tiles of A and B with (mode, transposed), the image of shared memory, and the values in float32 after rounding."""
    image = np.zeros(SMEM // 2, np.uint16)
    tiles = Tile(64, *a, 0), Tile(n, *b, B_AT)
    values = []
    for seed, (tile, rows) in enumerate(zip(tiles, (64, n), strict=True)):
        drawn = round_to_bf16(draw((rows, K), fill, seed))
        tile.put(image, drawn)
        values.append(widen_bf16(drawn))
    return *tiles, image, *values


def gemm(a: Tile | str, b: Tile, n: int) -> str:
    """All of K, the first product without what the registers held."""
    return FENCE + "".join(product(a, b, n, step, keeps="%p2" if step else "%p1") for step in range(K // 16)) + END


def assert_close(got: np.ndarray, expected: np.ndarray, fill: str) -> None:
    if fill == "integer":
        assert np.array_equal(got, expected)
    else:
        assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["integer", "normal"])
@pytest.mark.parametrize("majors", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("modes", [(0, 0), (1, 1), (2, 2), (3, 3), (1, 2)])
def test_every_swizzle_and_both_majors(modes, majors, fill, tmp_path):
    a, b, image, left, right = operands(64, fill, *zip(modes, majors, strict=True))
    got, result = run(tmp_path, gemm(a, b, 64), image, 64, race=fill == "integer")
    assert_close(got, left @ right.T, fill)
    assert not result.findings


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [8, 64, 96, 128, 192, 256])
def test_every_width(n, transposed, delivery, tmp_path):
    a, b, image, left, right = operands(n, b=(1, transposed))
    got, result = run(
        tmp_path, gemm(a, b, n), image, n, delivery=delivery, assemble=(n, transposed, delivery) == (96, True, "late")
    )
    assert np.array_equal(got, left @ right.T)
    assert result.counts.total("hgmma") == 4 * K // 16  # one for each warp
