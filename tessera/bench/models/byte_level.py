"""The model of examples/train.py: a byte-level decoder with rmsnorm, rotary positions and gelu.
Gradients are clipped, as they are there. A test holds its loss to that of the example."""

from __future__ import annotations

from typing import Any

import tessera as ts

from .record import ModelFamily, StepModel, register

BF16 = "bf16"


def shapes(m: StepModel) -> Any:
    d, H = m.d, m.heads
    one = {"norm1": (d,), "qkv": (d, H, 3 * (d // H)), "out": (H, d // H, d), "norm2": (d,),
           "up": (d, 4 * d), "down": (4 * d, d)}
    return {"embedding": (m.vocabulary, d), "norm": (d,),
            "blocks": {str(i): dict(one) for i in range(m.layers)}}


def linear(x: Any, w: Any) -> Any:
    return ts.cast(ts.cast(x, BF16) @ ts.cast(w, BF16), "f32")


def attention(x: Any, p: dict, m: StepModel) -> Any:
    """x, y: [B T, d]"""
    d, H, D = m.d, m.heads, m.d // m.heads
    h = linear(x, ts.reshape(p["qkv"], (d, 3 * d)))
    parts = ts.reshape(h, (m.B, m.T, H, 3, D))
    q, k, v = (ts.swapaxes(parts[:, :, :, i], 1, 2) for i in range(3))
    q = ts.rotary_embedding(q)
    k = ts.rotary_embedding(k)
    q, k, v = (ts.cast(t, BF16) for t in (q, k, v))
    y = ts.attention(q, k, v, causal=True)
    y = ts.reshape(ts.merge_heads(y), (m.B * m.T, d))
    return linear(y, ts.reshape(p["out"], (d, d)))


def loss(p: dict, tokens: Any, targets: Any, m: StepModel) -> Any:
    x = ts.embedding(p["embedding"], ts.reshape(tokens, (m.B * m.T,)))
    for weights in p["blocks"].values():
        h = ts.rmsnorm(x, weights["norm1"])
        x = x + attention(h, weights, m)
        h = ts.rmsnorm(x, weights["norm2"])
        h = linear(h, weights["up"])
        h = ts.gelu(h)
        x = x + linear(h, weights["down"])
    x = ts.rmsnorm(x, p["norm"])
    logits = linear(x, p["embedding"].T)
    return ts.cross_entropy(logits, ts.reshape(targets, (m.B * m.T,)))


def weights_per_token(m: StepModel) -> int:
    return m.layers * 12 * m.d * m.d + m.vocabulary * m.d


BYTES = ModelFamily("bytes", shapes, loss, weights_per_token)
register(StepModel("train.py", BYTES, 8, 1024, 8, 1024, 8, 256, clip=1.0, eager=True))

__all__ = ["BYTES"]
