"""Arguments that a call may use up: `ts.jit(donate=("params", "state"))`.

On a GPU a result takes the memory of such an argument where the plan allows it; on the host the
memory is freed. The tensor is used up then: what reads it is an error that names the call. Of a
distributed tensor the parts are used up, with the whole.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from itertools import repeat
from typing import Any, NoReturn
from weakref import getweakrefcount

from ..errors import ArgumentError, user_line
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from ..tile.launch.memory_turns import end_turns
from ..tile.launch.resident import Resident
from ..tile.launch.shared_views import end_views
from ..tile.launch.used_by import UsedBy
from .placed_leaves import FEW, PlacedLeaves, SpreadLeaves, as_placed_leaves, memories_of


class DonatedTensor(Tensor):
    """A tensor in host memory that was donated: what reads its elements, or asks where they lie,
    raises ArgumentError. A class of its own, since host memory is a plain attribute."""

    __slots__ = ()

    def _raise(self) -> NoReturn:
        raise _CALL.__get__(self).error(self)

    _buffer = memory = storage = place = device = property(_raise)

    def __repr__(self) -> str:
        text: str = _CALL.__get__(self).text(self)
        return text


_CALL: Any = Tensor.__dict__["_buffer"]  # where such a tensor has its UsedBy


class SpentTensors:
    """Tensors of a class that were used up. Those that nobody has any more are results of a later
    call: making the hundreds of a step anew takes a third of its time, and wakes Python's search
    for circles at each step."""

    def __init__(self) -> None:
        self._last: deque[list[Any]] = deque(maxlen=1)  # of the last call; pop is atomic

    def keep(self, tensors: list[Any]) -> None:
        if len(tensors) >= FEW:
            self._last.append(tensors)

    def forget(self) -> None:
        """Somebody else has them."""
        self._last.clear()

    def take(self, count: int) -> list[Any]:
        """Up to so many, whose attributes are as they were."""
        try:
            batch = self._last.pop()
        except IndexError:
            return []
        if not unseen(batch):
            counts = list(map(sys.getrefcount, batch))
            batch = [x for x, n in zip(batch, counts, strict=True)
                     if n <= ALONE and not getweakrefcount(x)]
        return batch[:count]


def alone(batch: Sequence[Any], others: int = 0) -> bool:
    """Whether nobody has any of these but the sequence and so many others."""
    return sum(map(sys.getrefcount, batch)) <= (ALONE + others) * len(batch)


def unseen(batch: Sequence[Any]) -> bool:
    """Whether nobody has any of these but the sequence, not even by a weak reference."""
    return alone(batch) and not any(map(getweakrefcount, batch))


def blank(kind: type, count: int) -> list[Any]:
    """Tensors of which every attribute is to be set: quicker than new ones."""
    new: Any = kind.__new__
    if count < FEW:
        return [*map(new, repeat(kind, count))]
    made = DONATABLE[kind].spent.take(count)
    made += [new(kind) for _ in range(count - len(made))]
    return made


@dataclass(frozen=True)
class Donatable:
    """How tensors of a class are used up. take: puts the call in place of the memory of many.
    memory: the slot that has it, where it passes to others.  beside: what of many is no memory, in
    new ones that lie one beside the other, of which some are parameters.  parts: of tensors that
    are made of others."""

    take: Callable[[Sequence[Any], UsedBy], None]
    memory: Any = None
    beside: Callable[[Sequence[Any], Sequence[bool]], list[Any]] | None = None
    parts: Callable[[Sequence[Any]], list[Tensor]] | None = None
    spent: SpentTensors = field(default_factory=SpentTensors)


def _take_host(tensors: Sequence[Tensor], call: Any) -> None:
    for x in tensors:
        x._buffer = call
        x.__class__ = DonatedTensor


def _take_resident(tensors: Sequence[Resident], call: UsedBy) -> None:
    for x in tensors:
        x._storage = call
        x.narrow = x.origin = None


def _resident_beside(tensors: Sequence[Resident], params: Sequence[bool]) -> list[Resident]:
    made = [Resident.__new__(Resident) for _ in tensors]
    for x, y, param in zip(tensors, made, params, strict=True):
        y._shape, y.type, y.narrow = x._shape, x.type, x.narrow
        y._scale, y._is_param, y._name = None, param, None
    return made


DONATABLE: dict[type, Donatable] = {  # mesh/tensor.py adds distributed tensors
    Tensor: Donatable(_take_host),
    Resident: Donatable(_take_resident, Resident.__dict__["_storage"], _resident_beside)}


def use_up(donated: Sequence[Tensor], function: str, leaves: Sequence[Tensor] = ()) -> None:
    """Take the memory away from the donated ones of the leaves of a call of this function."""
    told = type(leaves) in (PlacedLeaves, SpreadLeaves)
    kinds = (type(leaves[0]),) if told else ()
    _take([*donated], UsedBy(user_line(), function), kinds)


def forget_origins(donated: Sequence[Tensor]) -> None:
    """Of tensors of a call that failed: it may have taken what lies beside them."""
    for x in donated:
        if type(x) in DONATABLE and type(x) is not Tensor:
            x.origin = None


ALONE = list(map(sys.getrefcount, [object()]))[0]  # of what a list has and nobody else


def _take(tensors: list[Tensor], call: UsedBy, kinds: Collection[type] = ()) -> None:
    """kinds: their classes, where somebody has looked."""
    kinds = {*kinds} or {*map(type, tensors)}
    for kind in kinds & DONATABLE.keys():
        how = DONATABLE[kind]
        mine = tensors if len(kinds) == 1 else [x for x in tensors if type(x) is kind]
        if how.memory is not None:
            end_turns(map(how.memory.__get__, mine))
        if how.parts is not None:
            _take(how.parts(mine), call)
        how.take(mine, call)
        how.spent.keep(mine)


def check_donated(leaves: Sequence[Tensor], donated: Sequence[int], names: Sequence[str],
                  function: str) -> Sequence[Tensor]:
    """Raise ArgumentError where a donated tensor is given a second time. Returns what the leaves
    are made of."""
    own_memory([leaves[i] for i in donated])
    parts = _component_tensors(leaves)
    if are_apart(leaves, parts):
        return parts
    for p in _component_tensors([leaves[i] for i in donated]):  # its views get their own elements
        if type(p) is Resident:
            end_views(p.storage)
    parts = _component_tensors(leaves)
    if are_apart(leaves, parts):
        return parts
    for i in donated:
        mine = _memories(leaves[i])
        for j, other in enumerate(leaves):
            if i != j and (other is leaves[i] or mine & _memories(other)):
                raise ArgumentError(
                    f"{function}: {names[i]} is donated and is given as {names[j]} too",
                    hint="donate a copy, x.copy(), or give it once", where=user_line())
    return parts


def own_memory(tensors: Sequence[Tensor]) -> None:
    """Let those that have theirs in turn with others have it for themselves."""
    for kind in {*map(type, tensors)} & DONATABLE.keys():
        if (slot := DONATABLE[kind].memory) is not None:
            end_turns(slot.__get__(x) for x in tensors if type(x) is kind)


def are_apart(leaves: Sequence[Tensor], parts: Sequence[Tensor] | None = None) -> bool:
    """Whether no two leaves have one memory. parts: what they are made of, where that is known."""
    parts = _component_tensors(leaves) if parts is None else parts
    memories = memories_of(parts)
    hosts = 0 if type(parts) is PlacedLeaves else memories.count(None)
    return len({*memories}) - bool(hosts) == len(memories) - hosts and (
        len(memories) - hosts >= len(leaves) or len({*leaves}) == len(leaves))


def _component_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What tensors are made of: themselves, or their parts."""
    if type(tensors) is PlacedLeaves:
        return tensors
    kinds = {type(tensors[0])} if type(tensors) is SpreadLeaves else {*map(type, tensors)}
    alike = DONATABLE.get(next(iter(kinds))) if len(kinds) == 1 else None
    if alike is not None and alike.parts is not None:
        return tensors.parts(alike.parts) if type(tensors) is SpreadLeaves else as_placed_leaves(
            alike.parts(tensors))
    found: list[Tensor] = []
    for kind in kinds:
        parts = how.parts if (how := DONATABLE.get(kind)) is not None else None
        mine = tensors if len(kinds) == 1 else [x for x in tensors if type(x) is kind]
        found += mine if parts is None else parts(mine)
    return found


def _memories(x: Tensor) -> set[int]:
    return {id(p.storage) for p in _component_tensors([x]) if p.storage is not None}


__all__ = ["ALONE", "DONATABLE", "Donatable", "DonatedTensor", "alone", "are_apart", "blank",
           "check_donated", "forget_origins", "unseen", "use_up"]
