"""Programs of tests/gpu/test_mesh.py, run by mpirun: each rank writes FOLDER/<rank>.

    mpirun -n 2 python tests/gpu/mesh_programs.py layouts FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]),
                str(Path(__file__).resolve().parents[2] / "examples")]

import numpy as np  # noqa: E402
from train import Model, Run  # noqa: E402
from transformer import Config, init_params, place_batch, place_params  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.mesh.ranks.communicator import communicator, known  # noqa: E402
from tessera.mesh.ranks.group import Group, make_group  # noqa: E402
from tessera.mesh.world import transport  # noqa: E402
from tolerance import assert_close  # noqa: E402

SPLIT = {"rows": ts.ShardSpec(("row",), ("x",)), "columns": ts.ShardSpec(("col",), ("x",)),
         "whole": ts.ShardSpec(replicate=True)}


def layouts(rank: int, ranks: int) -> dict:
    """Every change of layout, and sums over what is split, against f64 NumPy."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="x")
    rng = np.random.default_rng(3)
    X, W = rng.standard_normal((130, 70)), rng.standard_normal((70, 90))

    @ts.jit
    def moved(x, w):
        columns = ts.shard(x, SPLIT["columns"])
        whole = ts.shard(columns, SPLIT["whole"])
        return (columns, whole, ts.shard(columns, SPLIT["rows"]), ts.roll(x, 3, axis=0),
                columns @ w, ts.max(columns, axis=1))

    for kind in ("f32", "bf16"):
        exact, wide = (ts.tensor(a, kind).numpy().astype(np.float64) for a in (X, W))
        x, w = (ts.dist.distribute(ts.tensor(a, kind), SPLIT["rows"], mesh=mesh) for a in (X, W))
        for _ in range(3):  # step by step, recorded, and as a graph
            *same, rolled, product, most = (np.asarray(y.numpy(), np.float64) for y in moved(x, w))
            for y in same:
                np.testing.assert_array_equal(y, exact)
            np.testing.assert_array_equal(rolled, np.roll(exact, 3, axis=0))
            assert_close(product, exact @ wide, kind, 70)
            np.testing.assert_array_equal(most, exact.max(1))
    by_hand = ts.jit(lambda x: ts.dist.all_gather(ts.dist.all_reduce(x * 2, "x", mesh=mesh), "x",
                                                  dim=1, mesh=mesh) + 1)
    mine = (X[:8] + rank).astype(np.float32)
    want = np.tile(2 * sum((X[:8] + r).astype(np.float32) for r in range(ranks)), (1, ranks)) + 1
    for _ in range(3):
        np.testing.assert_allclose(by_hand(ts.tensor(mine).to(x.local.device)).numpy(), want,
                                   rtol=1e-6)
    local = moved._last.program.local(rank)
    return {"place": x.local.device, "backend": mesh.backend, "plan": str(moved.plan),
            "graph": local.captured, "no graph": local.no_graph}


def split(rank: int, ranks: int) -> dict:
    """A communicator that is a part of another."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes=("a", "b"), shape=(1, ranks))
    x = ts.dist.tensor((4 * ranks,), ts.ShardSpec(("row",), ("b",)), mesh, init=1.0)
    whole = make_group(mesh, None)
    parent = communicator(whole, x.local.place)
    made = parent.split(Group(transport(), whole.ranks, "twin"), 0)
    y = ts.zeros((4,)).to(x.local.device)
    made.all_reduce([(x.local.memory.pointer, y.memory.pointer, 4)], 7, 0, 0)
    return {"sums": y.numpy().tolist(), "known": known(whole)}


def cut(rank: int, ranks: int) -> dict:
    """Matmuls in parts beside their collective, against f64 NumPy in some places."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="x")
    rng, kind = np.random.default_rng(3), "bf16 @accum(f32)"
    X, W = (ts.tensor(rng.standard_normal(s, np.float32), kind)
            for s in ((4096, 4096), (4096, 8192)))
    i, j = rng.integers(0, 4096, 500), rng.integers(0, 8192, 500)
    want = np.einsum("ik,ki->i", X.numpy()[i].astype("f8"), W.numpy()[:, j].astype("f8"))
    found = {}
    for left, right, out in (("rows", "columns", "columns"), ("columns", "rows", "rows"),
                             ("columns", "rows", "whole")):
        f = ts.jit(lambda x, w, out=out: ts.shard(x @ w, SPLIT[out]))
        x, w = ts.dist.distribute(X, SPLIT[left], mesh=mesh), ts.dist.distribute(
            W, SPLIT[right], mesh=mesh)
        for _ in range(3):  # step by step, recorded, and as a graph
            y = f(x, w).numpy()
            assert_close(y[i, j], want, "bf16", 4096)
        found[out] = str(f.plan)
    return found


def losses(rank: int, ranks: int) -> dict:
    """Of steps of the example on meshes of GPUs, and on one GPU."""
    found = {}
    for axes in ({}, {"dp": ranks}, {"tp": ranks}, {"dp": ranks, "zero": 3}):
        axes, zero = {a: n for a, n in axes.items() if a != "zero"}, axes.get("zero", 0)
        grid = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], tuple(axes),
                            tuple(axes.values())) if axes else None
        c = Config(d=64, layers=2, heads=4, T=64, B=8, target="cuda",
                   zero=zero, mesh=",".join(f"{a}={n}" for a, n in axes.items()))
        c.__dict__["grid"] = grid  # under mpirun it has one in any case
        ts.random.seed(1)
        params = place_params(grid, init_params(c))
        params = c.optimizer.shard(params) if zero else params
        run, model, rng = Run([params], [c.optimizer.init(params)]), Model(c), \
            np.random.default_rng(5)
        made = []
        for _ in range(20):
            batch = place_batch(c, tuple(rng.integers(0, 256, (2, c.B, c.T))))
            made.append(model.advance(run, batch, 1e-3))
        begin = time.perf_counter()
        for _ in range(20):
            model.advance(run, batch, 1e-3)
        took = (time.perf_counter() - begin) / 20
        name = f"{axes} zero {zero}" if zero else str(axes)
        found[name] = {"losses": made, "step ms": 1e3 * took}
    return found


def main() -> None:
    program, folder = sys.argv[1:]
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    found = {"layouts": layouts, "split": split, "cut": cut, "losses": losses}[program](rank, ranks)
    (Path(folder) / str(rank)).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
