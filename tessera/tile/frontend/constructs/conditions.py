"""Truth: and, or, ternaries and if."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tessera.tile.frontend.constructs.branches import branch, choice
from tessera.tile.frontend.tracer import KernelTracer, expression, statement
from tessera.tile.ir.handles import Handle, describe, is_bool
from tessera.tile.ir.ir import If, Op
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType

OPERATOR = {ast.And: "and", ast.Or: "or"}
WHERE = "decide element by element: ts.tile.where(c, x, y)"
EACH = {"and": "element by element: (a) & (b), or ts.tile.where(c, x, y)",
        "or": "element by element: (a) | (b), or ts.tile.where(c, x, y)"}


@expression(ast.BoolOp)
def bool_operation(t: KernelTracer, e: ast.BoolOp) -> Any:
    """As in Python: the value of the operand that decided."""
    return chain(t, OPERATOR[type(e.op)], [partial(t.expr, x) for x in e.values],
                 f"an '{OPERATOR[type(e.op)]}'")


def condition(t: KernelTracer, e: ast.expr) -> Any:
    """An expression of which only the truth is asked: the operands of its `and` and `or` may
    differ in type."""
    if not isinstance(e, ast.BoolOp):
        return t.expr(e)
    name, (outer, t.position.node) = OPERATOR[type(e.op)], (t.position.node, e)
    said = f"an '{name}'"

    def truth(x: ast.expr) -> Any:
        return t.ir.decided(condition(t, x), said, EACH[name])

    out = chain(t, name, [partial(truth, x) for x in e.values], said)
    t.position.node = outer
    return out


def chain(t: KernelTracer, name: str, operands: Sequence[Callable[[], Any]], said: str) -> Any:
    """x and y and ..., x or y or ...: an operand is evaluated only where those before it leave
    the answer open."""
    x = operands[0]()
    if len(operands) == 1:
        return x
    test = t.ir.decided(x, said, EACH[name])
    if not isinstance(test, Handle):
        return x if test == (name == "or") else chain(t, name, operands[1:], said)
    found: list[Any] = []

    def rest() -> Any:
        y = chain(t, name, operands[1:], said)
        if isinstance(y, Handle) and isinstance(y.type, TileType):
            t.fail(f"{said} that gives {describe(y)} or not", EACH[name])
        found.append(y)
        if is_bool(y) and not is_bool(x):  # True is 1
            return t.ir.cast(y, x.type.dtype) if isinstance(y, Handle) else int(y)
        return y

    def settled() -> Any:
        """The value where the rest is not asked: x, whose truth is known there."""
        truth = name == "or"
        return x if not is_bool(x) else truth if is_bool(found[0]) else int(truth)

    open_ = test if name == "and" else t.ir.arithmetic("not", (test,))
    out = choice(t, open_, rest, settled)
    return without_branch(t, name, x, found[0], out) if is_bool(x) else out


def without_branch(t: KernelTracer, name: str, x: Any, y: Any, out: Any) -> Any:
    """`x and y` whose branch was just made: a y that is known, or cannot fail, needs none."""
    made = t.ir.block[-1]
    if not is_bool(y) or not isinstance(made, If) or len(made.outs) != 1 or made.orelse:
        return out
    if not isinstance(y, Handle):  # the branch stays for what y's evaluation does
        return x if y == (name == "and") else y
    if not all(isinstance(n, Op) and OPS[n.name].total and all(
            d.type.dtype.kind != "float" for d in n.outs) for n in made.then):
        return out
    t.ir.block[-1:] = made.then
    t.ir.names.taken.discard(made.outs[0].value.name)
    return t.ir.arithmetic(name, (x, y))


@expression(ast.IfExp)
def ternary(t: KernelTracer, e: ast.IfExp) -> Any:
    test = t.ir.decided(condition(t, e.test), "an if", WHERE)
    if not isinstance(test, Handle):
        return t.expr(e.body if test else e.orelse)
    return choice(t, test, partial(t.expr, e.body), partial(t.expr, e.orelse))


@statement(ast.If)
def if_statement(t: KernelTracer, s: ast.If) -> None:
    test = t.ir.decided(condition(t, s.test), "an if", WHERE)
    if not isinstance(test, Handle):
        t.statements(s.body if test else s.orelse)
        return
    branch(t, test, partial(t.statements, s.body), partial(t.statements, s.orelse))
