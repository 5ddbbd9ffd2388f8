"""Memory of a program on a GPU, and the kernels and copies of each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import compress
from operator import ne
from typing import Any

import numpy as np

from .... import config, hooks
from ....errors import UnsupportedTargetError
from ....numerics.packed_order import from_rows
from ....runtime.arrays import HOST
from ....runtime.buffer import DEFAULT, Borrowed, own_stream
from ....runtime.buffer import DeviceBuffer as Memory
from ....runtime.copies import PinnedMemory
from ....runtime.device import Device, restore
from ....runtime.graphs import DeviceGraph
from ....runtime.nvtx import nvtx_range
from ....runtime.offloaded import HostBlock, OffloadedBuffer
from ....runtime.step_times import TimedStep, run_timed
from ....tensor import Tensor
from ....tile.launch.resident import Resident
from ...devices import tell_copied
from ...host_copy import HostCopy
from ...placed_leaves import PlacedLeaves
from .batch_launch import BatchTable
from .call_steps import call_steps
from .collective_steps import CollectiveStep
from .compile_program import compile_launches
from .graph_limits import launched_by_host, no_node_for, why_no_graph
from .host_steps import HostCalls
from .host_values import HostDraws, block_of
from .launch_arguments import LaunchArguments
from .library_steps import LibraryStep
from .loop_launches import LoopLaunches
from .loop_steps import DeviceLoop, LoopStep
from .node_kernels import NodeLaunch
from .placed_launch import Pointed
from .repeated_calls import RepeatedCalls
from .result_buffers import ResultBuffer, may_overwrite
from .run import CudaProgram
from .steady_calls import SteadyCalls
from .watched import count_results
from .while_launches import WhileLaunches


class Workspace(LaunchArguments):
    """Memory of a program: one block for temporaries, and one for each buffer whose memory is not
    that of an argument or a result; and the arguments of every launch and copy, made once.

    fixed: every buffer has memory of its own, which a recorded graph needs. watched: its kernels
    count bad elements. alone: each group has a launch of its own. block: the memory of temporaries,
    where somebody has made it.
    """

    def __init__(self, program: CudaProgram, on: Device, fixed: bool = False,
                 watched: bool = False, donated: Sequence[int] = (), alone: bool = False,
                 block: Memory | None = None):
        super().__init__()
        self.program, self.device, self.fixed = program, on, fixed
        self.block = block or Memory(program.plan.temporary_bytes, on)
        self.alone = alone
        self.watched, self.owner = watched, object()  # whose the words of its launches are
        self.memory: dict[str, tuple[int, Any]] = {}  # pointer and owner of each buffer
        # of launches, by buffer, and the byte of it at which each begins
        self.arrays: dict[str, list[tuple[Pointed, int]]] = {}
        self.own: dict[str, Any] = {}  # memory for what is copied there
        self.captured: dict[str, HostCopy] = {}
        self.arguments = [] if fixed else [b.name for b in program.plan.buffers
                                           if b.kind in ("input", "capture", "result")
                                           or (b.kind == "host" and
                                               b.name in program.plan.results)]
        self.given = frozenset(self.arguments)
        fetched = {t.source for t in program.plan.transfers if t.kind == "fetch"}
        self.on_host = fetched & {*program.lowered.inputs}  # inputs, there at each call
        given = {program.base(n) for n in program.plan.results}
        lowered = program.lowered
        self.drawn = HostDraws(lowered.draws, lowered.drawn, [
            b for b in program.plan.buffers if b.kind == "drawn" and b.name not in given], on)
        self.drawn_places = frozenset(self.drawn.places)
        if watched:
            count_results(program)
        self._place()
        self.host_calls = HostCalls(on)
        self.inner: dict[CudaProgram, Workspace] = {}  # of the iterations of its loops
        self.loops: dict[LoopStep, LoopLaunches] = {}
        self.host_loops: dict[LoopStep, DeviceLoop] = {}
        self.while_loops: dict[LoopStep, WhileLaunches] = {}
        self.ran = False
        self.donated = frozenset(donated)
        self.results = self._result_buffers(donated)
        self.recorded: DeviceGraph | None = None
        self.tables: list[BatchTable] = []  # of its batches
        self.repeated: RepeatedCalls | None = None  # from the second call on

    @cached_property
    def timed(self) -> list[TimedStep]:
        """What a call does."""
        return call_steps(self, DEFAULT)

    @cached_property
    def steps(self) -> list[Callable[[], Any]]:
        return [s.run for s in self.timed]

    @property
    def device_bytes(self) -> int:
        """What was allocated on the device."""
        held = [self.drawn.memory, *(owner for _, owner in self.memory.values())]
        owners = {id(owner): owner for owner in held}
        return sum(o.nbytes for o in owners.values() if isinstance(o, Memory))

    def _place(self) -> None:
        for b in self.program.plan.buffers:
            if b.kind == "temporary":
                self.memory[b.name] = self.block.pointer + b.offset, self.block
            elif b.kind == "host" and b.name in self.program.plan.results:
                self.memory[b.name] = 0, None
            elif b.kind == "host":
                held = PinnedMemory(b.nbytes, self.device)
                self.memory[b.name] = held.pointer, held
            elif b.name in self.drawn.places:
                self.memory[b.name] = self.drawn.at(b.name), self.drawn.memory
            elif b.kind in ("input", "capture", "result") and not self.fixed:
                self.memory[b.name] = 0, None  # given at each call
            elif b.kind != "view":
                own = Memory(b.nbytes, self.device)
                self.memory[b.name] = own.pointer, own
        with self.device.current():
            for name, array in self.program.lowered.constants.items():
                self._load(name, array)

    def compile_loops(self) -> None:
        """What nodes that loop have to have compiled, before they are recorded."""
        for loop in self.loops.values():
            loop.compile()
        for endless in self.while_loops.values():
            endless.compile()

    def record(self) -> None:
        """The steps as one graph of the driver's."""
        for step in self.program.steps:
            if isinstance(step, LoopStep) and (why := launched_by_host(step) or no_node_for(step)):
                raise UnsupportedTargetError(
                    f"{why}: they cannot be captured in a CUDA graph",
                    where=step.callee.node.where,
                    hint="ts.jit without capture=True")
            if isinstance(step, CollectiveStep):
                node = step.callee.node
                raise UnsupportedTargetError(
                    f"{node.op.name} sends between ranks, which is not captured in a CUDA graph",
                    where=node.where, hint="ts.jit without capture=True")
            if isinstance(step, LibraryStep):
                raise UnsupportedTargetError(
                    f"{step.callee.node.op.name} runs in {step.callee.record.name}, which cannot "
                    "be captured in a CUDA graph", where=step.callee.node.where,
                    hint="ts.jit without capture=True")
        with own_stream(self.device) as stream:
            self.host_calls = HostCalls(self.device)
            steps = call_steps(self, stream)
            self.compile_loops()
            self.tables = [b.table() for s in steps for b in s.what.batches]
            self.recorded = DeviceGraph.record(self.device, stream, [s.run for s in steps])

    def inside(self, program: CudaProgram) -> Workspace:
        """Memory for the iterations of a loop, which are watched as this program is."""
        if program not in self.inner:
            self.inner[program] = Workspace(program, self.device, watched=self.watched,
                                            alone=self.alone)
        return self.inner[program]

    def _at(self, name: str) -> tuple[int, Any]:
        return self.memory[self.program.base(name)]

    def pointer(self, name: str) -> int:
        """Where a buffer lies."""
        return self._at(name)[0]

    def loop(self, step: LoopStep) -> LoopLaunches:
        """The iterations of a loop whose launches are this program's."""
        if step not in self.loops:
            self.loops[step] = LoopLaunches(step, self.inside(step.body))
        return self.loops[step]

    def host_loop(self, step: LoopStep) -> DeviceLoop:
        """A loop whose iterations the host launches."""
        if step not in self.host_loops:
            self.host_loops[step] = step.on([self.inside(p) for p in step.programs])
        return self.host_loops[step]

    def while_loop(self, step: LoopStep) -> WhileLaunches:
        """A loop whose end is data, where it is recorded."""
        if step not in self.while_loops:
            self.while_loops[step] = WhileLaunches(step, self.inside(step.body),
                                                   self.inside(step.test))
        return self.while_loops[step]

    def root_of(self, base: str) -> str:
        return base

    def follow(self, base: str, made: Pointed, at: int) -> None:
        made.pointer = self.memory[base][0] + at
        self.arrays.setdefault(base, []).append((made, at))

    def owner_of(self, base: str) -> Any:
        return None if base in self.given else self.memory[base][1]

    def key_of(self, name: str) -> tuple[int, int]:
        words = self.drawn.value(name).reshape(-1)
        return int(words[0]), int(words[1])

    def _bind(self, name: str, memory: Memory) -> None:
        """From here on a buffer lies in this memory."""
        self.memory[name] = memory.pointer, memory
        for array, at in self.arrays.get(name, ()):
            array.pointer = memory.pointer + at

    def place(self, names: Sequence[str], places: Sequence[int], before: Sequence[int]) -> None:
        """From here on these buffers lie there. before: where they lay, where that is known."""
        moved = zip(names, places, strict=True)
        for name, new in compress(moved, map(ne, before, places)) if before else moved:
            self.memory[name] = new, None
            for array, at in self.arrays.get(name, ()):
                array.pointer = new + at

    def _give(self, name: str, x: Tensor | np.ndarray) -> None:
        """An input for this call: where it lies, else a copy."""
        if name in self.on_host:
            self.memory[name] = 0, block_of(x, self.device)
            return
        if self._reads(x):
            self._bind(name, x.storage)  # type: ignore[union-attr]
            return
        self._bind_own(name)
        self._load(name, x)

    def _give_up(self, name: str, x: Tensor, donated: bool) -> None:
        """An input that is written over: in its own memory where that is donated and nobody else
        has it, else in a copy."""
        if donated and self._free_memory(x) is not None:
            return
        b, held = self.program.plan.buffer(name), self.memory[name][1]
        memory = Resident(b.shape, b.type, self.device.index).storage
        if memory.nbytes:
            memory.copy(held)
        self._bind(name, memory)

    def _give_capture(self, name: str, x: Tensor) -> None:
        """A captured tensor: where it lies, else a copy, which is made again after a write."""
        if x.place != HOST:
            return self._give(name, x)
        self._bind_own(name)
        held = self.captured.get(name)
        if held is None:
            tell_copied(self.program.plan.name, x, self.device.index)
        if held is None or held.may_differ(x):
            self._load(name, x)
            self.captured[name] = HostCopy.of(x)

    def captured_memory(self, name: str, x: Tensor) -> Memory:
        """Where a captured tensor is read in a call: its own, or that of a copy as it is now."""
        if self._reads(x):
            return x.storage
        held = self.captured.get(name)
        if held is None or x.place != HOST or held.may_differ(x):
            self._give_capture(name, x)
        return self.own[name]

    def _reads(self, x: Tensor | np.ndarray) -> bool:
        """Whether kernels read it where it lies."""
        return (not self.fixed and isinstance(x, Resident)
                and x.storage.device is self.device)

    def _own(self, name: str) -> Memory:
        """A buffer for what lies elsewhere: made when it is first needed, and kept."""
        if name not in self.own:
            self.own[name] = self.memory[name][1] if self.fixed else Memory(
                self.program.plan.buffer(name).nbytes, self.device)
        return self.own[name]

    def _bind_own(self, name: str) -> None:
        self._bind(name, self._own(name))

    def given_memory(self, name: str, x: Tensor) -> Memory:
        """Where an input is read in a call: where it lies, else a copy."""
        if self._reads(x):
            return x.storage
        own = self._own(name)
        self._fill(own, x)
        return own

    def _load(self, name: str, x: Tensor | np.ndarray) -> None:
        """Give an input, capture or constant its elements."""
        self._fill(self.memory[name][1], x)

    def _fill(self, memory: Memory, x: Tensor | np.ndarray) -> None:
        if isinstance(x, Resident) and x.storage.device is self.device:
            if memory.nbytes:
                memory.copy(x.storage)
            return
        held = x
        if isinstance(x, Tensor) and x.dtype.packed:
            held = from_rows(x.buffer, x.type, x.shape)
        array = np.ascontiguousarray(held.array if isinstance(held, Tensor) else held)
        if array.size:
            memory.load(array)

    def again(self, calls: SteadyCalls, leaves: Sequence[Tensor]) -> list[Any] | None:
        """See SteadyCalls.run."""
        if self._told_apart:
            return None
        before = self.device.activate()
        try:
            return calls.run(leaves)
        finally:
            restore(before)

    @property
    def _told_apart(self) -> bool:
        """Whether the settings want to see each launch."""
        return bool(hooks.timed_steps or config.nvtx or config.debug)

    def run(self, leaves: Sequence[Tensor], ours: int = 0) -> list[Tensor]:
        """ours: see RepeatedCalls.run."""
        before = self.device.activate()
        try:
            if self.repeated is not None and not self._told_apart:
                made = self.repeated.run(leaves, ours)
                if made is not None:
                    return made
            return self._alone(leaves)
        finally:
            restore(before)

    def _alone(self, leaves: Sequence[Tensor], inside: bool = False) -> list[Tensor]:
        """A call like no other: where each buffer lies is found out, and forgotten."""
        if self.repeated is not None:
            self.repeated.places = []
        if type(leaves) is PlacedLeaves:
            leaves.take()
        try:
            return self._run(leaves, inside)
        finally:
            self._forget()

    def iterate(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """An iteration of a loop: a run inside of the step of another program."""
        if self.repeated is None and self.ran and self._repeatable:
            self.repeated = RepeatedCalls(self, whole=False)
        made = None if self.repeated is None or config.nvtx or config.debug else \
            self.repeated.run(leaves)
        return self._alone(leaves, inside=True) if made is None else made

    @cached_property
    def _repeatable(self) -> bool:
        return not why_no_graph(self.program)

    def _run(self, leaves: Sequence[Tensor], inside: bool = False) -> list[Tensor]:
        self.host_calls.settle()
        lowered, steps = self.program.lowered, self.steps  # which know what is to be compiled
        self.place([*self.drawn.places], self.draw(), ())
        for name, x in zip(lowered.inputs, leaves, strict=True):
            self._give(name, x)
        for name, i in () if self.fixed else lowered.overwritten.items():
            self._give_up(name, leaves[i], i in self.donated)
        for name, x in lowered.captures.items():
            self._give_capture(name, x)
        made = [self._new_result(r, leaves) for r in self.results]
        if not self.compiled:
            self._compile()
        if hooks.timed_steps and not inside:
            run_timed(self.device.index, self.timed, not self.ran)
        elif self.recorded is not None:
            self.recorded.launch(DEFAULT)
        elif config.nvtx:
            for step in self.timed:
                with nvtx_range(step.what.title):
                    step.run()
        else:
            for run in steps:
                run()
        self.ran = True
        self.host_calls.finish(self.recorded is not None)
        out = [self._finished(r, y) for r, y in zip(self.results, made, strict=True)]
        for x in (*leaves, *lowered.captures.values()):
            if x.place != HOST and not x.offloaded:
                x.storage.give_back()
        return out

    def draw(self, by_rows: bool = False) -> list[int]:
        """What the host computes for a call, on its way to where kernels read it. Where that is,
        of what is no result. by_rows: see Drawn."""
        self.drawn.step()
        for name in self.drawn.names:
            if name not in self.drawn.places:
                self._load(name, self.drawn.value(name))
        return self.drawn.placed() if by_rows else self.drawn.copied()

    def _compile(self) -> None:
        """Kernels that no process has compiled yet, side by side; the launches find them."""
        nodes = [s for s in self.program.steps if isinstance(s, NodeLaunch)]
        batches = list(self.batches.values())
        compile_launches(self.calls, batches, nodes, self.pointer,
                         self.device.index)
        self.compiled, self.calls = True, []
        self.compile_loops()

    def _result_buffers(self, donated: Sequence[int]) -> list[ResultBuffer]:
        """The first result of a buffer that kernels write takes its memory, others are copied."""
        plan, taken, found = self.program.plan, set[str](), []
        over = self.program.lowered.overwritten
        left = [] if self.fixed else [i for i in donated if i not in over.values()]
        for name in plan.results:
            b, base = plan.buffer(name), plan.base(name)
            own = (not self.fixed and (plan.buffer(base).kind == "result" or base in over)
                   and base not in taken)
            taken |= {base} if own else set()
            given = next((i for i in left if own and base not in over and may_overwrite(
                self.program, self.program.lowered.inputs[i], base)), None)
            left = [i for i in left if i != given]
            found.append(ResultBuffer(b, base, own, given))
        for base in {r.base for r in found} - taken:
            if not self.fixed and plan.buffer(base).kind == "result":
                self._bind_own(base)
        return found

    def _new_result(self, r: ResultBuffer, leaves: Sequence[Tensor]) -> Resident:
        memory = None if r.given is None else self._free_memory(leaves[r.given])
        if r.base in self.program.lowered.overwritten and r.own:
            return Resident(r.buffer.shape, r.buffer.type, self.device.index,
                            self.memory[r.base][1])
        if r.buffer.kind == "host":
            block = HostBlock(r.buffer.nbytes, self.device)
            self.memory[r.base] = block.pointer, block
            return Resident(r.buffer.shape, r.buffer.type, self.device.index,
                            OffloadedBuffer(block, r.buffer.nbytes, self.device))
        made = Resident(r.buffer.shape, r.buffer.type, self.device.index, memory)
        if r.own:
            self._bind(r.base, made.storage)
        return made

    def _free_memory(self, x: Tensor) -> Memory | None:
        """The memory of a donated argument, where it is ours and nobody else has it: no other
        library, no tensor of its bytes, nothing captured."""
        if not self._reads(x) or isinstance(x.storage, Borrowed):
            return None
        captured = any(t.storage is x.storage for t in self.program.lowered.captures.values())
        # the tensor, the buffer that was bound, and the argument of getrefcount
        return None if captured or sys.getrefcount(x.storage) > 3 else x.storage

    def _finished(self, r: ResultBuffer, made: Resident) -> Tensor:
        memory = self.memory[r.base][1]
        if made.storage.nbytes and not r.own and r.buffer.kind != "host":
            made.storage.copy(memory)
        return made

    def _forget(self) -> None:
        """Whose memory arguments and results are is no business of a workspace after a call."""
        for name in self.arguments:
            self.memory[name] = 0, self.own.get(name)


__all__ = ["Workspace"]
