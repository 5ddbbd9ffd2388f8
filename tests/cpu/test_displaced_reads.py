"""Loops that read neighbours, columns' numbers and moved axes where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_lowering_emulated import emulate, normal
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.program.result_buffers import may_overwrite
from tolerance import assert_close


def before(x: Any) -> Any:
    """x one place on, behind a column of 7."""
    return ts.concatenate([ts.full((x.shape[0], 1), 7.0), x[:, :-1]], axis=1)


DISPLACED: dict[str, Any] = {
    "rolled": lambda x: x - ts.roll(x, 1, axis=-1), "back": lambda x: ts.roll(x, -3, 1) * 2.0,
    "rows": lambda x: x - ts.roll(x, 3, axis=0), "shifted": lambda x: x - before(x),
    "edge": lambda x: x - ts.concatenate([x[:, :1], x[:, :-1]], axis=1),
    "stencil": lambda x: sum(ts.roll(x, i, a) for i in (1, -1) for a in (0, 1)) - 4.0 * x,
    "sums": lambda x: ts.sum(ts.abs(x - ts.roll(x, 1, axis=1)), axis=-1),
    "alone": lambda x: ts.max(ts.roll(x, 1, axis=1) * 2.0, axis=-1),
    "made": lambda x: (lambda y: y - ts.roll(y, 1, axis=1))(ts.tanh(x)),
    "gradient": lambda x: ts.grad(lambda x: ts.sum(ts.square(x - ts.roll(x, 1, axis=1))))(x),
}


@pytest.mark.parametrize("shape", [(7, 35), (6, 64)])
@pytest.mark.parametrize("name", DISPLACED)
def test_neighbours_are_read_where_they_lie(name, shape, rng):
    """Nothing is rolled in memory, and beyond both ends nothing is read."""
    x, fn = normal(rng, *shape), DISPLACED[name]
    graph = ts.jit(fn).graph(x)
    program = CudaProgram(graph, "sm_90a")
    assert "move" not in [g.kind for g in program.plan.groups]
    assert len(program.plan.groups) == 1 + (name in ("made", "gradient"))
    assert_close(program.run([x.array])[0], ts.jit(fn)(x).array, "f32", n=shape[1])
    if shape == (7, 35) or name in ("rolled", "stencil"):
        emulate(fn, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 1, 16), (3, 9, 1, 1, 16), (9, 1, 1)])
def test_axes_of_one_element_behind_the_one_that_rolls(shape, rng):
    """What is behind them is no part of the axis in front of them either."""
    x, axis = normal(rng, *shape), shape.index(9)
    def less(x: Any) -> Any:
        return x - ts.roll(x, 2, axis=axis)

    for fn in (lambda x: less(ts.tanh(x)), ts.grad(lambda x: ts.sum(ts.square(less(x))))):
        program = CudaProgram(ts.jit(fn).graph(x), "sm_90a")
        assert "joined" in [s.op for g in program.plan.groups for s in g.steps]
        assert_close(program.run([x.array])[0], ts.jit(fn)(x).array, "f32", n=shape[-1])


def test_what_is_read_beside_is_not_written_over(rng):
    """Neither in memory of the program nor in an argument that is given up."""
    def fn(x: Any) -> Any:
        y = ts.tanh(x @ x)
        return ts.tanh((y - ts.roll(y, 1, axis=1)) @ x)

    x = normal(rng, 16, 16)
    plan = CudaProgram(ts.jit(fn).graph(x), "sm_90a").plan
    (group,) = [g for g in plan.groups if any(s.op == "joined" for s in g.steps)]
    assert not {b.over for b in plan.buffers} & {plan.base(o.name) for o in group.reads}
    for name, over in (("rolled", False), ("plain", True)):
        graph = ts.jit(DISPLACED.get(name, ts.tanh)).graph(x)
        program = CudaProgram(graph, "sm_90a", donated=[0])
        assert may_overwrite(program, "v0", program.plan.results[0]) == over


def test_numbers_of_columns_are_not_read(rng):
    """Whether rows are as long as blocks are or not."""
    labels = ts.tensor(rng.integers(0, 70, 5).astype(np.int32))
    fn = ts.jit(lambda x: ts.one_hot(x, 70))
    emulate(fn, labels)
    program = CudaProgram(fn.graph(labels), "sm_90a")
    assert [len(g.reads) for g in program.plan.groups] == [1]
    np.testing.assert_array_equal(program.run([labels.array])[0], np.eye(70)[labels.array])


@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (0, 3, 1, 2), (2, 3, 0, 1), (1, 0, 2, 3)])
def test_axes_that_stay_neighbours_are_copied_as_one(axes, rng):
    x = normal(rng, 3, 5, 4, 6)
    program = CudaProgram(ts.jit(lambda x: ts.transpose(x, axes)).graph(x), "sm_90a")
    (group,) = program.plan.groups
    assert len(group.space) < 4
    np.testing.assert_array_equal(program.run([x.array])[0], x.array.transpose(axes))
    emulate(lambda x: ts.transpose(x, axes), x)
