"""Rows DIST, NUM and EX of tensors that are split over the ranks of a mesh."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import sharded
from mesh.launch import mpirun, needs_mpi, results_of_all
from snippet import run
from tessera import dist
from tolerance import assert_close

PROGRAM = Path(sharded.__file__)


def cuda(count: int) -> list[str]:
    return [f"cuda:{i}" for i in range(count)]


PROGRAMS = [  # of mesh/sharded.py, each checks itself
    pytest.param("products", marks=pytest.mark.row("DIST-18", "DIST-19")),
    pytest.param("guide_step", marks=pytest.mark.row("DIST-20", "DIST-21", "EX-32")),
    pytest.param("low_precision", marks=pytest.mark.row("NUM-42", "DIST-24")),
    "drawn", "vocabulary", "loops", "own_batches",
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_process_gives_what_simulated_ranks_give(name):
    program = getattr(sharded, name)
    assert set(ts.dist.simulate(program, 4)) == {program()}


@needs_mpi
@pytest.mark.parametrize("name", PROGRAMS)
def test_mpirun_gives_what_one_process_gives(name):
    found = results_of_all(PROGRAM, sharded.COMPARED, 4)[name]
    assert found == dict.fromkeys(range(4), getattr(sharded, name)())


# --- making tensors --------------------------------------------------------------------------
class TestTensors:
    @pytest.mark.row("DIST-13")
    def test_split_repeated_and_reduced(self, rng):
        mesh = ts.dist.mesh(cuda(6), ("dp", "tp"), (2, 3))
        a = rng.standard_normal((4, 5)).astype(np.float32)
        whole = ts.dist.distribute(a, ts.ShardSpec(replicate=True), mesh=mesh)
        assert all((part.array == a).all() for part in whole.parts.values())
        terms = rng.integers(-9, 9, (3, 4, 5)).astype(np.float32)
        layout = ts.ShardSpec(("row",), ("dp", "tp"), reduce="sum").resolve(mesh, 2)
        held = {r: ts.tensor(terms[r % 3, 2 * (r // 3):2 * (r // 3) + 2]) for r in range(6)}
        x = dist.DistTensor(held, (4, 5), held[0].type, layout)
        settle = ts.jit(lambda x: ts.shard(x, ts.ShardSpec(("row",), ("dp",))))
        assert (settle(x).numpy() == terms.sum(0)).all()
        assert [c.op for c in settle.plan] == ["all_reduce"]
        assert ((x * 2.0).numpy() == 2 * terms.sum(0)).all()

    @pytest.mark.row("DIST-14", "DIST-16", "DIST-17")
    @pytest.mark.parametrize("batch", [1, 5, 64])
    def test_global_shape_and_local_parts(self, batch):
        def program():
            mesh = ts.dist.mesh(cuda(4), ("dp",), (4,))
            x = dist.tensor(shape=(batch, 12), layout=ts.ShardSpec(("row",), ("dp",)), mesh=mesh,
                            dtype="bf16")
            assert x.shape == (batch, 12) and x.local.dtype is ts.bf16 and not x.local.array.any()
            return x.local.shape[0]

        rows = ts.dist.simulate(program, 4)
        assert sum(rows) == batch and max(rows) - min(rows) <= 1

    @pytest.mark.row("DIST-15")
    def test_8192_columns_over_nine(self, rng):
        mesh = ts.dist.mesh(cuda(9), ("tp",), (9,))
        a = rng.standard_normal((3, 8192)).astype(np.float32)
        x = ts.dist.distribute(a, ts.ShardSpec(("col",), ("tp",)), mesh=mesh)
        assert [x.parts[r].shape[1] for r in range(9)] == [911, 911, *[910] * 7]
        assert (x.numpy() == a).all()
        whole = ts.jit(lambda x: ts.shard(x * 1.0, ts.ShardSpec(replicate=True)))(x)
        assert all((part.array == a).all() for part in whole.parts.values())
        rows = ts.shard(x, ts.ShardSpec(("row",), ("tp",)))
        assert (rows.numpy() == a).all() and rows.parts[8].shape == (0, 8192)

    @pytest.mark.row("NUM-41")
    def test_a_type_that_depends_on_the_rank(self):
        for text in ts.dist.simulate(sharded.policies, 4):
            assert "ranks 0, 2, 3: dist.tensor(type=fp6_e3m2 @accum(f32)" in text
            assert "rank 1: dist.tensor(type=fp6_e3m2 @accum(bf16)" in text

    @needs_mpi
    @pytest.mark.row("NUM-41")
    def test_under_mpirun_every_rank_is_told(self, tmp_path):
        made = mpirun(3, "policies", tmp_path, battery=PROGRAM)
        assert made.status == 0 and made.seconds < 30, made.text
        assert len(made.results) == 3 and len(set(made.results.values())) == 1
        assert "the ranks make different tensors" in made.results[0]


# --- what is inserted ------------------------------------------------------------------------
class TestProducts:
    @pytest.mark.row("DIST-27")
    def test_two_products_of_tensor_parallelism_are_reduced_once(self, rng):
        mesh = ts.dist.mesh(cuda(6), ("dp", "tp"), (2, 3))
        shapes = {"x": (200, 24), "w1": (24, 96), "w2": (96, 24)}
        a = {k: rng.standard_normal(s).astype(np.float32) / 5 for k, s in shapes.items()}
        at = {"x": sharded.spec((0, "dp")), "w1": sharded.spec((1, "tp")),
              "w2": sharded.spec((0, "tp"))}
        d = {k: ts.dist.distribute(v, at[k], mesh=mesh) for k, v in a.items()}

        def loss(x, w1, w2):
            return ts.mean(ts.square(x + ts.gelu(x @ w1) @ w2))

        step = ts.jit(ts.value_and_grad(loss, argnums=(0, 1, 2)))
        plain, want = ts.value_and_grad(loss, argnums=(0, 1, 2))(*a.values())
        value, grads = step(*d.values())
        plan = [(c.op, c.axes) for c in step.plan]
        # forwards, of x backwards, and of both weights with the loss
        assert plan.count(("all_reduce", ("tp",))) == 2 and len(plan) == 3, step.plan
        assert plan.count(("all_reduce", ("dp",))) == 1
        assert_close(np.asarray(value.numpy()), plain.numpy(), dtype="f32", n=64)
        for g, w, k in zip(grads, want, shapes, strict=True):
            assert g.layout == d[k].layout
            assert_close(g.numpy(), w.numpy(), dtype="f32", n=96)


# --- snippets --------------------------------------------------------------------------------
FP6 = '''\
W = dist.tensor(
    shape=(8192,8192),
    layout=ShardSpec(partition=("col",), mesh_axes=("tp",)),
    mesh=mesh,
    dtype="fp6 @accum(fp32)"
)
'''
GEMM = '''\
mesh = dist.mesh(devices=[f"cuda:{i}" for i in range(72)], axes=("dp","tp"), shape=(8,9))

X = dist.tensor(shape=(B, D),
    layout=ShardSpec(partition=("row",), mesh_axes=("dp",)),
    mesh=mesh, dtype="fp6 @accum(fp32)")

W = dist.tensor(shape=(D, K),
    layout=ShardSpec(partition=("col",), mesh_axes=("tp",)),
    mesh=mesh, dtype="fp6 @accum(fp32)")

Y = gemm(X, W)   # FP6 storage, FP32 accum, distributed across dp/tp
'''
TEASER = '''\
from tessera import dist

# Create a 72-GPU mesh: 4 (dp) × 9 (tp) × 2 (pp)
mesh = dist.mesh(
    devices=[f"cuda:{i}" for i in range(72)],
    axes=("dp","tp","pp"),
    shape=(4,9,2)
)

# Shard weights across tensor-parallel axis
W = dist.tensor(
    shape=(8192, 8192),
    layout=dist.ShardSpec(partition=("col",), mesh_axes=("tp",)),
    mesh=mesh,
    dtype="fp8_e4m3"
)

# Compute a distributed matmul
Y = gemm(X, W)   # compiler inserts all_gather/reduce_scatter on TP shards
'''
MESHES = '''\
# Create various mesh configurations
# Data parallel mesh
dp_mesh = ts.dist.mesh(
    devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
    axes=("dp",),
    shape=(4,)
)

# Tensor parallel mesh
tp_mesh = ts.dist.mesh(
    devices=["cuda:0", "cuda:1"],
    axes=("tp",),
    shape=(2,)
)

# Hybrid mesh (DP + TP + PP)
hybrid_mesh = ts.dist.mesh(
    devices=[f"cuda:{i}" for i in range(16)],
    axes=("dp", "tp", "pp"),
    shape=(4, 2, 2)  # 4-way DP, 2-way TP, 2-way PP
)
'''
SHARDING = '''\
# Different sharding strategies
# Column sharding for tensor parallelism
W_col = ts.dist.tensor(
    shape=(8192, 8192),
    layout=ts.ShardSpec(
        partition=("col",),    # Partition along columns
        mesh_axes=("tp",)      # Map to tensor parallel axis
    ),
    mesh=tp_mesh,
    dtype="bf16"
)

# Row sharding for data parallelism
X_row = ts.dist.tensor(
    shape=(batch_size, 8192),
    layout=ts.ShardSpec(
        partition=("row",),    # Partition along rows
        mesh_axes=("dp",)      # Map to data parallel axis
    ),
    mesh=dp_mesh,
    dtype="bf16"
)

# 2D sharding
W_2d = ts.dist.tensor(
    shape=(8192, 8192),
    layout=ts.ShardSpec(
        partition=("row", "col"),  # 2D partitioning
        mesh_axes=("dp", "tp")), mesh=hybrid_mesh, dtype="bf16")
'''
TRAINING = '''\
# Create mesh for distributed execution
mesh = ts.dist.mesh(
    devices=[f"cuda:{i}" for i in range(8)],
    axes=("dp", "tp"),  # Data parallel and tensor parallel
    shape=(4, 2)        # 4-way DP, 2-way TP
)

# Distributed tensor with sharding
W = ts.dist.tensor(
    shape=(8192, 8192),
    layout=ts.ShardSpec(partition=("col",), mesh_axes=("tp",)),
    mesh=mesh,
    dtype="bf16 @accum(f32)"  # BF16 storage, FP32 accumulation
)

@ts.jit
@ts.autodiff
def train_step(x, y, W):
    """Training step with automatic gradient computation"""
    pred = ts.gemm(x, W)  # Automatically handles TP sharding
    loss = ts.mse(pred, y)
    return loss

# Gradients automatically handle distributed communication
grad_W = ts.grad(train_step)(x, y, W)
'''


def filled(d: dist.DistTensor, seed: int) -> None:
    """Random values in place of zeros: the same on all ranks."""
    d[:] = np.random.default_rng(seed).standard_normal(d.shape).astype(np.float32)


@pytest.mark.row("EX-04")
def test_fp6_weights_of_the_guide():
    mesh = ts.dist.mesh(axes=("tp",), shape=(9,))
    W = run(FP6, mesh=mesh)["W"]
    sizes = [W.parts[r].shape[1] for r in range(9)]
    assert sum(sizes) == 8192 and {n % 4 for n in sizes} == {0} and max(sizes) - min(sizes) == 4
    for r, n in enumerate(sizes):
        assert W.parts[r].nbytes == 8192 * n * 3 // 4
    assert W.nbytes == 8192 * 8192 * 3 // 4

    def program():
        W = run(FP6.replace("8192", "512"), mesh=ts.dist.mesh(axes=("tp",), shape=(4,)))["W"]
        return W.local.nbytes

    assert ts.dist.simulate(program, 4) == [512 * 128 * 3 // 4] * 4



@pytest.mark.row("EX-06", "DIST-19")
def test_fp6_gemm_on_72_ranks():
    """In one process, and on 72 simulated ranks."""
    def program():
        space = run(GEMM, B=24, D=32, K=76)
        X, W = space["X"], space["W"]
        filled(X, 1)
        filled(W, 2)
        gemm = ts.jit(lambda x, w: ts.gemm(x, w))
        Y = gemm(X, W)
        assert len(gemm.plan) == 0 and Y.layout.describe() == "(dp, tp by 4)"
        want = ts.gemm(ts.cast(ts.tensor(X.numpy().astype(np.float32)), X.type),
                       ts.cast(ts.tensor(W.numpy().astype(np.float32)), W.type))
        assert Y.type == want.type
        assert_close(Y.numpy(), want.numpy(), dtype="fp6_e3m2", n=32)
        return Y.local.shape

    assert program() == (3, 12)
    shapes = ts.dist.simulate(program, 72)
    assert [shapes[r][1] for r in range(9)] == [12] + [8] * 8
    assert sum(shapes[9 * r][0] for r in range(8)) == 24


@needs_mpi
@pytest.mark.row("EX-06")
@pytest.mark.parametrize("ranks", [6, pytest.param(72, marks=pytest.mark.skipif(
    not os.environ.get("TESSERA_SLOW"), reason="a minute of two cores: TESSERA_SLOW=1"))])
def test_fp6_gemm_under_mpirun(ranks, tmp_path):
    made = mpirun(ranks, "fp6_gemm", tmp_path, timeout_s=170, battery=PROGRAM)
    assert made.status == 0, made.text
    assert len(made.results) == ranks and set(made.results.values()) == {sharded.fp6_gemm()}


@pytest.mark.row("EX-08")
@pytest.mark.parametrize("layout", [(), ((0, "dp"),), ((1, "tp"),)])
def test_teaser_of_the_guide(layout):
    """With 82 for 8192, which nine do not divide either."""
    mesh = ts.dist.mesh(cuda(72), ("dp", "tp", "pp"), (4, 9, 2))
    x = np.random.default_rng(3).standard_normal((10, 82)).astype(np.float32)
    X = ts.dist.distribute(x, sharded.spec(*layout), "fp8_e4m3", mesh=mesh)
    space = run(TEASER.replace("8192", "82"), X=X)
    W = space["W"]
    filled(W, 4)
    Y = space["gemm"](X, W)
    wide = X.numpy().astype(np.float64) @ W.numpy().astype(np.float64)
    assert_close(Y.numpy(), wide, dtype="fp8_e4m3", n=2)
    assert Y.layout.axes_of(1) == ("tp",)


@pytest.mark.row("EX-22", "EX-23")
def test_meshes_and_layouts_of_the_guide():
    space = run(MESHES)
    meshes = [space[k] for k in ("dp_mesh", "tp_mesh", "hybrid_mesh")]
    assert [m.size() for m in meshes] == [4, 2, 16]
    names = {k: space[k] for k in ("dp_mesh", "tp_mesh", "hybrid_mesh")}
    made = run(SHARDING.replace("8192", "1024"), batch_size=30, **names)
    assert {p.shape for p in made["W_col"].parts.values()} == {(1024, 512)}
    assert [made["X_row"].parts[r].shape for r in range(4)] == [
        (8, 1024), (8, 1024), (7, 1024), (7, 1024)]
    assert {p.shape for p in made["W_2d"].parts.values()} == {(256, 512)}
    assert all(made[k].dtype is ts.bf16 for k in ("W_col", "X_row", "W_2d"))


@pytest.mark.row("EX-32")
def test_training_step_of_the_guide(rng):
    """With 30 for 8192, in one process and on 8 simulated ranks."""
    x, y = rng.standard_normal((12, 30)), rng.standard_normal((12, 30))
    x, y = x.astype(np.float32), y.astype(np.float32)

    def program():
        space = run(TRAINING.replace("8192", "30"), x=ts.tensor(x), y=ts.tensor(y))
        W, step = space["W"], space["train_step"]
        assert space["grad_W"].layout == W.layout
        filled(W, 5)
        grad = ts.grad(step)(ts.tensor(x), ts.tensor(y), W)  # of the tensor that is distributed
        whole = W.numpy().astype(np.float64)
        want = 2 / (12 * 30) * x.T @ (x @ whole - y)
        assert grad.layout == W.layout and grad.shape == W.shape
        scale = float(np.abs(want).max())
        assert_close(grad.numpy(), want, dtype="bf16", n=12, scale=scale)
        return grad.local.shape

    assert program() == (30, 15)
    assert set(ts.dist.simulate(program, 8)) == {(30, 15)}
