"""What is said of an experiment that is no GEMM beside its ladders: its own sections of tables, and its figures.

One module per workload, under its name, with `sections(source) -> list[str]` (Markdown, each with a heading, a table, one
generated sentence in bold and its line of provenance), `blocks(source) -> dict[str, str]` (block name -> Markdown, for the
README) and `FIGURES`: name -> a function of a `Source` that returns a matplotlib figure. Its names are the `FIGURES` of the
workload, which are known without drawing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from rungs.variants import Experiment


def of(experiment: Experiment) -> ModuleType:
    """The module of an experiment that is no GEMM."""
    return importlib.import_module(f"rungs.answers.{experiment.workload}")
