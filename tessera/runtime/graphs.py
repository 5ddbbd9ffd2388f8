"""CUDA graphs: launches and copies recorded once, and begun by one call of the driver after that.

    graph = DeviceGraph.record(device, stream, steps)   # each step works on `stream`; nothing runs
    graph.launch(0)
    graph.update(stream, {3: step})                     # from here on step 3 has other parameters

What is recorded keeps its pointers: memory that it names must live as long as the graph, or until
the steps that name it are updated.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from . import libcuda
from .buffer import new_stream
from .device import Device, check, device, driver, outside_capture
from .graph_events import drop_repeated
from .recordings import recording

PARAMETER_BYTES = 256  # more than CUDA_KERNEL_NODE_PARAMS (72) and CUDA_MEMCPY3D (200) have
CHANGED = {libcuda.KERNEL_NODE, libcuda.COPY_NODE}  # kinds of nodes

Step = Callable[[], Any]


class DeviceGraph:
    """A recorded program of a device. Freed with the object.

    nodes: by step, the last thing that it asked for, 0 where the driver does not say.
    """

    __slots__ = ("device", "nodes", "_graph", "_executable", "__weakref__")

    def __init__(self, on: Device, graph: int, executable: int, nodes: Sequence[int]):
        self.device, self.nodes = on, tuple(nodes)
        self._graph, self._executable = graph, executable
        weakref.finalize(self, _destroy, graph, executable, on.index).atexit = False

    @staticmethod
    def record(on: Device, stream: int, steps: Sequence[Step]) -> DeviceGraph:
        """What steps ask of a stream, and of streams that wait for it and that it waits for again,
        as a graph. Raises what a step raises, and DeviceError for what cannot be recorded."""
        with on.current():
            graph, nodes = _captured(stream, steps)
            try:
                gone = drop_repeated(graph)
                parameters = libcuda.GraphParams()
                made = check(driver().cuGraphInstantiateWithParams(
                    graph, ctypes.addressof(parameters)), "prepare a graph")
            except BaseException:
                driver().cuGraphDestroy(graph)
                raise
        return DeviceGraph(on, graph, made, [0 if n in gone else n for n in nodes])

    def launch(self, stream: int) -> None:
        check(driver().cuGraphLaunch(self._executable, stream), "launch a graph")

    def update(self, stream: int, steps: Mapping[int, Step]) -> bool:
        """These steps, by number, with what they ask for now. Launches that are under way keep what
        they had. False where one asks for more than a kernel or a copy: then nothing has changed.
        """
        library = driver()
        with self.device.current(), _scratch(stream, list(steps.values())) as (graph, nodes):
            count = check(library.cuGraphGetNodes(graph, None, 0), "count the nodes of a graph")
            old = [self.nodes[i] for i in steps]
            if count != len(nodes) or not all((*old, *nodes)):
                return False
            kinds = [check(library.cuGraphNodeGetType(n), "ask for the kind of a node")
                     for n in (*old, *nodes)]
            if kinds[:count] != kinds[count:] or not CHANGED.issuperset(kinds):
                return False
            memory = ctypes.create_string_buffer(PARAMETER_BYTES)
            at = ctypes.addressof(memory)
            for mine, new, kind in zip(old, nodes, kinds, strict=False):
                if kind == libcuda.KERNEL_NODE:
                    read = library.cuGraphKernelNodeGetParams(new, at)
                    check(read, "read a node of a graph")
                    made = library.cuGraphExecKernelNodeSetParams(self._executable, mine, at)
                else:
                    check(library.cuGraphMemcpyNodeGetParams(new, at), "read a node of a graph")
                    made = library.cuGraphExecMemcpyNodeSetParams(
                        self._executable, mine, at, self.device.context)
                check(made, "change a node of a graph")
        return True


@contextmanager
def _scratch(stream: int, steps: Sequence[Step]) -> Iterator[tuple[int, list[int]]]:
    """A graph of these steps for the block."""
    graph, nodes = _captured(stream, steps)
    try:
        yield graph, nodes
    finally:
        check(driver().cuGraphDestroy(graph), "free a graph")


def _captured(stream: int, steps: Sequence[Step]) -> tuple[int, list[int]]:
    """The graph of what steps ask for, and the last node of each."""
    library, nodes = driver(), list[int]()
    with recording():
        check(library.cuStreamBeginCapture(stream, libcuda.CAPTURE_MODE_THREAD_LOCAL),
              "begin a graph")
        try:
            for step in steps:
                step()
                nodes.append(_last_node(stream))
        except BaseException:
            status, graph = library.cuStreamEndCapture(stream)
            if status == libcuda.SUCCESS and graph:
                library.cuGraphDestroy(graph)
            raise
        return check(library.cuStreamEndCapture(stream), "end a graph"), nodes


def _last_node(stream: int) -> int:
    """The node that what is asked of the stream next will wait for; 0 where it is not one."""
    status, _, _, _, nodes, count = driver().cuStreamGetCaptureInfo(stream)
    if status != libcuda.SUCCESS or count != 1:
        return 0
    return ctypes.c_void_p.from_address(nodes).value or 0


@functools.cache
def recording_stream(index: int, depth: int = 0) -> int:
    """A stream of the device on which graphs are recorded, and nothing runs. depth: of a loop in a
    graph, which is recorded while what is around it is."""
    return new_stream(device(index))


def _destroy(graph: int, executable: int, index: int) -> None:
    with device(index).current(), outside_capture():
        driver().cuGraphExecDestroy(executable)  # a lost context has freed it already
        driver().cuGraphDestroy(graph)


__all__ = ["DeviceGraph", "recording_stream"]
