"""Cubins and plans on the CUDA driver API: what timing and profiling share. No torch, whose import takes 5 s under ncu."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from rungs import plan as plans
from rungs import workloads
from rungs.errors import Refused, RungsError
from rungs.variants import GEMM, Device, Experiment, Variant

LAUNCHES = 3
"""Of a profiled process: the last is counted, when caches and instruction memory are warm."""
SEED = 1
ELEMENTS = {2: "BFLOAT16", 4: "FLOAT32"}
"""The type of a tensor map's elements by their bytes: a copy does not look at it beyond its size."""


def check(result: Any, what: str) -> Any:
    """The values of a driver call. Raises RungsError with the driver's own name of the error."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        name = driver.cuGetErrorName(error)[1]
        raise RungsError(f"{what} failed with {name.decode() if isinstance(name, bytes) else name}.")
    return values[0] if len(values) == 1 else values


def load_function(cubin: Path, entry: str) -> tuple[Any, Any]:
    """A cubin's kernel in the current context: the library, which must stay loaded while it may run, and the function."""
    nothing: tuple[list[Any], list[Any], int] = ([], [], 0)
    library = check(driver.cuLibraryLoadFromFile(str(cubin).encode(), *nothing, *nothing), f"Loading {cubin}")
    kernel = check(driver.cuLibraryGetKernel(library, entry.encode()), f"Finding {entry} in {cubin}")
    return library, check(driver.cuKernelGetFunction(kernel), f"Finding {entry} in {cubin}")


def allow_shared_memory(
    function: Any,
    experiment: Experiment,
    variant: Variant,
    device: Device,
    smem: int,
    threads: int,
    pinned: int | None,
    instrumented: bool = False,
) -> None:
    """Let the kernel have its dynamic shared memory, and look at how many CTAs of so many threads an SM then holds.

    `pinned` is how many it must be, None where nothing depends on it. Not where the kernel is `instrumented` by a tool, which
    changes that. Raises RungsError where it is another number, Refused where a point of a workload needs more.
    """
    attribute = driver.CUfunction_attribute
    for name, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem),
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, plans.CARVEOUT_PERCENT),
    ):
        check(driver.cuFuncSetAttribute(function, name, value), f"Setting {name.name} of {variant.name}")
    if instrumented:
        return
    found = check(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, smem), f"Occupancy of {variant.name}"
    )
    if experiment.workload != GEMM and pinned is not None and found < pinned:
        raise Refused(
            f"{variant.name} gets {found} CTAs per SM on this GPU where its point needs {pinned}: take a smaller tile, fewer"
            " stages or fewer CTAs."
        )
    if experiment.workload == GEMM and found != pinned:
        raise RungsError(
            f"{variant.name} gets {found} CTAs per SM on this GPU where {experiment.name} pins {pinned}: occupancy would be"
            f" a second factor, so correct its ctas_per_sm, in config/devices/{device.arch}.yaml or in the"
            " experiment's own file."
        )


def prepare(function: Any, plan: plans.Plan, name: str) -> Callable[[int], None]:
    """A function that launches the plan on a stream (its handle). The kernel's parameters are marshalled once, here.

    A tensor map in global memory is copied there now, a workspace allocated: both are freed with the function.
    """
    values: list[Any] = []
    held: list[int] = []
    for parameter in plan.params:
        if isinstance(parameter, plans.TensorMap):
            values.append(encode(parameter, name))
        elif isinstance(parameter, plans.InGlobal):
            held.append(to_global(encode(parameter.tensor_map, name), name))
            values.append(ctypes.c_uint64(held[-1]))
        elif isinstance(parameter, plans.Workspace):
            held.append(to_workspace(parameter, name))
            values.append(ctypes.c_uint64(held[-1]))
        else:
            value, size = parameter
            values.append((ctypes.c_uint64 if size == 8 else ctypes.c_uint32)(value))
    pointers = (ctypes.c_void_p * len(values))(
        *(v.getPtr() if hasattr(v, "getPtr") else ctypes.addressof(v) for v in values)
    )
    config = launch_config(plan)
    address = ctypes.addressof(pointers)

    def launch(stream: int, _held: tuple[Any, ...] = (values, pointers)) -> None:
        config.hStream = stream
        check(driver.cuLaunchKernelEx(config, function, address, 0), f"Launching {name}")

    for taken in held:
        weakref.finalize(launch, _free, taken).atexit = False  # the context goes with the process
    return launch


def launch_config(plan: plans.Plan) -> Any:
    """The driver's form of a plan's grid, block, cluster and shared memory."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.block
    config.sharedMemBytes = plan.smem_bytes
    attributes = []
    if plan.cluster != (1, 1, 1):
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = plan.cluster
        attributes.append(cluster)
    if plan.dependent:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    config.numAttrs = len(attributes)
    if attributes:
        config.attrs = attributes
    return config


def sms_at_once(function: Any, plan: plans.Plan, sms: int, name: str, ctas_per_sm: int = 1) -> int:
    """How many of the GPU's SMs clusters of this launch can hold at once: not all, where an SM of a GPC is left over."""
    cluster = math.prod(plan.cluster)
    if cluster == 1:
        return sms
    config = launch_config(plan)
    clusters = int(check(driver.cuOccupancyMaxActiveClusters(function, config), f"Counting the clusters of {name}"))
    return min(sms, clusters * cluster // ctas_per_sm)


def plan_on(
    function: Any,
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: tuple[int, ...],
    addresses: Mapping[str, int],
    sms: int,
) -> plans.Plan:
    """The launch at a point on a GPU of so many SMs: a grid of one CTA for each has no cluster more than can run at once."""
    of = (experiment, variant, device, point, addresses)
    plan = plans.launch_of(*of, sms)
    if experiment.workload != GEMM:  # `sms` is what clusters can hold already: its operands depend on it too
        return plan
    at_once = sms_at_once(function, plan, sms, variant.name)
    if plan.sharers > 1 and plan.together > at_once * device.pinned(experiment.name):
        raise Refused(
            f"{variant.name} has {plan.together} CTAs that wait for each other, and this GPU runs {at_once} at once: they would wait for"
            " ever, so choose fewer CTAs along K or smaller clusters."
        )
    return plan if at_once == sms else plans.launch_of(*of, at_once)


def _free(address: int) -> None:
    driver.cuMemFree(address)


def to_global(tensor_map: Any, name: str) -> int:
    """The address of a copy in global memory of an encoded tensor map. The caller frees it."""
    address = int(check(driver.cuMemAlloc(128), f"Allocating the tensor map of {name}"))
    check(driver.cuMemcpyHtoD(address, tensor_map.getPtr(), 128), f"Copying the tensor map of {name}")
    return address


def to_workspace(workspace: plans.Workspace, name: str) -> int:
    """The address of a workspace, as it is before the first launch. The caller frees it."""
    address = int(
        check(driver.cuMemAlloc(workspace.bytes), f"Allocating {workspace.bytes} bytes for the sums of {name}")
    )
    check(driver.cuMemsetD8(address, 0, workspace.zeros), f"Clearing the counters of {name}")
    return address


def descriptor_costs(tensor_map: plans.TensorMap, name: str, stream: int = 0, calls: int = 200) -> dict[str, float]:
    """Microseconds of the host for a tensor map per call: the median of `calls`, after as many to warm up.

    `encode` is what a launch pays that builds its map anew and passes it by value, `encode_and_send` one whose kernel finds
    the map in global memory: the copy is only enqueued on the stream.
    """
    address = to_global(encode(tensor_map, name), name)

    def send() -> None:
        made = encode(tensor_map, name)
        check(driver.cuMemcpyHtoDAsync(address, made.getPtr(), 128, stream), f"Sending the tensor map of {name}")

    costs = {}
    for what, act in (("encode", lambda: encode(tensor_map, name)), ("encode_and_send", send)):
        times = []
        for _ in range(2 * calls):
            begin = time.perf_counter_ns()
            act()
            times.append(time.perf_counter_ns() - begin)
        costs[what] = statistics.median(times[calls:]) / 1000
    check(driver.cuStreamSynchronize(stream), f"Sending the tensor map of {name}")
    check(driver.cuMemFree(address), f"Freeing the tensor map of {name}")
    return costs


def encode(tensor_map: plans.TensorMap, name: str) -> Any:
    """The 128 bytes of a tensor map that a kernel takes by value."""
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    prefix = "CU_TENSOR_MAP_"
    # One dimension has no stride, but an empty list would be a null pointer.
    strides = tensor_map.strides or (tensor_map.dims[0] * tensor_map.element_bytes,)
    promotion = tensor_map.l2_promotion if tensor_map.l2_promotion == "NONE" else f"L2_{tensor_map.l2_promotion}"
    return check(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"{prefix}DATA_TYPE_{ELEMENTS[tensor_map.element_bytes]}"),
            len(tensor_map.dims),
            tensor_map.address,
            [u64(extent) for extent in tensor_map.dims],
            [u64(stride) for stride in strides],
            [u32(extent) for extent in tensor_map.box],
            [u32(1)] * len(tensor_map.dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"{prefix}SWIZZLE_{tensor_map.swizzle.upper()}"),
            getattr(driver.CUtensorMapL2promotion, f"{prefix}L2_PROMOTION_{promotion}"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"Encoding a tensor map of {name}",
    )


def random_bf16(rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Standard normal numbers as bf16 bits, shape (rows, columns), dtype uint16."""
    return to_bf16(generator.standard_normal((rows, columns), dtype=np.float32))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The bf16 bits (uint16) nearest to finite float32 values, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def operands(
    experiment: Experiment, variant: Variant, device: Device, point: tuple[int, ...], sms: int, whole: bool = False
) -> dict[str, np.ndarray]:
    """Every buffer of a launch by its name on the host: inputs random, or with `whole` small whole numbers; results poisoned."""
    generator = np.random.default_rng(SEED)
    if experiment.workload == GEMM:
        m, n, k = point
        a, b = ((whole_bf16 if whole else random_bf16)(rows, k, generator) for rows in (m, n))
        if not plans.b_is_n_by_k(experiment, variant):
            b = np.ascontiguousarray(b.T)
        return {"a": a, "b": b, "c": np.full((m, n), POISON, np.uint16)}
    declared = workloads.of(experiment).operands(experiment, variant, device, point, sms)
    fill = "integer" if whole else "normal"
    return {name: workloads.host_values(operand, fill, generator) for name, operand in declared.items()}


def _on_gpu(values: np.ndarray) -> int:
    """The address of a copy in the GPU's memory."""
    values = np.ascontiguousarray(values)
    address = int(check(driver.cuMemAlloc(max(values.nbytes, 16)), f"Allocating {values.nbytes} bytes"))
    check(driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes), "Copying the operands")
    return address


def wrong_elements(
    experiment: Experiment,
    variant: Variant,
    device: Device,
    point: tuple[int, ...],
    sms: int,
    inputs: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
) -> tuple[int, int]:
    """(elements that differ from numpy's, elements) of results on whole numbers, which are exact."""
    if experiment.workload == GEMM:
        a, b = from_bf16(inputs["a"]), from_bf16(inputs["b"])
        right = from_bf16(to_bf16(a @ (b.T if plans.b_is_n_by_k(experiment, variant) else b)))
        return int(np.count_nonzero(from_bf16(found["c"]) != right)), right.size
    declared = workloads.of(experiment).operands(experiment, variant, device, point, sms)
    wide = {name: workloads.wide(inputs[name]) for name, operand in declared.items() if operand.role == "input"}
    expected = workloads.of(experiment).expected(experiment, variant, device, point, sms, wide)
    names = [name for name, operand in declared.items() if operand.role == "output"]
    differ = sum(int(workloads.differs(found[name], expected[name]).sum()) for name in names)
    return differ, sum(found[name].size for name in names)


def whole_bf16(rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """-2 to 2 as bf16 bits: every partial sum of their products is exact."""
    return to_bf16(generator.integers(-2, 3, (rows, columns)).astype(np.float32))


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


LAUNCHED = "launched"
"""What a process that launched its kernel to the end says last: a tool that watched nothing would pass for a clean one."""
POISON = 0xFFFF  # NaN


def run(
    uuid: str,
    experiment: Experiment,
    variant: Variant,
    device: Device,
    cubin: Path,
    problem: tuple[int, ...],
    launches: int = LAUNCHES,
    *,
    instrumented: bool = False,
    compare: bool = False,
    sms: int | None = None,
) -> None:
    """Launch a variant on random inputs, and nothing else, on the GPU of that UUID: the process that a tool watches.

    `instrumented`: the tool changes the kernel, so its occupancy is not looked at. `compare`: on integers, with each launch's
    result held against numpy's. `sms` is how many SMs to pretend. Raises RungsError for what the driver refuses, a launch that
    fails and a result that is wrong.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    try:
        check(driver.cuInit(0), "Starting CUDA")
    except RuntimeError:  # of the bindings, which look for the driver's library now
        raise RungsError("There is no NVIDIA driver here: run this on a machine with a GPU.") from None
    handle = check(driver.cuDeviceGet(0), f"Finding GPU {uuid}")
    context = check(driver.cuDevicePrimaryCtxRetain(handle), f"Opening GPU {uuid}")
    check(driver.cuCtxSetCurrent(context), f"Opening GPU {uuid}")
    there = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    library, function = load_function(cubin, experiment.entry)
    if sms is None:
        sms = int(check(driver.cuDeviceGetAttribute(there, handle), "Counting SMs"))
    of = (experiment, variant, device, problem)
    values = operands(*of, sms, whole=compare)
    addresses = {name: _on_gpu(array) for name, array in values.items()}
    plan = plans.launch_of(*of, addresses, sms)
    x, y, z = plan.block
    if experiment.workload == GEMM:
        pinned: int | None = device.pinned(experiment.name)
    else:
        pinned = workloads.of(experiment).ctas_per_sm(*of)
    allow_shared_memory(function, experiment, variant, device, plan.smem_bytes, x * y * z, pinned, instrumented)
    if experiment.workload != GEMM and (few := sms_at_once(function, plan, sms, variant.name, pinned or 1)) != sms:
        sms = few
        values = operands(*of, sms, whole=compare)
        addresses = {name: _on_gpu(array) for name, array in values.items()}
    launch = prepare(function, plan_on(function, *of, addresses, sms), variant.name)
    for _ in range(launches):
        if compare:  # poisoned again
            for name, array in values.items():
                check(driver.cuMemcpyHtoD(addresses[name], array.ctypes.data, array.nbytes), "Copying the operands")
        launch(0)
        if compare:
            check(driver.cuCtxSynchronize(), f"Running {variant.name}")
            found = {name: np.empty_like(array) for name, array in values.items()}
            for name, array in found.items():
                check(driver.cuMemcpyDtoH(array.ctypes.data, addresses[name], array.nbytes), "Copying the result")
            wrong, size = wrong_elements(*of, sms, values, found)
            if wrong:
                raise RungsError(
                    f"{variant.name} is wrong on integers whose sums are exact: {wrong} of {size} elements differ from numpy's."
                )
    check(driver.cuCtxSynchronize(), f"Running {variant.name}")
    check(driver.cuLibraryUnload(library), f"Unloading {cubin}")
    print(f"rungs: {LAUNCHED} {variant.name}", flush=True)
