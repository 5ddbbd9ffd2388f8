"""Values of a loop's body as they will be in another iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.tile.ir.ir import Def, For, Names, Node, Op, Operand, SSAValue
from tessera.tile.ir.op_record import OPS


def made_in(node: For) -> dict[SSAValue, Op]:
    """The ops of a loop's own body by what they define."""
    return {d.value: n for n in node.body if isinstance(n, Op) for d in n.outs}


def known_ahead(node: For, x: Operand, steady: Callable[[SSAValue], bool] | None = None) -> bool:
    """Whether x follows from the loop variable and what stood before the loop. steady: which
    tensors the loop does not change, so that it may depend on elements of them, as where a table
    says where the next tile lies; what is copied then reads these in the iterations that are."""
    carried = {d.value for d in node.carried}
    made = made_in(node)
    inner = {d.value for n in node.body if not isinstance(n, Op)
             for d in (n.outs if hasattr(n, "outs") else n.carried)}

    def known(v: Operand) -> bool:
        if not isinstance(v, SSAValue) or v == node.var.value:
            return True
        if v in carried or v in inner:
            return False
        return v not in made or computable(made[v]) and all(map(known, made[v].args))

    def computable(op: Op) -> bool:
        if op.name != "load_element":
            return _computable(op)
        return steady is not None and isinstance(op.args[0], SSAValue) and steady(op.args[0])

    return known(x)


def _computable(op: Op) -> bool:
    """Whether it may be computed at another time: it has no effect, and reads no memory."""
    record = OPS[op.name]
    return record.alias or record.total or record.family == "elementwise"


class Ahead:
    """Copies what known_ahead approves of, with the loop variable replaced."""

    def __init__(self, node: For, at: Operand, names: Names):
        self.node, self.names, self.made = node, names, made_in(node)
        self.known: dict[SSAValue, Operand] = {node.var.value: at}

    def copy(self, x: Operand, out: list[Node]) -> Operand:
        if not isinstance(x, SSAValue):
            return x
        if x not in self.known:
            self.known[x] = self._made(x, out) if x in self.made else x
        return self.known[x]

    def _made(self, x: SSAValue, out: list[Node]) -> Operand:
        op = self.made[x]
        args = tuple(self.copy(a, out) for a in op.args)
        outs = tuple(Def(self.names.fresh(d.value.name), d.type) for d in op.outs)
        out.append(replace(op, args=args, outs=outs))
        return outs[0].value
