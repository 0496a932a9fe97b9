"""How a GEMM that multiplies with wgmma is launched: what `plan` gives for experiments whose file says `multiplies: wgmma`.

A tile of C is the work of `WARPGROUPS` warpgroups, and K is taken 64 at a time, which is a swizzled row of 128 bytes. What hangs
over an edge of A, B or C the copy engine fills with zeros and leaves out, so that M is any, and K and N are multiples of 8.
"""

from __future__ import annotations

from collections.abc import Mapping

from rungs import plan as plans
from rungs.errors import Refused
from rungs.plan import BF16_BYTES, Plan, TensorMap
from rungs.variants import Device, Experiment, Variant

GROUP_THREADS = 128
C_SLOT = 64
"""Rows and columns of C that pass through shared memory at once."""
SPAN = "128B"
CAUTION = (
    "CTAs that share the K of a tile wait for each other's sums. Beside other tools on the GPU, racecheck saw such waits that did not"
    " end, and whether that is the tool's doing is open: do not let this kernel share a GPU with other processes."
)
"""What a user of a kernel with `VARIANT_SPLIT_K` above 1 is told: README, ladder H."""


def cluster_of(values: Mapping[str, int]) -> tuple[int, int, int]:
    """CTAs of a cluster along M, along N and along K of a tile."""
    return values["CLUSTER_TILES_M"], values["CLUSTER_TILES_N"], values["VARIANT_SPLIT_K"]


def shares_k(values: Mapping[str, int]) -> bool:
    """Whether several CTAs share the K of a tile, of any experiment's kernel."""
    return values.get("VARIANT_SPLIT_K", 1) > 1


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
    K is split what the other CTAs send of the columns that this one adds up, 8 at a time, with an mbarrier.
    """
    stage = (values["TILE_M"] + values["TILE_N"]) * values["TILE_K"] * BF16_BYTES
    slots = values["WARPGROUPS"] * values["VARIANT_C_SLOTS"] * C_SLOT * C_SLOT * BF16_BYTES
    split = values["VARIANT_SPLIT_K"]
    columns = 8 * -(-values["TILE_N"] // 8 // split)
    sums = (split - 1) * values["TILE_M"] * columns * 4 + 8 * (split > 1)
    whole = values["VARIANT_STAGES"] * (stage + 16) + slots + sums
    return -(-whole // 1024) * 1024  # the image is aligned to the swizzle's pattern


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
    """As `plan.plan`: the maps of A, B and C, then C's address and M, N, K. Raises Refused as it does."""
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
    ctas = tiles(values, problem) * split
    if values["VARIANT_PERSISTENT"]:
        ctas = min(ctas, max((sms or device.sms) * device.pinned(experiment.name) // cluster, 1) * cluster)
    return Plan(
        entry=experiment.entry,
        grid=(ctas, 1, 1),
        block=(threads(values), 1, 1),
        cluster=(cluster, 1, 1),
        smem_bytes=plans.smem_bytes(experiment, variant, device),
        params=(a, b, c, (addresses["c"], 8), (m, 4), (n, 4), (k, 4)),
        dependent=bool(values["VARIANT_DEPENDENT"]),
    )
