"""The blocks of the root README that are generated from the recorded sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rungs import settings
from rungs.errors import RungsError
from rungs.files import ROOT, write_text
from rungs.results import COLD, recorded_sets
from rungs.staleness import stale, stale_claims
from rungs.variants import Experiment, load_experiment


def write(check: bool = False) -> int:
    """Write the root README's generated blocks; with `check`, only say whether they are current (1 where they are not)."""
    filled = read()
    if filled.now == filled.text:
        print("README.md is current.")
        return 0
    if check:
        print(filled.wrong())
        return 1
    write_text(ROOT / "README.md", filled.now)
    print("README.md is written anew.")
    return 0


NAMED = 3
"""Stale variants that the line under a block names."""
NOT_CURRENT = "README.md does not show what is recorded: run `python -m rungs readme`."


def note() -> str:
    """What is wrong with the root README's generated blocks, in a sentence; empty where they are current."""
    try:
        filled = read(compare=False)
    except (RungsError, OSError) as error:
        return f"README.md cannot be checked: {error}"
    return "" if filled.now == filled.text else filled.wrong()


@dataclass(frozen=True)
class Readme:
    """The root README as it is and as it would be. `stale`: block -> variant -> why its numbers there are stale."""

    text: str
    now: str
    blocks: Mapping[str, str]
    stale: Mapping[str, Mapping[str, str]]

    def wrong(self) -> str:
        """The first stale number that stands without its mark, else that something else is not current."""
        from rungs import tables

        for name, shown in tables.blocks_in(self.text).items():
            now = self.blocks.get(name, "")
            known = [variant for variant in self.stale.get(name, {}) if f"{variant}: " not in shown]
            if shown.strip() == now.strip() or tables.DAGGER not in now or not known:
                continue
            variant = next((variant for variant in known if f"{variant}: " in now), known[0])
            if tables.DAGGER in shown and f"{variant}: " not in now:
                continue
            return (
                f"README.md, block {name}, shows {variant} without the mark {tables.DAGGER}, though"
                f" {self.stale[name][variant]}: run `python -m rungs readme` to mark it, or measure it again and record it."
            )
        return NOT_CURRENT


def read(compare: bool = True) -> Readme:
    """The root README, and its blocks made from the recorded sets."""
    from rungs import advise, claimpages, claims, equality, factorial, tables

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not recorded_sets():
        return Readme(text, text, {}, {})
    blocks: dict[str, str] = {}
    old: dict[str, Mapping[str, str]] = {}
    for results, name in settings.recordings():
        known, experiment = stale(results, [name], compare=compare), load_experiment(name)
        made = tables.readme_blocks(results, name, known)
        if name in settings.recorded_factorials(results.relative_to("results").as_posix()):
            made |= factorial.blocks(results, name, known)
        if name == "copy_intensity":
            made[f"{name}:advice"] = advise.block(results, stale(results, list(advise.EXPERIMENTS), compare=compare))
        if equality.compared(results, name):
            made |= equality.blocks(results, name)
        if results.name.endswith(COLD) and (hot := results.with_name(results.name.removesuffix(COLD))).is_dir():
            made |= _cold_blocks(hot, results, name)
        for block, content in made.items():
            whose = _stale_in_block(experiment, block, known)
            old[f"{results.name}:{block}"] = whose
            blocks[f"{results.name}:{block}"] = _marked(content, whose)
    for results in recorded_sets():
        if (results / claims.CSV).is_file():
            old[f"{results.name}:claims"] = known = stale_claims(results, compare)
            blocks[f"{results.name}:claims"] = _marked(claimpages.block(results, known), known)
    return Readme(text, tables.apply_blocks(text, blocks), blocks, old)


def _stale_in_block(experiment: Experiment, block: str, known: Mapping[str, str]) -> dict[str, str]:
    """Of an experiment's stale variants those that a block is of: its ladder's, or all where it names no ladder."""
    ladder = experiment.ladders.get(block.rpartition(":")[2])
    rungs = {variant.name for variant in ladder.rungs.values()} if ladder else set(known)
    return {variant: reason for variant, reason in known.items() if variant in rungs}


def _marked(content: str, old: Mapping[str, str]) -> str:
    """A block of stale numbers that marks none of them, because it shows figures or sums, with a line that marks it whole."""
    from rungs.tables import DAGGER

    if not old or DAGGER in content:
        return content
    named = [f"{variant}: {reason}" for variant, reason in list(old.items())[:NAMED]]
    if len(old) > NAMED:
        named.append(f"And {len(old) - NAMED} more, which `python -m rungs status` lists")
    return f"{content}\n\n<sub>{DAGGER} Stale, all of it or a part. {'. '.join(named)}.</sub>"


def _cold_blocks(hot: Path, cold: Path, name: str) -> dict[str, str]:
    """`<experiment>:cold:<ladder>` of each ladder of which a cold set and its hot one both have rungs."""
    from rungs import aggregate, contrast, tables

    if name not in settings.recorded_experiments(hot.relative_to("results").as_posix()):
        return {}
    warm, rotated = (tables.read_source(results, name, stale(results, [name])) for results in (hot, cold))
    known = aggregate.measured_ladders(rotated.experiment, rotated.data["shapes"])
    both = [ladder for ladder in aggregate.measured_ladders(warm.experiment, warm.data["shapes"]) if ladder in known]
    return {f"{name}:cold:{ladder.name}": contrast.table(warm, rotated, ladder) for ladder in both}
