"""Config files and CSVs, checked on write and on read against `workflow/schemas/`."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, validators

from rungs.errors import RungsError, shown
from rungs.files import ROOT, read_json_and_hash, whole

SCHEMAS = ROOT / "workflow" / "schemas"
GIVEN = ("peers", "published", "shares", "intensity", "tma_throughput", "hopper_latencies")
"""Kinds of CSV that no run makes."""
MANIFESTS = ("build", "sweep", "profile", "emulate", "sanitize", "mutations")
"""Kinds of manifest; that of a floor job is a sweep's."""
LONGEST = 600
"""Letters of a breach that are shown: it may quote a whole list or a number of thousands of digits."""


_Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast where libyaml is there; every job reads a dozen schemas."""


@functools.cache
def load_schema(name: str) -> Mapping[str, Any]:
    """`workflow/schemas/<name>.schema.yaml`."""
    return yaml.load((SCHEMAS / f"{name}.schema.yaml").read_text(encoding="utf-8"), Loader=_Safe)


def _whole(_checker: Any, value: Any) -> bool:
    """JSON Schema takes 256.0 for an integer; a file name or a kernel's argument would not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(_checker: Any, value: Any) -> bool:
    return _whole(None, value) or (isinstance(value, float) and math.isfinite(value))


_Validator = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _whole).redefine("number", _finite),
)


def validate(value: Any, name: str, where: str) -> None:
    """Raises RungsError with the first breach of schema `name` in `value`; `where` says what was read."""
    try:
        errors = sorted(_Validator(load_schema(name)).iter_errors(value), key=lambda e: [str(p) for p in e.path])
    except (RecursionError, ValueError):
        raise RungsError(
            f"{where} holds itself, hundreds of levels or a number of thousands of digits: nothing that it describes does."
        ) from None
    if errors:
        error = errors[0]
        place = ".".join(str(part) for part in error.absolute_path)
        schema = error.schema if isinstance(error.schema, dict) else {}
        message, description = error.message, schema.get("description", "")
        if error.schema is False:  # of which jsonschema does not say where it stands
            odd = next((key for key, inner in value.items() if inner == error.instance), "it has")
            message = f"key {odd!r} has no meaning beside the others"
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            odd = next(key for key in error.instance if key not in schema["properties"])
            message = f"there is no key {odd!r}; choose of {', '.join(schema['properties'])}"
        if error.validator == "oneOf" and description:
            message = f"{error.instance!r} is nothing that it may be"
        message = shown(message, LONGEST)
        raise RungsError(
            f"{where}{f', key {place}' if place else ''}: {message}{f' ({description})' if description else ''}."
        )


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a build or of a job that writes a CSV, valid by the schema of its kind.

    Raises RungsError with the key that is missing or odd.
    """
    value, digest = read_json_and_hash(path)
    if digest not in _VALID:
        check_manifest(value, f"{path} (delete it and run again)")
        _VALID.add(digest)
    return value


def check_manifest(value: Mapping[str, Any], where: str) -> None:
    """Raises RungsError unless a manifest is of a known kind and valid by that kind's schema."""
    if value.get("kind") not in MANIFESTS:
        raise RungsError(f"{where}: this is no manifest of a {', '.join(MANIFESTS[:-1])} or {MANIFESTS[-1]}.")
    validate(value, f"manifest_{value['kind']}", where)


_VALID: set[str] = set()
"""Hashes of the manifests that were found valid: the README's blocks read each of a set five times, and looking takes a millisecond."""


class _OneOfEachKey(_Safe):  # type: ignore[misc, valid-type]
    """Safe loading that refuses a mapping with the same key twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path, schema: str) -> dict[str, Any]:
    """A YAML file (safe loading only) that is valid by its schema."""
    value: dict[str, Any] = load_yaml(path)
    validate(value, schema, str(path))
    return value


def load_yaml(path: Path) -> Any:
    """What a YAML file holds (safe loading only). Raises RungsError where it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_OneOfEachKey)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise RungsError(f"{path} is not readable YAML: {' '.join(str(error).split())}.") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # of a tag or a date
        said = " ".join(str(error).split())[:200]
        raise RungsError(
            f"{path} is not readable YAML: a value in it is not what its tag or form says ({said}): correct it or quote it."
        ) from None


SHAPE = ("m", "n", "k")


@functools.cache
def csv_schema(kind: str) -> Mapping[str, Any]:
    """The schema of a CSV kind. `sweep@tile,stages` is `sweep` with whole numbers tile and stages in place of m, n and k."""
    name, _, axes = kind.partition("@")
    schema = load_schema(f"csv/{name}")
    if not axes:
        return schema

    def swapped(names: Sequence[str]) -> list[str]:
        first = next((name for name in names if name in SHAPE), None)
        return [
            new
            for old in names
            if old == first or old not in SHAPE
            for new in (axes.split(",") if old == first else [old])
        ]

    axis = {"type": "integer", "description": "the point's value on this axis"}
    nullable = {"nullable": True} if schema["columns"].get("k", {}).get("nullable") else {}
    declared = {column: schema["columns"].get(column, axis | nullable) for column in swapped(list(schema["columns"]))}
    return {**schema, "columns": declared} | ({"key": swapped(schema["key"])} if "key" in schema else {})


def columns(kind: str) -> dict[str, dict[str, Any]]:
    """Name -> {type, nullable, description, enum ...} of each column of a CSV kind, in file order."""
    return csv_schema(kind)["columns"]


def write_csv(kind: str, frame: Any, path: str | Path) -> None:
    """Write a DataFrame as CSV `kind`: its columns in the schema's order, whole or not at all.

    Raises RungsError where a column is missing, unknown, of another type or empty against the schema.
    """
    declared = columns(kind)
    unknown = [name for name in frame.columns if name not in declared]
    missing = [name for name in declared if name not in frame.columns]
    if unknown or missing:
        raise RungsError(
            f"{path}: column {(unknown or missing)[0]!r} is {'unknown to' if unknown else 'missing for'} a {kind} CSV."
        )
    text = io.StringIO()
    frame[list(declared)].to_csv(text, index=False, lineterminator="\n")
    parse_csv(kind, text.getvalue(), str(path))
    with whole(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def write_rows(kind: str, rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """`write_csv` for plain rows, one mapping per row, None for an empty cell.

    It does without pandas, whose import takes longer than what most jobs have to do. Raises RungsError as `write_csv` does.
    """
    declared = columns(kind)
    key = csv_schema(kind).get("key", ())
    text, seen = io.StringIO(), set()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(declared)
    for number, row in enumerate(rows, start=2):
        if odd := next((name for name in (*row, *declared) if name not in row or name not in declared), None):
            raise RungsError(
                f"{path}: column {odd!r} is {'missing for' if odd in declared else 'unknown to'} a {kind} CSV."
            )
        for name, rule in declared.items():
            if objection := breach(row[name], rule):
                raise RungsError(f"{path}, row {number}: {name} is {row[name]!r}, not {objection}.")
        if key and (place := tuple(row[name] for name in key)) in seen:
            raise RungsError(f"{path}, row {number}: the same {', '.join(key)} stands in an earlier row.")
        elif key:
            seen.add(place)
        writer.writerow(["" if row[name] is None else row[name] for name in declared])
    if not rows:
        raise RungsError(f"{path} would have no rows: a {kind} CSV has one for whatever was asked for.")
    with whole(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def breach(value: Any, rule: Mapping[str, Any]) -> str:
    """What a cell should be by its column's rule, or an empty string where it is that."""
    if value is None or value == "":
        return "" if rule.get("nullable", rule["type"] == "string") else f"{rule['type']}, which may not be empty"
    fits = {
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": _whole(None, value),
        "number": _finite(None, value),
    }[rule["type"]]
    if not fits:
        return str(rule["type"])
    if "enum" in rule and value not in rule["enum"]:
        return f"one of {', '.join(rule['enum'])}"
    if "exclusive_minimum" in rule and value <= rule["exclusive_minimum"]:
        return f"{rule['type']} above {rule['exclusive_minimum']}"
    return ""


def read_csv(kind: str, path: str | Path) -> Any:
    """Read a CSV of that kind into a DataFrame with the schema's dtypes.

    Raises RungsError naming file, row and fix for anything that the schema does not allow.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise RungsError(f"{path} does not exist: run `snakemake` to make it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RungsError(f"{path} cannot be read ({error}): delete it and run again.") from None
    return parse_csv(kind, text, str(path))


def parse_csv(kind: str, text: str, path: str) -> Any:
    """`read_csv` on the content of a file; `path` is for messages."""
    import pandas as pd

    fix = "restore it from version control" if kind in GIVEN else "delete the file and run again to make it anew"
    declared = columns(kind)
    if not text.endswith("\n"):
        raise RungsError(f"{path}, row {text.count(chr(10)) + 1}: ends in the middle of a line: {fix}.")
    lines = text.count("\n") - 1
    try:
        raw = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, on_bad_lines="error")
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError) as error:
        raise RungsError(f"{path} is not a {kind} CSV ({' '.join(str(error).split())}): {fix}.") from None
    if list(raw.columns) != list(declared):
        odd = next((a or b for a, b in itertools.zip_longest(raw.columns, declared, fillvalue="") if a != b), "")
        raise RungsError(
            f"{path}, row 1: column {odd!r} does not fit a {kind} CSV, whose columns are {', '.join(declared)}: {fix}."
        )
    if lines < 1:
        raise RungsError(f"{path} has no rows: {fix}.")
    if not isinstance(raw.index, pd.RangeIndex) or _ragged(text, len(declared)):
        raise RungsError(f"{path} has a row with more or fewer than {len(declared)} cells: {fix}.")
    frame = pd.DataFrame({name: _column(raw[name], name, rule, path, fix) for name, rule in declared.items()})
    key = csv_schema(kind).get("key")
    if key and frame.duplicated(key).any():
        row = int(frame.index[frame.duplicated(key)][0]) + 2
        raise RungsError(f"{path}, row {row}: the same {', '.join(key)} stands in an earlier row: {fix}.")
    return frame


def _ragged(text: str, cells: int) -> bool:
    """Whether a row has more or fewer cells. pandas would take the first columns for an index, or fill up what is missing."""
    if '"' not in text and text.count(",") == (cells - 1) * text.count("\n"):
        return False
    try:
        return any(len(row) != cells for row in csv.reader(io.StringIO(text)) if row)
    except csv.Error:
        return True


def _column(raw: Any, name: str, rule: Mapping[str, Any], path: str, fix: str) -> Any:
    """A column of strings with the schema's dtype. In numpy: a set has thousands of columns, and each step of pandas costs."""
    import numpy as np
    import pandas as pd

    text = raw.to_numpy(dtype=object)
    empty = text == ""
    if rule["type"] == "string":
        value, bad = raw.astype("str"), np.zeros(len(text), dtype=bool)
    elif rule["type"] == "boolean":
        value = raw.map({"True": True, "False": False, "": None}).astype("boolean")
        bad = value.isna().to_numpy() & ~empty
    else:
        number = np.asarray(pd.to_numeric(text, errors="coerce"))
        known = np.isfinite(number)
        if rule["type"] == "integer":
            known &= np.mod(number, 1, where=known, out=np.ones(len(text))) == 0
            known &= np.abs(np.where(known, number, 0)) < 2**62
            value = pd.Series(
                pd.arrays.IntegerArray(np.where(known, number, 0).astype(np.int64), ~known), index=raw.index
            )
        else:
            value = pd.Series(np.where(known, number, np.nan).astype(np.float64), index=raw.index)
        bad = ~known & ~empty
        if "exclusive_minimum" in rule:
            bad |= known & (np.where(known, number, np.inf) <= rule["exclusive_minimum"])
    if not rule.get("nullable", rule["type"] == "string"):
        bad |= empty
    if "enum" in rule and (odd := set(raw.unique()) - {*rule["enum"], ""}):
        bad |= np.isin(text, list(odd))
    if bad.any():
        row = int(np.argmax(bad))
        wanted = f"one of {', '.join(rule['enum'])}" if "enum" in rule else rule["type"]
        bound = f" above {rule['exclusive_minimum']}" if "exclusive_minimum" in rule else ""
        raise RungsError(f"{path}, row {row + 2}: {name} is {text[row]!r}, not {wanted}{bound}: {fix}.")
    return value
