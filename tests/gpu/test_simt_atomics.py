"""Atomic updates by single lanes, by groups and of tiles, on the GPU as under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from simt_cases import LANES, WHOLE, kernel, small, zeros
from tessera.numerics import find_dtype
from tile_gpu import compare, on_gpu

require_gpu()


# --- atomics ------------------------------------------------------------------------------------
UPDATED = [t for t in WHOLE if t != "bool_"]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["add", "min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", UPDATED)
def test_atomic_updates(dtype, kind, space, rng):
    if kind in ("and", "or", "xor") and find_dtype(dtype).kind == "float":
        pytest.skip("bits are of integers")
    where, scope = ("h", "device") if space == "global" else ("s", "group")
    k = kernel(f"""
@kernel
def k(x: Tensor["n", ts.{dtype}], p: Tensor["n", i32], h: Tensor["m", ts.{dtype}]):
    s = tile.alloc_shared((16,), ts.{dtype})
    t = tile.local_id()
    if t < m:
        s[t] = h[t]
    tile.barrier()
    for i in tile.range(t, n, tile.group_size()):
        tile.atomic_{kind}({where}, p[i], x[i], scope="{scope}")
    tile.barrier()
    if t < m and {space == 'shared'}:
        h[t] = s[t]
""")
    # sums stay exact: in fp8_e5m2 up to 8, in fp8_e4m3 up to 16
    n = {"fp8_e5m2": 21, "fp8_e4m3": 40}.get(dtype, 1000)
    p = rng.permutation(np.arange(n) % 7).astype(np.int32)
    compare(k, small(rng, n, dtype), p, small(rng, 7, dtype), groups=1, lanes=128, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("kind", ["min", "max"])
def test_extremes_keep_nan_and_signs(dtype, kind):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", ts.{dtype}], y: Tensor["n", ts.{dtype}]):
    i = tile.linear_id()
    if i < n:
        tile.atomic_{kind}(y, i, x[i])
""")
    given = np.array([1.0, -1.0, np.inf, -np.inf, np.nan, 2.5, -2.5])
    a, b = (m.reshape(-1) for m in np.meshgrid(given, given))
    cast = (lambda v: v) if dtype == "f64" else lambda v: ts.tensor(v.astype(np.float32), dtype)
    compare(k, cast(a), cast(b), rtol=0, atol=0)


def test_sums_round_once(rng):
    """f32 numbers into bf16: added as they are, then rounded, as the interpreter does."""
    k = kernel("""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", bf16], z: Tensor["n", f16]):
    i = tile.linear_id()
    if i < n:
        tile.atomic_add(y, i, x[i])
        tile.atomic_add(z, i, x[i])
""")
    x = rng.standard_normal(3000).astype(np.float32)
    y = ts.tensor(rng.standard_normal(3000).astype(np.float32), "bf16")
    z = ts.tensor(rng.standard_normal(3000).astype(np.float32), "f16")
    compare(k, x, y, z, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "f32", "f64", "bf16", "int8"])
def test_each_lane_learns_what_was_there(dtype):
    """Counting by many lanes: every number before the last appears once."""
    k = kernel(f"""
@kernel
def k(c: Tensor["m", ts.{dtype}], seen: Tensor["n", ts.{dtype}], zero: Tensor["n", i32]):
    i = tile.linear_id()
    seen[i] = tile.atomic_add(c, zero[i], 1)
""")
    n = 100
    got = on_gpu(k, zeros((1,), dtype), zeros((n,), dtype), np.zeros(n, np.int32), groups=2,
                 lanes=50)
    assert float(got.arrays["c"][0]) == n
    assert sorted(map(float, got.arrays["seen"])) == list(range(n))


@pytest.mark.parametrize("dtype", [t for t in UPDATED if find_dtype(t).bits >= 16])
def test_exchange_and_compare_exchange(dtype, rng):
    k = kernel("""
@kernel
def k(x: Tensor["n", T], y: Tensor["n", T], z: Tensor["n", T], a: Tensor["n", T],
      b: Tensor["n", T]):
    i = tile.linear_id()
    if i < n:
        a[i] = tile.atomic_exchange(y, i, x[i])
        b[i] = tile.atomic_cas(z, i, x[i], y[i] + x[i])
""", T=getattr(ts, dtype))
    x, z = small(rng, 200, dtype), small(rng, 200, dtype)
    compare(k, x, small(rng, 200, dtype), z, zeros((200,), dtype), zeros((200,), dtype), rtol=0,
            atol=0)


def test_compare_exchange_compares_numbers():
    k = kernel("""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32], old: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        old[i] = tile.atomic_cas(x, i, y[i], 5.0)
""")
    x = np.float32([0.0, -0.0, np.nan, 1.0, np.inf])
    y = np.float32([-0.0, 0.0, np.nan, 1.0, np.inf])
    compare(k, x, y, np.zeros_like(x), rtol=0, atol=0)


@pytest.mark.parametrize("lanes", LANES)
def test_a_group_updates_as_one(lanes):
    k = kernel("""
@kernel
def k(c: Tensor["m", i32], seen: Tensor["n", i32]):
    for j in range(0, 3):
        before = tile.atomic_add(c, 0, 2)
        seen[tile.linear_id()] += before
        tile.atomic_max(c, 1, j)
""")
    compare(k, np.zeros(2, np.int32), np.zeros(lanes, np.int32), groups=1, lanes=lanes)


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["add", "min", "max"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "int32", "uint32", "int64",
                                   "int16"])
def test_atomic_tiles(dtype, kind, space, rng):
    k = kernel(f"""
@kernel
def k(X: Tensor["M", "N", ts.{dtype}], Y: Tensor["M", "N", ts.{dtype}]):
    x = tile.load(X[tile_m:tile_m+16, tile_n:tile_n+32])
    tile.atomic_{kind}(Y[tile_m:tile_m+16, tile_n:tile_n+32], x)
""" if space == "global" else f"""
@kernel
def k(X: Tensor["M", "N", ts.{dtype}], Y: Tensor["M", "N", ts.{dtype}]):
    s = tile.alloc_shared((16, 32), ts.{dtype}, swizzle="xor")
    tile.store(s, tile.load(Y[tile_m:tile_m+16, tile_n:tile_n+32]))
    tile.barrier()
    x = tile.load(X[tile_m:tile_m+16, tile_n:tile_n+32])
    tile.atomic_{kind}(s[0:16, 0:32], x)
    tile.barrier()
    tile.store(Y[tile_m:tile_m+16, tile_n:tile_n+32], tile.load(s))
""")
    for shape in ((16, 32), (33, 50), (64, 96)):
        n = shape[0] * shape[1]

        def made(n=n, shape=shape):
            x = small(rng, n, dtype)
            return x.reshape(shape)

        compare(k, made(), made(), rtol=0, atol=0)


def test_groups_add_into_one_block(rng):
    k = kernel("""
@kernel
def k(X: Tensor["M", "N", f32], Y: Tensor["P", "Q", f32]):
    tile.atomic_add(Y[0:16, 0:32], tile.load(X[tile_m:tile_m+16, 0:32]))
""")
    x = rng.integers(-9, 10, (320, 32)).astype(np.float32)
    compare(k, x, np.zeros((16, 32), np.float32), rtol=0, atol=0)
