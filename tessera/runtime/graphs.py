"""CUDA graphs: launches and copies recorded once, and begun by one call of the driver after that.

    graph = DeviceGraph.record(device, stream, run)   # run() works on `stream`; nothing runs yet
    graph.launch(0)

What is recorded keeps its pointers: memory that it names must live as long as the graph.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

from . import libcuda
from .device import Device, check, device, driver, outside_capture


class DeviceGraph:
    """A recorded program of a device. Freed with the object."""

    __slots__ = ("device", "_executable", "__weakref__")

    def __init__(self, on: Device, executable: int):
        self.device, self._executable = on, executable
        weakref.finalize(self, _destroy, executable, on.index).atexit = False

    @staticmethod
    def record(on: Device, stream: int, run: Callable[[], None]) -> DeviceGraph:
        """What `run` asks of a stream, and of streams that wait for it and that it waits for again,
        as a graph. Raises what run raises, and DeviceError for what cannot be recorded."""
        library = driver()
        with on.current():
            check(library.cuStreamBeginCapture(stream, libcuda.CAPTURE_MODE_THREAD_LOCAL),
                  "begin a graph")
            try:
                run()
            except BaseException:
                library.cuStreamEndCapture(stream)  # invalid: there is nothing to free
                raise
            graph = check(library.cuStreamEndCapture(stream), "end a graph")
            try:
                parameters = libcuda.GraphParams()
                made = check(library.cuGraphInstantiateWithParams(
                    graph, ctypes.addressof(parameters)), "prepare a graph")
            finally:
                check(library.cuGraphDestroy(graph), "free a graph")
        return DeviceGraph(on, made)

    def launch(self, stream: int) -> None:
        check(driver().cuGraphLaunch(self._executable, stream), "launch a graph")


def _destroy(executable: int, index: int) -> None:
    with device(index).current(), outside_capture():
        driver().cuGraphExecDestroy(executable)  # a lost context has freed it already


__all__ = ["DeviceGraph"]
