"""Where a number comes from, whether that is still what the sources say, and which results are published."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rungs import build, schemas, settings
from rungs.errors import RungsError
from rungs.files import (
    PACKED,
    ROOT,
    manifest_of,
    packed,
    sha256_file,
    sha256_json,
    stem,
    stored,
    whole,
    write_json,
    write_text,
)
from rungs.protocol import protocol_hash
from rungs.variants import GEMM, Experiment, experiment_names, load_experiment

CLOCKS_READ = (
    ("idle", "idle_mhz"),
    ("read back", "read_back_mhz"),
    ("memory locked to", "memory_mhz"),
    ("under load", "load_mhz"),
)
RECORDED = Path("results/recorded")
MUTATIONS = Path("data") / "mutations" / "mutations.csv"
"""Where a results set keeps what was said of mutated kernels."""
KINDS = ("sweep", "floor", "profile", "sanitize")
"""Measuring jobs, each with a folder of CSVs; the schema `floor` is that of the data made from these."""
RECORDABLE = {"sanitize": ("ok", "found", "not on this chip")}
"""Statuses that may be published; of the other kinds what is measured. What a tool found is a result, and its page says so."""
MEASURED = ("ok", "flagged", "not on this chip")
COLD = "-cold"
"""End of the name of a set that was measured with cold caches."""
ADDED = {"profile": "Nsight Compute", "sanitize": "Compute Sanitizer"}
"""Kinds that say nothing of time and may be added to the recorded sweeps of the same binaries -> what made them."""


# ---- staleness -------------------------------------------------------------------------------------------------------


@functools.cache
def _current(name: str, arch: str) -> tuple[str, str]:
    """Source hash and hash of macros, flags and launch that a variant would have now."""
    unit = build.unit_of(name, arch)
    now = build.identity(unit, arch, {})
    return now["source_hash"], sha256_json([now["macros"], now["flags"], unit.smem_bytes, unit.threads])


def stale(
    results: Path, experiment_names_: list[str] | None = None, variants: Iterable[str] | None = None
) -> dict[str, str]:
    """Variant -> why its recording is no longer what this checkout would measure; empty where all is current.

    A recording is stale when a source, a macro or a flag of one of its binaries has changed since, or the protocol.
    `variants` are those to look at, where not all.
    """
    found: dict[str, str] = {}
    wanted = None if variants is None else set(variants)
    for path in sorted((results / "csv").glob("*/*/*.json")):
        kind, experiment = path.parts[-3], path.parts[-2]
        if kind not in KINDS or (experiment_names_ and experiment not in experiment_names_):
            continue
        if wanted is not None and kind != "floor" and path.stem not in wanted:
            continue
        manifest = schemas.read_manifest(path)
        reason = _why_stale(manifest, results)
        if reason:
            found.setdefault(manifest["variant"], reason)
    return found


def stale_claims(results: Path) -> dict[str, str]:
    """`stale` of the recordings that the set's claims are judged from."""
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


def _why_stale(manifest: Mapping[str, Any], results: Path) -> str:
    protocol = manifest.get("protocol", {}).get("hash")
    if protocol and protocol != protocol_hash():
        return "the measuring protocol has changed since"
    binaries = manifest.get("arms") or {"": manifest.get("binary", {})}
    for binary in binaries.values():
        if "source_hash" not in binary:
            continue
        try:
            source_hash, options = _current(binary["variant"], manifest["arch"])
        except RungsError as error:
            return f"its binary cannot be built any more ({error})"
        built = results / "build" / manifest["arch"] / binary["variant"] / f"{binary['variant']}.json"
        made = schemas.read_manifest(built) if built.exists() else {}
        if not _same_code(made, binary["source_hash"], source_hash):
            return f"the source of {binary['variant']} has changed since"
        if made:
            launch = [made.get(key) for key in ("macros", "flags", "smem_dynamic_bytes", "threads")]
            if sha256_json(launch) != options:
                return f"macros, flags or launch of {binary['variant']} have changed since"
    return ""


def stale_mutations(results: Path) -> list[str]:
    """The kernels whose mutants the set holds and whose source has changed since."""
    manifest = schemas.read_manifest((results / MUTATIONS).with_suffix(".json"))
    old = []
    for name, binary in manifest["binaries"].items():
        try:
            source_hash, _ = _current(name, manifest["arch"])
        except RungsError:
            source_hash = ""
        built = results / "build" / manifest["arch"] / name / f"{name}.json"
        made = schemas.read_manifest(built) if built.exists() else {}
        if not _same_code(made, binary["source_hash"], source_hash):
            old.append(name)
    return old


def _same_code(made: Mapping[str, Any], *source_hashes: str) -> bool:
    """Whether sources of these hashes are one, or all known to compile to the PTX of that build manifest."""
    return len(set(source_hashes)) == 1 or set(source_hashes) <= {made.get("source_hash"), *made.get("same_ptx", {})}


def reaffirm(results: Path, toolchain: str) -> None:
    """Compile again every binary of a set whose source has changed since, and note in its manifest where the PTX is the same.

    An edit that leaves a variant's PTX as it was, line numbers included, leaves its results standing: ptxas of one version
    makes the same code of it. Raises RungsError where the compiler is another one than the set's.
    """
    if not (results / "build").is_dir():
        raise RungsError(f"{results} is no results set with builds: name one, for example {RECORDED}/h200.")
    tools = build.find_toolchain(toolchain)
    same, other = 0, []
    for path in sorted((results / "build").glob("*/*/*.json")):
        made = schemas.read_manifest(path)
        name, arch = made["variant"], made["arch"]
        if made["status"] != "ok" or name == build.STAMP:
            continue
        if made["compiler"] != tools.versions():
            raise RungsError(
                f"{path} was built with {made['compiler']} and this is {tools.versions()}, whose PTX says nothing about it:"
                " install that compiler, or measure again."
            )
        try:
            source_hash, options = _current(name, arch)
        except RungsError:
            source_hash, options = "", ""
        if source_hash == made["source_hash"] or source_hash in made.get("same_ptx", {}):
            continue
        with tempfile.TemporaryDirectory(prefix="rungs-reaffirm-") as folder:
            again = build.build(name, arch, Path(folder) / name / f"{name}.json", tools) if source_hash else {}
        launch = sha256_json([made.get(key) for key in ("macros", "flags", "smem_dynamic_bytes", "threads")])
        if launch == options and again.get("ptx_sha256") == made["ptx_sha256"]:
            write_json(path, {**made, "same_ptx": {**made.get("same_ptx", {}), source_hash: again["sources"]}})
            same += 1
        else:
            other.append(name)
    print(
        f"{results}: the sources of {same + len(other)} binaries have changed since; {same} still have the same PTX, so their"
        " results stand."
    )
    for name in other:
        print(f"  other code or line numbers now: {name}, to be measured again")


def recorded_sets() -> list[Path]:
    return sorted(path for path in RECORDED.glob("*") if (path / "csv").is_dir())


def recordings() -> Iterator[tuple[Path, str]]:
    """Every recorded set with each of its experiments."""
    for results in recorded_sets():
        for experiment in settings.recorded_experiments(results.relative_to("results").as_posix()):
            yield results, experiment


def mutated(results: Path) -> bool:
    """Whether the set holds mutated kernels."""
    return (results / MUTATIONS).is_file()


def print_status() -> None:
    """One line per recorded set and experiment, then one per stale recording."""
    if not recorded_sets():
        print(f"Nothing is recorded under {RECORDED}.")
    for results, name in recordings():
        experiment, old = load_experiment(name), stale(results, [name])
        variants = settings.recorded_variants(results.relative_to("results").as_posix(), name)
        print(f"{results}: {name}, {len(variants)} variants, {len(old)} stale")
        for variant, reason in old.items():
            rungs = "/".join(experiment.rung_names(experiment.variant(variant)))
            print(f"  stale: {rungs or variant} ({variant}): {reason}")
    for results in recorded_sets():
        if mutated(results) and (changed := stale_mutations(results)):
            print(f"{results}: mutations, stale: the source of {', '.join(changed)} has changed since")


# ---- record ----------------------------------------------------------------------------------------------------------


def record(results: Path, experiment_name: str, gaps: bool = False) -> None:
    """Copy a live set's CSVs, manifests and build manifests to results/recorded/<device>, after verifying each.

    A set measured with cold caches goes to results/recorded/<device>-cold. One that holds no sweep, only counters of Nsight Compute
    or what Compute Sanitizer said, is added to the recorded set of the same binaries.

    With `gaps` points without a number (refused, implausible, ...) are published as what they are, but for wrong results. Raises
    RungsError, and copies nothing, where a CSV is not the one of its manifest, a result failed or is stale, or the set is a quick
    one.
    """
    from rungs import aggregate, boards, effects

    experiment = load_experiment(experiment_name)
    if "-quick" in results.name:
        raise RungsError(f"{results} is a quick look at few shapes: run the full preset before you record.")
    if RECORDED.resolve() in results.resolve().parents:
        raise RungsError(f"{results} is recorded already: name a live set, for example results/h200.")
    csvs = [path for kind in KINDS for path in sorted((results / "csv" / kind / experiment.name).glob("*.csv"))]
    sweeps = [path for path in csvs if path.parts[-3] == "sweep"]
    if not sweeps and csvs and all(path.parts[-3] in ADDED for path in csvs):
        _add(results, experiment_name, csvs, gaps)
        return
    if not sweeps:
        raise RungsError(
            f"{results} has no sweep of {experiment.name}: run `snakemake sweeps` on a machine with a GPU."
        )
    slugs, archs, policies = set(), set(), set()
    for path in csvs:
        manifest = _publishable(path, gaps)
        slugs.add(manifest["gpu"]["slug"])
        archs.add(manifest["arch"])
        policies |= {manifest["l2"]} if "l2" in manifest else set()
    for variant, reason in stale(results, [experiment.name]).items():
        raise RungsError(f"{variant} in {results} is stale ({reason}): measure it again before you record.")
    if len(slugs) != 1 or len(archs) != 1:
        raise RungsError(f"{results} mixes GPUs ({', '.join(sorted(slugs | archs))}): a recorded set has one.")
    if len(policies) != 1:
        raise RungsError(f"{results} mixes hot and cold caches: delete the results of one policy before you record.")
    arch, target = archs.pop(), RECORDED / f"{slugs.pop()}{COLD if policies == {'cold'} else ''}"
    variants = [path.stem for path in sweeps]
    inspected = [results / "csv" / "inspect" / arch / f"{variant}.csv" for variant in variants]
    files = [*csvs, *inspected, *(manifest_of(path) for path in csvs)]
    files += [results / "build" / arch / variant / f"{variant}.json" for variant in (*variants, build.STAMP)]
    for path in files:
        if not path.is_file():
            raise RungsError(f"{path} is missing: run `snakemake all` before you record.")
    new = {path.relative_to(results) for path in csvs}
    there = (path for kind in KINDS for path in sorted((target / "csv" / kind / experiment.name).glob("*.csv*")))
    lost = next((path for path in there if path.relative_to(target).with_name(f"{stem(path)}.csv") not in new), None)
    if lost:
        raise RungsError(
            f"{lost} would stay beside newer results, and one table would show two campaigns: measure it in {results} too, or"
            f" remove {target} first."
        )
    aggregate.aggregate(results, experiment, arch, variants)  # what no table can be made from is not published
    if experiment.factorial and {variant.name for variant in experiment.off_ladder()} & set(variants):
        effects.effects(results, experiment, arch)
    _copy(files, results, target)
    for sentence in boards.split_ladders(results, experiment, experiment.ladders):
        print(sentence)
    print(
        f"Recorded {len(csvs)} CSVs of {len(variants)} variants in {target}: run `snakemake report` to draw them and"
        " `python -m rungs readme` to put them into the README."
    )


def _schema_of(experiment: Experiment, kind: str) -> str:
    """The CSV kind of a sweep, a floor job, a profile or what Compute Sanitizer said of the experiment."""
    from rungs import aggregate

    return experiment.kind(kind) if kind in ("profile", "sanitize") else aggregate.timed_kind(experiment)


def _add(results: Path, experiment_name: str, csvs: list[Path], gaps: bool) -> None:
    """Put counters, or what Compute Sanitizer said, beside the recorded sweeps of the same binaries.

    Raises RungsError, and copies nothing, where a binary is not the recorded one.
    """
    manifests = [_publishable(path, gaps) for path in csvs]
    targets = {RECORDED / f"{m['gpu']['slug']}{COLD if m.get('l2') == 'cold' else ''}" for m in manifests}
    target = min(targets)
    for variant, reason in stale(results, [experiment_name]).items():
        raise RungsError(f"{variant} in {results} is stale ({reason}): make its CSV again before you record.")
    for path, manifest in zip(csvs, manifests, strict=True):
        name = manifest["variant"]
        built = target / "build" / manifest["arch"] / name / f"{name}.json"
        made = schemas.read_manifest(built) if built.is_file() else {}
        if len(targets) != 1 or made.get("build_id") != manifest["binary"].get("build_id"):
            raise RungsError(
                f"{path} is not of a binary that {target} holds: record the sweeps of {experiment_name} with it."
            )
    _copy([*csvs, *(manifest_of(path) for path in csvs)], results, target)
    what = " and ".join(text for kind, text in ADDED.items() if any(path.parts[-3] == kind for path in csvs))
    print(
        f"Recorded {len(csvs)} CSVs of {what} in {target}, beside the sweeps of the same binaries: run `snakemake report` to draw"
        " their pages."
    )


def _publishable(path: Path, gaps: bool = False) -> dict[str, Any]:
    """The manifest of a CSV, which must be its own. Raises RungsError for one that holds a failed result."""
    manifest, kind = verified(path), path.parts[-3]
    failed = schemas.read_csv(_schema_of(load_experiment(manifest["experiment"]), kind), path)
    failed = failed[~failed["status"].isin(RECORDABLE.get(kind, MEASURED))]
    if gaps:
        failed = failed[failed["status"] == "wrong"]
    if len(failed):
        first = failed.iloc[0]
        raise RungsError(
            f"{path} holds a failed result ({first['status']}: {first['reason']}): measure it again before you record."
        )
    return manifest


def _copy(files: Iterable[Path], results: Path, target: Path) -> None:
    for path in files:
        copy, pack = target / path.relative_to(results), path.suffix == ".csv"
        with whole(copy.with_name(copy.name + PACKED) if pack else copy) as temporary:
            temporary.write_bytes(packed(path.read_bytes()) if pack else path.read_bytes())


def verified(csv_path: Path) -> dict[str, Any]:
    """The manifest beside a CSV, which must name this very file by its hash."""
    manifest = schemas.read_manifest(manifest_of(csv_path))
    if sha256_file(csv_path) != manifest.get("csv_sha256"):
        raise RungsError(f"{csv_path} is not the file of its manifest (another hash): delete it and measure again.")
    return manifest


# ---- trace -----------------------------------------------------------------------------------------------------------


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
            folder = results / "csv" / "sweep" / experiment_name
            if _of_factors(experiment, name):
                there = (results / "data" / experiment_name / "effects.csv").is_file()
            else:
                target = _target(experiment, name)
                emulated = results / "csv" / "emulate" / experiment_name / f"{target}.csv"
                there = target is not None and (stored(folder / f"{target}.csv").is_file() or emulated.is_file())
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
        path = stored(results / "csv" / kind / experiment.name / f"{target}.csv")
        if path.is_file():
            yield from _csv_links(results, kind, path, experiment, None if kind == "sanitize" else shape)
        elif kind in ("sweep", "sanitize") or _counted(results, experiment, target):
            yield Link(f"{path} is missing", False)


def _counted(results: Path, experiment: Experiment, variant: str) -> bool:
    """Whether the set's data show counters of the variant, which then have to come from somewhere."""
    counters = stored(results / "data" / experiment.name / "counters.csv")
    if not counters.is_file():
        return False
    frame = schemas.read_csv(experiment.kind("counters"), counters)
    return variant in set(frame["variant"][frame["status"] == "ok"])


def _rendered(results: Path, experiment: Experiment, table: Path) -> str:
    """The table made again: an experiment's page, a set's page or the root README."""
    from rungs import factorial, sanitizepages, tables

    if table.parent.name == "md" and table.stem.endswith(SANITIZER):
        return sanitizepages.render(results, experiment.name, stale(results, [experiment.name]))
    if table.parent.name == "md":
        render = tables.render_experiment if table.stem == experiment.name else factorial.render
        return render(results, experiment, stale(results, [experiment.name]))
    if (table.resolve().parent / "csv").is_dir():
        pages = sorted(path.stem for path in (results / "md").glob("*.md"))
        names = [page for page in pages if page in experiment_names()]
        whole = [name for name in names if f"{name}{FACTORIAL}" in pages]
        return tables.render_set(results, names, stale(results), whole)
    return _readme().now


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
    current = claimpages.render(results, stale_claims(results)) == text
    yield Link(f"{table} is {'' if current else 'not '}what its data give", current)
    arch = _arch_of(results)
    again = next(r for r in claims.judge_again(results, arch) if r["claim"] == name)
    same = all(again.get(key) == value for key, value in row.items() if key in again)
    said = claimpages.figure_text(row) if row["figure"] is not None else row["reason"]
    yield Link(f"{results / claims.CSV}: {row['quantity']}, {said}, {row['verdict']}", True)
    yield Link(f"  judged again from the data: {'the same' if same else 'another'} verdict and figures", same)
    experiment = load_experiment(claim.experiment)
    timed = (results / "csv" / "sweep" / claim.experiment).is_dir()
    if claim.what in claims.TIMED and timed and row["figure"] is not None:
        labels = [*claim.of.get("steps", []), *claim.of.get("against", [])]
        labels += [claim.of[key] for key in ("rung", "over", "from", "to") if key in claim.of]
        for label in dict.fromkeys(labels):
            target = experiment.variant(label.split(">")[-1]).name
            yield from _data_links(results, experiment, label, target, None, claim.where)
    kinds = ("profile",) if claim.what == "executed" else ("sweep",)
    for kind, variant in itertools.product(kinds if timed else ("emulate",), str(row["variants"]).split()):
        path = stored(results / "csv" / kind / claim.experiment / f"{variant}.csv")
        if kind == "emulate":
            yield from _emulated_links(results, experiment, variant)
        elif path.is_file():
            yield from _csv_links(results, kind, path, experiment, None)
        elif row["figure"] is not None:
            yield Link(f"{path} is missing", False)


def _arch_of(results: Path) -> str:
    """The architecture whose binaries the set holds."""
    found = sorted(path.name for path in (results / "csv" / "inspect").glob("*"))
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
    results: Path, kind: str, path: Path, experiment: Experiment, shape: tuple[int, ...] | None
) -> Iterator[Link]:
    manifest = schemas.read_manifest(manifest_of(path))
    frame = at_shape(schemas.read_csv(_schema_of(experiment, kind), path), experiment, shape)
    rows = f"{len(frame)} rows{f' at {chr(120).join(map(str, shape))}' if shape else ''}"
    yield Link(f"{path}: {rows}, run {manifest['run_id']}, {manifest.get('measured_at', '')}")
    yield Link(f"  SHA-256 {manifest['csv_sha256'][:16]}… is the file's", sha256_file(path) == manifest["csv_sha256"])
    yield Link(f"  every row is of run {manifest['run_id']}", set(frame["run_id"]) <= {manifest["run_id"]})
    if "protocol" in manifest:
        now = protocol_hash()
        yield Link(f"  protocol {manifest['protocol']['hash']} is this checkout's", manifest["protocol"]["hash"] == now)
    arms = manifest.get("arms") or {manifest["variant"]: manifest.get("binary", {})}
    if manifest["variant"] not in arms or "build_id" not in arms[manifest["variant"]]:
        yield Link(f"  the manifest names no binary of {manifest['variant']}", False)
    for arm, binary in arms.items():
        if "build_id" in binary:
            for number, link in enumerate(_binary_links(results, manifest["arch"], arm, binary)):
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

    path = results / "csv" / "emulate" / experiment.name / f"{variant}.csv"
    manifest = schemas.read_manifest(path.with_suffix(".json"))
    yield Link(f"{path}: run {manifest['run_id']}, counted by the emulator, which knows no times")
    yield Link(f"  SHA-256 {manifest['csv_sha256'][:16]}… is the file's", sha256_file(path) == manifest["csv_sha256"])
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
        yield from _binary_links(results, manifest["arch"], variant, manifest["binary"])


def _binary_links(results: Path, arch: str, arm: str, binary: Mapping[str, Any]) -> Iterator[Link]:
    name = binary["variant"]
    folder = results / "build" / arch / name
    path = folder / f"{name}.json"
    if not path.exists():
        yield Link(f"  arm {arm}: {path} is missing", False)
        return
    made = schemas.read_manifest(path)
    built = all(made.get(key) == binary[key] for key in ("build_id", "source_hash"))
    if built and made["cubin_sha256"] == binary["cubin_sha256"]:
        word, holds = "is that of", True
    elif built:  # by another machine: cubins once held the dates of their sources, in the line table
        word, holds = "was assembled elsewhere from the same sources with the same flags and compiler as", True
    else:
        word, holds = "is of the same PTX as", binary["source_hash"] in made.get("same_ptx", {})
        word = word if holds else "is that of"
    yield Link(f"  arm {arm}: binary {binary['cubin_sha256'][:16]}…, build {binary['build_id']}, {word} {path}", holds)
    parts = {key: made[key] for key in ("source_hash", "macros", "flags", "compiler")}
    yield Link(
        f"    build {made['build_id']} is the hash of sources, macros, flags and compiler",
        made["build_id"] == sha256_json(parts)[:16],
    )
    cubin = folder / f"{name}.cubin"
    if cubin.exists():
        yield Link(f"    {cubin} is that binary", sha256_file(cubin) == made["cubin_sha256"])
    yield Link(
        f"    source {made['source_hash'][:16]}… is the hash of its {len(made['sources'])} files",
        sha256_json(made["sources"]) == made["source_hash"],
    )
    changed = [source for source, digest in made["sources"].items() if not _is(ROOT / source, digest)]
    today = [h for h, sources in made.get("same_ptx", {}).items() if all(_is(ROOT / s, d) for s, d in sources.items())]
    if changed and today:
        yield Link(
            f"    {changed[0]} has changed since; this checkout's files, {today[0][:16]}…, compile to the same PTX",
            True,
        )
    else:
        yield Link(f"    those files are this checkout's{f', but not {changed[0]}' if changed else ''}", not changed)
    yield Link(f"    {' '.join(made['flags'])}, nvcc {made['compiler']['nvcc']}, {_macros(made['macros'])}")


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_file(path) == digest


def _macros(macros: Mapping[str, int]) -> str:
    return " ".join(f"-D{name}={value}" for name, value in macros.items())


# ---- README ----------------------------------------------------------------------------------------------------------


def readme(check: bool = False) -> int:
    """Write the root README's generated blocks; with `check`, only say whether they are current (1 where they are not)."""
    filled = _readme()
    if filled.now == filled.text:
        print("README.md is current.")
        return 0
    if check:
        print(filled.wrong())
        return 1
    write_text(ROOT / "README.md", filled.now)
    print("README.md is written anew.")
    return 0


NAMED = 3
"""Stale variants that the line under a block names."""
NOT_CURRENT = "README.md does not show what is recorded: run `python -m rungs readme`."


def readme_note() -> str:
    """What is wrong with the root README's generated blocks, in a sentence; empty where they are current."""
    try:
        filled = _readme()
    except (RungsError, OSError) as error:
        return f"README.md cannot be checked: {error}"
    return "" if filled.now == filled.text else filled.wrong()


@dataclass(frozen=True)
class Readme:
    """The root README as it is and as it would be. `stale`: block -> variant -> why its numbers there are stale."""

    text: str
    now: str
    blocks: Mapping[str, str]
    stale: Mapping[str, Mapping[str, str]]

    def wrong(self) -> str:
        """The first stale number that stands without its mark, else that something else is not current."""
        from rungs import tables

        for name, shown in tables.blocks_in(self.text).items():
            now = self.blocks.get(name, "")
            known = [variant for variant in self.stale.get(name, {}) if f"{variant}: " not in shown]
            if shown.strip() == now.strip() or tables.DAGGER not in now or not known:
                continue
            variant = next((variant for variant in known if f"{variant}: " in now), known[0])
            if tables.DAGGER in shown and f"{variant}: " not in now:
                continue
            return (
                f"README.md, block {name}, shows {variant} without the mark {tables.DAGGER}, though"
                f" {self.stale[name][variant]}: run `python -m rungs readme` to mark it, or measure it again and record it."
            )
        return NOT_CURRENT


def _readme() -> Readme:
    """The root README, and its blocks made from the recorded sets."""
    from rungs import advise, claimpages, claims, equality, factorial, tables

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not recorded_sets():
        return Readme(text, text, {}, {})
    blocks: dict[str, str] = {}
    old: dict[str, Mapping[str, str]] = {}
    for results, name in recordings():
        known, experiment = stale(results, [name]), load_experiment(name)
        made = tables.readme_blocks(results, name, known)
        if name in settings.recorded_factorials(results.relative_to("results").as_posix()):
            made |= factorial.blocks(results, name, known)
        if name == "copy_intensity":
            made[f"{name}:advice"] = advise.block(results, stale(results, list(advise.EXPERIMENTS)))
        if equality.compared(results, name):
            made |= equality.blocks(results, name)
        if results.name.endswith(COLD) and (hot := results.with_name(results.name.removesuffix(COLD))).is_dir():
            made |= _cold_blocks(hot, results, name)
        for block, content in made.items():
            whose = _stale_in_block(experiment, block, known)
            old[f"{results.name}:{block}"] = whose
            blocks[f"{results.name}:{block}"] = _marked(content, whose)
    for results in recorded_sets():
        if (results / claims.CSV).is_file():
            old[f"{results.name}:claims"] = known = stale_claims(results)
            blocks[f"{results.name}:claims"] = _marked(claimpages.block(results, known), known)
    return Readme(text, tables.apply_blocks(text, blocks), blocks, old)


def _stale_in_block(experiment: Experiment, block: str, known: Mapping[str, str]) -> dict[str, str]:
    """Of an experiment's stale variants those that a block is of: its ladder's, or all where it names no ladder."""
    ladder = experiment.ladders.get(block.rpartition(":")[2])
    rungs = {variant.name for variant in ladder.rungs.values()} if ladder else set(known)
    return {variant: reason for variant, reason in known.items() if variant in rungs}


def _marked(content: str, old: Mapping[str, str]) -> str:
    """A block of stale numbers that marks none of them, because it shows figures or sums, with a line that marks it whole."""
    from rungs.tables import DAGGER

    if not old or DAGGER in content:
        return content
    named = [f"{variant}: {reason}" for variant, reason in list(old.items())[:NAMED]]
    if len(old) > NAMED:
        named.append(f"And {len(old) - NAMED} more, which `python -m rungs status` lists")
    return f"{content}\n\n<sub>{DAGGER} Stale, all of it or a part. {'. '.join(named)}.</sub>"


def _cold_blocks(hot: Path, cold: Path, name: str) -> dict[str, str]:
    """`<experiment>:cold:<ladder>` of each ladder of which a cold set and its hot one both have rungs."""
    from rungs import aggregate, contrast, tables

    if name not in settings.recorded_experiments(hot.relative_to("results").as_posix()):
        return {}
    warm, rotated = (tables.read_source(results, name, stale(results, [name])) for results in (hot, cold))
    known = aggregate.measured_ladders(rotated.experiment, rotated.data["shapes"])
    both = [ladder for ladder in aggregate.measured_ladders(warm.experiment, warm.data["shapes"]) if ladder in known]
    return {f"{name}:cold:{ladder.name}": contrast.table(warm, rotated, ladder) for ladder in both}
