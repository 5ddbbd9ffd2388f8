"""Allocation, views, element accesses, loads, stores, asynchronous copies and barriers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.numerics import bool_
from tessera.tile.builder import edge_rules, rules
from tessera.tile.interpreter.access_costs import Pattern
from tessera.tile.interpreter.async_copies import wide
from tessera.tile.interpreter.memory import Local, MemoryBox
from tessera.tile.interpreter.sanitizer import GROUP, MANY
from tessera.tile.ir.errors import BoundsError, RuleError
from tessera.tile.ir.handles import describe
from tessera.tile.ir.numpy_values import array_dtype, poison
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType, View


# --- allocation -------------------------------------------------------------------------------
def _buffer(types: Any, attrs: Any) -> Buffer:
    return Buffer(attrs["dtype"], attrs["shape"], attrs["space"], attrs["stages"],
                  attrs["swizzle"], attrs["alignment"])


@declare(rule=_buffer, attrs=("dtype", "shape", "space", "stages", "swizzle", "alignment"),
         run=True, effect="alloc", public=False)
def allocate(m: Any, op: Any) -> Any:
    """A buffer of shared or register memory; nothing is in it yet."""
    (made,) = op.outs
    local = Local(made.value.name, made.type, m.count, m.lanes)
    local.changes = m.changes if m.looped else None
    return MemoryBox.whole(local)


@declare(rule=lambda types, attrs: _stage_rule(types), run=True, public=False, alias=True)
def stage(m: Any, op: Any, buffer: Any, index: Any) -> Any:
    """One stage of a buffer that has several, by a uniform number."""
    bad = (index < 0) | (index >= buffer.memory.stages)
    if m.mask is not None:
        bad = bad & m.mask.any(axis=1, keepdims=True)
    if bad.any():
        raise BoundsError(
            f"stage {int(np.broadcast_to(index, bad.shape)[bad][0])} of '{buffer.memory.name}', "
            f"which has {buffer.memory.stages}", where=op.where)
    return replace(buffer, stage=np.clip(index, 0, buffer.memory.stages - 1))


def _stage_rule(types: Any) -> Any:
    if isinstance(types[1], Scalar) and not types[1].uniform:
        raise RuleError("the stage of a buffer must be the same for all lanes")
    return replace(types[0], stages=1)


# --- views ------------------------------------------------------------------------------------
def _view_rule(types: Any, attrs: Any) -> View:
    source = types[0]
    return View(source.numeric, tuple(attrs["box"][i] for i in attrs["kept"]), source.space)


@declare(rule=_view_rule, attrs=("box", "kept"), run=True, public=False, alias=True, part=True)
def view(m: Any, op: Any, source: Any, *offsets: Any) -> Any:
    """The box of extents `box` at these offsets; axes not in `kept` are single indices."""
    attr = op.attr
    for axis, offset in enumerate(offsets):
        if axis not in attr["kept"]:
            require_inside(m, op, source.memory, axis, offset)
    return MemoryBox(source.memory, offsets, attr["box"], attr["kept"], source.stage)


@declare(rule=lambda types, attrs: _flip(types[0]), run=True, public=False,
         edges=edge_rules.reversed_axes, alias=True)
def view_transpose(m: Any, op: Any, source: Any) -> Any:
    """The same place with its axes reversed; nothing moves."""
    return source.transposed


def _flip(t: Any) -> Any:
    return View(t.numeric, t.shape[::-1], t.space)


# --- elements ---------------------------------------------------------------------------------
def require_inside(m: Any, op: Any, memory: Any, axis: int, index: Any) -> None:
    """Raises BoundsError when an active lane's index lies outside."""
    index, size = np.asarray(index), memory.shape[axis]
    bad = (index < 0) | (index >= size)
    if not bad.any():
        return
    if m.mask is not None:
        bad = bad & (m.mask if bad.shape[1] > 1 or m.mask.shape[1] == 1
                     else m.mask.any(axis=1, keepdims=True))
    if not bad.any():
        return
    bad = np.broadcast_to(bad, (max(bad.shape[0], 1), bad.shape[1]))
    g, lane = np.unravel_index(int(np.argmax(bad)), bad.shape)
    value = int(np.broadcast_to(index, bad.shape)[g, lane])
    who = f"group {int(m.groups[g if len(m.groups) > 1 else 0, 0])}"
    who = f"lane {lane} of {who}" if bad.shape[1] > 1 else who
    raise BoundsError(
        f"index {value} is outside of '{memory.name}': axis {axis} has extent {size} ({who})",
        where=op.where, hint="guard it, for example: if i < n:" if value >= 0 else
        "an index counts from 0; negative ones do not count from the end in kernels")


def addresses(m: Any, op: Any, place: Any, index: Any) -> np.ndarray:
    """[1|G, 1|L] addresses of elements, clipped into the memory for lanes that are off."""
    memory = place.memory
    address: Any = place.base(m.groups, m.lanes)
    for axis, i in enumerate(index):
        require_inside(m, op, memory, axis, i)
        clipped = np.clip(np.asarray(i, np.int64), 0, max(memory.shape[axis] - 1, 0))
        address = address + clipped * memory.strides[axis]
    return np.atleast_2d(np.asarray(address, np.int64))


def touch(m: Any, op: Any, memory: Any, address: np.ndarray, lane_op: bool, how: str,
           values: Any = None) -> None:
    """Tells the sanitizer and the linters about an element access."""
    if m.sanitizer is None:
        return
    active = m.active(address.shape)
    full = np.broadcast_to(address, active.shape)
    rows, lanes = np.nonzero(active)
    lane = lanes.astype(np.int32) if lane_op else np.full(len(lanes), GROUP, np.int32)
    access = m.access(memory, full[active], rows, lane, op.where)
    if how == "read":
        m.sanitizer.read(access)
    else:
        given = None if values is None else np.broadcast_to(values, active.shape)[active]
        m.sanitizer.wrote(access, atomic=how == "atomic", values=given)
    if lane_op and memory.space != "register":
        site = m.sanitizer.site(op.where)
        key = (site, memory.name, how == "read")
        if key not in m.report.patterns:
            m.report.patterns[key] = Pattern(memory.space, memory.name, m.sanitizer.sites[site],
                                             how != "read")
        m.report.patterns[key].count(memory, full, active)


def _is_lane_op(m: Any, arrays: Any) -> bool:
    """Whether the lanes act each on its own: by their values or by the control they are under."""
    return any(np.ndim(a) == 2 and np.shape(a)[1] > 1 for a in arrays) or (
        m.apart > 0)


def _element_rule(types: Any, attrs: Any) -> Scalar:
    place, *index = types
    return Scalar(place.dtype, all(t.uniform for t in index) and place.space != "register")


@declare(rule=_element_rule, run=True, effect="read", public=False, access="element")
def load_element(m: Any, op: Any, place: Any, *index: Any) -> Any:
    """One element for each lane."""
    address = addresses(m, op, place, index)
    memory = place.memory
    if not memory.flat.size:
        return np.zeros((1, 1), array_dtype(memory.numeric.dtype))
    lane_op = _is_lane_op(m, index) or memory.space == "register"
    touch(m, op, memory, address, lane_op, "read")
    return memory.read(address)


@declare(rule=lambda types, attrs: (), run=True, effect="write", public=False, access="element")
def store_element(m: Any, op: Any, place: Any, value: Any, *index: Any) -> Any:
    """One element from each lane, rounded to the storage; a uniform store happens once."""
    address = addresses(m, op, place, index)
    memory = place.memory
    shape = np.broadcast_shapes(address.shape, np.shape(value))
    active = m.active(shape)
    if not active.any() or not memory.flat.size:
        return
    touch(m, op, memory, np.broadcast_to(address, shape),
           _is_lane_op(m, (*index, value, *(place.peer or ())[:1])) or memory.space == "register",
           "write", np.broadcast_to(value, active.shape))
    if place.peer is not None:
        m.sent += place.sent(active)
    memory.write(np.broadcast_to(address, active.shape)[active],
                 np.ascontiguousarray(np.broadcast_to(value, active.shape)[active]), m.key)


# --- tiles ------------------------------------------------------------------------------------
def _load_rule(types: Any, attrs: Any) -> TileType:
    source = types[0]
    if isinstance(source, Scalar | TileType):
        raise RuleError(f"load reads a view of a tensor or a shared buffer, got {source}",
                        "slice it: ts.tile.load(A[m:m+64, k:k+32])")
    if isinstance(source, GlobalTensor):
        raise RuleError(f"load of the whole {source}: a tile has static extents",
                        "slice it: ts.tile.load(A[m:m+64, k:k+32])")
    if source.space == "register":
        raise RuleError(f"load reads global or shared memory, {source} is in registers",
                        "read its elements: r[i]")
    return TileType(source.dtype, source.shape)


@declare(rule=_load_rule, attrs=("vector", "prefetch", "fill"), run=True, effect="read", group=True,
         public=False, edges=edge_rules.edges_unchanged, moves=True, access="tile")
def load_tile(m: Any, op: Any, source: Any, vector: Any = None, prefetch: Any = None,
              fill: Any = 0) -> Any:
    """The box as a tile; elements outside of the tensor are `fill`."""
    address, inside = source.addresses(m.groups)
    on = inside & wide(m.active_groups(), inside)
    memory = source.memory
    lane = GROUP if memory.space == "global" else MANY
    access = m.tile_access(source, address, on, lane, op.where)
    if access is not None:
        m.sanitizer.read(access)
    if not memory.flat.size:
        return np.zeros(address.shape, array_dtype(memory.numeric.dtype))
    values = memory.read(address)
    return np.where(inside, values, values.dtype.type(op.attr["fill"]))


def _store_rule(types: Any, attrs: Any) -> Any:
    target, value = types
    if not isinstance(target, View | Buffer):
        raise RuleError(f"a store writes to a view or buffer, got {target}",
                        "slice it: ts.tile.store(C[m:m+64, n:n+64], tile)")
    rules.require_numbers((value,), "a store")
    if isinstance(value, Scalar):
        if not value.uniform:
            raise RuleError("a number that differs between lanes cannot fill a whole box",
                            "store one element for each lane: buffer[ts.tile.local_id()] = x")
        return ()
    if value.shape != target.shape:
        raise RuleError(f"store of {value} to {target}: the extents differ",
                        _store_hint(target.shape, value.shape))
    return ()


def _store_hint(target: tuple[int, ...], value: tuple[int, ...]) -> str:
    if len(target) != len(value):
        return "fix the slice, or reshape the tile"
    if all(v in (1, t) for t, v in zip(target, value, strict=True)):
        return f"a store does not stretch a tile: ts.tile.broadcast(t, {target})"
    return rules.misfit(target, value)


@declare(rule=_store_rule, run=True, effect="write", group=True, public=False, fills=True,
         layouts="any", access="tile")
def store_tile(m: Any, op: Any, target: Any, value: Any) -> Any:
    """Writes a tile (or one number everywhere) to a box; elements outside are left out."""
    address, inside = target.addresses(m.groups)
    on = inside & wide(m.active_groups(), inside)
    memory = target.memory
    if not on.any():
        return
    full = np.broadcast_to(m.widen(value, address.ndim - 1), address.shape)
    access = m.tile_access(target, address, on, GROUP if memory.space == "global" else MANY,
                           op.where)
    if access is not None:
        m.sanitizer.wrote(access)
    memory.write(address[on], np.ascontiguousarray(full[on]), m.key)


@declare(rule=lambda types, attrs: (), run=True, effect="async", group=True)
def prefetch_box(m: Any, op: Any, source: Any) -> None:
    """Asks for a box of a tensor, or what there is of it, to be brought to the L2 cache, and waits
    for nothing. A load that comes later sees what was written meanwhile, so this may stand in front
    of `grid_dependency_wait`, where nothing is read yet. Has no meaning otherwise."""


@declare(rule=lambda types, attrs: (), run=True, effect="async", group=True)
def discard_box(m: Any, op: Any, source: Any) -> None:
    """Says that nothing reads a box of a tensor before it is written again: what the L2 cache holds
    of it need not go to memory. All groups and lanes that read it have done so, behind a barrier. A
    read finds anything."""
    address, inside = source.addresses(m.groups)
    on = inside & wide(m.active_groups(), inside)
    if on.any():
        memory = source.memory
        memory.put(address[on], poison((int(on.sum()),), memory.numeric.dtype))


@declare(rule=lambda types, attrs: (), run=True, effect="sync", public=False, layouts="any")
def arrive(m: Any, op: Any, x: Any) -> None:
    """Waits until the elements of a tile that was loaded are there; has no meaning otherwise."""


# --- asynchronous copies and barriers ---------------------------------------------------------
def _copy_rule(types: Any, attrs: Any) -> Any:
    target, source = types
    for t, what in ((target, "target"), (source, "source")):
        if isinstance(t, Scalar | TileType):
            raise RuleError(f"cp_async copies from a view in global memory to shared memory; its "
                            f"{what} is {t}, in registers",
                            "allocate it: ts.tile.alloc_shared(...)")
    if target.space != "shared" or source.space != "global":
        raise RuleError(f"cp_async copies from global to shared memory, not from {source.space} "
                        f"to {target.space}", "ts.tile.cp_async(shared_buffer, A[m:m+64, k:k+32])")
    if target.shape != getattr(source, "shape", None):
        raise RuleError(f"cp_async of {source} into {target}: the extents differ",
                        "slice the tensor, or part of the buffer, so that both have one shape")
    if target.dtype is not source.dtype:
        raise RuleError(f"cp_async moves bytes: {source} and {target} have different types",
                        "load, cast and store, or allocate the buffer in the tensor's type")
    return ()


@declare(rule=_copy_rule, run=True, effect="async", group=True, fills=True,
         access="copy", place=1, async_copy="issue")
def cp_async(m: Any, op: Any, target: Any, source: Any) -> Any:
    """Begins a copy of a global box into shared memory; elements outside become 0.

    Complete after cp_wait_group; visible to the other lanes after the next barrier.
    """
    m.copies.issue(target, source, op.where)


def _copy_if_rule(types: Any, attrs: Any) -> Any:
    wanted = types[2]
    if not isinstance(wanted, Scalar) or wanted.dtype is not bool_:
        raise RuleError(f"cp_async_if needs a truth value, got {wanted}")
    return _copy_rule(types[:2], attrs)


@declare(rule=_copy_if_rule, run=True, effect="async", group=True, public=False,
         access="copy", place=1, async_copy="issue")
def cp_async_if(m: Any, op: Any, target: Any, source: Any, wanted: Any) -> Any:
    """cp_async where `wanted` is true; where not, all becomes 0 and nothing is read. Without a
    branch, so that the copies of an iteration can be spread among its matmuls."""
    m.copies.issue(target, source, op.where, wanted)


@declare(rule=lambda types, attrs: (), run=True, effect="async", group=True, async_copy="commit")
def cp_commit_group(m: Any, op: Any) -> Any:
    """Makes the copies since the last commit one group, for cp_wait_group."""
    m.copies.commit(m.active_groups())


@declare(rule=lambda types, attrs: _groups_rule(attrs), attrs=("pending",), run=True,
         effect="async", group=True, async_copy="wait")
def cp_wait_group(m: Any, op: Any, pending: Any = 0) -> Any:
    """Waits until at most `pending` commit groups are under way; commits what is not committed."""
    m.copies.wait(m.active_groups(), op.attr["pending"])


def _groups_rule(attrs: Any) -> tuple:
    pending = attrs["pending"]
    if isinstance(pending, bool) or not isinstance(pending, int) or pending < 0:
        raise RuleError(f"cp_wait_group waits for a number of groups of copies, got "
                        f"{describe(pending)}", "ts.tile.cp_wait_group(0)")
    return ()


@declare(rule=lambda types, attrs: (), run=True, effect="sync", group=True,
         async_copy="wait", by_thread=True)
def barrier(m: Any, op: Any) -> Any:
    """All lanes of the group wait for each other; what they wrote before is visible after it.

    Completes copies that were not committed; committed ones are left to cp_wait_group.
    """
    on = m.active_groups()
    m.copies.finish_uncommitted(on)
    m.epoch[on] += 1
    if m.sanitizer is not None:
        m.sanitizer.clocks.barrier(m.groups[on, 0])
