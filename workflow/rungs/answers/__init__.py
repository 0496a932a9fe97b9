"""What is said of an experiment that is no GEMM beside its ladders: its own sections of tables, and its figures.

One module per workload, under its name, with `sections(source) -> list[str]` (Markdown, each with a heading, a table, one
generated sentence in bold and its line of provenance), `blocks(source) -> dict[str, str]` (block name -> Markdown, for the
README) and `FIGURES`: name -> a function of a `Source` that returns a matplotlib figure. Its names are the `FIGURES` of the
workload, which are known without drawing. A workload without such a module has ladders, steps and their tables, and no more.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rungs.variants import Experiment

NOTHING = SimpleNamespace(sections=lambda source: [], blocks=lambda source: {}, FIGURES={})


def there(experiment: Experiment) -> bool:
    """Whether anything is said beside the ladders."""
    return Path(__file__).with_name(f"{experiment.workload}.py").is_file()


def of(experiment: Experiment) -> Any:
    """The module of an experiment that is no GEMM, or what stands for one that says nothing."""
    return importlib.import_module(f"rungs.answers.{experiment.workload}") if there(experiment) else NOTHING
