"""The sweep of one rung: correctness, then paired rounds at every shape, in a process that can be lost without losing the rest.

`supervise` is the job. It has `run_child` do the work in a warm process, one part file per shape, and when that process
crashes, hangs or is killed it records the shape it was at and has the others done by another process.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rungs import __version__, clock, protocol, schemas, warm, workloads
from rungs.binary import load_binary, made_as
from rungs.errors import Refused
from rungs.files import ROOT, read_json, sha256_file, sha256_json, write_json
from rungs.plan import check_point
from rungs.results import keep
from rungs.sampler import UNREADABLE, Sampler
from rungs.variants import GEMM, Device, Experiment, Variant, load_device, load_experiment

CONTROL = "control"
TWIN = "twin"
BOUND = 1e-2
"""Relative Frobenius error allowed for bf16 results against a float64 reference."""
FLOAT_BOUND = 1e-5
"""The same for fp32 results."""
SM_BYTES_PER_CYCLE = 64
"""What an SM can take from L2 in a cycle (the width of its port since Volta; Jia et al., arXiv 1804.06826, section 3.4)."""
HEADROOM = 1.02
"""The stamps bracket the sample, so that its clock is known to a little less than this."""
POLL_SECONDS = 0.05
SESSION = "session.json"
"""What a child writes last; the other names in a job's folder are those of its parts, and `CLOCK`."""
CLOCK = "clock.json"
"""The clock record as a child last knew it, for the manifest of a job whose last child was lost."""
LOAD_PROBLEM = (4096, 4096, 4096)
"""What the control runs while a lock is tried: it draws as much power as any shape of a sweep."""


# ---- the process that measures ---------------------------------------------------------------------------------------


def run_child(job_path: Path) -> int:
    """Measure the shapes of a job file that have no part yet; writes `<index>.json` for each and `SESSION`."""
    from rungs import gpu

    job = read_json(job_path)
    seconds = Phases(job["started"])
    parts = job_path.parent
    experiment, device = load_experiment(job["experiment"]), load_device(job["arch"])
    rung = experiment.variant(job["variant"])
    settings = protocol.Settings(**job["settings"])
    chosen = next(g for g in clock.gpus() if g.uuid == job["gpu"])
    binaries = {name: load_binary(experiment, Path(path)) for name, path in job["binaries"].items()}

    seconds.end("start")
    session = gpu.open_session(experiment, chosen.uuid)
    session.load_stamp(Path(job["stamp"]).with_suffix(".cubin"))
    for arm, binary in binaries.items():
        session.load(arm, experiment, binary.variant, device, binary.cubin)
    seconds.end("cuda")
    load = None
    if job["clock"]["mode"] == "lock":
        problem = _load_problem(experiment, rung, device, job["shapes"])
        if problem is not None:
            session.set_problem(problem, "normal", settings.seed)
            load = clock.under(chosen, session.busy)
    with (
        clock.held(job["clock"], chosen, load) as held,
        Sampler(chosen, memory_mhz=held.locked_memory_mhz) as sampler,
    ):
        write_json(parts / CLOCK, held.record)
        seconds.end("clock")
        under_load = False
        measure_at = _measure if _timed(experiment) else _count_cycles
        for index, shape in protocol.largest_first(job["shapes"]):
            part = parts / f"{index}.json"
            if part.exists():
                continue
            at_arm = functools.partial(_at, parts / "current", index)
            at_arm("")
            lost = job["lost_arms"].get(str(index), {})
            started = time.monotonic()
            try:
                check_point(experiment, rung, device, shape)
                at = At(experiment, rung, device, shape)
                warm_seconds = protocol.warm_up_seconds(settings, under_load)
                measured = measure_at(session, at, settings, sampler, held, warm_seconds, lost, at_arm, seconds)
                if held.record["load_mhz"] is None:
                    held.record["load_mhz"] = _median_mhz(measured["samples"])
                under_load = True
            except Refused as refusal:
                measured = failed(refusal.status, str(refusal))
            write_json(part, measured)
            done = f"{len(measured['samples'])} samples" if measured["status"] == "ok" else measured["reason"]
            print(f"{rung.name} {experiment.describe(shape)}: {done} in {time.monotonic() - started:.2f} s", flush=True)
    print(f"{rung.name}: {seconds}", flush=True)
    # Last of all, when the clock is restored: from here on the supervisor does not wait for CUDA to take itself apart.
    write_json(parts / SESSION, {**session.describe(), "clock": held.record})
    return 0


class Phases:
    """Where a job's seconds go, for its log: each phase's end adds what has passed since the end of the one before."""

    def __init__(self, started: float) -> None:
        self._last, self._seconds = started, dict[str, float]()

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self._seconds.items())


def _at(current: Path, index: int, arm: str) -> None:
    """Note the shape, and the arm that is being checked, for the supervisor: what a lost process was lost at."""
    current.write_text(f"{index} {arm}")


def _median_mhz(samples: Sequence[Mapping[str, Any]]) -> int | None:
    clocks = sorted(sample["sm_mhz"] for sample in samples if sample["sm_mhz"])
    return round(clocks[len(clocks) // 2]) if clocks else None


def failed(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason, "samples": [], "shape": {"stop": "failed"}}


@dataclass(frozen=True)
class At:
    """What is measured, and where: a rung at a shape."""

    experiment: Experiment
    rung: Variant
    device: Device
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.rung.name} at {self.experiment.describe(self.shape)}"

    @property
    def bound(self) -> float:
        return BOUND if self.experiment.workload == GEMM else FLOAT_BOUND

    def implausible(self, arm: str, sample: protocol.Sample, session: Any) -> str:
        """Why no GPU can have been as fast as the sample says, or an empty string."""
        if not sample.sm_mhz and self.experiment.workload == GEMM:
            return ""
        if self.experiment.workload == GEMM:
            m, n, k = self.shape
            peak = self.device.bf16_flop_per_sm_cycle * session.sms
            if 2.0 * m * n * k / sample.time_us <= HEADROOM * peak * sample.sm_mhz:
                return ""
            return (
                f"{arm} at {self.experiment.describe(self.shape)}: {sample.time_us:.3f} us is faster than the peak of"
                f" {peak:.0f} FLOP per cycle at {sample.sm_mhz:.0f} MHz."
            )
        variant = session.arms[arm].variant if arm in session.arms else self.rung
        of = (self.experiment, variant, self.device, self.shape)
        operands = workloads.of(self.experiment).operands(*of, session.sms)
        moved, footprint = workloads.of(self.experiment).work(*of, session.sms), workloads.footprint(operands)
        total = workloads.copied_bytes(operands) if arm == CONTROL else moved.read_bytes + moved.written_bytes
        # What L2 holds may be read many times in a launch.
        limits = [(session.dram_bytes_per_us, "the memory's")] if footprint > 2 * session.l2_bytes else []
        if sample.sm_mhz:
            limits.append((2 * SM_BYTES_PER_CYCLE * session.sms * sample.sm_mhz, "what SMs and L2 can exchange,"))
        for limit, whose in limits:
            if total / sample.time_us > HEADROOM * limit:
                return (
                    f"{arm} at {self.experiment.describe(self.shape)}: {total} bytes in {sample.time_us:.3f} us are above"
                    f" {whose} {limit / 1e6:.2f} TB/s."
                )
        return ""


def _timed(experiment: Experiment) -> bool:
    """Whether rounds are timed; else the kernel's own clock is read."""
    return experiment.workload == GEMM or workloads.of(experiment).MEASURES == "time"


def _control(experiment: Experiment) -> str:
    """What stands beside every variant; empty for none."""
    return "torch.matmul" if experiment.workload == GEMM else workloads.of(experiment).CONTROL


def _load_problem(experiment: Experiment, rung: Variant, device: Device, shapes: Sequence[Sequence[int]]) -> Any:
    """What is run while a lock is tried; None for a rung that supports none of its points, each of which will say why."""
    if experiment.workload == GEMM:
        return LOAD_PROBLEM
    for shape in shapes:
        try:
            check_point(experiment, rung, device, tuple(shape))
        except Refused:
            continue
        return tuple(shape)
    return None


def _count_cycles(
    session: Any,
    at: At,
    settings: protocol.Settings,
    sampler: Any,
    _held: Any,
    _warm_seconds: float,
    lost: Mapping[str, Mapping[str, str]],
    at_arm: Callable[[str], None],
    seconds: Phases,
) -> dict[str, Any]:
    """One point of kernels that read their own clock: check every arm, count in rounds, check again."""
    excluded: dict[str, str] = {}
    session.set_problem(at.shape, *protocol.counted_inputs(settings))
    lost = _without_refused(session, at.rung.name, lost)
    present = [arm for arm in session.arms if arm not in lost]
    bits = {}
    for arm in present:
        at_arm(arm)
        outcome = session.outcome(arm)
        bits[arm] = outcome.bits
        if outcome.unwritten or not outcome.equal:
            excluded[arm] = f"{session.arms[arm].variant.name} reads something else than it should{_extent(outcome)}"
    at_arm("")
    if at.rung.name in excluded:
        return failed("wrong", f"{excluded[at.rung.name]}.")
    seconds.end("check")
    arms = [arm for arm in present if arm not in excluded]
    samples, stop = protocol.count_rounds(
        _Timed(session, str(at)), at.rung.name, arms, settings, at.shape, lambda: protocol.Condition(*sampler.read())
    )
    seconds.end("time")
    for arm in arms:
        if session.outcome(arm).bits != bits[arm]:
            reason = f"{session.arms[arm].variant.name} gives another result after counting than before."
            if arm == at.rung.name:
                return failed("wrong", reason)
            excluded[arm] = reason
            samples = [sample for sample in samples if sample.arm != arm]
    seconds.end("check")
    described = {"rounds": max(sample.round for sample in samples), "stop": stop, "excluded": excluded, "lost": lost}
    return {"status": "ok", "reason": "", "samples": [asdict(sample) for sample in samples], "shape": described}


def _without_refused(session: Any, rung: str, lost: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """The arms that are left out before any is launched, and why: those lost, and those that do not support the problem.

    Raises Refused where the rung itself does not.
    """
    if rung in session.refused:
        raise Refused(session.refused[rung])
    return {arm: {"status": "refused", "reason": reason} for arm, reason in session.refused.items()} | dict(lost)


def _measure(
    session: Any,
    at: At,
    settings: protocol.Settings,
    sampler: Any,
    held: Any,
    warm_seconds: float,
    lost: Mapping[str, Mapping[str, str]],
    at_arm: Callable[[str], None],
    seconds: Phases,
) -> dict[str, Any]:
    """One shape: check every arm, time them, check again. `lost` are the arms that an earlier process was lost at, and why."""
    experiment, rung, shape = at.experiment, at.rung.name, at.shape
    excluded: dict[str, str] = {}
    session.set_problem(shape, "integer", settings.seed)
    lost = _without_refused(session, rung, lost)
    present = [arm for arm in session.arms if arm not in lost]
    for arm in present:
        at_arm(arm)
        outcome = session.outcome(arm)
        if not (outcome.unwritten == 0 and outcome.equal):
            excluded[arm] = (
                f"{session.arms[arm].variant.name} is wrong on integers whose sums are exact{_extent(outcome)}"
            )
    between = session.set_problem(shape, *protocol.timed_inputs(settings))
    bits: dict[str, str] = {}
    controls = (CONTROL,) if _control(experiment) else ()
    for arm in (*present, *controls):
        at_arm(arm)
        outcome = session.outcome(arm)
        bits[arm] = outcome.bits
        if arm == rung:
            error = outcome.error
        if outcome.unwritten or not outcome.error < at.bound:
            excluded.setdefault(
                arm, f"{_title(session, arm)} has a relative error of {outcome.error:.2g}{_extent(outcome)}"
            )
    at_arm("")
    for arm in present:
        same = experiment.contract(session.arms[arm].variant) == experiment.contract(session.arms[rung].variant)
        if same and arm not in excluded and rung not in excluded and bits[arm] != bits[rung]:
            excluded[rung] = (
                f"{rung} and {session.arms[arm].variant.name} share a numeric contract but differ in their bits"
            )
    for needed in (rung, *controls):
        if needed in excluded:
            return failed("wrong", f"{excluded[needed]}.")

    arms = [arm for arm in (*present, *controls) if arm not in excluded]
    timed = _Timed(session, str(at))
    if settings.l2 == "cold" and between < 2 * session.l2_bytes:
        return failed(
            "refused",
            f"{between} bytes between two uses of a buffer are not the {2 * session.l2_bytes} of 2 x L2 that cold promises.",
        )
    seconds.end("check")
    launches = protocol.prepare(timed, arms, settings.sample_us, warm_seconds, session.rotation)
    seconds.end("warm")
    samples, stop = protocol.run_rounds(
        timed, rung, arms, launches, settings, shape, lambda: protocol.Condition(*sampler.read()), held.locked_mhz
    )
    seconds.end("time")
    after = {arm: session.outcome(arm, replay=True) for arm in arms}
    changed = [arm for arm in arms if after[arm].unwritten or after[arm].bits != bits[arm]]
    if CONTROL in changed and (others := [arm for arm in arms if arm not in (rung, CONTROL, TWIN)]):
        # The library changes nothing by itself: some kernel writes into the memory of others. Once more with the rung alone.
        reason = f"Results changed beside {' and '.join(others)}, the control's too, and so the rung was timed alone."
        alone = {**lost, **{arm: {"status": "wrong", "reason": reason} for arm in others}}
        return _measure(session, at, settings, sampler, held, 0.0, alone, at_arm, seconds)
    if CONTROL in changed:
        reason = f"The control's result changed during the timing: {rung} writes into the memory of others."
        return failed("wrong", reason)
    for arm in changed:
        reason = f"{_title(session, arm)} gives another result after timing than before{_extent(after[arm])}."
        if arm == rung:
            return failed("wrong", reason)
        excluded[arm] = reason
        samples = [sample for sample in samples if sample.arm != arm]
    seconds.end("check")
    described = {
        "launches": launches,
        "rounds": max(sample.round for sample in samples),
        "stop": stop,
        "bytes_between_uses": between,
        "error": float(f"{error:.3g}"),
        "result_fingerprint": bits[rung],
        "contract": experiment.contract(session.arms[rung].variant),
        "excluded": excluded,
        "lost": lost,
    }
    for sample in samples:
        if reason := at.implausible(sample.arm, sample, session):
            return {**failed("implausible", reason), "shape": described}
    return {"status": "ok", "reason": "", "samples": [asdict(sample) for sample in samples], "shape": described}


class _Timed:
    """A session that refuses a time or a count of 0, which would reach the intervals as an infinite ratio."""

    def __init__(self, session: Any, where: str) -> None:
        self._session, self._where = session, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def elapsed_us(self, start: Any, end: Any) -> float:
        elapsed = self._session.elapsed_us(start, end)
        if not elapsed > 0:
            raise Refused(f"{self._where}: a sample lasted {elapsed:g} us, which no launch can.", "implausible")
        return float(elapsed)

    def cycles(self, arm: str) -> float:
        cycles = self._session.cycles(arm)
        if not cycles > 0:
            raise Refused(f"{self._where}: {arm} took {cycles:g} cycles, which no work can.", "implausible")
        return float(cycles)


def _extent(outcome: Any) -> str:
    return f" ({outcome.unwritten} elements are NaN or were not written)" if outcome.unwritten else ""


def _title(session: Any, arm: str) -> str:
    return "the control" if arm == CONTROL else session.arms[arm].variant.name


# ---- the job ---------------------------------------------------------------------------------------------------------


def supervise(
    experiment: Experiment,
    rung: Variant,
    arch: str,
    manifests: Mapping[str, Path],
    stamp: Path,
    shapes: Sequence[tuple[int, ...]],
    settings: protocol.Settings,
    gpu: clock.Gpu,
    clock_record: Mapping[str, Any],
    time_limit_s: float,
    output: Path,
    twin: bool = False,
) -> None:
    """Measure one rung over all shapes and write its CSV and, beside it, its manifest.

    `manifests` maps variant names to build manifests: the rung's and its predecessors'. What goes wrong with a shape is a
    row with its status and reason. Raises RungsError only where nothing could be written.
    """
    run_id, started = secrets.token_hex(4), time.monotonic()
    binaries, excluded = {}, {}
    for name, path in manifests.items():
        try:
            binaries[name] = load_binary(experiment, path)
        except Refused as refusal:
            excluded[name] = (refusal.status, str(refusal))
    timed, dtype = _timed(experiment), "bfloat16" if experiment.workload == GEMM else "float32"
    head: dict[str, Any] = {
        "kind": "sweep",
        "run_id": run_id,
        "experiment": experiment.name,
        "variant": rung.name,
        "rungs": experiment.rung_names(rung),
        "arch": arch,
        "arms": {name: binary.provenance(experiment, shapes) for name, binary in binaries.items()},
        **({"stamp": made_as(schemas.read_manifest(stamp))} if timed else {}),
        "not_timed": {name: reason for name, (_, reason) in excluded.items()},
        "control": {"name": _control(experiment) or "none", "dtype": dtype}
        | ({"layout": "NT"} if experiment.workload == GEMM else {}),
        "dtype": dtype,
        "fill": "normal" if timed else "integer",
        "l2": settings.l2,
        "gpu": gpu.as_json(),
        "clock": dict(clock_record),
        "protocol": settings.as_json(),
        "limits": sha256_json(vars(load_device(arch)))[:16],
    }
    if keep(output, head):
        print(f"{rung.name}: kept, since machine code, launches and protocol are those that were measured.", flush=True)
        return
    if rung.name in excluded:
        parts = [failed(*excluded[rung.name]) for _ in shapes]
        session: dict[str, Any] = {}
    else:
        job: dict[str, Any] = {
            "experiment": experiment.name,
            "variant": rung.name,
            "arch": arch,
            "gpu": gpu.uuid,
            "shapes": [list(shape) for shape in shapes],
            "settings": asdict(settings),
            "clock": clock_record,
            "stamp": str(stamp.resolve()),
            "binaries": {name: str(manifests[name].resolve()) for name in binaries},
            "lost_arms": {},
        }
        if twin:
            job["binaries"][TWIN] = job["binaries"][rung.name]
        with clock.ending_signals(), clock.exclusive(gpu.uuid):
            job["started"] = time.monotonic()
            try:
                parts, session = _collect(job, time_limit_s)
            finally:
                unlocked = clock.release_left(gpu) if clock_record["mode"] == "lock" else None
            if unlocked is not None and session.get("clock", {}).get("mode") == "lock":
                session["clock"]["restored"] = unlocked
    at = [dict(zip(experiment.axis_names, shape, strict=True)) for shape in shapes]
    rows = [row for where, part in zip(at, parts, strict=True) for row in _rows(run_id, rung, where, part, timed)]
    manifest = {
        **head,
        "gpu": head["gpu"] | {key: session.get(key) for key in ("sms", "l2_bytes", "dram_gb_per_s")},
        "clock": session.get("clock", head["clock"]),
        "software": software(session),
        **({"descriptor_us": session["descriptor_us"]} if "descriptor_us" in session else {}),
        "measured_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "shapes": [where | part["shape"] for where, part in zip(at, parts, strict=True)],
    }
    write_result(experiment.kind("sweep" if timed else "cycles"), rows, manifest, output)
    print(f"{rung.name}: {time.monotonic() - started:.2f} s in all, Python's own start aside", flush=True)


def write_result(kind: str, rows: Sequence[Mapping[str, Any]], manifest: dict[str, Any], output: Path) -> None:
    """A CSV and, beside it, the manifest that carries its hash: both or, if the second fails, neither."""
    schemas.write_rows(kind, rows, output)
    try:
        write_json(output.with_suffix(".json"), {**manifest, "csv_sha256": sha256_file(output)})
    except BaseException:
        output.unlink(missing_ok=True)
        raise


def _collect(job: dict[str, Any], time_limit_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run child processes until every shape has a part.

    A shape that one is lost at is not tried again, but for one lost while it checked a predecessor: then without that arm.
    """
    folder = Path(tempfile.mkdtemp(prefix="rungs-job-"))
    try:
        write_json(folder / "job.json", job)
        paths = [folder / f"{index}.json" for index in range(len(job["shapes"]))]
        while any(not path.exists() for path in paths):
            status, reason = _run_once(folder, paths, time_limit_s)
            if not status:
                continue
            try:
                index, arm = (folder / "current").read_text().split(" ")
                lost = int(index)
            except (OSError, ValueError):
                lost, arm = -1, ""
            if lost >= 0 and arm not in (
                "",
                CONTROL,
                TWIN,
                job["variant"],
            ):  # a predecessor's fault is none of the rung's
                job["lost_arms"].setdefault(str(lost), {})[arm] = {"status": status, "reason": reason}
                write_json(folder / "job.json", job)
            elif (
                lost < 0 or paths[lost].exists()
            ):  # before the first shape, or after the last: another try would end the same
                for path in paths:
                    if not path.exists():
                        write_json(path, failed(status, reason))
            else:
                write_json(paths[lost], failed(status, reason))
        session: dict[str, Any] = {}
        if (folder / SESSION).exists():
            session = read_json(folder / SESSION)
        elif (folder / CLOCK).exists():
            session = {"clock": read_json(folder / CLOCK)}
        return [read_json(path) for path in paths], session
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_once(folder: Path, paths: Sequence[Path], time_limit_s: float) -> tuple[str, str]:
    """One child; returns `("", "")` when it has done what was left, else what became of it."""
    for left_over in ("current", "failure"):
        (folder / left_over).unlink(missing_ok=True)
    child = warm.start(["measure-job", str(folder / "job.json")])
    seen, since = sum(path.exists() for path in paths), time.monotonic()
    try:
        git_commit()  # what the manifest will need, while the child works
        while (code := child.poll(POLL_SECONDS)) is None:
            if (folder / SESSION).exists():
                return "", ""
            count = sum(path.exists() for path in paths)
            if count != seen:
                seen, since = count, time.monotonic()
            if time.monotonic() - since > time_limit_s:
                child.kill()
                return "time limit", f"No result after {time_limit_s:g} s, so the process was ended and the GPU freed."
    except BaseException:
        child.kill()
        raise
    if code == 0 and all(path.exists() for path in paths):
        return "", ""
    try:
        reason = (folder / "failure").read_text().strip()
    except OSError:
        reason = f"The process ended with {'signal' if code < 0 else 'exit status'} {abs(code)}."
    return "crashed", reason


def _rows(
    run_id: str, rung: Variant, at: Mapping[str, int], part: Mapping[str, Any], timed: bool
) -> list[dict[str, Any]]:
    common = {"run_id": run_id, **at}
    if not timed:
        counted = [(s["round"], s["arm"], s["order"], float(f"{s['time_us']:.6g}"), s["flag"]) for s in part["samples"]]
        failure = part["status"] != "ok"
        cells = [(0, rung.name, 0, None, part["reason"])] if failure else counted
        return [
            common
            | dict(zip(("round", "arm", "order", "cycles"), cell[:-1], strict=True))
            | {"status": part["status"] if failure else "flagged" if cell[-1] else "ok", "reason": cell[-1]}
            for cell in cells
        ]
    if part["status"] != "ok":
        empty = {"time_us": None, "sm_mhz": None, "throttle": "", "power_w": None, "temp_c": None}
        where = {"round": 0, "arm": rung.name, "order": 0, "launches": 0}
        return [common | where | empty | {"status": part["status"], "reason": part["reason"]}]
    rows = []
    for sample in part["samples"]:
        condition = sample["condition"]
        rows.append(
            common
            | {key: sample[key] for key in ("round", "arm", "order", "launches")}
            | {
                "time_us": float(f"{sample['time_us']:.6g}"),
                "sm_mhz": None if sample["sm_mhz"] is None else round(sample["sm_mhz"]),
                "throttle": condition["throttle"],
                "power_w": None if condition["power_w"] is None else round(condition["power_w"]),
                "temp_c": None if condition["temp_c"] is None else round(condition["temp_c"]),
                "status": "flagged" if sample["flag"] else "ok",
                "reason": _why_flagged(sample),
            }
        )
    return rows


def _why_flagged(sample: Mapping[str, Any]) -> str:
    """The protocol's reason, which takes NVML's silence for one more word of what throttles."""
    if sample["flag"] and sample["condition"]["throttle"] == UNREADABLE and not sample["condition"]["others"]:
        return "NVML no longer answered, so that nothing is known of the clock"
    return str(sample["flag"])


def software(session: Mapping[str, Any]) -> dict[str, str]:
    """Versions for a manifest; empty where something is not there."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return {
        "rungs": __version__,
        "git": git_commit(),
        "python": platform.python_version(),
        "snakemake": version("snakemake"),
        "torch": str(session.get("torch") or version("torch")),
        "cuda": str(session.get("cuda") or ""),
    }


@functools.cache
def git_commit() -> str:
    """The checkout's commit, with `+` where tracked files differ from it; empty outside git."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return run.stdout.strip() if run.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:
        return ""
