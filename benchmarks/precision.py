"""How well a results set knows its numbers: A/A differences and the widths of the step intervals, shape by shape."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

import numpy as np
import pandas as pd

from rungs import schemas
from rungs.files import manifest_of
from rungs.measure import TWIN


def a_a(results: Path, experiment: str) -> pd.DataFrame:
    """Per shape: the median of binary against twin in each floor job, in percent."""
    found: dict[tuple[int, ...], list[float]] = {}
    for path in sorted((results / "csv" / "floor" / experiment).glob("*.csv*")):
        frame = schemas.read_csv("sweep", path)
        variant = schemas.read_manifest(manifest_of(path))["variant"]
        for shape, rows in frame[frame["status"] == "ok"].groupby(["m", "n", "k"]):
            times = rows.pivot(index="round", columns="arm", values="time_us").dropna()
            found.setdefault(shape, []).append(100 * float(np.median(np.log(times[TWIN] / times[variant]))))
    text = {shape: ", ".join(f"{value:+.2f}" for value in values) for shape, values in found.items()}
    return pd.DataFrame({"A/A %": text}).rename_axis(["m", "n", "k"])


def main(folder: str = "results/recorded/h200", experiment: str = "gemm") -> None:
    results = Path(folder)
    steps = schemas.read_csv("steps", results / "data" / experiment / "steps.csv")
    steps = steps[steps["status"] == "ok"]
    steps["half"] = (steps["high_percent"] - steps["low_percent"]) / 2 / (1 + steps["gain_percent"] / 100)
    widths = steps.groupby(["m", "n", "k"])["half"].agg(["median", "max", "count"])
    print(
        "| M, N, K | A/A in each job, % | half width of the steps' 95 % intervals, % of the ratio: median, widest | steps |"
    )
    print("| --- | --- | --- | --- |")
    for shape, row in a_a(results, experiment).join(widths).iterrows():
        print(
            f"| {', '.join(map(str, shape))} | {row['A/A %']} | {row['median']:.2f}, {row['max']:.2f} | {row['count']:.0f} |"
        )
    wide = int((steps["half"] > 0.3).sum())
    print(
        f"\n{len(steps) - wide} of {len(steps)} intervals are within ±0.3 % of the ratio; the widest is ±{steps['half'].max():.2f} %."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
