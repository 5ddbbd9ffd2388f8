"""Convolutions of narrow types on GPUs: kernels that unfold no windows, under the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram

CASES = {
    "plain": ((2, 16, 9, 10), (48, 16, 3, 3), {"padding": 1}),
    "strided": ((2, 32, 9, 10), (16, 32, 3, 3), {"stride": 2, "padding": (1, (0, 2))}),
    "groups": ((2, 32, 7, 8), (48, 16, 2, 3), {"stride": (1, 2), "dilation": 2, "padding": 2,
                                               "groups": 2}),
    "patches": ((3, 20, 8, 8), (18, 20, 2, 2), {"stride": 2}),
    "left over": ((1, 17, 8, 8), (33, 17, 3, 3), {"stride": 3}),
    "wide": ((1, 16, 13, 12), (130, 16, 3, 3), {"padding": "same"}),
}


def products(conv: Any, x: Any, w: Any) -> Any:
    """A convolution and both of its adjoints, of small integers: their sums are exact."""
    y, back = ts.vjp(conv, x, w)
    g = ts.cast(ts.where(y > 2, 1.0, -1.0), y.dtype)
    return (y, *back(g))


def integers(rng: Any, shape: tuple, dtype: str = "bf16") -> ts.Tensor:
    return ts.cast(rng.integers(-2, 3, shape).astype(np.float32), dtype)


def check(fn: Any, *xs: ts.Tensor, target: str = "sm_90a") -> CudaProgram:
    """The kernels give what the graph means, every bit."""
    made = CudaProgram(ts.jit(fn).graph(*xs), target)
    want = [y.array for y in ts.jit(fn)(*xs)]
    for got, w in zip(made.run([x.array for x in xs]), want, strict=True):
        assert got.dtype == w.dtype
        np.testing.assert_array_equal(got.astype(np.float64), w.astype(np.float64))
    return made


def calls(made: CudaProgram) -> list[str]:
    return [str(g.attr("call")).split("(")[0] for g in made.plan.groups if g.kind == "launch"]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_and_their_adjoints(name: str, target: str, rng: Any) -> None:
    xs, ws, keys = CASES[name]
    fn = lambda x, w: products(lambda x, w: ts.conv2d(x, w, **keys), x, w)  # noqa: E731
    x, w = integers(rng, xs), integers(rng, ws)
    made = check(fn, x, w, target=target)
    assert calls(made) == ["conv_images", "conv_images", "conv_filters"]
    matmuls = ts.jit(fn).schedule(x, w, target=target).matmuls
    assert len(matmuls) == 3 and {form for m in matmuls for form in m.how.all} == {"mma"}
    assert not any(g.kind in ("elements", "gemm") for g in made.plan.groups)


def test_one_axis_and_transposed(rng: Any) -> None:
    made = check(lambda x, w: products(lambda x, w: ts.conv1d(x, w, stride=2, padding=3), x, w),
                 integers(rng, (2, 16, 21), "f16"), integers(rng, (20, 16, 5), "f16"))
    assert calls(made) == ["conv_images", "conv_images", "conv_filters"]
    made = check(lambda x, w: products(lambda x, w: ts.conv_transpose2d(
        x, w, stride=2, padding=1, output_padding=1), x, w),
        integers(rng, (2, 16, 4, 5)), integers(rng, (16, 24, 3, 3)))
    assert calls(made) == ["conv_images", "conv_images", "conv_filters"]


@pytest.mark.parametrize(("xs", "ws", "dtype", "keys"), [
    ((2, 3, 8, 8), (16, 3, 3, 3), "bf16", {}), ((2, 16, 6, 6), (16, 1, 3, 3), "bf16",
                                                {"groups": 16}),
    ((2, 16, 6, 6), (16, 16, 1, 1), "bf16", {}), ((2, 16, 6, 6), (16, 16, 3, 3), "f32", {}),
])
def test_others_are_matmuls_of_windows(xs: tuple, ws: tuple, dtype: str, keys: dict,
                                       rng: Any) -> None:
    """Few channels, windows of one pixel, and wide types."""
    made = check(lambda x, w: products(lambda x, w: ts.conv2d(x, w, **keys), x, w),
                 integers(rng, xs, dtype), integers(rng, ws, dtype))
    assert not calls(made) and any(g.kind == "gemm" for g in made.plan.groups)


@pytest.mark.parametrize(("dtype", "rounds"), [("bf16", True), ("f16", True),
                                               ("bf16 @saturate", False)])
def test_a_kernel_rounds_what_is_read_rounded_alone(dtype: str, rounds: bool, rng: Any) -> None:
    """Its sums are f32 where something else reads them, or rounds them in its own way."""
    x, w, b = (integers(rng, s, dtype) for s in ((1, 16, 6, 6), (16, 16, 3, 3), (16,)))
    made = check(lambda x, w: (ts.conv2d(x, w),), x, w)
    (launch,) = (g for g in made.plan.groups if g.kind == "launch")
    assert launch.writes[0].type.dtype is (x.dtype if rounds else ts.as_type("f32").dtype)
    made = check(lambda x, w, b: (ts.conv2d(x, w, b),), x, w, b)
    (launch,) = (g for g in made.plan.groups if g.kind == "launch")
    assert launch.writes[0].type == ts.as_type("f32")


def test_what_lies_outside_the_images_is_not_read(rng: Any) -> None:
    """Infinities at the edge reach the places that see them, and no others."""
    x = ts.zeros((1, 16, 6, 6), "bf16").array.copy()
    x[0, 0, 0, 0], x[0, 0, 5, 5] = np.inf, np.inf
    w = ts.ones((16, 16, 3, 3), "bf16")
    f = ts.jit(lambda x, w: ts.conv2d(x, w, padding=1))
    made = CudaProgram(f.graph(ts.tensor(x), w), "sm_90a").run([x, w.array])[0]
    bad = np.argwhere(np.isinf(made[0, 0].astype(np.float32)))
    assert sorted(map(tuple, bad)) == [(0, 0), (0, 1), (1, 0), (1, 1), (4, 4), (4, 5), (5, 4),
                                       (5, 5)]
    assert not np.isnan(made.astype(np.float32)).any()
