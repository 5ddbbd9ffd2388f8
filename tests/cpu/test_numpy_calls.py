"""NumPy's functions on tensors: those with a namesake are that op, the others get arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, TraceError
from tolerance import assert_close

CALLS: dict[str, Callable] = {
    "sum": lambda x: np.sum(x), "sum of an axis": lambda x: np.sum(x, axis=1, keepdims=True),
    "prod": lambda x: np.prod(x, 0), "amax": lambda x: np.amax(x, axis=0), "min": np.min,
    "mean": lambda x: np.mean(x, axis=0), "std": lambda x: np.std(x, ddof=1), "var": np.var,
    "argmax": lambda x: np.argmax(x, axis=1), "cumsum flat": np.cumsum,
    "cumsum": lambda x: np.cumsum(x, axis=0), "take flat": lambda x: np.take(x, [3, 1]),
    "reshape": lambda x: np.reshape(x, (4, 3)), "transpose": np.transpose, "ravel": np.ravel,
    "concatenate": lambda x: np.concatenate([x, x], axis=1), "stack": lambda x: np.stack([x, x]),
    "where": lambda x: np.where(x > 0, x, 0 * x), "clip": lambda x: np.clip(x, -0.5, 0.5),
    "sort": lambda x: np.sort(x, axis=0), "tril": np.tril, "round": np.round,
    "moveaxis": lambda x: np.moveaxis(x, 0, 1), "roll": lambda x: np.roll(x, 1),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x), "repeat": lambda x: np.repeat(x, 2, axis=0),
    "positions": lambda x: np.sum(x, 0, None, None, True), "tile": lambda x: np.tile(x, (2, 1)),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1), "split": lambda x: np.split(x, 2, 1)[1],
    "diagonal": lambda x: np.diagonal(x, 1, 1, 0),
    "places": lambda x: np.split(x, [1, 3], axis=-1)[1],
    "places of an array": lambda x: np.split(x, np.array([-1]))[0],
    "diag": lambda x: np.diag(x, k=1), "stable": lambda x: np.argsort(x, kind="stable"),
    "repeats": lambda x: np.repeat(x, [2, 0, 1], axis=0),
    "full var": lambda x: np.var(x, 1, None, None, 1),
    "squeeze": lambda x: np.squeeze(x[:, :1], axis=1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_function_of_numpy_is_the_op(call: Callable, rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 4))
    for run in (lambda f: f, ts.jit):
        got = run(call)(ts.tensor(a))
        assert isinstance(got, ts.Tensor)
        assert_close(got, call(a), n=12)


def test_others_get_arrays(rng: np.random.Generator) -> None:
    a = rng.standard_normal((3, 3))
    x = ts.tensor(a)
    assert np.linalg.det(x) == np.linalg.det(a)
    assert np.shape(x) == (3, 3) and np.array_equal(x, a) and np.allclose([x, x], a)
    with pytest.raises(TraceError, match="cumsum|known while tracing"):
        ts.jit(lambda x: np.linalg.det(x))(x)
    with pytest.raises(TraceError) as info:
        ts.jit(lambda x: np.linspace(0, 1, 3) + np.pad(x, 1))(x)
    assert "ts.pad(x, width" in info.value.hint


def test_what_an_op_does_not_take_is_refused() -> None:
    x = ts.ones((2, 2))
    with pytest.raises(ArgumentError, match=r"np.mean of a tensor takes no dtype=") as info:
        np.mean(x, dtype=np.float64)
    assert "ts.cast" in info.value.hint
    with pytest.raises(ArgumentError, match="takes no dtype="):
        np.sum(x, 0, np.float64)
    assert np.sum(x, dtype=None, out=None).item() == 4


def test_functions_of_numpy_are_compiled() -> None:
    x = ts.tensor([1.0, 2.0])
    np.testing.assert_array_equal(ts.jit(np.sin)(x).numpy(), ts.sin(x).numpy())
    np.testing.assert_array_equal(ts.jit(np.add)(x, x).numpy(), [2, 4])


def test_elements_under_a_mask_are_no_elements() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    for use in (ts.tensor, lambda a: ts.tensor(a, "f32"), ts.sum, lambda a: ts.ones(2) + a,
                ts.jit(lambda x: x)):
        with pytest.raises(ts.ArgumentError, match="masked array"):
            use(masked)
    assert ts.tensor(np.ma.masked_array([1.0, 2.0], False)).tolist() == [1.0, 2.0]
