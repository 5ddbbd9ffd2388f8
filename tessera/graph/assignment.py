"""x[index] and x[index] = value of a tensor on a GPU: the elements that are meant move, and no
others. Where they begin is data, so that a loop over places compiles one kernel."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from .. import hooks
from ..numerics import stored_bytes
from ..runtime.arrays import HOST
from ..runtime.buffer import DEFAULT, Borrowed, DeviceBuffer, copy_bytes
from ..runtime.device import restore
from ..tensor import PLAIN, Tensor, as_tensor, encode_value
from ..tile.launch.resident import Resident, on_gpu
from . import functions as F
from .eager_forms import Unread, noted
from .jit import jit
from .operand import named
from .ops.convert import to_nearest

Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def part_of(shape: tuple[int, ...], index: Any) -> Part | None:
    """Where a part of an array begins, how much of each axis it takes, and its own extents; None of
    an index that is no run along every axis, or outside."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        return None
    rest = len(shape) - len(items)
    at = dots[0] if dots else len(items)
    items[at:at + 1] = [slice(None)] * (rest + (at < len(items)))
    starts, sizes, own = [], [], []
    for i, n in zip(items, shape, strict=True):
        if isinstance(i, int | np.integer) and not isinstance(i, bool) and -n <= i < n:
            starts.append(int(i) % n)
            sizes.append(1)
        elif isinstance(i, slice) and i.step in (None, 1):
            begin, end, _ = i.indices(n)
            starts.append(begin)
            sizes.append(max(end - begin, 0))
            own.append(sizes[-1])
        else:
            return None
    return tuple(starts), tuple(sizes), tuple(own)


def assign(x: Resident, index: Any, value: Any) -> bool:
    """Write a part of x where it lies. Whether that was done: not for indices that are no runs,
    types that are packed or scaled, memory that others have, and values that do not fit."""
    key = _form(x, index, value)
    if key in _runs and _copied(x, value, _runs[key]):
        return True
    part = part_of(x.shape, index) if x.ndim and not x.dtype.packed and x.scale is None else None
    memory = x.memory
    own_memory = not isinstance(memory, Borrowed) and sys.getrefcount(memory) <= 3
    if part is None or not own_memory or isinstance(value, Tensor) and type(value) not in PLAIN:
        return False
    starts, sizes, own = part
    if not isinstance(value, Tensor) or value.place == HOST:
        value = Tensor(np.asarray(encode_value(value, x.type)), x.type)
    try:
        fits = np.broadcast_shapes(value.shape, own) == own
    except ValueError:
        fits = False
    if not fits or 0 in sizes:
        return fits
    place = x.place
    if value.shape == own and value.type == x.type and value.place == place and (
            at := _run_of(x.shape, starts, sizes)) is not None:
        _copy(memory, at_bytes := stored_bytes((at,), x.dtype), value)
        if key is not None:
            if len(_runs) >= MOST_RUNS:
                _runs.clear()
            _runs[key] = at_bytes
        return True
    del memory  # which the program is to find nobody else with
    held = Resident(x.shape, x.type, place, x.storage)
    x.storage = None  # so that the program may write there
    try:
        made = _assigned(held, on_gpu(value, place), on_gpu(as_tensor(np.array(starts)), place),
                         sizes=sizes, own=own)
        x.storage = made.storage
    finally:
        if x.storage is None:
            x.storage = held.storage
    return True


MOST_BYTES = 1 << 20  # of a part that is read so; the place of a larger one decides how it is read
MOST_PARTS = 1024
# By extents, type and index: where a part begins, and behind its sizes along all axes its extents.
_parts: dict[Any, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}
_starts: dict[tuple[tuple[int, ...], int], Resident] = {}  # by values and GPU


def read_part(x: Resident, index: tuple) -> Tensor | None:
    """A part of x as a tensor of its own; None of an index that is no run along every axis, or is
    outside, of the whole, and of parts that are large."""
    if x._scale is not None:
        return None
    try:
        key = x._shape, x.type.dtype, noted(index, [])
    except Unread:
        return None
    if key not in _parts:
        if len(_parts) >= MOST_PARTS:
            _parts.clear()
        _parts[key] = _read_alone(x, index)
    part = _parts[key]
    if part is None:
        return None
    starts, extents = part
    begin = _starts.get(place := (starts, x.place))
    if begin is None:
        if len(_starts) >= MOST_PARTS:
            _starts.clear()
        begin = _starts[place] = on_gpu(as_tensor(np.array(starts)), x.place)
    return _part(x, begin, extents)


def _read_alone(x: Resident, index: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    part = part_of(x._shape, index) if x._shape and not x.type.dtype.packed else None
    if part is None or part[1] == x._shape:
        return None
    starts, sizes, own = part
    return (starts, sizes + own) if 0 < stored_bytes(sizes, x.dtype) <= MOST_BYTES else None


@named("subscript")
def _part(x: Tensor, starts: Tensor, extents: tuple[int, ...]) -> Tensor:
    return F.reshape(F.dynamic_slice(x, starts, extents[:x.ndim]), extents[x.ndim:])


MOST_RUNS = 1024
_runs: dict[Any, int] = {}  # by the form of one that is one copy: the byte at which it begins


def _form(x: Resident, index: Any, value: Any) -> Any:
    """What decides about one of another tensor's elements; None where that is not seen at a
    glance."""
    if type(value) is not Resident or x._scale is not None or value.type is not x.type:
        return None
    try:
        return x._shape, value._shape, x.type.dtype, noted(index, [])
    except Unread:
        return None


def _copied(x: Resident, value: Resident, at: int) -> bool:
    """Whether it was one copy. Not where others have the memory, or on two GPUs."""
    memory = x.memory
    if isinstance(memory, Borrowed) or sys.getrefcount(memory) > 3 or \
            memory.device is not value.storage.device:
        return False
    _copy(memory, at, value)
    return True


def _copy(memory: DeviceBuffer, at: int, value: Tensor) -> None:
    source = value.storage
    before = memory.device.activate()
    try:
        copy_bytes(memory.pointer + at, source.pointer, source.nbytes, DEFAULT)
        source.give_back()
    finally:
        restore(before)


def _run_of(shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
    """The element at which a part begins whose elements lie one behind the other; None of others.
    """
    cut = next((k for k, n in enumerate(sizes) if n > 1), len(sizes))  # whole behind this axis
    if sizes[cut + 1:] != shape[cut + 1:]:
        return None
    return sum(i * prod(shape[k + 1:]) for k, i in enumerate(starts))


@jit(donate="x", static=("sizes", "own"), name="assign")
def _assigned(x: Tensor, value: Tensor, starts: Tensor, *, sizes: tuple[int, ...],
              own: tuple[int, ...]) -> Tensor:
    part = F.reshape(F.broadcast_to(to_nearest(value, x.type), own), sizes)
    return F.dynamic_update_slice(x, part, starts)


hooks.assign.fill(assign)
hooks.read_part.fill(read_part)

__all__ = ["assign", "part_of", "read_part"]
