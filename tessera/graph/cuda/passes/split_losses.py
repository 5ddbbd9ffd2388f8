"""Losses of long rows as those of parts of them.

    m_p = max x_p,  s_p = sum e^(x_p - m_p)         of each part p of a row, by groups of their own
    m = max m_p,  sum e^(x - m) = sum s_p e^(m_p - m)        and the element that the label picks

Groups that share a row would wait for each other, twice, while nothing of theirs is on its way from
memory. Parts are of as many columns as four warps hold in registers (row_parts.py), and few groups
put them together (kernels/losses.py). Cross entropy of rows of 131072 takes 35.3 us in
place of 40.9, of 65536 35.6 and 39.2, with a group for each row's parts; of 16384, by a program
around such kernels, 34.6 and 36.6 (2^26 elements of bf16, H200, 2026-11-27).
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....kernels.losses import weigh_losses
from ....tile.interpreter.launch import Config
from ...ir import Graph, Node, Value, producers_of, readers_of
from ...op import Aval
from ...ops.kernel import KERNEL, KernelCall
from ...ops.loss import NLL
from ...schedule.loop_ops import loop_space
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.row_parts import COLUMNS, PARTS

PART = PARTS * COLUMNS
ROWS = 8  # that a group puts together
LEAST, FEWEST, MOST = 1 << 14, 2048, 1 << 31  # columns of a row; parts, elements of all rows


def split_long_losses(graph: Graph) -> Graph:
    """The graph with such losses of rows that nothing else is computed of."""
    readers, results = readers_of(graph), set(graph.outputs)

    def alone(x: Value) -> Value | None:
        """What was widened for the loss, where that alone reads it, and no loop makes it."""
        if len(readers.get(x, ())) != 1 or x in results:
            return None
        cast, given = makers.get(x), x
        if cast is not None and cast.op.name == "cast" and x.aval.dtype.name == "f32":
            (given,) = cast.inputs
        made = makers.get(given)
        if len(readers.get(given, ())) != 1 or given.aval.dtype.bits != 16 or (
                made is not None and (loop_space(made) is not None or made.op.view)):
            return None
        return given

    makers = producers_of(graph)

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op is not NLL or node.attrs["smoothing"] or node.attrs["accum"].name != "f32":
            return None
        x, shape = alone(node.inputs[0]), node.inputs[0].aval.shape
        if x is None or not _in_parts(shape):
            return None
        cast = rw.made_by(inputs[0], "cast")
        return _partial_losses(rw, inputs[0] if cast is None else cast.inputs[0], inputs, node)

    return remove_dead(rebuild(graph, visit))


def _in_parts(shape: tuple[Any, ...]) -> bool:
    whole, N = all(isinstance(d, int) for d in shape), shape[-1]
    return whole and N >= LEAST and N % PART == 0 and FEWEST <= prod(shape) // PART < MOST // PART


def _partial_losses(rw: Rewriter, x: Value, inputs: tuple[Value, ...], node: Node) -> Value:
    wide, label = inputs[0].aval.type, inputs[1]
    M, N, accum = prod(x.aval.shape[:-1]), x.aval.shape[-1], node.attrs["accum"]
    rows = rw.emit("reshape", x, shape=(M * N // PART, PART))
    parts = rows if x.aval.type == wide else rw.emit("cast", rows, source=x.aval.type, to=wide)
    how = {"axis": (1,), "keepdims": True}
    tops = rw.emit("reduce_max", parts, **how)
    powers = rw.emit("exp", rw.emit("sub", parts, tops))
    sums = rw.emit("reduce_sum", powers, accum=accum, **how)
    given = {name: rw.emit("reshape", v, shape=(M, N // PART))
             for name, v in (("tops", tops), ("sums", sums))}
    given["x"] = rw.emit("reshape", x, shape=(M * N,))
    given["labels"] = rw.emit("reshape", label, shape=(M,))
    out = Aval((M,), wide)
    zero = rw.emit("constant", value=0, type=wide)
    given["losses"] = rw.emit("broadcast_to", zero, shape=out.shape)
    constants = ("N", N), ("BM", ROWS)
    types = tuple(v.aval.type for v in given.values())
    call = KernelCall(weigh_losses, Config(), tuple(given), types, constants,
                      frozenset((*given, "N", "BM")), written=("losses",))
    made = Node(KERNEL, tuple(given.values()), {"call": call}, (Value(out),), node.where)
    rw.add(made)
    return rw.emit("reshape", made.outputs[0], shape=node.outputs[0].aval.shape)


__all__ = ["split_long_losses"]
