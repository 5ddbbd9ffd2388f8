"""Where the results of a program on a GPU are written: whose memory they take."""

from __future__ import annotations

from ....lazy_dataclass import dataclass
from ...schedule.ir import PlannedBuffer, ScheduledGroup
from ..passes.displaced_reads import JOINED
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
    if plan.buffer(name).nbytes != plan.buffer(result).nbytes or name in plan.result_memory:
        return False
    if any(name in (plan.base(t.on_device), plan.base(t.on_host)) for t in plan.transfers):
        return False
    reads, writes = [-1, *plan.readers.get(name, ())], plan.writers.get(result, [])
    first = program.launch_begins  # of one launch: at once
    if not writes or reads[-1] != writes[0]:
        return bool(writes) and reads[-1] < first[writes[0]]
    if reads[-2] >= first[writes[0]]:
        return False  # by another group of the launch, too
    last = plan.steps[writes[0]]
    assert isinstance(last, ScheduledGroup)
    own = [o for o in (*last.reads, *last.writes) if plan.base(o.name) in (name, result)]
    anchored = last.steps[0].args if last.kind == "gemm" else ()
    beside = {arg for s in last.steps if s.op == JOINED.name for arg in s.args}
    return last.kind in ("loop", "gemm") and all(
        o.shape == last.space and o.layout is None and o.name not in beside.union(anchored)
        for o in own)


__all__ = ["ResultBuffer", "may_overwrite"]
