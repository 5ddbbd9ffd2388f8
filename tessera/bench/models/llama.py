"""A decoder as Llama's: rmsnorm, rotary positions, heads that share keys, swiglu, no biases. The
extents are those of Llama 3.2 1B, with a vocabulary of 32768."""

from __future__ import annotations

from typing import Any

import tessera as ts

from .record import ModelFamily, StepModel, register

BF16 = "bf16 @accum(f32)"
BASE = 500000.0  # of the rotary positions


def shapes(m: StepModel) -> Any:
    d, shared = m.d, m.kv_heads * (m.d // m.heads)
    one = {"norm1": (d,), "q": (d, d), "k": (d, shared), "v": (d, shared), "out": (d, d),
           "norm2": (d,), "gate": (d, m.hidden), "up": (d, m.hidden), "down": (m.hidden, d)}
    return {"table": (m.vocabulary, d), "layers": [dict(one) for _ in range(m.layers)],
            "norm": (d,)}


def heads(x: Any, n: int) -> Any:
    """[B, T, n D] -> [B, n, T, D]"""
    B, T, width = x.shape
    return ts.transpose(ts.reshape(x, (B, T, n, width // n)), (0, 2, 1, 3))


def attention(x: Any, p: dict, m: StepModel) -> Any:
    B, T, d = x.shape
    q = heads(x @ ts.cast(p["q"], BF16), m.heads)
    k = heads(x @ ts.cast(p["k"], BF16), m.kv_heads)
    v = heads(x @ ts.cast(p["v"], BF16), m.kv_heads)
    q = ts.rotary_embedding(q, BASE)
    k = ts.rotary_embedding(k, BASE)
    y = ts.attention(q, k, v, causal=True)
    y = ts.reshape(ts.transpose(y, (0, 2, 1, 3)), (B, T, d))
    return y @ ts.cast(p["out"], BF16)


def feed_forward(x: Any, p: dict) -> Any:
    gate = x @ ts.cast(p["gate"], BF16)
    up = x @ ts.cast(p["up"], BF16)
    h = ts.silu(gate) * up
    return h @ ts.cast(p["down"], BF16)


def layer(x: Any, p: dict, m: StepModel) -> Any:
    h = ts.rmsnorm(x, p["norm1"])
    x = x + ts.cast(attention(ts.cast(h, BF16), p, m), "f32")
    h = ts.rmsnorm(x, p["norm2"])
    return x + ts.cast(feed_forward(ts.cast(h, BF16), p), "f32")


def loss(p: dict, tokens: Any, targets: Any, m: StepModel) -> Any:
    x = ts.embedding(p["table"], tokens)
    for weights in p["layers"]:
        x = layer(x, weights, m)
    x = ts.rmsnorm(x, p["norm"])
    logits = ts.cast(x, BF16) @ ts.transpose(ts.cast(p["table"], BF16))
    return ts.cross_entropy(ts.cast(logits, "f32"), targets)


def weights_per_token(m: StepModel) -> int:
    shared = m.kv_heads * (m.d // m.heads)
    return m.layers * m.d * (2 * m.d + 2 * shared + 3 * m.hidden) + m.vocabulary * m.d


LLAMA = ModelFamily("llama", shapes, loss, weights_per_token)
register(StepModel("llama", LLAMA, 4, 2048, 16, 2048, 32, 32768, kv_heads=8, hidden=8192))

__all__ = ["LLAMA"]
