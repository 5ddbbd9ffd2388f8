"""Loops that are steps of a program: while_loop, and scans too long to be written out.

The body is a program of its own, lowered once, whose kernels and memory all iterations share. Those
of a known number are launches of the program around them (loop_launches.py), where
`launched_by_host` has no reason against it. The others the host launches, as is told here. Carries
pass from one to the next where they lie. What a while_loop goes on by is one bool: a node of a CUDA
graph looks at it (while_launches.py), or the host, which reads it back before each iteration and so
waits for the GPU, where no graph is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ....lazy_dataclass import dataclass
from ....numerics import as_type, stored_bytes
from ....runtime.buffer import DEFAULT, Borrowed, DeviceBuffer, copy_bytes
from ....runtime.device import Device
from ....tensor import Tensor
from ....tile.launch.resident import Resident
from ...host_loop import HostLoop
from ...ir import Node
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupOperand, ScheduledGroup
from ...schedule.loop_axes import extents_of
from ..passes.packed_values import elements_of, stored_array

INDEX = as_type("int64")


@dataclass(frozen=True, eq=False)
class LoopCallee:
    """What a step repeats."""

    node: Node

    @property
    def form(self) -> HostLoop:
        assert self.node.op.repeats is not None
        made: HostLoop = self.node.op.repeats(**self.node.attrs)
        return made

    def __str__(self) -> str:
        if self.form.length is None:
            return f"as long as {self.node.op.name} goes on, by a node of the CUDA graph; where " \
                   "none is recorded, the host reads the condition back before each iteration"
        return f"{self.form.length} iterations of {self.node.op.name} one after another"


def loop_group(node: Node) -> FusionGroup:
    """The group of such a node."""
    space = extents_of(node.outputs[0]) if node.outputs else ()
    return FusionGroup("repeat", space, [node], list(node.inputs), list(node.outputs),
                       writes_all=True)


@dataclass(frozen=True, eq=False)
class LoopStep:
    """The step of a group of kind "repeat". body, test: programs (run.CudaProgram)."""

    group: ScheduledGroup
    body: Any
    test: Any = None

    @property
    def callee(self) -> LoopCallee:
        return self.group.attr("calls")

    @property
    def programs(self) -> tuple[Any, ...]:
        return (self.body,) if self.test is None else (self.test, self.body)

    # --- on host memory, under the interpreter --------------------------------------------------
    def run(self, read: Callable[[str], np.ndarray]) -> None:
        """read: the memory of a buffer."""
        form = self.callee.form
        given = [elements_of(read(o.name), o.type, o.shape).copy() for o in self.group.reads]
        carry, seqs, consts = form.split(given)
        stacks = [np.empty(o.shape, o.type.dtype.numpy) for o in self.group.writes[form.carries:]]

        def goes_on(i: int) -> bool:
            (made,) = self.test.run([np.asarray(i, np.int64), *carry, *consts])
            return bool(made)

        for i in _order(form, goes_on):
            made = self.body.run([np.asarray(i, np.int64), *carry, *(s[i] for s in seqs), *consts])
            carry = made[:form.carries]
            for stack, row in zip(stacks, made[form.carries:], strict=True):
                stack[i] = row
        for o, y in zip(self.group.writes, (*carry, *stacks), strict=True):
            raw = stored_array(np.ascontiguousarray(y), o.type).reshape(-1)
            read(o.name).reshape(-1)[...] = raw

    # --- on a GPU -------------------------------------------------------------------------------
    def on(self, spaces: Sequence[Any]) -> DeviceLoop:
        """The loop there. spaces: workspaces of its programs."""
        return DeviceLoop(self, spaces, spaces[0].device)


def _order(form: HostLoop, goes_on: Callable[[int], bool]) -> Any:
    if form.length is not None:
        yield from form.order
        return
    i = 0
    while goes_on(i):
        yield i
        i += 1


class DeviceLoop:
    """A loop on one device, whose iterations the host launches. numbers: of the iterations there,
    or memory for one of them."""

    def __init__(self, step: LoopStep, spaces: Sequence[Any], on: Device):
        self.step, self.form, self.device = step, step.callee.form, on
        *tests, self.body = spaces
        self.test = tests[0] if tests else None
        count = 1 if self.form.length is None else self.form.length
        self.numbers = DeviceBuffer(8 * count, on)
        if self.form.length:
            self.numbers.load(np.arange(count, dtype=np.int64))

    def run(self, pointer: Callable[[str], int]) -> None:
        """pointer: where a buffer lies in the call under way."""
        form, group = self.form, self.step.group
        carry, seqs, consts = form.split(
            [self.tensor(o, pointer(o.name)) for o in group.reads])
        sources = [pointer(o.name) for o in form.split(group.reads)[1]]
        ends, stacks = group.writes[:form.carries], group.writes[form.carries:]

        def goes_on(i: int) -> bool:
            self.numbers.load(np.full(1, i, np.int64))
            (made,) = self.test.iterate([self.number(0), *carry, *consts])  # type: ignore[union-attr]
            return bool(made.array)

        for i in _order(form, goes_on):
            rows = [self.row(o, at, i) for o, at in zip(form.split(group.reads)[1], sources,
                                                        strict=True)]
            at = 0 if form.length is None else i
            made = self.body.iterate([self.number(at), *carry, *rows, *consts])
            carry = made[:form.carries]
            for o, y in zip(stacks, made[form.carries:], strict=True):
                self.keep(y, pointer(o.name) + i * y.storage.nbytes)
        for o, y in zip(ends, carry, strict=True):
            self.keep(y, pointer(o.name))

    def tensor(self, o: GroupOperand, at: int) -> Resident:
        memory = Borrowed(at, stored_bytes(o.shape, o.type.dtype), self.device, None)
        return Resident(o.shape, o.type, self.device.index, memory)

    def row(self, o: GroupOperand, at: int, i: int) -> Resident:
        """Element i of a sequence, where it lies."""
        one = replace(o, shape=o.shape[1:])
        return self.tensor(one, at + i * stored_bytes(one.shape, o.type.dtype))

    def number(self, i: int) -> Resident:
        memory = Borrowed(self.numbers.pointer + 8 * i, 8, self.device, None)
        return Resident((), INDEX, self.device.index, memory)

    def keep(self, y: Tensor, at: int) -> None:
        if y.storage.nbytes and prod(y.shape):
            copy_bytes(at, y.storage.pointer, y.storage.nbytes, DEFAULT)


__all__ = ["DeviceLoop", "LoopCallee", "LoopStep", "loop_group"]
