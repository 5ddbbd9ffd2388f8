"""Products of few elements and a long contracted axis, as the gradient of a weight is of many rows:
they are split along it.

    aᵀ b, a [K, M], b [K, N]  ->  sum over p of a_pᵀ b_p, parts of K / P rows

A kernel of f32 has a group for each block of the result, and walks the whole axis. For aᵀ b of
[20000, 128] and [20000, 128] that was 4 groups and 1.2 ms (H200, 2026-11-27). Products of 16 bits
have kernels of the library, which choose the parts themselves.
"""

from __future__ import annotations

from ....kernels.cards import multiprocessors_of
from ....runtime.generations import Generation
from ...ir import Graph, Node, Value
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead

BLOCK = 64  # rows and columns of the result that a group has, about
LEAST = 256  # rows of a part
GROUPS_PER_MULTIPROCESSOR = 2  # about


def split_k(graph: Graph, chip: Generation) -> Graph:
    wanted = GROUPS_PER_MULTIPROCESSOR * multiprocessors_of(chip)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "matmul" or any(
                v.aval.type.dtype.name != "f32" or v.aval.ndim != 2
                or not all(isinstance(d, int) for d in v.aval.shape)
                for v in (*inputs, *node.outputs)):
            return None
        a, b = inputs
        turned = rw.made_by(a, "transpose")
        (M, K), (_, N) = extents_of(a), extents_of(b)
        parts = _split_count(M, K, N, wanted)
        if turned is None or parts == 1:
            return None
        (rows,) = turned.inputs
        left = rw.emit("reshape", rows, shape=(parts, K // parts, M))
        left = rw.emit("transpose", left, axes=(0, 2, 1))
        right = rw.emit("reshape", b, shape=(parts, K // parts, N))
        each = rw.emit("matmul", left, right, **node.attrs)
        accum = node.outputs[0].aval.type.dtype
        return rw.emit("reduce_sum", each, axis=(0,), keepdims=False, accum=accum)

    return remove_dead(rebuild(graph, visit))


def _split_count(M: int, K: int, N: int, wanted: int) -> int:
    """Into how many parts of one extent the axis is split; 1: it is not. wanted: groups in all"""
    groups = max(1, -(-M // BLOCK) * -(-N // BLOCK))
    most = min(K // LEAST, wanted // groups)
    return next((p for p in range(most, 3, -1) if K % p == 0), 1)


__all__ = ["split_k"]
