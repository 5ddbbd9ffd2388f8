"""Calls in a kernel: ops, Python builtins, math, and plain functions, which are traced in place."""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from types import BuiltinMethodType, FunctionType
from typing import Any

import numpy as np

from tessera.numerics import DType, NumericType, as_type, dtype_of_numpy, i32
from tessera.tile.builder.kernel_spec import Kernel_
from tessera.tile.frontend.constructs.literals import starred_items
from tessera.tile.frontend.constructs.names import ValueMethod
from tessera.tile.frontend.constructs.operators import binary
from tessera.tile.frontend.constructs.subscripts import region_of
from tessera.tile.frontend.exits import RETURN
from tessera.tile.frontend.source import capture_helper, closure_of
from tessera.tile.frontend.tracer import KernelTracer, expression
from tessera.tile.ir.handles import (
    UNSET,
    LoopRange,
    Undefined,
    describe,
    has_run_time,
    is_number,
    plain_number,
)
from tessera.tile.ir.op_record import OPS, TileOp

PICKS = ("gather", "scatter")
# Of the math module, with the meaning that ts has under the name, and no op in kernels.
OF_NUMBERS = frozenset({"acos", "asin", "cosh", "hypot", "isfinite", "log10", "prod", "sinh"})
MATHS = {"fabs": "abs", "pow": "pow"}  # names of the math module that are other ops here


@expression(ast.Call)
def call_expression(t: KernelTracer, e: ast.Call) -> Any:
    f = t.expr(e.func)
    args: list[Any] = []
    for a in e.args:
        if isinstance(a, ast.Starred):
            args += starred_items(t, t.expr(a.value))
        else:
            args.append(argument(t, f, a, not args))
    if any(k.arg is None for k in e.keywords):
        t.fail("** is not part of the kernel language", "write the arguments out")
    out = call(t, f, args, {k.arg: argument(t, f, k.value, k.arg in ("x", "y"))
                            for k in e.keywords if k.arg})
    if isinstance(f, TileOp) and f.name == "mask_causal" and isinstance(e.args[0], ast.Name):
        t.env[e.args[0].id] = out  # Q10: in place, and returned
    return out


def argument(t: KernelTracer, f: Any, e: ast.expr, place: bool) -> Any:
    """An argument; a place that an op picks from may have extents known at run time only."""
    picks = place and isinstance(f, TileOp) and f.name in PICKS
    if picks and isinstance(e, ast.Subscript):
        return region_of(t, e)
    return t.expr(e)


def call(t: KernelTracer, f: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(f, TileOp):
        return t.call_op(f, args, kwargs)
    if f is round and not any(map(has_run_time, (*args, *kwargs.values()))):
        return t.ir.call_python(lambda: round(*args, **kwargs))  # an int, as math.floor gives one
    if is_hashable(f) and f in BUILTINS:
        return t.call_op(OPS[BUILTINS[f]], args, kwargs)
    if any(f is s for s in SEQUENCES) and not kwargs:
        return sequence(t, f, args)
    if (f is tuple or f is list) and len(args) == 1 and isinstance(args[0],
                                                                   tuple | list | LoopRange):
        return f(starred_items(t, args[0]))
    constant = not any(map(has_run_time, (*args, *kwargs.values())))
    if (op := same_op(f)) is not None:
        return t.call_op(op, args, kwargs)
    f = of_numbers(f) if constant else f
    module = getattr(f, "__module__", None)
    if module == "math" and not constant:
        return call_math(t, f, args)
    method = isinstance(f, BuiltinMethodType) and is_number(f.__self__)  # n.bit_length()
    if constant and (method or module in ("math", "numpy", "builtins", "_operator", "operator")
                     or isinstance(f, type) or any(f is p for p in PURE)):
        return plain_number(t.ir.call_python(lambda: f(*args, **kwargs)))
    if isinstance(f, Kernel_):
        return inline(t, f.fn, args, kwargs)
    if isinstance(f, FunctionType) and not f.__module__.startswith("tessera."):
        return inline(t, f, args, kwargs)
    if isinstance(f, ValueMethod):
        return f.method(*args, **kwargs)
    refuse_call(t, f)


def sequence(t: KernelTracer, f: Any, args: list[Any]) -> Any:
    """enumerate, reversed or zip of what is known when the kernel is compiled: a tuple; of a range
    that counts up, the range that counts down."""
    r = args[0] if len(args) == 1 else None
    if f is reversed and isinstance(r, LoopRange) and isinstance(r.step, int) and r.step > 0 and (
            r.over in (None, "serial")):
        short = t.ir.arithmetic("sub", (t.ir.arithmetic("sub", (r.hi, r.lo)), 1))
        last = t.ir.arithmetic("mul", (t.ir.arithmetic("floordiv", (short, r.step)), r.step))
        return replace(r, lo=t.ir.arithmetic("add", (r.lo, last)),
                       hi=t.ir.arithmetic("sub", (r.lo, 1)), step=-r.step, has_step=True)
    if not all(isinstance(a, tuple | list) for a in args[:1 if f is enumerate else None]):
        t.fail(f"{f.__name__} of {', '.join(map(describe, args))}: it takes tuples, and reversed "
               "a range that counts up", "loop over range(...) and index by its number")
    return tuple(t.ir.call_python(lambda: f(*args)))


def refuse_call(t: KernelTracer, f: Any) -> None:
    name = getattr(f, "__name__", str(f))
    if name in OPS and OPS[name].public:
        t.fail(f"{name} of whole arrays inside a kernel", f"write ts.tile.{name}(...)")
    if name in OTHER_NAMES:
        t.fail(f"{name} of whole arrays inside a kernel",
               " or ".join(f"write ts.tile.{n}" for n in OTHER_NAMES[name]))
    if isinstance(f, DType | NumericType):
        t.fail(f"{f} is a type, not a function", f"ts.tile.cast(x, ts.{f})")
    if not callable(f):
        called = t.position.node.func if isinstance(t.position.node, ast.Call) else None
        named = called.id if isinstance(called, ast.Name) and called.id[:2] != "__" else ""
        t.fail(f"{describe(f)} is not a function" + (f", but what {named!r} is here" if named
                                                      else ""),
               "use another name: it is a function's of Python" if hasattr(builtins, named)
               else None)
    if isinstance(f, BuiltinMethodType) and isinstance(f.__self__, list):
        t.fail(f"{name} of a list: what a kernel has made does not change",
               "make it at once, [x[i] for i in range(4)], or have an array of each lane, "
               "ts.tile.alloc_register((4,), ts.f32)")
    if isinstance(f, type) and issubclass(f, np.generic):
        t.fail(f"np.{f.__name__} of a run-time value", "a cast is written "
               f"ts.tile.cast(x, ts.{dtype_of_numpy(np.dtype(f)).name})")
    t.fail(f"{name} cannot be called inside a kernel", "write x // n and x % n" if f is divmod else
           "ops of ts.tile, math, builtins such as min, and plain functions can")


def call_math(t: KernelTracer, f: Callable, args: list[Any]) -> Any:
    name = MATHS.get(f.__name__, f.__name__)
    if name not in OPS or OPS[name].family != "elementwise":
        t.fail(f"math.{f.__name__} of a run-time value",
               "available: " + ", ".join(sorted(
                   o.name for o in OPS.values() if o.family == "elementwise" and o.public)))
    if name == "pow":
        return binary(t, "pow", *args)
    out = t.call_op(OPS[name], args, {})
    return t.ir.cast(out, i32) if name in ("floor", "ceil", "trunc") else out


# --- helper functions -----------------------------------------------------------------------
def inline(t: KernelTracer, f: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The body of a plain function, traced in place."""
    if f in t.active_calls:
        t.fail(f"{f.__name__} calls itself", "kernels have no recursion: write a loop")
    try:
        bound = inspect.signature(f).bind(*args, **kwargs)
    except TypeError as err:
        t.fail(f"{f.__name__}: {err}")
    bound.apply_defaults()
    source, site = capture_helper(f), t.position.where()
    exits = source.exits
    saved = t.env, t.globals, t.position.source, t.position.node, t.argument_names
    t.env = dict(bound.arguments) | {RETURN: exits.unset}
    t.env |= dict.fromkeys(exits.flags, False)
    t.globals = closure_of(f)
    t.argument_names = frozenset(bound.arguments)
    t.position.source = source
    t.active_calls.append(f)
    t.position.sites.append(site)
    try:
        t.statements(exits.body)
        result = t.env[RETURN]
    finally:
        t.env, t.globals, t.position.source, t.position.node, t.argument_names = saved
        t.active_calls.pop()
        t.position.sites.pop()
    if isinstance(result, Undefined):
        t.fail(f"{f.__name__} returns a value on some paths only", "return on every path")
    return None if result is UNSET else result


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


BUILTINS: dict[Any, str] = {
    min: "minimum_of", max: "maximum_of", abs: "abs", len: "length", float: "to_float",
    int: "to_int", bool: "to_bool", print: "print", pow: "power", round: "round", sum: "total",
    breakpoint: "breakpoint", range: "python_range",
}
SEQUENCES = (enumerate, reversed, zip)
# What functions of arrays are called in kernels, where the name is another.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "matmul": ("dot(a, b)",), "einsum": ("dot(a, b)",), "mean": ("row_mean(t)",),
    **{n: (f"row_{n}(t)", f"reduce_{n}(t)") for n in ("sum", "max", "min", "prod")},
    "softmax": ("softmax_online(t)", "exp(t - ts.tile.row_max(t)), divided by its row_sum"),
}
PURE = (as_type, isinstance, tuple, list, divmod, slice)
