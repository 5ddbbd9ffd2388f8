"""Copies of parameters in a narrower type, which live from one call of a step to the next.

A step casts its f32 parameters to bf16 first of all, and ends by writing new ones. Where a donated
argument is cast whole, as it is or reshaped, and a result of its extents and type is made from it,
the program takes the copy as one more argument and writes that of the result as one more result,
beside it: four bytes less to read for each parameter. Copies that are read side by side, as weights
of joined matmuls are, lie side by side. They stay with the tensors that the call returns, and the
next call that is given these very tensors has them. A tensor that comes from elsewhere, or whose
memory somebody was given since, is cast first, by a program of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from operator import attrgetter, call
from typing import Any

from .... import hooks
from ....lazy_dataclass import dataclass
from ....runtime.device import Device
from ....tensor import Tensor
from ....tile.launch.resident import Resident
from ...ir import Graph, Node, Value, producers_of
from ...op import OPS, Aval
from ...ops.convert import CAST
from ...ops.join import CONCATENATE
from ...placed_leaves import picker
from ...schedule.loop_axes import extents_of

RESHAPE = OPS["reshape"]
LEAST = 1 << 16  # elements that are worth a copy: a few are cast where they are read


@dataclass(frozen=True)
class NarrowCopy:
    """arguments: the numbers of those of which it is made, in order.  results: of those that have
    their place after the call.  made: what is made of the arguments, as a graph."""

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    made: Graph

    @cached_property
    def key(self) -> str:
        """The same for copies of the same make: functions share them."""
        return self.made.hash


# --- the pass -----------------------------------------------------------------------------------
def keep_copies(graph: Graph, donated: Sequence[int]) -> tuple[Graph, tuple[NarrowCopy, ...]]:
    """The graph with the copies that it keeps as its last inputs and outputs."""
    numbers = {graph.inputs[i]: i for i in donated}
    made = _made_of_arguments(graph, numbers)
    results = _results_of(graph, numbers) if made else {}
    read = {v for n in graph.nodes for v in n.inputs if n.outputs and n.outputs[0] not in made}
    kept = {v: found for v, found in made.items() if (v in read or v in graph.outputs) and all(
        x in results for x in found.sources)}
    if not kept:
        return graph, ()
    parts = _parts_of_joined(graph, kept)
    rest = (n for n in graph.nodes if not n.outputs or n.outputs[0] not in kept)
    kept = {v: found for v, found in kept.items() if v not in parts}
    inputs = {v: Value(v.aval) for v in kept}
    nodes = [Node(n.op, tuple(inputs.get(v, v) for v in n.inputs), n.attrs, n.outputs, n.where)
             for n in (*parts.values(), *rest)]
    outputs, copies = [inputs.get(v, v) for v in graph.outputs], []
    for found in kept.values():
        at = {x: graph.outputs[results[x]] for x in found.sources}
        after, end = _copy_nodes(found.nodes, at)
        before = {x: Value(x.aval) for x in found.sources}
        first, whole = _copy_nodes(found.nodes, before)
        copies.append(NarrowCopy(
            tuple(numbers[x] for x in found.sources), tuple(results[x] for x in found.sources),
            Graph("copies", tuple(before.values()), (), tuple(first), (whole,))))
        nodes += after
        outputs.append(end)
    return Graph(graph.name, (*graph.inputs, *inputs.values()), graph.captures, tuple(nodes),
                 tuple(outputs)), tuple(copies)


@dataclass(frozen=True)
class _DerivedValue:
    """A value that arguments alone determine. sources: these, in the order in which they are read.
    nodes: what makes it of them."""

    sources: tuple[Value, ...]
    nodes: tuple[Node, ...]


def _made_of_arguments(graph: Graph, donated: dict[Value, int]) -> dict[Value, _DerivedValue]:
    """The values that are casts of donated arguments, also reshaped, and those side by side."""
    made: dict[Value, _DerivedValue] = {}
    reshaped: dict[Value, Value] = {}  # arguments
    for n in graph.nodes:
        if n.op is RESHAPE and (x := reshaped.get(n.inputs[0], n.inputs[0])) in donated:
            reshaped[n.outputs[0]] = x
        elif n.op is CAST and (x := reshaped.get(n.inputs[0], n.inputs[0])) in donated and _pays(n):
            made[n.outputs[0]] = _DerivedValue((x,), _cast_first(n, x))
        elif n.op is CONCATENATE and all(v in made for v in n.inputs):
            parts = [made[v] for v in n.inputs]
            sources = tuple(x for p in parts for x in p.sources)
            if len({*sources}) == len(sources):
                made[n.outputs[0]] = _DerivedValue(sources, (*(m for p in parts for m in p.nodes),
                                                             n))
    return made


def _parts_of_joined(graph: Graph, kept: dict[Value, _DerivedValue]) -> dict[Value, Node]:
    """Copies that lie in those of which they are parts: one more of their own would be written."""
    found: dict[Value, Node] = {}
    for n in reversed(graph.nodes):
        if n.op is not CONCATENATE or n.outputs[0] not in kept:
            continue
        axis, begin = n.attrs["axis"], 0
        for v in n.inputs:
            starts = tuple(begin if a == axis else 0 for a in range(v.aval.ndim))
            stops = tuple(b + e for b, e in zip(starts, extents_of(v), strict=True))
            begin = stops[axis]
            attrs = {"starts": starts, "stops": stops, "steps": (1,) * v.aval.ndim}
            if v in kept:
                found.setdefault(v, Node(OPS["slice"], n.outputs, attrs, (v,), n.where))
    return found


def _cast_first(cast: Node, x: Value) -> tuple[Node, ...]:
    """The cast of a reshaped argument as a reshape of its cast, which the loop that makes a new one
    takes in."""
    if cast.inputs[0] is x:
        return (cast,)
    y = cast.outputs[0].aval
    narrow = Value(Aval(x.aval.shape, y.type))
    return (Node(CAST, (x,), cast.attrs, (narrow,), cast.where),
            Node(RESHAPE, (narrow,), {"shape": y.shape}, cast.outputs, cast.where))


def _pays(cast: Node) -> bool:
    x, y = cast.inputs[0].aval, cast.outputs[0].aval
    return (all(isinstance(n, int) for n in x.shape) and prod(x.shape) >= LEAST
            and y.dtype.bits < x.dtype.bits and not y.dtype.packed)


def _copy_nodes(nodes: Sequence[Node], at: dict[Value, Value]) -> tuple[list[Node], Value]:
    """The nodes on other values, and what the last of them makes."""
    env, made = dict(at), list[Node]()
    for n in nodes:
        env[n.outputs[0]] = Value(n.outputs[0].aval)
        made.append(Node(n.op, tuple(env[v] for v in n.inputs), n.attrs, (env[n.outputs[0]],),
                         n.where))
    return made, made[-1].outputs[0]


def _results_of(graph: Graph, donated: dict[Value, int]) -> dict[Value, int]:
    """By argument, the result that is made of it element by element; of several the one that is
    made of the most donated arguments, as parameters are of themselves and their moments."""
    maker = producers_of(graph)
    best: dict[Value, tuple[int, int]] = {}
    for j, y in enumerate(graph.outputs):
        seen, work, made_of = {y}, [y], set[Value]()
        while work:
            v = work.pop()
            if v in donated and v is not y and v.aval.type == y.aval.type:
                made_of.add(v)
            node = maker.get(v)
            if node is not None and (node.op.loop or node.op.tile):
                new = [x for x in node.inputs if x not in seen and x.aval.shape == y.aval.shape]
                seen.update(new)
                work += new
        for x in made_of:
            best[x] = max(best.get(x, (0, -j)), (len(made_of), -j))
    return {x: -j for x, (_, j) in best.items()}


# --- calls --------------------------------------------------------------------------------------
class HeldCopy:
    """A copy that lies somewhere. Each of the tensors that it is made of has it under its key, with
    its place among them: it is theirs while all do. tensor: None when its memory was needed."""

    __slots__ = ("tensor", "__weakref__")

    def __init__(self, tensor: Resident | None):
        self.tensor = tensor
        _all.add(self)


_all: weakref.WeakSet[HeldCopy] = weakref.WeakSet()


def _trim(on: Device) -> None:
    for held in _all:
        if held.tensor is not None and held.tensor.storage.device is on:
            held.tensor = None


hooks.trimmed.append(_trim)


class Note(dict[str, tuple[HeldCopy, int]]):
    """`narrow` of a tensor. It is not changed; one with other entries takes its place."""

    __slots__ = ("__weakref__",)


def copies_of(held: Sequence[weakref.ref[HeldCopy]]) -> list[Resident] | None:
    """The copies that these hold; None where one has none any more."""
    try:
        copies = [*map(TENSOR, map(call, held))]
    except AttributeError:
        return None
    return copies if RESIDENT.issuperset(map(type, copies)) else None


class CopyKeeper:
    """Gives the copies of a program to its calls. run: makes what runs a graph."""

    def __init__(self, copies: Sequence[NarrowCopy], run: Callable[[Graph], Any]):
        self.copies, self._run = tuple(copies), run
        self._results = [(c.key, c.results) for c in self.copies]
        # what copies are made of, one after another: the key of each, its place in it, its number
        self._sources = [(c.key, i) for c in self.copies for i in range(len(c.arguments))]
        self._pick = picker([i for c in self.copies for i in c.arguments])
        self._pick_results = picker([j for c in self.copies for j in c.results])
        self._empty: list[HeldCopy] = []  # of the call under way: what held the copies that it took
        # Of the last call: `narrow` of each result that has copies, and what these hold. They live
        # as long as the results do.
        self._notes: list[weakref.ref[Note]] = []
        self._held: list[weakref.ref[HeldCopy]] = []
        self._turn: tuple[list[Note], list[HeldCopy]] | None = None  # those, of the call under way

    def taken(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The copies for a call with these arguments, which have none from here on."""
        sources: Sequence[Any] = self._pick(leaves)
        self._turn = self._of_last_call(sources)
        if self._turn is None:
            return self._of_any(leaves, sources)
        copies: list[Any] = [held.tensor for held in self._turn[1]]
        for x in sources:
            x.narrow = x.origin = None
        for held in self._turn[1]:
            held.tensor = None
        return copies

    def kept(self, results: list[Tensor]) -> list[Tensor]:
        """The results of the function; the copies stay with those of which they are."""
        count = len(results) - len(self.copies)
        copies: list[Any] = results[count:]
        turn, self._turn = self._turn, None
        if turn is None:
            self._note(results, copies)
        else:
            for y, note in zip(self._pick_results(results), turn[0], strict=True):
                y.narrow = note
            for held, copy in zip(turn[1], copies, strict=True):
                held.tensor = copy
        return results[:count]

    def _of_last_call(self, sources: Sequence[Any]
                      ) -> tuple[list[Note], list[HeldCopy]] | None:
        """What the results of the last call have, where they are the arguments and have it yet."""
        notes = [note for ref in self._notes if (note := ref()) is not None]
        if not notes or not RESIDENT.issuperset(map(type, sources)) or [
                x.narrow for x in sources] != notes:
            return None
        held = [h for ref in self._held if (h := ref()) is not None]
        there = sum(h.tensor is not None for h in held)  # what is not was needed for memory
        return (notes, held) if there == len(self.copies) else None

    def beside(self, results: Sequence[Tensor]) -> list[weakref.ref[HeldCopy]] | None:
        """What holds the copies that the last call left beside its results; None where these are
        not its."""
        return [*self._held] if self._of_last_call(self._pick_results(results)) else None

    def _of_any(self, leaves: Sequence[Tensor], sources: Sequence[Any]) -> list[Tensor]:
        """Arguments that have copies from anywhere, or none."""
        self._notes = []  # until this call has left some
        held: list[HeldCopy | None] = []
        for (key, place), x in zip(self._sources, sources, strict=True):
            there, at = _out_of(x, key)
            if place == 0:
                held.append(there if at == 0 else None)
            elif at != place or there is not held[-1]:
                held[-1] = None
        self._empty = [h for h in held if h is not None]
        found = [h.tensor for h in self._empty]
        for h in self._empty:
            h.tensor = None
        copies: list[Tensor] = [x for x in found if x is not None]
        if len(copies) == len(held):
            return copies
        return self._first.tensors([leaves[i] for c in self.copies for i in c.arguments])

    def _note(self, results: Sequence[Any], copies: Sequence[Any]) -> None:
        empty, self._empty, self._held = self._empty, [], []
        for (key, numbers), copy in zip(self._results, copies, strict=True):
            held = empty.pop() if empty else HeldCopy(None)
            held.tensor = copy
            self._held.append(weakref.ref(held))
            for place, j in enumerate(numbers):
                results[j].narrow = Note({**(results[j].narrow or {}), key: (held, place)})
        self._notes = [weakref.ref(y.narrow) for y in self._pick_results(results)]

    @cached_property
    def _first(self) -> Any:
        """What makes all copies of the arguments."""
        graphs = [c.made for c in self.copies]
        return self._run(Graph("copies", tuple(v for g in graphs for v in g.inputs), (),
                               tuple(n for g in graphs for n in g.nodes),
                               tuple(g.outputs[0] for g in graphs)))


def _out_of(x: Any, key: str) -> tuple[Any, int]:
    """What a tensor has under a key, which it has no more."""
    narrow = x.narrow if type(x) is Resident else None
    if not narrow or key not in narrow:
        return None, -1
    x.narrow, x.origin = Note({k: held for k, held in narrow.items() if k != key}), None
    return narrow[key]


RESIDENT = frozenset({Resident})
TENSOR = attrgetter("tensor")

__all__ = ["CopyKeeper", "NarrowCopy", "copies_of", "keep_copies"]
