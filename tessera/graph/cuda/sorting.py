"""Order along a line: argsort and the first of it.

Lines of up to RUN elements are sorted by one group each. Of longer ones runs are sorted, then pairs
of runs are merged: every element finds its place by a search in the other run of the pair. Equal
elements keep their order, NaN is the largest, so the result is the one of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ...numerics import as_type
from ...tensor import Tensor
from .. import functions as F
from ..ir import Graph, Node, Value
from ..op import Aval, GraphOp
from ..ops.gather import CHECK_INDEX
from ..ops.sort import SEARCHSORTED
from ..schedule.build_schedule import ScheduleBuilder
from ..schedule.groups import FusionGroup
from ..schedule.ir import ScheduledGroup
from ..schedule.library_call import library_call
from ..schedule.loop_axes import extents_of
from ..simplify import Rewriter, rebuild
from ..trace import apply
from .choose_schedule import blocks, chosen, for_loop, power
from .extrema import compared
from .kernel_text import KernelText, KernelWriter, capital
from .searches import LONG, count_before, less

RUN = 4096  # elements that a group sorts in shared memory
LONG_LINE = 1024  # elements that each element of a sum at places looks through
INT64 = as_type("int64")
SORT_RUNS = library_call("sort_runs")  # x -> positions that sort each run of `width`
MERGE_RUNS = library_call("merge_runs")  # x, positions -> of pairs of runs of `width`


def open_sorts(graph: Graph) -> Graph:
    """Sorts of lines along any axis as sorts of runs along the last one."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.lines not in ("order", "top") or not all(
                isinstance(d, int) for d in inputs[0].aval.shape):
            return None
        top = node.op.lines == "top"
        (x,), last = inputs, inputs[0].aval.ndim - 1
        axis = last if top else node.attrs["axis"]
        turned = tuple(a for a in range(last + 1) if a != axis) + (axis,)
        if axis != last:
            x = rw.emit("transpose", x, axes=turned)
        if 0 in x.aval.shape:
            return None
        order = _order(rw, x, node.attrs["largest" if top else "descending"])
        if top:
            shape = (*x.aval.shape[:-1], node.attrs["k"])
            return rw.emit("slice", order, starts=(0,) * len(shape), stops=shape,
                           steps=(1,) * len(shape))
        back = tuple(turned.index(a) for a in range(last + 1))
        return order if axis == last else rw.emit("transpose", order, axes=back)

    return rebuild(graph, visit)


# --- sums at places of long lines -------------------------------------------------------------
def long_sums(node: Node) -> Callable[..., Tensor] | None:
    """The rule of sums at places along a line where the line is long: each element of the result
    would look through all of it."""
    indexed = node.op.indexed
    if indexed is None or indexed.reads or not indexed.along:
        return None
    length = node.inputs[1].aval.shape[node.attrs["axis"]]
    return _sums_of_runs if isinstance(length, int) and length > LONG_LINE else None


def _sums_of_runs(u: Tensor, ids: Tensor, axis: int, extent: int) -> Tensor:
    """Places in order, so that equal ones are runs; running sums that begin anew with each run; of
    each place the sum at the end of its run."""
    places = F.moveaxis(apply(CHECK_INDEX, ids, extent=extent, wrap=True), axis, -1)
    order = F.argsort(places)
    at, rows = (F.take_along_axis(x, order, -1) for x in (places, F.moveaxis(u, axis, -1)))
    again = F.cast(F.equal(at[..., 1:], at[..., :-1]), rows.type)
    goes_on = F.concatenate([F.zeros((*at.shape[:-1], 1), rows.type), again], axis=-1)
    sums = F.linear_recurrence(goes_on, rows, -1)
    wanted = F.broadcast_to(F.arange(extent), (*at.shape[:-1], extent))
    begin, end = (apply(SEARCHSORTED, at, wanted, side=side, lines=at.ndim - 1)
                  for side in ("left", "right"))
    last = F.take_along_axis(sums, F.maximum(end - 1, 0), -1)
    zero = F.zeros((), u.type)
    return F.moveaxis(F.where(F.greater(end, begin), last, zero), -1, axis)


# --- sorts ------------------------------------------------------------------------------------
def _order(rw: Rewriter, x: Value, descending: bool) -> Value:
    def call(op: GraphOp, *inputs: Value, **attrs: int) -> Value:
        made = Value(Aval(x.aval.shape, INT64))
        rw.add(Node(op, inputs, {**attrs, "descending": descending}, (made,), rw.where))
        return made

    (n,), width = extents_of(x)[-1:], RUN
    order = call(SORT_RUNS, x, width=min(n, width))
    while width < n:
        order = call(MERGE_RUNS, x, order, width=width)
        width *= 2
    return order


def schedule_sort(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    (x,) = node.inputs
    width, N = node.attrs["width"], extents_of(x)[-1]
    space = (prod(extents_of(x)[:-1]), N)
    m = min(power(space[0]), max(1, 1024 // power(width)))
    s = chosen(m, width, warps=max(1, min(16, m * power(width) // 256)))
    builder.add("sort", space, [builder.operand(x, space)],
                [builder.operand(node.outputs[0], space)], [builder.step(node, shape=space)], s,
                (blocks(space[0], m), blocks(N, width)), descending=node.attrs["descending"])


def sort_source(group: ScheduledGroup) -> KernelText:
    """y[l, n:n+W] = n + the positions that sort x[l, n:n+W]."""
    w, s = KernelWriter(group), group.schedule
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    BM, W = s.m, s.n
    w.line(f"m = tile.group_id(0) * {BM}")
    w.line(f"n = tile.group_id(1) * {W}")
    block = f"[m:m+{BM}, n:n+{W}]"
    text = compared(w, x.type.dtype, f"tile.load({capital(x.name)}{block})")
    w.line(f"order = tile.argsort({text}, descending={group.attr('descending')})", step)
    w.line(f"{capital(y.name)}{block} = tile.cast(order, {w.type(y.type)}) + n", step)
    shapes = [x.shape, y.shape]
    texts = [f"{capital(o.name)}: {w.annotation(o, o.shape)}" for o in (x, y)]
    return w.finish(texts, f"(grid={group.grid})", shapes)


def schedule_merge(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    shape = extents_of(node.inputs[0])
    reads = [builder.operand(v) for v in builder.reads(group)]
    s = for_loop((prod(shape),), 64)
    builder.add("merge", shape, reads, [builder.operand(node.outputs[0])], [builder.step(node)], s,
                (blocks(prod(shape), s.n),), width=node.attrs["width"],
                descending=node.attrs["descending"])


def merge_source(group: ScheduledGroup) -> KernelText:
    """Element i of a run goes to i + how many of the other run stand before it; of equal ones those
    of the left run do."""
    w, (step,), (y,), BN = KernelWriter(group), group.steps, group.writes, group.schedule.n
    x, order = group.reads
    N, total, W = x.shape[-1], prod(x.shape), group.attr("width")
    kind = w.type(as_type("int64" if total >= LONG else "int32"))
    X, P, Y = (capital(o.name) for o in (x, order, y))
    dtype, down = x.type.dtype, group.attr("descending")

    def element(at: str) -> str:
        return compared(w, dtype, f"tile.gather({X}, {at})")

    def ahead(a: str, b: str) -> str:
        return less(dtype, b, a) if down else less(dtype, a, b)

    w.line(f"n = tile.group_id(0) * {BN}")
    w.line(f"p = tile.arange(0, {BN}, {kind}) + n")
    w.line(f"line = p // {N} * {N}", step)
    w.line("i = p - line", step)
    w.line(f"mine = tile.load({P}[n:n+{BN}])", step)
    w.line(f"value = {element(f'line + tile.cast(mine, {kind})')}", step)
    w.line(f"right = i // {W} % 2", step)
    w.line(f"pair = i // {2 * W} * {2 * W}", step)
    w.line(f"other = pair + (1 - right) * {W}", step)
    w.line(f"length = tile.maximum(tile.minimum({N} - other, {W}), 0)", step)
    found = count_before(
        w, step, min(W, N), "length",
        lambda at: element(f"line + tile.cast(tile.gather({P}, line + other + {at}), {kind})"),
        lambda e: f"tile.where(right == 1, ~{ahead('value', e)}, {ahead(e, 'value')})")
    w.line(f"place = line + pair + (i - pair - right * {W}) + {found}", step)
    w.line(f"tile.scatter({Y}, tile.where(p < {total}, place, -1), mine)", step)
    shapes: list[tuple[int, ...]] = [(total,)] * 3
    texts = [f"{capital(o.name)}: {w.annotation(o, (total,))}" for o in (x, order, y)]
    return w.finish(texts, f"(grid={group.grid})", shapes)


KINDS: dict[GraphOp, str] = {SORT_RUNS: "sort", MERGE_RUNS: "merge"}

__all__ = ["KINDS", "RUN", "merge_source", "open_sorts", "schedule_merge", "schedule_sort",
           "sort_source"]
