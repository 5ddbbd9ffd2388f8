"""Tensors that lie on a GPU: results of functions there, taken again without a copy to the host."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Copies, Cupy, Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import normal
from lowering_cases import apart as apart
from tessera.errors import ArgumentError
from tessera.numerics import as_type
from tessera.tensor import Tensor
from tessera.tile.launch.resident import Resident, stored_bytes
from tolerance import assert_close

pytestmark = pytest.mark.usefixtures("gpu", "apart")


def test_a_training_loop_copies_what_is_new(driver, monkeypatch, rng):
    """Parameters and the optimizer's state stay where they are; a batch goes there."""
    @ts.jit(target="cuda")
    def step(params, batch):
        loss, grads = ts.value_and_grad(lambda p: ts.mean(ts.square(batch @ p["w"] + p["b"])))(
            params)
        return {k: p - 0.1 * grads[k] for k, p in params.items()}, loss

    def reference(params, batch):
        y = batch @ params["w"] + params["b"]
        d = 2 * y / y.size
        return {"w": params["w"] - 0.1 * batch.T @ d, "b": params["b"] - 0.1 * d.sum(0)}

    params = {"w": ts.param(normal(rng, 16, 8)), "b": ts.param(ts.zeros(8))}
    want = {k: p.array.astype(np.float64) for k, p in params.items()}
    counts = Copies(driver, monkeypatch)
    for i in range(4):
        batch = normal(rng, 32, 16)
        counts.to_device = counts.to_host = 0
        params, loss = step(params, batch)
        if i:
            assert (counts.to_device, counts.to_host) == (batch.nbytes, 0)
        want = reference(want, batch.array.astype(np.float64))
    assert {p.device for p in params.values()} == {loss.device} == {"cuda:0"}
    for k, p in params.items():
        assert_close(p.array, want[k], "f32", 64)


@pytest.mark.parametrize("late", ["", "kernels", "copies"])
def test_results_are_their_own(late, driver, rng):
    """They follow neither their arguments nor later calls, and nothing waits in between."""
    f = ts.jit(lambda x: (x * 2.0, x + 1.0, x), target="cuda")
    x = normal(rng, 6, 5)
    want = x.array.copy()
    f(x)
    driver.late = late
    waits = driver.waits
    first = f(x)
    x[...] = 7.0
    second = f(first[0])
    assert driver.waits == waits
    for got, expected in zip(first, (want * 2, want + 1, want), strict=True):
        np.testing.assert_array_equal(got.array, expected)
    for got, expected in zip(second, (want * 4, want * 2 + 1, want * 2), strict=True):
        np.testing.assert_array_equal(got.array, expected)


def test_it_is_a_tensor_like_any_other(rng):
    f = ts.jit(lambda x: x + x, target="cuda")
    x = normal(rng, 3, 4)
    y = f(x)
    assert isinstance(y, Resident) and (y.shape, y.type, y.nbytes) == (x.shape, x.type, x.nbytes)
    np.testing.assert_array_equal((y + 1.0).array, 2 * x.array + 1)
    assert (y + 1.0).device == "cuda:0" and x.device == "cpu"
    assert f(x[:1, :1])[0, 0].item() == 2 * x[0, 0].item()
    assert repr(y).startswith("Tensor[3, 4] f32 on cuda:0")
    np.testing.assert_array_equal(ts.jit(lambda v: v * 0.5)(y).array, x.array)
    y[1] = 3.0
    assert y.array[1].tolist() == [3.0] * 4 and y.array[0].tolist() == (2 * x.array[0]).tolist()
    assert f(y).array[1].tolist() == [6.0] * 4
    host = y.numpy()
    host[...] = 0.0  # a copy
    assert y.array[1].tolist() == [3.0] * 4
    assert ts.param(y).is_param and ts.param(y).device == "cuda:0"


def test_kernels_take_them_where_they_lie(driver, monkeypatch, rng):
    @ts.kernel
    def double(x: ts.Tensor["N", ts.f32]):
        i = ts.tile.linear_id()
        if i < N:  # noqa: F821
            x[i] = 2.0 * x[i]

    f = ts.jit(lambda x: x + 1.0, target="cuda")
    x = normal(rng, 40)
    y = f(x)
    counts = Copies(driver, monkeypatch)
    double(y)
    double(y)
    z = f(y)
    assert counts.to_host == 0
    np.testing.assert_array_equal(z.array, 4 * (x.array + 1) + 1)
    np.testing.assert_array_equal(y.array, 4 * (x.array + 1))


@pytest.mark.parametrize("library", [Torch, Cupy])
def test_arrays_of_other_libraries_are_read_where_they_lie(library, driver, monkeypatch, rng):
    f = ts.jit(lambda x, y: x @ y, target="cuda")
    a, b = normal(rng, 8, 8), normal(rng, 8, 8)
    there = library(filled(a.array))
    f(a, b)
    counts = Copies(driver, monkeypatch)
    assert_close(f(there, b).array, a.array @ b.array, "f32", 8)
    assert counts.to_device == b.nbytes
    interface = f(there, b).__cuda_array_interface__
    assert interface["shape"] == (8, 8) and interface["typestr"] == "<f4"


def test_arrays_with_gaps_are_refused(rng):
    f = ts.jit(lambda x: x + 1.0, target="cuda")
    with pytest.raises(ArgumentError, match=r"argument x has shape \(4, 2\) and strides \(4, 2\)"):
        f(Cupy(filled(normal(rng, 4, 4).array)[:, ::2]))


def test_packed_types(rng):
    made = Resident((3, 5), as_type("fp4_e2m1"), 0)
    assert made.memory.nbytes == made.nbytes == 9 == stored_bytes((3, 5), ts.fp4_e2m1)
    host = ts.tensor(rng.standard_normal((3, 5)).astype(np.float32), "fp4_e2m1")
    made[...] = host
    assert made.array.tobytes() == host.array.tobytes() and made.buffer.shape == (3, 3)


def test_no_elements(rng):
    f = ts.jit(lambda x: x.T, target="cuda")
    assert f(f(ts.zeros((0, 3)))).shape == (0, 3)


# --- CUDA graphs ---------------------------------------------------------------------------------
def layers(x: Tensor, ws: list[Tensor]) -> Tensor:
    for w in ws:
        x = ts.remat(lambda v, w: ts.tanh(v @ w), offload=True)(x @ w, w)
    return x


@pytest.mark.row("RT-05")
@pytest.mark.parametrize("late", ["", "kernels"])
def test_a_captured_step_is_one_launch(late, driver, rng):
    """The same bits, whatever the inputs of later calls."""
    f = ts.jit(ts.grad(lambda x, ws: ts.sum(layers(x, ws)), argnums=(0, 1)), target="cuda",
               capture_graph=True)
    plain = ts.jit(f.fn, target="cuda")
    assert f.capture == "on: from the second call of a signature"
    ws = [normal(rng, 128, 128) for _ in range(3)]
    f(normal(rng, 128, 128), ws)
    kernels = len(driver.launches) // 2  # each ran, and was recorded
    assert f.capture == f"on: {kernels} kernels and 6 copies in one launch"
    driver.late = late
    for _ in range(2):
        x = normal(rng, 128, 128)
        kernels, graphs = len(driver.launches), driver.graph_launches
        got = f(x, ws)
        assert (len(driver.launches), driver.graph_launches) == (kernels, graphs + 1)
        want = plain(x, ws)
        for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
            assert a.array.tobytes() == b.array.tobytes()


@pytest.mark.row("RT-06")
def test_other_shapes_are_captured_anew(driver, rng):
    f = ts.jit(lambda x: ts.softmax(x * 2.0), target="cuda", capture_graph=True)
    for n in (5, 7, 5, 7):
        x = normal(rng, 3, n)
        assert_close(f(x).array, ts.softmax(x * 2.0).array, "f32", n)
    assert len(driver.graphs) == 2 and driver.graph_launches == 2 and f.specializations == 2


@pytest.mark.parametrize("fn", [lambda x: ts.argsort(x)[:2], lambda x: ts.exp(x)[:3],
                                lambda x: (ts.exp(x), ts.exp(x)[:3]), lambda x: x[:2],
                                lambda x: ts.exp(x)[:6].reshape(3, 2)[None]])
def test_a_result_that_begins_a_larger_value_has_memory_of_its_own(fn, gpu, rng):
    """Of its size: what made the larger one wrote beyond it. The driver looks."""
    x = ts.tensor(rng.standard_normal(7).astype(np.float32))
    made, want = ts.jit(fn)(x.to("cuda")), fn(x)
    pairs = zip(made, want, strict=True) if isinstance(want, tuple) else [(made, want)]
    for y, w in pairs:
        np.testing.assert_allclose(y.array, w.array, rtol=1e-6)
