"""Tiles moved by the copy engine as fast as it can: global to shared memory and, as the mirror, back.

A point is (tile_bytes, ctas_per_sm, stages, payload_kib, passes). The payload is float32, in rows of `PITCH` bytes where the tensor has
rows. Tiles are numbered along the rows; each CTA, or each cluster, takes those that are its number modulo how many there are, and the same again in each
further pass over the payload: one that L2 holds is moved too fast for a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rungs.errors import Refused
from rungs.plan import InGlobal, Plan, TensorMap, check_tensor_map
from rungs.variants import Device, Experiment, Variant
from rungs.workloads import Operand, Point, Work

MEASURES = "time"
CONTROL = "torch.Tensor.copy_"
FIGURES = ("wall", "under_way")

BULK, TENSOR_1D, TENSOR_2D, TENSOR_3D = range(4)
IN_GLOBAL = 2
"""The level of factor `descriptor` whose tensor map lies in global memory."""
WORD, LINE, CHUNK = 4, 128, 16
PITCH = 4096
"""Bytes of a row of the tensors of two and three dimensions."""
SLICE_ROWS = 8
"""Rows of a slice of the tensor of three dimensions."""
BOX_1D = 1024
"""Bytes of a box of 256 floats, the most along one dimension: a larger tile takes several instructions."""
LARGEST = 1 << 32
"""Bytes of payload below which every coordinate is a 32-bit number."""
RINGS = (1, 2, 4, 8)
"""Slots that a ring may have: the number of groups that a store leaves under way is part of the instruction."""
GPC_SMS = 16
"""SMs of a GPU's partition that clusters of four can count on, where no GPU says how many it holds at once: of 18, two are left over."""


def check(experiment: Experiment, variant: Variant, device: Device, point: Point) -> None:
    """Raises Refused for a point that the variant does not move right, or whose ring does not fit."""
    experiment.check_chip(variant, device.arch)
    tile, ctas, stages, payload = _sizes(point)
    level = dict(variant.levels)
    if tile < CHUNK or tile % CHUNK:
        raise Refused(
            f"tile_bytes={tile} is not a positive multiple of the {CHUNK} bytes that the copy engine moves at once: choose a"
            f" multiple of {LINE}."
        )
    if tile % LINE:
        raise Refused(
            f"tile_bytes={tile} is not a multiple of the {LINE} bytes of a line, of each of which one word is checked: choose"
            f" a multiple of {LINE}."
        )
    if stages not in RINGS:
        raise Refused(f"stages={stages} is no size of a ring: choose one of {', '.join(map(str, RINGS))}.")
    for axis, value in (("ctas_per_sm", ctas), ("passes", point[4])):
        if value < 1:
            raise Refused(f"{axis}={value} leaves nothing to do: choose 1 or more.")
    if payload < tile or payload % tile:
        raise Refused(
            f"payload_kib={payload // 1024} is not a positive multiple of the tile of {tile} bytes: choose a multiple of both."
        )
    if payload >= LARGEST:
        raise Refused(
            f"payload_kib={payload // 1024} is above what 32-bit coordinates reach: choose less than {LARGEST // 1024}."
        )
    if level["map"] == TENSOR_1D and tile > BOX_1D and tile % BOX_1D:
        raise Refused(
            f"tile_bytes={tile} is not a multiple of the {BOX_1D} bytes of a 1D box: choose a multiple of {BOX_1D}."
        )
    if level["map"] in (TENSOR_2D, TENSOR_3D):
        _check_box(level, tile, payload)
    if level["map"] != BULK:
        check_tensor_map(tensor_map(variant, point, 0), f"{variant.name} at tile_bytes={tile}")
    _smem_bytes(variant, device, point)


def _check_box(level: Mapping[str, int], tile: int, payload: int) -> None:
    """Raises Refused for a tile that makes no box, or no whole number of boxes of the tensor."""
    if tile & (tile - 1) or tile < BOX_1D:
        raise Refused(
            f"tile_bytes={tile} is not a power of two from {BOX_1D} on, of which the boxes of 2D and 3D maps are made: choose"
            " one."
        )
    x, rows = box_of(level["box"], tile)
    span = level["swizzle"]
    if span and x * WORD < span:
        raise Refused(
            f"tile_bytes={tile} gives a box with rows of {x * WORD} bytes, narrower than the {span} of the swizzle, which would"
            " leave gaps in shared memory: choose rows as wide as the swizzle."
        )
    if payload % (PITCH * rows):
        raise Refused(
            f"payload_kib={payload // 1024} is not a multiple of {rows} rows of {PITCH} bytes, the height of a box: choose a"
            f" multiple of {PITCH * rows // 1024}."
        )
    if rows % level["multicast"]:
        raise Refused(
            f"tile_bytes={tile} gives a box of {rows} rows, which a cluster of {level['multicast']} cannot share: choose a"
            " larger tile."
        )


def plan(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: Point,
    addresses: Mapping[str, int],
    sms: int | None,
) -> Plan:
    """The launch; raises Refused as `check` does."""
    check(experiment, variant, device, point)
    tile, _, stages, payload = _sizes(point)
    level = dict(variant.levels)
    source: tuple[int, int] | TensorMap | InGlobal = (addresses["data"], 8)
    if level["map"] != BULK:
        map = tensor_map(variant, point, addresses["data"])
        source = InGlobal(map) if level["descriptor"] == IN_GLOBAL else map
    x, rows = box_of(level["box"], tile) if level["map"] in (TENSOR_2D, TENSOR_3D) else (tile // WORD, 1)
    columns_log2 = (PITCH // WORD // x).bit_length() - 1 if level["map"] in (TENSOR_2D, TENSOR_3D) else 0
    return Plan(
        entry=experiment.entry,
        grid=(grid(variant, device, point, sms), 1, 1),
        block=(32, 1, 1),
        cluster=(level["multicast"], 1, 1),
        smem_bytes=_smem_bytes(variant, device, point),
        params=(
            source,
            (addresses.get("sums", 0), 8),
            (addresses.get("fill", 0), 8),
            *((value, 4) for value in (payload // tile, point[4], tile, stages, columns_log2, x, rows)),
        ),
    )


def grid(variant: Variant, device: Device, point: Point, sms: int | None) -> int:
    """CTAs of a launch: what the SMs hold at once, but none with fewer tiles than bring its ring round.

    A CTA more than that would wait for all the others to end, and the launch would take twice as long.
    """
    tile, ctas, stages, payload = _sizes(point)
    cluster = variant.level("multicast")
    most = sms or device.sms
    if cluster > 2 and sms is None:
        most = most // GPC_SMS * GPC_SMS
    clusters = min(most * ctas // cluster, payload // tile // (stages + 2))
    return max(1, clusters) * cluster


def ctas_per_sm(experiment: Experiment, variant: Variant, device: Device, point: Point) -> int | None:
    """The point says it, and the padding of the ring sees to it."""
    return _sizes(point)[1]


def tensor_map(variant: Variant, point: Point, address: int) -> TensorMap:
    """The map of the payload, whose box is what one instruction moves."""
    tile, _, _, payload = _sizes(point)
    level = dict(variant.levels)
    swizzle = f"{level['swizzle']}B" if level["swizzle"] else "none"
    promotion = f"{level['promotion']}B" if level["promotion"] else "NONE"
    if level["map"] == TENSOR_1D:
        return TensorMap(address, (payload // WORD,), (), (min(tile, BOX_1D) // WORD,), swizzle, promotion, WORD)
    x, rows = box_of(level["box"], tile)
    width, height = PITCH // WORD, payload // PITCH
    if level["map"] == TENSOR_2D:
        return TensorMap(address, (width, height), (PITCH,), (x, rows // level["multicast"]), swizzle, promotion, WORD)
    dims, strides = (width, SLICE_ROWS, height // SLICE_ROWS), (PITCH, PITCH * SLICE_ROWS)
    return TensorMap(address, dims, strides, (x, SLICE_ROWS, rows // SLICE_ROWS), swizzle, promotion, WORD)


def box_of(shape: int, tile: int) -> tuple[int, int]:
    """Floats of a row and rows of a tile. `shape` is the level of factor `box`: 0 for square or twice as wide, or a row's bytes."""
    floats = tile // WORD
    x = 1 << (floats.bit_length() // 2) if shape == 0 else min(shape // WORD, floats)
    return x, floats // x


def _sizes(point: Point) -> tuple[int, int, int, int]:
    """Tile in bytes, CTAs per SM, stages, payload in bytes."""
    tile, ctas, stages, payload_kib, _ = point
    return tile, ctas, stages, payload_kib * 1024


def _smem_bytes(variant: Variant, device: Device, point: Point) -> int:
    """The ring and its barriers, padded so that no more CTAs fit on an SM than the point says. Raises Refused where they do not."""
    tile, ctas, stages, _ = _sizes(point)
    need = stages * (tile + (8 if variant.level("multicast") == 1 else 16))
    most = min(device.smem_per_sm_bytes // ctas - device.smem_reserved_bytes, device.smem_per_block_bytes)
    if need > most:
        raise Refused(
            f"A ring of {stages} tiles of {tile} bytes takes {need} bytes of shared memory, but {ctas} CTAs per SM leave {most}"
            f" each on {device.arch}: choose fewer stages or a smaller tile."
        )
    one_more = device.smem_per_sm_bytes // (ctas + 1) - device.smem_reserved_bytes
    return max(need, min((one_more // 1024 + 1) * 1024, most))


# ---- what is moved, and what comes of it -----------------------------------------------------------------------------


def operands(
    experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None
) -> dict[str, Operand]:
    tile, _, stages, payload = _sizes(point)
    if variant.level("direction"):
        return {
            "data": Operand((payload // WORD,), "float32", "output"),
            "fill": Operand((stages * tile // WORD,), "float32", "input"),
        }
    return {
        "data": Operand((payload // WORD,), "float32", "input"),
        "sums": Operand((grid(variant, device, point, sms),), "float32", "output"),
    }


def expected(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: Point,
    sms: int | None,
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """Of loads each CTA's sum of a word of every line, of stores every element of the payload."""
    tile, _, stages, payload = _sizes(point)
    passes = point[4]
    level = dict(variant.levels)
    words, tiles, cluster = tile // WORD, payload // tile, level["multicast"]
    takers = grid(variant, device, point, sms) // cluster
    boxed = level["map"] in (TENSOR_2D, TENSOR_3D)
    x, rows = box_of(level["box"], tile)
    across, down = PITCH // WORD // x, payload // PITCH // rows
    if level["direction"]:
        # The slots go on from pass to pass, and what the last one wrote stays.
        before = [(passes - 1) * -(-(tiles - taker) // takers) for taker in range(takers)]
        slots = [(before[index % takers] + index // takers) % stages for index in range(tiles)]
        held = inputs["fill"].reshape(stages, words)[slots]
        if boxed:
            held = held.reshape(down, across, rows, x).swapaxes(1, 2)
        return {"data": held.reshape(-1)}
    data = inputs["data"]
    if boxed:
        data = data.reshape(down, rows, across, x).swapaxes(1, 2)
    lines, per_line = tile // LINE, LINE // WORD
    sums = data.reshape(tiles, words)[:, [per_line * line + line % per_line for line in range(lines)]].sum(1)
    whole = tiles // takers * takers
    totals = sums[:whole].reshape(whole // takers, takers).sum(0)
    totals[: tiles - whole] += sums[whole:]
    totals *= passes
    return {"sums": totals.reshape(takers, 1)[:, [0] * cluster].reshape(-1)}


def work(experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None) -> Work:
    """The payload once in every pass, however many CTAs of a cluster it is delivered to."""
    tile, _, stages, payload = _sizes(point)
    ctas = grid(variant, device, point, sms)
    if variant.level("direction"):
        return Work(read_bytes=ctas * stages * tile, written_bytes=payload * point[4])
    return Work(read_bytes=payload * point[4], written_bytes=WORD * ctas)


def emulated_points(experiment: Experiment, variant: Variant, device: Device) -> list[Point]:
    """Tiles that more than fill the ring, with and without a remainder over the CTAs, once and again."""
    found: list[Point] = []
    for tile, stages, passes in ((2048, 2, 1), (1024, 4, 3), (4096, 1, 2)):
        rows = box_of(variant.level("box"), tile)[1]
        found.append((tile, 1, stages, max(64, rows * PITCH // 1024), passes))
    return found
