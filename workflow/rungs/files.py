"""Files that are written whole or not at all, and hashes that do not depend on the machine."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rungs.errors import RungsError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: `Snakefile`, `kernels/`, `config/`."""
BEGUN = re.compile(r"\..+\.(csv|gz|json|md|png|ptx|sed|svg)\.[a-z0-9_]{8}")
"""Names of the temporary files of `whole`, for what is made under `results/`."""


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed onto it on success and removed on failure."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise RungsError(
            f"{path} cannot be written ({error.strerror}): make its folder writable or free some space."
        ) from error
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise RungsError(
            f"{path} cannot be written ({error.strerror}): make its folder writable or free some space."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_begun(folder: Path, seconds: float = 60.0) -> None:
    """Remove what a process that was killed had begun to write under `folder` and nobody has touched for so long."""
    for place, _, names in os.walk(folder):
        for name in filter(BEGUN.fullmatch, names):
            with contextlib.suppress(OSError):
                path = Path(place) / name
                if time.time() - path.stat().st_mtime > seconds:
                    path.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], fix: str = "delete it and run again") -> dict[str, Any]:
    """A JSON object, or one sentence that says what is wrong with the file and ends in the fix."""
    return read_json_and_hash(path, fix)[0]


def read_json_and_hash(
    path: str | os.PathLike[str], fix: str = "delete it and run again"
) -> tuple[dict[str, Any], str]:
    """`read_json`, and the hash of the file that was read."""
    try:
        data = Path(path).read_bytes()
        value = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        asked = "run the rule that makes it" if fix == "delete it and run again" else fix
        raise RungsError(f"{path} does not exist: {asked}.") from None
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RungsError(f"{path} is not readable JSON ({error}): {fix}.") from None
    if not isinstance(value, dict):
        raise RungsError(f"{path} holds a {type(value).__name__} where an object is expected: {fix}.")
    return value, sha256_bytes(data)


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hash of a file's bytes."""
    try:
        return sha256_bytes(Path(path).read_bytes())
    except OSError as error:
        raise RungsError(f"{path} cannot be read ({error.strerror}).") from None


def sha256_text(path: str | os.PathLike[str]) -> str:
    """Return the hash of a source file, the same with the line ends of any system."""
    try:
        return sha256_bytes(Path(path).read_bytes().replace(b"\r\n", b"\n"))
    except OSError as error:
        raise RungsError(f"{path} cannot be read ({error.strerror}).") from None


def sha256_json(value: Any) -> str:
    """Hash of a JSON value in canonical form: sorted keys, no spaces."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


# ---- what a module does, whatever it looks like ----------------------------------------------------------------------

NO_CODE = ("kind", "type_comment")
"""Fields of a syntax tree that say how the source was written, or that only a type checker reads."""


def module_hash(*names: str) -> str:
    """Hash of the code of modules of this package, for a rule's params: it changes when what they do may have changed."""
    package = Path(__file__).parent
    return sha256_json([syntax_hash(package / f"{name}.py") for name in names])[:16]


@functools.cache
def syntax_hash(path: Path) -> str:
    """Hash of the syntax tree of a Python file.

    Comments, docstrings, layout and line ends take no part. It is the same on every Python that can parse the file, which
    the text of `ast.dump` is not.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise RungsError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    return sha256_bytes(json.dumps(_canonical(tree), separators=(",", ":")).encode())


def _canonical(node: Any) -> Any:
    """A tree as JSON: each node its type and its fields by name, without positions, empty fields and lone strings."""
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", _parts(node.values)]
    if isinstance(node, ast.AST):
        written: list[Any] = [type(node).__name__]
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if value is not None and value != [] and name not in NO_CODE:
                written += name, _canonical(value)
        return written
    if isinstance(node, list):
        return [_canonical(child) for child in node if not _is_docstring(child)]
    if isinstance(node, str):
        return ["str", node]
    return [type(node).__name__, repr(node)]


def _is_docstring(node: Any) -> bool:
    """Whether a statement is a lone string: documentation of a module, function, class or constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _parts(values: list[ast.expr]) -> list[Any]:
    """The parts of an f-string, with its text in as few pieces as possible: Python 3.12 cuts it elsewhere than 3.11."""
    parts: list[Any] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            parts.append(_canonical(value))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        elif value.value:
            parts.append(str(value.value))
    return parts
