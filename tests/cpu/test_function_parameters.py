"""Functions as parameters of kernels: each is a compilation, and what it reads is watched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Foreign, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import Tensor, f32

tile = ts.tile
FACTOR = 2.0


def square(v):
    return v * v * FACTOR


@ts.kernel
def cube(v):
    return v * v * v


@ts.kernel
def both(x: Tensor["N", f32], y: Tensor["N", f32], f: Callable, g=square):
    i = tile.linear_id()
    if i < N:
        y[i] = f(x[i]) + g(x[i])


def shifted(c):
    def f(v):
        return v + c

    return f


def test_a_function_is_a_parameter(monkeypatch):
    x, y = np.arange(1, 9, dtype=np.float32), np.zeros(8, np.float32)
    mixed = x**3 + 2 * x * x
    for functions, want in ((cube,), mixed), ((square,), 4 * x * x), ((square, cube), mixed):
        both(x, y, *functions)
        assert np.array_equal(y, want)
    assert len(both.specializations) == 3
    for c in (2.0, 3.0):
        both(x, y, shifted(c))
        assert np.array_equal(y, x + c + 2 * x * x)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    both(x, y, square)
    assert np.array_equal(y, 6 * x * x)


def test_in_a_graph():
    def called(x):
        y = ts.zeros_like(x)
        both(x, y, shifted(1.0))
        return y

    x = ts.arange(8, dtype="f32")
    assert np.array_equal(ts.jit(called)(x).numpy(), x.numpy() + 1 + FACTOR * x.numpy() ** 2)


def test_on_a_gpu_the_short_way_tells_functions_apart(gpu):
    host = np.arange(1, 9, dtype=np.float32)
    x, y = Foreign(filled(host)), Foreign(filled(np.zeros_like(host)))
    for _ in range(2):
        for f, want in ((cube, host**3), (square, FACTOR * host**2), (shifted(1.0), host + 1)):
            both(x, y, f)
            assert np.array_equal(y.x, want + FACTOR * host**2)


@pytest.mark.parametrize("given, said", [
    (1.0, "1.0 is not a function"), (np.sin, "or function, got ufunc"),
    (lambda v: v, "a lambda is no kernel")])
def test_what_is_no_function(given, said):
    with pytest.raises(ts.TesseraError) as err:
        both(np.ones(8, np.float32), np.ones(8, np.float32), given)
    assert said in str(err.value)
