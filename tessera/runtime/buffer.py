"""Device memory and streams that the runtime itself needs; users' arrays come from their library.

Copies run on a private stream and are waited for, so they also work while a stream is captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import hooks
from ..errors import ArgumentError
from . import libcuda
from .copy_times import begin_copy, end_copy
from .device import Device, check, device, driver, outside_capture, restore
from .memory_pools import (
    LARGE_BYTES,
    LARGE_SHARE,
    LIVE,
    SPARE,
    allocate,
    free_large,
    keep_freed,
    keep_large,
    take_large,
)
from .recordings import context_waited_for

DEFAULT = 0  # the stream on which kernels run that were given none
DEFAULT_STREAMS = (0, 1)  # CU_STREAM_LEGACY is the same one


class DeviceBuffer:
    """`nbytes` of device memory, freed with the object."""

    __slots__ = ("pointer", "nbytes", "device", "__weakref__")
    stream, waits = DEFAULT, False  # see Borrowed

    def __init__(self, nbytes: int, on: Device):
        free_large(on)
        made = allocate(nbytes, on, lambda: driver().cuMemAlloc(max(nbytes, 1)))
        self.pointer, self.nbytes, self.device = made, nbytes, on
        LIVE[on.index, made] = nbytes
        weakref.finalize(self, _free, made, on.index).atexit = False

    def give_back(self) -> None:
        """What was asked of it has been launched."""

    def lend(self, nbytes: int) -> Borrowed:
        """The first bytes as another's memory, which keeps this one."""
        made = Borrowed(self.pointer, nbytes, self.device, self)
        made.stream, made.waits = self.stream, self.waits
        return made

    def load(self, array: np.ndarray, at: int = 0) -> None:
        """Copy a contiguous array's bytes to byte `at` of the buffer, behind what was launched
        before; the array may be changed when this returns."""
        begun = begin_copy(self.device, DEFAULT) if hooks.timed_steps else None
        check(driver().cuMemcpyHtoDAsync(self.pointer + at, array.ctypes.data, array.nbytes,
                                         DEFAULT), "copy to the GPU")
        if begun is not None:
            end_copy("to the GPU", array.nbytes, begun)

    def copy(self, other: DeviceBuffer, at: int = 0) -> None:
        """Fill this buffer with another's bytes from byte `at` on, behind what was launched before.
        """
        begun = begin_copy(self.device, DEFAULT) if hooks.timed_steps else None
        check(driver().cuMemcpyDtoDAsync(self.pointer, other.pointer + at, self.nbytes, DEFAULT),
              "copy on the GPU")
        if begun is not None:
            end_copy("on the GPU", self.nbytes, begun)

    def copy_across(self, other: DeviceBuffer) -> None:
        """Copy a buffer of another device, behind what was launched before on either."""
        with context_waited_for():  # it waits for both
            check(driver().cuMemcpyPeer(self.pointer, self.device.context, other.pointer,
                                        other.device.context, self.nbytes), "copy between GPUs")

    def fill(self, byte: int, at: int, nbytes: int, stream: int = DEFAULT) -> None:
        """Set `nbytes` bytes from byte `at` on, behind what was launched before on the stream."""
        check(driver().cuMemsetD8Async(self.pointer + at, byte, nbytes, stream), "fill memory")

    def write(self, array: np.ndarray, at: int = 0) -> None:
        """Copy a contiguous array's bytes to byte `at` of the buffer; done when it returns."""
        library, stream = driver(), _copies(self.device.index)
        begun = begin_copy(self.device, stream) if hooks.timed_steps else None
        with self.device.current(), outside_capture():
            check(library.cuMemcpyHtoDAsync(self.pointer + at, array.ctypes.data, array.nbytes,
                                             stream), "copy to the GPU")
            if begun is not None:
                end_copy("to the GPU", array.nbytes, begun)
            check(library.cuStreamSynchronize(stream), "copy to the GPU")

    def read(self, array: np.ndarray) -> None:
        """Fill a contiguous array from the start of the buffer."""
        library, stream = driver(), _copies(self.device.index)
        begun = begin_copy(self.device, stream) if hooks.timed_steps else None
        with self.device.current(), outside_capture():
            check(library.cuMemcpyDtoHAsync(array.ctypes.data, self.pointer, array.nbytes, stream),
                  "copy from the GPU")
            if begun is not None:
                end_copy("from the GPU", array.nbytes, begun)
            check(library.cuStreamSynchronize(stream), "copy from the GPU")

    def number(self, kind: np.dtype) -> Any:
        """The first element as a Python number, when the device has been waited for. In page-locked
        memory the driver writes it without a copy of its own."""
        spare = _NUMBERS.setdefault(self.device.index, [])
        try:
            word = spare.pop()
        except IndexError:
            word = MappedMemory(1, self.device)

        def copy() -> None:
            check(driver().cuMemcpyDtoHAsync(word.host, self.pointer, kind.itemsize, DEFAULT),
                  "copy from the GPU")

        self.device.synchronize(copy)
        found = word.words.view(kind)[0]
        value = (found if kind.kind in "biuf" else found.astype(np.float32)).item()
        spare.append(word)
        return value

    def fetch(self, array: np.ndarray) -> None:
        """As `read`, behind what was launched before; done when the device has been waited for."""
        begun = begin_copy(self.device, DEFAULT) if hooks.timed_steps else None
        before = self.device.activate()
        try:
            check(driver().cuMemcpyDtoHAsync(array.__array_interface__["data"][0], self.pointer,
                                             array.nbytes, DEFAULT), "copy from the GPU")
        finally:
            restore(before)
        if begun is not None:
            end_copy("from the GPU", array.nbytes, begun)


_NUMBERS: dict[int, list[MappedMemory]] = {}  # by device: words that no copy writes


def copy_bytes(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy memory to other memory of the device, behind what was launched on the stream."""
    check(driver().cuMemcpyDtoDAsync(target, source, nbytes, stream), "copy on the GPU")


def fill_bytes(target: int, byte: int, nbytes: int, stream: int) -> None:
    """Set every byte, behind what was launched on the stream."""
    check(driver().cuMemsetD8Async(target, byte, nbytes, stream), "fill memory")


class PooledBuffer(DeviceBuffer):
    """Memory of the driver's pool, which keeps what is freed: quick to make, often. A few small
    ones of each size are kept here, and of larger ones two of up to 256 MiB, or as many bytes of
    smaller ones, which is quicker still.

    For work on the default stream: what is freed may be taken again behind what was launched there.
    stream: another one, on which it is written first; the default stream has to wait for that.
    """

    __slots__ = ("_spare",)

    def __init__(self, nbytes: int, on: Device, stream: int = DEFAULT):
        self._spare = SPARE.setdefault((on.index, nbytes), [])
        self.nbytes, self.device = nbytes, on
        if stream != DEFAULT:
            self.pointer = _from_pool(nbytes, on, stream)
            return
        try:
            self.pointer = self._spare.pop()
        except IndexError:
            self.pointer = _from_pool(nbytes, on)
            return
        if nbytes > _SMALL_BYTES:
            take_large(nbytes, on.index)

    def __del__(self) -> None:
        if not hasattr(self, "pointer"):  # there was no memory
            return
        if self.nbytes <= _SMALL_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(self.pointer)
        elif _SMALL_BYTES < self.nbytes <= (
                most := min(LARGE_BYTES, self.device.total_bytes // LARGE_SHARE)):
            for pointer in keep_large(self.pointer, self.nbytes, self.device.index, most):
                _to_pool(pointer, self.device.index)
        else:
            _to_pool(self.pointer, self.device.index)


def buffers_of(nbytes: int, on: Device) -> Callable[[], PooledBuffer]:
    """What makes memory of one size, more quickly than PooledBuffer(nbytes, on)."""
    if nbytes > _SMALL_BYTES:
        return functools.partial(PooledBuffer, nbytes, on)
    spare, new = SPARE.setdefault((on.index, nbytes), []), PooledBuffer.__new__

    def make() -> PooledBuffer:
        made = new(PooledBuffer)
        made._spare, made.nbytes, made.device = spare, nbytes, on
        try:
            made.pointer = spare.pop()
        except IndexError:
            made.pointer = _from_pool(nbytes, on)
        return made

    return make


class BufferPart(DeviceBuffer):
    """Bytes of a buffer from one on, which it keeps."""

    __slots__ = ("whole",)

    def __init__(self, whole: DeviceBuffer, begin: int, nbytes: int):
        self.pointer, self.nbytes, self.device = whole.pointer + begin, nbytes, whole.device
        self.whole = whole


class Borrowed(DeviceBuffer):
    """Memory of somebody else, who is kept alive. stream: the one on which the owner works.

    What was launched there comes first, and what the owner launches after `give_back` comes behind
    what was launched here. waits: its other streams are unknown, so `give_back` waits.
    """

    __slots__ = ("owner", "stream", "waits")

    def __init__(self, pointer: int, nbytes: int, on: Device, owner: Any, stream: int = DEFAULT,
                 waits: bool = False):
        self.pointer, self.nbytes, self.device, self.owner = pointer, nbytes, on, owner
        self.stream, self.waits = stream, waits
        if stream not in DEFAULT_STREAMS:
            follow(on, DEFAULT, stream)

    def give_back(self) -> None:
        if self.waits:
            check(driver().cuStreamSynchronize(DEFAULT), "give an argument back")
        elif self.stream not in DEFAULT_STREAMS:
            follow(self.device, self.stream, DEFAULT)


def follow(on: Device, stream: int, first: int) -> None:
    """What is launched on a stream from here on comes behind what was launched on the first."""
    with on.current():
        event = check(driver().cuEventCreate(libcuda.EVENT_DISABLE_TIMING), "make an event")
        check(driver().cuEventRecord(event, first), "record an event")
        check(driver().cuStreamWaitEvent(stream, event, 0), "wait for another stream")
        check(driver().cuEventDestroy(event), "free an event")


_SMALL_BYTES, _MOST_SPARE = 1 << 20, 64


def _from_pool(nbytes: int, on: Device, stream: int = DEFAULT) -> int:
    keep_freed(on.index)
    return allocate(nbytes, on, lambda: driver().cuMemAllocAsync(max(nbytes, 1), stream))


def _to_pool(pointer: int, index: int) -> None:
    with device(index).current(), outside_capture():
        driver().cuMemFreeAsync(pointer, DEFAULT)  # a lost context has freed it already


def _free(pointer: int, index: int) -> None:
    LIVE.pop((index, pointer), None)
    with device(index).current(), outside_capture():
        driver().cuMemFree(pointer)  # a lost context has freed it already


# Streams that nobody uses any more, by device and priority. A stream is not destroyed but used
# again: the thread of nccl_watch.py asks about streams, and of one that is gone nobody may ask.
_spare: dict[tuple[int, int], list[int]] = {}
_streams = {0, 1, 2}  # all of ours, and the driver's default ones


def new_stream(on: Device, priority: int = libcuda.USUAL_PRIORITY) -> int:
    """A stream that does not wait for the default one; until `spare_stream`."""
    with contextlib.suppress(KeyError, IndexError):
        return _spare[on.index, priority].pop()
    with on.current(), outside_capture():
        made = check(driver().cuStreamCreateWithPriority(libcuda.STREAM_NON_BLOCKING, priority),
                     "make a stream")
    _streams.add(made)
    return made


def spare_stream(stream: int, index: int, priority: int = libcuda.USUAL_PRIORITY) -> None:
    """Nobody asks anything of a stream of ours any more."""
    _spare.setdefault((index, priority), []).append(stream)


def lasts(stream: int) -> bool:
    """Whether a stream is there as long as the process is."""
    return stream in _streams


@contextmanager
def own_stream(on: Device) -> Iterator[int]:
    """A stream for the block."""
    stream = new_stream(on)
    try:
        yield stream
    finally:
        spare_stream(stream, on.index)


@functools.cache
def _copies(index: int) -> int:
    """A stream of the device for the runtime's own copies."""
    return new_stream(device(index))


class MappedMemory:
    """Host memory that kernels write directly: the host reads it without any driver call."""

    __slots__ = ("pointer", "raw", "words", "host")

    def __init__(self, words: int, on: Device):
        flags = libcuda.MEMHOSTALLOC_PORTABLE | libcuda.MEMHOSTALLOC_DEVICEMAP
        with on.current(), outside_capture():
            self.host = check(driver().cuMemHostAlloc(8 * words, flags), "allocate host memory")
            self.pointer = check(driver().cuMemHostGetDevicePointer(self.host, 0),
                                 "map host memory")
        self.raw = (ctypes.c_int64 * words).from_address(self.host)  # raw[i]: the quickest look
        self.words = np.frombuffer(memoryview(self.raw), np.int64)
        self.words[:] = 0


def stream_pointer(stream: Any) -> int:
    """The CUstream of a stream object: an int, None (the default stream), torch's, CuPy's,
    cuda-core's, or anything with `__cuda_stream__`."""
    if stream is None or isinstance(stream, int):
        return stream or 0
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, cuda-core
        if hasattr(type(stream), attribute) or hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(type(stream), "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise ArgumentError(f"{stream!r} is not a CUDA stream",
                        hint="an int, torch.cuda.Stream, cupy.cuda.Stream or cuda.core Stream")
