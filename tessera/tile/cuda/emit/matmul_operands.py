"""Operands of matmuls: where their fragments come from.

A place in shared memory is read where it is. A tile that already is in the form of A stays in
registers; any other tile goes through shared memory of the compiler's, in the format and order that
ldmatrix reads best.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import ZERO, MemoryOperand, place_of
from tessera.tile.cuda.emit.shared_tiles import ThreadStart, load_buffer, spot_of, store_buffer
from tessera.tile.cuda.emit.thread_elements import checked
from tessera.tile.cuda.intrinsics.matmul import STORED, bytes_of
from tessera.tile.cuda.intrinsics.swizzle import ALIGNMENT, Panel, stage_bytes
from tessera.tile.ir.ir import Operand
from tessera.tile.ir.register_layout import WARP_BITS, RegisterLayout, bits_of, blocked
from tessera.tile.ir.types import Buffer, TileType

CHUNK_BYTES = 16


@dataclass(frozen=True)
class Operand_:
    """An operand seen as [u, k]: its place, or the fragment that is in the form of A."""

    side: str  # 'A' or 'B'
    place: MemoryOperand | None = None
    fragment: str = ""
    layout: RegisterLayout | None = None

    @property
    def axis(self) -> int:
        """The axis of the box that is k."""
        return 1 if self.side == "A" else 0

    def deep(self) -> bool:
        """Whether memory is contiguous along k."""
        assert self.place is not None
        return self.place.axes[self.axis] == len(self.place.extents) - 1


Stores = list[Callable[[], None]]


def operand_of(e: Emitter, x: Operand, side: str, result: RegisterLayout, stored: DType,
               stores: Stores, registers: bool = False) -> Operand_:
    """stored: the type in which a tile goes through shared memory.  stores: what must be written
    before, between two barriers.  registers: whether A may be a fragment."""
    t = e.type(x)
    if not isinstance(t, TileType):
        place = checked(e, place_of(e, x))
        if not place.dtype.packed:
            return Operand_(side, place)
        return _through_memory(e, *_unpacked(e, place), side, stored, stores)
    layout = e.layout(x)
    if registers and side == "A" and is_form_of_a(layout, result):
        return Operand_(side, fragment=_unrounded(e, x, stored), layout=layout)
    return _through_memory(e, layout, e.name(x), side, stored, stores)


def _unpacked(e: Emitter, place: MemoryOperand) -> tuple[RegisterLayout, str]:
    """A packed place as a fragment."""
    layout = blocked(place.shape, 1 << (e.lanes.bit_length() - 1), 8)
    name = e.fresh("unpacked")
    e.line(f"{name} = {load_buffer(e, place, layout, 0)}")
    return layout, name


def is_form_of_a(layout: RegisterLayout, result: RegisterLayout) -> bool:
    """Whether an accumulator's registers are, packed in pairs, A of the matmul with that result:
    each warp holds the rows that its part of the result has, and all columns."""
    if layout.shape[1] % 8 or layout.threads[:WARP_BITS] != result.threads[:WARP_BITS]:
        return False
    rows = tuple(bit if bit and bit[0] == 0 else None for bit in result.threads[WARP_BITS:])
    return layout.threads[WARP_BITS:] == rows and {(1, 0), (0, 3)} <= set(layout.registers)


def _unrounded(e: Emitter, x: Operand, stored: DType) -> str:
    """Packing rounds: what was rounded to the same type just for this is taken from before."""
    made = e.made_by.get(x)
    if made is not None and made.name == "convert" and e.dtype(x) is stored \
            and e.dtype(made.args[0]).name == "f32" and made.attr.get("rounding",
            "nearest_even") == "nearest_even" and not made.attr.get("saturate", False):
        return e.name(made.args[0])
    return e.name(x)


def _through_memory(e: Emitter, layout: RegisterLayout, text: str, side: str, stored: DType,
                    stores: Stores) -> Operand_:
    """A tile in shared memory of the compiler's."""
    k = 1 if side == "A" else 0
    half = stored.bits == 16
    deep = not half or layout.run(k) >= layout.run(1 - k)
    row, column = (1 - k, k) if deep else (k, 1 - k)
    shape = (layout.shape[row], padded(layout.shape[column], stored))
    buffer = Buffer(stored, shape, swizzle="chunks", alignment=ALIGNMENT)
    base = e.scratch(stage_bytes(buffer), ALIGNMENT)
    axes = (0, 1) if row == 0 else (1, 0)
    place = MemoryOperand("shared", f"operand_{side.lower()}", buffer.numeric, shape,
                          tuple(map(str, shape)), (ZERO, ZERO), axes, layout.shape, base, buffer)
    stores.append(lambda: store_buffer(e, place, layout, text))
    return Operand_(side, place)


def padded(columns: int, stored: DType) -> int:
    """Columns of scratch: whole chunks, as many as a swizzle permutes."""
    chunk = CHUNK_BYTES * 8 // stored.bits
    return 1 << bits_of(max(columns, chunk))


# --- readers of mma fragments ---------------------------------------------------------------------
def reader(e: Emitter, x: Operand_, kind: str, result: RegisterLayout, K: int,
           rounded: bool) -> tuple[tuple, list[str]]:
    """(reader with its arguments for blocks.matmul, expressions)"""
    if x.place is None:
        assert x.layout is not None
        return ("registers", x.layout.text, x.layout.shape), [x.fragment]
    matrices = by_matrix(e, x, kind)
    spot = _spot(e, x, kind, result, matrices)
    axis = 0 if x.side == "A" else 1
    clamped = result.reach(axis) > result.shape[axis] or result.shape[axis] % (
        16 if x.side == "A" else 8) != 0
    name = "matrix" if matrices else "elements"
    panel = (spot.panel.rows, spot.panel.columns, spot.panel.dtype, spot.panel.swizzle)
    return (name, panel, x.deep(), spot.zeros, clamped, rounded), spot.place


def by_matrix(e: Emitter, x: Operand_, kind: str) -> bool:
    """Whether ldmatrix reads a place: stored as mma wants it, in whole aligned chunks."""
    place, size = x.place, bytes_of(kind)
    assert place is not None and place.buffer is not None
    last = len(place.extents) - 1
    stored = (STORED[kind], "tf32") if kind == "tf32" else (STORED[kind],)
    if place.dtype.name not in stored or last not in place.axes:
        return False
    if not x.deep() and size != 2:
        return False
    chunk = CHUNK_BYTES // size
    panel = Panel.of(place.buffer)
    whole = place.shape[x.axis] % chunk == 0 if x.deep() else place.shape[x.axis] % 8 == 0 \
        and place.shape[1 - x.axis] % 8 == 0
    return whole and panel.aligned(CHUNK_BYTES) and e.known.divisor(place.offsets[last]) >= chunk


def _spot(e: Emitter, x: Operand_, kind: str, result: RegisterLayout,
          matrices: bool) -> ThreadStart:
    """The lane's first address: of its row of ldmatrix, or of its first element."""
    lane, chunk = f"({e.thread} & 31)", CHUNK_BYTES // bytes_of(kind)
    place = x.place
    assert place is not None
    if matrices:
        u, k, mask = _matrix_lanes(x, lane, chunk)
    else:
        per = 4 // bytes_of(kind)
        u, k = f"({lane} >> 2)", f"({lane} & 3) * {per}"
        mask = (7, 3 * per)[x.deep()]
    warps, bits = warp_part(e, result, 0 if x.side == "A" else 1)
    if warps:
        u = f"{u} + {warps}"
    at_u, at_k = e.once(f"{x.side}_u", f"i32({u})"), e.once(f"{x.side}_k", f"i32({k})")
    parts: list[str | None] = [None] * len(place.extents)
    parts[place.axes[x.axis]], parts[place.axes[1 - x.axis]] = at_k, at_u
    return spot_of(e, place, parts, mask if x.deep() else mask | bits)


def _matrix_lanes(x: Operand_, lane: str, chunk: int) -> tuple[str, str, int]:
    """u and k of the row that a lane names for ldmatrix, and the mask of the column among them.

    A deep: lanes 8..15 name the next 8 u, 16.. the next chunk of k; B deep: the reverse. With u
    contiguous, the two are exchanged.
    """
    near, far = f"({lane} & 7) + (({lane} >> 4 & 1) << 3)", f"({lane} & 15)"
    if x.side == "A" and x.deep():
        return far, f"({lane} >> 4) * {chunk}", chunk
    if x.side == "A":
        return f"(({lane} >> 3 & 1) << 3)", near, 8
    if x.deep():
        return near, f"({lane} >> 3 & 1) * {chunk}", chunk
    return f"(({lane} >> 4) << 3)", far, 8


def warp_part(e: Emitter, result: RegisterLayout, axis: int) -> tuple[str, int]:
    """The part of u that the warp number gives, and its bits."""
    texts, bits = [], 0
    for i, bit in enumerate(result.threads):
        if i >= WARP_BITS and bit and bit[0] == axis:
            texts.append(f"(({e.thread} >> {i} & 1) << {bit[1]})")
            bits |= 1 << bit[1]
    return (f"({' | '.join(texts)})" if texts else ""), bits


__all__ = ["Operand_", "Stores", "operand_of", "reader"]
