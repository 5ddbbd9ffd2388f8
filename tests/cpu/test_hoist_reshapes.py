"""Loops in front of a reshape are made in the extents of what reads them."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.passes.hoist_reshapes import common_axes, numbers_for
from tolerance import assert_close

bf16 = ts.bf16


def kinds(fn, *xs):
    return [g.kind for g in CudaProgram(ts.jit(fn).graph(*xs)).plan.groups]


def check(fn, *xs, n=4):
    program = CudaProgram(ts.jit(fn).graph(*xs))
    got, want = program.run([ts.tensor(x) for x in xs]), ts.jit(fn)(*xs)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert_close(a, b, "f32", n=n, scale=4.0)


@pytest.mark.parametrize("one, other, atoms", [
    ((64, 32, 25088), (64, 256, 56, 56), (64, 32, 8, 56, 56)), ((6, 4), (24,), (6, 4)),
    ((6, 4), (4, 6), None), ((1, 6), (2, 1, 3), (2, 3)), ((), (1, 1), ())])
def test_extents_that_two_shapes_are_made_of(one, other, atoms):
    assert common_axes(one, other) == atoms == common_axes(other, one)


def test_numbers_of_a_group_of_channels_are_those_of_each_channel():
    atoms = common_axes((2, 3, 40), (2, 12, 5, 2))
    assert numbers_for((2, 3, 1), (2, 3, 40), (2, 12, 5, 2), atoms) == (2, 12, 1, 1)
    assert numbers_for((1, 1, 40), (2, 3, 40), (2, 12, 5, 2), atoms) == (1, 12, 5, 2)


def test_a_loop_behind_a_reshape_is_the_loop_in_front(rng, monkeypatch):
    x = rng.standard_normal((4, 6, 20)).astype(np.float32)
    y = rng.standard_normal((4, 3, 40)).astype(np.float32)
    w = rng.standard_normal(6).astype(np.float32)

    def plain(x, y):
        return ts.reshape(ts.exp(x) + 1, (4, 3, 40)) * y

    def weighted(x, y, w):
        return ts.reshape(ts.exp(x) * w[:, None] + x, (4, 3, 40)) * y

    assert kinds(plain, x, y) == ["loop"]
    check(plain, x, y)
    monkeypatch.setattr("tessera.graph.cuda.passes.hoist_reshapes.LEAST_BYTES", 0)
    monkeypatch.setattr("tessera.graph.cuda.passes.hoist_reshapes.FEW", 1)
    assert kinds(weighted, x, y, w) == ["move", "loop"]  # numbers of w for each row of 40
    check(weighted, x, y, w)


def written(fn, shape, *others):
    """Results of kernels of as many elements as the first operand, of bf16."""
    xs = [ts.Tensor[(*shape, bf16)], *(ts.Tensor[(*o, bf16)] for o in others)]
    plan = CudaProgram(ts.jit(fn).graph(*xs)).plan
    return [o.name for g in plan.groups for o in g.writes if np.prod(o.shape) == np.prod(shape)]


def test_a_group_norms_gradient_writes_no_rows_of_groups(rng, monkeypatch):
    """The part that comes of the variance was written in f32, and read in the shape of x."""
    def gradients(x, w, c, d):
        return ts.vjp(lambda x, w, c: ts.group_norm(x, 2, w, c), x, w, c)[1](d)

    shape = 16, 8, 64, 64
    assert len(written(gradients, shape, (8,), (8,), shape)) == 1
    monkeypatch.setattr("tessera.graph.cuda.passes.hoist_reshapes.LEAST_BYTES", 0)
    x, d = (rng.standard_normal((3, 8, 6, 10)).astype(np.float32) for _ in range(2))
    w, c = (rng.standard_normal(8).astype(np.float32) for _ in range(2))
    check(gradients, x, w, c, d, n=240)


def test_statistics_that_read_it_all_are_no_reason_to_write_it(rng, monkeypatch):
    """Softmax in rows of groups, then a weight of each channel: rows are read twice, and what is
    between them is numbers."""
    def weighted(x, w):
        s = ts.softmax(ts.reshape(x, (x.shape[0], 2, -1)))
        return ts.reshape(s, x.shape) * w[:, None, None]

    assert len(written(weighted, (32, 4, 64, 64), (4,))) == 1
    monkeypatch.setattr("tessera.graph.cuda.passes.hoist_reshapes.LEAST_BYTES", 0)
    check(weighted, rng.standard_normal((3, 4, 6, 10)).astype(np.float32),
          rng.standard_normal(4).astype(np.float32), n=240)


def test_what_stays_as_it_is(rng):
    """A result; what a matmul makes or takes along; numbers that would be as many as elements; what
    is transposed; what draws."""
    x, w = rng.standard_normal((8, 32)).astype(np.float32), np.ones((32, 32), np.float32)
    row = np.ones(32, np.float32)

    def both(x):
        y = ts.exp(x)
        return y, ts.reshape(y, (4, 64)) + 1

    for fn, xs in ((both, (x,)), (lambda x, w: ts.reshape(ts.exp(x @ w), (4, 64)) * 2, (x, w)),
                   (lambda x, r: ts.reshape(ts.exp(x.T) * 2, (4, 64)) + 1, (x, row))):
        check(fn, *xs, n=32)
    assert kinds(both, x) == ["loop", "loop"]


def test_numbers_of_which_one_meets_other_values(rng):
    """Their loop stays where that one is made, with the axes that the reduction has left."""
    def quotients(x, t):
        y = ts.logsumexp(x, axis=1)
        a = 1.5 + y * y
        return a * t, y / a

    x, t = (rng.standard_normal(s).astype(np.float32) for s in ((16, 257), 16))
    check(quotients, x, t)
    check(lambda x, t: ts.grad(lambda x: ts.sum(quotients(x, t)[0] * quotients(x, t)[1]))(x), x, t)
