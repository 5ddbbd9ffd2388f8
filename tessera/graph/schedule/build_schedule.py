"""From groups and their memory plan to the Schedule IR: names, operands, steps and buffers.

A target's lowering is a `ScheduleBuilder` that adds the groups with their blocks, one after another
(`write`); everything else follows from the graph, the groups and the plan.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ...tile.ir.schedule import Schedule
from ..ir import Graph, Node, Value, value_bytes
from .groups import FusionGroup
from .ir import (
    SCORES_IN_MEMORY,
    GraphSchedule,
    GroupOperand,
    GroupStep,
    PlannedBuffer,
    ScheduledGroup,
    Transfer,
)
from .layouts import StridedLayout
from .loop_axes import extents_of
from .memory_plan import MemoryPlan, numbers
from .offload import verify_copies
from .op_ids import fates, id_of, line_of

# The kinds of a plan's places, as buffers of the schedule are called.
BUFFERS = {"arena": "temporary", "fresh": "result", "known": "constant"}


class ScheduleBuilder(ABC):
    """The Schedule IR of a graph while it grows.

    drawn: values that the host computes at each call.  behind: of each group the number of the last
    step of it and of those before it, -1 when there is none.
    """

    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], memory: MemoryPlan,
                 drawn: Sequence[Value] = ()):
        self.graph, self.groups, self.memory, self.drawn = graph, groups, memory, drawn
        self.known, self.numbers = memory.known, numbers(memory.known)
        self.names: dict[Value, str] = {}
        self.steps: list[ScheduledGroup | Transfer] = []
        self.behind: list[int] = []
        self._taken: set[str] = set()
        self._numbers_taken: dict[str, int] = {}
        self._batch: int | None = None
        self._group_count, self._copy_count = itertools.count(), itertools.count()
        self._name_values()

    @abstractmethod
    def write(self, group: FusionGroup) -> None:
        """Add the steps of a group (`add`, `transfer`)."""

    def attributes(self, node: Node) -> dict[str, Any]:
        """What a step says of its node beside operands and types."""
        return {}

    def launched(self, steps: list[ScheduledGroup | Transfer]) -> list[ScheduledGroup | Transfer]:
        """The steps, those of a batch in the order and under the names of its launches."""
        return steps

    def build(self, target: str, numbered: Graph, on_host: Iterable[Node] = (),
              scores: Mapping[str, str] | None = None) -> GraphSchedule:
        """The schedule. numbered: the graph as it was traced, with ids.  on_host: nodes that the
        host computes at each call.  scores: of ops whose scores lie in memory why, by id."""
        for group in self.groups:
            self._batch = group.batch
            self.write(group)
            self.behind.append(len(self.steps) - 1)
        self.steps = self.launched(self.steps)
        results = tuple(self.buffer_name(v) for v in self.graph.outputs)
        buffers = tuple(self._buffers())
        homes = {i: s.name for s in self.steps for i in s.ops}
        homes |= {i: f"{b.name}, {b.lies}" for b in buffers if b.kind == "view"
                  for i in b.ops if i not in homes}
        homes |= {i: "on the host, at each call" for n in on_host for i in id_of(n).split()
                  if i not in homes}
        found = fates(numbered, homes)
        for i, why in (scores or {}).items():
            found[i] = f"{found[i]}, {SCORES_IN_MEMORY}: {why}"
        made = GraphSchedule(self.graph.name, target, buffers, tuple(self.steps), results,
                             tuple(found.items()))
        verify_copies(made)
        return made

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """Arrays of the known values that something reads from memory, by buffer."""
        return {self.names[v]: np.ascontiguousarray(a) for v, a in self.known.items()
                if v in self.names}

    # --- names --------------------------------------------------------------------------------
    def _name_values(self) -> None:
        for i, v in enumerate(self.graph.given):
            self._name(v, f"v{i}")
        for i, v in enumerate(self.drawn):
            self._name(v, f"k{i}")
        for group in self.groups:
            for node in group.nodes:
                self._name_outputs(node, "h" if group.kind == "offload" else "v")

    def _name(self, v: Value, wanted: str) -> None:
        if v in self.names:
            return
        name, n = wanted, self._numbers_taken.get(wanted, 1)
        while name in self._taken:  # an op of a loop that is written out has thousands
            n += 1
            name = f"{wanted}_{n}"
        self._numbers_taken[wanted] = n
        self._taken.add(name)
        self.names[v] = name

    def _name_outputs(self, node: Node, letter: str) -> None:
        """v7 for what op %7 gives; parts of it, and what is made of numbers, are told apart."""
        ids = id_of(node).split()
        for v in node.outputs:
            self._name(v, f"{letter}{ids[-1].lstrip('%!')}" if ids else f"c{len(self.names)}")

    def inner_name(self, v: Value) -> str:
        """The name of a value that stays inside of a kernel."""
        self._name(v, f"c{len(self.names)}")
        return self.names[v]

    def buffer_name(self, v: Value) -> str:
        """The buffer of a value that is read from memory; constants get theirs now."""
        if v in self.known and v not in self.names:
            self._name(v, f"c{len(self.names)}")
        return self.names[v]

    # --- what a group is made of --------------------------------------------------------------
    def operand(self, v: Value, shape: tuple[int, ...] | None = None) -> GroupOperand:
        own = extents_of(v) if shape is None else shape
        layout = self.layout(v)
        begin, rest = (0, None) if layout is None else layout.from_pointer
        return GroupOperand(self.buffer_name(v), own, v.aval.type, begin,
                            None if rest is None or rest.is_dense else rest)

    def layout(self, v: Value) -> StridedLayout | None:
        """How a value lies in the buffer that owns its memory; None in row-major order."""
        found = self.memory.views.layouts.get(v)
        return None if found is None or found.is_dense else found

    def reads(self, group: FusionGroup) -> list[Value]:
        """What a group reads from memory: its inputs without the numbers among them."""
        return [v for v in group.inputs if v not in self.numbers]

    def argument(self, v: Value) -> Any:
        """An operand of a step: a number, or the name of a buffer."""
        return self.numbers[v] if v in self.numbers else self.buffer_name(v)

    def step(self, node: Node, args: tuple | None = None, shape: tuple | None = None) -> GroupStep:
        out = node.outputs[0]
        return GroupStep(self.names[out], node.op.name,
                         tuple(map(self.argument, node.inputs)) if args is None else args,
                         tuple(sorted(self.attributes(node).items())),
                         extents_of(out) if shape is None else shape,
                         out.aval.type, tuple(id_of(node).split()), line_of(node.where),
                         node_flops(node), node.op.picks)

    def add(self, kind: str, space: tuple[int, ...], reads: Sequence[GroupOperand],
            writes: Sequence[GroupOperand], steps: Sequence[GroupStep], schedule: Schedule,
            grid: tuple[int, ...], **attrs: Any) -> None:
        """A kernel. attrs: what its kind needs beyond the steps."""
        self.steps.append(ScheduledGroup(
            f"g{next(self._group_count)}", kind, space, tuple(reads), tuple(writes), tuple(steps),
            schedule, grid, tuple(sorted(attrs.items())),
            "" if self._batch is None else f"b{self._batch}"))

    def transfer(self, group: FusionGroup) -> None:
        """A copy beside the kernels."""
        (node,) = group.nodes
        source, target = map(self.buffer_name, (node.inputs[0], node.outputs[0]))
        self.steps.append(Transfer(
            f"x{next(self._copy_count)}", group.kind, source, target, value_bytes(node.outputs[0]),
            tuple(id_of(node).split()), line_of(node.where)))

    # --- buffers ------------------------------------------------------------------------------
    def _buffers(self) -> Iterable[PlannedBuffer]:
        """One for everything that lies in memory, arguments first."""
        given = [*self.graph.given, *self.drawn]
        for group in self.groups:
            for v in group.outputs:
                self.buffer_name(self.memory.places[v].root)
        for v in (*given, *(v for v in self.known if v in self.names)):
            yield self._buffer(v)
        for group in self.groups:
            for v in group.outputs:
                yield self._buffer(v, next(n for n in group.nodes if v in n.outputs))

    def _buffer(self, v: Value, node: Node | None = None) -> PlannedBuffer:
        place = self.memory.places[v]
        ops = tuple(id_of(node).split()) if node is not None else ()
        of = self.names[place.root] if place.kind == "view" else ""
        gone = self.memory.over.get(v)
        return PlannedBuffer(self.names[v], extents_of(v), v.aval.type,
                             BUFFERS.get(place.kind, place.kind), of, place.offset, ops,
                             self.layout(v), "" if gone is None else self.names[gone])


def node_flops(node: Node) -> float:
    """Its operations: by the rule of its record, else one for each element of its results."""
    outs = [extents_of(v) for v in node.outputs]
    if node.op.operations is None:
        return float(sum(map(prod, outs)))
    return node.op.operations([extents_of(v) for v in node.inputs], outs, **node.attrs)


__all__ = ["ScheduleBuilder", "node_flops"]
