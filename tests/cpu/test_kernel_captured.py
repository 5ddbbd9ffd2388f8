"""What a kernel reads from outside is as it is at the call, and asking costs next to nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from kernels.build import build
from tessera.tile.frontend.captured import Captured

SOURCE = """
FACTOR, SHAPE, SIZES, LIMITS, HOW = 2.0, (2, 3), [4, 5], {"low": 1}, ts.bf16
settings = namespace(step=7, deep=namespace(far=8))

def helper(v):
    return v * FACTOR + EXTRA

EXTRA = 1.0

@kernel
def k(x: Tensor["N", f32], o: Tensor["K", f32]):
    i = tile.local_id()
    if i == 0:
        o[0] = FACTOR
        o[1] = SHAPE[0] + SHAPE[1]
        o[2] = SIZES[0]
        o[3] = LIMITS["low"]
        o[4] = tile.cast(tile.cast(x[0], HOW), f32)
        o[5] = helper(x[0])
        o[6] = settings.step
        o[7] = settings.deep.far
"""


def launched(scope):
    o = np.zeros(8, np.float32)
    scope["k"](np.full(1, 0.1, np.float32), o)
    return o


def expected(scope):
    x = np.float32(0.1)
    half = np.float32(ts.tensor([0.1], scope["HOW"]).tolist()[0])
    settings = scope["settings"]
    return np.float32([scope["FACTOR"], sum(scope["SHAPE"]), scope["SIZES"][0],
                       scope["LIMITS"]["low"], half, x * scope["FACTOR"] + scope["EXTRA"],
                       settings.step, settings.deep.far])


def change(name, value):
    def act(scope):
        scope[name] = value
    return act


def other_helper(v):
    return v - 5.0


CHANGES = {
    "a number": change("FACTOR", 3.0),
    "a number of a helper": change("EXTRA", 9.0),
    "a tuple": change("SHAPE", (20, 30)),
    "a list": change("SIZES", [40, 5]),
    "an element of a list": lambda s: s["SIZES"].__setitem__(0, 41),
    "an entry of a dict": lambda s: s["LIMITS"].update(low=11),
    "a type": change("HOW", ts.f16),
    "an attribute": lambda s: setattr(s["settings"], "step", 70),
    "an attribute of an attribute": lambda s: setattr(s["settings"].deep, "far", 80),
    "an object": lambda s: s.update(settings=SimpleNamespace(step=71, deep=SimpleNamespace(far=1))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen_at_the_next_call(what):
    scope = build(SOURCE, namespace=SimpleNamespace)
    assert np.allclose(launched(scope), expected(scope))
    made = scope["k"].specializations
    assert np.allclose(launched(scope), expected(scope))
    assert scope["k"].specializations == made  # nothing is traced twice without a reason
    before = expected(scope)
    CHANGES[what](scope)
    assert not np.allclose(before, expected(scope))
    assert np.allclose(launched(scope), expected(scope)), what


def test_another_helper_is_called():
    scope = build(SOURCE, namespace=SimpleNamespace)
    launched(scope)
    scope["helper"] = other_helper
    assert launched(scope)[5] == np.float32(0.1) - np.float32(5)


def test_equal_values_of_other_types_are_other_constants():
    scope = build("""
N = 1
@kernel
def k(o: Tensor["K", f32]):
    o[0] = N / 2 if isinstance(N, float) else 7.0
""")
    o = np.zeros(1, np.float32)
    scope["k"](o)
    assert o[0] == 7
    scope["N"] = 1.0
    scope["k"](o)
    assert o[0] == 0.5


def test_closures_change_too(rng):
    def maker(factor):
        def set_to(value):
            nonlocal factor
            factor = value

        @ts.kernel
        def k(x: ts.Tensor["N", ts.f32]):
            i = ts.tile.linear_id()
            if i < N:  # noqa: F821
                x[i] = factor

        return k, set_to

    k, set_to = maker(2.0)
    x = np.zeros(5, np.float32)
    k(x)
    assert set(x) == {2.0}
    set_to(3.0)
    k[1, 32](x)
    assert set(x) == {3.0}


def test_a_name_that_is_gone():
    scope = build("""
N_TIMES = 2
@kernel
def k(o: Tensor["K", i32]):
    o[0] = N_TIMES
""")
    o = np.zeros(1, np.int32)
    scope["k"](o)
    del scope["N_TIMES"]
    with pytest.raises(ts.TesseraError, match="'N_TIMES' is not defined"):
        scope["k"](o)


def test_grids_annotations_and_whole_array_functions():
    scope = build("""
COUNT, TYPE, SCALE = 2, ts.f32, 2.0

@ts.kernel(grid=lambda: (COUNT,))
def k(o: Tensor["K", i32]):
    o[tile.group_id(0)] = 1

@kernel
def typed(x: "Tensor['K', TYPE]"):
    x[0] = 1.0

@ts.kernel.auto
def scaled(x: ts.Tile) -> ts.Tile:
    return x * SCALE

@ts.kernel.autotune(dict(warps=[1]), cache=False)
def tuned(x: "Tensor['K', TYPE]"):
    x[0] = SCALE
""")
    o, x = np.zeros(4, np.int32), np.ones((8, 8), np.float32)
    scope["k"](o)
    scope["typed"](x[0])
    scope["tuned"](x[1])
    assert o.sum() == 2 and scope["scaled"](x)[3, 3] == 2 and x[1, 0] == 2
    scope |= {"COUNT": 3, "TYPE": ts.i32, "SCALE": 5.0}
    scope["k"](o)
    assert o.sum() == 3 and scope["scaled"](x)[3, 3] == 5
    with pytest.raises(ts.DTypeError):
        scope["typed"](x[0])
    scope["TYPE"] = ts.f32
    scope["tuned"](x[1])
    assert x[1, 0] == 5


def test_attributes_in_annotations_are_watched():
    scope = build("""
settings = namespace(types=namespace(of_x=ts.f32))

@kernel
def typed(x: "Tensor['K', settings.types.of_x]"):
    x[0] = 1
""", namespace=SimpleNamespace)
    x = np.zeros(3, np.float32)
    scope["typed"](x)
    assert x[0] == 1
    scope["settings"].types.of_x = ts.i32
    with pytest.raises(ts.DTypeError):
        scope["typed"](x)
    scope["typed"](x := np.zeros(3, np.int32))
    assert x[0] == 1


def test_annotations_are_evaluated_once(monkeypatch):
    evaluated = []
    of_text = Captured.expression
    monkeypatch.setattr(Captured, "expression", lambda self, fn, text, scope: evaluated.append(
        text) or of_text(self, fn, text, scope))
    scope = build("""
TYPE = ts.f32

@kernel
def typed(x: Tensor["K", TYPE]):
    x[0] = 1
""")
    for _ in range(3):
        scope["typed"](np.zeros(3, np.float32))
    assert evaluated == ["Tensor['K', TYPE]"]
    scope["TYPE"] = ts.i32
    scope["typed"](np.zeros(3, np.int32))
    assert len(evaluated) == 2


def test_it_costs_little():
    """Asking is compared with the least that a call by a dict of its arguments' classes does."""
    scope = build(SOURCE, namespace=SimpleNamespace)
    launched(scope)
    args = tuple(range(4))
    table = {tuple(map(type, args)): lambda *a: None}

    def look_up():
        table[tuple(map(type, args))](*args)

    def seconds(f):
        best = []
        f()
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                f()
            best.append(time.perf_counter() - start)
        return min(best) / 200

    numbers = build("""
A, B, C, D = 1, 2.0, (3, 4), ts.f32
@kernel
def k(o: Tensor["K", f32]):
    o[0] = tile.cast(A * B + C[0], D)
""")["k"]
    numbers(np.zeros(1, np.float32))
    asked = seconds(lambda: numbers._captured.unchanged())
    print("unchanged_ns", 1e9 * asked, "with lists and attributes",
          1e9 * seconds(lambda: scope["k"]._captured.unchanged()), "look-up",
          1e9 * seconds(look_up))
    assert asked < 4 * seconds(look_up)
