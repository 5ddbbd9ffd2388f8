"""Ops of ts.tile called with what they do not take: an error of the line of the call, always."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.build import build
from tessera.errors import TesseraError
from tessera.tile.ir.op_record import OPS

HEAD = """
@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    t = tile.load(x[0:4, 0:4])
    s = tile.alloc_shared((4, 4), f32)
"""
WRONG = ("'a'", "[1.0]", "t, 7", "t, x", "x[0:4, 0:4], t")


@pytest.mark.parametrize("op", [n for n, op in OPS.items() if op.public])
def test_wrong_arguments(op):
    """No error of Python's own, and none that names another line than the call's."""
    args = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    for wrong in WRONG:
        source = f"{HEAD}    q = tile.{op}({wrong})\n"
        try:
            build(source)["k"][1, 32](*args)
        except TesseraError as error:
            assert error.where and f"tile.{op}({wrong})" in error.where.text, (wrong, error)
