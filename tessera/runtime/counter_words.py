"""Words of device memory with which kernels count: they are zero whenever no kernel counts.

Whoever counts last sets its word back (intrinsics/warp_specialised.py, `next_tile`), so nothing is
cleared in front of a launch: in a CUDA graph that would be a node for each one.
"""

from __future__ import annotations

import functools

import numpy as np

from .buffer import DeviceBuffer
from .device import Device, device

APART_BYTES = 128  # a line of the second-level cache each
TOGETHER = 256  # words that are allocated at a time


class CounterWords:
    """The words of a device. They stay for the life of the process: recorded launches name them."""

    def __init__(self, on: Device):
        self.device = on
        self._free: list[int] = []
        self._blocks: list[DeviceBuffer] = []

    def new(self) -> int:
        """The address of a word that nobody has."""
        while True:
            try:
                return self._free.pop()  # one step, whichever threads ask
            except IndexError:
                self._allocate()

    def _allocate(self) -> None:
        block = DeviceBuffer(APART_BYTES * TOGETHER, self.device)
        block.write(np.zeros(block.nbytes, np.uint8))
        self._blocks.append(block)
        self._free += range(block.pointer, block.pointer + block.nbytes, APART_BYTES)


@functools.cache
def counter_words(index: int) -> CounterWords:
    return CounterWords(device(index))


__all__ = ["counter_words"]
