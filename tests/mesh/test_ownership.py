"""Which part of a tensor each rank owns, and how a tensor moves between layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from mesh.layouts import layouts, meshes, problems
from tessera.mesh.layout import Layout, Split, replicated
from tessera.mesh.partition import (
    assemble,
    balanced,
    cyclic_runs,
    group_of,
    indices,
    local_shape,
    take,
)
from tessera.mesh.partition import pieces as pieces_of
from tessera.mesh.sharding.reshard import execute, plan, reshard
from tessera.mesh.world import transport


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


@given(problems())
def test_parts_are_disjoint_and_cover(problem):
    shape, dtype, layout = problem
    count = np.zeros(shape, int)
    for rank in range(layout.mesh.size()):
        mine = np.zeros(shape, int)
        for piece in pieces_of(layout, shape, rank, dtype):
            mine[piece.box.slices()] += 1
        assert mine.max(initial=0) <= 1  # a rank's own pieces do not overlap
        assert mine.sum() == np.prod(local_shape(layout, shape, rank, dtype))
        count += mine
    # Every element is held once per rank along the axes that repeat, and by nobody else.
    assert (count == layout.mesh.size(layout.repeated)).all()


@given(problems())
def test_ranks_that_differ_along_repeated_axes_hold_the_same(problem):
    shape, dtype, layout = problem
    for group in layout.mesh.groups(layout.repeated):
        held = {pieces_of(layout, shape, rank, dtype) for rank in group}
        assert len(held) == 1


@given(problems())
def test_take_indices_and_assemble_agree(problem):
    shape, dtype, layout = problem
    whole = numbered(shape)
    parts = [take(whole, layout, r, dtype) for r in range(layout.mesh.size())]
    for rank, part in enumerate(parts):
        assert (part == indices(layout, shape, rank, dtype)).all()
        assert part.shape == local_shape(layout, shape, rank, dtype)
    assert (assemble(parts, layout, shape, dtype) == whole).all()


@given(st.integers(0, 200), st.integers(1, 20), st.sampled_from([1, 2, 4]))
def test_blocks_are_balanced_and_begin_on_whole_groups(extent, parts, group):
    cuts = balanced(extent, parts, group)
    assert cuts[0][0] == 0 and cuts[-1][1] == extent and len(cuts) == parts
    assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:], strict=False))
    assert all(lo % group == 0 or lo == extent for lo, _ in cuts)
    groups = [-(-(hi - lo) // group) for lo, hi in cuts]
    assert max(groups) - min(groups) <= 1 and groups == sorted(groups, reverse=True)


def test_the_blocks_of_the_guide():
    assert [hi - lo for lo, hi in balanced(8192, 9)] == [911, 911] + [910] * 7
    assert cyclic_runs(10, 3, 1, 2) == [(2, 4), (8, 10)]


@pytest.mark.parametrize("dtype, group", [("fp4", 2), ("int4", 2), ("fp6", 4), ("bf16", 1)])
def test_packed_parts_share_no_byte(dtype, group, rng):
    """The packed bytes of the parts, one after another, are those of the whole."""
    kind = ts.as_type(dtype).dtype
    assert group_of(kind) == group
    mesh = ts.dist.mesh(axes=("tp",), shape=(3,))
    layout = ts.ShardSpec(("col",), ("tp",)).resolve(mesh, 2)
    whole = ts.tensor(rng.integers(-2, 3, (2, 22)), dtype)
    parts = [ts.Tensor(take(whole.array, layout, r, kind), whole.type) for r in range(3)]
    joined = np.concatenate([p.buffer for p in parts], axis=1)
    assert (joined.view(np.uint8) == whole.buffer.view(np.uint8)).all()


# --- resharding ----------------------------------------------------------------------------------
@given(problems(count=2))
def test_a_plan_brings_any_layout_to_any_other(problem):
    shape, dtype, source, target = problem  # on two meshes of different size
    whole = numbered(shape)
    parts = [take(whole, source, r, dtype) for r in range(source.mesh.size())]
    made = plan(source, target, shape, dtype)
    for rank, part in enumerate(execute(made, parts)):
        assert (part == take(whole, target, rank, dtype)).all()
        # Each element comes once, and what a rank has itself does not travel.
        mine = [m for m in made.moves if m.target == rank]
        assert sum(m.box.size for m in mine) == part.size
        has = set(parts[rank].flat) if rank < len(parts) else set()
        kept = sum(m.box.size for m in mine if m.source == rank)
        assert kept == len(has & set(part.flat))


@given(st.data())
def test_resharding_on_ranks_is_the_plan(data):
    shape, dtype, source, target = data.draw(problems(count=2, ranks=4))
    whole = np.random.default_rng(len(shape)).integers(-2, 3, shape)
    stored = ts.tensor(whole, dtype).array

    def program() -> np.ndarray:
        here = transport()
        return reshard(here, plan(source, target, shape, dtype),
                       take(stored, source, here.rank, dtype), dtype)

    for rank, part in enumerate(ts.dist.simulate(program, 4)):
        assert (part == take(stored, target, rank, dtype)).all()


def test_copies_are_taken_from_different_ranks():
    """4 ranks hold all; 4 others each need it: nobody sends it twice."""
    source = replicated(ts.dist.mesh(axes=("dp",), shape=(4,)), 1)
    target = replicated(ts.dist.mesh(axes=("dp",), shape=(8,)), 1)
    made = plan(source, target, (100,), ts.f32)
    assert sorted(s for s, _ in made.sent) == [0, 1, 2, 3] and set(made.sent.values()) == {400}
    assert made.total == 1600 and "0 -> 4  [0:100]" in str(made)


@given(st.data())
def test_staying_costs_nothing(data):
    layout = data.draw(layouts(data.draw(meshes()), 2))
    assert plan(layout, layout, (7, 5)).total == 0


def test_pending_sums_are_not_moved():
    mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
    terms = ts.ShardSpec(reduce="sum").resolve(mesh, 1)
    whole = replicated(mesh, 1)
    with pytest.raises(ts.ArgumentError, match="pending sum") as info:
        plan(terms, whole, (4,))
    assert "reduce_scatter" in info.value.hint
    with pytest.raises(ts.ArgumentError, match="are terms"):
        assemble([np.zeros(4)] * 2, terms, (4,))
    assert terms.settled() == whole


def test_wrong_shapes_are_named():
    mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
    layout = Layout(mesh, (Split(("tp",)),))
    with pytest.raises(ts.ShapeError, match=r"for 1 dimensions, the tensor has 2: \[4, 4\]"):
        local_shape(layout, (4, 4), 0)
    with pytest.raises(ts.ShapeError, match=r"rank 1 holds \[3\]; its part of \[4\].* is \[2\]"):
        assemble([np.zeros(2), np.zeros(3)], layout, (4,))
    with pytest.raises(ts.ShapeError, match=r"rank 0 holds \[3\]; the plan begins with \[2\]"):
        ts.dist.simulate(lambda: reshard(transport(), plan(layout, layout, (4,), ts.f32),
                                         np.zeros(3, np.float32), ts.f32), 2)
