"""prefetch_box: the cache lines of a box, one instruction each, shared by the threads. arrive: what
was loaded is there."""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import ZERO, bytes_of, element_offset, place_of, product
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.tile_access import guards_of
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import blocked

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
    text = (f"use(prefetch.box({layout.text!r}, {layout.shape}, {axis}, {guards}, "
            f"{owner is not None}))")
    e.line(f"{e.use(f'prefetch_{place.name}', text)}({', '.join(args)})")


@emits("arrive")
def _arrive(e: Emitter, op: Op) -> None:
    layout, dtype = e.layout(op.args[0]), e.dtype(op.args[0])
    make = e.use("arrive", f"use(prefetch.arrive({layout.text!r}, {layout.shape}, "
                 f"{dtype.name!r}))")
    e.line(f"{make}({e.name(op.args[0])}, {e.scratch(4)})")
