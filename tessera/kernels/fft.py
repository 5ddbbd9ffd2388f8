"""Fourier transforms of f32 pairs (real, imaginary), as many points as a group's shared memory has.

Stockham's order: a stage of radix R takes points N / R apart and leaves them so that the last stage
has the frequencies in order. Each thread keeps 16 points in registers; between stages they go
through shared memory. So a transform is read once and written once.

    stage with m points done, L = N / (m R), u = p m + q:
    y[q + m (R p + k)] = w(p k / (L R)) sum_j x[u + j N / R] w(j k / R),   w(t) = exp(-2 pi i t)

Van Loan 1992, Computational Frameworks for the Fast Fourier Transform, algorithm 1.7.2. Longer
transforms are two passes, Bailey's four steps (1990, J. Supercomputing 4:23): the first turns its
frequencies by the whole's angles where it writes. An inverse is the transform with both parts
exchanged, before and behind.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..numerics import f32
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from ..tile.kernel.kernel import Kernel
from .angles import TURN, turned_part

POINTS = 16  # of a thread
BANKS = 32
ALL = tuple(range(POINTS))
HALF = math.sqrt(0.5)
C1, S1 = math.cos(math.pi / 8), math.sin(math.pi / 8)


# --- butterflies: real parts and imaginary parts, in and out -------------------------------------
@kernel
def turned(r, i, c, s):
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
def sixteenth(r, i, n):
    """A number turned by -n / 16, n up to 9."""
    if n == 0:
        return r, i
    if n == 1:
        return turned(r, i, C1, -S1)
    if n == 2:
        return (r + i) * HALF, (i - r) * HALF
    if n == 3:
        return turned(r, i, S1, -C1)
    if n == 4:
        return i, -r
    if n == 6:
        return (i - r) * HALF, (r + i) * -HALF
    return turned(r, i, -C1, S1)


@kernel
def dft_by_four(R, r, i):
    """Of 8 or 16 points x[a R/4 + b]: over a, turned by b k / R, then over b."""
    W = R // 4
    p = [dft4([r[a * W + b] for a in ALL[:4]], [i[a * W + b] for a in ALL[:4]]) for b in ALL[:W]]
    q = [[sixteenth(p[b][0][k], p[b][1][k], b * k * 16 // R) for b in ALL[:W]] for k in ALL[:4]]
    y = [dft(W, [x[0] for x in q[k]], [x[1] for x in q[k]]) for k in ALL[:4]]
    return [y[k % 4][0][k // 4] for k in ALL[:R]], [y[k % 4][1][k // 4] for k in ALL[:R]]


@kernel
def dft(R, r, i):
    if R == 2:
        return dft2(r, i)
    return dft4(r, i)


@kernel
def butterfly(R, r, i):
    if R <= 4:
        return dft(R, r, i)
    return dft_by_four(R, r, i)


# --- angles --------------------------------------------------------------------------------------
KEPT = {2: (1,), 4: (1, 2, 3), 8: (1, 2, 3, 4), 16: (1, 2, 3, 4, 8, 12)}


@functools.cache
def stage_angles(N: int, radices: tuple[int, ...]) -> np.ndarray:
    """For each stage but the last: rows of L cosines and of L sines of the turns -p k / (L R), for
    few k. The others are products of two of these."""
    parts, m = [], 1
    for R in radices[:-1]:
        L = N // (m * R)
        for k in KEPT[R]:
            turns = np.arange(L) * k % (L * R) / (L * R)
            parts += [np.cos(TURN * turns), -np.sin(TURN * turns)]
        m *= R
    return np.concatenate(parts or [np.zeros(1)]).astype(np.float32)


@functools.cache
def real_angles(N: int, radices: tuple[int, ...]) -> np.ndarray:
    """stage_angles, and behind them cosines and sines of the turns k / (2 N), k = 0 .. N - 1."""
    turns = TURN * np.arange(N) / (2 * N)
    return np.concatenate([stage_angles(N, radices), np.cos(turns), np.sin(turns)],
                          dtype=np.float32)


@kernel
def stage_turn(k, rows):
    """(cosine, sine) of the turns of a stage's frequency k, of the rows that are kept."""
    if k < 4:
        return rows[k - 1]
    c, s = rows[k // 4 + 2]
    if k % 4 == 0:
        return c, s
    return turned(c, s, rows[k % 4 - 1][0], rows[k % 4 - 1][1])


# --- stages --------------------------------------------------------------------------------------
@kernel
def padded(i):
    """Where point i of a line lies in shared memory: threads that write points 16 apart, or read
    points side by side, meet no bank twice."""
    return i + i // BANKS


@kernel
def pitch(N, lines):
    """From line to line, so that threads side by side on lines meet few banks twice."""
    least = N + N // BANKS
    return least + (BANKS // lines - least) % BANKS if 1 < lines <= BANKS else least


@kernel
def spread(lane, lines, each, across):
    """(line of a group, part of a line) of a thread. across: neighbours are of different lines."""
    if across:
        return lane % lines, lane // lines
    return lane // each, lane % each


@kernel
def starts(N, R):
    """The first points of a thread's butterflies, from its part of the line on."""
    each = N // min(N, POINTS)
    return [b * each for b in ALL[:min(N, POINTS) // R]]


@kernel
def mirrored(N, part):
    """Of the last stage, of radix 8: frequency k of the butterfly at one of these points is N - k
    of that at the other. Of the first thread each is its own mirror."""
    return [part, tile.where(part == 0, N // POINTS, N // 8 - part)]


@kernel
def in_shared(sr, si, ats, N, R):
    """The points of the butterflies whose first points lie there."""
    return ([[sr[at + padded(j * (N // R))] for j in ALL[:R]] for at in ats],
            [[si[at + padded(j * (N // R))] for j in ALL[:R]] for at in ats])


@kernel
def spots(base, part, begin, N, R, m, mirror=0):
    """(first angle, later ones' number, place) of a thread's butterflies: where the first of their
    results goes. A butterfly's number shares no bit with the part, so that places are sums."""
    if mirror == m:
        return [(begin + u, 0, base + padded(u * R)) for u in mirrored(N, part)]
    first = base + padded(part % m + part // m * (m * R))
    return [(begin + part // m, u // m, first + padded(u % m + u // m * (m * R)))
            for u in starts(N, R)]


@kernel
def stage_turned(y, at, angles, N, R, m):
    """A stage's results, (real, imaginary) of each butterfly, times their angles."""
    L, made = N // (m * R), []
    for b in ALL[:len(at)]:
        first, p = at[b][0], at[b][1]
        rows = [(angles[first + (2 * n * L + p)], angles[first + ((2 * n + 1) * L + p)])
                for n in ALL[:len(KEPT[R])]]
        z = [turned(y[b][0][k], y[b][1][k], *stage_turn(k, rows)) for k in ALL[1:R]]
        made = made + [([y[b][0][0]] + [v[0] for v in z], [y[b][1][0]] + [v[1] for v in z])]
    return made


@kernel
def transformed(xr, xi, sr, si, angles, N, radices, first, rest, mirror=0):
    """The last stage's results, a pair for each of a thread's butterflies; its butterfly at u has
    the frequencies u + k N / R.

    xr, xi: the points of the first stage's.  first, rest: (where a thread's line lies in shared
    memory, its part) in the first stage and in later ones.  mirror: points done
    before the stage, the first or the last and of radix 8, whose butterflies are as in mirrored
    """
    m, begin, base, part = 1, 0, first[0], first[1]
    for R in radices:
        if m > 1:
            base, part = rest[0], rest[1]
            ats = [base + padded(part) + padded(u) for u in starts(N, R)]
            if mirror == m:
                ats = [base + padded(u) for u in mirrored(N, part)]
            xr, xi = in_shared(sr, si, ats, N, R)
        y = [butterfly(R, xr[b], xi[b]) for b in ALL[:len(xr)]]
        if m * R < N:
            if m > 1:
                tile.barrier()
            at = spots(base, part, begin, N, R, m, mirror)
            z = stage_turned(y, at, angles, N, R, m)
            for b in ALL[:len(at)]:
                for k in ALL[:R]:
                    sr[at[b][2] + padded(m * k)] = z[b][0][k]
                    si[at[b][2] + padded(m * k)] = z[b][1][k]
            tile.barrier()
        begin = begin + 2 * len(KEPT[R]) * (N // (m * R))
        m = m * R
    return y


@kernel
def in_order(sr, si, base, y, part, N, radices):
    """The last stage's results to shared memory."""
    R = radices[-1]
    if len(radices) > 1:
        tile.barrier()
    first, vs = base + padded(part), starts(N, R)
    for n in ALL[:len(vs)]:
        for k in ALL[:R]:
            sr[first + padded(vs[n] + k * (N // R))] = y[n][0][k]
            si[first + padded(vs[n] + k * (N // R))] = y[n][1][k]
    tile.barrier()


@kernel
def transformed_by_parts(xr, xi, s, angles, N, radices, first, rest):
    """As transformed, with half as much shared memory and twice the barriers: one part goes through
    it after the other."""
    m, begin, base, part = 1, 0, first[0], first[1]
    for n in ALL[:len(radices)]:
        R = radices[n]
        y = [butterfly(R, xr[b], xi[b]) for b in ALL[:len(xr)]]
        if m * R < N:
            at = spots(base, part, begin, N, R, m)
            z = stage_turned(y, at, angles, N, R, m)
            base, part = rest[0], rest[1]
            here = base + padded(part)
            xr = exchanged_part(s, at, [v[0] for v in z], here, N, R, m, radices[n + 1])
            xi = exchanged_part(s, at, [v[1] for v in z], here, N, R, m, radices[n + 1])
        begin = begin + 2 * len(KEPT[R]) * (N // (m * R))
        m = m * R
    return y


@kernel
def exchanged_part(s, at, z, here, N, R, m, R_):
    """A part of the next stage's points, of radix R_."""
    for b in ALL[:len(at)]:
        for k in ALL[:R]:
            s[at[b][2] + padded(m * k)] = z[b][k]
    tile.barrier()
    x = [[s[here + padded(u + j * (N // R_))] for j in ALL[:R_]] for u in starts(N, R_)]
    tile.barrier()
    return x


# --- kernels -------------------------------------------------------------------------------------
@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("yr", "yi"))
def fft_lines(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["B", "F", f32],
              yi: Tensor["B", "F", f32], angles: Tensor["T", f32], radices, N: int, inner: int,
              outer: int, lines: int, whole: int, apart: int, scale: float, BM=1):
    """The transforms of `lines` lines of N points. Of line l, point n is
    x[l // inner, n inner + l % inner], frequency k y[l // outer, k outer + l % outer].

    whole: frequency k of column c of y is turned by -(c // apart) k / whole, where that is not 1
    """
    each, lane, P = max(1, N // POINTS), tile.local_id(), pitch(N, BM)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, inner > 1)
    number = tile.group_id(0) * BM + line
    at = number if lines % BM == 0 else min(number, lines - 1)
    row, first = at // inner, at % inner + part * inner
    us, step = starts(N, radices[0]), N // radices[0]
    vr = [[xr[row, first + (u + j * step) * inner] for j in ALL[:radices[0]]] for u in us]
    vi = [[xi[row, first + (u + j * step) * inner] for j in ALL[:radices[0]]] for u in us]
    line_, part_ = line, part
    if len(radices) > 1:
        line_, part_ = spread(lane, BM, each, outer > 1)
    y = transformed(vr, vi, sr, si, angles, N, radices, (line * P, part), (line_ * P, part_))
    to = tile.group_id(0) * BM + line_
    if lines % BM == 0:
        frequencies(yr, yi, y, to, part_, N, radices[-1], outer, whole, apart, scale)
    elif to < lines:
        frequencies(yr, yi, y, to, part_, N, radices[-1], outer, whole, apart, scale)


@kernel
def frequencies(yr, yi, y, line, part, N, R, outer, whole, apart, scale):
    """Those of a line from a thread's last butterflies, where they belong."""
    b, d, vs, step = line // outer, line % outer, starts(N, R), N // R
    rows, to = column_turns(d // apart * step, KEPT[R], whole), d + part * outer
    for n in ALL[:len(vs)]:
        first = column_turns(d // apart * (part + vs[n]), (1,), whole)
        for k in ALL[:R]:
            real, imaginary = y[n][0][k] * scale, y[n][1][k] * scale
            if whole > 1:
                cosine, sine = first[0]
                if k > 0:
                    cosine, sine = turned(cosine, sine, *stage_turn(k, rows))
                real, imaginary = turned(real, imaginary, cosine, sine)
            yr[b, to + (vs[n] + k * step) * outer] = real
            yi[b, to + (vs[n] + k * step) * outer] = imaginary


@kernel
def column_turns(n, factors, whole):
    """(cosine, sine) of the turns -n f / whole for each factor f; none where whole is 1."""
    if whole == 1:
        return ()
    return [one_turn(n * f, whole) for f in factors]


@kernel
def one_turn(n, whole):
    turns = float(n) * (1.0 / whole)
    c, s = turned_part(turns - tile.round(turns))
    return c, -s


@kernel(grid=lambda lines, BM, TURNS: -(-lines // (BM * TURNS)), overwrites=("yr", "yi"))
def fft_blocks(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], yr: Tensor["B", "F", f32],
               yi: Tensor["B", "F", f32], angles: Tensor["T", f32], radices, N: int, inner: int,
               outer: int, lines: int, whole: int, apart: int, scale: float, BM=1, TURNS=8):
    """As fft_lines, of TURNS blocks of BM lines in turn by a group: the next comes to shared memory
    meanwhile. x has the blocks as they are there: [lines, N], or [lines / inner N, inner]."""
    each, first, P = N // POINTS, tile.group_id(0) * TURNS, pitch(N, BM)
    rows, columns = (BM, N) if inner == 1 else (N, BM)
    nr, ni = tile.alloc_shared((rows, columns), f32), tile.alloc_shared((rows, columns), f32)
    s = tile.alloc_shared((BM * P,), f32)
    us, step = starts(N, radices[0]), N // radices[0]
    bring(nr, ni, xr, xi, first, N, inner, BM)
    for a in tile.range(first, min(first + TURNS, lines // BM)):
        lane = tile.shuffle_xor(tile.local_id(), 0)  # or addresses would be kept from block to block
        line, part = spread(lane, BM, each, inner > 1)
        line_, part_ = spread(lane, BM, each, outer > 1)
        tile.cp_wait_group(0)
        tile.barrier()
        if inner == 1:
            vr = [[nr[line, part + (u + j * step)] for j in ALL[:radices[0]]] for u in us]
            vi = [[ni[line, part + (u + j * step)] for j in ALL[:radices[0]]] for u in us]
        else:
            vr = [[nr[part + (u + j * step), line] for j in ALL[:radices[0]]] for u in us]
            vi = [[ni[part + (u + j * step), line] for j in ALL[:radices[0]]] for u in us]
        tile.barrier()
        if a + 1 < min(first + TURNS, lines // BM):
            bring(nr, ni, xr, xi, a + 1, N, inner, BM)
        at, at_, to = (line * P, part), (line_ * P, part_), a * BM + line_
        y = transformed_by_parts(vr, vi, s, angles, N, radices, at, at_)
        frequencies(yr, yi, y, to, part_, N, radices[-1], outer, whole, apart, scale)


@kernel
def bring(nr, ni, xr, xi, block, N, inner, BM):
    """Begins to copy a block's points."""
    row, column = block * BM, 0
    rows, columns = BM, N
    if inner > 1:
        row, column = block * BM // inner * N, block * BM % inner
        rows, columns = N, BM
    tile.cp_async(nr, xr[row:row + rows, column:column + columns])
    tile.cp_async(ni, xi[row:row + rows, column:column + columns])
    tile.cp_commit_group()


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("yr", "yi"))
def rfft_lines(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
               angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1):
    """Frequencies 0 .. N of lines of 2 N real points: those of x[2 n] + i x[2 n + 1], of which each
    pair k, N - k has the parts of even and of odd points."""
    each = max(1, N // POINTS)
    lane, P = tile.local_id(), pitch(N, BM)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, False)
    number = tile.group_id(0) * BM + line
    a, base = min(number, lines - 1), line * P
    us, step = starts(N, radices[0]), N // radices[0]
    vr = [[x[a, 2 * part + 2 * (u + j * step)] for j in ALL[:radices[0]]] for u in us]
    vi = [[x[a, 2 * part + (2 * (u + j * step) + 1)] for j in ALL[:radices[0]]] for u in us]
    y = transformed(vr, vi, sr, si, angles, N, radices, (base, part), (base, part))
    in_order(sr, si, base, y, part, N, radices)
    if number < lines:
        if part == 0:
            yr[a, N // 2] = sr[base + padded(N // 2)] * scale
            yi[a, N // 2] = si[base + padded(N // 2)] * -scale
        here, turn, half = base + padded(part), T - 2 * N + part, 0.5 * scale
        for n in ALL[:min(N, POINTS) // 2]:
            k, k_ = part + n * each, N - part - n * each
            at, back = here + padded(n * each), base + padded(k_ & (N - 1))
            r, i, r_, i_ = sr[at], si[at], sr[back], si[back]
            c, d = turned(i + i_, r_ - r, angles[turn + n * each], -angles[turn + (N + n * each)])
            yr[a, k] = (r + r_ + c) * half
            yi[a, k] = (i - i_ + d) * half
            yr[a, k_] = (r + r_ - c) * half
            yi[a, k_] = (d - i + i_) * half


@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("yr", "yi"))
def rfft_pairs(x: Tensor["A", "E", f32], yr: Tensor["A", "F", f32], yi: Tensor["A", "F", f32],
               angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1):
    """Frequencies 0 .. N / 2 of lines of N real points, of which two are the parts of one of
    complex points: a_k = (z_k + conj z_(N - k)) / 2, b_k = (z_k - conj z_(N - k)) / 2i."""
    P = pitch(N, BM)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(tile.local_id(), BM, N // POINTS, False)
    a = 2 * (tile.group_id(0) * BM + line)
    here, there, at = min(a, lines - 1), min(a + 1, lines - 1), (line * P, part)
    us, step = starts(N, radices[0]), N // radices[0]
    vr = [[x[here, part + (u + j * step)] for j in ALL[:radices[0]]] for u in us]
    vi = [[x[there, part + (u + j * step)] for j in ALL[:radices[0]]] for u in us]
    (pr, pi), (qr, qi) = transformed(vr, vi, sr, si, angles, N, radices, at, at, N // 8)
    if a < lines:
        mirror_sums(yr, yi, a, pr, pi, qr, qi, N, part, 0.5 * scale)
    if a + 1 < lines:  # -i z has the parts in their other places
        mirror_sums(yr, yi, a + 1, pi, [-v for v in pr], qi, [-v for v in qr], N, part, 0.5 * scale)


@kernel
def mirror_sums(yr, yi, a, pr, pi, qr, qi, N, part, half):
    """z_k + conj z_(N - k) of both butterflies of a thread; see mirrored."""
    u, v = mirrored(N, part)
    own = part == 0
    for k in ALL[:4]:
        at, to = u + k * (N // 8), v + k * (N // 8)
        yr[a, at] = (pr[k] + tile.where(own, pr[-k], qr[7 - k])) * half
        yi[a, at] = (pi[k] - tile.where(own, pi[-k], qi[7 - k])) * half
        yr[a, to] = (qr[k] + tile.where(own, qr[7 - k], pr[7 - k])) * half
        yi[a, to] = (qi[k] - tile.where(own, qi[7 - k], pi[7 - k])) * half
    if part == 0:
        yr[a, N // 2] = 2.0 * pr[4] * half
        yi[a, N // 2] = 0.0


@kernel(grid=lambda lines, BM: -(-lines // (2 * BM)), overwrites=("y",))
def irfft_pairs(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1):
    """The N real points of lines of frequencies 0 .. N / 2, of which two are the parts of one of
    complex points: z_k = a_k + i b_k, z_(N - k) = conj a_k + i conj b_k."""
    P = pitch(N, BM)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(tile.local_id(), BM, N // POINTS, False)
    a = 2 * (tile.group_id(0) * BM + line)
    here, there, at = min(a, lines - 1), min(a + 1, lines - 1), (line * P, part)
    u, v = mirrored(N, part)
    own, middle = part == 0, xr.shape[1] - 1
    near, far = both_frequencies(xr, xi, here, there, u, N, own)
    near_, far_ = both_frequencies(xr, xi, here, there, v, N, False)
    mine = [(xr[here, middle], xr[there, middle])] + [far[-k] for k in ALL[1:4]]
    p = near + [chosen(own, mine[k], far_[3 - k]) for k in ALL[:4]]
    q = near_ + [chosen(own, far_[3 - k], far[3 - k]) for k in ALL[:4]]
    vr, vi = [[z[1] for z in p], [z[1] for z in q]], [[z[0] for z in p], [z[0] for z in q]]
    made = transformed(vr, vi, sr, si, angles, N, radices, at, at, 1)
    if a < lines:
        part_points(y, a, [z[1] for z in made], part, N, radices[-1], scale)
    if a + 1 < lines:
        part_points(y, a + 1, [z[0] for z in made], part, N, radices[-1], scale)


@kernel
def part_points(y, a, x, part, N, R, scale):
    """A line's points from a part of a thread's last butterflies."""
    vs = starts(N, R)
    for n in ALL[:len(vs)]:
        for k in ALL[:R]:
            y[a, part + (vs[n] + k * (N // R))] = x[n][k] * scale


@kernel
def chosen(own, z, z_):
    return tile.where(own, z[0], z_[0]), tile.where(own, z[1], z_[1])


@kernel
def both_frequencies(xr, xi, a, b, u, N, zero):
    """z_k of both lines for k = u + j N / 8, j < 4, and z_(N - k).  zero: whether u is 0"""
    near, far = [], []
    for j in ALL[:4]:
        k = u + j * (N // 8)
        ar, br, ai, bi = xr[a, k], xr[b, k], xi[a, k], xi[b, k]
        if j == 0:
            ai, bi = tile.where(zero, 0.0, ai), tile.where(zero, 0.0, bi)
        near, far = near + [(ar - bi, ai + br)], far + [(ar + bi, br - ai)]
    return near, far


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("y",))
def irfft_lines(xr: Tensor["A", "E", f32], xi: Tensor["A", "E", f32], y: Tensor["A", "F", f32],
                angles: Tensor["T", f32], radices, N: int, lines: int, scale: float, BM=1):
    """The 2 N real points of lines of frequencies 0 .. N; of the first and the last no imaginary
    part is read."""
    each = max(1, N // POINTS)
    lane, P = tile.local_id(), pitch(N, BM)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, False)
    number = tile.group_id(0) * BM + line
    a, base = min(number, lines - 1), line * P
    us, step = starts(N, radices[0]), N // radices[0]
    z = [[packed_frequency(xr, xi, angles, a, part, u + j * step, N) for j in ALL[:radices[0]]]
         for u in us]
    vr, vi = [[p[1] for p in ps] for ps in z], [[p[0] for p in ps] for ps in z]
    made = transformed(vr, vi, sr, si, angles, N, radices, (base, part), (base, part))
    if number < lines:
        real_points(y, a, made, part, N, radices[-1], scale)


@kernel
def real_points(y, a, made, part, N, R, scale):
    """x[2 n] + i x[2 n + 1] of a line, from a thread's last butterflies of exchanged parts."""
    vs = starts(N, R)
    for n in ALL[:len(vs)]:
        for k in ALL[:R]:
            y[a, 2 * part + 2 * (vs[n] + k * (N // R))] = made[n][1][k] * scale
            y[a, 2 * part + (2 * (vs[n] + k * (N // R)) + 1)] = made[n][0][k] * scale


@kernel
def packed_frequency(xr, xi, angles, a, part, n, N):
    """Twice the frequency part + n of x[2 n] + i x[2 n + 1]."""
    back, first = N - part, angles.shape[0] - 2 * N + part
    r, r_, i, i_ = xr[a, part + n], xr[a, back - n], xi[a, part + n], xi[a, back - n]
    if n == 0:
        i, i_ = tile.where(part == 0, 0.0, i), tile.where(part == 0, 0.0, i_)
    c, d = turned(-(i + i_), r - r_, angles[first + n], angles[first + (N + n)])
    return r + r_ + c, i - i_ + d


@kernel(grid=lambda lines, BM: -(-lines // BM), overwrites=("y",))
def filter_lines(x: Tensor["A", "E", f32], hr: Tensor["H", "F", f32], hi: Tensor["H", "F", f32],
                 y: Tensor["A", "E", f32], angles: Tensor["T", f32], radices, N: int, lines: int,
                 scale: float, BM=1):
    """Lines of 2 N real points, of which each frequency is multiplied: rfft_lines, a product and
    irfft_lines, with nothing written between. Line l has the factors of row l % H."""
    each = max(1, N // POINTS)
    lane, P = tile.local_id(), pitch(N, BM)
    sr, si = tile.alloc_shared((BM * P,), f32), tile.alloc_shared((BM * P,), f32)
    line, part = spread(lane, BM, each, False)
    number = tile.group_id(0) * BM + line
    a, base = min(number, lines - 1), line * P
    us, step = starts(N, radices[0]), N // radices[0]
    vr = [[x[a, 2 * part + 2 * (u + j * step)] for j in ALL[:radices[0]]] for u in us]
    vi = [[x[a, 2 * part + (2 * (u + j * step) + 1)] for j in ALL[:radices[0]]] for u in us]
    at = (base, part)
    made = transformed(vr, vi, sr, si, angles, N, radices, at, at)
    in_order(sr, si, base, made, part, N, radices)
    h = a % hr.shape[0]
    if part == 0:
        r, i = sr[base + padded(N // 2)], -si[base + padded(N // 2)]
        c, d = turned(r, i, hr[h, N // 2], hi[h, N // 2])
        sr[base + padded(N // 2)] = 2.0 * c
        si[base + padded(N // 2)] = -2.0 * d
    first, turn = base + padded(part), T - 2 * N + part
    for n in ALL[:min(N, POINTS) // 2]:
        k, k_ = part + n * each, N - part - n * each
        here, back = first + padded(n * each), base + padded(k_ & (N - 1))
        pair_filtered(sr, si, here, back, angles[turn + n * each], angles[turn + (N + n * each)],
                      k, hr[h, k], hi[h, k], hr[h, k_], hi[h, k_])
    tile.barrier()
    vr, vi = in_shared(sr, si, [first + padded(u) for u in us], N, radices[0])
    tile.barrier()
    made = transformed(vi, vr, sr, si, angles, N, radices, at, at)
    if number < lines:
        real_points(y, a, made, part, N, radices[-1], scale)


@kernel
def pair_filtered(sr, si, here, back, c, s, k, hr, hi, hr_, hi_):
    """Of x[2 n] + i x[2 n + 1] the frequencies k and N - k, where those of x are multiplied."""
    r, i, r_, i_ = sr[here], si[here], sr[back], si[back]
    tr, ti = turned(i + i_, r_ - r, c, -s)
    pr, pi = turned(0.5 * (r + r_ + tr), 0.5 * (i - i_ + ti), hr, hi)          # of k
    qr, qi = turned(0.5 * (r + r_ - tr), 0.5 * (ti - i + i_), hr_, hi_)        # of N - k
    pi, qi = tile.where(k == 0, 0.0, pi), tile.where(k == 0, 0.0, qi)
    tr, ti = turned(-(pi + qi), pr - qr, c, s)
    if k > 0:
        sr[back] = pr + qr - tr
        si[back] = ti - pi + qi
    sr[here] = pr + qr + tr
    si[here] = pi - qi + ti


# --- blocks --------------------------------------------------------------------------------------
LANES = 64  # of a group of short lines
LONGEST = 16384  # points of a line that lies in one piece: 1024 threads
# Of complex lines two passes are quicker before that: 2^24 points in lines of 8192 and of 16384
# take 148 and 150 us, in one piece 164 and 183 (H200, 2026-11-26). Real lines of 256 and 1024, two
# at once 47 and 43 us, one by one 77 and 52; of 4096 and 16384, 54 and 75, one by one 52 and 72.
LONGEST_WHOLE, LONGEST_PAIR = 4096, 2048
# Of other lines a group has so many neighbours, 64 or 128 bytes in a row: of 8 lines of 1024 points
# 2^24 points take 1.3 times as long as of 16, and of 8 lines of 256 points 1.2 times as long as of
# 32 (H100, 2026-11-25).
LONGEST_ACROSS, LINES_ACROSS, THREADS_ACROSS = 1024, (16, 32), 512
# Two groups of 512 threads have the registers of a multiprocessor, 64 in each thread.
RESIDENT = {512: 2}


def radices_of(N: int) -> tuple[int, ...]:
    """Of a power of two from 2 on: 16 as often as it goes, what is left of it first."""
    rest = (N.bit_length() - 1) % 4
    sixteens = (N.bit_length() - 1) // 4
    return ((1 << rest,) if rest else ()) + (POINTS,) * sixteens


def mirror_radices(N: int) -> tuple[int, ...]:
    """As radices_of from 16 points on, with 8 as the last."""
    return (*radices_of(N // 8), 8)


def lines_of(N: int, across: bool) -> tuple[int, int]:
    """Lines and threads of a group. across: neighbours in memory are of different lines."""
    each = max(1, N // POINTS)
    lines = max(1, LANES // each)
    if across:
        least, most = LINES_ACROSS
        lines = max(least, min(most, THREADS_ACROSS // each))
    return lines, lines * each


def launcher_of(kernel: Kernel, lanes: int) -> Any:
    """The kernel in groups of so many threads."""
    resident = RESIDENT.get(lanes)
    made = kernel if resident is None else _resident(kernel, resident)
    return made.launcher(lanes=lanes)


@functools.cache
def _resident(kernel: Kernel, groups: int) -> Kernel:
    return kernel.with_schedule(Schedule(RESIDENT=groups))


__all__ = ["LONGEST", "LONGEST_ACROSS", "LONGEST_PAIR", "LONGEST_WHOLE", "POINTS", "fft_lines",
           "fft_blocks",
           "filter_lines", "irfft_lines", "irfft_pairs", "launcher_of", "lines_of", "mirror_radices",
           "radices_of", "real_angles", "rfft_lines", "rfft_pairs", "stage_angles"]
