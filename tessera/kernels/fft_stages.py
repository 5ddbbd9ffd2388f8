"""Fourier transforms of lines whose points a group of threads has in registers.

Stockham's order: a stage of radix R takes points N / R apart and leaves them so that the last stage
has the frequencies in order. Each thread keeps 16 or 32 points in registers; between stages they go
through shared memory. So a transform is read once and written once.

    stage with m points done, L = N / (m R), u = p m + q:
    y[q + m (R p + k)] = w(p k / (L R)) sum_j x[u + j N / R] w(j k / R),   w(t) = exp(-2 pi i t)

Van Loan 1992, Computational Frameworks for the Fast Fourier Transform, algorithm 1.7.2.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel
from .angles import TURN, turned_part

POINTS, MOST_POINTS = 16, 32  # of a thread
BANKS = 32
SECTOR = 8  # floats of 32 bytes, which memory moves at once
ALL = tuple(range(MOST_POINTS))
HALF = math.sqrt(0.5)
COSINES = tuple(math.cos(math.pi * n / 16) for n in ALL)
SINES = tuple(math.sin(math.pi * n / 16) for n in ALL)


# --- butterflies: real parts and imaginary parts, in and out -------------------------------------
@kernel
def complex_multiply(r, i, c, s):
    """(r + i i) (c + i s)"""
    return r * c - i * s, r * s + i * c


@kernel
def dft2(r, i):
    return (r[0] + r[1], r[0] - r[1]), (i[0] + i[1], i[0] - i[1])


@kernel
def dft4(r, i):
    ar, ai, br, bi = r[0] + r[2], i[0] + i[2], r[0] - r[2], i[0] - i[2]
    cr, ci, dr, di = r[1] + r[3], i[1] + i[3], r[1] - r[3], i[1] - i[3]
    return (ar + cr, br + di, ar - cr, br - di), (ai + ci, bi - dr, ai - ci, bi + dr)


@kernel
def turned_by(r, i, n):
    """A number turned by -n / 32."""
    if n == 0:
        return r, i
    if n == 4:
        return (r + i) * HALF, (i - r) * HALF
    if n == 8:
        return i, -r
    if n == 12:
        return (i - r) * HALF, (r + i) * -HALF
    return complex_multiply(r, i, COSINES[n], -SINES[n])


@kernel
def dft8(r, i):
    """Of points x[4 a + b]: over a, turned by b k / 8, then over b."""
    p = [dft2([r[b], r[b + 4]], [i[b], i[b + 4]]) for b in ALL[:4]]
    q = [[turned_by(p[b][0][k], p[b][1][k], 4 * b * k) for b in ALL[:4]] for k in ALL[:2]]
    y = [dft4([x[0] for x in q[k]], [x[1] for x in q[k]]) for k in ALL[:2]]
    return [y[k % 2][0][k // 2] for k in ALL[:8]], [y[k % 2][1][k // 2] for k in ALL[:8]]


@kernel
def dft_by_four(R, r, i):
    """Of 8, 16 or 32 points x[a R/4 + b]: over a, turned by b k / R, then over b."""
    W = R // 4
    p = [dft4([r[b + a * W] for a in ALL[:4]], [i[b + a * W] for a in ALL[:4]]) for b in ALL[:W]]
    q = [[turned_by(p[b][0][k], p[b][1][k], b * k * 32 // R) for b in ALL[:W]] for k in ALL[:4]]
    y = [dft(W, [x[0] for x in q[k]], [x[1] for x in q[k]]) for k in ALL[:4]]
    return [y[k % 4][0][k // 4] for k in ALL[:R]], [y[k % 4][1][k // 4] for k in ALL[:R]]


@kernel
def dft(R, r, i):
    if R == 2:
        return dft2(r, i)
    if R == 4:
        return dft4(r, i)
    return dft8(r, i)


@kernel
def butterfly(R, r, i):
    if R <= 4:
        return dft(R, r, i)
    return dft_by_four(R, r, i)


# --- angles --------------------------------------------------------------------------------------
KEPT = {2: (1,), 4: (1, 2, 3), 8: (1, 2, 3, 4), 16: (1, 2, 3, 4, 8, 12),
        32: (1, 2, 3, 4, 8, 12, 16, 20, 24, 28)}


# Points of lines up to which threads of 32 points read cosine and sine one by one, of few registers
# that are left. At once, as others do, lines of 2^13 take 80.8 us for 74.4, two passes of 2^18 134
# for 130.5, planes of 2^9 136 for 124; but of 2^14 points 96 for 102 (H200, 2026-11-26).
ONE_BY_ONE = 8192


@functools.cache
def stage_angles(N: int, radices: tuple[int, ...], points: int = POINTS) -> np.ndarray:
    """For each stage but the last: rows of L pairs of cosine and sine of the turns -p k / (L R),
    for few k, or of L cosines and L sines; see ONE_BY_ONE. The others are products of two of
    these."""
    parts, m = [np.zeros((0, 2))], 1
    for R in radices[:-1]:
        L = N // (m * R)
        for k in KEPT[R]:
            turns = np.arange(L) * k % (L * R) / (L * R)
            pairs = cosine_sine(turns)
            parts.append(pairs if points == POINTS or N > ONE_BY_ONE else pairs.T.reshape(-1, 2))
        m *= R
    made = np.concatenate(parts).reshape(-1)
    return np.pad(made, (0, -len(made) % 16 if len(made) else 16)).astype(np.float32)


def cosine_sine(turns: np.ndarray) -> np.ndarray:
    """[n, 2]: of each turned back."""
    return np.stack([np.cos(TURN * turns), -np.sin(TURN * turns)], axis=1)


@kernel
def one_turn(n, whole):
    turns = float(n) * (1.0 / whole)
    c, s = turned_part(turns - tile.round(turns))
    return c, -s


@kernel
def stage_turn(k, rows):
    """(cosine, sine) of the turns of a stage's frequency k, of the rows that are kept."""
    if k < 4:
        return rows[k - 1]
    c, s = rows[k // 4 + 2]
    if k % 4 == 0:
        return c, s
    return complex_multiply(c, s, rows[k % 4 - 1][0], rows[k % 4 - 1][1])


# --- stages --------------------------------------------------------------------------------------
@kernel
def padded(i, every=(1, BANKS)):
    """Where point i of a line lies in shared memory: threads that write points 16 apart, or read
    points side by side, meet no bank twice.  every: see padding"""
    return i + i // every[1] * every[0]


@kernel
def padding(m, R):
    """(floats, behind so many points) in the exchange behind a stage of radix R with m points done
    before. A warp writes 32 / m pieces of m points, m R apart, which share no bank then."""
    if 1 < m < BANKS:
        return m, m * R
    return 1, BANKS


@kernel
def room(N, radices):
    """Floats of a line in shared memory."""
    most, m = N // BANKS, 1
    for R in radices[:-1]:
        floats, points = padding(m, R)
        most, m = max(most, N // points * floats), m * R
    return N + most


@kernel
def pitch(N, lines, radices):
    """From line to line, so that threads side by side on lines meet few banks twice."""
    least = room(N, radices)
    return least + (BANKS // lines - least) % BANKS if 1 < lines <= BANKS else least


@kernel
def spread(lane, lines, each, across):
    """(line of a group, part of a line) of a thread. across: neighbours are of different lines."""
    if across:
        return lane % lines, lane // lines
    return lane // each, lane % each


@kernel
def starts(N, R, points=POINTS):
    """The first points of a thread's butterflies, from its part of the line on."""
    each = N // min(N, points)
    return [b * each for b in ALL[:min(N, points) // R]]


@kernel
def mirrored(N, part, R):
    """Of a stage of which a thread has two butterflies: point k of the butterfly at one of these
    points is N - k of that at the other. Of the first thread each is its own mirror."""
    return [part, tile.where(part == 0, N // (2 * R), N // R - part)]


@kernel
def beside_points(x, row, part, N, R, points):
    """The points of a thread's first butterflies that have numbers side by side: two at once."""
    count = points // R
    pairs = [[tile.load_pair(x[row], count * part + (2 * b + j * (N // R))) for j in ALL[:R]]
             for b in ALL[:count // 2]]
    return [[z[b % 2] for z in pairs[b // 2]] for b in ALL[:count]]


@kernel
def in_shared(sr, si, ats, N, R, every=(1, BANKS)):
    """The points of the butterflies whose first points lie there."""
    return ([[sr[at + padded(j * (N // R), every)] for j in ALL[:R]] for at in ats],
            [[si[at + padded(j * (N // R), every)] for j in ALL[:R]] for at in ats])


@kernel
def spots(base, part, begin, N, R, m, points, mirror, beside=False):
    """(first angle, later ones' number, place) of a thread's butterflies: where the first of their
    results goes. A butterfly's number shares no bit with the part, so that places are sums."""
    every = padding(m, R)
    if mirror[0] == m:
        return [(begin, b[1], b[0] + padded(b[1] * R)) for b in mirror[1]]
    if beside and m == 1:
        count, first = points // R, base + padded(part * points)
        return [(begin, count * part + b, first + b * R) for b in ALL[:count]]
    first = base + padded(part % m + part // m * (m * R), every)
    return [(begin, part // m + u // m, first + padded(u % m + u // m * (m * R), every))
            for u in starts(N, R, points)]


@kernel
def stage_rows(at, angles, N, R, m, points):
    """(cosine, sine) of the turns that are kept, of each of a thread's butterflies."""
    L, kept = N // (m * R), ALL[:len(KEPT[R])]
    if points == POINTS or N > ONE_BY_ONE:
        return [[tile.load_pair(angles, 2 * b[1] + (b[0] + 2 * n * L)) for n in kept] for b in at]
    return [[(angles[b[1] + (b[0] + 2 * n * L)], angles[b[1] + (b[0] + (2 * n + 1) * L)])
             for n in kept] for b in at]


@kernel
def stage_turned(y, turns, R):
    """A stage's results, (real, imaginary) of each butterfly, times their angles."""
    made = []
    for b in ALL[:len(turns)]:
        rows = turns[b]
        z = [complex_multiply(y[b][0][k], y[b][1][k], *stage_turn(k, rows)) for k in ALL[1:R]]
        made = made + [([y[b][0][0]] + [v[0] for v in z], [y[b][1][0]] + [v[1] for v in z])]
    return made


@kernel
def transformed(xr, xi, sr, si, angles, N, radices, first, rest, mirror=(0, ()),
                points=POINTS, early=False, beside=False):
    """The last stage's results, a pair for each of a thread's butterflies; its butterfly at u has
    the frequencies u + k N / R.

    xr, xi: the points of the first stage's.  first, rest: (where a thread's line lies in shared
    memory, its part) in the first stage and in later ones.  mirror: points done
    before the stage, the first or the last, whose butterflies are (where a line lies, number)
    early: turns are read ahead of a stage's butterflies.  beside: the first stage's butterflies of
    a thread have numbers side by side
    """
    m, begin, base, part, every = 1, 0, first[0], first[1], (1, BANKS)
    for R in radices:
        if m > 1:
            base, part = rest[0], rest[1]
            ats = [base + padded(part, every) + padded(u, every) for u in starts(N, R, points)]
            if mirror[0] == m:
                ats = [b[0] + padded(b[1], every) for b in mirror[1]]
            xr, xi = in_shared(sr, si, ats, N, R, every)
        if early and m * R < N:
            at = spots(base, part, begin, N, R, m, points, mirror, beside)
            turns = stage_rows(at, angles, N, R, m, points)
        y = [butterfly(R, xr[b], xi[b]) for b in ALL[:len(xr)]]
        if m * R < N:
            if m > 1:
                tile.barrier()
            if not early:
                at = spots(base, part, begin, N, R, m, points, mirror, beside)
                turns = stage_rows(at, angles, N, R, m, points)
            z, every = stage_turned(y, turns, R), padding(m, R)
            for b in ALL[:len(at)]:
                for k in ALL[:R]:
                    sr[at[b][2] + padded(m * k, every)] = z[b][0][k]
                    si[at[b][2] + padded(m * k, every)] = z[b][1][k]
            tile.barrier()
        begin = begin + 2 * len(KEPT[R]) * (N // (m * R))
        m = m * R
    return y


@kernel
def in_order(sr, si, base, y, part, N, radices, points=POINTS):
    """The last stage's results to shared memory."""
    R = radices[-1]
    if len(radices) > 1:
        tile.barrier()
    first, vs = base + padded(part), starts(N, R, points)
    for n in ALL[:len(vs)]:
        for k in ALL[:R]:
            sr[first + padded(vs[n] + k * (N // R))] = y[n][0][k]
            si[first + padded(vs[n] + k * (N // R))] = y[n][1][k]
    tile.barrier()


__all__ = ["ALL", "BANKS", "KEPT", "MOST_POINTS", "POINTS", "SECTOR", "beside_points", "butterfly",
           "cosine_sine", "in_order", "in_shared", "mirrored", "one_turn", "padded", "pitch",
           "room", "spread", "stage_angles", "stage_turn", "starts", "transformed",
           "complex_multiply", "turned_by"]
