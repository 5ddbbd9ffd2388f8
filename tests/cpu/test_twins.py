"""Random programs against NumPy: values, batches, both derivatives of first and second order.

What NumPy computes is the oracle of values; its central differences are that of derivatives, where
the program is smooth around its arguments. Blocks stand in each other: a cond in a scan in a vmap.
A failure prints its program; `--seed` draws others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tessera.tensor import Tensor
from twins import Twin

PROGRAMS, BATCH = 5, 3
STEP, KINK, LIMIT = 1e-5, 1e-2, 1e-4  # central differences err by STEP^2 and 1e-16 / STEP
CLOSE = 1e-8  # of f64: programs of a dozen ops, whose numbers are below 50


def stated(x: Any) -> Tensor:
    """Of f64 because it says so: integers that meet floats are f32 in between."""
    return ts.tensor(x, "f64")


def close(got: Any, want: Any, limit: float = CLOSE, scale: float = 1.0) -> None:
    got, want = (x.numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (got, want))
    assert got.shape == want.shape
    size = max(scale, float(np.abs(want).max(initial=0.0)))
    assert np.abs(got - want).max(initial=0.0) <= limit * size


def difference(fn: Callable, xs: Sequence[Any], ts_: Sequence[Any]) -> np.ndarray | None:
    """The derivative along ts_; None near a kink, where it depends on how far one goes."""
    at = {h: fn(*[x + h * t for x, t in zip(xs, ts_, strict=True)])
          for h in (0.0, STEP, -STEP, STEP / 4, -STEP / 4)}
    wide, near = ((at[h] - at[-h]) / (2 * h) for h in (STEP, STEP / 4))
    size = max(1.0, float(np.abs(wide).max(initial=0.0)))
    bent = np.abs(at[STEP] + at[-STEP] - 2 * at[0.0]).max(initial=0.0) / STEP
    smooth = bent < KINK * size and np.abs(wide - near).max(initial=0.0) < LIMIT * size
    return wide if smooth else None


def check_batch(twin: Twin, rng: np.random.Generator, fn: Callable, want: Callable) -> None:
    """vmap over any axes of some arguments, here and compiled: each slice by itself, stacked."""
    axes = [int(rng.integers(x.ndim + 1)) if rng.random() < 0.7 else None for x in twin.floats]
    axes[0] = 0 if all(a is None for a in axes) else axes[0]
    given = [x if a is None else np.stack(
        [x + 0.1 * rng.standard_normal(x.shape) for _ in range(BATCH)], a)
        for x, a in zip(twin.floats, axes, strict=True)]
    rows = [[x if a is None else np.take(x, i, a) for x, a in zip(given, axes, strict=True)]
            for i in range(BATCH)]
    expected = [want(*row) for row in rows]
    batched = ts.vmap(fn, in_axes=tuple(axes))
    for call in (batched, ts.jit(batched)):
        made = call(*map(stated, given))
        for i, one in enumerate(expected):
            for y, z in zip(made, one, strict=True):
                close(y[i], z)


def check_values(twin: Twin, rng: np.random.Generator) -> None:
    xs, want = [*map(stated, twin.floats)], twin.numpy(*twin.floats)
    compiled = ts.jit(twin.ours)
    for call in (twin.ours, compiled, compiled):  # the second call in the first's memory
        close(call(*xs), want)
    check_batch(twin, rng, lambda *a: [twin.ours(*a)], lambda *a: [twin.numpy(*a)])


def check_derivatives(twin: Twin, rng: np.random.Generator) -> None:
    xs = tuple(map(stated, twin.floats))
    tangents = [rng.standard_normal(x.shape) for x in twin.floats]
    moved, want = tuple(map(stated, tangents)), difference(twin.numpy, twin.floats, tangents)
    along = None
    if twin.block.forward_mode:
        along = ts.jvp(twin.ours, xs, moved)[1]
        close(ts.jit(lambda xs, d: ts.jvp(twin.ours, xs, d)[1])(xs, moved), along)
        if want is not None:
            close(along, want, LIMIT)
    if not twin.block.reverse_mode:
        return
    weights = rng.standard_normal(twin.numpy(*twin.floats).shape)
    grad = ts.grad(lambda *xs: ts.sum(twin.ours(*xs) * stated(weights)), argnums=(0, 1, 2))
    slopes = grad(*xs)
    for y, z in zip(ts.jit(grad)(*xs), slopes, strict=True):
        close(y, z)
    if want is not None:  # <w, J t> = <J' w, t>
        terms = [s.numpy() * t for s, t in zip(slopes, tangents, strict=True)]
        size = sum(float(np.abs(t).sum()) for t in terms)
        forward = float(np.vdot(weights, want))
        close(sum(float(t.sum()) for t in terms), forward, LIMIT, max(size, 1.0))
    check_batch(twin, rng, grad, lambda *row: grad(*map(stated, row)))
    if along is not None:
        check_second_order(twin, grad, tangents, want is not None)


def check_second_order(twin: Twin, grad: Callable, tangents: list, smooth: bool) -> None:
    """Forward over reverse, compiled and against differences of the gradient."""
    xs, moved = tuple(map(stated, twin.floats)), tuple(map(stated, tangents))
    hvp = lambda xs, d: ts.jvp(grad, xs, d)[1]  # noqa: E731
    bent = hvp(xs, moved)
    for y, z in zip(ts.jit(hvp)(xs, moved), bent, strict=True):
        close(y, z)
    for k, y in enumerate(bent):
        want = difference(lambda *a, k=k: grad(*map(stated, a))[k].numpy(), twin.floats,
                          tangents)
        if smooth and want is not None:
            close(y, want, 10 * LIMIT)


@pytest.mark.parametrize("part", range(8))
def test_random_programs_are_what_numpy_computes(part: int, rng: np.random.Generator) -> None:
    for seed in rng.integers(0, 2**63, PROGRAMS):
        draws = np.random.default_rng(seed)
        twin = Twin(draws)
        print(f"--- program {seed}\n{twin}")
        check_values(twin, draws)
        check_derivatives(twin, draws)


@pytest.mark.parametrize("part", range(3))
def test_random_programs_and_their_gradients_as_kernels(part: int, rng: np.random.Generator
                                                        ) -> None:
    """Lowered for a GPU, by the interpreter."""
    for seed in rng.integers(0, 2**63, PROGRAMS):
        twin = Twin(np.random.default_rng(seed))
        print(f"--- program {seed}\n{twin}")
        xs, want = [*map(stated, twin.floats)], twin.numpy(*twin.floats)
        (y,) = CudaProgram(ts.jit(lambda *xs, t=twin: t.ours(*xs)).graph(*xs), "sm_90a").run(xs)
        close(y, want)
        if twin.block.reverse_mode:
            weights = stated(rng.standard_normal(want.shape))
            grad = ts.jit(ts.grad(lambda *xs, t=twin, w=weights: ts.sum(t.ours(*xs) * w),
                                  argnums=(0, 1, 2)))
            made = CudaProgram(grad.graph(*xs), "sm_90a").run(xs)
            for y, z in zip(made, grad(*xs), strict=True):
                close(y, z)


FOUND: dict[str, Callable] = {  # by random programs: each once more by itself
    "nothing of one row": lambda x: (x[:1] - 1.0)[:0],
    "nothing of one column": lambda x: ts.sum((x[:, :1] * x[:, 1:2])[:, :-2], axis=0),
    "nothing of each of a batch": lambda x: ts.vmap(lambda r: (r[None] + r)[:-1])(x),
    "itself over itself": lambda x: ts.fori_loop(
        0, 2, lambda i, c: ts.index_put(c, (), c) * 0.5, x),
    "itself over itself in a sum": lambda x: ts.fori_loop(
        0, 2, lambda i, c: c * 0.5 + ts.sum(ts.dynamic_update_slice(c, c, (0, 0))), x),
    "a scalar in a loop": lambda x: ts.fori_loop(
        0, 3, lambda i, c: ts.index_put(c, ..., 0.5, mode="add") * 0.5, ts.sum(x)),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_programs_found(name: str, rng: np.random.Generator) -> None:
    fn, x = FOUND[name], stated(rng.standard_normal((3, 4)))
    want, compiled = fn(x), ts.jit(fn)
    close(compiled(x), want)
    (y,) = CudaProgram(compiled.graph(x), "sm_90a").run([x])
    close(y, want)
