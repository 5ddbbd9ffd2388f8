"""Graph functions on a GPU: the planned memory, and the kernels and copies of each call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import config
from ...kernels.routine import ForeignArray
from ...runtime.buffer import DEFAULT, own_stream
from ...runtime.buffer import DeviceBuffer as Memory
from ...runtime.copies import CopyQueue, PinnedMemory
from ...runtime.device import Device, device
from ...runtime.graphs import DeviceGraph
from ...tensor import Tensor
from ...tile.launch.resident import Resident
from ..ir import Graph
from ..schedule.ir import ByteRange, PlannedBuffer, Transfer, aligned
from ..schedule.offload import waits
from .node_kernels import NodeLaunch
from .run import CudaProgram, GroupLaunch


class DeviceExecutable:
    """A graph compiled for a GPU: `tensors(leaves) -> tensors`, results in new memory there.

    Arguments and captured tensors on the host are copied to the GPU at each call, those that lie
    there are read there. One call runs at a time, behind what was launched before; nothing waits
    for it but what reads a result on the host. Raises UnsupportedTargetError at an op without a
    kernel.
    """

    def __init__(self, graph: Graph, index: int = 0, capture: bool = False):
        self.graph, self.device, self._capture = graph, device(index), capture
        self.program = CudaProgram(graph, self.device.target)
        self._workspace: Workspace | None = None
        self._lock = threading.Lock()

    @property
    def compiled(self) -> DeviceExecutable:
        return self

    def describe(self) -> str:
        """The Schedule IR."""
        return str(self.program.plan)

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Host arrays in and out."""
        leaves = [Tensor(a, v.aval.type) for a, v in zip(arrays, self.graph.inputs, strict=True)]
        return [y.array for y in self.tensors(leaves)]

    def tensors(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        with self._lock:
            if self._workspace is None:
                self._workspace = Workspace(self.program, self.device)
            results = self._workspace.run(leaves)
            if self._capture and self._workspace.recorded is None:
                self._workspace.record()  # when all kernels are loaded
            return results

    @property
    def captured(self) -> str:
        """What the next call launches at once, "" when it does so kernel by kernel."""
        space = self._workspace
        if space is None or space.recorded is None:
            return ""
        kernels, copies = len(self.program.plan.groups), len(self.program.plan.transfers)
        return f"{kernels} kernels" + (f" and {copies} copies" if copies else "")


class Workspace:
    """Memory of a program: one block for temporaries, one for each other buffer; and the arguments
    of every launch and copy, made once."""

    def __init__(self, program: CudaProgram, on: Device):
        self.program, self.device = program, on
        self.words: dict[str, np.ndarray] = {}  # what the host drew for the call under way
        self.memory: dict[str, tuple[int, Any]] = {}  # pointer and owner of each buffer
        given = {program.base(n) for n in program.plan.results}
        self.drawn = Drawn([b for b in program.plan.buffers
                            if b.kind == "drawn" and b.name not in given], on)
        self._place()
        self.steps = self._steps(DEFAULT)
        self.results = [(program.plan.buffer(n), self._at(n)[1]) for n in program.plan.results]
        self.recorded: DeviceGraph | None = None

    @property
    def device_bytes(self) -> int:
        """What was allocated on the device."""
        owners = {id(owner): owner for _, owner in self.memory.values()}
        return sum(o.nbytes for o in owners.values() if isinstance(o, Memory))

    def _place(self) -> None:
        self.block = Memory(self.program.plan.temporary_bytes, self.device)
        for b in self.program.plan.buffers:
            if b.kind == "temporary":
                self.memory[b.name] = self.block.pointer + b.offset, self.block
            elif b.kind == "host":
                held = PinnedMemory(b.nbytes, self.device)
                self.memory[b.name] = held.pointer, held
            elif b.name in self.drawn.places:
                self.memory[b.name] = self.drawn.at(b.name), self.drawn.memory
            elif b.kind != "view":
                own = Memory(b.nbytes, self.device)
                self.memory[b.name] = own.pointer, own
        with self.device.current():
            for name, array in self.program.lowered.constants.items():
                self._load(name, array)

    def record(self) -> None:
        """The steps as one graph of the driver's."""
        with own_stream(self.device) as stream:
            steps = self._steps(stream)
            self.recorded = DeviceGraph.record(self.device, stream, lambda: _all(steps))

    def _steps(self, stream: int) -> list[Callable[[], Any]]:
        """What a call does, in order: kernels go to a stream, copies to one beside it."""
        found: list[Callable[[], Any]] = []
        count = len(self.program.plan.transfers)
        copies = CopyQueue(self.device, count, stream) if count else None
        begun, leaving = 0, list[tuple[ByteRange, int]]()  # copies out of memory
        plan = self.program.plan
        free = self.program.lowered.released if config.poison else {}
        for i, (step, copy) in enumerate(zip(self.program.steps, waits(plan.steps, plan.region),
                                             strict=True)):
            if isinstance(step, GroupLaunch | NodeLaunch):
                found += [partial(copies.wait, copy)] if copies and copy is not None else []
                found += self._launch(step, stream)
            elif copies:
                found.append(self._copy(step, copies, begun))
                leaving.append((plan.region(step.on_device), begun))
                begun += 1
            for offset, size in free.get(i, ()):
                at = ByteRange("temporaries", offset, offset + size)
                pending = [n for r, n in leaving if r.meets(at)]
                if copies and pending:
                    found.append(partial(copies.wait, max(pending)))
                found.append(partial(self.block.fill, 0xFF, offset, size, stream))
        if copies:  # the next call finds all places free
            found.append(partial(copies.wait, count - 1))
        return found

    def _launch(self, launch: GroupLaunch | NodeLaunch, stream: int) -> list[Callable[[], Any]]:
        if isinstance(launch, NodeLaunch):
            return launch.steps(lambda name: self._at(name)[0], self._key, self.device.index,
                                stream)
        arguments = [self._argument(n, shape) for n, shape in launch.arguments]
        if stream == DEFAULT:
            return [partial(launch.shared, *arguments)]
        return [partial(launch.shared.launch, *arguments, stream=stream)]

    def _key(self, name: str) -> tuple[int, int]:
        """The words of a key that this call drew."""
        words = self.words[name].reshape(-1)
        return int(words[0]), int(words[1])

    def _copy(self, step: Transfer, copies: CopyQueue, number: int) -> Callable[[], Any]:
        pointer, held = self._at(step.on_device)[0], self.memory[step.on_host][1]
        if step.kind == "offload":
            return partial(copies.to_host, number, pointer, held)
        return partial(copies.to_device, number, held, pointer)

    def _at(self, name: str) -> tuple[int, Any]:
        return self.memory[self.program.base(name)]

    def _argument(self, name: str, shape: tuple[int, ...]) -> ForeignArray:
        pointer, owner = self._at(name)
        dtype = self.program.plan.buffer(self.program.base(name)).type.dtype
        return ForeignArray(pointer, shape, dtype, self.device.index, owner)

    def _load(self, name: str, x: Tensor | np.ndarray) -> None:
        """Give an input, capture or constant its elements."""
        memory = self.memory[name][1]
        if isinstance(x, Resident) and x.memory.device is self.device and not x.dtype.packed:
            if memory.nbytes:
                memory.copy(x.memory)
            return
        array = np.ascontiguousarray(x.array if isinstance(x, Tensor) else x)
        if array.size:
            memory.load(array)

    def run(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        lowered = self.program.lowered
        self.words = drawn = dict(zip(lowered.drawn, lowered.draws.run(), strict=True))
        given: list[tuple[str, Tensor | np.ndarray]] = [
            *zip(lowered.inputs, leaves, strict=True), *lowered.captures.items(),
            *((n, a) for n, a in drawn.items() if n not in self.drawn.places)]
        with self.device.current():
            for name, x in given:
                self._load(name, x)
            self.drawn.load(drawn)
            if self.recorded is not None:
                self.recorded.launch(DEFAULT)
            else:
                _all(self.steps)
            return [self._result(*r) for r in self.results]

    def _result(self, b: PlannedBuffer, memory: Memory) -> Tensor:
        """A result in memory of its own; of packed types, which graphs keep unpacked, on the host.
        """
        if b.type.dtype.packed:
            out = np.empty(b.shape, b.type.dtype.numpy)
            self.device.synchronize()
            memory.read(out)
            return Tensor(out, b.type)
        made = Resident(b.shape, b.type, self.device.index)
        if made.memory.nbytes:
            made.memory.copy(memory)
        return made


class Drawn:
    """What the host computes at each call, small values side by side: one copy takes them all."""

    def __init__(self, buffers: Sequence[PlannedBuffer], on: Device):
        self.places: dict[str, tuple[int, int]] = {}  # begin and end in bytes
        end = 0
        for b in buffers:
            self.places[b.name] = end, end + b.nbytes
            end += aligned(b)
        self.bytes, self.memory = np.zeros(end, np.uint8), Memory(end, on)

    def at(self, name: str) -> int:
        return self.memory.pointer + self.places[name][0]

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        if not self.places:
            return
        for name, (begin, end) in self.places.items():
            self.bytes[begin:end] = arrays[name].reshape(-1).view(np.uint8)
        self.memory.load(self.bytes)


def _all(steps: Sequence[Callable[[], Any]]) -> None:
    for step in steps:
        step()


__all__ = ["DeviceExecutable", "Workspace"]
