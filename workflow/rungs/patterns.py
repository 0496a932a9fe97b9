"""The pattern of variants' names: `{factor}` for each factor, in square brackets where a name may leave the factor out."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from rungs.errors import RungsError

OPTIONAL = re.compile(r"\[(?P<text>[^][]*\{(?P<factor>\w+)\}[^][]*)\]")
"""The part that a name leaves out where its factor is at its default: `[_x{sums}]`."""


def name(pattern: str, levels: Mapping[str, int], defaults: Mapping[str, int]) -> str:
    """The name of the variant with these levels."""
    kept = OPTIONAL.sub(
        lambda part: "" if levels[part["factor"]] == defaults[part["factor"]] else part["text"], pattern
    )
    return kept.format(**levels)


def start(pattern: str) -> str:
    """What every name begins with."""
    return re.split(r"[{[]", pattern, maxsplit=1)[0]


@functools.cache
def regex(pattern: str) -> str:
    """A regular expression of names, with a group for each factor; what may be left out has no group then."""
    text = re.escape(pattern).replace(r"\[", "(?:").replace(r"\]", ")?")
    return re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d{1,9})", text)


def regex_of_levels(pattern: str, spelled: Mapping[str, Sequence[int]]) -> str:
    """A regular expression of the names with these levels, without groups; `spelled` are a factor's levels but its default."""

    def numbers(match: re.Match[str]) -> str:
        return f"(?:{'|'.join(map(str, spelled[match[1]])) or '(?!)'})"

    return re.sub(r"\(\?P<(\w+)>\\d\{1,9\}\)", numbers, regex(pattern))


def tells_apart(pattern: str) -> bool:
    """Whether no two variants can share a name: something other than digits stands between two factors, whatever is left out,
    and names that leave out different parts differ in more than numbers.
    """
    forms = [pattern]
    for part in OPTIONAL.finditer(pattern):
        forms = [form.replace(part[0], kept) for form in forms for kept in (part["text"], "")]
    outlines = {re.sub(r"(\{\w+\}|\d)+", "0", form) for form in forms}
    return len(outlines) == len(forms) and not any(re.search(r"\}\d*\{", form) for form in forms)


def check(where: str, pattern: str, factors: Mapping) -> None:
    """Raises RungsError unless the parts in square brackets are those of the factors with a default, one each, side by side."""
    if re.search(r"\[[^]]*\[|^[^[]*\]|\][^[]*\]|\[[^]]*$", pattern):
        raise RungsError(
            f"{where}: the square brackets of variant_name {pattern} are nested or not closed: put each part that a name may"
            " leave out in a pair of its own."
        )
    for part in re.findall(r"\[[^]]*\]", pattern):
        if len(named := re.findall(r"\{(\w+)\}", part)) != 1:
            raise RungsError(
                f"{where}: {part} in variant_name holds {len(named)} factors: put exactly one into a pair of brackets."
            )
    optional = [part["factor"] for part in OPTIONAL.finditer(pattern)]
    for factor, raw in factors.items():
        default = raw.get("default")
        if default is not None and default not in raw["levels"]:
            raise RungsError(
                f"{where}: the default of {factor} is {default}, which is none of its levels {', '.join(map(str, raw['levels']))}."
            )
        if default is not None and factor not in optional:
            raise RungsError(
                f"{where}: {factor} has a default, which names leave out, so variant_name needs its part in square brackets, for"
                f" example [_{factor[0]}{{{factor}}}]."
            )
        if default is None and factor in optional:
            raise RungsError(
                f"{where}: variant_name has {factor} in square brackets, and {factor} has no default that a name could leave out:"
                " give it one, or take the brackets away."
            )
    for part in re.findall(r"\[\d*\{[^]]*\]", pattern):
        raise RungsError(
            f"{where}: {part} in variant_name begins with a number, so that a name would not say where the level before it ends:"
            " begin with a letter or _."
        )
    if not re.sub(r"\[[^]]*\]", "", pattern):
        raise RungsError(f"{where}: variant_name {pattern} may leave out everything: put a word outside the brackets.")
