"""The mode "flag" on a GPU: calls that nobody waits for are looked at when they have ended."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from sentinel_cases import INJECTED, positive, spoiled, users_kernel
from tessera.runtime import late_checks

pytestmark = pytest.mark.usefixtures("no_findings", "gpu", "apart")


def jitted():
    def logs(x):
        return ts.tanh(ts.log(x))  # here

    return ts.jit(logs, target="cuda")


def test_a_call_waits_for_nothing(driver, rng):
    f, x = jitted(), positive(rng).to("cuda")
    with ts.debug.numerics("flag"):
        f(x)
        driver.late, waits = "kernels", driver.waits
        f(x)
        assert driver.waits == waits and late_checks.pending()
        driver.late = ""


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_the_report_is_of_the_call_that_made_it(driver, on, rng):
    """Its number, its random step and its inputs, though later ones came and an input was written
    since."""
    f, bad = jitted(), spoiled(positive(rng), -3.0).to(on)
    with ts.debug.numerics("flag"):
        f(positive(rng))
        begun = ts.debug.flags()
        assert not begun
        driver.late = "kernels"
        f(bad)
        step = ts.random.get_state().step
        bad[...] = 1.0
        for _ in range(3):
            ts.random.uniform((2,))
            f(positive(rng))
        assert ts.random.get_state().step > step
        driver.late = ""
        found = ts.debug.flags()
    first = found.first
    assert (first.op, first.index, found.nan) == ("log", (3, 5), 1) and first.step == step
    assert "# here" in first.where.text and f"in logs, call {first.run}," in str(first)
    again = ts.debug.replay(first)
    assert again.inputs["operand 0"].numpy()[3, 5] == -3.0
    assert np.isnan(again.results["result 0"].numpy()[3, 5])


def test_calls_are_numbered_as_they_were_made(driver, rng):
    f, runs = jitted(), []
    for value in (-1.0, -2.0):
        with ts.debug.numerics("flag"):
            driver.late = "kernels"
            for x in (positive(rng), spoiled(positive(rng), value), positive(rng)):
                f(x)
            driver.late = ""
            runs.append(ts.debug.flags().first.run)
    assert runs[1] == runs[0] + 3


def test_few_calls_are_unchecked(driver, rng):
    """Each keeps its arguments: the oldest is waited for."""
    f, x = jitted(), positive(rng).to("cuda")
    with ts.debug.numerics("flag"):
        f(x)
        driver.late = "kernels"
        for _ in range(6):
            f(x)
            assert late_checks.pending() <= late_checks.MOST
        driver.late = ""


def test_a_result_that_is_read_shows_what_was_seen(driver, rng):
    f = jitted()
    with ts.debug.numerics("flag"):
        f(spoiled(positive(rng), -1.0)).numpy()
        assert not late_checks.pending()
        assert ts.debug.flags().nan == 1


@pytest.mark.parametrize("leave", [lambda: ts.debug.numerics("off"),
                                   lambda: ts.config.set(numerics="off"),
                                   lambda: ts.debug.numerics("raise")])
def test_what_was_launched_before_the_mode_changes_counts(driver, leave, rng):
    f = jitted()
    ts.config.set(numerics="flag")
    driver.late = "kernels"
    f(spoiled(positive(rng), -1.0))
    leave()
    driver.late = ""
    assert not late_checks.pending()
    assert ts.debug.flags().first.op == "log"


@pytest.mark.parametrize("name", INJECTED)
def test_a_chosen_step_and_element(driver, name, rng):
    fn, value, kind = INJECTED[name]
    f = ts.jit(fn, target="cuda")
    with ts.debug.numerics("flag"):
        driver.late = "kernels"
        runs = []
        for i in range(5):
            f(spoiled(positive(rng), value, (13, 7)) if i == 3 else positive(rng))
        driver.late = ""
        first = ts.debug.flags().first
    assert first.kind == kind and "# here" in first.where.text, runs


def test_a_captured_tensor_is_what_it_was(driver, rng):
    w = spoiled(positive(rng), -1.0)
    f = ts.jit(lambda x: ts.tanh(ts.log(w) * x), target="cuda")
    with ts.debug.numerics("flag"):
        driver.late = "kernels"
        f(positive(rng))
        w[3, 5] = 1.0
        driver.late = ""
        assert ts.debug.flags().first.index == (3, 5)


def test_sentinels_are_where_something_may_be_hidden(rng):
    """A matmul shows what is bad in its operands: the kernels in front of it count nothing."""
    from tessera.graph.cuda import CudaProgram
    from tessera.graph.cuda.program.watched import count_results

    def f(x, w):
        h = ts.cast(ts.tanh(x), ts.bf16)
        return ts.cast(h @ ts.cast(w, ts.bf16), "f32") * 2.0

    types = [ts.Tensor[256, 128, ts.f32], ts.Tensor[128, 64, ts.f32]]
    program = CudaProgram(ts.jit(f).graph(*types), "sm_90a")
    count_results(program)
    counts = {n.group.kind: n.shared.watched_tensors(n.shared.function())
              for n in program.launches}
    assert set(counts) == {"loop", "gemm"} and not counts["loop"] and len(counts["gemm"]) == 1


def test_kernels_of_the_library_are_looked_at_as_ops_are():
    """Where what they make leaves or may be hidden; kernels of the user's everywhere."""
    from tessera.graph.cuda import CudaProgram
    from tessera.graph.cuda.program.node_kernels import NodeLaunch
    from tessera.graph.cuda.program.watched import count_results

    def loss(w, x):
        q = ts.reshape(x @ w, (1, 2, 64, 64))
        return ts.sum(ts.cast(ts.attention(q, q, q), "f32") ** 2)

    def watched(fn, *types):
        program = CudaProgram(ts.jit(fn).graph(*types), "sm_90a")
        count_results(program)
        with ts.debug.numerics("flag"):
            return [n.wanted(lambda name: 256, 0).request.watched for n in program.launches
                    if isinstance(n, NodeLaunch)]

    w, x = ts.Tensor[64, 64, ts.bf16], ts.Tensor[128, 64, ts.bf16]
    assert set(watched(ts.grad(loss), w, x)) == {frozenset()}
    q = ts.Tensor[1, 2, 64, 64, ts.bf16]
    leaves = watched(ts.grad(lambda q, k, v: ts.sum(ts.cast(ts.attention(q, k, v), "f32") ** 2),
                             (0, 1, 2)), q, q, q)
    assert sum(map(len, leaves)) == 3  # dQ, dK, dV
    assert watched(users_kernel, ts.Tensor[64, 96, ts.f32]) == [{"x", "y"}]
