"""Convolutions without unfolded windows: matmuls whose second operand is gathered where it lies.

One tap of the window after another: for it, each place of the result reads one pixel of each
channel, and what of the window lies outside is 0. So the pixels' places are computed once for a tap
and serve all channels. What is gathered lies as [images * groups, pixels, channels]: the channels
of a pixel come in accesses of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..numerics import f32, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from ..tile.ops.windows import Pair, WindowGeometry


class Geometry(WindowGeometry):
    """That of a convolution, from which those of its gradients follow."""

    __slots__ = ()

    @property
    def taps(self) -> int:
        return self.window[0] * self.window[1]

    @property
    def backwards(self) -> Geometry:
        """Of the windows of results that read a pixel, where windows are one pixel apart."""
        before = _pair(d * (k - 1) - b for d, k, b in zip(
            self.dilation, self.window, self.before, strict=True))
        return Geometry(self.window, (1, 1), self.dilation, before, self.results, self.images)

    @property
    def patches(self) -> Geometry:
        """Images cut into patches of stride x stride pixels."""
        return Geometry(self.stride, self.stride, (1, 1), (0, 0), self.images, _pair(
            -(-n // s) for n, s in zip(self.images, self.stride, strict=True)))

    @property
    def readers(self) -> Geometry:
        """Of the windows of results that read a pixel of a patch, without dilation. The pixel at p
        in its patch is read through taps r + s i, r = (p + before) % s, by the results that are
        (p + before) // s - i behind the patch."""
        reach = [[(p + b) // s - i for p in range(s) for i in range((k - (p + b) % s + s - 1) // s)]
                 for b, s, k in zip(self.before, self.stride, self.window, strict=True)]
        return Geometry(_pair(max(r) - min(r) + 1 for r in reach), (1, 1), (1, 1),
                        _pair(-min(r) for r in reach), self.results, self.patches.results)


def _pair(numbers: Iterable[int]) -> Pair:
    first, second = numbers
    return first, second


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


@kernel(grid=lambda P, BM: (-(-P // BM),))
def conv_patches(X: Tensor["S", "C"], Y: Tensor["P", "E"], geometry, BM=64, BN=16):
    """Windows of images as rows, with zeros behind. X: [images and pixels, channels]   Y: [images
    and windows, BN]"""
    p = tile.group_id(0) * BM
    Y[p:p+BM, 0:BN] = tile.load(tile.windows(X, p, 0, geometry, BM, BN))


# --- channels last: matmuls of unfolded images, which copies unfold ------------------------------
@kernel(grid=lambda P, M, BM, BN: (-(-P // BM), -(-M // BN)))
def conv_forward(X: Tensor["S", "C"], W: Tensor["M", "K"], Y: Tensor["P", "M"], geometry,
                 BM=128, BN=128, BK=64):
    """Y[p, m] = sum_k W[m, k] U[p, k], U the unfolded images.

    X: [images and pixels, channels]   W: [filters, taps and channels]   Y: [places, filters]
    """
    p, m = tile.group_id(0) * BM, tile.group_id(1) * BN
    acc = tile.zeros((BM, BN), f32)
    for k in range(0, geometry.taps * C, BK):
        x = tile.load(tile.windows(X, p, k, geometry, BM, BK))
        acc = tile.dot(x, tile.load(W[m:m+BN, k:k+BK]).T, acc)
    Y[p:p+BM, m:m+BN] = acc


@kernel(grid=lambda S, C, BM, BN: (-(-S // BM), -(-C // BN)))
def conv_backward(G: Tensor["P", "M"], W: Tensor["M", "K"], D: Tensor["S", "C"], geometry, BM=128,
                  BN=128, BK=64):
    """D[s, c] = sum_tm W[m, tap t, c] G[the place that reads pixel s through t, m], of windows that
    follow each other closely: of G, the same windows with the taps in opposite order.

    geometry: of the windows of G   BK: divides M
    """
    s, c = tile.group_id(0) * BM, tile.group_id(1) * BN
    acc = tile.zeros((BM, BN), f32)
    for k in range(0, geometry.taps * M, BK):
        m, n = k % M, (geometry.taps - 1 - k // M) * C + c
        g = tile.load(tile.windows(G, s, k, geometry, BM, BK))
        acc = tile.dot(g, tile.load(W[m:m+BK, n:n+BN]), acc)
    D[s:s+BM, c:c+BN] = acc


@kernel(grid=lambda classes, places, C, BM, BN: (-(-places // BM), -(-C // BN), classes))
def conv_backward_strided(G: Tensor["P", "M"], W: Tensor["M", "K"], D: Tensor["S", "C"], geometry,
                          read, patches, classes=1, places=1, BM=128, BN=128, BK=64):
    """The same of windows `stride` apart: pixels at one position in a patch of stride x stride are
    a class, read through the same taps.

    geometry: of the convolution; read, patches: its readers and patches   classes: of pixels
    places: patches of all images   BK: divides M, and BN divides C
    """
    s, c, z = tile.group_id(0) * BM, tile.group_id(1) * BN, tile.group_id(2)
    _, KW = geometry.window
    SH, SW = geometry.stride
    h, w = z // SW + geometry.before[0], z % SW + geometry.before[1]
    rows, columns = taps_of(h, geometry, 0), taps_of(w, geometry, 1)
    acc = tile.zeros((BM, BN), f32)
    for k in range(0, rows * columns * M, BK):
        tap, m = k // M, k % M
        i, j = tap // tile.maximum(columns, 1), tap % tile.maximum(columns, 1)
        u, v = h // SH - i + read.before[0], w // SW - j + read.before[1]
        g = tile.load(tile.windows(G, s, (u * read.window[1] + v) * M + m, read, BM, BK))
        n = ((h % SH + i * SH) * KW + w % SW + j * SW) * C + c
        acc = tile.dot(g, tile.load(W[m:m+BK, n:n+BN]), acc)
    tile.store(tile.windows(D, s, z * C + c, patches, BM, BN), acc)


@kernel
def taps_of(position, geometry, axis):
    """How many taps along an axis read pixels at a position in their patch."""
    S, K = geometry.stride[axis], geometry.window[axis]
    return (K - position % S + S - 1) // S


@kernel(grid=lambda R, M, K, BM, BN: (-(-M // BM), -(-K // BN), R))
def conv_weights(X: Tensor["S", "C"], G: Tensor["P", "M"], D: Tensor["R", "M", "K", f32], geometry,
                 depth: i32, BM=128, BN=128, BK=64):
    """D[r][m, k] = sum over part r of the places p of G[p, m] U[p, k]. depth: of a part, a multiple
    of BK but for the last."""
    m, k, r = tile.group_id(0) * BM, tile.group_id(1) * BN, tile.group_id(2)
    acc = tile.zeros((BM, BN), f32)
    for p in range(r * depth, min(r * depth + depth, P), BK):
        x = tile.load(tile.windows(X, p, k, geometry, BK, BN))
        acc = tile.dot(tile.load(G[p:p+BK, m:m+BM]).T, x, acc)
    D[r, m:m+BM, k:k+BN] = acc


__all__ = ["Geometry", "conv_backward", "conv_backward_strided", "conv_filters", "conv_forward",
           "conv_images", "conv_patches", "conv_weights"]
