"""Calls that name arguments or leave some at their defaults are recognised as any others are, and
are told apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.errors import ArgumentError
from tessera.graph.jit import JitFunction
from tessera.tensor import Tensor


def there(*values: float) -> Tensor:
    return ts.tensor(np.array(values, np.float32)).to("cuda")


@pytest.fixture
def long_way(gpu, apart, monkeypatch):
    """Counts the calls that look at each leaf."""
    split, seen = JitFunction._split, []
    monkeypatch.setattr(JitFunction, "_split", lambda *a: seen.append(a[0].name) or split(*a))
    return seen


def f(x, y, a=2.0, flag=True, *, k=3.0):
    return x * a + y * k if flag else x - y


FORMS = {
    "defaults": lambda g, x, y, n: (g(x, y), 2 * x + 3 * y),
    "names": lambda g, x, y, n: (g(x=x, y=y), 2 * x + 3 * y),
    "names in another order": lambda g, x, y, n: (g(y=y, x=x), 2 * x + 3 * y),
    "a number by position": lambda g, x, y, n: (g(x, y, n), n * x + 3 * y),
    "a number by name": lambda g, x, y, n: (g(x, y=y, a=n), n * x + 3 * y),
    "a tensor for a number": lambda g, x, y, n: (g(x, a=there(n), y=y), n * x + 3 * y),
    "a flag": lambda g, x, y, n: (g(x, y, flag=False), x - y),
    "by keyword alone": lambda g, x, y, n: (g(x, y, k=5.0), 2 * x + 5 * y),
    "a tensor by keyword alone": lambda g, x, y, n: (g(x, y, k=there(n)), 2 * x + n * y),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_of_any_form_is_recognised(long_way, form):
    g = ts.jit(f)
    for n in range(5):
        made, want = FORMS[form](g, there(1.0 + n, 2.0), there(3.0, 4.0 - n), float(n))
        np.testing.assert_array_equal(made.numpy(), want.numpy())
    assert g.specializations == 1 and len(long_way) <= 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_forms_are_told_apart(gpu, apart, device):
    g = ts.jit(f)
    for n in range(4):
        for form in FORMS.values():
            x, y = (t.to(device) for t in (there(1.0 + n, 2.0), there(3.0, 4.0 - n)))
            made, want = form(lambda *a, **k: g(*(t.to(device) if isinstance(t, Tensor) else t
                                                  for t in a),
                                                **{i: t.to(device) if isinstance(t, Tensor) else t
                                                   for i, t in k.items()}), x, y, float(n))
            np.testing.assert_array_equal(made.numpy(), want.numpy())


def test_tensors_of_two_parameters_are_no_others(gpu, apart):
    g = ts.jit(lambda x, a=1.0, b=1.0: x * a - b)
    x, u = there(5.0, 7.0), there(2.0, 3.0)
    for _ in range(4):
        assert g(x, a=u).tolist() == [9.0, 20.0]
        assert g(x, b=u).tolist() == [3.0, 4.0]
        assert g(x, b=u, a=u).tolist() == [8.0, 18.0]
        assert g(x).tolist() == [4.0, 6.0]


def test_a_default_that_is_a_tensor_is_none_of_the_call(gpu, apart):
    u = there(2.0, 3.0)
    g = ts.jit(lambda x, a=u: x * a)
    for n in range(4):
        assert g(there(5.0, 7.0)).tolist() == [10.0, 21.0]
        assert g(there(5.0, 7.0), there(1.0, n)).tolist() == [5.0, 7.0 * n]
    u[:] = 1.0
    assert g(there(5.0, 7.0)).tolist() == [5.0, 7.0]


@dataclass
class Settings:
    by: float = 1.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_that_are_changed_are_seen(gpu, apart, device):
    listed, named, nested, held = [1.0], {"by": 1.0}, (1.0, [1.0]), Settings()

    def g(x, a=listed, b=named, c=nested, *, d=held):
        return x * a[0] + b["by"] + c[1][0] + d.by

    f = ts.jit(g)
    changes = [lambda n: listed.__setitem__(0, n), lambda n: named.update(by=n),
               lambda n: nested[1].__setitem__(0, n), lambda n: setattr(held, "by", n)]
    for n in range(8):
        changes[n % 4](float(n))
        x = there(5.0).to(device)
        want = [5.0 * listed[0] + named["by"] + nested[1][0] + held.by]
        assert f(x).tolist() == f(x=x).tolist() == want


def test_steps_whose_arguments_have_names(long_way):
    @ts.jit(donate=("params", "state"))
    def step(params, state, x, lr=0.5, clip=None):
        g = ts.grad(lambda p: ts.sum(p["w"] * x) + ts.sum(p["b"] ** 2))(params)
        return {n: params[n] - lr * g[n] for n in params}, state + 1.0

    params = {"w": ts.param(there(1.0, 2.0)), "b": ts.param(there(4.0, 8.0))}
    state, x = there(0.0), there(1.0, 3.0)
    for _ in range(6):
        params, state = step(params, state=state, x=x)
    assert params["w"].tolist() == [-2.0, -7.0] and state.tolist() == [6.0]
    assert len(long_way) <= 3
    for _ in range(4):
        params, state = step(params, state, lr=0.25, x=x)
    assert params["w"].tolist() == [-3.0, -10.0] and len(long_way) <= 6


@pytest.mark.parametrize("call, says", [
    (lambda g, x: g(x, x=x), "x"), (lambda g, x: g(x, x, z=x), "z"), (lambda g, x: g(x), "y"),
    (lambda g, x: g(x, x, 1.0, True, 2.0), "argument")])
def test_what_is_no_call_is_said_as_before(gpu, apart, call, says):
    g = ts.jit(f)
    x = there(1.0)
    for _ in range(3):
        g(x, x)
        with pytest.raises(ArgumentError, match=says):
            call(g, x)
