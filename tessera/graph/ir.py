"""Graph IR: a first-order program of ops on typed values, with printer, verifier and hash."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ..dims import size_of
from ..errors import GraphError, SourceLine
from ..lazy_dataclass import dataclass
from ..numerics import stored_bytes
from ..tensor import Tensor
from .op import Aval, GraphOp, infer

VERSION = 1


class Value:
    """One result in a graph. Compared by identity."""

    __slots__ = ("aval",)

    def __init__(self, aval: Aval):
        self.aval = aval

    def __repr__(self) -> str:
        return f"Value({self.aval})"


def elements(v: Value) -> int:
    """How many elements the value has; its extents are numbers."""
    return int(size_of(v.aval.shape))


def value_bytes(v: Value) -> int:
    """The bytes of its elements in memory, packed or one in a byte; its extents are numbers."""
    dtype, shape = v.aval.dtype, tuple(int(d) for d in v.aval.shape)
    return max(elements(v) * dtype.numpy.itemsize, stored_bytes(shape, dtype))


@dataclass(frozen=True, eq=False)
class Node:
    """outputs = op(inputs, attrs), written on the user's line `where`."""

    op: GraphOp
    inputs: tuple[Value, ...]
    attrs: dict[str, Any]
    outputs: tuple[Value, ...]
    where: SourceLine | None = None

    @cached_property
    def meaning(self) -> tuple | None:
        """What it does to its inputs, as a key: equal for nodes that give the same of the same.
        None where it has an effect, holds a graph, or its attributes cannot be compared."""
        if self.op.graph_attrs or node_effects(self):
            return None
        items = tuple(sorted((k, _frozen(v)) for k, v in self.attrs.items()))
        try:
            hash(items)
        except TypeError:
            return None
        return self.op.name, items, tuple(v.aval.type for v in self.outputs)


def _frozen(value: Any) -> Any:
    """Numbers with their type: 1, 1.0 and True are different attributes; so are 0.0 and -0.0."""
    if isinstance(value, bool | int | float):
        return type(value).__name__, repr(value)
    if isinstance(value, tuple):
        return tuple(map(_frozen, value))
    return value if not isinstance(value, list) else object()


@dataclass(frozen=True, eq=False)
class Graph:
    """A function of values: inputs, then captured tensors, then nodes in order, then outputs.

    `captures` pairs values with tensors of the surrounding program (parameters closed over);
    they are read when the graph runs, so that an in-place update is seen.
    """

    name: str
    inputs: tuple[Value, ...]
    captures: tuple[tuple[Value, Tensor], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    # What was made of this graph and is kept with it, as an executable is; no part of a copy.
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def given(self) -> tuple[Value, ...]:
        """The values that no node makes: inputs, and what is captured."""
        return (*self.inputs, *(v for v, _ in self.captures))

    @property
    def effects(self) -> frozenset[str]:
        return frozenset[str]().union(*map(node_effects, self.nodes))

    @property
    def hash(self) -> str:
        """SHA-256 of everything that determines the result, source lines and names aside."""
        return hashlib.sha256(_text(self, canonical=True).encode()).hexdigest()

    def __str__(self) -> str:
        return _text(self)


def subgraphs(node: Node) -> Iterator[Graph]:
    for key in node.op.graph_attrs:
        held = node.attrs[key]
        yield from held if isinstance(held, tuple) else (held,)


def handed(node: Node, inner: Graph) -> Iterator[tuple[Value, Value]]:
    """(input of a held graph, what it is given). What a loop carries is another value each time."""
    n = node.attrs.get("n_carry", 0)
    skipped = {"scan": (1 + n, n), "checkpoint": (0, 0), "cond": (0, 1)}  # an index, the predicate
    if node.op.name in skipped:
        mine, outer = skipped[node.op.name]
        yield from zip(inner.inputs[mine:], node.inputs[outer:], strict=True)


def entered(node: Node) -> Iterator[tuple[Value, Value]]:
    """(input of a held graph, what it is given when that begins): a loop's first carries, too. Not
    of rules of the user's, whose graphs are given something else."""
    skipped = {"scan": (1, 0), "while_loop": (1, 0), "checkpoint": (0, 0), "cond": (0, 1)}
    if node.op.name in skipped:
        mine, outer = skipped[node.op.name]
        for inner in subgraphs(node):
            yield from zip(inner.inputs[mine:], node.inputs[outer:], strict=True)


def node_effects(node: Node) -> frozenset[str]:
    """The effects of a node and of the graphs it holds."""
    own = node.op.effects | node.op.also(node.attrs) if node.op.also else node.op.effects
    if not node.op.graph_attrs:
        return own
    return own.union(*(g.effects for g in subgraphs(node)))


def uses(graph: Graph) -> Counter[Value]:
    """How often each value is read, outputs included. It is the graph's: copy it to change it."""
    if "uses" not in graph.kept:
        reads = chain.from_iterable(node.inputs for node in graph.nodes)
        graph.kept["uses"] = Counter(chain(reads, graph.outputs))
    return graph.kept["uses"]


def producers_of(graph: Graph) -> dict[Value, Node]:
    """The node whose result each value is; inputs and captures have none. It is the graph's: copy
    it to change it."""
    if "producers" not in graph.kept:
        graph.kept["producers"] = {v: node for node in graph.nodes for v in node.outputs}
    return graph.kept["producers"]


def readers_of(graph: Graph) -> dict[Value, list[Node]]:
    """The nodes that read each value, in order, once for each operand that it is. It is the
    graph's: copy it to change it."""
    if "readers" not in graph.kept:
        found: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for v in node.inputs:
                found.setdefault(v, []).append(node)
        graph.kept["readers"] = found
    return graph.kept["readers"]


def verify(graph: Graph) -> None:
    """Raise GraphError unless every value is defined once before use and has its op's type."""
    defined: set[Value] = set(graph.inputs) | {v for v, _ in graph.captures}
    if len(defined) != len(graph.inputs) + len(graph.captures):
        raise GraphError(f"graph {graph.name}: an input appears twice")
    for node in graph.nodes:
        missing = [v for v in node.inputs if v not in defined]
        if missing:
            raise GraphError(f"graph {graph.name}: {node.op.name} reads {missing} before its node")
        want = infer(node.op, tuple(v.aval for v in node.inputs), node.attrs)
        got = tuple(v.aval for v in node.outputs)
        if want != got:
            raise GraphError(
                f"graph {graph.name}: {node.op.name} gives {list(map(str, want))}, "
                f"its node says {list(map(str, got))}"
            )
        if defined & set(node.outputs):
            raise GraphError(f"graph {graph.name}: {node.op.name} defines a value again")
        defined |= set(node.outputs)
        for inner in subgraphs(node):
            verify(inner)
    for v in graph.outputs:
        if v not in defined:
            raise GraphError(f"graph {graph.name}: output {v} is never defined")


def _text(graph: Graph, canonical: bool = False, indent: str = "") -> str:
    names: dict[Value, str] = {}

    def name(v: Value) -> str:
        return names.setdefault(v, f"%{len(names)}")

    effects = ", ".join(sorted(graph.effects))
    title = "" if canonical else f" {graph.name}"
    lines = [f"{indent}graph{title} v{VERSION} effects={{{effects}}}"]
    for v in graph.inputs:
        lines.append(f"{indent}  {name(v)}: {v.aval} = input")
    for v, held in graph.captures:
        label = "" if canonical or not held.name else f" {held.name!r}"
        lines.append(f"{indent}  {name(v)}: {v.aval} = capture{label}")
    for node in graph.nodes:
        lines.extend(_node_lines(node, name, canonical, indent + "  "))
    lines.append(f"{indent}  return " + ", ".join(name(v) for v in graph.outputs))
    return "\n".join(lines)


def _node_lines(node: Node, name: Any, canonical: bool, indent: str) -> list[str]:
    args = ", ".join(name(v) for v in node.inputs)
    plain = {k: v for k, v in node.attrs.items() if k not in node.op.graph_attrs}
    attrs = "".join(f" {k}={show_attr(v, canonical)}" for k, v in sorted(plain.items()))
    outs = ", ".join(f"{name(v)}: {v.aval}" for v in node.outputs)
    line = f"{indent}{outs}{' = ' if outs else ''}{node.op.name}({args}){attrs}"
    own = node_effects(node) if node.op.also else node.op.effects
    if own:
        line += f" !{','.join(sorted(own))}"
    if node.where is not None and not canonical:
        hints = f"  [{'; '.join(node.where.hints)}]" if node.where.hints else ""
        line += f"    # {node.where}{hints}"
    inner = [_text(g, canonical, indent + "  ") for g in subgraphs(node)]
    return [line, *inner]


def show_attr(value: Any, canonical: bool = False) -> str:
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(value.tobytes()).hexdigest()[:12]
        return f"array({value.dtype}{list(value.shape)}, {digest})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple):
        return "(" + ", ".join(show_attr(v, canonical) for v in value) + ")"
    return repr(value) if isinstance(value, str | float | int) else str(value)
