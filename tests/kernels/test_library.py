"""The standard library under the interpreter, against f64 oracles."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from benchmarks.library import entries
from fake_gpu import Torch
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from library_cases import CALLS, adam, adam_f64
from tessera import stdlib
from tessera.kernels.gemm import LAYOUTS, _operand
from tolerance import assert_close


@pytest.mark.parametrize("name", CALLS)
def test_results(name, rng):
    CALLS[name].check(rng)


@pytest.mark.parametrize("name", CALLS)
def test_another_schedule_computes_the_same(name, rng):
    CALLS[name].check(rng, CALLS[name].routine.record.variant)


@pytest.mark.parametrize("name", CALLS)
def test_through_the_driver(name, rng, gpu):
    """Host arrays are copied to the (fake) GPU, the result back; a schedule makes new kernels."""
    CALLS[name].check(rng, CALLS[name].routine.record.variant, target="cuda")


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_raced_for_or_read_before_it_is_written(name, rng):
    with ts.config.scope(debug=True):
        CALLS[name].check(rng)


def test_a_schedule_reaches_the_kernels(rng):
    base = ts.Schedule(block=(64, 32), warps=4)
    mine = stdlib.flash_attention_2.with_schedule(base)
    assert mine.schedule is base and stdlib.flash_attention_2.schedule != base
    q = ts.tensor(rng.standard_normal((1, 70, 32)).astype(np.float32), "bf16")
    mine(q, q, q)
    text = mine.inspect_ir("tile")
    assert "tile<64x32 x f32> = matmul" in text and "range" not in text
    assert "block_m 64" in mine.inspect_ir("schedule")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_adam(dtype, rng):
    """Ten steps of a parameter that is kept in place, its moments in f32."""
    gradients, (p, m, v) = adam(10, rng, (13, 77))
    w = ts.tensor(p, dtype)
    options = dict(lr=0.02, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    for t, g in enumerate(gradients, 1):
        out = stdlib.fused_adam(w, g, m, v, t, **options)
    assert out[0] is w and out[1] is m and out[2] is v
    want = adam_f64(ts.tensor(p, dtype).numpy(), gradients, **options)
    assert_close(m, want[1], "f32", 10)
    assert_close(v, want[2], "f32", 10)
    if dtype == "f32":
        assert_close(w.array, want[0], "f32", 10)
    else:  # each step rounds p: at most half a unit each
        assert np.abs(w.array.astype(np.float64) - want[0]).max() < 10 * 2.0**-8 * np.abs(p).max()


@pytest.mark.parametrize("dtype", ["bf16", ts.f32])
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_a_product_of_fp8_is_rounded_to_what_is_asked(layout, dtype, rng):
    a, b = (ts.tensor(rng.standard_normal(s).astype("f4"), "fp8_e4m3") for s in (
        (72, 300), (80, 300) if layout == "nt" else (300, 80)))
    got = stdlib.gemm(a, b, transpose_b=layout == "nt", dtype=dtype)
    want = stdlib.gemm.record.reference(*(x.numpy().astype("f8") for x in (a, b)),
                                        transpose_b=layout == "nt")
    assert got.dtype == dtype
    assert_close(got.array, want, str(got.dtype), n=300)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_a_product_of_integers_is_exact(layout, dtype, rng):
    low = -128 if dtype == "int8" else 0
    a, b = (rng.integers(low, low + 256, s).astype(dtype) for s in (
        ((72, 300), (80, 300)) if layout == "nt" else ((300, 72), (300, 80))))
    how = {f"transpose_{x}": way == "t" for x, way in zip("ab", layout, strict=True)}
    x, y = (ts.tensor(v, dtype) for v in (a, b))
    got = stdlib.gemm(x, y, **how)
    want = stdlib.gemm.record.reference(a.astype("i8"), b.astype("i8"), **how)
    assert got.dtype == "int32" and (np.asarray(got.array) == want).all()
    traced = ts.jit(lambda x, y: stdlib.gemm(x, y, **how))(x, y)
    assert traced.dtype == "int32" and (np.asarray(traced.array) == want).all()
    with pytest.raises(ts.DTypeError, match="int8 or of uint8"):
        stdlib.gemm(ts.tensor(a.astype("i4"), "int32"), ts.tensor(b.astype("i4"), "int32"))


@pytest.mark.parametrize("library", [np.asarray, ts.tensor], ids=["numpy", "tessera"])
def test_a_product_of_f32_with_the_bits_of_tf32(library, rng):
    x = rng.standard_normal((2, 70, 70)).astype("f4")
    got = stdlib.gemm(*map(library, x), precision="tf32")
    rounded = ts.tensor(x, "tf32").array.astype("f8")
    assert_close(np.asarray(got), rounded[0] @ rounded[1], "f32", n=70)
    assert np.abs(np.asarray(got) - x[0].astype("f8") @ x[1]).max() > 1e-4


def test_the_same_bytes_are_tf32_on_a_gpu(gpu, driver, rng):
    x, y = (Torch(rng.standard_normal((64, 64)).astype("f4")) for _ in "xy")
    for _ in range(2):
        got = stdlib.gemm(x, y, precision="tf32")
        assert gpu.launched[-1] == "gemm_whole"
        assert driver.launches[-1].stream == 70, "that of torch"
        assert_close(got.x, x.x.astype("f8") @ y.x, "f16", n=64)  # and not in f32
    with pytest.raises(ts.ArgumentError, match="cast the operands to tf32"):
        ts.jit(lambda a: stdlib.gemm(a, a, precision="tf32")).graph(ts.zeros((64, 64)))


@pytest.mark.parametrize("layout, extents, copied", [
    ("nt", (72, 64, 64), []), ("nn", (72, 64, 64), []), ("tt", (64, 72, 64), []),
    ("tn", (72, 64, 64), [(64, 64)]), ("tn", (64, 72, 64), [(64, 64)]),  # the smaller one
    ("nn", (72, 40, 64), [(64, 40)]), ("tt", (40, 72, 64), [(64, 40)]),  # few rows, and few of K
    ("nn", (72, 64, 32), [(32, 64)])])
def test_one_operand_of_tf32_may_lie_across_k(layout, extents, copied, gpu, rng):
    """It is the first of the kernel; of others there are copies along K."""
    M, N, K = extents
    a, b = (Torch(rng.standard_normal(s).astype("f4")) for s in (
        (K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)))
    gemm, before = stdlib.gemm.with_schedule(ts.Schedule(stages=2)), len(gpu.launched)
    got = gemm(a, b, **LAYOUTS[layout], precision="tf32")
    assert gpu.launched[before:] == ["turned_rows"] * len(copied) + ["gemm_whole"]
    args = [args for name, args, _ in gemm.launches(a, b, **LAYOUTS[layout], precision="tf32")
            if name == "turned_rows"]
    assert [tuple(x[0].shape) for x in args] == copied
    want = stdlib.gemm.record.reference(a.x.astype("f8"), b.x.astype("f8"), **LAYOUTS[layout])
    assert_close(got.x, want, "f16", n=K)


@pytest.mark.parametrize("layout, turned", [("nt", 2), ("nn", 1), ("tn", 0), ("tt", 1)])
def test_large_products_of_f32_are_of_rows_across_k(layout, turned, gpu, monkeypatch, rng):
    """Copies of the operands whose rows lie along K, and of those that no access of 16 bytes
    reads; small products read them as they lie."""
    copies = ["turned_rows"] * turned + ["aligned_rows"] * (layout[1] == "n")
    monkeypatch.setitem(_operand.__globals__, "ACROSS_FROM", 64)
    gemm = stdlib.gemm.with_schedule(ts.Schedule(stages=2))  # kernels of its own
    for M, N, K, launched in ((48, 65, 40, []), (72, 65, 40, copies)):
        a, b = (Torch(rng.standard_normal(s).astype("f4")) for s in (
            (K, M) if layout[0] == "t" else (M, K), (N, K) if layout[1] == "t" else (K, N)))
        before = len(gpu.launched)
        got = gemm(a, b, **LAYOUTS[layout])
        assert gpu.launched[before:] == [*launched, "gemm_whole"]
        want = stdlib.gemm.record.reference(a.x.astype("f8"), b.x.astype("f8"), **LAYOUTS[layout])
        assert_close(got.x, want, "f32", n=K)


def test_rotary_keeps_norms_and_takes_positions(rng):
    x = rng.standard_normal((2, 40, 16)).astype(np.float32)
    at = rng.integers(0, 5000, 40).astype(np.int32)
    y = stdlib.rotary_embedding(x, positions=at)
    assert_close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), "f32", 16)
    one = stdlib.rotary_embedding(x[:, 7:8], start=int(at[7]))
    np.testing.assert_array_equal(y[:, 7:8], one)
    assert isinstance(y, np.ndarray) and y.dtype == np.float32
    for positions, want in ((at.astype(np.int64), y),
                            (ts.arange(40) + 3, stdlib.rotary_embedding(x, start=3))):
        got = stdlib.rotary_embedding(x, positions=positions)
        np.testing.assert_array_equal(got, want)


def test_masked_rows_and_empty_arrays():
    x = np.array([[-np.inf, -np.inf], [0.0, -np.inf]], np.float32)
    np.testing.assert_array_equal(stdlib.stable_softmax(x), [[0, 0], [1, 0]])
    assert stdlib.stable_softmax(np.zeros((0, 5), np.float32)).shape == (0, 5)
    q = np.zeros((0, 4, 8), np.float32)
    assert stdlib.flash_attention_2(q, q, q).shape == (0, 4, 8)


def test_results_lie_where_the_arrays_do(gpu, rng):
    """Arrays of torch on a GPU (a stand-in): the result is one of torch, there."""
    x = rng.standard_normal((5, 70)).astype(np.float32)
    y = stdlib.stable_softmax(Torch(x.copy()))
    assert isinstance(y, Torch)
    e = np.exp(x - x.max(1, keepdims=True))
    assert_close(y.x, e / e.sum(1, keepdims=True), "f32", 70)


@pytest.mark.parametrize("call, error, text", [
    (lambda x: stdlib.stable_softmax(x, axis=0), ts.AxisError, "works on rows"),
    (lambda x: stdlib.stable_softmax(x.astype(np.int32)), ts.DTypeError, "x is int32"),
    (lambda x: stdlib.efficient_layernorm(x, x[0], x[0, 1:]), ts.ShapeError, "beta is"),
    (lambda x: stdlib.flash_attention_2(x, x, x), ts.ShapeError, "3 or 4 axes"),
    (lambda x: stdlib.flash_attention_2(*[x[None]] * 2, ts.tensor(x[None], "bf16")),
     ts.DTypeError, "one float type|q, k and v are"),
    (lambda x: stdlib.flash_attention_2(x[None], x[None], x[None], causl=True), ts.ArgumentError,
     "causl"),
    (lambda x: stdlib.flash_attention_2(x[None], x[None], x[None], scale=-0.5), ts.ArgumentError,
     "scale is -0.5|a positive number"),
    (lambda x: stdlib.gemm(x, x), ts.ShapeError, "do not fit"),
    (lambda x: stdlib.gemm(x, x, transpose_b=True, precision="bf16"), ts.ArgumentError,
     "precision='bf16' with operands of f32"),
    (lambda x: stdlib.fused_adam(x, x, x, x, 0), ts.ArgumentError, "first update is step 1|step=0"),
    (lambda x: stdlib.fused_adam(x, x[0], x, x, 1), ts.ShapeError, "g is"),
    (lambda x: stdlib.rotary_embedding(x[:, :5]), ts.ShapeError, "x is"),
    (lambda x: stdlib.rotary_embedding(x, positions=np.ones(3, np.float32)), ts.DTypeError,
     "positions are f32|integers"),
    (lambda x: stdlib.rotary_embedding(x, positions=np.ones((1, 3), np.int64)), ts.ShapeError,
     "one for each row"),
    (lambda x: stdlib.stable_softmax.with_schedule({"m": 4}), ts.ArgumentError, "ts.Schedule"),
    (lambda x: stdlib.stable_softmax.with_schedule(ts.Schedule(m=[1, 2])), ts.ArgumentError,
     "make a space"),
])
def test_mistakes(call, error, text):
    with pytest.raises(error, match=text) as info:
        call(np.ones((4, 6), np.float32))
    assert "test_library.py" in str(info.value)


def test_a_routine_is_declared_once():
    from tessera.kernels.routine import find, routine

    with pytest.raises(ts.ArgumentError, match="declared twice"):
        @routine(stdlib.gemm.kernels["gemm_whole"], **vars(stdlib.gemm.record))
        def gemm(run, a):
            return a
    with pytest.raises(ts.ArgumentError, match="no routine 'gem'") as info:
        find("gem")
    assert "gemm" in info.value.hint


def test_a_routine_without_samples_or_a_benchmark_without_a_rate_is_refused():
    from tessera.kernels.record import Benchmark

    facts = vars(stdlib.gemm.record)
    with pytest.raises(ts.ArgumentError, match="0 samples and 9 compiled calls cannot be tested"):
        type(stdlib.gemm.record)(**facts | {"samples": ()})
    with pytest.raises(ts.ArgumentError, match="gives flops=0, bytes=0"):
        Benchmark("", ((4, 4),), beside=("cuBLAS", lambda torch, a: a))
    with pytest.raises(ImportError, match="stable_softmx"):
        exec("from tessera.stdlib import stable_softmx")
    with pytest.raises(AttributeError, match="did you mean 'stable_softmax'"):
        _ = stdlib.stable_softmx
    assert "stable_softmax" in dir(stdlib)


@pytest.mark.parametrize("entry", entries(), ids=lambda e: e.title)
def test_benchmarks_are_calls_and_move_the_bytes_that_they_say(entry):
    """Each array is read or written at least once and at most twice; the routine takes them."""
    case, (arguments, options) = entry.case, entry.case.zeros()
    (_, run, _), = entry.routine.launches(*arguments, **options)
    arrays = {id(x.array): x for x in run if isinstance(x, ts.Tensor)}.values()
    once = sum(x.array.nbytes for x in arrays)
    assert all(any(x.shape[-1] == y.shape[-1] for y in arrays) for x in arguments
               if isinstance(x, ts.Tensor))
    if case.bytes:
        assert 0.99 * once <= case.bytes <= 2 * once and case.unit == "GB/s"
        assert case.rate(1e3) == case.bytes / 1e9
    else:
        assert case.flops > once and case.unit == "TFLOP/s"
        assert case.rate(1e3) == pytest.approx(case.flops / 1e12)
    assert entry.figures({"tessera": 2.0, case.beside[0]: 1.0})["tessera"][
        f"of {case.beside[0]}"] == 0.5
