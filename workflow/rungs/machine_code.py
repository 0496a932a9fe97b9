"""The machine code of a cubin: what a GPU executes, apart from names, paths and line numbers."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

from rungs.errors import RungsError

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
NOBITS = 8
ENTRY = ".nv.constant0."
"""Start of the name of the section that only kernels have: their parameters."""
NAMES = re.compile(
    r"\.(nv\.merc\.)?("  # from sm_100 on most sections stand twice
    r"(rela?\.)?(nv_)?debug_"  # line tables and the PTX text
    r"|shstrtab|strtab|symtab)"
    r"|\.note\.nv\.tkinfo"  # the assembler's command line
)
"""Sections that hold only names, paths, dates and line numbers."""


def code_hash(cubin: Path) -> str:
    """Return the SHA-256 of a cubin's code, constants and resource metadata, 64 hexadecimal digits.

    Two cubins with one hash run alike: the instructions with their scheduling bits (`.text`), constants and initialised
    data (`.nv.constant*`, `.nv.global*`), relocations, the size of static shared memory, and registers, barriers, stack and parameters
    (`.nv.info*`, CUDA Binary Utilities 13.0). Debug sections, symbol names and section names take no part. Raises RungsError for a
    file that is no 64-bit ELF.
    """
    digest = hashlib.sha256()
    entries = []
    for name, flags, size, align, content in _sections(cubin):
        if name.startswith(ENTRY):
            entries.append(name.removeprefix(ENTRY))
        digest.update(f"{_kind(name)} {flags} {size} {align}\n".encode() + content)
    if len(entries) > 1:  # then which code is launched is a matter of its name
        digest.update(" ".join(entries).encode())
    return digest.hexdigest()


def ptx_hash(ptx: Path) -> str:
    """Return the SHA-256 of PTX without line numbers, files, comments and debug sections: what the emulator executes."""
    text = ptx.read_text(encoding="utf-8").partition("\n\t.section\t.debug")[0]
    lines = (line.split("//")[0].strip() for line in text.splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file")))
    return hashlib.sha256(code.encode()).hexdigest()


def _sections(cubin: Path) -> list[tuple[str, int, int, int, bytes]]:
    """Return (name, flags, size, alignment, content) of each section that takes part, and of the ELF header its flags."""
    try:
        data = cubin.read_bytes()
        header = ELF_HEADER.unpack_from(data)
        table, flags, entry_bytes, entries, names_at = header[6], header[7], *header[11:14]
        if header[0][:5] != b"\x7fELF\x02":
            raise ValueError
        sections = [SECTION_HEADER.unpack_from(data, table + entry_bytes * at) for at in range(entries)]
        names = data[sections[names_at][4] :]
        found = [("elf", flags, 0, 0, b"")]
        for name_at, kind, section_flags, _, offset, size, _, _, align, _ in sections:
            name = names[name_at : names.index(b"\0", name_at)].decode()
            if not NAMES.match(name):
                content = b"" if kind == NOBITS else data[offset : offset + size]
                if kind != NOBITS and len(content) != size:
                    raise ValueError
                found.append((name, section_flags, size, align, content))
    except (OSError, IndexError, OverflowError, ValueError, struct.error):
        raise RungsError(f"{cubin} is no cubin: delete its folder and build the variant again.") from None
    return found


def _kind(name: str) -> str:
    """Return a section's name without the kernel or function that it belongs to: `.nv.info` of `.nv.info.gemm`."""
    match = re.match(r"(\.rela?)?(\.nv\.[a-z]+\d*|\.[a-z]+)", name)
    return match[0] if match else name
