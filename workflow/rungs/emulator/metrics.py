"""What the hardware counts: shared-memory wavefronts, global sectors, instructions by kind.

Shared memory has 32 banks of 4 bytes. An access of up to 4 bytes a lane is served for 32 lanes at once, of 8 bytes for 16,
of 16 bytes for 8 (a phase); ldmatrix is served one 8x8 matrix, eight rows of 16 bytes, at a time. A phase costs as many
wavefronts as the bank with the most distinct words. Held against ncu's counters on an H200: tests/test_emulator_gemm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
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


NCU = {
    "smsp__inst_executed_op_ldsm.sum": {"ldsm": 1},
    "smsp__inst_executed_op_shared_st.sum": {"sts": 1},
    "smsp__inst_executed_op_shared_stsm.sum": {"stsm": 1},
    "smsp__inst_executed_op_ldgsts.sum": {"ldgsts": 1},
    "smsp__inst_executed_op_tma_ld.sum": {"tma_load": 1},
    "smsp__inst_executed_op_tma_st.sum": {"tma_store": 1},
    "smsp__inst_executed_pipe_tma.sum": {"tma_load": 1, "tma_store": 1},
    "sm__inst_executed_pipe_tensor_op_hmma.sum": {"hmma": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": {"wavefronts_lds": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum": {"wavefronts_ldsm": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum": {"wavefronts_sts": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum": {"wavefronts_ldgsts": 1},
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": {"conflicts_lds": 1, "conflicts_ldsm": 1},
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": {"conflicts_sts": 1},
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum": {"bytes_tma_load": 1},
    "sm__sass_l1tex_m_xbar2l1tex_read_bytes_mem_global_op_ldgsts_cache_bypass.sum": {"bytes_ldgsts": 1},
    "l1tex__m_xbar2l1tex_read_bytes_mem_lg_op_ld.sum": {"sectors_ldg": SECTOR, "bytes_ldgsts": 1},
}
"""ncu's counters that mean what the emulator counts, as sums of its counts. What only a chip can know is not among them."""


def as_ncu(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts under ncu's names."""
    return {
        metric: sum(counts.get(name, 0) * factor for name, factor in terms.items()) for metric, terms in NCU.items()
    }


@dataclass
class Tally:
    """Sums per instruction and kind for a batch: `sums[(pc, what)]` is a number for each CTA, or one for all alike."""

    ctas: int
    sums: dict[tuple[int, str], Array | int] = field(default_factory=dict)

    def add(self, pc: int, what: str, amount: Array | int) -> None:
        key = (pc, what)
        self.sums[key] = self.sums.get(key, 0) + amount
