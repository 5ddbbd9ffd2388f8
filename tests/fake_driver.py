"""The GPU driver on host memory, for tests that need no GPU: it keeps what it is given.

What is asked for is done at once. With `late` set to "copies" or "kernels", these are done only
when something waits for them, so a wait that is missing shows in the results.

A test module takes the fixture by `from fake_driver import driver`; `run` of the driver may be set
to what a launch does.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from fake_captures import INVALIDATED, Captures
from tessera.graph import eager_forms
from tessera.graph.cuda.program import collective_steps
from tessera.runtime import (
    arrays,
    buffer,
    conditional_nodes,
    copies,
    counter_words,
    device,
    flags,
    graph_events,
    graphs,
    libcuda,
    memory_pools,
    module,
    offloaded,
    sentinel_words,
    staging,
    tensormap,
    timing,
    window_memory,
)
from tessera.tile.launch import recipe, resident, results

CONTEXT = 77
INVALID_VALUE, NOT_READY = 1, 600
MEMSET_NODE = 2  # CUgraphNodeType
RESERVED, USED = libcuda.MEMPOOL_RESERVED_MEM_CURRENT, libcuda.MEMPOOL_USED_MEM_CURRENT
HIGH = libcuda.MEMPOOL_USED_MEM_HIGH


FENCE = bytes(range(64, 128))  # 64 bytes, before and behind each allocation


class Kernel:
    """A launch as work to do."""

    kernel = True

    def __init__(self, driver: Driver, launch: SimpleNamespace):
        self.driver, self.launch = driver, launch

    def __call__(self) -> None:
        if self.launch.f == b"goes_on":
            return self.driver.judge(*self.launch.values)
        self.driver.run(self.launch)


@dataclass(frozen=True)
class Copy:
    """A copy as work to do."""

    target: int
    source: int
    nbytes: int

    def __call__(self) -> None:
        ctypes.memmove(self.target, self.source, self.nbytes)


class Loop:
    """A conditional node as work to do."""

    def __init__(self, driver: Driver, handle: int):
        self.driver, self.handle, self.work = driver, handle, []

    def __call__(self) -> None:
        while self.driver.conditions[self.handle]:
            for work in self.work:
                work()


class Driver(Captures):
    """What runtime.libcuda offers, on host memory. `launches` holds what was launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[SimpleNamespace] = []
        self.memory: dict[int, Any] = {}
        self.status = 0
        self.names: dict[int, bytes] = {}  # of statuses
        self.capturing = libcuda.CAPTURE_STATUS_NONE
        self.current = 0
        self.formats: dict[Any, str] = {b"goes_on": "qqq"}  # by name, or by the machine code
        self.conditions: dict[int, int] = {}  # by handle, of conditional nodes
        self.loops: dict[int, Loop] = {}  # by their graphs
        self.handles: list[tuple[Any, int]] = []  # functions, and the contexts they belong to
        self.waits = 0
        self.run: Any = None
        self.late = ""
        self.numbers = itertools.count(3)
        self.queues: dict[int, list[Callable[[], Any]]] = {}  # by stream: what is still to be done
        self.begun: dict[int, int] = {}  # by stream: how much has been asked for
        self.events: dict[int, tuple[int, int]] = {}  # stream, and how much of it came before
        self.graphs: list[list[int]] = []
        self.nodes: dict[int, Callable[[], Any]] = {}
        self.executables: list[dict[int, Callable[[], Any]]] = []
        self.node_updates = 0
        self.graph_launches = 0
        self.pool = {RESERVED: 0, USED: 0, HIGH: 0}  # bytes
        self.trims = 0
        self.clusters = 1000  # that run at one time
        self.gone = False

    def while_it_lasts(self, free):
        """What frees memory: it may come when the fake is gone."""
        return lambda *given: None if self.gone else free(*given)

    # --- streams and events ----------------------------------------------------------------------
    def _do(self, stream: int, work: Callable[[], Any], late: bool) -> int:
        """The driver's status."""
        if (mine := self.capture_of(stream)) is not None:
            mine.ask(stream, next(self.numbers), work)
            return 0 if mine.valid else INVALIDATED
        if status := self.implicit(stream, "work on the default stream"):
            return status
        self.begun[stream] = self.begun.get(stream, 0) + 1
        if late:
            self.queues.setdefault(stream, []).append(work)
        else:
            work()
        return 0

    def _flush(self, stream: int, upto: int | None = None) -> None:
        """Do what was asked of a stream, or the first `upto` of it."""
        queue, begun = self.queues.get(stream, []), self.begun.get(stream, 0)
        while queue and (upto is None or begun - len(queue) < upto):
            queue.pop(0)()

    def cuStreamCreateWithPriority(self, flags, priority):
        made = next(self.numbers)
        if flags != libcuda.STREAM_NON_BLOCKING:
            self.blocking.add(made)
        return self.unsafe("cuStreamCreateWithPriority"), made

    def cuStreamDestroy(self, stream):
        return (0,)

    def cuStreamSynchronize(self, stream):
        if status := self.waits_for_stream(stream, "cuStreamSynchronize"):
            return (status,)
        self.waits += 1
        self._flush(stream)
        return (0,)

    def cuCtxSynchronize(self):
        if status := self.waits_for_context(self.current, "cuCtxSynchronize"):
            return (status,)
        self.waits += 1
        for stream in self.queues:
            self._flush(stream)
        return (0,)

    def cuEventCreate(self, flags):
        self.events[len(self.events) + 1] = 0, 0
        return 0, len(self.events)

    def cuEventDestroy(self, event):
        return (0,)

    def cuEventRecord(self, event, stream):
        self.event_recorded(event, stream)
        self.events[event] = stream, self.begun.get(stream, 0)
        return (0,)

    def cuEventSynchronize(self, event):
        if status := self.asks_event(event, "cuEventSynchronize"):
            return (status,)
        self._flush(*self.events[event])
        return (0,)

    def cuEventElapsedTime(self, begin, end):
        return 0, 0.125 * (end - begin)  # as if one came each 125 us

    def cuEventQuery(self, event):
        if status := self.asks_event(event, "cuEventQuery"):
            return (status,)
        stream, upto = self.events[event]
        queue, begun = self.queues.get(stream, []), self.begun.get(stream, 0)
        return (NOT_READY if queue and begun - len(queue) < upto else 0,)

    def cuStreamWaitEvent(self, stream, event, flags):
        if status := self.stream_waits(stream, event):
            return (status,)
        if event not in self.marks:
            self._flush(*self.events[event])
        return (0,)

    # --- graphs: what is recorded runs in the order in which it was asked for ---------------------
    # A graph is a list of nodes, a node a number; an executable has work for each of the nodes.
    def cuStreamBeginCapture(self, stream, mode):
        return (self.begin_capture(stream, mode, self.current),)

    def cuStreamEndCapture(self, stream):
        status, made = self.end_capture(stream)
        if made is None:
            return status, 0
        if made.into:
            self.loops[made.into].work = [work for _, work in made.work]
            return 0, made.into
        self.graphs.append([node for node, _ in made.work])
        self.nodes.update(made.work)
        return 0, len(self.graphs)

    def cuStreamGetCaptureInfo(self, stream):
        mine = self.capture_of(stream)
        if mine is None or not mine.valid:
            return INVALIDATED, 0, 0, 0, 0, 0
        self.told = (ctypes.c_void_p * 1)(*(node for node, _ in mine.work[-1:]))
        return 0, 1, 1, id(mine), ctypes.addressof(self.told), len(mine.work[-1:])

    # A conditional node is one that does the work of its own graph while its handle is set.
    def cuStreamBeginCaptureToGraph(self, stream, graph, behind, edges, count, mode):
        assert graph in self.loops and not count
        return (self.begin_capture(stream, mode, self.current, graph),)

    def cuGraphConditionalHandleCreate(self, graph, context, value, flags):
        assert context == CONTEXT
        handle = next(self.numbers)
        self.conditions[handle] = value
        return 0, handle

    def cuGraphAddNode(self, graph, behind, count, parameters):
        told = libcuda.ConditionalNode.from_address(parameters)
        assert (told.kind, told.condition, told.size) == (13, 1, 1)
        mine = next(c for c in self.captures if id(c) == graph)
        node, body = next(self.numbers), next(self.numbers)
        self.loops[body] = loop = Loop(self, told.handle)
        loop.bodies = (ctypes.c_void_p * 1)(body)
        told.bodies = loop.bodies
        mine.ask(mine.origin, node, loop)
        return 0, node

    def cuStreamUpdateCaptureDependencies(self, stream, nodes, count, flags):
        (node,) = (ctypes.c_void_p * count).from_address(nodes)
        assert flags == 1 and node == self.capture_of(stream).work[-1][0]
        return (0,)

    def cuDriverGetVersion(self):
        return 0, 12080

    def cuGraphGetNodes(self, graph, nodes, count):
        found = self.graphs[graph - 1]
        if nodes is not None:
            (ctypes.c_void_p * count).from_address(nodes)[:] = found
        return 0, len(found)

    def cuGraphNodeGetType(self, node):
        work = self.nodes[node]
        return 0, libcuda.KERNEL_NODE if getattr(work, "kernel", False) else (
            libcuda.COPY_NODE if isinstance(work, Copy) else
            libcuda.CONDITIONAL_NODE if isinstance(work, Loop) else MEMSET_NODE)

    def cuGraphKernelNodeGetParams(self, node, at):
        ctypes.c_uint64.from_address(at).value = node
        return (0,)

    def cuGraphExecKernelNodeSetParams(self, executable, node, at):
        new = ctypes.c_uint64.from_address(at).value
        if node not in self.nodes or new not in self.nodes:
            return (INVALID_VALUE,)
        self.executables[executable - 1][node] = self.nodes[new]
        self.node_updates += 1
        return (0,)

    cuGraphMemcpyNodeGetParams = cuGraphKernelNodeGetParams

    def cuGraphExecMemcpyNodeSetParams(self, executable, node, at, context):
        assert context == CONTEXT
        return self.cuGraphExecKernelNodeSetParams(executable, node, at)

    def cuGraphInstantiateWithParams(self, graph, parameters):
        self.executables.append({n: self.nodes[n] for n in self.graphs[graph - 1]})
        return 0, len(self.executables)

    def cuGraphDestroy(self, graph):
        for node in self.graphs[graph - 1]:
            del self.nodes[node]
        return (0,)

    def cuGraphLaunch(self, executable, stream):
        self.graph_launches += 1
        for work in list(self.executables[executable - 1].values()):
            self._do(stream, work, self.late == "kernels")
        return (0,)

    def cuGraphExecDestroy(self, executable):
        return (0,)

    def cuCtxGetCurrent(self):
        return 0, self.current

    def cuCtxSetCurrent(self, context):
        self.current = context
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0, self.exchange_mode(mode)

    def cuStreamIsCapturing(self, stream):
        return 0, int(self.capture_of(stream) is not None) or self.capturing

    def cuDeviceGetCount(self):
        return 0, 1

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetName(self, name, length, handle):
        """The bytes behind the terminating zero are whatever was there."""
        name.raw = b"NVIDIA H200".ljust(length - 16, b"\0") + 16 * b" "
        return (0,)

    def cuDeviceTotalMem(self, handle):
        return 0, 140 << 30

    def cuDeviceGetAttribute(self, code, handle):
        return 0, 9 if code == libcuda.DEVICE_ATTRIBUTES["COMPUTE_CAPABILITY_MAJOR"] else 0

    def cuDevicePrimaryCtxRetain(self, handle):
        return 0, CONTEXT

    def cuTensorMapEncodeTiled(self, at, type, rank, address, shape, strides, box, steps, *modes):
        """As the driver: strides that are a null pointer are refused, whatever the rank."""
        if at % 64 or not strides or len(strides) < rank - 1 or any(s % 16 for s in strides):
            return (INVALID_VALUE,)
        ctypes.memmove(at, bytes([rank]).ljust(128, b"\0"), 128)
        self.encoded = SimpleNamespace(type=type, rank=rank, shape=list(shape),
                                       strides=list(strides), box=list(box), modes=modes)
        return (0,)

    def cuTensorMapEncodeIm2col(self, at, type, rank, address, shape, strides, first, last,
                                channels, pixels, steps, *modes):
        if at % 64 or rank < 3 or any(s % 16 for s in strides):
            return (INVALID_VALUE,)
        ctypes.memmove(at, bytes([rank]).ljust(128, b"\0"), 128)
        self.encoded = SimpleNamespace(
            type=type, rank=rank, shape=list(shape), strides=list(strides), first=list(first),
            last=list(last), box=[channels, pixels], steps=list(steps), modes=modes)
        return (0,)

    def cuModuleLoadData(self, cubin):
        return self.unsafe("cuModuleLoadData"), cubin

    def cuModuleGetFunction(self, module, name):
        self.handles.append((name, self.current))
        return 0, len(self.handles)

    def cuFuncSetAttribute(self, *_):
        return (0,)

    def cuFuncGetAttribute(self, *_):
        return 0, 32

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_):
        return 0, 4

    def cuOccupancyMaxActiveClusters(self, function, config):
        return 0, self.clusters

    def cuMemAlloc(self, nbytes):
        """Between bytes that nobody may write."""
        if status := self.unsafe("cuMemAlloc"):
            return status, 0
        return 0, self._allocated(nbytes)

    def _allocated(self, nbytes):
        memory = ctypes.create_string_buffer(FENCE + bytes(nbytes) + FENCE, nbytes + 2 * len(FENCE))
        pointer = ctypes.addressof(memory) + len(FENCE)
        self.memory[pointer] = memory
        return pointer

    def check_fences(self):
        """Nothing was written before or behind what was allocated."""
        for memory in self.memory.values():
            held, n = memory.raw, len(FENCE)
            assert held[:n] == FENCE == held[-n:], f"written outside of {len(held) - 2 * n} bytes"

    def cuMemFree(self, pointer):
        return (self.unsafe("cuMemFree"),)

    cuMemFreeHost = cuMemFree

    def cuMemFreeAsync(self, pointer, stream):
        return (0,)

    def cuMemAllocAsync(self, nbytes, stream):
        return 0, self._allocated(nbytes)

    def cuDeviceGetDefaultMemPool(self, handle):
        return 0, 55

    def cuMemPoolSetAttribute(self, pool, attribute, value):
        if attribute == HIGH:
            self.pool[HIGH] = self.pool[USED]
        return (0,)

    def cuMemPoolGetAttribute(self, pool, attribute, value):
        ctypes.c_uint64.from_address(value).value = self.pool[attribute]
        return (0,)

    def cuMemPoolTrimTo(self, pool, nbytes):
        if status := self.unsafe("cuMemPoolTrimTo"):
            return (status,)
        self.trims += 1
        self.pool[RESERVED] = self.pool[USED]
        return (0,)

    def cuMemGetInfo(self):
        return 0, 1 << 30, 140 << 30

    def cuMemcpyDtoHAsync(self, target, source, nbytes, stream):
        late = "copies" if stream else "kernels"  # those of the default stream are among kernels
        return (self._do(stream, Copy(target, source, nbytes), self.late == late),)

    cuMemcpyDtoDAsync = cuMemcpyDtoHAsync

    def cuMemcpyPeer(self, target, target_context, source, source_context, nbytes):
        for context in (target_context, source_context):  # it comes behind the work of both
            if status := self.waits_for_context(context, "cuMemcpyPeer"):
                return (status,)
        self.cuCtxSynchronize()
        return self.cuMemcpyDtoHAsync(target, source, nbytes, 0)

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        """What lies in pageable memory is read before this returns, on the default stream."""
        if stream:
            return self.cuMemcpyDtoHAsync(target, source, nbytes, stream)
        held = ctypes.string_at(source, nbytes)
        return (self._do(stream, lambda: ctypes.memmove(target, held, nbytes),
                         self.late == "kernels"),)

    def cuGetErrorString(self, status):
        return 0, b"words of the driver"

    def cuGetErrorName(self, status):
        return 0, self.names.get(status, b"")

    def cuPointerGetAttribute(self, which, pointer):
        return 0, 0

    def cuMemsetD8Async(self, pointer, byte, nbytes, stream):
        return (self._do(stream, lambda: ctypes.memset(pointer, byte, nbytes),
                         self.late == "kernels"),)

    def cuMemHostAlloc(self, nbytes, flags):
        return self.cuMemAlloc(nbytes)

    def cuMemHostGetDevicePointer(self, pointer, flags):
        return 0, pointer

    def judge(self, handle, condition, numbers):
        """What conditional_nodes.GOES_ON says."""
        self.conditions[handle] = ctypes.c_uint8.from_address(condition).value
        words = (ctypes.c_int64 * 3).from_address(numbers)
        words[0], words[2] = words[0] + 1, words[0]

    def launch(self, config, function, addresses, extra):
        """As the driver: on the default stream only in the function's own context."""
        told = libcuda.LaunchConfig.from_address(config.value)
        name, home = self.handles[function.value - 1]
        if self.current != home and (not told.stream or not self.current):
            return libcuda.INVALID_HANDLE if self.current else libcuda.INVALID_CONTEXT
        if self.status:
            return self.status
        kinds = self.formats[name]
        pointers = (ctypes.c_void_p * len(kinds)).from_address(addresses.value)
        values = [struct.unpack_from("<" + k, ctypes.string_at(p, 8))[0]
                  for k, p in zip(kinds, pointers, strict=True)]
        said = (libcuda.LaunchAttribute * told.attribute_count).from_address(told.attributes or
                                                                             config.value)
        self.launches.append(SimpleNamespace(
            f=name, grid=(told.x, told.y, told.z), threads=told.threads_x,
            shared=told.shared_bytes, stream=told.stream or 0, values=values, context=home,
            attributes={one.id: tuple(one.value[:3]) for one in said}))
        if self.run is not None:
            this = self.launches[-1]
            return self._do(this.stream, Kernel(self, this), self.late == "kernels")
        return 0


def forget_calls():
    """Programs of calls outside of traces are for the GPUs of one test."""
    for calls in eager_forms.CALLS.values():
        calls.forget()


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    for part in (device, buffer, copies, offloaded, graphs, graph_events, staging, memory_pools,
                 module, arrays, tensormap, flags, timing, recipe, resident, results,
                 collective_steps, window_memory, conditional_nodes):
        if hasattr(part, "driver"):
            monkeypatch.setattr(part, "driver", lambda: fake)
    one = device.Device(0, "fake", (9, 0), 1 << 30, 132, 1 << 20, 232448, 65536, CONTEXT)
    two = device.Device(1, "fake", (9, 0), 1 << 30, 132, 1 << 20, 232448, 65536, CONTEXT + 1)
    monkeypatch.setattr(device, "_devices", {0: one, 1: two})
    for table in (memory_pools.SPARE, memory_pools.LIVE, memory_pools._large):
        table.clear()
    for part, name in ((buffer, "_free"), (buffer, "_to_pool"), (copies, "_free_host"),
                       (copies, "_close"), (offloaded, "_destroy"), (graphs, "_destroy"),
                       (window_memory, "_free")):
        monkeypatch.setattr(part, name, fake.while_it_lasts(getattr(part, name)))
    kept = (buffer._copies, memory_pools.keep_freed, flags.error_flags, flags.printed_lines,
            results.numbers, offloaded.copy_streams, graphs.recording_stream,
            counter_words.counter_words, conditional_nodes.has_conditional_nodes,
            conditional_nodes._kernel)
    for made in kept:
        made.cache_clear()
    forget_calls()
    monkeypatch.setattr(flags, "_flags", {})
    monkeypatch.setattr(buffer, "_spare", {})
    monkeypatch.setattr(buffer, "_streams", {0, 1, 2})
    monkeypatch.setattr(offloaded, "_SPARE_BLOCKS", {})
    monkeypatch.setattr(sentinel_words, "_words", {})
    monkeypatch.setattr(buffer, "_NUMBERS", {})
    yield fake
    fake.gone = True
    forget_calls()
    fake.check_fences()
    assert not fake.spoilt, "a graph was spoilt: " + "; ".join(fake.spoilt)
    for made in kept:
        made.cache_clear()
