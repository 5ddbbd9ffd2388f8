"""Elements that are read in other extents than those they are made in are made in these.

    reshape(exp(x) * w, s) + y                ->  exp(reshape(x, s)) * w' + y        # one loop
    reshape((r - mean(r, -1)) * g, s) + y     ->  (reshape(r, s) - m') * g' + y      # r is memory

Loops end at a reshape, so what is in front of one was written and read. w', m' and g' are numbers
of w, mean and g for the axes of s: the numbers of a group of channels, for each of its channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from math import prod

from ....lazy_dataclass import dataclass
from ...ir import Graph, Node, Value, producers_of, readers_of, value_bytes
from ...schedule.boundaries import LEAST_BYTES, MOST_OPS
from ...schedule.loop_axes import extents_of
from ...schedule.loop_ops import loop_space
from ...simplify import Rewriter, rebuild, remove_dead
from ..kernels.spell import COMBINE
from .data_movement import is_plain_loop, widens

Shape = tuple[int, ...]
_Made = dict[tuple[Value, Shape], Value]  # by what it was, in the extents of which loop
FEW = 16  # elements for each number that is repeated along part of an axis, at least


def hoist_reshapes(graph: Graph) -> Graph:
    """The graph with loops in front of reshapes in the extents of the loops behind these."""
    cutter, made = _Reshaped(graph), dict[Shape, _Made]()

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op.name != "reshape" or not cutter.may_be_made(node):
            return None
        shape = extents_of(node.outputs[0])
        return cutter.emit(rw, node.inputs[0], shape, made.setdefault(shape, {}))

    return remove_dead(rebuild(graph, visit))


@dataclass
class _Chain:
    """What a value is made of by loops: the nodes, values of all of its extents in memory, and
    numbers."""

    nodes: set[Node] = field(default_factory=set)
    whole: set[Value] = field(default_factory=set)
    numbers: set[Value] = field(default_factory=set)


class _Reshaped:
    def __init__(self, graph: Graph):
        self.readers, self.results = readers_of(graph), set(graph.outputs)
        self.maker = producers_of(graph)

    def may_be_made(self, node: Node) -> bool:
        """Whether loops behind a reshape make what it reads, and move fewer bytes so."""
        v, y = node.inputs[0], node.outputs[0]
        made = self.maker.get(v)
        if made is None or not is_plain_loop(made) or y in self.results or v in self.results:
            return False
        if not all(isinstance(n, int) and n for x in (v, y) for n in x.aval.shape):
            return False
        chain = self.chain(v)
        if chain is None or len(chain.nodes) > MOST_OPS:
            return False
        few = not chain.whole  # numbers of rows and columns: a matmul's kernel need not wait
        if not self.readers.get(y) or not all(
                self.computes(n, y, few) for n in self.readers[y]) or not all(
                self.computes(n, v, few) or n is node for n in self.readers[v]):
            return False
        atoms = common_axes(extents_of(v), extents_of(y))
        if atoms is None or not all(self.spreads(x, v, y, atoms) for x in chain.numbers):
            return False
        # Statistics, say, read what it is made of in any case.
        twice = bool(chain.numbers) or any(
            len(self.readers[x]) > 1 for n in chain.nodes for x in n.outputs)
        return not twice or sum(map(value_bytes, chain.whole)) < 2 * value_bytes(v)

    def computes(self, node: Node, v: Value, few: bool) -> bool:
        """Whether a loop over v's extents, or a reduction of it, takes it in, whose other elements
        no matmul makes unless v is made of few."""
        loop = loop_space(node) is not None and node.outputs[0].aval.shape == v.aval.shape
        return (loop or node.op.reduction in COMBINE) and not node.op.beside and (few or all(
            not self.of_product(x) for x in node.inputs if x is not v))

    def of_product(self, v: Value) -> bool:
        """Whether a matmul's kernel may make it: what such a kernel takes along, it waits for."""
        seen, ahead = set[Value](), [v]
        while ahead and len(seen) < MOST_OPS:
            made = self.maker.get(ahead.pop())
            if made is None or made.outputs[0] in seen:
                continue
            if made.op.matmul:
                return True
            seen.update(made.outputs)
            if made.op.name == "reshape" or is_plain_loop(made):
                ahead += [x for x in made.inputs if prod(extents_of(x)) >= prod(extents_of(v))]
        return False

    def chain(self, v: Value) -> _Chain | None:
        """None where something of it is not as dense in memory as it is read."""
        found, ahead, shape = _Chain(), [v], extents_of(v)
        while ahead and len(found.nodes) <= MOST_OPS:
            x = ahead.pop()
            made = self.maker.get(x)
            if not x.aval.ndim or x in found.whole or made in found.nodes:
                continue
            if extents_of(x) != shape:
                found.numbers.add(x)
            elif made is not None and is_plain_loop(made) and not made.op.beside:
                found.nodes.add(made)
                ahead += made.inputs
            elif made is None or self.is_dense(made):
                found.whole.add(x)
            else:
                return None
        return found

    def is_dense(self, made: Node) -> bool:
        """Whether what it makes lies in memory whoever reads it, and in the order of its axes."""
        if loop_space(made) is not None or made.op.matmul or made.op.beside:
            return False
        if made.op.name == "reshape":
            before = self.maker.get(made.inputs[0])
            return before is None or self.is_dense(before)
        return made.op.lies(made.attrs).kind != "view"

    def spreads(self, x: Value, v: Value, y: Value, atoms: Shape) -> bool:
        """Whether numbers of v are few for y, too."""
        shape = numbers_for(_padded(x, v), extents_of(v), extents_of(y), atoms)
        repeated = prod(shape) > prod(extents_of(x))
        return not repeated or (prod(shape) * FEW <= prod(extents_of(y))
                                and value_bytes(v) >= LEAST_BYTES)

    def emit(self, rw: Rewriter, old: Value, shape: Shape, known: _Made) -> Value:
        """A value of the graph in the extents of a shape."""
        key = old, extents_of(old)
        if key not in known:
            known[key] = self._emit(rw, old, shape, known)
        return known[key]

    def _emit(self, rw: Rewriter, old: Value, shape: Shape, known: _Made) -> Value:
        made, space = self.maker.get(old), extents_of(old)
        if made is None or not is_plain_loop(made):
            return _cut(rw, rw.env[old], shape)
        parts = list[Value]()
        for x in made.inputs:
            if not x.aval.ndim:
                parts.append(rw.env[x])
            elif extents_of(x) == space:
                parts.append(self.emit(rw, x, shape, known))
            else:
                if (x, space) not in known:
                    known[x, space] = self.numbers(rw, x, _padded(x, old), space, shape)
                parts.append(known[x, space])
        return rw.again(made, *parts)

    def numbers(self, rw: Rewriter, x: Value, lies: Shape, space: Shape, shape: Shape) -> Value:
        """Numbers in another shape; what was widened is widened where it is computed with."""
        cast = self.maker.get(x)
        if cast is None or cast.op.name != "cast" or not widens(cast):
            return _spread(rw, rw.env[x], lies, space, shape)
        return rw.again(cast, _spread(rw, rw.env[cast.inputs[0]], lies, space, shape))


def _padded(x: Value, v: Value) -> Shape:
    return (1,) * (v.aval.ndim - x.aval.ndim) + extents_of(x)


def _spread(rw: Rewriter, x: Value, lies: Shape, space: Shape, shape: Shape) -> Value:
    """Numbers of a space for the same elements in another shape."""
    atoms = common_axes(space, shape)
    assert atoms is not None
    along = _along(lies, space, atoms)
    mine = tuple(n if a else 1 for n, a in zip(atoms, along, strict=True))
    out = numbers_for(lies, space, shape, atoms)
    wide = tuple(n if any(along[i] for i in run) else 1
                 for run in runs_of(atoms, shape) for n in (atoms[i] for i in run))
    x = _cut(rw, x, mine)
    x = x if wide == mine else rw.emit("broadcast_to", x, shape=wide)
    return _cut(rw, x, out)


def _cut(rw: Rewriter, x: Value, shape: Shape) -> Value:
    """x in other extents: once, whatever it was cut into before."""
    before = rw.made_by(x, "reshape")
    x = x if before is None else before.inputs[0]
    return x if extents_of(x) == shape else rw.emit("reshape", x, shape=shape)


def numbers_for(lies: Shape, space: Shape, shape: Shape, atoms: Shape) -> Shape:
    """The extents of numbers, which lie along some axes of a space, in another shape."""
    along = _along(lies, space, atoms)
    return tuple(n if any(along[i] for i in run) else 1
                 for run, n in zip(runs_of(atoms, shape), shape, strict=True))


def _along(lies: Shape, space: Shape, atoms: Shape) -> list[bool]:
    """Along which atoms numbers lie."""
    found = [False] * len(atoms)
    for run, mine in zip(runs_of(atoms, space), lies, strict=True):
        for i in run:
            found[i] = mine != 1
    return found


def common_axes(one: Shape, other: Shape) -> Shape | None:
    """The extents of which both shapes' axes are products, in order; None where there are none.

    (32, 25088) and (256, 56, 56):  (32, 8, 56, 56)
    """
    ends = sorted({*_ends(one), *_ends(other)})
    if any(b % a for a, b in zip(ends, ends[1:], strict=False)):
        return None
    return tuple(b // a for a, b in zip(ends, ends[1:], strict=False))[::-1]


def _ends(shape: Shape) -> Iterator[int]:
    """The elements behind each axis, from the last on, and all."""
    return (prod(shape[a:]) for a in range(len(shape), -1, -1))


def runs_of(atoms: Shape, shape: Shape) -> list[list[int]]:
    """The atoms of each axis of a shape; none of an axis of one element."""
    found, at = list[list[int]](), 0
    for extent in shape:
        run = list[int]()
        while prod(atoms[i] for i in run) < extent:
            run.append(at)
            at += 1
        found.append(run)
    return found


__all__ = ["common_axes", "hoist_reshapes", "numbers_for"]
