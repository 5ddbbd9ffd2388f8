"""Scatter and blocks: x with some elements replaced or added to, at positions that follow data.

The adjoint of `dynamic_slice` is `dynamic_update_slice` of zeros. As in gather.py an index outside
its extent is an AxisError when the op runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import ArgumentError, AxisError, DTypeError, ShapeError
from ...numerics import NumericType
from ...tensor import Tensor
from .. import flops
from .. import functions as F
from ..element import Element, IndexBound, index_names
from ..op import Arg, Aval, GraphOp, ResultMemory, Sample, sample
from ..operand import (
    axis_index,
    compute_type,
    convert,
    dequantized,
    literal,
    number_in,
    public,
    store,
    to_compute,
)
from ..trace import apply
from ..weak_numbers import is_number
from .broadcasting import broadcast_shapes
from .gather import (
    CHECK_INDEX,
    INT64,
    SEGMENT_SUM,
    TAKE,
    check_bounds,
    gather_axes,
    ids_first,
    index_operand,
    letters,
    linear_index,
    merge_batch,
    offset_rows,
    split_batch,
    stretch,
)
from .scatter_extremes import EXTREMES, scatter_axes, scatter_shape


# --- scatter ----------------------------------------------------------------------------------
def _block_names(shape: tuple, sizes: tuple) -> str:
    """Letters for the axes of which a block takes everything."""
    return "".join(c if n == m else "_" for c, n, m in zip(letters(shape), shape, sizes,
                                                            strict=True))


def _scatter_ref(x: np.ndarray, ids: np.ndarray, u: np.ndarray, axis: int) -> np.ndarray:
    check_bounds(ids, x.shape[axis], wrap=True, what=f"axis {axis} of ")
    out = x.copy()
    pre, post = u.shape[:axis], u.shape[axis + ids.ndim:]
    places, winners = _last_of_each(ids.reshape(-1) % max(x.shape[axis], 1))
    rows = np.moveaxis(u.reshape(*pre, ids.size, *post), axis, 0)
    np.moveaxis(out, axis, 0)[places] = rows[winners]
    return out


def _last_of_each(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids, and for each the position where it stands last."""
    places, back = np.unique(ids[::-1], return_index=True)
    return places, ids.size - 1 - back


def _scatter_vjp(g: Tensor, y: Tensor, x: Tensor, ids: Tensor, u: Tensor, axis: int) -> tuple:
    """Only what is still there gets a gradient: x outside the ids, the last of repeated updates."""
    gone = F.zeros(u.shape, g.type)
    gu = apply(TAKE, g, ids, axis=axis)
    wins = _broadcast_mask(_is_last(ids, x.shape[axis]), u, axis)
    zero = literal(0.0, gu)
    return apply(SCATTER_SET, g, ids, gone, axis=axis), None, F.where(wins, gu, zero)


def _is_last(ids: Tensor, extent: Any) -> Tensor:
    """Whether an id stands nowhere later in ids."""
    order = F.reshape(F.arange(size_of(ids.shape)), ids.shape)
    winner = apply(SCATTER_SET, F.zeros((extent,), INT64), ids, order, axis=0)
    return F.equal(apply(TAKE, winner, ids, axis=0), order)


def _broadcast_mask(mask: Tensor, like: Tensor, axis: int) -> Tensor:
    tail = (1,) * (like.ndim - axis - mask.ndim)
    return F.reshape(mask, (*mask.shape, *tail))


def _scatter_batch(size: Any, batched: tuple, x: Tensor, ids: Tensor, u: Tensor,
                   axis: int) -> tuple:
    x, u = stretch(x, size, batched[0]), stretch(u, size, batched[2])
    if not batched[1]:
        return apply(SCATTER_SET, x, ids, u, axis=axis + 1), True
    count, extent = ids.ndim - 1, x.shape[axis + 1]
    rows, places = ids_first(u, axis, count), offset_rows(ids, size, extent)
    out = apply(SCATTER_SET, merge_batch(x, axis), places, rows, axis=0)
    return split_batch(out, size, axis), True


def _or_zeros(t: Tensor | None, like: Tensor, numeric: NumericType) -> Tensor:
    return F.zeros(like.shape, numeric) if t is None else t


SCATTER_SET = GraphOp(
    "scatter_set",
    shape=scatter_shape,
    ref=_scatter_ref,
    vjp=_scatter_vjp,
    jvp=lambda ts, y, x, ids, u, axis: apply(
        SCATTER_SET, _or_zeros(ts[0], x, compute_type(x.type)), ids,
        _or_zeros(ts[2], u, compute_type(u.type)), axis=axis,
    ),
    batch=_scatter_batch,
    axes=scatter_axes,
    drops=(0, 2),
    samples=(
        sample((5, 3), ((4,), "index:5"), (4, 3), axis=0),
        sample((2, 4, 3), ((2, 2), "index:4"), (2, 2, 2, 3), axis=1),
        sample((3,), ((), "index:3"), (), axis=0),
    ),
    flops=flops.per_operand,
    meets="last",
    doc="x with the slices at ids replaced; of repeated ids the last one stays",
)


@public
def scatter(x: Any, ids: Any, updates: Any, axis: int = 0, mode: str = "set") -> Tensor:
    """x with slices at ids replaced by updates, or updates added to them.

    x: [pre, n, post]   ids: any shape, -n..n-1   updates: [pre, *ids.shape, post], broadcast
    mode "set": of repeated ids the last one stays   "add": all of them add up   "max", "min": the
    largest or smallest of them and x stays; those that tie share the gradient, NaN propagates
    Returns a new tensor of x's type. Raises ShapeError, ArgumentError, and AxisError when it runs.
    """
    need_mode(mode)
    x, rows = dequantized(x), index_operand(ids)
    a = axis_index(axis, x.ndim)
    want = (*x.shape[:a], *rows.shape, *x.shape[a + 1:])
    if mode == "set":
        u = F.broadcast_to(as_type_of(updates, x.type), want)
        return apply(SCATTER_SET, x, rows, u, axis=a)
    if x.dtype.kind == "bool":
        raise DTypeError(f"scatter of bools by {mode}", hint="cast to an integer type first")
    wide = to_compute(x)
    u = F.broadcast_to(as_type_of(updates, wide.type), want)
    if mode in EXTREMES:
        return store(apply(EXTREMES[mode], wide, rows, u, axis=a), x.type)
    return store(wide + apply(SEGMENT_SUM, u, rows, axis=a, extent=x.shape[a]), x.type)


def as_type_of(value: Any, numeric: NumericType) -> Tensor:
    """An update as elements of the tensor it goes into."""
    if is_number(value) and numeric.dtype.kind == "float":
        return convert(number_in(value, compute_type(numeric)), numeric)
    value = dequantized(value)
    if value.dtype.kind == "float" != numeric.dtype.kind:
        raise DTypeError(f"an update of type {value.type} into {numeric}",
                         hint=f"convert it: ts.cast(updates, {numeric.dtype.name!r})")
    return convert(to_compute(value) if value.type != numeric else value, numeric)


@public
def scatter_add(x: Any, ids: Any, updates: Any, axis: int = 0) -> Tensor:
    """x with slices added at ids along an axis; repeated ids add up. See `ts.scatter`.

    torch.scatter_add, whose ids have x's rank, is ts.put_along_axis(x, ids, updates, axis, "add").
    """
    return scatter(x, ids, updates, axis, "add")


def put_at(x: Any, indices: Any, values: Any, mode: str) -> Tensor:
    """x with values at the places that index tensors name, one for each of its first axes."""
    x = dequantized(x)
    ids = [index_operand(i) for i in (indices if isinstance(indices, tuple | list) else (indices,))]
    if not 0 < len(ids) <= x.ndim:
        raise ShapeError(f"{len(ids)} index tensors for the {x.ndim} axes of {show_shape(x.shape)}")
    shape = broadcast_shapes(*(tuple(i.shape) for i in ids))
    extents = tuple(x.shape[:len(ids)])
    places = linear_index([F.broadcast_to(i, shape) for i in ids], extents)
    flat = F.reshape(x, (size_of(extents), *x.shape[len(ids):]))
    out = scatter(flat, places, values, 0, mode)
    return F.reshape(out, x.shape)


@public
def put_along_axis(x: Any, ids: Any, values: Any, axis: int, mode: str = "set") -> Tensor:
    """x with y[i, ids[i, j]] = values[i, j] along an axis: np.put_along_axis, torch.scatter.

    ids: integers, of x's extents but that of the axis   values: broadcast to the shape of ids
    mode "set": of repeated ids the last stays   "add": all add up (torch.scatter_add)   "max",
    "min": the largest or smallest of them and x (torch.scatter_reduce, "amax" and "amin")
    Returns a new tensor of x's type. Raises ShapeError, and AxisError when it runs.
    """
    need_mode(mode)
    x, rows = dequantized(x), index_operand(ids)
    a = axis_index(axis, x.ndim)
    others = [n for d, n in enumerate(x.shape) if d != a]
    if rows.ndim != x.ndim or [n for d, n in enumerate(rows.shape) if d != a] != others:
        raise ShapeError(f"ids {show_shape(rows.shape)} do not fit {show_shape(x.shape)} along "
                         f"axis {a}", hint="all extents but that of the axis must be equal")
    grid: list[Any] = [
        F.reshape(F.arange(n), [n if e == d else 1 for e in range(x.ndim)])
        for d, n in enumerate(rows.shape)
    ]
    grid[a] = rows
    return put_at(x, tuple(grid), values, mode)


MODES = ("set", "add", *EXTREMES)


def need_mode(mode: str) -> None:
    if mode not in MODES:
        raise ArgumentError(f"scatter mode {mode!r}", hint=", ".join(f'"{m}"' for m in MODES))


# --- dynamic slices ---------------------------------------------------------------------------
def _check_starts(starts: np.ndarray, shape: tuple, sizes: tuple) -> list[slice]:
    for axis, (at, n, size) in enumerate(zip(starts.tolist(), shape, sizes, strict=True)):
        if at < 0 or at + size > n:
            raise AxisError(f"start {at} with size {size} leaves axis {axis} of extent {n}",
                            hint=f"valid starts: 0..{n - size}" if n >= size else
                            f"the slice is larger than the axis by {size - n}")
    return [slice(at, at + size) for at, size in zip(starts.tolist(), sizes, strict=True)]


def _dynamic_shape(x: Aval, starts: Aval, sizes: tuple) -> Aval:
    if starts.shape != (len(x.shape),) or len(sizes) != len(x.shape):
        raise ShapeError(f"{show_shape(x.shape)} needs one start and one size for each axis")
    return Aval(sizes, x.type)


def _grid(starts: Tensor, sizes: tuple, size: Any, lead: bool) -> list[Tensor]:
    """Per axis the positions of every slice of a batch, broadcast to [N, *sizes]."""
    ndim, out = len(sizes), []
    if lead:
        out.append(F.reshape(F.arange(size), (size,) + (1,) * ndim))
    columns = F.split(starts, [1] * ndim, axis=1)
    for k, (column, n) in enumerate(zip(columns, sizes, strict=True)):
        line = F.reshape(F.arange(n), (1,) * (k + 1) + (n,) + (1,) * (ndim - k - 1))
        out.append(F.reshape(column, (size,) + (1,) * ndim) + line)
    return out


def _checked_grid(starts: Tensor, x: Tensor, sizes: tuple, size: Any, lead: bool) -> list[Tensor]:
    shape = x.shape if lead else (size, *x.shape)
    grid = _grid(starts, sizes, size, lead)
    extents = shape if lead else shape[1:]
    return [apply(CHECK_INDEX, g, extent=n, wrap=False) for g, n in zip(grid, extents, strict=True)]


def _front(starts: Tensor) -> Tensor:
    """Starts for a tensor with a batch axis in front, which is taken whole."""
    return F.concatenate([F.zeros((1,), INT64), starts])


def _dynamic_slice_batch(size: Any, batched: tuple, x: Tensor, starts: Tensor,
                         sizes: tuple) -> tuple:
    if not batched[1]:
        return apply(DYNAMIC_SLICE, x, _front(starts), sizes=(size, *sizes)), True
    grid = _checked_grid(starts, x, sizes, size, batched[0])
    return gather_axes(x, tuple(range(x.ndim)), grid), True


def _slice_element(x: Aval, starts: Aval, sizes: tuple) -> Element:
    bounds = tuple(IndexBound(f"x1[{a}]", n - size + 1)
                   for a, (n, size) in enumerate(zip(x.shape, sizes, strict=True)))
    return Element(f"x0[{index_names([f'o{a} + x1[{a}]' for a in range(x.ndim)])}]", bounds=bounds)


DYNAMIC_SLICE = GraphOp(
    "dynamic_slice",
    shape=_dynamic_shape,
    ref=lambda x, starts, sizes: x[tuple(_check_starts(starts, x.shape, sizes))].copy(),
    vjp=lambda g, y, x, starts, sizes: (
        apply(DYNAMIC_UPDATE_SLICE, F.zeros(x.shape, g.type), g, starts), None
    ),
    jvp=lambda ts, y, x, starts, sizes: apply(DYNAMIC_SLICE, ts[0], starts, sizes=sizes),
    batch=_dynamic_slice_batch,
    axes=lambda x, starts, sizes: "{0},_->{0}".format(_block_names(x.shape, sizes)),
    local=lambda attrs, ins, outs: {"sizes": outs[0]},
    drops=(0,),
    samples=(
        sample((5,), ((1,), "index:3"), sizes=(3,)),
        sample((4, 6), ((2,), "index:3"), sizes=(2, 3)),
    ),
    flops=flops.none,
    picks=True,
    element=_slice_element,
    doc="`sizes` elements from `starts` on, an integer tensor with one entry per axis",
)


def _update_ref(x: np.ndarray, u: np.ndarray, starts: np.ndarray,
                out: np.ndarray | None = None) -> np.ndarray:
    where = tuple(_check_starts(starts, x.shape, u.shape))
    made = x.copy() if out is None else out
    if out is not None and out is not x:
        out[...] = x
    made[where] = u
    return made


def _update_shape(x: Aval, u: Aval, starts: Aval) -> Aval:
    if x.ndim != u.ndim or starts.shape != (x.ndim,):
        raise ShapeError(
            f"an update {show_shape(u.shape)} of {show_shape(x.shape)} needs as many axes, and one "
            f"start for each, got starts {show_shape(starts.shape)}"
        )
    if x.dtype is not u.dtype:
        raise DTypeError(f"operands of one type needed, got {x.type} and {u.type}")
    return x


def _update_batch(size: Any, batched: tuple, x: Tensor, u: Tensor, starts: Tensor) -> tuple:
    x, u = stretch(x, size, batched[0]), stretch(u, size, batched[1])
    if not batched[2]:
        return apply(DYNAMIC_UPDATE_SLICE, x, u, _front(starts)), True
    grid = _checked_grid(starts, x, u.shape[1:], size, True)
    flat, total = F.reshape(x, (size_of(x.shape),)), size_of(u.shape)
    places = F.broadcast_to(linear_index(grid, x.shape), u.shape)
    out = apply(SCATTER_SET, flat, F.reshape(places, (total,)),
                F.reshape(u, (total,)), axis=0)
    return F.reshape(out, x.shape), True


def _update_element(x: Aval, u: Aval, starts: Aval) -> Element:
    axes = range(x.ndim)
    bounds = tuple(IndexBound(f"x2[{a}]", n - size + 1)
                   for a, (n, size) in enumerate(zip(x.shape, u.shape, strict=True)))
    if not x.ndim:
        return Element("x1[()]")
    hit = " & ".join(f"(o{a} >= x2[{a}]) & (o{a} < x2[{a}] + {n})"
                     for a, n in enumerate(u.shape))
    new = index_names([f"o{a} - x2[{a}]" for a in axes])
    return Element(f"where({hit}, x1[{new}], x0[{index_names(axes)}])", bounds=bounds,
                   into=tuple(f"o{a} + x2[{a}]" for a in axes))


DYNAMIC_UPDATE_SLICE = GraphOp(
    "dynamic_update_slice",
    out=True,
    memory=ResultMemory("donated"),
    shape=_update_shape,
    ref=_update_ref,
    vjp=lambda g, y, x, u, starts: (
        apply(DYNAMIC_UPDATE_SLICE, g, F.zeros(u.shape, g.type), starts),
        apply(DYNAMIC_SLICE, g, starts, sizes=tuple(u.shape)),
        None,
    ),
    jvp=lambda ts, y, x, u, starts: apply(
        DYNAMIC_UPDATE_SLICE, _or_zeros(ts[0], x, compute_type(x.type)),
        _or_zeros(ts[1], u, compute_type(u.type)), starts,
    ),
    batch=_update_batch,
    axes=lambda x, u, starts: "{0},{0},_->{0}".format(_block_names(x.shape, u.shape)),
    drops=(0,),
    samples=(
        Sample((Arg((5,)), Arg((3,)), Arg((1,), "index:3", False))),
        Sample((Arg((4, 6)), Arg((2, 3)), Arg((2,), "index:3", False))),
    ),
    element=_update_element,
    flops=flops.none,
    doc="x with the block at `starts` replaced by an update",
)


def _starts(starts: Any, ndim: int) -> Tensor:
    """Starts given as one integer tensor or a sequence of integers and scalar tensors."""
    if isinstance(starts, Tensor | np.ndarray):
        t = index_operand(starts, "starts")
    elif not isinstance(starts, Sequence):
        raise ArgumentError(f"starts are one integer per axis, got {starts!r}")
    else:
        parts = [index_operand(s, "starts") for s in starts]
        if any(p.ndim for p in parts) or not parts:
            raise ShapeError(f"starts are scalars, one per axis, got {len(parts)} of them")
        t = F.stack(parts)
    if tuple(t.shape) != (ndim,):
        raise ShapeError(f"{ndim} axes need {ndim} starts, got {show_shape(t.shape)}")
    return t


@public
def dynamic_slice(x: Any, starts: Any, sizes: Sequence[int]) -> Tensor:
    """A block of fixed size at positions that may depend on data.

    starts: one integer per axis (Python integers, scalar tensors, or one tensor)   sizes: integers
    Raises ShapeError, and AxisError, when it runs, for a block that leaves x: starts never clamp.
    """
    x, sizes = dequantized(x), tuple(sizes)
    if x.ndim == 0:
        raise ShapeError("dynamic_slice of a scalar")
    return apply(DYNAMIC_SLICE, x, _starts(starts, x.ndim), sizes=sizes)


@public
def dynamic_update_slice(x: Any, update: Any, starts: Any) -> Tensor:
    """x with the block at `starts` replaced by `update`, which is converted to x's type.

    Raises ShapeError, and AxisError, when it runs, for a block that leaves x: starts never clamp.
    """
    x = dequantized(x)
    if x.ndim == 0:
        raise ShapeError("dynamic_update_slice of a scalar")
    return apply(DYNAMIC_UPDATE_SLICE, x, as_type_of(update, x.type), _starts(starts, x.ndim))
