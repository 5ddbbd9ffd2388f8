"""NCCL on host memory, between simulated ranks: what goes through a communicator is done at once,
by the transport of the simulation, on what the addresses say.

A test module takes the fixture by `from fake_nccl import nccl`, with `driver` and `gpu`.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tessera.graph.op import ENGINES
from tessera.mesh.ranks import communicator, nccl_watch
from tessera.mesh.ranks.envelope import MessageLabel, here_in
from tessera.mesh.ranks.group import Group
from tessera.mesh.world import transport
from tessera.runtime import device, libnccl

NUMPY = {number: name for name, number in libnccl.TYPES.items()}
FAKE = MessageLabel("fake send", None, "fake send")
COMBINE = {0: np.add, 2: np.maximum, 3: np.minimum}


def asked(call: Any) -> Any:
    """What is asked of a stream: done now, or recorded; with `late` of the driver set to
    "collectives", when something waits for it."""
    def ask(self: Any, *args: Any) -> None:
        fake, late = device.driver(), False
        if args[-1]:
            late = fake.late == "collectives"
        else:
            fake._flush(0)  # it comes behind kernels that are late
        fake._do(args[-1], lambda: call(self, *args), late)

    return ask


def memory(pointer: int, nbytes: int, dtype: Any = np.uint8) -> np.ndarray:
    raw = (ctypes.c_char * nbytes).from_address(pointer) if nbytes else b""
    return np.frombuffer(raw, dtype)


class FakeLibrary:
    """Windows of NCCL: memory of the driver's, and which were opened."""

    def __init__(self) -> None:
        self.without: set[int] = set()  # ranks whose NCCL is older
        self.opened: list[tuple[int, int, int]] = []  # rank, address, bytes
        self.closed: list[tuple[Any, Any]] = []
        self.freed: list[int] = []

    @property
    def has_windows(self) -> bool:
        return transport().rank not in self.without

    has_engines = False

    def ncclMemAlloc(self, found: Any, nbytes: int) -> int:
        found._obj.value = device.driver().cuMemAlloc(nbytes)[1]
        return 0

    def ncclCommWindowDeregister(self, communicator: Any, window: Any) -> int:
        self.closed.append((communicator, window))
        return 0

    def ncclMemFree(self, pointer: int) -> int:
        self.freed.append(pointer)
        return 0


class FakeCommunicator:
    """As Communicator. Adds in the order of ranks, each time rounding to the elements' type; where
    both ends lie in windows in f32, where `in_f32` is set, as NCCL's kernels for them."""

    in_f32 = True

    calls: list[tuple[int, str, int]] = []  # rank, what, bytes: of all
    library = FakeLibrary()

    def __init__(self, group: Group, index: int, blocks: int = 0):
        self.group, self.index, self.blocks = group, index, blocks
        self._of_blocks: dict[int, FakeCommunicator] = {}

    def of_blocks(self, count: int) -> FakeCommunicator:
        return self._of_blocks.setdefault(count, FakeCommunicator(self.group, self.index, count))

    def open_window(self, memory: Any) -> None:
        self.library.opened.append((self.group.transport.rank, memory.pointer, memory.nbytes))
        memory.windows.append((self, len(self.library.opened)))

    def split(self, group: Group, color: int) -> FakeCommunicator:
        return FakeCommunicator(group, self.index)

    def _swap(self, what: str, sends: Sequence[np.ndarray], counts: Sequence[int]) -> list:
        self.calls.append((self.group.transport.rank, what, sum(s.size for s in sends)))
        return self.group.swap_bytes(sends, counts, here_in(f"fake {what}"))

    @asked
    def all_reduce(self, arrays: Sequence[tuple[int, int, int]], kind: int, op: int, stream: int
                   ) -> None:
        dtype = _dtype(kind)
        for source, target, count in arrays:
            mine = memory(source, count * dtype.itemsize)
            got = self._swap("all_reduce", [mine] * self.group.size, [mine.size] * self.group.size)
            wide = self._in_f32((source, mine.size), (target, mine.size))
            memory(target, mine.size, dtype)[...] = _total(got, dtype, op, wide)

    @asked
    def reduce_scatter(self, arrays: Sequence[tuple[int, int, int]], kind: int, op: int,
                       stream: int) -> None:
        dtype, n = _dtype(kind), self.group.size
        for source, target, count in arrays:
            size = count * dtype.itemsize
            whole = memory(source, size * n)
            got = self._swap("reduce_scatter", list(whole.reshape(n, size)), [size] * n)
            wide = self._in_f32((source, whole.size), (target, size))
            memory(target, size, dtype)[...] = _total(got, dtype, op, wide)

    def _in_f32(self, *places: tuple[int, int]) -> bool:
        return self.in_f32 and self._inside(*places)

    def _inside(self, *places: tuple[int, int]) -> bool:
        """Whether all lies in windows."""
        rank = self.group.transport.rank
        return all(any(rank == r and begin <= at and at + size <= begin + nbytes
                       for r, begin, nbytes in self.library.opened) for at, size in places)

    @asked
    def all_gather(self, arrays: Sequence[tuple[int, int, int]], stream: int) -> None:
        n = self.group.size
        for source, target, nbytes in arrays:
            if self.blocks == ENGINES:  # of another place NCCL would make a kernel
                assert source == target + self.group.index * nbytes
                assert self._inside((target, n * nbytes))
            got = self._swap("all_gather", [memory(source, nbytes)] * n, [nbytes] * n)
            memory(target, n * nbytes)[...] = np.concatenate(got)

    def send(self, to: int, place: tuple[int, int], stream: int) -> None:
        """The bytes as they are when the stream has come to it."""
        self.calls.append((self.group.transport.rank, "send", place[1]))
        fake = device.driver()
        fake._flush(stream)
        self.group.transport.isend(self.group.ranks[to], memory(*place).copy(), self._tag(),
                                   FAKE)

    def receive(self, source: int, place: tuple[int, int], stream: int) -> None:
        """At once, and here the host waits for it: a message that is asked for before what its
        sender needs is sent never comes."""
        self.group.transport.irecv(self.group.ranks[source], memory(*place), self._tag(),
                                   FAKE).wait()

    def _tag(self) -> int:
        return 1000 + zlib.crc32(self.group.axis.encode()) % 10000

    @asked
    def swap(self, sends: Mapping[int, Any], receives: Mapping[int, Any], stream: int) -> None:
        n, nothing = self.group.size, np.empty(0, np.uint8)
        out = [memory(*sends[j]).copy() if j in sends else nothing for j in range(n)]
        got = self._swap("swap", out, [receives[j][1] if j in receives else 0 for j in range(n)])
        for j, (pointer, nbytes) in receives.items():
            memory(pointer, nbytes)[...] = got[j]


def _dtype(kind: int) -> np.dtype:
    import ml_dtypes

    name = NUMPY[kind]
    spelled = {"f16": "float16", "f32": "float32", "f64": "float64"}
    return np.dtype(ml_dtypes.bfloat16 if name == "bf16" else spelled.get(name, name))


def _total(got: Sequence[np.ndarray], dtype: np.dtype, op: int, wide: bool) -> np.ndarray:
    between = np.dtype(np.float32) if wide and dtype.itemsize == 2 else dtype
    total = got[0].view(dtype).astype(between)
    for other in got[1:]:
        total = COMBINE[op](total, other.view(dtype).astype(between))
    return total.astype(dtype)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeCommunicator]:
    """Each simulated rank has a GPU of its own, as far as NCCL goes."""
    monkeypatch.setattr(communicator, "PROCESSES", {"local"})
    monkeypatch.setattr(communicator, "gpu_id", lambda index: bytes([transport().rank] * 16))
    monkeypatch.setattr(communicator.Communicator, "by_id", FakeCommunicator)
    monkeypatch.setattr(FakeCommunicator, "library", FakeLibrary())
    monkeypatch.setattr(libnccl, "open_library", lambda: FakeCommunicator.library)
    monkeypatch.setattr(communicator, "_found", {})
    monkeypatch.setattr(nccl_watch, "_running", True)  # no thread
    FakeCommunicator.calls = []
    return FakeCommunicator


__all__ = ["FakeCommunicator", "nccl"]
