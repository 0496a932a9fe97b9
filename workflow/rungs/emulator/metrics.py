"""What the hardware counts: shared-memory wavefronts, global sectors, instructions by kind.

Shared memory has 32 banks of 4 bytes. An access of up to 4 bytes a lane is served for 32 lanes at once, of 8 bytes for 16,
of 16 bytes for 8 (a phase); ldmatrix and stmatrix one 8x8 matrix, eight rows of 16 bytes, at a time. A phase costs as many
wavefronts as the bank with the most distinct words. The rules here, and those of LDGSTS below, were held against ncu's
counters on an H200 with one warp and one instruction a launch; tests/test_emulator_metrics.py has the patterns and the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
BANKS, BANK_BYTES, SECTOR, LINE = 32, 4, 32, 128


def phase_of(size: int) -> int:
    """Lanes that are served at once."""
    return {8: 16, 16: 8}.get(size, 32)


def _per_phase(addresses: Array, size: int, phase: int, active: Array | None = None) -> Array:
    """Most distinct words in a bank, for each phase of (..., lanes): (..., phases)."""
    words = (addresses.astype(np.int64) // BANK_BYTES)[..., None] + np.arange(max(1, size // BANK_BYTES))
    if active is not None:
        words = np.where(active[..., None], words, -1)
    rows = np.sort(words.reshape(-1, phase * words.shape[-1]), axis=-1)
    fresh = np.ones(rows.shape, bool)
    fresh[:, 1:] = rows[:, 1:] != rows[:, :-1]
    fresh &= rows >= 0
    at = np.arange(len(rows))[:, None] * BANKS + rows % BANKS
    per_bank = np.bincount(at[fresh], minlength=len(rows) * BANKS).reshape(len(rows), BANKS)
    return per_bank.max(axis=1).reshape(*addresses.shape[:-1], -1)


def wavefronts(addresses: Array, size: int, active: Array | None = None) -> Array:
    """Wavefronts of each warp for shared accesses of `size` bytes at `addresses` (..., lanes) in bytes."""
    return _per_phase(addresses, size, min(addresses.shape[-1], phase_of(size)), active).sum(axis=-1)


def load_wavefronts(addresses: Array, size: int, active: Array | None = None) -> Array:
    """Those of ld.shared: two wide phases are served as one where every lane reads what its neighbour (lane ^ 1) reads."""
    if size <= BANK_BYTES or active is not None:
        return wavefronts(addresses, size, active)
    phase = phase_of(size)
    apart = _per_phase(addresses, size, phase)
    together = _per_phase(addresses, size, 2 * phase)
    neighbours = addresses.reshape(*together.shape, phase, 2)
    paired = (neighbours[..., 0] == neighbours[..., 1]).all(axis=-1)
    return np.where(paired, together, apart.reshape(*together.shape, 2).sum(axis=-1)).sum(axis=-1)


def copy_wavefronts(sources: Array, targets: Array, size: int, bypass: bool, active: Array | None = None) -> Array:
    """Wavefronts of LDGSTS, for global `sources` and shared `targets`, both (..., 32) in bytes.

    Past L1 (.cg, `bypass`) each 128-byte line that a phase of eight lanes reads is written by itself, and within it a sector
    of 32 bytes goes to one sector of the banks at a time: a line costs the largest of what its target banks and its
    sectors cost. Through L1 (.ca) a phase costs the most lanes that read, or write, one bank: lines whose words lie in
    different banks go together.
    """
    phase = phase_of(size)
    shape = (*np.broadcast_shapes(sources.shape, targets.shape)[:-1], 32 // phase, phase)
    source, target = (np.broadcast_to(each, (*shape[:-2], 32)).reshape(shape) for each in (sources, targets))
    here = np.ones(shape, bool) if active is None else np.broadcast_to(active, (*shape[:-2], 32)).reshape(shape)

    def alike(values: Array) -> Array:
        """Which lanes of a phase have the same value, (..., lane, other lane)."""
        return (values[..., :, None] == values[..., None, :]) & here[..., None, :] & here[..., :, None]

    banks = LINE // size  # accesses of this size in all banks together
    reads, writes = alike(source // size % banks), alike(target // size % banks)
    if not bypass:
        return np.maximum(reads.sum(axis=-1), writes.sum(axis=-1)).max(axis=-1).sum(axis=-1)
    line = alike(source // LINE)
    before = np.tril(np.ones((phase, phase), bool), -1)
    sector, to = line & alike(source // SECTOR), alike(target % LINE // SECTOR)
    again = (sector & to & alike(source) & before).sum(
        axis=-1
    )  # the same chunk to the same sector of banks: one by one
    turn = again[..., :, None] == again[..., None, :]
    fresh = ~(sector & to & turn & before).any(axis=-1)
    cost = np.maximum((line & writes).sum(axis=-1), (sector & fresh[..., None, :]).sum(axis=-1))
    dearest = np.where(line, cost[..., None, :], 0).max(axis=-1)
    first = here & ~(line & before).any(axis=-1)
    return (dearest * first).sum(axis=(-2, -1))


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
    "smsp__inst_executed_pipe_tma.sum": {"tma_load": 1, "tma_store": 1, "tma_commit": 1, "tma_prefetch": 1},
    "sm__inst_executed_pipe_tensor_op_hmma.sum": {"hmma": 1, "hgmma": 1},
    "sm__inst_executed_pipe_tensor_op_gmma.sum": {"hgmma": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": {"wavefronts_lds": 1, "wavefronts_ld_cluster": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum": {"wavefronts_ldsm": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum": {"wavefronts_sts": 1},
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum": {"wavefronts_ldgsts": 1},
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": {"conflicts_lds": 1, "conflicts_ldsm": 1},
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": {"conflicts_sts": 1, "conflicts_stsm": 1},
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
