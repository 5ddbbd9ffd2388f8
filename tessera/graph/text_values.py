"""What the lines of an IR's text are made of: values, extents, lines of source.

Values are Python literals and calls of the few names below, which a reader of its own evaluates:
nothing is executed. A line is read with its strings taken out, so that what stands in them is
never taken for the grammar.

A record that is known by identity, not by its fields, is written with a number: the record
`same(0, Rules(...))` is one object wherever it stands in a text.
"""

from __future__ import annotations

import ast
import base64
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from keyword import iskeyword
from types import FunctionType
from typing import Any

import numpy as np

from ..errors import SourceLine
from ..numerics import DType, NumericType, as_type, find_dtype
from .op import OPS, GraphOp

# Frozen dataclasses of plain data that attributes may hold, by name; upper floors put theirs here.
RECORDS: dict[str, Any] = {}
FUNCTIONS: dict[str, Callable] = {}  # of this library, which attributes may hold, by qualified name
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


# --- writing -------------------------------------------------------------------------------------
def value_text(value: Any, other: Callable[[Any], str], shared: list[Any]) -> str:
    """other: gives the text of what is no value of these, or raises. shared: the records of the
    text that are known by identity."""
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if np.isfinite(value) else f"number({str(value)!r})"
    if isinstance(value, tuple | list):
        inner = ", ".join(value_text(v, other, shared) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, DType):
        return f"dtype({value.name!r})"
    if isinstance(value, NumericType):
        return f"type({str(value)!r})"
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return f"array({array.dtype.name!r}, {array.shape!r}, {data!r})"
    name = type(value).__name__
    if RECORDS.get(name) is type(value):
        values = (getattr(value, f.name) for f in fields(RECORDS[name]))
        text = f"{name}({', '.join(value_text(v, other, shared) for v in values)})"
        if type(value).__eq__ is not object.__eq__:
            return text
        if not any(value is x for x in shared):
            shared.append(value)
        return f"same({next(i for i, x in enumerate(shared) if x is value)}, {text})"
    if isinstance(value, GraphOp) and OPS.get(value.name) is value:
        return f"op({value.name!r})"
    if isinstance(value, FunctionType) and FUNCTIONS.get(value.__qualname__) is value:
        return f"function({value.__qualname__!r})"
    return other(value)


def extents_text(kind: NumericType, shape: Sequence[int]) -> str:
    """`'f32'[4, 3]`, of no axes `'f32'[()]`."""
    return f"{str(kind)!r}[{', '.join(map(str, shape)) or '()'}]"


def keywords_text(given: Mapping[str, str]) -> str:
    """`{axis=1, from_=(0,)}`: what is a word of Python's has an underscore behind it."""
    return "{" + ", ".join(f"{k}{'_' * iskeyword(k)}={v}" for k, v in given.items()) + "}"


def where_text(where: SourceLine | None) -> str:
    """` loc('model.py', 3, 'return x + w', (), '', '')`"""
    if where is None:
        return ""
    return (f" loc({where.file!r}, {where.line}, {where.text!r}, {where.hints!r}, {where.part!r}, "
            f"{where.of!r})")


# --- reading -------------------------------------------------------------------------------------
class TextLines:
    """The lines of a text, one after another. at: how many were read."""

    def __init__(self, lines: Sequence[str]):
        self.lines, self.at = lines, 0

    def next(self, indent: str) -> tuple[str, list[str]]:
        """The next line without its indent, its strings taken out. Raises ValueError where it has
        another one."""
        line = self.lines[self.at]
        self.at += 1
        if not line.startswith(indent) or line[len(indent):].startswith(" "):
            raise ValueError("indented otherwise")
        return lift_strings(line[len(indent):])


def lift_strings(line: str) -> tuple[str, list[str]]:
    """A line with its strings taken out: _s0_, _s1_, ... stand there."""
    held: list[str] = []

    def lift(found: re.Match[str]) -> str:
        held.append(found[0])
        return f"_s{len(held) - 1}_"

    return _STRING.sub(lift, line), held


def restore_strings(text: str, held: Sequence[str]) -> str:
    return re.sub(r"_s(\d+)_", lambda m: held[int(m[1])], text)


def read_extents(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",")) if text != "()" else ()


def read_where(text: str) -> SourceLine:
    """Of what stands in `loc(...)`."""
    return SourceLine(*read_value(f"({text})"))


def read_value(text: str) -> Any:
    return value_of(ast.parse(text, mode="eval").body)


def read_keywords(text: str) -> dict[str, ast.expr]:
    """Of `axis=1, to=dtype("f32")`, in order; value_of makes values of them."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    names = [str(k.arg) for k in call.keywords]
    return {name.removesuffix("_") if iskeyword(name.removesuffix("_")) else name: k.value
            for name, k in zip(names, call.keywords, strict=True)}


def value_of(node: ast.AST, shared: dict[int, Any] | None = None) -> Any:
    """shared: the records that were read so far and are known by identity, by number."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand, shared)
        case ast.Tuple(elts=elements):
            return tuple(value_of(e, shared) for e in elements)
        case ast.List(elts=elements):
            return [value_of(e, shared) for e in elements]
        case ast.Call(func=ast.Name(id=name), args=args):
            made = [value_of(a, shared) for a in args]
            if name == "same" and shared is not None:
                return shared.setdefault(*made)
            return RECORDS[name](*made) if name in RECORDS else _CALLS[name](*made)
    raise ValueError(ast.dump(node))


def _array(dtype: str, shape: tuple[int, ...], data: str) -> np.ndarray:
    kind = find_dtype(dtype).numpy if dtype not in np.sctypeDict else np.dtype(dtype)
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape).copy()


def _number(text: str) -> float:
    """One NaN for all: values that have it are equal."""
    return math.nan if text == "nan" else float(text)


_CALLS: dict[str, Callable[..., Any]] = {
    "number": _number, "dtype": find_dtype, "type": as_type, "array": _array,
    "op": OPS.__getitem__, "function": FUNCTIONS.__getitem__}

__all__ = ["FUNCTIONS", "RECORDS", "TextLines", "extents_text", "keywords_text", "lift_strings",
           "read_extents", "read_keywords", "read_value", "read_where", "restore_strings",
           "value_of", "value_text", "where_text"]
