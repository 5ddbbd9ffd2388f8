"""Whether iterations of a loop that are told side by side meet in memory, see kernel_loops.py.

They do not where what is written is read nowhere, or each element by the iteration alone that
writes it. Memory of the group that an iteration first writes whole is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...tensor import Tensor
from ...tile.interpreter.memory import MemoryBox
from ...tile.ir.ir import Node, Op, SSAValue, walk
from ...tile.ir.op_record import OPS
from ...tile.ir.types import Buffer, View
from .kernel_blocks import is_recorded
from .kernel_memory import GroupMemory, TensorMemory

if TYPE_CHECKING:
    from .kernel_meaning import KernelRecorder

COPIES = ("cp_async", "cp_async_if")  # to the first operand from the second


class NotSideBySide(Exception):
    """A loop that must be written out."""


def reads_and_writes(op: Op) -> tuple[list[Any], list[Any]]:
    """Memory or views that an op reads, and those it writes."""
    effect = OPS[op.name].effect
    if op.name in COPIES:
        return [op.args[1]], [op.args[0]]
    if effect == "read":
        return list(op.args), []  # those that are memory, or views of it
    if effect in ("write", "atomic", "async") and op.args:
        return [op.args[0]], [op.args[0]]
    return [], []


def memory_roots(nodes: Sequence[Node]) -> dict[SSAValue, SSAValue]:
    """The memory that each view is of."""
    roots: dict[SSAValue, SSAValue] = {}
    for node in walk(tuple(nodes)):
        if isinstance(node, Op) and node.outs and node.args and isinstance(
                node.outs[0].type, View | Buffer) and isinstance(node.args[0], SSAValue):
            roots[node.outs[0].value] = roots.get(node.args[0], node.args[0])
    return roots


def covers(op: Op, place: MemoryBox, args: Sequence[Any], lanes: int) -> bool:
    """Whether an access is to all of a place: to a box, or by the lanes to each element once."""
    if OPS[op.name].access in ("tile", "copy"):
        return True
    index = args[2:]
    if op.name != "store_element" or not all(isinstance(i, np.ndarray) for i in index) or (
            len(index) != len(place.box)):
        return False
    at = np.zeros((1, lanes), np.int64)
    for i, n in zip(index, place.box, strict=True):
        at = at * n + i
    size = int(np.prod(place.box))
    return at.shape[-1] == size and bool((np.sort(at, -1) == np.arange(size)).all())


class LoopAccesses:
    """Accesses of all iterations, while they are told."""

    def __init__(self, machine: KernelRecorder, lead: int):
        self.machine, self.lead = machine, lead  # lead: axes of the grid outside of the loop
        self.before: dict[int, tuple[TensorMemory, Tensor]] = {}
        self.places: dict[int, set[Any]] = {}
        self.modes: dict[int, set[str]] = {}
        # memory of the group: outside of the loop, of an iteration
        self.own: dict[int, tuple[GroupMemory, GroupMemory]] = {}

    def note(self, place: MemoryBox, mode: str, index: Sequence[Any], boxes: bool = True
             ) -> MemoryBox:
        """The place that it is in an iteration. mode: "read", "write", or the kind of an atomic;
        boxes: all of the place is written, and not some elements of it."""
        memory = place.memory
        key = id(memory)
        if not isinstance(memory, TensorMemory):
            return place
        if isinstance(memory, GroupMemory):
            if len(memory.grid) > self.lead:
                return place  # of an iteration
            if boxes and key not in self.modes and mode == "write" and self.writes_all(
                    place, memory):
                made = GroupMemory(memory.name, memory.type, self.machine.grid, self.machine.lanes)
                self.own.setdefault(key, (memory, made))
            if key in self.own:
                return replace(place, memory=self.own[key][1])
        kept = memory.all if isinstance(memory, GroupMemory) else memory
        self.before.setdefault(id(kept), (kept, kept.value))
        self.modes.setdefault(key, set()).add(mode)
        self.places.setdefault(key, set()).add(_key(place, index))
        return place

    def writes_all(self, place: MemoryBox, own: GroupMemory) -> bool:
        m = self.machine
        return m.mask is None and m.when is None and place.peer is None and own.copies == 1 and (
            own.stages == 1 and place.box == own.shape and len(place.kept) == len(own.shape)
            and not any(is_recorded(o) or np.any(o) for o in place.offsets))

    def require_apart(self) -> None:
        """Raises NotSideBySide where iterations may meet."""
        for key, modes in self.modes.items():
            if modes - {"read", "write"} and len(modes) > 1:
                raise NotSideBySide
            if "write" in modes and "read" in modes and len(self.places[key]) > 1:
                raise NotSideBySide

    def undo(self) -> None:
        """Memory as it was before the loop."""
        for held, value in self.before.values():
            held.value = value

    def finish(self, axis: int) -> None:
        """What the last iteration leaves in memory that was its own."""
        for outside, own in self.own.values():
            x = own.all.value
            outside.all.value = x[(*(slice(None),) * axis, x.shape[axis] - 1)]


def _key(place: MemoryBox, index: Sequence[Any]) -> Any:
    given = (*place.offsets, place.stage, *index)
    numbers = [np.asarray(-1 if is_recorded(x) else x, np.int64) for x in given]
    unknown = tuple(id(x) for x in given if is_recorded(x))
    return place.box, place.kept, unknown, tuple((x.shape, x.tobytes()) for x in numbers)


__all__ = ["COPIES", "LoopAccesses", "NotSideBySide", "covers", "memory_roots",
           "reads_and_writes"]
