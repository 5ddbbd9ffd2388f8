"""NaN and infinity sentinels: which op made the first bad value, on which line, from what.

TESSERA_NUMERICS=off|flag|raise, or ts.debug.numerics(mode). Every op's results are looked at; what
counts as found is decided by four rules:

1. NaN from operands without NaN is an origin. So is inf - inf: a row whose elements are all masked.
2. An infinity from finite operands is an origin: an overflow, a division by zero.
3. An infinity that was written down (a constant, a fill) or came in with the data is deliberate: a
   mask. What is made of it is no finding as long as it is not NaN.
4. NaN that came in with the data is reported once, at the first op that meets it.

An origin counts when it is used: when it reaches a result, or when an op that cannot drop it gives
a finite value (1 / inf). An element that a selection drops (where, minimum, slice, exp(-inf)) does
not count, so ts.where(x > 0, ts.log(x), 0) is silent inside a compiled function; which operands an
op may drop stands in its record. Outside of a function each call by the user is a result of its
own: there ts.log(x) is reported at once. So is what a kernel wrote (kernel_sentinel.py).

A saturating cast is a policy and no finding; the counters tell how much it cut off.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field, replace
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from .. import config, hooks
from ..dims import show_shape
from ..errors import PACKAGE_DIR, NumericsError, SourceLine, user_line
from ..graph import functions as F
from ..graph import trace
from ..graph.ir import Graph, Node, Value, entered, subgraphs
from ..graph.op import OPS, GraphOp
from ..graph.ops.random import get_state
from ..graph.run_with_sentinels import losses, runs_again
from ..lazy_dataclass import dataclass
from ..numerics import CastCounts, DType, as_type
from ..runtime import late_checks
from ..runtime.sentinel_words import BadElements, collect_all
from ..tensor import Tensor
from ..tile.interpreter.arguments import Bound
from ..tile.interpreter.blame import Blame
from ..tile.interpreter.memory import Memory
from ..tile.ir.ir import Function
from .device_sentinel import DeviceFinding, findings
from .findings import BadValue, Flags, SavedCall, describe_operands, values_of
from .kernel_sentinel import follow
from .value_sources import ValueSources


class WatchedArray(NamedTuple):
    """An operand or result: what stands for it (a Value or a Tensor), elements, format."""

    key: Any
    array: np.ndarray
    dtype: DType


@dataclass(eq=False)
class Suspect:
    """A bad value that has not counted yet; `key` is kept so that its id stays its own.

    `live` is False when a later iteration of a loop has put a finite value in its place.
    """

    key: Any
    bad: BadValue
    live: bool = True


@dataclass(eq=False)
class SuspectFrame:
    """Suspects of one running graph, or of the op-by-op calls of one thread."""

    graph: str | None = None
    suspects: dict[int, Suspect] = field(default_factory=dict)
    sources: ValueSources | None = None  # of a graph's values
    place_in_whole: Callable[..., str] = lambda *_: ""  # of elements of a rank's parts
    told: bool = False  # the kernel that ran last has said itself what is bad in its results


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames = [SuspectFrame()]
        self.run = 0
        self.late = False  # a call in the mode "flag" is looked at, whatever holds now


_local = _Local()
_lock = threading.Lock()
_counts: dict[tuple[str, str], CastCounts] = {}
_first: list[BadValue] = []


# --- switching --------------------------------------------------------------------------------
class numerics(config.Switch):
    """Switches the sentinels: `ts.debug.numerics("raise")`, or `with ts.debug.numerics("flag"):`.

    mode: "off" | "flag" (count, report in ts.debug.flags() and at exit) | "raise" (NumericsError)
    Holds for functions that are compiled already, and in all threads. A block gives back what held
    before it; of blocks that overlap in several threads the one entered last and still open wins.
    """

    def __init__(self, mode: str):
        late_checks.settle(wait=True)
        super().__init__(numerics=mode)

    def __exit__(self, *exc: object) -> None:
        late_checks.settle(wait=True)
        super().__exit__(*exc)


def _switch(mode: str | None) -> None:
    """Put the observers where ops run, or take them away. None: to be resolved at the next op."""
    if _local.late:
        return
    late_checks.settle(wait=True)
    _set(hooks.eager_ops, _resolve, mode is None)
    on = mode in ("flag", "raise")
    _set(hooks.eager_ops, observe_eager, on)
    _set(hooks.sentinels, _SENTINEL, on)
    _set(hooks.runs, observe_run, on or mode is None)
    _set(hooks.exits, observe_exit, on)
    _set(hooks.sending, observe_sending, on)
    _set(hooks.kernel_sentinels, observe_kernel, on or mode is None)
    _set(hooks.bad_elements, observe_bad_elements, on)


def _set(observers: list, observer: Any, there: bool) -> None:
    if there and observer not in observers:
        observers.append(observer)
    elif not there and observer in observers:
        observers.remove(observer)


def _resolve(op: GraphOp, args: tuple, attrs: dict, made: tuple) -> None:
    """The first op after a change of settings."""
    mode = config.get("numerics")
    _switch(mode)
    if mode != "off":
        observe_eager(op, args, attrs, made)


def flags(clear: bool = True) -> Flags:
    """What was counted since the last call, and the first bad value; clears both. What was raised
    as a NumericsError is not counted: it has been reported. Waits for kernels on GPUs."""
    late_checks.settle(wait=True)
    for finding in findings(collect_all(), _local.run):
        _count_finding(finding)
    with _lock:
        counts = {at: c + CastCounts() for at, c in _counts.items()}
        out = Flags(_first[0] if _first else None, counts)
        if clear:
            _counts.clear()
            _first.clear()
    return out


@atexit.register
def _summary() -> None:
    """In flag mode, what nobody has read is printed when the program ends."""
    found = flags()
    if found and config.get("numerics") == "flag":
        print(found, file=sys.stderr)


# --- observers --------------------------------------------------------------------------------
def observe_node(node: Node, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """A node of a graph has run."""
    frame = _local.frames[-1]
    if frame.sources is not None:
        frame.sources.follow(node)
    made = [WatchedArray(v, a, v.aval.dtype) for v, a in zip(node.outputs, outputs, strict=True)]
    told, frame.told = frame.told, False
    _check(
        node.op, node.attrs, lambda: node.where,
        [WatchedArray(v, a, v.aval.dtype) for v, a in zip(node.inputs, inputs, strict=True)],
        [] if told else made,
        [v for inner in subgraphs(node) for v in _inner_values(inner)],
        {id(outer) for _, outer in entered(node)} if node.op.graph_attrs else (),
    )


def observe_eager(op: GraphOp, args: tuple, attrs: dict, made: tuple) -> None:
    """An op has run outside of a graph."""
    held = [attrs[k] for k in op.graph_attrs]
    inner = [g for x in held for g in (x if isinstance(x, tuple) else (x,))]
    _check(
        op, attrs, lambda: trace.current_line() or user_line(),
        [WatchedArray(t, t.array, t.dtype) for t in args],
        [WatchedArray(t, t.array, t.dtype) for t in made],
        [v for g in inner for v in _inner_values(g)],
    )
    if _local.frames[-1].suspects and not _inside_public(sys._getframe(1)):
        _count_suspects(made)


def observe_sending(op: GraphOp, where: SourceLine | None, operands: Sequence[Any],
                    arrays: Sequence[np.ndarray]) -> None:
    """Operands leave for other ranks: bad ones count here, on the rank that made them."""
    ins = [WatchedArray(v, a, (v.aval if isinstance(v, Value) else v).dtype)
           for v, a in zip(operands, arrays, strict=True)]
    for s in ins:
        suspect = _local.frames[-1].suspects.get(id(s.key))
        if suspect is not None and suspect.live:
            _count(suspect.bad)
        elif suspect is None and _kind(s) == "nan":
            came_in = _judge(op, {}, lambda: where, ins, s, "nan")
            if came_in is not None:  # nothing to run again: other ranks would take part
                _count(replace(came_in, saved=None))


@contextmanager
def observe_kernel(function: Function, bound: Bound, outputs: dict[str, Memory],
                   again: Callable[[Bound], Any]) -> Iterator[Blame | None]:
    """A kernel runs under the interpreter: what it writes counts when it has ended."""
    if not _local.late and config.get("numerics") == "off":  # with the first op after a change
        yield None
        return
    frame = _local.frames[-1]

    def counts(bad: BadValue) -> None:
        if config.numerics != "raise" and runs_again():
            return
        if bad.origin or not _first:
            _count(bad)
        frame.told = frame.graph is not None

    with follow(function, bound, outputs, counts, frame.graph, _local.run, again) as blame:
        yield blame


def observe_bad_elements(found: Sequence[BadElements], again: Callable[[], bool] | None) -> None:
    """A launch on a GPU has counted bad elements. Where it can be run again, the interpreter says
    what counts; what it does not see at all was the GPU's."""
    told = findings(found, _local.run, _local.frames[-1].graph)
    if again is not None and any(f.bad is not None for f in told) and again():
        return
    for finding in told:
        _count_finding(finding)


def _count_finding(finding: DeviceFinding) -> None:
    if finding.lost.total:
        with _lock:
            _counts.setdefault(finding.cast, CastCounts()).add(overflow=finding.lost.overflow)
    bad = finding.bad
    if bad is not None and (bad.origin or not _first):
        _count(bad)


@contextmanager
def observe_run(graph: Graph) -> Iterator[Callable[[list[Tensor]], None]]:
    """A compiled function runs: its suspects count when they are among its results."""
    # The first op after a change of settings may be in this graph, which need not be watched.
    _local.run += config.get("numerics") != "off"
    frame = _frame_of(graph, graph.name)
    _local.frames.append(frame)
    try:
        yield lambda flat: _count_suspects(graph.outputs)
    finally:
        _local.frames.remove(frame)


def _frame_of(graph: Graph, name: str | None) -> SuspectFrame:
    frame = SuspectFrame(name, sources=ValueSources(graph))
    frame.place_in_whole = graph.kept.get("place_in_whole", frame.place_in_whole)
    return frame


def call_for_later(graph: Graph) -> Callable[[], AbstractContextManager[None]]:
    """This call of a compiled function, to be looked at when it has ended on a GPU."""
    number, name = _local.run, _local.frames[-1].graph

    @contextmanager
    def again() -> Iterator[None]:
        frame, now = _frame_of(graph, name), _local.run
        _local.frames.append(frame)
        _local.run, _local.late = number, True
        try:
            yield
            _count_suspects(graph.outputs)
        finally:
            _local.frames.remove(frame)
            _local.run, _local.late = now, False

    return again


def observe_exit(out: Any) -> None:
    """A public function returns op by op: when it returns to the user, suspects in `out` count."""
    if _local.frames[-1].suspects and not _inside_public(sys._getframe(2)):
        _count_suspects(out if isinstance(out, tuple | list) else (out,))


_ENCLOSING = frozenset({F.add.__code__, trace.run_nodes.__code__})


def _inside_public(frame: FrameType | None) -> bool:
    """Whether a public function or a walk over a graph encloses this frame of ours."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_DIR):
        if frame.f_code in _ENCLOSING:
            return True
        frame = frame.f_back
    return False


def _inner_values(graph: Graph) -> Iterator[Any]:
    for node in graph.nodes:
        yield from node.outputs
        for inner in subgraphs(node):
            yield from _inner_values(inner)


# --- the rules --------------------------------------------------------------------------------
def _check(op: GraphOp, attrs: dict, where: Callable[[], SourceLine | None],
           ins: list[WatchedArray], outs: list[WatchedArray], inner: list,
           entering: Container[int] = ()) -> None:
    """An op has run. inner: the values of graphs that it holds. entering: operands that these have
    taken over, and have told of."""
    if op.converts or op.codes and "to" in attrs:
        _count_cast(attrs, where, losses(op, attrs, [s.array for s in ins]))
    if op.makes == "number" or "collective" in op.effects:
        return  # of a collective, see observe_sending: the result is data from other ranks
    suspects = _local.frames[-1].suspects
    held, hidden = [], []
    for i, s in enumerate(ins):
        if (x := suspects.get(id(s.key))) is not None and x.live and _kind(s) is not None:
            held.append(x)
            if not op.may_drop(i, x.bad.kind) and id(s.key) not in entering:
                hidden.append(x)
    bad = [(s, kind) for s in outs if (kind := _kind(s)) is not None]
    if not bad:
        for s in outs:
            if suspects and id(s.key) in suspects:
                suspects[id(s.key)].live = False
        if hidden:
            _count(hidden[0].bad)
        return
    within = {id(v) for v in inner}
    held += [suspect for key, suspect in suspects.items() if key in within]  # the oldest first
    for s, kind in bad:
        found = held[0].bad if held else _judge(op, attrs, where, ins, s, kind)
        if found is not None:
            suspects.setdefault(id(s.key), Suspect(s.key, found)).live = True


def _kind(s: WatchedArray) -> str | None:
    """The worse of what the elements hold: "nan", "inf", or None when all are finite."""
    if s.dtype.kind != "float" or s.dtype.special == "none":
        return None
    if np.isfinite(s.array).all():
        return None
    return "nan" if np.isnan(s.array).any() else "inf"


def _judge(op: GraphOp, attrs: dict, where: Callable[[], SourceLine | None],
           ins: list[WatchedArray], out: WatchedArray, kind: str) -> BadValue | None:
    """Rules 1 to 4 for a bad result of operands that are not suspect."""
    before = {k for s in ins if (k := _kind(s)) is not None}
    if kind == "inf" and before:
        return None
    origin = "nan" not in before
    if not origin and _first:
        return None
    values = values_of(out.array, out.dtype)
    mask = np.isnan(values) if kind == "nan" else np.isinf(values)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
    frame = _local.frames[-1]
    line = where()
    of = OPS.get(line.of) if line is not None else None  # the op whose gradient this is part of
    # A NaN of finite numbers is blamed on all operands, that of infinities on what held these.
    cause = "nan" if not origin else "inf" if "inf" in before else None
    blamed = [s.key for s in ins if cause is None or _kind(s) == cause]
    return BadValue(
        op=op.name, where=line, kind=kind, value=float(values[index]), index=index,
        count=int(mask.sum()), size=mask.size, result=f"{out.dtype}{show_shape(mask.shape)}",
        operands=describe_operands([(s.array, s.dtype) for s in ins], index, mask.shape),
        origin=origin, graph=frame.graph, run=_local.run, step=get_state().step,
        hint=of.gradient_hint if of is not None and of.gradient_hint else op.hint,
        saved=_saved(op, attrs, ins, out),
        whole=frame.place_in_whole(op.name, line, mask.shape, index),
        sources=() if frame.sources is None else frame.sources.told(blamed, some=cause is None),
    )


def _saved(op: GraphOp, attrs: dict, ins: list[WatchedArray], out: WatchedArray) -> SavedCall:
    """An op as it was called."""
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with np.errstate(all="ignore"):
            made = op.ref(*(t.array for t in inputs.values()), **attrs)
        arrays = [np.asarray(a) for a in (made if op.multi else (made,))]
        return {f"result {i}": Tensor(a, as_type(
            out.dtype if a.dtype == out.array.dtype else a.dtype)) for i, a in enumerate(arrays)}

    given = {f"operand {i}": Tensor(np.asarray(s.array), as_type(s.dtype))
             for i, s in enumerate(ins)}
    return SavedCall(op.name, given, run)


def _count_suspects(results: Iterable[Any]) -> None:
    """Suspects among these results count; the others are forgotten."""
    suspects = _local.frames[-1].suspects
    found = {id(s.bad): s.bad for r in results if (s := suspects.get(id(r))) is not None}
    suspects.clear()
    for bad in found.values():
        _count(bad)


def _count(bad: BadValue) -> None:
    """A finding counts: raised in that mode, else recorded for flags()."""
    frame = _local.frames[-1]
    if config.numerics == "raise" and not _local.late:
        frame.suspects.clear()
        raise _kept_on_disk(bad).error()
    frame.suspects = {k: s for k, s in frame.suspects.items() if s.bad is not bad}
    with _lock:
        counts = _counts.setdefault((bad.label, str(bad.where)), CastCounts())
        counts.add(**{bad.kind: bad.count})
        if not _first:
            _first.append(_kept_on_disk(bad))


def _kept_on_disk(bad: BadValue) -> BadValue:
    return bad if bad.saved is None else replace(bad, saved=bad.saved.kept())


def observe_lost(node: Node, counts: CastCounts) -> None:
    """A cast has run inside of a loop."""
    _count_cast(node.attrs, lambda: node.where, counts)


def _count_cast(attrs: dict, where: Callable[[], SourceLine | None], lost: CastCounts) -> None:
    if lost.total:
        with _lock:
            total = _counts.setdefault(("cast to " + str(attrs["to"]), str(where())), CastCounts())
            total.add(overflow=lost.overflow, underflow=lost.underflow, nan=lost.nan,
                      subnormal=lost.subnormal)


def observe_entry(node: Node) -> None:
    """Graphs that a node holds begin: what is suspect in an operand is so in what they are given,
    of which a part may be finite: a row, or what stands in a branch that is not taken."""
    suspects = _local.frames[-1].suspects
    if not suspects:
        return
    for inner, outer in entered(node):
        suspects.pop(id(inner), None)
        if (suspect := suspects.get(id(outer))) is not None and suspect.live:
            suspects[id(inner)] = Suspect(inner, suspect.bad)


def observe_carried(takes: Sequence[Value], gives: Sequence[Value]) -> None:
    """An iteration of a loop begins: what is suspect in a carry stays so."""
    suspects = _local.frames[-1].suspects
    if not suspects:
        return
    for v, suspect in zip(takes, [suspects.get(id(v)) for v in gives], strict=True):
        suspects.pop(id(v), None)
        if suspect is not None and suspect.live:
            suspects[id(v)] = Suspect(v, suspect.bad)


def doubts(values: Sequence[Value]) -> bool:
    suspects = _local.frames[-1].suspects
    return bool(suspects) and any(
        (s := suspects.get(id(v))) is not None and s.live for v in values)


_SENTINEL = hooks.Sentinel(observe_node, observe_lost, call_for_later, observe_entry,
                           observe_carried, doubts)
config.WATCHERS.setdefault("numerics", []).append(_switch)
_switch(None)

__all__ = ["NumericsError", "Flags", "flags", "numerics"]
