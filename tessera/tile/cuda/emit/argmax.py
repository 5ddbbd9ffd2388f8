"""Positions of the largest and smallest elements: the first one on ties; NaN is beyond all numbers.

A thread reduces (value, position) pairs in the order of positions, lanes and warps exchange theirs.
"""

from __future__ import annotations

from math import prod

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.reduce import flat_index, inside_only, neutral, part_of, writer
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.argmax import rest_of
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import reached
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import RegisterLayout


@emits("argmax", "argmin")
def _position_of(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    layout, dtype, text = e.layout(x), e.dtype(x), e.name(x)
    tag = ("u" if dtype.kind == "uint" else "") + kind_of(dtype)
    axis = op.attr["axis"]
    axes = tuple(range(len(layout.shape))) if axis is None else (axis,)
    for a in axes:
        if layout.overhangs(a):
            text = inside_only(e, text, layout, a, kind_of(dtype), neutral(op.name, dtype))
    at = _position(e, layout, axes)
    head = f"{op.name!r}, {tag!r}, {layout.text!r}, {layout.shape}, {axes}"
    lanes = tuple(1 << i for i in _bits(layout, axes) if i < e.warp_bits)
    find = e.use(f"find_{op.name}", f"use(argmax.find({head}, {lanes}))")
    values, places = e.fresh("best"), e.fresh("at")
    e.line(f"{values}, {places} = {find}({text}, {at})")
    if any(i >= e.warp_bits for i in _bits(layout, axes)):
        places = _across_warps(e, op.name, tag, layout, axes, values, places)
    rest = rest_of(layout, axes)
    e.define(made, places if rest.shape else
             f"{e.use('pick', 'use(fragments.pick(0))')}({places})")


def _bits(layout: RegisterLayout, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(i for a in axes for i in layout.thread_bits(a)))


def _position(e: Emitter, layout: RegisterLayout, axes: tuple[int, ...]) -> str:
    """The thread part of the position: along one axis, or in the tile row by row."""
    text = "i32(0)"
    for a in axes:
        part = e.index(layout, a)
        text = part if text == "i32(0)" else f"({text}) * {layout.shape[a]} + {part}"
    return f"i32({text})"


def _across_warps(e: Emitter, name: str, tag: str, layout: RegisterLayout, axes: tuple[int, ...],
                  values: str, places: str) -> str:
    """As reduce.reduced across warps, for pairs: the emitted name of the positions."""
    rest, bits = rest_of(layout, axes), _bits(layout, axes)
    warps = [i for i in bits if i >= e.warp_bits]
    size = kind_bytes(tag)
    count, elements = 1 << len(warps), prod(reached(rest))
    first, second = e.scratch(size * count * elements), e.scratch(4 * count * elements)
    if e.loops:
        e.sync()
    number = part_of(e, warps)
    place = flat_index(e, rest)
    writes = writer(e, layout, bits)
    for text, at, how, n in ((values, first, tag, size), (places, second, "i32", 4)):
        put = e.use("put_parts", f"use(reduce.put({how!r}, {rest.text!r}, {rest.shape}))")
        e.line(f"{put}({text}, i32({at} + {n} * ({number} * {elements} + {place})), {writes})")
    e.sync()
    get = e.use("get_best", f"use(argmax.get({name!r}, {tag!r}, {rest.text!r}, {rest.shape}, "
                f"{count}))")
    made = e.fresh("at")
    e.line(f"{made} = {get}(i32({first} + {size} * {place}), i32({second} + 4 * {place}))")
    return made
