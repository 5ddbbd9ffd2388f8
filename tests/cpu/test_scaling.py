"""What grows with a program grows no faster than it: compiling long graphs, and traces kept."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

import tessera as ts
from tessera.graph import kept_traces
from tessera.graph.cpu.target import CPU
from tessera.graph.kept_traces import RetracingWarning
from tessera.graph.schedule.fuse import fuse
from tessera.graph.simplify import simplify


def chain(n: int):
    def body(x):
        for i in range(n):
            x = ts.tanh(x) if i % 2 else x * 1.0001 + 0.5
        return ts.sum(x)

    return body


def branches(n: int):
    """Values that are used far behind, products between groups, sums of rows and columns."""
    def body(x):
        first, held = x, []
        for i in range(n):
            x = ts.tanh(x @ x) + (first if i % 7 == 0 else x)
            if i % 5 == 0:
                held.append(ts.sum(x, 0))
        return ts.sum(x) + sum(ts.sum(h) for h in held)

    return body


def operations(fn, *args) -> int:
    """Lines that run while fn does, comprehensions included: a clock that no other program moves.
    """
    count = 0

    def tick(frame, event, arg):
        nonlocal count
        count += 1
        return tick

    before = sys.gettrace()
    sys.settrace(tick)
    try:
        fn(*args)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("derive", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("make, n", [(chain, 80), (branches, 15)])
def test_compiling_takes_time_in_proportion_to_the_ops(make, n, derive):
    def compile_(count: int) -> int:
        body = make(count)
        f = ts.jit((lambda x: ts.grad(body)(x)) if derive else body)
        return operations(lambda: f.traced(ts.zeros((4, 4))).executable.compiled)

    compile_(10)  # what is done once
    few, many = compile_(n), compile_(6 * n)
    assert many < 7.5 * few, f"{few} lines for {n} ops, {many} for {6 * n}"


def test_a_long_program_gives_the_right_result():
    x = np.linspace(-1, 1, 8)
    want = x.copy()
    for i in range(5000):
        want = np.tanh(want) if i % 2 else want * 1.0001 + 0.5
    got = ts.jit(chain(5000))(ts.tensor(x, "f64"))
    np.testing.assert_allclose(got.item(), want.sum(), rtol=1e-12)


def test_groups_do_not_wait_for_themselves():
    """Each unit reads what earlier ones made, in graphs where groups meet in many ways."""
    for n in (3, 12, 40):
        graph = simplify(ts.jit(lambda x, n=n: ts.grad(branches(n))(x)).graph(ts.zeros((48, 48))))
        ready = {*graph.inputs, *(v for v, _ in graph.captures)}
        units = fuse(graph, CPU)
        assert any(u.kind == "loop" and len(u.nodes) > 1 for u in units)
        for unit in units:
            assert ready.issuperset(unit.inputs)
            ready.update(v for node in unit.nodes for v in node.outputs)


# --- traces -----------------------------------------------------------------------------------
def told(fn) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(w.message) for w in caught if w.category is RetracingWarning]


def test_traces_are_bounded_and_those_in_use_stay(monkeypatch):
    monkeypatch.setattr(kept_traces, "MOST", 8)
    traces = []

    @ts.jit
    def total(x):
        traces.append(x.shape)
        return ts.sum(x)

    steady = ts.ones(3)
    total(steady)

    def calls():
        for i in range(60):
            assert total(ts.ones((i + 4,))).item() == i + 4
            assert total(steady).item() == 3.0

    assert len(told(calls)) == 1
    assert total.specializations == 8 and traces.count((3,)) == 1
    assert len(total._cache.fast) <= 8 and len(total._cache.types) <= 8
    total(ts.ones(4))
    assert traces.count((4,)) == 2  # forgotten, and traced again


@pytest.mark.parametrize("call, names", [
    (lambda f, i: f(ts.ones((i + 1, 3)), 1.0), "axis 0 of x has 33 values: 1, 2, 3 ..."),
    (lambda f, i: f(ts.ones((2, 3)), 1.0, scale=i), "scale has 33 values: 0, 1, 2 ..."),
    (lambda f, i: f({"a": ts.ones(2), "b": ts.ones(i + 1)}, 1.0), "axis 0 of x[1] has 33 values"),
])
def test_the_warning_names_what_changes_and_how(call, names):
    @ts.jit
    def f(x, y, *, scale=1):
        held = x["b"] if isinstance(x, dict) else x
        return ts.sum(held) * y * scale

    (text,) = told(lambda: [call(f, i) for i in range(kept_traces.TELL_AFTER + 20)])
    assert text.startswith("f has been traced and compiled 33 times") and names in text
    assert "Pad what changes" in text and "axis 1" not in text and " y " not in text


def test_few_signatures_say_nothing():
    f = ts.jit(lambda x: ts.sum(x))
    assert not told(lambda: [f(ts.ones(i + 1)) for _ in range(3) for i in range(20)])
