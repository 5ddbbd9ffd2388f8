"""Launches of machine code: graph capture, asserts, host time, the disk cache."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import ptx_kernels as kernels
from gpu_harness import QUIET_ZERO_US, host_us, require_gpu
from tessera.errors import DeviceError, SourceLine, UnsupportedTargetError
from tessera.runtime.buffer import DeviceBuffer, new_stream
from tessera.runtime.copies import StreamEvent
from tessera.runtime.device import check, device, driver
from tessera.runtime.flags import ReportSite, error_flags, register
from tessera.runtime.graphs import DeviceGraph

require_gpu()


# --- the runtime -------------------------------------------------------------------------------


def test_an_assert_names_the_line_and_the_index():
    flags = error_flags(0)
    site = ReportSite(SourceLine("kernel.py", 12, "y = x[i]"), "index {0} of an axis of {1}")
    key = register("bounds", [site])
    kernel = kernels.ASSERT.build().kernel
    kernel.launch((2,), (flags.claim, flags.report, key, 64))
    device().synchronize()
    kernel.launch((4,), (flags.claim, flags.report, key, 100))
    says = r"kernel bounds, lane \d+ of group 3: index 1\d\d of an axis of 100"
    with pytest.raises(DeviceError, match=says) as caught:
        device().synchronize()
    assert caught.value.where.line == 12
    device().synchronize()  # told once


def test_machine_code_of_another_generation_is_refused_in_our_words():
    other = "sm_80" if device().cc[0] != 8 else "sm_90"
    kernel = kernels.COPY.build(other).kernel
    with pytest.raises(UnsupportedTargetError, match=f"copy is compiled for {other}, cuda:0"):
        kernel.on(0)


def test_a_launch_is_captured_in_a_graph(rng):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.integers(0, 2**30, 4096, dtype=np.int32)).cuda()
    y = torch.full_like(x, -1)
    kernel = kernels.COPY.build().kernel  # loaded inside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch((4,), (x.data_ptr(), y.data_ptr(), 1024),
                      stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert (y == -1).all()
    graph.replay()
    torch.cuda.synchronize()
    assert (x == y).all()


def test_a_graph_records_an_event_once(rng):
    """As NCCL does behind each of its kernels; what waits for it waits for the last one."""
    on = device()
    x, y = (DeviceBuffer(4096 * 4, on) for _ in range(2))
    given, found = rng.integers(0, 2**30, 4096, dtype=np.int32), np.empty(4096, np.int32)
    kernel, stream = kernels.COPY.build().kernel, new_stream(on)
    record = driver()._library["cuEventRecordWithFlags"]
    event = StreamEvent(on, stream)

    def step():
        kernel.launch((4,), (x.pointer, y.pointer, 1024), stream=stream)
        assert record(ctypes.c_void_p(event._event), ctypes.c_void_p(stream), 1) == 0  # external

    graph = DeviceGraph.record(on, stream, [step] * 5)
    assert driver().cuGraphGetNodes(graph._graph, None, 0) == (0, 6)
    with on.current():
        check(driver().cuMemcpyHtoDAsync(x.pointer, given.ctypes.data, given.nbytes, 0), "copy")
        graph.launch(0)
        event.hold_up(stream)
        check(driver().cuMemcpyDtoHAsync(found.ctypes.data, y.pointer, found.nbytes, stream),
              "copy")
        check(driver().cuStreamSynchronize(stream), "wait")
    assert (given == found).all()


@pytest.mark.alone
def test_launch_overhead(note):
    torch = pytest.importorskip("torch")
    x, y, z = (torch.zeros(16, device="cuda") for _ in range(3))
    kernel = kernels.NOTHING.build().kernel
    bound = kernel.bind((1,), (x.data_ptr(), y.data_ptr(), z.data_ptr(), 1))
    pointers = (x.data_ptr(), y.data_ptr(), z.data_ptr(), 1)
    figures = host_us({"bound_us": bound,
                       "pointers_us": lambda: kernel.launch((1,), pointers),
                       "torch_zero_us": x.zero_})
    note(**figures)
    slow = max(1.0, figures["torch_zero_us"] / QUIET_ZERO_US)
    assert figures["pointers_us"] < 9 * slow and figures["bound_us"] < 5 * slow


