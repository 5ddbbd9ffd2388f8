"""Expression templates of loop maps: parsed once, checked against a whitelist, typed.

A template is a Python expression over the placeholders {0}, {1}, ... Allowed: numbers, inf, nan,
True/False, + - * / // % ** (of which // % ** become `floordiv`, `mod`, `pow`), & | ^ ~ << >>,
comparisons, `and` `or` `not`, `a if c else b` (a select: both sides are evaluated), and the
functions of `vocabulary.py`. A number takes the promoted register type of the expression's
arguments, as a Python number does beside a NumPy array.
"""

from __future__ import annotations

import ast
import string
from functools import lru_cache
from typing import Any

from ...errors import ArgumentError, did_you_mean
from ...lazy_dataclass import dataclass
from .vocabulary import FUNCTIONS

OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|",
    ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}
COMPARISONS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}
CALLED = {ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.Pow: "pow"}
RANK = ("bool_", "i32", "u32", "i64", "f32", "f64")


@dataclass(frozen=True)
class ExpressionNode:
    """A typed-later expression node: head is 'arg', 'number', 'call', 'unary', or an operator."""

    head: str
    parts: tuple = ()
    value: Any = None


def promote(*dtypes: str) -> str:
    """The register type of an operation on these types; NumPy's rule for the same dtypes."""
    best = max(dtypes, key=RANK.index)
    low = set(dtypes)
    if best == "f32" and low & {"i32", "u32", "i64"}:
        return "f64"
    if best == "u32" and "i32" in low:
        return "i64"
    return best


@lru_cache(maxsize=4096)
def parse(template: str) -> ExpressionNode:
    """The checked tree of a template. Raises ArgumentError naming what is not allowed."""
    names = {f for _, f, _, _ in string.Formatter().parse(template) if f is not None}
    text = template.format(*(f"v{i}" for i in range(1 + max(map(int, names), default=-1))))
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ArgumentError(f"loop expression {template!r}: {error.msg}") from None
    return _node(tree, template)


def _node(tree: ast.expr, template: str) -> ExpressionNode:
    match tree:
        case ast.Name(id=name) if name[0] == "v" and name[1:].isdigit():
            return ExpressionNode("arg", value=int(name[1:]))
        case ast.Constant(value=value) if isinstance(value, (bool, int, float)):
            return ExpressionNode("number", value=value)
        case ast.Name(id="inf" | "nan" as word):
            return ExpressionNode("number", value=float(word))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return ExpressionNode("number", value=-value)
    children, head, detail = _shape(tree, template)
    return ExpressionNode(head, tuple(_node(c, template) for c in children), detail)


def _shape(tree: ast.expr, template: str) -> tuple[list[ast.expr], str, object]:
    """Children, head and value of a compound node."""
    match tree:
        case ast.BinOp(left=a, op=op, right=b) if type(op) in OPERATORS:
            return [a, b], "operator", OPERATORS[type(op)]
        case ast.BinOp(left=a, op=op, right=b) if type(op) in CALLED:
            return _call(CALLED[type(op)], [a, b], template)
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return [a], "unary", "-"
        case ast.UnaryOp(op=ast.Invert(), operand=a):
            return [a], "unary", "~"
        case ast.UnaryOp(op=ast.Not(), operand=a):
            return [a], "not", None
        case ast.BoolOp(op=op, values=values):
            return list(values), "logical", "&" if isinstance(op, ast.And) else "|"
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in COMPARISONS:
            return [a, b], "compare", COMPARISONS[type(op)]
        case ast.IfExp(test=test, body=a, orelse=b):
            return [test, a, b], "call", "where"
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _call(name, args, template)
    raise ArgumentError(
        f"loop expression {template!r}: {ast.unparse(tree)!r} is not allowed",
        hint="use arithmetic, comparisons, `a if c else b` and the loop functions",
    )


def _call(name: str, args: list[ast.expr], template: str) -> tuple[list[ast.expr], str, object]:
    if name not in FUNCTIONS:
        raise ArgumentError(
            f"loop expression {template!r} calls unknown function {name!r}",
            hint=did_you_mean(name, tuple(FUNCTIONS)),
        )
    if len(args) != FUNCTIONS[name].arity:
        raise ArgumentError(
            f"loop expression {template!r}: {name} takes {FUNCTIONS[name].arity} arguments, "
            f"got {len(args)}"
        )
    return args, "call", name


def cost(node: ExpressionNode) -> int:
    """Work of one evaluation in f32 additions."""
    own = FUNCTIONS[node.value].cost if node.head == "call" else 0
    if node.head in ("operator", "compare", "unary"):
        own = 4 if node.value == "/" else 1
    return own + sum(cost(p) for p in node.parts)


def literal_type(dtypes: tuple[str, ...], result: str) -> str:
    """The register type of a template's numbers: the promoted non-bool arguments, else the result.

    Arguments that are only selected on (bool_) do not count.
    """
    numeric = [d for d in dtypes if d != "bool_"]
    return promote(*numeric) if numeric else result
