"""Named ranges, and a profile of the ops that run: Chrome trace, folded stacks, memory."""

from __future__ import annotations

import functools
import importlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import hooks
from ..errors import ArgumentError
from ..graph.ir import Graph, Node, Value
from ..runtime.step_times import StepEvent, step_observers
from ..runtime.timeline import EventTimeline, KernelEvent
from .launch_profile import LaunchTable
from .record import Recorder, current_path, inside


@dataclass(frozen=True)
class Span:
    """A named range that ended. `path` holds the ranges around it and its own name."""

    path: tuple[str, ...]
    start_ns: int
    end_ns: int
    thread: int


_open_profiles: list[Profile] = []


@functools.cache
def _nvtx() -> Any:
    """The nvtx module where it is installed, else None."""
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """`with ts.debug.range("attention"):` names what happens in the block, for profiles and for
    NVTX where the nvtx package is installed. Ranges nest."""
    if not isinstance(name, str):
        raise ArgumentError(f"a range has a name, got {name!r}")
    nvtx = _nvtx()
    start = time.perf_counter_ns()
    with inside(name):
        if nvtx is not None:
            nvtx.push_range(name)
        try:
            yield
        finally:
            if nvtx is not None:
                nvtx.pop_range()
            span = Span(current_path(), start, time.perf_counter_ns(), threading.get_ident())
            for profile in _open_profiles:
                profile.spans.append(span)


@dataclass
class Profile:
    """What ran in the block: `.records` of ops, `.spans` of ranges, `.graphs` in calling order.

    Compiled functions run node by node while they are profiled: an op's time is its NumPy
    meaning's, not that of a fused loop. Ops outside compiled functions count with 0 ns. Kernels
    run as always: `.kernels` says when each did on its stream, once the block has ended. What
    compiled functions do on a GPU is in `.launches`, step by step, with operations and bytes.
    """

    recorder: Recorder = field(default_factory=Recorder)
    spans: list[Span] = field(default_factory=list)
    timeline: EventTimeline = field(default_factory=EventTimeline)
    launches: LaunchTable = field(default_factory=LaunchTable)

    def _step(self, event: StepEvent) -> None:
        """A step of a compiled function on a GPU."""
        self.launches.see(event)
        if event.what.part in ("kernel", "library"):
            self.timeline.add(KernelEvent(self.launches.records[-1].work.name, event.device,
                                          event.stream, event.start_ns, event.end_ns))

    @property
    def records(self) -> list:
        return self.recorder.records

    @property
    def graphs(self) -> list[Graph]:
        return self.recorder.graphs

    @property
    def kernels(self) -> list[KernelEvent]:
        """Kernels in the order in which they began."""
        return self.timeline.events

    def chrome_trace(self, path: str | Path | None = None) -> str:
        """Chrome's trace-event JSON (times in us); written to `path` when given."""
        events = [_event(s.path[-1], "range", s.start_ns, s.end_ns, s.thread, {})
                  for s in self.spans]
        for r in self.records:
            args = {"line": str(r.where), "shapes": str(r), "path": "/".join(r.path)}
            start = r.end_ns if r.start_ns is None else r.start_ns
            events.append(_event(r.op, "op", start, r.end_ns, 0, args))
        for k in self.kernels:
            events.append(_event(k.name, "kernel", k.start_ns, k.end_ns, k.stream, {})
                          | {"pid": PROCESSES + k.device})
        names = [_name(d) for d in sorted({k.device for k in self.kernels})]
        text = json.dumps({"traceEvents": names + sorted(events, key=lambda e: e["ts"])})
        if path is not None:
            Path(path).write_text(text)
        return text

    def flamegraph(self) -> str:
        """Folded stacks, a line `range;function;op ns` each, as flamegraph tools read them."""
        total: dict[str, int] = {}
        for r in self.records:
            stack = ";".join(part.replace(";", ",") for part in (*r.path, r.op))
            total[stack] = total.get(stack, 0) + (r.duration_ns or 0)
        return "\n".join(f"{stack} {ns}" for stack, ns in total.items())

    def memory_timeline(self) -> MemoryTimeline:
        """Live bytes over the graphs that ran, one after another."""
        moments = [m for g in self.graphs for m in memory_timeline(g).moments]
        return MemoryTimeline(tuple(moments))


def _event(name: str, kind: str, start_ns: int, end_ns: int, thread: int, args: dict) -> dict:
    return {"name": name, "cat": kind, "ph": "X", "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000, "pid": 0, "tid": thread, "args": args}


PROCESSES = 2  # trace process of cuda:0; that of the interpreter is before it


def _name(device: int) -> dict:
    """What the viewer calls the tracks of a device: one for each stream."""
    name = "interpreter" if device < 0 else f"cuda:{device}"
    return {"name": "process_name", "ph": "M", "pid": PROCESSES + device, "tid": 0,
            "args": {"name": f"kernels on {name}"}}


@contextmanager
def _interpreted(name: str) -> Iterator[None]:
    """A kernel under the interpreter, for the profiles that are open."""
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        event = KernelEvent(name, -1, 0, start, time.perf_counter_ns())
        for profile in _open_profiles:
            profile.timeline.add(event)


@contextmanager
def profile() -> Iterator[Profile]:
    """`with ts.debug.profile() as p:` then p.chrome_trace(), p.flamegraph() or
    p.memory_timeline()."""
    made = Profile()
    made.recorder.start()
    made.timeline.start()
    step_observers.append(made._step)
    if not _open_profiles:
        hooks.kernel_runs.append(_interpreted)
    _open_profiles.append(made)
    try:
        yield made
    finally:
        _open_profiles.remove(made)
        step_observers.remove(made._step)
        if not _open_profiles:
            hooks.kernel_runs.remove(_interpreted)
        made.recorder.stop()
        made.timeline.stop()


# --- memory -----------------------------------------------------------------------------------
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
    given = {base[v] for v in (*graph.inputs, *(c for c, _ in graph.captures))}
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


__all__ = ["MemoryTimeline", "Profile", "memory_timeline", "named_range", "profile"]
