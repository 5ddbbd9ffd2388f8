"""Binary searches of all elements at once, and the kernel of searchsorted.

A search counts the elements of an ordered line that stand before a value, a bit of the count in
each step, the highest first: all lanes take the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ....numerics import DType, as_type
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupStep, ScheduledGroup
from ...schedule.loop_axes import extents_of
from ..choose_schedule import blocks, for_loop
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .spell import literal

LONG = 1 << 30  # from here on numbers of elements are 64 bits wide


def less(dtype: DType, a: str, b: str) -> str:
    """Whether a stands before b: NaN is the largest."""
    if dtype.kind != "float":
        return f"({a} < {b})"
    return f"(({a} < {b}) | (tile.isnan({b}) & ~tile.isnan({a})))"


def count_before(w: KernelWriter, step: GroupStep, longest: int, length: str,
                 element: Callable[[str], str], before: Callable[[str], str]) -> str:
    """The name of how many of the first `length` elements of a line stand before the value.

    length: a number or a tile, at most `longest`.  element: at a place, as an expression.
    before: whether an element of that name stands before the value.
    """
    w.line("found = p * 0", step)
    half = 1 << (longest.bit_length() - 1) if longest else 0
    while half:
        w.line(f"next = found + {half}", step)
        w.line(f"here = {element('(next - 1)')}", step)
        w.line(f"found = tile.where((next <= {length}) & {before('here')}, next, found)", step)
        half //= 2
    return "found"


def schedule_search(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    ordered, values = node.inputs
    lines = prod(extents_of(ordered)[:-1])
    reads = {v: builder.operand(v) for v in builder.reads(group)}
    y = builder.operand(node.outputs[0])
    s = for_loop((prod(y.shape),), 64)
    builder.add("search", y.shape, list(reads.values()), [y],
                [builder.step(node)], s, (blocks(prod(y.shape), s.n),), lines=lines,
                length=extents_of(ordered)[-1], side=node.attrs["side"], dtype=ordered.aval.dtype)


def search_source(group: ScheduledGroup) -> KernelText:
    """y[l, j] = how many elements of the line l are below values[l, j], or equal to it."""
    w, (step,), (y,), BN = KernelWriter(group), group.steps, group.writes, group.schedule.n
    N, total = group.attr("length"), prod(y.shape)
    size = max(prod(o.shape) for o in w.operands)
    (x, v), dtype = step.args, group.attr("dtype")
    w.line(f"n = tile.group_id(0) * {BN}")
    w.line(f"p = tile.arange(0, {BN}, {w.type(as_type('int64' if size >= LONG else 'int32'))}) + n")
    w.line(f"value = tile.load({capital(v)}[n:n+{BN}])" if isinstance(v, str) else
           f"value = {literal(v, dtype.kind)}", step)
    each = total // group.attr("lines") if group.attr("lines") else 1
    w.line(f"line = p // {max(each, 1)} * {N}", step)
    right = group.attr("side") == "right"
    found = count_before(
        w, step, N, str(N), lambda at: f"tile.gather({capital(x)}, line + {at})"
        if isinstance(x, str) else f"tile.cast({at} * 0, {w.type(as_type(dtype))}) + "
        f"{literal(x, dtype.kind)}",  # one number all along
        lambda e: f"~{less(dtype, 'value', e)}" if right else less(dtype, e, "value"))
    w.line(f"{capital(y.name)}[n:n+{BN}] = tile.cast({found}, {w.type(y.type)})", step)
    return w.finish_flat()


kernel_kind("search", "sort", search_source, schedule_search)

__all__ = ["LONG", "count_before", "less"]
