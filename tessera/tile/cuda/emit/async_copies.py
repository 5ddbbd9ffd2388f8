"""cp_async, its groups and waits, and the barrier.

16, 8 or 4 bytes at once by cp.async where both sides are surely aligned; other copies, and all
where the target has no cp.async, go through registers and are complete at once. The language's
barrier completes the copies that no commit made a group of: where such a copy may be under way it
waits for all.
"""

from __future__ import annotations

from typing import cast

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import MemoryOperand, access_width, place_of
from tessera.tile.cuda.emit.packed_tiles import load_packed
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.shared_tiles import ThreadStart, spot_of_layout, store_buffer, width_of
from tessera.tile.cuda.emit.thread_elements import checked
from tessera.tile.cuda.emit.tile_access import guards_of
from tessera.tile.cuda.emit.tiles import address, strides
from tessera.tile.cuda.lower.uncommitted_copies import left_to_barriers
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import RegisterLayout, bits_of, blocked

SIZES = (16, 8, 4)  # bytes of one cp.async
LINE_BYTES = 128  # of the second-level cache


@emits("cp_async")
def _copy(e: Emitter, op: Op) -> None:
    target, source = (checked(e, place_of(e, x)) for x in op.args)
    if source.dtype.packed:
        _copy_codes(e, target, source)
    else:
        copy_box(e, target, source)


@emits("cp_async_if")
def _copy_if(e: Emitter, op: Op) -> None:
    target, source = (place_of(e, x) for x in op.args[:2])
    assert not source.dtype.packed, "rings of matmuls hold whole bytes"
    copy_box(e, target, source, e.name(op.args[2]))


def copy_box(e: Emitter, target: MemoryOperand, source: MemoryOperand, wanted: str = "") -> None:
    """wanted: a condition that the source is not read without; zeros then."""
    layout, width = layout_of(e, target, source)
    spot = spot_of_layout(e, target, layout)
    size = width * spot.panel.size
    how = "async" if e.generation.async_copies and size in SIZES else "plain"
    if how == "plain":
        e.note(f"copies to {target.name} go through registers, {size} bytes at once")
    axis = access_width(e, source, layout)[0]
    guards, bounds = guards_of(e, source, layout)
    if wanted:
        guards, bounds = narrowed(e, layout, guards, bounds, wanted)
    box, ends = guards_of(e, target, layout)
    owner = e.owner(layout)
    text = (f"use(shared_tiles.copy({spot.panel.text}, {source.dtype.name!r}, {layout.text!r}, "
            f"{layout.shape}, {axis}, {width}, {box}, {guards}, {spot.steps}, {spot.zeros}, "
            f"{how!r}, {owner is not None}))")
    args = [*spot.place, *ends, address(e, source, layout), *strides(e, source, layout, axis),
            *bounds, *([owner] if owner else [])]
    e.line(f"{e.use(f'copy_{source.name}', text)}({', '.join(args)})")


def narrowed(e: Emitter, layout: RegisterLayout, guards: tuple[str, ...], bounds: list[str],
             wanted: str) -> tuple[tuple[str, ...], list[str]]:
    """Guards that nothing passes where `wanted` is false: one bound becomes 0, which costs one
    select instead of a condition for each access."""
    where = e.use("where", "use(fragments.where)")
    if not any(guards):
        return ("left", *guards[1:]), [f"{where}({wanted}, i32({layout.reach(0)}), i32(0))"]
    return guards, [*bounds[:-1], f"{where}({wanted}, {bounds[-1]}, i32(0))"]


def _copy_codes(e: Emitter, target: MemoryOperand, source: MemoryOperand) -> None:
    """Codes of 4 and 6 bits go through registers: rows may begin inside of a byte."""
    e.note(f"copies to {target.name} go through registers, code by code")
    layout = blocked(source.shape, 1 << (e.lanes.bit_length() - 1), 8)
    codes = e.fresh("codes")
    e.line(f"{codes} = {load_packed(e, source, layout, 0)}")
    store_buffer(e, target, layout, codes)


def contiguous(place: MemoryOperand) -> int:
    """The axis of the box along which memory is contiguous; the last where none is."""
    last = len(place.extents) - 1
    return place.axes.index(last) if last in place.axes else len(place.axes) - 1


def layout_of(e: Emitter, target: MemoryOperand, source: MemoryOperand) -> tuple[RegisterLayout,
                                                                                 int]:
    """Who copies what: neighbouring threads along the rows of the source, as wide as both allow."""
    axis, threads = contiguous(source), 1 << (e.lanes.bit_length() - 1)
    size = source.dtype.bits // 8
    order = [i for i in range(len(source.shape)) if i != axis] + [axis]
    shape = tuple(source.shape[i] for i in order)
    back = [order.index(i) for i in range(len(order))]
    width = max(1, 16 // size)
    while True:
        fits = min(width, 1 << bits_of(shape[-1]))
        layout = blocked(shape, threads, fits, whole=LINE_BYTES // size).permuted(back)
        spot = spot_of_layout(e, target, layout)
        if _copy_width(e, target, source, layout, spot, axis) >= width or width == 1:
            return layout, width
        width //= 2


def _copy_width(e: Emitter, target: MemoryOperand, source: MemoryOperand, layout: RegisterLayout,
                spot: ThreadStart,
                axis: int) -> int:
    """Neighbours that one access surely moves on both sides."""
    if spot.axis != axis:
        return 1
    return min(width_of(e, target, layout, spot)[1], access_width(e, source, layout)[1])


@emits("cp_commit_group")
def _commit(e: Emitter, op: Op) -> None:
    if e.generation.async_copies:
        e.line(e.use("commit", "use('cp_async_commit')") + "()")


@emits("cp_wait_group")
def _wait(e: Emitter, op: Op) -> None:
    if not e.generation.async_copies:
        return
    if id(op) in _open(e):
        e.line(e.use("commit", "use('cp_async_commit')") + "()")
    pending = int(op.attr["pending"])
    e.line(e.use("wait_copies", f"use(ptx.copy_async.cp_async_wait({pending}))") + "()")


@emits("barrier")
def _barrier(e: Emitter, op: Op) -> None:
    if id(op) in _open(e) and e.generation.async_copies:
        e.line(e.use("wait_all", "use('cp_async_wait_all')") + "()")
    e.sync()


def _open(e: Emitter) -> frozenset[int]:
    """Barriers and waits before which an uncommitted copy may be under way."""
    if "copies" not in e.memo:
        e.memo["copies"] = left_to_barriers(e.function)
    return cast(frozenset[int], e.memo["copies"])
