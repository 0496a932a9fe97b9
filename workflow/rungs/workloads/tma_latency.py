"""One thread's loads along a chain of nodes in memory, or many of them at once, in cycles of the SM's clock.

A point is (bytes, footprint_kib, cold). The nodes are spread evenly over the footprint; the first word of each is the line
(of 128 bytes) of the next, in random order, all in one ring that starts at line 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rungs.errors import Refused
from rungs.plan import InGlobal, Plan, TensorMap, check_tensor_map
from rungs.variants import Device, Experiment, Variant
from rungs.workloads import Operand, Point, Work

MEASURES = "cycles"
CONTROL = ""
FIGURES = ("latency", "bytes")
UNIT_OF_WORK = "load"

LATENCY, ISSUE, FIRST_TOUCH = range(3)
"""Levels of factor `what`."""
LDG, CP_ASYNC, BULK, TENSOR = range(4)
"""Levels of factor `load`."""
IN_GLOBAL = 2
"""The level of factor `descriptor` whose tensor map lies in global memory."""
WORD, LINE, CHUNK = 4, 128, 16
THREADS, BURST = 1024, 16
SLOT = 1024
"""Bytes of shared memory for a load, and so the most that one moves and the least between nodes."""
MOST_NODES = 512
FLUSH = 256 << 20
"""Bytes that go through L2 between the two passes of a cold point: more than twice what any of the GPUs has."""
SMALL_FOOTPRINT_KIB = 64
"""Up to here a cold point is only emulated, and its flush is as small as the footprint: no L2 is that small."""


def check(experiment: Experiment, variant: Variant, device: Device, point: Point) -> None:
    """Raises Refused for a load that does not exist and a footprint that holds no chain."""
    experiment.check_chip(variant, device.arch)
    size, footprint, cold = point
    load = variant.level("load")
    if size < CHUNK or size % CHUNK:
        raise Refused(
            f"bytes={size} is not a positive multiple of the {CHUNK} bytes that the copy engine moves at once: choose a"
            f" multiple of {CHUNK}."
        )
    if size > SLOT:
        raise Refused(
            f"bytes={size} is above the {SLOT} that lie between two nodes at the least: choose {SLOT} or less."
        )
    if load in (LDG, CP_ASYNC) and size != CHUNK:
        raise Refused(f"bytes={size} is more than LDG and cp.async move at once: choose {CHUNK}.")
    if load == TENSOR and size > LINE and size % LINE:
        raise Refused(f"bytes={size} is no box of whole lines: choose a multiple of {LINE}, or less than {LINE}.")
    least = BURST * SLOT // 1024
    if footprint < least or footprint & (footprint - 1):
        raise Refused(
            f"footprint_kib={footprint} is not a power of two from {least} on, over which nodes can be spread evenly: choose one."
        )
    if footprint * 1024 > 1 << 32:
        raise Refused(f"footprint_kib={footprint} is above 4 GiB: choose {1 << 22} or less.")
    if cold not in (0, 1):
        raise Refused(f"cold={cold} is neither 0 (the data lie in L2) nor 1 (in DRAM): choose one of the two.")
    if load == TENSOR:
        check_tensor_map(tensor_map(point, 0), f"{variant.name} at bytes={size}")


def plan(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: Point,
    addresses: Mapping[str, int],
    sms: int | None,
) -> Plan:
    """The launch of one CTA; raises Refused as `check` does."""
    check(experiment, variant, device, point)
    size, _, _ = point
    source: tuple[int, int] | TensorMap | InGlobal = (addresses["chain"], 8)
    if variant.level("load") == TENSOR:
        map = tensor_map(point, addresses["chain"])
        source = InGlobal(map) if variant.level("descriptor") == IN_GLOBAL else map
    count, stride = nodes(point)
    numbers = (count, stride, size, _flush_bytes(point) if point[2] else 0)
    return Plan(
        entry=experiment.entry,
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=BURST * SLOT + 8,
        params=(
            source,
            *((addresses[name], 8) for name in ("chain", "flush", "last", "cycles")),
            *((value, 4) for value in numbers),
        ),
    )


def nodes(point: Point) -> tuple[int, int]:
    """How many nodes the chain has, and how many lines lie from one to the next."""
    footprint = point[1] * 1024
    count = min(MOST_NODES, footprint // SLOT)
    return count, footprint // count // LINE


def ctas_per_sm(experiment: Experiment, variant: Variant, device: Device, point: Point) -> int | None:
    """One CTA runs alone, whatever would fit."""
    return None


def tensor_map(point: Point, address: int) -> TensorMap:
    """The footprint in rows of a line; a box is a part of a line or several whole ones."""
    size, footprint, _ = point
    wide = min(size, LINE)
    dims = (LINE // WORD, footprint * 1024 // LINE)
    return TensorMap(address, dims, (LINE,), (wide // WORD, size // wide), "none", "128B", WORD)


def _flush_bytes(point: Point) -> int:
    """Bytes of the buffer that flushes L2; it is there at every point, but tiny where it is not read."""
    _, footprint, cold = point
    return (min(FLUSH, footprint * 1024) if footprint <= SMALL_FOOTPRINT_KIB else FLUSH) if cold else CHUNK


def operands(
    experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None
) -> dict[str, Operand]:
    count, stride = nodes(point)

    def chain(generator: np.random.Generator) -> np.ndarray:
        order = np.concatenate([[0], 1 + generator.permutation(count - 1)])
        words = np.zeros((count, stride * LINE // WORD), np.int32)
        words[order, 0] = np.roll(order, -1) * stride
        return words.reshape(-1)

    def rest(generator: np.random.Generator) -> np.ndarray:
        return np.zeros(_flush_bytes(point) // WORD, np.int32)

    return {
        "chain": Operand((count * stride * LINE // WORD,), "int32", "input", chain),
        "flush": Operand((_flush_bytes(point) // WORD,), "int32", "input", rest),
        "last": Operand((1,), "int32", "output"),
        "cycles": Operand((1,), "uint64", "cycles"),
    }


def expected(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: Point,
    sms: int | None,
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """The last node of the chain; of an issue cost all of their words, mixed in order; of a first touch the second node."""
    count, stride = nodes(point)
    named = [int(line) for line in inputs["chain"].reshape(count, -1)[:, 0].tolist()]
    what, value = variant.level("what"), 0
    if what == ISSUE:
        for line in named:
            value = (value * 5 + line) & 0xFFFFFFFF
    else:
        for _ in range(count - 1 if what == LATENCY else 1):
            value = named[value // stride]
    return {"last": inputs["chain"][:1] * 0 + (value & 0x7FFFFFFF)}


def work(experiment: Experiment, variant: Variant, device: Device, point: Point, sms: int | None) -> Work:
    """`units`: the loads between the two readings of the clock, over all the times that it was read."""
    count, _ = nodes(point)
    loads = {LATENCY: count - 1, ISSUE: count, FIRST_TOUCH: 1}[variant.level("what")]
    again = 2 if variant.level("what") != FIRST_TOUCH else 1
    flushed = _flush_bytes(point) if point[2] else 0
    return Work(read_bytes=again * loads * point[0] + flushed, written_bytes=12, units=loads)


def emulated_points(experiment: Experiment, variant: Variant, device: Device) -> list[Point]:
    """A short chain, also with a flush; a load of several lines where the variant has one."""
    found: list[Point] = [(CHUNK, 16, 0), (CHUNK, 32, 1)]
    if variant.level("load") in (BULK, TENSOR):
        found += [(64, 16, 0), (SLOT, 16, 0)]
    return found
