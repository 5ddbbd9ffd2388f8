"""Attention stays one op on a mesh of GPUs, on each rank's sequences and heads."""

from __future__ import annotations

from typing import Any

import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, on_ranks, values
from mesh.test_gpu_programs import gpus as gpus
from tolerance import assert_close

SPLITS = {"sequences": ("x", None, None, None), "heads": (None, "x", None, None)}


def program_of(mesh: Any, how: tuple, heads: int, keys: int, mask: Any = None) -> Any:
    """The program of attention and its gradient. how: the axes that split q, k and v."""
    layout = ts.dist.Layout(mesh, tuple(ts.dist.Split((a,) if a else ()) for a in how))
    q, k, v = (ts.dist.stand_ins(ts.Tensor[4, n, 64, 16, ts.bf16], lambda *_: layout, mesh)
               for n in (heads, keys, keys))

    def loss(q, k, v):
        return ts.sum(ts.cast(ts.attention(q, k, v, causal=True), "f32"))

    return ts.jit(ts.grad(loss, argnums=(0, 1, 2))).traced(q, k, v).program


def ops_of(program: Any) -> list[str]:
    return [step.node.op.name for step in program.made.steps if hasattr(step, "node")]


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("heads, keys", [(4, 4), (8, 2)])
def test_it_stays_whole_where_sequences_or_heads_are_split(how, heads, keys):
    program = program_of(ts.dist.mesh(DEVICES[:2], axes="x"), SPLITS[how], heads, keys)
    assert "attention_vjp" in ops_of(program) and "exp" not in ops_of(program)
    assert not program.plan  # nothing is sent


def test_it_is_opened_where_queries_are_split_and_on_hosts():
    gpus, hosts = ts.dist.mesh(DEVICES[:2], axes="x"), ts.dist.mesh(axes="x", shape=(2,))
    for mesh, how in ((gpus, (None, None, "x", None)), (hosts, SPLITS["heads"])):
        assert "attention_vjp" not in ops_of(program_of(mesh, how, 4, 4))


@pytest.mark.parametrize("heads, keys", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("how", SPLITS)
def test_it_is_that_of_one_gpu(gpus, nccl, rng, how, heads, keys):
    Q, K, V, G = values(rng, *((2, n, 20, 16) for n in (heads, keys, keys, heads)))

    def f(q, k, v, g):
        return ts.vjp(lambda *xs: ts.attention(*xs, causal=True), q, k, v)[1](g)

    want = ts.jit(f)(*(ts.tensor(a) for a in (Q, K, V, G)))

    def program(mesh):
        layout = ts.dist.Layout(mesh, tuple(ts.dist.Split((a,) if a else ())
                                            for a in SPLITS[how]))
        xs = [ts.dist.distribute(ts.tensor(a), layout, mesh=mesh) for a in (Q, K, V, G)]
        return [x.numpy() for x in ts.jit(f)(*xs)]

    for made in on_ranks(2, program):
        for mine, whole in zip(made, want, strict=True):
            assert_close(mine, whole.numpy().astype("f8"), "f32", 200)
