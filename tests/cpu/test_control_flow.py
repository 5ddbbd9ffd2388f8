"""scan, map, reduce, cond, while_loop: values against Python loops, derivatives against
differences in f64, nesting with every transform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from derivatives import t64
from tessera.errors import ArgumentError, DTypeError, GradError, ShapeError
from tessera.tensor import Tensor
from tolerance import assert_close


def ir(graph: Any) -> str:
    """The text of a graph without the source lines, which are lines of this file."""
    return "\n".join(line.split("    # ")[0] for line in str(graph).splitlines())


def cell(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    new = ts.tanh(c * 0.5 + x)
    return new, new * c


def unrolled(f: Callable, c: Any, xs: Tensor, reverse: bool = False) -> tuple[Any, Tensor]:
    order = range(xs.shape[0])
    ys: dict[int, Tensor] = {}
    for i in reversed(order) if reverse else order:
        c, ys[i] = f(c, xs[i])
    return c, ts.stack([ys[i] for i in order])


# --- scan -------------------------------------------------------------------------------------
@pytest.mark.row("PAR-03")
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_is_the_loop(reverse: bool, rng: np.random.Generator) -> None:
    c, xs = t64(rng.standard_normal(3)), t64(rng.standard_normal((5, 3)))
    want = unrolled(cell, c, xs, reverse)
    for run in (ts.scan, ts.jit(ts.scan, static=("f", "reverse"))):
        last, ys = run(cell, c, xs, reverse=reverse)
        assert_close(last.numpy(), want[0].numpy())
        assert_close(ys.numpy(), want[1].numpy())


@pytest.mark.row("PAR-03")
@pytest.mark.parametrize("reverse", [False, True])
def test_gradient_of_scan_is_that_of_the_unrolled_loop(
    reverse: bool, rng: np.random.Generator
) -> None:
    c, xs, w = (t64(rng.standard_normal(s)) for s in ((3,), (4, 3), (3, 3)))

    def loss(loop: Callable, c: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        def f(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = ts.tanh(w @ c + x)
            return new, ts.sum(new * x)

        last, ys = loop(f, c, xs, reverse=reverse)
        return ts.sum(last * last) + ts.sum(ys * ys)

    scanned = ts.grad(functools.partial(loss, ts.scan), argnums=(0, 1, 2))(c, xs, w)
    plain = ts.grad(functools.partial(loss, unrolled), argnums=(0, 1, 2))(c, xs, w)
    for g, want in zip(scanned, plain, strict=True):
        assert_close(g.numpy(), want.numpy(), n=16)
    assert ts.gradcheck(functools.partial(loss, ts.scan), (c, xs, w))


def test_scan_of_nested_values_without_results_and_by_length(rng: np.random.Generator) -> None:
    x = t64(rng.standard_normal((3, 2)))
    carry, ys = ts.scan(
        lambda c, e: ({"n": c["n"] + 1, "s": c["s"] + e["a"] * e["b"]}, None),
        {"s": ts.zeros((2,), "f64"), "n": 0}, {"a": x, "b": x})
    assert ys is None and carry["n"].item() == 3
    assert_close(carry["s"].numpy(), np.sum(x.numpy() ** 2, axis=0), n=3)
    powers = ts.scan(lambda c, _: (c * 2.0, (c, {"half": c / 2})), ts.tensor(1.0), length=4)
    assert powers[0].item() == 16.0
    assert powers[1][0].numpy().tolist() == [1, 2, 4, 8]
    assert powers[1][1]["half"].numpy().tolist() == [0.5, 1, 2, 4]
    last, none = ts.scan(cell, x[0], ts.zeros((0, 2), "f64"))
    assert_close(last.numpy(), x[0].numpy())
    assert none.shape == (0, 2)


def test_python_numbers_in_the_carry_take_the_type_of_the_loop() -> None:
    total, _ = ts.scan(lambda c, x: (c + x, None), 0.0, t64([1.0, 2.0]))
    assert total.dtype is ts.f64 and total.item() == 3.0
    total, _ = ts.scan(lambda c, x: (c + x, None), 0, ts.tensor([1.5, 2.0]))
    assert str(total.dtype) == "f32" and total.item() == 3.5


def test_bf16_carries_round_each_iteration(rng: np.random.Generator) -> None:
    xs = ts.cast(ts.tensor(rng.standard_normal((6, 3)).astype(np.float32)), "bf16")
    start = ts.zeros((3,), "bf16")
    step = lambda c, x: (c * 0.75 + x, c)  # noqa: E731
    last, ys = ts.scan(step, start, xs)
    want = unrolled(step, start, xs)
    assert str(last.dtype) == "bf16" and str(ys.dtype) == "bf16"
    np.testing.assert_array_equal(last.numpy(), want[0].numpy())
    np.testing.assert_array_equal(ys.numpy(), want[1].numpy())
    g = ts.grad(lambda s: ts.sum(ts.scan(step, s, xs)[0]))(start)
    assert str(g.dtype) == "f32"
    assert_close(g.numpy(), np.full(3, 0.75**6), dtype="bf16", n=6)


def test_gradients_of_closed_over_weights_sum_in_f32() -> None:
    """4096 gradients of 2^-13 beside one of 1: bf16 sums would stay at 1."""
    w = ts.cast(ts.tensor(1.0), "bf16")
    xs = ts.tensor(np.array([1.0] + [2.0**-13] * 4096, np.float32))
    g = ts.grad(lambda v: ts.scan(lambda c, x: (c + v * x, None), 0.0, xs)[0])(w)
    assert g.item() == 1.5


def test_carries_that_do_not_change_are_not_stacked(rng: np.random.Generator) -> None:
    w, xs = t64(rng.standard_normal((3, 3))), t64(rng.standard_normal((4, 3)))

    def loss(w: Tensor) -> Tensor:
        (c, _), _ = ts.scan(lambda s, x: ((ts.tanh(s[1] @ s[0] + x), s[1]), None), (xs[0], w), xs)
        return ts.sum(c)

    assert ts.gradcheck(loss, (w,))
    text = ir(ts.grad(loss).graph(w))
    assert "f64[4, 3]" in text and "f64[4, 3, 3]" not in text


def test_gradients_only_of_what_is_asked(rng: np.random.Generator) -> None:
    """The large closed-over matrix has no accumulator in the backward loop."""
    big, xs = ts.tensor(rng.standard_normal((7, 7)).astype(np.float32)), ts.ones((2, 7))

    def loss(c: Tensor, w: Tensor) -> Tensor:
        return ts.sum(ts.scan(lambda c, x: (ts.tanh(w @ c + x), None), c, xs)[0])

    start = ts.zeros((7,))
    accumulator = "full() shape=(7, 7)"
    assert accumulator not in ir(ts.grad(loss).graph(start, big))
    assert accumulator in ir(ts.grad(loss, argnums=1).graph(start, big))


def test_scan_errors_name_the_leaf_and_both_types() -> None:
    xs = ts.ones((3, 2))
    with pytest.raises(ShapeError, match=r"carry.h is f32\[2\] before an iteration and f32\[\]"):
        ts.scan(lambda c, x: ({"h": ts.sum(x)}, None), {"h": xs[0]}, xs)
    with pytest.raises(ShapeError, match=r"carry is bf16\[2\] before .* f32\[2\] after"):
        ts.scan(lambda c, x: (c + x, None), ts.zeros((2,), "bf16"), xs)
    with pytest.raises(ArgumentError, match="the returned carry has structure"):
        ts.scan(lambda c, x: ((c, c), None), xs[0], xs)
    with pytest.raises(ArgumentError, match=r"must return \(carry, y\)"):
        ts.scan(lambda c, x: c + x, xs[0], xs)
    with pytest.raises(ShapeError, match="xs.b .* has 2 elements along axis 0, xs.a has 3"):
        ts.scan(lambda c, x: (c, None), 0.0, {"a": xs, "b": xs[:2]})
    with pytest.raises(ArgumentError, match="needs length="):
        ts.scan(lambda c, x: (c, None), 0.0)
    with pytest.raises(ShapeError, match="has 3 elements along axis 0, length has 4"):
        ts.scan(lambda c, x: (c, None), 0.0, xs, length=4)
    with pytest.raises(ShapeError, match="xs is a scalar"):
        ts.scan(lambda c, x: (c, None), 0.0, ts.tensor(1.0))
    for length in (-1, 2.5):
        with pytest.raises(ArgumentError, match=f"scan: length={length}"):
            ts.scan(lambda c, x: (c, None), 0.0, length=length)


def test_python_numbers_in_a_carry_take_the_type_of_what_comes_out() -> None:
    """In every loop, as beside a tensor."""
    half = t64(np.array(0.5))
    assert ts.scan(lambda c, x: (c * x, None), 1, t64(np.array([0.5, 0.25])))[0].item() == 0.125
    for got in (ts.fori_loop(0, 3, lambda i, c: c * half, 1.0),
                ts.while_loop(lambda c: c > 0.2, lambda c: c * half, 1),
                ts.jit(lambda h: ts.while_loop(lambda c: c > 0.2, lambda c: c * h, 1.0))(half)):
        assert str(got.type) == "f64" and got.item() == 0.125
    with pytest.raises(ShapeError, match=r"while_loop: carry is f32\[\] before .* f64\[\] after"):
        ts.while_loop(lambda c: c > 0.2, lambda c: c * half, ts.ones(()))
    # one number is wide because of the next, which is because of the last
    chain = ts.while_loop(lambda s: s[0] < 1.0, lambda s: (s[0] + s[1], s[2], s[2] * half * 2.0),
                          (0.0, 1.0, 0.5))
    assert [str(t.type) for t in chain] == ["f64"] * 3 and chain[0].item() == 1.0


@pytest.mark.parametrize("no", [False, np.False_])
def test_bools_in_a_carry_are_data_where_the_loop_changes_them(no: Any) -> None:
    """Others, and what is no data, Python sees in the body, and they are there afterwards."""
    found = ts.while_loop(lambda c: ~c["done"], lambda c: {"x": c["x"] + 1, "done": c["x"] > 3},
                          {"x": 0.0, "done": no})
    assert found["x"].item() == 5.0 and found["done"].item() is True
    for run in (lambda f: f, ts.jit):
        (total, seen, way), ys = run(lambda xs: ts.scan(
            lambda c, x: ((c[0] + x if c[2] == "up" else -x, c[1] | (c[0] > 1), c[2]), c[1]),
            (0.0, no, "up"), xs))(ts.ones(4))
        assert (total.item(), seen.item(), way) == (4.0, True, "up")
        assert ys.tolist() == [False, False, False, True]
    kept = ts.fori_loop(0, 3, lambda i, c: (c[0] + i if c[1] else c[0], c[1], None), (1, no, None))
    assert kept[0].item() == 1 and kept[1:] == (no, None)
    counted = ts.fori_loop(0, 3, lambda i, c: c + 1, no)
    assert counted.item() == 3 and counted.dtype == "int64"
    with pytest.raises(ArgumentError, match="carry.1 is 'up' before an iteration and 'down' after"):
        ts.scan(lambda c, x: ((x, "down"), None), (0.0, "up"), ts.ones(2))


def test_carry_errors_name_the_line_that_made_the_other_type() -> None:
    def body(c: ts.Tensor, x: ts.Tensor) -> tuple:
        best = ts.argmax(x)
        return best, c

    with pytest.raises(ShapeError) as err:
        ts.scan(body, ts.tensor(0, "i32"), ts.ones((3, 2)))
    said = "int32[] before an iteration and int64[] after it, as argmax makes it at"
    assert said in str(err.value)
    assert "best = ts.argmax(x)" in err.value.message and "ts.scan(" in str(err.value.where)


def test_an_error_inside_the_body_is_that_of_the_op() -> None:
    with pytest.raises(ShapeError) as err:
        ts.scan(lambda c, x: (c @ x, None), ts.ones((2, 3)), ts.ones((4, 2, 3)))
    assert "matmul" in str(err.value) and "ts.scan:" not in str(err.value)
    assert "test_control_flow.py" in str(err.value)


def test_symbolic_extents_flow_through_scan() -> None:
    f = ts.jit(lambda c, xs: ts.scan(lambda c, x: (c + x, c * x), c, xs))
    last, ys = f.infer(ts.Tensor["D", ts.f32], ts.Tensor["T", "D", ts.f32])
    assert str(last) == "Tensor['D', f32]" and str(ys) == "Tensor['T', 'D', f32]"


def test_nested_loops_have_the_right_gradient(rng: np.random.Generator) -> None:
    """warp#1293: the gradient of a loop in a loop was twice what it is."""
    x = t64(rng.standard_normal(2) * 0.3)

    def nested(x: Tensor) -> Tensor:
        def outer(c: Tensor, i: Tensor) -> tuple[Tensor, None]:
            inner = ts.fori_loop(0, 3, lambda j, d: d + ts.sin(d) * x, c)
            return inner * 0.5, None

        return ts.sum(ts.scan(outer, x, ts.arange(2))[0])

    def plain(x: Tensor) -> Tensor:
        c = x
        for _ in range(2):
            d = c
            for _ in range(3):
                d = d + ts.sin(d) * x
            c = d * 0.5
        return ts.sum(c)

    assert ts.gradcheck(nested, (x,), order=2)
    assert_close(ts.grad(nested)(x).numpy(), ts.grad(plain)(x).numpy(), n=8)


def test_fori_loop_counts_from_lower() -> None:
    assert ts.fori_loop(2, 5, lambda i, c: c * i, 1).item() == 24
    assert ts.fori_loop(5, 2, lambda i, c: c * i, 1).item() == 1
    assert ts.fori_loop(np.int32(2), np.int64(5), lambda i, c: c * i, 1).item() == 24
    for bound in (2.5, True, ts.tensor(2.5), ts.ones(2, "i32")):
        with pytest.raises(ArgumentError, match="needs integers as bounds"):
            ts.fori_loop(0, bound, lambda i, c: c, 1)


def test_fori_loop_of_bounds_that_are_data() -> None:
    """A number that a compiled function is given by position is data: one trace for all."""
    f = ts.jit(lambda x, n: ts.fori_loop(n - 3, n, lambda i, c: c * x + i, 1.0))
    for n in (3, 5, 2):
        want = 1.0
        for i in range(n - 3, n):
            want = want * 2.0 + i
        assert f(2.0, n).item() == want
    assert f.specializations == 1
    falling = ts.vmap(lambda n: ts.fori_loop(1, n, lambda i, c: c * i, 1))(ts.tensor([1, 3, 5]))
    assert falling.tolist() == [1, 2, 24]
    cube = ts.jvp(lambda x: ts.fori_loop(0, ts.tensor(3), lambda i, c: c * x, 1.0), (2.0,), (1.0,))
    assert [t.item() for t in cube] == [8.0, 12.0]
    with pytest.raises(ShapeError, match=r"fori_loop: carry is f32\[\] before .* int64\[\] after"):
        ts.fori_loop(0, ts.tensor(2), lambda i, c: i, ts.ones(()))


# --- random -----------------------------------------------------------------------------------
def test_iterations_draw_different_numbers_and_the_backward_pass_the_same() -> None:
    x = ts.ones((1000,))

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        def step(c: Tensor, _: None) -> tuple[Tensor, Tensor]:
            dropped = ts.dropout(x, 0.5)
            return c + dropped, dropped

        c, rows = ts.scan(step, ts.zeros_like(x), length=3)
        return ts.sum(c), rows

    ts.random.seed(5)
    for run in (ts.grad(loss, has_aux=True), ts.jit(ts.grad(loss, has_aux=True))):
        g, rows = run(x)
        np.testing.assert_array_equal(g.numpy(), rows.numpy().sum(axis=0))
        assert not np.array_equal(rows.numpy()[0], rows.numpy()[1])
        assert not np.array_equal(rows.numpy()[1], rows.numpy()[2])
    again = run(x)[1]
    assert not np.array_equal(again.numpy(), rows.numpy())


# --- map, reduce, associative_scan ------------------------------------------------------------
@pytest.mark.row("PAR-01")
def test_map_is_a_list_comprehension(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 3)), rng.standard_normal(4)

    def f(x: Any) -> Any:
        return {"y": ts.exp(x[0]) * x[1], "n": ts.sum(x[0])}

    out = ts.map(f, (t64(a), t64(b)))
    rows = [f((t64(x), t64(y))) for x, y in zip(a, b, strict=True)]
    for k in ("y", "n"):
        assert_close(out[k].numpy(), np.stack([r[k].numpy() for r in rows]), n=3)
    assert ts.gradcheck(lambda v: ts.map(ts.tanh, v), (t64(a),))
    with pytest.raises(ArgumentError, match="at least one tensor"):
        ts.map(f, ())


@pytest.mark.row("PAR-02")
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13])
def test_reduce_is_functools_reduce(n: int, rng: np.random.Generator) -> None:
    xs = rng.standard_normal((2, n, 2, 2)) * 0.5
    got = ts.reduce(lambda a, b: a @ b, t64(xs), axis=1)
    want = functools.reduce(np.matmul, np.moveaxis(xs, 1, 0))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-14)
    assert ts.gradcheck(lambda v: ts.reduce(lambda a, b: a @ b, v, axis=1), (t64(xs[:, :3]),))


@pytest.mark.row("PAR-02")
def test_reduce_has_a_fixed_tree(rng: np.random.Generator) -> None:
    """Bit for bit the same eager, compiled and batched, and the tree that the docs state."""
    xs = (rng.standard_normal(11) * 10.0 ** rng.integers(-6, 6, 11)).astype(np.float32)
    x = ts.tensor(xs)
    add = lambda a, b: a + b  # noqa: E731
    first = ts.reduce(add, x).numpy()
    for other in (ts.jit(lambda v: ts.reduce(add, v))(x), ts.reduce(add, x)):
        np.testing.assert_array_equal(other.numpy(), first)
    many = ts.vmap(lambda v: ts.reduce(add, v))(ts.stack([x, x]))
    np.testing.assert_array_equal(many.numpy(), [first, first])
    p = [xs[0] + xs[1], xs[2] + xs[3], xs[4] + xs[5], xs[6] + xs[7], xs[8] + xs[9], xs[10]]
    want = ((p[0] + p[1]) + (p[2] + p[3])) + (p[4] + p[5])
    np.testing.assert_array_equal(first, want)
    with pytest.raises(ShapeError, match="extent of at least 1"):
        ts.reduce(add, ts.zeros((0,)))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_associative_scan_is_a_prefix(n: int, rng: np.random.Generator) -> None:
    a, b = rng.uniform(0.5, 1.0, (n, 2)), rng.standard_normal((n, 2))

    def linear(p: tuple, q: tuple) -> tuple:
        """Composition of x -> a x + b."""
        return p[0] * q[0], q[0] * p[1] + q[1]

    _, got = ts.associative_scan(linear, (t64(a), t64(b)))
    x, want = np.zeros(2), []
    for i in range(n):
        x = a[i] * x + b[i]
        want.append(x)
    assert_close(got, np.array(want), n=2 * n, scale=n)
    assert ts.gradcheck(lambda u, v: ts.associative_scan(linear, (u, v))[1], (t64(a), t64(b)))
    rows = ts.associative_scan(lambda p, q: p + q, t64(b), axis=1)
    assert_close(rows, np.cumsum(b, axis=1), n=2)


# --- cond -------------------------------------------------------------------------------------
def branchy(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return ts.cond(p, lambda v: ts.sin(v) * w, lambda v: v * v * v, x)


@pytest.mark.parametrize("p", [True, False])
def test_cond_takes_one_branch(p: bool, rng: np.random.Generator) -> None:
    x, w = t64(rng.standard_normal(3)), t64(rng.standard_normal(3))
    want = np.sin(x.numpy()) * w.numpy() if p else x.numpy() ** 3
    for run in (branchy, ts.jit(branchy)):
        assert_close(run(ts.tensor(p), x, w).numpy(), want)
    assert_close(ts.cond(p, lambda v: v, lambda v: -v, x).numpy(), x.numpy() * (1 if p else -1))
    assert ts.gradcheck(functools.partial(branchy, ts.tensor(p)), (x, w), order=2)


def test_cond_runs_only_its_branch() -> None:
    """The other branch would divide the gradient by zero."""
    def f(x: Tensor) -> Tensor:
        return ts.cond(x > 0.0, ts.sqrt, lambda v: v * 2.0, x)

    assert ts.grad(f)(t64(0.0)).item() == 2.0
    assert ts.grad(f)(t64(4.0)).item() == 0.25


def test_cond_under_vmap(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((4, 3)), rng.standard_normal(3)
    flags = np.array([True, False, True, False])
    want = np.stack([np.sin(r) * w if p else r**3 for p, r in zip(flags, x, strict=True)])
    got = ts.vmap(branchy, in_axes=(0, 0, None))(ts.tensor(flags), t64(x), t64(w))
    assert_close(got.numpy(), want)
    one = ts.vmap(branchy, in_axes=(None, 0, None))(ts.tensor(True), t64(x), t64(w))
    assert_close(one.numpy(), np.sin(x) * w)
    g = ts.vmap(ts.grad(lambda p, v: ts.sum(branchy(p, v, t64(w))), argnums=1))(
        ts.tensor(flags), t64(x))
    want = np.stack([np.cos(r) * w if p else 3 * r**2 for p, r in zip(flags, x, strict=True)])
    assert_close(g.numpy(), want)


def test_cond_of_nested_values_and_objects() -> None:
    out = ts.cond(ts.tensor(True), lambda a: {"u": a, "s": "same", "n": None},
                  lambda a: {"n": None, "s": "same", "u": -a}, t64([1.0]))
    assert out["s"] == "same" and out["n"] is None and out["u"].numpy().tolist() == [1.0]


def test_cond_errors_name_both_branches() -> None:
    def low(x: Tensor) -> Tensor:
        return x

    def high(x: Tensor) -> Tensor:
        return ts.sum(x)

    x = ts.ones((2,))
    with pytest.raises(ShapeError) as err:
        ts.cond(ts.tensor(True), low, high, x)
    assert "low (true) and high (false) differ" in str(err.value)
    assert "f32[2] and f32[]" in str(err.value)
    with pytest.raises(ArgumentError, match="the result of <lambda>, the false branch"):
        ts.cond(ts.tensor(True), low, lambda v: (v, v), x)
    with pytest.raises(ArgumentError, match="different Python objects"):
        ts.cond(ts.tensor(True), lambda v: "a", lambda v: "b", x)
    with pytest.raises(DTypeError, match=r"must be a bool scalar, it is bool_\[2\]"):
        ts.cond(x > 0, low, low, x)
    with pytest.raises(DTypeError, match="must be a bool scalar, it is f32"):
        ts.cond(ts.sum(x), low, low, x)


# --- while_loop -------------------------------------------------------------------------------
def newton(a: Tensor) -> Tensor:
    """sqrt(a) by x <- (x + a / x) / 2."""
    return ts.while_loop(lambda x: ts.abs(x * x - a) > 1e-12 * a, lambda x: (x + a / x) * 0.5,
                         ts.ones_like(a) + a)


def test_while_loop_value_and_forward_mode() -> None:
    for run in (newton, ts.jit(newton)):
        assert run(t64(7.0)).item() == pytest.approx(7.0**0.5, rel=1e-12)
    value, t = ts.jvp(newton, (t64(7.0),), (t64(1.0),))
    assert value.item() == pytest.approx(7.0**0.5, rel=1e-12)
    assert t.item() == pytest.approx(0.5 / 7.0**0.5, rel=1e-9)
    second = ts.jvp(lambda a: ts.jvp(newton, (a,), (t64(1.0),))[1], (t64(7.0),), (t64(1.0),))[1]
    assert second.item() == pytest.approx(-0.25 * 7.0**-1.5, rel=1e-6)


def test_while_loop_under_vmap_stops_each_element(rng: np.random.Generator) -> None:
    a = rng.uniform(0.1, 50.0, 6)
    np.testing.assert_allclose(ts.vmap(newton)(t64(a)).numpy(), np.sqrt(a), rtol=1e-12)

    def collatz(n: Tensor) -> Tensor:
        return ts.while_loop(
            lambda s: s[0] != 1,
            lambda s: (ts.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1), (n, 0))[1]

    assert ts.vmap(collatz)(ts.tensor([1, 6, 7, 27])).numpy().tolist() == [0, 8, 16, 111]
    t = ts.vmap(lambda v: ts.jvp(newton, (v,), (t64(1.0),))[1])(t64(a))
    np.testing.assert_allclose(t.numpy(), 0.5 / np.sqrt(a), rtol=1e-7)


def test_while_loop_that_never_runs_gives_its_start() -> None:
    x = t64([1.0, 2.0])
    out = ts.while_loop(lambda v: ts.sum(v) > 10.0, lambda v: v + 1.0, x)
    assert out.numpy().tolist() == [1.0, 2.0] and out is not x
    assert not np.shares_memory(out.numpy(), x.numpy())


def test_while_loop_refuses_reverse_mode_with_a_way_out() -> None:
    with pytest.raises(GradError, match="while_loop has no reverse-mode derivative") as err:
        ts.grad(newton)(t64(2.0))
    assert "ts.scan" in str(err.value) and "test_control_flow.py" in str(err.value)
    count = ts.grad(lambda x: x * ts.cast(  # an integer loop beside it is no obstacle
        ts.while_loop(lambda n: n < 5, lambda n: n + 1, ts.tensor(0)), "f64"))(t64(2.0))
    assert count.item() == 5.0


def test_while_loop_errors() -> None:
    with pytest.raises(ShapeError, match=r"carry.1 is f32\[\] before .* f32\[2\] after"):
        ts.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + ts.ones((2,))), (0, 1.0))
    with pytest.raises(DTypeError, match="the condition must be a bool scalar"):
        ts.while_loop(lambda x: x, lambda x: x, ts.ones((2,)))
    with pytest.raises(ArgumentError, match="the returned carry has structure"):
        ts.while_loop(lambda x: x > 0, lambda x: (x, x), ts.tensor(1.0))


def test_random_draws_in_a_while_loop_differ() -> None:
    def run(x: Tensor) -> Tensor:
        return ts.while_loop(lambda s: s[1] < 3,
                             lambda s: (s[0] * 10.0 + ts.randint(0, 10, (), dtype="f32"),
                                        s[1] + 1), (x, 0))[0]

    ts.random.seed(3)
    digits = {str(int(run(ts.tensor(1.0)).item())) for _ in range(4)}
    assert len(digits) > 1 and any(len(set(d[1:])) > 1 for d in digits)


# --- nesting ----------------------------------------------------------------------------------
def rnn(c: Tensor, xs: Tensor) -> Tensor:
    last, ys = ts.scan(cell, c, xs)
    return ts.sum(last) + ts.sum(ys * ys)


def gated(c: Tensor, xs: Tensor) -> Tensor:
    def step(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = ts.cond(ts.sum(x) > 0.0, lambda a: ts.sin(a) * x, lambda a: a * a + x, s)
        return new, ts.sum(new)

    last, ys = ts.scan(step, c, xs)
    return ts.sum(last * last) + ts.sum(ys)


def stepped(c: Tensor, xs: Tensor) -> Tensor:
    """A while loop beside the scan, in forward mode."""
    scale = ts.while_loop(lambda s: ts.sum(s * s) > 1.0, lambda s: s * 0.5, c)
    return ts.scan(lambda a, x: (a * x + scale, None), c, xs)[0]


def checkpointed(c: Tensor, xs: Tensor) -> Tensor:
    f = ts.checkpoint(lambda s, x: ts.tanh(ts.sin(s) * x + c))
    return ts.sum(ts.scan(lambda s, x: (f(s, x), s), c, xs)[1])


NESTED: dict[str, Callable] = {
    "scan": rnn,
    "cond in scan": gated,
    "checkpoint in scan": checkpointed,
    "scan in vmap": lambda c, xs: ts.vmap(rnn, in_axes=(None, 1))(c, ts.stack([xs, xs * 0.5], 1)),
    "scan in vmap, carry unbatched": lambda c, xs: ts.vmap(
        lambda x: ts.scan(lambda a, b: (a * x + b, a), ts.sum(c), xs[:, 0])[0])(xs[0]),
    "scan in vmap in grad": lambda c, xs: ts.grad(
        lambda v: ts.sum(ts.vmap(rnn, in_axes=(0, None))(ts.stack([v, v * v]), xs)))(c),
    "vmap in scan": lambda c, xs: ts.scan(
        lambda s, x: (ts.vmap(lambda a, b: ts.tanh(a * b))(s, x), None), c, xs)[0],
    "grad in scan": lambda c, xs: ts.scan(
        lambda s, x: (ts.grad(lambda v: ts.sum(ts.sin(v) * x))(s), None), c, xs)[0],
    "scan in cond": lambda c, xs: ts.cond(ts.sum(c * c) > 0.0, rnn, lambda a, b: ts.sum(a), c, xs),
    "cond in vmap": lambda c, xs: ts.vmap(lambda x: ts.cond(
        ts.sum(x) > 0.0, lambda a: ts.sum(ts.sin(a) * c), lambda a: ts.sum(a * a), x))(xs),
    "jvp of scan": lambda c, xs: ts.jvp(rnn, (c, xs), (ts.cos(c), xs))[1],
    "jvp of grad of cond in scan": lambda c, xs: ts.jvp(
        ts.grad(gated), (c, xs), (ts.cos(c), xs))[1],
    "jit of grad": lambda c, xs: ts.jit(ts.grad(gated))(c, xs),
    "grad of map": lambda c, xs: ts.grad(lambda v: ts.sum(ts.map(lambda x: ts.tanh(x * v), xs)))(c),
    "scan in scan": lambda c, xs: ts.scan(
        lambda s, x: (ts.scan(lambda t, y: (ts.tanh(t * x + y * c), None), s, xs)[0], None),
        c, xs)[0],
}


@pytest.mark.row("PAR-05")
@pytest.mark.parametrize("name", NESTED)
def test_nested_control_flow_is_its_differences(name: str, rng: np.random.Generator) -> None:
    c, xs = 0.5 * rng.standard_normal(2), 0.5 * rng.standard_normal((3, 2))
    assert ts.gradcheck(NESTED[name], (t64(c), t64(xs)))


def test_while_in_jvp_with_scan(rng: np.random.Generator) -> None:
    c, xs = t64([3.0, 4.0]), t64(rng.standard_normal((3, 2)))
    assert ts.gradcheck(stepped, (c, xs), modes=("forward",))


@pytest.mark.parametrize("name", ["scan", "cond in scan", "scan in vmap", "checkpoint in scan"])
def test_second_order_through_control_flow(name: str, rng: np.random.Generator) -> None:
    c, xs = 0.5 * rng.standard_normal(2), 0.5 * rng.standard_normal((2, 2))
    assert ts.gradcheck(NESTED[name], (t64(c), t64(xs)), order=2)


def test_graphs_with_loops_print_verify_and_hash(rng: np.random.Generator) -> None:
    from tessera.graph.ir import verify

    def build() -> Any:
        return ts.grad(gated).graph(t64(np.ones(2)), t64(np.ones((3, 2))))

    graph = build()
    verify(graph)
    text = ir(graph)
    assert "scan(" in text and "cond(" in text and "graph step_vjp" in text
    assert graph.hash == build().hash
    other = ts.grad(lambda c, xs: gated(c * 2.0, xs)).graph(t64(np.ones(2)), t64(np.ones((3, 2))))
    assert other.hash != graph.hash


def test_rows_that_take_another_branch_have_no_share_in_its_derivative():
    """ts.vmap computes both branches for all rows: where one is not taken its derivative may be
    infinite, and 0 times that NaN. Then grad(vmap(f)) would not be vmap(grad(f))."""
    def f(x, s):
        return ts.cond(x > 0, lambda x: s * ts.log(x) + ts.sqrt(x), lambda x: 0.0 * x + s, x)

    def total(x, s):
        return ts.sum(ts.vmap(f, in_axes=(0, None))(x, s))

    x, s = ts.tensor([4.0, 0.0, -1.0, 2.0]), ts.tensor(3.0)
    rows = ts.vmap(ts.grad(f, argnums=(0, 1)), in_axes=(0, None))(x, s)
    z = np.array([4.0, 2.0])
    for slopes in (ts.grad(total, argnums=(0, 1))(x, s), ts.jit(ts.grad(total, (0, 1)))(x, s)):
        np.testing.assert_allclose(slopes[0].numpy()[[0, 3]], 3 / z + 0.5 / np.sqrt(z), rtol=1e-6)
        assert slopes[0].tolist()[1:3] == [0.0, 0.0]
        np.testing.assert_allclose(slopes[0].numpy(), rows[0].numpy(), rtol=1e-6)
        np.testing.assert_allclose(slopes[1].item(), np.log(z).sum() + 2, rtol=1e-6)
