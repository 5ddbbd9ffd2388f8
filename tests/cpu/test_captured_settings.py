"""Settings that a function captures, wherever objects and modules have them, are seen when another
takes their place."""

from __future__ import annotations

import copy
import sys
import types
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart


class Settings(dict):
    """Keys that are read as attributes, as many configurations have them."""

    __getattr__ = dict.get


class Elsewhere:
    """What it has lies in another object's attribute, or in what an operator does."""

    def __init__(self, v: Any):
        self.__dict__["kept"] = {"v": v}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["kept"]["v"]

    def __mul__(self, x: Any) -> Any:
        return x * self.v

    def __float__(self) -> float:
        return float(self.v)


def _by_import(x: Any) -> Any:
    import settings_of_a_test as local
    from settings_of_a_test import v
    return x * local.v * v / v


FOUND: dict[str, Callable[[Any, Any], Any]] = {
    "asked for": lambda o, x: x * getattr(o, "v", 0.0), "vars": lambda o, x: x * vars(o)["v"],
    "keys as attributes": lambda o, x: x * o.v, "attributes elsewhere": lambda o, x: x * o.v,
    "an operator": lambda o, x: o * x, "a number": lambda o, x: x * float(o),
    "a dict in an object": lambda o, x: x * o["v"], "an import": lambda o, x: _by_import(x),
}
HOLDING: dict[str, Callable] = {
    "keys as attributes": Settings, "attributes elsewhere": lambda v: Elsewhere(v),
    "an operator": lambda v: Elsewhere(v), "a number": lambda v: Elsewhere(v),
    "a dict in an object": UserDict,
}


@pytest.mark.parametrize("way", FOUND)
def test_settings_are_seen_where_objects_and_modules_have_them(
        way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    o = HOLDING.get(way, types.SimpleNamespace)(v=2.0)
    if way == "an import":
        o = types.ModuleType("settings_of_a_test")
        o.v = 2.0
        monkeypatch.setitem(sys.modules, o.__name__, o)
    f, x, held = ts.jit(lambda x: FOUND[way](o, x)), ts.ones(2), getattr(o, "kept", None)
    for v in (2.0, 3.0, 2.0):
        if isinstance(o, Settings | UserDict):
            o["v"] = v
        elif held is not None:
            held["v"] = v
        else:
            o.v = v
        assert f(x).tolist() == f(x).tolist() == [v, v]


@pytest.mark.parametrize(("first", "second", "use"), [
    (slice(0, 1), slice(1, 2), lambda x, v: x[v]),
    (frozenset({"a"}), frozenset({"b"}), lambda x, v: x * (2 if "a" in v else 1)),
    (ts.optim.SGD(), ts.optim.SGD(momentum=0.5), lambda x, v: x * (1 + v.momentum)),
    (ts.optim.SGD(), ts.optim.SGD(momentum=0.5),
     lambda x, v: v.update([x], [x], v.update([x], [x], v.init([x]), 0.1)[1], 0.1)[0][0]),
], ids=["slice", "frozenset", "record", "optimizer"])
def test_choices_that_do_not_change_are_seen_where_another_takes_their_place(
        first: Any, second: Any, use: Callable) -> None:
    chosen, x, traces = first, ts.tensor([1.0, 2.0]), list[int]()
    f = ts.jit(lambda x: (use(x, chosen), traces.append(1))[0])
    np.testing.assert_allclose(f(x), use(x, first), rtol=1e-6)
    chosen = second
    np.testing.assert_allclose(f(x), use(x, second), rtol=1e-6)
    assert (f(x) != use(x, first)).any()
    chosen = copy.copy(first)
    np.testing.assert_allclose(f(x), use(x, first), rtol=1e-6)
    assert len(traces) == 2
