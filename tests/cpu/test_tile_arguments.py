"""Ops of ts.tile called with what they do not take: an error of the line of the call, always."""

from __future__ import annotations

import linecache
import warnings

import numpy as np
import pytest

import tessera as ts
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


@pytest.mark.parametrize("number, held", [("1e40", np.inf), ("-1e39", -np.inf),
                                          ("10**400", np.inf), ("3.4028235e38", None),
                                          ("ts.inf", None)])
def test_numbers_that_no_f32_holds(number, held):
    """A warning of the line that has the number, in kernels and on whole arrays alike."""
    scope = build(f"""
@kernel
def k(x: Tensor["N", f32], y: Tensor["N", f32]):
    y[tile_n:tile_n + 8] = tile.maximum(tile.load(x[tile_n:tile_n + 8]), {number})
def whole(x):
    return ts.maximum(x, {number})
def filled(x):
    return ts.full(x.shape, {number}) + ts.zeros_like(x)
""")
    x, y = np.full(8, -np.inf, np.float32), np.zeros(8, np.float32)
    for start, run in (("y[", lambda: scope["k"](x, y) or y),
                       ("return ts.", lambda: scope["whole"](ts.tensor(x)).numpy()),
                       ("return ts.", lambda: scope["filled"](ts.tensor(x)).numpy())):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            out = run()
        assert (out == np.float32(eval(number) if held is None else held)).all()
        assert len(told) == (held is not None)
        for warning in told:
            line = linecache.getline(warning.filename, warning.lineno).strip()
            assert line.startswith(start) and "beyond the largest number of f32" in str(
                warning.message), (line, warning)


def test_nan_is_a_constant_like_others():
    """It was another one in each call, and one that the schedule had set."""
    k = build("""
@kernel
def k(x: Tensor["N", f32], s: float = 1.0) -> Tensor["N", f32]:
    return tile.load(x[tile_n:tile_n + 8]) * s
""")["k"]
    for number in (float("nan"), float("nan"), np.float32("nan"), 2.0):
        np.testing.assert_array_equal(k(np.ones(8, np.float32), number), np.float32(number))
    assert len(k._cache) == 2
