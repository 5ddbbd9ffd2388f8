"""x with a part replaced or added to, where the part is written as an index: x[index] = values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dims import show_shape, size_of
from ...errors import ArgumentError, DTypeError, ShapeError, TraceError
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import dequantized, holds_integers, literal, public, store, to_compute
from ..trace import apply
from .index import MaskIndex, expand_ellipsis, expand_masks, getitem, is_mask, needs_values
from .scatter import as_type_of, need_mode, put_at, scatter
from .shape import PAD


@public
def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False, *,
              mode: str = "set") -> Tensor:
    """x with x[indices] replaced by values, or values added there: torch.index_put, and the
    x.at[indices].set(values), .add, .max and .min of JAX.

    indices: what may index x: integers, slices, None, `...`, integer and bool tensors; a tuple has
    one for each axis. A traced bool mask, too, with values that have no axis of its elements.
    values: broadcast to x[indices]   accumulate: mode "add"
    mode "set": of repeated places the last stays   "add": all add up   "max", "min": the largest or
    smallest of them and x
    Returns a new tensor of x's type. Raises ShapeError, DTypeError, TraceError, and AxisError when
    it runs.
    """
    if accumulate:
        if mode not in ("set", "add"):
            raise ArgumentError(f"accumulate=True with mode={mode!r}", hint="one of them")
        mode = "add"
    need_mode(mode)
    x = dequantized(x)
    if not isinstance(indices, list) or all(isinstance(i, int) for i in indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
    items = [np.asarray(i) if isinstance(i, list) and i else i for i in indices]
    if len(items) == 1 and is_mask(items[0]) and (
            needs_values(items[0]) or _axes(values) <= x.ndim - items[0].ndim):
        return _put_where(x, as_tensor(items[0]), values, mode)
    items = expand_masks(items)
    if all(_is_ids(i) for i in items) and not all(map(_is_place, items)):
        return put_at(x, tuple(items), values, mode)
    items = expand_ellipsis(items, x)
    return _put_part(x, items, values, mode)


def _axes(values: Any) -> int:
    return values.ndim if isinstance(values, Tensor) else np.ndim(values)


def _is_ids(item: Any) -> bool:
    """Integers of an axis, as scatter takes them."""
    return not (item is None or item is Ellipsis or isinstance(item, slice | MaskIndex))


def _is_place(item: Any) -> bool:
    """One index of an axis, which may depend on data."""
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return True
    return isinstance(item, Tensor) and item.ndim == 0 and holds_integers(item)


def _put_where(x: Tensor, mask: Tensor, values: Any, mode: str) -> Tensor:
    """x with values where a mask of its first axes holds."""
    rest = x.ndim - mask.ndim
    if not mask.ndim or tuple(mask.shape) != tuple(x.shape[:mask.ndim]):
        raise ShapeError(f"a mask of {show_shape(mask.shape)} for {show_shape(x.shape)}",
                         hint="masks have the extents of their axes")
    v = as_type_of(values, x.type if mode == "set" else to_compute(x).type)
    if v.ndim > rest:
        raise TraceError(f"values {show_shape(v.shape)} for elements that a traced bool mask "
                         "selects: their number is not known",
                         hint="one value for all of them; or ts.where(mask, values, x), with "
                         "values of x's extents")
    mask = F.reshape(mask, (*mask.shape, *[1] * rest))
    return F.where(mask, _merged(x, v, mode), x)


def _merged(x: Tensor, v: Tensor, mode: str) -> Tensor:
    """Of x and values beside it; of x's type."""
    if mode == "set":
        return v
    if x.dtype.kind == "bool":
        raise DTypeError(f"index_put of bools by {mode}", hint="cast to an integer type first")
    merge = {"add": F.add, "max": F.maximum, "min": F.minimum}[mode]
    return store(merge(to_compute(x), v), x.type)


def _put_part(x: Tensor, items: list, values: Any, mode: str) -> Tensor:
    """A block of x where the index is runs and single places, else elements one by one."""
    taken = [i for i in items if i is not None]
    others = [a for a, i in enumerate(taken) if not _is_full(i)]
    if len(others) == 1 and len(taken) == len(items) and not isinstance(
            taken[others[0]], slice) and not _is_place(taken[others[0]]):
        return scatter(x, taken[others[0]], values, others[0], mode)
    if len(taken) <= x.ndim and all(_is_place(i) or _is_run(i) for i in taken):
        return _put_block(x, items, values, mode)
    if len(taken) <= x.ndim and not any(isinstance(i, Tensor) for i in taken) and all(
            _is_place(i) or isinstance(i, slice) for i in taken):
        return _put_strided(x, items, values, mode)
    place = getitem(F.reshape(F.arange(size_of(x.shape)), x.shape), tuple(items))
    out = scatter(F.reshape(x, (-1,)), place, values, 0, mode)
    return F.reshape(out, x.shape)


def _is_full(item: Any) -> bool:
    return isinstance(item, slice) and item.start is None and item.stop is None and _is_run(item)


def _is_run(item: Any) -> bool:
    return isinstance(item, slice) and (item.step is None or item.step == 1)


def _new_part(x: Tensor, items: list, values: Any, mode: str) -> Tensor:
    """What stands at x[items] afterwards."""
    old = getitem(x, tuple(items))
    v = as_type_of(values, x.type if mode == "set" else to_compute(old).type)
    return _merged(old, F.broadcast_to(v, old.shape), mode)


def _put_strided(x: Tensor, items: list, values: Any, mode: str) -> Tensor:
    """Slices with steps: the part spread over x's extents, where an element is one of it."""
    new, taken = _new_part(x, items, values, mode), [i for i in items if i is not None]
    rows = [range(n)[i] if isinstance(i, slice) else range(int(i) % n, int(i) % n + 1)
            for i, n in zip([*taken, *[slice(None)] * (x.ndim - len(taken))], x.shape, strict=True)]
    if not all(rows):
        return x
    new = F.reshape(new, [len(r) for r in rows])
    if back := tuple(a for a, r in enumerate(rows) if r.step < 0):
        new = F.flip(new, back)
    rows = [r if r.step > 0 else r[::-1] for r in rows]
    spread = apply(PAD, new, literal(0, new), before=tuple(r[0] for r in rows),
                   after=tuple(n - 1 - r[-1] for r, n in zip(rows, x.shape, strict=True)),
                   holes=tuple(r.step - 1 if len(r) > 1 else 0 for r in rows))
    part: Any = True
    for axis, (r, n) in enumerate(zip(rows, x.shape, strict=True)):
        if len(r) < n:
            there = np.isin(np.arange(n), r).reshape([n if a == axis else 1 for a in range(x.ndim)])
            part = F.logical_and(part, as_tensor(there))
    return F.where(part, spread, x)


def _put_block(x: Tensor, items: list, values: Any, mode: str) -> Tensor:
    new = _new_part(x, items, values, mode)
    if not x.ndim:  # its one element, of no axis
        return F.reshape(new, ())
    starts: list[Any] = []
    sizes: list[int] = []
    taken = [i for i in items if i is not None]
    for item, n in zip([*taken, *[slice(None)] * (x.ndim - len(taken))], x.shape, strict=True):
        if isinstance(item, slice):
            start, stop, _ = item.indices(n)
            sizes.append(max(stop - start, 0))
            starts.append(start if sizes[-1] else 0)
        else:
            starts.append(F.where(item < 0, item + n, item) if isinstance(item, Tensor)
                          else int(item) % n)
            sizes.append(1)
    if 0 in sizes:
        return x
    at = (F.stack([F.cast(s, "int64") for s in starts])
          if any(isinstance(s, Tensor) for s in starts) else np.array(starts))
    return F.dynamic_update_slice(x, F.reshape(new, sizes), at)


__all__ = ["index_put"]
