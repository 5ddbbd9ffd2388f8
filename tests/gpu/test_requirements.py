"""Rows of the table of requirements that ask for a GPU, and that no other file here names."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

import tessera as ts
from attention_cases import attended64
from gpu_harness import require_gpu
from lowered_functions import normal
from tessera import Tensor, bf16, f32
from tessera.numerics import as_type, row_bytes
from tessera.runtime.device import device

require_gpu()
tile = ts.tile


def wide(x):
    return x.numpy().astype(np.float64)


@ts.kernel
def gemm(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", f32],
         BM=64, BN=64, BK=64):
    acc = tile.zeros((BM, BN), f32)
    for k in range(0, K, BK):  # noqa: F821
        acc = tile.dot(tile.load(A[tile_m:tile_m + BM, k:k + BK]),  # noqa: F821
                       tile.load(B[k:k + BK, tile_n:tile_n + BN]), acc)  # noqa: F821
    C[tile_m:tile_m + BM, tile_n:tile_n + BN] = acc  # noqa: F821


def on_gpu(*xs):
    return ts.to(xs, "cuda")


# --- promises -------------------------------------------------------------------------------------
ALONE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("torch", "jax", "cupy", "triton", "optuna", "nevergrad"):
            raise ImportError(name + " is refused here")
sys.meta_path.insert(0, Refuse())
import numpy as np, tessera as ts
from tessera import Tensor, f32
tile = ts.tile
@ts.kernel.autotune({"BN": [128, 256, 512]})
def double(x: Tensor["N", f32], y: Tensor["N", f32], BN=128):
    y[tile_n:tile_n + BN] = tile.load(x[tile_n:tile_n + BN]) * 2.0
x, y = ts.to((ts.ones((1 << 20,)), ts.zeros((1 << 20,))), "cuda")
double(x, y)
assert (y.numpy() == 2).all()
print(double.tuning_trace.source, double.best_config["n"] in (128, 256, 512))
"""


@pytest.mark.row("CORE-12")
def test_autotuning_needs_no_other_package(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert run.stdout.split() == ["measured", "True"], run.stderr


@pytest.mark.row("CORE-15")
def test_defaults_schedules_and_keywords_agree(rng):
    a, b = on_gpu(normal(rng, 256, 128, dtype="bf16"), normal(rng, 128, 256, dtype="bf16"))
    want, shown = wide(a) @ wide(b), set()
    for how in (lambda c: gemm(a, b, c), lambda c: gemm(a, b, c, BM=128, BK=32),
                lambda c: gemm.with_schedule(ts.Schedule(warps=8).stages(2))(a, b, c)):
        c = ts.zeros((256, 256)).to("cuda")
        how(c)
        np.testing.assert_allclose(wide(c), want, rtol=1e-4, atol=1e-4)
        shown.add(str(gemm.schedule))
    assert all("Schedule(" in s or "warps" in s for s in shown)
    assert gemm.with_schedule(ts.Schedule(warps=8)).schedule.text() != gemm.schedule.text()


@pytest.mark.row("CORE-18")
def test_two_runs_give_the_same_bits(rng):
    """A training loop with dropout, twice with one seed."""
    x, y = on_gpu(normal(rng, 64, 128), normal(rng, 64, 10))
    first = {n: normal(rng, *s) * 0.1 for n, s in (("a", (128, 96)), ("b", (96, 10)))}
    optimizer = ts.optim.AdamW()

    def trained():
        ts.random.seed(7)
        p = ts.to({n: ts.param(w.copy()) for n, w in first.items()}, "cuda")
        state = ts.to(optimizer.init(p), "cuda")

        @ts.jit
        def step(p, state):
            def loss(p):
                h = ts.random.dropout(ts.gelu(x @ p["a"]), 0.2)
                return ts.mean((h @ p["b"] - y) ** 2)

            value, slopes = ts.value_and_grad(loss)(p)
            return value, *optimizer.update(p, slopes, state, 1e-2)

        values = []
        for _ in range(20):
            value, p, state = step(p, state)
            values.append(value.item())
        return values, [p[n].numpy().tobytes() for n in p]

    one, two = trained(), trained()
    assert one == two and one[0][-1] < one[0][0]


# --- streams --------------------------------------------------------------------------------------
@ts.kernel
def long(x: Tensor["N", f32], n: ts.i32):
    t = tile.load(x[0:128])
    for _ in range(n):
        t = tile.sin(t) * 0.5 + 1.0
    x[0:128] = t


@pytest.mark.row("RT-04")
def test_kernels_on_two_streams_overlap():
    torch = pytest.importorskip("torch")
    x, y = (torch.ones(128, device="cuda") for _ in range(2))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    long[1](x, 10)
    torch.cuda.synchronize()
    with ts.debug.profile() as p:
        long.launch(x, 200_000, groups=1, stream=one)
        long.launch(y, 200_000, groups=1, stream=two)
    a, b = sorted(p.kernels, key=lambda k: k.start_ns)
    assert {a.stream, b.stream} == {one.cuda_stream, two.cuda_stream}
    assert b.start_ns < a.end_ns - 0.5 * (a.end_ns - a.start_ns), f"{a} {b}"
    event = torch.cuda.Event()  # and an event orders them
    with torch.cuda.stream(one):
        long.launch(x, 1000, groups=1, stream=one)
        event.record(one)
    two.wait_event(event)
    with torch.cuda.stream(two):
        seen = x.clone()
    torch.cuda.synchronize()
    assert torch.equal(seen, x)


@pytest.mark.alone
@pytest.mark.row("RT-11")
def test_a_call_returns_before_its_work_is_done(rng, note):
    x = (normal(rng, 8192, 8192, dtype="bf16") * 0.01).to("cuda")

    @ts.jit
    def f(x):
        y = x
        for _ in range(24):
            y = ts.cast(y @ x, bf16)
        return y

    f(x)
    device(0).synchronize()
    begin = time.perf_counter()
    y = f(x)
    called = time.perf_counter()
    device(0).synchronize()
    ended = time.perf_counter()
    note(called_ms=1e3 * (called - begin), ended_ms=1e3 * (ended - begin))
    assert called - begin < 0.5 * (ended - begin)
    assert np.isfinite(wide(y)).all()


# --- exchange -------------------------------------------------------------------------------------
WITHOUT_TORCH = """
import sys
import numpy as np, cupy, tessera as ts
x = ts.arange(100).to("cuda")
y = cupy.from_dlpack(x)
z = ts.from_dlpack(y)
w = cupy.asarray(x)
assert y.data.ptr == x.memory.pointer == z.memory.pointer == w.data.ptr
assert (cupy.asnumpy(y) == np.arange(100)).all()
assert "torch" not in sys.modules and "jax" not in sys.modules
print("exchanged")
"""


@pytest.mark.row("RT-13")
def test_exchange_imports_no_torch():
    pytest.importorskip("cupy")
    run = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert run.stdout == "exchanged\n", run.stderr


# --- operations -----------------------------------------------------------------------------------
@pytest.mark.row("OPS-26")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [1, 77, 200])
def test_flash_attention_in_both_forms(S, causal, rng):
    q, k, v = on_gpu(*(normal(rng, 2, 3, S, 64, dtype="bf16") for _ in range(3)))
    want = attended64(*map(wide, (q, k, v)), causal)[0]
    for got in (ts.flash_attention(q, k, v, causal=causal),
                ts.flash_attention(q, k, v, is_causal=causal),
                ts.jit(lambda *x: ts.flash_attention(*x, causal=causal))(q, k, v)):
        np.testing.assert_allclose(wide(got), want, rtol=2e-2, atol=2e-2)
    cache = ts.to(ts.kv_cache((2, 3, S, 64), dtype="bf16"), "cuda").append(k, v)
    got = ts.flash_attention(q, cache, dropout=0.0, causal=causal)
    joined = want.swapaxes(1, 2).reshape(2, S, -1)  # [B, S, H D]
    np.testing.assert_allclose(wide(got), joined, rtol=2e-2, atol=2e-2)


@pytest.mark.row("OPS-26")
def test_flash_attention_has_no_scores_in_memory():
    """16,384 queries: scores of one head would be 512 MiB, and q, k, v and y are 8 MiB."""
    run = ts.jit(lambda q, k, v: ts.flash_attention(q, k, v))
    graph = run.graph(*[Tensor[1, 1, 16384, 128, bf16]] * 3)
    from tessera.graph.cuda import CudaProgram
    plan = CudaProgram(graph, str(device(0).target)).plan
    assert plan.temporary_bytes <= 16384 * 128 * 4


@pytest.mark.row("OPS-28", "OPS-31")
@pytest.mark.parametrize("shape", [(3, 64), (2, 60, 30), (5, 7)])
def test_spectral_ops(shape, rng):
    x = normal(rng, *shape)
    z, n = wide(x), shape[-1]
    cases = {
        "fft": (ts.fft, np.fft.fft(z)), "ifft": (ts.ifft, np.fft.ifft(z)),
        "fft2": (ts.fft2, np.fft.fft2(z)), "ifft2": (ts.ifft2, np.fft.ifft2(z)),
        "rfft": (ts.rfft, np.fft.rfft(z)), "dct": (ts.dct, dct64(z)),
        "irfft": (lambda x: ts.irfft(ts.rfft(x), n=n), z),
        "idct": (lambda x: ts.idct(ts.dct(x)), z),
    }
    there = x.to("cuda")
    for name, (op, want) in cases.items():
        for got in (op(there), ts.jit(op)(there)):
            parts = got if isinstance(got, tuple) else (got,)  # real and imaginary
            assert {y.device for y in parts} == {"cuda:0"}, name
            got = sum(factor * wide(y) for factor, y in zip((1, 1j), parts, strict=False))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(),
                                       err_msg=name)
    spectrum = sum(wide(y) ** 2 for y in ts.fft(there))
    assert np.allclose(spectrum.sum(-1) / n, (z**2).sum(-1), rtol=1e-4)  # Parseval


def dct64(x):
    """Type II, as ts.dct without a norm: 2 sum_n x_n cos(pi (2 n + 1) k / 2 N)."""
    n = x.shape[-1]
    k = np.arange(n)
    return 2 * x @ np.cos(np.pi * (2 * k[:, None] + 1) * k / (2 * n))


@pytest.mark.row("OPS-29")
def test_dense_ops(rng):
    x = rng.standard_normal((4, 24, 24))
    spd = x @ x.swapaxes(-1, -2) + 24 * np.eye(24)
    a, s = (ts.tensor(t.astype(np.float32)).to("cuda") for t in (x, spd))
    x, spd = wide(a), wide(s)
    np.testing.assert_allclose(wide(ts.gemm(a[0], a[1])), x[0] @ x[1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(wide(ts.gemv(a[0], a[1][0])), x[0] @ x[1, 0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(wide(ts.batched_gemm(a, s)), x @ spd, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(wide(ts.cholesky(s)), np.linalg.cholesky(spd), rtol=1e-4, atol=1e-4)
    q, r = ts.qr(a)
    np.testing.assert_allclose(wide(q) @ wide(r), x, rtol=1e-4, atol=1e-4)
    u, d, vt = ts.svd(a)
    np.testing.assert_allclose(wide(u) * wide(d)[..., None, :] @ wide(vt), x, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(wide(d), np.linalg.svd(x, compute_uv=False), rtol=1e-3, atol=1e-3)
    p, low, up = (t.numpy() for t in ts.lu(a))
    np.testing.assert_allclose(low.astype(float) @ up, np.take_along_axis(x, p[..., None], -2),
                               rtol=1e-3, atol=1e-3)
    w, v = ts.eigh(s)
    np.testing.assert_allclose(wide(w), np.linalg.eigvalsh(spd), rtol=1e-3)
    real, imaginary = ts.eig(a)[0]
    found, want = wide(real) + 1j * wide(imaginary), np.linalg.eigvals(x)
    for got, known in zip(found, want, strict=True):  # in an order of their own
        near = np.abs(got[:, None] - known[None, :]).min(1)
        assert near.max() < 1e-2 and abs(got.sum() - known.sum()) < 1e-2


@pytest.mark.row("OPS-30")
@pytest.mark.parametrize("kind", ["CSR", "COO"])
def test_sparse_products(kind, rng):
    dense = np.where(rng.random((40, 30)) < 0.2, rng.standard_normal((40, 30)), 0)
    dense = dense.astype(np.float32)
    made = ts.to(getattr(ts.sparse, kind).from_dense(dense), "cuda")
    x, m = on_gpu(normal(rng, 30), normal(rng, 30, 7))
    for op, right in ((ts.spmv, x), (ts.spmm, m)):
        for got in (op(made, right), ts.jit(op)(made, right)):
            assert got.device == "cuda:0"
            np.testing.assert_allclose(wide(got), dense.astype(float) @ wide(right), rtol=1e-4,
                                       atol=1e-4)


@pytest.mark.row("OPS-32")
@pytest.mark.parametrize("draw", [ts.random.uniform, ts.random.normal], ids=["uniform", "normal"])
@pytest.mark.parametrize("shape", [(7,), (1000, 33)])
def test_random_numbers_have_the_bits_of_the_cpu(draw, shape):
    """And of each element they follow from its place in the whole: rows of a larger draw."""
    made = []
    for target in ("cpu", "cuda"):
        ts.random.seed(5)
        f = ts.jit(lambda: draw(shape), target=target)
        made.append([f().numpy() for _ in range(2)])
    if draw is ts.random.uniform:
        assert np.array_equal(*made)
    else:  # log and cosine of two libraries
        np.testing.assert_allclose(made[0], made[1], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(made[1][0], made[1][1])


@pytest.mark.row("NUM-45")
@pytest.mark.parametrize("dtype", ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2"])
def test_narrow_casts_are_those_of_the_host(dtype, rng):
    """A million random numbers of all sizes to codes, and every code back; rows lie in as few bytes
    as whole groups take (fp6: four elements in three bytes)."""
    numeric = as_type(dtype)
    x = np.exp2(rng.uniform(-20, 20, 1_000_000)) * rng.choice([-1, 1], 1_000_000)
    x[:6] = 0.0, -0.0, np.float32(numeric.dtype.max), -np.float32(numeric.dtype.max), 1e30, -1e30
    host = ts.tensor(x.astype(np.float32).reshape(1000, 1000))
    want = ts.cast(host, dtype)
    for got in (ts.cast(host.to("cuda"), dtype), ts.jit(lambda x: ts.cast(x, dtype))(
            host.to("cuda"))):
        assert got.device == "cuda:0" and got.buffer.tobytes() == want.buffer.tobytes()
        assert got.nbytes == want.nbytes == 1000 * row_bytes(1000, numeric.dtype) \
            == 1000 * -(-1000 * numeric.dtype.bits // 8)
    codes = np.arange(1 << numeric.dtype.bits, dtype=np.uint8).view(numeric.dtype.numpy)
    every = Tensor(codes, numeric)
    back = ts.cast(every.to("cuda"), "f32").numpy()
    assert np.array_equal(back, ts.cast(every, "f32").numpy(), equal_nan=True)
