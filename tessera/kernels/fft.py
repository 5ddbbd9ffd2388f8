"""Fourier transforms of f32 pairs (real, imaginary), as many points as a group's shared memory has.

Longer transforms are two passes, Bailey's four steps (1990, J. Supercomputing 4:23): the first
turns its frequencies by the whole's angles where it writes. An inverse is the transform with both
parts exchanged, before and behind.
"""

from __future__ import annotations

import functools
from typing import Any

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from ..tile.kernel.kernel import Kernel
from .fft_stages import (
    ALL,
    KEPT,
    MOST_POINTS,
    POINTS,
    SECTOR,
    beside_points,
    complex_multiply,
    one_turn,
    pitch,
    spread,
    stage_turn,
    starts,
    transformed,
)


@kernel
def begin_near(xs, begins, rows, length, near):
    """Asks for a group's rows, as many from each of these on, to be brought to L2 while the kernel
    in front ends, as the first `near` groups do."""
    if near > 0:
        if tile.group_id(0) < near:
            for x in xs:
                for begin in begins:
                    tile.prefetch_box(x[begin:begin + rows, :length])
        tile.grid_dependency_wait()
        tile.launch_dependents()


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("yr", "yi"))
def fft_lines(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["B", "F", f32],
              yi: Tensor["B", "F", f32], angles: Tensor["T", f32], radices, N: int, inner: int,
              outer: int, lines: int, whole: int, apart: int, scale: float, BM=1, points=POINTS,
              beside=False, near=0):
    """The transforms of `lines` lines of N points. Of line l, point n is
    x[l // inner, n inner + l % inner], frequency k y[l // outer, k outer + l % outer].

    whole: frequency k of column c of y is turned by -(c // apart) k / whole, where that is not 1
    beside: a thread's first butterflies have numbers side by side.  near: see begin_near
    """
    if inner == 1:
        begin_near((xr, xi), (tile.group_id(0) * BM,), BM, N, near)
    each, lane, P = max(1, N // points), tile.local_id(), pitch(N, BM, radices)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, inner > 1)
    number = tile.group_id(0) * BM + line
    at = number if lines % BM == 0 else min(number, lines - 1)
    row, first = at // inner, at % inner + part * inner
    line_, part_ = line, part
    if len(radices) > 1:
        line_, part_ = spread(lane, BM, each, outer > 1)
    here, there = (line * P, part), (line_ * P, part_)
    if beside:
        vr, vi = [beside_points(x, row, part, N, radices[0], points) for x in (xr, xi)]
        y = transformed(vr, vi, sr, si, angles, N, radices, here, there, points=points, beside=True)
    else:
        y = points_transformed(xr, xi, row, first, inner, 1, sr, si, angles, N, radices, here,
                               there, points)
    to = tile.group_id(0) * BM + line_
    if lines % BM == 0:
        frequencies(yr, yi, y, to, part_, N, radices[-1], outer, whole, apart, scale, points)
    elif to < lines:
        frequencies(yr, yi, y, to, part_, N, radices[-1], outer, whole, apart, scale, points)


@kernel
def points_transformed(xr, xi, row, first, apart, every, sr, si, angles, N, radices, here, there,
                       points):
    """The last stage's results of a thread whose points of a row lie from `first` on.

    every: 2 where parts of points lie side by side; xr and xi are both the same then
    """
    R, us, step = radices[0], starts(N, radices[0], points), N // radices[0]
    if every == 2:
        numbers = [[(u + j * step) * apart for j in ALL[:R]] for u in us]
        vr, vi = side_by_side(xr, row, first, numbers)
    else:
        vr = [[xr[row, first + (u + j * step) * apart] for j in ALL[:R]] for u in us]
        vi = [[xi[row, first + (u + j * step) * apart] for j in ALL[:R]] for u in us]
    return transformed(vr, vi, sr, si, angles, N, radices, here, there,
                       points=points)


@kernel
def side_by_side(x, row, first, numbers):
    """(real, imaginary) parts of points, from `first` on."""
    z = [[tile.load_pair(x[row], first + 2 * n) for n in of] for of in numbers]
    return [[p[0] for p in ps] for ps in z], [[p[1] for p in ps] for ps in z]


@kernel
def frequencies(yr, yi, y, line, part, N, R, outer, whole, apart, scale, points):
    """Those of a line from a thread's last butterflies, where they belong."""
    b, d = line // outer, line % outer
    store_frequencies(yr, yi, y, b, d + part * outer, outer, d // apart, part, N, R, whole, scale,
                      points)


@kernel
def store_frequencies(yr, yi, y, row, first, apart, column, part, N, R, whole, scale, points,
                      every=1):
    """Those of a thread's last butterflies to a row, from `first` on.

    every: 2 where parts lie side by side; yr and yi are both the same then
    """
    vs, step = starts(N, R, points), N // R
    rows = column_turns(column * step, KEPT[R], whole)
    for n in ALL[:len(vs)]:
        turn = column_turns(column * (part + vs[n]), (1,), whole)
        for k in ALL[:R]:
            real, imaginary = y[n][0][k] * scale, y[n][1][k] * scale
            if whole > 1:
                cosine, sine = turn[0]
                if k > 0:
                    cosine, sine = complex_multiply(cosine, sine, *stage_turn(k, rows))
                real, imaginary = complex_multiply(real, imaginary, cosine, sine)
            at = (vs[n] + k * step) * apart * every
            if every == 2:
                tile.store_pair(yr[row], first + at, real, imaginary)
            else:
                yr[row, first + at] = real
                yi[row, first + at] = imaginary


@kernel
def column_turns(n, factors, whole):
    """(cosine, sine) of the turns -n f / whole for each factor f; none where whole is 1."""
    if whole == 1:
        return ()
    return [one_turn(n * f, whole) for f in factors]


# --- blocks --------------------------------------------------------------------------------------
LANES = 64  # of a group of short lines
LONGEST = 16384  # points of a line that lies in one piece
LONGEST_PAIR = 2048  # of real lines, two at once
LONGEST_ACROSS = 1024
# Neighbours in memory that a group has where they are of other lines: 64 or 128 bytes in a row.
LINES_ACROSS = {512: 16, 1024: 16}
MOST_LINES_ACROSS = 32
# Lines of so many points (as a power of two) with 32 points in a thread: a stage and its exchange
# less. 2^24 points in lines of 2^13 and 2^14 take 79 and 103 us so, with 16 points 92 and 119; in
# two passes of 2^18 and 2^20 152 and 188 for 169 and 212; of 2^9, 2^10, 2^12 in one piece 70, 69
# and 73 for 68, 68 and 72 (H200, 2026-11-26). Of 2^13 (16, 32, 16) takes 75.2 us where (32, 16, 16)
# takes 78.4 and (16, 16, 32) 79.8, in turn.
WIDE = {13: (16, 32, 16), 14: (32, 32, 16)}
WIDE_ACROSS = {9: (32, 16), 10: (32, 32)}
# Radices of a first stage whose butterflies are side by side in threads of 16 points. Lines of 2^10
# and 2^11 take 67.7 and 68.4 us so for 68.2 and 69.0, real lines of 2^10 38.4 for 38.5; but lines
# of 2^9, of radix 2, 70.6 for 67.7 (H200, 2026-11-27).
BESIDE = (4, 8)
# Groups that ask for their first points before they may read them, of complex points, of those of
# real lines and of lines with factors 3 and 5. Lines of 2^12 take 70.0 us so for 71.0, real ones of
# 2^12 38.8 for 39.5 and of 2^13 39.4 for 41.1, lines of 1000 points 69.4 for 70.1; but real ones of
# 2^10 38.9 for 38.5 (H200, 2026-11-27).
NEAR, NEAR_REAL, NEAR_MIXED = {4096: 1056}, {2048: 1056, 4096: 528}, {1000: 1584}
# Of real lines, two at once, which read turns ahead of a stage's butterflies then, too. Lines of
# 2^10 take 37.8 us and of 2^11 37.5 for 38.1 and 38.1 with 264 groups, 38.0 with 1056 of 2^10,
# 37.7 and 37.6 with turns read ahead; cuFFT 37.5 and 37.6 (H200, 2026-11-27).
NEAR_PAIRS = {1024: 264, 2048: 264}
# Of rows that begin anywhere in sectors of memory, whose groups write them by the copy engine: real
# lines, two at once and one, of 2^10 to 2^13 points, 35.4, 35.9, 36.7 and 38.4 us for 37.4, 37.3,
# 39.3 and 38.8, cuFFT 37.7, 37.5, 39.0 and 41.5; begun near or not is the same then. Lines of 1000,
# which begin at sectors, 70.7 for 69.5 (H200, 2026-11-27).
SPAN_PAIRS, SPAN_REAL = (1024, 2048), (2048, 4096)
# (threads, points of each): groups that share a multiprocessor's registers. 384 threads have lines
# of 6144 points, of which 2^24 take 78.5 us so, 81 without (H200, 2026-11-26).
RESIDENT = {(384, POINTS): 3, (512, POINTS): 2, (256, MOST_POINTS): 2, (128, MOST_POINTS): 4}


def radices_of(N: int) -> tuple[int, ...]:
    """Of a power of two from 2 on: 16 as often as it goes, what is left of it first."""
    rest = (N.bit_length() - 1) % 4
    sixteens = (N.bit_length() - 1) // 4
    return ((1 << rest,) if rest else ()) + (POINTS,) * sixteens


def mirror_form(N: int, back: bool) -> tuple[tuple[int, ...], int, int]:
    """(radices, points of a thread, threads of a group of short lines) of real lines, two at once.
    A thread has two butterflies of the last stage, or back of the first.

    Of 2^8 points in two stages of 16: back 38.5 us for 40.4, but there 54.8 for 43.2 (H200,
    2026-11-26). With 8 points in a thread, so that a warp has one line, 38.2 for 42.4 (2026-11-27).
    """
    if back and N == 256:
        return (16, 16), MOST_POINTS, LANES
    if N == 256 and not back:
        return (8, 8, 4), 8, LANES
    radices = (*radices_of(N // 8), 8)
    return radices[::-1] if back else radices, POINTS, LANES


def apart_of(N: int, lines: int) -> int:
    """Lines from one to the other of two real ones that are transformed at once; see rfft_pairs. Of
    2^8 points 8 lines apart take 43.5 us for 42.3, of 2^10 38.4 for 39.1 (H200, 2026-11-27)."""
    return 1 if N < 512 or lines < 16 * SECTOR else SECTOR


def is_beside(N: int, radices: tuple[int, ...], points: int) -> bool:
    return points == POINTS < N and radices[0] in BESIDE


def lines_of(N: int, across: bool, points: int = POINTS, lanes: int = LANES) -> tuple[int, int]:
    """Lines and threads of a group. across: neighbours in memory are of different lines."""
    each = max(1, N // points)
    lines = LINES_ACROSS.get(N, MOST_LINES_ACROSS) if across else max(1, lanes // each)
    return lines, lines * each


def form_of(N: int, across: bool) -> tuple[tuple[int, ...], int]:
    """(radices, points of a thread) of lines of complex points."""
    wide = (WIDE_ACROSS if across else WIDE).get(N.bit_length() - 1)
    return (wide, MOST_POINTS) if wide else (radices_of(N), POINTS)


def launcher_of(kernel: Kernel, lanes: int, points: int = POINTS, groups: int = 0) -> Any:
    """The kernel in groups of so many threads.  groups: that share a multiprocessor's registers, by
    what was measured where it is 0"""
    resident = groups or RESIDENT.get((lanes, points))
    made = kernel if resident is None else _resident(kernel, resident)
    return made.launcher(lanes=lanes)


@functools.cache
def _resident(kernel: Kernel, groups: int) -> Kernel:
    return kernel.with_schedule(Schedule(RESIDENT=groups))


__all__ = ["LONGEST", "LONGEST_ACROSS", "LONGEST_PAIR", "NEAR", "NEAR_MIXED", "NEAR_PAIRS",
           "NEAR_REAL", "SPAN_PAIRS", "SPAN_REAL", "apart_of", "begin_near", "fft_lines", "form_of",
           "is_beside", "launcher_of", "lines_of", "mirror_form", "radices_of", "side_by_side"]
