"""Proof of a device plan: no place is written while what lies there is still read, by a kernel or
by a copy beside the kernels; no result lies in a temporary.

    verify_plan(plan)     # raises GraphError naming both steps, or says nothing
    released(plan)        # behind each step, the places that nothing reads any more
"""

from __future__ import annotations

from ...errors import GraphError
from ..schedule.ir import GraphSchedule, PlannedBuffer, ScheduledGroup, Transfer
from .offload import waits

WRITABLE = ("temporary", "result", "host")  # what a step may write


class Lives:
    """Of every buffer but views: the step that begins to write it, and the last that reads it."""

    def __init__(self, plan: GraphSchedule):
        self.plan, self.last = plan, len(plan.steps)
        self.buffers = {b.name: b for b in plan.buffers}
        self.made: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        for i, step in enumerate(plan.steps):
            for name in reads_of(step):
                self.ends[self.base(name)] = i
            for name in writes_of(step):
                self.made.setdefault(self.base(name), i)
                self.ends[self.base(name)] = i
        for name in plan.results:
            self.ends[self.base(name)] = self.last

    def base(self, name: str) -> str:
        """The buffer that owns the memory in which another lies."""
        for _ in self.buffers:
            b = self.buffers[name]
            if b.kind != "view":
                return name
            name = b.place.removeprefix("of ")
        raise self.fault(f"the view {name} lies in itself")

    def by_place(self) -> dict[str, list[tuple[int, int, PlannedBuffer]]]:
        """(made, read last, buffer) of the temporaries of each place, in order."""
        found: dict[str, list[tuple[int, int, PlannedBuffer]]] = {}
        for name, made in self.made.items():
            b = self.buffers[name]
            if b.kind == "temporary":
                found.setdefault(b.place, []).append((made, self.ends[name], b))
        return {place: sorted(lives, key=lambda x: x[0]) for place, lives in found.items()}

    def fault(self, what: str) -> GraphError:
        return GraphError(f"memory plan of {self.plan.name}: {what}",
                          hint="this is a fault of tessera, not of the program: please report it")

    def name(self, i: int) -> str:
        return self.plan.steps[i].name if i < self.last else "the caller"


def verify_plan(plan: GraphSchedule) -> None:
    """Raise GraphError where memory is written while somebody may still read it."""
    lives = Lives(plan)
    for i, step in enumerate(plan.steps):
        for name in writes_of(step):
            kind = lives.buffers[lives.base(name)].kind
            if kind not in WRITABLE:
                raise lives.fault(f"{lives.name(i)} writes {name}, which is {kind} memory")
    for name in plan.results:
        kind = lives.buffers[lives.base(name)].kind
        if kind == "temporary":
            raise lives.fault(f"the result {name} lies in a temporary")
    for place, entries in lives.by_place().items():
        for (_, end, a), (made, _, b) in zip(entries, entries[1:], strict=False):
            if made <= end:
                raise lives.fault(f"{lives.name(made)} writes {b.name} to {place}, where "
                                  f"{lives.name(end)} reads {a.name}")
    _verify_copies(lives)


def _verify_copies(lives: Lives) -> None:
    """Between its start and the first kernel that waits for it a copy may run at any time."""
    def place_of(name: str) -> str:
        b = lives.buffers[lives.base(name)]
        return b.place if b.kind == "temporary" else b.name

    running: dict[int, Transfer] = {}
    started = 0
    for step, awaited in zip(lives.plan.steps, waits(lives.plan.steps, place_of), strict=True):
        if isinstance(step, Transfer):
            running[started] = step
            started += 1
            continue
        if awaited is not None:
            running = {n: t for n, t in running.items() if n > awaited}
        reads = {place_of(o.name) for o in step.reads}
        writes = {place_of(o.name) for o in step.writes}
        for t in running.values():
            touched = writes if t.kind == "offload" else reads | writes
            if place_of(t.on_device) in touched:
                raise lives.fault(f"{step.name} runs beside {t.name}, which still copies "
                                  f"{t.on_device}")


def released(plan: GraphSchedule) -> dict[int, list[str]]:
    """Behind each step, by number: the places of temporaries that nothing reads any more."""
    out: dict[int, list[str]] = {}
    for place, entries in Lives(plan).by_place().items():
        for _, end, _ in entries:
            out.setdefault(end, []).append(place)
    return out


def reads_of(step: ScheduledGroup | Transfer) -> tuple[str, ...]:
    return (step.source,) if isinstance(step, Transfer) else tuple(o.name for o in step.reads)


def writes_of(step: ScheduledGroup | Transfer) -> tuple[str, ...]:
    return (step.target,) if isinstance(step, Transfer) else tuple(o.name for o in step.writes)


__all__ = ["released", "verify_plan"]
