"""Launches of machine code: graph capture, asserts, host time, the disk cache."""

from __future__ import annotations

import numpy as np
import pytest

import ptx_kernels as kernels
from gpu_harness import QUIET_ZERO_US, host_us, require_gpu
from tessera.errors import DeviceError, SourceLine, UnsupportedTargetError
from tessera.runtime.device import device
from tessera.runtime.flags import ReportSite, error_flags, register

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


