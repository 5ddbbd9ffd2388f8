"""A cache of keys and values: what attention has seen so far, [B, H, S_max, D_h] of each.

Entry j, counted from the first one appended since the last prune, lies in slot j mod S_max. The
number appended is a tensor, so a compiled decoding step is traced once and not once per length.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dims import Dim, show_shape
from ..errors import ArgumentError, DTypeError, ShapeError, TraceError
from ..graph import functions as F
from ..graph.devices import to
from ..graph.jit import jit
from ..graph.ops.attention import HELD, attention, attention_of_first
from ..graph.ops.place import PLACE
from ..graph.trace import Tracer, apply, current_builder
from ..graph.tree import register_tree
from ..numerics import DType, as_type
from ..numerics.policy import device
from ..runtime.arrays import HOST
from ..tensor import OPERATORS, Tensor, TensorType, as_tensor, tensor
from ..tile.frontend.composite_parameters import RECORDS, RecordClass
from ..tile.launch import resident
from .effect import changes, record_movement
from .kv_type import EXTENTS, KVCacheType
from .movement_plan import note

AXIS = 2  # of the entries


class CacheStorage:
    """The memory of a cache, which its handles share. `newest`: how many entries the handle
    appended to last has seen, so that an append to an older one is noticed."""

    def __init__(self, K: Tensor, V: Tensor, newest: int | None):
        self.K, self.V, self.newest = K, V, newest


class KVCache:
    """Keys and values of up to S_max entries: `KVCache["B", "H", "S_max", "D_h", bf16]`.

    `KVCache[...]` is a type; calling it with the extents, or `ts.kv_cache(...)`, makes one.
    cache.append(k, v) gives the longer cache, cache.prune(last=n) a shorter one. Handles share
    storage: outside of a trace an append writes in place, and an append to an older handle copies.
    cache.K and cache.V are the entries so far, oldest first; cache.length their number.
    A full cache raises on append, or with `@rolling_window` gives up its oldest entries.
    """

    def __init__(self, kind: KVCacheType, storage: CacheStorage, count: Tensor,
                 place: str = "device"):
        self.kind, self._storage, self._count, self._place = kind, storage, count, place

    def __class_getitem__(cls, items: Any) -> KVCacheType:
        return KVCacheType.of(items)

    @classmethod
    def empty(cls, kind: KVCacheType) -> KVCache:
        place = kind.numeric.policy.device if kind.numeric is not None else None
        K, V = (F.zeros(kind.dims, kind.stored) for _ in range(2))
        if place is not None and not isinstance(K, Tracer):
            K, V = (F.cast(x, x.type @ device(place)) if place == "host" else to(x, place)
                    for x in (K, V))
        count = F.zeros((), "int64")
        return cls(kind, CacheStorage(K, V, None if isinstance(K, Tracer) else 0), count)

    # --- what it is ---------------------------------------------------------------------------
    @property
    def shape(self) -> tuple:
        """(B, H, S_max, D_h)"""
        return self.kind.dims

    @property
    def capacity(self) -> int:
        return self.shape[AXIS]

    @property
    def dtype(self) -> DType:
        assert self.kind.numeric is not None
        return self.kind.numeric.dtype

    @property
    def place(self) -> str:
        """"device", or "host" where its entries lie there until they are used."""
        K = self._storage.K
        return self._place if K.place == HOST else "host" if K.offloaded else "device"

    @property
    def nbytes(self) -> int:
        return self._storage.K.nbytes + self._storage.V.nbytes

    @property
    def is_traced(self) -> bool:
        """Whether its length is data of a trace, and so not known now."""
        return isinstance(self._count, Tracer)

    @property
    def length(self) -> int:
        """How many entries it holds. Raises TraceError for a cache that a trace has appended to."""
        if self.is_traced:
            raise TraceError(
                "the length of a cache is data while a function is traced",
                hint="ts.flash_attention(q, cache) leaves out what is not filled; read the length "
                "of the cache that the function returns")
        return min(int(self._count), self.capacity)

    @property
    def K(self) -> Tensor:
        """The keys so far, oldest first: [B, H, length, D_h]."""
        return self._entries(self._storage.K)

    @property
    def V(self) -> Tensor:
        """The values so far, oldest first: [B, H, length, D_h]."""
        return self._entries(self._storage.V)

    def _entries(self, held: Tensor) -> Tensor:
        length, count = self.length, int(self._count)
        self._need_intact()
        if count <= self.capacity:
            return OPERATORS["__getitem__"](held, (slice(None), slice(None), slice(0, length)))
        slots = np.arange(count - length, count) % self.capacity
        return F.take(held, _beside(as_tensor(slots), held), axis=AXIS)

    def _need_intact(self) -> None:
        """Raise ArgumentError when later appends have overwritten entries of this handle."""
        newest = self._storage.newest
        if newest is None or self.is_traced:
            return
        count = int(self._count)
        if count < newest and max(count - self.capacity, 0) < newest - self.capacity:
            raise ArgumentError(
                f"entries of this cache are gone: it has seen {count}, and a handle with the same "
                f"storage has appended up to {newest}", code="E_STALE",
                hint="use what append returns: cache = cache.append(k, v)")

    def __repr__(self) -> str:
        held = "traced" if self.is_traced else f"{self.length} of {self.capacity}"
        return f"{self.kind}, {held} entries"

    # --- what changes it ----------------------------------------------------------------------
    def append(self, k: Any, v: Any) -> KVCache:
        """The cache with further entries. k, v: [B, H, s, D_h], converted to the cache's type.

        Raises ShapeError; ArgumentError (E_OVERFLOW), when it runs, if they do not fit and the type
        has no rolling window.
        """
        k, v = self._operand(k, "k"), self._operand(v, "v")
        if k.shape != v.shape:
            raise ShapeError(f"append: k is {show_shape(k.shape)} and v {show_shape(v.shape)}")
        more = k.shape[AXIS]
        changes("append", self._count, more, None if self.kind.rolling else self.capacity)
        traced = current_builder() is not None
        held = self._written(k, v) if traced else self._write(k, v)
        known = not self.is_traced and isinstance(more, int)
        count = tensor(int(self._count) + more, "int64") if known else self._count + more
        newest = None if traced else int(count)
        if not traced and held[0] is self._storage.K:
            self._storage.newest = newest
            return KVCache(self.kind, self._storage, count, self.place)
        return KVCache(self.kind, CacheStorage(*held, newest), count, self.place)

    def _operand(self, x: Any, name: str) -> Tensor:
        x = as_tensor(x)
        B, H, _, D = self.shape
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (B, H, D):
            raise ShapeError(f"append: {name} is {show_shape(x.shape)}, the cache holds "
                             f"{show_shape(self.shape)}", hint=f"{name}: [{B}, {H}, s, {D}]")
        return F.cast(x, self.kind.stored)

    def _slots(self, more: int) -> Tensor:
        """The slots of the next entries: of the last S_max of them, when there are more."""
        kept = min(more, self.capacity)
        first = self._count + (more - kept) if more > kept else self._count
        ids = F.arange(kept, dtype="int64") + first
        return F.remainder(ids, self._window())

    def _window(self) -> int:
        """S_max as a modulus. Raises TraceError for one that is symbolic."""
        if isinstance(self.capacity, Dim):
            raise TraceError(f"a cache with the symbolic capacity {self.capacity} cannot roll or "
                             "be pruned", hint="trace with a number for it")
        return max(self.capacity, 1)

    def _written(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with further entries, as new values of the graph."""
        K, V = self._storage.K, self._storage.V
        symbolic = isinstance(self.capacity, Dim) or isinstance(k.shape[AXIS], Dim)
        fits = not symbolic and k.shape[AXIS] <= self.capacity
        if (not self.kind.rolling and (symbolic or fits)) or (fits and k.shape[AXIS] == 1):
            zero, at = F.zeros((), "int64"), self._count
            at = F.remainder(at, self._window()) if self.kind.rolling else at
            starts = F.stack([zero, zero, at, zero])
            return (F.dynamic_update_slice(K, k, starts),
                    F.dynamic_update_slice(V, v, starts))
        slots = self._slots(k.shape[AXIS])
        last = (slice(None), slice(None), slice(k.shape[AXIS] - slots.shape[0], None))
        k, v = (OPERATORS["__getitem__"](x, last) for x in (k, v))
        return (F.scatter(K, slots, k, axis=AXIS),
                F.scatter(V, slots, v, axis=AXIS))

    def _write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with further entries, in place unless another handle has gone further."""
        self._need_intact()
        K, V = self._storage.K, self._storage.V
        if self._storage.newest != int(self._count):
            K, V = K.copy(), V.copy()
        if K.place != HOST:
            return self._write_there(K, V, k, v)
        slots = self._slots(k.shape[AXIS]).array
        first = k.shape[AXIS] - slots.size
        for held, new in ((K, k), (V, v)):
            held[:, :, slots] = OPERATORS["__getitem__"](new, (slice(None), slice(None),
                                                               slice(first, None)))
        return K, V

    def _write_there(self, K: Tensor, V: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """On a GPU: only the new entries move, where nobody but the storage has its memory."""
        shared = K is self._storage.K
        made = _append(K, V, self._count, k, v, kind=self.kind)
        if shared:
            self._storage.K, self._storage.V = made
        return made

    def prune(self, last: int | None = None, keep: Any = None, *, first: Any = None) -> KVCache:
        """A cache with fewer entries: the most recent `last`, those at the positions `keep`, or the
        oldest `first`, which takes back what was appended behind them.

        keep: integers among 0 .. length - 1, oldest first, or a bool for each entry
        first: a number that may be data of a trace; not of a rolling cache, whose oldest are gone
        Entries are copied, those of `first` at the next append outside of a trace. Raises
        ArgumentError, and AxisError for a position that is not there.
        """
        if (last is None) + (keep is None) + (first is None) != 2:
            raise ArgumentError("prune takes last=, keep= or first=, one of them",
                                hint="cache.prune(last=128), cache.prune(keep=[0, 1, 5])")
        changes("prune", self._count)
        self._need_intact()
        seen = self._count if self.is_traced else tensor(int(self._count), "int64")
        if first is not None:
            return self._oldest(first, seen)
        if last is not None:
            if isinstance(last, Tensor):
                last = operator.index(last)
            if not isinstance(last, int) or isinstance(last, bool) or last < 0:
                raise ArgumentError(f"prune(last={last!r}): a number of entries >= 0")
            kept = min(last, self._window(), self.capacity)
            count = F.minimum(seen, kept)
            ids = F.arange(kept, dtype="int64") + (seen - count)
        else:
            ids = self._positions(keep)
            kept = ids.shape[0]
            count = F.full((), kept, "int64")
        slots = F.remainder(ids, self._window())
        rest = self.capacity - kept
        K, V = _gathered(self._storage.K, slots, rest), _gathered(self._storage.V, slots, rest)
        newest = None if isinstance(K, Tracer) else int(count)
        return KVCache(self.kind, CacheStorage(K, V, newest), count, self.place)

    def _oldest(self, first: Any, seen: Tensor) -> KVCache:
        """The same memory, of which less counts as filled."""
        if self.kind.rolling:
            raise ArgumentError("prune(first=...) of a rolling cache: its oldest entries are gone",
                                hint="cache.prune(last=n), or a cache that does not roll")
        n = as_tensor(first)
        if n.ndim or n.dtype.kind not in ("int", "uint"):
            raise ArgumentError(f"prune(first={first!r}): a number of entries >= 0")
        count = F.minimum(seen, F.maximum(F.cast(n, "int64"), 0))
        if isinstance(count, Tracer):
            held = CacheStorage(self._storage.K, self._storage.V, None)
            return KVCache(self.kind, held, count, self.place)
        return KVCache(self.kind, self._storage, count, self.place)

    def _positions(self, keep: Any) -> Tensor:
        """The numbers of the entries at these positions."""
        if self.is_traced:
            raise TraceError("prune(keep=...) of a cache whose length is data",
                             hint="cache.prune(last=n), cache.prune(first=n), or prune outside of "
                             "the trace")
        wanted = np.asarray(keep)
        if wanted.dtype == np.bool_ and wanted.shape == (self.length,):
            wanted = wanted.nonzero()[0]
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise DTypeError(f"prune: keep is {wanted.dtype}{list(wanted.shape)}",
                             hint="positions, or one bool for each entry")
        bad = wanted[(wanted < 0) | (wanted >= self.length)]
        if bad.size:
            raise ArgumentError(f"prune: there is no entry {bad[0]}", code="E_AXIS",
                                hint=f"0 .. {self.length - 1}")
        return as_tensor(wanted.astype(np.int64) + (int(self._count) - self.length))

    # --- where it lies ------------------------------------------------------------------------
    def offload(self, to: str = "host") -> KVCache:
        """The cache, its entries in page-locked host memory until they are used: all handles of
        its storage. Outside of a trace they leave now, beside the kernels that follow."""
        held = self._storage
        record_movement("offload", "KVCache", (held.K, held.V), to, None)
        if current_builder() is not None:
            held = CacheStorage(apply(PLACE, held.K, to="host"), apply(PLACE, held.V, to="host"),
                                None)
        else:
            for name, x in (("KVCache.K", held.K), ("KVCache.V", held.V)):
                note("offload", name, x, to, "compute")
                resident.offload(x)
        return KVCache(self.kind, held, self._count, to)

    def prefetch(self, into: str = "device", overlap: str | None = "compute") -> KVCache:
        """The cache, its entries on their way back to the device; what uses them waits.
        overlap="none": what is launched next waits, too."""
        held = self._storage
        record_movement("prefetch", "KVCache", (held.K, held.V), into, overlap)
        if current_builder() is None:
            for name, x in (("KVCache.K", held.K), ("KVCache.V", held.V)):
                note("prefetch", name, x, x.device if x.place != HOST else "host",
                     overlap or "none")
                resident.begin_upload(x, wait=overlap == "none")
        return KVCache(self.kind, self._storage, self._count, into)


def kv_cache(shape: Sequence[int], dtype: Any = "f32", *, rolling: bool = False) -> KVCache:
    """An empty cache of keys and values. shape: (B, H, S_max, D_h). See `ts.KVCache`."""
    return KVCacheType(tuple(shape), as_type(dtype), rolling)()


# --- as a tree --------------------------------------------------------------------------------
def _flatten(cache: KVCache) -> tuple[tuple, tuple]:
    cache._need_intact()
    return (cache._storage.K, cache._storage.V, cache._count), (cache.kind, cache._place)


def _unflatten(data: tuple, children: Sequence[Any]) -> KVCache:
    K, V, count = children
    known = type(count) is Tensor
    return KVCache(data[0], CacheStorage(K, V, int(count) if known else None), count, data[1])


register_tree(KVCache, _flatten, _unflatten)


@jit(donate=("K", "V"), static=("kind",), name="append")
def _append(K: Tensor, V: Tensor, count: Tensor, k: Tensor, v: Tensor, *, kind: KVCacheType
            ) -> tuple[Tensor, Tensor]:
    """Keys and values with further entries, in the memory of those before."""
    return KVCache(kind, CacheStorage(K, V, None), count)._written(k, v)


# --- in a graph -------------------------------------------------------------------------------
def _gathered(held: Tensor, slots: Tensor, rest: int) -> Tensor:
    """The entries in these slots in front, zeros behind them."""
    front = F.take(held, _beside(slots, held), axis=AXIS)
    shape = (*held.shape[:AXIS], rest, *held.shape[AXIS + 1:])
    return F.concatenate([front, _beside(F.zeros(shape, held.type), held)], axis=AXIS)


def _beside(x: Tensor, held: Tensor) -> Tensor:
    """x, made on the host, where a tensor lies."""
    return x if isinstance(x, Tracer) or held.place == HOST else to(x, held.device)


def attend(q: Any, cache: KVCache, *, causal: bool, mask: Any, scale: float | None = None,
           dropout: float = 0.0, key: Any = None, window: int | None = None,
           soft_cap: float | None = None) -> Tensor:
    """Attention of queries over a cache, heads side by side.

    q: [B, Hq, S, D_h], the last S positions of the cache   y: [B, S, Hq D_h]
    causal: query i sees the entries up to its own, count - S + i.
    """
    q = as_tensor(q)
    draws: dict[str, Any] = {"dropout": dropout, "key": key, "soft_cap": soft_cap}
    if not cache.is_traced:
        return _merged(attention(q, cache.K, cache.V, causal=causal, mask=mask, scale=scale,
                                 window=window, **draws))
    if mask is not None:
        raise ArgumentError("a mask over a cache whose length is data",
                            hint="leave the mask out: causal=True, and entries that are not filled "
                            "are not seen")
    K, V, S = cache._storage.K, cache._storage.V, q.shape[-2]
    # one query sees all slots that are filled
    in_order = not cache.kind.rolling or S == 1 and window is None
    if q.ndim == 4 and in_order and not dropout:
        return _merged(attention_of_first(q, K, V, cache._count, causal=causal, scale=scale,
                                          window=window, soft_cap=soft_cap))
    seen = _seen(cache, S, causal, window)
    return _merged(attention(q, K, V, causal=False, mask=seen, scale=scale, **draws))


def _merged(y: Tensor) -> Tensor:
    return F.merge_heads(y)


def _seen(cache: KVCache, S: Any, causal: bool, window: int | None = None) -> Tensor:
    """Which slots each query sees: those that are filled, not later than it and within its window.
    [S, S_max]"""
    count = cache._count
    slots = F.arange(cache.capacity, dtype="int64")
    entry = slots  # the number of the entry that lies in each slot
    if cache.kind.rolling:
        entry = count - 1 - F.remainder(count - 1 - slots, cache._window())
    seen = F.logical_and(entry >= 0, entry < count)
    seen, entry = F.expand_dims(seen, 0), F.expand_dims(entry, 0)
    rows = F.expand_dims(F.arange(S, dtype="int64") + (count - S), -1)
    if causal:
        seen = F.logical_and(seen, F.less_equal(entry, rows))
    if window is not None:
        seen = F.logical_and(seen, F.less(F.abs(rows - entry), window))
    return F.broadcast_to(seen, (S, cache.capacity))


HELD[KVCache] = attend


# --- in a kernel ------------------------------------------------------------------------------
def _kinds(name: str, annotation: Any) -> dict[str, TensorType]:
    """cache.K and cache.V in a kernel: [B*H, length, D_h], a matrix for each group of the grid."""
    kind = annotation if isinstance(annotation, KVCacheType) else KVCacheType.of(EXTENTS)
    B, H, _, D = kind.dims
    heads = B * H if isinstance(B, Dim) and isinstance(H, Dim) else Dim.of("B*H")
    matrix = TensorType((heads, Dim.of(f"{name}_length"), D), kind.numeric)
    return {"K": matrix, "V": matrix}


def _arrays(cache: KVCache) -> dict[str, Tensor]:
    """Its entries so far as matrices, which a kernel may read."""
    B, H, _, D = cache.shape
    made = {}
    for name, held in (("K", cache.K), ("V", cache.V)):
        matrices = held.array.reshape(B * H, cache.length, D)
        matrices.flags.writeable = False
        made[name] = Tensor(matrices, held.type)
    return made


RECORDS[KVCache] = RECORDS[KVCacheType] = RecordClass(_kinds, _arrays)
