"""Results that are written where an operand lay which nobody reads afterwards, so that the two are
never in memory side by side.

    logits -> d_logits        # of GPT-2 124M, with 32 sequences: 3.3 GB each

Which operands a group's kernel can write over its target says (`ScheduleTarget.overwrites`). Both
values own their memory; what the caller gives or keeps is no matter of these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir import Value, value_bytes
from .groups import FusionGroup, batch_ends

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan


def find_overwrites(plan: MemoryPlan, groups: Sequence[FusionGroup]) -> dict[Value, Value]:
    """The value in whose place each such result is written."""
    readers, made = _readers(plan, groups), _makers(plan, groups)
    ends = batch_ends(groups)
    found: dict[Value, Value] = {}
    gone: set[Value] = set()
    for i, group in enumerate(groups):
        begin = bisect_left(ends, ends[i])  # of its batch, whose groups run at once
        for x, y in plan.target.overwritten(group):
            root = plan.places[x].root
            free = (_in_arena(plan, root) and is_whole(plan, x)
                    and not any(begin <= r != i for r in readers[root])
                    and sum(plan.places[v].root is root for v in group.inputs) == 1)
            mine = _in_arena(plan, y) and made[y] == i and y not in found
            if free and mine and root not in gone:
                found[y] = root
                gone.add(root)
    return found


def is_whole(plan: MemoryPlan, x: Value) -> bool:
    """Whether a value is all that its owner's memory holds, in order."""
    return plan.views.layout(x).is_dense and value_bytes(x) == value_bytes(plan.places[x].root)


def _in_arena(plan: MemoryPlan, v: Value) -> bool:
    return plan.places[v].kind == "arena"


def _readers(plan: MemoryPlan, groups: Sequence[FusionGroup]) -> dict[Value, list[int]]:
    found: dict[Value, list[int]] = {}
    for i, group in enumerate(groups):
        for root in dict.fromkeys(plan.places[v].root for v in group.inputs):
            found.setdefault(root, []).append(i)
    return found


def _makers(plan: MemoryPlan, groups: Sequence[FusionGroup]) -> dict[Value, int]:
    """The group that first writes into each value's memory."""
    found: dict[Value, int] = {}
    for i, group in enumerate(groups):
        for v in group.outputs:
            found.setdefault(plan.places[v].root, i)
    return found


__all__ = ["find_overwrites", "is_whole"]
