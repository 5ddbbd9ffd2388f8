"""An f64 array whose type nobody stated: said once per line, converted, or kept, as the setting
says. A stated type is never spoken of."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest

import tessera as ts
from tessera import wide_arrays
from tessera.wide_arrays import WideArrayWarning

A = np.linspace(0.0, 1.0, 3)


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_arrays, "_told", set())


def ones() -> ts.Tensor:
    return ts.ones(3)


def line_of(call: Callable, times: int = 3) -> list[warnings.WarningMessage]:
    """The warnings of some calls from one line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(times):
            out = call()
    assert out.dtype == "f64"
    return found


WARNING = {
    "an operator": lambda: ones() * A,
    "from the left": lambda: A + ones(),
    "a tensor of the array": lambda: ones() - ts.tensor(A),
    "what was computed of it": lambda: ts.exp(ts.tensor(A) * 2).reshape(3) + ones(),
    "a product": lambda: ts.ones((2, 3)) @ A,
    "a product of a tensor": lambda: ts.ones((2, 3)) @ ts.tensor(A).reshape(3, 1),
    "an argument of a compiled function": lambda: ts.jit(lambda w, v: w * (v + 1))(ones(), A),
    "a gradient": lambda: ts.value_and_grad(lambda w, v: ts.sum(w * v))(ts.param(ones()), A)[0],
    "of bf16": lambda: ts.ones(3, "bf16") + A,
    "joined": lambda: ts.concatenate([ones(), A]),
}
STATED = {
    "a type in the call": lambda: ones() + ts.tensor(A, "f64"),
    "a cast": lambda: ones() + ts.cast(A, "f64"),
    "a cast of a tensor": lambda: ones() + ts.tensor(A).astype("f64"),
    "zeros": lambda: ts.zeros((), "f64") + ones(),
    "f64 alone": lambda: ts.tensor(A) + np.ones(3),
    "an integer beside it": lambda: ts.tensor(A) * ts.arange(3),
}


@pytest.mark.parametrize("call", WARNING.values(), ids=WARNING)
def test_it_warns_once_for_each_line(call: Callable) -> None:
    (said,) = line_of(call)
    assert said.category is WideArrayWarning and said.filename == __file__
    assert all(word in str(said.message) for word in (
        "the result is f64", "np.linspace", 'ts.tensor(a, "f64")', "f64_arrays"))
    assert not line_of(call)  # the same line again


@pytest.mark.parametrize("call", STATED.values(), ids=STATED)
def test_a_stated_type_is_meant(call: Callable) -> None:
    assert not line_of(call)


def test_each_line_is_told() -> None:
    assert len(line_of(lambda: ones() * A)) == 1
    assert len(line_of(lambda: ones() * A)) == 1


def test_numpy_scalars_are_weak() -> None:
    assert (ones() * np.float64(2)).dtype == "f32"


@pytest.mark.parametrize("call", WARNING.values(), ids=WARNING)
def test_the_setting_makes_f32_of_them(call: Callable) -> None:
    with ts.config.scope(f64_arrays="f32"):
        assert call().dtype == "f32"
        assert ts.tensor(A, "f64").dtype == "f64" and ts.cast(ts.tensor(A), "f64").dtype == "f64"


def test_the_setting_keeps_them_in_silence() -> None:
    with ts.config.scope(f64_arrays="keep"):
        assert not line_of(lambda: ones() / A)
    assert len(line_of(lambda: ones() / A)) == 1
