"""The standard library on the GPU, against the f64 references of its records."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from library_cases import CALLS, adam, adam_f64
from tessera import stdlib
from tolerance import assert_close

require_gpu()


@pytest.mark.row("STD-01", "STD-02", "STD-03", "STD-05", "STD-08")
@pytest.mark.parametrize("name", CALLS)
def test_results(name, rng):
    CALLS[name].check(rng, target="cuda")


@pytest.mark.row("STD-06", "STD-08", "EX-29")
@pytest.mark.parametrize("name", CALLS)
def test_another_schedule_computes_the_same(name, rng):
    call = CALLS[name]
    mine = call.routine.record.variant
    assert call.routine.with_schedule(mine).schedule is mine
    call.check(rng, mine, target="cuda")


@pytest.mark.row("STD-04")
def test_adam_is_one_launch_a_step(rng):
    gradients, (p, m, v) = adam(10, rng, (130, 77))
    w, options = p.copy(), dict(lr=0.02, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    with ts.debug.profile() as profile:
        for t, g in enumerate(gradients, 1):
            stdlib.fused_adam.launch(w, g, m, v, t, target="cuda", **options)
    assert len(profile.kernels) == 10
    want = adam_f64(p, gradients, **options)
    for got, expected in zip((w, m, v), want, strict=True):
        assert_close(got, expected, "f32", 10)


def test_arrays_of_torch_stay_on_the_gpu():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 8, 500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    y = stdlib.flash_attention_2(q, k, v, causal=True)
    assert y.device == q.device and y.dtype == q.dtype
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True)
    assert_close(y.double().cpu().numpy(), want.cpu().numpy(), "bf16", 16)
    x = torch.randn(300, 5000, device="cuda")
    y = stdlib.stable_softmax(x)
    assert_close(y.cpu().numpy(), torch.softmax(x.double(), 1).cpu().numpy(), "f32", 64)
    z = stdlib.rotary_embedding(x[:, :64].contiguous(), start=7)
    np.testing.assert_allclose(z.norm(dim=1).cpu(), x[:, :64].norm(dim=1).cpu(), rtol=1e-5)


@pytest.mark.row("STD-01")
@pytest.mark.parametrize("causal", [False, True])
def test_attention_has_its_gradients(causal, rng):
    torch = pytest.importorskip("torch")
    q, k, v, w = (rng.standard_normal((2, 3, 192, 64)).astype(np.float32) for _ in range(4))
    there = [ts.cast(x, "bf16").to("cuda") for x in (q, k, v, w)]

    def loss(q, k, v, w):
        return ts.sum(ts.cast(stdlib.flash_attention_2(q, k, v, causal=causal), "f32")
                      * ts.cast(w, "f32"))

    made = ts.jit(ts.grad(loss, (0, 1, 2)))(*there)
    wide = [torch.from_numpy(x.cpu().numpy().astype(np.float64)).requires_grad_() for x in there]
    y = torch.nn.functional.scaled_dot_product_attention(*wide[:3], is_causal=causal)
    wants = torch.autograd.grad((y * wide[3]).sum(), wide[:3])
    for g, want in zip(made, wants, strict=True):
        assert_close(g.numpy().astype(np.float64), want.numpy(), "bf16", 192)
