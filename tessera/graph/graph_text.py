"""Graph IR as text that reads back: `parse_graph(print_graph(graph), tensors)` is the graph again.

    graph "f" v1
      %0: "f32"[4, 3] = input
      %1: "f32"[3] = capture "w"
      %2: "f32"[4, 3] = add(%0, %1) {} loc("model.py", 3, "return x + w")
      %3: "f32"[4] = reduce_sum(%2) {axis=(1,), keepdims=False} loc("model.py", 3, "return x + w")
      return %3

`str(graph)` is for people: it shortens arrays and paths. This text has all that decides results,
and the lines. A graph that an op holds stands behind its node, further in; the attribute says
`graph`. Values of attributes are those of text_values.py: nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import GraphError, did_you_mean
from ..numerics import as_type
from ..tensor import Tensor
from .ir import VERSION, Graph, Node, Value, subgraphs, verify
from .op import OPS, Aval
from .text_values import (
    TextLines,
    extents_text,
    keywords_text,
    read_extents,
    read_keywords,
    read_where,
    restore_strings,
    value_of,
    value_text,
    where_text,
)

_VALUE = re.compile(r"%(\d+)")
_NODE = re.compile(r"(?:(?P<outs>%[^=]*) = )?(?P<op>\w+)\((?P<args>[^)]*)\) \{(?P<attrs>.*?)\}"
                   r"(?: loc\((?P<where>.*)\))?")


# --- writing -------------------------------------------------------------------------------------
def print_graph(graph: Graph) -> str:
    """The text. Raises GraphError, at the op's line, for what has no text: extents that are names,
    kernels and Python functions among attributes."""
    return "\n".join([*_lines(graph, "", []), ""])


def _lines(graph: Graph, indent: str, shared: list[Any]) -> Iterator[str]:
    names: dict[Value, str] = {}

    def made(values: Sequence[Value]) -> str:
        for v in values:
            names[v] = f"%{len(names)}"
        return ", ".join(f"{names[v]}: {_aval_text(v.aval)}" for v in values)

    yield f"{indent}graph {graph.name!r} v{VERSION}"
    for v in graph.inputs:
        yield f"{indent}  {made([v])} = input"
    for v, held in graph.captures:
        yield f"{indent}  {made([v])} = capture {held.name!r}"
    for node in graph.nodes:
        args = ", ".join(names[v] for v in node.inputs)
        outs = f"{made(node.outputs)} = " if node.outputs else ""
        attrs = keywords_text({k: _attr_text(v, node, k, shared)
                               for k, v in sorted(node.attrs.items())})
        yield f"{indent}  {outs}{node.op.name}({args}) {attrs}{where_text(node.where)}"
        for inner in subgraphs(node):
            yield from _lines(inner, indent + "    ", shared)
    yield f"{indent}  return " + ", ".join(names[v] for v in graph.outputs)


def _aval_text(aval: Aval) -> str:
    shape = [n for n in aval.shape if isinstance(n, int)]
    if len(shape) < len(aval.shape):
        raise GraphError(f"{aval} has extents that are names, which the text of a graph has not",
                         hint="trace the function for numbers")
    return extents_text(aval.type, shape)


def _attr_text(value: Any, node: Node, key: str, shared: list[Any]) -> str:
    def other(x: Any) -> str:
        if isinstance(x, Graph):
            return "graph"
        raise GraphError(f"{node.op.name} has {key}={x}, which the text of a graph cannot hold",
                         where=node.where, hint="a kernel or a Python function is code of its "
                         "program: write this part in ts.* ops")

    return value_text(value, other, shared)


# --- reading -------------------------------------------------------------------------------------
def parse_graph(text: str, captures: Sequence[Tensor] = ()) -> Graph:
    """The graph of a text that print_graph made; it is verified. captures: its tensors, in order.

    Raises GraphError for a text of a newer version, an op that is not registered here, and any
    other text.
    """
    lines = text.splitlines()
    reader = _Reader(lines, list(captures))
    try:
        graph = reader.graph("")
    except (ValueError, SyntaxError, KeyError, IndexError, TypeError, RecursionError) as err:
        raise GraphError(f"line {reader.at} is no Graph IR: {lines[reader.at - 1:reader.at]}"
                         ) from err
    if reader.at != len(lines):
        raise GraphError(f"line {reader.at + 1} stands behind the end of the graph")
    verify(graph)
    return graph


class _Reader(TextLines):
    def __init__(self, lines: Sequence[str], captures: list[Tensor]):
        super().__init__(lines)
        self.captures, self.shared = captures, dict[int, Any]()

    def graph(self, indent: str) -> Graph:
        line, held = self.next(indent)
        found = re.fullmatch(r"graph _s0_ v(\d+)", line)
        if found is None:
            raise ValueError(line)
        if int(found[1]) > VERSION:
            raise GraphError(f"the graph is of version {found[1]}, this Tessera reads up to "
                             f"version {VERSION}", hint="load it with the Tessera that wrote it, "
                             "or a newer one")
        values: dict[str, Value] = {}
        inputs, captured, nodes = list[Value](), list[tuple[Value, Tensor]](), list[Node]()
        name = ast.literal_eval(held[0])
        while True:
            line, held = self.next(indent + "  ")
            if line.startswith("return"):
                outputs = tuple(values[v] for v in _VALUE.findall(line))
                return Graph(name, tuple(inputs), tuple(captured), tuple(nodes), outputs)
            if line.endswith(" = input"):
                inputs += _define(line, held, values)
            elif " = capture " in line:
                captured += [(v, self.captures.pop(0)) for v in
                             _define(line.partition(" = ")[0], held, values)]
            else:
                nodes.append(self._node(line, held, values, indent))

    def _node(self, line: str, held: Sequence[str], values: dict[str, Value], indent: str) -> Node:
        found = _NODE.fullmatch(line)
        if found is None:
            raise ValueError(line)
        if found["op"] not in OPS:
            raise GraphError(f"the graph has an op {found['op']!r}, which is not registered here",
                             hint=did_you_mean(found["op"], sorted(OPS)))
        op, where = OPS[found["op"]], None
        if found["where"] is not None:
            where = read_where(restore_strings(found["where"], held))

        def inner() -> Graph:
            return self.graph(indent + "    ")

        given = read_keywords(restore_strings(found["attrs"], held))
        attrs = {name: value_of(at, self.shared) for name, at in given.items()
                 if name not in op.graph_attrs}
        for name in op.graph_attrs:  # they follow in the order of the op's record
            at = given[name]
            attrs[name] = tuple(inner() for _ in at.elts) if isinstance(at, ast.Tuple) else inner()
        inputs = tuple(values[v] for v in _VALUE.findall(found["args"]))
        outputs = _define(found["outs"] or "", held, values)
        return Node(op, inputs, attrs, tuple(outputs), where)


def _define(text: str, held: Sequence[str], values: dict[str, Value]) -> list[Value]:
    """The values of `%0: "f32"[4, 3], %1: ...`."""
    made = []
    for number, kind, shape in re.findall(r"%(\d+): _s(\d+)_\[([^]]*)\]", text):
        aval = Aval(read_extents(shape), as_type(ast.literal_eval(held[int(kind)])))
        values[number] = Value(aval)
        made.append(values[number])
    return made


__all__ = ["parse_graph", "print_graph"]
