"""Memory plan of a graph: where every value lives, and when its bytes are free again.

Values are of these kinds:
    input, capture   arrays given at each call
    drawn            what the host computes at each call before anything else runs
    known            computed while planning
    arena            a range of one block of memory that is reused as values die
    fresh            memory of its own, because the caller keeps it
    dynamic          whatever array a library op returns
    host             page-locked memory on the host, while a copy of the value is there
    view             another value's memory with other extents or strides, or written over, or a
                     part of it that is made before the rest

Which of them a value can be follows from the record of its op (`GraphOp.memory`) and that of the
target (`ScheduleTarget.memory`); check_memory_plan.py proves the plan from these and the order of
the groups alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from ...lazy_dataclass import dataclass
from ..ir import Graph, Node, Value, elements, value_bytes
from .check_memory_plan import verify_plan
from .groups import FusionGroup, batch_ends
from .library_call import LibraryCall
from .overwrites import find_overwrites
from .place_views import place_views
from .target import ScheduleTarget
from .view_plan import ViewPlan

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

    target: ScheduleTarget
    places: dict[Value, ValueStorage] = field(default_factory=dict)
    known: dict[Value, np.ndarray] = field(default_factory=dict)
    shadows: dict[Value, np.ndarray] = field(default_factory=dict)  # right shape and strides, of
    # a target whose views have strides
    views: ViewPlan = field(default_factory=ViewPlan)  # of other targets
    lying: dict[Value, list[Value]] = field(default_factory=dict)  # by root: all that lie there
    last_use: dict[Value, int] = field(default_factory=dict)  # of roots: index of the last unit
    released: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # behind unit i:
    # (offset, bytes) of the arena that nothing reads any more
    copied: list[bool] = field(default_factory=list)  # per output: whether its memory is shared
    # with an argument, a capture, a constant, another output or among its own elements, so that
    # the caller gets a copy
    donated: frozenset[Value] = frozenset()  # inputs that the caller gives up
    overwritten: set[Value] = field(default_factory=set)  # those that something is written over
    over: dict[Value, Value] = field(default_factory=dict)  # values of the arena by those that are
    # written in their place
    arena_bytes: int = 0
    unshared_bytes: int = 0


def fold_constants(graph: Graph) -> tuple[dict[Value, np.ndarray], Graph]:
    """Values that depend on nothing but constants, and the graph of the nodes that remain."""
    known: dict[Value, np.ndarray] = {}
    rest: list[Node] = []
    for node in graph.nodes:
        if node.op.effects or node.op.graph_attrs or node.op.name == "place" or isinstance(
                node.op, LibraryCall) or not all(v in known for v in node.inputs):
            rest.append(node)  # a known result is placed as others are
            continue
        if node.op.name == "full":
            known[node.outputs[0]] = _filled(node)
            continue
        size = sum(elements(v) for v in node.outputs) * 8
        if size > FOLD_BYTES and not _repeats(node, known):
            rest.append(node)
            continue
        with np.errstate(all="ignore"):
            made = node.op.ref(*[known[v] for v in node.inputs], **node.attrs)
        made = made if node.op.multi else (made,)
        known.update((v, np.asarray(a)) for v, a in zip(node.outputs, made, strict=True))
    return known, replace(graph, nodes=tuple(rest))


def _repeats(node: Node, known: dict[Value, np.ndarray]) -> bool:
    """Whether it shows one number in another shape, which takes no memory."""
    return node.op.lies(node.attrs).kind == "view" and all(
        known[v].size == 1 or not any(known[v].strides) for v in node.inputs)


def _filled(node: Node) -> np.ndarray:
    """A fill without its memory: one element under strides of 0."""
    one = node.op.ref(**{**node.attrs, "shape": ()})
    return np.broadcast_to(one, node.attrs["shape"])


def numbers(known: dict[Value, np.ndarray]) -> dict[Value, Any]:
    """Known values that are one number repeated, for use inside loops. Those that are NaN are one
    object: groups that have it are equal."""
    out: dict[Value, Any] = {}
    for v, a in known.items():
        repeated = a.size == 1 or (a.size > 0 and not any(a.strides))
        if repeated and a.dtype.kind in "biuf" and a.dtype != np.float16:
            x = a.reshape(-1)[0].item() if a.size == 1 else a[(0,) * a.ndim].item()
            out[v] = x if x == x else math.nan
    return out


def plan_memory(graph: Graph, groups: Sequence[FusionGroup], known: dict[Value, np.ndarray],
                target: ScheduleTarget, drawn: Sequence[Value] = (),
                donated: Sequence[Value] = ()) -> MemoryPlan:
    """Places for every value that groups read or write, proved."""
    plan = MemoryPlan(target, known=known, donated=frozenset(donated))
    for v in graph.inputs:
        _own_memory(plan, v, "input")
    for v, _ in graph.captures:
        _own_memory(plan, v, "capture")
    for v in drawn:
        _own_memory(plan, v, "drawn")
    for v, a in known.items():
        plan.places[v], plan.shadows[v], plan.lying[v] = ValueStorage("known", v), a, [v]
    if not target.strides:
        plan.views = place_views(graph, groups, target)
    last_read = _last_reads(graph, groups)
    for i, group in enumerate(groups):
        _place_outputs(plan, group, i, last_read)
    _note_uses(plan, graph, groups)
    _escape(plan, graph)
    plan.over = find_overwrites(plan, groups)
    _pack_arena(plan, groups)
    verify_plan(graph, groups, plan)
    return plan


def _own_memory(plan: MemoryPlan, v: Value, kind: str) -> None:
    plan.places[v], plan.lying[v] = ValueStorage(kind, v), [v]
    if plan.target.strides:
        plan.shadows[v] = np.empty(v.aval.shape, v.aval.dtype.numpy)  # never touched


def _last_reads(graph: Graph, groups: Sequence[FusionGroup]) -> dict[Value, int]:
    """The last group that reads each value; one past the end for results."""
    last = {v: i for i, group in zip(batch_ends(groups), groups, strict=True)
            for v in group.inputs}
    return last | dict.fromkeys(graph.outputs, len(groups))


def _place_outputs(plan: MemoryPlan, group: FusionGroup, i: int, last_read: dict[Value, int]
                   ) -> None:
    memory = plan.target.memory(group)
    if memory.kind == "view" and plan.target.strides:
        _place_view(plan, group.nodes[0])
        return
    owners = plan.views.owners
    for v in group.outputs:
        if v not in owners:
            continue
        if owners[v] not in plan.places:  # made later, of parts that are made now
            _own_memory(plan, owners[v], "arena")
        root = plan.places[owners[v]].root
        plan.places[v] = ValueStorage("view", root)
        plan.lying[root].append(v)
    if any(v in plan.places for v in group.outputs):
        for v in group.outputs:
            if v not in plan.places:
                _own_memory(plan, v, plan.target.buffer(group))
    elif memory.kind == "donated" and _may_overwrite(plan, group, memory.operand, i, last_read):
        source, v = group.inputs[memory.operand], group.outputs[0]
        plan.places[v] = ValueStorage("view", plan.places[source].root)
        plan.lying[plan.places[source].root].append(v)
        plan.overwritten |= {plan.places[source].root} & plan.donated
        if plan.target.strides:
            plan.shadows[v] = plan.shadows[source]
    else:
        for v in group.outputs:
            _own_memory(plan, v, plan.target.buffer(group))


def _may_overwrite(plan: MemoryPlan, group: FusionGroup, operand: int, i: int,
                   last_read: dict[Value, int]) -> bool:
    """Whether an operand's memory is the graph's own, whole, and read by nobody afterwards."""
    x = group.inputs[operand]
    root = plan.places[x].root
    own = plan.places[root].kind == "arena" or root in plan.donated
    return (
        own and (root is x or root in plan.donated)
        and x.aval == group.outputs[0].aval
        and group.inputs.count(x) == 1
        and all(last_read.get(v, -1) <= i for v in plan.lying[root])
        and not any(plan.places[v].root is root for v in group.inputs if v is not x)
    )


def _place_view(plan: MemoryPlan, node: Node) -> None:
    source, v = node.inputs[0], node.outputs[0]
    root = plan.places[source].root
    made = place_in(node, plan.shadows[source])
    if made.size and not np.may_share_memory(made, plan.shadows[source]):
        _own_memory(plan, v, "arena")  # the strides do not allow it: the elements are copied
        return
    plan.shadows[v] = made
    plan.places[v] = ValueStorage("view", root)
    plan.lying[root].append(v)


def place_in(node: Node, x: np.ndarray) -> np.ndarray:
    """Where a view lies in its operand's memory, whose elements are not there yet: an op that looks
    at them gives them as they are."""
    return x if node.op.host else np.asarray(node.op.ref(x, **node.attrs))


def _note_uses(plan: MemoryPlan, graph: Graph, groups: Sequence[FusionGroup]) -> None:
    for i, group in zip(batch_ends(groups), groups, strict=True):
        for v in (*group.inputs, *group.outputs):
            plan.last_use[plan.places[v].root] = i
    sent: dict[str, FusionGroup] = {}  # that last, by kind
    for i, group in zip(batch_ends(groups), groups, strict=True):
        kind = plan.target.lasts(group)
        read = set() if _is_view(plan, group) else _roots(plan, group.inputs)
        for other, before in list(sent.items()):
            if other == kind or read & _roots(plan, before.outputs):
                del sent[other]
                for root in _roots(plan, (*before.inputs, *before.outputs)):
                    plan.last_use[root] = max(plan.last_use[root], i)
        if kind:
            sent[kind] = group
    for v in graph.outputs:
        plan.last_use[plan.places[v].root] = len(groups)


def _is_view(plan: MemoryPlan, group: FusionGroup) -> bool:
    """Whether a group does nothing: its results lie where its operands do."""
    views = plan.views
    return group.kind == "view" or bool(group.outputs) and all(
        v in views.owners and v not in views.pieces for v in group.outputs)


def _roots(plan: MemoryPlan, values: Iterable[Value]) -> set[Value]:
    return {plan.places[v].root for v in values}


def _escape(plan: MemoryPlan, graph: Graph) -> None:
    """What the caller keeps may not lie in the arena, nor where anybody else keeps something."""
    seen: set[Value] = set()
    for v in graph.outputs:
        root = plan.places[v].root
        if plan.places[root].kind == "arena":
            plan.places[root].kind = "fresh"
        owned = root not in seen and (plan.places[root].kind in ("fresh", "dynamic")
                                      or root in plan.overwritten)
        repeats = v in plan.shadows and not plan.shadows[v].flags.writeable
        plan.copied.append(not owned or repeats)
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


def aligned_bytes(v: Value, target: ScheduleTarget) -> int:
    """The bytes of the arena that a value takes."""
    return -(-max(value_bytes(v), 1) // target.align_bytes) * target.align_bytes


def _pack_arena(plan: MemoryPlan, groups: Sequence[FusionGroup]) -> None:
    arena, ends, taken = _Arena(), by_last_use(plan), set[Value]()
    kept = set(plan.over.values())  # for what is written there
    for i, group in enumerate(groups):
        for v in dict.fromkeys(plan.places[v].root for v in group.outputs):
            place = plan.places[v]
            if place.kind == "arena" and v not in taken:
                taken.add(v)
                size = aligned_bytes(v, plan.target)
                place.offset = (plan.places[plan.over[v]].offset if v in plan.over
                                else arena.take(size))
                plan.unshared_bytes += size
        for v in ends.get(i, ()):
            if plan.places[v].kind == "arena" and v not in kept:
                at, size = plan.places[v].offset, aligned_bytes(v, plan.target)
                arena.give(at, size)
                plan.released.setdefault(i, []).append((at, size))
    plan.arena_bytes = arena.end


def by_last_use(plan: MemoryPlan) -> dict[int, list[Value]]:
    ends: dict[int, list[Value]] = {}
    for v, i in plan.last_use.items():
        ends.setdefault(i, []).append(v)
    return ends
