"""What happens beside the recording of a graph: nothing of it spoils the graph."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fake_captures import INVALIDATED
from fake_driver import driver as driver
from fake_nccl import FakeLibrary
from tessera.errors import DeviceError
from tessera.numerics import as_type
from tessera.runtime import flags, recordings, tensormap
from tessera.runtime.arrays import Array
from tessera.runtime.buffer import DeviceBuffer, PooledBuffer
from tessera.runtime.copies import CopiedOut, PinnedMemory, SideStream, StreamEvent
from tessera.runtime.device import device
from tessera.runtime.graphs import DeviceGraph, recording_stream
from tessera.runtime.offloaded import CopyEvent
from tessera.runtime.window_memory import WindowBuffer
from tessera.tile.launch.resident import ReadOnStream


def recorded(*steps):
    return DeviceGraph.record(device(), recording_stream(0), steps)


def drop(made):
    """A cycle of references, which only a collection ends."""
    held = SimpleNamespace(made=made)
    held.itself = held


KINDS = {
    "memory of windows": lambda on: WindowBuffer(64, on, FakeLibrary()),
    "what another library reads": lambda on: ReadOnStream(PooledBuffer(64, on)),
    "memory": lambda on: DeviceBuffer(64, on),
    "large memory of the pool": lambda on: PooledBuffer(16 << 20, on),
    "an event": lambda on: StreamEvent(on, 0),
    "the event of a copy": lambda on: CopyEvent(on, 0),
    "a copy": lambda on: CopiedOut((4,), np.dtype("f4"), on),
    "memory of the host": lambda on: PinnedMemory(64, on),
    "a stream": lambda on: SideStream(on, 2),
    "a graph": lambda on: recorded(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_collected_while_a_graph_is_recorded(driver, kind):
    on = device()
    with on.current():
        drop(KINDS[kind](on))
        recorded(lambda: gc.collect(1))
    assert not driver.spoilt and not recordings._later


def test_memory_of_windows_is_freed_behind_the_graph(driver):
    """Who frees it waits for the GPU first: in a recording, the next thing that was asked of the
    stream said CUDA_ERROR_STREAM_CAPTURE_INVALIDATED."""
    library, freed = FakeLibrary(), []
    drop(WindowBuffer(64, device(), library))
    with device().current():
        recorded(lambda: gc.collect(1), lambda: freed.append(len(library.freed)))
    assert freed == [0] and len(library.freed) == 1
    WindowBuffer(64, device(), library)
    assert len(library.freed) == 2  # at once, where nothing is recorded


def test_one_thread_waits_for_the_gpu_while_another_records(driver):
    """It waits until the graph is there: the context has a stream that is captured."""
    inside, waited = threading.Event(), []

    def wait():
        inside.wait(10)
        device().synchronize()
        waited.append(driver.spoilt == [])

    thread = threading.Thread(target=wait)
    thread.start()
    with device().current():
        recorded(inside.set, lambda: time.sleep(0.05), lambda: waited.append("recorded"))
    thread.join(10)
    assert waited == ["recorded", True]


def test_no_graph_is_begun_while_a_thread_waits_for_the_gpu(driver, monkeypatch):
    inside, go, order = threading.Event(), threading.Event(), []

    def synchronize():
        inside.set()
        go.wait(10)
        order.append("waited")
        return (0,)

    monkeypatch.setattr(driver, "cuCtxSynchronize", synchronize)
    thread = threading.Thread(target=device().synchronize)
    thread.start()
    inside.wait(10)
    threading.Timer(0.05, go.set).start()
    recorded(lambda: order.append("recorded"))
    thread.join(10)
    assert order == ["waited", "recorded"]


def test_many_threads_record_wait_and_collect(driver):
    def work(number: int):
        for i in range(10):
            if (number + i) % 3:
                DeviceGraph.record(device(), streams[number], [
                    lambda: drop(WindowBuffer(64, device(), library)), lambda: gc.collect(0)])
            else:
                device().synchronize()

    library, streams = FakeLibrary(), [driver.cuStreamCreateWithPriority(1, 0)[1]
                                       for _ in range(6)]
    driver.cuCtxSetCurrent(device().context)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    gc.collect()
    assert not driver.spoilt and len(library.freed) == 40


def test_what_a_kernel_reports_while_a_graph_is_recorded(driver):
    """It is told as it is anywhere: to wait for the context would fail for the capture's sake."""
    found = flags.error_flags(0)
    found.words[0] = 1

    def look():
        waits = driver.waits
        found.clear()
        assert driver.waits > waits and not found.words[0]

    with device().current():
        recorded(look)
    assert not driver.spoilt


def test_descriptors_are_found_for_a_launch_that_is_recorded(driver, monkeypatch):
    """Where all are in use one is taken from another launch when the GPU was waited for: not here.
    """
    monkeypatch.setattr(tensormap, "KEPT", 4)
    monkeypatch.setattr(tensormap, "SLAB_MAPS", 4)
    monkeypatch.setattr(tensormap, "_stores", {})
    memory = DeviceBuffer(1 << 16, device())
    first = -(-memory.pointer // 1024) * 1024

    def descriptor(i: int, pinned: bool) -> int:
        array = Array(first + 1024 * i, (8, 64), (64, 1), as_type("bf16").dtype, 0, "tessera", None)
        return tensormap.tensor_map(array, box=(8, 64), pinned=pinned)

    for i in range(4):
        descriptor(i, False)
    with device().current():
        recorded(*[lambda i=i: descriptor(i, True) for i in range(4, 10)])
    assert not driver.spoilt and tensormap.rewritten(0) == 0
    descriptor(20, False)
    descriptor(21, False)
    descriptor(22, False)
    assert tensormap.rewritten(0) == 1


def test_the_driver_that_pretends_forbids_what_the_real_one_does(driver):
    """Else the tests here could not fail."""
    on = device()
    event = driver.cuEventCreate(0)[1]

    def waits(call):
        driver.spoilt.clear()
        with on.current(), pytest.raises(DeviceError, match="graph"):
            recorded(call)
        return len(driver.spoilt)

    driver.names[INVALIDATED] = b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert waits(driver.cuCtxSynchronize) == 1
    assert waits(lambda: driver.cuMemAlloc(8)) == 1
    assert waits(lambda: driver.cuEventQuery(event)) == 1
    assert waits(lambda: driver.cuStreamSynchronize(recording_stream(0))) == 1
    assert waits(lambda: (driver.cuEventRecord(event, recording_stream(0)),
                          driver.cuEventQuery(event))) == 1
    memory = DeviceBuffer(8, on)
    assert waits(lambda: (driver.cuEventRecord(event, recording_stream(0)),
                          driver.cuStreamWaitEvent(99, event, 0),
                          memory.fill(0, 0, 8, 99))) == 1  # and nobody waits for that
    driver.cuEventRecord(event, 98)
    assert waits(lambda: driver.cuStreamWaitEvent(recording_stream(0), event, 0)) == 1
    driver.spoilt.clear()
