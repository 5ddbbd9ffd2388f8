"""A variational autoencoder: the latent is drawn by a key that is data
(Kingma and Welling 2013, arXiv:1312.6114)."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE, LATENT = 0.1, 4


def parameters(rng, d=20, h=16):
    return {"e1": weight(rng, d, h), "e1b": zeros(h), "e2": weight(rng, h, 2 * LATENT),
            "d1": weight(rng, LATENT, h), "d1b": zeros(h), "d2": weight(rng, h, d), "d2b": zeros(d)}


def batch(rng, B=8, d=20):
    return (rng.random((B, d)) < 0.3).astype(np.float32), np.array([7, 11], np.uint32)


def loss(p, x, key):
    h = ts.relu(x @ p["e1"] + p["e1b"])
    mean, log_var = ts.split(h @ p["e2"], 2, axis=-1)
    noise = ts.random.normal(mean.shape, dtype=mean.dtype, key=ts.fold_in(key, 3))
    z = mean + ts.exp(0.5 * log_var) * noise
    logits = ts.relu(z @ p["d1"] + p["d1b"]) @ p["d2"] + p["d2b"]
    fit = ts.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.shape[0]
    kl = -0.5 * ts.mean(ts.sum(1 + log_var - ts.square(mean) - ts.exp(log_var), axis=1))
    return 0.1 * (fit + kl)


def torch_loss(torch, p, x, key):
    drawn = ts.random.normal((len(x), LATENT), key=ts.fold_in(ts.tensor(key.cpu().numpy()), 3))
    noise = torch.tensor(drawn.numpy(), device=x.device)
    h = torch.relu(x @ p["e1"] + p["e1b"])
    mean, log_var = (h @ p["e2"]).chunk(2, -1)
    z = mean + torch.exp(0.5 * log_var) * noise
    logits = torch.relu(z @ p["d1"] + p["d1b"]) @ p["d2"] + p["d2b"]
    fit = torch.nn.functional.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    return 0.1 * (fit - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean())
