"""Memory that NCCL opens for all ranks of a communicator: its kernels read and write there what
other ranks have, with few multiprocessors, where an array lies at one offset on all of them."""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import Any

from . import libcuda, libnccl
from .buffer import DeviceBuffer
from .device import Device, check, device, driver, outside_capture
from .memory_pools import LIVE, allocate
from .recordings import between_recordings


class WindowBuffer(DeviceBuffer):
    """`nbytes` of NCCL's memory, freed with the object. windows: a communicator's handle, and that
    of the window in it, of each that has it."""

    __slots__ = ("windows",)

    def __init__(self, nbytes: int, on: Device, library: Any):
        self.pointer = allocate(nbytes, on, lambda: _allocated(nbytes, library))
        self.nbytes, self.device = nbytes, on
        self.windows: list[tuple[Any, Any]] = []
        LIVE[on.index, self.pointer] = nbytes
        weakref.finalize(self, _free, library, self.pointer, self.windows, on.index).atexit = False


def _allocated(nbytes: int, library: Any) -> tuple[int, int]:
    """A status of the driver's, and the address."""
    found = ctypes.c_void_p()
    status = library.ncclMemAlloc(ctypes.byref(found), max(nbytes, 1))
    if status and check(driver().cuMemGetInfo(), "ask for free memory")[0] < nbytes:
        return libcuda.OUT_OF_MEMORY, 0
    libnccl.check(status, f"allocate {nbytes} bytes for all ranks", library)
    return libcuda.SUCCESS, found.value or 0


def _free(library: Any, pointer: int, windows: list[tuple[Any, Any]], index: int) -> None:
    """What reads it is waited for: unlike the driver's own, this does not wait."""
    LIVE.pop((index, pointer), None)
    between_recordings(partial(_close, library, pointer, windows, index))


def _close(library: Any, pointer: int, windows: list[tuple[Any, Any]], index: int) -> None:
    with device(index).current(), outside_capture():
        driver().cuCtxSynchronize()
        for communicator, window in windows:
            library.ncclCommWindowDeregister(communicator, window)
        library.ncclMemFree(pointer)


__all__ = ["WindowBuffer"]
