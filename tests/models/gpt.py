"""GPT: embedding, causal attention, MLP, tied vocabulary (Radford et al. 2019)."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import ones, weight, zeros

RATE, HEADS = 0.2, 2


def parameters(rng, vocabulary=40, T=16, d=32, layers=2):
    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    blocks = [{**{n: weight(rng, *s) for n, s in sizes.items()},
               **{n + "_b": zeros(s[1]) for n, s in sizes.items()},
               "g1": ones(d), "b1": zeros(d), "g2": ones(d), "b2": zeros(d)} for _ in range(layers)]
    return {"table": weight(rng, vocabulary, d), "positions": weight(rng, T, d, fan=100),
            "layers": blocks, "g": ones(d), "b": zeros(d)}


def batch(rng, B=2, T=16, vocabulary=40):
    tokens = rng.integers(0, vocabulary, (B, T + 1)).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def linear(x, p, name, kind):
    return ts.cast(x, kind) @ ts.cast(p[name], kind) + ts.cast(p[name + "_b"], kind)


def layer(x, p, kind):
    B, T, d = x.shape
    h = linear(ts.layernorm(x, p["g1"], p["b1"]), p, "qkv", kind)
    q, k, v = (t.reshape(B, T, HEADS, d // HEADS).transpose(0, 2, 1, 3)
               for t in ts.split(h, 3, axis=-1))
    y = ts.attention(q, k, v, causal=True).transpose(0, 2, 1, 3).reshape(B, T, d)
    x = x + ts.cast(linear(y, p, "out", kind), x.dtype)
    h = ts.gelu(linear(ts.layernorm(x, p["g2"], p["b2"]), p, "up", kind))
    return x + ts.cast(linear(h, p, "down", kind), x.dtype)


def loss(p, tokens, targets, kind="f32"):
    x = ts.embedding(p["table"], tokens) + p["positions"]
    for block in p["layers"]:
        x = layer(x, block, kind)
    x = ts.layernorm(x, p["g"], p["b"])
    logits = ts.cast(x, kind) @ ts.cast(p["table"], kind).T
    return ts.cross_entropy(ts.cast(logits, x.dtype), targets)


def torch_loss(torch, p, tokens, targets):
    F = torch.nn.functional
    B, T = tokens.shape
    x = p["table"][tokens.long()] + p["positions"]
    d = x.shape[-1]
    for q in p["layers"]:
        h = F.layer_norm(x, (d,), q["g1"], q["b1"]) @ q["qkv"] + q["qkv_b"]
        heads = (t.reshape(B, T, HEADS, d // HEADS).transpose(1, 2) for t in h.split(d, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + y.transpose(1, 2).reshape(B, T, d) @ q["out"] + q["out_b"]
        h = F.gelu(F.layer_norm(x, (d,), q["g2"], q["b2"]) @ q["up"] + q["up_b"],
                   approximate="tanh")
        x = x + h @ q["down"] + q["down_b"]
    logits = F.layer_norm(x, (d,), p["g"], p["b"]) @ p["table"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())
