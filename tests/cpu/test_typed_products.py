"""Matmuls of narrow operands as they are stored: values, derivatives, what a graph records."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close

TYPES = ["bf16", "f16", "fp8_e4m3", "fp8_e5m2", "tf32"]
FORMS: dict[str, Any] = {  # f(x, w), the extents of x and w
    "nn": (lambda x, w: x @ w, (24, 40), (40, 16)),
    "nt": (lambda x, w: x @ w.T, (24, 40), (16, 40)),
    "tn": (lambda x, w: x.T @ w, (40, 24), (40, 16)),
    "tt": (lambda x, w: x.T @ w.T, (40, 24), (16, 40)),
    "batched": (lambda x, w: x @ w, (3, 24, 40), (3, 40, 16)),
    "batched nt": (lambda x, w: x @ ts.swapaxes(w, -1, -2), (3, 24, 40), (3, 16, 40)),
    "shared weights": (lambda x, w: x @ w, (3, 8, 40), (40, 16)),
    "broadcast batch": (lambda x, w: x @ w, (3, 1, 8, 40), (2, 40, 16)),
    "reshaped": (lambda x, w: ts.reshape(x, (24, 40)) @ ts.reshape(w, (40, 16)), (3, 8, 40),
                 (8, 5, 16)),
    "split": (lambda x, w: x @ ts.split(w, 2, axis=-1)[1], (24, 40), (40, 32)),
    "einsum": (lambda x, w: ts.einsum("nd,edf->enf", x, w), (8, 40), (2, 40, 16)),
    "tensordot": (lambda x, w: ts.tensordot(x, w, 2), (24, 5, 8), (5, 8, 16)),
    "linear": (ts.linear, (24, 40), (16, 40)),
    "vector": (lambda x, w: x @ w, (40,), (40, 16)),
}


def operands(form: str, dtype: str, rng: Any) -> tuple[list[ts.Tensor], list[np.ndarray]]:
    """Tensors of the type, and the numbers that they hold in f64."""
    made = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in FORMS[form][1:]]
    return made, [np.asarray(ts.cast(x, "f64")) for x in made]


def sum_with(f: Any, g: np.ndarray) -> Any:
    """sum(f(x, w) g): a cotangent g that the type of the result holds exactly."""
    return lambda *xs: ts.sum(ts.cast(f(*xs), ts.f32) * ts.tensor(g.astype(np.float32)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_against_f64(form, dtype, rng):
    f, inputs = FORMS[form][0], operands(form, dtype, rng)
    want = np.asarray(f(*map(ts.tensor, inputs[1])))
    for run in (f, ts.jit(f)):
        assert run(*inputs[0]).dtype.name == dtype
        assert_close(ts.cast(run(*inputs[0]), "f64"), want, dtype)
    g = rng.integers(-3, 4, want.shape).astype(np.float64)
    exact = ts.grad(lambda *xs: ts.sum(f(*xs) * ts.tensor(g)), argnums=(0, 1))(
        *map(ts.tensor, inputs[1]))
    for grad in (ts.grad(sum_with(f, g), argnums=(0, 1)),
                 ts.jit(ts.grad(sum_with(f, g), argnums=(0, 1)))):
        for got, wanted in zip(grad(*inputs[0]), exact, strict=True):
            assert got.dtype.name == "f32"  # nothing but the cotangent is rounded
            assert_close(got, wanted, "f32", n=40 * 24)


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_compute_the_same(form, dtype, rng):
    f, (xs, exact) = FORMS[form][0], operands(form, dtype, rng)
    g = rng.integers(-3, 4, np.asarray(f(*xs)).shape).astype(np.float64)
    both = ts.value_and_grad(sum_with(f, g), argnums=(0, 1))
    made = CudaProgram(ts.jit(lambda *xs: (f(*xs), both(*xs)[1])).graph(*xs), "sm_90a")
    value, *grads = made.run([x.array for x in xs])
    assert_close(np.asarray(value, np.float64), f(*map(ts.tensor, exact)), dtype)
    wanted = ts.grad(lambda *xs: ts.sum(f(*xs) * ts.tensor(g)), argnums=(0, 1))(
        *map(ts.tensor, exact))
    for got, want in zip(grads, wanted, strict=True):
        assert_close(got, want, "f32", n=40 * 24)


@pytest.mark.parametrize("dtype", [*TYPES, "int8"])
def test_no_operand_is_widened_in_a_graph(dtype):
    x = ts.zeros((8, 16), dtype)
    lines = ts.jit(lambda a, b: a @ b.T).graph(x, x)
    product = next(n for n in lines.nodes if n.op.name == "matmul")
    assert [v.aval.dtype.name for v in product.inputs] == [dtype, dtype]
    assert product.outputs[0].aval.dtype.name == ("int32" if dtype == "int8" else "f32")


@pytest.mark.parametrize("dtype, inside", [
    ("bf16", "bf16"), ("f16 @loss_scale(1024.0)", "f16"), ("bf16 @accum(f32)", "bf16"),
    ("tf32", "tf32"),
    ("fp6_e3m2", "f32"),  # packed: no product takes it as it lies
])
@pytest.mark.parametrize("form", ["nn", "shared weights", "einsum", "linear"])
def test_derivatives_are_products_of_the_stored_types(dtype, inside, form):
    f, *shapes = FORMS[form]
    graph = ts.jit(lambda x, w: ts.grad(
        lambda x, w: ts.sum(ts.cast(f(ts.cast(x, dtype), ts.cast(w, dtype)), ts.f32) ** 2),
        argnums=(0, 1))(x, w)).graph(*map(ts.zeros, shapes))
    made = [{v.aval.dtype.name for v in n.inputs} for n in graph.nodes if n.op.name == "matmul"]
    assert made == [{inside}] * 3


def test_a_wide_cotangent_stays_wide(rng):
    """Scores that nothing rounds: their cotangents are f32, and so are the products with them."""
    x, w = (ts.tensor(rng.standard_normal((8, 8)).astype(np.float32), "bf16") for _ in range(2))

    def f(x, w):
        return ts.sum(ts.gemm(x, w, ts.zeros((8, 8))) ** 2)  # bf16 and f32 give f32

    graph = ts.jit(ts.grad(f)).graph(x, w)
    kinds = [n.inputs[0].aval.dtype.name for n in graph.nodes if n.op.name == "matmul"]
    assert kinds == ["bf16", "f32", "f32"] or kinds == ["bf16", "f32"]
    X, W = (np.asarray(ts.cast(t, "f64")) for t in (x, w))
    assert_close(ts.grad(f)(x, w), 2 * (X @ W) @ W.T, "f32", n=64)


def test_products_of_tf32_are_those_of_tensor_cores(rng):
    """Casts to it, other ops of it and its matmuls had no kernels in graphs."""
    def loss(w, x):
        x, w = (ts.cast(t, "tf32") for t in (x, w))
        return ts.mean(ts.cast(ts.gelu(x @ w) @ w.T, "f32") ** 2)

    kinds = ts.Tensor[64, 128, ts.f32], ts.Tensor[64, 64, ts.f32]
    step = ts.jit(lambda w, x: ts.value_and_grad(loss)(w, x))
    for target, name in (("sm_90a", "wgmma.mma_async"), ("sm_80", "mma.sync")):
        found = re.findall(r"wgmma.mma_async\S*|mma.sync\S*", step.inspect_ir(
            "ptx", *kinds, target=target))
        assert found and all(x.startswith(name) and ".tf32.tf32" in x for x in found), found
    args = [ts.tensor(rng.standard_normal(t.shape).astype(np.float32)) for t in kinds]
    made = CudaProgram(step.graph(*args), "sm_90a").run([x.array for x in args])
    for got, want in zip(made, step(*args), strict=True):
        assert_close(got, want, "tf32", n=128)
