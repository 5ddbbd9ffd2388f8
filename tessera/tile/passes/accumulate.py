"""`acc += a @ b` is one op: a matmul adds to what it is given, and needs no second tile of sums."""

from __future__ import annotations

from dataclasses import replace

from tessera.numerics import f32, f64
from tessera.tile.ir.ir import (
    Function,
    Node,
    Op,
    Operand,
    SSAValue,
    definitions,
    uses,
    with_regions,
)
from tessera.tile.ir.op_record import OPS


def accumulate(function: Function) -> Function:
    """add(x, matmul(a, b)) -> matmul(a, b, x) where nothing else reads the product."""
    types, used = definitions(function), uses(function.body)

    def summed(node: Node, before: list[Node]) -> tuple[Op, Operand] | None:
        """The matmul of an add, and what it may add to."""
        if not isinstance(node, Op) or node.name != "add":
            return None
        for x, other in (node.args, node.args[::-1]):
            other_type = types.get(other) if isinstance(other, SSAValue) else None
            product = _product(x, before) if used.get(x) == 1 else None  # type: ignore[arg-type]
            if product is not None and other_type == node.outs[0].type == product.outs[0].type:
                return product, other
        return None

    def block(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        kept: list[Node] = []
        for node in nodes:
            found = summed(node, kept)
            if found is None:
                kept.append(with_regions(node, block))
                continue
            product, other = found
            kept.remove(product)
            kept.append(replace(product, args=(*product.args, other), outs=node.outs))  # type: ignore[union-attr]
        return tuple(kept)

    return replace(function, body=block(function.body))


def _product(x: Operand, before: list[Node]) -> Op | None:
    """The matmul of two operands that gives x, where it may as well stand behind all of `before`:
    nothing there writes what it reads."""
    for i, node in enumerate(before):
        if isinstance(node, Op) and node.name == "matmul" and node.outs[0].value == x:
            later = all(isinstance(n, Op) and OPS[n.name].effect in ("pure", "read")
                        for n in before[i + 1:])
            return node if later and len(node.args) == 2 and not _rounds(node) else None
    return None


def _rounds(product: Op) -> bool:
    """Whether its sums are rounded: a product alone is rounded once more than one that adds."""
    dtype = product.attr["dtype"]
    return dtype.kind == "float" and dtype not in (f32, f64)


__all__ = ["accumulate"]
