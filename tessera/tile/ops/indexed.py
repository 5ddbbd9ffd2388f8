"""gather and scatter: elements and rows of a place, chosen by a tile of positions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics import bool_, i32, i64
from tessera.tile.builder.edge_masks import Along, mask_edge, mask_listed, refuse
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.interpreter.async_copies import wide
from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.interpreter.sanitizer import GROUP, MANY
from tessera.tile.ir.edges import Edge, Listed, Mixed, TileEdges, forget_zero, open_
from tessera.tile.ir.errors import RaceError, RuleError
from tessera.tile.ir.handles import AxisSlice, Handle, TensorRow, TensorSlice, describe, is_number
from tessera.tile.ir.ir import SSAValue
from tessera.tile.ir.numpy_values import array_dtype, convert
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Buffer, GlobalTensor, TileType, Type, View
from tessera.tile.ops.memory import require_inside

MODES = ("store", "add")
KINDS: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
         "or": np.bitwise_or, "xor": np.bitwise_xor, "exchange": lambda old, new: new}


# --- types ----------------------------------------------------------------------------------------
def shape_of(index: tuple[int, ...], attrs: Any) -> tuple[tuple[int, ...], int]:
    """(shape of the tile, its first axis of the index): the index's axes stand for `axis`."""
    before = [a for a in attrs["kept"] if a < attrs["axis"]]
    after = [a for a in attrs["kept"] if a > attrs["axis"]]
    sides = [tuple(attrs["box"][a] for a in side) for side in (before, after)]
    return (*sides[0], *index, *sides[1]), len(before)


def positions_along(shape: Sequence[Any], attrs: Any) -> Any:
    """How many positions there are along `axis`, and the `merged` - 1 in front of it with it."""
    return prod(shape[attrs["axis"] + 1 - attrs.get("merged", 1):attrs["axis"] + 1])


def single_indices(rank: int, attrs: Any) -> list[int]:
    """The axes of the memory that have one index, which is neither a box nor positions."""
    counted = range(attrs["axis"] + 1 - attrs.get("merged", 1), attrs["axis"] + 1)
    return [a for a in range(rank) if a not in attrs["kept"] and a not in counted]


def _require(place: Type, index: Type, what: str) -> TileType:
    if not isinstance(place, GlobalTensor | Buffer) or place.space == "register":
        raise RuleError(f"{what} works on a tensor or shared memory, got {place}",
                        "elements of an array in registers: r[i]")
    if isinstance(index, TileType) and index.dtype is bool_:
        raise RuleError(f"{what} at {index}, a condition and no positions", "choose element by "
                        "element: y[0:64] = ts.tile.where(c, t, ts.tile.load(y[0:64]))")
    if not isinstance(index, TileType) or index.dtype.kind not in ("int", "uint"):
        raise RuleError(f"{what} needs a tile of integers as its index, got {index}",
                        "one element for each lane: x[i]; a box at a number: x[i:i+64]")
    return index


def _gather_rule(types: Any, attrs: Any) -> TileType:
    place, index = types[0], _require(types[0], types[1], "gather")
    return TileType(place.dtype, shape_of(index.shape, attrs)[0])


def _scatter_rule(types: Any, attrs: Any) -> Any:
    value, index = types[1], _require(types[0], types[2], "scatter")
    shape, _ = shape_of(index.shape, attrs)
    if not isinstance(value, TileType) or value.shape != shape:
        raise RuleError(f"scatter of {value}: the index {index} and the rest of the place need "
                        f"a tile of shape {list(shape)}",
                        "reshape it, or slice the place: scatter(y[:, 0:64], index, tile)")
    return ()


def _add_rule(types: Any, attrs: Any) -> Any:
    if types[0].dtype.packed:
        raise RuleError(f"scatter adds to {types[0]}: elements of less than a byte share a word",
                        "mode='store', or a tensor of a wider type")
    return _scatter_rule(types, attrs)


# --- meaning --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Addresses:
    """[G, *shape] addresses, clipped into the memory, and which elements are there."""

    place: MemoryBox
    address: np.ndarray
    on: np.ndarray


def find_places(m: Any, op: Any, base: Any, index: np.ndarray, offsets: Any) -> _Addresses:
    """Where the elements of a tile lie that an index chooses, and which of them are there."""
    attr, axis = op.attr, op.attr["axis"]
    for a in single_indices(len(offsets), attr):
        require_inside(m, op, base.memory, a, offsets[a])
    start, size = np.asarray(offsets[axis], np.int64), positions_along(base.memory.shape, attr)
    at = [np.zeros((1, 1), np.int64) if a == axis else x for a, x in enumerate(offsets)]
    place = MemoryBox(base.memory, tuple(at), attr["box"], attr["kept"], base.stage)
    address, inside = place.addresses(m.groups)
    if not size:
        inside = np.zeros_like(inside)
    shape, first = shape_of(index.shape[1:], attr)
    rank, more = index.ndim - 1, len(shape) - first - (index.ndim - 1)
    number = index.astype(np.int64)
    position = number + start.reshape((-1,) + (1,) * rank)
    here = (position >= 0) & (position < size)
    if attr["limit"]:
        here &= (number >= 0) & (number < attr["limit"])
    spread = (-1, *(1,) * first, *index.shape[1:], *(1,) * more)
    rest = (m.count, *shape[:first], *(1,) * rank, *shape[first + rank:])
    step = np.clip(position, 0, max(size - 1, 0)) * base.memory.strides[axis]
    full = (m.count, *shape)
    address = np.broadcast_to(address.reshape(rest) + step.reshape(spread), full)
    inside = np.broadcast_to(inside.reshape(rest) & here.reshape(spread), full)
    return _Addresses(place, address, inside & wide(m.active_groups(), inside))


def _lane(place: MemoryBox) -> int:
    return GROUP if place.memory.space == "global" else MANY


def _gather_lower(t: OpTracer, x: Any, index: Any, axis: Any = 0, fill: Any = 0) -> Any:
    return gather_of(t, x, index, axis, fill)


@declare(rule=_gather_rule, attrs=("axis", "box", "kept", "limit", "merged", "fill"), run=True,
         effect="read", group=True, lower=_gather_lower,
         samples=(lambda rng: (rng.standard_normal(20), rng.integers(-2, 22, (3, 4))),
                  lambda rng: (rng.standard_normal((9, 8)), rng.integers(0, 9, 5))), positions=1,
         access="scattered")
def gather(m: Any, op: Any, x: Any, index: Any, *offsets: Any, merged: Any = 1) -> Any:
    """Elements of x at the positions in an integer tile: x[index] of a vector x, and for more axes
    the index's axes in place of `axis`: gather(table[:, 0:D], index) are rows of a table. A tuple
    of tiles has the positions along axes that follow each other: gather(x, (row, column)).

    Where a position lies outside of x, the result is `fill`.
    """
    found = find_places(m, op, x, index, offsets)
    memory = x.memory
    access = m.tile_access(found.place, found.address, found.on, _lane(found.place), op.where)
    if access is not None:
        m.sanitizer.read(access)
    if not memory.flat.size:
        return np.full(found.address.shape, op.attr["fill"], array_dtype(memory.numeric.dtype))
    values = memory.read(found.address)
    return np.where(found.on, values, values.dtype.type(op.attr["fill"]))


@declare(rule=_scatter_rule, attrs=("axis", "box", "kept", "limit", "merged"), run=True,
         effect="write", group=True, public=False, positions=2, access="scattered")
def store_scatter(m: Any, op: Any, y: Any, value: Any, index: Any, *offsets: Any,
                  merged: Any = 1) -> None:
    """Writes each element of a tile where the index says; of two at one place one stays."""
    found, memory = find_places(m, op, y, index, offsets), y.memory
    values = np.broadcast_to(value, found.address.shape)[found.on]
    access = m.tile_access(found.place, found.address, found.on, _lane(found.place), op.where)
    if access is not None:
        _check_races(m, op, found, access, values)
        m.sanitizer.wrote(access, values=values)
    if values.size:
        memory.write(found.address[found.on], np.ascontiguousarray(values), m.key)


def _check_races(m: Any, op: Any, found: _Addresses, access: Any, values: np.ndarray) -> None:
    """Raises RaceError for two elements of one group's tile that go to one place and differ."""
    order = np.lexsort((access.group, access.address))
    address, group, v = (x[order] for x in (access.address, access.group, values))
    same = (address[1:] == address[:-1]) & (group[1:] == group[:-1]) & (v[1:] != v[:-1])
    if not same.any():
        return
    one, other = order[int(np.argmax(same))], order[int(np.argmax(same)) + 1]
    memory = access.memory
    place = np.unravel_index(int(access.address[one]) % max(memory.size, 1), memory.shape)
    first, second = sorted(tuple(int(i) for i in np.argwhere(found.on)[k][1:])
                           for k in (one, other))
    m.sanitizer.report(RaceError(
        f"race on '{memory.name}'{list(map(int, place))}: elements {list(first)} and "
        f"{list(second)} of the tile that group {int(access.group[one])} scatters go there and "
        "differ", where=op.where,
        hint="make the positions of one tile distinct, or add: ts.tile.scatter(y, index, tile, "
        "mode='add')"))


def _added(types: Any, attrs: Any) -> list[Along]:
    """What does not exist adds nothing."""
    return [Along(1, i, 0.0, sums=True, always=False, said="scatter")
            for i in range(len(types[1].shape))]


@declare(rule=_add_rule, attrs=("axis", "box", "kept", "limit", "merged"), run=True,
         effect="atomic", group=True, public=False, combines=_added, positions=2,
         access="scattered")
def atomic_scatter(m: Any, op: Any, y: Any, value: Any, index: Any, *offsets: Any,
                   merged: Any = 1) -> None:
    """Adds each element of a tile where the index says, as one step each."""
    found, memory = find_places(m, op, y, index, offsets), y.memory
    access = m.tile_access(found.place, found.address, found.on, _lane(found.place), op.where)
    if access is not None:
        m.sanitizer.wrote(access, atomic=True)
    address = found.address[found.on]
    values = np.broadcast_to(value, found.address.shape)[found.on]
    occurrence = _occurrence(address)
    for k in range(int(occurrence.max(initial=-1)) + 1):  # those at one place follow each other
        at, x = address[occurrence == k], values[occurrence == k]
        memory.write(at, convert(memory.read(at) + x, memory.numeric.dtype))


def _taken_rule(types: Any, attrs: Any) -> TileType:
    place, value, index = types[0], types[1], _require(types[0], types[2], "an atomic")
    if place.dtype.packed:
        raise RuleError(f"an atomic on {place}: elements of less than a byte share a word")
    if attrs["kind"] in ("and", "or", "xor") and place.dtype.kind not in ("int", "uint"):
        raise RuleError(f"atomic_{attrs['kind']} works on integers, got {place}",
                        "let it be of ts.i32 or ts.uint32")
    if not isinstance(value, TileType) or value.shape != index.shape:
        raise RuleError(f"an atomic of {value} at {index}: one number is needed for each position",
                        "a number for all of them, or a tile of their shape")
    return TileType(place.dtype, index.shape)


@declare(rule=_taken_rule, attrs=("kind", "axis", "box", "kept", "limit", "merged", "scope"),
         run=True, effect="atomic", group=True, public=False, positions=2, access="scattered")
def atomic_gather(m: Any, op: Any, y: Any, value: Any, index: Any, *offsets: Any,
                  merged: Any = 1) -> np.ndarray:
    """Updates each element where the index says, as one step each, in any order; the elements
    before, 0 where a position is outside."""
    found, memory = find_places(m, op, y, index, offsets), y.memory
    access = m.tile_access(found.place, found.address, found.on, _lane(found.place), op.where)
    if access is not None:
        m.sanitizer.wrote(access, atomic=True)
    values = np.broadcast_to(value, found.address.shape)[found.on]
    address, f = found.address[found.on], KINDS[op.attr["kind"]]
    old = np.zeros(len(address), array_dtype(memory.numeric.dtype))
    occurrence = _occurrence(address)
    for k in range(int(occurrence.max(initial=-1)) + 1):
        here = occurrence == k
        now = memory.read(address[here])
        old[here] = now
        memory.write(address[here], convert(f(now, values[here]), memory.numeric.dtype))
    out = np.zeros(found.address.shape, old.dtype)
    out[found.on] = old
    return out


def _occurrence(address: np.ndarray) -> np.ndarray:
    """How many of the same number come before each."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][:len(ordered)]
    number = np.arange(len(ordered))
    out = np.empty(len(ordered), np.int64)
    out[order] = number - np.maximum.accumulate(np.where(first, number, 0))
    return out


# --- calls ----------------------------------------------------------------------------------------
@macro()
def scatter(t: OpTracer, y: Any, index: Any, value: Any, axis: Any = 0, *,
            mode: Any = "store") -> None:
    """y[index] = tile at the positions in an integer tile, or with mode='add' y[index] += tile, as
    atomics. For more axes as gather: scatter(table[:, 0:D], index, rows).

    Positions outside of y, and those that the index has no elements for, are left out. Of two
    different elements that mode='store' writes to one place, one stays: a race.
    """
    if mode not in MODES:
        t.fail(f"mode={mode!r} is not known", "'store' or 'add'")
    chosen = _chosen(t, y, index, axis, "scatter")
    index = _only_there(t, chosen.index)
    value = _as_tile(t, value, chosen)
    value = t.memory.storable(value, chosen.base.type.dtype, chosen.base, added=mode == "add")
    name = "store_scatter" if mode == "store" else "atomic_scatter"
    t.ir.emit(name, [chosen.base, value, index, *chosen.offsets], **chosen.attrs)


def update_at(t: OpTracer, name: str, kind: str, x: Any, index: Any, value: Any, scope: str
              ) -> Handle:
    """x[index] = f(x[index], value) at the positions in a tile; the elements before."""
    items = list(index) if isinstance(index, tuple | list) else [index]
    first = next(i for i, item in enumerate(items) if _is_tile(item))
    if not all(map(_is_tile, items[first:])):
        t.fail(f"{name} at {', '.join(map(describe, items))}: tiles of positions stand behind the "
               "numbers", "a tile of one position: ts.tile.full((1,), i, ts.int32)")
    if first:
        x = TensorRow(*((x.base, (*x.index, *items[:first])) if isinstance(x, TensorRow)
                        else (x, tuple(items[:first]))))
    at = items[first] if len(items) == first + 1 else tuple(items[first:])
    chosen = _chosen(t, x, at, 0, name)
    if chosen.attrs["kept"]:
        t.fail(f"{name}: {len(items)} indices for {describe(chosen.base)}, which has "
               f"{t.memory.rank(chosen.base)} axes")
    value = t.memory.storable(_as_tile(t, value, chosen), chosen.base.type.dtype, chosen.base,
                              added=kind != "exchange")
    out = t.ir.emit("atomic_gather", [chosen.base, value, _only_there(t, chosen.index),
                                      *chosen.offsets], t.ir.hint(chosen.base), kind=kind,
                    scope=scope, **chosen.attrs)
    t.facts.declare(out.value, t.facts.of(chosen.index))
    return out


def _is_tile(x: Any) -> bool:
    return isinstance(x, Handle) and isinstance(x.type, TileType)


def gather_of(t: OpTracer, x: Any, index: Any, axis: Any = 0, fill: Any = 0) -> Any:
    """The gathered tile; it knows where its axes lie in x and in what the index was read from."""
    if not is_number(fill):
        t.fail("fill must be a compile-time number")
    chosen = _chosen(t, x, index, axis, "gather")
    out = t.ir.emit("gather", [chosen.base, chosen.index, *chosen.offsets], t.ir.hint(chosen.base),
                    fill=fill, **chosen.attrs)
    before, after = chosen.edges
    of_index = t.facts.of(chosen.index).axes or (None,) * len(chosen.index.type.shape)  # type: ignore
    # a position that does not exist is 0 where it was read: what is gathered there is x[0]
    of_index = tuple(map(forget_zero, of_index))
    if isinstance(of_index[0], Listed) and (before or after):
        gone = Mixed("was reshaped, and rows gathered by it", where=t.position.where())
        of_index = (gone,) * len(of_index)
    if open_(chosen.along):
        zero = chosen.along.zero and not any(map(open_, of_index))
        gone = Mixed("was gathered along an axis that has an edge", zero,
                     where=t.position.where())
        of_index = (gone,) * len(of_index)
    t.facts.declare(out.value, TileEdges.of((*before, *of_index, *after)))
    return out


@dataclass(frozen=True)
class _Chosen:
    """A place, the axis that the index runs along, and the box of the others.

    edges: of the axes before and behind it; along: of the axis itself, in shared memory.
    """

    base: Handle
    index: Handle
    offsets: list[Any]
    attrs: dict[str, Any]
    edges: tuple[tuple[Any, ...], tuple[Any, ...]]
    along: Any = None


def _chosen(t: OpTracer, x: Any, index: Any, axis: Any, what: str) -> _Chosen:
    several = list(index) if isinstance(index, tuple | list) else [index]
    several = [_position(t, i, what) for i in several]
    if isinstance(x, Handle) and isinstance(x.type, View):
        if len(several) > 1:
            t.fail(f"{what} by several tiles of positions from a view",
                   f"name the tensor: ts.tile.{what}(x[:, :, 0:64], (i, j), ...)")
        return _of_view(t, x, _signed(t, several[0]), axis, what)
    base, parts = _region(t, x, what)
    shown = [a for a, p in enumerate(parts) if isinstance(p, AxisSlice)]
    start = _axis(t, axis, len(shown), what)
    counted = shown[start:start + len(several)]
    index, along = several[0], counted[-1]
    if len(several) > 1:
        index = _row_major(t, base, parts, several, counted, what)
        parts = [0 if a in counted[:-1] else p for a, p in enumerate(parts)]
        shown = [a for a in shown if a not in counted[:-1]]
    offsets, box, edges, limit = [], [], [], 0
    for a, p in enumerate(parts):
        if a == along:
            lo, extent = (0, 1) if p.lo is None and p.hi is None else t.memory.slice_box(base, a, p)
            limit = 0 if p.lo is None and p.hi is None else extent
            extent = 1
        elif isinstance(p, AxisSlice):
            lo, extent = t.memory.slice_box(base, a, p)
            edges.append((a < along, t.memory.edge_in(base, a, lo, extent)))
        else:
            t.memory.require_index(p)
            if not t.ir.is_uniform(p):
                t.fail(f"{what} at a place that depends on the lane", "a tile belongs to the group")
            lo, extent = p, 1
        offsets.append(lo)
        box.append(extent)
    hidden = t.memory.leading(base)
    skip = len(hidden)
    attrs = {"axis": skip + along, "box": (1,) * skip + tuple(box), "limit": limit,
             "kept": tuple(skip + a for a in shown if a != along)}
    if len(several) > 1:
        attrs["merged"] = len(several)
    sides = tuple(tuple(e for first, e in edges if first == want) for want in (True, False))
    return _Chosen(base, _signed(t, index), [*hidden, *offsets], attrs, sides,  # type: ignore
                   t.facts.of(base).at(along) if isinstance(base.type, Buffer) else None)


def _position(t: OpTracer, index: Any, what: str) -> Any:
    if isinstance(index, TensorRow) or isinstance(index, Handle) and isinstance(
            index.type, View | Buffer):
        index = t.call_op(OPS["load"], [index], {})
    return t.ir.value_of(index)


def _row_major(t: OpTracer, base: Handle, parts: list[Any], several: list[Any], axes: list[int],
               what: str) -> Any:
    """Positions along axes that follow each other as positions along all of them, -1 for what is
    outside along one."""
    if not isinstance(base.type, GlobalTensor):
        t.fail(f"{what} by several tiles of positions from {describe(base)}",
               "let the buffer have one axis: s[i * n + j]")
    whole = all(isinstance(parts[a], AxisSlice) and parts[a].lo is None and parts[a].hi is None
                for a in axes)
    if len(axes) < len(several) or axes != [*range(axes[0], axes[-1] + 1)] or not whole:
        t.fail(f"{what} by {len(several)} tiles of positions: they are of axes that follow each "
               "other, whole ones", f"ts.tile.{what}(x[:, :, 0:64], (i, j), ...)")
    at: Any = 0
    inside: Any = True
    for a, index in zip(axes, several, strict=True):
        kind = index.type.dtype.kind if isinstance(index, Handle) else (
            "int" if isinstance(index, int) else "")
        if kind not in ("int", "uint"):
            t.fail(f"{what} needs tiles of integers as its index, got {describe(index)}")
        extent = t.memory.extent(base, a)
        wide = t.ir.cast(index, i64) if isinstance(index, Handle) else index
        here = t.ir.arithmetic("and", [t.ir.arithmetic("ge", [wide, 0]),
                                       t.ir.arithmetic("lt", [wide, extent])])
        inside = here if inside is True else t.ir.arithmetic("and", [inside, here])
        at = t.ir.arithmetic("add", [t.ir.arithmetic("mul", [at, extent]), wide])
    return t.ir.arithmetic("where", [inside, at, -1])


def _of_view(t: OpTracer, x: Handle, index: Handle, axis: Any, what: str) -> _Chosen:
    """A box that has a name already: the op that made it says where it lies."""
    made = t.values.defined_by.get(x.value)
    if made is None or made.name != "view":
        t.fail(f"{what} of a view that was transposed", "transpose the tile: gather(x, index).T")
    kept, box = made.attr["kept"], made.attr["box"]
    at = _axis(t, axis, len(kept), what)
    facts = t.facts.of(x)
    edges = [facts.at(i) for i in range(len(kept))]
    attrs = {"axis": kept[at], "limit": box[kept[at]], "kept": kept[:at] + kept[at + 1:],
             "box": tuple(1 if a == kept[at] else n for a, n in enumerate(box))}
    source = made.args[0]
    assert isinstance(source, SSAValue)
    base = Handle(source, t.values.type_of_value(source))
    offsets = [Handle(v, t.values.type_of_value(v)) if isinstance(v, SSAValue) else v
               for v in made.args[1:]]
    in_shared = isinstance(base.type, Buffer)
    return _Chosen(base, index, offsets, attrs, (tuple(edges[:at]), tuple(edges[at + 1:])),
                   edges[at] if in_shared else None)


def _region(t: OpTracer, x: Any, what: str) -> tuple[Handle, list[Any]]:
    """x as a tensor or buffer and an index of all of its axes."""
    if isinstance(x, TensorSlice):
        base, parts = x.base, list(x.parts)
    elif isinstance(x, TensorRow):
        base, parts = x.base, list(x.index)
    else:
        base, parts = x, []
    if not isinstance(base, Handle) or not isinstance(base.type, GlobalTensor | Buffer):
        t.fail(f"{what} of {describe(x)}: it works on a tensor, a buffer or a slice of one",
               f"ts.tile.{what}(x, index, ...): the place comes first")
    if isinstance(base.type, Buffer) and base.type.stages > 1:
        t.fail(f"{what} of a buffer with stages", "choose one: buffers[stage]")
    rank = t.memory.rank(base)
    return base, parts + [AxisSlice(None, None, ":")] * (rank - len(parts))


def _axis(t: OpTracer, axis: Any, rank: int, what: str) -> int:
    axis = t.ir.constant_int(axis, "axis")
    if not -rank <= axis < rank:
        t.fail(f"{what} along axis {axis} of a place with {rank} axes")
    return axis % rank


def _signed(t: OpTracer, index: Any) -> Any:
    """The index in a type that can say -1, and hold what it does."""
    if not isinstance(index, Handle):
        t.fail(f"a place needs a tile of integers as its index, got {describe(index)}")
    if not isinstance(index.type, TileType) or index.type.dtype.kind not in ("int", "uint"):
        return index
    dtype = index.type.dtype
    if dtype.bits < 32:
        return t.ir.cast(index, i32)
    return t.ir.cast(index, i64) if dtype.name == "uint32" else index


def _only_there(t: OpTracer, index: Handle) -> Handle:
    """The index with positions outside of everything where it reaches beyond its tensor."""
    for axis, edge in enumerate(t.facts.of(index).axes):
        if isinstance(edge, Mixed):
            refuse(t.ir, "scatter", edge)
        fill = -1 if index.type.dtype.kind == "int" else index.type.dtype.max
        if isinstance(edge, Listed):
            return mask_listed(t.ir, index, edge, fill)
        if isinstance(edge, Edge) and not edge.inside:
            index = mask_edge(t.ir, index, axis, edge, fill)
    return index


def _as_tile(t: OpTracer, value: Any, chosen: _Chosen) -> Handle:
    """What is scattered: a tile, a place (loaded), or one number everywhere."""
    if isinstance(value, TensorRow) or isinstance(value, Handle) and isinstance(
            value.type, View | Buffer):
        value = t.call_op(OPS["load"], [value], {})
    value = t.ir.value_of(value)
    if isinstance(value, Handle) and isinstance(value.type, TileType):
        return value
    if not isinstance(value, Handle):
        dtype = chosen.base.type.dtype
        value = t.ir.to(value, dtype if dtype.kind != "float" else dtype.compute)
    if isinstance(chosen.index.type, TileType):
        shape, _ = shape_of(chosen.index.type.shape, chosen.attrs)
        return t.ir.emit("broadcast_to", [value], shape=shape)
    return value


__all__ = ["KINDS", "gather", "gather_of", "scatter", "shape_of", "update_at"]
