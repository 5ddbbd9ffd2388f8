"""Memory plan of a graph: where every value lives, and when its bytes are free again.

Values are of these kinds:
    input, capture   arrays given at each call
    known            computed while planning
    arena            a range of one block of memory that is reused as values die
    fresh            newly allocated at each call, because the caller keeps it
    dynamic          whatever array a library op returns
    view             another value's memory with other extents or strides, or written over

Which of them a value can be follows from its op's record (`GraphOp.memory`); check_memory_plan.py
proves the plan from these records and the order of the units alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ir import Graph, Node, Value, elements
from ..op import FRESH
from .check_memory_plan import verify_plan
from .fuse import FusionGroup, Unit

ALIGN_BYTES = 64
FOLD_BYTES = 1 << 25  # larger results of constants are computed at each call, not kept


@dataclass
class ValueStorage:
    """How a value is stored. `root` is the value that owns the memory."""

    kind: str
    root: Value
    offset: int = 0


@dataclass
class MemoryPlan:
    """Places of all values, the size of the arena, and what it would be without reuse."""

    places: dict[Value, ValueStorage] = field(default_factory=dict)
    known: dict[Value, np.ndarray] = field(default_factory=dict)
    shadows: dict[Value, np.ndarray] = field(default_factory=dict)  # right shape and strides
    lying: dict[Value, list[Value]] = field(default_factory=dict)  # by root: all that lie there
    last_use: dict[Value, int] = field(default_factory=dict)  # of roots: index of the last unit
    released: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # behind unit i:
    # (offset, bytes) of the arena that nothing reads any more
    copied: list[bool] = field(default_factory=list)  # per output: whether its memory is shared
    # with an argument, a capture, a constant, another output or among its own elements, so that
    # the caller gets a copy
    arena_bytes: int = 0
    unshared_bytes: int = 0


def inputs_of(unit: Unit) -> Sequence[Value]:
    return unit.inputs


def outputs_of(unit: Unit) -> Sequence[Value]:
    return unit.outputs


def fold_constants(graph: Graph) -> tuple[dict[Value, np.ndarray], tuple[Node, ...]]:
    """Values that depend on nothing but constants, and the nodes that remain."""
    known: dict[Value, np.ndarray] = {}
    rest: list[Node] = []
    for node in graph.nodes:
        if node.op.effects or node.op.graph_attrs or not all(v in known for v in node.inputs):
            rest.append(node)
            continue
        if node.op.name == "full":
            known[node.outputs[0]] = _filled(node)
            continue
        size = sum(elements(v) for v in node.outputs) * 8
        if size > FOLD_BYTES:
            rest.append(node)
            continue
        with np.errstate(all="ignore"):
            made = node.op.ref(*[known[v] for v in node.inputs], **node.attrs)
        made = made if node.op.multi else (made,)
        known.update((v, np.asarray(a)) for v, a in zip(node.outputs, made, strict=True))
    return known, tuple(rest)


def _filled(node: Node) -> np.ndarray:
    """A fill without its memory: one element under strides of 0."""
    one = node.op.ref(**{**node.attrs, "shape": ()})
    return np.broadcast_to(one, node.attrs["shape"])


def numbers(known: dict[Value, np.ndarray]) -> dict[Value, Any]:
    """Known values that are one number repeated, for use inside loops."""
    out: dict[Value, Any] = {}
    for v, a in known.items():
        repeated = a.size == 1 or (a.size > 0 and not any(a.strides))
        if repeated and a.dtype.kind in "biuf" and a.dtype != np.float16:
            out[v] = a.reshape(-1)[0].item() if a.size == 1 else a[(0,) * a.ndim].item()
    return out


def plan_memory(graph: Graph, units: Sequence[Unit], known: dict[Value, np.ndarray]) -> MemoryPlan:
    """Places for every value of the units."""
    plan = MemoryPlan(known=known)
    for v in graph.inputs:
        _given(plan, v, "input")
    for v, _ in graph.captures:
        _given(plan, v, "capture")
    for v, a in known.items():
        plan.places[v], plan.shadows[v], plan.lying[v] = ValueStorage("known", v), a, [v]
    last_read = _last_reads(graph, units)
    for i, unit in enumerate(units):
        _place_outputs(plan, unit, i, last_read)
    _note_uses(plan, graph, units)
    _escape(plan, graph)
    _pack_arena(plan, units)
    verify_plan(graph, units, plan)
    return plan


def _given(plan: MemoryPlan, v: Value, kind: str) -> None:
    plan.places[v], plan.shadows[v], plan.lying[v] = ValueStorage(kind, v), _phantom(v), [v]


def _phantom(v: Value) -> np.ndarray:
    """An array of the right extents whose memory is never touched."""
    return np.empty(v.aval.shape, v.aval.dtype.numpy)


def _last_reads(graph: Graph, units: Sequence[Unit]) -> dict[Value, int]:
    """The last unit that reads each value; one past the end for results."""
    last = {v: i for i, unit in enumerate(units) for v in inputs_of(unit)}
    return last | dict.fromkeys(graph.outputs, len(units))


def _place_outputs(plan: MemoryPlan, unit: Unit, i: int, last_read: dict[Value, int]) -> None:
    memory = FRESH if isinstance(unit, FusionGroup) else unit.op.lies(unit.attrs)
    if memory.kind == "view" and isinstance(unit, Node):
        _place_view(plan, unit)
    elif memory.kind == "donated" and _may_overwrite(plan, unit, memory.operand, i, last_read):
        source, v = unit.inputs[memory.operand], unit.outputs[0]
        plan.places[v], plan.shadows[v] = ValueStorage("view", source), plan.shadows[source]
        plan.lying[source].append(v)
    else:
        owned = isinstance(unit, FusionGroup) or unit.op.out
        for v in outputs_of(unit):
            _given(plan, v, "arena" if owned else "dynamic")


def _may_overwrite(plan: MemoryPlan, unit: Unit, operand: int, i: int,
                   last_read: dict[Value, int]) -> bool:
    """Whether an operand's memory is the graph's own, whole, and read by nobody afterwards."""
    x = unit.inputs[operand]
    return (
        plan.places[x].kind == "arena"
        and x.aval == unit.outputs[0].aval
        and unit.inputs.count(x) == 1
        and all(last_read.get(v, -1) <= i for v in plan.lying[x])
        and not any(plan.places[v].root is x for v in unit.inputs if v is not x)
    )


def _place_view(plan: MemoryPlan, node: Node) -> None:
    source, v = node.inputs[0], node.outputs[0]
    made = np.asarray(node.op.ref(plan.shadows[source], **node.attrs))
    if made.size == 0 or np.may_share_memory(made, plan.shadows[source]):
        root = plan.places[source].root
        plan.places[v], plan.shadows[v] = ValueStorage("view", root), made
        plan.lying[root].append(v)
    else:  # the strides do not allow it: the elements are copied
        _given(plan, v, "arena")


def _note_uses(plan: MemoryPlan, graph: Graph, units: Sequence[Unit]) -> None:
    for i, unit in enumerate(units):
        for v in (*inputs_of(unit), *outputs_of(unit)):
            plan.last_use[plan.places[v].root] = i
    for v in graph.outputs:
        plan.last_use[plan.places[v].root] = len(units)


def _escape(plan: MemoryPlan, graph: Graph) -> None:
    """What the caller keeps may not lie in the arena, nor where anybody else keeps something."""
    seen: set[Value] = set()
    for v in graph.outputs:
        root = plan.places[v].root
        if plan.places[root].kind == "arena":
            plan.places[root].kind = "fresh"
        owned = plan.places[root].kind in ("fresh", "dynamic") and root not in seen
        plan.copied.append(not owned or not plan.shadows[v].flags.writeable)  # it may repeat some
        seen.add(root)


class _Arena:
    """First-fit over the gaps of a growing block."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (offset, bytes), sorted
        self.end = 0

    def take(self, size: int) -> int:
        best = min(
            (i for i, (_, n) in enumerate(self.free) if n >= size),
            key=lambda i: self.free[i][1],
            default=None,
        )
        if best is not None:
            at, n = self.free.pop(best)
            if n > size:
                self.give(at + size, n - size)
            return at
        if self.free and sum(self.free[-1]) == self.end:  # grow the gap at the end
            at, n = self.free.pop()
            self.end = at + size
            return at
        at, self.end = self.end, self.end + size
        return at

    def give(self, at: int, size: int) -> None:
        self.free.append((at, size))
        self.free.sort()
        merged: list[tuple[int, int]] = []
        for a, n in self.free:
            if merged and sum(merged[-1]) == a:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((a, n))
        self.free = merged


def aligned_bytes(v: Value) -> int:
    n = elements(v) * v.aval.dtype.numpy.itemsize
    return -(-max(n, 1) // ALIGN_BYTES) * ALIGN_BYTES


def _pack_arena(plan: MemoryPlan, units: Sequence[Unit]) -> None:
    arena, ends = _Arena(), by_last_use(plan)
    for i, unit in enumerate(units):
        for v in outputs_of(unit):
            place = plan.places[v]
            if place.kind == "arena":
                place.offset = arena.take(aligned_bytes(v))
                plan.unshared_bytes += aligned_bytes(v)
        for v in ends.get(i, ()):
            if plan.places[v].kind == "arena":
                at, size = plan.places[v].offset, aligned_bytes(v)
                arena.give(at, size)
                plan.released.setdefault(i, []).append((at, size))
    plan.arena_bytes = arena.end


def by_last_use(plan: MemoryPlan) -> dict[int, list[Value]]:
    ends: dict[int, list[Value]] = {}
    for v, i in plan.last_use.items():
        ends.setdefault(i, []).append(v)
    return ends
