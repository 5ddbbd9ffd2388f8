"""Regions of distributed tensors: what ranks have is added exactly once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import regions
from mesh.launch import mpirun, needs_mpi
from mesh.regions import COL, LAYOUTS, ROW, WHOLE, arrays, gradients, update
from tolerance import assert_close, f64

SCRIPT = Path(regions.__file__)


def expected():
    a, b, g = map(f64, arrays())
    return g + 2 * (a @ b)


@pytest.mark.row("REG-07")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_products_are_added_once(layout):
    alone = update(layout)
    assert_close(alone, expected(), np.float32, n=16)
    (found,) = regions.update_grad.plan  # one collective, of f32 terms
    kind = "reduce_scatter" if layout in ("rows", "columns") else "all_reduce"
    assert str(found).startswith(f"{kind} over dp") and "G[:] += " in str(found)
    for each in ts.dist.simulate(lambda: update(layout), regions.mesh()):
        assert (each == alone).all()


@pytest.mark.row("REG-07")
def test_four_ranks_equal_one_process():
    @ts.jit
    def whole(A: ts.Region[ts.read], B: ts.Region[ts.read], G: ts.Region[ts.reduce_sum]):
        G[:] += ts.gemm(A, B)

    a, b, g = arrays()
    for _ in range(2):
        whole(a, b, g)
    for each in ts.dist.simulate(lambda: update("whole"), regions.mesh()):
        assert_close(each, g, np.float32, n=16)


@needs_mpi
@pytest.mark.row("REG-07", "AD-28")
@pytest.mark.parametrize("program", ["whole", "rows", "gradients"])
def test_under_mpirun(program, tmp_path):
    run = mpirun(4, program, tmp_path, battery=SCRIPT)
    assert run.status == 0, run.text
    alone = gradients() if program == "gradients" else update(program)
    assert run.results == dict.fromkeys(range(4), alone.tobytes().hex())


@pytest.mark.row("AD-28")
def test_gradients_accumulate_across_calls_and_ranks():
    x, w, _ = map(f64, arrays())
    want = sum(b.T @ (1 - np.tanh(b @ w) ** 2) for b in (x, x * 2))
    alone = gradients()
    assert_close(alone, want, np.float32, n=16)
    for each in ts.dist.simulate(gradients, regions.mesh()):
        assert (each == alone).all()


def test_extrema_and_writes():
    @ts.jit
    def f(x: ts.Region[ts.read], Y: ts.Region[ts.write], G: ts.Region[ts.reduce_max]):
        Y[:] = x * 2.0
        G[:] = ts.maximum(G[:], x)

    x, _, _ = arrays()
    at = regions.mesh()
    X = ts.dist.distribute(x, ROW, mesh=at)
    Y, G = (ts.dist.distribute(np.zeros_like(x), spec, mesh=at) for spec in (COL, WHOLE))
    f(X, Y, G)
    assert any("all_to_all" in str(step) for step in f.plan), f.plan  # Y is moved to its columns
    assert (Y.numpy() == x * 2).all() and (G.numpy() == np.maximum(x, 0)).all()
    assert Y.layout == ts.dist.distribute(x, COL, mesh=at).layout  # a region stays where it lies


def test_the_same_memory_twice():
    a, _, g = arrays()
    at = regions.mesh()
    G = ts.dist.distribute(g, ROW, mesh=at)
    with pytest.raises(ts.PrivilegeError, match="same memory"):
        regions.update_grad(G, ts.dist.distribute(np.eye(5, dtype=np.float32), WHOLE, mesh=at), G)
