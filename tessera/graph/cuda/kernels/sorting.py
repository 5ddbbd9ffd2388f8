"""Order along a line: argsort and the first of it.

Lines become rows, and rows are put in order by keys (row_order.py). Numbers of 64 bits have none:
rows of up to RUN of them are sorted by one group each, and of longer ones runs, of which pairs are
merged: every element finds its place by a search in the other run of the pair. Equal elements keep
their order, NaN is the largest, so the result is the one of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ....lazy_dataclass import dataclass
from ....numerics import NumericType, as_type
from ....tensor import Tensor
from ... import functions as F
from ...ir import Graph, Node, Value
from ...op import Aval, GraphOp
from ...ops.gather import CHECK_INDEX, TAKE_ALONG
from ...ops.sort import SEARCHSORTED
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ...trace import apply
from ..choose_schedule import blocks, chosen, for_loop, power
from ..passes.data_movement import widens
from .extrema import compared
from .kernel_text import KernelText, KernelWriter, capital
from .key_merges import merged
from .row_order import ORDER_ROWS, first_lengths, run_length
from .searches import LONG, count_before, less
from .sort_keys import KeyFormat, has_keys

RUN = 4096  # elements that a group sorts in shared memory
LONG_LINE = 1024  # elements that each element of a sum at places looks through
INT64 = as_type("int64")
SORT_RUNS = library_call("sort_runs")  # x -> positions that sort each run of `width`
MERGE_RUNS = library_call("merge_runs")  # x, positions -> of pairs of runs of `width`


def open_sorts(graph: Graph) -> Graph:
    """Sorts of lines along any axis as sorts of runs along the last one. What is picked by the
    order of a line's own elements comes out of its sort."""
    picks = _picks_of_orders(graph)
    values: dict[Value, Value] = {}  # by the old order: x in it

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node in picks.taken and node.inputs[1] in values:
            return values[node.inputs[1]]
        if node.op.lines not in ("order", "top") or not all(
                isinstance(d, int) for d in inputs[0].aval.shape) or 0 in inputs[0].aval.shape:
            return None
        (order,), gives = node.outputs, picks.gives(node.outputs[0])
        found = _sorted(rw, node, inputs[0], gives)
        if found is None:
            return None
        if "values" in found:
            values[order] = found["values"]
        return found.get("positions")

    return rebuild(graph, visit)


def _sorted(rw: Rewriter, node: Node, x: Value, gives: tuple[str, ...]
            ) -> dict[str, Value] | None:
    """What a sort of lines gives, by rows; of numbers without keys positions alone. None where
    nothing is asked for."""
    last, top = x.aval.ndim - 1, node.op.lines == "top"
    if (wide := rw.made_by(x, "cast")) is not None and widens(wide):
        x = wide.inputs[0]  # in the same order
    axis = last if top else node.attrs["axis"]
    k = node.attrs["k"] if top else extents_of(x)[axis]
    if not k:
        return None
    turned = tuple(a for a in range(last + 1) if a != axis) + (axis,)
    back = tuple(turned.index(a) for a in range(last + 1))
    if axis != last:
        x = rw.emit("transpose", x, axes=turned)
    down = node.attrs["largest" if top else "descending"]
    if has_keys(x.aval.dtype, extents_of(x)[-1]):
        f = KeyFormat(x.aval.dtype, extents_of(x)[-1], down, "positions" in gives)
        found = by_keys(rw, x, k, f, gives)
    else:
        found, gives = [_first(rw, _order(rw, x, down), k)], ("positions",)
    return dict(zip(gives, (v if axis == last else rw.emit("transpose", v, axes=back)
                            for v in found), strict=True))


@dataclass(frozen=True)
class _Picks:
    """taken: nodes that pick elements of a line by the order of its own.  orders: of which they
    are.  others: what something else reads."""

    taken: frozenset[Node]
    orders: frozenset[Value]
    others: frozenset[Value]

    def gives(self, order: Value) -> tuple[str, ...]:
        """What the sort of a line is for."""
        values = ("values",) if order in self.orders else ()
        return (*values, "positions") if order in self.others or not values else values


def _picks_of_orders(graph: Graph) -> _Picks:
    made = {n.outputs[0]: n for n in graph.nodes if n.op.lines in ("order", "top")}
    narrow = {n.outputs[0]: n.inputs[0] for n in graph.nodes if n.op.name == "cast" and widens(n)}

    def own(node: Node) -> bool:
        """Whether what is picked from is what was put in order, along the same axis."""
        if node.op is not TAKE_ALONG or (sort := made.get(node.inputs[1])) is None:
            return False
        x, given = node.inputs[0], sort.inputs[0]
        return narrow.get(given, given) is x and (
            node.attrs["axis"] == sort.attrs.get("axis", x.aval.ndim - 1))

    taken = frozenset(filter(own, graph.nodes))
    others = {v for n in graph.nodes if n not in taken for v in n.inputs} | {*graph.outputs}
    return _Picks(taken, frozenset(n.inputs[1] for n in taken), frozenset(others & {*made}))


def by_keys(rw: Rewriter, x: Value, k: int, f: KeyFormat, gives: tuple[str, ...],
            places: NumericType = INT64) -> list[Value]:
    """Values and positions, or those that are asked for: of one group's rows, else of runs: of few
    elements those that their runs begin with, in turns, else all, by merges."""
    N = extents_of(x)[-1]
    types = {"values": x.aval.type, "positions": places, "keys": f.type}

    def runs_of(source: Value, n: int, gives: tuple[str, ...], **attrs: Any) -> list[Value]:
        made = tuple(Value(Aval((*x.aval.shape[:-1], n), types[g])) for g in gives)
        attrs |= {"format": f.attribute, "gives": gives}
        rw.add(Node(ORDER_ROWS, (source,), attrs, made, rw.where))
        return list(made)

    lengths, width = first_lengths(f, N, k), run_length(f, N)
    if lengths is None and width < N:
        (keys,) = runs_of(x, N, ("keys",), width=width, kept=width, of_keys=False)
        while 2 * width < N:
            (keys,) = merged(rw, keys, types, format=f.attribute, gives=("keys",), width=width)
            width *= 2
        made = merged(rw, keys, types, format=f.attribute, gives=gives, width=width)
        return [_first(rw, v, k) for v in made]
    *runs, last = lengths or [N]
    for i, width in enumerate(runs):
        N = -(-N // width) * k
        (x,) = runs_of(x, N, ("keys",), width=width, kept=k, of_keys=i > 0)
    return runs_of(x, k, gives, width=last, kept=k, of_keys=bool(runs))


# --- sums at places of long lines -------------------------------------------------------------
def sums_along(node: Node) -> Callable[..., Tensor] | None:
    """The rule of sums at places along a line where the line is long, since each element of the
    result would look through all of it, or has one place, as labels have."""
    indexed = node.op.indexed
    if indexed is None or indexed.reads or not indexed.along:
        return None
    length = node.inputs[1].aval.shape[node.attrs["axis"]]
    if length == 1:
        return _chosen
    return _sums_of_runs if isinstance(length, int) and length > LONG_LINE else None


def _chosen(u: Tensor, ids: Tensor, axis: int, extent: int) -> Tensor:
    """Of each line the value in its place, 0 elsewhere: elementwise, so a loop that reads it makes
    it, and the gradient of a loss of labels has no such line in memory."""
    places = apply(CHECK_INDEX, ids, extent=extent, wrap=True)
    numbers = F.reshape(F.arange(extent), (extent,) + (1,) * (u.ndim - 1 - axis))
    return F.where(F.equal(places, numbers), u, F.zeros((), u.type))


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
def _first(rw: Rewriter, order: Value, k: int) -> Value:
    shape = (*order.aval.shape[:-1], k)
    return order if shape == order.aval.shape else rw.emit(
        "slice", order, starts=(0,) * len(shape), stops=shape, steps=(1,) * len(shape))


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
    return w.finish_operands()


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
    return w.finish_flat()


KINDS: dict[GraphOp, str] = {SORT_RUNS: "sort", MERGE_RUNS: "merge"}

__all__ = ["KINDS", "RUN", "by_keys", "merge_source", "open_sorts", "schedule_merge",
           "schedule_sort", "sort_source"]
