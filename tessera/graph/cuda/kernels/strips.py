"""Sums over long columns: of strips of rows, along with the loop that makes their elements.

    g, x -> dx, and sum(g), sum(g * x) over all rows

A loop over [R, C] keeps such a sum in registers while it passes over a strip of its rows, and
writes one row for each strip; a reduction over these rows follows. The elements need not lie in
memory, and there are groups enough for a GPU however few columns there are. The order of additions
follows from the extents alone, so two runs give the same bits.

Blocks of whole rows are dealt out, each strip has every so many-th: what all groups read at one
time lies together. Gradients of norms of 2^26 elements of bf16, for strips of neighbours: of layer
norm in rows of 64 147.6 us in place of 151.7, of 256 149.8 and 154.3, of 1024 147.0 and 152.3, of
4096 147.4 and 151.0, of RMS norm of 1024 144.5 and 148.5 (H100, 2026-11-26).

The largest of all elements goes along as that of each column, where a loop has such sums: one of
each row would wait for other lanes, and wide rows for other warps. Codes of 8 bits go along
transposed, where a matmul reads them so (transpose_codes.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ....kernels.cards import multiprocessors_of
from ....lazy_dataclass import dataclass
from ....numerics import as_type
from ....runtime.generations import Generation
from ....tile.ir.schedule import Schedule
from ...flops import none
from ...ir import Graph, Node, Value, producers_of, readers_of
from ...op import Aval, GraphOp
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import MAX_OPS, FusionGroup
from ...schedule.ir import GroupStep, ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import Frame, extents_of, merged
from ...schedule.loop_ops import column_sum_axes, is_last_axis_reduction, loop_space
from ...simplify import Rewriter, rebuild, remove_dead
from ..choose_schedule import blocks, chosen, power
from .group_statements import CHAIN, FrameBlock, KernelValue, store, value
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .long_strips import (
    LEAST,
    LongStrips,
    add_long_strips,
    long_strips,
    long_strips_source,
    rows_with_room,
)
from .loop_kernels import body, maker, signature
from .spell import COMBINE

ROWS = 128  # of a strip; more where there would be more than STRIPS of them
# Of rows that are held whole. Of 8192 rows of 768 columns 512 strips in place of 256: layer norms'
# gradients take 714 us of a step in place of 833, sums over all strips 84 in place of 70 (GPT-2
# 124M, B 8, H200, 2026-11-26). Of wide rows a group has more under way: rms norm's gradient of 8192
# rows of 2048 columns of f32, with a residual, takes 71 us in 256 strips and 77 in 512 (H200,
# 2026-11-26, in turn under load). Codes that go along transposed are written in lines of a strip's
# rows, which are not to be shorter.
FEWEST_ROWS, FEWEST_OF_WIDE, FEWEST_OF_CODES = 16, 32, 32
# About the groups of four warps that run at once. Rows that are held whole wait for their own
# statistics, so that it takes several groups on a multiprocessor to keep its memory busy: 512
# strips in place of 128 take 74 us in place of 82 (layer norm's gradient of [16384, 1024], H200,
# 2026-11-23, `tessera bench step gpt2-350m`).
# Columns alone are quicker in long strips: 116 us in place of 138 (gelu's of [16384, 4096]).
STRIPS, MULTIPROCESSORS = 512, 128
# Rows that are worth a second kernel. Of fewer, down to FEWEST, so many elements: they would be
# written in f32 and read again. Layer norm's gradient of [512, 131072] took 705 us on an H100.
LONG, FEWEST, LARGE = 1024, 64, 1 << 24
# Columns of a row that is held whole, beside its sums, by sixteen warps; and by four.
WIDE, NARROW = 8192, 2048
# Columns of rows of which twice as many strips run: layer norm's gradient of rows of 256 takes 122
# us in place of 143, of 1024 133 in place of 128 (2^26 elements of bf16, H200, 2026-11-26). All of
# them have to run at one time: with 67 registers in place of 64, which was ptxas's choice for a
# while, one of eight waits for the others to end: 148.6 us in place of 111.8, of f32 125.0 and
# 109.1 (H200, 2026-11-27, in turn).
SHORT = 256
BLOCK, COLUMNS, WARPS = 2048, 256, 8  # elements of a block: 8 in each lane
# Such groups of a multiprocessor. Where strips of ROWS are fewer they are shorter: sums of dy and
# dy (x - m) over [12544, 256] of bf16 take 9.3 us in place of 15.1, over [3136, 2048] 13.4 and
# 18.6, over [3136, 512] 8.4 and 15.0 (H200, 2026-11-28).
CLOSE = 3
ROW_WARPS, MOST_WARPS = 4, 16  # of blocks of whole rows
HELD = 100  # numbers of a lane that leave room for four groups of four warps, or two of eight
# Blocks under way where few groups run or each has one row: the next is asked for while the
# statistics of one are made, or its elements. Layer norm's gradient of 4096 columns of bf16: 163 us
# in place of 188; of two rows of 1024 in four warps, with four such groups, 181 in place of 175
# (2^26 elements, H100, 2026-11-25). Gelu's gradient and its sums in steps: of [16384, 4096] 110.9
# us in place of 113.9, of [8192, 3072] 48.9 in place of 49.4 (H200, 2026-11-26).
AHEAD = 2
# Of two rows and more of over SHORT_ROWS columns the next block's elements come into registers
# meanwhile, where lanes have room for so many bits of them, and no more registers than leave room
# for all groups that run at once: gradients of rows of 1024, 2^26 elements of bf16, of layer norm
# 116.4 us in place of 122.3, of RMS norm 110.4 and 117.3; with more registers and so a second wave
# 164.8 (H200, 2026-11-26); 151.0 and 154.2, 148.9 and 151.6 (H100, 2026-11-26). Of 64 to 512
# columns it gains nothing on an H100.
CARRIED_BITS, SHORT_ROWS = 512, 512
# Without statistics of rows the next block's elements are on their way, in as many groups as leave
# registers for that, where an element reads so many bits. Of 16 bits blocks have twice as many
# rows: sums of [16384, 4096] of bf16 take 47.9 us in place of 51.8, the logarithms of sums of
# powers 85.1 in place of 107.0 and 89.5 in three groups, sums of gelu of [65536, 768] 45.3 in place
# of 64.3 and 48.1 (H200, 2026-11-27, in turn). Of two operands of 16 bits in rows of COLUMNS and
# more: sums of dy and dy (x - m) over [200704, 256] 59.0 us in place of 73.4, [50176, 512] 36.3 and
# 43.0, [12544, 1024] 18.5 and 22.2; of [200704, 64] 18.3 and 14.0, [50176, 128] 12.1 and 10.1. Of
# one of f32 [200704, 256] 48.9 and 57.9, [16384, 4096] 61.7 and 72.2 (H200, 2026-11-28).
NARROW_BITS, NARROW_CLOSE, PAIR_BITS, PAIR_CLOSE = 16, 4, 32, 3

STRIP_SUM = library_call("strip_sum", reduction="sum", shows=(0,))
STRIP_MAX = library_call("strip_max", reduction="max", shows=(0,))
KEPT = {op.name: op.reduction for op in (STRIP_SUM, STRIP_MAX)}  # while a loop passes over a strip
# Codes of a type of 8 bits -> their bytes, [C, R].
STRIP_TURNED = library_call("strip_turned", flops=none)
STRIPS_OF = (STRIP_SUM, STRIP_MAX, STRIP_TURNED)  # x -> [strips, C], of `rows` rows each, or [C, R]
# Codes that go along transposed are kept in shared memory until a strip ends: so many bytes of a
# group at most, of so many columns where blocks do not have whole rows, in four warps, and then
# written in lines of a strip's rows, so many columns at a time. Gelu's codes of [16384, 4096] take
# 116 us, its gradient's 156 (H100, 2026-11-25); 128 rows of 64 columns at once, which need no
# memory but more registers, 136 and 185; 256 columns in eight warps 116 and 167.
TURNED_BYTES, TURNED_COLUMNS, TURNED_STEP = 32768, 128, 64


def open_column_sums(graph: Graph, chip: Generation) -> Graph:
    """Sums over all axes but the last, where these are long, as sums of strips and a sum of those.
    """
    held, fewest = _spaces_towards_largest(graph), FEWEST_ROWS
    groups = CLOSE * multiprocessors_of(chip)
    if any(v.aval.dtype.name in chip.converts for n in graph.nodes for v in n.outputs):
        fewest, groups = FEWEST_OF_CODES, 0

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        axis = column_sum_axes(node)
        if axis is None:
            return None
        (x,) = inputs
        if x.aval.dtype.kind != "float" or not all(isinstance(d, int) for d in x.aval.shape):
            return None
        rows, columns = _rows_and_columns(x)
        if rows < LONG and (rows < FEWEST or rows * columns < LARGE):
            return None
        x = _before_cuts(rw, x)
        accum = node.attrs["accum"]
        wide = as_type(accum.name)
        if x.aval.dtype is not accum:
            x = rw.emit("cast", x, source=x.aval.type, to=wide)
        how = _long(x, held, chip)
        rows = how.rows if how else _strip_rows(x, held, fewest, groups)
        parts = _strips(rw, STRIP_SUM, x, rows, how=how)
        made = rw.emit("reduce_sum", parts, axis=(0,), keepdims=True, accum=accum)
        out = node.outputs[0].aval
        if out.dtype is not accum:
            made = rw.emit("cast", made, source=made.aval.type, to=out.type)
        return rw.emit("reshape", made, shape=out.shape)

    return rebuild(graph, visit)


def _spaces_towards_largest(graph: Graph) -> set[tuple[int, int]]:
    """(rows, columns) of values whose rows are summed: their loops hold whole rows."""
    return {_rows_and_columns(n.inputs[0]) for n in graph.nodes
            if n.op.reduction == "sum" and is_last_axis_reduction(n)}


def _rows_and_columns(x: Value) -> tuple[int, int]:
    return prod(extents_of(x)[:-1]), extents_of(x)[-1]


def _strip_rows(x: Value, held: Container[tuple[int, int]], fewest: int, groups: int = 0) -> int:
    """groups: as many as are to run at once, 0 where strips are not to be shorter for them."""
    R, C = _rows_and_columns(x)
    whole = (R, C) in held and C <= WIDE
    rows, most = ROWS, STRIPS
    if whole:  # groups of more warps, of which fewer run at once; of short rows more do
        rows = fewest if C < NARROW else max(fewest, FEWEST_OF_WIDE)
        most = STRIPS * NARROW // max(NARROW, power(C)) * (2 if C <= SHORT else 1)
    while blocks(R, rows) > most:
        rows *= 2
    n = min(power(C), COLUMNS)
    while not whole and rows > BLOCK // n and 4 * blocks(R, rows) * blocks(C, n) < 3 * groups:
        rows //= 2  # about a wave of groups
    return rows


def _long(x: Value, held: Container[tuple[int, int]], chip: Generation) -> LongStrips | None:
    R, C = _rows_and_columns(x)
    return long_strips(R, C, chip) if (R, C) in held and C > LEAST else None


def _strips(rw: Rewriter, op: GraphOp, x: Value, rows: int, **more: Any) -> Value:
    R, C = _rows_and_columns(x)
    parts = Value(Aval((blocks(R, rows), C), x.aval.type))
    axis = tuple(range(x.aval.ndim - 1))
    rw.add(Node(op, (x,), {"axis": axis, "rows": rows, **more}, (parts,), rw.where))
    return parts


def open_maxima(graph: Graph) -> Graph:
    """The largest of all elements as those of strips' columns, where the loop that makes the
    elements has strips and no statistics of rows."""
    loops = StripLoops(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not loops.is_largest(node):
            return None
        x, out = loops.maker[node.inputs[0]].inputs[0], node.outputs[0].aval
        values, statistics = loops.values(x)
        rows = 0 if statistics else loops.rows(values)
        if not rows or x.aval.dtype.kind != "float" or x.aval.dtype.bits < 32:
            return None
        parts = _strips(rw, STRIP_MAX, rw.env[x], rows)
        for axis in ((1,), (0,)):
            parts = rw.emit("reduce_max", parts, axis=axis, keepdims=True)
        return rw.emit("reshape", parts, shape=out.shape)

    return remove_dead(rebuild(graph, visit))


class StripLoops:
    """What is known of the loops that make a graph's values, before they are fused."""

    def __init__(self, graph: Graph):
        self.maker = producers_of(graph)
        self.readers, self.held = readers_of(graph), _spaces_towards_largest(graph)
        self.known: dict[Value, tuple[set[Value], bool]] = {}
        self.turned: dict[Value, int] = {}  # what codes are made of that are written transposed
        for n in graph.nodes:
            if n.op is STRIP_TURNED:
                self.turned |= dict.fromkeys(self.values(n.inputs[0])[0], n.attrs["rows"])

    def is_largest(self, node: Node) -> bool:
        """Whether it is the largest of all elements, of those of rows."""
        rows = self.maker.get(node.inputs[0]) if node.op.name == "reduce_max" else None
        return rows is not None and self.towards_largest(rows)

    def towards_largest(self, rows: Node) -> bool:
        """Whether it is the largest elements of rows of which the largest alone is asked for."""
        if rows.op.name != "reduce_max" or not is_last_axis_reduction(rows):
            return False
        behind = self.readers.get(rows.outputs[0], [])
        return len(behind) == 1 and behind[0].op.name == "reduce_max" and prod(
            extents_of(behind[0].outputs[0])) == 1

    def lies(self, v: Value) -> bool:
        """Whether a loop reads it from memory: no loop over its elements makes it."""
        made = self.maker.get(v)
        return made is None or bool(made.op.reduction) or loop_space(made) != extents_of(v)

    def values(self, x: Value) -> tuple[set[Value], bool]:
        """x and what its elements are made of, one by one, in a loop of as many ops as a group may
        have; whether that has statistics of rows beside the largest numbers."""
        if x in self.known:
            return self.known[x]
        space, found, statistics, ahead = extents_of(x), set[Value](), False, deque([x])
        while ahead and len(found) < MAX_OPS:
            v = ahead.popleft()
            if v in found or extents_of(v) != space:
                statistics = statistics or extents_of(v) == (*space[:-1], 1)
                continue
            found.add(v)
            statistics = statistics or any(is_last_axis_reduction(n) and not self.towards_largest(n)
                                           for n in self.readers.get(v, ()))
            if not self.lies(v):
                ahead.extend(self.maker[v].inputs)
        return self.known.setdefault(x, (found, statistics))

    def largest_before(self, values: Iterable[Value]) -> set[Node]:
        """The largest elements of rows that the numbers follow from by which these are scaled."""
        found, read = set[Node](), set[Value]()
        ahead = [v for x in values if x in self.maker for v in self.maker[x].inputs]
        while ahead:
            v = ahead.pop()
            made = self.maker.get(v)
            if made is None or v in read or prod(extents_of(v)) != 1:
                continue
            read.add(v)
            found.update(n for x in made.inputs
                         if (n := self.maker.get(x)) and self.towards_largest(n))
            ahead += made.inputs
        return found

    def rows(self, values: Iterable[Value]) -> int:
        """The rows of the strips in the loop that makes these, 0 where it has none."""
        strips = (n.attrs["rows"] for v in values for n in self.readers.get(v, ())
                  if n.op in STRIPS_OF)
        return next(strips, 0) or next((self.turned[v] for v in values if v in self.turned), 0)

    def turned_rows(self, codes: Value) -> int:
        """The rows of strips in which the loop that makes codes can write them transposed; 0 where
        they are few, or a strip has no room in shared memory, of whole rows with statistics."""
        values, statistics = self.values(codes)
        rows, (R, C) = self.rows(values), _rows_and_columns(codes)
        if R < LONG:
            return 0
        rows = rows or (
            _strip_rows(codes, self.held, FEWEST_OF_CODES) if statistics else ROWS)
        fits = C <= WIDE and C % TURNED_STEP == 0 if statistics else True
        return rows if fits and rows * (C if statistics else TURNED_STEP) <= TURNED_BYTES else 0


def _before_cuts(rw: Rewriter, x: Value) -> Value:
    """x in the rows that its elements are made in: the loop that makes them takes in the sum."""
    made = rw.producer.get(x)
    if made is None:
        return x
    if made.op.name == "cast":
        before = made.inputs[0]
        rows = _before_cuts(rw, before)
        return x if rows is before else rw.emit("cast", rows, **made.attrs)
    if made.op.name != "reshape":
        return x
    before = made.inputs[0]
    source = rw.producer.get(before)
    if source is None or source.op.name != "reshape" and loop_space(source) is None:
        return x  # a matmul's: what is behind the reshape takes in the sum
    whole = before.aval.ndim > 1 and before.aval.shape[-1:] == x.aval.shape[-1:] and all(
        isinstance(n, int) for n in before.aval.shape)
    return _before_cuts(rw, before) if whole else x


def strips_of(nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if n.op in STRIPS_OF]


def has_rows(space: tuple[int, ...], nodes: Sequence[Node]) -> bool:
    """Whether some value is one number per row."""
    rows = (*space[:-1], 1)
    folds = any(n.op.reduction in COMBINE for n in nodes if n.op not in STRIPS_OF)
    return folds or space != rows and any(extents_of(v) == rows for n in nodes for v in n.outputs)


def takes_strips(space: tuple[int, ...], nodes: Sequence[Node]) -> bool:
    """Whether the loop of these nodes can sum the strips among them: where it has statistics of
    rows, these are held whole."""
    strips = strips_of(nodes)
    if len(_frame(space, nodes).members) != 2 or len({n.attrs["rows"] for n in strips}) > 1 or any(
            n.op.beside for n in nodes):
        return False
    codes = sum(n.attrs["rows"] for n in strips if n.op is STRIP_TURNED)
    if not has_rows(space, nodes):
        return codes * TURNED_STEP <= TURNED_BYTES
    return _streamed(space, nodes) > 0 or (
        space[-1] <= WIDE and row_warps(space, nodes)[1] <= HELD and (
            not codes or codes * space[-1] <= TURNED_BYTES and space[-1] % TURNED_STEP == 0))


def _streamed(space: tuple[int, ...], nodes: Sequence[Node]) -> int:
    """The rows that have room in shared memory where rows go through it one after another; else
    they are held whole."""
    strips = strips_of(nodes)
    how = strips[0].attrs.get("how")
    if how is None or not has_rows(space, nodes) or any(n.op.name not in KEPT for n in strips):
        return 0
    return rows_with_room(space, nodes, len(strips), how)


def row_warps(space: tuple[int, ...], nodes: Sequence[Node]) -> tuple[int, int]:
    """The warps of a group that holds a row whole, and the numbers in each of their lanes."""
    inside = {v for node in nodes for v in node.outputs}
    read = {v for node in nodes for v in node.inputs} - inside
    values = len(strips_of(nodes)) + sum(extents_of(v) == space for v in read) + 2
    warps = ROW_WARPS
    while warps < MOST_WARPS and blocks(space[-1], 32 * warps) * values > HELD:
        warps *= 2
    return warps, blocks(space[-1], 32 * warps) * values


def _frame(space: tuple[int, ...], nodes: Sequence[Node]) -> Frame:
    sums = {v for n in strips_of(nodes) for v in n.outputs}
    whole = (v for n in nodes for v in (*n.inputs, *n.outputs) if v not in sums)
    return merged(space, map(extents_of, whole), True)


@dataclass(frozen=True)
class StripBlocks:
    """frame: of two axes.  rows: of a strip.  whole: whether blocks have whole rows.  carried:
    whether the next block's elements come into registers meanwhile."""

    frame: Frame
    rows: int
    whole: bool
    schedule: Schedule
    carried: bool = False


def strip_blocks(space: tuple[int, ...], nodes: Sequence[Node]) -> StripBlocks:
    """The blocks of a loop with such sums."""
    sums = strips_of(nodes)
    frame = _frame(space, nodes)
    (R, C), rows = frame.extents, sums[0].attrs["rows"]
    whole = has_rows(space, nodes)
    if not whole and (turned := [n for n in sums if n.op is STRIP_TURNED]):
        n = min(power(C), TURNED_COLUMNS, TURNED_BYTES // (rows * len(turned)))
        m = 8 * 32 * ROW_WARPS // n
        return StripBlocks(frame, rows, False, chosen(min(rows, m), n, warps=ROW_WARPS))
    if not whole:
        n = min(power(C), COLUMNS)
        m = min(rows, BLOCK // n)
        times, close = _ahead(_bits_read(space, nodes), n)
        if close and R % rows == 0 and rows % (times * m) == 0:
            return StripBlocks(frame, rows, False, Schedule(
                m=times * m, n=n, warps=WARPS, RESIDENT=close), True)
        return StripBlocks(frame, rows, False, chosen(m, n, warps=WARPS))
    warps, numbers = row_warps(space, nodes)
    m = max(1, 8 * 32 * warps // power(C))
    while m < warps and 2 * m * numbers <= HELD:
        m *= 2  # a row for each warp, so that no statistic waits for other warps
    m = min(rows, m)
    if m == 1 or C <= SHORT_ROWS or warps > ROW_WARPS or R % rows or rows % m or (
            _bits_read(space, nodes) * m * C > CARRIED_BITS * 32 * warps):
        return StripBlocks(frame, rows, True,
                           _in_one_wave(chosen(m, C, warps=warps), blocks(R, rows), numbers))
    close = STRIPS // MULTIPROCESSORS
    return StripBlocks(frame, rows, True, Schedule(m=m, n=C, warps=warps, RESIDENT=close), True)


def _ahead(bits: int, columns: int) -> tuple[int, int]:
    """How many times the rows a block has whose next one is on its way, and such groups of a
    multiprocessor; none where that takes longer. bits: read of an element."""
    if bits <= NARROW_BITS:
        return 2, NARROW_CLOSE
    return (1, PAIR_CLOSE) if bits <= PAIR_BITS and columns == COLUMNS else (1, 0)


def _in_one_wave(s: Schedule, groups: int, numbers: int) -> Schedule:
    """The schedule with registers left for all groups to run at once, where what lanes hold, so
    many numbers for each row, has room in these."""
    close, warps = blocks(groups, MULTIPROCESSORS), s.value("warps_")
    each = numbers * (s.m or 1) * power(s.n) // (blocks(s.n, 32 * warps) * 32 * warps)
    fits = close * warps * each <= HELD * ROW_WARPS * STRIPS // MULTIPROCESSORS
    return replace(s, extra=(("RESIDENT", close),)) if close > 1 and fits else s


def _bits_read(space: tuple[int, ...], nodes: Sequence[Node]) -> int:
    """Of one element of each operand that lies along the whole space."""
    inside = {v for n in nodes for v in n.outputs}
    return sum(v.aval.type.dtype.bits for v in {v for n in nodes for v in n.inputs} - inside
               if extents_of(v) == space)


def schedule_strips(builder: ScheduleBuilder, group: FusionGroup) -> None:
    sums = strips_of(group.nodes)
    kept = {v for n in sums for v in n.outputs}
    reads = [builder.operand(v) for v in builder.reads(group)]
    writes = [builder.operand(v) for v in group.outputs if v not in kept]
    writes += [builder.operand(v) for v in group.outputs if v in kept]
    steps, how = [builder.step(n) for n in group.nodes], sums[0].attrs.get("how")
    if how is not None and (room := _streamed(group.space, group.nodes)):
        frame = _frame(group.space, group.nodes)
        add_long_strips(builder, group.space, frame, reads, writes, steps, how, room)
        return
    b = strip_blocks(group.space, group.nodes)
    (R, C), s = b.frame.extents, b.schedule
    builder.add("strips", group.space, reads, writes, steps, s,
                (blocks(R, b.rows),) if b.whole else (blocks(R, b.rows), blocks(C, s.n)),
                axes=b.frame.members, rows=b.rows, **{"carried": True} if b.carried else {})


def strips_source(group: ScheduledGroup) -> KernelText:
    """Block after block of a strip: load, compute, store, add; then one row of sums."""
    if "cluster" in dict(group.attrs):
        return long_strips_source(group, KEPT)
    w, frame = KernelWriter(group), Frame(group.space, group.attr("axes"))
    BM, BN, rows = group.schedule.m or 1, group.schedule.n, group.attr("rows")
    R = frame.extents[0]
    sums = [s for s in group.steps if s.op in KEPT]
    turned = [s for s in group.steps if s.op == STRIP_TURNED.name]
    kept = {s.name for s in (*sums, *turned)}
    w.line("strip = tile.group_id(0)")
    whole = len(group.grid) == 1
    if not whole:
        w.line(f"n = tile.group_id(1) * {BN}")
    columns = f"0:{BN}" if whole else f"n:n+{BN}"
    for s in turned:
        w.line(f"{s.name}_s = tile.alloc_shared(({rows}, {BN}), {w.type(s.type)})", s)
    kinds = {s.name: _sums_type(w, s, blocks(rows, BM)) for s in sums}
    for s in sums:
        neutral = COMBINE[KEPT[s.op]][1]
        w.line(f"{s.name}_a = tile.full(({BM}, {BN}), {neutral}, {kinds[s.name]})", s)
    ragged = R % rows > 0  # of columns beyond the last no sum is stored
    b = FrameBlock(frame, f"m:m+{BM}", columns, (), BM, BN, {r.name: r for r in group.reads},
                   fill="" if ragged else ", fill=0",
                   ahead=AHEAD if BM == 1 or group.schedule.warps > ROW_WARPS else 1)
    writes = [o for o in group.writes if o.name not in kept]
    carried = dict(group.attrs).get("carried", False)
    for r in () if whole else group.reads:
        if not b.pattern(r)[0]:  # the same for all rows: not read again for each block
            value(w, b, r.name, r.type.dtype.kind, group.steps[0])
    at = f"strip * {BM} + {{}} * {group.grid[0]}"
    if turned or not whole:  # neighbours
        at = f"strip * {rows} + {{}}"
    if carried:
        _carry(w, b, group, at.format(0))
    with w.block(f"for i in range(0, {rows}, {BM}):"):
        w.line(f"m = {at.format('i')}")
        if carried:
            _carry(w, b, group, at.format(f"min(i + {BM}, {rows - BM})"), held=True)
        _load_ahead(w, b, group)
        body(w, b, group, [s for s in group.steps if s.name not in kept])
        for o in writes:
            store(w, b, o, maker(group, o.name))
        for s in turned:
            codes = f"tile.bytes_of({_whole_block(w, b, s)})"
            w.line(f"{s.name}_s[i:i+{BM}, 0:{BN}] = {codes}", s)
        for s in sums:
            _add(w, b, s, kinds[s.name], ragged)
    for s in sums:
        total = f"tile.cast(tile.col_{KEPT[s.op]}({s.name}_a), {w.type(s.type)})"
        w.line(f"{capital(s.name)}[strip, {columns}] = {total}", s)
    for s in turned:
        _write_turned(w, s, rows, BN, "" if whole else "n + ")
    texts, _, shapes = signature(w, b, group, (*group.reads, *writes))
    partial = [o for o in group.writes if o.name in kept]
    texts += [f"{capital(o.name)}: {w.annotation(o, o.shape)}" for o in partial]
    return w.finish(texts, f"(grid={group.grid})", [*shapes, *(o.shape for o in partial)])


def _sums_type(w: KernelWriter, step: GroupStep, many: int) -> str:
    """Of sums that so many blocks are added to, one after another."""
    wide = step.op == STRIP_SUM.name and step.type.dtype.name == "f32" and many > CHAIN
    return w.type(as_type("f64") if wide else step.type)


def _carry(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, at: str, held: bool = False
           ) -> None:
    """Asks for the rows from `at` on. held: what was asked for before is this block's."""
    w.line(f"a = {at}")
    rows = replace(b, rows=f"a:a+{b.BM}")
    for r in group.reads:
        if all(b.pattern(r)):
            step = next(s for s in group.steps if r.name in s.args)
            if held:
                w.line(f"{r.name} = {r.name}_c", step)
                b.held[r.name] = KernelValue(r.name, True, True)
            w.line(f"{r.name}_c = tile.load({rows.place(r)[0]}{b.fill})", step)


def _load_ahead(w: KernelWriter, b: FrameBlock, group: ScheduledGroup) -> None:
    """What varies along the rows, before the first statistic waits for other lanes."""
    for r in group.reads:
        if b.pattern(r)[0]:
            step = next(s for s in group.steps if r.name in s.args)
            value(w, b, r.name, r.type.dtype.kind, step)


def _write_turned(w: KernelWriter, s: GroupStep, rows: int, C: int, at: str) -> None:
    """The codes of a strip, when all of them are in shared memory. at: where its columns begin."""
    step = min(TURNED_STEP, C)
    w.line("tile.barrier()", s)
    with w.block(f"for c in range(0, {C}, {step}):"):
        w.line(f"{capital(s.name)}[{at}c:{at}c+{step}, strip*{rows}:strip*{rows}+{rows}] = "
               f"tile.load({s.name}_s[0:{rows}, c:c+{step}]).T", s)


def _whole_block(w: KernelWriter, b: FrameBlock, step: GroupStep) -> str:
    """The operand of a step, for each element of a block."""
    (arg,) = step.args
    held = value(w, b, arg, "float", step)
    return held.text if held.m and held.n else f"tile.broadcast({held.text}, {b.shape})"


def _add(w: KernelWriter, b: FrameBlock, step: GroupStep, kind: str, ragged: bool) -> None:
    """A block's elements to the running sums of their places; what changes none of these beyond
    the last row. ragged: there is such a place."""
    together, neutral = COMBINE[KEPT[step.op]]
    w.line(f"{step.name}_p = {_whole_block(w, b, step)}", step)
    inside = f"{step.name}_p"
    if ragged:
        inside = f"tile.where(tile.inside({inside}), {inside}, {neutral})"
    w.line(f"{step.name}_a = {together.format(f'{step.name}_a', f'tile.cast({inside}, {kind})')}",
           step)


kernel_kind("strips", "reduction", strips_source, schedule_strips)

__all__ = ["STRIPS_OF", "STRIP_MAX", "STRIP_SUM", "STRIP_TURNED", "StripLoops", "has_rows",
           "open_column_sums", "open_maxima", "strip_blocks", "strips_of", "takes_strips"]
