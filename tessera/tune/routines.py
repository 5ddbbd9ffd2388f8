"""The routines that are tuned."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ..kernels.attention import attention_block
from ..kernels.attention_plan import AttentionBlock, attention_text, blocks_to_measure
from ..kernels.cards import Card
from ..kernels.gemm import LAYOUTS
from ..kernels.matmul_plan import ProductPlan, plans_to_measure, product_text
from ..runtime.device import device
from .tunable import Tunable, TuningProblem

ROWS = (1, 16, 64, 128, 256)
# M, N, K: those of benchmarks/matmuls.py, and of the layers of GPT-2 and a llama.
PRODUCTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "cubes": tuple((n, n, n) for n in (
        512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)),
    "rows": tuple((m, n, k) for m in ROWS for n, k in ((8192, 8192), (14336, 4096))),
    "deep K": ((768, 768, 32768), (1024, 1024, 65536), (256, 256, 16384), (2048, 2048, 32768),
               (512, 4096, 16384)),
    "odd": ((1000, 1000, 1000), (4000, 4000, 4000), (2632, 9176, 4952), (3000, 1000, 5000),
            (1001, 1001, 1001), (4097, 4097, 4097), (333, 777, 555)),
    "models": ((16384, 50304, 768), (16384, 50257, 768), (16384, 768, 50304), (50304, 768, 16384),
               (16384, 3072, 768), (16384, 768, 3072), (4096, 14336, 4096), (8192, 1024, 8192))}

# Of a step of GPT-2 124M and 350M and of a llama, as tessera/bench/models has them: outputs and
# inputs' gradients of layers, then weights' gradients.
TRAINING = (
    *((32768, n, k) for n, k in ((2304, 768), (3072, 768), (768, 3072), (768, 768), (768, 2304),
                                 (50304, 768), (768, 50304))),
    *((16384, n, k) for n, k in ((3072, 1024), (4096, 1024), (1024, 4096), (1024, 1024),
                                 (1024, 3072), (50304, 1024), (1024, 50304))),
    *((8192, n, k) for n, k in ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192),
                                (32768, 2048), (2048, 32768))),
    *((m, n, 32768) for m, n in ((3072, 768), (768, 2304), (768, 3072), (768, 768),
                                 (50304, 768))),
    *((m, n, 16384) for m, n in ((1024, 1024), (1024, 3072), (1024, 4096), (4096, 1024),
                                 (50304, 1024))),
    *((m, n, 8192) for m, n in ((2048, 2048), (2048, 3072), (2048, 8192), (32768, 2048),
                                (8192, 2048))))


# --- gemm -----------------------------------------------------------------------------------------
def _layout(p: TuningProblem) -> str:
    """As the routine sees it: a matrix of one column is one of one row, transposed."""
    (M, N, K), flipped = p.extents, {"n": "t", "t": "n"}
    columns = K if p.way[0] == "n" else M, N if p.way[1] == "n" else K
    return "".join(flipped[w] if n == 1 else w for w, n in zip(p.way, columns, strict=True))


def _key(p: TuningProblem, card: Card) -> str:
    M, N, K = p.extents
    return product_text(p.dtype, M, N, K, _layout(p), p.result.bits)


def _trials(p: TuningProblem, card: Card, count: int) -> Mapping[str, ProductPlan]:
    M, N, K = p.extents
    return plans_to_measure(p.dtype, M, N, K, _layout(p), card, count, p.result.bits)


def _shapes(p: TuningProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    M, N, K = p.extents
    return ((M, K) if p.way[0] == "n" else (K, M)), ((K, N) if p.way[1] == "n" else (N, K))


def _options(p: TuningProblem) -> dict[str, Any]:
    return {**LAYOUTS[p.way], "dtype": p.result.name}


GEMM = Tunable("gemm", "MxNxK", tuple(LAYOUTS), ("bf16", "bf16->f32", "f16"),
               PRODUCTS | {"training": TRAINING}, _key, _trials, _shapes, _options,
               lambda p: 2.0 * prod(p.extents))


# --- attention ------------------------------------------------------------------------------------
# Heads of all sequences, queries and as many keys, elements of a head.
ATTENTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "usual": tuple(((1 << 18) // S, S, D) for D in (64, 128) for S in (512, 1024, 4096, 16384)),
    "wide": tuple(((1 << 17) // S, S, D) for D in (96, 192, 256) for S in (1024, 8192))}


def _is_causal(p: TuningProblem) -> bool:
    return p.way == "causal"


def _attention_key(p: TuningProblem, card: Card) -> str:
    heads, S, D = p.extents
    return attention_text(p.dtype, heads, S, D, _is_causal(p))


def _attention_trials(p: TuningProblem, card: Card, count: int) -> Mapping[str, AttentionBlock]:
    """All that fit: there is no model that would rank them."""
    _, S, D = p.extents
    generation = device().target.generation
    model = AttentionBlock(*attention_block(p.dtype, S, D, _is_causal(p), generation))
    return {b.choice: b for b in blocks_to_measure(model, D, generation.group_shared_bytes)}


def _attention_flops(p: TuningProblem) -> float:
    heads, S, D = p.extents
    return 4.0 * heads * S * S * D / (2 if _is_causal(p) else 1)


ATTENTION = Tunable(
    "flash_attention_2", "HxSxD", ("full", "causal"), ("bf16", "f16"), ATTENTIONS, _attention_key,
    _attention_trials, lambda p: (p.extents,) * 3, lambda p: {"causal": _is_causal(p)},
    _attention_flops)

__all__ = ["ATTENTION", "GEMM", "PRODUCTS"]
