"""Convolutions of f32 images on vector registers, without windows in memory.

Images are padded once, each row behind the other. Output positions are numbered in these rows too,
so element k = (c, i, j) of a filter meets position p at offset[k] + p, whatever k and p are: a
product of matrices whose second one is read through a table of offsets. Positions beyond the end of
an output row are computed and not kept. Of a stride s the padded image is dealt into s by s images
first, of which each filter element reads one; the adjoint has s by s results, each of some of the
elements.

    conv          y = w @ x[offset[k] + p]
    conv_input    the same of the cotangent, with the filters' other axis
    conv_filter   sums over p, in f32 over at most STEPS vectors, then in f64 over these and images
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from . import pool
from .kernel import run_units, unit_source
from .machine_code import obtain

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
LEAST = 1 << 20  # multiply-adds that are worth machine code, whose first use of all takes a second
THREADED = 1 << 22  # that are worth waking a thread for
FEW_PRODUCTS, FEW_ROWS = 16, 4  # of which unfolding is as fast
DEPTH = 4096  # products that are added one after another, at most: as for matmuls (blas.py)
STEPS = 64  # vectors of positions that dots add in f32: their rows stay in the first cache
UNITS = 16  # of the gradient of filters, at least: threads claim them


@dataclass(frozen=True)
class TileShape:
    """f32 lanes of a vector; rows and vectors of a tile; rows and offsets of dots."""

    lanes: int
    rows: int
    vectors: int
    dot_rows: int
    dots: int


@cache
def tile_shape() -> TileShape:
    """For 32 registers of 512 bits, or for 16 of 256."""
    import llvmlite.binding as llvm

    wide = llvm.get_host_cpu_features().get("avx512f", False)
    return TileShape(16, 8, 3, 4, 6) if wide else TileShape(8, 4, 3, 3, 4)


IMAGES = unit_source('''\
    units, blocks, groups = word(layout, 0), word(layout, 1), word(layout, 2)
''', '''\
        image = unit // blocks  # of a group
        x = data(call, 3) + image * word(layout, 3)
        offsets = data(call, 4)
        w = data(call, 5) + (image % groups * blocks + unit % blocks) * word(layout, 4)
        y = data(call, 6) + unit * word(layout, 5)
        for p in range(0, word(layout, 6), {step}):
            {tile}(x + p, offsets, w, y + p, word(layout, 7), word(layout, 8))
''')
FILTERS = unit_source('''\
    units, rows, ranges, parts = (
        word(layout, 0), word(layout, 1), word(layout, 2), word(layout, 3))
''', '''\
        row, some = unit // ranges, unit % ranges
        x = data(call, 3) + row // rows * word(layout, 4)
        g = data(call, 5) + row * {dot_rows} * word(layout, 5)
        sums = data(call, 6) + row * {dot_rows} * word(layout, 6)
        for p in range(0, word(layout, 7), {chunk}):
            left = (word(layout, 7) - p + {bytes} - 1) // {bytes}
            steps = where_i64(left < {steps}, left, {steps})
            for part in range(some * parts // ranges, (some + 1) * parts // ranges):
                {tile}(x + p, data(call, 4) + part * {dots} * 8, g + p, word(layout, 5),
                       sums + part * {dots} * 8, word(layout, 6), steps)
''')


def takes(a: np.ndarray, b: np.ndarray, work: int, depth: int, rows: int) -> bool:
    """Whether images in 1-D or 2-D, and filters, are multiplied here. work: multiply-adds of the
    whole   depth: of an element of the convolution   rows: of a tile that are used"""
    return a.dtype == b.dtype == np.float32 and a.ndim in (3, 4) and work >= max(1, LEAST) and (
        depth >= FEW_PRODUCTS and rows >= FEW_ROWS)


# --- images, padded and dealt -----------------------------------------------------------------
@dataclass(frozen=True)
class DealtImages:
    """x: f32, and room for a vector behind.

    [N, channels, parts of a stride, rows, columns], or joined with the axis of N behind the parts.
    pitch: columns of a row; plane: elements of a channel, of all images where these are joined
    """

    x: np.ndarray
    channels: int
    pitch: int
    plane: int
    stride: Ints

    def offsets(self, channels: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Bytes to element (c, i, j) of the padded image, for all c, i and j: int64."""
        (s, t), i = self.stride, i[:, None]
        part = (i % s) * t + j % t
        place = (i // s) * self.pitch + j // t + part * (self.plane // (s * t))
        return 4 * (np.arange(channels)[:, None, None] * self.plane + place).reshape(-1)


def _dealt(x: np.ndarray, padding: Pairs, stride: Ints, room: int, joined: bool = False
           ) -> DealtImages:
    """A negative padding cuts."""
    n, c = x.shape[:2]
    rows, columns = (-(-max(1, m + sum(p)) // s)
                     for m, p, s in zip(x.shape[2:], padding, stride, strict=True))
    s, t = stride
    flat = _zeros(n * c * s * t * rows * columns + room)
    made = flat[:flat.size - room]
    made = made.reshape(c, s, t, n, rows, columns).transpose(3, 0, 1, 2, 4, 5) if joined else (
        made.reshape(n, c, s, t, rows, columns))
    for i in range(s):
        above = _there(x.shape[2], rows, i - padding[0][0], s)
        for j in range(t):
            left = _there(x.shape[3], columns, j - padding[1][0], t)
            made[:, :, i, j, above[0], left[0]] = x[:, :, above[1], left[1]]
    return DealtImages(flat, c, columns, s * t * rows * columns * (n if joined else 1), stride)


def _zeros(count: int) -> np.ndarray:
    """f32, beginning at a cache line."""
    raw = np.zeros(count + 15, np.float32)
    begin = -raw.ctypes.data // 4 % 16
    return raw[begin:begin + count]


def _there(n: int, count: int, at: int, step: int) -> tuple[slice, slice]:
    """Of places at, at + step ...: which of the first `count` are in 0..n-1, and which these are.
    """
    first = max(0, -(at // step))
    last = max(first, min(count, (n - 1 - at) // step + 1))
    begin = at + first * step
    return slice(first, last), slice(begin, begin + max(0, (last - first - 1) * step + 1), step)


# --- the three products -----------------------------------------------------------------------
def images(x: np.ndarray, w: np.ndarray, out: np.ndarray, stride: Ints, padding: Pairs,
           dilation: Ints) -> None:
    """x: [N, groups C, H, W]   w: [groups, F, C, KH, KW]   out: [N, groups, F, OH, OW]"""
    dealt = _dealt(x, padding, stride, _room())
    places = [d * np.arange(k) for d, k in zip(dilation, w.shape[3:], strict=True)]
    _product(dealt, dealt.offsets(w.shape[2], *places), w.reshape(*w.shape[:2], -1), out)


def adjoint_images(g: np.ndarray, w: np.ndarray, out: np.ndarray, stride: Ints, padding: Pairs,
                   dilation: Ints) -> None:
    """g: [N, groups F, OH, OW]   w: [groups, F, C, KH, KW]   out: [N, groups, C, H, W]

    Element h of a result, which is element h + pad of the padded image, is met by the elements i of
    a filter for which h + pad - dilation i is a multiple of the stride.
    """
    swapped = np.ascontiguousarray(w.swapaxes(1, 2))
    axes = [[_met(n, k, s, d, pad[0], r) for r in range(s)] for n, k, s, d, pad in zip(
        out.shape[3:], w.shape[3:], stride, dilation, padding, strict=True)]
    pads = tuple(
        (max(0, *(-m.places.min() for m in axis if m.places.size)),
         max(0, *(m.places.max() + m.count - n for m in axis if m.places.size)))
        for n, axis in zip(g.shape[2:], axes, strict=True))
    dealt = _dealt(g, pads, (1, 1), _room())
    for above in axes[0]:
        for left in axes[1]:
            part = out[:, :, :, above.there, left.there]
            some = swapped[:, :, :, above.elements][..., left.elements]
            if not some.size:
                part[...] = 0
            elif part.size:
                offsets = dealt.offsets(w.shape[1], above.places + pads[0][0],
                                        left.places + pads[1][0])
                _product(dealt, offsets, some.reshape(*some.shape[:2], -1), part)


@dataclass(frozen=True)
class MetElements:
    """there: the elements of a result, every stride-th; count: how many these are
    elements: of a filter, that meet them; places: of the cotangent's element that each of these
    multiplies for the first of the result"""

    there: slice
    count: int
    elements: slice | np.ndarray
    places: np.ndarray


def _met(n: int, window: int, stride: int, dilation: int, pad: int, rest: int) -> MetElements:
    first = (rest - pad) % stride
    i = np.arange(window)
    i = i[(first + pad - dilation * i) % stride == 0]
    every = slice(None) if i.size == window else i
    return MetElements(slice(first, n, stride), len(range(first, n, stride)), every,
                       (first + pad - dilation * i) // stride)


def _product(dealt: DealtImages, offsets: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    """out[n, g, o, p] = sum_k w[g, o, k] x[n, g, offsets[k] + p]

    w: [groups, F, K]   out: [N, groups, F, OH, OW], of any strides
    """
    for k in range(0, offsets.size, DEPTH):
        made = _part(dealt, offsets[k:k + DEPTH], w[..., k:k + DEPTH], out.shape)
        np.add(out, made, out=out) if k else np.copyto(out, made)


def _part(dealt: DealtImages, offsets: np.ndarray, w: np.ndarray, shape: Ints) -> np.ndarray:
    t, (N, groups, F, OH, OW) = tile_shape(), shape
    blocks, step, K = -(-F // t.rows), t.lanes * t.vectors, offsets.size
    if F % t.rows or not w.flags.c_contiguous:
        whole = np.zeros((groups, blocks * t.rows, K), np.float32)
        whole[:, :F] = w
        w = whole
    count = -(-((OH - 1) * dealt.pitch + OW) // step) * step
    pitch = max(count, OH * dealt.pitch)
    made = np.empty((N, groups, blocks * t.rows, pitch), np.float32)
    source = IMAGES.format(step=4 * step, tile=f"tile_{t.lanes}_{t.rows}_{t.vectors}")
    channels = dealt.channels // groups
    _run(source, prod(shape) * K, N * groups * blocks, [
        blocks, groups, 4 * channels * dealt.plane, 4 * t.rows * K, 4 * t.rows * pitch, 4 * count,
        K, 4 * pitch], dealt.x, offsets, w, made)
    kept = made[:, :, :F, :OH * dealt.pitch].reshape(N, groups, F, OH, dealt.pitch)
    return kept[..., :OW]


def _room() -> int:
    """Elements that a tile may read beyond the last."""
    return tile_shape().lanes * tile_shape().vectors


def filters(x: np.ndarray, g: np.ndarray, out: np.ndarray, stride: Ints, padding: Pairs,
            dilation: Ints) -> bool:
    """x: [N, groups C, H, W]   g: [N, groups F, OH, OW]   out: [groups, F, C, KH, KW]

    False where an infinity or NaN may have met a position that is not kept.
    """
    t, (N, _, OH, OW), (groups, F, C) = tile_shape(), g.shape, out.shape[:3]
    dealt = _dealt(x, padding, stride, t.lanes, joined=True)
    K = C * prod(out.shape[3:])
    rows, parts = -(-F // t.dot_rows), -(-K // t.dots)
    offsets = np.zeros(parts * t.dots, np.int64)
    offsets[:K] = dealt.offsets(C, *(d * np.arange(k) for d, k in zip(
        dilation, out.shape[3:], strict=True)))
    positions = dealt.plane // prod(stride)  # of all images
    pitch = -(-positions // t.lanes) * t.lanes + t.lanes
    given = _zeros(groups * rows * t.dot_rows * pitch).reshape(groups, -1, pitch)
    given[:, :F, :positions].reshape(groups, F, N, -1, dealt.pitch)[..., :OH, :OW] = g.reshape(
        N, groups, F, OH, OW).transpose(1, 2, 0, 3, 4)
    sums = np.zeros((groups, rows * t.dot_rows, parts * t.dots))
    source = FILTERS.format(
        dots=t.dots, dot_rows=t.dot_rows, chunk=4 * t.lanes * STEPS, bytes=4 * t.lanes, steps=STEPS,
        tile=f"dots_{t.lanes}_{t.dot_rows}_{t.dots}")
    ranges = min(parts, -(-UNITS // (groups * rows)))
    _run(source, out.size * positions, groups * rows * ranges, [
        rows, ranges, parts, 4 * C * dealt.plane, 4 * pitch, 8 * parts * t.dots, 4 * positions],
        dealt.x, offsets, given, sums)
    out.reshape(groups, F, K)[...] = sums[:, :F, :K]
    return bool(np.isfinite(out).all())


def _run(source: str, work: int, units: int, words: list[int], *arrays: np.ndarray) -> None:
    threads = pool.threads_wanted() if work >= THREADED else 1
    run_units(_function(source), units, words, threads, *arrays)


@cache
def _function(source: str) -> Any:
    return obtain(source)


__all__ = ["adjoint_images", "filters", "images", "takes"]
