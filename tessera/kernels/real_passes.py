"""Fourier transforms of long real f32 lines and back, each in one launch.

The passes are those of fft_passes over x[2 n] + i x[2 n + 1], where frequencies k and n - k are
columns c and N - c of the second, or back of the first. A group has both, and each of its threads a
butterfly of either: frequencies of real lines leave, and come, where their pairs are.
"""

from __future__ import annotations

import math
from typing import Any

from ..numerics import f32, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .fft import store_frequencies
from .fft_passes import (
    AHEAD,
    GROUP_POINTS,
    array_lines,
    array_points,
    lag_of,
    pitch_of,
    wait_for,
)
from .fft_passes import RADICES as SHORTER
from .fft_stages import (
    ALL,
    MOST_POINTS,
    POINTS,
    complex_multiply,
    one_turn,
    spread,
    starts,
    transformed,
    turned_by,
)
from .real_fft import chosen

R = 16  # radix of the stage whose butterflies are pairs
MIDDLE = {n: (math.cos(math.pi / (2 * n)), -math.sin(math.pi / (2 * n))) for n in (8, 16)}


@kernel(grid=lambda arrays, LAG, N, N_, BM, BM_: (arrays + LAG) * (N_ // BM + N // BM_),
        overwrites=("yr", "yi"), counters=("done",))
def rfft_passes(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
                done: Tensor["A", i32], angles: Tensor["T", f32], angles_: Tensor["U", f32],
                radices, radices_, N: int, N_: int, arrays: int, scale: float, LAG: int, BM=1,
                BM_=1, points=MOST_POINTS):
    """Frequencies 0 .. N N_ of lines of 2 N N_ real points; see fft_passes."""
    first, second = N_ // BM, N // BM_
    step, block = tile.group_id(0) // (first + second), tile.group_id(0) % (first + second)
    P_ = pitch_of(N_, BM_, radices_, True, True, points)
    P = max(BM * pitch_of(N, BM, radices, True, False, points), BM_ * P_)
    sr, si = tile.alloc_shared((P,), f32), tile.alloc_shared((P,), f32)
    if block >= second:
        if step < arrays:
            array_lines(x, x, yr, yi, step, (block - second) * BM, sr, si, angles, radices, N,
                        (1, N_), (N, 1), N * N_, 1.0, BM, 2, points)
            tile.atomic_add(done, step, 1, release=True)
    elif step >= LAG:
        wait_for(done, step - LAG, first)
        columns_to_pairs(yr, yi, step - LAG, block * (BM_ // 2), sr, si, angles_, radices_, N, N_,
                         scale, BM_, P_, points)


@kernel
def columns_to_pairs(yr, yi, a, begin, sr, si, angles, radices, N, N_, scale, BM, P, points):
    """The second pass over columns from `begin` on, and over those that mirror them."""
    lane, step = tile.local_id(), N_ // radices[0]
    line, part = spread(lane, BM, N_ // points, True)
    at = column_of(begin + line // 2, line % 2, N) + part * N
    us, here = starts(N_, radices[0], points), (line * P, part)
    vr = [[yr[a, at + (u + j * step) * N] for j in ALL[:radices[0]]] for u in us]
    vi = [[yi[a, at + (u + j * step) * N] for j in ALL[:radices[0]]] for u in us]
    c, at, own, both = both_butterflies(begin, N, N_, BM, P)
    p, q = transformed(vr, vi, sr, si, angles, N_, radices, here, here, (N_ // R, both), points)
    pair_frequencies(yr, yi, a, at, own, p, q, N * N_, one_turn(at, 2 * N * N_), scale)


@kernel
def column_of(c, mirror, N):
    """Column c of N, or that which mirrors it; where it mirrors itself that in the middle."""
    return tile.where(mirror == 0, c, tile.where(c == 0, N // 2, N - c))


@kernel
def both_butterflies(begin, N, N_, BM, P):
    """Of a thread's butterflies on columns of N_ points, which are each other's mirror: (the first
    one's column, its first point in the array, whether each is its own mirror, both: where the
    column lies in shared memory, and the number).

    Columns 0 and N / 2 mirror themselves: half of the threads have two butterflies of the one, half
    of the other.
    """
    line, u = spread(tile.local_id(), BM // 2, N_ // R, True)
    c, W = begin + line, N_ // R
    zero, upper = c == 0, u >= W // 2
    row = tile.where(zero and upper, 1, 0)
    row_ = tile.where(zero and u < W // 2, 0, 1)
    v = tile.where(zero and upper, u - W // 2, u)
    v_ = tile.where(zero, tile.where(upper, W - 1 - v, tile.where(u == 0, W // 2, W - u)),
                    W - 1 - u)
    column = column_of(c, row, N)
    return (column, column + v * N, zero and u == 0,
            [((2 * line + row) * P, v), ((2 * line + row_) * P, v_)])


@kernel
def pair_frequencies(yr, yi, a, at, own, p, q, N, turn, scale):
    """Those of the real line, of butterflies p from `at` on and q of their mirrors.

    turn: (cosine, sine) of the turn -at / 2 N
    """
    R, half = len(p[0]), 0.5 * scale
    step, high = N // R, upper_turn(turn, own, R)
    later = tile.where(own, step // 2, at + N // 2)
    for n in ALL[:R // 2]:
        z = [p[i][n] for i in (0, 1)]
        z_ = [tile.where(own, p[i][(R - n) % R], q[i][R - 1 - n]) for i in (0, 1)]
        store_pair(yr, yi, a, at + n * step, N, z, z_, apart_by(turn, n, R), half)
        z = [tile.where(own, q[i][n], p[i][R // 2 + n]) for i in (0, 1)]
        z_ = [tile.where(own, q[i][R - 1 - n], q[i][R // 2 - 1 - n]) for i in (0, 1)]
        store_pair(yr, yi, a, later + n * step, N, z, z_, apart_by(high, n, R), half)
    if own:
        yr[a, N // 2] = p[0][R // 2] * scale
        yi[a, N // 2] = p[1][R // 2] * -scale


@kernel
def upper_turn(turn, own, R):
    """That of a point N / 2 further, or of the middle of a butterfly's step, of 2 N points."""
    return tile.where(own, MIDDLE[R][0], turn[1]), tile.where(own, MIDDLE[R][1], -turn[0])


@kernel
def apart_by(turn, n, R):
    """That of a point n steps further, of which 2 R are a whole turn."""
    return turned_by(turn[0], turn[1], n * (POINTS // R))


@kernel
def store_pair(yr, yi, a, k, N, z, z_, turn, half):
    """Frequencies k and N - k of 2 N real points, from those of x[2 n] + i x[2 n + 1]."""
    c, d = complex_multiply(z[1] + z_[1], z_[0] - z[0], turn[0], turn[1])
    yr[a, k] = (z[0] + z_[0] + c) * half
    yi[a, k] = (z[1] - z_[1] + d) * half
    yr[a, N - k] = (z[0] + z_[0] - c) * half
    yi[a, N - k] = (d - z[1] + z_[1]) * half


# --- back ----------------------------------------------------------------------------------------
@kernel(grid=lambda arrays, LAG, N, N_, BM, BM_: (arrays + LAG) * (N_ // BM + N // BM_),
        overwrites=("y",), counters=("done",))
def irfft_passes(xr: Tensor["A", "F", f32], xi: Tensor["A", "F", f32], y: Tensor["A", "E", f32],
                 done: Tensor["A", i32], angles: Tensor["T", f32], angles_: Tensor["U", f32],
                 radices, radices_, N: int, N_: int, arrays: int, scale: float, LAG: int, BM=1,
                 BM_=1, points=MOST_POINTS):
    """The 2 N N_ real points of lines of frequencies 0 .. N N_; of the first and the last no
    imaginary part is read. What lies between the passes has both parts side by side, exchanged."""
    first, second = N_ // BM, N // BM_
    step, block = tile.group_id(0) // (first + second), tile.group_id(0) % (first + second)
    P = pitch_of(N, BM, radices, True, False, points)
    P_ = max(BM * P, BM_ * pitch_of(N_, BM_, radices_, True, True, points))
    sr, si = tile.alloc_shared((P_,), f32), tile.alloc_shared((P_,), f32)
    if block >= second:
        if step < arrays:
            pairs_to_rows(xr, xi, y, step, (block - second) * (BM // 2), sr, si, angles, radices, N,
                          N_, BM, P, points)
            tile.atomic_add(done, step, 1, release=True)
    elif step >= LAG:
        wait_for(done, step - LAG, first)
        made, line, part = array_points(y, y, step - LAG, block * BM_, sr, si, angles_, radices_,
                                        N_, (1, N), (1, N), BM_, 2, points)
        at = 2 * (block * BM_ + line + part * N)
        store_frequencies(y, y, [(z[1], z[0]) for z in made], step - LAG, at, N, 0, 0, N_,
                          radices_[-1], 1, scale, points, 2)


@kernel
def pairs_to_rows(xr, xi, y, a, begin, sr, si, angles, radices, N, N_, BM, P, points):
    """The first pass over columns from `begin` on, and over those that mirror them."""
    c, at, own, both = both_butterflies(begin, N_, N, BM, P)
    p, q = paired_points(xr, xi, a, at, own, N * N_, R, one_turn(at, 2 * N * N_))
    line, part = spread(tile.local_id(), BM, N // points, False)
    here = line * P, part
    made = transformed([p[0], q[0]], [p[1], q[1]], sr, si, angles, N, radices, here, here,
                       (1, both), points)
    column = column_of(begin + line // 2, line % 2, N_)
    store_frequencies(y, y, made, a, 2 * (column * N + part), 1, column, part, N, radices[-1],
                      N * N_, 1.0, points, 2)


@kernel
def paired_points(xr, xi, a, at, own, N, R, turn):
    """(imaginary parts, real parts) of the points of butterflies from `at` on, and of their
    mirrors: twice the frequencies of x[2 n] + i x[2 n + 1].  turn: see pair_frequencies"""
    step, high = N // R, upper_turn(turn, own, R)
    later = tile.where(own, step // 2, at + N // 2)
    lower = [loaded_pair(xr, xi, a, at + n * step, N, apart_by(turn, n, R), n == 0 and own)
             for n in ALL[:R // 2]]
    upper = [loaded_pair(xr, xi, a, later + n * step, N, apart_by(high, n, R), False)
             for n in ALL[:R // 2]]
    middle = (-2.0 * xi[a, N // 2], 2.0 * xr[a, N // 2])
    mine = [middle] + [lower[R // 2 - n][1] for n in ALL[1:R // 2]]
    p = ([z[0] for z in lower]
         + [chosen(own, mine[n], upper[n][0]) for n in ALL[:R // 2]])
    q = ([chosen(own, upper[n][0], upper[R // 2 - 1 - n][1]) for n in ALL[:R // 2]]
         + [chosen(own, upper[R // 2 - 1 - n][1], lower[R // 2 - 1 - n][1]) for n in ALL[:R // 2]])
    return [([z[0] for z in v], [z[1] for z in v]) for v in (p, q)]


@kernel
def loaded_pair(xr, xi, a, k, N, turn, zero):
    """Of points k and N - k: (imaginary part, real part) each.  zero: whether k is 0"""
    r, r_, i, i_ = xr[a, k], xr[a, N - k], xi[a, k], xi[a, N - k]
    i, i_ = tile.where(zero, 0.0, i), tile.where(zero, 0.0, i_)
    c, d = complex_multiply(-(i + i_), r - r_, turn[0], -turn[1])
    return (i - i_ + d, r + r_ + c), (i_ - i + d, r + r_ - c)


# --- blocks --------------------------------------------------------------------------------------
OTHERS = {**SHORTER, 2048: (8, 16, 16)}
PAIRED = {64: (4, 16), 128: (8, 16), 256: (16, 16), 512: (32, 16)}
# Points of lines of which pairs are made, of 2^15 pairs of points on: there and back. Rows between
# the passes are to be long, and pieces of rows of frequencies, which begin anywhere, too.
THERE, BACK = (64, 128, 128, 256, 512, 512), (256, 256, 256, 512, 512, 512)
# Groups between the passes over the shortest: 87.0 us for 87.8 of lines of 2^16. In a build whose
# addresses had known offsets beside them 84.6 for 85.3, 91.5 with 512, 86.5 with 256 (H200,
# 2026-11-27).
SHORTEST, AHEAD_SHORTEST = 1 << 15, 320


def blocks_of(size: int, arrays: int, back: bool) -> tuple[int, dict[str, Any]]:
    """As fft_passes.blocks_of, of arrays of so many pairs of points."""
    paired = (BACK if back else THERE)[size.bit_length() - 16]
    N, N_ = (paired, size // paired) if back else (size // paired, paired)
    return GROUP_POINTS // MOST_POINTS, {
        "radices": PAIRED[N][::-1] if back else OTHERS[N],
        "radices_": OTHERS[N_] if back else PAIRED[N_], "N": N, "N_": N_, "arrays": arrays,
        "BM": GROUP_POINTS // N, "BM_": GROUP_POINTS // N_, "points": MOST_POINTS,
        "LAG": lag_of(size, arrays, AHEAD if back or size > SHORTEST else AHEAD_SHORTEST)}


__all__ = ["blocks_of", "irfft_passes", "pair_frequencies", "paired_points", "rfft_passes"]
