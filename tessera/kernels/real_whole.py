"""Fourier transforms back to real f32 lines in one piece, of which each frequency is read once.

Those of k and N - k are one thread's, which has butterflies of the first stage that are each
other's mirror.
"""

from __future__ import annotations

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .fft_stages import MOST_POINTS, POINTS, mirrored, one_turn, pitch, spread, transformed
from .real_fft import in_sectors, real_points
from .real_passes import paired_points


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("y",))
def irfft_whole(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1,
                points=MOST_POINTS):
    """The 2 N real points of lines of frequencies 0 .. N; see irfft_lines."""
    P, R = pitch(N, BM, radices), radices[0]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(tile.local_id(), BM, N // points, False)
    number, base = tile.group_id(0) * BM + line, line * P
    a, here = min(number, lines - 1), (base, part)
    begin = in_sectors(part, a, N // points)
    p, q = paired_points(xr, xi, a, begin, begin == 0, N, R, own_turn(angles, begin, N, points))
    made = transformed([p[0], q[0]], [p[1], q[1]], sr, si, angles, N, radices, here, here,
                       (1, [(base, u) for u in mirrored(N, begin, R)]), points)
    if number < lines:
        real_points(y, a, made, part, N, radices[-1], scale, points)


@kernel
def own_turn(angles, k, N, points):
    """(cosine, sine) of the turn -k / 2 N: of threads of 16 points from the table of real_angles,
    which others compute."""
    if points == POINTS:
        return tile.load_pair(angles, angles.shape[0] - 2 * N + 2 * k)
    return one_turn(k, 2 * N)


# --- blocks --------------------------------------------------------------------------------------
# (radices, points of a thread) back to real lines of twice as many points. Of 2^12 in threads of 16
# points 37.9 us for 39.9; but of 2^13 44.0 for 40.5 and of 2^14 50.1 for 44.4 (H200, 2026-11-27).
BACK: dict[int, tuple[tuple[int, ...], int]] = {
    2048: ((8, 16, 16), POINTS), 4096: ((16, 16, 16), MOST_POINTS),
    8192: ((16, 32, 16), MOST_POINTS), 16384: ((16, 32, 32), MOST_POINTS)}


__all__ = ["BACK", "irfft_whole"]
