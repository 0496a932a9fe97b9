"""PTX text as instructions with their operands, their place in the file and in the CUDA source."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rungs.errors import RungsError, shown

SUPPORTED = ((7, 0), (9, 0))
"""PTX ISA versions, oldest and newest, whose instructions mean what this package does with them."""
WRAPPERS = tuple(
    f"{name}.cuh"
    for name in ("ptx", "mma", "wgmma", "copy_engine", "cluster", "gpu_scope", "dependent_launch", "shared_reads")
)
"""Headers of one function per instruction: a report names the line that calls them."""
MOST_REGISTERS = 1_000_000
"""Of a kernel. NVIDIA's compiler declares thousands; a million is a damaged number."""
MOST_BRACKETS = 100
"""Of an instruction, of which those of four groups have the most."""
LONGEST = 600
"""Letters of a message that are shown: a damaged statement may be the rest of the file."""
REGISTER_BITS = {"pred": 1, "f16": 16, "f32": 32, "f64": 64, **{f"{t}{b}": b for t in "bus" for b in (8, 16, 32, 64)}}


class EmulationError(RungsError):
    """One sentence: the PTX line, the CUDA source line, what happened and what was expected.

    `findings` are the races that had been found when the kernel was stopped.
    """

    findings: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Register:
    name: str
    type: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A number; floats are kept as their bits, with `bits` 32 or 64, and integers have `bits` 0."""

    value: int
    bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """The address of a parameter or a shared variable, or a special register (`%tid.x`), or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Group:
    """`{a, b}`; for `a|b` too."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of a tensor."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: Group | None = None


Operand = Register | Immediate | Symbol | Group | Address
SINK = Symbol("_")


@dataclass(frozen=True)
class Instruction:
    """`opcode` with its dotted modifiers. `frames` are the source lines, innermost first, each inlined at the next."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    frames: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    @property
    def source(self) -> str:
        """The CUDA line to look at: the innermost outside the one-instruction wrappers, and where that is inlined."""
        calling = [frame for frame in self.frames if not frame.split(":")[0].endswith(WRAPPERS)] or list(self.frames)
        return " in ".join(calling[:2]) if calling else "no source line: compile with -lineinfo"

    @property
    def where(self) -> str:
        return f"PTX line {self.line} ({self.name}; {self.source})"

    def error(self, sentence: str) -> EmulationError:
        """`sentence` goes on after the place, for example "reads ..., where ... was expected"."""
        return EmulationError(f"{self.where} {sentence}.")


@dataclass(frozen=True)
class Variable:
    """A parameter or a shared variable: `size` and `align` in bytes; size 0 is dynamic shared memory."""

    name: str
    size: int
    align: int
    offset: int = 0


@dataclass
class Kernel:
    name: str
    target: str
    params: list[Variable] = field(default_factory=list)
    shared: list[Variable] = field(default_factory=list)
    max_threads: int | None = None
    registers: dict[str, str] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|[{}]|;|[^\S\n]+|\n|[^\s{};/"]+|/', re.S)
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)[uU]?$")
_NAME = re.compile(r"([%$_a-zA-Z][\w$%.]*)(?:\s*\+\s*(-?\w+))?$")


def load(path: Path, entry: str) -> Kernel:
    """The kernel `entry` of a PTX file. Raises EmulationError where the file cannot be read or understood."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EmulationError(f"{path} is not readable PTX ({error}): build the variant first.") from None
    if not text.strip():
        raise EmulationError(f"{path} is empty: the variant did not build, and its manifest says why.")
    return parse(text, entry)


@functools.lru_cache(maxsize=8)
def parse(text: str, entry: str) -> Kernel:
    """The kernel `entry` of a PTX module, the same object for the same text: it is not to be changed.

    Raises EmulationError for another ISA version than `SUPPORTED`, a missing entry and a statement of unknown form.
    """
    try:
        return _parse(text, entry)
    except EmulationError as error:
        raise EmulationError(shown(str(error), LONGEST)) from None  # it quotes the statement
    except (ArithmeticError, LookupError, RecursionError, ValueError, struct.error) as error:
        raise EmulationError(
            f"The PTX of {entry!r} is not what the emulator can read ({shown(repr(error))}): build the variant again."
        ) from None


def _parse(text: str, entry: str) -> Kernel:
    version = re.search(r"^[ \t]*\.version\s+(\d+)\.(\d+)", text, re.M)
    found = (int(version[1]), int(version[2])) if version else (0, 0)
    if not SUPPORTED[0] <= found <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise EmulationError(
            f"The PTX is of ISA version {found[0]}.{found[1]}, where {low} to {high} was expected: compile with CUDA 13.0."
        )
    target = re.search(r"^[ \t]*\.target\s+(\w+)", text, re.M)
    start = re.search(rf"\.entry\s+{re.escape(entry)}\s*\(", text)
    if start is None or target is None:
        raise EmulationError(f"The PTX has no entry {entry!r}.")
    files = {number: _tidy(name) for number, name in re.findall(r'^[ \t]*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    kernel = Kernel(entry, target[1])
    for match in re.finditer(r"^[ \t]*\.(?:extern|visible)?[ .]*shared ([^;{}]*);", text[: start.start()], re.M):
        kernel.shared.append(_variable(match[1]))
    opening = text.find("{", start.end())
    if opening < 0:
        raise EmulationError(f"The PTX ends before the body of {entry!r}: the file is cut, so build the variant again.")
    head, line = text[start.end() : opening], text.count("\n", 0, opening) + 1
    offset = 0
    for declared in re.findall(r"\.param ([^,)]*)", head):
        param = _variable(declared)
        offset = -(-offset // param.align) * param.align
        kernel.params.append(Variable(param.name, param.size, param.align, offset))
        offset += param.size
    if bound := re.search(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head):
        kernel.max_threads = int(bound[1]) * int(bound[2] or 1) * int(bound[3] or 1)
    _body(kernel, _statements(text[opening:], line), files)
    return kernel


def _tidy(name: str) -> str:
    """`kernels/gemm/../ptx.cuh` as `kernels/ptx.cuh`."""
    parts: list[str] = []
    for part in name.split("/"):
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _variable(declared: str) -> Variable:
    """`.align 8 .b8 name[16]`, `.u32 name` or `.b8 name[]`."""
    declared = re.sub(r"\.ptr(\s+\.\w+)*?\s+\.align\s+\d+", "", declared)  # what a pointer points to
    match = re.search(r"\.([bfsu]\d+)\s+([\w$%]+)(?:\[(\d*)\])?\s*$", declared.strip())
    if match is None:
        raise EmulationError(f"The PTX declares {declared.strip()!r}, which is no variable that the emulator knows.")
    item = REGISTER_BITS[match[1]] // 8
    count = int(match[3]) if match[3] else 1 if match[3] is None else 0
    align = re.search(r"\.align\s+(\d+)", declared)
    return Variable(match[2], item * count, int(align[1]) if align else item)


def _blank(text: str) -> bool:
    """Without a copy: a cut file may be one statement of megabytes, of which this is asked at each word."""
    return not text or text.isspace()


def _statements(body: str, line: int) -> Iterator[tuple[str, int]]:
    """Statements of a function body up to its closing brace, with the line each starts on; `{` and `}` of scopes too.

    A brace right after an operator belongs to a vector operand, one at the start of a statement opens a scope.
    """
    pending, first, depth, vector = "", line, 0, False
    for token in _TOKEN.findall(body):
        if token == "\n":
            line += 1
            if re.match(r"\s*\.loc", pending):
                yield pending, first
                pending = ""
            elif _blank(pending):
                pending = ""
            else:
                pending += " "
        elif token.startswith(("//", "/*")):
            line += token.count("\n")
        elif token == "{" and _blank(pending):
            depth += 1
            yield token, line
        elif token == "}" and not vector:
            depth -= 1
            yield token, line
            if depth == 0:
                return
        elif token == ";":
            yield pending, first
            pending = ""
        else:
            vector = token == "{" or (vector and token != "}")
            if _blank(pending):
                pending, first = "", line
            pending += token
            if token.endswith(":") and re.fullmatch(r"\s*[\w$%]+:", pending):
                yield pending, first
                pending = ""
    raise EmulationError(
        f"The PTX ends in line {line} before the kernel's closing brace: the file is cut, so build the variant again."
    )


def _body(kernel: Kernel, statements: Iterator[tuple[str, int]], files: dict[str, str]) -> None:
    """Fill the kernel with registers, labels and instructions."""
    scopes: list[dict[str, str]] = []
    inlined: dict[tuple[str, ...], tuple[str, ...]] = {}
    frames: tuple[str, ...] = ()
    for number, (statement, line) in enumerate(statements):
        text = statement.strip()
        if text == "{":
            scopes.append({})
        elif text == "}":
            scopes.pop()
        elif text.startswith(".loc"):
            frames = _frames(text, files, inlined)
        elif text.startswith(".reg"):
            match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
            if match is None or match[1] not in REGISTER_BITS:
                raise EmulationError(f"PTX line {line} declares registers of a type that the emulator lacks: {text}.")
            for name in (part.strip() for part in match[2].split(",")):
                if counted := re.fullmatch(r"(\S+)<(\d+)>", name):
                    if int(counted[2]) + len(kernel.registers) > MOST_REGISTERS:
                        raise EmulationError(
                            f"PTX line {line} declares {counted[2]} registers, where {MOST_REGISTERS} of a kernel are the most:"
                            " build the variant again."
                        )
                    kernel.registers.update({f"{counted[1]}{i}": match[1] for i in range(int(counted[2]))})
                else:  # inline asm declares the same scoped name again and again
                    unique = name if len(scopes) == 1 else f"{name}#{number}"
                    scopes[-1][name] = unique
                    kernel.registers[unique] = match[1]
        elif text.startswith(".shared"):
            kernel.shared.append(_variable(text.removeprefix(".shared")))
        elif text.endswith(":"):
            kernel.labels[text[:-1]] = len(kernel.code)
        elif text and not text.startswith("."):
            kernel.code.append(_instruction(text, line, frames, kernel, scopes))


def _frames(text: str, files: dict[str, str], inlined: dict[tuple[str, ...], tuple[str, ...]]) -> tuple[str, ...]:
    """Source lines of a `.loc`, innermost first; `inlined` remembers what each position is inlined at."""
    match = re.match(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?", text)
    if match is None:
        return ()
    position, at = match.groups()[:3], match.groups()[3:]
    inlined[position] = at if at[0] is not None else ()
    frames: list[str] = []
    while position and len(frames) < 16:
        frames.append(f"{files.get(position[0], '?')}:{position[1]}")
        position = inlined.get(position, ())
    return tuple(frames)


def _instruction(
    text: str, line: int, frames: tuple[str, ...], kernel: Kernel, scopes: list[dict[str, str]]
) -> Instruction:
    match = re.match(r"(?:@(!?)\s*([\w$%.]+)\s+)?([a-zA-Z][\w:]*)((?:\.[\w:]+)*)\s*(.*)", text, re.S)
    if match is None or text.count("{") + text.count("[") > MOST_BRACKETS:
        raise EmulationError(f"PTX line {line} is no instruction that the emulator can read: {text}.")
    negated, guard, opcode, modifiers, rest = match.groups()

    def operand(part: str) -> Operand:
        part = part.strip()
        if part.startswith("{"):
            return Group(tuple(operand(item) for item in _split(part[1:-1])))
        if part.startswith("["):
            inner = _split(part[1:-1])
            base = operand(inner[0])
            coordinates = operand(inner[1]) if len(inner) > 1 else None
            offset = base.offset if isinstance(base, Address) else 0
            base = base.base if isinstance(base, Address) else base
            if isinstance(base, Register | Immediate | Symbol) and (
                coordinates is None or isinstance(coordinates, Group)
            ):
                return Address(base, offset, coordinates)
        if part.startswith("!"):
            inverse = operand(part[1:])
            if isinstance(inverse, Register):
                return Register(inverse.name, inverse.type, True)
        if "|" in part:
            return Group(tuple(operand(item) for item in part.split("|")))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", part):
            return Immediate(int(part[2:], 16), 32)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", part):
            return Immediate(int(part[2:], 16), 64)
        if number := _NUMBER.match(part):
            return Immediate(int(number[0].rstrip("uU"), 0))
        if re.fullmatch(r"-?\d+\.\d*", part):
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(part)))[0], 64)
        if named := _NAME.match(part):
            name, offset = named[1], int(named[2] or "0", 0)
            for scope in reversed(scopes):
                name = scope.get(name, name)
            if name in kernel.registers:
                register = Register(name, kernel.registers[name])
                return Address(register, offset) if named[2] else register
            return Symbol(name, offset)
        raise EmulationError(f"PTX line {line} has an operand that the emulator cannot read: {part!r} in {text}.")

    operands = tuple(operand(part) for part in _split(rest)) if rest.strip() else ()
    held = operand(guard) if guard else None
    if guard and not isinstance(held, Register):
        raise EmulationError(f"PTX line {line} is guarded by {guard!r}, which is no register.")
    if isinstance(held, Register) and negated:
        held = Register(held.name, held.type, True)
    assert held is None or isinstance(held, Register)
    return Instruction(opcode, tuple(modifiers.split(".")[1:]), operands, held, line, frames)


def _split(text: str) -> list[str]:
    """At commas outside of brackets and braces."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
