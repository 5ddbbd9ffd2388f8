"""A Fourier neural operator: the lowest frequencies are mixed by complex weights
(Li et al. 2020, arXiv:2010.08895)."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE, MODES = 0.1, 5


def parameters(rng, d=8):
    return {"in": weight(rng, 2, d), "out": weight(rng, d, 1),
            "layers": [{"re": weight(rng, MODES, d, d, fan=d),
                        "im": weight(rng, MODES, d, d, fan=d),
                        "w": weight(rng, d, d), "b": zeros(d)} for _ in range(2)]}


def batch(rng, B=3, N=24):
    grid = np.linspace(0, 1, N, endpoint=False)
    a = sum(rng.standard_normal((B, 1)) * np.sin(2 * np.pi * k * grid) for k in (1, 2, 3))
    x = np.stack([a, np.broadcast_to(grid, a.shape)], -1).astype(np.float32)
    return x, np.roll(a, 3, axis=1)[..., None].astype(np.float32)


def mix(x, p):
    N = x.shape[1]
    re, im = (f[:, :MODES] for f in ts.rfft(x, axis=1))              # [B, MODES, d]
    up = ts.einsum("bkd,kde->bke", re, p["re"]) - ts.einsum("bkd,kde->bke", im, p["im"])
    low = ts.einsum("bkd,kde->bke", re, p["im"]) + ts.einsum("bkd,kde->bke", im, p["re"])
    rest = ((0, 0), (0, N // 2 + 1 - MODES), (0, 0))
    return ts.irfft((ts.pad(up, rest), ts.pad(low, rest)), n=N, axis=1)


def loss(p, x, y):
    x = x @ p["in"]
    for q in p["layers"]:
        x = ts.gelu(mix(x, q) + x @ q["w"] + q["b"])
    return ts.mean(ts.square(x @ p["out"] - y))


def torch_loss(torch, p, x, y):
    x = x @ p["in"]
    N = x.shape[1]
    for q in p["layers"]:
        f = torch.fft.rfft(x, dim=1)
        made = torch.einsum("bkd,kde->bke", f[:, :MODES], torch.complex(q["re"], q["im"]))
        full = torch.nn.functional.pad(made, (0, 0, 0, N // 2 + 1 - MODES))
        spread = torch.fft.irfft(full, n=N, dim=1)
        x = torch.nn.functional.gelu(spread + x @ q["w"] + q["b"], approximate="tanh")
    return ((x @ p["out"] - y) ** 2).mean()
