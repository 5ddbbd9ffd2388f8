"""Programs on a GPU as CUDA graphs, which are made by themselves.

A program that has run once is recorded at its next call and launched as a whole from then on. A
graph names addresses, so there is one for each set of places where arguments, captured tensors and
results lie: a step that gets what the step before it returned meets the same two sets of places in
turn, and one with donated arguments a single one. Where a few addresses are new (a batch, a loss
that somebody keeps), the kernels that read or write there are changed in the graph, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import compress
from operator import ne
from typing import TYPE_CHECKING, Any

from ....runtime.buffer import DEFAULT
from ....runtime.flags import error_flags
from ....runtime.graphs import DeviceGraph, recording_stream
from .call_steps import call_steps
from .collective_steps import CollectiveStep

if TYPE_CHECKING:
    from .batch_launch import BatchLaunch, BatchTable
    from .workspace import Workspace

MOST_GRAPHS = 4  # of one program; each has its nodes once more
CHEAP_SHARE = 4  # to change less than this part of a graph is cheap
KEPT_PLACES = 8  # of calls before this one, among which its own may be
LOUD_STEPS = 32  # that are told where a buffer lies: a copy of it takes less than they do
FEW_MISSES = 2  # as many sets of places come in turn where nothing is donated
MOST_MISSES = 8  # calls on end that were not cheap: the places never come again


class PlacedGraphs:
    """The graphs of a program, by where its buffers lie. names: of these.  tell: lets the steps
    know where they lie.

    stopped: why its calls are not recorded any more, "" while they are.  restless: buffers of which
    a copy at one place is better to read.
    """

    def __init__(self, space: Workspace, names: Sequence[str],
                 tell: Callable[[list[int]], None]):
        self.space, self.names, self.tell, self.stopped = space, tuple(names), tell, ""
        self.device, self.flags = space.device, error_flags(space.device.index)
        self.stream = recording_stream(self.device.index)
        steps = call_steps(space, self.stream)
        self.steps = [s.run for s in steps]
        self.touching: dict[str, set[int]] = {}  # steps by the buffers whose addresses they get
        for i, step in enumerate(steps):
            for name in step.what.buffers:
                self.touching.setdefault(name, set()).add(i)
        self.batches: dict[int, tuple[BatchLaunch, ...]] = {
            i: s.what.batches for i, s in enumerate(steps) if s.what.batches}
        self.sending = {i: s.what.step for i, s in enumerate(steps)
                        if isinstance(s.what.step, CollectiveStep)}
        self.last = self.sending[max(self.sending)] if self.sending else None
        self.graphs: list[PlacedGraph] = []
        self.before: list[list[int]] = []  # places that had no graph when they came
        self.misses = 0
        self.loud = [n for n in self.names if len(self.touching.get(n, ())) >= max(
            LOUD_STEPS, len(self.steps) // CHEAP_SHARE)]
        self.restless: set[str] = set()  # of these, what lay elsewhere at call after call

    def launch(self, places: list[int]) -> PlacedGraph:
        """A call whose buffers lie there; the graph."""
        graph = next((g for g in self.graphs if g.places == places), None)
        if graph is None:
            graph = self._placed(places)
            self.start(graph)
        else:
            self.misses = 0
            self.start(graph)
        return graph

    def again(self, key: tuple[Any, ...]) -> bool:
        """A call like the one that launched a graph for this; whether there is such a graph."""
        for graph in self.graphs:
            if graph.key == key:
                self.misses = 0
                self.start(graph)
                return True
        return False

    def start(self, graph: PlacedGraph) -> None:
        if self.flags.words[0]:
            self.flags.check()
        graph.graph.launch(DEFAULT)
        if self.last is not None:
            self.replayed()

    @cached_property
    def replayed(self) -> Callable[[], None]:
        """Tells of the last thing that a launch sends."""
        assert self.last is not None
        return self.last.replayed(self.device.index, DEFAULT)

    def _placed(self, places: list[int]) -> PlacedGraph:
        """A graph for new places: one that is changed, or recorded now."""
        try:
            self.tell(places)
            return self._changed(places) or self._recorded(places)
        except BaseException:
            self.forget()  # what was begun is no graph of these places
            raise

    def _changed(self, places: list[int]) -> PlacedGraph | None:
        """The graph that is cheapest to change, where that is cheap or there are many. Places that
        come again get a graph of their own. What NCCL has put into a graph is not changed."""
        before, self.before = places in self.before, [*self.before[1 - KEPT_PLACES:], places]
        found = [(len(new), -i, g) for i, g in enumerate(self.graphs)
                 if self.sending.keys().isdisjoint(new := self._steps_of(g, places))]
        if not found:
            return None
        count, _, graph = min(found)
        cheap = count * CHEAP_SHARE < len(self.steps)
        if self.misses >= FEW_MISSES and not before:
            at = dict(zip(self.names, zip(graph.places, places, strict=True), strict=True))
            self.restless.update(n for n in self.loud if at[n][0] != at[n][1])
        if (before or not cheap) and len(self.graphs) < MOST_GRAPHS:
            return None
        if not cheap:
            graph = self.graphs[0]
        steps = {i: self.steps[i] for i in sorted(self._steps_of(graph, places))}
        tables = {i: [b.table() for b in found] for i, found in self.batches.items() if i in steps}
        self.graphs.remove(graph)
        if not graph.graph.update(self.stream, steps):
            return None
        self._count(cheap)
        graph.places, graph.key = places, None
        graph.tables |= tables
        self.graphs.append(graph)
        return graph

    def _steps_of(self, graph: PlacedGraph, places: list[int]) -> set[int]:
        """The steps that are given another address than they have in a graph."""
        found = set[int]()
        for name in compress(self.names, map(ne, graph.places, places)):
            found |= self.touching.get(name, set())
        return found

    def _recorded(self, places: list[int]) -> PlacedGraph:
        self._count(cheap=False)
        self.space.compile_loops()
        tables = {i: [b.table() for b in found] for i, found in self.batches.items()}
        made = PlacedGraph(DeviceGraph.record(self.device, self.stream, self.steps), places, tables)
        self.graphs = [*self.graphs[1 - MOST_GRAPHS:], made]
        return made

    def _count(self, cheap: bool) -> None:
        """Gives up where graphs are recorded again and again."""
        self.misses = 0 if cheap else self.misses + 1
        if self.misses > MOST_MISSES:
            self.stopped = "its arguments or results lie elsewhere at every call"

    def forget(self) -> None:
        self.graphs = []


class PlacedGraph:
    """A graph, and where the buffers lie that it names. tables: of its batches, by step.  key: by
    which who launched it last finds it, while it has these places."""

    __slots__ = ("graph", "places", "tables", "key")

    def __init__(self, graph: DeviceGraph, places: list[int],
                 tables: dict[int, list[BatchTable]]):
        self.graph, self.places, self.tables = graph, places, tables
        self.key: tuple[Any, ...] | None = None


__all__ = ["CHEAP_SHARE", "PlacedGraph", "PlacedGraphs"]
