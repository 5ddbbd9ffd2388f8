"""Sums of many slices by integers, and the largest or smallest of them: the integers are put in
order first, so that a segment reads its own slices and nothing else.

    y[s, c] = sum of u[order[j], c] over begin[s] <= j < begin[s + 1]

The slices of a segment are added in the order in which they stand, as the order is stable. Those of
more than CHAIN slices are added in f64, and by several groups: each block of CHAIN places has the
sum of what reaches into it from the left, and of what begins in it and goes on. So a segment of all
slices takes no longer than many of a few, and the sums follow from the integers alone.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

from ....numerics import as_type
from ...ir import Graph, Node, Value, uses
from ...op import Aval, GraphOp
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupOperand, ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ..choose_schedule import AHEAD, IDS, LANES, blocks, chosen, for_segments, power
from .gathered_rows import moved_rows, picked_rows
from .gathers import adds_slices, around, nothing
from .group_statements import CHAIN
from .integer_order import ordered
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .line_segments import LINE_RUNS
from .searches import LONG
from .spell import COMBINE, literal, stored_as

INT32 = as_type("int32")
# Read before the first is added: many segments have one slice or none, and groups with few
# registers, of which many run at once, are what is needed there.
SLICES, PARTS = 4, 2
EACH, FEW = 32, 16  # lanes of a group where slices have few elements, four for each; those
TILE = 512  # elements of a group's segments where slices have more
SHORT = 256  # slices of a segment in the mean, up to which several wait for each other
SLOTS, BUSY = 16, 2048  # parts that a group sees to, where as many groups have some
# u, order, the ids in order, begin (, weights in order) -> [2 * blocks, C] in f64: of each block
# what reaches into it from the left, and what begins in it and goes on; of long segments alone.
PART_SUMS = library_call("part_sums")
# u, order, begin (, parts of sums) (, weights in order, where it is weighted) -> [V, C]
RUNS = {way: library_call(name) for way, name in (
    ("sum", "run_sums"), ("max", "run_maxima"), ("min", "run_minima"))}
# Blocks of integers that groups of a segment of a line look through, from which on these are put in
# order in place of that.
LINES = 8192
# Segments from which on their extrema are those of runs; of fewer a group for each looks through
# all integers as quickly as they are put in order.
EXTREMA = 256


def sort_segments(graph: Graph) -> Graph:
    """Sums by more integers than a group looks through at once, as sums of runs; and extrema."""
    count = uses(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        way = node.op.meets or "sum"
        if not _by_segments(node.op) or way not in RUNS:
            return None
        u, ids = inputs
        if not all(isinstance(d, int) for v in inputs for d in v.aval.shape):
            return None
        A, T, C = around(extents_of(u), node.attrs["axis"], ids.aval.ndim)
        V = node.attrs["extent"]
        if not 0 < T < LONG or C == 0 or V >= LONG:
            return None
        if A > 1:
            many = A * V * blocks(C, LANES) * blocks(T, IDS) > LINES
            return _of_lines(rw, node, u, ids, (A, T, C)) if many else None
        if T <= IDS or way != "sum" and V < EXTREMA:
            return None
        return _of_runs(rw, node, u, ids, T, C, count)

    return rebuild(graph, visit)


def _by_segments(op: GraphOp) -> bool:
    """Sums by integers are indexed ops; what meets as an extremum is not."""
    return op.reduces == op.meets if op.meets in ("max", "min") else adds_slices(op)


def _in_order(rw: Rewriter, ids: Value, T: int, V: int) -> tuple[Value, Value, Value]:
    """The integers in order, where each stood, and where each number begins."""
    flat = rw.emit("reshape", _narrow(rw, ids), shape=(T,))
    at, order = ordered(rw, rw.emit("check_index", flat, extent=V, wrap=True), V)
    numbers = rw.emit("iota", size=V + 1, type=INT32)
    return at, order, rw.emit("searchsorted", at, numbers, side="left", lines=0)


def _narrow(rw: Rewriter, ids: Value) -> Value:
    """The integers in 32 bits, where they come in as many."""
    cast = rw.made_by(ids, "cast")
    narrow = cast is not None and cast.inputs[0].aval.dtype is INT32.dtype
    return cast.inputs[0] if cast is not None and narrow else ids


def _of_lines(rw: Rewriter, node: Node, u: Value, ids: Value, space: tuple[int, int, int]) -> Value:
    (A, T, C), V, out = space, node.attrs["extent"], node.outputs[0].aval
    _, order, begin = _in_order(rw, ids, T, V)
    rows = rw.emit("reshape", u, shape=space)
    made = Value(Aval((A, V, C), out.type))
    rw.add(Node(LINE_RUNS[node.op.meets or "sum"], (rows, order, begin), {}, (made,), rw.where))
    return rw.emit("reshape", made, shape=out.shape)


def _of_runs(rw: Rewriter, node: Node, u: Value, ids: Value, T: int, C: int,
             count: Counter[Value]) -> Value:
    V, out = node.attrs["extent"], node.outputs[0].aval
    at, order, begin = _in_order(rw, ids, T, V)
    way = node.op.meets or "sum"
    rows, row, order, weights = _slices(rw, u, order, T, C, count, way)
    given: tuple[Value, ...] = (rows, order, begin)
    attrs = {"weighted": bool(weights), "row": row}
    if u.aval.dtype.name == "f32" and way == "sum":
        parts = Value(Aval((2 * blocks(T, CHAIN), C), as_type("f64")))
        rw.add(Node(PART_SUMS, (rows, order, at, begin, *weights), attrs, (parts,), rw.where))
        given = (*given, parts)
    sums = Value(Aval((V, C), out.type))
    rw.add(Node(RUNS[way], (*given, *weights), attrs, (sums,), rw.where))
    return rw.emit("reshape", sums, shape=out.shape)


def _slices(rw: Rewriter, u: Value, order: Value, T: int, C: int, count: Counter[Value], way: str
            ) -> tuple[Value, str, Value, tuple[Value, ...]]:
    """The rows of the slices, which of them a slice t is, which slices come one after another, and
    what each is multiplied by. Rows that integers pick of a table, those that are moved, and
    products of rows and numbers, are read as they are added."""
    if C == 1:
        return rw.emit("reshape", u, shape=(T, C)), "", order, ()
    if u.aval.shape != (T, C):
        return *moved_rows(rw, u, T, C), order, ()
    picked = picked_rows(rw, u, count, way == "sum")
    if picked.rows is not None:
        extent = picked.table.aval.shape[0]
        rows = rw.emit("check_index", _narrow(rw, picked.rows), extent=extent, wrap=True)
        at = rw.emit("take", rows, order, axis=0)
    else:
        at = order
    table, row = (picked.table, "") if picked.rows is not None else moved_rows(
        rw, picked.table, T, C)
    if picked.weights is None:
        return table, row, at, ()
    weights = rw.emit("reshape", picked.weights, shape=(T,))
    return table, row, at, (rw.emit("take", weights, order, axis=0),)


def schedule_runs(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    given = list(dict.fromkeys(node.inputs))  # rows may be picked by the ids themselves
    reads = [builder.operand(v) for v in given]
    y = builder.operand(node.outputs[0])
    V, C = y.shape
    (T,) = extents_of(node.inputs[1])
    s = for_segments(V, T, C)
    grid: tuple[int, ...] = V, blocks(C, s.n)
    ways: dict[GraphOp, str] = {op: way for way, op in RUNS.items()}
    attrs = dict[str, Any]()
    if node.op is PART_SUMS:
        each = 1 << min(SLOTS, prod(grid) // BUSY).bit_length() >> 1 or 1
        grid, attrs = (blocks(V, each), grid[1]), {"each": each}
    else:
        attrs = {"way": ways[node.op], "together": C == 1 or T <= SHORT * V}
        if attrs["together"]:
            n = min(power(C), TILE // 4)
            s = chosen(min(EACH, 4 * EACH // n), n, warps=1) if C <= FEW else chosen(
                TILE // n, n, warps=4)
            grid = blocks(V, s.m or 1), blocks(C, n)
    builder.add(group.kind, y.shape, reads, [y], [builder.step(node)], s, grid,
                weighted=node.attrs["weighted"], row=node.attrs["row"],
                places=tuple(map(given.index, node.inputs)), **attrs)


def _operands(group: ScheduledGroup) -> list[GroupOperand]:
    """In the order of the call."""
    return [group.reads[i] for i in group.attr("places")]


def parts_source(group: ScheduledGroup) -> KernelText:
    w, (step,), BN = KernelWriter(group), group.steps, group.schedule.n
    _, order, at, begin, *_ = _operands(group)
    (y,), (T,), each = group.writes, order.shape, group.attr("each")
    w.line(f"n = tile.group_id(1) * {BN}")
    w.line(f"slots = tile.arange(0, {each}) + tile.group_id(0) * {each}")
    w.line(f"fronts = slots // 2 * {CHAIN}", step)
    place = f"tile.where(slots % 2 == 1, tile.minimum(fronts + {CHAIN}, {T}) - 1, fronts)"
    w.line(f"numbers = tile.gather({capital(at.name)}, tile.minimum({place}, {T - 1}))", step)
    for end, which in (("lows", "numbers"), ("highs", "numbers + 1")):
        number = f"tile.gather({capital(begin.name)}, {which})"
        w.line(f"{end} = tile.cast({number}, {w.type(INT32)})", step)
    w.line(f"sides = tile.where(highs - lows > {CHAIN}, tile.where(lows >= fronts, 1, 0), 2)", step)
    w.line(f"wanted = (sides == slots % 2) & (slots < {y.shape[0]})", step)
    with w.block("if tile.reduce_max(tile.where(wanted, 1, 0)) > 0:"):
        begin_at = f"tile.group_id(0) * {each}"
        with w.block(f"for slot in range({begin_at}, {begin_at} + {each}):"):
            _add_part(w, group, capital(at.name), capital(begin.name))
    return w.finish_operands()


def _add_part(w: KernelWriter, group: ScheduledGroup, at: str, begin: str) -> None:
    """Of a slot that a segment of more than CHAIN slices reads; others are left as they are."""
    (step,), (y,), BN = group.steps, group.writes, group.schedule.n
    wide, (T,) = w.type(y.type), _operands(group)[1].shape
    w.line(f"first = tile.minimum(slot // 2 * {CHAIN}, {T - 1})", step)
    w.line(f"last = tile.minimum(first + {CHAIN}, {T})", step)
    w.line(f"s = {_number(w, at, 'tile.where(slot % 2 == 1, last - 1, first)')}", step)
    _begin_and_end(w, group, begin)
    w.line(f"tail = tile.where(hi - lo > {CHAIN}, tile.where(lo >= first, 1, 0), 2)", step)
    with w.block("if tail == slot % 2:"):
        w.line(f"{step.name} = tile.full((1, {BN}), 0.0, {wide})", step)
        w.line("stop = tile.minimum(hi, last)", step)
        with w.block(f"for j in range(tile.maximum(lo, first), stop, {AHEAD}):"):
            _load_slices(w, group, AHEAD)
            for r in range(AHEAD):
                w.line(f"{step.name} = {step.name} + tile.cast(r{r}, {wide})", step)
        w.line(f"{capital(y.name)}[slot:slot+1, n:n+{BN}] = {step.name}", step)


def runs_source(group: ScheduledGroup) -> KernelText:
    if group.attr("together"):
        return _runs_together(group)
    w, (step,), BN = KernelWriter(group), group.steps, group.schedule.n
    (_, _, begin, *parts), (y,) = _operands(group), group.writes
    parts = parts[:len(parts) - group.attr("weighted")]
    kind, name = w.type(y.type), step.name
    w.line("s = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {BN}")
    _begin_and_end(w, group, capital(begin.name))
    way, dtype = group.attr("way"), y.type.dtype
    none = literal(nothing(dtype, way), dtype.kind)
    w.line(f"{name} = tile.full((1, {BN}), {none}, {kind})", step)
    w.line(f"stop = tile.where(hi - lo > {CHAIN}, lo, hi)" if parts else "stop = hi", step)
    narrow = dtype.compute is not dtype or dtype.bits < 32
    ahead, fill = (SLICES, "") if way == "sum" else (AHEAD, f", fill={none}")
    with w.block(f"for j in range(lo, stop, {ahead}):"):
        _load_slices(w, group, ahead, fill)
        for r in range(ahead):
            total = COMBINE[way][0].format(name, f"r{r}")
            w.line(f"{name} = {stored_as(total, dtype, kind) if narrow else total}", step)
    if parts:
        with w.block("if stop < hi:"):
            _add_parts(w, group, kind)
    w.line(f"{capital(y.name)}[s:s+1, n:n+{BN}] = {name}", step)
    return w.finish_operands()


def _runs_together(group: ScheduledGroup) -> KernelText:
    """The same of several segments at once, which go on until the longest ends: few slices of one
    are on their way at a time."""
    w, (step,), BM, BN = KernelWriter(group), group.steps, group.schedule.m or 1, group.schedule.n
    (u, order, begin, *parts), (y,) = _operands(group), group.writes
    weights = parts.pop() if group.attr("weighted") else None
    way, dtype = group.attr("way"), y.type.dtype
    kind, name, (V, C) = w.type(y.type), step.name, y.shape
    narrow = dtype.compute is not dtype or dtype.bits < 32
    none = literal(nothing(dtype, way), dtype.kind)
    columns = "" if C == 1 else f", n:n+{BN}"
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"n = tile.group_id(1) * {BN}")
    ahead = AHEAD if C <= FEW else SLICES
    for end, more in (("lo", ""), ("hi", " + 1")):
        w.line(f"s = tile.minimum(tile.arange(0, {BM}) + m{more}, {V})")
        w.line(f"{end} = tile.cast(tile.gather({capital(begin.name)}, s), {w.type(INT32)})", step)
    w.line("count = hi - lo", step)
    if parts:
        w.line(f"count = tile.where(count > {CHAIN}, 0, count)", step)
    w.line("most = tile.reduce_max(count)", step)
    w.line(f"{name} = tile.full({_tile(group)}, {none}, {kind})", step)
    with w.block(f"for j in range(0, most, {ahead}):"):
        for r in range(ahead):
            w.line(f"at{r} = tile.where(j + {r} < count, lo + j + {r}, {order.shape[0]})", step)
            place = f"tile.gather({capital(order.name)}, at{r})"
            _place_row(w, group, f"p{r}", place)
            w.line(f"p{r} = tile.where(j + {r} < count, p{r}, {u.shape[0]})", step)
        for r in range(ahead):
            rows = capital(u.name) + (f"[:{columns}]" if columns else "")
            w.line(f"r{r} = tile.gather({rows}, p{r}, fill={none})", step)
            if weights is not None:
                weight = f"tile.gather({capital(weights.name)}, at{r})"
                value = f"r{r} * {weight}" + "[:, None]" * (C > 1)
                w.line(f"r{r} = {stored_as(value, dtype, kind) if narrow else value}", step)
        for r in range(ahead):
            total = COMBINE[way][0].format(name, f"r{r}")
            w.line(f"{name} = {stored_as(total, dtype, kind) if narrow else total}", step)
    if parts:
        w.line(f"long = hi - lo > {CHAIN}", step)
        with w.block("if tile.reduce_max(tile.where(long, 1, 0)) > 0:"):
            _add_parts_together(w, group, kind, columns)
    w.line(f"{capital(y.name)}[m:m+{BM}{columns}] = {name}", step)
    return w.finish_operands([(o.shape[0],) if C == 1 else o.shape for o in w.operands])


def _tile(group: ScheduledGroup) -> str:
    BM, BN = group.schedule.m or 1, group.schedule.n
    return f"({BM},)" if group.writes[0].shape[1] == 1 else f"({BM}, {BN})"


def _add_parts_together(w: KernelWriter, group: ScheduledGroup, kind: str, columns: str) -> None:
    """As `_add_parts`, of several segments."""
    (step,), parts = group.steps, _operands(group)[3]
    long = "long[:, None]" if columns else "long"
    rows = capital(parts.name) + (f"[:{columns}]" if columns else "")
    w.line(f"first = lo // {CHAIN}", step)
    w.line(f"last = tile.where(long, (hi + {CHAIN - 1}) // {CHAIN}, first)", step)
    w.line("most = tile.reduce_max(last - first)", step)
    w.line(f"wide = tile.full({_tile(group)}, 0.0, {w.type(parts.type)})", step)
    with w.block("for j in range(0, most):"):
        w.line("block = first + j", step)
        w.line("slot = tile.where(j == 0, 2 * block + 1, 2 * block)", step)
        w.line(f"slot = tile.where(block < last, slot, {parts.shape[0]})", step)
        w.line(f"wide = wide + tile.gather({rows}, slot)", step)
    w.line(f"{step.name} = tile.where({long}, tile.cast(wide, {kind}), {step.name})", step)


def _add_parts(w: KernelWriter, group: ScheduledGroup, kind: str) -> None:
    """The sums of the blocks of a segment: where it begins, what goes on; then what reaches in."""
    (step,), parts, BN = group.steps, _operands(group)[3], group.schedule.n
    many = parts.shape[0]
    w.line(f"wide = tile.full((1, {BN}), 0.0, {w.type(parts.type)})", step)
    w.line(f"block = lo // {CHAIN}", step)
    w.line(f"end = (hi + {CHAIN - 1}) // {CHAIN}", step)
    with w.block(f"for j in range(block, end, {PARTS}):"):
        for r in range(PARTS):
            slot = f"tile.where(j + {r} == block, 2 * block + 1, 2 * (j + {r}))"
            w.line(f"p{r} = tile.where(j + {r} < end, {slot}, {many})", step)
        for r in range(PARTS):
            w.line(f"r{r} = tile.load({capital(parts.name)}[p{r}:p{r}+1, n:n+{BN}])", step)
        for r in range(PARTS):
            w.line(f"wide = wide + r{r}", step)
    w.line(f"{step.name} = tile.cast(wide, {kind})", step)


def _begin_and_end(w: KernelWriter, group: ScheduledGroup, begin: str) -> None:
    (step,) = group.steps
    w.line(f"lo = {_number(w, begin, 's')}", step)
    w.line(f"hi = {_number(w, begin, 's + 1')}", step)


def _load_slices(w: KernelWriter, group: ScheduledGroup, ahead: int, fill: str = "") -> None:
    """The slices at order[j], order[j + 1] ... before `stop`, times their weights; behind it what
    is filled in, by default zeros: one behind the last is no slice."""
    (step,), (u, order, *rest), BN = group.steps, _operands(group), group.schedule.n
    T, U, zero = order.shape[0], capital(u.name), literal(0, u.type.dtype.kind)
    for r in range(ahead):
        place = f"tile.minimum(j + {r}, {T - 1})"
        _place_row(w, group, f"p{r}", _number(w, capital(order.name), place))
        if group.attr("weighted"):
            w.line(f"w{r} = {capital(rest[-1].name)}[{place}]", step)
    for r in range(ahead):
        w.line(f"p{r} = tile.where(j + {r} < stop, p{r}, {u.shape[0]})", step)
        if group.attr("weighted"):
            w.line(f"w{r} = tile.where(j + {r} < stop, w{r}, {zero})", step)
    for r in range(ahead):
        w.line(f"r{r} = tile.load({U}[p{r}:p{r}+1, n:n+{BN}]{fill})", step)
    if group.attr("weighted"):
        dtype, kind = u.type.dtype, w.type(u.type)
        narrow = dtype.compute is not dtype or dtype.bits < 32
        for r in range(ahead):
            value = f"r{r} * w{r}"
            w.line(f"r{r} = {stored_as(value, dtype, kind) if narrow else value}", step)


def _place_row(w: KernelWriter, group: ScheduledGroup, name: str, number: str) -> None:
    """name = which row the slice of a number is."""
    (step,) = group.steps
    w.line(f"{name} = {number}", step)
    if group.attr("row"):
        w.line(f"{name} = " + re.sub(r"\bt\b", name, group.attr("row")), step)


def _number(w: KernelWriter, tensor: str, place: str) -> str:
    return f"tile.cast({tensor}[{place}], {w.type(INT32)})"


kernel_kind("parts", "index", parts_source, schedule_runs, [PART_SUMS])
kernel_kind("runs", "index", runs_source, schedule_runs, RUNS.values())

__all__ = ["sort_segments"]
