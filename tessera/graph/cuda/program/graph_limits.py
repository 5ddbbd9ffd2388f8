"""Which programs can be launched as CUDA graphs, and why others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....runtime.conditional_nodes import has_conditional_nodes
from ....tile.ir.ir import Op, walk
from ...schedule.ir import Transfer
from .collective_steps import CollectiveStep
from .host_steps import HostStep
from .library_steps import LibraryStep
from .loop_steps import LoopStep
from .node_kernels import NodeLaunch

if TYPE_CHECKING:
    from .run import CudaProgram

FEWEST_LAUNCHES = 3  # one or two cost no more than the launch of a graph
MOST_LAUNCHES = 16_384  # of the iterations of one loop


def why_no_graph(program: CudaProgram) -> str:
    """What in a program cannot be recorded; "" where nothing is."""
    for step in program.steps:
        if isinstance(step, LoopStep):
            if why := launched_by_host(step):
                return why
        if isinstance(step, LibraryStep):
            return f"{step.callee.node.op.name} runs in {step.callee.record.name}"
        if isinstance(step, CollectiveStep):
            if step.callee.route == "nccl":
                continue
            return f"{step.callee.node.op.name} sends between ranks by way of the host"
        if isinstance(step, HostStep):
            return f"{step.node.op.name} runs on the host"
        if isinstance(step, Transfer):
            return "it copies between the host and the GPU"
        if isinstance(step, NodeLaunch) and (why := _why_not(step)):
            return why
    if any(b.kind == "host" for b in program.plan.buffers):
        return "a result lies on the host"
    return ""


def launched_by_host(step: LoopStep) -> str:
    """Why the host launches the iterations of a loop, one after another; "" where their launches
    are some of the program's."""
    name, body, length = step.callee.node.op.name, step.body, step.callee.form.length
    said = f"the host launches the iterations of {name}"
    for part in step.programs:
        if why := why_no_graph(part):
            return f"{said}, since {why}"
        lowered = part.lowered
        if (part.collectives() or part.sending_loops() or lowered.captures or lowered.overwritten
                or lowered.drawn or lowered.copies):
            return said
    count = launch_count(body) if length is None else length * launch_count(body)
    if count > MOST_LAUNCHES:
        return f"{said}, which are {count} launches, and a graph takes {MOST_LAUNCHES}"
    return ""


def no_node_for(step: LoopStep) -> str:
    """Why there is no node for a loop in a graph of this driver; "" where there is, or each of its
    launches is one."""
    inside = (s for p in step.programs for s in p.steps if isinstance(s, LoopStep))
    if why := next(filter(None, map(no_node_for, inside)), ""):
        return why
    if step.callee.form.length is not None or has_conditional_nodes():
        return ""
    return f"the host launches the iterations of {step.callee.node.op.name}: graphs of this " \
           "driver have no loops"


def has_few_launches(program: CudaProgram) -> bool:
    """Whether they cost no more than a graph."""
    endless = any(isinstance(s, LoopStep) and s.test is not None for s in program.steps)
    return launch_count(program) < FEWEST_LAUNCHES and not endless


def launch_count(program: CudaProgram, together: bool = True) -> int:
    """With those of the iterations of its loops: of one whose end is data of one. together: batches
    are one."""
    loops = [s for s in program.steps if isinstance(s, LoopStep)]
    return len(program.runs(together)) - len(loops) + sum(
        (1 if (length := s.callee.form.length) is None else length)
        * sum(launch_count(p, together) for p in s.programs) for s in loops)


def _why_not(step: NodeLaunch) -> str:
    name = step.shared.call.kernel.__name__
    if step.shared.drawn:
        return f"kernel {name} draws by a number that each launch is given"
    if any(isinstance(n, Op) and n.name == "print" for n in walk(step.function().body)):
        return f"kernel {name} prints, and its lines are shown when it has run"
    return ""


__all__ = ["FEWEST_LAUNCHES", "MOST_LAUNCHES", "has_few_launches", "launch_count",
           "launched_by_host", "no_node_for", "why_no_graph"]
