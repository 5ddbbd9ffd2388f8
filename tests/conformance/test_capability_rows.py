"""EX-09: the ten one-line examples of the capability table, each executed as printed. CORE-07: the
bare names that the source documents use are what a star-import binds."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from snippet import run
from tolerance import assert_close, f64


def value(expression: str, **names: object):
    """An expression of the table, in the namespace that the documents assume."""
    return run(f"made = {expression}\n", **names)["made"]


@pytest.mark.row("EX-09")
def test_execution_model():
    """tile.linear_id()"""
    k = run('@kernel\ndef k(x: Tensor["N", i32]):\n    i = tile.linear_id()\n'
            "    if i < N:\n        x[i] = i\n")["k"]
    x = np.zeros(200, np.int32)
    k(x)
    assert (x == np.arange(200)).all()


@pytest.mark.row("EX-09")
def test_ir_stack():
    """inspect_ir("tile")"""
    space = run('@kernel\ndef scale(x: Tensor["N", f32]):\n    i = tile.linear_id()\n'
                "    if i < N:\n        x[i] = 2.0 * x[i]\n")
    space["scale"](np.ones(4, np.float32))
    text = eval('inspect_ir("tile")', space)
    assert text.startswith("tile.func") and "scale" in text and text == space["scale"].inspect_ir()


@pytest.mark.row("EX-09")
def test_numerics():
    """Tensor["B","D", fp8_e4m3 @accum(fp32)]"""
    kind = value('Tensor["B","D", fp8_e4m3 @accum(fp32)]')
    assert (kind.dtype, kind.policy.accum) == (ts.fp8_e4m3, ts.f32)
    assert [str(d) for d in kind.shape] == ["B", "D"]
    f = ts.jit(_annotated(lambda x: ts.sum(x), x=kind))
    assert f(ts.full((300, 4), 1.0, "fp8_e4m3")).type.accum is ts.f32


def _annotated(fn, **annotations):
    fn.__annotations__ = annotations
    return fn


@pytest.mark.row("EX-09")
def test_autodiff(rng):
    """grad(loss_fn)(W)"""
    x, w = rng.standard_normal((5, 4)), rng.standard_normal((4, 3))
    g = value("grad(loss_fn)(W)", W=ts.tensor(w),
              loss_fn=lambda W: ts.sum(ts.tanh(ts.tensor(x) @ W)))
    assert_close(g.numpy(), x.T @ (1 - np.tanh(x @ w) ** 2), n=16)


@pytest.mark.row("EX-09")
def test_distributed_tensors(rng):
    """ShardSpec(partition=("row",), mesh_axes=("tp",))"""
    spec = value('ShardSpec(partition=("row",), mesh_axes=("tp",))')
    mesh = ts.dist.mesh(axes=("tp",), shape=(3,))
    x = rng.standard_normal((7, 2)).astype(np.float32)
    X = ts.dist.distribute(x, spec, mesh=mesh)
    assert [part.shape for part in X.parts.values()] == [(3, 2), (2, 2), (2, 2)]
    assert (X.numpy() == x).all() and (X.parts[1].numpy() == x[3:5]).all()


@pytest.mark.row("EX-09")
def test_region_privileges(rng):
    """def step(W: Region[read], Y: Region[write])"""
    step = run("@jit\ndef step(W: Region[read], Y: Region[write]):\n    Y[:] = W * 2.0\n")["step"]
    w, y = rng.standard_normal((2, 5)).astype(np.float32)
    step(w, y)
    assert (y == 2 * w).all()


@pytest.mark.row("EX-09")
def test_collectives():
    """all_gather(y_local, axis="tp")"""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))

    def program():
        y_local = ts.full((1, 2), float(ts.dist.rank()))
        return value('all_gather(y_local, axis="tp")', y_local=y_local).tolist()

    low, high = [[0, 0, 1, 1]], [[2, 2, 3, 3]]
    assert ts.dist.simulate(program, mesh) == [low, low, high, high]


@pytest.mark.row("EX-09")
def test_index_launches(rng):
    """tessera.index_launch(axis="tp")(gemm_tile)"""
    gemm_tile = run('@kernel\ndef gemm_tile(A: Tensor["M", "K", f32], B: Tensor["K", "N", f32],\n'
                    '              C: Tensor["M", "N", f32]):\n'
                    "    a = tile.load(A[tile_m:tile_m+16, tile_k:tile_k+16])\n"
                    "    b = tile.load(B[tile_k:tile_k+16, tile_n:tile_n+16])\n"
                    "    C[tile_m:tile_m+16, tile_n:tile_n+16] += tile.dot(a, b)\n")["gemm_tile"]
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float32)
    mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
    spec = ts.ShardSpec(partition=("col",), mesh_axes=("tp",))
    B, C = (ts.dist.distribute(x, spec, mesh=mesh) for x in (b, np.zeros((16, 16), np.float32)))
    with mesh:
        value('tessera.index_launch(axis="tp")(gemm_tile)', gemm_tile=gemm_tile)(
            a, B.parts("tp"), C.parts("tp"))
    assert_close(C.numpy(), f64(a) @ f64(b), n=16)


PRODUCT = """\
@kernel
def product(A: Tensor["M", "K", bf16], B: Tensor["N", "K", bf16], C: Tensor["M", "N", bf16]):
    acc = tile.zeros((128, 256))
    for k in range(0, K, 64):
        a = tile.load(A[tile_m:tile_m+128, k:k+64])
        b = tile.load(B[tile_n:tile_n+256, k:k+64])
        acc = tile.mma(a, b.T, acc)
    C[tile_m:tile_m+128, tile_n:tile_n+256] = acc
"""


@pytest.mark.row("EX-09")
def test_portability():
    """tile.mma -> wgmma"""
    require_compiler()
    k = run(PRODUCT)["product"]
    assert "wgmma.mma_async" in k.inspect_ir("ptx", target="sm_90a")
    assert "mma.sync" in k.inspect_ir("ptx", target="sm_80")


@pytest.mark.row("EX-09")
def test_deployment(rng):
    """@jit(capture_graph=True)"""
    train_step = run("@jit(capture_graph=True)\ndef train_step(w, x):\n"
                     "    return w - 0.1 * grad(lambda w: sum_of(w * x))(w)\n",
                     sum_of=ts.sum)["train_step"]
    w, x = rng.standard_normal((2, 6)).astype(np.float32)
    for _ in range(2):
        assert_close(train_step(w, x).numpy(), f64(w) - 0.1 * f64(x), n=2)
    assert train_step.capture.startswith("off: the target cpu")
    assert ts.jit(train_step.fn, capture_graph=False).capture == "off"


# --- names ------------------------------------------------------------------------------------
# Free names of the code blocks, but for builtins and what the reader is to define.
BLOCKS = {
    "000 6.2": "Tensor accum fp32 fp8_e4m3 stochastic_round",
    "000 6.3": "softmax_safe",
    "000 6.4": "Tensor accum bf16 fp32 fp8_e4m3 gemm jit",
    "000 6.5": "ShardSpec dist",
    "000 6.6": "Region gemm jit read reduce_sum",
    "000 6.8": "ShardSpec dist gemm",
    "000 6.9": "sqrt tile verify",
    "001 1.2": "tile inspect_ir Tensor fp8_e4m3 accum fp32 grad ShardSpec Region read write "
               "all_gather tessera jit",
    "001 1.4": "dist gemm",
    "002": "ts accum loss_scale stochastic_round",
    "003 modeling": "KVCache Tensor accum autodiff bf16 cast_like device f32 flash_attention gelu "
                    "gpu jit matmul prefetch residual rmsnorm_safe split_qkv",
    "003 kernel": "INF KTile KVCache accum bf16 dropout_in_kernel f32 kernel tile",
    "003 verification": "verify kernel Tile tile sqrt",
    "003 schedules": "Schedule kernel",
    "004": "ts math",
}


@pytest.mark.row("CORE-07")
@pytest.mark.parametrize("block", BLOCKS)
def test_the_names_of_each_block_are_bound(block):
    for name in BLOCKS[block].split():
        assert run(f"made = {name}\n")["made"] is not None


@pytest.mark.row("CORE-07")
def test_a_star_import_shadows_no_builtin():
    space = run("from tessera import *\n")
    assert space.get("min", builtins.min) is builtins.min
    assert not [n for n in dir(builtins) if n in space and n[0] != "_"
                and space[n] is not getattr(builtins, n)]
    exec("assert min(3, 2) == 2 and sum([1, 2]) == 3 and round(2.4) == 2", space)
