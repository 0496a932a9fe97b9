"""Whether a recording is still what this checkout would measure: the same machine code, the same launches, the same protocol.

The text of a kernel decides nothing. Where it has changed since, the variant is compiled again and its machine code compared; what
was found is remembered in `CODES`, which is committed, so that nobody compiles twice for one text.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rungs import build, schemas, settings
from rungs.errors import RungsError
from rungs.files import read_json, write_json
from rungs.plan import launch_hash
from rungs.protocol import protocol_hash
from rungs.results import INSPECT, RECORDED, ResultsSet, each_job, recorded_sets
from rungs.variants import load_device, load_experiment

CODES = RECORDED / "codes.json"
"""Build id -> code hash of variants whose text has changed since they were recorded."""
MUTATIONS = Path("data") / "mutations" / "mutations.csv"
"""Where a results set keeps what was said of mutated kernels."""

Code = str | RungsError
"""The hash of a variant's machine code, or why there is none."""


def stale(results: Path, experiments: Collection[str] = (), variants: Iterable[str] | None = None) -> dict[str, str]:
    """Return variant -> why its recording is no longer what this checkout would measure; empty where all is current.

    `experiments` and `variants` are those to look at, where not all. Variants whose source has changed are compiled.
    """
    found, wanted = ResultsSet(results), None if variants is None else set(variants)
    jobs = [
        found.manifest(kind, experiment, job)
        for kind, experiment, job in each_job(found)
        if (not experiments or experiment in experiments) and (wanted is None or kind == "floor" or job in wanted)
    ]
    codes = codes_now(found, [(m["experiment"], m["arch"], b["variant"]) for m in jobs for b in _binaries(m)])
    reasons: dict[str, str] = {}
    for manifest in jobs:
        if reason := _why_stale(manifest, codes):
            reasons.setdefault(manifest["variant"], reason)
    return reasons


def _binaries(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a manifest says of each binary that its job launched, the clock stamp last."""
    binaries = manifest.get("arms") or {"": manifest.get("binary", {})}
    return [binary for binary in (*binaries.values(), manifest.get("stamp", {})) if "build_id" in binary]


def _why_stale(manifest: Mapping[str, Any], codes: Mapping[tuple[str, str], Code]) -> str:
    protocol = manifest.get("protocol", {}).get("hash")
    if protocol and protocol != protocol_hash():
        return "the measuring protocol has changed since"
    for binary in _binaries(manifest):
        name, arch = binary["variant"], manifest["arch"]
        code = codes[arch, name]
        if isinstance(code, RungsError):
            return str(code)
        if "code_hash" not in binary:
            return "an older rungs measured it, which kept no hash of the machine code"
        if code != binary["code_hash"]:
            return f"{name} compiles to other machine code since"
        points, sms = points_of(manifest)
        hashed = binary.get("launch_hash")
        if hashed and hashed != _launch_hash(manifest["experiment"], name, arch, points, sms):
            return f"{name} is launched in another way since"
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


def codes_now(results: ResultsSet, wanted: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], Code]:
    """Return (architecture, variant) -> code hash of what this checkout compiles, by the compiler of the recording.

    `wanted` are (experiment, architecture, variant). Where the sources are those of the recording, or were compiled before, nothing is
    compiled. A variant that does not compile any more, or whose compiler is not here, has a RungsError.
    """
    codes: dict[tuple[str, str], Code] = {}
    unknown: dict[str, tuple[str, str, Mapping[str, str]]] = {}
    known = _remembered()
    for experiment, arch, name in dict.fromkeys(wanted):
        made = results.build_manifest(experiment, arch, name) or {}
        try:
            build_id = _build_id(name, arch, made)
        except RungsError as error:
            codes[arch, name] = RungsError(f"its binary cannot be built any more ({str(error).removesuffix('.')})")
            continue
        if build_id == made.get("build_id") and "code_hash" in made:
            codes[arch, name] = made["code_hash"]
        elif build_id in known:
            codes[arch, name] = known[build_id]
        else:
            unknown[build_id] = name, arch, made.get("compiler", {})
    found = _compiled(unknown)
    codes |= {(arch, name): found[build_id] for build_id, (name, arch, _) in unknown.items()}
    _remember({build_id: code for build_id, code in found.items() if isinstance(code, str)})
    return codes


def _build_id(name: str, arch: str, made: Mapping[str, Any]) -> str:
    """Return what this checkout's build of a variant is called, by the compiler of an earlier build."""
    return str(_identity(name, arch, tuple(made.get("compiler", {}).items())))


@functools.cache
def _identity(name: str, arch: str, compiler: tuple[tuple[str, str], ...]) -> str:
    return str(build.identity(build.unit_of(name, arch), arch, dict(compiler))["build_id"])


def _compiled(unknown: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> dict[str, Code]:
    """Compile the variants of these build ids, a core each, and return build id -> code hash."""
    if not unknown:
        return {}
    many = f"{len(unknown)} binaries have" if len(unknown) > 1 else "1 binary has"
    print(f"rungs: {many} another source than was recorded: compiling to compare the machine code.", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rungs-code-") as folder, ThreadPoolExecutor(os.cpu_count()) as cores:
        found = cores.map(lambda each: _compile(Path(folder), *each), unknown.values())
        return dict(zip(unknown, found, strict=True))


def _compile(folder: Path, name: str, arch: str, compiler: Mapping[str, str]) -> Code:
    try:
        tools = build.find_toolchain("pip")
        if compiler and compiler != tools.versions():
            versions = ", ".join(f"{tool} {version}" for tool, version in compiler.items())
            return RungsError(
                f"the source of {name} has changed since, and {versions}, which could compare, is not here"
            )
        made = build.build(name, arch, folder / arch / name / f"{name}.json", tools)
    except RungsError as error:
        return RungsError(
            f"the source of {name} has changed since and cannot be compiled ({str(error).removesuffix('.')})"
        )
    if made["status"] != "ok":
        return RungsError(f"its binary cannot be built any more ({made['reason'].removesuffix('.')})")
    return str(made["code_hash"])


def _remembered() -> dict[str, str]:
    known = read_json(CODES) if CODES.is_file() else {}
    if not all(isinstance(code, str) for code in known.values()):
        raise RungsError(f"{CODES} maps a build to something that is no hash: delete it, and it is made again.")
    return known


def _remember(found: Mapping[str, str]) -> None:
    """Add to `CODES`, where there are recorded sets; a folder that cannot be written has them compiled again."""
    if found and os.access(RECORDED, os.W_OK):
        write_json(CODES, dict(sorted({**_remembered(), **found}.items())))


def forget() -> None:
    """Take out of `CODES` what no recorded set asks for now."""
    if not CODES.is_file() or not os.access(RECORDED, os.W_OK):
        return
    used = set()
    for results in map(ResultsSet, recorded_sets()):
        for experiment, arch, name in {*_built(results), *_mutated(results.path)}:
            with contextlib.suppress(RungsError):
                used.add(_build_id(name, arch, results.build_manifest(experiment, arch, name) or {}))
    known = _remembered()
    kept = {build_id: code for build_id, code in known.items() if build_id in used}
    if not kept:
        CODES.unlink()
    elif kept != known:
        write_json(CODES, kept)


def _built(results: ResultsSet) -> Iterator[tuple[str, str, str]]:
    for _, experiment, name in each_job(results, [INSPECT]):
        yield experiment, results.manifest(INSPECT, experiment, name)["arch"], name


# ---- claims, mutants, status -----------------------------------------------------------------------------------------


def stale_claims(results: Path) -> dict[str, str]:
    """Return `stale` of the recordings that the set's claims are judged from."""
    from rungs import claims

    used: dict[str, set[str] | None] = {}
    for row in claims.read(results):
        named, before = set(str(row["variants"]).split()), used.get(row["experiment"], set())
        whole = row["verdict"] != claims.NOT_MEASURED and not named
        used[row["experiment"]] = None if whole or before is None else before | named
    found: dict[str, str] = {}
    for experiment, variants in used.items():
        found |= stale(results, [experiment], variants)
    return found


def mutated(results: Path) -> bool:
    """Whether the set holds mutated kernels."""
    return (results / MUTATIONS).is_file()


def stale_mutations(results: Path) -> list[str]:
    """Return the kernels whose mutants the set holds and whose machine code is another now."""
    manifest = schemas.read_manifest((results / MUTATIONS).with_suffix(".json"))
    codes = codes_now(ResultsSet(results), _mutated(results))
    return [
        name
        for name, binary in manifest["binaries"].items()
        if codes.get((manifest["arch"], name)) != binary["code_hash"]
    ]


def _mutated(results: Path) -> list[tuple[str, str, str]]:
    """Return (experiment, architecture, variant) of the kernels whose mutants the set holds, but for those that are no more."""
    if not mutated(results):
        return []
    manifest, found = schemas.read_manifest((results / MUTATIONS).with_suffix(".json")), []
    for name in manifest["binaries"]:
        with contextlib.suppress(RungsError):
            found.append((build.find_variant(name)[0].name, manifest["arch"], name))
    return found


def print_status() -> None:
    """Print a line per recorded set and experiment, then one per stale recording."""
    if not recorded_sets():
        print(f"Nothing is recorded under {RECORDED}.")
    for results, name in settings.recordings():
        experiment, old = load_experiment(name), stale(results, [name])
        print(f"{results}: {name}, {len(ResultsSet(results).jobs('sweep', name))} variants, {len(old)} stale")
        for variant, reason in old.items():
            rungs = "/".join(experiment.rung_names(experiment.variant(variant)))
            print(f"  stale: {rungs or variant} ({variant}): {reason}")
    for results in recorded_sets():
        if mutated(results) and (changed := stale_mutations(results)):
            print(f"{results}: mutations, stale: {', '.join(changed)} compiles to other machine code since")
    forget()
