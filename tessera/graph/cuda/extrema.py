"""Kernels of argmax and argmin: the place of the first largest or smallest element of a line.

A tensor is seen as [A, R, C] around the axis. NaN is beyond all numbers, as in NumPy.
"""

from __future__ import annotations

from ...numerics import DType, as_type
from ..schedule.build_schedule import ScheduleBuilder
from ..schedule.groups import FusionGroup
from ..schedule.ir import ScheduledGroup
from ..schedule.loop_axes import extents_of
from .choose_schedule import blocks, for_columns, for_rows
from .gathers import around
from .kernel_text import KernelText, KernelWriter, capital
from .spell import literal


def compared(w: KernelWriter, dtype: DType, text: str) -> str:
    """Elements in a type whose order kernels know."""
    kept = compared_type(dtype)
    return text if kept is dtype else f"tile.cast({text}, {w.type(as_type(kept.name))})"


def compared_type(dtype: DType) -> DType:
    if dtype.kind == "bool" or dtype.kind in ("int", "uint") and dtype.bits < 32:
        return as_type("int32").dtype
    if dtype.kind == "float" and dtype.bits < 32:
        return as_type("f32").dtype
    return dtype


def beyond(dtype: DType, way: str, a: str, b: str) -> str:
    """Whether a is larger (or smaller) than b, or the first NaN."""
    text = f"({a} {'>' if way == 'largest' else '<'} {b})"
    nan = f" | (tile.isnan({a}) & ~tile.isnan({b}))" if dtype.kind == "float" else ""
    return f"({text}{nan})"


def least(dtype: DType, way: str) -> str:
    """What every other number is beyond."""
    if dtype.kind == "float":
        return "-inf" if way == "largest" else "inf"
    return literal(dtype.min if way == "largest" else dtype.max, dtype.kind)


def schedule_position(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    (x,), (axis,) = node.inputs, node.attrs["axis"]
    A, R, C = around(extents_of(x), axis)
    if C == 1:
        s = for_rows((A, R))
        grid: tuple[int, ...] = (blocks(A, s.m or 1),)
    else:
        s = for_columns((R, C))
        grid = (A, blocks(C, s.n))
    builder.add("position", (A, R, C), [builder.operand(x, (A, R, C))],
                [builder.operand(node.outputs[0], (A, C))],
                [builder.step(node, shape=(A, C))], s, grid, way=node.op.lines)


def position_source(group: ScheduledGroup) -> KernelText:
    return _of_rows(group) if group.space[2] == 1 else _of_columns(group)


def _of_rows(group: ScheduledGroup) -> KernelText:
    """Blocks of columns, one after another: a later one wins only where it is beyond."""
    w, s, way = KernelWriter(group), group.schedule, group.attr("way")
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    A, R, _ = group.space
    BM, BN, dtype = s.m or 1, s.n, compared_type(x.type.dtype)
    side = "max" if way == "largest" else "min"
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"best = tile.full(({BM},), {least(dtype, way)}, {w.type(as_type(dtype.name))})", step)
    w.line(f"at = tile.zeros(({BM},), {w.type(as_type('int32'))})", step)
    with w.block(f"for n in range(0, {R}, {BN}):"):
        text = compared(w, x.type.dtype, f"tile.load({capital(x.name)}[m:m+{BM}, n:n+{BN}])")
        w.line(f"block = {text}", step)
        w.line(f"top = tile.row_{side}(block)", step)
        w.line(f"first = tile.arg{side}(block) + n", step)
        w.line(f"new = {beyond(dtype, way, 'top', 'best')}", step)
        w.line("at = tile.where(new, first, at)", step)
        w.line("best = tile.where(new, top, best)", step)
    w.line(f"{capital(y.name)}[m:m+{BM}] = tile.cast(at, {w.type(y.type)})", step)
    return _finished(w, group, [(A, R), (A,)])


def _of_columns(group: ScheduledGroup) -> KernelText:
    """A thread looks down each column."""
    w, way = KernelWriter(group), group.attr("way")
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    (A, R, C), BN = group.space, group.schedule.n
    dtype = compared_type(x.type.dtype)
    w.line("a = tile.group_id(0)")
    w.line(f"n = tile.group_id(1) * {BN}")
    w.line(f"best = tile.full(({BN},), {least(dtype, way)}, {w.type(as_type(dtype.name))})", step)
    w.line(f"at = tile.zeros(({BN},), {w.type(as_type('int32'))})", step)
    with w.block(f"for r in range(0, {R}):"):
        text = f"tile.load({capital(x.name)}[a, r, n:n+{BN}])"
        w.line(f"here = {compared(w, x.type.dtype, text)}", step)
        w.line(f"new = {beyond(dtype, way, 'here', 'best')}", step)
        w.line("at = tile.where(new, r, at)", step)
        w.line("best = tile.where(new, here, best)", step)
    w.line(f"{capital(y.name)}[a, n:n+{BN}] = tile.cast(at, {w.type(y.type)})", step)
    return _finished(w, group, [(A, R, C), (A, C)])


def _finished(w: KernelWriter, group: ScheduledGroup, shapes: list) -> KernelText:
    texts = [f"{capital(o.name)}: {w.annotation(o, d)}"
             for o, d in zip((*group.reads, *group.writes), shapes, strict=True)]
    return w.finish(texts, f"(grid={group.grid})", shapes)


__all__ = ["beyond", "compared", "compared_type", "least", "position_source", "schedule_position"]
