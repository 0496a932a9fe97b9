"""Whether a recording is still what this checkout would measure: the same machine code, the same launches, the same protocol.

The text of a kernel decides nothing. Where more than comments and layout has changed since, the variant is compiled again and its machine
code compared; what was found is remembered in `CODES`, which is committed, so that nobody compiles twice for one text.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from rungs import build, schemas, settings
from rungs.errors import RungsError
from rungs.files import ROOT, read_json, sha256_json, write_json
from rungs.plan import launch_hash
from rungs.protocol import protocol_hash
from rungs.results import RECORDED, Job, ResultsSet, each_job, recorded_sets
from rungs.tokens import tokens_hash
from rungs.variants import load_device, load_experiment

CODES = RECORDED / "codes.json"
"""Hash of a variant's sources, macros, flags and compiler, without comments and layout -> hash of the machine code."""
MOST_CODES = 4000
"""Entries that `CODES` keeps, the newest, so that it stays under 400 kB."""
SECONDS_A_BUILD = 0.8
"""On one core; what `status` says that it will take."""
MUTATIONS = Path("data") / "mutations" / "mutations.csv"
"""Where a results set keeps what was said of mutated kernels."""

Code = str | RungsError
"""The hash of a variant's machine code, or why there is none."""


def stale(
    results: Path,
    experiments: Collection[str] = (),
    variants: Iterable[str] | None = None,
    compare: bool = False,
) -> dict[str, str]:
    """Return variant -> why its recording is no longer what this checkout would measure; empty where all is current.

    `experiments` and `variants` are those to look at, where not all. With `compare`, variants of another source are compiled; without it
    what was found before decides, and what is not known yet stands.
    """
    found, wanted = ResultsSet(results), None if variants is None else set(variants)
    jobs = [
        found.manifest(kind, experiment, job)
        for kind, experiment, job in each_job(found)
        if (not experiments or experiment in experiments) and (wanted is None or kind == "floor" or job in wanted)
    ]
    codes = codes_now(found, _binaries_of(jobs), compare)
    reasons: dict[str, str] = {}
    for manifest in jobs:
        if reason := _why_stale(manifest, codes):
            reasons.setdefault(manifest["variant"], reason)
    return reasons


def _binaries_of(manifests: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return (experiment, architecture, variant) of every binary that these jobs launched."""
    return [(m["experiment"], m["arch"], binary["variant"]) for m in manifests for binary in _binaries(m)]


def _binaries(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a manifest says of each binary that its job launched: its own, then its predecessors', then the clock stamp."""
    binaries = manifest.get("arms") or {"": manifest.get("binary", {})}
    own = sorted(binaries.values(), key=lambda binary: binary.get("variant") != manifest["variant"])
    return [binary for binary in (*own, manifest.get("stamp", {})) if "build_id" in binary]


def _why_stale(manifest: Mapping[str, Any], codes: Mapping[tuple[str, str, str], Code]) -> str:
    protocol = manifest.get("protocol", {}).get("hash")
    if protocol and protocol != protocol_hash():
        return "the measuring protocol has changed since"
    for binary in _binaries(manifest):
        name, arch = binary["variant"], manifest["arch"]
        words = {manifest["variant"]: "it", build.STAMP: "the clock stamp"}.get(name, f"its predecessor {name}")
        if "code_hash" not in binary:
            return "an older rungs measured it, which kept no hash of the machine code"
        code = codes.get((manifest["experiment"], arch, name), binary["code_hash"])
        if isinstance(code, RungsError):
            return f"{words} {code}"
        if code != binary["code_hash"]:
            return f"{words} compiles to other machine code now"
        try:
            points, sms = points_of(manifest)
        except KeyError:
            return "it was measured on axes that the experiment no longer has"
        hashed = binary.get("launch_hash")
        if hashed and hashed != _launch_hash(manifest["experiment"], name, arch, points, sms):
            return f"{words} is launched in another way now"
    return ""


def points_of(manifest: Mapping[str, Any]) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """Return the points at which a job launched, and the number of SMs that it pretended, if it did."""
    if manifest["kind"] == "sanitize":
        problem = manifest["problem"]
        return (tuple(problem["shape"]),), problem["sms"]
    axes = load_experiment(manifest["experiment"]).axis_names
    shapes = manifest.get("shapes", [])
    return tuple(tuple(s[axis] for axis in axes) if isinstance(s, Mapping) else tuple(s) for s in shapes), None


@functools.cache
def _launch_hash(experiment: str, variant: str, arch: str, points: tuple[tuple[int, ...], ...], sms: int | None) -> str:
    declared = load_experiment(experiment)
    return launch_hash(declared, declared.variant(variant), load_device(arch), points, sms)


# ---- what variants compile to now ------------------------------------------------------------------------------------


def codes_now(
    results: ResultsSet, wanted: Iterable[tuple[str, str, str]], compare: bool = True
) -> dict[tuple[str, str, str], Code]:
    """Return (experiment, architecture, variant) -> code hash of what this checkout compiles, by the compiler of the recording.

    `wanted` are these three. Nothing is compiled where the sources are those of the recording, or were compared
    before, or differ in comments and layout alone. Else a variant is compiled, or without `compare` left out. One that does not
    compile any more, or whose compiler is not here, has a RungsError, which goes on behind `it` or another subject.
    """
    codes: dict[tuple[str, str, str], Code] = {}
    unknown: dict[str, tuple[str, str, Mapping[str, str]]] = {}
    texts: dict[tuple[str, str, str], str] = {}
    known, found = _remembered(), dict[str, Code]()
    for experiment, arch, name in dict.fromkeys(wanted):
        made = results.build_manifest(experiment, arch, name) or {}
        compiler = tuple(made.get("compiler", {}).items())
        try:
            build_id, text = _identity(name, arch, compiler)
        except RungsError as error:
            codes[experiment, arch, name] = RungsError(f"cannot be built any more ({str(error).removesuffix('.')})")
            continue
        if build_id == made.get("build_id") and "code_hash" in made:
            codes[experiment, arch, name] = found[text] = made["code_hash"]
        elif text in known:
            codes[experiment, arch, name] = known[text]
        else:
            unknown[text], texts[experiment, arch, name] = (name, arch, dict(compiler)), text
    if compare:
        found |= _compiled(unknown)
    elif unknown:
        print(f"rungs: {_many(unknown)}: `python -m rungs status` compares the machine code.", file=sys.stderr)
    codes |= {binary: found[text] for binary, text in texts.items() if text in found}
    _remember({text: code for text, code in found.items() if isinstance(code, str)})
    return codes


@functools.cache
def _identity(name: str, arch: str, compiler: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Return the id of this checkout's build of a variant, and a hash that is the same whatever its comments and layout."""
    made = build.identity(build.unit_of(name, arch), arch, dict(compiler))
    tokens = {source: tokens_hash(ROOT / source) for source in made["sources"]}
    parts = {key: made[key] for key in ("macros", "flags", "compiler")}
    return made["build_id"], sha256_json([tokens, parts])[:16]


def _many(unknown: Collection[str]) -> str:
    return f"{len(unknown)} recorded binar{'ies have' if len(unknown) > 1 else 'y has'} another source now"


def _compiled(unknown: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, Code]:
    """Compile these variants, a core each, and return hash of the text -> code hash."""
    if not unknown:
        return {}
    cores = os.cpu_count() or 1
    seconds = math.ceil(SECONDS_A_BUILD * len(unknown) / cores)
    print(f"rungs: {_many(unknown)}: compiling to compare the machine code, about {seconds} s.", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rungs-code-") as folder, ThreadPoolExecutor(cores) as pool:
        found = pool.map(lambda each: _compile(Path(folder), *each), unknown.values())
        bar = track(found, "compiling", len(unknown), console=Console(stderr=True), disable=not sys.stderr.isatty())
        return dict(zip(unknown, bar, strict=True))


def _compile(folder: Path, name: str, arch: str, compiler: Mapping[str, str]) -> Code:
    try:
        tools = build.find_toolchain("pip")
        if compiler and compiler != tools.versions():
            versions = ", ".join(f"{tool} {version}" for tool, version in compiler.items())
            return RungsError(f"has another source now, and {versions}, which could compare, is not here")
        made = build.build(name, arch, folder / arch / name / f"{name}.json", tools)
    except RungsError as error:
        return RungsError(f"has another source now and cannot be compiled ({str(error).removesuffix('.')})")
    if made["status"] != "ok":
        return RungsError(f"cannot be built any more ({made['reason'].removesuffix('.')})")
    return str(made["code_hash"])


def _remembered() -> dict[str, str]:
    known = read_json(CODES) if CODES.is_file() else {}
    if not all(isinstance(code, str) and re.fullmatch("[0-9a-f]{64}", code) for code in known.values()):
        raise RungsError(f"{CODES} maps a source to something that is no hash: delete it, and it is made again.")
    return known


def _remember(found: Mapping[str, str]) -> None:
    """Add what is new to `CODES`, where there are recorded sets; where they cannot be written it is found again each time."""
    known = _remembered()
    if found.keys() - known.keys() and os.access(RECORDED, os.W_OK):
        newest = list({**known, **found}.items())[-MOST_CODES:]
        try:
            write_json(CODES, dict(newest))
        except RungsError as error:
            print(f"rungs: {error}", file=sys.stderr)


# ---- claims, mutants, status -----------------------------------------------------------------------------------------


def stale_claims(results: Path, compare: bool = False) -> dict[str, str]:
    """Return `stale` of the recordings that the set's claims are judged from."""
    from rungs import claims

    used: dict[str, set[str] | None] = {}
    for row in claims.read(results):
        named, before = set(str(row["variants"]).split()), used.get(row["experiment"], set())
        whole = row["verdict"] != claims.NOT_MEASURED and not named
        used[row["experiment"]] = None if whole or before is None else before | named
    found: dict[str, str] = {}
    for experiment, variants in used.items():
        found |= stale(results, [experiment], variants, compare)
    return found


def mutated(results: Path) -> bool:
    """Whether the set holds mutated kernels."""
    return (results / MUTATIONS).is_file()


def stale_mutations(results: Path) -> list[str]:
    """Return the kernels whose mutants the set holds and whose machine code is another now."""
    manifest = schemas.read_manifest((results / MUTATIONS).with_suffix(".json"))
    codes = {name: code for (_, _, name), code in codes_now(ResultsSet(results), _mutated(results)).items()}
    return [name for name, binary in manifest["binaries"].items() if codes.get(name) != binary["code_hash"]]


def _mutated(results: Path) -> list[tuple[str, str, str]]:
    """Return (experiment, architecture, variant) of the kernels whose mutants the set holds, but for those that are no more."""
    if not mutated(results):
        return []
    manifest, found = schemas.read_manifest((results / MUTATIONS).with_suffix(".json")), []
    for name in manifest["binaries"]:
        with contextlib.suppress(RungsError):
            found.append((build.find_variant(name)[0].name, manifest["arch"], name))
    return found


def _verified(job: Job) -> Mapping[str, Any]:
    if not job.intact:
        print(f"  damaged: {job.where} is not the CSV of its manifest: {job.fix}.")
    return job.manifest


def print_status() -> None:
    """Compare what has another source, then print a line per recorded set and experiment, and one per stale recording."""
    if not recorded_sets():
        print(f"Nothing is recorded under {RECORDED}.")
    for results in recorded_sets():
        found = ResultsSet(results)
        jobs = [_verified(found.job(*each)) for each in each_job(found)]
        codes_now(found, [*_binaries_of(jobs), *_mutated(results)])
    for results, name in settings.recordings():
        experiment, old = load_experiment(name), stale(results, [name], compare=True)
        print(f"{results}: {name}, {len(ResultsSet(results).jobs('sweep', name))} variants, {len(old)} stale")
        rungs = {
            v.name: experiment.rung_names(v) for ladder in experiment.ladders.values() for v in ladder.rungs.values()
        }
        for variant in sorted(old, key=lambda variant: list(rungs).index(variant) if variant in rungs else len(rungs)):
            print(f"  stale: {'/'.join(rungs.get(variant, [])) or variant} ({variant}): {old[variant]}")
    for results in recorded_sets():
        if mutated(results) and (changed := stale_mutations(results)):
            print(f"{results}: mutations, stale: {', '.join(changed)} compiles to other machine code now")
