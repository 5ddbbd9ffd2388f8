"""Running a lowered function: its kernels, one after another, on memory that is planned.

`CudaProgram.run` takes host arrays and runs every kernel under the interpreter, which is what they
mean. `DeviceExecutable` runs the same kernels on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import numpy as np

from ....kernels.routine import ForeignArray
from ....lazy_dataclass import dataclass
from ....numerics import DType
from ....runtime.target import DEFAULT_TARGET, Target, parse_target
from ....tensor import Tensor
from ....tile.interpreter.launch import Config, lanes_of
from ....tile.launch.first_call import recipe_for
from ....tile.launch.recipe import Recipe
from ...ir import Graph
from ...schedule.ir import GraphSchedule, PlannedBuffer, ScheduledGroup, Transfer
from ..kernels.generate_kernels import kernel_of, source_of
from ..kernels.kernel_text import GroupKernel, KernelText, compiled
from ..lower import LoweredGraph, lower
from ..passes.packed_values import elements_of, stored_array
from .collective_steps import CollectiveStep
from .host_steps import HostStep
from .library_steps import LibraryStep
from .loop_steps import LoopStep
from .node_kernels import NodeKernel, NodeLaunch


@dataclass(frozen=True, eq=False)
class GroupLaunch:
    """A group's kernel, and the arrays it is called with: (buffer, extents).

    shared: what runs, which groups that are alike have in common.
    """

    group: ScheduledGroup
    shared: GroupKernel
    arguments: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def of(group: ScheduledGroup) -> GroupLaunch:
        shared, source = kernel_of(group)
        names = [o.name for o in (*group.reads, *group.writes)]
        return GroupLaunch(group, shared, tuple(zip(names, source.passed, strict=True)))

    @property
    def offsets(self) -> list[int]:
        """The element of its buffer at which each argument begins."""
        return [o.offset for o in (*self.group.reads, *self.group.writes)]

    def recipe(self, arrays: Sequence[ForeignArray], pointers: tuple[int, ...]) -> Recipe:
        """How it is launched on arrays that begin there."""
        return recipe_for(self.shared, tuple(arrays))

    @property
    def lanes(self) -> int:
        return lanes_of(self.kernel.function(), Config(), self.group.schedule.lanes)

    @functools.cached_property
    def source(self) -> KernelText:
        """Its own text, with the names and lines of its ops."""
        return source_of(self.group)

    @functools.cached_property
    def kernel(self) -> GroupKernel:
        """Its own, to look at."""
        return compiled(self.source, self.group)


def _launch(group: ScheduledGroup, target: Target
            ) -> GroupLaunch | NodeLaunch | LibraryStep | HostStep | LoopStep | CollectiveStep:
    if group.kind == "repeat":
        form = group.attr("calls").form
        test = None if form.test is None else CudaProgram(form.test, target, inner=True)
        return LoopStep(group, CudaProgram(form.body, target, inner=True), test)
    if group.kind == "library":
        return LibraryStep(group)
    if group.kind == "host":
        return HostStep(group)
    if group.kind == "exchange":
        return CollectiveStep(group)
    return NodeLaunch(group) if group.kind == "launch" else GroupLaunch.of(group)


class CudaProgram:
    """The kernels of a graph. `.plan` is its Schedule IR, `.steps` kernels and copies in order."""

    def __init__(self, graph: Graph, target: Target | str = DEFAULT_TARGET,
                 donated: Sequence[int] = (), on_host: Sequence[int] | None = None,
                 inner: bool = False):
        self.target = parse_target(target)
        self.lowered: LoweredGraph = lower(graph, self.target, donated, on_host, inner)
        self.plan: GraphSchedule = self.lowered.plan
        self.steps = tuple(_launch(s, self.target) if isinstance(s, ScheduledGroup) else s
                           for s in self.plan.steps)

    def runs(self, together: bool = True) -> list[range]:
        """The numbers of its steps, those of one launch in a range. together: batches are one."""
        found: list[range] = []
        name = ""
        for i, step in enumerate(self.plan.steps):
            batch = step.batch if together and isinstance(step, ScheduledGroup) else ""
            if batch and batch == name:
                found[-1] = range(found[-1].start, i + 1)
            else:
                found.append(range(i, i + 1))
            name = batch
        return found

    @functools.cached_property
    def batched(self) -> bool:
        """Whether some launch of it, or of its loops' iterations, is a batch."""
        return len(self.runs()) < len(self.steps) or any(p.batched for p in self.inner)

    @functools.cached_property
    def launch_begins(self) -> tuple[int, ...]:
        """Of each step the number of the first one in its launch."""
        return tuple(run.start for run in self.runs() for _ in run)

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Results on host memory, poisoned first: what no kernel writes is seen."""
        memory = self._host_memory(arrays)
        types = {b.name: b.type for b in self.plan.buffers}
        for step in self.steps:
            if isinstance(step, Transfer):
                shape = self.plan.buffer(step.target).shape
                memory[step.target][...] = self._held(memory, step.source).reshape(shape)
                continue
            if isinstance(step, NodeLaunch | LibraryStep | HostStep | LoopStep |
                          CollectiveStep):
                step.run(functools.partial(self._held, memory))
                continue
            given = [Tensor(run_of(memory[self.base(name)], types[name].dtype, shape, at),
                            types[name])
                     for (name, shape), at in zip(step.arguments, step.offsets, strict=True)]
            step.shared(*given)
        results = map(self.plan.buffer, self.plan.results)
        return [elements_of(_read_as(memory[self.base(b.name)], b.type.dtype), b.type,
                            b.shape).copy() for b in results]

    def _held(self, memory: dict[str, np.ndarray], name: str) -> np.ndarray:
        """The memory of a buffer: that of its owner, of which a view in order is the first part."""
        b, raw = self.plan.buffer(name), memory[self.base(name)]
        raw = _read_as(raw, b.type.dtype)
        if not b.of or b.layout is not None or b.type.dtype.packed or raw.size == prod(b.shape):
            return raw
        return run_of(raw, b.type.dtype, b.shape, 0)

    @functools.cached_property
    def node_kernels(self) -> tuple[NodeKernel, ...]:
        own = [s.shared for s in self.steps if isinstance(s, NodeLaunch)]
        return (*own, *(k for p in self.inner for k in p.node_kernels))

    @property
    def inner(self) -> tuple[CudaProgram, ...]:
        """The programs of its loops' iterations."""
        return tuple(p for s in self.steps if isinstance(s, LoopStep) for p in s.programs)

    @property
    def launches(self) -> tuple[GroupLaunch | NodeLaunch, ...]:
        """The steps that are kernels."""
        return tuple(s for s in self.steps if isinstance(s, GroupLaunch | NodeLaunch))

    def collectives(self) -> list[int]:
        """The steps that send between GPUs without the host, where all of its collectives do."""
        found = {k: s for k, s in enumerate(self.steps) if isinstance(s, CollectiveStep)}
        return list(found) if all(s.callee.route == "nccl" for s in found.values()) else []

    def sending_loops(self) -> list[int]:
        """The steps that are loops with collectives inside."""
        return [k for k, s in enumerate(self.steps) if isinstance(s, LoopStep) and any(
            isinstance(inner, CollectiveStep) or p.sending_loops()
            for p in s.programs for inner in p.steps)]

    def base(self, name: str) -> str:
        return self.plan.base(name)

    def _host_memory(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        given = [*zip(self.lowered.inputs, arrays, strict=True),
                 *((n, t.array) for n, t in self.lowered.captures.items())]
        memory = {n: stored_array(a, self.plan.buffer(n).type) for n, a in given}
        memory |= {n: memory[n].copy() for n in self.lowered.overwritten}
        memory |= self.lowered.constants
        memory |= zip(self.lowered.drawn, self.lowered.draws.run(), strict=True)
        for b in self.plan.buffers:
            if b.over:
                there = memory[b.over].view(b.type.dtype.numpy)
                memory[b.name] = there.reshape(b.shape)
            elif b.kind in ("temporary", "result", "host"):
                memory[b.name] = poisoned(b)
        return memory


def _read_as(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """Memory as that of what lies there: of a view, or of a result that was written over numbers
    of another type. Bytes are codes of the floats of 8 bits that they lie for."""
    other = raw.dtype != dtype.numpy and raw.itemsize == dtype.numpy.itemsize
    return raw if dtype.packed or not other else raw.view(dtype.numpy)


def run_of(memory: np.ndarray, dtype: DType, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """The elements of a buffer from one on, as a kernel is given them."""
    memory = _read_as(memory, dtype)
    return memory.reshape(-1)[offset:offset + prod(shape)].reshape(shape)


def poisoned(b: PlannedBuffer) -> np.ndarray:
    """NaN, or the largest integer's bits."""
    raw = np.full(max(b.nbytes, 1), 0xFF, np.uint8)[:b.nbytes]
    return raw if b.type.dtype.packed else raw.view(b.type.dtype.numpy).reshape(b.shape)


__all__ = ["CudaProgram", "GroupLaunch", "run_of"]
