"""Kernels of argmax and argmin: the place of the first largest or smallest element of a line.

A tensor is seen as [A, R, C] around the axis. NaN is beyond all numbers, as in NumPy.
"""

from __future__ import annotations

from ....numerics import DType, as_type
from ...ir import Graph, Node, Value
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.loop_axes import extents_of
from ...schedule.loop_dtypes import is_narrow
from ...simplify import Rewriter, rebuild, remove_dead
from ..choose_schedule import blocks, for_columns, for_rows
from ..passes.data_movement import widens
from .gathers import around
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .spell import literal

POSITIONS = ("largest", "smallest")


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


def narrow_positions(graph: Graph) -> Graph:
    """The graph with positions of what is cast to a wider float read where it is narrow: the order
    is the same, and the bytes are half."""
    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        cast = rw.made_by(inputs[0], "cast") if node.op.lines in POSITIONS else None
        if cast is None or not widens(cast) or not is_narrow(cast.inputs[0].aval.dtype):
            return None
        return rw.emit(node.op.name, cast.inputs[0], **node.attrs)

    return remove_dead(rebuild(graph, visit))


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
    """Blocks along the line: each place of them keeps the first of the numbers that it sees which
    none is beyond, and in the end the first of all places that have the best one wins. So lanes
    meet once, however long a line is."""
    w, s, way = KernelWriter(group), group.schedule, group.attr("way")
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    (A, R, C), BM, BN = group.space, s.m or 1, s.n
    rows, dtype = C == 1, compared_type(x.type.dtype)
    over, side = "row" if rows else "col", "max" if way == "largest" else "min"
    kind, index = w.type(as_type(dtype.name)), w.type(as_type("int32"))
    if rows:
        w.line(f"m = tile.group_id(0) * {BM}")
        place, step_of, numbers = f"m:m+{BM}, r:r+{BN}", BN, f"tile.arange(0, {BN})[None, :]"
        stored, shapes = f"m:m+{BM}", [(A, R), (A,)]
    else:
        w.line("a = tile.group_id(0)")
        w.line(f"n = tile.group_id(1) * {BN}")
        place, step_of, numbers = f"a, r:r+{BM}, n:n+{BN}", BM, f"tile.arange(0, {BM})[:, None]"
        stored, shapes = f"a, n:n+{BN}", [(A, R, C), (A, C)]
    none = least(dtype, way)
    w.line(f"best = tile.full(({BM}, {BN}), {none}, {kind})", step)
    w.line(f"at = tile.full(({BM}, {BN}), {R}, {index})", step)
    with w.block(f"for r in range(0, {R}, {step_of}):"):
        text = f"tile.load({capital(x.name)}[{place}], fill=0)"
        w.line(f"here = {compared(w, x.type.dtype, text)}", step)
        new = f"(at == {R}) | {beyond(dtype, way, 'here', 'best')}"
        if R % step_of:
            w.line(f"there = {numbers} < {R} - r", step)
            new = f"there & ({new})"
        w.line(f"new = {new}", step)
        w.line(f"at = tile.where(new, {numbers} + r, at)", step)
        w.line("best = tile.where(new, here, best)", step)
    w.line(f"top = tile.{over}_{side}(best)", step)
    top = "top[:, None]" if rows else "top[None, :]"
    same = f"best == {top}"
    if dtype.kind == "float":
        same = f"({same}) | (tile.isnan(best) & tile.isnan({top}))"
    w.line(f"first = tile.{over}_min(tile.where({same}, at, {R}))", step)
    w.line(f"{capital(y.name)}[{stored}] = tile.cast(first, {w.type(y.type)})", step)
    return w.finish_operands(shapes)


kernel_kind("position", "reduction", position_source, schedule_position)

__all__ = ["beyond", "compared", "compared_type", "least", "narrow_positions"]
