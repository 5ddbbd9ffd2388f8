"""load_vector and store_vector: lane L moves elements width*L .. width*L + width - 1 of a row;
load_pair and store_pair: two elements from where it says. store_span: elements of shared memory to
a tensor, by the copy engine where it can."""

from __future__ import annotations

from tessera.errors import UnsupportedTargetError
from tessera.tile.cuda.emit.emitter import Emitter, intrinsic
from tessera.tile.cuda.emit.memory_operands import MemoryOperand, bytes_of, is_wide, place_of
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.reports import report
from tessera.tile.cuda.emit.sentinels import watch_element, watch_row, watch_span
from tessera.tile.cuda.emit.thread_elements import (
    address,
    checked,
    conditions,
    first_lane,
    flat,
    flat32,
    guard,
    hardware,
    once_per_group,
    pair_guard,
    row_bytes,
    stage_base,
    wide,
)
from tessera.tile.cuda.intrinsics.swizzle import Panel
from tessera.tile.ir.ir import Op, Operand
from tessera.tile.ir.types import Vector

ACCESS_BITS = 128


@emits("load_vector")
def _load(e: Emitter, op: Op) -> None:
    (made,), (row, *index) = op.outs, op.args
    place, width = checked(e, place_of(e, row)), op.attr["width"]
    call = e.use(f"load_{place.name}", _intrinsic(e, "load", place, width))
    where = _arguments(e, place, tuple(index), width)
    e.define(made, f"{call}({where})")
    watch_row(e, place, where, made.value, width, "load")


@emits("store_vector")
def _store(e: Emitter, op: Op) -> None:
    row, vector, *index = op.args
    t = e.type(vector)
    assert isinstance(t, Vector)
    place = checked(e, place_of(e, row))
    saturate = place.space == "global" and place.numeric.policy.saturate
    call = e.use(f"store_{place.name}", _intrinsic(e, "store", place, t.width, saturate=saturate))
    where = _arguments(e, place, tuple(index), t.width)
    watch_row(e, place, where, vector, t.width, "store")
    e.line(f"{call}({e.name(vector)}, {where})")


def _intrinsic(e: Emitter, what: str, place: MemoryOperand, width: int, **options: bool) -> str:
    dtype = place.dtype
    if place.space == "register":
        raise UnsupportedTargetError(f"{what}_vector of an array of a thread", where=e.where,
                                     hint="index its elements")
    if dtype.packed:
        return intrinsic(f"vectors.{what}_packed_row", place.space, dtype.name, width)
    options["hardware"] = hardware(e, dtype)
    if place.space == "shared":
        assert place.buffer is not None
        panel = Panel.of(place.buffer)
        fields = (panel.rows, panel.columns, panel.dtype, panel.swizzle)
        return intrinsic(f"vectors.{what}_shared", fields, width, piece(e, place, width), **options)
    return intrinsic(f"vectors.{what}", dtype.name, width, piece(e, place, width), **options)


def piece(e: Emitter, place: MemoryOperand, width: int) -> int:
    """Elements that one access may move: aligned, and in the row all or none."""
    most = max(1, min(width, ACCESS_BITS // place.dtype.bits))
    if place.space == "shared":
        assert place.buffer is not None
        panel = Panel.of(place.buffer)
        while most > 1 and (panel.columns % most or not panel.aligned(most * panel.size)):
            most //= 2
        return most
    if place.name not in e.facts.aligned:
        return 1
    return min(most, e.known.extent(place.texts[-1]))


def _arguments(e: Emitter, place: MemoryOperand, index: tuple[Operand, ...], width: int) -> str:
    """Where the thread's first element is, and how many elements of the row are left there."""
    ok = guard(e, place, index)
    column = e.once("column", f"i32({e.thread} * {width})")
    left = f"i32({place.extents[-1]} - {column})"
    if is_wide(e, place.extents[-1]):
        left = f"{e.use('near', 'use(tiles.near())')}(i64({place.extents[-1]} - {column}))"
    left = left if ok is None else f"i32({left} * {ok})"
    if place.space == "shared":
        assert place.buffer is not None
        row = flat32(e, place.buffer.shape[:-1], index)
        if place.dtype.packed:
            start = f"i32({stage_base(e, place)} + ({row}) * {row_bytes(e, place)})"
            return f"{start}, {column}, {left}"
        return f"i32({stage_base(e, place)}), i32({row}), {column}, {left}"
    row = flat(e, place.extents[:-1], index)
    if place.dtype.packed:
        return f"{place.base} + ({row}) * {row_bytes(e, place)}, {column}, {left}"
    element = f"({row}) * {place.extents[-1]} + {column}"
    return f"{place.base} + {bytes_of(place.dtype, element)}, {left}"


# --- pairs ----------------------------------------------------------------------------------------
@emits("load_pair")
def _load_pair(e: Emitter, op: Op) -> None:
    place, index = place_of(e, op.args[0]), op.args[1:]
    ok = pair_guard(e, op, place, index)
    call = e.use(f"load_{place.name}", _pair_intrinsic(e, "load", place, ok))
    where = address(e, place, index)
    made = ", ".join(e.spelled[d.value] for d in op.outs)
    e.line(f"{made} = {call}({where}{_last(ok)})")
    for n, d in enumerate(op.outs):
        watch_element(e, place, f"{where} + {4 * n}", d.value, ok, "load")


@emits("store_pair")
def _store_pair(e: Emitter, op: Op) -> None:
    place, pair, index = place_of(e, op.args[0]), op.args[1:3], op.args[3:]
    ok, where = pair_guard(e, op, place, index), address(e, place, index)
    if once_per_group(e, *pair, *index):
        ok = conditions(e, first_lane(e), ok)
    for n, x in enumerate(pair):
        watch_element(e, place, f"{where} + {4 * n}", x, ok)
    call = e.use(f"store_{place.name}", _pair_intrinsic(e, "store", place, ok))
    e.line(f"{call}({where}, {', '.join(map(e.name, pair))}{_last(ok)})")


def _pair_intrinsic(e: Emitter, what: str, place: MemoryOperand, ok: str | None) -> str:
    return intrinsic(f"thread_elements.{what}_pair", place.space, place.dtype.name,
                     piece(e, place, 2), guarded=ok is not None)


def _last(condition: str | None) -> str:
    return "" if condition is None else f", {condition}"


# --- spans ----------------------------------------------------------------------------------------
@emits("store_span")
def _store_span(e: Emitter, op: Op) -> None:
    """Those of a kernel are asked for by different warps, each of which waits until the engine has
    read its own."""
    place, source = place_of(e, op.args[0]), place_of(e, op.args[1])
    begin, count, *index = op.args[2:]
    to, at, n = (e.fresh(name) for name in ("to", "at", "count"))
    e.line(f"{n} = i32({e.name(count)}{_all_inside(e, place, source, op)})")
    e.line(f"{to} = {address(e, place, tuple(index))}")
    e.line(f"{at} = {address(e, source, (begin,))}")
    watch_span(e, place, to, at, n)
    lane = 32 * e.spans_stored % (-(-e.lanes // 32) * 32)
    e.spans_stored += 1
    engine = e.generation.cluster_groups > 1
    call = e.use("store_span", intrinsic("thread_elements.store_span", e.lanes, lane, engine))
    e.line(f"{call}({to}, {at}, {n}, {e.thread})")


def _all_inside(e: Emitter, place: MemoryOperand, source: MemoryOperand, op: Op) -> str:
    """In checked builds: a factor of the count, 0 where an element would lie outside."""
    if not e.checked:
        return ""
    begin, count, *index = op.args[2:]
    found = [x for x in (guard(e, source, (begin,)), guard(e, place, tuple(index))) if x]
    for where, first in ((source, (begin,)), (place, tuple(index))):
        last = f"i64({flat(e, where.extents, first)}) + {wide(e, count)}"
        size = " * ".join(f"i64({n})" for n in where.extents)
        ok = e.fresh("inside")
        e.line(f"{ok} = i32({last} <= {size})")
        report(e, f"{ok} == 0", f"store_span up to element {{}} of '{where.name}', which has {{}}",
               "bounds", [(last, "i64"), (size, "i64")], lanes=False)
        found.append(ok)
    return "".join(f" * {ok}" for ok in found)
