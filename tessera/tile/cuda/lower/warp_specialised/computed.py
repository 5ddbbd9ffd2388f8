"""Of what a matmul's computed first operand is made: tiles that come by TMA too.

A consumer that loaded them itself would wait for memory in each iteration, with nothing under way.
They lie in shared memory like operands, and consumers read them into registers as the first operand
lies there (`read_tile`). So do tiles of loops without a matmul, such as the statistics of rows that
are normalised and then multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera.tile.cuda.lower.layout_relations import is_elementwise
from tessera.tile.cuda.lower.warp_specialised.qualify import MATMULS
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    made_by,
    ops_in,
    out,
    reads,
)
from tessera.tile.ir.ir import For, Function, Op, Operand, SSAValue, While, walk
from tessera.tile.ir.types import TileType


def loads_behind(x: Operand, made: Mapping[Operand, Op], maker: Maker) -> list[Op] | None:
    """The loads that a matrix is made of, element by element, beside products; None where anything
    else goes into it. Rows and columns that are spread over it may come from anywhere, and so may
    bools that choose."""
    op = made.get(x)
    if is_op(op, *MATMULS):
        return []
    if op is None or not is_op(op, "load_tile") and not is_elementwise(op):
        return None
    if is_op(op, "load_tile"):
        return [op]
    found: list[Op] = []
    for arg in op.args:
        type = maker.type(arg)
        whole = isinstance(type, TileType) and type.shape == op.outs[0].type.shape  # type: ignore[union-attr]
        if whole and type.dtype.kind != "bool":
            behind = loads_behind(arg, made, maker)
            if behind is None:
                return None
            found += behind
    return found


def loads_beside(function: Function, rows: int) -> list[Op]:
    """Loads of matrices of so many rows in loops that multiply nothing."""
    loops = [n for n in walk(function.body) if isinstance(n, For) and not ops_in((n,), *MATMULS)]
    return [n for loop in loops for n in loop.body if is_op(n, "load_tile")
            and len(shape := n.outs[0].type.shape) == 2 and shape[0] == rows]  # type: ignore[union-attr]


def fed(nodes: Nodes) -> dict[SSAValue, int]:
    """A load that is read into registers -> the number of the first matmul that takes what is made
    of it as its first operand; 0 of a tile that none does."""
    sources: dict[SSAValue, set[SSAValue]] = {}
    found: dict[SSAValue, int] = {}
    number = {out(m): i for i, m in enumerate(ops_in(nodes, "async_matmul"))}
    for op in (n for n in walk(nodes) if isinstance(n, Op) and n.outs):
        behind = set().union(*(sources.get(v, set()) for v in reads(op)))
        if is_op(op, "read_tile", "read_row"):
            sources[out(op)] = reads(op)
        elif out(op) in number:
            for load in sources.get(op.args[0], set()):  # type: ignore[arg-type]
                found.setdefault(load, number[out(op)])
        elif behind:
            sources |= {v: behind for v in made_by(op)}
    tiles = {v for n in ops_in(nodes, "read_tile") for v in reads(n)}
    return dict.fromkeys(tiles, 0) | found


def packs_a_product(nodes: Nodes) -> bool:
    """Whether a matmul's first operand is computed of another matmul."""
    reached: set[SSAValue] = set()
    while True:
        before = len(reached)
        for node in walk(nodes):
            if isinstance(node, For | While):
                made = {d.value for d, y in zip(node.carried, node.yields, strict=True)
                        if y in reached}
            else:
                met = is_op(node, "async_matmul") or bool(reads(node) & reached)
                made = made_by(node) if met else set()
            if is_op(node, "pack_operand") and made:
                return True
            reached |= made
        if len(reached) == before:
            return False


__all__ = ["fed", "loads_behind", "loads_beside", "packs_a_product"]
