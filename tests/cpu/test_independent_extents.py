"""Extents along which shards of a kernel's tensors are computed alone, read from its body."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f32
from tessera.tile import (
    load,
    row_max,
    row_sum,
    zeros,
)
from tessera.tile.passes.independent_extents import independent_extents


@ts.kernel
def softmax(x: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    t = load(x[tile_m:tile_m + 4, 0:N])
    p = ts.tile.exp(t - row_max(t))
    return p / row_sum(p)


@ts.kernel
def biased(x: Tensor["M", "N", f32], b: Tensor["N", f32]) -> Tensor["M", "N", f32]:
    return load(x[tile_m:tile_m + 4, tile_n:tile_n + 4]) + load(b[tile_n:tile_n + 4])[None, :]


@ts.kernel
def turned(x: Tensor["M", "N", f32]) -> Tensor["N", "M", f32]:
    return load(x[tile_m:tile_m + 4, tile_n:tile_n + 4]).T


@ts.kernel
def product(x: Tensor["M", "K", f32], w: Tensor["K", "N", f32]) -> Tensor["M", "N", f32]:
    sums = zeros((4, 4))
    for k in range(0, K, 4):
        sums = ts.tile.dot(load(x[tile_m:tile_m + 4, k:k + 4]), load(w[k:k + 4, tile_n:tile_n + 4]),
                           sums)
    return sums


@ts.kernel
def batched(x: Tensor["B", "S", "D", f32], y: Tensor["B", "S", "D", f32]):
    t = load(x[tile_b, tile_s:tile_s + 4, 0:D])
    y[tile_b, tile_s:tile_s + 4, 0:D] = t / row_sum(t)


@ts.kernel
def row_sums(x: Tensor["M", "N", f32]) -> Tensor["M", f32]:
    sums = zeros((4,))
    for n in range(0, N, 4):
        sums = sums + row_sum(load(x[tile_m:tile_m + 4, n:n + 4]))
    return sums


@ts.kernel
def by_blocks(x: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    t = load(x[tile_m:tile_m + 4, tile_n:tile_n + 4])
    return t / row_max(t)


@ts.kernel
def placed(x: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    return load(x[tile_m:tile_m + 4, 0:N]) * tile_m


@ts.kernel
def mean(x: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    return load(x[tile_m:tile_m + 4, tile_n:tile_n + 4]) / M


@ts.kernel
def shifted(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    y[tile_m:tile_m + 4, 0:N] = load(x[tile_m + 1:tile_m + 5, 0:N])


@ts.kernel
def column_sums(x: Tensor["M", "N", f32], s: Tensor["N", f32]):
    ts.tile.atomic_add(s[tile_n:tile_n + 4], ts.tile.col_sum(
        load(x[tile_m:tile_m + 4, tile_n:tile_n + 4])))


@ts.kernel
def running(x: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    return ts.tile.cumsum(load(x[tile_m:tile_m + 4, 0:N]), axis=0)


@ts.kernel
def first_row(x: Tensor["M", "N", f32], s: Tensor["N", f32]):
    t = load(x[tile_m:tile_m + 1, tile_n:tile_n + 4])
    if tile_m == 0:
        s[tile_n:tile_n + 4] = ts.tile.reshape(t, (4,))


@ts.kernel
def with_itself(x: Tensor["M", "M", f32]) -> Tensor["M", f32]:
    return row_sum(load(x[tile_m:tile_m + 4, 0:M]))


SHAPES = {"x": (8, 12), "y": (8, 12), "b": (12,), "s": (12,), "w": (12, 8)}


def given(kernel: Any) -> dict[str, Tensor]:
    shapes = SHAPES | ({"x": (2, 8, 4), "y": (2, 8, 4)} if kernel is batched else {})
    shapes |= {"x": (8, 8)} if kernel is with_itself else {}
    return {name: ts.ones(shapes[name]) for name in kernel.signature.parameters}


@pytest.mark.parametrize(("kernel", "names"), [
    (softmax, "M"), (biased, "MN"), (turned, "MN"), (product, "MN"), (batched, "BS"),
    (row_sums, "M"), (by_blocks, "M"), (placed, ""), (mean, "N"), (shifted, ""), (column_sums, ""),
    (running, ""), (first_row, ""), (with_itself, "")])
def test_the_extents_of_a_body(kernel: Any, names: str) -> None:
    arguments = given(kernel)
    function = kernel.typed(kernel.bind_types(arguments, frozenset(arguments)))
    assert sorted(independent_extents(function)) == sorted(names)


@pytest.mark.parametrize(("kernel", "gathered"), [(softmax, False), (by_blocks, False),
                                                  (running, True), (mean, True)])
def test_shards_stay_where_they_are(kernel: Any, gathered: bool, rng: np.random.Generator) -> None:
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    x = rng.uniform(1, 2, (8, 12)).astype(np.float32)
    d = ts.dist.tensor(x.shape, ts.ShardSpec(("row",), ("dp",)), mesh, init=x)
    f = ts.jit(lambda x: kernel(x))
    made = f(d)
    assert ("all_gather" in str(f.plan)) == gathered
    assert made.local.shape == ((8, 12) if gathered else (4, 12))
    np.testing.assert_array_equal(made.numpy(), f(ts.tensor(x)).numpy())


def test_a_vector_that_belongs_to_columns_is_no_column() -> None:
    """Where the box is square its shape does not show it."""
    @ts.kernel
    def scaled(x: Tensor["M", "N", f32], w: Tensor["N", f32]) -> Tensor["M", "N", f32]:
        return load(x[tile_m:tile_m + 4, 0:N]) * load(w[0:N])

    with pytest.raises(ts.TesseraError, match=r"tile<4 x f32> lies along the columns' elements"
                                              r"[\s\S]*write w\[None, :\] for a row"):
        scaled(ts.ones((8, 4)), ts.ones(4))
