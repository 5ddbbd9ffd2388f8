"""What the host gives a program on a GPU at its calls: arguments there, and draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...numerics.packed_order import from_rows
from ...runtime.buffer import DeviceBuffer as Memory
from ...runtime.device import Device
from ...runtime.offloaded import HostBlock, OffloadedBuffer
from ...tensor import Tensor
from ...tile.launch.resident import Resident
from ..schedule.ir import PlannedBuffer, aligned


def block_of(x: Tensor | np.ndarray, on: Device) -> HostBlock:
    """Where an argument lies on the host, else a copy of it there."""
    if isinstance(x, Resident) and isinstance(x.storage, OffloadedBuffer) and x.offloaded and (
            x.storage.device is on):
        return x.storage.block
    array = from_rows(x.buffer, x.type, x.shape) if isinstance(x, Tensor) else x
    array = np.ascontiguousarray(array)
    block = HostBlock(array.nbytes, on)
    if block.last is not None:
        block.last.wait()
    block.memory.array(array.shape, array.dtype)[...] = array
    return block


class Drawn:
    """What the host computes at each call, small values side by side: one copy takes them all."""

    def __init__(self, buffers: Sequence[PlannedBuffer], on: Device):
        self.places: dict[str, tuple[int, int]] = {}  # begin and end in bytes
        end = 0
        for b in buffers:
            self.places[b.name] = end, end + b.nbytes
            end += aligned(b)
        self.bytes, self.memory = np.zeros(end, np.uint8), Memory(end, on)

    def at(self, name: str) -> int:
        return self.memory.pointer + self.places[name][0]

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        if not self.places:
            return
        for name, (begin, end) in self.places.items():
            self.bytes[begin:end] = arrays[name].reshape(-1).view(np.uint8)
        self.memory.load(self.bytes)


__all__ = ["Drawn", "block_of"]
