"""How many registers of a thread tiles take at once, before roles are split.

Results of elementwise ops count nothing: they are made register by register out of what they read,
which is counted, and mostly take its place.
"""

from __future__ import annotations

from math import prod

from tessera.tile.cuda.lower.layout_relations import is_elementwise
from tessera.tile.cuda.lower.warp_specialised.program import WARPGROUP
from tessera.tile.cuda.lower.warp_specialised.rewrite import Maker, Nodes, made_by, reads
from tessera.tile.ir.ir import For, If, Node, Op, Operand, SSAValue, While, walk
from tessera.tile.ir.types import TileType

IN_MEMORY = frozenset({"ring_load", "transpose"})  # not in registers, or only relabelled


def pressure(nodes: Nodes, maker: Maker, groups: int) -> int:
    """The most registers of matrices that live between two statements. groups: consumers."""
    return _Liveness(nodes, maker, groups).run(nodes, set())[0]


class _Liveness:
    def __init__(self, nodes: Nodes, maker: Maker, groups: int):
        self.sizes: dict[SSAValue, int] = {}
        fused = {d.value for n in walk(nodes) if isinstance(n, Op)
                 and (n.name in IN_MEMORY or is_elementwise(n)) for d in n.outs}
        for value, type in maker.types.items():
            if isinstance(type, TileType) and len(type.shape) == 2 and value not in fused:
                self.sizes[value] = prod(type.shape) // (WARPGROUP * groups)

    def total(self, live: set[SSAValue]) -> int:
        return sum(self.sizes.get(v, 0) for v in live)

    def run(self, nodes: Nodes, live: set[SSAValue]) -> tuple[int, set[SSAValue]]:
        """(the most, what lives in front) of nodes behind which `live` lives."""
        live = set(live)
        most = self.total(live)
        for node in reversed(nodes):
            most = max(most, self.inside(node, live))
            live = (live - made_by(node)) | reads(node)
            most = max(most, self.total(live))
        return most, live

    def inside(self, node: Node, live: set[SSAValue]) -> int:
        """The most in the regions of a node."""
        if isinstance(node, If):
            rest = live - made_by(node)
            return max(self.run(node.then, rest | _values(node.thens))[0],
                       self.run(node.orelse, rest | _values(node.elses))[0])
        if isinstance(node, For | While):
            around = (live - made_by(node)) | {
                v for v in reads(node) if v not in _values(node.inits) or v in live}
            return self.run(node.body, around | _values(node.yields))[0]
        return 0


def _values(xs: tuple[Operand, ...]) -> set[SSAValue]:
    return {x for x in xs if isinstance(x, SSAValue)}
