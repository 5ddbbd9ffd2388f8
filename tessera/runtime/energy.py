"""The energy that a GPU has used, as NVML counts it (nvmlDeviceGetTotalEnergyConsumption).

    meter = EnergyMeter(device())
    meter.joules()      since the driver was loaded
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any
from uuid import UUID

from ..errors import DeviceError, UnsupportedTargetError
from .device import Device, gpu_id


@functools.cache
def nvml() -> Any:
    """NVML, initialised. Raises UnsupportedTargetError where it is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise UnsupportedTargetError(f"NVML is missing: {error}", hint="it comes with NVIDIA's "
                                     "driver; without it energy is not measured") from error
    _check(library.nvmlInit_v2(), "start NVML")
    return library


class EnergyMeter:
    """Of one GPU. Its counter is renewed about ten times a second on an H200."""

    def __init__(self, on: Device):
        self._library, self._handle = nvml(), ctypes.c_void_p()
        name = f"GPU-{UUID(bytes=gpu_id(on.index))}".encode()
        _check(self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)),
               f"find {on} in NVML")
        self.joules()  # a GPU that does not count says so now

    def joules(self) -> float:
        counted = ctypes.c_ulonglong()
        _check(self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(counted)), "read the energy counter")
        return counted.value / 1e3


def _check(status: int, what: str) -> None:
    if status:
        raise DeviceError(f"{what}: NVML answers {status}")


__all__ = ["EnergyMeter"]
