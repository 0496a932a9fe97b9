"""The kernels on a real GPU, skipped where there is none; and what the inputs of the check must be like, anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from binaries import toolchain
from rungs import build, clock, gpu, inputs, launcher
from rungs.files import ROOT
from rungs.variants import WGMMA, load_device, load_experiment

EXPERIMENT = load_experiment("gemm")
GPUS = [found for found in clock.gpus() if found.arch]
TILE_K = EXPERIMENT.constants["TILE_K"]
on_gpu = pytest.mark.skipif(not GPUS, reason="there is no GPU here")


@pytest.mark.parametrize("fill", ["integer", "normal"])
@pytest.mark.parametrize("stale", [1, 2, 3])
def test_the_inputs_show_a_stale_stage(fill, stale):
    """A wait that is one group short multiplies an older tile again: with inputs that repeat along K nobody would see it."""
    generator = torch.Generator().manual_seed(1)
    a = inputs.draw(torch, fill, (128, 8 * TILE_K), generator).double()
    b = inputs.draw(torch, fill, (128, 8 * TILE_K), generator).double()
    right = a @ b.t()
    old = slice((4 - stale) * TILE_K, (5 - stale) * TILE_K)
    new = slice(4 * TILE_K, 5 * TILE_K)
    wrong = right - a[:, new] @ b[:, new].t() + a[:, old] @ b[:, old].t()
    assert float((wrong - right).norm() / right.norm()) > 0.1
    assert float((wrong != right).double().mean()) > 0.8


@pytest.mark.parametrize("k", [8192, 32768])
def test_sums_of_the_integer_inputs_are_exact_in_fp32(k):
    generator = torch.Generator().manual_seed(1)
    a, b = (inputs.draw(torch, "integer", (16, k), generator) for _ in range(2))
    exact = a.double() @ b.double().t()
    assert torch.equal((a.float() @ b.float().t()).double(), exact)
    assert 4 * k < 1 << 24, "no partial sum leaves the integers that fp32 has"


@pytest.fixture(scope="module", params=["gemm", "gemm_tuned", "hopper_gemm"])
def loaded(request, tmp_path_factory):
    """(experiment, session): all rungs, and of mma.sync every fourth estimable variant, loaded on the first GPU."""
    chosen, folder = GPUS[0], tmp_path_factory.mktemp("cubins")
    experiment, device, tools = load_experiment(request.param), load_device(chosen.arch), toolchain()
    made = gpu.Session(chosen.uuid)
    rungs = {v for ladder in experiment.ladders.values() for v in ladder.rungs.values()}
    variants = list(dict.fromkeys([*rungs, *(() if experiment.multiplies == WGMMA else experiment.estimable()[::4])]))
    manifests = [folder / variant.name / f"{variant.name}.json" for variant in variants]
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda path: build.build(path.stem, chosen.arch, path, tools), manifests))
    for variant, path, manifest in zip(variants, manifests, built, strict=True):
        if manifest["status"] == "ok":
            made.load(variant.name, experiment, variant, device, path.with_suffix(".cubin"))
    return experiment, made


# Tiles of C: one, a few, so many that a persistent CTA has several.
@on_gpu
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize(("m", "n"), [(128, 256), (256, 768), (1152, 256), (4096, 4096)])
def test_every_variant_is_right_for_any_number_of_k_tiles(loaded, m, n, tiles):
    """Fewer tiles than stages, as many, and more: exact on integers, and all of one contract the same on random data."""
    experiment, session = loaded
    problem = (m, n, tiles * max(experiment.values(arm.variant)["TILE_K"] for arm in session.arms.values()))
    session.set_problem(problem, "integer", 1)
    for arm in session.arms:
        outcome = session.outcome(arm)
        assert (outcome.unwritten, outcome.equal) == (0, True), arm
    session.set_problem(problem, "normal", 2)
    bits = {}
    for arm, found in session.arms.items():
        outcome = session.outcome(arm)
        assert outcome.error < 1e-2, arm
        bits.setdefault(experiment.contract(found.variant), set()).add(outcome.bits)
    assert all(len(different) == 1 for different in bits.values()), bits


@on_gpu
@pytest.mark.parametrize("problem", [(1, 8, 8), (197, 328, 72), (4095, 4104, 1032)])
def test_wgmma_is_right_for_shapes_that_hang_over_every_edge(loaded, problem):
    experiment, session = loaded
    if experiment.multiplies != WGMMA:
        pytest.skip("takes whole tiles alone")
    session.set_problem(problem, "integer", 1)
    for arm in session.arms:
        outcome = session.outcome(arm)
        assert (outcome.unwritten, outcome.equal) == (0, True), arm


@on_gpu
def test_a_hundred_runs_are_bitwise_equal(loaded):
    """A missing wait shows as a result that moves (case 22); stores of C between two tiles are what once held a read up."""
    _, session = loaded
    session.set_problem((4096, 4096, 256), "normal", 3)
    for arm in session.arms:
        first = session.outcome(arm).bits
        assert {session.outcome(arm).bits for _ in range(99)} == {first}, arm


@on_gpu
@pytest.mark.parametrize("rung", ["D3", "D9", "K6", "K8", "G2", "G7", "G10"])
def test_ctas_that_send_each_other_sums_end_beside_other_processes(rung, tmp_path):
    """Four processes take turns on the GPU, so that CTAs are interrupted while sums are on their way."""
    experiment, chosen = load_experiment("hopper_gemm"), GPUS[0]
    variant = experiment.variant(rung)
    manifest = tmp_path / variant.name / f"{variant.name}.json"
    if build.build(variant.name, chosen.arch, manifest, toolchain())["status"] != "ok":
        pytest.skip(f"{rung} is for another chip")
    command = [sys.executable, "-m", "rungs", "launch", "--experiment", experiment.name, "--arch", chosen.arch]
    command += ["--gpu", chosen.uuid, "--manifest", str(manifest), "--shape", "512,512,8192", "--launches", "100000"]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "workflow"), *sys.path])}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) for _ in range(4)]
    try:
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * 4 and all(launcher.LAUNCHED in text for text in said)
