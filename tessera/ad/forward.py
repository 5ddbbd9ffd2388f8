"""Forward mode: carry a tangent beside every value, by each op's jvp rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph.expand import rule_graph
from ..graph.ir import Graph, Node, Value
from ..graph.op import NoRule
from ..graph.trace import at_line, replay
from ..tensor import Tensor
from .reverse import moving, no_derivative, opens


def push_forward(
    graph: Graph, args: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and their tangents (None where zero), in the compute type."""
    env: dict[Value, Tensor] = dict(zip(graph.inputs, args, strict=True))
    env.update((v, t) for v, t in graph.captures)
    tan: dict[Value, Any] = {
        v: t for v, t in zip(graph.inputs, tangents, strict=True) if t is not None
    }
    for node in graph.nodes:
        with at_line(node.where):
            _push_node(node, env, tan)
    return [env[v] for v in graph.outputs], [tan.get(v) for v in graph.outputs]


def _push_node(node: Node, env: dict[Value, Tensor], tan: dict[Value, Any]) -> None:
    op, inputs = node.op, [env[v] for v in node.inputs]
    ts = tuple(tan.get(v) for v in node.inputs)
    moves = op.differentiable and any(t is not None for t in ts)
    if moves and op.push is not None:
        out, made = op.push(ts, *inputs, **node.attrs)
    else:
        out = replay(node, inputs)
        made = _tangents(node, ts, out, inputs) if moves else None
    outs = out if op.multi else (out,)
    env.update(zip(node.outputs, outs, strict=True))
    if made is None:
        return
    found = dict(zip(node.outputs, made if op.multi else (made,), strict=True))
    tan.update((v, found[v]) for v in moving(node, ts[0] is not None) if found[v] is not None)


def _tangents(node: Node, ts: tuple, out: Any, inputs: list) -> Any:
    op = node.op
    if opens(op, op.jvp, op.no_jvp):
        tangents = push_forward(rule_graph(node, op.expand or op.derives), inputs, ts)[1]
        return tuple(tangents) if op.multi else tangents[0]
    if op.jvp is None:
        why = op.no_jvp or NoRule("", "use reverse mode (ts.grad), ts.stop_gradient, or "
                                      "ts.custom_jvp")
        raise no_derivative(node, "forward", why)
    return op.jvp(ts, out, *inputs, **node.attrs)
