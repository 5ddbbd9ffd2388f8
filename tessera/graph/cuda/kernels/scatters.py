"""Writes at positions: of repeated ones the last stays, as on the CPU.

Which element comes last at each place is found first, by atomic maxima of integers, whose order
does not matter. Then every place of the result takes that element or keeps what it has. Where few
places are written, no others are looked at: those elements go into what was there, which lies where
the result does if nobody reads it again, as a cache that is donated.
"""

from __future__ import annotations

from math import prod

from ....numerics import as_type
from ...element import Element, index_names
from ...ir import Graph, Node, Value
from ...op import Aval, GraphOp, ResultMemory
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ..choose_schedule import LANES, blocks, chosen, for_loop
from .gathers import around
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG
from .spell import literal

INT32 = as_type("int32")


def _chosen_element(x: Aval, last: Aval, u: Aval, axis: int) -> Element:
    at = f"x1[o{axis}]"
    there = index_names([at if a == axis else a for a in range(x.ndim)])
    return Element(f"where({at} >= 0, x2[{there}], x0[{index_names(range(x.ndim))}])")


# ids -> [extent], where each stands last; elsewhere -1, or with few of them what was in memory
LAST_OF = library_call("last_of")
WRITE_LAST = library_call("write_last", element=_chosen_element)
# x [A, V, C], ids [T], last [V], u [A, T, C] -> x with u at the places
WRITE_PLACES = library_call("write_places", memory=ResultMemory("donated"))
FEW = 8  # times as many places as are written: a sector of `last` has as many


def open_writes(graph: Graph) -> Graph:
    """scatter_set(x, ids, u) as write_last(x, last_of(ids), u), or of few as write_places."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.meets != "last" or not all(
                isinstance(d, int) for v in inputs for d in v.aval.shape):
            return None
        (x, ids, u), axis = inputs, node.attrs["axis"]
        extent, count = x.aval.shape[axis], prod(extents_of(ids))
        if not count or 0 in x.aval.shape:
            return x
        flat = rw.emit("reshape", ids, shape=(count,))
        few = FEW * count <= extent
        last = _add(rw, LAST_OF, (flat,), Aval((extent,), INT32), extent=extent, few=few)
        A, V, C = around(extents_of(x), axis)
        if few:
            given = rw.emit("reshape", x, shape=(A, V, C)), flat, last
            rows = rw.emit("reshape", u, shape=(A, count, C))
            made = _add(rw, WRITE_PLACES, (*given, rows), given[0].aval)
            return rw.emit("reshape", made, shape=x.aval.shape)
        shape = (*x.aval.shape[:axis], count, *x.aval.shape[axis + 1:])
        rows = rw.emit("reshape", u, shape=shape)
        return _add(rw, WRITE_LAST, (x, last, rows), x.aval, axis=axis)

    return rebuild(graph, visit)


def _add(rw: Rewriter, op: GraphOp, inputs: tuple[Value, ...], aval: Aval, **attrs: int) -> Value:
    made = Value(aval)
    rw.add(Node(op, inputs, attrs, (made,), rw.where))
    return made


def schedule_last(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """-1 everywhere, or at most that at the positions, then these."""
    (node,) = group.nodes
    reads = [builder.operand(v) for v in builder.reads(group)]
    y, (T,) = builder.operand(node.outputs[0]), extents_of(node.inputs[0])
    few = node.attrs["few"]
    for count, given, begins in ((T if few else y.shape[0], reads if few else [], True),
                                 (T, reads, False)):
        s = chosen(None, LANES, warps=4)
        builder.add("last", (count,), given, [y], [builder.step(node)], s,
                    (blocks(count, LANES),), begins=begins)


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
        # at most -1, whatever was there
        update = "tile.atomic_min({}, place, -1)" if group.attr("begins") else (
            "tile.atomic_max({}, place, i)")
        w.line(update.format(capital(y.name)), step)
    return w.finish_operands()


def schedule_writes(builder: ScheduleBuilder, group: FusionGroup) -> None:
    """A copy of x where it is still read, then the elements that are written."""
    (node,) = group.nodes
    x, *given = node.inputs
    y, step = builder.operand(node.outputs[0]), builder.step(node)
    if builder.memory.places[node.outputs[0]].kind != "view":
        s = for_loop((prod(y.shape),), y.type.dtype.bits)
        reads = [builder.operand(v) for v in builder.reads(group) if v is x]
        builder.add(group.kind, y.shape, reads, [y], [step], s, (blocks(prod(y.shape), s.n),),
                    begins=True)
    space = extents_of(given[-1])
    s = for_loop((prod(space),), y.type.dtype.bits)
    builder.add(group.kind, space, [builder.operand(v) for v in given], [y], [step], s,
                (blocks(prod(space), s.n),), begins=False)


def writes_source(group: ScheduledGroup) -> KernelText:
    w, (step,), (y,), BN = KernelWriter(group), group.steps, group.writes, group.schedule.n
    Y = capital(y.name)
    w.line(f"n = tile.group_id(0) * {BN}")
    if group.attr("begins"):
        x = step.args[0]
        was = f"tile.load({capital(x)}[n:n+{BN}])" if isinstance(x, str) else literal(
            x, y.type.dtype.kind)
        w.line(f"{Y}[n:n+{BN}] = {was}", step)
        return w.finish_flat()
    (ids, last, u), (_, V, C), (_, T, _) = group.reads, y.shape, group.space
    kind = w.type(as_type("int64" if prod(y.shape) >= LONG else "int32"))
    w.line(f"p = tile.arange(0, {BN}, {kind}) + n")
    w.line(f"t = p // {C} % {T}", step)
    w.line(f"at = tile.cast(tile.gather({capital(ids.name)}, t), {kind})", step)
    w.line(f"at = tile.where(at < 0, at + {V}, at)", step)
    w.line(f"wins = tile.cast(tile.gather({capital(last.name)}, at), {kind}) == t", step)
    w.line(f"there = p // {T * C} * {V * C} + at * {C} + p % {C}", step)
    w.line(f"there = tile.where(wins & (p < {prod(group.space)}), there, -1)", step)
    w.line(f"tile.scatter({Y}, there, tile.load({capital(u.name)}[n:n+{BN}]))", step)
    return w.finish_flat()


kernel_kind("last", "index", last_source, schedule_last, [LAST_OF])
kernel_kind("write_places", "index", writes_source, schedule_writes, [WRITE_PLACES])

__all__ = ["WRITE_LAST", "open_writes"]
