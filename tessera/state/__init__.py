"""State objects: values that a program carries from call to call, with a type and effects.

    kv_type.py    KVCache[dims, dtype] @policies, the type of a cache of keys and values
    kv_cache.py   the cache: append, prune, offload, prefetch; attention over it
    kv_pages.py   caches of many sequences, in pages of one pool
    kv_batch.py   some of them side by side, for a step of decoding
    movement.py   `with device(gpu), prefetch(cache, into="smem"):`, ts.offload: what lies where
    movement_plan.py   ts.plan(): what has moved, and what is asked for

A state object is a tree (ts.register_tree), so jit, grad and vmap take it apart and give it back.
Its operations are ordinary ops, beside one node that names the effect.
"""

from __future__ import annotations

from .kv_cache import KVCache, kv_cache
from .kv_pages import KVCacheManager
from .kv_type import KVCacheType, rolling_window
from .movement import offload, prefetch
from .movement_plan import plan

__all__ = ["KVCache", "KVCacheManager", "KVCacheType", "kv_cache", "offload", "plan", "prefetch",
           "rolling_window"]
