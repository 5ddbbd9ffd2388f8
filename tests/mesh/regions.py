"""Regions of distributed tensors; as a script under mpirun each rank writes what it ends with.

`update` is the snippet of the guide: with A split along its last dimension and B along its first,
every rank has one term of the product, and the terms are to be added once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import tessera as ts
from tessera import Region, read, reduce_sum

COL = ts.ShardSpec(("col",), ("dp",))
ROW = ts.ShardSpec(("row",), ("dp",))
WHOLE = ts.ShardSpec(replicate=True)
LAYOUTS = {"whole": WHOLE, "rows": ROW, "columns": COL, "plain": None}


@ts.jit
def update_grad(A: Region[read], B: Region[read], G: Region[reduce_sum]):
    G[:] += ts.gemm(A, B)


@ts.jit
def accumulate(w: Region[read], x: Region[read], G: Region[reduce_sum]):
    G[:] += ts.grad(lambda w: ts.sum(ts.tanh(x @ w)))(w)


def arrays():
    """A [6, 8], B [8, 5], G [6, 5]: the same on every rank."""
    rng = np.random.default_rng(11)
    return (rng.standard_normal((6, 8)).astype(np.float32),
            rng.standard_normal((8, 5)).astype(np.float32),
            rng.standard_normal((6, 5)).astype(np.float32))


def mesh():
    return ts.dist.mesh(axes=("dp",), shape=(4,))


def update(layout: str, calls: int = 2) -> np.ndarray:
    """G after so many calls."""
    a, b, g = arrays()
    at, spec = mesh(), LAYOUTS[layout]
    A, B = ts.dist.distribute(a, COL, mesh=at), ts.dist.distribute(b, ROW, mesh=at)
    G = ts.tensor(g) if spec is None else ts.dist.distribute(g, spec, mesh=at)
    parts = [] if spec is None else [part.buffer for part in G.parts.values()]
    for _ in range(calls):
        update_grad(A, B, G)
    if spec is not None:
        assert all(x is part.buffer for x, part in zip(parts, G.parts.values(), strict=True))
    return np.array(G.numpy())


def gradients() -> np.ndarray:
    """A gradient that two calls have added up, the batch split over the ranks."""
    x, w, _ = arrays()
    at = mesh()
    W, G = (ts.dist.distribute(v, WHOLE, mesh=at) for v in (w, np.zeros_like(w)))
    for batch in (x, x * 2):
        accumulate(W, ts.dist.distribute(batch, ROW, mesh=at), G)
    return np.array(G.numpy())


if __name__ == "__main__":
    program, folder = sys.argv[1], Path(sys.argv[2])
    made = gradients() if program == "gradients" else update(program)
    (folder / str(ts.dist.rank())).write_text(made.tobytes().hex())
