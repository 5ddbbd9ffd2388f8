"""Sequences of a pool side by side, as a step of decoding for many users takes them.

A batch is a value, as a KVCache is: its pools, a table of its sequences' pages and their lengths.
What a compiled function appends lies in pages that the batch had beforehand, its room; the pool and
the sequences learn of it by `keep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dims import show_shape
from ..errors import ArgumentError, ShapeError
from ..graph import functions as F
from ..graph.ops.attention import HELD, attention_of_pages
from ..graph.trace import current_builder
from ..graph.tree import register_tree
from ..kernels.decode_attention import append_to_pages
from ..lazy_dataclass import dataclass
from ..numerics import NumericType
from ..runtime.arrays import HOST
from ..tensor import Tensor, as_tensor
from .effect import changes
from .kv_cache import _beside

if TYPE_CHECKING:
    from .kv_pages import KVCacheManager, PagedCache


@dataclass(frozen=True)
class PagedTensors:
    """K, V: the pools, [pages, H, page_size, D_h].  table [B, L] int32: the pages of each sequence,
    any page behind them.  count [B] int32: entries of each."""

    K: Tensor
    V: Tensor
    table: Tensor
    count: Tensor


class PagedBatch:
    """Caches of B sequences of a pool, which `KVCacheManager.batch` makes.

    batch.append(k, v) gives the batch with further entries, k, v: [B, H, s, D_h];
    ts.flash_attention(q, batch) attends to each sequence as far as it goes, q: [B, Hq, S, D_h], the
    last S positions of it. Outside of traces an append takes the pages that it needs; in a compiled
    function there is room for `room` entries of each, and `batch.keep(result)` tells the pool what
    the function has appended:

        @ts.jit(donate="batch")
        def step(q, k, v, batch):
            batch = batch.append(k, v)
            return ts.flash_attention(q, batch), batch

        batch = manager.batch(sequences, room=1)
        y, grown = step(q, k, v, batch)
        batch = batch.keep(grown)
    """

    def __init__(self, tensors: PagedTensors, room: int, added: int = 0,
                 of: tuple[PagedCache, ...] = ()):
        self._tensors, self.room, self.added, self.sequences = tensors, room, added, of
        self._lengths = tuple(s.length for s in of)

    @property
    def shape(self) -> tuple:
        """(B, H, entries that the table has pages for, D_h)"""
        (_, H, P, D), (B, L) = self._tensors.K.shape, self._tensors.table.shape
        return B, H, L * P, D

    @property
    def type(self) -> NumericType:
        return self._tensors.K.type

    @property
    def lengths(self) -> Tensor:
        """[B] int32"""
        return self._tensors.count

    def append(self, k: Any, v: Any) -> PagedBatch:
        """The batch with s further entries of each sequence. Raises ShapeError; ArgumentError when
        there is no room; OutOfMemoryError, outside of traces, when the pool has no pages."""
        k, v = self._operand(k, "k"), self._operand(v, "v")
        if k.shape != v.shape:
            raise ShapeError(f"append: k is {show_shape(k.shape)} and v {show_shape(v.shape)}")
        more = k.shape[2]
        if current_builder() is None:
            return self._append_now(k, v, more)
        if more > self.room:
            raise ArgumentError(f"append of {more} entries to a batch with room for {self.room}",
                                code="E_OVERFLOW", hint="manager.batch(sequences, room=n), as many "
                                "as a compiled function appends; of what it returns, batch = "
                                "batch.keep(grown), which has as much room again")
        t = self._tensors
        changes("append", t.count)
        K, V = _written(t.K, t.V, t.table, t.count, k, v)
        return PagedBatch(PagedTensors(K, V, t.table, t.count + more), self.room - more,
                          self.added + more)

    def _append_now(self, k: Tensor, v: Tensor, more: int) -> PagedBatch:
        """In place; the pages of all are there first."""
        manager = self._manager()
        here = manager.batch(self.sequences, room=max(self.room, more))
        if manager._K.place == HOST:
            for i, sequence in enumerate(self.sequences):
                sequence.append(k[i], v[i])
        else:
            append_now(here._tensors, k, v)
            for sequence in self.sequences:
                sequence.length += more
        return manager.batch(self.sequences, room=self.room)

    def _operand(self, x: Any, name: str) -> Tensor:
        x, (B, H, _, D) = as_tensor(x), self.shape
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (B, H, D):
            raise ShapeError(f"append: {name} is {show_shape(x.shape)}, the batch has {B} sequences"
                             f" with entries of [{H}, {D}]", hint=f"{name}: [{B}, {H}, s, {D}]")
        return F.cast(x, self.type)

    def keep(self, grown: PagedBatch, room: int | None = None) -> PagedBatch:
        """The pool and the sequences have what appends to this batch made, in a compiled function
        that was given it; and the batch of them anew, with as much room, or `room`: 1 behind a
        prompt, 0 where no pages shall be taken. Nothing is read from the device. Raises
        ArgumentError where the sequences have changed since this batch was made, and
        OutOfMemoryError where there are no pages for the room: what was appended is kept then."""
        manager = self._manager()
        if not isinstance(grown, PagedBatch) or grown.sequences or (
                grown._tensors.K.shape != self._tensors.K.shape or grown.shape[0] != self.shape[0]):
            raise ArgumentError("keep takes what appends to this batch have made")
        manager._K, manager._V = grown._tensors.K, grown._tensors.V
        for sequence in self.sequences:
            sequence.length += grown.added
        return manager.batch(self.sequences, room=self.room if room is None else room)

    def _manager(self) -> KVCacheManager:
        """The pool. Raises ArgumentError where this batch is none of its sequences as they are."""
        if not self.sequences:
            raise ArgumentError("this batch is what a function was given, or made",
                                hint="batch.keep(grown), of the batch that manager.batch has made")
        manager = self.sequences[0]._need()
        if any(s._need() is not manager or s.length != n
               for s, n in zip(self.sequences, self._lengths, strict=True)):
            raise ArgumentError("the sequences of this batch have changed since it was made",
                                code="E_STALE", hint="batch = batch.append(k, v), batch = "
                                "batch.keep(grown): use what they return")
        return manager

    def __repr__(self) -> str:
        B, H, S, D = self.shape
        return f"PagedBatch of {B} sequences of up to {S} entries [{H}, {D}] of {self.type}"


def batch_of(manager: KVCacheManager, sequences: Sequence[PagedCache], room: int) -> PagedBatch:
    """The sequences, with pages for `room` further entries of each: of all or of none."""
    if not isinstance(sequences, Sequence) or not sequences or (
            len({id(s) for s in sequences}) < len(sequences)):
        raise ArgumentError("a batch is of one sequence or more, each once",
                            hint="manager.batch([first, second]), of manager.alloc()")
    if isinstance(room, bool) or not isinstance(room, int) or room < 0:
        raise ArgumentError(f"batch(room={room!r}): a number of entries >= 0")
    if other := next((s for s in sequences if not hasattr(s, "manager")), None):
        raise ArgumentError(f"a batch is of sequences, got a {type(other).__name__}",
                            hint="manager.batch([first, second]), of manager.alloc()")
    if any(s.manager is not manager for s in sequences):
        raise ArgumentError("a sequence of another pool", code="E_STALE")
    for s in sequences:
        s._need()
    wanted = [max(0, -(-(s.length + room) // manager.page_size) - len(s._pages)) for s in sequences]
    taken = manager._take(sum(wanted))
    for s, n in zip(sequences, wanted, strict=True):
        s._pages += [taken.pop(0) for _ in range(n)]
    most = max(1, *(len(s._pages) for s in sequences))
    table = np.zeros((len(sequences), 1 << (most - 1).bit_length()), np.int32)
    for row, s in zip(table, sequences, strict=True):
        row[:len(s._pages)] = s._pages
    rows = [_beside(as_tensor(x), manager._K)
            for x in (table, np.array([s.length for s in sequences], np.int32))]
    return PagedBatch(PagedTensors(manager._K, manager._V, *rows), room, 0, tuple(sequences))


# --- as data ------------------------------------------------------------------------------------
def _flatten(batch: PagedBatch) -> tuple[tuple, tuple]:
    t = batch._tensors
    return (t.K, t.V, t.table, t.count), (batch.room, batch.added)


def _unflatten(data: tuple, children: Sequence[Any]) -> PagedBatch:
    return PagedBatch(PagedTensors(*children), *data)


register_tree(PagedBatch, _flatten, _unflatten)


def append_now(t: PagedTensors, k: Tensor, v: Tensor) -> None:
    """Write entries [B, H, s, D] behind those that are there: into the pools on a GPU, in a trace
    as the new values of t.K and t.V."""
    B, H, s, D = k.shape
    for pool, x in ((t.K, k), (t.V, v)) if s else ():
        append_to_pages(F.reshape(x, (B * H, s, D)), t.table, t.count, pool)


def _written(K: Tensor, V: Tensor, table: Tensor, count: Tensor, k: Tensor, v: Tensor
             ) -> tuple[Tensor, Tensor]:
    """The pools with the entries behind those that are there."""
    append_now(PagedTensors(K, V, table, count), k, v)
    return K, V


def attend(q: Any, batch: PagedBatch, *, causal: bool, mask: Any, scale: float | None = None,
           dropout: float = 0.0, key: Any = None, window: int | None = None,
           soft_cap: float | None = None) -> Tensor:
    """Attention of queries over a batch of sequences, heads side by side.

    q: [B, Hq, S, D_h], the last S positions of each sequence   y: [B, S, Hq D_h]
    """
    if mask is not None or dropout:
        raise ArgumentError("a mask or dropout over a batch of sequences",
                            hint="causal, window and soft_cap, which know how long each is")
    if batch.sequences and current_builder() is None:
        batch._manager()  # fails for one that is no more
    t = batch._tensors
    return F.merge_heads(attention_of_pages(q, t.K, t.V, t.table, t.count, causal=causal,
                                            scale=scale, window=window, soft_cap=soft_cap))


HELD[PagedBatch] = attend

__all__ = ["PagedBatch", "batch_of"]
