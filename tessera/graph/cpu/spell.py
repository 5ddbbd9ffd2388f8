"""Spells a loop expression in the instructions of `instructions.py` and `maths.py`, fully typed.

Every cast is written out, so nothing is left to Numba's promotion (which would widen f32 * 0.5 to
f64 and i32 + i32 to i64); the rules are NumPy's for arrays of the same types.
"""

from __future__ import annotations

import math
from typing import Any

from ...errors import ArgumentError
from .expressions import ExpressionNode, literal_type, parse, promote
from .vocabulary import FUNCTIONS

NAMED = {"+": "add", "-": "sub", "*": "mul", "&": "and", "|": "or", "^": "xor", "<<": "shl",
         ">>": "shr"}
FLOATS = ("f32", "f64")


def spell(template: str, names: tuple[str, ...], dtypes: tuple[str, ...], result: str) -> str:
    """The text of a map: `template` over variables `names` of these registers, cast to `result`."""
    literal = literal_type(dtypes, result)
    text, dtype = _spell(parse(template), names, dtypes, literal)
    return cast(text, dtype, result)


def cast(text: str, source: str, target: str) -> str:
    """`text` of register `source` as register `target`."""
    return text if source == target else f"{target}_from_{source}({strip(text)})"


def strip(text: str) -> str:
    """Without one pair of enclosing parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def number(value: Any, dtype: str) -> str:
    """A literal of a register type: f32(0.5), 0.5, i32(3), 3, True, f32(-inf)."""
    if dtype == "bool_":
        return str(bool(value))
    if dtype in FLOATS:
        value = float(value)
        text = repr(value) if math.isfinite(value) else str(value)
        return f"f32({text})" if dtype == "f32" else f"({text})" if text[0] == "-" else text
    bits = 64 if dtype == "i64" else 32
    value = int(value) & (2**bits - 1)
    if dtype != "u32" and value >= 2 ** (bits - 1):
        value -= 2**bits
    return f"{dtype}({value})"


def _spell(
    node: ExpressionNode, names: tuple[str, ...], dtypes: tuple[str, ...], literal: str
) -> tuple[str, str]:
    if node.head == "arg":
        return names[node.value], dtypes[node.value]
    if node.head == "number":
        dtype = "bool_" if isinstance(node.value, bool) else literal
        return number(node.value, dtype), dtype
    parts = [_spell(p, names, dtypes, literal) for p in node.parts]
    match node.head:
        case "operator":
            return _operator(node.value, parts)
        case "compare":
            return _compare(node.value, parts)
        case "unary":
            return _unary(node.value, *parts[0])
        case "not":
            return f"not_bool_({cast(*parts[0], 'bool_')})", "bool_"
        case "logical":
            return _join("and" if node.value == "&" else "or", parts), "bool_"
    return _call(node, parts)


def _join(name: str, parts: list[tuple[str, str]]) -> str:
    text = cast(*parts[0], "bool_")
    for part in parts[1:]:
        text = f"{name}_bool_({strip(text)}, {strip(cast(*part, 'bool_'))})"
    return text


def _operator(symbol: str, parts: list[tuple[str, str]]) -> tuple[str, str]:
    dtype = promote(*(d for _, d in parts))
    if symbol == "/" and dtype not in FLOATS:
        dtype = "f64"
    a, b = (cast(text, d, dtype) for text, d in parts)
    if dtype in FLOATS:
        if symbol not in "+-*/":
            raise ArgumentError(f"loop operator {symbol!r} needs integers or bools, got {dtype}")
        return f"({a} {symbol} {b})", dtype
    if dtype == "bool_" and symbol not in "&|^":
        if symbol == "-":
            raise ArgumentError("loop operator '-' is not defined for bools", hint="use ^")
        if symbol not in "+*":
            raise ArgumentError(f"loop operator {symbol!r} is not defined for bools")
        symbol = "|" if symbol == "+" else "&"  # as NumPy adds and multiplies bools
    return f"{NAMED[symbol]}_{dtype}({strip(a)}, {strip(b)})", dtype


def _compare(symbol: str, parts: list[tuple[str, str]]) -> tuple[str, str]:
    dtype = promote(*(d for _, d in parts))
    if dtype == "bool_":
        dtype = "i32"
    a, b = (cast(text, d, dtype) for text, d in parts)
    return f"({a} {symbol} {b})", "bool_"


def _unary(symbol: str, text: str, dtype: str) -> tuple[str, str]:
    if symbol == "~":
        if dtype == "bool_":
            return f"not_bool_({strip(text)})", dtype
        return f"xor_{dtype}({strip(text)}, {number(-1, dtype)})", dtype
    if dtype in FLOATS:
        return f"(-{text})", dtype
    if dtype == "bool_":
        raise ArgumentError("loop operator '-' is not defined for bools", hint="use `not`")
    return f"sub_{dtype}({number(0, dtype)}, {strip(text)})", dtype


def _call(node: ExpressionNode, parts: list[tuple[str, str]]) -> tuple[str, str]:
    name, function = node.value, FUNCTIONS[node.value]
    if name == "where":
        dtype = promote(parts[1][1], parts[2][1])
        texts = [cast(*parts[0], "bool_"), *(cast(*p, dtype) for p in parts[1:])]
        return f"where_{dtype}({', '.join(map(strip, texts))})", dtype
    if name == "pow" and node.parts[1].head == "number" and node.parts[1].value == 2:
        return _operator("*", [parts[0], parts[0]])
    dtype = promote(*(d for _, d in parts))
    if function.result in ("float", "bool") and dtype not in FLOATS:
        dtype = "f64"
    if dtype == "bool_" and name == "abs":
        return parts[0]
    if dtype == "bool_" and name not in ("maximum", "minimum"):
        raise ArgumentError(f"loop function {name!r} is not defined for bools", hint="cast first")
    texts = [strip(cast(*p, dtype)) for p in parts]
    result = "bool_" if function.result == "bool" else dtype
    return f"{name}_{dtype}({', '.join(texts)})", result
