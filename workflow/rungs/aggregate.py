"""From raw rounds to medians, steps, floors, counters and coverage: `results/<set>/csv` to `results/<set>/data`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rungs import schemas, stats, workloads
from rungs.errors import RungsError
from rungs.measure import HEADROOM
from rungs.profile import metrics_for
from rungs.results import Job, ResultsSet
from rungs.variants import GEMM, Device, Experiment, Ladder, Step, Variant, load_device, load_experiment

Shape = tuple[int, ...]
"""(M, N, K) of a GEMM, else a point: a value for each axis of the experiment."""
FRAMES = ("shapes", "steps", "changes", "floor", "counters", "coverage")
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
WAVEFRONTS = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
"""Start of the names of the counters of shared-memory wavefronts: `<WAVEFRONTS>ldsm.sum`."""
USED = ("ok", "flagged")
"""Statuses of a row that was timed; any other is a failure."""


@dataclass(frozen=True)
class Recording:
    """A CSV with the manifest beside it, both checked."""

    where: str
    manifest: Mapping[str, Any]
    frame: pd.DataFrame


@dataclass(frozen=True)
class Recordings:
    """What a results set holds of one experiment. A variant that was not measured has no entry."""

    sweeps: Mapping[str, Recording]
    floors: Sequence[Recording]
    profiles: Mapping[str, Recording]
    inspects: Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Arm:
    """One arm at one shape. Arrays are (rounds used,), in the order of the rounds."""

    status: str
    reason: str
    rounds: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    time_us: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    sm_mhz: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    power_w: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    flagged: int = 0


Arms = dict[Shape, dict[str, Arm]]


def run(results: Path, experiment_name: str, arch: str, variants: list[str]) -> None:
    """Write `data/<experiment>/*.csv` of a results set."""
    frames = aggregate(results, load_experiment(experiment_name), arch, variants)
    experiment = load_experiment(experiment_name)
    for kind, frame in frames.items():
        schemas.write_csv(_kind(experiment, kind), frame, results / "data" / experiment_name / f"{kind}.csv")


def frames_of(experiment: Experiment) -> tuple[str, ...]:
    """The kinds of the frames that an experiment has: `points` in place of `shapes` where it is no GEMM."""
    return FRAMES if experiment.workload == GEMM else ("points", *FRAMES[1:])


def _kind(experiment: Experiment, name: str) -> str:
    """The CSV kind of a frame; `changes` and `floor` know no shapes."""
    return name if name in ("changes", "floor") else experiment.kind(name)


@dataclass(frozen=True)
class Measured:
    """What was read and checked of an experiment's recordings: the ground that every frame stands on.

    `asked`: the variants asked for, with files or without. `arms`: variant -> shape -> arm. `floors`: by shape class.
    """

    experiment: Experiment
    device: Device
    asked: Sequence[Variant]
    recordings: Recordings
    arms: Mapping[str, Arms]
    floor_arms: Sequence[Arms]
    shapes: Sequence[Shape]
    sms: int | None
    floors: Mapping[str, stats.Floor | None]

    def shape_class(self, shape: Shape) -> str:
        return _class(self.experiment, self.device, shape, self.sms)

    def where(self, shape: Shape) -> dict[str, int]:
        """The shape as the cells of a row."""
        return where(self.experiment, shape)

    def shape_of(self, row: Mapping[str, Any]) -> Shape:
        return tuple(row[axis] for axis in self.experiment.axis_names)

    def shapes_of(self, *names: str) -> list[Shape]:
        """The shapes at which all of these variants were asked for: every shape of a GEMM, the points that a sweep has for
        them where its sweeps are for some levels only.
        """
        if self.experiment.workload == GEMM:
            return list(self.shapes)
        asked = [_given(self.experiment, self.recordings.sweeps.get(name), name) for name in names]
        return [shape for shape in self.shapes if all(shape in given for given in asked)]


def load(results: Path, experiment: Experiment, arch: str, variants: Sequence[str]) -> Measured:
    """Read the recordings of these variants, with the floor jobs.

    Raises RungsError where a file was changed since it was written or recordings do not belong in one table.
    """
    device = load_device(arch)
    asked = [experiment.variant(name) for name in variants]
    recordings = read_recordings(results, experiment, arch, [variant.name for variant in asked])
    check_set(recordings, arch)
    arms = {name: arms_of(recording, device, experiment) for name, recording in recordings.sweeps.items()}
    floor_arms = [arms_of(recording, device, experiment) for recording in recordings.floors]
    wrong = disagreements(experiment, recordings.sweeps)
    for name, shape in wrong:
        arms[name][shape][name] = Arm("wrong", wrong[name, shape])
    sms = _sms(recordings)
    if recordings.floors:
        floors = _floors(experiment, device, recordings.floors, floor_arms, sms)
    else:  # a quick look: each rung against itself in its own job, which shows nothing between jobs
        twins = [name for name, recording in recordings.sweeps.items() if "twin" in set(recording.frame["arm"])]
        floors = _floors(experiment, device, [recordings.sweeps[n] for n in twins], [arms[n] for n in twins], sms)
    shapes = _shapes(experiment, recordings)
    return Measured(experiment, device, asked, recordings, arms, floor_arms, shapes, sms, floors)


def aggregate(results: Path, experiment: Experiment, arch: str, variants: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The six frames of an experiment, by name. `variants` are those asked for; one without files becomes `not run`.

    Raises RungsError as `load` does.
    """
    measured = load(results, experiment, arch, variants)
    recordings, asked, shapes = measured.recordings, measured.asked, measured.shapes
    steps = [step for step in experiment.steps() if step.target_variant in asked and _wanted(step, asked, recordings)]
    chip, shares = measured.device.chip, shares_of(measured)
    gemm = experiment.workload == GEMM
    rows = {
        "shapes" if gemm else "points": shape_rows(measured, shares, spreads_of(measured))
        if gemm
        else _point_rows(measured, shares),
        "steps": _step_rows(measured, steps),
        "changes": [row for step in steps for row in _changes(step, recordings.inspects)],
        "floor": _floor_rows(measured),
        "counters": _counter_rows(experiment, asked, shapes, recordings.profiles, chip),
        "coverage": coverage_rows(measured, _profiled(experiment, shapes)),
    }
    return {name: frame_of(_kind(experiment, name), found) for name, found in rows.items()}


def _wanted(step: Step, asked: Sequence[Variant], recordings: Recordings) -> bool:
    """Whether the step's source was asked for too, or was timed all the same in the job of its target."""
    target = recordings.sweeps.get(step.target_variant.name)
    return step.source_variant in asked or (target is not None and step.source_variant.name in target.manifest["arms"])


# Reading


def read_recordings(results: Path, experiment: Experiment, arch: str, variants: Iterable[str]) -> Recordings:
    """Read and check all that a results set has of these variants."""
    found, timed = ResultsSet(results), timed_kind(experiment)
    sweeps, profiles, inspects = {}, {}, {}
    for variant in variants:
        if found.has("sweep", experiment.name, variant):
            sweeps[variant] = read_recording(timed, found.job("sweep", experiment.name, variant), variant)
        if found.has("profile", experiment.name, variant):
            job = found.job("profile", experiment.name, variant)
            profiles[variant] = read_recording(experiment.kind("profile"), job, variant)
    for step_variant in {*variants, *(step.source_variant.name for step in experiment.steps())}:
        frame = found.inspection(experiment.name, arch, step_variant)
        if frame is not None:
            inspects[step_variant] = frame
    floor = [found.job("floor", experiment.name, job) for job in found.jobs("floor", experiment.name)]
    floors = [read_recording(timed, job, experiment.floor_variant.name) for job in floor]
    return Recordings(sweeps, floors, profiles, inspects)


def timed_kind(experiment: Experiment) -> str:
    """The CSV kind of the experiment's sweeps: rounds of times, or of the cycles that its kernel counts."""
    counted = experiment.workload != GEMM and workloads.of(experiment).MEASURES == "cycles"
    return experiment.kind("cycles" if counted else "sweep")


def read_recording(kind: str, job: Job, variant: str) -> Recording:
    """Return what a job left, as a CSV of that kind.

    Raises RungsError where the CSV is not the one that its manifest was written for, or not of that variant.
    """
    where, manifest = job.where, job.manifest
    if not job.intact:
        raise RungsError(
            f"{where} was edited or cut after it was measured (its SHA-256 is not that in its manifest): {job.fix}."
        )
    if manifest["variant"] != variant:
        raise RungsError(f"{where} was measured with {manifest['variant']}, not {variant} as its name says: {job.fix}.")
    frame = job.frame(kind)
    axes = kind.partition("@")[2].split(",") if "@" in kind else list(schemas.SHAPE)
    for shape in manifest.get("shapes", []):
        if isinstance(shape, Mapping) and (lacking := next((a for a in axes if type(shape.get(a)) is not int), None)):
            raise RungsError(
                f"{where}, manifest, key shapes: {lacking} is {shape.get(lacking)!r}, not a whole number: {AGAIN}."
            )
    odd = frame.index[frame["run_id"] != manifest.get("run_id")]
    if len(odd):
        raise RungsError(
            f"{where}, row {odd[0] + 2}: run_id is {frame['run_id'][odd[0]]}, not {manifest.get('run_id')} as its manifest"
            f" says: {AGAIN}."
        )
    return Recording(where, manifest, frame)


AGAIN = "delete it and run again to measure it anew, or restore a recorded one from version control"


def check_set(recordings: Recordings, arch: str) -> None:
    """Raises RungsError where recordings differ in something that one table must not mix."""
    rules: list[tuple[str, str, Sequence[str]]] = [
        ("fill", "zeros run faster than random numbers, so a table never mixes fills", ("fill",)),
        ("L2 policy", "a table is hot or cold", ("l2",)),
        ("GPU", "a results set is of one model", ("gpu", "name")),
        ("protocol", "rounds of two protocols are not comparable", ("protocol", "hash")),
        ("data type", "a table has one", ("dtype",)),
        ("architecture", "a table compares binaries of one", ("arch",)),
    ]
    timed = [*recordings.sweeps.values(), *recordings.floors]
    for recording in timed:
        control = _at(recording.manifest, ("control", "dtype"))
        dtype = recording.manifest.get("dtype")
        if control is not None and control != dtype:
            raise RungsError(
                f"{recording.where}: the control ran in {control} and the variant in {dtype}; a share compares one data type:"
                f" {AGAIN} with a control in {dtype}."
            )
        if recording.manifest.get("arch") not in (None, arch):
            raise RungsError(
                f"{recording.where} was measured with a binary for {recording.manifest['arch']}, not {arch}: {AGAIN}."
            )
    for word, why, keys in rules:
        group = [*timed, *recordings.profiles.values()] if word == "GPU" else timed
        found: dict[str, str] = {}
        for recording in group:
            found.setdefault(str(_at(recording.manifest, keys)), recording.where)
        if len(found) > 1:
            (first, here), (second, there) = list(found.items())[:2]
            raise RungsError(
                f"{there} was measured with {word} {second} and {Path(here).name} with {first}: {why}; delete one of them and run again."
            )


def _at(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _sms(recordings: Recordings) -> int | None:
    found = (_at(r.manifest, ("gpu", "sms")) for r in [*recordings.sweeps.values(), *recordings.floors])
    return next((int(sms) for sms in found if sms), None)


def _shapes(experiment: Experiment, recordings: Recordings) -> list[Shape]:
    """What was asked of the set: every shape that a job was given, or the experiment's own where no job ran."""
    given = {shape for name, recording in recordings.sweeps.items() for shape in _given(experiment, recording, name)}
    if experiment.workload != GEMM:  # in the order of its sweeps
        own = experiment.shapes()
        return [shape for shape in own if shape in given or not given] + sorted(given - set(own))
    return sorted(given) or experiment.shapes()


def _given(experiment: Experiment, recording: Recording | None, name: str) -> set[Shape]:
    """The shapes that a variant's job was given; without one, those of the experiment's file."""
    if recording is None:
        return set(experiment.shapes(experiment.variant(name)))
    axes = list(experiment.axis_names)
    given = {tuple(int(shape[axis]) for axis in axes) for shape in recording.manifest.get("shapes", [])}
    rows = recording.frame[axes].drop_duplicates().itertuples(index=False)
    return given | {tuple(int(value) for value in row) for row in rows}


def arms_of(recording: Recording, device: Device, experiment: Experiment) -> Arms:
    """Every arm of a recording at every shape, flagged rows left out and counted, implausible ones refused.

    Where the kernel counts cycles, they stand in place of microseconds.
    """
    frame, axes = recording.frame, list(experiment.axis_names)
    if "cycles" in frame:
        frame = frame.rename(columns={"cycles": "time_us"}).assign(sm_mhz=np.nan, power_w=np.nan)
    sms = _at(recording.manifest, ("gpu", "sms"))
    column = {
        name: frame[name].to_numpy(np.float64, na_value=np.nan)
        for name in (*axes, "round", "time_us", "sm_mhz", "power_w")
    }
    status, reason = frame["status"].to_numpy(object), frame["reason"].to_numpy(object)
    untimed = (status == "ok") & np.isnan(column["time_us"])
    if untimed.any():
        raise RungsError(
            f"{recording.where}, row {int(np.argmax(untimed)) + 2}: status is ok without a time_us: {AGAIN}."
        )
    gemm = experiment.workload == GEMM  # what a workload moves was held against the GPU's limits when it was measured
    flop = 2 * math.prod(column[axis] for axis in axes) if gemm else np.zeros(len(frame))
    tflops = flop / column["time_us"] / 1e6
    mhz = column["sm_mhz"]
    if gemm:
        mhz = np.where(np.isnan(mhz), _highest_clock(recording), mhz)
    peak = device.bf16_flop_per_sm_cycle * float(sms or np.nan) * mhz / 1e6
    implausible = (status == "ok") & (tflops > HEADROOM * peak)
    arms: Arms = {}
    for (*point, arm), index in frame.groupby([*axes, "arm"], sort=False).indices.items():
        index = np.sort(index)
        here = status[index]
        failed = index[~np.isin(here, USED)]
        absurd = index[implausible[index]]
        used = index[here == "ok"]
        used = used[np.argsort(column["round"][used], kind="stable")]
        flagged = int((here == "flagged").sum())
        if len(failed):
            found = Arm(status[failed[0]], reason[failed[0]], flagged=flagged)
        elif len(absurd):
            row = absurd[0]
            found = Arm(
                "implausible",
                f"Round {column['round'][row]:.0f} of {arm} reads {tflops[row]:.0f} TFLOP/s, above the peak of {peak[row]:.0f}"
                f" at {mhz[row]:.0f} MHz.",
            )
        elif not len(used):
            found = Arm("flagged", f"All {flagged} rounds are flagged: {reason[index[0]]}", flagged=flagged)
        else:
            found = Arm(
                "ok",
                "",
                column["round"][used].astype(np.int64),
                column["time_us"][used],
                column["sm_mhz"][used],
                column["power_w"][used],
                flagged,
            )
        arms.setdefault(tuple(int(value) for value in point), {})[arm] = found
    return arms


def _highest_clock(recording: Recording) -> float:
    """MHz that the plausibility check assumes for a sample without a clock: no peak is lower by it."""
    supported = [float(mhz) for mhz in _at(recording.manifest, ("clock", "supported_mhz")) or []]
    measured = recording.frame["sm_mhz"].max()
    return max([*supported, *([float(measured)] if pd.notna(measured) else [])], default=math.nan)


def disagreements(experiment: Experiment, sweeps: Mapping[str, Recording]) -> dict[tuple[str, Shape], str]:
    """(variant, shape) -> reason, where the result differs from the others of its numeric contract.

    Variants of one contract sum in one order, so that on the same inputs (same torch, same GPU model) they agree to the
    last bit. Where most agree, the others are wrong; where no side is larger, nothing says which is right and all are.
    """
    groups: dict[tuple, dict[str, str]] = defaultdict(dict)
    for name, recording in sweeps.items():
        machine = (str(_at(recording.manifest, ("software", "torch"))), str(_at(recording.manifest, ("gpu", "name"))))
        for shape in recording.manifest.get("shapes", []):
            if digest := shape.get("result_fingerprint", shape.get("result_sha256")):
                contract = shape.get("contract") or experiment.contract(experiment.variant(name))
                point = tuple(int(shape[axis]) for axis in experiment.axis_names)
                groups[(contract, point, *machine)][name] = digest
    found = {}
    for (_, shape, *_), digests in groups.items():
        ranked = Counter(digests.values()).most_common()
        majority = None if len(ranked) > 1 and ranked[0][1] == ranked[1][1] else ranked[0][0]
        for name, digest in digests.items():
            if digest != majority:
                other = next(o for o, theirs in digests.items() if theirs != digest and majority in (None, theirs))
                found[name, shape] = (
                    f"The result of {name} differs from that of {other}, though both have one numeric contract and the same inputs."
                )
    return found


# Rows


def frame_of(kind: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a frame of that kind, numbers with the digits that they deserve."""
    frame = pd.DataFrame(rows, columns=list(schemas.columns(kind)))
    for name, digits in DIGITS.items():
        if name in frame:
            frame[name] = frame[name].astype("float64").round(digits)
    for name, rule in schemas.columns(kind).items():
        if rule["type"] == "integer":
            frame[name] = frame[name].astype("Int64")
    return frame


DIGITS = {
    "time_us": 4,
    "tflops": 3,
    "control_tflops": 3,
    "share_percent": 3,
    "share_low_percent": 3,
    "share_high_percent": 3,
    "sm_mhz": 0,
    "mhz_low": 0,
    "mhz_high": 0,
    "power_w": 1,
    "gain_log": 6,
    "gain_percent": 4,
    "total_percent": 4,
    "total_low_percent": 4,
    "total_high_percent": 4,
    "low_percent": 4,
    "high_percent": 4,
    "claim_low_percent": 4,
    "claim_high_percent": 4,
    "before_percent": 4,
    "after_percent": 4,
    "difference_percent": 4,
    "floor_percent": 4,
    "within_percent": 4,
    "between_percent": 4,
    "spread_percent": 4,
    "spread_freedom": 2,
    "least_percent": 4,
    "most_percent": 4,
    "tensor_busy_percent": 2,
    "cycles": 4,
    "low": 4,
    "high": 4,
    "gb_per_s": 2,
    "control_gb_per_s": 2,
}


def where(experiment: Experiment, shape: Shape) -> dict[str, int]:
    """A shape as the cells of a row."""
    return dict(zip(experiment.axis_names, shape, strict=True))


def _middle(values: NDArray[np.float64]) -> float | None:
    """Median of what was read; None where nothing was."""
    read = values[~np.isnan(values)]
    return float(np.median(read)) if len(read) else None


def _arm(name: str, arm: str, shape: Shape, measured: Measured) -> Arm:
    """That arm in the recording of variant `name`, or why there is none."""
    recordings, arms, here = measured.recordings, measured.arms, measured.where(shape)
    if name not in arms:
        failure = _build_failure(recordings.inspects.get(name))
        return Arm(failure.status, failure.reason or f"{name} has no sweep CSV.")
    if found := arms[name].get(shape, {}).get(arm):
        return found
    manifest = recordings.sweeps[name].manifest
    for described in manifest.get("shapes", []):
        if all(described[axis] == value for axis, value in here.items()):
            if lost := described.get("lost", {}).get(arm):
                return Arm(lost["status"], lost["reason"])
            if reason := described.get("excluded", {}).get(arm):
                return Arm("wrong", reason)
    if reason := manifest.get("not_timed", {}).get(arm):
        return Arm(_build_failure(recordings.inspects.get(arm)).status, reason)
    return Arm("not run", f"{arm} was not timed at this shape in the job of {name}.")


def _build_failure(inspected: pd.DataFrame | None) -> Arm:
    """Why there is no binary to time, as the inspect CSV says it."""
    if inspected is not None:
        for status, reason in inspected[["status", "reason"]].itertuples(index=False):
            if status in ("build failed", "not on this chip"):
                return Arm(status, reason)
    return Arm("not run", "")


def paired(before: Arm, after: Arm) -> NDArray[np.float64]:
    """log(time before / time after) of the rounds that both arms have, in order; above 0 where `after` is faster."""
    _, i, j = np.intersect1d(before.rounds, after.rounds, assume_unique=True, return_indices=True)
    return np.log(before.time_us[i] / after.time_us[j])


def shares_of(measured: Measured) -> dict[tuple[str, Shape], stats.Median]:
    """(variant, shape) -> log of its share of the control, where both were timed."""
    shares = {}
    for variant in measured.asked:
        for shape in measured.shapes_of(variant.name):
            rung, control = (_arm(variant.name, arm, shape, measured) for arm in (variant.name, "control"))
            if rung.status == control.status == "ok" and len(ratios := paired(control, rung)):
                shares[variant.name, shape] = stats.median_error(ratios)
    return shares


def spreads_of(measured: Measured) -> dict[Shape, stats.Spread]:
    """By how much a binary's log-share of the control differs from job to job, of each shape by itself.

    From every binary that several jobs timed: the floor jobs' arms, and each rung in its own job and as predecessor in those
    of others. Empty where there is none: then nothing says whether shares of two jobs differ.
    """
    jobs: list[Arms] = [*measured.arms.values(), *measured.floor_arms]
    spreads = {}
    for shape in measured.shapes:
        ratios: dict[str, dict[int, NDArray[np.float64]]] = defaultdict(dict)
        for job, arms in enumerate(jobs):
            here = arms.get(shape, {})
            for name in here if "control" in here else ():
                if name not in ("twin", "control"):
                    ratios[name][job] = paired(here["control"], here[name])
        repeated = {name: found for name, found in ratios.items() if len(found) > 1}
        medians = {n: {job: stats.median_error(log) for job, log in found.items()} for n, found in repeated.items()}
        if spread := stats.spread_between_jobs(medians):
            spreads[shape] = spread
    return spreads


def shape_rows(
    measured: Measured, shares: Mapping[tuple[str, Shape], stats.Median], spreads: Mapping[Shape, stats.Spread]
) -> list[dict[str, Any]]:
    """A row per variant asked for and shape, with `shares_of` and `spreads_of` what was read."""
    recordings, rows = measured.recordings, []
    for variant in measured.asked:
        recording = recordings.sweeps.get(variant.name)
        common = {
            "variant": variant.name,
            "rungs": " ".join(measured.experiment.rung_names(variant)),
            "run_id": recording.manifest["run_id"] if recording else "",
        }
        for shape in measured.shapes:
            rung = _arm(variant.name, variant.name, shape, measured)
            row: dict[str, Any] = {**common, **measured.where(shape), "status": rung.status, "reason": rung.reason}
            if rung.status == "ok":
                flop = 2 * math.prod(shape)
                time_us = float(np.median(rung.time_us))
                row |= {
                    "time_us": time_us,
                    "tflops": flop / time_us / 1e6,
                    "rounds": len(rung.rounds),
                    "flagged": rung.flagged,
                }
                row |= {"sm_mhz": _middle(rung.sm_mhz), "power_w": _middle(rung.power_w)}
                control = _arm(variant.name, "control", shape, measured)
                if share := shares.get((variant.name, shape)):
                    low, high = share.interval()
                    row |= {"control_tflops": flop / float(np.median(control.time_us)) / 1e6}
                    row |= _percents("share", 100 * math.exp(share.value), 100 * math.exp(low), 100 * math.exp(high))
                    if spread := spreads.get(shape):
                        row["spread_percent"] = stats.percent(spread.deviation)
                        row["spread_freedom"] = spread.freedom
                elif control.status == "ok":
                    row |= {"status": "flagged", "reason": "No round has both unflagged."}
                elif control.status != "not run":
                    row |= {"status": control.status, "reason": f"Control: {control.reason}"}
            elif rung.status == "flagged":
                row["flagged"] = rung.flagged
            rows.append(row)
    return rows


def _point_rows(measured: Measured, shares: Mapping[tuple[str, Shape], stats.Median]) -> list[dict[str, Any]]:
    """A row per variant asked for and point of an experiment that is no GEMM.

    Of times, bytes per second and the share of the control's bytes per second; of cycles, the median with its interval.
    """
    experiment, workload, rows = measured.experiment, workloads.of(measured.experiment), []
    for variant in measured.asked:
        recording = measured.recordings.sweeps.get(variant.name)
        common = {
            "variant": variant.name,
            "rungs": " ".join(experiment.rung_names(variant)),
            "run_id": recording.manifest["run_id"] if recording else "",
        }
        for shape in measured.shapes_of(variant.name):
            rung = _arm(variant.name, variant.name, shape, measured)
            row: dict[str, Any] = {**common, **measured.where(shape), "status": rung.status, "reason": rung.reason}
            if rung.status == "ok":
                work = workload.work(experiment, variant, measured.device, shape, measured.sms)
                middle = stats.median_error(np.log(rung.time_us))
                bounds = [math.exp(bound) if math.isfinite(bound) else None for bound in middle.interval()]
                value = float(np.median(rung.time_us))
                row |= {"rounds": len(rung.rounds), "flagged": rung.flagged}
                if workload.MEASURES == "cycles":
                    row |= {"cycles": value, "low": bounds[0], "high": bounds[1]}
                else:
                    row |= {"time_us": value, "low": bounds[0], "high": bounds[1]}
                    row |= {"sm_mhz": _middle(rung.sm_mhz), "power_w": _middle(rung.power_w)}
                    moved = work.read_bytes + work.written_bytes
                    row["gb_per_s"] = moved / value / 1e3
                    if work.flop:
                        row["tflops"] = work.flop / value / 1e6
                    control = _arm(variant.name, "control", shape, measured)
                    if share := shares.get((variant.name, shape)):
                        copied = control_bytes(measured, variant, shape)
                        row["control_gb_per_s"] = copied / float(np.median(control.time_us)) / 1e3
                        low, high = (math.exp(bound) * moved / copied * 100 for bound in share.interval())
                        row |= _percents("share", math.exp(share.value) * moved / copied * 100, low, high)
                    elif control.status == "ok":
                        row["reason"] = "No share of the control: no round has both unflagged."
                    elif control.status != "not run":
                        row["reason"] = f"No share of the control: {control.reason}"
            elif rung.status == "flagged":
                row["flagged"] = rung.flagged
            rows.append(row)
    return rows


def control_bytes(measured: Measured, variant: Variant, shape: Shape) -> int:
    """What the control moves at a point: it reads and writes the largest input."""
    of = (measured.experiment, variant, measured.device, shape, measured.sms)
    return workloads.copied_bytes(workloads.of(measured.experiment).operands(*of))


def _percents(name: str, value: float, low: float, high: float) -> dict[str, float | None]:
    """Value and interval; no interval where there were too few rounds for one."""
    bounds = (low, high) if math.isfinite(high) else (None, None)
    return {f"{name}_percent": value, f"{name}_low_percent": bounds[0], f"{name}_high_percent": bounds[1]}


def arms_of_step(measured: Measured, step: Step, shape: Shape) -> tuple[Arm, Arm]:
    """Both rungs of a step as the job of its target timed them; the first is wrong where it is in its own job."""
    source, target = step.source_variant.name, step.target_variant.name
    before, after = (_arm(target, arm, shape, measured) for arm in (source, target))
    own = measured.arms.get(source, {}).get(shape, {}).get(source)
    return (own if before.status == "ok" and own and own.status == "wrong" else before), after


def _step_rows(measured: Measured, steps: Sequence[Step]) -> list[dict[str, Any]]:
    recordings = measured.recordings
    rows: list[dict[str, Any]] = []
    medians: list[stats.Median | None] = []
    for step in steps:
        source, target = step.source_variant.name, step.target_variant.name
        recording = recordings.sweeps.get(target)
        uncontrolled = why_not_controlled(step, recordings.inspects)
        for shape in measured.shapes_of(source, target):
            row: dict[str, Any] = {"ladder": step.ladder, "step": step.label, "factor": step.factor}
            row |= measured.where(shape)
            row |= {
                "source_variant": source,
                "target_variant": target,
                "controlled": not uncontrolled,
                "verdict": "none",
            }
            row |= {"run_id": recording.manifest["run_id"] if recording else "", "status": "ok", "reason": uncontrolled}
            before, after = arms_of_step(measured, step, shape)
            median = None
            failed = next((arm for arm in (after, before) if arm.status != "ok"), None)
            if failed:
                row |= {"status": failed.status, "reason": failed.reason}
            elif not len(ratios := paired(before, after)):
                row |= {"status": "flagged", "reason": "No round has both rungs unflagged."}
            else:
                median = stats.median_error(ratios)
                row["rounds"] = median.rounds
            rows.append(row)
            medians.append(median)
    claims = Counter(row["ladder"] for row, median in zip(rows, medians, strict=True) if median)
    for row, median in zip(rows, medians, strict=True):
        if median:
            floor = measured.floors[measured.shape_class(measured.shape_of(row))]
            row |= _judge(median, floor, claims[row["ladder"]], row["reason"])
    return rows


def _judge(median: stats.Median, floor: stats.Floor | None, claims: int, reason: str) -> dict[str, Any]:
    """Gain, intervals, floor and verdict of one step at one shape, on log-ratios, told in percent."""
    low, high = median.interval()
    claim_low, claim_high = median.interval(stats.claim_level(claims))
    row: dict[str, Any] = {"gain_percent": stats.percent(median.value)}
    if math.isfinite(high):
        row |= {"low_percent": stats.percent(low), "high_percent": stats.percent(high)}
        row |= {"claim_low_percent": stats.percent(claim_low), "claim_high_percent": stats.percent(claim_high)}
    if floor is None:
        return row | {"reason": reason or "The floor of this shape class was not measured, so that no claim is made."}
    row |= {"floor_percent": stats.percent(floor.value), "verdict": stats.verdict(claim_low, claim_high, floor.value)}
    if row["verdict"] == "undecided":
        row["rounds_to_decide"] = stats.rounds_to_decide(
            median.value, claim_low, claim_high, floor.value, median.rounds
        )
    return row


def _class(experiment: Experiment, device: Device, shape: Shape, sms: int | None) -> str:
    """The class of a shape, the same for the whole experiment: by the tile of the binary that its floor is measured with."""
    if experiment.workload != GEMM:
        return ALL
    m, n, k = shape
    macros = experiment.macros(experiment.floor_variant, device)
    tile = macros["TILE_M"], macros["TILE_N"], macros["TILE_K"]
    return stats.shape_class((m, n, k), tile, device.pinned(experiment.name), sms or 1)


ALL = "all points"


def _classes(experiment: Experiment) -> tuple[str, ...]:
    """Classes of shapes that have a floor each: one of all points where the experiment is no GEMM."""
    return stats.CLASSES if experiment.workload == GEMM else (ALL,)


def _floors(
    experiment: Experiment, device: Device, floors: Sequence[Recording], floor_arms: Sequence[Arms], sms: int | None
) -> dict[str, stats.Floor | None]:
    """Per shape class, what the floor jobs show of the same binary.

    Between jobs it is compared by its ratio to its predecessors, which is what a step is; by the ratio to the control where
    it was timed without one. (cuBLAS itself differs by more from process to process than a kernel without workspace does.)
    """
    twin: dict[str, dict[Shape, list[float]]] = {name: defaultdict(list) for name in _classes(experiment)}
    other: dict[str, dict[Hashable, list[float]]] = {name: defaultdict(list) for name in _classes(experiment)}
    for recording, arms in zip(floors, floor_arms, strict=True):
        name = recording.manifest["variant"]
        for shape, here in arms.items():
            rung, where = here.get(name), _class(experiment, device, shape, sms)
            predecessors = [arm for arm in here if arm not in (name, "twin", "control")] or ["control"]
            for arm in ("twin", *predecessors):
                if rung and rung.status == "ok" and arm in here and len(ratios := paired(here[arm], rung)):
                    median = float(np.median(ratios))
                    if arm == "twin":
                        twin[where][shape].append(median)
                    else:
                        other[where][shape, name, arm].append(median)
    return {name: stats.floor_of(twin[name], other[name], len(floors)) for name in _classes(experiment)}


def _floor_rows(measured: Measured) -> list[dict[str, Any]]:
    """A row per shape class, with the rounds and the clocks of the floor jobs; these are empty without any."""
    rows = []
    found: dict[str, list[Arm]] = {name: [] for name in _classes(measured.experiment)}
    for recording, arms in zip(measured.recordings.floors, measured.floor_arms, strict=True):
        for shape, here in arms.items():
            if (arm := here.get(recording.manifest["variant"])) and arm.status == "ok":
                found[measured.shape_class(shape)].append(arm)
    for name, floor in measured.floors.items():
        row: dict[str, Any] = {
            "shape_class": name,
            "shapes": floor.shapes if floor else 0,
            "jobs": floor.jobs if floor else 0,
        }
        if floor:
            row |= {"floor_percent": stats.percent(floor.value), "within_percent": stats.percent(floor.within)}
            row["between_percent"] = None if floor.between is None else stats.percent(floor.between)
        if rounds := [len(arm.rounds) for arm in found[name]]:
            row |= {"rounds_low": min(rounds), "rounds_high": max(rounds)}
        if clocks := [mhz for arm in found[name] if (mhz := _middle(arm.sm_mhz)) is not None]:
            row |= {"mhz_low": min(clocks), "mhz_high": max(clocks)}
        rows.append(row)
    return rows


def _resources(frame: pd.DataFrame | None, kind: str) -> dict[str, float]:
    if frame is None:
        return {}
    rows = frame[(frame["kind"] == kind) & frame["value"].notna()]
    return dict(zip(rows["name"], rows["value"].astype(float), strict=True))


def why_not_controlled(step: Step, inspects: Mapping[str, pd.DataFrame]) -> str:
    """One sentence where something other than the declared factor may have moved; empty where nothing has."""
    pair = {step.source: step.source_variant.name, step.target: step.target_variant.name}
    for rung, name in pair.items():
        if name not in inspects:
            return f"Not controlled: {rung} ({name}) has no inspect CSV."
        bad = inspects[name][~inspects[name]["status"].isin(["ok", ""])]
        if len(bad):
            return f"Not controlled: {rung}, {bad['status'].iloc[0]}: {bad['reason'].iloc[0]}"
    before, after = (_resources(inspects[name], "resource").get("ctas_per_sm") for name in pair.values())
    if before is None or after is None:
        return (
            f"Not controlled: {step.source if before is None else step.target} has no ctas_per_sm in its inspect CSV."
        )
    if before != after and load_experiment(step.source_variant.experiment).workload == GEMM:
        return f"Not controlled: {step.source} has {before:.0f} CTAs per SM and {step.target} {after:.0f}."
    return ""


def _changes(step: Step, inspects: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """What differs between the binaries; registers and CTAs per SM always, so that "the same" is on record too."""
    frames = inspects.get(step.source_variant.name), inspects.get(step.target_variant.name)
    rows = []
    for kind in ("resource", "opcode", "opcode_total"):
        before, after = (_resources(frame, kind) for frame in frames)
        always = ("registers", "ctas_per_sm") if kind == "resource" else ()
        absent = None if kind == "resource" else 0.0
        for name in dict.fromkeys([*always, *sorted({*before, *after})]):
            a, b = (
                None if frame is None else values.get(name, absent)
                for frame, values in zip(frames, (before, after), strict=True)
            )
            if a != b or name in always:
                rows.append(
                    {"ladder": step.ladder, "step": step.label, "kind": kind, "name": name, "before": a, "after": b}
                )
    return rows


def _counter_rows(
    experiment: Experiment,
    asked: Sequence[Variant],
    shapes: Sequence[Shape],
    profiles: Mapping[str, Recording],
    chip: str,
) -> list[dict[str, Any]]:
    wants = {metric.metric: metric.want for metric in metrics_for(chip)} if profiles else {}
    rows: list[dict[str, Any]] = []
    for variant in asked:
        common = {"variant": variant.name, "rungs": " ".join(experiment.rung_names(variant))}
        if variant.name not in profiles:
            common |= {"want": "all", "metric": "", "unit": "", "run_id": "", "status": "not run"}
            rows += [
                {**common, **where(experiment, shape), "reason": f"{variant.name} has no profile CSV."}
                for shape in _profiled(experiment, shapes)
            ]
            continue
        frame = profiles[variant.name].frame
        seen: set[tuple] = set()
        for record in frame.drop(columns=["experiment", "variant"]).to_dict("records"):
            metric = str(record["metric"])
            want = wants.get(metric, metric) or "all"
            key = tuple(record[axis] for axis in experiment.axis_names)
            if (key, want) in seen:
                want = metric
            seen.add((key, want))
            value = record["value"]
            rows.append({**common, **record, "want": want, "value": None if pd.isna(value) else float(value)})
    return rows


def _profiled(experiment: Experiment, shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes to profile; the experiment's own where none of them was swept."""
    own = list(experiment.profile_shapes)
    return [shape for shape in own if shape in shapes] or own


def coverage_rows(measured: Measured, profiled: Sequence[Shape]) -> list[dict[str, Any]]:
    """What came of everything asked for; profiles and floors only where one ran (`preset=quick` asks for none)."""
    recordings = measured.recordings
    nowhere: dict[str, None] = dict.fromkeys(measured.experiment.axis_names)
    rows: list[dict[str, Any]] = []
    for variant in measured.asked:
        name = variant.name
        inspected = recordings.inspects.get(name)
        if inspected is None:
            status, reason = "not run", f"{name} has no inspect CSV."
        else:
            status, reason = _worst(inspected)
        rows.append({"variant": name, "what": "inspect", **nowhere, "status": status, "reason": reason})
        for shape in measured.shapes_of(name):
            arm = _arm(name, name, shape, measured)
            cells = measured.where(shape)
            rows.append({"variant": name, "what": "sweep", **cells, "status": arm.status, "reason": arm.reason})
        profile = recordings.profiles.get(name)
        if profile is None and recordings.profiles:
            status, reason = "not run", f"{name} has no profile CSV."
            rows += [
                {"variant": name, "what": "profile", **measured.where(shape), "status": status, "reason": reason}
                for shape in profiled
            ]
        elif profile is not None:
            for point, group in profile.frame.groupby(list(nowhere)):
                counted = (group["status"] == "ok").any()
                status, reason = ("ok", "") if counted else _worst(group)
                rows.append(
                    {
                        "variant": name,
                        "what": "profile",
                        **measured.where(tuple(int(value) for value in point)),
                        "status": status,
                        "reason": reason,
                    }
                )
    floor_name = measured.experiment.floor_variant.name
    for shape in measured.shapes_of(floor_name) if measured.floor_arms else []:
        found = [job[shape][floor_name] for job in measured.floor_arms if floor_name in job.get(shape, {})]
        failed = next((arm for arm in found if arm.status != "ok"), None)
        arm = failed or (found[0] if found else Arm("not run", "No floor job timed this shape."))
        rows.append(
            {
                "variant": floor_name,
                "what": "floor",
                **measured.where(shape),
                "status": arm.status,
                "reason": arm.reason,
            }
        )
    return rows


def _worst(frame: pd.DataFrame) -> tuple[str, str]:
    """The first failure; a metric that the chip lacks only where nothing else went wrong."""
    bad = frame[~frame["status"].isin(["ok", ""])]
    bad = bad[bad["status"] != "not on this chip"] if (bad["status"] != "not on this chip").any() else bad
    return (str(bad["status"].iloc[0]), str(bad["reason"].iloc[0])) if len(bad) else ("ok", "")


# What a figure or a table says of where its numbers come from


@dataclass(frozen=True)
class FloorJob:
    """Where and when a floor job ran."""

    run_id: str
    build_id: str
    board: str
    day: str


@dataclass(frozen=True)
class Facts:
    """What the manifests of an experiment's recordings say, for captions and provenance lines.

    `sweeps` and `profiles`: variant -> (run_id, build_id). `boards` and `profile_boards`: variant -> UUID of the GPU, of
    those that have one. `floors`: file -> floor job. `dates` and `profile_dates` are one day or a range.
    """

    gpu: str
    driver: str
    clock: str
    fill: str
    l2: str
    control: str
    software: str
    ncu: str
    dates: str
    profile_dates: str
    sweeps: Mapping[str, tuple[str, str]]
    profiles: Mapping[str, tuple[str, str]]
    boards: Mapping[str, str] = field(default_factory=dict)
    profile_boards: Mapping[str, str] = field(default_factory=dict)
    floors: Mapping[str, FloorJob] = field(default_factory=dict)

    def on(self, boards: Iterable[str]) -> str:
        """The model, with the number of these boards where it is more than one: `NVIDIA H200 (3 boards)`."""
        count = len(set(boards))
        return f"{self.gpu} ({count} boards)" if count > 1 else self.gpu


CLOCKS = {"observe": "clock observed, not locked", "lock": "clock locked"}


def facts_of(results: Path, experiment_name: str, variants: Iterable[str] | None = None) -> Facts:
    """Read the manifests of an experiment in a results set, of these variants alone where they are given."""
    found, wanted = ResultsSet(results), None if variants is None else set(variants)
    sweeps = found.all_manifests("sweep", experiment_name, wanted)
    profiles = found.all_manifests("profile", experiment_name, wanted)
    every = [*sweeps.values(), *profiles.values()]

    def values(*keys: str, among: Sequence[Mapping[str, Any]] = every) -> str:
        found = (str(value) for manifest in among if (value := _at(manifest, keys)) not in (None, ""))
        return ", ".join(dict.fromkeys(found)) or "unknown"

    clock = values("clock", "mode", among=list(sweeps.values()))
    timed = list(sweeps.values()) or every  # a profile's job only launches: it reads no version from torch itself
    versions = {name: values("software", name, among=timed) for name in ("torch", "cuda")}
    software = [f"{name} {version}" for name, version in versions.items() if version != "unknown"]
    return Facts(
        gpu=values("gpu", "name"),
        driver=values("gpu", "driver"),
        clock=CLOCKS.get(clock, f"clock {clock}"),
        fill=values("fill"),
        l2=values("l2"),
        control=values("control", "name"),
        software=", ".join(software),
        ncu=values("ncu", "version"),
        dates=_days(sweeps),
        profile_dates=_days(profiles),
        sweeps={name: (str(m.get("run_id")), str(_at(m, ("arms", name, "build_id")))) for name, m in sweeps.items()},
        profiles={name: (str(m.get("run_id")), str(_at(m, ("binary", "build_id")))) for name, m in profiles.items()},
        boards=_boards(sweeps),
        profile_boards=_boards(profiles),
        floors={
            name: FloorJob(
                str(m.get("run_id")),
                str(_at(m, ("arms", str(m["variant"]), "build_id"))),
                str(_at(m, ("gpu", "uuid"))),
                _days({name: m}),
            )
            for name, m in found.all_manifests("floor", experiment_name).items()
        },
    )


def _boards(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: str(uuid) for name, manifest in manifests.items() if (uuid := _at(manifest, ("gpu", "uuid")))}


def _days(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    days = sorted({str(m["measured_at"])[:10] for m in manifests.values() if m.get("measured_at")})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "date unknown"


def read_data(results: Path, experiment_name: str) -> dict[str, pd.DataFrame]:
    """The six frames that `run` wrote."""
    folder = results / "data" / experiment_name
    experiment = load_experiment(experiment_name)
    names = frames_of(experiment)
    return {name: schemas.read_csv(_kind(experiment, name), folder / f"{name}.csv") for name in names}


def measured_ladders(experiment: Experiment, shapes: pd.DataFrame) -> list[Ladder]:
    """Ladders of which the set was asked for two rungs or more: one rung alone (S3 is B3) is no ladder.

    Nor are two that stand on a ladder that is there whole (A3t and A3 are S1 and S3).
    """
    asked = set(shapes["variant"])
    rungs = {name: {variant.name for variant in ladder.rungs.values()} for name, ladder in experiment.ladders.items()}
    whole = [names for names in rungs.values() if names <= asked]
    return [
        ladder
        for name, ladder in experiment.ladders.items()
        if len(there := rungs[name] & asked) > 1
        and (there == rungs[name] or not any(there <= names for names in whole))
    ]


def mhz_range(shapes: pd.DataFrame) -> str:
    """Clocks under which the rungs of these rows ran: `1425 to 1980 MHz`."""
    return f"{_range(shapes['sm_mhz'])} MHz" if shapes["sm_mhz"].notna().any() else "clock not read"


def rounds_range(shapes: pd.DataFrame) -> str:
    return _range(shapes["rounds"]) if shapes["rounds"].notna().any() else "no"


def _range(values: pd.Series) -> str:
    return span_text(values.dropna().astype(float).tolist())


def span_text(values: Sequence[float]) -> str:
    """`30`, `20 to 200`; empty of nothing."""
    if not values:
        return ""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"
