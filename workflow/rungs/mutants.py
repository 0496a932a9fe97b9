"""Mutated kernels in the emulator and under Compute Sanitizer: do both report what a mistake breaks?

Building and emulating takes no GPU; what was built in a folder is taken from it again on a machine that has one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rungs import build, clock, launcher, measure, profile, sanitize, schemas
from rungs.binary import made_as
from rungs.emulator import device, mutations, problem
from rungs.errors import RungsError
from rungs.files import read_json, sha256_bytes, sha256_file, sha256_json, syntax_hash, write_json, write_text
from rungs.profile import CRASHED, NOT_RUN, TIME_LIMIT
from rungs.sanitize import FOUND, TOOLS
from rungs.staleness import MUTATIONS
from rungs.variants import load_experiment

NONE = "none"
"""The mutation of a kernel as it is: what no tool may report."""
EMULATOR, RESULT = "emulator", "result"
"""Beside the tools' names in the CSV: the emulator, and the kernel run by itself and held against numpy."""
WRONG = "wrong"
RUNS = "runs.jsonl"
KEPT = 200
"""Letters of a finding that are kept."""

Row = dict[str, Any]


def run(
    folder: Path,
    arch: str,
    toolchain: str,
    setting: str,
    gpu: clock.Gpu | None,
    jobs: int,
    time_limit_s: float,
    places: int = 0,
) -> None:
    """Build and emulate every mutant in `folder`, or take those that are there; with a GPU also run them under every tool.

    `places`: of a mutation that a kernel has at several places only so many are made; 0 for all.

    Writes `mutations.csv` and its manifest. What has run is kept in the folder, so that a run that was cut goes on. Raises
    RungsError where the toolchain, or with a GPU compute-sanitizer, is missing.
    """
    if places < 0 or jobs < 1 or not 0 < time_limit_s < math.inf:
        raise RungsError(
            f"--places {places}, --jobs {jobs} and --time-limit {time_limit_s:g} are no run: give 0 or more places, one job or more"
            " and a limit above 0 seconds."
        )
    built = prepare(folder, arch, toolchain, places)
    rows = [emulated(mutant) for mutant in built["mutants"]]
    opened = sanitize.open_sanitizer(setting) if gpu else None
    if gpu and opened:
        with clock.exclusive(gpu.uuid), clock.ending_signals():
            rows += run_all(folder, built, opened, gpu, jobs, time_limit_s)
    else:
        reason = "The mutants were only built and emulated."
        rows += [
            row_of(mutant, tool, status=NOT_RUN, reason=reason)
            for mutant in built["mutants"]
            for tool in (*TOOLS, RESULT)
        ]
    order = (EMULATOR, *TOOLS, RESULT)
    rows.sort(key=lambda row: order.index(row["tool"]))
    rows = [row for mutant in built["mutants"] for row in rows if key_of(row) == key_of(mutant)]
    job = {
        "kind": "mutations",
        "arch": arch,
        "places": places,
        "binaries": built["binaries"],
        "gpu": gpu.as_json() if gpu else None,
    }
    job |= {"shapes": {name: list(shape) for name, shape in mutations.SHAPES.items()}, "time_limit_s": time_limit_s}
    job |= {"sanitizer": sanitize.described(opened, time_limit_s), "modules": built["modules"]}
    manifest = job | {
        "run_id": sha256_json([job, rows])[:8],
        "software": measure.software({}),
        "measured_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    rows = [{"run_id": manifest["run_id"]} | row for row in rows]
    measure.write_result("mutations", rows, manifest, folder / "mutations.csv")
    print(f"{folder / 'mutations.csv'}: {len(built['mutants'])} kernels, {len(rows)} rows")


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["mutation"], row["variant"], row["place"]


def row_of(mutant: Mapping[str, Any], tool: str, **cells: Any) -> Row:
    bare: Row = {"errors": None, "warnings": None, "finding": "", "source": "", "status": "", "reason": ""}
    return {**dict(zip(("mutation", "variant", "place"), key_of(mutant), strict=True)), "tool": tool, **bare, **cells}


# ---- building and emulating ------------------------------------------------------------------------------------------


def prepare(folder: Path, arch: str, toolchain: str, places: int) -> dict[str, Any]:
    """`built.json` of the folder: made where it is missing or of other sources, mutations, emulator modules or binaries."""
    path = folder / "built.json"
    if path.is_file():
        there = read_json(path)
        schemas.validate(there, "mutants", f"{path} (delete it and run again)")
        same = (there["modules"], there["arch"], there["places"]) == (modules(), arch, places)
        if same and _current(there["binaries"], arch) and all(_there(folder, mutant) for mutant in there["mutants"]):
            return there
    tools = build.find_toolchain(toolchain)
    binaries, mutants = {}, []
    for variant in mutations.ALL:
        manifest = folder / "build" / variant / f"{variant}.json"
        made = build.build(variant, arch, manifest, tools)
        if made["status"] != "ok":
            raise RungsError(made["reason"])
        binaries[variant] = made_as(made)
        text = manifest.with_suffix(".ptx").read_text(encoding="utf-8")
        for name, place, mutated in mutants_of(variant, text):
            if places and place >= places:
                continue
            mutants.append(_make(folder, variant, name, place, mutated, arch, tools))
        print(f"{variant}: {sum(mutant['variant'] == variant for mutant in mutants) - 1} mutants", flush=True)
    built = {"arch": arch, "places": places, "modules": modules(), "binaries": binaries, "mutants": mutants}
    write_json(path, built)
    return built


def modules() -> dict[str, str]:
    """What decides a mutant and the emulator's verdict of it."""
    return device.modules() | {"mutations": syntax_hash(Path(mutations.__file__))[:16]}


def _current(binaries: Mapping[str, Mapping[str, str]], arch: str) -> bool:
    if set(binaries) != set(mutations.ALL):
        return False
    hashes = {name: sha256_json(build.source_hashes(build.unit_of(name, arch).kernel)) for name in binaries}
    return all(binary["source_hash"] == hashes[name] for name, binary in binaries.items())


def _there(folder: Path, mutant: Mapping[str, Any]) -> bool:
    """Whether a mutant of a kernel that there is lies in the folder as it was built."""
    if mutant["variant"] not in mutations.ALL:
        return False
    cubin = folder / mutant["cubin"]
    return bool(mutant["not_built"]) or (cubin.is_file() and sha256_file(cubin) == mutant["cubin_sha256"])


def mutants_of(variant: str, text: str) -> Iterator[tuple[str, int, str]]:
    """(mutation, place, PTX): the kernel as it is and each of its mutants."""
    yield NONE, 0, text
    for name, mutation in mutations.MUTATIONS.items():
        if variant in mutation.variants:
            yield from ((name, place, mutated) for place, mutated in enumerate(mutation.mutate(text)))


def _make(
    folder: Path, variant: str, name: str, place: int, text: str, arch: str, toolchain: build.Toolchain
) -> dict[str, Any]:
    """Assemble one mutant and emulate it."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    ptx = folder / "build" / variant / f"{slug}-{place}.ptx"
    write_text(ptx, text)
    cubin = ptx.with_suffix(".cubin")
    problem_of_ptxas = build.assemble(ptx, cubin, arch, toolchain)
    experiment = load_experiment(mutations.experiment_of(variant))
    shape = mutations.SHAPES[experiment.name]
    found = problem.emulate_gemm(
        experiment, experiment.variant(variant), arch, ptx, shape, sms=mutations.SMS, race=True
    )
    status, reason = device.judge(experiment, found)
    sources = found.findings[0].sources if found.findings else tuple(re.findall(r"kernels/\S+?:\d+", found.failure))
    ptx.unlink()
    return {
        "mutation": name,
        "variant": variant,
        "place": place,
        "cubin": cubin.relative_to(folder).as_posix(),
        "cubin_sha256": "" if problem_of_ptxas else sha256_file(cubin),
        "ptx_sha256": sha256_bytes(text.encode()),
        "not_built": problem_of_ptxas,
        "emulator": {"status": status, "finding": reason, "source": " ".join(dict.fromkeys(sources[:2]))},
    }


def emulated(mutant: Mapping[str, Any]) -> Row:
    said = mutant["emulator"]
    found = said["status"] != "ok"
    return row_of(
        mutant, EMULATOR, finding=said["finding"][:KEPT], source=said["source"], status=FOUND if found else "ok"
    )


# ---- on the GPU ------------------------------------------------------------------------------------------------------


def run_all(
    folder: Path,
    built: Mapping[str, Any],
    opened: sanitize.Sanitizer,
    gpu: clock.Gpu,
    jobs: int,
    time_limit_s: float,
    launch: Sequence[str] | None = None,
) -> list[Row]:
    """A row for each mutant and tool, and for each mutant by itself. `launch` replaces `python -m rungs launch`, for tests.

    Racecheck comes last, one run after the other with nothing beside it, and again where a mutant that ends by itself does not end under
    it, as `sanitize.check_alone` says.
    """
    kept = folder / RUNS
    text = kept.read_text(encoding="utf-8", errors="replace") if kept.is_file() else ""
    done, by_itself = ran(text), dict[tuple[str, str, int], str]()
    writing, stopped = threading.Lock(), threading.Event()
    others = [tool for tool in (*TOOLS, RESULT) if tool != sanitize.ALONE]
    first = [(mutant, tool) for mutant in built["mutants"] for tool in others]
    last = [(mutant, sanitize.ALONE) for mutant in built["mutants"]]

    def one(work: tuple[Mapping[str, Any], str]) -> Row:
        mutant, tool = work
        if mutant["not_built"]:
            return row_of(mutant, tool, status="build failed", reason=mutant["not_built"])
        attempts = sanitize.ATTEMPTS if tool == sanitize.ALONE and by_itself[key_of(mutant)] != TIME_LIMIT else 1
        key = mutant["mutation"], str(mutant["place"]), mutant["cubin_sha256"], tool, opened.version, str(time_limit_s)
        known = [row for row in done.get(key, []) if (*key_of(row), row["tool"]) == (*key_of(mutant), tool)]
        while (row := settled(known, attempts)) is None:
            if stopped.is_set():
                raise RungsError("The run was cut.")
            known.append(_run_one(folder, built["arch"], mutant, tool, opened, gpu, time_limit_s, launch))
            with writing:
                file.write(json.dumps([key, known[-1]]) + "\n")
                file.flush()
        return row

    rows: list[Row] = []
    with kept.open("a", encoding="utf-8") as file:
        if text and not text.endswith("\n"):
            file.write("\n")
        for some, at_once in ((first, jobs), (last, 1)):
            with ThreadPoolExecutor(at_once) as pool:
                try:
                    for row in pool.map(one, some):
                        rows.append(row)
                        of = f"{len(rows)} of {len(first) + len(last)}"
                        print(f"{of}: {' '.join(map(str, key_of(row)))}, {row['tool']}: {row['status']}", flush=True)
                except BaseException:
                    stopped.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            by_itself |= {key_of(row): row["status"] for row in rows if row["tool"] == RESULT}
    return rows


def settled(rows: Sequence[Row], attempts: int) -> Row | None:
    """Of the runs of a tool over a mutant, in their order, the one that counts: the first that ended, once there are as many the last."""
    for row in rows if attempts > 1 else ():
        if not sanitize.endless(row["status"], row["finding"]):
            return row
    return rows[-1] if len(rows) >= attempts else None


def ran(text: str) -> dict[tuple[str, ...], list[Row]]:
    """What a folder's `RUNS` has of earlier runs. A line that was cut with the run that wrote it, or edited, is as if it had not run."""
    declared = {name: rule for name, rule in schemas.columns("mutations").items() if name != "run_id"}
    words = [name for name, rule in declared.items() if rule["type"] == "string"]
    found: dict[tuple[str, ...], list[Row]] = {}
    for line in text.splitlines():
        with contextlib.suppress(RecursionError, TypeError, ValueError):
            known, row = json.loads(line)
            sound = set(row) == set(declared) and all(isinstance(row[name], str) for name in words)
            if sound and not any(schemas.breach(row[name], rule) for name, rule in declared.items()):
                found.setdefault(tuple(known), []).append(row)
    return found


def _run_one(
    folder: Path,
    arch: str,
    mutant: Mapping[str, Any],
    tool: str,
    opened: sanitize.Sanitizer,
    gpu: clock.Gpu,
    time_limit_s: float,
    launch: Sequence[str] | None,
) -> Row:
    name = mutations.experiment_of(mutant["variant"])
    manifest = folder / "build" / mutant["variant"] / f"{mutant['variant']}.json"
    shape = ",".join(map(str, mutations.SHAPES[name]))
    child = [*(launch or (sys.executable, "-m", "rungs", "launch")), "--experiment", name, "--arch", arch]
    child += ["--gpu", gpu.uuid, "--manifest", str(manifest.resolve()), "--shape", shape, "--sms", str(mutations.SMS)]
    child += ["--cubin", str((folder / mutant["cubin"]).resolve()), "--instrumented"]
    if tool == RESULT:
        failure, said = profile.run_tool([*child, "--check"], time_limit_s, "The kernel")
        status, reason = judge_result(failure, said)
        return row_of(mutant, tool, status=status, reason=reason)
    checked = sanitize.check(opened, tool, [*child, "--launches", "1"], time_limit_s)._asdict()
    checked["finding"] = checked["finding"][:KEPT]
    if checked["status"] == FOUND:
        checked["reason"] = ""  # the finding says it
    return row_of(mutant, tool, **checked)


def judge_result(failure: tuple[str, str] | None, said: str) -> tuple[str, str]:
    """Status and reason of a kernel that ran by itself: ok, wrong, time limit or crashed."""
    if not failure and launcher.LAUNCHED in said:
        return "ok", ""
    if found := re.search(r"\S+ is wrong on integers.*", said):
        return WRONG, found[0]
    return failure or (CRASHED, f"The process did not launch its kernel to the end{profile.last_words(said)}.")


# ---- reading ---------------------------------------------------------------------------------------------------------

CSV = MUTATIONS
GONE = (TIME_LIMIT, CRASHED)


def read(results: Path) -> tuple[Any, dict[str, Any]]:
    """The CSV of a set as a DataFrame, and its manifest. Raises RungsError where a kernel or a mutation is none that is known."""
    path = results / CSV
    frame, manifest = schemas.read_csv("mutations", path), schemas.read_manifest(path.with_suffix(".json"))
    for column, known in (("variant", mutations.ALL), ("mutation", (NONE, *mutations.MUTATIONS))):
        if odd := sorted(set(frame[column]) - set(known)):
            raise RungsError(
                f"{path} has the {column} {odd[0]!r}, which workflow/rungs/emulator/mutations.py has not: run"
                " `python -m rungs sanitize-mutations` again."
            )
    return frame, manifest
