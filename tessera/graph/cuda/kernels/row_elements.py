"""The element of a row that a number chooses, read where it lies.

    sum(where(columns == label, x, 0))      ->      x[m, label], and 0 where there is none

The sum compares and adds in every column: of a loss of labels that is a fourth of all instructions.
Of a few rows the elements of all their labels are read, and each keeps its own: cross entropy of
rows of 1024 takes 34.8 us in place of 42.4, and with its gradient 76.5 and 80.6; of rows of 256 the
latter 89.7 in place of 83.3, so those compare (2^26 elements of bf16, H200, 2026-11-26).
"""

from __future__ import annotations

from dataclasses import replace

from ...schedule.ir import GroupOperand, GroupStep, ScheduledGroup
from .group_statements import FrameBlock

FEW = 4  # rows of a group: the elements that the label of each chooses in all of them are read
Steps = dict[str, GroupStep]


def read_elements(b: FrameBlock, group: ScheduledGroup, N: int) -> ScheduledGroup:
    """A group of blocks of few rows, with reads in place of such sums. N: columns of a row."""
    if b.BM > FEW:
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
    chosen = _producing_step("where", steps, total.args[0]) if total.reduction == "sum" else None
    if chosen is None or chosen.args[2] != 0 or chosen.type != total.type:
        return None
    same, cast = _producing_step("equal", steps, chosen.args[0]), _producing_step("cast", steps,
                                                                                  chosen.args[1])
    x = _operand(group, cast.args[0] if cast else chosen.args[1])
    if same is None or x is None:
        return None
    columns, label = same.args
    numbers = _producing_step("column_numbers", steps, columns)
    if numbers is None or not isinstance(label, str):
        return None
    labels, several = next((r for r in group.reads if r.name == label), None), row.BM > 1
    again = f"tile.load({row.place(labels)[0]})" if several and labels is not None else "{0}"
    spans = [s for s in row.slices if ":" in s]  # axes that the grid counts are none of the view
    read = f"tile.gather({row.place(x)[0]}, {again}, {len(spans) - 1})"
    if several:  # where warps have rows of their own, no label changes hands
        row_numbers = f"tile.arange(0, {row.BM})"
        read = f"tile.where({row_numbers}[:, None] == {row_numbers}[None, :], {read}, 0)"
    attrs = (("kinds", ("int",)), ("text", f"tile.cast(tile.row_sum({read}), {{to}})"))
    return replace(total, op="row_element", args=(label,), attrs=attrs)


def _producing_step(op: str, steps: Steps, name: object) -> GroupStep | None:
    """The step that makes a value, where it is of this op."""
    step = steps.get(name) if isinstance(name, str) else None
    return step if step is not None and step.op == op else None


def _operand(group: ScheduledGroup, name: object) -> GroupOperand | None:
    """An operand of the whole space of the group, as it lies."""
    return next((r for r in group.reads if r.name == name and r.shape == group.space
                 and r.layout is None and r.type.dtype.kind == "float"
                 and not r.type.dtype.packed), None)


__all__ = ["read_elements"]
