"""Ops that move elements without changing them: reshape, transpose, slice, pad, concatenate, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dims import Dim, divide, show_shape, size_of
from ...errors import ArgumentError, AxisError, DTypeError, ShapeError
from ...tensor import OPERATORS, Tensor, as_tensor
from ..op import Aval, Op, sample
from ..operand import (
    PUBLIC,
    axes_tuple,
    axis_index,
    compute_type,
    convert,
    literal,
    plain,
    promote,
    public,
    shape_tuple,
    store,
)
from ..trace import apply


# --- reshape ----------------------------------------------------------------------------------
def _reshape_shape(x: Aval, shape: tuple) -> Aval:
    if size_of(x.shape) != size_of(shape):
        raise ShapeError(
            f"cannot reshape {show_shape(x.shape)} ({size_of(x.shape)} elements) "
            f"to {show_shape(shape)} ({size_of(shape)} elements)",
            hint="one extent may be -1: it is computed from the others",
        )
    return Aval(shape, x.type)


RESHAPE = Op(
    "reshape",
    shape=_reshape_shape,
    ref=lambda x, shape: np.reshape(x, shape),
    vjp=lambda g, y, x, shape: (reshape(g, x.shape),),
    jvp=lambda ts, y, x, shape: reshape(ts[0], shape),
    batch=lambda size, batched, x, shape: (reshape(x, (size, *shape)), True),
    view=True,
    samples=(sample((2, 3), shape=(3, 2)), sample((4,), shape=(2, 1, 2)), sample((), shape=(1,))),
    doc="the same elements in row-major order under other extents",
)


@public
def reshape(x: Any, *shape: Any) -> Tensor:
    """x with other extents, elements in row-major order. One extent may be -1.

    Raises ShapeError when the numbers of elements differ.
    """
    x = plain(x)
    items = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    dims = list(_with_inferred(x, items))
    target = shape_tuple(dims)
    return x if target == tuple(x.shape) else apply(RESHAPE, x, shape=target)


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
def flatten(x: Any) -> Tensor:
    """x as one axis, in row-major order."""
    x = plain(x)
    return reshape(x, (size_of(x.shape),))


@public
def expand_dims(x: Any, axis: Any) -> Tensor:
    """x with new axes of extent 1 at these positions of the result."""
    x = plain(x)
    count = len(axis) if isinstance(axis, tuple | list) else 1
    places = axes_tuple(axis, x.ndim + count)
    dims = list(x.shape)
    for a in places:
        dims.insert(a, 1)
    return reshape(x, dims)


@public
def squeeze(x: Any, axis: Any = None) -> Tensor:
    """x without these axes of extent 1 (all of them when axis is None). Raises ShapeError."""
    x = plain(x)
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


TRANSPOSE = Op(
    "transpose",
    shape=lambda x, axes: Aval(tuple(x.shape[a] for a in axes), x.type),
    ref=lambda x, axes: np.transpose(x, axes),
    vjp=lambda g, y, x, axes: (transpose(g, _inverse(axes)),),
    jvp=lambda ts, y, x, axes: transpose(ts[0], axes),
    batch=lambda size, batched, x, axes: (transpose(x, (0, *(a + 1 for a in axes))), True),
    axes=lambda x, axes: "abcdefgh"[: x.ndim] + "->" + "".join("abcdefgh"[a] for a in axes),
    view=True,
    samples=(sample((2, 3), axes=(1, 0)), sample((2, 3, 4), axes=(2, 0, 1))),
    doc="permute the axes",
)


@public
def transpose(x: Any, axes: Any = None) -> Tensor:
    """x with permuted axes: axis i of the result is axis axes[i] of x; reversed when None."""
    x = plain(x)
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(
        axis_index(a, x.ndim) for a in axes
    )
    if sorted(order) != list(range(x.ndim)):
        raise AxisError(f"{tuple(axes)} is not a permutation of the {x.ndim} axes")
    return x if order == tuple(range(x.ndim)) else apply(TRANSPOSE, x, axes=order)


@public
def swapaxes(x: Any, a: int, b: int) -> Tensor:
    """x with two axes exchanged."""
    x = plain(x)
    order = list(range(x.ndim))
    i, j = axis_index(a, x.ndim), axis_index(b, x.ndim)
    order[i], order[j] = j, i
    return transpose(x, order)


@public
def moveaxis(x: Any, source: int, destination: int) -> Tensor:
    """x with one axis moved to another place, the others in order."""
    x = plain(x)
    order = [i for i in range(x.ndim) if i != axis_index(source, x.ndim)]
    order.insert(axis_index(destination, x.ndim), axis_index(source, x.ndim))
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
    from .elementwise import pad_batch_axes

    return broadcast_to(pad_batch_axes(x, len(shape)), (size, *shape)), True


def _broadcast_vjp(g: Tensor, y: Tensor, x: Tensor, shape: tuple) -> tuple:
    from .elementwise import unbroadcast

    return (unbroadcast(g, tuple(x.shape)),)


BROADCAST_TO = Op(
    "broadcast_to",
    shape=_broadcast_shape,
    ref=lambda x, shape: np.broadcast_to(x, shape),
    vjp=_broadcast_vjp,
    jvp=lambda ts, y, x, shape: broadcast_to(ts[0], shape),
    batch=_broadcast_batch,
    view=True,
    samples=(sample((3,), shape=(2, 3)), sample((2, 1), shape=(2, 4)), sample((), shape=(2,))),
    doc="stretch axes of extent 1 and add leading axes",
)


@public
def broadcast_to(x: Any, shape: Any) -> Tensor:
    """x stretched to `shape` by NumPy's rule. Raises ShapeError."""
    x, target = plain(x), shape_tuple(shape)
    return x if target == tuple(x.shape) else apply(BROADCAST_TO, x, shape=target)


# --- slice, flip ------------------------------------------------------------------------------
def _slice_of(starts: tuple, stops: tuple, steps: tuple) -> tuple[slice, ...]:
    return tuple(
        slice(a, None if b < 0 else b, s) for a, b, s in zip(starts, stops, steps, strict=True)
    )


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


SLICE = Op(
    "slice",
    shape=_slice_shape,
    ref=lambda x, starts, stops, steps: x[_slice_of(starts, stops, steps)],
    vjp=_slice_vjp,
    jvp=lambda ts, y, x, **a: apply(SLICE, ts[0], **a),
    batch=lambda size, batched, x, starts, stops, steps: (
        apply(SLICE, x, starts=(0, *starts), stops=(size, *stops), steps=(1, *steps)),
        True,
    ),
    view=True,
    samples=(
        sample((5,), starts=(1,), stops=(4,), steps=(1,)),
        sample((6, 3), starts=(1, 0), stops=(6, 3), steps=(2, 1)),
    ),
    doc="elements start, start + step, ... below stop, per axis",
)

FLIP = Op(
    "flip",
    shape=lambda x, axis: x,
    ref=lambda x, axis: np.flip(x, axis),
    vjp=lambda g, y, x, axis: (flip(g, axis),),
    jvp=lambda ts, y, x, axis: flip(ts[0], axis),
    batch=lambda size, batched, x, axis: (flip(x, tuple(a + 1 for a in axis)), True),
    view=True,
    samples=(sample((3,), axis=(0,)), sample((2, 3), axis=(0, 1))),
    doc="reverse the order along axes",
)


@public
def flip(x: Any, axis: Any = None) -> Tensor:
    """x with the order of elements reversed along these axes (all when None)."""
    x = plain(x)
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


def _pad_ref(x: np.ndarray, value: np.ndarray, before: tuple, after: tuple, holes: tuple) -> Any:
    shape = [
        ((n - 1) * (h + 1) + 1 if n else 0) + lo + hi
        for n, lo, hi, h in zip(x.shape, before, after, holes, strict=True)
    ]
    out = np.full(shape, value, x.dtype)
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
    inner = _unpad(g, x.shape, before, after, holes)
    return inner, PUBLIC["sum"](g) - PUBLIC["sum"](inner)


def _unpad(g: Tensor, shape: tuple, before: tuple, after: tuple, holes: tuple) -> Tensor:
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
    y = apply(PAD, x, PUBLIC["zeros"]((), x.type), **attrs)
    inside = apply(PAD, PUBLIC["ones"](x.shape, "bool_"), PUBLIC["zeros"]((), "bool_"), **attrs)
    return PUBLIC["where"](inside, y, reshape(value, (size,) + (1,) * (y.ndim - 1))), True


PAD = Op(
    "pad",
    shape=_pad_shape,
    ref=_pad_ref,
    vjp=_pad_vjp,
    jvp=lambda ts, y, x, v, **a: apply(
        PAD,
        PUBLIC["zeros"](x.shape, compute_type(x.type)) if ts[0] is None else ts[0],
        literal(0.0, y) if ts[1] is None else ts[1],
        **a,
    ),
    batch=_pad_batch,
    samples=(
        sample((2, 3), (), before=(1, 0), after=(0, 2), holes=(0, 0)),
        sample((3,), (), before=(0,), after=(1,), holes=(2,)),
        sample((4, 3), (), before=(-1, 2), after=(1, -2), holes=(0, 0)),
        sample((4,), (), before=(-2,), after=(-1,), holes=(1,)),
    ),
    doc="surround with a value, and put `holes` of it between neighbours",
)


PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


@public
def pad(x: Any, width: Any, value: float = 0.0, mode: str = "constant") -> Tensor:
    """x surrounded by `value`, or by its own elements. width: n, (before, after), or a pair per
    axis.

    mode: "constant" (value), "edge" (the nearest element), "reflect" and "symmetric" (mirrored at
    the edge, without and with the edge element), "wrap" (from the other end): np.pad
    Raises ArgumentError, and ShapeError when an axis is empty.
    """
    x = plain(x)
    pairs = _pad_pairs(width, x.ndim)
    if mode not in PAD_MODES:
        raise ArgumentError(f"pad mode {mode!r}", hint="one of " + ", ".join(PAD_MODES))
    if mode != "constant":
        return _pad_by_own(x, pairs, mode)
    fill = literal(value, x) if x.dtype is x.dtype.compute else convert(
        literal(value, x), x.type
    )
    return apply(
        PAD, x, fill, before=tuple(p[0] for p in pairs), after=tuple(p[1] for p in pairs),
        holes=(0,) * x.ndim,
    )


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
        x = PUBLIC["take"](x, places, axis)
    return x


def _pad_pairs(width: Any, ndim: int) -> list[tuple[int, int]]:
    if isinstance(width, int):
        return [(width, width)] * ndim
    items = list(width)
    if len(items) == 2 and all(isinstance(i, int) for i in items):
        return [(items[0], items[1])] * ndim
    if len(items) != ndim or any(isinstance(p, int) or len(p) != 2 for p in items):
        raise ArgumentError(f"pad width {width!r} does not fit {ndim} axes",
                            hint="an int, (before, after), or a pair per axis")
    return [tuple(p) for p in items]


# --- concatenate, split -----------------------------------------------------------------------
def _concat_shape(*xs: Aval, axis: int) -> Aval:
    first = xs[0]
    for i, x in enumerate(xs[1:], 1):
        same = x.ndim == first.ndim and all(
            a == b for j, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if j != axis
        )
        if not same:
            raise ShapeError(
                f"operand {i} {show_shape(x.shape)} does not fit operand 0 "
                f"{show_shape(first.shape)} along axis {axis}",
                hint="all extents but that of the axis must be equal",
            )
        if x.type.dtype is not first.type.dtype:
            raise DTypeError(f"operands of one type needed, got {first.type} and {x.type}")
    total = sum((x.shape[axis] for x in xs[1:]), start=first.shape[axis])
    return Aval((*first.shape[:axis], total, *first.shape[axis + 1:]), first.type)


def _concat_vjp(g: Tensor, y: Tensor, *xs: Tensor, axis: int) -> tuple:
    return tuple(split(g, [x.shape[axis] for x in xs], axis=axis))


def _concat_batch(size: Any, batched: tuple, *xs: Tensor, axis: int) -> tuple:
    full = [
        x if b else broadcast_to(expand_dims(x, 0), (size, *x.shape))
        for x, b in zip(xs, batched, strict=True)
    ]
    return apply(CONCATENATE, *full, axis=axis + 1), True


CONCATENATE = Op(
    "concatenate",
    shape=_concat_shape,
    ref=lambda *xs, axis: np.concatenate(xs, axis),
    vjp=_concat_vjp,
    jvp=lambda ts, y, *xs, axis: apply(
        CONCATENATE,
        *[PUBLIC["zeros"](x.shape, compute_type(y.type)) if t is None else t
          for t, x in zip(ts, xs, strict=True)],
        axis=axis,
    ),
    batch=_concat_batch,
    samples=(sample((2, 3), (1, 3), axis=0), sample((2, 1), (2, 2), (2, 3), axis=1)),
    doc="join along an axis",
)


@public
def concatenate(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors joined along an axis; their other extents must agree. Raises ShapeError."""
    if not isinstance(tensors, tuple | list) or not tensors:
        raise ArgumentError("concatenate needs a non-empty list of tensors",
                            hint="ts.concatenate([a, b], axis=0)")
    xs = [as_tensor(t) for t in tensors]
    if any(x.type != xs[0].type for x in xs) or xs[0].scale is not None:
        wide, numeric = promote(*xs)
        xs = [store(x, numeric) for x in wide]
    return apply(CONCATENATE, *xs, axis=axis_index(axis, xs[0].ndim))


@public
def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis. Raises ShapeError."""
    if not isinstance(tensors, tuple | list) or not tensors:
        raise ArgumentError("stack needs a non-empty list of tensors")
    xs = [plain(t) for t in tensors]
    place = axis_index(axis, xs[0].ndim + 1)
    for i, x in enumerate(xs):
        if x.shape != xs[0].shape:
            raise ShapeError(
                f"tensor {i} has shape {show_shape(x.shape)}, tensor 0 {show_shape(xs[0].shape)}"
            )
    return concatenate([expand_dims(x, place) for x in xs], axis=place)


def _split_bounds(x: Any, sizes: tuple, axis: int) -> list[dict[str, tuple]]:
    """The slice of each part."""
    out, at = [], 0
    for size in sizes:
        starts = tuple(at if i == axis else 0 for i in range(len(x.shape)))
        stops = tuple(at + size if i == axis else n for i, n in enumerate(x.shape))
        out.append({"starts": starts, "stops": stops, "steps": (1,) * len(x.shape)})
        at = at + size
    return out


def _split_shape(x: Aval, sizes: tuple, axis: int) -> tuple[Aval, ...]:
    if sum(sizes[1:], start=sizes[0]) != x.shape[axis]:
        raise ShapeError(
            f"parts {list(sizes)} do not add up to extent {x.shape[axis]} of axis {axis}"
        )
    return tuple(Aval((*x.shape[:axis], n, *x.shape[axis + 1:]), x.type) for n in sizes)


def _split_vjp(g: tuple, y: tuple, x: Tensor, sizes: tuple, axis: int) -> tuple:
    like = next(p for p in g if p is not None)
    parts = [PUBLIC["zeros"](p.shape, like.type) if q is None else q
             for p, q in zip(y, g, strict=True)]
    return (apply(CONCATENATE, *parts, axis=axis),)


SPLIT = Op(
    "split",
    shape=_split_shape,
    ref=lambda x, sizes, axis: tuple(
        x[_slice_of(**b)].copy() for b in _split_bounds(x, sizes, axis)
    ),
    vjp=_split_vjp,
    jvp=lambda ts, y, x, **a: apply(SPLIT, ts[0], **a),
    batch=lambda size, batched, x, sizes, axis: (
        apply(SPLIT, x, sizes=sizes, axis=axis + 1), True
    ),
    expand=lambda x, sizes, axis: tuple(
        apply(SLICE, x, **b) for b in _split_bounds(x, sizes, axis)
    ),
    multi=True,
    samples=(sample((5,), sizes=(2, 3), axis=0), sample((2, 6), sizes=(2, 2, 2), axis=1)),
    doc="cut along an axis into parts; its derivative joins their cotangents once",
)


@public
def split(x: Any, sections: Any, axis: int = 0) -> list[Tensor]:
    """x cut along an axis into `sections` equal parts, or into parts of these extents.

    Raises ShapeError when the extent does not divide or the parts do not add up.
    """
    x = plain(x)
    a = axis_index(axis, x.ndim)
    return list(apply(SPLIT, x, sizes=tuple(_split_sizes(x.shape[a], sections, a)), axis=a))


def _split_sizes(extent: Any, sections: Any, axis: int) -> list:
    if not isinstance(sections, tuple | list):
        size = divide(extent, sections)
        if size is None:
            raise ShapeError(f"axis {axis} of extent {extent} does not split into {sections}",
                             hint="give the extents of the parts as a list")
        return [size] * sections
    if sum(sections[1:], start=sections[0]) != extent:
        raise ShapeError(f"parts {list(sections)} do not add up to extent {extent} of axis {axis}")
    return list(sections)


@public
def tile(x: Any, repeats: Any) -> Tensor:
    """x repeated `repeats` times, per axis when a sequence: np.tile."""
    x = plain(x)
    reps = (repeats,) if isinstance(repeats, int) else tuple(repeats)
    ndim = max(x.ndim, len(reps))
    reps = (1,) * (ndim - len(reps)) + reps
    shape = (1,) * (ndim - x.ndim) + tuple(x.shape)
    paired = [d for n in shape for d in (1, n)]
    target = [d for r, n in zip(reps, shape, strict=True) for d in (r, n)]
    out = broadcast_to(reshape(x, paired), target)
    return reshape(out, [r * n for r, n in zip(reps, shape, strict=True)])


@public
def repeat(x: Any, repeats: int, axis: int) -> Tensor:
    """Each element along an axis repeated `repeats` times in place: np.repeat."""
    x = plain(x)
    a = axis_index(axis, x.ndim)
    wide = expand_dims(x, a + 1)
    target = (*x.shape[: a + 1], repeats, *x.shape[a + 1:])
    return reshape(broadcast_to(wide, target),
                   (*x.shape[:a], x.shape[a] * repeats, *x.shape[a + 1:]))


OPERATORS.update(
    T=_matrix_transpose, mT=_matrix_transpose, reshape=reshape, flatten=flatten,
    transpose=transpose, squeeze=squeeze, expand_dims=expand_dims, swapaxes=swapaxes,
)
