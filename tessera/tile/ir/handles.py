"""What names stand for while a kernel is traced: constants as they are, and these."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.numerics import bool_
from tessera.tile.ir.ir import SSAValue
from tessera.tile.ir.types import Scalar, TileType, Type


@dataclass(frozen=True, eq=False)
class Traced:
    """What stands for something of run time: it has no truth of its own while a kernel is
    traced."""


@dataclass(frozen=True, eq=False)
class Handle(Traced):
    """A value of the IR.

    hidden: grid axes that stand for the leading extents of a tensor (composite dims).
    """

    value: SSAValue
    type: Type
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TensorRow(Traced):
    """A tensor or buffer indexed by fewer numbers than it has axes: the rest are whole."""

    base: Handle
    index: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class TensorSlice(Traced):
    """A part of a tensor or buffer whose extents need not be constants: x[:, a:b] where an op
    chooses along an axis."""

    base: Handle
    parts: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class LoopRange(Traced):
    """What ts.tile.range(...) or range(...) stands for in a `for`."""

    lo: Any
    hi: Any
    step: Any
    has_step: bool
    over: str | None
    prefetch: Any = None


class FText(Traced):
    """An f-string with run-time parts."""

    def __init__(self, parts: tuple):
        self.parts = parts


@dataclass(frozen=True)
class AxisSlice:
    """lo : hi of one axis; None where it was left out."""

    lo: Any
    hi: Any
    text: str


@dataclass(frozen=True)
class Undefined(Traced):
    """A name that has no value on some path: reading it is an error that says why."""

    why: str
    where: SourceLine | None


class Unset:
    """The result of a function before any `return` ran; takes the type of what it meets."""


UNSET = Unset()


class NeedConstants(Exception):
    """These extents must be compile-time constants: the kernel is traced again with them."""

    def __init__(self, names: frozenset[str]):
        super().__init__(", ".join(sorted(names)))
        self.names = names


class NeedGroupNumbers(Exception):
    """The kernel asks for the number of its group behind a range that was spread over groups: it is
    traced again, and the range is a loop of each group."""


Number = int | float | bool


def is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def plain_number(x: Any) -> Any:
    """A number of NumPy, np.float32(2.0), as Python's; anything else as it is."""
    return x.item() if isinstance(x, np.generic) and x.dtype.kind in "biufV" else x


def is_bool(x: Any) -> bool:
    """Whether x is True, False, or a scalar or tile of bools."""
    if isinstance(x, Handle):
        return isinstance(x.type, Scalar | TileType) and x.type.dtype is bool_
    return isinstance(x, bool)


def describe(x: Any) -> str:
    """A traced value for a message."""
    if isinstance(x, Handle):
        return str(x.type)
    if isinstance(x, TensorRow | TensorSlice):
        return f"a part of {x.base.type}"
    if is_number(x) or isinstance(x, str) or x is None:
        return repr(x)
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a {type(x).__name__}"


def has_run_time(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(has_run_time, x))
    return isinstance(x, Handle | TensorRow | Undefined | FText)
