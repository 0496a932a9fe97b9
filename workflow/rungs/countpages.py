"""Tables of the emulator's counts in Markdown, each with one generated sentence of conclusion and a line of provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rungs import schemas
from rungs.counts import SHARED, Cell, Shape, read_cells
from rungs.files import sha256_json, write_text
from rungs.results import ResultsSet
from rungs.tables import count_text, grid
from rungs.variants import GEMM, Experiment, Ladder, in_words, load_experiment

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "LDS": ("lds",),
    "LDSM": ("ldsm",),
    "STS": ("sts", "stsm"),
    "LDGSTS": ("ldgsts",),
    "TMA": ("tma_load", "tma_store", "tma_reduce"),
    "mma": ("hmma", "hgmma"),
}
PER_LAUNCH = (*COLUMNS, "shared wavefronts", "per instruction", "conflicts")
HEADERS = (*PER_LAUNCH, "wavefronts per tile", "LSU instructions per tile")
Cells = Mapping[tuple[str, Shape], Cell]


def write(results: Path, name: str, part: str, ladders: Sequence[str] = ()) -> None:
    """Write `md/<experiment>.md`, of these ladders, or with part `factorial` `md/<experiment>_factorial.md`."""
    experiment = load_experiment(name)
    if part == "factorial":
        write_text(results / "md" / f"{name}_factorial.md", render_factorial(results, experiment))
    else:
        write_text(results / "md" / f"{name}.md", render(results, experiment, ladders))


def write_index(
    results: Path, ladders: Mapping[str, Sequence[str]], factorials: Sequence[str], recorded: Sequence[str]
) -> None:
    """Write the set's `README.md`; `ladders` are those of each experiment, `recorded` the sets under results/recorded/."""
    parts = [
        f"# {results.name}",
        "What each rung executes, counted by running its PTX without a GPU. Nothing here is a time: those come from a GPU.",
    ]
    if recorded:
        links = ", ".join(f"[{name}](../recorded/{name}/README.md)" for name in recorded)
        parts.append(f"Times, recorded on a GPU: {links}.")
    for name, shown in ladders.items():
        experiment = load_experiment(name)
        cells = read_cells(results, name)
        parts += [f"## [{name}](md/{name}.md)", experiment.question, coverage(results, name, "coverage")]
        for ladder in (experiment.ladders[each] for each in shown):
            parts += [f"### Ladder {ladder.name}: {ladder.title}"]
            parts += [
                ladder_table(results, experiment, ladder, cells, shape) for shape in shapes_shown(experiment, cells)[:1]
            ]
            if experiment.workload == GEMM:
                parts.append(figure(ladder, f"figures/{name}"))
        if name in factorials:
            parts += [f"### [Factorial: all combinations](md/{name}_factorial.md)"]
            parts.append(coverage(results, name, "factorial_coverage"))
    write_text(results / "README.md", "\n\n".join(parts) + "\n")


def render(results: Path, experiment: Experiment, ladders: Sequence[str]) -> str:
    """All tables of an experiment's ladders."""
    cells = read_cells(results, experiment.name)
    parts = [f"# {experiment.name} in the emulator", experiment.question]
    for ladder in (experiment.ladders[name] for name in ladders):
        parts.append(f"## Ladder {ladder.name}: {ladder.title}")
        parts += [ladder_table(results, experiment, ladder, cells, s) for s in shapes_shown(experiment, cells)]
        if experiment.workload == GEMM:
            parts.append(figure(ladder, f"../figures/{experiment.name}"))
    parts += ["## Coverage", coverage(results, experiment.name, "coverage")]
    return "\n\n".join(parts) + "\n"


def render_factorial(results: Path, experiment: Experiment) -> str:
    """Every variant of the factorial at the largest shape, fewest wavefronts first, and each level's mean."""
    cells = read_cells(results, experiment.name, "factorial")
    shape = shapes_shown(experiment, cells)[0]
    here = {name: cell for (name, at), cell in cells.items() if at == shape}
    good = {name: cell for name, cell in here.items() if cell.status == "ok"}
    order = sorted(good, key=lambda name: (good[name].wavefronts_per_tile, good[name].lsu_per_tile, name))
    rows = [[name, *row(good[name])] for name in order]
    rows += [[name, *row(cell)] for name, cell in here.items() if name not in good]
    means = [
        [name, level.title, str(len(among)), *(f"{sum(v) / len(v):.0f}" if v else "" for v in (waves, lsu))]
        for name, factor in experiment.factors.items()
        if len(factor.levels) > 1
        for value, level in factor.levels.items()
        for among in [[good[v] for v in good if experiment.variant(v).level(name) == value]]
        for waves, lsu in [([c.wavefronts_per_tile for c in among], [c.lsu_per_tile for c in among])]
    ]
    parts = [
        f"# All combinations of {experiment.name} in the emulator",
        coverage(results, experiment.name, "factorial_coverage"),
    ]
    parts += [
        "## Levels",
        grid(["factor", "level", "variants", "wavefronts per tile", "LSU instructions per tile"], means),
    ]
    parts += [f"## Variants at {'x'.join(map(str, shape))}", grid(["variant", *HEADERS], rows)]
    if order:
        first, last = good[order[0]], good[order[-1]]
        parts.append(
            f"**{order[0]} needs the fewest shared-memory wavefronts per K tile of a CTA, {first.wavefronts_per_tile:.4g}, and"
            f" {order[-1]} the most, {last.wavefronts_per_tile:.4g}, {last.wavefronts_per_tile / first.wavefronts_per_tile:.1f}"
            f" times as many.**"
        )
    parts.append(f"<sub>{made_from(results, experiment, list(here))}</sub>")
    return "\n\n".join(parts) + "\n"


def shapes_shown(experiment: Experiment, cells: Cells) -> list[Shape]:
    """The profiled shapes among those counted, or else the largest K of each M and N; largest first."""
    counted = {shape for _, shape in cells}
    if experiment.workload != GEMM:
        return list(dict.fromkeys(shape for _, shape in cells))
    profiled = {(int(s[0]), int(s[1]), int(s[2])) for s in experiment.profile_shapes} & counted
    deepest = {max(shape for shape in counted if shape[:2] == size) for size in {shape[:2] for shape in counted}}
    return sorted(profiled or deepest, reverse=True)


def ladder_table(results: Path, experiment: Experiment, ladder: Ladder, cells: Cells, shape: Shape) -> str:
    """A row per rung: warp instructions of the launch by kind, and what they cost shared memory."""
    gemm, headers = experiment.workload == GEMM, HEADERS if experiment.workload == GEMM else PER_LAUNCH
    rows = [
        [rung, in_words(experiment, ladder, rung), *row(cell)[: len(headers)]]
        for rung, variant in ladder.rungs.items()
        if (cell := cells.get((variant.name, shape))) or gemm
    ]
    if not rows:
        return ""
    if gemm:
        what = f"M={shape[0]}, N={shape[1]}, K={shape[2]}: warp instructions of one launch; k, M, G are powers of 1000; a tile is one K tile of a CTA"
    else:
        what = f"{experiment.describe(shape)}: warp instructions of one launch; k, M, G are powers of 1000"
    sizes = tile_sizes(experiment, ladder) if gemm else ""
    head = f"{what}; what TMA writes to shared memory is in no count of wavefronts{f'; {sizes}' if sizes else ''}."
    names = [variant.name for variant in ladder.rungs.values()]
    gaps = dict.fromkeys(f"{c.status}: {c.reason}" for n in names if (c := cells.get((n, shape))) and c.reason)
    return "\n\n".join(
        [
            head,
            grid(["rung", "what it is", *headers], rows),
            *(f"<sub>{gap}</sub>" for gap in gaps),
            f"**{conclusion(experiment, ladder, cells, shape)}**",
            f"<sub>{made_from(results, experiment, names)}</sub>",
        ]
    )


def row(cell: Cell | None) -> list[str]:
    """The cells of a row under HEADERS; a gap says its status once."""
    if cell is None or cell.status != "ok":
        return [cell.status if cell else "not run", *("" for _ in HEADERS[1:])]
    wavefronts = cell.wavefronts
    through = cell.total("instructions", SHARED)
    return [
        *(count_text(cell.total("instructions", kinds)) for kinds in COLUMNS.values()),
        count_text(wavefronts),
        f"{wavefronts / through:.2f}" if through else "",
        count_text(cell.total("conflicts", SHARED)),
        f"{cell.wavefronts_per_tile:.4g}",
        f"{cell.lsu_per_tile:.4g}",
    ]


def conclusion(experiment: Experiment, ladder: Ladder, cells: Cells, shape: Shape) -> str:
    """The rungs with the fewest and the most wavefronts in a launch, and what the path changes from end to end."""
    counted = {
        rung: cell
        for rung, variant in ladder.rungs.items()
        if (cell := cells.get((variant.name, shape))) and cell.status == "ok"
    }
    where = f"At {experiment.describe(shape)}" + ("" if experiment.workload == GEMM else ",")
    if len(counted) < 2:
        return f"{where} fewer than two rungs have counts, so there is nothing to compare."
    waves = {rung: cell.wavefronts for rung, cell in counted.items()}
    fewest, most = min(waves.values()), max(waves.values())
    if fewest == most:
        said = f"every rung needs {count_text(fewest)} shared-memory wavefronts"
    else:
        least, dearest = (_those(experiment, counted, waves, value) for value in (fewest, most))
        said = f"{least} the fewest shared-memory wavefronts, and {dearest} the most"
    first, last = ladder.path[0], ladder.path[-1]
    if first in counted and last in counted:
        changes = (
            f"{_change(waves[first], waves[last])} wavefronts and"
            f" {_change(counted[first].lsu, counted[last].lsu)} LSU instructions"
        )
        said += f"; from {first} to {last} there are {changes}"
    return f"{where} {said}."


def _those(experiment: Experiment, cells: Mapping[str, Cell], waves: Mapping[str, float], value: float) -> str:
    """The rungs of that many wavefronts, with the count: `S1 (75.5 M, 576 per tile) needs`."""
    names = [name for name, each in waves.items() if each == value]
    if experiment.workload != GEMM:
        return f"{', '.join(names)} ({count_text(value)}) need{'s' if len(names) == 1 else ''}"
    per_tile = " or ".join(dict.fromkeys(f"{cells[name].wavefronts_per_tile:.4g}" for name in names))
    return f"{', '.join(names)} ({count_text(value)}, {per_tile} per tile) need{'s' if len(names) == 1 else ''}"


def tile_sizes(experiment: Experiment, ladder: Ladder) -> str:
    """A warning where counts per tile of two rungs do not compare; empty where all tiles are of one size."""
    values = [experiment.values(variant) for variant in ladder.rungs.values()]
    sizes = {tuple(each[axis] for axis in ("TILE_M", "TILE_N", "TILE_K")) for each in values}
    return "" if len(sizes) == 1 else "tiles differ in size along this ladder, so compare its rungs by the launch"


def _change(before: float, after: float) -> str:
    """The change in percent, or as a count where there were none before."""
    if before == after:
        return "as many"
    if before == 0:
        return f"{count_text(after)} more"
    return f"{abs(after / before - 1) * 100:.1f} % {'fewer' if after < before else 'more'}"


def figure(ladder: Ladder, folder: str) -> str:
    return f"![Wavefronts and LSU instructions per tile of ladder {ladder.name}]({folder}/counts_{ladder.name}.svg)"


def coverage(results: Path, name: str, kind: str) -> str:
    """How many variants are right and counted at every shape, and what the others lack."""
    experiment = load_experiment(name)
    frame = schemas.read_csv(experiment.kind("coverage"), results / "data" / name / f"{kind}.csv")
    bad = frame[frame["status"] != "ok"]
    total, shapes = frame["variant"].nunique(), frame.groupby("variant").size().max()
    good = total - bad["variant"].nunique()
    lines = [
        f"{good} of {total} variants are right and free of races, and counted at all of {shapes} {'shapes' if experiment.workload == GEMM else 'points'}."
    ]
    lines += [f"- {each.variant}: {each.status}: {each.reason}" for each in bad.drop_duplicates("variant").itertuples()]
    return "\n".join(lines)


def made_from(results: Path, experiment: Experiment, variants: Sequence[str]) -> str:
    """Where counts come from, for a caption: emulator, compiler, checks, runs and builds."""
    manifests = list(ResultsSet(results).all_manifests("emulate", experiment.name, variants).values())
    if not manifests:
        return "Emulator, no GPU, no times; nothing was run."
    runs = sha256_json({m["variant"]: m["run_id"] for m in manifests})[:8]
    builds = sha256_json({m["variant"]: m["binary"].get("build_id", "") for m in manifests})[:8]
    compilers = sorted({m["compiler"].get("nvcc", "") for m in manifests} - {""})
    archs = sorted({m["arch"] for m in manifests})
    code = sha256_json(manifests[0]["modules"])[:8]
    return (
        f"Emulator {code}, no GPU, no times; {', '.join(archs)}, nvcc {', '.join(compilers) or 'none'}; each variant held"
        " against numpy on integers and watched for races, in lockstep and warp by warp; counts of large grids follow from a few"
        f" CTAs and small K; runs {runs} (hash over {len(manifests)}); builds {builds} (hash over {len(manifests)})."
    )
