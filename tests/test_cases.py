"""Situations that broke tools like this one, each as a test of its whole kind: what a measurement and a build must survive.

The simulated session has the time of a GPU: what is queued takes its time, and nothing else passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from binaries import toolchain
from rungs import bootstrap, protocol, stats
from rungs import build as rungs_build
from rungs.errors import Refused
from rungs.files import read_json
from rungs.variants import load_device, load_experiment

CALM = protocol.Condition("", 500.0, 60.0)
SETTINGS = protocol.Settings(0.1, 20, 200, 200.0, 1.0, "hot", 7)
SECOND = 1e6
Model = Callable[[str, float], float]


class Device:
    """`model` gives the time of one launch of an arm, in microseconds, at a moment of the device's own time."""

    def __init__(self, model: Model) -> None:
        self.model, self.now, self.launches = model, 0.0, {}

    def capture(self, arm: str, launches: int) -> None:
        self.launches[arm] = launches

    def replay(self, arm: str) -> None:
        self.now += self.model(arm, self.now) * self.launches[arm]

    def event(self) -> float:
        return self.now

    stamp = event

    def wait(self, event: float) -> None:
        pass

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def clock_mhz(self, before: float, after: float) -> float:
        return 1700.0


def job(
    monkeypatch: pytest.MonkeyPatch, model: Model, arms: tuple[str, ...], warmup_s: float = 1.0
) -> list[protocol.Sample]:
    """What a job does with one shape, the first arm being the rung."""
    device = Device(model)
    monkeypatch.setattr(protocol.time, "monotonic", lambda: device.now / SECOND)
    launches = protocol.prepare(device, arms, SETTINGS.sample_us, warmup_s)
    return protocol.run_rounds(device, arms[0], arms, launches, SETTINGS, (512, 512, 256), lambda: CALM)[0]


def log_ratios(samples: list[protocol.Sample], a: str, b: str) -> np.ndarray:
    """log(time of a / time of b), one per round."""
    times = {(sample.round, sample.arm): sample.time_us for sample in samples}
    rounds = sorted({sample.round for sample in samples})
    return np.log([times[number, a] / times[number, b] for number in rounds])


# ---- row 2: whatever changes between one arm and the next ----


def warming(seed: int, per_second: float = 0.0, per_place: float = 0.0, swing: float = 0.0) -> Model:
    """`a` takes 20 us and `b` 1 % longer, with noise of 0.2 %. Everything slows down by `per_second`, by `per_place` with each
    sample since the last pause of the device (here: in a cycle of two), and swings over 30 ms.
    """
    rng, times, samples = np.random.default_rng(seed), {"a": 20.0, "a again": 20.0, "b": 20.2, "control": 12.0}, 0

    def model(arm: str, now: float) -> float:
        nonlocal samples
        samples += 1
        drift = 1 + per_second * now / SECOND + per_place * (samples % 2) + swing * math.sin(now / 30_000)
        return times[arm] * drift * math.exp(rng.normal(0, 0.002))

    return model


DRIFTS = {
    "warming by a tenth each second": {"per_second": 0.1},
    "cooling by a tenth each second": {"per_second": -0.1},
    "every second sample is slower": {"per_place": 0.008},
    "a clock that swings by a fifth": {"swing": 0.2},
}


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_ab_and_ba_agree_within_the_floor_whatever_drifts_between_the_arms(monkeypatch, drift):
    """Row 2. Kind: the machine is not the same for the first and the second arm of a pair."""
    twins = [job(monkeypatch, warming(seed, **drift), ("a", "a again", "control")) for seed in (1, 2, 3)]
    within = [float(np.median(log_ratios(samples, "a again", "a"))) for samples in twins]
    between = [float(np.median(log_ratios(samples, "control", "a"))) for samples in twins]
    floor = stats.floor_of({"shape": within}, {"shape": between}, len(twins))
    ab = bootstrap.median_error(log_ratios(job(monkeypatch, warming(4, **drift), ("a", "b", "control")), "b", "a"))
    ba = bootstrap.median_error(log_ratios(job(monkeypatch, warming(5, **drift), ("b", "a", "control")), "b", "a"))
    # The two jobs have errors of their own, by which they may differ where nothing drifts at all.
    allowed = floor.value + sum((high - low) / 2 for low, high in (ab.interval(), ba.interval()))
    assert abs(ab.value - ba.value) <= allowed
    assert allowed < 0.006, "a floor under which everything agrees would show nothing"
    assert ab.value == pytest.approx(math.log(1.01), abs=0.003)
    assert stats.verdict(*ab.interval(), floor.value) == "faster"


def test_in_a_fixed_order_the_second_arm_would_be_slower():
    """What the test above is about: the same drift, and each round in the same order."""
    device = Device(warming(4, per_place=0.008))
    for arm in ("a", "b", "a again"):
        device.capture(arm, 10)
    seen = []
    for _ in range(40):
        marks, _ = protocol._enqueue(device, ("a", "a again"))
        first, second = (mark[3] - mark[2] for mark in marks)
        seen.append(math.log(second / first))
    assert abs(float(np.median(seen))) > 0.006


# ---- row 3: whatever is slow when a job begins ----


def settling(seed: int, slower: Callable[[str, float], float]) -> Model:
    rng, times = np.random.default_rng(seed), {"rung": 20.0, "before": 20.4, "control": 12.0}
    return lambda arm, now: times[arm] * (1 + slower(arm, now / SECOND)) * math.exp(rng.normal(0, 0.002))


STARTS = {
    "30 % slower for 200 ms": lambda arm, now: 0.3 if now < 0.2 else 0.0,
    "30 % slower for 200 ms, one arm alone": lambda arm, now: 0.3 if now < 0.2 and arm == "rung" else 0.0,
    "an idle clock, a quarter, for 50 ms": lambda arm, now: 3.0 if now < 0.05 else 0.0,
    "faster until the power limit is found": lambda arm, now: -0.15 * math.exp(-now / 0.1),
}


@pytest.mark.parametrize("slower", STARTS.values(), ids=STARTS)
def test_what_differs_when_a_job_begins_is_over_before_the_first_round(monkeypatch, slower):
    """Row 3. Kind: the first milliseconds are not like the rest. Times themselves do not move, nor do their ratios."""
    arms = ("rung", "before", "control")
    steady = job(monkeypatch, settling(1, lambda arm, now: 0.0), arms)
    started = job(monkeypatch, settling(1, slower), arms)
    for arm in arms:
        medians = [np.median([s.time_us for s in samples if s.arm == arm]) for samples in (steady, started)]
        assert medians[1] == pytest.approx(medians[0], rel=0.001)
    first = [sample.time_us for sample in started if sample.round == 1 and sample.arm == "rung"]
    assert first == pytest.approx([20.0], rel=0.01)
    assert np.median(log_ratios(started, "before", "rung")) == pytest.approx(math.log(1.02), abs=0.001)
    assert min(s.time_us * s.launches for s in started) >= SETTINGS.sample_us * 0.99, (
        "also where the clock rose meanwhile"
    )


def test_without_the_warm_up_the_first_rounds_would_be_slow(monkeypatch):
    """What the test above is about."""
    slower = STARTS["30 % slower for 200 ms, one arm alone"]
    samples = job(monkeypatch, settling(1, slower), ("rung", "before", "control"), warmup_s=0.0)
    assert abs(float(np.median(log_ratios(samples, "before", "rung"))) - math.log(1.02)) > 0.1


# ---- rows 23 and 30: a binary that is not what its source says ----

SPILLING = """
extern "C" __global__ void __launch_bounds__(288, MIN_BLOCKS) small(float* out, int n) {
    float held[48];
#pragma unroll
    for (int i = 0; i < 48; ++i) held[i] = out[i * 288 + threadIdx.x];
    for (int k = 0; k < n; ++k) {
#pragma unroll
        for (int i = 0; i < 48; ++i) held[i] = held[i] * held[(i + 1) % 48] + out[k];
    }
#pragma unroll
    for (int i = 0; i < 48; ++i) out[i * 288 + threadIdx.x] = held[i];
}
"""
SERIALISED = """
extern "C" __global__ void small(float* out, unsigned long long a, unsigned long long b, int n) {
    float d[4] = {};
    for (int k = 0; k < n; ++k) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
        d[0] += MIN_BLOCKS;
    }
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; ++i) out[i] = d[i];
}
"""


def built(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, arch: str, min_blocks: int) -> dict:
    """The manifest of a kernel of these lines, compiled like any other."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "small.cu").write_text(source)
    monkeypatch.setattr(rungs_build, "ROOT", folder)
    monkeypatch.setattr(rungs_build, "KERNELS", folder / "kernels")
    unit = rungs_build.Unit("small", "gemm", "small.cu", "small", {"MIN_BLOCKS": min_blocks}, 0, 288)
    monkeypatch.setattr(rungs_build, "unit_of", lambda name, arch: unit)
    rungs_build.sources.cache_clear()
    rungs_build.build("small", arch, folder / "out" / "small.json", toolchain())
    rungs_build.sources.cache_clear()
    return read_json(folder / "out" / "small.json")


@pytest.mark.parametrize(
    ("arch", "min_blocks", "registers"),
    [
        *((arch, 1, None) for arch in ("sm_80", "sm_90a", "sm_120")),
        *((arch, 5, 40) for arch in ("sm_80", "sm_90a", "sm_120")),
        *((arch, 7, 32) for arch in ("sm_80", "sm_90a")),
    ],
)
def test_a_kernel_that_its_launch_bounds_leave_too_few_registers_fails_its_build(
    monkeypatch, tmp_path, arch, min_blocks, registers
):
    """Row 30. Kind: the compiler keeps registers in local memory, silently, and the kernel then measures that."""
    manifest = built(monkeypatch, tmp_path, SPILLING, arch, min_blocks)
    if registers is None:
        assert (manifest["status"], manifest["ptxas"]["spill_store_bytes"]) == ("ok", 0), manifest["reason"]
        return
    assert (manifest["status"], manifest["ptxas"]["registers"]) == ("build failed", registers)
    assert manifest["ptxas"]["spill_store_bytes"] > 0
    assert manifest["reason"].startswith(f"small spills {manifest['ptxas']['spill_store_bytes']} + ")
    assert f"at {registers} registers: it would measure local memory, so give it more registers" in manifest["reason"]
    assert (tmp_path / "out" / "small.cubin").read_bytes() == b"", "nothing that could be timed by mistake"


def test_a_kernel_whose_registers_do_not_fit_the_pinned_ctas_fails_its_build_with_the_numbers(monkeypatch, tmp_path):
    """Kind: the number of CTAs on an SM, which every step takes for the same, is not what was pinned."""
    hungry = SPILLING.replace("48", "128").replace("MIN_BLOCKS", "1")
    manifest = built(monkeypatch, tmp_path, hungry, "sm_90a", 1)
    registers = manifest["ptxas"]["registers"]
    taken = -(-registers // 8) * 8 * 288 * 2
    assert (manifest["status"], manifest["ptxas"]["spill_store_bytes"], taken > 65536) == ("build failed", 0, True)
    assert manifest["reason"] == (
        f"small: {registers} registers x 288 threads x 2 CTAs per SM take {taken} registers, but an SM of sm_90a has 65536: bound"
        " it with __launch_bounds__(288, 2), or pin fewer CTAs."
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"arch": "sm_80", "ctas_per_sm": {"gemm": 2}},
            "abl_L2_R1_bl1_s4_sw1: TMA needs one of sm_90a, sm_100a, sm_120, not sm_80.",
        ),
        (
            {"smem_per_sm_bytes": 102_400, "smem_per_block_bytes": 101_376},
            "abl_L2_R1_bl1_s4_sw1 needs 65568 bytes of shared memory, but 2 CTAs per SM leave 50176 each on sm_90a: choose fewer"
            " stages.",
        ),
        (
            {"warps_per_sm": 8},
            "abl_L2_R1_bl1_s4_sw1: 256 threads x 2 CTAs per SM are 512, but an SM of sm_90a holds 256: pin fewer CTAs in"
            " config/devices/sm_90a.yaml.",
        ),
    ],
)
def test_what_an_architecture_cannot_hold_is_refused_with_the_numbers_before_it_is_compiled(change, sentence):
    device = replace(load_device("sm_90a"), **change)
    experiment = load_experiment("gemm")
    with pytest.raises(Refused) as refusal:
        rungs_build.unit(experiment, experiment.variant("abl_L2_R1_bl1_s4_sw1"), device)
    assert str(refusal.value) == sentence


def test_instructions_that_the_compiler_serialises_fail_the_build(monkeypatch, tmp_path):
    """Row 23. Kind: the compiler changes what was written and says so only in a line of information."""
    manifest = built(monkeypatch, tmp_path, SERIALISED, "sm_90a", 1)
    assert manifest["status"] == "build failed"
    assert any("C7511" in line for line in manifest["warnings"])
    assert "(C75" in manifest["reason"]
    assert "so the instructions are not those that were declared" in manifest["reason"]
