# Config, the machine, and the functions that the rules and targets ask for paths and params. No rule stands here.
import functools
import json
import os
import re
import sys
from pathlib import Path

PACKAGE = str(HOME / "workflow")
if PACKAGE not in sys.path:
    sys.path.insert(0, PACKAGE)

from rungs import build, folder, settings
from rungs.errors import RungsError
from rungs.files import ROOT, module_hash
from rungs.protocol import protocol_hash
from rungs.results import AGAIN, ResultsSet
from rungs.variants import GEMM, load_device, load_experiment

settings.export_package(PACKAGE)
notes = []
try:
    chosen = settings.over_defaults(config, workflow.config_settings.overwrite_config, AS_MODULE)
    run = settings.resolve(chosen, planning=workflow.is_main_process)
    if workflow.is_main_process and not AS_MODULE:
        entered, found = folder.enter(f"results/{run.results}", "logs")
        notes = [f"rungs: {found}"] if found else []
except RungsError as error:
    stop(error)

if workflow.is_main_process:
    for line in (*run.notes, *notes):
        print(line, file=sys.stderr)

# A process that is killed says nothing itself.
shell.prefix(
    "set -euo pipefail; trap 'case $? in 134|137|139) echo \"rungs: this job was killed (exit status $?; 137 may be the kernel,"
    " out of memory): nothing of it is kept, and the same command does it again.\" >&2;; esac' EXIT; "
)
PYTHON = sys.executable
LIVE = f"results/{run.results}"
RECORDED = [f"recorded/{name}" for name in run.recorded]
APART = ("verb", "mutations")
EMULATOR = [f"emulator/{p.stem}" for p in sorted(Path(PACKAGE).glob("rungs/emulator/*.py")) if p.stem not in APART]
"""Modules that decide what is counted."""
WORKLOADS = [
    f"{folder}/{p.stem}"
    for folder in ("workloads", "answers")
    for p in sorted(Path(PACKAGE).glob(f"rungs/{folder}/*.py"))
]
"""Modules of the experiments that are no GEMM, and of what is said of them."""
WHOLE = run.chosen_ladders is None
"""Whether `all` has the factorials in it: not where ladders were chosen."""


def recorded_names():
    return [e for s in RECORDED for e in settings.recorded_experiments(s)]


def declared_factorials():
    """Of what is chosen and what is recorded: another experiment's file may be damaged and is then nobody's concern."""
    found = {name: load_experiment(name) for name in sorted({*run.experiments, *recorded_names()})}
    return {
        name: [factor.name for factor in experiment.factors.values() if len(factor.levels) > 1]
        for name, experiment in found.items()
        if experiment.factorial
    }


FACTORIALS = declared_factorials()
"""Experiment -> the factors that its factorial has effects of."""


def workload_of(experiment):
    """Modules that decide what a kernel that is no GEMM works on; other experiments' are nothing to it."""
    return [] if is_gemm(experiment) else ["workloads/__init__", f"workloads/{load_experiment(experiment).workload}"]


def is_gemm(experiment):
    return load_experiment(experiment).workload == GEMM


def either(names):
    """A wildcard's pattern; one that matches nothing where there are no names."""
    return "|".join(sorted(map(re.escape, names))) or "(?!)"


def declared_figures():
    """Of what is chosen and what is recorded and is no GEMM: experiment -> the figures that it has."""
    from rungs import workloads

    names = [name for name in sorted({*run.experiments, *recorded_names()}) if not is_gemm(name)]
    return {name: workloads.of(load_experiment(name)).FIGURES for name in names}


FIGURES = declared_figures()
SHAPED = either({name for name in (*run.experiments, *recorded_names()) if is_gemm(name)})
"""Pattern of the experiments whose points are shapes M, N, K."""
POINTED = either(FIGURES)
"""Pattern of the others."""


wildcard_constraints:
    live=either([run.results]),
    emulated=either([] if run.gpu else [run.results]),
    results_set=either([*([run.results] if run.gpu else []), *RECORDED]),
    arch=either([run.arch]),
    experiment=either({*run.experiments, *recorded_names()}),
    variant="|".join([*(experiment.name_regex() for experiment in run.experiments.values()), build.STAMP]),
    job="[123]",


def all_cores(wildcards):
    """A measuring job takes every core, so that nothing compiles beside it (a plain workflow.cores breaks --report)."""
    return workflow.cores or 1


def manifest_of(variant):
    return f"{LIVE}/build/{run.arch}/{variant}/{variant}.json"


def cubins(manifests):
    return [path.removesuffix(".json") + ".cubin" for path in manifests]


def binary(variant):
    """Manifest and cubin, as inputs of a rule."""
    return [manifest_of(variant), *cubins([manifest_of(variant)])]


BINARY = binary("{variant}")


def variant_of(wildcards):
    return variant_named(wildcards.experiment, wildcards.variant)


@functools.cache
def variant_named(experiment, name):
    """Several params of several jobs ask for each variant, of which there may be thousands."""
    return run.experiments[experiment].variant(name)


@functools.cache
def owner_of(name):
    """The experiment and the variant of a name."""
    return build.find_variant(name)


@functools.cache
def arms(experiment, variant):
    """The rung's build manifest first, then those of what is timed beside it."""
    return tuple(manifest_of(v.name) for v in [variant, *run.predecessors(experiment, variant)])


def arms_of(wildcards):
    return list(arms(wildcards.experiment, variant_of(wildcards)))


def floor_arms(wildcards):
    return list(arms(wildcards.experiment, run.experiments[wildcards.experiment].floor_variant))


def headers_of(wildcards):
    """The kernel and the headers that it includes: the inputs of a build."""
    kernel = "stamp.cu" if wildcards.variant == build.STAMP else owner_of(wildcards.variant)[0].kernel
    return headers(kernel)


@functools.cache
def headers(kernel):
    return [os.path.relpath(ROOT / name) for name in build.sources(kernel)]


def compiler():
    """What decides a binary's bytes besides its sources: installing a compiler builds what could not be built without."""
    try:
        return json.dumps(build.find_toolchain(run.toolchain).versions())
    except RungsError as error:
        return f"none: {error}"


def limits():
    """The device's limits: the launch's shared memory and the plausibility check come from them."""
    return json.dumps(vars(load_device(run.arch)), sort_keys=True)


def unit_of(wildcards):
    """All that decides a binary and its manifest besides sources, compiler and code; where the architecture lacks it, the reason."""
    name, arch = wildcards.variant, wildcards.arch
    try:
        device = load_device(arch)
        unit = build.unit_of(name, arch) if name == build.STAMP else build.unit(*owner_of(name), device)
        return json.dumps([arch, build.made_of(unit, device)])
    except RungsError as error:
        return f"{name}, {arch}: {error}"


def evidence(factorial=False):
    return [f"{LIVE}/csv/inspect/{run.arch}/{name}.csv" for name in run.variant_names(factorial)]


def sweeps(factorial=False):
    """Every timing CSV of this run; without a GPU the emulator's, which hold counts."""
    if not run.gpu:
        return [f"{LIVE}/csv/emulate/{e}/{v.name}.csv" for e in run.experiments for v in run.variants(e, factorial)]
    rungs = [f"{LIVE}/csv/sweep/{e}/{v.name}.csv" for e in run.experiments for v in run.variants(e, factorial)]
    return rungs + [path for e in run.experiments for path in floor_csvs(e)]


def floor_csvs(experiment):
    """Of the three jobs that measure one binary against itself; none where every rung's own job does."""
    return [] if run.twins else [f"{LIVE}/csv/floor/{experiment}/{job}.csv" for job in (1, 2, 3)]


def profiles(factorial=False):
    """Every CSV of counters; without a GPU they are those of `sweeps`."""
    if not (run.gpu and run.profiling):
        return []
    return [f"{LIVE}/csv/profile/{e}/{v.name}.csv" for e in run.experiments for v in run.variants(e, factorial)]


def rendered_sets():
    """(set, experiment, ladders) of all that is drawn and tabulated: this run's and the recorded ones."""
    live = [(run.results, e, run.ladders(e)) for e in run.experiments] if run.gpu else []
    return live + [(s, e, ladders) for s in RECORDED for e, ladders in settings.recorded_ladders(s).items()]


def rendered_factorials(live=WHOLE):
    """(set, experiment) of each factorial that is drawn and tabulated."""
    own = [(run.results, e) for e in run.factorials] if run.gpu and live else []
    return own + [(s, e) for s in RECORDED for e in settings.recorded_factorials(s)]


def effects(live=WHOLE):
    return [f"results/{s}/data/{e}/{kind}.csv" for s, e in rendered_factorials(live) for kind in FACTORIAL_DATA]


def coverages():
    """What this run measured and what came of it."""
    factorials = [f"{LIVE}/data/{e}/factorial_coverage.csv" for e in run.factorials] if WHOLE else []
    return [f"{LIVE}/data/{e}/coverage.csv" for e in run.experiments] + factorials


def figures(*kinds):
    """Of every ladder that is drawn; without a GPU the heat maps of this run are those of the emulator's counts."""
    counts = [
        f"{LIVE}/figures/{e}/counts_{ladder}.{ending}"
        for e in run.experiments
        for ladder in run.ladders(e)
        for ending in ("svg", "png")
        if not run.gpu and is_gemm(e) and "heatmap" in (kinds or ("heatmap",))
    ]
    own = [
        f"results/{s}/figures/{e}/{name}.{ending}"
        for s, e, _ in rendered_sets()
        for name in FIGURES.get(e, ())
        for ending in ("svg", "png")
        if not kinds
    ]
    return (
        counts
        + own
        + [
            f"results/{s}/figures/{e}/{kind}_{ladder}.{ending}"
            for s, e, ladders in rendered_sets()
            for ladder in ladders
            for kind in kinds or ("heatmap", "ladder", "waterfall", "roofline")
            for ending in ("svg", "png")
            if is_gemm(e)
        ]
        + [
            f"results/{s}/figures/{e}/clock_power.{ending}"
            for s, e, _ in rendered_sets()
            for ending in ("svg", "png")
            if not kinds and clock_job(s, e)
        ]
    )


def is_timed(experiment):
    """Whether its jobs read the clock: not where the kernel counts cycles."""
    from rungs import workloads

    return is_gemm(experiment) or workloads.of(load_experiment(experiment)).MEASURES != "cycles"


def clock_job(results_set, experiment):
    """CSV and manifest of the job whose clock and power are drawn, where the set has it."""
    csv = f"results/{results_set}/csv/floor/{experiment}/1.csv"
    if not is_timed(experiment):
        return []
    if results_set == run.results:
        return [csv, csv.removesuffix(".csv") + ".json"] if csv in floor_csvs(experiment) else []
    return recorded_files(results_set, "floor", experiment)


def clock_job_of(wildcards):
    return clock_job(wildcards.results_set, wildcards.experiment)


def ceilings_of(wildcards):
    """The points that a roofline takes memory's ceiling from: of this set, and of a cold one also its hot set's."""
    known = {(s, e) for s, e, _ in rendered_sets()}
    sets = dict.fromkeys([wildcards.results_set, wildcards.results_set.removesuffix("-cold")])
    return [f"results/{s}/data/{e}/points.csv" for s in sets for e in ("tma_wall", "copy_intensity") if (s, e) in known]


def factorial_figures(live=WHOLE):
    return [
        f"results/{s}/figures/{e}/{name}.{ending}"
        for s, e in rendered_factorials(live)
        for name in (*(f"effect_{factor}" for factor in FACTORIALS[e]), *(f"shapley_{picture}" for picture in SHAPLEY))
        for ending in ("svg", "png")
    ]


def factorial_tables(live=WHOLE):
    counts = [] if run.gpu or not live else [(run.results, e) for e in run.factorials]
    return [f"results/{s}/md/{e}_factorial.md" for s, e in counts + rendered_factorials(live)]


def tables():
    counts = [] if run.gpu else [(run.results, e) for e in run.experiments]
    shown = counts + [(s, e) for s, e, _ in rendered_sets()]
    pages = [f"results/{s}/md/{e}.md" for s, e in shown] + [f"results/{s}/README.md" for s in dict(shown)]
    pages += [f"results/{s}/md/{e}_counters.md" for s, e in shown if os.path.exists(emulated_csv(s, e))]
    pages += [f"results/{s}/md/{e}_sanitizer.md" for s, e in shown if s in RECORDED and recorded_sanitized(s, e)]
    return pages + [f"results/{s}/md/mutations.md" for s in dict(shown) if os.path.exists(mutations_csv(s))]


def claims():
    """What each set that is rendered says of the seeds; the quick look is too short for it."""
    own = [] if run.gpu or run.twins else [run.results]
    sets = own + [s for s in dict.fromkeys(s for s, _, _ in rendered_sets()) if not (run.twins and s == run.results)]
    return [f"results/{s}/{path}" for s in sets for path in CLAIMS]


CLAIMS = ("data/verdicts/claims.csv", "figures/claims.svg", "figures/claims.png", "md/claims.md")


def claims_data(wildcards):
    """Everything that a set's claims are judged from."""
    s = wildcards.results_set
    if s == run.results and not run.gpu:
        return [*count_data_of_set(), *evidence(WHOLE)]
    data = [path for e in experiments_in(wildcards) for path in data_in(s, e)]
    data += [f"results/{s}/data/{e}/{kind}.csv" for e in factorials_in(wildcards) for kind in FACTORIAL_DATA]
    if s == run.results:
        return data + evidence(WHOLE)
    return data + [path for e in experiments_in(wildcards) for path in recorded_files(s, "inspect", e)]


def claims_experiments(wildcards):
    live = wildcards.results_set == run.results
    return list(run.experiments) if live else experiments_in(wildcards)


def sanitized(experiment):
    """Compute Sanitizer's CSVs of every rung of the chosen ladders."""
    return [f"{LIVE}/csv/sanitize/{experiment}/{v.name}.csv" for v in run.variants(experiment)]


def sanitized_here(wildcards):
    """All that the target `sanitized` makes. Without a GPU there is nothing that it could do."""
    if not run.gpu:
        stop("Compute Sanitizer needs a GPU: the emulator looks for the same mistakes in `snakemake all`.")
    csvs = [path for e in run.experiments for path in sanitized(e)]
    return [*csvs, *(f"{LIVE}/md/{e}_sanitizer.md" for e in run.experiments), f"{LIVE}/data/verdict_sanitize.json"]


def recorded_files(results_set, kind, experiment):
    """The table and the manifests of a kind in a recorded set, where it has them."""
    found = ResultsSet(Path("results") / results_set)
    return [path.as_posix() for path in found.files(kind, experiment)]


def recorded_sanitized(results_set, experiment):
    """Compute Sanitizer's table and manifests of a recorded set."""
    return recorded_files(results_set, "sanitize", experiment)


def sanitized_of(wildcards):
    if wildcards.results_set != run.results:
        return recorded_sanitized(wildcards.results_set, wildcards.experiment)
    csvs = sanitized(wildcards.experiment)
    return csvs + [path.removesuffix(".csv") + ".json" for path in csvs]


def mutations_csv(results_set):
    """What `python -m rungs sanitize-mutations` writes."""
    return f"results/{results_set}/data/mutations/mutations.csv"


def emulated_csv(results_set, experiment):
    """What `python -m rungs emulate-recorded` writes: the emulator's counts of a recorded set's binaries."""
    return f"results/{results_set}/data/{experiment}/emulated.csv"


def profiled(wildcards):
    """The profiles of a recorded set."""
    return recorded_files(wildcards.results_set, "profile", wildcards.experiment)


COUNTED = {"ladders": ("counts", "coverage"), "factorial": ("factorial_counts", "factorial_coverage")}
"""Part of an experiment -> what the emulator's CSVs are summed to."""


def emulated_files(experiment, factorial=False):
    """The emulator's CSVs and manifests."""
    names = [v.name for v in run.variants(experiment, factorial)]
    return [f"{LIVE}/csv/emulate/{experiment}/{name}.{ending}" for name in names for ending in ("csv", "json")]


def count_data(results_set, experiment, part):
    return [f"results/{results_set}/data/{experiment}/{kind}.csv" for kind in COUNTED[part]]


def count_data_of_set():
    factorials = run.factorials if WHOLE else []
    ladders = [path for e in run.experiments for path in count_data(run.results, e, "ladders")]
    return ladders + [path for e in factorials for path in count_data(run.results, e, "factorial")]


def verdict():
    return [f"{LIVE}/data/verdict.json"]


def measured(wildcards):
    """Every CSV and manifest that the tables of a set's ladders are made from."""
    s, e = wildcards.results_set, wildcards.experiment
    if s != run.results:
        return settings.recorded_inputs(s, e)
    return measured_here(e, run.variants(e))


def measured_factorial(wildcards):
    """Every CSV and manifest that a factorial's tables are made from."""
    s, e = wildcards.results_set, wildcards.experiment
    if s != run.results:
        return settings.recorded_inputs(s, e)
    return measured_here(e, run.variants(e, factorial=True))


def measured_here(experiment, variants):
    csvs = [f"{LIVE}/csv/sweep/{experiment}/{v.name}.csv" for v in variants] + floor_csvs(experiment)
    csvs += [f"{LIVE}/csv/profile/{experiment}/{v.name}.csv" for v in variants] if run.profiling else []
    inspected = [f"{LIVE}/csv/inspect/{run.arch}/{v.name}.csv" for v in variants]
    return csvs + [path.removesuffix(".csv") + ".json" for path in csvs] + inspected


DATA = ("shapes", "steps", "changes", "floor", "counters", "coverage")
POINT_DATA = ("points", *DATA[1:])
FACTORIAL_DATA = ("corners", "effects", "interactions", "shapley", "factorial_coverage")
SHAPLEY = ("bars", "map")
"""Pictures of Shapley values."""


def data_in(results_set, experiment):
    kinds = DATA if is_gemm(experiment) else POINT_DATA
    return [f"results/{results_set}/data/{experiment}/{kind}.csv" for kind in kinds]


def data_of(wildcards):
    return data_in(wildcards.results_set, wildcards.experiment)


def experiments_in(wildcards):
    return [e for s, e, _ in rendered_sets() if s == wildcards.results_set]


def data_of_factorial(wildcards):
    """The floor is that of the experiment's ladders."""
    folder = f"results/{wildcards.results_set}/data/{wildcards.experiment}"
    return [f"{folder}/{kind}.csv" for kind in ("floor", *FACTORIAL_DATA)]


def data_of_set(wildcards):
    folder = f"results/{wildcards.results_set}/data"
    ladders = [path for e in experiments_in(wildcards) for path in data_in(wildcards.results_set, e)]
    emulated = [emulated_csv(wildcards.results_set, e) for e in experiments_in(wildcards)]
    ladders += filter(os.path.exists, [*emulated, mutations_csv(wildcards.results_set)])
    ladders += [path for path in claims() if path == f"{folder}/verdicts/claims.csv"]
    if wildcards.results_set != run.results:
        ladders += [path for e in experiments_in(wildcards) for path in recorded_sanitized(wildcards.results_set, e)]
    return ladders + [f"{folder}/{e}/{kind}.csv" for e in factorials_in(wildcards) for kind in FACTORIAL_DATA]


def factorials_in(wildcards):
    return [e for s, e in rendered_factorials() if s == wildcards.results_set]


def variants_in(wildcards):
    if wildcards.results_set != run.results:
        return settings.recorded_rungs(wildcards.results_set, wildcards.experiment)
    return [v.name for v in run.variants(wildcards.experiment)]


def arch_of(wildcards):
    return run.arch if wildcards.results_set == run.results else settings.recorded_arch(wildcards.results_set)


def shown_by(wildcards):
    """The experiment of a table or figure; all of the set's for the page that leads to them."""
    return [wildcards.experiment] if "experiment" in wildcards.keys() else experiments_in(wildcards)


def codes_behind(wildcards):
    """What was found of changed sources, where it makes a recording stale: the pages then show it, also in a clone, which has no
    record of params."""
    from rungs.staleness import CODES

    return [CODES.as_posix()] if stale_in(wildcards) not in ("", "{}") and CODES.is_file() else []


def stale_in(wildcards):
    """Which recordings the sources have left behind: it stands in every table, so it is a param of each.

    Not of the live set's: what is stale there when a run is planned is measured before its tables are made.
    """
    if wildcards.results_set == run.results:
        return ""
    return stale_as_json(wildcards.results_set, *shown_by(wildcards))


@functools.cache
def stale_as_json(results_set, *experiments):
    """Read once for all tables and figures of a set: it takes every manifest."""
    from rungs import staleness

    try:
        found = staleness.stale(Path("results") / results_set, list(experiments))
    except RungsError as error:
        stop(error)
    return json.dumps(found, sort_keys=True)


def published_figures(wildcards):
    """What others published, which a waterfall shows."""
    return sorted(os.path.relpath(path) for path in (ROOT / "config" / "published").glob("*.csv"))


def unlimit_rate():
    """Start local jobs as soon as they fit, without Snakemake's limit of 100 a second.

    With it, each job that ends leaves a timer behind that looks at every job that is ready once a second, until the end of
    the run: after a hundred jobs a core does nothing else, beside what is timed.
    """
    if workflow.local_exec and hasattr(workflow.scheduler, "job_rate_limiter"):
        workflow.scheduler.job_rate_limiter = None


def closing_line():
    """Where to look, after a run that did something, and whether the root README is current."""
    shown = [path for path in tables() if Path(path).name == "README.md"]
    lines = [f"rungs: tables and figures are in {' and '.join(shown)}." if shown else "rungs: done.", *split_ladders()]
    for path in filter(os.path.exists, verdict()):
        lines += [
            f"rungs: {note}" for note in [json.loads(Path(path).read_text(encoding="utf-8")).get("readme")] if note
        ]
    return "\n".join(lines)


def split_ladders():
    """Each ladder of this run that more than one GPU measured: a cluster gives a job any of its nodes."""
    if not run.gpu:
        return []
    from rungs import boards

    try:
        found = [boards.split_ladders(Path(LIVE), e, run.ladders(name)) for name, e in run.experiments.items()]
    except RungsError as error:  # a damaged manifest
        return [f"rungs: {error}"]
    return [f"rungs: {sentence}" for sentences in found for sentence in sentences]


def check_executor():
    """Before the first job: whether what measures will find its GPU where jobs are run."""
    if not workflow.is_main_process:
        return
    if workflow.local_exec and run.away:
        sentence = f"{run.gpu.slug} is asked for and this machine has no GPU, so add `--profile profiles/slurm`, or use `--config device=auto`"
    elif not workflow.local_exec and chosen["device"] == "auto":
        sentence = "on a cluster each node would take device auto for its own: say `--config device=h200 arch=sm_90a`, or what else its GPUs are, or `device=emulator`"
    else:
        return
    stop(f"{sentence}.")


def measure_forced():
    """What is asked for by force (-f, -F, -R) is measured again, also where its machine code is that of the result that is there."""
    asked, measuring = workflow.dag_settings, {"sweep", "floor", "profile", "sanitize", "emulate"}
    again = {name for name in asked.forcerun if name in measuring or str(name).endswith(".csv")}
    if asked.forceall or asked.forcetargets or again:
        os.environ[AGAIN] = "1"


def release_clocks():
    """A measuring job restores its own clocks; this covers one that was killed."""
    if not run.gpu or run.away:
        return ""
    from rungs import clock

    return "".join(f"{line}\n" for line in clock.release())
