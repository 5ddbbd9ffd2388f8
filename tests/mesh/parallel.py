"""Programs of submeshes, pipelines and launches, for simulated ranks and for mpirun.

    mpirun -n 4 python tests/mesh/parallel.py PROGRAM FOLDER     each rank writes FOLDER/<rank>
"""

from __future__ import annotations

import hashlib
import sys
import threading

import numpy as np

import tessera as ts
from mesh.battery import operand
from mesh.processes import run_programs
from tessera.mesh.parallel.schedules import schedule
from tessera.mesh.ranks.envelope import here_in
from tessera.mesh.sharding.reshard import plan, reshard
from tessera.mesh.world import is_here, mesh_rank, transport


# --- submeshes -----------------------------------------------------------------------------------
def two_halves() -> str:
    """The two halves of a mesh make different calls at the same time, then meet again."""
    mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(ts.dist.world_size() // 2, 2))
    me = ts.dist.rank()
    halves = [mesh.sub(pp=p) for p in (0, 1)]
    mine = next(half for half in halves if is_here(half))
    x = operand((3, 4), "f32", me)
    with mine:
        if me % 2 == 0:
            for _ in range(3):
                x = ts.dist.all_reduce(x, "dp", op="mean") + 1
        else:
            x = ts.dist.all_gather(ts.dist.reduce_scatter(x, "dp", dim=1), dim=1)
            ts.dist.barrier()
    total = ts.dist.all_reduce(x, mesh=mesh)
    return _hash(x.array, total.array) + f" {mesh_rank(mine)}"


def between_halves() -> str:
    """A tensor in rows on one half goes to columns on the other, and to all ranks."""
    mesh = ts.dist.mesh(axes=("pp", "tp"), shape=(2, ts.dist.world_size() // 2))
    one, other, me = mesh.sub(pp=0), mesh.sub(pp=1), ts.dist.rank()
    whole = operand((7, 9), "fp6_e3m2", 0)
    rows = ts.ShardSpec(("row",), ("tp",)).resolve(one, 2)
    columns = ts.ShardSpec(("col",), ("tp",)).resolve(other, 2)
    grid = ts.ShardSpec(("row", "col"), ("tp", "pp")).resolve(mesh, 2)
    held = ts.dist.take(whole.array, rows, mesh_rank(one), whole.dtype) if is_here(one) else None
    moved = reshard(transport(), plan(rows, columns, (7, 9), whole.dtype), held, whole.dtype)
    if moved is None:
        assert is_here(one)
    else:
        meant = ts.dist.take(whole.array, columns, mesh_rank(other), whole.dtype)
        assert moved.shape == meant.shape and (moved == meant).all()
    spread = reshard(transport(), plan(columns, grid, (7, 9), whole.dtype), moved, whole.dtype)
    assert spread is not None
    assert (spread == ts.dist.take(whole.array, grid, me, whole.dtype)).all()
    return _hash(spread)


def messages() -> str:
    """isend and irecv: tags keep apart what is sent, the order within a tag is that of begin."""
    here, size = transport(), ts.dist.world_size()
    to, source = (here.rank + 1) % size, (here.rank - 1) % size
    data = [np.full(100_000, 10 * here.rank + k, np.uint8) for k in range(4)]
    label = here_in("four messages")
    sends = [here.isend(to, d, k % 2, label) for k, d in enumerate(data)]
    ts.dist.barrier()  # a collective in between takes none of them
    buffers = {k: np.zeros(100_000, np.uint8) for k in (1, 3, 0, 2)}
    receives = [here.irecv(source, b, k % 2, label) for k, b in buffers.items()]
    for request in (*reversed(receives), *sends):
        request.wait()
        assert request.done()
    found = [int(buffers[k][-1]) for k in range(4)]
    assert found == [10 * source + k for k in range(4)], found
    return str(found)


def asides() -> str:
    """A thread tells the next rank, and looks what it is told, while the ranks communicate."""
    here, found = transport(), list[list[int]]()
    to = (here.rank + 1) % here.size

    def tell() -> None:
        for k in range(20):
            here.tell(to, bytes([here.rank, k]))
            found.extend(list(data) for data in here.told())
        while len(found) < 20:
            found.extend(list(data) for data in here.told())

    thread = threading.Thread(target=tell)
    thread.start()
    for _ in range(50):
        ts.dist.all_reduce(ts.ones((3,)))
    thread.join()
    ts.dist.barrier()
    return str(found)


# --- pipelines -----------------------------------------------------------------------------------
WIDTH, VOCABULARY, ROWS, STAGES = 6, 11, 10, 4
TIED = [("0.embed", "3.embed")]


def embed(p, tokens):
    return ts.tanh(ts.take(p["embed"], tokens, axis=0) @ p["w"])


def fork(p, h):
    """A value that is a dict, with an integer in it: what a stage gives is a tree."""
    return {"h": ts.tanh(h @ p["w"]) + h, "skip": h, "sign": ts.cast(ts.sign(h), "int32")}


def merge(p, v):
    return ts.tanh(v["h"] @ p["w"]) + v["skip"] * ts.cast(v["sign"], "f32")


def unembed(p, h):
    return h @ ts.transpose(p["embed"])


MODEL = [embed, fork, merge, unembed]


def model_params(seed: int = 5, dtype: str = "f32") -> list[dict]:
    rng = np.random.default_rng(seed)
    shapes = [{"embed": (VOCABULARY, WIDTH), "w": (WIDTH, WIDTH)}, {"w": (WIDTH, WIDTH)},
              {"w": (WIDTH, WIDTH)}]
    params = [{k: ts.tensor(0.5 * rng.standard_normal(s), dtype) for k, s in p.items()}
              for p in shapes]
    return [*params, {"embed": params[0]["embed"]}]


def model_batch(seed: int = 6, rows: int = ROWS, dtype: str = "f32"):
    rng = np.random.default_rng(seed)
    tokens = ts.tensor(rng.integers(0, VOCABULARY, (rows, 3)), "int32")
    return tokens, ts.tensor(rng.standard_normal((rows, 3, VOCABULARY)), dtype)


def squares(y, targets):
    return ts.mean((y - targets) ** 2)


def train(kind: str = "1f1b", microbatches: int = 4) -> dict:
    """One step of the model under the mesh that is open; every rank's loss and gradients."""
    pipe = ts.pipeline(MODEL, microbatches, schedule=kind, tied=TIED)
    loss, grads = pipe.value_and_grad(squares)(model_params(), *model_batch())
    found = {f"{s}.{k}": g.array for s, own in enumerate(grads) if own for k, g in own.items()}
    return {"loss": loss.array, **found}


def pipelines() -> str:
    """Both schedules, on all ranks as one axis and as two; then an evaluation."""
    size, out = ts.dist.world_size(), []
    for kind, axes, shape in [("1f1b", ("pp",), (size,)), ("gpipe", ("pp",), (size,)),
                              ("1f1b", ("dp", "pp"), (size // 2, 2))]:
        with ts.dist.mesh(axes=axes, shape=shape):
            out += list(train(kind).values())
    with ts.dist.mesh(axes=("pp",), shape=(size,)):
        y = ts.pipeline(MODEL, 3, schedule="gpipe")(model_params(), model_batch()[0])
        assert (y is not None) == (ts.dist.rank() == size - 1)
        out += [] if y is None else [y.array]
    return _hash(*out)


def dropping(p, h):
    return h + ts.dropout(ts.tanh(h @ p["w"]), 0.4)


def dropouts(schedule: str = "1f1b") -> list[float]:
    """Losses of steps whose stages draw masks, an evaluation between them, and what is drawn
    next."""
    ts.random.seed(11)
    pipe = ts.pipeline([embed, dropping, dropping, unembed], 3, schedule=schedule, tied=TIED)
    step, losses = pipe.value_and_grad(squares), []
    for _ in range(3):
        params = model_params()
        loss, grads = step(params, *model_batch())
        losses.append(loss.item())
        pipe(params, model_batch()[0])
    return [*losses, *ts.random.uniform((2,)).tolist()]


def masks() -> str:
    size = ts.dist.world_size()
    with ts.dist.mesh(axes=("pp",), shape=(size,)):
        return str(dropouts())


def block(p, h):
    return ts.tanh(h @ p[0]) @ p[1]


def blocks_of(seed: int = 3) -> tuple[list, np.ndarray, np.ndarray]:
    """Weights of two stages, a batch of 10 rows and targets."""
    rng = np.random.default_rng(seed)
    weights = [[(rng.standard_normal(s) / 3).astype(np.float32) for s in ((6, 8), (8, 6))]
               for _ in range(2)]
    return weights, *(rng.standard_normal((10, 6)).astype(np.float32) for _ in range(2))


def distributed(devices: list[str] | None = None) -> dict:
    """A step of two stages whose weights are split over tp, with rows split over dp."""
    weights, x, t = blocks_of()
    mesh = ts.dist.mesh(devices, axes=("dp", "tp", "pp"), shape=(2, 2, 2))
    cuts = [ts.ShardSpec((dim,), ("tp",)) for dim in ("col", "row")]
    params = [[ts.dist.distribute(w, cut, mesh=mesh.sub(pp=s))
               for w, cut in zip(own, cuts, strict=True)] for s, own in enumerate(weights)]
    x, t = (ts.dist.distribute(v, ts.ShardSpec(("row",), ("dp",)), mesh=mesh) for v in (x, t))
    with mesh:
        pipe = ts.pipeline([block, block], 3)
        loss, grads = pipe.value_and_grad(squares)(params, x, t)
        y = pipe(params, x)
    for own, given in zip(grads, params, strict=True):
        assert own is None or [g.layout for g in own] == [p.layout for p in given]
    return {"loss": loss.array} | ({} if y is None else {"y": y.numpy()}) | {
        f"{s}.{k}": g.numpy() for s, own in enumerate(grads) for k, g in enumerate(own or [])}


def distributed_pipeline() -> str:
    return _hash(*distributed().values())


def overlap() -> str:
    """Stages that compute for a while at the same time: what the recorded trace says of it."""
    size = ts.dist.world_size()
    w = [ts.tensor(np.random.default_rng(s).standard_normal((600, 600)) / 25, "f32")
         for s in range(size)]

    def stage(p, x):
        for _ in range(8):
            x = ts.tanh(x @ p)
        return x

    with ts.dist.mesh(axes=("pp",), shape=(size,)):
        pipe = ts.pipeline([stage] * size, 6)
        step = pipe.value_and_grad(lambda y: ts.mean(y * y))
        x = ts.tensor(np.random.default_rng(9).standard_normal((1200, 600)), "f32")
        for _ in range(2):
            step(w, x)
            ts.dist.barrier()
        timeline = pipe.trace()
    order = [s.label for s in timeline.spans if s.row == ts.dist.rank()]
    assert order == [str(s) for s in schedule("1f1b", size, 6).steps[ts.dist.rank()]], order
    return f"{timeline.overlap():.3f}\n{timeline}"


# --- launches, pmap ------------------------------------------------------------------------------
@ts.kernel
def double_rows(a: ts.Tensor["M", "N", ts.f32], c: ts.Tensor["M", "N", ts.f32], k: ts.f32):
    row = ts.tile.load(a[tile_m:tile_m + 1, 0:N])  # noqa: F821  names of the kernel language
    c[tile_m:tile_m + 1, 0:N] = row * k  # noqa: F821


def launches() -> str:
    """A kernel on the parts of distributed tensors, then a function on lists of parts."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, ts.dist.world_size() // 2))
    whole = np.random.default_rng(2).standard_normal((5, 7)).astype(np.float32)
    a = ts.dist.distribute(whole, ts.ShardSpec(("row", "col"), ("dp", "tp")), mesh=mesh)
    c = ts.dist.tensor((5, 7), ts.ShardSpec(("row", "col"), ("dp", "tp")), mesh)
    assert ts.index_launch("tp")(double_rows)(a, c, 2.0) is None
    np.testing.assert_array_equal(c.numpy(), 2 * whole)
    calls = []

    def total(part, factor):
        calls.append(part.shape)
        return ts.dist.all_reduce(ts.sum(part) * factor, "tp", mesh=mesh)

    found = ts.index_launch("tp", mesh=mesh)(total)(c.parts("tp"), 0.5)
    assert len(calls) == 1 and [y is not None for y in found].count(True) == 1
    mine = next(y for y in found if y is not None)
    row = mesh.coords(ts.dist.rank())[0]
    np.testing.assert_allclose(mine.item(), whole[:3].sum() if row == 0 else whole[3:].sum(),
                               rtol=1e-5)
    return _hash(mine.array, c.local.array)


def mapped() -> str:
    """pmap over all ranks, of whole and of distributed arguments, equals vmap."""
    mesh = ts.dist.mesh(axes=("dp",), shape=(ts.dist.world_size(),))
    rng = np.random.default_rng(4)
    x, y = (ts.tensor(rng.standard_normal((7, 3)), "f32") for _ in range(2))

    def f(a, b):
        return {"dot": ts.sum(a["x"] * b), "row": ts.tanh(a["x"])}

    meant = ts.vmap(f)({"x": x}, y)
    split = ts.dist.distribute(y, ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
    found = ts.pmap(f, donate={"a"}, mesh=mesh)({"x": x}, split)
    for name, value in found.items():
        np.testing.assert_array_equal(value.numpy(), meant[name].numpy())
    try:
        x.numpy()
    except ts.ArgumentError as error:
        assert "donated to pmap(f)" in str(error)
    else:
        raise AssertionError("a donated tensor can be read")
    return _hash(found["dot"].local.array, found["row"].local.array)


def _hash(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


# Those whose bits under mpirun are compared with the simulation's, in one run.
COMPARED = "launches,mapped,two_halves,between_halves,messages"

if __name__ == "__main__":
    run_programs(globals(), sys.argv[1], sys.argv[2])
