"""Arguments that a call may use up: `ts.jit(donate=("params", "state"))`.

On a GPU a result takes the memory of such an argument where the plan allows it; on the host the
memory is freed. The tensor is used up then: what reads it is an error that names the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import ArgumentError, SourceLine, short_path, user_line
from ..tensor import Tensor
from ..tile.launch.resident import Resident


class _UsedUp:
    """What reads the elements of a donated tensor, or asks where they lie, raises ArgumentError."""

    __slots__ = ()

    def _raise(self) -> NoReturn:
        where, function = _held(self)
        at = f" at {short_path(where.file)}:{where.line}" if where is not None else ""
        raise ArgumentError(
            f"a {self.type}{list(self.shape)} is used after it was donated to "  # type: ignore
            f"{function}{at}: its memory is a result's now", where=user_line(),
            hint="use what the call returned; or leave the argument out of donate=, or donate a "
                 "copy: x.copy()")

    _buffer = memory = storage = place = device = property(_raise)

    def __repr__(self) -> str:
        where, function = _held(self)
        at = f" at {short_path(where.file)}:{where.line}" if where is not None else ""
        return (f"Tensor{list(self.shape)} {self.type}, "  # type: ignore[attr-defined]
                f"donated to {function}{at}")


class DonatedTensor(_UsedUp, Tensor):
    """A tensor in host memory that was donated."""

    __slots__ = ()


class DonatedResident(_UsedUp, Resident):
    """A tensor on a GPU that was donated."""

    __slots__ = ()


_USED_UP: dict[type, type] = {Tensor: DonatedTensor, Resident: DonatedResident}


def _slot(x: Any) -> Any:
    """What holds the memory of a tensor, and the donating call afterwards."""
    return Resident.__dict__["storage"] if isinstance(x, Resident) else Tensor.__dict__["_buffer"]


_SET = {DonatedTensor: Tensor.__dict__["_buffer"].__set__,
        DonatedResident: Resident.__dict__["storage"].__set__}


def _held(x: Any) -> tuple[SourceLine | None, str]:
    return _slot(x).__get__(x)


def use_up(leaves: Sequence[Tensor], donated: Sequence[int], function: str) -> None:
    """Take the memory away from the donated leaves of a call of this function."""
    where = user_line()
    held = where, function
    for x in (leaves[i] for i in donated):
        if (used := _USED_UP.get(type(x))) is not None:
            x.__class__ = used
            _SET[used](x, held)


def check_donated(leaves: Sequence[Tensor], donated: Sequence[int], names: Sequence[str],
                  function: str) -> None:
    """Raise ArgumentError where a donated tensor is given a second time."""
    memories = [x.storage for x in leaves if x.storage is not None]
    if len({*map(id, leaves)}) == len(leaves) and len({*map(id, memories)}) == len(memories):
        return
    for i in donated:
        for j, other in enumerate(leaves):
            same = leaves[i].storage is not None and other.storage is leaves[i].storage
            if i != j and (other is leaves[i] or same):
                raise ArgumentError(
                    f"{function}: {names[i]} is donated and is given as {names[j]} too",
                    hint="donate a copy, x.copy(), or give it once", where=user_line())


__all__ = ["DonatedResident", "DonatedTensor", "check_donated", "use_up"]
