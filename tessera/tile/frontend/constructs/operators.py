"""Operators: arithmetic, bits and comparisons."""

from __future__ import annotations

import ast
import operator
from functools import partial
from typing import Any

from tessera.numerics import DType, NumericType
from tessera.tile.frontend.constructs.conditions import chain, condition
from tessera.tile.frontend.tracer import KernelTracer, expression
from tessera.tile.ir.handles import (
    Handle,
    TensorRow,
    Undefined,
    describe,
    has_run_time,
    is_bool,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar, TileType
from tessera.tile.ops.elementwise import power

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div",
          ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "bitand",
          ast.BitOr: "bitor", ast.BitXor: "bitxor", ast.LShift: "shl", ast.RShift: "shr"}
LOGICAL = {"bitand": "and", "bitor": "or", "bitxor": "ne"}  # what they are on bools
COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


@expression(ast.BinOp)
def binary_operation(t: KernelTracer, e: ast.BinOp) -> Any:
    if isinstance(e.op, ast.MatMult):
        x, y = t.expr(e.left), t.expr(e.right)
        if isinstance(x, DType | NumericType):  # a type with a policy, bf16 @ stochastic_round
            return t.ir.call_python(operator.matmul, x, y)
        return t.call_op(OPS["dot"], [x, y], {})
    return binary(t, BINARY[type(e.op)], t.expr(e.left), t.expr(e.right))


def binary(t: KernelTracer, name: str, x: Any, y: Any, hint: str = "t") -> Any:
    if name == "pow":
        return power(t.ir, x, y)
    if isinstance(x, tuple | list | str) and isinstance(y, tuple | list | str | int):
        return t.ir.fold(name, (x, y))
    if name in LOGICAL and is_bool(x) and is_bool(y):
        return t.ir.arithmetic(LOGICAL[name], (x, y), hint)
    if name == "div":
        return divide(t, x, y)
    return t.ir.arithmetic(name, (x, y), hint)


def divide(t: KernelTracer, x: Any, y: Any) -> Any:
    """A tile by a row statistic: 0 / 0 is 0, so that rows without weight stay 0."""
    row = (isinstance(y, Handle) and isinstance(y.type, TileType) and isinstance(x, Handle)
           and isinstance(x.type, TileType) and len(x.type.shape) == 2
           and (len(y.type.shape) == 1 or (y.type.shape[1] == 1 and x.type.shape[1] > 1)))
    if row and t.ir.promoted([x, y], "div").kind == "float":
        return t.ir.arithmetic("div_or_zero", (x, y))
    return t.ir.arithmetic("div", (x, y))


@expression(ast.UnaryOp)
def unary_operation(t: KernelTracer, e: ast.UnaryOp) -> Any:
    if isinstance(e.op, ast.Not):
        x = t.ir.decided(condition(t, e.operand), "a 'not'", "element by element: ~t")
        return t.ir.arithmetic("not", (x,)) if isinstance(x, Handle) else not x
    x = t.expr(e.operand)
    if isinstance(e.op, ast.Invert):
        return t.ir.arithmetic("not" if is_bool(x) else "bitnot", (x,))
    if isinstance(e.op, ast.USub) and is_bool(x) and isinstance(x, Handle):
        t.fail(f"the negative of {describe(x)}", "~x is where it does not hold; for a number cast "
               "it: ts.tile.cast(x, ts.i32)")
    return x if isinstance(e.op, ast.UAdd) else t.ir.arithmetic("neg", (x,))


@expression(ast.Compare)
def comparison(t: KernelTracer, e: ast.Compare) -> Any:
    """a < b < c is a < b and b < c: b is evaluated once, c only where a < b."""
    left = t.expr(e.left)

    def test(op: ast.cmpop, comparator: ast.expr) -> Any:
        nonlocal left
        before, left = left, t.expr(comparator)
        return compare(t, op, before, left)

    tests = [partial(test, op, c) for op, c in zip(e.ops, e.comparators, strict=True)]
    return chain(t, "and", tests, "a chained comparison")


def contained(t: KernelTracer, op: ast.cmpop, x: Any, items: Any) -> Any:
    """x in (a, b, c) is x == a or x == b or x == c."""
    if not isinstance(items, tuple | list):
        t.fail(f"'in' {describe(items)}", "in kernels it is asked of tuples: x in (1, 3); whether "
               "a tile has a number is ts.tile.reduce_max(ts.tile.cast(t == x, ts.i32)) == 1")
    found: Any = False
    for item in items:
        t.ir.decided(x, "an 'in'", "element by element: (x == a) | (x == b)")
        same = t.ir.arithmetic("eq", (x, item))
        found = t.ir.arithmetic("or", (found, same)) if isinstance(found, Handle) else (
            found or same)
    if isinstance(op, ast.In):
        return found
    return t.ir.arithmetic("not", (found,)) if isinstance(found, Handle) else not found


def compare(t: KernelTracer, op: ast.cmpop, x: Any, y: Any) -> Any:
    if type(op) in COMPARE and any(isinstance(v, Handle | TensorRow | Undefined) for v in (x,
                                                                                           y)):
        if x is None or y is None:
            return isinstance(op, ast.NotEq)
        return t.ir.arithmetic(COMPARE[type(op)], (x, y))
    if isinstance(op, ast.Is | ast.IsNot):
        if not (x is None or y is None) and any(isinstance(v, TensorRow) or isinstance(
                v, Handle) and isinstance(v.type, Scalar | TileType) for v in (x, y)):
            t.fail(f"'is' of {describe(x)} and {describe(y)}: a number of the run has no identity",
                   "x == y compares numbers; x is None asks for an argument that may be left out")
        return (x is y) == isinstance(op, ast.Is)
    if isinstance(op, ast.In | ast.NotIn) and has_run_time((x, y)):
        return contained(t, op, x, y)
    if isinstance(op, ast.In | ast.NotIn):
        return (x in y) == isinstance(op, ast.In)
    return t.ir.fold(COMPARE[type(op)], (x, y))
