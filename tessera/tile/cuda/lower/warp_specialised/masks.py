"""Edge masks: the fewest that give the same results.

The frontend masks a tile that reaches beyond its tensor wherever the outside would be seen: scores
with -inf in front of a maximum, weights with 0 in front of a sum and of a matmul. Where all uses
of the scores end in such masks, all of them may read the masked scores, and a later mask whose
value is already there (exp2(-inf - m) is 0) is the identity.
"""

from __future__ import annotations

from collections import defaultdict

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Nodes,
    Table,
    is_op,
    map_blocks,
    out,
    substituted,
)
from tessera.tile.ir.ir import Const, Function, Node, Op, Operand, SSAValue, operands, walk
from tessera.tile.ir.op_record import OPS

INF = float("inf")


@dataclass(frozen=True)
class MaskedRange:
    """The elements whose index along an axis, counted from start, is not below stop, or (low) is
    below 0."""

    axis: int
    start: Operand
    stop: Operand
    low: bool = False


def region_of(op: Op) -> MaskedRange:
    return MaskedRange(op.attr["axis"], op.args[1], op.args[2], bool(op.attr.get("low")))


def unify_masks(function: Function) -> Function:
    """The function with masks shared and those that change nothing dropped."""
    from dataclasses import replace

    body = map_blocks(function.body, _Block(function).run)
    return replace(function, body=body)


class _Block:
    def __init__(self, function: Function):
        self.readers: dict[SSAValue, list[Node]] = defaultdict(list)
        self.made: dict[SSAValue, Op] = {}
        for node in walk(function.body):
            for x in operands(node):
                if isinstance(x, SSAValue):
                    self.readers[x].append(node)
            if isinstance(node, Op):
                self.made |= {d.value: node for d in node.outs}

    def run(self, nodes: Nodes) -> Nodes:
        """Masks move their result to the later readers; then masks without effect go."""
        out_nodes: list[Node] = []
        table: Table = {}
        for node in nodes:
            (node,) = substituted((node,), table)
            if isinstance(node, Op) and node.name == "edge_mask":
                x = node.args[0]
                region = region_of(node)
                if self.outside(x, region) == float(node.attr["fill"]):
                    table[out(node)] = x
                    continue
                if isinstance(x, SSAValue) and self.unseen(x, region, node):
                    table[x] = out(node)
                self.made[out(node)] = node
            elif isinstance(node, Op):
                self.made |= {d.value: node for d in node.outs}
            out_nodes.append(node)
        return tuple(out_nodes)

    def unseen(self, x: SSAValue, region: MaskedRange, but: Op) -> bool:
        """Whether nobody but one mask sees the elements of x in the region."""
        return all(self._hides(r, region) for r in self.readers[x] if not same_results(r, but))

    def _hides(self, reader: Node, region: MaskedRange) -> bool:
        if not isinstance(reader, Op):
            return False
        if reader.name == "edge_mask" and region_of(reader) == region:
            return True
        record = OPS[reader.name]
        if not record.pointwise and record.family != "elementwise":
            return False  # an element outside of the tensor meets others
        return bool(self.readers[out(reader)]) and all(
            self._hides(r, region) for r in self.readers[out(reader)])

    def outside(self, x: Operand, region: MaskedRange) -> float | None:
        """The number that every element of x in the region is, if that is known."""
        if isinstance(x, Const):
            return float(x.value)
        op = self.made.get(x)
        if op is None:
            return None
        if op.name == "edge_mask" and region_of(op) == region:
            return float(op.attr["fill"])
        if op.name in ("edge_mask", "causal_mask"):
            value = self.outside(op.args[0], region)
            fill = -INF if op.name == "causal_mask" else float(op.attr["fill"])
            return value if value == fill else None
        return self._computed(op, region)

    def _computed(self, op: Op, region: MaskedRange) -> float | None:
        """-inf and 0 through the arithmetic of a softmax."""
        values = [self.outside(x, region) for x in op.args]
        low = bool(values) and values[0] == -INF
        if op.name in ("convert", "pack_operand"):
            return values[0] if values[0] in (0.0, -INF, INF) else None
        if op.name in ("exp", "exp2", "exp_sub"):
            return 0.0 if low else None
        if op.name == "sub" and low and self.by_rows(op.args[1], region.axis):
            return -INF
        if op.name in ("mul", "div"):
            return self._scaled(op, values)
        return None

    def _scaled(self, op: Op, values: list[float | None]) -> float | None:
        """-inf times a positive number. An unknown factor may be negative."""
        x, factor = values
        if op.name == "mul" and factor == -INF:
            x, factor = factor, x
        return -INF if x == -INF and factor is not None and 0 < factor < INF else None

    def by_rows(self, x: Operand, axis: int) -> bool:
        """Whether x is the same all along the axis. What is subtracted from -inf is then finite,
        or the row has no weight inside of the tensor either."""
        if isinstance(x, Const):
            return True
        op = self.made.get(x)
        return is_op(op, "expand_dims") and op.attr["axis"] == axis


def same_results(a: Node, b: Op) -> bool:
    return isinstance(a, Op) and [d.value for d in a.outs] == [d.value for d in b.outs]


__all__ = ["unify_masks"]
