"""Plain data between ranks: settings, names of files, what went wrong. JSON, never code.

For a few small values; tensors go through collectives. All ranks of the program call these, in the
same order and from the same lines.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from tessera.errors import ArgumentError, TesseraError

from ..world import patience, transport
from .envelope import MessageLabel, here_in
from .transport import Transport

# The public call whose messages these are, as its user knows it; inside it nobody asked for a
# `gather`.
_call: ContextVar[str | None] = ContextVar("call that exchanges messages", default=None)
F = TypeVar("F", bound=Callable[..., Any])


def together(name: str) -> Callable[[F], F]:
    """For a function that all ranks call: they find out at once when one of them does not, or not
    yet, and errors say `name`."""
    def decorate(function: F) -> F:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if _call.get() is not None:
                return function(*args, **kwargs)
            token = _call.set(name)
            try:
                first_error(None)  # within the usual time: what follows may take longer
                return function(*args, **kwargs)
            finally:
                _call.reset(token)

        return called  # type: ignore[return-value]

    return decorate


def gather(message: Any, here: Transport | None = None) -> list[Any]:
    """Every rank's message, by rank, on rank 0; an empty list on others. All ranks call it."""
    here = here or transport()
    if here.size == 1:
        return [message]
    label = _label("gather")
    if here.rank:
        here.send(0, _encoded(message), label)
        return []
    return [message, *(_decoded(here.take(rank, label)) for rank in range(1, here.size))]


def share(message: Any, here: Transport | None = None) -> Any:
    """Rank 0's message, on all ranks: `out = ts.dist.share(out)`. What JSON can hold; tuples come
    as lists, on rank 0 and in a program that runs alone, too.

    It communicates: all ranks call it, from one line. What the others pass is not looked at.
    Raises ArgumentError for a message that JSON cannot hold, DisagreementError when a rank does
    something else instead, StalledError when it does not come in time, or has ended.
    """
    here = here or transport()
    label = _label("share")
    if here.rank:
        return _decoded(here.take(0, label))
    data = _encoded(message)
    if here.size > 1:
        here.exchange({r: data for r in range(1, here.size)}, {}, label)
    return _decoded(data)


def first_error(mine: Any, here: Transport | None = None) -> tuple[int, Any] | None:
    """(rank, what it says) of the first rank that has an error, told to all; None when no rank
    has. All ranks call it."""
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


def _label(name: str) -> MessageLabel:
    return here_in(f"{_call.get() or name}()", name)


def _encoded(message: Any) -> np.ndarray:
    try:
        _need_text_keys(message)
        return np.frombuffer(json.dumps(message).encode(), np.uint8)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"a message between ranks is what JSON can hold: {error}",
                            hint="text, numbers, booleans, None, lists of them, and dicts by text; "
                            "arrays go by ts.dist.broadcast") from error


def _need_text_keys(message: Any) -> None:
    """Raise TypeError for a dict with other keys, which JSON would make text of."""
    if isinstance(message, dict):
        for key, inner in message.items():
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r}, which is no text")
            _need_text_keys(inner)
    elif isinstance(message, list | tuple):
        for inner in message:
            _need_text_keys(inner)


def _decoded(data: np.ndarray) -> Any:
    return json.loads(data.tobytes())


__all__ = ["first_error", "gather", "raised_on_all", "share", "together"]
