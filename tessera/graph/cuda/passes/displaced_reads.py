"""What is joined of parts of values is read where these lie, element by element.

    x - concatenate([x[:, -1:], x[:, :-1]])        # x - roll(x, 1, axis=1)
    concatenate([zeros, x[:, :-1]]) * 0.5 + ...    # a shift

A loop that reads such a value takes each part from the array that it is a part of, at a place that
is further on or back by as much, and chooses by where an element stands. What lies beyond that
array's edges is not read, so of parts that end there nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import Graph, Node, Value, readers_of
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.spell import is_stored, literal
from .data_movement import is_plain_loop

MOST_PARTS = 4  # of a concatenation: each element is compared with where each part begins
Part = tuple[int, int, Any]  # which operand and how much further on, or -1, 0 and a number


def _text(axis: int, ends: tuple[int, ...], parts: tuple[Part, ...]) -> str:
    """The choice of a part, the first one first."""
    texts = [f"{{{i} by {by}}}" if i >= 0 else number for i, by, number in parts]
    out = texts[-1]
    for end, text in zip(reversed(ends[:-1]), reversed(texts[:-1]), strict=True):
        out = f"tile.where({{place}} < {end}, {text}, {out})"
    return out


JOINED = library_call("joined", tile=_text, beside=True)


def read_displaced(graph: Graph) -> Graph:
    """The graph with joins of parts of values as such reads, where loops alone read them."""
    readers, results = readers_of(graph), set(graph.outputs)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "concatenate" or len(inputs) > MOST_PARTS:
            return None
        v, axis = node.outputs[0], node.attrs["axis"]
        if v in results or not is_stored(v.aval.dtype) or v.aval.shape[axis] == 1 or not all(
                isinstance(n, int) and n for n in v.aval.shape) or not all(
                _reads_whole(n, v) for n in readers.get(v, ())):
            return None
        memory, parts, ends = list[Value](), list[Part](), list[int]()
        for x in inputs:
            at = ends[-1] if ends else 0
            part = _part_address(rw, x, v, axis, at, memory)
            if part is None:
                return None
            parts.append(part)
            ends.append(at + extents_of(x)[axis])
        if not memory:
            return None
        out = Value(v.aval)
        rw.add(Node(JOINED, tuple(memory), {"axis": axis, "ends": tuple(ends),
                                            "parts": tuple(parts)}, (out,), rw.where))
        return out

    return remove_dead(rebuild(graph, visit))


def _reads_whole(node: Node, v: Value) -> bool:
    return is_plain_loop(node) and node.outputs[0].aval.shape == v.aval.shape


def _part_address(rw: Rewriter, x: Value, whole: Value, axis: int, at: int,
                  memory: list[Value]) -> Part | None:
    """Where a part from `at` on lies, in an array of the extents of the whole; or its number."""
    made, kind = rw.producer.get(x), whole.aval.dtype.kind
    while made is not None and made.op.name == "broadcast_to":
        made = rw.producer.get(made.inputs[0])
    if made is not None and made.op.name in ("constant", "full"):
        return (-1, 0, literal(made.attrs["value"], kind)) if kind != "bool" else None
    if made is None or made.op.name != "slice" or set(made.attrs["steps"]) != {1}:
        return None
    (source,), starts = made.inputs, made.attrs["starts"]
    if source.aval != whole.aval or not _is_in_memory(rw, source) or any(
            n != 0 for a, n in enumerate(starts) if a != axis):
        return None
    if source not in memory:
        memory.append(source)
    return memory.index(source), starts[axis] - at, None


def _is_in_memory(rw: Rewriter, v: Value) -> bool:
    """Whether it lies there in order, where a group that reads it elsewhere does not make it."""
    made = rw.producer.get(v)
    return made is None or is_plain_loop(made) or bool(made.op.reduction or made.op.matmul)


def displaced_axes(nodes: Sequence[Node]) -> set[int]:
    """The axes that stand alone in the frame of a loop, and those behind them."""
    return {a for n in nodes if n.op is JOINED for a in (n.attrs["axis"], n.attrs["axis"] + 1)}


__all__ = ["JOINED", "displaced_axes", "read_displaced"]
