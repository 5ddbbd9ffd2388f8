"""Losses of rows from what parts of these rows have given."""

from __future__ import annotations

from ..numerics import f32, int32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel


@kernel(grid=lambda M: M)
def weigh_losses(tops: Tensor["M", "K"], sums: Tensor["M", "K"], x: Tensor["M", "N"],
                 labels: Tensor["M"], losses: Tensor["M"]):
    """max x + log sum e^(x - max x) - x[label] of each row, and NaN for a label outside of it.
    tops: the largest of each part of a row.  sums: of the powers about it"""
    m = tile.group_id(0)
    at = tile.cast(min(max(labels[m], 0), N - 1), int32)
    own = tile.cast(x[m, at], f32)
    part = tile.load(tops[m:m+1, 0:K])
    top = tile.row_max(part)
    total = tile.row_sum(tile.load(sums[m:m+1, 0:K]) * tile.exp(part - top))
    label = tile.load(labels[m:m+1])
    loss = top - own + tile.log(total)
    losses[m:m+1] = tile.where((label >= 0) & (label < N), loss, float("nan"))


__all__ = ["weigh_losses"]
