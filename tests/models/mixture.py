"""A block of experts with top-k routing: each token goes to two experts, which hold `room` of them
(Shazeer et al. 2017, arXiv:1701.06538; slots by the running count of Lepikhin et al. 2020)."""

from __future__ import annotations

import tessera as ts

from .training import weight, zeros

RATE, K, ROOM = 0.3, 2, 12


def parameters(rng, d=16, experts=4, width=32):
    return {"router": weight(rng, d, experts), "up": weight(rng, experts, d, width, fan=d),
            "down": weight(rng, experts, width, d, fan=width), "bias": zeros(d)}


def batch(rng, tokens=24, d=16):
    return weight(rng, tokens, d, fan=1), weight(rng, tokens, d, fan=1)


def loss(p, x, y, kind="f32"):
    N, E = x.shape[0], p["router"].shape[1]
    gates = ts.softmax(x @ p["router"])                             # [N, E]
    best, ids = ts.top_k(gates, K)                                  # [N, K]
    best = best / ts.sum(best, axis=-1, keepdims=True)
    chosen = ts.one_hot(ids.reshape(-1), E, x.dtype)                      # [N K, E]
    slot = ts.sum((ts.cumsum(chosen, axis=0) - 1) * chosen, axis=1)  # its place in its expert
    fits = slot < ROOM
    place = ts.where(fits, ids.reshape(-1) * ROOM + ts.cast(slot, "int64"), E * ROOM)
    rows = ts.repeat(x, K, axis=0)                                  # [N K, d]
    sent = ts.segment_sum(rows, place, E * ROOM + 1)[:-1].reshape(E, ROOM, -1)
    h = ts.gelu(ts.cast(sent, kind) @ ts.cast(p["up"], kind))       # [E, ROOM, width]
    out = ts.cast(h @ ts.cast(p["down"], kind), x.dtype).reshape(E * ROOM, -1)
    back = ts.where(fits[:, None], ts.take(out, ts.where(fits, place, 0)), 0.0)
    made = ts.sum(back.reshape(N, K, -1) * best[:, :, None], axis=1) + p["bias"]
    balance = E * ts.sum(ts.mean(chosen, axis=0) * ts.mean(gates, axis=0))
    return ts.mean(ts.square(made - y)) + 0.01 * balance


def torch_loss(torch, p, x, y):
    gates = torch.softmax(x @ p["router"], -1)
    best, ids = torch.topk(gates, K)
    best = best / best.sum(-1, keepdim=True)
    E = gates.shape[1]
    chosen = torch.nn.functional.one_hot(ids.flatten(), E).float()
    slot = ((chosen.cumsum(0) - 1) * chosen).sum(1)
    fits = (slot < ROOM).reshape(ids.shape)
    h = torch.nn.functional.gelu(torch.einsum("nd,edf->nef", x, p["up"]), approximate="tanh")
    every = torch.einsum("nef,efd->ned", h, p["down"])
    picked = torch.take_along_dim(every, ids[:, :, None], 1)
    made = (picked * (best * fits)[:, :, None]).sum(1) + p["bias"]
    balance = E * (chosen.mean(0) * gates.mean(0)).sum()
    return ((made - y) ** 2).mean() + 0.01 * balance
