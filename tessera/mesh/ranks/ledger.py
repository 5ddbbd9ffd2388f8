"""The ledger: before data moves, ranks compare what they are about to do.

Every member of a group sends every other the header of a message: a digest of op, type, attributes,
ranks, source line and the extents that must agree; the shape; and the call as text. So ranks that
disagree find out before any byte of data is sent, and each can name the others' lines. The shapes
are also how uneven parts are received. The messages of the call then carry the same label.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from tessera.dims import show_shape
from tessera.errors import ShapeError, SourceLine, user_line
from tessera.graph.trace import current_line
from tessera.numerics import NumericType

from ...lazy_dataclass import dataclass
from .envelope import MAX_DIMS, MessageLabel, Shape, disagreement, place_of
from .group import Group


@dataclass(frozen=True)
class CollectiveCall:
    """What one rank is about to do: a collective on an array of this shape and type."""

    op: str
    shape: Shape
    type: NumericType | None
    attrs: tuple[tuple[str, object], ...]
    axis: str
    where: SourceLine | None
    extents: tuple[tuple[str, object], ...] = ()  # of all members, once they are known

    def __str__(self) -> str:
        operand = f"{_name(self.type)}{show_shape(self.shape)}" if self.type else ""
        attrs = [f"{k}={v}" for k, v in self.attrs if v is not None]
        return f"{self.op}({', '.join(filter(None, [operand, *attrs]))}) over {self.axis}"

    def key(self, group: Group, varies: Iterable[int]) -> str:
        """What must be the same on all ranks; extents that may vary are left out."""
        free = set(varies)
        shape = ["*" if d in free else n for d, n in enumerate(self.shape)]
        return repr((self.op, _name(self.type), self.attrs, self.extents, group.ranks,
                     place_of(self.where), shape))

    def label(self, group: Group, varies: Iterable[int] = ()) -> MessageLabel:
        """Of its messages."""
        return MessageLabel(str(self), self.where, self.key(group, varies), self.shape)


@functools.lru_cache(maxsize=1024)
def _name(type: NumericType | None) -> str:
    return str(type)


def call(group: Group, op: str, shape: Shape, type: NumericType | None,
         attrs: Mapping[str, object],
         extents: Mapping[str, object] | None = None) -> CollectiveCall:
    """The record of a call from the user's line, that of the node in a graph which runs. Raises
    ShapeError for over 32 dimensions."""
    if len(shape) > MAX_DIMS:
        raise ShapeError(f"{op} takes up to {MAX_DIMS} dimensions, got {show_shape(shape)}")
    return CollectiveCall(op, shape, type, tuple(attrs.items()), group.axis,
                          current_line() or user_line(),
                          tuple((extents or {}).items()))


def agree(group: Group, mine: CollectiveCall, varies: Iterable[int] = ()) -> list[Shape]:
    """Every member's shape, once all members make the same call; else DisagreementError, on every
    one of them. varies: the dimensions whose extents may differ between ranks."""
    if group.size == 1:
        return [mine.shape]
    label = mine.label(group, varies).of("ledger")
    me = group.transport.rank
    got = group.transport.meet((r for r in group.ranks if r != me), label)
    if any(h.digest != label.digest for h in got.values()):
        calls = [(r, got[r].text, got[r].digest) if r in got else
                 (r, str(label), label.digest) for r in group.ranks]
        raise disagreement(f"the ranks of {group.axis!r} disagree about their next collective",
                           calls, label.where)
    return [got[r].shape if r in got else mine.shape for r in group.ranks]
