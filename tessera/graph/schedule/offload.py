"""Values that a backward pass reads later, in host memory meanwhile: which leave, when they return.

A value that is `saved(place="host")` is copied to the host behind the kernel that made it, and back
ahead of its first reader: at least by one kernel, and as early as what is on its way, and not read
yet, is no more than the largest of such values. So while kernels work on one layer's values, the
next layer's arrive.

    units = place_saved(units, graph)   # units of kind `saved` become offload and fetch, or views
    waits(steps, region_of)             # per step, which copy it must wait for
    verify_copies(schedule)             # proof that it waits for enough
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import GraphError
from ..ir import Graph, Node, Value, producers_of, value_bytes
from ..simplify import remove_dead
from .groups import FusionGroup
from .ir import ByteRange, GraphSchedule, ScheduledGroup, Transfer
from .library_call import LibraryCall, library_call
from .loop_axes import extents_of

LEAST_BYTES = 1 << 16  # a copy of less takes the time of its launch and saves next to nothing
OFFLOAD, FETCH = library_call("offload"), library_call("fetch")


def place_saved(units: Sequence[FusionGroup], graph: Graph) -> list[FusionGroup]:
    """The units with the copies of what is saved on the host, in the order in which they start.

    What needs no kernel memory of its own in between (arguments, results, values that another
    kernel reads as late) and what is small stays where it is: its unit becomes a view.
    """
    life = _Life(units)
    fixed = {*graph.given, *graph.outputs, *map(life.root, graph.outputs)}
    leaving: list[_Copy] = []
    for at, unit in enumerate(units):
        if unit.kind != "saved":
            continue
        (node,) = unit.nodes
        (x,), (y,) = node.inputs, node.outputs
        source, used = life.root(x), life.first(y)
        if used is None or node.attrs["place"] == "device" or value_bytes(y) < LEAST_BYTES:
            continue
        if source in life.made and not fixed & {source, y} and life.last(source) < used:
            leaving.append(_Copy(at, used, node))
    return _woven(units, leaving)


class _Coming:
    """A value that is there from unit `at` on, by position, and used again at another."""

    at: int
    used: Any
    nbytes: int
    fetch: FusionGroup


class _Copy(_Coming):
    """A value that leaves at one unit, by position, and is used again at another."""

    def __init__(self, at: int, used: int, node: Node):
        (x,), (y,) = node.inputs, node.outputs
        self.at, self.used, self.nbytes = at, used, value_bytes(y)
        held = Value(y.aval)
        self.offload = _unit(OFFLOAD, x, held, node)
        self.fetch = _unit(FETCH, held, y, node)


def _unit(call: LibraryCall, x: Value, y: Value, of: Node) -> FusionGroup:
    node = Node(call, (x,), {}, (y,), of.where)
    return FusionGroup(call.name, extents_of(y), [node], [x], [y])


def _woven(units: Sequence[FusionGroup], leaving: list[_Copy]) -> list[FusionGroup]:
    ahead: dict[int, list[FusionGroup]] = {}
    kernels = [at for at, unit in enumerate(units) if unit.kind not in ("view", "saved", "empty")]
    for copy, at in _starts(leaving, kernels):
        ahead.setdefault(at, []).append(copy.fetch)
    offloads = {copy.at: copy.offload for copy in leaving}
    out: list[FusionGroup] = []
    for at, unit in enumerate(units):
        out += ahead.get(at, [])
        if at in offloads:
            out.append(offloads[at])
        elif unit.kind == "saved":
            out.append(FusionGroup("view", unit.space, unit.nodes, unit.inputs, unit.outputs))
        else:
            out.append(unit)
    return out


def _starts(leaving: Sequence[_Coming], kernels: list[int]) -> list[tuple[_Coming, int]]:
    """In the order in which they are read, ahead of which unit each copy back begins: the first
    reader of an earlier one, or the kernel before its own. kernels: the positions of kernels."""
    order = sorted(leaving, key=lambda c: (c.used, c.at))
    window = max((c.nbytes for c in leaving), default=0)
    found = []
    for j, copy in enumerate(order):
        start, coming = copy.used, copy.nbytes
        for earlier in reversed(order[:j]):
            if coming > window or earlier.used <= copy.at:
                break
            start, coming = earlier.used, coming + earlier.nbytes
        if start == copy.used:
            start = max((k for k in kernels if copy.at < k < copy.used), default=start)
        found.append((copy, start))
    return found


class _Life:
    """Where values are made and read, views being what they are views of."""

    def __init__(self, units: Sequence[FusionGroup]):
        self.views: dict[Value, Value] = {}
        self.made: set[Value] = set()
        self.reads: dict[Value, list[int]] = {}
        for at, unit in enumerate(units):
            node = unit.nodes[0]
            if unit.kind == "view" or unit.kind == "saved" and node.attrs["place"] == "device":
                self.views[node.outputs[0]] = node.inputs[0]
                continue
            self.made.update(unit.outputs)
            for v in unit.inputs:
                self.reads.setdefault(self.root(v), []).append(at)

    def root(self, v: Value) -> Value:
        while v in self.views:
            v = self.views[v]
        return v

    def first(self, v: Value) -> int | None:
        """The first unit that reads it."""
        return self.reads[v][0] if v in self.reads else None

    def last(self, v: Value) -> int:
        """The last unit that reads it; that which saves it is one."""
        return self.reads[v][-1]


# --- arguments and results on the host -----------------------------------------------------------
def copy_arguments(graph: Graph, on_host: Sequence[int]) -> Graph:
    """The graph with a copy of each input that lies on the host, by number, and one to the host of
    each result that is placed there."""
    makers = producers_of(graph)
    placed = placed_on_host(graph)
    there = {v: Value(v.aval) for v in (graph.inputs[i] for i in on_host)}
    nodes = [Node(FETCH, (v,), {}, (new,), _first_line(graph, v)) for v, new in there.items()]
    nodes += [n if not there.keys() & set(n.inputs) else
              Node(n.op, tuple(there.get(v, v) for v in n.inputs), n.attrs, n.outputs, n.where)
              for n in graph.nodes]
    outputs = []
    for i, v in enumerate(graph.outputs):
        if i in placed:
            held, x = Value(v.aval), makers[v].inputs[0]
            nodes.append(Node(OFFLOAD, (there.get(x, x),), {}, (held,), makers[v].where))
            outputs.append(held)
        else:
            outputs.append(there.get(v, v))
    return remove_dead(replace(graph, nodes=tuple(nodes), outputs=tuple(outputs)))


def placed_on_host(graph: Graph) -> set[int]:
    """The results, by number, that the graph places there."""
    made = {v for n in graph.nodes if n.op.name == "place" and n.attrs["to"] == "host"
            for v in n.outputs}
    return {i for i, v in enumerate(graph.outputs) if v in made}


def _first_line(graph: Graph, v: Value) -> Any:
    return next((n.where for n in graph.nodes if v in n.inputs), None)


def order_arguments(units: Sequence[FusionGroup], graph: Graph) -> list[FusionGroup]:
    """The units with the copies of `copy_arguments` where they begin: those to the device ahead of
    their first reader, as those of saved values, those to the host behind what makes the result."""
    given, results = set(graph.inputs), set(graph.outputs)
    coming = [u for u in units if u.kind == "fetch" and u.inputs[0] in given]
    leaving = [u for u in units if u.kind == "offload" and u.outputs[0] in results]
    rest = [u for u in units if u not in coming and u not in leaving]
    life = _Life(rest)
    made = {v: at for at, u in enumerate(rest) for v in u.outputs}
    copies = [_Arrival(u, life.first(u.outputs[0])) for u in coming]
    kernels = [at for at, u in enumerate(rest) if u.kind not in ("view", "empty")]
    ahead: dict[int, list[FusionGroup]] = {}
    for copy, at in _starts([c for c in copies if c.used is not None], kernels):
        ahead.setdefault(at, []).append(copy.fetch)
    behind: dict[int, list[FusionGroup]] = {}
    for u in leaving:
        behind.setdefault(made.get(u.inputs[0], -1), []).append(u)
    out = [*behind.get(-1, ())]
    for at, unit in enumerate(rest):
        out += [*ahead.get(at, ()), unit, *behind.get(at, ())]
    return out + [c.fetch for c in copies if c.used is None]


class _Arrival(_Coming):
    """A copy of an argument, ahead of the unit that reads it first, by position."""

    def __init__(self, unit: FusionGroup, used: int | None):
        self.fetch, self.used, self.at = unit, used, -1
        self.nbytes = value_bytes(unit.outputs[0])


# --- when kernels wait ---------------------------------------------------------------------------
RangeOf = Callable[[str], ByteRange]


def waits(steps: Sequence[ScheduledGroup | Transfer], region_of: RangeOf) -> list[int | None]:
    """Per step the number of the copy that it must wait for, None when it need not. Copies run in
    order beside the kernels, so that to wait for one is to wait for all before it.

    region_of: the memory in which a buffer lies. A kernel may read what is being copied out of it,
    not write it; it may do neither where a copy writes.
    """
    leaving: dict[ByteRange, int] = {}
    coming: dict[ByteRange, int] = {}
    out: list[int | None] = []
    count, waited = 0, -1
    for step in steps:
        if isinstance(step, Transfer):
            touched = leaving if step.kind == "offload" else coming
            touched[region_of(step.on_device)] = count
            count += 1
            out.append(None)
            continue
        reads, writes = _regions(step, region_of)
        need = max(_last(coming, reads + writes), _last(leaving, writes))
        out.append(need if need > waited else None)
        waited = max(waited, need)
    return out


def _regions(step: ScheduledGroup, region_of: RangeOf) -> tuple[list[ByteRange], list[ByteRange]]:
    return [region_of(o.name) for o in step.reads], [region_of(o.name) for o in step.writes]


def _last(copies: dict[ByteRange, int], touched: Sequence[ByteRange]) -> int:
    """The number of the last copy that works in this memory, -1 when none does."""
    return max((n for at, n in copies.items() for r in touched if r.meets(at)), default=-1)


def verify_copies(plan: GraphSchedule) -> None:
    """Raise GraphError where a kernel runs beside a copy that works in the same memory: between
    its start and the first kernel that waits for it a copy may run at any time."""
    running: dict[int, Transfer] = {}
    started = 0
    for step, awaited in zip(plan.steps, waits(plan.steps, plan.region), strict=True):
        if isinstance(step, Transfer):
            running[started] = step
            started += 1
            continue
        if awaited is not None:
            running = {n: t for n, t in running.items() if n > awaited}
        reads, writes = _regions(step, plan.region)
        for t in running.values():
            at = plan.region(t.on_device)
            if any(at.meets(r) for r in (writes if t.kind == "offload" else reads + writes)):
                raise GraphError(
                    f"memory plan of {plan.name}: {step.name} runs beside {t.name}, which still "
                    f"copies {t.on_device}",
                    hint="this is a fault of tessera, not of the program: please report it")


__all__ = ["FETCH", "LEAST_BYTES", "OFFLOAD", "copy_arguments", "order_arguments", "place_saved",
           "placed_on_host", "verify_copies", "waits"]
