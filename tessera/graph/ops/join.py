"""Ops that put tensors together and take them apart: concatenate, stack, split, tile, repeat."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dims import as_index, divide, show_shape
from ...errors import ArgumentError, DTypeError, ShapeError
from ...tensor import Tensor, as_tensor
from .. import flops
from .. import functions as F
from ..op import Aval, GraphOp, sample
from ..operand import axis_index, compute_type, dequantized, promote, public, store
from ..trace import apply
from ..weak_numbers import is_number
from .shape import SLICE, broadcast_to, expand_dims, reshape, slices_of, whole_axes


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


def _concat_letters(*xs: Aval, axis: int) -> str:
    own = whole_axes([d == axis for d in range(xs[0].ndim)])
    return ",".join([own] * len(xs)) + "->" + own


CONCATENATE = GraphOp(
    "concatenate",
    shape=_concat_shape,
    ref=lambda *xs, axis, out=None: np.concatenate(xs, axis, out=out),
    vjp=_concat_vjp,
    jvp=lambda ts, y, *xs, axis: apply(
        CONCATENATE,
        *[F.zeros(x.shape, compute_type(y.type)) if t is None else t
          for t, x in zip(ts, xs, strict=True)],
        axis=axis,
    ),
    batch=_concat_batch,
    axes=_concat_letters,
    linear="joint",
    samples=(sample((2, 3), (1, 3), axis=0), sample((2, 1), (2, 2), (2, 3), axis=1)),
    flops=flops.none,
    doc="join along an axis",
    out=True,
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
    xs = [t if is_number(t) else dequantized(t) for t in tensors]
    if any(map(is_number, xs)):
        wide, numeric = promote(*xs)
        xs = [store(x, numeric) for x in wide]
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
    parts = [F.zeros(p.shape, like.type) if q is None else q
             for p, q in zip(y, g, strict=True)]
    return (apply(CONCATENATE, *parts, axis=axis),)


SPLIT = GraphOp(
    "split",
    shape=_split_shape,
    ref=lambda x, sizes, axis: tuple(
        x[slices_of(**b)].copy() for b in _split_bounds(x, sizes, axis)
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
    drops=(0,),
    samples=(sample((5,), sizes=(2, 3), axis=0), sample((2, 6), sizes=(2, 2, 2), axis=1)),
    doc="cut along an axis into parts; its derivative joins their cotangents once",
)


@public
def split(x: Any, sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """x cut along an axis into `sections` equal parts, or into parts of these extents: torch.split
    with a list (np.split's list says where to cut).

    Raises ShapeError when the extent does not divide or the parts do not add up.
    """
    x = dequantized(x)
    a = axis_index(axis, x.ndim)
    return list(apply(SPLIT, x, sizes=tuple(_split_sizes(x.shape[a], sections, a)), axis=a))


def _split_sizes(extent: Any, sections: Any, axis: int) -> list:
    if isinstance(sections, Tensor | np.ndarray | np.generic) and not sections.ndim:
        sections = operator.index(sections)  # type: ignore[arg-type]  # says so where it is none
    if isinstance(sections, np.ndarray):
        sections = sections.tolist()
    if not isinstance(sections, tuple | list):
        size = divide(extent, sections)
        if size is None:
            raise ShapeError(f"axis {axis} of extent {extent} does not split into {sections}",
                             hint="give the extents of the parts as a list")
        return [size] * sections
    if not sections or sum(sections[1:], start=sections[0]) != extent:
        raise ShapeError(f"parts {list(sections)} do not add up to extent {extent} of axis {axis}",
                         hint="these are extents; np.split(x, places) cuts a tensor at places")
    return list(sections)


@public
def tile(x: Any, repeats: Any) -> Tensor:
    """x repeated `repeats` times, per axis when a sequence: np.tile."""
    x = dequantized(x)
    several = isinstance(repeats, tuple | list) or getattr(repeats, "ndim", 0) != 0
    given = repeats if several else (repeats,)
    counts = [as_index(n) for n in given]
    if None in counts:
        raise ArgumentError(f"tile repeats {repeats!r} times",
                            hint="a whole number, or one per axis")
    reps = tuple(n for n in counts if n is not None)
    ndim = max(x.ndim, len(reps))
    reps = (1,) * (ndim - len(reps)) + reps
    shape = (1,) * (ndim - x.ndim) + tuple(x.shape)
    paired = [d for n in shape for d in (1, n)]
    target = [d for r, n in zip(reps, shape, strict=True) for d in (r, n)]
    out = broadcast_to(reshape(x, paired), target)
    return reshape(out, [r * n for r, n in zip(reps, shape, strict=True)])


@public
def repeat(x: Any, repeats: int | Sequence[int], axis: int) -> Tensor:
    """Each element along an axis repeated `repeats` times in place: np.repeat.

    repeats: one number, or known ones, one for each element
    """
    x = dequantized(x)
    a = axis_index(axis, x.ndim)
    if isinstance(repeats, Tensor) and not repeats.ndim:
        repeats = operator.index(repeats)
    if isinstance(repeats, Tensor | np.ndarray | list | tuple):
        return F.take(x, _each_repeated(x.shape[a], np.asarray(repeats)), axis=a)
    wide = expand_dims(x, a + 1)
    target = (*x.shape[: a + 1], repeats, *x.shape[a + 1:])
    return reshape(broadcast_to(wide, target),
                   (*x.shape[:a], x.shape[a] * repeats, *x.shape[a + 1:]))


def _each_repeated(extent: Any, repeats: np.ndarray) -> np.ndarray:
    """Which element stands at each place of the result."""
    if repeats.shape not in ((1,), (extent,)) or repeats.dtype.kind not in "iu" or (
            repeats < 0).any():
        raise ArgumentError(f"repeats {repeats.tolist()} of {extent} elements",
                            hint="one integer from 0 on for each")
    return np.repeat(np.arange(extent), repeats)


@public
def chunk(x: Any, chunks: int, axis: int = 0) -> list[Tensor]:
    """x cut along an axis into parts of ceil(n / chunks) elements, the last one of what is left.

    There may be fewer than `chunks` of them: torch.chunk. `ts.split` cuts into equal parts.
    """
    x = dequantized(x)
    a = axis_index(axis, x.ndim)
    n = x.shape[a]
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ArgumentError(f"chunk into chunks={chunks!r} parts")
    if not isinstance(n, int):
        return split(x, chunks, a)
    size = max(-(-n // chunks), 1)
    sizes = [min(size, n - at) for at in range(0, n, size)] or [0]
    return split(x, sizes, a)


@public
def hstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along axis 1, lines and scalars along axis 0: np.hstack."""
    xs = _at_least(tensors, 1, "hstack")
    return concatenate(xs, 0 if xs[0].ndim == 1 else 1)


@public
def vstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along axis 0, lines as rows: np.vstack."""
    return concatenate(_at_least(tensors, 2, "vstack"), 0)


def _at_least(tensors: Any, ndim: int, name: str) -> list[Tensor]:
    if not isinstance(tensors, tuple | list) or not tensors:
        raise ArgumentError(f"{name} needs a non-empty list of tensors", hint=f"ts.{name}([a, b])")
    xs = [dequantized(t) for t in tensors]
    return [reshape(x, (1,) * (ndim - x.ndim) + tuple(x.shape)) if x.ndim < ndim else x
            for x in xs]


@public
def meshgrid(*lines: Any, indexing: str = "xy") -> list[Tensor]:
    """A tensor for each line, with its values along an axis of its own and equal along the others.

    indexing: "xy" exchanges the first two axes, as np.meshgrid and jax.numpy.meshgrid do by
    default; "ij" is line i along axis i, the default of torch.meshgrid
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"indexing {indexing!r}", hint='"xy" or "ij"')
    xs = [dequantized(x) for x in lines]
    if any(x.ndim > 1 for x in xs):
        raise ShapeError("meshgrid takes lines, got "
                         + ", ".join(show_shape(x.shape) for x in xs))
    extents = [x.shape[0] if x.ndim else 1 for x in xs]
    order = list(range(len(xs)))
    if indexing == "xy" and len(xs) > 1:
        order[:2] = [1, 0]
    shape = [extents[i] for i in order]
    return [broadcast_to(reshape(x, [extents[i] if j == i else 1 for j in order]), shape)
            for i, x in enumerate(xs)]


@public
def diff(x: Any, n: int = 1, axis: int = -1) -> Tensor:
    """x[i + 1] - x[i] along an axis, n times; of bools, where neighbours differ: np.diff."""
    x = dequantized(x)
    a = axis_index(axis, x.ndim)
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ArgumentError(f"diff taken n={n!r} times")
    differ = F.not_equal if x.dtype.kind == "bool" else F.subtract
    for _ in range(n):
        before = (slice(None),) * a
        x = differ(x[(*before, slice(1, None))], x[(*before, slice(None, -1))])
    return x


@public
def kron(a: Any, b: Any) -> Tensor:
    """The Kronecker product: each element of a times the whole of b, as blocks: np.kron."""
    (x, y), numeric = promote(a, b)
    ndim = max(x.ndim, y.ndim)
    left = (1,) * (ndim - x.ndim) + tuple(x.shape)
    right = (1,) * (ndim - y.ndim) + tuple(y.shape)
    x = reshape(x, [d for n in left for d in (n, 1)])
    y = reshape(y, [d for n in right for d in (1, n)])
    return store(reshape(x * y, [n * m for n, m in zip(left, right, strict=True)]), numeric)
