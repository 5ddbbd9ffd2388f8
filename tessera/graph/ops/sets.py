"""Which elements there are: unique, nonzero, isin.

How many unique or nonzero elements there are depends on the data. Without `size` they are counted,
which needs values; with it the result has that extent, and a compiled function can compute it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import size_of
from ...errors import ArgumentError, ShapeError, TraceError
from ...numerics import as_type
from ...tensor import Tensor
from .. import functions as F
from ..operand import dequantized, promote, public, to_compute
from ..trace import Tracer, apply
from ..weak_numbers import is_number
from .gather import SEGMENT_SUM

INT64 = as_type("int64")


def _flat(x: Tensor) -> Tensor:
    return F.reshape(x, (size_of(x.shape),))


def _check_size(x: Tensor, size: Any, name: str) -> None:
    if size is None:
        if isinstance(x, Tracer):
            raise TraceError(f"{name} of a traced tensor: how many elements there are is not known",
                             hint=f"ts.{name}(x, size=n) gives n of them, filled up at the end")
    elif isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ArgumentError(f"size={size!r} is not a number of elements")


def _first_true(mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Positions of the first `size` true elements of a line, and which of them exist: [size]"""
    order = F.argsort(F.logical_not(mask))[:size]
    if order.shape[0] < size:
        order = F.pad(order, (0, size - order.shape[0]))
    return order, F.arange(size) < F.sum(mask)


@public
def nonzero(x: Any, size: int | None = None, fill_value: int = 0) -> tuple[Tensor, ...]:
    """Per axis the indices of the elements that are not 0, in row-major order: np.nonzero.

    x: [...] with an axis at least   y: a tuple of int64 [count], or [size] where size is given: the
    first `size` of them, `fill_value` behind the last one (jax.numpy.nonzero)
    Raises TraceError without size where x is traced, by jit, grad or vmap; ShapeError for a scalar.
    """
    x = dequantized(x)
    if x.ndim == 0:
        raise ShapeError("nonzero of a scalar", hint="x != 0")
    mask = x if x.dtype.kind == "bool" else F.not_equal(to_compute(x), 0)
    _check_size(mask, size, "nonzero")
    if size is None:
        return tuple(Tensor(np.ascontiguousarray(i), INT64) for i in np.nonzero(mask.numpy()))
    if size_of(x.shape) == 0:
        return tuple(F.full((size,), fill_value, "int64") for _ in x.shape)
    place, there = _first_true(_flat(mask), size)
    out: list[Tensor] = []
    for n in reversed(x.shape):
        out.append(F.where(there, F.remainder(place, n), fill_value))
        place = F.floor_divide(place, n)
    return tuple(reversed(out))


@public
def unique(x: Any, size: int | None = None, fill_value: Any = None, *, return_index: bool = False,
           return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct elements in rising order, NaN once and last: np.unique of the flat x.

    y: [count] of x's type, or [size] where size is given: the first `size` of them, behind the last
    one `fill_value`, the least element when None (jax.numpy.unique)
    index: where each stands first in the flat x   inverse: x's shape, the position of each element
    in y   counts: how often each occurs. They follow y in a tuple in this order; int64.
    The gradient goes to where each stands first. Raises TraceError without size where x is traced,
    by jit, grad or vmap.
    """
    x = dequantized(x)
    _check_size(x, size, "unique")
    wanted = (return_index, return_inverse, return_counts)
    if size is not None and size_of(x.shape) == 0:
        raise ShapeError(f"unique of no elements with size={size}")
    parts = _unique_eager(x) if size is None else _unique_sized(x, size, fill_value)
    out = (parts[0], *(p for p, want in zip(parts[1:], wanted, strict=True) if want))
    return out if any(wanted) else out[0]


def _unique_eager(x: Tensor) -> tuple[Tensor, ...]:
    (c,), _ = promote(x)
    _, index, inverse, counts = np.unique(c.numpy(), return_index=True, return_inverse=True,
                                          return_counts=True)
    made = [Tensor(np.asarray(a, np.int64), INT64) for a in (index, inverse, counts)]
    made[1] = F.reshape(made[1], x.shape)
    return F.take(_flat(x), made[0]), *made


def _unique_sized(x: Tensor, size: int, fill_value: Any) -> tuple[Tensor, ...]:
    flat = _flat(x)
    n = flat.shape[0]
    (c,), _ = promote(flat)
    order = F.argsort(c)
    ordered = F.take(c, order)
    a, b = ordered[:-1], ordered[1:]
    new = F.not_equal(a, b)
    if c.dtype.kind == "float":
        new = F.logical_and(new, F.logical_not(F.isnan(a)))
    new = F.concatenate([F.ones(1, "bool_"), new])
    place, there = _first_true(new, size)
    values = F.take(flat, F.take(order, place))
    least = F.take(flat, order[:1])
    values = F.where(there, values, least if fill_value is None else fill_value)
    rank = F.cumsum(F.cast(new, "int64")) - 1  # of the ordered elements
    inverse = F.take(rank, F.argsort(order))
    counts = apply(SEGMENT_SUM, F.ones(n, "int64"), rank, axis=0, extent=n)
    counts = counts[:size] if size <= n else F.pad(counts, (0, size - n))
    first = F.where(there, F.take(order, place), order[:1])
    return values, first, F.reshape(inverse, x.shape), counts


@public
def isin(x: Any, values: Any, invert: bool = False) -> Tensor:
    """Whether each element of x is among `values` (invert: is not): np.isin. NaN is in nothing.

    x: [...]   values: any shape   y: bool_ [...]
    """
    (a, b), _ = promote(*(t if is_number(t) or isinstance(t, list | tuple) else dequantized(t)
                          for t in (x, values)))
    line = F.sort(_flat(b))
    if line.shape[0] == 0:
        return F.full(a.shape, bool(invert), "bool_")
    place = F.minimum(F.searchsorted(line, a), line.shape[0] - 1)
    return (F.not_equal if invert else F.equal)(F.take(line, place), a)
