"""Publish live results: merge a live set's jobs into the recorded set of its GPU, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rungs import aggregate, boards, build, effects, schemas
from rungs.errors import RungsError
from rungs.files import read_json, sha256_bytes, sha256_file, write_json
from rungs.results import COLD, INSPECT, KINDS, RECORDED, STAGED, Job, ResultsSet, measured, write_recorded
from rungs.staleness import stale
from rungs.variants import Experiment, load_experiment

ADDED = {"profile": "Nsight Compute", "sanitize": "Compute Sanitizer"}
"""Kinds that say nothing of time and may be added to the recorded sweeps of the same binaries -> what made them."""

Jobs = dict[str, tuple[bytes | None, Mapping[str, Any]]]
"""Job -> its CSV, if it has one, and its manifest."""


def record(results: Path, experiment_name: str, gaps: bool = False) -> None:
    """Merge a live set's jobs of an experiment into results/recorded/<device>, variant by variant, after verifying each.

    A set measured with cold caches goes to results/recorded/<device>-cold. One without sweeps, only counters of Nsight Compute or what
    Compute Sanitizer said, is added to the recorded sweeps of the same machine code. What is recorded of other variants stays; what is
    recorded of variants that the experiment no longer has goes.

    With `gaps` points without a number (refused, implausible, ...) are published as what they are, but for wrong results. Raises
    RungsError, and changes nothing, where a CSV is not the one of its manifest, a result failed or is stale, the set is a quick
    one, or no table can be made from what would be recorded.
    """
    experiment, live = load_experiment(experiment_name), ResultsSet(results)
    if "-quick" in results.name:
        raise RungsError(f"{results} is a quick look at few shapes: run the full preset before you record.")
    if RECORDED.resolve() in results.resolve().parents:
        raise RungsError(f"{results} is recorded already: name a live set, for example results/h200.")
    jobs = {
        kind: [_publishable(live, experiment, kind, name, gaps) for name in live.jobs(kind, experiment.name)]
        for kind in KINDS
    }
    jobs = {kind: found for kind, found in jobs.items() if found}
    if ("sweep" not in jobs and not jobs.keys() <= ADDED.keys()) or not jobs:
        raise RungsError(
            f"{results} has no sweep of {experiment.name}: run `snakemake sweeps` on a machine with a GPU."
        )
    arch, target = _target(results, [job.manifest for found in jobs.values() for job in found])
    for variant, reason in stale(results, [experiment.name], compare=True).items():
        raise RungsError(f"{variant} in {results} is stale ({reason}): measure it again before you record.")
    new: dict[str, Jobs] = {kind: {job.name: (job.csv, job.manifest) for job in found} for kind, found in jobs.items()}
    if "sweep" in jobs:
        new[INSPECT] = _inspected(live, arch, [job.name for job in jobs["sweep"]])
    try:
        with _alone():
            if "sweep" not in jobs:
                _check_recorded(target, experiment, jobs)
            merged, gone = _merged(target, experiment, new)
            _check_arms(merged, new.get("sweep", {}))
            _write(target, experiment, arch, merged)
    except OSError as error:
        raise RungsError(
            f"{target.path} cannot be written ({error.strerror}): make its folder writable or free some space, and record again."
        ) from None
    if gone:
        print(f"{target.path} holds nothing more of {', '.join(gone)}, which {experiment.name} no longer has.")
    for sentence in boards.split_ladders(target.path, experiment, experiment.ladders) if "sweep" in jobs else []:
        print(sentence)
    many = sum(map(len, jobs.values()))
    what = " and ".join(text for kind, text in ADDED.items() if kind in jobs)
    of = f"{len(jobs['sweep'])} variants" if "sweep" in jobs else what
    print(
        f"Recorded {many} CSVs of {of} in {target.path}: run `snakemake report` to draw them and `python -m rungs readme` to put"
        " them into the README."
    )


def schema_of(experiment: Experiment, kind: str) -> str:
    """Return the CSV kind of a sweep, a floor job, a profile or what Compute Sanitizer said of the experiment."""
    return experiment.kind(kind) if kind in ADDED else aggregate.timed_kind(experiment)


def _publishable(live: ResultsSet, experiment: Experiment, kind: str, name: str, gaps: bool) -> Job:
    """Return a job whose CSV is its manifest's. Raises RungsError for one that holds a failed result."""
    job = live.job(kind, experiment.name, name)
    if not job.intact:
        raise RungsError(f"{job.where} is not the file of its manifest (another hash): delete it and measure again.")
    failed = job.frame(schema_of(experiment, kind))
    failed = failed[~failed["status"].isin(measured(kind))]
    if gaps:
        failed = failed[failed["status"] == "wrong"]
    if len(failed):
        first = failed.iloc[0]
        raise RungsError(
            f"{job.where} holds a failed result ({first['status']}: {first['reason']}): measure it again before you record."
        )
    return job


def _target(results: Path, manifests: list[Mapping[str, Any]]) -> tuple[str, ResultsSet]:
    """Return the one architecture of these jobs, and the recorded set that they belong to."""
    slugs, archs = {m["gpu"]["slug"] for m in manifests}, {m["arch"] for m in manifests}
    policies = {m["l2"] for m in manifests if "l2" in m}
    if len(slugs) != 1 or len(archs) != 1:
        raise RungsError(f"{results} mixes GPUs ({', '.join(sorted(slugs | archs))}): a recorded set has one.")
    if len(policies) > 1:
        raise RungsError(f"{results} mixes hot and cold caches: delete the results of one policy before you record.")
    cold = COLD if policies == {"cold"} else ""
    return archs.pop(), ResultsSet(RECORDED / f"{slugs.pop()}{cold}")


def _inspected(live: ResultsSet, arch: str, variants: Iterable[str]) -> Jobs:
    """Return each variant's inspection with the manifest of its build, and the clock stamp's build."""
    jobs: Jobs = {}
    for name in (*variants, build.STAMP):
        paths = [live.built(arch, name), *([live.inspected(arch, name)] if name != build.STAMP else [])]
        if missing := next((path for path in paths if not path.is_file()), None):
            raise RungsError(f"{missing} is missing: run `snakemake all` before you record.")
        made = schemas.read_manifest(paths[0])
        csv = paths[1].read_bytes() if name != build.STAMP else None
        jobs[name] = (csv, {**made, "csv_sha256": sha256_bytes(csv)} if csv is not None else made)
    return jobs


def _check_recorded(target: ResultsSet, experiment: Experiment, jobs: Mapping[str, list[Job]]) -> None:
    """Raises RungsError unless the target has sweeps of the machine code of every job."""
    for job in (job for found in jobs.values() for job in found):
        made = target.build_manifest(experiment.name, job.manifest["arch"], job.name) or {}
        if made.get("code_hash") != job.manifest["binary"].get("code_hash"):
            raise RungsError(
                f"{job.where} is not of a binary that {target.path} holds: record the sweeps of {experiment.name} with it."
            )


def _merged(target: ResultsSet, experiment: Experiment, new: Mapping[str, Jobs]) -> tuple[dict[str, Jobs], list[str]]:
    """Return the jobs of each kind with those that the target has already, and the variants that are dropped."""
    merged: dict[str, Jobs] = {}
    gone: set[str] = set()
    for kind in (INSPECT, *KINDS):
        jobs: Jobs = {}
        for name in target.jobs(kind, experiment.name):
            manifest = target.manifest(kind, experiment.name, name)
            if manifest["variant"] != build.STAMP and not _has(experiment, manifest["variant"]):
                gone.add(manifest["variant"])
            elif "csv_sha256" not in manifest:
                jobs[name] = (None, manifest)
            else:
                job = target.job(kind, experiment.name, name)
                if not job.intact:
                    raise RungsError(f"{job.where} is not the CSV of its manifest: restore it from version control.")
                jobs[name] = (job.csv, manifest)
        jobs |= new.get(kind, {})
        if jobs:
            merged[kind] = jobs
    return merged, sorted(gone)


def _check_arms(merged: Mapping[str, Jobs], new: Jobs) -> None:
    """Raises RungsError where a new sweep was timed beside a predecessor of other machine code than the set would hold of it."""
    for name, (_, manifest) in new.items():
        for binary in manifest["arms"].values():
            _, made = merged[INSPECT].get(binary["variant"], (None, binary))
            if made["code_hash"] != binary["code_hash"]:
                raise RungsError(
                    f"{name} was timed beside {binary['variant']}, which is recorded with other machine code: measure and record that"
                    " one too."
                )


def _has(experiment: Experiment, variant: str) -> bool:
    try:
        return experiment.variant(variant).name == variant
    except RungsError:
        return False


READY = "ready.json"
"""File in a staged set that was verified whole: path -> hash of the recorded file that it replaces, empty for none."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep another `record` waiting; what a killed one had verified is moved to its place, and what it had begun is removed."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    folder = os.open(RECORDED, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        for stage in RECORDED.glob(f".*{STAGED}*"):
            _finish(stage, RECORDED / stage.name[1:].partition(STAGED)[0])
            shutil.rmtree(stage, ignore_errors=True)
        yield
    finally:
        os.close(folder)
        with contextlib.suppress(OSError):  # of a refusal nothing is left, not even an empty folder
            RECORDED.rmdir()


def _write(target: ResultsSet, experiment: Experiment, arch: str, merged: Mapping[str, Jobs]) -> None:
    """Write the tables to a folder of their own, make data from them, and only then move them to their place."""
    stage = Path(tempfile.mkdtemp(prefix=f".{target.path.name}{STAGED}", dir=RECORDED))
    try:
        for kind, jobs in merged.items():
            write_recorded(stage, kind, experiment.name, jobs)
        variants = list(merged.get("sweep", {}))
        if variants:  # what no table can be made from is not published
            aggregate.aggregate(stage, experiment, arch, variants)
            if experiment.factorial and {variant.name for variant in experiment.off_ladder()} & set(variants):
                effects.effects(stage, experiment, arch)
        write_json(stage / READY, {place: _hash(target.path / place) for place in _places(stage)})
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _move(stage, target.path)  # where this is ended, the next `record` goes on
    for kind in {INSPECT, *KINDS} - merged.keys():  # what there was is of variants that are no more
        for path in (target.table(kind, experiment.name), target.manifests(kind, experiment.name)):
            path.unlink(missing_ok=True)
    shutil.rmtree(stage, ignore_errors=True)


def _places(stage: Path) -> list[str]:
    """Return the tables and manifest files of a staged set, as paths in it."""
    return sorted(path.relative_to(stage).as_posix() for path in (stage / "csv").rglob("*") if path.is_file())


def _hash(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


def _finish(stage: Path, target: Path) -> None:
    """Move what a killed `record` had verified, unless what it would replace is no longer what was there then."""
    if not (stage / READY).is_file():
        return
    replaced = read_json(stage / READY)
    if all(replaced.get(place) == _hash(target / place) for place in _places(stage)):
        _move(stage, target)
    else:
        print(f"What a killed `record` left for {target} is dropped, since the set has changed since: record it again.")


def _move(stage: Path, target: Path) -> None:
    """Move the tables and manifest files of a staged set to the recorded one."""
    for place in _places(stage):
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / place, target / place)
