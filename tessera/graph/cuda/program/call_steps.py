"""What a call of a program does, in order: kernels on a stream, copies and messages beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from .... import config
from ....runtime.buffer import DEFAULT
from ....runtime.copies import CopyQueue, SideStream
from ....runtime.graphs import recording_stream
from ....runtime.offloaded import CopyEvent, HostBlock
from ....runtime.step_times import TimedStep
from ...schedule.ir import ByteRange, Transfer
from ...schedule.offload import waits
from ..launch_work import GroupBatch, StepLabel
from ..passes.overlap import Overlap, overlapped
from .batch_launch import BatchLaunch
from .collective_steps import CollectiveStep
from .graph_limits import launched_by_host
from .host_steps import HostStep
from .launch_arguments import LaunchArguments
from .library_steps import LibraryStep, need_cupy
from .loop_launches import IterationArguments, RowCopy, copy_of
from .loop_steps import LoopStep
from .node_kernels import NodeLaunch
from .run import GroupLaunch

if TYPE_CHECKING:
    from .while_launches import WhileLaunches
    from .workspace import Workspace


def call_steps(space: Workspace, stream: int) -> list[TimedStep]:
    """The steps of a call with this memory, whose kernels go to a stream."""
    return _StepSequence(space, stream).made()


def _by_host(space: Workspace | IterationArguments, step: LoopStep) -> None:
    space.host_loop(step).run(space.pointer)


class _StepSequence:
    """The steps so far, and what is under way beside the stream.

    copies: those between the host and the device.  side: the stream of collectives, which run
    beside kernels as `beside` says.  leaving: the memory that each copy to the host reads.
    """

    def __init__(self, space: Workspace | IterationArguments, stream: int, depth: int = 0):
        program, plan = space.program, space.program.plan
        self.space, self.stream, self.program, self.plan = space, stream, program, plan
        self.depth = depth  # of the loops in a graph around it
        self.found: list[TimedStep] = []
        count = len(plan.transfers)
        self.copies = CopyQueue(space.device, count, stream) if count else None
        self.awaited = waits(plan.steps, plan.region)
        self.beside: Overlap | None = overlapped(
            plan.steps, program.collectives(), program.sending_loops(), plan.region)
        self.side = SideStream(space.device, len(self.beside.numbers), stream, first=True) \
            if self.beside else None
        self.begun = 0  # copies
        self.leaving: list[tuple[ByteRange, int]] = []

    def made(self) -> list[TimedStep]:
        free = self.program.lowered.released if config.poison else {}
        for run in self.program.runs(not self.space.alone):
            self._await(run)
            self._do(run)
            for offset, size in (at for k in run for at in free.get(k, ())):
                self._poison(run, offset, size)
        if self.copies:  # the next call finds all places free
            self._add("wait", partial(self.copies.wait, len(self.plan.transfers) - 1))
        if self.side and self.beside and len(self.plan.steps) in self.beside.awaited:
            self._add("wait", partial(self.side.wait, self.beside.awaited[len(self.plan.steps)]))
        return self.found

    def _add(self, part: str, run: Callable[[], Any], step: Any = None,
             on: int | None = None, buffers: frozenset[str] | None = None,
             batches: Sequence[BatchLaunch] = ()) -> None:
        """buffers: that it is given the addresses of; by default those of the step's operands."""
        batches = [step.launch] if isinstance(step, GroupBatch) else batches
        label = StepLabel(self.program, step, part,
                          self._buffers(step) if buffers is None else buffers, tuple(batches))
        self.found.append(TimedStep(run, label, self.stream if on is None else on))

    def _buffers(self, step: Any) -> frozenset[str]:
        groups = () if step is None or isinstance(step, Transfer) else (
            step.groups if isinstance(step, GroupBatch) else (step.group,))
        bases = {self.plan.base(o.name) for g in groups for o in (*g.reads, *g.writes)}
        return frozenset(map(self.space.root_of, bases)) - {""}

    def _iterations(self, step: LoopStep) -> None:
        """A loop whose iterations are launches like the others."""
        loop = self.space.loop(step)
        for made, it in zip(loop.around(self.space), loop.iterations, strict=True):
            self.found += _StepSequence(made, self.stream, self.depth).made()
            self._copies(made.outer, it.copies)
        self._copies(self.space, loop.ends)

    def _by_host(self, step: LoopStep) -> bool:
        """Whether the host launches iterations: those of a loop whose end is data are a node of a
        graph where one is recorded."""
        return bool(launched_by_host(step)) or (step.test is not None and self.stream == DEFAULT)

    def _while(self, step: LoopStep) -> None:
        loop, stream = self.space.while_loop(step), recording_stream(
            self.space.device.index, self.depth + 1)
        self._copies(self.space, loop.before())
        self._add("fill", loop.clear(self.stream), buffers=frozenset())
        self._test(loop)
        inside = _StepSequence(self.space, stream, self.depth + 1)
        inside.found += _StepSequence(loop.iteration(self.space), stream, self.depth + 1).made()
        inside._copies(self.space, loop.copies)
        inside._test(loop)
        buffers = frozenset(name for s in inside.found for name in s.what.buffers)
        self._add("loop", loop.node(self.stream, [s.run for s in inside.found], self.depth + 1),
                  step, buffers=buffers, batches=[b for s in inside.found for b in s.what.batches])
        self._copies(self.space, loop.behind())

    def _test(self, loop: WhileLaunches) -> None:
        self.found += _StepSequence(loop.tested(self.space), self.stream, self.depth).made()
        self._copies(self.space, loop.answered())

    def _copies(self, outer: LaunchArguments, copies: Sequence[RowCopy]) -> None:
        for copy in copies:
            run, buffers = copy_of(outer, copy, self.stream)
            self._add("copy", run, buffers=buffers)

    def _await(self, run: range) -> None:
        """What steps read has come, and what they write over has gone."""
        copy = max((n for k in run if (n := self.awaited[k]) is not None), default=None)
        if self.copies and copy is not None and \
                not isinstance(self.program.steps[run.start], Transfer):
            self._add("wait", partial(self.copies.wait, copy))
        if self.side and self.beside:
            sent = max((self.beside.awaited.get(k, -1) for k in run), default=-1)
            if sent >= 0:
                self._add("wait", partial(self.side.wait, sent))

    def _do(self, run: range) -> None:
        """One step, or some that are one launch."""
        space, step = self.space, self.program.steps[run.start]
        index, at = space.device.index, space.pointer
        if len(run) > 1:
            batch = space.batch(run)
            self._add("kernel", partial(batch, self.stream), GroupBatch(
                tuple(launch.group for launch in batch.launches), batch))
        elif isinstance(step, GroupLaunch | NodeLaunch):
            for part, launch in space.launch(step, self.stream):
                self._add(part, launch, step)
        elif isinstance(step, LibraryStep):
            need_cupy(step.callee)
            self._add("library", partial(step.launch, at, index, self.stream), step)
        elif isinstance(step, CollectiveStep) and self.beside and self.side:
            number = self.beside.numbers[run.start]
            self._add("exchange", partial(step.beside, at, index, self.side, number), step,
                      self.side.stream)
        elif isinstance(step, CollectiveStep):
            self._add("exchange", partial(step.launch, at, index, self.stream), step)
        elif isinstance(step, LoopStep) and not self._by_host(step):
            self._iterations(step) if step.test is None else self._while(step)
        elif isinstance(step, LoopStep):
            self._add("loop", partial(_by_host, space, step), step)
        elif isinstance(step, HostStep):
            for call in self._whole.host_calls.add(step, at, self.stream):
                self._add("host", call, step)
        elif self.copies:
            self._add("transfer", self._copy(step, self.copies, self.begun), step,
                      self.copies.stream)
            self.leaving.append((self.plan.region(step.on_device), self.begun))
            self.begun += 1

    @property
    def _whole(self) -> Workspace:
        """That of a program: an iteration has none of the steps for which it is asked."""
        return cast("Workspace", self.space)

    def _copy(self, step: Transfer, copies: CopyQueue, number: int) -> Callable[[], Any]:
        space = self._whole

        def run() -> None:
            held, there = space.memory[step.on_host][1], space.pointer(step.on_device)
            block = held if isinstance(held, HostBlock) else None
            if block is not None and block.last is not None:
                block.last.hold(copies.stream)
            if step.kind == "offload":
                copies.to_host(number, there, held)
            else:
                copies.to_device(number, held, there)
            if block is not None:
                block.last = CopyEvent(space.device, copies.stream)

        return run

    def _poison(self, run: range, offset: int, size: int) -> None:
        """Temporaries that nothing reads any more become NaN, when all that is under way is done
        with them."""
        at = ByteRange("temporaries", offset, offset + size)
        pending = [n for r, n in self.leaving if r.meets(at)]
        if self.copies and pending:
            self._add("wait", partial(self.copies.wait, max(pending)))
        if self.side and self.beside and (begun := [
                n for k, n in self.beside.numbers.items() if k < run.stop]):
            self._add("wait", partial(self.side.wait, max(begun)))
        self._add("poison", partial(self.space.block.fill, 0xFF, offset, size, self.stream))
