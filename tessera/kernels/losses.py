"""Losses of rows from what parts of these rows have given."""

from __future__ import annotations

from ..numerics import f32, int32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel


@kernel(grid=lambda M, BM: (M + BM - 1) // BM)
def weigh_losses(tops: Tensor["M", "K"], sums: Tensor["M", "K"], x: Tensor["E"],
                 labels: Tensor["M"], losses: Tensor["M"], N=1, BM=8):
    """max x + log sum e^(x - max x) - x[label] of each row of N, and NaN for a label outside of it.
    tops: the largest of each part of a row.  sums: of the powers about it.  x: fewer than 2^31
    elements.  BM: rows of a group, as a group for each takes longer to start than to compute"""
    m = tile.group_id(0) * BM
    label = tile.load(labels[m:m+BM])
    rows = tile.minimum(tile.arange(0, BM, int32) + m, M - 1)
    at = tile.cast(tile.minimum(tile.maximum(label, 0), N - 1), int32)
    own = tile.cast(tile.gather(x, rows * N + at), f32)
    part = tile.load(tops[m:m+BM, 0:K])
    top = tile.row_max(part)
    total = tile.row_sum(tile.load(sums[m:m+BM, 0:K]) * tile.exp(part - top))
    loss = top - own + tile.log(total)
    losses[m:m+BM] = tile.where((label >= 0) & (label < N), loss, float("nan"))


__all__ = ["weigh_losses"]
