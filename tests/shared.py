"""What several test processes make once for all of them: a folder of the whole run, and a lock for each thing in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "RUNGS_TESTS_SHARED"
"""Of the environment variable that conftest.py sets for pytest-xdist's workers."""


def folder() -> Path:
    return Path(os.environ[NAME])


@contextmanager
def alone(name: str) -> Iterator[None]:
    """One process at a time; the others wait and then find what the first has made."""
    path = folder() / "locks" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
