"""Plans: memory, FLOPs, collectives and time against hand counts and published figures."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera import Tensor
from tessera.__main__ import main
from tessera.graph.simplify import simplify
from tessera.planning.fabric import fabric
from tessera.planning.flops import bytes_of, count_graph, peak_memory
from tessera.planning.planner import bubble
from tessera.planning.table_text import better_order
from tessera.planning.transformer import (
    MODELS,
    Training,
    layer_activations,
    memory_of,
    model,
    plan_transformer,
    split_of,
)

S = ts.ShardSpec
ACCEPT = os.environ.get("TESSERA_ACCEPT", "") == "1"
GB = 1e9


def grid(topology: str | None = None, **axes: int):
    return ts.dist.mesh(axes=tuple(axes), shape=tuple(axes.values()), topology=topology)


def graph_of(f, *types):
    return simplify(ts.jit(f).graph(*types))


def matmuls_of(graph) -> dict[str, float]:
    found: dict[str, float] = {}
    for work in count_graph(graph):
        for dtype, count in work.matmuls:
            found[dtype.name] = found.get(dtype.name, 0) + work.times * count
    return found


# --- FLOPs and bytes of a graph ------------------------------------------------------------------
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_a_matmul_and_its_gradients_are_6mnk(m, k, n):
    def f(x, w):
        return ts.sum(x @ w)

    graph = graph_of(ts.grad(f, argnums=(0, 1)), Tensor[m, k, ts.f32], Tensor[k, n, ts.f32])
    assert matmuls_of(graph) == {"f32": 4.0 * m * n * k}  # the matmul itself is not needed
    both = graph_of(ts.value_and_grad(lambda x, w: ts.sum(ts.square(x @ w)), argnums=(0, 1)),
                    Tensor[m, k, ts.f32], Tensor[k, n, ts.f32])
    assert matmuls_of(both) == {"f32": 6.0 * m * n * k}


def test_batched_products_and_narrow_operands():
    graph = graph_of(lambda a, b: a @ b, Tensor[3, 5, 7, ts.bf16], Tensor[3, 7, 2, ts.bf16])
    assert matmuls_of(graph) == {"bf16": 2.0 * 3 * 5 * 7 * 2}
    mixed = graph_of(lambda a, b: ts.cast(a, ts.f32) @ b, Tensor[5, 7, ts.bf16],
                     Tensor[7, 2, ts.f32])
    assert matmuls_of(mixed) == {"f32": 140.0}


def test_a_scan_counts_as_often_as_it_runs():
    def f(w, x):
        return ts.scan(lambda c, _: (c @ w, None), x, None, length=6)[0]

    assert matmuls_of(graph_of(f, Tensor[4, 4, ts.f32], Tensor[2, 4, ts.f32])) == {
        "f32": 6 * 2.0 * 2 * 4 * 4}


def test_attention_is_counted_as_it_is_written_out():
    """Scores and values: 4 S T D for each head; causal blocks see all of a block's keys."""
    graph = graph_of(lambda q, k, v: ts.attention(q, k, v), *[Tensor[2, 3, 16, 8, ts.f32]] * 3)
    assert matmuls_of(graph) == {"f32": 2 * 3 * 4.0 * 16 * 16 * 8}


def test_ring_attention_by_hand():
    """A rank's 16 of 64 rows with all of them: 2 S T (D + Dv) for each of 2 x 3 heads; causal half
    of it. Of the whole, four times as much."""
    mesh = grid("8xh200", sp=4)
    q = ts.dist.stand_in((2, 3, 64, 8), S((2,), ("sp",)), mesh)
    for causal in (False, True):
        def attend(q, k, v, causal=causal):
            return ts.ring_attention(q, k, v, axis="sp", causal=causal)

        planned = ts.dist.plan_report(attend, q, q, q)
        counted = sum(n for w in planned.works for _, n in w.matmuls)
        assert counted == 2 * 3 * 2.0 * 16 * 64 * 16 * (0.5 if causal else 1)
        assert planned.ideal_us == pytest.approx(1e6 * counted / planned.device.peak(ts.f32))
        assert any(e.op == "permute" and e.axes == ("sp",) for e in planned.exchanges)


@pytest.mark.parametrize("f, shape, moved", [
    (lambda x: ts.exp(x) * 2 + 1, (64, 32), 2 * 64 * 32 * 4),            # one loop: read, write
    (lambda x: ts.sum(x, axis=1), (64, 32), 64 * 32 * 4 + 64 * 4),
    (lambda x: ts.reshape(x, (32, 64)), (64, 32), 0),                    # a view
    (lambda x: ts.take(x, ts.tensor([1, 5]), axis=0), (64, 32), 2 * 2 * 32 * 4 + 2 * 8),
])
def test_bytes_by_hand(f, shape, moved):
    assert sum(w.bytes for w in count_graph(graph_of(f, Tensor[(*shape, ts.f32)]))) == moved


def test_operations_of_matrix_functions():
    """n^3 / 3 of a Cholesky factor, 5 n log2 n of a complex transform (half for a real one)."""
    def total(f, *shape):
        return sum(w.flops for w in count_graph(graph_of(f, Tensor[(*shape, ts.f32)])))

    assert total(ts.cholesky, 30, 30) == pytest.approx(30**3 / 3)
    assert total(ts.rfft, 4, 64) == pytest.approx(4 * 2.5 * 64 * 6)


def test_symbols_have_no_plan():
    with pytest.raises(ts.ArgumentError, match="a plan needs extents"):
        count_graph(graph_of(lambda x: x @ x.T, Tensor["N", 4, ts.f32]))


def test_packed_bytes():
    assert bytes_of((3, 5), ts.fp4_e2m1) == 3 * 3 and bytes_of((2, 5), ts.fp6_e3m2) == 2 * 6
    assert bytes_of((), ts.f32) == 4 and bytes_of((2, 3), ts.f64) == 48


# --- memory of a graph ---------------------------------------------------------------------------
def test_peak_memory_by_hand():
    """Inputs stay. At the second matmul h, of 64 KiB, is read last, and y, of 16 KiB, written."""
    def f(x, w1, w2):
        return (x @ w1) @ w2

    graph = graph_of(f, Tensor[32, 64, ts.f32], Tensor[64, 512, ts.f32], Tensor[512, 128, ts.f32])
    roles = dict(zip(graph.inputs, ("data", "parameters", "parameters"), strict=True))
    held = peak_memory(graph, roles)
    assert held.bytes == {"data": 32 * 64 * 4, "parameters": (64 * 512 + 512 * 128) * 4,
                          "workspace": (32 * 512 + 32 * 128) * 4}
    assert held.total == sum(held.bytes.values()) and "(x @ w1) @ w2" in str(held.where)


def test_what_backward_needs_is_kept():
    """h w, layer on layer: each keeps its operand [M, D] and has a weight [D, D]. Its gradient is
    made when that operand goes, so the peak grows by an operand and a weight."""
    M, D = 1000, 16

    def peak(layers: int) -> int:
        def loss(ws):
            h = ts.ones((M, D))
            for w in ws:
                h = h @ w
            return ts.sum(ts.square(h))

        graph = graph_of(ts.grad(loss), [Tensor[D, D, ts.f32]] * layers)
        return peak_memory(graph, dict.fromkeys(graph.inputs, "parameters")).total

    assert peak(9) - peak(5) == 4 * (M * D + D * D) * 4


def test_an_update_is_written_over_its_argument():
    graph = graph_of(lambda w, g: w - 0.1 * g, Tensor[256, ts.f32], Tensor[256, ts.f32])
    roles = dict(zip(graph.inputs, ("parameters", "data"), strict=True))
    assert peak_memory(graph, roles).total == 2 * 256 * 4


# --- transformers --------------------------------------------------------------------------------
@pytest.mark.parametrize("name, count", [
    ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("7b", 6_738_415_616),
    ("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)])
def test_published_numbers_of_parameters(name, count):
    """Of the checkpoints: openai/gpt-2, meta-llama/Llama-2-7b, Llama-3.1-8B, -70B, -405B."""
    assert MODELS[name].count == count
    assert MODELS[name].source


def test_parameters_agree_with_a_model():
    """Those of examples/train.py with a gated feed-forward part: no biases, tied embedding."""
    m = model(layers=3, d=64, heads=4, vocab=256, ffn=192, gated=True, tied=True)
    block = 64 + 64 * 192 + 64 * 64 + 64 + 64 * 2 * 192 + 192 * 64
    assert m.count == 256 * 64 + 3 * block + 64


def test_flops_of_a_token():
    """860 MFLOP of GPT-2 with T = 1024 [6 N + 12 L d T]; and Narayanan et al. 2021, eq. 3 without
    recomputation, 72 B s l h^2 (1 + s / 6h + V / 12 l h)."""
    assert MODELS["gpt2"].token_flops() == pytest.approx(860e6, rel=1e-3)
    for m in (MODELS["gpt3"], MODELS["gpt2-xl"]):
        s, layers, h, v = m.T, m.layers, m.d, m.vocab
        theirs = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        assert m.token_flops() == pytest.approx(theirs, rel=5e-3)


@pytest.mark.parametrize("zero, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_state_of_zero(zero, gigabytes):
    """7.5 billion parameters over 64 ranks: Rajbhandari et al. 2020, figure 1."""
    m = model(layers=36, d=4096, heads=32, vocab=32000, params=7.5e9)
    how = Training(B=64, zero=zero)
    held = memory_of(m, split_of(m, grid(dp=64), how), how)
    state = sum(held[r] for r in ("parameters", "gradients", "optimizer"))
    assert state == pytest.approx(gigabytes * GB, rel=0.015)  # the figure has two digits


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sequence, flash", [(False, False), (True, False), (False, True)])
def test_activations_of_a_gpt_layer(t, sequence, flash):
    """s b h (10 + 24/t + 5 a s / (h t)), or (34 + 5 a s / h) / t with the sequence split:
    Korthikanti et al. 2022, section 4; less 2 s b h of masks, of the dropouts outside attention."""
    m = MODELS["gpt3"]
    how = Training(B=3, sequence=sequence, flash=flash)
    s, b, h, a = m.T, 3, m.d, m.heads
    scores = 0 if flash else 5 * a * s / h / t
    whole = 8 / t if sequence else 8
    got = layer_activations(m, split_of(m, grid(tp=t), how), how)
    assert got == pytest.approx(s * b * h * (whole + 24 / t + scores))


def test_uneven_heads_count_by_the_busiest_rank():
    """64 heads in groups of 8 over 9 ranks: 8 heads at most, of two groups where they straddle."""
    s = split_of(MODELS["70b"], grid(dp=8, tp=9), Training(B=8))
    assert (s.heads, s.kv_heads, s.ffn, s.vocab) == (8, 2, 3186, 14251)
    even = split_of(MODELS["70b"], grid(tp=8), Training(B=8))
    assert (even.heads, even.kv_heads, even.ffn) == (8, 1, 3584)


def simulated_bubble(p: int, m: int) -> float:
    """GPipe, each microbatch 1 forward and 2 backward: part of the time in which ranks wait."""
    forward = np.zeros((p, m))
    for i in range(p):
        for j in range(m):
            ready = [forward[i - 1, j]] if i else []
            ready += [forward[i, j - 1]] if j else []
            forward[i, j] = max(ready, default=0) + 1
    backward = np.zeros((p, m))
    for i in reversed(range(p)):
        for j in range(m):
            ready = [backward[i + 1, j]] if i < p - 1 else []
            ready += [backward[i, j - 1]] if j else [forward[i, m - 1]]
            backward[i, j] = max(ready, default=0) + 2
    return 1 - 3 * m / backward.max()


@pytest.mark.parametrize("p, m", [(1, 4), (2, 1), (4, 8), (3, 5)])
def test_the_bubble_is_that_of_a_played_schedule(p, m):
    assert bubble(p, m) == pytest.approx(simulated_bubble(p, m))


def test_bubbles():
    """(p-1) / m of the ideal time, and 1/v of that in chunks: Narayanan et al. 2021, 2.2."""
    for chunks in (1, 2, 4):
        idle = bubble(8, 16, chunks)
        assert idle / (1 - idle) == pytest.approx(7 / (16 * chunks))
    with pytest.raises(ts.ArgumentError, match="at least 1"):
        bubble(0, 4)


@pytest.mark.parametrize("name, given, published_s", [
    ("7b", {"B": 16, "zero": 3}, 0.721),    # NVIDIA/JAX-Toolbox: MaxText, Llama 2 7B, bf16, FSDP
    ("gpt2", {"B": 512, "zero": 1}, 0.140),   # llm.c: 124M, 524,288 tokens a step
])
def test_steps_published_for_eight_h100(name, given, published_s):
    """The model is of good kernels without gaps: it may be quicker than what was measured, by a
    third at most, and not slower."""
    planned = plan_transformer(model(name), grid(dp=8), "8xh100", **given)
    assert 0.67 < planned.step_us * 1e-6 / published_s <= 1.0


def test_a_plan_of_the_rack():
    planned = plan_transformer(model("70b"), grid(dp=8, tp=9), "nvl72", B=64, microbatches=8,
                               zero=1)
    assert planned.fits and 0.2 < planned.mfu < 0.7
    sums = next(e for e in planned.exchanges if e.why.startswith("sums"))
    assert (sums.count, sums.bytes) == (4 * 80 * 8, 2 * 8192 * 8192)  # 4 a layer and microbatch
    assert sums.us == fabric("nvl72").time("all_reduce", sums.bytes, planned.mesh, "tp").us
    full = plan_transformer(model("70b"), planned.mesh, "nvl72", B=64, microbatches=8)
    assert not full.fits and "does not fit" in str(full)
    assert full.memory["optimizer"] == pytest.approx(8 * planned.memory["optimizer"])
    assert planned.exchanged_bytes("tp") > planned.exchanged_bytes("dp") > 0


def test_a_plan_says_when_another_order_of_axes_is_faster():
    wide = plan_transformer(model("8b"), grid(tp=8, dp=4), "infiniband", B=4)
    near = plan_transformer(model("8b"), grid(dp=4, tp=8), "infiniband", B=4)
    assert "axis tp: 8 ranks over 4 domains of 8" in str(wide)
    assert "faster: the axes as dp, tp: exchanges" in str(wide) and "faster" not in str(near)
    axes, us = better_order(wide)
    assert axes == near.mesh.axes and near.step_us < 0.6 * wide.step_us
    assert us == pytest.approx(sum(e.total_us for e in near.exchanges if not e.hidden))


def test_pipelines_recomputation_and_overlap():
    base = plan_transformer(model("70b"), grid(pp=4, tp=2), "8xh200", B=8, microbatches=8)
    idle = next(p for p in base.parts if p.name == "bubble")
    rest = sum(p.us for p in base.parts if p.name not in ("bubble", "update"))
    assert idle.us / (idle.us + rest) == pytest.approx(3 / 11)
    remat = plan_transformer(model("70b"), base.mesh, "8xh200", B=8, microbatches=8, remat=True)
    assert remat.memory["activations"] < base.memory["activations"] / 5
    assert remat.step_us > 1.2 * base.step_us and remat.mfu < base.mfu
    gpipe = plan_transformer(model("70b"), base.mesh, "8xh200", B=8, microbatches=8,
                             schedule="gpipe")
    assert gpipe.memory["activations"] == 2 * base.memory["activations"]
    slow = plan_transformer(model("8b"), grid(dp=8), "pcie", B=8, overlap=False)
    assert slow.step_us > plan_transformer(model("8b"), grid(dp=8), "pcie", B=8).step_us


def test_what_was_split_for_the_sequence_costs_the_same_bytes():
    plans = [plan_transformer(model("8b"), grid(tp=8), "8xh200", B=1, sequence=s)
             for s in (False, True)]
    sent = [sum(e.bytes * e.count * (2 if e.op == "all_reduce" else 1) for e in p.exchanges
                if e.bytes > 1e6) for p in plans]
    assert sent[0] == sent[1]
    assert plans[1].memory["activations"] < plans[0].memory["activations"]


@pytest.mark.parametrize("make, error, words", [
    (lambda: model("70x"), ts.ArgumentError, "did you mean '70b'"),
    (lambda: model("70b", layer=3), ts.ArgumentError, "did you mean 'layers'"),
    (lambda: model(layers=3), ts.ArgumentError, "needs d, heads, vocab"),
    (lambda: model(layers=3, d=10, heads=4, vocab=9), ts.ArgumentError, "each divides"),
    (lambda: model(layers=0, d=8, heads=4, vocab=9), ts.ArgumentError, "layers=0"),
    (lambda: plan_transformer(model("8b"), grid(dp=2, xp=2), B=4), ts.AxisError, "'xp'"),
    (lambda: plan_transformer(model("8b"), grid(dp=4), B=3), ts.ArgumentError, "B=3 sequences"),
    (lambda: plan_transformer(model("8b"), grid(tp=64), B=3), ts.ArgumentError, "tp <= 32"),
    (lambda: plan_transformer(model("8b"), grid(pp=64), B=64), ts.ArgumentError, "pp <= 32"),
    (lambda: Training(zero=4), ts.ArgumentError, "0, 1, 2 and 3"),
    (lambda: Training(schedule="gpip"), ts.ArgumentError, "did you mean 'gpipe'"),
    (lambda: Training(B=0), ts.ArgumentError, "at least 1"),
])
def test_mistakes_say_what_was_asked(make, error, words):
    with pytest.raises(error) as info:
        make()
    assert words in str(info.value), str(info.value)


# --- programs ------------------------------------------------------------------------------------
MESH = grid("8xh200", dp=2, tp=4)


def mlp(w1, w2, x):
    """A step of gradient descent on a feed-forward layer."""
    def loss(w1, w2):
        return ts.mean(ts.square(ts.relu(x @ w1) @ w2))

    value, (g1, g2) = ts.value_and_grad(loss, argnums=(0, 1))(w1, w2)
    return w1 - 0.1 * g1, w2 - 0.1 * g2, value


def mlp_types(M: int = 64, D: int = 32, H: int = 128, mesh=MESH) -> tuple:
    return (ts.dist.stand_in((D, H), S(("col",), ("tp",)), mesh, param=True),
            ts.dist.stand_in((H, D), S(("row",), ("tp",)), mesh, param=True),
            ts.dist.stand_in((M, D), S(("row",), ("dp",)), mesh))


@pytest.mark.row("DIST-47")
def test_a_plan_has_the_collectives_of_a_split_layer():
    """Megatron's: one sum over tp forward, of [M/dp, D]; gradients over dp, of a rank's part."""
    planned = ts.dist.plan_report(mlp, *mlp_types())
    sizes = sorted((e.op, e.axes, e.bytes) for e in planned.exchanges if e.bytes > 64)
    part = 32 * 128 * 4 / 4
    assert ("all_reduce", ("tp",), 32 * 32 * 4) in sizes
    over_dp = [size for op, axes, size in sizes if (op, axes) == ("all_reduce", ("dp",))]
    assert sum(over_dp) == 2 * part + 4  # and the loss, which travels with them
    for e in planned.exchanges:
        assert e.us == fabric("8xh200").time(e.op, e.bytes, MESH, e.axes).us
    assert planned.exchange_us == pytest.approx(next(
        p.us for p in planned.parts if p.name == "exchanges"))


def test_memory_of_a_rank_is_that_of_its_parts():
    planned = ts.dist.plan_report(mlp, *mlp_types())
    assert planned.memory["parameters"] == 2 * 32 * 128 * 4 / 4
    assert planned.memory["data"] == 64 * 32 * 4 / 2
    alone = ts.dist.plan_report(mlp, *mlp_types(mesh=grid("8xh200", dp=1, tp=1)))
    assert alone.memory["parameters"] == 2 * 32 * 128 * 4 and not alone.exchanges


def test_work_is_divided_and_mfu_counts_the_whole():
    """All matmuls split over both axes: a rank has an eighth, and repeats nothing."""
    planned = ts.dist.plan_report(mlp, *mlp_types(512, 512, 2048))
    whole = 5 * 2.0 * 512 * 512 * 2048  # x's gradient is not asked for
    assert sum(n for w in planned.works for _, n in w.matmuls) == whole / 8
    peak = planned.device.peak(ts.f32)
    assert planned.ideal_us == pytest.approx(1e6 * whole / 8 / peak)
    assert 0 < planned.mfu < planned.device.matmul_efficiency


def test_a_tree_of_stand_ins():
    """By one layout, or one for each path; ts.params stay so, what is no tensor stays."""
    params = {"w": ts.param(ts.ones((8, 4))), "n": 3, "b": [Tensor[8, ts.f32]]}
    made = ts.dist.stand_ins(params, S(("row",), ("dp",)), MESH)
    assert made["n"] == 3 and made["w"].is_param and made["w"].layout.parts(0) == 2
    by_path = ts.dist.stand_ins(
        params, lambda path, t: S(("row",), ("tp",)) if path == "b.0" else S(), MESH)
    assert by_path["b"][0].layout.parts(0) == 4 and by_path["w"].layout.is_replicated
    assert by_path["b"][0].mesh == MESH


def test_the_longest_units_are_named_with_their_work():
    planned = ts.dist.plan_report(mlp, *mlp_types(512, 512, 2048))
    rows = str(planned).partition("\nlongest\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert rows[0].split()[0] == "matmul" and "test_planner.py" in rows[0]
    counted = [w for w in planned.works if w.name == "matmul"]
    assert all(w.flops == 2.0 * 256 * 512 * 512 for w in counted) and len(counted) == 5
    assert len(rows) == 5


def test_uneven_extents_count_by_the_first_rank():
    mesh = grid("nvl72", tp=9)
    w = ts.dist.stand_in((16, 8192), S(("col",), ("tp",)), mesh, "bf16", param=True)
    x = ts.dist.stand_in((4, 16), None, mesh, "bf16")
    planned = ts.dist.plan_report(lambda w, x: x @ w, w, x)
    assert planned.memory["parameters"] == 16 * 911 * 2
    assert planned.works[0].matmuls == ((ts.bf16, 2.0 * 4 * 16 * 911),)


def test_nothing_is_allocated():
    """5 GB of weights and 2 GB of activations."""
    mesh = grid("nvl72", dp=8, tp=9)
    types = mlp_types(1 << 15, 1 << 13, 9 << 13, mesh)
    tracemalloc.start()
    planned = ts.dist.plan_report(mlp, *types)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert planned.memory_bytes > 0.5 * GB and peak < 100e6


def test_roles_of_a_training_step():
    """The first argument that comes back is the parameters, others are the optimizer's."""
    def step(params, state, x, lr):
        loss, grads = ts.value_and_grad(lambda p: ts.sum(ts.square(x @ p["w"])))(params)
        state = {"m": state["m"] * 0.9 + grads["w"]}
        return {"w": params["w"] - lr * state["m"]}, state, loss

    w = Tensor[64, 8, ts.f32]
    held = ts.dist.plan_report(step, {"w": w}, {"m": w}, Tensor[4, 64, ts.f32],
                               Tensor[(ts.f32,)]).memory
    assert held["parameters"] == held["optimizer"] == 64 * 8 * 4
    assert held["data"] == 4 * 64 * 4 + 4


def test_collectives_called_by_hand_are_planned():
    mesh = grid("nvl72", tp=4)

    def program():
        with mesh:
            def local(x, w):
                return ts.all_reduce(x @ w, axis="tp")

            return ts.dist.plan_report(local, Tensor[8, 16, ts.f32], Tensor[16, 32, ts.f32])

    planned = ts.dist.simulate(program, mesh)[0]
    assert [(e.op, e.axes, e.bytes) for e in planned.exchanges] == [
        ("all_reduce", ("tp",), pytest.approx(8 * 32 * 4))]


# --- how it looks --------------------------------------------------------------------------------
def test_the_picture_is_a_page_of_its_own():
    planned = plan_transformer(model("8b"), grid(dp=2, tp=4), "8xh200", B=4, zero=1)
    page = planned.html()
    assert "<script" not in page and "src=" not in page and str(planned.fabric.name) in page
    picture = planned.show()
    assert str(picture) == str(planned) and picture.svg() == planned._repr_html_()
    root = xml.fromstring(picture.svg())
    wide = [float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect")
            if r.get("height") == "34" and r.get("fill") != "none"]
    time = [720 * p.us / planned.step_us for p in planned.parts if p.us]
    assert sum(wide[-len(time):]) == pytest.approx(720, abs=1)
    assert wide[-len(time):] == pytest.approx(time, abs=0.1)


def test_the_picture_of_the_guide_is_the_one_that_is_made():
    file = Path(__file__).resolve().parents[2] / "docs" / "guide" / "plan.svg"
    mesh = grid("nvl72", dp=8, tp=9)
    made = plan_transformer(model("70b"), mesh, B=64, microbatches=8, zero=1).show().svg() + "\n"
    if ACCEPT:
        file.write_text(made)
    assert file.read_text() == made, "TESSERA_ACCEPT=1 writes it anew"


def test_a_plan_that_does_not_fit_marks_the_limit():
    planned = plan_transformer(model("70b"), grid(dp=2), "8xh200", B=2)
    assert not planned.fits and "<line" in planned.show().svg()
    assert "<line" not in replace(planned, memory={"parameters": 1.0}).show().svg()


# --- the command ---------------------------------------------------------------------------------
PROGRAM = '''
import tessera as ts

def step(w, x):
    return x @ w

def plan(mesh):
    w = ts.dist.stand_in((1024, 4096), ts.ShardSpec(("row",), ("tp",)), mesh, "bf16", param=True)
    return step, (w, ts.Tensor[64, 1024, ts.bf16])

def wrong(mesh):
    return step
'''


def test_the_command_plans_a_file(tmp_path, capsys):
    file, page = tmp_path / "program.py", tmp_path / "plan.html"
    file.write_text(PROGRAM)
    assert main(["plan", str(file), "--mesh", "dp=8,tp=9", "--fabric", "nvl72", "--html",
                 str(page)]) == 0
    printed = capsys.readouterr().out
    assert "plan of step" in printed and "axis tp: 9 ranks inside a domain of 72" in printed
    assert "934 kB" in printed  # 114 of 1024 rows of 4096 bf16
    assert "<svg" in page.read_text()
    assert main(["plan", f"{file}::wrong", "--mesh", "tp=2"]) == 1
    assert "return (step, (params, state, tokens))" in capsys.readouterr().err


def test_the_command_plans_a_transformer(capsys):
    assert main("plan --transformer 70b --mesh dp=8,tp=9 --fabric nvl72".split()) == 0
    assert "70.55 billion parameters" in capsys.readouterr().out
    assert main("plan --layers 4 --d 256 --heads 8 --T 128 --B 16 --vocab 256 --mesh dp=2,tp=2 "
                "--fabric 8xh200 --zero 1".split()) == 0
    assert "0.003279 billion parameters" in capsys.readouterr().out  # 12 L d^2 + 2 V d + 9 d


@pytest.mark.parametrize("arguments, words", [
    ("--transformer 70b --mesh dp=8,tp=9 --fabric nvl27", "did you mean 'nvl72'"),
    ("--transformer 70b --mesh dp=8,xp=2", "'xp'"),
    ("--transformer 70b --mesh dp=8,tp", "'tp' is not AXIS=EXTENT"),
    ("--transformer 70b --mesh dp=0", "'dp=0' is not AXIS=EXTENT"),
    ("--transformer 70b --mesh dp=2,dp=2", "twice"),
    ("--transformer 70b --mesh dp=9 --fabric 8xh200", "joins 8"),
    ("--mesh dp=2", "nothing to plan"),
    ("nothing.py --mesh dp=2", "no file 'nothing.py'"),
    ("examples/01_copy.py --mesh dp=2", "def plan(mesh): return step"),
    ("examples/01_copy.py --mesh dp=2 --layers 3", "a file and --layers"),
])
def test_the_command_says_what_is_wrong(arguments, words, capsys):
    assert main(["plan", *arguments.split()]) == 1
    assert words in capsys.readouterr().err


def test_planning_is_not_imported_before_it_is_used():
    code = ("import sys, tessera as ts; late = [m for m in sys.modules if m.startswith("
            "'tessera.mesh.') and m.split('.')[-1] in ('fabric', 'flops', 'planner', 'transformer',"
            " 'alpa', 'search', 'plan_function', 'plan_page')]; print(late)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
