"""Steps that the host does with values of a call: what is printed, verified, or must fit.

A copy to page-locked memory stands in the stream where the op stands in the program, so kernels
wait for nothing. What the op means runs when that copy is there, in the order of the program:
behind the launch of the last kernel, before the call returns; or, where the record says "later",
before the next call, or when somebody waits for the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .... import hooks
from ....errors import TesseraError
from ....lazy_dataclass import dataclass
from ....runtime.buffer import DEFAULT
from ....runtime.copies import CopiedOut
from ....runtime.device import Device
from ....runtime.flags import error_flags
from ...interpret import call_node
from ...ir import Node
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.loop_axes import extents_of

MESSAGE = {"now": "the host, before the call returns",
           "later": "the host, when it next waits for the call"}


@dataclass(frozen=True, eq=False)
class HostCallee:
    """What a step runs on the host."""

    node: Node

    def __str__(self) -> str:
        return MESSAGE[self.node.op.host]


def host_groups(node: Node) -> list[FusionGroup]:
    """The group of such a node; its result, where it has one, lies where its operand does."""
    bare = Node(node.op, node.inputs, node.attrs, (), node.where)
    step = FusionGroup("host", (), [bare], list(node.inputs), writes_all=True)
    return [step, *(FusionGroup("view", extents_of(v), [node]) for v in node.outputs)]


@dataclass(frozen=True, eq=False)
class HostStep:
    """The step of a group of kind "host"."""

    group: ScheduledGroup

    @property
    def node(self) -> Node:
        return self.group.attr("calls").node

    def run(self, read: Callable[[str], np.ndarray]) -> None:
        """On host memory. read: the memory of a buffer."""
        self.call([read(o.name).reshape(o.shape) for o in self.group.reads])

    def call(self, arrays: Sequence[np.ndarray]) -> None:
        with np.errstate(all="ignore"):
            call_node(self.node, tuple(arrays))


class HostCalls:
    """What the host has to do for the calls of one program, on one device."""

    def __init__(self, on: Device):
        self.device = on
        self.steps: list[tuple[HostStep, list[CopiedOut]]] = []
        self._late: list[tuple[HostStep, list[CopiedOut]]] = []  # of a call that was launched
        self._lock = threading.Lock()

    def add(self, step: HostStep, pointer: Callable[[str], int], stream: int
            ) -> list[Callable[[], Any]]:
        """The copies of a step, which begin where they are called."""
        copies = [CopiedOut(o.shape, o.type.dtype.numpy, self.device) for o in step.group.reads]
        self.steps.append((step, copies))
        found: list[Callable[[], Any]] = [
            partial(lambda c, name: c.begin(pointer(name), stream), c, o.name)
            for c, o in zip(copies, step.group.reads, strict=True)]
        if step.node.op.host == "later" and stream == DEFAULT:
            found.append(partial(self._leave, (step, copies)))
        return found

    def _leave(self, step: tuple[HostStep, list[CopiedOut]]) -> None:
        """Its copies have begun: a kernel behind them that fails may do so for its reason."""
        self._late.append(step)
        _pending.add(self)

    def finish(self, recorded: bool = False) -> None:
        """All has been launched: do what is to be done before the call returns. recorded: as a
        graph of the driver's, whose copies are done when all of it is."""
        if not self.steps:
            return
        for step, copies in self.steps if recorded else ():
            for c in copies:
                c.mark(DEFAULT)
            if step.node.op.host == "later":
                self._leave((step, copies))
        _run([s for s in self.steps if s[0].node.op.host == "now"])

    def settle(self) -> None:
        """Do what was left for later."""
        with self._lock:
            late, self._late = self._late, []
        _pending.discard(self)
        try:
            _run(late)
        except TesseraError:
            with suppress(TesseraError):  # what kernels behind it reported is a consequence
                error_flags(self.device.index).clear()
            raise


def _run(steps: Sequence[tuple[HostStep, list[CopiedOut]]]) -> None:
    for step, copies in steps:
        step.call([c.array() for c in copies])


_pending: weakref.WeakSet[HostCalls] = weakref.WeakSet()
_any_pending: set[Any] = _pending.data  # type: ignore[attr-defined]  # whose bool() is quicker


def _settle(index: int) -> None:
    for calls in [c for c in _pending if c.device.index == index] if _any_pending else ():
        calls.settle()


hooks.synchronised.append(_settle)
hooks.reported.append(_settle)

__all__ = ["HostCallee", "HostCalls", "HostStep", "host_groups"]
