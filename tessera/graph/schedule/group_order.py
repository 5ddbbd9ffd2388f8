"""Which groups have to run before which, by number, and in whose memory values lie."""

from __future__ import annotations

from collections.abc import Sequence

from ...lazy_dataclass import dataclass
from ..ir import Value, node_effects
from ..simplify import KEEP_EFFECTS
from .groups import FusionGroup
from .target import ScheduleTarget

VIEWS = ("view", "saved")  # groups whose result lies where their operand does
IN_TURN = ("fetch", "offload", "host", "repeat")  # groups that keep the order of the program


@dataclass(frozen=True)
class GroupOrder:
    """before: of each group those that it waits for.  roots: of each value that a group makes the
    one that owns the memory in which it lies."""

    before: list[set[int]]
    roots: dict[Value, Value]


def group_order(groups: Sequence[FusionGroup], target: ScheduleTarget) -> GroupOrder:
    """Of groups in an order in which they may run."""
    before: list[set[int]] = [set() for _ in groups]
    made: dict[Value, int] = {}
    roots: dict[Value, Value] = {}
    readers: dict[Value, list[int]] = {}
    last = -1  # with an order of its own: an effect, or a copy beside the kernels
    for i, group in enumerate(groups):
        for v in group.inputs:
            if v in made:
                before[i].add(made[v])
            readers.setdefault(roots.get(v, v), []).append(i)
        source = group.inputs[0] if group.inputs else None
        for v in group.outputs:
            made[v] = i
            roots[v] = v if source is None or group.kind not in VIEWS else roots.get(source, source)
        memory = target.memory(group)
        if memory.kind == "donated":  # what it is written over is read before
            v = group.inputs[memory.operand]
            before[i].update(readers[roots.get(v, v)])
        if group.kind in IN_TURN or any(node_effects(n) & KEEP_EFFECTS for n in group.nodes):
            if last >= 0:
                before[i].add(last)
            last = i
        before[i].discard(i)
    return GroupOrder(before, roots)


__all__ = ["GroupOrder", "group_order"]
