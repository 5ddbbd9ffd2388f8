"""Reductions: within the registers of a thread, over the lanes of a warp, over the warps."""

from __future__ import annotations

from math import prod

from tessera.numerics import DType
from tessera.tile.cuda.emit.elementwise import number
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import padded
from tessera.tile.ir.ir import For, Op, SSAValue, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import RegisterLayout


@emits(*(name for name, op in OPS.items() if op.joined_by))
def _reduction(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    axis, kind, dtype = op.attr["axis"], kind_of(e.dtype(x)), e.dtype(x)
    layout, text = e.layout(x), e.name(x)
    tag = ("u" if dtype.kind == "uint" else "") + kind
    axes = range(len(layout.shape)) if axis is None else [axis]
    for a in axes:
        if layout.overhangs(a):
            text = inside_only(e, text, layout, a, kind, neutral(op.name, dtype))
    apart = made.value in apart_in_loops(e)
    for a in sorted(axes, reverse=True):
        text = reduced(e, text, layout, a, op.name, tag, apart)
        layout = layout.drop(a)
    if axis is None:
        text = f"{e.use('pick', 'use(fragments.pick(0))')}({text})"
    elif not layout.shape:
        text = f"{e.use('pick', 'use(fragments.pick(0))')}({text})"
    e.define(made, text)


def neutral(name: str, dtype: object) -> str:
    """What changes nothing, as text in the header."""
    assert isinstance(dtype, DType)
    value = OPS[name].neutral
    assert value is not None, name
    if dtype.kind != "float" and abs(value) == float("inf"):
        value = int(dtype.max if value > 0 else dtype.min)
    return number(value, dtype)


def inside_only(e: Emitter, text: str, layout: RegisterLayout, axis: int, kind: str,
                fill: str) -> str:
    """The fragment with `fill` in registers that lie outside of the tile."""
    make = e.use("inside", f"use(tiles.mask({layout.text!r}, {layout.shape}, {axis}, {kind!r}, "
                 f"{fill}))")
    return f"{make}({text}, i32({layout.shape[axis]} - {e.index(layout, axis)}))"


def apart_in_loops(e: Emitter) -> set[SSAValue]:
    """The reductions over warps in whose loop there is another one. Its barrier stands between what
    threads read of one iteration and what they write in the next."""
    if "reductions apart" not in e.memo:
        found: set[SSAValue] = set()
        for loop in walk(e.function.body):
            if isinstance(loop, For):
                over = [n.outs[0].value for n in loop.body if isinstance(n, Op) and _meets(e, n)]
                found.update(over if len(over) > 1 else ())
        e.memo["reductions apart"] = found
    made = e.memo["reductions apart"]
    assert isinstance(made, set)
    return made


def _meets(e: Emitter, op: Op) -> bool:
    """Whether the warps of a group meet for a reduction, once."""
    axis = op.attr.get("axis")
    return bool(OPS[op.name].joined_by) and axis is not None and any(
        i >= e.warp_bits for i in e.layout(op.args[0]).thread_bits(axis))


def reduced(e: Emitter, text: str, layout: RegisterLayout, axis: int, name: str, tag: str,
            apart: bool = False) -> str:
    """A fragment of layout.drop(axis) with the combined values, in all threads. apart: in a loop,
    what the iteration before read has been read."""
    lanes = tuple(1 << i for i in layout.thread_bits(axis) if i < e.warp_bits)
    warps = tuple(i for i in layout.thread_bits(axis) if i >= e.warp_bits)
    make = e.use(name, f"use(reduce.reduce({name!r}, {tag!r}, {layout.text!r}, {layout.shape}, "
                 f"{axis}, {lanes}))")
    if not warps:
        return f"{make}({text})"
    part = e.fresh("part")
    e.line(f"{part} = {make}({text})")
    return across_warps(e, part, layout, axis, name, tag, warps, apart)


def across_warps(e: Emitter, part: str, layout: RegisterLayout, axis: int, name: str, tag: str,
                 warps: tuple[int, ...], apart: bool) -> str:
    """Each warp writes what it found; after a barrier everybody combines all of them."""
    rest = layout.drop(axis)
    size = 8 if tag[-2:] == "64" else 4
    count, elements = 1 << len(warps), prod(padded(rest.shape))
    at = e.scratch(size * count * elements)
    if e.loops and not apart:
        e.sync()
    warp = " | ".join(f"({e.thread} >> {bit} & 1) << {i}" for i, bit in enumerate(warps))
    number_ = e.once("part_of", f"i32({warp})")
    place = flat_index(e, rest)
    write = e.use("put_parts", f"use(reduce.put({tag!r}, {rest.text!r}, {rest.shape}))")
    first = writer(e, layout, axis)
    e.line(f"{write}({part}, {at} + {size} * ({number_} * {elements} + {place}), "
           f"{first})")
    e.sync()
    read = e.use("get_parts", f"use(reduce.get({name!r}, {tag!r}, {rest.text!r}, "
                 f"{rest.shape}, {count}))")
    return f"{read}({at} + {size} * {place})"


def flat_index(e: Emitter, layout: RegisterLayout) -> str:
    """The thread part of the row-major number of an element of the padded tile."""
    text = "i32(0)"
    for axis, n in enumerate(padded(layout.shape)):
        part = e.index(layout, axis)
        text = part if text == "i32(0)" else f"({text}) * {n} + {part}"
    return f"({text})"


def writer(e: Emitter, layout: RegisterLayout, axis: int) -> str:
    """Whether this thread writes for its warp: the first among those with the same result."""
    bits = sum(1 << i for i in layout.thread_bits(axis) if i < e.warp_bits)
    bits |= sum(1 << i for i in layout.replicas)
    for i in range(len(layout.threads), (e.lanes - 1).bit_length()):
        bits |= 1 << i
    return e.once("writes", f"i32(({e.thread} & {bits}) == 0)")
