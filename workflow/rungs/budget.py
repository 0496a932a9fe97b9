"""What a rung takes of an SM, and what it makes of the clock and the power that it gets; what stands before a ladder's first rung."""

from __future__ import annotations

import math

from rungs.aggregate import read_data
from rungs.results import ResultsSet
from rungs.tables import Row, Shape, Source, _marked, size_text, table
from rungs.variants import Ladder, load_device, load_experiment

KIB = 1024


def takes(source: Source, variant: str) -> tuple[str, list[str]]:
    """(architecture, cells) of the binary: registers, shared memory, threads. The architecture is empty where there is none."""
    found = ResultsSet(source.results)
    arch = next(reversed(found.architectures()), "")
    made = found.build_manifest(source.experiment.name, arch, variant)
    if made is None:
        return "", ["not built"] * 3
    if made["status"] != "ok":
        return made["arch"], [made["status"]] * 3
    smem = made["ptxas"]["smem_static_bytes"] + made["smem_dynamic_bytes"]
    return made["arch"], [str(made["ptxas"]["registers"]), f"{smem / KIB:.4g} KiB", str(made["threads"])]


def budget_table(source: Source, ladder: Ladder) -> str:
    """A row per rung: registers a thread, shared memory and threads a CTA, CTAs per SM; and of each M = N at its largest K the
    speed, the SM clock, the share of the tensor cores' peak at that clock, the board's power and the speed per watt.
    """
    shapes = {(row["variant"], row["m"], row["n"], row["k"]): row for row in source.rows("shapes")}
    columns = largest_shapes(source)
    rows, used = [], []
    for rung, variant in ladder.rungs.items():
        arch, cells = takes(source, variant.name)
        ctas = ctas_of(source, ladder, rung)
        line = [*cells[:2], ctas, cells[2]]
        for shape in columns:
            row = shapes.get((variant.name, *shape))
            line += gives(row, arch)
            used += [row] if row else []
        stale = variant.name in source.stale
        rows.append([rung, *(_marked(cell, stale) for cell in line)])
    headers = ["rung", "registers", "shared memory", "CTAs per SM", "threads"]
    for m, n, k in columns:
        at = f"{size_text((m, n))}, K={k}"
        headers += [f"TFLOP/s, {at}", "MHz", "of peak", "W", "GFLOP/s per W"]
    names = [variant.name for variant in ladder.rungs.values()]
    head = "What a CTA takes, and what the rung makes of the clock and the power that the GPU gives it under its load."
    notes = [
        "Of peak: of what all tensor cores do at the clock beside it, dense bf16. W: the board's power over the job's rounds,"
        " in which the control's and the predecessors' alternate with the rung's."
    ]
    return table(source, head, headers, rows, _sentence(ladder, shapes, columns), used, names, notes)


def ctas_of(source: Source, ladder: Ladder, rung: str) -> str:
    """CTAs that an SM holds, from the changes of the rung's steps."""
    for row in source.rows("changes"):
        if row["ladder"] == ladder.name and row["name"] == "ctas_per_sm":
            before, after = row["step"].split(">")
            value = row["before"] if before == rung else row["after"] if after == rung else None
            if value is not None:
                return f"{value:g}"
    return "not inspected"


def gives(row: Row | None, arch: str) -> list[str]:
    """Speed, clock, share of peak, power, speed per watt; words where there is none."""
    if row is None or row["tflops"] is None:
        return ["not run" if row is None else str(row["status"]), "", "", "", ""]
    tflops, mhz, watts = row["tflops"], row["sm_mhz"], row["power_w"]
    share = f"{100 * tflops / load_device(arch).peak_tflops(mhz):.1f} %" if mhz and arch else ""
    per_watt = f"{1000 * tflops / watts:.0f}" if watts else ""
    return [f"{tflops:.1f}", f"{mhz:.0f}" if mhz else "", share, f"{watts:.0f}" if watts else "", per_watt]


def largest_shapes(source: Source) -> list[Shape]:
    """Of each (M, N) the shape with the largest K, the largest first."""
    found: dict[tuple[int, int], int] = {}
    for row in source.rows("shapes"):
        size = row["m"], row["n"]
        found[size] = max(found.get(size, 0), row["k"])
    return [(m, n, k) for (m, n), k in sorted(found.items(), reverse=True)]


def _sentence(ladder: Ladder, shapes: dict[tuple, Row], columns: list[Shape]) -> str:
    parts = []
    for shape in columns:
        per_watt = {
            rung: row["tflops"] / row["power_w"]
            for rung, variant in ladder.rungs.items()
            if (row := shapes.get((variant.name, *shape))) and row["tflops"] and row["power_w"]
        }
        if per_watt:
            best = max(per_watt, key=per_watt.__getitem__)
            at = f"{size_text(shape[:2])}, K={shape[2]}"
            parts.append(f"at {at} {best} makes most of a watt, {1000 * per_watt[best]:.0f} GFLOP/s")
    text = "; ".join(parts) or "no rung has a time with its power"
    return text[0].upper() + text[1:] + "."


def bridge_table(source: Source) -> str:
    """The rung of another experiment that the first rung here is compared with, both as shares of the control: two kernels that
    differ in more than a factor, so `not controlled`. Empty where the experiment names none, or the set does not hold both.
    """
    bridge = source.experiment.bridge
    if not bridge or not (source.results / "data" / bridge["experiment"] / "shapes.csv").is_file():
        return ""
    other = load_experiment(bridge["experiment"])
    before, after = other.variant(bridge["from"]).name, source.experiment.variant(bridge["to"]).name
    frame = read_data(source.results, other.name)["shapes"]
    there = {
        (row["m"], row["n"], row["k"]): row
        for row in frame.astype(object).where(frame.notna(), None).to_dict("records")
        if row["variant"] == before
    }
    rows, used, changes = [], [], []
    for row in source.rows("shapes"):
        shape = row["m"], row["n"], row["k"]
        first = there.get(shape)
        if row["variant"] != after or not first or not first["share_percent"] or not row["share_percent"]:
            continue
        ratio = row["share_percent"] / first["share_percent"]
        changes.append(ratio)
        used.append(row)
        shares = [f"{each['share_percent']:.1f} %" for each in (first, row)]
        rows.append(["x".join(map(str, shape)), *shares, f"{100 * (ratio - 1):+.1f} %", "**not controlled**"])
    if not rows:
        return ""
    headers = ["shape", f"{bridge['from']} of {other.name}", bridge["to"], "change", "controlled"]
    head = (
        f"{bridge['from']} is the best of {other.name}, {bridge['to']} the first rung here. The instruction that multiplies, the"
        " tile and the pipeline differ at once, so the change is of the kernels, not of a factor: a bridge, no step."
    )
    mean = 100 * (math.exp(sum(map(math.log, changes)) / len(changes)) - 1)
    sentence = (
        f"From {bridge['from']} to {bridge['to']} the share of {source.facts.control} changes by {mean:+.1f} % on average over"
        f" {len(rows)} shapes, not controlled."
    )
    return table(source, head, headers, rows, sentence, used, [after])
