"""Logs of sums beside attention's result on a GPU, and their derivative, against f64."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_attention_lse import RULES, check, expected, rule_of
from gpu_harness import require_gpu
from tessera import stdlib

require_gpu()


def drawn(rng, *shapes):
    return [ts.tensor(rng.standard_normal(s).astype(np.float32), "bf16") for s in shapes]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("rule", RULES)
def test_against_f64(rule, D, rng):
    S, T = 300, 450
    q, k, v, g = drawn(rng, (2, 4, S, D), (2, 2, T, D), (2, 2, T, D), (2, 4, S, D))
    h = ts.tensor(rng.standard_normal((2, 4, S)).astype(np.float32))
    kwargs, mask = rule_of(rule, [q, k], rng)
    want = expected(*(np.asarray(ts.cast(x, "f64")) for x in (q, k, v, g, h)), kwargs, mask)
    if mask is not None:
        kwargs["mask"] = ts.tensor(mask).to("cuda")

    @ts.jit
    def both(q, k, v, g, h):
        made, pull = ts.vjp(lambda *xs: ts.attention(*xs, **kwargs, return_lse=True), q, k, v)
        return *made, *pull((g, h))

    with ts.config.scope(poison=True):
        check(both(*(x.to("cuda") for x in (q, k, v, g, h))), want, "bf16", 4 * (T + D))


@pytest.mark.parametrize("S, T", [(1, 5000), (1, 50), (4, 1031), (130, 700)])
def test_of_the_library_and_of_graphs(S, T, rng):
    q, k, v = drawn(rng, (2, 8, S, 128), (2, 2, T, 128), (2, 2, T, 128))
    wide = [np.asarray(ts.cast(x, "f64")) for x in (q, k, v)]
    want = expected(*wide, wide[0], wide[0][..., 0], {"causal": True})[:2]
    there = [x.to("cuda") for x in (q, k, v)]
    f = ts.jit(lambda *xs: ts.attention(*xs, causal=True, return_lse=True))
    with ts.config.scope(poison=True):
        for got in (stdlib.flash_attention_2(*there, causal=True, return_lse=True), f(*there)):
            check(got, want, "bf16", T + 128)
