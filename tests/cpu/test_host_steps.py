"""What a program for GPUs has the host do: printing, verifying, numbers that must fit, appends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import normal
from lowering_cases import apart as apart
from tessera.state.effect import changes

pytestmark = pytest.mark.usefixtures("gpu", "apart")


@pytest.mark.parametrize("late", ["", "copies", "kernels"])
@pytest.mark.parametrize("capture", [False, True])
def test_prints_come_in_order_before_the_call_returns(capture: bool, late: str, driver: Any,
                                                      capsys: Any, rng: Any) -> None:
    def f(x: ts.Tensor, n: int) -> ts.Tensor:
        y = ts.tanh(x @ x)
        ts.debug.print("{:.4f} {} {}", y[0, 0], n, "text")
        y = y * 2.0
        ts.debug.print("{}", ts.cast(y, "bf16"))
        return y

    g = ts.jit(f, target="cuda", capture_graph=capture)
    driver.late = late
    capsys.readouterr()  # the seed
    for n in range(3):
        x = normal(rng, 6, 6)
        y = g(x, n)
        got = capsys.readouterr().out
        f(x, n)
        want = capsys.readouterr().out
        assert got == want and got.count("text") == 1
        np.testing.assert_allclose(y.array, f(x, n).array, rtol=1e-5, atol=1e-6)
        capsys.readouterr()
    assert "print(v" in g.inspect_ir("schedule") and "before the call returns" in g.inspect_ir(
        "schedule")


def test_prints_of_loops_and_batches(capsys: Any, rng: Any) -> None:
    def body(c: ts.Tensor, x: ts.Tensor) -> Any:
        ts.debug.print("c = {:.3f}", c)
        return c + x, c

    xs = normal(rng, 4)
    capsys.readouterr()
    outs = []
    for target in ("cpu", "cuda"):
        ts.jit(lambda xs: ts.scan(body, xs[0], xs), target=target)(xs)
        ts.jit(ts.vmap(lambda x: ts.debug.print("{}", x * 2.0) or x), target=target)(xs)
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and outs[0].count("c = ") == 4


def test_ops_at_once_print_and_a_call_with_a_bad_value_prints_once(capsys: Any, rng: Any) -> None:
    x = normal(rng, 3).cuda()
    capsys.readouterr()
    ts.debug.print("{}", x)
    assert capsys.readouterr().out == f"{x.array}\n"

    def f(x: ts.Tensor) -> ts.Tensor:
        y = ts.log(x - 100.0)
        ts.debug.print("seen {}", y[0])
        return y

    with ts.config.scope(numerics="raise"), pytest.raises(ts.NumericsError):
        ts.jit(f)(x)
    assert capsys.readouterr().out == "seen nan\n"


def test_a_print_in_one_of_two_branches_is_refused(rng: Any) -> None:
    def shown(x: ts.Tensor) -> ts.Tensor:
        ts.debug.print("{}", x)
        return x

    f = ts.jit(lambda x: ts.cond(x[0] > 0.0, shown, lambda x: -x, x), target="cuda")
    with pytest.raises(ts.UnsupportedTargetError, match="print in a branch of cond") as info:
        f(normal(rng, 3))
    assert "test_host_steps.py" in str(info.value)


def test_promises_are_verified(rng: Any) -> None:
    @ts.verify.numerics(stable=True)
    def root(x: ts.Tensor) -> ts.Tensor:
        return ts.sqrt(x)

    f = ts.jit(lambda x: root(x) + 1.0, target="cuda")
    assert np.isfinite(f(ts.ones(4)).array).all()
    with pytest.raises(ts.NumericsError, match="root: the result") as info:
        f(ts.tensor([1.0, -1.0]))
    assert "test_host_steps.py" in str(info.value)


def test_numbers_must_fit() -> None:
    f = ts.jit(lambda x, n: x + n, target="cuda")
    x = ts.tensor(np.arange(3), "int8")
    assert f(x, 5).array.tolist() == [5, 6, 7]
    with pytest.raises(ts.TesseraError, match="300"):
        f(x, 300)


@pytest.mark.parametrize("how", ["read", "call"])
def test_a_full_cache_says_so_when_it_is_waited_for(how: str, driver: Any, rng: Any) -> None:
    @ts.jit(target="cuda")
    def step(cache: ts.KVCache, k: ts.Tensor) -> Any:
        return cache.append(k, k)

    @ts.jit(target="cuda")
    def counted(count: ts.Tensor) -> ts.Tensor:
        changes("append", count, 3, 8)
        return count + 3

    driver.late = "kernels"
    k = normal(rng, 1, 2, 3, 4)
    cache = ts.kv_cache((1, 2, 8, 4)).append(k, k).append(k, k)
    full = counted(ts.tensor(6)) if how == "read" else step(cache, k)
    with pytest.raises(ts.ArgumentError, match="a cache of 8 entries holds 6: 3 more") as info:
        full.item() if how == "read" else step(cache, k)
    assert info.value.code == "E_OVERFLOW" and "test_host_steps.py" in str(info.value)


def test_loops_that_the_host_repeats_print_each_iteration(capsys: Any) -> None:
    def body(c: ts.Tensor) -> ts.Tensor:
        ts.debug.print("c = {}", c[0])
        return c + 1.0

    outs = []
    for target in ("cpu", "cuda"):
        capsys.readouterr()
        ts.jit(lambda x: ts.while_loop(lambda c: ts.sum(c) < 9.0, body, x), target=target)(
            ts.zeros(2))
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and outs[0].count("c = ") == 5
