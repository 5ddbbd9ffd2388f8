"""Sharding propagation: a layout for every value of a graph, and the collectives between them.

The graph is walked once, in order. Of the ways in which an op can run (strategies.py), the one is
taken that receives the fewest bytes, where work that every rank repeats counts too. Sums over a
split dimension stay pending, and pass through linear ops, until an op needs the total: then they
are reduced into whatever layout that op wants. The result is plain data, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

from tessera.errors import SourceLine
from tessera.graph.ir import Graph, Node, Value, producers_of

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..layout import Layout, replicated
from ..partition import extents
from .dimension_labels import labels_of
from .layout_changes import Hop, hops, received
from .narrow_terms import is_narrow, rounds_terms, sent_dtype
from .partitioned_steps import CONSTRAINTS, Held, LayoutHop, PartitionedOp, Step, remove_dead
from .rewrites import rewritten
from .strategies import Way, placements, ways

# One byte from another rank counts as so many operations of this one. An H200 on NVLink does about
# 2000 by its data sheet (989 TFLOP/s, 450 GB/s); a CPU far fewer.
WORK_PER_BYTE = 200.0


@dataclass(frozen=True)
class Propagated:
    """The steps of a graph on a mesh, in order; `outputs` are in their final layouts, `results` are
    those layouts with what is to be gathered anew marked."""

    graph: Graph
    mesh: Mesh
    steps: tuple[Step, ...]
    inputs: tuple[Held, ...]
    outputs: tuple[Held, ...]
    results: tuple[Layout, ...] = ()


# Ops that hold graphs: rule(node, layouts of its operands, mesh, where results will have to lie)
# gives the layouts in which the operands must come, those of the results, and the bodies. Filled by
# control_flow.py.
HELD: dict[str, Callable[[Node, Sequence[Layout], Mesh, Sequence[Layout | None]], Any]] = {}


def propagate(graph: Graph, layouts: Mapping[Value, Layout], mesh: Mesh,
              wanted: Sequence[Layout | None] | None = None, terms: Container[Value] = (),
              outside: Mapping[Value, Layout] = MappingProxyType({})) -> Propagated:
    """Layouts and collectives of a graph whose inputs and captures lie as `layouts` say; what it
    does not name is replicated.

    wanted: of a held graph, the layouts its results must have; None for one where it is made,
    which may be pending
    terms: of the body of a loop, what is only added to what the iterations hand on, whose sum over
    ranks is made once, behind the loop
    outside: of what it is given whole, how it lies outside: what is like that lies there
    """
    given = [*graph.inputs, *(v for v, _ in graph.captures)]
    full = {v: layouts.get(v) or replicated(mesh, v.aval.ndim) for v in given}
    lie = {**full, **outside}
    walk = _Walk(graph, mesh, wishes(graph, lie), wishes(graph, lie, wide=True), terms, outside)
    for v, layout in full.items():
        walk.hold(v, layout.unmarked())
        walk.mark(v, layout.regather)
    asked = set(graph.outputs) if wanted is None else set()
    for node in graph.nodes:
        walk.visit(node)
        for v in asked.intersection(node.outputs):
            walk.settle(v)  # now, so that its reduction waits for others and joins them
    outputs = tuple(walk.settle(v) for v in graph.outputs) if wanted is None else \
        tuple(walk.hand_on(v, at) for v, at in zip(graph.outputs, wanted, strict=True))
    inputs = tuple((v, layout.unmarked()) for v, layout in full.items())
    results = tuple(walk.marked(v, layout) for v, layout in outputs)
    steps = tuple(remove_dead(walk.steps, outputs))
    return Propagated(graph, mesh, steps, inputs, outputs, results)


def wishes(graph: Graph, layouts: Mapping[Value, Layout], wide: bool = False
           ) -> dict[Value, Layout]:
    """Layouts that values are constrained to later, in themselves or times a number; `wide`: or
    joined with others element by element.

    A gradient is aligned with its parameter; where the program then splits it (ts.dist.zero), it
    goes there at once: one reduce_scatter in place of an all_reduce.
    """
    found: dict[Value, Layout] = {}
    for node in reversed(graph.nodes):
        if node.op.name in CONSTRAINTS:
            wish = found.get(node.outputs[0])
            if wish is None or not yields(node, wish, graph):
                wish = _asked(node, layouts)
            if wish is not None:
                found.setdefault(node.inputs[0], wish)
        elif (node.op.loop is not None or node.op.name == "cast") and node.outputs[0] in found:
            same = [v for v in node.inputs if extents(v.aval) == extents(node.outputs[0].aval)]
            if wide or sum(not _small(v) for v in node.inputs) == len(same) == 1:
                found.update((v, found.get(v, found[node.outputs[0]])) for v in same)
    return found


def _asked(node: Node, layouts: Mapping[Value, Layout]) -> Layout | None:
    """The layout of a constraint that does not depend on how its operand lies."""
    like = node.inputs[1:]
    if not all(v in layouts for v in like) or (not like and node.op.name != "shard"):
        return None
    at = [replicated(next(iter(layouts.values())).mesh, node.inputs[0].aval.ndim),
          *(layouts[v] for v in like)]
    return CONSTRAINTS[node.op.name](node, at).unmarked()


def yields(node: Node, wish: Layout, graph: Graph) -> bool:
    """Whether a constraint gives way to a later one: alignment of what is no result."""
    return node.op.name == "shard_like" and node.outputs[0] not in graph.outputs


class _Walk:
    """Where every value is so far, and the steps that brought it there."""

    def __init__(self, graph: Graph, mesh: Mesh, wishes: Mapping[Value, Layout],
                 hints: Mapping[Value, Layout], terms: Container[Value],
                 outside: Mapping[Value, Layout]):
        self.graph, self.mesh, self.wishes, self.hints = graph, mesh, wishes, hints
        self.terms, self.outside = terms, outside
        self.gradients = set[Value]()  # what is aligned with a parameter, and sums of such
        self.due: dict[Value, Layout] = {}  # those that wait, and how they will lie
        self.regather: dict[Value, tuple[str, ...]] = {}  # gathered anew for each use
        self.derived: dict[Value, Node] = {}  # casts and transposes of such
        self.steps: list[Step] = []
        self.at: dict[Value, list[Layout]] = {}
        self.made_by: dict[Value, Node] = {}
        self.views: dict[Value, Node] = {}  # what makes transposes and reshapes
        self.remade: dict[Value, Node] = {}  # what stretches small operands
        self.products = set[Value]()  # of matmuls, and sums and multiples of such
        self.readers: dict[Value, list[Node]] = {}
        self.makers = producers_of(graph)
        for node in graph.nodes:
            for v in node.inputs:
                self.readers.setdefault(v, []).append(node)
            if node.op.name == "shard_like" or (
                    node.op.name == "add" and self.gradients.issuperset(node.inputs)):
                self.gradients.update(node.outputs)

    def hold(self, v: Value, layout: Layout) -> None:
        self.at.setdefault(v, []).append(layout)

    def home(self, v: Value) -> Layout:
        """The layout in which a value was made."""
        return self.at[v][0]

    def mark(self, v: Value, axes: Sequence[str]) -> None:
        """Gather `v` anew for each use over those of the axes that split it."""
        own = tuple(a for a in axes if self.home(v).dim_of(a) is not None)
        if own:
            self.regather[v] = own

    def marked(self, v: Value, layout: Layout) -> Layout:
        axes = tuple(a for a in self.regather.get(v, ()) if layout.dim_of(a) is not None)
        return replace(layout, regather=axes) if axes else layout

    def now(self, v: Value) -> Layout:
        """The layout to go on with: the first without a pending reduction, if there is one."""
        return next((at for at in self.at[v] if not at.pending), self.home(v))

    # --- ops ---------------------------------------------------------------------------------
    def visit(self, node: Node) -> None:
        if node.op.name in CONSTRAINTS:
            self._constrain(node)
            return
        if node.op.name in HELD:
            self._hold_graphs(node)
            return
        instead = rewritten(node, [self.now(v) for v in node.inputs])
        if instead is not None:
            self._visit_all(instead, node)
            return
        if node.op.makes and node.op.makes != "key":  # made where they are needed
            for v in node.outputs:
                self.made_by[v] = node
        passed = self._passes(node)
        way = passed or self._best(node)
        for v, layout in zip(node.inputs, way.ins, strict=True):
            self.bring(v, layout, node)
        self.steps.append(PartitionedOp(node, way.ins, way.outs, placed=way.placed))
        for v, layout in zip(node.outputs, way.outs, strict=True):
            self.hold(v, layout)
        due = [self.due[v] for v in node.inputs if v in self.due and v not in self.terms]
        if due and way.outs[0].pending:
            self.align(node.outputs[0], due[0])
        if node.op.matmul or passed and self.products.issuperset(
                v for v, at in zip(node.inputs, way.ins, strict=True) if at.pending):
            self.products.update(node.outputs)
        if self._is_stretch(node):
            self.remade.update((v, node) for v in node.outputs)
        elif node.op.view:
            self.views.update((v, node) for v in node.outputs)
        if len(node.inputs) == 1 and node.inputs[0] in self.regather:
            for v in node.outputs:
                self.mark(v, self.regather[node.inputs[0]])
                self.derived[v] = node

    def _visit_all(self, graph: Graph, node: Node) -> None:
        """A graph in place of a node."""
        env = dict(zip((*graph.inputs, *graph.outputs), (*node.inputs, *node.outputs), strict=True))
        for inner in graph.nodes:
            ins, outs = ([env.setdefault(v, v) for v in vs] for vs in (inner.inputs, inner.outputs))
            self.visit(Node(inner.op, tuple(ins), inner.attrs, tuple(outs), inner.where))

    def _hold_graphs(self, node: Node) -> None:
        """An op that holds graphs: its bodies are partitioned too."""
        given = [self.marked(v, self.now(v).settled()) for v in node.inputs]
        hints = [self.hints.get(v) for v in node.outputs]
        found = HELD[node.op.name](node, given, self.mesh, hints)
        ins = tuple(at.unmarked() for at in found.ins)
        for v, layout in zip(node.inputs, ins, strict=True):
            self.bring(v, layout, node)
        self.steps.append(PartitionedOp(node, ins, found.outs, found.bodies))
        for i, (v, layout) in enumerate(zip(node.outputs, found.outs, strict=True)):
            self.hold(v, layout)
            if i in found.gradients:
                self.align(v, layout.settled())

    def _loose(self, node: Node) -> list[int]:
        """Operands that are made where they are needed."""
        return [i for i, v in enumerate(node.inputs) if v in self.made_by or v in self.remade]

    def _is_stretch(self, node: Node) -> bool:
        """Whether an op makes more than it is given, aside from what is made where it is needed."""
        given = sum(prod(extents(v.aval)) for v in node.inputs
                    if v not in self.made_by)
        return (node.op.loop is not None or node.op.name == "broadcast_to") and \
            given < prod(extents(node.outputs[0].aval))

    def _best(self, node: Node) -> Way:
        labels = labels_of(node)
        given = [self._suggests(v, node) for v in node.inputs]
        sums = [i for i, v in enumerate(node.inputs) if self.now(v).pending]  # go anywhere
        wished = [self.hints.get(v) or (self._beside(v) if sums else None) for v in node.outputs]
        found = ways(node, labels, given, self.mesh, wished, [*self._loose(node), *sums])
        found += [w for w in placements(node, given) if node.op.name != "reshape" or
                  self._goes_on(node.outputs[0], w.outs[0])]
        return min(found, key=lambda way: self._cost(node, way)) if len(found) > 1 else found[0]

    def _goes_on(self, v: Value, layout: Layout) -> bool:
        """Whether matmuls that read a value, or casts and transposes of it, could take it in this
        layout beside their other operand as that lies. Rows of sequences over the axis by which a
        weight is split could not: one of the two would be gathered for each matmul, and what is
        made of them lies otherwise than what it is joined with."""
        for reader in self.readers.get(v, ()):
            if reader.op.matmul:
                given = [layout if x is v else self._expected(x, reader) for x in reader.inputs]
                known = [x for x in given if x is not None]
                if len(known) == len(given) and not any(
                        way.ins == tuple(known)
                        for way in ways(reader, labels_of(reader), known, self.mesh)):
                    return False
            elif len(reader.inputs) == 1:
                there = self._through(reader, layout)
                if there is not None and not self._goes_on(reader.outputs[0], there):
                    return False
        return True

    def _expected(self, v: Value, node: Node) -> Layout | None:
        """How an operand of a node lies, or will where it is made of one that is there."""
        if v in self.at:
            return self._suggests(v, node)
        maker = self.makers.get(v)
        if maker is None or len(maker.inputs) != 1 or maker.op.name in (*CONSTRAINTS, *HELD):
            return None
        given = self._expected(maker.inputs[0], node)
        return None if given is None else self._through(maker, given)

    def _through(self, node: Node, layout: Layout) -> Layout | None:
        """How the result of an op of one operand lies where nothing is moved."""
        if node.op.name in (*CONSTRAINTS, *HELD):
            return None
        return next((way.outs[0] for way in ways(node, labels_of(node), [layout], self.mesh)
                     if way.ins == (layout,) and not way.outs[0].pending), None)

    def _beside(self, v: Value) -> Layout | None:
        """How something lies that `v`, behind casts, is joined with element by element."""
        for reader in self.readers.get(v, ()):
            if reader.op.name == "cast":
                if (found := self._beside(reader.outputs[0])) is not None:
                    return found
            elif reader.op.loop is not None:
                for x in reader.inputs:
                    if x is not v and x in self.at and extents(x.aval) == extents(v.aval):
                        return self.now(x).settled()
        return None

    def _suggests(self, v: Value, node: Node) -> Layout:
        """How an operand lies; what is gathered for each use, as it will be for this one. Ops of it
        alone work on the shards, and ops element by element where `_works_on_shards` says so."""
        at = self.now(v).settled()
        others = [x for x in node.inputs if x is not v and not _small(x)]
        if v in self.regather and others and not self._works_on_shards(v, at, others, node):
            return at.gathered(self.regather[v])
        return at

    def _works_on_shards(self, v: Value, at: Layout, others: Sequence[Value], node: Node) -> bool:
        """Whether an op element by element has its other operands along the shards of `v`: as an
        optimizer's update, or positions of a sequence that is split so, too. A batch that the same
        axis splits otherwise stays where it is: with one row to a rank, moving it would cost no
        more than to gather the positions that are added to it, and all that follows would be
        split like these."""
        if node.op.loop is None:
            return False
        same = extents(v.aval) == extents(node.outputs[0].aval)
        for axis in self.regather[v]:
            mine, *theirs = (at.ndim - d for at in (at, *(self.now(x) for x in others))
                             if (d := at.dim_of(axis)) is not None)  # shapes align at their ends
            if any(d != mine for d in theirs) or not (theirs or same):
                return False
        return True

    def _cost(self, node: Node, way: Way) -> float:
        """Bytes received for this way, what its pending results will cost, and repeated work."""
        total = (way.placed or 0.0) * node.outputs[0].aval.dtype.bits / 8
        for v, layout in zip(node.inputs, way.ins, strict=True):
            if v not in self.made_by and way.placed is None:
                total += self._nearest(v, layout)[0] * v.aval.dtype.bits / 8
        for v, layout in zip(node.outputs, way.outs, strict=True):
            if layout.pending and not self._joins_pending(v, layout.pending):
                n = self.mesh.size(layout.pending)
                local = prod(extents(v.aval)) / prod(layout.parts(d) for d in range(layout.ndim))
                sent = sent_dtype(v, node, self.readers)
                total += local * (n - 1) / n * sent.bits / 8  # as a reduce_scatter
        return total + _work(node) * way.share / WORK_PER_BYTE

    def _joins_pending(self, v: Value, axes: tuple[str, ...]) -> bool:
        """Whether all that reads a value adds it to a sum that waits for the same axes already, or
        to that of all iterations of a loop: it waits with that one, and costs nothing of its own.
        """
        readers = self.readers.get(v, ())
        if self._adds_up(v, axes):
            return True
        return bool(readers) and all(
            r.op.linear == "joint" and any(
                x in self.at and self.now(x).pending == axes and self.now(x).op == "sum"
                for x in r.inputs if x is not v) for r in readers)

    def _adds_up(self, v: Value, axes: Sequence[str]) -> bool:
        """Whether a value, moved and aligned, only goes into a sum of several that waits."""
        if v in self.terms:
            return True
        readers = self.readers.get(v, ())
        if len(readers) != 1:
            return False
        (reader,) = readers
        if reader.op.name == "shard_like":
            like = reader.inputs[1]
            at = self.outside.get(like) or (self.now(like) if like in self.at else None)
            return at is not None and not _uses(at, axes) and self._only_added(reader.outputs[0])
        return bool(reader.op.linear) and len(reader.inputs) == 1 and self._adds_up(
            reader.outputs[0], axes)

    def _nearest(self, v: Value, layout: Layout) -> tuple[float, Layout]:
        """What it costs to bring a value to a layout, in elements, and from which of its own."""
        shape, dtype = extents(v.aval), v.aval.dtype
        return min(((received(have, layout, shape, dtype), have)
                    for have in self.at[v]), key=lambda pair: pair[0])

    def _passes(self, node: Node) -> Way | None:
        """The way in which pending sums pass through a linear op, or a rounding of terms, if that
        is possible."""
        homes = [self.now(v) for v in node.inputs]
        pending = {h.pending for h in homes if h.pending}
        linear = "joint" if self._rounds_terms(node) else node.op.linear
        if not linear or len(pending) != 1 or {h.op for h in homes} - {None, "sum"}:
            return None
        axes = pending.pop()
        waiting = [bool(h.pending) for h in homes]
        if not node.op.view and any(
                w and is_narrow(v.aval.type) for v, w in zip(node.inputs, waiting, strict=True)):
            return None  # each term would be rounded once more
        if linear == "joint":
            waiting = [w or _is_term(v, h, axes, node)
                       for v, h, w in zip(node.inputs, homes, waiting, strict=True)]
            if not all(waiting):
                return None
        if linear == "first" and (waiting != [True, False] or not _small(node.inputs[1])):
            return None
        if linear == "each" and (sum(waiting) != 1 or not any(
                _small(v) for v, w in zip(node.inputs, waiting, strict=True) if not w)):
            return None
        settled = [h.settled() for h in homes]
        found = [w for w in ways(node, labels_of(node), settled, self.mesh)
                 if all(map(_same_splits, w.ins, settled))
                 and not any(_uses(x, axes) for x in (*w.ins, *w.outs))
                 and all(x.op in (None, "sum") for x in w.outs)]
        if not found:
            return None
        ins = tuple(replace(x, pending=axes, op="sum") if waits else x
                    for x, waits in zip(found[0].ins, waiting, strict=True))
        return Way(ins, tuple(_also(x, axes) for x in found[0].outs), 1.0)

    def _rounds_terms(self, node: Node) -> bool:
        """Whether it rounds a product that waits for its sum, and is all that reads it."""
        return rounds_terms(node) and node.inputs[0] in self.products and (
            self.readers.get(node.inputs[0]) == [node]
            and node.inputs[0] not in self.graph.outputs)

    # --- moves -------------------------------------------------------------------------------
    def bring(self, v: Value, layout: Layout, user: Node | None, why: str = "") -> None:
        """Steps after which `v` is there in `layout`."""
        if layout in self.at[v]:
            return
        source = self.made_by.get(v)
        if source is not None and not layout.pending:
            self.steps.append(PartitionedOp(source, tuple(self.home(x) for x in source.inputs),
                                            (layout,)))
            self.hold(v, layout)
            return
        _, have = self._nearest(v, layout)
        reason = why or _reason(v, user, layout)
        if v in self.derived and self._derive(v, layout, reason):
            return
        if v in self.views and self._view(v, layout):
            return
        if v in self.remade and self._remake(v, have, layout):
            return
        here = have
        for hop in hops(have, layout, extents(v.aval), v.aval.dtype):
            self._move(v, hop, reason, user)
            here = hop.target
        if here != layout:
            self.steps.append(LayoutHop(v, Hop("slice", here, layout), reason, _line(user)))
        if v not in self.regather:
            self.hold(v, layout)
        else:
            self.at[v] = [x for x in self.at[v] if x == self.home(v)]

    def _view(self, v: Value, layout: Layout) -> bool:
        """A transpose or reshape of what is there in another layout already: nothing is sent."""
        node = self.views[v]
        for have in self.at[node.inputs[0]][1:]:
            found = [] if have.pending else [
                w for w in ways(node, labels_of(node), [have], self.mesh)
                if w.ins == (have,) and w.outs == (layout,)]
            if found:
                self.steps.append(PartitionedOp(node, found[0].ins, found[0].outs))
                self.hold(v, layout)
                return True
        return False

    def _remake(self, v: Value, have: Layout, layout: Layout) -> bool:
        """What small operands were stretched to, made again where only a slice of it is needed."""
        shape, node = extents(v.aval), self.remade[v]
        if layout.pending or have.pending or received(have, layout, shape, v.aval.dtype):
            return False
        given = [self.now(x) for x in node.inputs]
        found = [w for w in ways(node, labels_of(node), given, self.mesh, [layout],
                                 self._loose(node)) if w.outs == (layout,)]
        if not found:
            return False
        for x, at in zip(node.inputs, found[0].ins, strict=True):
            self.bring(x, at, node)
        self.steps.append(PartitionedOp(node, found[0].ins, found[0].outs))
        self.hold(v, layout)
        return True

    def _derive(self, v: Value, layout: Layout, why: str) -> bool:
        """A cast or transpose of what is gathered anew, made again from its gathered operand: no
        wider type is sent than was given. False when that is not how `layout` comes about."""
        node = self.derived[v]
        x, axes = node.inputs[0], self.regather.get(v, ())
        if x.aval.dtype.bits > v.aval.dtype.bits or any(layout.dim_of(a) is not None for a in axes):
            return False
        given = [self.home(x).settled().gathered(axes)]
        found = [w for w in ways(node, labels_of(node), given, self.mesh) if w.outs == (layout,)]
        if not found:
            return False
        self.bring(x, found[0].ins[0], node, why)
        self.steps.append(PartitionedOp(node, found[0].ins, found[0].outs))
        return True

    def _move(self, v: Value, hop: Hop, why: str, user: Node | None) -> None:
        self.steps.append(LayoutHop(v, hop, why, _line(user), v in self.regather))
        if v not in self.regather and hop.target not in self.at[v]:
            self.hold(v, hop.target)

    def settle(self, v: Value) -> Held:
        """A result: what is pending is scattered over its last dimension that is whole, and
        reduced where there is none."""
        home = self.now(v)
        if home.pending:
            target = home.settled()
            free = [d for d in reversed(range(home.ndim))
                    if not home.axes_of(d) and _divides(v, d, home)]
            if free and home.op == "sum":
                target = target.with_split(free[0], home.pending)
            self.bring(v, target, None, "the result is asked for")
            return v, target
        return v, home

    def hand_on(self, v: Value, wanted: Layout | None) -> Held:
        """A result of a held graph, where it is made or where it is wanted."""
        target = (wanted or self.now(v)).unmarked()
        self.bring(v, target, None, "an iteration hands it on")
        return v, target

    def _constrain(self, node: Node) -> None:
        """An op that says how its operand is to lie."""
        at = [self.outside.get(v) or self.marked(v, self.home(v)) for v in node.inputs]
        asked = CONSTRAINTS[node.op.name](node, at)
        target, wish = asked.unmarked(), self.wishes.get(node.outputs[0])
        if wish is not None and yields(node, wish, self.graph):
            target = wish
        if self._accumulates(node, target):
            self.due[node.outputs[0]], target = target, self.home(node.inputs[0])
        self.bring(node.inputs[0], target, node)
        self.steps.append(PartitionedOp(node, (target, *(self.home(v) for v in node.inputs[1:])),
                                        (target,)))
        self.hold(node.outputs[0], target)
        self.mark(node.outputs[0], asked.regather)


    # --- gradients of several parts of a batch ----------------------------------------------
    def _accumulates(self, node: Node, target: Layout) -> bool:
        """Whether a gradient, aligned with a parameter that the ranks of its sum hold alike, is
        only added to others: of several parts of a batch, or of the iterations of a loop. Then the
        sum over ranks is made once, of all of them."""
        home = self.home(node.inputs[0])
        return node.op.name == "shard_like" and home.op == "sum" and _same_splits(home, target) \
            and self._only_added(node.outputs[0])

    def _only_added(self, v: Value) -> bool:
        """Whether a gradient goes into sums of gradients alone."""
        readers = self.readers.get(v, ())
        return v in self.terms or v not in self.graph.outputs and bool(readers) and all(
            r.op.name == "add" and self.gradients.issuperset(r.inputs) for r in readers)

    def align(self, v: Value, target: Layout) -> None:
        """A sum of gradients whose ranks' terms are not added yet: when it is whole they are."""
        self.due[v] = target
        if not self._only_added(v):
            self.bring(v, target, None, "the gradients of all parts are there")


def _line(node: Node | None) -> SourceLine | None:
    return node.where if node is not None else None


def _same_splits(a: Layout, b: Layout) -> bool:
    return a.splits == b.splits


def _is_term(v: Value, layout: Layout, axes: Sequence[str], node: Node) -> bool:
    """Whether a value that all ranks have can be added as the term of one of them: the sum then
    stays pending, and several are reduced at once."""
    stays = _small(v) or (node.op.loop is not None and node.op.linear == "joint"
                          and extents(v.aval) == extents(node.outputs[0].aval))
    return stays and not layout.pending and not _uses(layout, axes)


def _also(layout: Layout, axes: Sequence[str]) -> Layout:
    """The layout with a sum pending over these axes too."""
    every = {*axes, *layout.pending}
    return replace(layout, pending=tuple(a for a in layout.mesh.axes if a in every), op="sum")


def _uses(layout: Layout, axes: Sequence[str]) -> bool:
    return any(a in split.axes for split in layout.splits for a in axes)


def _small(v: Value) -> bool:
    return prod(extents(v.aval)) == 1


def _divides(v: Value, d: int, home: Layout) -> bool:
    n = extents(v.aval)[d]
    return isinstance(n, int) and n >= home.mesh.size(home.pending)


def _reason(v: Value, user: Node | None, layout: Layout) -> str:
    if user is None:
        return "a result"
    return f"{user.op.name} needs {v.aval} as {layout.describe()}"


def _work(node: Node) -> float:
    """Operations of a node: products of all letters' extents for contractions, else elements."""
    sizes = [prod(extents(v.aval)) for v in (*node.inputs, *node.outputs)]
    if node.op.name == "matmul":
        return 2.0 * sizes[-1] * extents(node.inputs[0].aval)[-1]
    return float(max(sizes, default=1))
