"""What the collectives of this rank have sent: `with ts.dist.traffic() as sent: ...`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Sent:
    """One collective that ran on this rank: the types on the way, and the bytes it sent."""

    op: str
    axis: str
    types: tuple[str, ...]
    sent_bytes: int
    where: SourceLine | None


_traffic: ContextVar[list[Sent] | None] = ContextVar("traffic", default=None)


@contextmanager
def traffic() -> Iterator[list[Sent]]:
    """A list that gets a record of every collective that this rank runs in the block.

    Each says the op, the mesh axis, the types on the way, the bytes sent and the line.
    """
    found: list[Sent] = []
    token = _traffic.set(found)
    try:
        yield found
    finally:
        _traffic.reset(token)


def recorded() -> bool:
    """Whether there is such a list."""
    return _traffic.get() is not None


def record_sent(sent: Sent) -> None:
    """Into the list of `traffic`, where there is one."""
    log = _traffic.get()
    if log is not None:
        log.append(sent)


__all__ = ["Sent", "record_sent", "recorded", "traffic"]
