"""Kernels as their users write them: what the compiler makes of what stands around matmuls and
reductions of whole tiles."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from ptx_harness import require_compiler
from tessera import Tensor, bf16, f32, fp8_e4m3, saturate
from tessera.errors import CompileError
from tessera.runtime.ptxas import Resources
from tessera.runtime.target import parse_target
from tessera.tile.cuda import build
from tessera.tile.ir.ir import For, Op, walk
from tile_gpu import compiled

require_compiler()
tile = ts.tile


@ts.kernel
def dequantised(x: Tensor["M", "K", bf16], q: Tensor["K2", "N", ts.uint8],
                scale: Tensor["G", "N", f32], zero: Tensor["G", "N", f32],
                y: Tensor["M", "N", f32], BM=32, BN=32):
    """int4 of two rows of weights in a byte, with a scale and a zero point for 16 rows."""
    acc = tile.zeros((BM, BN))
    for g in range(0, K2, 16):
        code = tile.cast(tile.load(q[g:g+16, tile_n:tile_n+BN]), ts.int32)
        s = tile.load(scale[g // 16, tile_n:tile_n+BN])[None, :]
        z = tile.load(zero[g // 16, tile_n:tile_n+BN])[None, :]
        low = tile.cast((tile.cast(code & 15, f32) - z) * s, bf16)
        high = tile.cast((tile.cast(code >> 4, f32) - z) * s, bf16)
        acc = tile.dot(tile.load(x[tile_m:tile_m+BM, g:g+16]), low, acc)
        acc = tile.dot(tile.load(x[tile_m:tile_m+BM, K2+g:K2+g+16]), high, acc)
    y[tile_m:tile_m+BM, tile_n:tile_n+BN] = acc


def weights(rng, N=64, K2=64):
    x = ts.tensor(rng.standard_normal((32, 2 * K2)).astype(np.float32), bf16)
    return (x, rng.integers(0, 256, (K2, N)).astype(np.uint8),
            rng.random((K2 // 16, N)).astype(np.float32),
            rng.integers(0, 16, (K2 // 16, N)).astype(np.float32), np.zeros((32, N), np.float32))


@pytest.mark.parametrize("N", [64, 70])
def test_what_an_operand_is_computed_of_is_copied_ahead(N, rng):
    """Codes, scales and zero points go with the other operand through its ring, where their rows
    are whole words; and each matmul of an iteration has one barrier, behind what it writes."""
    made = compare(dequantised, *weights(rng, N), target="sm_90", rtol=1e-4, atol=1e-3)
    (loop,) = [n for n in walk(made.function.body) if isinstance(n, For)]
    copied = [n for n in walk(loop.body) if isinstance(n, Op) and n.name == "cp_async"]
    assert len(copied) == (5 if N == 64 else 4)  # bytes of 70 are no words
    body = made.emitted.source.split("while ")[1]
    assert body.count(" sync()") == 3


@ts.kernel
def blocks(x: Tensor["M", "N", bf16], q: Tensor["M", "N", fp8_e4m3 @saturate],
           s: Tensor["MB", "NB", f32], B=128):
    t = tile.load(x[tile_m:tile_m+B, tile_n:tile_n+B])
    scale = max(tile.reduce_max(tile.abs(t)), 1e-12) / 448.0
    q[tile_m:tile_m+B, tile_n:tile_n+B] = t / scale
    s[tile_m // B, tile_n // B] = scale


def test_a_statistic_of_a_whole_tile_is_divided_by_once(rng):
    """One reciprocal; and a block of 512 threads leaves registers for a second one beside it, also
    where rows of both tensors are not of 16 bytes, so that a thread has an element of many rows:
    it combines them before any two threads exchange, and warps meet once."""
    x = ts.tensor(rng.standard_normal((40, 70)).astype(np.float32), bf16)
    compare(blocks, x, ts.zeros((40, 70), fp8_e4m3 @saturate), np.zeros((2, 3), np.float32),
            B=32, target="sm_90")
    for n in (256, 250):
        made = compiled(blocks, ts.zeros((n, n), bf16), ts.zeros((n, n), fp8_e4m3 @saturate),
                        np.zeros((2, 2), np.float32), target="sm_90a")
        assert made.threads == 512 and "divide.div)" in made.source
        assert made.built.resources.registers <= 64 and not made.built.resources.spills
        assert made.built.ptx.count("div.rn.f32") == 1
        assert made.built.ptx.count("shfl.sync") == 5 and made.built.ptx.count("bar.sync") == 1


@pytest.mark.parametrize("first, again, spilt, taken", [
    (72, 64, 0, True), (72, 64, 8, False), (72, 72, 0, False), (103, 64, 0, False),
    (64, 48, 0, False), (72, None, 0, False)])
def test_a_block_alone_is_assembled_again_for_two(first, again, spilt, taken, monkeypatch):
    """Of 512 threads: where slightly fewer registers leave room, and ptxas finds them. It refuses
    (None) where one instruction needs more."""
    def assemble(text, target, lineinfo):
        if again is None and ".minnctapersm 2" in text:
            raise CompileError("ptxas fatal : (C7602) Insufficient registers (64)")
        used = again if ".minnctapersm 2" in text else first
        spills = spilt if ".minnctapersm 2" in text else 0
        return SimpleNamespace(kernels={"k": Resources(used, spills, spills, 0, 0, 1)})

    monkeypatch.setattr(build, "assemble", assemble)
    ptx = ".minnctapersm 1"
    job = build.CompileJob("", "", "k", (), parse_target("sm_90a"), 512)
    text, made = job.for_two(ptx, assemble(ptx, job.target, True))
    assert (text == ".minnctapersm 2") == taken
    assert made.kernels["k"].registers == (again if taken else first)


@ts.kernel
def scaled(x: Tensor["M", "N", bf16], y: Tensor["M", "N", bf16], p: f32):
    y[tile_m:tile_m+16, tile_n:tile_n+64] = tile.load(
        x[tile_m:tile_m+16, tile_n:tile_n+64]) / (1.0 - p)


def test_a_number_of_the_group_is_divided_by_once(rng):
    x = ts.tensor(rng.standard_normal((20, 70)).astype(np.float32), bf16)
    compare(scaled, x, ts.zeros((20, 70), bf16), 0.3, target="sm_90", rtol=2 ** -8)
    made = compiled(scaled, ts.zeros((64, 64), bf16), ts.zeros((64, 64), bf16), 0.3,
                    target="sm_90a")
    ptx = made.built.ptx
    assert ptx.count("rcp.rn.f32") == 1 and "div.rn" not in ptx


@ts.kernel
def routed(x: Tensor["T", "E", f32], w: Tensor["T", f32], e: Tensor["T", ts.int32],
           counts: Tensor["E", ts.int32], sums: Tensor["T", f32], BT=16):
    t = tile.load(x[tile_t:tile_t+BT, 0:E])
    i = tile.argmax(t)
    w[tile_t:tile_t+BT] = tile.row_max(t)
    e[tile_t:tile_t+BT] = i
    sums[tile_t:tile_t+BT] = tile.row_sum(t)
    tile.scatter(counts, i, tile.full((BT,), 1, ts.int32), mode="add")


@pytest.mark.parametrize("T, E", [(48, 64), (37, 50)])
def test_numbers_of_rows_leave_at_once(T, E, rng):
    """A warp has 16 rows, each in 16 lanes, or in all. Each lane writes and counts a row of its
    own. Where the largest is comes from what it is."""
    x = rng.standard_normal((T, E)).astype(np.float32)
    x[3, 5] = x[4, 6] = x[4, 9] = np.nan
    x[5, 7], x[6] = np.inf, -np.inf
    args = (x, np.zeros(T, np.float32), np.zeros(T, np.int32), np.zeros(E, np.int32),
            np.zeros(T, np.float32))
    made = compare(routed, *args, target="sm_90", rtol=1e-5, atol=1e-5)
    assert "find_argmax" not in made.emitted.source
    ptx = compiled(routed, *args, target="sm_90a").built.ptx
    assert ptx.count("shfl.sync") == 3 * (32 if E == 64 else 80)
    assert ptx.count("st.global") == 3 and ptx.count("red.") == 1


@ts.kernel
def normalised(x: Tensor["T", 64, f32], y: Tensor["T", 64, f32], lse: Tensor["T", f32],
               total: Tensor["T", f32], BT=16):
    t = tile.load(x[tile_t:tile_t+BT, 0:64])
    s = tile.log(tile.row_sum(tile.exp(t)))
    lse[tile_t:tile_t+BT] = s
    y[tile_t:tile_t+BT, 0:64] = t - s[:, None]
    some = tile.zeros((BT,))
    for _ in range(2):
        some = some * 0.5 + 1.0 / tile.row_sum(t * t)
    total[tile_t:tile_t+BT] = some


def test_each_lane_computes_for_a_row_of_its_own(rng):
    """16 rows in 16 lanes each: one logarithm and no eight; its row's goes to the others where it
    meets the tile. A loop carries such numbers."""
    args = (rng.standard_normal((37, 64)).astype(np.float32), np.zeros((37, 64), np.float32),
            np.zeros(37, np.float32), np.zeros(37, np.float32))
    for lanes in (None, 48):  # with a warp that is not whole all goes through memory
        compare(normalised, *args, lanes=lanes, target="sm_90", rtol=1e-5, atol=1e-5)
    ptx = compiled(normalised, *args, target="sm_90a").built.ptx
    assert ptx.count("shfl.sync") == 3 * (4 + 2 + 1 + 1) + 8
    assert ptx.count("st.global") == 2 + 8 and ptx.count("rcp") + ptx.count("div.") <= 2


@ts.kernel
def ranked(keys: Tensor["N", ts.int32], base: Tensor["G", "B", ts.int32], at: Tensor["N", ts.int32],
           PER=128):
    g = tile.group_id(0)
    hit = tile.load(keys[g*PER:g*PER+PER])[:, None] == tile.arange(0, B)[None, :]
    rank = tile.cumsum(tile.cast(hit, ts.int32), axis=0) - 1 + tile.load(base[g, 0:B])[None, :]
    at[g*PER:g*PER+PER] = tile.reduce_sum(tile.where(hit, rank, 0), axis=1)


@pytest.mark.parametrize("per, bins", [(128, 16), (100, 12), (8, 64)])
def test_threads_have_pieces_of_columns_that_are_scanned(per, bins, rng):
    """Of 128 keys in 16 bins two warps exchange totals of columns once, and lanes 31 of what they
    sum along rows, where 1136 instructions and 211 registers exchanged 176 numbers."""
    keys = rng.integers(0, bins, 3 * per).astype(np.int32)
    args = (keys, rng.integers(0, 99, (3, bins)).astype(np.int32), np.zeros(3 * per, np.int32))
    compare(ranked, *args, groups=3, lanes=48 if per == 8 else None, target="sm_90", PER=per)
    if per == 128:
        built = compiled(ranked, *args, groups=3, target="sm_90a", PER=per).built
        assert built.ptx.count("shfl.sync") < 40 and built.resources.registers <= 112


@ts.kernel
def unpacked(q: Tensor["K8", "N", ts.int32], y: Tensor["K", "N", f32], BK=16, BN=32):
    shift = tile.arange(0, 8) * 4
    for k in range(0, K, BK):
        word = tile.load(q[k // 8:k // 8 + BK // 8, tile_n:tile_n+BN])
        code = tile.reshape((word[:, None, :] >> shift[None, :, None]) & 15, (BK, BN))
        y[k:k+BK, tile_n:tile_n+BN] = tile.cast(code, f32)


def test_a_quotient_that_is_written_twice_is_one_number(rng):
    """The extent of a slice from k // 8 to k // 8 + 2."""
    q = rng.integers(-2**31, 2**31, (6, 40), dtype=np.int32)
    y = np.zeros((48, 40), np.float32)
    unpacked(q, y)
    want = q[:, None] >> np.arange(0, 32, 4)[None, :, None] & 15
    assert np.array_equal(y, want.reshape(48, 40))


@ts.kernel
def rows_added(x: Tensor["T", "D", f32], i: Tensor["T", ts.int32], y: Tensor["S", "D", f32], BT=8):
    tile.scatter(y, tile.load(i[tile_t:tile_t+BT]), tile.load(x[tile_t:tile_t+BT, 0:D]), mode="add")


@ts.kernel
def rows_counted(i: Tensor["T", ts.int32], y: Tensor["S", ts.int32], last: Tensor[1, ts.int32]):
    total = tile.zeros((8,), ts.int32)
    at = tile.load(i[tile_t:tile_t+8])
    total += at
    tile.scatter(y, at, tile.full((8,), 1, ts.int32), mode="add")
    last[0] = tile.reduce_sum(total)


@ts.kernel
def rows_added_and_one(x: Tensor["T", 8, f32], i: Tensor["T", ts.int32], y: Tensor["S", 8, f32],
                       z: Tensor[1, 8, f32]):
    tile.scatter(z, tile.zeros((1,), ts.int32), tile.full((1, 8), 1.0), mode="add")
    tile.scatter(y, tile.load(i[tile_t:tile_t+8]), tile.load(x[tile_t:tile_t+8, 0:8]), mode="add")


def test_what_does_not_come_of_the_block_is_added_once():
    y, z = np.zeros((4, 8), np.float32), np.zeros((1, 8), np.float32)
    rows_added_and_one(np.ones((64, 8), np.float32), np.arange(64, dtype=np.int32) % 4, y, z)
    assert np.array_equal(y, np.full((4, 8), 16)) and np.array_equal(z, np.ones((1, 8)))


def test_rows_that_are_only_added_are_a_grid(rng):
    """Nothing else that the kernel does tells blocks apart. A kernel that writes something else
    goes through them in order."""
    x = rng.integers(-9, 9, (37, 12)).astype(np.float32)
    i = rng.integers(0, 5, 37).astype(np.int32)
    y, want = np.zeros((5, 12), np.float32), np.zeros((5, 12))
    made = compare(rows_added, x, i, y, target="sm_90")
    assert made.function.launch == "axes"
    rows_added(x, i, y)
    np.add.at(want, i, x)
    assert np.array_equal(y, want)
    assert compare(rows_counted, i, np.zeros(5, np.int32), np.zeros(1, np.int32),
                   target="sm_90").function.launch == "one"


@ts.kernel
def losses(x: Tensor["M", "N", f32], y: Tensor["M", f32], B=256):
    """log sum e^x of a row, while its largest element is looked for."""
    r, m, d = tile.group_id(0), -float("inf"), 0.0
    for n in range(0, N, B):
        b = tile.load(x[r, n:n+B])
        above = max(m, tile.reduce_max(b))
        d = d * tile.exp(m - above) + tile.reduce_sum(tile.exp(b - above))
        m = above
    y[r] = m + tile.log(d)


def test_statistics_of_whole_tiles_in_a_loop_have_a_barrier_each(rng):
    """The next one's stands before its memory is written again: there were two of each."""
    x = rng.standard_normal((3, 700)).astype(np.float32)
    made = compare(losses, x, np.zeros(3, np.float32), groups=(3,), lanes=128, target="sm_90",
                   rtol=1e-5)
    assert made.emitted.source.split("while ")[1].count("sync()") == 2


@ts.kernel
def summed_up(x: Tensor["M", "N", f32], k: Tensor["M", "N", ts.int32], y: Tensor["M", 4, f32],
              rows: Tensor["M", f32], B=256):
    """A sum, the largest and the smallest of a row, a count; and sums of rows of a block."""
    r = tile.group_id(0)
    s, most, least, count = 1.5, -1.0, 100.0, 7
    part = tile.zeros((4,))
    for n in range(0, N, B):
        t = tile.load(x[r, n:n+B])
        s += tile.reduce_sum(t * t)
        most, least = max(most, tile.reduce_max(t)), min(least, tile.reduce_min(t))
        count = count + tile.reduce_sum(tile.load(k[r, n:n+B]))
        part += tile.reduce_sum(tile.load(x[4*r:4*r+4, n:n+B], fill=0), axis=1)
    y[r, 0], y[r, 1], y[r, 2], y[r, 3] = s, most, least, tile.cast(count, f32)
    rows[4*r:4*r+4] = part


@ts.kernel
def summed_and_read(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], B=256):
    """A running sum: each iteration reads what those before it gave."""
    r, s = tile.group_id(0), 0.0
    for n in range(0, N, B):
        s += tile.reduce_sum(tile.load(x[r, n:n+B]))
        y[r, n:n+B] = tile.full((B,), s)


@pytest.mark.parametrize("lanes", [32, 128])
def test_what_a_loop_adds_up_is_reduced_behind_it(lanes, rng):
    x, k = rng.standard_normal((3, 900)).astype(np.float32), rng.integers(0, 9, (3, 900), np.int32)
    made = compare(summed_up, x, k, np.zeros((3, 4), np.float32), np.zeros(3, np.float32),
                   groups=(3,), lanes=lanes, target="sm_90", rtol=1e-5, atol=1e-4)
    (loop,) = [n for n in walk(made.function.body) if isinstance(n, For)]
    assert not [n for n in walk(loop.body) if isinstance(n, Op) and "reduce" in n.name]
    made = compare(summed_and_read, x, np.zeros((3, 900), np.float32), groups=(3,), lanes=lanes,
                   target="sm_90", rtol=1e-5, atol=1e-4)
    (loop,) = [n for n in walk(made.function.body) if isinstance(n, For)]
    assert [n for n in walk(loop.body) if isinstance(n, Op) and "reduce" in n.name]


@ts.kernel
def whole(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], B=4096):
    y[0:B, 0:B] = tile.load(x[0:B, 0:B]) * 2.0


def test_a_tile_of_many_times_the_registers_is_refused_before_it_is_compiled():
    """ptxas did not end for it."""
    x = np.zeros((8, 8), np.float32)
    with pytest.raises(ts.TesseraError, match=r"whole: tile<4096x4096 x f32> takes 67108864 bytes "
                       r"of registers, a multiprocessor has 262144 on sm_90a") as info:
        compiled(whole, x, x, target="sm_90a")
    assert "y[0:B, 0:B] = tile.load" in str(info.value) and "in blocks" in str(info.value)
