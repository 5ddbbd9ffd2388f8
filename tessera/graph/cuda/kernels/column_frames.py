"""Reductions over axes behind which others lie, and the elementwise ops that make their elements.

A group sees its space as [A, R, C] around the reduced axes: a kernel streams blocks of R through,
makes the elements from the operands, each of which lies along some of the three, and combines
them. So a softmax along a middle axis reads its operand three times and writes its result, and
nothing of f32 lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....lazy_dataclass import dataclass
from ...ir import Node, Value
from ...schedule.groups import FusionGroup
from ...schedule.loop_axes import Extents, Frame, extents_of
from .spell import COMBINE


@dataclass(frozen=True)
class ColumnFrame:
    """frame: of the three axes, over those of the group's space."""

    frame: Frame

    @property
    def extents(self) -> Extents:
        """A, R, C"""
        return self.frame.extents

    def takes(self, operands: Iterable[Value]) -> bool:
        """Whether each operand lies along all of an axis, or not along it."""
        return all(self.frame.pattern(extents_of(v)) is not None for v in operands)

    def shape(self, v: Value) -> Extents:
        """The extents of an operand along the three: 1 where it does not lie along one."""
        along = self.frame.pattern(extents_of(v))
        assert along is not None
        return tuple(e if p else 1 for e, p in zip(self.extents, along, strict=True))


def reductions(group: FusionGroup) -> list[Node]:
    """Those of a group of columns: several that read different values, or one, last, behind the
    ops that make what it reads."""
    return [n for n in group.nodes if n.op.reduction in COMBINE]


def column_frame(group: FusionGroup) -> ColumnFrame:
    axis, axes = reductions(group)[0].attrs["axis"], range(len(group.space))
    first, last = axis[0], axis[-1]
    return ColumnFrame(Frame(group.space, (
        tuple(axes[:first]), tuple(axes[first:last + 1]), tuple(axes[last + 1:]))))


__all__ = ["ColumnFrame", "column_frame", "reductions"]
