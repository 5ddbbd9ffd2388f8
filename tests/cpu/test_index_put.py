"""x[index] = values as a function, for every kind of index that x[index] takes."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts

A = np.random.default_rng(0).standard_normal((5, 6, 7)).astype(np.float32)
MERGE = {"add": np.add, "max": np.maximum, "min": np.minimum}
INDICES = {
    "an integer": np.s_[-1],
    "an integer behind a slice": np.s_[:, -2],
    "every axis": np.s_[2, 3, 4],
    "a block": np.s_[:, 1:3, -4:],
    "beyond the end": np.s_[3:10, ..., 0],
    "nothing": np.s_[3:1],
    "backwards": np.s_[::-2, 1],
    "steps": np.s_[..., ::3],
    "new axes": np.s_[None, 2, None, :, 3],
    "repeated": np.s_[[0, 0, 1]],
    "repeated places": np.s_[[0, 0, 4], [1, 1, 2], [2, 2, -1]],
    "ids of an inner axis": np.s_[:, [0, 3, 3]],
    "ids of the last axis": np.s_[..., np.array([[0, -1], [2, 2]])],
    "ids and a slice": np.s_[1:4, [0, 2, -1]],
    "ids apart": np.s_[[0, 1], :, [2, 3]],
    "ids and an integer": np.s_[0, ..., [1, 1]],
    "a mask": A > 0,
    "a mask of rows": A[:, 0, 0] > 0,
    "a mask of columns": np.s_[:, np.array([True, False] * 3)],
    "all": np.s_[...],
}


@pytest.mark.parametrize("name", INDICES)
def test_it_is_what_numpy_assigns(name: str, rng: np.random.Generator) -> None:
    index, x = INDICES[name], ts.tensor(A)
    for v in (np.float32(0.5), rng.standard_normal(A[index].shape).astype(np.float32)):
        for mode in ("set", *MERGE):
            want = A.copy()
            if mode == "set":
                want[index] = v
            else:
                MERGE[mode].at(want, index, v)
            got = ts.index_put(x, index, v, mode=mode).numpy()
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("index", [(), ..., None, (None, ...), (..., None)])
def test_a_scalar_has_one_place(index: object) -> None:
    for mode in ("set", *MERGE):
        want = np.float32(2.0) if mode == "set" else MERGE[mode](np.float32(0.5), np.float32(2.0))
        f = lambda x, v, m=mode: ts.index_put(x, index, v, mode=m)  # noqa: E731
        for call in (f, ts.jit(f)):
            y = call(ts.tensor(0.5), ts.tensor(2.0))
            assert y.shape == () and y.numpy() == want
    slopes = ts.grad(lambda x, v: ts.index_put(x, index, v, True), argnums=(0, 1))(0.5, 2.0)
    assert [s.item() for s in slopes] == [1.0, 1.0]


def test_gradients_are_those_of_the_parts(rng: np.random.Generator) -> None:
    w = rng.standard_normal(A.shape).astype(np.float32)
    for index in INDICES.values():
        v = ts.tensor(rng.standard_normal(A[index].shape), "f32")

        def f(x: ts.Tensor, v: ts.Tensor, index: object = index) -> ts.Tensor:
            return ts.sum(ts.index_put(x, index, v, True) * w)

        dx, dv = ts.grad(f, argnums=(0, 1))(ts.tensor(A), v)
        np.testing.assert_array_equal(dx.numpy(), w)
        np.testing.assert_array_equal(dv.numpy(), w[index])


def test_places_that_are_data() -> None:
    """A compiled function is traced once for all of them."""
    x = ts.zeros((3, 4))
    column = ts.jit(lambda x, i: ts.index_put(x, (slice(None), i), 1.0))
    for i in (1, -1, 3, -4):
        want = np.zeros((3, 4))
        want[:, i] = 1.0
        assert column(x, i).tolist() == want.tolist()
    assert column.specializations == 1
    with pytest.raises(ts.AxisError, match="start 4 with size 1 leaves axis 1 of extent 4"):
        column(x, 4)
    rows = ts.vmap(lambda x, i: ts.index_put(x, (i, slice(2)), 1.0))(ts.zeros((2, 3, 4)),
                                                                   ts.tensor([0, 2]))
    assert [r[i].tolist() for r, i in zip(rows.numpy(), (0, 2), strict=True)] == [[1, 1, 0, 0]] * 2
    clipped = ts.jit(lambda x: ts.index_put(x, x > 1.0, 1.0))(ts.tensor([0.5, 2.0, 3.0]))
    assert clipped.tolist() == [0.5, 1.0, 1.0]
    shifted = ts.jit(lambda x: ts.index_put(x, x[:, 0] > 1.0, [1.0, -1.0], mode="add"))
    assert shifted(ts.tensor([[0.0, 0.0], [2.0, 2.0]])).tolist() == [[0.0, 0.0], [3.0, 1.0]]


MISTAKES = [
    (lambda x: ts.index_put(x, (0, 9), 1.0), ts.AxisError, "index 9 is outside axis 1 of extent 4"),
    (lambda x: ts.index_put(x, slice(2), ts.ones(3)), ts.ShapeError, r"\[3\] does not broadcast"),
    (lambda x: ts.index_put(x, (slice(2), 0, 0), 1.0), ts.AxisError, "3 indices for the 2 axes"),
    (lambda x: ts.index_put(x, np.array([True, False]), 1.0), ts.ShapeError,
     r"a mask of \[2\] for \[3, 4\]"),
    (lambda x: ts.index_put(x, x > 0, ts.ones(12)), ts.TraceError, "their number is not known"),
    (lambda x: ts.index_put(x > 0, slice(2), True, mode="add"), ts.DTypeError, "bools by add"),
    (lambda x: ts.index_put(x, 0, 1.0, True, mode="max"), ts.ArgumentError, "accumulate=True"),
]


@pytest.mark.parametrize(("call", "kind", "text"), MISTAKES)
def test_mistakes(call, kind, text) -> None:
    with pytest.raises(kind, match=text):
        ts.jit(call)(ts.ones((3, 4)))
