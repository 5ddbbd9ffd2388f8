"""Loops of known length as launches of the program around them: those of each iteration in turn.

    h, y_t <- f(h, x_t)     reads row t of x where it lies, and h where iteration t - 1 left it: in
                            row t - 1 of y, where it is that, which is written in place, or in one
                            of a few slots of memory that take turns

So a loop is steps like any others: they are recorded in a CUDA graph, told where buffers lie, and
changed in a graph by themselves. The body is lowered once, and its kernels are those of all
iterations; what each has of its own is where its arrays begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ....lazy_dataclass import dataclass
from ....numerics import stored_bytes
from ....runtime.buffer import DeviceBuffer
from ....runtime.conditional_nodes import NUMBER_BYTES
from ...schedule.ir import GroupOperand
from .compile_program import compile_launches
from .launch_arguments import LaunchArguments
from .loop_steps import DeviceLoop, LoopStep
from .node_kernels import NodeLaunch, copy_placed
from .placed_launch import BufferAddress, Pointed

if TYPE_CHECKING:
    from .while_launches import WhileLaunches
    from .workspace import Workspace

ROW_BYTES = 16  # rows of so many bytes begin as kernels' results do, and are written in place
COMPILED_FIRST = 16  # iterations: rows begin in as many ways at most, counted in bytes of 16


@dataclass(frozen=True)
class BufferOffset:
    """Where something begins: a byte of a buffer of the program around a loop, or of the device."""

    buffer: str
    byte: int

    def behind(self, nbytes: int) -> BufferOffset:
        return BufferOffset(self.buffer, self.byte + nbytes)


@dataclass(frozen=True)
class RowCopy:
    target: BufferOffset
    source: BufferOffset
    nbytes: int


@dataclass(frozen=True, eq=False)
class Iteration:
    """Where the buffers of the body lie, by name, and what is copied behind its launches."""

    given: dict[str, BufferOffset]
    copies: tuple[RowCopy, ...]


class LoopLaunches:
    """The memory of a loop on one device, and its iterations. body: memory of its program."""

    def __init__(self, step: LoopStep, body: Workspace):
        self.body, self.form = body, step.callee.form
        assert self.form.length is not None
        self.numbers = DeviceBuffer(max(NUMBER_BYTES * self.form.length, 1), body.device)
        if self.form.length:
            self.numbers.load(np.arange(self.form.length * 2, dtype=np.int64) // 2)
        self.slots = dict[int, DeviceBuffer]()  # by where they begin
        self.iterations, self.ends = _Plan(self, step).made()
        self._to_compile: list[IterationArguments] = []

    def around(self, outer: LaunchArguments) -> list[IterationArguments]:
        """What the launches of each iteration are given, inside of a program."""
        made = [IterationArguments(outer, self.body, it.given) for it in self.iterations]
        chosen = {*range(COMPILED_FIRST), len(made) - 1}
        for i, one in enumerate(made):
            one.compiled = self.body.compiled or i not in chosen
        self._to_compile += [one for one in made if not one.compiled]
        return made

    def compile(self) -> None:
        """Its kernels, for arrays as they begin now."""
        compile_arguments(self._to_compile)
        self._to_compile, self.body.compiled = [], True
        self.body.compile_loops()


class IterationArguments(LaunchArguments):
    """The arrays of one iteration's launches. given: where buffers lie that are no memory of the
    body's own."""

    def __init__(self, outer: LaunchArguments, body: Workspace, given: dict[str, BufferOffset]):
        super().__init__()
        self.outer, self.body, self.given = outer, body, given
        self.program, self.device, self.block = body.program, body.device, body.block
        self.watched, self.alone, self.owner = body.watched, body.alone, body.owner
        self.counters = body.counters

    def follow(self, base: str, made: Pointed, at: int) -> None:
        lies = self.given.get(base)
        if lies is None:
            made.pointer = self.body.memory[base][0] + at
        elif lies.buffer:
            self.outer.follow(self.outer.program.base(lies.buffer), made, lies.byte + at)
        else:
            made.pointer = lies.byte + at

    def root_of(self, base: str) -> str:
        lies = self.given.get(base)
        return self.outer.root_of(self.outer.program.base(lies.buffer)) \
            if lies is not None and lies.buffer else ""

    def loop(self, step: LoopStep) -> LoopLaunches:
        return self.body.loop(step)

    def while_loop(self, step: LoopStep) -> WhileLaunches:
        return self.body.while_loop(step)

    def host_loop(self, step: LoopStep) -> DeviceLoop:
        return self.body.host_loop(step)

    def pointer(self, name: str) -> int:
        """Where a buffer lies in the call under way."""
        base = self.program.base(name)
        lies = self.given.get(base)
        if lies is None:
            return self.body.memory[base][0]
        return lies.byte + (self.outer.pointer(lies.buffer) if lies.buffer else 0)


def compile_arguments(chosen: Sequence[IterationArguments]) -> None:
    """What launches of iterations of one program have to have compiled, as they lie now."""
    if chosen:
        first = chosen[0]
        compile_launches([c for one in chosen for c in one.calls],
                         [b for one in chosen for b in one.batches.values()],
                         [s for s in first.program.steps if isinstance(s, NodeLaunch)],
                         first.pointer, first.device.index)
    for one in chosen:
        one.calls, one.compiled = [], True


def copy_of(outer: LaunchArguments, copy: RowCopy, stream: int) -> tuple[Any, frozenset[str]]:
    """What copies rows in a call, and the buffers whose addresses it is given."""
    names = set[str]()

    def placed(lies: BufferOffset) -> BufferAddress:
        place = BufferAddress(lies.byte)
        if lies.buffer:
            base = outer.program.base(lies.buffer)
            outer.follow(base, place, lies.byte)
            names.add(outer.root_of(base))
        return place

    run = partial(copy_placed, placed(copy.target), placed(copy.source), copy.nbytes, stream)
    return run, frozenset(names) - {""}


# --- where each iteration reads and writes --------------------------------------------------------
class _Plan:
    """Finds it, iteration by iteration. carry: where what is carried lies at the begin of one."""

    def __init__(self, loop: LoopLaunches, step: LoopStep):
        self.loop, self.form, body = loop, loop.form, loop.body
        self.program, self.memory = body.program, body.memory
        first, seqs, consts = self.form.split(step.group.reads)
        self.ends, stacks = step.group.writes[:self.form.carries], step.group.writes[
            self.form.carries:]
        self.rows, self.stacks = [*map(_Rows, seqs)], [*map(_Rows, stacks)]
        self.consts, self.carry = [*map(begin_of, consts)], [*map(begin_of, first)]
        self.results = [r.base for r in body.results]
        self.own = {r.base for r in body.results if r.own}
        self.late: list[RowCopy] = []  # what may be copied when the loop has ended

    def made(self) -> tuple[list[Iteration], list[RowCopy]]:
        order = list(self.form.order)
        found = [self._iteration(i, following) for i, following in zip(
            order, [*order[1:], None], strict=False)]
        if not order:
            self._copies(zip(map(begin_of, self.ends), self.carry, self.ends, strict=True))
        return found, _coalesced_copies(self.late)

    def _iteration(self, i: int, following: int | None) -> Iteration:
        """following: the number of the iteration behind this one."""
        inputs = [BufferOffset("", self.loop.numbers.pointer + NUMBER_BYTES * i), *self.carry,
                  *(rows.at(i) for rows in self.rows), *self.consts]
        given = dict(zip(self.program.lowered.inputs, inputs, strict=True))
        busy = set(self.carry)
        for base in dict.fromkeys(b for b in self.results if b in self.own):
            given[base] = self._place_of(base, i, following, busy)
            busy.add(given[base])
        sources = [given.get(b) or BufferOffset("", self.memory[b][0]) for b in self.results]
        n, after = self.form.carries, []
        copies = list(zip((s.at(i) for s in self.stacks), sources[n:],
                          (s.row for s in self.stacks), strict=True))
        if following is None:
            copies += zip(map(begin_of, self.ends), sources, self.ends, strict=False)
        else:
            self.carry = []
            for base, source, o in zip(self.results, sources, self.ends, strict=False):
                if base not in given and self.program.plan.buffer(base).kind == "temporary":
                    kept = self._slot(bytes_of(o), busy)  # the next iteration writes over it
                    busy.add(kept)
                    after.append((kept, source, o))
                    source = kept
                self.carry.append(source)
        return Iteration(given, tuple(self._copies([*copies, *after])))

    def _place_of(self, base: str, i: int, following: int | None,
                  busy: set[BufferOffset]) -> BufferOffset:
        """Where an iteration writes a result: in a row of what is stacked, where the carry ends, or
        in a slot. What is stacked at the begin of the next iteration is written there, too."""
        n, nbytes = self.form.carries, self.program.plan.buffer(base).nbytes
        carries = [c for c in range(n) if self.results[c] == base]
        inputs = [self.program.lowered.inputs[1 + c] for c in carries]
        for rows, made in zip(self.stacks, self.results[n:], strict=True):
            if made == base and rows.takes(nbytes):
                return rows.at(i)
        for rows, made in zip(self.stacks, self.results[n:], strict=True):
            if made in inputs and rows.takes(nbytes) and following is not None:
                return rows.at(following)
        if following is None and carries and bytes_of(self.ends[carries[0]]) == nbytes:
            return begin_of(self.ends[carries[0]])
        return self._slot(nbytes, busy)

    def _slot(self, nbytes: int, busy: set[BufferOffset]) -> BufferOffset:
        """Memory in which nothing lies that is read yet."""
        for at, memory in self.loop.slots.items():
            if memory.nbytes == nbytes and BufferOffset("", at) not in busy:
                return BufferOffset("", at)
        new = DeviceBuffer(nbytes, self.loop.body.device)
        self.loop.slots[new.pointer] = new
        return BufferOffset("", new.pointer)

    def _copies(self, wanted: Any) -> Iterator[RowCopy]:
        """Those of (target, source, what) that have to be made now: what lies in buffers of the
        program around it stays as it is."""
        for target, source, o in wanted:
            nbytes = bytes_of(o)
            if target == source or not nbytes:
                continue
            copy = RowCopy(target, source, nbytes)
            if source.buffer and target.buffer:
                self.late.append(copy)
            else:
                yield copy


@dataclass(frozen=True)
class _Rows:
    """An operand along whose first axis iterations go."""

    whole: GroupOperand

    @property
    def row(self) -> GroupOperand:
        return replace(self.whole, shape=self.whole.shape[1:])

    def at(self, i: int) -> BufferOffset:
        return begin_of(self.whole).behind(i * bytes_of(self.row))

    def takes(self, nbytes: int) -> bool:
        """Whether a result of so many bytes is written into a row."""
        return nbytes == bytes_of(self.row) and nbytes % ROW_BYTES == 0


def begin_of(o: GroupOperand) -> BufferOffset:
    assert o.layout is None
    return BufferOffset(o.name, o.offset * o.type.dtype.numpy.itemsize)


def bytes_of(o: GroupOperand) -> int:
    return stored_bytes(o.shape, o.type.dtype)


def _coalesced_copies(copies: Sequence[RowCopy]) -> list[RowCopy]:
    """The same copies, of neighbours from neighbours as one."""
    found: list[RowCopy] = []
    for c in sorted(copies, key=lambda c: (c.target.buffer, c.target.byte)):
        last = found[-1] if found else None
        if last is not None and last.target.behind(last.nbytes) == c.target and \
                last.source.behind(last.nbytes) == c.source:
            found[-1] = RowCopy(last.target, last.source, last.nbytes + c.nbytes)
        else:
            found.append(c)
    return found


__all__ = ["IterationArguments", "BufferOffset", "LoopLaunches", "RowCopy", "begin_of", "bytes_of",
           "compile_arguments", "copy_of"]
