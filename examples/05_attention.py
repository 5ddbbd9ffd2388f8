"""Flash attention, forward, full and causal: O = softmax(Q K^T / sqrt(D)) V without the scores.

    python examples/05_attention.py [--device cuda]

Scores stay in base 2: `scale` holds log2(e) / sqrt(D), and exp2 is what the hardware has. The
running maximum may lag behind by up to `slack`; the result does not depend on it, since both the
sum `z` and the output `o` are relative to the same `m`, and rescaling `o` is mostly avoided.
"""

import math

import numpy as np

import tessera as ts
from tessera import Tensor, bf16, f32

Heads = Tensor["B", "S", "D", bf16]


@ts.kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def attention(Q: Heads, K: Heads, V: Heads, out: Heads, scale: f32,
              BM=128, BN=128, causal=False, slack=8.0):
    q0, h = ts.tile.group_id(0) * BM, ts.tile.group_id(1)
    q = ts.tile.load(Q[h, q0:q0+BM, :])
    m = ts.tile.full((BM,), -math.inf)
    z = ts.tile.zeros((BM,))
    o = ts.tile.zeros((BM, D))
    for k0 in range(0, min(S, q0 + BM) if causal else S, BN):
        k = ts.tile.load(K[h, k0:k0+BN, :])
        s = ts.tile.dot(q, k.T)
        s = ts.tile.causal_mask(s, q0, k0) if causal else s
        m_new = ts.tile.running_max(m, ts.tile.row_max(s) * scale, slack)
        alpha = ts.tile.exp2(m - m_new)
        p = ts.tile.exp2(s * scale - m_new)
        z = z * alpha + ts.tile.row_sum(p)
        v = ts.tile.load(V[h, k0:k0+BN, :])
        o = ts.tile.dot(p, v, o * alpha)       # p is rounded to bf16, as v is
        m = m_new
    out[h, q0:q0+BM, :] = o / z


def attention_f64(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    s = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    for B, S, D in ((2, 512, 128), (3, 200, 64)):
        q, k, v = (arrays.normal(B, S, D, dtype=bf16) for _ in range(3))
        for causal in (False, True):
            out = arrays.empty(B, S, D, dtype=bf16)
            attention(q, k, v, out, math.log2(math.e) / math.sqrt(D), causal=causal)
            want = attention_f64(*map(arrays.get, (q, k, v)), causal)
            check(f"attention, {'causal' if causal else 'full'}", out, want, 2**-6)


if __name__ == "__main__":
    main()
