"""Parameters that take a tensor or None: `Tensor["N", f32] | None`, in kernels and in functions."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from tessera import Tensor, f32, f64
from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.graph.cuda.levels import program_of


def scaled_rows():
    @ts.kernel(grid=lambda N: (N // 32,))
    def rows(x: Tensor["N", f32], w: Tensor["N", f32] | None, y: Tensor["N", f32],
             b: Tensor["K", f32] | None = None):
        i = ts.tile.group_id(0) * 32
        t = ts.tile.load(x[i:i+32])
        if w is not None:
            t = t * ts.tile.load(w[i:i+32])
        y[i:i+32] = t if b is None else t + b[K - 1]

    return rows


def test_a_kernel_is_compiled_for_what_is_there(rng):
    x, w, b = (rng.standard_normal(n).astype(np.float32) for n in (64, 64, 5))
    rows, y = scaled_rows(), np.empty(64, np.float32)
    for args, want in (((x, None, y), x), ((x, w, y), x * w), ((x, w, y, b), x * w + b[-1]),
                       ((x, None, y, b), x + b[-1]), ((x, None, y, None), x)):
        y[:] = np.nan
        rows(*args)
        np.testing.assert_array_equal(y, want)
    assert len(rows.specializations) == 4
    assert [[p.value.name for p in f.params] for f in rows.specializations[:2]] == [
        ["x", "y", "N"], ["x", "w", "y", "N"]]


def test_emitted_code(rng):
    x, w = (rng.standard_normal(64).astype(np.float32) for _ in "xw")
    for given in (None, w):
        compare(scaled_rows(), x, given, np.empty(64, np.float32))


def test_in_a_graph(rng):
    x, w = (ts.tensor(rng.standard_normal(64).astype(np.float32)) for _ in "xw")
    rows = scaled_rows()

    def f(x, w):
        y, z = ts.zeros((64,)), ts.zeros((64,))
        rows(x, None, y)
        rows(x, w, z)
        return y, z

    want = x.numpy(), x.numpy() * w.numpy()
    for made in (ts.jit(f)(x, w), program_of(ts.jit(f).graph(x, w), "sm_90a").run(
            [x.array, w.array])):
        for got, y in zip(made, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), y)


def test_what_is_there_must_fit():
    x = np.ones(64, np.float32)
    with pytest.raises(ShapeError, match=r"argument w: axis 0 \(N\) is 32, but x axis 0 \(N\)"):
        scaled_rows()(x, x[:32], x.copy())
    with pytest.raises(DTypeError, match="argument w is f64, its annotation says f32"):
        scaled_rows()(x, np.ones(64), x.copy())
    with pytest.raises(ArgumentError, match="argument x must be an array, got NoneType"):
        scaled_rows()(None, None, x.copy())


def test_without_arguments():
    """A tensor that is None by default is left out; of the others the types say what they are."""
    text = scaled_rows().inspect_ir("tile", N=64)
    assert "%w: tensor<N x f32>" in text and "%b" not in text


def test_functions_check_what_is_there():
    @ts.jit
    def f(x: Tensor["N", f64], w: Tensor["N", f64] | None = None) -> Tensor["N", f64] | None:
        return None if w is None else x * w

    x = ts.ones((3,), "f64")
    assert f(x) is None
    np.testing.assert_array_equal(f(x, 2 * x).numpy(), 2.0)
    with pytest.raises(ShapeError, match="argument w"):
        f(x, ts.ones((4,), "f64"))
    with pytest.raises(DTypeError, match=r"argument w is str, its annotation says "
                                         r"Tensor\['N', f64\] \| None"):
        f(x, "w")


def test_the_type():
    kind = Tensor["N", f32] | None
    assert kind == (None | Tensor["N", f32]) != Tensor["N", f32]
    assert kind.optional and kind.shape == Tensor["N", f32].shape
    with pytest.raises(TypeError):
        Tensor["N", f32] | Tensor["M", f32]
