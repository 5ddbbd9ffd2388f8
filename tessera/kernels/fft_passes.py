"""Fourier transforms of two passes in one launch.

The second pass over an array follows the first by so few arrays that it finds in the second-level
cache what the first has written, and by so many that it need not wait for it. It transforms columns
where they lie: what lies between the passes is written over before it has to leave the cache.

    step    0     1    ..    LAG      ..   arrays - 1         ..
    first   a_0   a_1  ..    a_LAG    ..   a_(arrays - 1)
    second                   a_0      ..   a_(arrays - 1 - LAG)   ..   a_(arrays - 1)

Groups begin in the order of their numbers. So whoever waits does so for groups that run or have
ended, and those wait for none.
"""

from __future__ import annotations

from typing import Any

from ..numerics import f32, i32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .fft import points_transformed, store_frequencies
from .fft_stages import BANKS, MOST_POINTS, POINTS, room, spread

WORD = 1 << 32


@kernel(grid=lambda arrays, LAG, N, N_, BM, BM_: (arrays + LAG) * (N_ // BM + N // BM_),
        overwrites=("yr", "yi"), counters=("done",))
def fft_passes(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["A", "F", f32],
               yi: Tensor["A", "F", f32], done: Tensor["A", i32], angles: Tensor["T", f32],
               angles_: Tensor["U", f32], radices, radices_, N: int, N_: int, arrays: int,
               along: bool, scale: float, LAG: int, BM=1, BM_=1, points=16):
    """The transforms of arrays of N_ N points: of their rows of N points and then of columns of N_,
    or, along, of all points in a row: of columns of N points, whose frequencies become rows, turned
    by the whole's angles, and then of columns of N_.

    done: zeros, where the groups of the first pass over each array are counted; see wait_for
    """
    first, second = N_ // BM, N // BM_
    step, block = tile.group_id(0) // (first + second), tile.group_id(0) % (first + second)
    P = max(BM * pitch_of(N, BM, radices, along, False, points),
            BM_ * pitch_of(N_, BM_, radices_, True, True, points))
    sr, si = tile.alloc_shared((P,), f32), tile.alloc_shared((P,), f32)
    if block >= second:
        if step < arrays:
            rows = (1, N_) if along else (N, 1)
            array_lines(xr, xi, yr, yi, step, (block - second) * BM, sr, si, angles, radices, N,
                        rows, (N, 1), N * N_ if along else 1, 1.0, BM, 1, points)
            tile.atomic_add(done, step, 1, release=True)
    elif step >= LAG:
        wait_for(done, step - LAG, first)
        array_lines(yr, yi, yr, yi, step - LAG, block * BM_, sr, si, angles_, radices_, N_,
                    (1, N), (1, N), 1, scale, BM_, 1, points)


@kernel
def pitch_of(N, lines, radices, before, behind, points):
    """From line to line in shared memory, so that threads side by side meet few banks twice, in the
    first stage and behind it: there they are on different lines or have parts of one."""
    least, each = room(N, radices), N // points
    if before:
        apart = max(1, BANKS // lines) + (0 if behind else each)
    else:
        apart = max(1, each * radices[0] // BANKS)
    return least + (apart - least) % BANKS


@kernel
def wait_for(done, n, groups):
    """Waits until all groups of the first pass over an array have added one. As many of the second
    then add what leads from that number around 32 bits to zero: no launch has to clear it."""
    while 0 <= tile.group_max(tile.atomic_add(done, n, 0)) < groups:
        pass
    tile.atomic_add(done, n, WORD // groups - 1)


@kernel
def array_lines(xr, xi, yr, yi, array, begin, sr, si, angles, radices, N, here, there, whole,
                scale, BM, every, points):
    """The transforms of BM lines of an array from `begin` on.

    here, there: how far lines lie apart and their points, before and behind
    whole: frequency k of line c is turned by -c k / whole, where that is not 1
    """
    y, line, part = array_points(xr, xi, array, begin, sr, si, angles, radices, N, here, there, BM,
                                 every, points)
    store_frequencies(yr, yi, y, array, (begin + line) * there[0] + part * there[1], there[1],
                      begin + line, part, N, radices[-1], whole, scale, points)


@kernel
def array_points(xr, xi, array, begin, sr, si, angles, radices, N, here, there, BM, every, points):
    """(the last stage's results, the line from `begin` on, its part) of a thread."""
    each, lane, before, behind = N // points, tile.local_id(), here[0] == 1, there[0] == 1
    P = pitch_of(N, BM, radices, before, behind, points)
    line, part = spread(lane, BM, each, before)
    line_, part_ = line, part
    if len(radices) > 1:
        line_, part_ = spread(lane, BM, each, behind)
    at = ((begin + line) * here[0] + part * here[1]) * every
    y = points_transformed(xr, xi, array, at, here[1], every, sr, si, angles, N, radices,
                           (line * P, part), (line_ * P, part_), points)
    return y, line_, part_


# --- blocks --------------------------------------------------------------------------------------
GROUP_POINTS = 8192  # two groups share a multiprocessor
# Groups between the passes over an array; 264 run at once on an H200. Lines of 2^15 points take
# 136, 127 and 125 us with 160, 264 and 400, of 2^16 134 and 126 with 160 and 272 (2026-11-26).
AHEAD = 384
SHORT = 256  # points of lines of which a thread has 16
RADICES = {128: (8, 16), 256: (16, 16), 512: (32, 16), 1024: (32, 32)}


def blocks_of(N: int, N_: int, arrays: int) -> tuple[int, dict[str, Any]]:
    """Threads of a group, and what kernels of two passes are given."""
    points = POINTS if max(N, N_) <= SHORT else MOST_POINTS
    return GROUP_POINTS // points, {
        "radices": RADICES[N], "radices_": RADICES[N_], "N": N, "N_": N_, "arrays": arrays,
        "BM": GROUP_POINTS // N, "BM_": GROUP_POINTS // N_, "points": points,
        "LAG": lag_of(N * N_, arrays)}


def lag_of(size: int, arrays: int, ahead: int = AHEAD) -> int:
    """Arrays of so many points between the passes over one."""
    return min(arrays, -(-ahead // (2 * (size // GROUP_POINTS))))


__all__ = ["GROUP_POINTS", "RADICES", "array_lines", "array_points", "blocks_of", "fft_passes",
           "lag_of", "pitch_of", "wait_for"]
