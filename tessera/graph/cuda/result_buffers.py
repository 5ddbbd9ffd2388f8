"""Where the results of a program on a GPU are written: whose memory they take."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.ir import PlannedBuffer, ScheduledGroup, Transfer
from .run import CudaProgram


@dataclass(frozen=True)
class ResultBuffer:
    """A result, the buffer in which it lies, and whether that is its own memory.

    given: the donated argument whose memory it takes.
    """

    buffer: PlannedBuffer
    base: str
    own: bool
    given: int | None = None


def may_overwrite(program: CudaProgram, name: str, result: str) -> bool:
    """Whether a result may be written where an input lies: of the same size, after all have read
    the input; or by the last who does, where it reads each element once and then writes it: a loop,
    or the epilogue of a matmul, whose kernels store behind all loads of a block."""
    plan = program.plan
    if plan.buffer(name).nbytes != plan.buffer(result).nbytes or any(
            plan.base(r) == name for r in plan.results):
        return False
    reads, writes = [-1], list[int]()
    first = {k: run.start for run in program.runs() for k in run}  # of one launch: at once
    for i, step in enumerate(plan.steps):
        if isinstance(step, Transfer):
            if name in (plan.base(step.on_device), plan.base(step.on_host)):
                return False
            continue
        if any(plan.base(o.name) == name for o in step.reads):
            reads.append(i)
        if any(plan.base(o.name) == result for o in step.writes):
            writes.append(i)
    if not writes or reads[-1] != writes[0]:
        return bool(writes) and reads[-1] < first[writes[0]]
    if reads[-2] >= first[writes[0]]:
        return False  # by another group of the launch, too
    last = plan.steps[writes[0]]
    assert isinstance(last, ScheduledGroup)
    own = [o for o in (*last.reads, *last.writes) if plan.base(o.name) in (name, result)]
    anchored = last.steps[0].args if last.kind == "gemm" else ()
    return last.kind in ("loop", "gemm") and all(
        o.shape == last.space and o.layout is None and o.name not in anchored for o in own)


__all__ = ["ResultBuffer", "may_overwrite"]
