"""Ops that move elements without changing them: reshape, transpose, slice, pad, concatenate, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dims import Dim, divide, show_shape, size_of
from ...errors import ArgumentError, AxisError, ShapeError
from ...tensor import OPERATORS, Tensor
from .. import flops
from .. import functions as F
from ..element import Element, index_names
from ..op import FLAT_VIEW, VIEW, Aval, GraphOp, sample
from ..operand import (
    axes_tuple,
    axis_index,
    compute_type,
    convert,
    dequantized,
    keep_scale,
    literal,
    public,
    shape_tuple,
    to_compute,
    with_one_scale,
)
from ..trace import apply
from .broadcasting import pad_batch_axes, unbroadcast


# --- reshape ----------------------------------------------------------------------------------
def _reshape_shape(x: Aval, shape: tuple) -> Aval:
    if size_of(x.shape) != size_of(shape):
        raise ShapeError(
            f"cannot reshape {show_shape(x.shape)} ({size_of(x.shape)} elements) "
            f"to {show_shape(shape)} ({size_of(shape)} elements)",
            hint="one extent may be -1: it is computed from the others",
        )
    return Aval(shape, x.type)


RESHAPE = GraphOp(
    "reshape",
    shape=_reshape_shape,
    ref=lambda x, shape: x.reshape(shape),
    vjp=lambda g, y, x, shape: (reshape(g, x.shape),),
    jvp=lambda ts, y, x, shape: reshape(ts[0], shape),
    batch=lambda size, batched, x, shape: (reshape(x, (size, *shape)), True),
    linear="joint",
    local=lambda attrs, ins, outs: {"shape": outs[0]},
    memory=FLAT_VIEW,
    samples=(sample((2, 3), shape=(3, 2)), sample((4,), shape=(2, 1, 2)), sample((), shape=(1,))),
    doc="the same elements in row-major order under other extents",
)


@public
def reshape(x: Any, *shape: Any) -> Tensor:
    """x with other extents, elements in row-major order. One extent may be -1.

    Raises ShapeError when the numbers of elements differ.
    """
    x = with_one_scale(x)
    items = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    dims = list(_with_inferred(x, items))
    target = shape_tuple(dims)
    return x if target == tuple(x.shape) else keep_scale(apply(RESHAPE, x, shape=target), x)


def _with_inferred(x: Tensor, dims: Sequence) -> Sequence:
    free = [i for i, d in enumerate(dims) if isinstance(d, int | np.integer) and d == -1]
    if not free:
        return dims
    if len(free) > 1:
        raise ShapeError(f"only one extent can be -1, got {tuple(dims)}")
    known = size_of([Dim.of(d) for i, d in enumerate(dims) if i != free[0]])
    inferred = divide(size_of(x.shape), known)
    if inferred is None:
        raise ShapeError(
            f"cannot reshape {show_shape(x.shape)} to {tuple(dims)}: "
            f"{size_of(x.shape)} elements are not a multiple of {known}"
        )
    return [inferred if i == free[0] else d for i, d in enumerate(dims)]


@public
def flatten(x: Any, start: int = 0, end: int = -1) -> Tensor:
    """x with the axes from `start` to `end`, this one included, as one, in row-major order.

    A scalar becomes a line of one element. Raises AxisError, also where start is behind end.
    """
    x = with_one_scale(x)
    if x.ndim == 0:
        x = reshape(x, (1,))
    first, last = axis_index(start, x.ndim), axis_index(end, x.ndim)
    if first > last:
        raise AxisError(f"flatten from axis {start} to axis {end}, which stands before it")
    return reshape(x, (*x.shape[:first], size_of(x.shape[first:last + 1]), *x.shape[last + 1:]))


@public
def expand_dims(x: Any, axis: Any) -> Tensor:
    """x with new axes of extent 1 at these positions of the result."""
    x = with_one_scale(x)
    count = len(axis) if isinstance(axis, tuple | list) else 1
    if axis is None:
        raise ArgumentError("expand_dims needs the places of the new axes, got axis=None",
                            hint="an axis, or several: ts.expand_dims(x, -1)")
    places = axes_tuple(axis, x.ndim + count)
    dims = list(x.shape)
    for a in places:
        dims.insert(a, 1)
    return reshape(x, dims)


@public
def squeeze(x: Any, axis: Any = None) -> Tensor:
    """x without these axes of extent 1 (all of them when axis is None). Raises ShapeError."""
    x = with_one_scale(x)
    drop = (
        tuple(i for i, d in enumerate(x.shape) if d == 1)
        if axis is None
        else axes_tuple(axis, x.ndim)
    )
    for a in drop:
        if x.shape[a] != 1:
            raise ShapeError(f"cannot squeeze axis {a}: its extent is {x.shape[a]}, not 1")
    return reshape(x, [d for i, d in enumerate(x.shape) if i not in drop])


# --- transpose --------------------------------------------------------------------------------
def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(axes))


TRANSPOSE = GraphOp(
    "transpose",
    shape=lambda x, axes: Aval(tuple(x.shape[a] for a in axes), x.type),
    ref=lambda x, axes: np.transpose(x, axes),
    vjp=lambda g, y, x, axes: (transpose(g, _inverse(axes)),),
    jvp=lambda ts, y, x, axes: transpose(ts[0], axes),
    batch=lambda size, batched, x, axes: (transpose(x, (0, *(a + 1 for a in axes))), True),
    axes=lambda x, axes: "abcdefgh"[: x.ndim] + "->" + "".join("abcdefgh"[a] for a in axes),
    linear="joint",
    memory=VIEW,
    samples=(sample((2, 3), axes=(1, 0)), sample((2, 3, 4), axes=(2, 0, 1))),
    doc="permute the axes",
)


@public
def transpose(x: Any, axes: Any = None, *more: int) -> Tensor:
    """x with permuted axes: axis i of the result is axis axes[i] of x; reversed when None.

    axes: a sequence, or the axes themselves: x.transpose(0, 2, 1). Two axes of more are no
    permutation: PyTorch's x.transpose(a, b) is x.swapaxes(a, b). Raises AxisError.
    """
    x = with_one_scale(x)
    if more:
        axes = (axes, *more)
        if axes in ((0, 1), (-2, -1)) and x.ndim == 2:
            raise AxisError("transpose(x, 0, 1) of a matrix changes nothing",
                            hint="x.T, or x.swapaxes(0, 1), exchanges the two axes")
    elif axes is not None and not isinstance(axes, Sequence | np.ndarray):
        axes = (axes,)
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(
        axis_index(a, x.ndim) for a in axes
    )
    if sorted(order) != list(range(x.ndim)):
        raise AxisError(
            f"{tuple(axes)} is not a permutation of the {x.ndim} axes",
            hint=f"x.swapaxes({axes[0]}, {axes[1]}) exchanges two of them" if len(axes) == 2
            else f"each of 0..{x.ndim - 1} once")
    return x if order == tuple(range(x.ndim)) else keep_scale(apply(TRANSPOSE, x, axes=order), x)


@public
def swapaxes(x: Any, a: int, b: int) -> Tensor:
    """x with two axes exchanged."""
    x = with_one_scale(x)
    order = list(range(x.ndim))
    i, j = axis_index(a, x.ndim), axis_index(b, x.ndim)
    order[i], order[j] = j, i
    return transpose(x, order)


@public
def moveaxis(x: Any, source: Any, destination: Any) -> Tensor:
    """x with an axis, or several, moved to other places, the others in order: np.moveaxis."""
    x = with_one_scale(x)
    pairs = [v if isinstance(v, tuple | list) else (v,) for v in (source, destination)]
    if len(pairs[0]) != len(pairs[1]):
        raise ArgumentError(f"{len(pairs[0])} axes to move and {len(pairs[1])} places")
    for axes in pairs:
        axes_tuple(tuple(axes), x.ndim)  # refuses an axis that is named twice
    moved = sorted((axis_index(d, x.ndim), axis_index(s, x.ndim))
                   for s, d in zip(*pairs, strict=True))
    order = [i for i in range(x.ndim) if i not in [s for _, s in moved]]
    for d, s in moved:
        order.insert(d, s)
    return transpose(x, order)


def _matrix_transpose(x: Tensor) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"a transpose needs two axes, got {show_shape(x.shape)}")
    return swapaxes(x, -1, -2)


# --- broadcast --------------------------------------------------------------------------------
def _broadcast_shape(x: Aval, shape: tuple) -> Aval:
    extra = len(shape) - len(x.shape)
    fits = extra >= 0 and all(
        a == 1 or a == b for a, b in zip(x.shape, shape[max(extra, 0):], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{show_shape(x.shape)} does not broadcast to {show_shape(shape)}",
            hint="axes align at the end; only an extent of 1 stretches",
        )
    return Aval(shape, x.type)


def _broadcast_batch(size: Any, batched: tuple, x: Tensor, shape: tuple) -> tuple:
    return broadcast_to(pad_batch_axes(x, len(shape)), (size, *shape)), True


def _broadcast_vjp(g: Tensor, y: Tensor, x: Tensor, shape: tuple) -> tuple:
    return (unbroadcast(g, tuple(x.shape)),)


def _broadcast_letters(x: Aval, shape: tuple) -> str:
    out = "abcdefghijklmnop"[: len(shape)]
    lead = len(shape) - x.ndim
    own = ("1" if n != m else c
           for c, n, m in zip(out[lead:], x.shape, shape[lead:], strict=True))
    return f"{''.join(own)}->{out}"


BROADCAST_TO = GraphOp(
    "broadcast_to",
    shape=_broadcast_shape,
    ref=lambda x, shape: np.broadcast_to(x, shape),
    vjp=_broadcast_vjp,
    jvp=lambda ts, y, x, shape: broadcast_to(ts[0], shape),
    batch=_broadcast_batch,
    axes=_broadcast_letters,
    linear="joint",
    local=lambda attrs, ins, outs: {"shape": outs[0]},
    memory=VIEW,
    samples=(sample((3,), shape=(2, 3)), sample((2, 1), shape=(2, 4)), sample((), shape=(2,))),
    doc="stretch axes of extent 1 and add leading axes",
)


@public
def broadcast_to(x: Any, shape: Any) -> Tensor:
    """x stretched to `shape` by NumPy's rule. Raises ShapeError."""
    x, target = dequantized(x), shape_tuple(shape)
    return x if target == tuple(x.shape) else apply(BROADCAST_TO, x, shape=target)


# --- slice, flip ------------------------------------------------------------------------------
def slices_of(starts: tuple, stops: tuple, steps: tuple) -> tuple[slice, ...]:
    return tuple([
        slice(a, None if b < 0 else b, s) for a, b, s in zip(starts, stops, steps, strict=True)])


def _slice_shape(x: Aval, starts: tuple, stops: tuple, steps: tuple) -> Aval:
    dims = []
    for a, b, s in zip(starts, stops, steps, strict=True):
        if isinstance(b, Dim):
            dims.append(b - a if s == 1 else (b - a) // s)
        else:
            dims.append(max(0, -(-(b - a) // s)))
    return Aval(tuple(dims), x.type)


def _slice_vjp(g: Tensor, y: Tensor, x: Tensor, starts: tuple, stops: tuple, steps: tuple) -> tuple:
    before = starts
    after = tuple(
        n - (a + (m - 1) * s + 1) if m else n - a
        for n, a, s, m in zip(x.shape, starts, steps, y.shape, strict=True)
    )
    holes = tuple(s - 1 for s in steps)
    return (apply(PAD, g, literal(0.0, g), before=before, after=after, holes=holes),)


def whole_axes(whole: Sequence[bool]) -> str:
    """Letters for the axes that an op leaves alone, "_" for those that are `whole`."""
    return "".join("_" if w else c for w, c in zip(whole, "abcdefghijklmnop", strict=False))


def _slice_letters(x: Aval, starts: tuple, stops: tuple, steps: tuple) -> str:
    own = whole_axes([n != m for n, m in zip(
        x.shape, _slice_shape(x, starts, stops, steps).shape, strict=True)])
    return f"{own}->{own}"


def _slice_local(attrs: dict, ins: Sequence[tuple], outs: Sequence[tuple]) -> dict:
    """The axes that are taken whole have other extents in a shard."""
    stops = [n if n == m else s for n, m, s in zip(ins[0], outs[0], attrs["stops"], strict=True)]
    return {**attrs, "stops": tuple(stops)}


SLICE = GraphOp(
    "slice",
    shape=_slice_shape,
    ref=lambda x, starts, stops, steps: x[slices_of(starts, stops, steps)],
    vjp=_slice_vjp,
    jvp=lambda ts, y, x, **a: apply(SLICE, ts[0], **a),
    batch=lambda size, batched, x, starts, stops, steps: (
        apply(SLICE, x, starts=(0, *starts), stops=(size, *stops), steps=(1, *steps)),
        True,
    ),
    axes=_slice_letters,
    linear="joint",
    local=_slice_local,
    memory=VIEW,
    drops=(0,),
    samples=(
        sample((5,), starts=(1,), stops=(4,), steps=(1,)),
        sample((6, 3), starts=(1, 0), stops=(6, 3), steps=(2, 1)),
    ),
    doc="elements start, start + step, ... below stop, per axis",
)

FLIP = GraphOp(
    "flip",
    shape=lambda x, axis: x,
    ref=lambda x, axis: np.flip(x, axis),
    vjp=lambda g, y, x, axis: (flip(g, axis),),
    jvp=lambda ts, y, x, axis: flip(ts[0], axis),
    batch=lambda size, batched, x, axis: (flip(x, tuple(a + 1 for a in axis)), True),
    axes=lambda x, axis: "{0}->{0}".format(whole_axes([d in axis for d in range(x.ndim)])),
    linear="joint",
    memory=VIEW,
    samples=(sample((3,), axis=(0,)), sample((2, 3), axis=(0, 1))),
    doc="reverse the order along axes",
)


@public
def flip(x: Any, axis: Any = None) -> Tensor:
    """x with the order of elements reversed along these axes (all when None)."""
    x = dequantized(x)
    return apply(FLIP, x, axis=axes_tuple(axis, x.ndim))


# --- pad --------------------------------------------------------------------------------------
def _pad_shape(x: Aval, value: Aval, before: tuple, after: tuple, holes: tuple) -> Aval:
    dims = []
    for n, lo, hi, h in zip(x.shape, before, after, holes, strict=True):
        inner = n if h == 0 else (n - 1) * (h + 1) + 1 if n != 0 else 0
        dims.append(inner + lo + hi)
    if any(isinstance(d, int) and d < 0 for d in dims):
        raise ShapeError(f"padding {show_shape(x.shape)} by {before}, {after} leaves {dims}")
    return Aval(tuple(dims), x.type)


def _pad_ref(x: np.ndarray, value: np.ndarray, before: tuple, after: tuple, holes: tuple,
             out: np.ndarray | None = None) -> Any:
    shape = [
        ((n - 1) * (h + 1) + 1 if n else 0) + lo + hi
        for n, lo, hi, h in zip(x.shape, before, after, holes, strict=True)
    ]
    out = np.empty(shape, x.dtype) if out is None else out
    out[...] = value
    target, source = [], []
    for n, lo, m, h in zip(x.shape, before, shape, holes, strict=True):
        step = h + 1
        first = max(0, -(lo // step))  # elements that a negative `before` cuts off
        last = min(n, max(first, -(-(m - lo) // step)))
        source.append(slice(first, last))
        begin = lo + first * step
        target.append(slice(begin, begin + max(0, (last - first - 1) * step + 1), step))
    out[tuple(target)] = x[tuple(source)]
    return out


def _pad_vjp(g: Tensor, y: Tensor, x: Tensor, value: Tensor, before: tuple, after: tuple,
             holes: tuple) -> tuple:
    inner = _unpad(g, before, after, holes)
    return inner, F.sum(g) - F.sum(inner)


def _unpad(g: Tensor, before: tuple, after: tuple, holes: tuple) -> Tensor:
    """The adjoint of padding with 0: what was added is cut off, what was cut off becomes 0."""
    if any(isinstance(w, int) and w < 0 for w in (*before, *after)):
        g = apply(PAD, g, literal(0.0, g), before=tuple(-w for w in before),
                  after=tuple(-w for w in after), holes=(0,) * len(before))
        before, after = (0,) * len(before), (0,) * len(after)
    stops = tuple(n - hi for n, hi in zip(g.shape, after, strict=True))
    return apply(SLICE, g, starts=before, stops=stops, steps=tuple(h + 1 for h in holes))


def _pad_batch(size: Any, batched: tuple, x: Tensor, value: Tensor, before: tuple, after: tuple,
               holes: tuple) -> tuple:
    x = x if batched[0] else broadcast_to(x, (size, *x.shape))
    attrs = dict(before=(0, *before), after=(0, *after), holes=(0, *holes))
    if not batched[1]:
        return apply(PAD, x, value, **attrs), True
    y = apply(PAD, x, F.zeros((), x.type), **attrs)
    inside = apply(PAD, F.ones(x.shape, "bool_"), F.zeros((), "bool_"), **attrs)
    return F.where(inside, y, reshape(value, (size,) + (1,) * (y.ndim - 1))), True


def _pad_letters(x: Aval, value: Aval, before: tuple, after: tuple, holes: tuple) -> str:
    own = whole_axes([any(p) for p in zip(before, after, holes, strict=True)])
    return f"{own},->{own}"


def _pad_element(x: Aval, value: Aval, before: tuple, after: tuple, holes: tuple) -> Element:
    at, inside = [], []
    for a, (n, lo, h) in enumerate(zip(x.shape, before, holes, strict=True)):
        shifted = f"(o{a} - {lo})"
        at.append(f"{shifted} // {h + 1}" if h else shifted)
        inside += [f"({shifted} >= 0)", f"({shifted} < {(n - 1) * (h + 1) + 1 if n else 0})"]
        inside += [f"({shifted} % {h + 1} == 0)"] * (h > 0)
    return Element(f"where({' & '.join(inside)}, x0[{index_names(at)}], x1[()])" if at
                   else "x0[()]")


PAD = GraphOp(
    "pad",
    shape=_pad_shape,
    ref=_pad_ref,
    vjp=_pad_vjp,
    jvp=lambda ts, y, x, v, **a: apply(
        PAD,
        F.zeros(x.shape, compute_type(x.type)) if ts[0] is None else ts[0],
        literal(0.0, y) if ts[1] is None else ts[1],
        **a,
    ),
    batch=_pad_batch,
    axes=_pad_letters,
    drops=(0,),
    samples=(
        sample((2, 3), (), before=(1, 0), after=(0, 2), holes=(0, 0)),
        sample((3,), (), before=(0,), after=(1,), holes=(2,)),
        sample((4, 3), (), before=(-1, 2), after=(1, -2), holes=(0, 0)),
        sample((4,), (), before=(-2,), after=(-1,), holes=(1,)),
    ),
    flops=flops.none,
    element=_pad_element,
    out=True,
    doc="surround with a value, and put `holes` of it between neighbours",
)


PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


@public
def pad(x: Any, width: int | Sequence[Any], value: Any = 0.0, mode: str = "constant") -> Tensor:
    """x surrounded by `value`, or by its own elements. width: n, (before, after), or a pair per
    axis, the first axis first (PyTorch's flat widths begin with the last).

    value: a number, or a scalar tensor, which gets a gradient
    mode: "constant" (value), "edge" (the nearest element), "reflect" and "symmetric" (mirrored at
    the edge, without and with the edge element), "wrap" (from the other end): np.pad
    Raises ArgumentError, and ShapeError when an axis is empty.
    """
    x = dequantized(x)
    pairs = _pad_pairs(width, x.ndim)
    if isinstance(value, str):
        raise ArgumentError(f"pad by the value {value!r}", hint=f"mode={value!r}")
    if mode not in PAD_MODES:
        raise ArgumentError(f"pad mode {mode!r}", hint="one of " + ", ".join(PAD_MODES))
    if mode != "constant":
        return _pad_by_own(x, pairs, mode)
    fill = _fill(value, x)
    return apply(
        PAD, x, fill, before=tuple(p[0] for p in pairs), after=tuple(p[1] for p in pairs),
        holes=(0,) * x.ndim,
    )


def _fill(value: Any, x: Tensor) -> Tensor:
    """What x is padded with, as an element of it."""
    if isinstance(value, Tensor | np.ndarray):
        fill = dequantized(value)
        if fill.ndim or (fill.dtype.kind == "float") > (x.dtype.kind == "float"):
            raise ArgumentError(f"a padding of type {fill.type}{show_shape(fill.shape)} for "
                                f"{x.type}", hint="one element, of x's kind of type")
        return convert(to_compute(fill), x.type)
    made = literal(value, x)
    return made if x.dtype is x.dtype.compute else convert(made, x.type)


def _pad_by_own(x: Tensor, pairs: list, mode: str) -> Tensor:
    """np.pad of the positions says which element stands where."""
    for axis, pair in enumerate(pairs):
        if pair == (0, 0):
            continue
        n = x.shape[axis]
        if min(pair) < 0 or n == 0:
            raise ShapeError(f"padding by {pair} in mode {mode!r} along axis {axis} of extent {n}",
                             hint="slice to crop; an empty axis has no element to repeat")
        places = np.pad(np.arange(n), pair, mode)  # type: ignore[call-overload]
        x = F.take(x, places, axis)
    return x


def _pad_pairs(width: Any, ndim: int) -> list[tuple[int, int]]:
    if isinstance(width, Tensor | np.ndarray | np.generic):
        width = np.asarray(width).tolist()
    if isinstance(width, int):
        return [(width, width)] * ndim
    items = list(width)
    if len(items) == 2 and all(isinstance(i, int) for i in items):
        return [(items[0], items[1])] * ndim
    if len(items) != ndim or any(isinstance(p, int) or len(p) != 2 for p in items):
        raise ArgumentError(f"pad width {width!r} does not fit {ndim} axes",
                            hint="an int, (before, after), or a pair per axis")
    return [tuple(p) for p in items]


OPERATORS.update(
    T=_matrix_transpose, mT=_matrix_transpose, reshape=reshape, flatten=flatten,
    transpose=transpose, squeeze=squeeze, expand_dims=expand_dims, swapaxes=swapaxes,
)
