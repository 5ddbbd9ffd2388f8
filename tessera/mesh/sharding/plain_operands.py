"""Operands of a compiled function that each rank has for itself: numbers, such as a learning rate,
and plain arrays on its host. Ranks must give the same, at each call: else each computes its own.

A call looks at some elements of each, which takes a microsecond. On hosts they go in the message
that compares the program anyway; behind calls that NCCL carries, ranks tell them with their call
numbers (ranks/call_numbers.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from tessera.numerics import decode
from tessera.runtime.arrays import HOST
from tessera.tensor import Tensor

from ..ranks.call_numbers import Samples

SAMPLE = 4  # elements of each that are looked at
WEIGHTS = [math.cos(i * i * 0.1 + 1.0) for i in range(SAMPLE)]


def samples_of(operands: Sequence[Tensor]) -> Samples:
    """Elements of each; none of what lies on a GPU, where looking would wait for it."""
    return tuple(_sample(x) if x.place == HOST else () for x in operands)


def _sample(x: Tensor) -> tuple[float, ...]:
    dtype = x.dtype
    array = x.buffer if dtype.packed else x.array
    if array.ndim == 0 and dtype.numpy.itemsize > 2:
        return (float(array),)
    found = array.flat[_chosen(array.size)]
    if dtype.kind == "float" and dtype.numpy.itemsize < 4 and not dtype.packed:
        found = decode(found, dtype)
    return tuple(found.astype(np.float64).tolist())


@functools.lru_cache(maxsize=256)
def _chosen(size: int) -> np.ndarray:
    """The numbers of some elements, the first and the last among them."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, SAMPLE)).astype(np.intp))


def number_of(samples: Samples) -> float:
    """A number that other elements, another order and other sizes of them change."""
    found = 0.0
    for i, values in enumerate(samples):
        finite = [v if math.isfinite(v) else 0.0 for v in values]
        size = sum(map(abs, finite))
        if size:
            weighted = sum(map(float.__mul__, WEIGHTS, finite))
            found += (weighted / size + 7 * math.log2(size)) * (1 + i * 0.618034 % 1)
    return found


__all__ = ["SAMPLE", "number_of", "samples_of"]
