"""Global memory with the arrays that lie in it, and the shared memory of a block."""

from __future__ import annotations

import numpy as np

NOBODY, MANY = -1, -2
BASE = 4096  # address of the first array: 0 is none
POISON = 0xC7


class GlobalMemory:
    """Bytes by address; `valid`: those of an array. Arrays lie 256 bytes apart at least, or where
    another of the same memory lies."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.pointers, at = arrays, {}, BASE
        same: dict[int, int] = {}
        for name, array in arrays.items():
            self.pointers[name] = same.setdefault(array.__array_interface__["data"][0], at)
            if self.pointers[name] == at:
                at += -(-array.nbytes // 256) * 256 + 256
        self.bytes, self.valid = np.full(at, POISON, np.uint8), np.zeros(at, bool)
        self._writer = np.zeros(at, np.int64)
        self.reader, self.writer = np.full(at, NOBODY), np.full(at, NOBODY)  # as SharedMemory
        for name, array in arrays.items():
            part = self._part(name)
            self.bytes[part], self.valid[part] = array.reshape(-1).view(np.uint8), True

    def _part(self, name: str) -> slice:
        return slice(self.pointers[name], self.pointers[name] + self.arrays[name].nbytes)

    def read(self, at: np.ndarray, whole_words: bool = False) -> np.ndarray:
        """at: [n, bytes] addresses. whole_words: such an access may reach beyond its array."""
        aligned(at)
        inside = self.valid[at].any(1) if whole_words else self.valid[at]
        assert inside.all(), "read outside of the arrays"
        return self.bytes[at]

    def write(self, at: np.ndarray, raw: np.ndarray) -> None:
        aligned(at)
        assert self.valid[at].all(), "write outside of the arrays"
        access = np.arange(at.size).reshape(at.shape)
        self._writer[at] = access
        assert (self._writer[at] == access).all(), "two threads write the same byte"
        self.bytes[at] = raw

    def barrier(self) -> None:
        """Of a block, or a block begins."""
        self.reader[:], self.writer[:] = NOBODY, NOBODY

    def order(self, at: np.ndarray, who: np.ndarray, write: bool) -> None:
        """Checks that a barrier of the block stands between accesses of different threads."""
        who = np.broadcast_to(who[:, None], at.shape)
        for table, what in ((self.writer, "wrote"), (self.reader, "read"))[:1 + write]:
            other = table[at]
            assert ((other == NOBODY) | (other == who)).all(), \
                f"global memory that another thread {what}: there is no barrier between them"
        table = self.writer if write else self.reader
        before = table[at]
        table[at] = who
        table[at[(before != NOBODY) & (before != who) | (table[at] != who)]] = MANY

    def copy_back(self) -> None:
        """What kernels left, into the arrays."""
        for name, array in self.arrays.items():
            array.reshape(-1).view(np.uint8)[:] = self.bytes[self._part(name)]


class SharedMemory:
    """Bytes, and for each who read and who wrote it since the last barrier."""

    def __init__(self, size: int):
        self.bytes = np.full(size, 0xFF, np.uint8)  # NaN, -1
        self.reader, self.writer = np.full(size, NOBODY), np.full(size, NOBODY)
        self.flying = np.zeros(size, bool)  # targets of copies that were not waited for

    def barrier(self) -> None:
        self.reader[:], self.writer[:] = NOBODY, NOBODY

    def read(self, at: np.ndarray, who: np.ndarray) -> np.ndarray:
        """at: [n, bytes] addresses; who: [n] threads."""
        aligned(at)
        assert not self.flying[at].any(), "read of a copy that was not waited for"
        who, writer = who[:, None], self.writer[at]
        assert ((writer == NOBODY) | (writer == who)).all(), "read without a barrier"
        before = self.reader[at]
        self.reader[at] = who  # and where several of this access read one byte, the last
        several = (before != NOBODY) & (before != who) | (self.reader[at] != who)
        self.reader[at[several]] = MANY
        return self.bytes[at]

    def write(self, at: np.ndarray, who: np.ndarray, raw: np.ndarray) -> None:
        aligned(at)
        self.claim(at, who)
        self.bytes[at] = raw
        assert (self.bytes[at] == raw).all(), "two threads write different bytes to one place"

    def claim(self, at: np.ndarray, who: np.ndarray) -> None:
        for table, what in ((self.reader, "read"), (self.writer, "written")):
            other = table[at]
            assert ((other == NOBODY) | (other == who[:, None])).all(), \
                f"write to what another thread has {what}: there is no barrier between them"
        assert not self.flying[at].any(), "write to the target of a copy"
        self.writer[at] = who[:, None]


def aligned(at: np.ndarray) -> None:
    """[n, bytes] addresses: each access lies at a multiple of its size."""
    assert not at.size or not (at[:, 0] % at.shape[1]).any(), f"{at.shape[1]}-byte alignment"
