"""How many clusters run at one time on a GPU, of blocks that have a multiprocessor each.

A cluster lies in one group of multiprocessors, and chips differ in how many each of their groups
has, also those of one name: so the driver is asked, with a kernel that does nothing.
"""

from __future__ import annotations

import functools

from .device import Device
from .module import LoadedKernel

# The driver compiles it: no compiler has to be installed where others' code is loaded.
_NOTHING = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry nothing() { ret; }
"""
_THREADS = 512


@functools.cache
def clusters_at_once(on: Device, groups: int) -> int:
    """Clusters of so many blocks, each with all shared memory that one may have."""
    kernel = LoadedKernel(_NOTHING, "nothing", (), target=on.target, threads=_THREADS,
                          shared_bytes=on.shared_bytes, cluster=(groups,))
    return kernel.on(on.index).clusters


__all__ = ["clusters_at_once"]
