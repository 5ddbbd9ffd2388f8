"""gather and scatter: the place along one axis comes from a tile (intrinsics/gather.py).

A row of a table is read 16 bytes a thread where its alignment is proved; positions outside of the
tensor are no access at all.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from tessera.errors import UnsupportedTargetError
from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.emit.atomics import need_ordered
from tessera.tile.cuda.emit.elementwise import number
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout, from_owners
from tessera.tile.cuda.emit.memory_operands import (
    ZERO,
    MemoryOperand,
    access_width,
    bytes_of,
    element_offset,
    place_of,
    product,
)
from tessera.tile.cuda.emit.random import rounding_key
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.shared_tiles import ACCESS_BYTES, base_of
from tessera.tile.cuda.emit.thread_elements import checked, hardware, row_bytes, wide
from tessera.tile.cuda.emit.tile_access import guards_of, parts_of, rounding_of
from tessera.tile.cuda.emit.tiles import LEAST_STORES, divided, unrounded
from tessera.tile.cuda.intrinsics.atomics import neighbours
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.gather import Pick
from tessera.tile.cuda.intrinsics.swizzle import Panel
from tessera.tile.ir.ir import Op, Operand
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import TileType
from tessera.tile.ops.indexed import shape_of, single_indices
from tessera.tile.passes.integer_facts import divisor_of

FAR = 1 << 30  # an extent that no box reaches


@dataclass(frozen=True)
class GatherPosition:
    """A place as the tile's axes see it, and along which axis of the memory positions run.

    place: has an axis of its own in front for each axis of the index, which reaches far.
    along: the memory's axis; axis: its number in `place`.
    """

    place: MemoryOperand
    along: int
    first: int
    count: int
    start: Operand
    limit: int
    merged: int  # axes up to this one that positions count row by row

    @property
    def axis(self) -> int:
        return self.along + self.count

    @property
    def cells(self) -> bool:
        return self.place.space == "shared" or self.place.dtype.packed


def spot_of(e: Emitter, op: Op, index: Operand, offsets: tuple[Operand, ...]) -> GatherPosition:
    whole, attr, t = place_of(e, op.args[0]), op.attr, e.type(index)
    assert isinstance(t, TileType)
    count, along, single = len(t.shape), attr["axis"], single_indices(len(offsets), attr)
    indexed = checked(e, replace(whole, offsets=offsets, axes=tuple(
        a for a in range(len(offsets)) if a not in single)))
    whole, offsets = replace(indexed, axes=whole.axes), indexed.offsets
    shape, first = shape_of(t.shape, attr)
    kept = [a + count for a in attr["kept"]]
    place = replace(
        whole, extents=(FAR,) * count + whole.extents, texts=(str(FAR),) * count + whole.texts,
        offsets=(ZERO,) * count + tuple(ZERO if a == along else x for a, x in enumerate(offsets)),
        axes=(*kept[:first], *range(count), *kept[first:]), shape=shape)
    return GatherPosition(place, along, first, count, offsets[along], attr["limit"],
                          attr.get("merged", 1))


def width_of(e: Emitter, spot: GatherPosition, layout: RegisterLayout) -> tuple[int, int]:
    """(axis of the tile along which columns run, elements that one access surely may move)"""
    place, last = spot.place, len(spot.place.extents) - 1
    axis = place.axes.index(last) if last in place.axes else -1
    if axis < 0 or place.dtype.packed:
        return axis, 1
    if place.space == "global":
        return access_width(e, place, layout)
    assert place.buffer is not None
    panel = Panel.of(place.buffer)
    width = min(layout.run(axis), ACCESS_BYTES // panel.size,
                e.known.divisor(place.offsets[last]), divisor_of(place.shape[axis]))
    while width > 1 and not panel.aligned(width * panel.size):
        width //= 2
    return axis, width


def pick_of(e: Emitter, spot: GatherPosition, index: Operand, layout: RegisterLayout,
            guards: tuple[str, ...],
            most: int = 16) -> Pick:
    place = spot.place
    axis, width = width_of(e, spot, layout)
    panel: tuple = ()
    if place.space == "shared" and not place.dtype.packed:
        found = Panel.of(place.buffer)  # type: ignore[arg-type]
        panel = (found.rows, found.columns, found.dtype, found.swizzle)
    return Pick(place.space, place.dtype.name, layout.text, layout.shape, spot.first, spot.count,
                axis, min(width, most), guards, kind_of(e.dtype(index)) == "i64", spot.limit, panel,
                spot.axis == len(place.extents) - 1)


def where(e: Emitter, spot: GatherPosition, pick: Pick, layout: RegisterLayout,
          bounds: list[str]) -> list[str]:
    """The arguments of an intrinsic behind the positions."""
    place, last = spot.place, len(spot.place.extents) - 1
    parts = parts_of(e, place, layout)
    parts[:spot.count] = [None] * spot.count
    stride = place.stride if not spot.cells else lambda a: list(place.extents[a + 1:last])
    moving = [a for a in range(len(layout.shape)) if a != pick.axis
              and place.axes[a] >= spot.count and any(base[a] for base in layout.bases)]
    steps = [product(stride(place.axes[a]), wide=place.space == "global") for a in moving]
    step = product(stride(spot.axis), wide=place.space == "global")
    extents = [f"i64({x})" for x in place.extents[spot.axis + 1 - spot.merged:spot.axis + 1]]
    start = [wide(e, spot.start), " * ".join(extents)]
    if not spot.cells:
        at = f"{place.base} + {bytes_of(place.dtype, element_offset(e, place, parts))}"
        return [at, bytes_of(place.dtype, step), *start,
                *(bytes_of(place.dtype, s) for s in steps), *bounds]
    cell = _cell(e, place, parts, last)
    return [*cell, step, *start, *steps, *bounds]


def _cell(e: Emitter, place: MemoryOperand, parts: list[str | None], last: int) -> list[str]:
    """Base, row and column of the thread's first element, and the bytes of a packed row."""
    rows = replace(place, extents=place.extents[:last], offsets=place.offsets[:last])
    row = element_offset(e, rows, parts[:last])
    column = element_offset(e, replace(place, extents=place.extents[last:],
                                       offsets=place.offsets[last:]), parts[last:])
    if place.space == "shared":
        out = [f"i32({base_of(e, place)})", f"i32({row})", f"i32({column})"]
    else:
        out = [place.base, row, f"i32({column})"]
    if place.dtype.packed:
        count = row_bytes(e, place)
        out.append(f"i32({count})" if place.space == "shared" else f"i64({count})")
    return out


def among_replicas(e: Emitter, spot: GatherPosition, op: Op, value: str, most: int, least: int
                   ) -> tuple[RegisterLayout, str, str]:
    """The layout in which elements leave, the fragment of them and that of their positions."""
    before, index = e.layout(op.args[1]), op.args[2]
    axis, width = width_of(e, spot, before)
    after = divided(before, axis, min(width, most), least)
    if after == before:
        return before, value, e.name(index)
    inner = range(spot.first, spot.first + spot.count)
    positions = [functools.reduce(lambda layout, a: layout if a in inner else layout.drop(a),
                                  reversed(range(len(before.shape))), layout)
                 for layout in (before, after)]
    return (after, convert_layout(e, value, before, after, e.dtype(op.args[1])),
            convert_layout(e, e.name(index), positions[0], positions[1], e.dtype(index)))


# --- the ops --------------------------------------------------------------------------------------
@emits("gather")
def _gather(e: Emitter, op: Op) -> None:
    (made,), (_, index, *offsets) = op.outs, op.args
    layout, spot = e.layout(made.value), spot_of(e, op, index, tuple(offsets))
    guards, bounds = guards_of(e, spot.place, layout)
    pick = pick_of(e, spot, index, layout, guards)
    fill = number(op.attr["fill"], spot.place.dtype)
    text = f"use(gather.load({pick.text}, {fill}, {hardware(e, spot.place.dtype)}))"
    args = ", ".join([e.name(index), *where(e, spot, pick, layout, bounds)])
    e.define(made, f"{e.use(f'gather_{spot.place.name}', text)}({args})")
    e.note(f"gather of {spot.place.name}: {pick.width} neighbours at once")


@emits("store_scatter")
def _store(e: Emitter, op: Op) -> None:
    _, value, index, *offsets = op.args
    spot = spot_of(e, op, index, tuple(offsets))
    place = spot.place
    layout, x, at = among_replicas(e, spot, op, unrounded(e, value, place), 16, LEAST_STORES)
    owner = e.owner(layout)
    guards, bounds = guards_of(e, place, layout)
    pick = pick_of(e, spot, index, layout, guards)
    rounding, saturate = rounding_of(place) if place.space == "global" else ("nearest_even", False)
    if rounding == "stochastic" and place.dtype.packed:
        raise UnsupportedTargetError(
            f"scatter into {place.name}, which rounds stochastically to {place.dtype}",
            where=e.where, hint="store whole tiles: y[i:i+64] = tile")
    text = (f"use(gather.store({pick.text}, {owner is not None}, {rounding!r}, {saturate}, "
            f"{hardware(e, place.dtype)}))")
    args = [x, at, *where(e, spot, pick, layout, bounds)]
    args += [place.base, *rounding_key(e)] if rounding == "stochastic" else []
    args += [owner] if owner else []
    e.line(f"{e.use(f'scatter_{place.name}', text)}({', '.join(args)})")


@emits("atomic_gather")
def _update(e: Emitter, op: Op) -> None:
    """By the first of the threads that have an element; all of them learn what was there."""
    need_ordered(e, op)
    (made,), (_, value, index, *offsets) = op.outs, op.args
    spot, read = spot_of(e, op, index, tuple(offsets)), bool(e.readers.get(made.value))
    place, layout, x, at = spot.place, e.layout(value), e.name(value), e.name(index)
    if not read:
        layout, x, at = among_replicas(e, spot, op, x, 1, 2)
    owner = e.owner(layout)
    guards, bounds = guards_of(e, place, layout)
    pick = pick_of(e, spot, index, layout, guards, 1)
    kind = op.attr["kind"]
    text = (f"use(gather.update({pick.text}, {kind!r}, {op.attr['scope']!r}, "
            f"{owner is not None}, {read}))")
    args = [x, at, *where(e, spot, pick, layout, bounds)]
    args += [owner] if owner else []
    call = f"{e.use(f'atomic_{kind}', text)}({', '.join(args)})"
    if not read:
        e.line(call)
        return
    before = e.fresh("before")
    e.line(f"{before} = {call}")
    e.define(made, from_owners(e, before, layout, place.dtype) if owner else before)


@emits("atomic_scatter")
def _add(e: Emitter, op: Op) -> None:
    _, value, index, *offsets = op.args
    spot, source = spot_of(e, op, index, tuple(offsets)), e.dtype(value)
    place = spot.place
    most = 1 if place.space == "shared" else neighbours("add", place.dtype, source, "device",
                                                        e.generation)
    layout, x, at = among_replicas(e, spot, op, e.name(value), most, 2)
    owner = e.owner(layout)
    guards, bounds = guards_of(e, place, layout)
    pick = pick_of(e, spot, index, layout, guards, most)
    scope = "group" if place.space == "shared" else "device"
    text = f"use(gather.add({pick.text}, {source.name!r}, {scope!r}, {owner is not None}))"
    args = [x, at, *where(e, spot, pick, layout, bounds)]
    args += [owner] if owner else []
    e.line(f"{e.use(f'scatter_{place.name}', text)}({', '.join(args)})")
