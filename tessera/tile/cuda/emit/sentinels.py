"""Sentinels: the elements of watched tensors are looked at where a kernel reads or writes them.

Written beside the access, with its guards, so that what a tile holds beyond the edges of its tensor
never counts. What a cast makes is looked at before it, where it shows what is lost.
"""

from __future__ import annotations

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.tile.cuda.emit.emitter import Emitter, intrinsic
from tessera.tile.cuda.emit.memory_operands import (
    MemoryOperand,
    bytes_of,
    element_offset,
    place_of,
    product,
)
from tessera.tile.cuda.emit.registry import after_each
from tessera.tile.cuda.emit.tile_access import guards_of, parts_of, rounding_of
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.sentinels import ANY_FINITE, Limits, limits_of
from tessera.tile.ir.ir import Const, Def, Node, Op, Operand, SSAValue, regions
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import TileType


@dataclass(frozen=True)
class WatchedValue:
    """What is looked at: numbers of a format, of which those that are not between the limits are
    lost and become "inf", "nan" or the largest number, "max". what: 'load', 'store' or 'held'. to:
    the format of a cast, where that of the tensor is another."""

    what: str
    text: str
    dtype: DType
    where: SourceLine | None
    limits: Limits = ANY_FINITE
    becomes: str = ""
    to: DType | None = None


def is_watched(e: Emitter, place: MemoryOperand, what: str = "store") -> bool:
    """Formats below a byte and integers have neither NaN nor infinity: what they lose is counted
    where it is stored."""
    return place.space == "global" and place.name in e.facts.watched and (
        what == "store" or (place.dtype.kind == "float" and not place.dtype.packed))


def watch_load(e: Emitter, place: MemoryOperand, layout: RegisterLayout, x: str) -> None:
    """Elements that a tile was given."""
    if is_watched(e, place, "load"):
        _tile(e, place, layout, WatchedValue("load", x, place.dtype, e.where))


def watch_store(e: Emitter, place: MemoryOperand, layout: RegisterLayout, value: Operand) -> None:
    """Elements of a tile that is about to be written there."""
    if not is_watched(e, place):
        return
    if place.dtype.kind != "float":
        _watch_codes(e, place, layout)
    if (x := _stored(e, place, value)) is not None:
        _tile(e, place, layout, x)


@after_each
def _note_cast(e: Emitter, op: Op) -> None:
    """A cast to a packed format, whose codes will be stored as bytes."""
    if e.facts.watched and op.name == "convert" and isinstance(op.args[0], SSAValue):
        value = op.outs[0].value
        to, source = e.dtype(value), e.dtype(op.args[0])
        if to.packed and source.kind == "float" and isinstance(e.type(value), TileType):
            e.memo.setdefault("packed casts", []).append(op)  # type: ignore[attr-defined]


def _watch_codes(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> None:
    """What was cast to packed formats since the last such store, where the bytes are stored."""
    for op in e.memo.pop("packed casts", []):  # type: ignore[attr-defined]
        x, to = op.args[0], e.dtype(op.outs[0].value)
        t = e.type(x)
        if isinstance(t, TileType) and t.shape == layout.shape and e.layout(x).text == layout.text:
            limits = limits_of(e.dtype(x), to, op.attr.get("rounding", "nearest_even"))
            _tile(e, place, layout, WatchedValue("store", e.name(x), e.dtype(x),
                                                 op.where or e.where, limits, "max", to))


def watch_fill(e: Emitter, place: MemoryOperand, layout: RegisterLayout, value: Operand,
               fragment: str) -> None:
    """A tile of one number, unless that is written down: then it is meant."""
    if is_watched(e, place) and not isinstance(value, Const):
        stored = _stored(e, place, value)
        if stored is None or e.dtype(value).kind != "float":
            return
        made = e.fresh("filled")
        e.line(f"{made} = {fragment}")
        _tile(e, place, layout, WatchedValue("store", made, e.dtype(value), stored.where,
                                             *_losses(e.dtype(value), place)))


def watch_held(e: Emitter, op: Op, place: MemoryOperand, layout: RegisterLayout) -> None:
    """Values of the kernel's that are looked at where a tile like them is stored: with its guards,
    for what lies beyond the edges of the tensor is nobody's. Of those that no such store follows
    see `_mark`."""
    if not e.facts.held or place.space != "global" or place.dtype.packed:
        return
    for made in _held_before(e).get(id(op), ((), ()))[0]:
        t = made.type
        if made.value in _marks(e) and isinstance(t, TileType) and t.shape == layout.shape and \
                e.layout(made.value).text == layout.text:
            marks, kind = _marks(e)[made.value]
            where = e.made_by[made.value].where
            _tile(e, place, layout, WatchedValue("held", marks, t.dtype, where), kind)


@after_each
def _mark(e: Emitter, op: Op) -> None:
    """The bad elements of a held line's value are counted at once, with the guards of a tile like
    it that was loaded. Where there is none they are kept as bits, so that its registers need not
    be, and counted where a tile like it is stored."""
    kind = dict(e.facts.held).get(op.where.line) if e.facts.held and op.where else None
    if kind is None or not op.outs:
        return
    value, t = op.outs[0].value, op.outs[0].type
    if isinstance(t, TileType) and t.dtype.kind == "float" and t.layout is not None:
        loaded = _loaded_alike(e, op, value)
        if loaded is not None:
            _tile(e, loaded, e.layout(value), WatchedValue("held", e.name(value), t.dtype,
                                                           op.where), held=kind)
            return
        text = intrinsic("sentinels.marks", kind_of(t.dtype), e.layout(value).count, kind)
        marks = e.fresh("marks")
        e.line(f"{marks} = {e.use('mark_bad', text)}({e.name(value)})")
        _marks(e)[value] = marks, kind


def _loaded_alike(e: Emitter, op: Op, value: SSAValue) -> MemoryOperand | None:
    """Where the last tile of this one's shape and layout in front of an op was loaded from."""
    for load in reversed(_held_before(e)[id(op)][1]):
        place = place_of(e, load.args[0])
        if place.space == "global" and not place.dtype.packed and _alike_tile(
                e, load.outs[0].value, value):
            return place
    return None


def _alike_tile(e: Emitter, x: Operand, value: SSAValue) -> bool:
    t, own = e.type(x), e.type(value)
    return isinstance(x, SSAValue) and isinstance(t, TileType) and isinstance(own, TileType) and \
        t.layout is not None and t.shape == own.shape and e.layout(x).text == e.layout(value).text


def _marks(e: Emitter) -> dict[SSAValue, tuple[str, str]]:
    """The variable with a value's bits, and what counts as bad."""
    return e.memo.setdefault("marks", {})  # type: ignore[return-value]


Before = tuple[tuple[Def, ...], tuple[Op, ...]]


def _held_before(e: Emitter) -> dict[int, Before]:
    """By op: the values of held lines that are there when it runs, of a line the last; and the
    loads of tiles in front of it."""
    if "held" not in e.memo:
        found: dict[int, Before] = {}
        _follow(e.function.body, frozenset(n for n, _ in e.facts.held), {}, [], found)
        e.memo["held"] = found
    return e.memo["held"]  # type: ignore[return-value]


def _follow(nodes: tuple[Node, ...], lines: frozenset[int], there: dict[int, Def],
            loads: list[Op], found: dict[int, Before]) -> None:
    there, loads = dict(there), list(loads)
    for node in nodes:
        if isinstance(node, Op):
            found[id(node)] = tuple(there.values()), tuple(loads)
            if node.name == "load_tile":
                loads.append(node)
            if node.where is not None and node.where.line in lines and node.outs:
                there[node.where.line] = node.outs[0]
        for inner in regions(node):
            _follow(inner, lines, there, loads, found)


def watch_element(e: Emitter, place: MemoryOperand, at: str, value: Operand, ok: str | None,
                  what: str = "store") -> None:
    """One element that a thread writes to an address (what="load": has read there) where `ok`. at:
    of packed formats the number of the element."""
    if not is_watched(e, place, what) or isinstance(value, Const):
        return
    x = _stored(e, place, value) if what == "store" else \
        WatchedValue(what, e.name(value), e.dtype(value), e.where)
    if x is None:
        return
    text = intrinsic("sentinels.element", _site(e, place, x), _itemsize(place),
                     kind_of(x.dtype), _numbers(x.limits), guarded=ok is not None)
    args = [x.text, at, _base(place), _words(e), *([ok] if ok else [])]
    e.line(f"{e.use('count_bad', text)}({', '.join(args)})")


def watch_row(e: Emitter, place: MemoryOperand, where: str, value: Operand, width: int,
              what: str) -> None:
    """Neighbours of a row that a thread moves at once. where: address of the first, and how many
    are inside."""
    if not is_watched(e, place, what) or place.dtype.packed:
        return
    x = _stored(e, place, value) if what == "store" else \
        WatchedValue(what, e.name(value), e.dtype(value), e.where)
    if x is None:
        return
    text = intrinsic("sentinels.row", _site(e, place, x), place.dtype.bits // 8, kind_of(x.dtype),
                     width, _numbers(x.limits))
    e.line(f"{e.use('count_bad', text)}({x.text}, {where}, {place.base}, {_words(e)})")


def watch_span(e: Emitter, place: MemoryOperand, to: str, at: str, count: str) -> None:
    """So many numbers of shared memory, from `at` on, that the group is about to write to `to`."""
    if not is_watched(e, place) or place.dtype.kind != "float":
        return
    x, i = e.fresh("x"), e.fresh("i")
    watched = WatchedValue("store", x, place.dtype, e.where, *_losses(place.dtype, place))
    text = intrinsic("sentinels.element", _site(e, place, watched), _itemsize(place), "f32",
                     _numbers(watched.limits), guarded=True)
    e.sync()
    with e.block(f"for {i} in range(0, {count}, {e.lanes})"):
        mine, read = e.fresh("mine"), e.use("read_word", "use(ptx.memory.ld('shared', 'f32'))")
        e.line(f"{mine} = i32(min({i} + {e.thread}, {count} - 1))")
        e.line(f"{x} = {read}(i32({at} + 4 * {mine}))")
        e.line(f"{e.use('count_bad', text)}({x}, {to} + i64(4 * {mine}), {_base(place)}, "
               f"{_words(e)}, i32({i} + {e.thread} < {count}))")


# --- what is stored -----------------------------------------------------------------------------
def _stored(e: Emitter, place: MemoryOperand, value: Operand) -> WatchedValue | None:
    """What a stored value was cast from, at the line of the cast; else the value, which the store
    rounds. None: integers that were no other numbers."""
    made = e.made_by.get(value)
    if made is None or made.name != "convert" or not _same_representation(e, value, made.args[0]):
        source = e.dtype(value)
        if source.kind != "float":
            return None
        return WatchedValue("store", e.name(value), source, e.where, *_losses(source, place))
    before, to = made.args[0], e.dtype(value)
    rounding, saturate = made.attr.get("rounding", "nearest_even"), made.attr.get("saturate", False)
    limits = limits_of(e.dtype(before), to, rounding)
    return WatchedValue("store", e.name(before), e.dtype(before), made.where or e.where, limits,
                        _fate(to, rounding, saturate))


def _same_representation(e: Emitter, value: Operand, before: Operand) -> bool:
    """Whether the operand of a cast is held as its result is."""
    if isinstance(before, Const) or e.dtype(before).kind != "float":
        return False
    tiles = [isinstance(e.type(x), TileType) for x in (before, value)]
    return tiles == [False, False] or (
        all(tiles) and e.layout(before).text == e.layout(value).text)


def _losses(source: DType, place: MemoryOperand) -> tuple[Limits, str]:
    rounding, saturate = rounding_of(place)
    return limits_of(source, place.dtype, rounding), _fate(place.dtype, rounding, saturate)


def _fate(to: DType, rounding: str, saturate: bool) -> str:
    """What becomes of a number beyond the range of a format."""
    if saturate or rounding == "toward_zero":
        return "max"
    return {"ieee": "inf", "fn": "nan"}.get(to.special, "max")


# --- the text -----------------------------------------------------------------------------------
def _tile(e: Emitter, place: MemoryOperand, layout: RegisterLayout, x: WatchedValue,
          marked: str = "", held: str = "") -> None:
    """marked: x is the bits of what is bad, "any" or "nan". held: it is a value that stays inside,
    of which that is bad."""
    guards, bounds = guards_of(e, place, layout)
    owner = e.owner(layout)
    kind = repr(f"marked {marked}" if marked else kind_of(x.dtype))
    text = f"use(sentinels.tile({_site(e, place, x)}, {_itemsize(place)}, {kind}, " \
           f"{layout.text!r}, {layout.shape}, {guards}, {_numbers(x.limits)!r}, " \
           f"{owner is not None}, {held!r}))"
    steps = [product(place.stride(place.axes[a]))
             for a in range(len(layout.shape)) if any(base[a] for base in layout.bases)]
    at = element_offset(e, place, parts_of(e, place, layout))
    if not place.dtype.packed:
        steps = [bytes_of(place.dtype, step) for step in steps]
        at = f"{place.base} + {bytes_of(place.dtype, at)}"
    args = [x.text, at, *steps, *bounds, _base(place), _words(e), *([owner] if owner else [])]
    e.line(f"{e.use('count_bad', text)}({', '.join(args)})")


def _itemsize(place: MemoryOperand) -> int:
    """Bytes between elements: packed ones are counted, from 0, and have no addresses."""
    return 1 if place.dtype.packed else place.dtype.bits // 8


def _base(place: MemoryOperand) -> str:
    return "i64(0)" if place.dtype.packed else place.base


class _Number(float):
    """A limit as the header of an emitted text writes it."""

    def __repr__(self) -> str:
        return float.__repr__(self).replace("inf", "INF")


def _numbers(limits: Limits) -> Limits:
    low, high = limits
    return _Number(low), _Number(high)


def _site(e: Emitter, place: MemoryOperand, x: WatchedValue) -> int:
    e.sites.append((x.where, place.name, "numerics",
                    (x.what, (x.to or place.dtype).name, x.becomes)))
    return len(e.sites) - 1


def _words(e: Emitter) -> str:
    return e.param("sentinels", "sentinels", "i64")


__all__ = ["is_watched", "watch_element", "watch_fill", "watch_held", "watch_load", "watch_row",
           "watch_span", "watch_store"]
