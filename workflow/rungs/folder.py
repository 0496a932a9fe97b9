"""The folder that Snakemake works in: that it takes what is written, and that a lock of a Snakemake that was killed is gone."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from rungs.errors import RungsError
from rungs.files import remove_begun

OWN = Path(".snakemake/rungs.lock")
"""Held by every Snakemake of rungs as long as it lives: the kernel gives it back however the process ends."""
LEFT = Path(".snakemake/locks")
"""Snakemake's own, which outlive it when it is killed, and of which nothing says whose they are."""
ROOM = 1 << 20
"""Bytes that must fit, for what Snakemake keeps of a run: with less it ends in the middle, with a traceback."""


def enter(*places: str) -> tuple[IO[bytes], str]:
    """(what must be kept open as long as this Snakemake runs, what the user is to know of others, or an empty string).

    `places` are the folders that will be written to, where they exist. A lock that is left is only removed where no other Snakemake
    of rungs is in the folder. Raises RungsError where nothing can be written.
    """
    where = OWN.parent
    try:
        where.mkdir(exist_ok=True)
        held = OWN.open("wb", buffering=0)
        why = "" if held.write(bytes(ROOM)) == ROOM else os.strerror(errno.ENOSPC)
        held.truncate(0)
    except OSError as error:
        why = error.strerror or str(error)
    for place in map(Path, places):
        if not why and place.exists() and not os.access(place, os.W_OK):
            where, why = place, "it is read-only"
    if why:
        raise RungsError(
            f"{where.resolve()} cannot be written ({why}): free some space, make the folder writable, or work in another one with"
            " --directory."
        )
    remove_begun(Path("results"))
    note = ""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in LEFT.glob("*.lock"):
            lock.unlink()
            note = "A run in this folder was killed: what it had begun is done again."
    except BlockingIOError:
        note = "Another Snakemake works in this folder: where both make the same files, wait until it has ended."
    except OSError:  # the file system has no such locks: Snakemake's is all there is
        return held, note
    fcntl.flock(held, fcntl.LOCK_SH)
    return held, note
