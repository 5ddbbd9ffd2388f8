"""Programs on sharded tensors, for one process, simulated ranks and mpirun.

    mpirun -n 4 python tests/mesh/sharded.py PROGRAM FOLDER     each rank writes FOLDER/<rank>

Each checks what it computes against NumPy, and returns a text that is the same on all ranks and in
all three ways to run it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import tessera as ts
from mesh.processes import run_programs
from mesh.saving import elements
from tessera.mesh.world import transport
from tolerance import assert_close

ROW, COL = ("row",), ("col",)


def spec(*dims: tuple[int | str, str]) -> ts.ShardSpec:
    return ts.ShardSpec(tuple(d for d, _ in dims), tuple(a for _, a in dims)) if dims else \
        ts.ShardSpec(replicate=True)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def ops_of(f: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.op, c.axes) for c in f.plan]


def text_of(*found: Any) -> str:
    """A hash of whole arrays."""
    data = b"".join(np.ascontiguousarray(elements(x)).tobytes() for x in found)
    return hashlib.sha256(data).hexdigest()[:16]


# --- gemm: which collectives (layouts of x and w, the result's, collectives) ---------------------
PRODUCTS: tuple[tuple[Any, Any, str, Sequence], ...] = (
    ((), ((1, "tp"),), "(-, tp)", []),
    (((0, "dp"),), ((1, "tp"),), "(dp, tp)", []),
    (((0, "dp"),), (), "(dp, -)", []),
    (((1, "tp"),), ((0, "tp"),), "(-, tp)", [("reduce_scatter", ("tp",))]),
    (((0, "dp"), (1, "tp")), ((0, "tp"),), "(dp, tp)", [("reduce_scatter", ("tp",))]),
    (((1, "tp"),), ((1, "tp"),), "(-, tp)", [("all_gather", ("tp",))]),
    (((0, "dp"), (1, "tp")), ((1, "tp"),), "(dp, tp)", [("all_gather", ("tp",))]),
)


def products() -> str:
    """Every pair of layouts: the product, its layout, and the collectives that were needed."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, ts.dist.world_size() // 2 or 1)) \
        if ts.dist.world_size() > 1 else ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))
    x, w = numbers(6, 10), numbers(10, 33)
    for at_x, at_w, result, collectives in PRODUCTS:
        gemm = ts.jit(lambda x, w: ts.gemm(x, w))
        y = gemm(ts.dist.distribute(x, spec(*at_x), mesh=mesh),
                 ts.dist.distribute(w, spec(*at_w), mesh=mesh))
        assert_close(y.numpy(), x.astype(np.float64) @ w, dtype="f32", n=10)
        assert (y.layout.describe(), ops_of(gemm)) == (result, list(collectives)), gemm.plan
    whole = ts.jit(lambda x, w: ts.gemm(x, w, out="replicate"))
    y = whole(ts.dist.distribute(x, spec((1, "tp")), mesh=mesh),
              ts.dist.distribute(w, spec((0, "tp")), mesh=mesh))
    assert y.layout.is_replicated and ops_of(whole) == [("all_reduce", ("tp",))], whole.plan
    assert (ts.gemm(x, w, out="replicate").numpy() == ts.gemm(x, w).numpy()).all()
    return "as planned"


# --- the training step of the guide --------------------------------------------------------------
@ts.jit
@ts.autodiff
def train_step(x, y, W):
    """Training step with automatic gradient computation"""
    pred = ts.gemm(x, W)  # Automatically handles TP sharding
    loss = ts.mse(pred, y)
    return loss


def guide_step() -> str:
    """Loss and gradient of a column parallel layer with a batch split over dp."""
    size = ts.dist.world_size()
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(size // 2, 2) if size > 1 else (4, 2))
    w, x, y = numbers(10, 22, seed=1), numbers(13, 10, seed=2), numbers(13, 22, seed=3)
    W = ts.dist.tensor(w.shape, ts.ShardSpec(("col",), ("tp",)), mesh, "bf16 @accum(f32)", init=w)
    X = ts.dist.distribute(x, ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
    Y = ts.dist.distribute(y, ts.ShardSpec(("row", "col"), ("dp", "tp")), mesh=mesh)
    whole = W.numpy().astype(np.float32)
    grad = ts.grad(train_step, argnums=2)
    loss, grad_w = train_step(X, Y, W), grad(X, Y, W)
    assert_close(np.asarray(loss.numpy()), ((x @ whole - y) ** 2).mean(), dtype="bf16", n=10)
    plain = ts.grad(train_step, argnums=2)(ts.tensor(x), ts.tensor(y), ts.tensor(whole, "bf16"))
    assert grad_w.layout == W.layout and grad_w.type == plain.type
    scale = float(np.abs(plain.numpy().astype(np.float64)).max())
    assert_close(grad_w.numpy(), plain.numpy(), dtype="bf16", n=13, scale=scale)
    return f"{W.shape} {grad_w.layout.describe()}"


# --- random bits ---------------------------------------------------------------------------------
def noisy(x):
    """Dropout, its gradient, a stochastic rounding, and draws in held graphs, each from the stream
    of the program."""
    def loss(v):
        return ts.sum(ts.square(ts.dropout(v, 0.4)))

    def step(h, _):
        return ts.dropout(h, 0.3) + ts.checkpoint(lambda h: ts.dropout(h, 0.5))(h), None

    h = ts.scan(step, x, None, length=3)[0]
    h = ts.cond(ts.sum(x) > -1e9, lambda h: ts.dropout(h, 0.2), lambda h: h, h)
    return (ts.dropout(x, 0.4), ts.grad(loss)(x), ts.cast(x, "fp8_e4m3 @stochastic_round"), h,
            ts.vmap(lambda row: ts.dropout(row, 0.5))(x))


def drawn() -> str:
    """Random bits of a tensor in several layouts are those of the whole."""
    size = ts.dist.world_size()
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(size // 2, 2) if size > 1 else (2, 2))
    x, found, step = numbers(7, 9, seed=4), set(), ts.jit(noisy)
    for at in (spec((0, "dp")), spec((1, "tp")), spec((1, "dp"), (0, "tp")), spec(),
               ts.ShardSpec((0,), (("tp", "dp"),)), ts.dist.Cyclic(("dp", "tp"), 2)):
        ts.random.seed(5)
        found.add(text_of(*step(ts.dist.distribute(x, at, mesh=mesh))))
    ts.random.seed(5)
    want = text_of(*step(ts.tensor(x)))
    assert found == {want}
    return want


# --- types ---------------------------------------------------------------------------------------
def policies() -> str:
    """A tensor whose type depends on the rank is refused on every rank."""
    mesh = ts.dist.mesh(axes=("tp",), shape=(ts.dist.world_size(),))
    dtype = "fp6 @accum(bf16)" if ts.dist.rank() == 1 else "fp6 @accum(fp32)"
    try:
        ts.dist.tensor((8, 24), ts.ShardSpec(COL, ("tp",)), mesh, dtype)
    except ts.dist.PolicyMismatch as err:
        return err.message.replace("\n", " ")
    return "nothing was raised"


def low_precision() -> str:
    """Terms of every narrow type are added in f32 and rounded once: bit for bit."""
    size = ts.dist.world_size()
    ranks = size if size > 1 else 4
    mesh, found = ts.dist.mesh(axes=("tp",), shape=(ranks,)), []
    for dtype in ("bf16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1"):
        terms = [ts.cast(ts.tensor(numbers(5, 8, seed=r)), dtype) for r in range(ranks)]
        layout = ts.ShardSpec(reduce="sum").resolve(mesh, 2)
        held = {r: terms[r] for r in range(ranks) if size == 1 or r == ts.dist.rank()}
        x = ts.dist.DistTensor(held, (5, 8), terms[0].type, layout)
        total = np.zeros((5, 8))
        for t in terms:  # exact: few terms of few bits
            total += t.numpy().astype(np.float64)
        want = ts.cast(ts.tensor(total.astype(np.float32)), dtype)
        for at in (ts.ShardSpec(replicate=True), ts.ShardSpec(("row",), ("tp",))):
            y = ts.shard(x, at)
            assert y.type == want.type and (elements(y) == want.array).all(), dtype
            found.append(y)
    return text_of(*found)


def fp6_gemm() -> str:
    """X by rows over dp, W by columns over tp: the bits of the product of the whole."""
    shape = (2, 3) if ts.dist.world_size() == 6 else (8, 9)
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=shape)
    x = ts.dist.tensor((16, 32), ts.ShardSpec(ROW, ("dp",)), mesh, "fp6 @accum(fp32)",
                       init=numbers(16, 32))
    w = ts.dist.tensor((32, 76), ts.ShardSpec(COL, ("tp",)), mesh, "fp6 @accum(fp32)",
                       init=numbers(32, 76))
    y = ts.gemm(x, w)
    assert_close(y.numpy(), x.numpy().astype(np.float64) @ w.numpy().astype(np.float64),
                 dtype="fp6_e3m2", n=32)
    return f"{y.type} {y.layout.describe()}"


# --- split vocabulary, loops ---------------------------------------------------------------------
def vocabulary() -> str:
    """A tied embedding with its rows split: neither the table, nor its gradient, nor the logits
    are ever gathered."""
    size = ts.dist.world_size()
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(size // 2, 2) if size > 1 else (2, 3))
    rng = np.random.default_rng(6)
    table, ids = numbers(301, 16), rng.integers(0, 301, (2, 4, 5))

    def loss(table, ids, labels):
        return ts.cross_entropy(ts.tanh(table[ids]) @ table.T, labels)

    step = ts.jit(ts.value_and_grad(loss, argnums=0))
    at = ts.ShardSpec(ROW, ("dp",))
    args = [ts.dist.distribute(table, ts.ShardSpec(ROW, ("tp",)), mesh=mesh),
            *(ts.dist.distribute(i, at, mesh=mesh) for i in ids)]
    value, grad = step(*args)
    plain, want = ts.value_and_grad(loss, argnums=0)(table, *ids)
    assert_close(np.asarray(value.numpy()), plain.numpy(), dtype="f32", n=301)
    assert_close(grad.numpy(), want.numpy(), dtype="f32", n=301)
    along = {c.elements for c in step.plan if "tp" in c.axes}
    assert max(along) < 301 * 16 and grad.layout == args[0].layout, step.plan
    best = ts.jit(lambda t: (ts.argmax(t, axis=0), ts.argmin(t, axis=0)))
    for y, oracle in zip(best(args[0]), (np.argmax, np.argmin), strict=True):
        assert (y.numpy() == oracle(table, axis=0)).all()
    assert max(c.elements for c in best.plan) <= 2 * 16, best.plan
    return "never gathered"


def loops() -> str:
    """Layers in a scan, each recomputed backwards: their gradients are reduced once, after the
    loop; branches and while loops run on parts."""
    size = ts.dist.world_size()
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(size // 2, 2) if size > 1 else (2, 3))
    ws, bias, x = numbers(3, 8, 8) / 3, numbers(8), numbers(40, 8)

    def loss(ws, bias, x):
        def layer(h, w):
            return h + ts.checkpoint(lambda h, w: ts.tanh(h @ w + bias))(h, w), None

        h = ts.scan(layer, x, ws)[0]
        h = ts.cond(ts.sum(h) > 1e6, lambda h: h * 0.0, lambda h: ts.sin(h), h)
        return ts.mean(ts.square(h))

    step = ts.jit(ts.value_and_grad(loss, argnums=(0, 1)))
    args = [ts.dist.distribute(a, at, mesh=mesh) for a, at in
            ((ws, spec()), (bias, spec()), (x, spec((0, "dp"))))]
    value, grads = step(*args)
    plain, want = ts.value_and_grad(loss, argnums=(0, 1))(ws, bias, x)
    assert_close(np.asarray(value.numpy()), plain.numpy(), dtype="f32", n=40)
    for g, w in zip(grads, want, strict=True):
        assert_close(g.numpy(), w.numpy(), dtype="f32", n=40)
    assert all(c.times == 1 for c in step.plan), step.plan
    halve = ts.jit(lambda x: ts.while_loop(lambda c: ts.sum(c * c) > 1e-3, lambda c: c * 0.5, x))
    assert (halve(args[2]).numpy() == halve(x).numpy()).all()
    return "reduced once"


def own_batches() -> str:
    """Batches of which each rank reads its own part: those that `distribute` splits, bit for bit,
    and the ranks send nothing for any but the first."""
    size = ts.dist.world_size()
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(size // 2, 2) if size > 1 else (2, 2))
    w, step = ts.dist.distribute(numbers(6, 8), spec((1, "tp")), mesh=mesh), None
    found = []
    for rows in (8, 8, 9, 9):  # 9 are 5 and 4
        layout = spec((0, "dp")).resolve(mesh, 2)
        batch = numbers(rows, 6, seed=len(found))

        def own(rank: int, batch=batch, layout=layout) -> np.ndarray:
            return ts.dist.take(batch, layout, rank)

        before = messages()
        x = ts.dist.from_local(own, layout, shape=batch.shape, dtype="bf16")
        assert messages() == before or len(found) in (0, 2), "sent for a batch like the last"
        like = ts.dist.distribute(batch, layout, "bf16")
        assert x.layout == like.layout and x.type == like.type and x.shape == like.shape
        assert all((x.parts[r].array == p.array).all() for r, p in like.parts.items())
        step = step or ts.jit(lambda x, w: ts.sum(ts.square(ts.cast(x, ts.f32) @ w)))
        assert (step(x, w).numpy() == step(like, w).numpy()).all()
        found.append(step(x, w))
    return text_of(*found)


def messages() -> int:
    """How many this rank has sent and received."""
    here = transport()
    return sum(here._sent.values()) + sum(here._received.values())


COMPARED = "products,guide_step,low_precision,drawn,vocabulary,loops,own_batches"

if __name__ == "__main__":
    run_programs(globals(), sys.argv[1], sys.argv[2])
