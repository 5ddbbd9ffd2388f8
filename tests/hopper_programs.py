"""Kernels that take the warp-specialised form, for tests with and without a compiler."""

from __future__ import annotations

import tessera as ts
from tessera import Tensor, bf16, f32


@ts.kernel
def gemm_nt(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", bf16],
            BM=128, BN=128, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[m:m + BM, k:k + BK])
        b = ts.tile.load(B[n:n + BN, k:k + BK])
        acc = ts.tile.dot(a, b.T, acc)
    C[m:m + BM, n:n + BN] = acc


@ts.kernel
def gemm_nn(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", bf16],
            BM=128, BN=128, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        acc = ts.tile.dot(ts.tile.load(A[m:m + BM, k:k + BK]),
                          ts.tile.load(B[k:k + BK, n:n + BN]), acc)
    C[m:m + BM, n:n + BN] = acc


@ts.kernel
def gemm_tn(A: Tensor["K", "M", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", bf16],
            BM=128, BN=128, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        acc = ts.tile.dot(ts.tile.load(A[k:k + BK, m:m + BM]).T,
                          ts.tile.load(B[k:k + BK, n:n + BN]), acc)
    C[m:m + BM, n:n + BN] = acc


@ts.kernel
def two_gemms(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], X: Tensor["S", "M", bf16],
              W: Tensor["S", "N", bf16], C: Tensor["M", "N", bf16], BM=128, BN=128, BK=64):
    """A B' + X' W: two loops, one after the other, into the same sums."""
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        acc = ts.tile.dot(ts.tile.load(A[m:m + BM, k:k + BK]),
                          ts.tile.load(B[n:n + BN, k:k + BK]).T, acc)
    for s in range(0, S, BK):
        acc = ts.tile.dot(ts.tile.load(X[s:s + BK, m:m + BM]).T,
                          ts.tile.load(W[s:s + BK, n:n + BN]), acc)
    C[m:m + BM, n:n + BN] = acc


@ts.kernel
def normalised(X: Tensor["M", "K"], V: Tensor["K", bf16], W: Tensor["K", "N", bf16],
               Y: Tensor["M", "N", bf16], BM=128, BN=256, BK=64):
    """Rows divided by their root mean square and multiplied by a gain, times a matrix."""
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    squares, acc = ts.tile.zeros((BM,)), ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        x = ts.tile.cast(ts.tile.load(X[m:m + BM, k:k + BK]), f32)
        squares += ts.tile.row_sum(x * x)
    scale = ts.tile.rsqrt(squares / K + 1e-5)
    for k in range(0, K, BK):
        x = ts.tile.load(X[m:m + BM, k:k + BK]) * scale[:, None]
        x = x * ts.tile.load(V[k:k + BK])[None, :]
        acc += ts.tile.cast(x, bf16) @ ts.tile.load(W[k:k + BK, n:n + BN])
    Y[m:m + BM, n:n + BN] = acc


@ts.kernel
def kept_sums(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], R: Tensor["M", "N", bf16],
              C: Tensor["M", "N", f32], V: Tensor["M", "N", ts.bool_],
              Y: Tensor["M", "N", bf16], BM=128, BN=64, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    total = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        total = ts.tile.dot(ts.tile.load(A[m:m + BM, k:k + BK]),
                            ts.tile.load(B[k:k + BK, n:n + BN]), total)
    total = total + ts.tile.load(R[m:m + BM, n:n + BN]) * ts.tile.load(C[m:m + BM, n:n + BN])
    Y[m:m + BM, n:n + BN] = ts.tile.where(ts.tile.load(V[m:m + BM, n:n + BN]), total, 0.0)


@ts.kernel
def swiglu(X: Tensor["M", "K", bf16], W: Tensor["N", "K", bf16], V: Tensor["N", "K", bf16],
           bias: Tensor["N", f32], R: Tensor["M", "N", bf16], Y: Tensor["M", "N", bf16],
           BM=128, BN=64, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    gate, up = ts.tile.zeros((BM, BN)), ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        x = ts.tile.load(X[m:m + BM, k:k + BK])
        gate = ts.tile.dot(x, ts.tile.load(W[n:n + BN, k:k + BK]).T, gate)
        up = ts.tile.dot(x, ts.tile.load(V[n:n + BN, k:k + BK]).T, up)
    b = ts.tile.load(bias[n:n + BN])
    r = ts.tile.load(R[m:m + BM, n:n + BN])
    Y[m:m + BM, n:n + BN] = gate * ts.tile.sigmoid(gate) * (up + b[None, :]) + r


@ts.kernel
def attention(Q: Tensor["B", "S", "D", bf16], K: Tensor["H", "S", "D", bf16],
              V: Tensor["H", "S", "D", bf16], Y: Tensor["B", "S", "D", bf16], scale: f32,
              BM=128, BN=128, causal=False, slack=8.0, shared=1):
    h, q0 = ts.tile.group_id(1), ts.tile.group_id(0) * BM
    q = ts.tile.load(Q[h, q0:q0 + BM, :])
    m, l = ts.tile.full((BM,), -float("inf")), ts.tile.zeros((BM,))  # noqa: E741
    o = ts.tile.zeros((BM, D))
    for k0 in range(0, min(S, q0 + BM) if causal else S, BN):
        k = ts.tile.load(K[h // shared, k0:k0 + BN, :])
        s = ts.tile.dot(q, k.T)
        s = ts.tile.causal_mask(s, q0, k0) if causal else s
        m_new = ts.tile.running_max(m, ts.tile.row_max(s) * scale, slack)
        alpha, p = ts.tile.exp2(m - m_new), ts.tile.exp2(s * scale - m_new)
        l = l * alpha + ts.tile.row_sum(p)  # noqa: E741
        v = ts.tile.load(V[h // shared, k0:k0 + BN, :])
        o = ts.tile.dot(p, v, o * alpha)
        m = m_new
    Y[h, q0:q0 + BM, :] = o / l


@ts.kernel
def window(Q: Tensor["S", 128, bf16], K: Tensor["S", 128, bf16], V: Tensor["S", 128, bf16],
           Y: Tensor["S", 128, bf16], first: ts.i32, last: ts.i32):
    """Keys first .. last only: perhaps none, and an early exit decided by the tile."""
    q0 = ts.tile.group_id(0) * 64
    q = ts.tile.load(Q[q0:q0 + 64, :])
    l, o = ts.tile.zeros((64,)), ts.tile.zeros((64, 128))  # noqa: E741
    if q0 < last:
        for k0 in range(first, last, 64):
            s = ts.tile.dot(q, ts.tile.load(K[k0:k0 + 64, :]).T) * 0.1
            p = ts.tile.exp2(s)
            l = l * 0.5 + ts.tile.row_sum(p)  # noqa: E741
            o = ts.tile.dot(p, ts.tile.load(V[k0:k0 + 64, :]), o * 0.5)
    Y[q0:q0 + 64, :] = o / l


@ts.kernel
def accumulated(Q: Tensor["S", 64, bf16], K: Tensor["S", 64, bf16], V: Tensor["S", 64, bf16],
                Y: Tensor["S", 64, bf16]):
    """What the loop carries is made of its second matmul, and is no matmul."""
    q0 = ts.tile.group_id(0) * 64
    q = ts.tile.load(Q[q0:q0 + 64, :])
    o = ts.tile.zeros((64, 64))
    m, l = ts.tile.full((64,), -float("inf")), ts.tile.zeros((64,))  # noqa: E741
    for k0 in range(0, S, 64):
        s = ts.tile.dot(q, ts.tile.load(K[k0:k0 + 64, :]).T) * 0.125
        p, m_c, l_c = ts.tile.softmax_online(s)
        v = ts.tile.load(V[k0:k0 + 64, :])
        o, m, l = ts.tile.softmax_accumulate(o, m, l, p, v, m_c, l_c)  # noqa: E741
    Y[q0:q0 + 64, :] = o / l


@ts.kernel
def batched(A: Tensor["B", "M", "K", bf16], B: Tensor["N", "K", bf16],
            Y: Tensor["B", "M", "N", bf16]):
    b, m, n = ts.tile.group_id(0), ts.tile.group_id(1) * 256, ts.tile.group_id(2) * 64
    acc = ts.tile.zeros((256, 64))
    for k in range(0, K, 64):
        acc = ts.tile.dot(ts.tile.load(A[b, m:m + 256, k:k + 64]),
                          ts.tile.load(B[n:n + 64, k:k + 64]).T, acc)
    Y[b, m:m + 256, n:n + 64] = acc


@ts.kernel
def matmul(A: Tensor["M", "K"], B: Tensor["N", "K"], C: Tensor["M", "N"], BM=128, BN=128,
           BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    a, b = ts.tile.load(A[m:m + BM, 0:BK]), ts.tile.load(B[n:n + BN, 0:BK])
    acc = ts.tile.dot(a, b.T)
    for k in range(BK, K, BK):
        a, b = ts.tile.load(A[m:m + BM, k:k + BK]), ts.tile.load(B[n:n + BN, k:k + BK])
        acc = ts.tile.dot(a, b.T, acc)
    C[m:m + BM, n:n + BN] = acc
