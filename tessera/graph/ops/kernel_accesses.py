"""What a kernel's loads, stores and atomics are in ops of the graph, see kernel_meaning.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...numerics import as_type
from ...tensor import Tensor
from ...tile.interpreter.memory import MemoryBox
from ...tile.ir.types import Buffer, TileType
from ...tile.ops.indexed import find_places
from .. import functions as F
from .kernel_blocks import BlockedTile, is_recorded
from .kernel_memory import Own, held_in
from .kernel_places import as_dtype, as_numeric, elements, take_blocks, where_else

if TYPE_CHECKING:
    from ...tile.ir.ir import Op
    from .kernel_meaning import KernelRecorder

NOTHING = np.zeros((1, 1), np.float32)


def _load_tile(m: KernelRecorder, op: Op, place: MemoryBox) -> Tensor | BlockedTile:
    return m.load_box(place, op.attr.get("fill") or 0)


def _store_tile(m: KernelRecorder, op: Op, place: MemoryBox, value: Any) -> None:
    m.store_box(place, value if isinstance(value, BlockedTile) else m.recorded(value, None))


def _load_element(m: KernelRecorder, op: Op, place: MemoryBox, *index: Any) -> Tensor:
    held, at = m.element(place, index)
    address: Any = at[0] if len(at) == 1 else sum(
        np.clip(i, 0, max(n - 1, 0)) * step
        for i, n, step in zip(at, held.shape, held.strides, strict=True))
    places = m.over_grid(address)
    flat = take_blocks(F.flatten(elements(held.value)), 0, places, 1, 0)
    return F.reshape(flat, places.shape)


def _store_element(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, *index: Any) -> None:
    value = m.recorded(value, None)
    value = m.taken(value, lambda: as_dtype(_load_element(m, op, place, *index), value.dtype))
    held, at = m.element(place, index)
    address, on = m.active_elements(held, at, value)
    inside = (address >= 0) & (address < held.size)
    if address.size >= held.size and np.array_equal(on, inside) and np.array_equal(
            address.ravel(), np.arange(address.size)):
        full = F.flatten(F.broadcast_to(value, (*m.grid, on.shape[1])))
        held.value = F.reshape(as_numeric(full[:held.size], held.numeric), held.shape)
        return
    m.store(held, address, on, value)


def _added(m: KernelRecorder, op: Op) -> str:
    if op.attr["kind"] != "add":
        m.refuse(f"atomic_{op.attr['kind']} has no derivative of its own")
    return "add"


def _atomic(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, *index: Any) -> None:
    """A sum into memory; who reads what was there before is refused."""
    held, at = m.element(place, index)
    value = m.taken(m.recorded(value, None), lambda: NOTHING)
    address, on = m.active_elements(held, at, value)
    m.store(held, address, on, value, _added(m, op))


def _atomic_tile(m: KernelRecorder, op: Op, place: MemoryBox, value: Any) -> None:
    place = m.whole(place)
    address, inside = place.addresses(m.groups)
    on = inside & m.active_groups().reshape((-1,) + (1,) * (address.ndim - 1))
    value = m.taken(m.recorded(value, address.ndim - 1), lambda: NOTHING)
    m.store(held_in(place), address, on, value, _added(m, op))


def _scatter(m: KernelRecorder, op: Op, place: MemoryBox, value: Any, index: Any,
             *offsets: Any) -> None:
    """A tile into memory, each element where a tile of known places says."""
    if is_recorded(index) or m.when is not None:
        m.refuse("where it writes depends on elements")
    if m.whole(place) is not place:
        m.refuse(f"{op.name} into memory of the group has no derivative of its own")
    found = find_places(m, op, place, index, offsets)
    mode = "set" if op.name == "store_scatter" else _added(m, op)
    m.store(held_in(place), found.address, found.on,
            m.recorded(value, found.address.ndim - 1), mode)


def _allocate(m: KernelRecorder, op: Op) -> MemoryBox:
    (made,) = op.outs
    assert isinstance(made.type, Buffer)
    own = Own(made.value.name, made.type, m.grid, m.lanes)
    return MemoryBox.whole(own)


def _copy(m: KernelRecorder, op: Op, target: MemoryBox, source: MemoryBox) -> None:
    m.store_box(target, m.load_box(source, 0))


def _gather(m: KernelRecorder, op: Op, place: MemoryBox, index: Any, *offsets: Any) -> Tensor:
    """Slices of a tensor at positions that may follow from elements; the other axes lie alike for
    all groups."""
    attr, axis, n = op.attr, op.attr["axis"], len(m.grid)
    held, kind = held_in(m.whole(place)), op.outs[0].type
    assert isinstance(kind, TileType)
    starts = [m.blocks(o)[..., 0] for o in offsets]
    if not held.size:
        return F.cast(F.full((*(1,) * n, *kind.shape), attr["fill"]), as_type(kind.dtype))
    if held is not place.memory or any(s.size > 1 for s in starts):
        m.refuse("it gathers from a part that differs between groups")
    x = elements(held.value)
    for a, start in enumerate(starts):
        if a != axis:
            x = take_blocks(x, a, start.reshape(()), attr["box"][a], attr["fill"])
    number = m.recorded(index, None)
    ids = number + int(starts[axis].item())
    there = (ids >= 0) & (ids < held.shape[axis])
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
    "atomic_scatter": _scatter}

__all__ = ["ACCESSES"]
