"""Loops in which nothing can change any more, and groups that wait for each other.

An iteration that changes no memory and none of the values that its loop carries is followed by an
equal one, unless another group writes. So the interpreter stops there: where other groups could
write what the loop reads, the launch begins anew with each group on its own (`take_turns`), and one
that waits gives way to the others; else the loop is endless, and an error names its line.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import SourceLine
from tessera.tile.interpreter.memory import Changes
from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.ir import Function, Op, Operand, SSAValue, While, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, View

if TYPE_CHECKING:
    from tessera.tile.interpreter.machine import Machine

LOOK_EVERY = 64  # iterations of a loop; also how long a group goes on that only counts
QUIET = 4096  # iterations without a write after which a loop that reads tensors may be a wait
MOST_WAITING = 1024  # groups
MOST_ITERATIONS = 1 << 24  # of one loop that counts without end: minutes here


class Standstill(Exception):
    """A loop in which nothing can change but by other groups. where: its line."""

    def __init__(self, where: SourceLine | None):
        super().__init__(where)
        self.where = where


class Stopped(BaseException):
    """Ends the thread of a group whose launch is over."""


def waits(function: Function) -> bool:
    """Whether a loop reads tensors that other groups may write: it may be waiting for them."""
    kinds: dict[SSAValue, Any] = {p.value: p.type for p in function.params}
    for node in walk(function.body):
        if isinstance(node, Op):
            kinds |= {d.value: d.type for d in node.outs}
    return any(_reads(op, kinds) for loop in walk(function.body) if isinstance(loop, While)
               for op in walk((*loop.test, *loop.body)) if isinstance(op, Op))


def _reads(op: Op, kinds: dict[SSAValue, Any]) -> bool:
    if OPS[op.name].effect not in ("read", "atomic") or not op.args:
        return False
    place: Operand = op.args[0]
    kind = kinds.get(place) if isinstance(place, SSAValue) else None
    return isinstance(kind, GlobalTensor) or (isinstance(kind, View) and kind.space == "global")


class Watch:
    """Whether the iterations of one loop change anything. groups: where groups take turns."""

    def __init__(self, machine: Machine, loop: While):
        self.machine, self.loop, self.iteration = machine, loop, 0
        self.written = machine.changes.count
        self.last_write = 0
        self.before: list[Any] | None = None

    def begin(self) -> None:
        m = self.machine
        if m.changes.count != self.written:
            self.written, self.last_write = m.changes.count, self.iteration
        if self.iteration >= MOST_ITERATIONS:
            raise KernelError(f"this loop made {MOST_ITERATIONS} iterations and did not end",
                              where=self.loop.where, code="E_ENDLESS",
                              hint="does its condition become false?")
        looks = m.turns is not None or self.iteration % LOOK_EVERY == LOOK_EVERY - 1
        self.before = [m.env[c.value] for c in self.loop.carried] if looks else None
        self.iteration += 1

    def end(self) -> None:
        m = self.machine
        if self.before is None:
            return
        quiet = m.changes.count == self.written and not m.copies.pending
        still = quiet and all(_equal(m.env[c.value], b)
                              for c, b in zip(self.loop.carried, self.before, strict=True))
        if m.turns is not None:
            if still or self.iteration % LOOK_EVERY == 0:
                m.turns.give_way(still, self.loop.where)
        elif still or (quiet and m.may_wait and self.iteration - self.last_write > QUIET):
            raise Standstill(self.loop.where)


def _equal(x: Any, y: Any) -> bool:
    return x is y or (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
                      and x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())


def endless(where: SourceLine | None) -> KernelError:
    return KernelError(
        "this loop never ends: an iteration changes nothing, neither memory nor what the loop "
        "carries, and no other group can", where=where, code="E_ENDLESS",
        hint="change in the body what the condition reads; lanes run in lockstep here, so a lane "
        "cannot wait for another of its group: use ts.tile.barrier()")


# --- one group at a time ------------------------------------------------------------------------
class GroupThread:
    """One group: a thread that runs while it has the turn."""

    def __init__(self, number: int, work: Callable[[GroupThread], None]):
        self.number = number
        self.mine, self.given = threading.Event(), threading.Event()
        self.done = self.still = self.over = False
        self.where: SourceLine | None = None
        self.seen = -1  # changes when it last ran
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._run, work), daemon=True)

    def _run(self, work: Callable[[GroupThread], None]) -> None:
        self.mine.wait()
        self.mine.clear()
        try:
            if not self.over:
                work(self)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.given.set()

    def give_way(self, still: bool, where: SourceLine | None) -> None:
        """Called by the group: others go on. still: it goes on only when another one writes."""
        self.still, self.where = still, where
        self.given.set()
        self.mine.wait()
        self.mine.clear()
        self.check()

    def check(self) -> None:
        if self.over:
            raise Stopped

    def go(self) -> None:
        """Called by the launch: until the group gives way or ends. Raises what it raised."""
        if not self.thread.is_alive():
            self.thread.start()
        self.mine.set()
        self.given.wait()
        self.given.clear()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.over = True
        if self.thread.is_alive():
            self.mine.set()
            self.thread.join()


def take_turns(order: Iterable[int], changes: Changes, work: Callable[[GroupThread], None]) -> None:
    """Runs each group as if alone, in their order; one that waits lets the others go on.

    Raises KernelError when all that are left wait and none writes.
    """
    waiting: deque[GroupThread] = deque()
    turn: GroupThread | None = None
    try:
        for number in order:
            turn = GroupThread(int(number), work)
            _go(turn, waiting, changes)
            _wake(waiting, changes)
            if len(waiting) > MOST_WAITING:
                raise _stuck(waiting, f"more than {MOST_WAITING} groups wait at once")
        while waiting:
            before, left = changes.count, len(waiting)
            for turn in [waiting.popleft() for _ in range(left)]:
                _go(turn, waiting, changes)
            if len(waiting) == left and changes.count == before and all(t.still for t in waiting):
                raise _stuck(waiting, f"all {left} groups that have not ended wait, and nothing "
                             "changes any more")
    finally:
        for one in (*waiting, *([turn] if turn is not None else [])):
            one.stop()


def _go(turn: GroupThread, waiting: deque[GroupThread], changes: Changes) -> None:
    turn.go()
    turn.seen = changes.count
    if not turn.done:
        waiting.append(turn)


def _wake(waiting: deque[GroupThread], changes: Changes) -> None:
    """Those that wait look again, when something was written since."""
    for turn in [t for t in waiting if t.seen != changes.count]:
        waiting.remove(turn)
        _go(turn, waiting, changes)


def _stuck(waiting: Sequence[GroupThread], why: str) -> KernelError:
    first = waiting[0]
    return KernelError(
        f"group {first.number} waits here for what no group does: {why}", where=first.where,
        code="E_ENDLESS", hint="a group waits by a loop that reads what another one writes: is it "
        "written, by a group that does not wait itself, and read anew in each iteration?")


__all__ = ["Standstill", "Stopped", "GroupThread", "Watch", "endless", "take_turns", "waits"]
