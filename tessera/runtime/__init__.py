"""Devices, modules, launches, TMA descriptors and the on-disk cache. The driver is loaded lazily.

Nothing here knows tiles or tensors: a kernel is a cubin with typed parameters, an array is a
pointer with a shape, strides and a type.
"""

from __future__ import annotations
