"""The tokens of a CUDA source: what a compiler sees of it, without comments and layout."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from rungs.errors import RungsError
from rungs.files import sha256_json

TOKEN = re.compile(
    r"""(?P<gap>//[^\n]*|/\*.*?\*/|[^\S\n]+)|(?P<directive>\n\s*\#[^\n]*)|\n
    |(?P<token>"(?:\\.|[^"\\\n])*"|\.?\d(?:[eEpP][+-]|['\w.])*|'(?:\\.|[^'\\\n])*'|\w+
    |<<=|>>=|<=>|->\*|\.\.\.|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|\.\*|.)""",
    re.DOTALL | re.VERBOSE,
)
"""Preprocessing tokens (C++17, 5.4), the longest first. A directive is one token, since its spaces and its end have a meaning."""
PLACED = re.compile(r'__(?:LINE|FILE|DATE|TIME|COUNTER)__|\bassert\b|R"')
"""Words with which comments or layout can change what is compiled, or that this module does not take apart."""


@functools.cache
def tokens_hash(path: Path) -> str:
    """Return a hash of a source's tokens: two files with one hash compile to the same machine code.

    A source in which the place of a line has a meaning is hashed as it is, but for its line ends.
    """
    try:
        text = path.read_bytes().replace(b"\r\n", b"\n").decode("utf-8", errors="surrogateescape")
    except OSError as error:
        raise RungsError(f"{path} cannot be read ({error.strerror}).") from None
    found = [text] if PLACED.search(text) else _tokens(text)
    return sha256_json([token.encode("utf-8", errors="surrogateescape").hex() for token in found])


def _tokens(text: str) -> list[str]:
    found = []
    for match in TOKEN.finditer("\n" + text.replace("\\\n", "")):
        if match["token"]:
            found.append(match["token"])
        elif match["directive"]:
            found.append(" ".join(re.sub(r"//.*|/\*.*?\*/", " ", match["directive"]).split()))
    return found
