"""Attention with windows, caps and spans as compiled for sm_90a: by wgmma, loops of their own for
blocks that need no mask, nothing in local memory. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
import tile_gpu
from ptx_harness import require_compiler
from tessera import Tensor, bf16, f32, i32
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.levels import compiled_of
from tessera.kernels.attention import attention, attention_block
from tessera.kernels.attention_backward import (
    attention_keys,
    attention_queries,
    keys_block,
    queries_block,
)
from tessera.runtime.ptxas import find_tool, sass_counts
from tessera.runtime.target import parse_target

require_compiler()
CHIP = parse_target("sm_90a").generation
S = 4096  # by which blocks are chosen
RULES = {"window": {"causal": True, "window": 300}, "near": {"window": 300},
         "cap": {"cap": 30.0}, "causal cap": {"cap": 30.0, "causal": True},
         "cap and window": {"cap": 30.0, "causal": True, "window": 300},
         "spans": {}, "causal spans": {"causal": True}}
MASKED = {"window": 2, "near": 2, "cap": 1, "causal cap": 1, "cap and window": 2, "spans": 2,
          "causal spans": 2}  # loops beside the one that needs no mask, at the edge in any case


def compiled(kernel, rule, *args, **block):
    spans = {"spans": np.zeros((2, 2, 512), np.int32), "heads": 2} if "spans" in rule else {}
    made = tile_gpu.compiled(kernel, *args, **block, **RULES[rule], **spans, target="sm_90a")
    assert made.notes[0].startswith("matmuls by wgmma, loads by TMA, warpgroups specialised")
    assert not [w for w in made.built.warnings if "C751" in w], made.built.warnings
    return made.built


def matmuls(built) -> int:
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return sum(n for name, n in sass_counts(built.sass()).items() if name.startswith("HGMMA"))


def operands(D):
    """(queries, keys, values or cotangents; a row of numbers)"""
    return np.zeros((4, 512, D), bf16.numpy), np.zeros((4, 512), np.float32)


@pytest.mark.parametrize("rule, D", [("window", 64), ("cap and window", 128), ("near", 128),
                                     ("spans", 64), ("causal spans", 128)])
def test_results(rule, D):
    x, _ = operands(D)
    own = RULES[rule]
    m, n = attention_block(bf16, S, D, own.get("causal", False), CHIP, own.get("window", 0),
                           own.get("cap", 0.0), spans="spans" in rule)
    built = compiled(attention, rule, x, x, x, x, 0.1, BM=m, BN=n)
    assert not built.resources.spills and built.resources.stack_bytes == 0
    assert matmuls(built) == (D // 16 + n // 16) * (2 + MASKED[rule])  # head and tail are one


def test_a_result_that_keeps_its_sums():
    """By blocks of 96 keys, which NVVM refuses where variables are marked for debuggers."""
    X, ids = Tensor[2, 2, 4096, 64, bf16], Tensor[2, 4096, i32]

    def both(q, k, v, g, ids):
        y, pull = ts.vjp(lambda *x: ts.attention(*x, causal=True, segments=ids), q, k, v)
        return y, *pull(g)

    made = CudaProgram(ts.jit(both).graph(X, X, X, Tensor[2, 2, 4096, 64, f32], ids), "sm_90a")
    (launch,) = (x for x in made.launches if x.group.kind == "attention")
    assert launch.group.schedule.n == 96
    assert not compiled_of(launch, made.target).built.resources.spills


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("D, keys", [(64, 112), (128, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_score_function_takes_three_warpgroups(causal, D, keys, gradient):
    X = Tensor[1, 8, 4096, D, bf16]

    def result(q, k, v):
        return ts.attention(q, k, v, causal=causal,
                            score=lambda s, b, h, i, j: s + ts.exp2(-h - 1.0) * (j - i))

    def both(q, k, v):
        y, pull = ts.vjp(result, q, k, v)
        return y, *pull(y)

    made = CudaProgram(ts.jit(both if gradient else result).graph(X, X, X), "sm_90a")
    (launch,) = (x for x in made.launches if x.group.kind == "attention")
    assert (launch.group.schedule.m, launch.group.schedule.n) == (192, keys)
    built = compiled_of(launch, made.target).built
    assert not built.resources.spills and not [w for w in built.warnings if "C751" in w]


@pytest.mark.parametrize("rule, D", [("causal cap", 64), ("cap and window", 128), ("spans", 64),
                                     ("causal spans", 64), ("causal spans", 128)])
def test_cotangents_of_queries(rule, D):
    x, r = operands(D)
    block = queries_block(bf16, D, CHIP, S, RULES[rule].get("causal", False), "spans" in rule)
    built = compiled(attention_queries, rule, x, x, x, x, r, r, x, 0.1, **block)
    assert not built.resources.spills and built.resources.stack_bytes == 0
    assert matmuls(built) == (2 * D // 16 + block["BN"] // 16) * (2 + MASKED[rule])


@pytest.mark.parametrize("kernel, block", [(attention_queries, queries_block),
                                           (attention_keys, keys_block)])
def test_warpgroups_in_turn_need_no_register_more(kernel, block):
    """Each loop over iterations, and the two that give slots back, wait for their turn."""
    x, r = operands(64)
    outs = [x] if kernel is attention_queries else [x, x]
    sizes = block(bf16, 64, CHIP, S, spans=True)
    assert sizes["TURNS"]
    built = compiled(kernel, "spans", x, x, x, x, r, r, *outs, 0.1, **sizes)
    assert not built.resources.spills
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    counts = sass_counts(built.sass())
    arrive, wait = (sum(n for name, n in counts.items() if name.startswith(f"BAR.{how}"))
                    for how in ("ARV", "SYNC"))
    assert arrive == wait >= 5  # one to begin, and one wait of the whole block


@pytest.mark.parametrize("rule, D", [("causal cap", 64), ("cap and window", 128), ("spans", 64),
                                     ("causal spans", 64), ("causal spans", 128)])
def test_cotangents_of_keys(rule, D):
    x, r = operands(D)
    block = keys_block(bf16, D, CHIP, S, "cap" in rule, "spans" in rule,
                       RULES[rule].get("causal", False))
    built = compiled(attention_keys, rule, x, x, x, x, r, r, x, x, 0.1, **block)
    assert not built.resources.spills and built.resources.stack_bytes == 0
