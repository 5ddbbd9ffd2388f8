"""A computed first operand of wgmma lies in registers as the instruction takes it, however its
transpose is spelled; and the kernels of masked attention, as warp-specialised programs."""

from __future__ import annotations

import numpy as np
import pytest

from attention_cases import attention64
from hopper_lowering import Known, distance, program, run
from tessera import bf16
from tessera.kernels.masked_attention import (
    masked_attention,
    masked_attention_keys,
    masked_attention_queries,
)
from tessera.tile.cuda.lower import assign_layouts
from tessera.tile.cuda.lower.warp_specialised.machine import PipelineError
from tessera.tile.cuda.lower.warp_specialised.rewrite import ops_in
from transposed_kernels import SPELLINGS, spelled

FACTS = Known(divisible=frozenset("DE"), aligned=frozenset("ABCQKVG"))


@pytest.mark.parametrize("S", [128, 100])  # 100: rows beyond the end are masked
@pytest.mark.parametrize("how", SPELLINGS)
def test_every_spelling_of_a_transpose(how, S, rng):
    a, k, b = (rng.standard_normal(s).astype(bf16.numpy) for s in ((S, 64), (128, 64), (S, 64)))
    c = np.zeros((128, 64), np.float32)
    kernel = spelled(how)
    made = program(kernel, a, k, b, c, facts=FACTS)
    assert ops_in(made.function.body, "convert_layout")
    run(kernel, made, (2,), a, k, b, c)
    x = np.asarray(k, np.float64) @ np.asarray(a, np.float64).T
    x = np.maximum(x, 0) if how == "masked" else x
    assert distance(c, x @ np.asarray(b, np.float64)) < 6e-3


def test_registers_that_lie_otherwise_are_an_error(rng, monkeypatch):
    """Of a compiler that forgets the conversion."""
    a, k, b = (rng.standard_normal(s).astype(bf16.numpy) for s in ((64, 64), (64, 64), (64, 64)))
    kernel = spelled("rounded")
    monkeypatch.setattr(assign_layouts._Rewriter, "wanted", lambda self, op, x: None)
    made = program(kernel, a, k, b, np.zeros((64, 64), np.float32), facts=FACTS)
    said = r"pack_operand takes f32\[64, 64\] as 1.0 0.3 .* lies as"
    with pytest.raises(PipelineError, match=said):
        run(kernel, made, (1,), a, k, b, np.zeros((64, 64), np.float32))


MASKS = {"keys": (False, True, 0), "rows": (True, True, 1), "added": (True, True, 1)}


@pytest.mark.parametrize("name", MASKS)
def test_masked_attention_by_warpgroups(name, rng):
    """Four heads of 100 queries and 150 keys in two groups; their products as they lie."""
    H, C, S, T, D = 4, 2, 100, 150, 64
    q, g = (rng.standard_normal((H, S, D)).astype(bf16.numpy) for _ in "qg")
    k, v = (rng.standard_normal((C, T, D)).astype(bf16.numpy) for _ in "kv")
    rows, columns, heads = MASKS[name]
    shape = (H if heads else 1, S if rows else 1, T)
    mask = rng.standard_normal(shape).astype(np.float32) if name == "added" else (
        rng.random(shape) < 0.7)
    if name == "rows":
        mask[:, 7] = False  # a query that sees nothing
    wide = [np.asarray(x, np.float64) for x in (q, k, v, g)]
    own = mask.astype(np.float64) if name == "added" else mask
    y, dq, dk, dv, *_ = attention64(*wide, True, np.broadcast_to(own, (H, S, T)))
    common = {"heads": H, "group": H // C, "causal": True, "floats": name == "added",
              "per_head": heads, "rows": rows, "columns": columns, "BM": 64, "BN": 64}
    out, lse = np.full((H, S, D), np.nan, np.float32), np.full((H, S), np.nan, np.float32)
    delta = (y * wide[3]).sum(-1).astype(np.float32)
    made = [np.full(x.shape, np.nan, np.float32) for x in (dk, dv, dq)]
    scale = D ** -0.5
    for kernel, grid, args in (
            (masked_attention, (2, H), (q, k, v, mask, out, lse, scale)),
            (masked_attention_keys, (3, C), (q, k, v, mask, g, lse, delta, *made[:2], scale)),
            (masked_attention_queries, (2, H), (q, k, v, mask, g, lse, delta, made[2], scale))):
        lowered = program(kernel, *args, facts=FACTS, **common)
        products = [n for n in ops_in(lowered.function.body, "convert_layout")
                    if len(n.outs[0].type.shape) == 2 and 1 not in n.outs[0].type.shape]
        assert not products, "a tile of scores is moved between threads"
        run(kernel, lowered, grid, *args, **common)
    for got, want in zip((out, *made), (y, dk, dv, dq), strict=True):
        assert distance(got, want) < 6e-3
