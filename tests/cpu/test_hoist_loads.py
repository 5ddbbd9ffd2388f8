"""Loads behind the first reduction of a kernel are asked for in front of it."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.launch import compare
from kernels.build import build
from tessera.tile.cuda.lower.hoist_loads import hoist_loads

BETWEEN = {"nothing": "", "a write": "    O[0, 0:32] = 1.0\n", "a barrier": "    tile.barrier()\n"}


def kernel_of(between: str = "", columns: int = 32):
    source = f"""
@kernel
def k(X: Tensor[2, {columns}, f32], Y: Tensor[2, {columns}, f32], P: Tensor[2, i32],
      O: Tensor[2, {columns}, f32]):
    x = tile.load(X[0:2, 0:{columns}])
    s = tile.row_sum(x)
{between}    y = tile.load(Y[0:2, 0:{columns}])
    z = tile.gather(P, tile.cast(s, i32))
    O[0:2, 0:{columns}] = y * s + tile.cast(z, f32)[:, None]
"""
    return build(source)["k"]


def order_of(kernel, threads=64):
    """What is done in which order, of what matters here."""
    names = [n.name for n in hoist_loads(kernel._from_types({}), threads).body]
    return [n for n in names if n in ("load_tile", "arrive", "reduce_sum", "store_tile", "barrier",
                                      "gather")]


@pytest.mark.parametrize("what", BETWEEN)
def test_a_load_moves_over_what_writes_nothing(what):
    got = order_of(kernel_of(BETWEEN[what]))
    if what == "nothing":
        assert got == ["load_tile", "load_tile", "arrive", "reduce_sum", "gather", "store_tile"]
    else:
        assert got[:2] == ["load_tile", "reduce_sum"] and "arrive" not in got


def test_a_thread_asks_for_no_more_than_it_has_registers_for():
    assert "arrive" in order_of(kernel_of(columns=512), threads=64)
    assert "arrive" not in order_of(kernel_of(columns=1024), threads=64)


def test_what_follows_from_the_statistic_stays_behind_it(rng):
    """And the same comes out."""
    x, y = (rng.integers(-3, 4, (2, 32)).astype(np.float32) for _ in range(2))
    x[:, -1] -= x.sum(1) - [0, 1]  # places
    compare(kernel_of(), x, y, np.array([5, 7], np.int32), np.zeros((2, 32), np.float32), lanes=64,
            target="sm_90")
