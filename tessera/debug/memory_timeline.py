"""Live bytes over time: of a graph run in the user's order, and of the memory plan of what runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ArgumentError
from ..graph.ir import Graph, Node, Value, value_bytes
from ..graph.schedule.groups import FusionGroup
from ..graph.schedule.memory_plan import MemoryPlan
from ..lazy_dataclass import dataclass


@dataclass(frozen=True)
class Moment:
    """While an op runs: the tensors alive then (its operands and results among them), in bytes."""

    op: str
    where: str
    live: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.live.values())


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes per tensor over time, and the peak."""

    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        return max((m.bytes for m in self.moments), default=0)

    @property
    def peak(self) -> Moment | None:
        return max(self.moments, key=lambda m: m.bytes, default=None)

    def __str__(self) -> str:
        lines = [f"peak {self.peak_bytes} bytes"]
        lines += [f"{m.bytes:>14,} {'<' if m is self.peak else ' '} {m.op:16s} {m.where}"
                  for m in self.moments]
        return "\n".join(lines)


def memory_timeline(graph: Graph) -> MemoryTimeline:
    """Tensors of a graph from their definition to their last use, run in the user's order.

    Arguments, captured tensors and results are alive throughout. A view has its base's bytes. This
    is what the program needs; the memory plan of the compiled graph needs less where it fuses.
    """
    base = _bases(graph)
    last = {base[v]: len(graph.nodes) for v in graph.outputs}
    given = {base[v] for v in graph.given}
    for i, node in enumerate(graph.nodes):
        for v in (*node.inputs, *node.outputs):
            last[base[v]] = max(last.get(base[v], i), i)
    names = {v: f"%{i} {v.aval}" for i, v in enumerate(base)}
    sizes = {v: _size_bytes(v) for v in set(base.values())}
    alive, moments = dict.fromkeys(v for v in base if v in given), []
    for i, node in enumerate(graph.nodes):
        alive.update(dict.fromkeys(base[v] for v in node.outputs))
        live = {names[v]: sizes[v] for v in alive}
        moments.append(Moment(node.op.name, str(node.where or ""), live))
        alive = dict.fromkeys(v for v in alive if v in given or last[v] > i)
    return MemoryTimeline(tuple(moments))


def _bases(graph: Graph) -> dict[Value, Value]:
    """The value whose memory each value lies in."""
    base: dict[Value, Value] = {v: v for v in graph.inputs}
    base.update((v, v) for v, _ in graph.captures)
    for node in graph.nodes:
        for v in node.outputs:
            base[v] = base[node.inputs[0]] if _is_view(node) else v
    return base


def _is_view(node: Node) -> bool:
    return node.op.lies(node.attrs).kind == "view"


def _size_bytes(v: Value) -> int:
    size = 1
    for extent in v.aval.shape:
        if not isinstance(extent, int):
            raise ArgumentError(f"the extent {extent} of {v.aval} has no size",
                                hint="ask for the memory of a graph with concrete shapes")
        size *= extent
    return size * v.aval.dtype.numpy.itemsize


def planned_memory(graph: Graph, groups: Sequence[FusionGroup], plan: MemoryPlan) -> MemoryTimeline:
    """What a compiled graph holds while each of its groups runs, by its memory plan.

    Arguments, captured tensors, constants and results are there throughout; temporaries, and what a
    library call allocates itself, from the group that makes them to the last that reads them.
    """
    names = {v: f"%{i} {v.aval}" for i, v in enumerate(plan.places)}
    kept = {place.root for place in plan.places.values() if place.kind in ("fresh", "known")}
    kept.update(graph.given)
    always = {names[v]: value_bytes(v) for v in kept if v in names}
    first: dict[Value, int] = {}
    for i, group in enumerate(groups):
        for v in group.outputs:
            if plan.places[plan.places[v].root].kind in ("arena", "dynamic"):
                first.setdefault(plan.places[v].root, i)
    ends = {plan.places[v].root: len(groups) for v in graph.outputs}
    gone = set(plan.over.values())  # when another is written in their place
    moments = []
    for i, group in enumerate(groups):
        live = {names[v]: value_bytes(v) for v, begin in first.items()
                if begin <= i <= max(ends.get(v, plan.last_use.get(v, begin)) - (v in gone), begin)}
        moments.append(Moment(" ".join(n.op.name for n in group.nodes[:4]),
                              str(group.where or ""), always | live))
    return MemoryTimeline(tuple(moments))


__all__ = ["MemoryTimeline", "Moment", "memory_timeline", "planned_memory"]
