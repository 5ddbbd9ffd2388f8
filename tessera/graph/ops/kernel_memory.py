"""Memory while a kernel is told in ops of the graph, see kernel_meaning.py."""

from __future__ import annotations

import numpy as np

from ...numerics import as_type
from ...tensor import Tensor
from ...tile.interpreter.memory import Memory, MemoryBox
from ...tile.ir.types import Buffer
from .. import functions as F


class TensorMemory(Memory):
    """A tensor of the graph, as the kernel's ops find it now."""

    def __init__(self, name: str, value: Tensor):
        super().__init__(name, tuple(value.shape), value.type, np.empty(0))
        self.value = value


def held_in(place: MemoryBox) -> TensorMemory:
    """The tensor that a box is of."""
    assert isinstance(place.memory, TensorMemory)
    return place.memory


class GroupMemory(TensorMemory):
    """Memory of each group, or of each lane: a tensor [*grid, lanes|1, stages, *shape]."""

    def __init__(self, name: str, type: Buffer, grid: tuple[int, ...], lanes: int):
        self.grid, self.type = grid, type
        self.copies = lanes if type.space == "register" else 1
        whole = (*grid, self.copies, type.stages, *type.shape)
        super().__init__(name, F.zeros(whole, as_type(type.dtype)))
        self.shape, self.space, self.stages = type.shape, type.space, type.stages
        self.all = TensorMemory(name, self.value)  # with the axes in front as axes of its own


__all__ = ["TensorMemory", "GroupMemory", "held_in"]
