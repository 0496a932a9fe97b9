"""`python -m rungs choose`: which rung to use for a shape, by a rule of a few measured constants and no table of shapes.

A rung's cycles for M x N x K are `first` + waves * tiles of K * step + (waves - 1) * `more`, and `split` on top where CTAs share a
tile's K. Waves: how often the SMs that hold a CTA at once go round until every tile is done, in the whole clusters that fit.
Step: what one SM spends on 64 of K, or what L2 needs to deliver a step of every CTA under way, whichever is more. The constants
are in the experiment's file; the rule takes the rung with the fewest cycles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rungs import plan as plans
from rungs import wgmma
from rungs.errors import Refused, RungsError
from rungs.plan import BF16_BYTES
from rungs.tables import Row, Shape, Source, _marked, grid, table
from rungs.variants import Device, Experiment, Variant, cluster_of, ctas_along_k, load_device, load_experiment

ARCH = "sm_90a"
EXPERIMENT = "hopper_gemm"
LINE_BYTES = 128
"""A row of A or B that is no multiple of it begins inside a line of L2, and its boxes cross one line more."""


@dataclass(frozen=True)
class Estimate:
    """What the rule makes of one rung at one shape."""

    rung: str
    variant: Variant
    waves: int
    k_tiles: int
    step: float
    """Cycles for 64 of K."""
    by_l2: bool
    """Whether L2 decides the step."""
    cycles: float


def estimate(experiment: Experiment, rung: str, shape: Shape, device: Device, sms: int | None = None) -> Estimate:
    """Cycles of a rung at M, N, K on a GPU of so many SMs. Raises Refused where the kernel does not compute the shape, or the GPU
    has fewer SMs than CTAs that wait for each other.
    """
    assert experiment.choice is not None
    rule, known = experiment.choice, experiment.choice["rungs"][rung]
    variant = experiment.variant(rung)
    plans.check_problem(experiment, variant, shape)
    values, k = experiment.values(variant), shape[2]
    along_m, along_n, of_cluster = cluster_of(values)
    cluster, split = along_m * along_n * of_cluster, ctas_along_k(values)
    at_once = min(sms or device.sms, rule["sms_in_clusters"].get(cluster, sms or device.sms)) // cluster * cluster
    together = cluster * split // of_cluster
    if at_once < together:
        raise Refused(
            f"{rung} has {together} CTAs that wait for each other, more than the GPU's SMs: choose a larger GPU."
        )
    ctas = wgmma.tiles(values, shape) * split
    waves = math.ceil(ctas / at_once)
    k_tiles = math.ceil(math.ceil(k / values["TILE_K"]) / split)
    rows = values["TILE_M"] / along_n + values["TILE_N"] / along_m  # of A and B that a CTA asks L2 for
    aligned = k * BF16_BYTES % LINE_BYTES == 0
    step_bytes = rows * values["TILE_K"] * BF16_BYTES * (1 if aligned else rule["unaligned"])
    delivery = step_bytes * min(ctas, at_once) / rule["l2_bytes_per_cycle"]
    step = max(known["step"], delivery)
    cycles = known["first"] + waves * k_tiles * step + (waves - 1) * known["more"] + known.get("split", 0)
    return Estimate(rung, variant, waves, k_tiles, step, delivery > known["step"], cycles)


def estimates(experiment: Experiment, shape: Shape, device: Device, sms: int | None = None) -> list[Estimate]:
    """Of all rungs that the rule chooses from, the one that it takes first. Raises Refused where none computes the shape."""
    if not experiment.choice:
        raise RungsError(
            f"Experiment {experiment.name} has no rule that chooses a rung: choose {EXPERIMENT}, or add `choice` to its file."
        )
    found, refused = [], []
    for rung in experiment.choice["rungs"]:
        try:
            found.append(estimate(experiment, rung, shape, device, sms))
        except Refused as reason:
            refused.append(reason)
    if not found:
        raise refused[0]
    return sorted(found, key=lambda each: each.cycles)


def chosen(experiment: Experiment, shape: Shape, device: Device, sms: int | None = None) -> Estimate:
    return estimates(experiment, shape, device, sms)[0]


def show(shapes: Sequence[Shape], sms: int | None) -> str:
    """What the verb prints: a table for each shape, the rung that is taken first."""
    experiment, device = load_experiment(EXPERIMENT), load_device(ARCH)
    if sms is not None and not 1 <= sms <= 1024:
        raise RungsError(f"A GPU of {sms} SMs is none that there is: give --sms from 1 to 1024, 132 for an H200.")
    parts = []
    for shape in shapes:
        rows = [
            [
                each.rung,
                each.variant.name,
                str(each.waves),
                str(each.k_tiles),
                f"{each.step:.0f}{' (L2)' if each.by_l2 else ''}",
                f"{each.cycles:.0f}",
            ]
            for each in estimates(experiment, shape, device, sms)
        ]
        headers = ["rung", "variant", "waves", "K tiles", "cycles a K tile", "cycles"]
        parts.append(f"{experiment.describe(shape)}: take {rows[0][0]}\n\n{grid(headers, rows)}")
        for workspace in wgmma.workspace(experiment.values(experiment.variant(rows[0][0])), shape):
            parts.append(f"{rows[0][0]} takes a workspace of {workspace.bytes:,} bytes of global memory.")
    return "\n\n".join(parts)


# ---- against what was measured -----------------------------------------------------------------------------------------


def choice_table(source: Source) -> str:
    """A row for each measured shape: the rung that the rule takes and the one that was fastest, as shares of the control.

    Empty where the experiment has no rule or no rung of it was timed.
    """
    experiment = source.experiment
    if not experiment.choice:
        return ""
    device = load_device(ARCH)
    timed: dict[Shape, dict[str, Row]] = {}
    for row in source.rows("shapes"):
        if row["share_percent"]:
            timed.setdefault((row["m"], row["n"], row["k"]), {})[row["variant"]] = row
    rows, used, shares, losses = [], [], [], []
    for shape, measured in sorted(timed.items()):
        try:
            taken = chosen(experiment, shape, device)
        except Refused:
            continue
        if taken.variant.name not in measured:
            continue
        row = measured[taken.variant.name]
        best = max(measured.values(), key=lambda each: each["share_percent"])
        loss = row["share_percent"] / best["share_percent"] - 1
        used += [row, best]
        shares.append(row["share_percent"])
        losses.append((loss, shape))
        names = experiment.rung_names(experiment.variant(best["variant"]))
        interval = f"{row['share_percent']:.1f} % [{row['share_low_percent']:.1f}, {row['share_high_percent']:.1f}]"
        line = [
            taken.rung,
            interval,
            f"{row['tflops']:.1f}",
            names[0],
            f"{best['share_percent']:.1f} %",
            f"{100 * loss:+.1f} %",
        ]
        stale = bool({taken.variant.name, best["variant"]} & set(source.stale))
        rows.append(["x".join(map(str, shape)), *(_marked(cell, stale) for cell in line)])
    if not rows:
        return ""
    control = source.facts.control
    headers = ["shape", "the rule takes", f"of {control}", "TFLOP/s", "fastest", f"of {control}", "the rule against it"]
    head = (
        "The rung that `python -m rungs choose` takes for each measured shape, by a rule that knows of each rung a few cycles and"
        " of no shape anything, beside the rung that was fastest there."
    )
    ahead = sum(share >= 100 for share in shares)
    worst, at = min(losses)
    sentence = (
        f"What the rule takes is ahead of {control} on {ahead} of {len(rows)} shapes and within {-100 * worst:.1f} % of the fastest"
        f" rung on all of them (most behind at {'x'.join(map(str, at))})."
    )
    names = list(dict.fromkeys(row["variant"] for row in used))
    return table(source, head, headers, rows, sentence, used, names)
