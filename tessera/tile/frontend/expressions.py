"""Expressions of a kernel: names, operators, calls of ops and of helper functions."""

from __future__ import annotations

import ast
import builtins
from abc import abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from tessera.foreign import TILE, instead
from tessera.tile.frontend.indexing import Indexing
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.handles import (
    FText,
    Handle,
    TensorRow,
    Undefined,
    describe,
    is_bool,
    is_number,
    plain_number,
)
from tessera.tile.ir.ir import If, Op
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType, space_of

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div",
          ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "bitand",
          ast.BitOr: "bitor", ast.BitXor: "bitxor", ast.LShift: "shl", ast.RShift: "shr"}
LOGICAL = {"bitand": "and", "bitor": "or", "bitxor": "ne"}  # what they are on bools
COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
OPERATOR = {ast.And: "and", ast.Or: "or"}
WHERE = "decide element by element: ts.tile.where(c, x, y)"
EACH = {"and": "element by element: (a) & (b), or ts.tile.where(c, x, y)",
        "or": "element by element: (a) | (b), or ts.tile.where(c, x, y)"}
OUTSIDE = {
    "Lambda": "a lambda: define a function with def and call it",
    "ListComp": "a comprehension over run-time values",
    "DictComp": "a dict comprehension", "SetComp": "a set comprehension",
    "GeneratorExp": "a generator", "Await": "await", "Yield": "yield", "YieldFrom": "yield from",
    "Set": "a set", "NamedExpr": "an assignment inside an expression: put it on its own line",
}


class Expressions(Indexing):
    """Evaluates AST expressions to constants, Handles and other traced values."""

    env: dict[str, Any]
    globals: dict[str, Any]
    argument_names: frozenset[str] = frozenset()  # of the function that is being traced
    active_calls: list[Any]  # the functions that are being traced, the kernel first
    comprehensions = 0

    def in_comprehension(self) -> bool:
        """Whether a range is wanted as a Python range."""
        return self.comprehensions > 0

    def expr(self, e: ast.expr) -> Any:
        outer, self.node = self.node, e
        try:
            get = getattr(self, "get_" + type(e).__name__, None)
            if get is None:
                what = OUTSIDE.get(type(e).__name__, type(e).__name__)
                self.fail(f"{what} is not part of the kernel language",
                          "kernels have numbers, tiles, tuples, slices, operators and calls")
            return get(e)
        finally:
            self.node = outer

    def get_Constant(self, e: ast.Constant) -> Any:
        if isinstance(e.value, complex | bytes):
            self.fail(f"{e.value!r} is no value of a kernel")
        return e.value

    def get_Tuple(self, e: ast.Tuple) -> Any:
        return tuple(self.expr(x) for x in e.elts)

    def get_List(self, e: ast.List) -> Any:
        return self.stack_buffers([self.expr(x) for x in e.elts])

    def get_ListComp(self, e: ast.ListComp) -> Any:
        (gen, *more) = e.generators
        if more or not isinstance(gen.target, ast.Name):
            self.fail("a list comprehension here has one loop over a constant range")
        self.comprehensions += 1
        items = self.expr(gen.iter)
        self.comprehensions -= 1
        if not isinstance(items, range | tuple | list):
            self.fail("a list comprehension needs a compile-time range or tuple")
        before, out = dict(self.env), []
        for item in items:
            self.env[gen.target.id] = item
            kept = [self.decided(self.condition(c), "the if of a comprehension") for c in gen.ifs]
            if any(isinstance(k, Handle) for k in kept):
                self.fail("the if of a comprehension on a run-time value",
                          "what is in a list is decided at compile time")
            if all(kept):
                out.append(self.expr(e.elt))
        self.env = before
        return self.stack_buffers(out)

    def get_Dict(self, e: ast.Dict) -> Any:
        if any(k is None for k in e.keys):
            self.fail("** in a dict is not part of the kernel language")
        return {self.expr(k): self.expr(v) for k, v in zip(e.keys, e.values, strict=True) if k}

    def get_Name(self, e: ast.Name) -> Any:
        found = self.lookup(e.id)
        if isinstance(found, Undefined):
            self.fail(found.why, "give it a value before", also=(("there", found.where),)
                      if found.where else ())
        return found

    def lookup(self, name: str) -> Any:
        if name in self.env:
            return self.env[name]
        if name in self.globals:
            self.captured.name(self.active_calls[-1], name, self.globals[name])
            return plain_number(self.globals[name])
        if name in vars(builtins):
            return vars(builtins)[name]
        known = [n for n in (*self.env, *self.globals) if not n.startswith("_")]
        near = [] if len(name) < 3 else get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else self.undefined(name)
        self.fail(f"{name!r} is not defined", hint, code="E_UNDEFINED_NAME")

    def undefined(self, name: str) -> str:
        """What to do about a name that nothing resembles."""
        if len(name) == 1 and name.islower():
            return (f"number the lanes, {name} = ts.tile.linear_id(), loop, for {name} in "
                    "ts.tile.range(N), or take the group's block: i, j = block_m, block_n")
        return ("define it before the kernel, or in its body; the extents of annotations, "
                "tile_<dim> and block_<dim> are known by name")

    def get_BinOp(self, e: ast.BinOp) -> Any:
        if isinstance(e.op, ast.MatMult):
            return self.call(OPS["dot"], [self.expr(e.left), self.expr(e.right)], {})
        return self.binary(BINARY[type(e.op)], self.expr(e.left), self.expr(e.right))

    def binary(self, name: str, x: Any, y: Any, hint: str = "t") -> Any:
        if name == "pow" and isinstance(x, Handle) and is_number(y):
            return self.power(x, y)
        if isinstance(x, tuple | list | str) and isinstance(y, tuple | list | str | int):
            return self.fold(name, (x, y))
        if name in LOGICAL and is_bool(x) and is_bool(y):
            return self.arithmetic(LOGICAL[name], (x, y), hint)
        if name == "div":
            return self.divide(x, y)
        return self.arithmetic(name, (x, y), hint)

    def divide(self, x: Any, y: Any) -> Any:
        """A tile by a row statistic: 0 / 0 is 0, so that rows without weight stay 0."""
        row = (isinstance(y, Handle) and isinstance(y.type, TileType) and isinstance(x, Handle)
               and isinstance(x.type, TileType) and len(x.type.shape) == 2
               and (len(y.type.shape) == 1 or (y.type.shape[1] == 1 and x.type.shape[1] > 1)))
        if row and self.promoted([x, y], "div").kind == "float":
            return self.arithmetic("div_or_zero", (x, y))
        return self.arithmetic("div", (x, y))

    def power(self, x: Handle, n: Any) -> Any:
        """Small whole powers are products, one half is a square root."""
        if n == 0.5:
            return self.call(OPS["sqrt"], [x], {})
        if isinstance(n, int) and 1 <= n <= 4:
            out: Any = x
            for _ in range(n - 1):
                out = self.arithmetic("mul", (out, x))
            return out
        if x.type.dtype.kind != "float" and isinstance(n, int) and n < 0:
            self.fail("a negative power of an integer", "write 1.0 / x")
        return self.arithmetic("pow", (x, n))

    def get_UnaryOp(self, e: ast.UnaryOp) -> Any:
        if isinstance(e.op, ast.Not):
            x = self.decided(self.condition(e.operand), "a 'not'", "element by element: ~t")
            return self.arithmetic("not", (x,)) if isinstance(x, Handle) else not x
        x = self.expr(e.operand)
        if isinstance(e.op, ast.Invert):
            return self.arithmetic("not" if is_bool(x) else "bitnot", (x,))
        return x if isinstance(e.op, ast.UAdd) else self.arithmetic("neg", (x,))

    def get_Compare(self, e: ast.Compare) -> Any:
        """a < b < c is a < b and b < c: b is evaluated once, c only where a < b."""
        left = self.expr(e.left)

        def test(op: ast.cmpop, comparator: ast.expr) -> Any:
            nonlocal left
            before, left = left, self.expr(comparator)
            return self.compare(op, before, left)

        tests = [partial(test, op, c) for op, c in zip(e.ops, e.comparators, strict=True)]
        return self.chain("and", tests, "a chained comparison")

    def compare(self, op: ast.cmpop, x: Any, y: Any) -> Any:
        if type(op) in COMPARE and any(isinstance(v, Handle | TensorRow | Undefined) for v in (x,
                                                                                               y)):
            if x is None or y is None:
                return isinstance(op, ast.NotEq)
            return self.arithmetic(COMPARE[type(op)], (x, y))
        if isinstance(op, ast.Is | ast.IsNot):
            return (x is y) == isinstance(op, ast.Is)
        if isinstance(x, Handle) or isinstance(y, Handle):
            self.fail("'in' needs compile-time values")
        if isinstance(op, ast.In | ast.NotIn):
            return (x in y) == isinstance(op, ast.In)
        return self.fold(COMPARE[type(op)], (x, y))

    # --- truth --------------------------------------------------------------------------------
    def get_BoolOp(self, e: ast.BoolOp) -> Any:
        """As in Python: the value of the operand that decided."""
        return self.chain(OPERATOR[type(e.op)], [partial(self.expr, x) for x in e.values],
                          f"an '{OPERATOR[type(e.op)]}'")

    def condition(self, e: ast.expr) -> Any:
        """An expression of which only the truth is asked: the operands of its `and` and `or` may
        differ in type."""
        if not isinstance(e, ast.BoolOp):
            return self.expr(e)
        name, (outer, self.node) = OPERATOR[type(e.op)], (self.node, e)
        said = f"an '{name}'"

        def truth(x: ast.expr) -> Any:
            return self.decided(self.condition(x), said, EACH[name])

        out = self.chain(name, [partial(truth, x) for x in e.values], said)
        self.node = outer
        return out

    def chain(self, name: str, operands: Sequence[Callable[[], Any]], said: str) -> Any:
        """x and y and ..., x or y or ...: an operand is evaluated only where those before it leave
        the answer open."""
        x = operands[0]()
        if len(operands) == 1:
            return x
        test = self.decided(x, said, EACH[name])
        if not isinstance(test, Handle):
            return x if test == (name == "or") else self.chain(name, operands[1:], said)
        found: list[Any] = []

        def rest() -> Any:
            y = self.chain(name, operands[1:], said)
            if isinstance(y, Handle) and isinstance(y.type, TileType):
                self.fail(f"{said} that gives {describe(y)} or not", EACH[name])
            found.append(y)
            if is_bool(y) and not is_bool(x):  # True is 1
                return self.cast(y, x.type.dtype) if isinstance(y, Handle) else int(y)
            return y

        def settled() -> Any:
            """The value where the rest is not asked: x, whose truth is known there."""
            truth = name == "or"
            return x if not is_bool(x) else truth if is_bool(found[0]) else int(truth)

        open_ = test if name == "and" else self.arithmetic("not", (test,))
        out = self.choice(open_, rest, settled)
        return self.without_branch(name, x, found[0], out) if is_bool(x) else out

    def without_branch(self, name: str, x: Any, y: Any, out: Any) -> Any:
        """`x and y` whose branch was just made: a y that is known, or cannot fail, needs none."""
        made = self.block[-1]
        if not is_bool(y) or not isinstance(made, If) or len(made.outs) != 1 or made.orelse:
            return out
        if not isinstance(y, Handle):  # the branch stays for what y's evaluation does
            return x if y == (name == "and") else y
        if not all(isinstance(n, Op) and OPS[n.name].total and all(
                d.type.dtype.kind != "float" for d in n.outs) for n in made.then):
            return out
        self.block[-1:] = made.then
        self.names.taken.discard(made.outs[0].value.name)
        return self.arithmetic(name, (x, y))

    def get_IfExp(self, e: ast.IfExp) -> Any:
        test = self.decided(self.condition(e.test), "an if", WHERE)
        if not isinstance(test, Handle):
            return self.expr(e.body if test else e.orelse)
        return self.choice(test, partial(self.expr, e.body), partial(self.expr, e.orelse))

    @abstractmethod
    def choice(self, test: Handle, then: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
        """What `then` gives where a condition holds, elsewhere what `orelse` gives; each is
        evaluated only there. The next class does."""

    def get_JoinedStr(self, e: ast.JoinedStr) -> Any:
        parts = []
        for v in e.values:
            parts.append(v.value if isinstance(v, ast.Constant) else self.expr(v.value))  # type: ignore[attr-defined]
        if any(isinstance(p, Handle) for p in parts):
            return FText(tuple(parts))
        return "".join(map(str, parts))

    def get_Starred(self, e: ast.Starred) -> Any:
        self.fail("* is not part of the kernel language", "write the elements out")

    # --- attributes ---------------------------------------------------------------------------
    def get_Attribute(self, e: ast.Attribute) -> Any:
        return self.attribute(self.expr(e.value), e.attr)

    def attribute(self, x: Any, name: str) -> Any:
        if isinstance(x, TensorRow):
            x = self.view_of_row(x)
        if isinstance(x, Handle):
            return self.handle_attribute(x, name)
        try:
            found = getattr(x, name)
            self.captured.attribute(x, name, found)
            return plain_number(found)
        except TileError as err:
            self.fail(err.message, err.hint)
        except AttributeError as err:
            if isinstance(x, ModuleType) and x.__name__ == "tessera.tile":
                public = [o.name for o in OPS.values() if o.public]
                hint = (instead(name, TILE, public)
                        or "docs/reference/tile_ops.md lists all operations")
                self.fail(f"ts.tile has no {name!r}", hint, code="E_NAME")
            self.fail(str(err))

    def handle_attribute(self, x: Handle, name: str) -> Any:
        t = x.type
        if name == "T" and not isinstance(t, Scalar):
            return self.transpose(x)
        if name == "dtype":
            return t.dtype
        if name == "space":
            return space_of(t)
        if name == "shape" and not isinstance(t, Scalar):
            return self.shape_of(x)
        if name == "ndim" and not isinstance(t, Scalar):
            return len(self.shape_of(x))
        whole = isinstance(t, Scalar) and t.dtype.kind in ("int", "uint")
        if whole and name in ("bit_length", "bit_count"):
            return getattr(self.constant_int(x, f"a number whose .{name}() is asked"), name)
        if name in ("astype", "to"):
            return lambda dtype: self.call(OPS["cast"], [x, dtype], {})
        kind = {GlobalTensor: "tensor", TileType: "tile"}.get(type(t), type(t).__name__.lower())
        hint = f"ts.tile.{name}(x)" if name in OPS else "a value has .T .shape .dtype .ndim .astype"
        self.fail(f"a {kind} has no attribute {name!r}", hint)

    def shape_of(self, x: Handle) -> tuple:
        if isinstance(x.type, GlobalTensor):
            return tuple(self.extent(x, i) for i in range(self.rank(x)))
        return x.type.shape  # type: ignore[union-attr]

    def transpose(self, x: Handle) -> Any:
        if isinstance(x.type, GlobalTensor):
            self.fail("the transpose of a whole tensor", "slice first: A[m:m+64, k:k+32].T")
        if isinstance(x.type, TileType):
            return self.call(OPS["transpose"], [x], {})
        return self.emit("view_transpose", [x], self.hint(x))

    @abstractmethod
    def call(self, f: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A call of an op or function: the next class does."""


class Kernel_:
    """Base of Kernel (kernel.py), so that kernels may call kernels."""

    fn: Any


def closure_of(f: FunctionType) -> dict[str, Any]:
    """Globals and closure variables by name."""
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    found = dict(f.__globals__)
    for name, cell in cells.items():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


__all__ = ["Expressions", "Kernel_", "closure_of"]
