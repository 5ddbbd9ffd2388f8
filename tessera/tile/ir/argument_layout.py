"""How an argument lies in a larger array: the kernel indexes [heads, S, D], memory is [B, S, 3, D].

    ArgumentLayout((2, 256, 6, 64), (AxisPlace(0, 2), AxisPlace(1), AxisPlace(0, 1, 2, 2),
                                     AxisPlace(2)))

is a head h of 4, which lies at [h // 2, s, h % 2 + 2, d].
"""

from __future__ import annotations

from ...lazy_dataclass import dataclass


@dataclass(frozen=True)
class AxisPlace:
    """The index along one axis of memory: start + index[axis] // divisor % modulus.

    axis: of the argument, -1 where the index is `start` alone.  modulus: 0 for none.
    reversed: start - index[axis] // divisor % modulus
    """

    axis: int
    divisor: int = 1
    modulus: int = 0
    start: int = 0
    reversed: bool = False

    @property
    def shifted(self) -> bool:
        """The index of the argument plus a number."""
        return self.axis >= 0 and self.divisor == 1 and not (self.modulus or self.reversed)

    def __str__(self) -> str:
        if self.axis < 0:
            return str(self.start)
        text = f"i{self.axis}"
        text += f"//{self.divisor}" if self.divisor > 1 else ""
        text += f"%{self.modulus}" if self.modulus else ""
        if self.reversed:
            return f"{self.start}-{text}"
        return f"{text}+{self.start}" if self.start else text


@dataclass(frozen=True)
class ArgumentLayout:
    """extents: of the memory, in row-major order.  places: the index along each of its axes."""

    extents: tuple[int, ...]
    places: tuple[AxisPlace, ...]

    def place_of(self, axis: int) -> int | None:
        """The axis of memory along which one of the argument lies, alone; None where there is no
        such axis."""
        found = [i for i, p in enumerate(self.places) if p.axis == axis]
        return found[0] if len(found) == 1 and self.places[found[0]].shifted else None

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.places))}] of {list(self.extents)}"


__all__ = ["ArgumentLayout", "AxisPlace"]
