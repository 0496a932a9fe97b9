"""A variant of a workload in the emulator: its operands drawn, its plan executed, its outputs held against what is expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rungs import workloads
from rungs.emulator import launch
from rungs.emulator.memory import GlobalMemory
from rungs.variants import Experiment, Variant, load_device


def emulate(
    experiment: Experiment,
    variant: Variant,
    ptx: Path,
    point: tuple[int, ...],
    *,
    arch: str = "sm_90a",
    sms: int | None = None,
    fill: str = "integer",
    seed: int = 1,
    **how: object,
) -> tuple[launch.Result, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The result of the run, the outputs, and what they should be."""
    module, device = workloads.of(experiment), load_device(arch)
    generator, memory = np.random.default_rng(seed), GlobalMemory()
    addresses, inputs = {}, {}
    operands = module.operands(experiment, variant, device, point, sms)
    for name, operand in operands.items():
        if operand.role != "input":
            addresses[name] = memory.reserve(name, operand.shape, operand.dtype)
            continue
        if operand.make:
            data = operand.make(generator)
        elif fill == "integer":
            data = generator.integers(-8, 9, operand.shape).astype(operand.dtype)
        else:
            data = generator.standard_normal(operand.shape).astype(operand.dtype)
        assert (data.shape, data.dtype) == (operand.shape, operand.dtype)
        addresses[name] = memory.put(name, data)
        inputs[name] = data.astype(np.float64) if data.dtype.kind == "f" else data
    plan = module.plan(experiment, variant, device, point, addresses, sms)
    result = launch.run(ptx, plan, memory, seed=seed, **how)  # type: ignore[arg-type]
    wanted = module.expected(experiment, variant, device, point, sms, inputs)
    assert set(wanted) == {name for name, operand in operands.items() if operand.role == "output"}
    return result, {name: memory[name].copy() for name in wanted}, wanted
