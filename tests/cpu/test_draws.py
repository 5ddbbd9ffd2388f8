"""Random draws: what lies outside is never drawn, nothing is more likely than it should be, and
elements of a batch draw apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from frequencies import likely
from tessera.numerics import decode


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "tf32", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1",
                                   "fp4_e3m0"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 2.0), (-2.0, -1.0), (-1.0, 0.0)])
def test_uniform_never_draws_its_end(dtype: str, low: float, high: float) -> None:
    with ts.config.scope(loop_min_elements=10**9):
        x = ts.random.uniform((200_000,), low, high, dtype).numpy().astype(np.float64)
    assert x.min() >= low and x.max() < high
    spread = 1 / np.sqrt(12 * x.size)  # of the mean of as many draws
    eps = {"bf16": 2**-8, "f16": 2**-11, "tf32": 2**-11, "f32": 2**-24}.get(dtype, 0.25)
    assert abs(x.mean() - (low + high) / 2) < 6 * spread + 2 * eps


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("low", "high"), [(0.3, 0.7), (-0.7, -0.3), (100.0, 300.0), (-0.01, 0.3)])
def test_uniform_stays_between_ends_that_the_type_does_not_hold(
        dtype: str, low: float, high: float) -> None:
    for run in (lambda f: f, ts.jit):
        x = run(lambda: ts.random.uniform((50_000,), low, high, dtype))().numpy().astype(float)
        assert x.min() >= low and x.max() < high
        if dtype.startswith("fp8"):  # of few numbers each is drawn
            every = decode(np.arange(256, dtype=np.uint8), dtype).astype(float)
            inside = every[(every >= low) & (every < high) & (np.abs(every) > 0.01)]
            assert {*inside} <= {*x}


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_draws_of_f64_lie_as_close_as_those_of_0_and_1(run: Any) -> None:
    """Beside 1e8 f32 holds every eighth integer."""
    key = ts.random.key(3)
    for draw, name in ((lambda **more: ts.normal((500,), key=key, **more), "mean"),
                       (lambda **more: ts.uniform((500,), key=key, **more), "low")):
        near = {name: 1e8} | ({"high": 1e8 + 1} if name == "low" else {"std": 0.5})
        x, unit = run(lambda f=draw, n=near: f(dtype="f64", **n))().numpy(), draw().numpy()
        want = np.float64(unit) * near.get("std", 1.0) + 1e8
        np.testing.assert_allclose(x, want, rtol=2**-52)
        assert len({*x}) > 490


def test_randint_has_no_favourites() -> None:
    """Of 3 * 2^30 numbers, those of the first third were twice as likely from 32 bits alone."""
    n = 3 * 2**30
    draws = ts.random.randint(0, n, (60_000,)).numpy()
    assert draws.min() >= 0 and draws.max() < n
    counts = np.bincount(draws // (n // 3), minlength=3)
    assert likely(counts, np.ones(3))


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 4), (5, 6), (0, 2**32),
                                           (-(2**31), 2**31 - 1)])
def test_randint_covers_its_range(low: int, high: int) -> None:
    draws = ts.random.randint(low, high, (40_000,)).numpy()
    assert draws.min() >= low and draws.max() < high
    mean, spread = (low + high - 1) / 2, (high - low) / np.sqrt(12 * draws.size)
    assert abs(draws.mean() - mean) <= 6 * spread


ROWS = 6
DRAWS: dict[str, Any] = {
    "uniform": lambda r: ts.random.uniform((3,)), "normal": lambda r: r + ts.random.normal((3,)),
    "dropout": lambda r: ts.dropout(ts.ones(64), 0.5),
    "bits": lambda r: ts.random.random_bits((2,)),
    "stochastic": lambda r: ts.cast(ts.full((64,), 1.003) + 0 * ts.sum(r),
                                    "bf16 @stochastic_round"),
    "of a captured": lambda r: ts.cast(ts.full((64,), 1.003), "bf16 @stochastic_round"),
    "scan": lambda r: ts.scan(lambda c, i: (c, ts.random.uniform((2,))), ts.zeros(()), r)[1],
    "cond": lambda r: ts.cond(ts.sum(r) > 0, lambda: ts.random.uniform((2,)), lambda: ts.ones(2)),
    "nested": lambda r: ts.vmap(lambda e: e + ts.random.uniform(()))(r),
    "gradient": lambda r: ts.grad(lambda x: ts.sum(x * ts.random.normal((3,))))(r),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_elements_of_a_batch_draw_apart(name: str, compiled: bool) -> None:
    batched = ts.vmap(DRAWS[name])
    made = (ts.jit(batched) if compiled else batched)(ts.ones((ROWS, 3))).numpy()
    rows = {row.astype(np.float64).tobytes() for row in made}
    assert len(rows) == ROWS
    if name == "nested":
        assert len({float(v) for v in made.reshape(-1)}) == made.size


def test_a_key_that_is_passed_draws_alike_and_keys_draw_apart() -> None:
    key = ts.random.philox(3).next_key()
    same = ts.vmap(lambda r: r + ts.random.uniform((3,), key=key))(ts.ones((ROWS, 3))).numpy()
    assert (same == same[0]).all()
    keys = ts.stack([ts.fold_in(key, i) for i in range(ROWS)])
    apart = ts.vmap(lambda k: ts.random.uniform((3,), key=k))(keys).numpy()
    want = np.stack([ts.random.uniform((3,), key=ts.fold_in(key, i)).numpy() for i in range(ROWS)])
    np.testing.assert_array_equal(apart, want)
    rounded = ts.vmap(lambda k: ts.random.bernoulli(0.5, (8,), key=k))(keys).numpy()
    assert len({row.tobytes() for row in rounded}) > 1


def test_keys_of_many_rows_are_one_op() -> None:
    """A graph of a thousand chains or environments is as large as that of two, and each draws what
    its key gives."""
    def step(key: Any, r: Any) -> Any:
        first, *_, last = ts.random.split(key, 3)
        return r + ts.random.normal((2, 3), key=first) + ts.random.uniform((), key=last)

    batched = ts.jit(ts.vmap(step))
    for rows in (2, 1000):
        keys = ts.random.split(ts.random.key(5), rows)
        graph = batched.graph(keys, ts.zeros(rows))
        assert len(graph.nodes) < 80
    got = batched(keys, ts.zeros(rows)).numpy()
    for i in (0, 1, 999):
        np.testing.assert_allclose(got[i], step(keys[i], ts.zeros(())).numpy(), rtol=1e-6)
    few, many = (ts.random.split(ts.random.key(3), n).numpy() for n in (8, 9))
    assert np.array_equal(few, many[:8])
    nested = ts.vmap(ts.vmap(lambda k: ts.random.random_bits((5,), key=k)))
    there = nested(ts.reshape(keys[:6], (2, 3, 2))).numpy().reshape(6, 5)
    assert np.array_equal(there[4], ts.random.random_bits((5,), key=keys[4]).numpy())


def test_a_generator_draws_on_or_says_why_not() -> None:
    """A key of it would be a constant of the trace: the same draws in each call."""
    outside = ts.random.philox(seed=3)
    own = ts.jit(lambda: ts.normal((4,), generator=ts.random.philox(seed=3)))
    first, second = (ts.normal((4,), generator=outside).tolist() for _ in range(2))
    assert own().tolist() == own().tolist() == first != second
    for f in (ts.jit(lambda: ts.normal((4,), generator=outside)),
              lambda: ts.vmap(lambda x: x + ts.uniform((), generator=outside))(ts.ones(3)),
              lambda: ts.scan(lambda c, _: (c + ts.normal((), generator=outside), None),
                              ts.zeros(()), length=3)):
        with pytest.raises(ts.TraceError, match="a generator from outside of a traced function"):
            f()


TRANSFORMS = {
    "grad": lambda f, x: ts.grad(lambda y: ts.sum(f(y)))(x),
    "jvp": lambda f, x: ts.jvp(f, (x,), (x,))[1],
    "cond": lambda f, x: ts.cond(ts.sum(x) > 0, f, lambda y: y, x),
    "checkpoint": lambda f, x: ts.checkpoint(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_generator_draws_on_where_a_function_is_traced_for_one_call(transform: str) -> None:
    """In derivatives and branches of a compiled function that made it, and in eager ones, but for
    ts.grad, which is compiled; not where a compiled function did not make it."""
    apply, x = TRANSFORMS[transform], ts.ones(4)
    like = ts.random.philox(seed=3)
    want = [ts.uniform((4,), generator=like).tolist() for _ in range(2)]

    def run(generator: Any) -> Any:
        return apply(lambda y: y * ts.uniform((4,), generator=generator), x)

    outside = ts.random.philox(seed=3)
    if transform != "grad":
        assert [run(outside).tolist() for _ in range(2)] == want
    assert ts.jit(lambda: run(ts.random.philox(seed=3)))().tolist() == want[0]
    with pytest.raises(ts.TraceError, match="a generator from outside of a traced function"):
        ts.jit(lambda: run(outside))()


def test_rounding_to_integers_is_right_in_the_mean() -> None:
    n = 40_000
    for x in (2.3, -2.3, 0.5, 7.9):
        for f in (ts.cast, ts.jit(lambda x, t: ts.cast(x, t))):
            y = f(ts.full(n, x), "int8 @stochastic_round").numpy().astype(np.float64)
            assert set(np.unique(y)) == {np.floor(x), np.ceil(x)}
            assert abs(y.mean() - x) < 6 * 0.5 / np.sqrt(n)


def test_rounding_between_formats_of_one_width_is_right_in_the_mean() -> None:
    """bf16 holds 2^-8 where f16 holds 2^-11: an f16 between two of bf16."""
    n, x = 40_000, 1 + 2.0**-9
    y = ts.cast(ts.full(n, x, "f16"), "bf16 @stochastic_round").numpy().astype(np.float64)
    assert abs(y.mean() - x) < 6 * 2.0**-8 / np.sqrt(n)


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["now", "jit"])
def test_parameters_of_draws_may_be_data(run: Any) -> None:
    """Tensors, and numbers that a compiled function is given: what a model computes is drawn of."""
    key = ts.random.key(4)
    p = ts.tensor([[0.0, 1.0], [0.5, np.nan]], "f32")
    drawn = run(lambda p: ts.random.bernoulli(p, key=key))(p).numpy()
    u = ts.random.uniform((2, 2), key=key).numpy()
    assert np.array_equal(drawn, u < p.numpy()) and drawn[0, 1] and not drawn[1, 1]
    rows = run(lambda p: ts.random.bernoulli(p, (900, 2), key=key))(p[0] * 0.25).numpy()
    assert not rows[:, 0].any() and abs(rows[:, 1].mean() - 0.25) < 0.06
    mean, unit = ts.tensor([0.0, 10.0, 100.0], "f32"), ts.random.normal((2, 3), key=key).numpy()
    for std in (0.5, ts.tensor(0.5)):
        made = run(lambda m, s: ts.random.normal((2, 3), m, s, key=key))(mean, std)
        np.testing.assert_allclose(made.numpy(), mean.numpy() + 0.5 * unit, rtol=1e-6)
    slope = run(ts.grad(lambda s: ts.sum(ts.random.normal((2, 3), std=s, key=key))))(ts.tensor(2.0))
    np.testing.assert_allclose(slope.numpy(), unit.sum(), rtol=1e-5)
    for n in (5, ts.tensor(5)):
        drawn = run(lambda n: ts.random.randint(-1, n, (50,), key=key))(n)
        assert np.array_equal(drawn, ts.random.randint(-1, 5, (50,), key=key))
    wide = run(lambda h: ts.random.uniform((2, 2), -h, h, key=key))(2.0).numpy()
    np.testing.assert_allclose(wide, 4 * u - 2, rtol=1e-6)
    kept = run(lambda x, p: ts.dropout(x, p, key=key))(ts.ones(64), 0.25)
    assert np.array_equal(kept, ts.dropout(ts.ones(64), 0.25, key=key))


def test_parameters_of_draws_do_not_make_more_of_them() -> None:
    """Three rows of the same numbers came of ends [3, 2] where [2] were asked for."""
    two = ts.ones((3, 2))
    for f in (lambda: ts.random.uniform((2,), 0.0, two), lambda: ts.random.normal((2,), two),
              lambda: ts.random.bernoulli(two, (2,)), lambda: ts.random.randint(0, two, (2,))):
        with pytest.raises(ts.ShapeError, match=r"\[3, 2\] does not broadcast to \[2\]"):
            f()
    with pytest.raises(ts.DTypeError, match="draws integers, its ends give a range of f32"):
        ts.random.randint(0, ts.ones(2), (2,))
