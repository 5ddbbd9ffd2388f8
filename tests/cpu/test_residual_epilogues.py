"""What meets the result of a matmul element by element: residuals, masks, casts behind reshapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import both_ways, emulate, kinds, lowered, normal
from tessera.graph.cuda.kernels.anchors import anchor_frame
from tessera.graph.ir import Node, Value
from tessera.graph.op import Aval
from tolerance import assert_close


def images(rng: np.random.Generator, B: int, C: int, K: int, H: int) -> list[ts.Tensor]:
    """x [B, C, H, H], w [K, C, 1, 1], a residual, a bias."""
    return [normal(rng, B, C, H, H, dtype="bf16"), normal(rng, K, C, 1, 1, dtype="bf16"),
            normal(rng, B, K, H, H, dtype="bf16"), normal(rng, K)]


BEHIND: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a cast": (lambda x, w, r, b: ts.conv2d(x, w), ["gemm"]),
    "a residual": (lambda x, w, r, b: ts.relu(ts.conv2d(x, w) + r), ["gemm"]),
    "a row": (lambda x, w, r, b: ts.conv2d(x, w) * b[:, None, None], ["gemm"]),
    "a mask of places": (lambda x, w, r, b: ts.where(
        ts.tril(ts.ones(r.shape[2:])) > 0, ts.conv2d(x, w), r), ["gemm"]),
    "part of an axis": (lambda x, w, r, b: ts.conv2d(x, w) + r[:, :, :1], ["gemm", "loop"])}


@pytest.mark.parametrize("name", BEHIND)
def test_what_follows_a_convolution_channels_first_is_its_epilogue(name, rng):
    """Rows and columns of an image are one axis of the matmul's result: a cast was a launch."""
    fn, made = BEHIND[name]
    given = images(rng, 3, 16, 24, 8)
    assert kinds(lowered(fn, *given)) == made
    (got,), (want,) = both_ways(fn, *given)
    assert_close(got.astype("f4"), want.astype("f4"), "bf16", n=16)


def test_a_norm_channels_first_reads_what_the_convolution_rounds(rng):
    """Its rows read no sums of the matmul, which would be written for them beside the cast."""
    def loss(x: Any, w: Any, g: Any) -> Any:
        return ts.sum(ts.cast(ts.relu(ts.batch_norm(ts.conv2d(x, w), g, g)), "f32") ** 2)

    step = ts.grad(loss, argnums=(1, 2))
    x, w, _, _ = images(rng, 8, 16, 264, 16)
    groups = lowered(step, x, w, ts.ones(264)).plan.groups
    forward = next(g for g in groups if g.kind == "gemm")
    assert [o.type.dtype.name for o in forward.writes] == ["bf16"]
    x, w, _, _ = images(rng, 2, 16, 264, 8)
    for got, want in zip(*both_ways(step, x, w, ts.ones(264)), strict=True):
        size = float(np.abs(want.astype("f4")).max())
        assert_close(got.astype("f4"), want.astype("f4"), "bf16", n=128, scale=size)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("residual", ["bf16", "f32"])
def test_residuals_and_masks_in_emulated_instructions(residual, target, rng):
    """On sm_90a they come by TMA while the tile is multiplied, and ends of tiles are not stored."""
    def fn(a: Any, b: Any, r: Any, m: Any) -> Any:
        total = ts.cast(a @ b, "f32") + ts.cast(r, "f32")
        return ts.cast(ts.where(m, total, 0.0), "bf16")

    for M, K, N in ((72, 40, 48), (136, 64, 144)):
        given = [normal(rng, M, K, dtype="bf16"), normal(rng, K, N, dtype="bf16"),
                 normal(rng, M, N, dtype=residual), ts.tensor(rng.random((M, N)) < 0.5)]
        assert emulate(fn, *given, target=target, rtol=2.0**-7, atol=2.0**-6) == 1


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_residuals_of_images_in_emulated_instructions(target, rng):
    fn = BEHIND["a residual"][0]
    assert emulate(fn, *images(rng, 2, 32, 72, 8)[:3], ts.zeros(72), target=target, kind="gemm",
                   rtol=2.0**-7, atol=2.0**-6) == 1


@pytest.mark.parametrize("extents, space, members", [
    ((6, 5), (2, 3, 5), ((0, 1), (2,))), ((6, 5), (6, 5), ((0,), (1,))),
    ((6, 20), (2, 3, 4, 5), ((0, 1), (2, 3))), ((6, 5), (6, 1, 5), ((0, 1), (2,))),
    ((6, 1), (6, 1), ((0,), (1,))), ((2, 6, 20), (2, 6, 4, 5), ((0,), (1,), (2, 3))),
    ((2, 6, 20), (2, 2, 3, 20), ((0,), (1, 2), (3,))), ((1, 6, 5), (6, 5), ((), (0,), (1,))),
    ((6, 5), (5, 6), None), ((6, 20), (6, 3, 20), None), ((6, 20), (24, 5), None),
    ((6, 5), (), None)])
def test_axes_of_a_loop_behind_a_matmul(extents, space, members):
    product = Node(None, (), {}, (Value(Aval(extents, ts.as_type("f32"))),), None)  # type: ignore
    found = anchor_frame(product, space)
    assert (found and found.members) == members
