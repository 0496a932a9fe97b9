"""wgmma in the emulator: layouts of operands and results against numpy, and the order that its products need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rungs.emulator import launch
from rungs.emulator.alu import round_to_bf16, widen_bf16
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError
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
    folder: Path, body: str, image: np.ndarray, n: int, *, assemble: bool = False, proxy: bool = True, **how: object
) -> tuple[np.ndarray, launch.Result]:
    """The results as a 64 x n matrix, and what was found. `proxy`: with the fence between st.shared and the products."""
    memory = GlobalMemory()
    out = memory.reserve("out", (THREADS, n // 2), np.float32)
    given = memory.put("image", image)
    path = folder / "k.ptx"
    text = kernel(body, n)
    path.write_text(text if proxy else text.replace("fence.proxy.async.shared::cta;", ""), encoding="utf-8")
    if assemble:
        assert_assembles(path)
    plan = Plan("k", (1, 1, 1), (THREADS, 1, 1), (1, 1, 1), SMEM + 1024, ((out, 8), (given, 8)))
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


MODES = {"none": (0, 0), "128B": (1, 1), "64B": (2, 2), "32B": (3, 3), "128B and 64B": (1, 2)}
MAJORS = {"K, K": (False, False), "K, N": (False, True), "M, K": (True, False), "M, N": (True, True)}


@pytest.mark.parametrize("majors", MAJORS.values(), ids=MAJORS)
@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_every_swizzle_and_both_majors(modes, majors, tmp_path):
    for fill in ("integer", "normal"):
        a, b, image, left, right = operands(64, fill, *zip(modes, majors, strict=True))
        got, result = run(tmp_path, gemm(a, b, 64), image, 64, race=fill == "integer")
        assert_close(got, left @ right.T, fill)
        assert not result.findings


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [8, 64, 96, 128, 192, 256])
def test_every_width(n, transposed, tmp_path):
    a, b, image, left, right = operands(n, b=(1, transposed))
    got, result = run(tmp_path, gemm(a, b, n), image, n, assemble=n == 96)
    assert np.array_equal(got, left @ right.T)
    assert result.counts.total("hgmma") == 4 * K // 16  # one for each warp


def test_a_from_registers(tmp_path):
    """Words of A's rows g and g + 8, and then of the eight values further along K (PTX ISA, wgmma m64k16 A)."""
    _, b, image, left, right = operands(64)
    bits, start = round_to_bf16(left), 48 * 1024  # of the fragments, 16 bytes for each thread and step, after B
    fragments = image[start // 2 : start // 2 + 8 * THREADS * K // 16].reshape(K // 16, THREADS, 4, 2)
    for thread in range(THREADS):
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        for step in range(K // 16):
            for i in range(4):
                k = 16 * step + column + 8 * (i // 2)
                fragments[step, thread, i] = bits[row + 8 * (i % 2), k : k + 2]
    held = "{%r20, %r21, %r22, %r23}"
    body = "".join(
        f"ld.global.v4.u32 {held}, [%rd2+{start + step * 16 * THREADS}];\n"
        + FENCE
        + product(held, b, 64, step, keeps="%p2" if step else "%p1")
        + END
        for step in range(K // 16)
    )
    got, _ = run(tmp_path, body, image, 64, assemble=True)
    assert np.array_equal(got, left @ right.T)


def test_half_precision_inputs(tmp_path):
    a, b, image, _, _ = operands(64)
    left, right = draw((64, K), "integer", 3), draw((64, K), "integer", 4)
    for tile, values in ((a, left), (b, right)):
        tile.put(image, values.astype(np.float16).view(np.uint16))
    body = (
        FENCE + "".join(product(a, b, 64, step, keeps="%p2" if step else "%p1", type="f16") for step in range(4)) + END
    )
    got, _ = run(tmp_path, body, image, 64)
    assert np.array_equal(got, left @ right.T)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("scales", ["1, 1", "-1, 1", "1, -1", "-1, -1"])
def test_what_the_registers_held_is_kept_or_not_and_the_product_may_be_negative(scales, keeps, tmp_path):
    a, b, image, left, right = operands(16)
    held = "".join(f"mov.f32 %f{i}, 0f40E00000;\n" for i in range(8))
    body = held + FENCE + product(a, b, 16, keeps="!%p1" if keeps else "%p1", scales=scales) + END
    got, _ = run(tmp_path, body, image, 16)
    sign = np.prod([int(scale) for scale in scales.split(",")])
    assert np.array_equal(got, 7 * keeps + sign * (left[:, :16] @ right[:, :16].T))


# ---- order -----------------------------------------------------------------------------------------------------------

SECOND = registers(16, 8)
ADD = "add.f32 %f{0}, %f{0}, %f{0};\n"


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("schedule", ["cta", "ascending", "random"])
def test_a_group_is_retired_while_the_next_is_under_way(schedule, delivery, tmp_path):
    a, b, image, left, right = operands(16)
    two = product(a, b, 16, 0, keeps="%p1") + COMMIT + product(a, b, 16, 1, keeps="%p1", d=SECOND) + COMMIT
    body = FENCE + two + WAIT.format(1) + "".join(map(ADD.format, range(8))) + WAIT.format(0)
    body += "".join(f"sub.f32 %f{i}, %f{i}, %f{8 + i};\n" for i in range(8))
    got, result = run(tmp_path, body, image, 16, schedule=schedule, delivery=delivery, race=True)
    first, second = (left[:, k : k + 16] @ right[:, k : k + 16].T for k in (0, 16))
    assert np.array_equal(got, 2 * first - second) and not result.findings


def once(a: Tile, b: Tile, **how: str) -> str:
    return product(a, b, 16, keeps="%p1", **how)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (lambda a, b: once(a, b) + END, "is the first of its warpgroup, where a wgmma.fence was expected before"),
        (
            lambda a, b: FENCE + ADD.format(3) + once(a, b) + END,
            r"uses registers that PTX line \d+ \(add.f32; .*\) accesses, where a wgmma.fence was expected between them",
        ),
        (
            lambda a, b: FENCE + once(a, b) + COMMIT + ADD.format(3) + WAIT.format(0),
            r"\(add.f32; .* accesses a register that PTX line \d+ \(wgmma.mma_async.* uses until it is retired, where a",
        ),
        (lambda a, b: FENCE + once(a, b) + WAIT.format(0), r"\(st.global.f32; .* accesses a register that"),
        (lambda a, b: FENCE + once(a, b) + COMMIT + WAIT.format(1), r"\(st.global.f32; .* accesses a register that"),
        (
            lambda a, b: FENCE + once(a, b) + product(a, b, 8, d=registers(8)) + END,
            "uses registers that .* still uses in another shape or place, where a wgmma.wait_group was expected",
        ),
        (
            lambda a, b: f"setp.ge.u32 %p3, %r0, 96;\n@%p3 bra $E;\n{FENCE}{once(a, b)}{END}$E:",
            "wgmma.fence.* is executed by a part of a warpgroup, where all 32 lanes of its four warps were expected",
        ),
        (
            lambda a, b: f"setp.eq.u32 %p3, %r0, 5;\n@%p3 bra $E;\n{FENCE}{once(a, b)}{END}$E:\nbar.sync 0;",
            "for ever at a wgmma that other warps of its warpgroup have not come to",
        ),
        (
            lambda a, b: FENCE + once(a, b).replace("wgmma.mma", "cvt.u64.u32 %rd12, %r0;\nadd.s64 %rd11, %rd11, %rd12;\nwgmma.mma"),
            "has a descriptor that differs between the threads of a warpgroup",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("delivery", ["early", "late"])
def test_a_product_that_may_not_be(body, sentence, delivery, tmp_path):
    a, b, image, _, _ = operands(16)
    with pytest.raises(EmulationError, match=sentence) as error:
        run(tmp_path, body(a, b), image, 16, delivery=delivery)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"start": 128},
            "has a descriptor of byte 128 of shared memory with base offset 0, where base offset 0 and an address",
        ),
        ({"bits": 1 << 49}, "has a descriptor of byte 0 of shared memory with base offset 1"),
        ({"bits": 1 << 14}, r"has the descriptor 0x[0-9a-f]+, where zeros were expected in bits 14, 15,"),
        ({"start": SMEM - 1024}, r"accesses 16 bytes at byte \d+ of shared memory, where 0 to 66544 was expected"),
    ],
)
def test_a_descriptor_that_names_no_tile(change, sentence, tmp_path):
    a, b, image, _, _ = operands(16)
    a.start = change.get("start", 0)
    a.steps[0] += 16 * change.get("bits", 0)
    with pytest.raises(EmulationError, match=sentence):
        run(tmp_path, FENCE + once(a, b) + END, image, 16)


@pytest.mark.parametrize(
    "form",
    ["m64n16k8.f32.tf32.tf32", "m64n20k16.f32.bf16.bf16", "m64n16k16.f32.bf16.f16", "m64n264k16.f32.bf16.bf16"],
)
def test_a_form_that_is_not_there(form, tmp_path):
    a, b, image, _, _ = operands(16)
    body = FENCE + once(a, b).replace("m64n16k16.f32.bf16.bf16", form) + END
    with pytest.raises(EmulationError, match="is a form of wgmma that the emulator lacks"):
        run(tmp_path, body, image, 16)


def test_a_product_that_nobody_waits_for_is_found(tmp_path):
    a, b, image, _, _ = operands(16)
    body = FENCE + once(a, b, d=SECOND) + COMMIT + "".join(f"mov.f32 %f{i}, 0f00000000;\n" for i in range(8))
    _, result = run(tmp_path, body, image, 16)
    assert ["is still under way when the kernel ends" in finding.sentence for finding in result.findings] == [True]


OVERWRITE = f"shl.b32 %r5, %r0, 4;\nadd.u32 %r5, %r5, %r1;\nst.shared.v4.u32 [%r5+{B_AT}], {{%r0, %r0, %r0, %r0}};\n"


def test_shared_memory_is_read_late_and_the_race_is_found(tmp_path):
    a, b, image, left, right = operands(16)
    expected = left[:, :16] @ right[:, :16].T
    early = FENCE + once(a, b) + COMMIT + OVERWRITE + WAIT.format(0)
    assert np.array_equal(run(tmp_path, early, image, 16, delivery="early")[0], expected)
    assert not np.array_equal(run(tmp_path, early, image, 16)[0], expected)
    _, result = run(tmp_path, early, image, 16, race=True, delivery="early")
    assert [finding.kind for finding in result.findings] == ["race"]
    assert "which PTX line" in result.findings[0].sentence and "(wgmma.mma_async" in result.findings[0].sentence
    got, result = run(tmp_path, FENCE + once(a, b) + END + OVERWRITE, image, 16, race=True)
    assert np.array_equal(got, expected) and not result.findings


def test_ordinary_stores_need_a_fence_before_a_product_reads_them(tmp_path):
    a, b, image, _, _ = operands(16)
    _, result = run(tmp_path, FENCE + once(a, b) + END, image, 16, race=True, proxy=False)
    assert {finding.kind for finding in result.findings} == {"missing fence"}
    _, result = run(tmp_path, "bar.sync 0;\n" + FENCE + once(a, b) + END, image, 16, race=True)
    assert not result.findings


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("schedule", ["cta", "descending"])
def test_a_warp_that_waits_for_a_copy_first_is_waited_for(schedule, delivery, tmp_path):
    a, b, image, left, right = operands(16)
    alone = f"""
setp.lt.u32 %p3, %r0, 96;
@%p3 bra $TOGETHER;
setp.ne.u32 %p4, %r0, 96;
@%p4 bra $WAIT;
mbarrier.init.shared::cta.b64 [%r1+{SMEM}], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+{SMEM}], 16;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+{SMEM + 16}], [%rd2], 16, [%r1+{SMEM}];
$WAIT:
bar.warp.sync -1;
$AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r1+{SMEM}], 0;
@!%p5 bra $AGAIN;
$TOGETHER:
"""
    body = alone + FENCE + once(a, b) + END
    got, result = run(tmp_path, body, image, 16, schedule=schedule, delivery=delivery, race=True, assemble=True)
    assert np.array_equal(got, left[:, :16] @ right[:, :16].T) and not result.findings
