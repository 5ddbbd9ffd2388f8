"""Where the time went: every launch, copy and library call that a profile saw, in tables.

    with ts.debug.profile() as p: step(...)
    print(p.launches.table())            by sort of work, then the slowest launches by line
    p.launches.figures()                 the same as a dict of numbers, for JSON

On a GPU times are those between events behind each step (runtime/step_times.py): a step's time is
that from the end of the one before it. `roofline` is the share of the time that the GPU would take
at the rates of its data sheet. On the host a step is a fused loop or a library call, on its clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from ..errors import short_path
from ..graph.schedule.work import LaunchWork
from ..lazy_dataclass import dataclass
from ..runtime.copy_times import CopyLabel, StepEvent
from ..runtime.device import device
from ..runtime.timeline import KernelEvent
from ..tile.tuning.gpus import Gpu, gpu_of


@dataclass(frozen=True)
class LaunchRecord:
    """A launch, copy or library call, when it ran and what the GPU would need at least."""

    work: LaunchWork
    event: StepEvent
    least_us: float

    @property
    def us(self) -> float:
        return (self.event.end_ns - self.event.start_ns) / 1e3


@dataclass(frozen=True)
class LaunchGroup:
    """Launches that a row of a table adds up."""

    name: str
    launches: tuple[LaunchRecord, ...]

    @property
    def us(self) -> float:
        return sum(x.us for x in self.launches)

    @property
    def roofline(self) -> float:
        """Share of the time that the GPU would need at least; 0 of what computes nothing."""
        return sum(x.least_us for x in self.launches) / self.us if self.us else 0.0

    def figures(self) -> dict[str, Any]:
        flops = sum(x.work.flops for x in self.launches)
        moved = sum(x.work.bytes for x in self.launches)
        seconds = max(self.us, 1e-9) / 1e6
        return {"name": self.name, "launches": len(self.launches), "us": round(self.us, 2),
                "tflops": round(flops / seconds / 1e12, 2),
                "gbps": round(moved / seconds / 1e9, 1), "gflop": round(flops / 1e9, 3),
                "mbytes": round(moved / 1e6, 3), "roofline": round(self.roofline, 4)}


@dataclass
class LaunchTable:
    """All of a profile, in the order in which they ended. gpu: whose rates count; None where
    nothing ran on one.

    seen: every one. records: those without the first run of a program that ran again, since its
    kernels are loaded between its steps.
    """

    seen: list[LaunchRecord] = field(default_factory=list)
    gpu: Gpu | None = None

    def see(self, event: StepEvent) -> LaunchRecord:
        """A copy, or one step of a program, that ran on a GPU."""
        self.gpu = gpu_of(device(event.device))
        copy = event.what
        work = copy.work if not isinstance(copy, CopyLabel) else LaunchWork(
            f"copy {copy.way}", "copy", "", None, f"{copy.nbytes} bytes", copy.nbytes, copy.nbytes)
        self.seen.append(LaunchRecord(work, event, work.least_us(self.gpu)))
        return self.seen[-1]

    def see_kernel(self, kernel: KernelEvent) -> None:
        """A launch outside of compiled functions, or a copy beside them."""
        self.gpu = gpu_of(device(kernel.device))
        work = LaunchWork(kernel.name, kernel.kind, "", None, "", 0, 0)
        self.seen.append(LaunchRecord(work, StepEvent(None, kernel.device, kernel.stream,
                                                      kernel.start_ns, kernel.end_ns), 0.0))

    def see_host(self, work: LaunchWork, start_ns: int, end_ns: int) -> None:
        """A loop, call or op that ran on the host."""
        self.seen.append(LaunchRecord(work, StepEvent(None, -1, threading.get_ident(), start_ns,
                                                      end_ns), 0.0))

    @property
    def records(self) -> list[LaunchRecord]:
        again = {id(x.event.what.program) for x in self.seen if is_step(x) and not x.event.first}
        return [x for x in self.seen if not x.event.first or id(x.event.what.program) not in again]

    def grouped(self, key: Callable[[LaunchRecord], str]) -> list[LaunchGroup]:
        """Rows by a key, the longest first."""
        found: dict[str, list[LaunchRecord]] = {}
        for x in self.records:
            found.setdefault(key(x), []).append(x)
        made = [LaunchGroup(name, tuple(rows)) for name, rows in found.items()]
        return sorted(made, key=lambda g: -g.us)

    def by_kind(self) -> list[LaunchGroup]:
        """By sort of work and part of the step: `matmul backward`. Ops outside of compiled
        functions are `eager`."""
        return self.grouped(lambda x: f"{x.work.kind} {x.work.part}".rstrip()
                            if x.work.part != x.work.kind else x.work.kind)

    def by_launch(self) -> list[LaunchGroup]:
        """Launches that do the same at the same line to operands of the same shapes."""
        return self.grouped(_launch_label)

    @property
    def us(self) -> float:
        return sum(x.us for x in self.records)

    def figures(self) -> dict[str, Any]:
        """For JSON: totals, rows by sort of work, and by launch."""
        everything = LaunchGroup("all", tuple(self.records))
        return {"device": self.device, "all": everything.figures(),
                "kinds": [g.figures() for g in self.by_kind()],
                "launches": [g.figures() for g in self.by_launch()]}

    def table(self, most: int = 40) -> str:
        """Rows by sort of work, and the `most` longest launches."""
        everything = LaunchGroup("all", tuple(self.records))
        head = f"{'us':>10} {'%':>5} {'n':>5} {'TFLOP/s':>8} {'GB/s':>7} {'roofline':>8}  "
        return "\n".join([
            f"{len(self.records)} steps on {self.device}",
            head + "work", *self._rows(self.by_kind()), *self._rows([everything]), "",
            head + "launch", *self._rows(self.by_launch()[:most])])

    def _rows(self, groups: Iterable[LaunchGroup]) -> list[str]:
        out = []
        for g in groups:
            f = g.figures()
            out.append(f"{g.us:10.1f} {100 * g.us / max(self.us, 1e-9):5.1f} {f['launches']:5d} "
                       f"{f['tflops']:8.2f} {f['gbps']:7.0f} "
                       f"{f'{100 * g.roofline:.0f}%' if g.roofline else '-':>8}  {g.name}")
        return out

    @property
    def device(self) -> str:
        if self.gpu is None:
            return "the host, by its clock"
        host = " and the host" if any(x.event.device < 0 for x in self.records) else ""
        return f"{self.gpu.name}{host}, by events behind each"


def is_step(x: LaunchRecord) -> bool:
    """Whether it is one of a program's: no copy of a tensor, no launch outside of functions."""
    return x.event.what is not None and not isinstance(x.event.what, CopyLabel)


def _launch_label(x: LaunchRecord) -> str:
    where = x.work.where
    line = f"{short_path(where.file)}:{where.line}" if where is not None else ""
    name = x.work.name
    if is_step(x):  # without the number of the group
        name = name.partition("_")[2] or name
    return f"{x.work.kind} {x.work.part} {name}  {x.work.shapes}  {line}".rstrip()


__all__ = ["LaunchGroup", "LaunchRecord", "LaunchTable", "is_step"]
