"""A payload of floats that is read tile by tile, worked on and written: ways of loading against work per element.

A point is (fma_iters, payload_kib, grid): multiply-adds per element, KiB of payload, and CTAs (0 for the seed's 64, else CTAs
per SM). Tile t of the payload is worked on by CTA t modulo the number of CTAs, and thread i of it holds the chunks i,
i + readers, ... of 16 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from rungs.errors import Refused
from rungs.plan import Plan, TensorMap, check_tensor_map
from rungs.variants import Device, Experiment, Variant
from rungs.workloads import Operand, Point, Work

MEASURES = "time"
CONTROL = "torch.Tensor.copy_"
FIGURES = ("intensity", "ahead")
UNIT_OF_WORK = ""

FLOAT_BYTES = 4
CHUNK_BYTES = 16
"""What a thread reads and writes at once."""
BOX_FLOATS = 32
"""Of a row of the tensor map's box, as in the seed."""
DIRECT, WORDS, TENSOR = 0, 1, 7
"""Levels of factor `load` that the plan treats in their own way."""
SEED_CTAS = 64
EMULATED_SMS = 2
MOST_TILES = 1 << 31
MOST_FMA_ITERS = 1 << 20
"""Whole numbers of at most 8 stay exact in fp32 under so many additions of 1."""
SCALE, OFFSET = 1.0, 1.0
"""Of each multiply-add: with these, whole numbers stay exact."""

SEED_RUNGS = {
    "sync": {"load": 1, "stages": 1, "view": 32},
    "bulk1d": {"load": 6, "stages": 1, "view": 32},
    "tensor2d": {"load": 7, "stages": 1, "view": 2048},
    "pipe2": {"load": 6, "stages": 2, "view": 32},
}
"""The seed's modes as levels; the others are those of its program: tiles of 4 KiB, no producer warp, every element written."""


def check(experiment: Experiment, variant: Variant, device: Device, point: Point) -> None:
    """Raises Refused, naming the rule, for a point, a tile or an architecture that the variant does not support."""
    experiment.check_chip(variant, device.arch)
    values = experiment.values(variant)
    fma_iters, payload_kib, grid = _axes(experiment, point)
    tile, threads = values["TILE_BYTES"], values["BLOCK_THREADS"]
    if tile < 1 or tile % CHUNK_BYTES:
        raise Refused(
            f"A tile of {tile} bytes is not a multiple of the {CHUNK_BYTES} that a thread moves at once: choose a multiple of"
            f" {CHUNK_BYTES}."
        )
    if tile > threads * CHUNK_BYTES and tile % (threads * CHUNK_BYTES):
        raise Refused(
            f"A tile of {tile} bytes does not give each of {threads} threads as many chunks of {CHUNK_BYTES}: choose at most"
            f" {threads * CHUNK_BYTES} or a multiple of it."
        )
    if values["VARIANT_LOAD"] == WORDS and tile % (threads * FLOAT_BYTES):
        raise Refused(
            f"A tile of {tile} bytes does not give each of {threads} threads as many words of {FLOAT_BYTES}: choose a multiple"
            f" of {threads * FLOAT_BYTES}."
        )
    if not 1 <= fma_iters <= MOST_FMA_ITERS:
        raise Refused(
            f"fma_iters={fma_iters} is not between 1 and {MOST_FMA_ITERS}, up to which results are exact: choose one of those."
        )
    payload = payload_kib * 1024
    if payload < 1 or payload % tile:
        raise Refused(
            f"payload_kib={payload_kib} is {payload} bytes, not a positive multiple of the tile of {tile}: choose a multiple of"
            " the tile."
        )
    if payload // tile >= MOST_TILES:
        raise Refused(f"payload_kib={payload_kib} is more than {MOST_TILES - 1} tiles of {tile} bytes: choose fewer.")
    if values["VARIANT_LOAD"] == TENSOR:
        _check_view(variant, values, payload)
    all_threads, most = _threads(values), 32 * device.warps_per_sm
    if grid < 0 or grid * all_threads > most:
        raise Refused(
            f"grid={grid} asks for {grid} CTAs of {all_threads} threads on an SM, but an SM of {device.arch} holds {most}"
            f" threads: choose 0 (for {SEED_CTAS} CTAs in all) or 1 to {most // all_threads}."
        )
    _smem_bytes(variant, values, device, grid)


def _check_view(variant: Variant, values: Mapping[str, int], payload: int) -> None:
    """Raises Refused unless tiles are whole boxes, the payload is whole rows of them, and a tensor map can say so."""
    tile, view = values["TILE_BYTES"], values["VIEW_FLOATS"]
    row = BOX_FLOATS * FLOAT_BYTES
    if tile % row:
        raise Refused(
            f"A tile of {tile} bytes is no box of {BOX_FLOATS} floats a row: choose a multiple of {row} bytes."
        )
    if view < 1 or view % BOX_FLOATS:
        raise Refused(
            f"Rows of {view} floats are {view * FLOAT_BYTES} bytes, not a multiple of a box's {row}: choose a multiple of"
            f" {BOX_FLOATS} floats."
        )
    across = view // BOX_FLOATS * tile
    if payload % across:
        raise Refused(
            f"The payload of {payload} bytes is not a multiple of {across}, a row of tiles of the matrix with {view} columns:"
            f" choose a multiple of {across}."
        )
    check_tensor_map(_tensor_map(values, payload, 0), f"{variant.name}, the payload")


def _axes(experiment: Experiment, point: Point) -> tuple[int, int, int]:
    named = dict(zip(experiment.axis_names, point, strict=True))
    return named["fma_iters"], named["payload_kib"], named["grid"]


def _threads(values: Mapping[str, int]) -> int:
    return values["BLOCK_THREADS"] + 32 * values["VARIANT_PRODUCER"]


def _readers(values: Mapping[str, int]) -> int:
    """Threads of a CTA that have chunks of a tile."""
    return min(values["BLOCK_THREADS"], values["TILE_BYTES"] // CHUNK_BYTES)


def _ctas(values: Mapping[str, int], payload: int, grid: int, sms: int) -> int:
    """CTAs of the launch: no more than there are tiles."""
    return min(payload // values["TILE_BYTES"], grid * sms if grid else SEED_CTAS)


def _smem_bytes(variant: Variant, values: Mapping[str, int], device: Device, grid: int) -> int:
    """Dynamic shared memory of a CTA: its stages and barriers, padded so that no more than `grid` CTAs fit on an SM.

    Raises Refused, with the numbers, where that many do not fit.
    """
    loads_shared = values["VARIANT_LOAD"] != DIRECT
    need = loads_shared * (values["VARIANT_STAGES"] * values["TILE_BYTES"] + values["CONTROL_BYTES"])
    ctas = max(grid, 1)
    most = min(device.smem_per_sm_bytes // ctas - device.smem_reserved_bytes, device.smem_per_block_bytes)
    if need > most:
        raise Refused(
            f"{variant.name} needs {need} bytes of shared memory, but {ctas} CTAs per SM leave {most} each on {device.arch}:"
            " choose fewer stages, a smaller tile or a smaller grid."
        )
    if grid == 0:
        return need
    one_more = device.smem_per_sm_bytes // (ctas + 1) - device.smem_reserved_bytes  # with this, one more would fit
    return max(need, min((one_more // 1024 + 1) * 1024, most))


def _tensor_map(values: Mapping[str, int], payload: int, address: int) -> TensorMap:
    """The payload as a matrix with VIEW_FLOATS columns, taken in boxes of 32 floats by as many rows as the tile has."""
    view, row = values["VIEW_FLOATS"], BOX_FLOATS * FLOAT_BYTES
    rows = payload // (view * FLOAT_BYTES)
    box = (BOX_FLOATS, values["TILE_BYTES"] // row)
    return TensorMap(address, (view, rows), (view * FLOAT_BYTES,), box, "none", element_bytes=FLOAT_BYTES)


def plan(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: Point,
    addresses: Mapping[str, int],
    sms: int | None = None,
) -> Plan:
    """The launch; `addresses` has those of `payload` and `result`. Raises Refused as `check` does, and for an odd address."""
    check(experiment, variant, device, point)
    values = experiment.values(variant)
    fma_iters, payload_kib, grid = _axes(experiment, point)
    payload = payload_kib * 1024
    for name in ("payload", "result"):
        if addresses[name] % CHUNK_BYTES:
            raise Refused(
                f"{variant.name}: operand {name} is at {addresses[name]:#x}, which is not a multiple of {CHUNK_BYTES} bytes."
            )
    source: tuple[int, int] | TensorMap = (addresses["payload"], 8)
    if values["VARIANT_LOAD"] == TENSOR:
        source = _tensor_map(values, payload, addresses["payload"])
    return Plan(
        entry=experiment.entry,
        grid=(_ctas(values, payload, grid, sms or device.sms), 1, 1),
        block=(_threads(values), 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=_smem_bytes(variant, values, device, grid),
        params=(
            source,
            (addresses["result"], 8),
            (payload // values["TILE_BYTES"], 4),
            (fma_iters, 4),
            (_bits(SCALE), 4),
            (_bits(OFFSET), 4),
        ),
    )


def _bits(value: float) -> int:
    """A float32 as the 32-bit parameter that the kernel takes for it."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def ctas_per_sm(experiment: Experiment, variant: Variant, device: Device, point: Point) -> int | None:
    """The CTAs per SM that the grid is made of; None for the seed's grid, which leaves SMs without one."""
    return _axes(experiment, point)[2] or None


def operands(
    experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None = None
) -> dict[str, Operand]:
    """The payload, and a result of its size or of four floats for each reading thread of the grid."""
    values = experiment.values(variant)
    _, payload_kib, grid = _axes(experiment, point)
    payload = payload_kib * 1024
    floats: tuple[int, ...] = (payload // FLOAT_BYTES,)
    written = floats
    if not values["VARIANT_WRITE"]:
        written = (_ctas(values, payload, grid, sms or device.sms), _readers(values), 4)
    return {
        "payload": Operand(floats, "float32", "input"),
        "result": Operand(written, "float32", "output"),
    }


def expected(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: Point,
    sms: int | None,
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """Each element after its multiply-adds, tile after tile; or their sums for each thread."""
    values = experiment.values(variant)
    fma_iters, payload_kib, grid = _axes(experiment, point)
    tile, readers = values["TILE_BYTES"], _readers(values)
    worked = inputs["payload"] + OFFSET * fma_iters
    if values["VARIANT_LOAD"] == TENSOR:
        across, rows = values["VIEW_FLOATS"] // BOX_FLOATS, tile // (BOX_FLOATS * FLOAT_BYTES)
        worked = worked.reshape(-1, rows, across, BOX_FLOATS).swapaxes(1, 2).reshape(-1)
    if values["VARIANT_WRITE"]:
        return {"result": worked}
    ctas = _ctas(values, payload_kib * 1024, grid, sms or device.sms)
    tiles = worked.reshape(-1, tile // (readers * CHUNK_BYTES), readers, 4).sum(1)
    rounds = len(tiles) // ctas
    sums = tiles[: rounds * ctas].reshape(rounds, ctas, readers, 4).sum(0)
    sums[: len(tiles) - rounds * ctas] += tiles[rounds * ctas :]
    return {"result": sums}


def work(experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None = None) -> Work:
    """Bytes that the payload and the result are, and two FLOP for each multiply-add; sums are one more for each element."""
    values = experiment.values(variant)
    fma_iters, payload_kib, grid = _axes(experiment, point)
    payload = payload_kib * 1024
    floats = payload // FLOAT_BYTES
    if values["VARIANT_WRITE"]:
        return Work(payload, payload, 2 * fma_iters * floats)
    written = _ctas(values, payload, grid, sms or device.sms) * _readers(values) * CHUNK_BYTES
    return Work(payload, written, (2 * fma_iters + 1) * floats)


def emulated_points(experiment: Experiment, variant: Variant, device: Device) -> list[Point]:
    """A CTA for each of two SMs, with as many tiles as bring its ring of stages round, once with a rest; and the seed's grid.

    A matrix of several tiles across has no rest of one tile.
    """
    values = experiment.values(variant)
    tile, stages = values["TILE_BYTES"], values["VARIANT_STAGES"]
    across = values["VIEW_FLOATS"] // BOX_FLOATS
    tiles = -(-(stages + 1) * EMULATED_SMS // across) * across
    sizes = [(3, tiles, 1), (1, tiles + across, 1), (1, across, 0)]
    return [
        experiment.point({"fma_iters": fma, "payload_kib": count * tile // 1024, "grid": grid})
        for fma, count, grid in sizes
    ]


# ---- the seed's table ------------------------------------------------------------------------------------------------


def seed_rungs(experiment: Experiment) -> dict[str, Variant]:
    """The variants that are the seed's modes, by the name that its CSV gives them."""
    rest = {"producer": 0, "tile": 4096, "write": 1}
    return {mode: experiment.assign({**levels, **rest}) for mode, levels in SEED_RUNGS.items()}


def seed_columns(times_us: Mapping[str, Mapping[int, float]]) -> list[dict[str, float | int]]:
    """The seed's CSV from times in microseconds by mode and fma_iters: one row for each fma_iters that all modes have.

    Columns: fma_iters, the time of each mode in ms, and how many times as fast as sync each other mode is.
    """
    shared = sorted(set.intersection(*(set(times_us[mode]) for mode in SEED_RUNGS)))
    rows: list[dict[str, float | int]] = []
    for fma_iters in shared:
        ms = {mode: times_us[mode][fma_iters] / 1000 for mode in SEED_RUNGS}
        speedups = {f"speedup_{mode}": ms["sync"] / ms[mode] for mode in SEED_RUNGS if mode != "sync"}
        rows.append({"fma_iters": fma_iters, **{f"{mode}_ms": time for mode, time in ms.items()}, **speedups})
    return rows
