"""Loops inside of CUDA graphs: a node whose own graph runs as long as a bool on the device is true.

    loop = WhileNode(device, goes_on, numbers)
    ...                                   # a stream is being recorded; the bool is written on it
    loop.record(stream, inside, steps)    # steps work on `inside`, and write the bool again

numbers: two int64 in device memory, 16 bytes apart, zeros before the loop: the number of the test
that comes next, and that of the iteration under way. A kernel behind each test sets both and the
node's condition. It is PTX that the driver compiles: it alone links what sets a condition, which is
a function of CUDA's device library (cudaGraphSetConditional; CUDA Runtime API, Graph Management).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import libcuda
from .device import Device, check, driver
from .module import LoadedKernel
from .target import target_for

NUMBER_BYTES = 16  # from number to number: kernels read them as they read any array
OLDEST = 12040  # the driver that has such nodes with loops in them
GOES_ON = b"""
.version 7.8
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 node, .param .b32 value);
.visible .entry goes_on(.param .u64 node, .param .u64 condition, .param .u64 numbers)
{
    .reg .pred %p;
    .reg .b16 %flag;
    .reg .b32 %value;
    .reg .b64 %node, %condition, %numbers, %test, %next;
    ld.param.u64 %node, [node];
    ld.param.u64 %condition, [condition];
    ld.param.u64 %numbers, [numbers];
    ld.global.u8 %flag, [%condition];
    setp.ne.u16 %p, %flag, 0;
    selp.u32 %value, 1, 0, %p;
    ld.global.u64 %test, [%numbers];
    add.u64 %next, %test, 1;
    st.global.u64 [%numbers + 16], %test;
    st.global.u64 [%numbers], %next;
    {
        .param .b64 to;
        .param .b32 is;
        st.param.b64 [to], %node;
        st.param.b32 [is], %value;
        call.uni cudaGraphSetConditional, (to, is);
    }
    ret;
}
\0"""


@functools.cache
def has_conditional_nodes() -> bool:
    """Whether the driver has them."""
    return check(driver().cuDriverGetVersion(), "ask for the driver's version") >= OLDEST


@functools.cache
def _kernel(on: Device) -> LoadedKernel:
    return LoadedKernel(GOES_ON, "goes_on", ("i64", "i64", "i64"), target=target_for(on.cc),
                        threads=1)


class WhileNode:
    """A loop. goes_on: the address of its bool; numbers: that of its numbers."""

    def __init__(self, on: Device, goes_on: int, numbers: int):
        self.device, self.goes_on, self.numbers = on, goes_on, numbers

    def record(self, stream: int, inside: int, steps: Sequence[Callable[[], Any]]) -> None:
        """Put into the graph that is recorded of a stream, behind the first test: if that is true,
        the steps, which end with the next test, and so on. inside: a stream for them."""
        library, what = driver(), "record a loop"
        _kernel(self.device).on(self.device.index)  # loaded before anything is asked of the graph
        graph, _, _ = _recorded(stream)
        handle = check(library.cuGraphConditionalHandleCreate(graph, self.device.context, 0, 0),
                       what)
        self._judge(handle, stream)
        graph, behind, count = _recorded(stream)
        node = libcuda.ConditionalNode.of_while(handle, self.device.context)
        made = check(library.cuGraphAddNode(graph, behind, count, ctypes.addressof(node)), what)
        last = ctypes.c_void_p(made)
        check(library.cuStreamUpdateCaptureDependencies(
            stream, ctypes.addressof(last), 1, libcuda.SET_CAPTURE_DEPENDENCIES), what)
        check(library.cuStreamBeginCaptureToGraph(
            inside, node.bodies[0], None, None, 0, libcuda.CAPTURE_MODE_THREAD_LOCAL), what)
        try:
            for step in steps:
                step()
            self._judge(handle, inside)
        except BaseException:
            library.cuStreamEndCapture(inside)
            raise
        check(library.cuStreamEndCapture(inside), what)

    def _judge(self, handle: int, stream: int) -> None:
        words = ctypes.c_int64(handle).value, self.goes_on, self.numbers
        _kernel(self.device).launch((1,), words, stream=stream, device=self.device.index)


def _recorded(stream: int) -> tuple[int, int, int]:
    """The graph, and where the nodes are, and how many, that what comes next stands behind."""
    status, _, graph, nodes, count = check(driver().cuStreamGetCaptureInfo(stream),
                                           "ask what is recorded")
    assert status, "nothing is recorded"
    return graph, nodes, count


__all__ = ["NUMBER_BYTES", "WhileNode", "has_conditional_nodes"]
