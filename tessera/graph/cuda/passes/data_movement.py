"""Passes on what only moves elements: it moves them in the narrowest type, and sums of parts that
lie side by side are the parts, joined."""

from __future__ import annotations

from typing import Any

from ....numerics import NumericType
from ...ir import Graph, Node, Value, readers_of, uses
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import loop_space
from ...simplify import Rewriter, rebuild, remove_dead
from .library_ops import merged_line

MOVED = ("transpose", "reshape", "concatenate")  # the result has each element of the operands once


def narrow_moves(graph: Graph) -> Graph:
    """What is transposed or joined and then rounded is rounded first: by what makes it, and half as
    many bytes move. What was widened before, from the same type, is moved as it was. What other
    ranks send and is joined moves nowhere: it is written in its place."""
    count = uses(graph)

    def cast(rw: Rewriter, v: Value, to: NumericType) -> Value:
        made = rw.producer.get(v)
        if v.aval.type == to:
            return v
        if made is not None and made.op.name in MOVED and count.get(v, 1) == 1:
            parts = [cast(rw, x, to) for x in made.inputs]
            rw.where = made.where
            return rw.emit(made.op.name, *parts, **made.attrs)
        if made is not None and made.op.name == "cast" and made.attrs["source"].dtype is to.dtype \
                and is_plain(made.attrs["source"]) and v.aval.dtype.bits > to.dtype.bits:
            return cast(rw, made.inputs[0], to)
        return rw.emit("cast", v, source=v.aval.type, to=to)

    def turns(rw: Rewriter, v: Value) -> bool:
        """Whether a value is moved by more than a reshape of a matmul, which takes in what is
        behind it. Loops end at a reshape: a cast behind one would be a loop of its own."""
        made = rw.producer.get(v)
        if made is None or made.op.name not in MOVED or count.get(v, 1) > 1:
            return False
        if made.op.name != "reshape":
            return not all(_arrives(rw, x) for x in made.inputs)
        before = rw.producer.get(made.inputs[0])
        return before is not None and before.op.name != "matmul" and (
            before.op.name not in MOVED or turns(rw, made.inputs[0]))

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "cast" or not narrows(node) or count[node.inputs[0]] > 1 or (
                not turns(rw, inputs[0])):
            return None
        where = rw.where
        out = cast(rw, inputs[0], node.attrs["to"])
        rw.where = merged_line(where, [node])
        return out

    return remove_dead(rebuild(graph, visit))


def reshape_matmuls(graph: Graph) -> Graph:
    """What is computed of a matmul element by element and then cut into other rows is cut first:
    the matmul takes in what is behind the reshape as well. Rows stay whole."""
    count = uses(graph)

    def of_matmul(rw: Rewriter, v: Value) -> bool:
        """Whether it is made of a matmul by ops that nothing else reads."""
        made = rw.producer.get(v)
        if made is None or count.get(v, 1) > 1:
            return False
        if made.op.name == "matmul":
            return True
        main = [x for x in made.inputs if _fills(x, v)]
        return is_plain_loop(made) and (len(main) == 1 or made.op.name == "add") and all(
            _fills(x, v) or is_row(x, v) for x in made.inputs) and all(
            of_matmul(rw, x) for x in main) and bool(main)

    def cut(rw: Rewriter, v: Value, shape: tuple[int, ...]) -> Value:
        made, line = rw.producer[v], rw.where
        if made.op.name == "matmul":
            return rw.emit("reshape", v, shape=shape)
        parts = [cut(rw, x, shape) if _fills(x, v) else _flat_row(rw, x) for x in made.inputs]
        rw.where = made.where
        out = rw.emit(made.op.name, *parts, **made.attrs)
        rw.where = line
        return out

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "reshape":
            return None
        shape, made = node.outputs[0].aval.shape, rw.producer.get(inputs[0])
        if made is None or made.op.name == "matmul" or not all(isinstance(n, int) for n in shape):
            return None
        if not shape or inputs[0].aval.shape[-1:] != shape[-1:] or not of_matmul(rw, inputs[0]):
            return None
        return cut(rw, inputs[0], extents_of(node.outputs[0]))

    return remove_dead(rebuild(graph, visit))


CARRIED = ("reshape", "transpose", "slice", "flip")  # moves of one operand, each element once


def widen_late(graph: Graph) -> Graph:
    """What is moved and then computed with is widened where it is computed with: copies move half
    the bytes, and a cast in front of a reshape would be a loop of its own."""
    readers, results = readers_of(graph), set(graph.outputs)

    def is_late(v: Value) -> bool:
        """Whether all that reads it computes with it, or moves what is computed with."""
        return v not in results and all(
            is_late(n.outputs[0]) if n.op.name in CARRIED else loop_space(n) is not None
            for n in readers.get(v, ()))

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name not in CARRIED:
            return None
        cast = rw.made_by(inputs[0], "cast")
        if cast is None or not widens(cast) or not is_late(node.outputs[0]):
            return None
        moved = rw.emit(node.op.name, cast.inputs[0], **node.attrs)
        return rw.emit("cast", moved, **cast.attrs)

    return remove_dead(rebuild(graph, visit))


def widens(node: Node) -> bool:
    """Whether a cast gives floats more bits."""
    source, to = node.attrs["source"], node.attrs["to"]
    return source.dtype.kind == to.dtype.kind == "float" and source.dtype.bits < to.dtype.bits and (
        is_plain(source) and is_plain(to))


def is_joined(v: Value, readers: dict[Value, list[Node]], loops: bool = False) -> bool:
    """Whether it is a part of a whole in memory, where loops write it at once. loops: or what such
    a part is made of."""
    seen, work = {v}, [v]
    while work:
        for n in readers.get(work.pop(), ()):
            if n.op.name == "concatenate":
                return True
            if n.op.name in ("reshape", "transpose", "cast") or loops and is_plain_loop(n):
                work += [y for y in n.outputs if y not in seen]
                seen.update(n.outputs)
    return False


def is_plain_loop(node: Node) -> bool:
    """An op of each element by itself."""
    return loop_space(node) is not None and not (node.op.reduction or node.op.placed
                                                 or node.op.makes or node.op.effects)


def _arrives(rw: Rewriter, v: Value) -> bool:
    """Whether other ranks send it: it is written where it belongs, and moved by nothing."""
    made = rw.producer.get(v)
    while made is not None and made.op.name == "reshape":
        made = rw.producer.get(made.inputs[0])
    return made is not None and made.op.exchange is not None


def _fills(x: Value, v: Value) -> bool:
    return x.aval.shape == v.aval.shape and x.aval.ndim > 1


def is_row(x: Value, v: Value) -> bool:
    """The same for all rows."""
    return all(n == 1 for n in x.aval.shape[:-1]) and x.aval.shape[-1:] in ((), (1,),
                                                                            v.aval.shape[-1:])


def _flat_row(rw: Rewriter, x: Value) -> Value:
    shape = extents_of(x)[-1:]
    return x if x.aval.ndim <= 1 else rw.emit("reshape", x, shape=shape)


def narrows(node: Node) -> bool:
    """Whether a cast rounds floats, each by itself, to fewer bits."""
    source, to = node.attrs["source"], node.attrs["to"]
    return source.dtype.kind == to.dtype.kind == "float" and source.dtype.bits > to.dtype.bits and (
        is_plain(source) and is_plain(to))


def is_plain(numeric: NumericType) -> bool:
    """Whether elements are stored as they are, without scales beside them."""
    policy = numeric.policy
    return not (policy.scaled or policy.custom is not None or policy.per_channel is not None
                or numeric.dtype.packed)


# --- parts side by side -----------------------------------------------------------------------
def join_parts(graph: Graph) -> Graph:
    """A sum of values that are padded with zeros so that they lie side by side, as the cotangents
    of slices do, is the values joined; of another value and then these, that and the values joined.
    (Of a -0 in them the sum would make 0.)"""

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "add":
            return None
        shape = node.outputs[0].aval.shape
        parts = _padded(rw, inputs, shape)
        found = None if parts is None else _side_by_side(parts, shape)
        if found is not None:
            return rw.emit("concatenate", *found[1], axis=found[0])
        return _behind_another(rw, node, inputs, shape)

    return remove_dead(rebuild(graph, visit))


def _behind_another(rw: Rewriter, node: Node, inputs: tuple[Value, ...], shape: Any
                    ) -> Value | None:
    """((x + part) + part), where the parts fill the whole: each element has one of them added."""
    parts: list[Part] = []
    while node.op.name == "add" and all(tuple(v.aval.shape) == tuple(shape) for v in inputs):
        pads = [(v, made) for v in inputs if (made := rw.made_by(v, "pad")) is not None
                and zeros_around(rw, made) is not None]
        if len(pads) != 1:
            return None
        ((v, made),) = pads
        width = zeros_around(rw, made)
        assert width is not None
        parts.append((made.inputs[0], width))
        rest = inputs[1] if inputs[0] is v else inputs[0]
        found = _side_by_side(parts, shape)
        if found is not None:
            return rw.emit("add", rest, rw.emit("concatenate", *found[1], axis=found[0]))
        if rest not in rw.producer:
            return None
        node = rw.producer[rest]
        inputs = node.inputs
    return None


Part = tuple[Value, tuple[tuple[int, int], ...]]  # a value, and the zeros around it


def _padded(rw: Rewriter, inputs: tuple[Value, ...], shape: Any) -> list[Part] | None:
    """The values that a sum is of."""
    found: list[Part] = []
    for v in inputs:
        made = rw.producer.get(v)
        if made is None or tuple(v.aval.shape) != tuple(shape):
            return None
        if made.op.name == "add":
            inner = _padded(rw, made.inputs, shape)
            if inner is None:
                return None
            found += inner
        elif (width := zeros_around(rw, made)) is not None:
            found.append((made.inputs[0], width))
        else:
            return None
    return found


def zeros_around(rw: Rewriter, made: Node) -> tuple[tuple[int, int], ...] | None:
    """How many zeros a pad puts around its operand, per axis."""
    if made.op.name != "pad":
        return None
    number = rw.made_by(made.inputs[1], "constant")
    if number is None or number.attrs["value"] != 0:
        return None
    width = tuple(zip(made.attrs["before"], made.attrs["after"], strict=True))
    plain = all(isinstance(n, int) and n >= 0 for pair in width for n in pair)
    return width if plain and not any(made.attrs["holes"]) else None


def _side_by_side(parts: list[Part], shape: Any) -> tuple[int, list[Value]] | None:
    """The axis along which the values fill the shape, and they in order."""
    axes = {a for _, width in parts for a, pair in enumerate(width) if any(pair)}
    if len(axes) != 1 or not all(isinstance(n, int) for n in shape):
        return None
    (axis,) = axes
    parts = sorted(parts, key=lambda p: p[1][axis][0])
    at = 0
    for v, width in parts:
        if width[axis][0] != at:
            return None
        at += extents_of(v)[axis]
    return (axis, [v for v, _ in parts]) if at == shape[axis] else None


__all__ = ["is_joined", "is_plain_loop", "is_row", "join_parts", "narrow_moves", "narrows",
           "reshape_matmuls", "widen_late", "widens"]
