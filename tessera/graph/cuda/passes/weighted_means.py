"""Sums of what a softmax weights, divided once.

    sum_j (e_j / sum_i e_i) v_j        # is (sum_j e_j v_j) / sum_i e_i,   e_j = exp(x_j - max x)

Both sums are made in one pass over a row, where the second would have to wait for the first: that
of a softmax's gradient. No e is above one, so the sum is as large as that of the values at most, as
in attention. Powers of what has no maximum taken off may be as large as f32 goes: they stay.
"""

from __future__ import annotations

from ...ir import Graph, Node, Value
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import is_last_axis_reduction
from ...simplify import Rewriter, rebuild, remove_dead


def divide_last(graph: Graph) -> Graph:
    """The graph with such sums of weighted values."""
    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "reduce_sum" or not is_last_axis_reduction(node):
            return None
        product = rw.made_by(inputs[0], "mul")
        for weights, v in _sides(product):
            division = rw.made_by(weights, "div")
            if division is None or not _is_softmax(rw, *division.inputs):
                continue
            e, total = division.inputs
            made = rw.emit("reduce_sum", rw.emit("mul", e, v), **node.attrs)
            if not node.attrs["keepdims"]:
                total = rw.emit("reshape", total, shape=made.aval.shape)
            return rw.emit("div", made, total)
        return None

    return remove_dead(rebuild(graph, visit))


def _sides(product: Node | None) -> list[tuple[Value, Value]]:
    """(weights, values): either way round."""
    if product is None or len({extents_of(v) for v in product.inputs}) > 1:
        return []
    a, b = product.inputs
    return [(a, b), (b, a)]


def _is_softmax(rw: Rewriter, e: Value, total: Value) -> bool:
    """Whether they are powers, of at most zero, and their sum along the last axis, in one type."""
    summed = rw.made_by(total, "reduce_sum")
    return (summed is not None and summed.inputs == (e,) and is_last_axis_reduction(summed)
            and bool(summed.attrs["keepdims"]) and e.aval.type == total.aval.type
            and _is_shifted(rw, rw.made_by(e, "exp")))


def _is_shifted(rw: Rewriter, power: Node | None) -> bool:
    """Whether the exponent is x - max x along the last axis."""
    shifted = None if power is None else rw.made_by(power.inputs[0], "sub")
    top = None if shifted is None else rw.made_by(shifted.inputs[1], "reduce_max")
    return (shifted is not None and top is not None and is_last_axis_reduction(top)
            and top.inputs == shifted.inputs[:1])


__all__ = ["divide_last"]
