"""Fourier transforms of f32 lines of 2^a 3^b 5^c points, which a group of threads has in registers.

As fft_stages, with other radices. T threads have a line: butterfly b of a thread's is number
part + b T of a stage. They come out even in all stages but the last, where some threads may have
one less. Radices whose factors are prime to each other are transforms of two axes, with no turns
between them (Good 1958, J. Royal Stat. Soc. B 20:361; Thomas 1963).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator

import numpy as np

from ..lazy_dataclass import dataclass
from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .fft import begin_near
from .fft_stages import ALL, BANKS, SECTOR, butterfly, complex_multiply, cosine_sine, stage_turn

RADICES = (30, 24, 20, 18, 16, 15, 12, 10, 9, 8, 6, 5, 4, 3, 2)
# Of which frequencies of a stage the turns are kept; see stage_turn.
KEPT = {R: tuple(k for k in range(1, R) if k < 4 or k % 4 == 0) for R in RADICES}
# Radices of more than one factor.
FACTORS = {6: (2, 3), 9: (3, 3), 10: (2, 5), 12: (4, 3), 15: (3, 5), 18: (2, 9), 20: (4, 5),
           24: (8, 3), 30: (2, 15)}
PRIME = {R: math.gcd(A, B) == 1 for R, (A, B) in FACTORS.items()}  # to each other
# Of the points of a butterfly those that have b on the second axis.
PLACES = {R: [[(b * (A if PRIME[R] else 1) + a * B) % R for a in range(A)] for b in range(B)]
          for R, (A, B) in FACTORS.items()}
TURNS = {R: tuple((math.cos(2 * math.pi * n / R), -math.sin(2 * math.pi * n / R))
                  for n in range(R)) for R in (3, 5, 9)}


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
    return butterfly(R, r, i)


@kernel
def product_dft(R, r, i):
    """Of points x[(a B + b A) % R], or of x[a B + b] where A and B share a factor: over a, then
    over b."""
    if R not in FACTORS:
        return short_dft(R, r, i)
    A, B = FACTORS[R]
    p = [short_dft(A, *first_axis(R, b, r, i)) for b in ALL[:B]]
    return both_axes(R, [short_dft(B, *second_axis(R, k, p)) for k in ALL[:A]])


@kernel
def mixed_butterfly(R, r, i):
    if R not in FACTORS or max(FACTORS[R]) not in FACTORS:
        return product_dft(R, r, i)
    A, B = FACTORS[R]
    p = [short_dft(A, *first_axis(R, b, r, i)) for b in ALL[:B]]
    return both_axes(R, [product_dft(B, *second_axis(R, k, p)) for k in ALL[:A]])


@kernel
def first_axis(R, b, r, i):
    at = PLACES[R][b]
    return [r[n] for n in at], [i[n] for n in at]


@kernel
def second_axis(R, k, p):
    """Frequency k along the first axis, turned where both share a factor."""
    q = [fixed_turn(p[b][0][k], p[b][1][k], 0 if PRIME[R] else b * k, R) for b in ALL[:len(p)]]
    return [v[0] for v in q], [v[1] for v in q]


@kernel
def both_axes(R, y):
    A, B = FACTORS[R]
    at = [k % B if PRIME[R] else k // A for k in ALL[:R]]
    return [y[k % A][0][at[k]] for k in ALL[:R]], [y[k % A][1][at[k]] for k in ALL[:R]]


@kernel
def fixed_turn(r, i, n, R):
    if n == 0:
        return r, i
    return complex_multiply(r, i, TURNS[R][n % R][0], TURNS[R][n % R][1])


# --- lines ---------------------------------------------------------------------------------------
@functools.cache
def mixed_angles(N: int, radices: tuple[int, ...]) -> np.ndarray:
    """For each stage but the last, and each k that is kept: L pairs of cosine and sine of
    -p k / (L R)."""
    parts, m = [np.zeros((0, 2))], 1
    for R in radices[:-1]:
        L = N // (m * R)
        for k in KEPT[R]:
            parts.append(cosine_sine(np.arange(L) * k % (L * R) / (L * R)))
        m *= R
    made = np.concatenate(parts).reshape(-1)
    return np.pad(made, (0, -len(made) % 16 if len(made) else 16)).astype(np.float32)


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("yr", "yi"))
def mixed_lines(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["A", "E", f32],
                yi: Tensor["A", "E", f32], angles: Tensor["W", f32], radices, pads, N: int,
                lines: int, scale: float, BM: int, P: int, T: int, side=1, near=0, inner=1):
    """The transforms of lines of N points; see fft_lines.  side: how many of a thread's butterflies
    lie side by side, whose points move at once.  inner: lines side by side, of which neighbours in
    memory are"""
    if inner == 1:
        begin_near((xr, xi), (tile.group_id(0) * BM,), BM, N, near)
    R, last = radices[0], radices[-1]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part, takes = own_part(T, BM, inner > 1)
    number, us = tile.group_id(0) * BM + line, numbers(part, N, R, T, side)
    a, first = min(number, lines - 1), 0
    if inner > 1:
        a, first = a // inner, a % inner
    ats, step = [first + u * inner for u in us], N // R * inner
    vr, vi = points_at(xr[a], ats, R, step, side), points_at(xi[a], ats, R, step, side)
    vr, vi = stages_done(vr, vi, sr, si, line * P, part, takes, angles, radices, pads, N, T, side)
    us = numbers(part, N, last, T, side)
    for n in ALL[:len(us) // side]:
        b = n * side
        if takes and number < lines and us[b] < N // last:
            y = last_stage(vr, vi, b, sr, si, line * P, us[b], radices, pads, N, side)
            for k in ALL[:last]:
                at = first + (us[b] + k * (N // last)) * inner
                if side == 1:
                    yr[a, at] = y[0][0][k] * scale
                    yi[a, at] = y[0][1][k] * scale
                else:
                    tile.store_pair(yr[a], at, y[0][0][k] * scale, y[1][0][k] * scale)
                    tile.store_pair(yi[a], at, y[0][1][k] * scale, y[1][1][k] * scale)


@kernel
def own_part(T, BM, across=False):
    """(line of the group, part of it, whether it takes part) of a thread. across: neighbours are of
    different lines"""
    lane = tile.local_id()
    if across:
        return lane % BM, min(lane // BM, T - 1), lane < BM * T
    return min(lane // T, BM - 1), lane % T, lane < BM * T


@kernel
def numbers(part, N, R, T, side=1):
    """Of a thread's butterflies; in the last stage the last may be more than there are."""
    count = -(-N // (side * R * T)) * side
    return [side * part + (b // side * (side * T) + b % side) for b in ALL[:count]]


@kernel
def stages_done(vr, vi, sr, si, base, part, takes, angles, radices, pads, N, T, side=1):
    """All stages but the last; see transformed. The points given where there is one stage."""
    m, begin, pad, c = 1, 0, 0, 1
    for s in ALL[:len(radices) - 1]:
        R, L = radices[s], N // (m * radices[s])
        us = numbers(part, N, R, T, side)
        ps = [u // m for u in us]
        if T % m == 0:
            ps = [side * part // m + (b // side * (side * T // m) + b % side // m)
                  for b in ALL[:len(us)]]
        if m > 1:
            ats = [base + us[b] + pad * (ps[b] // c) for b in ALL[:len(us)]]
            step = row_step(N, R, m, pad, c)
            vr, vi = points_at(sr, ats, R, step, side), points_at(si, ats, R, step, side)
        y = [mixed_butterfly(R, vr[b], vi[b]) for b in ALL[:len(us)]]
        z = [stage_turned(y[b], angles, begin + 2 * ps[b], R, L) for b in ALL[:len(us)]]
        if m > 1:
            tile.barrier()
        to = [base + us[b] + ps[b] * (m * R - m) + pads[s][0] * (ps[b] // pads[s][1])
              for b in ALL[:len(us)]]
        if takes:
            store_points(sr, to, [v[0] for v in z], m, side)
            store_points(si, to, [v[1] for v in z], m, side)
        tile.barrier()
        begin, m, pad, c = begin + 2 * L * len(KEPT[R]), m * R, pads[s][0], pads[s][1]
    return vr, vi


@kernel
def row_step(N, R, m, pad, c):
    """How far points N / R apart lie, where `pad` floats lie behind each c m points."""
    return N // R + N // (R * m * c) * pad


@kernel
def points_at(s, ats, R, step, side=1):
    """Of butterflies whose first points lie there."""
    if side == 1:
        return [[s[at + j * step] for j in ALL[:R]] for at in ats]
    pairs = [[tile.load_pair(s, ats[2 * n] + j * step) for j in ALL[:R]]
             for n in ALL[:len(ats) // 2]]
    return [[p[b % 2] for p in pairs[b // 2]] for b in ALL[:len(ats)]]


@kernel
def store_points(s, ats, z, m, side):
    """A stage's results, m apart; the first one's lie side by side."""
    if side == 1:
        for b in ALL[:len(ats)]:
            for k in ALL[:len(z[b])]:
                s[ats[b] + m * k] = z[b][k]
    elif m == 1:
        for b in ALL[:len(ats)]:
            for k in ALL[:len(z[b]) // 2]:
                tile.store_pair(s, ats[b] + 2 * k, z[b][2 * k], z[b][2 * k + 1])
    else:
        for b in ALL[:len(ats) // 2]:
            for k in ALL[:len(z[0])]:
                tile.store_pair(s, ats[2 * b] + m * k, z[2 * b][k], z[2 * b + 1][k])


@kernel
def stage_turned(y, angles, first, R, L):
    rows = [tile.load_pair(angles, first + 2 * n * L) for n in ALL[:len(KEPT[R])]]
    z = [complex_multiply(y[0][k], y[1][k], *stage_turn(k, rows)) for k in ALL[1:R]]
    return [y[0][0]] + [v[0] for v in z], [y[1][0]] + [v[1] for v in z]


@kernel
def last_stage(vr, vi, b, sr, si, base, u, radices, pads, N, side=1):
    """Frequencies u + k N / R of a thread's butterfly b, which has the number u, and of those at
    its side."""
    R = radices[-1]
    if len(radices) == 1:
        return [mixed_butterfly(R, vr[b + n], vi[b + n]) for n in ALL[:side]]
    at, step = [base + u + n for n in ALL[:side]], row_step(N, R, N // R, pads[-1][0], pads[-1][1])
    r, i = points_at(sr, at, R, step, side), points_at(si, at, R, step, side)
    return [mixed_butterfly(R, r[n], i[n]) for n in ALL[:side]]


# --- real lines ----------------------------------------------------------------------------------
@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("yr", "yi"))
def mixed_real(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
               angles: Tensor["W", f32], radices, pads, N: int, lines: int, scale: float, BM: int,
               P: int, T: int):
    """Frequencies 0 .. N // 2 of lines of N real points, two at once; see rfft_pairs."""
    R, last = radices[0], radices[-1]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part, takes = own_part(T, BM)
    a, base = 2 * (tile.group_id(0) * BM + line), line * P
    here, there, us = min(a, lines - 1), min(a + 1, lines - 1), numbers(part, N, R, T)
    vr = [[x[here, u + j * (N // R)] for j in ALL[:R]] for u in us]
    vi = [[x[there, u + j * (N // R)] for j in ALL[:R]] for u in us]
    vr, vi = stages_done(vr, vi, sr, si, base, part, takes, angles, radices, pads, N, T)
    us = [min(u, N // last - 1) for u in numbers(part, N, last, T)]
    y = [last_stage(vr, vi, b, sr, si, base, us[b], radices, pads, N)[0] for b in ALL[:len(us)]]
    if len(radices) > 1:
        tile.barrier()
    if takes:
        for b in ALL[:len(us)]:
            for k in ALL[:last]:
                sr[base + (us[b] + k * (N // last))] = y[b][0][k]
                si[base + (us[b] + k * (N // last))] = y[b][1][k]
    tile.barrier()
    for n in ALL[:(N // 2 + T) // T]:
        k = part + n * T
        if takes and a < lines and k <= N // 2:
            at, back = base + k, base + (N - k) % N
            r, i, r_, i_ = sr[at], si[at], sr[back], si[back]
            yr[a, k] = (r + r_) * (0.5 * scale)
            yi[a, k] = (i - i_) * (0.5 * scale)
            if a + 1 < lines:
                yr[a + 1, k] = (i + i_) * (0.5 * scale)
                yi[a + 1, k] = (r_ - r) * (0.5 * scale)


@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("y",))
def mixed_real_back(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                    angles: Tensor["W", f32], radices, pads, N: int, lines: int, scale: float,
                    BM: int, P: int, T: int):
    """The N real points of lines of frequencies 0 .. N // 2, two at once; see irfft_pairs."""
    R, last = radices[0], radices[-1]
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part, takes = own_part(T, BM)
    a, us = 2 * (tile.group_id(0) * BM + line), numbers(part, N, R, T)
    here, there = min(a, lines - 1), min(a + 1, lines - 1)
    z = [[both_lines(xr, xi, here, there, u + j * (N // R), N) for j in ALL[:R]] for u in us]
    vr, vi = [[p[1] for p in ps] for ps in z], [[p[0] for p in ps] for ps in z]
    vr, vi = stages_done(vr, vi, sr, si, line * P, part, takes, angles, radices, pads, N, T)
    us = numbers(part, N, last, T)
    for b in ALL[:len(us)]:
        if takes and a < lines and us[b] < N // last:
            made = last_stage(vr, vi, b, sr, si, line * P, us[b], radices, pads, N)[0]
            for k in ALL[:last]:
                y[a, us[b] + k * (N // last)] = made[1][k] * scale
            if a + 1 < lines:
                for k in ALL[:last]:
                    y[a + 1, us[b] + k * (N // last)] = made[0][k] * scale


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
MOST_HELD, MOST_THREADS, MOST_LANES = 30, 512, 64
# Of a group whose neighbours in memory are of different lines: how many of these, points of all
# where two groups share a multiprocessor or one has it, and threads.
LINES_ACROSS, MOST_ACROSS, LANES_ACROSS, REGISTERS = (32, 16, 8), {2: 10240, 1: 20480}, 1024, 65536


@dataclass(frozen=True)
class MixedForm:
    """How lines of N points are transformed, T threads each, BM in a group. pads: (floats that lie
    behind so many blocks of points that a stage has finished, how many). P: floats from a line to
    the next. side: butterflies of a thread that lie side by side. groups: see launcher_of."""

    radices: tuple[int, ...]
    T: int
    BM: int
    pads: tuple[tuple[int, int], ...]
    P: int
    side: int = 1
    groups: int = 0

    @property
    def lanes(self) -> int:
        return -(-self.BM * self.T // 32) * 32


@functools.cache
def mixed_form(N: int, sides: int = 1) -> MixedForm | None:
    """None where there is none: other factors, or more stages than are worth it.

    sides: 2 where butterflies may lie side by side in threads, which they do where pieces of rows
    would begin within 32 bytes, of which all are moved, and a warp has one line. Of 1000 and 2500
    points 70.1 and 83.4 us for 80.0 and 92.6; of 500, two lines in a warp, 83.5 for 79.9 (H200,
    2026-11-27).
    """
    if N > LONGEST_MIXED or N < 2:
        return None
    found = [(_cost(N, radices, T, _lines(T)), radices, T) for radices in _factored(N, MOST_STAGES)
             for T in _threads(N, radices)]
    if not found:
        return None
    _, radices, T = min(found)
    if sides == 2 and (N // radices[0] % SECTOR or N // radices[-1] % SECTOR):
        beside = [form for form in found if _fits_beside(N, *form[1:])]
        if beside:
            _, radices, T = min(beside)
            return _mixed_form(N, radices, T, 2)
    return _mixed_form(N, radices, T, 1)


@functools.cache
def across_form(N: int, row: int = SECTOR) -> MixedForm | None:
    """Of lines side by side: neighbours in memory, and threads, are of different ones.

    row: points of one in memory. Where rows begin anywhere in sectors, 8 points of one lie in two,
    of which each is written in parts by two groups; so a group has 16 lines, and a multiprocessor.
    16777 columns of 1000 points take 143 us as (10, 10, 10), 146 as (10, 20, 5), 221 with 8 lines
    in each of two groups, 189 in one; 10 lines in each of two 233, 20 in one 169; with 40 points in
    a thread 16, 20 and 24 lines 150, 160 and 190. Rows that begin at sectors do not gain: planes of
    1000 x 1000 175 for 170 (H200, 2026-11-27).
    """
    if row % SECTOR and (wide := _wide_form(N)):
        return wide
    for groups, BM in itertools.product(MOST_ACROSS, LINES_ACROSS):
        if N < 2 or BM * N > MOST_ACROSS[groups]:
            continue
        found = [(_cost(N, radices, T, BM), radices, T) for radices in _factored(N, MOST_STAGES)
                 for T in _threads(N, radices) if BM * T <= LANES_ACROSS
                 and groups * BM * T * (2 * points_held(N, radices, T) + 40) <= REGISTERS]
        if found:
            _, radices, T = min(found)
            return MixedForm(radices, T, BM, *_pads(N, radices, T, BM, across=True), groups=groups)
    return None


def _wide_form(N: int) -> MixedForm | None:
    """In a group of its multiprocessor, where two would have 8 lines each. Threads are many, so
    their butterflies are short."""
    BM, points = 2 * SECTOR, MOST_ACROSS[1]
    if BM * N <= MOST_ACROSS[2] or BM * N > points:
        return None
    found = [(max(radices), _cost(N, radices, T, BM), radices, T)
             for radices in _factored(N, MOST_STAGES) for T in _threads(N, radices)
             if BM * T <= LANES_ACROSS and BM * T * (2 * points_held(N, radices, T) + 40)
             <= REGISTERS]
    if not found:
        return None
    _, _, radices, T = min(found)
    return MixedForm(radices, T, BM, *_pads(N, radices, T, BM, across=True), groups=1)


def _mixed_form(N: int, radices: tuple[int, ...], T: int, side: int) -> MixedForm:
    BM = _lines(T)
    return MixedForm(radices, T, BM, *_pads(N, radices, T, BM, side), side)


def _fits_beside(N: int, radices: tuple[int, ...], T: int) -> bool:
    """Each thread has pairs of butterflies, which begin at even points in each stage."""
    return (T >= 32 and len(radices) > 1 and radices[0] % 2 == 0 and 2 * radices[-1] <= MOST_HELD
            and all(N // R % 2 == 0 for R in radices)
            and all(N // R % (2 * T) == 0 for R in radices[:-1]))


@functools.cache
def _factored(N: int, stages: int) -> list[tuple[int, ...]]:
    """N as products of as few radices as possible, in any order."""
    if N == 1 or not stages:
        return [()] if N == 1 else []
    found = [(R, *rest) for R in RADICES if N % R == 0 for rest in _factored(N // R, stages - 1)]
    least = min(map(len, found), default=0)
    return [f for f in found if len(f) == least]


def _threads(N: int, radices: tuple[int, ...]) -> list[int]:
    """Of a line: all stages but the last come out even, and points fit into registers."""
    even = math.gcd(*[N // R for R in radices[:-1]]) if len(radices) > 1 else N // radices[0]
    return [T for T in range(1, min(even, MOST_THREADS) + 1)
            if even % T == 0 and points_held(N, radices, T) <= MOST_HELD]


def points_held(N: int, radices: tuple[int, ...], T: int) -> int:
    """By a thread at most: of all its butterflies of a stage, but of one of the last stage."""
    return max(*[N // T] * (len(radices) > 1), radices[-1], 1)


def _cost(N: int, radices: tuple[int, ...], T: int, BM: int) -> float:
    """Instructions of a point, by what they were in kernels that were compiled: exchanges, turns
    and butterflies, where threads that have no line or one butterfly less count as well."""
    idle = -(-BM * T // 32) * 32 / (BM * T)
    work = sum((4 * math.log2(R) + 4) * -(-N // (R * T)) * R * T / N for R in radices)
    turns = sum(20 + 4 * len(KEPT[R]) / R for R in radices[:-1])
    return (work + turns) * idle + 0.6 * points_held(N, radices, T)


def _lines(T: int) -> int:
    """Of a group: few lanes of its warps are to have no line."""
    def idle(BM: int) -> tuple[float, int, int]:
        lanes = -(-BM * T // 32) * 32
        return (round(max(lanes / (BM * T), 1.02), 2), max(lanes, 64), -BM)

    return min(range(1, max(1, MOST_LANES // T) + 1), key=idle)


def _pads(N: int, radices: tuple[int, ...], T: int, BM: int, side: int = 1,
          across: bool = False) -> tuple[tuple[tuple[int, int], ...], int]:
    """(pads, P) with which threads side by side meet few banks twice."""
    line, part = np.divmod(np.arange(BM * T), T)
    if across:
        part, line = np.divmod(np.arange(BM * T), BM)
    u, far = side * part, BANKS * N if across else 0  # lines lie in places of their own
    found: list[tuple[float, int, tuple[tuple[int, int], ...]]] = []
    for rest in range(0, BANKS if BM > 1 else 1, side):
        chosen, m = [], 1
        for R, after in itertools.pairwise(radices):
            p = u // m
            chosen.append(min(
                (_clashes(line * (far + rest) + u + p * (m * R - m) + p // c * pad, side)
                 + _clashes(line * (far + rest) + u + u // (m * R * c) * pad, side), pad, c)
                for c in _divisors(N // (m * R * after))
                for pad in range(0, min(BANKS, N // 4 // (N // (m * R * c)) + 1), side)))
            m *= R
        found.append((sum(clash for clash, _, _ in chosen), rest,
                      tuple((pad, c) for _, pad, c in chosen)))
    _, rest, pads = min(found)
    done = itertools.accumulate(radices, operator.mul)
    least = max([N, *(N + pad * (N // (m * c)) for (pad, c), m in zip(pads, done, strict=False))])
    return pads, least + (rest - least) % BANKS if BM > 1 else least


def _divisors(n: int) -> list[int]:
    return [c for c in range(1, min(n, BANKS) + 1) if n % c == 0]


def _clashes(at: np.ndarray, side: int = 1) -> float:
    """Cycles that an access of a warp takes on average, of so many floats side by side; threads
    that follow ask for the same."""
    lanes = 32 // side
    at = np.resize(at // side, -(-len(at) // 32) * 32).reshape(-1, lanes)
    return side * float(np.mean([np.bincount(np.unique(row) % lanes).max() for row in at]))


__all__ = ["LONGEST_MIXED", "MOST_HELD", "MOST_STAGES", "MixedForm", "across_form", "mixed_angles",
           "mixed_form", "mixed_lines", "mixed_real", "mixed_real_back", "points_held"]
