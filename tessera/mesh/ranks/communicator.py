"""NCCL's communicators of groups of ranks, and what goes through them: addresses and counts alone.

A group has one, made once: that of a mesh from an id that travels in a message, those of its axes
by splitting it. Ranks find out together whether they use NCCL: each has a GPU of its own, and NCCL
is there. Until then, and without it, there is none, and what would send goes through the host.

The other ranks are not asked before a call. What does not come in time is noticed by nccl_watch.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera import config
from tessera.errors import UnsupportedTargetError
from tessera.graph.op import ENGINES
from tessera.launched import launched_here
from tessera.runtime import libnccl
from tessera.runtime.device import device, device_count, gpu_id
from tessera.runtime.window_memory import WindowBuffer

from ..device_mesh import Mesh
from ..errors import MeshError
from ..world import need_world
from . import nccl_watch, status_page
from .envelope import here_in
from .group import Group, make_group
from .transport import Transport

_GPU_BYTES = 16
Place = tuple[int, int]  # address, bytes
Arrays = Sequence[tuple[int, int, int]]
PROCESSES = {"mpi", "tcp"}  # transports whose ranks are processes, which may have a GPU each


class Communicator:
    """A group's communicator on one GPU. Counts are of elements; nothing waits."""

    def __init__(self, group: Group, index: int, library: Any, handle: Any):
        self.group, self.index, self.library, self.handle = group, index, library, handle
        self._of_blocks: dict[int, Communicator] = {}

    @staticmethod
    def by_id(group: Group, index: int) -> Communicator:
        """All members make it, at the same time: the id comes from the first."""
        library, n = libnccl.open_library(), group.size
        assert library is not None
        mine, handle = libnccl.UniqueId(), ctypes.c_void_p()
        if group.index == 0:
            libnccl.check(library.ncclGetUniqueId(ctypes.byref(mine)), "make an id of NCCL")
        sent = np.frombuffer(bytes(mine), np.uint8) if group.index == 0 else np.empty(0, np.uint8)
        got = group.swap_bytes([sent] * n, [libnccl.ID_BYTES] + [0] * (n - 1),
                               here_in("sharing an id of NCCL"))
        first = libnccl.UniqueId.from_buffer_copy(got[0].tobytes())
        with device(index).current():
            libnccl.check(library.ncclCommInitRank(ctypes.byref(handle), n, first, group.index),
                          f"join the ranks of {group.axis!r}")
        return Communicator(group, index, library, handle)

    def split(self, group: Group, color: int) -> Communicator:
        """That of a smaller group. All members of this one call it; `color` numbers the groups.
        Those of no group pass one that they are not in, and get none that they may use."""
        handle, inside = ctypes.c_void_p(), group.transport.rank in group.ranks
        with device(self.index).current():
            libnccl.check(self.library.ncclCommSplit(
                self.handle, color if inside else libnccl.NO_COLOR, group.index if inside else 0,
                ctypes.byref(handle), None), f"join the ranks of {group.axis!r}")
        return Communicator(group, self.index, self.library, handle)

    def of_blocks(self, count: int) -> Communicator:
        """One of the same ranks, whose kernels have so many blocks; ENGINES: which copies by copy
        engines. All members call it; the first call makes it, when nothing is on its way."""
        if count not in self._of_blocks:
            handle = ctypes.c_void_p()
            config = libnccl.EnginesConfig.made() if count == ENGINES else \
                libnccl.CommunicatorConfig.of_blocks(count)
            device(self.index).synchronize()
            with device(self.index).current():
                libnccl.check(self.library.ncclCommSplit(
                    self.handle, 0, self.group.index, ctypes.byref(handle), ctypes.byref(config)),
                    f"join the ranks of {self.group.axis!r}")
            self._of_blocks[count] = Communicator(self.group, self.index, self.library, handle)
        return self._of_blocks[count]

    def open_window(self, memory: WindowBuffer) -> None:
        """Let all members reach this memory. All of them call it, each with as much. NCCL gives no
        window, and no error, where GPUs cannot reach each other's memory: it sends as before then.
        """
        found = ctypes.c_void_p()
        with device(self.index).current():
            libnccl.check(self.library.ncclCommWindowRegister(
                self.handle, memory.pointer, memory.nbytes, ctypes.byref(found),
                libnccl.SYMMETRIC), f"open memory to the ranks of {self.group.axis!r}, which "
                "TESSERA_COMM_WINDOWS=0 leaves out", self.library)
        if found.value:
            memory.windows.append((self.handle, found))

    # --- what goes through it -------------------------------------------------------------------
    # Arrays: source, target and count of each. Several go together, as one kernel.
    def all_reduce(self, arrays: Arrays, kind: int, op: int, stream: int) -> None:
        self._together(self.library.ncclAllReduce, arrays, (kind, op), "all_reduce", stream)

    def reduce_scatter(self, arrays: Arrays, kind: int, op: int, stream: int) -> None:
        """Counts: of elements that this rank gets."""
        self._together(self.library.ncclReduceScatter, arrays, (kind, op), "reduce_scatter",
                       stream)

    def all_gather(self, arrays: Arrays, stream: int) -> None:
        """Counts: of bytes that this rank gives."""
        self._together(self.library.ncclAllGather, arrays, (libnccl.TYPES["uint8"],),
                       "all_gather", stream)

    def _together(self, call: Callable[..., int], arrays: Arrays, rest: tuple[int, ...], what: str,
                  stream: int) -> None:
        if len(arrays) == 1:
            return self._sent(call(*arrays[0], *rest, self.handle, stream), what, stream)
        self.library.ncclGroupStart()
        for array in arrays:
            self._good(call(*array, *rest, self.handle, stream), what)
        return self._sent(self.library.ncclGroupEnd(), what, stream)

    def swap(self, sends: Mapping[int, Place], receives: Mapping[int, Place], stream: int) -> None:
        """Bytes to and from members, by their number in the group."""
        library, uint8 = self.library, libnccl.TYPES["uint8"]
        library.ncclGroupStart()
        for j, (pointer, nbytes) in sends.items():
            self._good(library.ncclSend(pointer, nbytes, uint8, j, self.handle, stream), "send")
        for j, (pointer, nbytes) in receives.items():
            self._good(library.ncclRecv(pointer, nbytes, uint8, j, self.handle, stream), "receive")
        self._sent(library.ncclGroupEnd(), "send and receive", stream)

    def send(self, to: int, place: Place, stream: int) -> None:
        """Bytes to a member, by its number in the group. What comes behind it on the stream may
        wait until that member receives."""
        pointer, nbytes = place
        self._sent(self.library.ncclSend(pointer, nbytes, libnccl.TYPES["uint8"], to, self.handle,
                                         stream), "send", stream)

    def receive(self, source: int, place: Place, stream: int) -> None:
        """The next bytes that a member sends."""
        pointer, nbytes = place
        self._sent(self.library.ncclRecv(pointer, nbytes, libnccl.TYPES["uint8"], source,
                                         self.handle, stream), "receive", stream)

    def _good(self, status: int, what: str) -> None:
        if status:
            self.library.ncclGroupEnd()
            libnccl.check(status, f"{what} over {self.group.axis!r}", self.library)

    def _sent(self, status: int, what: str, stream: int) -> None:
        if status:
            libnccl.check(status, f"{what} over {self.group.axis!r}", self.library)
        nccl_watch.sent(self, what, stream)

    def failure(self) -> str:
        """What went wrong behind the last call, "" for nothing. Does not wait."""
        found = ctypes.c_int()
        status = self.library.ncclCommGetAsyncError(self.handle, ctypes.byref(found))
        status = status or found.value
        return "" if status in (libnccl.SUCCESS, libnccl.IN_PROGRESS) else \
            str(self.library.text(status))


# --- which there are ----------------------------------------------------------------------------
_found: dict[tuple[Transport, tuple[int, ...]], Communicator | None] = {}


def communicator(group: Group, index: int, what: str = "") -> Communicator | None:
    """That of a group on this rank's GPU; None where its arrays go through the host. The first call
    communicates: all members make it. what: it is asked for, which is told of a rank that dies."""
    key = group.transport, group.ranks
    if key not in _found:
        _found[key] = Communicator.by_id(group, index) if _agree(group, index) else None
    found = _found[key]
    if found is not None and found.index != index:
        raise MeshError(f"this rank's communicator of {group.axis!r} is on cuda:{found.index}, the "
                        f"array lies on cuda:{index}", hint="keep a rank's arrays on one GPU")
    if what and found is not None:
        status_page.note(what)
    return found


def uses_nccl(group: Group) -> bool | None:
    """Whether a group uses NCCL; None before its ranks have found out."""
    key = group.transport, group.ranks
    return _found[key] is not None if key in _found else None


def join(mesh: Mesh, index: int) -> None:
    """Make the communicators of a mesh and of its axes, once. All its ranks call it."""
    whole = make_group(mesh, None)
    if whole.size == 1 or (whole.transport, whole.ranks) in _found:
        return
    parent = communicator(whole, index)
    me = mesh.world_ranks.index(whole.transport.rank)
    for axis in mesh.axes:
        group = make_group(mesh, (axis,))
        key = group.transport, group.ranks
        if group.size > 1 and key not in _found:
            color = mesh.groups(axis).index(mesh.group(me, axis))
            _found[key] = None if parent is None else parent.split(group, color)


def _agree(group: Group, index: int) -> bool:
    if group.transport.name not in PROCESSES:
        return False
    mine = np.zeros(1 + _GPU_BYTES, np.uint8)
    if libnccl.open_library() is not None:
        mine[0], mine[1:] = 1, np.frombuffer(gpu_id(index), np.uint8)
    got = group.swap_bytes([mine] * group.size, [mine.size] * group.size,
                           here_in("choosing a backend"))
    separate = all(g[0] for g in got) and len({g.tobytes() for g in got}) == group.size
    if config.comm == "nccl" and not separate:
        raise no_nccl(f"the ranks of {group.axis!r}")
    return separate and config.comm != "mpi"


def no_nccl(who: str) -> MeshError:
    return MeshError(f"{who} cannot use NCCL, which TESSERA_COMM=nccl demands",
                     hint="it needs NCCL 2.18 or later, and a GPU for each rank")


def backend_of(mesh: Mesh) -> str:
    """What Mesh.backend says: what its ranks have found out together, else what this one sees."""
    here = need_world(mesh)
    if not here.processes:
        return here.name
    ranks = set(mesh.world_ranks)
    found = [c is not None for (_, members), c in _found.items() if set(members) == ranks]
    by_nccl = found[-1] if found else config.comm != "mpi" and _have_own_gpus() and \
        libnccl.open_library() is not None
    if config.comm == "nccl" and not by_nccl:
        raise no_nccl(f"the ranks of {mesh}")
    return "nccl" if by_nccl else here.name


def _have_own_gpus() -> bool:
    """Whether this machine has a GPU for each of the ranks that run on it."""
    try:
        count = device_count()
    except UnsupportedTargetError:
        return False
    return count >= launched_here()


__all__ = ["Communicator", "backend_of", "communicator", "join", "no_nccl", "uses_nccl"]
