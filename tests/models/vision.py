"""A vision transformer: patches by a strided convolution, a class token, attention
(Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import ones, weight, zeros

RATE, HEADS, PATCH = 0.1, 2, 4


def parameters(rng, d=16, classes=5, size=16, layers=2):
    tokens = (size // PATCH) ** 2 + 1
    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 2 * d), "down": (2 * d, d)}
    return {"patch": weight(rng, d, 3, PATCH, PATCH, fan=3 * PATCH**2), "patch_b": zeros(d),
            "class": weight(rng, 1, 1, d), "positions": weight(rng, tokens, d, fan=25),
            "layers": [{n: weight(rng, *s) for n, s in sizes.items()} | {
                "g1": ones(d), "b1": zeros(d), "g2": ones(d), "b2": zeros(d)}
                for _ in range(layers)],
            "head": weight(rng, d, classes)}


def batch(rng, B=4, size=16, classes=5):
    return (weight(rng, B, 3, size, size, fan=1), rng.integers(0, classes, B).astype(np.int32))


def loss(p, images, labels):
    x = ts.conv2d(images, p["patch"], p["patch_b"], stride=PATCH)   # [B, d, h, w]
    B, d = x.shape[:2]
    x = x.reshape(B, d, -1).transpose(0, 2, 1)
    x = ts.concatenate([ts.broadcast_to(p["class"], (B, 1, d)), x], axis=1) + p["positions"]
    for q in p["layers"]:
        h = ts.layernorm(x, q["g1"], q["b1"]) @ q["qkv"]
        heads = (t.reshape(B, -1, HEADS, d // HEADS).transpose(0, 2, 1, 3)
                 for t in ts.split(h, 3, axis=-1))
        x = x + ts.attention(*heads).transpose(0, 2, 1, 3).reshape(B, -1, d) @ q["out"]
        x = x + ts.gelu(ts.layernorm(x, q["g2"], q["b2"]) @ q["up"]) @ q["down"]
    return ts.cross_entropy(x[:, 0] @ p["head"], labels)


def torch_loss(torch, p, images, labels):
    F = torch.nn.functional
    x = F.conv2d(images, p["patch"], p["patch_b"], stride=PATCH)
    B, d = x.shape[:2]
    x = torch.cat([p["class"].expand(B, 1, d), x.flatten(2).transpose(1, 2)], 1) + p["positions"]
    for q in p["layers"]:
        h = F.layer_norm(x, (d,), q["g1"], q["b1"]) @ q["qkv"]
        heads = (t.reshape(B, -1, HEADS, d // HEADS).transpose(1, 2) for t in h.split(d, -1))
        y = F.scaled_dot_product_attention(*heads)
        x = x + y.transpose(1, 2).reshape(B, -1, d) @ q["out"]
        h = F.layer_norm(x, (d,), q["g2"], q["b2"]) @ q["up"]
        x = x + F.gelu(h, approximate="tanh") @ q["down"]
    return F.cross_entropy(x[:, 0] @ p["head"], labels.long())
