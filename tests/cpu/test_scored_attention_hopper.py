"""Attention's kernels with windows, caps and spans in the warp-specialised form, on the machine
that runs it, against f64: results and cotangents begin as NaN."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, numbers, seen_keys
from hopper_lowering import Known, distance, program, run
from tessera import Tensor, bf16, f32
from tessera.kernels.attention import attention, cross_attention
from tessera.kernels.attention_backward import attention_keys, attention_queries
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in
from tessera.tile.ir.ir import For, If, walk
from tessera.tile.ir.op_record import OPS

HEADS, D = 2, 64
FACTS = Known(frozenset("SDTEBC"), frozenset("QKVG") | {
    "out", "lse", "delta", "dQ", "dK", "dV", "spans"})
# queries, keys; causal, window, cap, whether there are spans
CASES = {
    "window": (300, 300, True, 70, 0.0, False), "near": (200, 330, False, 90, 0.0, False),
    "cap": (200, 200, True, 0, 2.0, False), "cap and window": (300, 300, True, 30, 2.0, False),
    "spans": (333, 333, False, 0, 0.0, True), "causal spans": (300, 300, True, 0, 0.0, True),
    "spans in a window": (300, 300, True, 50, 1.5, True),
}


def spans_of(S):
    """(of queries [1, 2, S], of keys): documents, of which the last sees nothing."""
    ids = np.searchsorted([0, 40, 41, 200], np.arange(S), side="right")
    first, end = np.searchsorted(ids, ids, "left"), np.searchsorted(ids, ids, "right")
    end = np.where(first == 200, first, end)
    keys = [np.searchsorted(x, np.arange(S), "right") for x in (end, first)]
    return np.stack([first, end])[None].astype(np.int32), np.stack(keys)[None].astype(np.int32)


@pytest.mark.parametrize("case", CASES)
def test_against_f64(case, rng):
    S, T, causal, window, cap, spanned = CASES[case]
    q, g = numbers(rng, bf16, HEADS, S, D), numbers(rng, bf16, HEADS, S, D)
    k, v = numbers(rng, bf16, HEADS, T, D), numbers(rng, bf16, HEADS, T, D)
    scale, rule = D**-0.5, {"causal": causal, "window": window, "cap": cap}
    wide = [x.astype(np.float64) for x in (q, k, v, g)]
    seen = seen_keys(1, S, T, window or None)[0, 0]
    seen &= np.arange(T) <= np.arange(S)[:, None] + T - S if causal else True
    of_queries, of_keys = (None, None)
    if spanned:
        of_queries, of_keys = spans_of(S)
        places = np.arange(T)
        seen &= (of_queries[0, 0][:, None] <= places) & (places < of_queries[0, 1][:, None])
    y, *want = attention64(*wide, False, seen, cap=cap)
    out = np.full(q.shape, np.nan, bf16.numpy)
    kernel = attention if S == T else cross_attention
    made = launched(kernel, (-(-S // 128), HEADS), q, k, v, out, scale / np.log(2),
                    spans=of_queries, heads=HEADS, **rule)
    assert distance(out, y) < 8e-3 and loops_without_tests(made)
    s = wide[0] @ wide[1].swapaxes(-1, -2) * scale
    s = cap * np.tanh(s / cap) if cap else s
    z = np.where(seen, np.exp(s), 0).sum(-1)
    lse = np.where(z > 0, np.log2(np.where(z > 0, z, 1)), 3e38).astype(np.float32)
    delta = (y * wide[3]).sum(-1).astype(np.float32)
    outs = [np.full(x.shape, np.nan, bf16.numpy) for x in (q, k, v)]
    launched(attention_queries, (-(-S // 128), HEADS), q, k, v, g, lse, delta, outs[0], scale,
             spans=of_queries, heads=HEADS, **rule)
    launched(attention_keys, (-(-T // 128), HEADS), q, k, v, g, lse, delta, *outs[1:], scale,
             spans=of_keys, heads=HEADS, **rule)
    for x, w in zip(outs, want, strict=True):
        assert distance(x, w) < 1e-2


@pytest.mark.parametrize("group", range(3))
@pytest.mark.parametrize("case", ["window", "near", "spans", "causal spans", "spans in a window"])
def test_a_warpgroup_does_the_iterations_of_its_own_rows(case, group, monkeypatch, rng):
    """On the machine all warpgroups are one. Here it has the iterations of one of three, so that
    the rows of this one are right, and gives the slots of the others back."""
    S, T, causal, window, cap, spanned = CASES[case]
    q, k, v = (numbers(rng, bf16, HEADS, n, D) for n in (S, T, T))
    spans = spans_of(S)[0] if spanned else None

    def own_row(m, op, start):
        return np.reshape(start + np.int32(64 * group + 63 * op.attr["last"]), (1, 1))

    record = copy(OPS["row_of_warpgroup"])
    object.__setattr__(record, "run", own_row)
    monkeypatch.setitem(OPS, "row_of_warpgroup", record)
    kernel = attention if S == T else cross_attention
    rule = {"causal": causal, "window": window, "cap": cap, "spans": spans, "heads": HEADS,
            "BN": 64}
    args = q, k, v, np.full(q.shape, np.nan, bf16.numpy), D**-0.5 / np.log(2)
    made = program(kernel, *args, BM=192, facts=FACTS, **rule)
    run(kernel, made, (-(-S // 192), HEADS), *args, BM=192, **rule)
    drains = [n for n in walk(made.function.body) if isinstance(n, For) and not ops_in(
        n.body, "async_matmul") and ops_in(n.body, "ring_release")]
    assert made.pipeline.warpgroups == 3 and len(drains) == 2
    want = np.full(q.shape, np.nan, bf16.numpy)
    kernel[(-(-S // 64), HEADS), 128](*args[:3], want, args[4], BM=64, **rule)
    own = np.arange(S) // 64 % 3 == group
    assert distance(args[3][:, own], want[:, own].astype(np.float64)) < 8e-3
    assert case in ("near", "spans") or distance(args[3], want.astype(np.float64)) > 0.1


@ts.kernel
def shifted(Q: Tensor["S", 64, bf16], K: Tensor["S", 64, bf16], row: Tensor["Z", "S", f32],
            out: Tensor["S", 64, bf16], first: ts.i32, STEP=1):
    """Queries from `first` on, in multiples of STEP, with a number each."""
    k, o = ts.tile.load(K[0:64, :]), ts.tile.zeros((64, 64))
    for q0 in range(first // STEP * STEP, S, 64):
        q = ts.tile.load(Q[q0:q0+64, :])
        s = ts.tile.dot(k, q.T) * ts.tile.load(row[0, q0:q0+64])[None, :]
        o = ts.tile.dot(ts.tile.cast(s, bf16), q, o)
    out[0:64, :] = o


@pytest.mark.parametrize("step, rides", [(1, False), (2, False), (4, True), (64, True)])
def test_rows_that_may_begin_anywhere_are_not_copied(step, rides):
    """A copy of a row begins at a multiple of 16 bytes: elsewhere it is an illegal instruction."""
    x = np.zeros((256, 64), bf16.numpy)
    made = program(shifted, x, x, np.zeros((1, 256), np.float32), x, 3, STEP=step,
                   facts=Known(aligned=frozenset({"Q", "K", "row", "out"})))
    assert any("row" in load.name for r in made.rings for load in r.loads) == rides


def launched(kernel, axes, *args, **kwargs):
    made = program(kernel, *args, BM=128, BN=64, facts=FACTS, **kwargs)
    run(kernel, made, axes, *args, BM=128, BN=64, **kwargs)
    return made


def loops_without_tests(made) -> bool:
    """Whether no loop over keys has a branch in it: its iterations take all masks or none."""
    loops = [n for n in walk(made.function.body) if isinstance(n, For) and len(
        ops_in(n.body, "async_matmul")) == 2]
    rescales = [n for x in loops for n in x.body if isinstance(n, If) and not ops_in(
        n.then, "mul")]
    return len(loops) > 1 and not rescales
