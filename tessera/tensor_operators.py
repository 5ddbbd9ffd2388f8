"""Python's operators on tensors: functions of the graph layer, which fills the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

FUNCTIONS: dict[str, Callable] = {}  # every public op function, ts.<name>; filled there too
OPERATORS: dict[str, Callable] = {}  # method name -> function; filled by the graph layer


class Operators:
    """What Tensor inherits."""

    __slots__ = ()

    def __add__(self, other: Any) -> Self:
        return OPERATORS["__add__"](self, other)

    def __radd__(self, other: Any) -> Self:
        return OPERATORS["__radd__"](self, other)

    def __sub__(self, other: Any) -> Self:
        return OPERATORS["__sub__"](self, other)

    def __rsub__(self, other: Any) -> Self:
        return OPERATORS["__rsub__"](self, other)

    def __mul__(self, other: Any) -> Self:
        return OPERATORS["__mul__"](self, other)

    def __rmul__(self, other: Any) -> Self:
        return OPERATORS["__rmul__"](self, other)

    def __truediv__(self, other: Any) -> Self:
        return OPERATORS["__truediv__"](self, other)

    def __rtruediv__(self, other: Any) -> Self:
        return OPERATORS["__rtruediv__"](self, other)

    def __floordiv__(self, other: Any) -> Self:
        return OPERATORS["__floordiv__"](self, other)

    def __rfloordiv__(self, other: Any) -> Self:
        return OPERATORS["__rfloordiv__"](self, other)

    def __mod__(self, other: Any) -> Self:
        return OPERATORS["__mod__"](self, other)

    def __rmod__(self, other: Any) -> Self:
        return OPERATORS["__rmod__"](self, other)

    def __pow__(self, other: Any) -> Self:
        return OPERATORS["__pow__"](self, other)

    def __rpow__(self, other: Any) -> Self:
        return OPERATORS["__rpow__"](self, other)

    def __matmul__(self, other: Any) -> Self:
        return OPERATORS["__matmul__"](self, other)

    def __rmatmul__(self, other: Any) -> Self:
        return OPERATORS["__rmatmul__"](self, other)

    def __and__(self, other: Any) -> Self:
        return OPERATORS["__and__"](self, other)

    def __rand__(self, other: Any) -> Self:
        return OPERATORS["__rand__"](self, other)

    def __or__(self, other: Any) -> Self:
        return OPERATORS["__or__"](self, other)

    def __ror__(self, other: Any) -> Self:
        return OPERATORS["__ror__"](self, other)

    def __xor__(self, other: Any) -> Self:
        return OPERATORS["__xor__"](self, other)

    def __rxor__(self, other: Any) -> Self:
        return OPERATORS["__rxor__"](self, other)

    def __lshift__(self, other: Any) -> Self:
        return OPERATORS["__lshift__"](self, other)

    def __rlshift__(self, other: Any) -> Self:
        return OPERATORS["__rlshift__"](self, other)

    def __rshift__(self, other: Any) -> Self:
        return OPERATORS["__rshift__"](self, other)

    def __rrshift__(self, other: Any) -> Self:
        return OPERATORS["__rrshift__"](self, other)

    def __lt__(self, other: Any) -> Self:
        return OPERATORS["__lt__"](self, other)

    def __le__(self, other: Any) -> Self:
        return OPERATORS["__le__"](self, other)

    def __gt__(self, other: Any) -> Self:
        return OPERATORS["__gt__"](self, other)

    def __ge__(self, other: Any) -> Self:
        return OPERATORS["__ge__"](self, other)

    def __eq__(self, other: Any) -> Self:  # type: ignore[override]
        return OPERATORS["__eq__"](self, other)

    def __ne__(self, other: Any) -> Self:  # type: ignore[override]
        return OPERATORS["__ne__"](self, other)

    def __neg__(self) -> Self:
        return OPERATORS["__neg__"](self)

    def __pos__(self) -> Self:
        return self

    def __abs__(self) -> Self:
        return OPERATORS["__abs__"](self)

    def __invert__(self) -> Self:
        return OPERATORS["__invert__"](self)

    # --- made of the others --------------------------------------------------------------------
    def __divmod__(self, other: Any) -> tuple[Self, Self]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Self, Self]:
        return other // self, other % self

    def __round__(self, decimals: int | None = None) -> Self:
        """As np.round: halves to even, and of the type that ts.round has."""
        return OPERATORS["round"](self, decimals or 0)

    def __contains__(self, value: Any) -> bool:
        """Whether any element is equal to the value, with broadcasting, as NumPy has it."""
        return bool(OPERATORS["any"](self == value))
