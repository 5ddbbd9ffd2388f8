"""vmap: carry a batch axis at position 0 of every value that depends on a batched one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import GradError
from ..graph import functions as F
from ..graph.expand import rule_graph
from ..graph.ir import Graph, Node, Value
from ..graph.ops.key_rows import numbered_keys
from ..graph.trace import at_line, replay
from ..tensor import Tensor


def batch_graph(
    graph: Graph, size: Any, args: Sequence[Tensor], batched: Sequence[bool],
    drawn: Sequence[bool] = ()
) -> tuple[list[Tensor], list[bool]]:
    """Outputs of the graph applied to each slice of the batched args, and which are batched.

    drawn: which args are keys that the function around it draws itself
    """
    env: dict[Value, Tensor] = dict(zip(graph.inputs, args, strict=True))
    env.update((v, t) for v, t in graph.captures)
    flags: dict[Value, bool] = dict(zip(graph.inputs, batched, strict=True))
    # keys that the function draws itself: rows draw apart
    own = {v for v, mine in zip(graph.inputs, drawn, strict=False) if mine}
    for node in graph.nodes:
        with at_line(node.where):
            out, flag = _batch_node(node, size, env, flags, own)
        outs = out if node.op.multi else (out,)
        env.update(zip(node.outputs, outs, strict=True))
        marks = flag if isinstance(flag, tuple) else (flag,) * len(outs)
        flags.update(zip(node.outputs, marks, strict=True))
    return [env[v] for v in graph.outputs], [flags.get(v, False) for v in graph.outputs]


def _batch_node(node: Node, size: Any, env: dict, flags: dict, own: set[Value]) -> tuple:
    op, inputs = node.op, [env[v] for v in node.inputs]
    which = tuple(flags.get(v, False) for v in node.inputs)
    keys = [v in own for v in node.inputs]
    if op.batch is None and op.expand is not None and not op.graph_attrs and any((*which, *keys)):
        outs, marks = batch_graph(rule_graph(node), size, inputs, which, keys)
        return (tuple(outs), tuple(marks)) if op.multi else (outs[0], marks[0])
    if any(keys):
        made = op.spread(size, which, *inputs, **node.attrs) if op.spread else None
        if made is not None:
            own.update(node.outputs if made[1] is False else ())
            return made
        inputs = [numbered_keys(x, size) if k else x for x, k in zip(inputs, keys, strict=True)]
        which = tuple(b or k for b, k in zip(which, keys, strict=True))
    if not any(which):
        own.update(node.outputs if op.spread and not inputs else ())
        return replay(node, inputs), False
    if op.batch is None:
        raise GradError(f"{op.name} has no batching rule", where=node.where,
                        hint="loop with ts.map, which runs the function per element",
                        code="E_BATCH")
    return op.batch(size, which, *inputs, **node.attrs)


def stretch(x: Tensor, size: Any, batched: bool) -> Tensor:
    """x with the batch axis, repeated when it has none."""
    if batched:
        return x
    return F.broadcast_to(F.expand_dims(x, 0), (size, *x.shape))
