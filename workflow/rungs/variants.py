"""Experiments, factors, levels, variants, ladders and steps, as the experiment's file declares them."""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rungs import patterns, schemas
from rungs.errors import Refused, RungsError
from rungs.files import ROOT

CONFIG = ROOT / "config"
WGMMA = "wgmma"
PLANNED = {
    "mma.sync": (
        *("TILE_M", "TILE_N", "TILE_K", "WARP_ROWS", "WARP_COLUMNS"),
        *("VARIANT_LOAD", "VARIANT_B_LAYOUT", "VARIANT_STAGES", "VARIANT_SWIZZLE"),
    ),
    WGMMA: (
        *("TILE_M", "TILE_N", "TILE_K", "WARPGROUPS", "VARIANT_B_LAYOUT", "VARIANT_STAGES", "VARIANT_PRODUCER"),
        *("VARIANT_PERSISTENT", "CLUSTER_TILES_M", "CLUSTER_TILES_N", "VARIANT_C_SLOTS", "VARIANT_SPLIT_K"),
        *("VARIANT_SUMS", "VARIANT_DEPENDENT"),
    ),
}
"""What a GEMM multiplies with -> macros that the plan of its launch reads too."""
MOST_OF_A_CLUSTER = 8
"""CTAs of a cluster that every GPU with clusters launches; with more a launch needs an attribute of its own, and may not fit."""
POSITIVE = re.compile(r"(TILE|WARP|RASTER)_|WARPGROUPS|CLUSTER_TILES|VARIANT_SPLIT_K")
"""Macros that are sizes or counts: a kernel or its plan divides by them."""
NO_AXIS = ("only", "experiment", "rung", "m", "n", "k")
"""Names that are no axis's, beside the columns of the CSVs in which axes are columns: a word of a sweep's own is one."""
WITH_AXES = ("sweep", "cycles", "profile", "sanitize", "points", "steps", "counters", "coverage", "emulate", "counts")
"""Kinds of CSV in which axes are columns."""
RESERVED = ("all", "control", "stamp", "twin")
"""Names that mean something else where a ladder's or a rung's could stand."""


@dataclass(frozen=True)
class Level:
    """One value of a factor. `requires` names, per other factor, the levels it can be combined with.

    `macros` are what follows from the level beside its own macro: a wider warp tile makes a wider tile.
    """

    value: int
    title: str
    architectures: tuple[str, ...] = ()
    requires: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    contract: str | None = None
    macros: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Factor:
    """`default` is the level that a variant has where its name leaves the factor out; None where every name holds the factor."""

    name: str
    macro: str
    title: str
    levels: Mapping[int, Level]
    default: int | None = None


@dataclass(frozen=True)
class Variant:
    """A full assignment of levels: one binary. `name` follows the experiment's pattern."""

    experiment: str
    name: str
    levels: tuple[tuple[str, int], ...]

    def level(self, factor: str) -> int:
        return dict(self.levels)[factor]


@dataclass(frozen=True)
class Step:
    """Two rungs that differ in one factor; `label` is `B2>B3`."""

    ladder: str
    label: str
    source: str
    target: str
    source_variant: Variant
    target_variant: Variant
    factor: str


@dataclass(frozen=True)
class Ladder:
    """`published`: ladders of others to draw beside it, as `config/published/` names them."""

    name: str
    title: str
    rungs: Mapping[str, Variant]
    steps: tuple[Step, ...]
    path: tuple[str, ...]
    published: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """An architecture's limits (`config/devices/<arch>.yaml`). Sizes in bytes."""

    arch: str
    title: str
    capability: str
    chip: str
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    smem_reserved_bytes: int
    registers_per_sm: int
    warps_per_sm: int
    sms: int
    ctas_per_sm: Mapping[str, int]
    bf16_flop_per_sm_cycle: int

    def peak_tflops(self, mhz: float, sms: int | None = None) -> float:
        """TFLOP/s of all tensor cores at that SM clock, dense bf16 with fp32 accumulate; `sms` is the GPU's own number of SMs."""
        return (sms or self.sms) * self.bf16_flop_per_sm_cycle * mhz / 1e6

    def pinned(self, experiment: str) -> int:
        """CTAs per SM that every variant of the experiment has: what the device's file says, else the experiment's own.

        Raises RungsError where neither says it.
        """
        pinned = self.ctas_per_sm.get(experiment)
        if pinned is None and experiment in experiment_names():
            pinned = load_experiment(experiment).ctas_per_sm
        if pinned is None:
            raise RungsError(
                f"config/devices/{self.arch}.yaml pins no CTAs per SM for {experiment}: add it under ctas_per_sm, or give"
                f" config/experiments/{experiment}.yaml a ctas_per_sm for every architecture."
            )
        return pinned


@dataclass(frozen=True)
class Axis:
    """What a point of a sweep sets when it is launched. `values` names those whose number says nothing."""

    name: str
    title: str
    unit: str = ""
    values: Mapping[int, str] = field(default_factory=dict)

    def label(self, value: int) -> str:
        """For example `16 KiB`, or the value's own name."""
        return self.values.get(value) or f"{value} {self.unit}".rstrip()


@dataclass(frozen=True)
class Sweep:
    """A product over some axes, the others at the base point. `only`: factor -> the levels that take part."""

    axes: Mapping[str, tuple[int, ...]]
    only: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def takes(self, variant: Variant) -> bool:
        """Whether the variant takes part."""
        return all(variant.level(factor) in levels for factor, levels in self.only.items())


GEMM = "gemm"
"""The workload of experiments whose points are shapes M, N, K."""


@dataclass(frozen=True)
class Experiment:
    """`axes` are those of a GEMM's shapes; where the workload is another, `point_axes`, `base` and `sweeps` give the points.

    `ctas_per_sm` holds on architectures whose own file pins none for the experiment.
    """

    name: str
    question: str
    kernel: str
    entry: str
    pattern: str
    constants: Mapping[str, int]
    declared: tuple[str, ...]
    factors: Mapping[str, Factor]
    ladders: Mapping[str, Ladder]
    axes: Mapping[str, tuple[int, ...]]
    profile_shapes: tuple[tuple[int, ...], ...]
    floor_variant: Variant
    quick: Mapping[str, Any]
    factorial: Mapping[str, Any] | None = None
    bridge: Mapping[str, str] | None = None
    choice: Mapping[str, Any] | None = None
    architectures: tuple[str, ...] = ()
    ctas_per_sm: int | None = None
    workload: str = GEMM
    multiplies: str = "mma.sync"
    point_axes: Mapping[str, Axis] = field(default_factory=dict)
    base: Mapping[str, int] = field(default_factory=dict)
    sweeps: tuple[Sweep, ...] = ()

    @property
    def axis_names(self) -> tuple[str, ...]:
        """What the numbers of a point are, in its order: M, N and K of a GEMM."""
        return ("m", "n", "k") if self.workload == GEMM else tuple(self.point_axes)

    @property
    def base_point(self) -> tuple[int, ...]:
        """The point around which the sweeps of a workload that is no GEMM lie."""
        return tuple(self.base[axis] for axis in self.point_axes)

    def point(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """The base point with these values in place of its own."""
        return tuple({**self.base, **values}[axis] for axis in self.point_axes)

    def kind(self, name: str) -> str:
        """The CSV kind whose rows have this experiment's axes where a GEMM's have m, n and k."""
        return name if self.workload == GEMM else f"{name}@{','.join(self.point_axes)}"

    def variant(self, name: str) -> Variant:
        """The variant of that name; a rung's name (`B3`) serves too.

        Raises RungsError for a name of another form, a level that does not exist, levels that exclude each other and a second
        spelling of a name, for example one that spells a default out.
        """
        for ladder in self.ladders.values():
            if name in ladder.rungs:
                return ladder.rungs[name]
        match = re.fullmatch(patterns.regex(self.pattern), name)
        if not match:
            rungs = ", ".join(itertools.chain.from_iterable(ladder.rungs for ladder in self.ladders.values()))
            raise RungsError(
                f"{name!r} is no variant of {self.name}: a variant is named {self.pattern}, or is one of the rungs {rungs}."
            )
        found = self.assign({factor: int(value) for factor, value in match.groupdict().items() if value is not None})
        if found.name != name:
            raise RungsError(
                f"{name!r} is a second spelling of {found.name}, and a binary goes by one name, which leaves out default levels and"
                f" leading zeros: write {found.name}."
            )
        return found

    def assign(self, levels: Mapping[str, int]) -> Variant:
        """The variant with these levels, each checked against the factor and against what it requires.

        A factor that is left out has its default level.
        """
        levels = {**self.defaults, **levels}
        unknown = sorted(set(levels) - set(self.factors))
        missing = sorted(set(self.factors) - set(levels))
        if unknown or missing:
            what = f"unknown factor {unknown[0]}" if unknown else f"no level for factor {missing[0]}"
            raise RungsError(f"Experiment {self.name}: {what}; its factors are {', '.join(self.factors)}.")
        for name, value in levels.items():
            known = self.factors[name].levels
            if value not in known:
                raise RungsError(
                    f"Experiment {self.name} has no level {value} of factor {name}: choose one of {', '.join(map(str, known))}."
                )
        for name, value in levels.items():
            for other, allowed in self.factors[name].levels[value].requires.items():
                if levels[other] not in allowed:
                    raise RungsError(
                        f"Level {value} of factor {name} ({self.factors[name].levels[value].title}) requires {other} in"
                        f" {', '.join(map(str, allowed))}, not {levels[other]}: change one of the two."
                    )
        ordered = tuple((name, levels[name]) for name in self.factors)
        variant = Variant(self.name, patterns.name(self.pattern, dict(ordered), self.defaults), ordered)
        if (self.workload, self.multiplies) == (GEMM, WGMMA):
            _check_cluster(variant.name, self.values(variant))
        return variant

    @property
    def defaults(self) -> dict[str, int]:
        """Factor -> its default level, of the factors that have one."""
        return {name: factor.default for name, factor in self.factors.items() if factor.default is not None}

    def name_regex(self) -> str:
        """A regular expression of its variants' names for a wildcard: the levels of each factor, in any combination. It captures no
        group, and is short where a list of 2,000 names would be 40 kB in every path that Snakemake makes.
        """
        spelled = {name: [v for v in factor.levels if v != factor.default] for name, factor in self.factors.items()}
        return patterns.regex_of_levels(self.pattern, spelled)

    def values(self, variant: Variant) -> dict[str, int]:
        """Every -D macro of the variant that does not depend on the architecture: what plan and kernel share."""
        found = dict(self.constants)
        for name, value in variant.levels:
            found |= {self.factors[name].macro: value, **self.factors[name].levels[value].macros}
        return found

    def macros(self, variant: Variant, device: Device) -> dict[str, int]:
        """Every -D macro of the variant's binary on that architecture."""
        return {"CTAS_PER_SM": device.pinned(self.name), **self.values(variant)}

    def check_chip(self, variant: Variant, arch: str) -> None:
        """Raises Refused (`not on this chip`) where the experiment or a level needs another architecture."""
        if self.architectures and arch not in self.architectures:
            raise Refused(
                f"{variant.name}: {self.name} needs one of {', '.join(self.architectures)}, not {arch}.",
                "not on this chip",
            )
        for name, value in variant.levels:
            level = self.factors[name].levels[value]
            if level.architectures and arch not in level.architectures:
                raise Refused(
                    f"{variant.name}: {level.title} needs one of {', '.join(level.architectures)}, not {arch}.",
                    "not on this chip",
                )

    def on_chip(self, variant: Variant, arch: str) -> bool:
        try:
            self.check_chip(variant, arch)
        except Refused:
            return False
        return True

    def estimable(self) -> list[Variant]:
        """Every combination of levels that goes together, in the factors' order."""
        found = []
        for values in itertools.product(*(factor.levels for factor in self.factors.values())):
            try:
                found.append(self.assign(dict(zip(self.factors, values, strict=True))))
            except RungsError:
                continue
        return found

    def off_ladder(self) -> list[Variant]:
        """The variants that only the factorial measures."""
        rungs = {variant for ladder in self.ladders.values() for variant in ladder.rungs.values()}
        return [variant for variant in self.estimable() if variant not in rungs]

    def shapes_to_profile(self, variant: Variant) -> list[tuple[int, ...]]:
        """The points at which ncu counts a variant: fewer of a GEMM's that are on no ladder."""
        shapes: list[Sequence[int]] = list(self.profile_shapes)
        if self.factorial and not self.rung_names(variant):
            more = self.factorial.get("profile_more", {"variants": (), "shapes": ()})
            shapes = [*self.factorial["profile_shapes"], *(more["shapes"] if variant.name in more["variants"] else ())]
        return list(dict.fromkeys(tuple(int(value) for value in shape) for shape in shapes))

    def contract(self, variant: Variant) -> str:
        """Variants of one numeric contract give bitwise equal results. It is what its levels name, together; `{variant}` in it
        makes it the variant's own.
        """
        named = [self.factors[name].levels[value].contract for name, value in variant.levels]
        return ", ".join(contract for contract in named if contract).format(variant=variant.name) or "natural"

    def steps(self) -> list[Step]:
        return [step for ladder in self.ladders.values() for step in ladder.steps]

    def rung_names(self, variant: Variant) -> list[str]:
        """The rungs that are this variant, over all ladders, for example `["B3", "S3"]`."""
        return [rung for ladder in self.ladders.values() for rung, v in ladder.rungs.items() if v == variant]

    def predecessors(self, variant: Variant, ladders: Container[str] | None = None) -> list[Variant]:
        """What the variant's job times beside it: where its steps come from, each once, in the ladders' order.

        `ladders` are those whose steps count, where not all do.
        """
        steps = [step for step in self.steps() if ladders is None or step.ladder in ladders]
        return list(dict.fromkeys(step.source_variant for step in steps if step.target_variant == variant))

    def shapes(self, variant: Variant | None = None) -> list[tuple[int, ...]]:
        """The points of the sweep: (M, N, K) of a GEMM, small M = N first; else those that the variant takes part in, or all."""
        if self.workload == GEMM:
            return [(mn, mn, k) for mn in self.axes["mn"] for k in self.axes["k"]]
        found = []
        for sweep in self.sweeps:
            if variant is None or sweep.takes(variant):
                for values in itertools.product(*sweep.axes.values()):
                    at = {**self.base, **dict(zip(sweep.axes, values, strict=True))}
                    found.append(tuple(at[axis] for axis in self.point_axes))
        return list(dict.fromkeys(found))

    def describe(self, point: Sequence[int]) -> str:
        """A point in words: `512x512x256`, or the axes of a workload that is no GEMM."""
        if self.workload == GEMM:
            return "x".join(map(str, point))
        named = zip(self.point_axes.values(), point, strict=True)
        return ", ".join(f"{axis.title} {axis.label(value)}" for axis, value in named)


def experiment_names(folder: Path | None = None) -> list[str]:
    """Names of the experiments' files; what an editor leaves beside them (`.#gemm.yaml`) is none."""
    files = (folder or CONFIG / "experiments").glob("*.yaml")
    return sorted(path.stem for path in files if not path.name.startswith("."))


def clash(experiments: Sequence[Experiment]) -> str:
    """What is wrong where two experiments can give one variant name, by which binaries are told apart; else empty."""
    for one, other in itertools.combinations(experiments, 2):
        starts = [patterns.start(experiment.pattern) for experiment in (one, other)]
        if not (starts[0].startswith(starts[1]) or starts[1].startswith(starts[0])):
            continue
        names = {variant.name for variant in one.estimable()}
        if shared := next((variant.name for variant in other.estimable() if variant.name in names), None):
            return (
                f"Experiments {one.name} and {other.name} both have a variant {shared}, and a binary goes by its variant's"
                f" name: give config/experiments/{other.name}.yaml another variant_name, or take the file out."
            )
    return ""


@functools.cache
def readable_experiments() -> tuple[tuple[Experiment, ...], Mapping[str, RungsError]]:
    """Every experiment whose file can be read, and by name what is wrong with the others."""
    found, damaged = [], {}
    for name in experiment_names():
        try:
            found.append(load_experiment(name))
        except RungsError as error:
            damaged[name] = error
    return tuple(found), damaged


@functools.cache
def load_experiment(name: str, folder: Path = CONFIG / "experiments") -> Experiment:
    """Read and check `config/experiments/<name>.yaml`.

    Raises RungsError for an unknown experiment, a file that breaks the schema and a step that is no step.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise RungsError(f"There is no experiment {name!r}: choose one of {', '.join(experiment_names(folder))}.")
    raw = schemas.read_yaml(path, "experiment")
    if raw["name"] != name:
        raise RungsError(f"{path} names its experiment {raw['name']}: the name must be the file's, {name}.")
    return parse_experiment(raw)


def parse_experiment(raw: Mapping) -> Experiment:
    """An Experiment from the content of its file, which is already valid by its schema.

    Raises RungsError where names in it do not fit together.
    """
    other = raw.get("workload", GEMM) != GEMM
    _check_names(raw)
    if other:
        _check_points(raw)
    factors = {
        name: Factor(
            name,
            factor["macro"],
            factor["title"],
            {
                value: Level(
                    value,
                    level["title"],
                    tuple(level.get("architectures", ())),
                    {other: tuple(values) for other, values in level.get("requires", {}).items()},
                    level.get("contract"),
                    level.get("macros", {}),
                )
                for value, level in factor["levels"].items()
            },
            factor.get("default"),
        )
        for name, factor in raw["factors"].items()
    }
    bare = Experiment(
        name=raw["name"],
        question=raw["question"],
        kernel=raw["kernel"],
        entry=raw["entry"],
        pattern=raw["variant_name"],
        constants=raw["constants"],
        declared=tuple(raw["declared"]),
        factors=factors,
        ladders={},
        axes={} if other else {axis: tuple(values) for axis, values in raw["axes"].items()},
        profile_shapes=_profile_points(raw),
        floor_variant=Variant(raw["name"], "", ()),
        quick=raw["quick"],
        factorial=raw.get("factorial"),
        bridge=raw.get("bridge"),
        choice=raw.get("choice"),
        architectures=tuple(raw.get("architectures", ())),
        ctas_per_sm=raw.get("ctas_per_sm"),
        workload=raw.get("workload", GEMM),
        multiplies=raw.get("multiplies", "mma.sync"),
        point_axes=_axes(raw) if other else {},
        base=raw.get("base", {}),
        sweeps=parse_sweeps(raw["sweeps"]) if other else (),
    )
    ladders = {name: _ladder(bare, name, ladder) for name, ladder in raw["ladders"].items()}
    complete = Experiment(**{**vars(bare), "ladders": ladders})
    floor = complete.variant(raw["floor_rung"])
    if not complete.rung_names(floor):
        raise RungsError(
            f"Experiment {bare.name}: floor_rung {raw['floor_rung']!r} is on no ladder: name one of the rungs."
        )
    _check_pattern(complete)
    _check_bridge(complete)
    _check_choice(complete)
    if other:
        _check_takes_part(complete)
    for name in (complete.factorial or {}).get("profile_more", {}).get("variants", ()):
        if complete.rung_names(complete.variant(name)):
            raise RungsError(
                f"Experiment {bare.name}: factorial.profile_more names {name}, which is on a ladder and so profiled at all of"
                " profile_shapes: take it out."
            )
    if complete.factorial:
        _check_shapley(complete, complete.factorial["shapley"])
    return Experiment(**{**vars(complete), "floor_variant": floor})


def _check_shapley(experiment: Experiment, declared: Mapping[str, Any]) -> None:
    """Both ends are variants and differ; what is on top is a variant too, and neither end's level."""
    where = f"Experiment {experiment.name}: factorial.shapley"
    ends = {}
    for end in ("source", "target"):
        try:
            ends[end] = experiment.assign(declared[end])
        except RungsError as error:
            raise RungsError(f"{where}.{end} is no variant: {error}") from None
    if ends["source"] == ends["target"]:
        raise RungsError(
            f"{where} goes from {ends['source'].name} to itself: let source and target differ in a factor."
        )
    for name, levels in declared.get("on_top", {}).items():
        for level in levels:
            try:
                experiment.assign({**dict(ends["target"].levels), name: level})
            except RungsError as error:
                raise RungsError(f"{where}.on_top is no change of the target: {error}") from None
            if level in (ends["source"].level(name), ends["target"].level(name)):
                raise RungsError(
                    f"{where}.on_top has level {level} of {name}, which source or target has already: take it out."
                )


def _check_takes_part(experiment: Experiment) -> None:
    """Every rung has points, in the quick preset too, and every sweep has rungs."""
    rungs = {rung: variant for ladder in experiment.ladders.values() for rung, variant in ladder.rungs.items()}
    ladders = [experiment.ladders[name].rungs for name in experiment.quick["ladders"]]
    quick = {rung: variant for declared in ladders for rung, variant in declared.items()}
    for word, sweeps, among in (
        ("sweeps", experiment.sweeps, rungs),
        ("quick.sweeps", parse_sweeps(experiment.quick["sweeps"]), quick),
    ):
        if idle := next((rung for rung, v in among.items() if not any(sweep.takes(v) for sweep in sweeps)), None):
            raise RungsError(
                f"Experiment {experiment.name}: rung {idle} takes part in none of {word}, so there is no point to measure it at:"
                " widen an `only`, or add a sweep."
            )
        for number, sweep in enumerate(sweeps, start=1):
            if among and not any(map(sweep.takes, among.values())):
                raise RungsError(
                    f"Experiment {experiment.name}: no rung takes part in sweep {number} of {word}, whose `only` no rung's levels"
                    " match: change it or take the sweep out."
                )


def _check_bridge(experiment: Experiment) -> None:
    """Its two ends are there; the other experiment's rung is looked at by whoever reads that experiment too."""
    if not experiment.bridge:
        return
    where, to, other = (
        f"Experiment {experiment.name}: its bridge",
        experiment.bridge["to"],
        experiment.bridge["experiment"],
    )
    _check_rung(experiment, to, "its bridge leads to")
    if other not in experiment_names():
        raise RungsError(
            f"{where} comes from {other!r}, which is no experiment: choose one of {', '.join(experiment_names())}."
        )


def ctas_along_k(values: Mapping[str, int]) -> int:
    """How many CTAs share the K of a tile, of any experiment's kernel: 1 where each has all of it."""
    return values.get("VARIANT_SPLIT_K", 1)


def cluster_of(values: Mapping[str, int]) -> tuple[int, int, int]:
    """CTAs of a cluster along M, along N and along K of a tile, of a kernel that multiplies by wgmma."""
    split = 1 if sums_through_l2(values) else ctas_along_k(values)
    return values["CLUSTER_TILES_M"], values["CLUSTER_TILES_N"], split


def sums_through_l2(values: Mapping[str, int]) -> bool:
    """Whether the CTAs that share the K of a tile are of several clusters, and add up through L2."""
    return values["VARIANT_SUMS"] == 1


def _check_cluster(name: str, values: Mapping[str, int]) -> None:
    """Raises RungsError where tiles and CTAs along K make a larger cluster than a GPU launches."""
    along_m, along_n, split = cluster_of(values)
    if (ctas := along_m * along_n * split) > MOST_OF_A_CLUSTER:
        raise RungsError(
            f"{name} would have clusters of {ctas} CTAs, {along_m} x {along_n} tiles times {split} along K, and a cluster has at most"
            f" {MOST_OF_A_CLUSTER}: choose a smaller cluster, fewer CTAs along K or sums through L2."
        )


def _check_choice(experiment: Experiment) -> None:
    """The rungs that the rule chooses from are rungs that multiply by wgmma, and what their clusters cost is said where they cost it."""
    if not experiment.choice:
        return
    where = f"Experiment {experiment.name}: choice"
    if experiment.multiplies != WGMMA:
        raise RungsError(f"{where} is of experiments that multiply by wgmma alone: take it out.")
    for cluster, sms in experiment.choice["sms_in_clusters"].items():
        if sms < cluster:
            raise RungsError(
                f"{where}.sms_in_clusters has {sms} SMs in clusters of {cluster} CTAs: give {cluster} or more."
            )
    for rung, known in experiment.choice["rungs"].items():
        _check_rung(experiment, rung, "choice names")
        shared = ctas_along_k(experiment.values(experiment.variant(rung))) > 1
        if shared != ("split" in known):
            raise RungsError(
                f"{where}.rungs.{rung} {'needs' if shared else 'has'} `split`, the cycles in which CTAs that share a tile's K exchange"
                f" their sums, and its CTAs share {'one: give it' if shared else 'none: take it out'}."
            )


def _check_rung(experiment: Experiment, rung: str, who: str) -> None:
    rungs = [rung for ladder in experiment.ladders.values() for rung in ladder.rungs]
    if rung not in rungs:
        raise RungsError(
            f"Experiment {experiment.name}: {who} {rung!r}, which is none of its rungs: name one of {', '.join(rungs)}."
        )


def _check_pattern(experiment: Experiment) -> None:
    """Each name is of one variant. Variants are looked through only where the pattern alone does not make sure of it."""
    if patterns.tells_apart(experiment.pattern):
        return
    owner: dict[str, Variant] = {}
    for variant in experiment.estimable():
        if (other := owner.setdefault(variant.name, variant)) != variant:
            raise RungsError(
                f"Experiment {experiment.name}: two variants are named {variant.name} (levels"
                f" {', '.join(str(value) for _, value in other.levels)} and {', '.join(str(value) for _, value in variant.levels)}):"
                f" put a letter or _ between the factors of variant_name {experiment.pattern}."
            )
        match = re.fullmatch(patterns.regex(experiment.pattern), variant.name)
        levels = {name: int(value) for name, value in match.groupdict().items() if value is not None} if match else {}
        if {**experiment.defaults, **levels} != dict(variant.levels):
            raise RungsError(
                f"Experiment {experiment.name}: the name {variant.name} does not say where one level ends and the next begins:"
                f" put a letter or _ between the factors of variant_name {experiment.pattern}."
            )


def _check_names(raw: Mapping) -> None:
    """Factors, macros, the pattern and the rungs name each other rightly, and nothing has two meanings."""
    where, factors = f"Experiment {raw['name']}", raw["factors"]
    try:
        named = [field for _, field, _, _ in string.Formatter().parse(raw["variant_name"]) if field is not None]
    except ValueError as error:
        raise RungsError(f"{where}: variant_name {raw['variant_name']!r} is no pattern ({error}).") from None
    if not all(isinstance(name, str) for name in factors):
        raise RungsError(
            f"{where}: factor {next(n for n in factors if not isinstance(n, str))!r} is no name: use letters."
        )
    if sorted(named) != sorted(factors) or re.search(r"\{\{|\}\}", raw["variant_name"]):
        raise RungsError(f"{where}: variant_name must hold each factor once, {', '.join(f'{{{f}}}' for f in factors)}.")
    patterns.check(where, raw["variant_name"], factors)
    implied = {name: _implied(where, name, factor["levels"]) for name, factor in factors.items()}
    macros = [factor["macro"] for factor in factors.values()] + list(raw["constants"]) + ["CTAS_PER_SM"]
    macros += list(itertools.chain.from_iterable(implied.values()))
    for macro in PLANNED[raw.get("multiplies", "mma.sync")] if raw.get("workload", GEMM) == GEMM else ():
        if macro not in macros:
            raise RungsError(f"{where}: neither constants nor a factor give {macro}, which the plan of a launch needs.")
    if twice := next((macro for macro in macros if macros.count(macro) > 1), None):
        raise RungsError(f"{where}: macro {twice} is given twice, so one would hide the other: rename it.")
    for name, factor in factors.items():
        for value, level in factor["levels"].items():
            if odd := next((other for other in level.get("requires", {}) if other not in factors), None):
                raise RungsError(f"{where}: level {value} of {name} requires {odd!r}, which is no factor of it.")
            _check_requires(f"{where}: level {value} of {name}", name, level.get("requires", {}), factors)
            _check_architectures(f"{where}: level {value} of {name}", level)
            _check_positive(f"{where}: level {value} of {name}", {factor["macro"]: value, **level.get("macros", {})})
    _check_architectures(where, raw)
    _check_positive(f"{where}: constants", raw["constants"])
    if not (ROOT / "kernels" / raw["kernel"]).is_file():
        raise RungsError(f"{where}: there is no kernels/{raw['kernel']}: name a file under kernels/ as its kernel.")
    owner: dict[str, str] = {}
    for ladder, declared in raw["ladders"].items():
        for word in (ladder, *declared["rungs"]):
            if word in RESERVED or re.fullmatch(patterns.regex(raw["variant_name"]), word):
                meaning = "a word of rungs' own" if word in RESERVED else "the name of a variant too"
                raise RungsError(f"{where}: ladder or rung {word} has a name that is {meaning}: rename it.")
        for rung in declared["rungs"]:
            if rung in owner:
                raise RungsError(
                    f"{where}: rung {rung} stands on ladders {owner[rung]} and {ladder}: a name has one meaning."
                )
            owner[rung] = ladder
    for ladder in raw["quick"]["ladders"]:
        if ladder not in raw["ladders"]:
            raise RungsError(f"{where}: quick names ladder {ladder!r}, which it does not have.")


def _axes(raw: Mapping) -> dict[str, Axis]:
    return {
        name: Axis(name, axis["title"], axis.get("unit", ""), axis.get("values", {}))
        for name, axis in raw["axes"].items()
    }


def parse_sweeps(raw: Sequence[Mapping]) -> tuple[Sweep, ...]:
    """Sweeps as a file has them: axis -> values, and under `only` factor -> levels."""
    return tuple(
        Sweep(
            {axis: tuple(values) for axis, values in sweep.items() if axis != "only"},
            {factor: tuple(levels) for factor, levels in sweep.get("only", {}).items()},
        )
        for sweep in raw
    )


def _profile_points(raw: Mapping) -> tuple[tuple[int, ...], ...]:
    """What ncu counts: shapes of a GEMM, else points of which only what differs from the base is given."""
    if raw.get("workload", GEMM) == GEMM:
        return tuple(tuple(shape) for shape in raw["profile_shapes"])
    return tuple(tuple({**raw["base"], **point}[axis] for axis in raw["axes"]) for point in raw["profile_points"])


def _check_points(raw: Mapping) -> None:
    """The base, the sweeps and the profiled points name axes and levels that there are."""
    where, axes = f"Experiment {raw['name']}", list(raw["axes"])
    if not (ROOT / "workflow" / "rungs" / "workloads" / f"{raw['workload']}.py").is_file():
        raise RungsError(f"{where}: there is no workload {raw['workload']!r} under workflow/rungs/workloads/.")
    columns = set(NO_AXIS).union(*(schemas.load_schema(f"csv/{kind}")["columns"] for kind in WITH_AXES))
    if taken := next((axis for axis in axes if axis in columns), None):
        raise RungsError(f"{where}: an axis may not be called {taken}, which is a column of a CSV already: rename it.")
    if sorted(raw["base"]) != sorted(axes):
        raise RungsError(f"{where}: base must give one value for each axis, {', '.join(axes)}.")
    named = [("a sweep", s) for s in [*raw["sweeps"], *raw["quick"]["sweeps"]]]
    named += [("a profiled point", p) for p in raw["profile_points"]]
    for what, given in named:
        words = () if what == "a profiled point" else ("only",)
        if odd := next((axis for axis in given if axis not in (*axes, *words)), None):
            raise RungsError(f"{where}: {what} names {odd!r}, which is no axis of it: its axes are {', '.join(axes)}.")
        if what != "a profiled point" and not set(given) - {"only"}:
            raise RungsError(f"{where}: {what} is over no axis: give it values of one of {', '.join(axes)}.")
        for factor, levels in given.get("only", {}).items() if words else ():
            if factor not in raw["factors"]:
                raise RungsError(f"{where}: {what} is only for levels of {factor!r}, which is no factor of it.")
            _check_requires(f"{where}: {what}", "", {factor: levels}, raw["factors"])


def _check_requires(where: str, factor: str, requires: Mapping[str, Sequence[int]], factors: Mapping) -> None:
    for other, allowed in requires.items():
        if other == factor:
            raise RungsError(f"{where} requires levels of {factor} itself: name another factor.")
        if odd := [value for value in allowed if value not in factors[other]["levels"]]:
            raise RungsError(
                f"{where} requires level {odd[0]} of {other}, whose levels are {', '.join(map(str, factors[other]['levels']))}."
            )
        if not allowed:
            raise RungsError(
                f"{where} requires no level of {other}, so it goes with nothing: list the levels it goes with."
            )


def _check_architectures(where: str, raw: Mapping) -> None:
    if odd := next((arch for arch in raw.get("architectures", ()) if arch not in architectures()), None):
        raise RungsError(f"{where} names architecture {odd!r}: choose of {', '.join(architectures())}.")


def _check_positive(where: str, macros: Mapping[str, int]) -> None:
    for macro, value in macros.items():
        if POSITIVE.match(macro) and value < 1:
            raise RungsError(f"{where} gives {macro} the value {value}: it must be 1 or more.")


def _implied(where: str, factor: str, levels: Mapping[int, Mapping]) -> set[str]:
    """The macros that each level of a factor sets beside the factor's own."""
    given = {value: set(level.get("macros", {})) for value, level in levels.items()}
    every = set().union(*given.values())
    for value, macros in given.items():
        if lacking := sorted(every - macros):
            raise RungsError(
                f"{where}: level {value} of {factor} gives no {lacking[0]}, which another of its levels gives."
            )
    return every


def _ladder(experiment: Experiment, name: str, raw: Mapping) -> Ladder:
    rungs = {rung: experiment.assign({**raw["base"], **levels}) for rung, levels in raw["rungs"].items()}
    steps = tuple(_step(name, rungs, label) for label in raw["steps"])
    where, path = f"Experiment {experiment.name}: the path of ladder {name}", tuple(raw["path"])
    if odd := next((rung for rung in path if rung not in rungs), None):
        raise RungsError(f"{where} names {odd!r}, which is none of its rungs.")
    if len(path) < 2:
        raise RungsError(f"{where} has {len(path)} rungs: give it 2 or more.")
    for a, b in itertools.pairwise(path):
        if f"{a}>{b}" not in raw["steps"]:
            raise RungsError(f"{where} goes from {a} to {b}, which is none of its steps.")
    return Ladder(name, raw["title"], rungs, steps, path, tuple(raw.get("published", ())))


def _step(ladder: str, rungs: Mapping[str, Variant], label: str) -> Step:
    source, _, target = label.partition(">")
    for rung in (source, target):
        if rung not in rungs:
            raise RungsError(f"Step {label} of ladder {ladder} names {rung!r}: its rungs are {', '.join(rungs)}.")
    return make_step(rungs[source], rungs[target], ladder, label, source, target)


def make_step(
    source: Variant, target: Variant, ladder: str = "", label: str = "", source_rung: str = "", target_rung: str = ""
) -> Step:
    """A step between two variants.

    Raises RungsError unless exactly one factor differs: two factors in one step cannot be told apart.
    """
    label = label or f"{source.name}>{target.name}"
    differing = [name for (name, a), (_, b) in zip(source.levels, target.levels, strict=True) if a != b]
    if len(differing) != 1:
        found = f"differ in {' and '.join(differing)}" if differing else "are the same variant"
        raise RungsError(
            f"Step {label}{f' of ladder {ladder}' if ladder else ''} is not one step: its rungs {found};"
            " a step changes exactly one factor, so put a rung between them or drop the step."
        )
    return Step(ladder, label, source_rung or source.name, target_rung or target.name, source, target, differing[0])


def levels_of(experiment: Experiment, ladder: Ladder, rung: str) -> list[str]:
    """What a rung is: the titles of its levels, of the factors in which the ladder's rungs differ."""
    rungs = list(ladder.rungs.values())
    moved = [factor for factor in experiment.factors if len({variant.level(factor) for variant in rungs}) > 1]
    return [experiment.factors[factor].levels[ladder.rungs[rung].level(factor)].title for factor in moved]


FEW = 5
"""Levels that are still read in one line."""


def in_words(experiment: Experiment, ladder: Ladder, rung: str) -> str:
    """What a rung is: its levels; where the ladder has many factors, the rung that it comes from and what it has instead."""
    titles = levels_of(experiment, ladder, rung)
    if len(titles) <= FEW:
        return ", ".join(titles)
    for step in ladder.steps:
        if step.target == rung:
            level = experiment.factors[step.factor].levels[step.target_variant.level(step.factor)]
            return f"{step.source} with {level.title}"
    return ", ".join(titles)


def architectures() -> list[str]:
    names = [path.stem for path in (CONFIG / "devices").glob("*.yaml")]
    return sorted((name for name in names if re.fullmatch(r"sm_\d+a?", name)), key=lambda a: int(re.sub(r"\D", "", a)))


@functools.cache
def load_device(arch: str) -> Device:
    """The limits of an architecture. Raises RungsError for one that has no file."""
    if arch not in architectures():
        raise RungsError(f"There is no architecture {arch!r}: choose one of {', '.join(architectures())}.")
    return Device(**schemas.read_yaml(CONFIG / "devices" / f"{arch}.yaml", "device"))
