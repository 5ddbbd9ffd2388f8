"""Positions of the largest and smallest elements of rows, by what these are and where they stand.

A pair of an element and its position takes five instructions for each element, and eight and two
exchanges where two threads' pairs meet. The largest alone takes one, and the first position of what
equals it three: it is the least, and most kernels that ask where it is ask what it is, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from tessera.numerics import i32
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, is_op, map_blocks, out
from tessera.tile.ir.ir import Const, Function, Node, Op, Operand, walk
from tessera.tile.ir.register_layout import WARP_BITS
from tessera.tile.ir.types import TileType
from tessera.tile.passes.merge import merge

EXTREME = {"argmax": "reduce_max", "argmin": "reduce_min"}


def find_positions(function: Function, threads: int) -> Function:
    """The function with reductions in place of positions along the last axis of tiles whose rows
    are as many as warps: threads of a warp share a row, and warps need not meet twice. Where
    matmuls choose the layouts nothing is known of that."""
    nodes = [n for n in walk(function.body) if isinstance(n, Op)]
    if not any(n.name in EXTREME for n in nodes) or any(n.name == "matmul" for n in nodes):
        return function
    maker = Maker(function)

    def block(nodes: Nodes) -> Iterable[Node]:
        for node in nodes:
            if is_op(node, *EXTREME) and by_rows(maker.type(node.args[0]), node, threads):
                yield from _positions_by_bits(maker, node)
            else:
                yield node

    return merge(replace(function,
                         body=map_blocks(function.body, lambda nodes: tuple(block(nodes)))))


def by_rows(t: Any, op: Op, threads: int) -> bool:
    """Whether each row of a tile of numbers of up to 32 bits is surely in one warp."""
    if not isinstance(t, TileType) or t.dtype.packed or t.dtype.bits > 32 or t.dtype.bits == 1:
        return False
    return op.attr["axis"] == len(t.shape) - 1 == 1 and prod(t.shape[:-1]) >= threads >> WARP_BITS


def _positions_by_bits(maker: Maker, op: Op) -> list[Op]:
    made: list[Op] = []

    def do(name: str, *args: Operand, **attrs: Any) -> Any:
        made.append(maker.op(name, args, "t", where=op.where, **attrs))
        return out(made[-1])

    (x,), axis = op.args, op.attr["axis"]
    t = maker.type(x)
    assert isinstance(t, TileType)
    extreme = do("expand_dims", do(EXTREME[op.name], x, axis=axis), axis=axis)
    here = do("eq", x, extreme)
    if t.dtype.kind == "float":  # of a row with NaN that is what the largest is
        here = do("bitor", here, do("isnan", x))
    at = do("expand_dims", do("arange", size=t.shape[axis], start=0, dtype=i32), axis=0)
    do("reduce_min", do("where", here, at, Const(t.shape[axis], i32)), axis=axis)
    made[-1] = replace(made[-1], outs=op.outs)
    return made


__all__ = ["find_positions"]
