"""What attention does to scores and weights between its matmuls: caps, masks and dropout, in tile
code.

    s = modified(scale Q K')   before the softmax: a mask that is added or chooses, causal or not
    w = drop(softmax(s))       behind it: K w / (1 - p), K drawn by a key and a weight's place

Without a mask in memory and dropout (attention.py, attention_backward.py) the kernels ask for
near_keys, near_queries and spans which blocks they need, and mask those alone of which a part is
not seen: each test compares the loop's variable with a number, so that the compiler makes loops of
their own of the blocks in front, between and behind.
Those of modified_attention.py take all there is, block by block. A further modification is a field
of ScoreRule, a line of block_scores and, where it leaves out whole blocks, a line of near_keys and
near_queries. What is added to scores, or puts -inf in their place, has no derivative of its own:
the cotangent of a product is scale times that of its score, and times the slope of a cap.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from functools import lru_cache
from typing import Any, NamedTuple

from ..numerics import f32
from ..tile import MODULE as tile
from ..tile.kernel.decorator import kernel

LOG2E = math.log2(math.e)
HIGHEST = 3e38  # above every score


class MaskRule(NamedTuple):
    """Where the element of M [Z, 1 or S, 1 or T] for a query and a key of a head lies.

    floats: they are added to the scores; else bools, whether the key is seen
    heads: of queries in a sequence.  per_batch, per_head: how far apart the masks of neighbouring
    sequences and heads are, 0 for one.  rows, columns: whether queries and keys have their own
    together: sequences whose heads have the same masks, and whose tiles follow each other, so that
    these are in L2 when they are read again; 0 where tiles go as heads lie
    """

    floats: bool
    heads: int = 1
    per_batch: int = 0
    per_head: int = 0
    rows: bool = False
    columns: bool = False
    together: int = 0


class MaskShare(NamedTuple):
    """How the heads that have one mask are summed: heads of them, in so many parts, those of `run`
    heads one after another; run follows run behind those of all other masks."""

    heads: int = 1
    parts: int = 1
    run: int = 1


ALONE = MaskShare()


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


class ScoreCode(NamedTuple):
    """A user's function of a score as tile code: text defines `value(s, b, h, i, j, fi, fj)`, and
    `both`, which gives its slope too. fi, fj: i and j as floats.  heads: of queries in a sequence
    linear: it is x s + y i + z j + c, and text defines `terms(b, h)`, which gives x, y, z and c
    """

    text: str
    heads: int
    linear: bool = False

    @property
    def name(self) -> str:
        """One for each, by which it is called in the texts of kernels."""
        return f"score_{hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:12]}"

    @property
    def value(self) -> Any:
        return _functions(self.text)["value"]

    @property
    def both(self) -> Any:
        return _functions(self.text)["both"]

    @property
    def terms(self) -> Any:
        return _functions(self.text)["terms"]


@lru_cache(maxsize=256)
def _functions(text: str) -> dict[str, Any]:
    file = f"<score {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = {"__name__": "tessera_score", "__file__": file, "tile": tile, "tanh": tanh}
    exec(compile(text, file, "exec"), scope)
    return scope


class ScoreRule(NamedTuple):
    """What is done to scores and weights. mask, dropout, score: None without one. window, cap: 0
    without. nan: a query that sees no key gives NaN, as softmax does, in place of 0."""

    causal: bool = False
    mask: MaskRule | None = None
    dropout: DropoutRule | None = None
    window: int = 0
    cap: float = 0.0
    score: ScoreCode | None = None
    nan: bool = False


# --- which blocks ------------------------------------------------------------------------------
@kernel
def near_keys(causal, window, q0, BM, S, T):
    """First and end of the keys that queries [q0:q0+BM] see. The last query sees the last key."""
    first = max(0, q0 + (T - S) - (window - 1)) if window else 0
    if not (causal or window):
        return first, T
    return first, min(T, q0 + BM + (T - S) + (0 if causal else window - 1))


@kernel
def near_queries(causal, window, k0, BM, S, T):
    """First and end of the queries that see keys [k0:k0+BM]."""
    end = min(S, k0 + BM - 1 - (T - S) + window) if window else S
    if not (causal or window):
        return 0, end
    return max(0, k0 - (T - S) - (0 if causal else window - 1)), end


# --- scores ------------------------------------------------------------------------------------
@kernel
def tanh(x):
    """1 - 2 r with r = 1 / (1 + exp 2x), the square of a reciprocal root: a division would cost
    ten times as much. Its error is 2^-21, of small x too."""
    root = tile.rsqrt(tile.exp2(x * (2 * LOG2E)) + 1.0)
    return 1.0 - 2.0 * (root * root)


@kernel
def capped(products, scale, cap):
    """cap tanh(scale products / cap), and its slope by scale products."""
    root = tile.rsqrt(tile.exp2(products * (scale * (2 * LOG2E / cap))) + 1.0)
    r = root * root
    return cap - (2 * cap) * r, 4.0 * (r - r * r)


@kernel
def scored(products, scale, cap, score, h, i, j):
    """(x, a factor, the slope of cap and score or None): the score of a product in base 2 is x
    times the factor, and a mask that acts on x leaves the multiplication to what subtracts from it.

    h: the head of queries, in all sequences.  i, j: places of queries and keys, as the axes of
    products lie, those of queries counted so that query i sees keys up to i
    """
    if score is None:
        if not cap:
            return products, scale * LOG2E, None
        x, slope = capped(products, scale, cap)
        return x, LOG2E, slope
    x, slope = capped(products, scale, cap) if cap else (products * scale, None)
    x, own = score.both(x, h // score.heads, h % score.heads, i[0], j[0], i[1], j[1])
    return x, LOG2E, own if slope is None else own * slope


@kernel
def score_value(products, scale, cap, score, h, i, j):
    """x of a cap, a score or both."""
    x = capped(products, scale, cap)[0] if cap else products * scale
    if score is None:
        return x
    return score.value(x, h // score.heads, h % score.heads, i[0], j[0], i[1], j[1])


@kernel
def linear_terms(scale, cap, score, h, place):
    """Of a score that is linear, None of another: the factor of products, or of what a cap makes
    of them; the steps from query to query and from key to key; what it is at query and key `place`
    without its product, all in base 2; and its slope by the score."""
    if score is None or not score.linear:
        return None
    of_score, of_query, of_key, rest = score.terms(h // score.heads, h % score.heads)
    rest = (of_query + of_key) * tile.cast(place, "f32") + rest
    return (of_score * (LOG2E if cap else scale * LOG2E), of_query * LOG2E, of_key * LOG2E,
            rest * LOG2E, of_score)


@kernel
def line(step, first, count):
    """What a linear score adds from the place `first` on, counted from where its terms are."""
    return tile.ramp(step * tile.cast(first, "f32"), step, count)


@kernel
def linear_score(products, scale, cap, terms, added):
    """A linear score in base 2, and its slope by scale products. added: a number for each row or
    column; what the other axis adds is where the maximum of a row or the log of its sum is."""
    x, slope = capped(products, scale, cap) if cap else (products, None)
    return x * terms[0] + added, terms[4] if slope is None else slope * terms[4]


@kernel
def places(first, count, axis):
    """Numbers from `first` on along the rows (0) or the columns (1) of a block, as integers and as
    floats: where a conversion is as dear as an exponential, one number is converted, not all."""
    numbers = tile.arange(0, count) + first
    floats = tile.ramp(tile.cast(first, "f32"), 1.0, count)
    return (numbers[:, None], floats[:, None]) if axis == 0 else (numbers[None, :], floats[None, :])


@kernel
def both_kinds(numbers):
    """Of places that are made already."""
    return numbers, tile.cast(numbers, "f32")


@kernel
def key_limits(causal, window, q0, ahead):
    """The last and the first key that query q0 sees, for near_of_rows. They are made in front of
    the loop over keys, so that it compares its variable with numbers."""
    return q0 + ahead + (0 if causal else window - 1), q0 + ahead - (window - 1)


@kernel
def near_of_rows(scores, causal, window, limits, k0):
    """Scores of queries down the rows, -inf where a key is not near enough."""
    last, first = limits
    scores = tile.causal_mask(scores, last, k0) if causal or window else scores
    return tile.causal_mask(scores, k0, first, keys=0) if window else scores


@kernel
def query_limits(causal, window, k0, ahead):
    """How far a key that a query sees is ahead of it at most, and the last query that sees key k0,
    for near_of_columns."""
    return ahead + (0 if causal else window - 1), k0 - ahead + (window - 1)


@kernel
def near_of_columns(scores, causal, window, limits, k0, q0):
    """Scores of keys down the rows, -inf where a key is not near enough."""
    most, last = limits
    scores = tile.causal_mask(scores, q0 + most, k0, keys=0) if causal or window else scores
    return tile.causal_mask(scores, last, q0) if window else scores


@kernel
def span_rows(spans, z, r0, BM, R, first, end):
    """What rows [r0:r0+BM] see of [first:end] by spans [Z, 2, R]: the first of any of them, the end
    of any, and what in_spans takes; None in its place where there are no spans.

    Neither number of a span falls from row to row, so that the ends of a block are those of its
    last and its first row.
    """
    if spans is None:
        return first, end, None
    last = min(r0 + BM, R) - 1
    rows = (spans[z, 0, r0:r0+BM], spans[z, 1, r0:r0+BM], spans[z, 0, last], spans[z, 1, r0])
    return max(first, spans[z, 0, r0]), min(end, spans[z, 1, last]), rows


@kernel
def own_spans(spans, z, own, last, R, first, end, rows):
    """What rows [own:last] of those of span_rows see of [first:end], and what in_spans takes."""
    if spans is None:
        return first, end, rows
    firsts, ends, _, _ = rows
    own, last = min(own, R - 1), min(last, R - 1)
    return (max(first, spans[z, 0, own]), min(end, spans[z, 1, last]),
            (firsts, ends, spans[z, 0, last], spans[z, 1, own]))


@kernel
def loaded(rows):
    """What in_spans takes, with spans of all rows in registers: where there is room, blocks that
    need masks do not wait for them."""
    if rows is None:
        return rows
    firsts, ends, last_first, first_end = rows
    return tile.load(firsts), tile.load(ends), last_first, first_end


@kernel
def in_spans(scores, rows, c0, held=True):
    """Scores, -inf in columns from c0 on that a row does not see. held: rows are `loaded`, else
    blocks that need masks bring them, and the others have their registers."""
    if rows is None:
        return scores
    firsts, ends, last_first, first_end = rows
    if c0 + scores.shape[1] > first_end:
        scores = tile.span_mask(scores, ends if held else tile.load(ends), c0)
    if last_first > c0:
        scores = tile.span_mask(scores, firsts if held else tile.load(firsts), c0, behind=False)
    return scores


@kernel
def head_of(mask, number, group):
    """The head that is the number-th to be done, of queries (group 1) or of keys."""
    if mask is None or not mask.together:
        return number
    return number % mask.together * (mask.heads // group) + number // mask.together


@kernel
def mask_place(mask, h):
    """Which of the matrices or lines of a mask is that of head h."""
    return h // mask.heads * mask.per_batch + h % mask.heads * mask.per_head


@kernel
def sharing_head(share, z, j, masks):
    """The j-th of the heads that have mask z of so many."""
    return (j // share.run * masks + z) * share.run + j % share.run


@kernel
def mask_unit(scale, cap, score):
    """By what a mask is multiplied to be added to what `scored` makes of products."""
    return 1.0 if cap or score is not None else 1.0 / scale


@kernel
def with_mask(s, part, unit):
    """s, and unit times a part of a mask. Not written as a sum, which a matmul would begin with:
    it would wait for the mask."""
    return tile.fma(tile.cast(tile.load(part), f32), unit, s)


@kernel
def mask_block(rule, M, h, q0, k0, BM, BN):
    """The mask of queries [q0:q0+BM] and keys [k0:k0+BN] of head h; None without one."""
    if M is None:
        return None
    where = rule.mask
    z = mask_place(where, h)
    if where.rows and where.columns:
        return tile.load(M[z, q0:q0+BM, k0:k0+BN], fill=0)
    if where.rows:
        return tile.load(M[z, q0:q0+BM, 0], fill=0)[:, None]
    if where.columns:
        return tile.load(M[z, 0, k0:k0+BN], fill=0)[None, :]
    one = tile.broadcast(tile.full((1, 1), 0.0) + M[z, 0, 0], (BM, BN))
    return one if where.floats else one != 0.0


@kernel
def block_scores(rule, products, mask, h, query, key, T, scale):
    """Scores in base 2 of products of queries and keys, -inf where a key is not seen; and the slope
    of cap and score, None without them.

    query: the number of each product's query, counted so that it sees the keys up to its own.
    key: of its key, along the other axis.  mask: of the block, its axes as those of the products
    """
    s, factor, slope = scored(products, scale, rule.cap, rule.score, h, both_kinds(query),
                              both_kinds(key))
    s = s * factor
    if mask is not None:
        s = s + mask * LOG2E if rule.mask.floats else tile.where(mask, s, -math.inf)
    s = tile.where(key < T, s, -math.inf)
    if rule.causal or rule.window:
        s = tile.where(key <= query + (0 if rule.causal else rule.window - 1), s, -math.inf)
    return tile.where(key > query - rule.window, s, -math.inf) if rule.window else s, slope


@kernel
def sloped(x, slope):
    """The cotangent of a score as that of what was capped."""
    return x if slope is None else x * slope


@kernel
def scores_of_rows(rule, q, k, mask, h, q0, k0, S, T, scale):
    """Of queries down the rows."""
    ahead = T - S
    query, key = tile.arange(0, q.shape[0]) + q0 + ahead, tile.arange(0, k.shape[0]) + k0
    return block_scores(rule, tile.dot(q, k.T), mask, h, query[:, None], key[None, :], T, scale)


@kernel
def scores_of_columns(rule, q, k, mask, h, q0, k0, S, T, scale):
    """Of keys down the rows: what is made of these is the first operand of a matmul as it lies."""
    ahead = T - S
    query, key = tile.arange(0, q.shape[0]) + q0 + ahead, tile.arange(0, k.shape[0]) + k0
    products, mask = tile.dot(k, q.T), None if mask is None else mask.T
    return block_scores(rule, products, mask, h, query[None, :], key[:, None], T, scale)


@kernel
def spanned_rows(scores, N, z, q0, k0):
    """Scores of queries down the rows, -inf outside of the spans z of N [Y, 2, S]."""
    if N is None:
        return scores
    end = q0 + scores.shape[0]
    first, behind = tile.load(N[z, 0, q0:end], fill=0)[:, None], tile.load(N[z, 1, q0:end], fill=0)
    key = (tile.arange(0, scores.shape[1]) + k0)[None, :]
    return tile.where((key >= first) & (key < behind[:, None]), scores, -math.inf)


@kernel
def spanned_columns(scores, N, z, q0, k0):
    """Of keys down the rows."""
    if N is None:
        return scores
    end = q0 + scores.shape[1]
    first, behind = tile.load(N[z, 0, q0:end], fill=0)[None, :], tile.load(N[z, 1, q0:end], fill=0)
    key = (tile.arange(0, scores.shape[0]) + k0)[:, None]
    return tile.where((key >= first) & (key < behind[None, :]), scores, -math.inf)


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
    seen = near_keys(True, 0, start, rows, S, T)[1] if rule.causal and S > block else T
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


__all__ = ["ALONE", "DropoutRule", "MaskRule", "MaskShare", "ScoreCode", "ScoreRule"]
