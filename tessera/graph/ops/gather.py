"""Gather: elements picked by integer tensors, and their adjoints, which add them back.

`take` and `segment_sum` are linear in their values and each other's adjoint; so are `take_along`
and `add_along`. Everything else here is made of them.
An index outside its extent is an AxisError when the op runs: nothing is clamped or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import ArgumentError, AxisError, DTypeError, ShapeError
from ...numerics import as_type
from ...tensor import OPERATORS, Tensor, as_tensor
from .. import flops
from .. import functions as F
from ..cpu import rows as compiled_rows
from ..element import Element, IndexBound, index_names
from ..op import Aval, GraphOp, Indexed, sample
from ..operand import (
    axis_index,
    convert,
    countable,
    dequantized,
    holds_integers,
    public,
    shape_tuple,
    store,
    to_compute,
)
from ..trace import apply
from .blocked_sum import CHAIN
from .convert import with_scale

INT64 = as_type("int64")


# --- index operands ---------------------------------------------------------------------------
def index_operand(ids: Any, what: str = "ids") -> Tensor:
    """Integers as an int64 tensor. Raises DTypeError for other kinds."""
    t = as_tensor(ids)
    if t.ndim == 1 and t.shape[0] == 0 and not isinstance(ids, Tensor):
        t = Tensor(np.zeros(0, np.int64), INT64)  # an empty list has no type of its own
    if not holds_integers(t):
        raise DTypeError(f"{what} must be integers, got {t.type}",
                         hint="ts.cast(ids, ts.int64); bool masks select with x[mask] or ts.where")
    return convert(t, INT64)


def check_bounds(ids: np.ndarray, extent: int, wrap: bool, what: str = "") -> None:
    """Raise AxisError naming the first index outside the extent, where it stands and the range."""
    bad = (ids < (-extent if wrap else 0)) | (ids >= extent)
    if not bad.any():
        return
    place = np.unravel_index(int(np.argmax(bad)), bad.shape)
    at = f" (ids{list(map(int, place))})" if place else ""
    low = -extent if wrap else 0
    raise AxisError(f"index {int(ids[place])}{at} is outside {what}extent {extent}",
                    hint=f"valid: {low}..{extent - 1}" if extent else "the axis is empty")


def _wrapped_ref(ids: np.ndarray, extent: int, wrap: bool) -> np.ndarray:
    check_bounds(ids, extent, wrap)
    return np.where(ids < 0, ids + extent, ids) if wrap else ids.copy()


CHECK_INDEX = GraphOp(
    "check_index",
    shape=lambda ids, extent, wrap: ids,
    ref=_wrapped_ref,
    batch=lambda size, batched, ids, extent, wrap: (
        apply(CHECK_INDEX, ids, extent=extent, wrap=wrap), True
    ),
    axes="...->...",
    tile="tile.where({0} < 0, {0} + {extent}, {0})",
    differentiable=False,
    samples=(sample(((2, 3), "index:5"), extent=5, wrap=True),
             sample(((3,), "index:4"), extent=4, wrap=False)),
    doc="ids, counted from the front; AxisError at run time when one is outside the extent",
)


def offset_rows(ids: Tensor, size: Any, extent: Any) -> Tensor:
    """Row b of the ids counts in the b-th block of `extent` elements: [size, ...]."""
    ids = apply(CHECK_INDEX, ids, extent=extent, wrap=True)
    blocks = F.arange(size) * extent
    return ids + F.reshape(blocks, (size,) + (1,) * (ids.ndim - 1))


def stretch(x: Tensor, size: Any, batched: bool) -> Tensor:
    return x if batched else F.broadcast_to(x, (size, *x.shape))


def ids_first(u: Tensor, axis: int, count: int) -> Tensor:
    """[N, pre, ids, post] -> [N, ids, pre, post], the `count` axes of ids being at `axis`."""
    order = (0, *range(axis + 1, axis + 1 + count), *range(1, axis + 1),
             *range(axis + 1 + count, u.ndim))
    return F.transpose(u, order)


def merge_batch(x: Tensor, axis: int) -> Tensor:
    """[N, pre, n, post] -> [N n, pre, post], n at `axis` of the unbatched tensor."""
    moved = F.moveaxis(x, axis + 1, 1)
    return F.reshape(moved, (x.shape[0] * x.shape[axis + 1], *moved.shape[2:]))


def split_batch(y: Tensor, size: Any, axis: int) -> Tensor:
    """[N n, pre, post] -> [N, pre, n, post]."""
    parted = F.reshape(y, (size, y.shape[0] // size if size else 0, *y.shape[1:]))
    return F.moveaxis(parted, 1, axis + 1)


def letters(shape: tuple, start: int = 0) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[start:start + len(shape)]


def split_names(x: Aval, ids: Aval, axis: int, count: int) -> tuple[str, str, str]:
    """Letters of the axes before and after the indexed ones, and of ids."""
    names = letters(x.shape)
    return names[:axis], names[axis + count:], letters(ids.shape, len(x.shape))


def _take_axes(x: Aval, ids: Aval, axis: int) -> str:
    pre, post, own = split_names(x, ids, axis, 1)
    return f"{pre}_{post},{own}->{pre}{own}{post}"


def _segment_axes(u: Aval, ids: Aval, axis: int, extent: Any) -> str:
    pre, post, own = split_names(u, ids, axis, len(ids.shape))
    return f"{pre}{own}{post},{own}->{pre}_{post}"


def _along_axes(x: Aval, ids: Aval, axis: int) -> str:
    names = letters(x.shape)
    return f"{names[:axis]}_{names[axis + 1:]},{names}->{names}"


def _add_along_axes(u: Aval, ids: Aval, axis: int, extent: Any) -> str:
    names = letters(u.shape)
    return f"{names},{names}->{names[:axis]}_{names[axis + 1:]}"


# --- take, segment_sum ------------------------------------------------------------------------
def _take_ref(x: np.ndarray, ids: np.ndarray, axis: int,
              out: np.ndarray | None = None) -> np.ndarray:
    check_bounds(ids, x.shape[axis], wrap=True, what=f"axis {axis} of ")
    return np.take(x, ids, axis, out, "wrap")


def _take_batch(size: Any, batched: tuple, x: Tensor, ids: Tensor, axis: int) -> tuple:
    if not batched[1]:
        return apply(TAKE, x, ids, axis=axis + 1), True
    if not batched[0]:
        y = apply(TAKE, x, ids, axis=axis)  # [pre, N, ids, post]
        return F.moveaxis(y, axis, 0), True
    places = offset_rows(ids, size, x.shape[axis + 1])
    flat = apply(TAKE, merge_batch(x, axis), places, axis=0)
    return _ids_after(flat, 1, ids.ndim - 1, axis), True  # from [N, ids, pre, post]


def _ids_after(y: Tensor, start: int, count: int, pre: int) -> Tensor:
    """Move `count` axes at `start` behind the `pre` axes that follow them."""
    ids, before = range(start, start + count), range(start + count, start + count + pre)
    rest = range(start + count + pre, y.ndim)
    return F.transpose(y, (*range(start), *before, *ids, *rest))


TAKE = GraphOp(
    "take",
    shape=lambda x, ids, axis: Aval(x.shape[:axis] + ids.shape + x.shape[axis + 1:], x.type),
    ref=_take_ref,
    vjp=lambda g, y, x, ids, axis: (
        apply(SEGMENT_SUM, g, ids, axis=axis, extent=x.shape[axis]), None
    ),
    jvp=lambda ts, y, x, ids, axis: apply(TAKE, ts[0], ids, axis=axis),
    batch=_take_batch,
    axes=_take_axes,
    drops=(0,),
    samples=(
        sample((5, 3), ((4,), "index:5"), axis=0),
        sample((2, 4, 3), ((2, 2), "index:4"), axis=1),
        sample((3,), ((), "index:3"), axis=0),
    ),
    flops=flops.none,
    picks=True,
    indexed=Indexed(reads=True),
    out=True,
    doc="slices of x along an axis, at integer positions: [pre, n, post] -> [pre, ids, post]",
)


def add_rows(out: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
    """out[..., ids[i], :] += rows[..., i, :]; out is zero before.

    out: [n, D] or [A, n, D]   ids: [T]   rows: [T, D] or [A, T, D]
    Repeated ids are added in order; those of more than CHAIN rows in f64, and rounded once.
    """
    if out.ndim == 2:
        out, rows = out[None], rows[None]
    n = out.shape[1]
    ids, often = np.where(ids < 0, ids + n, ids), np.zeros(0, np.int64)
    if ids.size > CHAIN and out.dtype == np.float32:
        often = np.flatnonzero(np.bincount(ids) > CHAIN)
    if compiled_rows.takes(out, rows):
        slots = np.full(n, -1, np.int64)
        slots[often] = np.arange(often.size)
        sums = np.zeros((out.shape[0], often.size, out.shape[2]))
        compiled_rows.combine("sum", out, ids, rows, slots, sums)
        out[:, often] = sums
        return
    for into, given in zip(out, rows, strict=True):
        _add_plain(into, ids, given, often)


def _add_plain(out: np.ndarray, ids: np.ndarray, rows: np.ndarray, often: np.ndarray) -> None:
    if often.size:
        _add_in_f64(out, ids, rows, often)
        rest = np.isin(ids, often, invert=True)
        ids, rows = ids[rest], rows[rest]
    np.add.at(out, ids, rows) if out.shape[1] != 1 else np.add.at(out[:, 0], ids, rows[:, 0])


def _add_in_f64(out: np.ndarray, ids: np.ndarray, rows: np.ndarray, often: np.ndarray) -> None:
    here = np.flatnonzero(np.isin(ids, often))
    here = here[np.argsort(ids[here], kind="stable")]
    runs = np.split(here, np.flatnonzero(np.diff(ids[here])) + 1)
    for i, at in zip(often, runs, strict=True):
        # NumPy adds a single column in pairs, several ones in order.
        wide = rows[at].astype(np.float64)
        out[i] = np.cumsum(wide, axis=0)[-1] if wide.shape[1] == 1 else np.add.reduce(wide, axis=0)


def _segment_ref(u: np.ndarray, ids: np.ndarray, axis: int, extent: int,
                 out: np.ndarray | None = None) -> np.ndarray:
    check_bounds(ids, extent, wrap=True, what="the ")
    pre, post = u.shape[:axis], u.shape[axis + ids.ndim:]
    out = np.empty((*pre, extent, *post), u.dtype) if out is None else out
    out[...] = 0
    add_rows(out.reshape(prod(pre), extent, prod(post)), ids.reshape(-1),
             u.reshape(prod(pre), ids.size, prod(post)))
    return out


def _segment_shape(u: Aval, ids: Aval, axis: int, extent: Any) -> Aval:
    count = len(ids.shape)
    if u.shape[axis:axis + count] != ids.shape:
        raise ShapeError(f"values {show_shape(u.shape)} do not have the extents "
                         f"{show_shape(ids.shape)} of ids at axis {axis}")
    return Aval((*u.shape[:axis], extent, *u.shape[axis + count:]), u.type)


def _segment_batch(size: Any, batched: tuple, u: Tensor, ids: Tensor, axis: int,
                   extent: Any) -> tuple:
    if not batched[1]:
        return apply(SEGMENT_SUM, u, ids, axis=axis + 1, extent=extent), True
    count = ids.ndim - 1
    u = stretch(u, size, batched[0])  # [N, pre, ids, post]
    rows, places = ids_first(u, axis, count), offset_rows(ids, size, extent)
    out = apply(SEGMENT_SUM, rows, places, axis=0, extent=size * extent)
    return split_batch(out, size, axis), True


SEGMENT_SUM = GraphOp(
    "segment_sum",
    shape=_segment_shape,
    ref=_segment_ref,
    vjp=lambda g, y, u, ids, axis, extent: (apply(TAKE, g, ids, axis=axis), None),
    jvp=lambda ts, y, u, ids, axis, extent: apply(
        SEGMENT_SUM, ts[0], ids, axis=axis, extent=extent
    ),
    batch=_segment_batch,
    axes=_segment_axes,
    reduces="sum",
    samples=(
        sample((4, 3), ((4,), "index:5"), axis=0, extent=5),
        sample((2, 3, 2, 4), ((3, 2), "index:5"), axis=1, extent=5),
    ),
    flops=flops.per_operand,
    indexed=Indexed(reads=False),
    out=True,
    doc="y[ids[i]] = sum of the values u[i] with that id, 0 where there is none: the adjoint of "
    "take",
)


@public
def take(x: Any, ids: Any, axis: int = 0) -> Tensor:
    """Slices of x at integer positions along an axis: y[pre, i, post] = x[pre, ids[i], post].

    x: [pre, n, post] any type   ids: any shape, -n..n-1   y: [pre, *ids.shape, post]
    The gradient adds where ids repeat. Raises AxisError, when it runs, for an id outside.
    """
    x = dequantized(x)
    return apply(TAKE, x, index_operand(ids), axis=axis_index(axis, x.ndim))


@public
def segment_sum(values: Any, ids: Any, num_segments: int) -> Tensor:
    """y[s] = sum of values[i] over the i with ids[i] = s.

    values: [T, ...], narrow integers as in `ts.sum`   ids: [T]   y: [num_segments, ...]
    Raises ShapeError, AxisError.
    """
    values, (extent,) = countable(dequantized(values)), shape_tuple((num_segments,))
    out = apply(SEGMENT_SUM, to_compute(values), index_operand(ids), axis=0, extent=extent)
    return store(out, values.type)


@public
def embedding(table: Any, ids: Any, *, padding_idx: int | None = None) -> Tensor:
    """Rows of a table: y[..., :] = table[ids[...], :].

    table: [V, D]   ids: [...] integers   y: [..., D]   padding_idx: a row that gets no gradient
    A scaled or quantised table (int8, int4, fp8; per tensor, per row or per column) is gathered
    first and only the rows read are dequantised, to f32. Raises AxisError for an id outside.
    """
    table, rows = as_tensor(table), index_operand(ids)
    if table.ndim < 1:
        raise ShapeError("an embedding table needs rows, got a scalar")
    if table.scale is None:
        y = apply(TAKE, table, rows, axis=0)
        return y if padding_idx is None else _without_gradient(y, rows, table, padding_idx)
    codes = apply(TAKE, table, rows, axis=0)
    scale = table.scale
    per_row = scale.ndim == table.ndim and scale.shape[0] == table.shape[0]
    if per_row:
        scale = apply(TAKE, scale, rows, axis=0)
    elif scale.ndim == table.ndim:  # one row of scales for all rows
        scale = F.reshape(scale, scale.shape[1:])
    return F.dequantize(with_scale(codes, scale, table.type))


def _without_gradient(y: Tensor, rows: Tensor, table: Tensor, padding: Any) -> Tensor:
    """y, whose rows that stand for padding pass no gradient on."""
    if isinstance(padding, bool) or not isinstance(padding, int | np.integer):
        raise ArgumentError(f"padding_idx={padding!r} is not an integer")
    index, extent = int(padding), table.shape[0]
    if isinstance(extent, int) and not -extent <= index < extent:
        raise AxisError(f"padding_idx={padding} is outside the {extent} rows of the table")
    other = index + extent if index < 0 else index - extent  # the same row, from the other end
    here = F.logical_or(F.equal(rows, index), F.equal(rows, other))
    mask = F.reshape(here, (*here.shape, *(1,) * (y.ndim - here.ndim)))
    return F.where(mask, F.stop_gradient(y), y)


@public
def one_hot(ids: Any, num_classes: int, dtype: Any = "f32") -> Tensor:
    """y[..., c] = 1 where ids[...] = c, else 0.

    ids: [...] integers in 0..num_classes-1   y: [..., num_classes]
    Raises AxisError for an id outside.
    """
    (extent,) = shape_tuple((num_classes,))
    rows = apply(CHECK_INDEX, index_operand(ids), extent=extent, wrap=False)
    hit = F.equal(F.expand_dims(rows, -1), F.arange(num_classes))
    return F.cast(hit, dtype)


# --- along an axis ----------------------------------------------------------------------------
def _along_shape(x: Aval, ids: Aval, axis: int) -> Aval:
    same = x.ndim == ids.ndim and all(
        a == b for i, (a, b) in enumerate(zip(x.shape, ids.shape, strict=True)) if i != axis
    )
    if not same:
        raise ShapeError(
            f"ids {show_shape(ids.shape)} do not fit {show_shape(x.shape)} along axis {axis}",
            hint="all extents but that of the axis must be equal",
        )
    return Aval(ids.shape, x.type)


def _along_ref(x: np.ndarray, ids: np.ndarray, axis: int) -> np.ndarray:
    check_bounds(ids, x.shape[axis], wrap=True, what=f"axis {axis} of ")
    return np.take_along_axis(x, ids, axis)


def _add_along_ref(u: np.ndarray, ids: np.ndarray, axis: int, extent: int) -> np.ndarray:
    """Rows of one line each in one array, so that np.add.at takes its fast 1-D path."""
    check_bounds(ids, extent, wrap=True, what="the ")
    values = np.moveaxis(u, axis, -1)
    places = np.moveaxis(np.where(ids < 0, ids + extent, ids), axis, -1)
    lines = values.shape[:-1]
    out = np.zeros((*lines, extent), u.dtype)
    starts = np.arange(int(np.prod(lines, dtype=np.int64)), dtype=np.int64) * extent
    at = (places + starts.reshape(*lines, 1)).reshape(-1)
    add_rows(out.reshape(-1, 1), at, values.reshape(-1, 1))
    return np.moveaxis(out, -1, axis)


def _add_along_shape(u: Aval, ids: Aval, axis: int, extent: Any) -> Aval:
    if u.shape != ids.shape:
        raise ShapeError(f"values {show_shape(u.shape)} and ids {show_shape(ids.shape)} differ")
    return Aval((*u.shape[:axis], extent, *u.shape[axis + 1:]), u.type)


def _along_element(x: Aval, ids: Aval, axis: int) -> Element:
    at, n = f"x1[{index_names(range(x.ndim))}]", x.shape[axis]
    wrapped = f"where({at} < 0, {at} + {n}, {at})"
    place = index_names([wrapped if a == axis else a for a in range(x.ndim)])
    return Element(f"x0[{place}]", bounds=(IndexBound(at, n, wrap=True),))


def _add_along_element(u: Aval, ids: Aval, axis: int, extent: Any) -> Element:
    """Of all elements of a line those that go here."""
    own = [("r0" if a == axis else a) for a in range(u.ndim)]
    at = f"x1[{index_names(own)}]"
    hit = f"where(({at} == o{axis}) | ({at} == o{axis} - {extent}), r0, -1)"
    place = index_names([hit if a == axis else a for a in range(u.ndim)])
    return Element(f"x0[{place}]", over=(u.shape[axis],),
                   bounds=(IndexBound(at, extent, wrap=True),))


TAKE_ALONG = GraphOp(
    "take_along",
    shape=_along_shape,
    ref=_along_ref,
    vjp=lambda g, y, x, ids, axis: (
        apply(ADD_ALONG, g, ids, axis=axis, extent=x.shape[axis]), None
    ),
    jvp=lambda ts, y, x, ids, axis: apply(TAKE_ALONG, ts[0], ids, axis=axis),
    batch=lambda size, batched, x, ids, axis: (
        apply(TAKE_ALONG, stretch(x, size, batched[0]), stretch(ids, size, batched[1]),
              axis=axis + 1), True,
    ),
    axes=_along_axes,
    drops=(0,),
    samples=(sample((2, 4), ((2, 3), "index:4"), axis=1),
             sample((3, 2), ((5, 2), "index:3"), axis=0)),
    flops=flops.none,
    picks=True,
    indexed=Indexed(reads=True, along=True),
    element=_along_element,
    doc="y[i, j] = x[i, ids[i, j]] along an axis",
)

ADD_ALONG = GraphOp(
    "add_along",
    shape=_add_along_shape,
    ref=_add_along_ref,
    vjp=lambda g, y, u, ids, axis, extent: (apply(TAKE_ALONG, g, ids, axis=axis), None),
    jvp=lambda ts, y, u, ids, axis, extent: apply(
        ADD_ALONG, ts[0], ids, axis=axis, extent=extent
    ),
    batch=lambda size, batched, u, ids, axis, extent: (
        apply(ADD_ALONG, stretch(u, size, batched[0]), stretch(ids, size, batched[1]),
              axis=axis + 1, extent=extent), True,
    ),
    axes=_add_along_axes,
    reduces="sum",
    samples=(sample((2, 3), ((2, 3), "index:4"), axis=1, extent=4),
             sample((5, 2), ((5, 2), "index:3"), axis=0, extent=3)),
    flops=flops.per_operand,
    indexed=Indexed(reads=False, along=True),
    element=_add_along_element,
    doc="y[i, ids[i, j]] += u[i, j] along an axis, from zeros: the adjoint of take_along",
)


@public
def take_along_axis(x: Any, ids: Any, axis: int = -1) -> Tensor:
    """y[i, j, ...] = x[i, ids[i, j, ...], ...]: one position per line along the axis.

    x: [pre, n, post]   ids: [pre, m, post], extents of 1 stretch   y: [pre, m, post]
    Raises ShapeError, and AxisError, when it runs, for an id outside.
    """
    x, rows = dequantized(x), index_operand(ids)
    a = axis_index(axis, x.ndim)
    if rows.ndim == x.ndim:
        rows = F.broadcast_to(rows, (*x.shape[:a], rows.shape[a], *x.shape[a + 1:]))
    return apply(TAKE_ALONG, x, rows, axis=a)


# --- several axes -----------------------------------------------------------------------------
@public
def gather_axes(x: Any, axes: Sequence[int], ids: Sequence[Any], at: int | None = None) -> Tensor:
    """x at positions given for several axes at once, as x[:, i, j] with integer tensors i and j.

    The index tensors broadcast together; their axes stand at `at` in the result: where the first
    of the indexed axes was when these are neighbours, else in front (NumPy's rule).
    Raises DTypeError, and AxisError, when it runs, for an index outside.
    """
    x = dequantized(x)
    axes = tuple(axis_index(a, x.ndim) for a in axes)
    if len(axes) != len(ids) or len(set(axes)) != len(axes) or not axes:
        raise ArgumentError(f"gather_axes needs one index tensor for each of the axes {axes}")
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    axes = tuple(axes[i] for i in order)
    rows = [index_operand(ids[i], f"index of axis {a}") for a, i in zip(axes, order, strict=True)]
    first, adjacent = axes[0], axes == tuple(range(axes[0], axes[0] + len(axes)))
    if not adjacent:  # bring them together in front
        x = F.transpose(x, (*axes, *(a for a in range(x.ndim) if a not in axes)))
        first = 0
    picked = x.shape[first:first + len(axes)]
    flat = linear_index(rows, picked)
    if len(axes) > 1:
        x = F.reshape(x, (*x.shape[:first], size_of(picked), *x.shape[first + len(axes):]))
    y = apply(TAKE, x, flat, axis=first)
    place = first if at is None else at
    return _move_block(y, first, flat.ndim, place)


def linear_index(rows: Sequence[Tensor], extents: Sequence[Any]) -> Tensor:
    """Row-major positions of several index tensors, broadcast; negative ones from the end."""
    if len(rows) == 1:
        return rows[0]
    total: Any = None
    for ids, extent in zip(rows, extents, strict=True):
        ids = apply(CHECK_INDEX, ids, extent=extent, wrap=True)
        total = ids if total is None else total * extent + ids
    return total


def _move_block(y: Tensor, start: int, count: int, to: int) -> Tensor:
    rest = [a for a in range(y.ndim) if not start <= a < start + count]
    return F.transpose(y, (*rest[:to], *range(start, start + count), *rest[to:]))


OPERATORS.update(take=take, take_along_axis=take_along_axis)
