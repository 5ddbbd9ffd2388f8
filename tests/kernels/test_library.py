"""The standard library under the interpreter, against f64 oracles."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from library_cases import CALLS, SCHEDULES, adam, adam_f64
from tessera import stdlib
from tolerance import assert_close


@pytest.mark.parametrize("name", CALLS)
def test_results(name, rng):
    call = CALLS[name]
    arrays = call.arrays(rng)
    got = call.run(arrays)
    assert isinstance(got, ts.Tensor) and got.type is arrays[0].type
    assert_close(got.array, call.expected(arrays), call.rounds or call.dtype, call.terms)


@pytest.mark.parametrize("name", CALLS)
def test_another_schedule_computes_the_same(name, rng):
    call = CALLS[name]
    arrays = call.arrays(rng)
    got = call.run(arrays, SCHEDULES[call.routine])
    assert_close(got.array, call.expected(arrays), call.rounds or call.dtype, call.terms)


@pytest.mark.parametrize("name", CALLS)
def test_through_the_driver(name, rng, gpu):
    """Host arrays are copied to the (fake) GPU, the result back; a schedule makes new kernels."""
    call = CALLS[name]
    arrays = call.arrays(rng)
    got = call.run(arrays, SCHEDULES[call.routine], target="cuda")
    assert_close(got.array, call.expected(arrays), call.rounds or call.dtype, call.terms)


@pytest.mark.parametrize("name", ["softmax bf16", "attention causal", "rotary", "gemm"])
def test_nothing_is_raced_for_or_read_before_it_is_written(name, rng):
    call = CALLS[name]
    with ts.config.scope(debug=True):
        call.run(call.arrays(rng))


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
    options = dict(lr=0.02, b1=0.8, b2=0.95, eps=1e-6)
    for t, g in enumerate(gradients, 1):
        out = stdlib.fused_adam(w, g, m, v, t, weight_decay=0.1, **options)
    assert out[0] is w and out[1] is m and out[2] is v
    want = adam_f64(ts.tensor(p, dtype).numpy(), gradients, **options, decay=0.1)
    assert_close(m, want[1], "f32", 10)
    assert_close(v, want[2], "f32", 10)
    if dtype == "f32":
        assert_close(w.array, want[0], "f32", 10)
    else:  # each step rounds p: at most half a unit each
        assert np.abs(w.array.astype(np.float64) - want[0]).max() < 10 * 2.0**-8 * np.abs(p).max()


def test_rotary_keeps_norms_and_takes_positions(rng):
    x = rng.standard_normal((2, 40, 16)).astype(np.float32)
    at = rng.integers(0, 5000, 40).astype(np.int32)
    y = stdlib.rotary_embedding(x, positions=at)
    assert_close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), "f32", 16)
    one = stdlib.rotary_embedding(x[:, 7:8], start=int(at[7]))
    np.testing.assert_array_equal(y[:, 7:8], one)
    assert isinstance(y, np.ndarray) and y.dtype == np.float32


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
    (lambda x: stdlib.gemm(x, x), ts.ShapeError, "do not fit"),
    (lambda x: stdlib.fused_adam(x, x, x, x, 0), ts.ArgumentError, "first update is step 1|step=0"),
    (lambda x: stdlib.fused_adam(x, x[0], x, x, 1), ts.ShapeError, "g is"),
    (lambda x: stdlib.rotary_embedding(x[:, :5]), ts.ShapeError, "x is"),
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
        @routine(stdlib.gemm.kernels["gemm_nn"])
        def gemm(run, a):
            return a
    with pytest.raises(ts.ArgumentError, match="no routine 'gem'") as info:
        find("gem")
    assert "gemm" in info.value.hint
