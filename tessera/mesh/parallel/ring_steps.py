"""The arithmetic of ring attention on the arrays of one rank, and its messages.

Rank i holds rows of q, k and v. In n rounds every block of keys and values comes by: it is sent on
while it is used. Scores of one block of 512 queries exist at a time, so a rank needs memory for its
own rows and for two blocks of keys and values.
Liu et al. 2023, arXiv:2310.01889, algorithm 1; blocks merge as in Milakov and Gimelshein 2018,
arXiv:1805.02867, section 3.1; derivatives are those of Dao et al. 2022, arXiv:2205.14135,
algorithm 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from tessera.numerics import DType

from ...lazy_dataclass import dataclass
from ..ranks.array_bytes import byte_count, from_bytes, to_bytes
from ..ranks.envelope import MessageLabel, here_in
from ..ranks.group import Group
from ..ranks.transport import Request

QUERIES = 512  # at a time
MOST_RUNS = 8  # contiguous runs of rows that are treated one by one
KEYS, VALUES, KEY_SLOPES, VALUE_SLOPES = 40, 41, 42, 43  # tags of messages


@dataclass(frozen=True)
class SequenceRing:
    """The ranks that hold a sequence, and which of its rows each has. group: None when one rank
    has all of it."""

    group: Group | None
    rows: tuple[np.ndarray, ...]
    what: str = ""

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def me(self) -> int:
        return 0 if self.group is None else self.group.index

    def owner(self, round_: int) -> int:
        """Whose keys and values are here in a round."""
        return (self.me - round_) % self.size

    def _label(self, dtype: DType) -> MessageLabel:
        return here_in(self.what, dtype.name)

    def send(self, x: np.ndarray, dtype: DType, tag: int) -> Request:
        """To the next rank."""
        assert self.group is not None
        to = self.group.ranks[(self.me + 1) % self.size]
        return self.group.transport.isend(to, to_bytes(x, dtype), tag, self._label(dtype))

    def receive(self, shape: Sequence[int], dtype: DType, tag: int) -> _Coming:
        """From the rank before."""
        assert self.group is not None
        buffer = np.empty(byte_count(prod(shape), dtype), np.uint8)
        source = self.group.ranks[(self.me - 1) % self.size]
        request = self.group.transport.irecv(source, buffer, tag, self._label(dtype))
        return _Coming(request, buffer, tuple(shape), dtype)


@dataclass(frozen=True)
class _Coming:
    request: Request
    buffer: np.ndarray
    shape: tuple[int, ...]
    dtype: DType

    def wait(self) -> np.ndarray:
        self.request.wait()
        return from_bytes(self.buffer, self.dtype, prod(self.shape)).reshape(self.shape)


def keys_and_values(ring: SequenceRing, k: np.ndarray, v: np.ndarray, types: tuple[DType, DType]
                    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(owner, keys, values) of each round; the next are on their way while these are used."""
    for round_ in range(ring.size):
        owner, coming, sent = ring.owner(round_), [], []
        if round_ + 1 < ring.size:
            extent = len(ring.rows[ring.owner(round_ + 1)])
            for x, dtype, tag in ((k, types[0], KEYS), (v, types[1], VALUES)):
                coming.append(ring.receive((*x.shape[:-2], extent, x.shape[-1]), dtype, tag))
                sent.append(ring.send(x, dtype, tag))
        yield owner, k, v
        if coming:
            k, v = (c.wait() for c in coming)
            for request in sent:
                request.wait()


# --- which rows see which ------------------------------------------------------------------------
def _runs(rows: np.ndarray, most: int | None = None) -> list[slice]:
    """Stretches of contiguous rows, at most `most` long; all rows at once if there are many."""
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1), len(rows)]
    if len(cuts) > MOST_RUNS + 1:
        cuts = [0, len(rows)]
    step = most or max(len(rows), 1)
    return [slice(lo, min(lo + step, end)) for begin, end in zip(cuts, cuts[1:], strict=False)
            for lo in range(begin, end, step)]


def seen_pairs(q_rows: np.ndarray, k_rows: np.ndarray, causal: bool
           ) -> Iterator[tuple[slice, slice, np.ndarray | None]]:
    """Blocks of queries and of keys that they see, with a mask [queries, keys] where they do not
    see all of them."""
    for queries in _runs(q_rows, QUERIES):
        for keys in _runs(k_rows):
            mine, theirs = q_rows[queries], k_rows[keys]
            if not causal or theirs.max() <= mine.min():
                yield queries, keys, None
            elif theirs.min() <= mine.max():
                yield queries, keys, theirs <= mine[:, None]


def _scores(q: np.ndarray, k: np.ndarray, scale: float, mask: np.ndarray | None) -> np.ndarray:
    """[..., H, G, S, D], [..., H, T, D] -> [..., H, G, S, T]"""
    s = q @ np.swapaxes(k, -1, -2)[..., None, :, :]
    s *= q.dtype.type(scale)
    if mask is not None:
        np.copyto(s, -np.inf, where=~mask)
    return s


# --- forward -------------------------------------------------------------------------------------
def attend(ring: SequenceRing, q: np.ndarray, k: np.ndarray, v: np.ndarray,
           types: tuple[DType, DType],
           causal: bool, scale: float, wide: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(y, log-sum-exp) of this rank's queries, in the type `wide`. q: [..., H, G, S, D], k and v:
    [..., H, S, D]."""
    q = q.astype(wide, copy=False)
    total = np.zeros((*q.shape[:-1], v.shape[-1]), wide)
    most, weight = np.full(q.shape[:-1], -np.inf, wide), np.zeros(q.shape[:-1], wide)
    for owner, keys, values in keys_and_values(ring, k, v, types):
        keys, values = (x.astype(wide, copy=False) for x in (keys, values))
        for a, b, mask in seen_pairs(ring.rows[ring.me], ring.rows[owner], causal):
            _merge(total[..., a, :], most[..., a], weight[..., a], values[..., b, :],
                   _scores(q[..., a, :], keys[..., b, :], scale, mask))
    seen = weight > 0
    total /= np.where(seen, weight, 1)[..., None]
    return total, np.where(seen, most + np.log(np.where(seen, weight, 1)), -np.inf)


def _merge(total: np.ndarray, most: np.ndarray, weight: np.ndarray, values: np.ndarray,
           s: np.ndarray) -> None:
    """Add a block of scores to what earlier ones gave, all relative to the largest so far."""
    top = np.maximum(most, s.max(axis=-1))
    base = np.where(np.isfinite(top), top, 0)
    s -= base[..., None]
    p = np.exp(s, out=s)
    shrink = np.exp(most - base)
    weight *= shrink
    weight += p.sum(axis=-1)
    total *= shrink[..., None]
    total += p @ values[..., None, :, :]
    most[...] = top


# --- backward ------------------------------------------------------------------------------------
def attend_back(ring: SequenceRing, q: np.ndarray, k: np.ndarray, v: np.ndarray, lse: np.ndarray,
                delta: np.ndarray, g: np.ndarray, types: tuple[DType, DType], causal: bool,
                scale: float, wide: np.dtype, out_type: DType
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv). Weights are computed again block by block; the slopes of keys and values go
    round behind them, and come home after the last round.

    delta: [..., S], the sum of g y along a row   g: slopes of y
    """
    q, g = (x.astype(wide, copy=False) for x in (q, g))
    dq, sent = np.zeros(q.shape, wide), []
    own = [np.zeros(x.shape, wide) for x in (k, v)]
    tags = (KEY_SLOPES, VALUE_SLOPES)
    for round_, (owner, keys, values) in enumerate(keys_and_values(ring, k, v, types)):
        coming = [ring.receive(x.shape, out_type, tag) for x, tag in
                  zip((keys, values), tags, strict=True)] if round_ else []
        keys, values = (x.astype(wide, copy=False) for x in (keys, values))
        dk, dv = np.zeros(keys.shape, wide), np.zeros(values.shape, wide)
        for a, b, mask in seen_pairs(ring.rows[ring.me], ring.rows[owner], causal):
            p = _scores(q[..., a, :], keys[..., b, :], scale, mask)
            p -= np.where(np.isfinite(lse), lse, 0)[..., a, None]
            np.exp(p, out=p)
            rows = g[..., a, :]
            dv[..., b, :] += (np.swapaxes(p, -1, -2) @ rows).sum(axis=-3)
            ds = rows @ np.swapaxes(values[..., b, :], -1, -2)[..., None, :, :]
            ds -= delta[..., a, None]
            ds *= p
            ds *= wide.type(scale)
            dq[..., a, :] += ds @ keys[..., b, :][..., None, :, :]
            dk[..., b, :] += (np.swapaxes(ds, -1, -2) @ q[..., a, :]).sum(axis=-3)
        for d, c in zip((dk, dv), coming, strict=False):
            d += c.wait()
        if ring.size == 1:
            return dq, dk, dv
        sent += [ring.send(d, out_type, tag) for d, tag in zip((dk, dv), tags, strict=True)]
    coming = [ring.receive(x.shape, out_type, tag) for x, tag in zip(own, tags, strict=True)]
    home = [c.wait() for c in coming]
    for request in sent:
        request.wait()
    return dq, home[0], home[1]


# --- balance -------------------------------------------------------------------------------------
def zigzag_rows(extent: int, ranks: int) -> tuple[np.ndarray, ...]:
    """Rows so that each rank has as many early ones as late ones: of 2 n chunks the i-th and the
    i-th from the end. With causal attention all ranks then have the same work."""
    cuts = np.linspace(0, extent, 2 * ranks + 1).round().astype(int)
    chunks = [np.arange(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    return tuple(np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(ranks))


def relay(ring: SequenceRing, to: Sequence[np.ndarray], x: np.ndarray, dim: int, dtype: DType
          ) -> np.ndarray:
    """The rows to[i] of a dimension on each rank i, from those that the ranks of `ring` have."""
    assert ring.group is not None
    mine, wanted = ring.rows[ring.me], to[ring.me]
    picks = [np.flatnonzero(np.isin(mine, rows)) for rows in to]
    places = [np.flatnonzero(np.isin(wanted, rows)) for rows in ring.rows]
    x = np.moveaxis(x, dim, 0)
    got = ring.group.swap([np.ascontiguousarray(x[p]) for p in picks],
                          [(len(p), *x.shape[1:]) for p in places], dtype,
                          here_in(ring.what))
    out = np.empty((len(wanted), *x.shape[1:]), x.dtype)
    for place, rows in zip(places, got, strict=True):
        out[place] = rows
    return np.ascontiguousarray(np.moveaxis(out, 0, dim))
