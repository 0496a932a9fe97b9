"""Reads of a tile in shared memory and nothing else, by every instruction and layout: cycles of a warp's access.

The kernel (kernels/smem_read/) reads a whole tile of bf16 `passes` times. Here stands what it reads, worked out from the
meaning of the instructions and apart from its address arithmetic: where each lane reads, what it gets, and how many wavefronts
the bank rule gives an access. A point is (warps, passes): warps of the one CTA that each SM has, and passes over the tile.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from rungs.errors import Refused
from rungs.plan import Plan
from rungs.variants import Device, Experiment, Variant
from rungs.workloads import Operand, Work

MEASURES = "cycles"
CONTROL = ""
FIGURES = ("bandwidth", "wavefronts")
UNIT_OF_WORK = "warp access"
LANES, CHUNK, BANKS, BANK_BYTES = 32, 16, 32, 4
STEPS = 16
"""Accesses of a chain in one pass: STEPS of the kernel."""
MOST_WARPS = 32
MOST_PASSES = 1 << 16
"""Of a launch: 2^16 passes of the slowest variant take a second, and the sums stay in 64 bits."""


class Tile(IntEnum):
    A_32, A_64, B_N_BY_K, B_K_BY_N = range(4)


class Layout(IntEnum):
    PLAIN, XOR_64, XOR_128, PAD_8 = range(4)


class Read(IntEnum):
    LDS_U16, LDS_32, LDS_64, LDS_128, X1, X2, X4, X1_TRANS, X2_TRANS, X4_TRANS = range(10)

    @property
    def registers(self) -> int:
        """Registers that one access fills in each lane; the 16 bits of LDS.U16 take one."""
        if self in (Read.LDS_128, Read.X4, Read.X4_TRANS):
            return 4
        return 2 if self in (Read.LDS_64, Read.X2, Read.X2_TRANS) else 1

    @property
    def ldmatrix(self) -> bool:
        return self >= Read.X1


class Order(IntEnum):
    FRAGMENT, ROWS = range(2)


@dataclass(frozen=True)
class Access:
    """How a variant reads its tile of `rows` rows of `columns` bf16. Addresses are bytes from the tile's start in shared memory."""

    tile: Tile
    layout: Layout
    read: Read
    order: Order
    rows: int
    columns: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.columns

    @property
    def bytes(self) -> int:
        """What one access delivers to the 32 lanes together."""
        return 64 if self.read == Read.LDS_U16 else 4 * LANES * self.read.registers

    @property
    def accesses(self) -> int:
        """Those of one pass, which read each byte of the tile once."""
        return self.rows * self.row_bytes // self.bytes

    def offset(self, row: int, byte: int) -> int:
        """Where a byte of a row lies."""
        chunk, within = divmod(byte, CHUNK)
        if self.layout == Layout.XOR_64:  # TMA's pattern: address bits 7 and 8 onto bits 4 and 5
            chunk ^= row >> 1 & 3
        elif self.layout == Layout.XOR_128:  # bits 7 to 9 onto bits 4 to 6; wider rows are panels of 128 bytes
            panel, chunk = divmod(chunk, 8)
            return panel * self.rows * 128 + row * 128 + (chunk ^ row & 7) * CHUNK + within
        stride = self.row_bytes + (CHUNK if self.layout == Layout.PAD_8 else 0)
        return row * stride + chunk * CHUNK + within

    def matrices(self, index: int) -> list[tuple[int, int]]:
        """First row and chunk of each 8x8 matrix of an ldmatrix.

        mma wants the matrices of A one below the other first, those of B along K first: beside each other in N x K, one
        below the other in K x N.
        """
        count = self.read.registers
        down = 1 if count == 1 else count // 2 if self.tile == Tile.B_N_BY_K else 2
        beside = count // down
        row, chunk = divmod(index, self.row_bytes // CHUNK // beside)
        places = [(i, j) for i in range(down) for j in range(beside)]
        if self.tile != Tile.B_N_BY_K:
            places.sort(key=lambda place: place[1])
        return [(8 * (down * row + i), beside * chunk + j) for i, j in places]

    def place(self, index: int, lane: int) -> tuple[int, int]:
        """Row and byte in the row that a lane's address names in access `index` of a pass."""
        width = self.bytes // LANES
        if self.read.ldmatrix:
            row, chunk = self.matrices(index)[lane // 8 % self.read.registers]
            return row + lane % 8, chunk * CHUNK
        if self.read == Read.LDS_U16:  # a fragment's word has two elements of K, which runs down the rows
            pair, half = divmod(index, 2)
            group, chunk = divmod(pair, self.row_bytes // CHUNK)
            return 8 * group + 2 * (lane % 4) + half, chunk * CHUNK + 2 * (lane // 4)
        if self.order == Order.FRAGMENT:  # lane 4g + t in row g; with more than 4 bytes K is permuted
            group, piece = divmod(index, self.row_bytes // (4 * width))
            return 8 * group + lane // 4, (4 * piece + lane % 4) * width
        return divmod(index * self.bytes + lane * width, self.row_bytes)

    @functools.cached_property
    def addresses(self) -> list[list[int]]:
        """The lanes' addresses in each access of a pass."""
        return [[self.offset(*self.place(index, lane)) for lane in range(LANES)] for index in range(self.accesses)]

    def chained(self, index: int, lane: int) -> tuple[int, int]:
        """Positions in the row-major tile of the low and the high half of the first register that a lane gets."""
        if not self.read.ldmatrix:
            row, byte = self.place(index, lane)
            return row * self.columns + byte // 2, row * self.columns + byte // 2 + 1
        (row, chunk), (g, t) = self.matrices(index)[0], divmod(lane, 4)
        if self.read >= Read.X1_TRANS:
            first = (row + 2 * t) * self.columns + 8 * chunk + g
            return first, first + self.columns
        first = (row + g) * self.columns + 8 * chunk + 2 * t
        return first, first + 1

    def wavefronts(self, index: int) -> int:
        """The bank rule for one access: a phase costs the most distinct words of 4 bytes that one of the 32 banks has in it.

        A phase is 32 lanes for up to 4 bytes each, 16 for 8, 8 for 16, and one 8x8 matrix (CUDA C++ Programming Guide 13.0,
        "Shared Memory").
        """
        width = CHUNK if self.read.ldmatrix else self.bytes // LANES
        lanes = 8 * self.read.registers if self.read.ldmatrix else LANES
        phase = {16: 8, 8: 16}.get(width, LANES)
        total = 0
        for first in range(0, lanes, phase):
            starts = self.addresses[index][first : first + phase]
            words = {(start + byte) // BANK_BYTES for start in starts for byte in range(0, width, BANK_BYTES)}
            banks = [word % BANKS for word in words]
            total += max(map(banks.count, set(banks)))
        return total

    @property
    def chain(self) -> int:
        """Accesses that a chain goes through before it comes round: one fewer than a pass, so that STEPS is no multiple."""
        return self.accesses - 1


@functools.cache
def _access(tile: int, layout: int, read: int, order: int, rows: int, columns: int) -> Access:
    return Access(Tile(tile), Layout(layout), Read(read), Order(order), rows, columns)


def access_of(experiment: Experiment, variant: Variant) -> Access:
    values = experiment.values(variant)
    names = ("VARIANT_TILE", "VARIANT_LAYOUT", "VARIANT_READ", "VARIANT_ORDER", "TILE_ROWS", "TILE_COLUMNS")
    return _access(*(values[name] for name in names))


def is_dependent(variant: Variant) -> bool:
    """Whether each access needs the result of the one before: a latency, not a throughput."""
    return variant.level("dependent") == 1


def bytes_per_access(experiment: Experiment, variant: Variant) -> int:
    """Bytes of the tile that one access delivers to a warp: of a fragment of 512 bytes (16x16 bf16) its share."""
    return access_of(experiment, variant).bytes


@functools.cache
def _wavefronts(access: Access) -> int:
    found = {access.wavefronts(index) for index in range(access.accesses)}
    if len(found) > 1:
        raise ValueError(f"{access} has accesses of {sorted(found)} wavefronts, so there is no one number for them")
    return found.pop()


def predicted_wavefronts(experiment: Experiment, variant: Variant) -> int:
    """Wavefronts of one warp access by the bank rule; all accesses of a variant have as many."""
    return _wavefronts(access_of(experiment, variant))


# ---- the workload ----------------------------------------------------------------------------------------------------


def check(experiment: Experiment, variant: Variant, device: Device, point: tuple[int, ...]) -> None:
    """Raises Refused, naming the rule, for a level the chip lacks, and for warps or passes that a launch cannot have."""
    experiment.check_chip(variant, device.arch)
    warps, passes = point
    if not 1 <= warps <= MOST_WARPS:
        raise Refused(
            f"{variant.name}: warps={warps} do not fit into one block, the only one on its SM: choose 1 to {MOST_WARPS}."
        )
    if not 1 <= passes <= MOST_PASSES:
        raise Refused(
            f"{variant.name}: passes={passes} are not 1 to {MOST_PASSES}: choose as many passes over the tile."
        )


def smem_bytes(device: Device) -> int:
    """Dynamic shared memory of a launch: more than half of an SM's, so that no second CTA joins the one that is timed."""
    half = device.smem_per_sm_bytes // 2 - device.smem_reserved_bytes  # at most this, and two would fit
    return (half // 1024 + 1) * 1024


def plan(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: tuple[int, ...],
    addresses: Mapping[str, int],
    sms: int | None = None,
) -> Plan:
    """One CTA for each SM. `addresses` maps tile, sum and cycles to device addresses."""
    check(experiment, variant, device, point)
    warps, passes = point
    if addresses["tile"] % CHUNK:
        raise Refused(
            f"{variant.name}: operand tile is at {addresses['tile']:#x}, which is not a multiple of {CHUNK} bytes."
        )
    return Plan(
        entry=experiment.entry,
        grid=(sms or device.sms, 1, 1),
        block=(LANES * warps, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=smem_bytes(device),
        params=((addresses["tile"], 8), (addresses["sum"], 8), (addresses["cycles"], 8), (passes, 4)),
    )


def ctas_per_sm(experiment: Experiment, variant: Variant, device: Device, point: tuple[int, ...]) -> int:
    return 1


def operands(
    experiment: Experiment, variant: Variant, device: Device, point: tuple[int, ...], sms: int | None = None
) -> dict[str, Operand]:
    """`tile`: row-major, its elements whole numbers from 0 to 32767. `sum`: a row for each warp. `cycles`: an entry for each.

    A warp's cycles run from the barrier that lets the warps of its CTA go, by the clock of warp 0, to the warp's own end: the
    largest of a CTA is what the SM took for all of them, so it delivered warps * units * bytes_per_access in them.
    """
    access, ctas, warps = access_of(experiment, variant), sms or device.sms, point[0]
    make = functools.partial(_make, access, is_dependent(variant))
    return {
        "tile": Operand((access.rows, access.columns), "int16", "input", make),
        "sum": Operand((ctas * warps, LANES), "int32", "output"),
        "cycles": Operand((ctas, warps), "uint64", "cycles"),
    }


def _make(access: Access, dependent: bool, generator: np.random.Generator) -> np.ndarray:
    """Random elements; a chain's accesses give each lane, in its first register, its address in the next access."""
    tile = generator.integers(0, 1 << 15, (access.rows, access.columns), dtype=np.int16)
    if dependent:
        flat = tile.reshape(-1)
        for index in range(access.chain):
            for lane, address in enumerate(access.addresses[(index + 1) % access.chain]):
                low, high = access.chained(index, lane)
                flat[low], flat[high] = address, 0
    return tile


def expected(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: tuple[int, ...],
    sms: int | None,
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """`sum` as int64, in int32's range. Whole numbers throughout: the kernel's sums wrap around at 32 bits, and so do these."""
    access, (warps, passes) = access_of(experiment, variant), point
    if is_dependent(variant):
        lanes = _end_of_chain(access, inputs["tile"], STEPS * passes)
    else:
        lanes = passes * _sum_of_pass(access, inputs["tile"])
    wrapped = (lanes + (1 << 31)) % (1 << 32) - (1 << 31)
    return {"sum": wrapped.reshape(1, LANES)[[0] * ((sms or device.sms) * warps)]}


def _sum_of_pass(access: Access, tile: Any) -> Any:
    """The sum of all words that each lane gets in a pass, with weights 1, 3, 5, 7, 1, ... by their place across the tile.

    Which words those are, and a chunk's weight, does not depend on the instruction where all of them read fragments.
    """
    groups, chunks = access.rows // 8, access.columns // 8
    if access.tile == Tile.B_K_BY_N:  # lane 4g + t: K 2t and 2t + 1 of eight, N g of eight
        halves = tile.reshape(groups, 4, 2, chunks // 4, 4, 8).sum((0, 3))
        words = halves[:, 0] + (halves[:, 1] << 16)
        return sum((2 * place + 1) * words[:, place] for place in range(4)).T.reshape(LANES)
    wide = 1 if access.read.ldmatrix else access.read.registers  # words that lie together
    if access.order == Order.ROWS:
        halves = tile.reshape(-1, 4, LANES, wide, 2).sum((0, 3))
        return sum((2 * place + 1) * (halves[place, :, 0] + (halves[place, :, 1] << 16)) for place in range(4))
    places = min(4, chunks // wide)  # lane 4g + t: row g of eight, piece t of four
    halves = tile.reshape(groups, 8, chunks // wide // places, places, 4, wide, 2).sum((0, 2, 5))
    words = halves[..., 0] + (halves[..., 1] << 16)
    return sum((2 * place + 1) * words[:, place] for place in range(places)).reshape(LANES)


def _end_of_chain(access: Access, tile: Any, steps: int) -> Any:
    """What the last of so many accesses gives each lane: where the next one would read."""
    last = (steps - 1) % access.chain
    return (
        tile.reshape(-1)[[access.chained(last, lane)[0] for lane in range(LANES)]].reshape(LANES, 1).sum(1)
    )  # in 64 bits


def work(
    experiment: Experiment, variant: Variant, device: Device, point: tuple[int, ...], sms: int | None = None
) -> Work:
    """`units`: accesses of one warp. The bytes are those of global memory: shared memory gives units * bytes_per_access."""
    access, (warps, passes), ctas = access_of(experiment, variant), point, sms or device.sms
    return Work(
        read_bytes=ctas * access.rows * access.row_bytes,
        written_bytes=ctas * warps * (4 * LANES + 8),
        units=passes * (STEPS if is_dependent(variant) else access.accesses),
    )


def emulated_points(experiment: Experiment, variant: Variant, device: Device) -> list[tuple[int, ...]]:
    return [(2, 1), (1, 2), (3, 3)]
