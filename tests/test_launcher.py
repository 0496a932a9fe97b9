"""The launcher that a profiler watches: on a driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rungs import launcher
from rungs import plan as plans
from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.variants import load_device, load_experiment

EXPERIMENT = load_experiment("gemm")
DEVICE = load_device("sm_90a")
PROBLEM = (256, 384, 512)
OPERAND_BYTES = [256 * 512 * 2, 384 * 512 * 2, 256 * 384 * 2]


class Driver:
    """Answers every call as a GPU would; `calls` are their names, `refuses` is the name of one that fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = launcher.driver.CUfunction_attribute
    CUdevice_attribute = launcher.driver.CUdevice_attribute
    CUlaunchConfig = SimpleNamespace
    CUlaunchAttribute = launcher.driver.CUlaunchAttribute
    CUlaunchAttributeID = launcher.driver.CUlaunchAttributeID

    def __init__(self, refuses: str = "", ctas: int = 2) -> None:
        self.calls, self.copied, self.launched, self.attributes = [], [], [], {}
        self.refuses, self.ctas, self.next = refuses, ctas, 1 << 30

    def cuGetErrorName(self, error: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_ILLEGAL_ADDRESS"

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        self.next += size
        return 0, self.next - size

    def cuMemcpyHtoD(self, target: int, source: int, size: int) -> tuple[int]:
        self.copied.append(size)
        return (0,)

    def cuFuncSetAttribute(self, function: str, name: object, value: int) -> tuple[int]:
        self.attributes[name.name] = value
        return (0,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: object) -> tuple[int, int]:
        return 0, self.ctas

    def cuLaunchKernelEx(self, config: SimpleNamespace, *_: object) -> tuple[int]:
        self.launched.append(dict(vars(config)))
        return (0,)

    def __getattribute__(self, name: str) -> object:
        own = object.__getattribute__
        if not name.startswith("cu") or name == "cuGetErrorName":
            return own(self, name)
        own(self, "calls").append(name)
        if name == own(self, "refuses"):
            return lambda *_: (1,)
        try:
            return own(self, name)
        except AttributeError:
            return lambda *_: (0, 132) if name == "cuDeviceGetAttribute" else (0, name)


def launch(
    monkeypatch, variant: str, problem: tuple[int, int, int] = PROBLEM, how: dict | None = None, **options: object
) -> Driver:
    fake = Driver(**options)
    monkeypatch.setattr(launcher, "driver", fake)
    monkeypatch.setattr(launcher, "encode", lambda tensor_map, name: SimpleNamespace(getPtr=lambda: tensor_map.address))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launcher.run("GPU-1", EXPERIMENT, EXPERIMENT.variant(variant), DEVICE, "gemm.cubin", problem, **(how or {}))
    return fake


@pytest.mark.parametrize("rung", ["B2", "B5", "A1"])
def test_it_launches_the_plan_three_times_on_operands_of_the_problem_and_waits(monkeypatch, rung):
    fake = launch(monkeypatch, rung)
    variant = EXPERIMENT.variant(rung)
    assert fake.copied == OPERAND_BYTES
    assert len(fake.launched) == launcher.LAUNCHES == 3
    assert fake.calls.index("cuCtxSynchronize") > fake.calls.index("cuLaunchKernelEx")
    plan = plans.plan(EXPERIMENT, variant, DEVICE, PROBLEM, {"a": 16, "b": 16, "c": 16}, 132)
    (first, *_) = fake.launched
    assert (first["gridDimX"], first["blockDimX"], first["sharedMemBytes"]) == (6, 256, plan.smem_bytes)
    assert fake.attributes["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"] == plan.smem_bytes


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_checked_launch_is_held_against_numpy(monkeypatch, capsys, wrong):
    """The driver answers with the product of what was copied to it, or with that but for some elements."""
    m, n, k = PROBLEM
    operands = []

    def copy_in(self, target, source, size):
        operands.append(np.ctypeslib.as_array((ctypes.c_uint16 * (size // 2)).from_address(source)).copy())
        return (0,)

    def copy_out(self, target, source, size):
        a, b = (launcher.from_bf16(bits).reshape(-1, k) for bits in operands[:2])
        product = launcher.to_bf16(a @ b.T).ravel()
        product[:wrong] ^= 0x8001
        ctypes.memmove(target, product.ctypes.data, size)
        return (0,)

    monkeypatch.setattr(Driver, "cuMemcpyHtoD", copy_in)
    monkeypatch.setattr(Driver, "cuMemcpyDtoH", copy_out, raising=False)
    how = {"compare": True, "launches": 2, "instrumented": True, "sms": 1}
    if wrong:
        with pytest.raises(RungsError, match=rf"wrong on integers .*: 3 of {m * n} elements differ from numpy's\."):
            launch(monkeypatch, "B3", how=how, ctas=1)
        return
    fake = launch(monkeypatch, "B3", how=how, ctas=1)
    assert len(fake.launched) == 2 and len(operands) == 3 + 2 * 3, (
        "all is copied anew before each launch, the poison too"
    )
    assert "cuOccupancyMaxActiveBlocksPerMultiprocessor" not in fake.calls
    assert capsys.readouterr().out == f"rungs: launched {EXPERIMENT.variant('B3').name}\n"


MAP = plans.TensorMap(1 << 20, (1024, 64), (4096,), (32, 32), "none", "256B", 4)


def prepared(monkeypatch, **plan: object) -> tuple[Driver, object]:
    fake = Driver()
    monkeypatch.setattr(launcher, "driver", fake)
    monkeypatch.setattr(launcher, "encode", lambda tensor_map, name: SimpleNamespace(getPtr=lambda: tensor_map.address))
    whole = {"grid": (8, 1, 1), "block": (32, 1, 1), "cluster": (1, 1, 1), "smem_bytes": 0, "params": ()} | plan
    return fake, launcher.prepare("kernel", plans.Plan("k", **whole), "k")


def test_a_cluster_is_an_attribute_of_the_launch(monkeypatch):
    for cluster in ((1, 1, 1), (4, 1, 1)):
        fake, start = prepared(monkeypatch, cluster=cluster)
        start(0)
        (config,) = fake.launched
        if cluster == (1, 1, 1):
            assert config["numAttrs"] == 0
            continue
        (attribute,) = config["attrs"]
        assert config["numAttrs"] == 1
        assert attribute.id == launcher.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        found = attribute.value.clusterDim
        assert (found.x, found.y, found.z) == cluster


def test_a_workloads_clusters_are_no_more_than_the_gpu_holds_at_once(monkeypatch):
    """31 clusters of four on 132 SMs, as where a GPC has fourteen of them: a 32nd would wait until the others have ended."""
    monkeypatch.setattr(Driver, "cuOccupancyMaxActiveClusters", lambda *_: (0, 31), raising=False)
    fake = Driver(ctas=1)
    monkeypatch.setattr(launcher, "driver", fake)
    monkeypatch.setattr(launcher, "encode", lambda tensor_map, name: SimpleNamespace(getPtr=lambda: tensor_map.address))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wall = load_experiment("tma_wall")
    launcher.run("GPU-1", wall, wall.variant("WC4"), DEVICE, "wall.cubin", (8192, 1, 8, 16384, 1))
    assert {config["gridDimX"] for config in fake.launched} == {124}
    assert fake.copied[-1] == 4 * 124, "a sum for each CTA"


def test_a_tensor_map_in_global_memory_lives_as_long_as_its_launch(monkeypatch):
    fake, start = prepared(monkeypatch, params=(plans.InGlobal(MAP), (7, 4)))
    assert fake.copied == [128] and fake.calls.count("cuMemAlloc") == 1
    start(0)
    assert "cuMemFree" not in fake.calls
    del start
    assert fake.calls.count("cuMemFree") == 1


def test_a_workspace_is_cleared_once_and_lives_as_long_as_its_launch(monkeypatch):
    fake, start = prepared(monkeypatch, params=(plans.Workspace(4096, 256), (7, 4)))
    assert fake.calls.count("cuMemAlloc") == fake.calls.count("cuMemsetD8") == 1
    start(0)
    start(0)
    assert fake.calls.count("cuMemsetD8") == 1 and "cuMemFree" not in fake.calls
    del start
    assert fake.calls.count("cuMemFree") == 1


def test_what_a_host_pays_for_a_tensor_map(monkeypatch):
    fake, _ = prepared(monkeypatch)
    costs = launcher.descriptor_costs(MAP, "k", calls=5)
    assert set(costs) == {"encode", "encode_and_send"} and all(cost > 0 for cost in costs.values())
    assert fake.calls.count("cuMemcpyHtoDAsync") == 10
    assert fake.calls.count("cuMemAlloc") == fake.calls.count("cuMemFree") == 1


@pytest.mark.parametrize(
    ("promotion", "bytes", "wanted"), [("NONE", 2, ("BFLOAT16", "NONE")), ("256B", 4, ("FLOAT32", "L2_256B"))]
)
def test_a_tensor_map_is_encoded_with_its_type_and_promotion(monkeypatch, promotion, bytes, wanted):
    given = []
    real = launcher.driver
    fake = SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if name[:2] in ("CU", "cu")})
    fake.cuTensorMapEncodeTiled = lambda *arguments: given.append(arguments) or (real.CUresult.CUDA_SUCCESS, "map")
    monkeypatch.setattr(launcher, "driver", fake)
    made = plans.TensorMap(1 << 20, (1024, 64), (4096,), (32, 32), "128B", promotion, bytes)
    assert launcher.encode(made, "k") == "map"
    ((type, rank, address, *_, swizzle, l2, _),) = given
    assert (rank, address, type.name, l2.name) == (
        2,
        1 << 20,
        f"CU_TENSOR_MAP_DATA_TYPE_{wanted[0]}",
        f"CU_TENSOR_MAP_L2_PROMOTION_{wanted[1]}",
    )
    assert swizzle.name == "CU_TENSOR_MAP_SWIZZLE_128B"


def test_it_sees_only_the_gpu_of_that_uuid(monkeypatch):
    import os

    launch(monkeypatch, "B3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    ("call", "what"),
    [("cuInit", "Starting CUDA"), ("cuLaunchKernelEx", "Launching abl_"), ("cuCtxSynchronize", "Running abl_")],
)
def test_what_the_driver_refuses_is_one_sentence(monkeypatch, call, what):
    with pytest.raises(RungsError, match=rf"{what}.*failed with CUDA_ERROR_ILLEGAL_ADDRESS\."):
        launch(monkeypatch, "B3", refuses=call)


def test_another_occupancy_than_the_pinned_one_is_refused(monkeypatch):
    with pytest.raises(RungsError, match="gets 1 CTAs per SM on this GPU where gemm pins 2"):
        launch(monkeypatch, "B3", ctas=1)


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even():
    values = np.random.default_rng(1).standard_normal(1 << 16, dtype=np.float32)
    ties = (np.arange(0x3F80, 0x4080, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for given in (values, ties, -ties, np.array([0.0, -0.0, 1e-40, 3e38], np.float32)):
        expected = torch.from_numpy(given).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(launcher.to_bf16(given), expected)


def test_the_operands_are_normal_and_the_same_each_time():
    first, second = (launcher.random_bf16(128, 256, np.random.default_rng(launcher.SEED)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    numbers = torch.from_numpy(first.view(np.int16)).view(torch.bfloat16).float()
    assert abs(float(numbers.mean())) < 0.02
    assert abs(float(numbers.std()) - 1) < 0.02


def test_launching_imports_nothing_heavy():
    """torch takes 5 s to import under ncu, and each import is paid for every variant and shape."""
    code = "import sys, rungs.cli, rungs.launcher, rungs.binary; print([m for m in ('torch', 'scipy', 'pandas') if m in sys.modules])"
    env = os.environ | {"PYTHONPATH": str(ROOT / "workflow")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("element_bytes", "name"), [(2, "BFLOAT16"), (4, "FLOAT32")])
def test_a_tensor_map_says_what_its_elements_are(element_bytes, name, monkeypatch):
    given = []
    monkeypatch.setattr(
        launcher.driver, "cuTensorMapEncodeTiled", lambda *arguments: given.append(arguments) or (0, "map")
    )
    tensor_map = plans.TensorMap(1 << 20, (32, 64), (32 * element_bytes,), (32, 8), "none", element_bytes=element_bytes)
    assert launcher.encode(tensor_map, "x") == "map"
    assert given[0][0] == getattr(launcher.driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")
