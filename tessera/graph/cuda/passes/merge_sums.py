"""Sums over the rows of values that lie side by side, as parts of one sum.

    sum(a), sum(b)      # are the parts of sum([a b]), where [a b] is there

So the biases of matmuls that were joined have one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...ir import Graph, Node, Value, producers_of, readers_of
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import column_sum_axes
from ...simplify import Rewriter
from .library_ops import merged_line
from .merge_matmuls import columns_of
from .replace_nodes import Replacement, replace_nodes

Path = tuple[Node, ...]  # casts of a value, and a sum over its rows
Makers = Mapping[Value, Node]
Readers = Mapping[Value, Sequence[Node]]


def merge_sums(graph: Graph) -> Graph:
    """The graph with sums over all rows of values that are joined along columns as parts of one."""
    maker, readers = producers_of(graph), readers_of(graph)
    found, taken = list[Replacement](), set[Node]()
    for join in graph.nodes:
        shape = extents_of(join.outputs[0]) if join.op.name == "concatenate" and all(
            isinstance(n, int) for n in join.outputs[0].aval.shape) else ()
        if not shape or join.attrs["axis"] != len(shape) - 1 or (
                len(set(join.inputs)) < len(join.inputs)):
            continue
        for paths in _equal_sums(join, maker, readers):
            if taken.isdisjoint(p[-1] for p in paths):
                taken.update(p[-1] for p in paths)
                found.append(_replacement(join, paths))
    return replace_nodes(graph, found)


def _equal_sums(join: Node, maker: Makers, readers: Readers) -> list[list[Path]]:
    """Sums that all parts of a joined value have, part by part."""
    each = [dict[Any, Path]() for _ in join.inputs]
    for some, part in zip(each, join.inputs, strict=True):
        for path in _sums_of(_before_reshapes(part, maker), readers):
            shape = path[-1].inputs[0].aval.shape
            if shape[-1:] == part.aval.shape[-1:]:
                some.setdefault((shape[:-1], *map(_kind, path)), path)
    return [[some[kind] for some in each] for kind in each[0] if all(kind in s for s in each)]


def _before_reshapes(v: Value, maker: Makers) -> Value:
    made = maker.get(v)
    while made is not None and made.op.name == "reshape":
        v = made.inputs[0]
        made = maker.get(v)
    return v


def _sums_of(v: Value, readers: Readers) -> list[Path]:
    found: list[Path] = []
    for node in readers.get(v, ()):
        if column_sum_axes(node) is not None:
            found.append((node,))
        elif node.op.name == "cast":
            found += [(node, *path) for path in _sums_of(node.outputs[0], readers)]
        elif node.op.name == "reshape":
            found += _sums_of(node.outputs[0], readers)
    return found


def _kind(node: Node) -> Any:
    """What is the same of ops of all parts."""
    return node.op, node.inputs[0].aval.type, *node.attrs.items()


def _replacement(join: Node, paths: Sequence[Path]) -> Replacement:
    totals = [p[-1].outputs[0] for p in paths]

    def write(rw: Rewriter) -> None:
        *casts, last = paths[0]
        rw.where = merged_line(last.where, [p[-1] for p in paths])
        x, at = rw.env[join.outputs[0]], 0
        x = rw.emit("reshape", x, shape=(*extents_of(last.inputs[0])[:-1], extents_of(x)[-1]))
        for node in (*casts, last):
            x = rw.emit(node.op.name, x, **node.attrs)
        for v in totals:
            end = at + extents_of(v)[-1]
            rw.env[v] = columns_of(rw, x, at, end)
            at = end

    return Replacement(tuple(p[-1] for p in paths), (join.outputs[0],), write)


__all__ = ["merge_sums"]
