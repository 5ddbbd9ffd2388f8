"""Kernels that move elements: transpositions, slices, flips, repetitions, parts of a whole.

Element o of the region goes to o + offset of the result, and comes from start + step * o of the
source, axis by axis. One or two axes are those of tiles, the others are the grid's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..ir import Node
from ..schedule.ir import ScheduledGroup
from ..schedule.loop_axes import extents_of
from .kernel_text import KernelText, KernelWriter, capital


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


def _parts(node: Node) -> list[tuple[int, int, RegionCopy]]:
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
         "split": _parts, "concatenate": _parts}


def move_source(group: ScheduledGroup) -> KernelText:
    """A part that reaches over its end into the next is overwritten by it: parts go in order."""
    w = KernelWriter(group)
    move = RegionCopy(group.attr("region"), group.attr("offset"), group.attr("from"))
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    tiles, s = group.attr("tile"), group.schedule
    sizes = dict(zip(reversed(tiles), (s.n, s.m), strict=False))
    for i, o in enumerate(range(len(move.region))):
        times = f" * {sizes[o]}" if o in sizes else ""
        w.line(f"i{o} = tile.group_id({i}){times}")
    source = [_from(move, a, sizes) for a in range(len(move.axes))]
    target = [_span(_sum(f"i{o}", at), sizes.get(o)) for o, at in enumerate(move.offset)]
    Y = f"{capital(y.name)}[{', '.join(target) or '0'}]"
    X = f"{capital(x.name)}[{', '.join(source) or '0'}]"
    w.line(f"{Y} = {_value(move, tiles, sizes, X)}", step)
    shapes = [o.shape or (1,) for o in (x, y)]
    texts = [f"{capital(o.name)}: {w.annotation(o, d)}"
             for o, d in zip((x, y), shapes, strict=True)]
    return w.finish(texts, f"(grid={group.grid})", shapes)


def _sum(text: str, number: int) -> str:
    return f"{text} + {number}" if number else text


def _span(text: str, size: int | None) -> str:
    return text if size is None else f"{text}:{text}+{size}"


def _from(move: RegionCopy, axis: int, sizes: dict[int, int]) -> str:
    o, start, step = move.axes[axis]
    if o < 0:
        return str(start)
    if step == 1:
        return _span(_sum(f"i{o}", start), sizes.get(o))
    return f"{start} - i{o}" if step == -1 else f"{start} + {step} * i{o}"


def _value(move: RegionCopy, tiles: tuple[int, ...], sizes: dict[int, int], place: str) -> str:
    """The tile as the result has it: axes turned, and repeated where the source has none."""
    held = [o for o, _, _ in move.axes if o in tiles]
    if not held:
        return place
    text = f"tile.load({place})"
    if len(tiles) < 2:
        return text
    if len(held) == 2:
        return text if held == list(tiles) else f"{text}.T"
    turned = f"{text}[None, :]" if held[0] == tiles[1] else text
    return f"tile.broadcast({turned}, ({sizes[tiles[0]]}, {sizes[tiles[1]]}))"


__all__ = ["RegionCopy", "move_source", "moves_of"]
