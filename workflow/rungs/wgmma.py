"""How a GEMM that multiplies with wgmma is launched: what `plan` gives for experiments whose file says `multiplies: wgmma`.

A tile of C is the work of `WARPGROUPS` warpgroups, and K is taken 64 at a time, which is a swizzled row of 128 bytes. What hangs
over an edge of A, B or C the copy engine fills with zeros and leaves out, so that M is any, and K and N are multiples of 8.
"""

from __future__ import annotations

from collections.abc import Mapping

from rungs import plan as plans
from rungs.errors import Refused
from rungs.plan import BF16_BYTES, Plan, TensorMap, Workspace
from rungs.variants import Device, Experiment, Variant, cluster_of, ctas_along_k, sums_through_l2

GROUP_THREADS = 128
C_SLOT = 64
"""Rows and columns of C that pass through shared memory at once."""
SPAN = "128B"
COUNTERS_BYTES = 128
"""Of a tile whose sums go through L2: one of 4 bytes for each of its warps."""


def tiles(values: Mapping[str, int], problem: tuple[int, int, int]) -> int:
    """Tiles of C that are walked, the empty ones that fill up the last clusters too."""
    m, n, _ = problem
    along_m, along_n, _ = cluster_of(values)
    rows, columns = (-(-extent // tile) for extent, tile in ((m, values["TILE_M"]), (n, values["TILE_N"])))
    return -(-rows // along_m) * -(-columns // along_n) * along_m * along_n


def threads(values: Mapping[str, int]) -> int:
    """Threads of a block: the warpgroups that multiply and, where there is one, the producer's."""
    return GROUP_THREADS * (values["WARPGROUPS"] + values["VARIANT_PRODUCER"])


def smem_need(values: Mapping[str, int]) -> int:
    """Bytes of shared memory: the ring of stages, the slots of C of each warpgroup, two 8-byte mbarriers for each stage, and where
    a cluster shares K what the other CTAs send of the columns that this one adds up, 8 at a time, with an mbarrier.
    """
    stage = (values["TILE_M"] + values["TILE_N"]) * values["TILE_K"] * BF16_BYTES
    slots = values["WARPGROUPS"] * values["VARIANT_C_SLOTS"] * C_SLOT * C_SLOT * BF16_BYTES
    split = cluster_of(values)[2]
    columns = 8 * -(-values["TILE_N"] // 8 // split)
    sums = (split - 1) * values["TILE_M"] * columns * 4 + 8 * (split > 1)
    whole = values["VARIANT_STAGES"] * (stage + 16) + slots + sums
    return -(-whole // 1024) * 1024  # the image is aligned to the swizzle's pattern


def workspace(values: Mapping[str, int], problem: tuple[int, int, int]) -> list[Workspace]:
    """The global memory in which the CTAs of a tile leave their sums, none where no sums go through L2: 128 bytes of counters for each
    tile, and for each what its CTAs send each other, which is the tile in float32 for all of them but one.
    """
    if not sums_through_l2(values):
        return []
    sent = (ctas_along_k(values) - 1) * values["TILE_M"] * values["TILE_N"] * 4
    return [Workspace(tiles(values, problem) * (COUNTERS_BYTES + sent), tiles(values, problem) * COUNTERS_BYTES)]


def check(experiment: Experiment, variant: Variant, problem: tuple[int, int, int]) -> None:
    """Raises Refused, naming the rule and the fix, for a shape that the kernel does not compute."""
    _, n, k = problem
    for axis, extent in zip("MNK", problem, strict=True):
        if extent < 1:
            raise Refused(f"{axis}={extent} is not positive: choose 1 or more.")
        if extent > plans.LARGEST_EXTENT:
            raise Refused(
                f"{axis}={extent} is above the {plans.LARGEST_EXTENT} that 32-bit strides allow: choose a smaller {axis}."
            )
    for axis, extent in (("N", n), ("K", k)):
        if extent % 8:
            raise Refused(
                f"{axis}={extent} is not a multiple of 8, which the copy engine's 16-byte rows need: choose a multiple of 8."
            )


def plan(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    problem: tuple[int, int, int],
    addresses: Mapping[str, int],
    sms: int | None = None,
) -> Plan:
    """As `plan.plan`: the maps of A, B and C, then C's address, M, N, K and the workspace. Raises Refused as it does."""
    check(experiment, variant, problem)
    m, n, k = problem
    values = experiment.values(variant)
    bm, bn, bk = (values[name] for name in ("TILE_M", "TILE_N", "TILE_K"))
    along_m, along_n, split = cluster_of(values)
    a = TensorMap(addresses["a"], (k, m), (k * BF16_BYTES,), (bk, bm // along_n), SPAN)
    if plans.b_is_n_by_k(experiment, variant):
        b = TensorMap(addresses["b"], (k, n), (k * BF16_BYTES,), (bk, bn // along_m), SPAN)
    else:
        b = TensorMap(addresses["b"], (n, k), (n * BF16_BYTES,), (64, bk), SPAN)
    c = TensorMap(addresses["c"], (n, m), (n * BF16_BYTES,), (C_SLOT, C_SLOT), SPAN)
    for name, tensor_map in (("A", a), ("B", b), ("C", c)):
        plans.check_tensor_map(tensor_map, f"{variant.name}, {name}")
    cluster = along_m * along_n * split
    ctas = tiles(values, problem) * ctas_along_k(values)
    if values["VARIANT_PERSISTENT"]:
        ctas = min(ctas, max((sms or device.sms) * device.pinned(experiment.name) // cluster, 1) * cluster)
    return Plan(
        entry=experiment.entry,
        grid=(ctas, 1, 1),
        block=(threads(values), 1, 1),
        cluster=(cluster, 1, 1),
        smem_bytes=plans.smem_bytes(experiment, variant, device),
        params=(a, b, c, (addresses["c"], 8), (m, 4), (n, 4), (k, 4), *workspace(values, problem)),
        dependent=bool(values["VARIANT_DEPENDENT"]),
        sharers=ctas_along_k(values) // split,
    )
