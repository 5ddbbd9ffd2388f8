"""Which arrays lie in one allocation, who keeps what lies there when it is written over, and who
is to be told that it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import late_checks

_kept: dict[int, list[weakref.ref[Any]]] = {}  # by memory: the tensors that keep it
_watched: set[int] = set()  # memory of which it is asked whether something was written there
_written: set[int] = set()  # where it was. A number may be another allocation's by now


def memory_id(array: np.ndarray) -> int:
    """What tells one allocation from another: the object at the end of an array's bases."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return id(array if array.base is None else array.base)


def keep(holder: Any) -> None:
    """From here on `holder._buffer` is copied before something is written where it lies. Lasts as
    long as the holder."""
    memory = memory_id(holder._buffer)
    found = _kept.setdefault(memory, [])
    found.append(weakref.ref(holder, lambda gone: _forget(memory, gone)))


def _forget(memory: int, gone: weakref.ref[Any]) -> None:
    left = [ref for ref in _kept.get(memory, ()) if ref is not gone]
    if left:
        _kept[memory] = left
    else:
        _kept.pop(memory, None)


def before_write(array: np.ndarray) -> None:
    """To be called before something is written where an array lies."""
    if late_checks.pending():
        late_checks.before_write(memory_id(array))
    if _watched and (memory := memory_id(array)) in _watched:
        _watched.discard(memory)
        _written.add(memory)
    for ref in _kept.pop(memory_id(array), ()) if _kept else ():
        holder = ref()
        if holder is not None:
            holder._buffer = holder._buffer.copy()


def watch(array: np.ndarray) -> None:
    """From here on `take_written` tells whether something was written where an array lies. Who
    writes through an array of NumPy's is not seen."""
    _watched.add(memory_id(array))


def take_written(arrays: Iterable[np.ndarray]) -> bool:
    """Whether something was written where one of them lies, since that was watched or asked."""
    if not _written:
        return False
    found = _written.intersection(map(memory_id, arrays))
    _written.difference_update(found)
    return bool(found)


def kept_count() -> int:
    """How many allocations somebody keeps."""
    return len(_kept)


__all__ = ["before_write", "keep", "kept_count", "memory_id", "take_written", "watch"]
