"""Kernels of running sums, products, extrema, log-sum-exps and linear recurrences along an axis.

A tensor is seen as [A, T, C] around the axis; it has A C lines of T elements. Where there are very
many lines a thread walks down each, in the order of the CPU. Else the threads of a group share the
lines of some columns: each walks a segment of a line twice, once for its total, once behind the
totals of the segments before it; of several columns where they fill an access of 16 bytes and
segments come out even. A long line that is a row of memory has a group of its own, which
combines a block at a time in log2(block) rounds and carries the last of it on. Sums and products
of rows of memory go by blocks of rows. But for the first the order is then another, and the same
at each run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....numerics import DType
from ....tile.ir.schedule import Schedule
from ...ir import Node, Value
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.loop_axes import extents_of
from ..choose_schedule import blocks, chosen, power
from .gathers import around
from .scan_kinds import F64, SCANS, SEGMENT, column_states

LINES = 2048  # from so many on each is a thread's
SHORT = 256  # elements of a line that a thread walks down in any case
# Lines of columns that a group shares: fewer than MANY in all, COLUMNS of them at most, as few as a
# sector of memory holds where the card has GROUPS to run; SHARERS threads, of SEGMENT elements.
MANY, COLUMNS, FEW_COLUMNS, GROUPS, SHARERS = 2**19, 32, 8, 128, 512
# Of columns that fill an access: bits of a row of a block, elements of a segment at least, warps.
# In two, four and eight warps sums over axis 1 of [64, 2048, 512] of bf16 take 81.1 us, 84.1 and
# 82.7, a recurrence down [8, 2048, 4096] of f32 250, 266 and 310; in rows of half as many bits 102
# and 297, in segments of half as many elements 86.6 and 293 (H200, 2026-11-27, in turn).
LINE_BITS, LEAST_SEGMENT, COLUMN_WARPS = 1024, 4, 2
BLOCK = 1024  # elements of a line that a group combines at once
# Of rows of memory: elements of a group, eight in each lane; in longer rows more of them.
ROW_BLOCK, LONG_ROW, LONG_BLOCK = 1024, 4096, 4096


# --- which groups are one -----------------------------------------------------------------------
def join_scans(groups: Sequence[FusionGroup], results: Sequence[Value]) -> list[FusionGroup]:
    """The groups, with the loops that make what a scan alone reads as part of it, where it goes by
    tiles, and the loop that alone reads it, where it goes by rows. results: of the graph"""
    maker = {v: g for g in groups for v in g.outputs}
    at = {v: i for i, g in enumerate(groups) for v in g.outputs}
    count = dict.fromkeys(results, 1)
    readers: dict[Value, FusionGroup] = {}
    for g in groups:
        for v in g.inputs:
            count[v] = count.get(v, 0) + 1
            readers[v] = g
    gone, out = set[int](), list[FusionGroup]()
    for i, group in enumerate(groups):
        if group.kind == "scan":
            (v,) = group.outputs
            behind = readers.get(v) if count.get(v) == 1 and v not in results else None
            if behind is not None and all(at.get(x, -1) < i for x in behind.inputs if x is not v) \
                    and (more := _with_loop_behind(group, behind, maker)) is not None:
                gone.add(id(behind))
                group = more
            front = [maker[v] for v in group.inputs
                     if count[v] == 1 and v in maker and id(maker[v]) not in gone]
            if front and (made := _with_loops(group, front, maker)) is not None:
                gone.update(map(id, front))
                group = made
        out.append(group)
    return [g for g in out if id(g) not in gone]


def _with_loops(group: FusionGroup, front: Sequence[FusionGroup], maker: dict[Value, FusionGroup]
                ) -> FusionGroup | None:
    node = scan_of(group.nodes)
    space = extents_of(node.inputs[0])
    inside = {v for g in front for v in g.outputs}
    reads = list(dict.fromkeys(v for g in (*front, group) for v in g.inputs if v not in inside))
    whole = [v for v in reads if v.aval.ndim]
    plain = all(len(g.outputs) == 1 and _is_plain(g) for g in front)
    lies = _lie(whole, space, maker)
    A, T, C = around(space, node.attrs["axis"])
    if not plain or not lies or not (
            _even_rows(node, A, T, C) or len(group.nodes) == 1 and _even_segments(
                node, (A, T, C), len(whole))):
        return None
    return FusionGroup("scan", group.space, [*(n for g in front for n in g.nodes), *group.nodes],
                       reads, group.outputs)


def _with_loop_behind(group: FusionGroup, behind: FusionGroup, maker: dict[Value, FusionGroup]
                      ) -> FusionGroup | None:
    (node,) = group.nodes
    space = extents_of(node.inputs[0])
    if behind.space != space or not _is_plain(behind) or not _lie(behind.inputs, space, maker) or (
            not _even_rows(node, *around(space, node.attrs["axis"]))):
        return None
    reads = list(dict.fromkeys((*group.inputs, *behind.inputs)))
    return FusionGroup("scan", group.space, [node, *behind.nodes],
                       [v for v in reads if v is not node.outputs[0]], behind.outputs)


def _is_plain(group: FusionGroup) -> bool:
    return group.kind == "loop" and group.batch is None and not any(
        n.op.beside or n.op.makes or n.op.effects or n.op.placed or n.op.name == "check_index"
        for n in group.nodes)


def _lie(values: Sequence[Value], space: tuple[int, ...], maker: dict[Value, FusionGroup]) -> bool:
    """Whether what has axes lies in memory as the scan does."""
    return all(extents_of(v) == space and (v not in maker or maker[v].kind not in ("view", "move"))
               for v in values if v.aval.ndim)


def scan_of(nodes: Sequence[Node]) -> Node:
    """The scan among the nodes of a group."""
    return next(n for n in nodes if n.op.lines in SCANS)


def _even_rows(node: Node, A: int, T: int, C: int) -> bool:
    """Whether it goes by blocks of rows, which end where these do: then loops may be part of it."""
    return len(node.inputs) == 1 and _are_rows(node.op.lines, node.inputs[0].aval.dtype, C) and (
        T % _row_columns(T) == 0)


def _row_columns(T: int) -> int:
    return min(power(T), LONG_BLOCK if T >= LONG_ROW else ROW_BLOCK)


# --- blocks -------------------------------------------------------------------------------------
def schedule_scan(builder: ScheduleBuilder, group: FusionGroup) -> None:
    node = scan_of(group.nodes)
    A, T, C = around(extents_of(node.inputs[0]), node.attrs["axis"])
    if (length := _even_segments(node, (A, T, C), len(builder.reads(group)))):
        _schedule_columns(builder, group, (A, T, C), length)
        return
    if _are_rows(node.op.lines, node.inputs[0].aval.dtype, C):
        _schedule_rows(builder, group, node, A, T)
        return
    if (shared := _shared_columns(A * C, T, C)) is not None:
        _schedule_segments(builder, group, (A, T, C), shared)
        return
    walked = A * C >= LINES or T <= SHORT
    n = min(power(A * C), 128) if walked else min(power(T), BLOCK)
    s = chosen(None, n, warps=max(1, n // (32 if walked else 128)))
    _add(builder, group, (A, T, C), s, blocks(A * C, n) if walked else A * C,
         form="thread" if walked else "group")


def _add(builder: ScheduleBuilder, group: FusionGroup, space: tuple[int, int, int],
         schedule: Schedule, grid: int, form: str, **attrs: int) -> None:
    (node,) = group.nodes
    reads = [builder.operand(v, space) for v in dict.fromkeys(builder.reads(group))]
    builder.add("scan", space, reads, [builder.operand(node.outputs[0], space)],
                [builder.step(node, shape=space)], schedule, (grid,), scan=node.op.lines, form=form,
                **attrs)


def _shared_columns(count: int, T: int, C: int) -> int | None:
    """Lines that a group shares, in place of a thread for each, which has one element on its way
    from memory at a time: cumsum down [16384, 4096] of f32 takes 452 us so, and took 7183 (NVIDIA
    H200, 2026-11-27, `benchmarks/user_programs.py`). Where the forms meet was not measured."""
    if C == 1 or count >= MANY or T <= SEGMENT:
        return None
    return min(COLUMNS, max(FEW_COLUMNS, power(count // GROUPS)))


def _schedule_segments(builder: ScheduleBuilder, group: FusionGroup, space: tuple[int, int, int],
                       columns: int) -> None:
    A, T, C = space
    n = columns * min(SHARERS // columns, power(blocks(T, SEGMENT)))
    _add(builder, group, space, chosen(None, n, warps=max(1, n // 32)), blocks(A * C, columns),
         form="segments", columns=columns)


def _even_segments(node: Node, space: tuple[int, int, int], operands: int) -> int:
    """The elements of a segment of lines that a group shares, of as many columns as fill an access;
    0 where these are too few, or lines have no even segments. operands: of all elements"""
    A, T, C = space
    if _shared_columns(A * C, T, C) is None or C % _vector(node) or SCANS[node.op.lines].costly:
        return 0
    most = SEGMENT // max(1, operands)
    return next((n for n in range(most, LEAST_SEGMENT - 1, -1) if T % n == 0), 0)


def _vector(node: Node) -> int:
    """Columns of which states fill 16 bytes."""
    kept = column_states(node.op.lines, node.inputs[0].aval.dtype)
    return 128 // max(d.bits for d in (*kept, *(v.aval.dtype for v in node.outputs)))


def _schedule_columns(builder: ScheduleBuilder, group: FusionGroup, space: tuple[int, int, int],
                      length: int) -> None:
    """As many segments at once as the threads of a group have, behind each other."""
    node = group.nodes[-1]
    (A, T, C), vector = space, _vector(node)
    bits = min(v.aval.dtype.bits for v in (*node.inputs, *node.outputs))
    n = min(power(C), LINE_BITS // bits)
    if n > vector and A * blocks(C, n) < 2 * GROUPS:
        n //= 2
    warps = COLUMN_WARPS if A * blocks(C, n) >= 4 * GROUPS else 2 * COLUMN_WARPS
    m = min(power(T // length), 32 * warps * vector // n)
    s = chosen(m, n, warps=max(1, m * n // (32 * vector))).with_vector(vector)
    reads = [builder.operand(v, space) for v in dict.fromkeys(builder.reads(group))]
    builder.add("scan", space, reads, [builder.operand(node.outputs[0], space)],
                [builder.step(n, shape=space) for n in group.nodes], s, (A, blocks(C, n)),
                scan=node.op.lines, form="columns", length=length)


def _are_rows(lines: str, dtype: DType, C: int) -> bool:
    """Whether lines are rows of memory, and states numbers of a type that tiles add as they are."""
    scan = SCANS[lines]
    return C == 1 and scan.rows is not None and all(
        d.compute is d and d.bits >= 32 for d in scan.kept(dtype))


def keeps_f64(lines: str, dtype: DType) -> bool:
    """Whether states are of f64, whatever is read or written."""
    return all(d is F64 for d in SCANS[lines].kept(dtype))


def _schedule_rows(builder: ScheduleBuilder, group: FusionGroup, node: Node, A: int, T: int
                   ) -> None:
    n = _row_columns(T)
    m = min(power(A), max(1, ROW_BLOCK // n))
    s = chosen(m, n, warps=max(1, m * n // (256 if n <= ROW_BLOCK else 512)))
    builder.add("scan", (A, T, 1), [builder.operand(v, (A, T)) for v in builder.reads(group)],
                [builder.operand(v, (A, T)) for v in group.outputs],
                [builder.step(n, shape=(A, T)) for n in group.nodes], s, (blocks(A, m),),
                scan=node.op.lines, form="rows", scanned=group.nodes.index(node))


__all__ = ["SCANS", "join_scans", "keeps_f64", "schedule_scan"]
