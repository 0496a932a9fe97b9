"""Which GPUs a set's ladders were measured on: on a cluster, jobs of one ladder may have met several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rungs.results import ResultsSet
from rungs.variants import Experiment, Ladder


def measured_on(results: Path, kind: str, experiment: str) -> dict[str, str]:
    """Return the UUID of the GPU that each job of a kind measured on."""
    manifests = ResultsSet(results).all_manifests(kind, experiment)
    return {name: str(manifest["gpu"]["uuid"]) for name, manifest in manifests.items()}


def split_ladders(results: Path, experiment: Experiment, ladders: Iterable[str]) -> list[str]:
    """A sentence for each of these ladders whose rungs, or whose floor, were measured on more than one GPU."""
    sweeps = measured_on(results, "sweep", experiment.name)
    floor = measured_on(results, "floor", experiment.name)
    found = (_split(experiment.name, experiment.ladders[name], sweeps, floor) for name in ladders)
    return [sentence for sentence in found if sentence]


def _split(experiment: str, ladder: Ladder, sweeps: Mapping[str, str], floor: Mapping[str, str]) -> str:
    jobs = {rung: sweeps[variant.name] for rung, variant in ladder.rungs.items() if variant.name in sweeps}
    jobs |= {f"floor {job}": uuid for job, uuid in floor.items()} if jobs else {}
    gpus = {uuid: [job for job, where in jobs.items() if where == uuid] for uuid in dict.fromkeys(jobs.values())}
    if len(gpus) < 2:
        return ""
    parts = "; ".join(f"{uuid}: {', '.join(on)}" for uuid, on in gpus.items())
    return (
        f"{experiment}, ladder {ladder.name} was measured on {len(gpus)} GPUs ({parts}): each step is of one of them and the"
        " rungs' shares are not, so to have it of one, delete the CSVs of the others and run again on its node."
    )
