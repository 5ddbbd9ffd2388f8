"""Kernels that begin with what was written last, which the GPU's cache still holds.

Groups of a kernel start one after another, and what the launch in front of it has written last lies
in the second-level cache: with results of 100 MB and a cache of 50 MB a reader that starts with the
first rows finds none of it there, one that starts with the last rows finds a part. Matmuls go from
the first row to the last; loops, rows and strips behind them go the other way, and leave their own
first rows to the matmul behind. Groups of a cluster keep their order, by which their parts are
combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ...schedule.ir import GraphSchedule, GroupOperand, ScheduledGroup, Transfer

LEAST_BYTES = 1 << 22  # of an operand: smaller ones stay in the cache, however they are read
FREE = ("loop", "rows", "strips")  # kinds whose groups may start in any order
NOTE = "the last groups start first, because what they read was written last"


def turn_around(plan: GraphSchedule) -> GraphSchedule:
    """The plan in which each kernel that may do so begins with the end of what the launch in front
    of it wrote."""
    steps: list[ScheduledGroup | Transfer] = []
    end_first: dict[str, bool] = {}  # of what the launch in front wrote
    for s in plan.steps:
        if isinstance(s, ScheduledGroup):
            read = [end_first[b] for b in _large(plan, s.reads) if b in end_first]
            free = s.kind in FREE and not s.batch and dict(s.attrs).get("cluster", 1) == 1
            turned = free and bool(read) and not any(read)
            if turned:
                s = replace(s, schedule=s.schedule.with_values({"LAST_FIRST": True}).with_notes(
                    *s.schedule.notes, NOTE))
            end_first = dict.fromkeys(_large(plan, s.writes), turned) or end_first
        steps.append(s)
    return replace(plan, steps=tuple(steps))


def _large(plan: GraphSchedule, operands: Sequence[GroupOperand]) -> list[str]:
    """The buffers of those that are worth it."""
    return [plan.base(o.name) for o in operands
            if prod(o.shape) * o.type.dtype.bits >= 8 * LEAST_BYTES]


__all__ = ["turn_around"]
