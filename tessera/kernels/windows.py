"""Reductions of windows of images and the gradient of their largest elements, which nothing
unfolds.

A thread has the windows that begin in a patch of the image, or the elements of one. Which elements
these windows have, and where they lie, is known from the patch's first one: each is read once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

LANES = 256  # threads of a group
LEAST = 2  # windows of a thread along an axis, and elements of a patch
AXES = 0, 1, 2
NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}
Ints = tuple[int, ...]


class AxisForm(NamedTuple):
    """One axis of the images.

    extent, places: elements and windows along it
    patch, step: elements and windows from one patch to the next.  patches: of them
    elements: from a patch's first element to those that its windows have, and whether that may be
    outside of the image; windows: the same of the number of the windows
    reads: of each window the positions in `elements` of its own
    writes: (window, place in it, element of the patch), by places
    """

    extent: int
    places: int
    patch: int
    patches: int
    step: int
    elements: tuple[tuple[int, bool], ...]
    windows: tuple[tuple[int, bool], ...]
    reads: tuple[Ints, ...]
    writes: tuple[Ints, ...]


def gradient_axis(extent: int, places: int, window: int, stride: int, dilation: int,
                  before: int) -> AxisForm:
    """For a thread that has a patch of elements. Element r of window w is w stride + r dilation -
    before: that of window p step + c from there on is element p patch + q of the image, whatever p
    is."""
    times = 1 if window == stride == 1 else min(-(-LEAST // stride), -(-extent // stride))
    patch = times * stride
    meets = sorted(
        (r, (q + before - r * dilation) // stride, q) for q in range(patch) for r in range(window)
        if (q + before - r * dilation) % stride == 0)
    numbers = sorted({c for _, c, _ in meets})
    writes = tuple((numbers.index(c), r, q) for r, c, q in meets)
    return _axis(extent, places, window, stride, dilation, before, times, -(-extent // patch),
                 numbers, writes)


def reduced_axis(extent: int, places: int, window: int, stride: int, dilation: int,
                 before: int) -> AxisForm:
    """For a thread that has windows side by side, where these share elements."""
    times = min(LEAST if dilation * (window - 1) >= stride else 1, places)
    return _axis(extent, places, window, stride, dilation, before, times, -(-places // times),
                 range(times), ())


def _axis(extent: int, places: int, window: int, stride: int, dilation: int, before: int,
          times: int, patches: int, numbers: Sequence[int], writes: tuple[Ints, ...]) -> AxisForm:
    ats = sorted({c * stride + r * dilation - before for c in numbers for r in range(window)})
    first, patch = (patches - 1) * times, times * stride
    return AxisForm(
        extent, places, patch, patches, times,
        tuple((at, at < 0 or first * stride + at >= extent) for at in ats),
        tuple((c, c < 0 or first + c >= places) for c in numbers),
        tuple(tuple(ats.index(c * stride + r * dilation - before) for r in range(window))
              for c in numbers), writes)


class WindowForm(NamedTuple):
    """Of three axes.  elements, windows: positions along each axis.  reads: of each window its
    number from the patch's first one on, and which elements it has
    outputs: (elements from the patch's first one on, terms (window, element) by places).  folds:
    whether terms are added to 0, as they are where windows overlap or leave elements out"""

    axes: tuple[AxisForm, ...]
    elements: tuple[Ints, ...]
    windows: tuple[Ints, ...]
    reads: tuple[tuple[Ints, Ints], ...]
    outputs: tuple[tuple[Ints, tuple[tuple[int, int], ...]], ...]
    folds: bool


def window_form(axes: tuple[AxisForm, ...], folds: bool = True) -> WindowForm:
    elements, windows, outputs = (
        tuple(itertools.product(*(range(n) for n in sizes))) for sizes in (
            [len(a.elements) for a in axes], [len(a.windows) for a in axes],
            [a.patch for a in axes]))
    reads = tuple((tuple(a.windows[i][0] for a, i in zip(axes, w, strict=True)),
                   tuple(map(elements.index, itertools.product(
                       *(a.reads[i] for a, i in zip(axes, w, strict=True)))))) for w in windows)
    found: dict[Ints, list[tuple[Ints, tuple[int, int]]]] = {q: [] for q in outputs}
    for of in itertools.product(*(a.writes for a in axes)):
        w, r, q = (tuple(part) for part in zip(*of, strict=True))
        place = tuple(a.reads[i][k] for a, i, k in zip(axes, w, r, strict=True))
        found[q].append((r, (windows.index(w), elements.index(place))))
    terms = tuple((q, tuple(term for _, term in sorted(found[q]))) for q in outputs)
    return WindowForm(axes, elements, windows, reads, terms, folds)


@kernel(grid=lambda count: -(-count // LANES), overwrites=("y",))
def reduce_windows(x: Tensor["E"], y: Tensor["P"], count: int, form, way: str, divisor: float):
    """The sum over divisor, or an extremum, of each window, in f32; what is outside of the image
    counts nothing.

    x: images of three axes, fewer than 2^31 elements.  y: [images, windows]
    count: patches, one for each thread
    """
    n, a, b, c = tile.linear_id(), form.axes[0], form.axes[1], form.axes[2]
    if n < count:
        p, image = patch_of(n, form)
        values = elements_of(x, image, p, form, NEUTRAL[way])
        for w in form.reads:
            at = [(p[k] * form.axes[k].step + w[0][k], True) for k in AXES]
            if (a.places % a.step == 0 or at[0][0] < a.places) and (
                    b.places % b.step == 0 or at[1][0] < b.places) and (
                    c.places % c.step == 0 or at[2][0] < c.places):
                total = reduce_values([values[i] for i in w[1]], way)
                total = total if divisor == 1.0 else total / divisor
                y[flat(image, at, (a.places, b.places, c.places))] = tile.cast(total, y.dtype)


@kernel(grid=lambda count: -(-count // LANES), overwrites=("dx",))
def window_max_gradient(x: Tensor["E"], g: Tensor["P"], dx: Tensor["E"], count: int, form):
    """dx = sum over the windows w of an element of g[w] / (elements of w that are its largest)
    where it is one of these, in f32; NaN of all elements of a window that has one.

    x, dx: images of three axes, fewer than 2^31 elements.  g: [images, windows]
    count: patches, one for each thread
    """
    n, a, b, c = tile.linear_id(), form.axes[0], form.axes[1], form.axes[2]
    if n < count:
        p, image = patch_of(n, form)
        ws = [[within(p[k] * form.axes[k].step + w[0], form.axes[k].places, w[1])
               for w in form.axes[k].windows] for k in AXES]
        values = elements_of(x, image, p, form, NEUTRAL["max"])
        cotangents = [element_at(g, image, [ws[k][w[k]] for k in AXES],
                                 (a.places, b.places, c.places), 0.0) for w in form.windows]
        inside = [ws[0][w[0]][1] & ws[1][w[1]][1] & ws[2][w[2]][1] for w in form.windows]
        shares = [shared([values[i] for i in form.reads[k][1]], cotangents[k], inside[k])
                  for k in range(len(form.windows))]
        for of in form.outputs:
            at = [(p[k] * form.axes[k].patch + of[0][k], True) for k in AXES]
            if (a.extent % a.patch == 0 or at[0][0] < a.extent) and (
                    b.extent % b.patch == 0 or at[1][0] < b.extent) and (
                    c.extent % c.patch == 0 or at[2][0] < c.extent):
                total = added([share_of(values[t[1]], shares[t[0]]) for t in of[1]], form.folds)
                dx[flat(image, at, (a.extent, b.extent, c.extent))] = tile.cast(total, dx.dtype)


@kernel
def patch_of(n, form):
    """(number along each axis, image) of a patch."""
    a, b, c = form.axes[0], form.axes[1], form.axes[2]
    row = n // c.patches
    return (row // b.patches % a.patches, row % b.patches, n % c.patches), (
        row // b.patches // a.patches)


@kernel
def elements_of(x, image, p, form, outside):
    """What the windows of a patch have, each once."""
    ats = [[within(p[k] * form.axes[k].patch + e[0], form.axes[k].extent, e[1])
            for e in form.axes[k].elements] for k in AXES]
    return [element_at(x, image, [ats[k][e[k]] for k in AXES],
                       [form.axes[k].extent for k in AXES], outside) for e in form.elements]


@kernel
def within(at, extent, beyond):
    """(place, whether it is one of the axis): the nearest that there is."""
    if not beyond:
        return at, True
    return min(max(at, 0), extent - 1), 0 <= at < extent


@kernel
def flat(image, at, extents):
    return ((image * extents[0] + at[0][0]) * extents[1] + at[1][0]) * extents[2] + at[2][0]


@kernel
def element_at(x, image, at, extents, outside):
    """In f32."""
    found, inside = tile.cast(x[flat(image, at, extents)], f32), at[0][1] & at[1][1] & at[2][1]
    return tile.where(inside, found, outside)


@kernel
def reduce_values(values, way):
    total = values[0]
    for v in values[1:]:
        if way == "sum":
            total = total + v
        else:
            total = tile.maximum(total, v) if way == "max" else tile.minimum(total, v)
    return total


@kernel
def shared(values, cotangent, inside):
    """(the largest, what each element has that is it, what the others have)"""
    top = reduce_values(values, "max")
    count = tile.where(values[0] == top, 1.0, 0.0)
    for v in values[1:]:
        count += tile.where(v == top, 1.0, 0.0)
    share, none = cotangent / count, tile.where(count > 0.0, 0.0, float("nan"))
    return top, tile.where(inside, share, 0.0), tile.where(inside, none, 0.0)


@kernel
def share_of(value, window):
    return tile.where(value == window[0], window[1], window[2])


@kernel
def added(terms, folds):
    total = tile.cast(0.0, f32)
    if len(terms) == 0:
        return total
    total = terms[0]
    for t in terms[1:]:
        total = total + t
    return total + 0.0 if folds else total


__all__ = ["LANES", "gradient_axis", "reduce_windows", "reduced_axis", "window_form",
           "window_max_gradient"]
