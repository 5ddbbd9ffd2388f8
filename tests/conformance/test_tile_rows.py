"""Rows of TILE, IR, SCHED and DBG that need the interpreter only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.tile.ir.ir import definitions
from tessera.tile.ir.parsing import parse_ir
from tessera.tile.ir.printing import print_ir
from tessera.tile.ir.types import space_of
from tolerance import assert_close


def ids(expression: str, groups: int = 3) -> np.ndarray:
    k = build(f"""@kernel
def k(out: Tensor["n", i32]):
    out[tile.linear_id()] = {expression}
""")["k"]
    out = np.full(128 * groups, -1, np.int32)
    with config.scope(debug=True):
        k(out)
    return out


@pytest.mark.row("TILE-01", "CORE-11", "TILE-75")
def test_linear_id():
    assert np.array_equal(ids("tile.linear_id()"), np.arange(384))
    by_parts = ids("tile.group_id() * tile.group_size() + tile.local_id()")
    assert np.array_equal(by_parts, np.arange(384))


@pytest.mark.row("TILE-72")
@pytest.mark.parametrize("groups", [1, 3])
def test_the_levels_number_every_lane_once(groups):
    """Mesh, device, group, warp, lane: lanes = groups x warps of a group x 32, and the page names
    them so."""
    group, warp, lane, size, count = (ids(f"tile.{name}()", groups) for name in (
        "group_id", "warp_id", "lane_id", "group_size", "num_groups"))
    assert set(size) == {128} and set(count) == {groups}
    assert np.array_equal((group * 4 + warp) * 32 + lane, np.arange(groups * 128))
    assert np.array_equal(ids("tile.linear_id()", groups), group * size + warp * 32 + lane)
    page = (Path(ts.__file__).parents[1] / "docs" / "guide" / "kernels.md").read_text()
    assert "A kernel runs as many **groups**. A group is a number of **threads**" in page
    assert "32 neighbouring threads are a warp, and are its **lanes**" in page


@pytest.mark.row("TILE-02")
def test_group_id():
    assert np.array_equal(np.bincount(ids("tile.group_id()")), [128, 128, 128])


@pytest.mark.row("TILE-03")
def test_lane_id():
    assert np.array_equal(ids("tile.lane_id()"), np.arange(384) % 32)


@pytest.mark.row("TILE-04")
def test_local_id():
    assert np.array_equal(ids("tile.local_id()"), np.arange(384) % 128)
    assert np.array_equal(ids("tile.warp_id()"), np.arange(384) % 128 // 32)


@pytest.mark.row("TILE-05")
def test_group_size():
    assert set(ids("tile.group_size()")) == {128}
    k = build("""@kernel
def k(out: Tensor["n", i32]):
    i = tile.linear_id()
    if i < n:
        out[i] = tile.group_size() + 1000 * tile.num_groups()
""")["k"]
    out = np.zeros(100, np.int32)
    k[4, 64](out)
    assert set(out) == {4064}


@pytest.mark.row("TILE-16", "DBG-08")
@pytest.mark.parametrize("swizzle,degree", [("None", 32), ("'xor'", 1)])
def test_bank_conflicts_of_a_column(swizzle, degree):
    k = build(f"""@kernel
def k(A: Tensor["M", "N", f32], out: Tensor["M", "N", f32]):
    s = tile.alloc_shared((32, 32), f32, swizzle={swizzle})
    t = tile.local_id()
    for r in range(32):
        s[r, t] = A[r, t]
    tile.barrier()
    for c in range(32):
        out[c, t] = s[t, c]
""")["k"]
    a = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    out = np.zeros_like(a)
    with config.scope(debug=True):
        k[1, 32](a, out)
    assert np.array_equal(out, a.T)
    shared = {p.write: p.degree for p in k.report.patterns.values() if p.space == "shared"}
    assert shared == {True: 1, False: degree}


@pytest.mark.row("TILE-49")
def test_a_store_leaves_out_what_is_outside(rng):
    k = build("""@kernel
def k(C: Tensor["M", "N", f32]):
    tile.store(C[tile_m:tile_m+8, tile_n:tile_n+16], tile.full((8, 16), 7.0))
""")["k"]
    guard = np.zeros((40, 60), np.float32)
    inner = guard[4:31, 8:45]
    k(inner)
    assert (inner == 7).all() and guard.sum() == 7 * inner.size


@pytest.mark.row("TILE-54", "TILE-55", "TILE-56")
def test_mask_causal_by_positions():
    k = build("""@ts.kernel.schedule(ts.Schedule(block=(16, 8)))
def k(S: Tensor["Q", "K", f32]):
    ctx = tile.context()
    for b in tile.range_n(S.T_shape if False else (K, K), ctx.n):
        t = tile.load(S[tile_q:tile_q+16, b*8:b*8+8])
        tile.mask_causal(t, tile.row_index(), tile.col_index(b))
        tile.store(S[tile_q:tile_q+16, b*8:b*8+8], t)
""")["k"]
    s = np.ones((40, 40), np.float32)
    k(s)
    assert np.array_equal(np.isneginf(s), ~np.tril(np.ones((40, 40), bool)))


@pytest.mark.row("TILE-54", "TILE-55")
@pytest.mark.parametrize("queries, keys", [(20, 45), (1, 33), (33, 33)])
def test_the_last_query_sees_every_key(queries, keys):
    k = build("""@ts.kernel.schedule(ts.Schedule(block=(16, 8)))
def k(S: Tensor["Q", "T", f32], K: Tensor["T", "D", f32]):
    ctx = tile.context()
    for b in tile.range_n(K.shape, ctx.n):
        t = tile.load(S[tile_q:tile_q+16, b*8:b*8+8])
        tile.mask_causal(t, tile.row_index(), tile.col_index(b))
        tile.store(S[tile_q:tile_q+16, b*8:b*8+8], t)
""")["k"]
    s = np.ones((queries, keys), np.float32)
    k(s, np.zeros((keys, 4), np.float32))
    seen = np.arange(keys) <= keys - queries + np.arange(queries)[:, None]
    assert np.array_equal(np.isneginf(s), ~seen)


@pytest.mark.row("TILE-61")
def test_every_value_has_a_space():
    function = seeds.gemm.lower(*gemm_arguments())
    spaces = {v.name: space_of(t) for v, t in definitions(function).items()}
    assert spaces["A"] == "global" and spaces["smem_a"] == "shared"
    sums = re.search(r"%(\w+): tile<64x64 x f32> = matmul", print_ir(function))[1]
    assert spaces[sums] == "register"
    text = print_ir(function)
    assert "%smem_a: shared<64x32 x bf16 @xor" in text and "in global> = view(%A" in text
    with pytest.raises(ts.TesseraError, match="from a view in global memory to shared memory"):
        build("""@kernel
def k(A: Tensor["M", "N", f32]):
    tile.cp_async(tile.zeros((8, 8)), A[0:8, 0:8])
k(A)
""")


@pytest.mark.row("TILE-67", "TILE-70", "TILE-71")
def test_the_context_has_every_name():
    build("""@ts.kernel.schedule(ts.Schedule(block=(32, 16), vector=8).with_k(64))
def k(Q: Tensor["B*H", "S", "D", f32]):
    T = tile.context()
    assert T.m == T.BM == T.BLOCK_M == 32 and T.n == T.BN == T.BLOCK_N == 16
    assert T.k == T.BK == T.BLOCK_K == 64 and T.vector == 8 and T.warps == T.num_warps == 4
    assert T.stages == T.num_stages == 2
    if T.S != 50 or T.D != 24:
        Q[0, 0] = 1.0
x = np.zeros((6, 50, 24), np.float32)
k(x)
assert not x.any()
""")


@pytest.mark.row("TILE-76", "TILE-78", "TILE-79")
def test_shared_memory_belongs_to_a_group():
    names = build("""@kernel
def k(out: Tensor["n", i32]):
    s = tile.alloc_shared((1,), i32)
    mine = tile.alloc_register(i32)
    mine = tile.linear_id()
    if tile.local_id() == 5:
        s[0] = 10 * tile.group_id()
    tile.barrier()
    out[tile.linear_id()] = s[0] + mine - tile.linear_id()
out = np.zeros(384, np.int32)
k(out)
""")
    assert np.array_equal(names["out"], np.arange(384) // 128 * 10)


def gemm_arguments():
    zeros = ts.zeros((8, 8), "bf16")
    return zeros, zeros, np.zeros((8, 8), np.float32)


KERNELS = ["saxpy", "tile_example", "process_chunks", "cooperative_reduction", "gemm",
           "memory_hierarchy_example", "optimized_memory_access", "double_buffered_gemm",
           "corrected_gemm", "flash_attention"]


@pytest.mark.row("IR-03")
@pytest.mark.parametrize("name", KERNELS)
def test_the_text_of_tile_ir_reads_back(name):
    kernel = getattr(seeds, name)
    text = kernel.inspect_ir("tile", D=64)
    function = parse_ir(text)
    assert function == kernel.last and print_ir(function) == text
    assert function.content_hash == kernel.last.content_hash
    assert "version 1" in text and "seeds.py:" in text
    with pytest.raises(ts.TesseraError, match="version 9 is not the version 1"):
        parse_ir(text.replace("version 1", "version 9"))


@pytest.mark.row("IR-08")
def test_the_hash_is_the_same_in_another_process_and_sensitive():
    text = """
import sys; sys.path[:0] = ['tests', '.']
from kernels import seeds
seeds.gemm.inspect_ir('tile'); print(seeds.gemm.last.content_hash)
"""
    other = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    seeds.gemm.inspect_ir("tile")
    mine = seeds.gemm.last.content_hash
    assert other.stdout.strip() == mine
    source = """@kernel
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        x[i] = {}
k(x)
"""
    hashes = {build(source.format(v))["k"].last.content_hash for v in ("1.0", "2.0", "x[i]")}
    assert len(hashes) == 3
    moved = build("\n\n" + source.format("1.0"))["k"].last
    assert moved.content_hash in hashes


@pytest.mark.row("IR-05")
def test_levels():
    assert seeds.saxpy.inspect_ir("tile").startswith("tile.func @saxpy")
    k = build("@kernel\ndef fresh(x: Tensor['n', f32]):\n    x[0] = 1.0\nfresh(x)\n")["fresh"]
    assert ts.inspect_ir("tile") == ts.inspect_ir("tile", k) == k.inspect_ir("tile")
    with pytest.raises(ts.ArgumentError, match="has no level 'mlir'"):
        seeds.saxpy.inspect_ir("mlir")


@pytest.mark.row("SCHED-01", "SCHED-02", "SCHED-06", "SCHED-11", "SCHED-12", "SCHED-13", "SCHED-14")
def test_schedules_are_built_and_inherited():
    s = ts.block(128, 64).k(32).warps(8).stages(3).vector(8).swizzle("xor")
    assert (s.block, s.k, s.warps, s.stages, s.vector, s.swizzle) == ((128, 64), 32, 8, 3, 8, "xor")
    base = ts.Schedule(block=(128, 128), warps=8, stages=3)
    small = base.with_block(64, 64)
    assert small.block == (64, 64) and small.warps == 8 and small.stages == 3
    assert small.parent is base and base.block == (128, 128)
    assert base.with_warps(4).block == (128, 128) and base.with_warps(4).warps == 4
    assert base == ts.Schedule(block=(128, 128), warps=8, stages=3) and hash(base) is not None
    with pytest.raises(AttributeError):
        base.m = 3
    with pytest.raises(ts.ArgumentError, match="positive integers"):
        base.warps(0)
    with pytest.raises(ts.ArgumentError, match="did you mean 'stages'"):
        ts.Schedule(stagess=3)


@pytest.mark.row("SCHED-07")
def test_lists_make_a_space():
    space = ts.Schedule().block(m=[64, 128], n=[64, 128], k=[64])
    space = space.warps([4, 8]).stages([2, 3]).vector([4, 8])
    assert len(space) == 32 and len({s for s in space}) == 32
    assert {s.value("m") for s in space} == {64, 128} and all(not s.is_space for s in space)


@pytest.mark.row("SCHED-10")
def test_a_schedule_has_a_text_and_a_source():
    assert seeds.saxpy.schedule.source == "auto"
    text = seeds.saxpy.inspect_ir("schedule")
    assert "source auto" in text and "warps 4  // default" in text


@pytest.mark.row("SCHED-15", "SCHED-16")
@pytest.mark.parametrize("space", [dict(BM=[16, 32], BN=[16], BD=[8], warps=[4, 8], stages=[2, 3]),
                                   dict(BLOCK_M=[16, 32], BLOCK_N=[16], num_warps=[4, 64])])
def test_autotune_on_the_host(space, rng):
    k = build("""@ts.kernel.autotune(space=space, budget_ms=50)
def k(X: Tensor["M", "D", f32], Y: Tensor["M", "D", f32]):
    T = tile.context()
    factor = tile.reduce_max(tile.full((T.n,), 2.0))
    tile.store(Y, tile.load(X, rows=T.m, cols=T.d) * factor)
""", space=space)["k"]
    x = rng.standard_normal((50, 8)).astype(np.float32)
    y = np.zeros_like(x)
    k(x, y)
    assert np.array_equal(y, 2 * x)
    trace = k.tuning_trace
    assert len(trace) == len(k.space) and [t.status for t in trace].count("chosen") == 1
    assert k.best_config["m"] in (16, 32) and k.schedule.source == "tuned"
    skipped = [t for t in trace if t.status == "skipped"]
    assert all("lanes" in t.reason for t in skipped)
    assert len(skipped) == (2 if 64 in space.get("num_warps", ()) else 0)
    chosen = min((t for t in trace if t.status != "skipped"), key=lambda t: t.estimate_us)
    assert chosen.status == "chosen"


def test_one_switch(fresh_config):
    fresh_config.setenv("TESSERA_DEBUG", "1")
    config.reset()
    with pytest.raises(ts.TesseraError, match="nothing has written it"):
        build("""@kernel
def k(y: Tensor["n", f32]):
    s = tile.alloc_shared((128,), f32)
    y[tile.local_id()] = s[tile.local_id()]
k(y)
""")


def test_the_source_of_a_nan():
    names = build("""@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        v = x[i] - 1.0
        w = tile.sqrt(v)
        y[i] = w + 1.0
""")
    k, x = names["k"], np.zeros(10, np.float32)
    with config.scope(debug=True):
        k(x, x.copy())
        sources = [(op, where.text) for op, where in k.report.nan_sources]
        assert sources == [("sqrt", "w = tile.sqrt(v)")]
        with config.scope(numerics="raise"):
            with pytest.raises(ts.NumericsError, match="sqrt makes NaN"):
                k(x, x.copy())


def test_breakpoint_and_print(monkeypatch, capsys):
    seen = {}

    def hook():
        frame = sys._getframe(1)
        seen.update(frame.f_locals["values"])
        seen["line"] = frame.f_locals["where"].text

    monkeypatch.setattr(sys, "breakpointhook", hook)
    build("""@kernel
def k(x: Tensor["n", f32]):
    i = tile.local_id()
    v = x[i] * 2.0
    breakpoint()
    if i < 2:
        print("lane", i, f"v={v}")
x = np.arange(128, dtype=np.float32)
k[1](x)
""")
    assert np.array_equal(seen["v"][0], np.arange(128) * 2.0) and "breakpoint()" in seen["line"]
    assert capsys.readouterr().out == "lane 0 v=0.0\nlane 1 v=2.0\n"


# --- ranges -----------------------------------------------------------------------------------
@pytest.mark.row("TILE-10")
def test_an_outer_range_over_the_result_is_the_grid(rng):
    names = build("""@kernel
def k(Q: Tensor["B*H", "S", "D", f32]) -> Tensor["B*H", "S", "D", f32]:
    ctx = tile.context()
    acc = tile.zeros((16, ctx.D))
    for q_block in tile.range(0, ctx.S, 16):
        print("rows", q_block)
        acc = tile.load(Q[q_block:q_block+16]) * 2.0
    return acc
""")
    k, q = names["k"], rng.standard_normal((6, 50, 8)).astype(np.float32)
    with config.scope(debug=True):  # two groups that store one row are a race
        assert np.array_equal(k(q), 2 * q)
    assert "launch axes [0:B*H by 1] [0:S by 16]" in k.inspect_ir()
    printed = sorted(int(line.split()[1]) for line in k.report.printed)
    assert printed == sorted([0, 16, 32, 48] * 6)  # each of 6 x 4 groups: one iteration


@pytest.mark.row("TILE-11")
def test_a_nested_range_is_serial_in_each_group(rng):
    q, k, v = (ts.tensor(rng.standard_normal((2, 200, 16)).astype(np.float32), "bf16")
               for _ in range(3))
    fixed = ts.kernel(seeds.flash_attention.fn).with_schedule(ts.Schedule(block=(64, 64)))
    with config.scope(debug=False):
        out = fixed(q, k, v, False)
    wide = [np.asarray(t.numpy(), np.float64) for t in (q, k, v)]
    s = wide[0] @ wide[1].swapaxes(1, 2) / 4
    p = np.exp(s - s.max(-1, keepdims=True))
    assert_close(out.numpy(), p / p.sum(-1, keepdims=True) @ wide[2], dtype="bf16", n=4)
    (loop,) = [line for line in fixed.inspect_ir().splitlines() if "for %" in line]
    assert "for %kv_block" in loop and "over" not in loop.split("carry")[0]


@pytest.mark.row("TILE-13")
def test_range_n_counts_the_blocks_of_a_sequence(rng):
    x = rng.standard_normal((1, 50, 8)).astype(np.float32)
    results = []
    for prefetch in (1, 2, 3):
        k = build(f"""@ts.kernel.schedule(ts.Schedule(block=(16, 16)))
def k(K: Tensor["B*H", "S", "D", f32], out: Tensor["B*H", "S", "D", f32]):
    T = tile.context()
    acc = tile.zeros((16, 8))
    for b in tile.range_n(K.shape, T.n, prefetch={prefetch}):
        print(b)
        acc += tile.load(K, b, cols=8)
    tile.store(out[0:16], acc)
""")["k"]
        out = np.zeros_like(x)
        k(x, out)
        assert k.report.printed == ["0", "1", "2", "3"]
        results.append(out)
    padded = np.zeros((64, 8))
    padded[:50] = x[0]
    assert_close(results[0][0, :16], padded.reshape(4, 16, 8).sum(0), dtype="f32", n=4)
    assert all(np.array_equal(r, results[0]) for r in results)
