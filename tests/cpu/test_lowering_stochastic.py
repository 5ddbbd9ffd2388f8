"""Casts that round at random in graphs for GPUs: the bits of the CPU, by the same keys."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tessera.numerics as tn
from tessera import Tensor, f32, i32
from tessera.errors import TesseraError, UnsupportedTargetError
from tessera.graph.cuda import CudaProgram, text_of

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 448.1, 464.0, 61440.0, 0.4999, -7.5,
           2.0**31, 126.9, -128.5, 1e9]
TYPES = ["bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3 @saturate", "int8", "int32", "uint8"]


def drawn(rng, n=300):
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-12, 9, n)
    return ts.tensor(np.concatenate([x, SPECIAL]).astype(np.float32))


def both(f, *xs, calls=2):
    """(the CPU's, the kernels') results of some calls from one seed."""
    compiled = ts.jit(f)
    ts.random.seed(11)
    want = [compiled(*xs).array for _ in range(calls)]
    program = CudaProgram(compiled.graph(*xs))
    ts.random.seed(11)
    return want, [program.run([x.array for x in xs])[0] for _ in range(calls)]


def same_bits(want, got):
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype and np.array_equal(tn.to_codes(a), tn.to_codes(b))


@pytest.mark.parametrize("kind", TYPES)
def test_the_bits_are_those_of_the_cpu(kind, rng):
    want, got = both(lambda x: ts.cast(x, f"{kind} @stochastic_round"), drawn(rng))
    same_bits(want, got)
    assert not np.array_equal(tn.to_codes(want[0]), tn.to_codes(want[1]))


def test_narrow_sources_and_more_axes(rng):
    x = ts.cast(ts.reshape(drawn(rng, 284), (3, 100)), "bf16")
    same_bits(*both(lambda x: ts.cast(ts.transpose(x), "fp8_e4m3 @stochastic_round"), x))
    same_bits(*both(lambda x: ts.cast(x[1] * 2.0, "f16 @stochastic_round"), ts.cast(x, "f32")))


def test_inside_of_a_function_and_its_gradient(rng):
    """The weights of a row, drawn once, reach every row of what reads them."""
    x, w = ts.tensor(rng.standard_normal((5, 40)).astype(np.float32)), drawn(rng, 24)

    def f(x, w):
        w = ts.where(ts.isfinite(w) & (ts.abs(w) < 100.0), w, 0.5)
        return ts.cast(ts.cast(w, "bf16 @stochastic_round"), "f32") * x

    same_bits(*both(f, x, w))
    want, got = both(lambda x, w: ts.grad(lambda w: ts.sum(f(x, w) ** 2))(w), x, w)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    same_bits(*both(lambda x: ts.vmap(lambda r: ts.cast(r, "bf16 @stochastic_round"))(x), x))


@pytest.mark.parametrize("shape", [(6, 40), (5, 7, 33)], ids=str)
def test_fused_with_what_is_around(shape, rng):
    """In one kernel with its operand, in rows with their sums, behind a matmul, and of one row that
    others repeat."""
    kind = "bf16 @stochastic_round"
    x = ts.tensor(rng.standard_normal(shape).astype(np.float32))
    w = ts.cast(ts.tensor(rng.standard_normal((shape[-1], 24)).astype(np.float32)), "bf16")
    f = ts.jit(lambda x: ts.cast(x * 0.99 + 0.1, kind))
    assert len(CudaProgram(f.graph(x)).plan.groups) == 1
    same_bits(*both(lambda x: ts.cast(x * 0.99 + 0.1, kind), x))
    same_bits(*both(lambda x: ts.cast(x - ts.max(x, -1, keepdims=True), kind), x))
    same_bits(*both(lambda x: ts.cast(ts.cast(ts.max(x, -1, keepdims=True), kind), "f32") + x, x))
    same_bits(*both(lambda x: ts.cast(ts.cast(x[0] * 2.0, kind), "f32") + x, x))
    want, got = both(lambda x, w: ts.cast(ts.cast(x, "bf16") @ w, "fp8_e4m3 @stochastic_round"),
                     x, w)
    for a, b in zip(want, got, strict=True):  # sums in another order round apart here and there
        assert (tn.to_codes(a) == tn.to_codes(b)).mean() > 0.98


def test_what_f32_does_not_hold_is_refused(rng):
    x = ts.tensor(rng.standard_normal(4))
    with pytest.raises(UnsupportedTargetError, match="does not hold every f64; cast to f32 first"):
        CudaProgram(ts.jit(lambda x: ts.cast(x, "bf16 @stochastic_round")).graph(x))


def test_the_kernel_compiles(rng):
    graph = ts.jit(lambda x: ts.cast(x, "fp8_e5m2 @stochastic_round")).graph(drawn(rng))
    assert "convert_random(" in text_of("tile", graph, "sm_90a")
    assert ".entry" in text_of("ptx", graph, "sm_90a")


# --- in kernels -----------------------------------------------------------------------------------
@ts.kernel
def rounded(x: Tensor["N", f32], y: Tensor["N", f32], z: Tensor["N", i32]):
    t, at = ts.tile.load(x[tile_n:tile_n + 16]), tile_n + ts.tile.arange(16)
    words = ts.tile.random_bits(at, seed=5)
    y[tile_n:tile_n + 16] = ts.tile.cast(t, "fp8_e4m3 @saturate @stochastic_round", bits=words)
    z[tile_n:tile_n + 16] = ts.tile.cast(t, "int8 @stochastic_round", bits=words)


def test_a_kernel_casts_by_words_that_it_draws(rng):
    x = drawn(rng)
    y, z = ts.zeros(x.shape), ts.zeros(x.shape, "int32")
    rounded(x, y, z)
    want = tn.encode(x.array, "fp8_e4m3", rounding="stochastic", saturate=True, key=5)
    assert np.array_equal(y.array, tn.decode(want, "fp8_e4m3"), equal_nan=True)
    assert np.array_equal(z.array, tn.encode(x.array, "int8", rounding="stochastic", key=5))


def test_words_and_policies_that_do_not_meet():
    @ts.kernel
    def plain(x: Tensor["N", f32], y: Tensor["N", f32]):
        words = ts.tile.random_bits(ts.tile.arange(16))
        y[0:16] = ts.tile.cast(ts.tile.load(x[0:16]), "bf16", bits=words)

    @ts.kernel
    def without(x: Tensor["N", f32], y: Tensor["N", f32]):
        y[0:16] = ts.tile.cast(ts.tile.load(x[0:16]), "bf16 @stochastic_round")

    @ts.kernel
    def floats(x: Tensor["N", f32], y: Tensor["N", f32]):
        t = ts.tile.load(x[0:16])
        y[0:16] = ts.tile.cast(t, "bf16 @stochastic_round", bits=t)

    x = ts.ones(16)
    for kernel, match in ((plain, "a cast to bf16 draws no bits"),
                          (without, r"or give words: cast\(x, dtype, bits="),
                          (floats, "the random words of a cast are uint32")):
        with pytest.raises(TesseraError, match=match):
            kernel(x, ts.zeros(16))
