"""The ledger: before data moves, ranks compare what they are about to do.

Every member of a group sends every other a record of fixed size: a hash of op, type, attributes,
ranks, source line and the extents that must agree; the shape; and the call as text. So ranks that
disagree find out before any byte of data is misread, and each can name the others' lines. The
shapes are also how uneven parts are received.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tessera.dims import show_shape
from tessera.errors import ShapeError, SourceLine, user_line
from tessera.graph.trace import current_line
from tessera.numerics import NumericType

from ..errors import DisagreementError
from .group import Group, Shape

_TEXT, _DIMS = 488, 32
RECORD = np.dtype([("digest", "u1", 16), ("ndim", "<i8"), ("shape", "<i8", _DIMS),
                   ("length", "<i8"), ("text", "u1", _TEXT)])


@dataclass(frozen=True)
class Call:
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
        # The name without its folder, which may be another on another node.
        where = (os.path.basename(self.where.file), self.where.line) if self.where else None
        return repr((self.op, _name(self.type), self.attrs, self.extents, group.ranks, where,
                     shape))


@functools.lru_cache(maxsize=1024)
def _name(type: NumericType | None) -> str:
    return str(type)


def call(group: Group, op: str, shape: Shape, type: NumericType | None,
         attrs: Mapping[str, object], extents: Mapping[str, object] | None = None) -> Call:
    """The record of a call from the user's line, that of the node in a graph which runs. Raises
    ShapeError for over 32 dimensions."""
    if len(shape) > _DIMS:
        raise ShapeError(f"{op} takes up to {_DIMS} dimensions, got {show_shape(shape)}")
    return Call(op, shape, type, tuple(attrs.items()), group.axis, current_line() or user_line(),
                tuple((extents or {}).items()))


def agree(group: Group, mine: Call, varies: Iterable[int] = ()) -> list[Shape]:
    """Every member's shape, once all members make the same call; else DisagreementError, on every
    one of them. varies: the dimensions whose extents may differ between ranks."""
    if group.size == 1:
        return [mine.shape]
    record = np.zeros((), RECORD)
    digest = hashlib.blake2b(mine.key(group, varies).encode(), digest_size=16).digest()
    what = f"{mine} at {mine.where}"
    text = what.encode()[:_TEXT]
    record["digest"] = np.frombuffer(digest, np.uint8)
    record["ndim"], record["length"] = len(mine.shape), len(text)
    record["shape"][:len(mine.shape)] = mine.shape
    record["text"][:len(text)] = np.frombuffer(text, np.uint8)
    data = record.reshape(1).view(np.uint8)
    group.transport.note(what)
    got = group.swap_bytes([data] * group.size, [data.size] * group.size, what)
    raw = data.tobytes()
    if all(d.tobytes() == raw for d in got):  # as nearly always
        return [mine.shape] * group.size
    records = [d.view(RECORD)[0] for d in got]
    if any((r["digest"] != record["digest"]).any() for r in records):
        raise _disagreement(group, records)
    return [tuple(int(n) for n in r["shape"][:r["ndim"]]) for r in records]


def _disagreement(group: Group, records: list) -> DisagreementError:
    calls: dict[tuple[bytes, str], list[int]] = {}
    for rank, record in zip(group.ranks, records, strict=True):
        text = record["text"][:record["length"]].tobytes().decode(errors="replace")
        calls.setdefault((record["digest"].tobytes(), text), []).append(rank)
    lines = [f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
             for (_, text), ranks in calls.items()]
    return DisagreementError(
        f"the ranks of {group.axis!r} disagree about their next collective:\n" + "\n".join(lines),
        hint="all ranks of an axis must make the same calls in the same order, on operands of one "
        "type and shape, from one line; look for a branch that depends on the rank")
