"""The schedule of a function on a GPU launch by launch: what each computes and moves, how, and why.

    plan = f.schedule(x, w, target="sm_90a")     no GPU is needed
    plan.forms                                   Counter({'wgmma': 18, 'threads': 9, 'copy': 2})
    [m for m in plan.matmuls if m.form != "wgmma"]
    plan.least_us()                              what the GPU needs at least, by its data sheet

What it says comes from the records that decided: the groups of the Schedule IR, and the compiler's
record of each kernel (launch_forms.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import SourceLine
from ...lazy_dataclass import dataclass
from ...tile.tuning.gpus import Gpu
from ...tile.tuning.gpus import gpu as find_gpu
from ..schedule.ir import GraphSchedule, ScheduledGroup, ScheduleLine, Transfer
from ..schedule.work import LaunchWork, amount
from .launch_forms import BEST_FIRST, LaunchForm, forms_of
from .launch_work import batch_work, group_work, transfer_work
from .program.graph_limits import why_no_graph

if TYPE_CHECKING:
    from .program.run import CudaProgram


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch, copy or library call.

    group: its name in the Schedule IR.  operands: types of what it reads.  notes: what else was
    decided about it, and why.  stream: main | copies, which runs beside it.
    """

    group: str
    work: LaunchWork
    how: LaunchForm
    operands: tuple[str, ...]
    notes: tuple[str, ...]
    stream: str

    @property
    def kernel(self) -> str:
        return self.work.name

    @property
    def form(self) -> str:
        """wgmma | mma | threads | copy | library:... | refused, see LaunchForm."""
        return self.how.name

    @property
    def reason(self) -> str:
        """Why it has this form; "" of wgmma."""
        return self.how.reason

    @property
    def where(self) -> SourceLine | None:
        return self.work.where


@dataclass(frozen=True)
class LaunchPlan:
    """All of a function's, in the order in which they start."""

    name: str
    target: str
    launches: tuple[PlannedLaunch, ...]
    temporary_bytes: int
    no_graph: str = ""  # why calls cannot be launched as a CUDA graph

    @property
    def forms(self) -> Counter[str]:
        """Launches by form."""
        return Counter(x.form for x in self.launches)

    @property
    def matmuls(self) -> tuple[PlannedLaunch, ...]:
        """Those that multiply matrices."""
        return tuple(x for x in self.launches if x.how.all)

    @property
    def copies(self) -> tuple[PlannedLaunch, ...]:
        return tuple(x for x in self.launches if x.form == "copy")

    @property
    def bytes(self) -> int:
        """Of global memory, read and written."""
        return sum(x.work.bytes for x in self.launches)

    @property
    def flops(self) -> float:
        return sum(x.work.flops for x in self.launches)

    def least_us(self, gpu: str | Gpu | None = None) -> float:
        """The launches one after another at the rates of a GPU's data sheet; by default the one
        that stands for the target."""
        on = find_gpu(gpu or self.target)
        return sum(x.work.least_us(on) for x in self.launches)

    def __str__(self) -> str:
        return "\n".join([f"{x.group}: {line}" for x in self.launches for line in _lines(x, self)]
                         + self.summary())

    def summary(self) -> list[str]:
        """Launches by form, bytes, operations and the least time."""
        why = [f"no CUDA graph, because {self.no_graph}"] if self.no_graph else []
        order = {form: i for i, form in enumerate(BEST_FIRST)}
        counts = sorted(self.forms.items(), key=lambda f: (order.get(f[0], len(order)), f[0]))
        return [f"launches: {len(self.launches)}: "
                + (", ".join(f"{n} {form}" for form, n in counts) or "none"),
                f"work: {amount(self.flops, 'flop')}, {amount(self.bytes, 'B')}, at least "
                f"{self.least_us():.3g} us on {find_gpu(self.target).name}", *why]


def plan_of(program: CudaProgram) -> LaunchPlan:
    """The launches of a lowered graph. Nothing is compiled."""
    readers, forms = _readers(program.plan), forms_of(program)
    made = tuple(_planned(program.plan.steps[run.start:run.stop], forms[run.start], readers)
                 for run in program.runs())
    return LaunchPlan(program.plan.name, str(program.target), made, program.plan.temporary_bytes,
                      why_no_graph(program))


def _readers(plan: GraphSchedule) -> dict[str, list[str]]:
    """The groups that read each buffer."""
    found: dict[str, list[str]] = {}
    for group in plan.groups:
        for name in dict.fromkeys(plan.base(o.name) for o in group.reads):
            found.setdefault(name, []).append(group.name)
    return found


def _planned(steps: Sequence[ScheduledGroup | Transfer], form: LaunchForm,
             readers: dict[str, list[str]]) -> PlannedLaunch:
    step = steps[0]
    if isinstance(step, Transfer):
        return PlannedLaunch(step.name, transfer_work(step), form, (), (), "copies")
    if form.name == "copy":
        by = [r for o in step.writes for r in readers.get(o.name, ())]
        form = replace(form, reason=f"{form.reason}; read by {' '.join(by)}" if by else form.reason)
    types = tuple(str(o.type.dtype) for o in step.reads)
    groups = [s for s in steps if isinstance(s, ScheduledGroup)]
    name, work = (step.name, group_work(step)) if len(groups) == 1 else (
        step.batch, batch_work(groups))
    return PlannedLaunch(name, work, form, types, step.schedule.notes, "main")


def annotated(program: CudaProgram) -> list[ScheduleLine]:
    """The lines of the Schedule IR, with those of each launch in front of its ops, and the summary.
    """
    plan = plan_of(program)
    mine = {x.group: _lines(x, plan) for x in plan.launches}
    out: list[ScheduleLine] = []
    for line in program.plan.lines():
        if line.at in mine and line.text.startswith("    ops "):
            out += [replace(line, text=f"    {text}", ops=()) for text in mine.pop(line.at)]
        out.append(line)
        if line.at in mine and (line.ops or line.at in program.plan.batches):  # one line
            out += [ScheduleLine(f"    {text}", (), line.at) for text in mine.pop(line.at)]
    last = out.pop()
    return [*out, *(ScheduleLine(f"  {text}") for text in plan.summary()), last]


def _lines(x: PlannedLaunch, plan: LaunchPlan) -> list[str]:
    why = f": {x.reason}" if x.reason else ""
    w, gpu = x.work, find_gpu(plan.target)
    return [f"form {x.form}{why}",
            f"work {amount(w.flops, 'flop')}, reads {amount(w.read_bytes, 'B')}, writes "
            f"{amount(w.written_bytes, 'B')}, at least {w.least_us(gpu):.3g} us, "
            f"stream {x.stream}"]


__all__ = ["LaunchPlan", "PlannedLaunch", "annotated", "plan_of"]
