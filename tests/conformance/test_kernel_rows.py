"""The seed documents' kernels under the interpreter (EX, KERN and kernel rows of TILE)."""

from __future__ import annotations

import inspect
import math

import ml_dtypes
import numpy as np
import pytest

import snippet
import tessera as ts
from attention_cases import attended64
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.tile.ir.errors import RaceError
from tolerance import assert_close


@pytest.fixture(autouse=True)
def checked():
    with config.scope(debug=True):
        yield


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32).astype(ml_dtypes.bfloat16)


def wide(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.row("EX-30", "KERN-02", "KERN-04", "KERN-06", "KERN-08")
@pytest.mark.parametrize("n", [0, 1, 127, 128, 1000])
def test_saxpy(n, rng):
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    before = y.copy()
    assert seeds.saxpy(x, y, 2) is y
    assert_close(y, 2.0 * wide(x) + before, dtype="f32")


@pytest.mark.row("EX-30")
def test_saxpy_on_tensors_and_foreign_memory(rng):
    x, y = (ts.tensor(a) for a in rng.standard_normal((2, 50)).astype(np.float32))
    before = y.numpy().copy()
    assert seeds.saxpy(x, y, 0.5) is y
    assert_close(y.numpy(), 0.5 * wide(x.numpy()) + before, dtype="f32")
    strided = np.zeros((50, 2), np.float32)[:, 0]  # written back through its strides
    seeds.saxpy(x, strided, 1.0)
    assert np.array_equal(strided, x.numpy())


@pytest.mark.row("EX-10", "TILE-21")
def test_tile_example(rng):
    data = rng.standard_normal(300).astype(np.float32)
    before = data.copy()
    assert seeds.tile_example(data) is None
    assert np.array_equal(data, 2 * before)


@pytest.mark.row("EX-11", "TILE-06", "TILE-07", "TILE-82", "TILE-85")
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_process_chunks(groups, rng):
    x = rng.standard_normal(1000).astype(np.float32)
    out = np.full_like(x, np.nan)
    (seeds.process_chunks if groups is None else seeds.process_chunks[groups])(x, out)
    assert_close(out, wide(x) ** 2 + 1, dtype="f32")
    assert "over groups" in seeds.process_chunks.inspect_ir()
    assert "over lanes" in seeds.process_chunks.inspect_ir()


@pytest.mark.row("EX-12", "KERN-09", "TILE-08", "TILE-14", "TILE-26", "TILE-83")
@pytest.mark.parametrize("n", [1, 127, 128, 1000, 10**6])
def test_cooperative_reduction(n, rng):
    x = rng.standard_normal(n).astype(np.float32)
    assert_close(np.float32(seeds.cooperative_reduction(x)), wide(x).sum(), dtype="f32", n=n,
                 scale=1.0 * math.sqrt(n))


def stored_copy():
    """The seed's text of the memory hierarchy, and a store of what it copied to shared memory."""
    text = inspect.getsource(seeds.memory_hierarchy_example.fn)
    head, end = 'A: ts.Tensor["M", "N", ts.f32]):', "ts.tile.cp_wait_group(0)\n"
    assert text.count(head) == 1 and text.endswith(end)
    text = text.replace(head, head.replace(")", ', out: ts.Tensor["M", "N", ts.f32])')) + """
    ts.tile.barrier()
    ts.tile.store(out[block_m:block_m+64, block_n:block_n+64], ts.tile.load(shared_tile))
"""
    return build(text)["memory_hierarchy_example"]


@pytest.mark.row("EX-13", "TILE-15", "TILE-19")
def test_memory_hierarchy(rng):
    """As printed, with the line that binds i and j; what lies in shared memory is the block."""
    a = rng.standard_normal((130, 70)).astype(np.float32)
    seeds.memory_hierarchy_example(a)
    assert seeds.memory_hierarchy_example.shared_bytes == 64 * 64 * 4
    out = np.full_like(a, np.nan)
    stored_copy()(a, out)
    np.testing.assert_array_equal(out, a)


@pytest.mark.row("EX-14", "TILE-12", "TILE-28", "TILE-29", "TILE-30")
def test_optimized_memory_access(rng):
    src = halves(rng, 256, 128)
    dst = np.zeros_like(src)
    seeds.optimized_memory_access(src, dst)
    assert np.array_equal(dst[::4], src[::4])
    assert not np.delete(dst, np.s_[::4], axis=0).any()
    patterns = seeds.optimized_memory_access.report.patterns.values()
    assert {p.efficiency for p in patterns if p.space == "global"} == {1.0}
    assert {p.degree for p in patterns if p.space == "shared"} == {1}


@pytest.mark.row("DBG-07", "EX-15", "TILE-09")
def test_the_double_buffered_gemm_as_printed(rng):
    a, b, c = halves(rng, 64, 128), halves(rng, 128, 64), np.zeros((64, 64), np.float32)
    with pytest.raises(ts.TesseraError, match="race on shared buffer 'smem_a'") as info:
        seeds.double_buffered_gemm(a, b, c)
    assert info.value.code == "E_RACE" and "cp_async(smem_a[write_stage]" in info.value.where.text
    ((_, other),) = info.value.also
    assert "ts.tile.mma" in other.text
    assert seeds.double_buffered_gemm.shared_bytes == 2 * 2 * 64 * 32 * 2
    with config.scope(debug=False):  # Q46: the last block of K is never computed
        c[...] = 0
        seeds.double_buffered_gemm(a, b, c)
    assert_close(c, wide(a[:, :96]) @ wide(b[:96]), dtype="f32", n=96)


@pytest.mark.row("EX-15", "KERN-14")
@pytest.mark.parametrize("shape", [(64, 64, 128), (130, 70, 100), (1, 65, 33)])
def test_the_double_buffered_gemm_corrected(shape, rng):
    m, n, k = shape
    a, b, c = halves(rng, m, k), halves(rng, k, n), np.zeros((m, n), np.float32)
    seeds.corrected_gemm(a, b, c)
    assert_close(c, wide(a) @ wide(b), dtype="f32", n=k)


@pytest.mark.row("EX-31", "KERN-12", "KERN-13")
@pytest.mark.parametrize("shape", [(64, 64, 32), (130, 100, 70), (65, 1, 33), (1, 1, 1)])
def test_gemm(shape, rng):
    m, n, k = shape
    a, b = halves(rng, m, k), halves(rng, k, n)
    c = rng.standard_normal((m, n)).astype(np.float32)
    want = c + wide(a) @ wide(b)
    assert seeds.gemm(a, b, c) is c
    assert_close(c, want, dtype="f32", n=k)


@pytest.mark.row("EX-33")
def test_flash_attention_as_printed_is_wrong(rng):
    q, k, v = (halves(rng, 4, 256, 64) for _ in range(3))
    with config.scope(debug=False):
        out = seeds.flash_printed(q, k, v)
    assert np.abs(wide(out) - attended64(q, k, v, True)[0]).max() > 0.1


@pytest.mark.row("EX-33")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [64, 100, 33])
def test_flash_attention(length, causal, rng):
    q, k, v = (halves(rng, 3, length, 64) for _ in range(3))
    with config.scope(debug=False):  # its loop has no barrier after the second matmul
        out = seeds.flash_attention(q, k, v, causal)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert np.abs(wide(out) - attended64(q, k, v, causal)[0]).max() < 0.02
    best = seeds.flash_attention.best_config
    assert best["m"] in (64, 128) and best["n"] in (64, 128)
    assert len(seeds.flash_attention.tuning_trace) == 16


@pytest.mark.row("EX-33", "DBG-07")
def test_flash_attention_without_beta_still_races(rng):
    """Dropping `beta` makes the numbers right, and the text is still no correct kernel: its loop
    copies the next blocks of K and V over those that other lanes may still multiply. The
    interpreter's lockstep hides it, so `test_flash_attention` runs unchecked; the checked run
    refuses it, and a barrier behind the second matmul ends it."""
    args = [halves(rng, 2, 256, 64) for _ in range(3)]
    with config.scope(debug=True), pytest.raises(RaceError, match="smem_k"):
        seeds.flash_attention(*args)
    report = ts.debug.race_check(seeds.flash_attention, *args)
    assert {f.conflict.memory for f in report.findings} == {"smem_k", "smem_v"}
    for f in report.findings:
        assert "cp_async" in f.where.text and "ts.tile.mma" in f.other.text
        assert "before the loop comes back" in f.fix
    text = inspect.getsource(seeds.flash_attention.fn)
    assert text.count("            m_i = m_i_new\n") == 1
    ended = text.replace("            m_i = m_i_new\n",
                         "            m_i = m_i_new\n            ts.tile.barrier()\n")
    with config.scope(debug=True):
        out = build(ended)["flash_attention"](*args)
    assert np.abs(wide(out) - attended64(*args, True)[0]).max() < 0.02


MATHS = ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan", "atan",
         "tanh", "floor", "ceil", "trunc", "erf", "erfc")


@pytest.mark.row("CORE-07")
def test_names_of_math_under_the_seeds_preamble(rng):
    """The preamble's star import hides math's sqrt by ts.sqrt: in a kernel both are the tile op, of
    elements, tiles and numbers."""
    lanes = "".join(f"        L[{i}, j] = {f}(x[j])\n" for i, f in enumerate(MATHS))
    tiles = "".join(f"    T[{i}, 0:32] = {f}(t)\n" for i, f in enumerate(MATHS))
    k = snippet.run(f"""from math import *
from tessera import *
@kernel
def k(x: Tensor["N", f32], L: Tensor["K", "N", f32], T: Tensor["K", "N", f32],
      C: Tensor["C", f32]):
    j = tile.local_id()
    if j < N:
{lanes}    t = tile.load(x[0:32])
{tiles}    C[0] = sqrt(64) + hypot(3.0, 4.0) + log10(100.0) + prod((2, 3)) + floor(2.5)
    C[1] = atan2(x[0], 2.0) + pi
""")["k"]
    x = rng.uniform(0.1, 0.9, 32).astype(np.float32)
    lane, tiled, c = (np.zeros(s, np.float32) for s in ((len(MATHS), 32), (len(MATHS), 32), (2,)))
    k[1, 32](x, lane, tiled, c)
    want = np.array([[getattr(math, f, None)(v) if f != "exp2" else 2.0**v for v in x.tolist()]
                     for f in MATHS])
    for got in (lane, tiled):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(c, [8 + 5 + 2 + 6 + 2, math.atan2(x[0], 2) + math.pi], rtol=1e-6)
    assert "sqrt" in k.inspect_ir("ptx", target="sm_90")


@pytest.mark.row("CORE-07")
def test_what_means_something_else_in_math_is_refused():
    """ts.remainder has the sign of the divisor, math.remainder is nearest to 0."""
    k = snippet.run("""from math import remainder
from tessera import *
@kernel
def k(x: Tensor["N", f32]):
    x[0] = remainder(7.0, 4.0)
""")["k"]
    with pytest.raises(ts.TesseraError, match="remainder cannot be called inside a kernel"):
        k(np.zeros(1, np.float32))


@pytest.mark.row("KERN-03")
def test_arguments_are_checked_against_the_annotations(rng):
    x = rng.standard_normal(8).astype(np.float32)
    with pytest.raises(ts.ShapeError, match="argument y has 2 axes"):
        seeds.saxpy(x, x.reshape(2, 4), 1.0)
    with pytest.raises(ts.DTypeError, match="argument x is f64"):
        seeds.saxpy(x.astype(np.float64), x, 1.0)


@pytest.mark.row("KERN-05")
def test_a_repeated_extent(rng):
    a, b = halves(rng, 8, 16), halves(rng, 17, 8)
    with pytest.raises(ts.ShapeError, match=r"B: axis 0 \(K\) is 17, but A axis 1 \(K\) is 16"):
        seeds.gemm(a, b, np.zeros((8, 8), np.float32))


@pytest.mark.row("KERN-07")
def test_a_default(rng):
    q = halves(rng, 1, 64, 64)
    with config.scope(debug=False):
        assert np.array_equal(seeds.flash_attention(q, q, q), seeds.flash_attention(q, q, q, True))


@pytest.mark.row("KERN-18", "SCHED-08")
def test_a_schedule_on_a_kernel():
    base = ts.Schedule(block=(128, 128), warps=8, stages=3)
    names = build("""@ts.kernel.schedule(base.with_block(64, 64))
def k(x: Tensor["n", f32]):
    ctx = tile.context()
    assert ctx.BM == ctx.m == ctx.BLOCK_M == 64 and ctx.warps == ctx.num_warps
    i = tile.linear_id()
    if i < n:
        x[i] = 1.0 * tile.group_size()
k(x)
""", base=base)
    assert names["k"].schedule.block == (64, 64) and names["k"].schedule.warps == 8
    assert set(names["x"]) == {256.0}
    other = names["k"].with_schedule(base.with_warps(2).with_block(64, 64))
    other(names["x"])
    assert set(names["x"]) == {64.0}


@pytest.mark.row("KERN-19")
def test_composite_leading_extents_are_grid_axes(rng):
    k = build("""@kernel
def k(q: ts.KTile["B*H", "S", "D_h", bf16 @ts.accum(f32)], out: ts.KTile["B*H", "S", "D_h", bf16]):
    tile.store(out, tile.load(q, rows=16, cols=q.shape[1]))
""")["k"]
    q = halves(rng, 6, 50, 8)
    out = np.zeros_like(q)
    k(q, out)
    assert np.array_equal(q, out)
    assert "[0:B*H by 1] [0:S by 16]" in k.inspect_ir()


@pytest.mark.row("KERN-20")
def test_a_bare_tile_is_a_matrix(rng):
    k = build("""@kernel
def k(q: ts.Tile, out: ts.Tile):
    i = tile.linear_id()
    if i < q.shape[0]:
        out[i, 0] = q[i, 1]
""")["k"]
    q, out = rng.standard_normal((5, 3)).astype(np.float32), np.zeros((5, 1), np.float32)
    k(q, out)
    assert np.array_equal(out[:, 0], q[:, 1])
    with pytest.raises(ts.ShapeError, match="a Tile has 2"):
        k(q[0], out)


@pytest.mark.row("KERN-21")
def test_keyword_only_parameters_specialise():
    k = build("""@kernel
def k(x: Tensor["n", f32], *, scale: float, negate: bool):
    i = tile.linear_id()
    if i < n:
        x[i] = -scale if negate else scale
""")["k"]
    x = np.zeros(3, np.float32)
    for negate in (False, True):
        k(x, scale=2.0, negate=negate)
        assert set(x) == {-2.0 if negate else 2.0}
    assert len(k.specializations) == 2
    with pytest.raises(TypeError, match="too many positional"):
        k(x, 2.0, True)


@pytest.mark.row("KERN-22")
def test_a_product_of_extents_is_checked():
    k = build("""@kernel
def k(b: Tensor["B", f32], h: Tensor["H", f32], q: Tensor["B*H", "S", f32]):
    tile.store(q[0:8], tile.zeros((8,)))
""")["k"]
    zeros = np.zeros
    k(zeros(2, np.float32), zeros(3, np.float32), zeros((6, 5), np.float32))
    with pytest.raises(ts.ShapeError, match="5, but B\\*H = 6 with B=2, H=3"):
        k(zeros(2, np.float32), zeros(3, np.float32), zeros((5, 5), np.float32))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [64, 50])
def test_the_tuned_attention_of_the_goals(length, causal, rng):
    q, k, v = (halves(rng, 2, length, 64) for _ in range(3))
    out = seeds.tuned_attention(q, k, v, dropout=0.0, causal=causal)
    assert np.abs(wide(out) - attended64(q, k, v, causal)[0]).max() < 0.02
    skipped = [t for t in seeds.tuned_attention.tuning_trace if t.status == "skipped"]
    assert len(skipped) == 4 and all("BD=128 is not the extent D_h=64" in t.reason for t in skipped)
    first, again = [], []
    for drawn in (first, again):  # two runs of one seed, of two launches each
        with ts.config.scope(seed=1):
            drawn += [wide(seeds.tuned_attention(q, k, v, dropout=0.5, causal=causal))
                      for _ in range(2)]
    assert np.abs(first[0] - wide(out)).max() > 0.1  # same shape, other values
    assert np.array_equal(first, again) and not np.array_equal(*first)


@pytest.mark.row("KERN-10")
def test_a_returned_tile_fills_a_new_result(rng):
    k = build("""@kernel
def k(q: Tensor["B*H", "S", "D", f32]) -> Tensor["B*H", "S", "D", bf16]:
    return tile.load(q[tile_s:tile_s+16, 0:D]) * 2.0
""")["k"]
    q = halves(rng, 6, 50, 24).astype(np.float32)
    for given in (q, ts.tensor(q)):
        out = k(given)  # poisoned with NaN before: every element is written
        assert isinstance(out, type(given)) and out.shape == (6, 50, 24)
        assert np.asarray(out.numpy() if given is not q else out).dtype == ml_dtypes.bfloat16
        assert np.array_equal(wide(out.numpy() if given is not q else out), 2.0 * wide(q))
    assert not np.array_equal(k(-q), k(q))  # a result of its own for each call


@pytest.mark.row("KERN-11")
def test_the_launch_follows_from_the_kernel():
    k = build("""@kernel
def k(x: Tensor["n", i32], seen: Tensor["two", i32]):
    i = tile.linear_id()
    if i < n:
        x[i] += 1
    if i == 0:
        seen[0] = tile.num_groups()
        seen[1] = tile.group_size()
""")["k"]
    seen = np.zeros(2, np.int32)
    for n, groups in ((1, 1), (128, 1), (129, 2), (1000, 8)):
        x = np.zeros(n, np.int32)
        k(x, seen)
        assert (x == 1).all() and tuple(seen) == (groups, 128)
    for launch, want in ((k[3], (3, 128)), (k[5, 64], (5, 64)), (k[(2, 3), 32], (6, 32)),
                         (k.launcher(4, 96), (4, 96))):
        x = np.zeros(1000, np.int32)
        launch(x, seen)
        assert tuple(seen) == want and x.sum() == min(1000, want[0] * want[1])
    k.launch(x, seen, groups=7, lanes=160)
    assert tuple(seen) == (7, 160)
    grid = build("""@ts.kernel(grid=lambda M, N, BM: (-(-M // BM), N))
def k(x: Tensor["M", "N", i32], BM=16):
    m, n = tile.group_id(0) * BM, tile.group_id(1)
    assert tile.num_groups(0) == (M + BM - 1) // BM and tile.num_groups(1) == N
    x[m:m+BM, n] += tile.full((BM,), 1, i32)
""")["k"]
    x = np.zeros((50, 3), np.int32)
    grid(x)
    assert (x == 1).all()


@pytest.mark.row("KERN-23")
@pytest.mark.parametrize("line, what, instead", [
    ("with open('f'): pass", "with blocks is not part of the kernel language", None),
    ("for v in x: pass", "a loop over tensor<n x f32>", "ts.tile.range"),
    ("x[0] = np.sum(x)", "sum of whole arrays inside a kernel", "ts.tile.reduce_sum(t)"),
    ("x[0] = 1.0 if x > 0.0 else 2.0", "place in memory", "load"),
])
def test_an_error_names_the_line_of_the_file(line, what, instead, tmp_path, monkeypatch):
    path = tmp_path / "my_kernels.py"
    path.write_text(f"""import numpy as np
import tessera as ts
from tessera import Tensor, f32

@ts.kernel
def k(x: Tensor["n", f32]):
    v = 1.0
    {line}
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_kernels", raising=False)
    import my_kernels

    with pytest.raises(ts.TesseraError, match=what) as info:
        my_kernels.k(np.ones(4, np.float32))
    where = info.value.where
    assert (where.file, where.line, where.text) == (str(path), 8, line)
    assert "my_kernels.py:8" in str(info.value) and "^" in str(info.value)
    assert instead is None or instead in info.value.hint
