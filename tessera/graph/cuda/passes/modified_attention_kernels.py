"""Attention by the kernels that take any: with a mask, dropout, queries that see no key.

A mask's own cotangent is one of every matrix of scores before it is summed: where it is asked for
these lie in memory. Dropout's draws are made in the kernels: they get the keys of its blocks of
queries, which the host computes where it knows the graph's.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np

from ....kernels.attention_scores import DropoutRule, MaskRule, MaskShare, ScoreRule
from ....kernels.modified_attention import (
    modified_attention,
    modified_attention_keys,
    modified_attention_queries,
    modified_attention_scores,
    modified_blocks,
)
from ....numerics import NumericType
from ....tensor import Tensor
from ... import functions as F
from ...operand import convert, to_compute
from ...ops.attention_blocks import BLOCK_ROWS, Extras
from ...ops.score_function import ScoreFunction
from ...schedule.library_call import library_call
from ..choose_schedule import blocks
from .attention_masks import mask_rule, summed_cotangent
from .score_code import score_code


class _Call:
    """The operands of one call as the kernels take them, and their constants.

    operands: queries, keys and values by heads, the mask and the keys of draws, None without one
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Tensor, ...], scale: float,
                 causal: bool, dropout: float = 0.0, window: int = 0, cap: float = 0.0,
                 score: ScoreFunction | None = None, together: bool = False,
                 nan: bool = False):
        self.mask, spans, key = Extras.of(rest, dropout)
        (S, D), (T, E) = tuple(q.shape[-2:]), tuple(v.shape[-2:])
        count, keys = prod(q.shape[:-2]), prod(k.shape[:-2])
        self.Q, self.K = F.reshape(q, (count, S, D)), F.reshape(k, (keys, T, D))
        self.V = F.reshape(v, (keys, T, E))
        self.rows, self.scale = (count, S), scale
        self.rows_of_block, self.step, self.gradient_step = modified_blocks(
            q.dtype, max(D, E), key is not None)
        M, mask_rule = _mask_operand(self.mask, q.shape[-3])
        W = None if key is None else draw_keys(key, S=S, together=together)
        dropout_rule = None if key is None else draws_rule(S, T, dropout, together)
        self.operands = self.Q, self.K, self.V, M, W
        self.constants: dict[str, Any] = {
            "group": count // keys,
            "rule": ScoreRule(causal, mask_rule, dropout_rule, window, cap,
                              None if score is None else score_code(score, q.shape[-3]), nan)}
        if spans is not None:
            N = F.reshape(spans, (-1, 2, S))
            self.constants |= {"N": N, "heads": count // N.shape[0]}


def _mask_operand(mask: Tensor | None, heads: int) -> tuple[Tensor | None, MaskRule | None]:
    """One axis for all masks in place of those of sequences and heads."""
    if mask is None:
        return None, None
    rule = mask_rule(tuple(mask.shape), heads, mask.dtype.kind == "float")
    return F.reshape(mask, (prod(mask.shape[:-2]), *mask.shape[-2:])), rule


def draw_keys(key: Tensor, *, S: int, together: bool) -> Tensor:
    """Those of the blocks of queries: one of all queries has the graph's own."""
    blocks = range(0, S, BLOCK_ROWS) if S > BLOCK_ROWS and not together else ()
    return F.stack([F.fold_in(key, start) for start in blocks] or [key])


def draws_rule(S: int, T: int, dropout: float, together: bool) -> DropoutRule:
    rows = BLOCK_ROWS if S > BLOCK_ROWS and not together else S
    return DropoutRule(rows, S % 4 == 0 and T % 4 == 0, smallest_kept(dropout), 1 / (1 - dropout))


def smallest_kept(dropout: float) -> int:
    """The smallest word of a draw that keeps a weight: its upper 24 bits are a fraction that is
    compared with the f32 of a probability."""
    return math.ceil(float(np.float32(dropout)) * 2**24) << 8


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, types: tuple[NumericType, ...],
             **attrs: Any) -> tuple[Tensor, Tensor]:
    c = _Call(q, k, v, rest, **attrs)
    out, lse = F.zeros((*c.rows, v.shape[-1]), types[0]), F.zeros(c.rows)
    modified_attention(*c.operands, out, lse, c.scale, BM=c.rows_of_block, BN=c.step, **c.constants)
    return F.reshape(out, (*q.shape[:-1], v.shape[-1])), F.reshape(lse, q.shape[:-1])


def lowered_sums(g: Tensor, y: Tensor, q: Tensor, of_logs: Tensor | None) -> Tensor:
    """What is subtracted from the cotangent of each weight of a query: the sum of result, as it is
    stored, times cotangent, less the cotangent of the log of its sum where there is one."""
    delta = F.sum(to_compute(g) * to_compute(convert(y, q.type)), axis=-1)
    return delta if of_logs is None else delta - of_logs


def _gradient(g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor,
              types: tuple[NumericType, ...], wanted: bool, of_sums: bool = False, **attrs: Any
              ) -> tuple[Tensor, ...]:
    """Two kernels, and one more where the mask's cotangent is wanted. of_sums: the last operand is
    the cotangent of the logs of sums."""
    rest, of_logs = (rest[:-1], rest[-1]) if of_sums else (rest, None)
    c = _Call(q, k, v, rest, **attrs)
    delta = lowered_sums(g, y, q, of_logs)
    G = g if g.dtype is q.dtype else convert(g, q.type)
    common = (*c.operands, F.reshape(G, (*c.rows, v.shape[-1])), F.reshape(lse, c.rows),
              F.reshape(delta, c.rows))
    dQ, dK, dV = (F.zeros(x.shape, t) for x, t in zip((c.Q, c.K, c.V), types, strict=False))
    n, step = c.rows_of_block, c.gradient_step
    modified_attention_keys(*common, dK, dV, c.scale, BM=step, BN=n, **c.constants)
    modified_attention_queries(*common, dQ, c.scale, BM=n, BN=step, **c.constants)
    made = F.reshape(dQ, q.shape), F.reshape(dK, k.shape), F.reshape(dV, v.shape)
    if c.mask is None or c.mask.dtype.kind == "bool":
        return made
    if not wanted:
        return *made, F.zeros(c.mask.shape, types[3])

    def of_scores(dM: Tensor, share: MaskShare) -> None:
        modified_attention_scores(*common, dM, c.scale, BM=n, BN=n, share=share, **c.constants)

    groups = blocks(q.shape[-2], n) * blocks(k.shape[-2], n)
    rule = c.constants["rule"].mask
    return *made, summed_cotangent(of_scores, c.mask, (q.shape, k.shape[-2]), rule, groups,
                                   types[3])


DRAW_KEYS = library_call("draw_keys", expand=draw_keys)
MODIFIED = library_call("modified_attention", multi=True, expand=_forward)
MODIFIED_GRADIENT = library_call("modified_attention_gradient", multi=True, expand=_gradient)


__all__ = ["DRAW_KEYS", "MODIFIED", "MODIFIED_GRADIENT", "draw_keys", "draws_rule", "lowered_sums",
           "smallest_kept"]
