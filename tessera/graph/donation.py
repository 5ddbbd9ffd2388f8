"""Arguments that a call may use up: `ts.jit(donate=("params", "state"))`.

On a GPU a result takes the memory of such an argument where the plan allows it; on the host the
memory is freed. The tensor is used up then: what reads it is an error that names the call. Of a
distributed tensor the parts are used up, with the whole.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import getweakrefcount

from ..errors import ArgumentError, SourceLine, short_path, user_line
from ..tensor import Tensor
from ..tile.launch.resident import Resident


class UsedUp:
    """What reads the elements of a donated tensor, or asks where they lie, raises ArgumentError."""

    __slots__ = ()

    def raise_used_up(self) -> NoReturn:
        where, function = _call_of(self)
        at = f" at {short_path(where.file)}:{where.line}" if where is not None else ""
        raise ArgumentError(
            f"a {self.type}{list(self.shape)} is used after it was donated to "  # type: ignore
            f"{function}{at}: its memory is a result's now", where=user_line(),
            hint="use what the call returned; or leave the argument out of donate=, or donate a "
                 "copy: x.copy()")

    _buffer = memory = storage = place = device = property(raise_used_up)

    def __repr__(self) -> str:
        where, function = _call_of(self)
        at = f" at {short_path(where.file)}:{where.line}" if where is not None else ""
        return (f"Tensor{list(self.shape)} {self.type}, "  # type: ignore[attr-defined]
                f"donated to {function}{at}")


class DonatedTensor(UsedUp, Tensor):
    """A tensor in host memory that was donated."""

    __slots__ = ()


class DonatedResident(UsedUp, Resident):
    """A tensor on a GPU that was donated."""

    __slots__ = ()


Call = tuple[SourceLine | None, str]  # that used a tensor up: its line, and the function


class SpentTensors:
    """Tensors of a class that were used up. Those that nobody has any more are results of a later
    call: making the hundreds of a step anew takes a third of its time, and wakes Python's search
    for circles at each step."""

    def __init__(self) -> None:
        self._last: deque[list[Tensor]] = deque(maxlen=1)  # of the last call; pop is atomic

    def keep(self, tensors: list[Tensor]) -> None:
        if len(tensors) >= FEW:
            self._last.append(tensors)

    def take(self, count: int) -> list[Tensor]:
        """Up to so many, whose attributes and class are as they were."""
        try:
            batch = self._last.pop()
        except IndexError:
            return []
        counts = list(map(sys.getrefcount, batch))
        if max(counts) > ALONE or any(map(getweakrefcount, batch)):
            batch = [x for x, n in zip(batch, counts, strict=True)
                     if n <= ALONE and not getweakrefcount(x)]
        return batch[:count]


FEW = 32  # tensors of a call that are worth it


def blank(kind: type, count: int) -> list[Any]:
    """Tensors of which every attribute, and the class, is to be set: quicker than new ones."""
    new: Any = kind.__new__
    if count < FEW:
        return [new(kind) for _ in range(count)]
    made = DONATABLE[kind].spent.take(count)
    return [*made, *[new(kind) for _ in range(count - len(made))]]


@dataclass(frozen=True)
class Donatable:
    """How tensors of a class are used up. used: the class that they have then.  slot: what held
    their memory, and holds the call that took it.  take: puts it there, in many tensors at a call.
    parts: of tensors that are made of others."""

    used: type
    slot: Any
    take: Callable[[Sequence[Any], Call], None]
    parts: Callable[[Sequence[Any]], list[Tensor]] | None = None
    spent: SpentTensors = field(default_factory=SpentTensors)


def _take_host(tensors: Sequence[Tensor], call: Any) -> None:
    for x in tensors:
        x._buffer = call
        x.__class__ = DonatedTensor


def _take_resident(tensors: Sequence[Resident], call: Any) -> None:
    for x in tensors:
        x.storage = call
        x.narrow = None
        x.__class__ = DonatedResident


DONATABLE: dict[type, Donatable] = {  # mesh/tensor.py adds distributed tensors
    Tensor: Donatable(DonatedTensor, Tensor.__dict__["_buffer"], _take_host),
    Resident: Donatable(DonatedResident, Resident.__dict__["storage"], _take_resident)}


def _call_of(x: Any) -> Call:
    """The call that used a tensor up."""
    slot = next(d.slot for d in DONATABLE.values() if d.used is type(x))
    call: Call = slot.__get__(x)
    return call


def use_up(leaves: Sequence[Tensor], donated: Sequence[int], function: str) -> None:
    """Take the memory away from the donated leaves of a call of this function."""
    _take([leaves[i] for i in donated], (user_line(), function))


ALONE = list(map(sys.getrefcount, [object()]))[0]  # of what a list has and nobody else


def _take(tensors: list[Tensor], call: Call) -> None:
    kinds = {*map(type, tensors)}
    for kind in kinds & DONATABLE.keys():
        how = DONATABLE[kind]
        mine = tensors if len(kinds) == 1 else [x for x in tensors if type(x) is kind]
        if how.parts is not None:
            _take(how.parts(mine), call)
        how.take(mine, call)
        how.spent.keep(mine)


def check_donated(leaves: Sequence[Tensor], donated: Sequence[int], names: Sequence[str],
                  function: str) -> None:
    """Raise ArgumentError where a donated tensor is given a second time."""
    memories = [x.storage for x in _parts(leaves)]
    hosts = memories.count(None)
    if len({*memories}) - bool(hosts) == len(memories) - hosts and (
            len(memories) - hosts >= len(leaves) or len({*leaves}) == len(leaves)):
        return
    for i in donated:
        mine = _memories(leaves[i])
        for j, other in enumerate(leaves):
            if i != j and (other is leaves[i] or mine & _memories(other)):
                raise ArgumentError(
                    f"{function}: {names[i]} is donated and is given as {names[j]} too",
                    hint="donate a copy, x.copy(), or give it once", where=user_line())


def _parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What tensors are made of: themselves, or their parts."""
    kinds, found = {*map(type, tensors)}, list[Tensor]()
    for kind in kinds:
        parts = how.parts if (how := DONATABLE.get(kind)) is not None else None
        mine = tensors if len(kinds) == 1 else [x for x in tensors if type(x) is kind]
        found += mine if parts is None else parts(mine)
    return found


def _memories(x: Tensor) -> set[int]:
    return {id(p.storage) for p in _parts([x]) if p.storage is not None}


__all__ = ["ALONE", "DONATABLE", "Donatable", "DonatedResident", "DonatedTensor", "UsedUp",
           "blank", "check_donated", "use_up"]
