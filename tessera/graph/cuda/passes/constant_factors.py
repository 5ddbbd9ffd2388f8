"""Sums of the same elements times numbers that are constant along what is summed are one sum, times
each of these.

    sum_i a x_i y_i,  sum_i x_i (b y_i)        # a s and b s,  s = sum_i x_i y_i

So a norm's gradient, whose weight and deviation are constant along its axes, reads its elements
once for the gradient of its weight and for its own. A product by a number rounds each term or their
sum, by as much; no terms are taken apart that a sum may cancel. A sum whose elements nothing else
sums stays as it is written, which may keep it in range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import reduce
from itertools import islice

from ....lazy_dataclass import dataclass
from ...ir import Graph, Node, Value, producers_of
from ...ops.broadcasting import broadcast_shapes
from ...simplify import Rewriter, rebuild, remove_dead
from .column_parts import F32, summed_by

MOST = 8  # factors of a product that is taken apart


@dataclass(frozen=True)
class Factors:
    """elements: what varies along the axes.  numbers: what does not, and whether it divides."""

    elements: tuple[Value, ...]
    numbers: tuple[tuple[Value, bool], ...]
    negative: bool

    @property
    def key(self) -> frozenset[tuple[Value, int]]:
        return frozenset(Counter(self.elements).items())


def sum_once(graph: Graph) -> Graph:
    """The graph with such sums."""
    made = producers_of(graph)
    parts: dict[Node, Factors] = {}
    alike: dict[tuple, set[Value]] = {}
    for node in graph.nodes:
        found = summed_by(node, made)
        if found is not None and (factors := _factors(*found, made)) is not None:
            parts[node] = factors
            alike.setdefault((factors.key, found[1]), set()).add(found[0])
    sums: dict[tuple, Value] = {}

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        factors = parts.get(node)
        if factors is None:
            return None
        (_, axis), accum = summed_by(node, made) or ((), ()), node.attrs["accum"]
        key = factors.key, axis
        if len(alike[key]) < 2:
            return None
        if key not in sums:
            elements = reduce(lambda a, b: rw.emit("mul", a, b),
                              [rw.env[v] for v in factors.elements])
            sums[key] = rw.emit("reduce_sum", elements, axis=axis, keepdims=True, accum=accum)
        total = sums[key]
        for number, divides in factors.numbers:
            total = rw.emit("div" if divides else "mul", total, rw.env[number])
        total = rw.emit("neg", total) if factors.negative else total
        return rw.emit("reshape", total, shape=node.outputs[0].aval.shape)

    return remove_dead(rebuild(graph, visit)) if any(len(x) > 1 for x in alike.values()) else graph


def _factors(x: Value, axis: tuple[int, ...], made: dict[Value, Node]) -> Factors | None:
    """Of what is summed; None where there are too many, or the elements do not fill its extents."""
    elements, numbers, negative = list[Value](), list[tuple[Value, bool]](), False
    for v, how in islice(_leaves(x, axis, x.aval.ndim, made), MOST + 1):
        if how == "element":
            elements.append(v)
        elif how == "sign":
            negative = not negative
        else:
            numbers.append((v, how == "divisor"))
    if len(elements) + len(numbers) > MOST or not elements or (
            broadcast_shapes(*(v.aval.shape for v in elements)) != x.aval.shape):
        return None
    return Factors(tuple(elements), tuple(numbers), negative)


def _leaves(v: Value, axis: tuple[int, ...], ndim: int, made: dict[Value, Node]
            ) -> Iterator[tuple[Value, str]]:
    """What a product is made of, and how each of these is in it."""
    node = made.get(v)
    name = "" if node is None or v.aval.type != F32 else node.op.name
    if _is_number(v, axis, ndim):
        yield v, "number"
    elif node is not None and name == "neg":
        yield v, "sign"
        yield from _leaves(node.inputs[0], axis, ndim, made)
    elif node is not None and name == "div" and _is_number(node.inputs[1], axis, ndim):
        yield from _leaves(node.inputs[0], axis, ndim, made)
        yield node.inputs[1], "divisor"
    elif node is not None and name == "mul":
        for factor in node.inputs:
            yield from _leaves(factor, axis, ndim, made)
    else:
        yield v, "element"


def _is_number(v: Value, axis: tuple[int, ...], ndim: int) -> bool:
    """Whether it is constant along the axes of what is summed."""
    shape = (1,) * (ndim - v.aval.ndim) + v.aval.shape
    return v.aval.type == F32 and all(isinstance(shape[a], int) and shape[a] == 1 for a in axis)


__all__ = ["sum_once"]
