"""Memory that two sets of tensors have in turn: parameters before and after a step of training.

A step uses hundreds of tensors up and returns as many, in the same memory. Which of the two sets
has it is one number for all of them, so that it passes without looking at any. Each tensor has an
`InTurn` in place of its memory, of which who looks at the tensor gets the memory or the call that
used it up. Where one of those that have it goes, is written elsewhere or is told its memory, the
turns end: each of the others has its own from there on, as any tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .used_by import UsedBy

Give = Callable[[Any, Any], None]  # a tensor, what it has in place of its memory
Take = Callable[[Sequence[Any], UsedBy], None]  # of tensors that a call used up


class InTurn:
    """What a tensor of `MemoryTurns` has in place of its memory, and as its origin."""

    __slots__ = ("turns", "side", "number", "_result")

    def __init__(self, turns: MemoryTurns, side: int, number: int, result: object):
        self.turns, self.side, self.number, self._result = turns, side, number, result

    @property
    def result(self) -> object:
        """Which result of a program the tensor is, see ResultOrigin; None when it was used up."""
        return self._result if self.turns.live == self.side else None

    def now(self) -> Any:
        """The memory, or the UsedBy; None where the turns have ended meanwhile."""
        turns, memories = self.turns, self.turns.memories
        if memories is None:
            return None
        return memories[self.number] if turns.live == self.side else turns.used_by


class MemoryTurns:
    """live: the number of the set that has the memory.  spent: the tensors of the other; of those
    that have it nothing is kept, so that it goes with them.  spent_in: containers of these, which
    are nobody's else.  used_by: the call that used them up.
    """

    def __init__(self, mine: Sequence[Any], spent: Sequence[Any], memories: Sequence[Any],
                 results: Sequence[object], used_by: UsedBy, give: Give, take: Take):
        """mine: tensors that have this memory, in order.  spent: as many."""
        self.memories: Sequence[Any] | None = [*memories]  # None when they have ended
        self.spent, self.used_by, self.live = spent, used_by, 0
        self.spent_in: Any = None
        self._give, self._take = give, take
        self._results, self.addresses, self._refs = results, [b"", b""], [list[Any](), list[Any]()]
        self._turns = [list[InTurn](), list[InTurn]()]
        self._let_in(0, mine)
        self._let_in(1, spent)

    def _let_in(self, side: int, tensors: Sequence[Any]) -> None:
        if not self._turns[side]:
            self._turns[side] = [InTurn(self, side, k, r) for k, r in enumerate(self._results)]
        self.addresses[side] = addresses(tensors)
        self._refs[side] = [weakref.ref(x, self._end) for x in tensors]
        for x, mine in zip(tensors, self._turns[side], strict=True):
            x.origin = mine
            self._give(x, mine)

    def replace_spent(self, tensors: Sequence[Any], containers: Any) -> None:
        """Others in place of those that were used up, which stay so."""
        if self.memories is not None:
            old, self.spent, self.spent_in = self.spent, tensors, containers
            self._take(old, self.used_by)
            self._let_in(1 - self.live, tensors)

    def those(self, tensors: Iterable[Any]) -> list[Any] | None:
        """A list of these, where they are the tensors that have the memory, in order. All of those
        are there until the turns end, so no other object has the address of one."""
        there = np.fromiter(tensors, object, len(self.spent))
        same = there.tobytes() == self.addresses[self.live] and self.memories is not None
        return there.tolist() if same else None

    def pass_on(self, mine: Sequence[Any], containers: Any, call: UsedBy) -> bool:
        """A call uses up those that have the memory: the others have it. Whether there are turns
        yet: another thread may have ended them."""
        if self.memories is None:
            return False
        self.used_by, self.live, self.spent, self.spent_in = call, 1 - self.live, mine, containers
        return True

    def _end(self, gone: Any = None) -> None:
        self.end()

    def end(self) -> None:
        """Each tensor has its own from here on. What nobody has any more goes."""
        refs, self._refs = self._refs, []
        if not refs or self.memories is None:
            return
        for ref, memory in zip(refs[self.live], self.memories, strict=True):
            if (x := ref()) is not None:
                self._give(x, memory)
        self._take(self.spent, self.used_by)
        self.spent, self.spent_in, self.memories, self._turns = (), None, None, [[], []]


def addresses(tensors: Sequence[Any]) -> bytes:
    """Where objects lie, in order: NumPy takes a list apart four times as fast as `id`."""
    return np.fromiter(tensors, object, len(tensors)).tobytes()


def end_turns(memories: Iterable[Any]) -> None:
    """Of what has one of these in place of its memory."""
    for m in memories:
        if m.__class__ is InTurn:
            m.turns.end()


__all__ = ["InTurn", "MemoryTurns", "addresses", "end_turns"]
