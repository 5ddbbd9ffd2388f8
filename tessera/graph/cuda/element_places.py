"""Places of elements as sums, and what division makes of them when tensors are cut into other axes.

    (o0 * 64 + o1 * 2 + 1) // 2  ->  o0 * 32 + o1        # o1 < 32
    (o0 * 64 + o1 * 2 + 1) % 2   ->  1

o0, o1, ... count the elements of a result along its axes. A text is an expression in Python's
syntax, which kernels compute on tiles of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...lazy_dataclass import dataclass


@dataclass(frozen=True)
class ElementPlace:
    """constant + the sum of texts times their factors, which lies in least..most where it counts.

    bounds: of each text.  guarded: whether it lies there only where a condition holds.
    """

    terms: tuple[tuple[str, int], ...]
    constant: int
    least: int
    most: int
    bounds: tuple[tuple[str, int, int], ...] = ()
    guarded: bool = False

    @staticmethod
    def number(n: int) -> ElementPlace:
        return ElementPlace((), n, n, n)

    @staticmethod
    def along(axis: int, extent: int) -> ElementPlace:
        return ElementPlace.of(f"o{axis}", extent)

    @staticmethod
    def of(text: str, extent: int) -> ElementPlace:
        return _single(text, 0, extent - 1, False)

    def __add__(self, other: ElementPlace) -> ElementPlace:
        factors = dict(self.terms)
        for text, n in other.terms:
            factors[text] = factors.get(text, 0) + n
        terms = tuple((t, n) for t, n in factors.items() if n)
        bounds = dict.fromkeys(self.bounds + other.bounds)
        return ElementPlace(terms, self.constant + other.constant, self.least + other.least,
                     self.most + other.most, tuple(bounds), self.guarded or other.guarded)

    def times(self, n: int) -> ElementPlace:
        least, most = sorted((self.least * n, self.most * n))
        terms = tuple((t, f * n) for t, f in self.terms) if n else ()
        return ElementPlace(terms, self.constant * n, least, most, self.bounds,
                            self.guarded and n != 0)

    def plus(self, n: int) -> ElementPlace:
        return self + ElementPlace.number(n)

    def within(self, least: int, most: int) -> ElementPlace:
        """The same where it is known to lie in least..most, on a condition."""
        if self.least >= least and self.most <= most:
            return self
        least, most = max(least, self.least), min(most, self.most)
        if least == most:
            return replace(ElementPlace.number(least), guarded=True)
        return ElementPlace(self.terms, self.constant, least, most, self.bounds, True)

    def divided(self, n: int) -> tuple[ElementPlace, ElementPlace]:
        """Quotient and rest by n, of a place that is not below 0."""
        if n == 1:
            return self, ElementPlace.number(0)
        if self.most < n:
            return ElementPlace.number(0), self
        whole, rest = self._split(n)
        if rest.least >= 0 and rest.most < n:
            return whole.times_of(n), rest
        if rest.least < 0:
            whole, rest = ElementPlace.number(0), self
        text = rest.text
        quotient = _single(f"{_bracketed(text)} // {n}", max(0, rest.least) // n, rest.most // n,
                           rest.guarded)
        return whole.times_of(n) + quotient, _single(f"{_bracketed(text)} % {n}", 0, n - 1,
                                                     rest.guarded)

    def _split(self, n: int) -> tuple[ElementPlace, ElementPlace]:
        """What n divides, and what is left."""
        of = {t: (lo, hi) for t, lo, hi in self.bounds}
        parts = []
        for take in (True, False):
            terms = tuple((t, f) for t, f in self.terms if (f % n == 0) == take)
            constant = self.constant // n * n if take else self.constant % n
            ends = [sorted((of[t][0] * f, of[t][1] * f)) for t, f in terms]
            parts.append(ElementPlace(terms, constant, constant + sum(e[0] for e in ends),
                               constant + sum(e[1] for e in ends), self.bounds, self.guarded))
        return parts[0], parts[1]

    def times_of(self, n: int) -> ElementPlace:
        """By n, which divides all of it."""
        return ElementPlace(tuple((t, f // n) for t, f in self.terms), self.constant // n,
                     self.least // n, self.most // n, self.bounds, self.guarded)

    @property
    def text(self) -> str:
        parts = [t if n == 1 else f"{_bracketed(t)} * {n}" for t, n in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


Places = tuple[ElementPlace, ...]


def _single(text: str, least: int, most: int, guarded: bool) -> ElementPlace:
    if least == most:
        return ElementPlace.number(least)
    return ElementPlace(((text, 1),), 0, least, most, ((text, least, most),), guarded)


def _bracketed(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def flat(at: Sequence[ElementPlace], shape: Sequence[int]) -> ElementPlace:
    """The number of an element in row-major order."""
    total = ElementPlace.number(0)
    for i, p in enumerate(at):
        total = total + p.times(prod(shape[i + 1:]))
    return total


def unflat(number: ElementPlace, shape: Sequence[int]) -> tuple[ElementPlace, ...]:
    """The places of an element of a number."""
    out = list[ElementPlace]()
    for extent in reversed(shape):
        number, rest = number.divided(extent)
        out.append(rest if extent > 1 else ElementPlace.number(0))
    return tuple(reversed(out))


# --- moves --------------------------------------------------------------------------------------
def broadcast_places(at: Places, shape: tuple[int, ...]) -> Places:
    """In what is stretched to the places' axes."""
    own = at[len(at) - len(shape):]
    return tuple(ElementPlace.number(0) if n == 1 else p for p, n in zip(own, shape, strict=True))


def _sliced(at: Places, x: Any, attrs: Any, y: Any) -> Places:
    return tuple(p.times(step).plus(start) for p, start, step in zip(
        at, attrs["starts"], attrs["steps"], strict=True))


def _transposed(at: Places, x: Any, attrs: Any, y: Any) -> Places:
    own = [ElementPlace.number(0)] * len(at)
    for p, a in zip(at, attrs["axes"], strict=True):
        own[a] = p
    return tuple(own)


def _flipped(at: Places, x: Any, attrs: Any, y: Any) -> Places:
    return tuple(p.times(-1).plus(n - 1) if a in attrs["axis"] else p
                 for a, (p, n) in enumerate(zip(at, x, strict=True)))


# Where the element of a result at some places lies in what it is moved from, of extents x.
MOVED = {
    "slice": _sliced, "transpose": _transposed, "flip": _flipped,
    "broadcast_to": lambda at, x, attrs, y: broadcast_places(at, x),
    "reshape": lambda at, x, attrs, y: unflat(flat(at, y), x),
}

__all__ = ["MOVED", "ElementPlace", "Places", "broadcast_places", "flat", "unflat"]
