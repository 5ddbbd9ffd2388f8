"""Variances of long columns, from those of parts.

    m = sum x / n;  q = sum (x - m)^2                       # over all axes but the last, of [R, C]
    s_p = sum x_p;  q_p = sum (x_p - s_p / r)^2             # of parts of r rows
    m = sum s_p / n;  q = sum q_p + r (s_p / r - m)^2

A variance reads its elements once so, in place of twice, by differences from a mean that lies among
them (Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115). Where the channels of a
batch norm come first, the parts are the rows of each image.
"""

from __future__ import annotations

from math import prod

from ....numerics import as_type
from ....runtime.generations import Generation
from ...ir import Graph, Node, Value, producers_of
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.running_columns import is_mean, part_rows

FEWEST = 64  # rows of a part
LONG = 1024  # rows that are worth it
F32 = as_type("f32")
Shape = tuple[int, ...]


Sum = tuple[Value, Shape]  # what is summed, and the axes


def variances_of_parts(graph: Graph, chip: Generation) -> Graph:
    """The graph with such sums. Stands behind the passes that merge what is the same."""
    made = producers_of(graph)
    found = {n: s for n in graph.nodes if (s := _variance(n, made)) is not None
             and _split_shape(*s, chip)}
    known, sums = set(found.values()), dict[Sum, tuple[Value, Value]]()

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        which = found.get(node) or summed_by(node, made)
        if which not in known:
            return None
        if which not in sums:
            sums[which] = _of_parts(rw, *which, _split_shape(*which, chip))
        out, shape = sums[which][node in found], node.outputs[0].aval.shape
        return out if out.aval.shape == shape else rw.emit("reshape", out, shape=shape)

    return remove_dead(rebuild(graph, visit)) if found else graph


def summed_by(node: Node, made: dict[Value, Node]) -> Sum | None:
    """What a node sums in f32, also where it sums what was summed over other axes."""
    if node.op.name != "reduce_sum" or node.attrs["accum"].name != "f32" or (
            node.inputs[0].aval.type != F32):
        return None
    x, axis = node.inputs[0], node.attrs["axis"]
    inner = made.get(x)
    if inner is not None and inner.op.name == "reduce_sum" and inner.attrs["keepdims"] and (
            within := summed_by(inner, made)) is not None:
        return within[0], tuple(sorted((*axis, *within[1])))
    return x, axis


def _variance(node: Node, made: dict[Value, Node]) -> Sum | None:
    """What a node sums the squares of, each less the mean over the same axes."""
    def by(v: Value, name: str) -> Node | None:
        n = made.get(v)
        return n if n is not None and n.op.name == name else None

    squares = summed_by(node, made)
    square = by(squares[0], "mul") if squares else None
    away = by(square.inputs[0], "sub") if square and len(set(square.inputs)) == 1 else None
    mean = made.get(away.inputs[1]) if away else None
    total, share = (made.get(mean.inputs[0]), by(mean.inputs[1], "constant")) if (
        mean and len(mean.inputs) == 2) else (None, None)
    if squares is None or away is None or mean is None or total is None or share is None:
        return None
    x, axis = away.inputs[0], squares[1]
    if summed_by(total, made) != (x, axis) or not all(isinstance(n, int) for n in x.aval.shape):
        return None
    count = prod(extents_of(x)[a] for a in axis)
    return (x, axis) if is_mean(mean.op.name, share.attrs["value"], count) else None


def _split_shape(x: Value, axis: Shape, chip: Generation) -> Shape:
    """x as [parts, rows of a part, ..., columns], or [images, channels, rows]; () where it has no
    such parts, or few rows."""
    shape = extents_of(x)
    if len(shape) > 1 and axis == tuple(range(len(shape) - 1)):
        R, C = prod(shape[:-1]), shape[-1]
        rows = part_rows(1, R, C, chip)
        if not rows or R < LONG or C < 2:
            return ()
        return R // rows, rows, *(1,) * (len(shape) - 3), C
    if len(shape) > 2 and axis == (0, *range(2, len(shape))) and prod(shape[2:]) >= FEWEST:
        return shape[0], shape[1], prod(shape[2:])
    return ()


def _of_parts(rw: Rewriter, old: Value, axis: Shape, shape: Shape) -> tuple[Value, Value]:
    """The sum, and that of the squares of distances from the mean."""
    x, n = rw.env[old], prod(extents_of(old)[a] for a in axis)
    inner = 1 if axis == tuple(range(old.aval.ndim - 1)) else len(shape) - 1
    part = shape[inner]

    def number(value: float) -> Value:
        return rw.emit("constant", value=value, type=F32)

    def summed(x: Value, axis: int) -> Value:
        return rw.emit("reduce_sum", x, axis=(axis,), keepdims=True, accum=F32.dtype)

    def square_from(x: Value, mean: Value) -> Value:
        away = rw.emit("sub", x, mean)
        return rw.emit("mul", away, away)

    x = reshaped(rw, x, shape)
    sums = summed(x, inner)
    within = summed(square_from(x, rw.emit("div", sums, number(float(part)))), inner)
    total = summed(sums, 0)
    # Anew, or what waits for the total would be one loop with what the parts wait for.
    means = rw.emit("div", sums, number(float(part)))
    between = square_from(means, rw.emit("div", total, number(float(n))))
    spread = summed(rw.emit("add", within, rw.emit("mul", between, number(float(part)))), 0)
    return total, spread


def reshaped(rw: Rewriter, x: Value, shape: Shape) -> Value:
    """Casts behind the reshape, so that their readers make them again."""
    cast = rw.made_by(x, "cast")
    if cast is None:
        return rw.emit("reshape", x, shape=shape)
    return rw.emit("cast", rw.emit("reshape", cast.inputs[0], shape=shape), **cast.attrs)


__all__ = ["LONG", "Sum", "reshaped", "summed_by", "variances_of_parts"]
