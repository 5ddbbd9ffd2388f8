"""GPUs of this machine through the driver, which is loaded at first use.

The primary context of each device is used, so pointers and streams of CuPy, torch and JAX work.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, DeviceError, OutOfMemoryError, UnsupportedTargetError
from .ptxas import FIX_GPU
from .target import Target, target_of_device


@functools.cache
def driver() -> Any:
    """The module cuda.bindings.driver, initialised.

    Raises UnsupportedTargetError when the package, the driver library or a GPU is missing.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise UnsupportedTargetError(f"cuda-bindings does not import: {error}",
                                     hint=FIX_GPU) from error
    try:
        status = bindings.cuInit(0)[0]
    except (RuntimeError, ImportError, OSError) as error:  # libcuda is not there
        raise UnsupportedTargetError(
            f"no GPU driver here: {str(error).splitlines()[0]}",
            hint="run kernels under the interpreter (device='cpu'), or install NVIDIA's driver; "
                 "python -m tessera doctor shows what is there",
        ) from error
    if status != bindings.CUresult.CUDA_SUCCESS:
        raise UnsupportedTargetError(
            f"the GPU driver does not start: cuInit answers {status.name}",
            hint="see nvidia-smi and CUDA_VISIBLE_DEVICES; device='cpu' needs no GPU",
        )
    return bindings


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


def _failure(status: Any, what: str) -> Exception:
    bindings = driver()
    text = bindings.cuGetErrorString(status)[1]
    words = text.decode() if isinstance(text, bytes) else str(text)
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        return OutOfMemoryError(f"{what}: {words}", hint="free arrays, or use a smaller problem")
    hint = None
    if status.name in _STICKY:
        hint = "an earlier kernel failed and its context is lost: run it under ts.debug.bounds() " \
               "or the interpreter to see where, in a new process"
    return DeviceError(f"{what}: {status.name}, {words}", hint=hint)


# Called with the number of a device that was waited for: errors that its kernels reported show now.
SYNCHRONISED: list[Callable[[int], None]] = []


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
        bindings = driver()
        before = int(bindings.cuCtxGetCurrent()[1])
        if before == self.context:
            return 0
        check(bindings.cuCtxSetCurrent(self.context), f"use {self}")
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

    def synchronize(self) -> None:
        """Wait for everything on the device, then raise what its kernels reported."""
        with self.current():
            check(driver().cuCtxSynchronize(), f"wait for {self}")
        for tell in SYNCHRONISED:
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
    bindings, count = driver(), device_count()
    if count == 0:
        raise UnsupportedTargetError("the driver shows no GPU", hint="see CUDA_VISIBLE_DEVICES")
    if not 0 <= index < count:
        raise ArgumentError(f"there is no cuda:{index}", hint=f"this machine has {count} GPUs")
    handle = check(bindings.cuDeviceGet(index), f"open cuda:{index}")
    attributes = bindings.CUdevice_attribute

    def read(name: str) -> int:
        code = getattr(attributes, "CU_DEVICE_ATTRIBUTE_" + name)
        return check(bindings.cuDeviceGetAttribute(code, handle), f"read {name} of cuda:{index}")

    name = check(bindings.cuDeviceGetName(96, handle), "read the GPU's name")
    context = check(bindings.cuDevicePrimaryCtxRetain(handle), f"open a context on cuda:{index}")
    return Device(
        index, name.split(b"\0", 1)[0].decode(),
        (read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        check(bindings.cuDeviceTotalMem(handle), "read the GPU's memory"),
        read("MULTIPROCESSOR_COUNT"), read("L2_CACHE_SIZE"),
        read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        int(context))


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
    bindings = driver()
    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(bindings.cuThreadExchangeStreamCaptureMode(relaxed), "enter relaxed capture")
    try:
        yield
    finally:
        check(bindings.cuThreadExchangeStreamCaptureMode(before), "leave relaxed capture")
