"""Choosing one of several candidates for each of many things, so that all together cost least.

    found = search(choices, cost, limit)        choices: {"W1": [spec, ...], ...}

`cost` sees a whole assignment: how good a choice is depends on the others. Few assignments are all
tried; of many, a beam search from the uniform ones, and then single changes until none helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod
from typing import Any

from ..lazy_dataclass import dataclass

EXHAUSTIVE = 512  # assignments that are all tried
BEAM = 4  # assignments kept while a beam search goes over the names
ROUNDS = 8  # of single changes over all names


@dataclass(frozen=True)
class Cost:
    """seconds: what is made least   then: decides between equals   bytes: held by a rank"""

    seconds: float
    bytes: float
    then: float = 0.0


@dataclass(frozen=True)
class SearchResult:
    """The best assignment, what it costs, how many were looked at; least_bytes: of all of them."""

    assignment: Mapping[str, Any]
    cost: Cost
    tried: int
    least_bytes: float


Assignment = tuple[int, ...]  # the number of the choice for each name


@dataclass
class _Space:
    names: tuple[str, ...]
    choices: tuple[Sequence[Hashable], ...]
    price: Callable[[Mapping[str, Any]], Cost]
    limit: float
    known: dict[Assignment, Cost] = field(default_factory=dict)

    def cost(self, a: Assignment) -> Cost:
        if a not in self.known:
            self.known[a] = self.price(self.named(a))
        return self.known[a]

    def named(self, a: Assignment) -> dict[str, Any]:
        return {n: c[i] for n, c, i in zip(self.names, self.choices, a, strict=True)}

    def order(self, a: Assignment) -> tuple[float, float, float]:
        """What is over the limit comes first, so that a search moves towards what fits."""
        c = self.cost(a)
        return max(0.0, c.bytes - self.limit), c.seconds, c.then

    def changes(self, a: Assignment, at: int) -> Iterator[Assignment]:
        for i in range(len(self.choices[at])):
            yield (*a[:at], i, *a[at + 1:])


def search(choices: Mapping[str, Sequence[Hashable]], cost: Callable[[Mapping[str, Any]], Cost],
           limit: float = float("inf")) -> SearchResult | None:
    """The assignment of least cost that holds no more than `limit` bytes; None when none was found
    that does. The first choice of each name is where the search begins.

    Never worse than any uniform assignment, which gives every name the same choice, and its first
    where it has no such choice.
    """
    space = _Space(tuple(choices), tuple(choices.values()), cost, limit)
    if prod(map(len, space.choices)) <= EXHAUSTIVE:
        for a in itertools.product(*(range(len(c)) for c in space.choices)):
            space.cost(a)
    else:
        for start in _beam(space, sorted(set(_uniform(space)), key=space.order)):
            _descend(space, start)
    best = min(space.known, key=space.order)
    found = space.known[best]
    if found.bytes > limit:
        return None
    return SearchResult(space.named(best), found, len(space.known),
                        least_bytes(space.known.values()))


def least(choices: Mapping[str, Sequence[Hashable]], cost: Callable[[Mapping[str, Any]], Cost]
          ) -> SearchResult:
    """The assignment that holds fewest bytes."""
    def held(a: Mapping[str, Any]) -> Cost:
        c = cost(a)
        return Cost(c.bytes, c.bytes, c.seconds)

    found = search(choices, held)
    assert found is not None
    return found


def least_bytes(costs: Any) -> float:
    return min(c.bytes for c in costs)


def _uniform(space: _Space) -> Iterator[Assignment]:
    """The first choice of all, and each choice for all that have it."""
    yield (0,) * len(space.names)
    for choice in dict.fromkeys(itertools.chain(*space.choices)):
        yield tuple(list(c).index(choice) if choice in c else 0 for c in space.choices)


def _beam(space: _Space, starts: Sequence[Assignment]) -> list[Assignment]:
    """The best after going over the names once, keeping the best few at each."""
    kept = list(starts[:BEAM])
    for at in range(len(space.names)):
        wider = {b for a in kept for b in space.changes(a, at)}
        kept = sorted(wider, key=lambda a: (space.order(a), a))[:BEAM]
    return kept[:1]


def _descend(space: _Space, start: Assignment) -> Assignment:
    """Single changes, the best at each name, until a round brings none."""
    here = start
    for _ in range(ROUNDS):
        before = here
        for at in range(len(space.names)):
            here = min(space.changes(here, at), key=lambda a: (space.order(a), a))
        if here == before:
            break
    return here


__all__ = ["Cost", "SearchResult", "least", "search"]
