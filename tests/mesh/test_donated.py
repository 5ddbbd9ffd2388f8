"""Distributed tensors that are donated: their parts stay in place, and reading them is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import SPLIT, on_ranks, placed, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.errors import ArgumentError
from tessera.graph.cuda.passes import narrow_copies
from tessera.mesh.sharding import sharded_graph
from tessera.tile.launch.resident import on_gpu
from tolerance import assert_close


def descend(params: Any, state: Any, x: Any) -> Any:
    loss, grads = ts.value_and_grad(lambda p: ts.mean(ts.square(x @ p["w"] + p["b"])))(params)
    state = {k: 0.9 * state[k] + grads[k] for k in grads}
    return {k: params[k] - 0.1 * state[k] for k in grads}, state, loss


def pointers(*trees: dict) -> set[int]:
    return {p.memory.pointer for t in trees for x in t.values() for p in x.held.values()}


@pytest.mark.parametrize("how", ["whole", "columns"])
def test_parts_stay_in_their_memory(gpus, nccl, rng, how):
    W, B, *batches = values(rng, (8, 4), (1, 4), *[(16, 8)] * 5)
    want = {"w": ts.tensor(W), "b": ts.tensor(B)}
    held = {k: ts.zeros_like(p) for k, p in want.items()}
    for x in batches:
        want, held, _ = ts.jit(descend)(want, held, ts.tensor(x))

    def program(mesh):
        step = ts.jit(descend, donate=("params", "state"))
        params = {"w": placed(mesh, W, how), "b": placed(mesh, B, how)}
        state = {k: p * 0.0 for k, p in params.items()}
        there = pointers(params, state)
        assert len(there) == 4
        for x in batches:  # step by step, recorded, and as a graph
            params, state, _ = step(params, state, placed(mesh, x, "rows"))
            assert pointers(params, state) == there
        return [{k: x.numpy() for k, x in t.items()} for t in (params, state)]

    for got in on_ranks(2, program):
        for mine, meant in zip(got, (want, held), strict=True):
            for k in meant:
                assert_close(mine[k], meant[k].numpy(), "f32", 256)


def test_copies_of_what_a_part_was_are_not_taken_for_it(gpus, nccl, rng, monkeypatch):
    """Parts move to results; the copy in another type that another function left is of old values.
    """
    monkeypatch.setattr(narrow_copies, "LEAST", 16)
    W, X = values(rng, (8, 4), (16, 8))

    def step_in(kind):
        def step(params, x):
            loss = lambda p: ts.mean(ts.square(ts.cast(  # noqa: E731
                ts.cast(x, kind) @ ts.cast(p["w"], kind), "f32")))
            value, grads = ts.value_and_grad(loss)(params)
            return {k: params[k] - 0.5 * grads[k] for k in grads}, value
        return step

    steps = [step_in("bf16 @accum(f32)"), step_in("f16 @accum(f32)")]

    def program(mesh):
        run, plain = [ts.jit(s, donate="params") for s in steps], [*map(ts.jit, steps)]
        params, x = {"w": placed(mesh, W, "whole")}, placed(mesh, X, "rows")
        for i in [0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1]:
            want = plain[i](params, x)[0]["w"].numpy()
            params, _ = run[i](params, x)
            np.testing.assert_array_equal(params["w"].numpy(), want)
        return [len(p.narrow) for p in params["w"].held.values()]

    assert on_ranks(2, program) == [[1], [1]]


def test_parts_whose_memory_others_have_move_to_no_result(gpus, nccl, rng):
    """Which results are parts of arguments is as at the first call, but where one cannot be."""
    arrays = [np.rint(9 * x) for x in values(rng, (6, 4), (6, 4), (4, 4))]

    def program(mesh):
        f = ts.jit(lambda xs: [x + 1.0 for x in xs], donate="xs")
        xs, made = [placed(mesh, x, "rows") for x in arrays], []
        for i in range(8):
            alive = ts.as_bytes(xs[1].local) if i in (4, 6) else None
            before = None if alive is None else alive.array.copy()
            xs = f(xs)
            made.append([x.numpy() for x in xs])
            assert alive is None or (alive.array == before).all()
        return made

    for made in on_ranks(2, program):
        for i, found in enumerate(made):
            for x, y in zip(arrays, found, strict=True):
                np.testing.assert_array_equal(y, x + (i + 1))


def test_captured_tensors_are_copied_once_and_when_they_are_written(gpus, nccl, rng, monkeypatch):
    copied = []
    monkeypatch.setattr(sharded_graph, "on_gpu", lambda x, i: copied.append(i) or on_gpu(x, i))
    (X,) = values(rng, (6, 4))

    def program(mesh):
        scale, made = ts.tensor(np.float32([2.0, 3.0, 4.0, 5.0])), []
        f, x = ts.jit(lambda x: x * scale, donate="x"), placed(mesh, X, "rows")
        for i in range(6):
            if i == 3:
                scale[...] = np.ones(4, np.float32)
            x = f(x)
            made.append(x.numpy())
        return made

    want = [X]
    for i in range(6):
        want.append(want[-1] * np.float32([2.0, 3.0, 4.0, 5.0] if i < 3 else 1.0))
    for made in on_ranks(2, program):
        np.testing.assert_array_equal(made, want[1:])
    assert len(copied) == 4  # two on each rank


USES = {"op": lambda x: x + 1.0, "numpy": lambda x: x.numpy(), "local": lambda x: x.local,
        "parts": lambda x: x.parts[0], "jit": lambda x: ts.jit(lambda v: v)(x),
        "again": lambda x: ts.jit(lambda v: v * 2.0, donate="v")(x), "copy": lambda x: x.copy(),
        "moved": lambda x: ts.dist.distribute(x, SPLIT["whole"]),
        "write": lambda x: x.__setitem__(..., np.ones((4, 6), np.float32))}


@pytest.mark.parametrize("use", USES)
def test_what_was_donated_is_used_up(use, rng):
    (X,) = values(rng, (4, 6))
    mesh = ts.dist.mesh(axes="x", shape=(2,))
    x = placed(mesh, X, "rows")
    part, other = x.local, x.copy()
    y = ts.jit(lambda x: x * 2.0, donate=0)(x)
    np.testing.assert_array_equal(y.numpy(), 2 * X)
    np.testing.assert_array_equal(other.numpy(), X)
    with pytest.raises(ArgumentError, match=r"f32\[4, 6\] is used after it was donated to <lambda> "
                                            r"at .*test_donated\.py:\d+") as info:
        USES[use](x)
    assert "x.copy()" in info.value.hint
    assert x.shape == (4, 6) and x.layout == y.layout and "donated to <lambda>" in repr(x)
    with pytest.raises(ArgumentError, match=r"f32\[2, 6\] is used after it was donated"):
        part + 1.0


def test_a_tensor_is_donated_once_in_a_call(gpus, nccl, rng):
    (X,) = values(rng, (4, 6))

    def program(mesh):
        x = placed(mesh, X, "rows")
        twin = ts.dist.DistTensor(x.held, x.shape, x.type, x.layout)
        add = ts.jit(lambda a, b: a + b, donate="a")
        for other in (x, twin):
            with pytest.raises(ArgumentError, match="a is donated and is given as b too"):
                add(x, other)
        np.testing.assert_array_equal(add(x, x.copy()).numpy(), 2 * X)

    on_ranks(2, program)
