"""Routines of the library and ops of the user's as nodes of a graph: values and derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from graph_kernels import cube, cubed, with_rule, written
from graph_kernels import x as x
from tessera import Tensor, f32, stdlib
from tessera.errors import ArgumentError, GradError
from tessera.graph.op import OPS

# --- the library --------------------------------------------------------------------------------
ROUTINE_CASES = [(name, s) for name, r in stdlib.ROUTINES.items() if r.record.ops is not None
                 for s in r.record.samples]


@pytest.mark.parametrize(("name", "s"), ROUTINE_CASES,
                         ids=[f"{n} {s.name}".strip() for n, s in ROUTINE_CASES])
def test_routines_are_nodes_with_the_derivative_of_their_ops(name, s, rng):
    routine = stdlib.ROUTINES[name]
    arguments, options = s.drawn(rng)
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    want = routine(*arguments, **options)
    made = ts.jit(lambda *xs: routine(*xs, **options))(*tensors)
    assert made.type == want.type and np.array_equal(made.numpy(), want.numpy())
    if tensors[0].dtype.bits < 16:
        return
    weight = ts.tensor(rng.standard_normal(want.shape).astype(np.float32))

    def loss(f, *xs):
        return ts.sum(ts.cast(f(*xs), f32) * weight)

    moving = tuple(i for i, x in enumerate(tensors) if x.dtype.kind == "float")
    found = ts.grad(lambda *xs: loss(lambda *ys: routine(*ys, **options), *xs), moving)(*tensors)
    ops = ts.grad(lambda *xs: loss(lambda *ys: routine.record.ops(ts, *ys, **options), *xs),
                  moving)(*tensors)
    for a, b in zip(_tuple(found), _tuple(ops), strict=True):
        np.testing.assert_allclose(a.numpy().astype(float), b.numpy().astype(float), rtol=1e-5,
                                   atol=1e-5)


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def test_a_routine_in_forward_mode_and_batched(rng):
    x = ts.tensor(rng.standard_normal((3, 4, 10)).astype(np.float32))
    t = ts.tensor(rng.standard_normal((3, 4, 10)).astype(np.float32))
    got = ts.jvp(lambda x: stdlib.stable_softmax(x), (x,), (t,))[1]
    np.testing.assert_allclose(got.numpy(), ts.jvp(ts.softmax, (x,), (t,))[1].numpy(), atol=1e-6)
    rows = ts.vmap(stdlib.stable_softmax)(x)
    np.testing.assert_allclose(rows.numpy(), ts.softmax(x).numpy(), atol=1e-6)


def test_a_routine_that_writes_its_arguments(rng):
    p, g, m, v = (ts.tensor(rng.uniform(0.1, 1, (5, 7)).astype(np.float32)) for _ in range(4))
    before = p.numpy().copy()

    @ts.jit
    def step(p, g, m, v):
        stdlib.fused_adam(p, g, m, v, 3, lr=0.1)
        return p, m, v

    made = step(p, g, m, v)
    assert np.array_equal(p.numpy(), before)
    stdlib.fused_adam(p, g, m, v, 3, lr=0.1)
    for a, b in zip(made, (p, m, v), strict=True):
        assert np.array_equal(a.numpy(), b.numpy())
    slope = ts.grad(lambda p: ts.sum(step(p, g, m, v)[0]))(p).numpy()  # as its body says
    ahead, behind = (step(p + e, g, m, v)[0].numpy() for e in (0.25, -0.25))
    np.testing.assert_allclose(slope, (ahead - behind) / 0.5, rtol=1e-4)


# --- ops of the user's --------------------------------------------------------------------------
@pytest.fixture
def ops_of_before():
    """What a test registers goes with it: tables of the docs list every op."""
    before = dict(OPS)
    yield
    for name in OPS.keys() - before.keys():
        del OPS[name]


def test_a_registered_op_binds_to_a_kernel(x, ops_of_before):
    @ts.register_op("my_cube")
    def op(x, *, scale=1.0):
        y = ts.zeros_like(x)
        cube(x, y, scale)
        return y

    op.defvjp(lambda x, scale: (op(x, scale=scale), (x, scale)),
              lambda saved, g: 3.0 * g * saved[0] * saved[0] * saved[1])
    loss = ts.jit(lambda x: ts.sum(op(x, scale=2.0)))
    slope = ts.grad(loss)(x)
    np.testing.assert_allclose(slope.numpy(), 6 * x.numpy().astype(float) ** 2, rtol=1e-6)
    assert np.array_equal(op(x).numpy(), written(x).numpy())
    loss(x)
    text = loss.inspect_ir("graph")
    assert " = my_cube(%0)" in text and "call=cube" in text
    rows = ts.vmap(ts.grad(loss))(ts.stack([x, x]))
    np.testing.assert_allclose(rows.numpy()[1], slope.numpy(), rtol=1e-6)
    with pytest.raises(GradError, match="the rule of my_cube is one for reverse mode"):
        ts.jvp(loss, (x,), (x,))
    with pytest.raises(ArgumentError, match="'my_cube' is registered already"):
        ts.register_op("my_cube")(lambda x: x)
    with pytest.raises(ArgumentError, match="rules are fixed"):
        op.defjvp(lambda p, t: (p, t))


def test_a_registered_op_without_rules_has_those_of_its_body(x, ops_of_before):
    @ts.register_op
    def weighted_sin(x, w):
        return ts.sin(x) * w, x + w

    def f(x):
        a, b = weighted_sin(x, 3.0)
        return ts.sum(a * b)

    t = x.numpy().astype(np.float64)
    want = 3 * np.cos(t) * (t + 3) + 3 * np.sin(t)
    np.testing.assert_allclose(ts.grad(f)(x).numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(ts.jvp(f, (x,), (ts.ones(x.shape),))[1].item(), want.sum(),
                               rtol=1e-5)
    g = ts.jit(f)
    g(x)
    assert " = weighted_sin(" in g.inspect_ir("graph")


def test_both_rules_of_a_kernel(x):
    k = with_rule(cubed)
    k.defvjp(lambda x: (k(x), x), lambda x, g: g * 3.0 * x * x)
    k.defjvp(lambda primals, tangents: (k(*primals), 3.0 * primals[0] * primals[0] * tangents[0]))
    want = 3 * x.numpy().astype(np.float64) ** 2
    np.testing.assert_allclose(ts.grad(lambda x: ts.sum(k(x)))(x).numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(ts.jvp(lambda x: k(x), (x,), (ts.ones(x.shape),))[1].numpy(), want,
                               rtol=1e-6)
