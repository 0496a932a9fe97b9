"""A results set of a pretend GPU, whose true effects are known: for tests of everything behind the measurement.

`write_set(results, World(...))` writes what the rules `build`, `inspect`, `sweep` and `profile` would under
`results/<set>`: ladder B of `gemm` over the ten shapes (or the variants and shapes that the world names), the three
floor jobs, and manifests whose hashes are right. The pretend times follow `World.time_us`; on top lie the clock's
drift, common to all arms of a round, and noise of each arm that is correlated from round to round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rungs import schemas
from rungs.files import sha256_bytes, sha256_file, write_json, write_text
from rungs.variants import Experiment, Variant, load_device, load_experiment

Shape = tuple[int, int, int]
ARCH = "sm_90a"
SMS = 132
LADDER_B = ("B0", "B1", "B2", "B3", "B4", "B5", "B6", "B7")
SPEED = {
    (0, 1): 0.33,
    (1, 1): 0.32,
    (0, 2): 0.42,
    (1, 2): 0.47,
    (1, 3): 0.52,
    (1, 4): 0.53,
    (2, 1): 0.34,
    (2, 2): 0.505,
    (2, 3): 0.58,
    (2, 4): 0.57,
}
"""Share of the control that a rung reaches for long K, by (load, stages)."""
PROFILE_METRICS = {
    "smsp__inst_executed.sum": ("inst", 9.4e7),
    "smsp__inst_executed_op_ldsm.sum": ("inst", 8.4e6),
    "smsp__inst_executed_op_shared_st.sum": ("inst", 4.2e6),
    "smsp__inst_executed_op_ldgsts.sum": ("inst", 4.2e6),
    "smsp__inst_executed_op_tma_ld.sum": ("inst", 2.6e5),
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum": ("", 3.4e7),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", 0.0),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", 1.2e4),
    "l1tex__m_xbar2l1tex_read_bytes_mem_lg_op_ld.sum": ("byte", 2.1e9),
    "dram__bytes.sum": ("byte", 1.0e8),
    "lts__t_sector_hit_rate.pct": ("%", 75.0),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", 60.0),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", 24.6),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", 2.5),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", 1.4),
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": ("inst", 0.9),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", 0.4),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", 1.0),
}
"""Metric -> unit and a value from which the rungs' values are made."""


@dataclass(frozen=True)
class World:
    """What is measured and what the pretend GPU does. Times in us, log-speeds and noise as fractions.

    `failures`: (variant, shape) -> (status, reason). `flagged`: rounds that another process disturbed. `results`:
    (variant, shape) -> the hash of a deviating result. `ctas`: variant -> CTAs per SM where not 2. `manifest`: keys
    that replace those of every sweep manifest; `manifests` the same per variant. `effects`: factor -> level -> percent
    that the level makes any variant faster, on top of load and stages. `between`: deviation of the control's log-time
    from job to job, drawn anew for every job and shape, on top of `job_shift`.
    """

    variants: Sequence[str] = LADDER_B
    shapes: Sequence[Shape] = ()
    rounds: int = 30
    noise: float = 0.002
    correlation: float = 0.3
    drift: float = 0.2
    job_shift: float = 0.0003
    gains: Mapping[str, float] = field(default_factory=dict)
    effects: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    between: float = 0.0
    failures: Mapping[tuple[str, Shape], tuple[str, str]] = field(default_factory=dict)
    flagged: Sequence[int] = ()
    results: Mapping[tuple[str, Shape], str] = field(default_factory=dict)
    ctas: Mapping[str, int] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inspect: bool = True
    floor_jobs: int = 3
    profile: str = "ok"
    seed: int = 1

    def time_us(self, arm: str, shape: Shape) -> float:
        """True time of a launch of a variant or of `control` at 1980 MHz; `gains` (percent) make a variant faster."""
        m, n, k = shape
        resident = min(1.0, (m // 128) * (n // 128) / SMS)
        control = 3.0 + 2 * m * n * k / (760e6 * resident)
        if arm == "control":
            return control
        levels = dict(self.experiment.variant(arm).levels)
        share = SPEED[levels["load"], levels["stages"]] * max(0.2, 1 - 0.08 * levels["stages"] ** 2 * 256 / k)
        gains = [
            self.gains.get(arm, 0.0),
            *(self.effects.get(name, {}).get(level, 0.0) for name, level in levels.items()),
        ]
        return control / share / math.prod(1 + gain / 100 for gain in gains)

    def gain_percent(self, source: str, target: str, shape: Shape) -> float:
        """The true gain of a step."""
        return 100 * (self.time_us(source, shape) / self.time_us(target, shape) - 1)

    @property
    def experiment(self) -> Experiment:
        return load_experiment("gemm")

    def all_shapes(self) -> list[Shape]:
        return list(self.shapes) or self.experiment.shapes()

    def all_variants(self) -> list[Variant]:
        return [self.experiment.variant(name) for name in self.variants]


def correlated(rng: np.random.Generator, rounds: int, correlation: float, series: int = 1) -> np.ndarray:
    """Stationary AR(1) noise of unit variance, shape (series, rounds)."""
    noise = rng.standard_normal((series, rounds))
    for i in range(1, rounds):
        noise[:, i] = correlation * noise[:, i - 1] + math.sqrt(1 - correlation**2) * noise[:, i]
    return noise


def write_set(results: Path, world: World | None = None) -> World:
    """Write a whole set; returns its world."""
    world = world or World()
    experiment = world.experiment
    needed = dict.fromkeys(v for variant in world.all_variants() for v in (*experiment.predecessors(variant), variant))
    for variant in needed:
        write_build(results, world, variant)
        if world.inspect:
            write_inspect(results, world, variant)
    for variant in world.all_variants():
        write_sweep(results, world, variant)
        if world.profile:
            write_profile(results, world, variant)
    for job in range(1, world.floor_jobs + 1):
        write_sweep(results, world, experiment.floor_variant, job)
    return world


def build_id(variant: str) -> str:
    return sha256_bytes(f"build {variant}".encode())[:16]


def write_build(results: Path, world: World, variant: Variant) -> None:
    folder = results / "build" / ARCH / variant.name
    write_text(folder / f"{variant.name}.cubin", f"cubin of {variant.name}\n")
    write_text(folder / f"{variant.name}.ptx", f"// ptx of {variant.name}\n")
    sources = {"kernels/gemm/gemm.cu": sha256_bytes(b"gemm"), "kernels/ptx.cuh": sha256_bytes(b"ptx")}
    manifest = {
        "kind": "build",
        "variant": variant.name,
        "experiment": "gemm",
        "arch": ARCH,
        "status": "ok",
        "reason": "",
        "build_id": build_id(variant.name),
        "source_hash": sha256_bytes(b"source"),
        "sources": sources,
        "macros": world.experiment.macros(variant, load_device(ARCH)),
        "flags": ["-O3", "-lineinfo"],
        "compiler": {"nvcc": "13.0.88", "ptxas": "13.0.88"},
        "cubin_sha256": sha256_file(folder / f"{variant.name}.cubin"),
        "code_hash": sha256_bytes(variant.name.encode()),
        "ptx_sha256": sha256_file(folder / f"{variant.name}.ptx"),
        "ptxas": {
            "registers": _registers(variant),
            "stack_bytes": 0,
            "spill_store_bytes": 0,
            "spill_load_bytes": 0,
            "smem_static_bytes": 0,
            "barriers": 1,
        },
        "warnings": [],
        "smem_dynamic_bytes": 16384 * variant.level("stages"),
        "threads": 256,
    }
    write_json(folder / f"{variant.name}.json", manifest)


def _registers(variant: Variant) -> int:
    return {0: 126, 1: 122, 2: 120}[variant.level("load")] + (variant.level("stages") == 3)


def write_inspect(results: Path, world: World, variant: Variant) -> None:
    copies = {
        0: {"LDG.E.128": 4, "STS.128": 4},
        1: {"LDGSTS.E.BYPASS.128": 4},
        2: {"UTMALDG.2D": 2, "SYNCS.PHASECHK": 1},
    }
    loop = {"HMMA.16816.F32.BF16": 32, "LDSM.16.M88.4": 12, "BAR.SYNC": 1, **copies[variant.level("load")]}
    resources = {
        "registers": _registers(variant),
        "ctas_per_sm": world.ctas.get(variant.name, 2),
        "smem_dynamic_bytes": 16384 * variant.level("stages"),
        "stack_bytes": 0,
    }
    rows = [("opcode", name, count) for name, count in loop.items()]
    rows += [("opcode_total", name, count * 2) for name, count in loop.items()]
    rows += [("resource", name, value) for name, value in resources.items()]
    rows += [("evidence", "mma.sync", 32)]
    frame = pd.DataFrame(rows, columns=["kind", "name", "value"]).assign(
        variant=variant.name, arch=ARCH, status="ok", reason=""
    )
    schemas.write_csv("inspect", frame, results / "csv" / "inspect" / ARCH / f"{variant.name}.csv")


def write_sweep(results: Path, world: World, variant: Variant, job: int = 0) -> None:
    """The sweep of a rung, or with `job` from 1 on a floor job of it."""
    experiment = world.experiment
    names = [variant.name]
    if not job:
        names += [predecessor.name for predecessor in experiment.predecessors(variant)]
    arms = [*names, *(["twin"] if job else []), "control"]
    seed = sha256_bytes(f"{world.seed} {variant.name} {job}".encode())
    rng = np.random.default_rng(int(seed[:8], 16))
    run_id = seed[:8]
    frames = [_shape(world, variant, shape, arms, rng, job) for shape in world.all_shapes()]
    frame = pd.concat(frames, ignore_index=True).assign(run_id=run_id)
    folder = results / "csv" / ("floor" if job else "sweep") / "gemm"
    path = folder / (f"{job}.csv" if job else f"{variant.name}.csv")
    schemas.write_csv("sweep", frame, path)
    shapes = []
    for shape in world.all_shapes():
        failed = (variant.name, shape) in world.failures
        contract = experiment.contract(variant)
        digest = world.results.get((variant.name, shape), sha256_bytes(f"{contract} {shape}".encode()))
        described = {"m": shape[0], "n": shape[1], "k": shape[2], "stop": "failed" if failed else "interval"}
        if not failed:
            described |= {
                "launches": 20,
                "rounds": world.rounds,
                "bytes_between_uses": 3 * 2 * shape[0] * shape[2],
                "error": 0.0017,
            }
            described |= {"result_fingerprint": digest, "contract": contract}
        shapes.append(described)
    manifest = {
        "kind": "sweep",
        "run_id": run_id,
        "experiment": "gemm",
        "variant": variant.name,
        "rungs": experiment.rung_names(variant),
        "arch": ARCH,
        "arms": {arm: _binary(results, variant.name if arm == "twin" else arm) for arm in arms if arm != "control"},
        "control": {"name": "torch.matmul", "dtype": "bfloat16", "layout": "NT"},
        "gpu": GPU,
        "clock": {
            "mode": "observe",
            "reason": "The driver does not permit it.",
            "requested_mhz": None,
            "read_back_mhz": None,
            "idle_mhz": 345,
            "load_mhz": 1755,
            "supported_mhz": [1980, 1755, 1425, 345],
        },
        "protocol": {
            "hash": "0123456789abcdef",
            "target_percent": 0.3,
            "rounds_min": 20,
            "rounds_max": 240,
            "sample_us": 200,
            "warmup_s": 1.0,
            "seed": 20260101,
        },
        "fill": "normal",
        "l2": "hot",
        "dtype": "bfloat16",
        "software": {
            "python": "3.11",
            "torch": "2.13.0",
            "cuda": "13.0",
            "snakemake": "9.27.1",
            "git": "0" * 40,
            "rungs": "0.1.0",
        },
        "shapes": shapes,
        "csv_sha256": sha256_file(path),
        "measured_at": "2026-11-29T12:00:00Z",
    }
    write_json(
        path.with_suffix(".json"),
        {**manifest, **world.manifest, **({} if job else world.manifests.get(variant.name, {}))},
    )


GPU = {
    "name": "NVIDIA H200",
    "slug": "h200",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "sms": SMS,
    "driver": "580.65.06",
    "memory_bytes": 150754820096,
    "power_limit_w": 700,
}


def _binary(results: Path, name: str) -> dict[str, str]:
    cubin = results / "build" / ARCH / name / f"{name}.cubin"
    return {
        "variant": name,
        "build_id": build_id(name),
        "source_hash": sha256_bytes(b"source"),
        "cubin_sha256": sha256_file(cubin) if cubin.is_file() else "",
        "code_hash": sha256_bytes(name.encode()),
    }


def _shape(
    world: World, variant: Variant, shape: Shape, arms: Sequence[str], rng: np.random.Generator, job: int
) -> pd.DataFrame:
    """Rows of one shape: rounds x arms, or the one row of a failure."""
    where = dict(zip(("m", "n", "k"), shape, strict=True))
    if not job and (variant.name, shape) in world.failures:
        status, reason = world.failures[variant.name, shape]
        row = {
            **where,
            "round": 0,
            "arm": variant.name,
            "order": 0,
            "launches": 0,
            "time_us": None,
            "sm_mhz": None,
            "throttle": "",
        }
        return pd.DataFrame([{**row, "power_w": None, "temp_c": None, "status": status, "reason": reason}])
    rounds = np.arange(1, world.rounds + 1)
    phase = rng.uniform(0, 2 * np.pi)
    mhz = 1980 * (1 - world.drift * (0.5 + 0.5 * np.sin(phase + rounds / 4)))
    noise = world.noise / math.sqrt(2) * correlated(rng, world.rounds, world.correlation, len(arms))
    true = np.array([world.time_us(variant.name if arm == "twin" else arm, shape) for arm in arms])
    own = job * world.job_shift + (world.between * rng.standard_normal() if world.between else 0.0)
    shift = np.array([own if arm == "control" else 0.0 for arm in arms])
    order = rng.permuted(np.tile(np.arange(len(arms)), (world.rounds, 1)), axis=1)
    disturbed = np.isin(rounds, world.flagged)
    time_us = true * np.exp(noise.T + shift) * (1980 / mhz)[:, None] * np.where(disturbed, 3.0, 1.0)[:, None]
    flag = np.repeat(disturbed, len(arms))
    return pd.DataFrame(
        {
            **where,
            "round": np.repeat(rounds, len(arms)),
            "arm": np.tile(arms, world.rounds),
            "order": order.ravel(),
            "launches": 20,
            "time_us": time_us.ravel().round(5),
            "sm_mhz": np.repeat(mhz.round(1), len(arms)),
            "throttle": np.where(flag, "thermal", "power cap"),
            "power_w": np.repeat((690 - mhz / 100).round(1), len(arms)),
            "temp_c": 55.0,
            "status": np.where(flag, "flagged", "ok"),
            "reason": np.where(flag, "another process (4711) was on the GPU", ""),
        }
    )


def write_profile(results: Path, world: World, variant: Variant) -> None:
    """ncu's counters at the experiment's profile shapes, or with `World.profile` a gap's word in their place."""
    run_id = sha256_bytes(f"profile {variant.name}".encode())[:8]
    rows = []
    shapes = [shape for shape in world.all_shapes() if shape in world.experiment.profile_shapes]
    for shape in shapes or world.all_shapes()[:1]:
        where = dict(zip(("m", "n", "k"), shape, strict=True))
        for i, (metric, (unit, value)) in enumerate(PROFILE_METRICS.items()):
            row = {**where, "metric": metric, "value": None, "unit": unit, "status": world.profile, "reason": ""}
            if world.profile != "ok":
                row |= {"reason": f"ncu: {world.profile}.", "unit": ""}
            elif ("tma" in metric and variant.level("load") != 2) or (
                "ldgsts" in metric and variant.level("load") != 1
            ):
                row["value"] = 0.0
            else:
                scale = 1 + 0.1 * variant.level("load") - 0.05 * variant.level("stages") * (i % 3)
                row["value"] = (
                    value
                    * scale
                    * (shape[2] * shape[0] / 4096**2 if unit in ("inst", "byte", "") and value > 10 else 1)
                )
            rows.append(row)
    frame = pd.DataFrame(rows).assign(run_id=run_id, experiment="gemm", variant=variant.name)
    path = results / "csv" / "profile" / "gemm" / f"{variant.name}.csv"
    schemas.write_csv("profile", frame, path)
    manifest = {
        "kind": "profile",
        "arch": ARCH,
        "run_id": run_id,
        "experiment": "gemm",
        "variant": variant.name,
        "gpu": GPU,
        "software": {"python": "3.11", "torch": "2.13.0", "cuda": "13.0"},
        "binary": _binary(results, variant.name),
        "ncu": {"version": "2025.3", "metrics": list(PROFILE_METRICS)},
        "csv_sha256": sha256_file(path),
    }
    write_json(path.with_suffix(".json"), manifest)
