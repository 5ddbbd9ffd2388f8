"""Rows picked by integers that nothing writes down: what is made of them reads them where they lie.

A message along an edge is a row of its node, often times a number of the edge. Sums of messages by
node (sorted_segments.py) read rows and numbers in the order in which they add them, and products of
two rows an edge are summed as they are read:

    y[i] = sum of a[p[i], c] * b[q[i], c] over c

Three layers of graph attention over 300,000 edges moved 7.7 GB with messages in memory, of rows of
128 `f32`, which is 20,000 nodes 15 times over.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from ....lazy_dataclass import dataclass
from ...ir import Graph, Node, Value, readers_of, uses
from ...op import Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild
from ..choose_schedule import blocks, chosen, power
from ..element_places import MOVED, ElementPlace, flat, unflat
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital

# a, b (, p) (, q) -> [T, 1]. picked: of each of both whether integers pick its rows.
ROW_DOTS = library_call("row_dots")
ROWS, COLUMNS = 16, 256  # of a block
LEAST = 1 << 14  # elements that are worth it


@dataclass(frozen=True)
class PickedRows:
    """u[i, c] = table[rows[i], c] * weights[i]: rows and weights as they are asked for, None where
    there are none."""

    table: Value
    rows: Value | None = None
    weights: Value | None = None


def picked_rows(rw: Rewriter, u: Value, count: Counter[Value], weighed: bool) -> PickedRows:
    """What a value of rows is made of, as far as that need not be in memory. count: its uses.
    weighed: whether it may be a product."""
    made, weights = rw.made_by(u, "mul"), None
    if weighed and made is not None and count[u] == 1 and len(made.inputs) == 2:
        column = (extents_of(u)[0], 1)
        for w, x in (made.inputs, made.inputs[::-1]):
            if extents_of(w) == column and extents_of(x) == extents_of(u) and (
                    w.aval.type == x.aval.type == u.aval.type):
                weights, u = w, x
                break
    take = _whole_rows(rw, u)
    if take is not None:
        return PickedRows(take.inputs[0], take.inputs[1], weights)
    return PickedRows(u, None, weights)


def _whole_rows(rw: Rewriter, x: Value) -> Node | None:
    """What picked rows of a matrix by a list of integers."""
    take = rw.made_by(x, "take")
    if take is None or take.attrs["axis"] or [v.aval.ndim for v in take.inputs] != [2, 1]:
        return None
    known = all(isinstance(d, int) and d for v in take.inputs for d in v.aval.shape)
    return take if known else None


def moved_rows(rw: Rewriter, u: Value, T: int, C: int) -> tuple[Value, str]:
    """What the rows [T, C] of a value were moved from, as rows, and which of them row t is, ""
    where it is t. So what is repeated, or a part of what lies apart, is read where it is, counted
    from its first row: the same is done to all parts."""
    node, span, text = rw.producer.get(u), (0, T), ""
    at = unflat(ElementPlace.of("t", T).times(C) + ElementPlace.of("c", C), extents_of(u))
    while node is not None and node.op.name in MOVED and all(
            isinstance(d, int) and d for d in node.inputs[0].aval.shape):
        (x,) = node.inputs
        at = MOVED[node.op.name](at, extents_of(x), node.attrs, extents_of(node.outputs[0]))
        rows, column = flat(at, extents_of(x)).divided(C)
        if column.text == "c" and not rows.guarded:
            u, span, text = x, (rows.least, rows.most + 1), rows.plus(-rows.least).text
        node = rw.producer.get(x)
    lies = rw.emit("reshape", u, shape=(prod(extents_of(u)) // C, C))
    if span != (0, extents_of(lies)[0]):
        lies = rw.emit("slice", lies, starts=(span[0], 0), stops=(span[1], C), steps=(1, 1))
    return lies, "" if text == "t" else text


# --- products of rows -----------------------------------------------------------------------------
def dot_picked_rows(graph: Graph) -> Graph:
    """Sums along rows of products of rows, of which integers pick one or both, as one kernel."""
    if not any(n.op.name == "take" for n in graph.nodes):
        return graph
    count, readers, results = uses(graph), readers_of(graph), set(graph.outputs)

    def is_spared(v: Value) -> bool:
        """Whether all that reads picked rows are products of which sums alone are made, along rows
        or by integers: then nothing writes them down."""
        products = dict.fromkeys(readers.get(v, []))
        return count[v] == sum(n.inputs.count(v) for n in products) and all(
            n.op.name == "mul" and n.outputs[0] not in results and count[n.outputs[0]] == 1 and all(
                r.op.reduction == "sum" or r.op.name == "segment_sum"
                for r in readers[n.outputs[0]]) for n in products)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        made = rw.made_by(inputs[0], "mul") if node.op.reduction == "sum" else None
        if made is None or count[inputs[0]] != 1 or node.outputs[0].aval.dtype.name != "f32":
            return None
        x = inputs[0].aval
        if x.ndim != 2 or node.attrs["axis"] != (1,) or any(
                v.aval.type != x.type or v.aval.shape != x.shape for v in made.inputs):
            return None
        T, C = extents_of(inputs[0])
        takes = [_whole_rows(rw, v) for v in made.inputs]
        if T * C < LEAST or not any(take is not None and is_spared(v) for v, take in zip(
                made.inputs, takes, strict=True)):
            return None
        tables = [v if take is None else take.inputs[0]
                  for v, take in zip(made.inputs, takes, strict=True)]
        ids = [take.inputs[1] for take in takes if take is not None]
        out = Value(Aval((T, 1), node.outputs[0].aval.type))
        attrs = {"picked": tuple(take is not None for take in takes)}
        rw.add(Node(ROW_DOTS, (*tables, *ids), attrs, (out,), rw.where))
        return rw.emit("reshape", out, shape=node.outputs[0].aval.shape)

    return rebuild(graph, visit)


def schedule_dots(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    given = list(dict.fromkeys(node.inputs))  # one may be both
    reads = [builder.operand(v) for v in given]
    y = builder.operand(node.outputs[0])
    T, C = y.shape[0], reads[0].shape[1]
    n = min(power(C), COLUMNS)
    s = chosen(min(power(T), ROWS * COLUMNS // n), n, warps=4)
    builder.add(group.kind, (T, C), reads, [y], [builder.step(node)], s, (blocks(T, s.m or 1),),
                picked=node.attrs["picked"], places=tuple(map(given.index, node.inputs)))


def dots_source(group: ScheduledGroup) -> KernelText:
    w, s = KernelWriter(group), group.schedule
    (step,), (y,), (T, C), BM, BN = group.steps, group.writes, group.space, s.m or 1, s.n
    kind = w.type(y.type)
    w.line(f"m = tile.group_id(0) * {BM}")
    operands = [group.reads[i] for i in group.attr("places")]
    ids, sides = iter(operands[2:]), list[str]()
    for name, o, picked in zip("ab", operands[:2], group.attr("picked"), strict=True):
        if not picked:
            sides.append(f"tile.load({capital(o.name)}[m:m+{BM}, n:n+{BN}])")
            continue
        V, at = o.shape[0], f"at_{name}"
        w.line(f"{at} = tile.load({capital(next(ids).name)}[m:m+{BM}])", step)
        w.check_index(at, V, step)
        w.line(f"{at} = tile.where({at} < 0, {at} + {V}, {at})", step)
        sides.append(f"tile.gather({capital(o.name)}[:, n:n+{BN}], {at})")
    w.line(f"total = tile.full(({BM}, {BN}), 0.0, {kind})", step)
    with w.block(f"for n in range(0, {C}, {BN}):"):
        a, b = sides
        w.line(f"total = total + {a} * {b}", step)
    w.line(f"{capital(y.name)}[m:m+{BM}] = tile.reduce_sum(total, axis=1)", step)
    return w.finish_operands([*(o.shape for o in group.reads), (T,)])


kernel_kind("row_dots", "reduction", dots_source, schedule_dots, [ROW_DOTS])

__all__ = ["PickedRows", "dot_picked_rows", "moved_rows", "picked_rows"]
