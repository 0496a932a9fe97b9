"""The kernels on a real GPU, skipped where there is none; and what the inputs of the check must be like, anywhere."""

from __future__ import annotations

import pytest
import torch

from rungs import build, clock, gpu
from rungs.variants import load_device, load_experiment

EXPERIMENT = load_experiment("gemm")
GPUS = [found for found in clock.gpus() if found.arch]
TILE_K = EXPERIMENT.constants["TILE_K"]
on_gpu = pytest.mark.skipif(not GPUS, reason="there is no GPU here")


@pytest.mark.parametrize("fill", ["integer", "normal"])
@pytest.mark.parametrize("stale", [1, 2, 3])
def test_the_inputs_show_a_stale_stage(fill, stale):
    """A wait that is one group short multiplies an older tile again: with inputs that repeat along K nobody would see it."""
    generator = torch.Generator().manual_seed(1)
    a = gpu.draw(torch, fill, (128, 8 * TILE_K), generator).double()
    b = gpu.draw(torch, fill, (128, 8 * TILE_K), generator).double()
    right = a @ b.t()
    old = slice((4 - stale) * TILE_K, (5 - stale) * TILE_K)
    new = slice(4 * TILE_K, 5 * TILE_K)
    wrong = right - a[:, new] @ b[:, new].t() + a[:, old] @ b[:, old].t()
    assert float((wrong - right).norm() / right.norm()) > 0.1
    assert float((wrong != right).double().mean()) > 0.8


@pytest.mark.parametrize("k", [8192, 32768])
def test_sums_of_the_integer_inputs_are_exact_in_fp32(k):
    generator = torch.Generator().manual_seed(1)
    a, b = (gpu.draw(torch, "integer", (16, k), generator) for _ in range(2))
    exact = a.double() @ b.double().t()
    assert torch.equal((a.float() @ b.float().t()).double(), exact)
    assert 4 * k < 1 << 24, "no partial sum leaves the integers that fp32 has"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Every fourth estimable variant and all rungs, loaded on the first GPU."""
    chosen, folder = GPUS[0], tmp_path_factory.mktemp("cubins")
    device, tools = load_device(chosen.arch), build.find_toolchain("pip")
    made = gpu.Session(chosen.uuid)
    rungs = {v for ladder in EXPERIMENT.ladders.values() for v in ladder.rungs.values()}
    for variant in dict.fromkeys([*rungs, *EXPERIMENT.estimable()[::4]]):
        manifest = folder / variant.name / f"{variant.name}.json"
        if build.build(variant.name, chosen.arch, manifest, tools)["status"] == "ok":
            made.load(variant.name, EXPERIMENT, variant, device, manifest.with_suffix(".cubin"))
    return made


@on_gpu
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize(("m", "n"), [(128, 128), (256, 384), (1152, 128)])
def test_every_variant_is_right_for_any_number_of_k_tiles(session, m, n, tiles):
    """Fewer tiles than stages, as many, and more: exact on integers, and all of one contract the same on random data."""
    problem = (m, n, tiles * TILE_K)
    session.set_problem(problem, "integer", 1)
    for arm in session.arms:
        outcome = session.outcome(arm)
        assert (outcome.unwritten, outcome.equal) == (0, True), arm
    session.set_problem(problem, "normal", 2)
    bits = {}
    for arm, loaded in session.arms.items():
        outcome = session.outcome(arm)
        assert outcome.error < 1e-2, arm
        bits.setdefault(EXPERIMENT.contract(loaded.variant), set()).add(outcome.bits)
    assert all(len(different) == 1 for different in bits.values()), bits
