"""Running a compiled graph with sentinels on: its loops count bad values while they compute them.

A NaN or infinity is looked for where it could be hidden or leave: among the results, and in front
of ops that neither carry it on nor may drop it (`GraphOp.carries`, `GraphOp.may_drop`). Loops count
such values inside, whatever of them stays there; what library calls give is looked at behind them.
When something was seen the call is run again from its arguments, op by op, and shown to the
sentinels, who say which op made it. So the blame is exact, and a call without a finding costs
little: a step of examples/train.py takes 1.0 to 1.1 times as long, where running op by op took 12
times (2 busy cores, f32, bf16 and f16).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from .. import hooks
from ..lazy_dataclass import dataclass
from ..numerics import CastCounts
from ..numerics.random_state import get_state, set_state
from .cpu.compiled import CompiledGraph, Step
from .cpu.lower import LoweredLoop, lower
from .cpu.widen_matmuls import widen_matmuls
from .interpret import interpret
from .ir import Graph, Node, Value
from .op import GraphOp
from .schedule.groups import FusionGroup


@dataclass
class Tally:
    """What a call has shown so far. blaming: it is run again, op by op."""

    bad: bool = False
    blaming: bool = False
    lost: list[tuple[Node, CastCounts]] = field(default_factory=list)


class _Local(threading.local):
    tally: Tally | None = None


_local = _Local()


def run_watched(graph: Graph, watched: Callable[[], Watched], arrays: Sequence[np.ndarray]
                ) -> list[np.ndarray]:
    """The results of a graph, its bad values and what its casts lost shown to the sentinels.

    watched: gives its steps; they are compiled when they are asked for first
    """
    tally = _local.tally
    if tally is not None:  # a graph within the one that is watched
        if tally.blaming:
            return interpret(graph, arrays)
        return watched().run(arrays)
    tally = _local.tally = Tally(any(s.doubts(graph.inputs) for s in hooks.sentinels))
    try:
        state = get_state()
        out = watched().run(arrays)
        if not tally.bad:
            for node, counts in tally.lost:
                for sentinel in hooks.sentinels:
                    sentinel.lost(node, counts)
            return out
        tally.blaming = True
        if "random" in graph.effects:
            set_state(state)
        interpret(graph, arrays)
        return out
    finally:
        _local.tally = None


def runs_again() -> bool:
    """A kernel in a call that is watched has made something bad: whether the call will be run
    again, op by op, and the kernel with it."""
    tally = _local.tally
    if tally is None or tally.blaming:
        return False
    tally.bad = True
    return True


def blame(graph: Graph, arrays: Sequence[np.ndarray]) -> set[Value]:
    """Run a graph op by op, shown to the sentinels: they say which op made what is bad. Gives the
    values that held something bad, meant or not. What the graph does beside computing, such as
    printing, has been done and is left out."""
    bad: set[Value] = set()

    def observe(node: Node, inputs: tuple, made: tuple) -> None:
        bad.update(v for v, a in zip(node.outputs, made, strict=True)
                   if _holds(v) and not is_clean(a, "any"))

    _local.tally = Tally(bad=True, blaming=True)
    try:
        interpret(_computing(graph), arrays, observe)
    finally:
        _local.tally = None
    return bad


def _computing(graph: Graph) -> Graph:
    """The graph without nodes that have no result, in the graphs that nodes hold, too."""
    nodes = tuple(Node(n.op, n.inputs, {k: _computing_graphs(v) if k in n.op.graph_attrs else v
                                        for k, v in n.attrs.items()}, n.outputs, n.where)
                  for n in graph.nodes if n.outputs)
    return replace(graph, nodes=nodes)


def _computing_graphs(held: Graph | tuple[Graph, ...]) -> Graph | tuple[Graph, ...]:
    return tuple(map(_computing, held)) if isinstance(held, tuple) else _computing(held)


# --- what is looked at ------------------------------------------------------------------------
def checked_values(graph: Graph) -> dict[Value, str]:
    """Values in which something bad may be hidden by what reads them, or leaves: "any", or "nan"
    where infinities are no harm."""
    checked: dict[Value, str] = {v: "any" for v in graph.outputs if _holds(v)}
    for node in graph.nodes:
        for k, v in enumerate(node.inputs):
            if not _holds(v) or _carries(node, k) or node.op.may_drop(k, "nan"):
                continue
            kind = "nan" if node.op.may_drop(k, "inf") else "any"
            checked[v] = "any" if "any" in (kind, checked.get(v)) else "nan"
    return checked


def _holds(v: Value) -> bool:
    dtype = v.aval.dtype
    return dtype.kind == "float" and dtype.special != "none"


def _carries(node: Node, k: int) -> bool:
    if not node.op.converts:
        return node.op.carries(k)
    to = node.attrs.get("to")  # codes of a packed type have none, and carry nothing
    return to is not None and to.dtype.kind == "float" and to.dtype.special != "none" \
        and not to.policy.saturate


def is_clean(a: np.ndarray, kind: str) -> bool:
    """Whether no element is bad. One pass of BLAS where that can tell, which is the rule."""
    if kind == "any" and a.dtype.kind == "f" and a.itemsize >= 4 and a.flags.c_contiguous:
        flat = a.reshape(-1)
        if np.isfinite(np.dot(flat, flat)):
            return True
    return not np.isnan(a).any() if kind == "nan" else bool(np.isfinite(a).all())


# --- the steps --------------------------------------------------------------------------------
class Watched(CompiledGraph):
    """Compiled steps that look at what they make, and tell the tally of the call."""

    def __init__(self, graph: Graph, repeats: int = 1):
        graph = widen_matmuls(graph)  # whose values are those of the steps
        self.checked = checked_values(graph)
        self.nodes = graph.nodes
        super().__init__(graph, repeats)
        # A bad value that was made of constants is found by running op by op, at each call.
        with np.errstate(all="ignore"):
            self.doubtful = self._folded_badly()

    def _run(self, template: list, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        tally = _local.tally
        assert tally is not None
        tally.bad |= self.doubtful
        return super()._run(template, arrays)

    def _folded_badly(self) -> bool:
        for node in self.nodes:
            if node.op.makes == "number" or not all(v in self.known for v in node.outputs):
                continue
            made = [self.known[v] for v in node.outputs if _holds(v)]
            given = [self.known[v] for v in node.inputs if _holds(v)]
            if not all(is_clean(a, "nan") for a in made) or (
                    not all(is_clean(a, "any") for a in made)
                    and all(is_clean(a, "any") for a in given)):
                return True
        return False

    def _add(self, unit: FusionGroup) -> None:
        if unit.call is None:
            super()._add(unit)
            return
        if unit.call.op.converts:  # before its operand may be written over
            self.steps.append(self._losses(unit.call))
        super()._add(unit)
        self._look(unit.outputs)

    def _look(self, values: Sequence[Value]) -> None:
        looked = [(self._slot(v), self.checked[v]) for v in values if v in self.checked]
        if not looked:
            return

        def step(env: list) -> None:
            for at, kind in looked:
                if not is_clean(env[at], kind):
                    _tally().bad = True

        self.steps.append(step)

    def _losses(self, node: Node) -> Step:
        ins = self._pick(node.inputs)

        def step(env: list) -> None:
            _tally().lost.append((node, losses(node.op, node.attrs, ins(env))))

        return step

    def _lower(self, group: FusionGroup) -> LoweredLoop:
        return lower(group.space, group.nodes, group.outputs, self.numbers, self.checked)

    def _launch(self, low: LoweredLoop, launch: Callable, ins: Callable, outs: Callable) -> Step:
        counters = low.counters
        looked = [(self._slot(v), self.checked[v]) for v, m in
                  zip(low.outputs, low.modes, strict=True)
                  if m == "column_sum" and v in self.checked]
        size = 1 + max(counters, default=0)

        def step(env: list) -> None:
            counts = np.zeros(size, np.int64)
            launch(ins(env), (*outs(env), *(counts[i:i + 1] for i in counters)))
            if counts.any():
                _note(low, counts)
            for at, kind in looked:
                if not is_clean(env[at], kind):
                    _tally().bad = True

        return step


def _note(low: LoweredLoop, counts: np.ndarray) -> None:
    tally = _tally()
    tally.bad |= bool(counts[0])
    for i, node in enumerate(low.casts):
        overflow, underflow, subnormal = (int(n) for n in counts[1 + 3 * i:4 + 3 * i])
        tally.lost.append((node, CastCounts(overflow, underflow, 0, 0, subnormal)))


def _tally() -> Tally:
    assert _local.tally is not None
    return _local.tally


def losses(op: GraphOp, attrs: dict[str, Any], inputs: Sequence[Any]) -> CastCounts:
    """What a cast lost of these elements. Those that were NaN or infinite already are no loss of
    the cast, unless its format has no NaN: there they became 0."""
    counts, to = CastCounts(), attrs["to"].dtype
    with np.errstate(all="ignore"):
        op.ref(*inputs, counts=counts, **attrs)
    dropped = counts.nan if to.kind != "bool" and to.special == "none" else 0
    return CastCounts(counts.overflow, counts.underflow, dropped, 0, counts.subnormal)


__all__ = ["Watched", "blame", "checked_values", "is_clean", "losses", "run_watched",
           "runs_again"]
