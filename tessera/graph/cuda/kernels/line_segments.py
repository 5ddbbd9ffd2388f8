"""Sums by integers within many lines: the same integers say for each line which of its slices are
added, as in the gradient of x[:, i, j].

    y[a, s, c] = sum of u[a, order[j], c] over begin[s] <= j < begin[s + 1]

The integers are put in order once (integer_order.py), so an element of the result reads what it is
the sum of and nothing else. Slices are added in the order in which they stand, more than CHAIN of
them in f64: the bits of a group for each segment (gathers.py), which looks through all integers.
"""

from __future__ import annotations

from math import prod

from ....numerics import as_type
from ...op import GraphOp
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ..choose_schedule import AHEAD, blocks, for_loop, power
from .gathers import nothing
from .group_statements import CHAIN
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG
from .spell import COMBINE, literal, stored_as

# u [A, T, C], order [T], begin [V + 1] -> [A, V, C]
LINE_RUNS = {way: library_call(name) for way, name in (
    ("sum", "line_sums"), ("max", "line_maxima"), ("min", "line_minima"))}


def schedule_line_runs(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    y = builder.operand(node.outputs[0])
    s = for_loop((prod(y.shape),), 64)
    ways: dict[GraphOp, str] = {op: way for way, op in LINE_RUNS.items()}
    builder.add(group.kind, y.shape, [builder.operand(v) for v in node.inputs], [y],
                [builder.step(node)], s, (blocks(prod(y.shape), s.n),), way=ways[node.op])


def line_runs_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,), BN = KernelWriter(group), group.steps, group.writes, group.schedule.n
    (u, order, _), way, dtype = group.reads, group.attr("way"), y.type.dtype
    (A, T, C), V = u.shape, y.shape[1]
    U, order_name, B = (capital(o.name) for o in group.reads)
    kind, name = w.type(y.type), step.name
    i32, f64 = w.type(order.type), as_type("f64")
    at = w.type(as_type("int64" if A * max(T, V) * C >= LONG else "int32"))
    none = literal(nothing(dtype, way), dtype.kind)
    narrow = dtype.compute is not dtype or dtype.bits < 32
    wide = way == "sum" and dtype.name == "f32" and T > CHAIN
    w.line(f"n = tile.group_id(0) * {BN}")
    w.line(f"e = tile.minimum(tile.arange(0, {BN}, {at}) + n, {A * V * C - 1})")
    w.line(f"a = e // {V * C}", step)
    w.line(f"c = e % {C}", step)
    w.line(f"s = tile.cast(e // {C} % {V}, {i32})", step)
    w.line(f"lo = tile.cast(tile.gather({B}, s), {i32})", step)
    w.line(f"count = tile.cast(tile.gather({B}, s + 1), {i32}) - lo", step)
    w.line("most = tile.reduce_max(count)", step)
    w.line(f"{name} = tile.full(({BN},), {none}, {kind})", step)
    if wide:
        w.line(f"{name}_w = tile.full(({BN},), 0.0, {w.type(f64)})", step)
    ahead = min(AHEAD, power(blocks(T, V)))
    with w.block(f"for j in range(0, most, {ahead}):"):
        for r in range(ahead):
            w.line(f"in{r} = j + {r} < count", step)
            w.line(f"at{r} = tile.gather({order_name}, tile.where(in{r}, lo + j + {r}, -1))", step)
            w.line(f"p{r} = tile.where(in{r}, a * {T * C} + at{r} * {C} + c, -1)", step)
        for r in range(ahead):
            w.line(f"r{r} = tile.gather({U}, p{r}, fill={none})", step)
        for r in range(ahead):
            total = COMBINE[way][0].format(name, f"r{r}")
            w.line(f"{name} = {stored_as(total, dtype, kind) if narrow else total}", step)
            if wide:
                w.line(f"{name}_w = {name}_w + tile.cast(r{r}, {w.type(f64)})", step)
    if wide:  # one after another: too many for f32
        w.line(f"{name} = tile.where(count > {CHAIN}, tile.cast({name}_w, {kind}), {name})", step)
    w.line(f"{capital(y.name)}[n:n+{BN}] = {name}", step)
    return w.finish_flat()


kernel_kind("line_runs", "index", line_runs_source, schedule_line_runs, LINE_RUNS.values())

__all__ = ["LINE_RUNS"]
