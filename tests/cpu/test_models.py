"""Eleven models as users write them: they learn on the CPU, their gradients are those of
differences in f64, and their kernels for GPUs, which the interpreter runs, compute the same."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from models import gpt, mixture, unet
from models.training import (
    NAMES,
    gradients,
    leaves,
    losses,
    model,
    replaced,
    tensors,
    torch_losses,
)
from tessera.graph.cuda import CudaProgram
from tessera.numerics import as_type

TENSOR_CORES = {"sm_90a": "wgmma", "sm_80": "mma"}
NARROW = "bf16 @accum(f32)"


def test_they_are_written_for_users() -> None:
    """ts.* and NumPy alone."""
    for path in (Path(__file__).parents[1] / "models").glob("*.py"):
        found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        assert not any((n.module or "").startswith("tessera") for n in found), path


@pytest.mark.parametrize("name", NAMES)
def test_losses_fall(name: str) -> None:
    made = losses(model(name), "cpu", 20)
    assert np.isfinite(made).all() and made[-1] < 0.9 * made[0]


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_torch(name: str) -> None:
    m = model(name)
    np.testing.assert_allclose(losses(m, "cpu", 20), torch_losses(m, "cpu", 20), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_differences(name: str, rng: Any) -> None:
    """Along a random direction, in f64. Gradients that a model changes are not its loss's. Biases
    of 0 are moved: a sample of zeros would lie on the corner of relu."""
    m = model(name)
    p, batch = tensors(m.parameters(rng), "f64"), tensors(m.batch(rng), "f64")
    p = replaced(p, (ts.tensor(x.array + 1e-2 * rng.standard_normal(x.shape)) for x in leaves(p)))
    way = [rng.standard_normal(x.shape) for x in leaves(p)]
    kind = {"kind": "f64"} if m in (gpt, mixture, unet) else {}
    grads = leaves(ts.jit(ts.grad(lambda p: m.loss(p, *batch, **kind)))(p))
    slope = sum(float((g.array * v).sum()) for g, v in zip(grads, way, strict=True))

    def moved(h: float) -> Any:
        new = (ts.tensor(x.array + h * v) for x, v in zip(leaves(p), way, strict=True))
        return m.loss(replaced(p, new), *batch, **kind).item()

    h = 1e-6
    assert slope == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_the_same(name: str, rng: Any) -> None:
    """Loss and gradients of a step lowered for sm_90a, under the interpreter."""
    m = model(name)
    p, batch = tensors(m.parameters(rng)), tensors(m.batch(rng))
    step = ts.jit(lambda p, batch: gradients(m, p, *batch))
    want = leaves(step(p, batch))
    made = CudaProgram(step.graph(p, batch), "sm_90a")
    assert len(made.plan.groups) < 400
    got = made.run([x.array for x in leaves(p) + leaves(batch)])
    for y, w in zip(got, want, strict=True):
        np.testing.assert_allclose(y, w.array, rtol=1e-4, atol=1e-5)


# --- matmuls of narrow types ----------------------------------------------------------------------
def forms(fn: Any, *args: Any, target: str) -> Counter:
    """(bits of the operands, form) -> launches that multiply so."""
    return Counter((as_type(m.operands[0]).dtype.bits, form)
                   for m in ts.jit(fn).schedule(*args, target=target).matmuls for form in m.how.all)


@pytest.mark.parametrize("target", TENSOR_CORES)
@pytest.mark.parametrize("name", ["gpt", "mixture"])
def test_narrow_products_are_by_tensor_cores(name: str, target: str, rng: Any) -> None:
    m, sizes, count = {"gpt": (gpt, {"d": 128, "vocabulary": 64}, 29),
                       "mixture": (mixture, {"d": 128, "width": 256}, 5)}[name]
    p = tensors(m.parameters(rng, **sizes))
    batch = tensors(m.batch(rng, **({"vocabulary": 64} if m is gpt else {"d": 128})))
    found = forms(lambda p, b: ts.value_and_grad(lambda p: m.loss(p, *b, kind=NARROW))(p), p, batch,
                  target=target)
    assert sum(n for (bits, _), n in found.items() if bits == 16) >= count
    assert {form for bits, form in found if bits <= 16} == {TENSOR_CORES[target]}


@pytest.mark.parametrize("target", TENSOR_CORES)
def test_convolutions_are_by_tensor_cores(target: str, rng: Any) -> None:
    """Windows that are gathered are multiplied by mma on every target."""
    p, batch = tensors(unet.parameters(rng, width=16)), tensors(unet.batch(rng))
    found = forms(lambda p, b: ts.value_and_grad(lambda p: unet.loss(p, *b, kind=NARROW))(p), p,
                  batch, target=target)
    # five, each with two adjoints but the first, whose images want none
    assert sum(n for (bits, _), n in found.items() if bits == 16) == 14
    assert {form for bits, form in found if bits <= 16} <= {TENSOR_CORES[target], "mma"}


def test_the_experts_of_ts_moe(rng: Any) -> None:
    """Top-k routing of the library: every narrow product by wgmma."""
    args = [ts.tensor(rng.standard_normal(s).astype(np.float32), NARROW)
            for s in ((64, 128), (128, 8), (8, 128, 256), (8, 256, 128))]
    found = forms(lambda *a: ts.grad(lambda x, r, a, b: ts.mean(ts.square(ts.cast(
        ts.moe(x, r, (a, b), top_k=2), "f32"))), argnums=(0, 1, 2, 3))(*a), *args, target="sm_90a")
    assert found[16, "wgmma"] >= 6
    assert {form for bits, form in found if bits <= 16} == {"wgmma"}
