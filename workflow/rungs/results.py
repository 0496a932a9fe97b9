"""A results set: where its files lie, and what its jobs left.

A live set has a CSV and a manifest for each job. A recorded set has one table and one manifest file for each experiment and kind,
from which every job's CSV comes back byte for byte: the hash in its manifest holds for both.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rungs import schemas
from rungs.errors import RungsError
from rungs.files import read_json, sha256_bytes, sha256_file, whole

RECORDED = Path("results/recorded")
COLD = "-cold"
"""End of the name of a set that was measured with cold caches."""
KINDS = ("sweep", "floor", "profile", "sanitize")
"""Kinds of jobs that measure. A job of `floor` is called 1, 2 or 3, of the others by its variant."""
INSPECT = "inspect"
"""The disassembly of each variant. What stands beside it in a recorded set is the build's manifest, with the CSV's hash."""
TABLE = ".csv.gz"
CONSTANT = ("run_id", "experiment", "variant", "arch")
"""Leading columns of a job's CSV that its manifest has too: a recorded table leaves them out."""
STAGED = ".staged-"
"""Part of the name of a folder beside the recorded sets in which `record` makes the next state of one."""
RESTORE = "restore it from version control"
AGAIN = "RUNGS_AGAIN"
"""Environment variable with which a job measures again even where the result that is there stands."""


@dataclass(frozen=True)
class Job:
    """What one job left. `where` names it in messages, `csv` is its file's content."""

    name: str
    where: str
    csv: bytes
    manifest: Mapping[str, Any]
    fix: str = "delete it and run again to measure it anew"

    @property
    def intact(self) -> bool:
        """Whether the CSV is the one that its manifest was written for."""
        return sha256_bytes(self.csv) == self.manifest.get("csv_sha256")

    def frame(self, schema: str) -> Any:
        """Return the CSV as a DataFrame. Raises RungsError for what the schema does not allow."""
        return schemas.parse_csv(schema, self.text, self.where)

    @property
    def text(self) -> str:
        try:
            return self.csv.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RungsError(f"{self.where} cannot be read ({error}): delete it and run again.") from None


@dataclass(frozen=True)
class ResultsSet:
    """The folder of a results set, for example results/h200 or results/recorded/h200."""

    path: Path

    def table(self, kind: str, experiment: str) -> Path:
        """Where a recorded set has the rows of all jobs of a kind."""
        return self.path / "csv" / kind / f"{experiment}{TABLE}"

    def manifests(self, kind: str, experiment: str) -> Path:
        """Where a recorded set has the manifests of all jobs of a kind."""
        return self.path / "csv" / kind / f"{experiment}.json"

    def csv(self, kind: str, experiment: str, job: str) -> Path:
        """Where a live set has a job's CSV; its manifest has the same name and ends in .json."""
        return self.path / "csv" / kind / experiment / f"{job}.csv"

    def is_recorded(self, kind: str, experiment: str) -> bool:
        """Whether the set keeps the jobs of this kind in one table. Raises RungsError for a set of an older rungs."""
        folder = self.path / "csv" / kind
        for apart in (folder / experiment, *(folder.glob("sm_*") if kind == INSPECT else ())):
            if next(apart.glob("*.csv.gz"), None):
                raise RungsError(
                    f"{apart} is of an older rungs, which recorded a file for each job: take the set from a newer commit."
                )
        return self.manifests(kind, experiment).exists() or self.table(kind, experiment).exists()

    def experiments(self, kind: str) -> list[str]:
        """Return the experiments that the set has jobs of."""
        folder = self.path / "csv" / kind
        live = {path.name for path in folder.glob("*") if path.is_dir() and next(path.glob("*.csv*"), None)}
        recorded = {path.name.split(".")[0] for path in [*folder.glob("*.json"), *folder.glob(f"*{TABLE}")]}
        return sorted(
            (live | recorded) - ({name for name in live if name.startswith("sm_")} if kind == INSPECT else set())
        )

    def jobs(self, kind: str, experiment: str) -> list[str]:
        """Return the names of the jobs of this kind, sorted."""
        if self.is_recorded(kind, experiment):
            return sorted(_recorded(self.manifests(kind, experiment)))
        return sorted(path.stem for path in (self.path / "csv" / kind / experiment).glob("*.csv"))

    def files(self, kind: str, experiment: str, jobs: Sequence[str] | None = None) -> list[Path]:
        """Return the files that hold these jobs, or all: what a rule that reads them has for input."""
        if self.is_recorded(kind, experiment):
            return [self.table(kind, experiment), self.manifests(kind, experiment)]
        names = self.jobs(kind, experiment) if jobs is None else jobs
        csvs = [self.csv(kind, experiment, name) for name in names]
        return [path for csv in csvs for path in (csv, csv.with_suffix(".json"))]

    def has(self, kind: str, experiment: str, job: str) -> bool:
        if self.is_recorded(kind, experiment):
            return job in _recorded(self.manifests(kind, experiment))
        return self.csv(kind, experiment, job).is_file()

    def where(self, kind: str, experiment: str, job: str) -> str:
        """Return the words that name a job's CSV in messages."""
        if self.is_recorded(kind, experiment):
            return f"{self.table(kind, experiment)}, {job}"
        return str(self.csv(kind, experiment, job))

    def manifest(self, kind: str, experiment: str, job: str) -> dict[str, Any]:
        """Return a job's manifest, valid by its schema. Raises RungsError where it is missing or odd."""
        if self.is_recorded(kind, experiment):
            return _job_manifest(self.manifests(kind, experiment), job)
        return schemas.read_manifest(self.csv(kind, experiment, job).with_suffix(".json"))

    def all_manifests(
        self, kind: str, experiment: str, wanted: Container[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the manifest of each job, of these alone where they are given."""
        names = [name for name in self.jobs(kind, experiment) if wanted is None or name in wanted]
        return {name: self.manifest(kind, experiment, name) for name in names}

    def job(self, kind: str, experiment: str, job: str) -> Job:
        """Return what a job left. Raises RungsError where a file is missing or cannot be read."""
        where = self.where(kind, experiment, job)
        if self.is_recorded(kind, experiment):
            manifest = self.manifest(kind, experiment, job)
            return Job(job, where, _job_csv(self, kind, experiment, job, manifest), manifest, RESTORE)
        path = self.csv(kind, experiment, job)
        if not path.with_suffix(".json").is_file():
            raise RungsError(
                f"{path} has no manifest {path.stem}.json beside it, so nothing says how it was made: delete it and run again to"
                " measure it anew."
            )
        return Job(job, where, _bytes(path), self.manifest(kind, experiment, job))

    # ---- binaries ----------------------------------------------------------------------------------------------------

    def architectures(self) -> list[str]:
        """Return the architectures whose binaries were inspected."""
        live = [path.name for path in (self.path / "csv" / INSPECT).glob("*") if path.is_dir()]
        recorded = [_recorded(self.manifests(INSPECT, name)) for name in self.experiments(INSPECT) if not live]
        return sorted({*live, *(str(built["arch"]) for jobs in recorded for built in jobs.values())})

    def build_manifest(self, experiment: str, arch: str, variant: str) -> dict[str, Any] | None:
        """Return the manifest of a variant's build, or None where the set has none."""
        if self.is_recorded(INSPECT, experiment):
            found = variant in _recorded(self.manifests(INSPECT, experiment))
            return _job_manifest(self.manifests(INSPECT, experiment), variant) if found else None
        path = self.built(arch, variant)
        return schemas.read_manifest(path) if path.is_file() else None

    def built(self, arch: str, variant: str) -> Path:
        """Where a live set has the manifest of a build; PTX and cubin lie beside it."""
        return self.path / "build" / arch / variant / f"{variant}.json"

    def inspected(self, arch: str, variant: str) -> Path:
        """Where a live set has a variant's inspection."""
        return self.path / "csv" / INSPECT / arch / f"{variant}.csv"

    def inspection(self, experiment: str, arch: str, variant: str) -> Any | None:
        """Return a variant's inspection as a DataFrame, or None where the set has none."""
        if not self.is_recorded(INSPECT, experiment):
            path = self.inspected(arch, variant)
            return schemas.read_csv(INSPECT, path) if path.is_file() else None
        if variant not in self.inspections(experiment):
            return None
        job = self.job(INSPECT, experiment, variant)
        if not job.intact:
            raise RungsError(f"{job.where} was edited (its SHA-256 is not that in its manifest): {RESTORE}.")
        return job.frame(INSPECT)

    def inspections(self, experiment: str) -> list[str]:
        """Return the variants whose inspection a recorded set has: all that were built but the clock stamp."""
        jobs = _recorded(self.manifests(INSPECT, experiment))
        return [name for name, manifest in jobs.items() if "csv_sha256" in manifest]


def recorded_sets() -> list[Path]:
    """Return the folders of the recorded sets."""
    return sorted(path for path in RECORDED.glob("[!.]*") if (path / "csv").is_dir())


# ---- a live result that is kept --------------------------------------------------------------------------------------------


def measured(kind: str) -> tuple[str, ...]:
    """Return the statuses of rows that are no failure. What a sanitizer found is a result."""
    return "ok", "found" if kind == "sanitize" else "flagged", "not on this chip"


def keep(csv: Path, manifest: Mapping[str, Any]) -> bool:
    """Keep the result at `csv` where it is of the job that this manifest begins to describe, and no row of it failed.

    Returns whether it is kept: then only the text of a kernel has changed since, and the machine code, the launches and all else that
    decides are the same. A kept file gets today's date, since Snakemake asked for it.
    """
    beside = csv.with_suffix(".json")
    if os.environ.get(AGAIN) or not (csv.is_file() and beside.is_file()):
        return False
    try:
        there, rows = schemas.read_manifest(beside), csv.read_text(encoding="utf-8")
    except (RungsError, OSError, UnicodeDecodeError):
        return False
    if sha256_file(csv) != there["csv_sha256"] or _decisive(there) != _decisive(manifest):
        return False
    if not {row["status"] for row in DictReader(StringIO(rows))} <= set(measured(there["kind"])):
        return False
    for path in (csv, beside):
        os.utime(path)
    return True


DECISIVE = (
    *("kind", "arch", "fill", "l2", "control", "not_timed", "protocol", "limits"),
    *("ncu", "sanitizer", "problem", "modules", "checks"),
)
"""Keys of a manifest that decide a result, beside its binaries, its GPU and the clock that was asked for."""


def _decisive(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a job's result: machine code and launches in place of builds, and nothing that it only found out."""
    binaries = manifest["arms"] if "arms" in manifest else {"": manifest["binary"]}
    stamp, gpu, clock = (manifest.get(key, {}) for key in ("stamp", "gpu", "clock"))
    return {key: manifest.get(key) for key in DECISIVE} | {
        "code": {arm: [binary.get(key) for key in CODE] for arm, binary in binaries.items()},
        "stamp": stamp.get("code_hash"),
        "gpu": gpu.get("uuid"),
        "clock": [clock.get(key) for key in ("mode", "asked", "requested_mhz")],
    }


CODE = ("variant", "code_hash", "ptx_hash", "launch_hash")
"""Keys of a binary in a manifest that say what was executed and how it was launched."""


# ---- recorded tables -------------------------------------------------------------------------------------------------


def write_recorded(folder: Path, kind: str, experiment: str, jobs: Mapping[str, tuple[bytes | None, Mapping]]) -> None:
    """Write the table and the manifest file of all jobs of a kind under `folder`, a results set's; both or neither.

    `jobs` maps a job's name to its CSV, if it has one, and its manifest. Raises RungsError for CSVs that one table cannot hold.
    """
    rows: list[str] = []
    constant, columns = [], None
    for name, (csv, manifest) in sorted(jobs.items()):
        if csv is None:
            continue
        head, *lines = csv.decode("utf-8").removesuffix("\n").split("\n")
        if columns is None:
            columns = head.split(",")
            constant = columns[: next(at for at, column in enumerate(columns) if column not in CONSTANT)]
        prefix = _prefix(constant, manifest)
        if head.split(",") != columns or not all(line.startswith(prefix) for line in lines):
            raise RungsError(
                f"{experiment}, {name}: its {kind} CSV has other columns or constants than the others: measure it again."
            )
        rows += [f"{name},{line[len(prefix) :]}" for line in lines]
    head = ",".join(["job", *(columns or [])[len(constant) :]])
    target = ResultsSet(folder)
    common, own = split_common({name: dict(manifest) for name, (_, manifest) in sorted(jobs.items())})
    lines = [f"  {_json(name)}: {_json(manifest)}" for name, manifest in own.items()]
    text = (
        f'{{\n "constant": {_json(constant)},\n "common": {_json(common)},\n "jobs": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    with contextlib.ExitStack() as both:
        table = both.enter_context(whole(target.table(kind, experiment)))
        manifests = both.enter_context(whole(target.manifests(kind, experiment)))
        table.write_bytes(gzip.compress("".join(f"{line}\n" for line in [head, *rows]).encode(), mtime=0))
        manifests.write_text(text, encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def _prefix(constant: Sequence[str], manifest: Mapping[str, Any]) -> str:
    return "".join(f"{manifest[column]}," for column in constant)


def split_common(values: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what all mappings share, nested mappings key by key, and what is left of each: `merged` puts them together again."""
    every = list(values.values())
    common: dict[str, Any] = {}
    own = {name: dict(value) for name, value in values.items()}
    for key in every[0]:
        found = [value.get(key) for value in every]
        if not all(key in value for value in every):
            continue
        if all(value == found[0] for value in found):
            common[key] = found[0]
            for value in own.values():
                del value[key]
        elif all(isinstance(value, dict) and value for value in found):
            shared, left = split_common({name: value[key] for name, value in values.items()})
            if shared:
                common[key] = shared
                for name in own:
                    own[name][key] = left[name]
    return common, own


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings in one, nested mappings key by key; what the second says stands."""
    both = {**common, **own}
    for key in common.keys() & own.keys():
        if isinstance(common[key], Mapping) and isinstance(own[key], Mapping):
            both[key] = merged(common[key], own[key])
    return both


def _recorded(path: Path) -> Mapping[str, dict[str, Any]]:
    """Return job -> manifest of a recorded set's manifest file, not yet checked by a schema."""
    return _read_manifests(path, _stamp(path))[1]


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file does, so that it is read once a process."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=64)
def _read_manifests(path: Path, _at: tuple[int, int]) -> tuple[list[str], Mapping[str, dict[str, Any]]]:
    value = read_json(path, RESTORE)
    constant, common, jobs = (value.get(key) for key in ("constant", "common", "jobs"))
    if isinstance(constant, list) and not all(isinstance(column, str) for column in constant):
        constant = None
    if not (
        isinstance(constant, list)
        and set(constant) <= set(CONSTANT)
        and isinstance(common, dict)
        and isinstance(jobs, dict)
        and jobs
    ):
        raise RungsError(f"{path} is no manifest file of a recorded set: {RESTORE}.")
    if not all(isinstance(own, dict) for own in jobs.values()):
        raise RungsError(f"{path} has a job that is no manifest: {RESTORE}.")
    return constant, {name: merged(common, own) for name, own in jobs.items()}


def _job_manifest(path: Path, job: str) -> dict[str, Any]:
    return dict(_checked(path, _stamp(path), job))


@functools.lru_cache(maxsize=4096)
def _checked(path: Path, _at: tuple[int, int], job: str) -> dict[str, Any]:
    jobs = _recorded(path)
    if job not in jobs:
        raise RungsError(f"{path} has no job {job}: {RESTORE}, or record it.")
    manifest = jobs[job]
    schemas.check_manifest(manifest, f"{path}, {job} ({RESTORE})")
    return manifest


def _job_csv(results: ResultsSet, kind: str, experiment: str, job: str, manifest: Mapping[str, Any]) -> bytes:
    """Return the CSV that the job wrote, from the table."""
    path, manifests = results.table(kind, experiment), results.manifests(kind, experiment)
    constant, _ = _read_manifests(manifests, _stamp(manifests))
    head, rows = _read_table(path, _stamp(path))
    if job not in rows or not all(column in manifest for column in constant):
        raise RungsError(f"{path} has no rows of {job}, of which {manifests.name} has a manifest: {RESTORE}.")
    prefix = _prefix(constant, manifest)
    columns = ",".join([*constant, head])
    return "".join([f"{columns}\n", *(f"{prefix}{row}\n" for row in rows[job])]).encode()


@functools.lru_cache(maxsize=6)
def _read_table(path: Path, _at: tuple[int, int]) -> tuple[str, Mapping[str, list[str]]]:
    """Return the columns behind the job's name, and the rows of each job."""
    try:
        text = gzip.decompress(_bytes(path)).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RungsError(f"{path} cannot be read ({error}): {RESTORE}.") from None
    head, *lines = text.removesuffix("\n").split("\n")
    rows: dict[str, list[str]] = {}
    for line in lines:
        name, _, row = line.partition(",")
        rows.setdefault(name, []).append(row)
    return head.partition(",")[2], rows


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RungsError(
            f"{path} cannot be read ({error.strerror}): delete it and run again, or restore a recorded one."
        ) from None


def each_job(results: ResultsSet, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, experiment, job) of all that was measured."""
    for kind in kinds:
        for experiment in results.experiments(kind):
            for job in results.jobs(kind, experiment):
                yield kind, experiment, job
