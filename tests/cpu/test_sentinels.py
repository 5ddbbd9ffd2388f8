"""NaN and infinity sentinels: what is found, what is not, and that off costs nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera import hooks
from tessera.debug import sentinel
from tolerance import assert_close

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("no_findings")


def line_of(fn, text: str) -> int:
    lines, first = inspect.getsourcelines(getattr(fn, "fn", fn))
    return first + next(i for i, line in enumerate(lines) if text in line)


def caught(fn, *args) -> ts.NumericsError:
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as info:
        fn(*args)
    return info.value


def shifted_log(x):
    y = x - 2.0
    z = ts.log(y)  # the bad line
    return ts.sum(z * 3.0)


class TestTheReport:
    @pytest.mark.row("DBG-02")
    def test_it_names_op_line_index_value_and_operands(self):
        f = ts.jit(shifted_log)
        x = ts.tensor([[3.0, 4.0, 5.0], [6.0, 1.5, 7.0]])
        error = caught(f, x)
        assert error.code == "E_NAN_INF"
        assert error.where.file == __file__
        assert error.where.line == line_of(shifted_log, "the bad line")
        text = str(error)
        assert "log: nan in f32[2, 3] at [1, 1], 1 of 6 elements" in text
        assert "operand 0: f32[2, 3], -0.5 to 5, there -0.5" in text
        assert "in shifted_log" in text and "z = ts.log(y)" in text and "hint: log needs" in text

    def test_the_record_in_flag_mode(self):
        f = ts.jit(shifted_log)
        with ts.debug.numerics("flag"):
            for _ in range(2):
                assert np.isnan(f(ts.tensor([1.0, 1.0, 4.0])).item())
            found = ts.debug.flags()
        assert found and found.nan == 4 and found.inf == 0
        first = found.first
        assert (first.op, first.kind, first.index, first.origin) == ("log", "nan", (0,), True)
        assert first.graph == "shifted_log" and np.isnan(first.value) and first.count == 2
        assert list(found.counts) == [("log", str(first.where))]
        assert not ts.debug.flags()  # reading cleared them

    def test_calls_and_random_steps_are_counted(self):
        @ts.jit
        def noisy(x):
            return ts.log(x - 10.0 * ts.uniform(x.shape, low=1.0, high=2.0))

        ts.random.seed(3)
        with ts.debug.numerics("flag"):
            noisy(ts.tensor([100.0]))
            noisy(ts.tensor([100.0]))
            noisy(ts.tensor([5.0]))
            first = ts.debug.flags().first
        assert first.step == 3
        with ts.debug.numerics("flag"):
            noisy(ts.tensor([5.0]))
            assert ts.debug.flags().first.run == first.run + 1

    def test_the_origin_is_named_not_where_it_surfaces(self):
        def overflow(x):
            big = ts.exp(x)
            return big / ts.sum(big)

        error = caught(ts.jit(overflow), ts.tensor([1000.0, 1.0]))
        assert "exp: inf in f32[2] at [0]" in str(error)
        assert error.where.line == line_of(overflow, "ts.exp(x)")

    def test_nan_that_came_in_with_the_data_is_said_so(self):
        f = ts.jit(lambda x: ts.sum(x * 2.0))
        error = caught(f, ts.tensor([1.0, float("nan")]))
        assert "came in with argument x" in str(error) and str(error).startswith("[E_NAN_INF] mul")

    def test_the_argument_that_brought_it_is_named(self):
        """Of nested arguments by its path, of captured tensors by type; of layers in a loop, too,
        but not of what a loop carries."""
        bad, shift = ts.tensor([1.0, float("nan")]), ts.tensor([0.0, float("nan")])
        optimizer = ts.optim.AdamW()
        params = {"blocks": [{"w": ts.ones(2)} for _ in range(3)]}
        state = optimizer.init(params)
        state["v"]["blocks.1.w"] = bad
        grads = ts.map_tree(ts.zeros_like, params)
        step = ts.jit(lambda p, g, s: optimizer.update(p, g, s, 0.1))
        assert "came in with argument s.v.blocks.1.w" in str(caught(step, params, grads, state))
        state["v"]["blocks.1.w"] = -ts.ones(2)
        assert "computed of argument g.blocks.1.w, argument s.step, argument s.v.blocks.1.w\n" in \
            str(caught(step, params, grads, state))
        assert "came in with the captured f32[2]\n" in str(caught(
            ts.jit(lambda x: x + shift), ts.ones(2)))
        layers = {"w": ts.stack([ts.ones(2), bad]), "b": ts.ones((2, 2))}
        deep = ts.jit(lambda p, x: ts.scan(lambda h, p: (h * p["w"] + p["b"], None), x, p)[0])
        for f in (deep, ts.jit(ts.grad(lambda p, x: ts.sum(deep(p, x)))),
                  ts.jit(lambda p, x: ts.cond(x[0] > 0, lambda: x * p["w"][1], lambda: x)),
                  ts.jit(lambda p, x: ts.sum(ts.checkpoint(lambda x: x * p["w"][1])(x)))):
            assert "came in with argument p.w\n" in str(caught(f, layers, ts.ones(2)))
        assert "came in with the data\n" in str(caught(deep, layers, bad))

    def test_what_was_raised_is_not_reported_again(self):
        nan = ts.tensor([float("nan")])
        with ts.debug.numerics("raise"):
            for x in (ts.tensor([-1.0]), nan, nan):
                with pytest.raises(ts.NumericsError):
                    ts.log(x)
        assert not ts.debug.flags()

    def test_the_flag_report_tells_what_an_op_made_from_what_came_in(self):
        f = ts.jit(lambda x: ts.sum(x * 2.0))
        with ts.debug.numerics("flag"):
            f(ts.tensor([float("nan"), float("nan"), 1.0]))
            met = ts.debug.flags()
            ts.log(ts.tensor([-1.0]))
            made = ts.debug.flags()
        assert [op for op, _ in met.counts] == ["data into mul"] and met.nan == 2
        assert "first met by mul: nan" in str(met) and "  data into mul: nan 2 " in str(met)
        assert [op for op, _ in made.counts] == ["log"] and "first made by log: nan" in str(made)
        assert str(made).startswith("numerics: overflow 0 underflow 0 nan 1 inf 0 subnormal 0 "
                                    "(elements, at the op where they arose)")

    def test_low_precision_overflow_is_found_at_its_cast(self):
        f = ts.jit(lambda x: ts.cast(x, ts.f16))
        error = caught(f, ts.tensor([1.0, 1e6]))
        assert "cast: inf in f16[2] at [1]" in str(error) and "@saturate" in str(error)
        with ts.debug.numerics("raise"):
            ts.cast(ts.tensor([1e6]), "f16 @saturate")  # a policy, no finding


class TestWhatIsNoFinding:
    @pytest.mark.parametrize("wrap", [ts.jit, lambda f: f], ids=["jit", "eager"])
    @pytest.mark.parametrize("name", ["softmax", "softmax_safe"])
    def test_masks_of_minus_infinity(self, wrap, name, rng):
        def attend(scores, mask):
            masked = ts.where(mask, scores, -np.inf)
            return getattr(ts, name)(masked + ts.full((4,), 0.0))

        scores = ts.tensor(rng.standard_normal((3, 4)).astype(np.float32))
        mask = ts.tensor(np.tril(np.ones((3, 4), bool)))
        with ts.debug.numerics("raise"):
            out = wrap(attend)(scores, mask).numpy()
        np.testing.assert_allclose(out.sum(-1), 1, rtol=1e-6)

    def test_infinities_that_were_written_down_or_came_in(self):
        with ts.debug.numerics("raise"):
            assert np.isinf(ts.full((2,), -np.inf).numpy()).all()
            x = ts.tensor([np.inf, 1.0])
            assert np.isinf((x + 1.0).numpy()[0])

    def test_a_branch_that_where_does_not_choose(self):
        @ts.jit
        def f(x):
            return ts.where(x > 0, ts.log(x), 0.0)

        with ts.debug.numerics("raise"):
            np.testing.assert_array_equal(f(ts.tensor([0.0, -1.0, 1.0])).numpy(), [0, 0, 0])
        assert not ts.debug.flags()

    def test_the_same_branch_is_found_in_the_gradient_where_it_does_harm(self):
        def f(x):
            return ts.sum(ts.where(x > 0, ts.sqrt(x), 0.0))

        error = caught(ts.grad(f), ts.tensor([0.0, 4.0]))
        assert error.where.line == line_of(f, "ts.sqrt")
        with ts.debug.numerics("raise"):
            safe = ts.grad(lambda x: ts.sum(ts.where(x > 0, ts.sqrt(ts.where(x > 0, x, 1.0)), 0.0)))
            np.testing.assert_allclose(safe(ts.tensor([0.0, 4.0])).numpy(), [0, 0.25])

    def test_what_a_library_function_drops_inside(self):
        logits = ts.tensor([[-np.inf, 1.0, 2.0]])  # log p = -inf where the target is 0: 0 * -inf
        target = ts.tensor([[0.0, 0.5, 0.5]])
        with ts.debug.numerics("raise"):
            loss = ts.cross_entropy(logits, target).item()
            ts.vjp(lambda x: ts.where(x > 0, ts.log(x), 0.0), ts.tensor([0.0, 1.0]))
        p = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
        assert loss == pytest.approx(-0.5 * np.log(p).sum(), rel=1e-6)

    def test_a_masked_row_of_the_safe_softmax(self):
        row = ts.full((1, 4), -np.inf)
        with ts.debug.numerics("raise"):
            for f in (ts.softmax_safe, ts.jit(ts.softmax_safe)):
                np.testing.assert_array_equal(f(row).numpy(), np.zeros((1, 4)))
        assert "softmax" in str(caught(ts.softmax, row))  # NaN there, from no NaN

    @pytest.mark.parametrize("name", [
        "gelu", "silu", "softplus", "sigmoid", "tanh", "relu", "elu", "leaky_relu", "softmax",
        "log_softmax", "softmax_safe", "logsumexp", "logsumexp_safe", "layernorm", "rmsnorm",
        "layernorm_safe", "rmsnorm_safe", "erf", "erfc", "sign", "var", "std", "sort", "cumsum",
        "rotary_embedding",
    ])
    def test_the_library_on_values_up_to_1e4(self, name, rng):
        scale = np.array([1, 1e4, 1e-4, 0, 100])[:, None]
        x = ts.tensor((rng.standard_normal((5, 8)) * scale).astype(np.float32))
        fn = getattr(ts, name)
        with ts.debug.numerics("raise"):
            for f in (fn, ts.jit(lambda x: fn(x))):
                assert np.isfinite(f(x).numpy()).all()
            if name != "std":  # whose derivative at 0 does not exist
                ts.grad(lambda x: ts.mean(fn(x)))(x)


class TestSwallowedValues:
    def test_an_overflow_that_a_division_hides(self):
        f = ts.jit(lambda x: x / ts.exp(x))
        error = caught(f, ts.tensor([1.0, 200.0]))  # 200 / inf = 0, finite and wrong
        assert "exp: inf" in str(error)

    def test_a_nan_that_decides_a_comparison(self):
        f = ts.jit(lambda x: ts.where(ts.log(x) > 0.0, 1.0, 2.0))
        assert "log: nan" in str(caught(f, ts.tensor([-1.0])))

    def test_a_nan_that_an_argmax_hides(self):
        f = ts.jit(lambda x: ts.argmax(ts.sqrt(x)))
        assert "sqrt: nan" in str(caught(f, ts.tensor([-1.0, 2.0])))


class TestEverywhere:
    """Inside gradients, loops, vmap and eager calls the user's line is named."""

    def test_eager(self):
        def eager(x):
            return ts.sqrt(x) + 1.0

        error = caught(eager, ts.tensor([-4.0]))
        assert error.where.line == line_of(eager, "ts.sqrt")
        assert "outside compiled functions" in str(error)

    def test_backward(self):
        def loss(x):
            return ts.sum(ts.abs(x) ** 0.5)

        error = caught(ts.grad(loss), ts.tensor([0.0, 1.0]))
        assert error.where.line == line_of(loss, "ts.abs")
        assert "in grad(loss)" in str(error)
        assert "div in the gradient of sqrt: inf" in str(error)

    def test_backward_of_a_body_names_its_op_not_the_loop(self):
        def loss(x):
            return ts.sum(ts.checkpoint(lambda v: ts.exp(v) * ts.exp(v))(x))

        assert "mul in the gradient of exp: inf" in str(caught(ts.grad(loss), ts.tensor([80.0])))

    def test_six_digits_do_not_hide_what_is_beyond_an_integer(self):
        error = caught(lambda x: ts.acos(x), ts.tensor([0.5, 1.0000001]))
        assert "0.5 to 1.0000001, there 1.0000001" in str(error)
        assert "from -1 to 1" in error.hint

    def test_vmap(self):
        def row(x):
            return ts.sum(ts.log(x))

        error = caught(ts.vmap(row), ts.tensor([[1.0, 2.0], [3.0, -1.0]]))
        assert "log: nan in f32[2, 2] at [1, 1]" in str(error)
        assert error.where.line == line_of(row, "ts.log")

    def test_scan_bodies(self):
        def step(carry, x):
            down = carry - x
            return ts.sqrt(down), carry

        def loop(start, xs):
            return ts.scan(step, start, xs)[0]

        args = ts.tensor(4.0), ts.tensor([0.0, 1.0, 3.0, 5.0])  # 2, 1, sqrt(-2)
        for fn in (loop, ts.jit(loop), ts.grad(loop)):
            error = caught(fn, *args)
            assert "sqrt: nan in f32[]" in str(error), error
            assert error.where.line == line_of(step, "ts.sqrt")

    def test_vjp_and_jvp_outside_of_jit(self):
        x = ts.tensor([-1.0, 2.0])
        assert "log: nan" in str(caught(lambda: ts.vjp(ts.log, x)))
        assert "log: nan" in str(caught(lambda: ts.jvp(ts.log, (x,), (x,))))


class TestSwitching:
    def test_compiled_functions_follow_the_mode(self):
        f = ts.jit(shifted_log)
        bad = ts.tensor([1.0])
        f(bad)
        assert not ts.debug.flags()
        caught(f, bad)
        f(bad)
        with ts.debug.numerics("flag"):
            with ts.debug.numerics("off"):
                f(bad)
            before = ts.debug.flags(clear=False)
            f(bad)
        assert not before.counts.get("log") and ts.debug.flags().nan == before.nan + 1
        ts.debug.numerics("raise")  # as a call it stays
        with pytest.raises(ts.NumericsError):
            f(bad)
        ts.config.set(numerics="off")
        f(bad)

    def test_the_values_are_the_same(self, rng):
        f = ts.jit(lambda x, w: ts.tanh(x @ w) * 2.0)
        x, w = (ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in ((5, 7), (7, 3)))
        plain = f(x, w).numpy()
        with ts.debug.numerics("raise"):
            assert_close(f(x, w), plain, n=7, scale=2 * 7**0.5)

    @pytest.mark.row("DBG-02")
    def test_off_nothing_observes(self):
        x = ts.tensor([1.0])
        with ts.debug.numerics("flag"):
            x + 1.0
        ts.config.set(numerics="off")
        x + 1.0
        lists = (hooks.eager_ops, hooks.nodes, hooks.runs, hooks.exits)
        assert not any(lists)
        assert np.isnan(ts.log(ts.tensor([-1.0])).numpy()).all() and not ts.debug.flags()
        error = caught(ts.jit(shifted_log), ts.tensor([1.0]))  # and on, the op is named
        assert "log: nan" in str(error)
        x + 1.0
        assert not any(lists)

    def test_an_error_leaves_nothing_behind(self):
        f = ts.jit(shifted_log)
        for _ in range(2):
            assert "log: nan" in str(caught(f, ts.tensor([1.0])))
        with ts.debug.numerics("raise"):
            f(ts.tensor([4.0]))

    def test_who_chose_the_mode_is_known(self, fresh_config):
        assert not ts.config.chosen("numerics")
        with ts.config.scope(numerics="off"):
            assert ts.config.chosen("numerics")
        with ts.debug.numerics("flag"):
            with ts.debug.numerics("raise"):
                assert ts.config.numerics == "raise"
            assert ts.config.numerics == "flag" and ts.config.chosen("numerics")
        assert ts.config.numerics == "off" and not ts.config.chosen("numerics")
        fresh_config.setenv("TESSERA_NUMERICS", "flag")
        ts.config.reset()
        with ts.debug.numerics("off"):
            pass
        assert ts.config.chosen("numerics") and ts.config.numerics == "flag"

    def test_a_scope_of_the_settings_switches_too(self):
        f = ts.jit(shifted_log)
        with ts.config.scope(numerics="raise"), pytest.raises(ts.NumericsError):
            f(ts.tensor([1.0]))
        f(ts.tensor([1.0]))
        with ts.config.scope(numerics="raise"), pytest.raises(ts.NumericsError):
            ts.log(ts.tensor([-1.0]))

    def test_a_bad_variable_is_reported_where_it_is_first_needed(self, fresh_config):
        fresh_config.setenv("TESSERA_NUMERICS", "maybe")
        with pytest.raises(ts.ArgumentError, match="TESSERA_NUMERICS='maybe'") as info:
            ts.tensor([1.0]) + 1.0
        assert info.value.code == "E_CONFIG" and "off | flag | raise" in info.value.hint


SCRIPT = """
import tessera as ts

@ts.jit
def f(x):
    return ts.log(x)

f(ts.tensor([1.0, -1.0]))
print("end")
"""


@pytest.mark.row("DBG-03")
@pytest.mark.parametrize("mode, code, says", [("off", 0, ""), ("flag", 0, "log: nan 1"),
                                              ("raise", 1, "NumericsError")])
def test_one_script_under_three_modes(tmp_path, mode, code, says):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    env = {"PYTHONPATH": str(ROOT), "TESSERA_NUMERICS": mode, "PATH": "/usr/bin",
           "TESSERA_CACHE_DIR": str(tmp_path)}
    out = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True)
    assert out.returncode == code
    assert says in out.stderr and (mode != "off" or out.stderr == "")
    assert ("end" in out.stdout) == (mode != "raise")
    if mode != "off":
        assert f"{file}:6" in out.stderr


@pytest.mark.row("DBG-01")
class TestCastCounters:
    def test_overflow_and_underflow_by_line(self):
        with ts.debug.numerics("flag"):
            ts.cast(ts.tensor([100.0, -200.0, 1.0, 1e-4, 0.0, 28.0]), "fp6_e3m2")
            found = ts.debug.flags()
        assert (found.overflow, found.underflow, found.nan, found.inf) == (2, 1, 0, 0)
        ((op, where),) = found.counts
        assert op == "cast to fp6_e3m2" and "test_sentinels.py" in where

    @pytest.mark.parametrize("dtype", ["fp4_e2m1", "fp4_e3m0", "fp6_e2m3", "fp6_e3m2",
                                       "fp8_e4m3", "fp8_e5m2", "f16"])
    @pytest.mark.parametrize("wrap", [ts.jit, lambda f: f], ids=["jit", "eager"])
    def test_the_counts_are_those_of_the_values(self, dtype, wrap, rng):
        x = (rng.standard_normal(500) * 10.0 ** rng.uniform(-12, 12, 500)).astype(np.float32)
        kind = getattr(ts, dtype)
        y = ts.cast(ts.cast(ts.tensor(x), f"{dtype} @saturate"), ts.f32).numpy()
        with ts.debug.numerics("flag"):
            wrap(lambda v: ts.cast(v, f"{dtype} @saturate"))(ts.tensor(x))
            found = ts.debug.flags()
        assert found.underflow == np.count_nonzero((x != 0) & (y == 0))
        assert found.subnormal == np.count_nonzero((y != 0) & (np.abs(y) < kind.tiny))
        # Half a step beyond the maximum still rounds to it.
        half_step = 2.0 ** (np.floor(np.log2(kind.max)) - kind.man - 1)
        beyond = np.abs(x.astype(np.float64)) > kind.max + half_step
        assert found.overflow == np.count_nonzero(beyond) > 0

    def test_nan_from_a_format_without_infinity_is_an_overflow(self):
        with ts.debug.numerics("flag"):
            ts.cast(ts.tensor([1e6, 1.0]), "fp8_e4m3")
            found = ts.debug.flags()
        assert found.overflow == 1 and found.nan == 1 and found.first.op == "cast"


@pytest.mark.row("DBG-04")
class TestVerify:
    def test_in_range_passes_and_out_of_range_raises(self):
        @ts.verify.numerics(stable=True, bounded=[-100, 100])
        def f(x):
            return x * 1.0

        assert f(ts.tensor([100.0, -100.0])).numpy().tolist() == [100, -100]
        with pytest.raises(ts.NumericsError) as info:
            f(ts.tensor([[0.0, 1.0], [101.0, 2.0]]))
        assert "holds 101 at [1, 0], which is outside [-100, 100] (1 of 4" in str(info.value)
        with pytest.raises(ts.NumericsError, match=r"holds nan at \[1\]"):
            f(ts.tensor([0.0, float("nan")]))  # NaN lies in no interval

    def test_stable_speaks_of_finite_arguments_only(self):
        f = ts.verify.numerics(stable=True)(lambda x: ts.exp(x))
        with pytest.raises(ts.NumericsError, match="holds inf, which is not finite"):
            f(ts.tensor(1000.0))
        assert np.isinf(f(ts.tensor(np.inf)).item())

    @pytest.mark.parametrize("order", ["jit outside", "jit inside", "vmap", "grad"])
    def test_stacked_with_other_decorators(self, order):
        check = ts.verify.numerics(bounded=(0, 10))
        square = lambda x: ts.sum(x * x)  # noqa: E731
        f = {"jit outside": lambda: ts.jit(check(square)), "jit inside": lambda: check(
            ts.jit(square)), "vmap": lambda: ts.vmap(check(square)),
            "grad": lambda: ts.grad(check(square))}[order]()
        good, bad = ts.tensor([[1.0, 2.0]]), ts.tensor([[1.0, 5.0]])
        if order != "vmap":
            good, bad = good[0], bad[0]
        f(good)
        with pytest.raises(ts.NumericsError, match="26"):
            f(bad)
        f(good)

    def test_compiled_the_error_names_the_line_that_calls(self):
        check = ts.verify.numerics(bounded=(0, 1))(lambda x: x + 1.0)

        @ts.jit
        def g(x):
            return check(x)

        with pytest.raises(ts.NumericsError) as info:
            g(ts.tensor([3.0]))
        assert info.value.where.line == line_of(g, "return check(x)")

    def test_the_modes(self, fresh_config):
        f = ts.verify.numerics(bounded=[0, 1])(lambda x: x + 1.0)
        x = ts.tensor([3.0])
        with ts.debug.numerics("off"):
            f(x)
        with ts.debug.numerics("flag"), pytest.warns(ts.debug.verify.NumericsWarning, match="4"):
            f(x)
        fresh_config.setenv("TESSERA_NUMERICS", "off")
        ts.config.reset()
        f(x)
        fresh_config.delenv("TESSERA_NUMERICS")
        ts.config.reset()
        with pytest.raises(ts.NumericsError):
            f(x)

    def test_low_precision_results(self):
        f = ts.verify.numerics(bounded=[-1, 1])(lambda x: x * 2)
        with pytest.raises(ts.NumericsError, match="holds 4"):
            f(ts.tensor([2.0], ts.bf16))

    @pytest.mark.parametrize("options", [{}, {"bounded": 3}, {"bounded": [2, 1]},
                                         {"bounded": [0, float("nan")]}])
    def test_what_it_does_not_accept(self, options):
        with pytest.raises(ts.ArgumentError):
            ts.verify.numerics(**options)

    def test_what_it_decorates_stays_reachable(self):
        f = ts.verify.numerics(stable=True)(ts.jit(shifted_log))
        assert f.__name__ == "shifted_log"
        assert str(f.infer(ts.Tensor["N", ts.f32])) == "Tensor[f32]"


@pytest.mark.row("DBG-05")
def test_attention_scores_of_the_seed():
    from math import sqrt

    d = 8

    @ts.verify.numerics(stable=True, bounded=[-100, 100])
    def attention_scores(Q, K):
        return ts.tile.dot(Q, K.T) / sqrt(d)

    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 6, 8)).astype(np.float32)
    out = attention_scores(ts.tensor(q), ts.tensor(k)).numpy()
    np.testing.assert_allclose(out, q.astype(np.float64) @ k.T / sqrt(8), rtol=1e-4, atol=1e-5)
    with pytest.raises(ts.NumericsError):
        attention_scores(ts.tensor(q * 1e3), ts.tensor(k * 1e3))


def test_calls_are_numbered_from_the_first_that_is_watched():
    f, x = ts.jit(lambda x: x + 1), ts.ones((2,))
    sentinel._switch(None)  # as a program begins: what holds is found out in the first call
    before = sentinel._local.run
    f(x)
    assert sentinel._local.run == before
    with ts.debug.numerics("flag"):
        f(x)
    assert sentinel._local.run == before + 1


def test_a_report_names_the_iterations_of_loops():
    """The outermost first; a reverse pass counts as the loop does whose gradient it is."""
    def inner(c, x):
        return ts.while_loop(lambda s: s[1] < 3, lambda s: (s[0] - 1.0, s[1] + 1), (c + x, 0))[0]

    def outer(c, x):
        return ts.log(inner(c, x)), c

    def run(c, xs):
        return ts.scan(outer, c, xs)[0]

    first = caught(ts.jit(run), 1.0, ts.tensor([9.0, 2.0, 2.0])).finding
    assert first.iterations == (("scan", 2),) and first.op == "log"
    assert ", iteration 2 of scan, random step" in str(first)
    wide = caught(ts.jit(lambda c, xs: ts.scan(
        lambda c, x: (ts.while_loop(lambda s: s < 1e38, lambda s: ts.exp(s), c + x), c), c, xs)[0]),
        -1.0, ts.tensor([0.0, 0.0])).finding
    assert wide.iterations == (("scan", 0), ("while_loop", 5)), str(wide)
    back = ts.jit(ts.grad(lambda c, xs: ts.scan(lambda c, x: (c * ts.sqrt(x), None), c, xs)[0],
                          argnums=1))
    assert caught(back, 1.0, ts.tensor([1.0, 0.0, 1.0])).finding.iterations == (("scan", 1),)
    assert caught(ts.jit(ts.log), ts.tensor([-1.0])).finding.iterations == ()


def test_the_gradient_of_equal_eigenvalues_says_so():
    error = caught(ts.grad(lambda a: ts.sum(ts.eigh(a)[1])), ts.eye(2))
    assert "two eigenvalues are equal" in error.hint


def test_a_label_outside_the_classes_is_what_the_hint_asks_for():
    """It is an error where labels are known, and NaN in a compiled function."""
    error = caught(ts.jit(ts.cross_entropy), ts.ones((2, 3)), ts.tensor([0, 3]))
    assert error.finding.index == (1, 0) and "a label outside the classes?" in error.hint


def test_a_nan_of_infinities_names_the_argument_that_holds_them():
    """In a loop's gradient: what is carried has no name, and has nothing to do with it."""
    w = np.ones((3, 2, 2), np.float32)
    w[1, 0, 1] = np.inf
    run = ts.jit(ts.grad(lambda w, x: ts.sum(ts.scan(
        lambda c, w: (ts.tanh(c @ w), None), x, w)[0])))
    error = caught(run, ts.tensor(w), ts.full((2, 2), 0.25))
    assert error.finding.sources == ("argument w",) and error.finding.iterations == (("scan", 1),)
    assert "0 * inf" in error.hint
