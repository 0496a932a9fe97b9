"""Cubins and plans on the CUDA driver API: what timing and profiling share. No torch, whose import takes 5 s under ncu."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from rungs import plan as plans
from rungs.errors import RungsError
from rungs.variants import Device, Experiment, Variant

LAUNCHES = 3
"""Of a profiled process: the last is counted, when caches and instruction memory are warm."""
SEED = 1


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


def allow_shared_memory(function: Any, experiment: Experiment, variant: Variant, device: Device) -> None:
    """Let the kernel have the shared memory of its plan, and look at how many CTAs an SM then holds.

    Raises Refused where the shared memory does not fit and RungsError where the occupancy is not the pinned one.
    """
    smem, attribute = plans.smem_bytes(experiment, variant, device), driver.CUfunction_attribute
    for name, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem),
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):
        check(driver.cuFuncSetAttribute(function, name, value), f"Setting {name.name} of {variant.name}")
    threads = plans.threads(experiment, variant)
    found = check(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, smem), f"Occupancy of {variant.name}"
    )
    pinned = device.pinned(experiment.name)
    if found != pinned:
        raise RungsError(
            f"{variant.name} gets {found} CTAs per SM on this GPU where {experiment.name} pins {pinned}: occupancy would be"
            f" a second factor, so correct ctas_per_sm in config/devices/{device.arch}.yaml."
        )


def prepare(function: Any, plan: plans.Plan, name: str) -> Callable[[int], None]:
    """A function that launches the plan on a stream (its handle). The kernel's parameters are marshalled once, here."""
    values: list[Any] = []
    for parameter in plan.params:
        if isinstance(parameter, plans.TensorMap):
            values.append(encode(parameter, name))
        else:
            value, size = parameter
            values.append((ctypes.c_uint64 if size == 8 else ctypes.c_uint32)(value))
    pointers = (ctypes.c_void_p * len(values))(
        *(v.getPtr() if hasattr(v, "getPtr") else ctypes.addressof(v) for v in values)
    )
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.block
    config.sharedMemBytes = plan.smem_bytes
    config.numAttrs = 0
    address = ctypes.addressof(pointers)

    def launch(stream: int, _held: tuple[Any, ...] = (values, pointers)) -> None:
        config.hStream = stream
        check(driver.cuLaunchKernelEx(config, function, address, 0), f"Launching {name}")

    return launch


def encode(tensor_map: plans.TensorMap, name: str) -> Any:
    """The 128 bytes of a tensor map that a kernel takes by value."""
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    prefix = "CU_TENSOR_MAP_"
    return check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(tensor_map.dims),
            tensor_map.address,
            [u64(extent) for extent in tensor_map.dims],
            [u64(stride) for stride in tensor_map.strides],
            [u32(extent) for extent in tensor_map.box],
            [u32(1)] * len(tensor_map.dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"{prefix}SWIZZLE_{tensor_map.swizzle.upper()}"),
            getattr(driver.CUtensorMapL2promotion, f"{prefix}L2_PROMOTION_L2_{tensor_map.l2_promotion}"),
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


def run(
    uuid: str, experiment: Experiment, variant: Variant, device: Device, cubin: Path, problem: tuple[int, int, int]
) -> None:
    """Launch a variant on random inputs, and nothing else, on the GPU of that UUID: the process that ncu watches.

    Raises RungsError for what the driver refuses and for a launch that fails.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    try:
        check(driver.cuInit(0), "Starting CUDA")
    except RuntimeError:  # of the bindings, which look for the driver's library now
        raise RungsError("There is no NVIDIA driver here: run this on a machine with a GPU.") from None
    handle = check(driver.cuDeviceGet(0), f"Finding GPU {uuid}")
    context = check(driver.cuDevicePrimaryCtxRetain(handle), f"Opening GPU {uuid}")
    check(driver.cuCtxSetCurrent(context), f"Opening GPU {uuid}")
    sms = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    library, function = load_function(cubin, experiment.entry)
    allow_shared_memory(function, experiment, variant, device)
    m, n, k = problem
    generator = np.random.default_rng(SEED)
    addresses = {}
    for operand, rows in (("a", m), ("b", n)):
        bits = random_bf16(rows, k, generator)
        if operand == "b" and not plans.b_is_n_by_k(experiment, variant):
            bits = np.ascontiguousarray(bits.T)
        addresses[operand] = int(check(driver.cuMemAlloc(bits.nbytes), f"Allocating {bits.nbytes} bytes"))
        check(driver.cuMemcpyHtoD(addresses[operand], bits.ctypes.data, bits.nbytes), "Copying the operands")
    addresses["c"] = int(check(driver.cuMemAlloc(m * n * plans.BF16_BYTES), "Allocating the result"))
    plan = plans.plan(
        experiment, variant, device, problem, addresses, check(driver.cuDeviceGetAttribute(sms, handle), "Counting SMs")
    )
    launch = prepare(function, plan, variant.name)
    for _ in range(LAUNCHES):
        launch(0)
    check(driver.cuCtxSynchronize(), f"Running {variant.name}")
    check(driver.cuLibraryUnload(library), f"Unloading {cubin}")
