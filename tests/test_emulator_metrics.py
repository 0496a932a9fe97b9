"""The emulator's rules for wavefronts against ncu on an H200: one warp, one instruction a launch, 2026-11-29, CUDA 13.0.

Loads and stores: smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{ld,ldsm,st}.sum; ncu counts none for stmatrix, whose
figure is l1tex__data_pipe_lsu_wavefronts_mem_shared.sum less the one that every launch has. LDGSTS: ..._op_ldgsts.sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rungs.emulator import metrics

Place = Callable[[np.ndarray], np.ndarray]
LANE = np.arange(32)
OPS = ("lds2", "lds4", "lds8", "lds16", "ldsm2", "ldsm4", "sts2", "sts4", "sts8", "sts16", "stsm4")
# Where lane i accesses (None: its own place in a row), and the wavefronts of each of OPS there.
ACCESSES: dict[str, tuple[Place | None, tuple[int, ...]]] = {
    "one after another": (None, (1, 1, 2, 4, 2, 4, 1, 1, 2, 4, 4)),
    "all the same": (lambda i: 0 * i, (1, 1, 1, 2, 2, 4, 1, 1, 2, 4, 4)),
    "128 apart": (lambda i: 128 * i, (32, 32, 32, 32, 16, 32, 32, 32, 32, 32, 32)),
    "256 apart": (lambda i: 256 * i, (32, 32, 32, 32, 16, 32, 32, 32, 32, 32, 32)),
    "64 apart": (lambda i: 64 * i, (16, 16, 16, 16, 8, 16, 16, 16, 16, 16, 16)),
    "32 apart": (lambda i: 32 * i, (8, 8, 8, 8, 4, 8, 8, 8, 8, 8, 8)),
    "every eight the same": (lambda i: i % 8 * 16, (1, 1, 2, 4, 2, 4, 1, 1, 2, 4, 4)),
    "every eight 128 apart": (lambda i: i % 8 * 128, (8, 8, 16, 32, 16, 32, 8, 8, 16, 32, 32)),
    "eights 128 apart": (lambda i: i // 8 * 128, (4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 4)),
    "halves 128 apart": (lambda i: i // 16 * 128, (2, 2, 2, 2, 2, 4, 2, 2, 2, 4, 4)),
    "odd and even": (lambda i: i % 2 * 128 + i // 2 * 16, (3, 3, 4, 8, 4, 8, 3, 3, 4, 8, 8)),
    "columns of four": (lambda i: i % 4 * 128 + i // 4 * 16, (4, 4, 8, 16, 8, 16, 4, 4, 8, 16, 16)),
    "rows of four": (lambda i: i // 4 * 128 + i % 4 * 16, (8, 8, 8, 8, 4, 8, 8, 8, 8, 8, 8)),
    "rows of eight": (lambda i: i % 8 * 16 + i // 8 * 128, (4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 4)),
    "backwards": (lambda i: (31 - i) * 16, (4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 4)),
    "halves the same": (lambda i: i % 16 * 16, (2, 2, 4, 4, 2, 4, 2, 2, 4, 4, 4)),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_wavefronts_of_loads_and_stores(name):
    place, measured = ACCESSES[name]
    for op, wavefronts in zip(OPS, measured, strict=True):
        size = 16 if op.startswith(("ldsm", "stsm")) else int(op[3:])
        addresses = (place or (lambda i, size=size: size * i))(LANE)
        if op == "ldsm2":
            addresses = addresses[:16]
        rule = metrics.load_wavefronts if op.startswith("lds") and not op.startswith("ldsm") else metrics.wavefronts
        assert rule(addresses, size) == wavefronts, op


def rows64(i: np.ndarray) -> np.ndarray:
    """Rows of 64 bytes, each in a line of its own, as a tile of 32 bf16 along K has them."""
    return i // 4 * 4096 + i % 4 * 16


def row(i: np.ndarray) -> np.ndarray:
    return 16 * i


# Where lane i reads in global memory and writes in shared memory, and the wavefronts past L1 (.cg) and through it (.ca).
COPIES: dict[str, tuple[Place, Place, int, int]] = {
    "one after another": (row, row, 4, 4),
    "rows of 64": (rows64, row, 8, 8),
    "rows of 256": (lambda i: i // 16 * 4096 + i % 16 * 16, row, 4, 4),
    "rows of 32": (lambda i: i // 2 * 128 + i % 2 * 16, row, 16, 16),
    "a line for each lane": (lambda i: i * 4096, row, 32, 32),
    "a line for each two": (lambda i: i // 2 * 4096 + i % 2 * 16, row, 16, 16),
    "lines in turn": (lambda i: i % 8 * 4096 + i // 8 * 16, row, 32, 32),
    "one line, four times": (lambda i: i % 8 * 16, row, 4, 4),
    "one chunk": (lambda i: 0 * i, row, 32, 32),
    "from the middle of a line": (lambda i: 64 + 16 * i, row, 8, 4),
    "the chunks of a line mixed": (lambda i: i // 8 * 4096 + i * 3 % 8 * 16, row, 8, 4),
    "to one bank": (row, lambda i: i * 128, 32, 32),
    "rows of 64 to the same banks": (rows64, lambda i: i % 4 * 16 + i // 4 * 128, 8, 8),
    "rows of 128 to one bank": (lambda i: i // 8 * 4096 + i % 8 * 16, lambda i: i % 8 * 128 + i // 8 * 16, 32, 32),
    "rows of 64 changing places": (rows64, lambda i: (i // 4 ^ 1) * 64 + i % 4 * 16, 8, 8),
    # Through L1 an H200 takes 20: it does not find the best order of these.
    "rows of 64, each to one bank": (rows64, lambda i: i % 4 * 128 + i // 4 % 2 * 16 + i // 8 * 512, 32, 16),
}


@pytest.mark.parametrize("name", COPIES)
def test_wavefronts_of_copies_of_16_bytes(name):
    source, target, past, through = COPIES[name]
    assert metrics.copy_wavefronts(source(LANE), target(LANE), 16, True) == past
    assert metrics.copy_wavefronts(source(LANE), target(LANE), 16, False) == through


@pytest.mark.parametrize(
    ("size", "source", "target", "wavefronts"),
    [
        (8, lambda i: 8 * i, lambda i: 8 * i, 2),
        (8, lambda i: i // 8 * 4096 + i % 8 * 8, lambda i: 8 * i, 4),
        (4, lambda i: 4 * i, lambda i: 4 * i, 1),
        (4, lambda i: 4096 * i, lambda i: 4 * i, 32),
        (4, lambda i: 4 * i, lambda i: 128 * i, 32),
    ],
)
def test_wavefronts_of_narrow_copies(size, source, target, wavefronts):
    assert metrics.copy_wavefronts(source(LANE), target(LANE), size, False) == wavefronts


def test_lanes_that_take_no_part_cost_nothing():
    active = LANE < 8
    assert metrics.wavefronts(LANE * 128, 4, active) == 8
    assert metrics.copy_wavefronts(rows64(LANE), row(LANE), 16, True, active) == 2
    assert metrics.distinct(rows64(LANE), metrics.SECTOR, active) == 4
    nobody = np.zeros(32, bool)
    assert metrics.wavefronts(LANE * 128, 4, nobody) == 0
    assert metrics.copy_wavefronts(rows64(LANE), row(LANE), 16, True, nobody) == 0
    assert metrics.distinct(LANE, metrics.SECTOR, nobody) == 0


def test_many_warps_at_once_are_each_counted_by_itself():
    addresses = np.stack([place(LANE) for place, _ in ACCESSES.values() if place]).reshape(3, 5, 32)
    together = metrics.load_wavefronts(addresses, 16)
    assert together.shape == (3, 5)
    apart = [int(metrics.load_wavefronts(warp, 16)) for warp in addresses.reshape(-1, 32)]
    assert together.reshape(-1).tolist() == apart
