"""Memory while a kernel is interpreted: tensors, buffers, and places (boxes) in them.

Every memory is a flat array; an address is an index into it. Shared memory holds one copy per group
of the batch, register memory one per lane.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics import NumericType, decode, encode
from tessera.tile.ir.numpy_values import convert, poison
from tessera.tile.ir.types import Buffer


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(prod(shape[i + 1:]) for i in range(len(shape)))


class Changes:
    """How many writes of a launch changed an element."""

    def __init__(self) -> None:
        self.count = 0


class Memory:
    """name, shape and numeric type; `flat` holds the elements. changes: where they are counted."""

    space = "global"
    stages = 1
    changes: Changes | None = None
    alias: Any = None  # an aliasing.Alias, where other arguments lie in the same memory

    def __init__(self, name: str, shape: tuple[int, ...], numeric: NumericType, flat: np.ndarray):
        self.name, self.shape, self.numeric, self.flat = name, shape, numeric, flat
        self.strides = strides_of(shape)
        self.written = False
        self.shadow: Any = None

    def read(self, address: np.ndarray) -> np.ndarray:
        return decode(self.flat[address], self.numeric.dtype)

    def write(self, address: np.ndarray, values: np.ndarray, key: Any = None) -> None:
        """Stores values (already of the held type) rounded as the policy says."""
        self.written = True
        policy, dtype = self.numeric.policy, self.numeric.dtype
        if values.dtype == self.flat.dtype and not dtype.packed:
            self.put(address, values)
            return
        stochastic = policy.rounding == "stochastic"
        self.put(address, encode(
            values, dtype, rounding=policy.rounding, saturate=policy.saturate,
            key=key if stochastic else None, index=address if stochastic else None))

    def put(self, address: np.ndarray, codes: np.ndarray) -> None:
        """Stores codes, and notes whether that changed any."""
        if self.changes is None:
            self.flat[address] = codes
            return
        before = self.flat[address].tobytes()
        self.flat[address] = codes
        self.changes.count += self.flat[address].tobytes() != before

    def base(self, groups: np.ndarray, lanes: int) -> np.ndarray | int:
        return 0

    @property
    def size(self) -> int:
        return prod(self.shape)


class Local(Memory):
    """A shared or register buffer: one copy per group or per lane of the batch."""

    def __init__(self, name: str, type: Buffer, groups: int, lanes: int):
        self.space, self.stages, self.type = type.space, type.stages, type
        self.copies = groups * (lanes if type.space == "register" else 1)
        size = prod(type.shape)
        flat = poison((self.copies * type.stages * size,), type.dtype)
        super().__init__(name, type.shape, type.numeric, flat)

    def read(self, address: np.ndarray) -> np.ndarray:
        return self.flat[address]

    def write(self, address: np.ndarray, values: np.ndarray, key: Any = None) -> None:
        self.written = True
        self.put(address, convert(values, self.numeric.dtype))

    def base(self, groups: np.ndarray, lanes: int) -> np.ndarray:
        """Address of this group's (or lane's) copy: [G, 1] or [G, L]."""
        copy = np.arange(len(groups), dtype=np.int64)[:, None]
        if self.space == "register":
            copy = copy * lanes + np.arange(lanes, dtype=np.int64)[None, :]
        return copy * (self.stages * self.size)


@dataclass(frozen=True)
class MemoryBox:
    """A box of a memory: per axis of the memory an offset ([1|G, 1|L] or int) and an extent.

    kept: the axes that the view shows, in its order; the others are single indices.  peer: (its
    number [G, 1 or L], how many) of the group of each cluster whose copy it is; None: one's own.
    """

    memory: Memory
    offsets: tuple[Any, ...]
    box: tuple[int, ...]
    kept: tuple[int, ...]
    stage: Any = 0
    peer: tuple[np.ndarray, int] | None = None

    @staticmethod
    def whole(memory: Memory, stage: Any = 0) -> MemoryBox:
        rank = len(memory.shape)
        return MemoryBox(memory, (0,) * rank, memory.shape, tuple(range(rank)), stage)

    @property
    def transposed(self) -> MemoryBox:
        return replace(self, kept=self.kept[::-1])

    def base(self, groups: np.ndarray, lanes: int) -> np.ndarray | int:
        """Address of the first element of this group's copy and stage."""
        base = self.memory.base(groups, lanes)
        if self.peer is not None:
            rank, many = self.peer
            own = np.arange(len(groups))[:, None]
            base = np.asarray(base)[own - own % many + rank, 0]  # [G, 1 or L]
        if self.memory.stages > 1:
            base = base + np.asarray(self.stage, np.int64) * self.memory.size
        return base

    def sent(self, active: np.ndarray) -> np.ndarray:
        """How many elements each group gets where lanes write to another's. active: [G, L|1]"""
        assert self.peer is not None
        rank, many = self.peer
        own, made = np.arange(len(active))[:, None], np.zeros(len(active), np.int64)
        np.add.at(made, np.broadcast_to(own - own % many + rank, active.shape)[active], 1)
        return made

    def addresses(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([G, *box] addresses clipped into the memory, [G, *box] whether inside)."""
        count, rank = len(groups), len(self.kept)
        address = np.zeros((1,) * (rank + 1), np.int64)
        inside = np.ones((1,) * (rank + 1), bool)
        for axis, (offset, extent) in enumerate(zip(self.offsets, self.box, strict=True)):
            index = np.asarray(offset, np.int64).reshape(-1, 1)  # [1|G, 1]
            if axis in self.kept:
                index = index + np.arange(extent, dtype=np.int64)
            size = self.memory.shape[axis]
            shape = [index.shape[0]] + [1] * rank
            if axis in self.kept:
                shape[1 + self.kept.index(axis)] = extent
            inside = inside & ((index >= 0) & (index < size)).reshape(shape)
            address = address + (np.clip(index, 0, max(size - 1, 0))
                                 * self.memory.strides[axis]).reshape(shape)
        base = self.base(groups, 1)
        address = address + np.asarray(base, np.int64).reshape((-1,) + (1,) * rank)
        shape_out = (count, *(self.box[a] for a in self.kept))
        return np.broadcast_to(address, shape_out), np.broadcast_to(inside, shape_out)
