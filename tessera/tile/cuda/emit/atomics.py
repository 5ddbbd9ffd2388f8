"""Atomic updates by lanes, by a group as one, and of whole tiles.

What all lanes do alike happens once per group: its first thread acts, and the others learn what was
there before. An update whose result is read orders what the group wrote before it and reads after,
one that releases what it wrote before.
"""

from __future__ import annotations

from tessera.errors import CompileError
from tessera.tile.cuda.emit import tiles
from tessera.tile.cuda.emit.emitter import Emitter, intrinsic, literal
from tessera.tile.cuda.emit.memory_operands import access_width, place_of
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.sentinels import watch_element, watch_store
from tessera.tile.cuda.emit.shared_tiles import spot_of_layout
from tessera.tile.cuda.emit.thread_elements import (
    address,
    checked,
    conditions,
    first_lane,
    guard,
    once_per_group,
)
from tessera.tile.cuda.emit.tile_access import guards_of
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.atomics import neighbours
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Def, Op, Operand
from tessera.tile.ir.modes import ORDERED
from tessera.tile.ops.atomics import memory_order
from tessera.tile.ops.ids import WARP


@emits("atomic")
def _atomic(e: Emitter, op: Op) -> None:
    target, value, *index = op.args
    need_ordered(e, op)
    _emit(e, op, "update", (value,), tuple(index), kind=op.attr["kind"])


@emits("compare_exchange")
def _compare_exchange(e: Emitter, op: Op) -> None:
    target, expected, value, *index = op.args
    _emit(e, op, "compare_exchange", (expected, value), tuple(index))


def _emit(e: Emitter, op: Op, name: str, values: tuple[Operand, ...], index: tuple[Operand, ...],
          **options: str) -> None:
    place, (made,) = place_of(e, op.args[0]), op.outs
    alone = once_per_group(e, *values, *index)
    read = bool(e.readers.get(made.value))
    ok = guard(e, place, index)
    order = memory_order(op, alone, read)
    kind = options.get("kind")
    what = [kind] if kind else []
    text = intrinsic(f"atomics.{name}", *what, place.space, place.dtype.name,
                     scope=op.attr["scope"], order=order, silent=bool(kind) and not read)
    call = e.use(f"atomic_{kind}" if kind else name, text)
    numbers = ", ".join(e.name(x) for x in values)
    update = f"{call}({address(e, place, index)}, {numbers})"
    if options.get("kind") == "add":
        watch_element(e, place, address(e, place, index), values[0],
                      conditions(e, first_lane(e), ok) if alone else ok)
    if alone:
        _emit_by_first_thread(e, made, update, read, ok, order)
        return
    if ok is None:
        e.define(made, update) if read else e.line(update)
        return
    if read:
        e.define(made, literal(0, place.dtype))
    with e.block(f"if {ok} != 0"):
        e.define(made, update) if read else e.line(update)


def need_ordered(e: Emitter, op: Op) -> None:
    """Raise CompileError for a sum that depends on which thread comes first, where none may."""
    if ORDERED in e.function.modes and op.attr["kind"] == "add" and \
            e.dtype(op.args[0]).kind == "float":
        raise CompileError(
            f"{e.function.name}: atomic_add of {e.dtype(op.args[0])}: the order of the sum is not "
            'known, and ts.determinism("strict") asks for the same bits each time', where=op.where,
            hint='sum in a tile or add integers, whose sums have no order; or ts.determinism('
            '"default"), which takes it as it is')


@emits("atomic_tile")
def _atomic_tile(e: Emitter, op: Op) -> None:
    need_ordered(e, op)
    target, value = op.args
    place, layout, attr = checked(e, place_of(e, target)), e.layout(value), op.attr
    guards, bounds = guards_of(e, place, layout)
    owner = e.owner(layout)
    if place.space == "shared":
        spot = spot_of_layout(e, place, layout)
        text = intrinsic("atomics.shared_tile", attr["kind"], place.dtype.name, attr["scope"],
                         (spot.panel.rows, spot.panel.columns, spot.panel.dtype,
                          spot.panel.swizzle), layout.text, layout.shape, spot.axis or 0, guards,
                         spot.steps, spot.zeros, owner is not None)
        where = spot.place
    else:
        axis, width = access_width(e, place, layout)
        width = min(width, neighbours(attr["kind"], place.dtype, e.dtype(value), attr["scope"],
                                      e.generation))
        text = intrinsic("atomics.tile", attr["kind"], place.dtype.name, e.dtype(value).name,
                         attr["scope"], layout.text, layout.shape, axis, width, guards,
                         owner is not None)
        where = [tiles.address(e, place, layout), *tiles.strides(e, place, layout, axis)]
        if attr["kind"] == "add":
            watch_store(e, place, layout, value)
    args = [e.name(value), *where, *bounds, *([owner] if owner else [])]
    e.line(f"{e.use('atomic_' + attr['kind'], text)}({', '.join(args)})")


def _emit_by_first_thread(e: Emitter, made: Def, update: str, read: bool, ok: str | None,
                          order: str) -> None:
    """By the first thread; its result goes to all."""
    condition = f"{first_lane(e)} != 0" + (f" and {ok} != 0" if ok else "")
    if order != "relaxed" or read:
        e.sync()  # what the others wrote comes before
    if not read:
        with e.block(f"if {condition}"):
            e.line(update)
        return
    e.define(made, literal(0, made.type.dtype))
    with e.block(f"if {condition}"):
        e.define(made, update)
    e.define(made, broadcast(e, e.spelled[made.value], kind_of(made.type.dtype)))


def broadcast(e: Emitter, text: str, kind: str) -> str:
    """A number of the first thread, in all threads of the group."""
    if e.lanes <= WARP:
        return f"{e.use('shuffle', intrinsic('warps.shuffle', 'idx', kind))}({text}, i32(0))"
    size = kind_bytes(kind)
    at = e.scratch(size)
    if e.loops:
        e.sync()
    put = e.use("put_part", intrinsic("warps.put", kind))
    e.line(f"{put}({at}, {text}, {first_lane(e)})")
    e.sync()
    return f"{e.use('all_parts', intrinsic('warps.get', 'reduce_sum', kind, 1))}({at})"
