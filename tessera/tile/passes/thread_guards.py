"""How many lanes the guards of a kernel ask for: `if i < M * N` of i = ts.tile.linear_id().

A launch that is not given takes as many groups as the guards need, so that no element is left out.
A guard is a comparison of a value that grows with the number of the lane, made from it by steps
that are known at the launch, with a bound that is; the index of a lane's store is one, too, and of
the number of a group where its boxes begin.

    i < B        B lanes          i // c < B     B * c
    i + c < B    B - c            i * c < B      ceil(B / c)

Of the number of a group plus that of a thread in it, group_id() * 4 + warp_id(), the thread's is
that of the first, or 0 where that is more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.ir import (
    Const,
    For,
    Function,
    If,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    defining_ops,
    operands,
    walk,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, Scalar, View

# f(i) < B with f(i) = op(i, c): i < inverse(B, c)
INVERSE: dict[str, Callable[[int, int], int]] = {
    "add": lambda bound, c: bound - c, "sub": lambda bound, c: bound + c,
    "mul": lambda bound, c: -(-bound // c) if c > 0 else 0,
    "floordiv": lambda bound, c: bound * c if c > 0 else 0,
    "shl": lambda bound, c: -(-bound // (1 << c)) if 0 <= c < 63 else 0,
    "shr": lambda bound, c: bound << c if 0 <= c < 32 else 0}
SHAPES = ("convert", "expand_dims", "broadcast", "reshape")  # the same numbers, in another shape
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
COMPARISONS = (*MIRRORED, "eq", "ne")


@dataclass(frozen=True)
class LaneGuard:
    """Lanes that one guard asks for."""

    lanes: int
    where: SourceLine | None


class Guards:
    """Reads the guards on one id: linear_id, group_id or local_id.

    scalars: the parameters that decided, after they were read.
    """

    def __init__(self, function: Function, known: dict[SSAValue, int], extent: Callable[[Any], int],
                 base: str, lanes: int | None = None):
        """known: scalars and extents by their value; extent: of a tensor, from its text; lanes: of
        a group, of a launch that is to be chosen: then more is asked than surely needed, such as by
        i + j < B in a loop over j, or by positions, and nothing is refused for it."""
        self.function, self.known, self.extent, self.base = function, known, extent, base
        self.lanes = lanes
        self.scalars: set[str] = set()
        self.kinds = {p.value: p.type for p in function.params}
        self.arguments = {p.value for p in function.params if p.role == "argument"}
        self.made = defining_ops(function.body)
        self.numbers: dict[SSAValue, int | None] = {}

    def __iter__(self) -> Iterator[LaneGuard]:
        if not any(op.name in (self.base, "group_id") for op in self.made.values()):
            return
        for op in walk(self.function.body):
            if self.lanes is not None:
                yield from self.begun(op)
            if not isinstance(op, Op) or op.outs and not isinstance(
                    op.outs[0].type, Scalar | View):
                continue
            if op.name in MIRRORED:
                x, y = op.args
                for name, a, b in ((op.name, x, y), (MIRRORED[op.name], y, x)):
                    bound = self.number(b)
                    if bound is not None:
                        yield from self.asked(a, bound + (name in ("le", "gt")), op.where)
            elif op.name == "store_element" and self.base != "local_id":
                yield from self.stored(op)
            elif self.lanes is not None and op.name in ("atomic", "compare_exchange"):
                first = 2 if op.name == "atomic" else 3  # behind the place and the numbers
                yield from self.reached(op.args[0], op.args[first:], op.where)
            elif op.name == "view" and self.base == "group_id":
                yield from self.reached(op.args[0], op.args[1:], op.where)

    def stored(self, op: Op) -> Iterator[LaneGuard]:
        """A store asks for the lanes that reach the end of each axis."""
        return self.reached(op.args[0], op.args[2:], op.where)

    def reached(self, tensor: Operand, index: tuple[Operand, ...], where: SourceLine | None
                ) -> Iterator[LaneGuard]:
        kind = self.kinds.get(tensor) if isinstance(tensor, SSAValue) else None
        dims = kind.dims if isinstance(kind, GlobalTensor) else ()
        if len(dims) == len(index):
            for at, dim in zip(index, dims, strict=True):
                yield from self.asked(at, self.extent(str(dim)), where)

    def begun(self, node: Node) -> Iterator[LaneGuard]:
        """Loops that begin at the id and end at a number, and positions computed with it."""
        if isinstance(node, For) and (self.number(node.step) or 0) > 0:
            op = self.made.get(node.hi)
            ends = op.args if op is not None and op.name == "minimum" else (node.hi,)
            for end in ends:
                bound = self.number(end)
                if bound is not None:
                    yield from self.asked(node.lo, bound, node.where)
        elif isinstance(node, Op) and (at := OPS[node.name].positions) is not None:
            kind = self.kinds.get(node.args[0]) if isinstance(node.args[0], SSAValue) else None
            if isinstance(kind, GlobalTensor):
                axis, merged = node.attr["axis"], node.attr.get("merged") or 1
                size = prod(self.extent(str(d)) for d in kind.dims[axis + 1 - merged:axis + 1])
                yield from self.asked(node.args[at], size, node.where)

    @functools.cached_property
    def follow(self) -> set[Operand]:
        """What is computed with the id."""
        found: set[Operand] = set()
        for x, op in self.made.items():  # in the order of the program
            if self.is_base(x) or OPS[op.name].effect == "pure" and found.intersection(op.args):
                found.add(x)
        return found

    def through(self, op: Op, bound: int) -> tuple[Operand, int] | None:
        """Of a launch that is to be chosen: the operand to go on with."""
        follows = [a for a in op.args if a in self.follow]
        if len(follows) != 1:
            return None
        (x,) = follows
        rest = [self.number(a) for a in op.args if a != x]
        if op.name in SHAPES or op.name == "maximum" and (rest[0] or 0) <= 0:
            return x, bound
        if op.name == "where" and x == op.args[1]:
            return x, bound
        if op.name == "minimum":
            return x, bound if rest[0] is None else min(bound, rest[0] + 1)
        if op.name == "add" and rest[0] is None:
            (other,) = (a for a in op.args if a != x)
            return x, bound - min(0, self.least(other) or self.of_first_thread(other) or 0)
        return None

    def least(self, x: Operand) -> int | None:
        """What the counter of a loop, or a tile of positions, begins with."""
        op = self.made.get(x)
        if op is None:
            return self.number(self.counters[x]) if x in self.counters else None
        if op.name in SHAPES:
            return self.least(op.args[0])
        return op.attr["start"] if op.name == "arange" else None

    @functools.cached_property
    def counters(self) -> dict[Operand, Operand]:
        """Where counters of loops that count up begin."""
        return {n.var.value: n.lo for n in walk(self.function.body) if isinstance(n, For)
                and (self.number(n.step) or 0) > 0}

    def asked(self, x: Operand, bound: int, where: SourceLine | None) -> Iterator[LaneGuard]:
        """x < bound for every lane below which number?"""
        while not self.is_base(x):
            op = self.made.get(x)
            if op is None:
                return
            if op.name == "convert":
                x = op.args[0]
                continue
            if self.lanes is not None and (further := self.through(op, bound)) is not None:
                x, bound = further
                continue
            if op.name not in INVERSE:
                return
            first, second = (self.number(a) for a in op.args)
            if op.name == "add" and first is second is None:
                least = {a: self.of_first_thread(a) for a in op.args}
                rest = [a for a, n in least.items() if n is None]
                if self.base != "group_id" or len(rest) != 1:
                    return
                x = rest[0]
                bound -= min(0, *(n for n in least.values() if n is not None))
                continue
            if second is not None:
                x, c = op.args[0], second
            elif first is not None and op.name in ("add", "mul"):
                x, c = op.args[1], first
            else:
                return
            bound = INVERSE[op.name](bound, c)
        yield LaneGuard(max(0, bound), where)

    def strip(self) -> LaneGuard | None:
        """How many elements each group numbers, where a guard on group_id() * c + local_id() says
        it and no other one is on what follows from that."""
        compared = {x: op.where for op in self.made.values() if op.name in MIRRORED
                    and isinstance(op.outs[0].type, Scalar) for x in op.args
                    if isinstance(x, SSAValue)}
        found = {x: n for x in compared if (n := self._elements_of_a_group(x)) is not None}
        if len(found) != 1 or strides(self.function, "group_id") or strides(self.function,
                                                                            "local_id"):
            return None
        ((number, n),) = found.items()
        follow: set[Operand] = {number}
        for x, op in self.made.items():  # in the order of the program
            if follow.intersection(op.args):
                follow.add(x)
        return None if len(follow.intersection(compared)) > 1 else LaneGuard(n, compared[number])

    def _elements_of_a_group(self, x: Operand) -> int | None:
        """c of group_id() * c + local_id()."""
        op = self.made.get(x)
        if op is None or op.name != "add":
            return None
        parts = [self.made.get(a) for a in op.args]
        products = [p for p in parts if p is not None and p.name == "mul"]
        if len(products) != 1 or not any(p is not None and p.name == "local_id" for p in parts):
            return None
        made = [self.made.get(a) for a in products[0].args]
        numbers = [n for a in products[0].args if (n := self.number(a)) is not None]
        return numbers[0] if numbers and [m.name for m in made if m] == ["group_id"] else None

    def added_again(self, lanes: int) -> LaneGuard | None:
        """How many elements each group numbers, where lanes beyond them add to memory below the
        only guard on threads, group_id() * c + local_id() < B, and nothing else depends on who
        adds: the next group adds the same. What overlaps on purpose uses an id for itself."""
        found = {x: n for x in self.made if (n := self._elements_of_a_group(x)) is not None}
        guards = [op for op in self._made_of_threads() if op.name in COMPARISONS]
        if len(found) != 1 or len(guards) != 1 or strides(self.function, "group_id") or strides(
                self.function, "local_id"):
            return None
        ((number, n),), (guard,) = found.items(), guards
        if not self._ids_are_for(number):
            return None
        below = guard.name if guard.args[0] == number else MIRRORED.get(guard.name)
        bound = self.number(guard.args[1] if guard.args[0] == number else guard.args[0])
        if number not in guard.args or below not in MIRRORED or bound is None:
            return None
        if n >= lanes or bound + (below in ("le", "gt")) <= n:
            return None
        for node in walk(self.function.body):
            if isinstance(node, If) and node.cond == guard.outs[0].value:
                for op in walk(node.then if below in ("lt", "le") else node.orelse):
                    if isinstance(op, Op) and op.name == "atomic" and op.attr["kind"] in (
                            "add", "xor"):
                        return LaneGuard(n, op.where)
        return None

    def _ids_are_for(self, number: Operand) -> bool:
        """Whether this number alone is made from the numbers of groups and threads."""
        top = self.made[number]
        makes = {top, *(op for a in top.args if isinstance(a, SSAValue) and (op := self.made.get(a))
                        and op.name == "mul")}
        ids = {d.value for op in self.made.values() for d in op.outs
               if op.name == "group_id" or OPS[op.name].family == "ids" and OPS[op.name].by_thread}
        ids |= {d.value for op in makes - {top} for d in op.outs}
        return all(n in makes or not ids.intersection(operands(n))
                   for n in walk(self.function.body))

    def _made_of_threads(self) -> list[Op]:
        """What is computed from the number of a thread, in the order of the program."""
        follow: set[Operand] = set()
        for op in self.made.values():
            record = OPS[op.name]
            if record.family == "ids" and record.by_thread or (
                    record.effect == "pure" and follow.intersection(op.args)):
                follow.update(d.value for d in op.outs)
        return [op for op in self.made.values() if op.outs[0].value in follow]

    def of_first_thread(self, x: Operand) -> int | None:
        """What a number that is made from the thread's in its group, by known numbers, is for the
        first; None of others."""
        op = self.made.get(x)
        if op is None:
            return None
        record = OPS[op.name]
        if record.family == "ids":
            return 0 if record.by_thread and op.name != "linear_id" else None
        if op.name not in INVERSE:
            return None
        values = [self.of_first_thread(a) if (n := self.number(a)) is None else n for a in op.args]
        known = None if None in values else record.value_of(*values)  # type: ignore[arg-type]
        return None if known is None else int(known)

    def is_base(self, x: Operand) -> bool:
        """linear_id(), also written out: group_id() * group_size() + local_id()."""
        op = self.made.get(x)
        if op is None:
            return False
        if op.name == self.base:
            return op.attr.get("axis") is None
        if self.base != "linear_id" or op.name != "add":
            return False
        for a, b in (op.args, op.args[::-1]):
            number, product = self.made.get(a), self.made.get(b)
            if number is not None and product is not None and number.name == "local_id" and \
                    product.name == "mul" and {m.name for v in product.args if (
                        m := self.made.get(v))} == {"group_id", "group_size"}:
                return True
        return False

    def number(self, x: Operand) -> int | None:
        """A value that is known at the launch."""
        if isinstance(x, Const):
            return int(x.value) if x.dtype.kind in ("int", "uint") else None
        if x in self.known:
            if x in self.arguments:
                self.scalars.add(x.name)
            return self.known[x]
        if x not in self.numbers:
            self.numbers[x] = self._number(x)
        return self.numbers[x]

    def _number(self, x: SSAValue) -> int | None:
        op = self.made.get(x)
        if op is None or not isinstance(op.outs[0].type, Scalar):
            return None
        if op.name == "group_size":
            return self.lanes
        if op.name == "convert" and op.outs[0].type.dtype.kind in ("int", "uint"):
            return self.number(op.args[0])
        values = [self.number(a) for a in op.args]
        known = None if None in values else OPS[op.name].value_of(*values)  # type: ignore[arg-type]
        return known if isinstance(known, int) else None


def strides(function: Function, base: str) -> bool:
    """Whether a loop goes on from the id, so that no lane stands for one element alone: from a
    number computed with it, or by adding to one. What was read at the id is data."""
    made = defining_ops(function.body)
    follow: set[Operand] = set()
    for x, op in made.items():  # in the order of the program
        if op.name == base or OPS[op.name].effect == "pure" and follow.intersection(op.args):
            follow.add(x)

    def goes_on(n: For | While) -> bool:
        for d, first, again in zip(n.carried, n.inits, n.yields, strict=True):
            op = made.get(again)
            if first in follow and op is not None and op.name == "add" and d.value in op.args and (
                    isinstance(d.type, Scalar) and d.type.dtype.kind in ("int", "uint")):
                return True
        return isinstance(n, For) and n.lo in follow

    return any(goes_on(n) for n in walk(function.body) if isinstance(n, For | While))


__all__ = ["LaneGuard", "Guards", "strides"]
