"""Attention's gradient in one kernel whose groups add to sums in turn: against f64, its order, and
where graphs choose it."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tessera as ts
from attention_cases import numbers, truth
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from hopper_lowering import distance
from tessera import Tensor, bf16, f16
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.levels import compiled_of, program_of
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.kernels.attention_fused_backward import attention_fused_backward, fused_backward_plan
from tessera.runtime.generations import GENERATIONS
from tessera.tile.ir.errors import RaceError

CHIP = GENERATIONS["sm_90a"]


def called(rng, dtype, H, S, T, D, heads, slots, BM, BN, turns=0):
    """(outputs, what they should be, the words of turns afterwards)"""
    q, g = numbers(rng, dtype, H, S, D), numbers(rng, dtype, H, S, D)
    k, v = numbers(rng, dtype, H, T, D), numbers(rng, dtype, H, T, D)
    lse, delta, *want = truth(q, k, v, g, False)
    outs = [np.full(x.shape, np.nan, dtype.numpy) for x in want]
    sums = np.full((slots, S, D), np.nan, np.float32)
    words = np.full(slots * S // BN * 2 + 1, turns, np.int32)
    words[-1] = 0
    attention_fused_backward(q, k, v, g, lse, delta, sums, words, *outs, D ** -0.5, heads=heads,
                             slots=slots, BM=BM, BN=BN)
    return outs, want, words


CASES = [(bf16, 6, 32, 48, 16, 2, 3, 16, 16), (f16, 4, 64, 32, 32, 4, 4, 16, 16),
         (bf16, 3, 32, 64, 16, 1, 1, 16, 16), (f16, 1, 48, 32, 16, 1, 1, 16, 16),
         (bf16, 2, 128, 512, 128, 1, 2, 256, 64)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cotangents(rng, case):
    """With fewer heads' sums than heads, too: later ones take the place of earlier ones."""
    dtype, H, S, T, _, _, slots, BM, _ = case
    with ts.config.scope(debug=True):
        outs, want, words = called(rng, *case)
    for made, wanted in zip(outs, want, strict=True):
        assert distance(made, wanted) < (4e-3 if dtype is bf16 else 6e-4)
    assert (words[:-1:2] == H // slots * (T // BM)).all() and not words[1::2].any()
    assert words[-1] == H * (T // BM)


def test_groups_that_do_not_wait_race(rng):
    """Words that say that it is everybody's turn."""
    with ts.config.scope(debug=True), pytest.raises(RaceError):
        called(rng, *CASES[0], turns=100)


def graph_of(S, D=128, heads=64, T=None, to="bf16", **attrs):
    """Of result and gradient."""
    def both(q, k, v, g):
        y, pull = ts.vjp(lambda *x: ts.cast(ts.attention(*x, **attrs), to), q, k, v)
        return y, tuple(ts.cast(x, to) for x in pull(g))

    X, K, G = (Tensor[1, heads, n, D, bf16] for n in (S, T or S, S))
    return ts.jit(both).graph(X, K, K, G)


def chosen(S, **attrs):
    """The program of result and gradient, and its call of the kernel if it has one."""
    made = CudaProgram(graph_of(S, **attrs), "sm_90a")
    return made, "".join(re.findall(r"call (attention_fused_backward\(.*\))", str(made.plan)))


def test_graphs_choose_it():
    """For many wide heads without a mask; the schedule names it, and the compiled form its order.
    Sums take the memory of eight heads."""
    program, call = chosen(4096)
    assert call.endswith("heads=4, slots=8)")
    made = compiled_of(program.launches[-1], program.target)
    assert made.grid == "clusters" and made.emitted.cluster == 2
    assert made.notes[0] == ("by pairs of blocks of 128 keys that exchange dS, sums of dQ in turn, "
                             "4 heads side by side")


@pytest.mark.parametrize("other", [
    {"causal": True}, {"D": 64}, {"S": 512}, {"S": 4000}, {"T": 4032}, {"heads": 2},
    {"to": "f32"}, {"window": 300}, {"soft_cap": 30.0}], ids=str)
def test_graphs_take_two_kernels_elsewhere(other):
    assert not chosen(**{"S": 4096} | other)[1]


@pytest.mark.parametrize("setting", [{"numerics": "raise"}, {"debug": True}], ids=str)
def test_it_is_not_taken_where_stores_are_watched_or_checked(setting):
    """Also of a graph that has been shown before."""
    graph = graph_of(4096)
    assert "call attention_fused_backward" in str(program_of(graph, "sm_90a").plan)
    with ts.config.scope(**setting):
        assert "call attention_fused_backward" not in str(program_of(graph, "sm_90a").plan)


@pytest.mark.parametrize("setting", [{"numerics": "raise"}, {"debug": True}], ids=str)
def test_a_compiled_program_is_another_while_it_is_looked_into(setting, gpu):
    """Settings that change after it was made, and back."""
    made = DeviceExecutable(graph_of(4096))
    assert "call attention_fused_backward" in str(made._space().program.plan)
    with ts.config.scope(**setting):
        plan = str(made._space().program.plan)
        assert "call attention_fused_backward" not in plan
        assert "call attention_queries" in plan and "call attention_keys" in plan
    assert made._space().program is made.program


@pytest.mark.parametrize("heads, S, beside", [
    (64, 4096, 4), (16, 16384, 1), (256, 2048, 8), (32, 8192, 2), (256, 1024, 16), (16, 4096, 4),
    (67, 4096, None), (8, 4096, None), (1, 4096, None), (64, 512, None)])
def test_heads_side_by_side(heads, S, beside):
    """As many as run at once, where their number is a multiple and they keep the chip busy."""
    found = fused_backward_plan(bf16, S, S, 128, heads, CHIP, 132)
    assert found == (beside and {"heads": beside, "slots": 2 * beside})
