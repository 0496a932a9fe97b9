"""From the emulator's CSVs to counts by kind and coverage: `results/<set>/csv/emulate` to `results/<set>/data`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rungs import schemas
from rungs.aggregate import Recording, frame_of, read_recording, where
from rungs.emulator.device import KINDS
from rungs.emulator.metrics import SECTOR
from rungs.results import ResultsSet
from rungs.variants import GEMM, Experiment, Variant, load_experiment

Shape = tuple[int, ...]
LSU = ("ldgsts", "ldg", "stg", "sts", "stsm", "lds", "ldsm")
"""Kinds that go through the load-store unit; a TMA instruction does not."""
SHARED = ("ldgsts", "sts", "stsm", "lds", "ldsm")
"""Kinds with wavefronts in shared memory. TMA has some too, which neither ncu nor the emulator counts."""
PREFIX = {"ladders": "", "factorial": "factorial_"}
"""Part of an experiment -> the start of the names of its data."""


def run(results: Path, experiment_name: str, variants: Sequence[str], part: str) -> None:
    """Write `data/<experiment>/counts.csv` and `coverage.csv` of these variants; of the factorial with its prefix."""
    experiment = load_experiment(experiment_name)
    for kind, frame in count(results, experiment, variants).items():
        schemas.write_csv(
            experiment.kind(kind), frame, results / "data" / experiment_name / f"{PREFIX[part]}{kind}.csv"
        )


def count(results: Path, experiment: Experiment, variants: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The frames `counts` and `coverage` of these variants. Raises RungsError where a CSV is not that of its manifest."""
    rows: list[dict[str, Any]] = []
    coverage: list[dict[str, Any]] = []
    for name in variants:
        variant = experiment.variant(name)
        job = ResultsSet(results).job("emulate", experiment.name, name)
        recording = read_recording(experiment.kind("emulate"), job, name)
        for shape, frame in by_shape(experiment, recording):
            rows += _counts(experiment, variant, shape, frame)
            status, reason = _worst(frame)
            cells = where(experiment, shape)
            coverage.append({"variant": name, "what": "emulate", **cells, "status": status, "reason": reason})
    frames = {"counts": rows, "coverage": coverage}
    return {name: frame_of(experiment.kind(name), found) for name, found in frames.items()}


def by_shape(experiment: Experiment, recording: Recording) -> list[tuple[Shape, pd.DataFrame]]:
    """The rows of each shape that was asked for, in that order; those of the small problem's checks are left out."""
    frame = recording.frame[~recording.frame["metric"].str.startswith("check ")]
    found = frame.groupby(list(experiment.axis_names), sort=False)
    groups = {tuple(int(value) for value in point): rows for point, rows in found}
    return [(shape, groups[shape]) for shape in map(tuple, recording.manifest["shapes"])]


def tiles(experiment: Experiment, variant: Variant, shape: Shape) -> int:
    """K tiles of all tiles of C: how often a CTA loads a tile of A and one of B and multiplies them. What is no GEMM has none:
    its counts are per launch.
    """
    if experiment.workload != GEMM:
        return 1
    values = experiment.values(variant)
    m, n, k = shape
    return -(-m // values["TILE_M"]) * -(-n // values["TILE_N"]) * -(-k // values["TILE_K"])


def _counts(experiment: Experiment, variant: Variant, shape: Shape, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each kind of instruction that is executed; one for a shape that has no counts."""
    status, reason = _worst(frame)
    common = {
        "variant": variant.name,
        "rungs": " ".join(experiment.rung_names(variant)),
        **where(experiment, shape),
        "run_id": frame["run_id"].iloc[0],
        "status": status,
        "reason": reason,
    }
    value = dict(zip(frame["metric"], frame["value"], strict=True))
    each = tiles(experiment, variant, shape) if status == "ok" else 1
    rows = []
    for kind in KINDS if status == "ok" else ():
        if kind in value:
            wavefronts, sectors = value.get(f"wavefronts_{kind}"), value.get(f"sectors_{kind}")
            rows.append(
                common
                | {
                    "kind": kind,
                    "instructions": value[kind],
                    "wavefronts": wavefronts,
                    "conflicts": value.get(f"conflicts_{kind}"),
                    "moved_bytes": value.get(f"bytes_{kind}", None if sectors is None else sectors * SECTOR),
                    "instructions_per_tile": round(value[kind] / each, 4),
                    "wavefronts_per_tile": None if wavefronts is None else round(wavefronts / each, 4),
                }
            )
    empty = ("instructions", "wavefronts", "conflicts", "moved_bytes", "instructions_per_tile", "wavefronts_per_tile")
    return rows or [common | {"kind": "all"} | dict.fromkeys(empty)]


def _worst(frame: pd.DataFrame) -> tuple[str, str]:
    bad = frame[frame["status"] != "ok"]
    return (str(bad["status"].iloc[0]), str(bad["reason"].iloc[0])) if len(bad) else ("ok", "")


# ---- what tables and figures read ------------------------------------------------------------------------------------


class Cell:
    """One variant at one shape: sums over kinds of instruction; `status` is not ok where there are none."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.status, self.reason = str(rows["status"].iloc[0]), str(rows["reason"].iloc[0])
        self._rows = rows.set_index("kind")

    def total(self, column: str, kinds: Sequence[str]) -> float:
        """The sum of a column over those of the kinds that are executed."""
        there = self._rows.index.intersection(list(kinds))
        return float(self._rows.loc[there, column].fillna(0).sum())

    @property
    def wavefronts(self) -> float:
        return self.total("wavefronts", SHARED)

    @property
    def lsu(self) -> float:
        return self.total("instructions", LSU)

    @property
    def wavefronts_per_tile(self) -> float:
        return self.total("wavefronts_per_tile", SHARED)

    @property
    def lsu_per_tile(self) -> float:
        return self.total("instructions_per_tile", LSU)


def read_cells(results: Path, experiment_name: str, part: str = "ladders") -> dict[tuple[str, Shape], Cell]:
    """(variant, shape) -> its counts."""
    experiment = load_experiment(experiment_name)
    path = results / "data" / experiment_name / f"{PREFIX[part]}counts.csv"
    frame = schemas.read_csv(experiment.kind("counts"), path)
    groups = frame.groupby(["variant", *experiment.axis_names], sort=False)
    return {(str(v), tuple(int(value) for value in point)): Cell(rows) for (v, *point), rows in groups}
