"""Calls in a kernel: ops, Python builtins, math, and plain functions, which are traced in place."""

from __future__ import annotations

import ast
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType
from typing import Any

import numpy as np

from tessera.numerics import DType, NumericType, as_type, dtype_of_numpy, f32, i32
from tessera.tile.frontend.exits import RETURN, Exits
from tessera.tile.frontend.expressions import Expressions, Kernel_, closure_of
from tessera.tile.frontend.source import capture
from tessera.tile.ir.handles import (
    UNSET,
    FText,
    Handle,
    TensorRow,
    Undefined,
    describe,
    is_number,
    plain_number,
)
from tessera.tile.ir.op_record import OPS, TileOp
from tessera.tile.ir.types import Scalar, TileType

PICKS = ("gather", "scatter")
# Of the math module, with the meaning that ts has under the name, and no op in kernels.
OF_NUMBERS = frozenset({"acos", "asin", "cosh", "hypot", "isfinite", "log10", "prod", "sinh"})
MATHS = {"fabs": "abs", "pow": "pow"}  # names of the math module that are other ops here


class Calls(Expressions):
    """Evaluates call expressions."""

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
                args.append(self.argument(f, a, not args))
        if any(k.arg is None for k in e.keywords):
            self.fail("** is not part of the kernel language", "write the arguments out")
        out = self.call(f, args, {k.arg: self.argument(f, k.value, k.arg in ("x", "y"))
                                  for k in e.keywords if k.arg})
        if isinstance(f, TileOp) and f.name == "mask_causal" and isinstance(e.args[0], ast.Name):
            self.env[e.args[0].id] = out  # Q10: in place, and returned
        return out

    def argument(self, f: Any, e: ast.expr, place: bool) -> Any:
        """An argument; a place that an op picks from may have extents known at run time only."""
        picks = place and isinstance(f, TileOp) and f.name in PICKS
        if picks and isinstance(e, ast.Subscript):
            return self.part_of(e)
        return self.expr(e)

    def call(self, f: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(f, TileOp):
            return self.call_op(f, args, kwargs)
        if is_hashable(f) and f in BUILTINS:
            return self.call_op(OPS[BUILTINS[f]], args, kwargs)
        constant = not any(map(has_run_time, (*args, *kwargs.values())))
        if (same := same_op(f)) is not None:
            return self.call_op(same, args, kwargs)
        f = of_numbers(f) if constant else f
        module = getattr(f, "__module__", None)
        if module == "math" and not constant:
            return self.call_math(f, args)
        method = isinstance(f, BuiltinMethodType) and is_number(f.__self__)  # n.bit_length()
        if constant and (method or module in ("math", "numpy", "builtins", "_operator", "operator")
                         or isinstance(f, type) or any(f is p for p in PURE)):
            return plain_number(self.call_python(lambda: f(*args, **kwargs)))
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
        if name in OTHER_NAMES:
            self.fail(f"{name} of whole arrays inside a kernel",
                      " or ".join(f"write ts.tile.{n}" for n in OTHER_NAMES[name]))
        if isinstance(f, DType | NumericType):
            self.fail(f"{f} is a type, not a function", f"ts.tile.cast(x, ts.{f})")
        if not callable(f):
            self.fail(f"{describe(f)} is not a function")
        if isinstance(f, type) and issubclass(f, np.generic):
            self.fail(f"np.{f.__name__} of a run-time value", "a cast is written "
                      f"ts.tile.cast(x, ts.{dtype_of_numpy(np.dtype(f)).name})")
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
        return self.view_of_row(x) if isinstance(x, TensorRow) else x

    def fold_op(self, op: TileOp, xs: list[Any]) -> Any:
        """An elementwise op on compile-time numbers, by its own meaning in f64."""
        if op.name in ("maximum", "minimum", "abs"):
            return self.fold(op.name, xs)
        import numpy as np

        out = op.numpy(*(np.float64(x) for x in xs))  # type: ignore[misc]
        return out.item()

    def as_float(self, x: Any) -> Any:
        if isinstance(x, Handle) and isinstance(x.type, Scalar | TileType):
            return x if x.type.dtype.kind == "float" else self.cast(x, f32)
        return float(x) if is_number(x) else x

    def exponential(self, x: Any) -> Any:
        """exp of a difference of tiles gives 0 for -inf - -inf (a fully masked row)."""
        if isinstance(x, Handle) and isinstance(x.type, TileType):
            made = self.defined_by.get(x.value)
            if made is not None and made.name == "sub":
                types = self.type_of_args(made)
                handles = [Handle(a, t) if not hasattr(a, "dtype") else a
                           for a, t in zip(made.args, types, strict=True)]
                return self.emit("exp_sub", handles)
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
        saved = self.env, self.globals, self.source, self.node, self.argument_names
        self.env = dict(bound.arguments) | {RETURN: UNSET if exits.flags else None}
        self.env |= dict.fromkeys(exits.flags, False)
        self.globals = closure_of(f)
        self.argument_names = frozenset(bound.arguments)
        self.source = source
        self.active_calls.append(f)
        self.sites.append(site)
        try:
            self.statements(exits.body)
            result = self.env[RETURN]
        finally:
            self.env, self.globals, self.source, self.node, self.argument_names = saved
            self.active_calls.pop()
            self.sites.pop()
        if isinstance(result, Undefined):
            self.fail(f"{f.__name__} returns a value on some paths only", "return on every path")
        return None if result is UNSET else result

    @abstractmethod
    def statements(self, body: list[ast.stmt]) -> None:
        """Walk statements: the next class does."""


def is_hashable(f: Any) -> bool:
    """Whether f can be a key of BUILTINS: kernels, lists and the like are not."""
    return type(f).__hash__ is not None


def same_op(f: Any) -> TileOp | None:
    """ts.sqrt and its like in a kernel: `from tessera import *` hides math.sqrt by it."""
    found = OPS.get(getattr(f, "__name__", "")) if is_graph_op(f) else None
    return found if found and found.public and found.family == "elementwise" else None


def of_numbers(f: Any) -> Any:
    """ts.log10 and its like of compile-time numbers: what math has under the name they hid."""
    name = getattr(f, "__name__", "")
    return getattr(math, name) if is_graph_op(f) and name in OF_NUMBERS else f


def is_graph_op(f: Any) -> bool:
    return isinstance(f, FunctionType) and f.__module__.startswith("tessera.graph.")


def is_local_call(f: Any) -> bool:
    """A method of a traced value, such as x.astype."""
    return isinstance(f, FunctionType) and f.__module__ == "tessera.tile.frontend.expressions"


def has_run_time(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(has_run_time, x))
    return isinstance(x, Handle | TensorRow | Undefined | FText)


BUILTINS: dict[Any, str] = {
    min: "minimum_of", max: "maximum_of", abs: "abs", len: "length", float: "to_float",
    int: "to_int", bool: "to_bool", print: "print", pow: "power", round: "round", sum: "total",
    breakpoint: "breakpoint", range: "python_range",
}
# What functions of arrays are called in kernels, where the name is another.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "matmul": ("dot(a, b)",), "einsum": ("dot(a, b)",), "mean": ("row_mean(t)",),
    **{n: (f"row_{n}(t)", f"reduce_{n}(t)") for n in ("sum", "max", "min", "prod")},
    "softmax": ("softmax_online(t)", "exp(t - ts.tile.row_max(t)), divided by its row_sum"),
}
PURE = (as_type, isinstance, tuple, list, divmod, slice)
