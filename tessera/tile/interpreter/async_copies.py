"""Asynchronous copies of a batch of groups, completed as late as is legal.

cp_async only notes a copy. It happens at the wait (or barrier) that a correct program needs: a read
before that meets memory that is not there yet, and the source is read at that late time too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.interpreter.sanitizer import GROUP, MANY

if TYPE_CHECKING:
    from tessera.tile.interpreter.machine import Machine

_UNCOMMITTED = np.iinfo(np.int32).max


@dataclass
class Copy:
    """waiting: [G] groups for which it has not arrived; number: [G] commit group it belongs to.

    wanted: [G] groups that read the source; the others get zeros. None: all.
    """

    target: MemoryBox
    source: MemoryBox
    waiting: np.ndarray
    number: np.ndarray
    where: SourceLine | None
    wanted: np.ndarray | None = None


class Copies:
    def __init__(self, machine: Machine):
        self.machine = machine
        self.pending: list[Copy] = []
        self.committed = np.zeros(machine.count, np.int32)  # commit groups so far

    def issue(self, target: MemoryBox, source: MemoryBox, where: SourceLine | None,
              wanted: np.ndarray | None = None) -> None:
        m = self.machine
        on = m.active_groups()
        number = np.full(m.count, _UNCOMMITTED, np.int32)
        address, _ = target.addresses(m.groups)
        access = m.tile_access(target, address, wide(on, address), MANY, where)
        if wanted is not None:
            wanted = np.broadcast_to(np.asarray(wanted).reshape(-1), on.shape)
        copy = Copy(target, source, on.copy(), number, where, wanted)
        if access is not None and m.sanitizer is not None:
            read = m.tile_access(source, *self._read(copy, on), GROUP, where)
            assert read is not None
            m.sanitizer.in_flight(access, read)
        self.pending.append(copy)

    def _read(self, copy: Copy, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The addresses of a copy's source, and which of them these groups read."""
        source, inside = copy.source.addresses(self.machine.groups)
        if copy.wanted is not None:
            inside = inside & wide(copy.wanted, inside)
        return source, inside & wide(rows, inside)

    def commit(self, on: np.ndarray) -> None:
        """What these groups issued since the last commit is one commit group."""
        for copy in self.pending:
            mine = on & copy.waiting & (copy.number == _UNCOMMITTED)
            copy.number[mine] = self.committed[mine]
        self.committed[on] += 1

    def wait(self, on: np.ndarray, left: int) -> None:
        """At most the `left` latest commit groups stay under way; commits what is not committed."""
        loose = np.zeros(len(on), bool)
        for copy in self.pending:
            loose |= copy.waiting & (copy.number == _UNCOMMITTED)
        self.commit(on & loose)
        for copy in self.pending:
            self._land(copy, on & copy.waiting & (copy.number < self.committed - left))
        self._forget()

    def finish_uncommitted(self, on: np.ndarray) -> None:
        """A barrier completes the copies that no commit group holds."""
        for copy in self.pending:
            self._land(copy, on & copy.waiting & (copy.number == _UNCOMMITTED))
        self._forget()

    def _forget(self) -> None:
        self.pending = [c for c in self.pending if c.waiting.any()]

    def _land(self, copy: Copy, rows: np.ndarray) -> None:
        if not rows.any():
            return
        m = self.machine
        copy.waiting &= ~rows
        source, inside = copy.source.addresses(m.groups)
        if copy.wanted is not None:
            inside = inside & wide(copy.wanted, inside)
        live = inside & wide(rows, inside)
        if m.sanitizer is not None:
            access = m.tile_access(copy.source, source, live, GROUP, copy.where)
            assert access is not None
            m.sanitizer.has_read(access)
        if not inside.any():  # an empty tensor has nothing to read
            source = np.zeros_like(source[:0])
        values = copy.source.memory.read(source)
        values = np.where(inside, values, values.dtype.type(0)) if inside.any() else np.zeros(
            inside.shape, values.dtype)
        target, _ = copy.target.addresses(m.groups)
        on = wide(rows, target)
        copy.target.memory.write(target[on], values[on])
        access = m.tile_access(copy.target, target, on, MANY, copy.where)
        if access is not None and m.sanitizer is not None:
            m.sanitizer.landed(access)


def wide(on: np.ndarray, like: np.ndarray) -> np.ndarray:
    """[G] as a mask of the shape [G, ...] of `like`."""
    return np.broadcast_to(on.reshape((-1,) + (1,) * (like.ndim - 1)), like.shape)
