"""What a consumer warpgroup leaves out: tiles and iterations in which none of its rows counts.

Where a kernel says so (the knob `skip`), rows beyond the end of the tensor that gives a tile its
rows come to nothing, and so do iterations whose scores a causal mask takes whole. Such a warpgroup
only waits for the slots of what it leaves out and gives them back, so that the ring goes on.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.numerics import bool_
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    INT,
    Maker,
    Nodes,
    is_op,
    is_part,
    map_blocks,
    number,
    ops_in,
    out,
)
from tessera.tile.cuda.lower.warp_specialised.roles import slice_of
from tessera.tile.ir.ir import Const, For, Function, If, Node, Op, Operand, SSAValue, walk
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType


def skip_rows(nodes: Nodes, whole: Nodes, function: Function, maker: Maker) -> Nodes:
    """The consumer's nodes for warpgroups that have a row of the tile, else what takes its slots.

    whole: the consumer in front of all passes.  Unchanged where the rows' end is not known
    """
    place = _rows(function)
    if place is None:
        return nodes
    values = frozenset(x for x in place if isinstance(x, SSAValue))
    asked, names = maker.copy(slice_of(function.body, wanted=values), {})
    drains, _ = maker.copy(map_blocks(slice_of(whole, "ring_wait"),
                                      lambda block: _given_back(block, maker)), {})
    start, stop = (names.get(x, x) if isinstance(x, SSAValue) else x for x in place)
    test = maker.op("own_rows", (start, stop), "own", Scalar(bool_))
    return (*asked, test, If(out(test), nodes, drains, (), (), ()))


def _rows(function: Function) -> tuple[Operand, Operand] | None:
    """Where the rows of the tile's first operands begin, and where they end: of operands that are
    loaded once for all iterations."""
    views = {out(n): n for n in walk(function.body) if is_part(n)}
    types = {p.value: p.type for p in function.params}
    loads = {out(n): n for n in function.body if is_op(n, "ring_load")}
    found: dict[Operand, Operand] = {}
    for matmul in ops_in(function.body, "async_matmul"):
        load = loads.get(matmul.args[0])  # type: ignore[arg-type]
        if load is None or matmul.attr["a_major"] != "K":
            continue
        view = views[load.args[0]]  # type: ignore[index]
        tensor = types.get(view.args[0])  # type: ignore[arg-type]
        if isinstance(tensor, GlobalTensor):
            rows = view.attr["kept"][0]  # where the memory has heads between rows and columns, too
            extent = str(tensor.dims[rows])
            stop: Operand = number(int(extent)) if extent.isdigit() else SSAValue(extent)
            found.setdefault(view.args[1 + rows], stop)  # one end is as good as another
    return next(iter(found.items())) if len(found) == 1 else None


def _given_back(nodes: Nodes, maker: Maker) -> list[Node]:
    """Each slot goes back as soon as it was waited for."""
    kept: list[Node] = []
    for node in nodes:
        kept.append(node)
        if is_op(node, "ring_wait"):
            kept.append(maker.op("ring_release", (out(node),), ring=node.attr["ring"]))
    return kept


def skip_iterations(nodes: Nodes, maker: Maker) -> Nodes:
    """The first loop whose columns a causal mask takes from the first rows on: a warpgroup begins
    with the iteration that has the first score of its own. Loops that leave slots to their next
    iteration stay as they are."""
    def block(nodes: Nodes) -> list[Node]:
        kept: list[Node] = []
        for i, node in enumerate(nodes):
            begun = _begun_late(node, maker) if isinstance(node, For) else [node]
            kept += begun
            if len(begun) > 1:
                return [*kept, *nodes[i + 1:]]
        return kept

    return map_blocks(nodes, block)


def _begun_late(loop: For, maker: Maker) -> list[Node]:
    masked = _masked_first(loop)
    waits = [n for n in loop.body if is_op(n, "ring_wait")]
    released = {n.args[0] for n in loop.body if is_op(n, "ring_release")}
    if masked is None or not waits or released != {out(n) for n in waits}:
        return [loop]
    mask, start, less = masked
    step, type = loop.step, mask.outs[0].type
    assert isinstance(type, TileType) and isinstance(step, Const)
    own = maker.op("own_start", (loop.lo, loop.hi, start, less), "own", where=mask.where,
                   step=int(step.value), columns=type.shape[1])
    body, _ = maker.copy(tuple(_given_back(tuple(waits), maker)), {})
    drain = For(maker.define(loop.var.value.name, INT), loop.lo, out(own), step, (), (), body, ())
    next_ = {out(n) for n in loop.body if is_op(n, "add") and n.args == (loop.var.value, step)}
    inits = tuple(out(own) if y in next_ and i == loop.lo else i
                  for i, y in zip(loop.inits, loop.yields, strict=True))
    return [own, drain, replace(loop, lo=out(own), inits=inits)]


def _masked_first(loop: For) -> tuple[Op, Operand, Operand] | None:
    """(mask, start, less) of a causal mask of keys down the rows in every iteration of the loop:
    scores are masked where start + row > var + less + column, the first iterations whole."""
    made = {out(n): n for n in loop.body if isinstance(n, Op) and n.outs}
    for mask in loop.body:
        if not is_op(mask, "causal_mask") or mask.attr.get("keys", 1) != 0:
            continue
        _, bound, start = mask.args
        moved = made.get(bound)  # type: ignore[arg-type]
        at, less = moved.args if is_op(moved, "add") else (bound, number(0))
        if at == loop.var.value and start not in made and less not in made and isinstance(
                loop.step, Const):
            return mask, start, less
    return None


__all__ = ["skip_iterations", "skip_rows"]
