"""What the hardware counts: shared-memory wavefronts, global sectors, instructions by kind.

Shared memory has 32 banks of 4 bytes. An access of up to 4 bytes a lane is served for 32 lanes at once, of 8 bytes for 16,
of 16 bytes for 8 (a phase); ldmatrix is served one 8x8 matrix, eight rows of 16 bytes, at a time. A phase costs as many
wavefronts as the bank with the most distinct words. Held against ncu's counters on an H200: tests/test_emulator_gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
BANKS, BANK_BYTES, SECTOR, LINE = 32, 4, 32, 128


def wavefronts(addresses: Array, size: int, active: Array | None = None) -> Array:
    """Wavefronts of each warp for shared accesses of `size` bytes at `addresses` (..., lanes) in bytes."""
    lanes = addresses.shape[-1]
    phase = min(lanes, {8: 16, 16: 8}.get(size, 32))
    words = (addresses.astype(np.int64) // BANK_BYTES)[..., None] + np.arange(max(1, size // BANK_BYTES))
    if active is not None:
        words = np.where(active[..., None], words, -1)
    rows = np.sort(words.reshape(-1, phase * words.shape[-1]), axis=-1)
    distinct = np.ones(rows.shape, bool)
    distinct[:, 1:] = rows[:, 1:] != rows[:, :-1]
    distinct &= rows >= 0
    at = np.arange(len(rows))[:, None] * BANKS + rows % BANKS
    per_bank = np.bincount(at[distinct], minlength=len(rows) * BANKS).reshape(len(rows), BANKS)
    return per_bank.max(axis=1).reshape(*addresses.shape[:-1], -1).sum(axis=-1)


def distinct(addresses: Array, unit: int, active: Array | None = None) -> Array:
    """How many different blocks of `unit` bytes each warp touches, for addresses (..., lanes) of one block each."""
    blocks = addresses.astype(np.int64) // unit
    if active is not None:
        blocks = np.where(active, blocks, -1)
    rows = np.sort(blocks, axis=-1)
    fresh = (rows[..., 1:] != rows[..., :-1]) & (rows[..., 1:] >= 0)
    return fresh.sum(axis=-1) + (rows[..., 0] >= 0)


def phases(lanes: int, size: int) -> int:
    """Wavefronts of an access without conflicts."""
    return max(1, lanes * size // (BANKS * BANK_BYTES))


@dataclass
class Tally:
    """Sums per instruction and kind for a batch: `sums[(pc, what)]` is a number for each CTA, or one for all alike."""

    ctas: int
    sums: dict[tuple[int, str], Array | int] = field(default_factory=dict)

    def add(self, pc: int, what: str, amount: Array | int) -> None:
        key = (pc, what)
        self.sums[key] = self.sums.get(key, 0) + amount
