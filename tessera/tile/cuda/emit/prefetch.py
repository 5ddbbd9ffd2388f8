"""prefetch_box, discard_box: the cache lines of a box, one instruction each, shared by the threads.
arrive: what was loaded is there."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import (
    ZERO,
    MemoryOperand,
    bytes_of,
    element_offset,
    is_wide,
    place_of,
    product,
)
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.tile_access import guards_of
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import blocked

LINE_BYTES = 128
LONG_ROW_BYTES = 512
FAR = 1 << 30  # an extent that no box reaches


@emits("prefetch_box")
def _prefetch(e: Emitter, op: Op) -> None:
    place = place_of(e, op.args[0])
    last = len(place.extents) - 1
    if place.dtype.packed or last not in place.axes:
        e.note(f"{place.name} is not prefetched: its elements have no lines of their own")
        return
    if _in_one_piece(e, place):
        return _prefetch_rows(e, place)
    if _of_long_rows(e, place):
        return _prefetch_long_rows(e, place)
    _each_line(e, place, "prefetch")


@emits("discard_box")
def _discard(e: Emitter, op: Op) -> None:
    """Of lines that lie whole in it."""
    place = place_of(e, op.args[0])
    last = len(place.extents) - 1
    if place.dtype.packed or last not in place.axes or (
            place.shape[place.axes.index(last)] * place.dtype.bits < LINE_BYTES * 8):
        e.note(f"{place.name} is not discarded: a box has no line of its own")
        return
    _each_line(e, place, "discard")


def _each_line(e: Emitter, place: MemoryOperand, way: str) -> None:
    """An instruction for each line of a box. way: to discard, those that lie whole in it"""
    last = len(place.extents) - 1
    axis, per_line = place.axes.index(last), LINE_BYTES * 8 // place.dtype.bits
    part = per_line - 1 if way == "prefetch" else 0
    lines = (place.shape[axis] + part) // per_line
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
    inside = f"i32(({place.extents[last]} - ({start}) + {part}) >> "
    inside += f"{per_line.bit_length() - 1})"  # lines that begin, or lie whole, inside of the row
    strides = [bytes_of(place.dtype, product(place.stride(place.axes[a])))
               for a in range(len(shape)) if a != axis and any(b[a] for b in layout.bases)]
    args = [f"{place.base} + {bytes_of(place.dtype, element_offset(e, place, parts))}", *strides,
            *bounds, inside, *([owner] if (owner := e.owner(layout)) else [])]
    text = (f"use(prefetch.box({layout.text!r}, {layout.shape}, {axis}, {guards}, "
            f"{owner is not None}, {way!r}))")
    there = _where_natural(e, place, tuple(range(last)))
    e.line(f"{there}{e.use(f'{way}_{place.name}', text)}({', '.join(args)})")


def _in_one_piece(e: Emitter, place: MemoryOperand) -> bool:
    """Whether it is whole rows one after another, of a number of 16 bytes, on a chip with copies of
    any length, which came with clusters."""
    last = len(place.extents) - 1
    return (e.generation.cluster_groups > 1 and place.axes == (last - 1, last)
            and place.space == "global" and place.name in e.facts.aligned
            and place.extents[last] == place.shape[-1] and place.offsets[last] == ZERO
            and place.shape[-1] * place.dtype.bits % 128 == 0
            and not is_wide(e, place.extents[last - 1])
            and all(map(e.known.natural, place.offsets[:-2])))


def _prefetch_rows(e: Emitter, place: MemoryOperand) -> None:
    """By one instruction of one thread, as many rows as there are."""
    first = e.name(place.offsets[-2])
    at = bytes_of(place.dtype, element_offset(e, place, [None] * len(place.extents)))
    ask = e.use("prefetch_rows", f"use(prefetch.rows({place.shape[0]}, "
                f"{place.shape[-1] * place.dtype.bits // 8}))")
    asks = e.once("first_thread", f"i32({e.thread} == 0)")
    e.line(f"{ask}({place.base} + {at}, i32({first}), i32({place.extents[-2]} - {first}), {asks})")


def _of_long_rows(e: Emitter, place: MemoryOperand) -> bool:
    """Whether it is few rows, each worth an instruction of its own."""
    last = len(place.extents) - 1
    return (e.generation.cluster_groups > 1 and place.space == "global"
            and place.axes in ((last,), (last - 1, last)) and not place.dtype.packed
            and place.shape[-1] * place.dtype.bits // 8 >= LONG_ROW_BYTES
            and prod(place.shape[:-1]) <= e.lanes and not is_wide(e, place.extents[last])
            and (last == 0 or not is_wide(e, place.extents[last - 1])))


def _prefetch_long_rows(e: Emitter, place: MemoryOperand) -> None:
    """Each by one instruction of one thread."""
    last, n = len(place.extents) - 1, prod(place.shape[:-1])
    at = bytes_of(place.dtype, element_offset(e, place, [None] * (last + 1)))
    first, left, apart = "i32(0)", f"i32({n})", "i64(0)"
    if len(place.axes) == 2:
        first = f"i32({e.name(place.offsets[last - 1])})"
        left = f"i32({place.extents[last - 1]} - {e.name(place.offsets[last - 1])})"
        apart = bytes_of(place.dtype, product(place.stride(last - 1)))
    most = f"i32({place.extents[last]} - {e.name(place.offsets[last])})"
    ask = e.use(f"prefetch_{place.name}", f"use(prefetch.long_rows({n}, {place.shape[-1]}, "
                f"{place.dtype.bits // 8}))")
    e.line(f"{_where_natural(e, place, (last - 1,))}{ask}({place.base} + {at}, {apart}, {first}, "
           f"{left}, {most}, {e.thread})")


def _where_natural(e: Emitter, place: MemoryOperand, clipped: tuple[int, ...]) -> str:
    """A condition in front of a line: that no offset is negative, but along axes of the box where
    that is seen to."""
    unsure = [e.name(x) for a, x in enumerate(place.offsets)
              if (a not in clipped or a not in place.axes) and not e.known.natural(x)]
    return f"if ({' | '.join(unsure)}) >= 0: " if unsure else ""  # no sign of any


@emits("arrive")
def _arrive(e: Emitter, op: Op) -> None:
    layout, dtype = e.layout(op.args[0]), e.dtype(op.args[0])
    make = e.use("arrive", f"use(prefetch.arrive({layout.text!r}, {layout.shape}, "
                 f"{dtype.name!r}))")
    e.line(f"{make}({e.name(op.args[0])}, {e.scratch(4)})")
