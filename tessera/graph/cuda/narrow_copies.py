"""Copies of parameters in a narrower type, which live from one call of a step to the next.

A step casts its f32 parameters to bf16 first of all, and ends by writing new ones. Where a donated
argument is cast whole and a result of its extents and type is made from it, the program takes the
copy as one more argument and writes that of the result as one more result, beside it: four bytes
less to read for each parameter. The copy stays with the tensor that the call returns, and the next
call that is given this very tensor has it. A tensor that comes from elsewhere, or whose memory
somebody was given since, is cast first, by a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ...numerics import NumericType
from ...tensor import Tensor
from ...tile.launch.resident import Resident
from ..ir import Graph, Node, Value
from ..ops.convert import CAST
from ..schedule.op_ids import number

LEAST = 1 << 16  # elements that are worth a copy: a few are cast where they are read


@dataclass(frozen=True)
class NarrowCopy:
    """argument: the number of the one that is cast.  result: that of the one made from it."""

    argument: int
    result: int
    type: NumericType


class NarrowCopies:
    """The copies of a program. graph: with them as its last inputs and outputs.

    run: makes what runs a graph on arguments, of those to be cast first.
    """

    def __init__(self, graph: Graph, copies: Sequence[NarrowCopy], casts: Graph,
                 run: Callable[[Graph], Any]):
        self.graph, self.copies, self._casts, self._run = graph, tuple(copies), casts, run

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the copies among the arguments."""
        count = len(self.graph.inputs)
        return tuple(range(count - len(self.copies), count))

    @cached_property
    def _cast(self) -> Any:
        return self._run(self._casts)

    def taken(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The copies for a call with these arguments, which have none from here on."""
        found = [_taken(leaves[c.argument], c.type) for c in self.copies]
        kept = [x for x in found if x is not None]
        if len(kept) == len(found):
            return list[Tensor](kept)
        return self._cast.tensors([leaves[c.argument] for c in self.copies])

    def kept(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The results of the function; the copies stay with those that they are of."""
        count = len(results) - len(self.copies)
        for c, copy in zip(self.copies, results[count:], strict=True):
            x = results[c.result]
            assert isinstance(x, Resident) and isinstance(copy, Resident)
            x.narrow = {**(x.narrow or {}), c.type: copy}
        return list(results[:count])


def _taken(x: Tensor, to: NumericType) -> Resident | None:
    return x.narrow.pop(to, None) if isinstance(x, Resident) and x.narrow else None


def narrow_copies(graph: Graph, donated: Sequence[int], run: Callable[[Graph], Any]
                  ) -> NarrowCopies | None:
    """The copies that a graph may keep from call to call, None where there are none."""
    if not _found(graph, donated):
        return None
    graph = number(graph)  # its nodes keep the ids that they are printed with
    found = _found(graph, donated)
    copies, inputs, outputs, casts = [], list[Value](), list[Value](), list[Node]()
    env: dict[Value, Value] = {}
    first: list[Node] = []
    for copy, nodes in found:
        copies.append(copy)
        inputs.append(Value(nodes[0].outputs[0].aval))
        env |= {n.outputs[0]: inputs[-1] for n in nodes}
        casts.append(_cast_of(graph.outputs[copy.result], nodes[0]))
        first.append(_cast_of(Value(nodes[0].inputs[0].aval), nodes[0]))
        outputs.append(casts[-1].outputs[0])
    nodes = [Node(n.op, tuple(env.get(v, v) for v in n.inputs), n.attrs, n.outputs, n.where)
             for n in graph.nodes if n.op is not CAST or n.outputs[0] not in env]
    whole = Graph(graph.name, (*graph.inputs, *inputs), graph.captures, (*nodes, *casts),
                  (*(env.get(v, v) for v in graph.outputs), *outputs))
    before = Graph(f"{graph.name}_copies", tuple(n.inputs[0] for n in first), (), tuple(first),
                   tuple(n.outputs[0] for n in first))
    return NarrowCopies(whole, copies, before, run)


def _cast_of(x: Value, like: Node) -> Node:
    return Node(CAST, (x,), like.attrs, (Value(like.outputs[0].aval),), like.where)


def _found(graph: Graph, donated: Sequence[int]) -> list[tuple[NarrowCopy, list[Node]]]:
    """Each copy with the casts that it stands for."""
    numbers = {graph.inputs[i]: i for i in donated}
    casts: dict[tuple[int, NumericType], list[Node]] = {}
    for node in graph.nodes:
        i = numbers.get(node.inputs[0]) if node.op is CAST else None
        if i is not None and _pays(node):
            casts.setdefault((i, node.attrs["to"]), []).append(node)
    results = _results_of(graph, numbers, {i for i, _ in casts})
    return [(NarrowCopy(i, results[i], to), nodes) for (i, to), nodes in casts.items()
            if i in results]


def _pays(cast: Node) -> bool:
    x, y = cast.inputs[0].aval, cast.outputs[0].aval
    return (all(isinstance(n, int) for n in x.shape) and prod(x.shape) >= LEAST
            and y.dtype.bits < x.dtype.bits and not y.dtype.packed)


def _results_of(graph: Graph, donated: dict[Value, int], wanted: set[int]) -> dict[int, int]:
    """By argument, the result that is made of it element by element; of several the one that is
    made of the most donated arguments, as parameters are of themselves and their moments."""
    maker = {v: n for n in graph.nodes for v in n.outputs}
    best: dict[int, tuple[int, int]] = {}
    for j, y in enumerate(graph.outputs):
        if y not in maker:
            continue
        seen, todo, made_of = {y}, [y], set[int]()
        while todo:
            v = todo.pop()
            if v in donated and v.aval.type == y.aval.type:
                made_of.add(donated[v])
            node = maker.get(v)
            if node is not None and (node.op.loop or node.op.tile):
                new = [x for x in node.inputs if x not in seen and x.aval.shape == y.aval.shape]
                seen.update(new)
                todo += new
        for i in made_of & wanted:
            best[i] = max(best.get(i, (0, 0)), (len(made_of), -j))
    return {i: -j for i, (_, j) in best.items()}


__all__ = ["NarrowCopies", "NarrowCopy", "narrow_copies"]
