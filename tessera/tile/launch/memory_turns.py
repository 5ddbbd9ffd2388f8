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

from .object_words import ObjectWords
from .shared_views import SharedView
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
    are nobody's else: of the first `contained`.  used_by: the call that used them up.
    """

    def __init__(self, mine: Sequence[Any], spent: Sequence[Any], memories: Sequence[Any],
                 results: Sequence[object], used_by: UsedBy, give: Give, take: Take,
                 contained: int):
        """mine: tensors that have this memory, in order.  spent: as many."""
        self.memories: Sequence[Any] | None = [*memories]  # None when they have ended
        self.spent, self.used_by, self.live = spent, used_by, 0
        self.spent_in: Any = None
        self._give, self._take = give, take
        self._results, self.addresses, self._refs = results, [b"", b""], [list[Any](), list[Any]()]
        self._references = [2] * contained + [1] * (len(mine) - contained)  # spent, spent_in
        self._words: list[ObjectWords | None] = [None, None]
        self._turns = [list[InTurn](), list[InTurn]()]
        self._let_in(0, mine)
        self._let_in(1, spent)

    def _let_in(self, side: int, tensors: Sequence[Any]) -> None:
        if not self._turns[side]:
            self._turns[side] = [InTurn(self, side, k, r) for k, r in enumerate(self._results)]
        self.addresses[side] = addresses(tensors, len(tensors)).tobytes()
        self._refs[side] = refs = [weakref.ref(x, self._end) for x in tensors]
        self._words[side] = ObjectWords(tensors, self._references, refs)
        for x, mine in zip(tensors, self._turns[side], strict=True):
            x.origin = mine
            self._give(x, mine)

    def replace_spent(self, tensors: Sequence[Any], containers: Any) -> None:
        """Others in place of those that were used up, which stay so."""
        if self.memories is not None:
            old, self.spent, self.spent_in = self.spent, tensors, containers
            self._take(old, self.used_by)
            self._let_in(1 - self.live, tensors)

    def are(self, tensors: bytes) -> bool:
        """Whether the tensors at these addresses are those that have the memory, in order. All of
        those are there until the turns end, so no other object has the address of one."""
        return tensors == self.addresses[self.live] and self.memories is not None

    def unseen(self) -> bool:
        """Whether nobody else has any of those that were used up."""
        words = self._words[1 - self.live]
        return words is None or words.unseen()

    def pass_on(self, mine: Any, containers: Any, call: UsedBy) -> bool:
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
        self.spent, self.spent_in, self.memories = (), None, None
        self._turns, self._words = [[], []], [None, None]


def addresses(tensors: Iterable[Any], count: int) -> np.ndarray:
    """So many objects, and as bytes where they lie: NumPy takes a list apart four times as fast as
    `id`."""
    return np.fromiter(tensors, object, count)


def end_turns(memories: Iterable[Any]) -> None:
    """Of what has one of these in place of its memory; a view of another's has its own, too."""
    for m in memories:
        if m.__class__ is InTurn:
            m.turns.end()
        elif m.__class__ is SharedView:
            m.own()


__all__ = ["InTurn", "MemoryTurns", "addresses", "end_turns"]
