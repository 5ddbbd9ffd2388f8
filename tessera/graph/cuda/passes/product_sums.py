"""Sums of matmuls as one call: a b + c d is a matmul whose contracted axis goes on.

    add(add(a b, x), c d)      # is add(a b + c d, x), the first of which is one kernel

So are the gradients of what several matmuls read. One kernel after another would write each result
in f32 and read it again, beside its own sums, for which it has half of the registers then. In one
kernel the sums stay where they are, and are rounded once. It takes the operands of all in turn, of
any layouts and lengths, through the same shared memory.
"""

from __future__ import annotations

from dataclasses import replace

from ....lazy_dataclass import dataclass
from ....runtime.generations import WarpgroupMatmul
from ...ir import Graph, Node, Value, uses
from ...op import Aval
from ...simplify import Rewriter, remove_dead
from .library_ops import MOST_PAIRS, PRODUCT, merged_line


def sum_products(graph: Graph, chip: WarpgroupMatmul | None) -> Graph:
    """The graph with each sum of products that nothing else reads as one product of several pairs
    of operands. chip: how warpgroups multiply; other matmuls keep operands in memory of their own
    for each loop."""
    return graph if chip is None else remove_dead(_Sums(graph, chip).graph())


@dataclass(frozen=True)
class _Term:
    """A summand. product: the call that makes it, None of others."""

    value: Value
    product: Node | None = None


class _Sums:
    def __init__(self, graph: Graph, chip: WarpgroupMatmul):
        self.chip, self.source, self.rw = chip, graph, Rewriter()
        self.count = uses(graph)
        self.inner = {v for n in graph.nodes if n.op.name == "add" for v in n.inputs
                      if self.count[v] == 1 and v.aval == n.outputs[0].aval}

    def graph(self) -> Graph:
        """Known values have no node any more, so that every value stands for itself, but for sums.
        """
        source, rw = self.source, self.rw
        for node in source.nodes:
            inputs = tuple(rw.env.get(v, v) for v in node.inputs)
            rw.where = node.where
            node = node if inputs == node.inputs else replace(node, inputs=inputs)
            total = self.total(node)
            if total is None:
                rw.add(node)
            else:
                rw.env[node.outputs[0]] = total
        outputs = tuple(rw.env.get(v, v) for v in source.outputs)
        return replace(source, nodes=tuple(rw.nodes), outputs=outputs)

    def total(self, node: Node) -> Value | None:
        """A sum with products of several pairs; None where it has no two that go together."""
        if node.op.name != "add" or node.outputs[0] in self.inner:
            return None
        rw, aval = self.rw, node.outputs[0].aval
        terms = [t for v in node.inputs for t in self.terms(v, aval)]
        alike: dict[object, list[_Term]] = {}
        for t in terms:
            if t.product is not None:
                alike.setdefault(_kind(t.product), []).append(t)
        made: list[tuple[Value, list[_Term]]] = []
        for some in alike.values():
            while len(some) > 1:
                now, some = some[:MOST_PAIRS], some[MOST_PAIRS:]
                made.append((self.merged([t.product for t in now if t.product], node), now))
        if not made:
            return None
        gone = [t for _, some in made for t in some]
        total, *rest = [v for v, _ in made] + [t.value for t in terms if t not in gone]
        for v in rest:
            total = rw.emit("add", total, v, **node.attrs)
        return total

    def terms(self, v: Value, aval: Aval) -> list[_Term]:
        """What a value of a sum is itself the sum of, in order."""
        made = self.rw.producer.get(v)
        if made is None or self.count[v] != 1:
            return [_Term(v)]
        if made.op.name == "add" and v.aval == aval:
            return [t for x in made.inputs for t in self.terms(x, aval)]
        while made is not None and made.op.name == "reshape" and self.count[made.inputs[0]] == 1:
            made = self.rw.producer.get(made.inputs[0])
        takes = made is not None and made.op is PRODUCT and self.takes(made) and (
            v.aval.shape == aval.shape)
        return [_Term(v, made if takes else None)]

    def takes(self, product: Node) -> bool:
        """Whether TMA brings its operands and wgmma adds to what it is given."""
        operands = [self.chip.operands.get(v.aval.dtype.name) for v in product.inputs]
        return len(product.inputs) == 2 and all(
            o is not None and not o.short_sums for o in operands) and all(
            isinstance(n, int) for v in product.inputs for n in v.aval.shape) and not any(
            v.aval.shape[-1] * v.aval.dtype.bits % 128 for v in product.inputs)

    def merged(self, products: list[Node], node: Node) -> Value:
        rw, first, shape = self.rw, products[0], node.outputs[0].aval.shape
        attrs = {**first.attrs, **{name: "".join(p.attrs[name] for p in products)
                                   for name in ("layout", "copied")}}
        out = Value(first.outputs[0].aval)
        rw.where = merged_line(node.where, [*products, node])
        made = Node(PRODUCT, tuple(v for p in products for v in p.inputs), attrs, (out,), rw.where)
        rw.add(made)
        return out if out.aval.shape == shape else rw.emit("reshape", out, shape=shape)


def _kind(product: Node) -> object:
    """What products of one sum have in common: the result, and the type of their operands."""
    return (product.outputs[0].aval, product.attrs["accum"],
            *(v.aval.dtype for v in product.inputs))


__all__ = ["sum_products"]
