"""What single lanes do, on the GPU as under the interpreter: elements, vectors, atomics, exchange
within warps and groups, random words, reports."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from kernels.build import build
from tessera.numerics import find_dtype
from tile_gpu import compare, on_gpu

require_gpu()
FLOATS = ["f64", "f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1",
          "fp4_e3m0"]
INTS = ["int64", "int32", "int16", "int8", "int4", "uint64", "uint32", "uint16", "uint8", "bool_"]
PACKED = ["fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp4_e3m0", "int4"]
WHOLE = [t for t in FLOATS + INTS if t not in PACKED]
LANES = [1, 7, 32, 45, 64, 100, 1024]


def values(rng, shape, dtype: str):
    """Numbers over the range of a type, with special values of floats among them."""
    d = find_dtype(dtype)
    if d.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if d.kind != "float":
        low, high = max(int(d.min), -2**40), min(int(d.max), 2**40)
        x = rng.integers(low, high + 1, shape, dtype=np.int64).astype(
            np.int8 if d.packed else d.numpy)
        return ts.tensor(x, dtype) if d.packed else x
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, shape))
    if x.size > 4:
        x.reshape(-1)[:4] = [0.0, -0.0, np.inf, -np.inf]
    return x if dtype == "f64" else ts.tensor(x.astype(np.float32), dtype)


def zeros(shape, dtype: str):
    d = find_dtype(dtype)
    if d.kind == "float" and dtype not in ("f32", "f64") or d.packed:
        return ts.zeros(shape, dtype)
    return np.zeros(shape, d.numpy)


def kernel(source: str, **names):
    return build(source, **names)["k"]


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


# --- atomics ------------------------------------------------------------------------------------
UPDATED = [t for t in WHOLE if t != "bool_"]


def small(rng, n: int, dtype: str):
    """Whole numbers whose sums are exact in any order."""
    d = find_dtype(dtype)
    low = 0 if d.kind == "uint" else -2
    x = rng.integers(low, 3, n)
    if d.kind != "float":
        return x.astype(d.numpy)
    return x.astype(np.float64) if dtype == "f64" else ts.tensor(x.astype(np.float32), dtype)


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


# --- reports ------------------------------------------------------------------------------------
def run_checked(k, *args, groups=None, lanes=None, checked=True, monkeypatch=None):
    """Runs with the kernel's sites registered; raises what the kernel reported."""
    import tessera.tile.launch.reports  # noqa: F401  kinds of errors
    from tessera.runtime import flags
    from tessera.tile.cuda.compile import compile_function
    from tile_gpu import facts_of, prepare

    bound, function, _, lanes_, _, schedule = prepare(k, args, {}, groups, lanes)
    made = compile_function(function, lanes_, schedule=schedule, facts=facts_of(function, bound),
                            checked=checked)
    monkeypatch.setitem(flags._tables, 1, (k.__name__,
                                           tuple(flags.ReportSite(*s) for s in made.emitted.sites)))
    return on_gpu(k, *args, groups=groups, lanes=lanes, checked=checked)


def test_printed_lines_are_those_of_the_interpreter(monkeypatch, capsys):
    from tessera.runtime import flags

    k = kernel("""
@kernel
def k(x: Tensor["n", f32], b: Tensor["n", ts.bool_]):
    i = tile.linear_id()
    print("groups", n, x[0])
    if i < 3:
        print("lane", i, f"x = {x[i]}, {b[i]}")
    if tile.group_id() == 1:
        print("done")
""")
    x, b = np.float32([0.1, -2.5, 1e30] + [0.0] * 61), np.zeros(64, bool)
    b[1] = True
    k[2, 32](x, b)
    wanted = capsys.readouterr().out.splitlines()
    flags.printed_lines().take()
    run_checked(k, x, b, groups=2, lanes=32, monkeypatch=monkeypatch)
    assert sorted(flags.printed_lines().take()) == sorted(wanted)


def test_a_tile_is_printed_by_elements(monkeypatch):
    from tessera.runtime import flags

    k = kernel("""
@kernel
def k(X: Tensor["M", "N", f32]):
    print("tile", tile.load(X[0:4, 0:3]), "end")
""")
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    flags.printed_lines().take()
    run_checked(k, x, groups=1, lanes=64, monkeypatch=monkeypatch)
    assert sorted(flags.printed_lines().take()) == sorted(
        f"tile [{i}, {j}] {x[i, j]} end" for i in range(4) for j in range(3))


@pytest.mark.parametrize("n", [1, 4, 40, 100])
def test_a_tile_of_one_axis_is_printed_whole(n, monkeypatch):
    """Each element once; the numbers printed with it in a line of their own."""
    from tessera.runtime import flags

    k = kernel(f"""
@kernel
def k(x: Tensor["n", f32]):
    t = tile.load(x[0:{n}])
    print("t", t, tile.reduce_sum(t))
""")
    x = np.arange(n, dtype=np.float32)
    flags.printed_lines().take()
    run_checked(k, x, groups=1, lanes=64, monkeypatch=monkeypatch)
    assert sorted(flags.printed_lines().take()) == sorted(
        [f"t (tile<{n} x f32>) {x.sum()}", *(f"t [{i}] {x[i]} (f32)" for i in range(n))])


def test_a_failed_assertion_is_reported(monkeypatch):
    k = kernel("""
@kernel
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        assert x[i] < 5.0, f"x[{i}] is {x[i]}"
""")
    x = np.zeros(300, np.float32)
    run_checked(k, x, lanes=100, groups=3, monkeypatch=monkeypatch)
    x[123] = 7.5
    with pytest.raises(ts.TesseraError, match=r"lane 23 of group 1: x\[123\] is 7.5"):
        run_checked(k, x, lanes=100, groups=3, monkeypatch=monkeypatch)


def test_a_failed_assertion_on_a_tile_is_reported(monkeypatch):
    k = kernel("""
@kernel
def k(X: Tensor["M", "N", f32]):
    assert tile.load(X[tile_m:tile_m+10, 0:6]) >= 0.0, "negative"
""")
    x = np.zeros((20, 6), np.float32)
    run_checked(k, x, monkeypatch=monkeypatch)
    x[13, 5] = -1
    with pytest.raises(ts.TesseraError, match="group 1: negative"):
        run_checked(k, x, monkeypatch=monkeypatch)


@pytest.mark.parametrize("index, says", [
    ("i", "index 300 is outside of 'x': axis 0 has extent 300"), ("i - 1", "index -1 is outside")])
@pytest.mark.parametrize("how", ["y[0] = x[{}]", "x[{}] = 1.0", "tile.atomic_add(x, {}, 1.0)"])
def test_indices_out_of_range_are_reported(index, says, how, monkeypatch):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", f32], y: Tensor["m", f32]):
    i = tile.linear_id()
    if i <= n and i % 300 == 0:
        {how.format(index)}
""")
    with pytest.raises(ts.TesseraError, match=says) as caught:
        run_checked(k, np.zeros(300, np.float32), np.zeros(1, np.float32), groups=4, lanes=100,
                    monkeypatch=monkeypatch)
    assert caught.value.code == "E_BOUNDS"


def test_indices_of_buffers_are_checked(monkeypatch):
    k = kernel("""
@kernel
def k(p: Tensor["n", i32], y: Tensor["n", f32]):
    s = tile.alloc_shared((4, 8), f32, stages=2)
    r = tile.alloc_register((3,), f32)
    i = tile.linear_id()
    for j in range(0, 3):
        r[j] = 1.0
    s[p[2], i % 4, i % 8] = 1.0
    y[i] = r[p[i]]
""")
    fine = np.array([0, 2, 1, 1] * 8, np.int32)
    run_checked(k, fine, np.zeros(32, np.float32), groups=1, lanes=32, monkeypatch=monkeypatch)
    for at, wrong, says in ((7, 3, "index 3 is outside of 'r'"), (2, 2, "stage 2 of 's'")):
        p = fine.copy()
        p[at] = wrong
        with pytest.raises(ts.TesseraError, match=says):
            run_checked(k, p, np.zeros(32, np.float32), groups=1, lanes=32,
                        monkeypatch=monkeypatch)
