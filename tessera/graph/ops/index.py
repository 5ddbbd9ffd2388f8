"""Indexing: the subscripts of NumPy as ops; diagonals and triangles."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ...dims import Dim, show_shape
from ...errors import AxisError, DTypeError, ShapeError, TraceError
from ...tensor import OPERATORS, Tensor
from .. import flops
from .. import functions as F
from ..element import Element, index_names
from ..op import VIEW, Aval, GraphOp, sample
from ..operand import axis_index, dequantized, named, public
from ..trace import Tracer, apply
from .elementwise import WHERE
from .shape import SLICE


@named("subscript")
def getitem(x: Tensor, index: Any) -> Tensor:
    """x[index], NumPy's rules: integers, slices, None, `...`, integer and bool tensors or arrays.

    Integer tensors broadcast together and may depend on data; a bool mask selects a number of
    elements that depends on data, so its values must be known (not traced).
    Raises AxisError for an index outside (of an integer tensor: when it runs), TraceError,
    ShapeError, DTypeError.
    """
    x = dequantized(x)
    items = expand_masks(list(index) if isinstance(index, tuple) else [index])
    items = expand_ellipsis(items, x)
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    flips, arrays, axis = [], [], 0
    dims: list[tuple[str, Any]] = []  # what becomes of each axis: ("keep" | "drop" | "new", axis)
    for item in items:
        if item is None:
            dims.append(("new", None))
            continue
        if axis >= x.ndim:
            used = sum(i is not None for i in items)
            raise AxisError(f"{used} indices for the {x.ndim} axes of {show_shape(x.shape)}")
        if isinstance(item, slice):
            flips += _apply_slice(item, axis, x, starts, stops, steps)
            dims.append(("keep", axis))
        elif _is_integer(item):
            starts[axis] = _integer(item, axis, x)
            stops[axis] = starts[axis] + 1
            dims.append(("drop", axis))
        else:
            _check_mask(item, axis, x)
            arrays.append((len(dims), item))
            dims.append(("keep", axis))
        axis += 1
    dims += [("keep", a) for a in range(axis, x.ndim)]
    out = _basic(x, starts, stops, steps, flips, dims)
    return _gather(out, dims, arrays, items) if arrays else out


def _basic(x: Tensor, starts: list, stops: list, steps: list, flips: list, dims: list) -> Tensor:
    whole = all(a == 0 for a in starts) and tuple(stops) == tuple(x.shape)
    if not (whole and all(s == 1 for s in steps)):
        x = apply(SLICE, x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))
    if flips:
        x = F.flip(x, tuple(flips))
    shape = [1 if kind == "new" else x.shape[a] for kind, a in dims if kind != "drop"]
    return F.reshape(x, shape)


class MaskIndex(np.ndarray):
    """The positions along one axis at which a bool mask of extent `extent` is true."""

    extent: int


def expand_masks(items: list) -> list:
    """Each bool mask as one array of positions per axis of the mask."""
    out: list = []
    for item in items:
        if isinstance(item, list | range):
            item = np.asarray(item, None if len(item) else np.int64)
        if isinstance(item, bool | np.bool_):
            raise DTypeError(f"{item} as an index", hint="x[None] adds an axis")
        if is_mask(item):
            out += _mask_positions(item)
        else:
            out.append(item)
    return out


def is_mask(item: Any) -> bool:
    return isinstance(item, Tensor | np.ndarray) and str(item.dtype).startswith("bool")


def needs_values(mask: Any) -> bool:
    """Whether it is traced, so that nobody knows how many elements it selects."""
    return isinstance(mask, Tracer)


def _mask_positions(mask: Any) -> list[MaskIndex]:
    if needs_values(mask):
        raise TraceError(
            "indexing by a traced bool mask: the number of elements it selects is not known",
            hint="ts.where(mask, x, 0) keeps the shape; a mask of known values may index",
        )
    values = np.asarray(mask)
    if values.ndim == 0:
        raise DTypeError("a bool scalar as an index", hint="x[None] adds an axis")
    found = []
    for positions, extent in zip(values.nonzero(), values.shape, strict=True):
        places = positions.astype(np.int64).view(MaskIndex)
        places.extent = extent
        found.append(places)
    return found


def _check_mask(item: Any, axis: int, x: Tensor) -> None:
    if isinstance(item, MaskIndex) and item.extent != x.shape[axis]:
        raise ShapeError(f"a mask of extent {item.extent} for axis {axis} of "
                         f"{show_shape(x.shape)}", hint="masks have the extents of their axes")


def expand_ellipsis(items: list, x: Tensor) -> list:
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    if not places:
        return items
    if len(places) > 1:
        raise AxisError("an index can hold only one ellipsis")
    used = sum(i is not None and i is not Ellipsis for i in items)
    fill = [slice(None)] * (x.ndim - used)
    return items[: places[0]] + fill + items[places[0] + 1:]


def _is_integer(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool_)


def _integer(item: Any, axis: int, x: Tensor) -> int:
    extent, i = x.shape[axis], int(item)
    if isinstance(extent, int) and not -extent <= i < extent:
        raise AxisError(f"index {i} is outside axis {axis} of extent {extent}",
                        hint=f"valid: {-extent}..{extent - 1}" if extent else "the axis is empty")
    return i + extent if i < 0 else i


def _apply_slice(item: slice, axis: int, x: Tensor, starts: list, stops: list,
                 steps: list) -> list[int]:
    """Write the slice of one axis; returns the axis when it is to be flipped."""
    extent = x.shape[axis]
    if item.start is None and item.stop is None and item.step is None:
        return []  # not by ==, which compares bounds that are traced
    if item.step is not None and operator.index(item.step) == 0:
        raise AxisError("a slice cannot have a step of 0")
    if not isinstance(extent, int):
        starts[axis], stops[axis], steps[axis] = _symbolic_slice(item, extent)
        return []
    picked = range(extent)[item]
    step = abs(picked.step)
    low, high = (picked[0], picked[-1]) if len(picked) else (0, -1)
    if picked.step < 0:
        low, high = high, low
        if not len(picked):
            low, high = 0, -1
    starts[axis], stops[axis], steps[axis] = low, high + 1, step
    return [axis] if picked.step < 0 else []


def _symbolic_slice(item: slice, extent: Dim) -> tuple[Any, Any, int]:
    """(start, stop, step) of a slice of a symbolic extent; an integer bound is taken to lie
    inside, where Python would clamp it."""
    def bound(value: Any, default: Any) -> Any:
        if value is None:
            return default
        return extent + value if isinstance(value, int) and value < 0 else value

    step = 1 if item.step is None else item.step
    if step < 0:
        raise TraceError(f"a slice with a negative step along the symbolic extent {extent}",
                         hint="ts.flip(x, axis), then slice", code="E_SYMBOLIC_DIM")
    return bound(item.start, 0), bound(item.stop, extent), step


def _gather(x: Tensor, dims: list, arrays: list, items: list) -> Tensor:
    """Pick by the index tensors; their axes stand where NumPy puts them: at the first one when
    tensors and integers are neighbours in the index, else in front."""
    kept = [i for i, (kind, _) in enumerate(dims) if kind != "drop"]
    advanced = [i for i, item in enumerate(items) if item is not None
                and not isinstance(item, slice)]
    together = advanced == list(range(advanced[0], advanced[-1] + 1))
    at = sum(i < advanced[0] for i in kept) if together else 0
    axes = [kept.index(place) for place, _ in arrays]
    ids = [np.asarray(i) if isinstance(i, MaskIndex) else i for _, i in arrays]
    return F.gather_axes(x, axes, ids, at)


# --- diagonals and triangles ------------------------------------------------------------------
def _diagonal_extent(n: Any, m: Any, offset: int) -> Any:
    if isinstance(n, int) and isinstance(m, int):
        return max(0, min(n + min(offset, 0), m - max(offset, 0)))
    if n == m:
        return n - abs(offset)
    raise ShapeError(f"the diagonal of symbolic extents {n} and {m} is not known")


def _diagonal_shape(x: Aval, offset: int, axis1: int, axis2: int) -> Aval:
    rest = tuple(d for i, d in enumerate(x.shape) if i not in (axis1, axis2))
    length = _diagonal_extent(x.shape[axis1], x.shape[axis2], offset)
    return Aval((*rest, length), x.type)


def _embed_shape(x: Aval, offset: int, axis1: int, axis2: int, extents: tuple) -> Aval:
    length = _diagonal_extent(extents[0], extents[1], offset)
    if x.shape[-1] != length:
        raise ShapeError(f"{x.shape[-1]} elements on a diagonal of {length}")
    shape = list(x.shape[:-1])
    for axis, n in sorted(zip((axis1, axis2), extents, strict=True)):
        shape.insert(axis, n)
    return Aval(tuple(shape), x.type)


def _embed_ref(x: np.ndarray, offset: int, axis1: int, axis2: int, extents: tuple) -> np.ndarray:
    out = np.zeros((*x.shape[:-1], *extents), x.dtype)
    lane = np.arange(x.shape[-1])
    out[..., lane + max(-offset, 0), lane + max(offset, 0)] = x
    return np.moveaxis(out, (-2, -1), (axis1, axis2))


def _rest_names(shape: tuple, axis1: int, axis2: int) -> tuple[str, str]:
    """Letters with "_" for the two axes, and without these."""
    names = "abcdefghijklmnopqrstuvwxyz"
    full = "".join("_" if i in (axis1, axis2) else names[i] for i in range(len(shape)))
    return full, full.replace("_", "")


def _diagonal_element(x: Aval, offset: int, axis1: int, axis2: int) -> Element:
    last = x.ndim - 2
    rest = iter(range(last))
    at = {axis1: f"o{last} + {max(-offset, 0)}", axis2: f"o{last} + {max(offset, 0)}"}
    return Element(f"x0[{index_names([at.get(a) or next(rest) for a in range(x.ndim)])}]")


def _embed_element(x: Aval, offset: int, axis1: int, axis2: int, extents: tuple) -> Element:
    rest = [a for a in range(x.ndim + 1) if a not in (axis1, axis2)]
    along = f"where(o{axis2} - o{axis1} == {offset}, o{axis1} - {max(-offset, 0)}, -1)"
    return Element(f"x0[{index_names([*rest, along])}]")


DIAGONAL = GraphOp(
    "diagonal",
    shape=_diagonal_shape,
    ref=lambda x, offset, axis1, axis2: np.diagonal(x, offset, axis1, axis2),
    vjp=lambda g, y, x, offset, axis1, axis2: (
        apply(DIAGONAL_EMBED, g, offset=offset, axis1=axis1, axis2=axis2,
              extents=(x.shape[axis1], x.shape[axis2])),
    ),
    jvp=lambda ts, y, x, **a: apply(DIAGONAL, ts[0], **a),
    axes=lambda x, offset, axis1, axis2: "{}->{}_".format(*_rest_names(x.shape, axis1, axis2)),
    batch=lambda size, batched, x, offset, axis1, axis2: (
        apply(DIAGONAL, x, offset=offset, axis1=axis1 + 1, axis2=axis2 + 1), True
    ),
    memory=VIEW,
    element=_diagonal_element,
    drops=(0,),
    samples=(
        sample((3, 3), offset=0, axis1=0, axis2=1),
        sample((3, 2, 4), offset=1, axis1=2, axis2=0),
        sample((4, 3), offset=-2, axis1=0, axis2=1),
    ),
    doc="elements with index axis2 - index axis1 = offset, as a last axis",
)

DIAGONAL_EMBED = GraphOp(
    "diagonal_embed",
    shape=_embed_shape,
    ref=_embed_ref,
    vjp=lambda g, y, x, offset, axis1, axis2, extents: (
        apply(DIAGONAL, g, offset=offset, axis1=axis1, axis2=axis2),
    ),
    jvp=lambda ts, y, x, **a: apply(DIAGONAL_EMBED, ts[0], **a),
    axes=lambda x, offset, axis1, axis2, extents: "{1}_->{0}".format(
        *_rest_names((*x.shape, 1), axis1, axis2)
    ),
    batch=lambda size, batched, x, offset, axis1, axis2, extents: (
        apply(DIAGONAL_EMBED, x, offset=offset, axis1=axis1 + 1, axis2=axis2 + 1,
              extents=extents), True,
    ),
    element=_embed_element,
    samples=(
        sample((3,), offset=0, axis1=0, axis2=1, extents=(3, 3)),
        sample((2, 3), offset=1, axis1=2, axis2=0, extents=(3, 4)),
    ),
    flops=flops.none,
    doc="zeros with x on a diagonal of two new axes: the adjoint of diagonal",
)


def _two_axes(x: Tensor, axis1: int, axis2: int) -> tuple[int, int]:
    a, b = axis_index(axis1, x.ndim), axis_index(axis2, x.ndim)
    if a == b:
        raise AxisError(f"a diagonal needs two different axes, got {axis1} twice")
    return a, b


@public
def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The elements with index axis2 - index axis1 = offset, as the last axis: np.diagonal."""
    x = dequantized(x)
    a, b = _two_axes(x, axis1, axis2)
    return apply(DIAGONAL, x, offset=int(offset), axis1=a, axis2=b)


@public
def diag(x: Any, offset: int = 0) -> Tensor:
    """The diagonal of a matrix; of a vector, the matrix with it on the diagonal: np.diag."""
    x = dequantized(x)
    if x.ndim == 1:
        n = x.shape[0] + abs(offset)
        return apply(DIAGONAL_EMBED, x, offset=int(offset), axis1=0, axis2=1, extents=(n, n))
    if x.ndim != 2:
        raise ShapeError(f"diag takes a vector or a matrix, got {show_shape(x.shape)}",
                         hint="ts.diagonal(x, axis1=, axis2=) for more axes")
    return diagonal(x, offset)


@public
def trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The sum of a diagonal: np.trace."""
    return F.sum(diagonal(x, offset, axis1, axis2), axis=-1)


def _triangle(x: Tensor, k: int, upper: bool) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"a triangle needs two axes, got {show_shape(x.shape)}")
    rows = F.expand_dims(F.arange(x.shape[-2]), 1)
    above = F.arange(x.shape[-1]) - rows  # [M, N]: column - row
    keep = F.greater_equal(above, k) if upper else F.less_equal(above, k)
    zero = F.zeros((), x.type)
    return apply(WHERE, keep, x, zero)


@public
def tril(x: Any, k: int = 0) -> Tensor:
    """x with zeros above the k-th diagonal of its last two axes."""
    return _triangle(dequantized(x), k, upper=False)


@public
def triu(x: Any, k: int = 0) -> Tensor:
    """x with zeros below the k-th diagonal of its last two axes."""
    return _triangle(dequantized(x), k, upper=True)


OPERATORS.update(__getitem__=getitem, diagonal=diagonal, trace=trace)
