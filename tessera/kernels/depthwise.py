"""Depthwise convolutions: each channel by a filter of its own, in images whose channels are last.

There is nothing to multiply as matrices. A place of the result adds up the pixels of its window,
16 bytes of channels at a time; the taps of a row of the window are read one behind the other, so
that all but the first of them come from L1.
"""

from __future__ import annotations

from ..numerics import f32, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel

EIGHT = Schedule(warps=8)  # elements of a thread of blocks of 2048, which is one access
ALL = tuple(range(32))  # taps of a row, which are unrolled


@kernel
def pixels_of(places, geometry):
    """The image of each place, and the first row and column of its window."""
    OH, OW = geometry.results
    rows = places // OW
    h = rows % OH * geometry.stride[0] - geometry.before[0]
    return rows // OH, h, places % OW * geometry.stride[1] - geometry.before[1]


@kernel
def column(row, x, width):
    """The pixel in column x of a row that begins at `row`; -1 outside."""
    return tile.where((row >= 0) & (x >= 0) & (x < width), row + x, -1)


@kernel(grid=lambda P, C, BM, BN: (-(-C // BN), -(-P // BM)), schedule=EIGHT)
def depthwise_forward(X: Tensor["S", "C"], W: Tensor["T", "C", f32], Y: Tensor["P", "C"], geometry,
                      BM=32, BN=64):
    """Y[p, c] = sum_t W[t, c] X[the pixel of p through t, c].

    X: [images and pixels, channels]   W: [taps, channels]   Y: [images and places, channels]
    """
    c, p = tile.group_id(0) * BN, tile.group_id(1) * BM
    KH, KW = geometry.window
    IH, IW = geometry.images
    z, h, w = pixels_of(tile.arange(0, BM) + p, geometry)
    acc = tile.zeros((BM, BN), f32)
    for i in range(0, KH):
        y = h + i * geometry.dilation[0]
        row = tile.where((y >= 0) & (y < IH), (z * IH + y) * IW, -1)
        for j in ALL[:KW]:
            at = column(row, w + j * geometry.dilation[1], IW)
            t = i * KW + j
            weight = tile.load(W[t:t+1, c:c+BN])
            acc = acc + tile.cast(tile.gather(X[:, c:c+BN], at), f32) * weight
    Y[p:p+BM, c:c+BN] = tile.cast(acc, Y.dtype)


@kernel(grid=lambda S, C, BM, BN: (-(-C // BN), -(-S // BM)), schedule=EIGHT)
def depthwise_backward(G: Tensor["P", "C"], W: Tensor["T", "C", f32], D: Tensor["S", "C"], geometry,
                       BM=32, BN=64):
    """D[s, c] = sum_t W[t, c] G[the place that reads pixel s through t, c]."""
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
            x = w - j * geometry.dilation[1]
            at = tile.where((row >= 0) & (x >= 0) & (x % SW == 0) & (x // SW < OW),
                            row + x // SW, -1)
            t = i * KW + j
            weight = tile.load(W[t:t+1, c:c+BN])
            acc = acc + tile.cast(tile.gather(G[:, c:c+BN], at), f32) * weight
    D[s:s+BM, c:c+BN] = tile.cast(acc, D.dtype)


@kernel(grid=lambda R, C, BN, geometry: (-(-C // BN), geometry.window[0], R), schedule=EIGHT)
def depthwise_weights(X: Tensor["S", "C"], G: Tensor["P", "C"], D: Tensor["R", "T", "C", f32],
                      geometry, depth: i32, BM=32, BN=64):
    """D[r, t, c] = sum over part r of the places p of G[p, c] X[the pixel of p through t, c].
    depth: places of a part. A group has the taps of one row of the window."""
    c, i, r = tile.group_id(0) * BN, tile.group_id(1), tile.group_id(2)
    KH, KW = geometry.window
    IH, IW = geometry.images
    sums = tuple(tile.zeros((BM, BN), f32) for _ in ALL[:KW])
    for p in range(r * depth, min(r * depth + depth, P), BM):
        g = tile.cast(tile.load(G[p:p+BM, c:c+BN], fill=0), f32)
        z, h, w = pixels_of(tile.arange(0, BM) + p, geometry)
        y = h + i * geometry.dilation[0]
        row = tile.where((y >= 0) & (y < IH), (z * IH + y) * IW, -1)
        at = [column(row, w + j * geometry.dilation[1], IW) for j in ALL[:KW]]
        sums = tuple(sums[j] + g * tile.cast(tile.gather(X[:, c:c+BN], at[j]), f32)
                     for j in ALL[:KW])
    for j in ALL[:KW]:
        D[r, i * KW + j, c:c+BN] = tile.reduce_sum(sums[j], axis=0)


__all__ = ["depthwise_backward", "depthwise_forward", "depthwise_weights"]
