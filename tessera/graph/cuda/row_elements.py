"""The element of a row that a number chooses, read where it lies.

    sum(where(columns == label, x, 0))      ->      x[m, label], and 0 where there is none

The sum compares and adds in every column: of a loss of labels that is a fourth of all instructions.
"""

from __future__ import annotations

from dataclasses import replace

from ..schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from .group_statements import FrameBlock

Steps = dict[str, GroupStep]


def read_elements(b: FrameBlock, group: ScheduledGroup, N: int) -> ScheduledGroup:
    """A group of blocks of one row, with reads in place of such sums. N: columns of a row."""
    if b.BM > 1:
        return group
    steps = {s.name: s for s in group.steps}
    picks = {s.name: made for s in group.steps
             if (made := _read(replace(b, columns=f"0:{N}"), group, steps, s)) is not None}
    kept, wanted = list[GroupStep](), {o.name for o in group.writes}
    for s in reversed([picks.get(s.name, s) for s in group.steps] if picks else group.steps):
        if not picks or s.name in wanted or not s.name:
            wanted.update(a for a in s.args if isinstance(a, str))
            kept.append(s)
    return replace(group, steps=tuple(kept[::-1]))


def _read(row: FrameBlock, group: ScheduledGroup, steps: Steps, total: GroupStep
          ) -> GroupStep | None:
    """What reads the element that a sum picks; None where it does not pick one."""
    chosen = _made("where", steps, total.args[0]) if total.reduction == "sum" else None
    if chosen is None or chosen.args[2] != 0 or chosen.type != total.type:
        return None
    same, cast = _made("equal", steps, chosen.args[0]), _made("cast", steps, chosen.args[1])
    x = _operand(group, cast.args[0] if cast else chosen.args[1])
    if same is None or x is None:
        return None
    columns, label = same.args
    numbers = _made("column_numbers", steps, columns)
    if numbers is None or not isinstance(label, str):
        return None
    text = f"tile.row_sum(tile.gather({row.place(x)[0]}, {{0}}, {len(row.slices) - 1}))"
    attrs = (("kinds", ("int",)), ("text", f"tile.cast({text}, {{to}})"))
    return replace(total, op="row_element", args=(label,), attrs=attrs)


def _made(op: str, steps: Steps, name: object) -> GroupStep | None:
    """The step that makes a value, where it is of this op."""
    step = steps.get(name) if isinstance(name, str) else None
    return step if step is not None and step.op == op else None


def _operand(group: ScheduledGroup, name: object) -> GroupOperand | None:
    """An operand of the whole space of the group, as it lies."""
    return next((r for r in group.reads if r.name == name and r.shape == group.space
                 and r.layout is None and r.type.dtype.kind == "float"
                 and not r.type.dtype.packed), None)


__all__ = ["read_elements"]
