"""Named ranges, and a profile of the ops that run: Chrome trace, folded stacks, memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

from .. import hooks
from ..errors import ArgumentError
from ..graph.ir import Graph
from ..lazy_dataclass import dataclass
from ..runtime.copy_times import StepEvent
from ..runtime.nvtx import nvtx_range
from ..runtime.timeline import EventTimeline, KernelEvent
from .launch_profile import LaunchTable, is_step
from .memory_timeline import MemoryTimeline, planned_memory
from .profile_page import page
from .record import HostRecorder, current_path, inside


@dataclass(frozen=True)
class Span:
    """A named range that ended. `path` holds the ranges around it and its own name."""

    path: tuple[str, ...]
    start_ns: int
    end_ns: int
    thread: int


_open_profiles: list[Profile] = []


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """`with ts.debug.range("attention"):` names what happens in the block, for profiles and, where
    the setting `nvtx` is on, for NVTX. Ranges nest."""
    if not isinstance(name, str):
        raise ArgumentError(f"a range has a name, got {name!r}")
    start = time.perf_counter_ns()
    with inside(name):
        try:
            with nvtx_range(name):
                yield
        finally:
            span = Span(current_path(), start, time.perf_counter_ns(), threading.get_ident())
            for profile in _open_profiles:
                profile.spans.append(span)


@dataclass(repr=False)
class Profile:
    """What ran in the block, as it always runs: `.launches` of GPUs and of the host, with
    operations and bytes, `.records` of what the host ran, `.spans` of ranges, `.graphs` in calling
    order.

    On the host a compiled function runs its fused loops and library calls, each a record; an op
    outside of compiled functions is one too. On a GPU every launch, copy and library call of a
    compiled function is timed. `.kernels` says when each kernel ran on its stream, once the block
    has ended.
    """

    recorder: HostRecorder = field(default_factory=HostRecorder)
    spans: list[Span] = field(default_factory=list)
    timeline: EventTimeline = field(default_factory=EventTimeline)
    programs: dict[int, Any] = field(default_factory=dict)  # that ran, by identity
    _kernels: list[KernelEvent] = field(default_factory=list)  # of compiled functions on a GPU

    def __str__(self) -> str:
        return self.table()

    def table(self, top: int = 40) -> str:
        """What compiled functions and ops launched, the longest `top` line by line; then kernels
        that the program called by itself, if there are some."""
        own = self._kernel_table()
        launched = [self.launches.table(top)] if self.launches.records or not own else []
        return "\n\n".join([*launched, *([own] if own else [])])

    def _kernel_table(self) -> str:
        total: dict[tuple[str, int], list[float]] = {}
        for e in self.timeline.events:
            if e.kind == "kernel":
                total.setdefault((e.name, e.device), []).append((e.end_ns - e.start_ns) / 1000)
        rows = [f"{sum(us):11.1f} {len(us):6d}  {name}, "
                + ("under the interpreter" if device < 0 else f"cuda:{device}")
                for (name, device), us in sorted(total.items(), key=lambda x: -sum(x[1]))]
        heading = "         us      n  kernels called by the program"
        return "\n".join([heading, *rows]) if rows else ""

    @property
    def launches(self) -> LaunchTable:
        """Times, operations and bytes of all that ran; `print(p)` shows their table."""
        return self.recorder.launches

    def _step(self, event: StepEvent) -> None:
        """A step of a compiled function on a GPU, or a copy."""
        record = self.launches.see(event)
        if not is_step(record):
            return
        name = record.work.name
        lowered = event.what.program.lowered
        self.programs[id(lowered)] = lowered.graph, lowered.groups, lowered.memory
        if event.what.part in ON_GPU:
            self._kernels.append(KernelEvent(name, event.device, event.stream, event.start_ns,
                                             event.end_ns))

    def _group(self, program: Any, group: Any, begin: int, end: int) -> None:
        """A loop or call of a compiled function on the host."""
        self.programs[id(program)] = program.graph, program.units, program.plan
        self.recorder.group(group, begin, end)

    @property
    def records(self) -> list:
        return self.recorder.records

    @property
    def graphs(self) -> list[Graph]:
        return self.recorder.graphs

    @property
    def kernels(self) -> list[KernelEvent]:
        """Kernels in the order in which they began."""
        return sorted([*self.timeline.events, *self._kernels], key=lambda e: (e.start_ns, e.end_ns))

    def chrome_trace(self, path: str | Path | None = None) -> str:
        """Chrome's trace-event JSON (times in us); written to `path` when given."""
        events = [_event(s.path[-1], "range", s.start_ns, s.end_ns, s.thread, {})
                  for s in self.spans]
        for r in self.records:
            args = {"line": str(r.where), "shapes": str(r), "path": "/".join(r.path)}
            events.append(_event(r.op, "op", r.start_ns, r.end_ns, 0, args))
        for x in self.launches.seen:
            e = x.event
            if e.what is not None and not (is_step(x) and e.what.part in ON_GPU):
                events.append(_event(x.work.name, "copy", e.start_ns, e.end_ns, e.stream, {})
                              | {"pid": PROCESSES + e.device})
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
        """Live bytes by the memory plans of the compiled functions that ran, each once, one after
        another."""
        return MemoryTimeline(tuple(m for program in self.programs.values()
                                    for m in planned_memory(*program).moments))

    def html(self, path: str | Path | None = None) -> str:
        """One page without scripts: tables, timeline, memory, roofline; written to `path` when
        given."""
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def _event(name: str, kind: str, start_ns: int, end_ns: int, thread: int, args: dict) -> dict:
    return {"name": name, "cat": kind, "ph": "X", "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000, "pid": 0, "tid": thread, "args": args}


ON_GPU = ("kernel", "library", "exchange")  # parts that are drawn as kernels are
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
    """`with ts.debug.profile() as p:` then print(p.launches.table()), p.html("page.html"),
    p.chrome_trace("trace.json"), p.flamegraph() or p.memory_timeline()."""
    made = Profile()
    made.recorder.start()
    hooks.timed_groups.append(made._group)
    made.timeline.start()
    hooks.timed_steps.append(made._step)
    if not _open_profiles:
        hooks.kernel_runs.append(_interpreted)
    _open_profiles.append(made)
    try:
        yield made
    finally:
        _open_profiles.remove(made)
        hooks.timed_steps.remove(made._step)
        if not _open_profiles:
            hooks.kernel_runs.remove(_interpreted)
        made.recorder.stop()
        hooks.timed_groups.remove(made._group)
        made.timeline.stop()
        for kernel in made.timeline.events:
            if kernel.device >= 0:
                made.launches.see_kernel(kernel)


__all__ = ["Profile", "named_range", "profile"]
