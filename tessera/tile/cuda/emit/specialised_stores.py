"""Emission of stores of a warp-specialised program: tiles of results, from registers to memory."""

from __future__ import annotations

from typing import Any

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import (
    MemoryOperand,
    bytes_of,
    element_offset,
    place_of,
    product,
)
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.sentinels import watch_held, watch_store
from tessera.tile.cuda.emit.tile_access import parts_of
from tessera.tile.cuda.emit.tiles import unrounded
from tessera.tile.cuda.emit.warp_specialised import WarpSpecialisedEmitter, specialised
from tessera.tile.cuda.lower.warp_specialised.program import PANEL_BYTES, PANEL_ROWS, turned_panel
from tessera.tile.ir.ir import Const, Op
from tessera.tile.ir.register_layout import RegisterLayout


def _watched(e: Emitter, op: Op) -> tuple[MemoryOperand, RegisterLayout, str]:
    """(where a tile goes, its layout, its numbers before they are rounded)."""
    target, value = op.args
    place, layout = place_of(e, target), e.layout(value)
    watch_store(e, place, layout, value)
    watch_held(e, op, place, layout)
    return place, layout, unrounded(e, value, place)


@emits("store_panels")
def _store_panels(e: Emitter, op: Op) -> None:
    h = specialised(e)
    place, layout, x = _watched(e, op)
    rank, (row_axis, column_axis) = len(place.extents), place.axes
    turned = (0, 4) not in layout.threads  # warps lie side by side and not one below the other
    rows, columns = turned_panel(layout.shape) if turned else (
        PANEL_ROWS, PANEL_BYTES * 8 // place.dtype.bits)
    box = tuple({row_axis: rows, column_axis: columns}.get(i, 1) for i in range(rank))
    args = (layout.text, layout.shape, place.dtype.name, rank, rank - 1 - row_axis,
            h.program.panels_bytes, h.program.panel_buffers, *[rows] * turned)
    make = h.part("store_panels", f"store_{'turned_' * turned}panels", *args)
    at = [f"i32({e.name(i)})" for i in reversed(place.offsets)]
    map_ = e.param("map", place.name, "i64", box=box)
    e.line(f"{make}({', '.join([x, map_, h.thread, *at])})")


@emits("panels_read")
def _panels_read(e: Emitter, op: Op) -> None:
    e.line(e.use("panels_read", "use(ptx.tma.bulk_wait(0, read=True))") + "()")


@emits("store_rows")
def _store_rows(e: Emitter, op: Op) -> None:
    place, layout, x = _watched(e, op)
    if place.windows is not None:
        _store_windows(specialised(e), place, layout, x)
        return
    row_axis, column_axis = place.axes
    make = specialised(e).part("store_quads", "store_quads", layout.text, layout.shape,
                               place.dtype.name)
    parts = parts_of(e, place, layout)
    row = parts[row_axis] or "i32(0)"
    parts[column_axis] = None
    at = f"{place.base} + {bytes_of(place.dtype, element_offset(e, place, parts))}"
    pitch = bytes_of(place.dtype, product(place.stride(row_axis)))
    quad = e.once("quad", f"i32({specialised(e).thread} & 3)")
    args = [x, at, pitch, quad, remaining_elements(e, place, row_axis, row),
            remaining_elements(e, place, column_axis, "i32(0)")]
    e.line(f"{make}({', '.join(args)})")


def _store_windows(h: WarpSpecialisedEmitter, place: MemoryOperand, layout: RegisterLayout,
                   x: str) -> None:
    assert place.windows is not None
    make = h.part("store_windows", "store_windows", layout.text, layout.shape, place.dtype.name,
                  place.windows.numbers)
    row, column = (h.name(i) for i in place.offsets)
    quad = h.once("quad", f"i32({h.thread} & 3)")
    h.line(f"{make}({x}, {place.base}, i32({place.extents[0]}), i32({row} + "
           f"{h.index(layout, 0)}), i32({column}), {quad})")


def remaining_elements(e: Emitter, place: Any, axis: int, part: str) -> str:
    """How many elements are left along a memory axis from the lane's first on."""
    offset = place.offsets[axis]
    start = "" if isinstance(offset, Const) and offset.value == 0 else f" - {e.name(offset)}"
    return f"i32({place.extents[axis]}{start}" + (f" - {part})" if part != "i32(0)" else ")")
