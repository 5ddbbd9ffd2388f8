"""Derivatives that follow from a kernel's body, where its author gave no rule."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import tessera as ts
from derived_kernels import LOOPED, PROGRAMS, mirrored, recurrent, written
from kernel_meanings import compared
from kernels.build import build
from kernels.corpus import read
from tessera import Tensor, bf16, f32
from tessera.graph.ops import kernel_loops
from tessera.graph.simplify import simplify

tile = ts.tile


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_modes_are_finite_differences(name, rng):
    f, shapes = PROGRAMS[name]
    xs = [ts.tensor(rng.standard_normal(s), "f32") for s in shapes]
    ds = [ts.tensor(rng.standard_normal(s), "f32") for s in shapes]
    y = f(*xs)
    w = ts.tensor(rng.standard_normal(y.shape), "f32")
    e = 2e-3
    ahead, behind = (f(*(x + s * d for x, d in zip(xs, ds, strict=True))) for s in (e, -e))
    want = float(((ahead.numpy().astype(float) - behind.numpy()) / (2 * e) * w.numpy()).sum())
    near = {"rel": 2e-2, "abs": 2e-2}
    value, tangent = ts.jvp(f, tuple(xs), tuple(ds))
    assert np.array_equal(value.numpy(), y.numpy())  # the kernel itself ran
    assert float((tangent.numpy() * w.numpy()).sum()) == pytest.approx(want, **near)
    loss = ts.jit(lambda xs: ts.sum(f(*xs) * w))
    slopes = ts.grad(loss)(xs)
    found = sum(float((g.numpy() * d.numpy()).sum()) for g, d in zip(slopes, ds, strict=True))
    assert found == pytest.approx(want, **near)


def test_a_second_derivative(rng):
    x = ts.tensor(rng.standard_normal(60), "f32")
    slope = ts.grad(lambda x: ts.sum(ts.grad(lambda x: ts.sum(written(mirrored, 60)(x) ** 2))(x)))
    a = x.numpy().astype(np.float64)
    y, u = a * a + a[::-1], np.ones(60)
    # Of the Hessian of sum(y * y) times ones: y' = 2 a u + u[::-1], and y'' = 2 u u.
    first = 2 * a * u + u[::-1]
    want = 2 * (2 * a * first + first[::-1] + 2 * y * u)
    np.testing.assert_allclose(slope(x).numpy(), want, rtol=1e-4, atol=1e-4)


def test_narrow_types_round_where_the_kernel_does(rng):
    @ts.kernel
    def halved(x: Tensor["N", bf16], y: Tensor["N", bf16]):
        y[tile_n:tile_n + 64] = tile.load(x[tile_n:tile_n + 64]) * 0.5

    def f(x):
        y = ts.zeros((100,), "bf16")
        halved(x, y)
        return y

    slope = ts.grad(lambda x: ts.sum(ts.cast(f(x), "f32")))(ts.ones((100,), "bf16"))
    assert slope.type.dtype.name in ("bf16", "f32") and (slope.numpy() == 0.5).all()


def searched(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        v = x[i]
        while v > 1.0:
            v = v * 0.5
        y[i] = v


def placed(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = int(x[0])
    y[i:i + 4] = tile.load(x[tile_n:tile_n + 4])


def exchanged(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        tile.atomic_exchange(y, 0, x[i])


def drawn(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        y[i] = x[i] * tile.random_uniform(i)


@pytest.mark.parametrize("body, why, line", [
    (searched, "a loop ends by its values, at a while or a break", 4),
    (placed, "a place in memory depends on elements", 2),
    (exchanged, "atomic_exchange has no derivative", 3), (drawn, "it draws random numbers", None)])
def test_what_has_none_is_refused_on_its_line(body, why, line):
    kernel = ts.kernel(body)
    for transform in (lambda f: ts.grad(lambda x: ts.sum(f(x))),
                      lambda f: lambda x: ts.jvp(f, (x,), (x,))):
        with pytest.raises(ts.GradError, match=why) as error:
            transform(written(kernel, 8))(ts.full((8,), 0.5))
        assert f"{body.__name__}.defvjp(fwd, bwd)" in str(error.value)
        if line is not None:
            assert error.value.where.line == body.__code__.co_firstlineno + line


def test_what_a_gather_finds_outside_of_a_part_is_not_differentiated(rng):
    @ts.kernel
    def picked(x: Tensor["N", f32], ids: Tensor["M", ts.int32], y: Tensor["M", f32]):
        i = tile.load(ids[tile_m:tile_m + 8])
        y[tile_m:tile_m + 8] = tile.gather(x[4:12], i) * 2.0

    ids = ts.tensor(np.array([-1, 0, 7, 8, -4, 3, 3, 99], np.int32))
    slope = ts.grad(lambda x: ts.sum(written(lambda x, y: picked(x, ids, y), 8)(x)))(
        ts.tensor(rng.standard_normal(20), "f32")).numpy()
    want = np.zeros(20)
    np.add.at(want, [4, 11, 7, 7], 2.0)  # of the others there are none in x[4:12]
    assert np.array_equal(slope, want)


def nodes_of(name, *shapes):
    """Ops of the gradient's graph, and the elements of its largest constant."""
    f = written(LOOPED[name], *shapes[0][:-1], shapes[-1][0 if name == "matmul" else -1])
    graph = simplify(ts.jit(ts.grad(lambda xs: ts.sum(f(*xs)))).graph(
        [Tensor[(*s, f32)] for s in shapes]))
    return Counter(n.op.name for n in graph.nodes), max(
        (np.size(x.array) for _, x in graph.captures), default=0)


@pytest.mark.parametrize("name, few, many", [
    ("matmul", [(70, 160), (90, 160)], [(70, 4096), (90, 4096)]),
    ("causal", [(384, 16)] * 3, [(512, 16)] * 3), ("gated", [(8, 20)] * 2, [(600, 20)] * 2)])
def test_a_loop_is_not_written_out(name, few, many):
    ops, _ = nodes_of(name, *few)
    more, largest = nodes_of(name, *many)
    assert more == ops
    assert largest <= 4096  # no mask as large as a tensor


def test_products_of_a_loop_are_one():
    ops, _ = nodes_of("matmul", (70, 160), (90, 160))
    assert ops["matmul"] == 2 and not ops["reduce_sum"]
    assert not ops["pad"] + ops["concatenate"] + ops["take"]  # blocks that overhang are not padded


def test_a_long_recurrence_is_a_scan(rng, monkeypatch):
    xs = [ts.tensor(rng.standard_normal(s), "f32") for s in ((9, 20), (20, 20))]
    loss = lambda xs: ts.sum(written(recurrent, *xs[0].shape)(*xs) ** 2)  # noqa: E731
    ops = Counter(n.op.name for n in ts.jit(ts.grad(loss)).graph(
        [Tensor[2000, 20, f32], Tensor[20, 20, f32]]).nodes)
    assert ops["scan"] == 2 and ops.total() < 120
    written_out = ts.grad(loss)(xs)
    monkeypatch.setattr(kernel_loops, "MOST_WRITTEN", 0)
    for got, want in zip(ts.grad(loss)(xs), written_out, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)


def test_a_rule_goes_before(rng):
    @ts.kernel
    def cube(x: Tensor["N", f32]) -> Tensor["N", f32]:
        t = tile.load(x[tile_n:tile_n + 32])
        return t * t * t

    x = ts.tensor(rng.standard_normal(50), "f32")
    np.testing.assert_allclose(ts.grad(lambda x: ts.sum(cube(x)))(x).numpy(), 3 * x.numpy() ** 2,
                               rtol=1e-5)
    cube.defvjp(lambda x: (cube(x), None), lambda saved, g: g * 7.0)
    assert (ts.grad(lambda x: ts.sum(cube(x)))(x).numpy() == 7.0).all()


def test_the_corpus_means_the_same_in_ops_of_the_graph(monkeypatch, capsys, pytestconfig):
    with compared(monkeypatch) as seen:
        for program in read("correct"):
            program.run(pytestconfig.option.seed)
    assert seen["told"] > 50 and seen["a loop ends by its values, at a while or a break"] < 8, seen


def test_algorithms_mean_the_same_in_ops_of_the_graph(monkeypatch, pytestconfig):
    with compared(monkeypatch) as seen:
        for program in (p for name in ("sequences", "solvers", "tables") for p in read(name)):
            program.run(pytestconfig.option.seed)
    assert seen["told"] > 40, seen


# --- branches that are not taken ------------------------------------------------------------------
GUARDED = {
    "sqrt": "tile.sqrt(x[i])", "log": "s * tile.log(x[i])", "division": "s / x[i]",
    "both": "tile.log(x[i]) * tile.sqrt(x[i])", "outside": "s / v", "gathered": "s / x[at[i]]",
}


def guarded(body: str, form: str):
    store = f"y[i] = {body}" if form == "store" else f"y[i] = {body} if x[i] > 0.0 else s"
    guard = "if i < N and x[i] > 0.0:" if form == "store" else "if i < N:"
    return build(f"""@kernel
def k(x: Tensor["N", f32], at: Tensor["N", i32], y: Tensor["N", f32], s: f32):
    i = tile.linear_id()
    v = x[i] if i < N else 0.0
    {guard}
        {store}
""")["k"]


@pytest.mark.parametrize("form", ["store", "ternary"])
@pytest.mark.parametrize("name", GUARDED)
def test_a_branch_that_is_not_taken_has_no_share_in_a_derivative(name, form, rng):
    """Its derivative would be infinite there, and 0 times that NaN; also for a number that all
    lanes read. In f64 by hand: x of 0 and below takes no part."""
    k, at = guarded(GUARDED[name], form), ts.arange(9, dtype="int32")
    x = np.abs(rng.standard_normal(9)) + 0.5
    x[[1, 4]], x[6], s = 0.0, -1.0, 3.0
    on = x > 0
    z = np.where(on, x, 1.0)

    def f(x, s):
        y = ts.zeros_like(x)
        k(x, at, y, s)
        return ts.sum(y)

    slope, by_s = {
        "sqrt": (0.5 / np.sqrt(z), 0 * z), "log": (s / z, np.log(z)),
        "both": (np.sqrt(z) / z + np.log(z) / (2 * np.sqrt(z)), 0 * z)}.get(
            name, (-s / z**2, 1 / z))
    if form == "ternary":
        by_s = np.where(on, by_s, 1.0)
    args = ts.tensor(x, "f32"), ts.tensor(s)
    grads = ts.grad(f, argnums=(0, 1))
    for made in (grads(*args), ts.jit(grads)(*args)):
        np.testing.assert_allclose(made[0].numpy(), np.where(on, slope, 0), rtol=1e-5, atol=1e-6)
        by_s = by_s if form == "ternary" else np.where(on, by_s, 0)
        np.testing.assert_allclose(made[1].item(), by_s.sum(), rtol=1e-4, atol=1e-5)
    tangent = ts.jvp(f, args, (ts.ones(9), ts.tensor(1.0)))[1].item()
    np.testing.assert_allclose(tangent, (np.where(on, slope, 0) + by_s).sum(), rtol=1e-4, atol=1e-4)


def test_lanes_behind_the_end_have_no_share_in_a_derivative(rng):
    """They compute with elements that lie somewhere in the tensor: the root of 0 here."""
    k = build("""@kernel
def k(a: Tensor["B", 3, f32], l: Tensor["B", 3, f32]):
    b = tile.linear_id()
    if b < B:
        r = tile.alloc_register((2,), f32)
        r[0] = math.sqrt(a[b, 0])
        r[1] = a[b, 1] / r[0]
        l[b, 0] = r[0]
        l[b, 1] = r[1]
        l[b, 2] = math.sqrt(a[b, 2] - r[1] * r[1])
""")["k"]

    def f(a):
        made = ts.zeros_like(a)
        k(a, made)
        return ts.sum(made)

    def plain(a):
        u = ts.sqrt(a[:, 0])
        v = a[:, 1] / u
        return ts.sum(u + v + ts.sqrt(a[:, 2] - v * v))

    a = ts.tensor(np.array([1.0, 0.5, 3.0]) + 0.2 * rng.random((5, 3)), "f32")
    np.testing.assert_allclose(ts.grad(f)(a).numpy(), ts.grad(plain)(a).numpy(), rtol=1e-5)


def test_groups_that_take_another_branch_have_no_share_in_a_derivative(rng):
    k = build("""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32]):
    t = tile.load(x[tile_m:tile_m+1, 0:8])
    s = tile.reduce_sum(t)
    if s > 0.0:
        y[tile_m:tile_m+1, 0:8] = tile.load(x[tile_m:tile_m+1, 0:8]) * tile.sqrt(t) / s
""")["k"]
    x = rng.random((4, 8)).astype(np.float32) + 0.1
    x[2] = 0.0

    def f(x):
        y = ts.zeros_like(x)
        k(x, y)
        return ts.sum(y)

    slope = ts.grad(f)(ts.tensor(x)).numpy()
    v = x[[0, 1, 3]].astype(np.float64)
    s = v.sum(1, keepdims=True)
    want = 1.5 * np.sqrt(v) / s - (v**1.5).sum(1, keepdims=True) / s**2
    np.testing.assert_allclose(slope[[0, 1, 3]], want, rtol=1e-4, atol=1e-5)
    assert not slope[2].any()
