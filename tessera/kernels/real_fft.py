"""Fourier transforms of real f32 points and back, and convolutions by them.

Two lines are the parts of a complex one, or one line's even and odd points: what is said of a
frequency k and of N - k gives both.
"""

from __future__ import annotations

import functools

import numpy as np

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .fft import begin_near, side_by_side
from .fft_stages import (
    ALL,
    POINTS,
    SECTOR,
    beside_points,
    complex_multiply,
    cosine_sine,
    in_order,
    in_shared,
    mirrored,
    padded,
    pitch,
    spread,
    stage_angles,
    starts,
    transformed,
    turned_by,
)


@functools.cache
def real_angles(N: int, radices: tuple[int, ...], points: int = POINTS) -> np.ndarray:
    """stage_angles, and behind them pairs of cosine and sine of the turns -k / (2 N), k < N."""
    turns = cosine_sine(np.arange(N) / (2 * N)).reshape(-1)
    return np.concatenate([stage_angles(N, radices, points), turns], dtype=np.float32)


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("yr", "yi"))
def rfft_lines(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
               angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1,
               points=POINTS, near=0, span=False):
    """Frequencies 0 .. N of lines of 2 N real points: those of x[2 n] + i x[2 n + 1], of which each
    pair k, N - k has the parts of even and of odd points."""
    begin_near((x,), (tile.group_id(0) * BM,), BM, 2 * N, near)
    each = max(1, N // points)
    lane, P = tile.local_id(), pitch(N, BM, radices)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, False)
    number = tile.group_id(0) * BM + line
    a, base = min(number, lines - 1), line * P
    vr, vi = complex_points(x, a, part, N, radices[0], points)
    y = transformed(vr, vi, sr, si, angles, N, radices, (base, part), (base, part),
                    points=points, early=points == POINTS)
    in_order(sr, si, base, y, part, N, radices, points)
    begin = in_sectors(part, a, each) if each >= 256 and not span else part
    if span:
        span_frequencies(yr, yi, sr, si, base, line, part, angles, T - 2 * N + 2 * part, N, lines,
                         scale, BM, points)
        return
    if number < lines:
        if part == 0:
            yr[a, N // 2] = sr[base + padded(N // 2)] * scale
            yi[a, N // 2] = si[base + padded(N // 2)] * -scale
        here, turn, half = base + padded(begin), T - 2 * N + 2 * begin, 0.5 * scale
        first = [(z[0] * half, z[1] * half) for z in pair_turns(angles, turn, N, points)]
        for n in ALL[:min(N, points) // 2]:
            k, k_ = begin + n * each, N - begin - n * each
            p, q = frequencies(sr, si, here, base, n, k_, first, N, each, half)
            yr[a, k] = p[0]
            yi[a, k] = p[1]
            yr[a, k_] = q[0]
            yi[a, k_] = q[1]


@kernel
def frequencies(sr, si, here, base, n, k_, first, N, each, half):
    """Frequency n of a thread's, and that which mirrors it."""
    at, back = here + padded(n * each), base + padded(k_ & (N - 1))
    r, i, r_, i_ = sr[at], si[at], sr[back], si[back]
    c, d = complex_multiply(i + i_, r_ - r, *pair_turn(first, n, N))
    return ((r + r_) * half + c, (i - i_) * half + d), ((r + r_) * half - c, d - (i - i_) * half)


@kernel
def span_frequencies(yr, yi, sr, si, base, line, part, angles, turn, N, lines, scale, BM, points):
    """A group's frequencies from where the points of their transforms lie in shared memory."""
    each, F, to, half = max(1, N // points), N + 1, tile.group_id(0) * BM, 0.5 * scale
    first = [(z[0] * half, z[1] * half) for z in pair_turns(angles, turn, N, points)]
    y = [frequencies(sr, si, base + padded(part), base, n, N - part - n * each, first, N, each,
                     half) for n in ALL[:min(N, points) // 2]]
    r, i = sr[base + padded(N // 2)], si[base + padded(N // 2)]
    off = to * F & (SECTOR - 1)
    here = off + line * F + part
    there = off + line * F + N - part
    tile.barrier()
    for n in ALL[:len(y)]:
        sr[here + n * each] = y[n][0][0]
        si[here + n * each] = y[n][0][1]
        sr[there - n * each] = y[n][1][0]
        si[there - n * each] = y[n][1][1]
    if part == 0:
        sr[here + N // 2] = r * scale
        si[here + N // 2] = i * -scale
    store_rows(yr, yi, sr, si, to, off, min(BM, lines - to) * F)


@kernel
def store_rows(yr, yi, sr, si, row, off, count):
    tile.store_span(yr[row], 0, sr, off, count)
    tile.store_span(yi[row], 0, si, off, count)


@kernel
def in_sectors(part, row, each):
    """The part of a row of frequencies, one more than a multiple of `each`, that a thread has: so
    that most warps begin where sectors of memory do."""
    return (part - row) & (each - 1)


@kernel
def pair_turns(angles, turn, N, points):
    """(cosine, sine) of the turns -k / 2 N of as few of a thread's frequencies as give all others
    by turns that are known now; the table of real_angles has the thread's own at `turn`."""
    each = max(1, N // points)
    return [tile.load_pair(angles, turn + 2 * n * each) for n in ALL[:max(1, points // POINTS)]]


@kernel
def pair_turn(first, n, N):
    """That of a thread's frequency part + n each."""
    cosine, sine = first[n % len(first)]
    return turned_by(cosine, sine, n // len(first) * (POINTS // min(N, POINTS)))


@kernel(grid=lambda lines, BM, apart: -(-(-(-lines // (2 * apart)) * apart) // BM),
        overwrites=("yr", "yi"))
def rfft_pairs(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
               angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1,
               points=POINTS, apart=1, beside=False, near=0, early=False, span=False):
    """Frequencies 0 .. N / 2 of lines of N real points, of which two are the parts of one of
    complex points: a_k = (z_k + conj z_(N - k)) / 2, b_k = (z_k - conj z_(N - k)) / 2i.

    apart: lines from one of these to the other; rows of frequencies 8 apart begin alike in sectors
    near: see begin_near.  early: see transformed.  span: the rows that a group writes follow each
    other and leave shared memory in one piece, so that memory gets whole sectors
    """
    first = pair_line(tile.group_id(0) * BM, apart)
    begin_near((x,), (first, first + apart), BM, N, near)
    P = pitch(N, BM, radices)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(tile.local_id(), BM, N // points, False)
    a, R, last = pair_line(tile.group_id(0) * BM + line, apart), radices[0], radices[-1]
    here, there, at = min(a, lines - 1), min(a + apart, lines - 1), (line * P, part)
    us, half, begin = starts(N, R, points), 0.5 * scale, part
    if apart > 1:
        begin = in_sectors(part, a, N // points)
    if beside:
        vr, vi = [beside_points(x, row, part, N, R, points) for row in (here, there)]
    else:
        vr = [[x[here, part + (u + j * (N // R))] for j in ALL[:R]] for u in us]
        vi = [[x[there, part + (u + j * (N // R))] for j in ALL[:R]] for u in us]
    p, q = transformed(vr, vi, sr, si, angles, N, radices, at, at,
                       (N // last, [(line * P, u) for u in mirrored(N, begin, last)]), points,
                       early, beside)
    if span:
        F, to = N // 2 + 1, tile.group_id(0) * (2 * BM)
        off = to * F & (SECTOR - 1)
        row = off + 2 * line * F
        tile.barrier()
        mirror_sums(sr, si, row, p, q, N, begin, half, True)
        mirror_sums(sr, si, row + F, other_line(p), other_line(q), N, begin, half, True)
        store_rows(yr, yi, sr, si, to, off, min(2 * BM, lines - to) * F)
        return
    if a < lines:
        mirror_sums(yr, yi, a, p, q, N, begin, half)
    if a + apart < lines:
        mirror_sums(yr, yi, a + apart, other_line(p), other_line(q), N, begin, half)


@kernel
def pair_line(n, apart):
    """The first line of pair n."""
    return n // apart * (2 * apart) + n % apart


@kernel
def other_line(z):
    """-i z, which has the parts in their other places."""
    return z[1], [-v for v in z[0]]


@kernel
def mirror_sums(yr, yi, a, p, q, N, part, half, shared=False):
    """z_k + conj z_(N - k) of both butterflies of a thread; see mirrored. To row a, or to shared
    memory from a on."""
    (pr, pi), (qr, qi) = p, q
    R = len(pr)
    (u, v), own = mirrored(N, part, R), part == 0
    for k in ALL[:R // 2]:
        at, to = u + k * (N // R), v + k * (N // R)
        put(yr, a, at, (pr[k] + tile.where(own, pr[-k], qr[R - 1 - k])) * half, shared)
        put(yi, a, at, (pi[k] - tile.where(own, pi[-k], qi[R - 1 - k])) * half, shared)
        put(yr, a, to, (qr[k] + tile.where(own, qr[R - 1 - k], pr[R - 1 - k])) * half, shared)
        put(yi, a, to, (qi[k] - tile.where(own, qi[R - 1 - k], pi[R - 1 - k])) * half, shared)
    if part == 0:
        put(yr, a, N // 2, 2.0 * pr[R // 2] * half, shared)
        put(yi, a, N // 2, 0.0, shared)


@kernel
def put(y, a, at, x, shared):
    if shared:
        y[a + at] = x
    else:
        y[a, at] = x


@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("y",))
def irfft_pairs(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1,
                points=POINTS):
    """The N real points of lines of frequencies 0 .. N / 2, of which two are the parts of one of
    complex points: z_k = a_k + i b_k, z_(N - k) = conj a_k + i conj b_k."""
    P = pitch(N, BM, radices)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(tile.local_id(), BM, N // points, False)
    a, R, h = 2 * (tile.group_id(0) * BM + line), radices[0], radices[0] // 2
    here, there, at = min(a, lines - 1), min(a + 1, lines - 1), (line * P, part)
    u, v = mirrored(N, part, R)
    own, middle = part == 0, xr.shape[1] - 1
    near, far = both_frequencies(xr, xi, here, there, u, N, R, own)
    near_, far_ = both_frequencies(xr, xi, here, there, v, N, R, False)
    mine = [(xr[here, middle], xr[there, middle])] + [far[-k] for k in ALL[1:h]]
    p = near + [chosen(own, mine[k], far_[h - 1 - k]) for k in ALL[:h]]
    q = near_ + [chosen(own, far_[h - 1 - k], far[h - 1 - k]) for k in ALL[:h]]
    vr, vi = [[z[1] for z in p], [z[1] for z in q]], [[z[0] for z in p], [z[0] for z in q]]
    made = transformed(vr, vi, sr, si, angles, N, radices, at, at,
                       (1, [(line * P, u), (line * P, v)]), points)
    if a < lines:
        part_points(y, a, [z[1] for z in made], part, N, radices[-1], scale, points)
    if a + 1 < lines:
        part_points(y, a + 1, [z[0] for z in made], part, N, radices[-1], scale, points)


@kernel
def part_points(y, a, x, part, N, R, scale, points):
    """A line's points from a part of a thread's last butterflies."""
    vs = starts(N, R, points)
    for n in ALL[:len(vs)]:
        for k in ALL[:R]:
            y[a, part + (vs[n] + k * (N // R))] = x[n][k] * scale


@kernel
def chosen(own, z, z_):
    return tile.where(own, z[0], z_[0]), tile.where(own, z[1], z_[1])


@kernel
def both_frequencies(xr, xi, a, b, u, N, R, zero):
    """z_k of both lines for k = u + j N / R, j < R / 2, and z_(N - k).  zero: whether u is 0"""
    near, far = [], []
    for j in ALL[:R // 2]:
        k = u + j * (N // R)
        ar, br, ai, bi = xr[a, k], xr[b, k], xi[a, k], xi[b, k]
        if j == 0:
            ai, bi = tile.where(zero, 0.0, ai), tile.where(zero, 0.0, bi)
        near, far = near + [(ar - bi, ai + br)], far + [(ar + bi, br - ai)]
    return near, far


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("y",))
def irfft_lines(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1,
                points=POINTS):
    """The 2 N real points of lines of frequencies 0 .. N; of the first and the last no imaginary
    part is read."""
    each = max(1, N // points)
    lane, P = tile.local_id(), pitch(N, BM, radices)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, False)
    number = tile.group_id(0) * BM + line
    a, base = min(number, lines - 1), line * P
    us, step = starts(N, radices[0], points), N // radices[0]
    turns = pair_turns(angles, T - 2 * N + 2 * part, N, points)
    z = [[packed_frequency(xr, xi, turns, a, part, u + j * step, each, N)
          for j in ALL[:radices[0]]] for u in us]
    vr, vi = [[p[1] for p in ps] for ps in z], [[p[0] for p in ps] for ps in z]
    made = transformed(vr, vi, sr, si, angles, N, radices, (base, part), (base, part),
                       points=points)
    if number < lines:
        real_points(y, a, made, part, N, radices[-1], scale, points)


@kernel
def complex_points(x, a, part, N, R, points=POINTS):
    """x[2 n] + i x[2 n + 1] of a line, for a thread's first butterflies."""
    us, step = starts(N, R, points), N // R
    return side_by_side(x, a, 2 * part, [[u + j * step for j in ALL[:R]] for u in us])


@kernel
def real_points(y, a, made, part, N, R, scale, points=POINTS):
    """x[2 n] + i x[2 n + 1] of a line, from a thread's last butterflies of exchanged parts."""
    vs = starts(N, R, points)
    for n in ALL[:len(vs)]:
        for k in ALL[:R]:
            tile.store_pair(y[a], 2 * part + 2 * (vs[n] + k * (N // R)), made[n][1][k] * scale,
                            made[n][0][k] * scale)


@kernel
def packed_frequency(xr, xi, turns, a, part, n, each, N):
    """Twice the frequency part + n of x[2 n] + i x[2 n + 1]."""
    back = N - part
    r, r_, i, i_ = xr[a, part + n], xr[a, back - n], xi[a, part + n], xi[a, back - n]
    if n == 0:
        i, i_ = tile.where(part == 0, 0.0, i), tile.where(part == 0, 0.0, i_)
    cosine, sine = pair_turn(turns, n // each, N)
    c, d = complex_multiply(-(i + i_), r - r_, cosine, -sine)
    return r + r_ + c, i - i_ + d


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("y",))
def filter_lines(x: Tensor["A", "E", f32], hr: Tensor["H", "F", f32], hi: Tensor["H", "F", f32],
                 y: Tensor["A", "E", f32], angles: Tensor["T", f32], radices, N: int, lines: int,
                 scale: float, BM=1):
    """Lines of 2 N real points, of which each frequency is multiplied: rfft_lines, a product and
    irfft_lines, with nothing written between. Line l has the factors of row l % H."""
    each = max(1, N // POINTS)
    lane, P = tile.local_id(), pitch(N, BM, radices)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, False)
    number = tile.group_id(0) * BM + line
    a, base = min(number, lines - 1), line * P
    vr, vi = complex_points(x, a, part, N, radices[0])
    at = (base, part)
    made = transformed(vr, vi, sr, si, angles, N, radices, at, at)
    in_order(sr, si, base, made, part, N, radices)
    h = a % hr.shape[0]
    if part == 0:
        r, i = sr[base + padded(N // 2)], -si[base + padded(N // 2)]
        c, d = complex_multiply(r, i, hr[h, N // 2], hi[h, N // 2])
        sr[base + padded(N // 2)] = 2.0 * c
        si[base + padded(N // 2)] = -2.0 * d
    first, turns = base + padded(part), pair_turns(angles, T - 2 * N + 2 * part, N, POINTS)
    for n in ALL[:min(N, POINTS) // 2]:
        k, k_ = part + n * each, N - part - n * each
        here, back = first + padded(n * each), base + padded(k_ & (N - 1))
        cosine, sine = pair_turn(turns, n, N)
        pair_filtered(sr, si, here, back, cosine, -sine, k, hr[h, k], hi[h, k], hr[h, k_],
                      hi[h, k_])
    tile.barrier()
    places = [first + padded(u) for u in starts(N, radices[0])]
    vr, vi = in_shared(sr, si, places, N, radices[0])
    tile.barrier()
    made = transformed(vi, vr, sr, si, angles, N, radices, at, at)
    if number < lines:
        real_points(y, a, made, part, N, radices[-1], scale)


@kernel
def pair_filtered(sr, si, here, back, c, s, k, hr, hi, hr_, hi_):
    """Of x[2 n] + i x[2 n + 1] the frequencies k and N - k, where those of x are multiplied."""
    r, i, r_, i_ = sr[here], si[here], sr[back], si[back]
    tr, ti = complex_multiply(i + i_, r_ - r, c, -s)
    pr, pi = complex_multiply(0.5 * (r + r_ + tr), 0.5 * (i - i_ + ti), hr, hi)          # of k
    qr, qi = complex_multiply(0.5 * (r + r_ - tr), 0.5 * (ti - i + i_), hr_, hi_)        # of N - k
    pi, qi = tile.where(k == 0, 0.0, pi), tile.where(k == 0, 0.0, qi)
    tr, ti = complex_multiply(-(pi + qi), pr - qr, c, s)
    if k > 0:
        sr[back] = pr + qr - tr
        si[back] = ti - pi + qi
    sr[here] = pr + qr + tr
    si[here] = pi - qi + ti


__all__ = ["chosen", "complex_points", "filter_lines", "in_sectors", "irfft_lines", "irfft_pairs",
           "real_angles", "real_points", "rfft_lines", "rfft_pairs"]
