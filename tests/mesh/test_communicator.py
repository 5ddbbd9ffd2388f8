"""What a communicator asks of NCCL's library: a pretended one keeps it."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.errors import DeviceError
from tessera.mesh.ranks import communicator, nccl_watch
from tessera.mesh.ranks.communicator import Communicator
from tessera.runtime import libnccl

F32, UINT8, SUM, HANDLE = libnccl.TYPES["f32"], libnccl.TYPES["uint8"], libnccl.OPS["sum"], 99


class Library:
    """Keeps the calls; each gives the status that is set for it."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.status: dict[str, int] = {}
        self.window: int | None = None  # that it gives

    def __getattr__(self, name: str):
        def call(*args: Any) -> int:
            self.calls.append((name.removeprefix("nccl"), *args))
            if name == "ncclCommWindowRegister":
                args[3]._obj.value = self.window
            return self.status.get(name, 0)

        return call

    def text(self, status: int) -> str:
        return f"words for {status}"


@pytest.fixture
def made(monkeypatch):
    """A communicator of ranks 0 and 1 on cuda:0, its library, and what the watch was told."""
    told: list[tuple] = []
    monkeypatch.setattr(nccl_watch, "sent", lambda by, what, stream: told.append((what, stream)))
    group = SimpleNamespace(axis="dp", size=2, index=0, ranks=(0, 1))
    library = Library()
    return Communicator(group, 0, library, HANDLE), library, told


def test_one_array_is_one_call(made):
    by, library, told = made
    by.all_reduce([(1, 2, 3)], F32, SUM, 7)
    assert library.calls == [("AllReduce", 1, 2, 3, F32, SUM, HANDLE, 7)]
    assert told == [("all_reduce", 7)]


def test_several_arrays_and_blocks_go_as_a_group(made):
    by, library, told = made
    by.all_reduce([(1, 2, 3), (4, 5, 6)], F32, SUM, 7)
    by.swap({1: (10, 40)}, {1: (20, 80)}, 7)
    names = [c[0] for c in library.calls]
    assert names == ["GroupStart", "AllReduce", "AllReduce", "GroupEnd",
                     "GroupStart", "Send", "Recv", "GroupEnd"]
    assert library.calls[5] == ("Send", 10, 40, UINT8, 1, HANDLE, 7)
    assert library.calls[6] == ("Recv", 20, 80, UINT8, 1, HANDLE, 7)
    assert [what for what, _ in told] == ["all_reduce", "send and receive"]


def test_gathers_are_bytes_and_scatters_elements(made):
    by, library, _ = made
    by.all_gather([(1, 2, 48)], 0)
    by.reduce_scatter([(3, 4, 12)], F32, SUM, 0)
    by.all_gather([(1, 2, 48), (5, 6, 8)], 0)
    assert library.calls == [("AllGather", 1, 2, 48, UINT8, HANDLE, 0),
                             ("ReduceScatter", 3, 4, 12, F32, SUM, HANDLE, 0), ("GroupStart",),
                             ("AllGather", 1, 2, 48, UINT8, HANDLE, 0),
                             ("AllGather", 5, 6, 8, UINT8, HANDLE, 0), ("GroupEnd",)]


def test_one_of_so_many_blocks_is_made_once_of_the_same_ranks(made, monkeypatch):
    by, library, _ = made
    place = SimpleNamespace(synchronize=lambda: library.calls.append(("wait",)),
                            current=contextlib.nullcontext)
    monkeypatch.setattr(communicator, "device", lambda index: place)
    other = by.of_blocks(32)
    assert other.group is by.group and by.of_blocks(32) is other is not by
    waited, (name, parent, color, key, _, config) = library.calls
    assert waited == ("wait",) and (name, parent, color, key) == ("CommSplit", HANDLE, 0, 0)
    assert (config._obj.least_blocks, config._obj.most_blocks) == (32, 32)
    assert config._obj.size == ctypes.sizeof(config._obj) == 48  # that of NCCL 2.18


def test_a_window_is_opened_as_symmetric_and_closed_with_its_memory(made, monkeypatch):
    by, library, _ = made
    place = SimpleNamespace(current=contextlib.nullcontext)
    monkeypatch.setattr(communicator, "device", lambda index: place)
    memory = SimpleNamespace(pointer=4096, nbytes=64, windows=[])
    by.open_window(memory)
    assert not memory.windows, "NCCL gave none"
    library.calls.clear()
    library.window = 77
    by.open_window(memory)
    ((name, handle, pointer, nbytes, _, how),) = library.calls
    assert (name, handle, pointer, nbytes, how) == ("CommWindowRegister", HANDLE, 4096, 64, 1)
    assert [(handle, found.value) for handle, found in memory.windows] == [(HANDLE, 77)]
    library.status["ncclCommWindowRegister"] = 3
    with pytest.raises(DeviceError, match="open memory .*'dp', which TESSERA_COMM_WINDOWS=0 leav"):
        by.open_window(memory)
    assert len(memory.windows) == 1


@pytest.mark.parametrize("call, failing", [
    (lambda by: by.all_reduce([(1, 2, 3)], F32, SUM, 0), "ncclAllReduce"),
    (lambda by: by.all_reduce([(1, 2, 3)] * 2, F32, SUM, 0), "ncclAllReduce"),
    (lambda by: by.swap({1: (1, 2)}, {}, 0), "ncclGroupEnd"),
    (lambda by: by.all_gather([(1, 2, 3)], 0), "ncclAllGather")])
def test_what_nccl_refuses_is_an_error_in_its_words_and_ends_the_group(made, call, failing):
    by, library, told = made
    library.status[failing] = 5
    with pytest.raises(DeviceError, match="over 'dp': NCCL says: words for 5"):
        call(by)
    names = [c[0] for c in library.calls]
    assert names.count("GroupStart") == names.count("GroupEnd") and not told


def test_what_is_asked_of_nccl_is_declared():
    """No machine without NCCL would notice."""
    asked = set(re.findall(r"library\.(nccl\w+)", Path(communicator.__file__).read_text()))
    declared = libnccl._SIGNATURES | libnccl._WINDOW_SIGNATURES
    assert len(asked) > 8 and asked <= set(declared)
