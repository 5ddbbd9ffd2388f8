"""A GRU over a sequence by scan (Cho et al. 2014, arXiv:1406.1078), with the gates of PyTorch."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE = 0.3


def parameters(rng, d=6, h=16, classes=3):
    return {"w": weight(rng, d, 3 * h), "u": weight(rng, h, 3 * h), "bw": zeros(3 * h),
            "bu": zeros(3 * h), "head": weight(rng, h, classes)}


def batch(rng, T=10, B=4, d=6, classes=3):
    return weight(rng, T, B, d, fan=1), rng.integers(0, classes, B).astype(np.int32)


def cell(p, h, x):
    r, z, n = ts.split(x @ p["w"] + p["bw"], 3, axis=-1)
    rh, zh, nh = ts.split(h @ p["u"] + p["bu"], 3, axis=-1)
    r, z = ts.sigmoid(r + rh), ts.sigmoid(z + zh)
    return (1 - z) * ts.tanh(n + r * nh) + z * h


def loss(p, xs, labels):
    def step(h, x):
        h = cell(p, h, x)
        return h, h

    start = ts.zeros((xs.shape[1], p["u"].shape[0]), xs.dtype)
    last, every = ts.scan(step, start, xs)
    return ts.cross_entropy((last + ts.mean(every, axis=0)) @ p["head"], labels)


def torch_loss(torch, p, xs, labels):
    h, every = xs.new_zeros(xs.shape[1], p["u"].shape[0]), []
    for x in xs:
        r, z, n = (x @ p["w"] + p["bw"]).chunk(3, -1)
        rh, zh, nh = (h @ p["u"] + p["bu"]).chunk(3, -1)
        r, z = torch.sigmoid(r + rh), torch.sigmoid(z + zh)
        h = (1 - z) * torch.tanh(n + r * nh) + z * h
        every.append(h)
    return torch.nn.functional.cross_entropy(
        (h + torch.stack(every).mean(0)) @ p["head"], labels.long())
