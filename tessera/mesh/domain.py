"""`ts.domain`: rectangles of indices, which say what there is and who holds which part of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tessera.errors import ArgumentError, ShapeError
from tessera.lazy_dataclass import dataclass


@dataclass(frozen=True, init=False)
class Rect:
    """The indices lo <= i < hi in every dimension: `Rect((4, 6))`, `Rect((2, 3), lo=(2, 3))`.

    dims: the extents   lo: where it begins, zeros when left out
    Raises ArgumentError for an extent that is no integer >= 0, ShapeError when lo has another
    number of dimensions.
    """

    lo: tuple[int, ...]
    shape: tuple[int, ...]

    def __init__(self, dims: Sequence[int], lo: Sequence[int] | None = None):
        shape = _integers(dims, "the extents")
        first = (0,) * len(shape) if lo is None else _integers(lo, "the first index")
        if len(first) != len(shape):
            raise ShapeError(f"a rectangle of {len(shape)} dimensions cannot begin at {first}")
        object.__setattr__(self, "lo", first)
        object.__setattr__(self, "shape", shape)

    @property
    def hi(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.lo, self.shape, strict=True))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of indices."""
        return prod(self.shape)

    def __contains__(self, index: Sequence[int]) -> bool:
        return len(index) == self.ndim and all(
            a <= i < b for i, a, b in zip(index, self.lo, self.hi, strict=True))

    def __and__(self, other: Rect) -> Rect:
        """The indices of both; of extent 0 where they do not meet."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = map(min, self.hi, other.hi)
        return Rect([max(0, b - a) for a, b in zip(lo, hi, strict=True)], lo)

    def slices(self, start: Sequence[int] | None = None) -> tuple[slice, ...]:
        """How this part is cut out of an array whose first element is `start` (default: 0...)."""
        start = start if start is not None else (0,) * self.ndim
        return tuple(slice(a - s, b - s)
                     for a, b, s in zip(self.lo, self.hi, start, strict=True))

    def __str__(self) -> str:
        inner = ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True))
        return f"[{inner}]"


def _integers(values: Sequence[int], what: str) -> tuple[int, ...]:
    values = tuple(values) if isinstance(values, Sequence) else (values,)
    if any(isinstance(v, bool) or not hasattr(v, "__index__") or int(v) < 0 for v in values):
        raise ArgumentError(f"{what} of a rectangle are integers >= 0, got {values!r}",
                            hint="ts.domain.Rect((128, 256))")
    return tuple(int(v) for v in values)


__all__ = ["Rect"]
