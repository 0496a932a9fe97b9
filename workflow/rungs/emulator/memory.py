"""Global and shared memory as numpy bytes, poisoned where nothing was written, with every access checked."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rungs.emulator.parser import Instruction

Array = np.ndarray
GLOBAL_BASE = 0x7F00_0000_0000
SHARED_BASE = 1024
"""Where a CTA's shared memory starts in its window; the first kilobyte is the system's (sm_80 on)."""
SHARED_WINDOW = 0x7E00_0000_0000
PARAM_WINDOW = 0x7D00_0000_0000
"""Where generic addresses of shared memory and of parameters lie: any value does that no buffer has."""
REMOTE_BITS = 24
"""An address of mapa is the rank plus one above these bits of the address in the CTA."""
LAST_RANK = (1 << 32 - REMOTE_BITS) - 2
POISON = 0xFF
"""Every float format reads 0xFF.. as NaN, so a value that nobody wrote spoils the result."""
ALIGN = 256  # cudaMalloc's own


def from_mapa(address: Any) -> tuple[Any, Any]:
    """(rank, address there) of an address of mapa, or of an array of them; the rank is -1 for one of the CTA's own."""
    return (address >> REMOTE_BITS) - 1, address & ((1 << REMOTE_BITS) - 1)


def words(size: int) -> np.dtype:
    """The unsigned type of an item of `size` bytes; 16 bytes are four words."""
    return np.dtype(f"u{min(size, 8) if size != 16 else 4}")


@dataclass
class Region:
    name: str
    start: int
    size: int
    dtype: np.dtype
    shape: tuple[int, ...]
    written: Array | None

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass
class GlobalMemory:
    """Named buffers in one arena, a guard gap after each. Offsets below are from GLOBAL_BASE, in bytes; `version` counts stores."""

    arena: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    regions: list[Region] = field(default_factory=list)
    version: int = 0

    def put(self, name: str, data: Array) -> int:
        """A copy of `data` as a buffer that everything has written; returns its address."""
        address = self.reserve(name, data.shape, data.dtype, tracked=False)
        self[name][...] = data
        return address

    def reserve(self, name: str, shape: tuple[int, ...], dtype: np.dtype | type, *, tracked: bool = True) -> int:
        """A poisoned buffer; returns its address. Reading what nobody wrote of it is an error."""
        item = np.dtype(dtype)
        size = int(np.prod(shape)) * item.itemsize
        written = np.zeros(size, bool) if tracked else None
        self.regions.append(Region(name, len(self.arena), size, item, tuple(shape), written))
        grown = np.full(len(self.arena) + (size // ALIGN + 2) * ALIGN, POISON, np.uint8)
        grown[: len(self.arena)] = self.arena
        self.arena = grown
        return GLOBAL_BASE + self.regions[-1].start

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def __getitem__(self, name: str) -> Array:
        """The buffer itself, not a copy."""
        region = self.region(name)
        return self.arena[region.start : region.stop].view(region.dtype).reshape(region.shape)

    def owner(self, offset: int) -> Region | None:
        at = bisect.bisect_right([region.start for region in self.regions], offset) - 1
        return self.regions[at] if at >= 0 and offset < self.regions[at].stop else None

    def _regions_of(self, offsets: Array, size: int, ins: Instruction) -> list[tuple[Region, Array | None]]:
        """The regions that the accesses lie in, with a mask where there are several. Raises EmulationError otherwise."""
        low, high = int(offsets.min()), int(offsets.max())
        if int(np.bitwise_or.reduce(offsets, axis=None)) % size:
            odd = int(offsets[offsets % size != 0].flat[0]) + GLOBAL_BASE
            raise ins.error(f"accesses global address {odd:#x}, where a multiple of {size} bytes was expected")
        region = self.owner(low)
        if region and high + size <= region.stop:
            return [(region, None)]
        found: list[tuple[Region, Array | None]] = []
        covered = np.zeros(offsets.shape, bool)
        for region in self.regions:
            inside = (offsets >= region.start) & (offsets + size <= region.stop)
            if inside.any():
                found.append((region, inside))
                covered |= inside
        if not covered.all():
            odd = int(offsets[~covered].flat[0])
            near = self.owner(odd) or min(self.regions, key=lambda r: min(abs(odd - r.start), abs(odd - r.stop)))
            raise ins.error(
                f"accesses {size} bytes at global address {odd + GLOBAL_BASE:#x}, byte {odd - near.start} of {near.name},"
                f" where 0 to {near.size - size} was expected"
            )
        return found

    def load(self, offsets: Array, size: int, ins: Instruction) -> Array:
        """`size` bytes at each offset, as (..., items) of the widest word type."""
        for region, mask in self._regions_of(offsets, size, ins):
            if region.written is not None:
                at = (offsets if mask is None else offsets[mask]) - region.start
                if not all(region.written[at + byte].all() for byte in range(size)):
                    raise ins.error(
                        f"reads {region.name} where nothing has written it, where a written value was expected"
                    )
        dtype = words(size)
        return np.take(self.arena.view(dtype).reshape(-1, size // dtype.itemsize), offsets // size, axis=0)

    def store(self, offsets: Array, values: Array, size: int, ins: Instruction) -> None:
        """`values` (..., items of the widest word type) to `size` bytes at each offset."""
        self.version += 1
        for region, mask in self._regions_of(offsets, size, ins):
            if region.written is not None:
                at = (offsets if mask is None else offsets[mask]) - region.start
                region.written[: region.size // size * size].reshape(-1, size)[at // size] = True
        dtype = words(size)
        self.arena.view(dtype).reshape(-1, size // dtype.itemsize)[offsets // size] = values


@dataclass
class SharedMemory:
    """The shared memory of a batch of CTAs: `data` is (CTAs, window) bytes, indexed by the address in the window.

    `size` bytes from SHARED_BASE on belong to the kernel.
    """

    ctas: int
    size: int
    data: Array = field(init=False)

    def __post_init__(self) -> None:
        self.window = -(-(SHARED_BASE + self.size) // 1024) * 1024
        self.data = np.full((self.ctas, self.window), POISON, np.uint8)
        self._flat: dict[int, Array] = {}

    def flat(self, size: int) -> Array:
        """All CTAs' memory as (items, words) of `size` bytes."""
        if size not in self._flat:
            dtype = words(size)
            self._flat[size] = self.data.reshape(-1).view(dtype).reshape(-1, size // dtype.itemsize)
        return self._flat[size]

    def check(self, addresses: Array, size: int, ins: Instruction, align: int = 0) -> None:
        """Raises EmulationError unless every access is aligned and lies in the CTA's own shared memory."""
        low, high = int(addresses.min()), int(addresses.max())
        if low < SHARED_BASE or high + size > SHARED_BASE + self.size:
            odd = low if low < SHARED_BASE else high
            raise ins.error(
                f"accesses {size} bytes at byte {odd - SHARED_BASE} of shared memory, where 0 to {self.size - size} was"
                " expected"
            )
        if int(np.bitwise_or.reduce(addresses, axis=None)) % (align or size):
            odd = int(addresses[addresses % (align or size) != 0].flat[0]) - SHARED_BASE
            raise ins.error(f"accesses byte {odd} of shared memory, where a multiple of {align or size} was expected")

    def index(self, addresses: Array, size: int) -> Array:
        """Rows of `flat(size)` of addresses (CTAs or 1, ...)."""
        row = np.arange(self.ctas, dtype=np.int64).reshape(-1, *[1] * (addresses.ndim - 1))
        return (addresses + row * self.window) // size
