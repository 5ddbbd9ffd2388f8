"""What a cast lost: the counters behind the numerics sentinels."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from ..lazy_dataclass import dataclass


@dataclass
class CastCounts:
    """Elements of a cast by fate. `encode(..., counts=c)` adds to `c`; `a + b` is a new record.

    overflow   finite inputs beyond the target's range (whatever they became: max, inf or NaN)
    underflow  nonzero inputs that became zero
    nan, inf   inputs that were NaN, +-inf
    subnormal  inputs that became a nonzero subnormal, where precision is already lost
    """

    overflow: int = 0
    underflow: int = 0
    nan: int = 0
    inf: int = 0
    subnormal: int = 0

    def __add__(self, other: CastCounts) -> CastCounts:
        if not isinstance(other, CastCounts):
            return NotImplemented
        names = [f.name for f in fields(self)]
        return CastCounts(*(getattr(self, n) + getattr(other, n) for n in names))

    def add(self, **more: int | np.integer) -> None:
        """Adds to the named counters in place."""
        for name, n in more.items():
            setattr(self, name, getattr(self, name) + int(n))

    @property
    def total(self) -> int:
        return self.overflow + self.underflow + self.nan + self.inf + self.subnormal
