"""Fourier transforms of planes of 64 x 64 f32 points, which a group has in registers.

Both axes take two stages of Stockham's order (fft_stages), of 4 and of 16 points. The first ones of
both are done at once, of 4 by 4 points 16 apart; then come 16 points of a row and 16 of a column.
So points go through shared memory twice, as those of a line of as many do.

2^24 points take 69.4 us (cuFFT 127.7), volumes of 64 x 64 x 64 136.6, 245.7 in a launch for each
axis (cuFFT 205; H200, 2026-11-27). Groups that ask for their planes while the kernel in front ends
do not gain: 136.8 and 136.6 with 264 and 1056 of them, 136.2 without.
"""

from __future__ import annotations

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .fft_stages import butterfly, complex_multiply

SIDE, RADICES, THREADS = 64, (4, 16), 256
# In shared memory point 4 q + f of a row lies at 17 f + q, and rows 68 apart: threads of 16 q and
# two rows that are 4 apart share no bank, nor do those of four f and 8 rows.
PART, PITCH = 17, 68
FOUR, SIXTEEN = tuple(range(4)), tuple(range(16))


@kernel(grid=lambda planes: planes, overwrites=("yr", "yi"))
def fft_squares(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["A", "E", f32],
                yi: Tensor["A", "E", f32], angles: Tensor["T", f32], planes: int, scale: float):
    """angles: stage_angles of a side"""
    plane, lane = tile.group_id(0), tile.local_id()
    sr, si = tile.alloc_shared((SIDE * PITCH,), f32), tile.alloc_shared((SIDE * PITCH,), f32)
    row, column = lane // 16, lane % 16
    at = row * SIDE + column
    x = [[(xr[plane, at + (16 * SIDE * j + 16 * k)], xi[plane, at + (16 * SIDE * j + 16 * k)])
          for k in FOUR] for j in FOUR]
    x = [first_stage(x[j], angles, column) for j in FOUR]
    to = 4 * PITCH * row + column
    for k in FOUR:
        z = first_stage([x[j][k] for j in FOUR], angles, row)
        for j in FOUR:
            sr[to + (j * PITCH + k * PART)] = z[j][0]
            si[to + (j * PITCH + k * PART)] = z[j][1]
    tile.barrier()
    at = lane // 4 * PITCH + lane % 4 * PART
    r, i = butterfly(16, [sr[at + n] for n in SIXTEEN], [si[at + n] for n in SIXTEEN])
    for n in SIXTEEN:
        sr[at + n] = r[n]
        si[at + n] = i[n]
    tile.barrier()
    column = lane % SIDE
    at = lane // SIDE * PITCH + column % 4 * PART + column // 4
    r, i = butterfly(16, [sr[at + 4 * PITCH * n] for n in SIXTEEN],
                     [si[at + 4 * PITCH * n] for n in SIXTEEN])
    for n in SIXTEEN:
        yr[plane, lane + 4 * SIDE * n] = r[n] * scale
        yi[plane, lane + 4 * SIDE * n] = i[n] * scale


@kernel
def first_stage(z, angles, p):
    """Of points p + 16 j: frequencies k, turned by -p k / 64."""
    r, i = butterfly(4, [z[j][0] for j in FOUR], [z[j][1] for j in FOUR])
    rows = [tile.load_pair(angles, 2 * p + 32 * n) for n in FOUR[:3]]
    return [(r[0], i[0])] + [complex_multiply(r[k], i[k], rows[k - 1][0], rows[k - 1][1])
                             for k in FOUR[1:]]


__all__ = ["RADICES", "SIDE", "THREADS", "fft_squares"]
