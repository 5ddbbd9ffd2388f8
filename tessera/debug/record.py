"""Program traces: every op that ran, in order, with its shapes, types and line."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import config, hooks
from ..errors import SourceLine, user_line
from ..graph import trace
from ..graph.ir import Graph, Node
from ..graph.op import Aval, GraphOp
from ..graph.schedule.groups import FusionGroup
from ..graph.schedule.work import LaunchWork
from ..graph.trace import aval_of
from ..lazy_dataclass import dataclass
from .host_work import group_work, op_work
from .launch_profile import LaunchTable

# Innermost last: the graph that runs and the named ranges around it, per thread.
_path = threading.local()


def current_path() -> tuple[str, ...]:
    return getattr(_path, "names", ())


@contextmanager
def inside(name: str) -> Iterator[None]:
    """`name` is part of the path of what happens in the block."""
    before = current_path()
    _path.names = (*before, name)
    try:
        yield
    finally:
        _path.names = before


@dataclass(frozen=True)
class Record:
    """One op that ran. `path`: the ranges and the compiled function it ran in, outermost first.

    `start_ns` is absent for the first op and for ops outside compiled functions, whose begin nobody
    sees.
    """

    op: str
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    where: SourceLine | None
    path: tuple[str, ...]
    start_ns: int | None
    end_ns: int

    @property
    def duration_ns(self) -> int | None:
        return None if self.start_ns is None else self.end_ns - self.start_ns

    def __str__(self) -> str:
        ins, outs = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        gives = f" -> {outs}" if outs else ""
        return f"{self.op}: {ins}{gives}   {self.where or ''}".rstrip()


class Recorder:
    """Collects records between start() and stop(). Functions run node by node meanwhile."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.graphs: list[Graph] = []
        self._last = threading.local()  # when the previous event of this thread ended, in a graph

    def start(self) -> None:
        config.get("numerics")  # resolved now: the lists must not change while they are walked
        hooks.eager_ops.append(self._eager)
        hooks.nodes.append(self._node)
        hooks.runs.append(self._run)

    def stop(self) -> None:
        hooks.eager_ops.remove(self._eager)
        hooks.nodes.remove(self._node)
        hooks.runs.remove(self._run)

    def _add(self, op: str, ins: Sequence[Aval], outs: Sequence[Aval],
             where: SourceLine | None) -> None:
        now = time.perf_counter_ns()
        start = getattr(self._last, "ns", None)
        self.records.append(Record(op, tuple(ins), tuple(outs), where, current_path(), start, now))
        if start is not None:
            self._last.ns = time.perf_counter_ns()

    def _eager(self, op: GraphOp, args: tuple, attrs: dict, made: tuple) -> None:
        where = trace.current_line() or user_line()
        self._add(op.name, [aval_of(a) for a in args], [aval_of(a) for a in made], where)

    def _node(self, node: Node, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
              ) -> None:
        ins, outs = [v.aval for v in node.inputs], [v.aval for v in node.outputs]
        self._add(node.op.name, ins, outs, node.where)

    @contextmanager
    def _run(self, graph: Graph) -> Iterator[Any]:
        self.graphs.append(graph)
        outer = getattr(self._last, "ns", None)
        with inside(graph.name):
            self._last.ns = time.perf_counter_ns()
            try:
                yield lambda flat: None
            finally:
                self._last.ns = outer and time.perf_counter_ns()


class HostRecorder:
    """Collects what the host runs between start() and stop(), with its times: loops and calls of
    compiled functions (`group`), and ops outside of them. launches: their operations and bytes."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.graphs: list[Graph] = []
        self.launches = LaunchTable()

    def start(self) -> None:
        config.get("numerics")  # as in Recorder
        hooks.timed_ops.append(self._op)
        hooks.runs.append(self._run)

    def stop(self) -> None:
        hooks.timed_ops.remove(self._op)
        hooks.runs.remove(self._run)

    def group(self, group: FusionGroup, begin: int, end: int) -> None:
        work = group_work(group)
        self._add(work, [v.aval for v in group.inputs], [v.aval for v in group.outputs], begin, end)

    def _op(self, op: GraphOp, args: tuple, attrs: dict, made: tuple, begin: int, end: int) -> None:
        work = op_work(op, args, attrs, made, trace.current_line() or user_line())
        self._add(work, [aval_of(a) for a in args], [aval_of(a) for a in made], begin, end)

    def _add(self, work: LaunchWork, ins: Sequence[Aval], outs: Sequence[Aval], begin: int,
             end: int) -> None:
        self.launches.see_host(work, begin, end)
        self.records.append(Record(work.name, tuple(ins), tuple(outs), work.where, current_path(),
                                   begin, end))

    @contextmanager
    def _run(self, graph: Graph) -> Iterator[Any]:
        self.graphs.append(graph)
        with inside(graph.name):
            yield lambda flat: None


class RecordedProgram(list[Record]):
    """The records of a trace, in the order in which ops ended; str() has a line for each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@contextmanager
def program_trace() -> Iterator[RecordedProgram]:
    """`with ts.debug.trace() as program:` every op that runs in the block, as Records in order."""
    recorder = Recorder()
    program = RecordedProgram()
    recorder.records = program
    recorder.start()
    try:
        yield program
    finally:
        recorder.stop()
