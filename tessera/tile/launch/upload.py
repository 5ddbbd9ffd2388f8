"""Arrays of the host to a GPU, without a copy of them on the host.

Memory that a process takes anew costs it a page fault for each 4 KiB, 4 to 18 us on a virtual
machine (2 cores of AMD EPYC, 2026-11-27): more than the copy to the GPU. So what does not lie in
order goes through a few MiB that are kept, and one value in all places is written there.
"""

from __future__ import annotations

import numpy as np

from ...runtime.buffer import DeviceBuffer

CHUNK_BYTES = 4 << 20
_kept: list[np.ndarray] = []  # chunks that no thread uses now


def upload(memory: DeviceBuffer, array: np.ndarray) -> None:
    """Fill memory with an array's elements in C order, behind what was launched before; the array
    may be changed when this returns."""
    if array.flags.c_contiguous:
        memory.load(array)
    elif not any(s for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        _repeat(memory, array)
    else:
        rows = max(1, CHUNK_BYTES // max(array[0].nbytes, 1))
        chunk = _take(rows * array[0].nbytes)
        for first in range(0, len(array), rows):
            part = array[first:first + rows]
            there = chunk[:part.nbytes].view(array.dtype).reshape(part.shape)
            there[...] = part
            memory.load(there, first * array[0].nbytes)
        _keep(chunk)


def _repeat(memory: DeviceBuffer, array: np.ndarray) -> None:
    """One value in all places."""
    value = array.flat[:1]
    first, *others = value.tobytes()
    if all(b == first for b in others):
        return memory.fill(first, 0, array.nbytes)
    chunk = _take(min(array.nbytes, CHUNK_BYTES))
    chunk.view(array.dtype)[:] = value
    for at in range(0, array.nbytes, chunk.nbytes):
        memory.load(chunk[:array.nbytes - at], at)
    _keep(chunk)
    return None


def _take(nbytes: int) -> np.ndarray:
    if nbytes > CHUNK_BYTES or not _kept:
        return np.empty(max(nbytes, CHUNK_BYTES), np.uint8)[:nbytes]
    return _kept.pop()[:nbytes]


def _keep(chunk: np.ndarray) -> None:
    if chunk.base is not None and chunk.base.nbytes == CHUNK_BYTES:
        _kept.append(chunk.base)


__all__ = ["upload"]
