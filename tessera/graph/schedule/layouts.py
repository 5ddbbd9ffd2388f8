"""Where the elements of a value lie in a buffer: extents and strides of each axis, and a first
element.

    q = StridedLayout.dense((2, 256, 384)).part((0, 0, 128), (2, 256, 128))    # a slice
    q = q.reshaped((2, 256, 2, 64)).permuted((0, 2, 1, 3))              # its heads
    argument_layout(q, (4, 256, 64))    # how a kernel of [heads, S, D] finds them in the buffer

An axis that was made of several, such as the heads of a batch, has several extents and strides: a
reshape is nearly always a layout again. A stride of 0 repeats an element, a negative one goes back
from the first. Which layouts a kernel can take is up to the target
(`ScheduleTarget.reads`, `.writes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod

from ...lazy_dataclass import dataclass
from ...tile.ir.argument_layout import ArgumentLayout, AxisPlace

Extents = tuple[int, ...]
Mode = tuple[int, int]  # extent and stride, in elements
Axis = tuple[Mode, ...]  # outermost first; () is an axis of one element
KEPT = 4096  # layouts that are remembered: those of another layer are asked for again


@dataclass(frozen=True)
class StridedLayout:
    """axes: the extents and strides that each axis is made of.  offset: of its first element."""

    axes: tuple[Axis, ...]
    offset: int = 0

    @staticmethod
    @lru_cache(KEPT)
    def dense(shape: Extents) -> StridedLayout:
        """Row-major, without gaps."""
        return StridedLayout(tuple(_axis(((n, prod(shape[a + 1:])),)) for a, n in enumerate(shape)))

    @property
    def shape(self) -> Extents:
        return tuple(prod(n for n, _ in axis) for axis in self.axes)

    @cached_property
    def is_dense(self) -> bool:
        """Whether the elements lie in row-major order from the buffer's first on."""
        return self == StridedLayout.dense(self.shape)

    @cached_property
    def repeats(self) -> bool:
        """Whether an element of the buffer may be several of it, as of what is broadcast and of
        windows, which nothing can be written over."""
        reach = 0
        for stride, n in sorted((abs(s), n) for axis in self.axes for n, s in axis):
            if stride <= reach and n > 1:
                return True
            reach += (n - 1) * stride
        return False

    @cached_property
    def from_pointer(self) -> tuple[int, StridedLayout]:
        """The element at which an argument may begin, and how it lies from there on. So parts of an
        array that begin at different places are the same to a kernel."""
        bare = StridedLayout(self.axes)
        if bare.is_dense:
            return self.offset, bare
        step = max([1, *(abs(s) for axis in self.axes for _, s in axis)])
        begin = self.begin // step * step
        return begin, StridedLayout(self.axes, self.offset - begin)

    @property
    def begin(self) -> int:
        """The element that lies in front of all others."""
        return self.offset + sum((n - 1) * s for axis in self.axes for n, s in axis if s < 0)

    @property
    def end(self) -> int:
        """One past the last."""
        return 1 + self.offset + sum((n - 1) * s for axis in self.axes for n, s in axis if s > 0)

    def permuted(self, order: Sequence[int]) -> StridedLayout:
        """Axis i of the result is axis order[i]."""
        return StridedLayout(tuple(self.axes[a] for a in order), self.offset)

    def part(self, starts: Sequence[int], shape: Extents,
             steps: Sequence[int] = ()) -> StridedLayout | None:
        """The elements from `starts` on, every one or in other steps; None where an axis of several
        is cut."""
        offset, axes = self.offset, list[Axis]()
        for axis, start, n, step in zip(self.axes, starts, shape, steps or [1] * len(shape),
                                        strict=True):
            found = _run(axis, start, n, step)
            if found is None:
                return None
            offset += found[0]
            axes.append(found[1])
        return StridedLayout(tuple(axes), offset)

    def reshaped(self, shape: Extents) -> StridedLayout | None:
        """The same elements in the same order; None where an extent goes across strides, and of no
        elements, which lie nowhere."""
        if 0 in shape:
            return None
        left = list(_axis(tuple(m for axis in self.axes for m in axis)))
        axes: list[Axis] = []
        for extent in reversed(shape):
            axis: Axis = ()
            while extent > 1:
                if not left:
                    return None
                n, stride = left.pop()
                if extent % n == 0:
                    extent, axis = extent // n, ((n, stride), *axis)
                elif n % extent == 0:
                    left.append((n // extent, stride * extent))
                    extent, axis = 1, ((extent, stride), *axis)
                else:
                    return None
            axes.insert(0, _axis(axis))
        return None if left else StridedLayout(tuple(axes), self.offset)

    def cuts(self, rank: int) -> set[int]:
        """The axes of a space of that rank, its last ones being these, that are no run with those
        in front of them."""
        lead, found, before = rank - len(self.axes), set[int](), Axis()
        for a, axis in enumerate(self.axes):
            if axis and len(_axis((*before, *axis))) > 1:
                found.add(lead + a)
            before = axis or before
        return found

    def __str__(self) -> str:
        strides = ", ".join("x".join(str(s) for _, s in axis) or "0" for axis in self.axes)
        return f"at {self.offset} with strides ({strides})"


def are_disjoint(a: StridedLayout, b: StridedLayout) -> bool:
    """Whether two layouts in one buffer have no element in common, as far as their strides tell:
    the parts of rows do where both are rows of the same stride."""
    strides = {abs(s) for v in (a, b) for axis in v.axes for _, s in axis} - {0}
    spans = [(_span(a, n), _span(b, n)) for n in strides]
    spans.append(((a.begin, a.end), (b.begin, b.end)))
    return any(p and q and (p[1] <= q[0] or q[1] <= p[0]) for p, q in spans)


def _span(v: StridedLayout, row: int) -> tuple[int, int] | None:
    """Where in rows of so many elements all of it lies; None where it goes across them."""
    inside = [(n, abs(s)) for axis in v.axes for n, s in axis if s % row]
    begin = v.begin % row
    end = begin + 1 + sum((n - 1) * s for n, s in inside)
    return (begin, end) if end <= row else None


def _axis(modes: Axis) -> Axis:
    """Without extents of 1, and neighbours joined that are one run."""
    out: list[Mode] = []
    for n, stride in modes:
        if n == 1:
            continue
        if out and out[-1][1] == n * stride:
            out[-1] = out[-1][0] * n, stride
        else:
            out.append((n, stride))
    return tuple(out)


def _run(axis: Axis, start: int, n: int, step: int) -> tuple[int, Axis] | None:
    """The distance of the first of n elements of an axis, and how they lie from there on."""
    whole, inner = prod(e for e, _ in axis), prod(e for e, _ in axis[1:])
    if n == 1:
        return _at(axis, start), ()
    if step == 1 and n == whole:
        return 0, axis
    if step == -1 and n == whole:
        return _at(axis, start), tuple((e, -s) for e, s in axis)
    if len(axis) == 1:
        return start * axis[0][1], ((n, step * axis[0][1]),)
    if step != 1 or start % inner or n % inner:
        return None
    return start // inner * axis[0][1], _axis(((n // inner, axis[0][1]), *axis[1:]))


def _at(axis: Axis, index: int) -> int:
    """The distance of an element from the first along an axis."""
    distance = 0
    for n, stride in reversed(axis):
        index, own = divmod(index, n)
        distance += own * stride
    return distance


# --- as the argument of a kernel ------------------------------------------------------------------
@lru_cache(KEPT)
def argument_layout(layout: StridedLayout, shape: Extents) -> ArgumentLayout | None:
    """The axes of the buffer, and the index along each, for a kernel that takes the value in these
    extents; None where strides are no multiples of each other. No axis of the buffer is that of
    elements that repeat, whatever the index."""
    own = layout.reshaped(shape)
    if own is None:
        return None
    modes: list[tuple[int, int, AxisPlace]] = []  # stride, extent
    for a, axis in enumerate(own.axes):
        inner = 1
        for i, (n, stride) in reversed(list(enumerate(axis))):
            if stride:
                place = AxisPlace(a, inner, n if i else 0, reversed=stride < 0)
                modes.append((abs(stride), n, place))
            inner *= n
    modes.sort(key=lambda m: -m[0])
    if not modes or modes[-1][0] != 1:
        modes.append((1, 1, AxisPlace(-1)))
    extents, places, left = list[int](), list[AxisPlace](), layout.begin
    for i, (stride, n, place) in enumerate(modes):
        above = modes[i - 1][0] if i else 0
        start, left = divmod(left, stride)
        extent = above // stride if i else start + n
        if left < 0 or (i and above % stride) or start + n > extent:
            return None
        extents.append(extent)
        first = start + n - 1 if place.reversed else start
        places.append(replace(place, start=first))
    return ArgumentLayout(tuple(extents), tuple(places))


__all__ = ["Axis", "StridedLayout", "argument_layout"]
