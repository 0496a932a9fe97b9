# Where this workflow lies: not in the working folder with `--directory` or as a module of another workflow. No rule stands here.
import os
import sys
from pathlib import Path


def stop(sentence):
    """End before anything is planned, with the sentence alone: a WorkflowError would come with lines of this file around it."""
    print(f"rungs: {sentence}", file=sys.stderr)
    sys.exit(1)


HOME = Path(workflow.current_basedir.get_path_or_uri(secret_free=True)).parents[1]
if not (HOME / "workflow" / "rungs").is_dir():
    stop(
        f"{HOME} is no folder of this machine: clone rungs, and let `snakefile` of the module be that folder's Snakefile."
    )
if workflow.modifier.path_modifier.prefix or workflow.modifier.path_modifier.modifies_prefixes:
    stop(
        "A module of rungs takes no prefix: leave it out, or make its results in a folder of their own with --directory."
    )
AS_MODULE = not workflow.modifier.is_main_snakefile()
OWN_CONFIG = os.path.relpath(HOME / "config" / "config.yaml")
"""Of the checkout: for a working folder that has none of its own, or whose own is another workflow's."""


def own(path):
    """A file of the checkout as an input, as the working folder sees it; a pattern may stand in it."""
    return os.path.relpath(HOME / path)
