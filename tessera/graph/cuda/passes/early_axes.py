"""Numbers that are computed and then given an axis of one element, along which they are repeated,
have it from the start: what repeats them, or reduced what they are made of, computes them.

    (x - mean(x, -1)[:, None]) * rsqrt(var(x, -1) + eps)[:, None]    # is one kernel of rows
"""

from __future__ import annotations

from ....dims import Dim, size_of
from ...ir import Graph, Node, Value, producers_of, readers_of
from ...ops.gather import CHECK_INDEX
from ...simplify import Rewriter, rebuild, remove_dead
from .data_movement import is_plain_loop

Shape = tuple[int | Dim, ...]


def give_axes_early(graph: Graph) -> Graph:
    readers, results = readers_of(graph), set(graph.outputs)
    maker = producers_of(graph)
    repeated: dict[Value, bool] = {}
    for node in reversed(graph.nodes):
        for v in node.outputs:
            repeated[v] = any(_repeats(n, v) or _computes(n) and repeated[n.outputs[0]]
                              for n in readers.get(v, ()))

    def is_alone(v: Value) -> bool:
        return v not in results and len(readers.get(v, ())) == 1

    def before(rw: Rewriter, v: Value, shape: Shape) -> Value | None:
        """What v is a reshape of, where that has these extents."""
        back = rw.made_by(v, "reshape")
        same = back is not None and back.inputs[0].aval.shape == shape
        return back.inputs[0] if back is not None and same else None

    def moved(rw: Rewriter, old: Value, shape: Shape) -> Value:
        """What a value of the graph is, in these extents."""
        node = maker.get(old)
        if node is None or not _computes(node) or not is_alone(old):
            return before(rw, rw.env[old], shape) or rw.emit("reshape", rw.env[old], shape=shape)
        return rw.again(node, *(moved(rw, x, shape) if x.aval.ndim else rw.env[x]
                                for x in node.inputs))

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "reshape":
            return None
        if (same := before(rw, inputs[0], node.outputs[0].aval.shape)) is not None:
            return same
        if not _gives_axes(node) or not repeated[node.outputs[0]]:
            return None
        made = maker.get(node.inputs[0])
        if made is None or not _computes(made) or not is_alone(node.inputs[0]):
            return None
        return moved(rw, node.inputs[0], node.outputs[0].aval.shape)

    return remove_dead(rebuild(graph, visit))


def _repeats(node: Node, v: Value) -> bool:
    """Whether it computes with each element of v several times."""
    return node.op.loop is not None and size_of(node.outputs[0].aval.shape) > size_of(v.aval.shape)


def _gives_axes(node: Node) -> bool:
    """Whether it has more axes of one element behind it, and the same others."""
    before, after = node.inputs[0].aval.shape, node.outputs[0].aval.shape
    return len(after) > len(before) and [n for n in before if n != 1] == [
        n for n in after if n != 1]


def _computes(node: Node) -> bool:
    """Whether it is elementwise, of operands that lie along all of its space, or are numbers."""
    shape = node.outputs[0].aval.shape if node.outputs else ()
    return (is_plain_loop(node) or node.op is CHECK_INDEX) and all(
        v.aval.shape in (shape, ()) for v in node.inputs)


__all__ = ["give_axes_early"]
