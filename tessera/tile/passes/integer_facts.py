"""What is known about integers before a kernel runs: divisors, signs, and what all groups share.

They decide how wide a memory access may be, which guards it needs, and which cache it is for.
"""

from __future__ import annotations

from math import gcd

from tessera.tile.ir.ir import (
    Const,
    For,
    Function,
    If,
    Node,
    Op,
    Operand,
    SSAValue,
    definitions,
    walk,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar

LARGEST = 1 << 20  # the divisor of 0, and the greatest that is tracked
DIVISIBLE = 16
EIGHT = 8


def divisor_of(number: int) -> int:
    """The largest power of two that divides a number."""
    return LARGEST if number == 0 else min(LARGEST, number & -number)


class Knowledge:
    """Answers for the integer scalars of a function.

    divisible: extents known to be so by 16.  eights: by 8 and no more: rows of so many elements of
    16 bits begin at 16 bytes.
    """

    def __init__(self, function: Function, divisible: frozenset[str],
                 eights: frozenset[str] = frozenset()):
        self.types = definitions(function)
        self.made: dict[SSAValue, Node] = {}
        self.loops: dict[SSAValue, For] = {}
        self.divisible, self.eights = divisible, eights
        self.extents = {p.value: p.value.name for p in function.params if p.role == "dim"}
        self.constants = dict(function.constants)
        for node in walk(function.body):
            outs = node.outs if isinstance(node, Op | If) else node.carried
            self.made |= {d.value: node for d in outs}
            if isinstance(node, For):
                self.loops[node.var.value] = node
        self._divisors: dict[SSAValue, int] = {}
        self._natural: dict[SSAValue, bool] = {}
        self._shared: dict[SSAValue, bool] = {}

    # --- divisors -----------------------------------------------------------------------------
    def divisor(self, x: Operand | int) -> int:
        """A power of two that surely divides x."""
        if isinstance(x, int):
            return divisor_of(x)
        if isinstance(x, Const):
            return divisor_of(int(x.value))
        if x not in self._divisors:
            self._divisors[x] = 1  # what a value that depends on itself may assume
            self._divisors[x] = self._divisor(x)
        return self._divisors[x]

    def extent(self, text: str) -> int:
        """As divisor, of the extent with that text."""
        if text.isdigit():
            return divisor_of(int(text))
        if text in self.constants:
            return divisor_of(int(self.constants[text]))
        return DIVISIBLE if text in self.divisible else EIGHT if text in self.eights else 1

    def _divisor(self, x: SSAValue) -> int:
        if x in self.extents:
            return self.extent(self.extents[x])
        if x in self.loops:
            loop = self.loops[x]
            return gcd(self.divisor(loop.lo), self.divisor(loop.step))
        node = self.made.get(x)
        if not isinstance(node, Op):
            return self._joined(x, node)
        args = [a for a in node.args if self._integer(a)]
        if node.name == "mul":
            return min(LARGEST, self.divisor(args[0]) * self.divisor(args[1]))
        if node.name in ("add", "sub", "minimum", "maximum", "mod"):
            return gcd(*(self.divisor(a) for a in args))
        if node.name == "where":
            return gcd(*(self.divisor(a) for a in args[1:]))
        if node.name == "floordiv" and isinstance(args[1], Const):
            whole, by = self.divisor(args[0]), int(args[1].value)
            return whole // by if by > 0 and whole % by == 0 else 1
        if node.name == "convert" and args:
            return self.divisor(args[0]) if self._holds(node, args[0]) else 1
        if node.name == "constant":
            return divisor_of(int(node.attr["value"]))
        return 1

    def _joined(self, x: SSAValue, node: Node | None) -> int:
        if not isinstance(node, If):
            return 1
        at = [d.value for d in node.outs].index(x)
        return gcd(self.divisor(node.thens[at]), self.divisor(node.elses[at]))

    def _holds(self, convert: Op, x: Operand) -> bool:
        """Whether a conversion keeps every number that is not negative; others saturate."""
        source = x.dtype if isinstance(x, Const) else self.types[x].dtype
        made = convert.outs[0].type.dtype
        return made.kind != "float" and made.max >= min(source.max, 2**31 - 1)

    def _integer(self, x: Operand) -> bool:
        t = Scalar(x.dtype) if isinstance(x, Const) else self.types[x]
        return isinstance(t, Scalar) and t.dtype.kind in ("int", "uint", "bool")

    # --- groups -------------------------------------------------------------------------------
    def in_all_groups(self, x: Operand) -> bool:
        """Whether every group surely has x, in one of its iterations at least."""
        if isinstance(x, Const):
            return True
        if x not in self._shared:
            self._shared[x] = False
            self._shared[x] = self._is_in_all_groups(x)
        return self._shared[x]

    def _is_in_all_groups(self, x: SSAValue) -> bool:
        if x in self.loops:
            loop = self.loops[x]
            return self.in_all_groups(loop.lo) and self.in_all_groups(loop.step)
        node = self.made.get(x)
        if isinstance(node, Op):
            return OPS[node.name].family == "elementwise" and all(
                self.in_all_groups(a) for a in node.args)
        return node is None  # an argument

    def group_axes(self, x: Operand) -> frozenset[int] | None:
        """The axes of the grid on whose group numbers x depends, and on nothing else that differs
        between groups or iterations; None where that is not known."""
        if isinstance(x, Const):
            return frozenset()
        node = self.made.get(x)
        if x in self.loops or node is not None and not isinstance(node, Op):
            return None
        if node is None:  # an argument
            return frozenset()
        if node.name == "group_id":
            return frozenset((node.attr["axis"],)) if node.attr.get("axis") is not None else None
        if OPS[node.name].family != "elementwise":
            return None
        parts = [self.group_axes(a) for a in node.args]
        return None if None in parts else frozenset().union(*(p for p in parts if p is not None))

    # --- signs --------------------------------------------------------------------------------
    def natural(self, x: Operand | int) -> bool:
        """Whether x is surely not negative (and does not overflow, as indices do not)."""
        if isinstance(x, int):
            return x >= 0
        if isinstance(x, Const):
            return x.value >= 0
        if x not in self._natural:
            self._natural[x] = False
            self._natural[x] = self._is_natural(x)
        return self._natural[x]

    def _is_natural(self, x: SSAValue) -> bool:
        if x in self.extents:
            return True
        if x in self.loops:
            loop = self.loops[x]
            return self.natural(loop.lo) and isinstance(loop.step, Const) and loop.step.value > 0
        node = self.made.get(x)
        if isinstance(node, Op):
            if node.name == "constant":
                return bool(node.attr["value"] >= 0)
            if node.name == "convert":
                return self._integer(node.args[0]) and self.natural(node.args[0])
            least = OPS[node.name].least
            if least is None or not self._integer(x):
                return False
            found = least([0 if self.natural(a) else None for a in node.args])
            return found is not None and found >= 0
        if isinstance(node, If):
            at = [d.value for d in node.outs].index(x)
            return self.natural(node.thens[at]) and self.natural(node.elses[at])
        return False


__all__ = ["Knowledge", "divisor_of"]
