"""Barriers between whole-group statements on global memory.

The language orders tile ops and uniform element accesses of one group on global memory. On a GPU
each thread does its part when it comes there, so a barrier is needed where one thread may touch
what another one wrote, or is still to read. Two accesses need none when every thread touches the
same elements in both: the same view in the same layout, in which each element has one thread, since
of several that have it all read and one writes; nor when their boxes have nothing in common
wherever they are, such as the halves of an axis, or of a group's part of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

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
    definitions,
    walk,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType, Type

ANYWHERE = "any thread, any element"  # in no order with itself: the next iteration goes elsewhere


# Of an axis: from and to, behind a number that is the same wherever the kernel has it, or 0.
Span = tuple[SSAValue | None, int, int] | None  # None: not known


@dataclass(frozen=True)
class MemoryAccess:
    """memory: the tensor, '' for any.  part: what says which thread touches which elements.
    spans: by axis of the tensor, where all of the elements surely are.  shared: several threads
    read each of them, one of which writes it."""

    memory: str
    write: bool
    part: Any
    spans: tuple[Span, ...] = ()
    shared: bool = False

    def conflicts(self, other: MemoryAccess) -> bool:
        same = self.memory == other.memory or "" in (self.memory, other.memory)
        apart = self.part != other.part or self.part == ANYWHERE or (
            self.shared and self.write != other.write)
        return same and (self.write or other.write) and apart and not self.misses(other)

    def misses(self, other: MemoryAccess) -> bool:
        """Whether no element is in both."""
        pairs = zip(self.spans, other.spans, strict=False)
        return self.memory == other.memory != "" and any(
            a is not None and b is not None and a[0] == b[0] and (a[2] <= b[1] or b[2] <= a[1])
            for a, b in pairs)


Pending = frozenset[MemoryAccess]


def order(function: Function, overlapping: bool = False, spare: bool = False) -> Function:
    """The function with the barriers that the order of global accesses needs.

    overlapping: parameters may be the same memory. spare: there are more threads than layouts are
    made for, which hold what others do.
    """
    return _Orderer(function, overlapping, spare).run()


class _Orderer:
    def __init__(self, function: Function, overlapping: bool, spare: bool):
        self.function, self.overlapping, self.spare = function, overlapping, spare
        self.types = definitions(function)
        self.roots: dict[SSAValue, SSAValue] = {}
        self.spans: dict[SSAValue, tuple[Span, ...]] = {}
        # Numbers that no loop makes anew, and those a constant behind another one.
        self.fixed = {o.value for n in function.body if isinstance(n, Op) for o in n.outs}
        self.sums = {n.outs[0].value: (n.args[0], int(n.args[1].value)) for n in walk(function.body)
                     if isinstance(n, Op) and n.name == "add" and isinstance(n.args[0], SSAValue)
                     and isinstance(n.args[1], Const) and n.args[1].dtype.kind == "int"}

    def run(self) -> Function:
        body, _ = self.block(self.function.body, frozenset())
        return replace(self.function, body=body)

    def block(self, nodes: Iterable[Node], pending: Pending) -> tuple[tuple[Node, ...], Pending]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, Op):
                pending = self.op(node, pending, out)
            elif isinstance(node, If):
                pending = self.branch(node, pending, out)
            else:
                pending = self.loop(node, pending, out)
        return tuple(out), pending

    def op(self, op: Op, pending: Pending, out: list[Node]) -> Pending:
        if OPS[op.name].alias and isinstance(op.args[0], SSAValue):
            self.roots[op.outs[0].value] = self.root(op.args[0])
        if op.name == "view" and op.args[0] not in self.roots:
            self.spans[op.outs[0].value] = tuple(map(self.span, op.args[1:], op.attr["box"]))
        if op.name == "barrier":
            pending = frozenset()
        access = self.access(op)
        if access is not None:
            if any(access.conflicts(p) for p in pending):
                out.append(Op("barrier", (), (), (), op.where))
                pending = frozenset()
            pending |= {access}
        out.append(op)
        return pending

    def span(self, at: Operand, n: int) -> Span:
        if isinstance(at, Const):
            return None, int(at.value), int(at.value) + n
        base, behind = self.sums.get(at, (at, 0))
        return (base, behind, behind + n) if base in self.fixed else None

    def branch(self, node: If, pending: Pending, out: list[Node]) -> Pending:
        if not self.uniform(node.cond):
            out.append(node)  # what lanes do on their own is not ordered
            return pending
        then, after = self.block(node.then, pending)
        orelse, other = self.block(node.orelse, pending)
        out.append(replace(node, then=then, orelse=orelse))
        return after | other

    def loop(self, node: For | While, pending: Pending, out: list[Node]) -> Pending:
        """The second look at the body knows what the iteration before left."""
        test: tuple[Node, ...] = node.test if isinstance(node, While) else ()
        bounds = (node.lo, node.hi, node.step) if isinstance(node, For) else (node.cond,)
        if not all(map(self.uniform, bounds)):
            out.append(node)  # threads leave it at different times: a barrier would hang
            return pending
        _, once = self.block((*test, *node.body), pending)
        both = pending | once
        if isinstance(node, While):
            test, both = self.block(node.test, both)
        body, after = self.block(node.body, both)
        made = replace(node, body=body)
        out.append(replace(made, test=test) if isinstance(made, While) else made)
        return after | pending

    # --- what an op touches -------------------------------------------------------------------
    def root(self, x: SSAValue) -> SSAValue:
        return self.roots.get(x, x)

    def type(self, x: Any) -> Type:
        return self.types[x] if isinstance(x, SSAValue) else Scalar(x.dtype)

    def uniform(self, x: Any) -> bool:
        t = self.type(x)
        return isinstance(t, Scalar) and t.uniform

    def access(self, op: Op) -> MemoryAccess | None:
        record = OPS[op.name]
        if record.access == "copy" and isinstance(op.args[1], SSAValue):
            return MemoryAccess("" if self.overlapping else self.root(op.args[1]).name, False,
                                ("copied", op.args[1]))
        if record.access not in ("tile", "scattered", "element") or not isinstance(
                op.args[0], SSAValue):
            return None
        tensor = self.types[self.root(op.args[0])]
        if not isinstance(tensor, GlobalTensor):
            return None
        write = record.writes
        memory = "" if self.overlapping else self.root(op.args[0]).name
        if record.access == "scattered":  # sums meet sums in any order
            return MemoryAccess(memory, write, "sums" if op.name == "atomic_scatter" else ANYWHERE)
        if record.access == "tile":
            tile = op.outs[0].type if op.outs else self.type(op.args[1])
            layout = RegisterLayout.parse(tile.layout, tile.shape) if isinstance(
                tile, TileType) and tile.layout is not None else None
            shared = self.spare or layout is None or bool(layout.replicas)
            return MemoryAccess(memory, write, (op.args[0], layout),
                                self.spans.get(op.args[0], ()), shared)
        if not all(map(self.uniform, op.args[1:])):
            return None
        return MemoryAccess(memory, write, "one thread writes" if write else "all read")
