"""Ops that are mostly the identity stand behind a uniform test: masks away from the edge and the
diagonal, and accumulators times factors that are mostly 1."""

from __future__ import annotations

from tessera.numerics import bool_
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    map_blocks,
    number,
    out,
)
from tessera.tile.ir.ir import If, Node, Op, Operand, SSAValue
from tessera.tile.ir.types import Scalar, TileType


def guard_masks(nodes: Nodes, maker: Maker) -> Nodes:
    """mask(x) -> x unless something of it is masked: start + extent > stop. Equal tests once."""
    def block(nodes: Nodes) -> list[Node]:
        kept: list[Node] = []
        tests: dict[tuple, SSAValue] = {}
        for node in nodes:
            if not is_op(node, "edge_mask", "causal_mask"):
                kept.append(node)
                continue
            assert isinstance(node, Op)
            start, bound, reach = limits(node)
            low = node.name == "edge_mask" and bool(node.attr.get("low"))
            key = (start, bound, reach, low)
            if key not in tests:
                made = reaches(node, maker) + (begins_below(node, maker) if low else [])
                if low:
                    made.append(maker.op("or", (out(made[1]), out(made[2])), "masked",
                                         where=node.where))
                kept += made
                tests[key] = out(made[-1])
            kept.append(skipped(node, tests[key], node.args[0], maker))
        return kept

    return map_blocks(nodes, block)


def reaches(mask: Op, maker: Maker) -> list[Op]:
    """Whether the last element of the tile lies behind the bound."""
    start, bound, reach = limits(mask)
    last = maker.op("add", (start, number(reach)), "last", where=mask.where)
    return [last, maker.op("gt", (out(last), bound), "masked", where=mask.where)]


def begins_below(mask: Op, maker: Maker) -> list[Op]:
    """Whether the first element lies before the tensor."""
    return [maker.op("lt", (limits(mask)[0], number(0)), "before", where=mask.where)]


def limits(mask: Op) -> tuple[Operand, Operand, int]:
    """(start, bound, reach): elements are masked when start + reach > bound."""
    type = mask.outs[0].type
    assert isinstance(type, TileType)
    if mask.name == "causal_mask":
        return mask.args[2], mask.args[1], type.shape[mask.attr.get("keys", 1)] - 1
    return mask.args[1], mask.args[2], type.shape[mask.attr["axis"]]


def skipped(op: Op, test: SSAValue, otherwise: Operand, maker: Maker) -> If:
    """The op where the test holds, else `otherwise`."""
    (made,) = op.outs
    inner = maker.define(made.value.name, made.type)
    taken = Op(op.name, op.args, (inner,), op.attrs, op.where)
    return If(test, (taken,), (), op.outs, (inner.value,), (otherwise,), op.where)


def guard_rescales(nodes: Nodes, maker: Maker) -> Nodes:
    """accumulator * row factor, before a matmul adds to it, only where some factor is not 1."""
    def block(nodes: Nodes) -> list[Node]:
        added = {n.args[2] for n in nodes if is_op(n, "async_matmul") and len(n.args) == 3}
        made = {out(n): n for n in nodes if isinstance(n, Op) and n.outs}
        kept: list[Node] = []
        for node in nodes:
            factors = _factors(node, added, made)
            if factors is None:
                kept.append(node)
                continue
            assert isinstance(node, Op)
            test = maker.op("any_differs", (factors,), "rescale", Scalar(bool_), node.where,
                            value=1.0)
            other = next(x for x in node.args if not _widens(x, factors, made))
            kept += [test, skipped(node, out(test), other, maker)]
        return kept

    return map_blocks(nodes, block)


def _factors(node: Node, added: set[Operand], made: dict[SSAValue, Op]) -> SSAValue | None:
    """The row statistic that an accumulator is multiplied by."""
    if not is_op(node, "mul") or out(node) not in added:
        return None
    for x in node.args:
        op = made.get(x)  # type: ignore[arg-type]
        if is_op(op, "expand_dims") and op.attr["axis"] == 1:
            source = op.args[0]
            return source if isinstance(source, SSAValue) else None
    return None


def _widens(x: Operand, factors: SSAValue, made: dict[SSAValue, Op]) -> bool:
    op = made.get(x)  # type: ignore[arg-type]
    return is_op(op, "expand_dims") and op.args[0] == factors
