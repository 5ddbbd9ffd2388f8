"""A contrastive loss (van den Oord et al. 2018, arXiv:1807.03748) whose gradient is clipped for
each example (Abadi et al. 2016, arXiv:1607.00133)."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE, MOST, COLD = 0.5, 1.0, 0.2


def parameters(rng, d=12, h=16, e=8):
    return {"w1": weight(rng, d, h), "b1": zeros(h), "w2": weight(rng, h, e)}


def batch(rng, B=8, d=12):
    x = weight(rng, B, d, fan=1)
    return x, x + 0.3 * weight(rng, B, d, fan=1), np.arange(B, dtype=np.int32)


def embed(p, x):
    y = ts.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
    return y * ts.rsqrt(ts.sum(y * y, axis=-1, keepdims=True) + 1e-6)


def example(p, x, others, own):
    """Of one example: x [d], its partner others[own]."""
    return ts.cross_entropy((embed(p, others) @ embed(p, x) / COLD)[None], own[None])


def loss(p, x, y, own):
    return ts.mean(ts.vmap(lambda a, i: example(p, a, y, i))(x, own))


def gradients(p, x, y, own):
    each = ts.vmap(lambda a, i: ts.value_and_grad(lambda p: example(p, a, y, i))(p))
    values, grads = each(x, own)
    norm = ts.sqrt(sum(ts.sum(ts.square(g).reshape(g.shape[0], -1), axis=1)
                       for g in grads.values()))
    scale = ts.minimum(1.0, MOST / norm)
    return ts.mean(values), {n: ts.mean(g * scale.reshape(-1, *(1,) * (g.ndim - 1)), axis=0)
                             for n, g in grads.items()}


def torch_gradients(torch, p, flat, x, y, own):
    def embed(x):
        y = torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
        return y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6)

    values, clipped = [], []
    for a, i in zip(x, own.long(), strict=True):
        value = torch.nn.functional.cross_entropy((embed(y) @ embed(a) / COLD)[None], i[None])
        grads = torch.autograd.grad(value, flat)
        norm = torch.sqrt(sum((g**2).sum() for g in grads))
        values.append(value.detach())
        clipped.append([g * torch.clamp(MOST / norm, max=1.0) for g in grads])
    return torch.stack(values).mean(), [torch.stack(g).mean(0) for g in zip(*clipped, strict=True)]
