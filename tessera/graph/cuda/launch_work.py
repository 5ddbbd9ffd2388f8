"""What each step of a program for GPUs computes and moves, by the records of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import short_path
from ...lazy_dataclass import dataclass
from ...tile.passes.operation_counts import count, rate_of
from ..schedule.ir import ScheduledGroup, Transfer
from ..schedule.work import LaunchWork, operand_bytes, part_of, read_bytes, written_bytes
from .program.collective_steps import CollectiveStep
from .program.host_steps import HostStep
from .program.library_steps import LibraryStep
from .program.loop_steps import LoopStep
from .program.node_kernels import NodeKernel, NodeLaunch

if TYPE_CHECKING:
    from .program.run import CudaProgram, GroupLaunch

# The sort of work that each kind of group is; of a user's or the library's kernel see `_sort`.
SORTS = {"gemm": "matmul", "attention": "attention", "loop": "elementwise", "rows": "reduction",
         "columns": "reduction", "strips": "reduction", "move": "move", "elements": "move",
         "update": "move", "gather": "index", "segments": "index", "last": "index",
         "write_places": "index", "parts": "index", "runs": "index", "line_runs": "index",
         "atomic_sums": "index", "integer_sums": "index", "row_dots": "reduction",
         "steps": "elementwise", "computed": "elementwise", "small_system": "elementwise",
         "small_product": "matmul",
         "sort": "sort", "merge": "sort", "order": "sort", "merge_cuts": "sort",
         "merge_keys": "sort", "digit_counts": "sort", "digit_places": "sort",
         "search": "sort", "position": "reduction", "scan": "reduction", "key": "elementwise",
         "keys": "elementwise", "key_bits": "elementwise",
         "library": "library", "host": "copy", "repeat": "loop", "exchange": "exchange"}


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """What one launch of several groups runs, and the launch."""

    groups: tuple[ScheduledGroup, ...]
    launch: Any


@dataclass(frozen=True, eq=False)
class StepLabel:
    """What runs between two events: a part of a step of a program.

    part: kernel | library | exchange, between ranks | loop, of the host | host, a copy for it |
    transfer | copy, of what a kernel writes | fill | wait, for a copy | poison
    """

    program: CudaProgram
    step: (GroupLaunch | GroupBatch | NodeLaunch | LibraryStep | HostStep | LoopStep
           | CollectiveStep | Transfer | None)
    part: str
    buffers: frozenset[str] = frozenset()  # of the program, whose addresses it is given
    batches: tuple[Any, ...] = ()  # that it launches, which have tables of addresses

    @cached_property
    def title(self) -> str:
        """`g3_product_cast  train.py:26`"""
        work = self.work
        at = work.where
        return work.name + (f"  {short_path(at.file)}:{at.line}" if at is not None else "")

    @property
    def work(self) -> LaunchWork:
        if isinstance(self.step, Transfer):
            return transfer_work(self.step)
        if self.step is None:
            return LaunchWork(self.part, "copy", "", None, "", 0, 0)
        if isinstance(self.step, GroupBatch):
            return batch_work(self.step.groups)
        group = self.step.group
        if self.part in ("copy", "fill"):
            nbytes = operand_bytes(group.writes)
            return LaunchWork(f"{group.kernel} {self.part}", "copy", part_of(group.where),
                              group.where, _shapes(group), nbytes * (self.part == "copy"), nbytes)
        return group_work(group)


def transfer_work(step: Transfer) -> LaunchWork:
    return LaunchWork(f"{step.name} {step.kind}", "copy", part_of(step.where), step.where,
                      f"{step.nbytes} bytes", step.nbytes, step.nbytes)


def group_work(group: ScheduledGroup) -> LaunchWork:
    """One launch of a group."""
    if group.kind == "launch":
        return _kernel_work(group)
    anchored = group.kind in ("gemm", "attention")
    matmuls = group.steps[0].flops if anchored else 0.0
    rate = rate_of(group.reads[0].type.dtype, None) if anchored else "f32"
    sort, part = SORTS[group.kind], part_of(group.where)
    if not anchored and part_of(group.steps[-1].where) == "optimizer":  # behind a cast, say
        part = "optimizer"
    if part == "optimizer" and sort in ("elementwise", "reduction", "move"):
        sort = part
    return LaunchWork(group.kernel, sort, part, group.where, _shapes(group), read_bytes(group),
                      written_bytes(group), sum(s.flops for s in group.steps), matmuls, rate)


def batch_work(groups: Sequence[ScheduledGroup]) -> LaunchWork:
    """One launch of several groups."""
    each = [group_work(g) for g in groups]
    return replace(each[0], name=f"{groups[0].kernel}_x{len(groups)}",
                   shapes=f"{each[0].shapes} and {len(groups) - 1} more",
                   read_bytes=sum(w.read_bytes for w in each),
                   written_bytes=sum(w.written_bytes for w in each),
                   flops=sum(w.flops for w in each))


def _kernel_work(group: ScheduledGroup) -> LaunchWork:
    """Counted from the kernel's Tile IR."""
    made: NodeKernel = group.attr("call")
    flops, matmuls, rate = _counted(made)
    module = made.call.kernel.fn.__module__
    library = module.startswith("tessera.kernels.")
    sort = "kernel" if not library else "attention" if "attention" in module else (
        "matmul" if matmuls else "reduction")
    return LaunchWork(group.kernel, sort, part_of(group.where), group.where, _shapes(group),
                      operand_bytes(group.reads), operand_bytes(group.writes), flops, matmuls, rate)


@lru_cache(maxsize=256)
def _counted(made: NodeKernel) -> tuple[float, float, str]:
    """Operations of a launch, those of its matmuls, and at which rate these are."""
    work, groups = made.work, prod(made.work.grid)
    counted = count(work.function, made.bound.sizes, work.lanes, work.grid)
    rates = {p.kind for p in counted.matmuls} or {"f32"}
    return groups * counted.flops, groups * counted.matmul_flops, min(rates)


def _shapes(group: ScheduledGroup) -> str:
    def text(operands: Any) -> str:
        return " ".join(f"{o.type.dtype}[{', '.join(map(str, o.shape))}]" for o in operands)

    return f"{text(group.reads)} -> {text(group.writes)}"


__all__ = ["SORTS", "GroupBatch", "StepLabel", "batch_work", "group_work", "transfer_work"]
