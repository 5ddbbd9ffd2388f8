"""What captured tensors held when they were copied to a GPU: whether they were written since."""

from __future__ import annotations

import sys
import weakref

import numpy as np

from ..runtime.host_memory import keep
from ..tensor import Tensor


class HostCopy:
    """What a captured tensor held on the host when it was copied to the GPU.

    All programs that captured it have the same one, so that none is taken for somebody else who may
    write into the array.
    """

    __slots__ = ("__weakref__", "_buffer")

    def __init__(self, x: Tensor):
        self._buffer = x._buffer
        keep(self)  # what is written into x from here on gives this one a copy of its own

    @classmethod
    def of(cls, x: Tensor) -> HostCopy:
        found = _copies.get(id(x._buffer))
        if found is None or found._buffer is not x._buffer:
            found = _copies[id(x._buffer)] = cls(x)
        return found

    def may_differ(self, x: Tensor) -> bool:
        """Whether x was written since, or may be: somebody else has its memory as an array."""
        return self._buffer is not x._buffer or _shared(self._buffer)


_copies: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()  # by array


def _shared(array: np.ndarray) -> bool:
    """Whether anybody has an array beside a tensor and its HostCopy, or what it is a view of."""
    known = 4  # the tensor, the copy, the parameter here, that of getrefcount
    while isinstance(array, np.ndarray):
        if sys.getrefcount(array) > known:
            return True
        array, known = array.base, 3  # type: ignore[assignment]  # the view, `array`, getrefcount
    return array is not None


__all__ = ["HostCopy"]
