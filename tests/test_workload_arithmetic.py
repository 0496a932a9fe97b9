"""What a launch must give is the same in the arithmetic of numpy and of torch, of which a GPU's results are held against one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rungs import workloads
from rungs.variants import load_device, load_experiment

CASES = [
    (experiment, variant)
    for experiment in map(load_experiment, ("tma_wall", "tma_latency"))
    for variant in sorted(
        {v for ladder in experiment.ladders.values() for v in ladder.rungs.values()}, key=lambda v: v.name
    )
]


@pytest.mark.parametrize(("experiment", "variant"), CASES, ids=[variant.name for _, variant in CASES])
def test_numpy_and_torch_expect_the_same(experiment, variant):
    module, device = workloads.of(experiment), load_device("sm_90a")
    generator = np.random.default_rng(3)
    for point in module.emulated_points(experiment, variant, device):
        inputs = {}
        for name, operand in module.operands(experiment, variant, device, point, None).items():
            if operand.role == "input":
                inputs[name] = (
                    operand.make(generator) if operand.make else generator.integers(-8, 9, operand.shape) * 1.0
                )
        here = module.expected(experiment, variant, device, point, None, inputs)
        tensors = {name: torch.from_numpy(data) for name, data in inputs.items()}
        there = module.expected(experiment, variant, device, point, None, tensors)
        assert set(here) == set(there)
        for name, data in here.items():
            assert there[name].dtype == torch.from_numpy(data).dtype
            np.testing.assert_array_equal(there[name].numpy(), data)
