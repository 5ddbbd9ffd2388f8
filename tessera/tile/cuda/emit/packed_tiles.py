"""Tiles of 4- and 6-bit elements in global memory, rows padded as tessera.numerics.pack does.

A thread that holds whole groups of neighbours (2 codes of 4 bits in a byte, 4 of 6 bits in three)
moves them in accesses of up to 16 bytes. Where a tile begins or ends inside of a group, elements go
one by one: a store then clears and sets bits of a word with atomics, since the other bits may
belong to other threads.
"""

from __future__ import annotations

import functools

from tessera.numerics import DType
from tessera.tile.cuda.emit.elementwise import number
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout
from tessera.tile.cuda.emit.memory_operands import MemoryOperand, element_offset, product
from tessera.tile.cuda.emit.random import rounding_key
from tessera.tile.cuda.emit.tile_access import guards_of, parts_of, rounding_of
from tessera.tile.ir.ir import Const
from tessera.tile.ir.register_layout import RegisterLayout, bits_of, blocked
from tessera.tile.passes.integer_facts import divisor_of

MOST = 16  # elements of one access


def group_of(dtype: DType) -> int:
    """Elements that fill whole bytes."""
    return 2 if dtype.bits == 4 else 4


# --- emission ---------------------------------------------------------------------------------
def load_packed(e: Emitter, place: MemoryOperand, layout: RegisterLayout, fill: float) -> str:
    """The expression of a box of a packed tensor as a fragment."""
    wanted, layout = layout, suited(e, place, layout)
    axis, width = width_of(e, place, layout)
    how, args = _arguments(e, place, layout, axis, width)
    make = "load" if width else "load_each"
    text = f"use(packed_tiles.{make}({how}, {number(fill, place.dtype)}))"
    made = e.fresh(place.name)
    e.line(f"{made} = {e.use(f'load_{place.name}', text)}({', '.join(args)})")

    return convert_layout(e, made, layout, wanted, place.dtype)


def store_packed(e: Emitter, place: MemoryOperand, layout: RegisterLayout, x: str) -> None:
    """Writes a fragment to a box of a packed tensor, rounded as the tensor's policy says."""
    given, layout = layout, suited(e, place, layout)
    if layout != given:
        made = e.fresh("spread")
        e.line(f"{made} = {convert_layout(e, x, given, layout, place.dtype)}")
        x = made
    axis, width = width_of(e, place, layout)
    how, args = _arguments(e, place, layout, axis, width)
    rounding, saturate = rounding_of(place)
    owner, draws = e.owner(layout), rounding == "stochastic"
    if draws:
        moving = [a for a in range(len(layout.shape)) if any(base[a] for base in layout.bases)]
        args += [element_offset(e, place, parts_of(e, place, layout)), *rounding_key(e)]
        args += [product(place.stride(place.axes[a])) for a in moving]
    args += [owner] if owner else []
    make = "store" if width else "store_each"
    text = (f"use(packed_tiles.{make}({how}, {owner is not None}, {rounding!r}, {saturate}))")
    e.line(f"{e.use(f'store_{place.name}', text)}({', '.join([x, *args])})")


def suited(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> RegisterLayout:
    """A layout in which a thread holds whole groups, if the box has any."""
    last, group = len(place.extents) - 1, group_of(place.dtype)
    if last not in place.axes or not whole_groups(e, place):
        return layout
    axis = place.axes.index(last)
    if layout.run(axis) >= min(group, 1 << bits_of(layout.shape[axis])):
        return layout
    order = [a for a in range(len(layout.shape)) if a != axis] + [axis]
    shape = tuple(layout.shape[a] for a in order)
    share = max(1, functools.reduce(lambda n, m: n << bits_of(m), shape, 1)
                >> len(layout.threads))
    vector = max(group, min(MOST, 1 << bits_of(share)))
    made = blocked(shape, 1 << len(layout.threads), min(vector, 1 << bits_of(shape[-1])))
    return made.permuted([order.index(a) for a in range(len(order))])


def whole_groups(e: Emitter, place: MemoryOperand) -> bool:
    """Whether the box begins with a group and ends with one, or with the row."""
    last, group = len(place.extents) - 1, group_of(place.dtype)
    if last not in place.axes or e.known.divisor(place.offsets[last]) < group:
        return False
    length, offset = place.shape[place.axes.index(last)], place.offsets[last]
    extent = place.extents[last]
    ends = isinstance(extent, int) and isinstance(offset, Const) and \
        int(offset.value) + length >= extent
    return length % group == 0 or ends


def width_of(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> tuple[int, int]:
    """(axis of the tile along rows, elements of an access); 0 elements: one by one."""
    last, group = len(place.extents) - 1, group_of(place.dtype)
    if last not in place.axes:
        return -1, 0
    axis = place.axes.index(last)
    if not whole_groups(e, place) or layout.run(axis) < group:
        return axis, 0
    if place.name not in e.facts.aligned:
        return axis, group
    known = min(e.known.divisor(place.offsets[last]), e.known.extent(place.texts[last]),
                divisor_of(layout.shape[axis]))
    return axis, max(group, min(layout.run(axis), MOST if place.dtype.bits == 6 else 2 * MOST,
                                known))


def row_bytes(place: MemoryOperand) -> str | int:
    """Bytes of a row of the tensor, as an expression of 64 bits."""
    n, group = place.extents[-1], group_of(place.dtype)
    size = 1 if group == 2 else 3
    if isinstance(n, int):
        return -(-n // group) * size
    return f"(({n} + {group - 1}) >> {group // 2}) * {size}"


def _arguments(e: Emitter, place: MemoryOperand, layout: RegisterLayout, axis: int,
               width: int) -> tuple[str, list[str]]:
    """(compile-time arguments, run-time ones) of an access."""
    guards, bounds = guards_of(e, place, layout)
    parts, last = parts_of(e, place, layout), len(place.extents) - 1
    pitch = row_bytes(place)
    above = MemoryOperand(place.space, place.name, place.numeric, place.extents[:-1],
                          place.texts[:-1],
                          place.offsets[:-1], (), (), place.base)
    row = element_offset(e, above, parts[:-1]) if last else "i64(0)"
    column = f"i32({e.name(place.offsets[last])} + {parts[last] or 'i32(0)'})"
    start = f"{place.base} + ({row}) * {pitch}"
    steps = []
    for a in range(len(layout.shape)):
        if a != axis and any(base[a] for base in layout.bases):
            between = [f for f in place.extents[place.axes[a] + 1:-1]]
            steps.append(f"({product(between)}) * {pitch}" if between else f"i64({pitch})")
    how = f"{place.dtype.name!r}, {layout.text!r}, {layout.shape}, {axis}, {width}, {guards}"
    return how, [start, *steps, *bounds, column]


__all__ = ["load_packed", "store_packed"]
