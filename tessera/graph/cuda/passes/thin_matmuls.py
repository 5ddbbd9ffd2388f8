"""Matmuls of vectors as what they are: a contracted axis of one element is a product of elements,
and a result of one row or column is a sum.

    u[:, None] @ v[None]                -> u[:, None] * v[None]
    x @ v[:, None], x.T @ v[:, None]    -> sum(x * v, -1), sum(x * v[:, None], 0)

Loops and reductions take them along: what reads a score of each row, and its gradient, need no
matrix in memory. A kernel of matmuls has tiles of 64 columns of which one counts: x.T @ v of
x [20000, 128] took 30 us for 10 MB (H200, 2026-11-28).
"""

from __future__ import annotations

from ....numerics import as_type
from ...ir import Graph, Node, Value
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.small_matmuls import is_small
from .library_ops import swaps_last

WIDE = ("f32", "f64")
NARROW = ("f32", "bf16", "f16")  # of which f32 has all products


def open_thin_matmuls(graph: Graph) -> Graph:
    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "matmul" or not _is_wide(node):
            return None
        (*_, M, K), (*_, N) = map(extents_of, inputs)
        if K == 1:
            a, b = (_widened(rw, v, node.outputs[0]) for v in inputs)
            return rw.emit("mul", a, b)
        if min(M, N) > 1 or inputs[0].aval.type.dtype.bits < 32 or is_small(node):
            return None
        x, v = inputs if N == 1 else inputs[::-1]
        return _summed(rw, node, x, v, N == 1)

    return remove_dead(rebuild(graph, visit))


def _is_wide(node: Node) -> bool:
    """Whether it multiplies in the type of its result, in which the products are."""
    a, b, out = (v.aval for v in (*node.inputs, *node.outputs))
    if not all(isinstance(n, int) and n for v in (a, b, out) for n in v.shape):
        return False
    dtype = out.dtype
    given = NARROW if dtype.name == "f32" else ("f64",)
    return dtype.name in WIDE and node.attrs["accum"] is dtype and (
        a.ndim >= 2 and b.ndim >= 2 and a.type.dtype is b.type.dtype and a.dtype.name in given)


def _widened(rw: Rewriter, v: Value, out: Value) -> Value:
    to = as_type(out.aval.dtype.name)
    return v if v.aval.type == to else rw.emit("cast", v, source=v.aval.type, to=to)


def _summed(rw: Rewriter, node: Node, x: Value, v: Value, column: bool) -> Value:
    """The sum of a matrix's rows or columns, each times an element of the vector. column: whether
    the vector, and the result, is one; else a row."""
    made = rw.made_by(x, "transpose")
    turned = made is not None and swaps_last(made.attrs["axes"])
    if made is not None and turned:
        x = made.inputs[0]
    along_rows = column != turned  # the contracted axis is the last of what lies in memory
    (*lead, K) = extents_of(v)[:-1] if column else (*extents_of(v)[:-2], extents_of(v)[-1])
    factor = rw.emit("reshape", v, shape=(*lead, 1, K) if along_rows else (*lead, K, 1))
    out = node.outputs[0].aval
    products = rw.emit("mul", x, factor)
    axis = len(extents_of(products)) - (1 if along_rows else 2)
    made_of = rw.emit("reduce_sum", products, axis=(axis,), keepdims=False, accum=out.dtype)
    return rw.emit("reshape", made_of, shape=out.shape)


__all__ = ["open_thin_matmuls"]
