"""Reverse mode: walk a graph forwards once, then backwards with each op's vjp rule.

The walk emits ops, so its result is a graph again and can be differentiated, batched or compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import hooks
from ..errors import GradError
from ..graph import functions as F
from ..graph import tree
from ..graph.expand import rule_graph
from ..graph.ir import Graph, Node, Value
from ..graph.op import GraphOp, NoRule
from ..graph.operand import compute_type
from ..graph.trace import at_line, in_part, replay, run_nodes
from ..lazy_dataclass import dataclass
from ..runtime.host_memory import keep
from ..tensor import PLAIN, Tensor


def is_differentiable(x: Tensor) -> bool:
    """Whether x has a floating type, so that a cotangent exists."""
    return x.type.dtype.kind == "float" or x.scale is not None


@dataclass(frozen=True)
class Tape:
    """What a forward pass leaves for the backward pass: every value, and what ops saved."""

    graph: Graph
    values: dict[Value, Tensor]
    saved: dict[Node, Any]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.values[v] for v in self.graph.outputs]


def snapshot(x: Tensor) -> Tensor:
    """x as it is now: the same buffer, copied before something is written into it.

    Writing means assignments to tensors that lie there, views of x too, and kernels that take them.
    What is written through NumPy, `x.numpy()[0] = 1`, is not seen.
    """
    if type(x) is not Tensor:
        return Tensor(np.array(x.array), x.type) if type(x) in PLAIN else x
    made: Tensor = object.__new__(Tensor)
    made._buffer, made._shape, made.type = x._buffer, x._shape, x.type
    made.is_param, made.name = x.is_param, x.name
    made.scale = None if x.scale is None else snapshot(x.scale)
    keep(made)
    return made


def tape_snapshot(tape: Tape) -> Tape:
    """The tape with its values as they are now, whatever is written into them later."""
    keep = {id(x): snapshot(x) for x in tape.values.values()}
    saved = {node: tree.map_tree(lambda x: snapshot(x) if isinstance(x, Tensor) else x, s)
             for node, s in tape.saved.items()}
    return Tape(tape.graph, {v: keep[id(x)] for v, x in tape.values.items()}, saved)


def forward(graph: Graph, args: Sequence[Tensor], known: Mapping[Value, Tensor] | None = None,
            kept: Mapping[Node, Any] | None = None) -> Tape:
    """Evaluate the graph on args, keeping every value. Values in `known` are not recomputed;
    `kept` is what their nodes saved."""
    env: dict[Value, Tensor] = dict(zip(graph.inputs, args, strict=True))
    env.update((v, t) for v, t in graph.captures)
    env.update(known or {})
    saved: dict[Node, Any] = dict(kept or {})

    def visit(node: Node, inputs: list) -> Any:
        if known is not None and all(v in known for v in node.outputs):
            outs = tuple(known[v] for v in node.outputs)
            return outs if node.op.multi else outs[0]
        if node.op.residual is None:
            return replay(node, inputs)
        out, saved[node] = node.op.residual(*inputs, **node.attrs)
        return out

    run_nodes(graph, env, visit)
    return Tape(graph, env, saved)


def backward(
    tape: Tape,
    cotangents: Sequence[Tensor | None],
    wrt: Sequence[Value],
) -> list[Tensor | None]:
    """Cotangents of the values `wrt`, given those of the outputs, in the compute type.

    Only nodes on a path from `wrt` to an output are visited.
    """
    graph = tape.graph
    active = _reached_from(graph, wrt)
    ct: dict[Value, Tensor] = {}
    for v, g in zip(graph.outputs, cotangents, strict=True):
        if g is not None and v in active:
            _accumulate(ct, v, g)
    for node in reversed(graph.nodes):
        grads = tuple(ct.pop(v, None) for v in node.outputs)
        if all(g is None for g in grads) or not any(v in active for v in node.inputs):
            continue
        wanted = tuple(v in active for v in node.inputs)
        of = "" if node.op.graph_attrs else node.op.name  # the ops in its graph are told apart
        with at_line(node.where), in_part("backward", of=of):
            for v, g in zip(node.inputs, _pull_back(node, grads, tape, wanted), strict=True):
                if g is not None and v in active:
                    _accumulate(ct, v, g)
    return [ct.get(v) for v in wrt]


def pull_back(graph: Graph, args: Sequence[Tensor], g: Tensor) -> list[Tensor | None]:
    """Cotangents of the inputs of a graph of one result, given that of the result."""
    return backward(forward(graph, args), [g], graph.inputs)


hooks.pull_back.fill(pull_back)


def _reached_from(graph: Graph, wrt: Sequence[Value]) -> set[Value]:
    """Floating values that depend on `wrt`, and integers that are codes of such."""
    reached = {v for v in wrt if v.aval.dtype.kind == "float"}
    for node in graph.nodes:
        if node.op.differentiable and any(v in reached for v in node.inputs):
            reached.update(moving(node, node.inputs[0] in reached))
    return reached


def moving(node: Node, first: bool) -> list[Value]:
    """The results of a node that have derivatives: floating ones, and integers that are codes of
    such. first: whether operand 0 has one."""
    codes = node.op.codes or node.op.view and first
    return [v for v in node.outputs if codes or v.aval.dtype.kind == "float"]


def _accumulate(ct: dict[Value, Tensor], v: Value, g: Tensor) -> None:
    before = ct.get(v)
    ct[v] = g if before is None else before + g


def opens(op: GraphOp, rule: Any, refusal: NoRule | None) -> bool:
    """Whether an op without this derivative rule has that of the ops that it stands for."""
    return rule is None and refusal is None and (op.expand or op.derives) is not None


def _pull_back(node: Node, grads: tuple, tape: Tape, wanted: tuple[bool, ...]) -> tuple:
    op, env = node.op, tape.values
    if opens(op, op.vjp, op.no_vjp):
        inner = rule_graph(node, op.expand or op.derives)
        return tuple(backward(forward(inner, [env[v] for v in node.inputs]), grads, inner.inputs))
    if op.vjp is None:
        why = op.no_vjp or NoRule("", "use forward mode (ts.jvp), ts.stop_gradient, or "
                                      "ts.custom_vjp")
        raise no_derivative(node, "reverse", why)
    inputs = [env[v] for v in node.inputs]
    outputs = tuple(env[v] for v in node.outputs)
    attrs = dict(node.attrs)
    if op.residual is not None:
        attrs["saved"] = tape.saved[node]
    if op.graph_attrs:
        attrs["wanted"] = wanted
    if op.multi:
        return op.vjp(grads, outputs, *inputs, **attrs)
    return op.vjp(grads[0], outputs[0], *inputs, **attrs)


def no_derivative(node: Node, mode: str, why: NoRule) -> GradError:
    """The error of a node whose op has no rule in this mode, on the user's line."""
    reason = ": " + why.reason.format(**node.attrs) if why.reason else ""
    return GradError(f"{node.op.name} has no {mode}-mode derivative{reason}", hint=why.hint,
                     where=node.where)


def materialize(g: Tensor | None, like: Tensor) -> Tensor:
    """A cotangent as a tensor: zeros where there is none; of a distributed tensor, as it lies."""
    if g is None:
        g = F.zeros(like.shape, compute_type(like.type))
    return hooks.align.get()(g, like)
