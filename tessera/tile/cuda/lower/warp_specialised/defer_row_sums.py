"""Row sums that are carried stay summands of the four lanes that share a row.

What depends linearly on row sums (l * alpha + row_sum(p)) may be summed over the lanes at the end:
one quad_sum where something else reads it, instead of shuffles in every iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, map_blocks, out
from tessera.tile.ir.ir import If, Node, Op, Operand, SSAValue, walk
from tessera.tile.ir.types import TileType

Sources = dict[SSAValue, list[Operand]]


def defer_sums(nodes: Nodes, maker: Maker, rows: int) -> Nodes:
    """The greatest set of values that may stay summands, made so. rows: of accumulators; tiles with
    others do not lie as these, with four lanes to a row."""
    made, joined = _definitions(nodes)
    partial = {v for v in (*made, *joined) if v not in made or _is_shared_row_sum(made[v], maker,
                                                                                  rows)}
    for linear in (any, _exactly_one):  # a factor leaves the set before products of two are judged
        while bad := {v for v in partial if not _may(v, made, joined, partial, linear)}:
            partial -= bad
    partial = _fed(partial, made, joined)
    if not partial:
        return nodes
    return map_blocks(nodes, lambda block: _rewritten(block, partial, maker))


def _definitions(nodes: Nodes) -> tuple[dict[SSAValue, Op], Sources]:
    """Row statistics by what makes them: an op, or the ends of loops and branches."""
    made: dict[SSAValue, Op] = {}
    joined: Sources = {}
    for node in walk(nodes):
        if isinstance(node, Op):
            made |= {d.value: node for d in node.outs if _is_row(d.type)}
        elif isinstance(node, If):
            joined |= {d.value: [x, y] for d, x, y in zip(
                node.outs, node.thens, node.elses, strict=True) if _is_row(d.type)}
        else:
            joined |= {d.value: [x, y] for d, x, y in zip(
                node.carried, node.inits, node.yields, strict=True) if _is_row(d.type)}
    return made, joined


def _is_row(type: object) -> bool:
    return isinstance(type, TileType) and len(type.shape) == 1 and type.dtype.name == "f32"


def _is_shared_row_sum(op: Op, maker: Maker, rows: int) -> bool:
    """Whether a row sum, if it is one, is of a tile with so many rows."""
    return op.name != "reduce_sum" or maker.type(op.args[0]).shape[0] == rows  # type: ignore[union-attr]


def _exactly_one(inside: list[bool]) -> bool:
    return inside.count(True) == 1


def _may(v: SSAValue, made: dict[SSAValue, Op], joined: Sources, partial: set[SSAValue],
         linear: Callable[[list[bool]], bool]) -> bool:
    if v in joined:
        return all(x in partial for x in joined[v])
    op = made[v]
    if op.name == "reduce_sum":
        return op.attr["axis"] == 1
    if op.name == "full":
        return op.attr["value"] == 0
    inside = [x in partial for x in op.args]
    return op.name == "add" and all(inside) or op.name == "mul" and linear(inside)


def _fed(partial: set[SSAValue], made: dict[SSAValue, Op], joined: Sources) -> set[SSAValue]:
    """Those that a row sum reaches and that loops carry; a sum used at once gains nothing."""
    carried = {v for v in joined if v in partial}
    if not carried:
        return set()
    wanted, work = set(), list(carried)
    while work:
        v = work.pop()
        if v in wanted or v not in partial:
            continue
        wanted.add(v)
        sources = joined[v] if v in joined else made[v].args
        work += [x for x in sources if isinstance(x, SSAValue)]
    summed = any(v in made and made[v].name == "reduce_sum" for v in wanted)
    return wanted if summed else set()


def _rewritten(nodes: Nodes, partial: set[SSAValue], maker: Maker) -> list[Node]:
    whole: dict[SSAValue, SSAValue] = {}
    kept: list[Node] = []
    for node in nodes:
        if isinstance(node, Op) and node.name == "reduce_sum" and out(node) in partial:
            kept.append(replace(node, name="lane_sum"))
        elif isinstance(node, Op) and not (node.outs and node.outs[0].value in partial):
            for x in node.args:
                if isinstance(x, SSAValue) and x in partial and x not in whole:
                    kept.append(maker.op("quad_sum", (x,), x.name, where=node.where))
                    whole[x] = out(kept[-1])  # type: ignore[arg-type]
            kept.append(replace(node, args=tuple(
                whole.get(x, x) if isinstance(x, SSAValue) else x for x in node.args)))
        else:
            kept.append(node)
    return kept
