"""Whole tiles between memory and registers."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from tessera.numerics import DType, bf16
from tessera.tile.cuda.emit.elementwise import full, number
from tessera.tile.cuda.emit.emitter import INDENT, Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout
from tessera.tile.cuda.emit.memory_operands import (
    MemoryOperand,
    bytes_of,
    element_offset,
    is_wide,
    place_of,
    product,
    requested_width,
    split_address,
)
from tessera.tile.cuda.emit.packed_tiles import load_packed, store_packed
from tessera.tile.cuda.emit.random import rounding_key
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.sentinels import watch_fill, watch_held, watch_load, watch_store
from tessera.tile.cuda.emit.shared_tiles import load_buffer, store_buffer
from tessera.tile.cuda.emit.thread_elements import checked
from tessera.tile.cuda.emit.tile_access import PLAIN, guards_of, parts_of, rounding_of
from tessera.tile.cuda.intrinsics.casts import HALVES
from tessera.tile.cuda.intrinsics.narrow_floats import has_instructions
from tessera.tile.ir.ir import Op, Operand, SSAValue, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import WARP_BITS, RegisterLayout, bits_of, blocked
from tessera.tile.ir.types import TileType, space_of
from tessera.tile.passes.integer_facts import LARGEST, divisor_of
from tessera.tile.passes.overlapping_reads import overlapping_reads
from tessera.tile.passes.written_arguments import written_parameters

LEAST = 16  # bytes, half a sector
LEAST_STORES = 4  # of a thread: two are as many instructions as choosing one of them
VECTOR = 4096  # bytes of what stays in L1 for the groups behind
STREAMING = "L1::no_allocate"  # of a tile that is read once; L1 is for what is read again


@emits("load_tile")
def _load(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    place = checked(e, place_of(e, op.args[0]))
    layout, fill = e.layout(made.value), op.attr["fill"]
    if place.space == "shared":
        e.define(made, load_buffer(e, place, layout, fill, op.attr["vector"],
                                   any_nan(e, place.dtype, made.value)))
        return
    if place.dtype.packed:
        if op.attr["vector"]:
            e.note(f"{place.name}: elements below a byte are read by words, whatever vector= says")
        e.define(made, load_packed(e, place, layout, fill))
        return
    wanted, layout = layout, coalesced(place, layout)
    axis, width = requested_width(e, place, layout, op.attr["vector"])
    guards, bounds = guards_of(e, place, layout)
    more = ", True" if has_instructions(place.dtype, e.generation) else ""
    more += ", True" * any_nan(e, place.dtype, made.value)
    shares = 0 <= axis and begins_amid(e, place, layout.shape[axis])
    cache = "" if is_read_again(e, op, place, shares) or stores_as_much(e, op, place) else STREAMING
    def call(width: int, guards: tuple[str, ...], bounds: list[str]) -> str:
        text = (f"use(tiles.load('global', {place.dtype.name!r}, {layout.text!r}, {layout.shape}, "
                f"{axis}, {width}, {guards}, {number(fill, place.dtype)}, {cache!r}{more}))")
        args = [address(e, place, layout), *strides(e, place, layout, axis), *bounds]
        return f"{e.use(f'load_{place.name}', text)}({', '.join(args)})"

    found = call(width, guards, bounds)
    if op.attr["vector"] is None and (whole := whole_box(e, place, layout, width)):
        inside, wide = whole
        name = e.fresh(place.name)
        wider = call(wide, ("",), [])
        e.line(f"if {inside}:")
        e.line(f"{INDENT}{name} = {wider}")
        e.line("else:")
        e.line(f"{INDENT}{name} = {found}")
        found = name
    e.define(made, converted(e, found, layout, wanted, place))
    watch_load(e, place, wanted, e.name(made.value))


def whole_box(e: Emitter, place: MemoryOperand, layout: RegisterLayout, width: int
              ) -> tuple[str, int] | None:
    """Of a tensor of one axis that is no multiple of 16 bytes long: the condition under which a
    box is inside, which is all but the last, and how many neighbours an access may move then. None
    where it moves as many anyway."""
    (offset, *more), t = place.offsets, place.extents[0]
    if more or place.name not in e.facts.aligned or not e.known.natural(offset) or (
            is_wide(e, t) or layout.overhangs(0)):
        return None
    wide = min(layout.run(0), 128 // place.dtype.bits, e.known.divisor(offset),
               divisor_of(place.shape[0]))
    return (f"i32({e.name(offset)}) <= i32({t} - {place.shape[0]})", wide) \
        if wide > width else None


def begins_amid(e: Emitter, place: MemoryOperand, many: int) -> bool:
    """Whether accesses along the rows of memory may begin at no multiple of LEAST bytes, of tiles
    with as many neighbours at least."""
    last, each = len(place.extents) - 1, place.dtype.bits // 8
    known = min(e.known.divisor(place.offsets[last]),
                e.known.extent(place.texts[last]) if last else LARGEST)
    return many * each >= LEAST and (place.name not in e.facts.aligned or known * each < LEAST)


def is_read_again(e: Emitter, op: Op, place: MemoryOperand, shares: bool = False) -> bool:
    """Whether all groups read a tile, or this one does in another loop over the same places, or by
    loads that overlap, or its accesses begin amid sectors, which the next ones share (shares); of
    a tensor that nobody writes, as the L1 cache does not hear of what other multiprocessors do."""
    if _is_written(e, place):
        return False
    if "overlapping" not in e.memo:
        e.memo["overlapping"] = overlapping_reads(e.function)
    if op.outs[0].value in e.memo["overlapping"]:  # type: ignore[operator]
        return True
    return shares or all(map(e.known.in_all_groups, place.offsets)) or (
        passes(e)[_box_origin(e, op)] > 1 or is_vector_of_many(e, op, place))


def _is_written(e: Emitter, place: MemoryOperand) -> bool:
    if "written" not in e.memo:
        e.memo["written"] = written_parameters(e.function)
    return place.name in e.facts.shared or place.name in e.memo["written"]  # type: ignore[operator]


def stores_as_much(e: Emitter, op: Op, place: MemoryOperand) -> bool:
    """Whether the kernel stores tiles as large as this one, which nobody writes. What only reads
    gains where loads pass L1 by, what writes as much loses: without and with it, us (NVIDIA H200,
    2026-11-28, in turn) the largest down [524288, 64] of bf16 23.0 and 19.3, a masked mean of
    tokens 32.1 and 28.3, losses of rows of 16384 36.7 and 35.5; running sums down [16384, 4096]
    of f32 158 and 179, RMS norm's gradient of rows of 256 103.3 and 107.4, SwiGLU 93.6 and 95.1 or
    99.7, from run to run."""
    if "stored" not in e.memo:
        stores = [e.type(n.args[1]) for n in walk(e.function.body)
                  if isinstance(n, Op) and n.name == "store_tile"
                  and space_of(e.type(n.args[0])) == "global"]
        e.memo["stored"] = max((prod(t.shape) for t in stores if isinstance(t, TileType)),
                               default=0)
    made = op.outs[0].type
    assert isinstance(made, TileType)
    return prod(made.shape) <= e.memo["stored"] and not _is_written(e, place)  # type: ignore


def is_vector_of_many(e: Emitter, op: Op, place: MemoryOperand) -> bool:
    """Whether groups that differ along an axis of the grid read the same few bytes, such as the
    numbers of columns in each block of rows. Past L1 these come from one place of L2 each time: a
    batch norm's loop over [200704, 256] with four such vectors took 294 us, where one with as many
    bytes and a number for each row takes 72 (NVIDIA H200, 2026-11-27)."""
    if "grid axes" not in e.memo:
        e.memo["grid axes"] = {n.attr.get("axis") for n in walk(e.function.body)
                               if isinstance(n, Op) and n.name == "group_id"}
    made = op.outs[0].type
    assert isinstance(made, TileType)
    if prod(made.shape) * place.dtype.bits > 8 * VECTOR:
        return False
    axes = [e.known.group_axes(x) for x in place.offsets]
    return None not in axes and set().union(*axes) < e.memo["grid axes"]  # type: ignore


def any_nan(e: Emitter, dtype: DType, value: SSAValue) -> bool:
    """Whether all that reads a tile of codes makes 16 bits of it, where any NaN will do."""
    if not has_instructions(dtype, e.generation):
        return False
    if "halves" not in e.memo:
        e.memo["halves"] = Counter(
            n.args[0] for n in walk(e.function.body) if isinstance(n, Op) and n.name == "convert"
            and n.outs[0].type.dtype.name in HALVES)
    found = e.memo["halves"]
    assert isinstance(found, Counter)
    return 0 < e.readers.get(value, 0) == found[value]


def passes(e: Emitter) -> Counter[Any]:
    """How many loads there are by the places that they go through."""
    if "passes" not in e.memo:
        loads = (n for n in walk(e.function.body) if isinstance(n, Op) and n.name == "load_tile")
        e.memo["passes"] = Counter(places for n in loads if (places := _box_origin(e,
                                                                                   n)) is not None)
    found = e.memo["passes"]
    assert isinstance(found, Counter)
    return found


def _box_origin(e: Emitter, load: Op) -> tuple | None:
    """A tensor, a box, and where it is: in a loop any place of the loop is the same."""
    view = e.made_by.get(load.args[0])
    if view is None or view.name != "view" or not any(x in e.known.loops for x in view.args[1:]):
        return None
    return view.args[0], view.attr["box"], tuple(
        "loop" if x in e.known.loops else x for x in view.args[1:])


@emits("store_tile")
def _store(e: Emitter, op: Op) -> None:
    target, value = op.args
    place = checked(e, place_of(e, target))
    if isinstance(e.type(value), TileType):
        layout, x = e.layout(value), unrounded(e, value, place, rounding_of(place))
        watch_store(e, place, layout, value)
        watch_held(e, op, place, layout)
        exact = place.dtype is bf16 and x == e.name(value) and is_rounded(e, value)
    else:
        (layout, x), exact = filled(e, place, e.name(value)), False
        watch_fill(e, place, layout, value, x)
    if place.space == "shared":
        store_buffer(e, place, layout, x)
    elif place.dtype.packed:
        store_packed(e, place, layout, x)
    else:
        store_global(e, place, layout, x, exact)


def store_global(e: Emitter, place: MemoryOperand, layout: RegisterLayout, x: str,
                 exact: bool = False) -> None:
    """Writes a fragment of whole bytes, rounded as the tensor's policy says. exact: nothing is
    left to round, bf16 numbers are their upper halves."""
    given, layout = layout, coalesced(place, layout)
    x = converted(e, x, given, layout, place)
    axis, width = requested_width(e, place, layout, None)
    given, layout = layout, divided(layout, axis, width, LEAST_STORES)
    x = converted(e, x, given, layout, place)
    guards, bounds = guards_of(e, place, layout)
    owner, how = e.owner(layout), rounding_of(place)
    if exact and how == PLAIN:
        how = ("exact", False)
    cache = "cs" if e.streams else ""
    more = f", {cache!r}, {how[0]!r}, {how[1]}, {has_instructions(place.dtype, e.generation)}" \
        if cache or how != PLAIN or has_instructions(place.dtype, e.generation) else ""
    def call(width: int, guards: tuple[str, ...], bounds: list[str]) -> str:
        text = (f"use(tiles.store('global', {place.dtype.name!r}, {layout.text!r}, {layout.shape}, "
                f"{axis}, {width}, {guards}, {owner is not None}{more}))")
        args = [x, address(e, place, layout), *strides(e, place, layout, axis), *bounds]
        args += [place.base, *rounding_key(e)] if how[0] == "stochastic" else []
        args += [owner] if owner else []
        return f"{e.use(f'store_{place.name}', text)}({', '.join(args)})"

    found = call(width, guards, bounds)
    if whole := whole_box(e, place, layout, width):
        inside, wide = whole
        wider = call(wide, ("",), [])
        e.line(f"if {inside}:")
        e.line(f"{INDENT}{wider}")
        e.line("else:")
        e.line(f"{INDENT}{found}")
    else:
        e.line(found)


def coalesced(place: MemoryOperand, layout: RegisterLayout) -> RegisterLayout:
    """The layout in which a tile moves: its own, unless that scatters what a warp touches at once
    over memory in pieces below LEAST bytes; then one along the rows of memory."""
    last = len(place.extents) - 1
    if last not in place.axes:
        return layout
    axis, size = place.axes.index(last), place.dtype.bits // 8
    bits = bits_of(layout.shape[axis])
    near = {b for b in (*layout.registers, *layout.threads[:WARP_BITS]) if b and b[0] == axis}
    run = next((i for i in range(bits) if (axis, i) not in near), bits)
    if size << run >= min(LEAST, size << bits):
        return layout
    order = [a for a in range(len(layout.shape)) if a != axis] + [axis]
    shape = tuple(layout.shape[a] for a in order)
    threads = 1 << len(layout.threads)
    share = max(1, prod(1 << bits_of(n) for n in shape) // threads)
    made = blocked(shape, threads, min(1 << bits, 16 // size, share))
    return made.permuted([order.index(a) for a in range(len(order))])


def divided(layout: RegisterLayout, axis: int, width: int, least: int = 2) -> RegisterLayout:
    """Among threads that hold the same elements, for what is written once, such as a number of each
    row of a tile: each writes a part, by one instruction of many lanes and not by many instructions
    of a few. axis, width: of an access, whose neighbours stay together; least: accesses of a thread
    for which it pays."""
    if layout.count // width < least:
        return layout
    return layout.spread([(axis, i) for i in range(bits_of(width))])


def converted(e: Emitter, text: str, before: RegisterLayout, after: RegisterLayout,
              place: MemoryOperand) -> str:
    """The fragment in another layout."""
    if before == after:
        return text

    given = e.fresh(place.name)
    e.line(f"{given} = {text}")
    made = e.fresh(place.name)
    e.line(f"{made} = {convert_layout(e, given, before, after, place.dtype)}")
    return made


def unrounded(e: Emitter, value: Operand, place: MemoryOperand,
              how: tuple[str, bool] = PLAIN) -> str:
    """The expression of a tile to store. A cast to the tensor's type, to nearest, is what the
    store does anyway: then what was cast. how: the rounding of this store, and whether it saturates
    """
    made = e.made_by.get(value)
    if made is None or made.name != "convert" or place.dtype.kind != "float":
        return e.name(value)
    source, to = made.args[0], made.outs[0].type.dtype
    cast = made.attr.get("rounding", "nearest_even"), bool(made.attr.get("saturate", False))
    held = isinstance(e.type(source), TileType) and e.dtype(source).kind == "float" \
        and e.dtype(source).bits <= 32
    same = cast == how == rounding_of(place) and how[0] == "nearest_even" and (
        how == PLAIN or place.space == "global" and not to.packed)
    if same and held and to is place.dtype and to.bits <= 16:
        return e.name(source)
    return e.name(value)


def is_rounded(e: Emitter, value: Operand) -> bool:
    """Whether a bf16 tile surely holds bf16 numbers: loaded, or cast. A literal need not be one."""
    made = e.made_by.get(value)
    if made is None or made.outs[0].type.dtype is not bf16:
        return False
    if OPS[made.name].moves and OPS[made.name].effect == "pure":
        return is_rounded(e, made.args[0])
    return made.name == "convert" or (made.name == "load_tile" and made.attr["fill"] == 0)


def filled(e: Emitter, place: MemoryOperand, value: str) -> tuple[RegisterLayout, str]:
    """One number for a whole box: a layout for it, and its fragment."""
    threads = 1 << (e.lanes.bit_length() - 1)
    width = max(1, 128 // max(8, place.dtype.bits))
    layout = blocked(place.shape, threads, 1 << min(bits_of(width), bits_of(place.shape[-1])))
    return layout, full(e, TileType(place.dtype, place.shape, layout.text), value)


def address(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> str:
    """Global address of the thread's first element. Codes of 8 bits in loops are made wider in
    registers, of which there are few beside them."""
    parts = parts_of(e, place, layout)
    few = split_address(e, place, parts) if e.loops and place.dtype.bits == 8 else None
    offset = few or element_offset(e, place, parts)
    return f"{place.base} + {bytes_of(place.dtype, offset)}"


def strides(e: Emitter, place: MemoryOperand, layout: RegisterLayout, axis: int) -> list[str]:
    """Byte distances along the axes (other than `axis`) on which registers differ."""
    out = []
    for a in range(len(layout.shape)):
        if a != axis and any(base[a] for base in layout.bases):
            out.append(bytes_of(place.dtype, product(place.stride(place.axes[a]))))
    return out


__all__ = ["address", "guards_of", "parts_of", "strides"]
