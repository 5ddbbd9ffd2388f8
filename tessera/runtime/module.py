"""A compiled kernel, loaded on the devices that run it, and its launches.

    kernel = Kernel(cubin, "softmax", ("i64", "i64", "i32"), target=target, threads=128,
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
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, UnsupportedTargetError
from . import device as devices
from .device import Device, check, driver, outside_capture, restore
from .target import Target, target_for

# struct format of a parameter in its own 8 bytes; pointers are i64.
FORMATS = {"i32": "i4x", "i64": "q", "f32": "f4x", "f64": "d"}
MOST_PORTABLE_CLUSTER = 8
_CONFIGS_KEPT = 256

Grid = tuple[int, ...]


class Packed:
    """Parameter values in memory, and the array of their addresses that the driver reads."""

    __slots__ = ("memory", "addresses", "at")

    def __init__(self, slots: Sequence[int]):
        """slots: where in the memory, in units of 8 bytes, each parameter lies."""
        count = max(len(slots), 1)
        self.memory = (ctypes.c_char * (8 * count))()
        first = ctypes.addressof(self.memory)
        self.addresses = (ctypes.c_void_p * count)(*(first + 8 * i for i in slots))
        self.at = ctypes.addressof(self.addresses)


@dataclass(frozen=True)
class Loaded:
    """A kernel on one device: its handle, and what the driver says it takes."""

    device: Device
    module: Any
    function: Any
    registers: int
    local_bytes: int
    blocks_per_multiprocessor: int


class Kernel:
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
        self._extended = self.cluster != (1, 1, 1) or dependent
        self._struct = struct.Struct("<" + "".join(FORMATS[p] for p in self.parameters))
        self._loaded: dict[int, Loaded] = {}
        self._free: list[Packed] = []  # append and pop are atomic
        self._configs: dict[tuple, Any] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Kernel {self.name}({', '.join(self.parameters)}), {self.threads} threads>"

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
        bindings = driver()
        with on.current(), outside_capture():
            what = f"load kernel {self.name} on {on}"
            module = check(bindings.cuModuleLoadData(self.cubin), what)
            function = check(bindings.cuModuleGetFunction(module, self.name.encode()), what)
            attributes = bindings.CUfunction_attribute
            if self.shared_bytes > 0:
                most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(bindings.cuFuncSetAttribute(function, most, self.shared_bytes), what)
            x, y, z = self.cluster
            if x * y * z > MOST_PORTABLE_CLUSTER:
                large = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                check(bindings.cuFuncSetAttribute(function, large, 1), what)
            registers = check(bindings.cuFuncGetAttribute(
                attributes.CU_FUNC_ATTRIBUTE_NUM_REGS, function), what)
            local = check(bindings.cuFuncGetAttribute(
                attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function), what)
            blocks = check(bindings.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                function, self.threads, self.shared_bytes), what)
        return Loaded(on, module, function, registers, local, blocks)

    # --- launching ----------------------------------------------------------------------------
    def launch(self, grid: Grid, values: Sequence[float], *, stream: int = 0,
               device: int = 0) -> None:
        """Run `grid` blocks with these parameter values on a stream; returns before they end."""
        loaded = self._loaded.get(device) or self.on(device)
        try:
            packed = self._free.pop()
        except IndexError:
            packed = Packed(range(len(self.parameters)))
        try:
            self._pack(packed, values)
            self.start(loaded, grid, packed, stream)
        finally:
            self._free.append(packed)

    def bind(self, grid: Grid, values: Sequence[float], *, stream: int = 0,
             device: int = 0) -> Callable[[], None]:
        """The launch with everything decided: call it as often as wanted."""
        start = self.prepare(grid, dict(enumerate(values)), (), device=device)
        return lambda: start(stream)

    def prepare(self, grid: Grid, fixed: Mapping[int, float], given: Sequence[int], *,
                device: int = 0) -> Prepared:
        """The launch with its grid and some values decided: call it with a stream and the others.

        fixed: values by the number of their parameter. given: the parameters of the others, in the
        order in which they will be passed.
        """
        if sorted((*fixed, *given)) != list(range(len(self.parameters))):
            raise ArgumentError(
                f"kernel {self.name} takes ({', '.join(self.parameters)}), is prepared with the "
                f"parameters {sorted((*fixed, *given))}", hint="each one once, fixed or given")
        return Prepared(self, self.on(device), _three(grid, "grid"), dict(fixed), tuple(given))

    def _pack(self, packed: Packed, values: Sequence[float]) -> None:
        try:
            self._struct.pack_into(packed.memory, 0, *values)
        except (struct.error, OverflowError) as error:
            raise self.refusal(values, error) from None

    def refusal(self, values: Sequence[float], error: Exception) -> ArgumentError:
        """For values that do not fit the parameters."""
        return ArgumentError(f"kernel {self.name} takes ({', '.join(self.parameters)}), is given "
                             f"{tuple(values)}: {error}")

    def start(self, loaded: Loaded, grid: Grid, packed: Packed, stream: int) -> None:
        """Launch with packed parameters; in the device's context, which is rarely another."""
        bindings = driver()
        before = int(bindings.cuCtxGetCurrent()[1])
        before = 0 if before == loaded.device.context else loaded.device.activate()
        if self._extended:
            config = self._config(grid, stream)
            status = bindings.cuLaunchKernelEx(config, loaded.function, packed.at, 0)
        else:
            x, y, z = grid if len(grid) == 3 else _three(grid, "grid")
            status = bindings.cuLaunchKernel(loaded.function, x, y, z, self.threads, 1, 1,
                                             self.shared_bytes, stream, packed.at, 0)
        if before:
            restore(before)
        if status[0] != 0:
            check(status, f"launch {self.name} with grid {grid}, {self.threads} threads and "
                          f"{self.shared_bytes} bytes of shared memory")

    def _config(self, grid: Grid, stream: int) -> Any:
        """The driver's record of an extended launch; kept, since making one costs microseconds."""
        found = self._configs.get((grid, stream))
        if found is None:
            found = self._make_config(_three(grid, "grid"), stream)
            if len(self._configs) >= _CONFIGS_KEPT:
                self._configs.clear()
            self._configs[grid, stream] = found
        return found

    def _make_config(self, grid: Grid, stream: int) -> Any:
        for axis, (blocks, group) in enumerate(zip(grid, self.cluster, strict=True)):
            if blocks % group:
                raise ArgumentError(f"grid {grid} of kernel {self.name}: axis {axis} has {blocks} "
                                    f"blocks, clusters take {group}")
        bindings = driver()
        config, identities = bindings.CUlaunchConfig(), bindings.CUlaunchAttributeID
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, bindings.CUstream(stream)
        chosen = []
        if self.cluster != (1, 1, 1):
            one = bindings.CUlaunchAttribute()
            one.id = identities.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = one.value.clusterDim
            dims.x, dims.y, dims.z = self.cluster
            chosen.append(one)
        if self.dependent:
            one = bindings.CUlaunchAttribute()
            one.id = identities.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            one.value.programmaticStreamSerializationAllowed = 1
            chosen.append(one)
        config.attrs, config.numAttrs = chosen, len(chosen)
        return config


class Prepared:
    """Launches of one kernel on one device that differ in a few values; thread-safe.

    Each thread packs into a block of its own, since the driver lets others run while it reads.
    """

    __slots__ = ("kernel", "loaded", "grid", "_fixed", "_given", "_pack_into", "_free")

    def __init__(self, kernel: Kernel, loaded: Loaded, grid: Grid, fixed: dict[int, float],
                 given: tuple[int, ...]):
        self.kernel, self.loaded, self.grid = kernel, loaded, grid
        self._fixed, self._given, self._free = fixed, given, []
        self._pack_into = struct.Struct(
            "<" + "".join(FORMATS[kernel.parameters[i]] for i in given)).pack_into
        self._free.append(self._block())

    def _block(self) -> Packed:
        """Memory with the given values first and the fixed ones, which are filled in, behind."""
        order = (*self._given, *self._fixed)
        packed = Packed([order.index(i) for i in range(len(order))])
        layout = "<" + "".join(FORMATS[self.kernel.parameters[i]] for i in self._fixed)
        try:
            struct.pack_into(layout, packed.memory, 8 * len(self._given), *self._fixed.values())
        except (struct.error, OverflowError) as error:
            raise self.kernel.refusal(tuple(self._fixed.values()), error) from None
        return packed

    def __call__(self, stream: int, *values: float) -> None:
        """Launch. Raises struct.error or OverflowError for values that do not fit."""
        try:
            packed = self._free.pop()
        except IndexError:
            packed = self._block()
        try:
            self._pack_into(packed.memory, 0, *values)
            self.kernel.start(self.loaded, self.grid, packed, stream)
        finally:
            self._free.append(packed)


def _three(extents: Grid, what: str) -> Grid:
    if len(extents) > 3 or any(not isinstance(e, int) or e < 1 for e in extents):
        raise ArgumentError(f"{what}={extents}", hint="one to three positive ints")
    return (*extents, *(1,) * (3 - len(extents)))
