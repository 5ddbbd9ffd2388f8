"""Parts of a tensor by subscript: their shape, a tensor with one replaced, and what they cover."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import AxisError, TraceError
from ...tensor import Tensor
from .. import functions as F
from ..trace import Tracer

Box = tuple[tuple[Any, Any], ...]  # per axis, (first element, number of elements)


def shape_of_part(shape: tuple, index: Any) -> tuple:
    """The shape of x[index], NumPy's rules. Raises AxisError, TraceError."""
    if all(isinstance(n, int) for n in shape):
        return _subscript(np.broadcast_to(np.zeros((), np.bool_), shape), index).shape
    box, items = _box(shape, index), _items(shape, index)
    return tuple(n for (_, n), item in zip(box, items, strict=True) if isinstance(item, slice))


def updated(x: Tensor, index: Any, update: Tensor) -> Tensor:
    """x with x[index] replaced by `update`, which has its shape and type."""
    if is_whole(tuple(x.shape), index):
        return F.reshape(update, tuple(x.shape))
    if _is_box(index):
        box = _box(tuple(x.shape), index)
        block = F.reshape(update, tuple(n for _, n in box))
        return F.dynamic_update_slice(x, block, [start for start, _ in box])
    size: Any = size_of(x.shape)
    flat = _subscript(np.arange(size).reshape(x.shape), index).reshape(-1)
    out = F.scatter(F.reshape(x, (size,)), flat,
                            F.reshape(update, (flat.size,)))
    return F.reshape(out, tuple(x.shape))


# --- which elements have been written ---------------------------------------------------------
def covered_with(covered: Any, index: Any, shape: tuple) -> Any:
    """What is covered (True: all, None: nothing, else a bool mask) once x[index] is too."""
    if covered is True or is_whole(shape, index):
        return True
    if not all(isinstance(n, int) for n in shape):
        return None  # parts along a symbolic extent are never known to be all of it
    mask = np.zeros(shape, np.bool_) if covered is None else covered.copy()
    mask[_array_index(index)] = True
    return True if mask.all() else mask


def is_covered(covered: Any, index: Any) -> bool:
    """Whether all of x[index] is covered."""
    if covered is None or covered is True:
        return bool(covered)
    return bool(np.all(_subscript(covered, index)))


# --- subscripts -------------------------------------------------------------------------------
def _subscript(array: np.ndarray, index: Any) -> np.ndarray:
    try:
        return array[_array_index(index)]
    except IndexError as err:
        raise AxisError(f"index into {show_shape(array.shape)}: {err}") from err


def _array_index(index: Any) -> Any:
    """The subscript with tensors as arrays. Raises TraceError for one that is traced."""
    if isinstance(index, tuple):
        return tuple(_array_index(i) for i in index)
    if isinstance(index, Tracer):
        raise TraceError(
            "the part of a region that is written must be known when the function is traced",
            hint="write the whole: Y[:] = ts.dynamic_update_slice(...) or ts.scatter(...)",
        )
    return index.array if isinstance(index, Tensor) else index


def _items(shape: tuple, index: Any) -> list:
    """One item per axis. Raises AxisError for too many, or for more than one ellipsis."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    used = len(items) - len(dots)
    if len(dots) > 1 or used > len(shape):
        raise AxisError(f"{used} indices for the {len(shape)} axes of {show_shape(shape)}")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (len(shape) - used), *items[at + 1:]]


def is_whole(shape: tuple, index: Any) -> bool:
    """Whether x[index] is all of x, in its order."""
    if not _is_box(index):
        return False
    return all(start == 0 and n == extent
               for (start, n), extent in zip(_box(shape, index), shape, strict=True))


def _is_box(index: Any) -> bool:
    """Whether x[index] is a block of neighbours: integers and slices with a step of 1."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is Ellipsis or (isinstance(item, slice) and item.step in (None, 1))
        or (isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool_))
        for item in items
    )


def _box(shape: tuple, index: Any) -> Box:
    return tuple(_axis_box(item, n) for item, n in zip(_items(shape, index), shape, strict=True))


def _axis_box(item: Any, extent: Any) -> tuple[Any, Any]:
    if item == slice(None):
        return 0, extent
    if not isinstance(extent, int):
        raise TraceError(f"a part along the symbolic extent {extent}",
                         hint="write all of that axis, or trace with known extents")
    if isinstance(item, slice):
        start, stop, _ = item.indices(extent)
        return start, max(stop - start, 0)
    if not -extent <= item < extent:
        raise AxisError(f"index {item} is outside an axis of extent {extent}")
    return int(item) % extent, 1
