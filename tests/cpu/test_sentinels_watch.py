"""Sentinels on compiled loops: what they count, what they find as op-by-op running does, and that
a call without a finding runs its loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from sentinel_cases import CASES, QUIET, SHAPE, positive, spoiled
from tessera import hooks
from tessera.graph import execute, run_with_sentinels
from tessera.graph.cpu import LoopInput, LoopOp, LoopOutput, LoopProgram, compile_loops, interpret

pytestmark = pytest.mark.usefixtures("no_findings")


@pytest.fixture
def walks(monkeypatch):
    """Names of the graphs that ran op by op."""
    seen = []
    real = execute.interpret

    def counted(graph, arrays):
        seen.append(graph.name)
        return real(graph, arrays)

    monkeypatch.setattr(execute, "interpret", counted)
    monkeypatch.setattr(run_with_sentinels, "interpret", counted)
    return seen


def by_op(f, *args):
    """The findings of running op by op: an observer makes a graph do so."""
    def nothing(node, ins, outs):
        pass

    hooks.nodes.append(nothing)
    try:
        return findings(f, *args)
    finally:
        hooks.nodes.remove(nothing)


def findings(f, *args):
    ts.debug.flags()
    with ts.debug.numerics("flag"):
        f(*args)
        found = ts.debug.flags()
    first = found.first
    return (first and (first.op, first.where, first.kind, first.index, first.count, first.operands,
                       first.origin, first.step), found.counts)


# --- counts in loops --------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1,), (7,), (33, 5), (64, 96), (5, 1, 40), (3, 9000)])
def test_loops_count_as_the_interpreter_does(shape, rng):
    def op(kind, args, dtype="f32", expr=""):
        return LoopOp(kind, args, dtype, expr)

    bad = "not (abs({0}) <= 3.4028234663852886e38)"
    program = LoopProgram(
        (LoopInput("f32"), LoopInput("f32")),
        (op("map", (0, 1), expr="{0} * {1}"), op("map", (2,), "bool_", bad),
         op("reduce_sum", (2,)), op("map", (4,), "bool_", "{0} > 0.0"),
         op("map", (1,), "bool_", bad), op("map", (2,), "bool_", "isnan({0})")),
        (LoopOutput(2, "f32"), LoopOutput(3, "int64", "count"),
         LoopOutput(5, "int64", "row_count"), LoopOutput(6, "int64", "count"),
         LoopOutput(7, "int64", "count"), LoopOutput(2, "f32", "column_sum")))
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.1] = np.nan
    x[rng.random(shape) < 0.1] = np.inf
    w = x[..., :1].copy()  # stretched along the row, and counted for each of its points
    got, want = compile_loops(program)(x, w, shape=shape), interpret(program, (x, w), shape)
    for i in (1, 2, 3, 4):
        np.testing.assert_array_equal(got[i], want[i])
    assert want[3][0] == (~np.isfinite(np.broadcast_to(w, shape))).sum()


@pytest.mark.parametrize("to", ["bf16", "f16", "fp8_e4m3", "fp8_e5m2", "f16 @saturate",
                                "fp8_e4m3 @saturate", "f32"])
def test_casts_in_loops_count_what_they_lose(to, rng, walks):
    """As the codec does, which counts where a cast runs alone."""
    scale = 2.0 ** rng.integers(*((-180, 180) if to == "f32" else (-149, 127)), SHAPE)
    numbers = rng.uniform(-2, 2, SHAPE) * scale
    numbers = numbers if to == "f32" else numbers.astype(np.float32)
    numbers.flat[:9] = [464, 465, 448, 65519.9, 65520, 57344, 61440, 3.4028e38, 0]
    x = ts.tensor(numbers, "f64" if to == "f32" else "f32")

    @ts.jit
    def f(x):
        y = ts.cast(ts.cast(x + 0.0, to), "f32")
        return ts.where(ts.isfinite(y), y, 0.0)

    first, counts = findings(f, x)
    assert not walks and first is None
    assert counts == by_op(f, x)[1] and sum(c.total for c in counts.values()) > 99
    (lost,) = [c for (op, _), c in counts.items() if op == f"cast to {to}"]
    assert lost.underflow and lost.overflow


def test_rows_count_once(rng):
    """A cast of one number per row beside the whole space."""
    x = ts.tensor((rng.standard_normal(SHAPE) * 1e-7).astype(np.float32))
    f = ts.jit(lambda x: x * ts.cast(ts.cast(ts.max(x, -1, keepdims=True), "fp8_e4m3"), "f32"))
    first, counts = findings(f, x)
    assert first is None and [c.underflow for c in counts.values()] == [SHAPE[0]]


# --- what is found ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_the_blame_is_that_of_running_op_by_op(name, rng):
    fn, value = CASES[name]
    f, x = ts.jit(fn), spoiled(positive(rng), value)
    f(positive(rng))
    got, want = findings(f, x), by_op(f, x)
    assert want[0] is not None and got == want
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as info:
        f(x)
    assert info.value.where == want[0][1]


def _hidden_product(x):
    w = ts.cast(ts.cast(x, "bf16"), "f32")
    return 1.0 / (w @ w.T)


@pytest.mark.parametrize("fn, value", [
    (_hidden_product, 3e38),
    (ts.grad(lambda x: ts.sum(ts.cast(ts.cast(x, "f16") @ ts.full((96, 4), 6e4, "f16"), "f32"))),
     1.0)])  # a constant, but for its shape
def test_products_of_narrow_types_are_looked_at(fn, value, rng):
    """A CPU computes them widened, as values that the graph of the call does not have."""
    f, x = ts.jit(fn), spoiled(positive(rng), value)
    got, want = findings(f, x), by_op(f, x)
    assert want[0] is not None and got == want


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm_and_no_second_run(name, rng, walks):
    f, x = ts.jit(QUIET[name]), positive(rng)
    with ts.debug.numerics("raise"):
        f(x)
    assert findings(f, x)[0] is None
    assert name == "logsumexp" or not walks  # -inf leaves it: looked at op by op, and found right


def test_random_numbers_are_those_of_a_single_run(rng, walks):
    f = ts.jit(lambda x: ts.log(x) * ts.random.uniform(SHAPE))
    x, draws = spoiled(positive(rng), -1.0), []
    for mode in ("off", "flag"):
        ts.random.seed(5)
        with ts.debug.numerics(mode):
            draws.append([f(x).numpy(), f(x).numpy(), ts.random.uniform((3,)).numpy()])
    assert len(walks) == 2
    for a, b in zip(*draws, strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_have_the_bits_of_a_run_without_sentinels(rng):
    f = ts.jit(lambda x: ts.softmax(ts.tanh(x) @ ts.ones((96, 8))) * ts.sum(x, -1, keepdims=True))
    x = positive(rng)
    plain = f(x).numpy()
    for value in (1.0, np.nan):
        y = spoiled(x, value)
        want = f(y).numpy()
        with ts.debug.numerics("flag"):
            np.testing.assert_array_equal(f(y).numpy(), want)
    with ts.debug.numerics("flag"):
        np.testing.assert_array_equal(f(x).numpy(), plain)


def test_graphs_with_effects_run_once(capsys, rng):
    def noisy(x):
        ts.debug.print("sum {}", ts.sum(x))
        return ts.log(x)

    f = ts.jit(noisy)
    with ts.debug.numerics("flag"):
        f(spoiled(positive(rng), -1.0))
    assert capsys.readouterr().out.count("sum") == 1 and ts.debug.flags().nan == 1


def test_a_step_of_training_runs_its_loops(rng, walks):
    """The launches are those of a run without sentinels; nothing runs op by op."""
    def loss(p, x):
        h = ts.rmsnorm(ts.gelu(x @ p["a"]), p["g"])
        return ts.mean((ts.cast(h, "bf16") @ ts.cast(p["b"], "bf16") - x) ** 2)

    @ts.jit
    def step(p, x):
        value, grads = ts.value_and_grad(loss)(p, x)
        return value, {n: p[n] - 0.1 * grads[n] for n in p}

    p = {"a": positive(rng, 96, 64), "g": ts.ones(64), "b": positive(rng, 64, 96)}
    x = positive(rng)
    with ts.debug.numerics("flag"):
        value, _ = step(p, x)
    assert not walks and np.isfinite(value.item())
    plain, watched = step._last.executable.compiled, step._last.executable.watched
    assert [str(u) for u in plain.units] == [str(u) for u in watched.units]
    assert len(watched.steps) < 2 * len(plain.steps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16,
                                   ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("value", [1.0, 3e4, np.inf, -np.inf, np.nan])
def test_arrays_are_looked_at_whatever_their_type_and_range(dtype, value):
    a = np.full((3, 50), np.finfo(np.float32).max if dtype is np.float32 else 240.0).astype(dtype)
    a[1, 7] = value
    wide = a.astype(np.float64)
    with np.errstate(all="ignore"):
        assert run_with_sentinels.is_clean(a, "any") == bool(np.isfinite(wide).all())
        half = bool(np.isfinite(wide[:, ::2]).all())
        assert run_with_sentinels.is_clean(a[:, ::2], "any") == half
        assert run_with_sentinels.is_clean(a, "nan") == (not np.isnan(wide).any())


# --- what a loop carries --------------------------------------------------------------------------
def _reciprocals(n):
    """n = 0 is inf after one iteration and 0 after two."""
    return ts.while_loop(lambda c: c[1] < 4, lambda c: (1.0 / c[0], c[1] + 1), (n, 0))[0]


@pytest.mark.parametrize("wrap", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("loop, iteration", [
    (lambda x: ts.scan(lambda c, x: (1.0 / x, 1.0 / c), 1.0, x)[1], ("scan", 1)),
    (lambda x: ts.scan(lambda c, x: (1.0 / x, 1.0 / c), 1.0, x, reverse=True)[1], ("scan", 1)),
    (lambda x: ts.fori_loop(0, 4, lambda i, c: (1.0 / c[1], c[0]), (x[1], x[1])), ("fori", 0)),
    (lambda x: _reciprocals(x[1]), ("while_loop", 0)),
], ids=["scan", "reverse", "fori", "while"])
def test_an_infinity_that_is_gone_an_iteration_later_counts(loop, iteration, wrap):
    """1 / inf is 0: what made the infinity is named, where it was made."""
    x = ts.tensor([1.0, 0.0, 2.0])
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as error:
        wrap(loop)(x)
    found = error.value.finding
    assert (found.op, found.kind, found.origin) == ("div", "inf", True)
    assert found.iterations[-1][1] == iteration[1]
    assert np.isfinite(loop(x)[0] if iteration[0] == "fori" else loop(x)).all()


@pytest.mark.parametrize("wrap", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_what_an_iteration_drops_of_a_carry_does_not_count(wrap):
    """exp(-1/0) is 0, and an infinity that is replaced is not one of the next iteration."""
    x = ts.tensor([1.0, 0.0, 2.0])

    def kernels(x):
        return ts.scan(lambda c, x: (1.0 / x, ts.exp(-c)), 1.0, x)[1]

    def replaced(x):
        return ts.scan(lambda c, x: (ts.where(x > 1.0, 1.0, 1.0 / x), 1.0 * ts.where(
            c < ts.inf, c, 0.0)), 1.0, x)[1]

    for f in (kernels, replaced):
        assert findings(wrap(lambda x, f=f: f(x)), x)[0] is None


def _constant(x, y):
    return ts.scan(lambda c, _: (c + ts.sum(ts.where(x > 0, y, 0.0)), None), 0.0, length=3)[0]


def _rows(x, y):
    return ts.scan(lambda c, a: (c + ts.where(a[0] > 0, a[1], 0.0), None), 0.0, (x, y))[0]


def _first_carry(x, y):
    return ts.scan(lambda c, _: (ts.where(x > 0, c * 0.5, 0.0), None), y, length=2)[0]


def _branch(x, y):
    return ts.cond(ts.sum(x) > 0, lambda y: ts.where(x > 0, y, 0.0), lambda y: y * 0.0, y)


def _other_branch(x, y):
    return ts.cond(ts.sum(x) < 0, lambda y: y * 1.0, lambda y: x, y)


def _until(x, y):
    return ts.while_loop(lambda c: c[0] < 2, lambda c: (
        c[0] + 1, c[1] + ts.sum(ts.where(x > 0, y, 0.0))), (0, 0.0))[1]


def _nested(x, y):
    return ts.scan(lambda c, _: (ts.fori_loop(0, 2, lambda i, d: d + ts.sum(
        ts.where(x > 0, y, 0.0)), c), None), 0.0, length=3)[0]


@pytest.mark.parametrize("use", [_constant, _rows, _first_carry, _branch, _other_branch, _until,
                                 _nested])
def test_what_a_loop_or_a_branch_does_not_use_is_no_finding(use):
    """It was one where it was made in front of the loop."""
    run = ts.jit(lambda x: use(x, ts.log(x)))
    with ts.debug.numerics("raise"):
        assert np.isfinite(run(ts.tensor([1.0, 0.0, 2.0])).numpy()).all()


@pytest.mark.parametrize("use", [
    lambda y: ts.scan(lambda c, _: (c + ts.sum(1.0 / y), None), 0.0, length=3)[0],
    lambda y: ts.scan(lambda c, a: (c + 1.0 / a, None), 0.0, y)[0],
    lambda y: ts.scan(lambda c, _: (1.0 / c, None), y, length=1)[0],
    lambda y: ts.cond(ts.any(y < 0), lambda y: 1.0 / y, lambda y: y, y),
    lambda y: ts.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, 1.0 / y), (0, y))[1],
    lambda y: ts.scan(lambda c, _: (ts.fori_loop(0, 2, lambda i, d: d + ts.sum(1.0 / y), c), None),
                      0.0, length=3)[0],
])
def test_what_is_hidden_inside_of_a_loop_or_a_branch_counts_where_it_was_made(use):
    run = ts.jit(lambda x: use(ts.log(x)))
    with pytest.raises(ts.NumericsError) as error, ts.debug.numerics("raise"):
        run(ts.tensor([3.0, 0.0, 2.0]))
    assert error.value.finding.op == "log" and error.value.finding.iterations == ()
