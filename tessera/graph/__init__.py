"""The graph: op records, tracing, Graph IR, passes and executors."""

from __future__ import annotations

from . import ops
from .operators import install
from .ops import (
    attention,
    contract,
    conv,
    convert,
    create,
    cumulative,
    einsum,
    elementwise,
    gather,
    index,
    loss,
    nn,
    norms,
    random,
    reduce,
    safe,
    scatter,
    shape,
    softmax,
    sort,
)

install()

__all__ = [
    "attention", "contract", "conv", "convert", "create", "cumulative", "einsum", "elementwise",
    "gather", "index", "loss", "nn", "norms", "ops", "random", "reduce", "safe", "scatter", "shape",
    "softmax", "sort",
]
