"""mma.sync: fragments of registers as matrices, one product for all warps at once.

Fragments of m16n8kK (PTX ISA, "Matrix Fragments for mma"), with g = lane / 4 and c = lane % 4: register i of A holds row
g + 8 * (i % 2) and the words c + 4 * (i / 2) of it, register i of B column g and the words c + 4 * i, register i of D row
g + 8 * (i / 2) and column 2c + i % 2. A word is one tf32 or two 16-bit values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rungs.emulator.alu import _view, widen_bf16
from rungs.emulator.loads import whole_warps
from rungs.emulator.parser import Instruction
from rungs.emulator.state import Array, Decoder, Mask, Step, Unit, items

SHAPES = {("m16n8k16", "bf16"), ("m16n8k8", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "f16")} | {
    ("m16n8k8", "tf32"),
    ("m16n8k4", "tf32"),
}
KEPT = 96  # unpacked fragments: those of a few K steps of a warp tile


def values_of(words: Array, type: str) -> Array:
    """float32 of words (..., 32-bit): the last axis grows by two for 16-bit types."""
    if type == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    halves = words.view(np.uint16)
    return widen_bf16(halves) if type == "bf16" else halves.view(np.float16).astype(np.float32)


def unpack_a(unit: Unit, registers: list[Array], type: str) -> Array:
    """(CTAs, warps, 16, K) float32."""
    ctas, warps = unit.batch.ctas, unit.warps
    words = np.empty((ctas, warps, 2, 8, len(registers) // 2, 4), np.uint32)
    for i, register in enumerate(registers):
        words[:, :, i % 2, :, i // 2] = _lanes(unit, register)
    return values_of(words.reshape(ctas, warps, 16, -1), type)


def unpack_b(unit: Unit, registers: list[Array], type: str) -> Array:
    """(CTAs, warps, 8 columns, K) float32: B transposed."""
    ctas, warps = unit.batch.ctas, unit.warps
    words = np.empty((ctas, warps, 8, len(registers), 4), np.uint32)
    for i, register in enumerate(registers):
        words[:, :, :, i] = _lanes(unit, register)
    return values_of(words.reshape(ctas, warps, 8, -1), type)


def unpack_d(unit: Unit, registers: list[Array]) -> Array:
    """(CTAs, warps, 16, 8) float32."""
    matrix = np.empty((unit.batch.ctas, unit.warps, 2, 8, 4, 2), np.float32)
    for i, register in enumerate(registers):
        matrix[:, :, i // 2, :, :, i % 2] = _lanes(unit, _view(register, np.dtype("f4")))
    return matrix.reshape(unit.batch.ctas, unit.warps, 16, 8)


def _lanes(unit: Unit, register: Array) -> Array:
    """A register as (CTAs, warps, g, c)."""
    if register.shape[2] == 1:
        return register[..., None]
    return register.reshape(*register.shape[:2], 8, 4)


def _mma(decoder: Decoder, ins: Instruction) -> Step:
    shape, types = next((m for m in ins.modifiers if m.startswith("m16")), ""), ins.modifiers[-4:]
    type = types[1]
    if (
        (shape, type) not in SHAPES
        or types[2] != type
        or types[0] != "f32"
        or types[3] != "f32"
        or "row" not in ins.modifiers
    ):
        raise ins.error("is a form of mma that the emulator lacks")
    d, a, b, c = ([decoder.source(item, "b32", ins) for item in items(operand)] for operand in ins.operands)
    held = [np.dtype("f4") if getattr(item, "type", "") == "f32" else np.dtype("u4") for item in items(ins.operands[0])]
    c_key, d_key = tuple(c), tuple(d)

    def step(unit: Unit, mask: Mask) -> None:
        whole_warps(unit, mask, ins)
        registers = unit.registers
        left = _fragment(unit, [registers[slot] for slot in a], type, unpack_a)
        right = _fragment(unit, [registers[slot] for slot in b], type, unpack_b)
        sum_ = [registers[slot] for slot in c]
        known = unit.accumulators.get(c_key)
        if known is not None and all(x is y for x, y in zip(known[0], sum_, strict=True)):
            start = known[1]
        else:
            start = unpack_d(unit, sum_)
        result = left @ right.swapaxes(-1, -2)
        result += start
        parts = result.reshape(unit.batch.ctas, unit.warps, 2, 8, 4, 2)
        views = [parts[:, :, i // 2, :, :, i % 2].reshape(unit.shape) for i in range(4)]
        written = [v if v.dtype == h else v.view(h) for v, h in zip(views, held, strict=True)]
        for slot, value in zip(d, written, strict=True):
            unit.write(slot, value, mask)
        if mask is None:
            unit.accumulators[d_key] = (written, result)

    return step


def _fragment(unit: Unit, registers: list[Array], type: str, unpack: Callable[..., Array]) -> Array:
    """The unpacked fragment, once for each version of its registers."""
    memo: dict[Any, Any] = unit.fragments
    key = (unpack, *map(id, registers))
    held = memo.get(key)
    if held is None:
        if len(memo) >= KEPT:
            memo.clear()
        held = memo[key] = (registers, unpack(unit, registers, type))
    return held[1]


COMPILE: dict[str, Callable[[Decoder, Instruction], Step]] = {"mma": _mma}
