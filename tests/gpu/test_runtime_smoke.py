"""Memory, TMA, tensor cores, lanes, atomics and clusters on a GPU, through hand-written kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ptx_kernels as kernels
from gpu_harness import Resident, microseconds, needs_hopper, poison, require_gpu
from tessera.errors import ArgumentError
from tessera.runtime.buffer import DeviceBuffer
from tessera.runtime.device import device
from tessera.runtime.tensormap import tensor_map
from tolerance import assert_close

require_gpu()


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 255, 256, 100_003])
def test_copy(n, rng):
    x = Resident(rng.integers(0, 2**31, 4 * n + 4, dtype=np.int32))
    y = poison(4 * n + 4, dtype=np.int32)
    kernels.COPY.build().kernel.launch((7,), (x.pointer, y.pointer, n))
    got = y.numpy()
    np.testing.assert_array_equal(got[:4 * n], x.host[:4 * n])
    assert (got[4 * n:] == -1).all()


@pytest.mark.alone
def test_copy_speed(note):
    from cuda.bindings import driver as d

    nbytes = 2**30
    x, y = DeviceBuffer(nbytes, device()), DeviceBuffer(nbytes, device())
    kernel = kernels.COPY.build().kernel
    ours = microseconds(lambda: kernel.launch((4096,), (x.pointer, y.pointer, nbytes // 16)))
    theirs = microseconds(lambda: d.cuMemcpyDtoDAsync(y.pointer, x.pointer, nbytes, 0))
    note(ours_gbps=2e-3 * nbytes / ours, memcpy_gbps=2e-3 * nbytes / theirs, ratio=theirs / ours)
    assert theirs / ours > 0.8


@needs_hopper
@pytest.mark.parametrize("rank, shape, box", [
    (1, (200,), (64,)), (2, (9, 200), (8, 32)), (3, (3, 5, 96), (4, 8, 32)),
    (4, (2, 3, 5, 96), (2, 4, 8, 32)), (5, (2, 1, 3, 5, 68), (2, 1, 4, 8, 32))])
def test_tma_in_and_out(rank, shape, box, rng):
    x = Resident(rng.standard_normal(shape).astype(np.float32))
    y = poison(*shape)
    maps = [tensor_map(a.array, "x", box=box, swizzle_bytes=0) for a in (x, y)]
    source = kernels.tma_copy(rank, 4 * int(np.prod(box)), box[-1])
    source.build().kernel.launch((-(-shape[-1] // box[-1]),), maps)
    want = np.full(shape, np.nan, np.float32)
    inside = tuple(slice(0, b) for b in box[:-1])
    want[inside] = x.host[inside]
    np.testing.assert_array_equal(y.numpy(), want)


# --- tensor cores ------------------------------------------------------------------------------


def random_bf16(rng, *shape) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("K", [32, 64, 480, 4096])
def test_mma_gemm(K, rng):
    a, b = (Resident(random_bf16(rng, 128, K)) for _ in range(2))
    c = poison(128, 128)
    kernels.mma_gemm().build().kernel.launch((1,), (a.pointer, b.pointer, c.pointer, K))
    want = a.host.astype(np.float64) @ b.host.astype(np.float64).T
    assert_close(c.numpy(), want, "f32", n=K)


def wgmma_launch(a: Resident, b: Resident, c: Resident):
    (M, K), N = a.host.shape, b.host.shape[0]
    maps = [tensor_map(x.array, "x", box=box) for x, box in ((a, (128, 64)), (b, (256, 64)))]
    kernel = kernels.WGMMA_GEMM.build().kernel
    return kernel.bind((M // 128 * (N // 256),), (*maps, c.pointer, M, N, K))


@needs_hopper
@pytest.mark.parametrize("M, N, K", [(128, 256, 64), (128, 256, 256), (256, 512, 320),
                                     (384, 768, 4096), (1024, 1024, 1000)])
def test_wgmma_gemm(M, N, K, rng):
    a, b = Resident(random_bf16(rng, M, K)), Resident(random_bf16(rng, N, K))
    c = poison(M, N, dtype=ml_dtypes.bfloat16)
    run = wgmma_launch(a, b, c)
    run()
    want = a.host.astype(np.float64) @ b.host.astype(np.float64).T
    first = c.numpy()
    assert_close(first.astype(np.float32), want, "bf16", scale=1e-3 * K**0.5)
    run()
    np.testing.assert_array_equal(c.numpy().view(np.uint16), first.view(np.uint16))


@pytest.mark.alone
@needs_hopper
def test_wgmma_speed(note, rng):
    n = 4096
    a, b = Resident(random_bf16(rng, n, n)), Resident(random_bf16(rng, n, n))
    c = poison(n, n, dtype=ml_dtypes.bfloat16)
    us = microseconds(wgmma_launch(a, b, c))
    note(tflops=2e-6 * n**3 / us, us=us)
    assert 2e-6 * n**3 / us > 300


NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8,
         "u8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def small_ints(rng, kind: str, *shape) -> np.ndarray:
    """Ints that every type holds and whose products every accumulator sums exactly."""
    low = 0 if kind.startswith("u") else -4
    return rng.integers(low, 5, shape).astype(np.float32).astype(NUMPY[kind])


MMA_CASES = [("f16", "f32", "", 0), ("f16", "f16", "", 0), ("f16", "f32", "", 8),
             ("bf16", "f32", "", 0), ("bf16", "f32", "", 8), ("tf32", "f32", "", 0),
             ("tf32", "f32", "", 4), ("e4m3", "f32", "", 0), ("e5m2", "f32", "", 0),
             ("e4m3", "f32", "e5m2", 0), ("s8", "s32", "", 0), ("u8", "s32", "", 0),
             ("u8", "s32", "s8", 0), ("s8", "s32", "", 16)]


@pytest.mark.parametrize("a, d, b, k", MMA_CASES)
def test_mma_layouts(a, d, b, k, rng):
    """Each instruction on operands laid out as the module says; exact on small ints."""
    from tessera.tile.cuda.ptx.mma import FORMS

    b = b or a
    depth = k or FORMS[a].k
    A, B = small_ints(rng, a, 16, depth), small_ints(rng, b, 8, depth)
    C = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    item = A.itemsize
    e, half = 4 // item, depth != FORMS[a].k
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    parts = 1 if half else 2
    a_words = np.stack([A[g + 8 * (r % 2)][lane, :].reshape(32, -1)[
        lane[:, None], (e * t + 4 * e * (r // 2))[:, None] + np.arange(e)]
        for r in range(2 * parts)], 1)
    b_words = np.stack([B[g][lane[:, None], (e * t + 4 * e * r)[:, None] + np.arange(e)]
                        for r in range(parts)], 1)
    rows = np.stack([g, g, g + 8, g + 8], 1)
    columns = np.stack([2 * t, 2 * t + 1] * 2, 1)
    kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
    c_words = C[rows, columns].astype(kind)
    words = [Resident(np.ascontiguousarray(x)) for x in (a_words, b_words, c_words)]
    out = Resident(np.zeros_like(c_words))
    kernels.one_mma(a, d, b, k).build().kernel.launch(
        (1,), [x.pointer for x in (*words, out)])
    want = A.astype(np.float64) @ B.astype(np.float64).T + C
    np.testing.assert_array_equal(out.numpy().astype(np.float64), want[rows, columns])


WGMMA_CASES = [("bf16", "f32", 64, 64, "KK"), ("bf16", "f32", 256, 128, "KK"),
               ("bf16", "f32", 64, 64, "MK"), ("bf16", "f32", 64, 64, "KM"),
               ("f16", "f32", 64, 128, "MM"), ("f16", "f16", 64, 64, "KK"),
               ("tf32", "f32", 128, 32, "KK"), ("e4m3", "f32", 128, 128, "KK"),
               ("e4m3", "f16", 64, 128, "KK"), ("e5m2", "f32", 8, 128, "KK"),
               ("s8", "s32", 64, 128, "KK"), ("u8", "s32", 32, 128, "KK")]


@needs_hopper
@pytest.mark.parametrize("a, d, n, k, majors", WGMMA_CASES)
def test_wgmma_layouts(a, d, n, k, majors, rng):
    A, B = small_ints(rng, a, 64, k), small_ints(rng, a, n, k)
    width = 128 // A.itemsize  # elements of a 128-byte row
    if k > width and majors == "KK":  # further panels lie in further boxes; here one is loaded
        k, A, B = width, A[:, :width].copy(), B[:, :width].copy()
    given = [Resident(np.ascontiguousarray(x if m == "K" else x.T))
             for x, m in zip((A, B), majors, strict=True)]
    kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
    out = Resident(np.full((128, n // 2), 77, kind))
    maps = [tensor_map(x.array, "x", box=(x.host.shape[0], width)) for x in given]
    kernels.one_wgmma(a, d, n, k, majors).build().kernel.launch((1,), (*maps, out.pointer))
    lane = np.arange(128)
    register = np.arange(n // 2)
    row = (lane // 32 * 16 + lane % 32 // 4)[:, None] + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + register % 2 + 2 * (lane % 4)[:, None]
    want = A.astype(np.float64) @ B.astype(np.float64).T
    np.testing.assert_array_equal(out.numpy().astype(np.float64), want[row, column])


# --- lanes, atomics, clusters ------------------------------------------------------------------


def test_warp_operations(rng):
    x = rng.integers(0, 40, 32).astype(np.int32)
    source, out = Resident(x), poison(len(kernels.SHUFFLES), 32, dtype=np.int32)
    kernels.WARP.build().kernel.launch((1,), (source.pointer, out.pointer))
    lane, ones = np.arange(32), np.ones(32, np.int64)
    ballot = int(sum(int(v & 1) << i for i, v in enumerate(x)))
    match = [sum(1 << i for i in lane if x[i] >> 2 == v >> 2) for v in x]
    want = [x[np.where(lane < 3, lane, lane - 3)], x[np.where(lane + 5 > 31, lane, lane + 5)],
            x[lane ^ 6], x[7] * ones, x[lane ^ 2], ballot * ones, (x == 5).any() * ones,
            1 * ones, match, x.sum() * ones, x.min() * ones, x.max() * ones,
            np.bitwise_and.reduce(x) * ones, np.bitwise_or.reduce(x) * ones,
            np.bitwise_xor.reduce(x) * ones]
    got = out.numpy()
    for i, row in enumerate(want):
        np.testing.assert_array_equal(got[i].view(np.uint32), np.asarray(row).astype(np.uint32),
                                      err_msg=kernels.SHUFFLES[i])


@needs_hopper
def test_atomics():
    blocks = 33
    n = 128 * blocks
    words = np.zeros(32, np.int32)
    words[1], words[2] = -2**31, -1
    out, tickets = Resident(words), poison(n, dtype=np.int32)
    kernels.ATOMICS.build().kernel.launch((blocks,), (out.pointer, tickets.pointer))
    got = out.numpy()
    assert got[0] == n and got[1] == n - 1 - 1000 and got[2] == 5 and got[3] == -1
    assert got[4:5].view(np.float32)[0] == n / 2
    assert got[6:8].view(np.int64)[0] == n << 33
    assert 1 <= got[8] <= n and got[9] == 1 and got[10] == n and got[11] == n
    np.testing.assert_array_equal(got[16:20].view(np.float32), np.float32(n / 4))
    np.testing.assert_array_equal(np.sort(tickets.numpy()), np.arange(n))


@needs_hopper
def test_clusters():
    out = poison(16, 2, dtype=np.int32)
    kernel = kernels.CLUSTER.build().kernel
    kernel.launch((16,), (out.pointer,))
    rank = np.arange(16) % 4
    np.testing.assert_array_equal(out.numpy(), np.stack([rank, 100 + (rank - 1) % 4], 1))
    with pytest.raises(ArgumentError, match="clusters take 4"):
        kernel.launch((6,), (out.pointer,))
