"""Kernels of graph functions in emulated machine instructions, against the interpreter."""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from kernels.build import build
from lowered_functions import emulate, normal
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import (
    gathered_rows,
    integer_sums,
    loop_blocks,
    row_order,
    small_matmuls,
    sorted_segments,
    strips,
    unordered_sums,
)
from tessera.graph.cuda.levels import emitted_of
from tessera.graph.cuda.passes import matrix_transposes
from tessera.kernels import row_blocks
from tolerance import assert_close


@pytest.mark.parametrize("shape, ids, axis", [
    ((9, 32), (5,), 0), ((9, 13), (2, 3), 0), ((2, 9, 6), (5,), 1), ((6, 40), (19,), -1)])
def test_take(shape, ids, axis, rng):
    x, at = normal(rng, *shape, dtype="bf16"), rng.integers(-shape[axis], shape[axis], ids)
    emulate(lambda x, i: ts.take(x, i, axis=axis), x, ts.tensor(at))


@pytest.mark.parametrize("T, C, V", [(70, 24, 3), (10, 3, 2), (9, 1, 3)])
def test_segment_sum(T, C, V, rng):
    u, ids = normal(rng, T, C), ts.tensor(rng.integers(-V, V, T))
    emulate(lambda u, i: ts.segment_sum(u, i, V), u, ids)


@pytest.mark.parametrize("C, often", [(24, 0.6), (8, 0.6), (3, 1.0), (1, 0.6), (1, 1.0)])
def test_sums_of_sorted_segments(C, often, monkeypatch, rng):
    """Segments of up to eight slices, and longer ones by the blocks that they reach into."""
    monkeypatch.setattr(sorted_segments, "IDS", 16)
    monkeypatch.setattr(sorted_segments, "CHAIN", 8)
    T, V = 38, 5
    ids = np.where(rng.random(T) < often, 2 - V, rng.integers(-V, V, T))
    fn = ts.jit(lambda u, i: ts.segment_sum(u, i, V))
    u, i = normal(rng, T, C), ts.tensor(ids)
    emulate(fn, u, i)
    program = CudaProgram(fn.graph(u, i), "sm_80")
    assert [g.kind for g in program.plan.groups][-2:] == ["parts", "runs"]
    want = np.zeros((V, C))
    np.add.at(want, ids % V, np.asarray(u, np.float64))
    assert_close(program.run([u, i])[0], want, "f32", n=8)


def test_messages_along_edges(monkeypatch, rng):
    """Rows that integers pick are in memory for neither sums of messages, weighed or not, nor
    products of two: short segments and long ones, and gradients."""
    monkeypatch.setattr(sorted_segments, "IDS", 16)
    monkeypatch.setattr(sorted_segments, "CHAIN", 8)
    monkeypatch.setattr(gathered_rows, "LEAST", 0)
    N, E, C = 7, 45, 40
    x, u, w = normal(rng, N, C), normal(rng, N, C), normal(rng, E)
    ends = [np.where(rng.random(E) < 0.5, 2, rng.integers(-N, N, E)) for _ in range(2)]
    src, dst = map(ts.tensor, ends)

    def step(x, u, w, src, dst):
        def total(x, w):
            y = ts.segment_sum(w[:, None] * x[src], dst, N) + ts.segment_sum(x[dst], src, N)
            return ts.sum(y * u)

        return ts.grad(total, argnums=(0, 1))(x, w)

    fn = ts.jit(step)
    program = CudaProgram(fn.graph(x, u, w, src, dst), "sm_90a")
    kinds = [g.kind for g in program.plan.groups]
    assert "row_dots" in kinds
    assert all(np.prod(g.writes[0].shape) < E * C for g in program.plan.groups)
    assert emulate(step, x, u, w, src, dst, kind="row_dots runs parts", rtol=1e-6, atol=1e-5)
    got = program.run([t.array for t in (x, u, w, src, dst)])
    a, b = np.asarray(x, np.float64)[ends[0]], np.asarray(u, np.float64)[ends[1]]
    want = np.zeros((N, C))
    np.add.at(want, ends[0] % N, np.asarray(w, np.float64)[:, None] * b)
    np.add.at(want, ends[1] % N, np.asarray(u, np.float64)[ends[0]])
    assert_close(got[0], want, "f32", n=E)
    assert_close(got[1], (a * b).sum(1), "f32", n=C, scale=np.abs(a * b).sum(1))
    same = ts.jit(lambda x, i: ts.segment_sum(x[i], i, N))
    want = np.bincount(ends[0] % N, minlength=N)[:, None] * np.asarray(x, np.float64)
    assert_close(CudaProgram(same.graph(x, src), "sm_90a").run([x.array, src.array])[0], want,
                 "f32", n=E)
    squares = ts.jit(lambda x, i: ts.sum(x[i] * x[i], axis=1))
    made = CudaProgram(squares.graph(x, src), "sm_90a")
    assert [g.kind for g in made.plan.groups] == ["row_dots"]
    assert_close(made.run([x.array, src.array])[0], (a * a).sum(1), "f32", n=C)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int32"])
@pytest.mark.parametrize("C", [1, 3, 8, 24])
def test_extrema_and_weighted_sums_of_few_columns(C, dtype, monkeypatch, rng):
    """Of slices of few elements a lane has a whole segment; some have no slice."""
    monkeypatch.setattr(sorted_segments, "IDS", 16)
    monkeypatch.setattr(sorted_segments, "EXTREMA", 4)
    T, V = 60, 45
    ids, rows = rng.integers(0, V, T), rng.integers(0, T, T)
    u = ts.cast(rng.integers(-50, 50, (T, C)).astype(np.float32), dtype)
    w = ts.cast(rng.integers(-3, 3, T).astype(np.float32), dtype)
    fn = lambda u, w, i, r: (ts.segment_max(u, i, V), ts.segment_min(u, i, V),  # noqa: E731
                             ts.segment_sum(w[:, None] * u[r], i, V))
    xs = u, w, ts.tensor(ids), ts.tensor(rows)
    program = CudaProgram(ts.jit(fn).graph(*xs), "sm_90a")
    assert sum(g.kind == "runs" for g in program.plan.groups) == 3
    for got, want in zip(program.run([x.array for x in xs]), fn(*xs), strict=True):
        assert np.array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["int32", "uint8", "int64", "uint32"])
def test_counts_and_sums_of_integers(kind, shared, monkeypatch, rng):
    """They are exact in any order: nothing is sorted, and each group counts for itself."""
    monkeypatch.setattr(integer_sums, "IDS", 16)
    monkeypatch.setattr(integer_sums, "BLOCK", 64)
    monkeypatch.setattr(integer_sums, "GROUPS", 3)
    monkeypatch.setattr(integer_sums, "COUNTERS", 64 if shared else 8)
    x = rng.integers(0, 23, (5, 77)).astype(kind)
    i, u = ts.tensor(x), ts.tensor(rng.integers(-9, 9, (5, 77)))
    fn = ts.jit(lambda i, u: (ts.bincount(i, length=30), ts.bincount(i, u, length=30)))
    program = CudaProgram(fn.graph(i, u), "sm_90a")
    assert [g.kind for g in program.plan.groups] == ["integer_sums"] * 4
    counts, sums = program.run([x, u.array])
    assert np.array_equal(counts, np.bincount(x.ravel(), minlength=30))
    want = np.bincount(x.ravel(), u.array.ravel().astype(np.float64), 30)
    assert np.array_equal(sums, want)
    with pytest.raises(ts.AxisError, match="outside"):
        CudaProgram(ts.jit(lambda i: ts.bincount(i, length=20)).graph(i), "sm_90a").run([x])


def test_a_cast_that_changes_integers_stays_in_front_of_their_sums(monkeypatch):
    """-1 as an unsigned number is 0, not the last place."""
    monkeypatch.setattr(integer_sums, "IDS", 16)
    ids = np.full(40, -1, np.int8)
    fn = ts.jit(lambda i: ts.segment_sum(ts.ones((40,), "int32"), ts.cast(i, "uint32"), 5))
    made = CudaProgram(fn.graph(ts.tensor(ids)), "sm_90a").run([ids])
    assert np.array_equal(made[0], fn(ts.tensor(ids)).numpy())
    assert made[0].tolist() == [40, 0, 0, 0, 0]


def test_integers_from_the_end_are_added_there(monkeypatch, rng):
    monkeypatch.setattr(integer_sums, "IDS", 16)
    ids, u = rng.integers(-5, 5, 99), rng.integers(-9, 9, 99).astype(np.int32)
    fn = ts.jit(lambda u, i: ts.segment_sum(u, i, 5))
    program = CudaProgram(fn.graph(ts.tensor(u), ts.tensor(ids)), "sm_90a")
    assert [g.kind for g in program.plan.groups] == ["integer_sums"] * 2
    want = np.zeros(5, np.int32)
    np.add.at(want, ids % 5, u)
    assert np.array_equal(program.run([u, ids])[0], want)


@pytest.mark.row("CORE-19")
@pytest.mark.parametrize("T, C, V", [(38, 24, 5), (17, 1, 3), (20, 70, 40)])
def test_sums_in_any_order(T, C, V, monkeypatch, rng):
    """Under "fast" slices are added as they come; by default they are put in order first."""
    monkeypatch.setattr(sorted_segments, "IDS", 16)
    monkeypatch.setattr(unordered_sums, "IDS", 16)
    ids = rng.integers(-V, V, T)
    u, i = normal(rng, T, C), ts.tensor(ids)
    fn = ts.jit(lambda u, i: ts.segment_sum(u, i, V))
    program = CudaProgram(fn.graph(u, i), "sm_90a")
    assert "atomic_sums" not in [g.kind for g in program.plan.groups]
    with ts.determinism("fast"):
        emulate(fn, u, i, kind="atomic_sums", rtol=1e-5, atol=1e-6)
        program = CudaProgram(fn.graph(u, i), "sm_90a")
        assert [g.kind for g in program.plan.groups][-2:] == ["atomic_sums"] * 2
        got = program.run([u, i])[0]
    want = np.zeros((V, C))
    np.add.at(want, ids % V, np.asarray(u, np.float64))
    assert_close(got, want, "f32", n=T)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_products_of_many_small_matrices(dtype, monkeypatch, rng):
    """A lane for each row: both in batches, either alone, as they lie and turned, by themselves."""
    monkeypatch.setattr(small_matmuls, "LEAST", 8)
    a, b, c, d = (ts.tensor(rng.standard_normal(s), dtype)
                  for s in ((5, 9, 3, 4), (5, 9, 4, 2), (6, 4), (4, 4)))

    def fn(a, b, c, d):
        return a @ b, c @ b, b.mT @ d, a @ d.T, a.mT @ a, c.T @ (c[:, :1] * b[0, 0, :1, :1] + c)

    assert emulate(fn, a, b, c, d, kind="small_product", rtol=1e-6, atol=1e-6) == 5
    program = CudaProgram(ts.jit(fn).graph(a, b, c, d), "sm_90a")
    assert [g.kind for g in program.plan.groups].count("small_product") == 5
    A, B, C, D = (np.asarray(x.array, np.float64) for x in (a, b, c, d))
    want = (A @ B, C @ B, np.swapaxes(B, -1, -2) @ D, A @ D.T, np.swapaxes(A, -1, -2) @ A,
            C.T @ (C[:, :1] * B[0, 0, :1, :1] + C))
    for got, w in zip(program.run([x.array for x in (a, b, c, d)]), want, strict=True):
        assert_close(got, w, dtype, n=8)


@pytest.mark.parametrize("n, dtype", [(2, "f64"), (3, "f32"), (4, "f64")])
def test_systems_of_a_few_rows(n, dtype, rng):
    """In lanes of a kernel: right sides of more columns than a lane has, a pivot of 0 first."""
    a, b = rng.standard_normal((35, n, n)), rng.standard_normal((35, n, 6))
    a[0, 0, 0] = 0.0
    s = a @ np.swapaxes(a, 1, 2) + np.eye(n)
    x, y, z = (ts.tensor(v, dtype) for v in (a, b, s))

    def fn(a, b, s):
        return (ts.solve(a, b), ts.inv(a), *ts.slogdet(a), ts.det(a), ts.cholesky(s),
                ts.triangular_solve(s, b, lower=False), ts.triangular_solve(
                    a, b, lower=True, unit_diagonal=True))

    emulate(fn, x, y, z, rtol=1e-5, atol=1e-5)
    program = CudaProgram(ts.jit(fn).graph(x, y, z), "sm_90a")
    assert {g.kind for g in program.plan.groups} == {"small_system"}
    A, B, S = (np.asarray(t.array, np.float64) for t in (x, y, z))
    unit = np.tril(A, -1) + np.eye(n)
    want = (np.linalg.solve(A, B), np.linalg.inv(A), *np.linalg.slogdet(A), np.linalg.det(A),
            np.linalg.cholesky(S), np.linalg.solve(np.triu(S), B), np.linalg.solve(unit, B))
    hard = [A, A, A, A, A, S, np.triu(S), unit]
    for got, w, m in zip(program.run([t.array for t in (x, y, z)]), want, hard, strict=True):
        worst = np.linalg.cond(m).reshape(35, *[1] * (w.ndim - 1))
        assert_close(got, w, dtype, n=4 * n, scale=worst * (1 + np.abs(w).max()))
    (one,) = CudaProgram(ts.jit(lambda a: ts.solve(a, a)).graph(x), "sm_90a").run([x.array])
    assert_close(one, np.broadcast_to(np.eye(n), A.shape), dtype, n=4 * n,
                 scale=np.linalg.cond(A)[:, None, None])
    with pytest.raises(ts.TesseraError, match="singular: a pivot is 0"):
        CudaProgram(ts.jit(ts.inv).graph(ts.zeros((2, n, n))), "sm_90a").run(
            [np.zeros((2, n, n), np.float32)])


def test_matrices_read_both_ways_are_not_transposed(monkeypatch, rng):
    """The loss of a matrix by rows and by columns, and its gradient; what cannot be read as it
    lies, and what leaves transposed."""
    monkeypatch.setattr(matrix_transposes, "LEAST", 0)
    N, D = 24, 8
    a, b = normal(rng, N, D), normal(rng, N, D)
    labels, w, m = ts.tensor(rng.integers(0, N, N)), normal(rng, N), normal(rng, N, N)

    def loss(a, b, labels, w):
        z = a @ b.T * 2.0
        return ts.cross_entropy(z, labels) + ts.sum(ts.cross_entropy(z.T, labels, weight=w))

    def left(a, b, m):
        z = a @ b.T
        return z * 2.0, ts.exp(z.T - ts.max(z.T, axis=1, keepdims=True)), ts.sum(z.T * m, axis=0)

    fn = ts.jit(ts.value_and_grad(loss))
    program = CudaProgram(fn.graph(a, b, labels, w), "sm_90a")
    assert not any(s.op == "transpose" and np.prod(s.shape) == N * N
                   for g in program.plan.groups for s in g.steps)
    A, B, W, M = (np.asarray(x.array, np.float64) for x in (a, b, w, m))
    y, Z = np.asarray(labels.array), 2 * A @ B.T
    rows, hot = np.arange(N), np.eye(N)[np.asarray(labels.array)]

    def parts(z):
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return -np.log(p[rows, y]), p - hot

    (first, back), (second, other) = parts(Z), parts(Z.T)
    share = W[y] / W[y].sum()
    got = program.run([x.array for x in (a, b, labels, w)])
    scale = np.abs(share).sum() * np.abs(second).max() + np.abs(first).max()
    assert_close(got[0], first.mean() + (share * second).sum(), "f32", n=N, scale=scale)
    cotangent = 2 * (back / N + (share[:, None] * other).T)
    size = np.abs(cotangent) @ np.abs(B) * np.abs(share).sum()
    assert_close(got[1], cotangent @ B, "f32", n=N, scale=size)
    z, made = A @ B.T, CudaProgram(ts.jit(left).graph(a, b, m), "sm_90a")
    twice, powers, sums = made.run([x.array for x in (a, b, m)])
    assert_close(twice, 2 * z, "f32", n=D)
    assert_close(powers, np.exp(z.T - z.T.max(1, keepdims=True)), "f32", n=D)
    assert_close(sums, (z.T * M).sum(0), "f32", n=N)


def test_loops_of_elements(rng):
    """What is carried stays in a kernel, forwards and backwards: sequences, results, numbers of
    iterations, rows and numbers that iterations share, carries that change places."""
    c, d, w = normal(rng, 9, 13), normal(rng, 9, 13, dtype="bf16"), normal(rng, 13)
    xs, t = normal(rng, 4, 9, 13), normal(rng, 4)

    def run(c, d, w, xs, t):
        def step(carry, x):
            c, d = carry
            return (ts.tanh(c * w + x[0]) * x[1], ts.cast(c, "bf16") - d), c * c

        return ts.scan(step, (c, d), (xs, t), reverse=True)

    def pull(c, xs):
        def total(c, xs):
            end, ys = ts.scan(lambda c, x: (ts.tanh(c * 0.5 + x), c * c), c, xs)
            return ts.sum(end) + ts.sum(ys)

        return ts.grad(total, argnums=(0, 1))(c, xs)

    def swap(c):
        return ts.fori_loop(0, 5, lambda i, s: (s[1], s[0] * ts.cast(i, "f32") + c),
                            (c, ts.zeros((9, 13))))

    C, D, W, X, T = (np.asarray(ts.cast(x, "f32").array, np.float64) for x in (c, d, w, xs, t))
    ran, at = [None] * 4, (C, D)
    for i in (3, 2, 1, 0):
        ran[i] = at[0] * at[0]
        at = np.tanh(at[0] * W + X[i]) * T[i], at[0] - at[1]
    states = [C]
    for x in X:
        states.append(np.tanh(states[-1] * 0.5 + x))
    cotangent, pulled = np.ones_like(C), [None] * 4
    for i in (3, 2, 1, 0):
        pulled[i] = cotangent * (1 - states[i + 1] ** 2)
        cotangent = pulled[i] * 0.5 + 2 * states[i]
    a, b = C, np.zeros_like(C)
    for i in range(5):
        a, b = b, a * i + C
    for fn, given, want in ((run, (c, d, w, xs, t), (*at, np.stack(ran))),
                            (pull, (c, xs), (cotangent, np.stack(pulled))), (swap, (c,), (a, b))):
        program = CudaProgram(ts.jit(fn).graph(*given), "sm_90a")
        assert {g.kind for g in program.plan.groups} == {"steps"}
        emulate(fn, *given, rtol=1e-6, atol=1e-6)
        for got, y in zip(program.run([x.array for x in given]), want, strict=True):
            assert_close(got, y, "bf16" if got.dtype != np.float32 else "f32", n=8)


def test_gradients_of_what_steps_share_are_summed_behind_their_loop(rng):
    c, w, xs, k = normal(rng, 9, 13), normal(rng, 13), normal(rng, 4, 9, 13), ts.tensor(0.7)

    def total(c, w, k, xs):
        end, ys = ts.scan(lambda c, x: (ts.tanh(c * w + k * x), c * c), c, xs)
        return ts.sum(end) + ts.sum(ys)

    fn = ts.jit(ts.grad(total, argnums=(0, 1, 2)))
    program = CudaProgram(fn.graph(c, w, k, xs), "sm_90a")
    assert [g.kind for g in program.plan.groups][:2] == ["steps"] * 2
    assert not program.inner
    C, W, X, K = (np.asarray(x.array, np.float64) for x in (c, w, xs, k))
    states = [C]
    for x in X:
        states.append(np.tanh(states[-1] * W + K * x))
    cotangent, dw, dk = np.ones_like(C), np.zeros_like(C), np.zeros_like(C)
    for i in (3, 2, 1, 0):
        a = cotangent * (1 - states[i + 1] ** 2)
        dw, dk, cotangent = dw + a * states[i], dk + a * X[i], a * W + 2 * states[i]
    got = program.run([x.array for x in (c, w, k, xs)])
    for y, want in zip(got, (cotangent, dw.sum(0), dk.sum()), strict=True):
        assert_close(y, want, "f32", n=4 * C.size, scale=4.0)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "int8"])
@pytest.mark.parametrize("M, N", [(1, 33), (70, 7), (3, 64), (2, 300)])
def test_rows_in_order(M, N, dtype, monkeypatch, rng):
    """Rows in one warp and in several, runs and their merges, the first of runs."""
    x = ts.tensor(rng.integers(-3, 3, (M, N)).astype(np.float32))
    x = ts.cast(x, dtype)
    for words in (row_order.RUN_WORDS, 64):
        monkeypatch.setattr(row_order, "RUN_WORDS", words)
        monkeypatch.setattr(row_order, "FIRST_WORDS", words)
        emulate(lambda x: (ts.sort(x), ts.argsort(x, -1, True), *ts.top_k(x, 3)), x, kind="order")
    if N == 300:
        emulate(lambda x: ts.sort(x), x, kind="merge_keys")


@pytest.mark.parametrize("shape", [(300,), (7, 36), (7, 33), (3, 5, 8)])
def test_dropout(shape, rng):
    emulate(lambda x: ts.random.dropout(x, 0.4) + ts.random.uniform(shape), normal(rng, *shape))
    emulate(lambda x: ts.random.dropout(ts.exp(x), 0.4), normal(rng, *shape, dtype="bf16"))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_odd_rows_as_one_run(dtype, rng):
    """All blocks but the last move 16 bytes at once; a vector is read where an element stands."""
    x, w, c = normal(rng, 41, 33, dtype=dtype), normal(rng, 33, dtype=dtype), normal(rng, 41, 1)

    def fn(x, w, c):
        return ts.cast(x * w, "f32") * c, x + w

    emulate(fn, x, w, c)
    program = CudaProgram(ts.jit(fn).graph(x, w, c), "sm_90a")
    (group,) = program.plan.groups
    assert len(group.grid) == 1
    x64, w64, c64 = (np.asarray(t, np.float64) for t in (x, w, c))
    product, total = program.run([x, w, c])
    assert_close(product, x64 * w64 * c64, dtype, n=2)
    assert_close(total, x64 + w64, dtype, n=2)


def test_vectors_are_held_for_several_rows(monkeypatch, rng):
    """Where more is read of them than of elements."""
    monkeypatch.setattr(loop_blocks, "GROUPS", 2)
    x, a, b = normal(rng, 24, 256, dtype="bf16"), normal(rng, 256), normal(rng, 256)

    def fn(x, *vectors):
        return functools.reduce(operator.mul, vectors, ts.cast(x, "f32"))

    program = CudaProgram(ts.jit(fn).graph(x, a, b), "sm_90a")
    assert program.plan.groups[0].schedule.m == 8  # of 4 rows otherwise
    few = CudaProgram(ts.jit(fn).graph(x, ts.cast(a, "bf16")), "sm_90a")
    assert few.plan.groups[0].schedule.m == 4
    emulate(fn, x, a, b)


def test_odd_rows_are_shared_by_neighbouring_lanes(rng):
    """An access of a warp is one run of memory, of bytes that lanes have side by side."""
    x, w = normal(rng, 6, 101, dtype="bf16"), normal(rng, 101, dtype="bf16")
    emulate(lambda x, w: (ts.softmax(x), ts.rmsnorm(x, w)), x, w, rtol=2.0**-7, atol=1e-6)
    program = CudaProgram(ts.jit(ts.softmax).graph(ts.Tensor[6, 101, "bf16"]), "sm_90a")
    text = emitted_of(program.launches[0], program.target).source
    lanes = r"'[^|]*\| 1\.0 1\.1 1\.2 1\.3 1\.4"
    for access in ("load", "store"):
        assert re.search(rf"tiles\.{access}\('global', 'bf16', {lanes}", text)


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_dropout_behind_a_matmul(target, rng):
    """Sums of one row lie in several threads: those of a run choose from the same block.

    A sum in another order may round to the next bf16."""
    emulate(lambda x, w: ts.random.dropout(x @ w, 0.4), normal(rng, 20, 32, dtype="bf16"),
            normal(rng, 32, 24, dtype="bf16"), target=target, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("M, N", [(1, 64), (16, 8), (8, 4)])
def test_words_of_a_key(M, N, runs, rng):
    """Against numerics, and emulated; a key for each group."""
    k = build(f"""@kernel(grid=(2,))
def k(keys: Tensor[2, 2, ts.uint32], y: Tensor[2, {M}, {N}, ts.uint32]):
    g = tile.group_id(0)
    at = tile.arange(0, {M})[:, None] * {N} + tile.arange(0, {N})[None, :] + 8
    y[g, 0:{M}, 0:{N}] = tile.random_bits(at, seed=(keys[g, 0], keys[g, 1]), runs={runs})
""")["k"]
    keys, y = rng.integers(0, 2**32, (2, 2), dtype=np.uint32), np.zeros((2, M, N), np.uint32)
    k(keys, y)
    for key, words in zip(keys, y, strict=True):
        assert np.array_equal(words.reshape(-1), ts.numerics.random_bits(key, M * N, 8))
    compare(k, keys, y, lanes=32)


def test_runs_that_are_none():
    k = build("""@kernel
def k(y: Tensor[8, ts.uint32]):
    y[0:8] = tile.random_bits(tile.arange(0, 8) + 2, seed=1, runs=True)
""")["k"]
    with pytest.raises(ts.TesseraError, match="no runs of 4"):
        k(np.zeros(8, np.uint32))


@pytest.fixture
def short_strips(monkeypatch):
    """Strips of 16 rows in two warps, from 32 rows on: emulated instructions take their time."""
    monkeypatch.setattr(strips, "LONG", 32)
    monkeypatch.setattr(strips, "ROWS", 16)
    monkeypatch.setattr(strips, "WARPS", 2)
    monkeypatch.setattr(strips, "BLOCK", 512)


@pytest.mark.parametrize("shape", [(35, 40), (4, 10, 33)])
def test_sums_of_strips(shape, short_strips, rng):
    emulate(lambda x: ts.sum(ts.exp(x), axis=tuple(range(len(shape) - 1))),
            normal(rng, *shape, dtype="bf16"))


def test_the_largest_element_with_sums_of_strips(short_strips, rng):
    emulate(lambda x: ((y := -ts.abs(x)), ts.max(y), ts.sum(y, axis=0)),
            normal(rng, 35, 40), rtol=1e-6)


def test_a_norm_with_the_sums_of_its_gradient(short_strips, rng):
    def backward(x, g, b, dy):
        return ts.vjp(lambda x, g, b: ts.layernorm(x, g, b), x, g, b)[1](dy)

    x, dy = normal(rng, 35, 36), normal(rng, 35, 36, dtype="bf16")
    emulate(lambda x, g, b, dy: backward(x, g, b, ts.cast(dy, "f32")), x, normal(rng, 36),
            normal(rng, 36), dy, rtol=1e-5, atol=1e-5)


def test_a_norm_whose_next_rows_come_into_registers(short_strips, monkeypatch, rng):
    """Layer norm's gradient of two rows at a time; a strip ends where another begins."""
    monkeypatch.setattr(strips, "SHORT_ROWS", 16)
    x, dy = (normal(rng, 64, 128, dtype="bf16") for _ in range(2))

    def backward(x, g, b, dy):
        dx, *sums = ts.vjp(ts.layernorm, x, g, b)[1](dy)
        return ts.cast(dx, "bf16"), *sums

    program = CudaProgram(ts.jit(backward).graph(x, x[0], x[0], dy), "sm_90a")
    assert dict(program.plan.groups[0].attrs)["carried"]
    emulate(backward, x, normal(rng, 128), normal(rng, 128), dy, target="sm_90a",
            rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_codes_of_strips_in_both_orders(norm, short_strips, monkeypatch, rng):
    """Of an activation and of a norm, both with the cotangents that follow."""
    monkeypatch.setattr(strips, "TURNED_COLUMNS", 32)
    scaling = ts.DelayedScaling(amax_history_len=1)

    def backward(x, w, h, g):
        def f(x, w, h):
            y = ts.layernorm(x, w[:, 0], w[:, 0]) if norm else ts.gelu(x)
            return scaling.matmul(ts.cast(y, "bf16"), w, h)
        return ts.vjp(f, x, w, h)[1](g)

    x, w, h = normal(rng, 48, 64), normal(rng, 64, 48), scaling.init(4.0, 4.0, 4.0)
    fn = ts.jit(lambda x, w, a, b, c, g: backward(x, w, dict(zip(h, (a, b, c), strict=True)), g))
    assert emulate(fn, x, w, *h.values(), normal(rng, 48, 48), target="sm_90a", kind="strips",
                   rtol=1e-5, atol=1e-5) == 2


def test_labels_of_rows(rng):
    x, y = normal(rng, 6, 70), ts.tensor(rng.integers(0, 70, 6))
    emulate(ts.value_and_grad(ts.cross_entropy), x, y, rtol=1e-5, atol=1e-6)


def test_parts_of_a_long_sum(rng):
    a, b = normal(rng, 4160, 16, dtype="bf16"), normal(rng, 4160, 24, dtype="bf16")
    emulate(lambda a, b: ts.cast(a.T @ b, "f32"), a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [128, 150])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_rows_in_passes(n: int, dtype: str, monkeypatch: pytest.MonkeyPatch,
                         rng: np.random.Generator) -> None:
    """With a part of a block at the end, and without; through asynchronous copies."""
    for name, value in (("LONGEST", 64), ("STEPS", {}), ("STEP", 64), ("PASS_WARPS", 1)):
        monkeypatch.setattr(row_blocks, name, value)
    y = ts.tensor(rng.integers(0, n, 3).astype(np.int32))

    def loss(x: Any) -> Any:
        loss, back = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), y), x)
        return loss, back(ts.ones(()))

    one_place = 2.0**-7 if dtype == "bf16" else 1e-6  # sums of another order may round elsewhere
    emulate(loss, normal(rng, 3, n, dtype=dtype), rtol=one_place, atol=1e-7)


@pytest.mark.parametrize("dtype, shape", [
    ("uint8", (66, 70)), ("bf16", (66, 70)), ("int8", (2, 33, 48)), ("f16", (2, 33, 48)),
    ("f32", (2, 33, 48))])
def test_transpositions(shape, dtype, rng):
    """Of tiles of which parts are outside, too."""
    x = ts.tensor(rng.integers(-100, 100, shape), "int64")
    x = ts.cast(ts.abs(x) if dtype == "uint8" else x, dtype)
    emulate(lambda x: ts.swapaxes(x, -1, -2), x)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
def test_narrow_integers_wrap(kind, rng):
    ends = np.iinfo(kind)
    a, b = (ts.tensor(rng.integers(ends.min, ends.max, 40, kind, endpoint=True)) for _ in range(2))
    assert emulate(lambda a, b: (a * b + a, -a, (a - b) * 3), a, b)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floor_divide_is_of_the_exact_quotient(kind, rng):
    """1.0 // 0.1 is 9.0, though 1.0 / 0.1 rounds to 10."""
    edges = np.array([0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 7.0, -2.5, 1e-4, np.inf, -np.inf, np.nan])
    x, y = (np.r_[a.ravel(), rng.standard_normal(40)] for a in np.meshgrid(edges, edges))
    a, b = (ts.tensor(v.astype("float" + kind[1:])) for v in (x, y))
    with np.errstate(all="ignore"):
        want = np.floor_divide(a.array, b.array)
    assert emulate(lambda a, b: a // b, a, b)
    program = CudaProgram(ts.jit(lambda a, b: a // b).graph(a, b), "sm_80")
    for got in (program.run([a, b])[0], (a // b).numpy()):
        assert np.array_equal(got, want, equal_nan=True)
        assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))
