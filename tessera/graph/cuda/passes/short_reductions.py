"""Reductions over a few elements are ops on these, which join the loops that make and read them.

    sum(y[ids] * w[:, :, None], 1)   of [T, 2, C]      ->  y[ids[:, 0]] * w[:, :1] + ...
    sum(square(p[:, None] - q), -1)  of [M, N, 3]      ->  square(p0 - q0) + ...

A kernel of columns has a group for every few of them, and one of rows a warp for as many elements
as there are places in it; what they reduce lies in memory first.
"""

from __future__ import annotations

from math import prod

from ...ir import Graph, Node, Value, producers_of, readers_of
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from .data_movement import is_joined, is_plain_loop
from .followed_values import PICKS

MOST = 4  # elements
LEAST = 1 << 16  # elements in all, from which a pass over memory shows
PAIRS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def open_short_reductions(graph: Graph) -> Graph:
    readers, maker = readers_of(graph), producers_of(graph)

    def repeats(v: Value, size: int) -> bool:
        """Whether a loop of more elements reads it: one over all that was reduced, say. What is
        joined is a part of them."""
        return any(repeats(n.outputs[0], size) if n.op.name == "reshape" else
                   n.outputs and n.op.name != "concatenate" and (
                       prod(extents_of(n.outputs[0])) > size) for n in readers.get(v, ()))

    def is_short(node: Node) -> bool:
        if node.op.reduction not in PAIRS or len(node.attrs["axis"]) != 1:
            return False
        (x,), (y,) = node.inputs, node.outputs
        if not all(isinstance(n, int) for n in x.aval.shape) or (
                node.attrs.get("accum", x.aval.dtype) is not x.aval.dtype):
            return False
        axis, shape = node.attrs["axis"][0], extents_of(x)
        made = maker.get(x)
        along_rows = axis == len(shape) - 1
        lies = made is None or not is_plain_loop(made)
        return 1 < shape[axis] <= MOST and prod(shape) >= LEAST and not (
            along_rows and lies) and not repeats(y, prod(extents_of(y))) and (
            _is_picked(x, maker) or not is_joined(y, readers, loops=True))

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if not is_short(node):
            return None
        x, axis = inputs[0], node.attrs["axis"][0]
        parts = [_part(rw, x, axis, r, {}) for r in range(extents_of(x)[axis])]
        out = parts[0]
        for part in parts[1:]:
            out = rw.emit(PAIRS[node.op.reduction], out, part)
        shape = node.outputs[0].aval.shape
        return out if out.aval.shape == shape else rw.emit("reshape", out, shape=shape)

    return remove_dead(rebuild(graph, visit))


def _is_picked(x: Value, maker: dict[Value, Node]) -> bool:
    """Whether integers pick it, and what is reduced are these."""
    made = maker.get(x)
    while made is not None and made.op.name == "reshape":
        made = maker.get(made.inputs[0])
    return made is not None and made.op.name in PICKS


def _part(rw: Rewriter, v: Value, axis: int, r: int, known: dict[Value, Value]) -> Value:
    """The elements of number r along an axis, which stays as one of one element."""
    if v not in known:
        known[v] = _made(rw, v, axis, r, known)
    return known[v]


def _made(rw: Rewriter, v: Value, axis: int, r: int, known: dict[Value, Value]) -> Value:
    node, shape = rw.producer.get(v), extents_of(v)
    if shape[axis] == 1:
        return v
    if node is not None and is_plain_loop(node) and not node.op.beside:
        parts = []
        for x in node.inputs:
            at = axis - len(shape) + x.aval.ndim
            parts.append(_part(rw, x, at, r, known) if at >= 0 else x)
        return rw.again(node, *parts)
    ends = [(r, r + 1) if a == axis else (0, n) for a, n in enumerate(shape)]
    return rw.emit("slice", v, starts=tuple(b for b, _ in ends), stops=tuple(e for _, e in ends),
                   steps=(1,) * len(shape))


__all__ = ["open_short_reductions"]
