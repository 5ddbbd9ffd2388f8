"""Keys and bits of many keys at once: what ts.vmap makes of draws by the keys of its rows.

A GPU computes them elementwise in 64-bit integers, the ten rounds of Philox4x32 of
numerics/philox.py, so that the keys of a thousand rows are one loop and not a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...numerics import as_type, fold_in_each, philox, random_bits_of_keys
from ...tensor import Tensor
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..operand import convert
from ..trace import apply
from .gather import stretch

LOW = 0xFFFFFFFF
U32, INT64 = as_type("uint32"), as_type("int64")
KEYS = Arg((3, 2), "key", False)


def _philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The four words of each counter, all in int64; products are right modulo 2^64."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(philox.ROUNDS):
        p, q = a * philox.FACTOR_0, c * philox.FACTOR_1
        a, b, c, d = (((q >> 32) & LOW) ^ b ^ k0, q & LOW, ((p >> 32) & LOW) ^ d ^ k1, p & LOW)
        k0, k1 = (k0 + philox.WEYL_0) & LOW, (k1 + philox.WEYL_1) & LOW
    return a, b, c, d


def _columns(keys: Tensor) -> list[Tensor]:
    """The two words of each key, int64 [N, 1]."""
    return [convert(word, INT64) for word in F.split(keys, 2, axis=1)]


def _fold_steps(keys: Tensor, data: Tensor) -> Tensor:
    key = _columns(keys)
    zero = key[0] * 0
    number = F.expand_dims(convert(data, INT64), 1) & LOW
    a, b, _, _ = _philox((number, zero, zero + philox.FOLD_DOMAIN, zero), key)
    return convert(F.concatenate([a, b], axis=1), U32)


def _merged(size: Any, batched: bool, x: Tensor) -> Tensor:
    """The batch and the rows of x as one axis."""
    x = stretch(x, size, batched)
    return F.reshape(x, (size * x.shape[1], *x.shape[2:]))


def _fold_batch(size: Any, batched: tuple, keys: Tensor, data: Tensor) -> tuple:
    rows = data.shape[-1]
    merged = _merged(size, batched[0], keys), _merged(size, batched[1], data)
    made = apply(FOLD_IN_EACH, *merged)
    return F.reshape(made, (size, rows, 2)), True


FOLD_IN_EACH = GraphOp(
    "fold_in_each",
    shape=lambda keys, data: Aval((data.shape[0], 2), U32),
    ref=lambda keys, data: fold_in_each(keys, data.astype(np.int64) & LOW),
    batch=_fold_batch,
    expand_gpu=_fold_steps,
    axes="r_,r->r_",
    differentiable=False,
    samples=(Sample((KEYS, Arg((3,), "int", False))),),
    doc="a key derived from each key and its number",
)


def _bits_steps(keys: Tensor, shape: tuple) -> Tensor:
    key, index = _columns(keys), F.expand_dims(F.arange(prod(shape)), 0)
    block = (index >> 2) + key[0] * 0  # [N, n]
    a, b, c, d = _philox((block, block * 0, block * 0, block * 0), key)
    at = index & 3
    word = F.where(F.less(at, 2), F.where(F.equal(at, 0), a, b), F.where(F.equal(at, 2), c, d))
    return F.reshape(convert(word, U32), (keys.shape[0], *shape))


def _bits_batch(size: Any, batched: tuple, keys: Tensor, shape: tuple) -> tuple:
    made = apply(BITS_OF_KEYS, _merged(size, batched[0], keys), shape=shape)
    return F.reshape(made, (size, keys.shape[1], *shape)), True


BITS_OF_KEYS = GraphOp(
    "random_bits_of_keys",
    shape=lambda keys, shape: Aval((keys.shape[0], *shape), U32),
    ref=lambda keys, shape: random_bits_of_keys(
        keys, int(np.prod(shape, dtype=np.int64))).reshape(len(keys), *shape),
    batch=_bits_batch,
    expand_gpu=_bits_steps,
    axes=lambda keys, shape: f"r_->r{'_' * len(shape)}",
    differentiable=False,
    samples=(Sample((KEYS,), {"shape": (2, 3)}),),
    doc="the first random bits of each key's stream",
)


def fold_rows(size: Any, batched: tuple, key: Tensor, data: Tensor) -> tuple:
    """The batching rule of fold_in."""
    rows = stretch(key, size, batched[0]), stretch(data, size, batched[1])
    return apply(FOLD_IN_EACH, *rows), True


def bits_rows(size: Any, batched: tuple, key: Tensor, shape: tuple) -> tuple:
    """The batching rule of random_bits."""
    return apply(BITS_OF_KEYS, key, shape=shape), True


__all__ = ["BITS_OF_KEYS", "FOLD_IN_EACH", "bits_rows", "fold_rows"]
