"""The GPU driver on host memory, for tests that need no GPU: it keeps what it is given.

A test module takes the fixture by `from fake_driver import driver`; `run` of the driver may be set
to what a launch does.
"""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.runtime import arrays, buffer, device, flags, launch, module, tensormap
from tessera.tile.device import recipe, results

CONTEXT = 77


class Names:
    """Any enumeration: each member is its name."""

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """What cuda.bindings.driver offers, on host memory. `launches` holds what was launched."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    cuuint32_t = cuuint64_t = int

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.memory: dict[int, Any] = {}
        self.status: Any = 0
        self.capturing = "CU_STREAM_CAPTURE_STATUS_NONE"
        self.current = 0
        self.formats: dict[Any, str] = {}  # by name, or by the machine code
        self.waits = 0
        self.run: Any = None

    def __getattr__(self, name: str) -> Any:
        return Names()

    def cuCtxGetCurrent(self):
        return 0, self.current

    def cuCtxSetCurrent(self, context):
        self.current = context
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0, mode

    def cuStreamIsCapturing(self, stream):
        return 0, self.capturing

    def cuStreamCreate(self, flags):
        return 0, 3

    def cuStreamSynchronize(self, stream):
        self.waits += 1
        return (0,)

    def cuDeviceGetCount(self):
        return 0, 1

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetName(self, length, handle):
        """The bytes behind the terminating zero are whatever was there."""
        return 0, b"NVIDIA H200".ljust(length - 16, b"\0") + 16 * b" "

    def cuDeviceTotalMem(self, handle):
        return 0, 140 << 30

    def cuDeviceGetAttribute(self, code, handle):
        return 0, 9 if code.endswith("CAPABILITY_MAJOR") else 0

    def cuDevicePrimaryCtxRetain(self, handle):
        return 0, CONTEXT

    def cuTensorMapEncodeTiled(self, type, rank, address, shape, strides, box, steps, *modes):
        """As the driver: strides that are a null pointer are refused, whatever the rank."""
        if not strides or len(strides) < rank - 1 or any(s % 16 for s in strides):
            return SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"), None
        self.map = (ctypes.c_char * 128)(*bytes([rank]))
        self.encoded = SimpleNamespace(rank=rank, shape=shape, strides=strides, box=box)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(self.map))

    def cuModuleLoadData(self, cubin):
        return 0, cubin

    def cuModuleGetFunction(self, module, name):
        return 0, name

    def cuFuncSetAttribute(self, *_):
        return (0,)

    def cuFuncGetAttribute(self, *_):
        return 0, 32

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_):
        return 0, 4

    def cuMemAlloc(self, nbytes):
        memory = (ctypes.c_char * nbytes)()
        self.memory[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cuMemFree(self, pointer):
        return (0,)

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        ctypes.memmove(target, source, nbytes)
        return (0,)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync

    def cuGetErrorString(self, status):
        return 0, b"words of the driver"

    def cuPointerGetAttribute(self, which, pointer):
        return 0, 0

    def cuCtxSynchronize(self):
        self.waits += 1
        return (0,)

    def cuMemsetD8Async(self, pointer, byte, nbytes, stream):
        ctypes.memset(pointer, byte, nbytes)
        return (0,)

    def cuMemHostAlloc(self, nbytes, flags):
        return self.cuMemAlloc(nbytes)

    def cuMemHostGetDevicePointer(self, pointer, flags):
        return 0, pointer

    def cuLaunchKernel(self, f, x, y, z, threads, ty, tz, shared, stream, addresses, extra):
        if self.status:
            return (self.status,)
        kinds = self.formats[f]
        pointers = (ctypes.c_void_p * len(kinds)).from_address(addresses)
        values = [struct.unpack_from("<" + k, ctypes.string_at(p, 8))[0]
                  for k, p in zip(kinds, pointers, strict=True)]
        self.launches.append(SimpleNamespace(f=f, grid=(x, y, z), threads=threads, shared=shared,
                                             stream=stream, values=values, context=self.current))
        if self.run is not None:
            self.run(self.launches[-1])
        return (0,)

    def cuLaunchKernelEx(self, config, f, addresses, extra):
        self.launches.append(SimpleNamespace(f=f, config=config))
        return (0,)


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    for part in (device, buffer, launch, module, arrays, tensormap, flags, recipe, results):
        if hasattr(part, "driver"):
            monkeypatch.setattr(part, "driver", lambda: fake)
    one = device.Device(0, "fake", (9, 0), 1 << 30, 132, 1 << 20, 232448, 65536, CONTEXT)
    two = device.Device(1, "fake", (9, 0), 1 << 30, 132, 1 << 20, 232448, 65536, CONTEXT + 1)
    monkeypatch.setattr(device, "_devices", {0: one, 1: two})
    monkeypatch.setattr(buffer, "_free", lambda *_: None)  # it may come when the fake is gone
    kept = (buffer._copies, flags.error_flags, flags.printed_lines, results.numbers)
    for made in kept:
        made.cache_clear()
    monkeypatch.setattr(flags, "_flags", {})
    yield fake
    for made in kept:
        made.cache_clear()
