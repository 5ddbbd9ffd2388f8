"""Tile IR with layouts -> Numba-CUDA source: one function per op, registered by `@emits`."""

from __future__ import annotations
