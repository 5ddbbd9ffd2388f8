"""A user's function of a score, as an attribute of attention.

    def score(s, b, h, i, j): return s - 0.1 * ts.abs(i - j)

It is traced on numbers: what it does to one score is what it does to all. Two are the same when
their graphs are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ...dims import show_shape
from ...errors import ArgumentError
from ...numerics import as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..expand import expand_by
from ..ir import Graph
from ..op import Aval
from ..trace import aval_of, run_nodes, trace
from .broadcasting import broadcast_shapes

PLACES = ("b", "h", "i", "j")
SHOULD = ("it makes a score of each score s by elementwise functions of it and the numbers of its "
          "sequence b, head h, query i and key j")
NUMBERS = (Aval((), as_type("f32")), *(Aval((), as_type("int32")) for _ in PLACES))


class ScoreFunction:
    """fn(s, b, h, i, j), and what it is on numbers. value: its graph.  both: that of (y, dy / ds).
    """

    def __init__(self, fn: Callable):
        self.fn = fn
        self.value = trace(lambda *xs: [_result(fn, *xs)], NUMBERS, "score")
        if self.value.captures:
            raise ArgumentError("a score function reads a tensor from outside",
                                hint="write numbers, or compute them from b, h, i and j")

    @cached_property
    def both(self) -> Graph:
        return trace(lambda *xs: list(with_slope(self.fn, *xs)), NUMBERS, "score_with_slope")

    @property
    def reads_sequence(self) -> bool:
        """Whether the number of the sequence matters."""
        return any(self.value.inputs[1] in n.inputs for n in self.value.nodes)

    def __repr__(self) -> str:
        names = {v: f"v{i}" for i, v in enumerate(self.value.inputs)}
        lines = []
        for node in self.value.nodes:
            names |= {v: f"v{len(names)}" for v in node.outputs}
            given = ", ".join(names[v] for v in node.inputs)
            lines.append(f"{node.op.name}({given}{node.attrs or ''})")
        return f"score({'; '.join(lines)}; {names[self.value.outputs[0]]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreFunction) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def _result(fn: Callable, s: Tensor, *places: Tensor) -> Tensor:
    y = as_tensor(fn(s, *places))
    if y.dtype.kind != "float" or broadcast_shapes(tuple(y.shape), tuple(s.shape)) != s.shape:
        raise ArgumentError(f"a score function gives {y.type} {show_shape(y.shape)} for scores "
                            f"{s.type} {show_shape(s.shape)}", hint=SHOULD)
    return F.broadcast_to(F.cast(y, s.type), s.shape)


def with_slope(fn: Callable, s: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
    """fn of scores, elementwise, and its derivative by each."""
    graph = trace(lambda *xs: [_result(fn, *xs)], [aval_of(x) for x in (s, *places)], "score")
    graph = expand_by(graph, lambda n: n.op.expand if n.op.vjp is None else None)
    env = dict(zip(graph.inputs, (s, *places), strict=True)) | dict(graph.captures)
    run_nodes(graph, env)
    slopes = _backwards(graph, env)
    (y,) = graph.outputs
    return env[y], slopes.get(graph.inputs[0], F.zeros(s.shape, s.type))


def _backwards(graph: Graph, env: dict[Any, Any]) -> dict[Any, Any]:
    """The cotangent of each value, that of the result being one."""
    (y,) = graph.outputs
    slopes = {y: F.ones(env[y].shape, env[y].type)}
    for node in reversed(graph.nodes):
        (made,) = node.outputs
        if made not in slopes or node.op.vjp is None or made.aval.dtype.kind != "float":
            continue
        back = node.op.vjp(slopes[made], env[made], *(env[v] for v in node.inputs), **node.attrs)
        for v, c in zip(node.inputs, back, strict=True):
            if c is not None and v.aval.dtype.kind == "float":
                slopes[v] = slopes[v] + c if v in slopes else c
    return slopes


__all__ = ["PLACES", "ScoreFunction", "with_slope"]
