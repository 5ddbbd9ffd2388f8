"""Which arrays lie in one allocation, and who keeps what lies there when it is written over."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from . import late_checks

_kept: dict[int, list[weakref.ref[Any]]] = {}  # by memory: the tensors that keep it


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
    for ref in _kept.pop(memory_id(array), ()) if _kept else ():
        holder = ref()
        if holder is not None:
            holder._buffer = holder._buffer.copy()


def kept_count() -> int:
    """How many allocations somebody keeps."""
    return len(_kept)


__all__ = ["before_write", "keep", "kept_count", "memory_id"]
