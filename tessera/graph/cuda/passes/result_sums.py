"""Sums over the rows of what a kernel makes, by the kernel.

    dq, dk, dv = attention's gradient; sum(join(dq, dk, dv), rows)   # that of a bias in front of it

A pass over the results would read all of them again. A kernel that has a block of them in registers
sums its columns there, and a reduction over few rows follows: of a move, sums are moved sums. What
kernels do so is stated in the records of their calls (`LibraryCall.row_blocks`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ....numerics import as_type
from ...ir import Graph, Node, Value, producers_of
from ...op import Aval
from ...schedule.library_call import LibraryCall
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.strips import LONG
from .data_movement import is_plain, widens

F32 = as_type("f32")
Axes = tuple[int, ...]  # in order


def sum_results(graph: Graph) -> Graph:
    """The graph with sums over rows of kernels' results as sums over what these kernels give of
    each block: where all that a sum is of is of such results, each element once."""
    maker = producers_of(graph)
    wanted: dict[Node, set[int]] = {}
    taken = set[Node]()
    for node in graph.nodes:
        found = _summed(node, maker)
        taken.update([node] if found else [])
        for made, i in found:
            wanted.setdefault(made, set()).add(i)
    if not taken:
        return graph
    sums: dict[Value, Value] = {}
    nodes = tuple(_with_sums(n, sorted(wanted[n]), sums) if n in wanted else n for n in graph.nodes)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node not in taken:
            return None
        out = node.outputs[0].aval
        made = _sum(rw, inputs[0], _axes(node), sums)
        if out.dtype is not made.aval.dtype:
            made = rw.emit("cast", made, source=made.aval.type, to=out.type)
        return rw.emit("reshape", made, shape=out.shape)

    return remove_dead(rebuild(replace(graph, nodes=nodes), visit))


# --- which -------------------------------------------------------------------------------------
def _summed(node: Node, maker: dict[Value, Node]) -> list[tuple[Node, int]]:
    """The calls, and which of their results, that a sum in f32 over many rows is of; none where it
    is of anything else."""
    if node.op.name != "reduce_sum" or node.attrs["accum"] is not F32.dtype or not all(
            isinstance(n, int) for n in node.inputs[0].aval.shape):
        return []
    extents, axes = extents_of(node.inputs[0]), _axes(node)
    return _results(node.inputs[0], axes, maker) if prod(extents[a] for a in axes) >= LONG else []


def _axes(node: Node) -> Axes:
    return tuple(sorted(node.attrs["axis"]))


def _results(v: Value, axes: Axes, maker: dict[Value, Node]) -> list[tuple[Node, int]]:
    made = maker.get(v)
    if made is None:
        return []
    if isinstance(made.op, LibraryCall):
        rows, i = v.aval.ndim - 2, made.outputs.index(v)
        return [(made, i)] if made.op.row_blocks and rows in axes and rows + 1 not in axes else []
    before = _axes_before(made, axes)
    found = [] if before is None else [_results(x, before, maker) for x in made.inputs]
    return [r for results in found for r in results] if all(found) else []


def _axes_before(made: Node, axes: Axes) -> Axes | None:
    """The axes of what is moved that are these axes of the result; None of what is no move, or
    where they are parts of some."""
    match made.op.name:
        case "cast":
            same = made.attrs["source"].dtype is made.attrs["to"].dtype and all(
                is_plain(made.attrs[t]) for t in ("source", "to"))
            return axes if same or widens(made) else None
        case "transpose":
            return tuple(sorted(made.attrs["axes"][a] for a in axes))
        case "reshape":
            return _of_other_shape(extents_of(made.inputs[0]), extents_of(made.outputs[0]), axes)
        case "concatenate":
            return axes if made.attrs["axis"] not in axes else None
    return None


def _of_other_shape(inner: Axes, outer: Axes, axes: Axes) -> Axes | None:
    """The axes of a shape that are those of another: runs of both that have as many elements."""
    found, a, b = list[int](), 0, 0
    while a < len(outer):
        first, start, n, m = a, b, outer[a], 1
        a += 1
        while n != m:
            if m < n and b < len(inner):
                m, b = m * inner[b], b + 1
            elif m > n and a < len(outer):
                n, a = n * outer[a], a + 1
            else:
                return None
        summed = {i in axes for i in range(first, a) if outer[i] != 1}
        if len(summed) > 1:
            return None
        found += range(start, b) if True in summed else ()
    return tuple(found)


# --- and how -----------------------------------------------------------------------------------
def _with_sums(node: Node, positions: list[int], sums: dict[Value, Value]) -> Node:
    """The call with sums of some of its results. sums: of each such result, added to."""
    assert isinstance(node.op, LibraryCall) and node.op.row_blocks is not None
    for i in positions:
        *lead, _, columns = extents_of(node.outputs[i])
        blocks = node.op.row_blocks(node, i)
        sums[node.outputs[i]] = Value(Aval((blocks, *lead, columns), F32))
    made = tuple(sums[node.outputs[i]] for i in positions)
    return replace(node, attrs=node.attrs | {"sums": tuple(positions)},
                   outputs=(*node.outputs, *made))


def _sum(rw: Rewriter, v: Value, axes: Axes, sums: dict[Value, Value]) -> Value:
    """The sum over some axes, without these."""
    kept = [a for a in range(v.aval.ndim) if a not in axes]
    if v in sums:
        lead = (a + 1 for a in axes if a != v.aval.ndim - 2)
        return rw.emit("reduce_sum", sums[v], axis=(0, *lead), keepdims=False, accum=F32.dtype)
    made = rw.producer[v]
    before = _axes_before(made, axes)
    assert before is not None
    parts = [_sum(rw, x, before, sums) for x in made.inputs]
    match made.op.name:
        case "concatenate":
            return rw.emit("concatenate", *parts, axis=kept.index(made.attrs["axis"]))
        case "transpose":
            order = made.attrs["axes"]
            inner = sorted(order[a] for a in kept)
            return rw.emit("transpose", *parts, axes=tuple(inner.index(order[a]) for a in kept))
        case "reshape":
            return rw.emit("reshape", *parts, shape=tuple(extents_of(v)[a] for a in kept))
    return parts[0]


__all__ = ["sum_results"]
