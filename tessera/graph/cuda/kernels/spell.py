"""Elementwise ops as expressions of the tile language: {0}, {1} are operands, other names
attributes; {index} is where an element stands in the whole, {runs} whether fours of them begin at
multiples of four.

The text follows from the loop template of the op's record and from what `vocabulary.py` says of its
functions; a record whose meaning is no loop template gives the text itself (`GraphOp.tile`).
"""

from __future__ import annotations

import ast
import re
from functools import cache, lru_cache
from typing import Any

from ....errors import UnsupportedTargetError
from ....numerics import DType
from ...cpu.expressions import ExpressionNode as Expression
from ...cpu.expressions import cost, parse
from ...cpu.vocabulary import FUNCTIONS
from ...ir import Node
from ...schedule.loop_ops import filled
from ...schedule.op_ids import line_of

# How partial results of a reduction are joined, and the one that changes nothing.
COMBINE = {"sum": ("{0} + {1}", "0.0"), "max": ("tile.maximum({0}, {1})", "-inf"),
           "min": ("tile.minimum({0}, {1})", "inf"), "prod": ("{0} * {1}", "1.0")}


@cache
def is_stored(dtype: DType) -> bool:
    """Whether kernels of graphs read and write a type: one element in one or more bytes."""
    return not dtype.packed


def template(node: Node) -> str | None:
    """The expression of an elementwise op; None when it has none, or of a type that no kernel
    stores."""
    op = node.op
    if not all(is_stored(v.aval.dtype) for v in (*node.inputs, *node.outputs)):
        return None
    if op.tile is not None:
        return op.tile if isinstance(op.tile, str) else op.tile(**node.attrs)
    if op.loop is None:
        return None
    kind = node.inputs[-1].aval.dtype.kind if node.inputs else "float"
    return expression(filled(node), kind)


@lru_cache(maxsize=4096)
def expression(loop: str, kind: str) -> str | None:
    """A loop template in the tile language, for operands of a kind: "float", "int", "uint",
    "bool". None where kernels have no such function or operator."""
    return _text(parse(loop), kind)


def _text(e: Expression, kind: str) -> str | None:
    if e.head == "arg":
        return f"{{{e.value}}}"
    if e.head == "number":
        if isinstance(e.value, bool):
            return literal(e.value, "bool")
        return literal(e.value, "int" if kind == "bool" else kind)
    parts = []
    for p in e.parts:
        text = _text(p, kind)
        if text is None:
            return None
        parts.append(text)
    return _call(e, parts, kind) if e.head == "call" else _operator(e, parts, kind)


_OF_BOOLS = {"+": "|", "*": "&"}  # what sums and products of bools are


def _operator(e: Expression, parts: list[str], kind: str) -> str | None:
    """Of bools, &, |, ^ and ~ are logical."""
    if e.head == "not":
        return f"~{_bracketed(parts[0], 3)}"
    if e.head == "logical":
        return f" {e.value} ".join(_bracketed(p, 3) for p in parts)
    if e.head == "compare":
        return f"{_bracketed(parts[0], 1)} {e.value} {_bracketed(parts[1], 1)}"
    if (e.value == "/") if kind != "float" else (e.value not in ("+", "-", "*", "/")):
        return None
    if e.head == "unary":
        return f"{e.value}{_bracketed(parts[0], 3)}"
    if kind == "bool" and e.value in _OF_BOOLS:
        return f" {_OF_BOOLS[e.value]} ".join(_bracketed(p, 3) for p in parts)
    rank = {"*": 2, "/": 2, "+": 1, "-": 1}.get(e.value, 0)
    left, right = (_bracketed(p, r or 3) for p, r in zip(parts, (rank, rank + 1), strict=True))
    return f"{left} {e.value} {right}"


def _call(e: Expression, parts: list[str], kind: str) -> str | None:
    function = FUNCTIONS[e.value]
    if function.whole is not None and kind in ("int", "uint"):
        return function.whole[kind == "uint"].format(*parts)
    if function.tile is None or (kind != "float" and function.numbers == "float"):
        return None
    plain = re.fullmatch(r"tile\.\w+\([{}\d, ]*\)", function.tile)
    return function.tile.format(*(parts if plain else (_bracketed(p, 3) for p in parts)))


def _bracketed(text: str, least: int) -> str:
    """As an operand, in brackets when it binds less than `least`."""
    return text if _rank(text) >= least else f"({text})"


@lru_cache(maxsize=4096)
def _rank(text: str) -> int:
    """How an expression binds: 3 a name, a number or a call, 2 a product, 1 a sum, 0 the rest."""
    match ast.parse(text.format(*(f"v{i}" for i in range(8))), mode="eval").body:
        case ast.Name() | ast.Constant() | ast.Call():
            return 3
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return 2
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return 1
    return 0


def is_light(node: Node) -> bool:
    """Whether an op behind a matmul needs hardly a register beside the sums: a cast, or as cheap
    as a maximum."""
    loop = node.op.loop
    return node.op.name == "cast" or (loop is not None and cost(parse(filled(node))) <= 2)


def no_kernel(node: Node, why: str = "") -> UnsupportedTargetError:
    """The error for an op that has no lowering."""
    types = ", ".join(str(v.aval) for v in node.inputs)
    return UnsupportedTargetError(
        f"{node.op.name}({types}) has no kernel for GPUs" + (f": {why}" if why else ""),
        where=line_of(node.where),
        hint='run the function with target="cpu", or write this part as a @ts.kernel')


def stored_as(text: str, dtype: DType, kind: str) -> str:
    """A number in a narrower type, called `kind` in the text: integers wrap, as NumPy's arrays do,
    where a kernel's conversion would keep the largest one."""
    if dtype.kind in ("int", "uint") and dtype.bits < 32:
        bits, half = (1 << dtype.bits) - 1, 1 << dtype.bits - 1
        text = f"(({text}) & {bits})" if dtype.kind == "uint" else \
            f"((({text}) + {half}) & {bits}) - {half}"
    return f"tile.cast({text}, {kind})"


def literal(value: Any, kind: str) -> str:
    """A number as the kernel's text has it."""
    if kind == "float":
        return repr(float(value))  # inf and nan are names that kernels know
    return repr(bool(value)) if kind == "bool" else repr(int(value))


__all__ = ["COMBINE", "expression", "is_light", "is_stored", "literal", "no_kernel", "stored_as",
           "template"]
