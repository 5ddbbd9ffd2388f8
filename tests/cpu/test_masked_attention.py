"""Attention with masks: the op, its derivatives, and the kernels under the interpreter, against
f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from attention_cases import attention64, sizes64
from tessera.graph.cuda.levels import program_of
from tolerance import assert_close

SHAPES = {  # queries, keys, width of values
    "heads": ((2, 3, 40, 32), (2, 3, 40, 32), 32),
    "groups": ((2, 4, 37, 16), (2, 2, 70, 16), 16),
    "three axes": ((3, 33, 16), (3, 21, 16), 24),
}
MASKS = {  # the mask's extents for [B, H, S, T] or [N, S, T]
    "of keys": lambda s: (*(s[:1] if len(s) == 4 else ()), *(1,) * (len(s) - 2), s[-1]),
    "of all": lambda s: s,
    "of heads": lambda s: (1, *s[1:]) if len(s) == 4 else (1, *s[-2:]),
    "of queries": lambda s: (*(1,) * (len(s) - 2), s[-2], 1),
    "one number": lambda s: (1,) * len(s),
    "one": lambda s: s[-2:],
    "a number": lambda s: (*s[:1], *(1,) * (len(s) - 1)),
}


def both(causal: bool) -> Any:
    """The result, and the cotangents of q, k, v, and of a mask of floats."""
    def f(q, k, v, g, mask):
        floats = mask.dtype.kind == "float"
        xs = (q, k, v, mask) if floats else (q, k, v)
        y, pull = ts.vjp(lambda q, k, v, mask=mask: ts.attention(q, k, v, causal=causal,
                                                                 mask=mask), *xs)
        return y, *pull(g)

    return f


def _case(name, kind, floats, dtype, rng):
    q, k, E = SHAPES[name]
    shapes = (q, k, (*k[:-1], E), (*q[:-1], E))
    xs = [ts.tensor(rng.standard_normal(s).astype(np.float32), dtype) for s in shapes]
    extents = MASKS[kind]((*q[:-1], k[-2]))
    mask = rng.standard_normal(extents).astype(np.float32) if floats else rng.random(extents) < 0.7
    if not floats and mask.shape[-1] > 1:
        mask[..., :1, :] = False  # a query that sees nothing
    return xs, mask


def _expected(xs, mask, causal):
    """The results, and the size of the terms of each."""
    wide = mask if mask.dtype == bool else mask.astype(np.float64)
    full = np.broadcast_to(wide, (*xs[0].shape[:-1], xs[1].shape[-2]))
    given = (*(np.asarray(ts.cast(x, "f64")) for x in xs), causal, full)
    want, sizes = attention64(*given), sizes64(*given)
    if len(want) == 5:
        lead = (1,) * (full.ndim - mask.ndim) + mask.shape
        along = tuple(i for i, n in enumerate(lead) if n != full.shape[i])
        want[4] = want[4].sum(along).reshape(mask.shape)
        sizes[4] = np.sqrt((sizes[4]**2).sum(along)).reshape(mask.shape)
    return list(zip(want, sizes, strict=True))


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("name, kind, causal", [
    *(("heads", kind, False) for kind in MASKS), *(("groups", kind, True) for kind in MASKS),
    ("three axes", "of all", True), ("three axes", "one", False)])
def test_against_f64(name, kind, floats, causal, rng):
    xs, mask = _case(name, kind, floats, "f32", rng)
    want = _expected(xs, mask, causal)
    given = (*xs, ts.tensor(mask))
    made = program_of(ts.jit(both(causal)).graph(*given), "sm_90a")
    kinds = [g.kind for g in made.plan.groups]
    assert kinds.count("launch") == 3 + floats and "gemm" not in kinds
    terms = 2 * (xs[1].shape[-2] + xs[0].shape[-1])
    for got, (w, size) in zip(made.run([x.array for x in given]), want, strict=True):
        assert_close(got, w, "f32", n=terms, scale=size)
    for got, (w, size) in zip(both(causal)(*given), want, strict=True):  # and on the CPU
        assert_close(got.array, w, "f32", n=terms, scale=size)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("floats", [False, True])
def test_narrow_types_are_on_tensor_cores(floats, dtype, rng):
    """A mask whose cotangent nobody asks for costs no scores in memory."""
    xs, mask = _case("heads", "of all", floats, dtype, rng)
    want = _expected(xs, mask, True)
    given = (*xs, ts.tensor(mask))
    f = ts.jit(lambda *a: both(True)(*a)[:4])
    made = program_of(f.graph(*given), "sm_90a")
    assert [g.kind for g in made.plan.groups].count("launch") == 3
    forms = {form for m in f.schedule(*given, target="sm_90a").matmuls for form in m.how.all}
    assert forms and forms <= {"wgmma", "mma"}
    for got, (w, size) in zip(made.run([x.array for x in given]), want[:4], strict=True):
        # terms are rounded one by one: the length of the sums is in their size alone
        assert_close(np.asarray(got, np.float64), w, dtype, n=2, scale=size)


def test_many_queries_in_blocks(rng):
    """More queries than a block has, on the CPU: the mask's cotangent is put together."""
    q, g = (rng.standard_normal((1, 2, 600, 4)) for _ in range(2))
    mask = rng.standard_normal((1, 1, 600, 600))
    given = [ts.tensor(x) for x in (q, q, q, g, mask)]
    want = _expected(given[:4], mask, True)
    for got, (w, size) in zip(ts.jit(both(True))(*given), want, strict=True):
        assert_close(got.array, w, "f64", n=600, scale=size)


def test_batches_and_second_derivatives(rng):
    q, mask = (ts.tensor(rng.standard_normal(s)) for s in ((3, 2, 2, 5, 4), (2, 1, 5, 5)))
    f = lambda q: ts.attention(q, q, q, mask=mask)  # noqa: E731
    rows = ts.stack([f(q[i]) for i in range(3)])
    assert_close(ts.vmap(f)(q).array, rows.array, "f64", n=8)
    once = ts.grad(lambda q, m: ts.sum(ts.attention(q, q, q, mask=m) ** 2), argnums=(0, 1))
    assert ts.gradcheck(lambda q, m: once(q, m)[0], (q[0], mask))
    rows = ts.stack([once(q[i], mask)[1] for i in range(3)])
    assert_close(ts.vmap(lambda q: once(q, mask)[1])(q).array, rows.array, "f64", n=64)
