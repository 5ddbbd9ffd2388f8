"""Tile ops on a GPU against the interpreter: elementwise, reductions, scans, sorts, packed."""

from __future__ import annotations

import pytest

from gpu_harness import require_gpu
from kernels.build import build
from tile_cases import CASES

require_gpu()


@pytest.mark.parametrize("name", CASES)
def test_as_the_interpreter(name, rng):
    from tile_gpu import compare

    c = CASES[name]
    compare(build(c.source)["k"], *c.args(rng), lanes=c.lanes, rtol=c.rtol, atol=c.atol,
            **c.options)
