"""A graph network: messages along edges, summed at their targets (Battaglia et al. 2018,
arXiv:1806.01261); attention over the edges of a node by a softmax of segments."""

from __future__ import annotations

import numpy as np

import tessera as ts

from .training import weight, zeros

RATE = 0.1


def parameters(rng, d=8, h=16):
    return {"in": weight(rng, d, h),
            "layers": [{"message": weight(rng, 2 * h, h), "mb": zeros(h), "score": weight(rng, h),
                        "update": weight(rng, 2 * h, h), "ub": zeros(h)} for _ in range(2)],
            "out": weight(rng, h, 1)}


def batch(rng, nodes=12, edges=40, d=8):
    senders, receivers = rng.integers(0, nodes, (2, edges)).astype(np.int32)
    return weight(rng, nodes, d, fan=1), senders, receivers, weight(rng, nodes, 1, fan=1)


def layer(x, senders, receivers, p):
    N = x.shape[0]
    pair = ts.concatenate([ts.take(x, senders), ts.take(x, receivers)], axis=1)
    m = ts.tanh(pair @ p["message"] + p["mb"])                       # [edges, h]
    score = m @ p["score"]
    score = ts.exp(score - ts.take(ts.segment_max(ts.stop_gradient(score), receivers, N),
                                   receivers))
    share = score / ts.take(ts.segment_sum(score, receivers, N), receivers)
    total = ts.segment_sum(m * share[:, None], receivers, N)
    return x + ts.relu(ts.concatenate([x, total], axis=1) @ p["update"] + p["ub"])


def loss(p, x, senders, receivers, y):
    x = x @ p["in"]
    for q in p["layers"]:
        x = layer(x, senders, receivers, q)
    return ts.mean(ts.square(x @ p["out"] - y))


def torch_loss(torch, p, x, senders, receivers, y):
    s, r = senders.long(), receivers.long()
    x = x @ p["in"]
    for q in p["layers"]:
        m = torch.tanh(torch.cat([x[s], x[r]], 1) @ q["message"] + q["mb"])
        score = torch.exp(m @ q["score"])
        share = score / torch.zeros(len(x), device=x.device).index_add(0, r, score)[r]
        total = torch.zeros_like(x).index_add(0, r, m * share[:, None])
        x = x + torch.relu(torch.cat([x, total], 1) @ q["update"] + q["ub"])
    return ((x @ p["out"] - y) ** 2).mean()
