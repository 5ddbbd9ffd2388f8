"""A compiled kernel, loaded on the devices that run it, and its launches.

    kernel = LoadedKernel(cubin, "softmax", ("i64", "i64", "i32"), target=target, threads=128,
                          shared_bytes=65536)
    kernel.launch((rows,), (x.data_ptr(), y.data_ptr(), n), stream=0, device=0)
    start = kernel.prepare((rows,), {2: n}, (0, 1))     # n is packed once
    start(stream, x.data_ptr(), y.data_ptr())           # and these at each launch
    again = kernel.bind((rows,), values, stream)        # packed once; again() only launches

Launching calls the driver once and allocates nothing, so it is safe under graph capture; loading
happens at the first launch on a device, in relaxed capture mode.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from ..errors import ArgumentError, UnsupportedTargetError
from ..lazy_dataclass import dataclass
from . import device as devices
from . import libcuda
from .device import Device, check, driver, outside_capture
from .libcuda import LaunchAttribute, LaunchConfig
from .target import Target, target_for

# struct format of a parameter in its own 8 bytes; pointers are i64.
FORMATS = {"i32": "i4x", "i64": "q", "f32": "f4x", "f64": "d"}
MOST_PORTABLE_CLUSTER = 8
# Statuses of a launch while another context is current, or none.
ELSEWHERE = frozenset({libcuda.INVALID_CONTEXT, libcuda.INVALID_HANDLE,
                       libcuda.CONTEXT_IS_DESTROYED})

Grid = tuple[int, ...]


class LaunchParameters:
    """What the driver reads at one launch: values, the addresses of each, grid and stream.

    call: the arguments of Library.launch. A block serves one launch at a time, since the driver
    lets other threads run while it reads.
    """

    __slots__ = ("memory", "call", "stream", "grid", "_config", "_kept")

    def __init__(self, kernel: LoadedKernel, function: int, slots: Sequence[int]):
        """slots: where in the memory, in units of 8 bytes, each parameter lies."""
        count = max(len(slots), 1)
        self.memory = (ctypes.c_char * (8 * count))()
        first = ctypes.addressof(self.memory)
        addresses = (ctypes.c_void_p * count)(*(first + 8 * i for i in slots))
        attributes = kernel.attributes()
        self._config = kernel.config((1, 1, 1), attributes)
        self._kept = addresses, attributes
        self.call = (ctypes.c_void_p(ctypes.addressof(self._config)), ctypes.c_void_p(function),
                     ctypes.c_void_p(ctypes.addressof(addresses)), None)
        self.stream = 0
        self.grid: Grid = (1, 1, 1)

    def to_stream(self, stream: int) -> None:
        self._config.stream = self.stream = stream

    def to_grid(self, grid: Grid, given: Grid) -> None:
        """grid: of three extents, given as `given`."""
        self._config.x, self._config.y, self._config.z = grid
        self.grid = given


@dataclass(frozen=True)
class Loaded:
    """A kernel on one device: its handle, and what the driver says it takes.

    clusters: that run at one time. Multiprocessors come in groups of some, and a cluster lies in
    one of these, so not every multiprocessor may have a part of one.
    """

    device: Device
    module: int
    function: int
    registers: int
    clusters: int
    free: list[LaunchParameters] = field(default_factory=list,
                                         compare=False)  # append and pop are atomic


class LoadedKernel:
    """Machine code of one kernel with typed parameters. Thread-safe."""

    def __init__(self, cubin: bytes, name: str, parameters: Sequence[str], *, target: Target,
                 threads: int, shared_bytes: int = 0, cluster: Grid = (), dependent: bool = False):
        """target: that of the cubin. cluster: blocks of a cluster along each axis of the grid.

        dependent: may start before the previous kernel of the stream ends (programmatic dependent
        launch); the kernel waits itself before it reads that one's results.
        """
        self.cubin, self.name, self.parameters = cubin, name, tuple(parameters)
        self.target, self.threads, self.shared_bytes = target, threads, shared_bytes
        self.cluster, self.dependent = _three(cluster, "cluster"), dependent
        self._struct = struct.Struct(_layout(self.parameters, range(len(self.parameters))))
        self._loaded: dict[int, Loaded] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<LoadedKernel {self.name}({', '.join(self.parameters)}), {self.threads} threads>"

    def on(self, index: int = 0) -> Loaded:
        """The kernel on device `index`, loaded when it is not yet."""
        found = self._loaded.get(index)
        if found is None:
            with self._lock:
                if index not in self._loaded:
                    self._loaded[index] = self._load(devices.device(index))
                found = self._loaded[index]
        return found

    def _check(self, on: Device) -> None:
        """Raise, in our words, for what the driver would refuse."""
        if not self.target.loads_on(on.cc):
            raise UnsupportedTargetError(
                f"kernel {self.name} is compiled for {self.target}, {on} has compute capability "
                f"{on.cc[0]}.{on.cc[1]}", hint=f"compile it for {target_for(on.cc)}; build without "
                                               "a target takes the device's")
        if self.shared_bytes > on.shared_bytes:
            raise ArgumentError(
                f"kernel {self.name} needs {self.shared_bytes} bytes of shared memory, {on} gives "
                f"a block {on.shared_bytes}", hint="use smaller tiles or fewer stages")

    def _load(self, on: Device) -> Loaded:
        self._check(on)
        library = driver()
        with on.current(), outside_capture():
            what = f"load kernel {self.name} on {on}"
            module = check(library.cuModuleLoadData(self.cubin), what)
            function = check(library.cuModuleGetFunction(module, self.name.encode()), what)
            if self.shared_bytes > 0:
                most = libcuda.FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(library.cuFuncSetAttribute(function, most, self.shared_bytes), what)
            x, y, z = self.cluster
            if x * y * z > MOST_PORTABLE_CLUSTER:
                large = libcuda.FUNC_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                check(library.cuFuncSetAttribute(function, large, 1), what)
            registers = check(library.cuFuncGetAttribute(libcuda.FUNC_NUM_REGS, function), what)
            blocks = check(library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                function, self.threads, self.shared_bytes), what)
            clusters = blocks * on.multiprocessors
            if x * y * z > 1:
                attributes = self.attributes()
                config = self.config((x, y, z), attributes)
                config.attribute_count = 1  # the cluster
                clusters = check(library.cuOccupancyMaxActiveClusters(
                    function, ctypes.addressof(config)), what)
        return Loaded(on, module, function, registers, clusters)

    def config(self, grid: Grid, attributes: ctypes.Array[LaunchAttribute]) -> LaunchConfig:
        """Of a launch on the default stream. It names the memory of the attributes."""
        return LaunchConfig(*grid, self.threads, 1, 1, self.shared_bytes, None,
                            ctypes.addressof(attributes) if len(attributes) else None,
                            len(attributes))

    def attributes(self) -> ctypes.Array[LaunchAttribute]:
        """What a launch says besides its grid."""
        chosen = []
        if self.cluster != (1, 1, 1):
            chosen.append((libcuda.LAUNCH_CLUSTER_DIMENSION, self.cluster))
        if self.dependent:
            chosen.append((libcuda.LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
        made = (LaunchAttribute * len(chosen))()
        for one, (number, value) in zip(made, chosen, strict=True):
            one.id, one.value[:len(value)] = number, value
        return made

    # --- launching ----------------------------------------------------------------------------
    def launch(self, grid: Grid, values: Sequence[float], *, stream: int = 0,
               device: int = 0) -> None:
        """Run `grid` blocks with these parameter values on a stream; returns before they end."""
        loaded = self._loaded.get(device) or self.on(device)
        try:
            block = loaded.free.pop()
        except IndexError:
            block = LaunchParameters(self, loaded.function, range(len(self.parameters)))
        try:
            self._struct.pack_into(block.memory, 0, *values)
        except (struct.error, OverflowError) as error:
            raise self.refusal(values, error) from None
        if block.grid != grid:
            block.to_grid(self.blocks(grid), grid)
        if block.stream != stream:
            block.to_stream(stream)
        status = driver().launch(*block.call)
        if status:
            self.again(loaded, block, status)
        loaded.free.append(block)

    def bind(self, grid: Grid, values: Sequence[float], *, stream: int = 0,
             device: int = 0) -> Callable[[], None]:
        """The launch with everything decided: call it as often as wanted."""
        start = self.prepare(grid, dict(enumerate(values)), (), device=device)
        return lambda: start(stream)

    def prepare(self, grid: Grid, fixed: Mapping[int, float], given: Sequence[int], *,
                device: int = 0) -> Callable[..., None]:
        """The launch with its grid and some values decided: call it with a stream and the others.

        fixed: values by the number of their parameter. given: the parameters of the others, in the
        order in which they will be passed. The call raises struct.error or OverflowError for
        values that do not fit. Thread-safe.
        """
        if sorted((*fixed, *given)) != list(range(len(self.parameters))):
            raise ArgumentError(
                f"kernel {self.name} takes ({', '.join(self.parameters)}), is prepared with the "
                f"parameters {sorted((*fixed, *given))}", hint="each one once, fixed or given")
        loaded, blocks = self.on(device), self.blocks(grid)

        def made() -> LaunchParameters:
            block = self._half_packed(loaded.function, dict(fixed), tuple(given))
            block.to_grid(blocks, grid)
            return block

        free = [made()]
        pack_into = struct.Struct(_layout(self.parameters, given)).pack_into
        start, start_with = _prepared(len(given))(
            driver().launch, free.pop, made, free.append, pack_into,
            functools.partial(self.again, loaded))
        start.kernel, start.device, start.launch = self, device, driver().launch
        start.start_with, start.used = start_with, start.launch
        for watcher in _watchers:
            _wrap(start, watcher)
        _starts.add(start)
        return start

    def _half_packed(self, function: int, fixed: dict[int, float],
                     given: tuple[int, ...]) -> LaunchParameters:
        """A block with room for the given values first and the fixed ones filled in behind."""
        order = (*given, *fixed)
        block = LaunchParameters(self, function, [order.index(i) for i in range(len(order))])
        try:
            struct.pack_into(_layout(self.parameters, tuple(fixed)), block.memory, 8 * len(given),
                             *fixed.values())
        except (struct.error, OverflowError) as error:
            raise self.refusal(tuple(fixed.values()), error) from None
        return block

    def refusal(self, values: Sequence[float], error: Exception) -> ArgumentError:
        """For values that do not fit the parameters."""
        return ArgumentError(f"kernel {self.name} takes ({', '.join(self.parameters)}), is given "
                             f"{tuple(values)}: {error}")

    def blocks(self, grid: Grid) -> Grid:
        """Three extents of a grid. Raises ArgumentError for one that cannot be launched."""
        extents = _three(grid, "grid")
        for axis, (blocks, group) in enumerate(zip(extents, self.cluster, strict=True)):
            if blocks % group:
                raise ArgumentError(f"grid {grid} of kernel {self.name}: axis {axis} has {blocks} "
                                    f"blocks, clusters take {group}")
        return extents

    def again(self, loaded: Loaded, block: LaunchParameters, status: int) -> None:
        """After a launch that failed: once more in the kernel's own context, when that may help.

        The driver refuses a launch in another device's context, unless the stream is one of the
        kernel's (measured on two H200, driver 580.159, 2026-11-21): nothing ran then.
        Asking for the context before each launch would cost 0.3 us.
        """
        if status in ELSEWHERE:
            with loaded.device.current():
                status = driver().launch(*block.call)
        if status:
            check((status,), f"launch {self.name} with grid {block.grid}, {self.threads} threads "
                             f"and {self.shared_bytes} bytes of shared memory")


# --- watching ---------------------------------------------------------------------------------
_starts: weakref.WeakSet[Any] = weakref.WeakSet()  # prepared launches that are alive
_watchers: list[Any] = []


def watch(watcher: Any) -> None:
    """watcher.wrap(kernel, device, launch) takes the place of the driver's launch in what is
    prepared, until `unwatch`. Launches that nobody watches pay nothing for it."""
    _watchers.append(watcher)
    for start in list(_starts):
        _wrap(start, watcher)


def unwatch(watcher: Any) -> None:
    _watchers.remove(watcher)
    for start in list(_starts):
        _use(start, start.launch)
        for other in _watchers:
            _wrap(start, other)


def _wrap(start: Any, watcher: Any) -> None:
    _use(start, watcher.wrap(start.kernel, start.device, start.used))


def _use(start: Any, launch: Callable[..., int]) -> None:
    start.used = launch
    start.start_with(launch)


_PREPARED = """\
def prepared(launch, pop, made, append, pack_into, again):
    def start(stream{values}):
        try:
            block = pop()
        except IndexError:  # another thread is launching
            block = made()
        pack_into(block.memory, 0{values})
        if block.stream != stream:
            block.to_stream(stream)
        status = launch(*block.call)
        if status:
            again(block, status)
        append(block)

    def start_with(other):
        nonlocal launch
        launch = other

    return start, start_with
"""


@functools.cache
def _prepared(count: int) -> Callable[..., tuple[Any, Callable[[Callable[..., int]], None]]]:
    """Makes a prepared launch of that many values, and what changes the launch that it calls.
    Passing the values on as *values costs 0.2 us of the 0.7 that a launch takes above the driver's
    own time, so they have names."""
    scope: dict[str, Any] = {}
    text = _PREPARED.format(values="".join(f", v{i}" for i in range(count)))
    exec(compile(text, "<a prepared launch>", "exec"), scope)
    return scope["prepared"]


def _layout(parameters: Sequence[str], chosen: Sequence[int]) -> str:
    return "<" + "".join(FORMATS[parameters[i]] for i in chosen)


def _three(extents: Grid, what: str) -> Grid:
    if len(extents) > 3 or any(not isinstance(e, int) or e < 1 for e in extents):
        raise ArgumentError(f"{what}={extents}", hint="one to three positive ints")
    return (*extents, *(1,) * (3 - len(extents)))
