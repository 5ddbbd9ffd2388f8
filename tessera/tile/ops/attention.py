"""Helpers of attention: causal masks and the online softmax."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.numerics import i32
from tessera.tile.builder import edge_masks, edge_rules, rules
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir import edges
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.handles import Handle
from tessera.tile.ir.op_record import OPS, declare, macro
from tessera.tile.ir.types import Scalar, TileType
from tessera.tile.ops.elementwise import exponential
from tessera.tile.ops.reduce import reduce


def _causal_rule(types: Any, attrs: Any) -> TileType:
    t = rules.require_tile(types[0], 2, "causal_mask")
    for at in types[1:]:
        if not isinstance(at, Scalar) or not at.uniform or at.dtype.kind == "float":
            raise RuleError(f"causal_mask needs uniform integers, got {at}")
    if t.dtype.kind != "float":
        raise RuleError(f"causal_mask writes -inf into a float tile, got {t}")
    return t


def _causal_lower(t: OpTracer, scores: Any, q0: Any, k0: Any, *, keys: Any = 1) -> Any:
    axis = t.ir.constant_int(keys, "keys")
    if axis not in (0, 1):
        t.fail(f"causal_mask: keys={axis}, and scores have axes 0 and 1",
               "keys=1: along the columns; keys=0: down the rows")
    args = [t.ir.value_of(scores), q0, k0]
    return t.ir.emit("causal_mask", args) if axis else t.ir.emit("causal_mask", args, keys=0)


@declare(rule=_causal_rule, attrs=("keys",), lower=_causal_lower,
         edges=edge_rules.first_operand_edges, layouts="same", pointwise=True)
def causal_mask(scores: Any, q0: Any, k0: Any, keys: Any = 1) -> Any:
    """scores with -inf where k0 + column > q0 + row; keys=0: where k0 + row > q0 + column, of
    scores that have their keys down the rows."""
    first = np.arange(scores.shape[1])[None, :, None] + np.reshape(q0 if keys else k0, (-1, 1, 1))
    second = np.arange(scores.shape[2])[None, None, :] + np.reshape(k0 if keys else q0, (-1, 1, 1))
    hidden = second > first if keys else first > second
    return np.where(hidden, scores.dtype.type(-np.inf), scores)


def _span_rule(types: Any, attrs: Any) -> TileType:
    t = rules.require_tile(types[0], 2, "span_mask")
    bounds, start = types[1:]
    if not isinstance(start, Scalar) or not start.uniform or start.dtype is not i32:
        raise RuleError(f"span_mask needs a uniform int32 for its first column, got {start}")
    if t.dtype.kind != "float":
        raise RuleError(f"span_mask writes -inf into a float tile, got {t}")
    if not isinstance(bounds, TileType) or bounds.dtype is not i32 or (
            bounds.shape != (t.shape[0], 1)):
        raise RuleError(f"span_mask needs an int32 for each of {t.shape[0]} rows, got {bounds}")
    return t


def _span_lower(t: OpTracer, scores: Any, bounds: Any, c0: Any, *, behind: Any = True) -> Any:
    if not isinstance(bounds, Handle) or not isinstance(bounds.type, TileType) or (
            len(bounds.type.shape) != 1):
        t.fail("span_mask takes the bounds of rows as a tile of rank 1",
               "ts.tile.load(ends[q0:q0+BM])")
    first = c0 if isinstance(c0, Handle) and c0.type.dtype.kind == "float" else t.ir.to(c0, i32)
    args = [t.ir.value_of(scores), t.ir.expand(bounds, 1), first]
    return t.ir.emit("span_mask", args, behind=bool(behind))


@declare(rule=_span_rule, attrs=("behind",), lower=_span_lower,
         edges=edge_rules.first_operand_edges, layouts="same", pointwise=True)
def span_mask(scores: Any, bounds: Any, c0: Any, behind: Any = True) -> Any:
    """scores with -inf where c0 + column >= bounds[row]; behind=False: where it is less."""
    columns = np.arange(scores.shape[2]) + np.reshape(c0, (-1, 1, 1))
    hidden = columns >= bounds if behind else columns < bounds
    return np.where(hidden, scores.dtype.type(-np.inf), scores)


@macro()
def mask_causal(t: OpTracer, scores: Any, rows: Any, cols: Any) -> Any:
    """In place: scores[r, c] = -inf where cols[c] > rows[r]; also returns them."""
    for x in (rows, cols):
        if not isinstance(x, Handle) or not isinstance(x.type, TileType) or len(x.type.shape) != 1:
            t.fail("mask_causal takes positions as tiles of rank 1",
                   "ts.tile.row_index(), ts.tile.col_index(block)")
    hidden = t.ir.arithmetic("gt", (t.ir.expand(cols, 0), t.ir.expand(rows, 1)))
    return t.ir.arithmetic("where", (hidden, float("-inf"), scores))


@macro()
def softmax_online(t: OpTracer, scores: Any) -> Any:
    """P, m, l of one block: m = row_max(S), P = exp(S - m), l = row_sum(P).

    Rows without any key: P = 0, l = 0, m = -inf.
    """
    scores = t.ir.value_of(scores)
    edge = t.facts.of(scores).at(1)
    if isinstance(edge, edges.Edge) and not edge.inside:
        scores = edge_masks.mask_edge(t.ir, scores, 1, edge, -np.inf)
    m = reduce(t, "reduce_max", scores, 1)
    p = exponential(t.ir, t.ir.arithmetic("sub", (scores, m)))
    return p, m, reduce(t, "reduce_sum", p, 1)


@macro()
def softmax_accumulate(t: OpTracer, acc: Any, m: Any, l: Any, p: Any, v: Any, m_c: Any,  # noqa: E741
                       l_c: Any) -> Any:
    """(acc', m', l') with m' = max(m, m_c): acc and l scaled by exp(m - m'), the block by
    exp(m_c - m')."""
    new = t.ir.arithmetic("maximum", (m, m_c))
    a = exponential(t.ir, t.ir.arithmetic("sub", (m, new)))
    b = exponential(t.ir, t.ir.arithmetic("sub", (m_c, new)))
    matmul = t.call_op(OPS["dot"], [p, v], {})

    def weighted(x: Any, y: Any) -> Any:
        return t.ir.arithmetic("add", (t.ir.arithmetic("mul", (x, a)),
                                       t.ir.arithmetic("mul", (y, b))))

    acc, total = weighted(acc, matmul), weighted(l, l_c)
    return acc, new, total


def _integers(types: Any, attrs: Any) -> Scalar:
    for at in types:
        if not isinstance(at, Scalar) or not at.uniform or at.dtype is not i32:
            raise RuleError(f"rows and iterations are uniform integers of 32 bits, got {at}")
    return Scalar(i32)


def _own_row_lower(t: OpTracer, start: Any, size: Any, last: Any = False) -> Any:
    return t.ir.emit("own_row", [t.ir.to(start, i32)], last=bool(last),
                     size=t.ir.constant_int(size, "size"))


@declare(rule=_integers, attrs=("size", "last"), lower=_own_row_lower)
def own_row(start: Any, size: Any, last: Any = False) -> Any:
    """The first or the last row of a tile [start:start+size] that the threads at hand have: of the
    whole tile, or of a warpgroup where these specialise. For `own_iterations` alone, and for what
    differs between rows and is tested before it is done."""
    return start + np.int32(size - 1 if last else 0)


@declare(rule=_integers, lower=lambda t, end, first, stop: t.ir.emit(
    "own_iterations", [t.ir.to(x, i32) for x in (end, first, stop)]))
def own_iterations(end: Any, first: Any, stop: Any) -> Any:
    """The end of a loop of which rows of `own_row` need nothing before `first` and from `stop` on:
    warpgroups that specialise leave those iterations out."""
    return np.array(end)


def _slack_lower(t: OpTracer, m: Any, x: Any, slack: Any = 0.0) -> Any:
    return t.ir.emit("running_max", [t.ir.value_of(m), t.ir.value_of(x)], slack=float(slack))


@declare(rule=rules.floats, attrs=("slack",), lower=_slack_lower, edges=edge_rules.elementwise,
         layouts="same", pointwise=True)
def running_max(m: Any, x: Any, slack: Any = 0.0) -> Any:
    """x where x > m + slack, else m: a running maximum that lags a little and rarely changes."""
    return np.where(x > m + x.dtype.type(slack), x, m)
