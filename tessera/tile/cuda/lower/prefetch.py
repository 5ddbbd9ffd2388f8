"""load(..., prefetch=n): the boxes of n - 1 later iterations are on their way while one is read.

What a matmul reads is copied ahead by its ring (stage_loads.py) and needs none of this. Any other
load in a loop whose place follows from the loop variable gets a `prefetch_box` of the place that
many iterations later. It brings lines into the L2 cache and holds no registers, so that it can be
wrong about nothing: beyond the end of a tensor nothing is asked for.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.lower.next_iteration import Ahead, known_ahead
from tessera.tile.ir.ir import (
    Const,
    Def,
    For,
    Function,
    Names,
    Node,
    Op,
    Operand,
    SSAValue,
    definitions,
    with_regions,
)
from tessera.tile.ir.types import Scalar, View


def prefetch_boxes(function: Function) -> Function:
    """The function with a `prefetch_box` in front of the loads that ask for one."""
    return _Prefetcher(function).run()


class _Prefetcher:
    def __init__(self, function: Function):
        self.function, self.names = function, Names.of(function)
        self.types = definitions(function)

    def run(self) -> Function:
        return replace(self.function, body=self.block(self.function.body))

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.node(n) for n in nodes)

    def node(self, node: Node) -> Node:
        if isinstance(node, Op):
            return node
        node = with_regions(node, self.block)
        return self.loop(node) if isinstance(node, For) else node

    def loop(self, node: For) -> For:
        out: list[Node] = []
        for inner in node.body:
            if isinstance(inner, Op) and self.asks(inner) and known_ahead(node, inner.args[0]):
                self.ahead(node, inner, out)
            out.append(inner)
        return replace(node, body=tuple(out))

    def asks(self, op: Op) -> bool:
        if op.name != "load_tile" or (op.attr.get("prefetch") or 1) < 2:
            return False
        place = self.types[op.args[0]]  # type: ignore[index]
        return isinstance(place, View) and place.space == "global"

    def ahead(self, node: For, load: Op, out: list[Node]) -> None:
        """The box of prefetch - 1 iterations later."""
        made: list[Node] = []
        t = node.var.type
        assert isinstance(t, Scalar)
        iterations: Operand = Const(load.attr["prefetch"] - 1, t.dtype)
        step = self.op(made, "mul", (node.step, iterations), t, load)
        at = self.op(made, "add", (node.var.value, step), t, load)
        box = Ahead(node, at, self.names).copy(load.args[0], made)
        out += [*made, Op("prefetch_box", (box,), (), (), load.where)]

    def op(self, out: list[Node], name: str, args: tuple[Operand, ...], t: Scalar,
           load: Op) -> Operand:
        if all(isinstance(a, Const) for a in args):
            return Const(args[0].value * args[1].value, t.dtype)  # type: ignore[union-attr]
        value: SSAValue = self.names.fresh("ahead")
        out.append(Op(name, args, (Def(value, t),), (), load.where))
        return value


__all__ = ["prefetch_boxes"]
