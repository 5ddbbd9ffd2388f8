"""Depthwise convolutions: each channel by a filter of its own, in images whose channels are last.

There is nothing to multiply as matrices, and reading is what takes time: a thread has 16 bytes of
channels of STRIP places of a row, so that a pixel that it reads serves all of its places.
"""

from __future__ import annotations

from typing import NamedTuple

from ..numerics import f32, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from .conv import Geometry

STRIP, TAPS = 4, 8  # places; taps of a row that are read together: more need too many registers
EIGHT = Schedule(warps=4)  # elements of a thread, of one place, in blocks of 1024
ALL = tuple(range(32))


def strips_of(geometry: Geometry) -> int:
    """Of a row of results."""
    return -(-geometry.results[1] // STRIP)


class RowPart(NamedTuple):
    """Taps of a row from `first` on. columns: that a strip reads through them, from its first one
    on.  reads: for each place of the strip, which of these each tap reads."""

    first: int
    columns: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]


def row_parts(geometry: Geometry) -> tuple[RowPart, ...]:
    (_, step), (_, apart), (_, taps) = geometry.stride, geometry.dilation, geometry.window
    parts = []
    for first in range(0, taps, TAPS):
        own = range(first, min(first + TAPS, taps))
        reads = [[n * step + j * apart for j in own] for n in range(STRIP)]
        columns = sorted({x for line in reads for x in line})
        parts.append(RowPart(first, tuple(columns),
                             tuple(tuple(map(columns.index, line)) for line in reads)))
    return tuple(parts)


@kernel
def strip_places(strips, geometry, across):
    """Of strips: the row of results, the image, and the first row and column of the window."""
    rows, column = strips // across, strips % across * STRIP
    h = rows % geometry.results[0] * geometry.stride[0] - geometry.before[0]
    return rows, column, rows // geometry.results[0], (
        h, column * geometry.stride[1] - geometry.before[1])


@kernel
def pixel(row, x, width):
    """The pixel in column x of a row that begins at `row`; -1 outside."""
    return tile.where((row >= 0) & (x >= 0) & (x < width), row + x, -1)


@kernel
def place(rows, column, n, width):
    """The n-th place of a strip; -1 behind the end of its row."""
    return tile.where(column + n < width, rows * width + column + n, -1)


@kernel(grid=lambda Q, C, BM, BN: (-(-C // BN), -(-Q // BM)), schedule=EIGHT, overwrites=("Y",))
def depthwise_forward(X: Tensor["S", "C"], W: Tensor["T", "C"], Y: Tensor["P", "C"], geometry,
                      parts, across, Q, BM=16, BN=64):
    """Y[p, c] = sum_t W[t, c] X[the pixel of p through t, c].

    X: [images and pixels, channels]   W: [taps, channels]   Y: [images and places, channels]
    parts, across: `row_parts` and `strips_of` the geometry   Q: strips of all images, whose places
        are all of Y
    """
    c, q = tile.group_id(0) * BN, tile.group_id(1) * BM
    KH, KW = geometry.window
    IH, IW = geometry.images
    rows, column, z, (h, w) = strip_places(tile.arange(0, BM) + q, geometry, across)
    sums = tuple(tile.zeros((BM, BN), f32) for _ in ALL[:STRIP])
    for i in range(0, KH):
        y = h + i * geometry.dilation[0]
        row = tile.where((y >= 0) & (y < IH), (z * IH + y) * IW, -1)
        for part in parts:
            x = [tile.cast(tile.gather(X[:, c:c+BN], pixel(row, w + o, IW)), f32)
                 for o in part.columns]
            for j in ALL[:len(part.reads[0])]:
                t = i * KW + part.first + j
                weight = tile.cast(tile.load(W[t:t+1, c:c+BN]), f32)
                sums = tuple(sums[n] + x[part.reads[n][j]] * weight for n in ALL[:STRIP])
    for n in ALL[:STRIP]:
        at = place(rows, column, n, geometry.results[1])
        tile.scatter(Y[:, c:c+BN], at, tile.cast(sums[n], Y.dtype))


@kernel(grid=lambda S, C, BM, BN: (-(-C // BN), -(-S // BM)), schedule=EIGHT)
def depthwise_backward(G: Tensor["P", "C"], W: Tensor["T", "C"], D: Tensor["S", "C"], geometry,
                       BM=16, BN=64):
    """D[s, c] = sum_t W[t, c] G[the place that reads pixel s through t, c], of windows that are
    apart; of others it is the forward kernel's, of filters from the end."""
    c, s = tile.group_id(0) * BN, tile.group_id(1) * BM
    KH, KW = geometry.window
    SH, SW = geometry.stride
    IH, IW = geometry.images
    OH, OW = geometry.results
    pixels = tile.arange(0, BM) + s
    rows = pixels // IW
    z, h, w = rows // IH, rows % IH + geometry.before[0], pixels % IW + geometry.before[1]
    acc = tile.zeros((BM, BN), f32)
    for i in range(0, KH):
        y = h - i * geometry.dilation[0]
        row = tile.where((y >= 0) & (y % SH == 0) & (y // SH < OH), (z * OH + y // SH) * OW, -1)
        for j in ALL[:KW]:
            x, t = w - j * geometry.dilation[1], i * KW + j
            at = tile.where((row >= 0) & (x >= 0) & (x % SW == 0) & (x // SW < OW),
                            row + x // SW, -1)
            weight = tile.cast(tile.load(W[t:t+1, c:c+BN]), f32)
            acc = acc + tile.cast(tile.gather(G[:, c:c+BN], at), f32) * weight
    D[s:s+BM, c:c+BN] = tile.cast(acc, D.dtype)


@kernel(grid=lambda R, C, BN, geometry: (-(-C // BN), geometry.window[0], R), schedule=EIGHT)
def depthwise_weights(X: Tensor["S", "C"], G: Tensor["P", "C"], D: Tensor["R", "T", "C", f32],
                      geometry, part, across, Q: i32, depth: i32, BM=16, BN=64):
    """D[r, t, c] = sum over part r of the places p of G[p, c] X[the pixel of p through t, c].
    depth: strips of a part. A group has the taps of a part of a row of the window."""
    c, i, r = tile.group_id(0) * BN, tile.group_id(1), tile.group_id(2)
    IH, IW = geometry.images
    taps = len(part.reads[0])
    sums = tuple(tile.zeros((BM, BN), f32) for _ in ALL[:taps])
    for q in range(r * depth, min(r * depth + depth, Q), BM):
        rows, column, z, (h, w) = strip_places(tile.arange(0, BM) + q, geometry, across)
        y = h + i * geometry.dilation[0]
        row = tile.where((y >= 0) & (y < IH), (z * IH + y) * IW, -1)
        x = [tile.cast(tile.gather(X[:, c:c+BN], pixel(row, w + o, IW)), f32)
             for o in part.columns]
        for n in ALL[:STRIP]:
            at = place(rows, column, n, geometry.results[1])
            g = tile.cast(tile.gather(G[:, c:c+BN], at), f32)
            sums = tuple(sums[j] + g * x[part.reads[n][j]] for j in ALL[:taps])
    for j in ALL[:taps]:
        D[r, i * taps + j, c:c+BN] = tile.reduce_sum(sums[j], axis=0)


__all__ = ["RowPart", "depthwise_backward", "depthwise_forward", "depthwise_weights",
           "row_parts", "strips_of"]
