"""What is read next is made last: of groups of which none waits for another, those come first whose
results are read later. The reader then finds some of what it reads in the GPU's cache."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import value_bytes
from .group_order import IN_TURN, group_order
from .groups import FusionGroup
from .target import ScheduleTarget

NEAR = 4  # groups behind one, among which its reader is looked for
LEAST_BYTES = 1 << 22  # of a result: smaller ones stay in the cache, or cost nothing
LYING = ("view", "move")  # kinds that may be no launch: their result lies where their operand does
APART = (*IN_TURN, "exchange", "library")  # whose place in the program others rely on


def order_for_cache(groups: Sequence[FusionGroup], target: ScheduleTarget
                                ) -> list[FusionGroup]:
    """The groups in such an order: what stands between one and its first reader, a few places
    behind it, and waits for neither, comes in front of both."""
    before = group_order(groups, target).before

    def reads(c: int, a: int) -> bool:
        """Itself, or through views."""
        return a in before[c] or any(groups[v].kind in LYING and reads(v, a) for v in before[c])

    order = list(range(len(groups)))
    kernels = [i for i in order if groups[i].kind not in LYING]
    for at, a in enumerate(kernels):
        behind = kernels[at + 1:at + 1 + NEAR]
        first = next((k for k, i in enumerate(behind) if reads(i, a)), 0)
        between, reader = behind[:first], behind[first:first + 1]
        if not between or sum(map(value_bytes, groups[a].outputs)) < LEAST_BYTES or any(
                groups[i].kind in APART or reads(reader[0], i) for i in between) or (
                groups[a].kind in APART):
            continue
        for b in between:
            begin, end = order.index(a), order.index(b)
            if before[b].isdisjoint(order[begin:end]):
                order.insert(begin, order.pop(end))
    return [groups[i] for i in order]


__all__ = ["order_for_cache"]
