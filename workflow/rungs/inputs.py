"""What launches work on: how inputs are filled, which of them arms share, and how many sets of buffers rotate.

Part of the protocol: `protocol.MODULES` has this module, so any change of its code makes every recorded number stale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

INTEGERS = (-8, 8)
"""Of the fill `integer`: so small that sums of them stay exact."""


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


@dataclass
class Buffers:
    """One set of operands: A M x K, B as N x K and as K x N, C M x N; all bf16, row-major, on the GPU."""

    a: Any
    b_nk: Any
    b_kn: Any
    c: Any

    def read_bytes(self) -> int:
        """Bytes that one launch touches: A, one layout of B and C."""
        return int(2 * (self.a.numel() + self.b_nk.numel() + self.c.numel()))


def draw(torch: Any, fill: str, shape: tuple[int, int], generator: Any) -> Any:
    """A bf16 operand on the generator's device: `normal`, or `integer` in -2..2. Every element is its own draw, so that a tile
    of K that is multiplied twice, or not at all, changes the sum.
    """
    options = {"generator": generator, "device": generator.device}
    drawn = torch.randint(-2, 3, shape, **options) if fill == "integer" else torch.randn(shape, **options)
    return drawn.to(torch.bfloat16)


def buffer_sets(
    torch: Any, problem: tuple[int, int, int], fill: str, seed: int, l2: str, l2_bytes: int
) -> list[Buffers]:
    """Allocated and filled operands. Hot caches have one set of them, cold ones as many as make at least 2 x L2 pass between
    two uses of one, and at least two.
    """
    m, n, k = problem
    generator = torch.Generator(device="cuda").manual_seed(seed)

    a, b = (draw(torch, fill, (rows, k), generator) for rows in (m, n))
    first = Buffers(a, b, b.t().contiguous(), torch.empty((m, n), dtype=torch.bfloat16, device="cuda"))
    count = 1 if l2 == "hot" else max(2, 1 + math.ceil(2 * l2_bytes / first.read_bytes()))
    copies = [Buffers(*(t.clone() for t in vars(first).values())) for _ in range(count - 1)]
    return [first, *copies]


# ---- kernels that are no GEMM ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A buffer of a launch.

    `dtype` is numpy's name of it. `role`: an `input` is drawn by the device, standard normal or whole numbers from -8 to 8,
    or made by `make`; an `output` is poisoned before each launch (NaN, or all ones) and compared with what is expected;
    `cycles` is what the kernel's clock says, one entry per warp.
    """

    shape: tuple[int, ...]
    dtype: str
    role: str
    make: Callable[[np.random.Generator], np.ndarray] | None = None


def host_input(operand: Operand, fill: str, generator: np.random.Generator) -> np.ndarray:
    """An input's values as numpy has them: drawn, or made as the operand says."""
    if operand.make is not None:
        return np.asarray(operand.make(generator), operand.dtype).reshape(operand.shape)
    if fill == "integer" or np.dtype(operand.dtype).kind != "f":
        low, high = INTEGERS if np.dtype(operand.dtype).kind != "u" else (0, 1 << 8)
        return generator.integers(low, high, operand.shape, endpoint=True).astype(operand.dtype)
    return generator.standard_normal(operand.shape, dtype=np.float32).astype(operand.dtype)


def shared(drawn: dict[Any, Any], torch: Any, name: str, operand: Operand, variant: str, fill: str, seed: int) -> Any:
    """The operand's tensor among those that were drawn. Equal operands of two arms are one; what is made is each variant's own."""
    made_by = variant if operand.make else ""
    key = (name, operand.shape, operand.dtype, operand.role, made_by)
    if key not in drawn:
        drawn[key] = draw_operand(torch, operand, fill, seed)
    return drawn[key]


def draw_operand(torch: Any, operand: Operand, fill: str, seed: int) -> Any:
    """A tensor with the operand's values; unsigned integers as the signed ones of their width, which have the same bits."""
    kind = getattr(torch, operand.dtype.removeprefix("u") if operand.dtype != "uint8" else "uint8")
    if operand.role != "input":
        return torch.empty(operand.shape, dtype=kind, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    if operand.make is not None:
        made = host_input(operand, fill, np.random.default_rng(seed))
        signed = made.view(operand.dtype.removeprefix("u")) if operand.dtype != "uint8" else made
        return torch.from_numpy(np.ascontiguousarray(signed)).cuda()
    options = {"generator": generator, "device": "cuda"}
    if fill == "integer" or not kind.is_floating_point:
        low, high = INTEGERS if kind.is_floating_point else (0, 1 << 8)
        return torch.randint(low, high + 1, operand.shape, **options).to(kind)
    return torch.randn(operand.shape, dtype=kind, **options)


def largest(tensors: Iterable[Any]) -> Any:
    """The largest of the inputs: the control copies it."""
    return max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
