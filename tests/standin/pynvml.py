"""A stand-in for pynvml: the part of it that rungs uses, over GPUs that a JSON file describes.

RUNGS_STANDIN_NVML names the file; without it (or once it is deleted) there is no driver. It is read again on every call, so a test
can change the machine under a running process:

    {"driver": "580.82.07", "cuda": 13000, "log": "/path/calls.jsonl", "broken": false,
     "gpus": [{"name": "NVIDIA H200", "uuid": "GPU-...", "capability": [9, 0], "memory_bytes": 150754820096,
               "power_limit_w": 700, "supported_mhz": [345, ..., 1980], "idle_mhz": 345, "load_mhz": 1755,
               "lock": "permitted" | "denied" | "unsupported" | "ignored", "sustained_mhz": 1980, "drop_after": null,
               "event_reasons": 0, "old_names": false, "lost": false, "power_w": 650, "temp_c": 60, "processes": [4242],
               "free_bytes": 150000000000, "usual_limit_w": 700, "persistence": 1, "mig": null | 0 | 1, "compute_mode": 0,
               "ecc_errors": 0}]}

Every key but `uuid` has a default. Every setter call, refused ones too, is a line of `log`; the lock in force is the last one that
was granted there, so it outlives the process that made it, as a real one does; the memory clock cannot be locked (nvml.cpp has one
that can). `sustained_mhz` is the highest clock that the load
lets the GPU keep, `drop_after` the number of clock readings of this process after which a lock no longer holds. The asking
process is always among the processes on a GPU.
"""

import json
import os
from types import SimpleNamespace

NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_TEMPERATURE_GPU = 0
_DEFAULTS = {
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "memory_bytes": 150754820096,
    "power_limit_w": 700,
    "supported_mhz": list(range(345, 1981, 15)),
    "idle_mhz": 345,
    "load_mhz": 1755,
    "lock": "permitted",
    "sustained_mhz": 1980,
    "drop_after": None,
    "event_reasons": 0,
    "old_names": False,
    "lost": False,
    "power_w": 650,
    "temp_c": 60,
    "processes": [],
    "free_bytes": 150000000000,
    "usual_limit_w": 700,
    "persistence": 1,
    "mig": None,
    "compute_mode": 0,
    "ecc_errors": 0,
}
_reads = {}


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_LibRmVersionMismatch(NVMLError):
    pass


def _machine():
    try:
        with open(os.environ["RUNGS_STANDIN_NVML"], encoding="utf-8") as file:
            machine = json.load(file)
    except (KeyError, FileNotFoundError):
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found") from None
    if machine.get("broken"):
        raise NVMLError_LibRmVersionMismatch("RM has detected an NVML/RM version mismatch.")
    return machine


def _gpu(uuid):
    for gpu in _machine()["gpus"]:
        if gpu["uuid"] == uuid:
            gpu = _DEFAULTS | gpu
            if gpu["lost"]:
                raise NVMLError_GpuIsLost("GPU is lost")
            return gpu
    raise NVMLError_NotFound("Not Found")


def _record(uuid, call, granted, **arguments):
    log = _machine().get("log")
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"pid": os.getpid(), "uuid": uuid, "call": call, "granted": granted, **arguments}) + "\n"
            )


def _locked(uuid):
    """(min, max) of the lock in force in MHz, or None."""
    log = _machine().get("log")
    if not log or not os.path.exists(log):
        return None
    with open(log, encoding="utf-8") as file:
        calls = [call for call in map(json.loads, file) if call["uuid"] == uuid and call["granted"]]
    return (calls[-1]["min_mhz"], calls[-1]["max_mhz"]) if calls and calls[-1]["call"] == "lock" else None


def _setter(uuid, call, **arguments):
    lock = _gpu(uuid)["lock"]
    _record(uuid, call, lock in ("permitted", "ignored"), **arguments)
    if lock == "denied":
        raise NVMLError_NoPermission("Insufficient Permissions")
    if lock == "unsupported":
        raise NVMLError_NotSupported("Not Supported")


def nvmlInit():
    _machine()


def nvmlSystemGetDriverVersion():
    return _machine().get("driver", "580.82.07")


def nvmlSystemGetCudaDriverVersion_v2():
    return _machine().get("cuda", 13000)


def nvmlDeviceGetCount():
    return len(_machine()["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    return nvmlDeviceGetHandleByUUID(_machine()["gpus"][index]["uuid"])


def nvmlDeviceGetHandleByUUID(uuid):
    return _gpu(uuid)["uuid"]


def nvmlDeviceGetName(handle):
    return _gpu(handle)["name"]


def nvmlDeviceGetUUID(handle):
    return _gpu(handle)["uuid"]


def nvmlDeviceGetCudaComputeCapability(handle):
    return tuple(_gpu(handle)["capability"])


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=_gpu(handle)["memory_bytes"], free=_gpu(handle)["free_bytes"])


def nvmlDeviceGetPowerManagementLimit(handle):
    return _gpu(handle)["power_limit_w"] * 1000


def nvmlDeviceGetPowerManagementDefaultLimit(handle):
    return _gpu(handle)["usual_limit_w"] * 1000


def nvmlDeviceGetPersistenceMode(handle):
    return _gpu(handle)["persistence"]


def nvmlDeviceGetMigMode(handle):
    if _gpu(handle)["mig"] is None:
        raise NVMLError_NotSupported("Not Supported")
    return [_gpu(handle)["mig"]] * 2


def nvmlDeviceGetComputeMode(handle):
    return _gpu(handle)["compute_mode"]


def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    return _gpu(handle)["ecc_errors"]


def nvmlDeviceGetSupportedMemoryClocks(handle):
    if not _gpu(handle)["supported_mhz"]:
        raise NVMLError_NotSupported("Not Supported")
    return [2619, 3201]


def nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz):
    return sorted(_gpu(handle)["supported_mhz"], reverse=True) if memory_mhz == 3201 else []


def nvmlDeviceGetApplicationsClock(handle, kind):
    return max(_gpu(handle)["supported_mhz"], default=0)


def nvmlDeviceGetClockInfo(handle, kind):
    gpu = _gpu(handle)
    locked = _locked(handle)
    if locked is None or gpu["lock"] == "ignored":
        return gpu["load_mhz" if os.environ.get("RUNGS_STANDIN_LOAD") else "idle_mhz"]
    _reads[handle] = _reads.get(handle, 0) + 1
    if gpu["drop_after"] is not None and _reads[handle] > gpu["drop_after"]:
        return gpu["load_mhz"]
    return min(locked[1], gpu["sustained_mhz"])


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    gpu = _gpu(handle)
    if gpu["old_names"]:
        raise NVMLError_FunctionNotFound("Function Not Found")
    return gpu["event_reasons"]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return _gpu(handle)["event_reasons"]


def nvmlDeviceGetPowerUsage(handle):
    return _gpu(handle)["power_w"] * 1000


def nvmlDeviceGetTemperature(handle, sensor):
    return _gpu(handle)["temp_c"]


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid) for pid in [os.getpid(), *_gpu(handle)["processes"]]]


def nvmlDeviceSetGpuLockedClocks(handle, min_mhz, max_mhz):
    _setter(handle, "lock", min_mhz=min_mhz, max_mhz=max_mhz)


def nvmlDeviceResetGpuLockedClocks(handle):
    _setter(handle, "reset")


def nvmlDeviceSetMemoryLockedClocks(handle, min_mhz, max_mhz):
    raise NVMLError_NotSupported("Not Supported")


def nvmlDeviceResetMemoryLockedClocks(handle):
    raise NVMLError_NotSupported("Not Supported")
