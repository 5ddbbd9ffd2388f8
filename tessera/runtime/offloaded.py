"""Device memory that lies in page-locked host memory meanwhile, and comes back when it is used.

    x.memory = OffloadedBuffer.of(x.memory)   # the copy starts behind what was launched before
    x.memory.bring()                          # the copy back starts now
    x.memory.pointer                          # behind it: kernels launched from here on wait for it

Copies run on two streams of their own, one for each direction, beside the kernels. The host waits
for none of them. What was left on the device is freed when its copy is done.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from .. import hooks
from ..errors import OutOfMemoryError
from . import libcuda
from .buffer import DEFAULT, DeviceBuffer, PooledBuffer, new_stream
from .copies import PinnedMemory
from .device import Device, check, device, driver, outside_capture


class CopyEvent:
    """A point in a stream's work: behind what was asked of it so far."""

    __slots__ = ("_event", "_device", "__weakref__")

    def __init__(self, on: Device, stream: int):
        self._device = on
        with on.current(), outside_capture():
            self._event = check(driver().cuEventCreate(libcuda.EVENT_DISABLE_TIMING),
                                "make an event")
            check(driver().cuEventRecord(self._event, stream), "record an event")
        weakref.finalize(self, _destroy, self._event, on.index).atexit = False

    def hold(self, stream: int) -> None:
        """What is asked of a stream from here on comes behind it."""
        with self._device.current():
            check(driver().cuStreamWaitEvent(stream, self._event, 0), "wait for a copy")

    def wait(self) -> None:
        with self._device.current(), outside_capture():
            check(driver().cuEventSynchronize(self._event), "wait for a copy")

    @property
    def done(self) -> bool:
        with self._device.current(), outside_capture():
            return driver().cuEventQuery(self._event)[0] == 0


def _destroy(event: int, index: int) -> None:
    with device(index).current(), outside_capture():
        driver().cuEventDestroy(event)


class HostBlock:
    """Page-locked memory of a pool: to lock pages takes longer than to copy them."""

    __slots__ = ("memory", "last", "_spare")

    def __init__(self, nbytes: int, on: Device):
        self._spare = _SPARE_BLOCKS.setdefault((on.index, nbytes), [])
        # last: the copy that read or wrote it last
        self.memory, self.last = self._spare.pop() if self._spare else (_locked(nbytes, on), None)

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            self._spare.append((self.memory, self.last))

    @property
    def pointer(self) -> int:
        return self.memory.pointer

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def _locked(nbytes: int, on: Device) -> PinnedMemory:
    """New memory; where there is none the pool gives back what it keeps."""
    try:
        return PinnedMemory(nbytes, on)
    except OutOfMemoryError:
        for spare in _SPARE_BLOCKS.values():
            for _, last in spare:
                if last is not None:
                    last.wait()
            spare.clear()
        return PinnedMemory(nbytes, on)


_SPARE_BLOCKS: dict[tuple[int, int], list[tuple[PinnedMemory, CopyEvent | None]]] = {}


class CopyStreams:
    """The streams of a device for copies beside its kernels."""

    def __init__(self, on: Device):
        self.device, self.out, self.into = on, new_stream(on), new_stream(on)
        self.leaving: list[tuple[CopyEvent, DeviceBuffer]] = []  # what is copied, kept until it is

    def leave(self, source: DeviceBuffer, block: HostBlock) -> CopyEvent:
        """Begin to copy what the kernels launched so far leave in a buffer."""
        self.release()
        CopyEvent(self.device, DEFAULT).hold(self.out)
        if block.last is not None:
            block.last.hold(self.out)
        with self._seen("offload", self.out):
            check(driver().cuMemcpyDtoHAsync(block.pointer, source.pointer, source.nbytes,
                                             self.out), "copy from the GPU")
        block.last = CopyEvent(self.device, self.out)
        self.leaving.append((block.last, source))
        return block.last

    def bring(self, block: HostBlock, nbytes: int) -> tuple[DeviceBuffer, CopyEvent]:
        """Begin to copy a block back, to memory for which no kernel is waited."""
        self.release()
        made = PooledBuffer(nbytes, self.device, self.into)
        if block.last is not None:
            block.last.hold(self.into)
        with self._seen("prefetch", self.into):
            check(driver().cuMemcpyHtoDAsync(made.pointer, block.pointer, nbytes, self.into),
                  "copy to the GPU")
        block.last = CopyEvent(self.device, self.into)
        return made, block.last

    def release(self, wait: bool = False) -> None:
        """Free what has left."""
        if wait and self.leaving:
            self.leaving[-1][0].wait()
        self.leaving = [(e, b) for e, b in self.leaving if not e.done]

    @contextmanager
    def _seen(self, name: str, stream: int) -> Iterator[None]:
        with self.device.current(), ExitStack() as stack:
            for observe in hooks.copies:
                stack.enter_context(observe(name, self.device.index, stream))
            yield


@functools.cache
def copy_streams(index: int) -> CopyStreams:
    return CopyStreams(device(index))


def _release(index: int) -> None:
    if copy_streams.cache_info().currsize:
        copy_streams(index).release()


def _trim(on: Device) -> None:
    if copy_streams.cache_info().currsize:
        copy_streams(on.index).release(wait=True)


hooks.synchronised.append(_release)
hooks.trimmed.append(_trim)


class OffloadedBuffer(DeviceBuffer):
    """Memory of a device, whose bytes lie in a block on the host until they are asked for."""

    __slots__ = ("_block", "_there", "_arrival")

    def __init__(self, block: HostBlock, nbytes: int, on: Device):
        self.nbytes, self.device = nbytes, on
        self._block: HostBlock | None = block
        self._there: DeviceBuffer | None = None
        self._arrival: CopyEvent | None = None

    @staticmethod
    def of(memory: DeviceBuffer) -> OffloadedBuffer:
        """What lies in a buffer, on its way to the host."""
        if isinstance(memory, OffloadedBuffer):
            if memory.on_host:
                return memory
            assert memory.pointer and memory._there is not None  # it has arrived
            memory = memory._there
        block = HostBlock(memory.nbytes, memory.device)
        left = copy_streams(memory.device.index).leave(memory, block)
        if sys.getrefcount(memory) > 4:  # here, the argument, the list of what leaves, its tensor
            left.hold(DEFAULT)  # somebody else may write there
        return OffloadedBuffer(block, memory.nbytes, memory.device)

    @property
    def on_host(self) -> bool:
        return self._there is None

    @property
    def block(self) -> HostBlock:
        """Where it lies on the host."""
        assert self._block is not None
        return self._block

    @property
    def pointer(self) -> int:  # type: ignore[override]
        """On the device; what is launched from here on finds the bytes there."""
        self.bring()
        assert self._there is not None
        if self._arrival is not None:
            self._arrival.hold(DEFAULT)
            self._arrival = None
        return self._there.pointer

    def bring(self) -> None:
        """Begin to copy it back, unless it is there or on its way."""
        if self._there is None:
            streams = copy_streams(self.device.index)
            self._there, self._arrival = streams.bring(self.block, self.nbytes)
            self._block = None

    def read(self, array: np.ndarray) -> None:
        if self._there is not None:
            return super().read(array)
        if self.block.last is not None:
            self.block.last.wait()
        ctypes.memmove(array.ctypes.data, self.block.pointer, self.nbytes)

    def __del__(self) -> None:
        arrival = getattr(self, "_arrival", None)
        if arrival is not None:
            arrival.hold(DEFAULT)  # its memory is used again behind the copy


def is_offloaded(memory: Any) -> bool:
    """Whether memory of a device lies on the host now."""
    return isinstance(memory, OffloadedBuffer) and memory.on_host


__all__ = ["CopyStreams", "CopyEvent", "HostBlock", "OffloadedBuffer", "copy_streams",
           "is_offloaded"]
