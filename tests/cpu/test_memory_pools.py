"""Device memory that runs out: pools are emptied first, then an error says who holds what."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fake_driver import driver as driver
from tessera.errors import OutOfMemoryError
from tessera.runtime import buffer, libcuda, memory_pools
from tessera.runtime.buffer import DeviceBuffer, PooledBuffer
from tessera.runtime.buffer import _free as free  # the driver stands in for it in other tests
from tessera.runtime.device import device

RESERVED, USED = libcuda.MEMPOOL_RESERVED_MEM_CURRENT, libcuda.MEMPOOL_USED_MEM_CURRENT
NO_MEMORY = (libcuda.OUT_OF_MEMORY, 0)


@pytest.fixture
def libraries(monkeypatch):
    """CuPy and torch with memory of their own: what was asked of them, in order."""
    asked = []
    pool = SimpleNamespace(total_bytes=lambda: 3 << 30,
                           free_all_blocks=lambda: asked.append("cupy"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda index: nullcontext()),
        get_default_memory_pool=lambda: pool))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(
        is_initialized=lambda: True, device=lambda index: nullcontext(),
        memory_reserved=lambda index: 5 << 30, empty_cache=lambda: asked.append("torch"))))
    return asked


@pytest.fixture
def without_libraries(monkeypatch):
    for name in ("cupy", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(("kind", "call"), [(DeviceBuffer, "cuMemAlloc"),
                                            (PooledBuffer, "cuMemAllocAsync")])
def test_what_pools_keep_is_given_back_before_an_allocation_fails(
        driver, monkeypatch, libraries, kind, call):
    real = getattr(driver, call)
    monkeypatch.setattr(driver, call,
                        lambda *a: real(*a) if driver.trims and libraries else NO_MEMORY)
    buffer = kind(1 << 20, device())
    assert buffer.pointer in driver.memory
    assert driver.trims == 1 and libraries == ["cupy", "torch"]


def test_spare_buffers_are_given_back_too(driver, without_libraries, monkeypatch):
    freed = []
    monkeypatch.setattr(driver, "cuMemFreeAsync", lambda p, stream: freed.append(p) or (0,),
                        raising=False)
    pointers = {PooledBuffer(4096, device()).pointer for _ in range(3)}
    assert len(pointers) == 1, "a spare buffer is taken again"
    other = memory_pools.SPARE.setdefault((1, 4096), [5])
    memory_pools.trim(device())
    assert set(freed) == pointers and other == [5], "those of other devices stay"


def test_larger_blocks_stay_for_the_next_of_their_size(driver, monkeypatch):
    pooled, freed = [], []
    monkeypatch.setattr(buffer, "_to_pool", lambda pointer, index: pooled.append(pointer))
    monkeypatch.setattr(driver, "cuMemFreeAsync", lambda p, stream: freed.append(p) or (0,),
                        raising=False)
    monkeypatch.setattr(buffer, "LARGE_SHARE", 16)  # of 1 GiB
    sizes = 40 << 20, 48 << 20, 64 << 20  # of twice the largest that is kept
    first, second, third = [PooledBuffer(n, device()).pointer for n in sizes]  # dropped at once
    assert pooled == [first], "the oldest of three"
    assert PooledBuffer(sizes[2], device()).pointer == third
    assert PooledBuffer(sizes[0], device()).pointer not in (first, second, third)
    assert pooled == [first, second], "a block that was taken and freed is younger"
    PooledBuffer((64 << 20) + 1, device())
    assert len(pooled) == 3 and third not in pooled, "a larger one is not kept"
    DeviceBuffer(1 << 20, device())
    assert third in freed and len(freed) == 2, "memory that stays for a function comes first"
    assert PooledBuffer(sizes[2], device()).pointer != third


def test_as_many_bytes_of_smaller_blocks_stay_as_of_the_largest(driver, monkeypatch):
    pooled = []
    monkeypatch.setattr(buffer, "_to_pool", lambda pointer, index: pooled.append(pointer))
    monkeypatch.setattr(memory_pools, "_large", {})
    monkeypatch.setattr(buffer, "LARGE_SHARE", 16)  # of 1 GiB: 128 MiB stay
    nbytes = 4 << 20
    monkeypatch.setitem(memory_pools.SPARE, (0, nbytes), [])
    for _ in range(2):
        made = [PooledBuffer(nbytes, device()) for _ in range(40)]
        made.clear()
        assert len(memory_pools.SPARE[0, nbytes]) == 32
    assert len(pooled) == 16


def test_blocks_that_other_streams_write_first_stay_no_longer(driver, monkeypatch):
    """They come from the pool, as an offloaded tensor does that is brought back; what is spare
    meanwhile stays counted. Each round kept one more."""
    pooled = []
    monkeypatch.setattr(buffer, "_to_pool", lambda pointer, index: pooled.append(pointer))
    monkeypatch.setattr(memory_pools, "_large", {})
    monkeypatch.setattr(buffer, "LARGE_SHARE", 16)  # of 1 GiB
    nbytes = 48 << 20  # of which two are kept
    monkeypatch.setitem(memory_pools.SPARE, (0, nbytes), [])
    for rounds in range(1, 6):
        made = PooledBuffer(nbytes, device(), stream=7)
        del made
        spare = memory_pools.SPARE[0, nbytes]
        assert len(spare) == min(rounds, 2) and len(spare) + len(pooled) == rounds


def test_the_error_says_who_holds_what(driver, monkeypatch, libraries):
    kept = DeviceBuffer(2 << 20, device())
    driver.pool = {RESERVED: 7 << 30, USED: 4 << 30}
    monkeypatch.setattr(driver, "cuMemPoolTrimTo", lambda *_: (0,))  # all of it is in use
    monkeypatch.setattr(driver, "cuMemAlloc", lambda n: NO_MEMORY)
    with pytest.raises(OutOfMemoryError) as info:
        DeviceBuffer(200 << 30, device())
    del kept
    assert "allocate 214748364800 bytes on cuda:0 (fake)" in info.value.message
    assert "1.00 GiB of 140.00 GiB are free" in info.value.message
    for part in ("tessera 4.00 GiB", "tessera's pool 3.00 GiB", "CuPy 3.00 GiB",
                 "torch 5.00 GiB", "others 124.00 GiB"):
        assert part in info.value.message
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" in info.value.hint, "most is held by others"


def test_when_it_is_ours_the_hint_says_what_to_drop(driver, monkeypatch, without_libraries):
    driver.pool = {name: 139 << 30 for name in driver.pool}
    monkeypatch.setattr(driver, "cuMemAlloc", lambda n: NO_MEMORY)
    with pytest.raises(OutOfMemoryError) as info:
        DeviceBuffer(1 << 30, device())
    assert "drop arrays" in info.value.hint


def test_live_memory_is_counted_while_it_lives(driver, without_libraries):
    buffer = DeviceBuffer(1000, device())
    assert memory_pools.holders(device())["tessera"] == 1000
    free(buffer.pointer, 0)
    assert memory_pools.holders(device())["tessera"] == 0


def test_the_peak_is_that_of_the_pool_and_what_lies_outside(driver, monkeypatch,
                                                            without_libraries):
    monkeypatch.setattr(memory_pools, "LIVE", {(0, 16): 1 << 20, (1, 16): 1 << 30})
    driver.pool[USED], driver.pool[libcuda.MEMPOOL_USED_MEM_HIGH] = 5 << 20, 9 << 20
    assert memory_pools.peak_bytes(device()) == 10 << 20
    memory_pools.reset_peak(device())
    assert memory_pools.peak_bytes(device()) == 6 << 20
