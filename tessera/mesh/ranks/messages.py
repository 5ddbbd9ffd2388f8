"""Plain data between ranks: settings, names of files, what went wrong. JSON, never code.

For a few small values; tensors go through collectives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tessera.errors import TesseraError, user_line

from ..world import patience, transport
from .transport import Transport

_LENGTH, _TEXT = "the length of a message", "a message"


def gather(message: Any, here: Transport | None = None) -> list[Any]:
    """Every rank's message, by rank, on rank 0; an empty list on others."""
    here = here or transport()
    _note(here, "gather")
    if here.rank:
        data = _encoded(message)
        here.send(0, _length(data), _LENGTH)
        here.send(0, data, _TEXT)
        return []
    return [message, *(_received(here, rank) for rank in range(1, here.size))]


def share(message: Any, here: Transport | None = None) -> Any:
    """Rank 0's message, on all ranks: `out = ts.dist.share(out)`. What JSON can hold."""
    here = here or transport()
    _note(here, "share")
    if here.rank:
        return _received(here, 0)
    if here.size > 1:
        data = _encoded(message)
        here.exchange({r: _length(data) for r in range(1, here.size)}, {}, _LENGTH)
        here.exchange({r: data for r in range(1, here.size)}, {}, _TEXT)
    return message


def first_error(mine: Any, here: Transport | None = None) -> tuple[int, Any] | None:
    """(rank, what it says) of the first rank that has an error, told to all; None when no rank
    has."""
    here = here or transport()
    if here.size == 1:
        return None if mine is None else (0, mine)
    told = gather(mine, here)
    found = share(next(([r, e] for r, e in enumerate(told) if e is not None), None), here)
    return None if found is None else (found[0], found[1])


@contextmanager
def raised_on_all(kind: type[TesseraError]) -> Iterator[None]:
    """A block that all ranks enter, without communication in it. When it raises a TesseraError on
    one of them, the others raise a `kind` at its end that says so: nobody goes on alone."""
    error: TesseraError | None = None
    try:
        yield
    except TesseraError as err:
        error = err
    with patience(first=True):  # a disk takes longer than ranks that compute
        found = first_error(None if error is None else [error.message, error.hint])
    if error is not None:
        raise error
    if found is not None:
        rank, (message, hint) = found
        raise kind(f"on rank {rank}: {message}", hint=hint)


def _note(here: Transport, name: str) -> None:
    if here.size > 1:
        here.note(f"{name}() at {user_line()}")


def _encoded(message: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(message).encode(), np.uint8)


def _length(data: np.ndarray) -> np.ndarray:
    return np.array([data.size], np.int64).view(np.uint8)


def _received(here: Transport, source: int) -> Any:
    size = np.zeros(8, np.uint8)
    here.receive(source, size, _LENGTH)
    text = np.zeros(int(size.view(np.int64)[0]), np.uint8)
    here.receive(source, text, _TEXT)
    return json.loads(text.tobytes())


__all__ = ["first_error", "gather", "raised_on_all", "share"]
