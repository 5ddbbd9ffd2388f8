"""Kernels without a rule of their own, of each kind whose derivative follows from the body."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from tessera import Tensor, f32, int32

tile = ts.tile


@ts.kernel
def swiglu(a: Tensor["M", "N", f32], b: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    x = tile.load(a[tile_m:tile_m + 16, tile_n:tile_n + 64])
    return x * tile.sigmoid(x) * tile.load(b[tile_m:tile_m + 16, tile_n:tile_n + 64])


@ts.kernel
def rms(x: Tensor["M", "N", f32], w: Tensor["N", f32], y: Tensor["M", "N", f32]):
    rows = tile.load(x[tile_m:tile_m + 8, 0:N])
    scale = tile.rsqrt(tile.row_sum(rows * rows) / N + 1e-5)
    y[tile_m:tile_m + 8, 0:N] = rows * scale * tile.load(w[0:N])[None, :]


@ts.kernel
def softmax(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    rows = tile.load(x[tile_m:tile_m + 8, 0:N])
    p = tile.exp(rows - tile.row_max(rows))
    y[tile_m:tile_m + 8, 0:N] = p / tile.row_sum(p)


@ts.kernel
def matmul(A: Tensor["M", "K", f32], B: Tensor["N", "K", f32], C: Tensor["M", "N", f32]):
    acc = tile.zeros((64, 64))
    for k in range(0, K, 32):
        b = tile.load(B[tile_n:tile_n + 64, k:k + 32])
        acc = tile.dot(tile.load(A[tile_m:tile_m + 64, k:k + 32]), b.T, acc)
    C[tile_m:tile_m + 64, tile_n:tile_n + 64] = acc


@ts.kernel
def attention(Q: Tensor["S", "D", f32], K: Tensor["S", "D", f32], V: Tensor["S", "D", f32],
              O: Tensor["S", "D", f32]):  # noqa: E741
    q = tile.load(Q[tile_s:tile_s + 32, 0:D])
    o, m, l = tile.zeros((32, D)), tile.full((32,), -float("inf")), tile.zeros((32,))  # noqa: E741
    for k0 in range(0, S, 16):
        s = tile.dot(q, tile.load(K[k0:k0 + 16, :]).T) * 0.125
        s = tile.causal_mask(s, tile_s, k0)
        p, m_c, l_c = tile.softmax_online(s)
        v = tile.load(V[k0:k0 + 16, :])
        o, m, l = tile.softmax_accumulate(o, m, l, p, v, m_c, l_c)  # noqa: E741
    O[tile_s:tile_s + 32, 0:D] = o / l


@ts.kernel
def mirrored(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        y[i] = x[i] * x[i] + x[N - 1 - i]


@ts.kernel
def row_norms(x: Tensor["M", "N", f32], y: Tensor["M", f32]):
    g, total = tile.group_id(0), 0.0
    for j in range(tile.local_id(), N, tile.group_size()):
        total += x[g, j] * x[g, j]
    total = tile.group_sum(total)
    if tile.local_id() == 0:
        y[g] = tile.sqrt(total)


def linear(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]


@ts.kernel
def combined(gate: Tensor["M", "N", f32], x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    """A scan and a reduction by a function, and the smallest of each row."""
    given = tile.load(gate[tile_m:tile_m+4, 0:N]), tile.load(x[tile_m:tile_m+4, 0:N])
    _, states = tile.scan(given, linear)
    _, last = tile.reduce(given, linear)
    y[tile_m:tile_m+4, 0:N] = states * tile.row_sum(tile.smallest(given[1], 3)) + last


@ts.kernel(grid=lambda B, G: (B, G))
def centred(x: Tensor["B", "P", "G", "C", f32], y: Tensor["B", "P", "G", "C", f32]):
    """A number of each group beside a tile whose axes are those of the tensor."""
    b, g = tile.group_id(0), tile.group_id(1)
    t = tile.load(x[b, 0:P, g, 0:C])
    y[b, 0:P, g, 0:C] = t / tile.reduce_sum(t * t)


@ts.kernel
def leaky(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        if x[i] > 0.0:
            y[i] = x[i] * x[i]
        else:
            y[i] = 0.1 * x[i]


@ts.kernel
def staged(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    s = tile.alloc_shared((16, 32), f32)
    tile.cp_async(s, x[tile_m:tile_m + 16, tile_n:tile_n + 32])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.barrier()
    y[tile_m:tile_m + 16, tile_n:tile_n + 32] = tile.load(s) * tile.sin(tile.load(s))


@ts.kernel
def looked_up(table: Tensor["V", "D", f32], ids: Tensor["N", int32], y: Tensor["N", "D", f32]):
    i = tile.load(ids[tile_n:tile_n + 16])
    y[tile_n:tile_n + 16, 0:D] = tile.gather(table[:, 0:D], i) * 2.0


@ts.kernel
def counted(x: Tensor["N", f32], y: Tensor["M", f32]):
    i = tile.linear_id()
    if i < N:
        if x[i] > 0.0:
            tile.atomic_add(y, i % M, x[i] * x[i])


@ts.kernel
def scaled(x: Tensor["N", f32], s: f32, y: Tensor["N", f32]):
    y[tile_n:tile_n + 64] = tile.load(x[tile_n:tile_n + 64]) * s


@ts.kernel
def accumulated(x: Tensor["N", f32], y: Tensor["N", f32]):
    y[tile_n:tile_n + 32] = tile.load(y[tile_n:tile_n + 32]) * tile.load(x[tile_n:tile_n + 32])


@ts.kernel
def causal(Q: Tensor["S", "D", f32], K: Tensor["S", "D", f32], V: Tensor["S", "D", f32],
           O: Tensor["S", "D", f32]):  # noqa: E741
    q = tile.load(Q[tile_s:tile_s + 16, 0:D])
    o, m, l = tile.zeros((16, D)), tile.full((16,), -float("inf")), tile.zeros((16,))  # noqa: E741
    for k in range(0, tile_s + 16, 8):
        s = tile.causal_mask(tile.dot(q, tile.load(K[k:k + 8, :]).T) * 0.25, tile_s, k)
        top = tile.maximum(m, tile.row_max(s))
        p, a = tile.exp(s - top[:, None]), tile.exp(m - top)
        l = l * a + tile.row_sum(p)  # noqa: E741
        o = o * a[:, None] + tile.dot(p, tile.load(V[k:k + 8, :]))
        m = top
    O[tile_s:tile_s + 16, 0:D] = o / l[:, None]


@ts.kernel
def spanned(X: Tensor["M", "N", f32], spans: Tensor["M", 2, int32], Y: Tensor["M", f32]):
    """Rows that see columns of their own, block by block of columns."""
    total = tile.zeros((16,))
    for n in range(0, N, 8):
        x = tile.span_mask(tile.load(X[tile_m:tile_m + 16, n:n + 8]),
                           tile.load(spans[tile_m:tile_m + 16, 1]), n)
        x = tile.span_mask(x, tile.load(spans[tile_m:tile_m + 16, 0]), n, behind=False)
        total += tile.row_sum(tile.exp(x))
    Y[tile_m:tile_m + 16] = total


@ts.kernel
def gated(A: Tensor["T", "N", f32], B: Tensor["T", "N", f32], Y: Tensor["T", "N", f32]):
    h = tile.full((16,), 0.5)
    for t in range(0, T):
        h = h * tile.sigmoid(tile.load(A[t, tile_n:tile_n + 16]))
        h = h + tile.load(B[t, tile_n:tile_n + 16])
        Y[t, tile_n:tile_n + 16] = h * h


@ts.kernel
def recurrent(X: Tensor["T", "D", f32], W: Tensor["D", "D", f32], Y: Tensor["T", "D", f32]):
    h, w = tile.zeros((1, D)), tile.load(W[:, :])
    for t in range(0, T):
        h = tile.tanh(tile.dot(h, w) * 0.2 + tile.load(X[t:t + 1, :]))
        Y[t:t + 1, :] = h


@ts.kernel
def staged_matmul(A: Tensor["M", "K", f32], B: Tensor["K", "N", f32], C: Tensor["M", "N", f32]):
    a, b = tile.alloc_shared((16, 8), f32), tile.alloc_shared((8, 16), f32)
    for n in range(0, N, 16):
        acc = tile.zeros((16, 16))
        for k in range(0, K, 8):
            tile.cp_async(a, A[tile_m:tile_m + 16, k:k + 8])
            tile.cp_async(b, B[k:k + 8, n:n + 16])
            tile.cp_commit_group()
            tile.cp_wait_group(0)
            tile.barrier()
            acc = tile.dot(a, b, acc)
            tile.barrier()
        C[tile_m:tile_m + 16, n:n + 16] = tile.sigmoid(acc)


@ts.kernel
def ahead(X: Tensor["M", "N", f32], Y: Tensor["M", f32]):
    x, low = tile.load(X[tile_m:tile_m + 8, 0:16]), tile.full((8,), float("inf"))
    total = tile.zeros((8,))
    for c in range(16, N + 16, 16):
        later = tile.load(X[tile_m:tile_m + 8, c:c + 16])
        squares = tile.row_sum(x * x)
        total -= squares / 3.0
        low = tile.minimum(squares, low)
        x = later
    Y[tile_m:tile_m + 8] = total * low


@ts.kernel
def bag(table: Tensor["V", "D", f32], ids: Tensor["B", "L", int32], y: Tensor["B", "D", f32]):
    b, total = tile.group_id(0), tile.zeros((D,))
    for k in range(0, L):
        total = total + tile.load(table[ids[b, k], :])
    y[b, :] = total * total


@ts.kernel
def peaks(x: Tensor["N", f32], ids: Tensor["N", int32], y: Tensor["M", f32], z: Tensor["M", f32]):
    i = tile.linear_id()
    if i < N:
        tile.atomic_max(y, ids[i], x[i] * x[(ids[i] << 1) >> 1] + 9 * i)
        if ids[i] > 20:
            tile.atomic_min(y, (i + 1) % M, x[i])
            if i < M:
                z[ids[i] * 3 % M] = x[i]


@ts.kernel
def paired(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    i, g = tile.local_id(), tile.group_id(0)
    if i < N // 2:
        a, b = tile.load_pair(x[g], 2 * i)
        tile.store_pair(y[g], 2 * i, a * b, a - b)


def written(kernel: Any, *shape: int) -> Any:
    """The kernel as a function of what it reads."""
    def f(*xs: Any) -> Any:
        y = ts.zeros(shape)
        kernel(*xs, y)
        return y

    return f


def product(x: Any, y: Any) -> Any:
    y = y + 0.0
    accumulated(x, y)
    return y


def peaked(x: Any) -> Any:
    y, z = ts.zeros((50,)), ts.zeros((50,))
    peaks(x, ts.tensor(np.arange(60, dtype=np.int32) * 7 % 50), y, z)
    return y * 2.0 + z


LOOPED = {"matmul": matmul, "causal": causal, "gated": gated}
SPANS = np.sort(np.arange(74, dtype=np.int32).reshape(37, 2) * 29 % 31, 1)
IDS = np.arange(40, dtype=np.int32) * 7 % 50


@ts.kernel
def butterflies(x: Tensor["B", 64, f32], y: Tensor["B", 64, f32]):
    """Elements of shared memory that a loop writes part by part, and one that writes all of it."""
    b, t = tile.group_id(), tile.local_id()
    s = tile.alloc_shared((64,), f32)
    for j in range(4):
        s[t + 16 * j] = x[b, t + 16 * j]
    tile.barrier()
    for _ in range(3):
        p, q, r, u = s[t], s[t + 16], s[t + 32], s[t + 48]
        tile.barrier()
        for j in range(4):
            s[4 * t + j] = (p + r if j < 2 else p - r) + float(j) * (q if j == 1 else u)
        tile.barrier()
    for j in range(4):
        y[b, t + 16 * j] = s[t + 16 * j]


@ts.kernel
def added_at(x: Tensor["N", f32], ids: Tensor["N", int32], y: Tensor["K", f32]):
    t = tile.load(x[tile_n:tile_n + 16])
    tile.atomic_add(y, tile.load(ids[tile_n:tile_n + 16]), t * t)


@ts.kernel
def columns_added(x: Tensor["M", "N", f32], y: Tensor["M", f32]):
    """What a loop adds to whole tiles is a column, and a number: each element counts them."""
    u, w = tile.zeros((8, 16)), tile.zeros((8, 16))
    for n in range(0, N, 16):
        t = tile.load(x[tile_m:tile_m + 8, n:n + 16], fill=0)
        u += tile.row_sum(t)
        w += tile.reduce_sum(t)
    y[tile_m:tile_m + 8] = tile.row_sum(u) + 0.1 * tile.row_sum(w)


@ts.kernel
def repeated(x: Tensor["M", "K", f32], y: Tensor["M", "N", f32]):
    """A block that a loop stores again and again, of rows that go over the edge."""
    t = tile.load(x[tile_m:tile_m + 8, 0:16])
    for n in range(0, N, 16):
        y[tile_m:tile_m + 8, n:n + 16] = t * t


PROGRAMS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "swiglu": (swiglu, [(37, 70), (37, 70)]),
    "rms": (written(rms, 37, 70), [(37, 70), (70,)]),
    "softmax": (written(softmax, 37, 70), [(37, 70)]),
    "spanned": (lambda x: written(spanned, 37)(x, ts.tensor(SPANS)), [(37, 30)]),
    "matmul": (written(matmul, 70, 90), [(70, 50), (90, 50)]),
    "attention": (written(attention, 70, 16), [(70, 16)] * 3),
    "mirrored": (written(mirrored, 300), [(300,)]),
    "row_norms": (written(row_norms[5, 128], 5), [(5, 300)]),
    "combined": (written(combined, 6, 11), [(6, 11)] * 2),
    "centred": (written(centred[2, 3], 2, 5, 3, 4), [(2, 5, 3, 4)]),
    "leaky": (written(leaky, 300), [(300,)]),
    "staged": (written(staged, 37, 70), [(37, 70)]),
    "looked_up": (lambda t: written(looked_up, 40, 8)(t, ts.tensor(IDS)), [(50, 8)]),
    "lookups of a batch": (ts.vmap(lambda t: written(looked_up, 40, 8)(t, ts.tensor(IDS))),
                           [(3, 50, 8)]),
    "counted": (written(counted, 7), [(300,)]),
    "scaled": (lambda x, s: written(scaled, 100)(x, s[()]), [(100,), ()]),
    "accumulated": (product, [(100,), (100,)]),
    "causal": (written(causal, 50, 16), [(50, 16)] * 3),
    "gated": (written(gated, 9, 20), [(9, 20)] * 2),
    "recurrent": (written(recurrent, 6, 16), [(6, 16), (16, 16)]),
    "staged_matmul": (written(staged_matmul, 37, 50), [(37, 30), (30, 50)]),
    "ahead": (written(ahead, 21), [(21, 70)]),
    "bag": (lambda t: written(bag[5, 32], 5, 16)(t, ts.tensor(IDS[:20].reshape(5, 4))), [(50, 16)]),
    "peaks": (lambda x: peaked(x), [(60,)]),
    "paired": (written(paired[5, 64], 5, 40), [(5, 40)]),
    "added_at": (lambda x: written(added_at, 50)(x, ts.tensor(IDS)), [(40,)]),
    "butterflies": (written(butterflies[2, 16], 2, 64), [(2, 64)]),
    "columns_added": (written(columns_added, 13), [(13, 40)]),
    "repeated": (written(repeated, 13, 48), [(13, 16)]),
    "rows of a batch": (ts.vmap(swiglu), [(3, 20, 30), (3, 20, 30)]),
    "a batch of one": (lambda a, b: ts.vmap(lambda x: swiglu(x, b))(a), [(3, 20, 30), (20, 30)]),
    "batches of attention": (lambda x: ts.vmap(lambda q: written(attention, 33, 8)(q, q, q))(x),
                             [(2, 33, 8)]),
}
