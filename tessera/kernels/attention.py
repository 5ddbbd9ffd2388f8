"""Flash attention, forward: softmax(scale Q K') V without ever holding the scores.

Scores stay in base 2: `scale` holds log2(e) beside the caller's factor, and exp2 is what hardware
has. The running maximum may lag behind by `slack`; the result does not depend on it, since the sum
and the output are relative to the same maximum, and rescaling is mostly avoided.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import DTypeError, ShapeError
from ..numerics import DType, f32, i32, uint32
from ..runtime.generations import Generation
from ..tensor import Tensor
from ..tile import MODULE as tile
from ..tile.ir.schedule import Schedule
from ..tile.kernel.decorator import kernel
from ..tile.tuning.gpus import DEFAULT
from . import softmax
from .attention_plan import AttentionBlock, attention_text, tuned_attention
from .attention_scores import (
    HIGHEST,
    LOG2E,
    dropped,
    head_of,
    in_spans,
    kept,
    key_limits,
    line,
    linear_score,
    linear_terms,
    loaded,
    mask_place,
    mask_unit,
    near_keys,
    near_of_rows,
    own_spans,
    places,
    score_value,
    span_rows,
    with_mask,
)
from .cards import card_of
from .decode_attention import KERNELS as DECODE
from .decode_attention import LN2, decode_plan, few_queries, streams
from .gemm import SPECIALISED
from .record import Benchmark, CompiledCall, KernelSample
from .routine import empty_like, generation_of, reshaped, routine, type_of

SLACK = 8.0  # powers of two by which the running maximum may lag
SHORT = 512  # queries
LONG = 16384
LEAST_SUM = 1e-30  # below any sum of weights, of which one was 1


@kernel
def attend(Q, K, V, head, group, q0, keys, ahead, scale, BM, BN, causal, slack, window=0, cap=0.0,
           spans=None, heads=1, score=None, M=None, L=None, mask=None, W=None,
           draws=None, nan=False):
    """Rows [q0:q0+BM] of one head's output. Other kernels call it.

    group: query heads that read one head of K and V.  ahead: keys before the first query's own.
    window, cap, score: as those of a ScoreRule.  spans: of `heads` heads one after another each
    M [Z, S, T], L [Z, T]: what is added to scores of a query and a key, and of a key, None without;
    mask: where the head's lies, a MaskRule.  W, draws: keys of blocks of queries, and a ScoreRule
    that says which weights they drop; None without.  nan: a query that sees no key gives NaN, in
    place of 0
    """
    o, m, z = attend_sums(Q, K, V, head, group, q0, keys, ahead, scale, BM, BN, causal, slack,
                          window, cap, spans, heads, score, M, L, mask, W, draws)
    return divided(o, z, nan)


@kernel
def attend_saved(Q, K, V, head, group, q0, keys, ahead, scale, BM, BN, causal, slack, window=0,
                 cap=0.0, spans=None, heads=1, score=None, M=None, L=None, mask=None, W=None,
           draws=None, nan=False):
    """The same, and each query's log2 of its sum of exp2(scores), for the gradient. Of one that
    sees no key it is a number too, so that its weights, exp2 of -inf less that, are 0 there."""
    o, m, z = attend_sums(Q, K, V, head, group, q0, keys, ahead, scale, BM, BN, causal, slack,
                          window, cap, spans, heads, score, M, L, mask, W, draws)
    logs = m + tile.log2(tile.maximum(z, LEAST_SUM))
    return divided(o, z, nan), tile.where(z > 0.0, logs, math.nan) if nan else logs


@kernel
def divided(o, z, nan):
    """o / z of a sum of which one weight is about 1, or none is there, which gives 0, or NaN: one
    product for each element, where a division has two, a comparison and a choice."""
    turned = 1.0 / tile.maximum(z, LEAST_SUM)
    return o * (tile.where(z > 0.0, turned, math.nan) if nan else turned)


@kernel
def attend_sums(Q, K, V, head, group, q0, keys, ahead, scale, BM, BN, causal, slack, window, cap,
                spans, heads, score, M, L, mask, W, draws):
    """Sums of weights times values relative to the maximum m, and sums z of the weights.

    The maximum begins as a number where a query may see no key of its first block.
    """
    q = tile.load(Q[head, q0:q0+BM, :])
    some = spans is not None or score is not None or window or mask is not None
    m = tile.full((BM,), -HIGHEST if some else -math.inf)
    z = tile.zeros((BM,))
    o = tile.zeros((BM, V.shape[-1]))
    first, end = near_keys(causal, window, q0, BM, keys - ahead, keys)
    own, last = tile.own_row(q0, BM), tile.own_row(q0, BM, True)
    lo, hi = near_keys(causal, window, own, last + 1 - own, keys - ahead, keys)
    first, end, rows = span_rows(spans, head // heads, q0, BM, keys - ahead, first, end)
    lo, hi, rows = own_spans(spans, head // heads, own, last, keys - ahead, lo, hi, rows)
    rows = loaded(rows)
    if window or spans is not None or causal and score is not None:
        end = tile.own_iterations(end, lo, hi)
    if L is not None or W is not None:
        first = first // 8 * 8  # copies of L begin at 16 bytes, and draws of four words anew
    limits = key_limits(causal, window, q0, ahead)
    terms = linear_terms(scale / LOG2E, cap, score, head, q0 + ahead)
    query = None if score is None else places(q0 + ahead, BM, 0)
    factor = 1.0 if terms is not None else LOG2E if cap or score is not None else scale
    for k0 in range(first, end, BN):
        k = tile.load(K[head // group, k0:k0+BN, :])
        s = tile.dot(q, k.T)
        if terms is not None:
            added = line(terms[2], k0 - (q0 + ahead), BN)
            s, _ = linear_score(s, scale / LOG2E, cap, terms, added[None, :])
        elif cap or score is not None:
            key = None if score is None else places(k0, BN, 1)
            s = score_value(s, scale / LOG2E, cap, score, head, query, key)
        if M is not None:
            part = M[mask_place(mask, head), q0:q0+BM, k0:k0+BN]
            s = with_mask(s, part, mask_unit(scale / LOG2E, cap, score))
        if L is not None:
            of_keys = tile.load(L[mask_place(mask, head), k0:k0+BN])
            s = s + (of_keys * mask_unit(scale / LOG2E, cap, score))[None, :]
        s = in_spans(near_of_rows(s, causal, window, limits, k0), rows, k0)
        keep = kept(draws, W, head, q0, k0, keys - ahead, keys, BM, BN)
        m_new = tile.running_max(m, tile.row_max(s) * factor, slack)
        alpha = tile.exp2(m - m_new)
        p = tile.exp2(s * factor - m_new)
        z = z * alpha + tile.row_sum(p)
        p = dropped(draws, p, keep)
        v = tile.load(V[head // group, k0:k0+BN, :])
        o = tile.dot(tile.cast(p, V.dtype), v, o * alpha)
        m = m_new
    if terms is not None:
        m = m + tile.ramp(terms[3], terms[1], BM)
    return o, m, z


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def attention(Q: Tensor["B", "S", "D"], K: Tensor["C", "S", "D"], V: Tensor["C", "S", "E"],
              out: Tensor["B", "S", "E"], scale: f32,
              spans: Tensor["Z", 2, "S", i32] | None = None,
              logs: Tensor["B", "S", f32] | None = None, M: Tensor["Z", "S", "S"] | None = None,
              L: Tensor["Y", "S", f32] | None = None, W: Tensor["R", 2, uint32] | None = None,
              heads=1, group=1, BM=128, BN=128, causal=False, window=0, cap=0.0, score=None,
              mask=None, draws=None):
    q0, head = tile.group_id(0) * BM, head_of(mask, tile.group_id(1), 1)
    o, sums = attend_saved(Q, K, V, head, group, q0, S, 0, scale, BM, BN, causal, SLACK, window,
                           cap, spans, heads, score, M, L, mask, W, draws)
    out[head, q0:q0+BM, :] = o
    if logs is not None:
        logs[head, q0:q0+BM] = sums * LN2


@kernel(grid=lambda S, B, BM: (-(-S // BM), B))
def cross_attention(Q: Tensor["B", "S", "D"], K: Tensor["C", "T", "D"], V: Tensor["C", "T", "E"],
                    out: Tensor["B", "S", "E"], scale: f32,
                    spans: Tensor["Z", 2, "S", i32] | None = None,
                    logs: Tensor["B", "S", f32] | None = None,
                    M: Tensor["Z", "S", "T"] | None = None, L: Tensor["Y", "T", f32] | None = None,
                    W: Tensor["R", 2, uint32] | None = None, heads=1, group=1, BM=128, BN=128,
                    causal=False, window=0, cap=0.0, score=None, mask=None, draws=None):
    q0, head = tile.group_id(0) * BM, head_of(mask, tile.group_id(1), 1)
    o, sums = attend_saved(Q, K, V, head, group, q0, T, T - S, scale, BM, BN, causal, SLACK,
                           window, cap, spans, heads, score, M, L, mask, W, draws)
    out[head, q0:q0+BM, :] = o
    if logs is not None:
        logs[head, q0:q0+BM] = sums * LN2


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False,
              scale: float | None = None, window: int | None = None,
              soft_cap: float | None = None) -> np.ndarray:
    G = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, G, -3), np.repeat(v, G, -3)
    s = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    S, T = s.shape[-2:]
    s = s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
    behind = np.arange(S)[:, None] + T - S - np.arange(T)  # a query its key
    if causal:
        s = np.where(behind >= 0, s, -np.inf)
    if window is not None:
        s = np.where(abs(behind) < window, s, -np.inf)
    return softmax.reference(s) @ v


def _in_torch(torch: Any, q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """PyTorch's attention, by cuDNN."""
    def run() -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


CAUSAL = {"causal": True}
WINDOW = {"causal": True, "window": 40}
KEYS_64 = Schedule(n=64)
HEADS = (2, 512, 128)


@routine(
    attention, cross_attention, *DECODE, reference=reference,
    arrays="`[B, H, S, D]`, `[B, Hk, T, D]`, `[B, Hk, T, E]`; without `B` too",
    ops=lambda F, q, k, v, **options: F.attention(q, k, v, **options),
    samples=(
        KernelSample("", ((2, 2, 70, 64),) * 3, "bf16", terms=16),
        KernelSample("causal", ((2, 2, 70, 64),) * 3, "bf16", CAUSAL, terms=16),
        KernelSample("f32", ((3, 40, 16),) * 3, "f32", CAUSAL, terms=40),
        KernelSample("of groups", ((2, 4, 33, 32), (2, 2, 33, 32), (2, 2, 33, 48)), "f16",
                     terms=16),
        KernelSample("with a past", ((1, 2, 20, 32), (1, 2, 90, 32), (1, 2, 90, 32)), "bf16",
                     CAUSAL,
                     terms=16),
        KernelSample("of one query", ((2, 8, 1, 32), (2, 2, 300, 32), (2, 2, 300, 48)), "bf16",
                     CAUSAL, terms=16),
        KernelSample("of few queries", ((1, 12, 5, 64), (1, 2, 270, 64), (1, 2, 270, 64)), "f16",
                     CAUSAL, terms=16),
        KernelSample("scaled", ((2, 20, 16), (2, 35, 16), (2, 35, 16)), "f32", {"scale": 0.3},
                     terms=35),
        KernelSample("in a window", ((2, 2, 150, 64),) * 3, "bf16", WINDOW, terms=16),
        KernelSample("near", ((2, 40, 16), (2, 75, 16), (2, 75, 16)), "f32", {"window": 9},
                     terms=35),
        KernelSample("capped", ((2, 2, 70, 64),) * 3, "bf16", {"soft_cap": 2.0}, terms=16),
    ),
    variant=Schedule(block=(64, 32), warps=4),
    compiled=(
        CompiledCall("causal", (HEADS,) * 3, "bf16", CAUSAL, KEYS_64, SPECIALISED),
        CompiledCall("in a window", (HEADS,) * 3, "bf16", WINDOW, KEYS_64, SPECIALISED),
        CompiledCall("capped", (HEADS,) * 3, "bf16", CAUSAL | {"soft_cap": 30.0}, KEYS_64,
                     SPECIALISED),
        CompiledCall("with a past", (HEADS, (2, 1024, 128), (2, 1024, 128)), "bf16", CAUSAL,
                     KEYS_64),
        CompiledCall("f32", ((2, 512, 64),) * 3),
        CompiledCall("of one query", ((1, 32, 1, 128), *((1, 8, 4096, 128),) * 2), "bf16"),
        CompiledCall("of few queries", ((1, 32, 8, 128), *((1, 8, 4096, 128),) * 2), "bf16",
                     CAUSAL),
        CompiledCall("of one query of wide heads", ((1, 4, 1, 256), *((1, 1, 100, 256),) * 2),
                     "bf16"),
    ),
    benchmarks=tuple(
        Benchmark(f"{'causal' if causal else 'full'}, {B} heads of {S} x 128, bf16",
                  ((1, B, S, 128),) * 3, "bf16", {"causal": causal},
                  flops=4 * B * S * S * 128 / (2 if causal else 1), beside=("cuDNN", _in_torch))
        for B, S in ((64, 4096), (16, 16384)) for causal in (False, True)),
)
def flash_attention_2(run: Any, q: Any, k: Any, v: Any, *, causal: bool = False,
                      scale: float | None = None, window: int | None = None,
                      soft_cap: float | None = None, return_lse: bool = False) -> Any:
    """y = softmax(scale q k') v, softmax along the keys.

    q: [B, H, S, D]   k: [B, Hk, T, D]   v: [B, Hk, T, E]   y: [B, H, S, E], of q's type; or without
    B, then H = Hk. H is a multiple of Hk: query head h reads key head h // (H / Hk).
    scale: positive; 1 / sqrt(D) when None.  causal: query i sees the keys up to i + T - S.
    window: it sees those fewer than as many from i + T - S; blocks of keys that none sees cost
    nothing.  soft_cap: scores s become soft_cap tanh(s / soft_cap).
    return_lse: (y, lse) in place of y; lse [B, H, S] in f32, the log of the sum of exp(scores).
    All of one float type of up to 32 bits. Scores and sums are f32; weights are rounded to v's
    type before the second product, the result once. Memory beside the result: none, but for up to
    16 queries of 16 bits over many keys, which are split: some 264 results of up to 64 rows in f32.
    Raises ShapeError, DTypeError, ArgumentError. Dao 2023, arXiv:2307.08691, algorithm 1.
    """
    run.note()
    heads, group = _check(run, q, k, v)
    if scale is not None and not scale > 0:
        run.fail(f"scale is {scale}", "a positive number; ts.attention takes any")
    for name, x in (("window", window), ("soft_cap", soft_cap)):
        if x is not None and not x > 0:
            run.fail(f"{name} is {x}", "a positive number, or None")
    (S, D), (T, E) = tuple(q.shape)[-2:], tuple(v.shape)[-2:]
    if window is not None and S > T:
        run.fail(f"a window of {S} queries and {T} keys", "as many keys; ts.attention takes any",
                 ShapeError)
    out, dtype = empty_like(q, (*tuple(q.shape)[:-1], E)), type_of(q, "q").dtype
    logs = empty_like(q, tuple(q.shape)[:-1], "f32") if return_lse else None
    if return_lse and not E:
        run.fail("return_lse of values without elements", "ts.attention", ShapeError)
    if 0 in tuple(out.shape):
        return out if logs is None else (out, logs)
    factor = (1.0 / math.sqrt(D) if scale is None else float(scale)) * math.log2(math.e)
    rule: dict[str, Any] = {"window": window or 0, "cap": float(soft_cap or 0)}
    if run.given is None and few_queries(dtype, S, T, max(D, E)):
        _decode(run, q, k, v, (out, logs), factor, (heads // group, group * S), bool(causal), rule)
        return out if logs is None else (out, logs)
    m, n = _block(run, q, (heads, S, T, D, E), bool(causal), rule, group == 1)
    given = {} if logs is None else {"logs": reshaped(logs, (heads, S))}
    run.run("attention" if S == T else "cross_attention", reshaped(q, (heads, S, D)),
            reshaped(k, (heads // group, T, D)), reshaped(v, (heads // group, T, E)),
            reshaped(out, (heads, S, E)), factor, group=group, BM=run.size("m", m),
            BN=run.size("n", n), causal=bool(causal), **rule, **given,
            knobs=tile_knobs(S, heads, max(D, E), m, bool(causal), **rule,
                             multiprocessors=card_of(q).multiprocessors))
    return out if logs is None else (out, logs)


def _decode(run: Any, q: Any, k: Any, v: Any, results: tuple[Any, Any], factor: float,
            extents: tuple[int, int], causal: bool, rule: dict[str, Any]) -> None:
    """Few queries over keys in parts. results: out, and where the logs of sums go if they are
    wanted.  extents: heads of keys in all, and queries that read one."""
    (C, R), (S, D), (T, E), (out, logs) = extents, tuple(q.shape)[-2:], tuple(v.shape)[-2:], results
    chip = generation_of(q)
    plan = decode_plan(C, R, min(T, rule["window"] + S) if rule["window"] else T, max(D, E),
                       streamed=streams(chip, D, E), groups=chip.most_cluster_groups if chip else 1,
                       multiprocessors=card_of(q).multiprocessors)
    P, parts, lse = plan.parts, reshaped(out, (1, C, R, E)), None
    if plan.clustered:
        parts, lse = reshaped(out, (C, R, E)), None if logs is None else reshaped(logs, (C, R))
    elif P > 1 or logs is not None:
        parts, lse = (empty_like(q, shape, "f32") for shape in ((P, C, R, E), (P, C, R)))
    run.run(plan.kernel, reshaped(q, (C, R, D)), reshaped(k, (C, T, D)), reshaped(v, (C, T, E)),
            None, parts, lse, factor, S=S, BM=plan.rows, BN=plan.keys,
            causal=causal and S > 1, knobs=plan.knobs, **rule, **plan.constants(R))
    if lse is not None and not plan.clustered:
        run.run("combine_parts", reshaped(parts, (P, C * R, E)), reshaped(lse, (P, C * R)),
                reshaped(out, (C * R, E)), None if logs is None else reshaped(logs, (C * R,)),
                BP=plan.together)


def _block(run: Any, q: Any, extents: tuple[int, ...], causal: bool, rule: dict[str, Any],
           alone: bool) -> tuple[int, int]:
    """Queries and keys of a block, by the model or as measured. extents: heads, queries,
    keys, and elements of either.  alone: whether each head has keys of its own."""
    (heads, S, T, D, E), dtype = extents, type_of(q, "q").dtype
    found = run.trial or AttentionBlock(*attention_block(
        dtype, S, max(D, E), causal, generation_of(q), **rule))
    if run.trial is None and alone and S == T and D == E and not any(rule.values()):
        problem = attention_text(dtype, heads, S, D, causal)
        found = tuned_attention(found, problem, card_of(q).tuned)
    run.note(*[found.note] * (not run.has_sizes))
    return found.rows, found.keys


def _check(run: Any, q: Any, k: Any, v: Any) -> tuple[int, int]:
    """Query heads in all, and how many of them share a head of keys."""
    a, b, c = (tuple(x.shape) for x in (q, k, v))
    shapes = ", ".join(map(show_shape, (a, b, c)))
    if not len(a) == len(b) == len(c) or len(a) not in (3, 4):
        run.fail(f"three arrays of 3 or 4 axes, got {shapes}", "[B, H, S, D]", ShapeError)
    if b[:-1] != c[:-1] or a[-1] != b[-1] or a[:-3] != b[:-3] or (
            a[-3] % b[-3] if b[-3] else a[-3]):
        run.fail(f"queries, keys and values do not fit: {shapes}",
                 "q [B, H, S, D], k [B, Hk, T, D], v [B, Hk, T, E], H a multiple of Hk", ShapeError)
    if len(a) == 3 and a[0] != b[0]:
        run.fail(f"the leading extents differ: {shapes}", "grouped heads need 4 axes", ShapeError)
    kinds = [type_of(x, n).dtype for x, n in ((q, "q"), (k, "k"), (v, "v"))]
    if len(set(kinds)) > 1 or kinds[0].kind != "float" or kinds[0].bits > 32:
        run.fail(f"q, k and v are {', '.join(map(str, kinds))}", "one float type of up to 32 bits",
                 DTypeError)
    batch = a[0] if len(a) == 4 else 1
    return batch * a[-3], a[-3] // b[-3] if b[-3] else 1


def tile_knobs(S: int, heads: int, width: int, rows: int, causal: bool, window: int = 0,
               cap: float = 0.0, score: bool = False, spans: bool = False, mask: str = "",
               multiprocessors: int = DEFAULT.multiprocessors) -> dict[str, Any]:
    """Knobs of the schedule besides those that the compiler chooses: TILES, "static" where blocks
    are dealt out beforehand although some take longer. To ask for the next one costs more than some
    wait at the end where they are short, and as many for each multiprocessor. CLUSTER: pairs of
    blocks of many queries of narrow heads bring keys and values for each other; with those of the
    gradient 8.19 ms in place of 8.26 (H200, 2026-11-26, medians of rounds in turn).

    heads: in all.  rows: queries of a block. With heads of 64 and 512 queries, causal, 262144 rows
    in all, 73.8 us become 68.9; with 128, 192 and 512 queries 97.5 and 138.7 become 95.2 and 134.4;
    with 128 and lengths 2377 become 2066, documents 1129 become 1069, with 64 they do not. With 64
    and 1024 queries 105.2 become 108.4 (H200, 2026-11-26, medians of CUDA graphs). stages: of keys
    and values where warpgroups do different iterations, so that one may be ahead of another.
    PIN: with spans three warpgroups of narrow heads wait for both matmuls in front of the softmax:
    64 heads of 8192 by 64 with lengths 1220 us in place of 1278, documents 492 in place of 496, all
    keys 2029 in place of 2080 (H200, 2026-11-28, medians of seven rounds of calls in turn).
    TURNS: of warpgroups beside a line of keys (docs/internals/measured.md#turns-of-warpgroups).
    """
    if mask:
        return {"stages": 3, "TURNS": True} if mask == "line" else (
            {"stages": 3} if mask == "tile" else {})
    if window or cap or score:
        return {"stages": 4} if window and rows == 192 and width <= 64 and not cap else {}
    if not (causal or spans):
        return {"CLUSTER": 2} if rows == 192 and width <= 64 and S >= LONG else {}
    if spans:
        if width <= 64:
            return {"stages": 3} | ({"PIN": 0} if rows == 192 and not causal else {})
        return {} if causal else {"TILES": "static"}
    if S > SHORT or largest_share(-(-S // rows), heads, multiprocessors) > 1.05:
        return {}
    return {"TILES": "static"} | ({"PIN": 0} if width > 192 else {})


@lru_cache(maxsize=256)
def largest_share(blocks: int, heads: int, multiprocessors: int) -> float:
    """What the busiest multiprocessor has to do, of what it had on average, if the causal
    blocks of each head are dealt out in the order of persist.py: four heads side by side, the
    longest first."""
    strips = [np.repeat(np.arange(blocks, 0, -1), min(4, heads - h)) for h in range(0, heads, 4)]
    work = np.concatenate(strips) + 1.0
    whole = np.pad(work, (0, -len(work) % multiprocessors)).reshape(-1, multiprocessors).sum(0)
    return float(whole.max() / whole.mean())


def attention_block(dtype: DType, S: int, width: int, causal: bool, chip: Generation | None,
                    window: int = 0, cap: float = 0.0, score: bool = False, mask: str = "",
                    spans: bool = False) -> tuple[int, int]:
    """Queries and keys of a block, by what registers and shared memory hold of heads this wide.

    128 queries in two warpgroups, as many keys at a time; half as many for wide heads, and where
    keys and values of two stages do not fit shared memory. Three warpgroups for narrow heads, where
    their blocks waste little on the diagonal: with 64 and 4096 queries 1.17 times as fast, causal
    1.04 (H200, 2026-11-22), with 64 and 512 queries 1.03 (H200, 2026-11-26), with 96 and 4096
    queries 1.09, causal 0.96 (H100, 2026-11-25). With ALiBi and 8192 queries, causal, they take
    1510 us in place of 1747 of 64 heads of 64 (H200, 2026-11-26, medians of calls in turn). In
    windows few keys an iteration let them leave out more: 64 heads of 64, 8192 queries that see
    1024 keys, 308 us with 64 keys, 315 with 112, 317 with 96, 333 with 80, and 353 with 128 by two
    warpgroups (H200, 2026-11-27, medians of calls in turn). With spans 112 keys compute less beyond
    their ends than 128: 64 heads of 64, 8192 queries, with lengths 1250 us in place of 1271,
    documents 705 in place of 714 (H200, 2026-11-28, medians of calls in turn).
    chip: None where it is not known.  mask: "line" of keys, or "tile", where one lies in memory,
    "draws" with dropout, "one draw" where its keys are those of all queries
    """
    if dtype.bits > 16:
        return 32, 32
    if mask:
        if cap or score or S < SHORT or mask not in ("line", "tile"):
            return 128, 64
        if mask == "line" and width <= 64:
            return (128, 128) if causal and S < 4096 else (192, 112)
        return 128, 96 if mask == "line" or width <= 64 else 64
    if chip is not None and chip.warpgroup_matmul is not None and S > 64:
        if cap and 64 < width <= 128:
            return 192, 64
        if cap and width <= 64:
            return 128 if causal else 192, 96
        if score and not window and width in (32, 64, 128) and S >= (4096 if causal else 512):
            return 192, 112 if width <= 64 else 64
        if window and not score and width in (32, 64) and S >= SHORT:
            return 192, 64
        if (window or score) and width <= 64:
            return 128, 128
    if chip is not None and chip.warpgroup_matmul is not None:
        if width in (32, 64) and S >= (4096 if causal else 512):
            return 192, 96 if causal else 112 if spans else 128
        if 64 < width <= 96 and S >= 2048 and not causal:
            return 192, 112
    m, n = 128 if S > 64 else 64, 128 if width <= 128 else 64
    while chip is not None and n > 32 and (4 * n + m) * width * 2 > chip.group_shared_bytes:
        n //= 2
    return m, n
