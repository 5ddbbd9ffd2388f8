"""vmap: carry a batch axis at position 0 of every value that depends on a batched one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import GradError
from ..graph.ir import Graph, Node, Value
from ..graph.operand import PUBLIC
from ..graph.trace import at_line, replay
from ..tensor import Tensor


def batch_graph(
    graph: Graph, size: Any, args: Sequence[Tensor], batched: Sequence[bool]
) -> tuple[list[Tensor], list[bool]]:
    """Outputs of the graph applied to each slice of the batched args, and which are batched."""
    env: dict[Value, Tensor] = dict(zip(graph.inputs, args, strict=True))
    env.update((v, t) for v, t in graph.captures)
    flags: dict[Value, bool] = dict(zip(graph.inputs, batched, strict=True))
    for node in graph.nodes:
        with at_line(node.where):
            _batch_node(node, size, env, flags)
    return [env[v] for v in graph.outputs], [flags.get(v, False) for v in graph.outputs]


def _batch_node(node: Node, size: Any, env: dict, flags: dict) -> None:
    op, inputs = node.op, [env[v] for v in node.inputs]
    which = tuple(flags.get(v, False) for v in node.inputs)
    if not any(which):
        out, flag = replay(node, inputs), False
    elif op.batch is None:
        raise GradError(f"{op.name} has no batching rule", where=node.where,
                        hint="loop with ts.map, which runs the function per element",
                        code="E_BATCH")
    else:
        out, flag = op.batch(size, which, *inputs, **node.attrs)
    outs = out if op.multi else (out,)
    marks = flag if isinstance(flag, tuple) else (flag,) * len(outs)
    env.update(zip(node.outputs, outs, strict=True))
    flags.update(zip(node.outputs, marks, strict=True))


def stretch(x: Tensor, size: Any, batched: bool) -> Tensor:
    """x with the batch axis, repeated when it has none."""
    if batched:
        return x
    return PUBLIC["broadcast_to"](PUBLIC["expand_dims"](x, 0), (size, *x.shape))
