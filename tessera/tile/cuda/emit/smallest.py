"""The smallest elements of rows: of a thread's registers, of lanes, of warps; see intrinsics."""

from __future__ import annotations

from math import prod

import numpy as np

from tessera.tile.builder.edge_masks import fill_of
from tessera.tile.cuda.emit.elementwise import number
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout
from tessera.tile.cuda.emit.reduce import flat_index, inside_only, part_of, writer
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import reached
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import Bit, RegisterLayout, bits_of

EXCHANGE = 8  # instructions that an element takes through shared memory


@emits("smallest")
def _smallest(e: Emitter, op: Op) -> None:
    (x,), (made,), k = op.args, op.outs, op.attr["k"]
    layout, dtype, text = e.layout(x), e.dtype(x), e.name(x)
    kind = kind_of(dtype)
    tag = ("u" if dtype.kind == "uint" else "") + kind
    last = len(layout.shape) - 1
    if layout.overhangs(last):
        fill = number(fill_of(np.nan, dtype), dtype)
        text = inside_only(e, text, layout, last, kind, fill)
    rows = along_registers(e, layout, k)
    if rows != layout:
        held = e.fresh("rows")
        e.line(f"{held} = {convert_layout(e, text, layout, rows, dtype)}")
        text = held
    lanes = tuple(1 << i for i in rows.thread_bits(last) if i < e.warp_bits)
    find = e.use("smallest", f"use(smallest.find({tag!r}, {rows.text!r}, {rows.shape}, {k}, "
                 f"{lanes}))")
    found = e.fresh("found")
    e.line(f"{found} = {find}({text})")
    if any(i >= e.warp_bits for i in rows.thread_bits(last)):
        found = _across_warps(e, found, rows, k, tag)
    e.define(made, convert_layout(e, found, rows.first(k), layout.first(k), dtype))


def along_registers(e: Emitter, layout: RegisterLayout, k: int) -> RegisterLayout:
    """A layout with as much of a row in a thread as its registers hold of other rows, where that
    is less work than to join the lists of as many lanes."""
    last, wide = len(layout.shape) - 1, 1 << bits_of(k)
    along = [b for b in layout.registers if b[0] == last]
    other = [b for b in layout.registers if b[0] != last]
    lanes = [i for i in layout.thread_bits(last) if i < e.warp_bits]
    if not other or not lanes or EXCHANGE << len(along) >= (
            wide * (5 + bits_of(wide)) * min(len(other), len(lanes))):
        return layout
    moved = min(len(other), len(lanes))
    threads: list[Bit | None] = list(layout.threads)
    for i, bit in zip(lanes[:moved], other[:moved], strict=True):
        along.append(threads[i])  # type: ignore[arg-type]
        threads[i] = bit
    return RegisterLayout(layout.shape, (*along, *other[moved:]), tuple(threads))


def _across_warps(e: Emitter, text: str, layout: RegisterLayout, k: int, tag: str) -> str:
    """Each warp writes what it found; what all read behind a barrier, joined."""
    last, rest = len(layout.shape) - 1, layout.first(k)
    warps = [i for i in layout.thread_bits(last) if i >= e.warp_bits]
    size = kind_bytes(tag)
    count, elements = 1 << len(warps), prod(reached(rest))
    at = e.scratch(size * count * elements)
    if e.loops:
        e.sync()
    part = part_of(e, warps)
    place = flat_index(e, rest)
    put = e.use("put_parts", f"use(reduce.put({tag!r}, {rest.text!r}, {rest.shape}))")
    e.line(f"{put}({text}, i32({at} + {size} * ({part} * {elements} + {place})), "
           f"{writer(e, layout, layout.thread_bits(last))})")
    e.sync()
    get = e.use("get_smallest", f"use(smallest.get({tag!r}, {rest.text!r}, {rest.shape}, {count}))")
    made = e.fresh("found")
    e.line(f"{made} = {get}(i32({at} + {size} * {place}))")
    return made
