"""The end of a run: what failed, each named with its reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rungs import readme, schemas
from rungs.files import write_json
from rungs.variants import load_experiment

FINE = ("ok", "flagged", "not on this chip")
"""A level that the chip lacks is no failure: nothing could be done about it."""
SHOWN = 3
"""More shapes that failed alike are a number."""


def failures(inputs: Sequence[Path]) -> list[dict[str, str]]:
    """Variant, what, status and reason of every failed row of coverage, inspect and sanitize CSVs, each failure once."""
    found: list[dict[str, str]] = []
    for path in inputs:
        coverage = path.name in ("coverage.csv", "factorial_coverage.csv")
        sanitized = path.parent.parent.name == "sanitize"
        kind = "coverage" if coverage else "sanitize" if sanitized else "inspect"
        experiment = load_experiment(path.parent.name) if coverage or sanitized else None
        frame = schemas.read_csv(experiment.kind(kind) if experiment else kind, path)
        named = {"coverage": "what", "sanitize": "tool"}
        for row in frame[~frame["status"].isin(FINE)].to_dict("records"):
            point = [row[axis] for axis in experiment.axis_names] if experiment else [None]
            known = all(value == value and value is not None for value in point)  # neither NaN nor missing
            shape = f" at {experiment.describe([int(value or 0) for value in point])}" if experiment and known else ""
            what = f"{row[named[kind]] if kind in named else kind}{shape}"
            failure = {"variant": row["variant"], "what": what, "status": row["status"], "reason": row["reason"]}
            if failure not in found:
                found.append(failure)
    return found


def run(inputs: Sequence[Path], output: Path) -> int:
    """Write the verdict; returns 1, with a line for each failure on standard error, where there is one.

    A README that does not show what is recorded is noted in it and fails no run.
    """
    found = failures(inputs)
    write_json(output, {"failed": len(found), "failures": found, "readme": readme.note()})
    alike: dict[tuple[str, ...], list[str]] = {}
    for failure in found:
        what, _, shape = failure["what"].partition(" at ")
        alike.setdefault((failure["variant"], what, failure["status"], failure["reason"]), []).append(shape)
    for (variant, what, status, reason), shapes in alike.items():
        where = f"{len(shapes)} shapes" if len(shapes) > SHOWN else ", ".join(shapes)
        print(f"rungs: {variant}, {what}{f' at {where}' if where else ''}: {status}: {reason}", file=sys.stderr)
    return 1 if found else 0
