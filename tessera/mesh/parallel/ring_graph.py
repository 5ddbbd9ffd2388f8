"""Ring attention of one rank as ops that have kernels: what a program for a GPU runs.

Keys and values are swapped with the neighbours, one block of them a round, while kernels use the
block that is there; scores exist of 512 queries and one run of keys at a time. The arithmetic is
that of ring_steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tessera.graph import functions as F
from tessera.graph.operand import literal
from tessera.graph.ops.contract import matmul_compute, stored_product, widened
from tessera.graph.ops.elementwise import where
from tessera.graph.ops.softmax import row_max, row_sum
from tessera.numerics import DType, NumericType, as_type
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..collectives.exchange_ops import GpuGroup, cut_along
from .ring_steps import seen_pairs

Rows = tuple[np.ndarray, ...]  # of each rank of the ring


@dataclass(frozen=True)
class GpuRing:
    """The ring, seen from one of its ranks, while its graph is traced. rows: those of each rank."""

    group: GpuGroup
    rows: Rows

    @property
    def size(self) -> int:
        return self.group.n

    def owner(self, round_: int) -> int:
        """Whose keys and values are here in a round."""
        return (self.group.index - round_) % self.size

    def sent_on(self, x: Tensor, rows: int) -> Tensor:
        """x goes to the next rank; from the one before comes [B, H, rows, D]."""
        n, me = self.size, self.group.index
        shape = (*x.shape[:2], rows, x.shape[3])
        group = GpuGroup(self.group.attrs["members"], self.group.attrs["axis"], me, x.type,
                         self.group.attrs["what"])
        before = (me - 1) % n
        return group.swap([x if j == (me + 1) % n else None for j in range(n)],
                          [shape if j == before else (0,) for j in range(n)])[before]

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(round, owner, keys, values); the next are on their way while these are used."""
        for round_ in range(self.size):
            more = round_ + 1 < self.size
            count = len(self.rows[self.owner(round_ + 1)]) if more else 0
            coming = [self.sent_on(x, count) for x in (k, v)] if more else []
            yield round_, self.owner(round_), k, v
            if coming:
                k, v = coming

    def pairs(self, owner: int, causal: bool) -> Iterator[SeenPair]:
        for queries, keys, mask in seen_pairs(self.rows[self.group.index], self.rows[owner],
                                              causal):
            yield SeenPair(queries, keys, mask)


@dataclass(frozen=True)
class SeenPair:
    """A run of queries, a run of keys, and which of them see which, where not all do."""

    queries: slice
    keys: slice
    mask: np.ndarray | None

    def scores(self, q: Tensor, k: Tensor, accum: DType, scale: float) -> Tensor:
        """q: [B, H, G, S, D]   k: [B, H, T, D]   [B, H, G, S, T]"""
        s = matmul_compute(_flat(q), F.swapaxes(k, -1, -2), accum)
        s = F.reshape(s, (*q.shape[:-1], k.shape[-2])) * scale
        if self.mask is None:
            return s
        seen = Tensor(self.mask, as_type("bool"))
        return where(seen, s, literal(-math.inf, s))


def _flat(x: Tensor) -> Tensor:
    """[B, H, G, S, D] as [B, H, G S, D]: the queries of a group are rows of one product."""
    B, H, G, S, D = x.shape
    return F.reshape(x, (B, H, G * S, D))


def _rows_of(x: Tensor, axis: int, rows: slice) -> Tensor:
    return cut_along(x, axis, int(rows.start), int(rows.stop))


def _join_rows(parts: dict[int, Tensor], shape: Sequence[int], axis: int, numeric: NumericType
               ) -> Tensor:
    """Parts by their first row, with zeros where there is none."""
    found, at = [], 0
    for start in sorted(parts):
        if start > at:
            found.append(F.zeros((*shape[:axis], start - at, *shape[axis + 1:]), numeric))
        found.append(parts[start])
        at = start + parts[start].shape[axis]
    if at < shape[axis] or not found:
        found.append(F.zeros((*shape[:axis], shape[axis] - at, *shape[axis + 1:]), numeric))
    return found[0] if len(found) == 1 else F.concatenate(found, axis=axis)


# --- forward -------------------------------------------------------------------------------------
def attend(ring: GpuRing, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
           made: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """(y, log-sum-exp) of this rank's queries. made: what they are"""
    wide, accum = made[0].type, made[0].type.accum
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by first query: sum, largest, weight
    for _, owner, keys, values in ring.rounds(k, v):
        for pair in ring.pairs(owner, causal):
            own = _rows_of(q, 3, pair.queries)
            s = pair.scores(own, _rows_of(keys, 2, pair.keys), accum, scale)
            before = found.get(pair.queries.start)
            most = row_max(s) if before is None else F.maximum(before[1], row_max(s))
            base = where(F.isfinite(most), most, literal(0.0, most))
            p = F.exp(s - base)  # [B, H, G, S, T]
            total = matmul_compute(_flat(p), widened(_rows_of(values, 2, pair.keys)), accum)
            total = F.reshape(total, (*p.shape[:-1], v.shape[-1]))
            weight = row_sum(p)
            if before is not None:
                shrink = F.exp(before[1] - base)
                total, weight = before[0] * shrink + total, before[2] * shrink + weight
            found[pair.queries.start] = total, most, weight
    ys, sums = dict[int, Tensor](), dict[int, Tensor]()
    for start, (total, most, weight) in found.items():
        some = weight > 0
        safe = where(some, weight, literal(1.0, weight))
        ys[start] = total / safe
        lse = where(some, most + F.log(safe), literal(-math.inf, most))
        sums[start] = F.reshape(lse, lse.shape[:-1])
    return _join_rows(ys, made[0].shape, 3, wide), _join_rows(sums, made[1].shape, 3, wide)


# --- backward ------------------------------------------------------------------------------------
def attend_back(ring: GpuRing, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
                g: Tensor, causal: bool, scale: float, made: Sequence[Any]
                ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); those of keys and values go round behind them, and come home at the end."""
    wide, accum = made[0].type, made[0].type.accum
    dq: dict[int, Tensor] = {}
    going: list[Tensor] = []
    column = [F.expand_dims(where(F.isfinite(x), x, literal(0.0, x)), -1) for x in (lse, delta)]
    for round_, owner, keys, values in ring.rounds(k, v):
        dk, dv = dict[int, Tensor](), dict[int, Tensor]()
        for pair in ring.pairs(owner, causal):
            own, slopes, most, less = (_rows_of(x, 3, pair.queries) for x in (q, g, *column))
            near, far = (_rows_of(x, 2, pair.keys) for x in (keys, values))
            p = F.exp(pair.scores(own, near, accum, scale) - most)
            dp = stored_product(_flat(slopes), F.swapaxes(far, -1, -2), accum)
            ds = p * (F.reshape(dp, p.shape) - less) * scale
            flat, weights = _flat(ds), F.swapaxes(_flat(p), -1, -2)
            _add(dv, pair.keys.start, stored_product(weights, _flat(slopes), accum))
            _add(dk, pair.keys.start, stored_product(F.swapaxes(flat, -1, -2), _flat(own), accum))
            _add(dq, pair.queries.start,
                 F.reshape(stored_product(flat, near, accum), own.shape))
        mine = [_join_rows(d, x.shape, 2, wide) for d, x in ((dk, keys), (dv, values))]
        going = [a + b for a, b in zip(mine, going, strict=True)] if round_ else mine
        if ring.size > 1:
            count = len(ring.rows[ring.owner(round_ + 1)])  # behind the last round one's own
            going = [ring.sent_on(d, count) for d in going]
    return _join_rows(dq, made[0].shape, 3, wide), going[0], going[1]


def _add(sums: dict[int, Tensor], at: int, more: Tensor) -> None:
    sums[at] = sums[at] + more if at in sums else more


# --- balance -------------------------------------------------------------------------------------
def relay(ring: GpuRing, to: Rows, x: Tensor, dim: int) -> Tensor:
    """The rows to[i] of a dimension on each rank i, from those that the ranks of `ring` have."""
    axis, me = dim % x.ndim, ring.group.index
    mine, wanted = ring.rows[me], to[me]

    def taken(rows: np.ndarray) -> Tensor | None:
        at = np.flatnonzero(np.isin(mine, rows))
        return _runs_of(x, axis, at) if len(at) else None

    counts = [int(np.isin(wanted, rows).sum()) for rows in ring.rows]
    group = GpuGroup(ring.group.attrs["members"], ring.group.attrs["axis"], me, x.type,
                     ring.group.attrs["what"])
    got = group.swap([taken(rows) for rows in to],
                     [(*x.shape[:axis], n, *x.shape[axis + 1:]) if n else (0,) for n in counts])
    places = np.concatenate([np.flatnonzero(np.isin(wanted, rows)) for rows in ring.rows])
    whole = [y for y, n in zip(got, counts, strict=True) if n]
    if not whole:
        return F.zeros((*x.shape[:axis], 0, *x.shape[axis + 1:]), x.type)
    joined = whole[0] if len(whole) == 1 else F.concatenate(whole, axis=axis)
    return _runs_of(joined, axis, np.argsort(places))


def _runs_of(x: Tensor, axis: int, at: np.ndarray) -> Tensor:
    """Elements of a dimension, by their numbers."""
    cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
    runs = [cut_along(x, axis, int(at[lo]), int(at[hi - 1]) + 1)
            for lo, hi in zip(cuts, cuts[1:], strict=False)]
    return runs[0] if len(runs) == 1 else F.concatenate(runs, axis=axis)


__all__ = ["GpuRing", "attend", "attend_back", "relay"]
