"""Rows TILE of copies, matmuls and loads, and of what a specialisation holds."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.tile.ir.printing import print_ir
from tolerance import assert_close


# --- copies and shared memory -----------------------------------------------------------------
@pytest.mark.row("TILE-18")
def test_a_list_of_shared_buffers_has_a_stage_dimension():
    names = build("""@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    s = [tile.alloc_shared((128,), f32), tile.alloc_shared((128,), f32)]
    stage, t = 0, tile.local_id()
    for i in range(0, n, 128):
        s[stage][t] = x[i + t]
        tile.barrier()
        y[i + t] = s[stage][127 - t]
        stage = 1 - stage
x = np.arange(512, dtype=np.float32)
y = np.zeros_like(x)
with ts.config.scope(debug=True):
    k[1](x, y)
""")
    assert np.array_equal(names["y"].reshape(4, 128), names["x"].reshape(4, 128)[:, ::-1])
    assert names["k"].shared_bytes == 2 * 128 * 4
    assert "shared<128 x f32" in names["k"].inspect_ir()
    assert names["k"].inspect_ir().count("allocate(") == 1


@pytest.mark.row("TILE-22", "TILE-23")
@pytest.mark.parametrize("rows, cols", [(64, 64), (50, 40), (1, 1)])
def test_a_copy_fills_the_edge_with_zeros(rows, cols, rng):
    k = build("""@kernel
def k(A: Tensor["M", "N", f32], Q: Tensor["B*H", "R", "D", f32], out: Tensor["X", "Y", f32],
      each: Tensor["B*H", "U", "D", f32]):
    s, q = tile.alloc_shared((64, 64), f32, swizzle="xor"), tile.alloc_shared((32, 8), f32)
    tile.cp_async(s, A[0:64, 0:64])
    tile.cp_async(q, Q[16:48])
    tile.barrier()
    tile.store(out[0:64, 0:64], tile.load(s))
    tile.store(each[0:32], tile.load(q))
""")["k"]
    a = rng.standard_normal((rows, cols)).astype(np.float32)
    q = rng.standard_normal((1, 40, 8)).astype(np.float32)
    out, each = np.full((64, 64), np.nan, np.float32), np.full((1, 32, 8), np.nan, np.float32)
    with config.scope(debug=True):
        k(a, q, out, each)
    want = np.zeros((64, 64), np.float32)
    want[:rows, :cols] = a
    assert np.array_equal(out, want)
    assert np.array_equal(each[0, :24], q[0, 16:]) and not each[0, 24:].any()


WAITS = """@kernel
def k(A: Tensor["M", "N", f32], out: Tensor["M", "N", f32]):
    s = [tile.alloc_shared((16, 16), f32) for _ in range(2)]
    tile.cp_async(s[0], A[0:16, 0:16])
    {first}
    tile.cp_async(s[1], A[16:32, 0:16])
    {second}
    tile.cp_wait_group({pending})
    tile.barrier()
    tile.store(out[0:16, 0:16], tile.load(s[{read}]))
"""
COMMIT = "tile.cp_commit_group()"


@pytest.mark.row("TILE-24", "TILE-25")
@pytest.mark.parametrize("first, second, pending, read, arrived", [
    (COMMIT, COMMIT, 1, 0, True), (COMMIT, COMMIT, 1, 1, False), (COMMIT, COMMIT, 0, 1, True),
    (COMMIT, COMMIT, 2, 0, False),
    ("pass", "pass", 0, 1, True),  # waiting commits what is not committed
    (COMMIT, "pass", 1, 0, True), ("pass", COMMIT, 1, 0, False)])
def test_groups_of_copies(first, second, pending, read, arrived, rng):
    k = build(WAITS.format(first=first, second=second, pending=pending, read=read))["k"]
    a, out = rng.standard_normal((32, 16)).astype(np.float32), np.zeros((32, 16), np.float32)
    with config.scope(debug=True):
        if arrived:
            k(a, out)
            assert np.array_equal(out[:16], a[16 * read:16 * read + 16])
        else:
            with pytest.raises(ts.TesseraError, match="asynchronous copy"):
                k(a, out)


@pytest.mark.row("TILE-27")
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_vector_holds_neighbours_of_a_row(dtype, rng):
    k = build(f"""@kernel
def k(src: Tensor["M", "N", ts.{dtype}], dst: Tensor["M", "N", ts.{dtype}]):
    for r in range(0, M):
        tile.store_vector(dst[r], tile.load_vector(src[r], width=4))
""")["k"]
    src = ts.tensor(rng.standard_normal((5, 304)).astype(np.float32), dtype)
    dst = ts.zeros((5, 304), dtype)
    with config.scope(debug=True):
        k[1, 96](src, dst)
    assert dst.numpy().tobytes() == src.numpy().tobytes()
    (read,) = [p for p in k.report.patterns.values() if not p.write]
    assert read.efficiency == 1.0 and "width=4" in k.inspect_ir()
    with pytest.raises(ts.TesseraError, match="width=3: an access has 1, 2, 4, 8 or 16"):
        build("""@kernel
def k(src: Tensor["M", "N", f32]):
    v = tile.load_vector(src[0], width=3)
k(A)
""")


# --- matmuls ---------------------------------------------------------------------------------
@pytest.mark.row("TILE-31", "TILE-33", "TILE-50")
@pytest.mark.parametrize("op", ["mma", "dot"])
def test_a_matmul_of_shared_tiles(op, rng):
    k = build(f"""@kernel
def k(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", f32]):
    a, b = tile.alloc_shared((32, 48), bf16), tile.alloc_shared((64, 48), bf16, swizzle="xor")
    tile.cp_async(a, A[0:32, 0:48])
    tile.cp_async(b, B[0:64, 0:48])
    tile.barrier()
    acc = tile.{op}(a, b.T)
    assert acc.dtype is f32 and acc.shape == (32, 64) and acc.space == "register"
    tile.store(C[0:32, 0:64], acc)
""")["k"]
    a, b = (ts.tensor(rng.standard_normal((n, 48)).astype(np.float32), "bf16") for n in (32, 64))
    c = np.full((32, 64), np.nan, np.float32)
    with config.scope(debug=True):
        k(a, b, c)
    want = np.asarray(a.numpy(), np.float64) @ np.asarray(b.numpy(), np.float64).T
    assert np.abs(c - want).max() < 1e-3 * np.sqrt(48)
    assert k.shared_bytes == (32 + 64) * 48 * 2  # the transpose has no memory of its own
    assert_close(np.asarray(ts.tile.dot(a, b.T)), want, dtype="bf16", n=48)


@pytest.mark.row("TILE-32")
def test_the_accumulator_of_a_matmul(rng):
    k = build("""@kernel
def k(A: Tensor["M", "K", f16], B: Tensor["K", "N", f16], wide: Tensor["M", "N", f32],
      narrow: Tensor["M", "N", f32], added: Tensor["M", "N", f32]):
    a, b = tile.load(A[0:16, 0:64]), tile.load(B[0:64, 0:16])
    x, y = tile.mma(a, b, accumulator=f32), tile.mma(a, b, accumulator=f16)
    assert x.dtype is f32 and y.dtype is f16
    tile.store(wide[0:16, 0:16], x)
    tile.store(narrow[0:16, 0:16], y)
    tile.store(added[0:16, 0:16], tile.mma(a, b, accumulator=x))
""")["k"]
    a, b = ts.tensor(rng.standard_normal((16, 64)), "f16"), ts.tensor(rng.standard_normal((64, 16)),
                                                                     "f16")
    wide, narrow, added = (np.zeros((16, 16), np.float32) for _ in range(3))
    k(a, b, wide, narrow, added)
    want = np.asarray(a.numpy(), np.float64) @ np.asarray(b.numpy(), np.float64)
    assert_close(wide, want, dtype="f32", n=64)
    assert_close(narrow, want, dtype="f16", n=64)
    assert np.array_equal(narrow, narrow.astype(np.float16)) and not np.array_equal(narrow, wide)
    assert_close(added, 2 * want, dtype="f32", n=128)


# --- loads ------------------------------------------------------------------------------------
@pytest.mark.row("TILE-46", "TILE-47", "TILE-48")
@pytest.mark.parametrize("length", [64, 50, 3])
def test_loads_of_blocks(length, rng):
    k = build("""@ts.kernel.schedule(ts.Schedule(block=(16, 32), vector=4).with_values({"BD": 8}))
def k(q: Tensor["B*H", "S", "D", f32], own: Tensor["B*H", "S", "D", f32],
      second: Tensor["B*H", "S", "D", f32], some: Tensor["B*H", "X", "Y", f32]):
    T = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    assert Qb.shape == (16, 8)
    tile.store(own, Qb)
    Kb = tile.load(q, 1, cols=T.d, vector=T.vector)
    assert Kb.shape == (32, 8)
    if tile.group_id(1) == 0:
        tile.store(second[0:32], Kb)
        tile.store(some[0:8, 0:4], tile.load(q[2:10, 4:8]))
""")["k"]
    q = rng.standard_normal((3, length, 8)).astype(np.float32)
    own, second = np.full_like(q, np.nan), np.full_like(q, np.nan)
    some = np.full((3, 8, 4), np.nan, np.float32)
    with config.scope(debug=True):
        k(q, own, second, some)
    assert np.array_equal(own, q)
    blank = np.zeros((3, 96, 8), np.float32)
    blank[:, :length] = q
    assert np.array_equal(second[:, :32], blank[:, 32:64][:, :second.shape[1]])
    assert np.array_equal(some, blank[:, 2:10, 4:8])


# --- random numbers and collectives -----------------------------------------------------------
DROP = """@kernel
def k(X: Tensor["B*H", "M", "N", f32], Y: Tensor["B*H", "M", "N", f32]):
    t = tile.load(X[tile_m:tile_m+{0}, tile_n:tile_n+{1}])
    tile.store(Y[tile_m:tile_m+{0}, tile_n:tile_n+{1}], tile.dropout_in_kernel(t, p={2}))
"""


@pytest.mark.row("TILE-59")
def test_dropout_in_a_kernel(rng):
    x = rng.uniform(0.5, 1.5, (4, 90, 70)).astype(np.float32)
    results = []
    for rows, cols in ((16, 32), (32, 16), (90, 70), (16, 32)):
        y = np.full_like(x, np.nan)
        with ts.config.scope(seed=3):
            build(DROP.format(rows, cols, 0.25))["k"](x, y)
        results.append(y)
    assert all(np.array_equal(r, results[0]) for r in results)
    kept = results[0] != 0
    np.testing.assert_allclose(results[0][kept], x[kept] / 0.75, rtol=1e-6)
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / x.size)
    assert abs(results[0].mean() - x.mean()) < 0.03
    assert not np.array_equal(kept[0], kept[1])  # each matrix of the batch has its own mask
    with config.scope(seed=1):
        build(DROP.format(16, 32, 0.25))["k"](x, y)
    assert not np.array_equal(y, results[0])
    build(DROP.format(16, 32, 0))["k"](x, y)
    assert np.array_equal(y, x)


@pytest.mark.row("TILE-60")
def test_collectives_of_warps_and_groups(rng):
    k = build("""@kernel
def k(x: Tensor["n", f32], warp: Tensor["W", "n", f32], group: Tensor["W", "n", f32]):
    i = tile.linear_id()
    v = x[i]
    warp[0, i], warp[1, i] = tile.warp_sum(v), tile.warp_max(v)
    warp[2, i], warp[3, i] = tile.warp_scan(v), tile.shuffle(v, 7)
    group[0, i], group[1, i] = tile.group_sum(v), tile.group_max(v)
    group[2, i] = tile.group_min(v)
""")["k"]
    x = rng.standard_normal(384).astype(np.float32)
    warp, group = np.zeros((4, 384), np.float32), np.zeros((4, 384), np.float32)
    k(x, warp, group)
    by_warp, by_group = (x.astype(np.float64).reshape(-1, n, 1) for n in (32, 128))
    each = [by_warp.sum(1), by_warp.max(1), np.cumsum(by_warp, 1)[..., 0], by_warp[:, 7]]
    for got, want in zip(warp, each, strict=True):
        assert_close(got.reshape(-1, 32), np.broadcast_to(want, (12, 32)), dtype="f32", n=32)
    for got, want in zip(group, (by_group.sum(1), by_group.max(1), by_group.min(1)), strict=False):
        assert_close(got.reshape(-1, 128), np.broadcast_to(want, (3, 128)), dtype="f32", n=128)


# --- constants of a specialisation ------------------------------------------------------------
@pytest.mark.row("TILE-68")
def test_every_candidate_compiles_with_its_block_sizes(rng):
    q = ts.tensor(rng.standard_normal((1, 128, 32)).astype(np.float32), "bf16")
    assert len(seeds.flash_attention.space) == 16
    plain = ts.kernel(seeds.flash_attention.fn)
    for schedule in seeds.flash_attention.space:
        k = plain.with_schedule(schedule)
        k.lower(q, q, q)
        m, n = schedule.value("BLOCK_M"), schedule.value("BLOCK_N")
        assert k.shared_bytes == (m + 2 * n) * 32 * 2
        assert f"tile<{m}x{n} x f32>" in k.inspect_ir()


@pytest.mark.row("TILE-69", "TILE-84")
def test_what_specialises(rng):
    k = ts.kernel(seeds.flash_attention.fn).with_schedule(ts.Schedule(block=(64, 64)))
    with config.scope(debug=False):
        for length, size in ((64, 32), (100, 32), (64, 16)):
            q = ts.tensor(rng.standard_normal((1, length, size)).astype(np.float32), "bf16")
            k(q, q, q)
        assert len(k.specializations) == 2  # for D, not for S
        assert {dict(s.constants)["D"] for s in k.specializations} == {16, 32}
        causal, full = k(q, q, q, True), k(q, q, q, is_causal=False)
        assert len(k.specializations) == 3
        assert np.array_equal(k(q, q, q), causal) and not np.array_equal(causal, full)
    assert ["causal_mask" in print_ir(s) for s in k.specializations] == [True, True, False]
