"""Tiles of integers that count along their last axis from multiples of a number on.

Of such indices four neighbours share one computation of Philox, whether or not the kernel says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from tessera.tile.ir.ir import Op, Operand, SSAValue
from tessera.tile.ir.types import TileType
from tessera.tile.passes.integer_facts import LARGEST, Knowledge, divisor_of

ONE_BY_ONE = frozenset({"convert", "broadcast", "add", "sub", "mul"})


class IndexRuns:
    """made: the op that makes each value; known: of the function's integers."""

    def __init__(self, made: Mapping[Operand, Op], known: Knowledge):
        self.made, self.known = made, known

    def count(self, x: Operand, n: int) -> bool:
        """Whether elements of a tile along its last axis are runs of n, each from a multiple of n
        on. Numbers of 32 bits may overflow: then all of a run do."""
        op = self.op(x)
        if op is None:
            return False
        t = op.outs[0].type
        assert isinstance(t, TileType)
        if t.shape[-1] % n:
            return False
        if op.name == "arange":
            return bool(op.attr["start"] % n == 0)
        if op.name == "expand_dims":
            return op.attr["axis"] < len(t.shape) - 1 and self.count(op.args[0], n)
        if op.name in ("convert", "broadcast"):
            return t.dtype.kind != "float" and self.count(op.args[0], n)
        if op.name in ("add", "sub"):
            pairs = [op.args, op.args[::-1]][:1 + (op.name == "add")]
            return any(self.count(a, n) and self.divisor(b) % n == 0 and self.is_one_a_row(b)
                       for a, b in pairs)
        return False

    def is_one_a_row(self, x: Operand) -> bool:
        """Whether the elements of a tile are the same along its last axis, or it is a number."""
        if not isinstance(x, SSAValue) or not isinstance(t := self.known.types.get(x), TileType):
            return True
        op = self.op(x)
        return t.shape[-1] == 1 or op is not None and op.name in ONE_BY_ONE and all(
            map(self.is_one_a_row, op.args))

    def divisor(self, x: Operand) -> int:
        """A power of two that surely divides all elements of a tile, or a number."""
        op = self.op(x)
        if op is None:
            tile = isinstance(x, SSAValue) and isinstance(self.known.types.get(x), TileType)
            return 1 if tile else self.known.divisor(x)
        if op.name == "arange":
            t = op.outs[0].type
            assert isinstance(t, TileType)
            return divisor_of(op.attr["start"]) if t.shape == (1,) else 1
        if op.name in ("expand_dims", "broadcast"):
            return self.divisor(op.args[0])
        if op.name == "convert":
            return self.divisor(op.args[0]) if op.outs[0].type.dtype.kind != "float" else 1
        if op.name == "mul":
            return min(LARGEST, self.divisor(op.args[0]) * self.divisor(op.args[1]))
        if op.name in ("add", "sub"):
            return gcd(*map(self.divisor, op.args))
        return 1

    def op(self, x: Operand) -> Op | None:
        """What makes a tile of integers."""
        op = self.made.get(x)
        if op is None or not isinstance(op.outs[0].type, TileType):
            return None
        return op if op.outs[0].type.dtype.kind in ("int", "uint") else None
