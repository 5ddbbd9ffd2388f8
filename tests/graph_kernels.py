"""Small kernels that tests call in graphs, and a vector for them."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, bf16, f32

tile = ts.tile


@ts.kernel
def cube(x: Tensor["N"], y: Tensor["N"], a: f32 = 1.0):
    t = tile.load(x[tile_n:tile_n + 16])
    y[tile_n:tile_n + 16] = t * t * t * a


@ts.kernel
def cubed(x: Tensor["N"]) -> Tensor["N", f32]:
    t = tile.load(x[tile_n:tile_n + 16])
    return t * t * t


@ts.kernel(axes="mn,mn->mn")
def doubled(x: Tensor["M", "N"], y: Tensor["M", "N"]):
    y[tile_m:tile_m + 4, tile_n:tile_n + 16] = 2.0 * tile.load(
        x[tile_m:tile_m + 4, tile_n:tile_n + 16])


@ts.kernel
def row_sums(x: Tensor["M", "N"], s: Tensor["M"]):
    s[tile_m:tile_m + 4] = tile.row_sum(tile.load(x[tile_m:tile_m + 4, 0:N]))


@ts.kernel
def add_one(x: Tensor["N"]):
    i = tile.linear_id()
    if i < N:
        x[i] += 1.0


@ts.kernel
def dropped(x: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n + 16] = tile.dropout(tile.load(x[tile_n:tile_n + 16]), 0.5)


@ts.kernel
def two(x: Tensor["N"], s: Tensor["N"], c: Tensor["N"]):
    t = tile.load(x[tile_n:tile_n + 16])
    s[tile_n:tile_n + 16] = tile.sin(t)
    c[tile_n:tile_n + 16] = tile.cos(t)


@ts.kernel
def matmul(a: Tensor["M", "K", bf16], b: Tensor["K", "N", bf16]) -> Tensor["M", "N", f32]:
    acc = tile.zeros((64, 64), f32)
    for k in range(0, K, 64):
        acc = tile.dot(tile.load(a[tile_m:tile_m + 64, k:k + 64]),
                       tile.load(b[k:k + 64, tile_n:tile_n + 64]), acc)
    return acc


@ts.kernel
def patch(x: Tensor["N"], y: Tensor["N"]):
    i = tile.linear_id()
    if i < N // 2:
        y[i] += x[i]


@ts.kernel
def below(x: Tensor["N", f32], limit: f32):
    i = tile.linear_id()
    if i < N:
        assert x[i] < limit, f"x is {x[i]}"


@pytest.fixture
def x(rng: np.random.Generator) -> Tensor:
    return ts.tensor(rng.uniform(0.5, 1.5, 20).astype(np.float32))


def written(x, kernel=cube):
    y = ts.zeros(x.shape)
    kernel(x, y)
    return y


def with_rule(kernel):
    """The kernel anew with a rule of its own; the module's have none."""
    return kernel.with_schedule(ts.Schedule(warps=4))


def loss_of_cubes():
    """sum((x -> 4 x^3)^2) through a kernel with a rule."""
    k = with_rule(cube)
    k.defvjp(lambda x, y, a: ((k(x, y, a), y)[1], (x, a)),
             lambda saved, g: (g * 3.0 * saved[0] * saved[0] * saved[1], None))

    def loss(x):
        y = ts.zeros(x.shape)
        k(x * 2.0, y, a=0.5)
        return ts.sum(y * y)

    return loss


def sums_of(x):
    s = ts.zeros(x.shape[:-1])
    row_sums(x, s)
    return s
