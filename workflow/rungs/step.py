"""`python -m rungs step B2 B3`: measure one step now, and say what it bought."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from rungs import build, clock, measure, protocol, schemas, settings, stats
from rungs.errors import RungsError
from rungs.variants import GEMM, load_experiment, make_step


def run(
    experiment_name: str, source: str, target: str, shapes: list[tuple[int, int, int]], device: str, toolchain: str
) -> int:
    """Build both rungs, measure them paired with the control and the target against itself, and print a line per shape.

    Returns 1 where a shape could not be measured, else 0.

    The floor is that of this one job: the target's binary against its twin. Raises RungsError for two rungs that are no
    step, without a GPU and for a rung that fails.
    """
    experiment = load_experiment(experiment_name)
    if experiment.workload != GEMM:
        raise RungsError(
            f"{experiment_name} is no GEMM, of which alone `step` measures a step at once: run `snakemake --config"
            f" experiments={experiment_name} preset=quick`, which measures its steps in its few quick points."
        )
    step = make_step(experiment.variant(source), experiment.variant(target), "", f"{source}>{target}", source, target)
    gpu = clock.choose(device)
    if gpu is None:
        raise RungsError("There is no GPU here, and measuring a step needs one: run this on a machine that has one.")
    arch = settings.arch_of(gpu)
    config = settings.checked(settings.over_defaults({}, {}, module=False))
    measured = settings.check_measure(config["measure"])
    rule = protocol.Settings(**settings.protocol_settings(measured))
    tools = build.find_toolchain(toolchain)
    with tempfile.TemporaryDirectory(prefix="rungs-step-") as folder:
        manifests = {}
        for name in (step.target_variant.name, step.source_variant.name, build.STAMP):
            manifests[name] = Path(folder) / name / f"{name}.json"
            built = build.build(name, arch, manifests[name], tools)
            if built["status"] != "ok":
                raise RungsError(built["reason"])
        stamp = manifests.pop(build.STAMP)
        output = Path(folder) / "step.csv"
        record = clock.decide(gpu, config["clock"]["mode"], config["clock"]["mhz"])
        limit = float(measured["time_limit_s"])
        arguments = (stamp, shapes, rule, gpu, record, limit, output)
        measure.supervise(experiment, step.target_variant, arch, manifests, *arguments, twin=True)
        frame = schemas.read_csv("sweep", output)
    print(f"{step.label}, factor {step.factor}, on {gpu.name}:")
    failed = False
    for (m, n, k), rows in frame.groupby(["m", "n", "k"], sort=False):
        sound, sentence = _sentence(rows, step.source_variant.name, step.target_variant.name)
        failed |= not sound
        print(f"  {m}x{n}x{k}: {sentence}")
    return int(failed)


def _sentence(rows, source: str, target: str) -> tuple[bool, str]:  # type: ignore[no-untyped-def]
    """Whether the step was measured at this shape, and what is said of it."""
    if rows["status"].iloc[0] not in ("ok", "flagged"):
        return False, f"{rows['status'].iloc[0]}: {rows['reason'].iloc[0]}"
    used = rows[rows["status"] == "ok"].pivot(index="round", columns="arm", values="time_us").dropna()
    if source not in used or len(used) < 2:
        return False, f"not measured: {source} could not be timed beside {target}, or too few rounds were usable."
    ratios = np.log(used[source] / used[target]).to_numpy()
    median, low, high = protocol.median_interval(ratios)
    if measure.TWIN not in used or measure.CONTROL not in used:
        lacking = "the twin" if measure.TWIN not in used else "the control"
        return False, f"not measured: {lacking} could not be timed beside {target} in any usable round."
    floor = abs(float(np.median(np.log(used[measure.TWIN] / used[target]))))
    verdict = stats.verdict(low, high, floor)
    more = stats.rounds_to_decide(median, low, high, floor, len(used)) if verdict == "undecided" else None
    gain, lowest, highest = (float(np.expm1(value)) * 100 for value in (median, low, high))
    share = float(np.median(used[measure.CONTROL] / used[target])) * 100
    hint = f", about {more} more round{'' if more == 1 else 's'} would decide" if more else ""
    return True, (
        f"{gain:+.2f} % [{lowest:+.2f}, {highest:+.2f}], {verdict}{hint} (A/A {floor * 100:.2f} %, {len(used)} rounds,"
        f" {share:.1f} % of the control)"
    )
