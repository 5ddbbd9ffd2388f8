"""Ops outside of traces on the host: calls like ones before run as programs that were written for
them, and are what they were."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tessera as ts
from counting import python_calls
from tessera import hooks, wide_arrays
from tessera.errors import ArgumentError, AxisError, NumericsError
from tessera.graph import eager_forms, trace
from tessera.graph.host_programs import host_program
from tessera.graph.operand import literal

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def unmet() -> None:
    for calls in eager_forms.CALLS.values():
        calls.forget()


@contextmanager
def the_long_way() -> Iterator[list[str]]:
    """With an observer every op goes it. The names of the ops."""
    ran: list[str] = []

    def see(op: Any, *rest: Any) -> None:
        ran.append(op.name)

    hooks.eager_ops.append(see)
    try:
        yield ran
    finally:
        hooks.eager_ops.remove(see)


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> ts.Tensor:
    return ts.tensor(rng.standard_normal(shape).astype(np.float32), dtype)


# Of x [6, 8], w [6, 8], b [8], s [6, 6] and indices i [4] below 6; the same in other types
CALLS: dict[str, Call] = {
    "add": lambda x, w, b, s, i: x + w, "a number": lambda x, w, b, s, i: 2.5 - x,
    "an integer": lambda x, w, b, s, i: x * 3, "broadcast": lambda x, w, b, s, i: x * b,
    "matmul": lambda x, w, b, s, i: s @ x, "transposed": lambda x, w, b, s, i: x @ w.mT,
    "compare": lambda x, w, b, s, i: x > 0.25, "negative": lambda x, w, b, s, i: -x,
    "power": lambda x, w, b, s, i: x ** 2, "divide": lambda x, w, b, s, i: x / w,
    "mod": lambda x, w, b, s, i: x % 0.5, "abs": lambda x, w, b, s, i: abs(x),
    "where": lambda x, w, b, s, i: ts.where(x > w, x, w), "clip":
    lambda x, *o: ts.clip(x, -0.5, 0.5), "exp": lambda x, *o: ts.exp(x),
    "gelu": lambda x, *o: ts.gelu(x), "silu": lambda x, *o: ts.silu(x),
    "relu": lambda x, *o: ts.relu(x), "round": lambda x, *o: ts.round(x, 2),
    "cast": lambda x, *o: ts.cast(x, "f16"), "astype": lambda x, *o: x.astype(ts.bf16),
    "a policy": lambda x, *o: ts.cast(x, f"{x.dtype} @saturate"), "to integers":
    lambda x, *o: ts.cast(x, "int32"), "sum": lambda x, *o: ts.sum(x),
    "sum of rows": lambda x, *o: ts.sum(x, axis=-1), "two axes": lambda x, *o: x.sum((0, 1)),
    "mean": lambda x, *o: x.mean(axis=0, keepdims=True), "var": lambda x, *o: ts.var(x, axis=1),
    "max": lambda x, *o: x.max(-1), "argmax": lambda x, *o: ts.argmax(x, axis=1),
    "cumsum": lambda x, *o: ts.cumsum(x, axis=1), "sort": lambda x, *o: ts.sort(x, axis=0),
    "top_k": lambda x, *o: ts.top_k(x, 3), "softmax": lambda x, *o: ts.softmax(x, axis=-1),
    "logsumexp": lambda x, *o: ts.logsumexp(x, axis=0),
    "rmsnorm": lambda x, w, b, s, i: ts.rmsnorm(x, b), "layernorm":
    lambda x, w, b, s, i: ts.layernorm(x, b, b), "reshape": lambda x, *o: x.reshape(4, -1),
    "transpose": lambda x, *o: ts.transpose(x, (1, 0)), "flip": lambda x, *o: ts.flip(x, (0,)),
    "row": lambda x, *o: x[3], "rows": lambda x, *o: x[1:4], "columns": lambda x, *o: x[:, 2:5],
    "steps": lambda x, *o: x[::-2], "new axis": lambda x, *o: x[:, None], "dots":
    lambda x, *o: x[..., 1], "gather": lambda x, w, b, s, i: x[i], "take":
    lambda x, w, b, s, i: ts.take(x, i, axis=0), "index": lambda x, *o: x[2, 3],
    "concatenate": lambda x, w, b, s, i: ts.concatenate([x, w], axis=1),
    "stack": lambda x, w, b, s, i: ts.stack((x, w)), "split": lambda x, *o: ts.split(x, 2, axis=1),
    "pad": lambda x, *o: ts.pad(x, ((1, 0), (0, 2))), "tile": lambda x, *o: ts.tile(x, (1, 2)),
    "broadcast_to": lambda x, w, b, s, i: ts.broadcast_to(b, (3, 8)),
    "zeros_like": lambda x, *o: ts.zeros_like(x), "tril": lambda x, *o: ts.tril(x),
    "einsum": lambda x, w, b, s, i: ts.einsum("ij,kj->ik", x, w),
    "outer": lambda x, w, b, s, i: ts.outer(b, b), "one_hot":
    lambda x, w, b, s, i: ts.one_hot(abs(i), 7),
    "numpy": lambda x, w, b, s, i: np.maximum(x, w), "a list": lambda x, *o: x[0] + [1.0] * 8,
    "mean squared": lambda x, w, b, s, i: ts.mse(x, w),
    "index_put": lambda x, w, b, s, i: ts.index_put(x, 2, b),
    "divmod": lambda x, w, b, s, i: divmod(x, 2.0)}


def operands(rng: np.random.Generator, dtype: str) -> tuple[ts.Tensor, ...]:
    x, w, b, s = (drawn(rng, *n, dtype=dtype) for n in ((6, 8), (6, 8), (8,), (6, 6)))
    return x, w, b, s, ts.tensor(rng.integers(-6, 6, 4), "int64")


def parts(value: Any) -> list[ts.Tensor]:
    return [value] if isinstance(value, ts.Tensor) else [t for v in value for t in parts(v)]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_like_ones_before_give_the_same_bits(name: str, dtype: str,
                                                   rng: np.random.Generator) -> None:
    for _ in range(6):
        given = operands(rng, dtype)
        got = parts(CALLS[name](*given))
        with the_long_way() as ran:
            want = parts(CALLS[name](*given))
        assert ran or got[0] is given[0]  # x.astype(its own type)
        for g, y in zip(got, want, strict=True):
            assert (type(g), g.type, g.shape, g.is_param, g.name, g.scale) == (
                type(y), y.type, y.shape, y.is_param, y.name, y.scale)
            assert g.array.tobytes() == y.array.tobytes()
            assert (g.array.strides, g.array.dtype) == (y.array.strides, y.array.dtype)
            for x in given:
                assert np.may_share_memory(g.array, x.array) == np.may_share_memory(
                    y.array, x.array)


NEVER = {"a list", "a policy"}  # of a long list; a copy that is no op


@pytest.mark.parametrize("name", sorted({*CALLS} - NEVER))
def test_no_op_runs_in_a_call_like_ones_before(name: str, monkeypatch: pytest.MonkeyPatch,
                                               rng: np.random.Generator) -> None:
    given = operands(rng, "f32")
    for _ in range(2 * eager_forms.MEETINGS):
        CALLS[name](*given)
    monkeypatch.setattr(trace, "run_eager", lambda *a: pytest.fail(f"{a[0]} goes the long way"))
    CALLS[name](*operands(rng, "f32"))


def test_such_a_call_is_short(rng: np.random.Generator) -> None:
    x, w = drawn(rng, 6, 8), drawn(rng, 6, 8)
    for run, most in ((lambda: x + w, 16), (lambda: x.reshape(8, 6), 20), (lambda: x[2:4], 24)):
        for _ in range(4):
            run()
        assert python_calls(run) <= most


def test_what_values_decide_is_looked_at_each_time(rng: np.random.Generator) -> None:
    x, labels = drawn(rng, 4, 5), ts.tensor([0, 1, 4, 2])
    at, mask = ts.tensor([0, 3]), ts.tensor([True, False, True, True])
    whole, powers = ts.tensor([1, 2]), ts.tensor([2, 3])
    for _ in range(6):
        ts.cross_entropy(x, labels), x[at], ts.quantile(x, at * 0.1), ts.unique(labels)
        assert x[mask].shape[0] == int(np.asarray(mask).sum())
        whole ** powers
        mask = ts.tensor(rng.integers(0, 2, 4).astype(bool))
    with pytest.raises(ArgumentError, match="label 5 is outside"):
        ts.cross_entropy(x, ts.tensor([0, 1, 5, 2]))
    with pytest.raises(AxisError, match="index 9"):
        x[ts.tensor([0, 9])]
    with pytest.raises(ArgumentError, match="quantiles are in"):
        ts.quantile(x, ts.tensor([0.5, 1.5]))
    with pytest.raises(ArgumentError, match="negative power"):
        whole ** ts.tensor([1, -1])
    with pytest.raises(AxisError, match="index 4 is outside axis 0"):
        x[4]


def refused(x: ts.Tensor) -> ts.Tensor:
    if not x.traced and (x.numpy() < 0).any():
        raise ArgumentError("below 0")
    return x + 1.0


@pytest.mark.parametrize("fn", [
    refused, lambda x: x + 1.0 if x.traced else x * 2.0,
    lambda x: ts.sum(x, axis=0 if x.traced else 1), lambda x: (x, x + 1.0), lambda x: 3,
    lambda x: ts.broadcast_to(literal(1.0, x), (4, 4)), lambda x: x + float(ts.sum(x)),
    lambda x: ts.dropout(x, 0.5), lambda x: ts.param(x + 1.0), lambda x: x.astype("int4")])
def test_what_has_no_program(fn: Callable[[ts.Tensor], Any], rng: np.random.Generator) -> None:
    x = ts.tensor(rng.random((4, 4)).astype(np.float32))
    assert host_program("f", fn, (x,), {}) is None
    assert host_program("f", lambda x: x + 1.0, (x,), {}) is not None


def test_numbers_that_are_equal_are_not_alike(rng: np.random.Generator) -> None:
    x, n = drawn(rng, 4), ts.tensor([1, 2, 3])
    for _ in range(5):
        for value in (0.0, -0.0, 1, True, 1.0, 2, 2.0):
            got = x * value
            assert np.array_equal(np.signbit(got.array), np.signbit(x.array * np.float32(value)))
            assert (n + value).type == (ts.as_type("f32") if type(value) is float else n.type)
    with pytest.raises(ArgumentError):
        n + 2**70


def test_sentinels_and_observers_see_calls_that_are_known(rng: np.random.Generator) -> None:
    x = ts.tensor(np.array([1.0, -1.0], np.float32))
    for _ in range(5):
        ts.log(x)
    with ts.debug.numerics("raise"), pytest.raises(NumericsError, match="log"):
        ts.log(x)
    seen: list[str] = []
    see = lambda op, *rest: seen.append(op.name)  # noqa: E731
    hooks.timed_ops.append(see)
    try:
        ts.log(x)
    finally:
        hooks.timed_ops.remove(see)
    assert seen == ["log"]
    assert np.isnan(ts.log(x).array[1])


def test_a_trace_records_calls_that_are_known(rng: np.random.Generator) -> None:
    x, w = drawn(rng, 4, 4), drawn(rng, 4, 4)
    f = lambda x, w: ts.sum(ts.tanh(x @ w) * 2.0)  # noqa: E731
    for _ in range(5):
        f(x, w)
    g = ts.grad(f)(x, w)
    c = np.cosh(x.array @ w.array)
    np.testing.assert_allclose(g.array, (2 / c**2) @ w.array.T, rtol=1e-4, atol=1e-4)
    assert ts.jit(f)(x, w).item() == pytest.approx(f(x, w).item(), rel=1e-5)


def test_what_is_made_once_is_written_by_nobody(rng: np.random.Generator) -> None:
    x = drawn(rng, 4, 3)
    for call in (lambda: ts.zeros_like(x), lambda: x * 0.0 + 1.0, lambda: ts.full_like(x, 1.0)):
        for _ in range(6):
            y = call()
            want = float(np.asarray(y.array).flat[0])
            assert (y.array == want).all() and want in (0.0, 1.0)
            y[...] = 7.0


def test_f64_that_nobody_asked_for_is_told_of_each_time(rng: np.random.Generator) -> None:
    x, wide = drawn(rng, 3), ts.tensor(rng.standard_normal(3), "f64")
    for _ in range(6):
        wide * 2.0, x * wide
    unstated = ts.tensor(rng.standard_normal(3))
    assert wide_arrays.is_unstated(unstated * 2.0)
    with pytest.warns(wide_arrays.WideArrayWarning):
        x * unstated


def test_an_overflow_is_no_warning_of_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ts.tensor(np.array([3e38, 1.0], np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(6):
            if i == 5:
                monkeypatch.setattr(trace, "run_eager", lambda *a: pytest.fail("the long way"))
            assert np.isinf((x * 10.0).array[0])
            assert np.isinf(ts.exp(x).array[0])
            assert np.isnan((x / 0.0 * 0.0).array).all()


def test_a_number_that_becomes_infinite_is_warned_of_each_time(rng: np.random.Generator) -> None:
    x = drawn(rng, 3)
    for _ in range(6):
        with pytest.warns(RuntimeWarning):
            x + 1e39


def test_draws_go_on(rng: np.random.Generator) -> None:
    x = drawn(rng, 64)

    def draws() -> list[np.ndarray]:
        ts.random.seed(3)
        return [ts.dropout(x, 0.5).array for _ in range(8)]

    got = draws()
    with the_long_way():
        want = draws()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({a.tobytes() for a in got}) == 8


def test_parameters_and_names_stay_behind(rng: np.random.Generator) -> None:
    x = drawn(rng, 3)
    for _ in range(5):
        x + x
    x.name = "x"
    p = ts.param(x)
    for _ in range(6):
        for y in (x + x, p + p, p + 1.0):
            assert not y.is_param and y.name is None


def test_names_decide_nothing(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(rng, 3)
    for i in range(4):
        x.name = f"x{i}"
        x * 2.0
    x.name = "another"
    monkeypatch.setattr(trace, "run_eager", lambda *a: pytest.fail(f"{a[0]} goes the long way"))
    assert (x * 2.0).name is None


def test_long_lists_and_scales_are_not_kept(rng: np.random.Generator) -> None:
    x = drawn(rng, 100)
    scaled = [ts.quantize(drawn(rng, 4, 4), "fp8_e4m3 @scaled(amax)") for _ in range(8)]
    many = [float(i) for i in range(100)]
    for _ in range(6):
        np.testing.assert_array_equal((x + many).array, x.array + np.asarray(many, np.float32))
        for q in scaled:
            np.testing.assert_array_equal((q * 2.0).array, ts.dequantize(q).array * 2)
    held = [v for c in eager_forms.CALLS.values() for r in c._readers.values()
            for key in (*r.forms, *r.counts) for v in key]
    assert held and not any(isinstance(v, ts.Tensor) or v in many[5:] for v in held)


def test_settings_that_change_are_seen(rng: np.random.Generator) -> None:
    number = eager_forms.SETTINGS_NOW.number
    with ts.config.scope(num_threads=3):
        assert eager_forms.SETTINGS_NOW.number != number
        inner = eager_forms.SETTINGS_NOW.number
    assert eager_forms.SETTINGS_NOW.number == number
    with ts.config.scope(num_threads=3):
        assert eager_forms.SETTINGS_NOW.number == inner


def test_many_forms_take_bounded_memory(rng: np.random.Generator,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_forms, "MOST_FORMS", 8)
    x = drawn(rng, 100)
    for _ in range(6):
        for i in range(100):
            assert x[i].item() == x.array[i]
    readers = [r for c in eager_forms.CALLS.values() for r in c._readers.values()]
    assert max(len(r.forms) for r in readers) <= 9
    assert max(len(r.counts) for r in readers) <= 9


def test_threads_call_at_once(rng: np.random.Generator) -> None:
    given = [operands(rng, "f32") for _ in range(4)]
    with the_long_way():
        want = [(ts.softmax(x + w, axis=-1) @ w.mT).array for x, w, *_ in given]
    wrong: list[Any] = []

    def work(n: int) -> None:
        x, w, *_ = given[n]
        for _ in range(200):
            if not np.array_equal((ts.softmax(x + w, axis=-1) @ w.mT).array, want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
