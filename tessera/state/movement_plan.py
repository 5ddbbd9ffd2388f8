"""What is moved between device and host, and what is asked to be fetched ahead: `ts.plan()`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import field
from typing import Any

from ..errors import ArgumentError, SourceLine, short_path, user_line
from ..graph.ir import Graph, Node, Value, value_bytes
from ..graph.jit import JitFunction
from ..graph.schedule.ir import GraphSchedule
from ..lazy_dataclass import dataclass
from ..tensor import Tensor

MOST = 4096  # movements outside of compiled functions that are kept: the last ones


@dataclass(frozen=True)
class Movement:
    """One object that moves.

    verb: prefetch | offload | fetch, of a compiled function   source, destination: "cuda:0",
    "host", "smem"   overlap: "compute" beside kernels, "none" before them
    """

    verb: str
    object: str
    source: str
    destination: str
    nbytes: int
    overlap: str
    where: SourceLine | None = field(default=None, compare=False)

    @property
    def row(self) -> tuple[str, ...]:
        line = f"{short_path(self.where.file)}:{self.where.line}" if self.where else ""
        return (self.verb, self.object, self.source, self.destination, str(self.nbytes),
                self.overlap, line)


class MovementPlan(tuple[Movement, ...]):
    """Movements in their order; its text is a table."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self)

    def __str__(self) -> str:
        rows = [("verb", "object", "source", "destination", "bytes", "overlap", "line"),
                *(m.row for m in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip()
                         for row in rows)

    __repr__ = __str__


_moved: deque[Movement] = deque(maxlen=MOST)
_lock = threading.Lock()


def plan(f: Any = None) -> MovementPlan:
    """The movements of data: object, source, destination, bytes, and what they overlap with.

    f: a compiled function that has been called: what its last program moves, and what its blocks
    ask for. Without: what `ts.offload` and `ts.prefetch` have moved or asked for outside of
    compiled functions, the last 4096. Raises ArgumentError for anything else.
    """
    if f is None:
        with _lock:
            return MovementPlan(_moved)
    if not isinstance(f, JitFunction):
        raise ArgumentError(f"plan takes a compiled function, got {type(f).__name__}",
                            hint="@ts.jit above the def; ts.plan() lists what has moved outside")
    traced = f._last_traced()
    schedule = getattr(getattr(traced.executable, "program", None), "plan", None)
    place = traced.target if schedule is not None else "host"
    return MovementPlan([*_requested_movements(traced.graph, place, schedule),
                         *(_copied(schedule, place) if schedule is not None else ())])


def clear_plan() -> None:
    """Forget what has been moved outside of compiled functions."""
    with _lock:
        _moved.clear()


def note(verb: str, name: str, x: Tensor, destination: str, overlap: str) -> None:
    """A tensor was moved, or is asked for, outside of compiled functions."""
    source = "host" if x.offloaded or x.device == "cpu" else x.device
    with _lock:
        _moved.append(Movement(verb, _tensor_text(name, x), source, destination, x.nbytes, overlap,
                               user_line()))


def _tensor_text(name: str, x: Any) -> str:
    return f"{name} {x.type}[{', '.join(map(str, x.shape))}]".strip()


def _requested_movements(graph: Graph, place: str,
                         schedule: GraphSchedule | None) -> Iterable[Movement]:
    """What blocks of a function ask for."""
    for node in graph.nodes:
        copied = schedule is not None and node.attrs.get("verb") == "offload"  # see _copied
        if node.op.name != "move" or copied:
            continue
        for v in node.inputs:
            into = {"device": place, "hbm": place}.get(node.attrs["into"], node.attrs["into"])
            overlap = node.attrs["overlap"] or "none"
            yield Movement(node.attrs["verb"], _tensor_text(node.attrs["what"], v.aval), place,
                           into,
                           value_bytes(v), overlap + _stages(graph, node, v, schedule), node.where)


def _stages(graph: Graph, node: Node, v: Value, schedule: GraphSchedule | None) -> str:
    """`, 4 stages in g11`: the pipelines through shared memory of the kernels that read an input,
    or what is made of it in the line of the block."""
    if schedule is None or node.attrs["into"] != "smem":
        return ""
    names = {b.name for b in schedule.buffers if schedule.base(b.name) == _buffer_of(
        graph, v, schedule)}
    found = [f"{g.schedule.value('stages_')} stages in {g.name}" for g in schedule.groups
             if g.kind in ("gemm", "attention", "launch") and names & {o.name for o in g.reads}]
    return "".join(f", {text}" for text in found)


def _buffer_of(graph: Graph, v: Value, schedule: GraphSchedule) -> str:
    given = graph.given
    return schedule.base(f"v{given.index(v)}") if v in given else ""


def _copied(schedule: GraphSchedule, place: str) -> Iterable[Movement]:
    """The copies that a program makes beside its kernels."""
    for t in schedule.transfers:
        b = schedule.buffer(t.on_device)
        ends = (place, "host") if t.kind == "offload" else ("host", place)
        yield Movement(t.kind, _tensor_text(b.name, b), *ends, t.nbytes, "compute", t.where)


__all__ = ["Movement", "MovementPlan", "clear_plan", "note", "plan"]
