"""Numbers of rows: what reductions of tiles give, and what is computed of it.

Lanes that share a row all have its number, and with several rows each does the same for all of
them. Where that is much, such as logarithms or divisions, each lane does it for a row of its own,
and what meets a tile again comes from that lane.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

from tessera.tile.ir.ir import Function, If, Op, SSAValue, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import TileType, Type

SPECIAL = 12  # instructions of a special function or a division
LEAST_ROWS = 4  # of a lane
LEAST_WORK = 12  # of a row, that an exchange more is worth


class RowNumbers:
    """Tiles of as many elements that elementwise ops, new axes and loops tie to each other."""

    def __init__(self, function: Function, types: dict[SSAValue, Type]):
        self.types, self.work = types, defaultdict[SSAValue, int](int)
        self.reduced: set[SSAValue] = set()
        self.ties: dict[SSAValue, set[SSAValue]] = defaultdict(set)
        self.found: dict[SSAValue, int] = {}
        for node in walk(function.body):
            if isinstance(node, Op):
                self._op(node)
            elif isinstance(node, If):
                self._tie(*zip(node.outs, node.thens, node.elses, strict=True))
            else:
                self._tie(*zip(node.carried, node.yields, node.inits, strict=True))

    def worth_dividing(self, value: SSAValue, rows: int) -> bool:
        """Whether lanes with so many rows do much for each of them."""
        return rows >= LEAST_ROWS and self._work(value) >= LEAST_WORK

    def _work(self, value: SSAValue) -> int:
        if value not in self.found:
            group, waiting = {value}, [value]
            while waiting:
                new = self.ties[waiting.pop()] - group
                group |= new
                waiting += new
            work = sum(self.work[v] for v in group) if group & self.reduced else 0
            self.found |= dict.fromkeys(group, work)
        return self.found[value]

    def _op(self, op: Op) -> None:
        record = OPS[op.name]
        if record.joined_by and op.outs:
            self.reduced.add(op.outs[0].value)
        simple = record.family == "elementwise" or record.layouts == "same"
        if not op.outs or not (simple or op.name == "expand_dims"):
            return
        out = op.outs[0].value
        self._tie(*((op.outs[0], x) for x in op.args))
        self.work[out] += SPECIAL if record.special else 1

    def _tie(self, *groups: tuple) -> None:
        for made, *others in groups:
            for x in others:
                if self._size(made.value) is not None and self._size(x) == self._size(made.value):
                    self.ties[made.value].add(x)
                    self.ties[x].add(made.value)

    def _size(self, x: object) -> int | None:
        t = self.types.get(x) if isinstance(x, SSAValue) else None
        return prod(t.shape) if isinstance(t, TileType) else None
