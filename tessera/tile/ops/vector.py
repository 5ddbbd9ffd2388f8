"""load_vector and store_vector: each lane moves `width` neighbours of a row (Q58); load_pair and
store_pair: two, from where it says; store_span: the group moves elements of shared memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.interpreter.access_costs import Pattern
from tessera.tile.interpreter.sanitizer import GROUP, MANY
from tessera.tile.ir.errors import BoundsError, RuleError
from tessera.tile.ir.handles import Handle, TensorRow, describe
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, Vector
from tessera.tile.ops.macros import VECTORS
from tessera.tile.ops.memory import addresses, barrier, require_inside, touch


def _row(t: OpTracer, x: Any, what: str) -> tuple[Handle, list[Any]]:
    """The memory and the indices of its row."""
    if isinstance(x, Handle) and isinstance(x.type, GlobalTensor | Buffer) and (
            t.memory.rank(x) == 1):
        return x, t.memory.leading(x)
    if not isinstance(x, TensorRow) or len(x.index) != t.memory.rank(x.base) - 1:
        t.fail(f"{what} moves one row of a tensor or buffer, got {describe(x)}",
               f"ts.tile.{what}(src[row], ...)")
    return x.base, [*t.memory.leading(x.base), *x.index]


def _load_lower(t: OpTracer, x: Any, width: Any = 4) -> Any:
    base, index = _row(t, x, "load_vector")
    width = t.ir.constant_int(width, "width")
    if width not in VECTORS:
        t.fail(f"width={width}: an access has 1, 2, 4, 8 or 16 elements")
    return t.ir.emit("load_vector", [base, *index], t.ir.hint(base), width=width)


def _store_lower(t: OpTracer, x: Any, vector: Any) -> None:
    base, index = _row(t, x, "store_vector")
    if not isinstance(vector, Handle) or not isinstance(vector.type, Vector):
        t.fail(f"store_vector of {describe(vector)}", "give it what ts.tile.load_vector returned")
    t.ir.emit("store_vector", [base, vector, *index])


def _store_rule(types: Any, attrs: Any) -> Any:
    place, vector = types[0], types[1]
    if place.dtype is not vector.dtype:
        raise RuleError(f"store_vector moves bytes: {vector} to {place}")
    return ()


def vector_addresses(m: Any, op: Any, place: Any, index: Any,
               width: int) -> tuple[np.ndarray, np.ndarray]:
    """[G, L, width] addresses, and which of them lie in the row and are active."""
    memory = place.memory
    address: Any = np.asarray(place.base(m.groups, m.lanes))
    for axis, i in enumerate(index):
        require_inside(m, op, memory, axis, i)
        address = address + np.clip(np.asarray(i, np.int64), 0, max(0, memory.shape[axis] - 1)
                                    ) * memory.strides[axis]
    column = m.lane_ids()[..., None] * width + np.arange(width)  # [1, L, W]
    inside = column < memory.shape[-1]
    full = np.atleast_2d(address)[..., None] + np.minimum(column, max(0, memory.shape[-1] - 1))
    active = m.active((m.count, m.lanes))[..., None]
    shape = (m.count, m.lanes, width)
    return np.broadcast_to(full, shape), np.broadcast_to(inside & active, shape)


def _touch(m: Any, op: Any, memory: Any, address: np.ndarray, on: np.ndarray, write: bool) -> None:
    if m.sanitizer is None:
        return
    rows, lanes, _ = np.nonzero(on)
    access = m.access(memory, address[on], rows, lanes.astype(np.int32), op.where)
    (m.sanitizer.wrote if write else m.sanitizer.read)(access)
    site = m.sanitizer.site(op.where)
    key = (site, memory.name, not write)
    if key not in m.report.patterns:
        m.report.patterns[key] = Pattern(memory.space, memory.name, m.sanitizer.sites[site], write)
    m.report.patterns[key].count_vectors(memory, address, on)


@declare(rule=lambda types, attrs: Vector(types[0].dtype, attrs["width"]), attrs=("width",),
         run=True, effect="read", lower=_load_lower, access="vector")
def load_vector(m: Any, op: Any, row: Any, *index: Any) -> Any:
    """Lane L reads elements width*L .. width*L + width - 1 of a row; none past its end."""
    address, on = vector_addresses(m, op, row, index, op.attr["width"])
    _touch(m, op, row.memory, address, on, write=False)
    values = row.memory.read(address)
    return np.where(on, values, values.dtype.type(0))


@declare(rule=_store_rule, run=True, effect="write", lower=_store_lower, access="vector")
def store_vector(m: Any, op: Any, row: Any, vector: Any, *index: Any) -> Any:
    """Writes a vector to the same positions of a row."""
    address, on = vector_addresses(m, op, row, index, vector.shape[2])
    _touch(m, op, row.memory, address, on, write=True)
    row.memory.write(address[on], np.broadcast_to(vector, address.shape)[on], m.key)


# --- pairs ----------------------------------------------------------------------------------------
def _load_pair_lower(t: OpTracer, x: Any, at: Any) -> Any:
    base, index = _row(t, x, "load_pair")
    t.memory.require_index(at)
    return t.ir.emit("load_pair", [base, *index, at], t.ir.hint(base))


def _store_pair_lower(t: OpTracer, x: Any, at: Any, first: Any, second: Any) -> None:
    base, index = _row(t, x, "store_pair")
    t.memory.require_index(at)
    pair = [t.memory.stored(v, base) for v in (first, second)]
    t.ir.emit("store_pair", [base, *pair, *index, at])


def _require_words(place: Any, what: str) -> None:
    if place.dtype.bits != 32 or place.space == "register":
        raise RuleError(f"{what} of {place}: it moves elements of 32 bits of a tensor or of shared "
                        "memory", "index the elements one by one")


def _load_pair_rule(types: Any, attrs: Any) -> tuple[Scalar, Scalar]:
    _require_words(types[0], "load_pair")
    made = Scalar(types[0].dtype, all(t.uniform for t in types[1:]))
    return made, made


def _store_pair_rule(types: Any, attrs: Any) -> Any:
    _require_words(types[0], "store_pair")
    return ()


def _pair_addresses(m: Any, op: Any, place: Any, index: Any) -> list[np.ndarray]:
    """Those of both elements; the first has an even number."""
    *row, at = index
    at = np.asarray(at)
    active = m.active(np.atleast_2d(at).shape)
    if (np.broadcast_to(at, active.shape)[active] % 2).any():
        raise BoundsError(f"{op.name} of '{place.memory.name}' from an odd element on",
                          where=op.where, hint="a pair begins at an even one")
    return [addresses(m, op, place, (*row, at + n)) for n in (0, 1)]


def _touch_pair(m: Any, op: Any, memory: Any, found: list[np.ndarray],
                values: tuple[Any, Any] | None = None) -> None:
    """One access of two elements by each lane, or of each by the group. values: that are written"""
    if found[0].shape[1] > 1 or m.apart > 0:
        shape = (m.count, m.lanes, 2)
        on = np.broadcast_to(m.active(shape[:2])[..., None], shape)
        _touch(m, op, memory, np.broadcast_to(np.stack(found, axis=-1), shape), on,
               values is not None)
        return
    for n, address in enumerate(found):
        touch(m, op, memory, address, False, "read" if values is None else "write",
              None if values is None else values[n])


@declare(rule=_load_pair_rule, run=True, effect="read", lower=_load_pair_lower, access="element")
def load_pair(m: Any, op: Any, row: Any, *index: Any) -> Any:
    """(x[at], x[at + 1]) of a row, at an even element, in one access where rows are even and
    aligned."""
    found = _pair_addresses(m, op, row, index)
    _touch_pair(m, op, row.memory, found)
    return tuple(row.memory.read(address) for address in found)


@declare(rule=_store_pair_rule, run=True, effect="write", lower=_store_pair_lower,
         access="element")
def store_pair(m: Any, op: Any, row: Any, first: Any, second: Any, *index: Any) -> Any:
    """x[at], x[at + 1] = first, second, as load_pair reads them."""
    found = _pair_addresses(m, op, row, index)
    shape = np.broadcast_shapes(found[0].shape, np.shape(first), np.shape(second))
    active = m.active(shape)
    if not active.any():
        return
    _touch_pair(m, op, row.memory, [np.broadcast_to(x, shape) for x in found], (first, second))
    for address, value in zip(found, (first, second), strict=True):
        full, values = (np.broadcast_to(x, active.shape) for x in (address, value))
        row.memory.write(full[active], np.ascontiguousarray(values[active]), m.key)


# --- spans out of shared memory -------------------------------------------------------------------
def _store_span_lower(t: OpTracer, row: Any, at: Any, source: Any, begin: Any, count: Any
                      ) -> None:
    base, index = _row(t, row, "store_span")
    shared, rest = _row(t, source, "store_span")
    if rest:
        t.fail(f"store_span of {describe(source)}: elements come from a buffer of one axis",
               "ts.tile.alloc_shared((n,), dtype)")
    for n in (at, begin, count):
        t.memory.require_index(n)
    t.ir.emit("store_span", [base, shared, begin, count, *index, at])


def _store_span_rule(types: Any, attrs: Any) -> Any:
    place, source, *numbers = types
    for t in (place, source):
        _require_words(t, "store_span")
    if place.space != "global" or source.space != "shared" or place.dtype is not source.dtype:
        raise RuleError(f"store_span moves elements of shared memory to a tensor of their "
                        f"type, not {source} to {place}")
    if not all(t.uniform for t in numbers):
        raise RuleError("store_span is one copy by the group: row, places and count are those of "
                        "all lanes", "let them follow from ts.tile.group_id()")
    return ()


@declare(rule=_store_span_rule, run=True, effect="write", group=True, lower=_store_span_lower,
         access="element")
def store_span(m: Any, op: Any, row: Any, source: Any, begin: Any, count: Any, *index: Any) -> Any:
    """The group moves source[begin:begin + count], of a buffer in shared memory, to row[at] and
    what follows it, on into the rows behind; a barrier comes first.

    By the copy engine where there is one and both places lie alike in 16 bytes. Behind it the
    kernel reads none of what was written, and writes to the buffer behind another barrier only."""
    barrier.run(m, op)  # type: ignore[misc]
    begin, count = np.asarray(begin), np.asarray(count)
    active = m.active_groups()[:, None]
    n = int(np.max(np.where(active, np.broadcast_to(count, active.shape), 0)))
    if n <= 0:
        return
    on = active & (np.arange(n) < count)
    found = []
    for place, first in ((source, (begin,)), (row, index)):
        start = addresses(m, op, place, [np.where(count > 0, i, 0) for i in first])
        left = place.base(m.groups, m.lanes) + math.prod(place.memory.shape) - start
        if np.any(active & (count > left)):
            raise BoundsError(f"store_span of {int(np.max(count))} elements, of which "
                              f"'{place.memory.name}' has {int(np.min(left))} from there on",
                              where=op.where, hint="a count of at most that")
        found.append(np.broadcast_to(start + np.arange(n), on.shape)[on])
    rows = np.broadcast_to(np.arange(m.count)[:, None], on.shape)[on]
    for place, address, who in ((source, found[0], MANY), (row, found[1], GROUP)):
        if m.sanitizer is not None:
            access = m.access(place.memory, address, rows, np.full(rows.shape, who, np.int32),
                              op.where)
            (m.sanitizer.read if place is source else m.sanitizer.wrote)(access)
    row.memory.write(found[1], source.memory.read(found[0]), m.key)
