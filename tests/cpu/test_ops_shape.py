"""Ops that move elements: against NumPy, for every storage type, with symbolic extents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import Tensor, f32, sym
from tessera.errors import ArgumentError, AxisError, DTypeError, ShapeError, TraceError
from tolerance import assert_close

# name -> (function of a tensor, the same in NumPy); each moves elements of a [2, 3, 4] tensor
MOVES: dict[str, tuple] = {
    "reshape": (lambda x: ts.reshape(x, (4, -1)), lambda a: a.reshape(4, 6)),
    "flatten": (ts.flatten, np.ravel),
    "expand_dims": (lambda x: ts.expand_dims(x, (0, -1)), lambda a: a[None, ..., None]),
    "squeeze": (lambda x: ts.squeeze(x[:1]), lambda a: a[0]),
    "transpose": (lambda x: ts.transpose(x, (2, 0, 1)), lambda a: a.transpose(2, 0, 1)),
    "flatten from": (lambda x: x.flatten(1), lambda a: a.reshape(2, 12)),
    "flatten to": (lambda x: ts.flatten(x, 0, 1), lambda a: a.reshape(6, 4)),
    "flatten one": (lambda x: ts.flatten(x, -2, 1), lambda a: a),
    "transpose of axes": (lambda x: x.transpose(0, 2, -2), lambda a: a.transpose(0, 2, 1)),
    "transpose axes=": (lambda x: x.transpose(axes=[1, 0, 2]), lambda a: a.transpose(1, 0, 2)),
    "moveaxes": (lambda x: ts.moveaxis(x, (0, 2), (-1, 0)),
                 lambda a: np.moveaxis(a, (0, 2), (-1, 0))),
    "reverse axes": (ts.transpose, np.transpose),
    "swapaxes": (lambda x: ts.swapaxes(x, 0, -1), lambda a: a.swapaxes(0, -1)),
    "moveaxis": (lambda x: ts.moveaxis(x, 0, 2), lambda a: np.moveaxis(a, 0, 2)),
    "broadcast_to": (lambda x: ts.broadcast_to(x[:, :1], (5, 2, 3, 4)),
                     lambda a: np.broadcast_to(a[:, :1], (5, 2, 3, 4))),
    "flip": (lambda x: ts.flip(x, (0, 2)), lambda a: np.flip(a, (0, 2))),
    "pad": (lambda x: ts.pad(x, ((1, 0), (0, 2), (3, 1))),
            lambda a: np.pad(a, ((1, 0), (0, 2), (3, 1)))),
    "concatenate": (lambda x: ts.concatenate([x, x[:, :1]], 1),
                    lambda a: np.concatenate([a, a[:, :1]], 1)),
    "stack": (lambda x: ts.stack([x, x], -1), lambda a: np.stack([a, a], -1)),
    "split": (lambda x: ts.split(x, [1, 3], -1)[1], lambda a: np.split(a, [1], -1)[1]),
    "tile": (lambda x: ts.tile(x, (2, 1, 3)), lambda a: np.tile(a, (2, 1, 3))),
    "repeat": (lambda x: ts.repeat(x, 3, 1), lambda a: np.repeat(a, 3, 1)),
    "take": (lambda x: ts.take(x, [2, 0, 2], 1), lambda a: a[:, [2, 0, 2]]),
    "getitem": (lambda x: x[:, 1::2, None], lambda a: a[:, 1::2, None]),
    "tril": (ts.tril, np.tril),
    "diagonal": (lambda x: ts.diagonal(x, 1, 1, 2), lambda a: np.diagonal(a, 1, 1, 2)),
    "edge": (lambda x: ts.pad(x, (1, 2), mode="edge"), lambda a: np.pad(a, (1, 2), "edge")),
    "reflect": (lambda x: ts.pad(x, 1, mode="reflect"), lambda a: np.pad(a, 1, "reflect")),
    "symmetric": (lambda x: ts.pad(x, 2, mode="symmetric"), lambda a: np.pad(a, 2, "symmetric")),
    "wrap": (lambda x: ts.pad(x, 2, mode="wrap"), lambda a: np.pad(a, 2, "wrap")),
}


@pytest.mark.parametrize("dtype", ["f64", "bf16", "fp8_e5m2", "fp4_e2m1", "int4", "uint8", "bool_"])
@pytest.mark.parametrize("name", MOVES)
def test_elements_are_moved_not_changed(name: str, dtype: str, rng: np.random.Generator) -> None:
    fn, oracle = MOVES[name]
    x = ts.cast(ts.tensor(rng.integers(0, 2, (2, 3, 4))), dtype)
    want = oracle(x.array.astype(np.float64))
    for run in (fn, ts.jit(fn)):
        out = run(x)
        assert out.dtype is x.dtype and out.shape == want.shape
        np.testing.assert_array_equal(out.array.astype(np.float64), want)


@pytest.mark.parametrize("name", MOVES)
def test_derivatives_of_stored_types_are_wide(name: str, rng: np.random.Generator) -> None:
    """Elements of bf16 move as they are; tangents and cotangents are f32 and lose nothing."""
    fn = MOVES[name][0]
    a = rng.standard_normal((2, 3, 4)).astype(np.float32)
    x, t = ts.tensor(a, "bf16"), rng.standard_normal((2, 3, 4)).astype(np.float32)
    tangent = ts.jvp(fn, (x,), (t,))[1]
    assert tangent.dtype.name == "f32"
    np.testing.assert_array_equal(tangent, MOVES[name][1](t))
    g = rng.standard_normal(tangent.shape).astype(np.float32)
    cotangent = ts.vjp(fn, x)[1](g)
    assert cotangent.dtype.name == "f32"
    assert_close(np.vdot(cotangent, t), np.vdot(g.astype(np.float64), tangent), dtype="f32", n=500,
                 scale=10.0)


def test_partial_tangents_of_joined_low_precision(rng: np.random.Generator) -> None:
    """An operand without a tangent contributes f32 zeros beside an f32 tangent."""
    a, t = ts.ones((2,), "bf16"), np.ones(2, np.float32)
    join = lambda x: ts.concatenate([x, a])  # noqa: E731
    assert ts.jvp(join, (a,), (t,))[1].tolist() == [1.0, 1.0, 0.0, 0.0]
    put = lambda x: ts.scatter(a, [1], x)  # noqa: E731
    assert ts.jvp(put, (a[:1],), (t[:1],))[1].tolist() == [0.0, 1.0]
    block = lambda x: ts.dynamic_update_slice(a, x, (0,))  # noqa: E731
    assert ts.jvp(block, (a[:1],), (t[:1],))[1].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", MOVES)
def test_moving_a_scaled_tensor_moves_its_values(name: str, rng: np.random.Generator) -> None:
    """Never the codes without their scale."""
    fn, oracle = MOVES[name]
    x = ts.quantize(rng.standard_normal((2, 3, 4)).astype(np.float32),
                    'int8 @scaled("amax") @per_channel(1)')
    np.testing.assert_array_equal(fn(x).numpy(), oracle(x.numpy()))
    np.testing.assert_array_equal(ts.jit(fn)(x).numpy(), oracle(x.numpy()))


@given(st.data())
def test_pad_and_its_derivative(data: st.DataObject) -> None:
    """Padding by widths of either sign equals a pad then a slice; the adjoint is exact."""
    n = data.draw(st.integers(0, 5))
    lo, hi = data.draw(st.integers(-3, 4)), data.draw(st.integers(-3, 4))
    x = np.arange(1.0, n + 1)
    if n + lo + hi < 0:
        with pytest.raises(ShapeError, match="padding"):
            ts.pad(x, (lo, hi))
        return
    wide = np.pad(x, 8, constant_values=9.0)
    want = wide[8 - lo: 8 + n + hi]
    np.testing.assert_array_equal(ts.pad(x, (lo, hi), 9.0), want)
    w = np.random.default_rng(n).standard_normal(want.shape)
    got = ts.grad(lambda x: ts.sum(ts.pad(x, (lo, hi), 9.0) * w))(x)
    full = np.zeros(wide.shape)
    full[8 - lo: 8 + n + hi] = w
    np.testing.assert_array_equal(got, full[8: 8 + n])


@pytest.mark.row("OPS-21")
def test_transpose_of_a_matrix(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 5)).astype(np.float32)
    np.testing.assert_array_equal(ts.tensor(a).T, a.T)
    np.testing.assert_array_equal(ts.jit(lambda x: x.T)(a), a.T)
    x = ts.tensor(a)
    assert np.shares_memory(x.T.array, x.array), "a view"
    np.testing.assert_array_equal(ts.tensor(a[None]).mT, a.T[None])


def test_symbolic_extents() -> None:
    B, S = sym("B S")
    kind = Tensor["B", "S", 12, f32]
    infer = lambda fn: ts.jit(fn).infer(kind).shape  # noqa: E731
    assert infer(lambda x: ts.reshape(x, (x.shape[0], x.shape[1], 3, 4))) == (B, S, 3, 4)
    assert infer(lambda x: ts.reshape(x, (-1, 12))) == (B * S, 12)
    assert infer(lambda x: ts.reshape(x, (B, -1))) == (B, S * 12)
    assert infer(lambda x: ts.swapaxes(x, 0, 1)) == (S, B, 12)
    assert infer(lambda x: ts.concatenate([x, x], 1)) == (B, S * 2, 12)
    assert infer(lambda x: ts.pad(x, ((0, 0), (1, 0), (0, 0)))) == (B, S + 1, 12)
    assert infer(lambda x: ts.split(x, 3, -1)[0]) == (B, S, 4)
    assert infer(ts.tril) == (B, S, 12)
    with pytest.raises(ShapeError, match="not a multiple of 5"):
        infer(lambda x: ts.reshape(x, (-1, 5)))


X = ts.zeros((2, 3))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ts.reshape(X, (4, 2)), ShapeError, r"\(6 elements\) to \[4, 2\] \(8 elements\)"),
        (lambda: ts.reshape(X, (-1, -1)), ShapeError, "only one extent can be -1"),
        (lambda: ts.reshape(X, (4, -1)), ShapeError, "not a multiple of 4"),
        (lambda: ts.reshape(X, (-2, -3)), ArgumentError, "cannot be negative"),
        (lambda: ts.squeeze(X, 0), ShapeError, "its extent is 2, not 1"),
        (lambda: ts.transpose(X, (0, 0)), AxisError, "not a permutation"),
        (lambda: ts.swapaxes(X, 0, 2), AxisError, "axis 2 is outside a tensor of 2 axes"),
        (lambda: ts.expand_dims(X, 4), AxisError, "axis 4"),
        (lambda: X[0].T, ShapeError, "a transpose needs two axes"),
        (lambda: ts.broadcast_to(X, (3, 3)), ShapeError, "does not broadcast"),
        (lambda: ts.broadcast_to(X, (3,)), ShapeError, "does not broadcast"),
        (lambda: ts.concatenate([X, X.T]), ShapeError, "operand 1 .* along axis 0"),
        (lambda: ts.concatenate([]), ArgumentError, "non-empty list"),
        (lambda: ts.concatenate(X), ArgumentError, "non-empty list"),
        (lambda: ts.stack([X, X.T]), ShapeError, "tensor 1 has shape"),
        (lambda: ts.split(X, 2, 1), ShapeError, "extent 3 does not split into 2"),
        (lambda: ts.split(X, [1, 1], 1), ShapeError, "do not add up to extent 3.*np.split"),
        (lambda: ts.split(X, np.array([1, 1]), 1), ShapeError, "do not add up to extent 3"),
        (lambda: ts.jit(ts.split)(X, 2), TraceError, "Python needs an integer"),
        (lambda: ts.repeat(X, [1, 2, 3], 0), ArgumentError, r"repeats \[1, 2, 3\] of 2 elements"),
        (lambda: ts.repeat(X, [1, -2], 0), ArgumentError, "one integer from 0 on for each"),
        (lambda: ts.pad(ts.tensor([1], "int8"), 1, 300), ArgumentError, "300 is outside int8"),
        (lambda: ts.flip(X, (0, 0)), AxisError, "names an axis twice"),
        (lambda: ts.pad(X, (1,)), ArgumentError, "does not fit 2 axes"),
        (lambda: ts.pad(X, 1, mode="mirror"), ArgumentError, "one of constant, edge"),
        (lambda: ts.pad(X[:0], 1, mode="edge"), ShapeError, "axis 0 of extent 0"),
        (lambda: ts.pad(ts.tensor([1]), 1, 0.5), DTypeError, "0.5 is not an element of int64"),
    ],
)
def test_errors(call: Any, error: type, text: str) -> None:
    import re

    with pytest.raises(error) as err:
        call()
    assert re.search(text, str(err.value), re.S), str(err.value)


def test_axes_that_are_no_permutation_are_explained() -> None:
    x = ts.ones((2, 3, 4))
    for call, words in (
        (lambda: x.transpose(1, 2), r"x.swapaxes\(1, 2\) exchanges two"),
        (lambda: x[0].transpose(0, 1), "x.T, or x.swapaxes"),
        (lambda: x.transpose(0, 1, 1), r"each of 0..2 once"),
        (lambda: x.flatten(2, 1), "from axis 2 to axis 1"),
        (lambda: ts.moveaxis(x, (0, 0), (1, 2)), "names an axis twice"),
    ):
        with pytest.raises(AxisError, match=words):
            call()
    with pytest.raises(ArgumentError, match="2 axes to move and 1 places"):
        ts.moveaxis(x, (0, 1), 2)
    assert ts.flatten(ts.tensor(3.0)).shape == (1,)
    assert x[0].transpose((0, 1)).shape == (3, 4)
    assert x[0, 0].transpose(0).shape == (4,)
