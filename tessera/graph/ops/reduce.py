"""Reductions along axes, in the accumulate type of the operand's policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...dims import size_of
from ...errors import ArgumentError, ShapeError
from ...numerics import DType, NumericType, as_type, decode, encode
from ...tensor import OPERATORS, Tensor, as_tensor
from .. import flops
from .. import functions as F
from ..op import OPS, Aval, GraphOp, sample
from ..operand import (
    axes_tuple,
    axis_index,
    compute_type,
    countable,
    floating,
    promote,
    public,
    scalar_line,
    store,
    to_compute,
)
from ..trace import apply
from .blocked_sum import blocked_sum, running_sum
from .cumulative import shift

INT64 = as_type("int64")


def reduced_shape(shape: tuple, axis: tuple[int, ...], keepdims: bool) -> tuple:
    if keepdims:
        return tuple(1 if i in axis else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axis)


def restore_axes(g: Tensor, like: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    """A reduced value stretched back over the axes it was reduced along."""
    if not keepdims:
        g = F.reshape(g, reduced_shape(tuple(like.shape), axis, True))
    return F.broadcast_to(g, like.shape)


def _shape(result: NumericType | None = None, nonempty: bool = False) -> Callable[..., Aval]:
    def rule(x: Aval, axis: tuple, keepdims: bool, **attrs: Any) -> Aval:
        if nonempty and any(x.shape[a] == 0 for a in axis):
            raise ShapeError(f"no elements to reduce along axis {axis} of {x}",
                             hint="the axis has extent 0, and this reduction has no identity")
        return Aval(reduced_shape(x.shape, axis, keepdims), result or x.type)

    return rule


def _batch(name: str) -> Callable[..., Any]:
    def rule(size: Any, batched: tuple, x: Tensor, axis: tuple, **attrs: Any) -> tuple:
        return apply(OPS[name], x, axis=tuple(a + 1 for a in axis), **attrs), True

    return rule


def _letters(x: Aval, axis: tuple, keepdims: bool, **attrs: Any) -> str:
    names = "abcdefgh"[: len(x.shape)]
    out = "".join("1" if i in axis else c for i, c in enumerate(names) if keepdims or i not in axis)
    return f"{names}->{out}"


_AXES = (
    sample((2, 3), axis=(1,), keepdims=False),
    sample((2, 3), axis=(0,), keepdims=True),
    sample((2, 3, 2), axis=(0, 2), keepdims=False),
)
_APART = tuple(
    type(s)(tuple(type(a)(a.shape, "distinct") for a in s.args), s.attrs) for s in _AXES
)


# --- sum, prod --------------------------------------------------------------------------------
def sum_ref(x: np.ndarray, axis: tuple, keepdims: bool, accum: DType) -> np.ndarray:
    if accum.bits == 64 and x.dtype == np.float32:
        return np.asarray(np.sum(x, axis=axis, keepdims=keepdims, dtype=np.float64), np.float32)
    if accum.numpy == x.dtype or accum.kind != "float" or accum.bits >= 32:
        if x.dtype.kind == "f":
            return blocked_sum(x, axis, keepdims)
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)
    return _sequential_sum(x, axis, keepdims, accum)


def _sequential_sum(x: np.ndarray, axis: tuple, keepdims: bool, accum: DType) -> np.ndarray:
    """One addition at a time, each rounded to the accumulate type."""
    moved = np.moveaxis(x, axis, range(len(axis))).reshape(-1, *reduced_shape(x.shape, axis, False))
    total = np.zeros(moved.shape[1:], np.float32)
    for row in moved:
        total = decode(encode(total + row, accum), accum)
    return total.reshape(reduced_shape(x.shape, axis, keepdims)).astype(x.dtype)


SUM = GraphOp(
    "reduce_sum",
    shape=_shape(),
    ref=sum_ref,
    vjp=lambda g, y, x, axis, keepdims, accum: (restore_axes(g, x, axis, keepdims),),
    jvp=lambda ts, y, x, **a: apply(SUM, ts[0], **a),
    batch=_batch("reduce_sum"),
    axes=_letters,
    reduces="sum",
    linear="joint",
    samples=tuple(
        type(s)(s.args, {**s.attrs, "accum": as_type("f32").dtype}) for s in _AXES
    ),
    reduction="sum",
    hint="a sum beyond the range of the type: take the mean of parts, or a wider @accum",
    doc="sum along axes in the accumulate type",
)


def _prod_partial(y: Tensor, x: Tensor, axis: tuple, keepdims: bool) -> Tensor:
    """prod_{i != j} x_i, exact where elements are 0: exclusive products from both sides."""
    moved = F.moveaxis(x, axis[0], -1)
    before = _exclusive_product(moved)
    after = F.flip(_exclusive_product(F.flip(moved, -1)), -1)
    return F.moveaxis(before * after, -1, axis[0])


def _exclusive_product(x: Tensor) -> Tensor:
    """Products of the elements before each one along the last axis."""
    return shift(F.cumprod(x, axis=-1), x.ndim - 1, 1.0)


PROD = GraphOp(
    "reduce_prod",
    shape=_shape(),
    ref=lambda x, axis, keepdims: np.prod(x, axis=axis, keepdims=keepdims, dtype=x.dtype),
    vjp=lambda g, y, x, axis, keepdims: (
        restore_axes(g, x, axis, keepdims) * _prod_partial(y, x, axis, keepdims),
    ),
    jvp=lambda ts, y, x, axis, keepdims: sum(
        ts[0] * _prod_partial(y, x, axis, keepdims), axis=axis, keepdims=keepdims
    ),
    batch=_batch("reduce_prod"),
    axes=_letters,
    samples=(sample((2, 3), axis=(1,), keepdims=False), sample((4,), axis=(0,), keepdims=True)),
    reduction="prod",
    doc="product along one axis",
)


# --- max, min ---------------------------------------------------------------------------------
def chosen(g: Tensor, y: Tensor, x: Tensor, axis: tuple, keepdims: bool) -> Tensor:
    """What each element has of g: those equal to the extremum share it, the others have none, also
    of an infinite one. All have NaN where the extremum is NaN, which nothing is equal to."""
    mask = F.equal(x, restore_axes(y, x, axis, keepdims))
    count = sum(F.cast(mask, x.type), axis=axis, keepdims=True)
    return F.where(mask, g / count, 0.0 / count)


def _extremum(way: str, ref: Callable, doc: str) -> GraphOp:
    name = f"reduce_{way}"
    return GraphOp(
        name,
        shape=_shape(nonempty=True),
        ref=lambda x, axis, keepdims: ref(x, axis=axis, keepdims=keepdims),
        vjp=lambda g, y, x, axis, keepdims: (
            chosen(restore_axes(g, x, axis, keepdims), y, x, axis, keepdims),
        ),
        jvp=lambda ts, y, x, axis, keepdims: sum(
            chosen(ts[0], y, x, axis, keepdims), axis=axis, keepdims=keepdims
        ),
        batch=_batch(name),
        axes=_letters,
        reduces=way,
        reduction=way,
        drops_inf=(0,),
        smooth=False,
        samples=_APART,
        doc=doc,
    )


MAX = _extremum("max", np.max, "largest element; NaN propagates; ties share the gradient")
MIN = _extremum("min", np.min, "smallest element; NaN propagates; ties share the gradient")


def _arg(name: str, ref: Callable, way: str) -> GraphOp:
    return GraphOp(
        name,
        lines=way,
        shape=_shape(INT64, nonempty=True),
        ref=lambda x, axis, keepdims: ref(x, axis=axis[0], keepdims=keepdims),
        batch=_batch(name),
        axes=_letters,
        drops_inf=(0,),
        differentiable=False,
        flops=flops.per_operand,
        samples=(sample(((2, 3), "distinct"), axis=(1,), keepdims=False),),
        doc="index of the extremum along an axis; ties give the lowest index",
    )


ARGMAX = _arg("argmax", np.argmax, "largest")
ARGMIN = _arg("argmin", np.argmin, "smallest")


def _logical(way: str, ref: Callable, doc: str) -> GraphOp:
    name = f"reduce_{way}"
    return GraphOp(
        name,
        shape=_shape(),
        ref=lambda x, axis, keepdims: ref(x, axis=axis, keepdims=keepdims),
        batch=_batch(name),
        axes=_letters,
        differentiable=False,
        reduction=way,
        samples=(sample(((2, 3), "bool"), axis=(1,), keepdims=False),),
        doc=doc,
    )


ANY, ALL = _logical("any", np.any, "or of bools"), _logical("all", np.all, "and of bools")

# --- cumulative -------------------------------------------------------------------------------
def _cumsum_ref(x: np.ndarray, axis: int) -> np.ndarray:
    return running_sum(x, axis) if x.dtype.kind == "f" else np.cumsum(x, axis=axis, dtype=x.dtype)


CUMSUM = GraphOp(
    "cumsum",
    shape=lambda x, axis: x,
    ref=_cumsum_ref,
    vjp=lambda g, y, x, axis: (
        F.flip(apply(CUMSUM, F.flip(g, axis), axis=axis), axis),
    ),
    jvp=lambda ts, y, x, axis: apply(CUMSUM, ts[0], axis=axis),
    batch=lambda size, batched, x, axis: (apply(CUMSUM, x, axis=axis + 1), True),
    axes=lambda x, axis: "{0}->{0}".format(
        "".join("_" if d == axis else c for d, c in enumerate("abcdefgh"[: x.ndim]))),
    linear="joint",
    lines="running sum",
    samples=(sample((4,), axis=0), sample((2, 3), axis=1)),
    flops=flops.per_operand,
    doc="running sums along an axis",
)


# --- public functions -------------------------------------------------------------------------
def accumulate_dtype(numeric: NumericType) -> DType:
    """The dtype in which sums of `numeric` run."""
    return numeric.policy.accum or compute_type(numeric).dtype


@public
def sum(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Sum along axes (all when None), in the accumulate type, in a fixed order.

    An error of at most 128 roundings, whatever the length and the axes: docs/reference/numerics.md,
    Sums.

    The result has x's type; bools count as int64, integers of fewer than 32 bits as int32, as in
    a product. Raises AxisError.
    """
    x = countable(as_tensor(x))
    c = to_compute(x)
    axes = axes_tuple(axis, x.ndim)
    if not axes:
        return x
    out = apply(SUM, c, axis=axes, keepdims=bool(keepdims), accum=accumulate_dtype(x.type))
    return store(out, x.type)


@public
def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Mean along axes (all when None), summed in the accumulate type. Integers give f32."""
    c, numeric = floating(x)
    axes = axes_tuple(axis, c.ndim)
    count = size_of([c.shape[a] for a in axes])
    total = apply(SUM, c, axis=axes, keepdims=bool(keepdims), accum=accumulate_dtype(numeric)) \
        if axes else c
    if isinstance(count, int):
        return store(total / count, numeric)
    return store(total / apply_count(count, total), numeric)


def apply_count(count: Any, like: Tensor) -> Tensor:
    """A symbolic number of elements as a scalar of `like`'s type."""
    return sum(F.ones((count,), like.type))


@public
def var(x: Any, axis: Any = None, keepdims: bool = False, *, ddof: int = 0) -> Tensor:
    """mean((x - mean x)^2) along axes, in two passes; divides by n - ddof."""
    c, numeric = floating(x)
    return store(_variance(c, axis, keepdims, ddof), numeric)


def _variance(c: Tensor, axis: Any, keepdims: bool, ddof: int) -> Tensor:
    axes = axes_tuple(axis, c.ndim)
    spread = apply(OPS["center"], c, axis=axes, ddof=ddof, accum=accumulate_dtype(c.type))[1]
    return spread if keepdims else F.reshape(spread, reduced_shape(tuple(c.shape), axes, False))


@public
def std(x: Any, axis: Any = None, keepdims: bool = False, *, ddof: int = 0) -> Tensor:
    """sqrt(var(x)), rounded once to x's type. The gradient is 0 where all elements are equal."""
    c, numeric = floating(x)
    return store(root_at_zero(_variance(c, axis, keepdims, ddof)), numeric)


def root_at_zero(x: Tensor) -> Tensor:
    """sqrt(x) of a sum of squares: with derivative 0 at 0, where the root has none."""
    zero = F.equal(x, 0.0)
    return F.where(zero, 0.0, F.sqrt(F.where(zero, 1.0, x)))


@public
def prod(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Product along axes (all when None); bools and narrow integers as in `ts.sum`."""
    (c,), numeric = promote(countable(as_tensor(x)))
    axes = axes_tuple(axis, c.ndim)
    for a in reversed(axes):
        c = apply(PROD, c, axis=(a,), keepdims=bool(keepdims))
    return store(c, numeric)


def _public_extremum(name: str, op: GraphOp, word: str) -> Callable:
    def fn(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        (c,), numeric = promote(x)
        axes = axes_tuple(axis, c.ndim)
        out = apply(op, c, axis=axes, keepdims=bool(keepdims)) if axes else c
        return store(out, numeric)

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = (
        f"The {word} element along axes (all when None). NaN propagates; elements that tie share\n"
        "    the gradient equally. Raises ShapeError on an axis of extent 0.\n    "
    )
    return public(fn)


max_ = _public_extremum("max", MAX, "largest")
min_ = _public_extremum("min", MIN, "smallest")


def _public_arg(name: str, op: GraphOp, word: str) -> Callable:
    def fn(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
        (c,), _ = promote(x)
        if axis is None:
            flat = apply(op, F.reshape(c, (size_of(c.shape),)), axis=(0,), keepdims=False)
            return F.reshape(flat, (1,) * c.ndim) if keepdims else flat
        return apply(op, c, axis=(axis_index(axis, c.ndim),), keepdims=bool(keepdims))

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f"Index of the {word} element along an axis (of the flat x when None); int64."
    return public(scalar_line(fn))


argmax = _public_arg("argmax", ARGMAX, "largest")
argmin = _public_arg("argmin", ARGMIN, "smallest")


def _public_logical(name: str, op: GraphOp, doc: str) -> Callable:
    def fn(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        x = as_tensor(x)
        if x.dtype.kind != "bool":
            x = F.not_equal(to_compute(x), 0)
        axes = axes_tuple(axis, x.ndim)
        return apply(op, x, axis=axes, keepdims=bool(keepdims)) if axes else x

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f"{doc} Numbers are true where they are not 0: NaN is true. A bool_ tensor."
    return public(fn)


any_ = _public_logical("any", ANY, "Whether any element along axes (all when None) is true.")
all_ = _public_logical("all", ALL, "Whether all elements along axes (all when None) are true.")


@public
@scalar_line
def cumsum(x: Any, axis: int = 0) -> Tensor:
    """Running sums along an axis, added in f64 and rounded to the compute type. Narrow integers as
    in `ts.sum`."""
    x = as_tensor(x)
    if x.dtype.kind == "bool":
        raise ArgumentError("cumsum of bools", hint="cast to int64 first")
    (c,), numeric = promote(countable(x))
    return store(apply(CUMSUM, c, axis=axis_index(axis, c.ndim)), numeric)


OPERATORS.update(
    sum=sum, mean=mean, var=var, std=std, prod=prod, max=max_, min=min_, argmax=argmax,
    argmin=argmin, any=any_, all=all_, cumsum=cumsum,
)
