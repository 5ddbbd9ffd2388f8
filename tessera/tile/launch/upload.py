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
    if not array.flags.c_contiguous and not any(
            s for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        _repeat(memory, array)
    else:
        _load(memory, array, 0)


def _load(memory: DeviceBuffer, array: np.ndarray, at: int) -> None:
    """Elements to `at` on: from where they are, or as many rows at a time as a chunk takes."""
    if array.flags.c_contiguous:
        memory.load(array, at)
        return
    row_bytes = array[0].nbytes
    if row_bytes > CHUNK_BYTES:
        for i, row in enumerate(array):
            _load(memory, row, at + i * row_bytes)
        return
    rows, chunk = CHUNK_BYTES // row_bytes, _take(CHUNK_BYTES)
    for first in range(0, len(array), rows):
        part = array[first:first + rows]
        there = chunk[:part.nbytes].view(array.dtype).reshape(part.shape)
        there[...] = part
        memory.load(there, at + first * row_bytes)
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
    """Part of a chunk."""
    return (_kept.pop() if _kept else np.empty(CHUNK_BYTES, np.uint8))[:nbytes]


def _keep(chunk: np.ndarray) -> None:
    assert chunk.base is not None
    _kept.append(chunk.base)


__all__ = ["upload"]
