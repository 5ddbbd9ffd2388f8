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
from train import Model, Pipelined, Run  # noqa: E402
from transformer import Config, init_params, place_batch, stage_params  # noqa: E402

import tessera as ts  # noqa: E402
from mesh.parallel import MODEL, TIED, model_batch, model_params, squares  # noqa: E402
from mesh.test_ring import exact  # noqa: E402
from tessera.graph.cuda.program import call_steps  # noqa: E402
from tessera.mesh.ranks.communicator import communicator, uses_nccl  # noqa: E402
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
                                   rtol=1e-6, atol=1e-6 * ranks)  # NCCL has an order of its own
    local = moved._last.program.local(rank)
    return {"place": x.local.device, "backend": mesh.backend, "plan": str(moved.plan),
            "graph": local.captured, "no graph": local.no_graph}


def runs(rank: int, ranks: int) -> dict:
    """Parts of sequences gathered, and sums of ranks scattered to them, to the bit: integers."""
    mesh, inner = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="x"), \
        ts.ShardSpec((1,), ("x",))
    rng = np.random.default_rng(7)
    X, A, W = (rng.integers(-4, 5, s).astype(np.float32) for s in (
        (2, 1024 * ranks, 512), (2, 1024 * ranks, 512 * ranks), (512 * ranks, 512)))
    f = ts.jit(lambda x, a, w: (ts.shard(x * 2.0, SPLIT["whole"]), ts.shard(a @ w, inner)))
    args = [ts.dist.distribute(ts.tensor(x), spec, mesh=mesh)
            for x, spec in ((X, inner), (A, ts.ShardSpec((2,), ("x",))), (W, SPLIT["rows"]))]
    for _ in range(3):  # step by step, recorded, as a graph
        whole, parts = f(*args)
        np.testing.assert_array_equal(whole.local.numpy(), 2 * X)
        np.testing.assert_array_equal(parts.numpy(), A @ W)
    steps = f._last.program.local(rank).program.plan.steps
    return {"kinds": [s.kind for s in steps], "plan": str(f.plan)}


def split(rank: int, ranks: int) -> dict:
    """A communicator that is a part of another."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes=("a", "b"), shape=(1, ranks))
    x = ts.dist.tensor((4 * ranks,), ts.ShardSpec(("row",), ("b",)), mesh, init=1.0)
    whole = make_group(mesh, None)
    parent = communicator(whole, x.local.place)
    made = parent.split(Group(transport(), whole.ranks, "twin"), 0)
    y = ts.zeros((4,)).to(x.local.device)
    made.all_reduce([(x.local.memory.pointer, y.memory.pointer, 4)], 7, 0, 0)
    return {"sums": y.numpy().tolist(), "known": uses_nccl(whole)}


def cut(rank: int, ranks: int) -> dict:
    """Matmuls in parts beside their collective, against f64 NumPy in some places."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="x")
    rng, kind, inner = np.random.default_rng(3), "bf16 @accum(f32)", 2048 * ranks
    columns = 65536 // ranks  # of which two ranks send less
    X, W = (ts.tensor(rng.standard_normal(s, np.float32), kind)
            for s in ((8192, inner), (inner, columns)))  # smaller ones stay whole
    i, j = rng.integers(0, 8192, 500), rng.integers(0, columns, 500)
    want = np.einsum("ik,ki->i", X.numpy()[i].astype("f8"), W.numpy()[:, j].astype("f8"))
    found = {}
    for left, right, out in (("rows", "columns", "columns"), ("columns", "rows", "rows"),
                             ("columns", "rows", "whole")):
        f = ts.jit(lambda x, w, out=out: ts.shard(x @ w, SPLIT[out]))
        x, w = ts.dist.distribute(X, SPLIT[left], mesh=mesh), ts.dist.distribute(
            W, SPLIT[right], mesh=mesh)
        for _ in range(3):  # step by step, recorded, and as a graph
            y = f(x, w).numpy()
            assert_close(y[i, j], want, "bf16", inner)
        found[out] = str(f.plan)
    return found


def overlap(rank: int, ranks: int) -> dict:
    """Gradients of layers, data parallel: when collectives and kernels ran; and with collectives
    among the kernels instead."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="x")
    rng, n, kind = np.random.default_rng(6), 4096, "bf16 @accum(f32)"  # f32 sums of 64 MiB a layer
    ws = [ts.dist.distribute(ts.tensor(rng.standard_normal((n, n), np.float32) / 64, kind),
                             SPLIT["whole"], mesh=mesh) for _ in range(6)]
    x = ts.dist.distribute(ts.tensor(rng.standard_normal((n * ranks, n), np.float32), kind),
                           SPLIT["rows"], mesh=mesh)

    def loss(ws, x):
        for w in ws:
            x = ts.gelu(x @ w)
        return ts.mean(ts.square(ts.cast(x, "f32")))

    def gradients() -> tuple:
        step = ts.jit(ts.grad(loss, argnums=0))
        for _ in range(3):
            made = step(ws, x)
        return step, [g.local.numpy().tobytes() for g in made]

    step, made = gradients()
    with ts.debug.profile() as p:
        step(ws, x)
    beside, call_steps.overlapped = call_steps.overlapped, lambda *a: None
    same = gradients()[1] == made
    call_steps.overlapped = beside
    sent = [r.event for r in p.launches.records if r.work.kind == "exchange"]
    back = [r.event for r in p.launches.records
            if (r.work.kind, r.work.part) == ("matmul", "backward")]
    return {"same": same, "sent": len(sent),
            "ahead us": (max(b.end_ns for b in back) - sent[0].start_ns) / 1e3,
            "apart": {e.stream for e in sent}.isdisjoint(e.stream for e in back)}


def losses(rank: int, ranks: int) -> dict:
    """Of steps of the example on meshes of GPUs, and on one GPU."""
    both = [({"dp": ranks // 2, "tp": 2}, 0)] if ranks > 2 else []
    return trained(ranks, [({}, 0), ({"dp": ranks}, 0), ({"tp": ranks}, 0), *both])


def zeros(rank: int, ranks: int) -> dict:
    """The same with optimizer state, gradients and weights split over dp."""
    return trained(ranks, [({}, 0), *(({"dp": ranks}, stage) for stage in (1, 2, 3))])


def stages(rank: int, ranks: int) -> dict:
    """The same in stages, of one layer each or more."""
    both = [({"pp": 2, "dp": ranks // 2}, 0)] if ranks > 2 else []
    return trained(ranks, [({}, 0), ({"pp": ranks}, 0), *both], layers=ranks)


def trained(ranks: int, meshes: list[tuple[dict[str, int], int]], layers: int = 2) -> dict:
    """Losses and times of steps, by mesh and ZeRO stage."""
    found = {}
    for axes, zero in meshes:
        grid = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], tuple(axes),
                            tuple(axes.values())) if axes else None
        c = Config(d=64, layers=layers, heads=4, T=64, B=8, target="cuda", zero=zero,
                   mesh=",".join(f"{a}={n}" for a, n in axes.items()))
        c.__dict__["grid"] = grid  # under mpirun it has one in any case
        ts.random.seed(1)
        params = stage_params(c, init_params(c))
        run = Run(params, [None if p is None else c.optimizer.init(p) for p in params])
        model = Model(c) if c.stages == 1 else Pipelined(c)
        made, rng = [], np.random.default_rng(5)
        for _ in range(20):
            batch = place_batch(c, tuple(rng.integers(0, 256, (2, c.B, c.T))))
            made.append(model.advance(run, batch, 1e-3))
        begin = time.perf_counter()
        for _ in range(20):
            model.advance(run, batch, 1e-3)
        took = (time.perf_counter() - begin) / 20
        found[f"{axes} ZeRO {zero}"] = {"losses": made, "step ms": 1e3 * took}
    return found


def experts(rank: int, ranks: int) -> dict:
    """Losses of steps of a mixture of experts, tokens and experts on one axis, and on one GPU."""
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="ep")
    rng, split = np.random.default_rng(2), ts.ShardSpec((0,), ("ep",))
    shapes = ((64, 16), None), ((16, 8), None), ((8, 16, 32), split), ((8, 32, 16), split)
    arrays = [rng.normal(size=s).astype(np.float32) / 3 for s, _ in shapes]
    x, y = (ts.dist.distribute(arrays[0] * k, split, mesh=mesh) for k in (1, 0.5))
    weights = [ts.dist.distribute(a, s, mesh=mesh)
               for a, (_, s) in zip(arrays[1:], shapes[1:], strict=True)]

    @ts.jit
    def step(weights, x, y):
        def loss(weights):
            router, *layers = weights
            found = ts.moe(x, router, tuple(layers), top_k=2, groups=ranks)
            return ts.mean(ts.square(found - y))

        value, grads = ts.value_and_grad(loss)(weights)
        return value, [w - 0.5 * g for w, g in zip(weights, grads, strict=True)]

    def steps(weights: list, x: ts.Tensor, y: ts.Tensor) -> list[float]:
        made = []
        for _ in range(20):
            value, weights = step(weights, x, y)
            made.append(value.item())
        return made

    together, plan = steps(weights, x, y), str(step.plan)
    here = [ts.tensor(a).to(x.local.device) for a in (*arrays, arrays[0] * 0.5)]
    return {"together": together, "alone": steps(here[1:4], here[0], here[4]), "plan": plan}


def rings(rank: int, ranks: int) -> dict:
    """Attention over a sequence that ranks share, and its derivatives: errors against f64."""
    mesh, split = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="sp"), \
        ts.ShardSpec((2,), ("sp",))
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((2, h, 1100, 64)).astype(np.float32) for h in (4, 2, 2)]

    def case(kind: str, zigzag: bool) -> tuple[list[float], str]:
        given = [ts.tensor(a, kind) for a in arrays]
        wide = [x.numpy().astype(np.float64) for x in given]
        want = exact(*wide, True)
        slopes = ts.grad(lambda *xs: ts.sum(ts.attention(*xs, causal=True) * want),
                         argnums=(0, 1, 2))(*(ts.tensor(x, "f64") for x in wide))
        xs = [ts.dist.distribute(x, split, mesh=mesh) for x in (*given, ts.tensor(want, "f32"))]
        f = ts.jit(lambda *xs: ts.ring_attention(*xs, zigzag=zigzag))
        step = ts.jit(ts.grad(lambda q, k, v, w: ts.sum(ts.cast(f(q, k, v), "f32") * w),
                              argnums=(0, 1, 2)))
        for _ in range(3):
            y, grads = f(*xs[:3]), step(*xs)
        errors = [np.abs(y.numpy().astype(np.float64) - want).max()]
        for g, s in zip(grads, slopes, strict=True):
            exactly = s.numpy()
            errors.append(np.abs(g.numpy().astype(np.float64) - exactly).max()
                          / np.abs(exactly).max())
        return [float(e) for e in errors], str(step.plan)

    cases = ("f32", False), ("f32", True), ("bf16", True)
    made = {f"{kind}, zigzag {zigzag}": case(kind, zigzag) for kind, zigzag in cases}
    return {"errors": {name: errors for name, (errors, _) in made.items()},
            "plan": "".join(plan for _, plan in made.values())}


def pipelined(rank: int, ranks: int) -> dict:
    """Loss and gradients of stages, two on each rank, some of which give dicts with integers."""
    found = {}
    with ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="pp"):
        for kind in ("1f1b", "gpipe"):
            step = ts.pipeline(MODEL, 4, schedule=kind, tied=TIED).value_and_grad(squares)
            for _ in range(3):
                loss, grads = step(model_params(), *model_batch())
            found[kind] = {"loss": loss.item()} | {
                f"{s}.{k}": g.numpy().tolist() for s, own in enumerate(grads) if own
                for k, g in own.items()}
    return found


def main() -> None:
    program, folder = sys.argv[1:]
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    programs = {f.__name__: f for f in (layouts, split, cut, overlap, losses, zeros, stages,
                                       experts, rings, pipelined, runs)}
    found = programs[program](rank, ranks)
    (Path(folder) / str(rank)).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
