"""Norms of vectors and matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...tensor import Tensor
from .. import functions as F
from ..operand import axes_tuple, public, store
from .linalg import floats
from .reduce import root_at_zero


@public
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Norms of vectors (one axis) or matrices (two axes), as np.linalg.norm.

    vectors: p, 2 when None; inf, -inf, 0 (how many are not 0)
    matrices: "fro" when None, "nuc", 2 and -2 (singular values), 1, -1, inf, -inf (sums)
    Three axes and more: the norm of their elements as a vector, as `ts.vector_norm`, which also
    takes two for one. No axis and no ord: the 2-norm of all elements. The gradient of the 2-norm
    at 0 is 0. Raises ArgumentError for another ord.
    """
    (c,), numeric = floats(x)
    if c.ndim == 0:
        axes_tuple(axis, 0)  # refuses any but those of a scalar
        c, axis = F.reshape(c, (1,)), 0
        keepdims = False
    if axis is None and ord is None:
        axes: tuple[int, ...] = tuple(range(c.ndim))
        out = _euclidean(c, axes, keepdims)
    else:
        axes = _norm_axes(axis, c.ndim)
        rule = _matrix_norm if len(axes) == 2 else _vector_norm
        out = rule(c, ord, axes, keepdims)
    return store(out, numeric)


@public
def vector_norm(x: Any, ord: float = 2, axis: Any = None, keepdims: bool = False) -> Tensor:
    """(sum |x|^ord)^(1 / ord) of the elements along any number of axes, all when None.

    ord: a number; inf and -inf are the largest and the smallest |x|, 0 counts what is not 0
    np.linalg.vector_norm. The gradient of a p-norm at 0 is 0. Raises ArgumentError, AxisError.
    """
    (c,), numeric = floats(x)
    axes = axes_tuple(axis, c.ndim)
    if not axes:
        c, axes = F.expand_dims(c, 0), (0,)
        keepdims = False
    return store(_vector_norm(c, ord, axes, keepdims), numeric)


def _norm_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """In the order given: the row and the column axis of matrices."""
    given = tuple(range(ndim)) if axis is None else axis
    items = tuple(given) if isinstance(given, tuple | list) else (given,)
    axes_tuple(items, ndim)  # checks
    if not items:
        raise ArgumentError("a norm along no axis", hint="axis=-1 for vectors, axis=(-2, -1) for "
                            "matrices; ts.abs(x) is the norm of each element")
    return tuple(int(a) % ndim for a in items)


def _euclidean(x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return root_at_zero(F.sum(x * x, axis=axes, keepdims=keepdims))


def _vector_norm(x: Tensor, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    if ord is None or ord == 2:
        return _euclidean(x, axes, keepdims)
    if isinstance(ord, bool | str) or not isinstance(ord, int | float | np.number):
        raise ArgumentError(f"norm of a vector with ord={ord!r}", hint="a number, inf or -inf")
    size = F.abs(x)
    if abs(ord) == np.inf:
        return (F.max if ord > 0 else F.min)(size, axis=axes, keepdims=keepdims)
    if ord == 0:
        size, ord = F.cast(F.not_equal(x, 0.0), x.dtype), 1
    if ord == 1:
        return F.sum(size, axis=axes, keepdims=keepdims)
    total = F.sum(size ** float(ord), axis=axes, keepdims=keepdims)
    if ord < 0:
        return total ** (1.0 / float(ord))
    zero = F.equal(total, 0.0)  # where the root has no derivative, and the norm's is 0
    root = F.where(zero, 1.0, total) ** (1.0 / float(ord))
    return F.where(zero, 0.0, root)


def _matrix_norm(x: Tensor, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    if ord is None or ord == "fro":
        return _euclidean(x, axes, keepdims)
    rows, columns = axes
    last = {"nuc": F.sum, 2: F.max, -2: F.min}.get(ord)
    if last is not None:
        moved = F.moveaxis(x, rows, -1)
        moved = F.moveaxis(moved, columns - (columns > rows), -1)
        out = last(F.svd(moved)[1], axis=-1)
    elif ord in (1, -1, np.inf, -np.inf):
        along, over = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = F.sum(F.abs(x), axis=along, keepdims=True)
        out = (F.max if ord > 0 else F.min)(sums, axis=over, keepdims=True)
        out = F.squeeze(out, axes)
    else:
        raise ArgumentError(f"norm of a matrix with ord={ord!r}",
                            hint='"fro", "nuc", 1, -1, 2, -2, inf or -inf')
    return F.expand_dims(out, axes) if keepdims else out
