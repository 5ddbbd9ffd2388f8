"""prefetch_box: the cache lines of a box, one instruction each, shared by the threads."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.parts import _Access
from tessera.tile.cuda.emit.places import ZERO, bytes_of, element_offset, place_of, product
from tessera.tile.cuda.emit.simt import operation
from tessera.tile.cuda.emit.table import emits
from tessera.tile.cuda.emit.tiles import guards_of
from tessera.tile.cuda.instruction import Operand, Operation, find_instruction
from tessera.tile.ir import Op
from tessera.tile.layouts import Layout, blocked

LINE_BYTES = 128
FAR = 1 << 30  # an extent that no box reaches


@emits("prefetch_box")
def _prefetch(e: Emitter, op: Op) -> None:
    place = place_of(e, op.args[0])
    last = len(place.extents) - 1
    if place.dtype.packed or last not in place.axes or not all(
            e.known.natural(x) for x in place.offsets):
        e.note(f"{place.name} is not prefetched: its rows are not surely there")
        return
    axis, per_line = place.axes.index(last), LINE_BYTES * 8 // place.dtype.bits
    lines = -(-place.shape[axis] // per_line)
    shape = tuple(lines if a == axis else n for a, n in enumerate(place.shape))
    layout = blocked(shape, 1 << (e.lanes.bit_length() - 1))
    rows = replace(place, shape=shape, extents=(*place.extents[:last], FAR),
                   offsets=(*place.offsets[:last], ZERO))
    guards, bounds = guards_of(e, rows, layout)
    column, parts = e.index(layout, axis), [None] * (last + 1)
    for a, memory in enumerate(place.axes):
        parts[memory] = e.index(layout, a)  # type: ignore[call-overload]
    parts[last] = f"{column} * {per_line}"  # type: ignore[call-overload]
    start = f"{e.name(place.offsets[last])} + {parts[last]}"
    inside = f"i32(({place.extents[last]} - ({start}) + {per_line - 1}) >> "
    inside += f"{per_line.bit_length() - 1})"  # lines that begin inside of the row
    strides = [bytes_of(place.dtype, product(place.stride(place.axes[a])))
               for a in range(len(shape)) if a != axis and any(b[a] for b in layout.bases)]
    args = [f"{place.base} + {bytes_of(place.dtype, element_offset(e, place, parts))}", *strides,
            *bounds, inside, *([owner] if (owner := e.owner(layout)) else [])]
    text = (f"use(prefetches.box({layout.text!r}, {layout.shape}, {axis}, {guards}, "
            f"{owner is not None}))")
    e.line(f"{e.use(f'prefetch_{place.name}', text)}({', '.join(args)})")


@functools.cache
def box(layout: str, shape: tuple[int, ...], axis: int, guards: tuple[str, ...],
        owner: bool) -> Operation:
    """(address, strides..., bounds..., lines left of the thread's first [, owner])"""
    how = _Access(Layout.parse(layout, shape), axis, 1, guards)
    args = (*how.arguments("i64"), Operand("lines", "i32"),
            *([Operand("owner", "i32")] if owner else []))
    record = find_instruction("prefetch_L2")

    def body(b: Any, *values: Any) -> None:
        mine = b.true(values[-1]) if owner else None
        *where, left = values[:-1] if owner else values
        found = how.run(b, where, "i64", LINE_BYTES, mine)
        for (at, condition, _), (base, _) in zip(found, how.groups, strict=True):
            there = b.compare("<", b.i32(base[axis]), left)
            with b.when(there if condition is None else b.and_(condition, there)):
                b.call(record, at)

    return operation("prefetch_box", args, (), body)
