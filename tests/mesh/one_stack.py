"""Kernel, jitted loss, gradient, vmap and all_reduce on the same arrays, without a conversion.

    python tests/mesh/one_stack.py                      # on the CPU, or where TESSERA_DEVICE says
    TESSERA_DEVICE=cuda python tests/mesh/one_stack.py
    mpirun -n 2 python tests/mesh/one_stack.py          # its rows on each rank

Prints what it has compared with NumPy in f64, and where the results lay.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

import tessera as ts
from tessera import Tensor

tile = ts.tile
ROWS, N = 6, 1000  # of each rank


@ts.kernel
def softplus(x: Tensor["N"], y: Tensor["N"]):
    """y = log(1 + exp(x))"""
    t = tile.load(x[tile_n:tile_n + 256])  # noqa: F821
    y[tile_n:tile_n + 256] = tile.maximum(t, 0.0) + tile.log(1.0 + tile.exp(-tile.abs(t)))  # noqa: F821


@ts.kernel
def logistic(x: Tensor["N"], g: Tensor["N"], y: Tensor["N"]):
    """y = g / (1 + exp(-x))"""
    t = tile.load(x[tile_n:tile_n + 256])  # noqa: F821
    y[tile_n:tile_n + 256] = tile.load(g[tile_n:tile_n + 256]) * tile.sigmoid(t)  # noqa: F821


def forward(x, y):
    softplus(x, y)
    return y, x


def backward(x, g):
    made = ts.zeros_like(x)
    logistic(x, g, made)
    return made, None


softplus.defvjp(forward, backward)


def smooth(x):
    y = ts.zeros_like(x)
    softplus(x, y)
    return y


def loss(x, w):
    """sum of squares of softplus(x * w) over a row."""
    return ts.sum(smooth(x * w) ** 2)


@ts.jit
def value_and_slopes(x, w):
    """One loss for the rows of a rank, and its gradient for w, with the kernel batched."""
    def total(w):
        return ts.sum(ts.vmap(loss, in_axes=(0, None))(x, w))

    return ts.value_and_grad(total)(w)


def whole(rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    w = rng.uniform(0.5, 1.5, N).astype(np.float32)
    return np.random.default_rng([8, rank]).standard_normal((ROWS, N)).astype(np.float32), w


def wanted(ranks: int) -> tuple[float, np.ndarray]:
    """In f64."""
    value, slope = 0.0, np.zeros(N)
    for rank in range(ranks):
        x, w = (a.astype(np.float64) for a in whole(rank))
        y = np.logaddexp(0.0, x * w)
        value += float((y**2).sum())
        slope += (2 * y * x / (1 + np.exp(-x * w))).sum(0)
    return value, slope


def run() -> str:
    """What was compared. Raises AssertionError."""
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    gpus = ts.config.device.startswith("cuda")
    mesh = ts.dist.mesh([f"{'cuda' if gpus else 'cpu'}:{r}" for r in range(ranks)], axes="dp")
    with mesh:
        x, w = (ts.tensor(a) for a in whole(rank))
        if gpus:
            x, w = ts.to((x, w), mesh.devices[rank])
        value, slope = (ts.dist.all_reduce(y, "dp") for y in value_and_slopes(x, w))
    total, slopes = wanted(ranks)
    np.testing.assert_allclose(value.item(), total, rtol=1e-5)
    np.testing.assert_allclose(slope.numpy(), slopes, rtol=1e-4, atol=1e-4)
    text = value_and_slopes.inspect_ir("graph")
    kernels = set(re.findall(r" = kernel\(.*\) call=(\w+)", text))
    assert kernels == {"softplus", "logistic"}, f"two kernels are not in the graph: {text}"
    return f"{ranks} ranks, on {x.device}: results on {slope.device}, equal to NumPy"


if __name__ == "__main__":
    said = run()
    print(said)
    if len(sys.argv) > 2:  # as tests/mesh/launch.py calls it
        (Path(sys.argv[2]) / str(ts.dist.rank())).write_text(said)
