"""Products of scaled fp8 and training with them on a GPU, against the CPU and bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_fp8_scaling import trained
from cpu.test_transpose_codes import lowered
from gpu_harness import require_gpu
from tessera.graph import tree

require_gpu()
E4M3 = 'fp8_e4m3 @scaled("amax")'


def gradients(x: Any, w: Any, g: Any) -> Any:
    y, pull = ts.vjp(lambda x, w: ts.cast(x, E4M3) @ ts.cast(w, E4M3), x, w)
    return y, *pull(g)


@pytest.mark.parametrize("M, K, N", [(128, 256, 384), (256, 1024, 512), (144, 272, 80),
                                     (1040, 272, 1104)])
def test_products_are_those_of_the_cpu(M, K, N, rng):
    """The codes are equal, so only sums differ: of 128 terms, which tensor cores keep in 14 bits,
    and of those in f32."""
    x, w, g = (ts.tensor((rng.standard_normal(s) * k).astype(np.float32)) for s, k in
               (((M, K), 3.0), ((K, N), 0.02), ((M, N), 1e-6)))
    want = gradients(x, w, g)
    got = ts.jit(gradients)(*(ts.to(t, "cuda") for t in (x, w, g)))
    X, W, G = (np.abs(np.asarray(t)) for t in (x, w, g))
    for y, exact, most in zip(got, want, (X @ W, G @ W.T, X.T @ G), strict=True):
        error = np.abs(y.numpy() - np.asarray(exact))
        assert (error <= 2.0**-11 * most + 1e-30).all()


def test_a_scale_is_that_of_the_largest_finite_number(rng):
    x = rng.standard_normal((300, 200)).astype(np.float32)
    x[7, 8], x[9, 10] = np.inf, np.nan
    here, there = (ts.cast(ts.to(ts.tensor(x), place), E4M3) for place in ("cpu", "cuda"))
    assert here.scale.item() == there.scale.item()
    np.testing.assert_array_equal(here.numpy(), there.numpy())


@pytest.mark.parametrize("name", ["gpt2-350m-fp8", "gpt2-350m-fp8-current"])
def test_losses_of_200_steps_follow_those_of_bf16(name):
    with ts.device("cuda"):
        plain, fp8 = (trained.__wrapped__(n, 200) for n in ("gpt2-350m", name))
    assert np.abs(fp8 / plain - 1).max() < 0.01
    assert plain[-10:].mean() < 0.8 * plain[0]


def test_codes_in_both_orders_and_the_largest_number(rng):
    """As on the CPU, but for sums of fp8 and an approximated gelu, which move codes of cotangents
    to a neighbour, by a quarter of them: of sums that are 2^-12 off, gradients are 1.8 % off.
    Without the last strip, of 16 rows, they would be 12 % off."""
    fn, xs = lowered(rng)
    want = tree.flatten(fn(*xs))[0]
    got = tree.flatten(fn(*ts.to(xs, "cuda")))[0]
    for y, exact in zip(got, map(np.asarray, want), strict=True):
        assert np.linalg.norm(y.numpy() - exact) <= 0.06 * np.linalg.norm(exact)
