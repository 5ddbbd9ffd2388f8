"""Expressions of a kernel: names, operators, calls of ops and of helper functions."""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from tessera.errors import did_you_mean
from tessera.numerics import DType, NumericType, as_type, f32, i32
from tessera.tile.errors import TileError
from tessera.tile.exits import RETURN, Exits
from tessera.tile.handles import UNSET, Handle, NeedConstants, Row, Undefined, describe, is_number
from tessera.tile.indexing import Indexing
from tessera.tile.ops.registry import OPS, TileOp
from tessera.tile.source import capture
from tessera.tile.types import Buffer, Scalar, Tensor, Tile, View, space_of

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div",
          ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "bitand",
          ast.BitOr: "bitor", ast.BitXor: "bitxor", ast.LShift: "shl", ast.RShift: "shr"}
COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
MATHS = {"fabs": "abs", "pow": "pow"}  # names of the math module that are other ops here
UNARY = {ast.USub: "neg", ast.Invert: "bitnot", ast.Not: "not"}
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
            if all(self.expr(c) for c in gen.ifs):
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
        for scope in (self.env, self.globals, vars(builtins)):
            if name in scope:
                return scope[name]
        known = [n for n in (*self.env, *self.globals) if not n.startswith("_")]
        hint = did_you_mean(name, known)
        hint = hint if hint.startswith("did") else (
            "define it before the kernel, or in its body: for example i, j = block_m, block_n; the "
            "extents of annotations, tile_<dim> and block_<dim> are known by name")
        self.fail(f"{name!r} is not defined", hint, code="E_UNDEFINED_NAME")

    def get_BinOp(self, e: ast.BinOp) -> Any:
        if isinstance(e.op, ast.MatMult):
            return self.call(OPS["dot"], [self.expr(e.left), self.expr(e.right)], {})
        return self.binary(BINARY[type(e.op)], self.expr(e.left), self.expr(e.right))

    def binary(self, name: str, x: Any, y: Any, hint: str = "t") -> Any:
        if name == "pow" and isinstance(x, Handle) and is_number(y):
            return self.power(x, y)
        if isinstance(x, tuple | list | str) and isinstance(y, tuple | list | str | int):
            return self.fold(name, (x, y))
        if name == "div":
            return self.divide(x, y)
        return self.arithmetic(name, (x, y), hint)

    def divide(self, x: Any, y: Any) -> Any:
        """A tile by a row statistic: 0 / 0 is 0, so that rows without weight stay 0."""
        row = (isinstance(y, Handle) and isinstance(y.type, Tile) and isinstance(x, Handle)
               and isinstance(x.type, Tile) and len(x.type.shape) == 2
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
        x = self.expr(e.operand)
        if isinstance(e.op, ast.UAdd):
            return x
        if isinstance(e.op, ast.Not) and not isinstance(x, Handle):
            return not x
        return self.arithmetic(UNARY[type(e.op)], (x,))

    def get_Compare(self, e: ast.Compare) -> Any:
        left, out = self.expr(e.left), None
        for op, comparator in zip(e.ops, e.comparators, strict=True):
            right = self.expr(comparator)
            test = self.compare(op, left, right)
            out = test if out is None else self.logic("and", out, test)
            left = right
        return out

    def compare(self, op: ast.cmpop, x: Any, y: Any) -> Any:
        if type(op) in COMPARE and any(isinstance(v, Handle | Row | Undefined) for v in (x, y)):
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

    def get_BoolOp(self, e: ast.BoolOp) -> Any:
        """Compile-time operands decide early, as in Python; run-time ones are all evaluated."""
        name = "and" if isinstance(e.op, ast.And) else "or"
        out = self.expr(e.values[0])
        for value in e.values[1:]:
            if not isinstance(out, Handle) and bool(out) == (name == "or"):
                return out
            out = self.logic(name, out, self.expr(value))
        return out

    def logic(self, name: str, x: Any, y: Any) -> Any:
        """x and y / x or y where one is known: no op."""
        for known, other in ((x, y), (y, x)):
            if not isinstance(known, Handle) and isinstance(other, Handle):
                return self.truth(other) if bool(known) == (name == "and") else bool(known)
        return self.arithmetic(name, (x, y))

    def get_IfExp(self, e: ast.IfExp) -> Any:
        test = self.expr(e.test)
        if not isinstance(test, Handle):
            return self.expr(e.body if test else e.orelse)
        name = "__choice"
        def assign(value: ast.expr) -> list[ast.stmt]:
            made = ast.Assign([ast.Name(name, ast.Store())], value)
            return [ast.fix_missing_locations(ast.copy_location(made, e))]

        self.if_run_time(test, assign(e.body), assign(e.orelse))
        return self.env.pop(name)

    def if_run_time(self, test: Any, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        raise NotImplementedError

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
        if isinstance(x, Row):
            x = self.view_of_row(x)
        if isinstance(x, Handle):
            return self.handle_attribute(x, name)
        try:
            return getattr(x, name)
        except TileError as err:
            self.fail(err.message, err.hint)
        except AttributeError as err:
            if isinstance(x, ModuleType) and x.__name__ == "tessera.tile":
                public = [o.name for o in OPS.values() if o.public]
                self.fail(f"ts.tile has no {name!r}", did_you_mean(name, public), code="E_NAME")
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
        if name in ("astype", "to"):
            return lambda dtype: self.call(OPS["cast"], [x, dtype], {})
        kind = type(t).__name__.lower()
        hint = f"ts.tile.{name}(x)" if name in OPS else "a value has .T .shape .dtype .ndim .astype"
        self.fail(f"a {kind} has no attribute {name!r}", hint)

    def shape_of(self, x: Handle) -> tuple:
        if isinstance(x.type, Tensor):
            return tuple(self.extent(x, i) for i in range(self.rank(x)))
        return x.type.shape  # type: ignore[union-attr]

    def transpose(self, x: Handle) -> Any:
        if isinstance(x.type, Tensor):
            self.fail("the transpose of a whole tensor", "slice first: A[m:m+64, k:k+32].T")
        if isinstance(x.type, Tile):
            return self.call(OPS["transpose"], [x], {})
        return self.emit("view_transpose", [x], self.hint(x))

    # --- calls --------------------------------------------------------------------------------
    def get_Call(self, e: ast.Call) -> Any:
        f = self.expr(e.func)
        args: list[Any] = []
        for a in e.args:
            if isinstance(a, ast.Starred):
                items = self.expr(a.value)
                if not isinstance(items, tuple | list):
                    self.fail("* needs a tuple")
                args += items
            else:
                args.append(self.expr(a))
        if any(k.arg is None for k in e.keywords):
            self.fail("** is not part of the kernel language", "write the arguments out")
        out = self.call(f, args, {k.arg: self.expr(k.value) for k in e.keywords if k.arg})
        if isinstance(f, TileOp) and f.name == "mask_causal" and isinstance(e.args[0], ast.Name):
            self.env[e.args[0].id] = out  # Q10: in place, and returned
        return out

    def call(self, f: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(f, TileOp):
            return self.call_op(f, args, kwargs)
        if is_hashable(f) and f in BUILTINS:
            return self.call_op(OPS[BUILTINS[f]], args, kwargs)
        constant = not any(map(has_run_time, (*args, *kwargs.values())))
        module = getattr(f, "__module__", None)
        if module == "math" and not constant:
            return self.call_math(f, args)
        if constant and (module in ("math", "numpy", "builtins", "_operator", "operator")
                         or isinstance(f, type) or any(f is p for p in PURE)):
            return self.call_python(lambda: f(*args, **kwargs))
        if isinstance(f, Kernel_):
            return self.inline(f.fn, args, kwargs)
        if isinstance(f, FunctionType) and not f.__module__.startswith("tessera."):
            return self.inline(f, args, kwargs)
        if callable(f) and getattr(f, "__name__", "") == "<lambda>" or is_local_call(f):
            return f(*args, **kwargs)
        self.refuse_call(f)

    def call_python(self, f: Any, *args: Any) -> Any:
        """A Python function of compile-time values."""
        try:
            return f(*args)
        except (TypeError, ValueError, ArithmeticError) as err:
            self.fail(f"{getattr(f, '__name__', f)}: {err}")

    def refuse_call(self, f: Any) -> None:
        name = getattr(f, "__name__", str(f))
        if name in OPS and OPS[name].public:
            self.fail(f"{name} of whole arrays inside a kernel", f"write ts.tile.{name}(...)")
        if isinstance(f, DType | NumericType):
            self.fail(f"{f} is a type, not a function", f"ts.tile.cast(x, ts.{f})")
        if not callable(f):
            self.fail(f"{describe(f)} is not a function")
        self.fail(f"{name} cannot be called inside a kernel",
                  "ops of ts.tile, math, builtins such as min, and plain functions can")

    def call_math(self, f: Callable, args: list[Any]) -> Any:
        name = MATHS.get(f.__name__, f.__name__)
        if name not in OPS or OPS[name].family != "elementwise":
            self.fail(f"math.{f.__name__} of a run-time value",
                      "available: " + ", ".join(sorted(
                          o.name for o in OPS.values() if o.family == "elementwise" and o.public)))
        if name == "pow":
            return self.binary("pow", *args)
        out = self.call_op(OPS[name], args, {})
        return self.cast(out, i32) if name in ("floor", "ceil", "trunc") else out

    def call_op(self, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if op.lower is not None:
            return self.call_macro(op, args, kwargs)
        bound = self.bind_op(op, args, kwargs)
        if op.family == "elementwise":
            xs = [bound[n] for n in op.operands]
            if all(map(is_number, xs)):
                return self.fold_op(op, xs)
            if op.name == "exp":
                return self.exponential(xs[0])
            if op.name in ("exp2", "sqrt", "rsqrt") or op.rule is OPS["exp"].rule:
                xs = [self.as_float(x) for x in xs]
            return self.arithmetic(op.name, xs)
        xs = [self.resolve(bound[n]) for n in op.operands]
        return self.emit(op.name, xs, **{n: bound[n] for n in op.attrs})

    def call_macro(self, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
        assert op.lower is not None
        try:
            inspect.signature(op.lower).bind(self, *args, **kwargs)
        except TypeError as err:
            self.fail(f"{op.name}: {err}", f"ts.tile.{op.signature}")
        return op.lower(self, *args, **kwargs)

    def bind_op(self, op: TileOp, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = (*op.operands, *op.attrs)
        if len(args) > len(names) or set(kwargs) - set(names):
            self.fail(f"{op.name} does not take these arguments", f"ts.tile.{op.signature}")
        bound = dict(op.defaults) | dict(zip(names, args, strict=False)) | kwargs
        missing = [n for n in names if n not in bound]
        if missing:
            self.fail(f"{op.name} needs {', '.join(missing)}", f"ts.tile.{op.signature}")
        for n in op.attrs:
            if isinstance(bound[n], Handle):
                bound[n] = self.constant_int(bound[n], f"{n} of {op.name}")
        return bound

    def resolve(self, x: Any) -> Any:
        return self.view_of_row(x) if isinstance(x, Row) else x

    def fold_op(self, op: TileOp, xs: list[Any]) -> Any:
        """An elementwise op on compile-time numbers, by its own meaning in f64."""
        if op.name in ("maximum", "minimum", "abs"):
            return self.fold(op.name, xs)
        import numpy as np

        out = op.numpy(*(np.float64(x) for x in xs))  # type: ignore[misc]
        return out.item()

    def as_float(self, x: Any) -> Any:
        if isinstance(x, Handle) and isinstance(x.type, Scalar | Tile):
            return x if x.type.dtype.kind == "float" else self.cast(x, f32)
        return float(x) if is_number(x) else x

    def exponential(self, x: Any) -> Any:
        """exp of a difference of tiles gives 0 for -inf - -inf (a fully masked row)."""
        if isinstance(x, Handle) and isinstance(x.type, Tile):
            made = self.defined_by.get(x.value)
            if made is not None and made.name == "sub":
                types = self.type_of_args(made)
                handles = [Handle(a, t) if not hasattr(a, "dtype") else a
                           for a, t in zip(made.args, types, strict=True)]
                out = self.emit("exp_sub", handles)
                return self.shaped(out, [x])
        return self.arithmetic("exp", [self.as_float(x)])

    def type_of_args(self, op: Any) -> list[Any]:
        return [Scalar(a.dtype) if hasattr(a, "dtype") else self.type_of_value(a) for a in op.args]

    def type_of_value(self, value: Any) -> Any:
        made = self.defined_by.get(value)
        if made is not None:
            return next(d.type for d in made.outs if d.value == value)
        return self.block_types[value]

    block_types: dict[Any, Any]

    # --- helper functions ---------------------------------------------------------------------
    def inline(self, f: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The body of a plain function, traced in place."""
        if f in self.active_calls:
            self.fail(f"{f.__name__} calls itself", "kernels have no recursion: write a loop")
        try:
            bound = inspect.signature(f).bind(*args, **kwargs)
        except TypeError as err:
            self.fail(f"{f.__name__}: {err}")
        bound.apply_defaults()
        source, site = capture(f), self.where()
        exits = Exits(source.tree)
        saved = self.env, self.globals, self.source, self.node
        self.env = dict(bound.arguments) | {RETURN: UNSET if exits.flags else None}
        self.env |= dict.fromkeys(exits.flags, False)
        self.globals = closure_of(f)
        self.source = source
        self.active_calls.append(f)
        self.sites.append(site)
        try:
            self.statements(exits.body)
            result = self.env[RETURN]
        finally:
            self.env, self.globals, self.source, self.node = saved
            self.active_calls.pop()
            self.sites.pop()
        if isinstance(result, Undefined):
            self.fail(f"{f.__name__} returns a value on some paths only", "return on every path")
        return None if result is UNSET else result

    active_calls: list[Any]

    def statements(self, body: list[ast.stmt]) -> None:
        raise NotImplementedError


class FText:
    """An f-string with run-time parts."""

    def __init__(self, parts: tuple):
        self.parts = parts


class Kernel_:
    """Base of Kernel (kernel.py), so that kernels may call kernels."""

    fn: Any


def is_hashable(f: Any) -> bool:
    """Whether f can be a key of BUILTINS: kernels, lists and the like are not."""
    return type(f).__hash__ is not None


def is_local_call(f: Any) -> bool:
    """A method of a traced value, such as x.astype."""
    return isinstance(f, FunctionType) and f.__module__ == __name__


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


def has_run_time(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(has_run_time, x))
    return isinstance(x, Handle | Row | Undefined | FText)


BUILTINS: dict[Any, str] = {
    min: "minimum_of", max: "maximum_of", abs: "abs", len: "length", float: "to_float",
    int: "to_int", bool: "to_bool", print: "print", pow: "power", round: "round", sum: "total",
    breakpoint: "breakpoint", range: "python_range",
}
PURE = (as_type, isinstance, tuple, list, divmod, slice)
__all__ = ["Expressions", "FText", "Kernel_", "NeedConstants", "closure_of", "math", "View", "Buffer"]
