"""Fourier transforms of f32 lines of 2^a 3^b 5^c points, which a group of threads has in registers.

As fft_stages, with other radices: a thread keeps `points` of a line, which all radices divide.
Numbers of butterflies share bits with parts of lines here, so places are computed one by one.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .angles import TURN
from .fft_stages import ALL, BANKS, dft, padded, turned

# Radices of more than one factor: the first of its factors, and the rest.
FACTORS = {6: (2, 3), 8: (2, 4), 9: (3, 3), 10: (2, 5), 12: (4, 3), 15: (3, 5),
           20: (4, 5)}
TURNS = {R: tuple((math.cos(2 * math.pi * n / R), -math.sin(2 * math.pi * n / R))
                  for n in range(R)) for R in (3, 5, *FACTORS)}


# --- butterflies ---------------------------------------------------------------------------------
@kernel
def dft3(r, i):
    s, c = TURNS[3][1][1], TURNS[3][1][0]
    ar, ai, br, bi = r[1] + r[2], i[1] + i[2], (r[1] - r[2]) * s, (i[1] - i[2]) * s
    cr, ci = r[0] + ar * c, i[0] + ai * c
    return (r[0] + ar, cr - bi, cr + bi), (i[0] + ai, ci + br, ci - br)


@kernel
def dft5(r, i):
    (c, s), (d, t) = TURNS[5][1], TURNS[5][2]
    ar, ai, br, bi = r[1] + r[4], i[1] + i[4], r[1] - r[4], i[1] - i[4]
    cr, ci, dr, di = r[2] + r[3], i[2] + i[3], r[2] - r[3], i[2] - i[3]
    er, ei = r[0] + ar * c + cr * d, i[0] + ai * c + ci * d
    fr, fi = br * s + dr * t, bi * s + di * t
    gr, gi = r[0] + ar * d + cr * c, i[0] + ai * d + ci * c
    hr, hi = br * t - dr * s, bi * t - di * s
    return ((r[0] + ar + cr, er - fi, gr - hi, gr + hi, er + fi),
            (i[0] + ai + ci, ei + fr, gi + hr, gi - hr, ei - fr))


@kernel
def short_dft(R, r, i):
    if R == 3:
        return dft3(r, i)
    if R == 5:
        return dft5(r, i)
    return dft(R, r, i)


@kernel
def mixed_butterfly(R, r, i):
    """Of points x[a B + b]: over a, turned by b k / R, then over b."""
    if R <= 5:
        return short_dft(R, r, i)
    A, B = FACTORS[R]
    p = [short_dft(A, [r[b + a * B] for a in ALL[:A]], [i[b + a * B] for a in ALL[:A]])
         for b in ALL[:B]]
    q = [[fixed_turn(p[b][0][k], p[b][1][k], b * k, R) for b in ALL[:B]] for k in ALL[:A]]
    y = [short_dft(B, [x[0] for x in q[k]], [x[1] for x in q[k]]) for k in ALL[:A]]
    return [y[k % A][0][k // A] for k in ALL[:R]], [y[k % A][1][k // A] for k in ALL[:R]]


@kernel
def fixed_turn(r, i, n, R):
    if n == 0:
        return r, i
    if 4 * n == R:
        return i, -r
    return turned(r, i, TURNS[R][n % R][0], TURNS[R][n % R][1])


# --- lines ---------------------------------------------------------------------------------------
@functools.cache
def mixed_angles(N: int, radices: tuple[int, ...]) -> np.ndarray:
    """For each stage but the last, and each k from 1 on: L cosines and L sines of -p k / (L R)."""
    parts, m = [np.zeros(0)], 1
    for R in radices[:-1]:
        L = N // (m * R)
        for k in range(1, R):
            turns = np.arange(L) * k / (L * R)
            parts += [np.cos(TURN * turns), -np.sin(TURN * turns)]
        m *= R
    return np.concatenate([*parts, np.zeros(int(len(radices) == 1))]).astype(np.float32)


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("yr", "yi"))
def mixed_lines(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["A", "E", f32],
                yi: Tensor["A", "E", f32], angles: Tensor["T", f32], radices, N: int, lines: int,
                scale: float, BM: int, points: int):
    """The transforms of lines of N points; see fft_lines."""
    P, R = line_pitch(N), radices[-1]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part, takes = own_part(N, BM, points)
    number, us = tile.group_id(0) * BM + line, numbers(part, N, radices[0], points)
    a, step = min(number, lines - 1), N // radices[0]
    vr = [[xr[a, u + j * step] for j in ALL[:radices[0]]] for u in us]
    vi = [[xi[a, u + j * step] for j in ALL[:radices[0]]] for u in us]
    y = mixed_stages(vr, vi, sr, si, line * P, part, takes, angles, radices, N, points)
    us = numbers(part, N, R, points)
    if takes and number < lines:
        for b in ALL[:len(us)]:
            for k in ALL[:R]:
                yr[a, us[b] + k * (N // R)] = y[b][0][k] * scale
                yi[a, us[b] + k * (N // R)] = y[b][1][k] * scale


@kernel
def line_pitch(N):
    """Floats of shared memory from a line to the next."""
    return N + N // BANKS + 1


@kernel
def own_part(N, BM, points):
    """(line of the group, part of it, whether it takes part) of a thread."""
    each, lane = N // points, tile.local_id()
    return min(lane // each, BM - 1), lane % each, lane < BM * each


@kernel
def numbers(part, N, R, points):
    """Of a thread's butterflies."""
    return [part + b * (N // points) for b in ALL[:points // R]]


@kernel
def mixed_stages(vr, vi, sr, si, base, part, takes, angles, radices, N, points):
    """The last stage's results, a pair for each of a thread's butterflies; see transformed."""
    m, begin = 1, 0
    for R in radices:
        us, L = numbers(part, N, R, points), N // (m * R)
        if m > 1:
            vr = [[sr[base + padded(u + j * (N // R))] for j in ALL[:R]] for u in us]
            vi = [[si[base + padded(u + j * (N // R))] for j in ALL[:R]] for u in us]
        y = [mixed_butterfly(R, vr[b], vi[b]) for b in ALL[:len(us)]]
        if L > 1:
            if m > 1:
                tile.barrier()
            if takes:
                for b in ALL[:len(us)]:
                    exchanged(sr, si, base, y[b], angles, begin, us[b], R, m, L)
            tile.barrier()
        begin, m = begin + 2 * (R - 1) * L, m * R
    return y


@kernel
def exchanged(sr, si, base, y, angles, begin, u, R, m, L):
    """A butterfly's results, turned, to where the next stage finds them."""
    p, at = begin + u // m, u % m + u // m * (m * R)
    for k in ALL[:R]:
        r, i = y[0][k], y[1][k]
        if k > 0:
            row = p + 2 * (k - 1) * L
            r, i = turned(r, i, angles[row], angles[row + L])
        sr[base + padded(at + m * k)] = r
        si[base + padded(at + m * k)] = i


# --- real lines ----------------------------------------------------------------------------------
@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("yr", "yi"))
def mixed_real(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
               angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM: int,
               points: int):
    """Frequencies 0 .. N // 2 of lines of N real points, two at once; see rfft_pairs."""
    each, P, R, step = N // points, line_pitch(N), radices[-1], N // radices[0]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part, takes = own_part(N, BM, points)
    a, base = 2 * (tile.group_id(0) * BM + line), line * P
    here, there, us = min(a, lines - 1), min(a + 1, lines - 1), numbers(part, N, radices[0], points)
    vr = [[x[here, u + j * step] for j in ALL[:radices[0]]] for u in us]
    vi = [[x[there, u + j * step] for j in ALL[:radices[0]]] for u in us]
    y = mixed_stages(vr, vi, sr, si, base, part, takes, angles, radices, N, points)
    if len(radices) > 1:
        tile.barrier()
    us = numbers(part, N, R, points)
    if takes:
        for b in ALL[:len(us)]:
            for k in ALL[:R]:
                sr[base + padded(us[b] + k * (N // R))] = y[b][0][k]
                si[base + padded(us[b] + k * (N // R))] = y[b][1][k]
    tile.barrier()
    for n in ALL[:(N // 2 + each) // each]:
        k = part + n * each
        if takes and a < lines and k <= N // 2:
            at, back = base + padded(k), base + padded((N - k) % N)
            r, i, r_, i_ = sr[at], si[at], sr[back], si[back]
            yr[a, k] = (r + r_) * (0.5 * scale)
            yi[a, k] = (i - i_) * (0.5 * scale)
            if a + 1 < lines:
                yr[a + 1, k] = (i + i_) * (0.5 * scale)
                yi[a + 1, k] = (r_ - r) * (0.5 * scale)


@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("y",))
def mixed_real_back(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                    angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM: int,
                    points: int):
    """The N real points of lines of frequencies 0 .. N // 2, two at once; see irfft_pairs."""
    P, R, step = line_pitch(N), radices[-1], N // radices[0]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part, takes = own_part(N, BM, points)
    a, us = 2 * (tile.group_id(0) * BM + line), numbers(part, N, radices[0], points)
    here, there = min(a, lines - 1), min(a + 1, lines - 1)
    z = [[both_lines(xr, xi, here, there, u + j * step, N) for j in ALL[:radices[0]]] for u in us]
    vr, vi = [[p[1] for p in ps] for ps in z], [[p[0] for p in ps] for ps in z]
    made = mixed_stages(vr, vi, sr, si, line * P, part, takes, angles, radices, N, points)
    us = numbers(part, N, R, points)
    for b in ALL[:len(us)]:
        for k in ALL[:R]:
            if takes and a < lines:
                y[a, us[b] + k * (N // R)] = made[b][1][k] * scale
            if takes and a + 1 < lines:
                y[a + 1, us[b] + k * (N // R)] = made[b][0][k] * scale


@kernel
def both_lines(xr, xi, a, b, k, N):
    """Frequency k of a + i b, of which those up to N // 2 are known."""
    at, sign = min(k, N - k), tile.where(2 * k > N, -1.0, 1.0)
    sign = tile.where(k == 0 or 2 * k == N, 0.0, sign)
    ar, ai, br, bi = xr[a, at], xi[a, at], xr[b, at], xi[b, at]
    ai, bi = tile.where(sign == 0.0, 0.0, ai * sign), tile.where(sign == 0.0, 0.0, bi * sign)
    return ar - bi, ai + br


# --- blocks --------------------------------------------------------------------------------------
LONGEST_MIXED, MOST_STAGES = 8192, 4
EACH = {12: (12, 6, 4, 3, 2), 24: (12, 8, 6, 4, 3, 2), 20: (20, 10, 5, 4, 2), 18: (9, 6, 3, 2),
        15: (15, 5, 3), 30: (15, 10, 6, 5, 3, 2)}  # points of a thread: radices


@functools.cache
def mixed_form(N: int) -> tuple[int, tuple[int, ...]] | None:
    """(points of a thread, radices), as few stages as possible; None where there are none."""
    if N > LONGEST_MIXED:
        return None
    found = [(len(radices), points, radices) for points, those in EACH.items()
             if N % points == 0 and (radices := _factored(N, those))]
    return min(found)[1:] if found and min(found)[0] <= MOST_STAGES else None


def _factored(N: int, radices: tuple[int, ...]) -> tuple[int, ...]:
    """N as a product of few of these; none where it is none."""
    best: tuple[int, ...] = ()
    for R in radices:
        if N == R:
            return (R,)
        if N % R == 0 and (rest := _factored(N // R, tuple(r for r in radices if r <= R))):
            best = min(best or (R, *rest), (R, *rest), key=len)
    return best


def mixed_block(N: int, points: int) -> tuple[int, int]:
    """Lines and threads of a group."""
    each = N // points
    lines = max(1, 64 // each)
    return lines, -(-lines * each // 32) * 32


__all__ = ["LONGEST_MIXED", "mixed_angles", "mixed_block", "mixed_form", "mixed_lines",
           "mixed_real", "mixed_real_back"]
