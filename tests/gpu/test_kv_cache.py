"""Kernels over a KV cache on a GPU: the snippet with one, as printed, against the interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from conformance.test_state_rows import (
    FLASH_ATTENTION,
    TRANSFORMER_BLOCK,
    attention_inputs,
    make_weights,
    reference_attention,
    reference_block,
)
from conformance.test_state_rows import test_transformer_block_gradients as gradients_of_the_block
from gpu_harness import require_gpu
from snippet import run

require_gpu()


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield run(FLASH_ATTENTION)["flash_attention"]


@pytest.mark.row("EX-26")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S, T", [(64, 128), (70, 130), (1, 100)])
def test_the_kernel_over_a_cache(flash, rng, S, T, causal):
    q, cache = attention_inputs(rng, S, T, 64)
    with ts.device(ts.gpu):
        got = flash(q, cache, dropout=0.0, causal=causal)
        ts.random.seed(7)  # both launches are the first that draws
        dropped = flash(q, cache, dropout=0.25, causal=causal)
    want = reference_attention(q, cache, causal)
    assert np.abs(np.asarray(got, np.float64) - want).max() < 0.02
    ts.random.seed(7)
    with ts.device(ts.cpu):
        again = flash(q, cache, dropout=0.25, causal=causal)
    difference = np.asarray(dropped, np.float64) - np.asarray(again, np.float64)
    assert np.abs(difference).max() < 0.02  # the same elements are dropped
    assert not [t for t in flash.tuning_trace if t.error == "E_WRONG_RESULT"]


@pytest.mark.row("EX-25")
def test_the_block_on_a_machine_with_a_gpu(rng):
    """Its cache is on the host, and so is what is computed: kernels for GPUs keep no state."""
    weights = make_weights(rng)
    space = run(TRANSFORMER_BLOCK, **{n: ts.param(w, ts.bf16) for n, w in weights.items()})
    x = rng.standard_normal((2, 16, 64)).astype(ml_dtypes.bfloat16)
    y, cache = space["transformer_block"](ts.tensor(x), ts.kv_cache((2, 4, 16, 16), ts.bf16),
                                          heads=4, p=0.0)
    rounded = {n: w.astype(ml_dtypes.bfloat16).astype(np.float64) for n, w in weights.items()}
    want, _, _ = reference_block(x.astype(np.float64), rounded)
    error = np.sqrt(((np.asarray(y, np.float64) - want) ** 2).mean())
    assert cache.length == 16 and error < 0.02 * np.sqrt((want**2).mean())


@pytest.mark.row("EX-25")
def test_gradients_of_the_block_on_a_machine_with_a_gpu(rng):
    gradients_of_the_block(rng)
