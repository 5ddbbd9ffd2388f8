"""Sums over rows of what attention's gradient makes, as biases in front of it want them: by its
kernels, however the heads are cut out of a product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, sizes64
from lowered_functions import lowered
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.passes.result_sums import _of_other_shape
from tolerance import assert_close

B, T, H, D = 3, 350, 2, 16
d = H * D


def _heads(t: Any) -> Any:
    return ts.transpose(ts.reshape(t, (B, T, H, D)), (0, 2, 1, 3))


def _split(x: Any, b: Any) -> list:
    return [_heads(t) for t in ts.split(x + b, 3, axis=-1)]


def _slices(x: Any, b: Any) -> list:
    h = x + b
    return [_heads(h[..., i * d:(i + 1) * d]) for i in range(3)]


def _three(x: Any, b: Any) -> list:
    return [_heads(x[..., i * d:(i + 1) * d] + b[i * d:(i + 1) * d]) for i in range(3)]


def _flat(x: Any, b: Any) -> list:
    h = ts.reshape(ts.reshape(x, (B * T, 3 * d)) + b, (B, T, 3 * d))
    return [_heads(t) for t in ts.split(h, 3, axis=-1)]


def _heads_first(x: Any, b: Any) -> list:
    h = ts.transpose(ts.reshape(x + b, (B, T, 3, H, D)), (2, 0, 3, 1, 4))
    return [h[i] for i in range(3)]


def _einsum(x: Any, b: Any) -> list:
    return [_heads(t) for t in ts.split(ts.einsum("btc,cd->btd", x, ts.eye(3 * d)) + b, 3, axis=-1)]


SPELLINGS = {f.__name__[1:]: f for f in (_split, _slices, _three, _flat, _heads_first, _einsum)}


def gradients(cut: Any, dtype: str, **attention: Any) -> Any:
    """(x, b, g) -> the result, and the cotangents of x and b."""
    def f(x: Any, b: Any, g: Any) -> Any:
        def attend(x: Any, b: Any) -> Any:
            q, k, v = (ts.cast(t, dtype) for t in cut(x, b))
            return ts.cast(ts.attention(q, k, v, **attention), "f32")

        y, pull = ts.vjp(attend, x, b)
        return y, *pull(g)

    return f


def arguments(rng: np.random.Generator) -> list:
    shapes = (B, T, 3 * d), (3 * d,), (B, H, T, D)
    return [ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in shapes]


def passes(made: CudaProgram) -> list[str]:
    """Groups that sum over what is as large as the rows."""
    return [g.name for g in made.plan.groups if any("sum" in s.op for s in g.steps)
            and any(np.prod(r.shape) >= B * T * d and g.kind != "rows" for r in g.reads)]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_no_pass_of_its_own(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Against f64; and of what is stored, to the rounding of f32."""
    x, b, g = arguments(rng)
    made = lowered(gradients(SPELLINGS[name], dtype, causal=True), x, b, g)
    assert passes(made) == []
    _, dx, db = made.run([t.array for t in (x, b, g)])
    wide = np.asarray(ts.cast(ts.cast(x + b, dtype), "f64")).reshape(B, T, 3, H, D)
    q, k, v = wide.transpose(2, 0, 3, 1, 4)
    given = q, k, v, g.array.astype(np.float64)
    want, sizes = ([t.transpose(0, 2, 1, 3).reshape(B * T, d) for t in f(*given, True)[1:]]
                   for f in (attention64, sizes64))
    assert_close(db, np.concatenate([t.sum(0) for t in want]), dtype, n=T + D,
                 scale=np.concatenate([np.sqrt((t**2).sum(0)) for t in sizes]))
    if name != "einsum":  # whose own product rounds
        stored = dx.astype(np.float64).reshape(B * T, 3 * d)
        assert_close(db, stored.sum(0), "f32", n=B * T, scale=np.sqrt((stored**2).sum(0)))


@pytest.mark.parametrize("heads, keys", [(2, 410), (4, 377)], ids=["groups", "cross"])
def test_other_extents(heads: int, keys: int, rng: np.random.Generator) -> None:
    """Queries and keys of their own number, in blocks that the last of them do not fill."""
    shapes = ((3, 4, 350, 16), *((3, heads, keys, 16),) * 2, (3, 4, 350, 16))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in shapes]
    biases = [ts.zeros((1, s[1], 1, s[3])) for s in shapes[:3]]

    def f(q: Any, k: Any, v: Any, g: Any, *biases: Any) -> Any:
        def attend(*bs: Any) -> Any:
            return ts.attention(*(x + b for x, b in zip((q, k, v), bs, strict=True)))

        return ts.vjp(attend, *biases)[1](g)

    made = lowered(f, *xs, *biases)
    assert passes(made) == []
    wide = [x.array.astype(np.float64) for x in xs]
    want, sizes = attention64(*wide, False)[1:], sizes64(*wide, False)[1:]
    for got, w, s in zip(made.run([t.array for t in (*xs, *biases)]), want, sizes, strict=True):
        assert_close(got, w.sum((0, 2), keepdims=True), "f32", n=keys + 16,
                     scale=np.sqrt((s**2).sum((0, 2), keepdims=True)))


@pytest.mark.parametrize("by_kernel, rows", [
    (True, lambda x: ts.sum(x, axis=(0, 1, 2))), (True, lambda x: ts.sum(x, axis=(0, 2))),
    (False, lambda x: ts.sum(x, axis=2)),  # few rows
    (False, lambda x: ts.sum(ts.reshape(x, (B * H * T // 2, 2, D)), axis=0)),  # every second row
    (False, lambda x: ts.sum(x, axis=(0, 2, 3))), (False, lambda x: ts.sum(x, axis=(0, 1))),
    (False, lambda x: ts.sum(ts.exp(x), axis=(0, 2)))])
def test_which_sums_are_the_kernels(by_kernel: bool, rows: Any, rng: np.random.Generator) -> None:
    """Those over all rows of a head, and sequences or heads; others are passes of their own."""
    q, k, g = (ts.tensor(rng.standard_normal((B, H, T, D)).astype(np.float32)) for _ in range(3))

    def f(q: Any, k: Any, g: Any) -> Any:
        dq = ts.vjp(lambda q: ts.attention(q, k, k), q)[1](g)
        return dq, rows(dq)

    made = lowered(f, q, k, g)
    launches = [g for g in made.plan.groups if g.kind == "launch"]
    assert sum(len(g.writes) for g in launches) == 1 + by_kernel
    dq, total = made.run([t.array for t in (q, k, g)])
    want = np.asarray(rows(ts.tensor(dq.astype(np.float64))))
    assert_close(total, want, "f32", n=B * T, scale=np.sqrt(np.square(dq, dtype=np.float64).sum()))


@pytest.mark.parametrize("inner, outer, axes, found", [
    ((4, 5, 6), (20, 6), (0,), (0, 1)), ((20, 6), (4, 5, 6), (0, 1), (0,)),
    ((20, 6), (4, 5, 6), (0,), None), ((4, 5, 6), (4, 30), (0,), (0,)),
    ((4, 5, 6), (4, 30), (1,), (1, 2)), ((4, 1, 5), (4, 5), (1,), (1, 2)),
    ((4, 5), (4, 1, 5), (1,), ()), ((4, 5), (4, 1, 5), (0, 1), (0,)), ((6, 4), (4, 6), (0,), None),
    ((6, 4), (4, 6), (0, 1), (0, 1)), ((2, 0), (0, 3), (0,), None)])
def test_axes_of_another_shape(inner: tuple, outer: tuple, axes: tuple, found: Any) -> None:
    assert _of_other_shape(inner, outer, axes) == found
    if found is None or 0 in inner:
        return
    x = np.arange(np.prod(inner)).reshape(inner)
    assert np.array_equal(x.reshape(outer).sum(axes).ravel(), x.sum(found).ravel())
