"""How a variant is launched on a problem, as plain numbers: what the GPU launcher and an emulator both execute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from rungs.errors import Refused
from rungs.files import sha256_json
from rungs.variants import GEMM, WGMMA, Device, Experiment, Variant

BF16_BYTES = 2
TMA = 2
"""The level of factor `load` that takes tensor maps."""
SWIZZLE_SPAN_BYTES = {"none": 256 * 16, "32B": 32, "64B": 64, "128B": 128}
"""Widest inner box a tensor map may have per swizzle mode (CUDA driver API, cuTensorMapEncodeTiled)."""
L2_PROMOTIONS = ("NONE", "64B", "128B", "256B")
CARVEOUT_PERCENT = 100
"""Of an SM's L1 that a launch asks for as shared memory, so that the pinned CTAs fit."""
LARGEST_EXTENT = 1 << 20  # the kernel keeps row strides and the step along K in 32 bits


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled. `dims`, `box` in elements, innermost first; `strides` in bytes, from dim 1.

    `swizzle` is none, 32B, 64B or 128B, `l2_promotion` NONE, 64B, 128B or 256B. Elements of 2 bytes are bf16, of 4 float32.
    """

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    l2_promotion: str = "128B"
    element_bytes: int = BF16_BYTES


@dataclass(frozen=True)
class InGlobal:
    """A tensor map that lies in global memory: the kernel's parameter is the address of its 128 bytes there."""

    tensor_map: TensorMap


@dataclass(frozen=True)
class Workspace:
    """Global memory of the launch's own, whose first bytes are zeros before it is launched first; from then on it is the kernel's."""

    bytes: int
    zeros: int


@dataclass(frozen=True)
class Plan:
    """One launch. `params` are the kernel's in order: an int pair (value, bytes), a TensorMap passed by value or one InGlobal, or the
    address of a Workspace.

    `dependent`: it may begin before the launch ahead of it in the stream has ended, for whose end the kernel itself waits.
    `sharers`: clusters in a row whose CTAs wait for each other.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[tuple[int, int] | TensorMap | InGlobal | Workspace, ...]
    dependent: bool = False
    sharers: int = 1

    @property
    def together(self) -> int:
        """CTAs in a row that wait for each other, and for no others: those of a cluster, or of several."""
        return math.prod(self.cluster) * self.sharers


def plan(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    problem: tuple[int, int, int],
    addresses: Mapping[str, int],
    sms: int | None = None,
) -> Plan:
    """The launch of C[M][N] = A[M][K] * B of a GEMM variant.

    `problem` is (M, N, K); `addresses` maps a, b and c to device addresses. B is N x K row-major, or K x N where the
    variant's `b_layout` is 0; `sms` is the GPU's own number where there is one. Raises Refused, naming the rule, for a shape, an address or an architecture that the
    variant does not support.
    """
    experiment.check_chip(variant, device.arch)
    for name in ("a", "b", "c"):
        if addresses[name] % 16:
            raise Refused(
                f"{variant.name}: operand {name} is at {addresses[name]:#x}, which is not a multiple of 16 bytes."
            )
    if experiment.multiplies == WGMMA:
        from rungs import wgmma

        return wgmma.plan(experiment, variant, device, problem, addresses, sms)
    check_problem(experiment, variant, problem)
    m, n, k = problem
    values = experiment.values(variant)
    bm, bn, bk = (values[name] for name in ("TILE_M", "TILE_N", "TILE_K"))
    if values["VARIANT_LOAD"] == TMA:
        swizzled = values["VARIANT_SWIZZLE"] == 1
        row_swizzle = f"{bk * BF16_BYTES}B" if swizzled else "none"
        a = TensorMap(addresses["a"], (k, m), (k * BF16_BYTES,), (bk, bm), row_swizzle)
        if b_is_n_by_k(experiment, variant):
            b = TensorMap(addresses["b"], (k, n), (k * BF16_BYTES,), (bk, bn), row_swizzle)
        else:
            b = TensorMap(addresses["b"], (n, k), (n * BF16_BYTES,), (64, bk), "128B" if swizzled else "none")
        check_tensor_map(a, f"{variant.name}, A")
        check_tensor_map(b, f"{variant.name}, B")
        operands: tuple[tuple[int, int] | TensorMap, ...] = (a, b)
    else:
        operands = ((addresses["a"], 8), (addresses["b"], 8))
    tiles, resident = m // bm * (n // bn), (sms or device.sms) * device.pinned(experiment.name)
    return Plan(
        entry=experiment.entry,
        grid=(min(tiles, resident) if values.get("VARIANT_PERSISTENT") else tiles, 1, 1),
        block=(threads(experiment, variant), 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=smem_bytes(experiment, variant, device),
        params=(*operands, (addresses["c"], 8), (m, 4), (n, 4), (k, 4)),
    )


def launch_of(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: tuple[int, ...],
    addresses: Mapping[str, int],
    sms: int | None = None,
) -> Plan:
    """The launch at a point of any experiment: a GEMM's `plan`, or its workload's. Raises Refused as they do."""
    if experiment.workload == GEMM:
        m, n, k = point
        return plan(experiment, variant, device, (m, n, k), addresses, sms)
    from rungs import workloads

    return workloads.of(experiment).plan(experiment, variant, device, point, addresses, sms)


def check_point(experiment: Experiment, variant: Variant, device: Device, point: tuple[int, ...]) -> None:
    """Raises Refused, naming the rule and the fix, for a point of any experiment that the variant does not support."""
    if experiment.workload == GEMM:
        m, n, k = point
        check_problem(experiment, variant, (m, n, k))
    else:
        from rungs import workloads

        workloads.of(experiment).check(experiment, variant, device, point)


def launch_hash(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    points: Iterable[tuple[int, ...]],
    sms: int | None = None,
) -> str:
    """Return a hash of the launches at these points, 16 hexadecimal digits: what the plan says, at buffers of fixed addresses.

    Of a workload that is no GEMM, buffers, made inputs and the units of work take part too. A point that the variant does not support
    counts as refused, whatever the sentence says.
    """
    launches: list[object] = [CARVEOUT_PERCENT]
    for point in points:
        try:
            names: tuple[str, ...] = ("a", "b", "c")
            if experiment.workload != GEMM:
                from rungs import workloads

                workloads.of(experiment).check(experiment, variant, device, point)
                names, decisive = workloads.decisive(experiment, variant, device, point, sms)
                launches.append(decisive)
            addresses = {name: number << 40 for number, name in enumerate(names, start=1)}
            launches.append(asdict(launch_of(experiment, variant, device, point, addresses, sms)))
        except Refused:
            launches.append("refused")
    return sha256_json(launches)[:16]


def resources(experiment: Experiment, variant: Variant, device: Device) -> tuple[int, int, int | None]:
    """(dynamic shared memory in bytes, threads of a block, CTAs that an SM must hold) of a launch; the last is None where
    nothing depends on it. Of a workload that is no GEMM they are those of the base point, or of the first point of the
    sweep that the variant supports. Raises Refused where it supports none.
    """
    if experiment.workload == GEMM:
        need = smem_bytes(experiment, variant, device)
        return need, threads(experiment, variant), device.pinned(experiment.name)
    from rungs import workloads

    workload, refusal = workloads.of(experiment), None
    for point in dict.fromkeys([experiment.base_point, *experiment.shapes(variant)]):
        try:
            workload.check(experiment, variant, device, point)
        except Refused as error:
            refusal = refusal or error
            continue
        names = workload.operands(experiment, variant, device, point, None)
        launched = workload.plan(experiment, variant, device, point, dict.fromkeys(names, 1 << 20), None)
        x, y, z = launched.block
        return launched.smem_bytes, x * y * z, workload.ctas_per_sm(experiment, variant, device, point)
    raise refusal or Refused(f"{variant.name}: its sweeps have no point.")


def threads(experiment: Experiment, variant: Variant) -> int:
    """Threads of a block: the warps that multiply, and the warpgroup of the one that only loads, where there is one."""
    values = experiment.values(variant)
    if experiment.multiplies == WGMMA:
        from rungs import wgmma

        return wgmma.threads(values)
    return 32 * (values["WARP_ROWS"] * values["WARP_COLUMNS"] + 4 * values.get("VARIANT_PRODUCER_WARP", 0))


def b_is_n_by_k(experiment: Experiment, variant: Variant) -> bool:
    """Whether the kernel wants B as N x K row-major, rather than K x N."""
    return experiment.values(variant)["VARIANT_B_LAYOUT"] == 1


def check_problem(experiment: Experiment, variant: Variant, problem: tuple[int, int, int]) -> None:
    """Raises Refused unless the shape is one that every load mode computes right."""
    if experiment.multiplies == WGMMA:
        from rungs import wgmma

        return wgmma.check(experiment, variant, problem)
    m, n, k = problem
    values = experiment.values(variant)
    rows = {"K": k} if b_is_n_by_k(experiment, variant) else {"K": k, "N": n}
    for axis, extent in rows.items():
        if extent * BF16_BYTES % 16:
            raise Refused(
                f"{axis}={extent} gives rows of {extent * BF16_BYTES} bytes, which is not a multiple of the 16 bytes that every"
                f" load mode moves at once: choose {axis} as a multiple of 8."
            )
    for axis, extent, macro in (("M", m, "TILE_M"), ("N", n, "TILE_N"), ("K", k, "TILE_K")):
        tile = values[macro]
        if extent < 1 or extent % tile:
            raise Refused(f"{axis}={extent} is not a positive multiple of B{axis}={tile}: choose a multiple of {tile}.")
        if extent > LARGEST_EXTENT:
            raise Refused(
                f"{axis}={extent} is above the {LARGEST_EXTENT} that 32-bit strides allow: choose a smaller {axis}."
            )


def smem_need(experiment: Experiment, variant: Variant) -> int:
    """Bytes of shared memory that the variant's image takes: its stages, for TMA an 8-byte mbarrier or two for each, its part for
    C, and the SMEM_EXTRA_BYTES that its levels or the constants name.
    """
    values = experiment.values(variant)
    if experiment.multiplies == WGMMA:
        from rungs import wgmma

        return wgmma.smem_need(values)
    tile = (values["TILE_M"] + values["TILE_N"]) * values["TILE_K"] * BF16_BYTES
    barriers = 1 + values.get("VARIANT_PRODUCER_WARP", 0) if values["VARIANT_LOAD"] == TMA else 0
    # C passes through sixteen rows of each warp's own, before the barriers.
    staged_c = values.get("VARIANT_STAGED_C", 0) * 16 * values["WARP_ROWS"] * values["TILE_N"] * BF16_BYTES
    return values["VARIANT_STAGES"] * (tile + 8 * barriers) + staged_c + values.get("SMEM_EXTRA_BYTES", 0)


def smem_bytes(experiment: Experiment, variant: Variant, device: Device) -> int:
    """Dynamic shared memory to launch with: the need, padded so that no more than the pinned CTAs fit on an SM.

    Raises Refused, with the numbers, where the pinned number does not fit.
    """
    ctas = device.pinned(experiment.name)
    need = smem_need(experiment, variant)
    most = min(device.smem_per_sm_bytes // ctas - device.smem_reserved_bytes, device.smem_per_block_bytes)
    if need > most:
        raise Refused(
            f"{variant.name} needs {need} bytes of shared memory, but {ctas} CTAs per SM leave {most} each on {device.arch}:"
            " choose fewer stages."
        )
    one_more = (
        device.smem_per_sm_bytes // (ctas + 1) - device.smem_reserved_bytes
    )  # at most this, and ctas + 1 would fit
    padded = (one_more // 1024 + 1) * 1024
    return max(need, min(padded, most))


def check_tensor_map(tensor_map: TensorMap, name: str) -> None:
    """Raises Refused with the first rule of cuTensorMapEncodeTiled that the arguments break.

    The driver says no more than CUDA_ERROR_INVALID_VALUE. Rules: CUDA driver API 13.0, tensor map object management.
    """
    inner = tensor_map.box[0] * tensor_map.element_bytes
    span = SWIZZLE_SPAN_BYTES[tensor_map.swizzle]
    if not 1 <= len(tensor_map.dims) <= 5 or len(tensor_map.box) != len(tensor_map.dims):
        raise Refused(f"{name}: a tensor map has 1 to 5 dimensions and a box of as many, not {len(tensor_map.dims)}.")
    if len(tensor_map.strides) != len(tensor_map.dims) - 1:
        raise Refused(f"{name}: {len(tensor_map.dims)} dimensions take {len(tensor_map.dims) - 1} strides.")
    if tensor_map.address % 16:
        raise Refused(f"{name}: address {tensor_map.address:#x} is not a multiple of 16 bytes.")
    for extent in tensor_map.dims:
        if not 1 <= extent <= 1 << 32:
            raise Refused(f"{name}: dimension {extent} is not between 1 and 2^32.")
    for stride in tensor_map.strides:
        if stride % 16 or not 0 < stride < 1 << 40:
            raise Refused(f"{name}: stride {stride} is not a multiple of 16 bytes below 2^40.")
    for extent in tensor_map.box:
        if not 1 <= extent <= 256:
            raise Refused(f"{name}: box dimension {extent} is not between 1 and 256: split the box.")
    if tensor_map.l2_promotion not in L2_PROMOTIONS:
        raise Refused(
            f"{name}: there is no L2 promotion {tensor_map.l2_promotion}: choose one of {', '.join(L2_PROMOTIONS)}."
        )
    if inner % 16:
        raise Refused(f"{name}: the box's inner row is {inner} bytes, not a multiple of 16.")
    if tensor_map.swizzle != "none" and inner > span:
        raise Refused(
            f"{name}: the box's inner row is {inner} bytes, wider than the {span} of a {tensor_map.swizzle} swizzle."
        )
