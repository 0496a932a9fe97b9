"""What others published: `config/published/`. It is drawn beside a ladder and enters no statistic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungs import schemas
from rungs.clock import slug
from rungs.errors import RungsError
from rungs.variants import CONFIG

FOLDER = CONFIG / "published"
LIBRARY = "cuBLAS"
SIZE = 4096
"""M = N at which most of it was measured, so that what stands beside it is best of that size too."""


@dataclass(frozen=True)
class PublishedLadder:
    """`rungs`: name -> share of the author's own cuBLAS, in percent, in the author's order. `size`: M = N = K."""

    name: str
    size: int
    rungs: Mapping[str, float]


def ladders(names: Sequence[str], folder: Path = FOLDER) -> list[PublishedLadder]:
    """The published ladders of these names, `<project> <gpu>`.

    Raises RungsError for a name that is not there or has no row `cuBLAS` to refer to.
    """
    path = folder / "mma_ladders.csv"
    frame = schemas.read_csv("published", path)
    frame = frame.assign(name=frame["project"] + " " + frame["gpu"])
    whole = sorted(set(frame[frame["rung"] == LIBRARY]["name"]))
    given = {ladder.name: ladder for ladder in ladders_with_shares(folder)}
    found = []
    for name in names:
        if name in given:
            found.append(given[name])
            continue
        if name not in whole:
            raise RungsError(
                f"{path} has no published ladder {name!r} with a row {LIBRARY}: name one of {', '.join([*whole, *given])}."
            )
        rows = frame[frame["name"] == name]
        library = rows[rows["rung"] == LIBRARY].iloc[0]
        rows = rows[(rows["rung"] != LIBRARY) & (rows["size"] == library["size"])]
        shares = {
            rung: 100 * tflops / library["tflops"] for rung, tflops in zip(rows["rung"], rows["tflops"], strict=True)
        }
        found.append(PublishedLadder(name, int(library["size"]), shares))
    return found


def ladders_with_shares(folder: Path = FOLDER) -> list[PublishedLadder]:
    """The published ladders whose authors give the share of cuBLAS themselves, two rungs or more at one size."""
    frame = schemas.read_csv("shares", folder / "hopper_ladders.csv")
    found = []
    for (project, gpu, size), rows in frame.dropna(subset="percent_of_cublas").groupby(["project", "gpu", "size"]):
        if len(rows) > 1:
            shares = dict(zip(rows["rung"], rows["percent_of_cublas"].astype(float), strict=True))
            found.append(PublishedLadder(f"{project} {gpu}", int(size), shares))
    return found


def size_beside(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Of (M, N) that were measured the one to compare at: `SIZE` squared, else the largest square, else the largest."""
    known = set(sizes)
    if (SIZE, SIZE) in known:
        return SIZE, SIZE
    return max({size for size in known if size[0] == size[1]} or known, default=(0, 0))


def best_peers(gpu: str, shape: tuple[int, int, int], instruction: str, folder: Path = FOLDER) -> dict[str, float]:
    """Project -> share of the control in percent of its best kernel at exactly that shape on that GPU (NVML's name).

    Empty where nobody's kernels were run there.
    """
    path = folder / f"{slug(gpu)}_peers.csv"
    if not path.is_file():
        return {}
    frame = schemas.read_csv("peers", path)
    here = frame[frame["instruction"] == instruction]
    for axis, size in zip(("m", "n", "k"), shape, strict=True):
        here = here[here[axis] == size]
    best = here.groupby("project")["ratio_to_control"].max()
    return {project: 100 * float(ratio) for project, ratio in best.items()}


def intensity(gpu_slug: str, folder: Path = FOLDER) -> list[dict[str, float]]:
    """The rows of the seed author's intensity sweep on that GPU, or none where it was not run there."""
    path = folder / f"intensity_{gpu_slug}.csv"
    return schemas.read_csv("intensity", path).to_dict("records") if path.is_file() else []


def tma_throughput(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Rows of TMA loads that Luo et al. timed on an H800 PCIe with 114 SMs: kind, tile_bytes, ctas, gib_per_s."""
    return schemas.read_csv("tma_throughput", folder / "tma_throughput.csv").to_dict("records")


def hopper_latencies(folder: Path = FOLDER) -> dict[str, float]:
    """Quantity -> value, in cycles where it is a latency, as Luo et al. give it for Hopper."""
    frame = schemas.read_csv("hopper_latencies", folder / "hopper_latencies.csv")
    return dict(zip(frame["quantity"], frame["value"].astype(float), strict=True))
