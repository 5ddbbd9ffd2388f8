"""Rows EFF: what a function does beside computing is inferred and can be forbidden."""

from __future__ import annotations

import pytest

import tessera as ts

X = ts.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.row("EFF-01")
class TestRandom:
    def test_inferred(self):
        @ts.jit
        def f(x):
            return ts.dropout(x, 0.5) + ts.normal((4,))

        f(X)
        assert f.effects == {"random"}

    def test_inferred_inside_loops_and_branches(self):
        @ts.jit
        def f(x):
            return ts.scan(lambda c, t: (c + ts.uniform(()) * t, c), ts.tensor(0.0), x)[0]

        f(X)
        assert f.effects == {"random"}

    def test_a_function_of_a_given_key_is_pure(self):
        @ts.pure
        def f(x, key):
            return ts.dropout(x, 0.5, key=key)

        key = ts.next_key()
        assert (f(X, key).numpy() == f(X, key).numpy()).all()
        assert f.effects == frozenset()


class TestPromises:
    def test_pure_returns_what_the_function_returns(self):
        f = ts.pure(lambda x: x * 2.0)
        assert f(X).numpy().tolist() == [2, 4, 6, 8]

    @pytest.mark.parametrize("decorate", [ts.pure, ts.effects("io"),
                                          lambda f: ts.pure(ts.jit(f))])
    def test_an_effect_that_is_not_promised(self, decorate):
        f = decorate(lambda x: ts.dropout(x, 0.5))
        with pytest.raises(ts.EffectError, match="the effect random") as info:
            f(X)
        assert "ts.dropout(x, 0.5)" in info.value.where.text

    def test_effects_inside_loops_count(self):
        @ts.pure
        def f(x):
            def step(c, t):
                ts.debug.print("{}", c)
                return c + t, c

            return ts.scan(step, ts.tensor(0.0), x)[0]

        with pytest.raises(ts.EffectError, match="io"):
            f(X)

    def test_the_promise_holds_under_other_transforms(self):
        f = ts.pure(lambda x: ts.sum(ts.dropout(x, 0.5)))
        for g in (ts.grad(f), ts.jit(lambda x: f(x) + 1.0), ts.vmap(lambda x: f(x[None]))):
            with pytest.raises(ts.EffectError):
                g(X)

    def test_several_effects(self):
        @ts.effects("random", "io")
        def f(x):
            ts.debug.print("")
            return ts.dropout(x, 0.5)

        f(X)
        assert f.effects == {"random", "io"}
        with pytest.raises(ts.ArgumentError, match="no effect 'noise'"):
            ts.effects("noise")
