"""Distributed tensors of each rank's own part: where they lie, and what does not fit.

What they compute is compared in conformance/test_sharding_rows.py, mistakes under mpirun in
test_messages.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.layouts import problems
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_gpu_programs import on_ranks
from tessera.mesh.parallel.matching_layouts import zeros_as
from tessera.runtime.buffer import DeviceBuffer
from tessera.tile.launch import upload

MESH = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
ROWS = ts.ShardSpec(("row",), ("dp",))


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_a_program_alone_gives_the_parts_of_all_ranks(rng):
    batch = rng.standard_normal((6, 4)).astype(np.float32)
    halves = batch[:3], batch[3:]
    for parts in (lambda r: halves[MESH.coords(r)[0]],
                  {r: halves[MESH.coords(r)[0]] for r in range(4)}):
        x = ts.dist.from_local(parts, ROWS, MESH)
        assert (x.numpy() == batch).all() and str(x.layout) == "(dp, -) on mesh(dp=2, tp=2)"
    again = ts.dist.from_local(x.parts, x.layout)
    assert all(again.parts[r] is x.parts[r] for r in range(4))


@given(st.data())
def test_parts_of_any_layout_are_taken_as_they_are(data):
    shape, _, layout = data.draw(problems())
    whole = np.arange(np.prod(shape)).reshape(shape).astype(np.int32)
    x = ts.dist.from_local(lambda r: ts.dist.take(whole, layout, r), layout, shape=shape)
    assert x.shape == shape and (ts.dist.assemble(
        [x.parts[r].array for r in range(layout.mesh.size())], layout.settled(), shape)
        == whole).all()


def test_parts_of_a_pending_sum_are_terms(rng):
    terms = rng.integers(-9, 9, (4, 3, 5)).astype(np.float32)
    x = ts.dist.from_local(lambda r: terms[r], ts.ShardSpec(reduce="sum"), MESH)
    assert (ts.jit(lambda x: x + 0)(x).numpy() == terms.sum(0)).all()


def test_the_shape_follows_where_all_parts_are_equally_long():
    both = ts.ShardSpec((1,), (("dp", "tp"),))
    x = ts.dist.from_local(lambda r: ts.tensor(ones(3, 2), "fp4"), both, MESH)
    assert x.shape == (3, 8) and x.type == ts.as_type("fp4")
    x = ts.dist.from_local(lambda r: 5, None, MESH, dtype="int32")
    assert x.shape == () and x.numpy() == 5


def test_arrays_are_copied_and_tensors_are_not():
    alone = ts.dist.mesh(axes=("dp",), shape=(1,))
    buffer, part = ones(4), ts.param(ones(4))
    x, y = (ts.dist.from_local(p, ROWS, alone) for p in (buffer, part))
    buffer[:] = 7  # the loader reads the next batch
    assert x.tolist() == [1.0] * 4
    assert y.local is part and y.is_param and not x.is_param


def test_it_is_named_by_the_rank_of_the_program_on_a_part_of_a_mesh():
    def program():
        half = MESH.sub(dp=1)
        at = ts.ShardSpec(("row",), ("tp",))
        outside = not half.has(ts.dist.rank())
        x = ts.dist.from_local(lambda r: ones(3), at, half, shape=(6,), dtype="f32")
        with pytest.raises(ts.ArgumentError, match="shape and type do not follow") if outside \
                else pytest.raises(ts.ShapeError, match=rf"rank {ts.dist.rank()} gives a part \[4"):
            if outside:
                ts.dist.from_local(lambda r: ones(3), at, half)
            else:
                ts.dist.from_local(ones(4), at, half, shape=(6,))
        return len(x.parts), ts.dist.from_local(ones(3), at, half).shape

    assert ts.dist.simulate(program, 4) == [(0, (6,))] * 2 + [(1, (6,))] * 2


@pytest.mark.parametrize("make, error, words", [
    (lambda: ts.dist.from_local(ones(3, 4), ROWS, MESH), ts.ArgumentError,
     "this process plays the 4 ranks of mesh(dp=2, tp=2), and is given one part"),
    (lambda: ts.dist.from_local({0: ones(3)}, ROWS, MESH), ts.ArgumentError,
     "no part is given for rank 1 of mesh(dp=2, tp=2); there are some for [0]"),
    (lambda: ts.dist.from_local(lambda r: ones(3 + r // 2), ROWS, MESH), ts.ShapeError,
     "rank 2 gives a part [4]; its part of [6] in (dp) on mesh(dp=2, tp=2) is [3]"),
    (lambda: ts.dist.from_local(lambda r: ones(3), ROWS, MESH, shape=(7,)), ts.ShapeError,
     "rank 0 gives a part [3]; its part of [7] in (dp) on mesh(dp=2, tp=2) is [4]"),
    (lambda: ts.dist.from_local(lambda r: ones(3, 1), ROWS, MESH, shape=(7,)), ts.ShapeError,
     "rank 0 gives a part [3, 1]"),
    (lambda: ts.dist.from_local(lambda r: ones(3).astype("i4" if r else "f4"), ROWS, MESH),
     ts.DTypeError, "rank 1 has a part of int32, rank 0 of f32"),
    (lambda: ts.dist.from_local(ts.dist.tensor((3,), ROWS, MESH), ROWS, MESH), ts.ArgumentError,
     "is a distributed tensor itself"),
    (lambda: ts.dist.from_local(lambda r: ts.dist.tensor((3,), ROWS, MESH), ROWS, MESH),
     ts.ArgumentError, "the part of rank 0 is a distributed tensor itself"),
    (lambda: ts.jit(lambda a: ts.dist.from_local(lambda r: a, ROWS, MESH))(ones(3)),
     ts.TraceError, "is being traced"),
    (lambda: ts.dist.from_local(ones(3), MESH, ROWS), ts.ArgumentError,
     "its second argument is a layout"),
    (lambda: ts.dist.from_local(lambda r: ts.tensor(ones(3), 'fp8_e4m3 @scaled("amax")'), ROWS,
                                MESH),
     ts.DTypeError, "each rank would need a scale of its own"),
])
def test_mistakes(make, error, words):
    with pytest.raises(error) as info:
        make()
    assert words in str(info.value), str(info.value)
    assert info.value.where.file == __file__


def test_another_length_on_one_rank_is_told_on_all_with_their_lines():
    def program():
        for step in range(3):
            part = ones(4 - (ts.dist.rank() == 3 and step == 0), 2)
            with pytest.raises(ts.dist.PolicyMismatch) as info:
                ts.dist.from_local(part, ts.ShardSpec(("row",), ("devices",)), mesh)
            return str(info.value)

    mesh = ts.dist.mesh([f"cpu:{i}" for i in range(4)])
    for text in ts.dist.simulate(program, mesh):
        assert "ranks 0-2: dist.from_local(type=f32, shape=(16, 2), layout=(devices, -) on " in text
        assert "rank 3: dist.from_local(type=f32, shape=(12, 2)" in text
        assert "test_from_local.py" in text


def test_another_length_in_a_later_step_is_told_too():
    """Ranks that know this kind of batch send nothing: the exchange of the step meets the rank that
    does not."""
    def program():
        f = ts.jit(ts.sum)
        for step in range(3):
            part = ones(4 - (ts.dist.rank() == 1 and step == 2), 2)
            f(ts.dist.from_local(part, ts.ShardSpec(("row",), ("devices",)), mesh))

    mesh = ts.dist.mesh(["cpu:0", "cpu:1"])
    with pytest.raises(ts.dist.DisagreementError) as info:
        ts.dist.simulate(program, mesh)
    assert "rank 1: dist.from_local(type=f32, shape=(6, 2), layout=(devices, -)" in str(info.value)


def test_values_that_differ_where_ranks_hold_the_same_are_told():
    def program():
        x = ts.dist.from_local(ones(4) * ts.dist.rank(), ROWS, MESH)
        with pytest.raises(ts.dist.PolicyMismatch, match="different values of what they hold alik"):
            ts.jit(ts.sum)(x)

    ts.dist.simulate(program, 4)


def test_parts_on_gpus_are_not_copied(gpus, nccl, rng):
    X = rng.standard_normal((6, 4)).astype(np.float32)

    def program(mesh):
        r, at = ts.dist.rank(), ts.ShardSpec(("row",), ("x",))
        mine = ts.tensor(X[3 * r:3 * r + 3])
        x, y = ts.dist.from_local(mine, at, mesh), ts.dist.from_local(mine.to("cuda"), at, mesh)
        there = y.local
        z = ts.dist.from_local(there, at, mesh)
        assert z.local is there and x.local.device == y.local.device == "cuda:0"
        narrow = ts.dist.from_local(there, at, mesh, dtype="bf16")
        assert narrow.local.device == "cuda:0" and str(narrow.type) == "bf16"
        return ts.jit(lambda x, y: x + y)(x, z).numpy(), narrow.numpy()

    for y, narrow in on_ranks(2, program):
        np.testing.assert_array_equal(y, X + X)
        np.testing.assert_array_equal(narrow, ts.cast(ts.tensor(X), "bf16").numpy())


def test_values_of_the_host_go_to_gpus_without_a_copy_on_the_host(gpus, nccl, rng, monkeypatch):
    """Rows from where they are, columns through a chunk that is kept, zeros not at all."""
    X = rng.standard_normal((6, 10)).astype(np.float32)
    LONG = rng.standard_normal((44, 2)).astype(np.float32).T
    monkeypatch.setattr(upload, "CHUNK_BYTES", 48)
    monkeypatch.setattr(upload, "_kept", [])
    taken, loaded = ([], []), DeviceBuffer.load
    monkeypatch.setattr(DeviceBuffer, "load", lambda self, array, at=0: (
        taken[ts.dist.rank()].append(array), loaded(self, array, at)))

    def program(mesh):
        def lain(partition, x=X, made=None):
            taken[ts.dist.rank()].clear()
            at = ts.ShardSpec(partition, ("x",)) if partition else ts.ShardSpec(replicate=True)
            y = ts.dist.distribute(x, at, mesh=mesh) if made is None else made(at)
            sent = list(taken[ts.dist.rank()])
            np.testing.assert_array_equal(y.numpy(), x)
            return sent

        kept = {id(chunk) for _ in range(2) for chunk in (lain(("col",)), upload._kept)[1]}
        rows, columns = lain(("row",)), lain(("col",))
        whole = lain(None)
        assert rows and whole and all(np.shares_memory(a, X) for a in (*rows, *whole))
        assert {id(a.base) for a in columns} <= kept and len(columns) == 3
        long = lain(("col",), LONG)
        assert len(long) == 4 and max(a.nbytes for a in long) == 48  # parts of rows of 88 bytes
        ones = lain(("col",), np.ones_like(X), lambda at: ts.dist.tensor((6, 10), at, mesh, init=1))
        assert sum(a.nbytes for a in ones) == 6 * 5 * 4 and max(a.nbytes for a in ones) == 48
        p = ts.dist.distribute(X, ts.ShardSpec(("row",), ("x",)), mesh=mesh)
        assert not lain(("row",), 0 * X, lambda at: zeros_as(p, p.type))
        return lain(("row",), np.full_like(X, 0), lambda at: ts.dist.tensor((6, 10), at, mesh))

    assert on_ranks(2, program) == [[], []]
