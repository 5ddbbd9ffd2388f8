"""The kernels of attention with masks and dropout by themselves: as warp-specialised programs
against f64, and as emitted code against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from attention_cases import attention64, dropout_factors
from emulator import compare
from hopper_lowering import Known, distance, program, run
from tessera import bf16
from tessera.graph.cuda.passes.modified_attention_kernels import smallest_kept
from tessera.kernels.attention_scores import DropoutRule, MaskRule, ScoreRule
from tessera.kernels.modified_attention import (
    modified_attention,
    modified_attention_keys,
    modified_attention_queries,
    modified_attention_scores,
)
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in

FACTS = Known(divisible=frozenset("DE"), aligned=frozenset("QKVG"))
RULES = {  # the mask: floats, of each row, of each key, of each head; the probability of dropout
    "causal": (None, 0.0), "keys": ((False, False, True, 0), 0.0),
    "rows": ((False, True, True, 1), 0.0), "added": ((True, True, True, 1), 0.0),
    "dropout": (None, 0.75), "dropout, added": ((True, True, True, 1), 0.5),
}


def _rule(name, causal, shape, rng):
    """(the rule, M, W) for scores [H, S, T]"""
    (mask, p), (H, S, T) = RULES[name], shape
    M = W = mask_rule = dropout = None
    if mask is not None:
        floats, rows, columns, heads = mask
        extents = (H if heads else 1, S if rows else 1, T if columns else 1)
        M = rng.standard_normal(extents).astype(np.float32) if floats else rng.random(extents) < 0.7
        if rows and not floats:
            M[:, 7] = False  # a query that sees nothing
        mask_rule = MaskRule(floats, H, 0, heads, rows, columns)
    if p:
        W = rng.integers(0, 2**32, (1, 2), np.uint32)
        dropout = DropoutRule(S, S % 4 == 0 and T % 4 == 0, smallest_kept(p), 1 / (1 - p))
    return ScoreRule(causal, mask_rule, dropout), M, W


@pytest.mark.parametrize("name, group, causal", [
    ("causal", 2, True), ("keys", 2, True), ("rows", 2, True), ("added", 2, True),
    ("dropout", 1, True), ("dropout", 2, False), ("dropout, added", 2, True)])
def test_by_warpgroups(name, group, causal, rng):
    """100 queries and 152 keys; products are multiplied as they lie."""
    H, S, T, D = 4, 100, 152, 64
    q, g = (rng.standard_normal((H, S, D)).astype(bf16.numpy) for _ in "qg")
    k, v = (rng.standard_normal((H // group, T, D)).astype(bf16.numpy) for _ in "kv")
    rule, M, W = _rule(name, causal, (H, S, T), rng)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, g)]
    full = None if M is None else np.broadcast_to(
        M if M.dtype == bool else M.astype(np.float64), (H, S, T))
    factor = 1.0 if W is None else dropout_factors(W[0], (H, S, T), causal, RULES[name][1])
    y, dq, dk, dv, *dm = attention64(*wide, causal, full, factor)
    out, lse = np.full((H, S, D), np.nan, np.float32), np.full((H, S), np.nan, np.float32)
    delta = (y * wide[3]).sum(-1).astype(np.float32)
    made = [np.full(x.shape, np.nan, np.float32) for x in (dk, dv, dq, *dm)]
    given, scale = (q, k, v, M, W), D ** -0.5
    back, common = (*given, g, lse, delta), {"group": group, "rule": rule}
    calls = [(modified_attention, (2, H), (*given, out, lse, scale)),
             (modified_attention_keys, (3, H // group), (*back, *made[:2], scale)),
             (modified_attention_queries, (2, H), (*back, made[2], scale))]
    if dm:
        calls.append((modified_attention_scores, (3, 2, H), (*back, made[3], scale)))
    for kernel, grid, args in calls:
        lowered = program(kernel, *args, facts=FACTS, **common)
        assert lowered.pipeline.overlap or kernel is modified_attention_scores
        moved = [n for n in ops_in(lowered.function.body, "convert_layout")
                 if n.outs[0].type.dtype.name == "f32"
                 and len(n.outs[0].type.shape) == 2 and 1 not in n.outs[0].type.shape]
        assert not moved, "a tile of scores is moved between threads"
        run(kernel, lowered, grid, *args, **common)
    for got, want in zip((out, *made), (y, dk, dv, dq, *dm), strict=True):
        assert distance(got, want) < 6e-3


@pytest.mark.parametrize("runs", [None, False, True])
def test_emulated(runs, rng):
    """The emitted code with a mask of keys; draws of both forms of words among it, or none."""
    S, T, D = 36, 40, 16
    q, k, v = (rng.standard_normal((2, n, D)).astype(np.float32) for n in (S, T, T))
    W = None if runs is None else rng.integers(0, 2**32, (1, 2), np.uint32)
    M = rng.random((2, 1, T)) < 0.8
    rule = ScoreRule(True, MaskRule(False, 2, 0, 1, False, True),
                     None if W is None else DropoutRule(S, runs, smallest_kept(0.5), 2.0))
    out, lse = np.zeros((2, S, D), np.float32), np.zeros((2, S), np.float32)
    compare(modified_attention, q, k, v, M, W, out, lse, 0.25, rule=rule, BM=32, BN=32, lanes=64)
