"""A rung's counters through Nsight Compute. Whatever keeps it from counting is a row with a status and a reason.

ncu replays a kernel pass by pass, so what it says of time is a metric under ncu's own name and never a timing.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import functools
import io
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rungs import clock, measure
from rungs.binary import load_binary
from rungs.errors import Refused, RungsError
from rungs.files import ROOT
from rungs.plan import check_point
from rungs.results import keep
from rungs.variants import CONFIG, GEMM, Device, Experiment, Variant

METRICS = CONFIG / "ncu_metrics.csv"
"""What exists on which chip, from `ncu --query-metrics --chips` of CUDA 13.0."""
LAUNCH_SKIP = 2
"""The child launches the kernel three times; the last is counted, so that caches and instruction memory are warm."""
CACHE_CONTROL = {"hot": "none", "cold": "all"}
"""By L2 policy: leave the caches as the launches before left them, or flush them before each pass."""
PROFILERS = frozenset({"nv-hostengine", "dcgm-exporter", "dcgmi", "dcgmproftester", "ncu", "ncu-ui", "nsys", "nvprof"})
"""Names of processes that hold a GPU's counters (of `/proc/<pid>/comm`, up to a version suffix)."""

PERMISSION = "not permitted"
NO_MATCH = "kernel not matched"
NO_METRIC = "not on this chip"
NOT_RUN = "not run"
CRASHED = "crashed"
TIME_LIMIT = "time limit"
REPEATED = frozenset({NOT_RUN, CRASHED, TIME_LIMIT})
"""What may be counted when it is tried again, and is not tried by itself: nothing that Snakemake sees has changed by then."""

PERMIT = (
    "load the driver with NVreg_RestrictProfilingToAdminUsers=0 (a line `options nvidia NVreg_RestrictProfilingToAdminUsers=0`"
    " in /etc/modprobe.d/), or run as an administrator"
)

SCALED = re.compile(r"[KMGTP](byte|hz|inst|sector|cycle).*|[um]?second|us|ms|s")
"""Units that are not base ones: a number in them is rounded to a few digits."""

Counter = tuple[str, str, str, float | None]
"""(kernel, metric, unit, value); no value where ncu prints `n/a`."""


class Cell(NamedTuple):
    """One metric at one shape, as the CSV has it."""

    metric: str
    value: float | None
    unit: str
    status: str
    reason: str


@dataclass(frozen=True)
class Metric:
    """What is wanted, ncu's name of it and whether the chip has it."""

    want: str
    metric: str
    on_chip: bool


@functools.cache
def metrics_for(chip: str) -> tuple[Metric, ...]:
    """Every wanted metric in the table's order, also those that the chip lacks. Raises RungsError for an unknown chip."""
    try:
        with METRICS.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RungsError(f"{METRICS} cannot be read ({error}): restore it from version control.") from None
    names = [row.get("metric") for row in rows]
    if not rows or None in names or len(set(names)) < len(names):
        raise RungsError(f"{METRICS} is empty, cut or names a metric twice: restore it from version control.")
    chips = [name for name in rows[0] if name not in ("want", "metric")]
    if chip not in chips:
        raise RungsError(f"{METRICS.name} has no chip {chip!r}: it knows {', '.join(chips)}.")
    return tuple(Metric(row["want"], row["metric"], row[chip] == "1") for row in rows)


def find_ncu(setting: str) -> str:
    """Path of ncu: the setting's, or with `auto` from PATH and then from where NVIDIA's installers put it.

    Raises RungsError where there is none.
    """
    folders = sorted(Path("/opt/nvidia/nsight-compute").glob("*"), key=_version, reverse=True)
    whence = "install Nsight Compute (it is part of the CUDA toolkit)"
    return find_tool("ncu", setting, "profile.ncu", ["/usr/local/cuda/bin", *map(str, folders)], whence)


def find_tool(name: str, setting: str, key: str, places: Sequence[str], whence: str) -> str:
    """Path of a tool: what the config's `key` names, or with `auto` from PATH and then from these folders.

    Raises RungsError where there is none; `whence` says how to get it.
    """
    if setting != "auto":
        if found := shutil.which(setting):
            return found
        raise RungsError(f"{name} is not installed at {setting}: set `{key}` to its path, or to auto.")
    if found := next((tool for place in (None, *places) if (tool := shutil.which(name, path=place))), None):
        return found
    raise RungsError(f"{name} is not installed: {whence}, or set `{key}` to its path.")


def _version(folder: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", folder.name)]


def ncu_version(ncu: str) -> str:
    """For example `2025.3.1.0`; empty where ncu does not say."""
    try:
        text = subprocess.run([ncu, "--version"], check=False, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"Version (\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def command(
    ncu: str, child: Sequence[str], kernel: str, metrics: Sequence[str], log: str | os.PathLike[str], l2: str = "hot"
) -> list[str]:
    """The command line that counts one launch of `kernel` in `child` and writes it to `log` as CSV in base units."""
    return [
        ncu,
        "--clock-control=none",
        f"--cache-control={CACHE_CONTROL[l2]}",
        f"--kernel-name={kernel}",
        f"--launch-skip={LAUNCH_SKIP}",
        "--launch-count=1",
        f"--metrics={','.join(metrics)}",
        "--csv",
        "--page=raw",
        "--print-units=base",
        f"--log-file={os.fspath(log)}",
        *child,
    ]


def parse(text: str) -> list[Counter]:
    """The counters of ncu's raw page: a header line, a line of units and a line per launch, in any order of columns.

    Lines before the header (`==PROF==` ...) are passed over. Raises RungsError for a page that ends early.
    """
    lines = text.splitlines(keepends=True)
    try:
        first = next((i for i, line in enumerate(lines) if "Kernel Name" in next(csv.reader([line]), [])), None)
        if first is None:
            return []
        page = "".join(line for line in lines[first:] if not line.startswith("=="))
        header, *rows = csv.reader(io.StringIO(page))
        name_at = header.index("Kernel Name")
    except (csv.Error, ValueError) as error:
        raise RungsError(f"ncu's page is no CSV ({error}).") from None
    id_at = header.index("ID") if "ID" in header else name_at
    units: Sequence[str] = [""] * len(header)
    counters: list[Counter] = []
    # Unquoted, a last cell may be half a number, or be empty only because the page ends there.
    whole = text.endswith("\n") or (text.endswith('"') and lines[-1].count('"') % 2 == 0)
    for row in filter(None, rows):
        if len(row) != len(header) or not whole:
            raise RungsError(f"ncu's page ends early, in column {len(row)} of {len(header)}.")
        if not row[id_at]:
            units = row
            continue
        counters += [
            (_base_name(row[name_at]), column, unit, _number(cell))
            for column, unit, cell in zip(header, units, row, strict=True)
            if "__" in column
        ]
    if not counters:
        raise RungsError("ncu's page ends early, before its first launch.")
    return counters


def _base_name(kernel: str) -> str:
    """`void ns::gemm<1, 2>(int)` -> `gemm`."""
    bare = re.split(r"[(<]", kernel.strip(), maxsplit=1)[0]
    return re.split(r"::|\s", bare.strip())[-1]


def _number(cell: str) -> float | None:
    """A value with or without thousands separators; the total where ncu adds the values of instances in brackets."""
    try:
        value = float(cell.split("(")[0].replace(",", "").strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def diagnose(text: str, kernel: str) -> tuple[str, str] | None:
    """(status, reason) of a run of ncu that counted nothing, from all that it printed; None where nothing is reported."""
    if "ERR_NVGPUCTRPERM" in text:
        return PERMISSION, f"The driver keeps the counters from this user (ERR_NVGPUCTRPERM): {PERMIT}."
    if "a driver resource was unavailable" in text:
        names = ", ".join(f"{name} (process {pid})" for pid, name in holders()) or "one that this user cannot see"
        return NOT_RUN, (
            f"Another profiler holds the counters: {names}; nothing was stopped. Pause it (DCGM: `dcgmi profile --pause`)."
        )
    if found := re.search(r"The application returned an error code \((\d+)\)", text):
        return CRASHED, f"The process that launches the kernel ended with exit status {found[1]}{last_words(text)}."
    if "No kernels were profiled" in text:
        seen = re.findall(r"^\s*\d+\.\s+(\S.*?)\s*$", text, re.MULTILINE)
        others = f"; it launched {', '.join(seen)}" if seen else ""
        return NO_MATCH, f"No launch of a kernel named {kernel} was seen{others}."
    if found := re.search(r"==ERROR==\s*(.+)", text):
        return CRASHED, f"ncu says: {' '.join(found[1].split()).rstrip('.')}."
    return None


def last_words(text: str) -> str:
    """What the child said last, for a reason: `rungs: ...` or the last line of a traceback."""
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("==", '"', " "))]
    return f" ({said[-1].removeprefix('rungs: ').rstrip('.')})" if said else ""


def holders() -> list[tuple[int, str]]:
    """(process, name) of the profilers that run on this machine, as far as this user sees them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
                if re.sub(r"[\d.]+$", "", name) in PROFILERS:
                    found.append((int(entry.name), name))
    return sorted(found)


def count(
    ncu: str, child: Sequence[str], kernel: str, metrics: Sequence[Metric], chip: str, l2: str, time_limit_s: float
) -> list[Cell]:
    """One run of ncu over `child`: the outcome of every metric."""
    with tempfile.TemporaryDirectory(prefix="rungs-ncu-") as folder:
        log = Path(folder) / "page.csv"
        on_chip = [metric.metric for metric in metrics if metric.on_chip]
        failure, said = run_tool(command(ncu, child, kernel, on_chip, log, l2), time_limit_s)
        page = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    failure = diagnose(f"{said}\n{page}", kernel) or failure
    found: dict[str, tuple[str, float | None]] = {}
    if not failure:
        try:
            found = {metric: (unit, value) for name, metric, unit, value in parse(page) if name == kernel}
            failure = None if found else (NO_MATCH, f"ncu printed no counters of a kernel named {kernel}.")
        except RungsError as error:
            failure = CRASHED, str(error)
    return cells(metrics, chip, failure, found)


def cells(
    metrics: Sequence[Metric],
    chip: str,
    failure: tuple[str, str] | None,
    found: Mapping[str, tuple[str, float | None]] | None = None,
) -> list[Cell]:
    """What there is to say of every metric: that the chip lacks it, else why nothing was counted, else its value."""
    outcome = []
    for metric in metrics:
        unit, value = (found or {}).get(metric.metric, ("", None))
        if not metric.on_chip:
            outcome.append(Cell(metric.metric, None, "", NO_METRIC, f"{chip} has no such counter."))
        elif failure:
            outcome.append(Cell(metric.metric, None, "", *failure))
        elif SCALED.fullmatch(unit):
            why = f"ncu printed it in {unit}, rounded, and not in base units as asked: use another version of Nsight Compute."
            outcome.append(Cell(metric.metric, None, "", NOT_RUN, why))
        elif value is None:
            outcome.append(Cell(metric.metric, None, unit, NO_METRIC, f"ncu has no value of it on this {chip}."))
        else:
            outcome.append(Cell(metric.metric, value, unit, "ok", ""))
    return outcome


MARK = "RUNGS_WATCHED"
"""Variable in the environment of all that a tool starts, by which it is found where it left the tool's process group."""


def _end_marked(mark: str) -> None:
    """End what a tool left behind: a kernel that never ends would keep the GPU."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def run_tool(argv: Sequence[str], time_limit_s: float, name: str = "ncu") -> tuple[tuple[str, str] | None, str]:
    """Run a tool that watches a process and what it starts, all of it ended at the time limit or with this process.

    Returns the failure, as status and reason, and what was printed.
    """
    # Numbers with a decimal point, whatever the user's locale. The child must import this very package.
    path = os.pathsep.join(filter(None, (str(ROOT / "workflow"), os.environ.get("PYTHONPATH"))))
    mark = secrets.token_hex(8)
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "1", "PYTHONPATH": path, MARK: mark}
    with clock.ending_signals():
        try:
            process = subprocess.Popen(
                argv,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                errors="replace",
            )
        except PermissionError:
            return (PERMISSION, f"{argv[0]} may not be run: make it executable, or name another one."), ""
        except OSError as error:
            return (NOT_RUN, f"{argv[0]} does not start ({error.strerror})."), ""
        try:
            said, _ = process.communicate(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            return (TIME_LIMIT, f"{name} did not end within {time_limit_s:g} s."), ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_marked(mark)
    if process.returncode < 0:
        number = -process.returncode
        by = next(
            (known.name for known in signal.Signals if known == number), f"signal {number}"
        )  # real-time ones have no name
        return (CRASHED, f"{name} was ended by {by}."), said
    if process.returncode:
        return (CRASHED, f"{name} ended with exit status {process.returncode}{last_words(said)}."), said
    return None, said


def profile(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    manifest_path: Path,
    shapes: Sequence[tuple[int, ...]],
    ncu: str,
    device: Device,
    gpu: clock.Gpu,
    l2: str,
    output: Path,
    child: Sequence[str] | None = None,
    clock_record: Mapping[str, Any] | None = None,
    time_limit_s: float = 300.0,
) -> None:
    """Count one rung at each point and write its CSV, one row per shape and metric, and its manifest.

    `ncu` is a path or auto; `device` gives the chip; `child` replaces `python -m rungs launch`, for tests. Raises RungsError
    only where nothing could be written or the binary is not the one of its manifest.
    """
    run_id = secrets.token_hex(4)
    metrics = metrics_for(device.chip)
    failure: tuple[str, str] | None = None
    provenance: Mapping[str, str] = {"variant": variant.name}
    try:
        provenance = load_binary(experiment, manifest_path).provenance(experiment, shapes)
    except Refused as refusal:
        failure = refusal.status, str(refusal)
    tool = ""
    try:
        tool = find_ncu(ncu)
    except RungsError as error:
        failure = failure or (NOT_RUN, str(error))
    record = _counting_clock(clock_record, gpu)
    head: dict[str, Any] = {
        "kind": "profile",
        "run_id": run_id,
        "experiment": experiment.name,
        "variant": variant.name,
        "rungs": experiment.rung_names(variant),
        "arch": arch,
        "binary": provenance,
        "shapes": [list(shape) for shape in shapes],
        "dtype": "bfloat16" if experiment.workload == GEMM else "float32",
        "fill": "normal",
        "l2": l2,
        "gpu": gpu.as_json(),
        "clock": record,
        "ncu": {
            "version": ncu_version(tool) if tool else "",
            "clock_control": "none",
            "cache_control": CACHE_CONTROL[l2],
            "kernel": experiment.entry,
            "launch_skip": LAUNCH_SKIP,
            "metrics": [metric.metric for metric in metrics if metric.on_chip],
        },
    }
    if keep(output, head):
        print(f"{variant.name}: kept, since machine code and launches are those that were counted.", flush=True)
        return
    start = [*(child or (sys.executable, "-m", "rungs", "launch")), "--experiment", experiment.name, "--arch", arch]
    start += ["--gpu", gpu.uuid, "--manifest", str(manifest_path.resolve())]
    rows = []
    with contextlib.ExitStack() as stack:
        if not failure:
            try:
                stack.enter_context(clock.exclusive(gpu.uuid))
                record = stack.enter_context(clock.held(record, gpu)).record
            except RungsError as error:
                failure = NOT_RUN, f"{error} {again(output)}"
        for shape in shapes:
            try:
                check_point(experiment, variant, device, shape)
                refused = None
            except Refused as refusal:
                refused = refusal.status, str(refusal)
            if failure or refused:
                counted = cells(metrics, device.chip, failure or refused)
            else:
                argv = [*start, "--shape", ",".join(map(str, shape))]
                counted = count(tool, argv, experiment.entry, metrics, device.chip, l2, time_limit_s)
                counted = [
                    cell._replace(reason=f"{cell.reason} {again(output)}") if cell.status in REPEATED else cell
                    for cell in counted
                ]
                # No later shape would be permitted what this one was not.
                failure = next(((cell.status, cell.reason) for cell in counted if cell.status == PERMISSION), None)
            ok = sum(cell.status == "ok" for cell in counted)
            print(f"{variant.name} {experiment.describe(shape)}: {ok} of {len(metrics)} counters", flush=True)
            common: dict[str, Any] = {"run_id": run_id, "experiment": experiment.name, "variant": variant.name}
            common |= zip(experiment.axis_names, shape, strict=True)
            rows += [common | cell._asdict() for cell in counted]
    manifest = {
        **head,
        "clock": record,
        "software": measure.software({}),
        "measured_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    measure.write_result(experiment.kind("profile"), rows, manifest, output)


def again(output: Path) -> str:
    """How to count a rung once more, and what that costs."""
    return f"`snakemake --force {output}`, with the flags of this run, counts it again; its times and all other counters are kept."


def _counting_clock(record: Mapping[str, Any] | None, gpu: clock.Gpu) -> dict[str, Any]:
    """The clock record as counting can follow it: it runs no control under which an open clock could be found."""
    if record is None:
        return {"mode": "observe", "reason": "no clock was decided for counting", "gpu": gpu.uuid}
    if record["mode"] == "lock" and record["requested_mhz"] is None:
        why = "no timing has yet found the clock that the control holds"
        return {**record, "mode": "observe", "reason": why, "memory_mhz": None, "restore": None, "who": None}
    return dict(record)
