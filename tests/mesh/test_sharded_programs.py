"""Whole programs on a mesh: values and gradients in many layouts are those of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tessera as ts
from mesh.sharding import block_layouts, odd_layouts, spread, term_layouts
from tessera.graph import tree
from tessera.mesh.layout import Layout
from tessera.tensor import Tensor
from tolerance import assert_close

Draw = np.random.Generator
PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True)
class Program:
    """fn(*arrays of `shapes`) -> scalar, and how long its longest sums are.

    ints: positions of arguments that are indices, with their bound
    """

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ints: dict[int, int]
    n: int

    def draw(self, rng: Draw) -> list[Tensor]:
        return [ts.tensor(rng.integers(0, self.ints[i], s).astype(np.int64)) if i in self.ints
                else ts.tensor((0.5 * rng.standard_normal(s)).astype(np.float32))
                for i, s in enumerate(self.shapes)]

    @property
    def floats(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.shapes)) if i not in self.ints)


def program(*shapes: tuple[int, ...], n: int = 64, **ints: int) -> Callable:
    """Register a program; a2=7 says that argument 2 holds indices below 7."""
    def add(fn: Callable) -> Callable:
        PROGRAMS[fn.__name__] = Program(fn, shapes, {int(k[1:]): v for k, v in ints.items()}, n)
        return fn
    return add


# --- the programs --------------------------------------------------------------------------------
@program((4, 7), (7, 5), (5,), (5, 3))
def mlp(x, w1, b, w2):
    return ts.mean(ts.square(ts.gelu(x @ w1 + b) @ w2))


@program((5, 7), (7, 11), (5,), a2=11)
def classify(x, w, labels):
    return ts.cross_entropy(x @ w, labels)


@program((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
def attention(q, k, v):
    return ts.mean(ts.square(ts.attention(q, k, v)))


@program((2, 5, 6), (6, 6), (6, 6), (6, 6), (6, 6))
def heads(x, wq, wk, wv, wo):
    """Three heads of two: they do not divide over two parts, nor over six."""
    def split(y):
        return ts.transpose(ts.reshape(y, (2, 5, 3, 2)), (0, 2, 1, 3))

    y = ts.attention(split(x @ wq), split(x @ wk), split(x @ wv), causal=True)
    return ts.mean(ts.square(ts.reshape(ts.transpose(y, (0, 2, 1, 3)), (2, 5, 6)) @ wo))


@program((3, 4, 5), (5,), (5,), (5,))
def norms(x, gain, bias, weight):
    return ts.mean(ts.square(ts.rmsnorm(ts.layernorm(x, gain, bias), weight) + ts.softmax(x)))


@program((9, 4), (2, 3), (2, 3), a1=9, a2=9)
def tied(table, ids, labels):
    """The embedding is the output projection too."""
    h = ts.tanh(table[ids])
    return ts.cross_entropy(h @ table.T, labels)


@program((5, 3, 4), (3, 4), (4, 4))
def loop(xs, start, w):
    def step(c, x):
        c = ts.tanh(c @ w + x)
        return c, ts.sum(c * x, axis=0)

    c, ys = ts.scan(step, start, xs)
    return ts.sum(c) + ts.mean(ts.square(ys))


@program((4, 5, 5), (3, 5))
def layers(ws, x):
    """Stacked weights, one a layer, each recomputed in the backward pass."""
    def step(h, w):
        return ts.checkpoint(lambda h, w: h + ts.tanh(h @ w))(h, w), None

    return ts.mean(ts.square(ts.scan(step, x, ws)[0]))


@program((3, 4), (4, 4))
def branch(x, w):
    y = ts.cond(ts.sum(x) > 0, lambda x: ts.sin(x @ w), lambda x: (x * x) @ w, x)
    return ts.sum(ts.square(y))


@program((3, 4), (4, 5), (5, 4))
def recomputed(x, w1, w2):
    block = ts.remat(lambda x: x + ts.silu(x @ w1) @ w2, policy="save_matmuls")
    return ts.mean(ts.square(block(block(x))))


@ts.custom_vjp
def clipped(x):
    return x * 2.0


clipped.defvjp(lambda x: (x * 2.0, x), lambda x, g: (ts.clip(g, -0.1, 0.1) * ts.sign(x),))


@program((5, 3))
def own_rule(x):
    return ts.sum(ts.square(clipped(x)))


@program((2, 3, 7, 6), (5, 3, 3, 2))
def convolution(x, w):
    return ts.mean(ts.square(ts.conv2d(x, w, stride=1, padding="same")))


@program((3, 8), (8,))
def spectrum(x, w):
    re, im = ts.rfft(x * w, axis=1)
    return ts.sum(re * re + im * im) + ts.sum(ts.fft(x, axis=0).imag ** 2) + ts.sum(
        ts.irfft((re, im * 2.0)) ** 2)


@program((4, 6))
def ordered(x):
    top, _ = ts.top_k(x, 2)
    return ts.sum(ts.sort(x, axis=1)[:, :3] ** 2) + ts.sum(top * 1.5)


@program((3, 4, 5), (5, 4, 2), (2, 3))
def contraction(a, b, c):
    return ts.sum(ts.square(ts.einsum("ijk,kjl,li->ij", a, b, c)))


@program((7, 4), (3, 5), (3, 5, 4), a1=7)
def gathered(table, ids, u):
    y = ts.take(table, ids, axis=0) * u
    return ts.sum(ts.square(y)) + ts.sum(ts.take_along_axis(table, ids[:, :4], axis=0) ** 3)


@program((4, 4), (4, 3))
def solved(a, b):
    spd = a @ a.T + 3.0 * ts.eye(4)
    return ts.sum(ts.solve(spd, b) ** 2) + ts.sum(ts.cholesky(spd)) + ts.sum(ts.inv(spd))


@program((4, 9))
def fused_projection(x):
    q, k, v = ts.split(x, 3, axis=1)
    return ts.sum(q * ts.tanh(k) + v * q) + ts.sum(ts.concatenate([k, q, x], axis=1) ** 2)


@program((3, 5), (5,))
def batched(x, w):
    one = ts.vmap(lambda row: ts.softmax(row * w) @ w)
    return ts.sum(one(x)) + ts.sum(ts.vmap(ts.grad(lambda r: ts.sum(r**3 * w)))(x))


@program((5, 4), (3,), a1=5)
def placed(x, ids):
    y = ts.pad(x, ((1, 2), (0, 1)))
    z = ts.roll(ts.flip(y, 0), 2, axis=0)
    return ts.sum(z[1:7:2] * y[::4, :][:, ::-1].sum()) + ts.sum(ts.cumsum(x, axis=0)[ids] ** 2)


@program((0, 3), (3, 4))
def nothing(x, w):
    return ts.sum(ts.tanh(x @ w)) + ts.sum(w)


@program((1, 5), (2, 1), (2, 5))
def stretched(a, b, c):
    return ts.sum(a * b + c / (1.0 + b * b)) + ts.max(ts.abs(a - b))


@program((6, 4), (6,), a1=3)
def segments(x, ids):
    return ts.sum(ts.segment_sum(x, ids, 3) ** 2)


# --- layouts of their arguments ------------------------------------------------------------------
def some_layout(x: Tensor, rng: Draw) -> Layout:
    options = [at for at in block_layouts(x.ndim) if not at.is_replicated] or block_layouts(x.ndim)
    if rng.integers(4) == 0:
        options = odd_layouts(x.ndim, rng) or options
    elif rng.integers(5) == 0 and x.dtype.kind == "float":
        options = term_layouts(x.ndim, rng)
    return options[rng.integers(len(options))]


def same(got: Any, want: Any, n: int, where: str) -> None:
    try:
        scale = max(1.0, float(np.max(np.abs(want.numpy()), initial=0.0)))  # of the terms
        assert_close(got.numpy(), want.numpy(), dtype="f32", n=n, scale=scale)
    except AssertionError as err:
        err.add_note(where)
        raise


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_in_random_layouts(name: str, rng: Draw) -> None:
    p = PROGRAMS[name]
    xs = p.draw(rng)
    step = ts.jit(ts.value_and_grad(p.fn, argnums=p.floats))
    value, grads = step(*xs)
    for trial in range(5):
        layouts = [some_layout(x, rng) for x in xs]
        where = f"{name} of {', '.join(at.describe() for at in layouts)}"
        args = [spread(x, at, rng) for x, at in zip(xs, layouts, strict=True)]
        try:
            got, found = step(*args)
        except Exception as err:
            err.add_note(where)
            raise
        same(got, value, p.n, where)
        for i, g, want in zip(p.floats, found, grads, strict=True):
            same(g, want, p.n, f"gradient {i} of {where}")
            assert g.layout == layouts[i].settled(), where
        if trial == 0:
            same(p.fn(*args), value, p.n, f"op by op, {where}")


# --- transforms, op by op ------------------------------------------------------------------------
def scalar(x, w):
    return ts.sum(ts.square(ts.tanh(x @ w)))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jvp": lambda x, w: ts.jvp(scalar, (x, w), (x * 2.0, w)),
    "vjp": lambda x, w: ts.vjp(lambda x: ts.tanh(x @ w), x)[1](x @ w),
    "second": lambda x, w: ts.grad(lambda w: ts.sum(ts.square(ts.grad(scalar)(x, w))))(w),
    "jacobian": lambda x, w: ts.jacrev(lambda v: ts.sum(ts.tanh(v @ w), axis=0))(x),
    "hessian": lambda x, w: ts.hessian(lambda v: ts.sum(ts.tanh(w @ v)))(x[0]),
    "vmap": lambda x, w: ts.vmap(lambda row: ts.softmax(row @ w))(x),
    "map": lambda x, w: ts.map(lambda row: ts.softmax(row @ w), x),
    "for": lambda x, w: ts.fori_loop(0, 3, lambda i, c: ts.tanh(c @ w) + 1.0 * i, x),
    "while": lambda x, w: ts.while_loop(lambda c: ts.sum(c * c) > 0.1, lambda c: 0.5 * (c @ w), x),
    "prefixes": lambda x, w: ts.associative_scan(lambda a, b: a * b, x),
    "indexed": lambda x, w: (x[1], x[:, 2], x[1:3, ::2], x[..., -1], x[np.array([0, 2])]),
    "captured": lambda x, w: ts.scan(lambda h, _: (ts.tanh(h @ w), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_sharded_functions(name: str, rng: Draw) -> None:
    f = TRANSFORMS[name]
    xs = [ts.tensor((0.3 * rng.standard_normal(s)).astype(np.float32)) for s in ((4, 5), (5, 5))]
    want = tree.flatten(f(*xs))[0]
    for run in (f, ts.jit(f)):
        layouts = [some_layout(x, rng) for x in xs]
        where = f"{name} of {', '.join(at.describe() for at in layouts)}"
        args = [spread(x, at, rng) for x, at in zip(xs, layouts, strict=True)]
        for got, w in zip(tree.flatten(run(*args))[0], want, strict=True):
            same(got, w, 64, where)


def test_sentinels_see_the_parts(rng: Draw) -> None:
    a = rng.standard_normal((4, 6)).astype(np.float32)
    a[3, 5] = -1e9
    x = ts.dist.distribute(a, block_layouts(2)[-1])
    with ts.config.scope(numerics="raise"), pytest.raises(ts.NumericsError, match="log"):
        ts.jit(lambda x: ts.log(x * x * x))(x)
    assert np.isfinite(ts.jit(lambda x: ts.exp(x))(x).numpy()).all()


# --- random programs -----------------------------------------------------------------------------
def _grow(pool: list, rng: Draw, move: Callable) -> None:
    """One more value, of random ones: [n, m] all of them, n and m up to 12. Nothing jumps where
    another order of a sum may fall on the other side: at sums of what is centred, or at ties."""
    x = pool[rng.integers(len(pool))]
    n, m = x.shape
    same = [y for y in pool if y.shape == x.shape]
    fits = [y for y in pool if y.shape[0] == m]
    y, z = same[rng.integers(len(same))], (fits[rng.integers(len(fits))] if fits else x.T)
    steps = [
        lambda: x + y, lambda: x - 0.5 * y, lambda: x * y, lambda: ts.tanh(x), lambda: x.T,
        lambda: 0.3 * (x @ z), lambda: x - ts.mean(x, axis=0, keepdims=True),
        lambda: x / (1.0 + ts.sum(x * x, axis=1, keepdims=True)), lambda: ts.softmax(x, axis=0),
        lambda: ts.reshape(x, (m, n)), lambda: ts.reshape(ts.reshape(x, (-1,)), (n, m)) + y,
        lambda: x[: max(1, n - 1)], lambda: ts.concatenate([x, y], axis=1)[:, 1:m + 1],
        lambda: ts.pad(x, ((1, 0), (0, 0)))[:n], lambda: ts.cumsum(x, axis=1),
        lambda: ts.where(x > 0.123, x, 0.5 * y),
        lambda: ts.logsumexp(x, axis=1, keepdims=True) + y,
        lambda: ts.checkpoint(lambda v: ts.sin(v) * v)(x), lambda: x[::-1] + y,
        lambda: ts.take(x, np.array([0, n - 1, 0]), axis=0), lambda: ts.layernorm(x),
        lambda: ts.scan(lambda c, r: (c + r, c * r), y[0], x)[1],
        lambda: ts.cond(ts.sum(x) > 0.123, lambda v: v * 2.0, lambda v: v - 1.0, x),
        lambda: move(x, SHARDS[rng.integers(len(SHARDS))]),
    ]
    made = steps[rng.integers(len(steps))]()
    if max(made.shape) <= 12:
        pool.append(made)


SHARDS = block_layouts(2)


@pytest.mark.parametrize("number", range(16))
def test_random_programs(number: int, rng: Draw) -> None:
    shapes = [(int(a), int(b)) for a, b in rng.integers(1, 8, (3, 2))]
    xs = [ts.tensor((0.5 * rng.standard_normal(s)).astype(np.float32)) for s in shapes]
    choices = int(rng.integers(2**31))

    def loss(a, b, c, move=lambda x, at: x):
        pool, own = [a, b, c], np.random.default_rng(choices)
        for _ in range(14):
            _grow(pool, own, move)
        return sum(ts.sum(v / (1.0 + v * v)) for v in pool[-4:])

    want, slopes = ts.value_and_grad(loss, argnums=(0, 1, 2))(*xs)
    for _ in range(3):
        layouts = [some_layout(x, rng) for x in xs]
        step = ts.jit(ts.value_and_grad(lambda *a: loss(*a, move=ts.shard), argnums=(0, 1, 2)))
        value, grads = step(*(spread(x, at, rng) for x, at in zip(xs, layouts, strict=True)))
        where = f"program {choices} of {', '.join(at.describe() for at in layouts)}\n{step.plan}"
        for got, w in zip((value, *grads), (want, *slopes), strict=True):
            scale = max(1.0, float(np.abs(w.numpy()).max(initial=0.0)))
            assert np.abs(got.numpy() - w.numpy()).max(initial=0.0) <= 2e-4 * scale, where


def test_what_is_differentiated_is_the_first_argument_as_in_one_process(rng):
    """Of parameters that arithmetic has unmarked and batches all of which lie on a mesh: labels
    were to be differentiated too, and had no derivative."""
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    w, x = rng.standard_normal((8, 3)), rng.standard_normal((6, 8))
    plain = {"w": ts.tensor(w, "f32")}, ts.tensor(x, "f32"), ts.tensor([0, 1, 2, 0, 1, 2], "int32")

    def loss(p, x, y):
        return ts.mean(ts.cross_entropy(x @ p["w"], y))

    def labels_first(y, p, x):
        return loss(p, x, y)

    p, x, y = ts.map_tree(lambda t: ts.dist.distribute(t, ts.ShardSpec(("row",), ("dp",)),
                                                 mesh=mesh), plain)
    meant = ts.grad(loss)(*plain)["w"].numpy()
    np.testing.assert_allclose(ts.grad(loss)(p, x, y)["w"].numpy(), meant, rtol=1e-5, atol=1e-6)
    by_weight = ts.grad(labels_first)(plain[2], p, plain[1])  # of plain ones beside: what is split
    np.testing.assert_allclose(by_weight["w"].numpy(), meant, rtol=1e-5, atol=1e-6)
    with pytest.raises(ts.GradError) as info:
        ts.grad(labels_first)(y, p, x)
    assert "argument 0 or, where that is plain, what lies on a mesh" in info.value.hint


@pytest.mark.parametrize("loss", [ts.cross_entropy, ts.nll_loss])
def test_labels_of_which_each_rank_has_some_are_looked_at_by_it(loss: Callable, rng: Draw) -> None:
    """At once, outside of ts.jit: the property of all elements was asked for, which a rank of
    several does not have."""
    mesh, rows = ts.dist.mesh(axes=("dp",), shape=(3,)), ts.ShardSpec(("row",), ("dp",))
    x, labels = rng.standard_normal((7, 5)).astype(np.float32), rng.integers(0, 5, 7)
    ignored = np.where(np.arange(7) == 6, -100, labels)

    def found(labels: np.ndarray, **flags: Any) -> list[float]:
        return ts.dist.simulate(lambda: float(loss(*(
            ts.dist.distribute(a, rows, mesh=mesh) for a in (x, labels)), **flags)), mesh)

    for flags, given in (({}, labels), ({"ignore_index": -100}, ignored)):
        whole = float(loss(ts.tensor(x), ts.tensor(given), **flags))
        np.testing.assert_allclose(found(given, **flags), [whole] * 3, rtol=1e-6)
    with pytest.raises(ts.ArgumentError, match="label -100 is outside 0 .. 4"):
        found(ignored)
