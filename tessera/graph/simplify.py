"""Graph to graph: identities, canonical reductions, common subexpressions, dead code.

No rule changes a bit of the result: x * 1 goes, x + 0 stays (it turns -0 into +0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import SourceLine
from ..numerics import as_type
from .expand import expand
from .ir import Graph, Node, Value, node_effects
from .op import OPS, Aval, infer
from .ops.broadcasting import broadcast_shapes

F32, F64 = as_type("f32"), as_type("f64")
KEEP_EFFECTS = frozenset({"io", "state", "collective"})


class Rewriter:
    """Builds the new graph of a pass: nodes so far, and which value stands for an old one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.producer: dict[Value, Node] = {}
        self.env: dict[Value, Value] = {}
        self.where: SourceLine | None = None

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        for v in node.outputs:
            self.producer[v] = node

    def emit(self, name: str, *inputs: Value, **attrs: Any) -> Value:
        op = OPS[name]
        avals = infer(op, tuple(v.aval for v in inputs), attrs)
        node = Node(op, inputs, attrs, tuple(Value(a) for a in avals), self.where)
        self.add(node)
        return node.outputs[0]

    def again(self, node: Node, *inputs: Value) -> Value:
        """The result of the same op on these, at the node's line."""
        line, self.where = self.where, node.where
        out = self.emit(node.op.name, *inputs, **node.attrs)
        self.where = line
        return out

    def made_by(self, v: Value, name: str) -> Node | None:
        """The node that made v when it is an op of this name."""
        node = self.producer.get(v)
        return node if node is not None and node.op.name == name else None


def rebuild(graph: Graph, visit: Callable[[Rewriter, Node, tuple[Value, ...]], Any]) -> Graph:
    """A graph whose nodes are visited in order: visit returns the value that replaces the node's
    only output, or None to keep the node."""
    rw = Rewriter()
    env, nodes, producer = rw.env, rw.nodes, rw.producer  # every pass comes by here: no calls
    for v in graph.given:
        env[v] = v
    stands_for, changed = env.__getitem__, False
    for node in graph.nodes:
        inputs = tuple(map(stands_for, node.inputs))
        rw.where = node.where
        new = visit(rw, node, inputs)
        if new is not None:
            env[node.outputs[0]], changed = new, True
            continue
        if inputs != node.inputs:
            changed = True
            node = Node(node.op, inputs, node.attrs, node.outputs, node.where)
        nodes.append(node)
        for v in node.outputs:
            env[v], producer[v] = v, node
    if not changed and len(nodes) == len(graph.nodes):
        return graph
    outputs = tuple(map(stands_for, graph.outputs))
    return replace(graph, nodes=tuple(rw.nodes), outputs=outputs)


# --- identities and canonical forms -----------------------------------------------------------
def canonicalize(graph: Graph) -> Graph:
    """Apply the rule of each op, once, in order."""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        rule = RULES.get(node.op.name)
        new = rule(rw, inputs, node) if rule else None
        if new is None and node.op.loop is not None and len(inputs) > 1:
            new = _drop_broadcasts(rw, node, inputs)
        return new

    return rebuild(graph, visit)


def _reshape(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    (x,), shape = inputs, node.attrs["shape"]
    inner = rw.made_by(x, "reshape")
    source = inner.inputs[0] if inner else x
    if source.aval.shape == shape:
        return source
    return rw.emit("reshape", source, shape=shape) if inner else None


def _transpose(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    (x,), axes = inputs, node.attrs["axes"]
    inner = rw.made_by(x, "transpose")
    if inner:
        axes = tuple(inner.attrs["axes"][a] for a in axes)
        x = inner.inputs[0]
    if axes == tuple(range(len(axes))):
        return x
    return rw.emit("transpose", x, axes=axes) if inner else None


def _broadcast_to(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    (x,), shape = inputs, node.attrs["shape"]
    if x.aval.shape == shape:
        return x
    inner = rw.made_by(x, "broadcast_to")
    return rw.emit("broadcast_to", inner.inputs[0], shape=shape) if inner else None


def _cast(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    (x,) = inputs
    to = node.attrs["to"]
    if x.aval.type == to:
        return x
    inner = rw.made_by(x, "cast")
    if inner is None:
        return None
    source, middle = inner.inputs[0].aval.type, x.aval.type
    exact = (
        source == to
        and source.dtype.kind == middle.dtype.kind == "float"
        and middle.dtype.numpy.itemsize >= 4
        and middle.dtype.bits > source.dtype.bits
    )
    return inner.inputs[0] if exact else None


def _number(rw: Rewriter, v: Value) -> Any:
    node = rw.producer.get(v)  # the cotangent that a gradient begins with is full of ones
    known = node is not None and (node.op.name == "constant" or (
        node.op.name == "full" and v.aval.shape == ()))
    return node.attrs["value"] if node is not None and known else None


def _times_one(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    a, b = inputs
    if _number(rw, b) == 1 and a.aval == node.outputs[0].aval:
        return a
    if node.op.name == "mul" and _number(rw, a) == 1 and b.aval == node.outputs[0].aval:
        return b
    return None


def _div(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    """A number by a number, as in the gradient of a mean, is a number: the same bits."""
    y = node.outputs[0].aval
    a, b = (_number(rw, v) for v in inputs)
    if a is None or not b or y.shape != () or y.type not in (F32, F64):
        return _times_one(rw, inputs, node)
    value = float(np.divide(a, b, dtype=y.dtype.numpy))
    return rw.emit("constant", value=value, type=y.type)


def _neg(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    inner = rw.made_by(inputs[0], "neg")
    return inner.inputs[0] if inner else None


def _reduce(rw: Rewriter, inputs: tuple, node: Node) -> Value | None:
    """Reductions that include the last axis become one over it alone, kept, then the rest."""
    (x,), attrs = inputs, node.attrs
    axis, keep = attrs["axis"], attrs["keepdims"]
    rest = {k: v for k, v in attrs.items() if k not in ("axis", "keepdims")}
    last = x.aval.ndim - 1
    if all(isinstance(x.aval.shape[a], int) and x.aval.shape[a] == 1 for a in axis) and (
            _keeps(attrs.get("accum"), x.aval)):
        if node.op.name == "reduce_sum" and x.aval.dtype.kind == "float":  # it begins with 0
            zero = rw.emit("constant", value=0.0, type=x.aval.type)
            x = rw.emit("add", x, zero)
        return rw.emit("reshape", x, shape=node.outputs[0].aval.shape)
    if last not in axis or any(x.aval.shape[a] == 0 for a in axis):
        return None
    if axis == (last,) and keep:
        return None
    out = rw.emit(node.op.name, x, axis=(last,), keepdims=True, **rest)
    if len(axis) > 1:
        out = rw.emit(node.op.name, out, axis=axis[:-1], keepdims=True, **rest)
    return out if keep else rw.emit("reshape", out, shape=node.outputs[0].aval.shape)


def _keeps(accum: Any, x: Aval) -> bool:
    """Whether a sum of one element is that element: one in a narrower type rounds it."""
    return accum is None or accum is x.dtype or accum.kind != "float" or accum.bits >= x.dtype.bits


def _drop_broadcasts(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
    """Operands stretched beforehand are stretched by the op itself."""
    slim = list(inputs)
    for i, v in enumerate(inputs):
        inner = rw.made_by(v, "broadcast_to")
        if inner is None:
            continue
        trial = [*slim[:i], inner.inputs[0], *slim[i + 1:]]
        if _stretched([t.aval for t in trial]) == node.outputs[0].aval.shape:
            slim = trial
    if tuple(slim) == inputs:
        return None
    return rw.emit(node.op.name, *slim, **node.attrs)


def _stretched(avals: list[Aval]) -> tuple:
    return broadcast_shapes(*(a.shape for a in avals))


RULES: dict[str, Callable[[Rewriter, tuple, Node], Value | None]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast_to": _broadcast_to,
    "cast": _cast,
    "mul": _times_one,
    "div": _div,
    "neg": _neg,
    "where": lambda rw, inputs, node: inputs[1] if inputs[1] is inputs[2] and inputs[1].aval
    == node.outputs[0].aval else None,  # only its derivative told them apart
    "stop_gradient": lambda rw, inputs, node: inputs[0],  # derivatives are taken before
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
}


# --- common subexpressions, dead code ---------------------------------------------------------
def merge_common(graph: Graph) -> Graph:
    """Pure nodes with equal ops, inputs, attributes and kinds of results become one."""
    seen: dict[Any, tuple[Value, ...]] = {}
    rw_env: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = tuple([rw_env.get(v, v) for v in node.inputs])
        meaning = node.meaning
        if meaning is not None:
            made = tuple([v.aval for v in node.outputs])
            before = seen.setdefault((meaning, inputs, made), node.outputs)
            if before is not node.outputs:
                rw_env.update(zip(node.outputs, before, strict=True))
                continue
        nodes.append(node if inputs == node.inputs else
                     Node(node.op, inputs, node.attrs, node.outputs, node.where))
    if not rw_env:
        return graph
    outputs = tuple(rw_env.get(v, v) for v in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def remove_dead(graph: Graph) -> Graph:
    """Drop nodes whose results nothing reads, unless they have an effect on the world."""
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs) or node_effects(node) & KEEP_EFFECTS:
            kept.append(node)
            live.update(node.inputs)
    captures = tuple((v, t) for v, t in graph.captures if v in live)
    if len(kept) == len(graph.nodes) and len(captures) == len(graph.captures):
        return graph
    return Graph(graph.name, graph.inputs, captures, tuple(reversed(kept)), graph.outputs)


PIPELINE: list[Callable[[Graph], Graph]] = [
    remove_dead,
    expand,
    canonicalize,
    merge_common,
    canonicalize,  # again: merged values expose identities
    merge_common,
    remove_dead,
]


def simplify(graph: Graph) -> Graph:
    """The graph after every pass of PIPELINE, in order."""
    for step in PIPELINE:
        graph = step(graph)
    return graph

