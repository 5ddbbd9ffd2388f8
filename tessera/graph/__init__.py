"""The graph: op records, tracing, Graph IR, passes and executors."""

from __future__ import annotations

from . import numpy_calls, ops
from .operators import install
from .ops import (
    attention,
    channel_norms,
    conv,
    convert,
    cosine,
    create,
    cumulative,
    determinants,
    distances,
    einsum,
    elementwise,
    factorizations,
    fourier,
    gather,
    histogram,
    index,
    index_put,
    join,
    linalg,
    logic,
    loss,
    lu,
    maths,
    matrix_functions,
    matrix_norms,
    nn,
    norms,
    pool,
    products,
    quantiles,
    random,
    reduce,
    resize,
    safe,
    scaled,
    scaled_matmul,
    scatter,
    segments,
    sets,
    shape,
    softmax,
    sort,
    sparse,
    special,
    spectral,
    stop_gradient,
)
from .regions.dependences import deps

install()

__all__ = [
    "attention", "channel_norms", "conv", "convert", "cosine", "create", "cumulative", "deps",
    "determinants", "distances", "einsum", "elementwise", "factorizations", "fourier", "gather",
    "histogram", "index", "index_put", "join", "linalg", "logic", "loss", "lu", "maths",
    "matrix_functions", "matrix_norms", "nn", "norms", "numpy_calls", "ops", "pool", "products",
    "quantiles", "random", "reduce", "resize", "safe", "scaled", "scaled_matmul", "scatter",
    "segments", "sets", "shape", "softmax", "sort", "sparse", "special", "spectral",
    "stop_gradient",
]
