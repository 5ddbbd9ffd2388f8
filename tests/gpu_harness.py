"""NumPy arrays on the GPU, and times, for tests that need one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from ptx_harness import require_compiler
from tessera.numerics import dtype_of_numpy
from tessera.runtime.arrays import Array, dense_strides
from tessera.runtime.buffer import DeviceBuffer
from tessera.runtime.device import device, device_count, driver, has_gpu


def require_gpu() -> None:
    """Skips the module where there is no GPU or no compiler."""
    if not has_gpu():
        pytest.skip("no GPU on this machine", allow_module_level=True)
    require_compiler()


def _is_hopper() -> bool:
    return has_gpu() and device().cc == (9, 0)


needs_hopper = pytest.mark.skipif(
    not _is_hopper(),
    reason="needs a GPU of compute capability 9.0")


def mesh_ranks() -> int:
    """Of meshes of GPUs in tests: four where there are as many, else two."""
    return 4 if device_count() >= 4 else 2


class Resident:
    """A NumPy array on the GPU."""

    def __init__(self, x: np.ndarray):
        self.host, self.buffer = x, DeviceBuffer(x.nbytes, device())
        self.buffer.write(np.ascontiguousarray(x))
        self.pointer = self.buffer.pointer
        self.array = Array(self.pointer, x.shape, dense_strides(x.shape), dtype_of_numpy(x.dtype),
                           0, "test", self)

    def numpy(self) -> np.ndarray:
        device().synchronize()
        out = np.empty_like(self.host)
        self.buffer.read(out)
        return out


def poison(*shape: int, dtype=np.float32) -> Resident:
    return Resident(np.full(shape, np.nan if np.dtype(dtype).kind in "fV" else -1, dtype))


def microseconds(run, repeats: int = 20) -> float:
    """Median device time of one call, by events."""
    d = driver()
    run()
    times = []
    for _ in range(repeats):
        a, b = d.cuEventCreate(0)[1], d.cuEventCreate(0)[1]
        d.cuEventRecord(a, 0)
        run()
        d.cuEventRecord(b, 0)
        d.cuEventSynchronize(b)
        times.append(1e3 * d.cuEventElapsedTime(a, b)[1])
    return sorted(times)[repeats // 2]


QUIET_ZERO_US = 4.0  # of torch's x.zero_() where nothing else runs (H200, 2026-11-22)


def host_us(runs: Mapping[str, Callable[[], object]], repeats: int = 200, rounds: int = 60
            ) -> dict[str, float]:
    """Of the host for one call of each: the least of many short whiles, in turn, since a busy
    machine has quiet moments, which are short."""
    took = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            device().synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            took[name] = min(took[name], 1e6 * (time.perf_counter() - start) / repeats)
    return took
