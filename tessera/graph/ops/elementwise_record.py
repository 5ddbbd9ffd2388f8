"""How an elementwise op is declared: its record, with the rules of the family, and its function.

    EXP = elementwise("exp", np.exp, "exp({0})", lambda y, x: (lambda: y,))
    exp = public_unary("exp", EXP, "e**x")

A record gives the partial derivative with respect to each operand; the family builds both
derivative rules from them: jvp = sum_i t_i * p_i, vjp_i = unbroadcast(g * p_i).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import DTypeError
from ...lazy_dataclass import dataclass
from ...numerics import NumericType, as_type
from ...tensor import OPERATORS, Tensor
from .. import functions as F
from ..op import OPS, Aval, GraphOp, Sample, sample
from ..operand import dequantized, floating, promote, public, store
from ..trace import apply
from .broadcasting import broadcast_shapes, pad_batch_axes, unbroadcast
from .mixed_signs import compare_mixed_signs

BOOL = as_type("bool_")
Partials = Callable[..., tuple[Any, ...]]


# --- records ----------------------------------------------------------------------------------
def shape_rule(result: str | None) -> Callable[..., Aval]:
    def rule(*xs: Aval, **attrs: Any) -> Aval:
        operand, typed = xs[-1], xs[1:] if result == "select" else xs
        alike = all([x.shape == operand.shape for x in xs])
        shape = operand.shape if alike else broadcast_shapes(*(x.shape for x in xs))
        if any([x.type.dtype is not operand.type.dtype for x in typed]):
            names = ", ".join(str(x.type) for x in xs)
            raise DTypeError(f"operands of one type needed, got {names}")
        return Aval(shape, BOOL if result == "bool" else operand.type)

    return rule


def _jvp(partials: Partials) -> Callable[..., Any]:
    def rule(ts: tuple, y: Tensor, *xs: Tensor, **attrs: Any) -> Tensor | None:
        total = None
        for t, p in zip(ts, partials(y, *xs, **attrs), strict=True):
            if t is None or p is None:
                continue
            total = _times(t, p) if total is None else total + _times(t, p)
        return None if total is None else F.broadcast_to(total, y.shape)

    return rule


def _vjp(partials: Partials) -> Callable[..., Any]:
    def rule(g: Tensor, y: Tensor, *xs: Tensor, **attrs: Any) -> tuple:
        return tuple(None if p is None else unbroadcast(_times(g, p), x.shape)
                     for x, p in zip(xs, partials(y, *xs, **attrs), strict=True))

    return rule


def batch_rule(op_name: str) -> Callable[..., Any]:
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple[Tensor, bool]:
        ndim = max(x.ndim - b for x, b in zip(xs, batched, strict=True))
        aligned = [
            pad_batch_axes(x, ndim) if b else x for x, b in zip(xs, batched, strict=True)
        ]
        return apply(OPS[op_name], *aligned, **attrs), True

    return rule


ONE, MINUS = object(), object()  # the partials 1 and -1


@dataclass(frozen=True)
class Choosing:
    """A partial as a rule of the cotangent: where an operand is not chosen not even inf passes."""

    rule: Callable[[Tensor], Tensor]


def _times(g: Tensor, partial: Any) -> Tensor:
    if isinstance(partial, Choosing):
        return partial.rule(g)
    return g if partial is ONE else F.negative(g) if partial is MINUS else g * partial()


def elementwise(
    name: str,
    ref: Callable[..., Any],
    loop: str | None,
    partials: Partials | None = None,
    *,
    draw: str = "normal",
    arity: int = 1,
    result: str | None = None,
    samples: tuple[Sample, ...] | None = None,
    smooth: bool = True,
    linear: str = "",
    drops: tuple[int, ...] = (),
    drops_inf: tuple[int, ...] = (),
    loop_kinds: tuple[str, ...] = GraphOp.loop_kinds,
    doc: str = "",
    expand: Callable[..., Any] | None = None,
    hint: str = "",
) -> GraphOp:
    """Register an elementwise op. `partials(y, *xs)` gives per operand a function of no arguments,
    ONE, MINUS, a Choosing or None (no derivative). `expand` instead of `loop`: it in other ops."""
    if samples is None:
        shapes = [((2, 3), draw), ((3,), draw)][:arity] if arity < 3 else [((2, 3), draw)] * 3
        samples = (sample(*shapes), sample(*[((4,), draw)] * arity))
    return GraphOp(
        name,
        shape=shape_rule(result),
        ref=ref,
        vjp=_vjp(partials) if partials else None,
        jvp=_jvp(partials) if partials else None,
        batch=batch_rule(name),
        axes=",".join(["..."] * arity) + "->...",
        linear=linear,
        drops=drops,
        drops_inf=drops_inf,
        loop=loop,
        expand=expand,
        loop_kinds=loop_kinds,
        smooth=smooth and partials is not None,
        differentiable=partials is not None,
        samples=samples,
        doc=doc,
        hint=hint,
    )


# --- public functions -------------------------------------------------------------------------
NOT_FOR_BOOLS = frozenset({"subtract", "negative", "sign", "power", "floor_divide", "remainder"})


def refuse_bools(name: str, numeric: NumericType) -> None:
    if numeric.dtype.kind == "bool" and name in NOT_FOR_BOOLS:
        raise DTypeError(f"{name} of bools",
                         hint="use ~, & , | and ^, or cast to an integer type first")


def offer(op: GraphOp, fn: Callable, name: str, doc: str) -> Callable:
    """The public function of an op, of the module that asks. NumPy's ufunc that is the meaning of
    the op gives tensors for tensors: np.exp(x)."""
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = doc
    asks = sys._getframe(1)
    while asks.f_globals["__name__"] == __name__ and asks.f_back is not None:
        asks = asks.f_back
    fn.__module__ = asks.f_globals["__name__"]
    shown = public(fn)
    if isinstance(op.ref, np.ufunc):
        OPERATORS[f"ufunc_{op.ref.__name__}"] = shown
    return shown


def public_unary(
    name: str, op: GraphOp, doc: str, to_float: bool = True, to_whole: bool = False
) -> Callable[[Any], Tensor]:
    """The public function of an op of one operand. to_float: integers become f32. to_whole: a
    rounding, which leaves integers as they are."""
    def fn(x: Any) -> Tensor:
        if to_whole and (whole := integers(x)) is not None:
            return whole
        if to_float:
            c, numeric = floating(x)
        else:
            (c,), numeric = promote(x)
            refuse_bools(name, numeric)
        return store(apply(op, c), numeric)

    become = "stay as they are" if to_whole else "become f32" if to_float else "stay integers"
    return offer(op, fn, name,
                   f"{doc}, elementwise.\n\n    x: any shape. Integers {become}.\n    ")


def integers(x: Any) -> Tensor | None:
    """x where it is of integers."""
    x = dequantized(x)
    return x if x.dtype.kind in ("int", "uint") else None


def public_binary(name: str, op: GraphOp, doc: str, to_float: bool = False) -> Callable:
    """The public function of an op of two operands, promoted to one type."""
    def fn(a: Any, b: Any) -> Tensor:
        (x, y), numeric = promote(a, b)
        if to_float and numeric.dtype.kind != "float":
            x, y, numeric = floating(x)[0], floating(y)[0], as_type("f32")
        refuse_bools(name, numeric)
        return store(apply(op, x, y), numeric)

    return offer(op, fn, name, (
        f"{doc}, elementwise with NumPy broadcasting.\n\n"
        "    Python numbers take the tensor's type. Raises ShapeError, DTypeError.\n    "))


def public_predicate(name: str, op: GraphOp, doc: str, arity: int) -> Callable:
    """The public function of an op that gives bools."""
    if arity == 1:
        def fn(x: Any) -> Tensor:
            return apply(op, floating(x)[0])
    else:
        def fn(a: Any, b: Any) -> Tensor:  # type: ignore[misc]
            if (exact := compare_mixed_signs(op, a, b)) is not None:
                return exact
            (x, y), _ = promote(a, b)
            return apply(op, x, y)

    return offer(op, fn, name, f"{doc}, elementwise; a bool_ tensor.")
