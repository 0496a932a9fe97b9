"""The chain behind a number: table, data, rounds, binary, source, clock, GPU, each link verified."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rungs import readme, record, schemas, settings
from rungs.errors import RungsError
from rungs.files import ROOT, sha256_file, sha256_json, sha256_text
from rungs.protocol import protocol_hash
from rungs.results import Job, ResultsSet, recorded_sets
from rungs.staleness import codes_now, stale, stale_claims
from rungs.variants import GEMM, Experiment, experiment_names, load_experiment

CLOCKS_READ = (
    ("idle", "idle_mhz"),
    ("read back", "read_back_mhz"),
    ("memory locked to", "memory_mhz"),
    ("under load", "load_mhz"),
)


@dataclass(frozen=True)
class Link:
    """One line of a chain; `holds` is None for a statement with nothing to verify. A `detail` that holds is shown on demand."""

    text: str
    holds: bool | None = None
    detail: bool = False


def trace(cell: str, verbose: bool = False) -> int:
    """Print the chain behind a cell and verify each hash; returns 0 where all hold, else 1.

    `cell` is `<table>:<rung, step or variant>`, optionally with `:MxNxK`: a table under results/, or the root README.
    """
    table, name, shape = _parse_cell(cell)
    if table.name == "claims.md":
        chains = [claim_chain(table, name)]
    else:
        behind = _sets_behind(table, name)
        chains = [chain(results, experiment, table, name, shape) for results, experiment in behind]
    failed = hidden = 0
    for link in itertools.chain.from_iterable(chains):
        failed += link.holds is False
        if link.detail and link.holds is not False and not verbose:
            hidden += 1
            continue
        mark = {True: "ok  ", False: "FAIL", None: "    "}[link.holds]
        print(f"{mark} {link.text}")
    more = f" {hidden} more lines with --verbose." if hidden else ""
    print(
        (f"{failed} of the links {'does' if failed == 1 else 'do'} not hold." if failed else "Every link holds.") + more
    )
    return 1 if failed else 0


def _parse_cell(cell: str) -> tuple[Path, str, tuple[int, ...] | None]:
    match = re.fullmatch(r"(?P<table>.+?\.md):(?P<name>[A-Za-z0-9_>+]+)(?::(?P<shape>\d+(?:[x,]\d+)*))?", cell)
    if not match:
        raise RungsError(
            f"{cell!r} names no cell: give <table>:<rung or step>[:MxNxK], for example results/recorded/h200/md/gemm.md:B3."
        )
    shape = match["shape"]
    return Path(match["table"]), match["name"], tuple(map(int, re.split("[x,]", shape))) if shape else None


def _sets_behind(table: Path, name: str) -> list[tuple[Path, Experiment]]:
    """The results sets that a table shows: its own, or for a README every recorded one that has the cell."""
    if not table.is_file():
        raise RungsError(f"{table} does not exist: give the path of a generated table, or README.md.")
    if table.parent.name == "md":
        results = table.parent.parent
        if not results.resolve().is_relative_to(Path("results").resolve()):
            raise RungsError(
                f"{table} is not under results/ of this folder: run `trace` from the checkout that made it."
            )
        return [(results, load_experiment(_experiment_of(table)))]
    inside = table.resolve().parent
    candidates = [inside] if (inside / "csv").is_dir() else recorded_sets()
    found = []
    for results in candidates:
        for experiment_name in experiment_names():
            experiment = load_experiment(experiment_name)
            found_here = ResultsSet(results)
            if _of_factors(experiment, name):
                there = (results / "data" / experiment_name / "effects.csv").is_file()
            else:
                target = _target(experiment, name)
                kinds = ("sweep", "emulate")
                there = target is not None and any(found_here.has(kind, experiment_name, target) for kind in kinds)
            if there:
                found.append((results, experiment))
    if not found:
        raise RungsError(f"No recorded set has {name}: `python -m rungs status` lists what is recorded.")
    return found


FACTORIAL = "_factorial"
"""End of the name of a factorial's page: `md/gemm_factorial.md`."""
SANITIZER = "_sanitizer"
"""End of the name of the page of what Compute Sanitizer said."""


def _experiment_of(page: Path) -> str:
    """The experiment whose page this is. Raises RungsError for a page that shows no rung's measurements."""
    name = page.stem if page.stem in experiment_names() else page.stem.removesuffix(FACTORIAL).removesuffix(SANITIZER)
    if name not in experiment_names():
        raise RungsError(
            f"{page} is no page that `trace` follows: give that of an experiment, for example {page.with_name('gemm.md')}, or"
            f" one that ends in {FACTORIAL}.md or {SANITIZER}.md."
        )
    return name


def _of_factors(experiment: Experiment, name: str) -> bool:
    """Whether it is a factor (`load`) or an interaction of two (`load+read`), which come from every variant."""
    return set(name.split("+")) <= set(experiment.factors)


def _target(experiment: Experiment, name: str) -> str | None:
    """The variant that a rung, a step or a variant's name leads to; None where the experiment has no such name."""
    try:
        return experiment.variant(name.split(">")[-1]).name
    except RungsError:
        return None


def chain(
    results: Path, experiment: Experiment, table: Path, name: str, shape: tuple[int, ...] | None
) -> Iterator[Link]:
    """Table -> data -> rounds -> binary -> source -> clock -> GPU, each link verified where it can be.

    A factor's effects come from the rounds of every variant, which is one link: they are made again. Raises RungsError for
    a name that the experiment has not.
    """
    target = "" if _of_factors(experiment, name) else experiment.variant(name.split(">")[-1]).name
    text = table.read_text(encoding="utf-8")
    shown = re.search(rf"(?<![A-Za-z0-9_>+]){re.escape(name)}(?![A-Za-z0-9_>+])", text) is not None
    yield Link(f"{table} {'shows' if shown else 'does not show'} {name}", shown)
    if (results / "csv" / "emulate" / experiment.name).is_dir():
        yield from _emulated_links(results, experiment, experiment.variant(name.split(">")[-1]).name)
        return
    current = _rendered(results, experiment, table) == text
    yield Link(f"{table} is {'' if current else 'not '}what its data give", current)
    if table.stem.endswith(SANITIZER):
        kinds: tuple[str, ...] = ("sanitize",)
    else:
        yield from _data_links(results, experiment, name, target, shape)
        kinds = ("sweep", "profile") if target else ()
    for kind in kinds:
        if ResultsSet(results).has(kind, experiment.name, target):
            yield from _csv_links(results, kind, target, experiment, None if kind == "sanitize" else shape)
        elif kind in ("sweep", "sanitize") or _counted(results, experiment, target):
            yield Link(f"{ResultsSet(results).where(kind, experiment.name, target)} is missing", False)


def _counted(results: Path, experiment: Experiment, variant: str) -> bool:
    """Whether the set's data show counters of the variant, which then have to come from somewhere."""
    counters = results / "data" / experiment.name / "counters.csv"
    if not counters.is_file():
        return False
    frame = schemas.read_csv(experiment.kind("counters"), counters)
    return variant in set(frame["variant"][frame["status"] == "ok"])


def _rendered(results: Path, experiment: Experiment, table: Path) -> str:
    """The table made again: an experiment's page, a set's page or the root README."""
    from rungs import factorial, sanitizepages, tables

    if table.parent.name == "md" and table.stem.endswith(SANITIZER):
        return sanitizepages.render(results, experiment.name, stale(results, [experiment.name], compare=True))
    if table.parent.name == "md":
        render = tables.render_experiment if table.stem == experiment.name else factorial.render
        return render(results, experiment, stale(results, [experiment.name], compare=True))
    if (table.resolve().parent / "csv").is_dir():
        pages = sorted(path.stem for path in (results / "md").glob("*.md"))
        names = [page for page in pages if page in experiment_names()]
        whole = [name for name in names if f"{name}{FACTORIAL}" in pages]
        return tables.render_set(results, names, stale(results, compare=True), whole)
    return readme.read().now


def _data_links(
    results: Path,
    experiment: Experiment,
    name: str,
    target: str,
    shape: tuple[int, ...] | None,
    only: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[Link]:
    from rungs import effects

    if not target:
        yield from _factor_links(results, experiment, name, shape)
        return
    alone = ">" not in name and not experiment.rung_names(experiment.variant(target))
    if ">" in name:
        kind, column, value = "steps", "step", name
    else:
        own = "corners" if alone else "shapes" if experiment.workload == GEMM else "points"
        kind, column, value = own, "variant", target
    axes = list(experiment.axis_names)
    path = results / "data" / experiment.name / f"{kind}.csv"
    schema = experiment.kind(kind)
    frame = schemas.read_csv(schema, path)
    rows = at_shape(frame[frame[column] == value], experiment, shape)
    for axis, values in (only or {}).items():
        rows = rows[rows[axis].isin(values)]
    if rows.empty:
        known = sorted(set(frame[column])) if shape is None else sorted(set(frame[axes].itertuples(index=False)))
        there = ", ".join(k if isinstance(k, str) else "x".join(map(str, k)) for k in known)
        raise RungsError(
            f"{path} has no {value}{f' at {chr(120).join(map(str, shape))}' if shape else ''}: it has {there}."
        )
    yield Link(f"{path}: {len(rows)} rows of {value}", True)
    results_set = results.resolve().relative_to(Path("results").resolve()).as_posix()
    arch = settings.recorded_arch(results_set)
    try:
        if kind in effects.FRAMES:
            remade = effects.effects(results, experiment, arch)[kind]
        else:
            remade = _aggregated(results_set, experiment.name, arch)[kind]
    except RungsError as error:  # a file that was changed by hand is a link that does not hold
        yield Link(f"  not made again: {error}", False)
        return
    again = schemas.parse_csv(schema, remade.to_csv(index=False, lineterminator="\n"), "the data made again")
    yield _made_again(rows, again[again[column] == value], axes)
    for row in rows.to_dict("records"):
        where = experiment.describe([row[axis] for axis in axes])
        if kind == "steps":
            yield Link(
                f"  {where}: {row['gain_percent']:+.2f} % [{row['low_percent']:.2f}, {row['high_percent']:.2f}], {row['verdict']}"
                if row["status"] == "ok"
                else f"  {where}: {row['status']}"
            )
        elif row["status"] == "ok" and kind == "points":
            counted = "time_us" if row["time_us"] == row["time_us"] and row["time_us"] else "cycles"
            yield Link(f"  {where}: {row[counted]:.4g} {counted.removeprefix('time_')}")
        elif row["status"] == "ok":
            yield Link(
                f"  {where}: {row['time_us']:.4g} us, {row['tflops']:.1f} TFLOP/s, {row['share_percent']:.1f} % of the control"
            )
        else:
            yield Link(f"  {where}: {row['status']}")


def _made_again(rows: Any, again: Any, axes: list[str]) -> Link:
    """Whether the rows are those that the rounds give now."""
    again = again.merge(rows[axes].drop_duplicates(), on=axes, how="inner")
    same = bool(rows.reset_index(drop=True).equals(again.reset_index(drop=True)))
    return Link(f"  made again from the rounds: {'the same' if same else 'other'} figures", same)


def _factor_links(results: Path, experiment: Experiment, name: str, shape: tuple[int, ...] | None) -> Iterator[Link]:
    """The effects and Shapley values of a factor, or with `name` as `load+read` the interactions of two."""
    from rungs import effects

    results_set = results.resolve().relative_to(Path("results").resolve()).as_posix()
    remade: Mapping[str, Any] = {}
    try:
        remade = effects.effects(results, experiment, settings.recorded_arch(results_set))
    except RungsError as error:  # a file that was changed by hand is a link that does not hold
        yield Link(f"  not made again: {error}", False)
    axes, (factor, _, other) = list(experiment.axis_names), name.partition("+")
    for kind in ("interactions",) if other else ("effects", "shapley"):
        path = results / "data" / experiment.name / f"{kind}.csv"
        every = schemas.read_csv(kind, path)
        rows = at_shape(every, experiment, shape)
        rows = rows[rows["factor"] == factor]
        rows = rows[rows["other"] == other] if other else rows
        if rows.empty and kind == "shapley":  # the factor has one level at both ends
            continue
        if rows.empty:
            there = "" if shape is None else f" at {'x'.join(map(str, shape))}"
            raise RungsError(f"{path} has no {name}{there}: its first column and shapes say what there is.")
        yield Link(f"{path}: {len(rows)} rows of {name}", True)
        if remade:
            text = remade[kind].to_csv(index=False, lineterminator="\n")
            again = schemas.parse_csv(kind, text, "the data made again")
            again = again[again["factor"] == factor]
            yield _made_again(rows, again[again["other"] == other] if other else again, axes)
        for row in rows.to_dict("records"):
            where = experiment.describe([row[axis] for axis in axes])
            if row["gain_percent"] != row["gain_percent"]:
                yield Link(f"  {where}: {row['status']}")
                continue
            levels = f"{row['source_level']}>{row['target_level']}"
            if other:
                levels += f" with {row['other_source_level']}>{row['other_target_level']}"
            over = (
                f"{row['part']}, {row['corners']} corners" if kind == "shapley" else f"over {row['contexts']} contexts"
            )
            whole = row.get("share_percent", float("nan"))
            share = f", {whole:.1f} % of the whole" if whole == whole else ""
            yield Link(f"  {where}: {levels} {over} {row['gain_percent']:+.2f} %{share}, {row['verdict']}")


def claim_chain(table: Path, name: str) -> Iterator[Link]:
    """A claim -> the figure again from the data -> the rows of its steps and rungs -> rounds, binaries, sources, GPU.

    Raises RungsError for a name that no claim has.
    """
    from rungs import claimpages, claims

    if not table.is_file():
        raise RungsError(f"{table} does not exist: run `snakemake claims` to write it.")
    results = table.parent.parent
    if not results.resolve().is_relative_to(Path("results").resolve()):
        raise RungsError(f"{table} is not under results/ of this folder: run `trace` from the checkout that made it.")
    pairs = {claim.id: (claim, row) for claim, row in claimpages.judged(results)}
    if name not in pairs:
        raise RungsError(f"config/claims.yaml has no claim {name!r}: it has {', '.join(pairs)}.")
    claim, row = pairs[name]
    text = table.read_text(encoding="utf-8")
    yield Link(f"{table} shows {name}", f"`{name}`" in text)
    current = claimpages.render(results, stale_claims(results, compare=True)) == text
    yield Link(f"{table} is {'' if current else 'not '}what its data give", current)
    arch = _arch_of(results)
    again = next(r for r in claims.judge_again(results, arch) if r["claim"] == name)
    same = all(again.get(key) == value for key, value in row.items() if key in again)
    said = claimpages.figure_text(row) if row["figure"] is not None else row["reason"]
    yield Link(f"{results / claims.CSV}: {row['quantity']}, {said}, {row['verdict']}", True)
    yield Link(f"  judged again from the data: {'the same' if same else 'another'} verdict and figures", same)
    experiment = load_experiment(claim.experiment)
    timed = bool(ResultsSet(results).jobs("sweep", claim.experiment))
    if claim.what in claims.TIMED and timed and row["figure"] is not None:
        labels = [*claim.of.get("steps", []), *claim.of.get("against", [])]
        labels += [claim.of[key] for key in ("rung", "over", "from", "to") if key in claim.of]
        for label in dict.fromkeys(labels):
            target = experiment.variant(label.split(">")[-1]).name
            yield from _data_links(results, experiment, label, target, None, claim.where)
    kinds = ("profile",) if claim.what == "executed" else ("sweep",)
    for kind, variant in itertools.product(kinds if timed else ("emulate",), str(row["variants"]).split()):
        if kind == "emulate":
            yield from _emulated_links(results, experiment, variant)
        elif ResultsSet(results).has(kind, claim.experiment, variant):
            yield from _csv_links(results, kind, variant, experiment, None)
        elif row["figure"] is not None:
            yield Link(f"{ResultsSet(results).where(kind, claim.experiment, variant)} is missing", False)


def _arch_of(results: Path) -> str:
    """Return the architecture whose binaries the set holds."""
    found = ResultsSet(results).architectures()
    if not found:
        raise RungsError(f"{results} has no inspected binaries: run `snakemake all` to make them.")
    return found[0]


@functools.lru_cache(maxsize=1)
def _aggregated(results_set: str, experiment: str, arch: str) -> Mapping[str, Any]:
    """A claim follows several steps of one experiment."""
    from rungs import aggregate

    variants = settings.recorded_rungs(results_set, experiment)
    return aggregate.aggregate(Path("results") / results_set, load_experiment(experiment), arch, variants)


def at_shape(frame: Any, experiment: Experiment, shape: tuple[int, ...] | None) -> Any:
    """The rows of a frame at a shape, or all where none is given. Raises RungsError for one with other axes."""
    if shape is None:
        return frame
    if len(shape) != len(experiment.axis_names):
        raise RungsError(
            f"{'x'.join(map(str, shape))} is no point of {experiment.name}: give {'x'.join(experiment.axis_names)}."
        )
    for axis, value in zip(experiment.axis_names, shape, strict=True):
        frame = frame[frame[axis] == value]
    return frame


def _csv_links(
    results: Path, kind: str, name: str, experiment: Experiment, shape: tuple[int, ...] | None
) -> Iterator[Link]:
    job = ResultsSet(results).job(kind, experiment.name, name)
    manifest, frame = job.manifest, at_shape(job.frame(record.schema_of(experiment, kind)), experiment, shape)
    rows = f"{len(frame)} rows{f' at {chr(120).join(map(str, shape))}' if shape else ''}"
    yield Link(f"{job.where}: {rows}, run {manifest['run_id']}, {manifest.get('measured_at', '')}")
    yield _own_csv(job)
    yield Link(f"  every row is of run {manifest['run_id']}", set(frame["run_id"]) <= {manifest["run_id"]})
    if "protocol" in manifest:
        now = protocol_hash()
        yield Link(f"  protocol {manifest['protocol']['hash']} is this checkout's", manifest["protocol"]["hash"] == now)
    arms = manifest.get("arms") or {manifest["variant"]: manifest.get("binary", {})}
    if manifest["variant"] not in arms or "build_id" not in arms[manifest["variant"]]:
        yield Link(f"  the manifest names no binary of {manifest['variant']}", False)
    for arm, binary in arms.items():
        if "build_id" in binary:
            for number, link in enumerate(_binary_links(results, experiment, manifest["arch"], arm, binary)):
                yield replace(link, detail=arm != manifest["variant"] or number > 0)
    recorded_clock, gpu = manifest.get("clock", {}), manifest["gpu"]
    if kind == "sanitize":  # it times nothing, so no clock was decided
        version = manifest["sanitizer"]["version"]
        yield Link(f"  Compute Sanitizer {version}; {gpu['name']}, {gpu['uuid']}, driver {gpu['driver']}")
        return
    wanted = recorded_clock.get("requested_mhz")
    read = [f"{word} {recorded_clock[key]} MHz" for word, key in CLOCKS_READ if recorded_clock.get(key)]
    if recorded_clock.get("restored") is not None:
        read.append("restored" if recorded_clock["restored"] else "not restored")
    yield Link(
        f"  clock {recorded_clock.get('mode', 'unknown')}{f' at {wanted} MHz' if wanted else ''}:"
        f" {'; '.join([recorded_clock.get('reason', ''), *read])}"
    )
    yield Link(
        f"  {gpu['name']}, {gpu['uuid']}, driver {gpu['driver']}", recorded_clock.get("gpu", gpu["uuid"]) == gpu["uuid"]
    )


def _emulated_links(results: Path, experiment: Experiment, variant: str) -> Iterator[Link]:
    """Counts -> the emulator's CSV -> emulator, binary and source."""
    from rungs import counts
    from rungs.emulator import device

    job = ResultsSet(results).job("emulate", experiment.name, variant)
    manifest = job.manifest
    yield Link(f"{job.where}: run {manifest['run_id']}, counted by the emulator, which knows no times")
    yield _own_csv(job)
    for part, prefix in counts.PREFIX.items():
        data = results / "data" / experiment.name / f"{prefix}counts.csv"
        rows = schemas.read_csv("counts", data) if data.is_file() else None
        if rows is not None and variant in set(rows["variant"]):
            try:
                again = counts.count(results, experiment, [variant])["counts"].to_csv(index=False, lineterminator="\n")
            except RungsError as error:  # a file that was changed by hand is a link that does not hold
                yield Link(f"  not made again: {error}", False)
                return
            here = rows[rows["variant"] == variant].reset_index(drop=True)
            same = here.equals(schemas.parse_csv("counts", again, "the data made again"))
            yield Link(f"  {data} of the {part} has {'the same' if same else 'other'} counts", same)
    yield Link("  the emulator's modules are this checkout's", manifest["modules"] == device.modules())
    if "build_id" in manifest["binary"]:
        yield from _binary_links(results, experiment, manifest["arch"], variant, manifest["binary"])


def _own_csv(job: Job) -> Link:
    return Link(f"  SHA-256 {str(job.manifest['csv_sha256'])[:16]}... is that of the CSV", job.intact)


def _binary_links(
    results: Path, experiment: Experiment, arch: str, arm: str, binary: Mapping[str, Any]
) -> Iterator[Link]:
    """Binary -> machine code -> build -> source, and whether this checkout's sources compile to the same machine code."""
    name, found = binary["variant"], ResultsSet(results)
    made = found.build_manifest(experiment.name, arch, name)
    if made is None:
        yield Link(f"  arm {arm}: the set has no build of {name}", False)
        return
    code = str(binary.get("code_hash", "unknown"))
    yield Link(
        f"  arm {arm}: binary {binary['cubin_sha256'][:16]}..., build {binary['build_id']}, machine code {code[:16]}..., as the set's"
        f" build of {name} has it",
        code == made["code_hash"],
    )
    parts = {key: made[key] for key in ("source_hash", "macros", "flags", "compiler")}
    yield Link(
        f"    build {made['build_id']} is the hash of sources, macros, flags and compiler",
        made["build_id"] == sha256_json(parts)[:16],
    )
    cubin = found.built(arch, name).with_suffix(".cubin")
    if cubin.exists():
        yield Link(f"    {cubin} is that binary", sha256_file(cubin) == made["cubin_sha256"])
    yield Link(
        f"    source {made['source_hash'][:16]}... is the hash of its {len(made['sources'])} files",
        sha256_json(made["sources"]) == made["source_hash"],
    )
    changed = [source for source, digest in made["sources"].items() if not _is(ROOT / source, digest)]
    now = codes_now(found, [(experiment.name, arch, name)])[experiment.name, arch, name]
    if isinstance(now, RungsError):
        yield Link(f"    {name} {now}", False)
    elif changed:
        word = "the same" if now == code else "other"
        yield Link(f"    {changed[0]} has changed since; {name} compiles to {word} machine code", now == code)
    else:
        yield Link("    those files are this checkout's, and compile to that machine code", now == code)
    yield Link(f"    {' '.join(made['flags'])}, nvcc {made['compiler']['nvcc']}, {_macros(made['macros'])}")


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_text(path) == digest


def _macros(macros: Mapping[str, int]) -> str:
    return " ".join(f"-D{name}={value}" for name, value in macros.items())
