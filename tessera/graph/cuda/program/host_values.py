"""What the host gives a program on a GPU at its calls: arguments there, and draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....numerics.packed_order import from_rows
from ....numerics.random_state import next_step, seed_and_step
from ....runtime.buffer import DeviceBuffer as Memory
from ....runtime.device import Device
from ....runtime.offloaded import HostBlock, OffloadedBuffer
from ....tensor import Tensor
from ....tile.launch.repeated_call import ALIGNMENT_BYTES
from ....tile.launch.resident import Resident
from ...schedule.ir import PlannedBuffer
from .host_keys import Draws

MOST_STEPS, MOST_BYTES = 512, 1 << 16  # of rows that are computed at a time


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


class HostDraws:
    """What the host computes at each call, for many steps of the random state at a time.

    names: of the values. places: of each in a row that has those of a step, begin and end in bytes.
    A program whose launches are told where buffers lie reads its row among those of other steps,
    and most calls copy nothing; any other has a row of its own, `memory`, which is copied at each.
    """

    def __init__(self, draws: Draws, names: Sequence[str], buffers: Sequence[PlannedBuffer],
                 on: Device):
        self.draws, self.names = draws, tuple(names)
        self.places: dict[str, tuple[int, int]] = {}
        end = 0
        for b in buffers:
            self.places[b.name] = end, end + b.nbytes
            end += -(-b.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.bytes, self.memory = end, Memory(end, on)
        self.own = [self.at(name) for name in self.places]
        self.most = max(1, min(MOST_STEPS, MOST_BYTES // max(end, 1)))
        self.seed, self.first, self.row = -1, 0, 0
        self.rows = np.zeros((0, end), np.uint8)  # of the steps from `first` on, of this seed
        self.values: list[np.ndarray] = []  # the same by name
        self.there: Memory | None = None  # where rows lie
        self.sent = False  # whether these rows are there

    def at(self, name: str) -> int:
        """Where a value lies in the row of its own."""
        return self.memory.pointer + self.places[name][0]

    def step(self) -> None:
        """Takes the step of a call, where the program takes one."""
        if self.draws.random:
            seed, step = next_step()
        elif self.draws.steps:
            seed, step = seed_and_step()
        if not self.draws.steps:  # the same in all
            seed, step = self.seed, self.first
        self.row = step - self.first
        if seed != self.seed or not 0 <= self.row < len(self.rows):
            self._compute(seed, step)

    def _compute(self, seed: int, step: int) -> None:
        """Rows of steps from this one on: of one at first, since many programs are called once."""
        count = self.most if self.draws.steps and len(self.rows) else 1
        self.seed, self.first, self.row, self.sent = seed, step, 0, False
        self.values = self.draws.ahead(count)
        self.rows = np.zeros((count, self.bytes), np.uint8)
        for name, a in zip(self.names, self.values, strict=True):
            if name in self.places:
                begin, end = self.places[name]
                self.rows[:, begin:end] = a.reshape(count, -1).view(np.uint8)

    def value(self, name: str) -> np.ndarray:
        """A value of the call under way."""
        made: np.ndarray = self.values[self.names.index(name)][self.row]
        return made

    def copied(self) -> list[int]:
        """Where the values of the call under way lie, when they are in the row of their own."""
        if self.places:
            self.memory.load(self.rows[self.row])
        return self.own

    def placed(self) -> list[int]:
        """Where they lie among the rows of other steps."""
        if not self.sent:
            if self.there is None:
                self.there = Memory(self.most * self.bytes, self.memory.device)
            with self.memory.device.current():
                self.there.load(self.rows)
            self.sent = True
        row = self.there.pointer + self.row * self.bytes  # type: ignore[union-attr]
        return [row + begin for begin, _ in self.places.values()]


__all__ = ["HostDraws", "block_of"]
