"""Graph functions on a GPU: the planned memory, and the kernels and copies of each call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...kernels.routine import View
from ...runtime.buffer import Buffer as Memory
from ...runtime.copies import CopyQueue, PinnedMemory
from ...runtime.device import Device, device
from ...tensor import Tensor
from ..ir import Graph
from .offload import waits
from .run import Launch, Program
from .schedule import Buffer, Transfer, place_bytes


class DeviceExecutable:
    """A graph compiled for a GPU: `run(arrays) -> arrays`, host arrays in and out.

    Inputs and captured tensors are copied to the GPU at each call, results back; what lies between
    stays there. One call runs at a time. Raises UnsupportedTargetError at an op without a kernel.
    """

    def __init__(self, graph: Graph, index: int = 0):
        self.graph, self.device = graph, device(index)
        self.program = Program(graph, self.device.target)
        self._workspace: Workspace | None = None
        self._lock = threading.Lock()

    @property
    def compiled(self) -> DeviceExecutable:
        return self

    def describe(self) -> str:
        """The Schedule IR."""
        return str(self.program.plan)

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with self._lock:
            if self._workspace is None:
                self._workspace = Workspace(self.program, self.device)
            return self._workspace.run(arrays)

    def tensors(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        out = self.run(arrays)
        return [Tensor(a, v.aval.type) for a, v in zip(out, self.graph.outputs, strict=True)]


class Workspace:
    """Memory of a program: one block for temporaries, one for each other buffer; and the arguments
    of every launch and copy, made once."""

    def __init__(self, program: Program, on: Device):
        self.program, self.device = program, on
        self.memory: dict[str, tuple[int, Any]] = {}  # pointer and owner of each buffer
        self._place()
        self.steps = self._steps()

    @property
    def device_bytes(self) -> int:
        """What was allocated on the device."""
        owners = {id(owner): owner for _, owner in self.memory.values()}
        return sum(o.nbytes for o in owners.values() if isinstance(o, Memory))

    @functools.cached_property
    def copies(self) -> CopyQueue:
        return CopyQueue(self.device, len(self.program.plan.transfers))

    def _place(self) -> None:
        sizes = place_bytes(self.program.plan.buffers)
        block, at = Memory(sum(sizes.values()), self.device), 0
        places = {}
        for name, nbytes in sizes.items():
            places[name] = block.pointer + at
            at += nbytes
        for b in self.program.plan.buffers:
            if b.kind == "temporary":
                self.memory[b.name] = places[b.place], block
            elif b.kind == "host":
                held = PinnedMemory(b.nbytes, self.device)
                self.memory[b.name] = held.pointer, held
            elif b.kind != "view":
                own = Memory(b.nbytes, self.device)
                self.memory[b.name] = own.pointer, own
        for name, array in self.program.lowered.constants.items():
            self._write(name, array)

    def _steps(self) -> list[Callable[[], Any]]:
        """What a call does, in order: kernels go to the default stream, copies to their own."""
        found: list[Callable[[], Any]] = []
        places = {b.name: b.place for b in self.program.plan.buffers if b.kind == "temporary"}

        def place_of(name: str) -> str:
            base = self.program.base(name)
            return places.get(base, base)

        numbers = iter(range(len(self.program.plan.transfers)))
        awaited = waits(self.program.plan.steps, place_of)
        for step, copy in zip(self.program.steps, awaited, strict=True):
            if copy is not None:
                found.append(functools.partial(self.copies.wait, copy))
            found.append(self._launch(step) if isinstance(step, Launch)
                         else self._copy(step, next(numbers)))
        return found

    def _launch(self, launch: Launch) -> Callable[[], Any]:
        return functools.partial(launch.kernel, *(self._argument(n, shape)
                                                  for n, shape in launch.arguments))

    def _copy(self, step: Transfer, number: int) -> Callable[[], Any]:
        pointer, held = self._at(step.on_device)[0], self.memory[step.on_host][1]
        if step.kind == "offload":
            return functools.partial(self.copies.to_host, number, pointer, held)
        return functools.partial(self.copies.to_device, number, held, pointer)

    def _at(self, name: str) -> tuple[int, Any]:
        return self.memory[self.program.base(name)]

    def _argument(self, name: str, shape: tuple[int, ...]) -> View:
        pointer, owner = self._at(name)
        dtype = self.program.plan.buffer(self.program.base(name)).type.dtype
        return View(pointer, shape, dtype, self.device.index, owner)

    def _write(self, name: str, array: np.ndarray) -> None:
        if array.size:
            self.memory[name][1].write(np.ascontiguousarray(array))

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        lowered = self.program.lowered
        for name, array in zip(lowered.inputs, arrays, strict=True):
            self._write(name, array)
        for name, tensor in lowered.captures.items():
            self._write(name, tensor.array)
        with self.device.current():
            for step in self.steps:
                step()
        self.device.synchronize()
        return [self._read(self.program.plan.buffer(name)) for name in self.program.plan.results]

    def _read(self, b: Buffer) -> np.ndarray:
        out = np.empty(b.shape, b.type.dtype.numpy)
        if out.size:
            self._at(b.name)[1].read(out)
        return out


__all__ = ["DeviceExecutable", "Workspace"]
