"""Matmuls of sequences that are split: rows of a batch are one matrix, and stay where they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import tessera as ts
from tolerance import assert_close


def sequences(rng, B, spec, T=24, **axes):
    mesh = ts.dist.mesh(axes=tuple(axes), shape=tuple(axes.values()))
    values = [rng.standard_normal(s).astype(np.float32) for s in ((B, T, 4), (4, 6))]
    return [ts.tensor(v) for v in values], [
        ts.dist.distribute(v, s, mesh=mesh) for v, s in zip(values, (spec, None), strict=True)]


SEQUENCES = ts.ShardSpec((1,), ("sp",))
SEQUENCE_TP = ts.ShardSpec((1,), ("tp",))
BOTH = ts.ShardSpec((0, 1), ("dp", "sp"))


@pytest.mark.parametrize(("B", "spec", "axes"), [
    (3, SEQUENCES, {"sp": 4}), (2, BOTH, {"dp": 2, "sp": 3}), (1, SEQUENCES, {"sp": 4}),
    (2, BOTH, {"sp": 3, "dp": 2})])
def test_rows_of_split_sequences_are_multiplied_where_they_lie(B, spec, axes, rng):
    whole, parts = sequences(rng, B, spec, **axes)

    @ts.jit
    def heads(x, w):
        return ts.gelu(ts.reshape(x @ w, (B, 24, 2, 3)))

    y = heads(*parts)
    assert not heads.plan and y.layout.splits[:2] == parts[0].layout.splits[:2]
    assert_close(y.numpy(), heads(*whole).numpy(), "f32", n=4)


@pytest.mark.parametrize(("B", "spec", "axes"), [
    (3, SEQUENCES, {"sp": 4}), (2, BOTH, {"dp": 2, "sp": 3})])
def test_gradients_of_weights_are_terms_of_each_ranks_rows(B, spec, axes, rng):
    whole, parts = sequences(rng, B, spec, **axes)
    step = ts.jit(ts.grad(lambda x, w: ts.sum(ts.sin(x @ w)), argnums=(0, 1)))
    meant, found = step(*whole), step(*parts)
    assert [c.op for c in step.plan] == ["all_reduce"]
    for g, m in zip(found, meant, strict=True):
        assert_close(g.numpy(), m.numpy(), "f32", n=100)


def test_sequences_that_do_not_divide_are_right_too(rng):
    whole, parts = sequences(rng, 3, SEQUENCES, T=10, sp=4)
    multiply = ts.jit(lambda x, w: x @ w)
    assert_close(multiply(*parts).numpy(), multiply(*whole).numpy(), "f32", n=4)


@pytest.mark.parametrize("shape", [(3, 8, 4), (3, 8, 1, 4), (1, 3, 8, 4), (3, 4, 8)])
def test_joined_and_parted_dimensions_keep_their_elements(shape, rng):
    mesh = ts.dist.mesh(axes=("sp", "tp"), shape=(4, 2))
    values = rng.standard_normal(shape).astype(np.float32)
    for dim in range(len(shape)):
        for last in ((), ("tp",)):
            if dim == len(shape) - 1 and last:
                continue
            spec = ts.ShardSpec((dim, *(["col"] * bool(last))), ("sp", *last))
            x = ts.dist.distribute(values, spec, mesh=mesh)
            for new in ((-1, shape[-1]), (shape[0], -1), (-1,)):
                there = ts.jit(lambda x, new=new: ts.reshape(ts.reshape(x, new) * 2.0, shape))
                assert (there(x).numpy() == values * 2).all()
                assert (ts.reshape(x, new).numpy() == values.reshape(new)).all()


@pytest.mark.parametrize("B", [1, 2])
def test_sequences_split_over_the_axis_of_the_weights_are_gathered_once(B, rng):
    """Sequence parallelism (Korthikanti et al., 2022): one all_gather in front of the weights that
    are split by columns, one reduce_scatter behind those split by rows, and as many backward."""
    mesh = ts.dist.mesh(axes="tp", shape=(4,))
    x, up, gate, down = (0.3 * rng.standard_normal(s).astype(np.float32)
                         for s in ((B, 24, 16), (16, 32), (16, 32), (32, 16)))

    def plain(x, up, gate, down):
        h = ts.rmsnorm(x, ts.ones(16))
        return x + (ts.silu(h @ up) * (h @ gate)) @ down

    def block(*args):
        return ts.shard(plain(*args), SEQUENCE_TP, mesh=mesh)

    def gradients(f, args):
        return ts.grad(lambda *args: ts.sum(ts.sin(f(*args))), argnums=(0, 1, 2, 3))(*args)

    columns, rows = ts.ShardSpec(("col",), ("tp",)), ts.ShardSpec(("row",), ("tp",))
    whole = [ts.tensor(v) for v in (x, up, gate, down)]
    parts = [ts.dist.distribute(v, s, mesh=mesh) for v, s in zip(
        whole, (SEQUENCE_TP, columns, columns, rows), strict=True)]
    forward, step = ts.jit(block), ts.jit(lambda *args: gradients(block, args))
    assert_close(forward(*parts).numpy(), plain(*whole).numpy(), "f32", n=600)
    for g, m in zip(step(*parts), gradients(plain, whole), strict=True):
        assert_close(g.numpy(), m.numpy(), "f32", n=2000)
    assert [c.op for c in forward.plan] == ["all_gather", "reduce_scatter"]
    assert Counter(c.op for c in step.plan) == {"all_gather": 2, "reduce_scatter": 2}
