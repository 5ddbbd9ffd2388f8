"""Graph functions on a GPU: the planned memory on the device, and the kernels of each call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.routine import View
from ...runtime.buffer import Buffer as Memory
from ...runtime.device import Device, device
from ...tensor import Tensor
from ..ir import Graph
from .run import Program
from .schedule import Buffer, place_bytes


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
    """Device memory of a program: one block for temporaries, one for each other buffer; and the
    arguments of every launch, made once."""

    def __init__(self, program: Program, on: Device):
        self.program, self.device = program, on
        self.memory: dict[str, tuple[int, Any]] = {}  # pointer and owner of each buffer
        self._place()
        self.launches = [(launch, [self._argument(n, s) for n, s in launch.arguments])
                         for launch in program.launches]

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
            elif b.kind != "view":
                own = Memory(b.nbytes, self.device)
                self.memory[b.name] = own.pointer, own
        for name, array in self.program.lowered.constants.items():
            self._write(name, array)

    def _argument(self, name: str, shape: tuple[int, ...]) -> View:
        base = self.program.base(name)
        pointer, owner = self.memory[base]
        dtype = self.program.plan.buffer(base).type.dtype
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
        for launch, arguments in self.launches:  # they go to the default stream, in order
            launch.kernel(*arguments)
        self.device.synchronize()
        return [self._read(self.program.plan.buffer(name)) for name in self.program.plan.results]

    def _read(self, b: Buffer) -> np.ndarray:
        out = np.empty(b.shape, b.type.dtype.numpy)
        if out.size:
            self.memory[self.program.base(b.name)][1].read(out)
        return out


__all__ = ["DeviceExecutable", "Workspace"]
