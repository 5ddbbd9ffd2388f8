"""Copies between the device and the host beside kernels: on a stream of their own, in order.

    queue = CopyQueue(device, count)
    queue.to_host(0, pointer, host)      # behind the kernels that were launched before
    queue.to_device(1, pointer, host)
    queue.wait(1)                        # kernels launched from here on find copies 0 and 1 done

An event behind each copy, and one behind the kernels, order the two streams; the host waits for
neither.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod

import numpy as np

from . import libcuda
from .buffer import DEFAULT, new_stream, spare_stream
from .device import Device, check, device, driver, outside_capture


class PinnedMemory:
    """`nbytes` of page-locked host memory, which the GPU copies from and to without the CPU. Freed
    with the object."""

    __slots__ = ("pointer", "nbytes", "device", "__weakref__")

    def __init__(self, nbytes: int, on: Device):
        self.device = on
        with on.current(), outside_capture():
            self.pointer = check(
                driver().cuMemHostAlloc(max(nbytes, 1), libcuda.MEMHOSTALLOC_PORTABLE),
                f"allocate {nbytes} bytes of page-locked host memory")
        self.nbytes = nbytes
        weakref.finalize(self, _free_host, self.pointer, on.index).atexit = False

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The memory as an array, which does not keep it."""
        raw = (ctypes.c_char * self.nbytes).from_address(self.pointer)
        return np.frombuffer(memoryview(raw), dtype).reshape(shape)


def _free_host(pointer: int, index: int) -> None:
    with device(index).current(), outside_capture():
        driver().cuMemFreeHost(pointer)  # a lost context has freed it already


class CopiedOut:
    """What a value held when the device got here: copied to page-locked memory of its own, behind
    what was launched before, and read when the copy is done."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, on: Device):
        self.shape, self.dtype, self.device = shape, dtype, on
        self.memory = PinnedMemory(prod(shape) * dtype.itemsize, on)
        with on.current(), outside_capture():
            self._done = check(driver().cuEventCreate(libcuda.EVENT_DISABLE_TIMING),
                               "make an event")
        weakref.finalize(self, _close, (self._done,), on.index).atexit = False

    def begin(self, pointer: int, stream: int) -> None:
        if self.memory.nbytes:
            check(driver().cuMemcpyDtoHAsync(self.memory.pointer, pointer, self.memory.nbytes,
                                             stream), "copy from the GPU")
        if stream == DEFAULT:  # a recorded stream has no events for the host
            self.mark(stream)

    def mark(self, stream: int) -> None:
        """The copy is done when what was launched on a stream so far is."""
        check(driver().cuEventRecord(self._done, stream), "record an event")

    @property
    def done(self) -> bool:
        with self.device.current(), outside_capture():
            return driver().cuEventQuery(self._done)[0] == 0

    def array(self) -> np.ndarray:
        """The elements, where they lie until the next copy."""
        with self.device.current():
            check(driver().cuEventSynchronize(self._done), "wait for a copy")
        return self.memory.array(self.shape, self.dtype)


class StreamEvent:
    """What was asked of a stream up to here; other streams may wait for it. timed: it knows when
    the GPU came to it."""

    __slots__ = ("device", "_event", "__weakref__")

    def __init__(self, on: Device, stream: int, timed: bool = False):
        self.device = on
        with on.current(), outside_capture():
            self._event = check(driver().cuEventCreate(
                0 if timed else libcuda.EVENT_DISABLE_TIMING), "make an event")
            check(driver().cuEventRecord(self._event, stream), "record an event")
        weakref.finalize(self, _close, (self._event,), on.index).atexit = False

    @property
    def done(self) -> bool:
        with self.device.current(), outside_capture():
            return driver().cuEventQuery(self._event)[0] == 0

    def hold_up(self, stream: int) -> None:
        """What is asked of a stream from here on comes behind it."""
        with self.device.current():
            check(driver().cuStreamWaitEvent(stream, self._event, 0), "wait for an event")

    def seconds_since(self, other: StreamEvent) -> float:
        """From another one, both timed. Waits for this one."""
        with self.device.current():
            check(driver().cuEventSynchronize(self._event), "wait for an event")
            return 1e-3 * check(driver().cuEventElapsedTime(other._event, self._event),
                                "read a time")


class SideStream:
    """A stream for up to `count` numbered pieces of work beside kernels, each begun once between
    two synchronisations of the device. They run in the order in which they are asked for.

    beside: the stream of the kernels; stream: its own. first: its kernels go before theirs, as
    far as multiprocessors are free.
    """

    def __init__(self, on: Device, count: int, beside: int = 0, first: bool = False):
        self.device, self.beside = on, beside
        priority = libcuda.FIRST_PRIORITY if first else libcuda.USUAL_PRIORITY
        self.stream = new_stream(on, priority)
        with on.current(), outside_capture():
            self._kernels, *self._done = (
                check(driver().cuEventCreate(libcuda.EVENT_DISABLE_TIMING), "make an event")
                for _ in range(1 + count))
        weakref.finalize(self, _close, (self._kernels, *self._done), on.index).atexit = False
        weakref.finalize(self, spare_stream, self.stream, on.index, priority).atexit = False

    def begin(self) -> None:
        """What is asked of the stream from here on comes behind the kernels launched so far."""
        check(driver().cuEventRecord(self._kernels, self.beside), "record an event")
        check(driver().cuStreamWaitEvent(self.stream, self._kernels, 0), "wait for kernels")

    def end(self, number: int) -> None:
        """What was asked since is work `number`."""
        check(driver().cuEventRecord(self._done[number], self.stream), "record an event")

    def wait(self, number: int) -> None:
        """Let the kernels' stream wait for one, and so for all before it."""
        check(driver().cuStreamWaitEvent(self.beside, self._done[number], 0), "wait for a copy")


class CopyQueue(SideStream):
    """Copies beside kernels. One stream serves both directions: what is fetched first has been
    offloaded last."""

    def to_host(self, number: int, source: int, target: PinnedMemory) -> None:
        """Begin copy `number`, of what the kernels launched so far leave at a device pointer."""
        self.begin()
        check(driver().cuMemcpyDtoHAsync(target.pointer, source, target.nbytes, self.stream),
              "copy from the GPU")
        self.end(number)

    def to_device(self, number: int, source: PinnedMemory, target: int) -> None:
        """Begin copy `number`, to where the kernels launched so far have done their work."""
        self.begin()
        check(driver().cuMemcpyHtoDAsync(target, source.pointer, source.nbytes, self.stream),
              "copy to the GPU")
        self.end(number)


def _close(events: tuple[int, ...], index: int) -> None:
    with device(index).current(), outside_capture():
        for event in events:
            driver().cuEventDestroy(event)


__all__ = ["CopiedOut", "CopyQueue", "PinnedMemory", "SideStream", "StreamEvent"]
