"""A whole warp-specialised GEMM with wgmma, clusters and TMA stores on the emulator, and mutations of it."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import shared
from binaries import toolchain
from rungs.emulator import launch
from rungs.emulator.alu import round_to_bf16, widen_bf16
from rungs.emulator.machine import SCHEDULES
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.mutations import MUTATIONS
from rungs.emulator.parser import EmulationError
from rungs.plan import Plan, TensorMap

TESTS = Path(__file__).parent
M, N, K = 256, 256, 512
CLUSTER = (2, 1, 1)
STAGE = 2 * 128 * 64 * 2
SMEM = 4 * STAGE + 2 * 64 * 128 * 2 + 64


@functools.cache
def ptx() -> Path:
    """The kernel's PTX, built once, whichever process asks first."""
    path = shared.folder() / "warp_specialised.ptx"
    command = [toolchain().nvcc, "-ccbin", toolchain().host, "-std=c++17", "-arch=sm_90a", "-ptx", "-lineinfo"]
    command += [f"-I{TESTS.parent / 'kernels'}", f"{TESTS / 'data' / 'warp_specialised.cu'}", "-o", f"{path}"]
    with shared.alone("warp_specialised"):
        if not path.exists():
            built = subprocess.run(command, capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
    return path


def run(
    path: Path, shape: tuple[int, int, int] = (M, N, K), grid: int = 2, fill: str = "integer", **how: object
) -> tuple[np.ndarray, np.ndarray, launch.Result]:
    """C and what it should be, in float32; a grid of one cluster takes two tiles for each CTA."""
    m, n, k = shape
    generator, memory = np.random.default_rng(1), GlobalMemory()
    a, b = (
        round_to_bf16(
            generator.integers(-2, 3, (rows, k)).astype("f4")
            if fill == "integer"
            else generator.standard_normal((rows, k), dtype="f4")
        )
        for rows in (m, n)
    )
    maps = (
        TensorMap(memory.put("a", a), (k, m), (2 * k,), (64, 128), "128B"),
        TensorMap(memory.put("b", b), (k, n), (2 * k,), (64, 64), "128B"),
        TensorMap(memory.reserve("c", (m, n), np.uint16), (n, m), (2 * n,), (64, 64), "128B"),
    )
    plan = Plan("warp_specialised", (grid, 1, 1), (384, 1, 1), CLUSTER, SMEM, (*maps, (m, 4), (n, 4), (k, 4)))
    result = launch.run(path, plan, memory, **how)  # type: ignore[arg-type]
    return widen_bf16(memory["c"]), widen_bf16(a) @ widen_bf16(b).T, result


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_right_and_has_no_race(schedule, delivery):
    got, expected, result = run(ptx(), schedule=schedule, delivery=delivery, race=True, seed=3)
    assert np.array_equal(got, widen_bf16(round_to_bf16(expected))) and not result.findings


def test_random_data_and_more_clusters():
    got, expected, _ = run(ptx(), (512, 384, 320), grid=6, fill="normal")
    assert np.linalg.norm(got - expected) <= 2.0**-8 * np.linalg.norm(expected)


def test_its_counts():
    counts = run(ptx())[2].counts
    tiles, steps = M * N // 128**2, K // 64
    assert counts.total("hgmma") == tiles * steps * 2 * 4 * 4  # warpgroups, products of a K tile, warps
    assert counts.total("tma_load") == tiles * steps * 2
    assert counts.total("bytes_tma_load") == tiles * steps * (128 + 128) * 64 * 2  # half of B comes from the other CTA
    assert counts.total("tma_store") == tiles * 4 and counts.total("bytes_tma_store") == M * N * 2
    assert counts.total("stsm") == tiles * 8 * 8 and counts.total("wavefronts_stsm") == 4 * tiles * 8 * 8
    assert counts.total("conflicts_stsm") == 0


IN_FLIGHT = "accesses a register that PTX line .*wgmma.mma_async.* uses until it is retired"
LOADED = r"cp.async.bulk.tensor.* writes byte .* which PTX line \d+ \(wgmma.mma_async.* reads"
TOO_EARLY = r"wgmma.mma_async.* reads byte .* which PTX line \d+ \(cp.async.bulk.tensor.* writes"
TWICE = r"arrives \d times at the mbarrier .* where at most \d"
STUCK = "for ever at phase . of the mbarrier"
REPORTED = {
    "the parity of a wait inverted": rf"{STUCK}|{TWICE}",
    "expect_tx too large": STUCK,
    "expect_tx too small": rf"lands in phase|{STUCK}",
    "an mbarrier of one arrival too many": STUCK,
    "an mbarrier of one arrival too few": rf"for 0 arrivals|{TWICE}",
    "a try_wait dropped": rf"{TWICE}|{TOO_EARLY}",
    "the answer of a try_wait ignored": rf"{TWICE}|{TOO_EARLY}",
    "the fence after mbarrier.init dropped": "a fence.mbarrier_init or fence.proxy.async was expected",
    "a wgmma wait dropped": f"{IN_FLIGHT}|{LOADED}",
    "a wgmma wait weakened": f"{IN_FLIGHT}|{LOADED}",
    "a stage released before the wgmma wait": LOADED,
    "the wgmma fence dropped": "is the first of its warpgroup, where a wgmma.fence was expected",
    "the wgmma commit dropped": IN_FLIGHT,
    "another swizzle in a descriptor": "a wrong result",
    "a wait for a bulk store dropped": r"stmatrix.* writes byte .*\(cp.async.bulk.tensor|may still read shared memory when the",
    "a named barrier dropped": r"stmatrix.* writes byte .*\(cp.async.bulk.tensor|cp.async.bulk.tensor.* reads byte .*\(stmatrix",
    "the fence before a bulk store dropped": r"reads byte .* through the asynchronous proxy, which .*\(stmatrix",
    "an arrival at another CTA dropped": STUCK,
    "a multicast to one CTA only": STUCK,
    "a barrier of the cluster dropped": "initialises, with nothing that orders the two|which may have ended by then",
}
PLACES = 2  # of each mutation, the first and the last


@pytest.mark.parametrize("change", REPORTED)
def test_a_mutation_is_reported(change, tmp_path):
    mutants = MUTATIONS[change].mutate(ptx().read_text(encoding="utf-8"))
    assert mutants, f"{change} applies nowhere"
    for number, text in list(enumerate(mutants))[:: max(1, (len(mutants) - 1) // (PLACES - 1))]:
        path = tmp_path / "mutant.ptx"
        path.write_text(text, encoding="utf-8")
        said = []
        try:
            got, expected, result = run(path, race=True)
            said = [finding.sentence for finding in result.findings]
            said += ["a wrong result"] * (not np.array_equal(got, widen_bf16(round_to_bf16(expected))))
        except EmulationError as error:
            said = [str(error), *(finding.sentence for finding in error.findings)]
        assert any(re.search(REPORTED[change], sentence) for sentence in said), (change, number, said)
