"""Ops that move elements, as copies of a region: transpositions, slices, flips, repetitions, parts
of a whole.

Element o of the region goes to o + offset of the result, and comes from start + step * o of the
source, axis by axis. Where a region is all of one side, that side may be a part of the other's
memory instead (`part_of_source`, `part_of_result`).
"""

from __future__ import annotations

from math import prod

from ...lazy_dataclass import dataclass
from ..ir import Node
from .layouts import StridedLayout
from .loop_axes import extents_of


@dataclass(frozen=True)
class RegionCopy:
    """region: extents that are moved.  offset: of the region in the result, per axis.

    axes: per axis of the source, (axis of the region or -1, start, step).
    """

    region: tuple[int, ...]
    offset: tuple[int, ...]
    axes: tuple[tuple[int, int, int], ...]

    def run_in_result(self, shape: tuple[int, ...]) -> int | None:
        """The element at which the region begins where it is a run of a result's elements."""
        return _run(self.offset, self.region, shape)

    def run_in_source(self, shape: tuple[int, ...]) -> int | None:
        """The same of the source, where it is copied as it lies."""
        if [(a, step) for a, _, step in self.axes] != [(a, 1) for a in range(len(self.region))]:
            return None
        return _run(tuple(start for _, start, _ in self.axes), self.region, shape)

    def merged(self, source: tuple[int, ...], result: tuple[int, ...]
               ) -> tuple[RegionCopy, tuple[int, ...], tuple[int, ...]]:
        """The same with neighbours in one axis that are so on both sides, and the extents of these:
        blocks along 56 x 56 places are those along 3136."""
        move = self
        for o in reversed(range(len(self.region) - 1)):
            a = next((a for a in range(len(move.axes) - 1) if move.axes[a][0] == o), -1)
            n = move.region[o + 1]
            if a < 0 or move.axes[a + 1] != (o + 1, 0, 1) or move.axes[a][2] != 1 or (
                    n != source[a + 1] or n != result[o + 1]):
                continue
            own = [(i - (i > o), start, step) for i, start, step in move.axes]
            own[a:a + 2] = [(o, move.axes[a][1] * n, 1)]
            move = RegionCopy((*move.region[:o], move.region[o] * n, *move.region[o + 2:]),
                              (*move.offset[:o], move.offset[o] * n, *move.offset[o + 2:]),
                              tuple(own))
            source = *source[:a], source[a] * n, *source[a + 2:]
            result = *result[:o], result[o] * n, *result[o + 2:]
        return move, source, result

    def part_of_source(self, source: StridedLayout) -> StridedLayout | None:
        """The region where it lies in the source: in steps, and again and again along an axis that
        the source has not. None where strides cannot say it."""
        extents = tuple(1 if o < 0 else self.region[o] for o, _, _ in self.axes)
        found = source.part(tuple(start for _, start, _ in self.axes), extents,
                            tuple(step for _, _, step in self.axes))
        if found is None:
            return None
        own = {o: axis for (o, _, _), axis in zip(self.axes, found.axes, strict=True)}
        again = (((n, 0),) if n > 1 else () for n in self.region)
        return StridedLayout(tuple(own.get(o, axis) for o, axis in enumerate(again)), found.offset)

    def part_of_result(self, source: tuple[int, ...],
                       result: StridedLayout) -> StridedLayout | None:
        """The source where it belongs in the result; None where the region is not all of it."""
        if any(o < 0 or start or step != 1 for o, start, step in self.axes) or (
                tuple(self.region[o] for o, _, _ in self.axes) != source
                or len(self.axes) != len(self.region)):
            return None
        found = result.part(self.offset, self.region)
        return None if found is None else found.permuted([o for o, _, _ in self.axes])

    def tile_axes(self) -> tuple[int, ...]:
        """The axes of the tile, at most two: where elements are neighbours in the result, and
        where they are in the source."""
        plain = [o for o in range(len(self.region))
                 if all(step == 1 for a, _, step in self.axes if a == o)]
        last = len(self.region) - 1
        inner = next((a for a, _, _ in reversed(self.axes) if a >= 0 and self.region[a] > 1), -1)
        wanted = [last, inner, last - 1, *reversed(range(last))]
        found: list[int] = []
        for o in wanted:
            if o in plain and o not in found:
                found.append(o)
        return tuple(sorted(found[:2]))


def _run(start: tuple[int, ...], region: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """Behind axes of one element an axis of which a part is taken, and whole axes: the number of
    the first element. None where the elements lie apart."""
    partly = [a for a in range(len(shape)) if region[a] != shape[a]]
    first = partly[0] if partly else 0
    if any(a != first for a in partly) or prod(region[:first]) != 1:
        return None
    return sum(n * prod(shape[a + 1:]) for a, n in enumerate(start))


def moves_of(node: Node) -> list[tuple[int, int, RegionCopy]]:
    """(operand, result, move) for each part of a structural op."""
    return MOVES[node.op.name](node)


def _from_one(node: Node, axes: tuple) -> list[tuple[int, int, RegionCopy]]:
    shape = extents_of(node.outputs[0])
    return [(0, 0, RegionCopy(shape, (0,) * len(shape), axes))]


def _transposed(node: Node) -> list[tuple[int, int, RegionCopy]]:
    places = node.attrs["axes"]
    return _from_one(node, tuple((places.index(a), 0, 1) for a in range(len(places))))


def _sliced(node: Node) -> list[tuple[int, int, RegionCopy]]:
    spans = zip(node.attrs["starts"], node.attrs["steps"], strict=True)
    return _from_one(node, tuple((a, s, k) for a, (s, k) in enumerate(spans)))


def _flipped(node: Node) -> list[tuple[int, int, RegionCopy]]:
    shape, flipped = extents_of(node.outputs[0]), node.attrs["axis"]
    return _from_one(node, tuple((a, n - 1, -1) if a in flipped else (a, 0, 1)
                                 for a, n in enumerate(shape)))


def _stretched(node: Node) -> list[tuple[int, int, RegionCopy]]:
    x, shape = node.inputs[0].aval.shape, node.outputs[0].aval.shape
    lead = len(shape) - len(x)
    return _from_one(node, tuple((a + lead, 0, 1) if n == shape[a + lead] else (-1, 0, 1)
                                 for a, n in enumerate(x)))


def _axis_copies(node: Node) -> list[tuple[int, int, RegionCopy]]:
    """concatenate and split: runs of one axis."""
    axis, at = node.attrs["axis"], 0
    out: list[tuple[int, int, RegionCopy]] = []
    joins = node.op.name == "concatenate"
    for i, v in enumerate(node.inputs if joins else node.outputs):
        shape = extents_of(v)
        here = tuple(at if a == axis else 0 for a in range(len(shape)))
        none = (0,) * len(shape)
        axes = tuple((a, 0 if joins else here[a], 1) for a in range(len(shape)))
        if 0 not in shape:
            out.append((i if joins else 0, 0 if joins else i,
                        RegionCopy(shape, here if joins else none, axes)))
        at += shape[axis]
    return out


MOVES = {"transpose": _transposed, "broadcast_to": _stretched, "slice": _sliced, "flip": _flipped,
         "split": _axis_copies, "concatenate": _axis_copies}


__all__ = ["MOVES", "RegionCopy", "moves_of"]
