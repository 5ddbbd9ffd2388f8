"""What is written into a distributed tensor and read from it, and calls that cannot be made."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tessera.mesh.tensor as dist_tensor
from mesh.parallel import double_rows

MESH = ts.dist.mesh(axes=("dp",), shape=(2,))
ROWS = ts.ShardSpec(("row",), ("dp",))
COLUMNS = ts.ShardSpec(("col",), ("dp",))


@pytest.mark.parametrize("spec", [None, ROWS])
def test_what_numpy_gives_is_no_ranks_memory(spec):
    """Writing into it would change the part of one rank, and not of those that hold the same."""
    x = ts.dist.tensor((4, 3), spec, MESH, init=1.0)
    for array in (x.numpy(), np.asarray(x)):
        array[:] = 0.0
    assert all((part.numpy() == 1.0).all() for part in x.parts.values())


@pytest.mark.parametrize("spec", [None, ROWS, COLUMNS])
def test_assigned_values_broadcast_as_on_one_device(spec, rng):
    row = rng.standard_normal(3).astype(np.float32)
    x = ts.dist.tensor((4, 3), spec, MESH)
    for value, meant in [(2.5, 2.5), (row, row), (ts.sum(ts.dist.distribute(row, ROWS, mesh=MESH)),
                                                 row.sum())]:
        x[:] = value
        np.testing.assert_allclose(x.numpy(), np.broadcast_to(meant, (4, 3)), rtol=1e-6)


def test_a_value_of_another_shape_is_refused_although_its_parts_would_broadcast():
    """Two rows over two ranks are one row on each, which would fill the two rows there."""
    x, y = (ts.dist.tensor((n, 3), ROWS, MESH, init=float(n)) for n in (4, 2))
    with pytest.raises(ts.ShapeError, match=r"\[2, 3\] does not broadcast to \[4, 3\]"):
        x[:] = y
    assert (x.numpy() == 4.0).all()


@pytest.mark.parametrize("reduce", ["sum", "max", "mean"])
def test_terms_of_values_that_are_given_make_those_values(reduce, rng):
    spec, square = ts.ShardSpec(reduce=reduce), ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    given = rng.standard_normal((4, 3)).astype(np.float32)
    rows = ts.dist.distribute(given, ROWS, mesh=MESH)
    later = ts.dist.tensor((4, 3), spec, square)
    later[:] = given
    for terms in (ts.dist.distribute(given, spec, mesh=square), later,
                  ts.dist.distribute(rows, spec, mesh=square),
                  ts.dist.distribute(given, ts.ShardSpec(("row",), ("dp",), reduce=reduce),
                                     mesh=square)):
        assert terms.layout.op == reduce
        np.testing.assert_array_equal((terms * 1.0).numpy(), given)
    drawn = (ts.dist.tensor((4, 3), at, square, init="normal", seed=1) * 1.0
             for at in (spec, None))
    np.testing.assert_array_equal(*(x.numpy() for x in drawn))


@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_draws_are_the_same_on_any_mesh_and_some_rows_at_a_time(init, monkeypatch):
    square = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    whole = ts.dist.tensor((6, 8), None, square, init=init, seed=1).numpy()
    assert len({*whole.flat}) == 48
    monkeypatch.setattr(dist_tensor, "DRAWN", 9)
    for at in (None, ROWS, COLUMNS, ts.ShardSpec(("row", "col"), ("tp", "dp")),
               ts.dist.Cyclic(("dp", "tp"), 2)):
        x = ts.dist.tensor((6, 8), at, square, init=init, seed=1)
        np.testing.assert_array_equal(x.numpy(), whole)


@pytest.mark.parametrize("init, meant", [
    (lambda i, j: 1.5, 1.5), (lambda i, j: np.arange(3), np.arange(3)), (np.float32(2), 2.0),
    (lambda i, j: i[:, :1], [[0], [1], [2], [3]])])
def test_an_init_that_broadcasts_fills_each_part(init, meant):
    x = ts.dist.tensor((4, 3), ROWS, MESH, init=init)
    np.testing.assert_array_equal(x.numpy(), np.broadcast_to(meant, (4, 3)))
    assert [part.shape for part in x.parts.values()] == [(2, 3), (2, 3)]


def test_a_checkpoint_is_not_read_into_terms_of_a_sum(tmp_path):
    ts.checkpoints.save(tmp_path / "saved", {"x": whole()})
    like = {"x": ts.dist.tensor((4, 3), ts.ShardSpec(reduce="sum"), MESH)}
    with pytest.raises(ts.CheckpointError, match="each rank has a term of it"):
        ts.checkpoints.load(tmp_path / "saved").tree(like)


def test_an_op_that_ran_before_fails_at_its_own_line():
    x = ts.dist.tensor((4, 3), ROWS, MESH)
    ts.take(x, ts.tensor([1]), axis=0)
    with pytest.raises(ts.AxisError) as info:
        ts.take(x, ts.tensor([9]), axis=0)
    assert "[9]" in info.value.where.text


def whole():
    return ts.dist.tensor((4, 3), ROWS, MESH)


@pytest.mark.parametrize("call, error, words", [
    (lambda x: ts.all_reduce(x, "dp", op="SUM"), ts.ArgumentError, "one of sum, max"),
    (lambda x: ts.reduce_scatter(x, "dp", dim=7), ts.AxisError, "dim from -2 to 1"),
    (lambda x: ts.all_gather(x, "dp", dim=2), ts.AxisError, "dim from -2 to 1"),
    (lambda x: ts.dist.all_to_all(x, "dp", split=5, concat=0), ts.AxisError, "dim from -2 to 1"),
    (lambda x: ts.reduce_scatter(ts.sum(x), "dp"), ts.AxisError, "a scalar has none"),
    (lambda x: x.__setitem__(np.array([0, 1]), 0.0), ts.ArgumentError, "a part of a distributed"),
    (lambda x: x.__setitem__(x > 0, 0.0), ts.ArgumentError, "a part of a distributed"),
    (lambda x: ts.dist.distribute(x, ts.dist.Replicated), ts.ArgumentError, "is no layout"),
    (lambda x: ts.shard(x, ts.ShardSpec), ts.ArgumentError, "is no layout"),
    (lambda x: ts.dist.distribute(1.0, ROWS, mesh=MESH), ts.AxisError, "a scalar cannot be split"),
    (lambda x: ts.dist.tensor((4, 3), ROWS, MESH, init=lambda i, j: np.ones((7, 7))),
     ts.ShapeError, "init gave [7, 7] for a part [2, 3]"),
    (lambda x: ts.dist.tensor((4, 3), ROWS, MESH, init=np.ones(3)), ts.ShapeError,
     "init has [3], the tensor [4, 3]"),
    (lambda x: ts.dist.mesh({"dp": 2, "tp": 3}), ts.ArgumentError,
     "ts.dist.mesh(axes=('dp', 'tp'), shape=(2, 3))"),
    (lambda x: ts.dist.zero(ts.optim.AdamW, 1), ts.ArgumentError, "ts.optim.AdamW()"),
    (lambda x: ts.index_launch("dp")(double_rows)(x, ts.dist.tensor((4, 3), COLUMNS, MESH), 1.0),
     ts.ShapeError, "both must agree"),
    (lambda x: ts.jit(lambda x: x.local)(x), ts.UnknownNameError, "and outside of ts.jit"),
])
def test_mistakes_name_the_line_and_what_to_write(call, error, words):
    with pytest.raises(error) as info:
        call(whole())
    assert words in str(info.value), str(info.value)
    assert info.value.where.file == __file__
