"""Tiles in shared memory: loads and stores at the addresses that the buffer's swizzle gives."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.emit.elementwise import number
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import MemoryOperand
from tessera.tile.cuda.emit.tile_access import guards_of, parts_of
from tessera.tile.cuda.intrinsics.narrow_floats import has_instructions
from tessera.tile.cuda.intrinsics.swizzle import Panel, stage_bytes
from tessera.tile.ir.ir import Const
from tessera.tile.ir.register_layout import RegisterLayout

ACCESS_BYTES = 16


@dataclass(frozen=True)
class ThreadStart:
    """Where a thread's part of a shared box begins, for the intrinsics of that name.

    base, row, column: expressions.  axis: of the tile, along which columns run, or None.
    steps: rows per step along each axis of the tile.  zeros: see swizzles.Addresses.
    """

    panel: Panel
    base: str
    row: str
    column: str
    axis: int | None
    steps: tuple[int, ...]
    zeros: int

    @property
    def place(self) -> list[str]:
        return [self.base, self.row, self.column]


def spot_of(e: Emitter, place: MemoryOperand, parts: Sequence[str | None],
            column_mask: int = 0) -> ThreadStart:
    """parts: the thread's part of the index per axis of the buffer; None where there is none.

    column_mask: the bits of the column's part that may be set.
    """
    assert place.buffer is not None
    shape, last = place.buffer.shape, len(place.buffer.shape) - 1
    steps = tuple(0 if m == last else prod(shape[m + 1:-1]) for m in place.axes)
    row = _sum(e, place, parts, [prod(shape[m + 1:-1]) for m in range(last)])
    column = _sum(e, place, [parts[last]], [1], last)
    known = e.known.divisor(place.offsets[last])
    return ThreadStart(Panel.of(place.buffer), base_of(e, place), row, column,
                       place.axes.index(last) if last in place.axes else None, steps,
                       (known - 1) & ~column_mask)


def _sum(e: Emitter, place: MemoryOperand, parts: Sequence[str | None], factors: list[int],
         first: int = 0) -> str:
    """sum of (offset + part) * factor over the axes from `first` on."""
    terms = []
    for i, factor in enumerate(factors):
        offset, part = place.offsets[first + i], parts[i]
        texts = [] if isinstance(offset, Const) and offset.value == 0 else [e.name(offset)]
        texts += [part] if part not in (None, "i32(0)") else []
        if texts:
            both = " + ".join(texts)
            terms.append(both if factor == 1 else f"({both}) * {factor}")
    return f"i32({' + '.join(terms)})" if terms else "i32(0)"


def base_of(e: Emitter, place: MemoryOperand) -> str:
    """The address of a buffer, or of one of its stages."""
    assert place.buffer is not None
    if place.stage is None:
        return place.base
    return f"i32({place.base} + {e.name(place.stage)} * {stage_bytes(place.buffer)})"


def spot_of_layout(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> ThreadStart:
    """The spot of a thread's registers in a layout."""
    last = len(place.extents) - 1
    mask = 0
    if last in place.axes:
        axis = place.axes.index(last)
        mask = sum(1 << bit[1] for bit in layout.threads if bit and bit[0] == axis)
    return spot_of(e, place, parts_of(e, place, layout), mask)


def width_of(e: Emitter, place: MemoryOperand, layout: RegisterLayout,
             spot: ThreadStart) -> tuple[int, int]:
    """(axis, elements): neighbours that one access may move."""
    if spot.axis is None:
        return 0, 1
    return spot.axis, width_of_run(e, place, spot, layout.run(spot.axis))


def width_of_run(e: Emitter, place: MemoryOperand, spot: ThreadStart, run: int) -> int:
    """The widest access to `run` aligned neighbours along the columns."""
    if place.dtype.packed:
        return 1
    size = spot.panel.size
    width = min(run, ACCESS_BYTES // size, _divides(e, place))
    while width > 1 and not spot.panel.aligned(width * size):
        width //= 2
    return width


def _divides(e: Emitter, place: MemoryOperand) -> int:
    """A power of two that divides the first column of the view and its extent."""
    last = len(place.extents) - 1
    extent = place.shape[place.axes.index(last)]
    return gcd(e.known.divisor(place.offsets[last]), extent & -extent)


def load_buffer(e: Emitter, place: MemoryOperand, layout: RegisterLayout, fill: float,
                vector: int | None = None, any_nan: bool = False) -> str:
    """The expression of a shared box as a fragment. vector: neighbours that one access may move,
    None for as many as there are. any_nan: as decode_narrow has it."""
    spot = spot_of_layout(e, place, layout)
    axis, width = width_of(e, place, layout, spot)
    width = min(width, vector or width)
    guards, bounds = guards_of(e, place, layout)
    text = (f"use(shared_tiles.load({spot.panel.text}, {layout.text!r}, {layout.shape}, {axis}, "
            f"{width}, {guards}, {spot.steps}, {spot.zeros}, {number(fill, place.dtype)}, "
            f"{has_instructions(place.dtype, e.generation)}{', True' * any_nan}))")
    return f"{e.use(f'load_{place.name}', text)}({', '.join([*spot.place, *bounds])})"


def store_buffer(e: Emitter, place: MemoryOperand, layout: RegisterLayout, x: str) -> None:
    """Writes a fragment to a shared box."""
    spot = spot_of_layout(e, place, layout)
    axis, width = width_of(e, place, layout, spot)
    guards, bounds = guards_of(e, place, layout)
    owner = e.owner(layout)
    text = (f"use(shared_tiles.store({spot.panel.text}, {layout.text!r}, {layout.shape}, {axis}, "
            f"{width}, {guards}, {spot.steps}, {spot.zeros}, {owner is not None}, "
            f"{has_instructions(place.dtype, e.generation)}))")
    args = [x, *spot.place, *bounds, *([owner] if owner else [])]
    e.line(f"{e.use(f'store_{place.name}', text)}({', '.join(args)})")
