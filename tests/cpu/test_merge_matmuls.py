"""Matmuls of one operand that become one kernel: which do, what they compute, what goes along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda.launch_plan import plan_of
from tessera.graph.cuda.levels import program_of
from tolerance import assert_close

ROWS, K = 256, 192
WIDTHS = {"alike": (128, 128, 128), "heads that share keys": (256, 64, 64), "two": (64, 192)}


def drawn(rng: Any, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def lowered(fn: Callable, *args: Any, target: str = "sm_90a") -> Any:
    return program_of(ts.jit(fn).graph(*map(ts.tensor, args)), target)


def matmuls(program: Any) -> list[Any]:
    return [g for g in program.plan.groups if g.kind == "gemm"]


def half(x: Any) -> Any:
    return ts.cast(x, "bf16 @accum(f32)")


def linear(x: Any, *operands: Any) -> Any:
    """x a + c, x b + d, ... in bf16, of f32 weights and biases."""
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return tuple(ts.gemm(half(x), half(w), half(b)) for w, b in pairs)


LAST = ("relu", "negative", "tanh")


def apart(parts: Any) -> tuple:
    """Something else of each, so that no part is a result, which has memory of its own."""
    return tuple(getattr(ts, f)(y) for f, y in zip(LAST, parts, strict=False))


def apart_in_f64(parts: Any) -> list[np.ndarray]:
    maths = {"relu": lambda y: np.maximum(y, 0), "negative": np.negative, "tanh": np.tanh}
    return [maths[f](y) for f, y in zip(LAST, parts, strict=False)]


def weights(rng: Any, widths: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(s).astype(np.float32) for n in widths for s in ((K, n), (n,))]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_matmuls_of_the_same_rows_are_one(widths, target, rng):
    """With biases and casts; weights are rounded into their places, nothing is copied but rows."""
    x, own = rng.standard_normal((ROWS, K)).astype(np.float32), weights(rng, widths)
    program = lowered(lambda *a: apart(linear(*a)), x, *own, target=target)
    assert [g.space for g in matmuls(program)] == [(ROWS, sum(widths))]
    assert not plan_of(program).copies
    x8, *rest = [t.astype(ml_dtypes.bfloat16).astype("f8") for t in (x, *own)]
    parts = [x8 @ w + b for w, b in zip(rest[::2], rest[1::2], strict=True)]
    for got, want in zip(program.run([x, *own]), apart_in_f64(parts), strict=True):
        assert_close(got, want, "bf16", n=K, scale=float(max(np.abs(p).max() for p in parts)))


@pytest.mark.parametrize("shape", [(2, 128, K), (ROWS, K)], ids=["batches", "rows"])
def test_gradients_are_one_matmul_and_one_sum(shape, rng):
    """Of three weights and biases, whose cotangents are made in the places where they belong."""
    x, own = rng.standard_normal(shape).astype(np.float32), weights(rng, (128, 128, 128))
    scales = 0.5, -1.0, 2.0

    def gradient(x, *own):
        def loss(*own):
            squares = (ts.cast(y, "f32") ** 2 for y in linear(x, *own))
            return sum(s * ts.sum(y) for s, y in zip(scales, squares, strict=True))

        return ts.grad(loss, argnums=tuple(range(len(own))))(*own)

    program = lowered(gradient, x, *own)
    assert [g.space[-1] for g in matmuls(program)] == [384, 384]
    sums = [g for g in program.plan.groups if any(s.op == "reduce_sum" for s in g.steps)]
    assert [g.space[-1] for g in sums][:1] == [384] and len(sums) <= 2
    assert not [c for c in plan_of(program).copies if "concatenate" in c.kernel]
    rows = x.reshape(ROWS, K).astype(ml_dtypes.bfloat16).astype("f8")
    for i, s in enumerate(scales):
        w, b = (t.astype(ml_dtypes.bfloat16).astype("f8") for t in own[2 * i:2 * i + 2])
        cotangent = 2 * s * (rows @ w + b)
        got = program.run([x, *own])[2 * i:2 * i + 2]
        for a, want in zip(got, (rows.T @ cotangent, cotangent.sum(0)), strict=True):
            assert_close(a, want, "bf16", n=ROWS, scale=float(np.abs(cotangent).max() * ROWS))


def test_what_one_is_made_of_another_of_stays_apart(rng):
    x, a = drawn(rng, ROWS, K), drawn(rng, K, 128)

    def both(x, a):
        y = x @ a
        return y, x @ (a * ts.mean(y))

    program = lowered(both, x, a)
    assert len(matmuls(program)) == 2
    got = program.run([x, a])
    want = (x.astype("f8") @ a.astype("f8")).astype(ml_dtypes.bfloat16).astype("f8")
    assert_close(got[0], want, "bf16", n=K, scale=float(np.abs(want).max()))
    assert got[1].shape == want.shape and np.isfinite(got[1].astype("f4")).all()


def test_what_reads_the_first_waits_for_the_whole(rng):
    """A reader that stands before the other matmul's operand is there."""
    x, a, b = drawn(rng, ROWS, K), drawn(rng, K, 128), drawn(rng, K, 64)

    def both(x, a, b):
        y = x @ (a * 1.5)
        z = ts.relu(y) * 3.0
        return z, ts.negative(x @ (b * 0.5))

    program = lowered(both, x, a, b)
    assert [g.space for g in matmuls(program)] == [(ROWS, 192)]
    wide = [t.astype("f8") for t in (x, a * 1.5, b * 0.5)]
    for got, want in zip(program.run([x, a, b]), (
            3 * np.maximum(wide[0] @ wide[1], 0), -wide[0] @ wide[2]), strict=True):
        assert_close(got, want, "bf16", n=K, scale=float(np.abs(want).max()))


@pytest.mark.parametrize(("widths", "tails"), [
    ((72, 128), ("relu", "relu")), ((128, 128), ("relu", "tanh")), ((100, 28), ("relu", "relu"))],
    ids=["no whole boxes", "functions that differ", "odd"])
def test_what_would_be_copied_or_lose_its_epilogue_stays_apart(widths, tails, rng):
    x, *own = (drawn(rng, *s) for s in ((ROWS, K), (K, widths[0]), (K, widths[1])))

    def both(x, *own):
        return tuple(half(getattr(ts, f)(ts.gemm(x, w * 2.0, ts.cast(x[0, :1], "f32"))))
                     for f, w in zip(tails, own, strict=True))

    program = lowered(both, x, *own)
    assert len(matmuls(program)) == 2
    for got, f, w in zip(program.run([x, *own]), tails, own, strict=True):
        wide = x.astype("f8") @ (2 * w.astype("f8")) + x.astype("f8")[0, 0]
        want = np.maximum(wide, 0) if f == "relu" else np.tanh(wide)
        assert_close(got, want, "bf16", n=K, scale=float(np.abs(wide).max()))


def test_arguments_stay_apart(rng):
    """Weights that are arguments in bf16 would be copied."""
    own = drawn(rng, 2048, 2048), drawn(rng, 2048, 2048)
    program = lowered(lambda *a: apart((a[0] @ a[1], a[0] @ a[2])), drawn(rng, 128, 2048), *own)
    assert len(matmuls(program)) == 2 and not plan_of(program).copies


def test_columns_of_one_weight_are_read_where_they_lie(rng):
    """x w[:, :64], x w[:, 64:192] with w an argument: a matmul by w, or by its first columns."""
    x, w = drawn(rng, ROWS, K), drawn(rng, K, 192)
    wide = x.astype("f8") @ w.astype("f8")
    for end in (192, 128):
        def cut(x, w, end=end):
            return apart((x @ w[:, :64], x @ w[:, 64:end]))

        program = lowered(cut, x, w)
        assert [g.space for g in matmuls(program)] == [(ROWS, end)] and not plan_of(program).copies
        for got, want in zip(program.run([x, w]), apart_in_f64((wide[:, :64], wide[:, 64:end])),
                             strict=True):
            assert_close(got, want, "bf16", n=K, scale=float(np.abs(wide).max()))


def test_results_are_not_joined_to_be_copied(rng):
    x, *own = (drawn(rng, *s) for s in ((2048, 2048), (2048, 1024), (2048, 1024)))
    program = lowered(lambda x, a, b: (x @ (2.0 * a), x @ (2.0 * b)), x, *own)
    assert len(matmuls(program)) == 2 and not plan_of(program).copies


def test_transposed_weights_are_joined_along_their_rows(rng):
    """x a', x b' of casts: nothing is transposed in memory."""
    x, a, b = rng.standard_normal((ROWS, K)), rng.standard_normal((128, K)), (
        rng.standard_normal((64, K)))
    args = [t.astype(np.float32) for t in (x, a, b)]
    program = lowered(lambda x, a, b: apart((half(x) @ half(a).T, half(x) @ half(b).T)),
                      *args)
    assert [g.space for g in matmuls(program)] == [(ROWS, 192)] and not plan_of(program).copies
    x, a, b = (t.astype(ml_dtypes.bfloat16).astype("f8") for t in args)
    for got, want in zip(program.run(args), apart_in_f64((x @ a.T, x @ b.T)), strict=True):
        assert_close(got, want, "bf16", n=K, scale=float(np.abs(want).max()))


def test_what_is_kept_for_longer_is_not_joined(rng):
    """Of three parts of 1.5 MB the last is read again much later: the others' memory would be kept
    with it."""
    x, *own = (rng.standard_normal(s).astype(np.float32) for s in ((4096, 256), *[(256, 192)] * 3))

    def late(x, *own):
        a, b, c = (half(x) @ half(w) for w in own)
        y = ts.tanh(a) * ts.relu(b)
        for _ in range(80):
            y = ts.flip(y, 0) * 1.01
        return y + c

    program = lowered(late, x, *own)
    assert [g.space for g in matmuls(program)] == [(4096, 384), (4096, 192)]
    narrow, *own8 = (t.astype(ml_dtypes.bfloat16).astype("f8") for t in (x, *own))
    a, b, c = (narrow @ w for w in own8)
    want = 1.01**80 * np.tanh(a) * np.maximum(b, 0) + c
    assert_close(program.run([x, *own])[0], want, "bf16", n=256, scale=float(np.abs(want).max()))


def test_pairs_that_read_each_other_are_not_both_joined(rng):
    """x a and x g(y c) with y c and y h(x a): joined, each would wait for the other."""
    x, y, a, c = (drawn(rng, *s) for s in ((128, 128), (128, 128), (128, 64), (128, 64)))

    def crossed(x, y, a, c):
        first, second = x @ half(a * 0.5), y @ half(c * 0.5)
        third = x @ half(ts.tanh(ts.mean(second)) * c)
        fourth = y @ half(ts.tanh(ts.mean(first)) * a)
        return tuple(half(ts.tanh(t)) + ts.relu(t) for t in (first, third, second, fourth))

    program = lowered(crossed, x, y, a, c)
    assert len(matmuls(program)) == 3
    for got, want in zip(program.run([x, y, a, c]), ts.jit(crossed)(
            *map(ts.tensor, (x, y, a, c))), strict=True):
        assert_close(got, np.asarray(want.array, "f8"), "bf16", n=128,
                     scale=float(np.abs(np.asarray(want.array, "f8")).max()))


def test_a_sum_that_a_joined_part_is_made_of_stays(rng):
    """[a b] with b made of the sum of a: that sum is not one of the columns of the whole."""
    x, w = rng.standard_normal((2048, 64)), rng.standard_normal((128, 32))
    args = [t.astype(np.float32) for t in (x, w)]

    def made(x, w):
        a = x * 2.0
        b = a * ts.tanh(ts.sum(a, axis=0))
        return ts.concatenate([a, b], axis=1) @ w, ts.sum(b, axis=0)

    program = lowered(made, *args)
    a = 2 * args[0].astype("f8")
    b = a * np.tanh(a.sum(0))
    want = np.concatenate([a, b], 1) @ args[1].astype("f8"), b.sum(0)
    for got, y, n in zip(program.run(args), want, (128, 2048), strict=True):
        assert_close(got, y, "f32", n=n, scale=float(np.abs(a).sum(0).max()))
