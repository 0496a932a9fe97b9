"""Arithmetic, comparisons, moves and conversions: pure functions of registers, remembered by the identity of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rungs.emulator.memory import PARAM_WINDOW, SHARED_WINDOW
from rungs.emulator.parser import Instruction, Register, Symbol
from rungs.emulator.state import DTYPES, Array, Decoder, Mask, Step, Unit, items, remember

Function = Callable[..., Any]


def pure(decoder: Decoder, ins: Instruction, sources: list[int], targets: list[int | None], function: Function) -> Step:
    """A step that writes `function` of the source registers: one array, or one for each target."""
    memo: dict[Any, Any] = {}
    many = len(targets) > 1
    target = targets[0]

    def step(unit: Unit, mask: Mask) -> None:
        registers = unit.registers
        values = [registers[slot] for slot in sources]
        key = tuple(map(id, values))
        held = memo.get(key)
        if held is None:
            result = function(*values)
            result = tuple(map(decoder.intern, result)) if many else decoder.intern(result)
            held = remember(memo, key, (values, result))
        if many:
            for slot, value in zip(targets, held[1], strict=True):
                if slot is not None:
                    unit.write(slot, value, mask)
        elif target is not None:
            unit.write(target, held[1], mask)

    return step


def plain(function: Function, ins: Instruction, decoder: Decoder, type: str, result: str | None = None) -> Step:
    """The common form: all operands and the result of one type, whatever the registers are declared as."""
    kind, *sources = ins.operands
    wanted = DTYPES[type]
    written = DTYPES[result or type]
    held = _declared(kind, ins)

    def typed(*values: Array) -> Array:
        return _fit(function(*(_view(value, wanted) for value in values)), written, held)

    slots = [decoder.source(operand, type, ins) for operand in sources]
    return pure(decoder, ins, slots, [decoder.target(kind, ins)], typed)


def _declared(operand: Any, ins: Instruction) -> np.dtype:
    if not isinstance(operand, Register):
        raise ins.error(f"writes to {operand!r}, where a register was expected")
    return DTYPES[operand.type]


def _view(value: Array, dtype: np.dtype) -> Array:
    """The value's bits as `dtype`; a wider register gives its low bits, a narrower one is extended with zeros."""
    if value.dtype == dtype:
        return value
    if value.dtype.itemsize == dtype.itemsize and value.dtype != bool:
        return value.view(dtype)
    return value.astype(f"u{dtype.itemsize}").view(dtype)


def _fit(value: Array, dtype: np.dtype, register: np.dtype) -> Array:
    """A result of type `dtype` as the register holds it: signed results are extended with their sign."""
    value = value.astype(dtype, copy=False)
    if register.itemsize == dtype.itemsize:
        return value.view(register) if value.dtype != register else value
    return value.astype(f"i{register.itemsize}" if dtype.kind == "i" else f"u{register.itemsize}").view(register)


# ---- functions of typed arrays ---------------------------------------------------------------------------------------


def _high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide) >> bits).astype(a.dtype)
    product = a.astype(object) * b.astype(object)
    return np.array([int(v) >> 64 & (1 << 64) - 1 for v in product.flat], "u8").reshape(product.shape).view(a.dtype)


def _shift_left(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(b < bits, a << np.minimum(b, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    beyond = a >> a.dtype.type(bits - 1) if a.dtype.kind == "i" else a.dtype.type(0)
    return np.where(b < bits, a >> np.minimum(b, bits - 1).astype(a.dtype), beyond)


def _divide(a: Array, b: Array) -> Array:
    """Towards zero; a division by zero, which PTX leaves open, gives all ones."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = (np.abs(a) // np.abs(safe)) * (np.sign(a) * np.sign(safe)) if a.dtype.kind == "i" else a // safe
    return np.where(b == 0, a.dtype.type(-1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max), quotient)


def _remainder(a: Array, b: Array) -> Array:
    return a - _divide(a, b) * b


def _insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: the low `length` bits of a into b at `position`."""
    bits = 8 * a.dtype.itemsize
    at, count = position & 255, np.minimum(length & 255, bits)
    wide = np.uint64
    ones = (wide(1) << np.minimum(count, 63).astype(wide)) - wide(1) | np.where(count == 64, ~wide(0), wide(0))
    field = np.where(at < bits, ones << np.minimum(at, 63).astype(wide), wide(0)).astype(a.dtype)
    return (b & ~field) | (_shift_left(a, at) & field)


def _extract(a: Array, position: Array, length: Array) -> Array:
    """bfe: `length` bits of a from `position`; signed ones are extended with the field's top bit."""
    bits = 8 * a.dtype.itemsize
    at, count = (position & 255).astype(np.int64), (length & 255).astype(np.int64)
    kept = _shift_right(a, np.minimum(at, bits))
    gap = np.clip(bits - count, 0, bits)
    value = _shift_right(_shift_left(kept, gap), gap)
    return np.where(count == 0, a.dtype.type(0), value)


def _lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    result = np.zeros((1, 1, 1), a.dtype)
    for row in range(8):
        if table >> row & 1:
            result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt in its default mode: each byte of the result is one of the eight of b:a, or its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros((1, 1, 1), np.uint32)
    for byte in range(4):
        choice = selector >> np.uint32(4 * byte) & np.uint32(15)
        value = (both >> ((choice & 7) * 8).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        value = np.where(choice & 8, np.where(value & 128, np.uint32(255), np.uint32(0)), value)
        result = result | value << np.uint32(8 * byte)
    return result


def _funnel(left: bool, clamp: bool) -> Function:
    def shift(low: Array, high: Array, amount: Array) -> Array:
        count = (np.minimum(amount, 32) if clamp else amount & 31).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        return (both << count >> np.uint64(32) if left else both >> count).astype(np.uint32)

    return shift


def _count_bits(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    value, zeros = a.astype(np.uint64), np.full(a.shape, bits, np.uint32)
    for bit in range(bits):
        zeros = np.where(value >> np.uint64(bit) & np.uint64(1), np.uint32(bits - 1 - bit), zeros)
    return zeros


def _find_bit(shift: bool) -> Function:
    """bfind: the position of the highest bit that is not the sign, or with .shiftamt how far it is from the top; else all ones."""

    def find(a: Array) -> Array:
        zeros = _leading_zeros(np.where(a < 0, ~a, a))
        bits = np.uint32(8 * a.dtype.itemsize)
        return np.where(zeros == bits, np.uint32(0xFFFFFFFF), zeros if shift else bits - 1 - zeros).astype(np.uint32)

    return find


def _reverse(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    result = np.zeros_like(a)
    for bit in range(bits):
        result |= (a >> a.dtype.type(bit) & a.dtype.type(1)) << a.dtype.type(bits - 1 - bit)
    return result


UNARY: dict[str, Function] = {
    "abs": np.abs,
    "neg": lambda a: (~a + a.dtype.type(1)) if a.dtype.kind != "f" else -a,
    "not": lambda a: ~a,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "rcp": lambda a: 1 / a,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "brev": _reverse,
}
LOGIC: dict[str, Function] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
BINARY: dict[str, Function] = LOGIC | {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "div": _divide,
    "rem": _remainder,
}


def _ordered(a: Array, b: Array) -> Array:
    return (a == a) & (b == b)


COMPARE: dict[str, Function] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & _ordered(a, b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | ~_ordered(a, b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: _ordered(a, b),
    "nan": lambda a, b: ~_ordered(a, b),
}
COMPARE |= {unsigned: COMPARE[name] for unsigned, name in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge"))}


# ---- instructions ----------------------------------------------------------------------------------------------------


def _type(ins: Instruction) -> str:
    """The last modifier that is a type."""
    for modifier in reversed(ins.modifiers):
        if modifier in DTYPES:
            return modifier
    raise ins.error("has no type that the emulator knows")


def _unary(decoder: Decoder, ins: Instruction) -> Step:
    return plain(UNARY[ins.opcode], ins, decoder, _type(ins))


def _binary(decoder: Decoder, ins: Instruction) -> Step:
    if ins.modifiers[0] in ("cc", "sat") or _type(ins) in ("f16x2", "bf16x2", "f16", "bf16"):
        raise ins.error("is a form that the emulator lacks")
    return plain(BINARY[ins.opcode], ins, decoder, _type(ins))


def _counting(decoder: Decoder, ins: Instruction) -> Step:
    return plain(_count_bits if ins.opcode == "popc" else _leading_zeros, ins, decoder, _type(ins), "u32")


def _find(decoder: Decoder, ins: Instruction) -> Step:
    return plain(_find_bit("shiftamt" in ins.modifiers), ins, decoder, _type(ins), "u32")


def _multiply(decoder: Decoder, ins: Instruction) -> Step:
    """mul and mad, .lo, .hi and .wide; mul, fma and mad of floats."""
    type, adds = _type(ins), ins.opcode != "mul"
    dtype = DTYPES[type]
    if type in ("f16x2", "bf16x2", "f16", "bf16") or "cc" in ins.modifiers:
        raise ins.error("is a form that the emulator lacks")
    if "wide" in ins.modifiers:
        wide = f"{type[0]}{int(type[1:]) * 2}"
        target, *sources = ins.operands
        slots = [decoder.source(operand, type, ins) for operand in sources[:2]]
        slots += [decoder.source(operand, wide, ins) for operand in sources[2:]]

        def widened(a: Array, b: Array, c: Array | None = None) -> Array:
            product = _view(a, dtype).astype(DTYPES[wide]) * _view(b, dtype).astype(DTYPES[wide])
            return _fit(
                product if c is None else product + _view(c, DTYPES[wide]), DTYPES[wide], _declared(target, ins)
            )

        return pure(decoder, ins, slots, [decoder.target(target, ins)], widened)
    if dtype == np.float32 and adds:
        return plain(lambda a, b, c: (a.astype("f8") * b + c).astype("f4"), ins, decoder, type)  # one rounding
    product = _high if "hi" in ins.modifiers else lambda a, b: a * b
    return plain((lambda a, b, c: product(a, b) + c) if adds else product, ins, decoder, type)


def _shift(decoder: Decoder, ins: Instruction) -> Step:
    type = _type(ins)
    target, value, amount = ins.operands
    function = _shift_left if ins.opcode == "shl" else _shift_right
    return pure(
        decoder,
        ins,
        [decoder.source(value, type, ins), decoder.source(amount, "u32", ins)],
        [decoder.target(target, ins)],
        lambda a, b: _fit(function(_view(a, DTYPES[type]), b), DTYPES[type], _declared(target, ins)),
    )


def _bits(decoder: Decoder, ins: Instruction) -> Step:
    """bfi, bfe: the last two operands are u32, whatever the type."""
    type = _type(ins)
    target, *sources = ins.operands
    function, typed = (_insert, 2) if ins.opcode == "bfi" else (_extract, 1)
    slots = [decoder.source(operand, type, ins) for operand in sources[:typed]]
    slots += [decoder.source(operand, "u32", ins) for operand in sources[typed:]]

    def apply(*values: Array) -> Array:
        views = [_view(value, DTYPES[type]) for value in values[:typed]]
        return _fit(function(*views, *values[typed:]), DTYPES[type], _declared(target, ins))

    return pure(decoder, ins, slots, [decoder.target(target, ins)], apply)


def _logic3(decoder: Decoder, ins: Instruction) -> Step:
    table = getattr(ins.operands[4], "value", None)
    if table is None:
        raise ins.error("has a table that is no number")
    cut = Instruction(ins.opcode, ins.modifiers, ins.operands[:4], ins.guard, ins.line, ins.frames)
    return plain(lambda a, b, c: _lop3(a, b, c, table), cut, decoder, "b32")


def _prmt(decoder: Decoder, ins: Instruction) -> Step:
    if ins.modifiers != ("b32",):
        raise ins.error("is a mode of prmt that the emulator lacks")
    return plain(_permute, ins, decoder, "b32")


def _shf(decoder: Decoder, ins: Instruction) -> Step:
    return plain(_funnel(ins.modifiers[0] == "l", ins.modifiers[1] == "clamp"), ins, decoder, "b32")


def _predicate(decoder: Decoder, operand: Any, ins: Instruction) -> tuple[int, bool]:
    return decoder.source(operand, "pred", ins), isinstance(operand, Register) and operand.negated


def _compare(decoder: Decoder, ins: Instruction) -> Step:
    """setp.cmp{.bool}.type p{|q}, a, b{, c}: q is the comparison's opposite, each combined with c."""
    type = _type(ins)
    if type in ("f16x2", "bf16x2", "f16", "bf16"):
        raise ins.error("is a form that the emulator lacks")
    compare = COMPARE[ins.modifiers[0]]
    combine = LOGIC.get(ins.modifiers[1])
    targets = [decoder.target(item, ins) for item in items(ins.operands[0])]
    slots = [decoder.source(operand, type, ins) for operand in ins.operands[1:3]]
    negated = False
    if combine:
        slot, negated = _predicate(decoder, ins.operands[3], ins)
        slots.append(slot)

    def apply(a: Array, b: Array, c: Array | None = None) -> Any:
        result = compare(_view(a, DTYPES[type]), _view(b, DTYPES[type]))
        both = [result, ~result] if len(targets) > 1 else [result]
        if combine and c is not None:
            both = [combine(each, ~c if negated else c) for each in both]
        return tuple(both) if len(both) > 1 else both[0]

    return pure(decoder, ins, slots, targets, apply)


def _select(decoder: Decoder, ins: Instruction) -> Step:
    type = _type(ins)
    target, yes, no, choice = ins.operands
    slot, negated = _predicate(decoder, choice, ins)
    held = _declared(target, ins)

    def apply(a: Array, b: Array, p: Array) -> Array:
        if p.size == 1:
            return _view(a if bool(p.item()) != negated else b, held)
        return np.where(~p if negated else p, _view(a, held), _view(b, held))

    slots = [decoder.source(yes, type, ins), decoder.source(no, type, ins), slot]
    return pure(decoder, ins, slots, [decoder.target(target, ins)], apply)


def _on_predicates(decoder: Decoder, ins: Instruction) -> Step:
    """and, or, xor, not and mov of predicates, whose operands may be negated."""
    target, *sources = ins.operands
    read = [_predicate(decoder, operand, ins) for operand in sources]
    function = {"mov": lambda a: a, "not": lambda a: ~a, **LOGIC}[ins.opcode]
    return pure(
        decoder,
        ins,
        [slot for slot, _ in read],
        [decoder.target(target, ins)],
        lambda *values: function(*(~v if n else v for v, (_, n) in zip(values, read, strict=True))),
    )


def _move(decoder: Decoder, ins: Instruction) -> Step:
    """mov of a register, a number, an address; {lo, hi} packs or unpacks."""
    type = _type(ins)
    target, value = ins.operands
    inputs, outputs = items(value), items(target)
    if type == "pred":
        return _on_predicates(decoder, ins)
    if isinstance(value, Symbol) and value.name in CLOCKS:
        return _clock(decoder, ins)
    if len(inputs) == len(outputs) == 1:
        return plain(lambda a: a, ins, decoder, type)
    parts = max(len(inputs), len(outputs))
    bits = int(type[1:]) // parts
    part, whole = np.dtype(f"u{bits // 8}"), np.dtype(f"u{bits * parts // 8}")
    slots = [decoder.source(item, f"b{bits}" if len(inputs) > 1 else type, ins) for item in inputs]
    targets = [decoder.target(item, ins) for item in outputs]
    if len(inputs) > 1:

        def pack(*values: Array) -> Array:
            packed = sum(_view(v, part).astype(whole) << whole.type(bits * i) for i, v in enumerate(values))
            return _view(np.asarray(packed), _declared(target, ins))

        return pure(decoder, ins, slots, targets, pack)

    def unpack(value: Array) -> Any:
        pieces = [(_view(value, whole) >> whole.type(bits * i)).astype(part) for i in range(parts)]
        return tuple(
            piece if slot is None else _view(piece, _declared(item, ins))
            for piece, slot, item in zip(pieces, targets, outputs, strict=True)
        )

    return pure(decoder, ins, slots, targets, unpack)


CLOCKS = ("%clock", "%clock64")


def _clock(decoder: Decoder, ins: Instruction) -> Step:
    """The emulator has no time: each look at the clock finds it one further, so that no difference is negative."""
    target = decoder.target(ins.operands[0], ins)
    dtype = DTYPES[_type(ins)]

    def step(unit: Unit, mask: Mask) -> None:
        unit.batch.ticks += 1
        if target is not None:
            held = np.full((1, 1, 1), unit.batch.ticks, dtype)
            unit.write(target, _view(held, _declared(ins.operands[0], ins)), mask)

    return step


def _convert(decoder: Decoder, ins: Instruction) -> Step:
    """cvt between integers, floats, and to bf16x2, f16x2 and tf32."""
    types = [modifier for modifier in ins.modifiers if modifier in DTYPES]
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    mode = next((rounding[m] for m in ins.modifiers if m in rounding), None)
    target, *sources = ins.operands
    slots = [decoder.source(operand, types[-1], ins) for operand in sources]
    out, source = types[0], types[-1]
    held = _declared(target, ins)

    def narrow(value: Array) -> Array:
        """f32 to 16 bits."""
        if out.startswith("bf16"):
            return round_to_bf16(value)
        return value.astype(np.float16).view(np.uint16)

    def apply(a: Array, b: Array | None = None) -> Array:
        if b is not None:  # the first operand goes to the upper half
            return narrow(_view(a, DTYPES["f32"])).astype(np.uint32) << np.uint32(16) | narrow(_view(b, DTYPES["f32"]))
        if out == "tf32":
            return _view((_view(a, np.dtype("u4")) + np.uint32(0x1000)) & np.uint32(0xFFFFE000), held)
        if source in ("f16", "bf16"):
            half = _view(a, np.dtype("u2"))
            value = half.view(np.float16).astype("f4") if source == "f16" else widen_bf16(half)
        else:
            value = _view(a, DTYPES[source])
        if out in ("f16", "bf16"):
            return _fit(narrow(value.astype("f4")), np.dtype("u2"), held)
        dtype = DTYPES[out]
        if value.dtype.kind == "f" and dtype.kind != "f":
            info = np.iinfo(dtype)
            value = np.clip(np.nan_to_num((mode or np.trunc)(value.astype("f8"))), float(info.min), float(info.max))
            return _fit(value.astype(dtype), dtype, held)
        if value.dtype.kind == "f" and mode:
            value = mode(value)
        if "sat" in ins.modifiers:
            low, high = (0, 1) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            value = np.clip(value, max(low, np.iinfo(value.dtype).min) if value.dtype.kind != "f" else low, high)
        return _fit(value, dtype, held)

    return pure(decoder, ins, slots, [decoder.target(target, ins)], apply)


def round_to_bf16(value: Array) -> Array:
    """float32 to bf16 bits, to nearest even; NaN stays NaN."""
    bits = value.view(np.uint32)
    rounded = (bits + (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded.astype(np.uint16))


def widen_bf16(value: Array) -> Array:
    """bf16 bits to float32."""
    return (value.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_space(decoder: Decoder, ins: Instruction) -> Step:
    """cvta between generic addresses and those of a state space."""
    windows = {"shared": SHARED_WINDOW, "param": PARAM_WINDOW, "global": 0}
    space = next((m.split("::")[0] for m in ins.modifiers if m != "to"), "")
    if space not in windows or _type(ins) != "u64":
        raise ins.error("converts an address in a way that the emulator lacks")
    offset = np.uint64(windows[space])
    return plain((lambda a: a - offset) if "to" in ins.modifiers else (lambda a: a + offset), ins, decoder, "u64")


def _shared_window(decoder: Decoder, ins: Instruction) -> Step:
    """isspacep.shared."""
    if "shared" not in ins.modifiers[0]:
        raise ins.error("asks for a state space that the emulator lacks")
    target, value = ins.operands
    return pure(
        decoder,
        ins,
        [decoder.source(value, "u64", ins)],
        [decoder.target(target, ins)],
        lambda a: (a >= SHARED_WINDOW) & (a < SHARED_WINDOW + (1 << 24)),
    )


def _logical(decoder: Decoder, ins: Instruction) -> Step:
    if ins.modifiers == ("pred",):
        return _on_predicates(decoder, ins)
    return (_unary if ins.opcode == "not" else _binary)(decoder, ins)


COMPILE: dict[str, Callable[[Decoder, Instruction], Step]] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(("and", "or", "xor", "not"), _logical),
    **dict.fromkeys(("mul", "mad", "fma"), _multiply),
    **dict.fromkeys(("popc", "clz"), _counting),
    "bfind": _find,
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("bfi", "bfe"), _bits),
    "lop3": _logic3,
    "prmt": _prmt,
    "shf": _shf,
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvt": _convert,
    "cvta": _to_space,
    "isspacep": _shared_window,
}
