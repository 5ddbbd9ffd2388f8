"""What programs send between GPUs lies in windows of NCCL, where all ranks send from one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_gpu_programs import on_ranks, placed, values
from tessera.mesh.ranks import windows
from tessera.mesh.sharding import sharded_graph
from tessera.runtime import device as devices
from tessera.runtime import memory_pools
from tessera.runtime.window_memory import WindowBuffer, _free


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a few bytes are worth a window."""
    monkeypatch.setattr(sharded_graph, "LEAST_WINDOW_BYTES", 1)


def steps(mesh: Any, x: np.ndarray, calls: int = 3) -> tuple[np.ndarray, str]:
    """A program that sends from its temporaries, a few times; and its plan."""
    f, given = ts.jit(lambda x: ts.sum(x * x, axis=0) * 2.0), placed(mesh, x, "rows")
    for _ in range(calls):
        y = f(given)
    return y.numpy(), str(f.plan)


def run(n: int, x: np.ndarray, program: Callable[[Any, np.ndarray], Any] = steps) -> list[str]:
    """The plans of all ranks, whose results are right."""
    plans = []
    for y, plan in on_ranks(n, lambda mesh: program(mesh, x)):
        np.testing.assert_allclose(y, 2 * (x * x).sum(0), rtol=1e-6)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("n", [2, 3])
def test_a_program_opens_its_temporaries_once(gpus, nccl, rng, small, n):
    (x,) = values(rng, (3 * n, 12))
    plans = run(n, x)
    assert all("through NCCL, in windows" in plan for plan in plans)
    assert sorted(rank for rank, _, _ in nccl.library.opened) == list(range(n))
    assert len({nbytes for _, _, nbytes in nccl.library.opened}) == 1


def test_memory_goes_with_its_windows(driver, nccl):
    made = WindowBuffer(64, devices.device(0), nccl.library)
    made.windows += [(1, 2), (3, 4)]
    assert memory_pools.LIVE[0, made.pointer] == 64
    _free(nccl.library, made.pointer, made.windows, 0)
    assert nccl.library.freed == [made.pointer] and nccl.library.closed == [(1, 2), (3, 4)]
    assert (0, made.pointer) not in memory_pools.LIVE and driver.waits  # for what reads it


def test_short_messages_do_not_pay(gpus, nccl, rng):
    (x,) = values(rng, (4, 4))
    assert all("in windows" not in plan for plan in run(2, x)) and not nccl.library.opened


def test_a_plan_says_windows_where_nccl_gave_some(gpus, nccl, rng, small, monkeypatch):
    monkeypatch.setattr(nccl, "open_window", lambda by, memory: None)
    (x,) = values(rng, (4, 4))
    assert all("through NCCL" in plan and "in windows" not in plan for plan in run(2, x))


def test_arguments_and_results_alone_need_none(gpus, nccl, rng, small):
    """There are no temporaries, and no window of nothing is opened."""
    (x,) = values(rng, (4, 8))

    def program(mesh: Any) -> tuple[np.ndarray, str, int]:
        f = ts.jit(lambda x: ts.shard(x, None))
        y = f(placed(mesh, x, "rows")).numpy()
        return y, str(f.plan), f._last.program.on_gpu.program.plan.temporary_bytes

    for y, plan, nbytes in on_ranks(2, program):
        np.testing.assert_array_equal(y, x)
        assert "through NCCL" in plan and "in windows" not in plan and nbytes == 0
    assert not nccl.library.opened


def test_parts_of_unequal_extents_lie_elsewhere(gpus, nccl, rng, small):
    (x,) = values(rng, (70, 40))  # 24, 23, 23 rows: other temporaries
    def program(mesh: Any, x: np.ndarray) -> tuple[np.ndarray, str]:
        f, given = ts.jit(lambda x: ts.sum(ts.sort(x * x, axis=1), axis=0)), placed(mesh, x, "rows")
        return 2.0 * f(given).numpy(), str(f.plan)

    for y, plan in on_ranks(3, lambda mesh: program(mesh, x)):
        np.testing.assert_allclose(y, 2 * np.sort(x * x, 1).sum(0), rtol=1e-5)
        assert "through NCCL" in plan and "in windows" not in plan
    assert not nccl.library.opened


def test_one_rank_without_them_is_enough(gpus, nccl, rng, small, monkeypatch):
    (x,) = values(rng, (4, 4))
    nccl.library.without = {1}  # an older NCCL
    assert all("in windows" not in plan for plan in run(2, x))
    nccl.library.without = set()

    def program(mesh: Any, x: np.ndarray) -> Any:
        with ts.config.scope(comm_windows=ts.dist.rank() != 1):
            return steps(mesh, x)

    assert all("in windows" not in plan for plan in run(2, x, program))
    monkeypatch.setattr(windows, "launched_size", lambda: 2)  # on two machines
    assert all("in windows" not in plan for plan in run(2, x))
    assert not nccl.library.opened


def test_other_settings_find_the_memory_again(gpus, nccl, rng, small):
    """The ranks are not asked again: settings may be those of one rank alone."""
    (x,) = values(rng, (4, 4))

    def program(mesh: Any, x: np.ndarray) -> tuple[np.ndarray, str]:
        f, given = ts.jit(lambda x: ts.sum(x * x, axis=0) * 2.0), placed(mesh, x, "rows")
        f(given)
        if ts.dist.rank() == 0:
            with ts.config.scope(debug=True):
                f(given)
        else:
            f(given)
        return f(given).numpy(), str(f.plan)

    assert all("in windows" in plan for plan in run(2, x, program))
    assert len(nccl.library.opened) == 2


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_sums_that_are_added_are_sent_from_one_place_by_all_ranks(gpus, nccl, rng, small, kind):
    """A table that is both ends of a model: one gradient is rounded when it is summed, the other is
    not. The first rank used to add the first to its term of the second, and the others did not."""
    (x,) = values(rng, (6, 96))

    def program(mesh: Any) -> tuple[np.ndarray, str, str]:
        def f(x: Any, p: Any) -> Any:
            first = ts.cast(ts.cast(ts.sum(x, axis=0), "bf16"), "f32")
            total = first + ts.sum(ts.sort(x * x, axis=1), axis=0)
            return total if kind == "reduce_scatter" else total * p

        g, given = ts.jit(f), placed(mesh, x, "rows")
        y = g(given, placed(mesh, np.ones(96, np.float32), "whole")).numpy()
        program = g._last.program
        assert "= term" not in str(program)
        return y, str(g.plan), program.on_gpu.sent_places[0]

    found = on_ranks(3, program)
    want = x.sum(0).astype(ts.numerics.as_type("bf16").dtype.numpy).astype(np.float32) \
        + np.sort(x * x, 1).sum(0)
    for y, plan, places in found:
        np.testing.assert_allclose(y, want, rtol=1e-2, atol=1e-5)
        assert kind in plan and "in windows" in plan and places == found[0][2]


def test_a_number_that_is_added_to_a_sum_of_ranks_is_a_term_as_before(gpus, nccl, rng):
    """It has fewer axes than the sum, as the epsilon of a normalization whose rows are split."""
    (x,) = values(rng, (4, 6))
    normed = ts.jit(lambda x, eps: x * ts.rsqrt(ts.mean(x * x, axis=-1, keepdims=True) + eps))
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1)
    for y in on_ranks(2, lambda mesh: normed(
            placed(mesh, x, "columns"), placed(mesh, np.float32(1), "whole")).numpy()):
        np.testing.assert_allclose(y, want, rtol=1e-5)


@pytest.mark.parametrize("n, windows", [(4, "all"), (4, "none"), (4, "none of NCCL"), (2, "all")])
def test_parts_of_parameters_are_gathered_from_where_all_ranks_reach_them(
        gpus, nccl, rng, small, monkeypatch, n, windows):
    """Of four ranks; of two the copy would take longer than it saves."""
    if windows == "none of NCCL":
        monkeypatch.setattr(nccl, "open_window", lambda by, memory: None)
    x, *weights = values(rng, (n, 8), *[(8, 8)] * 3)

    def program(mesh: Any) -> tuple[np.ndarray, list[str], str]:
        def f(weights: list, x: Any) -> Any:
            for w in weights:
                x = ts.tanh(x @ w)
            return x

        made, given = ts.jit(f), ts.dist.fsdp([ts.tensor(w) for w in weights], "x", mesh)
        for _ in range(3):
            y = made(given, placed(mesh, x, "rows"))
        plan = made._last.program.on_gpu.program.plan
        sources = [plan.region(o.name).block for s in plan.steps if s.kind == "exchange"
                   for o in s.reads]
        return y.numpy(), sources, str(made.plan)

    want = x
    for w in weights:
        want = np.tanh(want @ w)
    with ts.config.scope(comm_windows=windows != "none"):
        found = on_ranks(n, program)
    for y, sources, plan in found:
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
        assert len(sources) == 3 and ("in windows" in plan) == (windows == "all")
        assert ({*sources} == {"temporaries"}) == (windows == "all" and n == 4)
