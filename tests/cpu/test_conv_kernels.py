"""Convolutions of narrow types on GPUs: kernels that unfold no windows, under the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram

CASES = {
    "plain": ((2, 20, 9, 10), (44, 20, 3, 3), {"padding": 1}),
    "strided": ((2, 36, 9, 10), (18, 36, 3, 3), {"stride": 2, "padding": (1, (0, 2))}),
    "groups": ((2, 32, 7, 8), (48, 16, 2, 3), {"stride": (1, 2), "dilation": 2, "padding": 2,
                                               "groups": 2}),
    "patches": ((3, 20, 8, 8), (18, 20, 2, 2), {"stride": 2}),
    "left over": ((1, 17, 8, 8), (33, 17, 3, 3), {"stride": 3}),
    "wide": ((1, 18, 13, 12), (130, 18, 3, 3), {"padding": "same"}),
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


DEPTHWISE = {
    "plain": ((2, 20, 9, 10), (20, 1, 3, 3), {"padding": 1}),
    "strided": ((2, 36, 9, 11), (36, 1, 5, 3), {"stride": (2, 3), "padding": (2, (0, 2))}),
    "dilated": ((1, 72, 12, 7), (72, 1, 2, 3), {"dilation": (2, 1), "padding": "same"}),
    "filters each": ((2, 5, 7, 8), (15, 1, 3, 3), {"stride": 2, "padding": 1}),
    "left over": ((1, 3, 8, 8), (3, 1, 3, 3), {"stride": 3}),
}


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


LAST = {  # what copies unfold
    "ragged": ((2, 64, 9, 10), (72, 64, 3, 3), {"padding": 1},
              ["conv_forward", "conv_forward", "conv_weights"]),
    "both ways": ((2, 128, 6, 7), (64, 128, 3, 2), {"padding": ((1, 0), (0, 2)),
                                                    "dilation": (2, 1)},
                  ["conv_forward", "conv_backward", "conv_weights"]),
    "strided": ((2, 64, 9, 10), (64, 64, 3, 3), {"stride": 2, "padding": 1},
                ["conv_forward", "conv_backward_strided", "conv_weights"]),
    "one pixel": ((2, 64, 8, 7), (128, 64, 1, 1), {"stride": 2},
                  ["conv_forward", "conv_backward_strided", "conv_weights"]),
    "half": ((2, 32, 9, 10), (64, 32, 3, 3), {"padding": 1},
             ["conv_forward", "conv_backward", "conv_weights"]),
    "by sixteen": ((1, 48, 9, 8), (16, 48, 3, 3), {"padding": 1},
                   ["conv_forward", "conv_forward", "conv_weights"]),
    "half, strided": ((2, 32, 9, 10), (48, 32, 3, 3), {"stride": 2, "padding": 1},
                      ["conv_forward", "conv_backward_strided", "conv_weights"]),
    "few filters": ((1, 32, 6, 7), (3, 32, 3, 3), {"padding": 1},
                    ["conv_forward", "conv_forward", "conv_weights"]),
    "few channels": ((2, 3, 12, 14), (64, 3, 7, 7), {"stride": 2, "padding": 3},
                     ["conv_patches", "conv_patches", "conv_forward", "conv_weights"]),
    "fewer": ((2, 1, 9, 12), (8, 1, 5, 4), {"stride": (1, 2)},
              ["conv_patches", "conv_patches", "conv_forward", "conv_weights"]),
}


@pytest.mark.parametrize("name", LAST)
def test_images_that_copies_unfold(name: str, rng: Any) -> None:
    xs, ws, keys, launched = LAST[name]
    fn = lambda x, w: products(lambda x, w: ts.conv2d(x, w, **keys), x, w)  # noqa: E731
    x, w = integers(rng, xs), integers(rng, ws)
    assert calls(check(fn, x, w)) == launched
    assert "conv_forward" not in calls(check(fn, x, w, target="sm_80"))
    by_unit = [m.how.all for m in ts.jit(fn).schedule(x, w, target="sm_90a").matmuls]
    assert by_unit.count(("wgmma",)) >= len([c for c in launched if c in (
        "conv_forward", "conv_backward", "conv_backward_strided", "conv_weights")])


def test_channels_stay_last_in_a_chain(rng: Any) -> None:
    """Of images [N, H, W, C] nothing is transposed but the filters and their gradients: what is
    done to each element, means and windows of one pixel take them as they lie."""
    def loss(x: Any, w: Any, point: Any, v: Any, b: Any) -> Any:
        y = ts.relu(ts.conv2d(ts.transpose(x, (0, 3, 1, 2)), w, padding=1) + b[:, None, None])
        z = ts.relu(ts.conv2d(y, point))
        u = ts.relu(ts.conv2d(z, v, stride=2, padding=1))
        return ts.sum(ts.cast(ts.mean(u, axis=(2, 3)), "f32")), ts.transpose(y, (0, 2, 3, 1))

    def step(x: Any, *weights: Any) -> Any:
        made, back = ts.vjp(lambda *ws: loss(x, *ws), *weights)
        return (*made, *back((ts.ones(()), ts.zeros(made[1].shape, made[1].dtype))))

    xs = [integers(rng, s) for s in ((2, 8, 8, 64), (64, 64, 3, 3), (64, 64, 1, 1),
                                     (64, 64, 3, 3), (64,))]
    made = check(step, *xs)
    assert calls(made) == ["conv_forward", "conv_forward", "conv_backward_strided", "conv_weights",
                           "conv_weights"]
    moved = [g.writes[0].shape for g in made.plan.groups if g.kind == "move"]
    assert len(moved) == 4 and all(64 * 64 * 9 == np.prod(s) for s in moved), moved


def test_images_that_are_a_part_of_an_array_are_read_there(rng: Any) -> None:
    """A tensor of its own, further on: of a kernel that takes more than boxes of it, too."""
    def each(xs: Any, w: Any) -> Any:
        return tuple(ts.conv2d(ts.transpose(xs[i], (0, 3, 1, 2)), w, padding=1) for i in (0, 2))

    made = check(each, integers(rng, (3, 2, 6, 5, 32)), integers(rng, (16, 32, 3, 3)))
    assert calls(made) == ["conv_forward"] * 2
    moved = [g.writes[0].shape for g in made.plan.groups if g.kind == "move"]
    assert (2, 6, 5, 32) not in moved, moved


def test_images_of_one_axis_are_unfolded_too(rng: Any) -> None:
    made = check(lambda x, w: products(lambda x, w: ts.conv1d(x, w, padding=2), x, w),
                 integers(rng, (3, 32, 21)), integers(rng, (48, 32, 4)))
    assert calls(made) == ["conv_forward", "conv_forward", "conv_weights"]


def test_single_pixels_of_images_that_come_channels_last(rng: Any) -> None:
    """Are plain matmuls, forward and both ways back, and nothing is moved."""
    def conv(x: Any, w: Any) -> Any:
        x, w = ts.transpose(x, (0, 3, 1, 2)), ts.transpose(w, (0, 3, 1, 2))
        return ts.transpose(ts.conv2d(x, w), (0, 2, 3, 1))

    made = check(lambda x, w: products(conv, x, w), integers(rng, (2, 5, 6, 16)),
                 integers(rng, (24, 1, 1, 16)))
    kinds = [g.kind for g in made.plan.groups]
    assert kinds.count("gemm") == 3 and "move" not in kinds, kinds


def test_one_axis_and_transposed(rng: Any) -> None:
    made = check(lambda x, w: products(lambda x, w: ts.conv1d(x, w, stride=2, padding=3), x, w),
                 integers(rng, (2, 18, 21), "f16"), integers(rng, (20, 18, 5), "f16"))
    assert calls(made) == ["conv_images", "conv_images", "conv_filters"]
    made = check(lambda x, w: products(lambda x, w: ts.conv_transpose2d(
        x, w, stride=2, padding=1, output_padding=1), x, w),
        integers(rng, (2, 16, 4, 5)), integers(rng, (16, 24, 3, 3)))
    assert calls(made) == ["conv_images", "conv_images", "conv_filters"]


@pytest.mark.parametrize(("xs", "ws", "dtype", "keys", "target"), [
    ((2, 3, 8, 8), (16, 3, 3, 3), "bf16", {}, "sm_80"),
    ((2, 16, 6, 6), (16, 2, 3, 3), "bf16", {"groups": 8}, "sm_90a"),
    ((2, 16, 6, 6), (16, 16, 1, 1), "bf16", {}, "sm_90a"),
    ((2, 16, 6, 6), (16, 16, 3, 3), "f32", {}, "sm_90a"),
])
def test_others_are_matmuls_of_windows(xs: tuple, ws: tuple, dtype: str, keys: dict, target: str,
                                       rng: Any) -> None:
    """Few channels where copies do not unfold, windows of one pixel, and wide types."""
    made = check(lambda x, w: products(lambda x, w: ts.conv2d(x, w, **keys), x, w),
                 integers(rng, xs, dtype), integers(rng, ws, dtype), target=target)
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


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_a_filter_for_each_channel(name: str, dtype: str, rng: Any) -> None:
    """No window is unfolded, and no matmul has one row."""
    xs, ws, keys = DEPTHWISE[name]
    fn = lambda x, w: products(  # noqa: E731
        lambda x, w: ts.conv2d(x, w, groups=xs[1], **keys), x, w)
    made = check(fn, integers(rng, xs, dtype), integers(rng, ws, dtype))
    apart = name in ("strided", "filters each", "left over")
    assert calls(made) == ["depthwise_forward", "depthwise_backward" if apart
                           else "depthwise_forward", "depthwise_weights"]
    first = next(g for g in made.plan.groups if g.kind == "launch")
    assert len(first.reads) == 2  # what its result held before is not needed


def test_a_filter_for_each_channel_along_one_axis(rng: Any) -> None:
    fn = lambda x, w: products(  # noqa: E731
        lambda x, w: ts.conv1d(x, w, padding=[(3, 0)], groups=24), x, w)
    made = check(fn, integers(rng, (2, 24, 40)), integers(rng, (24, 1, 4)))
    assert calls(made) == ["depthwise_forward", "depthwise_forward", "depthwise_weights"]


@pytest.mark.parametrize(("length", "launches"), [(11, 2), (31, 4)])
def test_long_windows_of_channels_are_read_in_parts(length: int, launches: int, rng: Any) -> None:
    """Of 8 taps, as more would need too many registers."""
    fn = lambda x, w: products(  # noqa: E731
        lambda x, w: ts.conv1d(x, w, padding="same", groups=16), x, w)
    made = check(fn, integers(rng, (2, 16, 50)), integers(rng, (16, 1, length)))
    assert calls(made) == ["depthwise_forward", "depthwise_forward",
                           *["depthwise_weights"] * launches]


def test_images_stay_as_they_lie_between_pixels_and_channels(rng: Any) -> None:
    """A block of 1 x 1, depthwise and 1 x 1 convolutions transposes what comes in, and its end."""
    def block(x: Any, a: Any, w: Any, b: Any) -> tuple:
        h = ts.relu(ts.conv2d(ts.relu(ts.conv2d(x, a)), w, padding=1, groups=64))
        return (ts.conv2d(h, b),)

    shapes = (2, 32, 8, 8), (64, 32, 1, 1), (64, 1, 3, 3), (32, 64, 1, 1)
    made = check(block, *(integers(rng, s) for s in shapes))
    moved = [g for g in made.plan.groups for s in g.steps if s.op == "transpose"
             and g.writes[0].shape[0] == 2]
    assert len(moved) == 2
