"""Carries that an iteration updates are updated where they lie; nobody else's memory changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tessera as ts
from tessera import config


def put(y, i, v):
    return ts.index_put(y, i, v)


def block(y, i, v):
    return ts.dynamic_update_slice(y, ts.reshape(v, (1,)), (i,))


def swapped(s):
    """Both carries are updated, change places, and one is read after its update."""
    i, a, b = s
    c = put(a, i, b[i] + 1.0)
    return i + 1, b * 1.0, put(c, 0, c[i] + a[i])


PROGRAMS = {
    "put": lambda x: ts.fori_loop(1, 9, lambda i, y: put(y, i, y[i - 1] * 0.5 + y[i]), x),
    "block": lambda x: ts.fori_loop(1, 9, lambda i, y: block(y, i, y[i - 1] * 0.5 + y[i]), x),
    "read behind": lambda x: ts.fori_loop(1, 9, lambda i, y: put(y, i, y[i - 1]) + 0.1 * y, x),
    "kept": lambda x: ts.scan(lambda y, i: (put(y, i, y[i - 1] * 2.0), y), x, ts.arange(1, 9)),
    "results": lambda x: ts.scan(lambda y, i: ((z := put(y, i, y[i - 1] * 2.0)), z), x,
                                 ts.arange(1, 9)),
    "given twice": lambda x: ts.scan(
        lambda s, i: ((put(s[0], i, s[1][i - 1]), put(s[1], i - 1, s[0][i])), None), (x, x),
        ts.arange(1, 9))[0],
    "while": lambda x: ts.while_loop(lambda s: s[0] < 9, swapped, (1, x, x + 1.0))[1:],
    "nested": lambda x: ts.fori_loop(1, 9, lambda i, y: ts.fori_loop(
        0, i, lambda j, z: put(z, j, z[i] + z[j] * 0.5), y), x),
    "as a sequence": lambda x: ts.scan(lambda y, v: (put(y, 2, v + y[3]), None), x, x)[0],
}


def arrays(tree):
    return [t.numpy() for t in (tree if isinstance(tree, tuple) else (tree,))]


@pytest.mark.parametrize("how", ["off", "flag"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_give_what_they_give_op_by_op(name, how, rng):
    f, x = PROGRAMS[name], ts.tensor(rng.standard_normal(9))
    before = x.numpy().copy()
    with config.scope(numerics="flag"):  # node by node, or by steps that write over nothing
        want = arrays(f(x))
    with config.scope(numerics=how):
        for run in (f, ts.jit(f), ts.jit(f)):
            for got, w in zip(arrays(run(x)), want, strict=True):
                np.testing.assert_array_equal(got, w)
            assert np.array_equal(x.numpy(), before)


@pytest.mark.parametrize("name, carries", [
    ("put", {1}), ("block", {1}), ("read behind", set()), ("kept", set()), ("results", {1})])
def test_a_carry_is_written_over_where_nothing_reads_it_any_more(name, carries, rng):
    f = ts.jit(PROGRAMS[name])
    x = ts.tensor(rng.standard_normal(9))
    f(x)
    (loop,) = [n for n in f.graph(x).nodes if "body" in n.attrs]
    assert loop.attrs["body"].kept["iteration"].overwritten == carries


def test_a_gradient_through_updates(rng):
    x = rng.standard_normal(9)
    f = PROGRAMS["put"]
    assert ts.gradcheck(lambda x: ts.sum(f(x) ** 2), (ts.tensor(x),))
    both = ts.jit(ts.vmap(ts.grad(lambda x: ts.sum(f(x) ** 2))))(ts.tensor(np.stack([x, 2 * x])))
    one = ts.grad(lambda x: ts.sum(f(x) ** 2))(ts.tensor(2 * x))
    np.testing.assert_allclose(both.numpy()[1], one.numpy(), rtol=1e-12)


LARGE = ts.tensor(np.arange(20.0).reshape(4, 5))
STARTS = {
    "a view": lambda n: LARGE[:, 2],
    "a captured tensor": lambda n: LARGE,
    "a constant": lambda n: ts.zeros(4, "f64"),
    "one number repeated": lambda n: ts.broadcast_to(n, (4, 3)),
}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("name", STARTS)
def test_what_a_carry_starts_as_stays(name, poison):
    f = ts.jit(lambda n: ts.fori_loop(0, 4, lambda i, y: put(y, i, y[i] + n), STARTS[name](n)))
    with config.scope(poison=poison):
        for n in (5.0, 1.0):
            start = np.asarray(STARTS[name](ts.tensor(n, "f64")).numpy())
            assert np.array_equal(f(ts.tensor(n, "f64")).numpy(), start + n)
    assert np.array_equal(LARGE.numpy(), np.arange(20.0).reshape(4, 5))


def test_calls_of_several_threads():
    f = ts.jit(lambda x: ts.fori_loop(0, 50, lambda i, y: put(y, i, y[i] * 2.0 + x[0]), x))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(f, [ts.full((50,), float(k % 8)) for k in range(32)]))
    assert [set(y.tolist()) for y in made] == [{3.0 * (k % 8)} for k in range(32)]
