"""Convolutions without unfolded windows: matmuls whose second operand is gathered where it lies.

One tap of the window after another: for it, each place of the result reads one pixel of each
channel, and what of the window lies outside is 0. So the pixels' places are computed once for a tap
and serve all channels. What is gathered lies as [images * groups, pixels, channels]: the channels
of a pixel come in accesses of 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Of two spatial axes: extents of the window, its steps, what stands before the first pixel,
    and the extents of images and of results."""

    window: Pair
    stride: Pair
    dilation: Pair
    before: Pair
    images: Pair
    results: Pair

    @property
    def taps(self) -> int:
        return self.window[0] * self.window[1]


@kernel
def pixels(places, tap, geometry):
    """Of places of the result, the pixels that one tap of the window reads; -1 outside."""
    _, KW = geometry.window
    OH, OW = geometry.results
    IH, IW = geometry.images
    h = places // OW * geometry.stride[0] - geometry.before[0] + tap // KW * geometry.dilation[0]
    w = places % OW * geometry.stride[1] - geometry.before[1] + tap % KW * geometry.dilation[1]
    inside = (h >= 0) & (h < IH) & (w >= 0) & (w < IW) & (places < OH * OW)
    return tile.where(inside, h * IW + w, -1)


@kernel
def readers(places, tap, geometry):
    """Of pixels, the places of the result that read them through one tap; -1 where none does."""
    _, KW = geometry.window
    OH, OW = geometry.results
    _, IW = geometry.images
    h = places // IW + geometry.before[0] - tap // KW * geometry.dilation[0]
    w = places % IW + geometry.before[1] - tap % KW * geometry.dilation[1]
    SH, SW = geometry.stride
    inside = (h >= 0) & (w >= 0) & (h // SH < OH) & (w // SW < OW)
    inside = inside & (h % SH == 0) & (w % SW == 0)
    return tile.where(inside, h // SH * OW + w // SW, -1)


@kernel(grid=lambda Z, M, P, BM, BN: (-(-M // BM), -(-P // BN), Z))
def conv_images(X: Tensor["Z", "S", "C"], W: Tensor["Q", "M", "C"], Y: Tensor["Z", "M", "P"],
                geometry, groups=1, back=False, BM=128, BN=128, BK=32):
    """Y[z, m, p] = sum_tc W[group of z, tap t][m, c] X[z, the pixel of p through t, c].

    W: for each group the taps one after another.   back: of the adjoint, whose X are the results of
    a convolution and whose places are its pixels
    """
    m, n, z = tile.group_id(0) * BM, tile.group_id(1) * BN, tile.group_id(2)
    places = tile.arange(0, BN) + n
    sums = tile.zeros((BM, BN))
    for tap in range(0, geometry.taps):
        at = readers(places, tap, geometry) if back else pixels(places, tap, geometry)
        for c in range(0, X.shape[2], BK):
            w = tile.load(W[z % groups * geometry.taps + tap, m:m+BM, c:c+BK])
            sums = tile.dot(w, tile.gather(X[z, :, c:c+BK], at).T, sums)
    Y[z, m:m+BM, n:n+BN] = tile.cast(sums, Y.dtype)


@kernel(grid=lambda R, Q, M, C, BM, BN: (-(-M // BM), -(-C // BN), R * Q))
def conv_filters(X: Tensor["Z", "S", "C"], G: Tensor["Z", "M", "P"],
                 D: Tensor["R", "Q", "M", "C", f32], geometry, groups=1, images=1, BM=128, BN=128,
                 BK=32):
    """D[r, group and tap][m, c] = sum over some images and all places p of G[z, m, p] times
    X[z, the pixel of p through the tap, c]. images: of each part r."""
    m, n = tile.group_id(0) * BM, tile.group_id(1) * BN
    r, q = tile.group_id(2) // Q, tile.group_id(2) % Q
    tap, group = q % geometry.taps, q // geometry.taps
    sums = tile.zeros((BM, BN))
    for i in range(r * images, min(r * images + images, Z // groups)):
        z = i * groups + group
        for p in range(0, P, BK):
            at = pixels(tile.arange(0, BK) + p, tap, geometry)
            x = tile.gather(X[z, :, n:n+BN], at)
            sums = tile.dot(tile.load(G[z, m:m+BM, p:p+BK]), x, sums)
    D[r, q, m:m+BM, n:n+BN] = sums


__all__ = ["Geometry", "conv_filters", "conv_images"]
