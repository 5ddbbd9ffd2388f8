"""Keys and bits of many keys at once: what ts.vmap makes of draws by the keys of its rows.

A thousand chains or environments that draw by keys of their own are one node, and on a GPU one
kernel (graph/cuda/kernels/fold_keys.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics import as_type, fold_in_each, random_bits_of_keys
from ...tensor import Tensor
from .. import functions as F
from ..op import Arg, Aval, GraphOp, Sample
from ..trace import apply
from .gather import stretch

LOW = 0xFFFFFFFF
U32 = as_type("uint32")
KEYS = Arg((3, 2), "key", False)


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
    axes="r_,r->r_",
    differentiable=False,
    samples=(Sample((KEYS, Arg((3,), "int", False))),),
    doc="a key derived from each key and its number",
)


def _bits_batch(size: Any, batched: tuple, keys: Tensor, shape: tuple) -> tuple:
    made = apply(BITS_OF_KEYS, _merged(size, batched[0], keys), shape=shape)
    return F.reshape(made, (size, keys.shape[1], *shape)), True


BITS_OF_KEYS = GraphOp(
    "random_bits_of_keys",
    shape=lambda keys, shape: Aval((keys.shape[0], *shape), U32),
    ref=lambda keys, shape: random_bits_of_keys(
        keys, int(np.prod(shape, dtype=np.int64))).reshape(len(keys), *shape),
    batch=_bits_batch,
    axes=lambda keys, shape: f"r_->r{'_' * len(shape)}",
    differentiable=False,
    samples=(Sample((KEYS,), {"shape": (2, 3)}),),
    doc="the first random bits of each key's stream",
)


def numbered_keys(key: Tensor, count: Any) -> Tensor:
    """[count, 2]: the key folded with 0, 1, 2, ..."""
    return apply(FOLD_IN_EACH, F.broadcast_to(key, (count, 2)), F.arange(count))


def fold_rows(size: Any, batched: tuple, key: Tensor, data: Tensor) -> tuple:
    """The batching rule of fold_in."""
    rows = stretch(key, size, batched[0]), stretch(data, size, batched[1])
    return apply(FOLD_IN_EACH, *rows), True


def bits_rows(size: Any, batched: tuple, key: Tensor, shape: tuple) -> tuple:
    """The batching rule of random_bits."""
    return apply(BITS_OF_KEYS, key, shape=shape), True


__all__ = ["BITS_OF_KEYS", "FOLD_IN_EACH", "bits_rows", "fold_rows", "numbered_keys"]
