"""Programs with a bad value somewhere, and programs in which bad values are meant or masked."""

from __future__ import annotations

import numpy as np

import tessera as ts

SHAPE = (64, 96)  # large enough for compiled loops


def positive(rng, *shape):
    return ts.tensor(rng.uniform(0.5, 2.0, shape or SHAPE).astype(np.float32))


def spoiled(x, value, at=(3, 5)):
    y = x.copy()
    y[at] = value
    return y


# A function, and the element that makes it go wrong.
CASES = {
    "log": (lambda x: ts.sum(ts.log(x - 0.25) * 3.0), -1.0),
    "hidden by a division": (lambda x: 1.0 / ts.exp(x * 100.0), 50.0),
    "hidden by a comparison": (lambda x: ts.cast(ts.log(x) < 1.0, "f32"), -1.0),
    "hidden by rsqrt": (lambda x: ts.rsqrt(ts.exp(x * 100.0)) + x, 50.0),
    "hidden inside a sum": (lambda x: ts.sum(ts.rsqrt(ts.exp(x * 100.0)), axis=-1), 50.0),
    "hidden in a count": (lambda x: ts.sum(ts.cast(ts.log(x) < 1.0, "f32"), axis=-1), -1.0),
    "through a product": (lambda x: ts.tanh(ts.sqrt(x) @ ts.ones((96, 64))), -1.0),
    "a sum over rows": (lambda x: ts.sum(ts.exp(x * 60.0), 0), 50.0),
    "a softmax": (lambda x: ts.softmax(x * 1e38 * 1e38), 2.0),
    "a gradient": (ts.grad(lambda x: ts.sum(ts.sqrt(x - x) * x)), 1.0),
    "data": (lambda x: ts.sum(x * 2.0), np.nan),
    "in the body of a scan": (
        lambda x: ts.scan(lambda c, r: (c + ts.log(r), c), ts.zeros(96), x)[0], -1.0),
    "a constant": (lambda x: x + ts.log(ts.full(SHAPE, -1.0)), 1.0),
}


def attention(q, k, v):
    mask = ts.tensor(np.tril(np.ones((64, 64), bool)))
    scores = ts.where(mask, (q @ k.T) * 0.1, -np.inf)
    return ts.softmax_safe(scores) @ v


QUIET = {
    "masked attention": lambda x: attention(x, x, x),
    "its gradient": ts.grad(lambda x: ts.sum(attention(x, x, x) ** 2)),
    "attention": lambda x: ts.attention(x[None, None], x[None, None], x[None, None], causal=True),
    "in bf16": lambda x: attention(*[ts.cast(x, "bf16")] * 3),
    "dropout": lambda x: ts.random.dropout(ts.tanh(x), 0.3),
    "a branch not chosen": lambda x: ts.where(x > 1.0, ts.log(x - 1.0), 0.0) + x,
    "a maximum of logs": lambda x: ts.maximum(ts.log(x - x), -5.0) * x,
    "logsumexp": lambda x: ts.logsumexp(ts.where(x > 5.0, x, -np.inf)),
    "cross entropy": lambda x: ts.cross_entropy(x, ts.zeros((64,), "int64")),
    "a loop": lambda x: ts.scan(lambda c, r: (ts.tanh(c + r), c), ts.zeros(96), x)[0],
}
