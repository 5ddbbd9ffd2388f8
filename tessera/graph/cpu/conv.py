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

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from ...lazy_dataclass import dataclass
from . import pool
from .kernel import bind_units, unit_source
from .machine_code import obtain
from .phase_images import Ints, Pairs, PhaseSplit, channel_source

Places = tuple[Ints, Ints]  # of rows and columns
LEAST = 1 << 20  # multiply-adds that are worth machine code, whose first use of all takes a second
THREADED = 1 << 22  # that are worth waking a thread for
DEPTH = 4096  # products that are added one after another, at most: as for matmuls (blas.py)
UNITS_A_THREAD = 2  # at least: images that a thread takes whole, parts of them for filters
STEPS = 64  # vectors of positions that dots add in f32: their rows stay in the first cache
PLANS = 512  # launches that are kept, with their tables of offsets
# Of the images, for the gradient of filters: how many at most, positions of one and bytes of the
# sums at least and at most.
PARTS, PART_AREA, PART_BYTES = 16, 512, 1 << 21


@dataclass(frozen=True)
class TileShape:
    """f32 lanes of a vector; rows and vectors of a tile; rows and offsets of dots."""

    lanes: int
    rows: int
    vectors: int
    dot_rows: int
    dots: int


# Of 32 registers of 512 bits, and of 16 of 256: by the rows of a tile.
WIDE = TileShape(16, 1, 8, 1, 12), TileShape(16, 2, 4, 2, 9), TileShape(16, 4, 5, 4, 6), (
    TileShape(16, 8, 3, 4, 6))
NARROW = TileShape(8, 1, 6, 1, 9), TileShape(8, 2, 4, 2, 6), TileShape(8, 4, 3, 3, 4)


@cache
def tile_shape(rows: int) -> TileShape:
    """For so many channels of results, in a group: rows of a tile that are not used cost as much.
    """
    from .load import cpu_has

    shapes = WIDE if cpu_has("avx512f") else NARROW
    return next((t for t in shapes if t.rows >= rows), shapes[-1])


IMAGES = unit_source('''\
    units, splits, blocks, groups = (
        word(layout, 0), word(layout, 1), word(layout, 2), word(layout, 3))
    channels, plane, F, OH, OW = (
        word(layout, 4), word(layout, 5), word(layout, 6), word(layout, 7), word(layout, 8))
    count, depth, row = word(layout, 9), word(layout, 10), word(layout, 11)
    made, deal, held = scratch + word(layout, 12), layout + 8 * {table}, -1
''', '''\
        image, split = unit // splits, unit % splits
        n, g = image // groups, image % groups
        if image != held:
            held = image
            for c in range(channels):
                x = data(call, 3) + n * word(layout, 13) + g * word(layout, 14) + (
                    c * word(layout, 15))
                y = scratch + c * plane
{channel}        for block in range(split * blocks // splits, (split + 1) * blocks // splits):
            w = data(call, 5) + (g * blocks + block) * {rows} * 4 * depth
            for p in range(0, count, {step}):
                {tile}(scratch + p, data(call, 4), w, made + p, depth, count)
            first = block * {rows}
            y = data(call, 6) + n * word(layout, 16) + g * word(layout, 17) + (
                first * word(layout, 18))
            for o in range(where_i64(F - first < {rows}, F - first, {rows})):
                for i in range(OH):
                    here = made + o * count + i * row
                    to = y + o * word(layout, 18) + i * word(layout, 19)
                    for j in range(OW):
                        store_f32_out0(to, {at}, {kept})
''')
WORDS = 21  # of IMAGES, in front of those of dealing
# Of a part of the images and a range of channels: `most` images at once are dealt side by side,
# cotangents in front, into the thread's own memory.
FILTERS = unit_source('''\
    units, ranges, groups, parts = (
        word(layout, 0), word(layout, 1), word(layout, 2), word(layout, 3))
    N, F, C, most, size = (
        word(layout, 4), word(layout, 5), word(layout, 6), word(layout, 7), word(layout, 8))
    pitch, plane, behind = word(layout, 9), word(layout, 10), word(layout, 11)
    blocks, depth, row_bytes = word(layout, 12), word(layout, 13), word(layout, 14)
    images, held = scratch + word(layout, 15), -1
''', '''\
        some, g, share = unit % ranges, unit // ranges % groups, unit // ranges // groups
        sums, until = data(call, 6) + unit * blocks * {dot_rows} * row_bytes, (
            (share + 1) * N // parts)
        for n in range(share * N // parts, until, most):
            count = where_i64(until - n < most, until - n, most)
            if held != n * groups + g:
                held, deal = n * groups + g, layout + 8 * word(layout, 22)
                for f in range(F):
                    for m in range(count):
                        x = data(call, 5) + (n + m) * word(layout, 19) + g * word(layout, 20) + (
                            f * word(layout, 21))
                        y = scratch + f * pitch + m * size
{cotangent}                    for p in range({lanes}):
                        store_f32_out0(scratch + f * pitch + count * size, p, f32(0.0))
            deal = layout + 8 * {table}
            for c in range(C):
                for m in range(count):
                    x = data(call, 3) + (n + m) * word(layout, 16) + g * word(layout, 17) + (
                        (some * C + c) * word(layout, 18))
                    y = images + c * plane * {strided} + m * size
{channel}                for i in range({strided}):
                    for p in range(behind):
                        store_f32_out0(
                            images + (c * {strided} + i) * plane + count * size, p, f32(0.0))
            for block in range(blocks):
                for at in range(0, count * size, {chunk}):
                    left = (count * size - at + {bytes} - 1) // {bytes}
                    steps = where_i64(left < {steps}, left, {steps})
                    for k in range(depth):
                        {tile}(images + at, data(call, 4) + k * {dots} * 8,
                               scratch + block * {dot_rows} * pitch + at, pitch,
                               sums + block * {dot_rows} * row_bytes + k * {dots} * 8,
                               row_bytes, steps)
''')
FILTER_WORDS = 23  # of FILTERS, in front of those of dealing
def takes(a: np.ndarray, b: np.ndarray, work: int) -> bool:
    """Whether images in 1-D or 2-D, and filters, are multiplied here. work: multiply-adds of the
    whole"""
    return a.dtype == b.dtype == np.float32 and a.ndim in (3, 4) and work >= max(1, LEAST)


# --- the three products -----------------------------------------------------------------------
def images(x: np.ndarray, w: np.ndarray, out: np.ndarray, stride: Ints, padding: Pairs,
           dilation: Ints) -> None:
    """x: [N, groups C, H, W]   w: [groups, F, C, KH, KW]   out: [N, groups, F, OH, OW]"""
    dealing = PhaseSplit(x.shape[2:], padding, stride)
    _product(x, dealing, _window_offsets(dilation, w.shape[3:]), w, out)


def _window_offsets(dilation: Ints, window: Ints) -> Places:
    rows, columns = (tuple(range(0, d * k, d)) for d, k in zip(dilation, window, strict=True))
    return rows, columns


def adjoint_images(g: np.ndarray, w: np.ndarray, out: np.ndarray, stride: Ints, padding: Pairs,
                   dilation: Ints) -> None:
    """g: [N, groups F, OH, OW]   w: [groups, F, C, KH, KW]   out: [N, groups, C, H, W]

    Element h of a result, which is element h + pad of the padded image, is met by the elements i of
    a filter for which h + pad - dilation i is a multiple of the stride.
    """
    swapped = np.ascontiguousarray(w.swapaxes(1, 2))
    dealing, axes = _adjoint(
        g.shape[2:], w.shape[3:], out.shape[3:], stride, padding, dilation)
    for above in axes[0]:
        for left in axes[1]:
            part = out[:, :, :, above.there, left.there]
            some = swapped[:, :, :, above.elements][..., left.elements]
            if not some.size:
                part[...] = 0
            elif part.size:
                _product(g, dealing, (above.places, left.places), some, part)


@dataclass(frozen=True)
class MetElements:
    """there: the elements of a result, every stride-th; count: how many these are
    elements: of a filter, that meet them; places: of the padded cotangent's element that each of
    these multiplies for the first of the result"""

    there: slice
    count: int
    elements: slice | np.ndarray
    places: Ints


@lru_cache(maxsize=PLANS)
def _adjoint(places: Ints, window: Ints, spatial: Ints, stride: Ints, padding: Pairs, dilation: Ints
             ) -> tuple[PhaseSplit, tuple[list[MetElements], ...]]:
    """How the cotangent is padded, and the parts of each axis of the result."""
    axes = [[_elements_of_phase(n, k, s, d, pad[0], r) for r in range(s)]
            for n, k, s, d, pad in zip(spatial, window, stride, dilation, padding, strict=True)]
    pads = tuple(
        (max(0, *(-min(m.places) for m in axis if m.places)),
         max(0, *(max(m.places) + m.count - n for m in axis if m.places)))
        for n, axis in zip(places, axes, strict=True))
    return PhaseSplit(places, pads, (1, 1)), tuple(
        [replace(m, places=tuple(p + pad[0] for p in m.places)) for m in axis]
        for pad, axis in zip(pads, axes, strict=True))


def _elements_of_phase(n: int, window: int, stride: int, dilation: int, pad: int,
                       rest: int) -> MetElements:
    first = (rest - pad) % stride
    i = np.arange(window)
    i = i[(first + pad - dilation * i) % stride == 0]
    every = slice(None) if i.size == window else i
    return MetElements(slice(first, n, stride), len(range(first, n, stride)), every,
                       tuple(((first + pad - dilation * i) // stride).tolist()))


def _product(x: np.ndarray, dealing: PhaseSplit, places: Places, w: np.ndarray, out: np.ndarray
             ) -> None:
    """out[n, g, o, p] = sum_k w[g, o, k] x[n, g, offsets[k] + p], of x as it is dealt

    x: [N, groups C, H, W]   places: of elements of a filter in the padded image
    w: [groups, F, C, KH, KW]   out: [N, groups, F, OH, OW], of any strides
    """
    t, (N, groups), C = tile_shape(out.shape[2]), out.shape[:2], w.shape[2]
    x = x.reshape(N, groups, C, *x.shape[2:])
    w = w.reshape(*w.shape[:2], -1)
    for k in range(0, w.shape[2], DEPTH):
        some = w[..., k:k + DEPTH]
        _channel_launch(t, dealing, places, k, some.shape[2], C, x.strides, out.shape, out.strides,
                        _threads(out.size * some.shape[2]))(x, _in_blocks(some, t.rows), out)


def _in_blocks(w: np.ndarray, rows: int) -> np.ndarray:
    """[groups, F, K], with rows of zeros behind F to a multiple of `rows`."""
    if w.shape[1] % rows == 0:
        return np.ascontiguousarray(w)
    whole = np.zeros((w.shape[0], -(-w.shape[1] // rows) * rows, w.shape[2]), np.float32)
    whole[:, :w.shape[1]] = w
    return whole


@lru_cache(maxsize=PLANS)
def _channel_launch(t: TileShape, dealing: PhaseSplit, places: Places, k: int, K: int, C: int,
                    x_strides: Ints,
                    shape: Ints, strides: Ints, threads: int) -> Callable[..., None]:
    """The launch for products k to k + K of C channels, that takes x, w in blocks and `out`; to
    what stands there it adds unless k is 0.

    x_strides: of [N, groups, C, H, W]   shape, strides: of out
    """
    (N, groups, F, OH, OW), blocks, step = shape, -(-shape[2] // t.rows), t.lanes * t.vectors
    part, pitch = 4 * dealing.rows * dealing.columns, dealing.columns
    plane = part * prod(dealing.stride)
    offsets = dealing.offsets(C, plane // 4, *places)[k:k + K].copy()
    count = 4 * -(-((OH - 1) * pitch + OW) // step) * step
    # Behind the last channel a tile may read what is never kept.
    behind = -(-(C * plane + 4 * step) // 64) * 64
    apart = x_strides[4] // 4
    splits = 1 if N * groups >= UNITS_A_THREAD * pool.threads_wanted() else blocks
    launch = bind_units(
        _function(_image_source(t, apart * dealing.stride[1] == 1, strides[4] == 4, k > 0)),
        N * groups * splits, (
            splits, blocks, groups, C, plane, F, OH, OW, count, K, 4 * pitch, behind,
            *x_strides[:3], *strides[:4], strides[4] // 4,
            *dealing.words(x_strides[3], apart, (part * dealing.stride[1], part, 4 * pitch))),
        threads, behind + t.rows * count)
    return lambda x, w, out: launch(x, offsets, w, out)


@cache
def _image_source(t: TileShape, runs: bool, side_by_side: bool, more: bool) -> str:
    at = "j" if side_by_side else "j * word(layout, 20)"
    made = "load_f32(here, j)"
    return IMAGES.format(
        step=4 * t.lanes * t.vectors, tile=f"tile_{t.lanes}_{t.rows}_{t.vectors}", rows=t.rows,
        at=at, kept=f"load_f32_out0(to, {at}) + {made}" if more else made, table=WORDS,
        channel=channel_source(runs, 16))


def filters(x: np.ndarray, g: np.ndarray, out: np.ndarray, stride: Ints, padding: Pairs,
            dilation: Ints) -> bool:
    """x: [N, groups C, H, W]   g: [N, groups F, OH, OW]   out: [groups, F, C, KH, KW]

    False where an infinity or NaN may have met a position that is not kept.
    """
    N, (groups, F, C) = len(x), out.shape[:3]
    t = tile_shape(F)
    dealing, window = PhaseSplit(x.shape[2:], padding, stride), out.shape[3:]
    x, g = (a.reshape(N, groups, -1, *a.shape[2:]) for a in (x, g))
    shape, launch = _filter_sums(t, dealing, _window_offsets(dilation, window), N, C, x.strides,
                                 g.shape, g.strides, _threads(g.size * C * prod(window)))
    sums = np.zeros(shape)
    launch(x, g, sums)
    ranges, K = shape[2], C // shape[2] * prod(window)
    total, *others = sums[:, :, :, :F, :K]  # what is beyond is sums of anything
    for more in others:
        total += more
    out.reshape(groups, F, ranges, K)[...] = total.swapaxes(1, 2)
    return bool(np.isfinite(out).all())


@lru_cache(maxsize=PLANS)
def _filter_sums(t: TileShape, dealing: PhaseSplit, places: Places, N: int, C: int, x_strides: Ints,
                 shape: Ints, strides: Ints, threads: int) -> tuple[Ints, Callable[..., None]]:
    """The shape of sums, [parts of the images, groups, ranges of channels, rows of filters, their
    elements], and the launch that takes images, cotangents and sums.

    Parts are so few that their sums take little memory, and depend on no number of threads: they
    are added up. x_strides: of [N, groups, C, H, W]   shape, strides: of cotangents like these
    """
    (_, groups, F, OH, OW), kinds = shape, prod(dealing.stride)
    area, window = dealing.rows * dealing.columns, prod(map(len, places))
    blocks = -(-F // t.dot_rows)
    parts = max(1, min(
        N, PARTS, N * area // PART_AREA, PART_BYTES // (8 * groups * F * C * window)))
    ranges = next(r for r in range(1, C + 1) if C % r == 0 and (
        r == C or _shared_evenly(parts * groups * r, threads)))
    most = min(-(-N // parts), -(-4 * PART_AREA // area))  # images at once
    behind = int(dealing.offsets(1, 0, *places).max()) // 4 + t.lanes  # elements that meet zeros
    pitch, plane = (-(-4 * (most * area + more) // 64) * 64 for more in (t.lanes, behind))
    found = dealing.offsets(C // ranges, kinds * plane // 4, *places)
    depth = -(-found.size // t.dots)
    offsets = np.zeros(depth * t.dots, np.int64)
    offsets[:found.size] = found
    of_images = dealing.words(x_strides[3], x_strides[4] // 4, (
        plane * dealing.stride[1], plane, 4 * dealing.columns))
    rest = ((0, dealing.rows - OH), (0, dealing.columns - OW))
    of_cotangents = PhaseSplit((OH, OW), rest, (1, 1)).words(
        strides[3], strides[4] // 4, (0, 0, 4 * dealing.columns))
    images = blocks * t.dot_rows * pitch
    launch = bind_units(
        _function(_filter_source(t, kinds, x_strides[4] // 4 * dealing.stride[1] == 1,
                                 strides[4] == 4)),
        parts * groups * ranges, (
            ranges, groups, parts, N, F, C // ranges, most, 4 * area, pitch, plane, behind, blocks,
            depth, 8 * depth * t.dots, images, *x_strides[:3], *strides[:3],
            FILTER_WORDS + len(of_images), *of_images, *of_cotangents),
        threads, images + C // ranges * kinds * plane)
    return (parts, groups, ranges, blocks * t.dot_rows, depth * t.dots), (
        lambda x, g, sums: launch(x, offsets, g, sums))


def _shared_evenly(units: int, threads: int) -> bool:
    return threads == 1 or units % (2 * threads) == 0 or units >= 8 * threads


@cache
def _filter_source(t: TileShape, kinds: int, runs: bool, cotangents_run: bool) -> str:
    return FILTERS.format(
        dots=t.dots, dot_rows=t.dot_rows, chunk=4 * t.lanes * STEPS, bytes=4 * t.lanes, steps=STEPS,
        tile=f"dots_{t.lanes}_{t.dot_rows}_{t.dots}", lanes=t.lanes, strided=kinds,
        table=FILTER_WORDS, channel=channel_source(runs, 20),
        cotangent=channel_source(cotangents_run, 24))


def _threads(work: int) -> int:
    return pool.threads_wanted() if work >= THREADED else 1


@cache
def _function(source: str) -> Any:
    return obtain(source)


__all__ = ["adjoint_images", "filters", "images", "takes"]
