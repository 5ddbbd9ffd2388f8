"""Checks that Tile IR is well formed: every value defined once and before its use, every type as
the op's rule says. Raises TileIRError; the message is for us, not for the user."""

from __future__ import annotations

from typing import NoReturn

from tessera.tile.ir.errors import RuleError, TileIRError
from tessera.tile.ir.ir import Const, Def, For, Function, If, Node, Op, Operand, SSAValue, While
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar, Type, is_lane


def verify(function: Function) -> Function:
    """The function itself. Raises TileIRError."""
    checker = _Checker()
    for p in function.params:
        checker.define(Def(p.value, p.type))
    checker.block(function.body)
    return function


class _Checker:
    def __init__(self) -> None:
        self.types: dict[SSAValue, Type] = {}
        self.seen: set[SSAValue] = set()
        self.lane = 0  # depth of control that depends on the lane

    def fail(self, message: str, node: Node | None = None) -> NoReturn:
        raise TileIRError(f"ill-formed Tile IR: {message}", where=node.where if node else None)

    def define(self, d: Def) -> None:
        if d.value in self.seen:
            self.fail(f"{d.value} is defined twice")
        self.seen.add(d.value)
        self.types[d.value] = d.type

    def use(self, x: Operand, node: Node) -> Type:
        if isinstance(x, Const):
            return Scalar(x.dtype)
        if x not in self.types:
            self.fail(f"{x} is used where it is not defined", node)
        return self.types[x]

    def block(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            if isinstance(node, Op):
                self.op(node)
            elif isinstance(node, For):
                self.for_(node)
            elif isinstance(node, While):
                self.while_(node)
            else:
                self.if_(node)

    def op(self, op: Op) -> None:
        record = OPS.get(op.name)
        if record is None or record.rule is None:
            self.fail(f"{op.name} is no op", op)
        types = [self.use(a, op) for a in op.args]
        if record.group and self.lane:
            self.fail(f"{op.name} under control that depends on the lane", op)
        try:
            made = record.rule(types, dict(record.defaults) | op.attr)
        except RuleError as err:
            self.fail(f"{op.name}: {err.message}", op)
        kinds = made if isinstance(made, tuple) else (made,)
        got = tuple(d.type for d in op.outs)
        if got and not all(_fits(g, k) for g, k in zip(got, kinds, strict=False)):
            self.fail(f"{op.name} gives {', '.join(map(str, kinds))}, not "
                      f"{', '.join(map(str, got))}", op)
        if self.lane and record.effect == "atomic" and any(
                isinstance(t, Scalar) and t.uniform for t in got):
            self.fail(f"{op.name}: each lane updates, and one result is said to be all lanes'", op)
        for d in op.outs:
            self.define(d)

    def inner(self, node: Node, lane: bool, *blocks: tuple[Node, ...]) -> None:
        """Blocks whose definitions end with them."""
        self.lane += lane
        for nodes in blocks:
            before = dict(self.types)
            self.block(nodes)
            self.after = dict(self.types)
            self.types = before
        self.lane -= lane

    def carried(self, node: For | While) -> None:
        for d, init in zip(node.carried, node.inits, strict=True):
            self.same(self.use(init, node), d, node)
            self.define(d)

    def same(self, got: Type, d: Def, node: Node) -> None:
        if not _fits(d.type, got):
            self.fail(f"{d.value} is {d.type} and gets {got}", node)

    def yields(self, node: Node, xs: tuple[Operand, ...], defs: tuple[Def, ...],
               types: dict[SSAValue, Type]) -> None:
        if len(xs) != len(defs):
            self.fail("yields and results differ in number", node)
        outer, self.types = self.types, types
        for x, d in zip(xs, defs, strict=True):
            self.same(self.use(x, node), d, node)
        self.types = outer

    def for_(self, node: For) -> None:
        bounds = [self.use(x, node) for x in (node.lo, node.hi, node.step)]
        self.carried(node)
        outer = dict(self.types)
        self.define(node.var)
        self.inner(node, any(map(is_lane, bounds)), node.body)
        self.yields(node, node.yields, node.carried, self.after)
        self.types = outer

    def while_(self, node: While) -> None:
        self.carried(node)
        outer = dict(self.types)
        self.block(node.test)
        lane = is_lane(self.use(node.cond, node))
        self.inner(node, lane, node.body)
        self.yields(node, node.yields, node.carried, self.after)
        self.types = outer

    def if_(self, node: If) -> None:
        lane = is_lane(self.use(node.cond, node))
        self.inner(node, lane, node.then)
        self.yields(node, node.thens, node.outs, self.after)
        self.inner(node, lane, node.orelse)
        self.yields(node, node.elses, node.outs, self.after)
        for d in node.outs:
            self.define(d)


def _fits(wide: Type, got: Type) -> bool:
    """A lane value may hold a uniform one; otherwise the types are equal."""
    if isinstance(wide, Scalar) and isinstance(got, Scalar):
        return wide.dtype is got.dtype and (wide.uniform == got.uniform or not wide.uniform)
    return wide == got
