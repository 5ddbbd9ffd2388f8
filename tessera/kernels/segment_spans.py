"""Where the segment of each place of a line begins and ends."""

from __future__ import annotations

from ..numerics import i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel


@kernel
def begins(ids, b, base, step, u):
    """Of the u-th places of a line, counted from `base` in steps of 1 or -1, each one's number if a
    segment begins there, else 0."""
    here, before = tile.gather(ids[b], base + step * u), tile.maximum(u - 1, 0)
    return tile.where(here != tile.gather(ids[b], base + step * before), u, 0)


@kernel(grid=lambda B, S, BN: (-(-S // BN), 2, B))
def segment_spans(ids: Tensor["B", "S"], out: Tensor["B", 2, "S", i32], BN=1024):
    """out[b, 0, i]: the first place of the segment of place i.  out[b, 1, i]: the first behind it.

    Neighbours of one number are a segment. Its end is what its first place would be if places were
    counted from the end of the line. A block goes back over others up to the first in which a
    segment begins.
    """
    u0, side, b = tile.group_id(0) * BN, tile.group_id(1), tile.group_id(2)
    base, step = side * (S - 1), 1 - 2 * side
    u = tile.arange(0, BN) + u0
    last, w = 0, u0
    while w > 0 and last == 0:
        w -= BN
        last = tile.reduce_max(begins(ids, b, base, step, tile.arange(0, BN) + w))
    found = tile.maximum(tile.cummax(begins(ids, b, base, step, u)), last)
    tile.scatter(out[b, side], base + step * u, side * S + step * found)


__all__ = ["segment_spans"]
