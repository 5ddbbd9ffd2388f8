"""What a kernel's loads, stores and atomics are in ops of the graph, see kernel_meaning.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...numerics import as_type
from ...tensor import Tensor, as_tensor
from ...tile.interpreter.memory import MemoryBox
from ...tile.ir.types import Buffer, TileType
from ...tile.ops.indexed import find_places, positions_along, shape_of
from ...tile.ops.vector import vector_addresses
from .. import functions as F
from .kernel_blocks import BlockedTile, is_recorded
from .kernel_loop_accesses import NotSideBySide
from .kernel_masks import known_tensor
from .kernel_memory import GroupMemory, TensorMemory, held_in
from .kernel_places import as_dtype, as_numeric, elements, take_blocks, where_else

if TYPE_CHECKING:
    from ...tile.ir.ir import Op
    from .kernel_meaning import KernelRecorder

NOTHING = np.zeros((1, 1), np.float32)


def _load_tile(m: KernelRecorder, op: Op, place: MemoryBox) -> Tensor | BlockedTile:
    return m.read_here(m.load_box(place, op.attr.get("fill") or 0))


def _store_tile(m: KernelRecorder, op: Op, place: MemoryBox, value: Any) -> None:
    m.store_box(place, value if isinstance(value, BlockedTile) else m.recorded(value, None))


def _load_element(m: KernelRecorder, op: Op, place: MemoryBox, *index: Any) -> Tensor:
    return m.read_here(_element(m, place, index))


def _element(m: KernelRecorder, place: MemoryBox, index: tuple[Any, ...]) -> Tensor:
    """An element for each lane, as it is now."""
    if any(map(is_recorded, index)):
        held, there = _recorded_address(m, place, index)
        if not held.size:
            m.refuse("it reads an element of an empty tensor by a number that depends on elements")
        return F.take(F.flatten(elements(held.value)), there)
    held, at = m.element(place, index)
    address: Any = at[0] if len(at) == 1 else sum(
        np.clip(i, 0, max(n - 1, 0)) * step
        for i, n, step in zip(at, held.shape, held.strides, strict=True))
    places = m.over_grid(address)
    flat = take_blocks(F.flatten(elements(held.value)), 0, places, 1, 0)
    return F.reshape(flat, places.shape)


def _recorded_address(m: KernelRecorder, place: MemoryBox, index: Sequence[Any]
                      ) -> tuple[TensorMemory, Tensor]:
    """The tensor and where an element of each lane lies in it, [*grid, 1|lanes], by numbers of
    which some depend on elements; those of lanes that take no part are anywhere in it."""
    known = tuple(0 if is_recorded(i) else i for i in index)
    held, at = m.element(place, known)
    total: Any = 0
    for axis, (i, n, step) in enumerate(zip(at, held.shape, held.strides, strict=True)):
        k = axis - (len(at) - len(index))
        number = m.recorded(index[k], None) if k >= 0 and is_recorded(index[k]) else as_tensor(
            m.over_grid(i))
        total = total + F.clip(F.cast(number, as_type("int64")), 0, max(n - 1, 0)) * step
    return held, total


def _store_element(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, *index: Any) -> None:
    value = m.recorded(value, None)
    if any(map(is_recorded, index)):
        _store_recorded(m, place, value, index)
        return
    value = m.taken(value, lambda: as_dtype(_element(m, place, index), value.dtype))
    held, at = m.element(place, index)
    address, on = m.active_elements(held, at, value)
    inside = (address >= 0) & (address < held.size)
    if address.size >= held.size and np.array_equal(on, inside) and np.array_equal(
            address.ravel(), np.arange(address.size)):
        full = F.flatten(F.broadcast_to(value, (*m.grid, on.shape[1])))
        held.value = F.reshape(as_numeric(full[:held.size], held.numeric), held.shape)
        return
    m.store(held, address, on, value)


def _store_recorded(m: KernelRecorder, place: MemoryBox, value: Tensor, index: Sequence[Any]
                    ) -> None:
    """An element of each lane where numbers say that depend on elements."""
    if m.guards:
        raise NotSideBySide  # the last iteration's would have to stay
    held, places = _recorded_address(m, place, index)
    on = m.active((m.count, max(value.shape[-1], places.shape[-1], m.lanes if m.apart else 1)))
    full, n = (*m.grid, on.shape[1]), held.size
    if not on.all():
        places = F.where(known_tensor(m.over_grid(on)), places, n)  # behind the end
    if m.when is not None:
        places = F.where(m.when, places, n)
    flat = F.concatenate([F.flatten(held.value), F.zeros((1,), held.value.type)])
    value = F.flatten(F.broadcast_to(as_numeric(value, held.numeric), full))
    put = F.scatter(flat, F.flatten(F.broadcast_to(places, full)), value)
    held.value = F.reshape(put[:n], held.shape)


def _mode(m: KernelRecorder, op: Op) -> str:
    """How an atomic puts what meets together."""
    kind = op.attr.get("kind", "add")
    if kind not in ("add", "max", "min"):
        m.refuse(f"atomic_{kind} has no derivative of its own")
    return kind


def _neutral(mode: str, value: Tensor) -> np.ndarray:
    """What changes nothing where it meets others."""
    if mode == "add":
        return NOTHING
    if value.dtype.kind == "float":
        return np.full((1, 1), -np.inf if mode == "max" else np.inf, np.float32)
    ends = np.iinfo(value.dtype.numpy)
    return np.full((1, 1), ends.min if mode == "max" else ends.max)


def _atomic(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, *index: Any) -> None:
    """A sum, or an extremum, in memory; who reads what was there before is refused."""
    mode, value = _mode(m, op), m.recorded(value, None)
    if any(map(is_recorded, index)):
        held, places = _recorded_address(m, place, index)
        lanes = max(value.shape[-1], places.shape[-1], m.lanes if m.apart else 1)
        on = m.active((m.count, lanes))
        value = m.taken(value, lambda: _neutral(mode, value))
        if not on.all():
            value = m.choose(on, value, _neutral(mode, value))
        full = (*m.grid, on.shape[1])
        ids = F.flatten(F.broadcast_to(places, full))
        value = as_numeric(F.flatten(F.broadcast_to(value, full)), held.numeric)
        put = F.scatter(F.flatten(held.value), ids, value, mode=mode)
        held.value = F.reshape(put, held.shape)
        return
    held, at = m.element(place, index)
    value = m.taken(value, lambda: _neutral(mode, value))
    address, on = m.active_elements(held, at, value)
    m.store(held, address, on, value, mode)


def _atomic_tile(m: KernelRecorder, op: Op, place: MemoryBox, value: Any) -> None:
    place = m.whole(place)
    address, inside = place.addresses(m.groups)
    on = inside & m.active_groups().reshape((-1,) + (1,) * (address.ndim - 1))
    mode, value = _mode(m, op), m.recorded(value, address.ndim - 1)
    value = m.taken(value, lambda: _neutral(mode, value))
    m.store(held_in(place), address, on, value, mode)


def _scatter(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, index: Any,
             *offsets: Any) -> None:
    """A tile into memory, each element where a tile of places says."""
    if m.whole(place) is not place:
        m.refuse(f"{op.name} into memory of the group has no derivative of its own",
                 "scatter into a tensor")
    if is_recorded(index) or m.when is not None:
        _scatter_recorded(m, op, place, value, m.recorded(index, None), offsets)
        return
    found = find_places(m, op, place, index, offsets)
    mode = "set" if op.name == "store_scatter" else _mode(m, op)
    m.store(held_in(place), found.address, found.on,
            m.recorded(value, found.address.ndim - 1), mode)


def _recorded_places(m: KernelRecorder, op: Op, place: MemoryBox, number: Tensor,
                     offsets: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """[*grid, *tile] addresses of what positions choose that follow from elements, and which of it
    is there."""
    attr, axis, n, held = op.attr, op.attr["axis"], len(m.grid), held_in(place)
    size, count = positions_along(held.shape, attr), number.ndim - n
    zeros = np.zeros((1, *number.shape[n:]), np.int64)
    found = find_places(m, op, place, zeros, [np.zeros((1, 1), np.int64) if a == axis else x
                                              for a, x in enumerate(offsets)])
    start = m.blocks(offsets[axis])[..., 0]
    number = F.cast(number, as_type("int64"))
    position = number + as_tensor(start.reshape(*start.shape, *(1,) * count))
    there = (position >= 0) & (position < size)
    if attr["limit"]:
        there = there & (number >= 0) & (number < attr["limit"])
    first = shape_of(number.shape[n:], attr)[1]
    wide = (*number.shape[:n], *(1,) * first, *number.shape[n:],
            *(1,) * (found.address.ndim - 1 - first - count))
    full = (*m.grid, *found.address.shape[1:])
    step = F.reshape(F.clip(position, 0, max(size - 1, 0)) * held.strides[axis], wide)
    address = F.broadcast_to(as_tensor(m.over_grid(found.address)) + step, full)
    return address, F.broadcast_to(F.reshape(there, wide) & known_tensor(m.over_grid(found.on)),
                                   full)


def _scatter_recorded(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, number: Tensor,
                      offsets: Sequence[Any]) -> None:
    """As _scatter, by places that follow from elements."""
    n, held = len(m.grid), held_in(place)
    mode = "set" if op.name == "store_scatter" else _mode(m, op)
    if m.guards and mode == "set":
        raise NotSideBySide  # the last iteration's would have to stay
    address, on = _recorded_places(m, op, place, number, offsets)
    if not held.size:
        return
    full = address.shape
    if m.when is not None:
        on = on & F.reshape(m.when, (*m.when.shape[:n], *(1,) * (len(full) - n)))
    value = F.broadcast_to(as_numeric(m.recorded(value, len(full) - n), held.numeric), full)
    flat = F.flatten(held.value)
    if mode == "add":
        value = F.where(on, value, F.cast(as_tensor(np.float32(0)), value.type))
    else:  # what is not there goes behind the end
        address = F.where(on, address, held.size)
        flat = F.concatenate([flat, F.zeros((1,), flat.type)])
    put = F.scatter(flat, F.flatten(address), F.flatten(value), mode=mode)
    held.value = F.reshape(put if mode == "add" else put[:held.size], held.shape)


def _allocate(m: KernelRecorder, op: Op) -> MemoryBox:
    (made,) = op.outs
    assert isinstance(made.type, Buffer)
    own = GroupMemory(made.value.name, made.type, m.grid, m.lanes)
    return MemoryBox.whole(own)


def _copy(m: KernelRecorder, op: Op, target: MemoryBox, source: MemoryBox) -> None:
    m.store_box(target, m.load_box(source, 0))


def _copy_if(m: KernelRecorder, op: Op, target: MemoryBox, source: MemoryBox, wanted: Any
             ) -> None:
    """A copy, of zeros where it is not wanted."""
    x = m.load_box(source, 0)
    none = np.zeros((1,) * (1 + len(source.kept)), np.float32)
    m.store_box(target, m.choose(wanted, x, none))


def _load_pair(m: KernelRecorder, op: Op, row: MemoryBox, *index: Any) -> tuple[Tensor, Tensor]:
    *front, at = index
    return _load_element(m, op, row, *front, at), _load_element(m, op, row, *front, at + 1)


def _store_pair(m: KernelRecorder, op: Op, row: MemoryBox, first: Any, second: Any, *index: Any
                ) -> None:
    *front, at = index
    for n, value in enumerate((first, second)):
        _store_element(m, op, row, value, *front, at + n)


def _load_vector(m: KernelRecorder, op: Op, row: MemoryBox, *index: Any) -> Tensor:
    """[*grid, lanes, width] elements side by side; 0 past the end of the row."""
    held, address, on = _vectors(m, op, row, index, op.attr["width"])
    places = m.over_grid(address)
    flat = take_blocks(F.flatten(elements(held.value)), 0, places, 1, 0)
    return where_else(m.over_grid(on), F.reshape(flat, places.shape), 0)


def _store_vector(m: KernelRecorder, op: Op, row: MemoryBox, vector: Any, *index: Any) -> None:
    value = m.recorded(vector, None)
    held, address, on = _vectors(m, op, row, index, value.shape[-1])
    if m.when is not None:
        m.refuse("a vector is written in a branch that depends on elements",
                 "store its elements one by one")
    m.store(held, address, on, value)


def _vectors(m: KernelRecorder, op: Op, row: MemoryBox, index: Sequence[Any], width: int
             ) -> tuple[TensorMemory, np.ndarray, np.ndarray]:
    """The tensor, and [G, lanes, width] addresses and who has an element there."""
    for i in index:
        m.blocks(i)
    if isinstance(row.memory, GroupMemory):
        m.refuse(f"{op.name} of memory of the group has no derivative of its own")
    return (held_in(row), *vector_addresses(m, op, row, index, width))


def load_recorded(m: KernelRecorder, place: MemoryBox, fill: Any) -> Tensor:
    """A box of each group, at numbers of which some depend on elements."""
    n, held = len(m.grid), held_in(m.whole(place))
    if held is not place.memory:
        m.refuse("a place in memory of the group depends on elements")
    shown = tuple(place.box[a] for a in place.kept)
    unknown = [a for a, o in enumerate(place.offsets) if is_recorded(o)]
    starts = [None if a in unknown else m.blocks(o)[..., 0] for a, o in enumerate(place.offsets)]
    if len(unknown) > 1 or not held.size or any(
            s is not None and s.size > 1 for s in starts):
        return _load_each(m, held, place, fill, shown)
    (axis,) = unknown
    x = elements(held.value)
    for a, start in enumerate(starts):
        if start is not None:
            x = take_blocks(x, a, start.reshape(()), place.box[a], fill)
    ids = _places_along(place, axis)
    there = (ids >= 0) & (ids < held.shape[axis])
    y = F.take(x, F.where(there, ids, 0), axis)
    y = where_else(F.reshape(there, (*there.shape, *(1,) * (y.ndim - axis - there.ndim))), y, fill)
    y = F.moveaxis(y, tuple(range(axis, axis + n)), tuple(range(n)))
    y = F.reshape(y, (*y.shape[:n], *shown))
    return y if place.kept == tuple(sorted(place.kept)) else F.transpose(
        y, (*range(n), *(n + i for i in range(len(shown) - 1, -1, -1))))


def _places_along(place: MemoryBox, axis: int) -> Tensor:
    """[*grid, box] places of a box along an axis whose start depends on elements."""
    start = F.cast(place.offsets[axis], as_type("int64"))
    return start[..., :1] + as_tensor(np.arange(place.box[axis]))


def _load_each(m: KernelRecorder, held: TensorMemory, place: MemoryBox, fill: Any,
               shown: tuple[int, ...]) -> Tensor:
    """As load_recorded, each element by its address."""
    n, rank = len(m.grid), len(place.kept)
    address: Any = 0
    inside: Any = True
    for axis, (offset, size, step) in enumerate(
            zip(place.offsets, held.shape, held.strides, strict=True)):
        ids = _places_along(place, axis) if is_recorded(offset) else as_tensor(
            m.blocks(offset)[..., :1] + np.arange(place.box[axis]))
        shape = [1] * rank
        if axis in place.kept:
            shape[place.kept.index(axis)] = place.box[axis]
        ids = F.reshape(ids, (*ids.shape[:n], *shape))
        inside = ((ids >= 0) & (ids < size)) & inside
        address = F.clip(ids, 0, max(size - 1, 0)) * step + address
    if not held.size:
        return F.cast(F.full((*(1,) * n, *shown), fill), held.value.type)
    return where_else(inside, F.take(F.flatten(elements(held.value)), address), fill)


def _gather(m: KernelRecorder, op: Op, place: MemoryBox, index: Any, *offsets: Any) -> Tensor:
    """Slices of a tensor at positions that may follow from elements; single elements where the
    other axes do not lie alike for all groups."""
    attr, axis, n = op.attr, op.attr["axis"], len(m.grid)
    held, kind = held_in(m.whole(place)), op.outs[0].type
    assert isinstance(kind, TileType)
    starts = [m.blocks(o)[..., 0] for o in offsets]
    if not held.size:
        return F.cast(F.full((*(1,) * n, *kind.shape), attr["fill"]), as_type(kind.dtype))
    if held is not place.memory:
        m.refuse("it gathers from memory of the group")
    if any(s.size > 1 for s in starts):
        address, on = _recorded_places(m, op, place, m.recorded(index, None), offsets)
        return where_else(on, F.take(F.flatten(elements(held.value)), F.where(on, address, 0), 0),
                          attr["fill"])
    x, merged = elements(held.value), attr.get("merged", 1)
    for a, start in enumerate(starts):
        if not axis - merged < a <= axis:
            x = take_blocks(x, a, start.reshape(()), attr["box"][a], attr["fill"])
    size = positions_along(held.shape, attr)
    if merged > 1:
        x = F.reshape(x, (*x.shape[:axis + 1 - merged], size, *x.shape[axis + 1:]))
        axis += 1 - merged
    number = m.recorded(index, None)
    ids = number + int(starts[attr["axis"]].item())
    there = (ids >= 0) & (ids < size)
    if attr["limit"]:
        there = there & (number >= 0) & (number < attr["limit"])
    y = F.take(x, F.where(there, ids, 0), axis)
    after = y.ndim - axis - there.ndim
    mask = F.reshape(there, (*there.shape, *(1,) * after))
    y = where_else(mask, y, attr["fill"])
    y = F.moveaxis(y, tuple(range(axis, axis + n)), tuple(range(n)))
    return F.reshape(y, (*y.shape[:n], *kind.shape))


ACCESSES: dict[str, Callable] = {
    "allocate": _allocate, "load_tile": _load_tile, "store_tile": _store_tile,
    "load_element": _load_element, "store_element": _store_element, "cp_async": _copy,
    "gather": _gather, "atomic": _atomic, "atomic_tile": _atomic_tile, "store_scatter": _scatter,
    "atomic_scatter": _scatter, "atomic_gather": _scatter, "cp_async_if": _copy_if,
    "load_pair": _load_pair, "store_pair": _store_pair, "load_vector": _load_vector,
    "store_vector": _store_vector}

__all__ = ["ACCESSES", "load_recorded"]
