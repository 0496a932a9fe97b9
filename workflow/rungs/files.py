"""Files that are written whole or not at all, and hashes that do not depend on the machine."""

from __future__ import annotations

import contextlib
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


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object, or one sentence that says what is wrong with the file."""
    return read_json_and_hash(path)[0]


def read_json_and_hash(path: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """`read_json`, and the hash of the file that was read."""
    try:
        data = Path(path).read_bytes()
        value = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise RungsError(f"{path} does not exist: run the rule that makes it.") from None
    except (OSError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RungsError(f"{path} is not readable JSON ({error}): delete it and run again.") from None
    if not isinstance(value, dict):
        raise RungsError(f"{path} holds a {type(value).__name__} where an object is expected: delete it and run again.")
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


def module_hash(*names: str) -> str:
    """Hash of the source of modules of this package, for a rule's params: it changes when the code that makes a file does."""
    package = Path(__file__).parent
    return sha256_json([sha256_file(package / f"{name}.py") for name in names])[:16]
