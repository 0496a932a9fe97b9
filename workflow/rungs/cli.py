"""`python -m rungs <verb>`: a thin adapter from arguments to functions. Modules are imported by the verb that needs them."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rungs.errors import RungsError, shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit status. What a user did wrong is one sentence on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without ± or with a path of other bytes
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except RungsError as error:
        print(f"rungs: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except (OSError, UnicodeDecodeError) as error:
        print(
            f"rungs: {' '.join(str(error).split())}: check that the file is there, readable and text.", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("rungs: interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rungs", description="What each GPU data-movement optimisation buys, one factor at a time."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    p = verb("build", _build, "compile one variant into a cubin with its manifest")
    p.add_argument("--variant", required=True, help="a variant's name, a rung (B3) or `stamp`")
    p.add_argument("--arch", required=True)
    p.add_argument("--toolchain", choices=("pip", "system"), default="pip")
    p.add_argument("--output", type=Path, required=True, help="the manifest; .ptx and .cubin lie beside it")
    p.add_argument(
        "--failure-is-data", action="store_true", help="exit 0 when the variant does not build: the manifest says why"
    )

    p = verb("inspect", _inspect, "disassemble a binary and check its evidence")
    p.add_argument("--manifest", type=Path, required=True)
    p.add_argument("--toolchain", choices=("pip", "system"), default="pip")
    p.add_argument("--output", type=Path, required=True)

    p = verb("clock", _clock, "decide the clock mode, or release a lock that a killed run left behind")
    p.add_argument("action", choices=("decide", "release"))
    p.add_argument("--gpu", help="UUID")
    p.add_argument("--mode", choices=("auto", "lock", "observe"), default="auto")
    p.add_argument("--mhz", default="auto")
    p.add_argument("--output", type=Path)

    p = verb(
        "sweep", _sweep, "check and time one rung over its shapes, interleaved with its predecessors and the control"
    )
    _measuring(p)
    p.add_argument("--manifests", type=Path, nargs="+", required=True, help="build manifests: the rung's first")
    p.add_argument("--stamp", type=Path, required=True, help="build manifest of the stamp kernel")
    p.add_argument("--settings", type=json.loads, required=True, help="the protocol's settings, as JSON")
    p.add_argument("--twin", action="store_true", help="time the rung's binary against itself too (A/A)")

    p = verb("profile", _profile, "read a rung's counters with Nsight Compute")
    _measuring(p)
    p.add_argument("--manifest", type=Path, required=True)
    p.add_argument("--ncu", default="auto")
    p.add_argument("--l2", choices=("hot", "cold"), default="hot")

    p = verb("sanitize", _sanitize, "run a rung under Compute Sanitizer's four tools at one small shape")
    p.add_argument("--experiment", required=True)
    p.add_argument("--variant", required=True)
    p.add_argument("--arch", required=True)
    p.add_argument("--gpu", required=True, help="UUID")
    p.add_argument("--manifest", type=Path, required=True)
    p.add_argument("--tool", default="auto", help="auto or the path of compute-sanitizer")
    p.add_argument("--time-limit", type=float, default=300.0)
    p.add_argument("--output", type=Path, required=True)

    p = verb(
        "sanitize-mutations", _sanitize_mutations, "hold the emulator and Compute Sanitizer against mutated kernels"
    )
    p.add_argument("--output", type=_folder, required=True, help="folder of the binaries and of mutations.csv")
    p.add_argument("--build-only", action="store_true", help="build and emulate: no GPU is used")
    p.add_argument("--gpu", default="auto", help="auto, a GPU's slug, index or UUID")
    p.add_argument("--arch", default="sm_90a")
    p.add_argument("--toolchain", choices=("pip", "system"), default="pip")
    p.add_argument("--tool", default="auto", help="auto or the path of compute-sanitizer")
    p.add_argument("--jobs", type=int, default=8, help="runs at a time: most of one is the start of processes")
    p.add_argument("--time-limit", type=float, default=20.0, help="seconds of a run: a mutant may never end")
    p.add_argument("--places", type=int, default=0, help="most places of a mutation in one kernel; 0 for all")

    p = verb("sanitizer-tables", _sanitizer_tables, "Markdown of what Compute Sanitizer found")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", help="write its table")
    p.add_argument("--mutations", action="store_true", help="write that of the mutated kernels")

    p = verb("launch", _launch, "launch a variant on random inputs, for a tool that watches the process")
    p.add_argument("--experiment", required=True)
    p.add_argument("--arch", required=True)
    p.add_argument("--gpu", required=True, help="UUID")
    p.add_argument("--manifest", type=Path, required=True)
    p.add_argument("--shape", type=_point, required=True, metavar="M,N,K", help="or a value for each axis")
    p.add_argument("--launches", type=int, default=3)
    p.add_argument(
        "--instrumented", action="store_true", help="a tool changes the kernel: do not look at its occupancy"
    )
    p.add_argument("--check", action="store_true", help="hold each result on integers against numpy's; exit 1 if wrong")
    p.add_argument("--sms", type=int, help="SMs to pretend, for a kernel with a CTA for each")
    p.add_argument(
        "--cubin", type=Path, help="launch this binary in place of the manifest's, a mutated one for example"
    )

    p = verb("measure-job", _measure_job, "the process that `sweep` starts, on a job file")
    p.add_argument("job", type=Path)

    p = verb("aggregate", _aggregate, "medians, steps, changes, counters and coverage of a results set")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", required=True)
    p.add_argument("--arch", required=True)
    p.add_argument("--variants", nargs="+", required=True)

    p = verb("effects", _effects, "what each level of a factor buys over every combination of the others")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", required=True)
    p.add_argument("--arch", required=True)

    p = verb("plot", _plot, "draw figures of a results set")
    p.add_argument(
        "kinds",
        nargs="+",
        choices=("heatmap", "ladder", "waterfall", "roofline", "effect", "shapley", "counts", "points", "clock"),
    )
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", required=True)
    p.add_argument(
        "--of",
        nargs="*",
        default=[],
        metavar="NAME",
        help="ladders, factors for `effect`, `bars` and `map` for `shapley`, figures for `points`",
    )

    p = verb("tables", _tables, "Markdown tables of a results set")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", help="write its tables")
    p.add_argument(
        "--factorial", nargs="*", default=[], metavar="EXPERIMENT", help="with --index: factorials that it shows"
    )
    p.add_argument("--index", nargs="+", metavar="EXPERIMENT", help="write the page that leads to the tables of these")

    p = verb("claims", _claims, "hold the sentences of config/claims.yaml against a results set")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument(
        "--judge", nargs="*", metavar="EXPERIMENT", help="write data/verdicts/claims.csv from the data of these"
    )
    p.add_argument("--arch", help="with --judge: the set's architecture")
    p.add_argument("--show", action="store_true", help="write its page and its figure")

    p = verb("factorial", _factorial, "Markdown tables of an experiment's factorial")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", required=True)

    p = verb("verdict", _verdict, "fail when any variant failed, naming each")
    p.add_argument("inputs", type=Path, nargs="+", help="coverage, inspect or sanitize CSVs")
    p.add_argument("--output", type=Path, required=True)

    p = verb("step", _step, "measure one step now and print its verdict")
    p.add_argument("source", help="a rung (B2) or a variant")
    p.add_argument("target")
    p.add_argument("--experiment", help="whose they are, where their names do not say")
    p.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="M,N,K",
        help="may be given several times; default 4096,4096,4096",
    )
    p.add_argument("--device", default="auto", help="a GPU's slug, index or UUID")
    p.add_argument("--toolchain", choices=("pip", "system"), default="pip")

    p = verb("emulate", _emulate, "run a variant without a GPU: right or wrong, counts, bank conflicts and races")
    p.add_argument("--variant", required=True, help="a variant's name or a rung (B3)")
    p.add_argument("--experiment", help="whose variant it is, where a rung's name does not say")
    for size, default in (
        ("m", "512"),
        ("n", "512"),
        ("k", "1024, and more where CTAs share it, so that each goes round its ring"),
    ):
        p.add_argument(f"--{size}", type=int, help=f"of a GEMM; default {default}")
    p.add_argument(
        "--at",
        type=_values,
        metavar="AXIS=VALUE,...",
        help="of an experiment that is no GEMM; the other axes as in the first point that its variants are checked at",
    )
    p.add_argument("--arch", default="sm_90a")
    p.add_argument("--ptx", type=Path, help="a PTX file of the variant; built where none is given")
    p.add_argument("--schedule", choices=("cta", "ascending", "descending", "random"), default="cta")
    p.add_argument("--delivery", choices=("early", "late"), default="late", help="when asynchronous copies land")
    p.add_argument("--fill", choices=("integer", "normal"), default="integer")
    p.add_argument(
        "--race",
        action="store_true",
        help="look for races in shared memory, and in global memory where CTAs wait for each other there",
    )
    p.add_argument("--toolchain", choices=("pip", "system"), default="pip")

    p = verb("emulate-rung", _emulate_rung, "check one variant in the emulator and count it at every shape")
    p.add_argument("--experiment", required=True)
    p.add_argument("--variant", required=True)
    p.add_argument("--arch", required=True)
    p.add_argument("--manifest", type=Path, required=True, help="the build manifest; the .ptx lies beside it")
    p.add_argument("--shapes", type=json.loads, required=True, help="JSON list of [M, N, K]")
    p.add_argument("--output", type=Path, required=True)

    p = verb("counts", _counts, "counts by kind and coverage of emulated variants")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", required=True)
    p.add_argument("--part", choices=("ladders", "factorial"), default="ladders")
    p.add_argument("--variants", nargs="+", required=True)

    p = verb("count-tables", _count_tables, "Markdown tables of emulated variants")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", help="write its tables")
    p.add_argument("--part", choices=("ladders", "factorial"), default="ladders")
    p.add_argument("--ladders", nargs="*", default=[])
    p.add_argument("--index", type=json.loads, help="write the set's page: JSON of experiment -> ladders")
    p.add_argument("--factorials", nargs="*", default=[], metavar="EXPERIMENT", help="with --index")
    p.add_argument("--recorded", nargs="*", default=[], metavar="SET", help="with --index: recorded sets to link to")

    p = verb(
        "emulate-recorded", _emulate_recorded, "count a recorded set's profiled launches in the emulator, beside ncu"
    )
    p.add_argument("results", type=Path, help="a set, for example results/recorded/h200")
    p.add_argument("--toolchain", choices=("pip", "system"), default="pip")

    p = verb("counter-tables", _counter_tables, "Markdown tables of ncu's counters beside the emulator's")
    p.add_argument("--results", type=Path, required=True)
    p.add_argument("--experiment", required=True)

    p = verb("advise", _advise, "which way of copying to use on the GPU at hand, with the figures behind each line")
    p.add_argument(
        "results", type=Path, nargs="?", help="a results set; by default this machine's, else the first recorded one"
    )

    p = verb("export", _export, "write a wgmma variant as one .cu with its launcher, a header and an example")
    p.add_argument("--variant", help="a variant's name or a rung (H10)")
    p.add_argument("--shape", type=_shape, metavar="MxNxK", help="instead: the variant that `choose` takes for it")
    p.add_argument("--to", type=_folder, required=True, metavar="DIR", help="folder of the three files")

    p = verb("choose", _choose, "which rung of hopper_gemm to use for a shape, and the cycles that its rule expects")
    p.add_argument("shapes", nargs="+", type=_shape, metavar="MxNxK")
    p.add_argument("--sms", type=int, metavar="N", help="SMs of the GPU; by default an H200's 132")

    p = verb("doctor", _doctor, "what of this machine works, what does not, and how to mend it; nothing is changed")
    p.add_argument("--json", action="store_true", help="for a bug report or a program")
    p.add_argument("--torch", action="store_true", help="import torch too, which takes seconds and starts CUDA")

    p = verb("compare", _compare, "hold results sets against each other: devices, dates or commits")
    p.add_argument("sets", nargs="+", metavar="SET", help="two or more: a folder, or SET@COMMIT for what git has of it")
    p.add_argument("--experiment", help="by default that of the ladder, or gemm")
    p.add_argument("--ladder", help="one ladder alone, whose claims are fewer and intervals so narrower")
    p.add_argument(
        "--output", type=_folder, metavar="DIR", help="write Markdown, CSV, SVG and PNG there, not to the terminal"
    )

    p = verb("trace", _trace, "show where a table's number comes from, and verify each hash on the way")
    p.add_argument(
        "cell", help="<table>:<rung or step>[:MxNxK], for example README.md:B3 or README.md:B2>B3:4096x4096x4096"
    )
    p.add_argument("--verbose", action="store_true", help="every link, those of the other arms' binaries too")

    verb("status", _status, "list recorded results and those whose machine code, launch or protocol has changed since")

    p = verb("record", _record, "promote live results to results/recorded/")
    p.add_argument("results", type=Path, help="a live set, for example results/h200")
    p.add_argument("--experiment", default="gemm")
    p.add_argument(
        "--gaps", action="store_true", help="publish points that have no number as what they are, but for wrong results"
    )

    p = verb("readme", _readme, "write the README's generated blocks from the recorded sets")
    p.add_argument("--check", action="store_true", help="only say whether they are current; exit 1 when they are not")
    return parser


def _measuring(p: argparse.ArgumentParser) -> None:
    p.add_argument("--experiment", required=True)
    p.add_argument("--variant", required=True)
    p.add_argument("--arch", required=True)
    p.add_argument("--gpu", required=True, help="UUID")
    p.add_argument("--clock", type=Path, required=True, help="the clock record")
    p.add_argument("--shapes", type=json.loads, required=True, help="JSON list of [M, N, K]")
    p.add_argument("--time-limit", type=float, default=300.0)
    p.add_argument("--output", type=Path, required=True)


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip(" ") for part in text.replace("x", ",").split(",")]
    if len(parts) != 3 or not all(re.fullmatch(r"0*[1-9][0-9]{0,17}", part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{shown(text)!r} is not M,N,K: give three positive whole numbers, for example 4096,4096,4096"
        )
    return tuple(map(int, parts))


def _folder(text: str) -> Path:
    """An empty word, which a variable of a shell may be, would be the folder at hand."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder, . for this one")
    return Path(text)


def _values(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names) or not all(value.isdecimal() and value.isascii() for _, _, value in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not axis=value,...: give each axis once with a whole number, for example grid=1"
        )
    return {name: int(value) for name, _, value in pairs}


def _point(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no point: give whole numbers with commas between them") from None


def _build(a: argparse.Namespace) -> int:
    from rungs import build

    name = a.variant if a.variant == build.STAMP else build.find_variant(a.variant)[1].name
    if a.output.name != f"{name}.json":
        raise RungsError(f"{a.output} is not how the manifest of {name} is named: give <folder>/{name}.json.")
    manifest = build.build(name, a.arch, a.output, build.find_toolchain(a.toolchain))
    if manifest["status"] != "ok":
        print(f"rungs: {manifest['status']}: {manifest['reason']}", file=sys.stderr)
        return 0 if a.failure_is_data else 1
    return 0


def _inspect(a: argparse.Namespace) -> None:
    from rungs import inspect, schemas

    manifest = schemas.read_manifest(a.manifest)
    inspect.run(manifest["variant"], manifest["arch"], a.manifest, a.output, a.toolchain)


def _gpu(asked: str, arch: str = "") -> Any:
    """The GPU of this UUID, or of this slug where another machine planned the job."""
    from rungs import clock

    found = clock.choose(asked)
    if found is None:
        raise RungsError(f"GPU {asked} is not in this machine: measuring needs a GPU.")
    if arch and found.arch != arch:
        raise RungsError(
            f"{found} is {found.arch} and the binaries are {arch}: run again with `--config arch={found.arch}`."
        )
    return found


def _clock(a: argparse.Namespace) -> None:
    from rungs import clock, warm
    from rungs.files import write_json

    if a.action == "release":
        print("\n".join(clock.release()) or "No clock lock was left behind.")
        return
    if not (a.gpu and a.output):
        raise RungsError("`clock decide` needs --gpu and --output.")
    gpu = _gpu(a.gpu)
    warm.prestart()  # this job runs beside the builds; the one that measures will find torch imported
    write_json(a.output, clock.decide(gpu, a.mode, a.mhz))


def _sweep(a: argparse.Namespace) -> None:
    from rungs import measure, protocol, schemas
    from rungs.files import read_json
    from rungs.variants import load_experiment

    experiment = load_experiment(a.experiment)
    settings = protocol.Settings(**a.settings)
    manifests = {schemas.read_manifest(path)["variant"]: path for path in a.manifests}
    measure.supervise(
        experiment,
        experiment.variant(a.variant),
        a.arch,
        manifests,
        a.stamp,
        [tuple(shape) for shape in a.shapes],
        settings,
        _gpu(a.gpu, a.arch),
        read_json(a.clock),
        a.time_limit,
        a.output,
        twin=a.twin,
    )


def _measure_job(a: argparse.Namespace) -> int:
    """What goes wrong is one sentence in the file `failure`, for the supervisor, and on standard error."""
    from rungs import measure

    try:
        return measure.run_child(a.job)
    except Exception as error:
        reason = " ".join((str(error).splitlines() or [type(error).__name__])[0].split())
        (a.job.parent / "failure").write_text(reason, encoding="utf-8")
        raise RungsError(reason) from error


def _launch(a: argparse.Namespace) -> None:
    from rungs import launcher
    from rungs.binary import load_binary
    from rungs.variants import load_device, load_experiment

    experiment = load_experiment(a.experiment)
    binary = load_binary(experiment, a.manifest)
    launcher.run(
        a.gpu,
        experiment,
        binary.variant,
        load_device(a.arch),
        a.cubin or binary.cubin,
        a.shape,
        a.launches,
        instrumented=a.instrumented,
        compare=a.check,
        sms=a.sms,
    )


def _profile(a: argparse.Namespace) -> None:
    from rungs import profile
    from rungs.files import read_json
    from rungs.variants import load_device, load_experiment

    experiment = load_experiment(a.experiment)
    profile.profile(
        experiment,
        experiment.variant(a.variant),
        a.arch,
        a.manifest,
        [tuple(shape) for shape in a.shapes],
        a.ncu,
        load_device(a.arch),
        _gpu(a.gpu),
        a.l2,
        a.output,
        clock_record=read_json(a.clock),
        time_limit_s=a.time_limit,
    )


def _sanitize(a: argparse.Namespace) -> None:
    from rungs import sanitize
    from rungs.variants import load_experiment

    experiment = load_experiment(a.experiment)
    variant = experiment.variant(a.variant)
    sanitize.sanitize(experiment, variant, a.arch, a.manifest, a.tool, _gpu(a.gpu), a.output, time_limit_s=a.time_limit)


def _sanitize_mutations(a: argparse.Namespace) -> None:
    from rungs import clock, mutants

    gpu = None if a.build_only else clock.choose(a.gpu)
    if gpu is None and not a.build_only:
        raise RungsError("There is no GPU here: give --build-only, and run the same folder where there is one.")
    mutants.run(a.output, a.arch, a.toolchain, a.tool, gpu, a.jobs, a.time_limit, a.places)


def _sanitizer_tables(a: argparse.Namespace) -> None:
    from rungs import sanitizepages, staleness

    if a.experiment:
        sanitizepages.write(a.results, a.experiment, staleness.stale(a.results, [a.experiment]))
    if a.mutations:
        sanitizepages.write_mutations(a.results, staleness.stale_mutations(a.results))


def _aggregate(a: argparse.Namespace) -> None:
    from rungs import aggregate

    aggregate.run(a.results, a.experiment, a.arch, a.variants)


def _effects(a: argparse.Namespace) -> None:
    from rungs import effects

    effects.run(a.results, a.experiment, a.arch)


def _plot(a: argparse.Namespace) -> None:
    from rungs import countplots, curves, plots, staleness
    from rungs.variants import load_experiment

    if a.kinds == ["clock"]:
        from rungs import conditions

        conditions.draw(a.results, a.experiment, staleness.stale(a.results, [a.experiment]))
        return
    if not a.of:
        raise RungsError(f"`plot {a.kinds[0]}` needs --of: name what to draw, for example a ladder.")
    if a.kinds == ["counts"]:
        for name in a.of:
            countplots.draw(a.results, a.experiment, name)
        return
    if a.kinds == ["points"]:
        old = staleness.stale(a.results, [a.experiment])
        for name in a.of:
            curves.draw(a.results, a.experiment, name, old)
        return
    if a.kinds == ["shapley"]:
        from rungs import shapleyplots

        old = staleness.stale(a.results, [a.experiment])
        for name in a.of:
            shapleyplots.draw(a.results, a.experiment, name, old)
        return
    ladders = load_experiment(a.experiment).ladders
    shown = [variant.name for name in a.of if name in ladders for variant in ladders[name].rungs.values()]
    stale = staleness.stale(a.results, [a.experiment], shown or None)
    for name in a.of:
        for kind in a.kinds:
            plots.draw(kind, a.results, a.experiment, name, stale)


def _tables(a: argparse.Namespace) -> None:
    from rungs import staleness, tables
    from rungs.variants import load_experiment

    if a.experiment:
        ladders = load_experiment(a.experiment).ladders.values()
        shown = [variant.name for ladder in ladders for variant in ladder.rungs.values()]
        tables.write_experiment(a.results, a.experiment, staleness.stale(a.results, [a.experiment], shown))
    if a.index:
        tables.write_index(a.results, a.index, staleness.stale(a.results), a.factorial)


def _claims(a: argparse.Namespace) -> None:
    from rungs import claims

    if a.judge is not None:
        claims.run(a.results, a.arch, a.judge)
    if a.show:
        from rungs import claimpages, claimplots, staleness

        stale = staleness.stale_claims(a.results)
        claimpages.write(a.results, stale)
        claimplots.draw(a.results, stale)


def _factorial(a: argparse.Namespace) -> None:
    from rungs import factorial, staleness

    factorial.write(a.results, a.experiment, staleness.stale(a.results, [a.experiment]))


def _verdict(a: argparse.Namespace) -> int:
    from rungs import verdict

    return verdict.run(a.inputs, a.output)


def _step(a: argparse.Namespace) -> int:
    from rungs import build, step

    shapes = list(dict.fromkeys(a.shape or [(4096, 4096, 4096)]))
    experiment = a.experiment or build.find_variant(a.source)[0].name
    return step.run(experiment, a.source, a.target, shapes, a.device, a.toolchain)


def _emulate(a: argparse.Namespace) -> int:
    from rungs import build
    from rungs.emulator import verb
    from rungs.variants import GEMM, load_experiment

    if a.experiment:
        experiment = load_experiment(a.experiment)
        variant = experiment.variant(a.variant)
    else:
        experiment, variant = build.find_variant(a.variant)
    sizes = {"m": a.m, "n": a.n, "k": a.k}
    if experiment.workload == GEMM:
        if a.at:
            raise RungsError(f"{experiment.name} is a GEMM, whose problem is not given by --at: give --m, --n and --k.")
        usual = verb.usual_problem(experiment, variant, a.arch)
        problem = tuple(usual[name] if v is None else v for name, v in sizes.items())
    else:
        if given := [f"--{name}" for name, value in sizes.items() if value is not None]:
            raise RungsError(
                f"{given[0]} is of a GEMM, and {experiment.name} has the axes {', '.join(experiment.axis_names)}: give --at"
                f" {experiment.axis_names[0]}=..."
            )
        problem = verb.at_point(experiment, variant, a.arch, a.at or {})
    return verb.run(
        experiment,
        variant,
        a.arch,
        problem,
        a.ptx,
        schedule=a.schedule,
        delivery=a.delivery,
        race=a.race,
        fill=a.fill,
        toolchain=a.toolchain,
    )


def _emulate_rung(a: argparse.Namespace) -> None:
    from rungs.emulator import device
    from rungs.variants import load_experiment

    experiment = load_experiment(a.experiment)
    shapes = [tuple(shape) for shape in a.shapes]
    device.emulate(experiment, experiment.variant(a.variant), a.arch, a.manifest, shapes, a.output)


def _counts(a: argparse.Namespace) -> None:
    from rungs import counts

    counts.run(a.results, a.experiment, a.variants, a.part)


def _count_tables(a: argparse.Namespace) -> None:
    from rungs import countpages

    if a.experiment:
        countpages.write(a.results, a.experiment, a.part, a.ladders)
    if a.index:
        countpages.write_index(a.results, a.index, a.factorials, a.recorded)


def _emulate_recorded(a: argparse.Namespace) -> None:
    from rungs import equality

    equality.run(a.results, a.toolchain)


def _counter_tables(a: argparse.Namespace) -> None:
    from rungs import equality

    equality.write(a.results, a.experiment)


def _advise(a: argparse.Namespace) -> None:
    from rungs import advise, clock, staleness
    from rungs.results import recorded_sets

    results = a.results
    if results is None:
        try:
            gpu = clock.choose("auto")
        except RungsError:
            gpu = None
        live = [Path("results") / gpu.slug] if gpu else []
        known = advise.sets_with_copies([*live, *recorded_sets()])
        if not known:
            raise RungsError(
                "No results set has points of copy_intensity: run `snakemake --config experiments=copy_intensity` on a GPU."
            )
        results = known[0]
    advise.run(results, staleness.stale(results, list(advise.EXPERIMENTS)))


def _export(a: argparse.Namespace) -> None:
    from rungs import export

    if (a.variant is None) == (a.shape is None):
        raise RungsError("Export is of a variant or for a shape: give --variant or --shape, and not both.")
    paths = export.run(export.variant_for(a.shape) if a.variant is None else a.variant, a.to, a.shape)
    print(f"Wrote {', '.join(map(str, paths))}. There: {export.compile_line(paths[0].stem)}")


def _choose(a: argparse.Namespace) -> None:
    from rungs import choose

    print(choose.show(a.shapes, a.sms))


def _doctor(a: argparse.Namespace) -> int:
    from rungs import doctor

    return doctor.run(a.json, a.torch)


def _compare(a: argparse.Namespace) -> None:
    from rungs import compare

    compare.run(a.sets, a.experiment or compare.experiment_of(a.ladder), a.ladder, a.output)


def _trace(a: argparse.Namespace) -> int:
    from rungs import trace

    return trace.trace(a.cell, a.verbose)


def _status(a: argparse.Namespace) -> None:
    from rungs import staleness

    staleness.print_status()


def _record(a: argparse.Namespace) -> None:
    from rungs import record

    record.record(a.results, a.experiment, a.gaps)


def _readme(a: argparse.Namespace) -> int:
    from rungs import readme

    return readme.write(check=a.check)
