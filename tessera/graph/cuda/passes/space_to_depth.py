"""Convolutions of images of few channels, as the first of a network has: the pixels of a patch of
stride x stride become the channels of one, and pixels of a row of a window lie together then.

Three channels are six bytes, of which copies cannot pick any. Patches, with zeros around the image
and behind the channels, have windows that do not overlap the image's side; copies bring rows of
them at once (Windows.joined). That costs a copy of the image, and products of zeros: 7 x 7 pixels
of 3 channels in steps of two are 4 x 4 of 16, 256 products in place of 147.
"""

from __future__ import annotations

from math import prod

from ....kernels.conv import Geometry, conv_patches
from ....lazy_dataclass import dataclass
from ....tensor import Tensor
from ....tile.ops.windows import Pair
from ... import functions as F

PANEL = 64  # elements of 16 bits of a row of a window, that a copy brings
EIGHT = 8  # of 16 bits in 16 bytes, from which on rows are read
ORDER = 0, 1, 3, 2, 4, 5  # rows of patches, rows in a patch; columns; channels


@dataclass(frozen=True)
class Patches:
    """window: in patches   channels: of a patch, with zeros behind   images, results: extents, of
    images in patches"""

    window: Pair
    channels: int
    images: Pair
    results: Pair

    @staticmethod
    def of(g: Geometry, channels: int) -> Patches:
        """With as few products as can be."""
        KH, KW = (-(-k // s) for k, s in zip(g.window, g.stride, strict=True))
        least = prod(g.stride) * channels
        sizes = [(n * c, c, n) for n in range(KW, PANEL // EIGHT + KW + 1)
                 for c in range(-(-least // EIGHT) * EIGHT, least + PANEL + 1, EIGHT)
                 if n * c % PANEL == 0]
        _, wide, KW = min(sizes)
        images = g.results[0] + KH - 1, g.results[1] + KW - 1
        return Patches((KH, KW), wide, images, g.results)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.window, (1, 1), (1, 1), (0, 0), self.images, self.results)


def patches_of(x: Tensor, p: Patches, g: Geometry) -> Tensor:
    """[N, H, W, C] as [N H' W', channels]"""
    return _patched(x, p, Geometry(g.stride, g.stride, (1, 1), g.before, g.images, p.images))


def filters_of(w: Tensor, p: Patches, g: Geometry) -> Tensor:
    """[O, KH, KW, C] as [O, KH' KW' channels]"""
    made = _patched(w, p, Geometry(g.stride, g.stride, (1, 1), (0, 0), g.window, p.window))
    return F.reshape(made, (w.shape[0], prod(p.window) * p.channels))


def _patched(x: Tensor, p: Patches, g: Geometry) -> Tensor:
    """The pixels of each patch side by side, and zeros behind."""
    Y = F.zeros((x.shape[0] * prod(g.results), p.channels), x.type)
    conv_patches(F.reshape(x, (prod(x.shape[:3]), x.shape[3])), Y, g, BN=p.channels)
    return Y


def filters_from(w: Tensor, p: Patches, g: Geometry, channels: int) -> Tensor:
    """[O, KH' KW' channels] as [O, KH, KW, C]"""
    (SH, SW), (KH, KW) = g.stride, p.window
    w = F.reshape(w, (w.shape[0], KH, KW, p.channels))[:, :, :, :SH * SW * channels]
    w = F.transpose(F.reshape(w, (w.shape[0], KH, KW, SH, SW, channels)), ORDER)
    w = F.reshape(w, (w.shape[0], KH * SH, KW * SW, channels))
    return w[:, :g.window[0], :g.window[1]]


__all__ = ["Patches", "filters_from", "filters_of", "patches_of"]
