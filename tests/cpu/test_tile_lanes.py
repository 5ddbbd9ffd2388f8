"""What lanes do on their own, in emulated instructions: as under the interpreter. Needs no GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import emulator
import tessera as ts
from kernels.build import build
from tessera import config
from tessera.errors import TesseraError
from tessera.tile.cuda.intrinsics import thread_elements
from tessera.tile.cuda.intrinsics.swizzle import Panel
from tessera.tile.ir.shared_layout import SharedLayout


def agree(source: str, *args, groups: int = 2, lanes: int = 45, target: str = "sm_80") -> None:
    emulator.compare(build(source)["k"], *args, groups=groups, lanes=lanes, target=target,
                     lockstep=False)


def whole(rng, n: int = 90, dtype=np.float32):
    return rng.integers(-3, 4, n).astype(dtype)


def test_divergent_loops_and_stores(rng):
    agree("""
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    i = tile.linear_id()
    total = 0.0
    for j in range(0, i % 7):
        if x[j] < 0.0:
            continue
        total += x[j] * j
        if total > 9.0:
            break
    y[i] = total
    y[0] = 5.0
""", whole(rng), np.zeros(90, np.float32))


@pytest.mark.parametrize("lanes", [45, 64])
def test_warps_and_groups(lanes, rng):
    agree("""
@kernel
def k(x: Tensor["n", i32], y: Tensor["m", "n", i32]):
    i = tile.linear_id()
    v = x[i]
    y[0, i] = tile.warp_sum(v)
    y[1, i] = tile.warp_scan(v)
    y[2, i] = tile.group_sum(v)
    y[3, i] = tile.shuffle_down(v, 3)
    y[4, i] = tile.shuffle(v, v)
    y[5, i] = tile.popcount(tile.ballot(v > 0))
    y[6, i] = tile.group_max(v) + int(tile.vote_all(v > -4))
""", whole(rng, 2 * lanes, np.int32), np.zeros((7, 2 * lanes), np.int32), lanes=lanes)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.float32, np.float64, np.uint16])
def test_atomics(dtype, rng):
    agree(f"""
@kernel
def k(x: Tensor["n", ts.{np.dtype(dtype).name}], h: Tensor["m", ts.{np.dtype(dtype).name}]):
    i = tile.linear_id()
    tile.atomic_add(h, i % 5, x[i])
    tile.atomic_max(h, 5 + i % 3, x[i])
    tile.atomic_add(h, 8, 1)
    if i % 2 == 0:
        tile.atomic_add(h, 9, 1)
""", np.abs(whole(rng)).astype(dtype), np.zeros(10, dtype))


def test_what_is_done_once_is_told_to_all():
    agree("""
@kernel
def k(c: Tensor["m", i32], y: Tensor["n", i32]):
    for j in range(0, 3):
        y[tile.linear_id()] += tile.atomic_add(c, 0, 2)
""", np.zeros(1, np.int32), np.zeros(45, np.int32), groups=1)


def test_random_words_and_stochastic_stores():
    agree("""
@kernel
def k(u: Tensor["n", ts.uint32], y: Tensor["n", f32]):
    i = tile.linear_id()
    u[i] = tile.random_bits(i - 3, seed=12345678901)
    y[i] = tile.random_uniform(i, seed=7)
""", np.zeros(90, np.uint32), np.zeros(90, np.float32))


def test_words_of_the_launch_and_of_seeds_that_are_arguments():
    agree("""
@kernel
def k(u: Tensor["n", ts.uint32], v: Tensor["n", ts.uint32], w: Tensor["n", ts.uint32],
      z: Tensor["n", bf16 @ts.stochastic_round], seed: int, other: i32):
    i = tile.linear_id()
    u[i] = tile.random_bits(i)
    v[i] = tile.random_bits(i, seed + 1)
    w[i] = tile.random_bits(i, other)
    z[i] = 1.001
""", *(np.zeros(90, np.uint32) for _ in range(3)), np.zeros(90, ml_dtypes.bfloat16), 2**35 - 1, -3)


def test_arrays_of_a_lane_and_vectors(rng):
    agree("""
@kernel
def k(x: Tensor["R", "C", f32], y: Tensor["R", "C", f32], p: Tensor["m", i32]):
    r = tile.alloc_register((6,), f32)
    i = tile.local_id()
    for j in range(0, 6):
        r[j] = 1.0 * j
    tile.store_vector(y[1], tile.load_vector(x[0], width=4))
    y[0, i] = r[p[i]]
""", whole(rng, 150).reshape(2, 75), np.zeros((2, 75), np.float32),
          rng.integers(0, 6, 45).astype(np.int32), groups=1)


@pytest.mark.parametrize("columns", [64, 62])
def test_pairs(columns, rng):
    """Also where a row of an odd number of pairs begins at 8 bytes of 16."""
    agree("""
@kernel
def k(x: Tensor["R", "C", f32], y: Tensor["R", "C", f32]):
    s, i = tile.alloc_shared((64,), f32), 2 * tile.local_id()
    a, b = tile.load_pair(x[0], i)
    tile.store_pair(s, i, b, a)
    tile.barrier()
    a, b = tile.load_pair(s, i)
    if i > 8:
        tile.store_pair(y[1], i, a, b)
""", whole(rng, 2 * columns).reshape(2, columns), np.zeros((2, columns), np.float32), groups=1,
          lanes=columns // 2)


SPANS = """
@kernel
def k(x: Tensor["R", "C", f32], y: Tensor["R", "D", f32], at: int, skip: int, count: int):
    s, row = tile.alloc_shared((512,), f32), tile.group_id(0)
    begin = skip + (row * y.shape[1] + at & 3)
    for i in range(0, 448, 64):
        n = i + tile.local_id()
        s[begin + n] = 2.0 * x[row, min(n, 400)]
    tile.store_span(y[row], at, s, begin, count)
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("at, skip, count", [(0, 0, 401), (3, 4, 390), (1, 1, 300), (5, 0, 2),
                                             (0, 0, 0), (8, 4, 33)])
def test_spans_out_of_shared_memory(at, skip, count, target, rng):
    """Rows of 401 begin anywhere in 16 bytes, of which the copy engine moves whole ones."""
    k, x, y = build(SPANS)["k"], whole(rng, 5 * 401).reshape(5, 401), np.zeros((5, 401), np.float32)
    given = dict(at=at, skip=skip, count=count)
    found = emulator.compare(k, x, y.copy(), groups=5, lanes=64, target=target, exact=True, **given)
    starts = -(np.arange(5) * 401 + at) % 8  # elements up to a sector's begin
    whole_sectors = np.maximum(0, (count - starts) // 8 * 8).sum()
    assert found.counts.get("bulk bytes", 0) == 4 * whole_sectors * (
        target == "sm_90a" and skip % 4 == 0)
    with config.scope(debug=True):
        k[5, 64](x, y, **given)
    want = np.zeros_like(y)
    want[:, at:at + count] = 2 * x[:, :count]
    np.testing.assert_array_equal(y, want)


def test_spans_are_stored_where_they_have_room(rng):
    x = whole(rng, 2 * 401).reshape(2, 401)
    with pytest.raises(TesseraError, match="400 elements, of which 'y' has 399 from there on"):
        build(SPANS)["k"][2, 64](x, x.copy(), 2, 0, 400)
    with pytest.raises(TesseraError, match="those of all lanes"):
        build(SPANS.replace("y[row], at", "y[row], tile.local_id()"))["k"][2, 64](x, x, 0, 0, 4)
    with pytest.raises(TesseraError, match="a buffer of one axis"):
        build(SPANS.replace("at, s, begin", "at, x[row], begin"))["k"][2, 64](x, x, 0, 0, 4)


def test_pairs_of_a_loop_over_lanes_are_there_after_it(rng):
    k = build("""
@kernel
def k(x: Tensor["R", "C", f32], y: Tensor["R", "C", f32]):
    s = tile.alloc_shared((128,), f32)
    for i in tile.range(0, 64, over="lanes"):
        a, b = tile.load_pair(x[0], 2 * i)
        tile.store_pair(s, 2 * i, b, a)
    y[0, tile.local_id()] = s[127 - tile.local_id()]
""")["k"]
    x, y = whole(rng, 128).reshape(1, 128), np.zeros((1, 128), np.float32)
    with config.scope(debug=True):
        k[1, 32](x, y)
    np.testing.assert_array_equal(y[0, :32], x[0, ::-1].reshape(-1, 2)[:16, ::-1].reshape(-1))
    (read,) = [p for p in k.report.patterns.values() if p.memory == "x"]
    assert read.efficiency == 1.0 and not read.write


@pytest.mark.parametrize("columns, dtype", [(32, "f32"), (64, "bf16"), (16, "f64"), (128, "int8"),
                                            (20, "f32"), (8, "bf16")])
def test_single_elements_lie_where_the_layout_says(columns, dtype):
    layout = SharedLayout(40, columns, ts.as_type(dtype).dtype.bits // 8, "xor")
    row, column = (x.reshape(-1).astype(np.int32) for x in np.mgrid[0:40, 0:columns])
    body = thread_elements.swizzled((40, columns, dtype, "xor")).rule(None, None).body
    got = body(emulator.ThreadBuilder(None), row, column)
    np.testing.assert_array_equal(got, layout.offset(row, column))
    assert Panel(40, columns, dtype, "xor").layout == layout


BITS = """@kernel
def whole(x: Tensor["M", 8], y: Tensor["M", 8, i32]):
    y[tile_m:tile_m+4, :] = tile.popcount(tile.load(x[tile_m:tile_m+4, :])) + tile.popcount(7)

@kernel
def single(x: Tensor["M", 8], y: Tensor["M", 8, i32]):
    i = tile.linear_id()
    if i < M * 8:
        y[i // 8, i % 8] = tile.popcount(x[i // 8, i % 8]) + 3
"""


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "bool"])
def test_bits_of_a_tile_and_of_a_lane_are_those_of_their_type(dtype, rng):
    names, size = build(BITS), np.dtype(dtype).itemsize
    x = rng.integers(0, 2 if dtype == "bool" else 256, (6, 8 * size)).astype(np.uint8).view(dtype)
    want = [[(int(v) & (1 << 8 * size) - 1).bit_count() + 3 for v in row] for row in x]
    for k in (names["whole"], names["single"]):
        y = np.zeros((6, 8), np.int32)
        k(x, y)
        assert np.array_equal(y, want)
        emulator.compare(k, x, np.zeros((6, 8), np.int32), target="sm_80", lockstep=False)
