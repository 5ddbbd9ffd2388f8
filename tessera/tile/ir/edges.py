"""Which elements of a tile exist: a fact of every traced value, beside its type.

A box may reach beyond its tensor. Each axis of a tile therefore says what it knows of that:

    None     nothing of any tensor: made of numbers alone (full, arange). Meets any edge.
    Edge     element i is element first + i of an axis with `extent` elements; inside: all exist
    Listed   no interval says which exist, but a tile of bool can: edges before a reshape
    Mixed    some elements may not exist, and nothing says which

Every op carries these facts by the rule in its record (`edges`, see edge_rules.py), which
`Emitter.emit` applies. An op whose elements meet each other says so in its record (`combines`), and
`emit` masks what lies beyond the edge with the neutral element, or raises an error where nothing
tells which elements those are (edge_masks.py). Branches and loops join the facts of their values,
shared memory those of what is stored to it (edge_facts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from typing import Any

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.affine import Form


@dataclass(frozen=True)
class Edge:
    """Element i of the axis is element first + i of a tensor's axis: it exists where that is at
    least 0 and below `extent`.

    key       equal for two edges that are one (first and extent are forms over values)
    low       whether first may be below 0     inside: whether all elements exist
    zero      whether what lies beyond is 0 (as it was loaded)
    offset, size: first and extent as operands, where they are visible
    """

    key: Any
    low: bool = False
    inside: bool = False
    zero: bool = False
    first: Form | None = field(default=None, compare=False)
    extent: Form | None = field(default=None, compare=False)
    offset: Any = field(default=None, compare=False)
    size: Any = field(default=None, compare=False)
    where: SourceLine | None = field(default=None, compare=False)

    @property
    def placed(self) -> bool:
        """Whether the position in a tensor is known."""
        return self.first is not None


@dataclass(frozen=True)
class Mixed:
    """Elements may lie beyond an edge, and it is not known which. why: completes 'it ...'.

    zero      those that do are 0, so that a sum needs no mask
    running   a loop adds to it: elements are sums of what existed in each iteration
    """

    why: str = field(compare=False)
    zero: bool = False
    running: bool = False
    where: SourceLine | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Listed:
    """Of every axis of a tile alike: a tile of `shape` with these edges went through `steps`:
    ('reshape', shape), ('transpose', None), ('permute', axes), ('expand_dims', axis), ('any',
    reduced axis)."""

    edges: tuple[Edge | None, ...]
    shape: tuple[int, ...]
    steps: tuple[tuple[str, Any], ...]
    zero: bool = False
    where: SourceLine | None = field(default=None, compare=False)

    @property
    def key(self) -> Any:
        return tuple(e and e.key for e in self.edges), self.shape, self.steps

    def then(self, name: str, value: Any = None) -> Listed:
        return replace(self, steps=(*self.steps, (name, value)))


WHOLE = Edge(None, inside=True)  # every element counts; where it lies is not known
Axis = Edge | Listed | Mixed | None


@dataclass(frozen=True)
class TileEdges:
    """Of one tile. axes: one Axis each, () for none at all; zeros: every element is 0."""

    axes: tuple[Axis, ...] = ()
    zeros: bool = False

    def at(self, axis: int) -> Axis:
        return self.axes[axis] if self.axes else None

    def zero_at(self, axis: int) -> bool:
        """Whether what lies beyond the edge of an axis is 0; without an edge, whether all is."""
        found = self.at(axis)
        return self.zeros or (found.zero if open_(found) else False)  # type: ignore[union-attr]

    @staticmethod
    def of(axes: Iterable[Axis], zeros: bool = False) -> TileEdges:
        axes = tuple(axes)
        return TileEdges(axes if any(a is not None for a in axes) else (), zeros)


NOTHING = TileEdges()


def open_(axis: Axis) -> bool:
    """Whether some element along the axis may not exist."""
    return isinstance(axis, Mixed | Listed) or (isinstance(axis, Edge) and not axis.inside)


# --- meeting --------------------------------------------------------------------------------------
def intersection(axes: Sequence[Axis], zero: bool, kind: str, where: SourceLine | None) -> Axis:
    """Of an element computed from elements of all: it exists where all of them do.

    zero: whether the result is 0 where all that are beyond are 0; kind: the op's `zero`. Where the
    edges differ, a product is 0 beyond each; a sum with a zero is the other operand, which only a
    running total may be.
    """
    mixed = [a for a in axes if isinstance(a, Mixed)]
    known = [a for a in axes if open_(a) and not isinstance(a, Mixed)]
    edges = _without_statistics(known)
    if len(edges) < len(known):  # a row's statistic is not 0 where one of its elements exists
        zero = zero and kind == "wins"
    if mixed and len(mixed) + len(edges) == 1:
        return replace(mixed[0], zero=zero, running=zero and kind == "keeps" and mixed[0].running)
    if mixed:
        running = zero and kind == "keeps" and any(m.running for m in mixed)
        return replace(mixed[0], zero=running or zero and kind == "wins", running=running)
    if len({e.key for e in edges}) > 1:
        return Mixed(f"is computed from two edges{lines_of(edges)}", zero and kind == "wins",
                     where=where)
    if edges:
        return _merged(edges, zero)
    return next((a for a in axes if a is not None), None)


def _merged(edges: Sequence[Any], zero: bool) -> Axis:
    """Edges that are one."""
    if isinstance(edges[0], Edge):
        return replace(edges[0], zero=zero, low=any(e.low for e in edges))
    return replace(edges[0], zero=zero)


def _without_statistics(edges: list[Any]) -> list[Any]:
    """A statistic along an axis, spread along it again, exists where one of its elements does."""
    def of(e: Any) -> Any:
        last = e.steps[-2:] if isinstance(e, Listed) else ()
        known = [n for n, _ in last] == ["any", "expand_dims"] and last[0][1] == last[1][1]
        return replace(e, steps=e.steps[:-2]).key if known else None

    keys = {e.key for e in edges}
    return [e for e in edges if of(e) not in keys]


def join(a: Axis, b: Axis, zero: bool, how: str, where: SourceLine | None) -> Axis:
    """Of an element that is one or the other. Numbers alone take the edge of the other."""
    if a is None or b is None:
        found = b if a is None else a
        return replace(found, zero=zero) if open_(found) else found  # type: ignore[type-var]
    if not isinstance(a, Mixed) and not isinstance(b, Mixed) and a.key == b.key and (
            open_(a) == open_(b)):
        return _merged([a, b], zero)
    if not open_(a) and not open_(b):
        return WHOLE
    for x in (a, b):
        if isinstance(x, Mixed):
            return replace(x, zero=zero, running=False)
    edges = [x for x in (a, b) if open_(x)]
    what = "two different edges" if len(edges) > 1 else "an edge and none"
    return Mixed(f"has {what}{lines_of(edges)} {how}", zero, where=where)


def join_facts(a: TileEdges, b: TileEdges, rank: int, how: str,
               where: SourceLine | None) -> TileEdges:
    def zero(i: int) -> bool:
        return all(not open_(x.at(i)) or x.zero_at(i) for x in (a, b))

    return TileEdges.of((join(a.at(i), b.at(i), zero(i), how, where) for i in range(rank)),
                        a.zeros and b.zeros)


def lines_of(edges: Iterable[Any]) -> str:
    lines = sorted({e.where.line for e in edges if e.where is not None})
    return f" (line{'s' * (len(lines) > 1)} {' and '.join(map(str, lines))})" if lines else ""


def forget_zero(a: Axis) -> Axis:
    return replace(a, zero=False) if open_(a) else a  # type: ignore[type-var]


__all__ = ["NOTHING", "WHOLE", "Axis", "Edge", "TileEdges", "Listed", "Mixed", "forget_zero",
           "join",
           "join_facts", "lines_of", "intersection", "open_"]
