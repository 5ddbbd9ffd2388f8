"""What attention does to scores and weights between its matmuls: masks and dropout, in tile code.

    s = modified(scale Q K')   before the softmax: a mask that is added or chooses, causal or not
    w = drop(softmax(s))       behind it: K w / (1 - p), K drawn by a key and a weight's place

The kernels of modified_attention.py ask here, block by block, and know nothing else of it: which
keys a block of queries sees, what is read of the operands, the scores, which weights are kept.
A further modification is a field of ScoreRule, a line of block_scores and, where it leaves out
whole blocks, a line of keys_seen and queries_seeing. What is added to scores, or puts -inf in their
place, has no derivative of its own: the cotangent of a product is scale times that of its score.
For a function of the score, such as a cap, the kernels would multiply by its slope.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

LOG2E = math.log2(math.e)


class MaskRule(NamedTuple):
    """Where the element of M [Z, 1 or S, 1 or T] for a query and a key of a head lies.

    floats: they are added to the scores; else bools, whether the key is seen
    heads: of queries in a sequence.  per_batch, per_head: how far apart the masks of neighbouring
    sequences and heads are, 0 for one.  rows, columns: whether queries and keys have their own
    """

    floats: bool
    heads: int = 1
    per_batch: int = 0
    per_head: int = 0
    rows: bool = False
    columns: bool = False


class DropoutRule(NamedTuple):
    """How W [blocks, 2], the keys of blocks of queries, say which weights are kept.

    Word (h rows + i) seen + j of the stream of a block of queries is that of its i-th query of head
    h and key j, as the composition draws it (graph/ops/attention_blocks.py).
    block: queries of one.  runs: rows of words begin at multiples of four, so that those of four
    neighbouring keys are one computation.  least: the smallest word that keeps.  grown: 1 / (1 - p)
    """

    block: int
    runs: bool
    least: int
    grown: float


class ScoreRule(NamedTuple):
    """What is done to scores and weights. mask, dropout: None without one."""

    causal: bool = False
    mask: MaskRule | None = None
    dropout: DropoutRule | None = None


# --- which blocks ------------------------------------------------------------------------------
@kernel
def keys_seen(rule, q0, BM, S, T):
    """First and end of the keys that queries [q0:q0+BM] see. The last query sees the last key."""
    return 0, min(T, q0 + BM + T - S) if rule.causal else T


@kernel
def queries_seeing(rule, k0, BM, S, T):
    """First and end of the queries that see keys from k0 on, the first of a block of BM."""
    return max(0, k0 - (T - S)) // BM * BM if rule.causal else 0, S


# --- scores ------------------------------------------------------------------------------------
@kernel
def mask_block(rule, M, h, q0, k0, BM, BN):
    """The mask of queries [q0:q0+BM] and keys [k0:k0+BN] of head h; None without one."""
    if M is None:
        return None
    where = rule.mask
    z = h // where.heads * where.per_batch + h % where.heads * where.per_head
    if where.rows and where.columns:
        return tile.load(M[z, q0:q0+BM, k0:k0+BN], fill=0)
    if where.rows:
        return tile.load(M[z, q0:q0+BM, 0], fill=0)[:, None]
    if where.columns:
        return tile.load(M[z, 0, k0:k0+BN], fill=0)[None, :]
    one = tile.broadcast(tile.full((1, 1), 0.0) + M[z, 0, 0], (BM, BN))
    return one if where.floats else one != 0.0


@kernel
def block_scores(rule, products, mask, query, key, T, scale):
    """Scores in base 2 of products of queries and keys; -inf where a key is not seen.

    query: the number of each product's query, counted so that it sees the keys up to its own.
    key: of its key, along the other axis.  mask: of the block, its axes as those of the products
    """
    s = products * (scale * LOG2E)
    if mask is not None:
        s = s + mask * LOG2E if rule.mask.floats else tile.where(mask, s, -math.inf)
    s = tile.where(key < T, s, -math.inf)
    return tile.where(key <= query, s, -math.inf) if rule.causal else s


@kernel
def scores_of_rows(rule, q, k, mask, q0, k0, S, T, scale):
    """Of queries down the rows."""
    ahead = T - S
    query, key = tile.arange(0, q.shape[0]) + q0 + ahead, tile.arange(0, k.shape[0]) + k0
    return block_scores(rule, tile.dot(q, k.T), mask, query[:, None], key[None, :], T, scale)


@kernel
def scores_of_columns(rule, q, k, mask, q0, k0, S, T, scale):
    """Of keys down the rows: what is made of these is the first operand of a matmul as it lies."""
    ahead = T - S
    query, key = tile.arange(0, q.shape[0]) + q0 + ahead, tile.arange(0, k.shape[0]) + k0
    products, mask = tile.dot(k, q.T), None if mask is None else mask.T
    return block_scores(rule, products, mask, query[None, :], key[:, None], T, scale)


# --- weights -----------------------------------------------------------------------------------
@kernel
def kept(rule, W, h, q0, k0, S, T, BM, BN, keys=1):
    """Whether queries [q0:q0+BM] of head h keep their weights of keys [k0:k0+BN]; None: all.

    keys: the axis along which keys lie
    """
    if W is None:
        return None
    block = rule.dropout.block
    start = q0 // block * block
    rows = min(block, S - start)
    seen = keys_seen(rule, start, rows, S, T)[1] if rule.causal and S > block else T
    row = tile.cast(tile.arange(0, BM) + (h * rows + q0 - start), "int64")[:, None]
    column = tile.cast(tile.arange(0, BN) + k0, "int64")[None, :]
    index = row * tile.cast(tile.full((1, 1), seen, "int32"), "int64") + column
    words = W[q0 // block, 0], W[q0 // block, 1]
    keep = tile.random_bits(index, seed=words, runs=rule.dropout.runs) >= rule.dropout.least
    return keep if keys == 1 else keep.T


@kernel
def dropped(rule, x, keep):
    """x / (1 - p) where it is kept, else 0: weights, and the cotangents of weights."""
    return x if keep is None else tile.where(keep, x * rule.dropout.grown, 0.0)


__all__ = ["DropoutRule", "MaskRule", "ScoreRule"]
