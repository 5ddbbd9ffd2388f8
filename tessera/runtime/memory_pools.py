"""Who holds a GPU's memory, and giving back what is only kept for later.

Pools keep freed memory, so that the next allocation is quick: the driver's, which holds what
tessera freed, and those of CuPy and torch. Other processes on the GPU cannot use it meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from .. import hooks
from ..errors import OutOfMemoryError
from . import libcuda
from .device import Device, check, driver, outside_capture

LIVE: dict[tuple[int, int], int] = {}  # bytes by device and pointer, of memory not of the pool
SPARE: dict[tuple[int, int], list[int]] = {}  # freed pointers of the pool, by device and bytes
DEFAULT = 0
LARGE_BYTES, LARGE_SHARE, MOST_LARGE = 256 << 20, 128, 64
_large: dict[int, deque[int]] = {}  # sizes of larger spare blocks by device, the oldest first


def keep_large(pointer: int, nbytes: int, index: int, most_bytes: int) -> list[int]:
    """Keeps a freed block of up to LARGE_BYTES, and a LARGE_SHARE of the device, for the next array
    of its size, for which the driver's pool takes several microseconds of the stream, and a call 20
    of the host (a loop of 128 MiB 42.6 us for 19.9 of 64 MiB, which was kept; H200, 2026-11-27).
    Two of the largest, or as many bytes of smaller ones. Returns what is to be freed for it.

    most_bytes: of the largest that is kept
    """
    kept = _large.setdefault(index, deque())
    kept.append(nbytes)
    SPARE.setdefault((index, nbytes), []).append(pointer)
    return _drop_large(index, MOST_LARGE, 2 * most_bytes)


def _drop_large(index: int, most: int, most_bytes: int = 0) -> list[int]:
    """Pointers that are not spare any more, so that as many blocks and bytes stay."""
    kept, dropped = _large.get(index, deque()), []
    while len(kept) > most or (most and sum(kept) > most_bytes):
        with contextlib.suppress(IndexError):  # it was taken meanwhile
            dropped.append(SPARE[index, kept.popleft()].pop(0))
    return dropped


def take_large(nbytes: int, index: int) -> None:
    """A larger spare block has been taken."""
    with contextlib.suppress(KeyError, ValueError):
        _large[index].remove(nbytes)


def free_large(on: Device) -> None:
    """Frees larger spare blocks: memory for a compiled function is asked for, which stays."""
    if dropped := _drop_large(on.index, 0):
        with on.current(), outside_capture():
            for pointer in dropped:
                driver().cuMemFreeAsync(pointer, DEFAULT)


def allocate(nbytes: int, on: Device, call: Callable[[], tuple]) -> int:
    """The pointer that `call` allocates, tried again after `trim` where there was no memory.

    Raises OutOfMemoryError that says who holds what.
    """
    what = f"allocate {nbytes} bytes on {on}"
    with on.current(), outside_capture():
        answer = call()
        if answer[0] == libcuda.OUT_OF_MEMORY:
            trim(on)
            answer = call()
        if answer[0] == libcuda.OUT_OF_MEMORY:
            raise OutOfMemoryError(f"{what}: {_report(on)}", hint=_hint(on))
        return check(answer, what)


@functools.cache
def keep_freed(index: int) -> None:
    """Let a device's pool keep freed memory when the device is waited for."""
    most = ctypes.c_uint64(2**64 - 1)
    check(driver().cuMemPoolSetAttribute(_pool(index), libcuda.MEMPOOL_RELEASE_THRESHOLD,
                                         ctypes.addressof(most)), "set up the memory pool")


def trim(on: Device) -> None:
    """Give back what the pools of this process keep: tessera's, CuPy's, torch's; first the arrays
    that only cycles of references keep."""
    gc.collect()
    library = driver()
    for tell in hooks.trimmed:
        tell(on)
    with on.current(), outside_capture():
        for (index, _), spare in SPARE.items():
            while index == on.index and spare:
                library.cuMemFreeAsync(spare.pop(), DEFAULT)
        library.cuStreamSynchronize(DEFAULT)  # frees are done in the stream's order
        library.cuMemPoolTrimTo(_pool(on.index), 0)
        if (cupy := sys.modules.get("cupy")) is not None:
            with cupy.cuda.Device(on.index):
                cupy.get_default_memory_pool().free_all_blocks()
        if (cuda := _torch_cuda()) is not None:
            with cuda.device(on.index):
                cuda.empty_cache()


def holders(on: Device) -> dict[str, int]:
    """Bytes by who holds them: what is in use by tessera, what its pool keeps, the pools of CuPy
    and torch with what they keep, everything else (other processes, contexts, code), and free."""
    free, total = check(driver().cuMemGetInfo(), "ask for free memory")
    used = _pool_bytes(on.index, libcuda.MEMPOOL_USED_MEM_CURRENT)
    reserved = _pool_bytes(on.index, libcuda.MEMPOOL_RESERVED_MEM_CURRENT)
    spare = sum(n * len(pointers) for (index, n), pointers in SPARE.items() if index == on.index)
    live = sum(n for (index, _), n in list(LIVE.items()) if index == on.index)
    held = {"tessera": live + used - spare,
            "tessera's pool": reserved - used + spare}
    if (cupy := sys.modules.get("cupy")) is not None:
        with cupy.cuda.Device(on.index):
            held["CuPy"] = cupy.get_default_memory_pool().total_bytes()
    if (cuda := _torch_cuda()) is not None:
        held["torch"] = cuda.memory_reserved(on.index)
    held["others"] = max(total - free - sum(held.values()), 0)
    return {**held, "free": free}


def reset_peak(on: Device) -> None:
    """Begin to look for the most memory in use; see `peak_bytes`."""
    zero = ctypes.c_uint64(0)
    check(driver().cuMemPoolSetAttribute(_pool(on.index), libcuda.MEMPOOL_USED_MEM_HIGH,
                                         ctypes.addressof(zero)), "reset a memory pool's peak")


def peak_bytes(on: Device) -> int:
    """Most bytes of the pool that were in use since `reset_peak`, and those that tessera has now
    outside of it: memory of compiled functions, which lives as long as they do."""
    live = sum(n for (index, _), n in list(LIVE.items()) if index == on.index)
    return live + _pool_bytes(on.index, libcuda.MEMPOOL_USED_MEM_HIGH)


def _report(on: Device) -> str:
    held = holders(on)
    total = sum(held.values())
    parts = [f"{who} {_size(n)}" for who, n in held.items() if n and who != "free"]
    return f"{_size(held['free'])} of {_size(total)} are free; held by " + ", ".join(parts)


def _hint(on: Device) -> str:
    held = holders(on)
    most = max((n, who) for who, n in held.items() if who != "free")[1]
    if most == "others":
        return "others are processes that nvidia-smi lists, and JAX in this one, which takes " \
               "three quarters of a GPU unless XLA_PYTHON_CLIENT_PREALLOCATE=false"
    return "drop arrays that are not needed, or use a smaller problem; ts.checkpoint keeps less " \
           "of a forward pass"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _pool(index: int) -> int:
    return check(driver().cuDeviceGetDefaultMemPool(check(
        driver().cuDeviceGet(index), "find a device")), "find the memory pool")


def _pool_bytes(index: int, attribute: int) -> int:
    value = ctypes.c_uint64()
    check(driver().cuMemPoolGetAttribute(_pool(index), attribute, ctypes.addressof(value)),
          "ask the memory pool")
    return value.value


def _torch_cuda() -> Any:
    """torch.cuda where it is in use: asking it otherwise would start it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None
