"""Sums of matmuls that become one kernel: which do, what it computes, and in which form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda.launch_forms import forms_of
from tessera.graph.cuda.levels import program_of
from tolerance import assert_close

M, N = 192, 272
SHAPES = {"n": (lambda rows, K: (rows, K), lambda K, columns: (K, columns)),
          "t": (lambda rows, K: (K, rows), lambda K, columns: (columns, K))}


def chain(layouts: tuple[str, ...]) -> Callable:
    """(c, a0, b0, a1, b1, ...) -> c + a0 b0 + a1 b1 + ..., never rounded between."""
    def sums(c: Any, *operands: Any) -> Any:
        for layout, a, b in zip(layouts, operands[::2], operands[1::2], strict=True):
            a = ts.transpose(a) if layout[0] == "t" else a
            c = ts.gemm(a, ts.transpose(b) if layout[1] == "t" else b, c)
        return c

    return sums


def drawn(rng: Any, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def operands(rng: Any, layouts: tuple[str, ...], depths: tuple[int, ...]) -> list[np.ndarray]:
    return [drawn(rng, *SHAPES[way][side](*extents))
            for layout, K in zip(layouts, depths, strict=True)
            for side, (way, extents) in enumerate(zip(layout, ((M, K), (K, N)), strict=True))]


def lowered(fn: Callable, *args: Any, target: str = "sm_90a") -> Any:
    return program_of(ts.jit(fn).graph(*map(ts.tensor, args)), target)


def pairs(program: Any) -> list[int]:
    """Of each matmul kernel, how many products it adds up."""
    return [len(g.steps[0].args) // 2 for g in program.plan.groups if g.kind == "gemm"]


@pytest.mark.parametrize(("layouts", "depths"), [
    (("nt", "nt"), (128, 128)), (("nn", "tn"), (64, 200)), (("nt", "tn", "nn"), (136, 8, 72)),
    (("tt", "nt", "nn", "tn"), (72, 64, 8, 136)), (("nt", "tn", "nn"), (2000, 8, 2600))], ids=str)
def test_a_sum_of_products_is_one_kernel(layouts, depths, rng):
    """Each of its own layout and K; parts of a long sum go on from one K to the next."""
    own, bias = operands(rng, layouts, depths), rng.standard_normal(N).astype(np.float32)
    program = lowered(chain(layouts), bias, *own)
    assert pairs(program) == [len(depths)] and forms_of(program)[0].name == "wgmma"
    first, steps = program.plan.groups[0], sum(-(-K // 64) for K in depths)
    depth = dict(first.attrs).get("depth", 0)
    assert (depth > 0) == (sum(depths) > 1000)
    assert not depth or first.space[0] == -(-steps * 64 // depth) > 1
    (got,) = program.run([bias, *own])
    want = bias.astype("f8") + sum(
        (a.T if way[0] == "t" else a).astype("f8") @ (b.T if way[1] == "t" else b).astype("f8")
        for way, a, b in zip(layouts, own[::2], own[1::2], strict=True))
    assert_close(got, want, "f32", n=sum(depths), scale=float(np.abs(want).max()))


def test_what_follows_a_sum_of_products_runs_on_its_sums(rng):
    """Whole, where the result has blocks enough: with the bias and the cast it is one launch."""
    fn, rows = chain(("nn", "nt")), 2048

    def rounded(*args: Any) -> Any:
        return ts.cast(fn(*args), "bf16")

    own = [drawn(rng, *s) for s in ((rows, 72), (72, rows), (rows, 64), (rows, 64))]
    bias = rng.standard_normal(rows).astype(np.float32)
    program = lowered(rounded, bias, *own)
    (group,) = program.plan.groups
    assert pairs(program) == [2] and "2 matmuls into the same sums" in group.schedule.notes
    assert [o.shape for o in group.writes] == [(rows, rows)] and len(group.reads) == 5
    (got,) = program.run([bias, *own])
    a, b, d, e = (x.astype(np.float32) for x in own)
    want = bias + a @ b + d @ e.T
    assert_close(got, want, "bf16", n=137, scale=float(np.abs(want).max()))


def test_what_is_read_by_two_products_of_a_sum(rng):
    """x a + x b, and the tile of c behind both."""
    x, a, b = drawn(rng, M, 64), drawn(rng, 64, N), drawn(rng, N, 64)
    c = rng.standard_normal((M, N)).astype(np.float32)
    program = lowered(lambda x, a, b, c: ts.gemm(x, ts.transpose(b), ts.gemm(x, a, c)), x, a, b, c)
    assert pairs(program) == [2]
    (got,) = program.run([x, a, b, c])
    want = c + x.astype("f8") @ (a.astype("f8") + b.T.astype("f8"))
    assert_close(got, want, "f32", n=129, scale=float(np.abs(want).max()))


def test_products_of_a_batch(rng):
    a, b = drawn(rng, 3, M, 64), drawn(rng, 3, 64, N)
    d, e = drawn(rng, 3, M, 72), drawn(rng, 1, 72, N)
    c = rng.standard_normal(N).astype(np.float32)
    program = lowered(chain(("nn", "nn")), c, a, b, d, e)
    assert pairs(program) == [2]
    (got,) = program.run([c, a, b, d, e])
    want = c + a.astype("f8") @ b.astype("f8") + d.astype("f8") @ e.astype("f8")
    assert_close(got, want, "f32", n=137, scale=float(np.abs(want).max()))


def test_gradients_of_what_several_matmuls_read(rng):
    """d(h) = dg g' + du u', rounded once: no f32 tile lies in memory between them."""
    def loss(h: Any, g: Any, u: Any) -> Any:
        return ts.sum(ts.cast(ts.silu(h @ g) * (h @ u), "f32") ** 2)

    h, g, u = drawn(rng, M, 64) / 8, drawn(rng, 64, N), drawn(rng, 64, N)
    fn = ts.jit(ts.grad(loss))
    args = [ts.tensor(x) for x in (h, g, u)]
    program = program_of(fn.graph(*args), "sm_90a")
    assert sorted(pairs(program)) == [1, 1, 2]
    (got,) = program.run([h, g, u])
    want = fn(*args).array.astype(np.float64)
    assert_close(got, want, "bf16", n=N, scale=float(np.abs(want).max()))


def test_what_each_matmul_rounds_for_itself_has_one_gradient(rng):
    """h is cast in front of each of three matmuls: once, and its cotangent is rounded once."""
    def loss(h: Any, *weights: Any) -> Any:
        return sum(ts.sum(ts.cast(ts.cast(h, "bf16") @ w, "f32") ** 2) for w in weights)

    h = rng.standard_normal((M, 64)).astype(np.float32)
    weights = [drawn(rng, 64, N) for _ in "qkv"]
    fn = ts.jit(ts.grad(loss))
    args = [ts.tensor(x) for x in (h, *weights)]
    program = program_of(fn.graph(*args), "sm_90a")
    assert sorted(pairs(program)) == [1, 1, 1, 3]
    (got,) = program.run([h, *weights])
    want = fn(*args).array.astype(np.float64)
    assert_close(got, want, "bf16", n=N, scale=float(np.abs(want).max()))


@pytest.mark.parametrize(("name", "fn", "shapes", "target", "want"), [
    ("rows of 4 bytes more", chain(("nn", "nn")), [(N,), (M, 64), (64, N), (M, 66), (66, N)],
     "sm_90a", [1, 1]),
    ("no wgmma", chain(("nn", "nn")), [(N,), (M, 64), (64, N), (M, 64), (64, N)], "sm_80", [1, 1]),
    ("five", chain(("nn",) * 5), [(N,), *((M, 64), (64, N)) * 5], "sm_90a", [1, 4]),
], ids=lambda x: x if isinstance(x, str) else "")
def test_sums_that_are_several_kernels(name, fn, shapes, target, want):
    args = [np.zeros(s, np.float32 if len(s) == 1 else ml_dtypes.bfloat16) for s in shapes]
    assert sorted(pairs(lowered(fn, *args, target=target))) == want


def test_a_product_that_something_else_reads_is_a_kernel_of_its_own(rng):
    def both(c: Any, a: Any, b: Any, d: Any, e: Any) -> Any:
        first = ts.gemm(a, b, c)
        return first, ts.gemm(d, e, first)

    args = [np.zeros(s, ml_dtypes.bfloat16) for s in ((M, 64), (64, N), (M, 64), (64, N))]
    assert pairs(lowered(both, np.zeros(N, np.float32), *args)) == [1, 1]
