"""Markdown of what Compute Sanitizer found: of every rung, and of mutated kernels beside what the emulator reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rungs import mutants
from rungs.emulator.mutations import GROUPS, MUTATIONS, group_of
from rungs.errors import RungsError
from rungs.files import sha256_json, write_text
from rungs.mutants import EMULATOR, GONE, NONE, RESULT, WRONG
from rungs.results import ResultsSet
from rungs.sanitize import FOUND, TOOLS
from rungs.tables import grid
from rungs.variants import GEMM, load_experiment

MANUAL = "https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html"
NOTES = "https://docs.nvidia.com/compute-sanitizer/ReleaseNotes/index.html"
LIMITS = (
    "racecheck and synccheck follow mbarriers (cuda::barrier) on sm_80 and later, racecheck also cp.async with its wait groups"
    f" ([manual]({MANUAL})), and since 2024.4 cp.async.bulk without a tensor map; checks of cp.async.bulk.tensor, which every"
    " TMA rung here uses, are an option that came after 2025.3, and its notes name memcheck (2026.2); a missing"
    f" fence.proxy.async before a bulk copy is reported since 2026.4 ([release notes]({NOTES})). initcheck looks at global memory."
)


# ---- rungs -----------------------------------------------------------------------------------------------------------


def write(results: Path, experiment: str, stale: Mapping[str, str] | None = None) -> None:
    """Write `md/<experiment>_sanitizer.md`."""
    write_text(results / "md" / f"{experiment}_sanitizer.md", render(results, experiment, stale))


def render(results: Path, experiment_name: str, stale: Mapping[str, str] | None = None) -> str:
    """A row per variant with what each tool said, the first finding of each, and the conclusion."""
    experiment, stale = load_experiment(experiment_name), stale or {}
    found = ResultsSet(results)
    jobs = [found.job("sanitize", experiment_name, name) for name in found.jobs("sanitize", experiment_name)]
    if not jobs:
        raise RungsError(
            f"{results / 'csv' / 'sanitize' / experiment_name} has no CSVs of Compute Sanitizer: run `snakemake sanitized` on a GPU."
        )
    frames = [job.frame(experiment.kind("sanitize")) for job in jobs]
    manifests = [job.manifest for job in jobs]
    body, findings = [], []
    for job, frame in zip(jobs, frames, strict=True):
        name = job.name
        by_tool = {row["tool"]: row for row in frame.to_dict("records")}
        point = [int(frame[axis].iloc[0]) for axis in experiment.axis_names]
        rungs = " ".join(experiment.rung_names(experiment.variant(name)))
        mark = " †" if name in stale else ""
        body.append([f"{name}{mark}", rungs, experiment.describe(point), *(_cell(by_tool.get(tool)) for tool in TOOLS)])
        findings += [f"- {name}, {row['reason']}" for row in by_tool.values() if row["status"] != "ok"]
    parts = [
        f"# {experiment_name} under Compute Sanitizer",
        "One launch of each binary on the small problem that the emulator checks it on too"
        + (
            ": two tiles or more of C, and for each CTA a K two tiles longer than its ring of stages."
            if experiment.workload == GEMM
            else "."
        ),
        grid(["variant", "rungs", "shape", *TOOLS], body),
    ]
    if findings:
        parts.append("\n".join(findings))
    parts += [f"**{sentence(pd.concat(frames))}**", LIMITS]
    parts += [f"† {name}: {reason}." for name, reason in stale.items() if any(job.name == name for job in jobs)]
    parts.append(f"<sub>{_made_by(manifests)}</sub>")
    return "\n\n".join(parts) + "\n"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row["status"] != FOUND:
        return "clean" if row["status"] == "ok" else str(row["status"])
    parts = [
        f"{int(row[what])} {what[:-1] if row[what] == 1 else what}"
        for what in ("errors", "warnings")
        if row[what] == row[what] and row[what]
    ]
    return ", ".join(parts)


def sentence(frame: pd.DataFrame) -> str:
    """How many runs of how many variants are clean, and what the others are."""
    tally = frame["status"].value_counts()
    said = (
        f"{tally.get('ok', 0)} of {len(frame)} runs of the {frame['tool'].nunique()} tools over"
        f" {frame['variant'].nunique()} variants have nothing to report"
    )
    others = []
    for (tool, status), rows in frame[frame["status"] != "ok"].groupby(["tool", "status"], sort=True):
        what = "reports on" if status == FOUND else f"({status}) of"
        others.append(f"{tool} {what} {rows['variant'].nunique()}")
    return f"{said}{'; ' + ', '.join(others) if others else ''}."


def _made_by(manifests: Sequence[Mapping[str, Any]]) -> str:
    gpus = ", ".join(sorted({m["gpu"]["name"] for m in manifests}))
    drivers = ", ".join(sorted({m["gpu"]["driver"] for m in manifests}))
    versions = ", ".join(sorted({m["sanitizer"]["version"] or "not there" for m in manifests}))
    runs = sha256_json({m["variant"]: m["run_id"] for m in manifests})[:8]
    builds = sha256_json({m["variant"]: m["binary"].get("build_id", "") for m in manifests})[:8]
    number = f"(hash over {len(manifests)})"
    return f"{gpus}, driver {drivers}, Compute Sanitizer {versions}; runs {runs} {number}; builds {builds} {number}."


# ---- mutated kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Why a tool says nothing of a kind of mistake, as NVIDIA documents it. `before` is the first version that it is not true of."""

    label: str
    tools: tuple[str, ...]
    kinds: tuple[str, ...]
    groups: tuple[str, ...]
    why: str
    before: str = ""


ANY = tuple(GROUPS)
SYNC, CP_ASYNC, *BULK, SUMS = ANY
RULES = (
    Rule(
        "addresses",
        ("memcheck",),
        ("order", "copy order", "start", "deadlock", "layout"),
        ANY,
        "looks at addresses (out of bounds, misaligned) and hardware exceptions, not at the order of accesses"
        f" ([manual, Memcheck Tool]({MANUAL}))",
    ),
    Rule(
        "global memory",
        ("initcheck",),
        ("order", "copy order", "start", "deadlock", "layout", "alignment"),
        ANY,
        "looks for reads of global memory that nothing wrote; of shared memory since 2025.4, where asked"
        f" ([manual, Initcheck Tool]({MANUAL}))",
    ),
    Rule(
        "use of primitives",
        ("synccheck",),
        ("order", "layout", "alignment"),
        ANY,
        "reports divergent threads and invalid arguments at the primitives that are there, and checks no memory access"
        f" ([manual, Synccheck Tool]({MANUAL}))",
    ),
    Rule("use of primitives", ("synccheck",), ("copy order",), (CP_ASYNC,), ""),
    Rule(
        "hazards",
        ("racecheck",),
        ("layout", "alignment"),
        ANY,
        "reports two threads at one location of shared memory, and checks no memory access"
        f" ([manual, Racecheck Tool]({MANUAL}))",
    ),
    Rule("hazards", ("racecheck",), ("order",), (SUMS,), ""),
    Rule(
        "no tensor copies",
        ("racecheck",),
        ("order", "copy order"),
        tuple(BULK),
        f"is said to follow cp.async.bulk (2024.4), and no release note names cp.async.bulk.tensor ([release notes]({NOTES}))",
    ),
    Rule(
        "no tensor copies",
        ("memcheck",),
        ("alignment",),
        tuple(BULK),
        f"follows TMA loads only since 2026.2 ([release notes]({NOTES}))",
        before="2026.2",
    ),
)
UNEXPLAINED = "not explained"


def why_not(tool: str, kind: str, group: str, version: str) -> Rule | None:
    """The documented reason for which that tool does not report that kind of mistake, where there is one."""
    for rule in RULES:
        true_of = not rule.before or (version and _numbers(version) < _numbers(rule.before))
        if tool in rule.tools and kind in rule.kinds and group in rule.groups and true_of:
            return rule
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def write_mutations(results: Path, stale: Iterable[str] = ()) -> None:
    """Write `md/mutations.md`."""
    write_text(results / "md" / "mutations.md", render_mutations(results, stale))


def render_mutations(results: Path, stale: Iterable[str] = ()) -> str:
    """A row per mutation and kind of kernel: how many mutants each reports, whether they agree, and if not why."""
    frame, manifest = mutants.read(results)
    version = manifest["sanitizer"]["version"]
    frame = frame.assign(group=frame["variant"].map(group_of))
    body, used = [], dict[tuple[str, str], str]()
    for (mutation, group), rows in frame.groupby(["mutation", "group"], sort=False):
        body.append(_mutation_row(str(mutation), str(group), rows, version, used))
    body.sort(key=lambda row: (row[0] != NONE, list(MUTATIONS).index(row[0]) if row[0] in MUTATIONS else -1))
    made = {str(mutation) for mutation in frame["mutation"]}
    whats = [f"- {name}: {each.what}; reported as {each.reports}." for name, each in MUTATIONS.items() if name in made]
    notes = [f"- {label}: {tool} {why}." for (tool, label), why in used.items() if why]
    parts = [
        "# Mutated kernels: the emulator and Compute Sanitizer",
        "Each mutation changes the PTX of a correct kernel as a mistake of its author would; a mutant is one place of one kernel."
        " `none` is the kernel as it is. A cell says how many mutants were reported; in `wrong result` how many compute"
        " something else than numpy when they run by themselves.",
        grid(["mutation", "kernels", "mutants", EMULATOR, *TOOLS, "wrong result", "agree", "why not"], body),
        *(["Why a tool says nothing:", "\n".join(notes)] if notes else []),
        f"**{mutation_sentence(frame)}**",
        "\n".join(whats),
        LIMITS,
    ]
    if old := sorted(stale):
        parts.append(
            f"† The source of {', '.join(old)} has changed since: run `python -m rungs sanitize-mutations` again."
        )
    gpu = manifest["gpu"]
    where = f"{gpu['name']}, driver {gpu['driver']}, Compute Sanitizer {version}" if gpu else "no GPU"
    builds = sha256_json({name: b.get("build_id", "") for name, b in manifest["binaries"].items()})[:8]
    limit = f"{manifest.get('time_limit_s', 0):g} s for each run"
    parts.append(
        f"<sub>{where}; {limit}; run {manifest['run_id']}; builds {builds} (hash over {len(manifest['binaries'])}).</sub>"
    )
    return "\n\n".join(parts) + "\n"


def _mutation_row(
    mutation: str, group: str, rows: pd.DataFrame, version: str, used: dict[tuple[str, str], str]
) -> list[str]:
    """`used` collects the reasons that the row refers to."""
    number = len(rows[["variant", "place"]].drop_duplicates())
    tools = rows[rows["tool"].isin(TOOLS)]
    ran = (tools["status"] != "not run").any()
    each = _that_ran(rows)
    mutant = [each["variant"], each["place"]]
    seen = ((each["status"] == FOUND) & each["tool"].isin(TOOLS)).groupby(mutant).any()
    gone = (each["status"].isin(GONE) & (each["tool"] != EMULATOR)).groupby(mutant).any() & ~seen
    agree, why = "not run", ""
    if ran and mutation == NONE:
        agree = "no: a false alarm" if seen.any() else "in part: not all ran to the end" if gone.any() else "yes"
    elif ran:
        parts = [f"{int(seen.sum())} of {len(seen)}"] if 0 < seen.sum() < len(seen) else []
        parts += [f"{int(gone.sum())} hang or crash"] if gone.any() else []
        agree = "yes" if seen.all() else ", ".join(parts) or "no"
        missed = seen.index[~seen & ~gone]
        why = "; ".join(_whys(MUTATIONS[mutation].kind, group, version, used)) if len(missed) else ""
    cells = [_tally(rows[rows["tool"] == tool], FOUND) for tool in (EMULATOR, *TOOLS)]
    return [mutation, group, str(number), *cells, _tally(rows[rows["tool"] == RESULT], WRONG), agree, why]


def _whys(kind: str, group: str, version: str, used: dict[tuple[str, str], str]) -> list[str]:
    found = []
    for tool in TOOLS:
        rule = why_not(tool, kind, group, version)
        found.append(f"{tool}: {rule.label if rule else UNEXPLAINED}")
        if rule and not used.get((tool, rule.label)):
            used[tool, rule.label] = rule.why or next(r.why for r in RULES if r.label == rule.label and r.why)
    return found


def _tally(rows: pd.DataFrame, word: str) -> str:
    """`3`, or `0, 2 time limit` where other things happened."""
    tally = rows["status"].value_counts()
    others = [f"{count} {status}" for status, count in sorted(tally.items()) if status not in (word, "ok")]
    if not rows.empty and others and tally.sum() == tally.get("not run", 0):
        return "not run"
    return ", ".join([str(tally.get(word, 0)), *others])


def _that_ran(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the mutants on which no tool was run."""
    key = ["mutation", "variant", "place"]
    ran = rows[rows["tool"].isin(TOOLS) & (rows["status"] != "not run")][key].drop_duplicates()
    return rows.merge(ran, on=key, how="inner")


def mutation_sentence(frame: pd.DataFrame) -> str:
    """How many mutants the emulator reports, how many a tool does, and what becomes of the rest."""
    mutated = frame[frame["mutation"] != NONE]
    whole = frame[frame["mutation"] == NONE]
    key = ["mutation", "variant", "place"]
    number = len(mutated[key].drop_duplicates())

    def count(rows: pd.DataFrame) -> int:
        return len(rows[key].drop_duplicates())

    emulated = mutated[mutated["tool"] == EMULATOR]
    said = (
        f"The emulator reports {count(emulated[emulated['status'] == FOUND])} of {number} mutants and"
        f" {count(whole[(whole['tool'] == EMULATOR) & (whole['status'] == FOUND)])} of {count(whole)} correct kernels"
    )
    mutated, whole = _that_ran(mutated), _that_ran(whole)
    tools = mutated[mutated["tool"].isin(TOOLS)]
    if tools.empty:
        return f"{said}; Compute Sanitizer was not run."
    ran = count(mutated)
    part = "the mutants" if ran == number else f"the {ran} mutants that it was run on"
    seen = tools[tools["status"] == FOUND][key].drop_duplicates()
    rest = mutated.merge(seen, on=key, how="left", indicator=True)
    rest = rest[(rest["_merge"] == "left_only") & (rest["tool"] != EMULATOR)]
    gone = rest[rest["status"].isin(GONE)][key].drop_duplicates()
    silent = rest.merge(gone, on=key, how="left", indicator="_gone")
    silent = silent[silent["_gone"] == "left_only"]
    wrong = silent[(silent["tool"] == RESULT) & (silent["status"] == WRONG)]
    alarms = whole[whole["tool"].isin(TOOLS) & (whole["status"] == FOUND)]
    return (
        f"{said}; Compute Sanitizer's tools report {len(seen)} of {part} and {count(alarms)} of the correct kernels. Of the"
        f" others {len(gone)} hang or crash and {count(silent)} do neither, {count(wrong)} of these with a wrong result."
    )
