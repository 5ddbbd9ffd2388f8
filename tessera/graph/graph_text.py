"""Graph IR as text that reads back: `parse_graph(print_graph(graph), tensors)` is the graph again.

    graph "f" v1
      %0: "f32"[4, 3] = input
      %1: "f32"[3] = capture "w"
      %2: "f32"[4, 3] = add(%0, %1) {} loc("model.py", 3, "return x + w")
      %3: "f32"[4] = reduce_sum(%2) {axis=(1,), keepdims=False} loc("model.py", 3, "return x + w")
      return %3

`str(graph)` is for people: it shortens arrays and paths. This text has all that decides results,
and the lines. A graph that an op holds stands behind its node, further in; the attribute says
`graph`. Values of attributes are Python literals and calls of the few names below, which a reader
of its own evaluates: nothing is executed.
"""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ..errors import GraphError, SourceLine, did_you_mean
from ..numerics import DType, NumericType, as_type, find_dtype
from ..tensor import Tensor
from .ir import VERSION, Graph, Node, Value, subgraphs, verify
from .op import OPS, Aval

# Frozen dataclasses of plain data that attributes may hold, by name; upper floors put theirs here.
RECORDS: dict[str, Any] = {}
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_VALUE = re.compile(r"%(\d+)")
_NODE = re.compile(r"(?:(?P<outs>%[^=]*) = )?(?P<op>\w+)\((?P<args>[^)]*)\) \{(?P<attrs>.*?)\}"
                   r"(?: loc\((?P<where>.*)\))?")


# --- writing -------------------------------------------------------------------------------------
def print_graph(graph: Graph) -> str:
    """The text. Raises GraphError, at the op's line, for what has no text: extents that are names,
    kernels and Python functions among attributes."""
    return "\n".join([*_lines(graph, ""), ""])


def _lines(graph: Graph, indent: str) -> Iterator[str]:
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
        attrs = ", ".join(f"{k}={_attr_text(v, node, k)}" for k, v in sorted(node.attrs.items()))
        yield f"{indent}  {outs}{node.op.name}({args}) {{{attrs}}}{_where_text(node.where)}"
        for inner in subgraphs(node):
            yield from _lines(inner, indent + "    ")
    yield f"{indent}  return " + ", ".join(names[v] for v in graph.outputs)


def _aval_text(aval: Aval) -> str:
    if not all(isinstance(n, int) for n in aval.shape):
        raise GraphError(f"{aval} has extents that are names, which the text of a graph has not",
                         hint="trace the function for numbers")
    return f"{str(aval.type)!r}[{', '.join(map(str, aval.shape)) or '()'}]"


def _where_text(where: SourceLine | None) -> str:
    if where is None:
        return ""
    return f" loc({where.file!r}, {where.line}, {where.text!r}, {where.hints!r}, {where.part!r})"


def _attr_text(value: Any, node: Node, key: str) -> str:
    def text(x: Any) -> str:
        return _attr_text(x, node, key)

    if isinstance(value, Graph):
        return "graph"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if np.isfinite(value) else f"number({str(value)!r})"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, DType):
        return f"dtype({value.name!r})"
    if isinstance(value, NumericType):
        return f"type({str(value)!r})"
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return f"array({array.dtype.name!r}, {array.shape!r}, {data!r})"
    name = type(value).__name__
    if RECORDS.get(name) is type(value):
        values = (getattr(value, f.name) for f in fields(RECORDS[name]))
        return f"{name}({', '.join(map(text, values))})"
    raise GraphError(f"{node.op.name} has {key}={value!r}, which the text of a graph cannot hold",
                     where=node.where, hint="a kernel or a Python function is code of its program: "
                     "write this part in ts.* ops")


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


class _Reader:
    def __init__(self, lines: Sequence[str], captures: list[Tensor]):
        self.lines, self.at, self.captures = lines, 0, captures

    def _next(self, indent: str) -> tuple[str, list[str]]:
        """A line without its indent, its strings taken out: _s0_, _s1_, ... stand there"""
        line = self.lines[self.at]
        self.at += 1
        if not line.startswith(indent) or line[len(indent):].startswith(" "):
            raise ValueError("indented otherwise")
        held: list[str] = []

        def lift(found: re.Match[str]) -> str:
            held.append(found[0])
            return f"_s{len(held) - 1}_"

        return _STRING.sub(lift, line[len(indent):]), held

    def graph(self, indent: str) -> Graph:
        line, held = self._next(indent)
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
            line, held = self._next(indent + "  ")
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
            file, number, text, hints, part = _evaluate(_restored(f"({found['where']})", held))
            where = SourceLine(file, number, text, hints, part)

        def inner() -> Graph:
            return self.graph(indent + "    ")

        attrs = _attributes(_restored(f"f({found['attrs']})", held), op.graph_attrs, inner)
        inputs = tuple(values[v] for v in _VALUE.findall(found["args"]))
        outputs = _define(found["outs"] or "", held, values)
        return Node(op, inputs, attrs, tuple(outputs), where)


def _restored(text: str, held: Sequence[str]) -> str:
    return re.sub(r"_s(\d+)_", lambda m: held[int(m[1])], text)


def _define(text: str, held: Sequence[str], values: dict[str, Value]) -> list[Value]:
    """The values of `%0: "f32"[4, 3], %1: ...`."""
    made = []
    for number, kind, shape in re.findall(r"%(\d+): _s(\d+)_\[([^]]*)\]", text):
        extents = tuple(int(n) for n in shape.split(",")) if shape != "()" else ()
        values[number] = Value(Aval(extents, as_type(ast.literal_eval(held[int(kind)]))))
        made.append(values[number])
    return made


def _attributes(text: str, graph_attrs: Sequence[str], inner: Callable[[], Graph]
                ) -> dict[str, Any]:
    """Of `f(axis=1, to=dtype("f32"))`. Graphs follow in the order of the op's record."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    given = {str(k.arg): k.value for k in call.keywords}
    attrs = {name: _value(node) for name, node in given.items() if name not in graph_attrs}
    for name in graph_attrs:
        node = given[name]
        attrs[name] = tuple(inner() for _ in node.elts) if isinstance(node, ast.Tuple) else inner()
    return attrs


def _evaluate(text: str) -> Any:
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Tuple(elts=elements):
            return tuple(map(_value, elements))
        case ast.List(elts=elements):
            return [*map(_value, elements)]
        case ast.Call(func=ast.Name(id=name), args=args):
            made = [*map(_value, args)]
            return RECORDS[name](*made) if name in RECORDS else _CALLS[name](*made)
    raise ValueError(ast.dump(node))


def _array(dtype: str, shape: tuple[int, ...], data: str) -> np.ndarray:
    kind = find_dtype(dtype).numpy if dtype not in np.sctypeDict else np.dtype(dtype)
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape).copy()


_CALLS: dict[str, Callable[..., Any]] = {
    "number": float, "dtype": find_dtype, "type": as_type, "array": _array}

__all__ = ["RECORDS", "parse_graph", "print_graph"]
