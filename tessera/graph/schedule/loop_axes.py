"""Axes of a kernel: those of a group's space, with neighbours merged that all operands treat alike.

A residual [B, S, N], a bias [N] and a column [B, S, 1] over the space [B, S, N] give the axes
(B S) and N: the residual lies along both, the bias along the second, the column along the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import cast

from ...lazy_dataclass import dataclass
from ..ir import Value

Extents = tuple[int, ...]
Pattern = tuple[bool, ...]  # per axis of a frame: whether an operand lies along it


def extents_of(v: Value) -> Extents:
    """The extents of a value whose shape is concrete, as those of a lowered graph are."""
    return cast(Extents, tuple(v.aval.shape))


@dataclass(frozen=True)
class Frame:
    """space: the extents that operands broadcast to.  members: the axes of each merged axis."""

    space: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(prod(self.space[a] for a in m) for m in self.members)

    def pattern(self, shape: tuple[int, ...]) -> Pattern | None:
        """Along which axes an operand of this shape lies; None when it does so along part of one.
        """
        if len(shape) > len(self.space):
            return None
        full = (1,) * (len(self.space) - len(shape)) + shape
        if any(n not in (1, s) for n, s in zip(full, self.space, strict=True)):
            return None
        out = []
        for m in self.members:
            real = [a for a in m if self.space[a] != 1]
            along = {full[a] != 1 for a in real}
            if len(along) > 1:
                return None
            out.append(along == {True})
        return tuple(out)


def merged(space: tuple[int, ...], shapes: Iterable[tuple[int, ...]], rows: bool,
           cuts: Collection[int] = ()) -> Frame:
    """The fewest axes along which operands of these shapes lie. rows: the last axis stays apart.
    cuts: axes that are not merged with those in front of them."""
    full = [(1,) * (len(space) - len(s)) + s for s in shapes]
    last = len(space) - 1
    members: list[tuple[int, ...]] = []
    before: tuple[bool, ...] | None = None
    cut = False  # by this axis, or by one of one element in front of it
    for a, extent in enumerate(space):
        apart, cut = rows and a == last, cut or a in cuts
        if extent == 1 and not apart:
            if members:
                members[-1] += (a,)
            continue
        along = tuple(s[a] != 1 for s in full)
        if before == along and not apart and not cut:
            members[-1] += (a,)
        else:
            members.append((a,))
        before, cut = along, False
    return Frame(space, tuple(members))


__all__ = ["Extents", "Frame", "Pattern", "extents_of", "merged"]
