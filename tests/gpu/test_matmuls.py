"""Matmuls on a GPU against the interpreter: types, orders, ragged extents, both styles."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from cpu.test_matmul_forms import gradients
from matmul_kernels import ATTENTION, CHAIN, NESTED, Gemm, array, make
from tessera import stdlib
from tessera.graph.cuda.passes import library_ops
from tessera.kernels.gemm import LAYOUTS, of_transposed
from tessera.kernels.matmul_blocks import BLOCKS
from tolerance import assert_close

MMA = "sm_90"  # mma.sync also where the device has more
STYLES = ("implicit", "explicit", "stored", "ring")


def check(gemm: Gemm, rng, M, N, K, lanes=128, target=None, **options):
    tile_gpu.compare(gemm.kernel, *gemm.arguments(rng, M, N, K), groups=gemm.groups(M, N),
                     lanes=lanes, rtol=gemm.tolerance, atol=8 * gemm.tolerance, target=target,
                     **options)


@pytest.fixture(params=[None, MMA], ids=["own", "mma"])
def target(request):
    """The target of the device, and the one without its own instructions."""
    from tessera.runtime.device import device

    if request.param and device().cc != (9, 0):
        pytest.skip("one target is enough")
    return request.param


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("orders", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_orders(rng, target, dtype, orders, style):
    check(Gemm(dtype, orders, style=style), rng, 128, 192, 160, target=target)


@pytest.mark.parametrize("style", ["implicit", "explicit"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (70, 50, 40), (33, 65, 31), (128, 100, 0),
                                   (31, 257, 129)], ids=str)
def test_ragged(rng, target, shape, style):
    check(Gemm(style=style), rng, *shape, target=target)


@pytest.mark.parametrize("block", [(16, 8, 16), (4, 4, 4), (20, 12, 24), (20, 12, 20),
                                   (64, 48, 48), (16, 8, 7), (128, 256, 64), (256, 128, 32)],
                         ids=str)
@pytest.mark.parametrize("style", ["implicit", "explicit"])
def test_blocks(rng, block, style):
    if style == "explicit" and block[0] * block[1] > 1 << 14:
        pytest.skip("two blocks of that size do not fit without a ring")
    check(Gemm(block=block, style=style), rng, 2 * block[0] + 1, block[1] + 3, 3 * block[2],
          lanes=256, target=MMA)


@pytest.mark.parametrize("lanes", [16, 32, 64, 96, 256, 512])
def test_lanes(rng, lanes):
    check(Gemm(block=(64, 64, 32)), rng, 64, 64, 64, lanes=lanes, target=MMA)


TYPES = [Gemm("f32"), Gemm("f32", precision="tf32"), Gemm("tf32"), Gemm("f64", sums="f64",
         result="f64"), Gemm("int8", sums="int32", result="int32"),
         Gemm("uint8", sums="int32", result="int32"), Gemm("int32", sums="int32", result="int32"),
         Gemm("int16", sums="int32", result="int32"), Gemm("int32", sums="int64", result="int64"),
         Gemm("fp8_e4m3"), Gemm("fp8_e5m2"), Gemm("fp8_e4m3", other="fp8_e5m2"),
         Gemm("bf16", sums="bf16", result="bf16"), Gemm("f16", result="f16")]
PACKED = [Gemm("fp4_e2m1"), Gemm("fp6_e2m3"), Gemm("fp6_e3m2"), Gemm("fp4_e3m0"),
          Gemm("int4", sums="int32", result="int32")]


def of(gemm: Gemm, **changes) -> Gemm:
    from dataclasses import replace

    return replace(gemm, **changes)


@pytest.mark.filterwarnings("ignore:dot adds to a tile of bf16:RuntimeWarning")
@pytest.mark.parametrize("style", ["implicit", "explicit"])
@pytest.mark.parametrize("orders", ["NT", "TN"])
@pytest.mark.parametrize("gemm", TYPES, ids=lambda g: f"{g.dtype}{g.other}-{g.sums}-{g.precision}")
def test_types(rng, gemm, orders, style):
    check(of(gemm, orders=orders, style=style, block=(32, 32, 32)), rng, 40, 48, 64, target=MMA)


@pytest.mark.parametrize("style", ["implicit", "explicit", "stored"])
@pytest.mark.parametrize("gemm", PACKED, ids=lambda g: g.dtype)
def test_packed_types(rng, gemm, style):
    check(of(gemm, block=(32, 32, 32), style=style), rng, 40, 48, 64, target=MMA)


def test_long_sums_of_fp8(rng):
    check(Gemm("fp8_e4m3", block=(32, 32, 512)), rng, 32, 32, 1024, target=MMA)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", [128, 100, 1])
def test_attention(rng, target, S, causal):
    kernel = make(ATTENTION, "attention")
    q, k, v = (array(rng, "bf16", (2, S, 64)) for _ in range(3))
    tile_gpu.compare(kernel, q, k, v, array(rng, "f32", (2, S, 64)), 0.125, causal=causal,
                     groups=(-(-S // 64), 2), lanes=128, rtol=2e-2, atol=2e-2, target=target)


def test_chain_of_matmuls(rng, target):
    for t in ("bf16", "f16"):
        kernel = make(CHAIN.format(t=t), "chain")
        a, b, d = (array(rng, t, s) for s in ((128, 48), (48, 64), (64, 32)))
        tile_gpu.compare(kernel, a, b, d, array(rng, "f32", (128, 32)), groups=2, lanes=128,
                         rtol=2e-2, atol=0.3, target=target)


def test_rings_in_a_loop(rng, target):
    kernel = make(NESTED, "nested")
    a, b = array(rng, "bf16", (96, 160)), array(rng, "bf16", (100, 160))
    tile_gpu.compare(kernel, a, b, array(rng, "f32", (96, 100)), groups=3, lanes=64, rtol=3e-4,
                     atol=3e-3, target=target)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("extents", [(1100, 272, 336), (8192, 768, 768)], ids=str)
def test_every_block_of_products_in_graphs(rng, block, extents, monkeypatch):
    """With a bias, and the gradients; ragged extents, sums in parts."""
    for name in ("BLOCKS", "LARGE"):
        monkeypatch.setattr(library_ops, name, (block,))
    M, K, N = extents
    x, w, b, g = (ts.tensor(rng.standard_normal(s).astype("f4")) for s in
                  ((M, K), (K, N), (N,), (M, N)))
    x, w, g = (ts.cast(v, "bf16") for v in (x, w, g))
    xs, ws, bs, gs = (np.asarray(v.array, "f8") for v in (x, w, b, g))
    got = ts.jit(gradients)(*ts.to((x, w, b, g), "cuda"))
    for y, want, n in zip(got, (xs @ ws + bs, gs @ ws.T, xs.T @ gs), (K, N, M), strict=True):
        assert_close(y.numpy(), want, "bf16", n=n)


@pytest.mark.parametrize("widths", [(256, 256, 256), (256, 64, 64)], ids=str)
def test_matmuls_of_the_same_rows(rng, widths):
    """That are one matmul, with biases; their gradients are one, too."""
    x, *own = (rng.standard_normal(s).astype("f4") for s in (
        (512, 192), *(s for n in widths for s in ((192, n), (n,)))))

    def loss(x, *own):
        x, *own = (ts.cast(v, "bf16 @accum(f32)") for v in (x, *own))
        parts = [ts.cast(ts.gemm(x, w, b), "f32") for w, b in zip(own[::2], own[1::2], strict=True)]
        return sum((i + 1) * ts.sum(y ** 2) for i, y in enumerate(parts))

    step = ts.jit(lambda *a: ts.grad(loss, argnums=tuple(range(len(a))))(*a))
    got = [y.numpy() for y in step(*ts.to(tuple(map(ts.tensor, (x, *own))), "cuda"))]
    assert sum(launch.work.kind == "matmul" for launch in step.schedule().launches) == 3
    x, *own = (np.asarray(ts.cast(ts.tensor(v), "bf16").array, "f8") for v in (x, *own))
    dx = np.zeros_like(x)
    for i, (w, b) in enumerate(zip(own[::2], own[1::2], strict=True)):
        g = 2 * (i + 1) * (x @ w + b)
        scale = float(np.abs(g).max())
        dx += g @ w.T
        assert_close(got[1 + 2 * i], x.T @ g, "bf16", n=512, scale=512 * scale)
        assert_close(got[2 + 2 * i], g.sum(0), "bf16", n=512, scale=512 * scale)
    assert_close(got[0], dx, "bf16", n=sum(widths), scale=float(np.abs(dx).max()) * 4)
# --- the library's --------------------------------------------------------------------------------
SHAPES = [(1, 520, 1000), (1, 8, 4096), (16, 520, 1000), (520, 16, 264), (77, 33, 129),
          (512, 512, 512), (300, 256, 20000), (1001, 999, 1003), (264, 328, 136), (5, 1, 7)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extents", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_products_of_the_library(rng, dtype, extents, layout):
    """Blocks, parts and swapped operands as they are chosen; rows that TMA cannot read. Twice: the
    second call is the first one's, on other numbers."""
    M, N, K = extents
    for _ in range(2):
        a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), dtype) for s in (
            (K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)))
        got = stdlib.gemm(*ts.to((a, b), "cuda"), **LAYOUTS[layout])
        want = stdlib.gemm.record.reference(*(np.asarray(x.numpy(), "f8") for x in (a, b)),
                                            **LAYOUTS[layout])
        assert_close(got.numpy(), want, dtype, n=K)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extents", [(512, 256, 384), (77, 33, 129), (16, 520, 1000)], ids=str)
@pytest.mark.parametrize("how", ["fp8", "fp8 fast", "tf32", "f32"])
def test_products_of_other_types(rng, how, extents, layout):
    (M, N, K), gemm = extents, stdlib.gemm
    kind, options, close = {"fp8": ("fp8_e4m3", {"dtype": "bf16"}, "bf16"),
                            "fp8 fast": ("fp8_e4m3", {"dtype": "bf16"}, "bf16"),
                            "tf32": ("f32", {"precision": "tf32"}, "f16"),
                            "f32": ("f32", {}, "f32")}[how]
    if how == "fp8 fast":
        gemm = gemm.with_schedule(ts.Schedule(FAST_SUMS=True))
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), kind) for s in (
        (K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)))
    got = gemm(*ts.to((a, b), "cuda"), **LAYOUTS[layout], **options)
    want = gemm.record.reference(*(np.asarray(x.numpy(), "f8") for x in (a, b)), **LAYOUTS[layout])
    assert_close(got.numpy(), want, close, n=K)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [(128, 256), (192, 128), (64, 128)], ids=str)
@pytest.mark.parametrize("extents", [(1096, 1320, 328), (64, 2048, 640), (8192, 4096, 264)],
                         ids=str)
def test_blocks_of_clusters(rng, layout, block, extents, groups):
    """That bring a part each of what they share: tiles that fill no cluster, fewer tiles than
    blocks, many tiles for each block."""
    M, N, K = extents
    kernel = stdlib.gemm.kernels["gemm_whole"].with_schedule(ts.Schedule(cluster=groups))
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), "bf16") for s in (
        (K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)))
    d = ts.to(ts.tensor(np.full((M, N), np.nan, "f4"), "bf16"), "cuda")
    for _ in range(3):
        kernel(*ts.to((a, b), "cuda"), d, ts.f32, layout=layout, BM=block[0], BN=block[1])
    want = stdlib.gemm.record.reference(*(np.asarray(x.numpy(), "f8") for x in (a, b)),
                                        **LAYOUTS[layout])
    assert_close(d.numpy(), want, "bf16", n=K)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extents", [(3136, 512, 2048), (104, 144, 64), (4008, 1360, 200)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_panels_of_transposed_results(rng, dtype, extents, layout):
    """Blocks of 96 x 128 whose rows TMA writes: as many as multiprocessors, one, many for each."""
    (M, N, K), result = extents, getattr(ts, dtype)
    kernel = stdlib.gemm.kernels["gemm_whole"]
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), dtype) for s in (
        (K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)))
    d = ts.to(ts.tensor(np.full((M, N), np.nan, "f4"), dtype), "cuda")
    for _ in range(3):
        kernel(*ts.to((a, b), "cuda"), d, ts.f32, layout=of_transposed(layout), swapped=True,
               result=result, BM=96, BN=128)
    assert "results leave by TMA" in kernel.inspect_ir("target")
    want = stdlib.gemm.record.reference(*(np.asarray(x.numpy(), "f8") for x in (a, b)),
                                        **LAYOUTS[layout])
    assert_close(d.numpy(), want, dtype, n=K)


@pytest.mark.parametrize("transposed", [False, True])
def test_graphs_take_blocks_of_the_transposed_result(rng, transposed):
    """With a bias and a function behind, as rows of 16 bits; where f32 is written, too, others."""
    M, K, N = 3130, 2048, 512
    x, w, b = (ts.tensor(rng.standard_normal(s).astype("f4")) for s in ((M, K), (K, N), (N,)))
    x, w = (ts.cast(v, "bf16") for v in (x, w))
    xs, ws, bs = (np.asarray(v.numpy(), "f8") for v in (x, w, b))
    wt = ts.tensor(np.ascontiguousarray(ws.T, "f4"), "bf16")
    given = ts.to((x, wt if transposed else w, b), "cuda")

    def layer(x, w, b):
        return ts.relu(ts.gemm(x, w.T if transposed else w, b))

    narrow = ts.jit(lambda x, w, b: ts.cast(layer(x, w, b), "bf16"))
    both = ts.jit(lambda x, w, b: (layer(x, w, b), ts.cast(layer(x, w, b), "bf16")))
    want = np.maximum(xs @ ws + bs, 0)
    assert_close(narrow(*given).numpy(), want, "bf16", n=K)
    assert "of the transposed result" in narrow.inspect_ir("schedule")
    for y in both(*given):
        assert_close(y.numpy(), want, "bf16", n=K)
    assert "of the transposed result" not in both.inspect_ir("schedule")


def test_products_that_begin_early_wait_for_what_they_read(rng):
    """A chain of short products that write each other's operands: the bits of one after another."""
    kernel = stdlib.gemm.kernels["gemm_whole"]
    w = ts.to(ts.tensor((rng.standard_normal((384, 384)) / 384**0.5).astype("f4"), "bf16"), "cuda")
    first = ts.tensor(rng.standard_normal((256, 384)).astype("f4"), "bf16")

    def chain(dependent):
        x, y = ts.to((first, ts.zeros((256, 384), "bf16")), "cuda")
        for _ in range(60):
            kernel(x, w, y, ts.f32, BM=64, BN=64, DEPENDENT=dependent)
            x, y = y, x
        return x.numpy()

    want = chain(False)
    assert np.isfinite(want.astype("f4")).all() and np.abs(want.astype("f4")).max() > 0
    for _ in range(5):
        np.testing.assert_array_equal(chain(True).view("u2"), want.view("u2"))


def test_graphs_whose_rows_are_two_lines(rng):
    """Blocks in clusters, with a bias and a function behind, and in the gradients."""
    M, K, N = 1000, 1400, 1048
    x, w, b, g = (ts.tensor(rng.standard_normal(s).astype("f4")) for s in (
        (M, K), (K, N), (N,), (M, N)))
    x, w, g = (ts.cast(v, "bf16") for v in (x, w, g))
    xs, ws, bs, gs = (np.asarray(v.numpy(), "f8") for v in (x, w, b, g))
    step = ts.jit(gradients)
    got = step(*ts.to((x, w, b, g), "cuda"))
    assert "in pairs" in step.inspect_ir("schedule")
    for y, want, n in zip(got, (xs @ ws + bs, gs @ ws.T, xs.T @ gs), (K, N, M), strict=True):
        assert_close(y.numpy(), want, "bf16", n=n)
