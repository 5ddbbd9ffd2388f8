"""Experts and ring attention, for simulated ranks and mpirun.

    mpirun -n 4 python tests/mesh/longcontext.py PROGRAM FOLDER     each rank writes FOLDER/<rank>

Each compares with the same function in one process, and returns a hash of the gathered results.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import tessera as ts
from mesh.processes import run_programs
from mesh.training import mesh_of
from tolerance import assert_close


def _hash(tensors: list) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def experts() -> str:
    """A layer of experts and its gradients, with and without a mesh."""
    rng, n = np.random.default_rng(7), ts.dist.world_size()
    arrays = [rng.normal(size=s).astype(np.float32)
              for s in ((6 * n, 5), (5, n + 1), (n + 1, 5, 9), (n + 1, 9, 5))]
    mesh, rows = mesh_of(ep=n), ts.ShardSpec(("row",), ("ep",))
    xs = [ts.dist.distribute(a, s, mesh=mesh)
          for a, s in zip(arrays, (rows, None, rows, rows), strict=True)]

    def loss(x, router, w1, w2, groups=None):
        y, balance = ts.moe(x, router, (w1, w2), top_k=2, groups=groups, balance=True)
        return ts.mean(y**2) + 0.01 * balance

    alone = ts.grad(lambda *xs: loss(*xs, groups=n), argnums=(0, 1, 2, 3))
    found = ts.jit(ts.grad(loss, argnums=(0, 1, 2, 3)))(*xs)
    for g, w in zip(found, alone(*map(ts.tensor, arrays)), strict=True):
        assert_close(g.numpy(), w.numpy(), "f32", n=60 * n)
    return _hash(found)


def ring(zigzag: bool = False) -> str:
    """Causal attention over a split sequence and its gradients, against plain attention."""
    rng, n = np.random.default_rng(8), ts.dist.world_size()
    arrays = [rng.normal(size=(2, h, 5 * n + 2, 4)).astype(np.float32) for h in (4, 2, 2)]
    mesh = mesh_of(sp=n)
    xs = [ts.dist.distribute(a, ts.ShardSpec((2,), ("sp",)), mesh=mesh) for a in arrays]

    def slopes(attention):
        return ts.grad(lambda *xs: ts.sum(ts.sin(attention(*xs))), argnums=(0, 1, 2))

    found = ts.jit(slopes(lambda *xs: ts.ring_attention(*xs, zigzag=zigzag)))(*xs)
    alone = slopes(lambda *xs: ts.attention(*xs, causal=True))(*map(ts.tensor, arrays))
    for g, w in zip(found, alone, strict=True):
        assert_close(g.numpy(), w.numpy(), "f32", n=30 * n)
    return _hash(found)


def zigzag() -> str:
    return ring(zigzag=True)


# Those whose bits under mpirun are compared with the simulation's, in one run.
COMPARED = "ring,zigzag,experts"

if __name__ == "__main__":
    run_programs(globals(), sys.argv[1], sys.argv[2])
