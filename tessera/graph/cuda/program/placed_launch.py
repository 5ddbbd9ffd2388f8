"""Launches of a program's kernels, again and again, on arrays that lie elsewhere from call to call.

    at = BufferAddress()                                   # a program keeps its pointer up to date
    launch = PlacedLaunch(kernel, (at, ...), stream)
    launch()

What a launch is (its machine code, its grid, its descriptors) follows from where its arrays lie
alone, once their extents are known. So it is found by the pointers, and the way that looks at the
arguments is taken where these are new.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from ....runtime.buffer import DEFAULT
from ....tile.launch.recipe import Recipe

KEPT = 1024  # places of the arrays of one launch; more are such as do not come again

Find = Callable[[tuple[int, ...]], Recipe]  # by pointers


class Pointed(Protocol):
    """What lies somewhere: a BufferAddress, or an array."""

    pointer: int


class BufferAddress:
    """Where a buffer lies in the call under way, or a part of it."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: int = 0):
        self.pointer = pointer


class PlacedLaunch:
    """A launch on what lies at these places. find: how a kernel is launched on arrays that begin
    there.  key: gives the words by which it draws in the call under way, None where it does not.
    alike: numbers of places that are as good as each other wherever they are, as what a call draws.
    """

    __slots__ = ("find", "places", "stream", "key", "alike", "_telling", "_known")

    def __init__(self, find: Find, places: Sequence[Pointed], stream: int,
                 key: Callable[[], tuple[int, int]] | None = None, alike: Collection[int] = ()):
        self.find, self.places, self.stream, self.key = find, tuple(places), stream, key
        self.alike = frozenset(alike)
        self._telling = [p for i, p in enumerate(places) if i not in alike] if alike else None
        self._known: dict[tuple[int, ...], Recipe] = {}

    def __call__(self) -> Any:
        pointers = tuple([p.pointer for p in self.places])
        told = pointers if self._telling is None else tuple([p.pointer for p in self._telling])
        recipe = self._known.get(told)
        if recipe is None:
            recipe = self._find(pointers, told)
        if recipe.quick and not recipe.words[0]:
            recipe.quick(self.stream, *pointers)
            return
        key = None if self.key is None else self.key()
        recipe.run(self.stream, pointers, (), self.stream != DEFAULT, key)

    @property
    def by_pointers(self) -> bool:
        """Whether what is launched follows from the pointers alone: it has no key to itself."""
        return self.key is None and self.stream == DEFAULT

    @property
    def known(self) -> Callable[[tuple[int, ...]], Recipe | None]:
        """The recipe by pointers, without those that are alike, where it is known."""
        return self._known.get

    def learn(self, pointers: tuple[int, ...], told: tuple[int, ...]) -> Recipe:
        """The recipe of arrays that begin there, though the program was told others. Nothing of it
        may run meanwhile. told: the pointers without those that are alike."""
        before = [p.pointer for p in self.places]
        try:
            for place, pointer in zip(self.places, pointers, strict=True):
                place.pointer = pointer
            return self._find(pointers, told)
        finally:
            for place, pointer in zip(self.places, before, strict=True):
                place.pointer = pointer

    def _find(self, pointers: tuple[int, ...], told: tuple[int, ...]) -> Recipe:
        if len(self._known) >= KEPT:
            self._known.clear()
        recipe = self._known[told] = self.find(pointers)
        return recipe


__all__ = ["BufferAddress", "PlacedLaunch"]
