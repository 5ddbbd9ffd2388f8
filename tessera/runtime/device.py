"""GPUs of this machine through the driver, which is loaded at first use.

The primary context of each device is used, so pointers and streams of CuPy, torch and JAX work.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import hooks
from ..errors import ArgumentError, DeviceError, OutOfMemoryError, UnsupportedTargetError
from ..lazy_dataclass import dataclass
from . import libcuda
from .recordings import context_waited_for
from .target import Target, target_of_device


@functools.cache
def driver() -> Any:
    """The driver's functions, initialised.

    Raises UnsupportedTargetError when its library, or a GPU, is missing.
    """
    try:
        library = libcuda.open_library()
    except (OSError, AttributeError) as error:
        raise UnsupportedTargetError(
            f"no GPU driver of CUDA 12 or later here: {str(error).splitlines()[0]}",
            hint="run kernels under the interpreter (device='cpu'), or install NVIDIA's driver; "
                 "python -m tessera doctor shows what is there",
        ) from error
    status = library.cuInit(0)[0]
    if status != libcuda.SUCCESS:
        raise UnsupportedTargetError(
            f"the GPU driver does not start: cuInit answers {error_name(library, status)}",
            hint="see nvidia-smi and CUDA_VISIBLE_DEVICES; device='cpu' needs no GPU",
        )
    return library


def error_name(library: Any, status: int) -> str:
    """CUDA_ERROR_..., or the number of a status that the driver does not know."""
    name = library.cuGetErrorName(status)[1]
    return name.decode() if name else f"status {status}"


def check(answer: tuple, what: str) -> Any:
    """The results of a driver call, bare when there is one.

    Raises DeviceError (OutOfMemoryError) naming what was attempted and the driver's words.
    """
    status, *results = answer
    if status != 0:
        raise _failure(status, what)
    return results[0] if len(results) == 1 else tuple(results)


# The context is unusable after these: only a new process helps.
_STICKY = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ASSERT",
           "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS",
           "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_LAUNCH_TIMEOUT"}


def _failure(status: int, what: str) -> Exception:
    library = driver()
    words = (library.cuGetErrorString(status)[1] or b"unknown to this driver").decode()
    if status == libcuda.OUT_OF_MEMORY:
        return OutOfMemoryError(f"{what}: {words}", hint="free arrays, or use a smaller problem")
    name, hint = error_name(library, status), None
    if name in _STICKY:
        hint = "an earlier kernel failed and its context is lost: run it under ts.debug.bounds() " \
               "or the interpreter to see where, in a new process"
    return DeviceError(f"{what}: {name}, {words}", hint=hint)


@dataclass(frozen=True)
class Device:
    """One GPU: what it is, and its primary context."""

    index: int
    name: str
    cc: tuple[int, int]
    total_bytes: int
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int  # most dynamic shared memory of a block
    registers: int  # of a multiprocessor
    context: int

    @property
    def target(self) -> Target:
        """The richest one."""
        return target_of_device(self.cc)

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.name})"

    def activate(self) -> int:
        """Make this device's context current in this thread.

        Returns the one to `restore` (other libraries take the current context for their current
        device), 0 when this one was current already or none was.
        """
        before = driver().cuCtxGetCurrent()[1]
        if before == self.context:
            return 0
        check(driver().cuCtxSetCurrent(self.context), f"use {self}")
        return before

    @contextmanager
    def current(self) -> Iterator[None]:
        """This device's context inside the block, the one before after it."""
        before = self.activate()
        try:
            yield
        finally:
            restore(before)

    def free_bytes(self) -> int:
        with self.current():
            return check(driver().cuMemGetInfo(), "ask for free memory")[0]

    def synchronize(self, behind: Callable[[], None] | None = None) -> None:
        """Wait for everything on the device, then raise what its kernels reported. behind: called
        first, in the device's context."""
        before = self.activate()
        try:
            if behind is not None:
                behind()
            with context_waited_for():
                answer = driver().cuCtxSynchronize()
        finally:
            restore(before)
        check(answer, f"wait for {self}" if answer[0] else "")
        for tell in hooks.synchronised:
            tell(self.index)


def restore(context: int) -> None:
    """Back to a context that `activate` returned."""
    if context:
        check(driver().cuCtxSetCurrent(context), "return to another context")


_lock = threading.Lock()


def device_count() -> int:
    return check(driver().cuDeviceGetCount(), "count the GPUs")


def device(index: int = 0) -> Device:
    """Device `index`. UnsupportedTargetError without a GPU, ArgumentError beyond the last."""
    if index not in _devices:
        with _lock:
            if index not in _devices:
                _devices[index] = _open(index)
    return _devices[index]


_devices: dict[int, Device] = {}


def _open(index: int) -> Device:
    library, count = driver(), device_count()
    if count == 0:
        raise UnsupportedTargetError("the driver shows no GPU", hint="see CUDA_VISIBLE_DEVICES")
    if not 0 <= index < count:
        raise ArgumentError(f"there is no cuda:{index}", hint=f"this machine has {count} GPUs")
    handle = check(library.cuDeviceGet(index), f"open cuda:{index}")

    def read(name: str) -> int:
        code = libcuda.DEVICE_ATTRIBUTES[name]
        return check(library.cuDeviceGetAttribute(code, handle), f"read {name} of cuda:{index}")

    name = ctypes.create_string_buffer(96)
    check(library.cuDeviceGetName(name, len(name), handle), "read the GPU's name")
    context = check(library.cuDevicePrimaryCtxRetain(handle), f"open a context on cuda:{index}")
    return Device(
        index, name.value.decode(),  # up to the first zero: what follows is anything
        (read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        check(library.cuDeviceTotalMem(handle), "read the GPU's memory"),
        read("MULTIPROCESSOR_COUNT"), read("L2_CACHE_SIZE"),
        read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        context)


def gpu_id(index: int) -> bytes:
    """16 bytes that no other GPU has."""
    handle, found = check(driver().cuDeviceGet(index), f"open cuda:{index}"), (ctypes.c_char * 16)()
    check(driver().cuDeviceGetUuid(found, handle), f"identify cuda:{index}")
    return found.raw


def has_gpu() -> bool:
    """Whether a GPU can be used; what is missing otherwise is the doctor's to say."""
    try:
        return device_count() > 0
    except UnsupportedTargetError:
        return False


@contextmanager
def outside_capture() -> Iterator[None]:
    """Calls that a stream capture of this thread would forbid (loading, allocating) but that do
    not belong to it: they are made in relaxed mode."""
    exchange = driver().cuThreadExchangeStreamCaptureMode
    before = check(exchange(libcuda.CAPTURE_MODE_RELAXED), "enter relaxed capture")
    try:
        yield
    finally:
        check(exchange(before), "leave relaxed capture")
