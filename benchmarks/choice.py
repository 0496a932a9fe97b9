"""How far the rung that `python -m rungs choose` takes is from the fastest one, on shapes that a search measured.

    python benchmarks/choice.py benchmarks/results/search_5_fresh.csv

Each CSV is what benchmarks/gemm_search.py wrote. A shape counts where the rung that the rule takes was timed; beside it stands the
fastest of the rungs that the rule knows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import choose
from rungs.tables import grid
from rungs.variants import load_device, load_experiment


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each shape: m, n, k, the rung taken and its ratio to the control, the fastest and its, and the loss (fraction)."""
    experiment, device = load_experiment(choose.EXPERIMENT), load_device(choose.ARCH)
    known = {experiment.variant(rung).name: rung for rung in experiment.choice["rungs"]}
    rows = []
    for shape, timed in frame[frame["variant"].isin(known)].groupby(["m", "n", "k"], sort=False):
        ratios = timed.groupby("variant")["ratio"].median()
        taken = choose.chosen(experiment, tuple(map(int, shape)), device)
        if taken.variant.name in ratios:
            best = ratios.idxmax()
            ratio = ratios[taken.variant.name]
            rows.append((*shape, taken.rung, ratio, known[best], ratios[best], ratio / ratios[best] - 1))
    return pd.DataFrame(rows, columns=["m", "n", "k", "taken", "ratio", "fastest", "best", "loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("searches", nargs="+", type=Path)
    searches = parser.parse_args().searches
    if missing := [str(path) for path in searches if not path.is_file()]:
        sys.exit(f"choice: {missing[0]} is no file: name CSVs that gemm_search.py wrote.")
    found = losses(pd.concat(map(pd.read_csv, searches)))
    lines = [
        ["x".join(map(str, row[:3])), row[3], f"{row[4]:.3f}", row[5], f"{row[6]:.3f}", f"{100 * row[7]:+.1f} %"]
        for row in found.itertuples(index=False)
    ]
    print(grid(["shape", "the rule takes", "of cuBLAS", "fastest", "of cuBLAS", "the rule against it"], lines))
    best = int((found["loss"] == 0).sum())
    print(
        f"\n{best} of {len(found)} shapes get the fastest rung; the median loss is {abs(100 * found['loss'].median()):.1f} %, the most",
        end=" ",
    )
    print(f"{abs(100 * found['loss'].min()):.1f} %.")


if __name__ == "__main__":
    main()
