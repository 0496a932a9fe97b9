"""A rung under NVIDIA Compute Sanitizer's four tools. What they find, and whatever keeps them from looking, is a row.

The watched process launches one kernel once and nothing else, so no filter by name or launch is set: a filter that matches nothing
would pass for a clean kernel.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.util
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rungs import clock, launcher, measure, profile
from rungs.binary import load_binary
from rungs.emulator.device import small_problem
from rungs.errors import Refused, RungsError
from rungs.profile import CRASHED, NOT_RUN, PERMISSION, TIME_LIMIT
from rungs.results import keep
from rungs.variants import Experiment, Variant

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ALONE = "racecheck"
"""Runs with nothing beside it on the GPU, and again where it reports a wait without an end: it was seen to do so of kernels in which
there was nothing to wait for, more often beside other tools (README, Compute Sanitizer)."""
ATTEMPTS = 3
"""Runs of it at most: a wait without an end counts where each of them has one."""
FOUND = "found"
ENDLESS = "Deadlock detected"
FINDINGS = 20
"""Reports that a tool prints at most: the first is kept, and the summary counts all."""
ERROR_EXIT = 86
"""Exit status of a tool that found something; its own errors and the process's have others."""
LONGEST = 400
"""Letters of a finding that are kept."""
OPTIONS = {
    "memcheck": {
        # What the driver answers to cuda-bindings' questions at the start is none of the kernel's errors.
        "report-api-errors": "no",
        "check-tensor-ops": "yes",
    },
    "racecheck": {"racecheck-report": "all", "num-cuda-barriers": "16"},
    "initcheck": {},
    "synccheck": {"num-cuda-barriers": "16"},
}
"""What is asked of each tool beside the options of all; an option that the installed version does not know is left out.

mbarriers of inline PTX are not among those that the compiler counts, so their number is given: eight for each CTA are the most.
"""
COMMON = {
    "strip-paths": "no",
    "show-backtrace": "device",
    "print-limit": str(FINDINGS),
    "error-exitcode": str(ERROR_EXIT),
}
DEADLOCK = "racecheck-deadlock-timeout"


class Checked(NamedTuple):
    """What one tool said, as the CSV has it. `finding` is the first one in a sentence, `source` its lines of CUDA."""

    errors: int | None
    warnings: int | None
    finding: str
    source: str
    status: str
    reason: str


@dataclass(frozen=True)
class Sanitizer:
    """An installed Compute Sanitizer. `knows` are its options."""

    path: str
    version: str
    knows: frozenset[str]

    def command(self, tool: str, child: Sequence[str], log: Path, time_limit_s: float) -> list[str]:
        return [
            self.path,
            f"--tool={tool}",
            *(f"--{name}={value}" for name, value in self.options(tool, time_limit_s).items()),
            f"--log-file={log}",
            *child,
        ]

    def options(self, tool: str, time_limit_s: float) -> dict[str, str]:
        wanted = {**COMMON, **OPTIONS[tool]}
        if tool == "racecheck":  # a wait on an mbarrier that lasts a quarter of the limit is reported as a deadlock
            wanted[DEADLOCK] = str(int(1000 * time_limit_s / 4))
        return {name: value for name, value in wanted.items() if name in self.knows}


def find_sanitizer(setting: str) -> str:
    """Path of compute-sanitizer: the setting's, or with `auto` from PATH, then CUDA's folders, then pip's package.

    Raises RungsError where there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    pip = [f"{folder}/cu13/bin" for folder in spec.submodule_search_locations or []] if spec else []
    places = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", *pip]
    whence = "install the CUDA toolkit, or pip's nvidia-cuda-sanitizer-api"
    return profile.find_tool("compute-sanitizer", setting, "sanitize.tool", places, whence)


@functools.cache
def open_sanitizer(setting: str) -> Sanitizer:
    """Raises RungsError where it is not installed or does not say which options it knows."""
    path = find_sanitizer(setting)
    try:
        said = subprocess.run([path, "--help"], check=False, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RungsError(f"{path} does not start ({error}): name another one in `sanitize.tool`.") from None
    version = re.search(r"Version (\d+(?:\.\d+)+)", said)
    return Sanitizer(path, version[1] if version else "", frozenset(re.findall(r"--([a-z][a-z0-9-]+)", said)))


# ---- what a tool printed ---------------------------------------------------------------------------------------------

_LINE = re.compile(r"^=========( *)(.*?)\s*$", re.MULTILINE)
_NO_FINDING = re.compile(
    r"COMPUTE-SANITIZER|[A-Z]+ SUMMARY:|(?:Error: )?process didn't terminate|(?:Error: )?Target application|"
    r"(?:Error: )?[Cc]ouldn't find exit code|(?:Error: )?No attachable|Internal Sanitizer|Warning: Detected overflow|"
    r"Device not supported|Program hit|Error: Could not|CUDA API Error|$"
)
_PART = re.compile(r"at |and |Address |(?:Write|Read|Atomic) Thread |is ")
_SOURCE = re.compile(r" in (\S+:\d+)")


def parse(log: str) -> tuple[int | None, int | None, str, str]:
    """(errors, warnings, first finding, its source lines) of a tool's log; no numbers where it has no summary. A wait without an end
    is the first only where there is nothing else.
    """
    errors = warnings = None
    if found := re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", log):
        errors, warnings = int(found[1]), int(found[2])
    elif found := re.search(r"ERROR SUMMARY: (\d+) errors?", log):
        errors, warnings = int(found[1]), 0
    reports: list[list[str]] = []
    inside = False
    for line in _LINE.finditer(log):
        indent, text = len(line[1]), line[2]
        if inside := inside and indent > 1 and not text.startswith(("Saved host", "Host Frame")):
            reports[-1].append(text)
        elif indent == 1 and not _NO_FINDING.match(text):
            reports.append([text])
            inside = True
    report = next((each for each in reports if not each[0].startswith(ENDLESS)), (reports or [[]])[0])
    said = [text for number, text in enumerate(report) if number == 0 or _PART.match(text)]
    sentence = " ".join(" ".join(said).split())
    sources = list(dict.fromkeys(source for text in report if (source := "".join(_SOURCE.findall(text)[:1]))))
    return errors, warnings, sentence[:LONGEST], " ".join(sources[:2])


def judge(log: str, said: str, failure: tuple[str, str] | None, tool: str) -> Checked:
    """What a run of a tool comes to: its log, what the process that it watched printed, and how it ended."""
    if failure and failure[0] in (TIME_LIMIT, NOT_RUN, PERMISSION):
        return Checked(None, None, "", "", *failure)
    text = f"{log}\n{said}"
    if "Device not supported" in text:
        return _without(NOT_RUN, f"{tool} says that it does not support this GPU, driver or virtual machine.")
    if found := re.search(r"ERR_NVGPUCTRPERM|[Pp]ermission denied|CUDA_ERROR_NOT_PERMITTED|not permitted", text):
        return _without(PERMISSION, f"{tool} may not look here ({found[0]}): run it as an administrator.")
    if found := re.search(r"unrecogni[sz]ed option.*|the argument \(.*\) for option .* is invalid.*", text):
        return _without(NOT_RUN, f"{tool} refuses its options ({found[0].strip().rstrip('.')}): install a newer one.")
    errors, warnings, finding, source = parse(log)
    if finding and (errors or warnings):
        return Checked(errors, warnings, finding, source, FOUND, f"{tool}: {finding.rstrip('.')}.")
    if found := re.search(r"Internal Sanitizer [^\n]*", log):
        return _without(CRASHED, f"{tool} failed: {' '.join(found[0].split()).rstrip('.')}.")
    if errors is None:
        words = profile.last_words(said) or (f" ({line})" if (line := _last_line(log)) else "")
        return _without(CRASHED, f"{tool} printed no summary{words}.")
    if launcher.LAUNCHED not in said:
        return _without(
            CRASHED, f"The process under {tool} did not launch its kernel to the end{profile.last_words(said)}."
        )
    if errors or warnings:
        return _without(CRASHED, f"{tool} counts {errors + (warnings or 0)} errors and names none.")
    return Checked(0, 0, "", "", "ok", "")


def _without(status: str, reason: str) -> Checked:
    return Checked(None, None, "", "", status, " ".join(reason.split()))


def _last_line(log: str) -> str:
    said = [line[2] for line in _LINE.finditer(log) if line[2] and line[2] != "COMPUTE-SANITIZER"]
    return said[-1].rstrip(".") if said else ""


def check(sanitizer: Sanitizer, tool: str, child: Sequence[str], time_limit_s: float) -> Checked:
    """One run of a tool over the process `child`."""
    with tempfile.TemporaryDirectory(prefix="rungs-sanitize-") as folder:
        log = Path(folder) / "log"
        argv = sanitizer.command(tool, child, log, time_limit_s)
        failure, said = profile.run_tool(argv, time_limit_s, tool)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return judge(text, said, failure, tool)


def endless(status: str, finding: str) -> bool:
    """Whether a run of racecheck says no more than that something did not end."""
    return status == TIME_LIMIT or (status == FOUND and finding.startswith(ENDLESS))


def check_alone(sanitizer: Sanitizer, child: Sequence[str], time_limit_s: float) -> tuple[Checked, int]:
    """Racecheck's first run that ends, or its last, and which one it is."""
    found, attempts = check(sanitizer, ALONE, child, time_limit_s), 1
    while endless(found.status, found.finding) and attempts < ATTEMPTS:
        found, attempts = check(sanitizer, ALONE, child, time_limit_s), attempts + 1
    return found, attempts


# ---- a rung's CSV ----------------------------------------------------------------------------------------------------


def sanitize(
    experiment: Experiment,
    variant: Variant,
    arch: str,
    manifest_path: Path,
    setting: str,
    gpu: clock.Gpu,
    output: Path,
    child: Sequence[str] | None = None,
    time_limit_s: float = 300.0,
) -> None:
    """Run the four tools over one launch of a rung, on the small problem that the emulator checks it on too.

    Writes its CSV, one row per tool, and its manifest. `setting` is a path or auto; `child` replaces `python -m rungs launch`, for
    tests. Raises RungsError only where nothing could be written or the binary is not the one of its manifest.
    """
    run_id = secrets.token_hex(4)
    failure: tuple[str, str] | None = None
    attempts = 0
    provenance: Mapping[str, str] = {"variant": variant.name}
    sanitizer = None
    shape, sms = small_problem(experiment, variant, arch)
    try:
        provenance = load_binary(experiment, manifest_path).provenance(experiment, [shape], sms)
        sanitizer = open_sanitizer(setting)
    except Refused as refusal:
        failure = refusal.status, str(refusal)
    except RungsError as error:
        if provenance == {"variant": variant.name}:
            raise
        failure = NOT_RUN, str(error)
    head: dict[str, Any] = {
        "kind": "sanitize",
        "run_id": run_id,
        "experiment": experiment.name,
        "variant": variant.name,
        "rungs": experiment.rung_names(variant),
        "arch": arch,
        "binary": provenance,
        "gpu": gpu.as_json(),
        "sanitizer": described(sanitizer, time_limit_s),
        "problem": {"shape": list(shape), "sms": sms, "launches": 1},
    }
    if keep(output, head):
        print(f"{variant.name}: kept, since machine code and launch are those that were looked at.", flush=True)
        return
    argv = [*(child or (sys.executable, "-m", "rungs", "launch")), "--experiment", experiment.name, "--arch", arch]
    argv += ["--gpu", gpu.uuid, "--manifest", str(manifest_path.resolve()), "--shape", ",".join(map(str, shape))]
    argv += ["--launches", "1", "--instrumented", *(["--sms", str(sms)] if sms else [])]
    with contextlib.ExitStack() as stack:
        if not failure:
            try:
                stack.enter_context(clock.exclusive(gpu.uuid))
            except RungsError as error:
                failure = NOT_RUN, str(error)
        if failure or sanitizer is None:
            checked = dict.fromkeys(TOOLS, _without(*(failure or (NOT_RUN, ""))))
        else:
            opened = sanitizer
            with clock.ending_signals(), ThreadPoolExecutor(len(TOOLS)) as pool:
                alone, attempts = check_alone(opened, argv, time_limit_s)
                others = [tool for tool in TOOLS if tool != ALONE]
                found = pool.map(lambda tool: check(opened, tool, argv, time_limit_s), others)
                checked = {ALONE: alone, **dict(zip(others, found, strict=True))}
    rows = []
    for tool in TOOLS:
        outcome = checked[tool]
        common = {"run_id": run_id, "experiment": experiment.name, "variant": variant.name, "tool": tool}
        cells = dict(zip(experiment.axis_names, shape, strict=True))
        rows.append({**common, **cells, **outcome._asdict()})
        print(f"{variant.name} under {tool}: {outcome.reason or outcome.status}", flush=True)
    manifest = {
        **head,
        "attempts": {ALONE: attempts},
        "software": measure.software({}),
        "measured_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    measure.write_result(experiment.kind("sanitize"), rows, manifest, output)


def described(sanitizer: Sanitizer | None, time_limit_s: float) -> dict[str, Any]:
    """Version and options, for a manifest."""
    if sanitizer is None:
        return {"version": "", "options": {}}
    options = {tool: sanitizer.options(tool, time_limit_s) for tool in TOOLS}
    return {"version": sanitizer.version, "options": options}
