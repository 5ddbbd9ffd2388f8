"""Writes at positions: of repeated ones the last stays, as on the CPU.

Which element comes last at each place is found first, by atomic maxima of integers, whose order
does not matter; then every place of the result takes that element or keeps what it has.
"""

from __future__ import annotations

from math import prod

from ....numerics import as_type
from ...element import Element, index_names
from ...ir import Graph, Node, Value
from ...op import Aval, GraphOp
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ..choose_schedule import LANES, blocks, chosen
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital

INT32 = as_type("int32")


def _chosen_element(x: Aval, last: Aval, u: Aval, axis: int) -> Element:
    at = f"x1[o{axis}]"
    there = index_names([at if a == axis else a for a in range(x.ndim)])
    return Element(f"where({at} >= 0, x2[{there}], x0[{index_names(range(x.ndim))}])")


LAST_OF = library_call("last_of")  # ids -> [extent], where each stands last, else -1
WRITE_LAST = library_call("write_last", element=_chosen_element)


def open_writes(graph: Graph) -> Graph:
    """scatter_set(x, ids, u) as write_last(x, last_of(ids), u)."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.meets != "last" or not all(
                isinstance(d, int) for v in inputs for d in v.aval.shape):
            return None
        (x, ids, u), axis = inputs, node.attrs["axis"]
        extent, count = x.aval.shape[axis], prod(extents_of(ids))
        if not count or 0 in x.aval.shape:
            return x
        flat = rw.emit("reshape", ids, shape=(count,))
        shape = (*x.aval.shape[:axis], count, *x.aval.shape[axis + 1:])
        rows = rw.emit("reshape", u, shape=shape)
        last = _add(rw, LAST_OF, (flat,), Aval((extent,), INT32), extent=extent)
        return _add(rw, WRITE_LAST, (x, last, rows), x.aval, axis=axis)

    return rebuild(graph, visit)


def _add(rw: Rewriter, op: GraphOp, inputs: tuple[Value, ...], aval: Aval, **attrs: int) -> Value:
    made = Value(aval)
    rw.add(Node(op, inputs, attrs, (made,), rw.where))
    return made


def schedule_last(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """-1 everywhere, then the positions."""
    (node,) = group.nodes
    reads = [builder.operand(v) for v in builder.reads(group)]
    y, (T,) = builder.operand(node.outputs[0]), extents_of(node.inputs[0])
    for count, given in ((y.shape[0], []), (T, reads)):
        s = chosen(None, LANES, warps=4)
        builder.add("last", (count,), given, [y], [builder.step(node)], s,
                    (blocks(count, LANES),))


def last_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,), (count,) = KernelWriter(group), group.steps, group.writes, group.space
    if not group.reads:
        w.line(f"n = tile.group_id(0) * {LANES}")
        w.line(f"{capital(y.name)}[n:n+{LANES}] = -1", step)
        return w.finish_operands()
    (ids,), (V,) = group.reads, y.shape
    w.line("i = tile.linear_id()")
    with w.block(f"if i < {count}:"):
        w.line(f"at = {capital(ids.name)}[i]", step)
        w.check_index("at", V, step)
        w.line(f"place = tile.where(at < 0, at + {V}, at)", step)
        w.line(f"tile.atomic_max({capital(y.name)}, place, i)", step)
    return w.finish_operands()


kernel_kind("last", "index", last_source, schedule_last, [LAST_OF])

__all__ = ["WRITE_LAST", "open_writes"]
