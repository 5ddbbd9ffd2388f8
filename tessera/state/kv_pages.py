"""Caches of keys and values for many sequences, in pages of one pool.

A sequence of n entries holds ceil(n / page_size) pages, wherever they lie in the pool, so a pool is
full only when its last page is taken (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..call_errors import refuse_wrong_init
from ..dims import show_shape
from ..errors import ArgumentError, OutOfMemoryError, ShapeError, TraceError
from ..graph import functions as F
from ..graph.ops.attention import HELD
from ..graph.trace import current_builder
from ..graph.tree import register_tree
from ..numerics import DType, as_type
from ..runtime.arrays import HOST
from ..tensor import OPERATORS, Tensor, as_tensor, tensor
from .kv_batch import PagedBatch, append_now, batch_of
from .kv_cache import CacheStorage, KVCache, _beside, attend
from .kv_type import KVCacheType


@refuse_wrong_init
class KVCacheManager:
    """A pool of pages that caches of sequences are allocated from.

    heads, head_size: H and D_h   pages: how many there are   page_size: entries of one

        manager = ts.KVCacheManager(heads=8, head_size=64, pages=1024, dtype=ts.bf16)
        seq = manager.alloc()
        seq.append(k, v)                    # [H, s, D_h] or [1, H, s, D_h]
        y = ts.flash_attention(q, seq)      # q: [1, Hq, S, D_h]
        manager.free(seq)

    .batch(sequences) puts them side by side for a step of decoding, whose attention finds the pages
    by a table. .pages_used, .pages_free, .nbytes, .sequences. Outside of traces only: the pages are
    updated in place. `OutOfMemoryError` when no page is free; nothing has been written then.
    """

    def __init__(self, *, heads: int, head_size: int, pages: int, page_size: int = 256,
                 dtype: Any = "f32"):
        for name, value in (("heads", heads), ("head_size", head_size), ("pages", pages),
                            ("page_size", page_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"KVCacheManager: {name}={value!r} is a number >= 1")
        numeric = as_type(dtype)
        KVCacheType((1, heads, page_size, head_size), numeric)  # refuses policies with scales
        self.type, self.page_size, self.pages = numeric, page_size, pages
        shape = (pages, heads, page_size, head_size)
        self._K, self._V = (F.zeros(shape, numeric) for _ in range(2))
        self._free = list(range(pages - 1, -1, -1))  # taken from the end: page 0 first
        self._used = set[int]()  # pages that have had entries
        self._sequences: dict[int, PagedCache] = {}  # by id

    # --- what there is ------------------------------------------------------------------------
    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def sequences(self) -> list[PagedCache]:
        return list(self._sequences.values())

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def pages_used(self) -> int:
        return self.pages - len(self._free)

    @property
    def nbytes(self) -> int:
        return self._K.nbytes + self._V.nbytes

    # --- sequences ----------------------------------------------------------------------------
    def alloc(self) -> PagedCache:
        """An empty cache of one sequence. It takes pages as it grows."""
        made = PagedCache(self)
        self._sequences[id(made)] = made
        return made

    def free(self, sequence: PagedCache) -> None:
        """Give the pages of a sequence back. Raises ArgumentError for one that is not held."""
        if id(sequence) not in self._sequences:
            raise ArgumentError("this sequence is not in the pool: it was freed, or is another's",
                                code="E_STALE")
        del self._sequences[id(sequence)]
        self._free += reversed(sequence._pages)
        sequence._pages, sequence.length = [], 0

    def batch(self, sequences: Sequence[PagedCache], room: int = 0) -> PagedBatch:
        """The sequences side by side. room: entries of each that a compiled function may append,
        for which pages are taken now. Raises ArgumentError, OutOfMemoryError. See PagedBatch."""
        return batch_of(self, sequences, room)

    def _take(self, count: int) -> list[int]:
        """Pages whose values are 0: weights of 0 would not hide a NaN that another has left."""
        if count > len(self._free):
            raise OutOfMemoryError(
                f"a pool of {self.pages} pages has {self.pages_free} free, {count} are needed",
                hint="free sequences that have ended, prune some, or make a larger pool")
        taken = [self._free.pop() for _ in range(count)]
        for page in self._used.intersection(taken):
            self._V[page] = 0.0
        self._used.update(taken)
        return taken

    def __repr__(self) -> str:
        _, H, S, D = self._K.shape
        return f"KVCacheManager of {self.type}: {self.pages_used} of {self.pages} pages of " \
               f"{S} entries [{H}, {D}] used by {len(self._sequences)} sequences"


class PagedCache:
    """The cache of one sequence, in pages of a KVCacheManager. Changed in place.

    .K .V [1, H, length, D_h], oldest first, gathered from the pages; .length
    """

    is_traced = False

    def __init__(self, manager: KVCacheManager):
        self.manager, self.length = manager, 0
        self._pages: list[int] = []

    @property
    def K(self) -> Tensor:
        return self._gather(self.manager._K)

    @property
    def V(self) -> Tensor:
        return self._gather(self.manager._V)

    def _need(self) -> KVCacheManager:
        """The pool. Raises TraceError in a trace, ArgumentError after free()."""
        if current_builder() is not None:
            raise TraceError("a paged cache is used while a function is traced",
                             hint="pass the sequence, or manager.batch(sequences), as an argument; "
                             "or use a KVCache")
        if id(self) not in self.manager._sequences:
            raise ArgumentError("this sequence has been freed", code="E_STALE",
                                hint="manager.alloc() makes another")
        return self.manager

    def _gather(self, pool: Tensor) -> Tensor:
        return OPERATORS["__getitem__"](self._rows(pool), (slice(None), slice(None),
                                                           slice(0, self.length)))

    def _rows(self, pool: Tensor) -> Tensor:
        """Its whole pages: [1, H, P S, D]."""
        self._need()
        pages = _beside(as_tensor(np.array(self._pages, np.int64)), pool)
        picked = F.take(pool, pages, axis=0)  # [P, H, S, D]
        P, H, S, D = picked.shape
        return F.reshape(F.swapaxes(picked, 0, 1), (1, H, P * S, D))

    def append(self, k: Any, v: Any) -> PagedCache:
        """Add entries at the end; itself. k, v: [H, s, D_h] or [1, H, s, D_h].

        Raises ShapeError; OutOfMemoryError when the pool has not enough pages.
        """
        manager = self._need()
        k, v = self._operand(k, "k"), self._operand(v, "v")
        if k.shape != v.shape:
            raise ShapeError(f"append: k is {show_shape(k.shape)} and v {show_shape(v.shape)}")
        size, end = manager.page_size, self.length + k.shape[1]
        self._pages += manager._take(-(-end // size) - len(self._pages))
        if manager._K.place != HOST:
            rows = manager.batch([self])._tensors
            append_now(rows, F.expand_dims(k, 0), F.expand_dims(v, 0))
            self.length = end
            return self
        at = self.length
        while at < end:
            slot, upto = at % size, min(end, (at // size + 1) * size)
            page = self._pages[at // size]
            part = slice(at - self.length, upto - self.length)
            for pool, new in ((manager._K, k), (manager._V, v)):
                pool[page, :, slot:slot + upto - at] = OPERATORS["__getitem__"](
                    new, (slice(None), part))
            at = upto
        self.length = end
        return self

    def _operand(self, x: Any, name: str) -> Tensor:
        x = as_tensor(x)
        _, H, _, D = self.manager._K.shape
        if x.ndim == 4 and x.shape[0] == 1:
            x = F.reshape(x, x.shape[1:])
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (H, D):
            raise ShapeError(f"append: {name} is {show_shape(x.shape)}, the pool holds entries of "
                             f"[{H}, {D}]", hint=f"{name}: [{H}, s, {D}]")
        return F.cast(x, self.manager.type)

    def prune(self, last: int) -> PagedCache:
        """Keep the most recent `last` entries, and give the pages that are not needed back."""
        manager = self._need()
        if not isinstance(last, int) or isinstance(last, bool) or last < 0:
            raise ArgumentError(f"prune(last={last!r}): a number of entries >= 0")
        if last < self.length:
            k, v = (OPERATORS["__getitem__"](x, (0, slice(None), slice(self.length - last, None)))
                    for x in (self.K, self.V))
            manager._free += reversed(self._pages)
            self._pages, self.length = [], 0
            self.append(k, v)
        return self

    def __repr__(self) -> str:
        return f"PagedCache of {self.length} entries in {len(self._pages)} pages"


def _flatten(cache: PagedCache) -> tuple[tuple, KVCacheType]:
    """As the data of a program: whole pages, and how many entries of them are filled."""
    manager = cache._need()
    kind = KVCacheType((1, manager._K.shape[1], len(cache._pages) * manager.page_size,
                        manager._K.shape[3]), manager.type)
    return (cache._rows(manager._K), cache._rows(manager._V), tensor(cache.length, "int64")), kind


def _unflatten(kind: KVCacheType, children: Sequence[Any]) -> KVCache:
    K, V, count = children
    return KVCache(kind, CacheStorage(K, V, None), count)


HELD[PagedCache] = attend
register_tree(PagedCache, _flatten, _unflatten)
