"""What single lanes do, on the GPU as under the interpreter: elements, vectors, exchange within
warps and groups, random words."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from simt_cases import FLOATS, INTS, LANES, kernel, small, values, zeros
from tile_gpu import compare

require_gpu()


# --- elements -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_elements_of_every_type(dtype, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["R", "C", ts.{dtype}], y: Tensor["R", "C", ts.{dtype}]):
    i = tile.linear_id()
    if i < R * C:
        y[R - 1 - i // C, C - 1 - i % C] = x[i // C, i % C]
""")
    for shape in ((1, 1), (3, 7), (16, 33), (5, 64)):
        compare(k, values(rng, shape, dtype), zeros(shape, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("policy", ["", " @ ts.saturate", " @ ts.rounding('toward_zero')",
                                    " @ ts.stochastic_round",
                                    " @ ts.stochastic_round @ ts.saturate"])
def test_stores_round_as_the_tensor_says(dtype, policy, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", ts.{dtype}{policy}]):
    i = tile.linear_id()
    if i < n:
        y[i] = x[i]
""")
    x = (rng.standard_normal(3000) * np.exp2(rng.integers(-30, 20, 3000))).astype(np.float32)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30]
    numeric = eval(f"ts.as_type(ts.{dtype}){policy}", {"ts": ts}) if policy else dtype
    compare(k, x, ts.zeros((3000,), numeric), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_shared_memory_of_every_type(dtype, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["R", "C", ts.{dtype}], y: Tensor["R", "C", ts.{dtype}]):
    s = tile.alloc_shared((8, 16), ts.{dtype})
    t = tile.local_id()
    s[t % 8, t // 8] = x[t % 8, t // 8]
    tile.barrier()
    y[7 - t // 16, t % 16] = s[t // 16, t % 16]
""")
    compare(k, values(rng, (8, 16), dtype), zeros((8, 16), dtype), groups=1, lanes=128, rtol=0,
            atol=0)


@pytest.mark.parametrize("dtype, shape", [("f32", (32, 32)), ("bf16", (16, 64)), ("f64", (16, 16)),
                                          ("fp8_e4m3", (8, 128)), ("f32", (6, 20)),
                                          ("bf16", (4, 8, 32))])
@pytest.mark.parametrize("stages", [1, 3])
def test_swizzled_and_staged_buffers(dtype, shape, stages, rng):
    size, columns = int(np.prod(shape)), shape[-1]
    at = f"{{0}} // {columns}, {{0}} % {columns}"
    if len(shape) == 3:
        at = f"{{0}} // {size // shape[0]}, {{0}} // {columns} % {shape[1]}, {{0}} % {columns}"
    stage = "j % 3, " if stages > 1 else ""
    k = kernel(f"""
@kernel
def k(x: Tensor["m", "n", ts.{dtype}], y: Tensor["m", "n", ts.{dtype}]):
    s = tile.alloc_shared({shape}, ts.{dtype}, swizzle="xor", stages={stages})
    for j in range(0, m):
        for i in tile.range(0, {size}):
            s[{stage}{at.format('i')}] = x[j, i]
        tile.barrier()
        for i in tile.range(0, {size}):
            y[j, i] = s[{stage}{at.format(f'({size} - 1 - i)')}]
        tile.barrier()
""")
    x = values(rng, (4, size), dtype)
    compare(k, x, zeros((4, size), dtype), groups=1, lanes=100, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "fp8_e4m3", "int32", "int64", "int8",
                                   "bool_"])
def test_arrays_of_a_lane(dtype, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", ts.{dtype}], y: Tensor["n", ts.{dtype}], p: Tensor["n", i32]):
    r = tile.alloc_register((2, 5), ts.{dtype})
    i = tile.linear_id()
    for j in range(0, 10):
        r[j // 5, j % 5] = x[(i + j) % n]
    if i < n:
        r[1, 2] = x[i]
        y[i] = r[p[i] // 5, p[i] % 5]
""")
    p = rng.integers(0, 10, 300).astype(np.int32)
    compare(k, values(rng, (300,), dtype), zeros((300,), dtype), p, rtol=0, atol=0)


@pytest.mark.parametrize("lanes", LANES)
def test_what_all_lanes_do_alike_is_done_once(lanes):
    k = kernel("""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32], c: Tensor["m", i32]):
    for i in tile.range(1, n):
        y[i] = y[i - 1] + x[i]
    g = tile.group_id()
    y[0] += 1.0
    if tile.local_id() % 2 == 0:
        c[1] = 7
        tile.atomic_add(c, 0, 1)
    tile.atomic_add(c, 2, 1)
    if g == 0:
        tile.atomic_add(c, 3, 1)
""")
    x = np.arange(50, dtype=np.float32)
    compare(k, x, np.zeros_like(x), np.zeros(4, np.int32), groups=1, lanes=lanes)


def test_wide_and_unsigned_indices(rng):
    k = kernel("""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32], p: Tensor["n", i64], q: Tensor["n", ts.uint32]):
    i = tile.linear_id()
    if i < n:
        y[q[i]] = x[p[i]]
""")
    p, q = rng.permutation(300), rng.permutation(300).astype(np.uint32)
    compare(k, rng.standard_normal(300).astype(np.float32), np.zeros(300, np.float32), p, q)


# --- control flow -------------------------------------------------------------------------------
def test_lanes_go_their_own_ways():
    k = kernel("""
@kernel
def k(out: Tensor["n", i32], odd: Tensor["n", i32]):
    i = tile.linear_id()
    steps, v = 0, i + 1
    while v != 1:
        steps += 1
        if v % 2 == 0:
            v //= 2
            continue
        v = 3 * v + 1
    total = 0
    for a in range(0, i % 11):
        for b in range(a, i % 7 + a):
            if (a + b) % 3 == 2:
                break
            total += a * b
        if total > 200:
            break
    if i < n:
        out[i] = steps
        odd[i] = total
""")
    compare(k, np.zeros(1000, np.int32), np.zeros(1000, np.int32))


# --- vectors ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "fp8_e4m3", "int16", "int8", "bool_",
                                   "fp4_e2m1", "fp6_e3m2", "int4"])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_vectors_of_rows(dtype, width, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["R", "C", ts.{dtype}], y: Tensor["R", "C", ts.{dtype}]):
    for r in range(0, R):
        tile.store_vector(y[R - 1 - r], tile.load_vector(x[r], width={width}))
""")
    for columns in (1, 30, 33, 64, 160):
        shape = (3, columns)
        compare(k, values(rng, shape, dtype), zeros(shape, dtype), groups=1, lanes=160 // width + 3,
                rtol=0, atol=0)


@pytest.mark.parametrize("swizzle", ["None", "'xor'"])
@pytest.mark.parametrize("dtype, columns, width", [("f32", 64, 4), ("bf16", 128, 8), ("f32", 24, 2),
                                                   ("int8", 128, 16), ("f64", 16, 4),
                                                   ("bf16", 36, 8)])
def test_vectors_of_shared_rows(dtype, columns, width, swizzle, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["R", "C", ts.{dtype}], y: Tensor["R", "C", ts.{dtype}]):
    s = tile.alloc_shared((20, {columns}), ts.{dtype}, swizzle={swizzle})
    for r in range(0, R):
        tile.store_vector(s[r], tile.load_vector(x[r], width={width}))
    tile.barrier()
    for i in tile.range(0, R * C):
        y[i // C, i % C] = s[i // C, i % C]
    tile.barrier()
    for r in range(0, R):
        tile.store_vector(y[r], tile.load_vector(s[r], width={width}))
""")
    shape = (20, columns)
    compare(k, values(rng, shape, dtype), zeros(shape, dtype), groups=1, lanes=96, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["f32", "int32"])
@pytest.mark.parametrize("columns", [64, 62])
def test_pairs(dtype, columns, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["R", "C", ts.{dtype}], y: Tensor["R", "C", ts.{dtype}]):
    s, i, r = tile.alloc_shared((2, 64), ts.{dtype}), 2 * tile.local_id(), tile.group_id()
    a, b = tile.load_pair(x[r], i)
    tile.store_pair(s[1], 62 - i, b, a)
    tile.barrier()
    a, b = tile.load_pair(s[1], 62 - i)
    if i > 8:
        tile.store_pair(y[2 - r], i, a, b)
""")
    compare(k, values(rng, (3, columns), dtype), zeros((3, columns), dtype), groups=3,
            lanes=columns // 2, rtol=0, atol=0)


# --- warps and groups ---------------------------------------------------------------------------
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "int32", "int64", "uint32"])
def test_shuffles(dtype, lanes, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", ts.{dtype}], d: Tensor["n", i32], out: Tensor["m", "n", ts.{dtype}]):
    i = tile.linear_id()
    v, by = x[i], d[i]
    out[0, i] = tile.shuffle(v, by)
    out[1, i] = tile.shuffle(v, 5)
    out[2, i] = tile.shuffle_down(v, 3)
    out[3, i] = tile.shuffle_up(v, 3)
    out[4, i] = tile.shuffle_xor(v, 9)
    out[5, i] = tile.shuffle_down(v, by)
    out[6, i] = tile.shuffle_up(v, by)
    out[7, i] = tile.shuffle_xor(v, by)
""")
    d = rng.integers(-40, 41, lanes).astype(np.int32)
    compare(k, values(rng, (lanes,), dtype), d, zeros((8, lanes), dtype), groups=1, lanes=lanes,
            rtol=0, atol=0)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "int32", "int64", "uint32", "uint64",
                                   "int8"])
def test_reductions_over_warps_and_groups(dtype, lanes, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", ts.{dtype}], out: Tensor["m", "n", ts.{dtype}]):
    i = tile.linear_id()
    v = x[i]
    out[0, i] = tile.warp_sum(v)
    out[1, i] = tile.warp_max(v)
    out[2, i] = tile.warp_min(v)
    out[3, i] = tile.warp_scan(v)
    for j in range(0, 2):
        out[4, i] = tile.group_sum(v)
        out[5, i] = tile.group_max(v)
        out[6, i] = tile.group_min(v)
""")
    x = small(rng, lanes * 2, dtype)
    compare(k, x, zeros((7, lanes * 2), dtype), groups=2, lanes=lanes, rtol=0, atol=0)


def test_reductions_of_nan(rng):
    k = kernel("""
@kernel
def k(x: Tensor["n", f32], out: Tensor["m", "n", f32]):
    i = tile.linear_id()
    out[0, i] = tile.warp_max(x[i])
    out[1, i] = tile.warp_min(x[i])
    out[2, i] = tile.group_max(x[i])
    out[3, i] = tile.group_sum(x[i])
""")
    x = rng.standard_normal(128).astype(np.float32)
    x[70] = np.nan
    compare(k, x, np.zeros((4, 128), np.float32), groups=1, lanes=128)


@pytest.mark.parametrize("lanes", LANES)
def test_votes(lanes, rng):
    k = kernel("""
@kernel
def k(x: Tensor["n", i32], out: Tensor["m", "n", i32], b: Tensor["n", ts.uint32]):
    i = tile.linear_id()
    out[0, i] = int(tile.vote_any(x[i] > 8))
    out[1, i] = int(tile.vote_all(x[i] > 0))
    bits = tile.ballot(x[i] > 5)
    b[i] = bits
    out[2, i] = tile.popcount(bits)
    out[3, i] = tile.popcount(x[i] - 5)
""")
    for x in (rng.integers(0, 10, lanes), np.full(lanes, 9), np.zeros(lanes)):
        compare(k, x.astype(np.int32), np.zeros((4, lanes), np.int32),
                np.zeros(lanes, np.uint32), groups=1, lanes=lanes)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64", "uint64"])
def test_popcount_of_every_width(dtype, rng):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", ts.{dtype}], out: Tensor["n", i32]):
    i = tile.linear_id()
    if i < n:
        out[i] = tile.popcount(x[i])
""")
    compare(k, values(rng, (300,), dtype), np.zeros(300, np.int32))


def test_whole_warps_act_alone(rng):
    k = kernel("""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    i = tile.linear_id()
    if tile.warp_id() % 2 == 0:
        y[i] = tile.warp_sum(x[i]) + tile.shuffle_xor(x[i], 1)
""")
    x = rng.integers(-5, 6, 256).astype(np.float32)
    compare(k, x, np.zeros(256, np.float32), groups=2, lanes=128)


# --- random words -------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", ["", ", seed=12345678901"])
def test_random_words(seed):
    k = kernel(f"""
@kernel
def k(a: Tensor["n", ts.uint32], b: Tensor["n", ts.uint32], u: Tensor["n", f32], far: i64):
    i = tile.linear_id()
    if i < n:
        a[i] = tile.random_bits(i - 5{seed})
        b[i] = tile.random_bits(i + far{seed})
        u[i] = tile.random_uniform(i{seed})
""")
    n = 1000
    with ts.config.scope(seed=99):
        compare(k, np.zeros(n, np.uint32), np.zeros(n, np.uint32), np.zeros(n, np.float32), 2**35,
                rtol=0, atol=0)


def test_random_tiles():
    k = kernel("""
@kernel
def k(Y: Tensor["M", "N", ts.uint32]):
    r = tile.arange(0, 16)
    tile.store(Y[0:16, 0:16], tile.random_bits(r[:, None] * 16 + r[None, :]))
""")
    compare(k, np.zeros((20, 20), np.uint32), groups=1)


@pytest.mark.parametrize("seed", ["None", "7"])
@pytest.mark.parametrize("shape", [(64, 64), (70, 50), (33, 20)])
def test_dropout(shape, seed, rng):
    k = kernel(f"""
@kernel
def k(X: Tensor["M", "N", f32], Y: Tensor["M", "N", f32]):
    x = tile.load(X[tile_m:tile_m+16, tile_n:tile_n+32])
    tile.store(Y[tile_m:tile_m+16, tile_n:tile_n+32], tile.dropout(x, 0.3, seed={seed}))
""")
    x = rng.standard_normal(shape).astype(np.float32)
    with ts.config.scope(seed=3):
        compare(k, x, np.zeros_like(x), rtol=1e-6, atol=0)
