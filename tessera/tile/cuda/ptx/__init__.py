"""The PTX instructions, one file per family; importing this registers every record."""

from __future__ import annotations

from . import (
    arithmetic,
    atomics,
    barriers,
    convert,
    copy_async,
    held,
    ids,
    matrix,
    mbarrier,
    memory,
    mma,
    tma,
    warp,
    wgmma,
)

__all__ = ["arithmetic", "atomics", "barriers", "convert", "copy_async", "held", "ids", "matrix",
           "mbarrier", "memory", "mma", "tma", "warp", "wgmma"]
