"""A physics-informed network: u(x, t) that meets Burgers' equation u_t + u u_x = nu u_xx
(Raissi et al. 2019), by derivatives of derivatives at each point."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE, NU = 0.05, 0.02


def parameters(rng, h=16):
    return [{"w": weight(rng, a, b), "b": zeros(b)} for a, b in ((2, h), (h, h), (h, 1))]


def batch(rng, points=32):
    inside = rng.uniform(-1, 1, (points, 2)).astype(np.float32)
    start = np.stack([np.linspace(-1, 1, 16), np.zeros(16)], 1).astype(np.float32)
    return inside, start, (-np.sin(np.pi * start[:, 0])).astype(np.float32)


def u(p, x, t):
    h = ts.stack([x, t])
    for q in p[:-1]:
        h = ts.tanh(h @ q["w"] + q["b"])
    return (h @ p[-1]["w"] + p[-1]["b"])[0]


def residual(p, x, t):
    u_x = ts.grad(u, argnums=1)
    u_t = ts.grad(u, argnums=2)(p, x, t)
    u_xx = ts.grad(u_x, argnums=1)(p, x, t)
    return u_t + u(p, x, t) * u_x(p, x, t) - NU * u_xx


def loss(p, inside, start, want):
    inner = ts.vmap(lambda x, t: residual(p, x, t))(inside[:, 0], inside[:, 1])
    first = ts.vmap(lambda x, t: u(p, x, t))(start[:, 0], start[:, 1])
    return ts.mean(ts.square(inner)) + ts.mean(ts.square(first - want))


def torch_loss(torch, p, inside, start, want):
    def u(xt):
        for q in p[:-1]:
            xt = torch.tanh(xt @ q["w"] + q["b"])
        return (xt @ p[-1]["w"] + p[-1]["b"])[:, 0]

    x = inside.detach().requires_grad_()
    y = u(x)
    first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0][:, 0]
    inner = first[:, 1] + y * first[:, 0] - NU * second
    return (inner**2).mean() + ((u(start) - want) ** 2).mean()
