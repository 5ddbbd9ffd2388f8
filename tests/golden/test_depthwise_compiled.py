"""Depthwise convolutions as compiled for sm_90a: nothing spilled, also by long windows. No GPU is
needed."""

from __future__ import annotations

import numpy as np
import pytest

import tile_gpu
from ptx_harness import require_compiler
from tessera import bf16, f32
from tessera.graph.cuda.passes.depthwise_convs import MANY, NARROW
from tessera.kernels.conv import Geometry
from tessera.kernels.depthwise import (
    depthwise_backward,
    depthwise_forward,
    depthwise_weights,
    row_parts,
    strips_of,
)

require_compiler()


def zeros(dtype, *shape):
    return np.zeros(shape, dtype.numpy)


@pytest.mark.parametrize("window", [(7, 7), (3, 3), (1, 31)], ids=str)
def test_windows_of_channels_spill_nothing(window) -> None:
    KH, KW = window
    g = Geometry(window, (1, 1), (1, 1), (KH // 2, KW // 2), (14, 56), (14, 56))
    x, w = zeros(bf16, 1568, 64), zeros(bf16, KH * KW, 64)
    parts, across = row_parts(g), strips_of(g)
    forward = depthwise_forward if len(parts) < MANY else depthwise_forward.with_schedule(NARROW)
    sums = zeros(f32, 2, KH * len(parts[0].reads[0]), 64)
    strips = 2 * 14 * across
    for kernel, *given in ((forward, x, w, x, g, parts, across, strips),
                           (depthwise_backward, x, w, x, g),
                           (depthwise_weights, x, x, sums, g, parts[0], across, strips, 128)):
        built = tile_gpu.compiled(kernel, *given, BM=16, BN=64, target="sm_90a").built
        assert built.resources.spill_store_bytes == 0 and built.resources.registers <= 248
        assert "ld.global.v4" in built.ptx or "ld.global.nc.v4" in built.ptx or (
            kernel is forward and len(parts) >= MANY)
