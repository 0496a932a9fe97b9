"""What a run is: the config checked and resolved against the machine. The Snakefile asks nothing else."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rungs import clock, schemas
from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.results import INSPECT, ResultsSet, each_job, recorded_sets
from rungs.variants import (
    GEMM,
    Experiment,
    Variant,
    clash,
    experiment_names,
    load_device,
    load_experiment,
    parse_sweeps,
    readable_experiments,
)

DEFAULT_ARCH = "sm_90a"
EMULATOR = "emulator"
OWN_CONFIG = ROOT / "config" / "config.yaml"
AWAY = "found out on the GPU's machine"
MAPPINGS = {
    "measure": "rounds_min: 50",
    "clock": "mode: observe",
    "profile": "enabled: false",
    "sanitize": "tool: auto",
    "axes": "mn: [512], k: [256]",
}
"""Keys of the config that hold keys of their own, and how one is written."""
FLAT = "config: a value holds itself or hundreds of levels: write it out flat."
QUICK_WARMUP_S = 0.3
"""A quick look does not wait a second in every job; its results are not for recording."""


@dataclass(frozen=True)
class Run:
    """`results` names the set under results/ that this run writes; `gpu` is None where nothing can be timed.

    A GPU of another machine (see `elsewhere`) has no UUID: the job that measures finds it there.

    `twins`: every rung is timed against itself in its own job, and there are no floor jobs (the quick preset).
    """

    results: str
    gpu: clock.Gpu | None
    arch: str
    toolchain: str
    experiments: Mapping[str, Experiment]
    chosen_ladders: tuple[str, ...] | None
    recorded: tuple[str, ...]
    measure: Mapping[str, Any]
    clock_mode: str
    clock_mhz: str
    profiling: bool
    ncu: str
    sanitizer: str
    twins: bool
    notes: tuple[str, ...] = field(default=())

    @property
    def gpu_uuid(self) -> str:
        """What a measuring job finds its GPU by: of a GPU of another machine the slug."""
        return (self.gpu.uuid or self.gpu.slug) if self.gpu else ""

    @property
    def away(self) -> bool:
        """Whether only other machines have the GPU."""
        return self.gpu is not None and not self.gpu.uuid

    @property
    def time_limit_s(self) -> float:
        return float(self.measure["time_limit_s"])

    @property
    def cold(self) -> bool:
        """A set of its own, of ladders alone: neither profiles nor a factorial."""
        return self.measure["l2"] == "cold"

    def settings_as_json(self, experiment: str, variant: Variant) -> str:
        """The protocol's settings of a variant's job: those of `measure.factorial` where it is on no ladder."""
        on_ladder = bool(self.experiments[experiment].rung_names(variant))
        return json.dumps(protocol_settings(self.measure, factorial=not on_ladder), sort_keys=True)

    @functools.cached_property
    def profiling_permission(self) -> str:
        """What ncu may do here; granting it reruns the profiles that lacked it."""
        return AWAY if self.away else profiling_permission(self.ncu)

    @functools.cached_property
    def sanitizer_there(self) -> str:
        """Which compute-sanitizer would run; installing one reruns what lacked it."""
        from rungs import sanitize

        if self.away:
            return AWAY
        try:
            return sanitize.find_sanitizer(self.sanitizer)
        except RungsError as error:
            return str(error)

    def ladders(self, experiment: str) -> list[str]:
        known = self.experiments[experiment].ladders
        return [name for name in known if self.chosen_ladders is None or name in self.chosen_ladders]

    @property
    def factorials(self) -> list[str]:
        """The experiments whose every combination of levels can be asked for; none of a quick look's or a cold set's."""
        if self.twins or self.cold:
            return []
        return [name for name, experiment in self.experiments.items() if experiment.factorial]

    def variants(self, experiment: str, factorial: bool = False) -> list[Variant]:
        """Each variant on the chosen ladders once, or with `factorial` every estimable one where one is declared."""
        if factorial and experiment in self.factorials:
            return self._estimable[experiment]
        ladders = self.experiments[experiment].ladders
        rungs = itertools.chain.from_iterable(ladders[name].rungs.values() for name in self.ladders(experiment))
        return list(dict.fromkeys(rungs))

    @functools.cached_property
    def _estimable(self) -> dict[str, list[Variant]]:
        """Counted out once: there may be thousands."""
        return {name: self.experiments[name].estimable() for name in self.factorials}

    def variant_names(self, factorial: bool = False) -> list[str]:
        return [variant.name for e in self.experiments for variant in self.variants(e, factorial)]

    def predecessors(self, experiment: str, variant: Variant) -> list[Variant]:
        """What the variant's job times beside it: its predecessors on the chosen ladders that exist on this chip."""
        whole = self.experiments[experiment]
        found = whole.predecessors(variant, self.ladders(experiment))
        return [source for source in found if whole.on_chip(source, self.arch)]

    def shapes_as_json(self, experiment: str, variant: Variant) -> str:
        return json.dumps(self.experiments[experiment].shapes(variant))

    def profile_shapes_as_json(self, experiment: str, variant: Variant) -> str:
        return json.dumps(self.experiments[experiment].shapes_to_profile(variant))


def export_package(folder: str) -> None:
    """Let every job's `python -m rungs` find this very package, installed or not, and a job that may not name it this Python."""
    os.environ["RUNGS_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))


def over_defaults(config: Any, given: Mapping[str, Any], module: bool) -> dict[str, Any]:
    """The config, where it leaves keys out with those of the checkout's own config.yaml, nested ones one by one.

    `given` is what the command line says. `module`: the config is what another workflow hands over. Raises RungsError for
    one that is none.
    """
    path, schema = OWN_CONFIG, schemas.load_schema("config")
    try:
        if empty := _empty(given, schema):
            raise RungsError(f"config, key {empty}: {{}} changes nothing: give it a value, or leave it out.")
        defaults = schemas.load_yaml(path) if path.exists() else {}
        for where, found in (("config", config), (str(path), defaults)):
            if not isinstance(found, dict):
                raise RungsError(f"{where}: this is no mapping: write keys and values, as in config/config.yaml.")
        if module and (others := [key for key in config if key not in schema["properties"]]):
            raise RungsError(
                f'config: there is no key {others[0]!r}: give the module of rungs keys of its own, as `config: config["rungs"]`.'
            )
        return _merged(defaults, config)
    except RecursionError:
        raise RungsError(FLAT) from None


def _merged(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both mappings in one; what the second says stands."""
    both = {key: _merged(below[key], above[key]) for key in below if _mappings(below[key], above.get(key))}
    return {**below, **above, **both}


def _mappings(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _empty(given: Mapping[Any, Any], schema: Mapping[str, Any], place: str = "") -> str:
    """The key that has `{}` where no mapping belongs: Snakemake, which merges mappings, would pass over it. Else nothing."""
    for key, inner in schema.get("properties", {}).items():
        value = given.get(key)
        if isinstance(value, Mapping) and inner.get("type") == "object":
            if odd := _empty(value, inner, f"{place}{key}."):
                return odd
        elif value == {}:
            return f"{place}{key}"
    return ""


def _missing(config: Mapping[str, Any], schema: Mapping[str, Any], place: str = "") -> str:
    """The first key that the config must have and has not. Else nothing."""
    for key in schema.get("required", ()):
        if key not in config:
            return f"{place}{key}"
        if isinstance(config[key], Mapping) and (
            odd := _missing(config[key], schema["properties"][key], f"{place}{key}.")
        ):
            return odd
    return ""


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as its schema has it. Raises RungsError for a key that is missing, unknown or out of range."""
    wanted = _as_lists(config)
    if missing := _missing(wanted, schemas.load_schema("config")):
        raise RungsError(
            f"config, key {missing}: neither you nor {os.path.relpath(OWN_CONFIG)} says it: add it there, or restore that file."
        )
    schemas.validate(wanted, "config", "config")
    return wanted


def resolve(config: Mapping[str, Any], planning: bool = True) -> Run:
    """Check the config (as Snakemake merged it with `--config`) and find the GPU.

    `planning` is False in a job of a run, which another machine may have planned.

    Raises RungsError, naming the key or the device, the rule and the fix.
    """
    wanted = checked(config)
    for name in wanted["experiments"]:
        if name not in experiment_names():
            raise RungsError(
                f"config, key experiments: there is no experiment {name!r}; choose of {', '.join(experiment_names())}."
            )
    notes = check_experiments(wanted["experiments"])
    measure = check_measure(wanted["measure"])
    for folder in (ROOT, Path.cwd()):
        if odd := next((sign for sign in '"$`{}\n' if sign in str(folder)), None):
            raise RungsError(
                f"{folder} has a {odd!r} in its path, which shells and compilers take for code: move it elsewhere."
            )
    gpu = elsewhere(wanted["device"], wanted["arch"], planning) or clock.choose(wanted["device"])
    quick, cold = wanted["preset"] == "quick", measure["l2"] == "cold"
    experiments = {name: load_experiment(name) for name in wanted["experiments"]}
    if quick:
        measure = {**measure, "warmup_s": min(measure["warmup_s"], QUICK_WARMUP_S)}
        experiments = {
            n: replace(e, axes={a: tuple(v) for a, v in e.quick["axes"].items()})
            if e.workload == GEMM
            else replace(e, sweeps=parse_sweeps(e.quick["sweeps"]))
            for n, e in experiments.items()
        }
    if wanted.get("axes"):
        axes = {axis: tuple(values) for axis, values in wanted["axes"].items()}
        if other := [name for name, e in experiments.items() if e.workload != GEMM]:
            notes.append(
                f"rungs: config, key axes: M, N and K are no axes of {', '.join(other)}, which keep their points."
            )
        experiments = {
            n: replace(e, axes={**e.axes, **axes}) if e.workload == GEMM else e for n, e in experiments.items()
        }
    ladders = None if wanted["ladders"] == "all" else tuple(wanted["ladders"])
    if quick and ladders is None:
        ladders = tuple(itertools.chain.from_iterable(e.quick["ladders"] for e in experiments.values()))
    known = {ladder for e in experiments.values() for ladder in e.ladders}
    for ladder in ladders or ():
        if ladder not in known:
            raise RungsError(
                f"config, key ladders: there is no ladder {ladder!r}; choose of {', '.join(sorted(known))}, or all."
            )
    arch = wanted["arch"]
    if gpu and arch not in ("auto", arch_of(gpu)):
        raise RungsError(
            f"config, key arch: {arch} does not run on {gpu}, which is {gpu.arch}: use auto, or `device=emulator`."
        )
    if arch == "auto":
        arch = arch_of(gpu) if gpu else DEFAULT_ARCH
    for name, experiment in list(experiments.items()):
        if experiment.architectures and arch not in experiment.architectures:
            notes.append(
                f"rungs: {name} needs one of {', '.join(experiment.architectures)}, so on {arch} it is left out."
            )
            del experiments[name]
        elif cold and experiment.workload != GEMM:
            notes.append(f"rungs: {name} chooses by its payload what caches hold, so a cold set leaves it out.")
            del experiments[name]
        elif ladders is not None and not set(experiment.ladders) & set(ladders):
            del experiments[name]
    if not experiments:
        policy = ", may be measured with cold caches" if cold else ""
        raise RungsError(
            f"config: nothing is left to do on {arch}: of {' and '.join(wanted['experiments'])}, none is for this architecture"
            f"{policy} and has a chosen ladder, so choose other experiments or ladders"
            f"{', or measure.l2 hot' if cold else ''}."
        )
    recorded = tuple(name for name in wanted["recorded"] if (Path("results/recorded") / name).is_dir())
    for name in recorded:  # before anything is planned: what is wrong with a set is one sentence
        for measured in recorded_experiments(f"recorded/{name}"):
            load_experiment(measured)
        recorded_arch(f"recorded/{name}")
    if gpu and not gpu.uuid:
        notes.append(
            f"rungs: There is no {gpu.slug} here: a job that measures finds its GPU on the machine that runs the job."
        )
    if not gpu:
        what = "No GPU is used" if wanted["device"] == EMULATOR else "There is no GPU here"
        notes.append(
            f"rungs: {what}, and times need one: counting in the emulator for {arch}, and rendering the recorded results"
            f"{f' ({chr(44).join(recorded)})' if recorded else ''}."
        )
    for name in wanted["recorded"]:
        if name not in recorded:
            notes.append(f"rungs: results/recorded/{name} is not here, so it is not rendered.")
    return Run(
        results=f"{gpu.slug if gpu else EMULATOR}{'-quick' if quick else ''}{'-cold' if cold else ''}",
        gpu=gpu,
        arch=arch,
        toolchain=wanted["toolchain"],
        experiments=experiments,
        chosen_ladders=ladders,
        recorded=recorded,
        measure=measure,
        clock_mode=wanted["clock"]["mode"],
        clock_mhz=str(wanted["clock"]["mhz"]),
        profiling=wanted["profile"]["enabled"] and not quick and not cold,
        ncu=wanted["profile"]["ncu"],
        sanitizer=wanted["sanitize"]["tool"],
        twins=quick,
        notes=tuple(notes),
    )


def elsewhere(device: str, arch: str, planning: bool = True) -> clock.Gpu | None:
    """The GPU of a cluster's nodes, where `device` is a slug, `arch` says what to build for and no GPU is here.

    In a job of such a run it is left open too, so that whatever machine builds or draws plans alike. None for any other.
    """
    if device in ("auto", EMULATOR) or arch == "auto" or device.isdigit() or device != clock.slug(device):
        return None
    if planning and clock.gpus():
        return None
    capability = next((f"{a}.{b}" for (a, b), name in clock.ARCHITECTURES.items() if name == arch), "")
    return clock.Gpu(-1, device, device, "", capability, arch, "", 0, None)


def check_experiments(chosen: Sequence[str]) -> list[str]:
    """A note for each other experiment whose file is damaged.

    Raises RungsError for a damaged one that is chosen, and where two experiments can give one variant name.
    """
    experiments, damaged = readable_experiments()
    if odd := next((name for name in chosen if name in damaged), None):
        raise damaged[odd]
    if problem := clash(experiments):
        raise RungsError(problem)
    for experiment in experiments:
        if experiment.name in chosen and experiment.workload != GEMM:
            _check_workload(experiment)
    return [
        f"rungs: experiment {name} is not used here, and its file cannot be read: {error}"
        for name, error in damaged.items()
    ]


def _check_workload(experiment: Experiment) -> None:
    """Raises RungsError where the workload's module can do nothing with the experiment, or has figures that nobody draws."""
    from rungs import answers, workloads

    device = load_device(experiment.architectures[0] if experiment.architectures else DEFAULT_ARCH)
    workloads.rehearse(experiment, device)
    figures = workloads.of(experiment).FIGURES
    if figures and not answers.there(experiment):
        raise RungsError(
            f"workflow/rungs/workloads/{experiment.workload}.py: FIGURES names {figures[0]}, and workflow/rungs/answers/ has no"
            f" {experiment.workload}.py that draws it: write that module, or FIGURES = ()."
        )


def check_measure(measure: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's `measure`, whose keys also fit each other. Raises RungsError where they do not."""
    for key, rounds in (("measure", measure), ("measure.factorial", measure["factorial"])):
        if rounds["rounds_max"] < rounds["rounds_min"]:
            raise RungsError(
                f"config, key {key}: rounds_max {rounds['rounds_max']} is below rounds_min {rounds['rounds_min']}: raise it."
            )
    return measure


def protocol_settings(measure: Mapping[str, Any], factorial: bool = False) -> dict[str, Any]:
    """The config's `measure` as the arguments of `protocol.Settings`; `factorial` for a variant that is on no ladder."""
    own = measure["factorial"] if factorial else {}
    return {key: value for key, value in measure.items() if key not in ("factorial", "time_limit_s")} | dict(own)


def arch_of(gpu: clock.Gpu) -> str:
    """The architecture to build for. Raises RungsError for a GPU that rungs does not know."""
    if gpu.arch is None:
        raise RungsError(
            f"{gpu} has compute capability {gpu.capability}, which no file under config/devices/ describes."
        )
    return gpu.arch


def _as_lists(config: Mapping[str, Any]) -> dict[str, Any]:
    """`--config ladders=B` gives a string and `device=0` a number where the schema has a list and a string.

    Numbers inside lists and mappings arrive as strings.
    """
    try:
        return _lists(copy.deepcopy(dict(config)))
    except RecursionError:
        raise RungsError(FLAT) from None


def _lists(wanted: dict[str, Any]) -> dict[str, Any]:
    for key, example in MAPPINGS.items():
        if not isinstance(wanted.get(key, {}), dict):
            raise RungsError(
                f"config, key {key}: this is no mapping: write `{key}={{{example}}}`, in quotes in a shell."
            )
        if key in wanted:
            wanted[key] = _as_numbers(wanted[key])
    if "axes" in wanted:
        wanted["axes"] = {k: [v] if isinstance(v, int | float) else v for k, v in wanted["axes"].items()}
    for key in ("experiments", "ladders", "recorded"):
        if not isinstance(wanted.get(key, ""), list | str):
            raise RungsError(f"config, key {key}: this is no list of names: write `{key}=[name,name]`.")
        if isinstance(wanted.get(key), str) and "," in wanted[key]:
            raise RungsError(
                f"config, key {key}: {wanted[key]!r} is one word: write `{key}=[{wanted[key]}]` for several."
            )
        if isinstance(wanted.get(key), str) and wanted[key] != "all":
            wanted[key] = [wanted[key]]
    if odd := next((key for key in schemas.load_schema("config")["properties"] if wanted.get(key, "") is None), None):
        raise RungsError(f"config, key {odd}: it has no value: give it one, or leave it out.")
    if isinstance(wanted.get("device"), int) and abs(wanted["device"]) < 10**18:
        wanted["device"] = str(wanted["device"])
    return wanted


def _as_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_numbers(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,18}", value):
        return int(value)
    return float(value) if re.fullmatch(r"[+-]?\d*\.\d+", value) else value


def profiling_permission(ncu: str) -> str:
    """Which ncu would run and whether the driver lets this user read counters, as one string for a rule's params."""
    from rungs import profile

    try:
        found = profile.find_ncu(ncu)
    except RungsError as error:
        return str(error)
    try:
        admin_only = "RmProfilingAdminOnly: 1" in Path("/proc/driver/nvidia/params").read_text(encoding="utf-8")
    except OSError:
        admin_only = False
    return f"{found}, {'only for administrators' if admin_only and os.geteuid() else 'permitted'}"


# ---- recorded sets: what lies in a folder decides --------------------------------------------------------------------


def recordings() -> Iterator[tuple[Path, str]]:
    """Yield every recorded set with each of its experiments."""
    for results in recorded_sets():
        for experiment in recorded_experiments(results.relative_to("results").as_posix()):
            yield results, experiment


def _set(results_set: str) -> ResultsSet:
    return ResultsSet(Path("results") / results_set)


def recorded_experiments(results_set: str) -> list[str]:
    return [name for name in _set(results_set).experiments("sweep") if name in experiment_names()]


def recorded_variants(results_set: str, experiment: str) -> list[str]:
    """Return the variants with a sweep in the set."""
    return _set(results_set).jobs("sweep", experiment)


def recorded_rungs(results_set: str, experiment: str) -> list[str]:
    """Return those of them that the ladders' tables show: all but the variants that only a factorial measures."""
    declared = load_experiment(experiment)
    alone = {variant.name for variant in declared.off_ladder()} if declared.factorial else set()
    return [name for name in recorded_variants(results_set, experiment) if name not in alone]


def recorded_factorials(results_set: str) -> list[str]:
    """Return the experiments of which the set holds more than ladders: variants that only a factorial measures."""
    experiments = recorded_experiments(results_set)
    return [e for e in experiments if len(recorded_rungs(results_set, e)) < len(recorded_variants(results_set, e))]


def recorded_ladders(results_set: str) -> dict[str, list[str]]:
    """Return experiment -> the ladders of which every rung has a sweep in the set."""
    found = {}
    for experiment in recorded_experiments(results_set):
        there = set(recorded_variants(results_set, experiment))
        ladders = load_experiment(experiment).ladders.items()
        found[experiment] = [name for name, ladder in ladders if {v.name for v in ladder.rungs.values()} <= there]
    return found


def recorded_inputs(results_set: str, experiment: str) -> list[str]:
    """Return every file of the set that the experiment's tables are made from."""
    found = _set(results_set)
    return [
        path.as_posix() for kind in ("sweep", "profile", INSPECT, "floor") for path in found.files(kind, experiment)
    ]


@functools.cache
def recorded_arch(results_set: str) -> str:
    """Return the architecture that the set was measured on. Raises RungsError where its manifests do not say one."""
    found, where = {}, _set(results_set)
    for kind, experiment, job in each_job(where, ["sweep"]):
        found[where.manifest(kind, experiment, job)["arch"]] = experiment
    if len(found) != 1:
        raise RungsError(
            f"results/{results_set} has sweeps of {len(found)} architectures where a set has one: record it anew."
        )
    return next(iter(found))
