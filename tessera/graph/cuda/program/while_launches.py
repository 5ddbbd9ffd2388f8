"""Loops whose end is data, as a node of a CUDA graph that loops by itself.

    copies in front      what is carried, into memory of the loop
    the first test       its launches write a bool
    the node             as long as that is true: the body's launches, what it made in the place of
                         what it read, the test's launches again
    copies behind        what is carried, to where the loop's results lie

Where no graph is recorded the host launches iterations and reads the bool back (loop_steps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....runtime.buffer import DeviceBuffer, fill_bytes
from ....runtime.conditional_nodes import NUMBER_BYTES, WhileNode
from ....runtime.graphs import recording_stream
from .launch_arguments import LaunchArguments
from .loop_launches import (
    BufferOffset,
    IterationArguments,
    RowCopy,
    begin_of,
    bytes_of,
    compile_arguments,
)
from .loop_steps import LoopStep
from .result_buffers import may_overwrite

if TYPE_CHECKING:
    from .workspace import Workspace


class WhileLaunches:
    """The memory of a loop on one device. body, test: memory of its programs."""

    def __init__(self, step: LoopStep, body: Workspace, test: Workspace):
        self.step, self.form, self.body, self.test = step, step.callee.form, body, test
        self._held: list[DeviceBuffer] = []
        self.numbers = self._new(2 * NUMBER_BYTES)
        self.carry = [self._new(bytes_of(o)) for o in step.group.writes]
        self.goes_on = self._new(1)
        self._to_compile: list[IterationArguments] = []
        self.made = self._places_of_results()
        self.copies = self._copies()

    def _new(self, nbytes: int) -> BufferOffset:
        self._held.append(DeviceBuffer(max(nbytes, 1), self.body.device))
        return BufferOffset("", self._held[-1].pointer)

    # --- around the node ------------------------------------------------------------------------
    def before(self) -> list[RowCopy]:
        first = self.form.split(self.step.group.reads)[0]
        return [RowCopy(at, begin_of(o), bytes_of(o))
                for at, o in zip(self.carry, first, strict=True) if bytes_of(o)]

    def behind(self) -> list[RowCopy]:
        return [RowCopy(begin_of(o), at, bytes_of(o))
                for at, o in zip(self.carry, self.step.group.writes, strict=True) if bytes_of(o)]

    def clear(self, stream: int) -> Callable[[], Any]:
        return partial(fill_bytes, self.numbers.byte, 0, 2 * NUMBER_BYTES, stream)

    # --- in it ----------------------------------------------------------------------------------
    def tested(self, outer: LaunchArguments) -> IterationArguments:
        """What the test's launches are given."""
        given = self._inputs(self.test, self.numbers)
        base = self.test.results[0].base
        if self.test.results[0].own:
            given[base] = self.goes_on
        return self._ready(IterationArguments(outer, self.test, given))

    def answered(self) -> list[RowCopy]:
        """What brings the bool there, where the test's launches do not."""
        result = self.test.results[0]
        if result.own:
            return []
        given = self._inputs(self.test, self.numbers)
        source = given.get(result.base) or BufferOffset("", self.test.memory[result.base][0])
        return [RowCopy(self.goes_on, source, 1)]

    def iteration(self, outer: LaunchArguments) -> IterationArguments:
        """What the body's launches are given."""
        return self._ready(IterationArguments(outer, self.body, self._given_inside() | self.made))

    def _given_inside(self) -> dict[str, BufferOffset]:
        return self._inputs(self.body, self.numbers.behind(NUMBER_BYTES))

    def _places_of_results(self) -> dict[str, BufferOffset]:
        """Where an iteration writes them: where what is carried lies, if nobody reads that then."""
        program, made = self.body.program, dict[str, BufferOffset]()
        results = [r for r in self.body.results if r.own]
        for at, name, r in zip(self.carry, program.lowered.inputs[1:], self.body.results,
                               strict=False):
            if r.own and r.base not in made and may_overwrite(program, name, r.base):
                made[r.base] = at
        for r in results:
            if r.base not in made:
                made[r.base] = self._new(program.plan.buffer(r.base).nbytes)
        return made

    def _copies(self) -> list[RowCopy]:
        """Behind an iteration: what is carried takes the place of what was."""
        given, carried = self._given_inside() | self.made, set(self.carry)
        first, last = list[RowCopy](), list[RowCopy]()
        for at, o, r in zip(self.carry, self.step.group.writes, self.body.results, strict=True):
            source = given.get(r.base) or BufferOffset("", self.body.memory[r.base][0])
            if source == at or not bytes_of(o):
                continue
            if source in carried:  # which the copies behind write over
                kept = self._new(bytes_of(o))
                first.append(RowCopy(kept, source, bytes_of(o)))
                source = kept
            last.append(RowCopy(at, source, bytes_of(o)))
        return [*first, *last]

    def _ready(self, made: IterationArguments) -> IterationArguments:
        self._to_compile.append(made)
        return made

    def compile(self) -> None:
        """Its kernels, before they are recorded: where results lie in the place of operands they
        are other code than what the host launches."""
        chosen, self._to_compile = self._to_compile, []
        for space in (self.test, self.body):
            compile_arguments([one for one in chosen if one.body is space])
            space.compile_loops()

    def _inputs(self, space: Workspace, number: BufferOffset) -> dict[str, BufferOffset]:
        consts = self.form.split(self.step.group.reads)[2]
        lies = [number, *self.carry, *map(begin_of, consts)]
        return dict(zip(space.program.lowered.inputs, lies, strict=True))

    def node(self, stream: int, inside: list[Callable[[], Any]], depth: int) -> Callable[[], Any]:
        """What records it. inside: what is asked of the stream of that depth."""
        on = self.body.device
        loop = WhileNode(on, self.goes_on.byte, self.numbers.byte)
        return partial(loop.record, stream, recording_stream(on.index, depth), inside)


__all__ = ["WhileLaunches"]
