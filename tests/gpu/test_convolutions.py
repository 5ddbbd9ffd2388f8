"""Convolutions on a GPU: what copies unfold, in all its forms, against the same function on the
CPU. Sums of small integers are exact."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_conv_kernels import CASES, LAST, integers, products
from cpu.test_windows import Conv, before_the_first

LARGER = {
    "odd": ((3, 64, 11, 13), (64, 64, 3, 2), {"padding": ((1, 0), (2, 1)), "dilation": (2, 1)}),
    "tiles of several images": ((5, 128, 7, 7), (192, 128, 3, 3), {"padding": 1}),
    "many tiles": ((4, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "strided, odd": ((3, 64, 13, 15), (128, 64, 3, 3), {"stride": 2, "padding": 1}),
    "strided by three": ((2, 64, 20, 19), (64, 64, 5, 5), {"stride": 3, "padding": 2}),
    "deep": ((2, 512, 7, 7), (512, 512, 3, 3), {"padding": 1}),
    "a stem": ((2, 3, 64, 64), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
}
ALL = {**CASES, **{name: case[:3] for name, case in LAST.items()}, **LARGER}


@pytest.mark.parametrize("name", ALL)
def test_as_on_the_cpu(name, rng):
    xs, ws, keys = ALL[name]
    f = ts.jit(lambda x, w: products(lambda x, w: ts.conv2d(x, w, **keys), x, w))
    x, w = integers(rng, xs), integers(rng, ws)
    want = f(x, w)
    for _ in range(2):  # a captured graph, too
        got = f(x.to("cuda"), w.to("cuda"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a.to("cpu").array, np.float64),
                                      np.asarray(b.array, np.float64))


def test_rows_in_front_of_the_first_are_zeros(rng):
    """A tile may begin in front of all images, and bring the first of them."""
    c = Conv(rng, "plain")
    Y = ts.full((c.P, 64), np.nan, ts.bf16).to("cuda")
    before_the_first[(-(-c.P // 64), 1)](c.X.to("cuda"), c.W.to("cuda"), Y, c.g)
    want = np.concatenate([np.zeros((8, 64)), c.U @ c.w.T])[:c.P]
    np.testing.assert_array_equal(np.asarray(Y.to("cpu").array, np.float64),
                                  want.astype(ts.bf16.numpy).astype(np.float64))
