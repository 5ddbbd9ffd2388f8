"""Atomic updates of elements of global and shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.tile.builder import rules
from tessera.tile.builder.edge_masks import Along
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.interpreter.async_copies import wide
from tessera.tile.interpreter.sanitizer import GROUP
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle, TensorRow, describe, is_number
from tessera.tile.ir.numpy_values import array_dtype, convert
from tessera.tile.ir.op_record import declare, macro
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View, is_lane
from tessera.tile.ops.indexed import KINDS, update_at
from tessera.tile.ops.memory import addresses, touch

SCOPES = ("group", "device", "system")


def _rule(types: Any, attrs: Any) -> Any:
    place, value, *index = types
    if place.space == "register":
        raise RuleError(f"an atomic on {place}: registers belong to one lane", "write r[i] += x")
    _require_kind(place, attrs["kind"])
    return Scalar(place.dtype, _is_group_uniform(types))


def _is_group_uniform(types: Any) -> bool:
    """Whether place and values are the group's: then it updates once, outside of conditions of
    lanes, and all learn what was there."""
    return not any(map(is_lane, types[1:]))


def _require_kind(place: Any, kind: str) -> None:
    """Memory whose elements can be updated so."""
    if kind in ("and", "or", "xor") and place.dtype.kind not in ("int", "uint"):
        raise RuleError(f"atomic_{kind} works on integers, got {place}",
                        "let it be of ts.i32 or ts.uint32")
    if place.dtype.packed:
        raise RuleError(f"an atomic on {place}: elements of less than a byte share a word")


def memory_order(op: Any, alone: bool, read: bool) -> str:
    """What an update orders: relaxed | release | acq_rel. alone: once for the group; read: whether
    something reads its result."""
    if op.attr["scope"] == "group" or not (op.attr.get("release") or alone and read):
        return "relaxed"
    return "acq_rel" if read else "release"


def _each(m: Any, op: Any, memory: Any, active: np.ndarray, address: np.ndarray, new: Any
          ) -> np.ndarray:
    """One after the other, in order of the lanes; returns what each saw before. new: (i, what was
    there [1]) -> what is there then, None where nothing is written."""
    old, changed = np.empty(len(address), array_dtype(memory.numeric.dtype)), []
    for i in range(len(address)):
        now = memory.read(address[i:i + 1])
        old[i] = now[0]
        made = new(i, now)
        if made is not None:
            memory.write(address[i:i + 1], made)
        changed.append(made is not None and bool(made[0] != now[0]))
    _publish(m, op, memory, active, address, np.array(changed, bool))
    return old


def _publish(m: Any, op: Any, memory: Any, active: np.ndarray, address: np.ndarray,
             changed: np.ndarray) -> None:
    """Tells the sanitizer what the updates order."""
    if m.sanitizer is None or memory.space != "global":
        return
    alone = active.shape[1] == 1
    read = op.outs[0].value in m.sanitizer.clocks.observed
    order = memory_order(op, alone, read)
    if order != "relaxed":
        rows, lanes = np.nonzero(active)
        lane = np.full(len(rows), GROUP, np.int32) if alone else lanes.astype(np.int32)
        m.sanitizer.updated(m.access(memory, address, rows, lane, op.where), changed, order, read)


@declare(rule=_rule, attrs=("kind", "scope", "release"), run=True, effect="atomic", public=False,
         access="element")
def atomic(m: Any, op: Any, place: Any, value: Any, *index: Any, release: Any = False) -> Any:
    """memory[index] = f(memory[index], value) as one step; the result is what was there. release:
    whoever sees that sees what the group has written before."""
    return _update(m, op, place, index, value, KINDS[op.attr["kind"]])


def _update(m: Any, op: Any, place: Any, index: Any, value: Any, f: Any,
            again: Any = None) -> np.ndarray:
    address = addresses(m, op, place, index)
    memory = place.memory
    shape = np.broadcast_shapes(address.shape, np.shape(value))
    active = m.active(shape)
    out = np.zeros(active.shape, value.dtype)
    if not active.any() or not memory.flat.size:
        return out
    full = np.broadcast_to(address, active.shape)
    touch(m, op, memory, full, True, "atomic")
    values = np.broadcast_to(value, active.shape)[active]
    dtype = memory.numeric.dtype
    out[active] = _each(m, op, memory, active, full[active],
                        lambda i, now: convert(f(now, values[i:i + 1]), dtype))
    return out


@declare(rule=lambda types, attrs: _cas_rule(types, attrs), attrs=("scope",), run=True,
         effect="atomic", public=False, access="element")
def compare_exchange(m: Any, op: Any, place: Any, expected: Any, value: Any, *index: Any) -> Any:
    """memory[index] = value where it was `expected`; the result is what was there."""
    shape = np.broadcast_shapes(np.shape(expected), np.shape(value))
    address = addresses(m, op, place, index)
    active = m.active(np.broadcast_shapes(shape, address.shape))
    out = np.zeros(active.shape, value.dtype)
    if not active.any():
        return out
    full = np.broadcast_to(address, active.shape)
    touch(m, op, place.memory, full, True, "atomic")
    old = np.broadcast_to(expected, active.shape)[active]
    new = np.broadcast_to(value, active.shape)[active]
    out[active] = _each(m, op, place.memory, active, full[active],
                        lambda i, now: new[i:i + 1] if now[0] == old[i] else None)
    return out


def _cas_rule(types: Any, attrs: Any) -> Any:
    place = types[0]
    if place.dtype.bits not in (16, 32, 64) or place.space == "register":
        raise RuleError(f"atomic_cas works on 16, 32 or 64 bits in memory, got {place}")
    return Scalar(place.dtype, _is_group_uniform(types))


NEUTRAL = {"add": 0.0, "min": np.inf, "max": -np.inf, "and": -1, "or": 0, "xor": 0}


def _added(types: Any, attrs: Any) -> list[Along]:
    """Elements of all groups meet in memory: those that do not exist change nothing there."""
    if attrs["kind"] not in NEUTRAL:
        return []
    neutral = NEUTRAL[attrs["kind"]]
    return [Along(1, i, neutral, sums=attrs["kind"] == "add", always=neutral != 0, covered=0,
                  said="an atomic")
            for i in range(len(types[1].shape))]


@declare(rule=lambda types, attrs: _tile_rule(types, attrs), attrs=("kind", "scope"), run=True,
         effect="atomic", group=True, public=False, combines=_added, layouts="any", access="tile")
def atomic_tile(m: Any, op: Any, target: Any, value: Any) -> Any:
    """Each element of a tile into a box; elements outside are left out."""
    address, inside = target.addresses(m.groups)
    on = inside & wide(m.active_groups(), inside)
    access = m.tile_access(target, address, on, GROUP, op.where)
    if access is not None:
        m.sanitizer.wrote(access, atomic=True)
    full = np.broadcast_to(m.widen(value, address.ndim - 1), address.shape)
    memory, f = target.memory, KINDS[op.attr["kind"]]
    for g in range(m.count):  # one group after the other: within a group addresses differ
        at = address[g][on[g]]
        memory.write(at, convert(f(memory.read(at), full[g][on[g]]), memory.numeric.dtype))


def _tile_rule(types: Any, attrs: Any) -> Any:
    target, value = types
    if not isinstance(target, View | Buffer) or not isinstance(value, TileType):
        raise RuleError(f"an atomic of {value} into {target}")
    _require_kind(target, attrs["kind"])
    if target.shape != value.shape:
        raise RuleError(f"an atomic of {value} into {target}: the extents differ",
                        rules.misfit(target.shape, value.shape))
    return ()


# --- calls ------------------------------------------------------------------------------------
def _element(t: OpTracer, target: Any, index: Any, what: str) -> tuple[Handle, list[Any]]:
    """x, index -> the memory and all indices."""
    items = list(index) if isinstance(index, tuple | list) else [index]
    if isinstance(target, TensorRow):
        target, items = target.base, [*target.index, *items]
    if not isinstance(target, Handle) or not isinstance(target.type, GlobalTensor | Buffer):
        t.fail(f"{what} of {describe(target)}: its target is a tensor or shared buffer",
               f"ts.tile.{what}(x, index, value)")
    if len(items) != t.memory.rank(target):
        t.fail(f"{what}: {len(items)} indices for {describe(target)}, which has "
               f"{t.memory.rank(target)} axes")
    for i in items:
        if isinstance(i, Handle) and isinstance(i.type, TileType):
            t.fail(f"{what} at {describe(i)}: an index is a number, the group's or a lane's",
                   "of each lane: i = ts.tile.local_id()")
        t.memory.require_index(i)
    return target, [*t.memory.leading(target), *items]


def _scope(t: OpTracer, scope: Any) -> str:
    if scope not in SCOPES:
        t.fail(f"scope={scope!r} is not known", "'group', 'device' or 'system'")
    return scope


def _declare_kind(kind: str, doc: str, name: str) -> None:
    def lower(t: OpTracer, target: Any, index: Any = None, value: Any = None, *,
              scope: Any = "device", release: Any = False) -> Any:
        scope = _scope(t, scope)
        if release and (scope == "group" or isinstance(target, Handle)
                        and isinstance(target.type, View)):
            t.fail(f"{name}(release=True) is of one element, for other groups",
                   "barrier() orders what a group writes for itself")
        at_positions = any(isinstance(i, Handle) and isinstance(i.type, TileType)
                           for i in (index if isinstance(index, tuple | list) else (index,)))
        if isinstance(target, Handle) and isinstance(target.type, View) and not (
                at_positions and value is not None):
            tile = index if value is None else value
            if index is not None and value is not None:
                t.fail(f"{name} at {describe(index)} of {target.type}: a box is updated whole",
                       f"one element is the tensor's, of a row x[m] too: ts.tile.{name}(x[m], i, "
                       "value)")
            if not isinstance(tile, Handle) or not isinstance(tile.type, TileType):
                t.fail(f"{name} into a box needs a tile, got {describe(tile)}",
                       f"ts.tile.full({target.type.shape}, {describe(tile)})"
                       if is_number(tile) else None)
            tile = t.memory.storable(tile, target.type.dtype, target, added=True)
            return t.ir.emit("atomic_tile", [target, tile], kind=kind, scope=scope)
        if value is None:
            t.fail(f"{name} needs an index and a value", f"ts.tile.{name}(x, index, value)")
        if at_positions:
            if release:
                t.fail(f"{name}(release=True) is of one element", "release at a number, or with "
                       "each lane's own")
            return update_at(t, name, kind, target, index, value, scope)
        base, items = _element(t, target, index, name)
        value = t.memory.stored(value, base, added=kind != "exchange")
        return t.ir.emit("atomic", [base, value, *items], t.ir.hint(base), kind=kind,
                         scope=scope, **({"release": True} if release else {}))

    lower.__doc__ = (f"{doc} At a tile of positions, for each of them: the value before is a tile, "
                     "0 where a position is outside. release: whoever sees the update sees what "
                     "the group wrote before; "
                     "what the lane did, where each updates. One sees by an update whose result is "
                     "read and which is the whole group's or releases itself.")
    macro(name=name)(lower)


_declare_kind("add", "x[index] += value as one step; the value before. Once per group when index, "
              "value and control are uniform, and then the result is, too; else by each lane "
              "that comes here.", "atomic_add")
_declare_kind("min", "x[index] = min(x[index], value) as one step; the value before.", "atomic_min")
_declare_kind("max", "x[index] = max(x[index], value) as one step; the value before.", "atomic_max")
_declare_kind("and", "x[index] &= value as one step; the value before.", "atomic_and")
_declare_kind("or", "x[index] |= value as one step; the value before.", "atomic_or")
_declare_kind("xor", "x[index] ^= value as one step; the value before.", "atomic_xor")
_declare_kind("exchange", "x[index] = value as one step; the value before.", "atomic_exchange")


@macro()
def atomic_cas(t: OpTracer, target: Any, index: Any, expected: Any, value: Any, *,
               scope: Any = "device") -> Any:
    """x[index] = value as one step where it is `expected`; the value before."""
    base, items = _element(t, target, index, "atomic_cas")
    old, new = t.memory.stored(expected, base), t.memory.stored(value, base)
    return t.ir.emit("compare_exchange", [base, old, new, *items], t.ir.hint(base),
                     scope=_scope(t, scope))


__all__ = ["is_number"]
